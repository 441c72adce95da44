/* SPDX-License-Identifier: Apache-2.0 */
// The tiled kernels on a GPU: all that holds for every device, in managed memory; then every kernel
// at every GQA ratio, many and few sequences, high blocks, graphs.
#include "tests/support/suite_gpu.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static const bool is_kernel = true;

#include "tests/support/tiled_suite.h"

static void set_up(void)
{
    open_session(0);
}

static void tear_down(void)
{
    gpu_session_close(&session);
}

TestSuite(tiled, .init = set_up, .fini = tear_down, .timeout = 300);

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

// ---- every kernel

Test(tiled, serves_every_type_head_dim_and_ratio)
{
    static const enum attn_dtype dtypes[] = { ATTN_DTYPE_BF16, ATTN_DTYPE_FP16 };
    static const int32_t dims[] = { 64, 128, 256 }, ratios[] = { 1, 2, 3, 4, 6, 7, 8, 9, 16, 20 };
    static const int32_t block_sizes[] = { 16, 1, 24, 64, 16, 7, 33 };
    struct random random = { random_seed(5) };
    size_t n = 0;
    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t r = 0; r < COUNT(ratios); r++, n++) {
                struct shape shape = { .dtype = dtypes[t],
                                       .q_heads = 2 * ratios[r],
                                       .kv_heads = 2,
                                       .head_dim = dims[d],
                                       .block_size = block_sizes[n % COUNT(block_sizes)],
                                       .layout = n % 3 == 1 ? SCRATCH : PAGED,
                                       .peak = n % 4 == 3 ? 10 : 0 };
                shape = ragged(&shape);
                struct step step = build(&shape);
                struct outcome whole = run(&step, 16, NULL);
                expect_exact(&step, &whole);
                for (int cut = 0; cut < 4; cut++) {
                    struct outcome cuts = run(&step, 1 + cut * 3, cut % 2 ? &random : NULL);
                    cr_assert(is_same(&whole, &cuts), "%s, head_dim %d, ratio %d, tiles of %d",
                              attn_dtype_name(shape.dtype), shape.head_dim, ratios[r], 1 + cut * 3);
                    free_outcome(&cuts);
                }
                free_outcome(&whole);
                free_step(&step);
            }
}

// ---- company

enum {
    REQUESTS = 160,
    MOST_BLOCKS = 512,
};

// One of the sequences of a step, as a step of its own.
static struct step only(const struct step *const step, const int32_t sequence)
{
    struct step one = *step;
    one.shape.num_seqs = 1;
    one.shape.counts += sequence;
    one.shape.valid += sequence;
    one.q += (size_t) sequence * (size_t) step->shape.q_heads * (size_t) step->shape.head_dim;
    one.list = list_at(step, sequence, 0);
    return one;
}

// Among many sequences a block of threads has all of a sequence's list; alone, many have it.
Test(tiled, has_the_same_bits_alone_and_in_company)
{
    static const int32_t dims[] = { 64, 128, 256 };
    for (size_t d = 0; d < COUNT(dims); d++) {
        static int32_t counts[REQUESTS], valid[REQUESTS];
        struct random random = { random_seed(9) };
        for (int32_t i = 0; i < REQUESTS; i++) {
            const double most = i % 10 == 3 ? MOST_BLOCKS : 30;
            counts[i] = (int32_t) pow(most + 1, random_uniform(&random)) - (i == 7);
            valid[i] = 1 + (int32_t) random_below(&random, 16);
        }
        counts[13] = MOST_BLOCKS;
        const struct shape shape = { .dtype = d == 1 ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16,
                                     .q_heads = 3,
                                     .kv_heads = 1,
                                     .head_dim = dims[d],
                                     .block_size = 16,
                                     .num_seqs = REQUESTS,
                                     .counts = counts,
                                     .valid = valid };
        struct step step = build(&shape);
        struct outcome all = run(&step, MOST_BLOCKS, NULL);
        const size_t row = (size_t) shape.q_heads * (size_t) shape.head_dim;
        for (int32_t i = 3; i < REQUESTS; i += 10) {
            struct step one = only(&step, i);
            struct outcome alone = run(&one, MOST_BLOCKS, NULL), cut = run(&one, 37, NULL);
            expect_exact(&one, &alone);
            cr_expect(is_same(&alone, &cut), "sequence %d", i);
            cr_expect_eq(memcmp(alone.o, all.o + (size_t) i * row, row * sizeof(float)), 0,
                         "head_dim %d, sequence %d of %d blocks", dims[d], i, counts[i]);
            free_outcome(&alone);
            free_outcome(&cut);
        }
        free_outcome(&all);
        free_step(&step);
    }
}

// More lanes than a grid has in y or z, and a NaN in one sequence's q.
Test(tiled, takes_many_sequences)
{
    enum {
        SEQS = 70000,
        BAD = 65537
    };
    static int32_t counts[SEQS], valid[SEQS];
    for (int32_t i = 0; i < SEQS; i++) counts[i] = 0, valid[i] = 16;
    counts[0] = 1;
    const struct shape shape = { .dtype = ATTN_DTYPE_BF16,
                                 .q_heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 64,
                                 .block_size = 16,
                                 .num_seqs = SEQS,
                                 .counts = counts,
                                 .valid = valid };
    struct step step = build(&shape);
    for (int32_t i = 1; i < SEQS; i++) {
        counts[i] = 1;
        *list_at(&step, i, 0) = *list_at(&step, 0, 0);
        memcpy(step.q + (size_t) i * 128, step.q, 256);
    }
    step.q[(size_t) BAD * 128] = NAN_BITS;
    struct outcome out = run(&step, 1, NULL);
    expect_row(&step, &out, 0, 0);
    for (size_t i = 1; i < SEQS; i++)
        cr_assert((i == BAD) == (memcmp(out.o + i * 128, out.o, 512) != 0), "sequence %zu", i);
    free_outcome(&out);
    free_step(&step);
}

// ---- high blocks

enum {
    HIGH_BLOCKS = 6200,
    // One layer's view of an allocation for 80, in elements.
    HIGH_STRIDE = 1435968 / 2,
    HIGH_V = 400000,
};

// The sequence of `step` on blocks of a pool of 8.9 GB, the highest first.
static struct outcome run_high(const struct step *const step, char *const pool)
{
    const struct shape *const s = &step->shape;
    const size_t bytes = (size_t) step->strides.block * 2;
    const struct attn_tiled_dims dims = dims_of(s, step->longest);
    struct outcome out = make_outcome(step);
    struct attn_tiled *tiled = make_state(&dims, &out);
    struct attn_tiled_step_params params = params_of(step);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    int32_t *const list = need((size_t) step->longest * sizeof(*list));
    int32_t *const counts = copy_counts(s->counts, 1);
    for (int32_t i = 0; i < step->longest; i++) {
        const int64_t from = *list_at(step, 0, i) * step->strides.block;
        list[i] = HIGH_BLOCKS - 1 - i * 7;
        char *const to = pool + (size_t) list[i] * HIGH_STRIDE * 2;
        cr_assert_eq(gpu_upload(session.gpu, to, step->k + from, bytes), 0);
        cr_assert_eq(gpu_upload(session.gpu, to + (size_t) HIGH_V * 2, step->v + from, bytes), 0);
    }
    params.k_pool = pool;
    params.v_pool = pool + (size_t) HIGH_V * 2;
    params.num_pool_blocks = HIGH_BLOCKS;
    params.block_stride = HIGH_STRIDE;
    params.token_stride = step->strides.token;
    params.head_stride = step->strides.head;
    params.tile_blocks = list;
    params.tile_block_counts = counts;
    params.last_block_valid_slots = s->valid[0];
    last.num_seqs = 1;
    last.output = out.output;
    last.lse = out.lse;
    begin(tiled, 1);
    fold(tiled, &params);
    finalize(tiled, &last);
    attn_tiled_destroy(&tiled);
    release(list);
    release(counts);
    return out;
}

Test(tiled, follows_blocks_beyond_32_bits)
{
    static const int32_t counts[] = { 20 }, valid[] = { 5 };
    const struct shape shape = { .dtype = ATTN_DTYPE_BF16,
                                 .q_heads = 8,
                                 .kv_heads = 2,
                                 .head_dim = 128,
                                 .block_size = 16,
                                 .num_seqs = 1,
                                 .counts = counts,
                                 .valid = valid };
    const size_t bytes = (size_t) HIGH_BLOCKS * HIGH_STRIDE * 2;
    void *pool;
    if (gpu_alloc(session.gpu, &pool, bytes)) cr_skip_test("the GPU has no %zu bytes", bytes);
    cr_assert_eq(gpu_fill(session.gpu, pool, 0xFF, bytes), 0);
    struct step step = build(&shape);
    struct outcome low = run(&step, 20, NULL), high = run_high(&step, pool);
    expect_exact(&step, &low);
    cr_expect(is_same(&low, &high));
    free_outcome(&low);
    free_outcome(&high);
    free_step(&step);
    gpu_free(session.gpu, pool);
}

// ---- graphs

// Other lists of the same blocks: the third sequence has the first one's, from the last on.
static struct step relist(const struct step *const step, const int32_t *const counts)
{
    struct step other = *step;
    const size_t bytes = 3 * (size_t) step->longest * sizeof(*other.list);
    other.list = memcpy(need(bytes), step->list, bytes);
    other.shape.counts = counts;
    for (int32_t i = 0; i < counts[2]; i++)
        *list_at(&other, 2, i) = *list_at(step, 0, step->longest - 1 - i);
    return other;
}

// A step captured once, for any lists.
Test(tiled, replays_a_captured_step)
{
    static const int32_t counts[] = { 300, 7, 1 }, others[] = { 5, 0, 290 },
                         valid[] = { 16, 16, 16 };
    const struct shape shape = { .dtype = ATTN_DTYPE_BF16,
                                 .q_heads = 4,
                                 .kv_heads = 1,
                                 .head_dim = 128,
                                 .block_size = 16,
                                 .num_seqs = 3,
                                 .counts = counts,
                                 .valid = valid };
    struct step steps[2] = { build(&shape) };
    steps[1] = relist(&steps[0], others);
    struct outcome expected[2] = { run(&steps[0], 300, NULL), run(&steps[1], 64, NULL) };
    struct outcome out = make_outcome(&steps[0]);
    struct gpu_graph *graph;
    const struct attn_tiled_dims dims = dims_of(&shape, 300);
    const size_t bytes = 3 * 300 * sizeof(int32_t);
    int32_t *const list = need(bytes), *const taken = copy_counts(counts, 3);
    struct attn_tiled *tiled = make_state(&dims, &out);
    struct attn_tiled_step_params params = params_of(&steps[0]);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    params.tile_blocks = list;
    params.tile_block_counts = taken;
    params.fault = out.fault;
    last.num_seqs = 3;
    last.output = out.output;
    last.lse = out.lse;
    cr_assert_eq(gpu_graph_begin(session.gpu, stream), 0);
    cr_assert_eq(attn_tiled_begin_step(tiled, 3, stream), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, stream), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(attn_tiled_finalize(tiled, &last, stream), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(gpu_graph_end(session.gpu, stream, &graph), 0);
    for (int i = 0; i < 5; i++) {
        memcpy(list, steps[i % 2].list, bytes);
        memcpy(taken, steps[i % 2].shape.counts, sizeof(counts));
        cr_assert_eq(gpu_graph_launch(session.gpu, graph, stream), 0);
        finish();
        cr_expect(is_same(&out, &expected[i % 2]), "replay %d", i);
    }
    expect_exact(&steps[0], &out);
    gpu_graph_destroy(session.gpu, &graph);
    attn_tiled_destroy(&tiled);
    release(list);
    release(taken);
    release(steps[1].list);
    free_outcome(&out);
    free_outcome(&expected[0]);
    free_outcome(&expected[1]);
    free_step(&steps[0]);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

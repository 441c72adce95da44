/* SPDX-License-Identifier: Apache-2.0 */
// The bits of a sequence depend on that sequence alone: each test changes what should not matter,
// for batches of 128 sequences with log-uniform lengths, and compares every sequence bit by bit.
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    BATCH = 128,
    MAX_LEN = 5000
};

// Heads differ, so that kernels for narrow and wide GQA groups take part; kinds are of every pair
// of types.
static const struct {
    struct decode_kind kind;
    int32_t num_q_heads, num_kv_heads;
} shapes[] = {
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 }, 8, 1 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 4, 1 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256 }, 6, 1 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 20, 1 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 }, 3, 3 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 128 }, 8, 1 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 }, 6, 1 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 256 }, 12, 1 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32 }, 4, 2 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 512 }, 2, 1 },
};
// The first of them, one of each head_dim, are enough where it is the launch that differs.
enum {
    NUM_FIRST_SHAPES = 3
};

static struct decode_case base_case(size_t shape)
{
    struct decode_case c = {
        .name = "base",
        .batch = BATCH,
        .num_q_heads = shapes[shape].num_q_heads,
        .num_kv_heads = shapes[shape].num_kv_heads,
        .page_size = 16,
        .len = MAX_LEN,
        .lens = DECODE_LENS_LOG,
        .window = shape % 2 ? 1500 : 0,
        .sinks = true,
        .lse = true,
        .softcap = shape == 2 ? 20 : 0,
        .scales = shape < 5,
        .seed = random_seed(51),
    };
    decode_case_set_kind(&c, &shapes[shape].kind);
    return c;
}

static void expect_equal(const struct decode_data *a, const struct decode_data *b, const char *what)
{
    for (int32_t i = 0; i < a->c.batch; i++)
        cr_expect(decode_data_equal(a, i, b, i), "%s, %s: sequence %d, seed %llu", a->kernel, what,
                  i, (unsigned long long) a->c.seed);
}

// Builds and runs `c`, whose sequences are those of `base`.
static void expect_same(const struct decode_case *c, const struct decode_data *base,
                        struct gpu_session *session, const char *what)
{
    struct decode_data *data = decode_data_need(c, session);
    decode_data_need_run(data, session);
    expect_equal(base, data, what);
    decode_data_free(&data);
}

static void expect_layout_free(const struct decode_data *base, struct gpu_session *session)
{
    const int32_t page_sizes[] = { 1, 3, 64, 100 };
    for (size_t i = 0; i < COUNT(page_sizes); i++) {
        struct decode_case c = base->c;
        c.page_size = page_sizes[i];
        c.page_seed = 200 + i;
        c.layout = (enum decode_layout) i;
        c.fused_q = i % 2 == 1;
        expect_same(&c, base, session, "page size, page ids, strides");
    }
    struct decode_case c = base->c;
    c.poison = 0x7F;
    expect_same(&c, base, session, "poison");
    c = base->c;
    c.poison = 0x01;
    c.extra_columns = 5000;
    expect_same(&c, base, session, "no poison, table width");
    c = base->c;
    c.lse = false;
    expect_same(&c, base, session, "without lse");
}

static void expect_company_free(const struct decode_data *base, struct gpu_session *session)
{
    int32_t reversed[BATCH];
    for (int32_t i = 0; i < BATCH; i++) reversed[i] = BATCH - 1 - i;
    struct decode_case c = base->c;
    c.ids = reversed;
    struct decode_data *data = decode_data_need(&c, session);
    decode_data_need_run(data, session);
    for (int32_t i = 0; i < BATCH; i++)
        cr_expect(decode_data_equal(base, i, data, BATCH - 1 - i),
                  "%s: sequence %d in another order", base->kernel, i);
    decode_data_free(&data);

    for (int32_t i = 0; i < BATCH; i++) {
        c.ids = &i;
        c.batch = 1;
        data = decode_data_need(&c, session);
        decode_data_need_run(data, session);
        cr_expect(decode_data_equal(base, i, data, 0), "%s: sequence %d alone", base->kernel, i);
        decode_data_free(&data);
    }
}

// Every odd sequence has NaN in all of q: the even ones don't notice.
static void expect_neighbour_free(const struct decode_data *base, struct gpu_session *session)
{
    struct decode_data *data = decode_data_need(&base->c, session);
    const int64_t stride = data->params.q_stride;
    uint16_t *const q = decode_image(data, DECODE_ZONE_Q);
    for (int32_t b = 1; b < BATCH; b += 2)
        for (int64_t i = 0; i < stride; i++) q[b * stride + i] = 0x7FC0;
    decode_data_need_run(data, session);
    for (int32_t b = 0; b < BATCH; b++)
        cr_expect_eq(decode_data_equal(base, b, data, b), b % 2 == 0,
                     "%s: sequence %d, odd ones are NaN", base->kernel, b);
    decode_data_free(&data);
}

Test(gpu_invariance, company_and_layout, .timeout = 300)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < COUNT(shapes); shape++) {
        if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
        const struct decode_case c = base_case(shape);
        struct decode_data *base = decode_data_need(&c, &session);
        decode_data_need_run(base, &session);
        expect_layout_free(base, &session);
        expect_company_free(base, &session);
        expect_neighbour_free(base, &session);
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

// On 1 block, on 7, and on as many as there are. The workspace is that of the unlimited device.
Test(gpu_invariance, schedule, .timeout = 120)
{
    const int32_t limits[] = { 1, 7, 132 };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < COUNT(shapes); shape++) {
        if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
        struct decode_case c = base_case(shape);
        c.len = 2000;
        struct decode_data *base = decode_data_need(&c, &session);
        decode_data_need_run(base, &session);
        for (size_t i = 0; i < COUNT(limits); i++) {
            struct gpu_session limited;
            gpu_session_open(&limited, limits[i]);
            expect_same(&c, base, &limited, "grid limit");
            gpu_session_close(&limited);
        }
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

// As long as each other, and a few more than there are blocks: the last ones are cut for all blocks.
// Few enough that one warp counts them, and more.
Test(gpu_invariance, late_pieces, .timeout = 120)
{
    const struct {
        int32_t blocks, batch;
    } grids[] = { { 20, 23 }, { 40, 42 }, { 40, 85 } };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < COUNT(grids); i++) {
        struct gpu_session limited;
        gpu_session_open(&limited, grids[i].blocks);
        for (size_t shape = 0; shape < COUNT(shapes); shape++) {
            if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
            struct decode_case c = base_case(shape);
            c.batch = grids[i].batch;
            c.len = 3000;
            c.lens = DECODE_LENS_FULL;
            struct decode_data *base = decode_data_need(&c, &session);
            decode_data_need_run(base, &session);
            expect_same(&c, base, &limited, "late pieces");
            decode_data_free(&base);
        }
        gpu_session_close(&limited);
    }
    gpu_session_close(&session);
}

static void expect_roots_to_meet(struct gpu_session *session, struct gpu_session *limited,
                                 size_t shape, int32_t num_kv_heads, int32_t len)
{
    struct decode_case c = base_case(shape);
    c.batch = 1;
    c.num_q_heads = c.num_q_heads / c.num_kv_heads * num_kv_heads;
    c.num_kv_heads = num_kv_heads;
    c.len = len;
    c.lens = DECODE_LENS_FULL;
    c.window = shape % 2 ? len - 1100 : 0;
    struct decode_data *base = decode_data_need(&c, session);
    decode_data_need_run(base, session);
    expect_same(&c, base, limited, "roots that meet");
    decode_data_free(&base);
}

// One sequence whose roots are those of as many blocks as there are, which merge them together; on
// fewer blocks whoever is last does, and where units are long, of which the last one is not.
Test(gpu_invariance, roots_that_meet, .timeout = 120)
{
    struct gpu_session session, limited;
    gpu_session_open(&session, 0);
    gpu_session_open(&limited, 50);
    for (size_t shape = 0; shape < COUNT(shapes); shape++) {
        if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
        expect_roots_to_meet(&session, &limited, shape, 4, 8100);
        expect_roots_to_meet(&session, &limited, shape, 8, 8100);
        if (shape == 1) expect_roots_to_meet(&session, &limited, shape, 4, 100000);
    }
    gpu_session_close(&limited);
    gpu_session_close(&session);
}

// ---- kernels of one kind give the same bits: a group of 16 heads has the first 8 of a group of 8

static bool heads_equal(const struct decode_data *narrow, const struct decode_data *wide,
                        int32_t sequence)
{
    const size_t size = attn_dtype_size(narrow->params.q_dtype);
    const size_t head = (size_t) narrow->params.head_dim * size;
    const size_t heads = (size_t) narrow->params.num_q_heads;
    const size_t wide_heads = (size_t) wide->params.num_q_heads, b = (size_t) sequence;
    const uint8_t *const o = decode_result(narrow, DECODE_ZONE_O);
    const uint8_t *const wide_o = decode_result(wide, DECODE_ZONE_O);
    const float *const lse = decode_result(narrow, DECODE_ZONE_LSE);
    const float *const wide_lse = decode_result(wide, DECODE_ZONE_LSE);
    return memcmp(o + b * heads * head, wide_o + b * wide_heads * head, heads * head) == 0 &&
           memcmp(lse + b * heads, wide_lse + b * wide_heads, heads * sizeof(*lse)) == 0;
}

static void expect_width_free(struct gpu_session *session, const struct decode_kind *kind)
{
    struct decode_case c = {
        .name = "width",
        .batch = BATCH,
        .num_q_heads = 8,
        .num_kv_heads = 1,
        .page_size = 16,
        .len = 2000,
        .lens = DECODE_LENS_LOG,
        .window = 700,
        .lse = true,
        .seed = random_seed(52),
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *narrow = decode_data_need(&c, session);
    c.num_q_heads = 16;
    struct decode_data *wide = decode_data_need(&c, session);
    decode_data_need_run(narrow, session);
    decode_data_need_run(wide, session);
    for (int32_t b = 0; b < BATCH; b++)
        cr_expect(heads_equal(narrow, wide, b), "%s and %s: sequence %d", narrow->kernel,
                  wide->kernel, b);
    decode_data_free(&narrow);
    decode_data_free(&wide);
}

Test(gpu_invariance, width_of_the_group, .timeout = 60)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        if (gpu_session_serves(&session, &decode_kinds[i]))
            expect_width_free(&session, &decode_kinds[i]);
    gpu_session_close(&session);
}

// ---- replay

static void launch(struct gpu_session *session, const struct attn_decode_params *params,
                   attn_stream stream)
{
    cr_assert_eq(attn_decode(session->device, params, stream), ATTN_OK, "%s", attn_last_error());
}

// The call as captured while all lengths were 0 and the table all -1, then replayed on the real
// ones.
static void expect_replay(struct decode_data *base, struct gpu_session *session)
{
    struct decode_data *data = decode_data_need(&base->c, session);
    struct decode_remote remote;
    struct gpu_graph *graph;
    cr_assert_eq(decode_remote_open(&remote, session->gpu, data), 0);
    const struct attn_decode_params params = decode_remote_params(&remote);
    uint8_t *const memory = remote.base;
    const struct canary_zone *const lens = &data->zones[DECODE_ZONE_LENS];
    const struct canary_zone *const table = &data->zones[DECODE_ZONE_TABLE];
    cr_assert_eq(gpu_fill(session->gpu, memory + lens->offset, 0, lens->bytes), 0);
    cr_assert_eq(gpu_fill(session->gpu, memory + table->offset, 0xFF, table->bytes), 0);
    cr_assert_eq(gpu_graph_begin(session->gpu, session->stream), 0);
    launch(session, &params, session->stream);
    cr_assert_eq(gpu_graph_end(session->gpu, session->stream, &graph), 0);

    // Once as captured, then twice on real data, the second time over what the first has left.
    cr_assert_eq(gpu_graph_launch(session->gpu, graph, session->stream), 0);
    cr_assert_eq(gpu_stream_sync(session->gpu, session->stream), 0);
    cr_assert_eq(decode_remote_fetch(&remote), 0);
    const uint16_t *const o = decode_result(data, DECODE_ZONE_O);
    for (size_t i = 0; i < data->zones[DECODE_ZONE_O].bytes / 2; i++)
        cr_assert_eq(o[i], 0, "%s: o[%zu] of empty sequences is 0x%x", data->kernel, i, o[i]);
    cr_assert_eq(decode_remote_reset(&remote), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(gpu_graph_launch(session->gpu, graph, session->stream), 0);
        cr_assert_eq(gpu_stream_sync(session->gpu, session->stream), 0);
        cr_assert_eq(decode_remote_fetch(&remote), 0);
        expect_equal(base, data, "graph replay");
        cr_expect(decode_data_intact(data), "%s wrote where it should not", data->kernel);
    }
    gpu_graph_destroy(session->gpu, &graph);
    decode_remote_close(&remote);
    decode_data_free(&data);
}

// Two streams at once, forty calls each, and the legacy stream after them.
static void expect_streams(struct decode_data *base, struct gpu_session *session)
{
    struct decode_data *data[2];
    struct decode_remote remote[2];
    attn_stream streams[2] = { session->stream };
    cr_assert_eq(gpu_stream_create(session->gpu, &streams[1]), 0);
    for (int i = 0; i < 2; i++) {
        data[i] = decode_data_need(&base->c, session);
        cr_assert_eq(decode_remote_open(&remote[i], session->gpu, data[i]), 0);
    }
    for (int n = 0; n < 40; n++)
        for (int i = 0; i < 2; i++) {
            const struct attn_decode_params params = decode_remote_params(&remote[i]);
            launch(session, &params, streams[i]);
        }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(gpu_stream_sync(session->gpu, streams[i]), 0);
        cr_assert_eq(decode_remote_fetch(&remote[i]), 0);
        expect_equal(base, data[i], "two streams");
        cr_assert_eq(decode_remote_reset(&remote[i]), 0);
        const struct attn_decode_params params = decode_remote_params(&remote[i]);
        launch(session, &params, NULL);
        cr_assert_eq(gpu_sync(session->gpu), 0);
        cr_assert_eq(decode_remote_fetch(&remote[i]), 0);
        expect_equal(base, data[i], "the legacy stream");
        decode_remote_close(&remote[i]);
        decode_data_free(&data[i]);
    }
    gpu_stream_destroy(session->gpu, streams[1]);
}

// Each call takes its own scalars, whatever the one before it had.
static void expect_live_scalars(struct decode_data *base, struct gpu_session *session)
{
    struct decode_case c = base->c;
    c.window = 33;
    struct decode_data *other = decode_data_need(&c, session);
    struct attn_check check;
    decode_data_need_run(other, session);
    int32_t differing = 0;
    for (int32_t b = 0; b < BATCH; b++) differing += !decode_data_equal(base, b, other, b);
    cr_expect_gt(differing, BATCH / 4, "%s: a window of 33 changes %d of %d sequences",
                 base->kernel, differing, BATCH);
    cr_expect(decode_data_check(other, ATTN_CHECK_KERNEL, &check), "%s: window 33 after another",
              base->kernel);
    struct decode_data *again = decode_data_need(&base->c, session);
    decode_data_need_run(again, session);
    expect_equal(base, again, "after a call with another window");
    decode_data_free(&other);
    decode_data_free(&again);
}

Test(gpu_invariance, graphs_streams_and_repetition, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < NUM_FIRST_SHAPES; shape++) {
        struct decode_case c = base_case(shape);
        c.len = 3000;
        struct decode_data *base = decode_data_need(&c, &session);
        decode_data_need_run(base, &session);
        expect_replay(base, &session);
        expect_streams(base, &session);
        expect_live_scalars(base, &session);
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

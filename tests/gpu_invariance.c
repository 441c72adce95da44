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

// Heads differ, so that kernels for narrow and wide GQA groups take part.
static const struct {
    int32_t head_dim, num_q_heads, num_kv_heads;
} shapes[] = { { 64, 8, 1 }, { 128, 4, 1 }, { 256, 6, 1 }, { 128, 20, 1 }, { 64, 3, 3 } };

static struct decode_case base_case(size_t shape)
{
    const struct decode_case c = {
        .name = "base",
        .batch = BATCH,
        .num_q_heads = shapes[shape].num_q_heads,
        .num_kv_heads = shapes[shape].num_kv_heads,
        .head_dim = shapes[shape].head_dim,
        .page_size = 16,
        .len = MAX_LEN,
        .lens = DECODE_LENS_LOG,
        .window = shape % 2 ? 1500 : 0,
        .sinks = true,
        .lse = true,
        .softcap = shape == 2 ? 20 : 0,
        .scales = true,
        .seed = random_seed(51),
    };
    return c;
}

static struct decode_data *build(const struct decode_case *c, const struct gpu_session *session)
{
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, c, session->device), ATTN_OK, "%s", attn_last_error());
    return data;
}

static void run(struct decode_data *data, struct gpu_session *session)
{
    cr_assert_eq(decode_data_run_gpu(data, session), ATTN_OK, "%s: %s", data->kernel,
                 attn_last_error());
    cr_expect(decode_data_intact(data), "%s wrote where it should not", data->kernel);
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
    struct decode_data *data = build(c, session);
    run(data, session);
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
    c.poison = 0xFF;
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
    struct decode_data *data = build(&c, session);
    run(data, session);
    for (int32_t i = 0; i < BATCH; i++)
        cr_expect(decode_data_equal(base, i, data, BATCH - 1 - i),
                  "%s: sequence %d in another order", base->kernel, i);
    decode_data_free(&data);

    for (int32_t i = 0; i < BATCH; i++) {
        c.ids = &i;
        c.batch = 1;
        data = build(&c, session);
        run(data, session);
        cr_expect(decode_data_equal(base, i, data, 0), "%s: sequence %d alone", base->kernel, i);
        decode_data_free(&data);
    }
}

// Every odd sequence has NaN in all of q: the even ones don't notice.
static void expect_neighbour_free(const struct decode_data *base, struct gpu_session *session)
{
    struct decode_data *data = build(&base->c, session);
    const int64_t stride = data->params.q_stride;
    uint16_t *const q = decode_image(data, DECODE_ZONE_Q);
    for (int32_t b = 1; b < BATCH; b += 2)
        for (int64_t i = 0; i < stride; i++) q[b * stride + i] = 0x7FC0;
    run(data, session);
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
        const struct decode_case c = base_case(shape);
        struct decode_data *base = build(&c, &session);
        run(base, &session);
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
        struct decode_case c = base_case(shape);
        c.len = 2000;
        struct decode_data *base = build(&c, &session);
        run(base, &session);
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
    struct decode_data *data = build(&base->c, session);
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
        data[i] = build(&base->c, session);
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
    struct decode_data *other = build(&c, session);
    struct attn_check check;
    run(other, session);
    int32_t differing = 0;
    for (int32_t b = 0; b < BATCH; b++) differing += !decode_data_equal(base, b, other, b);
    cr_expect_gt(differing, BATCH / 4, "%s: a window of 33 changes %d of %d sequences",
                 base->kernel, differing, BATCH);
    cr_expect(decode_data_check(other, ATTN_CHECK_KERNEL, &check), "%s: window 33 after another",
              base->kernel);
    struct decode_data *again = build(&base->c, session);
    run(again, session);
    expect_equal(base, again, "after a call with another window");
    decode_data_free(&other);
    decode_data_free(&again);
}

Test(gpu_invariance, graphs_streams_and_repetition, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < 3; shape++) {
        struct decode_case c = base_case(shape);
        c.len = 3000;
        struct decode_data *base = build(&c, &session);
        run(base, &session);
        expect_replay(base, &session);
        expect_streams(base, &session);
        expect_live_scalars(base, &session);
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

// ---- exact means: Q = K = 0, so that o counts attended tokens, at every length around an edge

Test(gpu_invariance, exact_means, .timeout = 60)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    const int32_t windows[] = { 0, 31, 64, 128 };
    int32_t lens[BATCH];
    for (int32_t i = 0; i < BATCH; i++) lens[i] = i < 80 ? i : 40 + i;
    for (size_t shape = 0; shape < 3; shape++)
        for (size_t i = 0; i < COUNT(windows); i++) {
            struct decode_case c = base_case(shape);
            c.given_lens = lens;
            c.window = windows[i];
            c.sinks = c.scales = false;
            c.fill = DECODE_FILL_MEAN;
            struct decode_data *data = build(&c, &session);
            run(data, &session);
            const int32_t rows = c.num_q_heads * c.head_dim;
            for (int32_t b = 0; b < BATCH; b++)
                for (int32_t d = 0; d < rows; d++) {
                    const int32_t start = c.window && lens[b] > c.window ? lens[b] - c.window : 0;
                    int32_t hits = 0;
                    for (int32_t t = start; t < lens[b]; t++) hits += t % 32 == d % 32;
                    const double mean = lens[b] ? 32.0 * hits / (lens[b] - start) : 0;
                    const double o = attn_load(decode_result(data, DECODE_ZONE_O),
                                               (int64_t) b * rows + d, ATTN_DTYPE_BF16);
                    // Weights and sums are exact here: what is left is a division and a rounding.
                    cr_assert(fabs(o - mean) <= mean * (0x1p-8 + 0x1p-20),
                              "%s: len %d, window %d, dim %d: %g for %g", data->kernel, lens[b],
                              c.window, d % c.head_dim, o, mean);
                }
            decode_data_free(&data);
        }
    gpu_session_close(&session);
}

// ---- a pool beyond 8 GiB, the sequences on its last pages: offsets past 2^32 elements

// Copies the pages of `data` to the end of a big pool of pages (K, then V), and rewrites the table.
static void spread_pages(const struct decode_data *data, struct gpu *gpu, uint8_t *pool,
                         int64_t num_pages, int32_t *table)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    const size_t page = (size_t) p.k_page_stride * 2;
    const uint8_t *const k = p.k_pool, *const v = p.v_pool;
    for (int64_t i = 0; i < p.num_pages; i++) {
        uint8_t *const to = pool + (size_t) (num_pages - 1 - i) * 2 * page;
        cr_assert_eq(gpu_upload(gpu, to, k + (size_t) i * page, page), 0);
        cr_assert_eq(gpu_upload(gpu, to + page, v + (size_t) i * page, page), 0);
    }
    for (int64_t i = 0; i < (int64_t) p.batch * p.max_pages_per_seq; i++)
        if (table[i] >= 0 && table[i] < p.num_pages)
            table[i] = (int32_t) (num_pages - 1 - table[i]);
}

Test(gpu_invariance, high_pages, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    struct decode_case c = base_case(1);
    c.batch = 16;
    c.len = 500;
    struct decode_data *low = build(&c, &session), *high = build(&c, &session);
    run(low, &session);

    // A page of K and one of V, in elements of two bytes.
    const int64_t stride = 2 * low->params.k_page_stride;
    const int64_t num_pages = ((int64_t) 9 << 30) / (stride * 2);
    void *pool;
    struct decode_remote remote;
    cr_assert_eq(gpu_alloc(session.gpu, &pool, (size_t) num_pages * (size_t) stride * 2), 0);
    cr_assert_eq(gpu_fill(session.gpu, pool, 0x7F, (size_t) num_pages * (size_t) stride * 2), 0);
    spread_pages(high, session.gpu, pool, num_pages, decode_image(high, DECODE_ZONE_TABLE));
    cr_assert_eq(decode_remote_open(&remote, session.gpu, high), 0);
    struct attn_decode_params params = decode_remote_params(&remote);
    params.num_pages = num_pages;
    params.k_pool = pool;
    params.v_pool = (uint8_t *) pool + low->params.k_page_stride * 2;
    params.k_page_stride = params.v_page_stride = stride;
    launch(&session, &params, session.stream);
    cr_assert_eq(gpu_stream_sync(session.gpu, session.stream), 0);
    cr_assert_eq(decode_remote_fetch(&remote), 0);
    expect_equal(low, high, "pages past 8 GiB");
    cr_expect_eq(decode_data_fault(high), INT32_MAX);

    decode_remote_close(&remote);
    gpu_free(session.gpu, pool);
    decode_data_free(&low);
    decode_data_free(&high);
    gpu_session_close(&session);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Probes that find what random data on small pools does not: pages beyond 32 bits, company of very
// different lengths, every mask edge by exact values, and the same bits on any number of SMs.
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

// ---- high pages: the sequences on the last pages of a big pool

// A page of K and one of V lie at these bytes of each `stride`.
struct pool {
    const char *what;
    int32_t page_size;
    int64_t stride, num_pages;
    int64_t k_at, v_at;
};

// Copies the pages of `data` to the end of the pool, last one first, and rewrites the table.
static void spread_pages(const struct decode_data *data, struct gpu *gpu, const struct pool *pool,
                         uint8_t *memory)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    const size_t page = (size_t) p.k_page_stride * attn_dtype_size(p.kv_dtype);
    const uint8_t *const k = p.k_pool, *const v = p.v_pool;
    for (int64_t i = 0; i < p.num_pages; i++) {
        uint8_t *const to = memory + (pool->num_pages - 1 - i) * pool->stride;
        cr_assert_eq(gpu_upload(gpu, to + pool->k_at, k + (size_t) i * page, page), 0);
        cr_assert_eq(gpu_upload(gpu, to + pool->v_at, v + (size_t) i * page, page), 0);
    }
    int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
    for (int64_t i = 0; i < (int64_t) p.batch * p.max_pages_per_seq; i++)
        if (table[i] >= 0 && table[i] < p.num_pages)
            table[i] = (int32_t) (pool->num_pages - 1 - table[i]);
}

static void expect_high_equal(struct gpu_session *session, const struct decode_case *c,
                              const struct pool *pool)
{
    struct decode_data *low = decode_data_need(c, session), *high = decode_data_need(c, session);
    decode_data_need_run(low, session);
    const size_t bytes = (size_t) (pool->stride * pool->num_pages);
    void *memory;
    struct decode_remote remote;
    cr_assert_eq(gpu_alloc(session->gpu, &memory, bytes), 0, "%s: %zu bytes", pool->what, bytes);
    cr_assert_eq(gpu_fill(session->gpu, memory, 0xFF, bytes), 0);
    spread_pages(high, session->gpu, pool, memory);
    cr_assert_eq(decode_remote_open(&remote, session->gpu, high), 0);

    struct attn_decode_params params = decode_remote_params(&remote);
    params.num_pages = pool->num_pages;
    params.k_pool = (uint8_t *) memory + pool->k_at;
    params.v_pool = (uint8_t *) memory + pool->v_at;
    params.k_page_stride = params.v_page_stride =
        pool->stride / (int64_t) attn_dtype_size(params.kv_dtype);
    decode_remote_need_run(&remote, session, &params);
    for (int32_t b = 0; b < c->batch; b++)
        cr_expect(decode_data_equal(low, b, high, b), "%s, %s: sequence %d", low->kernel,
                  pool->what, b);
    cr_expect_eq(decode_data_fault(high), INT32_MAX, "%s, %s", low->kernel, pool->what);

    decode_remote_close(&remote);
    gpu_free(session->gpu, memory);
    decode_data_free(&low);
    decode_data_free(&high);
}

// The kinds whose pools are probed.
static const struct decode_kind pool_kinds[] = {
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 },
};

static void expect_high_pages(struct gpu_session *session, const struct decode_kind *kind)
{
    const int64_t row = kind->head_dim * (int64_t) attn_dtype_size(kind->kv_dtype);
    const int64_t whole = (int64_t) 9 << 30, layered = 1435968;
    const struct pool pools[] = {
        { "pages past 8 GiB", 16, 32 * row, whole / (32 * row), 0, 16 * row },
        { "millions of pages of one token", 1, 2 * row, whole / (2 * row), 0, row },
        // The last of many layers.
        { "a page stride of 1,435,968 bytes", 16, layered, 4564, layered - 32 * row,
          layered - 16 * row },
    };
    for (size_t i = 0; i < COUNT(pools); i++) {
        struct decode_case c = {
            .name = pools[i].what,
            .batch = 16,
            .num_q_heads = 4,
            .num_kv_heads = 1,
            .page_size = pools[i].page_size,
            .len = 500,
            .lens = DECODE_LENS_LOG,
            .window = i == 1 ? 200 : 0,
            .lse = true,
            .seed = random_seed(61),
        };
        decode_case_set_kind(&c, kind);
        expect_high_equal(session, &c, &pools[i]);
    }
}

Test(gpu_probes, high_pages, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < COUNT(pool_kinds); i++)
        if (gpu_session_serves(&session, &pool_kinds[i]))
            expect_high_pages(&session, &pool_kinds[i]);
    gpu_session_close(&session);
}

// ---- company: 160 requests of 1 to 131,072 keys, in batches of every kind

enum {
    CROWD = 160,
    // Of an id: a sequence of padding.
    PADDING = -1
};

// The sequences `ids` of `crowd`, as a batch of their own: the same bits.
static void expect_same_among(const struct decode_data *crowd, struct gpu_session *session,
                              const int32_t *ids, int32_t count, uint64_t page_seed,
                              const char *what)
{
    const int32_t *const crowd_lens = decode_image(crowd, DECODE_ZONE_LENS);
    int32_t lens[2 * CROWD], known[2 * CROWD];
    for (int32_t i = 0; i < count; i++) {
        lens[i] = ids[i] == PADDING ? 0 : crowd_lens[ids[i]];
        known[i] = ids[i] == PADDING ? 0 : ids[i];
    }
    struct decode_case c = crowd->c;
    c.batch = count;
    c.ids = known;
    c.given_lens = lens;
    c.page_seed = page_seed;
    struct decode_data *data = decode_data_need(&c, session);
    decode_data_need_run(data, session);
    for (int32_t i = 0; i < count; i++)
        cr_expect(ids[i] == PADDING || decode_data_equal(crowd, ids[i], data, i),
                  "%s, %s: request %d, %d keys, seed %llu", crowd->kernel, what, ids[i], lens[i],
                  (unsigned long long) c.seed);
    decode_data_free(&data);
}

static void expect_company_free(struct gpu_session *session, const struct decode_kind *kind)
{
    struct decode_case c = {
        .name = "crowd",
        .batch = CROWD,
        .num_q_heads = 4,
        .num_kv_heads = 1,
        .page_size = 16,
        .len = 131072,
        .lens = DECODE_LENS_LOG,
        .lse = true,
        .seed = random_seed(62),
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *crowd = decode_data_need(&c, session);
    decode_data_need_run(crowd, session);

    int32_t all[CROWD], reversed[CROWD], padded[2 * CROWD];
    for (int32_t i = 0; i < CROWD; i++) {
        all[i] = i;
        reversed[i] = CROWD - 1 - i;
        padded[2 * i] = i;
        padded[2 * i + 1] = PADDING;
    }
    expect_same_among(crowd, session, reversed, CROWD, 1, "in another order");
    expect_same_among(crowd, session, padded, 2 * CROWD, 2, "among padding");
    for (int32_t first = 0; first < CROWD; first += 7)
        expect_same_among(crowd, session, all + first, first + 7 < CROWD ? 7 : CROWD - first, 3,
                          "in sevens");
    for (int32_t i = 0; i < CROWD; i++) expect_same_among(crowd, session, all + i, 1, 4, "alone");
    decode_data_free(&crowd);
}

Test(gpu_probes, company, .timeout = 180)
{
    const struct decode_kind kinds[] = {
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 64 },
    };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (gpu_session_serves(&session, &kinds[i])) expect_company_free(&session, &kinds[i]);
    gpu_session_close(&session);
}

// ---- exact values: scores 0 and one bit of V a token, so that o names the attended tokens

enum {
    LAST_LEN = 200,
    LAST_WINDOW = 66
};

static void expect_bits(struct gpu_session *session, const struct decode_kind *kind, int32_t window)
{
    int32_t lens[LAST_LEN];
    for (int32_t b = 0; b < LAST_LEN; b++) lens[b] = b + 1;
    struct decode_case c = {
        .name = "bits",
        .batch = LAST_LEN,
        .given_lens = lens,
        .num_q_heads = 1,
        .num_kv_heads = 1,
        .page_size = window % 3 ? 16 : 1 + window % 7,
        .window = window,
        .fill = DECODE_FILL_BITS,
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *data = decode_data_need(&c, session);
    decode_data_need_run(data, session);
    // Weights and sums are exact here: what is left is a division and a rounding.
    const double unit = kind->q_dtype == ATTN_DTYPE_FP16 ? 0x1p-11 : 0x1p-8;
    const double v_scale = data->params.v_scale;
    for (int32_t b = 0; b < LAST_LEN; b++)
        for (int32_t d = 0; d < kind->head_dim; d++) {
            const int32_t start = lens[b] > window ? lens[b] - window : 0;
            const double mean = v_scale * decode_bits_mean(kind->head_dim, start, lens[b], d);
            const double o = attn_load(decode_result(data, DECODE_ZONE_O),
                                       (int64_t) b * kind->head_dim + d, kind->q_dtype);
            cr_assert(fabs(o - mean) <= mean * (unit + 0x1p-20),
                      "%s: len %d, window %d, dim %d: %g for %g", data->kernel, lens[b], window, d,
                      o, mean);
        }
    decode_data_free(&data);
}

// At head_dim 64 every window; at the others those around edges of pages, groups and leaves.
static bool wants_window(const struct decode_kind *kind, int32_t window)
{
    return kind->head_dim == 64 || (window + 1) % 16 <= 2 || window <= 2;
}

Test(gpu_probes, exact_window_edges, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (int32_t window = 1; window <= LAST_WINDOW; window++)
            if (gpu_session_serves(&session, &decode_kinds[i]) &&
                wants_window(&decode_kinds[i], window))
                expect_bits(&session, &decode_kinds[i], window);
    gpu_session_close(&session);
}

// ---- SM sweep: as many blocks as other chips would run

static const int32_t grid_limits[] = { 1, 2, 3, 5, 7, 8, 16, 48, 76, 78, 108, 132 };

struct sweep {
    struct gpu_session session, limited[COUNT(grid_limits)];
};

static bool outputs_equal(const struct decode_data *data, const uint8_t *expected)
{
    const enum decode_zone zones[] = { DECODE_ZONE_O, DECODE_ZONE_LSE };
    const size_t first = data->zones[DECODE_ZONE_O].offset;
    for (size_t i = 0; i < COUNT(zones); i++) {
        const struct canary_zone *const zone = &data->zones[zones[i]];
        if (memcmp(data->result + zone->offset, expected + (zone->offset - first), zone->bytes) !=
            0)
            return false;
    }
    return true;
}

// The workspace is that of the unlimited device.
static void expect_sweep_equal(struct sweep *sweep, const struct decode_case *c)
{
    char text[512];
    struct decode_data *data = decode_data_need(c, &sweep->session);
    struct decode_remote remote;
    const size_t first = data->zones[DECODE_ZONE_O].offset;
    uint8_t *const expected = malloc(data->bytes - first);
    cr_assert_not_null(expected);
    cr_assert_eq(decode_remote_open(&remote, sweep->session.gpu, data), 0);
    const struct attn_decode_params params = decode_remote_params(&remote);
    decode_remote_need_run(&remote, &sweep->session, &params);
    memcpy(expected, data->result + first, data->bytes - first);
    for (size_t i = 0; i < COUNT(grid_limits); i++) {
        cr_assert_eq(decode_remote_reset_outputs(&remote), 0);
        decode_remote_need_run(&remote, &sweep->limited[i], &params);
        cr_expect(outputs_equal(data, expected), "%s, %d blocks: %s", data->kernel, grid_limits[i],
                  decode_case_text(c, text, sizeof(text)));
    }
    cr_assert_eq(decode_remote_fetch(&remote), 0);
    cr_expect(decode_data_intact(data), "%s wrote where it should not", data->kernel);
    decode_remote_close(&remote);
    free(expected);
    decode_data_free(&data);
}

// One long sequence, a few of a single key, many of all lengths.
static void expect_sweep_lens(struct sweep *sweep, struct decode_case *c)
{
    const struct {
        int32_t batch, len;
        enum decode_lens lens;
    } crowds[] = {
        { 1, 40000, DECODE_LENS_FULL },
        { 3, 1, DECODE_LENS_FULL },
        { 200, 1000, DECODE_LENS_LOG },
    };
    for (size_t i = 0; i < COUNT(crowds); i++) {
        c->batch = crowds[i].batch;
        c->len = crowds[i].len;
        c->lens = crowds[i].lens;
        expect_sweep_equal(sweep, c);
    }
}

Test(gpu_probes, sm_sweep, .timeout = 180)
{
    static const struct {
        struct decode_kind kind;
        int32_t num_q_heads, lanes;
    } shapes[] = {
        { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256 }, 6, 1 },
        { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 9, 3 },
        { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 8, 8 },
        { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 }, 48, 48 },
        { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 512 }, 8, 1 },
        { { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 }, 9, 3 },
        { { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 64 }, 8, 8 },
        { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32 }, 48, 48 },
    };
    static struct sweep sweep;
    gpu_session_open(&sweep.session, 0);
    for (size_t i = 0; i < COUNT(grid_limits); i++)
        gpu_session_open(&sweep.limited[i], grid_limits[i]);
    for (size_t i = 0; i < COUNT(shapes); i++) {
        if (!gpu_session_serves(&sweep.session, &shapes[i].kind)) continue;
        struct decode_case c = {
            .name = "sweep",
            .num_q_heads = shapes[i].num_q_heads,
            .num_kv_heads = shapes[i].lanes,
            .page_size = 16,
            .lse = true,
            .seed = random_seed(63),
        };
        decode_case_set_kind(&c, &shapes[i].kind);
        expect_sweep_lens(&sweep, &c);
    }
    for (size_t i = COUNT(grid_limits); i-- > 0;) gpu_session_close(&sweep.limited[i]);
    gpu_session_close(&sweep.session);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

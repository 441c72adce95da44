/* SPDX-License-Identifier: Apache-2.0 */
// The host executor is the oracle of every other test, so it is held against a second computation,
// in long double and in another order, and against cases whose answer follows from arithmetic.
#include "tests/cases/decode_cases.h"
#include "tests/support/decode_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static struct attn_device *open_host(void)
{
    const struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
    return device;
}

static struct decode_data *build(const struct decode_case *c, const struct attn_device *device)
{
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, c, device), ATTN_OK, "%s", attn_last_error());
    return data;
}

static void run(struct decode_data *data, struct attn_device *device)
{
    cr_assert_eq(decode_data_run_host(data, device), ATTN_OK, "%s", attn_last_error());
    cr_expect(decode_data_intact(data), "%s wrote where it should not", data->c.name);
}

static double o_at(const struct decode_data *data, int32_t sequence, int32_t head, int32_t dim)
{
    return decode_data_o(data, sequence, 0, head, dim);
}

static double lse_at(const struct decode_data *data, int32_t sequence, int32_t head)
{
    return decode_data_lse(data, sequence, 0, head);
}

// ---- the second computation

struct exact {
    long double o[512], weighted[512], lse;
};

static long double element(const void *base, int64_t index, enum attn_dtype dtype)
{
    return attn_load(base, index, dtype);
}

static long double exact_score(const struct attn_decode_params *p, int64_t q, int64_t k,
                               int32_t kv_head)
{
    long double dot = 0;
    for (int32_t d = p->head_dim - 1; d >= 0; d--)
        dot += element(p->q, q + d, p->q_dtype) * element(p->k_pool, k + d, p->kv_dtype);
    const long double s = dot * p->scale * (p->k_scales ? p->k_scales[kv_head] : p->k_scale);
    return p->softcap > 0 ? p->softcap * tanhl(s / p->softcap) : s;
}

// By the words of decode.h, for lengths of q_len and more.
static bool attends(const struct attn_decode_params *p, int32_t sequence, int32_t token,
                    int32_t key)
{
    const int32_t len = p->seq_lens[sequence], position = len - p->q_len + token;
    const int32_t last = p->window_form == ATTN_WINDOW_SHARED ? len - 1 : position;
    if (p->window > 0 && key <= last - p->window) return false;
    const int32_t draft = key - (len - p->q_len);
    if (draft < 0 || !p->tree_mask) return key <= position;
    const int64_t row = (int64_t) sequence * p->q_len + token;
    return (p->tree_mask[row * p->mask_words + draft / 32] & (int32_t) (1u << draft % 32)) != 0;
}

// Backwards over the keys, each weighted against the sink or 0: these cases have scores that allow
// it.
static void compute(const struct attn_decode_params *p, int32_t sequence, int32_t token,
                    int32_t head, struct exact *exact)
{
    const int32_t kv_head = head / (p->num_q_heads / p->num_kv_heads), len = p->seq_lens[sequence];
    const long double v_scale = p->v_scales ? p->v_scales[kv_head] : p->v_scale;
    const int64_t q =
        sequence * p->q_stride + token * p->q_token_stride + (int64_t) head * p->head_dim;
    const int32_t *const v_table = p->v_block_table ? p->v_block_table : p->block_table;
    long double sum = p->sinks ? expl(p->sinks[head]) : 0;
    memset(exact, 0, sizeof(*exact));
    for (int32_t t = len - 1; t >= 0; t--) {
        if (!attends(p, sequence, token, t)) continue;
        const int64_t entry = sequence * p->table_stride + t / p->page_size;
        const int64_t slot = t % p->page_size;
        const int64_t k = p->block_table[entry] * p->k_page_stride + slot * p->k_token_stride +
                          kv_head * p->k_head_stride;
        const int64_t v = v_table[entry] * p->v_page_stride + slot * p->v_token_stride +
                          kv_head * p->v_head_stride;
        const long double weight = expl(exact_score(p, q, k, kv_head));
        sum += weight;
        for (int32_t d = 0; d < p->head_dim; d++) {
            const long double value = v_scale * element(p->v_pool, v + d, p->kv_dtype);
            exact->o[d] += weight * value;
            exact->weighted[d] += weight * fabsl(value);
        }
    }
    exact->lse = logl(sum);
    for (int32_t d = 0; sum > 0 && d < p->head_dim; d++) {
        exact->o[d] /= sum;
        exact->weighted[d] /= sum;
    }
}

// u |exact| + 2^-20 A, FP16 + 2^-25: include/attn/decode.h.
static void expect_row(const struct decode_data *data, int32_t b, int32_t token, int32_t h)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    const bool fp16 = p.q_dtype == ATTN_DTYPE_FP16;
    struct exact exact;
    char text[640];
    decode_case_text(&data->c, text, sizeof(text));
    compute(&p, b, token, h, &exact);
    for (int32_t d = 0; d < p.head_dim; d++) {
        const double o = decode_data_o(data, b, token, h, d);
        const long double bound = (fp16 ? 0x1p-11L : 0x1p-8L) * fabsl(exact.o[d]) +
                                  0x1p-20L * exact.weighted[d] + (fp16 ? 0x1p-25L : 0);
        cr_assert(fabsl(o - exact.o[d]) <= bound, "%s: o[%d][%d][%d][%d] %g for %Lg", text, b,
                  token, h, d, o, exact.o[d]);
    }
    if (!data->c.lse) return;
    const double lse = decode_data_lse(data, b, token, h);
    cr_assert(lse == (double) exact.lse ||
                  fabsl(lse - exact.lse) <= 0x1p-23L * fabsl(exact.lse) + 0x1p-30L,
              "%s: lse[%d][%d][%d] %g for %Lg", text, b, token, h, lse, exact.lse);
}

static void expect_exact(const struct decode_data *data)
{
    for (int32_t b = 0; b < data->params.batch; b++)
        for (int32_t token = 0; token < data->params.q_len; token++)
            for (int32_t h = 0; h < data->params.num_q_heads; h++) expect_row(data, b, token, h);
}

static void expect_case(const struct decode_case *c, struct attn_device *device)
{
    struct decode_data *data = build(c, device);
    struct attn_check check;
    char text[512];
    run(data, device);
    expect_exact(data);
    cr_expect(decode_data_check(data, ATTN_CHECK_HOST, &check), "%s: %s", c->name,
              decode_check_text(&check, text, sizeof(text)));
    cr_expect_eq(decode_data_fault(data), INT32_MAX);
    decode_data_free(&data);
}

Test(decode, agrees_with_long_double)
{
    struct attn_device *device = open_host();
    const uint64_t seed = random_seed(11);
    const struct decode_case cases[] = {
        { .name = "plain", .head_dim = 64, .page_size = 16, .lse = true },
        { .name = "page 1, window", .head_dim = 128, .page_size = 1, .window = 100, .lse = true },
        { .name = "page 3, sinks", .head_dim = 16, .page_size = 3, .sinks = true, .lse = true },
        { .name = "softcap", .head_dim = 80, .page_size = 48, .softcap = 1.5f, .window = 17 },
        { .name = "scales", .head_dim = 256, .page_size = 100, .k_scale = 0.25f, .v_scale = 0.5f },
        { .name = "head scales", .head_dim = 64, .page_size = 64, .scales = true, .sinks = true },
        { .name = "fused q", .head_dim = 512, .page_size = 128, .fused_q = true, .lse = true },
    };
    const enum attn_dtype types[][2] = {
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16 },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16 },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3 },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3 },
    };
    const int32_t lens[] = { 0, 1, 17, 300 };
    const int32_t ratios[COUNT(cases)] = { 2, 3, 5, 7, 1, 12, 9 };
    for (size_t i = 0; i < COUNT(cases); i++)
        for (size_t t = 0; t < COUNT(types); t++) {
            struct decode_case c = cases[i];
            c.batch = (int32_t) COUNT(lens);
            c.given_lens = lens;
            c.num_kv_heads = 2;
            c.num_q_heads = 2 * ratios[i];
            c.q_dtype = types[t][0];
            c.kv_dtype = types[t][1];
            c.layout = (enum decode_layout)((i + t) % NUM_DECODE_LAYOUTS);
            c.fill = t % 2 ? DECODE_FILL_PEAKED : DECODE_FILL_UNIFORM;
            c.poison = t % 2 ? 0xFF : 0x7F;
            c.seed = seed + i;
            expect_case(&c, device);
        }
    attn_device_close(&device);
}

Test(decode, agrees_with_long_double_on_trees)
{
    struct attn_device *device = open_host();
    // Lengths of q_len and more; rows of the mask have one word, or two.
    static const int32_t q_lens[] = { 1, 7, 32, 35 }, lens[] = { 35, 36, 50, 130 };
    for (int tree = 0; tree < NUM_DECODE_TREES; tree++)
        for (size_t i = 0; i < COUNT(q_lens); i++) {
            const struct decode_case c = {
                .name = "tree",
                .q_dtype = i % 2 ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16,
                .kv_dtype = i > 1 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_NONE,
                .batch = (int32_t) COUNT(lens),
                .given_lens = lens,
                .num_q_heads = 6,
                .num_kv_heads = 2,
                .head_dim = 32,
                .page_size = 16,
                .window = tree % 2 ? 40 : 0,
                .window_form = (enum attn_window_form)(i % 2),
                .q_len = q_lens[i],
                .tree = (enum decode_tree) tree,
                .sinks = i % 2 == 1,
                .lse = true,
                .fused_q = i % 2 == 0,
                .v_table = tree % 2 == 0,
                .seed = random_seed(15),
            };
            expect_case(&c, device);
        }
    attn_device_close(&device);
}

Test(decode, agrees_at_served_shapes)
{
    struct attn_device *device = open_host();
    for (int i = 0; i < NUM_DECODE_SHAPES; i++) {
        const struct decode_shape *const s = &decode_shapes[i];
        const struct decode_case c = {
            .name = s->name,
            .batch = 2,
            .num_q_heads = s->num_q_heads,
            .num_kv_heads = s->num_kv_heads,
            .head_dim = s->head_dim,
            .page_size = s->page_size,
            .len = 40,
            .lens = DECODE_LENS_LOG,
            .window = s->window < 40 ? s->window : 30,
            .lse = true,
            .seed = random_seed(12),
        };
        expect_case(&c, device);
    }
    attn_device_close(&device);
}

// ---- answers that follow from arithmetic

Test(decode, means_v_where_scores_are_equal)
{
    struct attn_device *device = open_host();
    // V[t][d] is 32 where t = d (mod 32): the mean counts the attended tokens of each residue.
    for (int32_t len = 0; len < 70; len++)
        for (int32_t window = 0; window < 36; window += 5) {
            const struct decode_case c = {
                .name = "mean",
                .batch = 1,
                .given_lens = &len,
                .num_q_heads = 1,
                .num_kv_heads = 1,
                .head_dim = 32,
                .page_size = 7,
                .window = window,
                .lse = true,
                .fill = DECODE_FILL_MEAN,
            };
            struct decode_data *data = build(&c, device);
            run(data, device);
            const int32_t start = window > 0 && len > window ? len - window : 0;
            for (int32_t d = 0; d < 32; d++) {
                int32_t hits = 0;
                for (int32_t t = start; t < len; t++) hits += t % 32 == d;
                const double mean = len > start ? 32.0 * hits / (len - start) : 0;
                uint16_t rounded;
                attn_store(&rounded, 0, ATTN_DTYPE_BF16, mean);
                cr_assert_eq(o_at(data, 0, 0, d), attn_load(&rounded, 0, ATTN_DTYPE_BF16),
                             "len %d, window %d, dim %d", len, window, d);
            }
            const float lse = len > start ? (float) log(len - start) : -INFINITY;
            cr_assert(lse_at(data, 0, 0) == lse || fabs(lse_at(data, 0, 0) - lse) < 1e-6);
            decode_data_free(&data);
        }
    attn_device_close(&device);
}

Test(decode, keeps_scores_far_below_zero)
{
    struct attn_device *device = open_host();
    const int32_t len = 2;
    const struct decode_case c = {
        .name = "far",
        .batch = 1,
        .given_lens = &len,
        .num_q_heads = 1,
        .num_kv_heads = 1,
        .head_dim = 64,
        .page_size = 16,
        .lse = true,
        .fill = DECODE_FILL_FAR,
        .seed = 5,
    };
    struct decode_data *data = build(&c, device);
    run(data, device);
    cr_expect(fabs(lse_at(data, 0, 0) - -66854.86) < 0.01, "%g", lse_at(data, 0, 0));
    const struct attn_decode_params p = decode_data_params(data, data->image);
    for (int32_t d = 0; d < 64; d++) {
        const int64_t page = p.block_table[0] * p.v_page_stride;
        const double mean = (attn_load(p.v_pool, page + d, ATTN_DTYPE_BF16) +
                             attn_load(p.v_pool, page + p.v_token_stride + d, ATTN_DTYPE_BF16)) /
                            2;
        cr_expect(fabs(o_at(data, 0, 0, d) - mean) <= 0x1p-8 * fabs(mean));
    }
    decode_data_free(&data);
    attn_device_close(&device);
}

// A sequence of two keys with scores 0, and what the caller changes in it.
static struct decode_data *build_two(struct attn_device *device, enum decode_fill fill, bool sinks,
                                     float softcap, int32_t len)
{
    const struct decode_case c = {
        .name = "two",
        .batch = 1,
        .given_lens = &len,
        .num_q_heads = 2,
        .num_kv_heads = 1,
        .head_dim = 32,
        .page_size = 4,
        .lse = true,
        .fill = fill,
        .sinks = sinks,
        .softcap = softcap,
    };
    return build(&c, device);
}

Test(decode, counts_the_sink_once)
{
    struct attn_device *device = open_host();
    struct decode_data *data = build_two(device, DECODE_FILL_MEAN, true, 0, 2);
    float *const sinks = decode_image(data, DECODE_ZONE_SINKS);
    sinks[0] = logf(2);
    sinks[1] = 1000;
    run(data, device);
    // e^0 + e^0 + 2 = 4; V[0][0] = 32.
    cr_expect_eq(o_at(data, 0, 0, 0), 8);
    cr_expect(fabs(lse_at(data, 0, 0) - log(4)) < 1e-6);
    cr_expect_eq(o_at(data, 0, 1, 0), 0);
    cr_expect_eq(lse_at(data, 0, 1), 1000);

    sinks[0] = INFINITY;
    sinks[1] = NAN;
    run(data, device);
    for (int32_t h = 0; h < 2; h++)
        cr_expect(isnan(o_at(data, 0, h, 3)) && isnan(lse_at(data, 0, h)));
    decode_data_free(&data);
    attn_device_close(&device);
}

Test(decode, treats_a_sink_of_minus_infinity_as_none)
{
    struct attn_device *device = open_host();
    for (int32_t len = 0; len < 40; len++) {
        struct decode_data *with = build_two(device, DECODE_FILL_UNIFORM, true, 0, len);
        struct decode_data *without = build_two(device, DECODE_FILL_UNIFORM, false, 0, len);
        float *const sinks = decode_image(with, DECODE_ZONE_SINKS);
        sinks[0] = sinks[1] = -INFINITY;
        run(with, device);
        run(without, device);
        cr_expect(decode_data_equal(with, 0, without, 0), "len %d", len);
        decode_data_free(&with);
        decode_data_free(&without);
    }
    attn_device_close(&device);
}

Test(decode, gives_zeros_for_length_0)
{
    struct attn_device *device = open_host();
    struct decode_data *data = build_two(device, DECODE_FILL_UNIFORM, true, 0, 0);
    float *const sinks = decode_image(data, DECODE_ZONE_SINKS);
    sinks[0] = 2.5f;
    sinks[1] = -INFINITY;
    run(data, device);
    for (int32_t h = 0; h < 2; h++)
        for (int32_t d = 0; d < 32; d++)
            cr_expect(o_at(data, 0, h, d) == 0 && !signbit(o_at(data, 0, h, d)));
    cr_expect_eq(lse_at(data, 0, 0), 2.5);
    cr_expect_eq(lse_at(data, 0, 1), -INFINITY);
    cr_expect_eq(decode_data_fault(data), INT32_MAX);
    decode_data_free(&data);
    attn_device_close(&device);
}

Test(decode, never_writes_minus_zero)
{
    struct attn_device *device = open_host();
    struct decode_data *data = build_two(device, DECODE_FILL_MEAN, false, 0, 2);
    uint16_t *const v = decode_image(data, DECODE_ZONE_V);
    for (size_t i = 0; i < data->zones[DECODE_ZONE_V].bytes / 2; i++)
        if (v[i] == 0) v[i] = 0x8000;
    run(data, device);
    for (int32_t d = 2; d < 32; d++) cr_expect(!signbit(o_at(data, 0, 0, d)), "dim %d", d);
    decode_data_free(&data);
    attn_device_close(&device);
}

Test(decode, caps_infinite_scores)
{
    struct attn_device *device = open_host();
    // Every score is -inf: capped it is -c, uncapped it weighs nothing.
    struct decode_data *capped = build_two(device, DECODE_FILL_MINUS_INF, false, 3, 2);
    struct decode_data *uncapped = build_two(device, DECODE_FILL_MINUS_INF, false, 0, 2);
    run(capped, device);
    run(uncapped, device);
    cr_expect(fabs(lse_at(capped, 0, 0) - (log(2) - 3)) < 1e-6);
    cr_expect_neq(o_at(capped, 0, 0, 1), 0);
    cr_expect_eq(lse_at(uncapped, 0, 0), -INFINITY);
    for (int32_t d = 0; d < 32; d++) cr_expect_eq(o_at(uncapped, 0, 0, d), 0);
    decode_data_free(&capped);
    decode_data_free(&uncapped);
    attn_device_close(&device);
}

Test(decode, lets_attended_nan_and_infinity_through)
{
    struct attn_device *device = open_host();
    const enum decode_fill fills[] = { DECODE_FILL_NAN_K, DECODE_FILL_NAN_V, DECODE_FILL_INF_V,
                                       DECODE_FILL_NAN_Q };
    for (size_t i = 0; i < COUNT(fills); i++) {
        struct decode_data *data = build_two(device, fills[i], false, 0, 400);
        run(data, device);
        const bool whole = fills[i] == DECODE_FILL_NAN_K || fills[i] == DECODE_FILL_NAN_Q;
        cr_expect_eq(isnan(o_at(data, 0, 0, 0)), whole, "fill %d", (int) fills[i]);
        cr_expect_eq(isnan(lse_at(data, 0, 0)), whole, "fill %d", (int) fills[i]);
        if (fills[i] == DECODE_FILL_NAN_V) cr_expect(isnan(o_at(data, 0, 0, 16)));
        if (fills[i] == DECODE_FILL_INF_V) cr_expect_eq(o_at(data, 0, 0, 16), INFINITY);
        cr_expect_eq(isnan(o_at(data, 0, 1, 0)), fills[i] == DECODE_FILL_NAN_K);
        decode_data_free(&data);
    }
    attn_device_close(&device);
}

Test(decode, keeps_large_v_finite)
{
    struct attn_device *device = open_host();
    const struct decode_case c = {
        .name = "huge",
        .batch = 3,
        .num_q_heads = 4,
        .num_kv_heads = 2,
        .head_dim = 64,
        .page_size = 16,
        .len = 200,
        .lens = DECODE_LENS_LOG,
        .fill = DECODE_FILL_HUGE,
        .seed = random_seed(14),
    };
    expect_case(&c, device);
    attn_device_close(&device);
}

// ---- faults

enum {
    FAULT_BATCH = 6
};

static struct decode_data *build_faulty(const struct attn_device *device)
{
    const struct decode_case c = {
        .name = "faults",
        .batch = FAULT_BATCH,
        .num_q_heads = 2,
        .num_kv_heads = 1,
        .head_dim = 32,
        .page_size = 4,
        .len = 30,
        .window = 20,
        .lse = true,
        .extra_columns = 2,
        .seed = 21,
    };
    return build(&c, device);
}

static int32_t *table_row(const struct decode_data *data, int32_t sequence)
{
    int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
    return table + (int64_t) sequence * data->params.max_pages_per_seq;
}

Test(decode, reports_bad_pages_and_leaves_them_out)
{
    struct attn_device *device = open_host();
    const int64_t bad[] = { -1, INT32_MIN, INT32_MAX, 0 };
    struct decode_data *clean = build_faulty(device);
    run(clean, device);
    for (size_t i = 0; i < COUNT(bad); i++) {
        struct decode_data *data = build_faulty(device);
        // Keys 12 .. 15 of sequences 3 and 4; attended are 10 .. 29.
        for (int32_t b = 3; b < 5; b++)
            table_row(data, b)[3] = (int32_t) (bad[i] ? bad[i] : data->params.num_pages);
        run(data, device);
        cr_expect_eq(decode_data_fault(data), 3);
        for (int32_t b = 0; b < FAULT_BATCH; b++)
            cr_expect_eq(decode_data_equal(data, b, clean, b), b != 3 && b != 4,
                         "page %lld, sequence %d", (long long) bad[i], b);
        cr_expect(lse_at(data, 3, 0) < lse_at(clean, 3, 0));
        decode_data_free(&data);
    }
    decode_data_free(&clean);
    attn_device_close(&device);
}

Test(decode, clamps_lengths_and_reports_them)
{
    struct attn_device *device = open_host();
    struct decode_data *clean = build_faulty(device), *data = build_faulty(device);
    int32_t *const lens = decode_image(data, DECODE_ZONE_LENS);
    run(clean, device);
    lens[2] = INT32_MIN;
    lens[5] = INT32_MAX;
    run(data, device);
    cr_expect_eq(decode_data_fault(data), 2);
    cr_expect_eq(lse_at(data, 2, 0), -INFINITY);
    cr_expect_eq(o_at(data, 2, 0, 0), 0);
    for (int32_t b = 0; b < FAULT_BATCH; b++)
        if (b != 2 && b != 5) cr_expect(decode_data_equal(data, b, clean, b), "sequence %d", b);
    // A fault word that is lower already stays: it is never reset.
    *(int32_t *) decode_image(data, DECODE_ZONE_FAULT) = 1;
    run(data, device);
    cr_expect_eq(decode_data_fault(data), 1);
    decode_data_free(&clean);
    decode_data_free(&data);
    attn_device_close(&device);
}

// ---- offsets beyond 32 bits

// Memory that reads as zeros and takes no room until it is written to; NULL if there is none.
static void *map_sparse(const size_t bytes)
{
    void *const memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

// Three sequences of one key each, on the last pages of a pool whose pages are far apart, as are
// the rows of the table and of q: the output is the key's value.
Test(decode, reaches_far_pages_rows_and_queries)
{
    enum {
        SEQUENCES = 3,
        DIM = 16,
        LAST_PAGE = 4563,
        PAGE_STRIDE = 1435968,
        WIDTH = 1 << 30,
    };
    const int64_t q_stride = (int64_t) 1 << 30;
    const size_t pool_bytes = (size_t) (LAST_PAGE + 1) * PAGE_STRIDE * 2;
    const size_t table_bytes = (size_t) SEQUENCES * WIDTH * sizeof(int32_t);
    const size_t q_bytes = (size_t) (SEQUENCES * q_stride) * 2;
    uint16_t *const pool = map_sparse(pool_bytes), *const q = map_sparse(q_bytes);
    int32_t *const table = map_sparse(table_bytes);
    if (!pool || !q || !table)
        cr_skip_test("this machine has no %zu bytes of addresses to give",
                     pool_bytes + table_bytes + q_bytes);
    struct attn_device *device = open_host();
    _Alignas(16) uint16_t o[SEQUENCES][DIM];
    const int32_t lens[SEQUENCES] = { 1, 1, 1 };
    float lse[SEQUENCES];
    // K begins with 2^b, and so is the score; V, behind it, with a number of its own.
    for (int32_t b = 0; b < SEQUENCES; b++) {
        table[(int64_t) b * WIDTH] = LAST_PAGE - b;
        q[b * q_stride] = 0x3F80;
        pool[(int64_t) (LAST_PAGE - b) * PAGE_STRIDE] = (uint16_t) (0x3F80 + (b << 7));
        pool[(int64_t) (LAST_PAGE - b) * PAGE_STRIDE + DIM] = (uint16_t) (0x4000 + b);
    }
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = SEQUENCES;
    params.num_q_heads = params.num_kv_heads = params.page_size = 1;
    params.head_dim = DIM;
    params.max_pages_per_seq = WIDTH;
    params.num_pages = LAST_PAGE + 1;
    params.q = q;
    params.q_stride = q_stride;
    params.o = o;
    params.k_pool = pool;
    params.v_pool = pool + DIM;
    params.k_page_stride = params.v_page_stride = PAGE_STRIDE;
    params.k_token_stride = params.v_token_stride = 2 * DIM;
    params.k_head_stride = params.v_head_stride = DIM;
    params.block_table = table;
    params.seq_lens = lens;
    params.lse = lse;
    cr_assert_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    for (int32_t b = 0; b < SEQUENCES; b++) {
        cr_expect_eq(o[b][0], 0x4000 + b, "sequence %d", b);
        cr_expect_eq(lse[b], (float) (1 << b), "sequence %d", b);
    }
    munmap(pool, pool_bytes);
    munmap(q, q_bytes);
    munmap(table, table_bytes);
    attn_device_close(&device);
}

// ---- threads

struct worker {
    struct attn_device *device;
    struct decode_data *data;
    pthread_barrier_t *all_refused;
    int32_t wrong_batch;
    bool right;
};

// The right call and one that is refused, in turn: the sentence of a thread is its own.
static void *work(void *const user)
{
    struct worker *const worker = user;
    char sentence[64];
    snprintf(sentence, sizeof(sentence), "batch is %d", worker->wrong_batch);
    worker->right = true;
    for (int i = 0; i < 20; i++) {
        struct attn_decode_params wrong = decode_data_params(worker->data, worker->data->image);
        wrong.batch = worker->wrong_batch;
        worker->right &= decode_data_run_host(worker->data, worker->device) == ATTN_OK;
        worker->right &= attn_decode(worker->device, &wrong, NULL) == ATTN_ERROR_INVALID;
        pthread_barrier_wait(worker->all_refused);
        worker->right &= strstr(attn_last_error(), sentence) != NULL;
        pthread_barrier_wait(worker->all_refused);
    }
    return NULL;
}

Test(decode, serves_many_threads_on_one_device)
{
    struct attn_device *device = open_host();
    struct decode_data *alone = build_faulty(device);
    struct worker workers[4];
    pthread_t threads[COUNT(workers)];
    pthread_barrier_t all_refused;
    run(alone, device);
    cr_assert_eq(pthread_barrier_init(&all_refused, NULL, COUNT(workers)), 0);
    for (size_t i = 0; i < COUNT(workers); i++) {
        workers[i] =
            (struct worker){ device, build_faulty(device), &all_refused, -1 - (int32_t) i, false };
        cr_assert_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < COUNT(workers); i++) {
        pthread_join(threads[i], NULL);
        cr_expect(workers[i].right, "thread %zu", i);
        for (int32_t b = 0; b < FAULT_BATCH; b++)
            cr_expect(decode_data_equal(workers[i].data, b, alone, b), "thread %zu", i);
        decode_data_free(&workers[i].data);
    }
    pthread_barrier_destroy(&all_refused);
    decode_data_free(&alone);
    attn_device_close(&device);
}

// ---- the check can fail

Test(check, rejects_what_is_wrong)
{
    struct attn_device *device = open_host();
    const struct decode_case c = {
        .name = "check",
        .batch = 2,
        .num_q_heads = 4,
        .num_kv_heads = 2,
        .head_dim = 64,
        .page_size = 16,
        .len = 100,
        .window = 50,
        .lse = true,
        .fill = DECODE_FILL_MEAN,
    };
    struct decode_data *data = build(&c, device);
    struct attn_check check;
    run(data, device);
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check));

    uint16_t *const o = (uint16_t *) (data->result + data->zones[DECODE_ZONE_O].offset);
    float *const lse = (float *) (data->result + data->zones[DECODE_ZONE_LSE].offset);
    const uint16_t element = o[77];
    const float sum = lse[3];
    o[77] = (uint16_t) (element ^ 0x0080);
    cr_expect(!decode_data_check(data, ATTN_CHECK_KERNEL, &check));
    cr_expect(check.failed == 1 && check.worst_head == 1 && check.worst_dim == 13);
    o[77] = 0x7FC0;
    cr_expect(!decode_data_check(data, ATTN_CHECK_KERNEL, &check) && check.failed == 1);
    o[77] = element;
    lse[3] = sum + 0.001f;
    cr_expect(!decode_data_check(data, ATTN_CHECK_KERNEL, &check) && check.lse_failed == 1);
    lse[3] = sum;
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check));

    // A window that is off by one.
    data->params.window = 51;
    cr_expect(!decode_data_check(data, ATTN_CHECK_KERNEL, &check));
    data->params.window = 49;
    cr_expect(!decode_data_check(data, ATTN_CHECK_KERNEL, &check));
    decode_data_free(&data);
    attn_device_close(&device);
}

Test(check, notices_a_byte_out_of_place)
{
    struct attn_device *device = open_host();
    struct decode_data *data = build_faulty(device);
    run(data, device);
    const size_t places[] = {
        0,
        data->zones[DECODE_ZONE_K].offset,
        data->zones[DECODE_ZONE_O].offset - 1,
        data->zones[DECODE_ZONE_O].offset + data->zones[DECODE_ZONE_O].bytes,
        data->bytes - 1,
    };
    for (size_t i = 0; i < COUNT(places); i++) {
        data->result[places[i]] ^= 1;
        cr_expect(!decode_data_intact(data), "place %zu", i);
        data->result[places[i]] ^= 1;
    }
    cr_expect(decode_data_intact(data));
    decode_data_free(&data);
    attn_device_close(&device);
}

Test(check, holds_given_values_against_the_bound)
{
    struct attn_device *device = open_host();
    struct decode_data *data = build_faulty(device);
    run(data, device);
    enum {
        ROWS = FAULT_BATCH * 2,
        ELEMENTS = ROWS * 32
    };
    double o[ELEMENTS], lse[ROWS];
    const struct attn_decode_params p = decode_data_params(data, data->image);
    for (int i = 0; i < ELEMENTS; i++)
        o[i] = attn_load(decode_result(data, DECODE_ZONE_O), i, p.q_dtype);
    for (int i = 0; i < ROWS; i++) lse[i] = lse_at(data, i / 2, i % 2);
    struct attn_check check;
    const void *const result = decode_result(data, DECODE_ZONE_O);
    const float *const result_lse = decode_result(data, DECODE_ZONE_LSE);
    cr_expect_eq(attn_check_decode_expected(&p, result, result_lse, o, lse, ATTN_CHECK_HOST,
                                            &check),
                 0);
    cr_expect(check.compared == ELEMENTS && check.failed == 0 && check.max_error == 0);
    o[40] += 0.1;
    lse[2] += 0.1;
    cr_expect_eq(attn_check_decode_expected(&p, result, result_lse, o, lse, ATTN_CHECK_HOST,
                                            &check),
                 0);
    cr_expect(check.failed == 1 && check.lse_failed == 1 && check.worst_dim == 8);
    decode_data_free(&data);
    attn_device_close(&device);
}

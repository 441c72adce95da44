/* SPDX-License-Identifier: Apache-2.0 */
// The bits of a sequence depend on that sequence alone: each test changes what should not matter.
#include "tests/support/decode_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

enum {
    BATCH = 12
};

static struct attn_device *device;

static void open_host(void)
{
    const struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void close_host(void)
{
    attn_device_close(&device);
}

TestSuite(invariance, .init = open_host, .fini = close_host);

static struct decode_case base_case(void)
{
    const struct decode_case c = {
        .name = "base",
        .batch = BATCH,
        .num_q_heads = 6,
        .num_kv_heads = 2,
        .head_dim = 64,
        .page_size = 16,
        .len = 700,
        .lens = DECODE_LENS_LOG,
        .window = 300,
        .sinks = true,
        .lse = true,
        .scales = true,
        .seed = random_seed(31),
    };
    return c;
}

static struct decode_data *run(const struct decode_case *c)
{
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, c, device), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(decode_data_run_host(data, device), ATTN_OK, "%s", attn_last_error());
    cr_expect(decode_data_intact(data));
    return data;
}

// Runs `c`, whose ids are those of `base` in the same order, and compares every sequence.
static void expect_same(const struct decode_case *c, const char *what)
{
    const struct decode_case base = base_case();
    struct decode_data *a = run(&base), *b = run(c);
    for (int32_t i = 0; i < BATCH; i++)
        cr_expect(decode_data_equal(a, i, b, i), "%s, sequence %d, seed %llu", what, i,
                  (unsigned long long) base.seed);
    decode_data_free(&a);
    decode_data_free(&b);
}

Test(invariance, alone_and_in_any_order)
{
    const struct decode_case base = base_case();
    struct decode_data *all = run(&base);
    int32_t reversed[BATCH];
    for (int32_t i = 0; i < BATCH; i++) reversed[i] = BATCH - 1 - i;
    struct decode_case c = base;
    c.ids = reversed;
    struct decode_data *backwards = run(&c);
    for (int32_t i = 0; i < BATCH; i++) {
        c.ids = &i;
        c.batch = 1;
        struct decode_data *alone = run(&c);
        cr_expect(decode_data_equal(alone, 0, all, i), "sequence %d alone", i);
        cr_expect(decode_data_equal(backwards, BATCH - 1 - i, all, i),
                  "sequence %d in another order", i);
        decode_data_free(&alone);
    }
    decode_data_free(&backwards);
    decode_data_free(&all);
}

Test(invariance, any_pages)
{
    const int32_t page_sizes[] = { 1, 2, 3, 8, 48, 64, 100, 1024 };
    for (size_t i = 0; i < sizeof(page_sizes) / sizeof(page_sizes[0]); i++) {
        struct decode_case c = base_case();
        c.page_size = page_sizes[i];
        c.page_seed = 100 + i;
        c.extra_columns = (int32_t) i * 3;
        expect_same(&c, "page size, page ids, table width");
    }
}

Test(invariance, any_strides)
{
    for (int layout = 0; layout < NUM_DECODE_LAYOUTS; layout++) {
        struct decode_case c = base_case();
        c.layout = (enum decode_layout) layout;
        c.fused_q = layout % 2 == 1;
        expect_same(&c, "layout");
    }
}

Test(invariance, any_bytes_where_nothing_is_read)
{
    const uint8_t bytes[] = { 0x7F, 0x01, 0x80 };
    for (size_t i = 0; i < sizeof(bytes); i++) {
        struct decode_case c = base_case();
        c.poison = bytes[i];
        expect_same(&c, "poison");
    }
}

Test(invariance, lse_asked_for_or_not)
{
    struct decode_case c = base_case();
    c.lse = false;
    expect_same(&c, "without lse");
}

Test(invariance, neighbours_full_of_nan)
{
    const struct decode_case c = base_case();
    struct decode_data *clean = run(&c), *data;
    cr_assert_eq(decode_data_build(&data, &c, device), ATTN_OK);
    const struct attn_decode_params p = decode_data_params(data, data->image);
    // Every odd sequence: q, and with it every score.
    uint16_t *const q = decode_image(data, DECODE_ZONE_Q);
    for (int32_t b = 1; b < BATCH; b += 2)
        for (int64_t i = 0; i < p.num_q_heads * p.head_dim; i++) q[b * p.q_stride + i] = 0x7FC0;
    cr_assert_eq(decode_data_run_host(data, device), ATTN_OK);
    for (int32_t b = 0; b < BATCH; b++)
        cr_expect_eq(decode_data_equal(data, b, clean, b), b % 2 == 0, "sequence %d", b);
    decode_data_free(&clean);
    decode_data_free(&data);
}

// Each call takes its own scalars, whatever the one before it had. All keys are there, so that a
// window of another call would not show by what lies outside of this one's.
Test(invariance, takes_its_own_scalars)
{
    struct decode_case c = base_case();
    c.window = 0;
    c.scales = false;
    struct decode_data *first = run(&c), *other = run(&c);
    const struct attn_decode_params base = first->params;
    struct attn_decode_params changes[5] = { base, base, base, base, base };
    changes[0].window = 33;
    changes[1].scale = 0.5f;
    changes[2].softcap = 2;
    changes[3].k_scale = 0.25f;
    changes[4].v_scale = 0.5f;
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        int32_t changed = 0;
        other->params = changes[i];
        cr_assert_eq(decode_data_run_host(other, device), ATTN_OK, "%s", attn_last_error());
        for (int32_t b = 0; b < BATCH; b++) changed += !decode_data_equal(first, b, other, b);
        cr_expect_gt(changed, BATCH / 4, "scalar %zu changes %d sequences", i, changed);
        other->params = base;
        cr_assert_eq(decode_data_run_host(other, device), ATTN_OK, "%s", attn_last_error());
        for (int32_t b = 0; b < BATCH; b++)
            cr_expect(decode_data_equal(first, b, other, b), "after scalar %zu: sequence %d", i, b);
    }
    decode_data_free(&first);
    decode_data_free(&other);
}

// Scores 0 and one bit of V a token: o names the attended tokens, at every edge of a window.
Test(invariance, exact_window_edges)
{
    int32_t lens[200];
    for (int32_t b = 0; b < 200; b++) lens[b] = b + 1;
    for (int32_t window = 1; window <= 66; window++) {
        const struct decode_case c = {
            .name = "bits",
            .batch = 200,
            .given_lens = lens,
            .num_q_heads = 1,
            .num_kv_heads = 1,
            .head_dim = 64,
            .page_size = 1 + window % 17,
            .window = window,
            .fill = DECODE_FILL_BITS,
        };
        struct decode_data *data = run(&c);
        for (int32_t i = 0; i < 200 * 64; i++) {
            const int32_t len = lens[i / 64], start = len > window ? len - window : 0;
            const double mean = decode_bits_mean(64, start, len, i % 64);
            const double o = attn_load(decode_result(data, DECODE_ZONE_O), i, ATTN_DTYPE_BF16);
            cr_assert(fabs(o - mean) <= mean * 0x1p-8, "len %d, window %d, dim %d: %g for %g", len,
                      window, i % 64, o, mean);
        }
        decode_data_free(&data);
    }
}

// The comparison itself: what should matter, does.
Test(invariance, notices_a_changed_bit_and_other_contents)
{
    struct decode_case c = base_case();
    struct decode_data *a = run(&c), *b = run(&c);
    cr_expect(decode_data_equal(a, 3, b, 3));
    cr_expect(!decode_data_equal(a, 3, b, 4));
    b->result[b->zones[DECODE_ZONE_O].offset + 3 * 6 * 64 * 2 + 11] ^= 1;
    cr_expect(!decode_data_equal(a, 3, b, 3));
    b->result[b->zones[DECODE_ZONE_LSE].offset + 5 * 6 * 4] ^= 1;
    cr_expect(!decode_data_equal(a, 5, b, 5));
    decode_data_free(&b);

    c.window = 299;
    b = run(&c);
    const int32_t *const lens = decode_result(a, DECODE_ZONE_LENS);
    for (int32_t i = 0; i < BATCH; i++)
        cr_expect_eq(decode_data_equal(a, i, b, i), lens[i] < 300, "sequence %d, length %d", i,
                     lens[i]);
    decode_data_free(&a);
    decode_data_free(&b);
}

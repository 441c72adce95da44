/* SPDX-License-Identifier: Apache-2.0 */
// Tests of the short form of prefill that hold for every device; a program includes them once. It
// is the definition of prefill, has the bits of decode whatever else is in the batch, and leaves
// other sequences to the long form, whose bits do not change.
//
// The program has, before it includes them:
//   device, stream   what the calls are given
//   bound            that of a kernel, or that of the host executor
//   kinds, NUM_KINDS types and head_dims that have kernels of both forms; on the host executor any
//   take, release    memory that host and device see, 256-byte aligned; take gives NULL if there is
//                    none
//   finish           waits until all calls are done
// and TestSuite(short_form), which opens them.
#ifndef ATTN_TESTS_SHORT_SUITE_H
#define ATTN_TESTS_SHORT_SUITE_H

#include "attn/attn.h"
#include "host/prefill.h"
#include "tests/support/prefill_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    MOST = ATTN_PREFILL_SHORT_TOKENS,
    SAMPLED_ROWS = 300,
};

// Both forms, no query tokens, fewer and more keys than positions, tokens before the first.
static const struct prefill_sequence mixed[] = {
    { 1, 1, 1, 0 },           { 2, 0, 40, 3 },   { 3, 5, 300, 295 },    { 4, MOST, MOST, 0 },
    { 5, MOST + 1, 300, 43 }, { 6, 3, 0, 0 },    { 7, 30, 20, 10 },     { 8, 1, 650, 649 },
    { 9, 17, 400, 100 },      { 10, 9, 64, -3 }, { 11, 255, 500, 245 }, { 12, 4, 9, -20 },
};

// ---- running

static void *need(const size_t bytes)
{
    void *const memory = take((bytes + 255) / 256 * 256 + 256);
    cr_assert_not_null(memory, "%zu bytes", bytes);
    return memory;
}

// What the short form wants: nothing where no call has it.
struct scratch {
    void *workspace;
    int32_t *counters;
    size_t bytes;
    int32_t num_counters;
};

static struct scratch need_scratch(const struct attn_prefill_params *params)
{
    const struct attn_prefill_shape shape = attn_prefill_shape_of(params);
    struct scratch s;
    cr_assert_eq(attn_prefill_workspace(device, &shape, &s.bytes), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(attn_prefill_counters(device, &shape, &s.num_counters), ATTN_OK);
    s.workspace = need(s.bytes);
    s.counters = need((size_t) s.num_counters * 4);
    // What it holds does not matter: NaN.
    memset(s.workspace, 0xFF, s.bytes);
    memset(s.counters, 0, (size_t) s.num_counters * 4);
    return s;
}

static void release_scratch(struct scratch *s)
{
    for (int32_t i = 0; i < s->num_counters; i++)
        cr_assert_eq(s->counters[i], 0, "counter %d is left at %d", i, s->counters[i]);
    release(s->workspace);
    release(s->counters);
}

static void run_image(struct prefill_data *data, bool has_workspace)
{
    void *const memory = need(data->bytes);
    memcpy(memory, data->image, data->bytes);
    struct attn_prefill_params params = prefill_data_params(data, memory);
    struct scratch s = need_scratch(&params);
    if (has_workspace) {
        params.workspace = s.workspace;
        params.workspace_bytes = s.bytes;
        params.counters = s.counters;
    }
    const enum attn_status status = attn_prefill(device, &params, stream);
    cr_assert_eq(status, ATTN_OK, "%s: %s: %s", data->c.name, attn_status_name(status),
                 attn_last_error());
    finish();
    memcpy(data->result, memory, data->bytes);
    release_scratch(&s);
    release(memory);
}

static struct prefill_data *build(const struct prefill_case *c)
{
    struct prefill_data *const data = prefill_data_build(c);
    cr_assert_not_null(data, "%s: out of memory", c->name);
    return data;
}

static struct prefill_data *run(const struct prefill_case *c, bool has_workspace)
{
    struct prefill_data *const data = build(c);
    run_image(data, has_workspace);
    cr_expect(prefill_data_intact(data), "%s: wrote where it should not", c->name);
    return data;
}

static void expect_right(const struct prefill_data *data)
{
    const struct prefill_case *const c = &data->c;
    char found[512];
    struct attn_check check;
    cr_expect(prefill_data_check(data, SAMPLED_ROWS, bound, &check),
              "%s: %s, head_dim %d, page %d, window %d: %s", c->name, attn_dtype_name(c->dtype),
              c->head_dim, c->page_size, c->window,
              prefill_check_text(&check, found, sizeof(found)));
    cr_expect_eq(prefill_data_fault(data), INT32_MAX, "%s: fault %d", c->name,
                 prefill_data_fault(data));
}

// ---- the bits of decode

// Tokens [first, first + count) of a sequence as a chain to verify. o and lse follow each other.
static void *decode_tokens(const struct prefill_data *data, uint8_t *memory, int32_t sequence,
                           int32_t first, int32_t count)
{
    const struct attn_prefill_params p = prefill_data_params(data, memory);
    const size_t rows = (size_t) count * (size_t) p.num_q_heads;
    const size_t o_bytes = rows * (size_t) p.head_dim * 2;
    uint8_t *const out = need(o_bytes + rows * 4);
    int32_t *const len = need(4);
    *len = data->sequences[sequence].q_offset + first + count;
    struct attn_decode_params d = ATTN_DECODE_PARAMS_INIT;
    d.q_dtype = d.kv_dtype = p.dtype;
    d.batch = 1;
    d.q_len = count;
    d.num_q_heads = p.num_q_heads;
    d.num_kv_heads = p.num_kv_heads;
    d.head_dim = p.head_dim;
    d.page_size = p.page_size;
    d.max_pages_per_seq = p.max_pages_per_seq;
    d.num_pages = p.num_pages;
    d.q = (const uint16_t *) p.q + (data->first_token[sequence] + first) * p.q_token_stride;
    d.q_token_stride = p.q_token_stride;
    d.o = out;
    d.lse = (float *) (out + o_bytes);
    d.k_pool = p.k;
    d.v_pool = p.v;
    d.k_page_stride = p.k_page_stride;
    d.k_token_stride = p.k_token_stride;
    d.k_head_stride = p.k_head_stride;
    d.v_page_stride = p.v_page_stride;
    d.v_token_stride = p.v_token_stride;
    d.v_head_stride = p.v_head_stride;
    d.block_table = p.block_table + sequence * p.table_stride;
    d.seq_lens = len;
    d.sinks = p.sinks;
    d.scale = p.scale;
    d.softcap = p.softcap;
    d.window = p.window;
    const struct attn_decode_shape shape = attn_decode_shape_of(&d);
    int32_t num_counters;
    cr_assert_eq(attn_decode_workspace(device, &shape, &d.workspace_bytes), ATTN_OK);
    cr_assert_eq(attn_decode_counters(device, &shape, &num_counters), ATTN_OK);
    d.workspace = need(d.workspace_bytes);
    d.counters = need((size_t) num_counters * 4);
    memset(d.counters, 0, (size_t) num_counters * 4);
    cr_assert_eq(attn_decode(device, &d, stream), ATTN_OK, "%s", attn_last_error());
    finish();
    release(d.workspace);
    release(d.counters);
    release(len);
    return out;
}

// Sequences that decode can be asked for: their last token is at the last key, or before it.
static bool is_chain(const struct prefill_sequence *s)
{
    return s->q_len > 0 && s->q_len <= MOST && s->q_offset >= 0 &&
           s->q_offset + s->q_len <= s->kv_len;
}

static void expect_bits_of_decode(const struct prefill_data *data, int32_t sequence)
{
    const struct prefill_sequence *const s = &data->sequences[sequence];
    const struct prefill_case *const c = &data->c;
    const size_t row = (size_t) c->num_q_heads * (size_t) c->head_dim * 2;
    const size_t lse_row = (size_t) c->num_q_heads * 4;
    uint8_t *const o = prefill_zone(data, data->result, PREFILL_ZONE_O);
    uint8_t *const lse = prefill_zone(data, data->result, PREFILL_ZONE_LSE);
    uint8_t *const memory = need(data->bytes);
    memcpy(memory, data->image, data->bytes);
    for (int32_t first = 0; first < s->q_len; first += ATTN_DECODE_MAX_Q_LEN) {
        const int32_t left = s->q_len - first;
        const size_t count = (size_t) (left < ATTN_DECODE_MAX_Q_LEN ? left : ATTN_DECODE_MAX_Q_LEN);
        const size_t at = (size_t) (data->first_token[sequence] + first);
        uint8_t *const decoded = decode_tokens(data, memory, sequence, first, (int32_t) count);
        cr_expect(!memcmp(decoded, o + at * row, count * row) &&
                      !memcmp(decoded + count * row, lse + at * lse_row, count * lse_row),
                  "%s: %s, head_dim %d, page %d, window %d: sequence %d, tokens from %d on",
                  c->name, attn_dtype_name(c->dtype), c->head_dim, c->page_size, c->window,
                  sequence, first);
        release(decoded);
    }
    release(memory);
}

static struct prefill_case vary(size_t kind, size_t n, const char *name)
{
    static const int32_t page_sizes[] = { 16, 1, 64, 24, 7 }, windows[] = { 0, 0, 40, 1, 300 };
    return (struct prefill_case){
        .name = name,
        .dtype = kinds[kind].dtype,
        .head_dim = kinds[kind].head_dim,
        .num_q_heads = n % 3 == 1 ? 2 : 1,
        .num_kv_heads = n % 6 == 4 ? 2 : 1,
        .batch = COUNT(mixed),
        .sequences = mixed,
        .ragged = true,
        .page_size = page_sizes[n % COUNT(page_sizes)],
        .window = windows[n % COUNT(windows)],
        .softcap = n % 4 == 1 ? 5 : 0,
        .sinks = n % 3 < 2,
        .strided = n % 2,
        .fill = (enum prefill_fill)(n % 3),
        .seed = random_seed(91) + n,
        .page_seed = n,
    };
}

Test(short_form, has_the_bits_of_decode)
{
    for (size_t k = 0; k < NUM_KINDS; k++)
        for (size_t n = k; n < k + 3; n++) {
            const struct prefill_case c = vary(k, n, "mixed");
            struct prefill_data *data = run(&c, true);
            expect_right(data);
            for (int32_t b = 0; b < c.batch; b++)
                if (is_chain(&data->sequences[b])) expect_bits_of_decode(data, b);
            prefill_data_free(&data);
        }
}

Test(short_form, serves_sequences_of_one_length)
{
    static const int32_t lengths[] = { 1, 2, 7, MOST };
    for (size_t k = 0; k < NUM_KINDS; k++)
        for (size_t n = 0; n < COUNT(lengths); n++) {
            const int32_t q_len = lengths[n], keys = q_len + 170;
            const struct prefill_sequence sequences[] = { { 1, q_len, keys, keys - q_len },
                                                          { 2, 0, 0, 0 },
                                                          { 3, 0, 0, 0 } };
            struct prefill_case c = vary(k, n + k, "uniform");
            c.sequences = sequences;
            c.ragged = false;
            c.batch = q_len == MOST ? 1 : 3;
            struct prefill_data *data = run(&c, true);
            expect_right(data);
            for (int32_t b = 0; b < c.batch; b++) expect_bits_of_decode(data, b);
            prefill_data_free(&data);
        }
}

// There are query tokens, but they are nobody's.
Test(short_form, writes_nothing_without_sequences)
{
    static const struct prefill_sequence none[] = { { 1, 0, 40, 3 }, { 2, 0, 0, 0 } };
    for (size_t k = 0; k < NUM_KINDS; k++) {
        struct prefill_case c = vary(k, k, "nobody");
        c.sequences = none;
        c.batch = COUNT(none);
        struct prefill_data *data = run(&c, true);
        cr_expect_eq(prefill_data_fault(data), INT32_MAX);
        prefill_data_free(&data);
    }
}

// More sequences than the copying warp counts alone, and than there are threads; also some that are
// long, and none that is not.
Test(short_form, finds_its_sequences_in_large_batches)
{
    static struct prefill_sequence many[400];
    static const int32_t batches[] = { 33, 32, 192, 400 };
    for (size_t n = 0; n < COUNT(batches); n++) {
        for (int32_t i = 0; i < batches[n]; i++) {
            const int32_t q_len = i % 131 == 7 ? MOST + 3 : i % 13 == 5 ? 70 : i % 3 ? i % 5 : 0;
            many[i] =
                (struct prefill_sequence){ (uint64_t) i, q_len, q_len + i % 50 * 7, i % 50 * 7 };
        }
        struct prefill_case c = vary(0, n * 5, "many");
        c.sequences = many;
        c.batch = batches[n];
        c.num_q_heads = c.num_kv_heads = 1;
        struct prefill_data *data = run(&c, true);
        expect_right(data);
        for (int32_t b = 0; b < c.batch; b += 5)
            if (is_chain(&many[b])) expect_bits_of_decode(data, b);
        prefill_data_free(&data);
    }
}

// ---- the same bits

Test(short_form, has_the_same_bits_alone_and_in_company)
{
    for (size_t k = 0; k < NUM_KINDS; k++) {
        const struct prefill_case c = vary(k, k % 2 ? 2 : 5, "company");
        struct prefill_data *all = run(&c, true), *without = run(&c, false);
        for (int32_t b = 0; b < c.batch; b++) {
            struct prefill_case alone = c;
            if (mixed[b].q_len == 0) continue;
            alone.batch = 1;
            alone.sequences = &mixed[b];
            alone.ragged = b % 2;
            alone.page_size = b % 3 ? 16 : 5;
            struct prefill_data *data = run(&alone, true);
            cr_expect_eq(prefill_count_differences(all, b, 0, data, 0, 0, mixed[b].q_len), 0,
                         "%s, head_dim %d: sequence %d alone", attn_dtype_name(c.dtype), c.head_dim,
                         b);
            if (mixed[b].q_len > MOST)
                cr_expect_eq(prefill_count_differences(without, b, 0, data, 0, 0, mixed[b].q_len),
                             0, "%s, head_dim %d: a long sequence", attn_dtype_name(c.dtype),
                             c.head_dim);
            prefill_data_free(&data);
        }
        prefill_data_free(&all);
        prefill_data_free(&without);
    }
}

// A workspace changes nothing where there is no short form.
Test(short_form, leaves_other_calls_to_the_long_form)
{
    for (size_t k = 0; k < NUM_KINDS; k++)
        for (int n = 0; n < 2; n++) {
            struct prefill_case c = vary(k, k, "no short form");
            if (n == 0) c.page_size = 0;
            c.not_causal = n == 1;
            struct prefill_data *with = run(&c, true), *without = run(&c, false);
            expect_right(with);
            cr_expect_eq(prefill_count_all_differences(with, without), 0, "%s, head_dim %d",
                         attn_dtype_name(c.dtype), c.head_dim);
            prefill_data_free(&with);
            prefill_data_free(&without);
        }
}

// ---- bad data

// What the definition says to the same image.
static int32_t defined_fault(const struct prefill_data *data)
{
    uint8_t *const memory = need(data->bytes);
    memcpy(memory, data->image, data->bytes);
    const struct attn_prefill_params params = prefill_data_params(data, memory);
    attn_reference_prefill(&params);
    const int32_t fault = *params.fault;
    release(memory);
    return fault;
}

Test(short_form, reports_entries_that_cannot_be_followed)
{
    static const struct {
        enum prefill_zone zone;
        int32_t index, value;
    } cases[] = {
        { PREFILL_ZONE_CU_SEQLENS, 0, -1 },        { PREFILL_ZONE_CU_SEQLENS, 3, 2 },
        { PREFILL_ZONE_CU_SEQLENS, 8, INT32_MAX }, { PREFILL_ZONE_CU_SEQLENS, 12, INT32_MAX },
        { PREFILL_ZONE_CU_SEQLENS, 4, INT32_MIN }, { PREFILL_ZONE_KV_LENS, 0, -1 },
        { PREFILL_ZONE_KV_LENS, 1, -1 },           { PREFILL_ZONE_KV_LENS, 2, INT32_MAX },
        { PREFILL_ZONE_KV_LENS, 10, INT32_MIN },   { PREFILL_ZONE_Q_OFFSETS, 2, INT32_MAX },
        { PREFILL_ZONE_Q_OFFSETS, 2, INT32_MIN },  { PREFILL_ZONE_TABLE, 0, -1 },
        { PREFILL_ZONE_TABLE, 0, INT32_MAX },
    };
    for (size_t i = 0; i < 2 * COUNT(cases); i++) {
        struct prefill_case c = vary(i % 2 ? NUM_KINDS - 1 : 0, i, "faulty");
        const size_t n = i / 2;
        c.num_q_heads = c.num_kv_heads = 1;
        // Without long sequences there is one launch.
        static struct prefill_sequence few[COUNT(mixed)];
        memcpy(few, mixed, sizeof(few));
        if (i % 4 < 2) few[4].q_len = few[3].q_len = few[10].q_len = 40;
        c.sequences = few;
        struct prefill_data *data = build(&c);
        ((int32_t *) prefill_zone(data, data->image, cases[n].zone))[cases[n].index] =
            cases[n].value;
        // Keys that come into sight are numbers.
        for (int z = PREFILL_ZONE_K; z <= PREFILL_ZONE_V; z++)
            memset(prefill_zone(data, data->image, (enum prefill_zone) z), 0x3C,
                   data->zones[z].bytes);
        const int32_t fault = defined_fault(data);
        run_image(data, true);
        cr_expect_eq(canary_find(data->zones, NUM_PREFILL_ZONES, data->image, data->result,
                                 data->bytes),
                     -1, "zone %d, entry %d is %d: wrote where it should not", (int) cases[n].zone,
                     cases[n].index, cases[n].value);
        cr_expect_eq(prefill_data_fault(data), fault, "zone %d, entry %d is %d: fault %d, not %d",
                     (int) cases[n].zone, cases[n].index, cases[n].value, prefill_data_fault(data),
                     fault);
        prefill_data_free(&data);
    }
}

// Keys on a bad page are as if they were not there; others are what they were.
Test(short_form, takes_bad_pages_for_absent)
{
    for (size_t k = 0; k < NUM_KINDS; k++) {
        struct prefill_case c = vary(k, 5, "bad page");
        struct prefill_data *data = build(&c);
        struct attn_check check;
        char found[512];
        *prefill_table_at(data, 10, 300) = k % 3 ? -1 : INT32_MAX;
        run_image(data, true);
        cr_expect(prefill_data_check(data, SAMPLED_ROWS, bound, &check), "head_dim %d: %s",
                  c.head_dim, prefill_check_text(&check, found, sizeof(found)));
        cr_expect(prefill_data_intact(data));
        cr_expect_eq(prefill_data_fault(data), 10, "fault %d", prefill_data_fault(data));
        prefill_data_free(&data);
    }
}

// A NaN in a key, or a value, reaches the tokens that see it, and no other sequence.
Test(short_form, passes_on_what_tokens_see)
{
    for (size_t k = 0; k < NUM_KINDS; k++)
        for (int n = 0; n < 2; n++) {
            const struct prefill_case c = vary(k, 0, "NaN");
            struct prefill_data *data = build(&c), *clean = run(&c, true);
            struct attn_check check;
            char found[512];
            attn_store(prefill_zone(data, data->image, n ? PREFILL_ZONE_V : PREFILL_ZONE_K),
                       prefill_key_at(data, 10, 450, 0, n) + 3, c.dtype, NAN);
            run_image(data, true);
            cr_expect(prefill_data_check(data, SAMPLED_ROWS, bound, &check), "head_dim %d: %s",
                      c.head_dim, prefill_check_text(&check, found, sizeof(found)));
            for (int32_t b = 0; b < c.batch; b++)
                if (b != 10)
                    cr_expect_eq(prefill_count_differences(data, b, 0, clean, b, 0, mixed[b].q_len),
                                 0, "sequence %d", b);
            prefill_data_free(&data);
            prefill_data_free(&clean);
        }
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The prefill kernels themselves, emulated on the host (tests/emulator): what they compute, where
// they write, and what changes no bit. What this cannot show is what the hardware does: rounding
// inside MMAs, races, speed.
#include "attn/prefill.h"
#include "host/prefill.h"
#include "tests/emulator/emulator.h"
#include "tests/support/fake_driver.h"
#include "tests/support/pack_folder.h"
#include "tests/support/prefill_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    ALL_ROWS = 1 << 20,
};

static struct attn_device *device;

static void set_up(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    const char *const kind = getenv("ATTN_TEST_EMULATED");
    unsetenv("METRALE_NO_ATTN_FA128");
    fake_driver_install();
    fake.run_prefill = emulator_run_prefill;
    // So few that kernels whose blocks stay have several items each.
    fake.gpus[0].sm_count = 3;
    emulator_shuffle(random_seed(62));
    params.kind = ATTN_DEVICE_ORDINAL;
    params.pack_dir = pack_folder_make_with(kind ? kind : "emulated");
    cr_assert_not_null(params.pack_dir);
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
    pack_folder_remove();
}

TestSuite(prefill_kernels, .init = set_up, .fini = tear_down, .timeout = 600);

// The kinds that the emulated pack has, and whether an original is among them.
static const struct kind {
    enum attn_dtype dtype;
    int32_t head_dim;
    bool has_original;
} kinds[] = {
    { ATTN_DTYPE_BF16, 64, true },  { ATTN_DTYPE_BF16, 128, true }, { ATTN_DTYPE_BF16, 256, true },
    { ATTN_DTYPE_FP16, 64, false }, { ATTN_DTYPE_FP16, 256, true }, { ATTN_DTYPE_BF16, 512, true },
    { ATTN_DTYPE_FP16, 512, true },
};

// ---- running

static prefill_entry original_of(const struct prefill_case *c)
{
    return c->page_size ? attn_prefill_paged_64 : attn_prefill_64;
}

static prefill_entry twin_of(const struct prefill_case *c)
{
    return c->page_size ? attn_prefill_fa128_paged : attn_prefill_fa128;
}

static struct prefill_data *build(const struct prefill_case *c)
{
    struct prefill_data *const data = prefill_data_build(c);
    cr_assert_not_null(data, "%s: out of memory", c->name);
    return data;
}

static void run_entry(struct prefill_data *data, prefill_entry entry)
{
    const enum attn_status status = prefill_data_run_host(data, device, entry);
    cr_assert_eq(status, ATTN_OK, "%s: %s: %s", data->c.name, attn_status_name(status),
                 attn_last_error());
    cr_expect(prefill_data_intact(data), "%s: wrote where it should not", data->c.name);
}

static struct prefill_data *run(const struct prefill_case *c, prefill_entry entry)
{
    struct prefill_data *const data = build(c);
    run_entry(data, entry);
    return data;
}

static void expect_right(const struct prefill_data *data)
{
    const struct prefill_case *const c = &data->c;
    char found[512];
    struct attn_check check;
    cr_expect(prefill_data_check(data, ALL_ROWS, ATTN_CHECK_KERNEL, &check),
              "%s: head_dim %d, page %d, window %d, %d tokens at %d of %d keys: %s", c->name,
              c->head_dim, c->page_size, c->window, data->sequences[0].q_len,
              data->sequences[0].q_offset, data->sequences[0].kv_len,
              prefill_check_text(&check, found, sizeof(found)));
    cr_expect_eq(prefill_data_fault(data), INT32_MAX, "%s: fault %d", c->name,
                 prefill_data_fault(data));
}

static void expect_equal(const struct prefill_data *a, const struct prefill_data *b,
                         const char *what)
{
    const int64_t differences = prefill_count_all_differences(a, b);
    cr_expect_eq(differences, 0, "%s, head_dim %d, page %d: %s: %lld values differ", b->c.name,
                 b->c.head_dim, b->c.page_size, what, (long long) differences);
}

// ---- against the definition

static struct prefill_case case_of(const struct kind *kind, const char *name)
{
    const struct prefill_case c = {
        .name = name,
        .dtype = kind->dtype,
        .head_dim = kind->head_dim,
        .num_q_heads = 2,
        .num_kv_heads = 1,
        .batch = 1,
        .seed = 17,
        .page_seed = 3,
    };
    return c;
}

static const struct prefill_sequence uniform[] = {
    { 1, 1, 1, 0 },
    { 1, 64, 64, 0 },
    { 1, 129, 200, 71 },
    // Fewer and more keys than positions, and tokens before the first.
    { 1, 130, 100, 10 },
    { 1, 66, 230, 40 },
    { 1, 90, 50, -70 },
    { 1, 7, 0, 0 },
    { 1, 16, 16, -16 },
};

static const int32_t page_sizes[] = { 0, 16, 1, 7, 24, 48 };
static const int32_t windows[] = { 0, 1, 63, 0, 65, 17, 5000 };

static struct prefill_case vary(const struct kind *kind, size_t n)
{
    struct prefill_case c = case_of(kind, "uniform");
    c.sequences = &uniform[n % COUNT(uniform)];
    c.page_size = page_sizes[n % COUNT(page_sizes)];
    c.window = windows[n % COUNT(windows)];
    c.not_causal = n % 3 == 2;
    c.softcap = n % 4 == 1 ? 5 : 0;
    c.scale = n % 11 == 3 ? -0.3f : 0;
    c.sinks = n % 5 < 2;
    c.strided = n % 7 < 3;
    c.fill = (enum prefill_fill)(n / 3 % NUM_PREFILL_FILLS);
    c.num_q_heads = 1 + n % 2;
    return c;
}

// The same by the original.
static void expect_case(const struct kind *kind, const struct prefill_case *c)
{
    struct prefill_data *data = run(c, attn_prefill);
    expect_right(data);
    if (kind->has_original && !c->ragged) {
        struct prefill_data *original = run(c, original_of(c));
        expect_equal(data, original, "original");
        prefill_data_free(&original);
    }
    prefill_data_free(&data);
}

Test(prefill_kernels, agree_with_the_definition)
{
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (size_t n = k; n < 2 * COUNT(uniform) + k; n++) {
            const struct prefill_case c = vary(&kinds[k], n);
            expect_case(&kinds[k], &c);
        }
}

static const struct prefill_sequence ragged[] = {
    { 1, 1, 1, 0 }, { 2, 0, 40, 3 },    { 3, 65, 100, 35 }, { 4, 128, 128, 0 }, { 5, 30, 200, 9 },
    { 6, 3, 0, 0 }, { 7, 150, 140, 0 }, { 8, 1, 150, 149 }, { 9, 5, 64, -3 },
};

// All of them, of one query head.
static struct prefill_case ragged_case(const struct kind *kind, const char *name, int32_t page_size)
{
    struct prefill_case c = case_of(kind, name);
    c.ragged = true;
    c.sequences = ragged;
    c.batch = COUNT(ragged);
    c.page_size = page_size;
    c.num_q_heads = 1;
    return c;
}

Test(prefill_kernels, agree_in_ragged_batches)
{
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (size_t n = k; n < k + 2; n++) {
            struct prefill_case c = vary(&kinds[k], n);
            c.name = "ragged";
            c.ragged = true;
            c.sequences = ragged;
            c.batch = COUNT(ragged);
            expect_case(&kinds[k], &c);
        }
}

// More sequences than are sorted by length, some of them empty; more than blocks.
Test(prefill_kernels, find_their_tiles)
{
    static const int32_t batches[] = { 33, 64, 65, 200 };
    static struct prefill_sequence many[200];
    for (int32_t i = 0; i < 200; i++) {
        const int32_t q_len = i % 13 == 5 ? 70 : i % 3 == 1 ? 0 : i % 4;
        many[i] = (struct prefill_sequence){ (uint64_t) i, q_len, q_len + i % 50, i % 50 };
    }
    for (size_t n = 0; n < COUNT(batches); n++) {
        struct prefill_case c = case_of(&kinds[0], "many");
        c.ragged = true;
        c.sequences = many;
        c.batch = batches[n];
        c.page_size = n % 2 ? 16 : 0;
        c.num_q_heads = 1;
        expect_case(&kinds[0], &c);
    }
}

Test(prefill_kernels, take_a_scale_of_0)
{
    const struct prefill_sequence sequence = { 1, 70, 70, 0 };
    for (size_t k = 0; k < COUNT(kinds); k += 2) {
        struct prefill_case c = case_of(&kinds[k], "scale 0");
        c.sequences = &sequence;
        struct prefill_data *data = build(&c);
        data->params.scale = 0;
        run_entry(data, attn_prefill);
        expect_right(data);
        prefill_data_free(&data);
    }
}

// ---- the same bits

static void spoil(struct prefill_data *data)
{
    static const double values[] = { NAN, INFINITY, -INFINITY, 1e-40, -3e38, 3e38, 1e-7, 0 };
    struct random random = { 5 };
    for (uint32_t i = 0; i < 24; i++) {
        const struct prefill_sequence *const s = &data->sequences[0];
        const int32_t end = s->q_offset + s->q_len < s->kv_len ? s->q_offset + s->q_len : s->kv_len;
        const int32_t key = (int32_t) random_below(&random, (uint32_t) end);
        const int32_t d = (int32_t) random_below(&random, (uint32_t) data->c.head_dim);
        const int64_t token = (int64_t) random_below(&random, (uint32_t) s->q_len);
        if (i % 3 == 0)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_K),
                       prefill_key_at(data, 0, key, 0, false) + d, data->c.dtype, values[i / 3]);
        if (i % 3 == 1)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_V),
                       prefill_key_at(data, 0, key, 0, true) + d, data->c.dtype, values[i / 3]);
        if (i % 3 == 2)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_Q),
                       token * data->params.q_token_stride + d, data->c.dtype, values[i / 3]);
    }
}

Test(prefill_kernels, twins_have_the_bits_of_originals)
{
    static const struct prefill_sequence sequences[] = {
        { 1, 1, 1, 0 },
        { 1, 130, 130, 0 },
        { 1, 200, 180, 10 },
        { 1, 65, 195, 130 },
    };
    for (size_t i = 0; i < COUNT(sequences); i++)
        for (size_t n = 0; n < 4; n++) {
            struct prefill_case c = case_of(&kinds[n % 2 ? 4 : 2], "twin");
            c.sequences = &sequences[i];
            c.page_size = n < 2 ? 0 : n == 2 ? 16 : 24;
            c.softcap = n == 3 ? 9 : 0;
            struct prefill_data *twin = build(&c), *original = build(&c);
            if (i > 0) spoil(twin);
            if (i > 0) spoil(original);
            run_entry(twin, twin_of(&c));
            run_entry(original, original_of(&c));
            expect_equal(twin, original, "twin");
            prefill_data_free(&twin);
            prefill_data_free(&original);
        }
}

// Tokens [first, first + count) in a call of their own.
static void expect_chunk(const struct prefill_data *whole, int32_t first, int32_t count)
{
    struct prefill_sequence chunk = whole->sequences[0];
    struct prefill_case c = whole->c;
    chunk.q_len = count;
    chunk.q_offset += first;
    // Causal, the keys behind it may not be there yet.
    if (!c.not_causal) chunk.kv_len = chunk.q_offset + count;
    c.name = "chunk";
    c.sequences = &chunk;
    struct prefill_data *data = run(&c, attn_prefill);
    const int64_t differences = prefill_count_differences(whole, 0, first, data, 0, 0, count);
    cr_expect_eq(differences, 0, "head_dim %d: tokens %d .. %d in a chunk: %lld values differ",
                 c.head_dim, first, first + count - 1, (long long) differences);
    prefill_data_free(&data);
}

Test(prefill_kernels, give_the_same_bits_in_pages_and_chunks)
{
    const struct prefill_sequence sequence = { 9, 140, 220, 80 };
    for (size_t k = 0; k < COUNT(kinds); k++) {
        struct prefill_case c = case_of(&kinds[k], "whole");
        c.sequences = &sequence;
        c.window = k % 3 == 1 ? 90 : 0;
        c.not_causal = k % 3 == 2;
        c.num_q_heads = 1;
        struct prefill_data *whole = run(&c, attn_prefill);
        for (size_t i = 1; i < COUNT(page_sizes); i++) {
            struct prefill_case paged = c;
            paged.page_size = page_sizes[i];
            paged.strided = i % 2;
            struct prefill_data *data = run(&paged, attn_prefill);
            expect_equal(whole, data, "pages");
            if (page_sizes[i] == 16) expect_chunk(data, 3, 90);
            prefill_data_free(&data);
        }
        expect_chunk(whole, 0, 50);
        expect_chunk(whole, 50, 1);
        expect_chunk(whole, 51, 89);
        prefill_data_free(&whole);
    }
}

Test(prefill_kernels, give_the_same_bits_alone_and_in_a_batch)
{
    for (size_t k = 0; k < COUNT(kinds); k++) {
        const struct prefill_case c = ragged_case(&kinds[k], "batch", k % 2 ? 16 : 0);
        struct prefill_data *batch = run(&c, attn_prefill);
        for (int32_t b = 0; b < c.batch; b++) {
            struct prefill_case alone = c;
            if (ragged[b].q_len == 0) continue;
            alone.ragged = false;
            alone.sequences = &ragged[b];
            alone.batch = 1;
            alone.page_size = k % 2 ? 0 : 7;
            struct prefill_data *data = run(&alone, attn_prefill);
            cr_expect_eq(prefill_count_differences(batch, b, 0, data, 0, 0, ragged[b].q_len), 0,
                         "head_dim %d: sequence %d alone", c.head_dim, b);
            prefill_data_free(&data);
        }
        prefill_data_free(&batch);
    }
}

// ---- NaN, infinity

// With a bad key or value, whose NaN may go to other rows of the sequence, but to no other one.
Test(prefill_kernels, pass_on_what_tokens_see)
{
    const struct prefill_sequence sequence = { 1, 100, 120, 20 };
    for (size_t k = 0; k < COUNT(kinds); k++) {
        struct prefill_case c = case_of(&kinds[k], "spoiled");
        c.sequences = &sequence;
        c.window = k % 2 ? 30 : 0;
        struct prefill_data *data = build(&c);
        attn_store(prefill_zone(data, data->image, PREFILL_ZONE_K),
                   prefill_key_at(data, 0, 60, 0, false) + 1, c.dtype, INFINITY);
        attn_store(prefill_zone(data, data->image, PREFILL_ZONE_V),
                   prefill_key_at(data, 0, 90, 0, true) + 3, c.dtype, NAN);
        run_entry(data, attn_prefill);
        expect_right(data);
        prefill_data_free(&data);
    }
}

// ---- bad data

// What the definition says to the same image.
static int32_t defined_fault(struct prefill_data *data)
{
    uint8_t *const memory = aligned_alloc(256, (data->bytes + 255) / 256 * 256);
    cr_assert(memory);
    memcpy(memory, data->image, data->bytes);
    const struct attn_prefill_params params = prefill_data_params(data, memory);
    attn_reference_prefill(&params);
    const int32_t fault = *params.fault;
    free(memory);
    return fault;
}

static void expect_fault(const struct kind *kind, int32_t page_size, enum prefill_zone zone,
                         int32_t index, int32_t value)
{
    const struct prefill_case c = ragged_case(kind, "faulty", page_size);
    struct prefill_data *data = build(&c);
    ((int32_t *) prefill_zone(data, data->image, zone))[index] = value;
    const int32_t fault = defined_fault(data);
    cr_assert_eq(prefill_data_run_host(data, device, attn_prefill), ATTN_OK, "%s",
                 attn_last_error());
    cr_expect_eq(canary_find(data->zones, NUM_PREFILL_ZONES, data->image, data->result,
                             data->bytes),
                 -1, "zone %d, entry %d is %d: wrote where it should not", (int) zone, index,
                 value);
    cr_expect_eq(prefill_data_fault(data), fault, "zone %d, entry %d is %d: fault %d, not %d",
                 (int) zone, index, value, prefill_data_fault(data), fault);
    prefill_data_free(&data);
}

Test(prefill_kernels, report_entries_that_cannot_be_followed)
{
    static const struct {
        int32_t page_size;
        enum prefill_zone zone;
        int32_t index, value;
    } cases[] = {
        { 0, PREFILL_ZONE_CU_SEQLENS, 0, -1 },
        { 0, PREFILL_ZONE_CU_SEQLENS, 3, 2 },
        { 0, PREFILL_ZONE_CU_SEQLENS, 9, INT32_MAX },
        { 0, PREFILL_ZONE_CU_SEQLENS, 4, INT32_MIN },
        { 0, PREFILL_ZONE_KV_LENS, 0, -1 },
        { 0, PREFILL_ZONE_KV_LENS, 1, -1 },
        { 0, PREFILL_ZONE_KV_LENS, 6, INT32_MAX },
        { 0, PREFILL_ZONE_KV_STARTS, 0, -1 },
        { 0, PREFILL_ZONE_KV_STARTS, 3, INT32_MAX },
        { 0, PREFILL_ZONE_KV_STARTS, 3, INT32_MIN },
        { 0, PREFILL_ZONE_Q_OFFSETS, 3, INT32_MAX },
        { 0, PREFILL_ZONE_Q_OFFSETS, 3, INT32_MIN },
        { 16, PREFILL_ZONE_KV_LENS, 4, INT32_MAX },
        { 16, PREFILL_ZONE_KV_LENS, 4, INT32_MIN },
        { 16, PREFILL_ZONE_TABLE, 0, -1 },
        { 16, PREFILL_ZONE_TABLE, 1, -1 },
        { 16, PREFILL_ZONE_TABLE, 30, INT32_MAX },
        { 7, PREFILL_ZONE_TABLE, 60, INT32_MAX },
        { 7, PREFILL_ZONE_TABLE, 60, -7 },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        expect_fault(&kinds[i % 2 ? 0 : 5], cases[i].page_size, cases[i].zone, cases[i].index,
                     cases[i].value);
}

// Keys on a bad page are as if they were not there; others are what they were.
Test(prefill_kernels, take_bad_pages_for_absent)
{
    for (size_t k = 0; k < COUNT(kinds); k++) {
        const struct prefill_case c = ragged_case(&kinds[k], "bad page", k % 2 ? 7 : 16);
        struct prefill_data *data = build(&c);
        *prefill_table_at(data, 3, 40) = k % 3 ? -1 : INT32_MAX;
        run_entry(data, attn_prefill);
        struct attn_check check;
        char found[512];
        cr_expect(prefill_data_check(data, ALL_ROWS, ATTN_CHECK_KERNEL, &check), "head_dim %d: %s",
                  c.head_dim, prefill_check_text(&check, found, sizeof(found)));
        cr_expect_eq(prefill_data_fault(data), 3, "fault %d", prefill_data_fault(data));
        prefill_data_free(&data);
    }
}

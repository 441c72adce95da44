/* SPDX-License-Identifier: Apache-2.0 */
// The decode kernels themselves, emulated on the host (tests/emulator): what they compute, where
// they write, and that schedules change no bit. What this cannot show is what the hardware does:
// rounding inside MMAs, races, speed.
#include "tests/emulator/emulator.h"
#include "tests/support/decode_case.h"
#include "tests/support/fake_driver.h"
#include "tests/support/pack_folder.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char *folder;

static struct attn_device *open_device(const char *policy, int32_t grid_limit)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device = NULL;
    params.kind = ATTN_DEVICE_ORDINAL;
    params.pack_dir = folder;
    params.splitk_policy = policy;
    params.grid_limit = grid_limit;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
    return device;
}

static void set_up(void)
{
    fake_driver_install();
    // Few SMs: small cases are cut many times.
    fake.gpus[0].sm_count = 6;
    fake.run = emulator_run;
    folder = pack_folder_make_with("emulated");
    cr_assert_not_null(folder);
}

static void tear_down(void)
{
    pack_folder_remove();
}

// The kinds that the emulated pack has.
static const struct kind {
    enum attn_dtype q, kv;
    int32_t head_dim, ratio;
} kinds[] = {
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64, 4 },   { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64, 11 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128, 6 },  { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256, 3 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 512, 2 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32, 5 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 128, 12 }, { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 64, 9 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128, 8 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 32, 1 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 256, 6 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 512, 10 },
};

static struct decode_case case_of(const struct kind *k)
{
    const struct decode_case c = {
        .name = "emulated",
        .q_dtype = k->q,
        .kv_dtype = k->kv,
        .batch = 4,
        .num_kv_heads = 1,
        .num_q_heads = k->ratio,
        .head_dim = k->head_dim,
        .page_size = 16,
        .len = 700,
        .lens = DECODE_LENS_LOG,
        .lse = true,
        .sinks = true,
        .scales = k->kv == ATTN_DTYPE_E4M3,
        .poison = 0xFF,
        .seed = 7,
    };
    return c;
}

static struct decode_data *run(const struct decode_case *c, struct attn_device *device)
{
    char text[512];
    struct decode_data *data;
    decode_case_text(c, text, sizeof(text));
    cr_assert_eq(decode_data_build(&data, c, device), ATTN_OK, "%s: %s", text, attn_last_error());
    cr_assert_eq(decode_data_run_host(data, device), ATTN_OK, "%s, %s: %s", data->kernel, text,
                 attn_last_error());
    cr_expect(decode_data_intact(data), "%s, %s: wrote where it should not", data->kernel, text);
    return data;
}

static void expect_right(const struct decode_case *c, struct attn_device *device)
{
    char text[512], found[512];
    struct attn_check check;
    struct decode_data *data = run(c, device);
    decode_case_text(c, text, sizeof(text));
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    decode_data_free(&data);
}

TestSuite(kernels, .init = set_up, .fini = tear_down, .timeout = 300);

Test(kernels, agree_with_the_definition)
{
    const int32_t pages[] = { 16, 1, 48, 3 };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (size_t i = 0; i < COUNT(pages); i++) {
            struct decode_case c = case_of(&kinds[k]);
            c.page_size = pages[i];
            c.window = i % 2 ? 100 + (int32_t) k : 0;
            c.softcap = i == 3 ? 20 : 0;
            c.layout = (enum decode_layout)(i % NUM_DECODE_LAYOUTS);
            expect_right(&c, device);
        }
    attn_device_close(&device);
}

// Numbers of pieces that the contract gives, with and without a window.
Test(kernels, agree_in_pieces)
{
    const char *const policies[] = { "2", "5", "auto" };
    for (size_t i = 0; i < COUNT(policies); i++) {
        struct attn_device *device = open_device(policies[i], 0);
        for (size_t k = i; k < COUNT(kinds); k += COUNT(policies)) {
            struct decode_case c = case_of(&kinds[k]);
            c.len = 1500;
            c.window = k % 2 ? 1111 : 0;
            expect_right(&c, device);
        }
        attn_device_close(&device);
    }
}

// On one block and on several, alone and in company, by boxes and by rows: the same bits.
Test(kernels, give_the_same_bits)
{
    for (size_t k = 0; k < COUNT(kinds); k += 2) {
        struct decode_case c = case_of(&kinds[k]);
        struct attn_device *device = open_device(NULL, 0);
        c.len = 1200;
        struct decode_data *base = run(&c, device);
        c.page_size = 5;
        struct decode_data *other = run(&c, device);
        for (int32_t i = 0; i < c.batch; i++)
            cr_expect(decode_data_equal(base, i, other, i), "%s: page size 5, sequence %d",
                      base->kernel, i);
        decode_data_free(&other);
        c.page_size = 16;
        for (int32_t i = 0; i < c.batch; i++) {
            struct decode_case alone = c;
            alone.ids = &i;
            alone.batch = 1;
            other = run(&alone, device);
            cr_expect(decode_data_equal(base, i, other, 0), "%s: sequence %d alone", base->kernel,
                      i);
            decode_data_free(&other);
        }
        attn_device_close(&device);
        for (int32_t limit = 1; limit < 6; limit += 3) {
            device = open_device(NULL, limit);
            other = run(&c, device);
            for (int32_t i = 0; i < c.batch; i++)
                cr_expect(decode_data_equal(base, i, other, i), "%s: %d blocks, sequence %d",
                          base->kernel, limit, i);
            decode_data_free(&other);
            attn_device_close(&device);
        }
        decode_data_free(&base);
    }
}

// NaN, infinities, far and peaked scores, at the lengths at which things break.
Test(kernels, take_all_values)
{
    struct attn_device *device = open_device(NULL, 0);
    for (int fill = 0; fill < NUM_DECODE_FILLS; fill++)
        for (size_t k = (size_t) fill % 3; k < COUNT(kinds); k += 3) {
            struct decode_case c = case_of(&kinds[k]);
            c.batch = 18;
            c.len = 300;
            c.lens = DECODE_LENS_EDGES;
            c.fill = (enum decode_fill) fill;
            c.window = k % 2 ? 65 : 0;
            c.page_size = fill % 2 ? 32 : 7;
            c.num_kv_heads = 2;
            c.num_q_heads *= 2;
            expect_right(&c, device);
        }
    attn_device_close(&device);
}

// A sequence for many blocks; more sequences than threads; more lanes than blocks.
Test(kernels, take_all_shapes)
{
    struct attn_device *device;
    for (size_t k = 0; k < COUNT(kinds); k++) {
        fake.gpus[0].sm_count = k % 2 ? 132 : 11;
        device = open_device(NULL, 0);
        struct decode_case c = case_of(&kinds[k]);
        c.batch = 1;
        c.len = 9000;
        c.lens = DECODE_LENS_FULL;
        c.window = k % 3 == 1 ? 7777 : 0;
        expect_right(&c, device);
        c = case_of(&kinds[k]);
        c.batch = 400;
        c.len = 150;
        c.num_q_heads = 1;
        expect_right(&c, device);
        c = case_of(&kinds[k]);
        c.batch = 2;
        c.num_kv_heads = 14;
        c.num_q_heads = 14;
        expect_right(&c, device);
        attn_device_close(&device);
    }
}

// The original's launch of its own shape, packed and not: the same bits.
Test(kernels, pack_groups_or_not)
{
    struct decode_data *data[2];
    struct decode_case c = case_of(&kinds[10]);
    for (int32_t packed = 0; packed < 2; packed++) {
        setenv("METRALE_ATTN_DECODE_GQA_PACK", packed ? "on" : "off", 1);
        struct attn_device *device = open_device("1", 0);
        data[packed] = run(&c, device);
        attn_device_close(&device);
    }
    for (int32_t i = 0; i < c.batch; i++)
        cr_expect(decode_data_equal(data[0], i, data[1], i), "sequence %d", i);
    decode_data_free(&data[0]);
    decode_data_free(&data[1]);
}

// Pages outside the pool and lengths outside the table are reported, and trouble nobody else.
Test(kernels, report_bad_data)
{
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++) {
        struct decode_case c = case_of(&kinds[k]);
        c.lens = DECODE_LENS_FULL;
        c.len = 200;
        c.page_size = k % 2 ? 16 : 3;
        struct decode_data *clean = run(&c, device), *bad;
        cr_assert_eq(decode_data_build(&bad, &c, device), ATTN_OK, "%s", attn_last_error());
        int32_t *const table = decode_image(bad, DECODE_ZONE_TABLE);
        int32_t *const lens = decode_image(bad, DECODE_ZONE_LENS);
        table[2 * bad->params.max_pages_per_seq + 3] = k % 3 ? INT32_MAX : -7;
        lens[3] = k % 4 ? -1 : INT32_MAX;
        cr_assert_eq(decode_data_run_host(bad, device), ATTN_OK, "%s", attn_last_error());
        cr_expect(decode_data_intact(bad), "%s: wrote where it should not", bad->kernel);
        cr_expect_eq(decode_data_fault(bad), 2, "%s: fault %d", bad->kernel,
                     decode_data_fault(bad));
        for (int32_t i = 0; i < 2; i++)
            cr_expect(decode_data_equal(clean, i, bad, i), "%s: sequence %d", bad->kernel, i);
        cr_expect_not(decode_data_equal(clean, 2, bad, 2), "%s: a page was made up", bad->kernel);
        decode_data_free(&clean);
        decode_data_free(&bad);
    }
    attn_device_close(&device);
}

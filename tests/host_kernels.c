/* SPDX-License-Identifier: Apache-2.0 */
// The decode kernels themselves, emulated on the host (tests/emulator): what they compute, where
// they write, and that schedules change no bit. What this cannot show is what the hardware does:
// rounding inside MMAs, races, speed.
#include "host/ctm.h"
#include "tests/emulator/emulator.h"
#include "tests/support/ctm_case.h"
#include "tests/support/decode_case.h"
#include "tests/support/fake_driver.h"
#include "tests/support/pack_folder.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

static void install_driver(const int sm_count)
{
    fake_driver_install();
    fake.gpus[0].sm_count = sm_count;
    fake.run = emulator_run;
}

static void set_up(void)
{
    // Few SMs: small cases are cut many times.
    install_driver(6);
    emulator_shuffle(random_seed(61));
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

static void expect_result(const struct decode_case *c, struct decode_data *data)
{
    char text[512], found[512];
    struct attn_check check;
    decode_case_text(c, text, sizeof(text));
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    cr_expect_eq(decode_data_fault(data), decode_case_fault(c), "%s, %s: fault %d", data->kernel,
                 text, decode_data_fault(data));
}

static void expect_right(const struct decode_case *c, struct attn_device *device)
{
    struct decode_data *data = run(c, device);
    expect_result(c, data);
    decode_data_free(&data);
}

TestSuite(kernels, .init = set_up, .fini = tear_down, .timeout = 300);

Test(kernels, agree_with_the_definition)
{
    const int32_t pages[] = { 16, 1, 48, 3, 128, 32 };
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

// `base` is a run of `c`: the bits of its sequences, each alone, and on fewer blocks.
static void expect_equal_alone_and_limited(const struct decode_case *const c,
                                           struct decode_data *const base)
{
    struct attn_device *device = open_device(NULL, 0);
    for (int32_t i = 0; i < c->batch; i++) {
        struct decode_case alone = *c;
        alone.ids = &i;
        alone.given_lens = c->given_lens ? &c->given_lens[i] : NULL;
        alone.batch = 1;
        struct decode_data *other = run(&alone, device);
        cr_expect(decode_data_equal(base, i, other, 0), "%s: sequence %d alone", base->kernel, i);
        decode_data_free(&other);
    }
    attn_device_close(&device);
    for (int32_t limit = 1; limit < 6; limit += 3) {
        device = open_device(NULL, limit);
        struct decode_data *other = run(c, device);
        for (int32_t i = 0; i < c->batch; i++)
            cr_expect(decode_data_equal(base, i, other, i), "%s: %d blocks, sequence %d",
                      base->kernel, limit, i);
        decode_data_free(&other);
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
        attn_device_close(&device);
        expect_equal_alone_and_limited(&c, base);
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

// One piece more than there are blocks, or a few: the last pieces are cut finer, to the same bits.
Test(kernels, cut_late_pieces_finer)
{
    for (size_t k = 0; k < COUNT(kinds); k += 3) {
        struct decode_case c = case_of(&kinds[k]);
        struct attn_device *device = open_device(NULL, 0);
        c.batch = 7;
        c.len = 900;
        c.lens = DECODE_LENS_FULL;
        struct decode_data *base = run(&c, device);
        expect_result(&c, base);
        attn_device_close(&device);
        expect_equal_alone_and_limited(&c, base);
        decode_data_free(&base);
    }
}

// Blocks that have a unit each of the same lane merge their roots together, a step of columns each; if
// they don't wait for each other whoever is last merges them.
Test(kernels, merge_roots_together)
{
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (int32_t i = 0; i < 2; i++) {
            struct decode_case c = case_of(&kinds[k]);
            // Or it would run out of kernels.
            install_driver(c.head_dim == 256 ? 40 : 26);
            struct attn_device *device = open_device(NULL, 0);
            // Too few rows for kernels of warpgroups.
            if (c.q_dtype == ATTN_DTYPE_BF16 && c.kv_dtype == ATTN_DTYPE_BF16) c.num_q_heads = 2;
            c.batch = 1;
            c.len = 3000;
            c.lens = DECODE_LENS_FULL;
            c.window = i ? 2700 : 0;
            struct decode_data *base = run(&c, device);
            expect_result(&c, base);
            attn_device_close(&device);
            expect_equal_alone_and_limited(&c, base);
            decode_data_free(&base);
        }
}

// So many pieces that all warps count them.
Test(kernels, cut_late_pieces_of_many_finer)
{
    struct decode_case c = case_of(&kinds[7]);
    fake.gpus[0].sm_count = 12;
    struct attn_device *device = open_device(NULL, 0);
    // Two blocks an SM.
    c.batch = 2 * 24 + 4;
    c.len = 900;
    c.lens = DECODE_LENS_FULL;
    expect_right(&c, device);
    attn_device_close(&device);
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
        c.page_size = k % 2 ? (k % 4 == 1 ? 16 : 64) : 3;
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

// ---- several query tokens

static struct decode_case tree_of(const struct kind *k, const int32_t *lens, int32_t batch)
{
    struct decode_case c = case_of(k);
    c.name = "emulated tree";
    c.batch = batch;
    c.given_lens = lens;
    c.q_len = 4;
    c.tree = DECODE_TREE_RANDOM;
    return c;
}

// Every kernel with every tree; all else takes turns.
Test(kernels, take_trees)
{
    const int32_t pages[] = { 16, 1, 48, 7, 64, 128, 32 };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
            const size_t n = k + (size_t) tree;
            const int32_t q_len = 2 + (int32_t) n % 8, windows[] = { 0, 1, q_len, 50, 131 };
            const int32_t window = windows[n % COUNT(windows)];
            const int32_t lens[] = { 0, q_len - 1, window + 37, q_len, 129 + tree, q_len + 9 };
            struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
            c.q_len = q_len;
            c.tree = (enum decode_tree) tree;
            c.window = window;
            c.window_form = (enum attn_window_form)(k / 2 % 2);
            c.page_size = pages[n % COUNT(pages)];
            c.layout = (enum decode_layout)(n % NUM_DECODE_LAYOUTS);
            c.fill = n % 3 ? DECODE_FILL_UNIFORM : DECODE_FILL_BITS;
            c.v_table = n % 4 < 2;
            c.fused_q = n % 2;
            c.sinks = n % 3 == 1;
            c.extra_words = tree % 3;
            c.extra_stride = (int32_t) k % 3;
            c.softcap = n % 7 == 3 ? 20 : 0;
            expect_right(&c, device);
        }
    attn_device_close(&device);
}

// More draft keys than a word of the mask has bits, in windows of which they are the most.
Test(kernels, take_many_tokens)
{
    const int32_t lens[] = { 40, 13, 150 };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++) {
        struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
        c.q_len = 40;
        c.num_q_heads = kinds[k].ratio < 4 ? kinds[k].ratio : 3;
        c.tree = k % 3 ? DECODE_TREE_RANDOM : DECODE_TREE_NONE;
        c.window = k % 4 ? 30 : 0;
        c.window_form = (enum attn_window_form)(k % 2);
        c.page_size = k % 2 ? (k % 4 == 1 ? 16 : 128) : 9;
        c.v_table = k % 2;
        expect_right(&c, device);
    }
    attn_device_close(&device);
}

Test(kernels, take_trees_in_pieces)
{
    const int32_t lens[] = { 700, 3, 0, 258 };
    const char *const policies[] = { "1", "3", "auto", "legacy" };
    for (size_t i = 0; i < COUNT(policies); i++) {
        struct attn_device *device = open_device(policies[i], 0);
        for (size_t k = i; k < COUNT(kinds); k += COUNT(policies)) {
            struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
            // As many results of pieces as a workspace for one token could not hold.
            if (i == 3) c.q_len = 40, c.num_q_heads = 2;
            c.window = k % 2 ? 400 : 0;
            c.window_form = (enum attn_window_form)(k / 2 % 2);
            expect_right(&c, device);
        }
        attn_device_close(&device);
    }
}

// Windows of each token's own: a piece may have more keys than the window, and more leaves.
Test(kernels, take_windows_of_tokens_in_pieces)
{
    const int32_t lens[] = { 700, 260 }, windows[] = { 32, 64, 128, 250 };
    const char *const policies[] = { "2", "auto" };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct attn_device *device = open_device(policies[p], 0);
        for (size_t k = 0; k < COUNT(kinds); k++)
            for (size_t w = k % 2; w < COUNT(windows); w += 2) {
                struct decode_case c = tree_of(&kinds[k], lens, 1 + (int32_t) (w / 2));
                c.tree = DECODE_TREE_CAUSAL;
                c.num_q_heads = 1;
                c.q_len = k % 3 ? 2 : 40;
                c.window = windows[w];
                expect_right(&c, device);
            }
        attn_device_close(&device);
    }
}

// What some tokens attend and others do not may be NaN or infinite.
Test(kernels, take_all_values_in_trees)
{
    const int32_t lens[] = { 2, 5, 40, 140 };
    struct attn_device *device = open_device(NULL, 0);
    for (int fill = 0; fill < NUM_DECODE_FILLS; fill++)
        for (size_t k = (size_t) fill % 4; k < COUNT(kinds); k += 4) {
            struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
            c.fill = (enum decode_fill) fill;
            c.tree = k % 2 ? DECODE_TREE_RANDOM : DECODE_TREE_STAR;
            c.window = k % 3 ? 20 : 0;
            c.page_size = fill % 2 ? 32 : 7;
            expect_right(&c, device);
        }
    attn_device_close(&device);
}

// Rows whose draft keys are the first few have the bits of plain decode of these.
static int32_t expect_decode(const struct decode_data *verify, struct attn_device *device)
{
    const int32_t *const own_lens = verify->c.given_lens;
    int32_t lens[8], count = 0;
    struct decode_case c;
    for (int32_t token = 0; token < verify->params.q_len; token++) {
        if (!decode_case_as_plain(&verify->c, token, &c, lens)) continue;
        struct decode_data *plain = run(&c, device);
        for (int32_t b = 0; b < c.batch; b++)
            cr_expect(lens[b] > own_lens[b] ||
                          decode_data_equal_token(verify, b, token, plain, b, 0),
                      "%s: length %d, token %d, tree %d, window %d (form %d)", verify->kernel,
                      own_lens[b], token, (int) verify->c.tree, verify->c.window,
                      (int) verify->c.window_form);
        decode_data_free(&plain);
        count++;
    }
    return count;
}

Test(kernels, verify_as_they_decode)
{
    const int32_t lens[] = { 3, 4, 66, 130, 300, 1027 };
    const enum decode_tree trees[] = { DECODE_TREE_NONE, DECODE_TREE_FULL, DECODE_TREE_CAUSAL };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (size_t i = 0; i < 2; i++) {
            struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
            c.tree = trees[(k + i) % COUNT(trees)];
            c.window = i ? 129 : 0;
            c.window_form = (enum attn_window_form)(c.tree == DECODE_TREE_FULL && k % 2);
            c.sinks = k % 2;
            struct decode_data *verify = run(&c, device);
            cr_expect_eq(expect_decode(verify, device), c.q_len);
            decode_data_free(&verify);
        }
    attn_device_close(&device);
}

// On one block and on several, alone and in company, with other pages and masks: the same bits.
Test(kernels, give_trees_the_same_bits)
{
    const int32_t lens[] = { 500, 3, 131, 40 };
    for (size_t k = 1; k < COUNT(kinds); k += 2) {
        struct attn_device *device = open_device(NULL, 0);
        struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
        c.window = k % 3 ? 0 : 200;
        struct decode_data *base = run(&c, device);
        struct decode_case other_case = c;
        other_case.page_size = 5;
        other_case.page_seed = 3;
        other_case.v_table = true;
        other_case.extra_words = 2;
        other_case.extra_stride = 7;
        other_case.lse = false;
        struct decode_data *other = run(&other_case, device);
        for (int32_t i = 0; i < c.batch; i++)
            cr_expect(decode_data_equal(base, i, other, i), "%s: other pages, sequence %d",
                      base->kernel, i);
        decode_data_free(&other);
        attn_device_close(&device);
        expect_equal_alone_and_limited(&c, base);
        decode_data_free(&base);
    }
}

// A page of K or of V that the pool does not have, where one draft key is that one token attends.
Test(kernels, report_bad_pages_of_drafts)
{
    const int32_t lens[] = { 70, 70, 70, 70 };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(kinds); k++) {
        struct decode_case c = tree_of(&kinds[k], lens, COUNT(lens));
        struct attn_check check;
        c.page_size = k % 2 ? 1 : k % 4 == 0 ? 16 : 64;
        c.tree = DECODE_TREE_STAR;
        c.v_table = true;
        struct decode_data *clean = run(&c, device), *bad;
        cr_assert_eq(decode_data_build(&bad, &c, device), ATTN_OK, "%s", attn_last_error());
        int32_t *const table =
            decode_image(bad, k % 4 < 2 ? DECODE_ZONE_TABLE : DECODE_ZONE_V_TABLE);
        table[2 * bad->params.table_stride + 68 / c.page_size] = k % 3 ? INT32_MAX : -7;
        cr_assert_eq(decode_data_run_host(bad, device), ATTN_OK, "%s", attn_last_error());
        cr_expect(decode_data_intact(bad), "%s: wrote where it should not", bad->kernel);
        cr_expect_eq(decode_data_fault(bad), 2, "%s: fault %d", bad->kernel,
                     decode_data_fault(bad));
        cr_expect(decode_data_check(bad, ATTN_CHECK_KERNEL, &check), "%s", bad->kernel);
        for (int32_t i = 0; i < c.batch; i++)
            cr_expect_eq(decode_data_equal(clean, i, bad, i), i != 2, "%s: sequence %d",
                         bad->kernel, i);
        decode_data_free(&clean);
        decode_data_free(&bad);
    }
    attn_device_close(&device);
}

// ---- skip-softmax

// Kinds that have kernels for it: leaves of 128, 64 and 32 keys, one row block and two.
static const struct kind skip_kinds[] = {
    { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32, 5 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 128, 12 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 32, 3 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 256, 16 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 512, 8 }, { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 64, 1 },
};

enum {
    SKIP_BATCH = 4,
    SKIP_PAIRS = 2 * SKIP_BATCH,
};

// Lengths ascend.
static struct decode_case skip_case(const struct kind *k, const int32_t *lens, int32_t *table)
{
    struct decode_case c = case_of(k);
    c.name = "emulated skip";
    c.batch = SKIP_BATCH;
    c.given_lens = lens;
    c.num_kv_heads = 2;
    c.num_q_heads = 2 * k->ratio;
    c.page_size = 128;
    c.fill = DECODE_FILL_LEVELS;
    for (int32_t i = 0; i < SKIP_BATCH; i++) table[i * 2] = lens[i], table[i * 2 + 1] = lens[i] / 8;
    c.skip = table;
    c.skip_length = SKIP_PAIRS;
    return c;
}

// What is left out is what the definition leaves out. Returns how much.
static int64_t expect_skips(const struct decode_case *c, struct attn_device *device)
{
    char text[512];
    struct decode_data *data = run(c, device);
    decode_case_text(c, text, sizeof(text));
    const int64_t dropped = decode_data_dropped(data);
    cr_expect(strstr(data->kernel, "_skip"), "%s", data->kernel);
    cr_expect_eq(dropped, decode_data_exact_dropped(data), "%s, %s: %lld blocks dropped, not %lld",
                 data->kernel, text, (long long) dropped,
                 (long long) decode_data_exact_dropped(data));
    expect_result(c, data);
    decode_data_free(&data);
    return dropped;
}

// With boxes and without, windows that begin within a block and a run, softcap, one sequence that
// is dense.
Test(kernels, skip_what_the_definition_skips)
{
    static const int32_t lens[][SKIP_BATCH] = {
        { 0, 130, 1153, 2900 },
        { 1, 128, 2048, 2049 },
        { 129, 300, 640, 2200 },
    };
    const int32_t pages[] = { 128, 16, 48 }, windows[] = { 0, 1700, 300 };
    struct attn_device *device = open_device(NULL, 0);
    int64_t dropped = 0;
    for (size_t k = 0; k < COUNT(skip_kinds); k++)
        for (size_t i = 0; i < COUNT(lens); i++) {
            int32_t table[SKIP_PAIRS];
            struct decode_case c = skip_case(&skip_kinds[k], lens[i], table);
            c.page_size = pages[(i + k) % COUNT(pages)];
            c.window = windows[(i + k / 2) % COUNT(windows)];
            c.v_table = k % 2;
            c.seed = i;
            if (i == 2) table[SKIP_PAIRS - 1] = 0;
            dropped += expect_skips(&c, device);
        }
    cr_expect_gt(dropped, 100, "%lld", (long long) dropped);
    attn_device_close(&device);
}

// Every block but the first of each run, and none.
Test(kernels, skip_all_and_nothing)
{
    const int32_t lens[SKIP_BATCH] = { 100, 500, 2100, 2600 };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t k = 0; k < COUNT(skip_kinds); k++) {
        int32_t table[SKIP_PAIRS];
        struct decode_case c = skip_case(&skip_kinds[k], lens, table);
        c.skip = NULL;
        struct decode_data *dense = run(&c, device);
        c.skip = table;
        // No score is so far below another; no lambda; no bin; lambda of 1.
        for (int32_t n = 0; n < 4; n++) {
            for (int32_t i = 0; i < SKIP_BATCH; i++)
                table[i * 2 + 1] = n == 0 ? (i == 3) : n == 1 ? -i : lens[i];
            if (n == 2)
                for (int32_t i = 0; i < SKIP_BATCH; i++) table[i * 2] = 3000 + i;
            if (n == 3)
                for (int32_t i = 0; i < SKIP_BATCH; i++) table[i * 2] = i;
            c.fill = n == 0 ? DECODE_FILL_UNIFORM : DECODE_FILL_LEVELS;
            struct decode_data *data = run(&c, device);
            if (n > 0)
                for (int32_t i = 0; i < SKIP_BATCH; i++)
                    cr_expect(decode_data_equal(dense, i, data, i), "%s: table %d, sequence %d",
                              data->kernel, n, i);
            cr_expect_eq(decode_data_dropped(data), 0, "%s: table %d", data->kernel, n);
            decode_data_free(&data);
        }
        decode_data_free(&dense);
    }
    attn_device_close(&device);
}

// On one block and on several, alone and in company, by boxes and by rows: the same bits.
Test(kernels, skip_with_the_same_bits)
{
    const int32_t lens[SKIP_BATCH] = { 700, 2048, 2500, 6300 };
    for (size_t k = 0; k < COUNT(skip_kinds); k += 2) {
        int32_t table[SKIP_PAIRS];
        struct decode_case c = skip_case(&skip_kinds[k], lens, table);
        c.num_kv_heads = 1;
        c.num_q_heads = skip_kinds[k].ratio;
        struct attn_device *device = open_device(NULL, 0);
        struct decode_data *base = run(&c, device), *other;
        int64_t dropped = 0;
        cr_expect_gt(decode_data_dropped(base), 5);
        for (int32_t i = 0; i < SKIP_BATCH; i++) {
            struct decode_case alone = c;
            alone.ids = &i;
            alone.given_lens = &lens[i];
            alone.batch = 1;
            alone.page_size = i % 2 ? 128 : 40;
            other = run(&alone, device);
            cr_expect(decode_data_equal(base, i, other, 0), "%s: sequence %d alone", base->kernel,
                      i);
            dropped += decode_data_dropped(other);
            decode_data_free(&other);
        }
        cr_expect_eq(decode_data_dropped(base), dropped);
        attn_device_close(&device);
        for (int32_t limit = 1; limit < 6; limit += 3) {
            device = open_device(NULL, limit);
            other = run(&c, device);
            for (int32_t i = 0; i < SKIP_BATCH; i++)
                cr_expect(decode_data_equal(base, i, other, i), "%s: %d blocks, sequence %d",
                          base->kernel, limit, i);
            cr_expect_eq(decode_data_dropped(base), decode_data_dropped(other));
            decode_data_free(&other);
            attn_device_close(&device);
        }
        decode_data_free(&base);
    }
}

// NaN and infinities, in more sequences than a warp has lanes.
Test(kernels, skip_beside_all_values)
{
    int32_t lens[40], table[] = { 0, 0, 100, 20 };
    for (int32_t i = 0; i < (int32_t) COUNT(lens); i++) lens[i] = 20 * i;
    struct attn_device *device = open_device(NULL, 0);
    for (int fill = 0; fill < NUM_DECODE_FILLS; fill++) {
        struct decode_case c = case_of(&skip_kinds[fill % 3 * 2]);
        c.name = "emulated skip";
        c.batch = COUNT(lens);
        c.given_lens = lens;
        c.fill = (enum decode_fill) fill;
        c.page_size = fill % 2 ? 16 : 7;
        c.num_q_heads = 1;
        c.skip = table;
        c.skip_length = COUNT(table);
        // With scores of all sizes some decision is close.
        if (fill == DECODE_FILL_UNIFORM || fill == DECODE_FILL_LEVELS) table[3] = 1;
        expect_skips(&c, device);
        table[3] = 20;
    }
    attn_device_close(&device);
}

// One block with units of a leaf each, roots and whole ones, of sequences that may skip and that may
// not.
Test(kernels, skip_in_short_units)
{
    const int32_t pages[] = { 128, 16, 7 };
    struct attn_device *device = open_device(NULL, 1);
    for (size_t k = 0; k < COUNT(skip_kinds); k++)
        for (size_t i = 0; i < COUNT(pages); i++) {
            // A window that begins in one run of blocks and ends in the next.
            int32_t lens[12], table[] = { 0, i % 2 ? 1 : 0, 2050, 1 };
            struct decode_case c = case_of(&skip_kinds[k]);
            for (int32_t b = 0; b < (int32_t) COUNT(lens); b++)
                lens[b] = b % 4 == 3 ? 20 : 2049 + b;
            c.name = "emulated skip";
            c.batch = COUNT(lens);
            c.given_lens = lens;
            c.window = 20;
            c.page_size = pages[i];
            c.skip = table;
            c.skip_length = COUNT(table);
            expect_skips(&c, device);
        }
    attn_device_close(&device);
}

// ---- the CTM decode runner

enum {
    GUARD_BYTES = 256
};

// Memory that is touched only where the call touches it, with a guard behind it.
static uint8_t *reserve(int64_t words)
{
    uint8_t *const memory = mmap(NULL, (size_t) words * 4 + GUARD_BYTES, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert(words > 0 && memory != MAP_FAILED);
    memset(memory + words * 4, 0xA5, GUARD_BYTES);
    return memory;
}

static void give_back(uint8_t *memory, int64_t words, const char *what)
{
    for (int i = 0; i < GUARD_BYTES; i++) cr_expect_eq(memory[words * 4 + i], 0xA5, "%s", what);
    munmap(memory, (size_t) words * 4 + GUARD_BYTES);
}

static void expect_ctm(const struct ctm_case *c, struct attn_device *device)
{
    char text[512], found[512];
    struct attn_check check;
    struct ctm_data *data = ctm_data_build(c);
    const int64_t floats = ctm_data_workspace_elems(data), words = ctm_data_semaphore_elems(data);
    uint8_t *const workspace = reserve(floats), *const semaphores = reserve(words);
    memcpy(data->result, data->image, data->bytes);
    struct attn_ctm_params p = ctm_data_params(data, data->result);
    p.workspace = (float *) workspace;
    p.semaphores = (int32_t *) semaphores;
    ctm_case_text(c, text, sizeof(text));
    cr_assert_eq(attn_ctm_run(device, &p), ATTN_OK, "%s: %s", text, attn_last_error());
    cr_expect(ctm_data_intact(data), "%s: wrote where it should not", text);
    for (int64_t i = 0; i < words; i++) cr_expect_eq(p.semaphores[i], 0, "%s", text);
    give_back(workspace, floats, text);
    give_back(semaphores, words, text);
    p = ctm_data_params(data, data->image);
    const struct attn_decode_params decode = attn_reference_ctm(&p);
    cr_assert_eq(attn_check_decode(&decode, ctm_result(data, CTM_ZONE_OUTPUT), NULL,
                                   ATTN_CHECK_KERNEL, &check),
                 0);
    cr_expect(check.failed == 0, "%s: %s", text, decode_check_text(&check, found, sizeof(found)));
    cr_expect(c->fill != CTM_FILL_UNIFORM || check.max_error <= 1e-3, "%s: an error of %g", text,
              check.max_error);
    cr_expect_eq(ctm_data_fault(data), ctm_case_fault(c), "%s: fault %d", text,
                 ctm_data_fault(data));
    ctm_data_free(&data);
}

Test(kernels, run_ctm)
{
    static const struct ctm_case cases[] = {
        { "decode", 3, 10, 2, 128, 1, .lens = { 300, 128, 0 }, .sinks = CTM_SINKS_RANDOM },
        { "window", 2, 3, 1, 32, 1, .lens = { 400, 99 }, .window = 200, .seed = 1 },
        { "fp8", 2, 6, 1, 256, 1, .lens = { 257, 128 }, .fp8 = 1, .seed = 2 },
        { "fp8, small", 2, 1, 1, 32, 1, .lens = { 257, 128 }, .fp8 = 1, .seed = 3 },
        { "tree", 3, 12, 1, 128, 5, .lens = { 300, 4, 5 }, .seed = 4 },
        { "tree, window", 2, 5, 1, 32, 9, .lens = { 300, 9 }, .window = 7, .seed = 5 },
        { "tree, windows", 2, 5, 1, 32, 9, .lens = { 300, 9 }, .window = 7, .per_row = 1 },
        { "tree, fp8", 2, 6, 1, 256, 3, .lens = { 200, 3 }, .fp8 = 1, .window = 100,
          .sinks = CTM_SINKS_ALTERNATING },
        { "tree, fp8, large", 1, 10, 1, 512, 2, .lens = { 140 }, .fp8 = 1 },
        { "tree of 40", 1, 2, 1, 128, 40, .lens = { 140 }, .sinks = CTM_SINKS_RANDOM },
        { "means", 3, 3, 1, 32, 6, .lens = { 129, 131, 60 }, .window = 50, .per_row = 1,
          .fill = CTM_FILL_MEAN },
        { "means, shared edge", 3, 3, 1, 128, 6, .lens = { 129, 131, 60 }, .window = 50,
          .fill = CTM_FILL_MEAN },
    };
    struct attn_device *device = open_device(NULL, 0);
    for (size_t i = 0; i < COUNT(cases); i++) expect_ctm(&cases[i], device);
    attn_device_close(&device);
}

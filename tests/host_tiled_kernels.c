/* SPDX-License-Identifier: Apache-2.0 */
// The tiled kernels themselves, emulated on the host (tests/emulator), launched through the fake
// driver.
#include "tests/emulator/emulator.h"
#include "tests/support/fake_driver.h"
#include "tests/support/pack_folder.h"
#include "tests/support/suite_host.h"

#include <criterion/criterion.h>

static const bool is_kernel = true;
static const char *folder;

#include "tests/support/tiled_suite.h"

static void set_up(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    fake_driver_install();
    fake.run_tiled = emulator_run_tiled;
    emulator_shuffle(random_seed(63));
    params.kind = ATTN_DEVICE_ORDINAL;
    params.pack_dir = folder = pack_folder_make_with("emulated");
    cr_assert_not_null(folder);
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
    cr_expect(fake_driver_balanced());
    pack_folder_remove();
}

TestSuite(tiled, .init = set_up, .fini = tear_down, .timeout = 600);

// ---- partials by way of the workspace

static void open_gpu(const int sm_count)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    attn_device_close(&device);
    fake.gpus[0].sm_count = sm_count;
    params.kind = ATTN_DEVICE_ORDINAL;
    params.pack_dir = folder;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

// Launches of `what` among the last `count`.
static int count_launches(const int what, const int count)
{
    int found = 0;
    for (int i = 1; i <= count; i++)
        if (fake.launches[(fake.num_launches - i) % FAKE_MAX_LAUNCHES].tiled.what == what) found++;
    return found;
}

static struct outcome run_on(const struct step *const step, const int sm_count, const int turns)
{
    const int before = fake.num_launches;
    open_gpu(sm_count);
    struct outcome out = run(step, step->longest, NULL);
    const int launches = fake.num_launches - before;
    cr_expect_eq(launches, turns ? 2 + 2 * turns : 3);
    cr_expect_eq(count_launches(ATTN_TILED_FOLD, launches), turns ? 0 : 1);
    cr_expect_eq(count_launches(ATTN_TILED_PARTIALS, launches), turns);
    cr_expect_eq(count_launches(ATTN_TILED_FOLD_PARTIALS, launches), turns);
    return out;
}

// Whole blocks of a few units, bad ids and a last block without valid slots among them.
Test(tiled, has_the_same_bits_by_way_of_the_workspace)
{
    static const int32_t counts[] = { 130, 0, 41 }, valid[] = { 3, 5, 0 };
    static const int32_t dims[] = { 64, 128, 256 };
    for (size_t i = 0; i < 6; i++) {
        const struct shape shape = { .dtype = i % 2 ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16,
                                     .q_heads = 3,
                                     .kv_heads = 1,
                                     .head_dim = dims[i / 2],
                                     .block_size = 20,
                                     .num_seqs = 3,
                                     .counts = counts,
                                     .valid = valid,
                                     .peak = 3 };
        struct step step = build(&shape);
        *list_at(&step, 0, 64) = -1;
        *list_at(&step, 2, 40) = step.num_blocks;
        struct outcome at_once = run_on(&step, 11, 0), by_way = run_on(&step, 12, 1);
        cr_expect(is_same(&at_once, &by_way), "head_dim %d", shape.head_dim);
        cr_expect_eq(*by_way.fault, 0);
        cr_expect_eq(*at_once.fault, 0);
        free_outcome(&at_once);
        free_outcome(&by_way);
        free_step(&step);
    }
}

// More units than the workspace has room for, in parts of blocks.
Test(tiled, takes_turns)
{
    static const int32_t counts[] = { 11 }, valid[] = { 2000 };
    const struct shape shape = { .dtype = ATTN_DTYPE_FP16,
                                 .q_heads = 33 * 8,
                                 .kv_heads = 33,
                                 .head_dim = 64,
                                 .block_size = 801,
                                 .num_seqs = 1,
                                 .counts = counts,
                                 .valid = valid };
    struct step step = build(&shape);
    struct outcome at_once = run_on(&step, 131, 0), by_way = run_on(&step, 132, 2);
    cr_expect(is_same(&at_once, &by_way));
    free_outcome(&at_once);
    free_outcome(&by_way);
    free_step(&step);
}

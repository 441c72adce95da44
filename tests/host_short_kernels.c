/* SPDX-License-Identifier: Apache-2.0 */
// The short form of prefill by the kernels themselves, emulated on the host (tests/emulator),
// launched through the fake driver: all that holds for every device.
#include "host/check.h"
#include "tests/emulator/emulator.h"
#include "tests/support/fake_driver.h"
#include "tests/support/pack_folder.h"
#include "tests/support/suite_host.h"

static const enum attn_check_bound bound = ATTN_CHECK_KERNEL;

// Of those that the emulated pack has in both forms, each width of row groups.
static const struct {
    enum attn_dtype dtype;
    int32_t head_dim;
} kinds[] = {
    { ATTN_DTYPE_BF16, 64 },
    { ATTN_DTYPE_BF16, 128 },
    { ATTN_DTYPE_BF16, 256 },
    { ATTN_DTYPE_BF16, 512 },
};

enum {
    NUM_KINDS = sizeof(kinds) / sizeof(kinds[0])
};

#include "tests/support/short_suite.h"

static void set_up(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    fake_driver_install();
    fake.run = emulator_run;
    fake.run_prefill = emulator_run_prefill;
    emulator_shuffle(random_seed(92));
    params.kind = ATTN_DEVICE_ORDINAL;
    params.pack_dir = pack_folder_make_with("emulated");
    cr_assert_not_null(params.pack_dir);
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
    cr_expect(fake_driver_balanced());
    pack_folder_remove();
}

TestSuite(short_form, .init = set_up, .fini = tear_down, .timeout = 900);

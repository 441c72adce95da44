/* SPDX-License-Identifier: Apache-2.0 */
// What is made of libcuda.so.1 where it is missing, or older than libattn needs. Each test is a
// process of its own, so that each opens it anew.
#include "attn/attn.h"
#include "driver.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static const char library[] = "libcuda.so.1";

// No kind of GPU opens, each time for the same reason, which has `part` in it; all else does.
static void expect_no_gpu(const enum attn_status expected, const char *const part)
{
    static const enum attn_device_kind gpus[] = { ATTN_DEVICE_CURRENT, ATTN_DEVICE_ORDINAL,
                                                  ATTN_DEVICE_CURRENT };
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device = NULL;
    const char *reason = NULL;
    cr_assert_null(attn_driver_get(&reason));
    cr_expect_eq(attn_driver_status(), expected);
    cr_expect(strstr(reason, part), "'%s' is not in: %s", part, reason);
    for (size_t i = 0; i < sizeof(gpus) / sizeof(gpus[0]); i++) {
        params.kind = gpus[i];
        cr_expect_eq(attn_device_open(&device, &params), expected);
        cr_expect_null(device);
        cr_expect_str_eq(attn_last_error(), reason);
    }
    params.kind = ATTN_DEVICE_HOST;
    cr_expect_eq(attn_device_open(&device, &params), ATTN_OK);
    attn_device_close(&device);
}

Test(driver, is_missing)
{
    if (dlopen(library, RTLD_NOW | RTLD_LOCAL))
        cr_skip_test("this machine has a %s: what happens without one is not tested", library);
    expect_no_gpu(ATTN_ERROR_NO_DEVICE, "no NVIDIA driver: libcuda.so.1 cannot be opened");
}

Test(driver, is_too_old)
{
    const char *const path = getenv("ATTN_OLD_DRIVER");
    cr_assert_not_null(path, "ATTN_OLD_DRIVER is not set");
    // From now on the name stands for it, as its soname is the same.
    cr_assert_not_null(dlopen(path, RTLD_NOW | RTLD_LOCAL), "%s", dlerror());
    expect_no_gpu(ATTN_ERROR_DRIVER, "the NVIDIA driver is too old: its libcuda.so.1 has no "
                                     "cuDriverGetVersion; a driver for CUDA 13.0 or newer is "
                                     "needed");
}

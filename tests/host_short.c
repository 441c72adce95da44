/* SPDX-License-Identifier: Apache-2.0 */
// The short form of prefill on the host executor, which has one form: all that holds for every
// device.
#include "host/check.h"
#include "tests/support/suite_host.h"

static const enum attn_check_bound bound = ATTN_CHECK_HOST;

static const struct {
    enum attn_dtype dtype;
    int32_t head_dim;
} kinds[] = { { ATTN_DTYPE_BF16, 32 }, { ATTN_DTYPE_FP16, 64 } };

enum {
    NUM_KINDS = sizeof(kinds) / sizeof(kinds[0])
};

#include "tests/support/short_suite.h"

static void set_up(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = ATTN_DEVICE_HOST;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
}

TestSuite(short_form, .init = set_up, .fini = tear_down);

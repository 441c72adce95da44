/* SPDX-License-Identifier: Apache-2.0 */
// Tiled decode on the host executor.
#include "tests/support/suite_host.h"

#include <criterion/criterion.h>

static const bool is_kernel = false;

#include "tests/support/tiled_suite.h"

static void set_up(void)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
}

static void tear_down(void)
{
    attn_device_close(&device);
}

TestSuite(tiled, .init = set_up, .fini = tear_down);

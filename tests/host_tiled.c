/* SPDX-License-Identifier: Apache-2.0 */
// Tiled decode on the host executor.
#include "attn/attn.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static const bool is_kernel = false;
static const attn_stream stream = NULL;
static struct attn_device *device;

static void *take(const size_t bytes)
{
    return aligned_alloc(64, bytes);
}

static void release(void *const memory)
{
    free(memory);
}

static void finish(void)
{
}

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

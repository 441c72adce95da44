/* SPDX-License-Identifier: Apache-2.0 */
// What attn_bandwidth_probe checks, and what it asks of the driver.
#include "attn/attn.h"
#include "support/launches.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define BASE ((const void *) (uintptr_t) 0x10000)
#define SINK ((uint32_t *) (uintptr_t) 0x20000)

static struct attn_device *device;

static void open_device(const enum attn_device_kind kind, const int32_t grid_limit)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    params.grid_limit = grid_limit;
    launches_open(&device, params);
}

static void set_up(void)
{
    launches_set_up();
    open_device(ATTN_DEVICE_ORDINAL, 0);
}

static void tear_down(void)
{
    launches_tear_down(&device);
}

TestSuite(bench, .init = set_up, .fini = tear_down);

Test(bench, launches_the_read_kernel)
{
    cr_assert_eq(attn_bandwidth_probe(device, BASE, 1 << 30, SINK, STREAM), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(fake.num_launches, 1);
    const struct fake_launch *const launch = &fake.launches[0];
    cr_expect_str_eq(launch->kernel, "read");
    cr_expect_eq(launch->grid[0], 132 * 4u);
    cr_expect_eq(launch->block[0], 256u);
    cr_expect_eq(launch->smem_bytes, 0u);
    cr_expect_eq(launch->stream, STREAM);
    cr_expect_eq(launch->read.base, BASE);
    cr_expect_eq(launch->read.sink, SINK);
    cr_expect_eq(launch->read.num_pieces, (1 << 30) / 16);
}

Test(bench, launches_no_more_blocks_than_have_work)
{
    // 256 threads of 4 loads of 16 bytes: 16 KiB a block.
    cr_assert_eq(attn_bandwidth_probe(device, BASE, 3 * 16384 + 16, SINK, STREAM), ATTN_OK);
    cr_expect_eq(fake.launches[0].grid[0], 4u);
    open_device(ATTN_DEVICE_ORDINAL, 2);
    cr_assert_eq(attn_bandwidth_probe(device, BASE, 3 * 16384 + 16, SINK, STREAM), ATTN_OK);
    cr_expect_eq(fake.launches[1].grid[0], 2u);
}

Test(bench, enqueues_nothing_for_no_bytes)
{
    cr_expect_eq(attn_bandwidth_probe(device, NULL, 0, SINK, STREAM), ATTN_OK);
    cr_expect_eq(fake.num_launches, 0);
}

static void expect_refusal(const enum attn_status status, const enum attn_status wanted,
                           const char *const words)
{
    cr_expect_eq(status, wanted, "%s", attn_status_name(status));
    cr_expect_not_null(strstr(attn_last_error(), words), "'%s' lacks '%s'", attn_last_error(),
                       words);
    cr_expect_eq(fake.num_launches, 0);
}

Test(bench, refuses_bad_arguments)
{
    const char *const unaligned = (const char *) BASE + 8;
    expect_refusal(attn_bandwidth_probe(NULL, BASE, 16, SINK, STREAM), ATTN_ERROR_INVALID,
                   "device is NULL");
    expect_refusal(attn_bandwidth_probe(device, NULL, 16, SINK, STREAM), ATTN_ERROR_INVALID,
                   "base is NULL");
    expect_refusal(attn_bandwidth_probe(device, BASE, 17, SINK, STREAM), ATTN_ERROR_INVALID,
                   "bytes is 17");
    expect_refusal(attn_bandwidth_probe(device, unaligned, 16, SINK, STREAM), ATTN_ERROR_INVALID,
                   "base is 0x10008");
    expect_refusal(attn_bandwidth_probe(device, BASE, 16, NULL, STREAM), ATTN_ERROR_INVALID,
                   "sink is");
}

Test(bench, says_where_it_cannot_run)
{
    open_device(ATTN_DEVICE_HOST, 0);
    expect_refusal(attn_bandwidth_probe(device, BASE, 16, SINK, STREAM), ATTN_ERROR_UNSUPPORTED,
                   "host executor");
    open_device(ATTN_DEVICE_TARGET, 0);
    expect_refusal(attn_bandwidth_probe(device, BASE, 16, SINK, STREAM), ATTN_ERROR_NO_DEVICE,
                   "hopper");
}

Test(bench, returns_a_failed_launch)
{
    fake.fail_symbol = "cuLaunchKernelEx";
    fake.fail_at = 1;
    fake.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
    expect_refusal(attn_bandwidth_probe(device, BASE, 16, SINK, STREAM), ATTN_ERROR_DRIVER, "read");
}

/* SPDX-License-Identifier: Apache-2.0 */
// Opening a real GPU: what it costs, and what it says of itself.
#include "tests/support/decode_gpu.h"

#include "attn/attn.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

// Seconds an open may take once the context is there, loading of every kernel included: the shortest
// of a few, as the machine may be busy.
#define OPEN_LIMIT 0.030
#define NUM_OPENS 3

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double) time.tv_sec + 1e-9 * (double) time.tv_nsec;
}

static struct attn_device *open_kind(const enum attn_device_kind kind)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    struct attn_device *device;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
    return device;
}

Test(gpu_device, opens_quickly)
{
    char why[256];
    struct gpu *gpu;
    cr_assert_eq(gpu_open(&gpu, 0, why, sizeof(why)), 0, "%s", why);
    const enum attn_device_kind kinds[] = { ATTN_DEVICE_ORDINAL, ATTN_DEVICE_CURRENT };
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        double shortest = INFINITY;
        for (int k = 0; k < NUM_OPENS; k++) {
            const double start = now();
            struct attn_device *device = open_kind(kinds[i]);
            const double seconds = now() - start;
            fprintf(stderr, "open, kind %d: %.2f ms\n", (int) kinds[i], 1e3 * seconds);
            if (seconds < shortest) shortest = seconds;
            attn_device_close(&device);
            cr_expect_null(device);
        }
        cr_expect_lt(shortest, OPEN_LIMIT, "kind %d: %f s", (int) kinds[i], shortest);
    }
    gpu_close(&gpu);
}

Test(gpu_device, describes_itself)
{
    char why[256];
    struct gpu *gpu;
    cr_assert_eq(gpu_open(&gpu, 0, why, sizeof(why)), 0, "%s", why);
    struct gpu_description seen;
    cr_assert_eq(gpu_describe(gpu, &seen), 0);
    struct attn_device *device = open_kind(ATTN_DEVICE_CURRENT);
    struct attn_device_info info = { .size = sizeof(info) };
    cr_assert_eq(attn_device_describe(device, &info), ATTN_OK);
    cr_expect_str_eq(info.name, seen.name);
    cr_expect_eq(info.sm_count, seen.sm_count);
    cr_expect_eq(info.compute_capability_major, seen.compute_capability_major);
    cr_expect_eq(info.compute_capability_minor, seen.compute_capability_minor);
    cr_expect_gt(info.num_kernels, 0);
    attn_device_close(&device);
    gpu_close(&gpu);
}

Test(gpu_device, needs_a_current_context)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = ATTN_DEVICE_CURRENT;
    struct attn_device *device;
    cr_expect_eq(attn_device_open(&device, &params), ATTN_ERROR_NO_DEVICE);
    cr_expect_null(device);
    params.kind = ATTN_DEVICE_ORDINAL;
    params.ordinal = 99;
    cr_expect_eq(attn_device_open(&device, &params), ATTN_ERROR_NO_DEVICE);
    cr_expect_null(device);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

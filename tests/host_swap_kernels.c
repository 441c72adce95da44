/* SPDX-License-Identifier: Apache-2.0 */
// The swap engine with the tiled kernels themselves, emulated on the host (tests/emulator), behind
// the fake driver: launches, copies and waits of a call are done late, in any order that streams
// and events allow. The bits are those of attn_tiled_step_tile over all blocks.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/fake_streams.h"
#include "support/pack_folder.h"
#include "support/swap_case.h"
#include "tests/emulator/emulator.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct attn_device *gpu;
static struct swap_case c;
static struct attn_swap *swap;
static char path[SWAP_PATH_SIZE];

// A launch, until its turn comes.
struct launch {
    char kernel[64];
    unsigned grid, threads;
    struct attn_tiled_args args;
};

static void do_launch(const void *const argument)
{
    const struct launch *const launch = argument;
    cr_assert_eq(emulator_run_tiled(launch->kernel, launch->grid, launch->threads, &launch->args),
                 0);
}

static int launch_late(const char *const kernel, const unsigned grid, const unsigned threads,
                       const struct attn_tiled_args *const args)
{
    struct launch launch = { .grid = grid, .threads = threads, .args = *args };
    snprintf(launch.kernel, sizeof(launch.kernel), "%s", kernel);
    fake_streams_enqueue(fake.launches[(fake.num_launches - 1) % FAKE_MAX_LAUNCHES].stream,
                         do_launch, &launch, sizeof(launch));
    return 0;
}

static void set_up(void)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    swap_path_make(path);
    fake_driver_install();
    fake_streams_install(random_seed(1), true);
    fake.run_tiled = launch_late;
    open.kind = ATTN_DEVICE_ORDINAL;
    open.pack_dir = pack_folder_make_with("emulated");
    cr_assert_not_null(open.pack_dir);
    cr_assert_eq(attn_device_open(&gpu, &open), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    attn_device_close(&gpu);
    swap_case_free(&c);
    pack_folder_remove();
    swap_path_remove(path);
}

TestSuite(swap_kernels, .init = set_up, .fini = tear_down, .timeout = 600);

static bool agrees(struct swap_batch batch)
{
    struct attn_device *const host = c.host;
    // What the same kernels give over all blocks; memory of this GPU is the host's.
    c.host = gpu;
    struct swap_result expected = swap_case_expect(&c, &batch);
    c.host = host;
    struct swap_result result = swap_result_make(&c, batch.num_seqs);
    struct attn_swap_decode_params params = swap_batch_params(&batch);
    params.output = result.output;
    params.lse = result.lse;
    cr_assert_eq(attn_swap_decode(swap, &params, NULL), ATTN_OK, "%s", attn_last_error());
    fake_streams_finish();
    const bool same = swap_result_same(&result, &expected);
    swap_result_free(&result);
    swap_result_free(&expected);
    swap_batch_free(&batch);
    return same;
}

static void expect_bits(const enum attn_dtype dtype, const int32_t head_dim,
                        const enum attn_swap_backing backing, const uint64_t seed)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap_dims dims = swap_dims_make();
    dims.dtype = dtype;
    dims.head_dim = head_dim;
    dims.block_size = 20;
    swap_case_init(&c, &dims, seed);
    params.backing = backing;
    params.dims = &dims;
    if (backing == ATTN_SWAP_FILE) params.path = path;
    cr_assert_eq(attn_swap_create(&swap, gpu, &params), ATTN_OK, "%s", attn_last_error());
    swap_case_write_all(&c, swap);
    for (int i = 0; i < 6; i++) {
        cr_assert(agrees(swap_batch_draw(&c, i % 2, 1 + i % 4, 150)), "head_dim %d, call %d",
                  head_dim, i);
        swap_case_write(&c, swap, i % 2, i, 0, dims.block_size);
    }
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    unlink(path);
}

Test(swap_kernels, give_the_bits_of_the_whole_list)
{
    static const int32_t head_dims[] = { 64, 128, 256 };
    for (int i = 0; i < 6; i++)
        expect_bits(i % 2 ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16, head_dims[i / 2],
                    i % 3 ? ATTN_SWAP_HOST : ATTN_SWAP_FILE, 10 + (uint64_t) i);
}

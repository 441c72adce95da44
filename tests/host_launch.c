/* SPDX-License-Identifier: Apache-2.0 */
// What attn_decode asks of the driver: kernel, grid, block, shared memory, arguments; and that it
// asks for nothing where it refuses. On a fake driver and the fake packs of support/fake_pack.c.
#include "attn/attn.h"
#include "decode_check.h"
#include "support/fake_driver.h"
#include "support/pack_folder.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Device memory that nobody looks into: any address will do, as long as the buffers are apart.
#define AT(i) ((void *) (uintptr_t) (((uint64_t) (i) << 40) + 4096))
#define STREAM ((attn_stream) AT(99))
#define TILE 64
// A block of the merge tree of the 64-wide row: o, then m and l of each thread.
#define LEVEL_BYTES ((size_t) (64 * 16 + 4 * 32 * 2 * 4) * 4)
#define WARPS 4

static const char *folder;
static struct attn_device *device;

static void set_up(void)
{
    unsetenv("METRALE_ATTN_DECODE_SPLITK");
    unsetenv("METRALE_ATTN_DECODE_GQA_PACK");
    fake_driver_install();
    folder = pack_folder_make();
    cr_assert_not_null(folder);
    cr_assert_eq(pack_folder_add("hopper", "libattn-hopper.so", SIZE_MAX), 0);
}

static void tear_down(void)
{
    attn_device_close(&device);
    cr_expect(fake_driver_balanced());
    pack_folder_remove();
}

static void open_device(const enum attn_device_kind kind, const char *const policy,
                        const int32_t grid_limit)
{
    attn_device_close(&device);
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    params.pack_dir = folder;
    params.target = "hopper";
    params.splitk_policy = policy;
    params.grid_limit = grid_limit;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

// 3 sequences of up to 1600 keys, 24 query heads on 4 KV heads of 64.
static struct attn_decode_params right_params(void)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = 3;
    params.num_q_heads = 24;
    params.num_kv_heads = 4;
    params.head_dim = 64;
    params.page_size = 16;
    params.max_pages_per_seq = 100;
    params.num_pages = 1000;
    params.q = AT(1);
    params.o = AT(2);
    params.k_pool = AT(3);
    params.v_pool = AT(4);
    params.block_table = AT(5);
    params.seq_lens = AT(6);
    params.workspace = AT(9);
    params.workspace_bytes = SIZE_MAX / 4;
    params.counters = AT(13);
    return params;
}

static const struct fake_launch *last_launch(void)
{
    cr_assert_gt(fake.num_launches, 0);
    return &fake.launches[fake.num_launches - 1];
}

static void expect_refused(const struct attn_decode_params *const params,
                           const enum attn_status expected, const char *const part)
{
    const int launches = fake.num_launches;
    const enum attn_status status = attn_decode(device, params, STREAM);
    cr_expect_eq(status, expected, "%s: %s", attn_status_name(status), attn_last_error());
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(fake.num_launches, launches);
    cr_expect_eq(fake.pushes, fake.pops);
}

TestSuite(launch, .init = set_up, .fini = tear_down);

Test(launch, passes_everything_on)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.q_stride = 24 * 64 + 512;
    params.k_page_stride = 9 * 16 * 4 * 64;
    params.k_token_stride = 64;
    params.k_head_stride = 16 * 64;
    params.sinks = AT(7);
    params.lse = AT(8);
    params.fault = AT(10);
    params.k_scales = AT(11);
    params.v_scales = AT(12);
    params.scale = 0.125f;
    params.softcap = 30.0f;
    params.window = 77;
    params.k_scale = 0.25f;
    params.v_scale = 0.5f;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    const struct fake_launch *const launch = last_launch();
    cr_expect_eq(fake.num_launches, 1);
    cr_expect_str_eq(launch->kernel, "decode_bf16_bf16_d64");
    // 3 x 25 leaves of 64 keys are fewer than the 128 runs that the SMs hold for each of 4 lanes.
    cr_expect(launch->grid[0] == 75 * 4 && launch->grid[1] == 1 && launch->grid[2] == 1);
    cr_expect(launch->block[0] == WARPS * 32 && launch->block[1] == 1 && launch->block[2] == 1);
    cr_expect_eq(launch->smem_bytes, attn_decode_smem_bytes(64, 16, TILE, WARPS, 3));
    cr_expect_eq(launch->stream, STREAM);
    cr_expect_eq(launch->context, fake_primary_context(0));
    const struct attn_decode_args *const args = &launch->args;
    cr_expect(args->q == AT(1) && args->o == AT(2) && args->k == AT(3) && args->v == AT(4));
    cr_expect(args->block_table == AT(5) && args->seq_lens == AT(6) && args->sinks == AT(7));
    cr_expect(args->lse == AT(8) && args->stack == AT(9) && args->fault == AT(10));
    cr_expect(args->counters == AT(13) && args->runs == 75 && args->lanes == 4);
    // 25 leaves: 5 levels, so at most 10 aligned blocks in any stretch.
    cr_expect_eq(args->max_roots, 10);
    cr_expect_eq((const char *) args->roots, (const char *) AT(9) + 300 * 3 * LEVEL_BYTES);
    cr_expect(args->k_scales == AT(11) && args->v_scales == AT(12));
    cr_expect_eq(args->q_stride, 24 * 64 + 512);
    cr_expect_eq(args->k_page_stride, 9 * 16 * 4 * 64);
    cr_expect_eq(args->k_token_stride, 64);
    cr_expect_eq(args->k_head_stride, 16 * 64);
    // Those left 0 are the dense ones.
    cr_expect_eq(args->v_page_stride, 16 * 4 * 64);
    cr_expect_eq(args->v_token_stride, 4 * 64);
    cr_expect_eq(args->v_head_stride, 64);
    cr_expect(args->num_pages == 1000 && args->table_stride == 100 && args->page_size == 16);
    cr_expect_eq(args->max_keys, 1600);
    cr_expect(args->batch == 3 && args->num_q_heads == 24 && args->num_kv_heads == 4);
    cr_expect(args->ratio == 6 && args->row_groups == 1 && args->window == 77);
    // 64 << 2 = 256 keys in registers; 512, 1024 and 2048 above.
    cr_expect_eq(args->stack_levels, 3);
    cr_expect(args->scale == 0.125f && args->softcap == 30.0f);
    cr_expect(args->k_scale == 0.25f && args->v_scale == 0.5f);
}

// The kernels' division by the page size, where rounding could go wrong: around multiples.
Test(launch, divides_as_division_does)
{
    static const int32_t divisors[] = { 1,  2,  3,   5,   7,    8,     16,      17,       33,
                                        48, 64, 100, 127, 1000, 65535, 1 << 20, INT32_MAX };
    for (size_t i = 0; i < sizeof(divisors) / sizeof(divisors[0]); i++) {
        const int64_t divisor = divisors[i];
        uint32_t magic;
        int32_t shift;
        attn_decode_magic(divisors[i], &magic, &shift);
        for (int64_t step = 0; step < 2000; step++) {
            const int64_t multiple = (INT32_MAX / divisor) * step / 1999 * divisor;
            for (int64_t number = multiple - 1; number <= multiple + 1; number++) {
                if (number < 0 || number > INT32_MAX) continue;
                cr_assert_eq(attn_decode_divide((uint32_t) number, magic, shift), number / divisor,
                             "%lld / %lld", (long long) number, (long long) divisor);
            }
        }
    }
}

Test(launch, takes_the_first_row_that_accepts)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.head_dim = 128;
    params.num_q_heads = 8 * 4;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(last_launch()->kernel, "decode_bf16_bf16_d128");
    params.num_q_heads = 9 * 4;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_str_eq(last_launch()->kernel, "decode_bf16_bf16_d128_wide");
    // MQA of 128 heads walks 16 rows at a time.
    params.num_q_heads = 128;
    params.num_kv_heads = 1;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(last_launch()->args.row_groups, 8);
    cr_expect_eq(last_launch()->args.lanes, 8);
    params = right_params();
    params.q_dtype = ATTN_DTYPE_FP16;
    params.kv_dtype = ATTN_DTYPE_E4M3;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_str_eq(last_launch()->kernel, "decode_fp16_e4m3_d64");
}

Test(launch, says_what_the_target_has)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.head_dim = 96;
    expect_refused(&params, ATTN_ERROR_UNSUPPORTED, "head_dim 96");
    cr_expect(strstr(attn_last_error(), "decode_fp16_e4m3_d64"));
    params.head_dim = 97;
    expect_refused(&params, ATTN_ERROR_INVALID, "head_dim is 97");
    params = right_params();
    params.kv_dtype = ATTN_DTYPE_E4M3;
    expect_refused(&params, ATTN_ERROR_UNSUPPORTED, "KV e4m3");
}

Test(launch, runs_the_policies_it_has_a_kernel_for)
{
    static const struct {
        const char *policy, *refusal;
        int32_t num_splits, chunk_keys;
    } cases[] = {
        { "chunk", NULL, 0, TILE },         { "chunk:64", NULL, 0, TILE },
        { "chunk:128", "chunk:128", 0, 0 }, { "1", NULL, 1, 0 },
        { "2", "split count 2", 0, 0 },     { "auto", "split count 11", 0, 0 },
        { "legacy", NULL, 1, 0 },
    };
    struct attn_decode_params params = right_params();
    // 24 heads x 6 sequences fill 132 SMs.
    params.max_decode_seqs = 6;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        open_device(ATTN_DEVICE_ORDINAL, cases[i].policy, 0);
        if (cases[i].refusal) {
            expect_refused(&params, ATTN_ERROR_UNSUPPORTED, cases[i].refusal);
            continue;
        }
        cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        const struct attn_decode_shape shape = attn_decode_shape_of(&params);
        struct attn_decode_plan plan = { .size = sizeof(plan) };
        cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK);
        cr_expect_eq(plan.num_splits, cases[i].num_splits, "%s", cases[i].policy);
        cr_expect_eq(plan.chunk_keys, cases[i].chunk_keys, "%s", cases[i].policy);
    }
    // 4 heads x 3 sequences leave room for 11 splits.
    params.num_q_heads = 4;
    params.max_decode_seqs = 3;
    expect_refused(&params, ATTN_ERROR_UNSUPPORTED, "split count 11");
    params.max_decode_seqs = 2;
    expect_refused(&params, ATTN_ERROR_INVALID, "max_decode_seqs is 2");
    params.batch = 1024;
    params.num_q_heads = 1024;
    params.max_decode_seqs = 1024;
    open_device(ATTN_DEVICE_ORDINAL, "auto", 0);
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
}

// The declared SM count, not the real one, makes the policy: bits are the same over all boards of a
// chip.
Test(launch, takes_the_policy_from_the_declared_sm_count)
{
    fake.gpus[0].sm_count = 1;
    open_device(ATTN_DEVICE_ORDINAL, "auto", 0);
    const struct attn_decode_params params = right_params();
    expect_refused(&params, ATTN_ERROR_UNSUPPORTED, "split count 11");
}

Test(launch, needs_exactly_its_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    const struct attn_decode_shape shape = attn_decode_shape_of(&params);
    size_t bytes;
    cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
    // 300 blocks: 3 levels of the stack each, and 10 roots at either end of a run.
    cr_expect_eq(bytes, 300 * (3 + 2 * 10) * LEVEL_BYTES);
    int32_t count;
    cr_assert_eq(attn_decode_counters(device, &shape, &count), ATTN_OK);
    cr_expect_eq(count, 3 * 4);
    params.workspace_bytes = bytes;
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    params.workspace_bytes = bytes - 1;
    expect_refused(&params, ATTN_ERROR_INVALID, "workspace_bytes is");
    params.workspace_bytes = bytes;
    params.workspace = (char *) AT(9) + 128;
    expect_refused(&params, ATTN_ERROR_INVALID, "aligned to 256 bytes");
    params.workspace = NULL;
    expect_refused(&params, ATTN_ERROR_INVALID, "workspace is NULL");
    params.workspace = (char *) AT(2) - 256;
    expect_refused(&params, ATTN_ERROR_INVALID, "overlaps");
    params.workspace = AT(9);
    params.counters = (void *) ((char *) AT(2) + 8);
    expect_refused(&params, ATTN_ERROR_INVALID, "overlaps");
    params.counters = NULL;
    expect_refused(&params, ATTN_ERROR_INVALID, "counters is NULL");
    // A table of one leaf: nothing to split, nothing to merge.
    params.max_pages_per_seq = 4;
    params.workspace = NULL;
    params.workspace_bytes = 0;
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
}

// A smaller call never needs more than the shape it was sized by.
Test(launch, sizes_grow_with_the_shape)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    const struct attn_decode_params params = right_params();
    struct attn_decode_shape shape = attn_decode_shape_of(&params);
    size_t last = 0;
    for (int32_t batch = 0; batch < 600; batch += 7) {
        size_t bytes;
        shape.batch = batch;
        cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
        cr_expect(bytes >= last && bytes % 256 == 0);
        last = bytes;
    }
    for (int32_t pages = 100; pages > 0 && pages < INT32_MAX / 2; pages *= 2) {
        size_t bytes;
        shape.max_pages_per_seq = pages;
        cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
        cr_expect_geq(bytes, last);
        last = bytes;
    }
}

Test(launch, caps_the_grid)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.batch = 1 << 20;
    params.max_pages_per_seq = INT32_MAX;
    params.page_size = 1;
    params.block_table = AT(1 << 22);
    params.seq_lens = AT(7);
    params.q = AT(1 << 8);
    params.o = AT(1 << 9);
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->grid[0], ATTN_DECODE_MAX_GRID);
    cr_expect_eq(last_launch()->args.max_keys, INT32_MAX);

    // The limit of a test changes the grid alone, not the workspace.
    params = right_params();
    const struct attn_decode_shape shape = attn_decode_shape_of(&params);
    size_t unlimited, limited;
    cr_assert_eq(attn_decode_workspace(device, &shape, &unlimited), ATTN_OK);
    open_device(ATTN_DEVICE_ORDINAL, NULL, 5);
    cr_assert_eq(attn_decode_workspace(device, &shape, &limited), ATTN_OK);
    cr_expect_eq(limited, unlimited);
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->grid[0], 4);
    cr_expect_eq(last_launch()->args.runs, 1);
}

Test(launch, plans_what_it_launches)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    const struct attn_decode_params params = right_params();
    const struct attn_decode_shape shape = attn_decode_shape_of(&params);
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    size_t bytes;
    cr_assert_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK);
    cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_str_eq(plan.kernel, last_launch()->kernel);
    cr_expect_eq((unsigned) plan.grid, last_launch()->grid[0]);
    cr_expect_eq((unsigned) plan.block, last_launch()->block[0]);
    cr_expect_eq((unsigned) plan.smem_bytes, last_launch()->smem_bytes);
    cr_expect_eq(plan.workspace_bytes, bytes);
    cr_expect_eq(plan.kv_bytes, 2.0 * 3 * 4 * 1600 * 64 * 2);
    cr_expect_eq(plan.flops, 4.0 * 3 * 24 * 1600 * 64);
}

Test(launch, launches_nothing_for_an_empty_batch)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.batch = 0;
    params.workspace = NULL;
    params.q = NULL;
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.num_launches, 0);
}

Test(launch, uses_the_device_s_context)
{
    const struct attn_decode_params params = right_params();
    fake.current = fake_primary_context(0);
    open_device(ATTN_DEVICE_CURRENT, NULL, 0);
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(fake.pushes, 0);
    fake.current = fake_other_context();
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(last_launch()->context, fake_primary_context(0));
    cr_expect_eq(fake.current, fake_other_context());
    cr_expect(fake.pushes == 1 && fake.pops == 1);
}

Test(launch, returns_what_the_driver_says)
{
    static const char *const calls[] = { "cuLaunchKernel", "cuCtxGetCurrent",
                                         "cuCtxPushCurrent_v2" };
    const struct attn_decode_params params = right_params();
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (size_t i = 0; i < 3; i++) {
        fake.fail_symbol = calls[i];
        fake.fail_at = 1;
        fake.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
        expect_refused(&params, ATTN_ERROR_DRIVER,
                       "kernel decode_bf16_bf16_d64 cannot be launched");
        cr_expect(strstr(attn_last_error(), "FAKE_ERROR_719 (719)"));
        fake.fail_code = ATTN_CU_ERROR_OUT_OF_MEMORY;
        expect_refused(&params, ATTN_ERROR_NO_MEMORY, "(2)");
    }
    fake.fail_symbol = NULL;
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK);
}

Test(launch, zeroes_counters)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    cr_expect_eq(attn_decode_reset_counters(device, AT(5), 77, STREAM), ATTN_OK);
    cr_expect_eq(fake.memsets, 1);
    cr_expect_eq(fake.memset_address, (attn_cu_deviceptr) (uintptr_t) AT(5));
    cr_expect_eq(fake.memset_count, 77);
    cr_expect_eq(attn_decode_reset_counters(device, NULL, 0, STREAM), ATTN_OK);
    cr_expect_eq(attn_decode_reset_counters(device, NULL, 1, STREAM), ATTN_ERROR_INVALID);
    cr_expect_eq(fake.memsets, 1);
    fake.fail_symbol = "cuMemsetD32Async";
    fake.fail_code = 700;
    cr_expect_eq(attn_decode_reset_counters(device, AT(5), 1, STREAM), ATTN_ERROR_DRIVER);
}

Test(launch, has_no_gpu_for_a_target)
{
    open_device(ATTN_DEVICE_TARGET, NULL, 0);
    struct attn_decode_params params = right_params();
    expect_refused(&params, ATTN_ERROR_NO_DEVICE, "the target hopper without a GPU");
    params.head_dim = 17;
    expect_refused(&params, ATTN_ERROR_INVALID, "head_dim is 17");
    cr_expect_eq(attn_decode_reset_counters(device, AT(5), 1, STREAM), ATTN_ERROR_NO_DEVICE);
    cr_expect_eq(fake.num_calls, 0);
}

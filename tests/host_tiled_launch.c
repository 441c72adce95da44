/* SPDX-License-Identifier: Apache-2.0 */
// What tiled decode asks of the driver: memory, kernel, grid, block, shared memory, arguments; and
// that it asks for nothing where it refuses. On a fake driver and the fake packs of
// support/fake_pack.c.
#include "attn/attn.h"
#include "support/launches.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static struct attn_device *device;
static struct attn_tiled *tiled;

static void set_up(void)
{
    launches_set_up();
}

static void tear_down(void)
{
    attn_tiled_destroy(&tiled);
    launches_tear_down(&device);
}

TestSuite(tiled_launch, .init = set_up, .fini = tear_down);

static void open_device(const enum attn_device_kind kind)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    launches_open(&device, params);
}

// 40 sequences, 20 query heads on 2 KV heads of 128, blocks of 24 slots, tiles of 50.
static struct attn_tiled_dims right_dims(void)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    dims.max_seqs = 40;
    dims.num_q_heads = 20;
    dims.num_kv_heads = 2;
    dims.head_dim = 128;
    dims.block_size = 24;
    dims.tile_capacity = 50;
    return dims;
}

static enum attn_status create(const struct attn_tiled_dims *const dims, float *const m,
                               float *const l, float *const o)
{
    struct attn_tiled_create_params params = ATTN_TILED_CREATE_PARAMS_INIT;
    params.dims = dims;
    params.m = m;
    params.l = l;
    params.o = o;
    attn_tiled_destroy(&tiled);
    return attn_tiled_create(&tiled, device, &params);
}

static void make(const struct attn_tiled_dims *const dims)
{
    cr_assert_eq(create(dims, AT(20), AT(21), AT(22)), ATTN_OK, "%s", attn_last_error());
}

static struct attn_tiled_step_params right_step(const int32_t num_seqs)
{
    struct attn_tiled_step_params params = ATTN_TILED_STEP_PARAMS_INIT;
    params.num_seqs = num_seqs;
    params.q = AT(1);
    params.k_pool = AT(2);
    params.v_pool = AT(3);
    params.tile_blocks = AT(4);
    params.tile_block_counts = AT(5);
    params.num_pool_blocks = 1000;
    return params;
}

static void expect_launch(const int launches, const int32_t what, const unsigned grid)
{
    cr_assert_eq(fake.num_launches, launches);
    const struct fake_launch *const launch = last_launch();
    cr_expect_str_eq(launch->kernel, "tiled_bf16_d128");
    cr_expect_eq(launch->tiled.what, what);
    cr_expect(launch->grid[0] == grid && launch->grid[1] == 1 && launch->grid[2] == 1, "%u",
              launch->grid[0]);
    cr_expect(launch->block[0] == 4 * 32 && launch->block[1] == 1 && launch->block[2] == 1);
    cr_expect_eq(launch->smem_bytes, attn_tiled_smem_bytes(128, 4, 2));
    cr_expect_eq(launch->stream, STREAM);
    cr_expect_eq(launch->context, fake_primary_context(0));
    cr_expect(launch->tiled.m == AT(20) && launch->tiled.l == AT(21) && launch->tiled.o == AT(22));
}

// ---- what is launched

Test(tiled_launch, begins_and_finalizes_rows)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    make(&dims);
    cr_assert_eq(attn_tiled_begin_step(tiled, 7, STREAM), ATTN_OK, "%s", attn_last_error());
    // A warp a row.
    expect_launch(1, ATTN_TILED_BEGIN, 7 * 20 / 4);
    cr_expect_eq(last_launch()->tiled.num_rows, 140);
    last.num_seqs = 40;
    last.output = AT(6);
    last.lse = AT(7);
    cr_assert_eq(attn_tiled_finalize(tiled, &last, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_launch(2, ATTN_TILED_FINALIZE, 40 * 20 / 4);
    cr_expect(last_launch()->tiled.output == AT(6) && last_launch()->tiled.lse == AT(7));
    last.lse = NULL;
    cr_assert_eq(attn_tiled_finalize(tiled, &last, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_null(last_launch()->tiled.lse);
}

// Rows beyond the blocks that an SM needs wait for their turn.
Test(tiled_launch, begins_any_number_of_rows)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_tiled_dims dims = right_dims();
    dims.max_seqs = 100000;
    make(&dims);
    cr_assert_eq(attn_tiled_begin_step(tiled, 100000, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_launch(1, ATTN_TILED_BEGIN, 132 * 8);
    cr_expect_eq(last_launch()->tiled.num_rows, 2000000);
}

Test(tiled_launch, passes_everything_on)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    make(&dims);
    struct attn_tiled_step_params params = right_step(40);
    params.block_stride = 9 * 24 * 256;
    params.token_stride = 128;
    params.head_stride = 24 * 128;
    params.last_block_valid_slots = 13;
    params.valid_slots = AT(8);
    params.fault = AT(9);
    params.scale = 0.3f;
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    // Groups of 8 and 2 of the 10 query heads of a KV head.
    expect_launch(1, ATTN_TILED_FOLD, 40 * 2 * 2);
    const struct attn_tiled_args *const args = &last_launch()->tiled;
    cr_expect(args->q == AT(1) && args->k == AT(2) && args->v == AT(3));
    cr_expect(args->blocks == AT(4) && args->counts == AT(5) && args->valid == AT(8));
    cr_expect_eq(args->fault, AT(9));
    cr_expect_eq(args->block_stride, 9 * 24 * 256);
    cr_expect(args->token_stride == 128 && args->head_stride == 24 * 128);
    cr_expect(args->num_pool_blocks == 1000 && args->block_size == 24);
    cr_expect(args->tile_capacity == 50 && args->last_slots == 13);
    cr_expect(args->num_q_heads == 20 && args->ratio == 10 && args->groups == 2);
    cr_expect(args->lanes == 4 && args->all_lanes == 160 && args->lane_rows == 8);
    // 24 slots are a unit of 16 and one of 8.
    cr_expect_eq(args->parts, 2);
    cr_expect_eq(attn_divide(159, args->lanes_magic, args->lanes_shift), 39);
    cr_expect_eq(attn_divide(3, args->groups_magic, args->groups_shift), 1);
    cr_expect_eq(attn_divide(255, args->parts_magic, args->parts_shift), 127);
    cr_expect_eq(args->scale, 0.3f);
}

Test(tiled_launch, fills_in_defaults)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    make(&dims);
    const struct attn_tiled_step_params params = right_step(34);
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_launch(1, ATTN_TILED_FOLD, 34 * 4);
    const struct attn_tiled_args *const args = &last_launch()->tiled;
    cr_expect_eq(args->block_stride, 24 * 2 * 128);
    cr_expect(args->token_stride == 2 * 128 && args->head_stride == 128);
    cr_expect_eq(args->scale, 1 / sqrtf(128));
    cr_expect(!args->valid && !args->fault && args->last_slots == INT32_MAX);
}

// A tile of 6000 units, and 4 lanes: there is a workspace, in which 2016 of them have room.
Test(tiled_launch, takes_few_lanes_by_way_of_the_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_tiled_dims dims = right_dims();
    dims.tile_capacity = 3000;
    make(&dims);
    cr_expect_eq(fake.allocations, 1);
    cr_expect_eq(fake.allocated_bytes, 32 << 20);
    struct attn_tiled_step_params params = right_step(1);
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    const int64_t range = (32 << 20) / (4 * 8 * 130 * 4) / ATTN_TILED_CHUNK * ATTN_TILED_CHUNK;
    for (int turn = 0; turn < 3; turn++) {
        const struct fake_launch *const made = &fake.launches[2 * turn];
        const struct attn_tiled_args *const args = &made->tiled;
        cr_expect(args->what == ATTN_TILED_PARTIALS &&
                  made[1].tiled.what == ATTN_TILED_FOLD_PARTIALS);
        cr_expect_eq(args->range, range);
        cr_expect_eq(made->grid[0], 4 * range / ATTN_TILED_CHUNK);
        cr_expect_eq(made[1].grid[0], 4 * ATTN_TILED_ROWS);
        cr_expect_eq(args->first_unit, turn * range);
        cr_expect_eq(args->first_block * 2 + args->first_part, turn * range);
        cr_expect_eq(args->partials_ml - args->partials, 4 * 8 * 128 * range);
        cr_expect_eq(made[1].tiled.first_unit, turn * range);
    }
    cr_expect_eq(fake.num_launches, 6);
    // 33 lanes are few, 36 are not.
    params.num_seqs = 8;
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->tiled.what, ATTN_TILED_FOLD_PARTIALS);
    params.num_seqs = 9;
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->tiled.what, ATTN_TILED_FOLD);
    cr_expect_eq(last_launch()->grid[0], 36);
}

// A plan is what a step then launches, with a GPU or without one.
static void expect_plan(const struct attn_tiled_dims *const dims, const int32_t num_seqs,
                        const int32_t turns)
{
    const int before = fake.num_launches;
    struct attn_tiled_plan plan = { .size = sizeof(plan) };
    cr_assert_eq(attn_tiled_plan(device, dims, num_seqs, &plan), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.num_launches, before, "a plan launches nothing");
    cr_expect_str_eq(plan.kernel, "tiled_bf16_d128");
    cr_expect_eq(plan.turns, turns);
    cr_expect_eq(plan.smem_bytes, attn_tiled_smem_bytes(128, 4, 2));
    cr_expect_eq(plan.block, 4 * 32);
    cr_expect_eq(plan.workspace_bytes, attn_tiled_workspace_bytes(device, dims));
    if (!tiled) return;
    const struct attn_tiled_step_params params = right_step(num_seqs);
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.num_launches - before, turns ? 2 * turns : 1);
    cr_expect_eq((int32_t) fake.launches[before].grid[0], plan.grid);
}

Test(tiled_launch, does_what_it_plans)
{
    struct attn_tiled_dims dims = right_dims();
    open_device(ATTN_DEVICE_TARGET);
    expect_plan(&dims, 40, 0);
    dims.tile_capacity = 3000;
    expect_plan(&dims, 1, 3);
    cr_expect_eq(attn_tiled_workspace_bytes(device, &dims), 32 << 20);
    attn_device_close(&device);
    open_device(ATTN_DEVICE_ORDINAL);
    make(&dims);
    expect_plan(&dims, 1, 3);
    expect_plan(&dims, 9, 0);
    struct attn_tiled_plan none = { .size = sizeof(none) };
    cr_assert_eq(attn_tiled_plan(device, &dims, 0, &none), ATTN_OK);
    cr_expect(!none.grid && !none.turns && !none.block && none.kv_bytes == 0);
}

// As attn_tiled_workspace_bytes says, and not a byte less.
Test(tiled_launch, takes_the_workspace_of_the_caller)
{
    struct attn_tiled_create_params params = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled_dims dims = right_dims();
    open_device(ATTN_DEVICE_ORDINAL);
    // 1000 units of 4 lanes.
    dims.max_seqs = 1;
    dims.tile_capacity = 500;
    const int64_t bytes = attn_tiled_workspace_bytes(device, &dims);
    const int64_t units = (1000 + ATTN_TILED_CHUNK - 1) / ATTN_TILED_CHUNK * ATTN_TILED_CHUNK;
    cr_assert_eq(bytes, units * 4 * 8 * 130 * 4);
    params.dims = &dims;
    params.workspace = AT(30);
    params.workspace_bytes = bytes - 1;
    expect_no_launch(0, attn_tiled_create(&tiled, device, &params), ATTN_ERROR_INVALID,
                     "as attn_tiled_workspace_bytes says");
    cr_expect_null(tiled);
    cr_expect_eq(fake.allocations, 0);
    params.workspace_bytes = bytes;
    params.m = AT(20);
    params.l = AT(21);
    params.o = AT(22);
    cr_assert_eq(attn_tiled_create(&tiled, device, &params), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.allocations, 0);
    struct attn_tiled_step_params step = right_step(1);
    cr_assert_eq(attn_tiled_step_tile(tiled, &step, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.launches[0].tiled.partials, (float *) AT(30));
    // None of what a step is given may lie in it.
    step.q = (const char *) AT(30) + 4096;
    const int launches = fake.num_launches;
    expect_no_launch(launches, attn_tiled_step_tile(tiled, &step, STREAM), ATTN_ERROR_INVALID,
                     "overlaps");
    attn_tiled_destroy(&tiled);
    cr_expect_eq(fake.frees, 0);
    // Its own, then, of the same size.
    params.workspace = NULL;
    params.workspace_bytes = 0;
    cr_assert_eq(attn_tiled_create(&tiled, device, &params), ATTN_OK, "%s", attn_last_error());
    cr_expect(fake.allocations == 1 && fake.allocated_bytes == (size_t) bytes);
    // None is wanted: what is given is not used.
    attn_tiled_destroy(&tiled);
    dims = right_dims();
    cr_expect_eq(attn_tiled_workspace_bytes(device, &dims), 0);
    params.workspace = AT(30);
    cr_assert_eq(attn_tiled_create(&tiled, device, &params), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.allocations, 1);
}

// Where the workspace has room for too little, tiles are folded at once.
Test(tiled_launch, does_not_take_very_many_turns)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_tiled_dims dims = right_dims();
    dims.tile_capacity = INT32_MAX / 2;
    make(&dims);
    const struct attn_tiled_step_params params = right_step(1);
    cr_assert_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_launch(1, ATTN_TILED_FOLD, 4);
}

// Sequences, tiles: nothing of them.
Test(tiled_launch, launches_nothing_for_no_sequences)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    make(&dims);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    struct attn_tiled_step_params params = right_step(0);
    cr_expect_eq(attn_tiled_begin_step(tiled, 0, STREAM), ATTN_OK);
    cr_expect_eq(attn_tiled_step_tile(tiled, &params, STREAM), ATTN_OK);
    cr_expect_eq(attn_tiled_finalize(tiled, &last, STREAM), ATTN_OK);
    cr_expect_eq(fake.num_launches, 0);
}

// ---- memory

Test(tiled_launch, allocates_its_state)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    cr_assert_eq(create(&dims, NULL, NULL, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.allocations, 1);
    // m and l of 800 rows, to 256 bytes.
    cr_expect_eq(fake.allocated_bytes, 2 * 3328 + 800 * 128 * 4);
    cr_assert_eq(attn_tiled_begin_step(tiled, 40, STREAM), ATTN_OK, "%s", attn_last_error());
    const struct attn_tiled_args *const args = &last_launch()->tiled;
    cr_expect_eq((uintptr_t) args->m % 256, 0);
    cr_expect(args->l - args->m == 3328 / 4 && args->o - args->l == 3328 / 4);
    attn_tiled_destroy(&tiled);
    cr_expect_eq(fake.frees, 1);
    // The caller's is not freed.
    make(&dims);
    attn_tiled_destroy(&tiled);
    cr_expect_eq(fake.frees, 1);
}

// Either allocation fails; what the first has given is then given back.
Test(tiled_launch, survives_without_memory)
{
    static const char *const sentences[] = { "bytes for a tiled state cannot be allocated",
                                             "bytes for partials of tiles cannot be allocated" };
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_tiled_dims dims = right_dims();
    dims.tile_capacity = 3000;
    fake.fail_symbol = "cuMemAlloc_v2";
    fake.fail_code = ATTN_CU_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < 2; i++) {
        // The first call of the first state, then the second of the second.
        fake.fail_at = i == 0 ? 1 : 3;
        expect_no_launch(0, create(&dims, NULL, NULL, NULL), ATTN_ERROR_NO_MEMORY, sentences[i]);
        cr_expect_null(tiled);
        cr_expect(fake.allocations == i && fake.frees == i);
    }
}

// ---- what is not launched

Test(tiled_launch, says_what_the_target_has)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_tiled_dims dims = right_dims();
    dims.head_dim = 256;
    expect_no_launch(0, create(&dims, NULL, NULL, NULL), ATTN_ERROR_UNSUPPORTED,
                     "no tiled kernel for bf16, head_dim 256; it has: tiled_bf16_d128, "
                     "tiled_fp16_d64");
    cr_expect_null(tiled);
    dims.head_dim = 96;
    expect_no_launch(0, create(&dims, NULL, NULL, NULL), ATTN_ERROR_UNSUPPORTED,
                     "head_dim is 96: tiled decode serves 64, 128 and 256");
    dims = right_dims();
    dims.max_seqs = INT32_MAX / 2;
    expect_no_launch(0, create(&dims, NULL, NULL, NULL), ATTN_ERROR_UNSUPPORTED,
                     "blocks, more than 2147483647");
    cr_expect_eq(fake.allocations, 0);
}

Test(tiled_launch, has_no_state_without_a_gpu)
{
    open_device(ATTN_DEVICE_TARGET);
    const struct attn_tiled_dims dims = right_dims();
    expect_no_launch(0, create(&dims, NULL, NULL, NULL), ATTN_ERROR_NO_DEVICE, "without a GPU");
}

// As tests/host_tiled_args.c has them all, on the host.
Test(tiled_launch, launches_nothing_that_is_refused)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    make(&dims);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    struct attn_tiled_step_params params = right_step(41);
    const enum attn_status invalid = ATTN_ERROR_INVALID;
    last.num_seqs = 3;
    expect_no_launch(0, attn_tiled_begin_step(tiled, 41, STREAM), invalid, "num_seqs is 41");
    expect_no_launch(0, attn_tiled_step_tile(tiled, &params, STREAM), invalid, "num_seqs is 41");
    params = right_step(3);
    params.token_stride = 12;
    expect_no_launch(0, attn_tiled_step_tile(tiled, &params, STREAM), invalid, "stride is");
    expect_no_launch(0, attn_tiled_finalize(tiled, &last, STREAM), invalid, "output is NULL");
}

Test(tiled_launch, reports_what_the_driver_says)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_tiled_dims dims = right_dims();
    make(&dims);
    fake.fail_symbol = "cuLaunchKernelEx";
    fake.fail_at = 1;
    fake.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
    const struct attn_tiled_step_params params = right_step(3);
    expect_no_launch(0, attn_tiled_step_tile(tiled, &params, STREAM), ATTN_ERROR_DRIVER,
                     "kernel tiled_bf16_d128 cannot be launched");
}

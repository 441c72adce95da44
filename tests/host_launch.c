/* SPDX-License-Identifier: Apache-2.0 */
// What attn_decode asks of the driver: kernel, grid, block, shared memory, arguments; and that it
// asks for nothing where it refuses. On a fake driver and the fake packs of support/fake_pack.c.
#include "attn/attn.h"
#include "decode_boxes.h"
#include "device.h"
#include "support/launches.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 64
#define WARPS 4
#define LEVELS_64 3
#define LEVELS_256 1
// Of the 64-wide row, two of whose blocks an SM holds, and of the 256-wide one.
#define GRID_64 (132 * 2)
#define GRID_256 132

static struct attn_device *device;

static void tear_down(void)
{
    launches_tear_down(&device);
}

static void open_device(const enum attn_device_kind kind, const char *const policy,
                        const int32_t grid_limit)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    params.splitk_policy = policy;
    params.grid_limit = grid_limit;
    launches_open(&device, params);
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

static void expect_refused(const struct attn_decode_params *const params,
                           const enum attn_status expected, const char *const part)
{
    const int launches = fake.num_launches;
    const enum attn_status status = attn_decode(device, params, STREAM);
    expect_no_launch(launches, status, expected, part);
}

// Bytes of `slots` blocks of the merge tree: of each row o, and of each warp m and l.
static size_t slot_bytes(const int64_t slots, const int32_t rows, const int32_t head_dim)
{
    const int32_t warps = (int32_t) last_launch()->block[0] / 32 - 2;
    return (size_t) slots * (size_t) rows * (size_t) (head_dim + 2 * warps) * 4;
}

// What the last launch uses of the workspace, pieces left out.
static size_t used_bytes(const int32_t rows, const int32_t head_dim)
{
    const struct attn_decode_args *const args = &last_launch()->args;
    const int64_t waiting = (int64_t) last_launch()->grid[0] * args->stack_slots;
    return slot_bytes(args->num_roots + waiting, rows, head_dim);
}

static int64_t used_counters(void)
{
    const struct attn_decode_args *const args = &last_launch()->args;
    const int64_t of_sequences = args->splits > 1 ? (int64_t) args->batch * args->lanes : 0;
    return 2 + (int64_t) args->root_levels * args->num_roots + of_sequences;
}

// There is room for the roots of pieces of so many leaves, in units as large as these make them,
// and not for many more: a piece may begin and end within a unit. They meet until they are one.
static void expect_roots(const int64_t pieces, const int64_t leaves)
{
    const struct attn_decode_args *const args = &last_launch()->args;
    const int32_t blocks = (int32_t) last_launch()->grid[0];
    const int64_t items = pieces * (leaves + 1) * args->lanes;
    const int64_t units =
        ((leaves - 1) >> attn_decode_unit_shift((uint64_t) items, blocks, args->most_units, 1)) + 1;
    const int64_t least = units > 1 ? pieces * units * args->lanes : 0;
    const int64_t of_leaves = pieces * (leaves + 2) * args->lanes;
    const int64_t of_units =
        (int64_t) blocks * ATTN_DECODE_BLOCK_UNITS + (pieces * 2 + 1) * args->lanes;
    const int64_t most = of_leaves < of_units ? of_leaves : of_units;
    cr_expect(args->num_roots >= least && args->num_roots <= most, "%d roots, not %lld to %lld",
              args->num_roots, (long long) least, (long long) most);
    const struct attn_pack_row *const row = last_row(device);
    const int32_t fan_log = ATTN_DECODE_FAN_LOG(row->head_dim, row->rows);
    const int32_t log = args->root_levels * fan_log;
    cr_expect(log > 0 && (leaves - 1) >> log == 0 && (leaves + 1) >> (log - fan_log),
              "%d levels of roots", args->root_levels);
}

static size_t round_up(const size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

TestSuite(launch, .init = launches_set_up, .fini = tear_down);

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
    cr_expect(launch->grid[0] == GRID_64 && launch->grid[1] == 1 && launch->grid[2] == 1);
    // One warp copies, and one counts arrivals.
    cr_expect(launch->block[0] == (WARPS + 2) * 32 && launch->block[1] == 1 &&
              launch->block[2] == 1);
    cr_expect_eq(launch->smem_bytes,
                 attn_decode_smem_bytes(64, 2, 16, TILE, WARPS, 3, LEVELS_64, 0));
    cr_expect_eq(launch->stream, STREAM);
    cr_expect_eq(launch->context, fake_primary_context(0));
    const struct attn_decode_args *const args = &launch->args;
    cr_expect(args->q == AT(1) && args->o == AT(2) && args->k == AT(3) && args->v == AT(4));
    cr_expect(args->block_table == AT(5) && args->seq_lens == AT(6) && args->sinks == AT(7));
    cr_expect(args->lse == AT(8) && args->slots == AT(9) && args->fault == AT(10));
    cr_expect(args->counters == AT(13) && args->lanes == 4);
    // Of 3 x 25 leaves of 64 keys.
    expect_roots(3, 25);
    cr_expect(args->splits == 1 && !args->pieces && args->min_shift == 0);
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
    cr_expect_eq(args->group_rows, 16);
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
        attn_magic(divisors[i], &magic, &shift);
        for (int64_t step = 0; step < 2000; step++) {
            const int64_t multiple = (INT32_MAX / divisor) * step / 1999 * divisor;
            for (int64_t number = multiple - 1; number <= multiple + 1; number++) {
                if (number < 0 || number > INT32_MAX) continue;
                cr_assert_eq(attn_divide((uint32_t) number, magic, shift), number / divisor,
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
}

// Warpgroups for 64 rows where there are enough, and sequences are not cut into pieces.
Test(launch, takes_warpgroups_for_many_rows)
{
    struct attn_decode_params params = right_params();
    params.head_dim = 128;
    params.num_q_heads = 130;
    params.num_kv_heads = 1;
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    const struct fake_launch *const launch = last_launch();
    cr_expect_str_eq(launch->kernel, "decode_bf16_bf16_d128_r64");
    cr_expect_eq(launch->block[0], (8 + 4) * 32);
    cr_expect_eq(launch->smem_bytes, attn_decode_group_smem_bytes(128, 64, TILE, 2, 1));
    cr_expect(launch->args.group_rows == 64 && launch->args.row_groups == 3);
    cr_expect_eq(launch->args.most_units, (int32_t) launch->grid[0] * ATTN_DECODE_GROUP_UNITS);
    // Boxes of one line of a row's two.
    cr_expect(launch->args.has_boxes && fake.num_maps == 2);
    cr_expect(fake.maps[0].dims[2] == 2 && fake.maps[0].box[2] == 1 && fake.maps[1].box[2] == 1);
    open_device(ATTN_DEVICE_ORDINAL, "2", 0);
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(last_launch()->kernel, "decode_bf16_bf16_d128_wide");
}

// Each pair of types and head_dim has its row; what has none is refused.
Test(launch, takes_the_row_of_the_types)
{
    static const struct {
        enum attn_dtype q, kv;
        int32_t head_dim, rows;
        const char *kernel;
    } cases[] = {
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256, 8, "decode_bf16_bf16_d256" },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 512, 8, "decode_bf16_bf16_d512" },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128, 16, "decode_bf16_e4m3_d128" },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32, 16, "decode_fp16_fp16_d32" },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 64, 16, "decode_fp16_e4m3_d64" },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 32, 0, "q bf16, KV bf16, head_dim 32" },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 64, 0, "q fp16, KV fp16, head_dim 64" },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 128, 0, "q fp16, KV e4m3, head_dim 128" },
    };
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attn_decode_params params = right_params();
        params.q_dtype = cases[i].q;
        params.kv_dtype = cases[i].kv;
        params.head_dim = cases[i].head_dim;
        if (cases[i].rows == 0) {
            expect_refused(&params, ATTN_ERROR_UNSUPPORTED, cases[i].kernel);
            continue;
        }
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        cr_expect_str_eq(last_launch()->kernel, cases[i].kernel);
        cr_expect_eq(last_launch()->args.group_rows, cases[i].rows);
    }
    // Eight query rows of that width: a GQA group of 16 is walked in two.
    struct attn_decode_params params = right_params();
    params.head_dim = 512;
    params.num_q_heads = 64;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect(last_launch()->args.row_groups == 2 && last_launch()->args.lanes == 8);
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

Test(launch, runs_every_policy)
{
    static const struct {
        const char *policy, *refusal;
        int32_t num_splits, chunk_keys;
    } cases[] = {
        { "chunk", NULL, 0, TILE },
        { "chunk:64", NULL, 0, TILE },
        { "chunk:128", "chunk:128, but kernel decode_bf16_bf16_d64 has chunks of 64", 0, 0 },
        { "1", NULL, 1, 0 },
        { "2", NULL, 2, 0 },
        { "16", NULL, 16, 0 },
        { "auto", NULL, 11, 0 },
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
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        const struct attn_decode_shape shape = attn_decode_shape_of(&params);
        struct attn_decode_plan plan = { .size = sizeof(plan) };
        cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK);
        cr_expect_eq(plan.num_splits, cases[i].num_splits, "%s", cases[i].policy);
        cr_expect_eq(plan.chunk_keys, cases[i].chunk_keys, "%s", cases[i].policy);
        const int32_t splits = cases[i].num_splits > 1 ? cases[i].num_splits : 1;
        cr_expect_eq(last_launch()->args.splits, splits, "%s", cases[i].policy);
        cr_expect_eq(last_launch()->args.pieces != NULL, splits > 1, "%s", cases[i].policy);
    }
    // 4 heads x 3 sequences leave room for 11 splits, 4 heads x 3 and a maximum of 5 for 6.
    params.num_q_heads = 4;
    params.max_decode_seqs = 3;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->args.splits, 11);
    params.max_decode_seqs = 5;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->args.splits, 6);
    params.max_decode_seqs = 2;
    expect_refused(&params, ATTN_ERROR_INVALID, "max_decode_seqs is 2");
}

// The declared SM count, not the real one, makes the policy: bits are the same over all boards of a
// chip.
Test(launch, takes_the_policy_from_the_declared_sm_count)
{
    fake.gpus[0].sm_count = 1;
    open_device(ATTN_DEVICE_ORDINAL, "auto", 0);
    const struct attn_decode_params params = right_params();
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->args.splits, 11);
}

// A lane of each query head where a launch of one piece a sequence is not packed, else of each
// group. The packable shape is 6 to 1 at 256.
Test(launch, packs_as_the_setting_says)
{
    static const struct {
        const char *policy, *packing;
        int32_t head_dim, num_q_heads;
        int32_t group_rows, lanes;
    } cases[] = {
        { "1", "on", 256, 24, 8, 4 },      { "1", "off", 256, 24, 1, 24 },
        { "1", "on", 256, 20, 1, 20 },     { "1", "on", 128, 24, 1, 24 },
        { "legacy", "on", 256, 24, 8, 4 }, { "legacy", "off", 256, 24, 1, 24 },
        { "chunk", "off", 256, 24, 8, 4 }, { "chunk", "on", 256, 20, 8, 4 },
        { "auto", "off", 256, 24, 8, 4 },  { "3", "on", 256, 20, 8, 4 },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("METRALE_ATTN_DECODE_GQA_PACK", cases[i].packing, 1);
        open_device(ATTN_DEVICE_ORDINAL, cases[i].policy, 0);
        struct attn_decode_params params = right_params();
        params.head_dim = cases[i].head_dim;
        params.num_q_heads = cases[i].num_q_heads;
        params.max_decode_seqs = 7;
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        const struct attn_decode_args *const args = &last_launch()->args;
        cr_expect_eq(args->group_rows, cases[i].group_rows, "case %zu", i);
        cr_expect_eq(args->lanes, cases[i].lanes, "case %zu", i);
        cr_expect_eq(args->row_groups, cases[i].lanes / 4, "case %zu", i);
        cr_expect_eq(args->ratio, cases[i].num_q_heads / 4, "case %zu", i);
    }
}

static size_t workspace_of(const struct attn_decode_params *const params)
{
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    size_t bytes;
    cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK, "%s", attn_last_error());
    return bytes;
}

static int32_t counters_of(const struct attn_decode_params *const params)
{
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    int32_t count;
    cr_assert_eq(attn_decode_counters(device, &shape, &count), ATTN_OK, "%s", attn_last_error());
    return count;
}

Test(launch, needs_exactly_its_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    const struct attn_decode_shape shape = attn_decode_shape_of(&params);
    size_t bytes;
    cr_assert_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
    int32_t count;
    cr_assert_eq(attn_decode_counters(device, &shape, &count), ATTN_OK);
    params.workspace_bytes = bytes;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_roots(3, 25);
    cr_expect_eq(bytes, round_up(used_bytes(16, 64)));
    cr_expect_eq(count, used_counters());
    // Where a leaf is the piece nothing meets, and next to nothing waits.
    params.max_pages_per_seq = TILE / 16;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    const struct attn_decode_args *const args = &last_launch()->args;
    cr_expect(args->num_roots == 0 && args->root_levels == 0);
    cr_expect(args->stack_slots >= 1 && args->stack_slots <= 5, "%d", args->stack_slots);
    cr_expect_eq(workspace_of(&params),
                 round_up(slot_bytes(GRID_64 * (int64_t) args->stack_slots, 16, 64)));
    cr_expect_eq(counters_of(&params), 2);
    params.max_pages_per_seq = shape.max_pages_per_seq;
    params.workspace_bytes = bytes - 1;
    expect_refused(&params, ATTN_ERROR_INVALID, "workspace_bytes is");
    params.workspace_bytes = bytes;
    params.workspace = (char *) AT(9) + 128;
    expect_refused(&params, ATTN_ERROR_INVALID, "aligned to 256 bytes");
    params.workspace = NULL;
    expect_refused(&params, ATTN_ERROR_INVALID, "workspace is NULL");
    params.workspace = (void *) (UINTPTR_MAX - 255);
    expect_refused(&params, ATTN_ERROR_INVALID, "bytes from there on");
    params.workspace = (char *) AT(2) - 256;
    expect_refused(&params, ATTN_ERROR_INVALID, "overlaps");
    params.workspace = AT(9);
    params.counters = (void *) ((char *) AT(2) + 8);
    expect_refused(&params, ATTN_ERROR_INVALID, "overlaps");
    params.counters = NULL;
    expect_refused(&params, ATTN_ERROR_INVALID, "counters is NULL");
}

// What pieces give lies before the slots: under auto and pinned a slot for each sequence, query
// head and piece, under legacy one for each declared SM.
Test(launch, needs_room_for_pieces)
{
    static const struct {
        const char *policy;
        int32_t splits, piece_leaves;
        size_t slots;
    } cases[] = {
        // 1600 keys in pieces of 256 or, by two, of 800.
        { "auto", 11, 4, 3 * 24 * 11 },
        { "2", 2, 13, 3 * 24 * 2 },
        { "legacy", 5, 5, 132 },
    };
    struct attn_decode_params params = right_params();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const bool legacy = strcmp(cases[i].policy, "legacy") == 0;
        params.batch = legacy ? 1 : 3;
        params.max_decode_seqs = params.batch;
        open_device(ATTN_DEVICE_ORDINAL, cases[i].policy, 0);
        const size_t pieces = round_up(cases[i].slots * (64 + 2) * 4);
        params.workspace_bytes = workspace_of(&params);
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        const struct attn_decode_args *const args = &last_launch()->args;
        cr_expect_eq(args->splits, cases[i].splits);
        expect_roots(params.batch * cases[i].splits, cases[i].piece_leaves);
        cr_expect_eq(params.workspace_bytes, pieces + round_up(used_bytes(16, 64)), "%s",
                     cases[i].policy);
        // Of roots, then of each sequence and lane.
        cr_expect_eq(counters_of(&params),
                     2 + args->root_levels * args->num_roots + params.batch * 4);
        cr_expect_eq((const void *) args->pieces, AT(9));
        cr_expect_eq((const char *) args->slots, (const char *) AT(9) + pieces);
        params.workspace_bytes--;
        expect_refused(&params, ATTN_ERROR_INVALID, "workspace_bytes is");
    }
    // Pieces of one leaf: counters of sequences alone, and of those only with pieces.
    params.page_size = 1;
    params.max_pages_per_seq = TILE;
    params.batch = params.max_decode_seqs = 3;
    open_device(ATTN_DEVICE_ORDINAL, "3", 0);
    cr_expect_eq(counters_of(&params), 2 + 3 * 4);
    open_device(ATTN_DEVICE_ORDINAL, "1", 0);
    cr_expect_eq(counters_of(&params), 2);
}

// A window makes pieces shorter, down to the least.
Test(launch, cuts_the_window_into_pieces)
{
    open_device(ATTN_DEVICE_ORDINAL, "4", 0);
    struct attn_decode_params params = right_params();
    params.batch = 1;
    params.max_pages_per_seq = 1 << 20;
    params.window = 8192;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    // Leaves of pieces of 2048 keys; of the least, 256; of one that has all 100.
    expect_roots(4, 32);
    params.window = 300;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_roots(4, 4);
    params.window = 100;
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    expect_roots(4, 2);
}

// As many blocks as run at a time, whatever the lanes, and room for the roots of the smallest units
// of which there are not too many.
Test(launch, deals_units_for_the_blocks)
{
    static const int32_t cases[] = { 1, 4, 7, 40, 45, 50, 67, 90, 99, 132, 133, 500 };
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.head_dim = 256;
    params.max_pages_per_seq = 10000;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const int32_t lanes = cases[i];
        params.num_q_heads = params.num_kv_heads = lanes;
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(last_launch()->grid[0], GRID_256, "%d lanes", lanes);
        // 2500 leaves a sequence.
        expect_roots(3, 2500);
    }
}

// In leaves: what the busiest block has, 16 for each of its units, a part of a unit at the end.
static double cost_of(const uint64_t items, const int32_t blocks, const bool are_even,
                      const int32_t shift)
{
    const double units = floor(ldexp((double) items, -shift)), leaves = ldexp(1, shift);
    const double busiest = units > 0 ? ceil(units / blocks) : 1;
    return busiest * (leaves + 16) + leaves * (are_even ? 0.25 : 2);
}

static void expect_lowest_cost(const uint64_t items, const int32_t blocks, const bool are_even)
{
    const uint64_t most = (uint64_t) blocks * ATTN_DECODE_BLOCK_UNITS;
    const int32_t shift = attn_decode_unit_shift(items, blocks, (int32_t) most, are_even);
    cr_assert(items >> shift <= most, "%llu items, %d blocks: units of 2^%d",
              (unsigned long long) items, blocks, shift);
    const double cost = cost_of(items, blocks, are_even, shift);
    for (int32_t other = 0; other < 32; other++)
        cr_assert(items >> other > most ||
                      cost_of(items, blocks, are_even, other) > cost - 1e-5 * cost,
                  "%llu items, %d blocks, even %d: units of 2^%d, not 2^%d",
                  (unsigned long long) items, blocks, are_even, shift, other);
}

Test(launch, chooses_units_of_the_lowest_cost)
{
    static const int32_t grids[] = { 1, 2, 5, 48, 132, 264, 701, ATTN_DECODE_MAX_GRID };
    for (size_t i = 0; i < sizeof(grids) / sizeof(grids[0]); i++)
        for (uint64_t items = 0; items < (uint64_t) 1 << 35; items += items / 37 + 1) {
            expect_lowest_cost(items, grids[i], false);
            expect_lowest_cost(items, grids[i], true);
        }
}

static struct attn_decode_even even_of(const uint32_t pieces, const uint32_t lanes,
                                       const uint32_t leaves, const uint32_t blocks)
{
    struct attn_decode_even e = {
        .pieces = pieces,
        .lanes = lanes,
        .leaves = leaves,
        .blocks = blocks,
        .num_roots = blocks * ATTN_DECODE_BLOCK_UNITS,
    };
    attn_magic((int32_t) blocks, &e.grid_magic, &e.grid_shift);
    return e;
}

static int32_t shift_of(const struct attn_decode_even *const e)
{
    const uint64_t items = (uint64_t) e->pieces * e->lanes * e->leaves;
    const int32_t blocks = (int32_t) e->blocks;
    return attn_decode_unit_shift(items, blocks, blocks * ATTN_DECODE_BLOCK_UNITS, 1);
}

// When the last of the blocks is done, in the time of a leaf: units are taken in order, by whoever is
// free first, and each costs one more.
static uint32_t follow_blocks(const struct attn_decode_even *const e, const int32_t shift,
                              const struct attn_decode_late late)
{
    static uint32_t done[ATTN_DECODE_MAX_GRID];
    memset(done, 0, sizeof(done));
    uint32_t last = 0;
    for (uint32_t piece = 0; piece < e->pieces; piece++) {
        const uint32_t most = 1u << (piece < e->pieces - late.pieces ? shift : late.shift);
        for (uint32_t leaf = 0; leaf < e->leaves; leaf += most)
            for (uint32_t lane = 0; lane < e->lanes; lane++) {
                uint32_t *first = &done[0];
                for (uint32_t i = 1; i < e->blocks; i++)
                    if (done[i] < *first) first = &done[i];
                const uint32_t left = e->leaves - leaf;
                *first += (left < most ? left : most) + 1;
                if (*first > last) last = *first;
            }
    }
    return last;
}

static const struct attn_decode_late none_late = { 0, 0, 0 };

// No block is busier than the cost says, and with late pieces the busiest one is done earlier; where
// units at the ends of pieces are short the cost without late pieces is less than is thought.
Test(launch, cuts_late_pieces_if_that_ends_earlier)
{
    struct random random = { random_seed(29) };
    int num_late = 0, num_whole = 0, num_worse = 0;
    double all = 0, all_without = 0;
    for (int i = 0; i < 3000; i++) {
        const struct attn_decode_even e =
            even_of(1 + random_below(&random, 60), 1 + random_below(&random, 12),
                    1 + random_below(&random, 100), 1 + random_below(&random, 140));
        struct attn_decode_late late;
        const int32_t shift = shift_of(&e), others = attn_decode_late_cut(e, shift, 0, &late);
        if (late.pieces == 0) continue;
        cr_assert(late.pieces < e.pieces && late.shift < others);
        const uint32_t busiest = follow_blocks(&e, others, late);
        const uint32_t without = follow_blocks(&e, shift, none_late);
        cr_expect_lt(busiest, late.cost,
                     "%u pieces of %u leaves, %u lanes, %u blocks: 2^%d, %u in 2^%d", e.pieces,
                     e.leaves, e.lanes, e.blocks, others, late.pieces, late.shift);
        num_late++;
        num_whole += 1u << others >= e.leaves;
        num_worse += busiest > without;
        all += busiest, all_without += without;
    }
    cr_expect(num_whole > 100 && num_late - num_whole > 100, "%d, %d", num_whole, num_late);
    cr_expect(num_worse * 20 < num_late, "%d of %d", num_worse, num_late);
    cr_expect_lt(all, 0.9 * all_without);
}

// Where they are not looked for none would cost less.
Test(launch, looks_for_late_pieces_where_they_cost_less)
{
    struct random random = { random_seed(30) };
    int num_late = 0, num_not_looked_for = 0;
    for (int i = 0; i < 20000; i++) {
        const struct attn_decode_even e =
            even_of(1 + random_below(&random, 100), 1 + random_below(&random, 12),
                    1 + random_below(&random, 200), 1 + random_below(&random, 140));
        const int32_t shift = shift_of(&e);
        const uint32_t rounds = attn_decode_even_rounds(e, e.pieces * e.lanes, shift);
        const uint32_t cost = attn_decode_even_cost(e, rounds, shift);
        bool is_late = false;
        for (int32_t other = 0; other < 32; other++)
            if (attn_decode_find_late(e, other).cost < cost) is_late = true;
        const bool may_be = attn_decode_may_be_late(e, cost);
        cr_expect(may_be || !is_late, "%u pieces of %u leaves, %u lanes, %u blocks: 2^%d", e.pieces,
                  e.leaves, e.lanes, e.blocks, shift);
        num_late += is_late;
        num_not_looked_for += !may_be;
    }
    cr_expect(num_late > 1000 && num_not_looked_for > 1000, "%d, %d", num_late, num_not_looked_for);
}

// 32 query heads on 8 KV heads, 4096 keys, 132 blocks: time grows with the batch, and does not jump.
Test(launch, does_not_jump_with_the_batch)
{
    double last = 0;
    for (uint32_t batch = 1; batch <= 66; batch++) {
        const struct attn_decode_even e = even_of(batch, 8, 32, 132);
        const bool enough = batch * e.lanes * e.leaves >= e.blocks * ATTN_DECODE_LATE_LEAVES;
        struct attn_decode_late late = none_late;
        int32_t shift = shift_of(&e);
        if (enough) shift = attn_decode_late_cut(e, shift, 0, &late);
        // What a call takes besides.
        const double now = 4.0 + follow_blocks(&e, shift, late), work = batch / (batch - 1.0);
        if (batch > 1)
            cr_expect(now < 1.3 * work * last && now > last / 1.3, "batch %u: %g after %g", batch,
                      now, last);
        last = now;
    }
}

// A batch that is served: its workspace is what a caller sets aside for good.
Test(launch, needs_little_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.batch = 64;
    params.head_dim = 256;
    params.max_pages_per_seq = 131072 / 16;
    const size_t bytes = workspace_of(&params);
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(bytes, round_up(used_bytes(8, 256)));
    cr_expect_lt(bytes, 64 << 20);
    expect_roots(64, 2048);
    // Of 2048 leaves one of each level waits, of the lowest in shared memory.
    cr_expect_eq(last_launch()->args.stack_slots, 11 - LEVELS_256 + 2);
}

// A smaller call never needs more than the shape it was sized by.
Test(launch, sizes_grow_with_the_shape)
{
    static const char *const policies[] = { "chunk", "1", "3", "auto", "legacy" };
    for (size_t p = 0; p < sizeof(policies) / sizeof(policies[0]); p++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        struct attn_decode_params params = right_params();
        params.max_decode_seqs = 600;
        size_t last = 0;
        int32_t last_count = 0;
        for (int32_t batch = 0; batch < 600; batch += 7) {
            params.batch = batch;
            const size_t bytes = workspace_of(&params);
            const int32_t count = counters_of(&params);
            cr_expect(bytes >= last && bytes % 256 == 0 && count >= last_count, "%s: batch %d",
                      policies[p], batch);
            last = bytes;
            last_count = count;
        }
        for (int32_t pages = 100; pages > 0 && pages < INT32_MAX / 2; pages *= 2) {
            params.max_pages_per_seq = pages;
            const size_t bytes = workspace_of(&params);
            const int32_t count = counters_of(&params);
            cr_expect(bytes >= last && count >= last_count, "%s: %d pages", policies[p], pages);
            last = bytes;
            last_count = count;
        }
    }
}

// What a call needs by itself.
static struct attn_decode_plan plan_of(const struct attn_decode_params *const params)
{
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    cr_assert_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
    return plan;
}

// Nor one with fewer query tokens, which another kernel may take.
Test(launch, sizes_cover_fewer_query_tokens)
{
    static const char *const policies[] = { "chunk", "1", "3", "auto", "legacy" };
    static const int32_t heads[][2] = { { 32, 4 }, { 8, 1 }, { 6, 2 }, { 64, 64 } };
    int others = 0;
    for (size_t p = 0; p < sizeof(policies) / sizeof(policies[0]); p++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++) {
            struct attn_decode_params params = right_params();
            params.num_q_heads = heads[h][0];
            params.num_kv_heads = heads[h][1];
            params.head_dim = 128;
            params.batch = params.max_decode_seqs = 64;
            params.max_pages_per_seq = 512;
            struct attn_decode_plan most = { .size = 0 };
            for (params.q_len = 1; params.q_len <= 40; params.q_len++) {
                const struct attn_decode_plan plan = plan_of(&params);
                if (plan.workspace_bytes > most.workspace_bytes)
                    most.workspace_bytes = plan.workspace_bytes;
                if (plan.num_counters > most.num_counters) most.num_counters = plan.num_counters;
                others += plan.num_counters < most.num_counters;
                cr_expect_eq(workspace_of(&params), most.workspace_bytes, "%s, %d tokens",
                             policies[p], params.q_len);
                cr_expect_eq(counters_of(&params), most.num_counters, "%s, %d tokens", policies[p],
                             params.q_len);
            }
        }
    }
    cr_expect_gt(others, 0);
}

// Nor one without a table of skip-softmax, which has pieces.
Test(launch, sizes_cover_calls_without_a_skip_table)
{
    static const char *const policies[] = { "chunk", "3", "auto", "legacy" };
    for (size_t p = 0; p < sizeof(policies) / sizeof(policies[0]); p++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        struct attn_decode_params params = right_params();
        params.q_dtype = ATTN_DTYPE_FP16;
        params.kv_dtype = ATTN_DTYPE_E4M3;
        params.head_dim = 64;
        params.num_q_heads = 8;
        params.num_kv_heads = 2;
        params.batch = params.max_decode_seqs = 4;
        params.max_pages_per_seq = 512;
        const struct attn_decode_plan without = plan_of(&params);
        params.skip_table = AT(5);
        const struct attn_decode_plan with = plan_of(&params);
        const size_t bytes = workspace_of(&params);
        const int32_t count = counters_of(&params);
        cr_expect(bytes >= without.workspace_bytes && bytes >= with.workspace_bytes, "%s",
                  policies[p]);
        cr_expect(count >= without.num_counters && count >= with.num_counters, "%s", policies[p]);
    }
}

// More heads, times groups of rows, than an int32 holds.
Test(launch, refuses_more_work_than_there_are_numbers)
{
    static const int32_t heads[] = { 1 << 27, 1 << 28, INT32_MAX };
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_decode_params params = right_params();
    params.head_dim = 512;
    params.batch = 1;
    params.q_len = 128;
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        params.num_q_heads = params.num_kv_heads = heads[i];
        const struct attn_decode_shape shape = attn_decode_shape_of(&params);
        size_t bytes = 1;
        int32_t count = 1;
        cr_expect_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_ERROR_UNSUPPORTED);
        cr_expect(bytes == 0 && strstr(attn_last_error(), "pieces of work"), "%s",
                  attn_last_error());
        cr_expect_eq(attn_decode_counters(device, &shape, &count), ATTN_ERROR_UNSUPPORTED);
        cr_expect_eq(count, 0);
    }
}

// Nor does one with a window, or a smaller one.
Test(launch, sizes_cover_windows)
{
    static const char *const policies[] = { "chunk", "1", "3", "auto" };
    static const int32_t windows[] = { 0, 1 << 20, 5000, 1600, 1000, 300, 77, 1 };
    for (size_t p = 0; p < sizeof(policies) / sizeof(policies[0]); p++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        struct attn_decode_params params = right_params();
        size_t bytes = SIZE_MAX;
        int32_t count = INT32_MAX;
        for (size_t i = 0; i < sizeof(windows) / sizeof(windows[0]); i++) {
            params.window = windows[i];
            const size_t now = workspace_of(&params);
            const int32_t now_count = counters_of(&params);
            cr_expect(now <= bytes && now_count <= count,
                      "%s, window %d: %zu bytes, %d counters, but %zu and %d for a larger one",
                      policies[p], windows[i], now, now_count, bytes, count);
            bytes = now;
            count = now_count;
        }
    }
}

Test(launch, caps_the_grid)
{
    fake.gpus[0].sm_count = ATTN_DECODE_MAX_GRID / 2 + 1;
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
    // 2^20 x 2^25 leaves, counted in as few units as stay below 2^30, rounded up for each sequence.
    const int64_t units = ((int64_t) 1 << 25 >> last_launch()->args.min_shift) + 1;
    cr_expect_lt(units << 20, (int64_t) 1 << 30);
    cr_expect_geq(units << 22, (int64_t) 1 << 30);

    // The limit of a test changes the grid and the units, not the workspace.
    params = right_params();
    cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    const int32_t num_roots = last_launch()->args.num_roots;
    const struct attn_decode_shape shape = attn_decode_shape_of(&params);
    size_t unlimited, limited;
    cr_assert_eq(attn_decode_workspace(device, &shape, &unlimited), ATTN_OK);
    open_device(ATTN_DEVICE_ORDINAL, NULL, 5);
    cr_assert_eq(attn_decode_workspace(device, &shape, &limited), ATTN_OK);
    cr_expect_eq(limited, unlimited);
    cr_expect_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(last_launch()->grid[0], 5);
    cr_expect(last_launch()->args.num_roots > 0 && last_launch()->args.num_roots < num_roots);
}

static void expect_within(const struct attn_decode_params *const params, const int32_t rows,
                          const int32_t counters)
{
    const struct attn_decode_args *const args = &last_launch()->args;
    const size_t before = (size_t) ((const char *) args->slots - (const char *) params->workspace);
    const size_t used = before + used_bytes(rows, params->head_dim);
    cr_assert(used <= params->workspace_bytes && used_counters() <= counters,
              "%d x %d/%d heads of %d, %d pages, grid %u: %zu bytes of %zu, %lld counters of %d",
              params->batch, params->num_q_heads, params->num_kv_heads, params->head_dim,
              params->max_pages_per_seq, last_launch()->grid[0], used, params->workspace_bytes,
              (long long) used_counters(), counters);
}

enum {
    NUM_SIZES = 2 * 15 * 6
};

static struct attn_decode_params sized_params(const size_t i)
{
    static const int32_t kv_heads[] = { 1, 2, 3, 4, 5, 7, 8, 11, 20, 32, 45, 60, 90, 128, 600 };
    static const int32_t batches[] = { 1, 2, 3, 17, 64, 1000 };
    struct attn_decode_params params = right_params();
    params.head_dim = i % 2 ? 64 : 256;
    params.num_kv_heads = kv_heads[i / 2 % 15];
    params.num_q_heads = params.num_kv_heads * (i % 3 ? 1 : 6);
    params.batch = batches[i / 30];
    params.max_pages_per_seq = 1 << (i * 7 % 15);
    return params;
}

// On however few blocks, a call needs no more than on the whole chip.
Test(launch, keeps_a_limited_grid_within_the_workspace)
{
    static const int32_t limits[] = { 1, 2, 5, 16, 48, 78, 119, 131 };
    static const char *const policies[] = { "chunk", "1", "auto" };
    for (size_t p = 0; p < 3; p++) {
        size_t whole[NUM_SIZES];
        int32_t counters[NUM_SIZES];
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        for (size_t i = 0; i < NUM_SIZES; i++) {
            const struct attn_decode_params params = sized_params(i);
            whole[i] = workspace_of(&params);
            counters[i] = counters_of(&params);
        }
        for (size_t l = 0; l < sizeof(limits) / sizeof(limits[0]); l++) {
            open_device(ATTN_DEVICE_ORDINAL, policies[p], limits[l]);
            for (size_t i = 0; i < NUM_SIZES; i++) {
                struct attn_decode_params params = sized_params(i);
                params.workspace_bytes = whole[i];
                cr_assert_eq(workspace_of(&params), whole[i]);
                cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s",
                             attn_last_error());
                cr_assert_leq(last_launch()->grid[0], (unsigned) limits[l]);
                expect_within(&params, params.head_dim == 64 ? 16 : 8, counters[i]);
            }
        }
    }
}

// A few blocks less make units twice as long, which may be what needs one slot more in each.
Test(launch, keeps_a_grid_that_is_almost_whole_within_the_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, GRID_256 - 1);
    for (int32_t pages = 1; pages < 60000; pages += pages / 200 + 1) {
        struct attn_decode_params params = right_params();
        params.head_dim = 256;
        params.num_q_heads = params.num_kv_heads = 1;
        params.max_pages_per_seq = pages;
        params.workspace_bytes = workspace_of(&params);
        cr_assert_eq(attn_decode(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
        cr_assert(last_launch()->grid[0] > 0 && last_launch()->grid[0] < GRID_256);
        expect_within(&params, 8, counters_of(&params));
    }
}

// Numbers of work are int32 in the kernel.
Test(launch, refuses_more_than_it_can_count)
{
    static const struct {
        const char *policy, *sentence;
        int32_t heads, batch;
    } cases[] = {
        { "chunk", "more than 536870912 pieces of work", 4, 1 << 27 },
        { "1", "more than 536870912 pieces of work", 1 << 10, 1 << 19 },
        { "2", "more than 536870912 pieces of work", 4, 1 << 26 },
        { "2", "with 2 pieces a sequence that is more than 536870912", 1, 1 << 28 },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        open_device(ATTN_DEVICE_ORDINAL, cases[i].policy, 0);
        struct attn_decode_params params = right_params();
        params.num_q_heads = params.num_kv_heads = cases[i].heads;
        params.batch = cases[i].batch;
        cr_expect_geq(counters_of(&params), 2);
        params.batch++;
        const struct attn_decode_shape shape = attn_decode_shape_of(&params);
        size_t bytes;
        cr_expect_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_ERROR_UNSUPPORTED);
        cr_expect(strstr(attn_last_error(), cases[i].sentence), "%s", attn_last_error());
    }
}

// Roots and their counters are int32, too.
Test(launch, counts_roots_of_many_lanes)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (int32_t log = 20; log <= 28; log++)
        for (int32_t window = 0; window < 2; window++) {
            struct attn_decode_params params = right_params();
            params.num_q_heads = params.num_kv_heads = 1 << log;
            params.batch = 1;
            params.num_pages = 1;
            params.max_pages_per_seq = INT32_MAX / 16;
            params.window = window;
            params.q = AT(1 << 8);
            params.o = AT(1 << 9);
            const enum attn_status status = attn_decode(device, &params, STREAM);
            cr_expect(status == ATTN_OK || (log > 25 && status == ATTN_ERROR_UNSUPPORTED), "%d: %s",
                      log, attn_last_error());
            if (status != ATTN_OK) continue;
            cr_expect_geq(last_launch()->args.num_roots, 0);
            cr_expect_eq(used_counters(), counters_of(&params));
        }
}

// ---- K and V as tensors that the copy engine takes boxes of

struct box_case {
    enum attn_dtype kv;
    int32_t head_dim;
    // Of a row: lines, and columns of each.
    uint32_t lines, columns;
    int type, swizzle;
};

// Strides in elements.
struct box_strides {
    int64_t page, token, head;
};

static void expect_map(const struct fake_map *const map, const void *const pool,
                       const struct attn_decode_params *const params,
                       const struct box_case *const c, const struct box_strides *const s)
{
    const uint64_t size = attn_dtype_size(c->kv);
    const uint64_t dims[FAKE_MAP_RANK] = { c->columns, (uint64_t) params->page_size, c->lines,
                                           (uint64_t) params->num_kv_heads,
                                           (uint64_t) params->num_pages };
    const uint64_t strides[FAKE_MAP_RANK - 1] = { (uint64_t) s->token * size, c->columns * size,
                                                  (uint64_t) s->head * size,
                                                  (uint64_t) s->page * size };
    const uint32_t box[FAKE_MAP_RANK] = { c->columns, ATTN_BOX_KEYS, c->lines, 1, 1 };
    cr_expect(map->address == pool && map->type == c->type && map->swizzle == c->swizzle,
              "%s, head_dim %d: address %p, type %d, swizzle %d", attn_dtype_name(c->kv),
              c->head_dim, map->address, map->type, map->swizzle);
    for (int i = 0; i < FAKE_MAP_RANK; i++) {
        cr_expect(map->dims[i] == dims[i] && map->box[i] == box[i],
                  "%s, head_dim %d: dimension %d is %llu, its box %u", attn_dtype_name(c->kv),
                  c->head_dim, i, (unsigned long long) map->dims[i], map->box[i]);
        if (i + 1 < FAKE_MAP_RANK)
            cr_expect_eq(map->strides[i], strides[i], "%s, head_dim %d: stride %d is %llu",
                         attn_dtype_name(c->kv), c->head_dim, i,
                         (unsigned long long) map->strides[i]);
    }
}

// A row whose warps share rows.
static const struct attn_pack_row shared_rows = { .tile = TILE };

// K with tokens outside heads, V with heads outside tokens and gaps between pages; then the other
// way round.
static void expect_boxes(const struct box_case *const c)
{
    struct attn_decode_params params = right_params();
    params.kv_dtype = c->kv;
    params.head_dim = c->head_dim;
    params.page_size = 48;
    const int64_t row = c->head_dim;
    const struct box_strides nhd = { 48 * 4 * row, 4 * row, row };
    const struct box_strides hnd = { 49 * 4 * row, row, 48 * row };
    for (int swapped = 0; swapped < 2; swapped++) {
        const struct box_strides *const k = swapped ? &hnd : &nhd, *const v = swapped ? &nhd : &hnd;
        struct attn_decode_args args = { .splits = 1 };
        params.k_page_stride = k->page;
        params.k_token_stride = k->token;
        params.k_head_stride = k->head;
        params.v_page_stride = v->page;
        params.v_token_stride = v->token;
        params.v_head_stride = v->head;
        fake.num_maps = 0;
        attn_decode_set_boxes(device, &params, &shared_rows, &args);
        cr_assert(args.has_boxes && fake.num_maps == 2, "%s, head_dim %d: %d maps",
                  attn_dtype_name(c->kv), c->head_dim, fake.num_maps);
        expect_map(&fake.maps[0], params.k_pool, &params, c, k);
        expect_map(&fake.maps[1], params.v_pool, &params, c, v);
    }
}

// Of every type and width, with or without a row of the fake pack.
Test(launch, describes_boxes)
{
    enum {
        BYTES = ATTN_CU_TENSOR_UINT8,
        HALVES = ATTN_CU_TENSOR_UINT16
    };
    static const struct box_case cases[] = {
        { ATTN_DTYPE_FP16, 32, 1, 32, HALVES, ATTN_CU_SWIZZLE_64B },
        { ATTN_DTYPE_BF16, 64, 1, 64, HALVES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_BF16, 128, 2, 64, HALVES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_BF16, 256, 4, 64, HALVES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_BF16, 512, 8, 64, HALVES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_E4M3, 32, 1, 32, BYTES, ATTN_CU_SWIZZLE_32B },
        { ATTN_DTYPE_E4M3, 64, 1, 64, BYTES, ATTN_CU_SWIZZLE_64B },
        { ATTN_DTYPE_E4M3, 128, 1, 128, BYTES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_E4M3, 256, 2, 128, BYTES, ATTN_CU_SWIZZLE_128B },
        { ATTN_DTYPE_E4M3, 512, 4, 128, BYTES, ATTN_CU_SWIZZLE_128B },
    };
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) expect_boxes(&cases[i]);
}

// Warpgroups take as many keys at a time as lie in one page whatever the sequence, up to a tile.
Test(launch, takes_large_boxes_for_warpgroups)
{
    static const struct {
        int32_t page_size, keys;
    } cases[] = { { 16, 16 },   { 32, 32 },  { 48, 16 },   { 64, 64 },  { 96, 32 },
                  { 128, 128 }, { 192, 64 }, { 256, 128 }, { 320, 64 }, { 1024, 128 } };
    static const struct attn_pack_row row = { .tile = 128, .warpgroups = 2 };
    struct attn_decode_params params = right_params();
    params.head_dim = 128;
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attn_decode_args args = { .splits = 1 };
        params.page_size = cases[i].page_size;
        params.k_token_stride = params.v_token_stride = 4 * 128;
        params.k_head_stride = params.v_head_stride = 128;
        params.k_page_stride = params.v_page_stride = params.page_size * params.k_token_stride;
        fake.num_maps = 0;
        attn_decode_set_boxes(device, &params, &row, &args);
        cr_assert(args.has_boxes && fake.num_maps == 2);
        cr_expect_eq(args.box_groups, cases[i].keys / ATTN_BOX_KEYS, "pages of %d",
                     params.page_size);
        for (int j = 0; j < 2; j++)
            cr_expect_eq(fake.maps[j].box[1], (uint32_t) cases[i].keys, "pages of %d: %u",
                         params.page_size, fake.maps[j].box[1]);
    }
}

// The launch happens either way.
static void expect_launch(const struct attn_decode_params *const params, const bool has_boxes,
                          const char *const what)
{
    const int launches = fake.num_launches;
    cr_assert_eq(attn_decode(device, params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.num_launches, launches + 1);
    cr_expect_eq(last_launch()->args.has_boxes, has_boxes, "%s, pages of %d", what,
                 params->page_size);
}

// Of a call the strides left 0 are the dense ones by then.
Test(launch, takes_boxes_where_groups_lie_in_one_page)
{
    static const struct box_case c = { ATTN_DTYPE_BF16,     64, 1, 64, ATTN_CU_TENSOR_UINT16,
                                       ATTN_CU_SWIZZLE_128B };
    static const int32_t cut[] = { 1, 8, 15, 17, 24, 40, 100 }, whole[] = { 16, 32, 48, 1024 };
    struct attn_decode_params params = right_params();
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (size_t i = 0; i < sizeof(cut) / sizeof(cut[0]); i++) {
        params.page_size = cut[i];
        expect_launch(&params, false, "chunk");
    }
    cr_expect_eq(fake.num_maps, 0);
    for (size_t i = 0; i < sizeof(whole) / sizeof(whole[0]); i++) {
        params.page_size = whole[i];
        const struct box_strides dense = { params.page_size * 4 * 64, 4 * 64, 64 };
        fake.num_maps = 0;
        expect_launch(&params, true, "chunk");
        cr_assert_eq(fake.num_maps, 2);
        expect_map(&fake.maps[0], AT(3), &params, &c, &dense);
        expect_map(&fake.maps[1], AT(4), &params, &c, &dense);
    }
}

// Pieces of a split count begin anywhere.
Test(launch, takes_no_boxes_of_pieces)
{
    static const char *const split[] = { "2", "16", "auto" }, *const unsplit[] = { "1", "legacy" };
    struct attn_decode_params params = right_params();
    params.max_decode_seqs = 6;
    for (size_t i = 0; i < sizeof(split) / sizeof(split[0]); i++) {
        open_device(ATTN_DEVICE_ORDINAL, split[i], 0);
        expect_launch(&params, false, split[i]);
        cr_expect_gt(last_launch()->args.splits, 1);
    }
    for (size_t i = 0; i < sizeof(unsplit) / sizeof(unsplit[0]); i++) {
        open_device(ATTN_DEVICE_ORDINAL, unsplit[i], 0);
        expect_launch(&params, true, unsplit[i]);
    }
}

Test(launch, does_without_boxes_that_the_driver_refuses)
{
    struct attn_decode_params params = right_params();
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    fake.fail_symbol = "cuTensorMapEncodeTiled";
    fake.fail_code = ATTN_CU_ERROR_INVALID_VALUE;
    fake.fail_at = 1;
    expect_launch(&params, false, "K refused");
    // Not asked about V after that: the next call is the second.
    fake.fail_at = 3;
    expect_launch(&params, false, "V refused");
    cr_expect(fake.num_failed == 2 && fake.num_maps == 1);
    fake.fail_symbol = NULL;
    expect_launch(&params, true, "nothing refused");
    // The copy engine's strides have 40 bits.
    params.num_pages = 2;
    params.k_page_stride = (int64_t) 1 << 39;
    params.k_token_stride = 4 * 64;
    params.k_head_stride = 64;
    expect_launch(&params, false, "pages 2^40 bytes apart");
    params.k_page_stride -= 8;
    expect_launch(&params, true, "pages nearly 2^40 bytes apart");
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
    static const char *const calls[] = { "cuLaunchKernelEx", "cuCtxGetCurrent",
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

// ---- the CTM runner

static struct attn_ctm_params ctm_params(const int32_t batch, const int32_t q_len,
                                         const int32_t max_pages)
{
    struct attn_ctm_params params = ATTN_CTM_PARAMS_INIT;
    params.batch_size = batch;
    params.q_len = q_len;
    params.num_q_heads = 32;
    params.num_kv_heads = 8;
    params.head_dim = 64;
    params.fp8_kv = 1;
    params.num_pages = 1000;
    params.max_pages_per_seq = max_pages;
    params.q = AT(1);
    params.output = AT(2);
    params.kv_pool = AT(3);
    params.page_table = AT(4);
    params.seq_lens = AT(5);
    params.tree_mask = AT(6);
    params.mask_words = (q_len - 1) / 32 + 1;
    params.workspace = AT(7);
    params.semaphores = AT(8);
    params.stream = STREAM;
    return params;
}

// What the last launch uses is within what its sizes say, and chunk whatever the device's policy.
static void expect_within_sizes(const struct attn_ctm_params *const params)
{
    const struct attn_decode_args *const args = &last_launch()->args;
    const bool tree = params->q_len > 1;
    const int32_t batch = params->batch_size, q_len = params->q_len;
    const int32_t heads = params->num_q_heads, kv_heads = params->num_kv_heads;
    const int64_t elems =
        tree ? attn_ctm_tree_workspace_elems(batch, q_len, heads, kv_heads, params->head_dim)
             : attn_ctm_workspace_elems(batch, heads, params->head_dim);
    const int64_t semaphores = tree ? attn_ctm_tree_semaphore_elems(batch, q_len, heads, kv_heads)
                                    : attn_ctm_semaphore_elems(batch, kv_heads);
    cr_expect(used_bytes(16, params->head_dim) <= (size_t) elems * 4,
              "batch %d, q_len %d, heads %d/%d, %d pages: %zu bytes of %lld", batch, q_len, heads,
              kv_heads, params->max_pages_per_seq, used_bytes(16, params->head_dim),
              (long long) elems * 4);
    cr_expect(used_counters() <= semaphores,
              "batch %d, q_len %d, heads %d/%d, %d pages: %lld counters of %lld", batch, q_len,
              heads, kv_heads, params->max_pages_per_seq, (long long) used_counters(),
              (long long) semaphores);
    cr_expect_eq(args->splits, 1);
    cr_expect_eq(args->q_len, q_len);
    cr_expect_eq(args->lanes, kv_heads * ((heads / kv_heads * q_len - 1) / 16 + 1));
    cr_expect_geq(args->most_units, (int32_t) last_launch()->grid[0]);
}

Test(launch, keeps_to_the_sizes_of_ctm)
{
    static const char *const policies[] = { "chunk", "7", "auto", "off" };
    static const int32_t batches[] = { 1, 3, 64, 1000, 65536 }, q_lens[] = { 1, 2, 8, 128 };
    static const int32_t heads[][2] = { { 1, 1 }, { 8, 8 }, { 32, 8 }, { 96, 6 }, { 128, 128 } };
    static const int32_t pages[] = { 1, 2, 60, 1000, 100000, 1 << 24 };
    for (size_t p = 0; p < 4; p++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[p], 0);
        for (size_t i = 0; i < 5 * 4 * 5 * 6; i++) {
            const int32_t batch = batches[i % 5], max_pages = pages[i / 100];
            // Tables of a terabyte lie too close.
            if ((int64_t) batch * max_pages > (int64_t) 1 << 36) continue;
            struct attn_ctm_params params = ctm_params(batch, q_lens[i / 5 % 4], max_pages);
            params.num_q_heads = heads[i / 20 % 5][0];
            params.num_kv_heads = heads[i / 20 % 5][1];
            cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
            expect_within_sizes(&params);
        }
    }
}

// Large calls of usual shapes have all blocks.
Test(launch, keeps_the_chip_busy_with_ctm)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    for (int32_t q_len = 1; q_len <= 128; q_len *= 2) {
        const struct attn_ctm_params params = ctm_params(64, q_len, 32);
        cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(last_launch()->grid[0], 132, "q_len %d: %u blocks", q_len,
                     last_launch()->grid[0]);
    }
}

// Late sequences can be cut for all blocks, within the scratch of ctm, too.
Test(launch, has_room_for_late_sequences_of_ctm)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    int num_late = 0;
    for (int32_t batch = 2; batch <= 66; batch++) {
        struct attn_ctm_params params = ctm_params(batch, 1, 32);
        params.num_q_heads = 32;
        params.num_kv_heads = 8;
        cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
        const struct attn_decode_args *const args = &last_launch()->args;
        cr_expect_eq(args->least_late_leaves, 132);
        cr_expect_eq(args->may_begin_within, 0);
        struct attn_decode_even e = even_of((uint32_t) batch, 8, 16, last_launch()->grid[0]);
        struct attn_decode_late late = attn_decode_find_late(e, 31);
        if (late.pieces == 0) continue;
        num_late++;
        e.num_roots = (uint32_t) args->num_roots;
        late = attn_decode_find_late(e, 31);
        cr_expect_gt(late.pieces, 0, "batch %d", batch);
    }
    cr_expect_gt(num_late, 40);
}

// The arguments of a call.
Test(launch, passes_what_ctm_is_given)
{
    open_device(ATTN_DEVICE_ORDINAL, NULL, 0);
    struct attn_ctm_params params = ctm_params(3, 33, 10);
    params.sliding_window = 77;
    params.k_scale = 3;
    cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
    const struct attn_decode_args *const args = &last_launch()->args;
    cr_expect_eq(args->block_table, AT(4));
    cr_expect_eq(args->v_table, (const int32_t *) AT(4) + 10);
    cr_expect_eq(args->table_stride, 20);
    cr_expect_eq(args->num_pages, 2000);
    cr_expect_eq(args->page_size, ATTN_CTM_PAGE_SIZE);
    cr_expect_eq(args->tree_mask, AT(6));
    cr_expect_eq(args->mask_words, 2);
    cr_expect_eq(args->window, 77);
    cr_expect_eq(args->window_is_shared, 1);
    cr_expect_float_eq(args->k_scale, 3, 0);
    params.contiguous_query_swa = 1;
    cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK);
    cr_expect_eq(last_launch()->args.window_is_shared, 0);
    cr_expect_null(last_launch()->args.skip_table);
    cr_expect_eq(last_launch()->args.skip_table_length, 0);
}

// With a table of skip-softmax a kernel of its own runs, and one lane has all heads of a KV head,
// whatever the policy.
Test(launch, has_kernels_for_skip_softmax)
{
    const char *const policies[] = { NULL, "1", "4", "auto" };
    for (size_t i = 0; i < 4; i++) {
        open_device(ATTN_DEVICE_ORDINAL, policies[i], 0);
        struct attn_ctm_params params = ctm_params(3, 1, 100);
        params.num_q_heads = 64;
        params.skip_softmax_scale_table = AT(9);
        params.skip_softmax_scale_table_length = 6;
        params.dropped_pages = AT(10);
        cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
        const struct fake_launch *const launch = last_launch();
        cr_expect_str_eq(launch->kernel, "decode_fp16_e4m3_d64_skip");
        cr_expect_eq(launch->smem_bytes, attn_decode_smem_bytes(64, 1, 8, TILE, WARPS, 3, 1, 4));
        cr_expect_eq(launch->args.skip_table, AT(9));
        cr_expect_eq(launch->args.skip_table_length, 6);
        cr_expect_eq(launch->args.dropped, AT(10));
        cr_expect_eq(launch->args.group_rows, 8);
        cr_expect_eq(launch->args.lanes, 8);
        cr_expect_eq(launch->args.splits, 1);
        cr_expect_leq(used_bytes(8, 64), (size_t) attn_ctm_workspace_elems(3, 64, 64) * 4);
        cr_expect_leq(used_counters(), attn_ctm_semaphore_elems(3, 8));
        // Nine heads are more than the kernel has rows for.
        const int launches = fake.num_launches;
        params.num_q_heads = 72;
        cr_expect_eq(attn_ctm_run(device, &params), ATTN_ERROR_UNSUPPORTED);
        cr_expect(strstr(attn_last_error(), "9 query heads a KV head, with a skip_table"), "%s",
                  attn_last_error());
        cr_expect_eq(fake.num_launches, launches);
        // An empty table is none.
        params.skip_softmax_scale_table_length = 0;
        cr_assert_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
        cr_expect_str_eq(last_launch()->kernel, "decode_fp16_e4m3_d64");
        cr_expect_null(last_launch()->args.skip_table);
    }
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

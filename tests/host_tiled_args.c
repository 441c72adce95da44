/* SPDX-License-Identifier: Apache-2.0 */
// Every rule of include/attn/tiled.h that is checked has its own sentence, and a refused call
// changes nothing.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/older_structs.h"
#include "support/pack_folder.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SEQS 3
#define Q_HEADS 4
#define KV_HEADS 2
#define DIM 64
#define BLOCK 4
#define CAPACITY 2
#define BLOCKS 6

// Calls that are right, for each test to break.
static struct {
    _Alignas(256) uint16_t q[SEQS * Q_HEADS * DIM + 8];
    _Alignas(256) uint16_t k[BLOCKS * BLOCK * KV_HEADS * DIM + 8];
    _Alignas(256) uint16_t v[BLOCKS * BLOCK * KV_HEADS * DIM + 8];
    _Alignas(256) int32_t blocks[SEQS * CAPACITY + 1], counts[SEQS + 1], valid[SEQS + 1], fault[2];
    _Alignas(256) float m[SEQS * Q_HEADS + 4], l[SEQS * Q_HEADS + 4], o[SEQS * Q_HEADS * DIM + 4];
    _Alignas(256) uint16_t output[SEQS * Q_HEADS * DIM + 8];
    _Alignas(256) float lse[SEQS * Q_HEADS + 1];
} memory, before;

static struct attn_device *device;
static struct attn_tiled *tiled;
static struct attn_tiled_dims dims;
static struct attn_tiled_create_params create;
static struct attn_tiled_step_params step;
static struct attn_tiled_finalize_params last;

static void reset(void)
{
    dims = (struct attn_tiled_dims) ATTN_TILED_DIMS_INIT;
    dims.max_seqs = SEQS;
    dims.num_q_heads = Q_HEADS;
    dims.num_kv_heads = KV_HEADS;
    dims.head_dim = DIM;
    dims.block_size = BLOCK;
    dims.tile_capacity = CAPACITY;
    create = (struct attn_tiled_create_params) ATTN_TILED_CREATE_PARAMS_INIT;
    create.dims = &dims;
    create.m = memory.m;
    create.l = memory.l;
    create.o = memory.o;
    step = (struct attn_tiled_step_params) ATTN_TILED_STEP_PARAMS_INIT;
    step.num_seqs = SEQS;
    step.q = memory.q;
    step.k_pool = memory.k;
    step.v_pool = memory.v;
    step.tile_blocks = memory.blocks;
    step.tile_block_counts = memory.counts;
    step.num_pool_blocks = BLOCKS;
    step.fault = memory.fault;
    last = (struct attn_tiled_finalize_params) ATTN_TILED_FINALIZE_PARAMS_INIT;
    last.num_seqs = SEQS;
    last.output = memory.output;
    last.lse = memory.lse;
}

static void set_up(void)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    memset(&memory, 0, sizeof(memory));
    for (int i = 0; i < SEQS * CAPACITY; i++) memory.blocks[i] = i;
    for (int i = 0; i < SEQS; i++) memory.counts[i] = memory.valid[i] = CAPACITY;
    memory.fault[0] = INT32_MAX;
    memset(memory.output, 0xEE, sizeof(memory.output));
    memset(memory.lse, 0xEE, sizeof(memory.lse));
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
    reset();
    cr_assert_eq(attn_tiled_create(&tiled, device, &create), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(attn_tiled_begin_step(tiled, SEQS, NULL), ATTN_OK);
    memcpy(&before, &memory, sizeof(memory));
}

static void tear_down(void)
{
    attn_tiled_destroy(&tiled);
    attn_device_close(&device);
}

TestSuite(tiled_args, .init = set_up, .fini = tear_down);

// Failed with a sentence that has `part`; the next call starts from right ones again.
static void expect_status(const enum attn_status status, const enum attn_status expected,
                          const char *const part)
{
    cr_expect_eq(status, expected, "%s: %s instead of %s", part, attn_status_name(status),
                 attn_status_name(expected));
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s: memory changed", part);
    reset();
}

static void expect_no_state(const enum attn_status expected, const char *const part)
{
    struct attn_tiled *made = tiled;
    const enum attn_status status = attn_tiled_create(&made, device, &create);
    cr_expect_null(made, "%s", part);
    expect_status(status, expected, part);
}

// Refused by attn_tiled_validate, by the sizes, and by attn_tiled_create, in the same words.
static void expect_bad_dims(const char *const part)
{
    const struct attn_tiled_dims bad = dims;
    const struct attn_tiled_strides paged = attn_tiled_paged_strides(&bad),
                                    scratch = attn_tiled_scratch_pool_strides(&bad);
    cr_expect_eq(attn_tiled_gqa_ratio(&bad), -1, "%s", part);
    cr_expect_eq(attn_tiled_m_bytes(&bad), -1, "%s", part);
    cr_expect_eq(attn_tiled_l_bytes(&bad), -1, "%s", part);
    cr_expect_eq(attn_tiled_o_bytes(&bad), -1, "%s", part);
    cr_expect_eq(attn_tiled_output_bytes(&bad), -1, "%s", part);
    cr_expect(!paged.block && !paged.token && !paged.head && !paged.v_offset, "%s", part);
    cr_expect(!scratch.block && !scratch.token && !scratch.head && !scratch.v_offset, "%s", part);
    expect_status(attn_tiled_validate(&bad), ATTN_ERROR_INVALID, part);
    dims = bad;
    expect_no_state(ATTN_ERROR_INVALID, part);
}

#define BAD_DIMS(field, value, part) \
    do { \
        dims.field = value; \
        expect_bad_dims(part); \
    } while (0)

#define BAD_CREATE(field, value, part) \
    do { \
        create.field = value; \
        expect_no_state(ATTN_ERROR_INVALID, part); \
    } while (0)

#define BAD_STEP(field, value, part) \
    do { \
        step.field = value; \
        expect_status(attn_tiled_step_tile(tiled, &step, NULL), ATTN_ERROR_INVALID, part); \
    } while (0)

#define BAD_LAST(field, value, part) \
    do { \
        last.field = value; \
        expect_status(attn_tiled_finalize(tiled, &last, NULL), ATTN_ERROR_INVALID, part); \
    } while (0)

// ---- what is right

Test(tiled_args, accepts_right_calls)
{
    cr_expect_eq(attn_tiled_validate(&dims), ATTN_OK);
    cr_expect_eq(attn_tiled_step_tile(tiled, &step, NULL), ATTN_OK, "%s", attn_last_error());
    step.valid_slots = memory.valid;
    cr_expect_eq(attn_tiled_step_tile(tiled, &step, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(memory.fault[0], INT32_MAX);
    // K and V are 0, and so are all scores: 8 keys twice, less 2 of the second time.
    for (int i = 0; i < SEQS * Q_HEADS; i++) cr_expect(memory.m[i] == 0 && memory.l[i] == 14);
    cr_expect_eq(attn_tiled_finalize(tiled, &last, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_empty(attn_last_error());
    for (int i = 0; i < SEQS * Q_HEADS * DIM; i++) cr_assert_eq(memory.output[i], 0);
    for (int i = 0; i < SEQS * Q_HEADS; i++) cr_expect_float_eq(memory.lse[i], log(14), 1e-6);
    cr_expect_eq(memory.output[SEQS * Q_HEADS * DIM], 0xEEEE);
    cr_expect_eq(memcmp(&memory.lse[SEQS * Q_HEADS], &before.lse[SEQS * Q_HEADS], 4), 0);
    for (int i = 0; i < 4; i++) cr_expect_eq(memory.o[SEQS * Q_HEADS * DIM + i], 0);
}

Test(tiled_args, has_defaults)
{
    const struct attn_tiled_step_params of_step = ATTN_TILED_STEP_PARAMS_INIT;
    const struct attn_tiled_dims of_dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_step_params expected;
    memset(&expected, 0, sizeof(expected));
    expected.size = sizeof(expected);
    expected.last_block_valid_slots = INT32_MAX;
    cr_expect_eq(memcmp(&of_step, &expected, sizeof(expected)), 0);
    cr_expect_eq(of_dims.size, sizeof(of_dims));
    cr_expect_eq(of_dims.dtype, ATTN_DTYPE_BF16);
    cr_expect_eq(create.size, sizeof(create));
    cr_expect_eq(last.size, sizeof(last));
}

Test(tiled_args, knows_sizes)
{
    cr_expect_eq(attn_tiled_gqa_ratio(&dims), 2);
    cr_expect_eq(attn_tiled_m_bytes(&dims), SEQS * Q_HEADS * 4);
    cr_expect_eq(attn_tiled_l_bytes(&dims), SEQS * Q_HEADS * 4);
    cr_expect_eq(attn_tiled_o_bytes(&dims), SEQS * Q_HEADS * DIM * 4);
    cr_expect_eq(attn_tiled_output_bytes(&dims), SEQS * Q_HEADS * DIM * 2);
    const struct attn_tiled_strides paged = attn_tiled_paged_strides(&dims),
                                    scratch = attn_tiled_scratch_pool_strides(&dims);
    cr_expect_eq(paged.block, BLOCK * KV_HEADS * DIM);
    cr_expect_eq(paged.token, KV_HEADS * DIM);
    cr_expect_eq(paged.head, DIM);
    cr_expect_eq(paged.v_offset, 0);
    cr_expect_eq(scratch.block, 2 * KV_HEADS * BLOCK * DIM);
    cr_expect_eq(scratch.token, DIM);
    cr_expect_eq(scratch.head, BLOCK * DIM);
    cr_expect_eq(scratch.v_offset, KV_HEADS * BLOCK * DIM);
    // Past 32 bits; and any head_dim up to 256.
    dims.max_seqs = 1 << 20;
    dims.num_q_heads = dims.num_kv_heads = 1 << 12;
    dims.head_dim = 129;
    dims.block_size = 1 << 24;
    cr_expect_eq(attn_tiled_o_bytes(&dims), ((int64_t) 129) << 34);
    cr_expect_eq(attn_tiled_scratch_pool_strides(&dims).block, ((int64_t) 129) << 37);
}

Test(tiled_args, gives_dims_back)
{
    struct attn_tiled_dims found = { .size = sizeof(found) };
    cr_expect_eq(attn_tiled_get_dims(tiled, &found), ATTN_OK);
    cr_expect_eq(memcmp(&found, &dims, sizeof(found)), 0);
    // No more than what the caller has.
    memset(&found, 0xEE, sizeof(found));
    found.size = offsetof(struct attn_tiled_dims, num_q_heads);
    cr_expect_eq(attn_tiled_get_dims(tiled, &found), ATTN_OK);
    cr_expect_eq(found.size, offsetof(struct attn_tiled_dims, num_q_heads));
    cr_expect_eq(found.max_seqs, SEQS);
    cr_expect_eq(found.num_q_heads, (int32_t) 0xEEEEEEEE);
    found.size = 3;
    expect_status(attn_tiled_get_dims(tiled, &found), ATTN_ERROR_INVALID, "dims->size is 3");
    expect_status(attn_tiled_get_dims(tiled, NULL), ATTN_ERROR_INVALID, "dims is NULL");
    expect_status(attn_tiled_get_dims(NULL, &found), ATTN_ERROR_INVALID, "tiled is NULL");
}

// ---- dims and the state

Test(tiled_args, checks_dims)
{
    expect_status(attn_tiled_validate(NULL), ATTN_ERROR_INVALID, "dims is NULL");
    BAD_DIMS(size, 3, "dims->size is 3");
    BAD_DIMS(dtype, ATTN_DTYPE_NONE, "dtype is 0");
    BAD_DIMS(dtype, ATTN_DTYPE_E4M3, "dtype is 3 (e4m3): it has to be bf16 or fp16");
    BAD_DIMS(max_seqs, 0, "max_seqs is 0: it has to be at least 1");
    BAD_DIMS(max_seqs, -1, "max_seqs is -1");
    BAD_DIMS(num_q_heads, 0, "num_q_heads is 0");
    BAD_DIMS(num_kv_heads, 0, "num_kv_heads is 0");
    BAD_DIMS(num_kv_heads, -2, "num_kv_heads is -2");
    BAD_DIMS(num_q_heads, 5, "num_q_heads is 5, num_kv_heads 2: the first has to be a multiple");
    BAD_DIMS(head_dim, 0, "head_dim is 0");
    BAD_DIMS(head_dim, 257, "head_dim is 257: it has to be in 1..256");
    BAD_DIMS(block_size, 0, "block_size is 0");
    BAD_DIMS(tile_capacity, 0, "tile_capacity is 0");
    BAD_DIMS(tile_capacity, INT32_MIN, "tile_capacity is -2147483648");
}

Test(tiled_args, checks_products)
{
    dims.num_q_heads = INT32_MAX - 1;
    BAD_DIMS(max_seqs, INT32_MAX, "the state o would have more than 2^63 - 1 bytes");
    dims.num_q_heads = dims.num_kv_heads = INT32_MAX;
    BAD_DIMS(block_size, INT32_MAX, "a block would have more than 2^63 - 1 bytes");
    dims.max_seqs = INT32_MAX;
    BAD_DIMS(tile_capacity, INT32_MAX, "a tile's list of blocks would have more than");
}

Test(tiled_args, checks_what_a_state_is_made_of)
{
    expect_status(attn_tiled_create(NULL, device, &create), ATTN_ERROR_INVALID, "tiled is NULL");
    struct attn_tiled *made = tiled;
    expect_status(attn_tiled_create(&made, NULL, &create), ATTN_ERROR_INVALID, "device is NULL");
    cr_expect_null(made);
    expect_status(attn_tiled_create(&made, device, NULL), ATTN_ERROR_INVALID, "params is NULL");
    BAD_CREATE(size, 3, "params->size is 3");
    BAD_CREATE(dims, NULL, "dims is NULL");
    BAD_CREATE(m, NULL, "m is NULL, and not all of m, l and o are");
    BAD_CREATE(l, NULL, "l is NULL, and not all");
    BAD_CREATE(o, NULL, "o is NULL, and not all");
    BAD_CREATE(m, memory.m + 1, "aligned to 16 bytes");
    BAD_CREATE(l, memory.l + 1, "l is 0x");
    BAD_CREATE(o, memory.o + 1, "o is 0x");
    BAD_CREATE(m, memory.o + SEQS * Q_HEADS * DIM - 4, "overlaps");
    BAD_CREATE(l, memory.m + SEQS * Q_HEADS - 4, "overlaps l");
    BAD_CREATE(workspace_bytes, 1, "workspace is NULL, but workspace_bytes is 1");
    create.workspace = memory.q;
    BAD_CREATE(workspace_bytes, -1,
               "workspace_bytes is -1: these dims want 0 on this device, as "
               "attn_tiled_workspace_bytes says");
    BAD_CREATE(workspace, memory.q + 4, "workspace is 0x");
    create.workspace_bytes = 64;
    BAD_CREATE(workspace, memory.o + 4, "overlaps");
    // Of memory of its own; on the host it stays as it is.
    create.workspace = memory.q;
    create.workspace_bytes = 64;
    cr_expect_eq(attn_tiled_create(&made, device, &create), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_tiled_begin_step(made, SEQS, NULL), ATTN_OK);
    attn_tiled_destroy(&made);
}

static void expect_no_size(const struct attn_device *const on,
                           const struct attn_tiled_dims *const of, const char *const part)
{
    cr_expect_eq(attn_tiled_workspace_bytes(on, of), -1, "%s", part);
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
}

Test(tiled_args, knows_the_workspace)
{
    cr_expect_eq(attn_tiled_workspace_bytes(device, &dims), 0);
    expect_no_size(NULL, &dims, "device is NULL");
    expect_no_size(device, NULL, "dims is NULL");
    dims.head_dim = 96;
    expect_no_size(device, &dims, "head_dim is 96: tiled decode serves 64, 128 and 256");
    dims.num_kv_heads = 0;
    expect_no_size(device, &dims, "num_kv_heads is 0");
}

static void expect_no_plan(const int32_t num_seqs, const enum attn_status expected,
                           const char *const part)
{
    struct attn_tiled_plan plan;
    memset(&plan, 0xEE, sizeof(plan));
    plan.size = sizeof(plan);
    const struct attn_tiled_plan same = plan;
    expect_status(attn_tiled_plan(device, &dims, num_seqs, &plan), expected, part);
    cr_expect_eq(memcmp(&plan, &same, sizeof(plan)), 0, "%s", part);
}

Test(tiled_args, plans)
{
    struct attn_tiled_plan plan = { .size = sizeof(plan) };
    cr_assert_eq(attn_tiled_plan(device, &dims, 2, &plan), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(plan.kernel, "host executor");
    cr_expect(!plan.turns && !plan.grid && !plan.block && !plan.smem_bytes);
    cr_expect_eq(plan.workspace_bytes, 0);
    cr_expect_eq(plan.kv_bytes, 2 * CAPACITY * BLOCK * KV_HEADS * DIM * 2 * 2);
    cr_expect_eq(plan.other_bytes, 2 * Q_HEADS * (DIM * 2 + 2 * (DIM + 2) * 4));
    cr_expect_eq(plan.flops, 2 * CAPACITY * BLOCK * 4 * DIM * Q_HEADS);
    // No more than what the caller has.
    memset(&plan, 0xEE, sizeof(plan));
    plan.size = offsetof(struct attn_tiled_plan, grid);
    cr_expect_eq(attn_tiled_plan(device, &dims, 2, &plan), ATTN_OK);
    cr_expect(plan.turns == 0 && plan.grid == (int32_t) 0xEEEEEEEE);
    expect_no_plan(SEQS + 1, ATTN_ERROR_INVALID, "num_seqs is 4");
    expect_no_plan(-1, ATTN_ERROR_INVALID, "num_seqs is -1");
    dims.block_size = 0;
    expect_no_plan(1, ATTN_ERROR_INVALID, "block_size is 0");
    dims.head_dim = 96;
    expect_no_plan(1, ATTN_ERROR_UNSUPPORTED, "head_dim is 96");
    expect_status(attn_tiled_plan(NULL, &dims, 1, &plan), ATTN_ERROR_INVALID, "device is NULL");
    expect_status(attn_tiled_plan(device, NULL, 1, &plan), ATTN_ERROR_INVALID, "dims is NULL");
    expect_status(attn_tiled_plan(device, &dims, 1, NULL), ATTN_ERROR_INVALID, "plan is NULL");
}

Test(tiled_args, makes_no_state_of_another_head_dim)
{
    static const int32_t head_dims[] = { 1, 16, 32, 63, 96, 192, 255 };
    for (size_t i = 0; i < sizeof(head_dims) / sizeof(head_dims[0]); i++) {
        dims.head_dim = head_dims[i];
        create.m = create.l = create.o = NULL;
        cr_expect_eq(attn_tiled_validate(&dims), ATTN_OK, "%d", head_dims[i]);
        expect_no_state(ATTN_ERROR_UNSUPPORTED, "tiled decode serves 64, 128 and 256");
    }
}

// AddressSanitizer ends the program instead of refusing so large an allocation.
#ifndef __SANITIZE_ADDRESS__
Test(tiled_args, says_what_memory_is_lacking)
{
    dims.max_seqs = INT32_MAX;
    dims.num_q_heads = 1 << 20;
    create.m = create.l = create.o = NULL;
    expect_no_state(ATTN_ERROR_NO_MEMORY,
                    "the state of 2147483647 sequences needs 9007199250546688");
}
#endif

static void expect_no_kernel(const enum attn_device_kind kind)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    tear_down();
    open.kind = kind;
    open.target = "hopper";
    open.pack_dir = pack_folder_make_with("hopper");
    cr_assert_not_null(open.pack_dir);
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK, "%s", attn_last_error());
    expect_no_state(ATTN_ERROR_UNSUPPORTED,
                    "no tiled kernel for bf16, head_dim 64; it has: tiled_bf16_d128");
    dims.block_size = -1;
    expect_no_state(ATTN_ERROR_INVALID, "block_size is -1");
    pack_folder_remove();
}

Test(tiled_args, has_no_kernels)
{
    fake_driver_install();
    expect_no_kernel(ATTN_DEVICE_TARGET);
    expect_no_kernel(ATTN_DEVICE_ORDINAL);
    cr_expect_eq(fake.num_launches, 0);
}

// ---- a step

Test(tiled_args, refuses_more_sequences_than_the_state_has)
{
    static const char sentence[] = "num_seqs is 4: it has to be in 0..3, the max_seqs";
    memset(memory.m, 0x55, sizeof(memory.m));
    memset(memory.o, 0x55, sizeof(memory.o));
    memcpy(&before, &memory, sizeof(memory));
    expect_status(attn_tiled_begin_step(tiled, SEQS + 1, NULL), ATTN_ERROR_INVALID, sentence);
    expect_status(attn_tiled_begin_step(tiled, -1, NULL), ATTN_ERROR_INVALID, "num_seqs is -1");
    BAD_STEP(num_seqs, SEQS + 1, sentence);
    BAD_STEP(num_seqs, INT32_MIN, "num_seqs is -2147483648");
    BAD_LAST(num_seqs, SEQS + 1, sentence);
    BAD_LAST(num_seqs, -1, "num_seqs is -1");
}

Test(tiled_args, needs_a_state_and_params)
{
    expect_status(attn_tiled_begin_step(NULL, 1, NULL), ATTN_ERROR_INVALID, "tiled is NULL");
    expect_status(attn_tiled_step_tile(NULL, &step, NULL), ATTN_ERROR_INVALID, "tiled is NULL");
    expect_status(attn_tiled_finalize(NULL, &last, NULL), ATTN_ERROR_INVALID, "tiled is NULL");
    expect_status(attn_tiled_step_tile(tiled, NULL, NULL), ATTN_ERROR_INVALID, "params is NULL");
    expect_status(attn_tiled_finalize(tiled, NULL, NULL), ATTN_ERROR_INVALID, "params is NULL");
    BAD_STEP(size, 0, "params->size is 0");
    BAD_STEP(size, UINT32_MAX, "params->size is");
    BAD_LAST(size, 3, "params->size is 3");
}

Test(tiled_args, checks_scalars_and_strides)
{
    BAD_STEP(scale, NAN, "scale is");
    BAD_STEP(scale, INFINITY, "scale is inf: it has to be finite");
    BAD_STEP(num_pool_blocks, 0, "num_pool_blocks is 0: it has to be in 1..2147483647");
    BAD_STEP(num_pool_blocks, (int64_t) INT32_MAX + 1, "num_pool_blocks is 2147483648");
    // One that is given makes the others count: their 0 stands for itself.
    BAD_STEP(block_stride, BLOCK * KV_HEADS * DIM, "token_stride is 0");
    step.block_stride = BLOCK * KV_HEADS * DIM;
    BAD_STEP(token_stride, DIM, "head_stride is 0");
    step.block_stride = step.token_stride = DIM;
    BAD_STEP(head_stride, DIM - 8, "head_stride is 56 elements, smaller than a row, which has 64");
    step.block_stride = step.token_stride = DIM;
    BAD_STEP(head_stride, DIM + 4, "head_stride is 68 elements: it has to be a multiple of 16");
    step.block_stride = step.token_stride = DIM;
    BAD_STEP(head_stride, -8, "head_stride is -8: strides may not be negative");
    step.token_stride = step.head_stride = DIM;
    BAD_STEP(block_stride, INT64_MAX / 8 * 8, "k_pool would reach over more than");
}

Test(tiled_args, checks_pointers)
{
    BAD_STEP(q, NULL, "q is NULL");
    BAD_STEP(k_pool, NULL, "k_pool is NULL");
    BAD_STEP(v_pool, NULL, "v_pool is NULL");
    BAD_STEP(tile_blocks, NULL, "tile_blocks is NULL");
    BAD_STEP(tile_block_counts, NULL, "tile_block_counts is NULL");
    BAD_STEP(q, memory.q + 4, "q is 0x");
    BAD_STEP(k_pool, memory.k + 4, "aligned to 16 bytes");
    BAD_STEP(v_pool, memory.v + 4, "v_pool is 0x");
    BAD_STEP(tile_blocks, (const void *) ((char *) memory.blocks + 2), "tile_blocks is 0x");
    BAD_STEP(tile_block_counts, (const void *) ((char *) memory.counts + 1),
             "tile_block_counts is 0x");
    BAD_STEP(valid_slots, (const void *) ((char *) memory.valid + 2), "valid_slots is 0x");
    BAD_STEP(fault, (void *) ((char *) memory.fault + 2), "fault is 0x");
    BAD_LAST(output, NULL, "output is NULL");
    BAD_LAST(output, memory.output + 4, "output is 0x");
    BAD_LAST(lse, (void *) ((char *) memory.lse + 2), "lse is 0x");
}

// The state is written, too.
Test(tiled_args, refuses_output_over_input)
{
    BAD_STEP(q, memory.m, "overlaps");
    BAD_STEP(k_pool, memory.o + SEQS * Q_HEADS * DIM - 4, "overlaps k_pool");
    BAD_STEP(v_pool, memory.l, "overlaps v_pool");
    BAD_STEP(tile_blocks, (const int32_t *) memory.l, "overlaps tile_blocks");
    BAD_STEP(tile_block_counts, (const int32_t *) memory.o, "overlaps tile_block_counts");
    BAD_STEP(valid_slots, (const int32_t *) memory.m + SEQS, "overlaps valid_slots");
    BAD_STEP(fault, (int32_t *) memory.q, "overlaps q");
    BAD_STEP(fault, memory.blocks + SEQS * CAPACITY - 1, "overlaps tile_blocks");
    BAD_STEP(fault, memory.counts, "overlaps tile_block_counts");
    BAD_STEP(fault, (int32_t *) memory.m, "overlaps");
    BAD_LAST(output, memory.o, "overlaps");
    BAD_LAST(lse, memory.m, "overlaps");
    BAD_LAST(lse, (float *) memory.output, "overlaps lse");
    // Side by side is fine, and inputs may share memory.
    step.v_pool = step.k_pool;
    step.fault = (int32_t *) memory.m + SEQS * Q_HEADS;
    cr_expect_eq(attn_tiled_step_tile(tiled, &step, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(tiled_args, looks_at_nothing_without_sequences)
{
    step.num_seqs = last.num_seqs = 0;
    step.q = step.k_pool = step.v_pool = (const void *) 3;
    step.tile_blocks = step.tile_block_counts = step.valid_slots = (const void *) 5;
    step.fault = (void *) 7;
    last.output = (void *) 9;
    last.lse = NULL;
    cr_expect_eq(attn_tiled_begin_step(tiled, 0, NULL), ATTN_OK);
    cr_expect_eq(attn_tiled_step_tile(tiled, &step, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_tiled_finalize(tiled, &last, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0);
}

// ---- sizes of older structs: fields that they lack count as 0

enum struct_kind {
    DIMS,
    CREATE,
    STEP,
    LAST,
    NUM_STRUCTS,
};

#define AT(type, field) EXTENT(struct attn_tiled_##type, field)

// Where the fields begin, and the end.
static const struct extent fields[NUM_STRUCTS][20] = {
    { AT(dims, size),
      AT(dims, dtype),
      AT(dims, max_seqs),
      AT(dims, num_q_heads),
      AT(dims, num_kv_heads),
      AT(dims, head_dim),
      AT(dims, block_size),
      AT(dims, tile_capacity),
      { sizeof(struct attn_tiled_dims), 0 } },
    { AT(create_params, size),
      AT(create_params, dims),
      AT(create_params, m),
      AT(create_params, l),
      AT(create_params, o),
      AT(create_params, workspace),
      AT(create_params, workspace_bytes),
      { sizeof(struct attn_tiled_create_params), 0 } },
    { AT(step_params, size),
      AT(step_params, num_seqs),
      AT(step_params, q),
      AT(step_params, k_pool),
      AT(step_params, v_pool),
      AT(step_params, tile_blocks),
      AT(step_params, tile_block_counts),
      AT(step_params, block_stride),
      AT(step_params, token_stride),
      AT(step_params, head_stride),
      AT(step_params, num_pool_blocks),
      AT(step_params, last_block_valid_slots),
      AT(step_params, scale),
      AT(step_params, valid_slots),
      AT(step_params, fault),
      { sizeof(struct attn_tiled_step_params), 0 } },
    { AT(finalize_params, size),
      AT(finalize_params, num_seqs),
      AT(finalize_params, output),
      AT(finalize_params, lse),
      { sizeof(struct attn_tiled_finalize_params), 0 } },
};

static enum attn_status call(const int kind)
{
    struct attn_tiled *made = NULL;
    enum attn_status status;
    switch (kind) {
    case DIMS: return attn_tiled_validate(&dims);
    case STEP: return attn_tiled_step_tile(tiled, &step, NULL);
    case LAST: return attn_tiled_finalize(tiled, &last, NULL);
    default: break;
    }
    status = attn_tiled_create(&made, device, &create);
    if (status == ATTN_OK) attn_tiled_destroy(&made);
    return status;
}

static void reset_all(void)
{
    memcpy(&memory, &before, sizeof(memory));
    reset();
}

static void expect_older(const enum struct_kind kind, const int expected)
{
    static const struct older_calls calls = { reset_all, call, &memory, sizeof(memory) };
    void *const structs[] = { &dims, &create, &step, &last };
    older_structs_expect(&calls, kind, structs[kind], fields[kind], expected);
}

Test(tiled_args, takes_structs_of_every_older_size)
{
    // All fields are needed.
    expect_older(DIMS, 1);
    // Without buffers, without a workspace, and whole.
    expect_older(CREATE, 4);
    // From those that end with num_pool_blocks on: without valid slots, then.
    expect_older(STEP, 5);
    // Without sequences, without lse, and whole.
    expect_older(LAST, 3);
}

// What a newer program asks for is refused.
Test(tiled_args, refuses_what_it_does_not_know)
{
    struct {
        struct attn_tiled_step_params known;
        int64_t newer;
    } newer = { step, 0 };
    newer.known.size = sizeof(newer);
    cr_expect_eq(attn_tiled_step_tile(tiled, &newer.known, NULL), ATTN_OK, "%s", attn_last_error());
    memcpy(&memory, &before, sizeof(memory));
    newer.newer = 1;
    expect_status(attn_tiled_step_tile(tiled, &newer.known, NULL), ATTN_ERROR_INVALID,
                  "params has a nonzero byte at offset");
}

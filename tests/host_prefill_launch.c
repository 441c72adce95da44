/* SPDX-License-Identifier: Apache-2.0 */
// What prefill asks of the driver: kernel, grid, block, shared memory, arguments, boxes; and that
// it asks for nothing where it declines or refuses. On a fake driver and the fake packs of
// support/fake_pack.c.
#include "attn/attn.h"
#include "support/launches.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef enum attn_status (*entry)(struct attn_device *, const struct attn_prefill_params *,
                                  attn_stream);

static struct attn_device *device;

static void set_up(void)
{
    unsetenv("METRALE_NO_ATTN_FA128");
    launches_set_up();
}

static void tear_down(void)
{
    launches_tear_down(&device);
}

TestSuite(prefill_launch, .init = set_up, .fini = tear_down);

static void open_device(const enum attn_device_kind kind)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    launches_open(&device, params);
}

// 3 sequences of 300 tokens at 700, 24 query heads on 4 KV heads of 256, contiguous.
static struct attn_prefill_params right_params(void)
{
    struct attn_prefill_params params = ATTN_PREFILL_PARAMS_INIT;
    params.dtype = ATTN_DTYPE_BF16;
    params.batch = 3;
    params.q_len = 300;
    params.kv_len = 1000;
    params.q_offset = 700;
    params.num_q_heads = 24;
    params.num_kv_heads = 4;
    params.head_dim = 256;
    params.scale = 0.0625f;
    params.q = AT(1);
    params.o = AT(2);
    params.k = AT(3);
    params.v = AT(4);
    return params;
}

static void set_pages(struct attn_prefill_params *const params, const int32_t page_size)
{
    params->block_table = AT(5);
    params->page_size = page_size;
    params->max_pages_per_seq = 1000;
    params->num_pages = 4000;
}

static void set_ragged(struct attn_prefill_params *const params)
{
    params->cu_seqlens = AT(6);
    params->kv_lens = AT(7);
    params->q_offsets = AT(8);
    params->num_tokens = 900;
}

static const struct fake_map *map_of(const struct attn_box_map *const map)
{
    return (const struct fake_map *) map->bytes;
}

static void expect_launch(const entry function, const struct attn_prefill_params *const params,
                          const char *const kernel)
{
    const int launches = fake.num_launches;
    cr_assert_eq(function(device, params, STREAM), ATTN_OK, "%s: %s", kernel, attn_last_error());
    cr_assert_eq(fake.num_launches, launches + 1, "%s", kernel);
    cr_expect_str_eq(last_launch()->kernel, kernel);
}

static void expect_refused(const entry function, const struct attn_prefill_params *const params,
                           const enum attn_status expected, const char *const part)
{
    const int launches = fake.num_launches;
    const enum attn_status status = function(device, params, STREAM);
    expect_no_launch(launches, status, expected, part);
}

static void expect_declined(const entry function, const struct attn_prefill_params *const params)
{
    const int calls = fake.num_calls;
    cr_expect_eq(function(device, params, STREAM), ATTN_DECLINED, "%s", attn_last_error());
    cr_expect_str_empty(attn_last_error());
    cr_expect_eq(fake.num_calls, calls);
}

// ---- what is launched

Test(prefill_launch, passes_everything_on)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    set_pages(&params, 16);
    set_ragged(&params);
    params.q_token_stride = 24 * 256 + 512;
    params.k_page_stride = 9 * 16 * 4 * 256;
    params.k_token_stride = 256;
    params.k_head_stride = 16 * 256;
    params.table_stride = 1003;
    params.sinks = AT(9);
    params.lse = AT(10);
    params.fault = AT(11);
    params.causal = 0;
    params.window = 77;
    params.softcap = 30.0f;
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    const struct fake_launch *const launch = last_launch();
    // At most 900 tokens and 3 begun tiles of 128.
    cr_expect(launch->prefill.tiles == (900 + 3 * 127) / 128, "%d", launch->prefill.tiles);
    cr_expect(launch->grid[0] == 10 * 24 && launch->grid[1] == 1 && launch->grid[2] == 1);
    cr_expect(launch->block[0] == (8 + 1) * 32 && launch->block[1] == 1 && launch->block[2] == 1);
    cr_expect_eq(launch->smem_bytes, attn_prefill_smem_bytes(256, 128, 16, 8, 0, 2));
    cr_expect_eq(launch->stream, STREAM);
    cr_expect_eq(launch->context, fake_primary_context(0));
    const struct attn_prefill_args *const args = &launch->prefill;
    cr_expect(args->q == AT(1) && args->o == AT(2) && args->k == AT(3) && args->v == AT(4));
    cr_expect(args->block_table == AT(5) && args->cu_seqlens == AT(6) && args->kv_lens == AT(7));
    cr_expect(args->q_offsets == AT(8) && args->sinks == AT(9) && args->lse == AT(10));
    cr_expect(args->fault == AT(11) && !args->kv_starts);
    cr_expect_eq(args->q_token_stride, 24 * 256 + 512);
    cr_expect_eq(args->k_page_stride, 9 * 16 * 4 * 256);
    cr_expect(args->k_token_stride == 256 && args->k_head_stride == 16 * 256);
    // Those left 0 are the dense ones.
    cr_expect_eq(args->v_page_stride, 16 * 4 * 256);
    cr_expect(args->v_token_stride == 4 * 256 && args->v_head_stride == 256);
    cr_expect(args->num_pages == 4000 && args->table_stride == 1003 && args->page_size == 16);
    cr_expect_eq(attn_divide(12345, args->page_magic, args->page_shift), 12345 / 16);
    cr_expect_eq(args->max_keys, 16000);
    cr_expect(args->batch == 3 && args->num_tokens == 900 && args->num_q_heads == 24);
    cr_expect(args->num_kv_heads == 4 && args->ratio == 6);
    cr_expect_eq(attn_divide(23, args->ratio_magic, args->ratio_shift), 3);
    cr_expect_eq(attn_divide(239, args->heads_magic, args->heads_shift), 9);
    cr_expect(args->causal == 0 && args->window == 77);
    cr_expect(args->scale == 0.0625f && args->softcap == 30.0f);
}

Test(prefill_launch, passes_contiguous_sequences_on)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    const struct attn_prefill_args *args = &last_launch()->prefill;
    // Three tiles a sequence.
    cr_expect_eq(args->tiles, 9);
    cr_expect_eq(last_launch()->grid[0], 9 * 24);
    cr_expect(args->q_len == 300 && args->kv_len == 1000 && args->q_offset == 700);
    cr_expect(args->causal == 1 && args->window == 0 && args->max_keys == 1000);
    cr_expect(!args->block_table && !args->cu_seqlens && !args->kv_lens && !args->q_offsets);
    cr_expect(!args->sinks && !args->lse && !args->fault);
    set_ragged(&params);
    params.kv_starts = AT(12);
    params.num_kv_tokens = 2345;
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    args = &last_launch()->prefill;
    cr_expect(args->kv_starts == AT(12) && args->num_kv_tokens == 2345 && args->max_keys == 2345);
    // One page of all tokens.
    cr_expect(args->has_boxes && map_of(&args->k_map)->dims[1] == 2345);
    cr_expect_eq(map_of(&args->k_map)->dims[4], 1);
}

// Lines of 128 bytes, slots, lines of a row, heads, pages.
static void expect_map(const struct attn_box_map *const filled, const void *const address,
                       const uint64_t dims[5], const uint64_t strides[3])
{
    const struct fake_map *const map = map_of(filled);
    cr_expect_eq(map->address, address);
    cr_expect_eq(map->type, ATTN_CU_TENSOR_UINT16);
    cr_expect_eq(map->swizzle, ATTN_CU_SWIZZLE_128B);
    for (int i = 0; i < 5; i++)
        cr_expect_eq(map->dims[i], dims[i], "dimension %d: %llu", i,
                     (unsigned long long) map->dims[i]);
    for (int i = 0; i < 3; i++) cr_expect_eq(map->strides[i], strides[i], "stride %d", i);
    cr_expect(map->box[0] == 64 && map->box[1] == ATTN_BOX_KEYS && map->box[3] == 1);
}

Test(prefill_launch, describes_keys_as_boxes)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    params.v_token_stride = 5 * 256;
    params.v_head_stride = 256;
    params.v_page_stride = 1;
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    const struct attn_prefill_args *args = &last_launch()->prefill;
    cr_expect(args->has_boxes);
    expect_map(&args->k_map, AT(3), (uint64_t[]){ 64, 3000, 4, 4, 1 },
               (uint64_t[]){ 4 * 256 * 2, 128, 256 * 2 });
    expect_map(&args->v_map, AT(4), (uint64_t[]){ 64, 3000, 4, 4, 1 },
               (uint64_t[]){ 5 * 256 * 2, 128, 256 * 2 });
    params = right_params();
    set_pages(&params, 48);
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    args = &last_launch()->prefill;
    cr_expect(args->has_boxes);
    expect_map(&args->k_map, AT(3), (uint64_t[]){ 64, 48, 4, 4, 4000 },
               (uint64_t[]){ 4 * 256 * 2, 128, 256 * 2 });
    cr_expect_eq(map_of(&args->k_map)->strides[3], 48 * 4 * 256 * 2);
    cr_expect_eq(map_of(&args->k_map)->box[2], 4);
    // A row of boxes of one line.
    params.head_dim = 64;
    expect_launch(attn_prefill, &params, "prefill_bf16_d64_r128");
    cr_expect_eq(map_of(&last_launch()->prefill.v_map)->box[2], 1);
    params.head_dim = 256;
    // Groups of 16 keys that cross pages, strides that the driver does not take, and no keys.
    set_pages(&params, 24);
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    cr_expect_not(last_launch()->prefill.has_boxes);
    set_pages(&params, 16);
    params.k_token_stride = (int64_t) 1 << 40;
    params.k_page_stride = params.k_head_stride = 256;
    params.num_pages = 4;
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    cr_expect_not(last_launch()->prefill.has_boxes);
    params = right_params();
    params.kv_len = 0;
    params.k = params.v = NULL;
    expect_launch(attn_prefill, &params, "prefill_bf16_d256_fa128");
    cr_expect_not(last_launch()->prefill.has_boxes);
    cr_expect_eq(last_launch()->prefill.max_keys, 0);
}

// ---- which kernel

Test(prefill_launch, takes_the_first_row_that_accepts)
{
    static const struct {
        enum attn_dtype dtype;
        int32_t head_dim;
        const char *any, *original;
        int32_t tiles, original_tiles;
        unsigned block;
    } cases[] = {
        { ATTN_DTYPE_BF16, 64, "prefill_bf16_d64_r128", "prefill_bf16_d64", 9, 15, 12 * 32 },
        { ATTN_DTYPE_BF16, 128, "prefill_bf16_d128", "prefill_bf16_d128", 15, 15, 5 * 32 },
        { ATTN_DTYPE_BF16, 256, "prefill_bf16_d256_fa128", "prefill_bf16_d256", 9, 15, 9 * 32 },
        { ATTN_DTYPE_BF16, 512, "prefill_bf16_d512", "prefill_bf16_d512", 15, 15, 9 * 32 },
        { ATTN_DTYPE_FP16, 256, "prefill_fp16_d256", "prefill_fp16_d256", 15, 15, 5 * 32 },
    };
    open_device(ATTN_DEVICE_ORDINAL);
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct attn_prefill_params params = right_params();
        params.dtype = cases[i].dtype;
        params.head_dim = cases[i].head_dim;
        expect_launch(attn_prefill, &params, cases[i].any);
        cr_expect_eq(last_launch()->prefill.tiles, cases[i].tiles);
        cr_expect_eq(last_launch()->block[0], cases[i].block);
        expect_launch(attn_prefill_64, &params, cases[i].original);
        cr_expect_eq(last_launch()->prefill.tiles, cases[i].original_tiles);
        set_pages(&params, 16);
        expect_launch(attn_prefill_paged_64, &params, cases[i].original);
    }
}

// Kernels of warpgroups, of which this pack has one, have no more blocks than there are SMs.
Test(prefill_launch, has_blocks_that_stay)
{
    fake.gpus[0].sm_count = 100;
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    params.head_dim = 64;
    for (int32_t batch = 1; batch <= 2; batch++) {
        params.batch = batch;
        expect_launch(attn_prefill, &params, "prefill_bf16_d64_r128");
        cr_expect_eq(last_launch()->prefill.tiles, 3 * batch);
        cr_expect_eq(last_launch()->grid[0], batch == 1 ? 72 : 100);
        const struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
        struct attn_prefill_plan plan = { .size = sizeof(plan) };
        cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(plan.grid, (int32_t) last_launch()->grid[0]);
        expect_launch(attn_prefill_64, &params, "prefill_bf16_d64");
        cr_expect_eq(last_launch()->grid[0], 5 * 24 * batch);
    }
}

Test(prefill_launch, takes_twins_where_they_apply)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    expect_launch(attn_prefill_fa128, &params, "prefill_bf16_d256_fa128");
    cr_expect_eq(last_launch()->grid[0], 9 * 24);
    expect_refused(attn_prefill_fa128_paged, &params, ATTN_ERROR_INVALID, "block_table is NULL");
    set_pages(&params, 3);
    expect_launch(attn_prefill_fa128_paged, &params, "prefill_bf16_d256_fa128");
    params.o = NULL;
    expect_refused(attn_prefill_fa128_paged, &params, ATTN_ERROR_INVALID, "o is NULL");
}

Test(prefill_launch, declines_what_no_twin_takes)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_prefill_params right = right_params();
    struct attn_prefill_params wrong[8];
    for (size_t i = 0; i < COUNT(wrong); i++) wrong[i] = right;
    wrong[0].head_dim = 128;
    wrong[1].causal = 0;
    wrong[2].window = 1;
    wrong[3].num_kv_heads = 0;
    wrong[4].num_q_heads = 25;
    wrong[5].batch = 0;
    wrong[6].q_len = 0;
    // Not in the pack.
    wrong[7].dtype = ATTN_DTYPE_FP16;
    for (size_t i = 0; i < COUNT(wrong); i++) {
        wrong[i].o = NULL;
        expect_declined(attn_prefill_fa128, &wrong[i]);
        expect_declined(attn_prefill_fa128_paged, &wrong[i]);
    }
}

// Read when the device is opened; then every call takes the originals' kernels.
Test(prefill_launch, declines_by_environment)
{
    setenv("METRALE_NO_ATTN_FA128", "", 1);
    open_device(ATTN_DEVICE_ORDINAL);
    unsetenv("METRALE_NO_ATTN_FA128");
    struct attn_prefill_params params = right_params();
    expect_declined(attn_prefill_fa128, &params);
    expect_launch(attn_prefill, &params, "prefill_bf16_d256");
    params.head_dim = 64;
    expect_launch(attn_prefill, &params, "prefill_bf16_d64");
    open_device(ATTN_DEVICE_ORDINAL);
    expect_launch(attn_prefill, &params, "prefill_bf16_d64_r128");
}

// ---- what is not launched

Test(prefill_launch, says_what_the_target_has)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    params.head_dim = 96;
    expect_refused(attn_prefill, &params, ATTN_ERROR_UNSUPPORTED, "bf16, head_dim 96; it has: ");
    cr_expect(strstr(attn_last_error(), "prefill_bf16_d512, prefill_fp16_d256"));
    expect_refused(attn_prefill_64, &params, ATTN_ERROR_UNSUPPORTED, "of 64 query tokens a block");
    params.head_dim = 97;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "head_dim is 97");
    params = right_params();
    params.num_q_heads = params.num_kv_heads = 65536;
    params.batch = 65536;
    params.q_len = 1;
    params.kv_len = 1;
    params.head_dim = 64;
    expect_refused(attn_prefill, &params, ATTN_ERROR_UNSUPPORTED,
                   "65536 tiles of 128 query tokens");
}

Test(prefill_launch, launches_nothing_on_bad_input)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    params.window = -1;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "window is -1");
    params = right_params();
    params.q = NULL;
    expect_refused(attn_prefill_64, &params, ATTN_ERROR_INVALID, "q is NULL");
    params = right_params();
    params.cu_seqlens = AT(6);
    expect_refused(attn_prefill_64, &params, ATTN_ERROR_INVALID, "cu_seqlens is not NULL");
    expect_refused(attn_prefill, NULL, ATTN_ERROR_INVALID, "params is NULL");
    params = right_params();
    params.o = (void *) params.q;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "overlap");
}

Test(prefill_launch, launches_nothing_without_query_tokens)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    params.batch = 0;
    cr_expect_eq(attn_prefill(device, &params, STREAM), ATTN_OK);
    params = right_params();
    params.q_len = 0;
    cr_expect_eq(attn_prefill_64(device, &params, STREAM), ATTN_OK);
    params = right_params();
    set_ragged(&params);
    params.num_tokens = 0;
    cr_expect_eq(attn_prefill(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(fake.num_launches, 0);
}

Test(prefill_launch, returns_the_failure_of_a_launch)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_prefill_params params = right_params();
    fake.fail_symbol = "cuLaunchKernelEx";
    fake.fail_code = 700;
    const enum attn_status status = attn_prefill(device, &params, STREAM);
    cr_expect_eq(status, ATTN_ERROR_DRIVER, "%s", attn_status_name(status));
    cr_expect(strstr(attn_last_error(), "prefill_bf16_d256_fa128"), "%s", attn_last_error());
}

Test(prefill_launch, has_no_gpu_for_a_target)
{
    open_device(ATTN_DEVICE_TARGET);
    struct attn_prefill_params params = right_params();
    expect_refused(attn_prefill, &params, ATTN_ERROR_NO_DEVICE, "the target hopper without a GPU");
    expect_refused(attn_prefill_fa128, &params, ATTN_ERROR_NO_DEVICE, "without a GPU");
    params.causal = 0;
    expect_declined(attn_prefill_fa128, &params);
    params.head_dim = 17;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "head_dim is 17");
    cr_expect_eq(fake.num_calls, 0);
}

// ---- the short form

#define MOST_SHORT ATTN_PREFILL_SHORT_TOKENS
#define SHORT_DECODE "decode_bf16_bf16_d128_r64"
#define SHORT_PREFILL "prefill_bf16_d128"

// 3 sequences of `tokens` tokens, the last of their keys, 32 query heads on 8 KV heads of 128, in
// pages; and all that the short form wants.
static struct attn_prefill_params short_params(const int32_t tokens)
{
    struct attn_prefill_params params = right_params();
    params.q_len = tokens;
    params.q_offset = 1000 - tokens;
    params.num_q_heads = 32;
    params.num_kv_heads = 8;
    params.head_dim = 128;
    set_pages(&params, 16);
    const struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
    cr_assert_eq(attn_prefill_workspace(device, &shape, &params.workspace_bytes), ATTN_OK);
    params.workspace = AT(20);
    params.counters = AT(21);
    return params;
}

static void expect_no_short(const struct attn_prefill_params *const params)
{
    const struct attn_prefill_shape shape = attn_prefill_shape_of(params);
    size_t bytes = 1;
    int32_t count = 1;
    cr_expect_eq(attn_prefill_workspace(device, &shape, &bytes), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_prefill_counters(device, &shape, &count), ATTN_OK);
    cr_expect(bytes == 0 && count == 0, "%zu, %d", bytes, count);
}

// The arguments of the launch before the last, or of the last.
static const struct attn_decode_args *expect_decode(const int before, const int32_t tokens)
{
    const struct fake_launch *const launch =
        &fake.launches[(fake.num_launches - 1 - before) % FAKE_MAX_LAUNCHES];
    cr_assert_eq(strncmp(launch->kernel, "decode_", 7), 0, "%s", launch->kernel);
    cr_expect_eq(launch->args.most_tokens, MOST_SHORT);
    cr_expect_eq(launch->args.q_len, tokens);
    cr_expect_eq(launch->stream, STREAM);
    return &launch->args;
}

Test(prefill_launch, passes_short_sequences_to_decode)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = short_params(16);
    params.sinks = AT(9);
    params.lse = AT(10);
    params.fault = AT(11);
    params.window = 77;
    params.softcap = 30.0f;
    params.q_token_stride = 32 * 128 + 64;
    params.k_page_stride = 9 * 16 * 8 * 128;
    params.k_token_stride = 128;
    params.k_head_stride = 16 * 128;
    params.table_stride = 1003;
    expect_launch(attn_prefill, &params, "decode_bf16_bf16_d128_wide");
    const struct attn_decode_args *const args = expect_decode(0, 16);
    cr_expect(args->q == AT(1) && args->o == AT(2) && args->k == AT(3) && args->v == AT(4));
    cr_expect(args->block_table == AT(5) && !args->v_table && !args->seq_lens);
    cr_expect(!args->cu_seqlens && !args->q_offsets && !args->tree_mask && !args->skip_table);
    cr_expect(args->sinks == AT(9) && args->lse == AT(10) && args->fault == AT(11));
    cr_expect(args->slots == AT(20) && args->counters == AT(21) && !args->pieces);
    cr_expect(args->kv_len == 1000 && args->q_offset == 984 && args->batch == 3);
    cr_expect(args->q_token_stride == 32 * 128 + 64 && args->q_stride == 16 * (32 * 128 + 64));
    cr_expect(args->k_page_stride == 9 * 16 * 8 * 128 && args->k_head_stride == 16 * 128);
    cr_expect(args->v_page_stride == 16 * 8 * 128 && args->v_token_stride == 8 * 128);
    cr_expect(args->num_pages == 4000 && args->table_stride == 1003 && args->max_keys == 16000);
    cr_expect(args->window == 77 && !args->window_is_shared && args->splits == 1);
    cr_expect(args->ratio == 4 && args->group_rows == 16 && args->row_groups == 4);
    cr_expect(args->scale == 0.0625f && args->softcap == 30.0f);
    cr_expect(args->k_scale == 1 && args->v_scale == 1 && args->has_boxes);
}

Test(prefill_launch, launches_both_forms_where_both_may_be)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = short_params(300);
    set_ragged(&params);
    cr_assert_eq(attn_prefill(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(fake.num_launches, 2);
    const struct attn_decode_args *args = expect_decode(1, MOST_SHORT);
    cr_expect_str_eq(fake.launches[0].kernel, SHORT_DECODE);
    cr_expect(args->cu_seqlens == AT(6) && args->seq_lens == AT(7) && args->q_offsets == AT(8));
    cr_expect_eq(args->num_tokens, 900);
    cr_expect_str_eq(last_launch()->kernel, SHORT_PREFILL);
    cr_expect_eq(last_launch()->prefill.short_tokens, MOST_SHORT);
    // At most 3 sequences that are long.
    cr_expect_eq(last_launch()->prefill.tiles, (900 + 3 * 63) / 64);
    params.num_tokens = 2 * (MOST_SHORT + 1) - 1;
    cr_assert_eq(attn_prefill(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(last_launch()->prefill.tiles, (2 * (MOST_SHORT + 1) - 1 + 63) / 64);
    // None of them can be long.
    const int launches = fake.num_launches;
    params.num_tokens = MOST_SHORT;
    cr_assert_eq(attn_prefill(device, &params, STREAM), ATTN_OK);
    cr_expect_eq(fake.num_launches, launches + 1);
    expect_decode(0, MOST_SHORT);
    params.num_tokens = 3;
    expect_launch(attn_prefill, &params, "decode_bf16_bf16_d128_wide");
    expect_decode(0, 3);
}

Test(prefill_launch, has_one_form_for_one_length)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = short_params(1);
    expect_launch(attn_prefill, &params, "decode_bf16_bf16_d128");
    params = short_params(MOST_SHORT);
    expect_launch(attn_prefill, &params, SHORT_DECODE);
    params = short_params(MOST_SHORT + 1);
    expect_launch(attn_prefill, &params, SHORT_PREFILL);
    cr_expect_eq(last_launch()->prefill.short_tokens, 0);
    // Not by the originals.
    params = short_params(16);
    expect_launch(attn_prefill_paged_64, &params, SHORT_PREFILL);
    cr_expect_eq(last_launch()->prefill.short_tokens, 0);
}

Test(prefill_launch, has_the_long_form_without_the_short_one)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_prefill_params right = short_params(16);
    struct attn_prefill_params params = right;
    params.workspace = NULL;
    params.counters = NULL;
    expect_launch(attn_prefill, &params, SHORT_PREFILL);
    cr_expect_eq(last_launch()->prefill.short_tokens, 0);
    struct attn_prefill_params others[4] = { right, right, right, right };
    others[0].causal = 0;
    others[1].window = ATTN_PREFILL_SHORT_WINDOW + 1;
    others[2].block_table = NULL;
    // No kernel of decode for many query rows.
    others[3].head_dim = 256;
    for (size_t i = 0; i < COUNT(others); i++) {
        // Not looked at.
        others[i].workspace_bytes = 0;
        others[i].counters = NULL;
        expect_no_short(&others[i]);
        expect_launch(attn_prefill, &others[i], i == 3 ? "prefill_bf16_d256_fa128" : SHORT_PREFILL);
        cr_expect_eq(last_launch()->prefill.short_tokens, 0);
    }
    params = right;
    params.window = ATTN_PREFILL_SHORT_WINDOW;
    expect_launch(attn_prefill, &params, "decode_bf16_bf16_d128_wide");
    open_device(ATTN_DEVICE_HOST);
    expect_no_short(&right);
}

Test(prefill_launch, refuses_a_wrong_workspace)
{
    open_device(ATTN_DEVICE_ORDINAL);
    const struct attn_prefill_params right = short_params(16);
    struct attn_prefill_params params = right;
    params.workspace_bytes--;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "(attn_prefill_workspace tells)");
    params = right;
    params.workspace = (char *) AT(20) + 128;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "workspace is ");
    params = right;
    params.workspace = (void *) (uintptr_t) (UINTPTR_MAX - 255);
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "workspace is ");
    params = right;
    params.counters = NULL;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "(attn_prefill_counters tells)");
    params = right;
    params.counters = (int32_t *) ((char *) AT(21) + 2);
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "counters is ");
    params = right;
    params.workspace = params.o;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "overlap");
    params = right;
    params.counters = (int32_t *) params.workspace + 64;
    expect_refused(attn_prefill, &params, ATTN_ERROR_INVALID, "overlap");
    // There is no kernel of the long form, which the short one does not need.
    params = right;
    params.dtype = ATTN_DTYPE_FP16;
    params.head_dim = 32;
    const struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
    cr_assert_eq(attn_prefill_workspace(device, &shape, &params.workspace_bytes), ATTN_OK);
    expect_launch(attn_prefill, &params, "decode_fp16_fp16_d32");
    set_ragged(&params);
    expect_refused(attn_prefill, &params, ATTN_ERROR_UNSUPPORTED, "no prefill kernel for fp16");
    params.head_dim = 128;
    params.dtype = ATTN_DTYPE_BF16;
    params.batch = 0;
    params.workspace = (void *) (uintptr_t) 3;
    cr_expect_eq(attn_prefill(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    params.batch = 3;
    params.num_tokens = 0;
    cr_expect_eq(attn_prefill(device, &params, STREAM), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(fake.num_launches, 1);
}

// Slots and counters that a launch may use are in what the sizes say, for any number of tokens; and
// a larger shape never needs less.
Test(prefill_launch, keeps_to_its_workspace)
{
    static const int32_t ratios[] = { 1, 4, 16 }, pages[] = { 1, 70, 9000 };
    static const int32_t batches[] = { 1, 3, 40, 3000 };
    open_device(ATTN_DEVICE_ORDINAL);
    for (size_t r = 0; r < COUNT(ratios); r++)
        for (size_t p = 0; p < COUNT(pages); p++) {
            size_t last_bytes = 0;
            int32_t last_count = 0;
            for (size_t b = 0; b < COUNT(batches); b++)
                for (int32_t tokens = 1; tokens <= MOST_SHORT; tokens += tokens < 20 ? 1 : 27) {
                    struct attn_prefill_params params = short_params(tokens);
                    params.num_q_heads = 8 * ratios[r];
                    params.max_pages_per_seq = pages[p];
                    params.kv_len = params.q_offset = 0;
                    params.batch = batches[b];
                    const struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
                    int32_t count;
                    attn_prefill_workspace(device, &shape, &params.workspace_bytes);
                    attn_prefill_counters(device, &shape, &count);
                    cr_assert_geq(params.workspace_bytes, last_bytes);
                    cr_assert_geq(count, last_count);
                    last_bytes = params.workspace_bytes;
                    last_count = count;
                    cr_assert_eq(attn_prefill(device, &params, STREAM), ATTN_OK, "%s",
                                 attn_last_error());
                    const struct attn_decode_args *const args = expect_decode(0, tokens);
                    const size_t slots =
                        (size_t) args->num_roots +
                        (size_t) last_launch()->grid[0] * (size_t) args->stack_slots;
                    const int32_t floats = args->group_rows == 64
                                               ? ATTN_DECODE_GROUP_SLOT_FLOATS(128, 64)
                                               : ATTN_DECODE_SLOT_FLOATS(128, args->group_rows, 4);
                    cr_assert_leq(slots * (size_t) floats * 4, params.workspace_bytes);
                    cr_assert_leq(2 + args->root_levels * args->num_roots, count);
                }
        }
}

// ---- plans

static struct attn_prefill_plan plan_of(const struct attn_prefill_shape *const shape)
{
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    cr_assert_eq(attn_prefill_plan(device, shape, &plan), ATTN_OK, "%s", attn_last_error());
    return plan;
}

Test(prefill_launch, plans_what_it_launches)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = right_params();
    for (int i = 0; i < 4; i++) {
        struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
        if (i == 1) shape.rows = 64;
        if (i == 3) set_ragged(&params);
        if (i == 3) shape = attn_prefill_shape_of(&params);
        const struct attn_prefill_plan plan = plan_of(&shape);
        expect_launch(i == 1 ? attn_prefill_64 : attn_prefill, &params, plan.kernel);
        cr_expect_eq(plan.grid, (int32_t) last_launch()->grid[0]);
        cr_expect_eq(plan.block, (int32_t) last_launch()->block[0]);
        cr_expect_eq(plan.smem_bytes, (int32_t) last_launch()->smem_bytes);
        cr_expect_eq(plan.tiles, last_launch()->prefill.tiles);
        cr_expect_eq(plan.rows, i == 1 ? 64 : 128);
        cr_expect_eq(plan.other_bytes, 2.0 * 900 * 24 * params.head_dim * 2);
        params.head_dim = 64;
    }
}

Test(prefill_launch, plans_the_short_form)
{
    open_device(ATTN_DEVICE_ORDINAL);
    struct attn_prefill_params params = short_params(16);
    struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
    struct attn_prefill_plan plan = plan_of(&shape);
    expect_launch(attn_prefill, &params, plan.short_kernel);
    cr_expect(!plan.kernel && plan.rows == 0 && plan.tiles == 0 && plan.grid == 0);
    cr_expect(plan.block == 0 && plan.smem_bytes == 0);
    cr_expect_eq(plan.short_grid, (int32_t) last_launch()->grid[0]);
    cr_expect_eq(plan.short_block, (int32_t) last_launch()->block[0]);
    cr_expect_eq(plan.short_smem_bytes, (int32_t) last_launch()->smem_bytes);
    cr_expect_eq(plan.workspace_bytes, params.workspace_bytes);
    cr_expect_gt(plan.num_counters, 1);
    set_ragged(&params);
    shape = attn_prefill_shape_of(&params);
    plan = plan_of(&shape);
    cr_expect_str_eq(plan.kernel, SHORT_PREFILL);
    cr_expect_str_eq(plan.short_kernel, SHORT_DECODE);
    // Without pages or a workspace, by an original, without tokens.
    shape.page_size = 0;
    plan = plan_of(&shape);
    cr_expect(!strcmp(plan.kernel, SHORT_PREFILL) && !plan.short_kernel);
    cr_expect(plan.workspace_bytes == 0 && plan.num_counters == 0 && plan.short_grid == 0);
    params = short_params(16);
    shape = attn_prefill_shape_of(&params);
    shape.rows = 64;
    cr_expect(!plan_of(&shape).short_kernel);
    shape.rows = 0;
    shape.q_len = 0;
    cr_expect(!plan_of(&shape).short_kernel);
}

// Pairs counted one by one.
static double count_pairs(const struct attn_prefill_shape *const s, int64_t *const seen)
{
    int64_t pairs = 0, first = INT64_MAX, behind = 0;
    for (int64_t p = s->q_offset; p < (int64_t) s->q_offset + s->q_len; p++) {
        for (int64_t k = 0; k < s->kv_len; k++) {
            if ((s->causal && k > p) || (s->window && p - k >= s->window)) continue;
            pairs++;
            if (k < first) first = k;
            if (k >= behind) behind = k + 1;
        }
    }
    *seen = pairs ? behind - first : 0;
    return (double) pairs;
}

Test(prefill_launch, plans_the_work)
{
    static const int32_t numbers[][3] = { { 1, 1, 0 },   { 7, 20, 13 },   { 20, 7, 0 },
                                          { 20, 7, 30 }, { 20, 30, -10 }, { 9, 30, -40 },
                                          { 5, 0, 0 },   { 0, 9, 3 },     { 30, 100, 20 } };
    static const int32_t windows[] = { 0, 1, 4, 15, 1000 };
    open_device(ATTN_DEVICE_HOST);
    for (size_t i = 0; i < COUNT(numbers); i++)
        for (size_t w = 0; w < COUNT(windows); w++)
            for (int causal = 0; causal < 2; causal++) {
                const struct attn_prefill_params params = right_params();
                struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
                shape.q_len = numbers[i][0];
                shape.kv_len = numbers[i][1];
                shape.q_offset = numbers[i][2];
                shape.window = windows[w];
                shape.causal = causal;
                int64_t seen;
                const double pairs = count_pairs(&shape, &seen);
                const struct attn_prefill_plan plan = plan_of(&shape);
                cr_expect_eq(plan.flops, 4.0 * 256 * 24 * 3 * pairs, "%zu, window %d, causal %d", i,
                             windows[w], causal);
                cr_expect_eq(plan.kv_bytes, 2.0 * 3 * (double) seen * 4 * 256 * 2,
                             "%zu, window %d, causal %d", i, windows[w], causal);
                cr_expect(!strcmp(plan.kernel, "host executor") && plan.grid == 0);
            }
}

Test(prefill_launch, refuses_shapes)
{
    open_device(ATTN_DEVICE_TARGET);
    const struct attn_prefill_params params = right_params();
    const struct attn_prefill_shape right = attn_prefill_shape_of(&params);
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    struct attn_prefill_shape shape = right;
    shape.rows = 65;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "rows is 65"));
    shape = right;
    shape.is_ragged = 2;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    shape = right;
    shape.q_len = -1;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    shape.is_ragged = 1;
    shape.kv_len = -1;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
    shape = right;
    shape.head_dim = 96;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_UNSUPPORTED);
    shape = right;
    shape.dtype = ATTN_DTYPE_FP16;
    shape.rows = 128;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_UNSUPPORTED);
    cr_expect(strstr(attn_last_error(), "of 128 query tokens a block"));
    shape = right;
    shape.page_size = -1;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "page_size is -1"));
    shape.page_size = 16;
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "max_pages_per_seq is 0"));
    size_t bytes = 5;
    int32_t count = 5;
    cr_expect_eq(attn_prefill_workspace(device, &shape, &bytes), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_prefill_counters(device, &shape, &count), ATTN_ERROR_INVALID);
    cr_expect(bytes == 0 && count == 0);
    cr_expect_eq(attn_prefill_workspace(NULL, &right, &bytes), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_prefill_workspace(device, NULL, &bytes), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_prefill_workspace(device, &right, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "bytes is NULL"));
    cr_expect_eq(attn_prefill_counters(device, &right, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "count is NULL"));
    // More sequences than decode counts.
    shape = right;
    shape.head_dim = 128;
    shape.page_size = 16;
    shape.max_pages_per_seq = 1;
    shape.batch = INT32_MAX;
    shape.is_ragged = 1;
    cr_expect_eq(attn_prefill_workspace(device, &shape, &bytes), ATTN_ERROR_UNSUPPORTED);
    cr_expect_eq(attn_prefill_plan(device, NULL, &plan), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_prefill_plan(device, &right, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_prefill_plan(NULL, &right, &plan), ATTN_ERROR_INVALID);
    plan.size = 0;
    cr_expect_eq(attn_prefill_plan(device, &right, &plan), ATTN_ERROR_INVALID);
}

// Fields that a shape or a plan of an older size lacks count as 0, and are not written.
Test(prefill_launch, takes_shapes_and_plans_of_older_sizes)
{
    open_device(ATTN_DEVICE_TARGET);
    const struct attn_prefill_params params = right_params();
    struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
    struct attn_prefill_plan plan;
    shape.size = (uint32_t) offsetof(struct attn_prefill_shape, is_ragged);
    shape.is_ragged = shape.rows = 99;
    memset(&plan, 0xA5, sizeof(plan));
    plan.size = (uint32_t) offsetof(struct attn_prefill_plan, grid);
    cr_expect_eq(attn_prefill_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(plan.kernel, "prefill_bf16_d256_fa128");
    cr_expect_eq(plan.grid, (int32_t) 0xA5A5A5A5);
}

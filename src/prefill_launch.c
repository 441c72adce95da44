/* SPDX-License-Identifier: Apache-2.0 */
#include "prefill_launch.h"

#include "boxes.h"
#include "device.h"
#include "kernels/prefill/prefill_params.h"
#include "pack_scan.h"
#include "prefill_check.h"
#include "prefill_short.h"
#include "status.h"

const struct attn_pack_row *attn_prefill_find_row(const struct attn_device *const device,
                                                  const enum attn_dtype dtype,
                                                  const int32_t head_dim,
                                                  const enum attn_prefill_form form)
{
    // The twins' kernels are off wherever they would be chosen.
    const bool narrow =
        form == ATTN_PREFILL_ORIGINAL || (form == ATTN_PREFILL_ANY && device->no_fa128);
    for (uint32_t i = 0; i < device->pack->num_rows; i++) {
        const struct attn_pack_row *const row = &device->pack->rows[i];
        if (row->op == ATTN_ROW_PREFILL && row->q == (int32_t) dtype && row->head_dim == head_dim &&
            (!narrow || row->rows == ATTN_PREFILL_ROWS) &&
            (form != ATTN_PREFILL_TWIN || row->rows == ATTN_PREFILL_TWIN_ROWS))
            return row;
    }
    return NULL;
}

static enum attn_status fail_unsupported(const struct attn_device *const device,
                                         const enum attn_dtype dtype, const int32_t head_dim,
                                         const enum attn_prefill_form form)
{
    char kernels[640];
    attn_pack_name_rows(device->pack, ATTN_ROW_PREFILL, kernels, sizeof(kernels));
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "target %s has no prefill kernel%s for %s, head_dim %d; it has: %s",
                     device->info.target,
                     form == ATTN_PREFILL_ORIGINAL ? " of 64 query tokens a block"
                     : form == ATTN_PREFILL_TWIN   ? " of 128 query tokens a block"
                                                   : "",
                     attn_dtype_name(dtype), head_dim, *kernels ? kernels : "none");
}

// Tiles of `rows` query tokens that the sequences with more than `short_tokens` have together, at
// most: where they differ, each but the first may begin a tile with one token.
static int64_t count_tiles(const struct attn_prefill_shape *const shape, const int32_t rows,
                           const int32_t short_tokens)
{
    if (!shape->is_ragged)
        return (int64_t) shape->batch * (((int64_t) shape->q_len + rows - 1) / rows);
    const int64_t tokens = shape->num_tokens, most = tokens / (short_tokens + 1);
    const int64_t sequences = shape->batch < most ? shape->batch : most;
    return (tokens + sequences * (rows - 1)) / rows;
}

// Blocks are counted in 32 bits.
static enum attn_status find_tiles(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape, const int32_t rows,
                                   const int32_t short_tokens, int32_t *const tiles)
{
    const int64_t count = count_tiles(shape, rows, short_tokens);
    if (count > INT32_MAX / shape->num_q_heads)
        return attn_fail(
            device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
            "%lld tiles of %d query tokens with %d query heads are more than %d blocks",
            (long long) count, rows, shape->num_q_heads, INT32_MAX);
    *tiles = (int32_t) count;
    return ATTN_OK;
}

// Blocks of kernels that take item after item stay, one on each SM.
static int32_t count_blocks(const struct attn_device *const device,
                            const struct attn_pack_row *const row, const int32_t items)
{
    const int32_t most = device->info.sm_count;
    return row->warpgroups > 0 && items > most ? most : items;
}

// ---- a launch

static int32_t saturate(const int64_t count)
{
    return count > INT32_MAX ? INT32_MAX : (int32_t) count;
}

static int32_t count_keys(const struct attn_prefill_params *const params)
{
    if (params->block_table)
        return saturate((int64_t) params->max_pages_per_seq * params->page_size);
    return params->kv_starts ? params->num_kv_tokens : params->kv_len;
}

// A box never leaves its page; contiguous tokens are one page, and may be more than there are
// coordinates.
static void set_boxes(const struct attn_device *const device, const struct attn_pack_row *const row,
                      const struct attn_prefill_params *const params,
                      struct attn_prefill_args *const args)
{
    const bool paged = params->block_table;
    const int64_t slots = paged ? params->page_size : attn_prefill_kv_tokens(params);
    const struct attn_box_view k = {
        .base = params->k,
        .dtype = params->dtype,
        .head_dim = params->head_dim,
        .heads = params->num_kv_heads,
        .slots = slots,
        .pages = paged ? params->num_pages : 1,
        .slot_stride = params->k_token_stride,
        .head_stride = params->k_head_stride,
        // Any will do for the only page.
        .page_stride = paged ? params->k_page_stride : params->k_token_stride,
        .box_lines = row->box_lines,
    };
    struct attn_box_view v = k;
    v.base = params->v;
    v.slot_stride = params->v_token_stride;
    v.head_stride = params->v_head_stride;
    v.page_stride = paged ? params->v_page_stride : params->v_token_stride;
    args->has_boxes = (!paged || params->page_size % ATTN_BOX_KEYS == 0) && slots <= INT32_MAX &&
                      attn_box_map_fill(device, &k, ATTN_BOX_KEYS, &args->k_map) &&
                      attn_box_map_fill(device, &v, ATTN_BOX_KEYS, &args->v_map);
}

static struct attn_prefill_args fill_args(const struct attn_prefill_params *const params,
                                          const int32_t short_tokens, const int32_t tiles)
{
    const int32_t ratio = params->num_q_heads / params->num_kv_heads;
    uint32_t page_magic, ratio_magic, heads_magic;
    int32_t page_shift, ratio_shift, heads_shift;
    attn_magic(params->block_table ? params->page_size : 1, &page_magic, &page_shift);
    attn_magic(ratio, &ratio_magic, &ratio_shift);
    attn_magic(params->num_q_heads, &heads_magic, &heads_shift);
    return (struct attn_prefill_args){
        .q = params->q,
        .o = params->o,
        .k = params->k,
        .v = params->v,
        .block_table = params->block_table,
        .cu_seqlens = params->cu_seqlens,
        .kv_lens = params->kv_lens,
        .q_offsets = params->q_offsets,
        .kv_starts = params->kv_starts,
        .sinks = params->sinks,
        .lse = params->lse,
        .fault = params->fault,
        .q_token_stride = params->q_token_stride,
        .k_page_stride = params->k_page_stride,
        .k_token_stride = params->k_token_stride,
        .k_head_stride = params->k_head_stride,
        .v_page_stride = params->v_page_stride,
        .v_token_stride = params->v_token_stride,
        .v_head_stride = params->v_head_stride,
        .num_pages = params->num_pages,
        .table_stride = params->table_stride,
        .page_size = params->page_size,
        .page_magic = page_magic,
        .page_shift = page_shift,
        .max_keys = count_keys(params),
        .batch = params->batch,
        .q_len = params->q_len,
        .kv_len = params->kv_len,
        .q_offset = params->q_offset,
        .num_tokens = params->num_tokens,
        .num_kv_tokens = params->num_kv_tokens,
        .num_q_heads = params->num_q_heads,
        .num_kv_heads = params->num_kv_heads,
        .ratio = ratio,
        .ratio_magic = ratio_magic,
        .ratio_shift = ratio_shift,
        .heads_magic = heads_magic,
        .heads_shift = heads_shift,
        .tiles = tiles,
        .short_tokens = short_tokens,
        .causal = params->causal,
        .window = params->window,
        .scale = params->scale,
        .softcap = params->softcap,
    };
}

// How a call runs: what each form is launched with.
struct forms {
    struct attn_prefill_forms has;
    // Of the long form.
    const struct attn_pack_row *row;
    int32_t short_tokens, tiles;
    // Of the short one.
    struct attn_decode_limits needs;
    struct attn_decode_plan decode;
};

static enum attn_status plan_long(const struct attn_device *const device,
                                  const struct attn_prefill_shape *const shape,
                                  const enum attn_prefill_form form, struct forms *const forms)
{
    forms->short_tokens = forms->has.may_be_short ? ATTN_PREFILL_SHORT_TOKENS : 0;
    forms->row = attn_prefill_find_row(device, shape->dtype, shape->head_dim, form);
    if (!forms->row) return fail_unsupported(device, shape->dtype, shape->head_dim, form);
    return find_tiles(device, shape, forms->row->rows, forms->short_tokens, &forms->tiles);
}

// `has_short`: there is a workspace, and the shape has the short form.
static enum attn_status plan_forms(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape,
                                   const enum attn_prefill_form form, const bool has_short,
                                   struct forms *const forms)
{
    *forms = (struct forms){ .has = { false, true } };
    enum attn_status status = ATTN_OK;
    if (has_short) {
        forms->has = attn_prefill_find_forms(shape);
        status = attn_prefill_find_needs(device, shape, &forms->needs);
        if (status == ATTN_OK && forms->has.may_be_short)
            status = attn_prefill_plan_short(device, shape, &forms->needs, &forms->decode);
    }
    return status == ATTN_OK && forms->has.may_be_long ? plan_long(device, shape, form, forms)
                                                       : status;
}

enum attn_status attn_prefill_launch(const struct attn_device *const device,
                                     const struct attn_prefill_params *const params,
                                     const enum attn_prefill_form form, const attn_stream stream)
{
    const struct attn_prefill_shape shape = attn_prefill_shape_of(params);
    const bool is_empty = attn_prefill_is_empty(params);
    const bool has_short = form == ATTN_PREFILL_ANY && params->workspace && !is_empty &&
                           attn_prefill_has_short(device, &shape);
    struct forms forms;
    enum attn_status status = plan_forms(device, &shape, form, has_short, &forms);
    if (status == ATTN_OK && has_short)
        status = attn_prefill_check_workspace(device, params, forms.needs.workspace_bytes,
                                              forms.needs.num_counters);
    if (status != ATTN_OK) return status;
    if (device->info.kind == ATTN_DEVICE_TARGET)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                         "the device is the target %s without a GPU: it has plans only",
                         device->info.target);
    if (is_empty) return ATTN_OK;
    if (forms.has.may_be_short)
        status = attn_prefill_launch_short(device, params, &forms.needs, stream);
    if (status != ATTN_OK || !forms.row) return status;
    struct attn_prefill_args args = fill_args(params, forms.short_tokens, forms.tiles);
    set_boxes(device, forms.row, params, &args);
    const int32_t blocks = count_blocks(device, forms.row, forms.tiles * params->num_q_heads);
    return attn_device_launch(device, forms.row, blocks, &args, stream);
}

// ---- a plan

// sum of min(max(first + r, 0), most) over r = 0 .. count - 1.
static double sum_clamped(const int64_t first, const int64_t count, const int64_t most)
{
    // Up to `low` they are 0, from `high` on `most`.
    int64_t low = first < 0 ? -first : 0, high = most - first;
    low = low < count ? low : count;
    high = high < low ? low : high < count ? high : count;
    const double between = (double) (high - low);
    const double ends = (double) (first + low) + (double) (first + high - 1);
    return between * ends / 2 + (double) (count - high) * (double) most;
}

// Pairs of a query token and a key that it sees, of one sequence.
static double count_pairs(const struct attn_prefill_shape *const shape)
{
    const int64_t behind = (int64_t) shape->q_offset + 1;
    const double seen = shape->causal ? sum_clamped(behind, shape->q_len, shape->kv_len)
                                      : (double) shape->q_len * shape->kv_len;
    return shape->window > 0
               ? seen - sum_clamped(behind - shape->window, shape->q_len, shape->kv_len)
               : seen;
}

// Keys that some query token of a sequence sees.
static int64_t count_seen(const struct attn_prefill_shape *const shape)
{
    int64_t first = 0, behind = shape->kv_len;
    if (shape->q_len == 0) return 0;
    if (shape->causal && (int64_t) shape->q_offset + shape->q_len < behind)
        behind = (int64_t) shape->q_offset + shape->q_len;
    if (shape->window > 0) first = (int64_t) shape->q_offset - shape->window + 1;
    if (first < 0) first = 0;
    return behind > first ? behind - first : 0;
}

static void count_work(const struct attn_prefill_shape *const shape,
                       struct attn_prefill_plan *const plan)
{
    const double element = (double) attn_dtype_size(shape->dtype), batch = shape->batch;
    const double tokens = shape->is_ragged ? shape->num_tokens : batch * shape->q_len;
    plan->other_bytes = 2 * tokens * shape->num_q_heads * shape->head_dim * element;
    if (shape->is_ragged) return;
    plan->kv_bytes =
        2 * batch * (double) count_seen(shape) * shape->num_kv_heads * shape->head_dim * element;
    plan->flops = 4.0 * shape->head_dim * shape->num_q_heads * batch * count_pairs(shape);
}

static enum attn_status plan_launch(const struct attn_device *const device,
                                    const struct attn_prefill_shape *const shape,
                                    struct attn_prefill_plan *const plan)
{
    const enum attn_prefill_form form = shape->rows == ATTN_PREFILL_ROWS ? ATTN_PREFILL_ORIGINAL
                                        : shape->rows                    ? ATTN_PREFILL_TWIN
                                                                         : ATTN_PREFILL_ANY;
    const bool is_empty =
        shape->batch == 0 || (shape->is_ragged ? shape->num_tokens : shape->q_len) == 0;
    struct forms forms;
    const enum attn_status status =
        plan_forms(device, shape, form, !is_empty && attn_prefill_has_short(device, shape), &forms);
    if (status != ATTN_OK) return status;
    plan->kernel = NULL;
    if (forms.row) {
        plan->kernel = forms.row->name;
        plan->rows = forms.row->rows;
        plan->tiles = forms.tiles;
        plan->grid = count_blocks(device, forms.row, forms.tiles * shape->num_q_heads);
        plan->block = attn_pack_row_threads(forms.row);
        plan->smem_bytes = attn_pack_row_smem(forms.row);
    }
    plan->short_kernel = forms.decode.kernel;
    plan->short_grid = forms.decode.grid;
    plan->short_block = forms.decode.block;
    plan->short_smem_bytes = forms.decode.smem_bytes;
    plan->workspace_bytes = forms.needs.workspace_bytes;
    plan->num_counters = forms.needs.num_counters;
    return ATTN_OK;
}

// Into `own`, checked.
static enum attn_status take_shape(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape,
                                   struct attn_prefill_shape *const own)
{
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, shape, "shape is NULL");
    const enum attn_status status =
        attn_params_copy(device->log, device->log_user, "shape", own, sizeof(*own), shape);
    return status == ATTN_OK ? attn_prefill_check_shape(device, own) : status;
}

enum attn_status attn_prefill_plan(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape,
                                   struct attn_prefill_plan *const plan)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, plan, "plan is NULL");
    struct attn_prefill_shape own;
    enum attn_status status = take_shape(device, shape, &own);
    struct attn_prefill_plan full = { .size = (uint32_t) sizeof(full), .kernel = "host executor" };
    if (status == ATTN_OK && device->info.kind != ATTN_DEVICE_HOST)
        status = plan_launch(device, &own, &full);
    if (status != ATTN_OK) return status;
    count_work(&own, &full);
    return attn_result_copy(device->log, device->log_user, "plan", plan, &full, sizeof(full));
}

static enum attn_status find_sizes(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape,
                                   struct attn_decode_limits *const sizes)
{
    struct attn_prefill_shape own;
    const enum attn_status status = take_shape(device, shape, &own);
    if (status != ATTN_OK || !attn_prefill_has_short(device, &own)) return status;
    return attn_prefill_find_needs(device, &own, sizes);
}

enum attn_status attn_prefill_workspace(const struct attn_device *const device,
                                        const struct attn_prefill_shape *const shape,
                                        size_t *const bytes)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, bytes, "bytes is NULL: it receives the size");
    *bytes = 0;
    struct attn_decode_limits sizes = { 0 };
    const enum attn_status status = find_sizes(device, shape, &sizes);
    if (status == ATTN_OK) *bytes = sizes.workspace_bytes;
    return status;
}

enum attn_status attn_prefill_counters(const struct attn_device *const device,
                                       const struct attn_prefill_shape *const shape,
                                       int32_t *const count)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, count, "count is NULL: it receives the number of counters");
    *count = 0;
    struct attn_decode_limits sizes = { 0 };
    const enum attn_status status = find_sizes(device, shape, &sizes);
    if (status == ATTN_OK) *count = sizes.num_counters;
    return status;
}

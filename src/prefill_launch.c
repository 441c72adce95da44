/* SPDX-License-Identifier: Apache-2.0 */
#include "prefill_launch.h"

#include "boxes.h"
#include "device.h"
#include "kernels/prefill/prefill_params.h"
#include "pack_scan.h"
#include "prefill_check.h"
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

// Tiles of `rows` query tokens that the sequences have together, at most: where they differ, each
// but the first may begin a tile with one token.
static int64_t count_tiles(const struct attn_prefill_shape *const shape, const int32_t rows)
{
    if (!shape->is_ragged)
        return (int64_t) shape->batch * (((int64_t) shape->q_len + rows - 1) / rows);
    const int64_t tokens = shape->num_tokens;
    const int64_t sequences = shape->batch < tokens ? shape->batch : tokens;
    return (tokens + sequences * (rows - 1)) / rows;
}

// Blocks are counted in 32 bits.
static enum attn_status find_tiles(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape, const int32_t rows,
                                   int32_t *const tiles)
{
    const int64_t count = count_tiles(shape, rows);
    if (count > INT32_MAX / shape->num_q_heads)
        return attn_fail(
            device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
            "%lld tiles of %d query tokens with %d query heads are more than %d blocks",
            (long long) count, rows, shape->num_q_heads, INT32_MAX);
    *tiles = (int32_t) count;
    return ATTN_OK;
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
                                          const int32_t tiles)
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
        .causal = params->causal,
        .window = params->window,
        .scale = params->scale,
        .softcap = params->softcap,
    };
}

enum attn_status attn_prefill_launch(const struct attn_device *const device,
                                     const struct attn_prefill_params *const params,
                                     const enum attn_prefill_form form, const attn_stream stream)
{
    const struct attn_prefill_shape shape = attn_prefill_shape_of(params);
    const struct attn_pack_row *const row =
        attn_prefill_find_row(device, params->dtype, params->head_dim, form);
    if (!row) return fail_unsupported(device, params->dtype, params->head_dim, form);
    int32_t tiles;
    const enum attn_status status = find_tiles(device, &shape, row->rows, &tiles);
    if (status != ATTN_OK) return status;
    if (device->info.kind == ATTN_DEVICE_TARGET)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                         "the device is the target %s without a GPU: it has plans only",
                         device->info.target);
    if (attn_prefill_is_empty(params)) return ATTN_OK;
    struct attn_prefill_args args = fill_args(params, tiles);
    set_boxes(device, row, params, &args);
    return attn_device_launch(device, row, tiles * params->num_q_heads, &args, stream);
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
    const struct attn_pack_row *const row =
        attn_prefill_find_row(device, shape->dtype, shape->head_dim, form);
    if (!row) return fail_unsupported(device, shape->dtype, shape->head_dim, form);
    const enum attn_status status = find_tiles(device, shape, row->rows, &plan->tiles);
    if (status != ATTN_OK) return status;
    plan->kernel = row->name;
    plan->rows = row->rows;
    plan->grid = plan->tiles * shape->num_q_heads;
    plan->block = attn_pack_row_threads(row);
    plan->smem_bytes = attn_pack_row_smem(row);
    return ATTN_OK;
}

enum attn_status attn_prefill_plan(const struct attn_device *const device,
                                   const struct attn_prefill_shape *const shape,
                                   struct attn_prefill_plan *const plan)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, plan, "plan is NULL");
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, shape, "shape is NULL");
    struct attn_prefill_shape own;
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "shape", &own, sizeof(own), shape);
    if (status == ATTN_OK) status = attn_prefill_check_shape(device, &own);
    struct attn_prefill_plan full = { .size = (uint32_t) sizeof(full), .kernel = "host executor" };
    if (status == ATTN_OK && device->info.kind != ATTN_DEVICE_HOST)
        status = plan_launch(device, &own, &full);
    if (status != ATTN_OK) return status;
    count_work(&own, &full);
    return attn_result_copy(device->log, device->log_user, "plan", plan, &full, sizeof(full));
}

/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode: which kernel, how it is launched, and what it needs.
#include "attn/decode.h"

#include "buffers.h"
#include "decode_boxes.h"
#include "decode_check.h"
#include "decode_core.h"
#include "device.h"
#include "host/reference.h"
#include "kernels/decode/decode_params.h"
#include "pack_scan.h"
#include "status.h"

#include <string.h>

#define WORKSPACE_UNIT 256
// Units of leaves, and pieces of sequences, of a launch: sums of two of them fit an int32.
#define MAX_UNITS (1 << 29)
// Leaves of all lanes, in such units: there is one of 2^31 of them.
#define MAX_ITEMS ((int64_t) 1 << 31)

_Static_assert(ATTN_DECODE_MIN_PIECE == ATTN_SPLITK_MIN_KEYS_PER_SPLIT,
               "kernels cut pieces as splitk.h says");

// How a shape runs on a device.
struct launch {
    // NULL on the host; only num_splits is set then.
    const struct attn_pack_row *row;
    // Pieces of a sequence: as the policy says, 0 for "by length"; and as the kernel cuts.
    int32_t num_splits, splits;
    int32_t group_rows, row_groups, lanes;
    // A piece begins with a leaf, and a unit.
    bool begins_with_unit;
    // Leaves of the longest piece.
    int64_t piece_leaves;
    int32_t min_shift;
    int32_t most_units;
    int32_t num_roots, root_levels, stack_slots;
    int32_t grid, block, smem_bytes;
    // The pieces' results come first, the slots after them.
    size_t pieces_bytes, workspace_bytes;
    int32_t num_counters;
};

// Keys that a row of the table can hold; lengths are int32.
static int32_t table_keys(const int32_t max_pages_per_seq, const int32_t page_size)
{
    const int64_t keys = (int64_t) max_pages_per_seq * page_size;
    return keys > INT32_MAX ? INT32_MAX : (int32_t) keys;
}

static size_t round_up(const size_t bytes)
{
    return (bytes + WORKSPACE_UNIT - 1) / WORKSPACE_UNIT * WORKSPACE_UNIT;
}

static enum attn_status fail_unsupported(const struct attn_device *const device,
                                         const struct attn_decode_shape *const shape)
{
    char kernels[640];
    attn_pack_name_rows(device->pack, ATTN_ROW_DECODE, kernels, sizeof(kernels));
    return attn_fail(
        device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
        "target %s has no decode kernel for q %s, KV %s, head_dim %d, %d query heads a KV "
        "head%s; it has: %s",
        device->info.target, attn_dtype_name(shape->q_dtype), attn_dtype_name(shape->kv_dtype),
        shape->head_dim, shape->num_q_heads / shape->num_kv_heads,
        shape->has_skip_table ? ", with a skip_table (has_skip_table is 1)" : "", kernels);
}

// Query rows of a KV head: at most 2^31 / num_kv_heads heads a token.
static int32_t count_rows(const struct attn_decode_shape *const shape)
{
    const int64_t rows = (int64_t) (shape->num_q_heads / shape->num_kv_heads) * shape->q_len;
    return rows > INT32_MAX ? INT32_MAX : (int32_t) rows;
}

// The first row that accepts the shape: rows stand in order of preference. With skip-softmax all
// query heads of a KV head have a say in what is left out, so one lane has them. A kernel of
// a warpgroup has whole sequences and all rows together: what split counts do not have.
static const struct attn_pack_row *find_row(const struct attn_pack *const pack,
                                            const struct attn_decode_shape *const shape,
                                            const int32_t num_splits)
{
    const int32_t rows = count_rows(shape);
    const bool skips = shape->has_skip_table;
    for (uint32_t i = 0; i < pack->num_rows; i++) {
        const struct attn_pack_row *const row = &pack->rows[i];
        if (row->op == ATTN_ROW_DECODE && row->q == (int32_t) shape->q_dtype &&
            row->kv == (int32_t) shape->kv_dtype && row->head_dim == shape->head_dim &&
            (row->max_ratio == 0 || rows <= row->max_ratio) && skips == (row->ahead > 0) &&
            (!skips || rows <= row->rows) && rows >= row->min_rows &&
            (row->warpgroups == 0 || num_splits == 0))
            return row;
    }
    return NULL;
}

// Under policy chunk a kernel cuts sequences at its own tiles alone.
static bool fits_policy(const struct attn_device *const device,
                        const struct attn_pack_row *const row)
{
    const struct attn_splitk_policy policy = device->info.splitk_policy;
    return policy.kind != ATTN_SPLITK_CHUNK || policy.count == 0 || policy.count == row->tile;
}

static enum attn_status check_policy(const struct attn_device *const device,
                                     const struct attn_pack_row *const row)
{
    if (fits_policy(device, row)) return ATTN_OK;
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "the split-K policy is chunk:%d, but kernel %s has chunks of %d keys: use "
                     "chunk",
                     device->info.splitk_policy.count, row->name, row->tile);
}

// Blocks that run at the same time, at most `limit` (0: no limit).
static int32_t count_slots(const struct attn_device *const device,
                           const struct attn_pack_row *const row, const int32_t limit)
{
    const int64_t slots = (int64_t) device->info.sm_count * row->per_sm;
    const int32_t most = limit > 0 && limit < ATTN_DECODE_MAX_GRID ? limit : ATTN_DECODE_MAX_GRID;
    return slots > most ? most : (int32_t) slots;
}

static enum attn_status fail_items(const struct attn_device *const device,
                                   const struct attn_decode_shape *const shape,
                                   const struct launch *const launch, const int64_t lanes)
{
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "batch is %d: with %lld KV heads and row groups and %d pieces a sequence "
                     "that is more than %d pieces of work",
                     shape->batch, (long long) lanes, launch->splits, MAX_UNITS);
}

// A lane has the query rows of a group that share its loads: one of them where a launch that the
// original would not pack is not split, else as many as the kernel takes.
static enum attn_status set_lanes(const struct attn_device *const device,
                                  const struct attn_decode_shape *const shape,
                                  struct launch *const launch)
{
    const bool packed =
        launch->num_splits != 1 || shape->has_skip_table ||
        (device->info.gqa_pack &&
         attn_gqa_pack_shape_ok(shape->num_q_heads, shape->num_kv_heads, shape->head_dim));
    launch->group_rows = packed ? launch->row->rows : 1;
    launch->row_groups = (count_rows(shape) - 1) / launch->group_rows + 1;
    const int64_t lanes = (int64_t) shape->num_kv_heads * launch->row_groups;
    if (lanes > MAX_UNITS / launch->splits / shape->batch)
        return fail_items(device, shape, launch, lanes);
    launch->lanes = (int32_t) lanes;
    return ATTN_OK;
}

static void set_leaves(const struct attn_decode_shape *const shape, struct launch *const launch)
{
    int32_t keys = table_keys(shape->max_pages_per_seq, shape->page_size);
    if (launch->splits > 1) {
        // A window of each token's own: what the first one has, and the keys of the others.
        const int64_t window = (int64_t) shape->window + shape->q_len - 1;
        const int32_t attended = shape->window > 0 && window < keys ? (int32_t) window : keys;
        int32_t piece = (attended - 1) / launch->splits + 1;
        if (piece < ATTN_DECODE_MIN_PIECE) piece = ATTN_DECODE_MIN_PIECE;
        keys = piece < attended ? piece : attended;
    }
    launch->piece_leaves = (keys - 1) / launch->row->tile + 1;
    const int64_t leaves = (int64_t) shape->batch * launch->splits * launch->piece_leaves;
    while (leaves >> launch->min_shift >= MAX_UNITS ||
           (leaves >> launch->min_shift) * launch->lanes > MAX_ITEMS)
        launch->min_shift++;
}

// Roots: those of pieces of more than one unit. Such a piece has more leaves than a unit, one unit
// more than these would fill, and another one where it begins within one.
static int64_t count_roots(const struct launch *const launch, const int64_t pieces)
{
    if (launch->piece_leaves == 1) return 0;
    const int64_t extra = launch->begins_with_unit ? 1 : 2;
    const int64_t full = launch->most_units / launch->lanes + 1;
    const int64_t long_pieces = pieces < full ? pieces : full;
    const int64_t units = full + long_pieces * extra;
    const int64_t most = pieces * ((launch->piece_leaves >> launch->min_shift) + extra);
    return (units < most ? units : most) * launch->lanes;
}

static int32_t most_block_units(const struct attn_pack_row *const row)
{
    return row->warpgroups > 0 ? ATTN_DECODE_GROUP_UNITS : ATTN_DECODE_BLOCK_UNITS;
}

// For a grid of at most `slots` blocks, of so many units each, and the most leaves that lengths can
// come to.
static void set_units(const struct attn_decode_shape *const shape, struct launch *const launch,
                      const int32_t slots, const int32_t block_units)
{
    const struct attn_pack_row *const row = launch->row;
    const int64_t pieces = (int64_t) shape->batch * launch->splits;
    launch->grid = slots;
    launch->most_units = slots * block_units;
    const int64_t roots = count_roots(launch, pieces);
    launch->num_roots = (int32_t) roots;
    // At most one block of each level waits, and one from before an aligned one. The lowest levels
    // have a place elsewhere.
    int32_t levels = 0;
    while ((int64_t) 1 << levels < launch->piece_leaves) levels++;
    launch->stack_slots = (levels > row->levels ? levels - row->levels : 0) + 2;
    const int32_t fan_log = ATTN_DECODE_FAN_LOG(row->head_dim, row->rows);
    launch->root_levels = 0;
    while (roots > 0 && (launch->piece_leaves + 1) >> (launch->root_levels * fan_log) > 0)
        launch->root_levels++;
    const int64_t floats =
        (roots + (int64_t) slots * launch->stack_slots) * attn_pack_row_slot_floats(row);
    launch->workspace_bytes = launch->pieces_bytes + round_up((size_t) floats * sizeof(float));
}

static enum attn_status set_counters(const struct attn_device *const device,
                                     const struct attn_decode_shape *const shape,
                                     struct launch *const launch)
{
    const int64_t of_roots = (int64_t) launch->root_levels * launch->num_roots;
    const int64_t of_sequences = launch->splits > 1 ? (int64_t) shape->batch * launch->lanes : 0;
    const int64_t counters = 2 + of_roots + of_sequences;
    if (counters > INT32_MAX)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                         "batch is %d: with %d KV heads and row groups and %d pieces a sequence it "
                         "needs %lld counters, more than %d",
                         shape->batch, launch->lanes, launch->splits, (long long) counters,
                         INT32_MAX);
    launch->num_counters = (int32_t) counters;
    return ATTN_OK;
}

// For the whole device.
static enum attn_status set_geometry(const struct attn_device *const device,
                                     const struct attn_decode_shape *const shape,
                                     struct launch *const launch)
{
    const struct attn_device_info *const info = &device->info;
    launch->block = attn_pack_row_threads(launch->row);
    launch->smem_bytes = attn_pack_row_smem(launch->row);
    if (shape->batch == 0) return ATTN_OK;
    launch->splits = launch->num_splits > 1 ? launch->num_splits : 1;
    // A window may begin anywhere. What a shape needs does not depend on whether there is one.
    if (launch->splits > 1) launch->begins_with_unit = true;
    if ((int64_t) shape->batch * launch->splits > MAX_UNITS)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                         "batch is %d: with %d pieces a sequence that is more than %d",
                         shape->batch, launch->splits, MAX_UNITS);
    const enum attn_status status = set_lanes(device, shape, launch);
    if (status != ATTN_OK) return status;
    set_leaves(shape, launch);
    if (launch->splits > 1) {
        // Of one query token.
        const int64_t results =
            attn_splitk_workspace_slots(info->splitk_policy, info->declared_sm_count,
                                        shape->num_q_heads, shape->batch);
        launch->pieces_bytes =
            round_up((size_t) attn_splitk_workspace_bytes(attn_size_times(results, shape->q_len),
                                                          shape->head_dim));
    }
    set_units(shape, launch, count_slots(device, launch->row, 0), most_block_units(launch->row));
    return set_counters(device, shape, launch);
}

// For a limited grid, within the workspace and the counters of the whole device.
static void limit_grid(const struct attn_device *const device,
                       const struct attn_decode_shape *const shape, struct launch *const launch)
{
    const size_t most = launch->workspace_bytes;
    int32_t slots = count_slots(device, launch->row, device->grid_limit);
    if (slots >= launch->grid) return;
    do set_units(shape, launch, slots--, most_block_units(launch->row));
    while (launch->workspace_bytes > most && slots > 0);
}

// As many blocks and units as fit what is given.
static enum attn_status fit_launch(const struct attn_device *const device,
                                   const struct attn_decode_shape *const shape,
                                   struct launch *const launch,
                                   const struct attn_decode_limits *const limits)
{
    int32_t slots = launch->grid, units = most_block_units(launch->row);
    while (launch->workspace_bytes > limits->workspace_bytes ||
           launch->num_counters > limits->num_counters) {
        if (units > 1)
            units /= 2;
        else if (slots > 1)
            slots -= slots / 8 + 1;
        else
            break;
        set_units(shape, launch, slots, units);
        const enum attn_status status = set_counters(device, shape, launch);
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

// Pieces of a sequence, as the policy has them; skip-softmax has pieces of its own.
static int32_t count_splits(const struct attn_device *const device,
                            const struct attn_decode_shape *const shape)
{
    if (shape->has_skip_table) return 0;
    return attn_splitk_num_splits(device->info.splitk_policy, device->info.declared_sm_count,
                                  shape->num_q_heads, shape->batch, shape->max_decode_seqs);
}

// The pieces of a shape that was checked, and on a GPU the kernel, if there is one.
static void begin_launch(const struct attn_device *const device,
                         const struct attn_decode_shape *const shape,
                         const struct attn_decode_limits *const limits, struct launch *const launch)
{
    *launch = (struct launch){ .begins_with_unit = limits && shape->window == 0 };
    if (!limits) launch->num_splits = count_splits(device, shape);
    if (device->info.kind == ATTN_DEVICE_HOST) return;
    launch->row = find_row(device->pack, shape, launch->num_splits);
}

// For a shape that was checked.
static enum attn_status plan_launch(const struct attn_device *const device,
                                    const struct attn_decode_shape *const shape,
                                    const struct attn_decode_limits *const limits,
                                    struct launch *const launch)
{
    begin_launch(device, shape, limits, launch);
    if (device->info.kind == ATTN_DEVICE_HOST) return ATTN_OK;
    if (!launch->row) return fail_unsupported(device, shape);
    enum attn_status status = limits ? ATTN_OK : check_policy(device, launch->row);
    if (status == ATTN_OK) status = set_geometry(device, shape, launch);
    if (status != ATTN_OK || !limits || shape->batch == 0) return status;
    return fit_launch(device, shape, launch, limits);
}

static enum attn_status plan_shape(const struct attn_device *const device,
                                   const struct attn_decode_shape *const shape,
                                   struct attn_decode_shape *const own, struct launch *const launch)
{
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, shape, "shape is NULL");
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "shape", own, sizeof(*own), shape);
    if (status == ATTN_OK) status = attn_decode_check_shape(device, own);
    return status == ATTN_OK ? plan_launch(device, own, NULL, launch) : status;
}

static void count_work(const struct attn_decode_shape *const shape,
                       struct attn_decode_plan *const plan)
{
    const int32_t keys = table_keys(shape->max_pages_per_seq, shape->page_size);
    const double attended = shape->window > 0 && shape->window < keys ? shape->window : keys;
    // The first attended key may lie anywhere in its page; the table ends with the last.
    const int64_t first_page = (keys - (int64_t) attended) / shape->page_size;
    const double pages = (double) ((keys - 1) / shape->page_size + 1 - first_page);
    const double batch = shape->batch;
    const double q_elements = batch * shape->q_len * shape->num_q_heads * shape->head_dim;
    const double kv_elements = batch * shape->num_kv_heads * attended * shape->head_dim;
    plan->kv_bytes = 2 * kv_elements * (double) attn_dtype_size(shape->kv_dtype);
    plan->other_bytes =
        2 * q_elements * (double) attn_dtype_size(shape->q_dtype) + 4 * batch * (pages + 1);
    plan->flops = 4 * q_elements * attended;
}

static int32_t chunk_keys(const struct attn_device *const device, const struct launch *const launch)
{
    if (device->info.splitk_policy.kind != ATTN_SPLITK_CHUNK) return 0;
    return launch->row ? launch->row->tile : device->info.splitk_policy.count;
}

static struct attn_decode_plan describe_launch(const struct attn_decode_shape *const shape,
                                               const struct launch *const launch)
{
    struct attn_decode_plan plan = {
        .size = (uint32_t) sizeof(plan),
        .kernel = launch->row ? launch->row->name : "host executor",
        .num_splits = launch->num_splits,
        .grid = launch->grid,
        .block = launch->block,
        .smem_bytes = launch->smem_bytes,
        .workspace_bytes = launch->workspace_bytes,
        .num_counters = launch->num_counters,
    };
    count_work(shape, &plan);
    return plan;
}

enum attn_status attn_decode_plan(const struct attn_device *const device,
                                  const struct attn_decode_shape *const shape,
                                  struct attn_decode_plan *const plan)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, plan, "plan is NULL");
    struct attn_decode_shape own;
    struct launch launch;
    const enum attn_status status = plan_shape(device, shape, &own, &launch);
    if (status != ATTN_OK) return status;
    struct attn_decode_plan full = describe_launch(&own, &launch);
    full.chunk_keys = chunk_keys(device, &launch);
    return attn_result_copy(device->log, device->log_user, "plan", plan, &full, sizeof(full));
}

// Makes room for a call of this shape, if there is a kernel for it.
static enum attn_status cover(const struct attn_device *const device,
                              const struct attn_decode_shape *const shape,
                              struct launch *const launch)
{
    struct launch own;
    begin_launch(device, shape, NULL, &own);
    if (!own.row || !fits_policy(device, own.row)) return ATTN_OK;
    const enum attn_status status = set_geometry(device, shape, &own);
    if (status != ATTN_OK) return status;
    if (own.workspace_bytes > launch->workspace_bytes)
        launch->workspace_bytes = own.workspace_bytes;
    if (own.num_counters > launch->num_counters) launch->num_counters = own.num_counters;
    return ATTN_OK;
}

// The workspace and the counters of calls up to a shape: with fewer query tokens, or without a
// skip_table, another kernel may run, which needs more.
static enum attn_status find_sizes(const struct attn_device *const device,
                                   const struct attn_decode_shape *const shape,
                                   struct launch *const launch)
{
    struct attn_decode_shape own;
    enum attn_status status = plan_shape(device, shape, &own, launch);
    if (status != ATTN_OK || !launch->row) return status;
    const int32_t most = own.has_skip_table ? own.q_len : own.q_len - 1;
    own.has_skip_table = 0;
    for (own.q_len = 1; own.q_len <= most && status == ATTN_OK; own.q_len++)
        status = cover(device, &own, launch);
    return status;
}

enum attn_status attn_decode_workspace(const struct attn_device *const device,
                                       const struct attn_decode_shape *const shape,
                                       size_t *const bytes)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, bytes, "bytes is NULL: it receives the size");
    *bytes = 0;
    struct launch launch;
    const enum attn_status status = find_sizes(device, shape, &launch);
    if (status == ATTN_OK) *bytes = launch.workspace_bytes;
    return status;
}

enum attn_status attn_decode_counters(const struct attn_device *const device,
                                      const struct attn_decode_shape *const shape,
                                      int32_t *const count)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, count, "count is NULL: it receives the number of counters");
    *count = 0;
    struct launch launch;
    const enum attn_status status = find_sizes(device, shape, &launch);
    if (status == ATTN_OK) *count = launch.num_counters;
    return status;
}

static enum attn_status fail_no_gpu(const struct attn_device *const device)
{
    return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                     "the device is the target %s without a GPU: it has sizes and plans only",
                     device->info.target);
}

enum attn_status attn_decode_reset_counters(struct attn_device *const device,
                                            int32_t *const counters, const int32_t count,
                                            const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, count >= 0, "count is %d: it may not be negative",
                 count);
    ATTN_REQUIRE(device->log, device->log_user, counters || count == 0,
                 "counters is NULL, but count is %d", count);
    ATTN_REQUIRE(device->log, device->log_user, (uintptr_t) counters % sizeof(int32_t) == 0,
                 "counters is %p: it has to be aligned to 4 bytes", (void *) counters);
    if (device->info.kind == ATTN_DEVICE_TARGET) return fail_no_gpu(device);
    if (count == 0) return ATTN_OK;
    if (device->info.kind == ATTN_DEVICE_HOST) {
        memset(counters, 0, (size_t) count * sizeof(*counters));
        return ATTN_OK;
    }
    bool pushed;
    attn_cu_result result = attn_device_enter(device, &pushed);
    if (result == ATTN_CU_SUCCESS)
        result = device->driver->memset_async((attn_cu_deviceptr) (uintptr_t) counters, 0,
                                              (size_t) count, stream);
    attn_device_leave(device, pushed);
    return result == ATTN_CU_SUCCESS
               ? ATTN_OK
               : attn_device_cu_fail(device, result, "the counters cannot be zeroed");
}

static struct attn_decode_args fill_args(const struct attn_decode_params *const params,
                                         const struct attn_decode_chunks *const chunks,
                                         const struct launch *const launch)
{
    static const struct attn_decode_chunks none;
    const struct attn_decode_chunks *const own = chunks ? chunks : &none;
    const int32_t ratio = params->num_q_heads / params->num_kv_heads;
    uint32_t page_magic, splits_magic, ratio_magic, groups_magic, lanes_magic, grid_magic;
    int32_t page_shift, splits_shift, ratio_shift, groups_shift, lanes_shift, grid_shift;
    attn_magic(ratio, &ratio_magic, &ratio_shift);
    attn_magic(params->page_size, &page_magic, &page_shift);
    attn_magic(launch->splits, &splits_magic, &splits_shift);
    attn_magic(launch->row_groups, &groups_magic, &groups_shift);
    attn_magic(launch->lanes, &lanes_magic, &lanes_shift);
    attn_magic(launch->grid, &grid_magic, &grid_shift);
    const bool may_be_late =
        params->batch > 1 && launch->splits == 1 && launch->min_shift == 0 && !chunks;
    const int32_t least_late = launch->grid * ATTN_DECODE_LATE_LEAVES / launch->lanes;
    return (struct attn_decode_args){
        .q = params->q,
        .o = params->o,
        .k = params->k_pool,
        .v = params->v_pool,
        .block_table = params->block_table,
        .v_table = params->v_block_table != params->block_table ? params->v_block_table : NULL,
        .tree_mask = params->tree_mask,
        .seq_lens = params->seq_lens,
        .sinks = params->sinks,
        .lse = params->lse,
        .k_scales = params->k_scales,
        .v_scales = params->v_scales,
        .fault = params->fault,
        .slots = (float *) ((char *) params->workspace + launch->pieces_bytes),
        .pieces = launch->splits > 1 ? params->workspace : NULL,
        .counters = params->counters,
        .q_stride = params->q_stride,
        .q_token_stride = params->q_token_stride,
        .k_page_stride = params->k_page_stride,
        .k_token_stride = params->k_token_stride,
        .k_head_stride = params->k_head_stride,
        .v_page_stride = params->v_page_stride,
        .v_token_stride = params->v_token_stride,
        .v_head_stride = params->v_head_stride,
        .num_pages = params->num_pages,
        .table_stride = params->table_stride,
        .table_columns = params->max_pages_per_seq,
        .page_size = params->page_size,
        .page_magic = page_magic,
        .page_shift = page_shift,
        .max_keys = table_keys(params->max_pages_per_seq, params->page_size),
        .batch = params->batch,
        .q_len = params->q_len,
        .mask_words = params->mask_words,
        .num_q_heads = params->num_q_heads,
        .num_kv_heads = params->num_kv_heads,
        .ratio = ratio,
        .ratio_magic = ratio_magic,
        .ratio_shift = ratio_shift,
        .group_rows = launch->group_rows,
        .row_groups = launch->row_groups,
        .groups_magic = groups_magic,
        .groups_shift = groups_shift,
        .window = params->window,
        .window_is_shared = params->window_form == ATTN_WINDOW_SHARED,
        .splits = launch->splits,
        .splits_magic = splits_magic,
        .splits_shift = splits_shift,
        .lanes = launch->lanes,
        .lanes_magic = lanes_magic,
        .lanes_shift = lanes_shift,
        .grid_magic = grid_magic,
        .grid_shift = grid_shift,
        .num_roots = launch->num_roots,
        .root_levels = launch->root_levels,
        .stack_slots = launch->stack_slots,
        .min_shift = launch->min_shift,
        .most_units = launch->most_units,
        .least_late_leaves = may_be_late ? (uint32_t) least_late : UINT32_MAX,
        .may_begin_within = !launch->begins_with_unit,
        .scale = params->scale,
        .softcap = params->softcap,
        .k_scale = params->k_scale,
        .v_scale = params->v_scale,
        .skip_table = params->skip_table,
        .skip_table_length = params->skip_table ? params->skip_table_length : 0,
        .dropped = params->dropped_blocks,
        .most_tokens = own->most_tokens,
        .num_tokens = own->num_tokens,
        .kv_len = own->kv_len,
        .q_offset = own->q_offset,
        .cu_seqlens = own->cu_seqlens,
        .q_offsets = own->q_offsets,
    };
}

static enum attn_status launch_kernel(const struct attn_device *const device,
                                      const struct attn_decode_params *const params,
                                      const struct attn_decode_chunks *const chunks,
                                      const struct attn_decode_shape *const shape,
                                      struct launch *const launch, const attn_stream stream)
{
    if (device->grid_limit > 0) limit_grid(device, shape, launch);
    struct attn_decode_args args = fill_args(params, chunks, launch);
    attn_decode_set_boxes(device, params, launch->row, &args);
    return attn_device_launch(device, launch->row, launch->grid, &args, stream);
}

enum attn_status attn_decode_run_within(struct attn_device *const device,
                                        const struct attn_decode_params *const params,
                                        const struct attn_decode_limits *const limits,
                                        const attn_stream stream)
{
    struct attn_decode_params own = *params;
    struct launch launch;
    const struct attn_decode_shape shape = attn_decode_shape_of(&own);
    enum attn_status status = attn_decode_check_shape(device, &shape);
    if (status == ATTN_OK) status = attn_decode_check_params(device, &own);
    if (status == ATTN_OK) status = plan_launch(device, &shape, limits, &launch);
    if (status == ATTN_OK)
        status =
            attn_decode_check_workspace(device, &own, launch.workspace_bytes, launch.num_counters);
    if (status != ATTN_OK) return status;
    if (device->info.kind == ATTN_DEVICE_TARGET) return fail_no_gpu(device);
    if (own.batch == 0) return ATTN_OK;
    if (device->info.kind != ATTN_DEVICE_HOST)
        return launch_kernel(device, &own, NULL, &shape, &launch, stream);
    if (attn_reference_decode(&own) == 0) return ATTN_OK;
    return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_MEMORY,
                     "out of memory in the host executor");
}

// ---- chunks of prompts

bool attn_decode_has_kernel(const struct attn_device *const device,
                            const struct attn_decode_shape *const shape)
{
    return find_row(device->pack, shape, 0) != NULL;
}

enum attn_status attn_decode_plan_within(const struct attn_device *const device,
                                         const struct attn_decode_shape *const shape,
                                         const struct attn_decode_limits *const limits,
                                         struct attn_decode_plan *const plan)
{
    struct launch launch;
    const enum attn_status status = plan_launch(device, shape, limits, &launch);
    if (status != ATTN_OK) return status;
    *plan = describe_launch(shape, &launch);
    plan->chunk_keys = launch.row->tile;
    return ATTN_OK;
}

enum attn_status attn_decode_run_chunks(const struct attn_device *const device,
                                        const struct attn_decode_params *const params,
                                        const struct attn_decode_chunks *const chunks,
                                        const struct attn_decode_limits *const limits,
                                        const attn_stream stream)
{
    struct launch launch;
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    const enum attn_status status = plan_launch(device, &shape, limits, &launch);
    if (status != ATTN_OK) return status;
    return launch_kernel(device, params, chunks, &shape, &launch, stream);
}

enum attn_status attn_decode(struct attn_device *const device,
                             const struct attn_decode_params *const params,
                             const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, params, "params is NULL");
    struct attn_decode_params own;
    const enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status != ATTN_OK) return status;
    return attn_decode_run_within(device, &own, NULL, stream);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "tiled_launch.h"

#include "kernels/tiled/tiled_params.h"
#include "pack_scan.h"
#include "status.h"

#include <stdio.h>

// Of m, l and o in one allocation.
#define STATE_ALIGNMENT 256
// Blocks an SM for what is done to rows of the state: enough loads in flight.
#define ROW_BLOCKS_PER_SM 8

// Partials go by way of the workspace where lanes are few for the SMs, by this factor, and a tile
// has at least so many units: below, two launches cost more than they gain.
#define FEW_LANES 4
#define MIN_UNITS 256
// Of the workspace; larger tiles take several turns. It fits an L2 beside K and V in flight.
#define MAX_PARTIALS_BYTES ((int64_t) 32 << 20)
// Turns of a tile at most.
#define MAX_TURNS 64

static int64_t divide_up(const int64_t number, const int64_t by)
{
    return (number + by - 1) / by;
}

// ---- sizes

static int32_t ratio_of(const struct attn_tiled_dims *const dims)
{
    return dims->num_q_heads / dims->num_kv_heads;
}

static int32_t count_groups(const struct attn_tiled_dims *const dims)
{
    return (int32_t) divide_up(ratio_of(dims), ATTN_TILED_ROWS);
}

static int64_t count_lanes(const struct attn_tiled_dims *const dims, const int32_t num_seqs)
{
    return (int64_t) num_seqs * dims->num_kv_heads * count_groups(dims);
}

static int32_t count_lane_rows(const struct attn_tiled_dims *const dims)
{
    const int32_t ratio = ratio_of(dims);
    return ratio < ATTN_TILED_ROWS ? ratio : ATTN_TILED_ROWS;
}

static int64_t count_parts(const struct attn_tiled_dims *const dims)
{
    return divide_up(dims->block_size, ATTN_TILED_KEYS);
}

// Units of a lane's tile at most: below 2^58.
static int64_t count_units(const struct attn_tiled_dims *const dims)
{
    return dims->tile_capacity * count_parts(dims);
}

// Of a unit of all these lanes: o, m and l of each row.
static int64_t count_unit_bytes(const struct attn_tiled_dims *const dims, const int64_t lanes)
{
    return lanes * count_lane_rows(dims) * (dims->head_dim + 2) * (int64_t) sizeof(float);
}

static bool are_few(const struct attn_tiled_gpu *const gpu, const int64_t lanes)
{
    return lanes * FEW_LANES <= gpu->device->info.sm_count && count_units(&gpu->dims) >= MIN_UNITS;
}

// Units of a turn: a multiple of ATTN_TILED_CHUNK, 0 if partials are folded at once.
static int64_t find_range(const struct attn_tiled_gpu *const gpu, const int64_t lanes)
{
    const int64_t units = count_units(&gpu->dims), chunk = ATTN_TILED_CHUNK;
    if (!are_few(gpu, lanes)) return 0;
    const int64_t most = gpu->partials_bytes / count_unit_bytes(&gpu->dims, lanes) / chunk * chunk;
    const int64_t all = divide_up(units, chunk) * chunk;
    const int64_t range = most < all ? most : all;
    return range > 0 && divide_up(units, range) <= MAX_TURNS ? range : 0;
}

// What the workspace of the calls with most lanes that are still few takes, up to its limit.
static int64_t find_partials_bytes(const struct attn_tiled_gpu *const gpu)
{
    const struct attn_tiled_dims *const dims = &gpu->dims;
    const int64_t own = count_lanes(dims, 1), few = gpu->device->info.sm_count / FEW_LANES / own;
    const int64_t seqs = few < dims->max_seqs ? few : dims->max_seqs;
    if (seqs == 0 || !are_few(gpu, own)) return 0;
    const int64_t unit = count_unit_bytes(dims, own) * seqs;
    const int64_t units = divide_up(count_units(dims), ATTN_TILED_CHUNK) * ATTN_TILED_CHUNK;
    return units > MAX_PARTIALS_BYTES / unit ? MAX_PARTIALS_BYTES : units * unit;
}

// ---- the kernel, and memory

static enum attn_status find_row(struct attn_tiled_gpu *const gpu)
{
    const struct attn_device *const device = gpu->device;
    const struct attn_tiled_dims *const dims = &gpu->dims;
    char kernels[512];
    for (uint32_t i = 0; i < device->pack->num_rows; i++) {
        const struct attn_pack_row *const row = &device->pack->rows[i];
        if (row->op != ATTN_ROW_TILED || row->q != (int32_t) dims->dtype ||
            row->head_dim != dims->head_dim)
            continue;
        gpu->row = row;
        return ATTN_OK;
    }
    attn_pack_name_rows(device->pack, ATTN_ROW_TILED, kernels, sizeof(kernels));
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "target %s has no tiled kernel for %s, head_dim %d; it has: %s",
                     device->info.target, attn_dtype_name(dims->dtype), dims->head_dim,
                     *kernels ? kernels : "none");
}

// Blocks are counted in 32 bits, of a fold of partials ATTN_TILED_ROWS a lane.
static enum attn_status check_lanes(const struct attn_tiled_gpu *const gpu)
{
    const struct attn_device *const device = gpu->device;
    const int64_t lanes = count_lanes(&gpu->dims, gpu->dims.max_seqs);
    if (lanes <= INT32_MAX) return ATTN_OK;
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "max_seqs is %d, num_kv_heads %d: with groups of %d query heads these are "
                     "%lld blocks, more than %d",
                     gpu->dims.max_seqs, gpu->dims.num_kv_heads, ATTN_TILED_ROWS, (long long) lanes,
                     INT32_MAX);
}

static int64_t align(const int64_t bytes)
{
    return divide_up(bytes, STATE_ALIGNMENT) * STATE_ALIGNMENT;
}

static enum attn_status allocate(const struct attn_tiled_gpu *const gpu, const int64_t bytes,
                                 const char *const what, attn_cu_deviceptr *const address)
{
    const struct attn_device *const device = gpu->device;
    char sentence[128];
    bool pushed;
    attn_cu_result result = attn_device_enter(device, &pushed);
    if (result == ATTN_CU_SUCCESS) result = device->driver->mem_alloc(address, (size_t) bytes);
    attn_device_leave(device, pushed);
    if (result == ATTN_CU_SUCCESS) return ATTN_OK;
    *address = 0;
    snprintf(sentence, sizeof(sentence), "%lld bytes for %s cannot be allocated", (long long) bytes,
             what);
    return attn_device_cu_fail(device, result, sentence);
}

static enum attn_status allocate_state(struct attn_tiled_gpu *const gpu)
{
    const int64_t rows = (int64_t) gpu->dims.max_seqs * gpu->dims.num_q_heads;
    const int64_t m = align(rows * (int64_t) sizeof(float));
    const int64_t o = rows * gpu->dims.head_dim * (int64_t) sizeof(float);
    if (gpu->state.m) return ATTN_OK;
    const enum attn_status status = allocate(gpu, 2 * m + o, "a tiled state", &gpu->owned_state);
    if (status != ATTN_OK) return status;
    unsigned char *const start = (unsigned char *) (uintptr_t) gpu->owned_state;
    gpu->state.m = (float *) start;
    gpu->state.l = (float *) (start + m);
    gpu->state.o = (float *) (start + 2 * m);
    return ATTN_OK;
}

static enum attn_status allocate_partials(struct attn_tiled_gpu *const gpu)
{
    gpu->partials = gpu->state.workspace;
    if (gpu->partials || !gpu->partials_bytes) return ATTN_OK;
    const enum attn_status status =
        allocate(gpu, gpu->partials_bytes, "partials of tiles", &gpu->owned_partials);
    gpu->partials = (float *) (uintptr_t) gpu->owned_partials;
    return status;
}

enum attn_status attn_tiled_gpu_find(struct attn_tiled_gpu *const gpu,
                                     const struct attn_device *const device,
                                     const struct attn_tiled_dims *const dims)
{
    *gpu = (struct attn_tiled_gpu){ .device = device, .dims = *dims };
    enum attn_status status = find_row(gpu);
    if (status == ATTN_OK) status = check_lanes(gpu);
    if (status == ATTN_OK) gpu->partials_bytes = find_partials_bytes(gpu);
    return status;
}

enum attn_status attn_tiled_gpu_open(struct attn_tiled_gpu *const gpu,
                                     struct attn_tiled_state *const state)
{
    const struct attn_device *const device = gpu->device;
    if (device->info.kind == ATTN_DEVICE_TARGET)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                         "the device is the target %s without a GPU: it has no memory for a state",
                         device->info.target);
    gpu->state = *state;
    enum attn_status status = allocate_state(gpu);
    if (status == ATTN_OK) status = allocate_partials(gpu);
    if (status != ATTN_OK) attn_tiled_gpu_close(gpu);
    *state = gpu->state;
    return status;
}

void attn_tiled_gpu_close(struct attn_tiled_gpu *const gpu)
{
    bool pushed;
    if (!gpu->owned_state && !gpu->owned_partials) return;
    // As when a device is closed, a failure has nobody to go to.
    if (attn_device_enter(gpu->device, &pushed) == ATTN_CU_SUCCESS) {
        if (gpu->owned_state) gpu->device->driver->mem_free(gpu->owned_state);
        if (gpu->owned_partials) gpu->device->driver->mem_free(gpu->owned_partials);
    }
    attn_device_leave(gpu->device, pushed);
    gpu->owned_state = gpu->owned_partials = 0;
}

// ---- launches

// Of the launch that leaves partials of so many units of each lane.
static int64_t count_partial_blocks(const int64_t range, const int64_t lanes)
{
    return range / ATTN_TILED_CHUNK * lanes;
}

void attn_tiled_gpu_plan(const struct attn_tiled_gpu *const gpu, const int32_t num_seqs,
                         struct attn_tiled_plan *const plan)
{
    const int64_t lanes = count_lanes(&gpu->dims, num_seqs);
    const int64_t range = lanes > 0 ? find_range(gpu, lanes) : 0;
    plan->kernel = gpu->row->name;
    plan->workspace_bytes = gpu->partials_bytes;
    if (lanes == 0) return;
    plan->turns = range > 0 ? (int32_t) divide_up(count_units(&gpu->dims), range) : 0;
    plan->grid = (int32_t) (range > 0 ? count_partial_blocks(range, lanes) : lanes);
    plan->block = attn_pack_row_threads(gpu->row);
    plan->smem_bytes = attn_pack_row_smem(gpu->row);
}

static enum attn_status launch(const struct attn_tiled_gpu *const gpu, const int32_t what,
                               const int64_t grid, struct attn_tiled_args *const args,
                               const attn_stream stream)
{
    args->what = what;
    return attn_device_launch(gpu->device, gpu->row, (int32_t) grid, args, stream);
}

static struct attn_tiled_args fill_args(const struct attn_tiled_gpu *const gpu,
                                        const int32_t num_seqs)
{
    return (struct attn_tiled_args){
        .m = gpu->state.m,
        .l = gpu->state.l,
        .o = gpu->state.o,
        .num_rows = (int64_t) num_seqs * gpu->dims.num_q_heads,
    };
}

static enum attn_status launch_rows(const struct attn_tiled_gpu *const gpu, const int32_t what,
                                    struct attn_tiled_args *const args, const attn_stream stream)
{
    const int64_t blocks = divide_up(args->num_rows, gpu->row->warps);
    const int64_t most = (int64_t) gpu->device->info.sm_count * ROW_BLOCKS_PER_SM;
    return launch(gpu, what, blocks < most ? blocks : most, args, stream);
}

enum attn_status attn_tiled_gpu_begin(const struct attn_tiled_gpu *const gpu,
                                      const int32_t num_seqs, const attn_stream stream)
{
    struct attn_tiled_args args = fill_args(gpu, num_seqs);
    if (num_seqs == 0) return ATTN_OK;
    return launch_rows(gpu, ATTN_TILED_BEGIN, &args, stream);
}

enum attn_status attn_tiled_gpu_finalize(const struct attn_tiled_gpu *const gpu,
                                         const struct attn_tiled_finalize_params *const params,
                                         const attn_stream stream)
{
    struct attn_tiled_args args = fill_args(gpu, params->num_seqs);
    if (params->num_seqs == 0) return ATTN_OK;
    args.output = params->output;
    args.lse = params->lse;
    return launch_rows(gpu, ATTN_TILED_FINALIZE, &args, stream);
}

static void set_divisors(struct attn_tiled_args *const args)
{
    attn_magic(args->lanes, &args->lanes_magic, &args->lanes_shift);
    attn_magic(args->all_lanes, &args->all_lanes_magic, &args->all_lanes_shift);
    attn_magic(args->groups, &args->groups_magic, &args->groups_shift);
    attn_magic((int32_t) args->parts, &args->parts_magic, &args->parts_shift);
}

static struct attn_tiled_args fill_step(const struct attn_tiled_gpu *const gpu,
                                        const struct attn_tiled_step_params *const params)
{
    const struct attn_tiled_dims *const dims = &gpu->dims;
    struct attn_tiled_args args = fill_args(gpu, params->num_seqs);
    args.q = params->q;
    args.k = params->k_pool;
    args.v = params->v_pool;
    args.blocks = params->tile_blocks;
    args.counts = params->tile_block_counts;
    args.valid = params->valid_slots;
    args.fault = params->fault;
    args.block_stride = params->block_stride;
    args.token_stride = params->token_stride;
    args.head_stride = params->head_stride;
    args.num_pool_blocks = (uint32_t) params->num_pool_blocks;
    args.block_size = dims->block_size;
    args.tile_capacity = dims->tile_capacity;
    args.last_slots = params->last_block_valid_slots;
    args.num_q_heads = dims->num_q_heads;
    args.ratio = ratio_of(dims);
    args.lanes = (int32_t) count_lanes(dims, 1);
    args.all_lanes = (int32_t) count_lanes(dims, params->num_seqs);
    args.lane_rows = count_lane_rows(dims);
    args.groups = count_groups(dims);
    args.parts = (uint32_t) count_parts(dims);
    args.scale = params->scale;
    set_divisors(&args);
    return args;
}

static enum attn_status step_by_partials(const struct attn_tiled_gpu *const gpu,
                                         struct attn_tiled_args *const args, const int64_t range,
                                         const attn_stream stream)
{
    const int64_t units = count_units(&gpu->dims), rows = range * args->all_lanes * args->lane_rows;
    enum attn_status status = ATTN_OK;
    args->partials = gpu->partials;
    args->partials_ml = args->partials + rows * gpu->dims.head_dim;
    args->range = (int32_t) range;
    for (int64_t first = 0; status == ATTN_OK && first < units; first += range) {
        args->first_unit = first;
        args->first_block = (uint32_t) (first / args->parts);
        args->first_part = (uint32_t) (first % args->parts);
        status = launch(gpu, ATTN_TILED_PARTIALS, count_partial_blocks(range, args->all_lanes),
                        args, stream);
        if (status == ATTN_OK)
            status = launch(gpu, ATTN_TILED_FOLD_PARTIALS,
                            (int64_t) args->all_lanes * ATTN_TILED_ROWS, args, stream);
    }
    return status;
}

enum attn_status attn_tiled_gpu_step(const struct attn_tiled_gpu *const gpu,
                                     const struct attn_tiled_step_params *const params,
                                     const attn_stream stream)
{
    if (params->num_seqs == 0) return ATTN_OK;
    struct attn_tiled_args args = fill_step(gpu, params);
    const int64_t range = find_range(gpu, args.all_lanes);
    return range ? step_by_partials(gpu, &args, range, stream)
                 : launch(gpu, ATTN_TILED_FOLD, args.all_lanes, &args, stream);
}

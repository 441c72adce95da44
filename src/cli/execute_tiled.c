/* SPDX-License-Identifier: Apache-2.0 */
// One step of a tiled case: its lists in tiles of as many blocks as the file says.
#include "cli/execute.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A tile of each sequence: blocks, counts, valid slots, in one allocation.
struct tile {
    int32_t *blocks, *counts, *valid;
    size_t bytes;
};

// Where a step runs, and the tile there: on the host that which is filled.
struct place {
    struct gpu *gpu;
    attn_stream stream;
    struct tile tile;
};

static struct tile lay_out(void *const memory, const int32_t batch, const int32_t capacity)
{
    const size_t lists = (size_t) batch * (size_t) capacity, count = (size_t) batch;
    int32_t *const blocks = memory;
    return (struct tile){ blocks, blocks ? blocks + lists : NULL,
                          blocks ? blocks + lists + count : NULL,
                          (lists + 2 * count) * sizeof(*blocks) };
}

static int32_t smaller(const int32_t a, const int32_t b)
{
    return a < b ? a : b;
}

// Of the list of a sequence from block `first` on. Returns whether a tile follows.
static bool fill_sequence(const struct case_tiled *const tiled, const int32_t capacity,
                          const int32_t first, const int32_t sequence, const struct tile *const to)
{
    const int32_t given = tiled->block_counts[sequence], count = smaller(given, tiled->list_length);
    const int32_t left = count < first ? 0 : count - first;
    const int32_t *const list = tiled->block_list + (int64_t) sequence * tiled->list_length;
    const bool is_last = left <= capacity;
    for (int32_t i = 0; i < capacity; i++)
        to->blocks[(int64_t) sequence * capacity + i] = i < left ? list[first + i] : -1;
    to->counts[sequence] = is_last ? left : capacity;
    to->valid[sequence] = is_last && tiled->valid_slots ? tiled->valid_slots[sequence] : INT32_MAX;
    return !is_last;
}

static bool fill_tile(const struct case_tiled *const tiled, const int32_t batch,
                      const int32_t capacity, const int32_t first, const struct tile *const to)
{
    bool more = false;
    for (int32_t i = 0; i < batch; i++)
        if (fill_sequence(tiled, capacity, first, i, to)) more = true;
    return more;
}

void execute_report_counts(const struct case_tiled *const tiled, const int32_t batch,
                           int32_t *const fault)
{
    for (int32_t i = 0; i < batch; i++) {
        const int32_t count = tiled->block_counts[i];
        if ((count < 0 || count > tiled->list_length) && i < *fault) *fault = i;
    }
}

// The tile before may still be read.
static enum attn_status upload(const struct place *const place, const struct tile *const from)
{
    if (!place->gpu) return ATTN_OK;
    int error = gpu_stream_sync(place->gpu, place->stream);
    if (!error) error = gpu_upload(place->gpu, place->tile.blocks, from->blocks, from->bytes);
    return error ? ATTN_ERROR_DRIVER : ATTN_OK;
}

static enum attn_status run_tiles(struct attn_tiled *const state,
                                  const struct attn_decode_params *const call,
                                  const struct case_tiled *const tiled, const int32_t capacity,
                                  const struct tile *const tile, const struct place *const place)
{
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    bool more = true;
    step.num_seqs = last.num_seqs = call->batch;
    step.q = call->q;
    step.k_pool = call->k_pool;
    step.v_pool = call->v_pool;
    step.num_pool_blocks = call->num_pages;
    step.tile_blocks = place->tile.blocks;
    step.tile_block_counts = place->tile.counts;
    step.valid_slots = place->tile.valid;
    step.scale = call->scale;
    step.fault = call->fault;
    last.output = call->o;
    last.lse = call->lse;
    enum attn_status status = attn_tiled_begin_step(state, call->batch, place->stream);
    for (int64_t first = 0; status == ATTN_OK && more; first += capacity) {
        more = fill_tile(tiled, call->batch, capacity, (int32_t) first, tile);
        status = upload(place, tile);
        if (status == ATTN_OK) status = attn_tiled_step_tile(state, &step, place->stream);
    }
    if (status == ATTN_OK) status = attn_tiled_finalize(state, &last, place->stream);
    // The state and the tile end with this call.
    if (place->gpu && gpu_stream_sync(place->gpu, place->stream) && status == ATTN_OK)
        status = ATTN_ERROR_DRIVER;
    return status;
}

// Counts that the list has no room for, in the call's fault word.
static enum attn_status set_fault(const struct place *const place, const struct case_tiled *tiled,
                                  const int32_t batch, int32_t *const fault)
{
    int32_t found = INT32_MAX;
    execute_report_counts(tiled, batch, &found);
    if (place->gpu)
        return gpu_upload(place->gpu, fault, &found, sizeof(found)) ? ATTN_ERROR_DRIVER : ATTN_OK;
    *fault = found;
    return ATTN_OK;
}

const char *execute_tiled_kernel(const struct attn_device *const device,
                                 const enum attn_dtype dtype, const int32_t head_dim)
{
    char name[64];
    const char *found;
    snprintf(name, sizeof(name), "tiled_%s_d%d", attn_dtype_name(dtype), head_dim);
    for (int32_t i = 0; (found = attn_device_kernel(device, i)); i++)
        if (!strcmp(found, name)) return found;
    return "";
}

enum attn_status execute_tiled_run(struct attn_device *const device, struct gpu *const gpu,
                                   const struct attn_decode_params *const call,
                                   const struct case_tiled *const tiled, const attn_stream stream)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled *state = NULL;
    struct place place = { .gpu = gpu, .stream = stream };
    void *memory = NULL;
    // A tile wider than the lists would only cost memory.
    const int32_t capacity = smaller(tiled->tile_capacity, tiled->list_length);
    dims.dtype = call->q_dtype;
    dims.max_seqs = call->batch;
    dims.num_q_heads = call->num_q_heads;
    dims.num_kv_heads = call->num_kv_heads;
    dims.head_dim = call->head_dim;
    dims.block_size = call->page_size;
    dims.tile_capacity = capacity;
    create.dims = &dims;
    enum attn_status status = attn_tiled_create(&state, device, &create);
    if (status != ATTN_OK) return status;

    const size_t bytes = lay_out(NULL, call->batch, capacity).bytes;
    const struct tile tile = lay_out(calloc(1, bytes), call->batch, capacity);
    if (gpu && gpu_alloc(gpu, &memory, bytes)) memory = NULL;
    place.tile = gpu ? lay_out(memory, call->batch, capacity) : tile;
    status = ATTN_ERROR_NO_MEMORY;
    if (tile.blocks && place.tile.blocks)
        status = set_fault(&place, tiled, call->batch, call->fault);
    if (status == ATTN_OK) status = run_tiles(state, call, tiled, capacity, &tile, &place);
    free(tile.blocks);
    if (gpu) gpu_free(gpu, memory);
    attn_tiled_destroy(&state);
    return status;
}

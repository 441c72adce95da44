/* SPDX-License-Identifier: Apache-2.0 */
// One step of a tiled case: its lists in tiles of as many blocks as the file says.
#include "cli/execute.h"

#include <stdbool.h>
#include <stdlib.h>

// A tile of each sequence, on the host.
struct tile {
    int32_t *blocks, *counts, *valid;
};

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

// Counts that the list has no room for: no tile has them.
static void report_counts(const struct case_tiled *const tiled, const int32_t batch,
                          int32_t *const fault)
{
    for (int32_t i = 0; i < batch; i++) {
        const int32_t count = tiled->block_counts[i];
        if ((count < 0 || count > tiled->list_length) && i < *fault) *fault = i;
    }
}

static enum attn_status run_tiles(struct attn_tiled *const state,
                                  const struct attn_decode_params *const call,
                                  const struct case_tiled *const tiled, const int32_t capacity,
                                  const struct tile *const tile)
{
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    bool more = true;
    step.num_seqs = last.num_seqs = call->batch;
    step.q = call->q;
    step.k_pool = call->k_pool;
    step.v_pool = call->v_pool;
    step.num_pool_blocks = call->num_pages;
    step.tile_blocks = tile->blocks;
    step.tile_block_counts = tile->counts;
    step.valid_slots = tile->valid;
    step.scale = call->scale;
    step.fault = call->fault;
    last.output = call->o;
    last.lse = call->lse;
    enum attn_status status = attn_tiled_begin_step(state, call->batch, NULL);
    for (int64_t first = 0; status == ATTN_OK && more; first += capacity) {
        more = fill_tile(tiled, call->batch, capacity, (int32_t) first, tile);
        status = attn_tiled_step_tile(state, &step, NULL);
    }
    return status == ATTN_OK ? attn_tiled_finalize(state, &last, NULL) : status;
}

enum attn_status execute_tiled_run(struct attn_device *const device,
                                   const struct attn_decode_params *const call,
                                   const struct case_tiled *const tiled)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled *state = NULL;
    const size_t batch = (size_t) call->batch, word = sizeof(int32_t);
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

    const struct tile tile = { calloc(batch * (size_t) capacity, word), calloc(batch, word),
                               calloc(batch, word) };
    status = ATTN_ERROR_NO_MEMORY;
    if (tile.blocks && tile.counts && tile.valid) {
        report_counts(tiled, call->batch, call->fault);
        status = run_tiles(state, call, tiled, capacity, &tile);
    }
    free(tile.blocks);
    free(tile.counts);
    free(tile.valid);
    attn_tiled_destroy(&state);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the tiled kernels, read by the C compiler and by nvcc. Strides are in elements.
#ifndef ATTN_TILED_PARAMS_H
#define ATTN_TILED_PARAMS_H

#include "../common/paged.h"

// What a launch does.
enum {
    // The state of no keys. Blocks take turns at its rows, a warp one.
    ATTN_TILED_BEGIN,
    // Folds a tile. A block has a lane of a sequence: a group of query heads of a KV head.
    ATTN_TILED_FOLD,
    // The same in two launches, where there are few lanes: partials of a range of units into the
    // workspace, a block those of a lane's ATTN_TILED_CHUNK units, all lanes of a chunk next to
    // each other; then the fold of them, a block a query head.
    ATTN_TILED_PARTIALS,
    ATTN_TILED_FOLD_PARTIALS,
    // Output and lse, as ATTN_TILED_BEGIN.
    ATTN_TILED_FINALIZE,
};

struct attn_tiled_args {
    // As in attn/tiled.h.
    float *m, *l, *o;
    const void *q, *k, *v;
    void *output;
    float *lse;
    const int32_t *blocks, *counts, *valid;
    int32_t *fault;
    int64_t block_stride, token_stride, head_stride;
    // Of the state's first sequences.
    int64_t num_rows;
    // [lane of all sequences][unit of the range][row of the lane][head_dim], and [...][2]: m and l,
    // which is negative where there is no unit.
    float *partials, *partials_ml;
    // The unit that the range begins with, which is that part of that block, and how many it has.
    int64_t first_unit;
    uint32_t first_block, first_part;
    int32_t range;
    int32_t what;
    uint32_t num_pool_blocks;
    int32_t block_size, tile_capacity, last_slots;
    int32_t num_q_heads, ratio;
    // Lanes of a sequence, and of all; query heads of a lane at most.
    int32_t lanes, all_lanes, lane_rows;
    // Lanes of a KV head.
    int32_t groups;
    // Units of a whole block.
    uint32_t parts;
    // See attn_divide.
    uint32_t lanes_magic, all_lanes_magic, groups_magic, parts_magic;
    int32_t lanes_shift, all_lanes_shift, groups_shift, parts_shift;
    float scale;
};

// Keys of a block that are folded at a time, at most, from multiples within the block on.
#define ATTN_TILED_KEYS 16
// Query heads of a lane.
#define ATTN_TILED_ROWS 8
// Units of a block of threads of ATTN_TILED_PARTIALS.
#define ATTN_TILED_CHUNK 32

// Dynamic shared memory of a block of threads, in bytes: `stages` units of K and V for each warp;
// of two rounds what warps tell each other, weights, m and l; and of each unit its keys.
#ifdef __cplusplus
static constexpr int32_t
#else
static inline int32_t
#endif
attn_tiled_smem_bytes(int32_t head_dim, int32_t warps, int32_t stages)
{
    const int32_t unit = 2 * ATTN_TILED_KEYS * head_dim * 2;
    const int32_t told = 2 * ATTN_TILED_ROWS * (ATTN_TILED_KEYS * 2 + 8);
    const int32_t keys = (stages * warps * 4 + 15) / 16 * 16;
    return warps * (stages * unit + told) + keys;
}

#endif

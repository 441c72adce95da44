/* SPDX-License-Identifier: Apache-2.0 */
// Skip-softmax: which blocks of keys are left out. Along a run of blocks each is compared with the
// largest score of those before it, for every query row of the lane, which has all of its KV head:
// so that is a matter of the sequence alone. One warp decides; the copying warp and the others read
// what it has decided.
#pragma once

#include "decode/leaf.cuh"

// The run of blocks that is being walked, as one warp sees it.
struct run_of_blocks {
    // Of rows 2t and 2t + 1: the largest score of the blocks before, and of this one. NaN is larger
    // than all.
    float so_far[ROW_BLOCKS][2], largest[ROW_BLOCKS][2];
    // This block has attended keys; so had one before it.
    bool is_attended, is_later;

    __device__ __forceinline__ void begin_block()
    {
        is_attended = false;
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) largest[n][0] = largest[n][1] = -INFINITY;
    }

    __device__ __forceinline__ void begin()
    {
        is_later = false;
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) so_far[n][0] = so_far[n][1] = -INFINITY;
        begin_block();
    }

    // m of a leaf of the block.
    __device__ __forceinline__ void add(const visible_keys &keys, const block<1> &b)
    {
#pragma unroll
        for (int j = 0; j < WORDS; j++) is_attended |= keys.bits[j] != 0;
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) largest[n][c] = max_nan(largest[n][c], b.m[n][c]);
    }

    // With its last leaf: whether block `index` of the sequence is left out. All lanes together.
    __device__ __forceinline__ bool decide(uint32_t index, float lambda, int32_t num_rows)
    {
        if (index % ATTN_DECODE_SKIP_SCOPE == 0) is_later = false;
        bool drop = is_later && is_attended;
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int row = n * 8 + lane_id() % 4 * 2 + c;
                // False with a NaN on either side, and where both are the same infinity.
                const bool is_small = ex2(largest[n][c] - so_far[n][c]) < lambda;
                if (row < num_rows && !is_small) drop = false;
                so_far[n][c] = is_later ? max_nan(so_far[n][c], largest[n][c]) : largest[n][c];
            }
        is_later |= is_attended;
        begin_block();
        return __ballot_sync(~0u, drop) == ~0u;
    }
};

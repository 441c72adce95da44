/* SPDX-License-Identifier: Apache-2.0 */
// The merge tree: leaves are merged by the binary tree of aligned power-of-two blocks of leaf
// indices. A block of the tree without attended keys is left out.
#pragma once

#include "decode/schedule.cuh"

// A block of the tree, or N steps of 16 columns of it: its largest score m, the sum l of
// 2^(score - m), the weighted sum o of V. With g = lane / 4, t = lane % 4 a lane holds, of each
// step and 8 query rows, rows 2t and 2t + 1 of columns g and g + 8 (E4M3: 2g and 2g + 1); m and l
// of these rows.
template <int N> struct block {
    float o[N][ROW_BLOCKS][4];
    float m[ROW_BLOCKS][2];
    float l[ROW_BLOCKS][2];
};

// What o of the left and of the right half of a block are multiplied with: rows 2t and 2t + 1.
struct weights {
    float left[2], right[2];
};

// right += left, of m and l of 8 rows; left: m, m, l, l. Written with explicit roundings: the same
// bits wherever it is inlined.
template <int N>
static __device__ __forceinline__ weights merge_ml(float4 left, int n, block<N> &right)
{
    weights w;
    const float left_m[2] = { left.x, left.y }, left_l[2] = { left.z, left.w };
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const float m = max_nan(left_m[c], right.m[n][c]);
        const float base = finite_or_zero(m);
        w.left[c] = ex2(left_m[c] - base);
        w.right[c] = ex2(right.m[n][c] - base);
        right.m[n][c] = m;
        right.l[n][c] = __fmaf_rn(left_l[c], w.left[c], __fmul_rn(right.l[n][c], w.right[c]));
    }
    return w;
}

// The same of o.
static __device__ __forceinline__ void merge_o(const weights &w, float4 left, float (&right)[4])
{
    const float left_o[4] = { left.x, left.y, left.z, left.w };
#pragma unroll
    for (int i = 0; i < 4; i++)
        right[i] = __fmaf_rn(left_o[i], w.left[i % 2], __fmul_rn(right[i], w.right[i % 2]));
}

template <int N> static __device__ __forceinline__ void clear(block<N> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < N; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) b.o[d][n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; c++) b.m[n][c] = -INFINITY, b.l[n][c] = 0.0f;
    }
}

// ---- slots, see SLOT_FLOATS; of the steps of this warp

static __device__ __forceinline__ float4 *slot_ml(float *slot, int n)
{
    return reinterpret_cast<float4 *>(slot + ROWS * HEAD_DIM) + (warp_id() * ROW_BLOCKS + n) * 4 +
           lane_id() % 4;
}

static __device__ __forceinline__ float4 *slot_o(float *slot, int d, int n)
{
    return reinterpret_cast<float4 *>(slot) + ((warp_id() * STEPS + d) * ROW_BLOCKS + n) * 32 +
           lane_id();
}

static __device__ __forceinline__ bool has_columns()
{
    return DIM_STEPS >= WARPS || warp_id() < DIM_STEPS;
}

static __device__ __forceinline__ float4 ml_of(const block<STEPS> &b, int n)
{
    return make_float4(b.m[n][0], b.m[n][1], b.l[n][0], b.l[n][1]);
}

static __device__ __forceinline__ float4 o_of(const block<STEPS> &b, int d, int n)
{
    return make_float4(b.o[d][n][0], b.o[d][n][1], b.o[d][n][2], b.o[d][n][3]);
}

static __device__ __forceinline__ void store_slot(float *slot, const block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            if (has_columns()) *slot_o(slot, d, n) = o_of(b, d, n);
        if (lane_id() < 4) *slot_ml(slot, n) = ml_of(b, n);
    }
}

// What another block has left there.
static __device__ __forceinline__ void load_root(float *g_slot, block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const float4 ml = load_global_float4(slot_ml(g_slot, n));
        b.m[n][0] = ml.x, b.m[n][1] = ml.y, b.l[n][0] = ml.z, b.l[n][1] = ml.w;
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
            const float4 o =
                has_columns() ? load_global_float4(slot_o(g_slot, d, n)) : make_float4(0, 0, 0, 0);
            b.o[d][n][0] = o.x, b.o[d][n][1] = o.y, b.o[d][n][2] = o.z, b.o[d][n][3] = o.w;
        }
    }
}

// b += the slot, which is the left half.
static __device__ __forceinline__ void merge_slot(float *slot, block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const weights w = merge_ml(*slot_ml(slot, n), n, b);
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            if (has_columns()) merge_o(w, *slot_o(slot, d, n), b.o[d][n]);
    }
}

// right += left.
static __device__ __forceinline__ void merge_blocks(const block<STEPS> &left, block<STEPS> &right)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const weights w = merge_ml(ml_of(left, n), n, right);
#pragma unroll
        for (int d = 0; d < STEPS; d++) merge_o(w, o_of(left, d, n), right.o[d][n]);
    }
}

// ---- the binary counter

// What waits for its right half.
struct tree_stack {
    float *s_levels;
    float *g_slots;
    // Slots in use, and in all.
    int32_t used, size;
    // Levels that wait.
    uint32_t present;

    // Of a level: its own place, or the next slot. Lengths that change under the kernel could let
    // more wait than there are slots.
    __device__ __forceinline__ float *place(int level) const
    {
        return level < LEVELS ? s_levels + level * SLOT_FLOATS
                              : g_slots + (int64_t) min(used, size - 1) * SLOT_FLOATS;
    }

    __device__ __forceinline__ void add(int level, const block<STEPS> &b)
    {
        store_slot(place(level), b);
        used += level >= LEVELS;
        present |= 1u << level;
        // m and l are read by other lanes.
        __syncwarp();
    }

    __device__ __forceinline__ void merge_top(int level, block<STEPS> &b)
    {
        used -= level >= LEVELS;
        present &= ~(1u << level);
        merge_slot(place(level), b);
        __syncwarp();
    }
};

// Adds block `at`, which b is, of those from `first` to the last. With the last, b is all of them.
static __device__ __forceinline__ void push(tree_stack &waiting, uint32_t first, uint32_t at,
                                            bool is_last, block<STEPS> &b)
{
    for (int i = 0; !is_last || at >> i << i > first; i++) {
        if (at >> i & 1) {
            if (waiting.present >> i & 1) waiting.merge_top(i, b);
        } else if (!is_last) {
            waiting.add(i, b);
            return;
        }
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
// The merge tree: leaves are merged by the binary tree of aligned power-of-two blocks of leaf
// indices. A block of the tree without attended keys is left out.
#pragma once

#include "decode/schedule.cuh"

// A block of the tree, or STEPS steps of 16 columns of it: its largest score m, the sum l of
// 2^(score - m), the weighted sum o of V. With g = lane / 4, t = lane % 4 a lane holds, of each
// step and 8 query rows, rows 2t and 2t + 1 of columns g and g + 8 (E4M3: 2g and 2g + 1); m and l
// of these rows.
template <int STEPS> struct block {
    float o[STEPS][ROW_BLOCKS][4];
    float m[ROW_BLOCKS][2];
    float l[ROW_BLOCKS][2];
};

// What o of the left and of the right half of a block are multiplied with: rows 2t and 2t + 1.
struct weights {
    float left[2], right[2];
};

// right += left, of m and l of 8 rows; left: m, m, l, l. Written with explicit roundings: the same
// bits wherever it is inlined.
template <int STEPS>
static __device__ __forceinline__ weights merge_ml(float4 left, int n, block<STEPS> &right)
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

template <int STEPS> static __device__ __forceinline__ void clear(block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) b.o[d][n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; c++) b.m[n][c] = -INFINITY, b.l[n][c] = 0.0f;
    }
}

// ---- slots: [step][row block][lane] of o, then [row block][t] of m and l; float4 each

static __device__ __forceinline__ float4 *slot_ml(float *g_slot, int n, int lane)
{
    return reinterpret_cast<float4 *>(g_slot) + DIM_STEPS * ROW_BLOCKS * 32 + n * 4 + lane % 4;
}

static __device__ __forceinline__ float4 *slot_o(float *g_slot, int step, int n, int lane)
{
    return reinterpret_cast<float4 *>(g_slot) + (step * ROW_BLOCKS + n) * 32 + lane;
}

// `first_step`: of the steps in b.
template <int STEPS>
static __device__ __forceinline__ void store_slot(float *g_slot, int first_step, bool has_ml,
                                                  const block<STEPS> &b)
{
    const int lane = rare_lane_id();
#pragma unroll
    for (int d = 0; d < STEPS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
            if (first_step + d < DIM_STEPS)
                *slot_o(g_slot, first_step + d, n, lane) =
                    make_float4(b.o[d][n][0], b.o[d][n][1], b.o[d][n][2], b.o[d][n][3]);
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
        if (has_ml && lane < 4)
            *slot_ml(g_slot, n, lane) = make_float4(b.m[n][0], b.m[n][1], b.l[n][0], b.l[n][1]);
}

static __device__ __forceinline__ void set_o(float (&o)[4], float4 value)
{
    o[0] = value.x, o[1] = value.y, o[2] = value.z, o[3] = value.w;
}

template <int STEPS>
static __device__ __forceinline__ void set_ml(block<STEPS> &b, int n, float4 value)
{
    b.m[n][0] = value.x, b.m[n][1] = value.y, b.l[n][0] = value.z, b.l[n][1] = value.w;
}

static __device__ __forceinline__ void load_slot(float *g_slot, block<DIM_STEPS> &b)
{
    const int lane = rare_lane_id();
#pragma unroll
    for (int d = 0; d < DIM_STEPS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) set_o(b.o[d][n], *slot_o(g_slot, d, n, lane));
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) set_ml(b, n, *slot_ml(g_slot, n, lane));
}

// b += the slot, which is the left half.
static __device__ __forceinline__ void merge_slot(float *g_slot, block<DIM_STEPS> &b)
{
    const int lane = rare_lane_id();
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const weights w = merge_ml(*slot_ml(g_slot, n, lane), n, b);
#pragma unroll
        for (int d = 0; d < DIM_STEPS; d++) merge_o(w, *slot_o(g_slot, d, n, lane), b.o[d][n]);
    }
}

// ---- the binary counter

// Where a block of the tree is, once it has gone up as far as it can.
enum fate {
    // Waits for its right half.
    WAITS,
    // Its left half is another run's: a root.
    IS_ROOT,
    // It is the whole piece.
    IS_WHOLE,
};

// What a warp keeps: what waits, on top of the roots of the same piece. The lowest level, which
// comes and goes with every other leaf, has a place in shared memory.
struct warp_stack {
    float *s_level_0;
    float *g_slots;
    // Slots in use, and in all.
    int32_t used, size;

    // Lengths that change under the kernel could make more roots than there are slots.
    __device__ __forceinline__ float *top() const
    {
        return g_slots + (int64_t) min(used, size - 1) * SLOT_FLOATS;
    }

    __device__ __forceinline__ void add_root(const block<DIM_STEPS> &b)
    {
        store_slot(top(), 0, true, b);
        used++;
    }

    __device__ __forceinline__ void add(int level, const block<DIM_STEPS> &b)
    {
        const bool is_near = LEVEL_0_IN_SHARED && level == 0;
        store_slot(is_near ? s_level_0 : top(), 0, true, b);
        used += !is_near;
        // m and l are read by other lanes.
        __syncwarp();
    }

    __device__ __forceinline__ void merge_top(int level, block<DIM_STEPS> &b)
    {
        const bool is_near = LEVEL_0_IN_SHARED && level == 0;
        used -= !is_near;
        merge_slot(is_near ? s_level_0 : top(), b);
        __syncwarp();
    }

    // Once the run is over: what waits is a root.
    __device__ __forceinline__ void end(uint32_t present)
    {
        if (!LEVEL_0_IN_SHARED || !(present & 1)) return;
        block<DIM_STEPS> b;
        load_slot(s_level_0, b);
        add_root(b);
        __syncwarp();
    }
};

// Adds leaf `leaf`, which b is. `waiting` keeps left halves, the lowest on top; `present`: their
// levels. `last`: no leaf of the piece follows.
static __device__ __forceinline__ fate push(warp_stack &waiting, uint32_t &present,
                                            uint32_t first_leaf, uint32_t leaf, bool last,
                                            block<DIM_STEPS> &b)
{
    for (int i = 0;; i++) {
        const uint32_t first = leaf >> i << i;
        if (last && first <= first_leaf) return IS_WHOLE;
        if (leaf >> i & 1) {
            if (present >> i & 1) {
                waiting.merge_top(i, b);
                present &= ~(1u << i);
            } else if (first > first_leaf) {
                return IS_ROOT;
            }
        } else if (!last) {
            waiting.add(i, b);
            present |= 1u << i;
            return WAITS;
        }
    }
}

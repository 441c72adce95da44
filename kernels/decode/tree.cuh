/* SPDX-License-Identifier: Apache-2.0 */
// The merge tree: leaves are merged by the binary tree of aligned power-of-two blocks of leaf
// indices. A block of the tree without attended keys is left out.
#pragma once

#include "decode/schedule.cuh"

// A block of the tree, or N steps of columns of it: its largest score m, the sum l of
// 2^(score - m), the weighted sum o of V. With g = lane / 4, t = lane % 4 a lane holds, of each
// step and 8 query rows, rows 2t and 2t + 1 of columns g and g + 8 (E4M3: 2g and 2g + 1); m and l
// of these rows. Where a warp has rows: columns 2t and 2t + 1 of its rows g, then of g + 8, which
// are zeros if it has but 8.
template <int N> struct block {
    float o[N][ROW_BLOCKS][4];
    float m[ROW_BLOCKS][2];
    float l[ROW_BLOCKS][2];
};

// Which of a lane's two rows value i of a step is of.
static __device__ __forceinline__ constexpr int row_of(int i)
{
    return OWNS_ROWS ? i / 2 : i % 2;
}

// Query row c of a lane's two, of row block n.
static __device__ __forceinline__ int own_row(int lane, int n, int c)
{
    return OWNS_ROWS ? warp_id() % 4 * 8 * LANE_ROWS + lane / 4 + c * 8 : n * 8 + lane % 4 * 2 + c;
}

// Lanes with the same number have the same two rows; of these lanes, one.
constexpr int ROW_PAIRS = OWNS_ROWS ? 8 : 4;

static __device__ __forceinline__ int row_pair()
{
    return OWNS_ROWS ? lane_id() / 4 : lane_id() % 4;
}

static __device__ __forceinline__ bool speaks_for_rows(int lane)
{
    return OWNS_ROWS ? lane % 4 == 0 : lane < 4;
}

// What o of the left and of the right half of a block are multiplied with, of each of two rows.
struct weights {
    float left[2], right[2];
};

// right += left, of m and l of a row: what o of either is multiplied with. Written with explicit
// roundings: the same bits wherever it is inlined.
static __device__ __forceinline__ float2 merge_ml(float left_m, float left_l, float &m, float &l)
{
    const float right_m = m;
    m = max_nan(left_m, right_m);
    const float base = finite_or_zero(m);
    const float2 w = make_float2(ex2(left_m - base), ex2(right_m - base));
    l = __fmaf_rn(left_l, w.x, __fmul_rn(l, w.y));
    return w;
}

// The same of 8 rows; left: m, m, l, l.
template <int N>
static __device__ __forceinline__ weights merge_ml(float4 left, int n, block<N> &right)
{
    weights w = {};
    const float left_m[2] = { left.x, left.y }, left_l[2] = { left.z, left.w };
    if (LANE_ROWS == 1) right.m[n][1] = -INFINITY, right.l[n][1] = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        const float2 of_row = merge_ml(left_m[c], left_l[c], right.m[n][c], right.l[n][c]);
        w.left[c] = of_row.x, w.right[c] = of_row.y;
    }
    return w;
}

// The same of o.
static __device__ __forceinline__ void merge_o(const weights &w, float4 left, float (&right)[4])
{
    const float left_o[4] = { left.x, left.y, left.z, left.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int c = row_of(i);
        right[i] =
            c < LANE_ROWS ? __fmaf_rn(left_o[i], w.left[c], __fmul_rn(right[i], w.right[c])) : 0.0f;
    }
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

static __device__ __forceinline__ float4 *slot_ml(float *slot, int n, int pair)
{
    return reinterpret_cast<float4 *>(slot + ROWS * HEAD_DIM) +
           (warp_id() * ROW_BLOCKS + n) * ROW_PAIRS + pair;
}

// m of a row, if warps have rows that of a warp of the first warpgroup; l is two floats further.
static __device__ __forceinline__ const float *slot_row(float *slot, int row)
{
    if constexpr (OWNS_ROWS)
        return slot + ROWS * HEAD_DIM + (row / (8 * LANE_ROWS) * 8 + row % 8) * 4 +
               row / 8 % LANE_ROWS;
    return reinterpret_cast<const float *>(slot_ml(slot, row / 8, row / 2 % 4)) + row % 2;
}

// What a lane has of a step of o there: nothing of a second row that is none.
template <int NUM_ROWS> struct lane_values {
    using type = float4;
};

template <> struct lane_values<1> {
    using type = float2;
};

using slot_values = lane_values<LANE_ROWS>::type;

static __device__ __forceinline__ float4 widen(float4 values)
{
    return values;
}

static __device__ __forceinline__ float4 widen(float2 values)
{
    return make_float4(values.x, values.y, 0, 0);
}

static __device__ __forceinline__ void store_values(float4 *to, float4 values)
{
    *to = values;
}

static __device__ __forceinline__ void store_values(float2 *to, float4 values)
{
    *to = make_float2(values.x, values.y);
}

// Of 8 lanes, which take a line of a slot together, those that have the same rows lie next to each
// other: of a line that is not wanted as a whole, a part is moved.
static __device__ __forceinline__ int place_of(int lane)
{
    return OWNS_ROWS ? lane : lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
}

// In floats, from the start of the slot.
static __device__ __forceinline__ int32_t slot_offset(int d, int n)
{
    const int place = place_of(lane_id());
    return (((warp_id() * STEPS + d) * ROW_BLOCKS + n) * 32 + place) * (2 * LANE_ROWS);
}

static __device__ __forceinline__ slot_values *slot_o(float *slot, int d, int n)
{
    return reinterpret_cast<slot_values *>(slot + slot_offset(d, n));
}

static __device__ __forceinline__ bool has_columns()
{
    return OWNS_ROWS || DIM_STEPS >= WARPS || warp_id() < DIM_STEPS;
}

template <int N> static __device__ __forceinline__ float4 ml_of(const block<N> &b, int n)
{
    return make_float4(b.m[n][0], b.m[n][1], b.l[n][0], b.l[n][1]);
}

template <int N> static __device__ __forceinline__ float4 o_of(const block<N> &b, int d, int n)
{
    return make_float4(b.o[d][n][0], b.o[d][n][1], b.o[d][n][2], b.o[d][n][3]);
}

// m and l of the 8 rows of row block n.
template <int N>
static __device__ __forceinline__ void store_ml(float *slot, int n, const block<N> &b)
{
    if (speaks_for_rows(lane_id())) *slot_ml(slot, n, row_pair()) = ml_of(b, n);
}

static __device__ __forceinline__ void store_slot(float *slot, const block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            if (has_columns()) store_values(slot_o(slot, d, n), o_of(b, d, n));
        store_ml(slot, n, b);
    }
}

// b += the slot, which is the left half.
static __device__ __forceinline__ void merge_slot(float *slot, block<STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const weights w = merge_ml(*slot_ml(slot, n, row_pair()), n, b);
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            if (has_columns()) merge_o(w, widen(*slot_o(slot, d, n)), b.o[d][n]);
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

// Level 0, every other leaf, waits in registers where there is room.
constexpr bool KEEPS_LOWEST = OWNS_ROWS || ROWS == 8 || MOST_REGISTERS > 200;

// Where a warp that has rows has many columns, in those registers into which the next leaf is
// summed, and so it is never added here.
constexpr bool MERGES_PAIRS = OWNS_ROWS && HEAD_DIM > 128;

// Levels below this one have a place in shared memory, or registers.
constexpr int NEAR_LEVELS = LEVELS + KEEPS_LOWEST;

// What waits for its right half.
struct tree_stack {
    block<STEPS> lowest;
    float *s_levels;
    float *g_slots;
    // Slots in use, and in all.
    int32_t used, size;
    // Levels that wait.
    uint32_t present;

    __device__ __forceinline__ float *near(int level) const
    {
        return s_levels + (level - KEEPS_LOWEST) * SLOT_FLOATS;
    }

    // Of the other levels: the next slot. Lengths that change under the kernel could let more wait
    // than there are slots.
    __device__ __forceinline__ float *slot() const
    {
        return g_slots + (int64_t) min(used, size - 1) * SLOT_FLOATS;
    }

    __device__ __forceinline__ void add(int level, const block<STEPS> &b)
    {
        present |= 1u << level;
        if (KEEPS_LOWEST && level == 0) {
            lowest = b;
            return;
        }
        if (level < NEAR_LEVELS)
            store_slot(near(level), b);
        else
            store_slot(slot(), b), used++;
        // m and l are read by other lanes.
        __syncwarp();
    }

    __device__ __forceinline__ void merge_top(int level, block<STEPS> &b)
    {
        present &= ~(1u << level);
        if (KEEPS_LOWEST && level == 0) {
            merge_blocks(lowest, b);
            return;
        }
        if (level < NEAR_LEVELS)
            merge_slot(near(level), b);
        else
            used--, merge_slot(slot(), b);
        __syncwarp();
    }
};

// Adds a pair of leaves up to `at`, which b is, of those from `first` to the last, or the one of a
// pair with which the leaves begin or end. With the last, b is all of them.
static __device__ __forceinline__ void push_pair(tree_stack &waiting, uint32_t first, uint32_t at,
                                                 bool is_last, block<STEPS> &b)
{
#pragma unroll 1
    for (int i = 1; !is_last || at >> i << i > first; i++) {
        if (at >> i & 1) {
            if (waiting.present >> i & 1) waiting.merge_top(i, b);
        } else if (!is_last) {
            waiting.add(i, b);
            return;
        }
    }
}

// Adds leaf `at`, which b is.
static __device__ __forceinline__ void push(tree_stack &waiting, uint32_t first, uint32_t at,
                                            bool is_last, block<STEPS> &b)
{
    if (at & 1) {
        if (waiting.present & 1) waiting.merge_top(0, b);
    } else if (!is_last) {
        waiting.add(0, b);
        return;
    }
    push_pair(waiting, first, at, is_last, b);
}

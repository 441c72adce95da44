/* SPDX-License-Identifier: Apache-2.0 */
// From sums to o and lse. Fragments of 16 rows of a warp are those of an MMA's accumulator, of
// mma.sync and of wgmma alike: lane 4g + t has rows g and g + 8, and of each 8 columns 2t and
// 2t + 1, first of row g.
#pragma once

#include "prefill/schedule.cuh"

// What the sums of a row are multiplied with, and its lse.
struct row_end {
    float weight, inverse, lse;
    // No key, and no sink, weighs anything.
    bool is_empty;
};

// The sink of a head in units of log2; -inf: none.
static __device__ __forceinline__ float sink_of(const attn_prefill_args &args, int32_t head)
{
    return args.sinks ? __ldg(args.sinks + head) * LOG2_E : -INFINITY;
}

// `base`: m in units of log2, + SHIFT; weights are relative to it. `l`: their sum, of all lanes.
static __device__ __forceinline__ row_end end_row(float base, float l, float sink)
{
    row_end e;
    const float shifted_sink = sink + SHIFT;
    const float top = max_nan(base, shifted_sink);
    const float finite = finite_or_zero(top);
    e.weight = ex2(base - finite);
    const float sum = __fmaf_rn(l, e.weight, ex2(shifted_sink - finite - SHIFT));
    e.inverse = __frcp_rn(sum);
    e.lse = (top + lg2(sum)) * LN_2;
    e.is_empty = top == -INFINITY;
    return e;
}

static __device__ __forceinline__ float end_value(const row_end &e, float o)
{
    // + 0: a tile that a row does not see may have turned a -0 into +0; let it always be +0.
    return e.is_empty ? 0.0f : __fmul_rn(__fmul_rn(o, e.weight), e.inverse) + 0.0f;
}

// Over the four lanes of a row.
static __device__ __forceinline__ float sum_quad(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The row of a query token of the sequence in o and lse.
static __device__ __forceinline__ int64_t output_row(const attn_prefill_args &args, const work &w,
                                                     int32_t token)
{
    return (w.of.first_token + token) * args.num_q_heads + w.head;
}

// lse of the warp's 16 rows, from query token `token` on.
static __device__ __forceinline__ void store_lse(const attn_prefill_args &args, const work &w,
                                                 int32_t token, const row_end (&ends)[2])
{
    const int lane = rare_lane_id();
    if (!args.lse || lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t own = token + r * 8 + lane / 4;
        if (own < w.of.q_len) args.lse[output_row(args, w, own)] = ends[r].lse;
    }
}

// 8 * BLOCKS columns, a multiple of a line, of the same rows, from `column` on. They go through
// s_stage, 16 rows of as many columns that nobody else uses, so that whole lines are written.
template <int BLOCKS>
static __device__ __forceinline__ void store_rows(const attn_prefill_args &args, const work &w,
                                                  int32_t token, int column,
                                                  const row_end (&ends)[2],
                                                  const float (&o)[BLOCKS][4],
                                                  unsigned char *s_stage)
{
    static_assert(BLOCKS % LINE_PIECES == 0, "lines are whole");
    const int lane = rare_lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *reinterpret_cast<uint32_t *>(s_stage + piece_offset(r * 8 + g, j) + t * 4) =
                pack<IS_BF16>(end_value(ends[r], o[j][r * 2]), end_value(ends[r], o[j][r * 2 + 1]));
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * BLOCKS; i += 32) {
        const int row = i / BLOCKS, piece = i % BLOCKS;
        if (token + row >= w.of.q_len) break;
        uint16_t *const g_row =
            static_cast<uint16_t *>(args.o) + output_row(args, w, token + row) * HEAD_DIM + column;
        *reinterpret_cast<uint4 *>(g_row + piece * 8) =
            *reinterpret_cast<const uint4 *>(s_stage + piece_offset(row, piece));
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
// What becomes of a reduced piece: o and lse, or, under a split count, a part of them.
#pragma once

#include "common/ptx_team.cuh"
#include "decode/tree.cuh"

// The warps that multiply.
static __device__ __forceinline__ void sync_team()
{
    named_sync(1, THREADS);
}

// What the warps that multiply have written is to be counted at a counter, and it may take a while
// until it can be: another warp sees to it. One arrival at a time.
struct arrivals {
    smem &s;
    uint32_t phase;

    __device__ __forceinline__ void post(int32_t *g_counter, int32_t count)
    {
        if (threadIdx.x == 0) s.post.g_counter = g_counter, s.post.count = count;
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.posted));
    }

    // True if it was the last: what the others have written is there to be read.
    __device__ __forceinline__ bool settle()
    {
        barrier_wait(shared_address(&s.answered), phase);
        phase ^= 1;
        // The lane that reads is the one that posts: by then it has read.
        return __shfl_sync(~0u, lane_id() == 0 ? s.post.is_last : 0, 0);
    }

    __device__ __forceinline__ bool arrive(int32_t *g_counter, int32_t count)
    {
        post(g_counter, count);
        return settle();
    }
};

// For the warp that sees to it.
struct counter {
    smem &s;
    uint32_t phase;

    // The next arrival. False: there will be no more.
    __device__ __forceinline__ bool count()
    {
        barrier_wait(shared_address(&s.posted), phase);
        phase ^= 1;
        int32_t *g_counter = nullptr;
        if (lane_id() == 0) g_counter = s.post.g_counter;
        if (!__shfl_sync(~0u, g_counter != nullptr, 0)) return false;
        if (lane_id() == 0) {
            s.post.is_last = add_in_order(g_counter, 1) == s.post.count - 1;
#if ATTN_MUTATION != 20
            if (s.post.is_last) *g_counter = 0;
#endif
            barrier_arrive(shared_address(&s.answered));
        }
        return true;
    }
};

// Two neighbouring columns of a head's output.
static __device__ __forceinline__ void store_pair(const attn_decode_args &args, const rows &r,
                                                  int row, int column, uint32_t pair)
{
    if (row >= r.num_rows) return;
    const int64_t head = output_of(args, r, locate(args, r, row));
    *reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(args.o) + head * HEAD_DIM + column) =
        pair;
}

static __device__ __forceinline__ uint32_t pack_output(float low, float high)
{
    return Q_IS_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// The first step of a block that a warp has.
static __device__ __forceinline__ int own_step()
{
    return (OWNS_ROWS ? warp_id() / 4 : warp_id()) * STEPS;
}

// Steps `first_step` .. of the output: brings in the sink, divides, rounds. Whole warps.
template <int N>
static __device__ __forceinline__ void store_output(const attn_decode_args &args, const rows &r,
                                                    int first_step, block<N> &b)
{
    const int lane = rare_lane_id(), g = lane / 4, t = lane % 4;
    const float v_scale = args.v_scales ? __ldg(args.v_scales + r.kv_head) : args.v_scale;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int c = 0; c < LANE_ROWS; c++) {
            const int row = own_row(lane, n, c);
            const bool is_row = row < r.num_rows;
            const token_head at = locate(args, r, row);
            const float sink =
                is_row && args.sinks ? __ldg(args.sinks + at.head) * LOG2_E : -INFINITY;
            const float m = max_nan(b.m[n][c], sink);
            const float base = finite_or_zero(m);
            const float weight = ex2(b.m[n][c] - base);
            const float sum = __fmaf_rn(b.l[n][c], weight, ex2(sink - base - SHIFT));
            const float inverse = __frcp_rn(sum);
#pragma unroll
            for (int d = 0; d < N; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (row_of(i) != c) continue;
                    const float o =
                        __fmul_rn(__fmul_rn(__fmul_rn(b.o[d][n][i], weight), inverse), v_scale);
                    // + 0: a masked group may have turned a -0 into +0; let it always be +0.
                    b.o[d][n][i] = sum == 0.0f ? 0.0f : o + 0.0f;
                }
            if (args.lse && is_row && first_step == 0 && speaks_for_rows(lane))
                args.lse[output_of(args, r, at)] = (m + (lg2(sum) + SHIFT)) * LN_2;
        }
#pragma unroll
        for (int d = 0; d < N; d++) {
            const float *const o = b.o[d][n];
            const int column = (first_step + d) * STEP_COLUMNS;
            if (column >= HEAD_DIM) continue;
            if constexpr (OWNS_ROWS) {
#pragma unroll
                for (int c = 0; c < LANE_ROWS; c++)
                    store_pair(args, r, own_row(lane, n, c), column + t * 2,
                               pack_output(o[c * 2], o[c * 2 + 1]));
            } else if constexpr (KV_IS_E4M3) {
                store_pair(args, r, n * 8 + t * 2, column + g * 2, pack_output(o[0], o[2]));
                store_pair(args, r, n * 8 + t * 2 + 1, column + g * 2, pack_output(o[1], o[3]));
            } else {
                store_pair(args, r, n * 8 + g, column + t * 2,
                           movmatrix_trans(pack_output(o[0], o[1])));
                store_pair(args, r, n * 8 + g, column + 8 + t * 2,
                           movmatrix_trans(pack_output(o[2], o[3])));
            }
        }
    }
}

// ---- split counts

static __device__ __forceinline__ float *find_piece(const attn_decode_args &args, const rows &r,
                                                    const token_head &at, int32_t split)
{
    const int64_t index = output_of(args, r, at) * args.splits + split;
    return args.pieces + index * (HEAD_DIM + 2);
}

static __device__ __forceinline__ int column_of(int step, int i, int lane)
{
    const int g = lane / 4;
    return step * 16 + (KV_IS_E4M3 ? g * 2 + i / 2 : g + i / 2 * 8);
}

template <int N>
static __device__ __forceinline__ void store_piece(const attn_decode_args &args, const piece &p,
                                                   const rows &r, int first_step, const block<N> &b)
{
    const int lane = rare_lane_id();
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int row = n * 8 + lane % 4 * 2 + c;
            if (row >= r.num_rows) continue;
            float *const g_piece = find_piece(args, r, locate(args, r, row), p.split);
#pragma unroll
            for (int d = 0; d < N; d++)
#pragma unroll
                for (int i = c; i < 4; i += 2)
                    if (first_step + d < DIM_STEPS)
                        g_piece[column_of(first_step + d, i, lane)] = b.o[d][n][i];
            if (first_step == 0 && lane < 4) {
                g_piece[HEAD_DIM] = b.m[n][c];
                g_piece[HEAD_DIM + 1] = b.l[n][c];
            }
        }
}

// Row n * 8 + 2t + c of a step of a piece; nothing beyond the lane's rows.
static __device__ __forceinline__ void load_piece(const attn_decode_args &args, const rows &r,
                                                  int32_t split, int step, int lane, int n,
                                                  float4 &o, float4 &ml)
{
    float value[4] = {}, m[2] = { -INFINITY, -INFINITY }, l[2] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int row = n * 8 + lane % 4 * 2 + c;
        if (row >= r.num_rows) continue;
        const float *const g_piece = find_piece(args, r, locate(args, r, row), split);
#pragma unroll
        for (int i = c; i < 4; i += 2)
            value[i] = load_global_float(g_piece + column_of(step, i, lane));
        m[c] = load_global_float(g_piece + HEAD_DIM);
        l[c] = load_global_float(g_piece + HEAD_DIM + 1);
    }
    o = make_float4(value[0], value[1], value[2], value[3]);
    ml = make_float4(m[0], m[1], l[0], l[1]);
}

// Whoever has all pieces of a sequence merges them, from the last to the first.
static __device__ __forceinline__ void merge_pieces(const attn_decode_args &args, const rows &r,
                                                    int32_t num_splits)
{
    // From the right: b += what is left of it. Left to right would need a copy.
    const int lane = rare_lane_id();
#pragma unroll 1
    for (int step = warp_id(); step < DIM_STEPS; step += WARPS) {
        block<1> b;
        clear(b);
#if ATTN_MUTATION == 22
        for (int32_t split = args.splits - 1; split >= 0; split--)
#else
        for (int32_t split = num_splits - 1; split >= 0; split--)
#endif
#pragma unroll
            for (int n = 0; n < ROW_BLOCKS; n++) {
                float4 o, ml;
                load_piece(args, r, split, step, lane, n, o, ml);
                merge_o(merge_ml(ml, n, b), o, b.o[0][n]);
            }
        store_output(args, r, step, b);
    }
}

// b is steps `first_step` .. of a whole piece, r the rows of it that are to be written.
template <int N>
static __device__ __forceinline__ void store_whole(const attn_decode_args &args,
                                                   const unit_info &info, const rows &r,
                                                   int first_step, block<N> &b)
{
    if (OWNS_ROWS || args.splits == 1)
        store_output(args, r, first_step, b);
    else
        store_piece(args, describe(args, info.piece), r, first_step, b);
}

// Once that is done. No arrival is open.
static __device__ __forceinline__ void finish_whole(const attn_decode_args &args, arrivals &a,
                                                    const unit_info &info)
{
    if (OWNS_ROWS || args.splits == 1) return;
    const piece p = describe(args, info.piece);
    const rows r = rows_of(args, info);
    int32_t *const g_counter = args.counters + 2 + (int64_t) args.root_levels * args.num_roots +
                               (int64_t) p.sequence * args.lanes + r.lane;
    const int32_t num_splits = p.attended > 0 ? (p.attended - 1) / p.size + 1 : 1;
    if (a.arrive(g_counter, num_splits)) merge_pieces(args, r, num_splits);
}

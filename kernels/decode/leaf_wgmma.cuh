/* SPDX-License-Identifier: Apache-2.0 */
// A leaf of the tree by a warpgroup, for 64 query rows: S = Q K^T, and O = P V with the weights in
// registers. Of both sums, of the sums of weights and of whatever is rounded the order is that of
// leaf.cuh, so that a row has the same bits in either.
//
// A lane has rows g and g + 8 of its warp's 16: of scores columns 8i + 2t and the next one.
#pragma once

#include "common/wgmma.cuh"
#include "decode/scores.cuh"
#include "decode/tree.cuh"

// 8 rows of a line, which the swizzle is over; bytes of a line of the queries; columns of a line.
constexpr int ATOM_BYTES = 8 * LINE_BYTES;
constexpr int Q_LINE_BYTES = ROWS * LINE_BYTES;
constexpr int LINE_COLUMNS = LINE_BYTES / 2;
// Chains of products, as in leaf.cuh.
constexpr int DIM_CHAINS = 2;
constexpr int KEY_CHAINS = GROUPS < 8 ? 1 : 2;

static_assert(!KV_IS_E4M3 && !SKIPS, "16-bit types, all keys");
static_assert(ROWS == 64 && WARPS == 4, "a warpgroup");
static_assert(LINE_BYTES == 128, "a line is as wide as the swizzle");
static_assert(DIM_STEPS <= 16, "as in leaf.cuh: two chains of scores");
static_assert(GROUPS * LINES <= 32, "a lane asks for a box");

// Of a lane: scores, then weights.
using row_scores = float[TILE / 2];
// Weights rounded, as the A of P V: of each group of keys.
using row_weights = uint32_t[GROUPS][4];
// Scores, not scaled yet.
static __device__ __forceinline__ void multiply_k(const unsigned char *s_q,
                                                  const unsigned char *s_tile, row_scores &r_s)
{
    const uint64_t q = wgmma_matrix(uniform_address(s_q), 0, ATOM_BYTES);
    const uint64_t k = wgmma_matrix(uniform_address(s_tile), 0, ATOM_BYTES);
    float chains[DIM_CHAINS][TILE / 2];
#pragma unroll
    for (int i = 0; i < DIM_CHAINS; i++) take_registers(chains[i]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        wgmma<MMA_IS_BF16>(chains[step % DIM_CHAINS],
                           wgmma_further(q, step / 4 * Q_LINE_BYTES + step % 4 * 32),
                           wgmma_further(k, step / 4 * LINE_STEP + step % 4 * 32),
                           step >= DIM_CHAINS);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < DIM_CHAINS; i++) hold_registers(chains[i]);
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) r_s[i] = chains[0][i] + chains[1][i];
}

static __device__ __forceinline__ void scale_scores(const attn_decode_args &args, const scaling &by,
                                                    row_scores &r_s)
{
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) r_s[i] *= by.scale;
    if (!(args.softcap > 0)) return;
#pragma unroll
    for (int i = 0; i < TILE / 2; i++)
        r_s[i] = cap_score(r_s[i], args.softcap, by.inverse_cap) * LOG2_E;
}

// Scores of keys that a row does not attend.
static __device__ __forceinline__ void mask_scores(const attn_decode_args &args,
                                                   const unit_info &unit, const visible_keys &keys,
                                                   row_scores &r_s)
{
    const rows r = rows_of(args, unit);
    const int lane = rare_lane_id();
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int32_t token = locate(args, r, own_row(lane, 0, c)).token;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            uint32_t bits = keys.bits[j];
            if (keys.are_mixed)
                bits &= attended_keys(args, unit.sequence, token, keys.draft + j * 32);
            bits >>= lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int column = i / 2 * 8 + i % 2;
                if (!(bits >> column & 1)) r_s[j * 16 + i / 2 * 4 + c * 2 + i % 2] = -INFINITY;
            }
        }
    }
}

// m of the leaf, of both rows.
static __device__ __forceinline__ void find_max(const row_scores &r_s, block<STEPS> &b)
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float m[4];
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = max_nan(r_s[i * 4 + c * 2], r_s[i * 4 + c * 2 + 1]);
#pragma unroll
        for (int i = 4; i < TILE / 8; i++)
            m[i % 4] = max_nan(m[i % 4], max_nan(r_s[i * 4 + c * 2], r_s[i * 4 + c * 2 + 1]));
        const float all = max_nan(max_nan(m[0], m[1]), max_nan(m[2], m[3]));
        const float pair = max_nan(all, __shfl_xor_sync(~0u, all, 1));
        b.m[0][c] = max_nan(pair, __shfl_xor_sync(~0u, pair, 2));
    }
}

// Weights, and what they are rounded to.
static __device__ __forceinline__ void weigh(row_scores &r_s, row_weights &r_p,
                                             const block<STEPS> &b)
{
    const float base[2] = { finite_or_zero(b.m[0][0]) + SHIFT, finite_or_zero(b.m[0][1]) + SHIFT };
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) r_s[i] = ex2(r_s[i] - base[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < TILE / 4; i++)
        r_p[i / 4][i % 4] = pack<MMA_IS_BF16>(r_s[i * 2], r_s[i * 2 + 1]);
}

// l of the leaf.
static __device__ __forceinline__ void sum_weights(const row_scores &r_s, block<STEPS> &b)
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float sum[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            // Keys k and k + 8, then what differs in bit 0 of k, in bit 1, in bit 2.
            const float *const w = &r_s[g * 8 + c * 2];
            sum[g] = (w[0] + w[4]) + (w[1] + w[5]);
            sum[g] += __shfl_xor_sync(~0u, sum[g], 1);
            sum[g] += __shfl_xor_sync(~0u, sum[g], 2);
        }
        b.l[0][c] = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g += 2) b.l[0][c] += sum[g] + sum[g + 1];
    }
}

// o of the columns in line `line` of V.
static __device__ __forceinline__ void multiply_v(const row_weights &r_p,
                                                  const unsigned char *s_tile, int line,
                                                  block<STEPS> &b)
{
    const uint64_t v =
        wgmma_matrix(uniform_address(s_tile + line * LINE_STEP), LINE_STEP, ATOM_BYTES);
    float chains[KEY_CHAINS][LINE_COLUMNS / 2] = {};
#pragma unroll
    for (int i = 0; i < KEY_CHAINS; i++) hold_registers(chains[i]);
    wgmma_fence();
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        wgmma<MMA_IS_BF16>(chains[g % KEY_CHAINS], r_p[g], wgmma_further(v, g * 2 * ATOM_BYTES));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < KEY_CHAINS; i++) hold_registers(chains[i]);
#pragma unroll
    for (int i = 0; i < LINE_COLUMNS / 2; i++)
        b.o[line * 8 + i / 4][0][i % 4] =
            KEY_CHAINS == 1 ? chains[0][i] : chains[0][i] + chains[KEY_CHAINS - 1][i];
}

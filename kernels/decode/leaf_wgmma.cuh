/* SPDX-License-Identifier: Apache-2.0 */
// A leaf of the tree by two warpgroups, for 32 or 64 query rows: S = Q K^T, each warpgroup half of the
// keys, and O = P V with the weights in registers, each half of the columns. Of both sums, of the
// sums of weights and of whatever is rounded the order is that of leaf.cuh, so that a row has the
// same bits in either.
//
// A lane has rows g and g + 8 of its warp's 16, or row g of its 8: of scores columns 8i + 2t and the
// next one. Warps with equal number in the two warpgroups have the same rows, and meet in pairs for
// what they tell each other.
#pragma once

#include "common/wgmma.cuh"
#include "decode/output.cuh"
#include "decode/scores.cuh"

// 8 rows of a line, which the swizzle is over; bytes of a line of the queries.
constexpr int ATOM_BYTES = 8 * LINE_BYTES;
constexpr int Q_LINE_BYTES = MMA_ROWS * LINE_BYTES;
// Of a warpgroup: keys and groups of them for scores, columns of sums.
constexpr int HALF_KEYS = TILE / 2;
constexpr int HALF_GROUPS = GROUPS / 2;
constexpr int HALF_COLUMNS = HEAD_DIM / 2;
// Chains of products, as in leaf.cuh.
constexpr int DIM_CHAINS = 2;
constexpr int KEY_CHAINS = GROUPS < 8 ? 1 : 2;

static_assert(!KV_IS_E4M3 && !SKIPS, "16-bit types, all keys");
static_assert((ROWS == 32 || ROWS == 64) && WARPS == 8 && ROW_WARPGROUPS == 2, "two warpgroups");
static_assert(LINE_BYTES == 128, "a line is as wide as the swizzle");
static_assert(DIM_STEPS <= 16, "as in leaf.cuh: two chains of scores");
static_assert(HALF_GROUPS == 2 || HALF_GROUPS == 4, "a lane of four has a group");
static_assert(GROUPS * LINES <= 32, "boxes of a tile are asked for without a loop");

// Of a lane: scores, then weights, of its warpgroup's keys.
using row_scores = float[HALF_KEYS / 2];
// Weights rounded, as the A of P V, of each group of half of the keys.
using row_weights = uint32_t[HALF_GROUPS][4];
// Of each of these groups and both rows, a part of the sum of weights.
using row_sums = float[HALF_GROUPS * 2];

// Whether row c of a lane's two is a query row.
static __device__ __forceinline__ constexpr bool is_query_row(int c)
{
    return c < LANE_ROWS;
}

// Who a thread is: kept, since to read it anew takes longer than what a leaf does with it.
struct seat {
    uint32_t warp, lane;

    __device__ __forceinline__ seat()
        : warp(uniform_value(threadIdx.x / 32)), lane(threadIdx.x % 32)
    {
    }

    __device__ __forceinline__ uint32_t warpgroup() const
    {
        return warp / 4;
    }

    // Of its warpgroup.
    __device__ __forceinline__ uint32_t pair() const
    {
        return warp % 4;
    }

    // Of a warp's values, one a lane: of the four lanes of this lane's rows the first.
    __device__ __forceinline__ uint32_t first_lane() const
    {
        return lane / 4 * 4;
    }
};

// Barriers of a pair, beside that of sync_team: of a leaf first for the largest scores, then for
// the first warpgroup's weights, last for the sums; and one for the second warpgroup's weights. For
// weights the warp that tells them only arrives: it comes to no barrier of that number again before
// the other has come, since between two turns of either number both wait for the other one. Nothing
// is told in a place before the other warp has read what was there: it has come to a later barrier.
static __device__ __forceinline__ int pair_barrier(const seat &own)
{
    return 2 + own.pair();
}

static __device__ __forceinline__ int answer_barrier(const seat &own)
{
    return 6 + own.pair();
}

constexpr int PAIR_THREADS = 64;

// The descriptor of this warpgroup's keys, as the B of S, in a tile.
static __device__ __forceinline__ uint64_t own_keys(const seat &own, const unsigned char *s_tile)
{
    return wgmma_matrix(uniform_address(s_tile + own.warpgroup() * HALF_KEYS * LINE_BYTES), 0,
                        ATOM_BYTES);
}

// Of its columns, as the B of O. At HEAD_DIM 64 they may begin in the middle of a line: addresses
// are swizzled, not places in the matrix, as with the steps of K.
static __device__ __forceinline__ uint64_t own_columns(const seat &own, const unsigned char *s_tile)
{
    constexpr int HALF_BYTES = HALF_COLUMNS * 2;
    constexpr int HALF = HALF_BYTES / LINE_BYTES * LINE_STEP + HALF_BYTES % LINE_BYTES;
    return wgmma_matrix(uniform_address(s_tile + own.warpgroup() * HALF), LINE_STEP, ATOM_BYTES);
}

// Scores, not scaled yet.
static __device__ __forceinline__ void multiply_k(uint64_t q, uint64_t k, row_scores &r_s)
{
    float chains[DIM_CHAINS][HALF_KEYS / 2];
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
    for (int i = 0; i < HALF_KEYS / 2; i++)
        if (is_query_row(i / 2 % 2)) r_s[i] = chains[0][i] + chains[1][i];
}

static __device__ __forceinline__ void scale_scores(const attn_decode_args &args, const scaling &by,
                                                    row_scores &r_s)
{
#pragma unroll
    for (int i = 0; i < HALF_KEYS / 2; i++)
        if (is_query_row(i / 2 % 2)) r_s[i] *= by.scale;
    if (!(args.softcap > 0)) return;
#pragma unroll
    for (int i = 0; i < HALF_KEYS / 2; i++)
        if (is_query_row(i / 2 % 2))
            r_s[i] = cap_score(r_s[i], args.softcap, by.inverse_cap) * LOG2_E;
}

// Scores of keys that a row does not attend.
static __device__ __forceinline__ void mask_scores(const attn_decode_args &args,
                                                   const unit_info &unit, const visible_keys &keys,
                                                   row_scores &r_s)
{
    const rows r = rows_of(args, unit);
    const int lane = rare_lane_id(), first_word = warp_id() / 4 * (WORDS / 2);
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        const int32_t token = locate(args, r, own_row(lane, 0, c)).token;
#pragma unroll
        for (int j = 0; j < WORDS / 2; j++) {
            uint32_t bits = keys.bits[first_word + j];
            if (keys.are_mixed)
                bits &=
                    attended_keys(args, unit.sequence, token, keys.draft + (first_word + j) * 32);
            bits >>= lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int column = i / 2 * 8 + i % 2;
                if (!(bits >> column & 1)) r_s[j * 16 + i / 2 * 4 + c * 2 + i % 2] = -INFINITY;
            }
        }
    }
}

static __device__ __forceinline__ float max_of(float4 x)
{
    return max_nan(max_nan(x.x, x.y), max_nan(x.z, x.w));
}

// The largest score of row c that the four lanes of a warp have told.
static __device__ __forceinline__ float max_told(const group_smem &s, const seat &own,
                                                 uint32_t warp, int c)
{
    return max_of(*reinterpret_cast<const float4 *>(&s.max[warp][c][own.first_lane()]));
}

// m of the leaf, of both rows: what each lane has found passes through shared memory, as it has to
// for the other warp.
static __device__ __forceinline__ void find_max(group_smem &s, const seat &own,
                                                const row_scores &r_s, float (&m)[2])
{
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = max_nan(r_s[i * 4 + c * 2], r_s[i * 4 + c * 2 + 1]);
#pragma unroll
        for (int i = 4; i < HALF_KEYS / 8; i++)
            x[i % 4] = max_nan(x[i % 4], max_nan(r_s[i * 4 + c * 2], r_s[i * 4 + c * 2 + 1]));
        s.max[own.warp][c][own.lane] = max_of(make_float4(x[0], x[1], x[2], x[3]));
    }
    named_sync(pair_barrier(own), PAIR_THREADS);
    if (LANE_ROWS == 1) m[1] = -INFINITY;
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++)
        m[c] = max_nan(max_told(s, own, own.warp, c), max_told(s, own, own.warp ^ 4, c));
}

// Weights, and what they are rounded to.
static __device__ __forceinline__ void weigh(row_scores &r_s, row_weights &r_p, const float (&m)[2])
{
    const float base[2] = { finite_or_zero(m[0]) + SHIFT, finite_or_zero(m[1]) + SHIFT };
#pragma unroll
    for (int i = 0; i < HALF_KEYS / 2; i++)
        if (is_query_row(i / 2 % 2)) r_s[i] = ex2(r_s[i] - base[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < HALF_KEYS / 4; i++)
        r_p[i / 4][i % 4] = is_query_row(i % 2) ? pack<MMA_IS_BF16>(r_s[i * 2], r_s[i * 2 + 1]) : 0;
}

// What a lane has of the sums of its warp's groups: keys k and k + 8, then what differs in bit 0 of
// k. Before anything else, so that the weights need not be kept.
static __device__ __forceinline__ void begin_sums(const row_scores &r_s, row_sums &sums)
{
#pragma unroll
    for (int i = 0; i < HALF_GROUPS * 2; i++) {
        const float *const w = &r_s[i / 2 * 8 + i % 2 * 2];
        if (is_query_row(i % 2)) sums[i] = (w[0] + w[4]) + (w[1] + w[5]);
    }
}

// l of the leaf. Of four lanes each comes to have another group: what differs in bit 1 of k, in bit
// 2. Then groups in pairs.
static __device__ __forceinline__ void combine_sums(group_smem &s, const seat &own,
                                                    const row_sums &sums, float (&l)[2])
{
    const bool is_odd = own.lane & 1, is_high = own.lane & 2;
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        float part[HALF_GROUPS / 2];
#pragma unroll
        for (int i = 0; i < HALF_GROUPS / 2; i++) {
            const float even = sums[i * 4 + c], odd = sums[i * 4 + 2 + c];
            part[i] = (is_odd ? odd : even) + __shfl_xor_sync(~0u, is_odd ? even : odd, 1);
        }
        const float low = part[0], high = part[HALF_GROUPS / 2 - 1];
        const float sum = (is_high ? high : low) + __shfl_xor_sync(~0u, is_high ? low : high, 2);
        const float pair = sum + __shfl_xor_sync(~0u, sum, 1);
        if (!is_odd) s.sum[own.warp][c][own.lane / 2] = pair;
    }
    named_sync(pair_barrier(own), PAIR_THREADS);
    if (LANE_ROWS == 1) l[1] = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        l[c] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 sum = *reinterpret_cast<const float2 *>(
                &s.sum[own.pair() + half * 4][c][own.first_lane() / 2]);
            l[c] += sum.x;
            if (HALF_GROUPS == 4) l[c] += sum.y;
        }
    }
}

static __device__ __forceinline__ void tell_weights(group_smem &s, const seat &own,
                                                    const row_weights &r_p, int barrier)
{
#pragma unroll
    for (int g = 0; g < HALF_GROUPS; g++) {
        told_weights p;
#pragma unroll
        for (int i = 0; i < 2 * LANE_ROWS; i++) p.pair[i] = r_p[g][i * 2 / LANE_ROWS];
        s.p[own.pair()][g][own.lane] = p;
    }
    named_arrive(barrier, PAIR_THREADS);
}

static __device__ __forceinline__ void take_weights(const group_smem &s, const seat &own,
                                                    row_weights &r_p, int barrier)
{
    named_sync(barrier, PAIR_THREADS);
#pragma unroll
    for (int g = 0; g < HALF_GROUPS; g++) {
        const told_weights p = s.p[own.pair()][g][own.lane];
#pragma unroll
        for (int i = 0; i < 4; i++) r_p[g][i] = is_query_row(i % 2) ? p.pair[i * LANE_ROWS / 2] : 0;
    }
}

// Sums of products, before they are added up.
using key_chains = float[KEY_CHAINS][HALF_COLUMNS / 2];

// Those of the groups of half `HALF` of the keys.
template <int HALF>
static __device__ __forceinline__ void multiply_half(const row_weights &r_p, uint64_t v,
                                                     key_chains &chains)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HALF_GROUPS; i++) {
        const int g = HALF * HALF_GROUPS + i;
        wgmma<MMA_IS_BF16>(chains[g % KEY_CHAINS], r_p[i], wgmma_further(v, g * 2 * ATOM_BYTES),
                           g >= KEY_CHAINS);
    }
    wgmma_commit();
}

// Sums of this warpgroup's columns, and meanwhile l. Products of the first half of the keys come
// first: the first warpgroup has their weights, and asks for them before it waits for the others.
static __device__ __forceinline__ void multiply_v(group_smem &s, const seat &own,
                                                  const row_weights &r_p, const row_sums &sums,
                                                  uint64_t v, key_chains &chains, float (&l)[2])
{
    row_weights r_other;
#pragma unroll
    for (int i = 0; i < KEY_CHAINS; i++) take_registers(chains[i]);
    if (own.warpgroup() == 0) {
        multiply_half<0>(r_p, v, chains);
        take_weights(s, own, r_other, answer_barrier(own));
        multiply_half<1>(r_other, v, chains);
        combine_sums(s, own, sums, l);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < KEY_CHAINS; i++) hold_registers(chains[i]);
    } else {
        take_weights(s, own, r_other, pair_barrier(own));
        tell_weights(s, own, r_p, answer_barrier(own));
        multiply_half<0>(r_other, v, chains);
        multiply_half<1>(r_p, v, chains);
        combine_sums(s, own, sums, l);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < KEY_CHAINS; i++) hold_registers(chains[i]);
    }
}

// m and l of the leaf, into b: what o of either is multiplied with if they are merged.
static __device__ __forceinline__ weights take_ml(const float (&m)[2], const float (&l)[2],
                                                  bool merges, block<STEPS> &b)
{
    weights w = {};
    if (LANE_ROWS == 1) b.m[0][1] = -INFINITY, b.l[0][1] = 0.0f;
#pragma unroll
    for (int c = 0; c < LANE_ROWS; c++) {
        float all_m = m[c], all_l = l[c];
        if (merges) {
            const float2 of_row = merge_ml(b.m[0][c], b.l[0][c], all_m, all_l);
            w.left[c] = of_row.x, w.right[c] = of_row.y;
        }
        b.m[0][c] = all_m, b.l[0][c] = all_l;
    }
    return w;
}

// The leaf, of this warpgroup's columns, into b: if it `merges`, b is the leaf before, and becomes
// both.
static __device__ __forceinline__ void take_leaf(const key_chains &chains, const float (&m)[2],
                                                 const float (&l)[2], bool merges, block<STEPS> &b)
{
    float sum[STEPS][4];
#pragma unroll
    for (int i = 0; i < HALF_COLUMNS / 2; i++)
        sum[i / 4][i % 4] =
            KEY_CHAINS == 1 ? chains[0][i] : chains[0][i] + chains[KEY_CHAINS - 1][i];
    const weights w = take_ml(m, l, merges, b);
#pragma unroll
    for (int d = 0; d < STEPS; d++) {
        if (merges) merge_o(w, o_of(b, d, 0), sum[d]);
#pragma unroll
        for (int i = 0; i < 4; i++) b.o[d][0][i] = is_query_row(i / 2) ? sum[d][i] : 0.0f;
    }
}

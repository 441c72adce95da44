/* SPDX-License-Identifier: Apache-2.0 */
// A leaf of the tree: S^T = K Q^T, a warp some groups of 16 keys; weights, which the warps
// exchange; and O^T = V^T P^T, a warp some columns.
#pragma once

#include "decode/scores.cuh"
#include "decode/tree.cuh"

// Of this lane: row lane % 16 of a group, piece lane / 16.
static __device__ __forceinline__ uint32_t first_piece(const void *s_group)
{
    return shared_address(s_group) + piece_offset(lane_id() % 16, lane_id() / 16);
}

// The same of pieces 2 * pair and 2 * pair + 1, at `offset` from the group of s_piece. All of a
// leaf come from few values of the xor.
static __device__ __forceinline__ uint32_t pair_address(uint32_t s_piece, uint32_t offset, int pair)
{
    constexpr int LINE_PAIRS = LINE_PIECES / 2;
    return (s_piece ^ (pair % LINE_PAIRS * 32)) + offset + pair / LINE_PAIRS * GROUP * LINE_BYTES;
}

// ---- queries

struct query {
    uint2 r[Q_IN_REGISTERS ? ROW_BLOCKS : 1][Q_IN_REGISTERS ? DIM_STEPS : 1];
    const uint2 *s_q;
    // Of this lane: row g from column 2t on.
    const unsigned char *s_row;
    // If queries are scaled: what scores of rows 2t and 2t + 1 are multiplied with.
    float factor[ROW_BLOCKS][2];

    __device__ __forceinline__ uint2 get(int n, int step) const
    {
        if constexpr (Q_IN_REGISTERS) return r[n][step];
        if constexpr (KEEPS_Q) return s_q[(n * DIM_STEPS + step) * 32 + lane_id()];
        const unsigned char *const s_pair = s_row + n * 8 * Q_PITCH + step * 32;
        return make_uint2(*reinterpret_cast<const uint32_t *>(s_pair),
                          *reinterpret_cast<const uint32_t *>(s_pair + 16));
    }
};

// The exponent field of the larger of two BF16 values; of infinity and NaN: 0.
static __device__ __forceinline__ uint32_t largest_exponent(uint32_t pair)
{
    const uint32_t low = pair >> 7 & 0xFF, high = pair >> 23 & 0xFF;
    return max(low == 0xFF ? 0 : low, high == 0xFF ? 0 : high);
}

static __device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float factor)
{
    return pack_f16(__uint_as_float(pair << 16) * factor,
                    __uint_as_float(pair & 0xFFFF0000u) * factor);
}

// Fragments from the rows of a unit. The columns of a step that lane t has are those that it has of
// K: 2t, 2t + 1, 2t + 8, 2t + 9; E4M3: 4t .. 4t + 3. Into s_q each warp brings a part.
static __device__ __forceinline__ void make_fragments(const unsigned char (&s_rows)[ROWS][Q_PITCH],
                                                      uint2 *s_q, float scale, query &q)
{
    const int lane = rare_lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        constexpr int GAP = KV_IS_E4M3 ? 1 : 4;
        const uint32_t *const s_row =
            reinterpret_cast<const uint32_t *>(s_rows[n * 8 + g]) + (KV_IS_E4M3 ? t * 2 : t);
        float factor = 1.0f;
        if constexpr (SCALE_Q) {
            uint32_t exponent = 0;
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    exponent = max(exponent, largest_exponent(s_row[step * 8 + i * GAP]));
            exponent = max(exponent, __shfl_xor_sync(~0u, exponent, 1));
            exponent = max(exponent, __shfl_xor_sync(~0u, exponent, 2));
            // The largest becomes 2^14 .. 2^15, as far as 2^126 goes.
            const int32_t log = min(127 + 14 - (int32_t) exponent, 126);
            factor = __uint_as_float((uint32_t) (127 + log) << 23);
            const float undo = __uint_as_float((uint32_t) (127 - log) << 23);
#pragma unroll
            for (int c = 0; c < 2; c++)
                q.factor[n][c] = __shfl_sync(~0u, undo, (t * 2 + c) * 4) * scale;
        }
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            if (KEEPS_Q && step % WARPS != warp_id()) continue;
            uint2 pair = make_uint2(s_row[step * 8], s_row[step * 8 + GAP]);
            if constexpr (SCALE_Q)
                pair = make_uint2(scale_pair(pair.x, factor), scale_pair(pair.y, factor));
            if constexpr (Q_IN_REGISTERS)
                q.r[n][step] = pair;
            else
                s_q[(n * DIM_STEPS + step) * 32 + lane] = pair;
        }
    }
}

static __device__ __forceinline__ void take_rows(const unsigned char (&s_rows)[ROWS][Q_PITCH],
                                                 uint2 *s_q, float scale, query &q)
{
    q.s_q = s_q;
    q.s_row = &s_rows[lane_id() / 4][lane_id() % 4 * 4];
    if constexpr (Q_IN_REGISTERS || KEEPS_Q) make_fragments(s_rows, s_q, scale, q);
}

// ---- scores

// A pair of steps of K: rows and columns of the MMA's A from what ldmatrix gives.
static __device__ __forceinline__ void load_k(uint32_t s_piece, uint32_t offset, int pair,
                                              uint32_t (&a)[2][4])
{
    uint32_t r[4];
    ldmatrix_x4(r, pair_address(s_piece, offset, pair));
    if constexpr (KV_IS_E4M3) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[i][0] = unpack_e4m3(r[i * 2]);
            a[i][1] = unpack_e4m3(r[i * 2 + 1]);
            a[i][2] = unpack_high_e4m3(r[i * 2]);
            a[i][3] = unpack_high_e4m3(r[i * 2 + 1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][i] = r[i];
    }
}

// Scores of a group, not scaled yet.
static __device__ __forceinline__ void multiply_k(const query &q, uint32_t s_piece, uint32_t offset,
                                                  float (&sum)[ROW_BLOCKS][4])
{
    // Chains of MMAs: less latency, and shorter sums, as MMAs do not round to nearest.
    constexpr int CHAINS = DIM_STEPS > 16 ? 4 : 2;
    constexpr int PAIRS = PIECES / 2, PAIR_STEPS = DIM_STEPS / PAIRS;
    float part[CHAINS][ROW_BLOCKS][4] = {};
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        uint32_t a[2][4];
        load_k(s_piece, offset, pair, a);
#pragma unroll
        for (int i = 0; i < PAIR_STEPS; i++)
#pragma unroll
            for (int n = 0; n < ROW_BLOCKS; n++) {
                const int step = pair * PAIR_STEPS + i;
                const uint2 b = q.get(n, step);
                mma<MMA_IS_BF16>(part[step % CHAINS][n], a[i], b.x, b.y);
            }
    }
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[n][i] = part[0][n][i] + part[1][n][i];
            if (CHAINS == 4) sum[n][i] += part[CHAINS - 2][n][i] + part[CHAINS - 1][n][i];
        }
}

// Of a lane: keys g and g + 8 of each of its warp's groups, rows 2t and 2t + 1.
using scores = float[OWN_GROUPS][ROW_BLOCKS][4];

static __device__ __forceinline__ void scale_scores(const attn_decode_args &args, const scaling &by,
                                                    const query &q, scores &r_s)
{
#pragma unroll
    for (int g = 0; g < OWN_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) r_s[g][n][i] *= SCALE_Q ? q.factor[n][i % 2] : by.scale;
    if (!(args.softcap > 0)) return;
#pragma unroll
    for (int g = 0; g < OWN_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                r_s[g][n][i] = cap_score(r_s[g][n][i], args.softcap, by.inverse_cap) * LOG2_E;
}

// Over the lanes of a row, of rows 2t and 2t + 1, into the pair at s_pairs + t * STRIDE. In the
// first step each lane keeps one of them.
template <int STRIDE, class F>
static __device__ __forceinline__ void reduce_rows(float even, float odd, F combine,
                                                   float2 *s_pairs)
{
    const bool keeps_odd = lane_id() & 4;
    const float other = __shfl_xor_sync(~0u, keeps_odd ? even : odd, 4);
    float own = combine(keeps_odd ? odd : even, other);
    own = combine(own, __shfl_xor_sync(~0u, own, 8));
    own = combine(own, __shfl_xor_sync(~0u, own, 16));
    float *const s_pair = &s_pairs[lane_id() % 4 * STRIDE].x;
    if (lane_id() < 8) s_pair[lane_id() / 4] = own;
}

// The group of this warp's number `index`.
static __device__ __forceinline__ int own_group(int index)
{
    return index * WARPS + warp_id();
}

// Of a leaf: which of this warp's keys are attended; bits of this lane's as if it were lane 0.
static __device__ __forceinline__ uint32_t own_visible(const visible_keys &visible, int index)
{
    const int group = own_group(index);
    return visible.bits[group / 2] >> group % 2 * 16 >> lane_id() / 4;
}

// Rows attend different keys: scores of those that a row does not.
static __device__ __forceinline__ void mask_rows(const attn_decode_args &args,
                                                 const unit_info &unit, const visible_keys &keys,
                                                 scores &r_s)
{
    const rows r = rows_of(args, unit);
    const int lane = rare_lane_id();
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int32_t token = locate(args, r, n * 8 + lane % 4 * 2 + c).token;
#pragma unroll
            for (int g = 0; g < OWN_GROUPS; g++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = own_group(g) * GROUP + half * 8 + lane / 4;
                    if (!attends(args, unit.sequence, token, keys.draft + key))
                        r_s[g][n][half * 2 + c] = -INFINITY;
                }
        }
}

// Scores of keys that no row attends.
static __device__ __forceinline__ void mask_keys(const visible_keys &keys, scores &r_s)
{
#pragma unroll
    for (int g = 0; g < OWN_GROUPS; g++) {
        const uint32_t visible = own_visible(keys, g);
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (!(visible >> i / 2 * 8 & 1)) r_s[g][n][i] = -INFINITY;
    }
}

// The largest of this warp's scores.
static __device__ __forceinline__ void find_max(leaf_part &s, const scores &r_s)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        float m[2] = { -INFINITY, -INFINITY };
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; g++)
#pragma unroll
            for (int i = 0; i < 4; i++) m[i % 2] = max_nan(m[i % 2], r_s[g][n][i]);
        reduce_rows<SCORERS>(m[0], m[1], max_nan, &s.max[n * 4][warp_id()]);
    }
}

// m of the leaf.
template <int N> static __device__ __forceinline__ void combine_max(const leaf_part &s, block<N> &b)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        b.m[n][0] = b.m[n][1] = -INFINITY;
#pragma unroll
        for (int w = 0; w < SCORERS; w += 2) {
            const float4 m = *reinterpret_cast<const float4 *>(&s.max[n * 4 + t][w]);
            b.m[n][0] = max_nan(b.m[n][0], max_nan(m.x, m.z));
            b.m[n][1] = max_nan(b.m[n][1], max_nan(m.y, m.w));
        }
    }
}

// This warp's weights, and the sums of each group's.
template <int N>
static __device__ __forceinline__ void weigh(leaf_part &s, const scores &r_s, const block<N> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const float base[2] = { finite_or_zero(b.m[n][0]) + SHIFT,
                                finite_or_zero(b.m[n][1]) + SHIFT };
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; g++) {
            const int group = own_group(g);
            float w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = ex2(r_s[g][n][i] - base[i % 2]);
            s.p[group][n][lane_id()] = make_uint2(movmatrix_trans(pack<MMA_IS_BF16>(w[0], w[1])),
                                                  movmatrix_trans(pack<MMA_IS_BF16>(w[2], w[3])));
            reduce_rows<GROUPS>(
                w[0] + w[2], w[1] + w[3], [](float x, float y) { return x + y; },
                &s.sum[n * 4][group]);
        }
    }
}

// l of the leaf.
static __device__ __forceinline__ void combine_sums(const leaf_part &s, block<STEPS> &b)
{
    const int t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        b.l[n][0] = b.l[n][1] = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g += 2) {
            const float4 l = *reinterpret_cast<const float4 *>(&s.sum[n * 4 + t][g]);
            b.l[n][0] += l.x + l.z;
            b.l[n][1] += l.y + l.w;
        }
    }
}

// ---- sums

// V transposed, the MMA's A. 16-bit types: a step, two pieces, of the group at `offset`. E4M3: a
// step, one piece, of this group and of the next.
static __device__ __forceinline__ void load_v(uint32_t s_row, uint32_t offset, int step,
                                              uint32_t (&a)[2][4])
{
    uint32_t r[4];
    if constexpr (KV_IS_E4M3) {
        ldmatrix_x4_trans(r, (s_row ^ step % LINE_PIECES * 16) + offset +
                                 step / LINE_PIECES * GROUP * LINE_BYTES);
        // A register has columns 2g and 2g + 1 of a key, then of the next key.
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t sorted = __byte_perm(r[i * 2 + half], 0, 0x3120);
                a[i][half * 2] = unpack_e4m3(sorted);
                a[i][half * 2 + 1] = unpack_high_e4m3(sorted);
            }
    } else {
        ldmatrix_x4_trans(r, pair_address(s_row, offset, step));
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][i] = r[i];
    }
}

// Of this lane: what load_v's address is made of. E4M3: the first piece of a row of either group.
// Else rows 0 .. 7 of two pieces, then rows 8 .. 15.
static __device__ __forceinline__ uint32_t first_v(const void *s_ring)
{
    const int lane = lane_id();
    return shared_address(s_ring) + (KV_IS_E4M3
                                         ? lane / 16 * GROUP_BYTES + piece_offset(lane % 16, 0)
                                         : piece_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// This warp's columns of o. `offset`: of the tile in the ring.
static __device__ __forceinline__ void multiply_v(const leaf_part &s, uint32_t s_row,
                                                  uint32_t offset, block<STEPS> &b)
{
    constexpr int AT_ONCE = KV_IS_E4M3 ? 2 : 1;
    // As for scores. Groups take turns.
    constexpr int CHAINS = GROUPS < 8 ? 1 : 2;
    const int first_step = warp_id() * STEPS;
    float part[CHAINS][STEPS][ROW_BLOCKS][4] = {};
    if (has_columns()) {
#pragma unroll
        for (int g = 0; g < GROUPS; g += AT_ONCE) {
            uint2 p[AT_ONCE][ROW_BLOCKS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int n = 0; n < ROW_BLOCKS; n++) p[i][n] = s.p[g + i][n][lane_id()];
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                uint32_t a[2][4];
                load_v(s_row, offset + g * GROUP_BYTES, first_step + d, a);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                    for (int n = 0; n < ROW_BLOCKS; n++)
                        mma<MMA_IS_BF16>(part[(g + i) % CHAINS][d][n], a[i], p[i][n].x, p[i][n].y);
            }
        }
    }
#pragma unroll
    for (int d = 0; d < STEPS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                b.o[d][n][i] =
                    CHAINS == 1 ? part[0][d][n][i] : part[0][d][n][i] + part[CHAINS - 1][d][n][i];
}

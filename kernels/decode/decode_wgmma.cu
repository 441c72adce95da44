/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode of many query rows a KV head, trees and chunks of a prompt, by the matrix
// instructions of warpgroups: what decode.cu computes, to the bit.
//
// Who gets what: as in decode.cu, but a lane has up to 32 or 64 query rows. Two warpgroups share a
// leaf: each has half of its keys for the scores, half of the columns for the sums. A pair of warps,
// one of each, has the same 8 or 16 rows, and only these two meet.
//
// Bound by memory: 128 keys of a head, HEAD_DIM 128, take 3,800 clocks to come to an SM, 1,024 of
// its tensor cores, and 512 of what takes exponentials. One warpgroup alone, a warp for each of an
// SM's schedulers, needs 4,440 clocks, most of which it waits for what it has just asked for; of
// two each has half as much to do, and work while the other waits. Products have 64 rows even where
// the lane has 32, but of exponentials and merges, which take longer, only those are done.

#include "common/ptx_team.cuh"
#include "decode/leaf_wgmma.cuh"
#include "decode/team.cuh"

struct team : team_base<team> {
    group_smem &s;
    const seat own;

    __device__ __forceinline__ team(const attn_decode_args &the_args, smem &the_smem,
                                    float *g_stack)
        : team_base(the_args, the_smem, g_stack), s(static_cast<group_smem &>(the_smem))
    {
    }

    // The query row that a row of a product is; ROWS: none.
    static __device__ __forceinline__ int query_row(int row)
    {
        if (LANE_ROWS == 2) return row;
        return row % 16 < 8 ? row / 16 * 8 + row % 8 : ROWS;
    }

    // 0 where the lane has fewer rows.
    __device__ __forceinline__ void take_query(const unit_info &unit)
    {
        const rows r = rows_of(args, unit);
        by = scaling_of(args, r.kv_head);
        const unsigned char *const g_q =
            static_cast<const unsigned char *>(args.q) + queries_of(args, unit) * 2;
        // Products of the unit before are there, of all warps.
        sync_team();
#pragma unroll 4
        for (int i = threadIdx.x; i < MMA_ROWS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (query_row(row) < r.num_rows) {
                const token_head of = locate(args, r, query_row(row));
                x = __ldg(reinterpret_cast<const uint4 *>(
                    g_q + (of.token * args.q_token_stride + of.head * HEAD_DIM) * 2 + piece * 16));
            }
            *reinterpret_cast<uint4 *>(s.q_bytes + piece / LINE_PIECES * Q_LINE_BYTES +
                                       row * LINE_BYTES +
                                       (piece % LINE_PIECES ^ swizzle(row)) * 16) = x;
        }
        fence_async();
        sync_team();
    }

    // What lanes have copied row by row, the tensor cores see after a fence.
    __device__ __forceinline__ void wait_for_operand() const
    {
        wait_for_tile();
        if (!args.has_boxes) fence_async();
    }

    __device__ __forceinline__ void attend_leaf(const unit_info &unit, bool merges, block<STEPS> &b)
    {
        const visible_keys &keys = s.visible[info.slot];
        row_scores r_s;
        row_weights r_p;
        row_sums sums;
        key_chains chains;
        float m[2], l[2];
        const uint64_t q = wgmma_matrix(uniform_address(s.q_bytes), 0, ATOM_BYTES);
        const uint64_t k = own_keys(own, s.ring[at.slot]);
        wait_for_operand();
        const bool are_whole = keys.are_whole, are_mixed = keys.are_mixed;
        multiply_k(q, k, r_s);
        free_tile();
        scale_scores(args, by, r_s);
        if (!are_whole || are_mixed) mask_scores(args, unit, keys, r_s);
        find_max(s, own, r_s, m);
        weigh(r_s, r_p, m);
        begin_sums(r_s, sums);
        if (own.warpgroup() == 0) tell_weights(s, own, r_p, pair_barrier(own));
        const uint64_t v = own_columns(own, s.ring[at.slot]);
        wait_for_operand();
        if (!are_whole && args.has_boxes) {
            clear_rows<WARPS>(s.ring[at.slot], s.visible[info.slot], warp_id());
            sync_team();
        }
        multiply_v(s, own, r_p, sums, v, chains, l);
        free_tile();
        info.next();
        take_leaf(chains, m, l, merges, b);
    }

    __device__ __forceinline__ void attend_unit(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        take_query(unit);
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end; leaf++) {
            const bool is_odd = leaf & 1, is_last = leaf + 1 == end;
            attend_leaf(unit, MERGES_PAIRS && is_odd && leaf > first, b);
            if (!MERGES_PAIRS)
                push(waiting, first, leaf, is_last, b);
            else if (is_odd || is_last)
                push_pair(waiting, first, leaf, is_last, b);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ROW_PER_SM)
    ROW_NAME(const __grid_constant__ struct attn_decode_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    run_block<team>(args, *reinterpret_cast<smem *>(s_bytes));
}

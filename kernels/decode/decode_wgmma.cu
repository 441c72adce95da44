/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode of many query rows a KV head, trees and chunks of a prompt, by the matrix
// instructions of warpgroups: what decode.cu computes, to the bit.
//
// Who gets what: as in decode.cu, but a lane has up to 64 query rows, which a warpgroup shares by
// rows: scores, weights and sums of a row stay in one warp.
//
// Bound by memory: 128 keys of a head, HEAD_DIM 128, take 3,800 clocks to come to an SM, and 1,024
// of its tensor cores.

#include "common/ptx_team.cuh"
#include "decode/leaf_wgmma.cuh"
#include "decode/team.cuh"

struct team : team_base<team> {
    __device__ __forceinline__ team(const attn_decode_args &the_args, smem &the_smem,
                                    float *g_stack)
        : team_base(the_args, the_smem, g_stack)
    {
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
        for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (row < r.num_rows) {
                const token_head of = locate(args, r, row);
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

    // Each warp counts for itself.
    __device__ __forceinline__ void free_tile()
    {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.empty[at.slot]));
        at.next();
    }

    __device__ __forceinline__ void attend_leaf(const unit_info &unit, block<STEPS> &b)
    {
        const visible_keys &keys = s.visible[info.slot];
        row_scores r_s;
        row_weights r_p;
        wait_for_operand();
        const bool are_whole = keys.are_whole, are_mixed = keys.are_mixed;
        multiply_k(s.q_bytes, s.ring[at.slot], r_s);
        free_tile();
        scale_scores(args, by, r_s);
        if (!are_whole || are_mixed) mask_scores(args, unit, keys, r_s);
        find_max(r_s, b);
        weigh(r_s, r_p, b);
        sum_weights(r_s, b);
        wait_for_operand();
        if (!are_whole && args.has_boxes) {
            clear_rows<WARPS>(s.ring[at.slot], s.visible[info.slot], warp_id());
            sync_team();
        }
#pragma unroll
        for (int line = 0; line < LINES; line++) multiply_v(r_p, s.ring[at.slot], line, b);
        free_tile();
        info.next();
    }

    __device__ __forceinline__ void attend_unit(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        take_query(unit);
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end; leaf++) {
            attend_leaf(unit, b);
            push(waiting, first, leaf, leaf + 1 == end, b);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ROW_PER_SM)
    ROW_NAME(const __grid_constant__ struct attn_decode_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    run_block<team>(args, *reinterpret_cast<smem *>(s_bytes));
}

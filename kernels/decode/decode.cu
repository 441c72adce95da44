/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode: o = softmax(scale * q k^T) v for one query token of each sequence, or a few.
//
// The arithmetic, which no schedule changes: keys are cut into leaves of TILE keys at absolute
// multiples of TILE. A leaf gives its largest score m, the sum l of 2^(score - m), and the weighted
// sum o of V. Leaves are merged by the binary tree of aligned power-of-two blocks of leaf indices;
// a block without attended keys is left out. Scores are kept in units of log2. Under a split count
// each piece of a sequence is such a tree, with leaves counted from the piece's first key, and
// pieces are merged from the last to the first.
//
// Who gets what: a lane is a KV head and up to ROWS of its query rows. Blocks take units of leaves
// of a lane, lanes fastest, so that whoever reads the same tokens runs at the same time, and the
// next as soon as they are done, since memory serves some SMs better than others. Of a block one
// warp copies, through a ring of tiles, as far ahead as this has room, across leaves and units; the
// others share the keys of a leaf for its scores, and its columns for the sums, so that two blocks
// of the tree are merged without another warp. Several blocks an SM: while one waits for a barrier
// or merges, the others keep memory busy. What a unit comes to, a root, waits in the workspace
// until the last of the 2^FAN_LOG next to each other merges them.
//
// With skip-softmax, where a sequence may skip at all, K is ahead of V: its scores tell whether V of a
// block of keys is read. What K has given waits in shared memory. A leaf of a block that is left out
// has no keys.
//
// Bound by memory: every K and V byte is read once. 64 sequences of 8192 keys, 8 KV heads, HEAD_DIM
// 128 are 2.15 GB, 0.45 ms at 4.8 TB/s: an SM gets 128 keys of a head in 3,800 clocks. What else
// goes through L2 (registers that spill, what waits in the merge tree) is taken from that.

#include "decode/leaf.cuh"
#include "decode/skip.cuh"
#include "decode/team.cuh"

struct team : team_base<team> {
    shared_smem &s;
    // Which half of s.q it is in.
    int32_t half;
    query q;
    uint32_t s_piece, s_row;
    // Skip-softmax: where the next leaf's weights go, and the next decision.
    ring_place<PARTS> part;
    ring_place<DECISIONS> decision;
    run_of_blocks blocks;

    __device__ __forceinline__ team(const attn_decode_args &the_args, smem &the_smem,
                                    float *g_stack)
        : team_base(the_args, the_smem, g_stack), s(static_cast<shared_smem &>(the_smem)), half(0),
          s_piece(first_piece(the_smem.ring)),
          s_row(first_v(the_smem.ring)), part{ 0, 0 }, decision{ 0, 0 }, blocks{}
    {
    }

    __device__ __forceinline__ void take_query(int32_t lane)
    {
        by = scaling_of(args, kv_head_of(args, lane));
        // The other half may still be read.
        half ^= 1;
        take_rows(q_rows(s, told.slot), s.q[KEEPS_Q ? half : 0], by.scale, q);
        if (KEEPS_Q) sync_team();
    }

    // Some keys are not attended: what their rows of V are must not reach the sums.
    __device__ __forceinline__ void clear_unseen(const visible_keys &keys) const
    {
        if (!args.has_boxes) return;
        wait_for_tile();
        clear_rows<WARPS>(s.ring[at.slot], keys, warp_id());
    }

    static __device__ __forceinline__ bool is_scorer()
    {
        return SCORERS == WARPS || warp_id() < SCORERS;
    }

    // Scores of a leaf whose K is there.
    __device__ __forceinline__ void score(const visible_keys &keys, bool are_whole, leaf_part &into,
                                          scores &r_s)
    {
#pragma unroll
        for (int g = 0; g < OWN_GROUPS; g++)
            multiply_k(q, s_piece, at.slot * TILE_BYTES + own_group(g) * GROUP_BYTES, r_s[g]);
        scale_scores(args, by, q, r_s);
        if (!are_whole) mask_keys(keys, r_s);
        if (keys.are_mixed) mask_rows(args, s.units_told[told.slot], keys, r_s);
        find_max(into, r_s);
    }

    // The tile, of K, which all warps are done with: one of them counts for all.
    __device__ __forceinline__ void free_k()
    {
        if (threadIdx.x == 0) barrier_arrive_times(shared_address(&s.empty[at.slot]), WARPS);
        at.next();
    }

    __device__ __forceinline__ void attend_leaf(block<STEPS> &b)
    {
        const visible_keys &keys = s.visible[info.slot];
        scores r_s;
        wait_for_tile();
        const bool are_whole = keys.are_whole;
        if (is_scorer()) score(keys, are_whole, s.parts[0], r_s);
        sync_team();
        free_k();
        combine_max(s.parts[0], b);
        if (is_scorer()) weigh(s.parts[0], r_s, b);
        if (!are_whole) clear_unseen(keys);
        sync_team();
        combine_sums(s.parts[0], b);
        wait_for_tile();
        multiply_v(s.parts[0], s_row, at.slot * TILE_BYTES, b);
        free_tile();
        info.next();
    }

    // ---- skip-softmax

    // By a warp that may have no scores of its own: `leaf` is the last of its block or unit.
    __device__ __forceinline__ void decide(uint32_t leaf, uint32_t first)
    {
        skip_smem &skip = static_cast<skip_smem &>(s);
        const bool drop = blocks.decide(leaf / SKIP_LEAVES, skip.lambda[told.slot], args.ratio);
        const int leaves = min(leaf % SKIP_LEAVES, leaf - first) + 1;
        if (lane_id() < leaves) skip.is_part_dropped[part.before(lane_id())] = drop;
        if (lane_id() == 0) {
            skip.is_dropped[decision.slot] = drop;
            barrier_arrive(shared_address(&skip.decided[decision.slot]));
        }
        decision.next();
    }

    // K of a leaf: its weights, and perhaps what becomes of its block.
    __device__ __forceinline__ void weigh_leaf(const unit_info &unit, uint32_t leaf)
    {
        const visible_keys &keys = s.visible[info.slot];
        leaf_part &into = s.parts[part.slot];
        scores r_s;
        block<1> of_leaf;
        wait_for_tile();
        if (is_scorer()) score(keys, keys.are_whole, into, r_s);
        sync_team();
        free_k();
        combine_max(into, of_leaf);
        if (warp_id() == WARPS - 1) {
            blocks.add(keys, of_leaf);
            if (leaf % SKIP_LEAVES == SKIP_LEAVES - 1 || leaf + 1 == unit.end)
                decide(leaf, unit.first);
        }
        if (is_scorer()) weigh(into, r_s, of_leaf);
        sync_team();
        part.next();
        info.next();
    }

    // V of a leaf that was weighed.
    __device__ __forceinline__ void sum_leaf(const visible_keys &keys, const leaf_part &from,
                                             block<STEPS> &b)
    {
        wait_for_tile();
        if (!keys.are_whole && args.has_boxes) {
            clear_rows<WARPS>(s.ring[at.slot], keys, warp_id());
            sync_team();
        }
        combine_max(from, b);
        combine_sums(from, b);
        multiply_v(from, s_row, at.slot * TILE_BYTES, b);
        free_tile();
    }

    // The leaf weighed `ago` leaves before the next one. One that is left out has no keys.
    __device__ __forceinline__ void follow(int ago, block<STEPS> &b)
    {
        const int slot = part.before(ago);
        if (static_cast<const skip_smem &>(s).is_part_dropped[slot])
            clear(b);
        else
            sum_leaf(s.visible[info.before(ago)], s.parts[slot], b);
    }

    __device__ __forceinline__ void attend_unit_ahead(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        blocks.begin();
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end + AHEAD; leaf++) {
            if (leaf < end) weigh_leaf(unit, leaf);
            if ((int32_t) (leaf - first) < AHEAD) {
                // So that nothing has to be kept of it.
                clear(b);
                continue;
            }
            const uint32_t now = leaf - AHEAD;
            follow(min(leaf + 1, end) - now, b);
            push(waiting, first, now, now + 1 == end, b);
        }
    }

    __device__ __forceinline__ void attend_unit(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        take_query(unit.lane);
        if constexpr (SKIPS) {
            if (static_cast<const skip_smem &>(s).lambda[told.slot] > 0.0f) {
                attend_unit_ahead(unit, b);
                return;
            }
            // The last leaf of the unit before may still be read where this one's first is told.
            sync_team();
        }
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end; leaf++) {
            attend_leaf(b);
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

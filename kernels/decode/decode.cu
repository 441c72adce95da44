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
// With skip-softmax K is ahead of V: its scores tell whether V of a block of keys is read. What K
// has given waits in shared memory. A leaf of a block that is left out has no keys.
//
// Bound by memory: every K and V byte is read once. 64 sequences of 8192 keys, 8 KV heads, HEAD_DIM
// 128 are 2.15 GB, 0.45 ms at 4.8 TB/s: an SM gets 128 keys of a head in 3,800 clocks. What else
// goes through L2 (registers that spill, what waits in the merge tree) is taken from that.

#include "decode/config.cuh"
#include "decode/feed.cuh"
#include "decode/gather.cuh"
#include "decode/leaf.cuh"
#include "decode/skip.cuh"

// What a warp that multiplies has while it does.
struct team {
    const attn_decode_args &args;
    smem &s;
    ring_place<STAGES> at;
    ring_place<INFOS> told;
    // The place of V of the leaf before.
    int32_t last_v;
    // In s.visible.
    ring_place<LEAF_INFOS> info;
    // Which half of s.q it is in.
    int32_t half;
    query q;
    scaling by;
    uint32_t s_piece, s_row;
    tree_stack waiting;
    arrivals mail;
    // Whether an arrival is open, and where its unit is in s.posted_units.
    bool is_open;
    int32_t posted;
    // Skip-softmax: where the next leaf's weights go, and the next decision.
    ring_place<PARTS> part;
    ring_place<DECISIONS> decision;
    run_of_blocks blocks;

    __device__ __forceinline__ team(const attn_decode_args &the_args, smem &the_smem,
                                    float *g_stack)
        : args(the_args), s(the_smem), at{ 0, 0 }, told{ 0, 0 }, last_v(-1), info{ 0, 0 }, half(0),
          s_piece(first_piece(the_smem.ring)), s_row(first_v(the_smem.ring)),
          waiting{ {}, the_smem.levels[0], g_stack, 0, the_args.stack_slots, 0 }, mail{ the_smem,
                                                                                        0 },
          is_open(false), posted(0), part{ 0, 0 }, decision{ 0, 0 }, blocks{}
    {
    }

    __device__ __forceinline__ void wait_for_tile() const
    {
        barrier_wait(shared_address(&s.full[at.slot]), at.phase);
    }

    // Once all warps are done with it.
    __device__ __forceinline__ void free_tile(int32_t slot) const
    {
        if (threadIdx.x == 0) barrier_arrive(shared_address(&s.empty[slot]));
    }

    __device__ __forceinline__ void take_query(int32_t lane)
    {
        by = scaling_of(args, rows_of(args, lane).kv_head);
        // The other half may still be read.
        half ^= 1;
        take_rows(s.q_rows[told.slot], s.q[KEEPS_Q ? half : 0], q);
        if (KEEPS_Q) sync_team();
    }

    // Some keys are not attended: what their rows of V are must not reach the sums.
    __device__ __forceinline__ void clear_unseen(const visible_keys &keys) const
    {
        if (!args.has_boxes) return;
        wait_for_tile();
        clear_rows(s.ring[at.slot], keys);
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

    // K was read, and V of the leaf before.
    __device__ __forceinline__ void free_tiles()
    {
        if (last_v >= 0) free_tile(last_v);
        free_tile(at.slot);
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
        free_tiles();
        last_v = at.slot;
        combine_max(s.parts[0], b);
        if (is_scorer()) weigh(s.parts[0], r_s, b);
        if (!are_whole) clear_unseen(keys);
        sync_team();
        combine_sums(s.parts[0], b);
        wait_for_tile();
        multiply_v(s.parts[0], s_row, at.slot * TILE_BYTES, b);
        at.next();
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
    __device__ __forceinline__ void weigh_leaf(const unit_info &unit, uint32_t leaf, bool may_skip)
    {
        const visible_keys &keys = s.visible[info.slot];
        leaf_part &into = s.parts[part.slot];
        scores r_s;
        block<1> of_leaf;
        wait_for_tile();
        if (is_scorer()) score(keys, keys.are_whole, into, r_s);
        sync_team();
        free_tiles();
        last_v = -1;
        combine_max(into, of_leaf);
        if (may_skip && warp_id() == WARPS - 1) {
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
        // There was no K in between, to free it after.
        if (last_v >= 0) {
            sync_team();
            free_tile(last_v);
        }
        wait_for_tile();
        if (!keys.are_whole && args.has_boxes) {
            clear_rows(s.ring[at.slot], keys);
            sync_team();
        }
        combine_max(from, b);
        combine_sums(from, b);
        multiply_v(from, s_row, at.slot * TILE_BYTES, b);
        last_v = at.slot;
        at.next();
    }

    // The leaf weighed `ago` leaves before the next one. One that is left out has no keys.
    __device__ __forceinline__ void follow(int ago, bool may_skip, block<STEPS> &b)
    {
        const int slot = part.before(ago);
        if (may_skip && static_cast<const skip_smem &>(s).is_part_dropped[slot])
            clear(b);
        else
            sum_leaf(s.visible[info.before(ago)], s.parts[slot], b);
    }

    __device__ __forceinline__ void attend_unit_ahead(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        const uint32_t ahead =
            static_cast<const skip_smem &>(s).lambda[told.slot] > 0.0f ? AHEAD : 0;
        blocks.begin();
        take_query(unit.lane);
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end + ahead; leaf++) {
            if (leaf < end) weigh_leaf(unit, leaf, ahead > 0);
            if (leaf - first < ahead) {
                // So that nothing has to be kept of it.
                clear(b);
                continue;
            }
            const uint32_t now = leaf - ahead;
            follow(min(leaf + 1, end) - now, ahead > 0, b);
            push(waiting, first, now, now + 1 == end, b);
        }
    }

    // If the arrival that is open was the last, merges the roots, and goes on upwards.
    __device__ __forceinline__ void settle()
    {
        if (!is_open) return;
        is_open = false;
        if (!mail.settle()) return;
        climb c(args, s.posted_units[posted]);
        bool is_part = c.seek();
        do {
            const fan gathered = c.gathered();
            c.go_up();
            is_part = c.seek();
            float4 o[AT_ONCE];
            gathered.begin_steps(s.fan, o);
#pragma unroll 1
            for (int d = 0; d < STEPS; d++) {
                block<1> b;
                gathered.merge_step(s.fan, o, d, b);
                if (is_part)
                    store_step(c.slot(), d, b, 0);
                else
                    store_whole(args, c.r.info, warp_id() * STEPS + d, b);
            }
            // Levels of the merge tree will be where the weights are.
            sync_team();
            if (!is_part) break;
            c.post(mail);
        } while (mail.settle());
        if (!is_part) finish_whole(args, mail, c.r.info);
    }

    __device__ __forceinline__ void attend_unit(const unit_info &unit, block<STEPS> &b)
    {
        const uint32_t first = unit.first, end = unit.end;
        take_query(unit.lane);
#pragma unroll 1
        for (uint32_t leaf = first; leaf < end; leaf++) {
            attend_leaf(b);
            push(waiting, first, leaf, leaf + 1 == end, b);
        }
    }

    // A unit's arrival is left open for the time of another one.
    __device__ __forceinline__ void run()
    {
#pragma unroll 1
        for (;; told.next()) {
            barrier_wait(shared_address(&s.told[told.slot]), told.phase);
            const unit_info &unit = s.units_told[told.slot];
            const bool is_end = unit.lane < 0;
            climb c(args, unit);
            const bool is_part = !is_end && c.seek();
            if (!is_end) {
                block<STEPS> b;
                if constexpr (SKIPS)
                    attend_unit_ahead(unit, b);
                else
                    attend_unit(unit, b);
                if (is_part)
                    store_slot(c.slot(), b);
                else
                    store_whole(args, unit, warp_id() * STEPS, b);
            }
            if (is_part || is_end || args.splits > 1) settle();
            if (is_end) break;
            if (!is_part) {
                finish_whole(args, mail, unit);
                continue;
            }
            posted ^= 1;
            if (threadIdx.x == 0) s.posted_units[posted] = unit;
            c.post(mail);
            is_open = true;
        }
        mail.post(nullptr, 0);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ROW_PER_SM)
    ROW_NAME(const __grid_constant__ struct attn_decode_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);
    const bool copies = warp_id() == WARPS;
    let_next_grid_come();
    if (args.has_boxes && threadIdx.x == 0) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    if (threadIdx.x < STAGES) {
        // By rows each lane arrives with its copies, and one that has told of them.
        barrier_init(shared_address(&s.full[threadIdx.x]), args.has_boxes ? 1 : 33);
        barrier_init(shared_address(&s.empty[threadIdx.x]), 1);
    }
    if (threadIdx.x < INFOS) barrier_init(shared_address(&s.told[threadIdx.x]), 33);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.posted), WARPS);
        barrier_init(shared_address(&s.answered), 1);
    }
    if (SKIPS && threadIdx.x < DECISIONS)
        barrier_init(shared_address(&static_cast<skip_smem &>(s).decided[threadIdx.x]), 1);
    fence_async();
    wait_for_grids_before();
    int32_t next = 0;
    schedule dealt_as = {};
    if (copies && lane_id() == 0) next = atomicAdd(&args.counters[0], 1);
    if (are_few(args)) {
        if (copies)
            dealt_as.count(args);
        else
            prefetch_table(args);
        __syncthreads();
    } else {
        count_all(args, s);
        dealt_as.dealt = s.dealt;
    }
    if (copies) {
        feed(args, s).run(dealt_as, next);
        return;
    }
    if (warp_id() > WARPS) {
        count_arrivals(s);
        return;
    }
    float *const g_stack =
        args.slots +
        ((int64_t) args.num_roots + (int64_t) blockIdx.x * args.stack_slots) * SLOT_FLOATS;
    team t(args, s, g_stack);
    t.run();
}

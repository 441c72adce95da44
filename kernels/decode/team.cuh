/* SPDX-License-Identifier: Apache-2.0 */
// What a block does, however it multiplies: the parts that its warps have, unit after unit, and how
// the roots of units meet.
#pragma once

#include "decode/feed_v.cuh"
#include "decode/scores.cuh"
#include "decode/together.cuh"

// What a warp that multiplies has while it does. TEAM, which this is the base of, has
// attend_unit(unit, b): all leaves of a unit, into b.
template <class TEAM> struct team_base {
    const attn_decode_args &args;
    smem &s;
    // Tiles, units told, leaves in s.visible.
    ring_place<STAGES> at;
    ring_place<INFOS> told;
    ring_place<LEAF_INFOS> info;
    scaling by;
    tree_stack waiting;
    arrivals mail;
    // Whether an arrival is open, and where its unit is in s.posted_units.
    bool is_open;
    int32_t posted;

    __device__ __forceinline__ team_base(const attn_decode_args &the_args, smem &the_smem,
                                         float *g_stack)
        : args(the_args), s(the_smem), at{ 0, 0 }, told{ 0, 0 }, info{ 0, 0 },
          waiting{ {}, the_smem.levels[0], g_stack, 0, the_args.stack_slots, 0 }, mail{ the_smem,
                                                                                        0 },
          is_open(false), posted(0)
    {
    }

    __device__ __forceinline__ void wait_for_tile() const
    {
        barrier_wait(shared_address(&s.full[at.slot]), at.phase);
    }

    // Done with the tile: each warp counts for itself, and need not have met the others.
    __device__ __forceinline__ void free_tile()
    {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.empty[at.slot]));
        at.next();
    }

    __device__ __forceinline__ void store_unit(float *root, const block<STEPS> &b) const
    {
#pragma unroll
        for (int d = 0; d < STEPS; d++) store_root(args, root, d, b, d);
    }

    // The roots of a fan, into the root above them or the output.
    __device__ __forceinline__ void merge_roots(const fan &gathered, const climb &above,
                                                bool is_part, const rows &r)
    {
        float4 o[AT_ONCE];
        gathered.begin_steps(s.fan, o);
#pragma unroll 1
        for (int d = 0; d < STEPS; d++) {
            block<1> b;
            gathered.merge_step(s.fan, o, d, b);
            if (is_part)
                store_root(args, above.slot(), d, b, 0);
            else
                store_whole(args, above.r.info, r, own_step() + d, b);
        }
        // Levels of the merge tree will be where the weights are.
        sync_team();
    }

    // If the arrival that is open was the last, merges the roots, and goes on upwards.
    __device__ __forceinline__ void settle()
    {
        if (!is_open) return;
        is_open = false;
        // The unit that was posted is there to be read.
        sync_team();
        climb c(args, s.posted_units[posted]);
        const rows r = rows_of(args, c.r.info);
        c.seek();
#pragma unroll 1
        for (;;) {
            // All that does not need the answer comes before it.
            const fan gathered = c.gathered();
            c.go_up();
            const bool is_part = c.seek();
            if (!mail.settle()) return;
            merge_roots(gathered, c, is_part, r);
            if (!is_part) break;
            mail.post(c.counter(), c.count());
        }
        finish_whole(args, mail, c.r.info);
    }

    // A unit's arrival is left open for the time of another one.
    __device__ __forceinline__ void run()
    {
#pragma unroll 1
        for (;; told.next()) {
            barrier_wait(shared_address(&s.told[told.slot]), told.phase);
            const unit_info &unit = s.units_told[told.slot];
            const bool is_end = unit.lane < 0;
            bool is_part = false;
            if (!is_end) {
                block<STEPS> b;
                // Nothing waits there between units, and so no registers are kept.
                clear(waiting.lowest);
                static_cast<TEAM *>(this)->attend_unit(unit, b);
                climb c(args, unit);
                is_part = c.seek();
                if (is_part)
                    store_unit(c.slot(), b);
                else
                    store_whole(args, unit, rows_of(args, unit), own_step(), b);
                // No block has another unit then: no arrival is open.
                if (MERGES_TOGETHER && is_part && meeting_roots::are_so(args, s, unit)) break;
            }
            if (is_part || is_end || args.splits > 1) settle();
            if (is_end) break;
            if (!is_part) {
                finish_whole(args, mail, unit);
                continue;
            }
            posted ^= 1;
            if (threadIdx.x == 0) s.posted_units[posted] = unit;
            climb c(args, unit);
            c.seek();
            mail.post(c.counter(), c.count());
            is_open = true;
        }
        mail.post(nullptr, 0);
        // All others end here, without code that has yet to come.
        const unit_info &last = s.units_told[told.slot];
        if (MERGES_TOGETHER && last.lane >= 0) meeting_roots(args, s, last).run();
    }
};

// What a warp that multiplies does.
template <class TEAM>
static __device__ __forceinline__ void run_team(const attn_decode_args &args, smem &s)
{
    float *const g_stack =
        args.slots +
        ((int64_t) args.num_roots + (int64_t) blockIdx.x * args.stack_slots) * SLOT_FLOATS;
    TEAM(args, s, g_stack).run();
}

// By one thread, at addresses that are the same for all: more threads would take turns.
static __device__ __forceinline__ void init_barriers(const attn_decode_args &args, smem &s)
{
    // By rows each lane arrives with its copies, and one that has told of them.
    const uint32_t copies = args.has_boxes ? 1 : 33;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&s.full[i]), copies);
        barrier_init(shared_address(&s.empty[i]), WARPS);
    }
#pragma unroll
    for (int i = 0; i < INFOS; i++) barrier_init(shared_address(&s.told[i]), 1);
    if (!SKIPS)
#pragma unroll
        for (int i = 0; i < LEAF_INFOS; i++) barrier_init(shared_address(&s.seen_leaf[i]), 1);
    barrier_init(shared_address(&s.posted), WARPS);
    barrier_init(shared_address(&s.answered), 1);
    if (SKIPS)
#pragma unroll
        for (int i = 0; i < DECISIONS; i++)
            barrier_init(shared_address(&static_cast<skip_smem &>(s).decided[i]), 1);
    fence_async();
}

// The kernel, on a block's shared memory.
template <class TEAM>
static __device__ __forceinline__ void run_block(const attn_decode_args &args, smem &s)
{
    const bool copies = warp_id() == WARPS;
    let_next_grid_come();
    if (threadIdx.x == 0) init_barriers(args, s);
    if (args.has_boxes && threadIdx.x == THREADS) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    prefetch_lens(args);
    if (are_few(args)) prefetch_table(args);
    wait_for_grids_before();
    schedule dealt_as;
    if (are_few(args)) {
        // Which needs nothing of the other warps.
        if (copies) dealt_as.count(args);
        if (MERGES_TOGETHER && threadIdx.x == THREADS) s.dealt = dealt_as.dealt;
        __syncthreads();
    } else {
        count_all(args, s);
        dealt_as.dealt = s.dealt;
    }
    if constexpr (OWNS_ROWS) {
        if (warp_id() < WARPS) {
            raise_registers<MULTIPLY_REGISTERS>();
            run_team<TEAM>(args, s);
            return;
        }
        lower_registers<COPY_REGISTERS>();
        if (warp_id() > WARPS + 1) return;
    }
    if (copies) {
        feed(args, s).run(dealt_as);
        return;
    }
    if (OWNS_ROWS || warp_id() > WARPS) {
        if (!SKIPS && !args.has_boxes) {
            v_feed(args, s).run();
            return;
        }
        prefetch_results(args);
        counter arrivals = { s, 0 };
        while (arrivals.count()) continue;
        return;
    }
    run_team<TEAM>(args, s);
}

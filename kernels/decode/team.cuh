/* SPDX-License-Identifier: Apache-2.0 */
// What a block does, however it multiplies: the parts that its warps have, unit after unit, and how
// the roots of units meet.
#pragma once

#include "decode/feed_v.cuh"
#include "decode/gather.cuh"
#include "decode/scores.cuh"

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
                    store_whole(args, c.r.info, own_step() + d, b);
            }
            // Levels of the merge tree will be where the weights are.
            sync_team();
            if (!is_part) break;
            c.post(mail);
        } while (mail.settle());
        if (!is_part) finish_whole(args, mail, c.r.info);
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
                static_cast<TEAM *>(this)->attend_unit(unit, b);
                if (is_part)
                    store_slot(c.slot(), b);
                else
                    store_whole(args, unit, own_step(), b);
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

// The kernel, on a block's shared memory.
template <class TEAM>
static __device__ __forceinline__ void run_block(const attn_decode_args &args, smem &s)
{
    const bool copies = warp_id() == WARPS;
    let_next_grid_come();
    if (args.has_boxes && threadIdx.x == 0) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    if (threadIdx.x < STAGES) {
        // By rows each lane arrives with its copies, and one that has told of them.
        barrier_init(shared_address(&s.full[threadIdx.x]), args.has_boxes ? 1 : 33);
        // Where warps share rows, one thread has met them all.
        barrier_init(shared_address(&s.empty[threadIdx.x]), OWNS_ROWS ? WARPS : 1);
    }
    if (!SKIPS && threadIdx.x < LEAF_INFOS)
        barrier_init(shared_address(&s.seen_leaf[threadIdx.x]), 1);
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
        if (!SKIPS && !args.has_boxes) {
            v_feed(args, s).run();
            return;
        }
        counter arrivals = { s, 0 };
        while (arrivals.count()) continue;
        return;
    }
    float *const g_stack =
        args.slots +
        ((int64_t) args.num_roots + (int64_t) blockIdx.x * args.stack_slots) * SLOT_FLOATS;
    TEAM(args, s, g_stack).run();
}

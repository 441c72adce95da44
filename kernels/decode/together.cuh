/* SPDX-License-Identifier: Apache-2.0 */
// Roots of a lane that blocks have at the same time, one each: all of these merge them, each some of
// the columns, and so none has to read all roots. To the same bits as whoever is last, see gather.cuh.
// Not where they are small: then it is the next grid's blocks that come too late, on the SMs of all
// that waited instead of one.
//
// A block that has stored its root waits for the others for a while, but never for good: other grids
// may have their places. One that gives up says so where they arrive, in the same word, and whoever is
// last merges its columns, too. It can't miss that: who gives up after the last one has come sees that
// all are there, and goes on.
#pragma once

#include "decode/gather.cuh"

// How often a block looks whether all are there: some 0.6 us each.
constexpr int MOST_LOOKS = 48;
// Where that is worth while: with so many roots, and units of so few leaves that blocks are done at
// about the same time. Two blocks an SM: the next grid has come already.
constexpr int LEAST_BYTES = 96 << 10, LEAST_ROOTS = LEAST_BYTES / (SLOT_FLOATS * 4);
constexpr int LEAST_TOGETHER = ROW_PER_SM > 1            ? 16
                               : LEAST_ROOTS > DIM_STEPS ? LEAST_ROOTS
                                                         : DIM_STEPS;
constexpr int MOST_SHIFT = 4;
// Roots of which a warp merges a step.
constexpr int PART_LOG = TOGETHER_LOG - (WARPS == 8 ? 3 : WARPS == 4 ? 2 : 1), PART = 1 << PART_LOG;
// Of the word where they arrive: how many have, and above that whose steps are left to the last.
constexpr int32_t ARRIVED = 255;
constexpr int LEFT_SHIFT = 8;
static_assert(!MERGES_TOGETHER || PART * WARPS == TOGETHER, "each warp has a part");
static_assert(!MERGES_TOGETHER || DIM_STEPS + LEFT_SHIFT < 31, "each step has a bit");
static_assert(!MERGES_TOGETHER || LEAST_TOGETHER >= DIM_STEPS, "no block has more than a step");

struct meeting_roots {
    const roots r;
    together_weights &s;
    // Roots low .. high, of which the first has lane 0.
    int32_t begin, low, high;

    __device__ __forceinline__ meeting_roots(const attn_decode_args &args, smem &the_smem,
                                             const unit_info &info)
        : r{ args, info }, s(*reinterpret_cast<together_weights *>(the_smem.ring)),
          begin(info.first_unit >> TOGETHER_LOG << TOGETHER_LOG), low(info.first_unit),
          high(info.last_unit)
    {
#if ATTN_MUTATION == 29
        begin = low;
#endif
    }

    // Without the number of blocks, which would be kept in a register.
    static __device__ __forceinline__ bool is_one_round(const attn_decode_args &args,
                                                        const deal &dealt)
    {
        return attn_divide((uint32_t) dealt.total - 1, args.grid_magic, args.grid_shift) == 0;
    }

    // Whether that is so, and worth while. The same for all units of a lane.
    static __device__ __forceinline__ bool are_so(const attn_decode_args &args, const smem &s,
                                                  const unit_info &info)
    {
        const int32_t num = info.last_unit - info.first_unit + 1;
        return num >= LEAST_TOGETHER && shift_of(s.dealt, info.piece) <= MOST_SHIFT &&
               args.splits == 1 && is_one_round(args, s.dealt) &&
               info.first_unit >> TOGETHER_LOG == info.last_unit >> TOGETHER_LOG;
    }

    __device__ __forceinline__ bool has(int32_t index) const
    {
        return index >= low && index <= high;
    }

    // Steps that this block is to merge, once all roots that they need are there. One thread.
    __device__ __forceinline__ uint32_t arrive() const
    {
        const int32_t num = high - low + 1, own = r.info.unit - low;
        int32_t *const g_word = r.args.counters + 2 + r.number(low, 0);
        const uint32_t step = own < DIM_STEPS ? 1u << own : 0;
        const int32_t before = add_in_order(g_word, 1);
        if ((before & ARRIVED) == num - 1) return step | (uint32_t) before >> LEFT_SHIFT;
        if (step == 0) return 0;
#pragma unroll 1
        for (int i = 0; i < MOST_LOOKS; i++)
            if ((load_in_order(g_word) & ARRIVED) == num) return step;
        const int32_t last = or_in_order(g_word, (int32_t) (step << LEFT_SHIFT));
        return (last & ARRIVED) == num ? step : 0;
    }

    // Nobody looks any more once all have left: whoever is last leaves the words as they were.
    __device__ __forceinline__ void leave() const
    {
        int32_t *const g_word = r.args.counters + 2 + r.number(low, 0);
        int32_t *const g_left = r.args.counters + 2 + r.number(low + 1, 0);
        if (add_in_order(g_left, 1) == high - low) *g_word = *g_left = 0;
    }

    __device__ __forceinline__ float2 load_ml(int row) const
    {
        const int32_t index = begin + lane_id();
        if (!has(index)) return make_float2(-INFINITY, 0.0f);
        return load_root_ml(r.slot(index, 0), row);
    }

    // This warp's part of the roots: of row block n of a step.
    __device__ __forceinline__ void load(float4 (&o)[PART], int step, int n) const
    {
        const int place = place_of(lane_id());
        const int32_t offset = ((step * ROW_BLOCKS + n) * 32 + place) * (2 * LANE_ROWS);
#pragma unroll
        for (int i = 0; i < PART; i++) {
            const int32_t index = begin + warp_id() * PART + i;
            o[i] = make_float4(0, 0, 0, 0);
            if (has_rows(r.args, n) && has(index))
                o[i] =
                    load_values(reinterpret_cast<const slot_values *>(r.slot(index, 0) + offset));
        }
    }

    // Of 2^LOG neighbours the first of which is `first` of blocks of 2^LEVEL roots; into the last.
    template <int LOG, int LEVEL>
    __device__ __forceinline__ void merge_all(float4 (&o)[1 << LOG], int first, int n) const
    {
#pragma unroll
        for (int level = 0; level < LOG; level++)
#pragma unroll
            for (int i = 0; i < 1 << LOG; i += 2 << level)
                merge_by(s, s.first_node(LEVEL + level) + ((first + i) >> (level + 1)), n,
                         o[i + (1 << level) - 1], o[i + (2 << level) - 1]);
    }

    // Step `step` of the whole piece, into the output. The warps that multiply together.
    __device__ __forceinline__ void merge_step(const rows &own, int step) const
    {
        constexpr int WARPS_LOG = TOGETHER_LOG - PART_LOG;
        float4 o[ROW_BLOCKS][PART];
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) load(o[n], step, n);
#pragma unroll
        for (int row = warp_id(); row < ROWS; row += WARPS) weigh_row(s, row, load_ml(row));
        sync_team();
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) {
            merge_all<PART_LOG, 0>(o[n], warp_id() * PART, n);
            s.part[warp_id()][n][lane_id()] = o[n][PART - 1];
        }
        sync_team();
        if (warp_id() == 0) {
            block<1> b;
#pragma unroll
            for (int n = 0; n < ROW_BLOCKS; n++) {
                float4 parts[WARPS];
#pragma unroll
                for (int i = 0; i < WARPS; i++) parts[i] = s.part[i][n][lane_id()];
                merge_all<WARPS_LOG, PART_LOG>(parts, 0, n);
                set_whole(s, n, parts[WARPS - 1], b);
            }
            store_output(r.args, own, step, b);
        }
        sync_team();
    }

    // This block's root is stored. The warps that multiply together.
    __device__ __forceinline__ void run() const
    {
        const rows own = rows_of(r.args, r.info);
        sync_team();
        if (threadIdx.x == 0) s.steps = arrive();
        sync_team();
#pragma unroll 1
        for (uint32_t steps = s.steps; steps != 0; steps &= steps - 1)
            merge_step(own, __ffs(steps) - 1);
        if (threadIdx.x == 0) leave();
    }
};

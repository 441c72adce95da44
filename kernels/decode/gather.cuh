/* SPDX-License-Identifier: Apache-2.0 */
// The roots of a piece: units are merged 2^FAN_LOG at a time by whoever is the last of them, then
// what these come to, and so on: an aligned block of the tree each.
#pragma once

#include "decode/output.cuh"

// Roots in registers at the same time, where there is room for them.
constexpr int ROOT_REGISTERS = ROW_BLOCKS * (STEPS + 1) * 4;
constexpr int MOST_REGISTERS = 65536 / (ROW_PER_SM * BLOCK_THREADS);
constexpr int QUAD =
    ROOT_REGISTERS * 4 <= (MOST_REGISTERS < 255 ? MOST_REGISTERS : 255) - 72 ? 4 : 2;

struct roots {
    const attn_decode_args &args;
    const unit_info &info;

    // Of the block of 2^log units with number `index`.
    __device__ __forceinline__ int32_t number(int32_t index, int32_t log) const
    {
        const int32_t first = max(index << log, info.first_unit);
        const int64_t root =
            (int64_t) (info.slot + first - info.first_unit) * args.lanes + info.lane;
        return (int32_t) min(root, (int64_t) args.num_roots - 1);
    }

    __device__ __forceinline__ float *slot(int32_t index, int32_t log) const
    {
        return args.slots + (int64_t) number(index, log) * SLOT_FLOATS;
    }
};

// b = the roots of blocks low .. high of 2^log units.
static __device__ __forceinline__ void gather(const roots &r, int32_t low, int32_t high,
                                              int32_t log, tree_stack &waiting, block<STEPS> &b)
{
#pragma unroll 1
    for (int32_t quad = low / QUAD; quad <= high / QUAD; quad++) {
        block<STEPS> part[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++)
            load_root(r.slot(min(max(quad * QUAD + i, low), high), log), part[i]);
#if ATTN_MUTATION == 21
        // From left to right.
        for (int i = 0; i < QUAD; i++) {
            const int32_t index = quad * QUAD + i;
            if (index < low || index > high) continue;
            if (index > low) merge_blocks(b, part[i]);
            b = part[i];
        }
#else
        // Into the right half; what is not there is left out.
#pragma unroll
        for (int width = 1; width < QUAD; width *= 2)
#pragma unroll
            for (int i = 0; i < QUAD; i += width * 2) {
                const int32_t middle = quad * QUAD + i + width;
                block<STEPS> &left = part[i + width - 1], &right = part[i + width * 2 - 1];
                if (middle > high)
                    right = left;
                else if (middle > low)
                    merge_blocks(left, right);
            }
        b = part[QUAD - 1];
        push(waiting, low / QUAD, quad, quad == high / QUAD, b);
#endif
    }
    // What comes of it may be stored where other lanes have read.
    __syncwarp();
}

// What a unit comes to is b. True if b is now the whole piece.
static __device__ __forceinline__ bool merge_units(const attn_decode_args &args, smem &s,
                                                   const unit_info &info, tree_stack &waiting,
                                                   block<STEPS> &b)
{
    const roots r = { args, info };
    int32_t own = info.unit, first = info.first_unit, last = info.last_unit;
    int32_t *g_level = args.counters + 2;
#pragma unroll 1
    for (int32_t log = 0; first < last; log += FAN_LOG) {
        const int32_t parent = own >> FAN_LOG;
        const int32_t low = max(parent << FAN_LOG, first);
        const int32_t high = min((parent << FAN_LOG) + (1 << FAN_LOG) - 1, last);
        if (low < high) {
            store_slot(r.slot(own, log), b);
            if (!arrive(s, g_level + r.number(parent, log + FAN_LOG), high - low + 1))
                return false;
            gather(r, low, high, log, waiting, b);
        }
        g_level += args.num_roots;
        own = parent;
        first >>= FAN_LOG, last >>= FAN_LOG;
    }
    return true;
}

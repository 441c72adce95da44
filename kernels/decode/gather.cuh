/* SPDX-License-Identifier: Apache-2.0 */
// The roots of a piece: units are merged 2^FAN_LOG at a time by whoever is the last of them, then
// what these come to, and so on: an aligned block of the tree each.
#pragma once

#include "decode/output.cuh"

// Roots in registers at the same time, where there is room for them.
constexpr int ROOT_REGISTERS = ROW_BLOCKS * (STEPS + 1) * 4;
constexpr int MOST_REGISTERS = 65536 / (ROW_PER_SM * BLOCK_THREADS);
constexpr int QUAD =
    ROOT_REGISTERS * 4 <= (MOST_REGISTERS < 255 ? MOST_REGISTERS : 255) - 104 ? 4 : 2;

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

// b = the roots of blocks low .. high of 2^log units, merged into the right halves; what is not there
// is left out.
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

// The way of a root up to the whole piece: blocks of 2^log units, of which `own` is at hand and
// `low` .. `high` will be merged.
struct climb {
    const roots r;
    int32_t log, own, first, last, low, high;
    int32_t *g_counters;

    __device__ __forceinline__ climb(const attn_decode_args &args, const unit_info &info)
        : r{ args, info }, log(0), own(info.unit), first(info.first_unit), last(info.last_unit),
          g_counters(args.counters + 2)
    {
    }

    __device__ __forceinline__ void go_up()
    {
        log += FAN_LOG, own >>= FAN_LOG, first >>= FAN_LOG, last >>= FAN_LOG;
        g_counters += r.args.num_roots;
    }

    // Goes up to where there is something to merge with. False: it is the whole piece.
    __device__ __forceinline__ bool seek()
    {
        for (; first < last; go_up()) {
            const int32_t begin = own >> FAN_LOG << FAN_LOG;
            low = max(begin, first);
            high = min(begin + (1 << FAN_LOG) - 1, last);
            if (low < high) return true;
        }
        return false;
    }

    __device__ __forceinline__ float *slot() const
    {
        return r.slot(own, log);
    }

    __device__ __forceinline__ void post(arrivals &a) const
    {
        a.post(g_counters + r.number(own >> FAN_LOG, log + FAN_LOG), high - low + 1);
    }

    // Once all of them are there.
    __device__ __forceinline__ void gather_all(tree_stack &waiting, block<STEPS> &b)
    {
        gather(r, low, high, log, waiting, b);
        go_up();
    }
};

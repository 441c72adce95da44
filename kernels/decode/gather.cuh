/* SPDX-License-Identifier: Apache-2.0 */
// The roots of a piece: units are merged FAN at a time by whoever is the last of them, then what
// these come to, and so on: an aligned block of the tree each.
//
// What a node of the tree multiplies its halves with depends on m alone: a warp finds that for all
// nodes of a row, a lane a root, and the sums of V, which are many, are merged without it. A root
// that is not there has m = -inf and zeros, and changes nothing.
#pragma once

#include "decode/output.cuh"

// Roots whose columns a lane has in registers, beside what else is there.
constexpr int QUERY_REGISTERS = Q_IN_REGISTERS ? ROW_BLOCKS * DIM_STEPS * 2 : 0;
constexpr int FREE_REGISTERS = MOST_REGISTERS - QUERY_REGISTERS - (ROW_BLOCKS - 1) * 40 -
                               (KV_IS_E4M3 ? 16 : 0) - (SKIPS ? 16 : 0);
constexpr int AT_ONCE_LOG = OWNS_ROWS ? 2 : FREE_REGISTERS < 140 ? 3 : 4;
constexpr int AT_ONCE = 1 << AT_ONCE_LOG;

struct roots {
    const attn_decode_args &args;
    const unit_info &info;

    // One that there is: lengths that change under the kernel may give any number.
    __device__ __forceinline__ int32_t bound(int32_t root) const
    {
        return (int32_t) min((uint32_t) root, (uint32_t) args.num_roots - 1);
    }

    // Of the block of 2^log units with number `index`.
    __device__ __forceinline__ int32_t number(int32_t index, int32_t log) const
    {
        const int32_t unit = max(index << log, info.first_unit) - info.first_unit;
        return bound(info.slot + unit * info.lanes);
    }

    __device__ __forceinline__ float *slot(int32_t index, int32_t log) const
    {
        return args.slots + (int64_t) number(index, log) * SLOT_FLOATS;
    }
};

// Roots begin .. begin + FAN - 1 of blocks of 2^log units, of which low .. high are there.
struct fan {
    const roots &r;
    int32_t begin, low, high, log;

    __device__ __forceinline__ bool has(int32_t index) const
    {
        return index >= low && index <= high;
    }

    // The first node of a level, the lowest of which merges two roots.
    static __device__ __forceinline__ constexpr int first_node(int level)
    {
        return FAN - (FAN >> level);
    }

    // Weights of all nodes, and m and l of the block that is all of them.
    __device__ __forceinline__ void weigh(fan_weights &s_fan) const
    {
        const int32_t index = begin + lane_id();
#pragma unroll 1
        for (int row = warp_id(); row < ROWS; row += WARPS) {
            float m = -INFINITY, l = 0.0f;
            if (has(index)) {
                const float *const g_ml = slot_row(r.slot(index, log), row);
                m = load_global_float(g_ml);
                l = load_global_float(g_ml + 2);
            }
#pragma unroll
            for (int level = 0; level < FAN_LOG; level++) {
                const bool is_right = lane_id() >> level & 1;
                const float other_m = __shfl_xor_sync(~0u, m, 1 << level);
                const float other_l = __shfl_xor_sync(~0u, l, 1 << level);
                const float left_m = is_right ? other_m : m, left_l = is_right ? other_l : l;
                l = is_right ? l : other_l, m = is_right ? m : other_m;
                const float2 w = merge_ml(left_m, left_l, m, l);
                if (lane_id() % (2 << level) == 0)
                    s_fan.node[first_node(level) + (lane_id() >> (level + 1))][row] = w;
            }
            if (lane_id() == 0) s_fan.ml[row] = make_float2(m, l);
        }
    }

    // Columns of AT_ONCE roots from the one with number `first` on, a step's 8 rows, which are
    // `offset` floats from the start of a slot.
    __device__ __forceinline__ void load(float4 (&o)[AT_ONCE], int32_t first, int32_t offset) const
    {
        const float *const g_columns = r.args.slots + offset;
        const int32_t lowest = r.info.slot;
        const int32_t step = r.info.lanes << log, least = low - first;
        const uint32_t span = high - low;
        // As roots::number, without its multiplications.
        int32_t number = lowest + ((first << log) - r.info.first_unit) * r.info.lanes;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++, number += step) {
            o[i] = make_float4(0, 0, 0, 0);
            if (has_columns() && (uint32_t) (i - least) <= span)
                o[i] = load_global_float4(reinterpret_cast<const float4 *>(
                    g_columns + (int64_t) r.bound(max(number, lowest)) * SLOT_FLOATS));
        }
    }

    // What is there of a lane's rows.
    static __device__ __forceinline__ float4 of_two_rows(const float2 (&s_of_rows)[ROWS], int n)
    {
        const float2 *const s_first = &s_of_rows[own_row(lane_id(), n, 0)];
        if constexpr (!OWNS_ROWS) return *reinterpret_cast<const float4 *>(s_first);
        return make_float4(s_first[0].x, s_first[0].y, s_first[8].x, s_first[8].y);
    }

    // right += left, as node `node` does.
    static __device__ __forceinline__ void merge(const fan_weights &s_fan, int node, int n,
                                                 const float4 &left, float4 &right)
    {
        const float4 w = of_two_rows(s_fan.node[node], n);
        const weights by = { { w.x, w.z }, { w.y, w.w } };
        float merged[4] = { right.x, right.y, right.z, right.w };
        merge_o(by, left, merged);
        right = make_float4(merged[0], merged[1], merged[2], merged[3]);
    }

    // What roots in registers come to, in o[AT_ONCE - 1]. From level LEVEL on; `part`: of AT_ONCE.
    template <int LEVEL = 0>
    static __device__ __forceinline__ void merge_part(const fan_weights &s_fan,
                                                      float4 (&o)[AT_ONCE], int part, int n)
    {
        constexpr int WIDTH = 1 << LEVEL, NODES = AT_ONCE / (WIDTH * 2);
#pragma unroll
        for (int i = 0; i < NODES; i++)
            merge(s_fan, first_node(LEVEL) + part * NODES + i, n, o[i * WIDTH * 2 + WIDTH - 1],
                  o[i * WIDTH * 2 + WIDTH * 2 - 1]);
        if constexpr (NODES > 1) merge_part<LEVEL + 1>(s_fan, o, part, n);
    }

    // What block `at` of 2^LOG roots comes to, some of which are there. `o`: if `is_loaded`, the
    // first AT_ONCE of these.
    template <int LOG>
    __device__ __forceinline__ float4 merge_block(const fan_weights &s_fan, float4 (&o)[AT_ONCE],
                                                  bool &is_loaded, int at, int d, int n) const
    {
        if constexpr (LOG <= AT_ONCE_LOG) {
            if (!is_loaded) load(o, begin + at * AT_ONCE, slot_offset(d, n));
            is_loaded = false;
            merge_part(s_fan, o, at, n);
            return o[AT_ONCE - 1];
        } else {
            const int32_t middle = begin + (at * 2 + 1) * (1 << (LOG - 1));
            if (low >= middle) return merge_block<LOG - 1>(s_fan, o, is_loaded, at * 2 + 1, d, n);
            const float4 left = merge_block<LOG - 1>(s_fan, o, is_loaded, at * 2, d, n);
            if (high < middle) return left;
            float4 right = merge_block<LOG - 1>(s_fan, o, is_loaded, at * 2 + 1, d, n);
            merge(s_fan, first_node(LOG - 1) + at, n, left, right);
            return right;
        }
    }

    // Before any step: o gets what the first one begins with. The warps that multiply together.
    __device__ __forceinline__ void begin_steps(fan_weights &s_fan, float4 (&o)[AT_ONCE]) const
    {
        load(o, begin + (low - begin) / AT_ONCE * AT_ONCE, slot_offset(0, 0));
        // Another warp may still merge what waits in the levels.
        sync_team();
        weigh(s_fan);
        sync_team();
    }

    // Step d of the block that they are.
    __device__ __forceinline__ void merge_step(const fan_weights &s_fan, float4 (&o)[AT_ONCE],
                                               int d, block<1> &b) const
    {
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) {
            bool is_loaded = d + n == 0;
            const float4 sum = merge_block<FAN_LOG>(s_fan, o, is_loaded, 0, d, n);
            b.o[0][n][0] = sum.x, b.o[0][n][1] = sum.y, b.o[0][n][2] = sum.z, b.o[0][n][3] = sum.w;
            const float4 ml = of_two_rows(s_fan.ml, n);
            b.m[n][0] = ml.x, b.l[n][0] = ml.y, b.m[n][1] = ml.z, b.l[n][1] = ml.w;
        }
    }
};

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

    __device__ __forceinline__ int32_t begin() const
    {
        return own >> FAN_LOG << FAN_LOG;
    }

    // Goes up to where there is something to merge with. False: it is the whole piece.
    __device__ __forceinline__ bool seek()
    {
        for (; first < last; go_up()) {
            low = max(begin(), first);
            high = min(begin() + FAN - 1, last);
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

    // All of them, once they are there.
    __device__ __forceinline__ fan gathered() const
    {
#if ATTN_MUTATION == 21
        // A tree of its own.
        return { r, high - low < FAN - 1 ? low - 1 : low, low, high, log };
#endif
        return { r, begin(), low, high, log };
    }
};

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
constexpr int AT_ONCE_LOG = OWNS_ROWS || FAN_LOG == 3 || FREE_REGISTERS < 140 ? 3 : 4;
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

// Whether this lane has rows that the call has.
static __device__ __forceinline__ bool has_rows(const attn_decode_args &args, int n)
{
    return OWNS_ROWS || own_row(lane_id(), n, 0) < args.group_rows;
}

// And columns of these. Others are not moved.
static __device__ __forceinline__ bool has_values(const attn_decode_args &args, int n)
{
    return has_columns() && has_rows(args, n);
}

// Step d of a root, which is step `from` of b.
template <int N>
static __device__ __forceinline__ void store_root(const attn_decode_args &args, float *root, int d,
                                                  const block<N> &b, int from)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        if (has_values(args, n)) store_values(slot_o(root, d, n), o_of(b, from, n));
        if (d == 0) store_ml(root, n, b);
    }
}

// m and l of a row.
static __device__ __forceinline__ float2 load_root_ml(float *root, int row)
{
    const float *const g_ml = slot_row(root, row);
    return make_float2(load_global_float(g_ml), load_global_float(g_ml + 2));
}

static __device__ __forceinline__ float4 load_values(const float4 *g_values)
{
    return load_global_float4(g_values);
}

static __device__ __forceinline__ float4 load_values(const float2 *g_values)
{
    return widen(load_global_float2(g_values));
}

// Of a row, weights of all nodes, and m and l of the block that is all of them. `ml`: of this lane's
// root.
template <int LOG>
static __device__ __forceinline__ void weigh_row(tree_weights<LOG> &s_weights, int row, float2 ml)
{
    float m = ml.x, l = ml.y;
#pragma unroll
    for (int level = 0; level < LOG; level++) {
        const bool is_right = lane_id() >> level & 1;
        const float other_m = __shfl_xor_sync(~0u, m, 1 << level);
        const float other_l = __shfl_xor_sync(~0u, l, 1 << level);
        const float left_m = is_right ? other_m : m, left_l = is_right ? other_l : l;
        l = is_right ? l : other_l, m = is_right ? m : other_m;
        const float2 w = merge_ml(left_m, left_l, m, l);
        if (lane_id() < 1 << LOG && lane_id() % (2 << level) == 0)
            s_weights.node[s_weights.first_node(level) + (lane_id() >> (level + 1))][row] = w;
    }
    if (lane_id() == 0) s_weights.ml[row] = make_float2(m, l);
}

// What is there of a lane's rows.
static __device__ __forceinline__ float4 of_two_rows(const float2 (&s_of_rows)[ROWS], int n)
{
    const float2 *const s_first = &s_of_rows[own_row(lane_id(), n, 0)];
    if constexpr (!OWNS_ROWS) return *reinterpret_cast<const float4 *>(s_first);
    if constexpr (LANE_ROWS == 1) return make_float4(s_first->x, s_first->y, 0, 0);
    return make_float4(s_first[0].x, s_first[0].y, s_first[8].x, s_first[8].y);
}

// right += left, as node `node` does.
template <int LOG>
static __device__ __forceinline__ void merge_by(const tree_weights<LOG> &s_weights, int node, int n,
                                                const float4 &left, float4 &right)
{
    const float4 w = of_two_rows(s_weights.node[node], n);
    const weights by = { { w.x, w.z }, { w.y, w.w } };
    float merged[4] = { right.x, right.y, right.z, right.w };
    merge_o(by, left, merged);
    right = make_float4(merged[0], merged[1], merged[2], merged[3]);
}

// All roots, whose columns come to `sum`.
template <int LOG>
static __device__ __forceinline__ void set_whole(const tree_weights<LOG> &s_weights, int n,
                                                 const float4 &sum, block<1> &b)
{
    b.o[0][n][0] = sum.x, b.o[0][n][1] = sum.y, b.o[0][n][2] = sum.z, b.o[0][n][3] = sum.w;
    const float4 ml = of_two_rows(s_weights.ml, n);
    b.m[n][0] = ml.x, b.l[n][0] = ml.y, b.m[n][1] = ml.z, b.l[n][1] = ml.w;
}

// Roots begin .. begin + FAN - 1 of blocks of 2^log units, of which low .. high are there.
struct fan {
    const roots &r;
    int32_t begin, low, high, log;

    __device__ __forceinline__ bool has(int32_t index) const
    {
        return index >= low && index <= high;
    }

    // m and l of this lane's root, of the warp's row `i`.
    __device__ __forceinline__ float2 load_ml(int i) const
    {
        const int32_t index = begin + lane_id();
        const int row = warp_id() + i * WARPS;
        if (row >= ROWS || !has(index)) return make_float2(-INFINITY, 0.0f);
        return load_root_ml(r.slot(index, log), row);
    }

    // The warp's rows; `ml`: of the first one.
    __device__ __forceinline__ void weigh(fan_weights &s_fan, float2 ml) const
    {
#pragma unroll 1
        for (int i = 0, row = warp_id(); row < ROWS; row += WARPS) {
            const float2 next = load_ml(++i);
            weigh_row(s_fan, row, ml);
            ml = next;
        }
    }

    // Columns of AT_ONCE roots from the one with number `first` on: step d of row block n.
    __device__ __forceinline__ void load(float4 (&o)[AT_ONCE], int32_t first, int d, int n) const
    {
        const float *const g_columns = r.args.slots + slot_offset(d, n);
        const int32_t lowest = r.info.slot;
        const int32_t step = r.info.lanes << log, least = low - first;
        const uint32_t span = high - low;
        // As roots::number, without its multiplications.
        int32_t number = lowest + ((first << log) - r.info.first_unit) * r.info.lanes;
        // The last one is there: then all are.
        const bool are_there =
            has_values(r.args, n) &&
            (uint32_t) (number + (high - first) * step) < (uint32_t) r.args.num_roots;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++, number += step) {
            o[i] = make_float4(0, 0, 0, 0);
            if (are_there && (uint32_t) (i - least) <= span)
                o[i] = load_values(reinterpret_cast<const slot_values *>(
                    g_columns + (int64_t) max(number, lowest) * SLOT_FLOATS));
        }
    }

    // What roots in registers come to, in o[AT_ONCE - 1]. From level LEVEL on; `part`: of AT_ONCE.
    template <int LEVEL = 0>
    static __device__ __forceinline__ void merge_part(const fan_weights &s_fan,
                                                      float4 (&o)[AT_ONCE], int part, int n)
    {
        constexpr int WIDTH = 1 << LEVEL, NODES = AT_ONCE / (WIDTH * 2);
#pragma unroll
        for (int i = 0; i < NODES; i++)
            merge_by(s_fan, s_fan.first_node(LEVEL) + part * NODES + i, n,
                     o[i * WIDTH * 2 + WIDTH - 1], o[i * WIDTH * 2 + WIDTH * 2 - 1]);
        if constexpr (NODES > 1) merge_part<LEVEL + 1>(s_fan, o, part, n);
    }

    // What all roots come to, AT_ONCE after AT_ONCE. `o`: if `is_loaded`, the first of these.
    __device__ __forceinline__ float4 merge_parts(const fan_weights &s_fan, float4 (&o)[AT_ONCE],
                                                  bool is_loaded, int d, int n) const
    {
        constexpr int PART_LEVELS = FAN_LOG - AT_ONCE_LOG;
        const int32_t first = (low - begin) >> AT_ONCE_LOG, last = (high - begin) >> AT_ONCE_LOG;
        float4 waiting[PART_LEVELS > 0 ? PART_LEVELS : 1], sum;
#pragma unroll 1
        for (int32_t part = first; part <= last; part++) {
            if (!is_loaded) load(o, begin + part * AT_ONCE, d, n);
            is_loaded = false;
            merge_part(s_fan, o, part, n);
            sum = o[AT_ONCE - 1];
            // A left half waits for its right one, if that comes.
            bool waits = false;
#pragma unroll
            for (int level = 0; level < PART_LEVELS; level++) {
                const bool is_right = part >> level & 1;
                const bool has_left = part >> level << level > first;
                if (!waits && is_right && has_left)
                    merge_by(s_fan, s_fan.first_node(AT_ONCE_LOG + level) + (part >> (level + 1)),
                             n, waiting[level], sum);
                if (!waits && !is_right && part < last) {
                    waiting[level] = sum;
                    waits = true;
                }
            }
        }
        return sum;
    }

    // Before any step: o gets what the first one begins with. The warps that multiply together.
    __device__ __forceinline__ void begin_steps(fan_weights &s_fan, float4 (&o)[AT_ONCE]) const
    {
        // These first: they are waited for first.
        const float2 ml = load_ml(0);
        load(o, begin + (low - begin) / AT_ONCE * AT_ONCE, 0, 0);
        // Another warp may still merge what waits in the levels.
        sync_team();
        weigh(s_fan, ml);
        sync_team();
    }

    // Step d of the block that they are.
    __device__ __forceinline__ void merge_step(const fan_weights &s_fan, float4 (&o)[AT_ONCE],
                                               int d, block<1> &b) const
    {
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) {
            const float4 sum = merge_parts(s_fan, o, d + n == 0, d, n);
            set_whole(s_fan, n, sum, b);
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

    // Where they arrive, and how many.
    __device__ __forceinline__ int32_t *counter() const
    {
        return g_counters + r.number(own >> FAN_LOG, log + FAN_LOG);
    }

    __device__ __forceinline__ int32_t count() const
    {
        return high - low + 1;
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

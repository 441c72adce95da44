/* SPDX-License-Identifier: Apache-2.0 */
// Roots of several runs, merged by the whole block: each warp takes some steps of 16 columns, so
// that merging two blocks of the tree needs no other warp. Lane i of a warp knows the i-th root,
// left to right; all merges of one level are independent of each other.
#pragma once

#include "decode/tree.cuh"

// Warps that get no steps stay out of it. The others share the ring, each for itself: the roots
// that were found, and entries of o, m and l.
struct root {
    float *g_slot;
    uint32_t first;
};

static_assert(33 * sizeof(root) == LIST_BYTES, "config.cuh leaves room for the list");

// The steps of this warp in a pass.
static __device__ __forceinline__ int first_step_of(int pass)
{
    return (pass * WORKING + warp_id()) * SHARE_STEPS;
}

static __device__ __forceinline__ float4 *entry_ml(unsigned char *s_entry, int n)
{
    return reinterpret_cast<float4 *>(s_entry) + n * 4 + lane_id() % 4;
}

static __device__ __forceinline__ float4 *entry_o(unsigned char *s_entry, int d, int n)
{
    return reinterpret_cast<float4 *>(s_entry + ML_BYTES) + (d * ROW_BLOCKS + n) * 32 + lane_id();
}

static __device__ __forceinline__ void load_entry(unsigned char *s_entry, block<SHARE_STEPS> &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        set_ml(b, n, *entry_ml(s_entry, n));
#pragma unroll
        for (int d = 0; d < SHARE_STEPS; d++) set_o(b.o[d][n], *entry_o(s_entry, d, n));
    }
}

// Starts copying this warp's steps of a root.
static __device__ __forceinline__ void copy_root(float *g_slot, int first_step,
                                                 unsigned char *s_entry)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < SHARE_STEPS; d++)
            if (first_step + d < DIM_STEPS)
                cp_async_16(shared_address(entry_o(s_entry, d, n)),
                            slot_o(g_slot, first_step + d, n, lane_id()), 16);
        if (lane_id() < 4)
            cp_async_16(shared_address(entry_ml(s_entry, n)), slot_ml(g_slot, n, lane_id()), 16);
    }
}

// left = left + right.
static __device__ __forceinline__ void merge_entries(unsigned char *s_left, unsigned char *s_right)
{
    block<SHARE_STEPS> b;
    load_entry(s_right, b);
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const weights w = merge_ml(*entry_ml(s_left, n), n, b);
#pragma unroll
        for (int d = 0; d < SHARE_STEPS; d++) {
            merge_o(w, *entry_o(s_left, d, n), b.o[d][n]);
            *entry_o(s_left, d, n) =
                make_float4(b.o[d][n][0], b.o[d][n][1], b.o[d][n][2], b.o[d][n][3]);
        }
    }
    // Lanes of a row share its m and l.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
        if (lane_id() < 4)
            *entry_ml(s_left, n) = make_float4(b.m[n][0], b.m[n][1], b.l[n][0], b.l[n][1]);
    __syncwarp();
}

// The roots of a run, the aligned blocks that it leaves of a piece, left to right. Where the piece
// ends missing leaves count as empty ones, so that blocks reach as far as they can; likewise before
// its first leaf.
struct root_walk {
    uint32_t first_leaf, at, stop, end;

    __device__ __forceinline__ root_walk(const piece &p, const span &s)
    {
        first_leaf = p.first;
        at = s.begin > p.first ? s.begin : 0;
        stop = s.begin < s.end ? s.end : at;
        end = s.end < p.end ? s.end : 1u << 31;
    }

    __device__ __forceinline__ bool has_more() const
    {
        return at < stop;
    }

    // Its first leaf.
    __device__ __forceinline__ uint32_t next()
    {
        uint32_t first;
        do {
            first = at;
            const int32_t aligned = first ? __ffs(first) - 1 : 31;
            at += 1u << min(aligned, log2_floor(end - first));
        } while (at <= first_leaf);
        return first;
    }
};

static __device__ __forceinline__ float *region_slots(const attn_decode_args &args, int32_t region,
                                                      int32_t warp)
{
    return args.roots + ((int64_t) region * WARPS + warp) * args.run_roots * SLOT_FLOATS;
}

// The runs that share a piece: those of a block's warps, or of blocks.
struct runs {
    const attn_decode_args &args;
    const smem &s;
    const piece &p;
    const cut &c;
    int32_t lane;
    bool are_blocks;
    // Of the block.
    int32_t region;

    __device__ __forceinline__ uint32_t begin_of(int32_t run) const
    {
        return snap(args, s.dealt, p, block_begin(s.dealt, run) - c.before, c.count);
    }

    __device__ __forceinline__ span span_of(int32_t run) const
    {
        if (are_blocks) return { begin_of(run), begin_of(run + 1) };
        return clip(p, c.piece, s.cuts[run][0], s.cuts[run][1]);
    }

    __device__ __forceinline__ float *roots_of(int32_t run, bool is_head) const
    {
        const bool of_warps = !are_blocks || s.dealt.warps == 1;
        const int32_t head = of_warps ? ATTN_DECODE_WARP_HEAD : ATTN_DECODE_BLOCK_HEAD;
        return region_slots(args, are_blocks ? run * args.lanes + lane : region,
                            are_blocks ? 0 : run) +
               (is_head ? 0 : head * SLOT_FLOATS);
    }

    __device__ __forceinline__ int32_t first_block() const
    {
        return block_of(s.dealt, c.before);
    }

    __device__ __forceinline__ int32_t last_block() const
    {
        return block_of(s.dealt, c.before + c.count - 1);
    }

    // Blocks that have leaves of the piece.
    __device__ __forceinline__ int32_t count_blocks() const
    {
        const int32_t first = first_block(), last = last_block();
        if (first == last) return 1;
        return last - first + 1 - (begin_of(first + 1) == p.first) - (begin_of(last) == p.end);
    }
};

// Finds the roots of a stretch of runs that have parts of a piece, a few at a time.
struct root_finder {
    const runs &source;
    const piece &p;
    // Lane i looks at run base + i; `taken` roots of these 32 were taken.
    int32_t base, last, taken;

    // Puts up to `room` roots in the list, and behind them where the next one begins: 2^31 if the
    // piece ends before. How many.
    __device__ __forceinline__ int take(root *s_list, int room, bool &has_more)
    {
        const int32_t run = base + lane_id();
        span s = { 0, 0 };
        if (run <= last) s = source.span_of(run);
        int count = 0;
        for (root_walk walk(p, s); walk.has_more(); count++) walk.next();
        int end = count;
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) {
            const int left = __shfl_up_sync(~0u, end, delta);
            if (lane_id() >= delta) end += left;
        }
        const int total = __shfl_sync(~0u, end, 31);
        const int num = min(total - taken, room);
        int i = end - count - taken;
        root_walk walk(p, s);
        float *g_slot = count > 0 ? source.roots_of(run, s.begin > p.first) : nullptr;
        for (; walk.has_more(); i++) {
            const uint32_t first = walk.next();
            if (i >= 0 && i <= num) s_list[i] = { g_slot, first };
            g_slot += SLOT_FLOATS;
        }
        taken += num;
        has_more = taken < total;
        if (!has_more) {
            // Leaves of the next runs begin where these end.
            const uint32_t reached = __reduce_max_sync(~0u, s.end);
            if (lane_id() == 0) s_list[num].first = reached < p.end ? reached : 1u << 31;
            has_more = base + 32 <= last;
            base += 32;
            taken = 0;
        }
        __syncwarp();
        return num;
    }
};

// Steps of pass `pass` of all roots of runs first .. last. If those are the whole piece, b is what
// it comes to. Else what is left are fewer roots, left to right in g_list; at most as many as were
// read by then, so that nothing unread is written over.
static __device__ __forceinline__ void gather(smem &s, const runs &source, const piece &p,
                                              int32_t first, int32_t last, bool is_whole, int pass,
                                              float *g_list, block<SHARE_STEPS> &b)
{
    unsigned char *const s_entries = s.ring[0][0] + warp_id() * POOL_BYTES;
    root *const s_list = reinterpret_cast<root *>(s_entries + ROOTS * ENTRY_BYTES);
    const int first_step = first_step_of(pass), lane = lane_id();
    const span own = source.span_of(first);
    // The tree's blocks that can be merged lie in [low, high).
    const uint32_t low = own.begin > p.first ? own.begin : 0;
    root_finder finder = { source, p, first, last, 0 };
    // Of this lane's root: its first leaf, its entry. Entries in use; roots.
    uint32_t leaf = 0, used = 0;
    int entry = 0, num_roots = 0;
    bool has_more = true;
#pragma unroll 1
    while (has_more) {
        __syncwarp();
        const int num = finder.take(s_list, ROOTS - num_roots, has_more);
        const uint32_t high = s_list[num].first;
#pragma unroll 1
        for (int i = 0; i < num; i++) {
            const int free = __ffs(~used) - 1;
            used |= 1u << free;
            copy_root(s_list[i].g_slot, first_step, s_entries + free * ENTRY_BYTES);
            if (lane == num_roots + i) leaf = s_list[i].first, entry = free;
        }
        num_roots += num;
        cp_async_commit();
        cp_async_wait<0>();
        // Every warp has what it wants of these: their slots may be written over.
        barrier_sync(WORKING * 32);

        // The level at which a root meets the next one.
        const uint32_t next = __shfl_down_sync(~0u, leaf, 1);
        uint32_t level = 32;
        if (lane + 1 < num_roots) {
            const uint32_t meet = log2_floor(leaf ^ next);
            const uint64_t begin = (uint64_t) leaf >> (meet + 1) << (meet + 1);
            if (begin >= low && begin + (2ull << meet) <= high) level = meet;
        }
#if ATTN_MUTATION == 21
        level = level < 32 ? 0 : 32;
#endif
        uint32_t alive = num_roots < 32 ? (1u << num_roots) - 1 : ~0u;
#pragma unroll 1
        for (;;) {
            const uint32_t lowest = __reduce_min_sync(~0u, level);
            if (lowest == 32) break;
#pragma unroll 1
            for (uint32_t rest = __ballot_sync(~0u, level == lowest); rest; rest &= rest - 1) {
                // What ends with root i, and what begins with the next one.
                const int i = __ffs(rest) - 1;
                const int left = log2_floor(alive & ((2u << i) - 1));
                const int left_entry = __shfl_sync(~0u, entry, left);
                const int right_entry = __shfl_sync(~0u, entry, i + 1);
                merge_entries(s_entries + left_entry * ENTRY_BYTES,
                              s_entries + right_entry * ENTRY_BYTES);
                alive &= ~(2u << i);
                used &= ~(1u << right_entry);
            }
            if (level == lowest) level = 32;
        }
        // Those that are left move up.
        int from = 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            if (__popc(alive & ((1u << (from + step)) - 1)) <= lane) from += step;
        leaf = __shfl_sync(~0u, leaf, from);
        entry = __shfl_sync(~0u, entry, from);
        num_roots = __popc(alive);
    }
    if (is_whole) {
        load_entry(s_entries + __shfl_sync(~0u, entry, 0) * ENTRY_BYTES, b);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < num_roots; i++) {
        load_entry(s_entries + __shfl_sync(~0u, entry, i) * ENTRY_BYTES, b);
        store_slot(g_list + i * SLOT_FLOATS, first_step, pass == PASSES - 1 && warp_id() == 0, b);
    }
}

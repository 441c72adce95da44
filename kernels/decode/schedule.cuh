/* SPDX-License-Identifier: Apache-2.0 */
// Who gets which leaves: read from seq_lens, different from call to call, and without influence on
// bits. Leaves of all pieces, in a row, are cut into runs for blocks and those into runs for warps.
#pragma once

#include "decode/config.cuh"

// A piece: the attended keys [start, stop) of a sequence, or what a split count makes of them.
// Leaves lie at multiples of TILE from `origin`; [first, end) hold attended keys.
struct piece {
    int32_t sequence, split;
    int32_t origin, start, stop;
    uint32_t first, end;
    // Under a split count: keys of a piece, and of the sequence.
    uint32_t size, attended;
    bool is_fault;
};

static __device__ __forceinline__ piece describe(const attn_decode_args &args, int32_t index)
{
    piece p;
    p.sequence = attn_decode_divide(index, args.splits_magic, args.splits_shift);
    p.split = index - p.sequence * args.splits;
    const int32_t given = args.seq_lens[p.sequence];
    const int32_t len = min(max(given, 0), args.max_keys);
    p.is_fault = len != given;
    p.start = args.window > 0 && len > args.window ? len - args.window : 0;
    p.stop = len;
    p.origin = 0;
#if ATTN_MUTATION == 1
    p.origin = -(args.batch % 4) * GROUP;
#elif ATTN_MUTATION == 8
    p.stop += (args.page_size - len % args.page_size) % args.page_size;
#elif ATTN_MUTATION == 9
    p.start -= p.start % args.page_size;
#endif
    p.size = p.attended = len - p.start;
    if (args.splits > 1) {
        if (p.attended > 0)
            p.size = attn_decode_divide(p.attended - 1, args.splits_magic, args.splits_shift) + 1;
        p.size = max(p.size, (uint32_t) ATTN_DECODE_MIN_PIECE);
        const uint32_t before = min(p.split * p.size, p.attended);
        p.start += before;
        p.origin = p.start;
        p.stop = p.start + min(p.size, p.attended - before);
    }
    p.first = (uint32_t) (p.start - p.origin) / TILE;
    p.end = p.stop > p.start ? (uint32_t) (p.stop - 1 - p.origin) / TILE + 1 : p.first;
    return p;
}

// Leaves in units of 2^min_shift. A sequence without keys counts as one: it is some warp's.
static __device__ __forceinline__ int32_t count_units(const attn_decode_args &args, const piece &p)
{
    if (p.end == p.first) return p.split == 0;
    return (int32_t) ((p.end - 1) >> args.min_shift) - (int32_t) (p.first >> args.min_shift) + 1;
}

static __device__ __forceinline__ int32_t log2_floor(uint32_t x)
{
    return 31 - __clz(x);
}

// Counts units, and leaves their sums in shared memory: thread i has pieces [i * share, ...).
static __device__ __forceinline__ void count_all(const attn_decode_args &args, smem &s)
{
    const int32_t num_pieces = args.batch * args.splits;
    const int32_t share = (num_pieces - 1) / THREADS + 1;
    int32_t own = 0;
    for (int32_t i = 0; i < share; i++) {
        const int32_t index = threadIdx.x * share + i;
        if (index < num_pieces) own += count_units(args, describe(args, index));
    }
    int32_t end = own;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const int32_t left = __shfl_up_sync(~0u, end, delta);
        if (lane_id() >= delta) end += left;
    }
    if (lane_id() == 31) s.warp_sum[warp_id()] = end;
    __syncthreads();
    int32_t total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp_id()) end += s.warp_sum[i];
        total += s.warp_sum[i];
    }
    s.prefix[threadIdx.x] = end - own;
    if (threadIdx.x == 0) {
        s.dealt.total = total;
        s.dealt.size = (uint32_t) total / (uint32_t) args.block_runs;
        s.dealt.rest = total - s.dealt.size * args.block_runs;
        s.dealt.warps = min(s.dealt.size + (s.dealt.rest > 0), WARPS);
        s.dealt.run_log = log2_floor(max(s.dealt.size / s.dealt.warps, 1));
    }
    __syncthreads();
}

// The first unit of a block run, and of warp `warp`'s run within it.
static __device__ __forceinline__ int32_t block_begin(const deal &d, int32_t run)
{
    return run * d.size + min(run, d.rest);
}

static __device__ __forceinline__ int32_t warp_begin(const deal &d, int32_t run, int32_t warp)
{
    const int32_t begin = block_begin(d, run), count = block_begin(d, run + 1) - begin;
    const int32_t each = count / d.warps, rest = count - each * d.warps;
    return begin + warp * each + min(warp, rest);
}

// The block run that a unit is in.
static __device__ __forceinline__ int32_t block_of(const deal &d, int32_t unit)
{
    const uint32_t longer = d.rest * (d.size + 1);
    return (uint32_t) unit < longer ? (uint32_t) unit / (uint32_t) (d.size + 1)
                                    : d.rest + (unit - longer) / (uint32_t) d.size;
}

// The leaf at which a cut before unit `unit` of a piece of `count` units is made: cuts lie at
// multiples, so that few aligned blocks of the tree are cut.
static __device__ __forceinline__ uint32_t snap(const attn_decode_args &args, const deal &d,
                                                const piece &p, int32_t unit, int32_t count)
{
    if (unit <= 0) return p.first;
    if (unit >= count) return p.end;
    const int32_t log = min(log2_floor(count), d.run_log) - ATTN_DECODE_SNAP;
    const int32_t shift = args.min_shift + max(log, 0);
    const uint32_t leaf = ((p.first >> args.min_shift) + unit) << args.min_shift;
    const uint32_t rounded = (leaf + ((1u << shift) >> 1)) >> shift << shift;
    return min(max(rounded, p.first), p.end);
}

// The piece that holds a unit, if each thread has one: in each lane its own. The last that starts
// at or before the unit.
static __device__ __forceinline__ int32_t find_piece_of(const smem &s, int32_t unit,
                                                        int32_t &before, int32_t &count)
{
    int32_t at = 0;
#pragma unroll 1
    for (int32_t step = 256; step > 0; step /= 2)
        if (at + step < THREADS && s.prefix[at + step] <= unit) at += step;
    before = s.prefix[at];
    count = (at + 1 < THREADS ? s.prefix[at + 1] : s.dealt.total) - before;
    return at;
}

// The same if threads have `share` pieces each; all lanes of a warp together, for one unit.
static __device__ __forceinline__ int32_t find_piece_of(const attn_decode_args &args, const smem &s,
                                                        int32_t share, int32_t unit,
                                                        int32_t &before, int32_t &count)
{
    const int lane = lane_id();
    const int32_t thread = find_piece_of(s, unit, before, count);
    const int32_t stop = min((thread + 1) * share, args.batch * args.splits);
#pragma unroll 1
    for (int32_t first = thread * share;; first += 32) {
        const int32_t index = first + lane;
        const int32_t own = index < stop ? count_units(args, describe(args, index)) : 0;
        int32_t end = own;
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) {
            const int32_t left = __shfl_up_sync(~0u, end, delta);
            if (lane >= delta) end += left;
        }
        end += before;
        const uint32_t found = __ballot_sync(~0u, unit < end);
        if (found) {
            const int at = __ffs(found) - 1;
            count = __shfl_sync(~0u, own, at);
            before = __shfl_sync(~0u, end, at) - count;
            return first + at;
        }
        before = __shfl_sync(~0u, end, 31);
    }
}

// Where the runs of this warp begin and end.
static __device__ __forceinline__ void find_cuts(const attn_decode_args &args, smem &s, int32_t run)
{
    const int32_t num_pieces = args.batch * args.splits;
    const int32_t share = (num_pieces - 1) / THREADS + 1;
    const int which = lane_id() % 2;
    const int32_t unit = warp_begin(s.dealt, run, warp_id() + which);
    cut c = { num_pieces, 0, s.dealt.total, 0, false };
    if (share == 1) {
        if (unit < s.dealt.total) c.piece = find_piece_of(s, unit, c.before, c.count);
    } else {
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int32_t other = __shfl_sync(~0u, unit, i);
            int32_t before, count;
            if (other >= s.dealt.total) break;
            const int32_t found = find_piece_of(args, s, share, other, before, count);
            if (which == i) c.piece = found, c.before = before, c.count = count;
        }
    }
    if (c.count > 0) {
        const piece p = describe(args, c.piece);
        c.leaf = snap(args, s.dealt, p, unit - c.before, c.count);
        c.is_inside = c.leaf > p.first && c.leaf < p.end;
    }
    if (lane_id() < 2) s.cuts[warp_id()][which] = c;
    __syncwarp();
}

// The leaves of a piece that lie between two cuts: [begin, end).
struct span {
    uint32_t begin, end;
};

static __device__ __forceinline__ span clip(const piece &p, int32_t index, const cut &from,
                                            const cut &to)
{
    if (index < from.piece || index > to.piece) return { 0, 0 };
    return { index == from.piece ? from.leaf : p.first, index == to.piece ? to.leaf : p.end };
}

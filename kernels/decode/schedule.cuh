/* SPDX-License-Identifier: Apache-2.0 */
// Who gets which leaves: read from seq_lens, different from call to call, and without influence on
// bits. A unit is a short piece, or of a longer one the leaves in an aligned block of 2^shift of
// them, which are a block of the merge tree. Units of all pieces, each times the lanes of its
// piece, are what blocks take.
#pragma once

#include "decode/config.cuh"

// The query rows of a lane: of the KV head's, from number `first` on.
struct rows {
    int32_t lane, kv_head;
    int32_t first, num_rows;
    // The sequence's first token among those of all.
    uint32_t first_token;
};

// A query row's token and head.
struct token_head {
    int32_t token, head;
};

static __device__ __forceinline__ token_head locate(const attn_decode_args &args, const rows &r,
                                                    int row)
{
    const int32_t number = r.first + row;
    const int32_t token = attn_divide(number, args.ratio_magic, args.ratio_shift);
    return { token, r.kv_head * args.ratio + number - token * args.ratio };
}

// Where its output is, in heads.
static __device__ __forceinline__ int64_t output_of(const attn_decode_args &args, const rows &r,
                                                    const token_head &at)
{
    return (int64_t) (r.first_token + at.token) * args.num_q_heads + at.head;
}

static __device__ __forceinline__ int32_t kv_head_of(const attn_decode_args &args, int32_t lane)
{
    return attn_divide(lane, args.groups_magic, args.groups_shift);
}

static __device__ __forceinline__ rows rows_of(const attn_decode_args &args, const unit_info &unit)
{
    rows r;
    r.lane = unit.lane;
    r.kv_head = kv_head_of(args, unit.lane);
    r.first = (unit.lane - r.kv_head * args.row_groups) * args.group_rows;
#if ATTN_MUTATION == 36
    r.num_rows = min(args.group_rows, args.ratio * args.q_len - r.first);
#else
    r.num_rows = min(args.group_rows, args.ratio * unit.q_len - r.first);
#endif
    r.first_token = unit.first_token;
    return r;
}

// Where the queries of a unit's sequence begin, in elements.
static __device__ __forceinline__ int64_t queries_of(const attn_decode_args &args,
                                                     const unit_info &unit)
{
    return TAKES_CHUNKS && args.cu_seqlens ? unit.first_token * args.q_token_stride
                                           : unit.sequence * args.q_stride;
}

// A piece: the attended keys [start, stop) of a sequence, or what a split count makes of them.
// Leaves lie at multiples of TILE from `origin`; [first, end) hold attended keys.
struct piece {
    int32_t sequence, split;
    int32_t origin, start, stop;
    // The first draft key.
    int32_t past;
    // The sequence's query tokens, and the first of them among those of all; how many lanes there
    // are for them, and of these of a KV head.
    int32_t q_len;
    uint32_t first_token;
    int32_t lanes, row_groups;
    uint32_t first, end;
    // Under a split count: keys of a piece, and of the sequence.
    uint32_t size, attended;
    bool is_fault;
};

static __device__ __forceinline__ int32_t sequence_of(const attn_decode_args &args, int32_t index)
{
    return attn_divide(index, args.splits_magic, args.splits_shift);
}

// Whether queries are chunks of prompts.
static __device__ __forceinline__ bool has_chunks(const attn_decode_args &args)
{
    return TAKES_CHUNKS && args.most_tokens > 0;
}

// The length of a sequence, as it is given.
static __device__ __forceinline__ int32_t length_of(const attn_decode_args &args, int32_t sequence)
{
    return has_chunks(args) && !args.seq_lens ? args.kv_len : args.seq_lens[sequence];
}

static __device__ __forceinline__ int32_t clamp_entry(int32_t value, int32_t least, int32_t most,
                                                      piece &p)
{
    p.is_fault |= value < least || value > most;
    return min(max(value, least), most);
}

// The query tokens of a sequence, clamped as in prefill/span.cuh.
static __device__ __forceinline__ void find_tokens(const attn_decode_args &args, piece &p)
{
    if (args.cu_seqlens) {
        const int32_t *const g_first = args.cu_seqlens + p.sequence;
        const int32_t first = clamp_entry(__ldg(g_first), 0, args.num_tokens, p);
        const int32_t end = clamp_entry(__ldg(g_first + 1), 0, args.num_tokens, p);
        p.first_token = first;
        p.q_len = clamp_entry(end - first, 0, args.num_tokens, p);
    }
    const bool is_own = p.q_len > 0 && p.q_len <= args.most_tokens;
    p.row_groups = is_own ? (args.ratio * p.q_len - 1) / ROWS + 1 : 0;
    p.lanes = args.num_kv_heads * p.row_groups;
}

// The keys that a chunk attends: up to the position of its last token.
static __device__ __forceinline__ void find_chunk(const attn_decode_args &args, int32_t given,
                                                  piece &p)
{
    p.is_fault = false;
    find_tokens(args, p);
    const int32_t len = min(max(given, 0), args.max_keys);
    if (p.q_len > 0) p.is_fault |= len != given;
    int32_t position = args.q_offsets ? __ldg(args.q_offsets + p.sequence) : args.q_offset;
    // Before all keys, or without a window behind them, it does not matter how far.
    position = max(position, -args.most_tokens);
    if (args.window == 0) position = min(position, len);
    p.past = position;
#if ATTN_MUTATION == 37
    p.past += p.q_len < args.q_len;
#endif
    p.stop = position > len - p.q_len ? len : max(position + p.q_len, 0);
    p.start = args.window > 0 ? max(position - (args.window - 1), 0) : 0;
    p.start = min(p.start, p.stop);
}

// The keys that queries at the end of their sequence attend.
static __device__ __forceinline__ void find_end(const attn_decode_args &args, int32_t given,
                                                piece &p)
{
    const int32_t len = min(max(given, 0), args.max_keys);
    p.past = max(len - args.q_len, 0);
    p.stop = len;
    p.is_fault = (len != given) | ((len > 0) & (len < args.q_len));
    // Of the first token, or of all.
    const int32_t seen_until = args.window_is_shared ? len : p.past + 1;
    p.start = args.window > 0 ? min(max(seen_until - args.window, 0), len) : 0;
}

static __device__ __forceinline__ void find_leaves(piece &p)
{
    p.first = (uint32_t) (p.start - p.origin) / TILE;
    p.end = p.stop > p.start ? (uint32_t) (p.stop - 1 - p.origin) / TILE + 1 : p.first;
}

// What does not depend on lengths.
static __device__ __forceinline__ piece begin_piece(const attn_decode_args &args, int32_t index)
{
    piece p;
    p.sequence = sequence_of(args, index);
    p.split = index - p.sequence * args.splits;
    p.q_len = args.q_len;
    p.first_token = (uint32_t) p.sequence * args.q_len;
    p.lanes = args.lanes;
    p.row_groups = args.row_groups;
    p.origin = 0;
    return p;
}

// What depends on the attended keys of the sequence.
static __device__ __forceinline__ void cut_piece(const attn_decode_args &args, piece &p)
{
#if ATTN_MUTATION == 1
    p.origin = -(args.batch % 4) * GROUP;
#elif ATTN_MUTATION == 8
    p.stop += (args.page_size - p.stop % args.page_size) % args.page_size;
#elif ATTN_MUTATION == 9
    p.start -= p.start % args.page_size;
#endif
    p.size = p.attended = p.stop - p.start;
    if (args.splits > 1) {
        if (p.attended > 0)
            p.size = attn_divide(p.attended - 1, args.splits_magic, args.splits_shift) + 1;
        p.size = max(p.size, (uint32_t) ATTN_DECODE_MIN_PIECE);
        const uint32_t before = min(p.split * p.size, p.attended);
        p.start += before;
        p.origin = p.start;
        p.stop = p.start + min(p.size, p.attended - before);
    }
    find_leaves(p);
}

// Piece `index`, of a sequence of the length `given`.
static __device__ __forceinline__ piece describe(const attn_decode_args &args, int32_t index,
                                                 int32_t given)
{
    piece p = begin_piece(args, index);
    if (has_chunks(args))
        find_chunk(args, given, p);
    else
        find_end(args, given, p);
    cut_piece(args, p);
    return p;
}

static __device__ __forceinline__ piece describe(const attn_decode_args &args, int32_t index)
{
    piece p = begin_piece(args, index);
    // One branch for all that chunks need.
    if (has_chunks(args))
        find_chunk(args, length_of(args, p.sequence), p);
    else
        find_end(args, args.seq_lens[p.sequence], p);
    cut_piece(args, p);
    return p;
}

// Leaves of a piece. A sequence without keys has one, in which nothing is attended.
static __device__ __forceinline__ uint32_t count_leaves(const piece &p)
{
    return p.end > p.first ? p.end - p.first : p.split == 0;
}

static __device__ __forceinline__ int32_t count_units(const piece &p, int32_t shift)
{
    const uint32_t leaves = count_leaves(p);
    if (leaves <= 1u << shift) return leaves > 0;
    return (int32_t) ((p.end - 1) >> shift) - (int32_t) (p.first >> shift) + 1;
}

// Units of all lanes, and of these roots.
struct counts {
    int32_t units, slots;
};

// A lone unit leaves no root.
static __device__ __forceinline__ counts count(const piece &p, int32_t shift)
{
    const int32_t units = count_units(p, shift), of_lanes = units * p.lanes;
    return { of_lanes, units > 1 ? of_lanes : 0 };
}

// Sums over this lane and those before it.
static __device__ __forceinline__ counts sum_up(counts c)
{
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const int32_t units = __shfl_up_sync(~0u, c.units, delta);
        const int32_t slots = __shfl_up_sync(~0u, c.slots, delta);
        if (lane_id() >= delta) c.units += units, c.slots += slots;
    }
    return c;
}

// Skip-softmax: S / len of a sequence of `len` keys, with S of the last pair of the table whose
// length is at most that; 0 where nothing may be left out.
static __device__ __forceinline__ float find_lambda(const attn_decode_args &args, int32_t len)
{
    int32_t low = 0, high = args.skip_table_length / 2;
#pragma unroll 1
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (__ldg(args.skip_table + middle * 2) <= len)
            low = middle + 1;
        else
            high = middle;
    }
    const int32_t s = low > 0 ? __ldg(args.skip_table + low * 2 - 1) : 0;
    return s > 0 && s < len ? __fdiv_rn((float) s, (float) len) : 0.0f;
}

// Where blocks may be left out, units hold whole runs of them.
constexpr int RUN_SHIFT = SKIP_LEAVES == 1 ? 4 : SKIP_LEAVES == 2 ? 5 : 6;
static_assert(1 << RUN_SHIFT == ATTN_DECODE_SKIP_SCOPE * SKIP_LEAVES, "leaves of a run");

// For pieces of so many leaves, as count_coarsely has them. All lanes together.
static __device__ __forceinline__ int32_t choose_shift(const attn_decode_args &args,
                                                       uint32_t leaves, uint32_t longest,
                                                       bool may_skip)
{
    const int32_t are_even = attn_decode_are_even(leaves, longest, args.batch * args.splits);
    const uint64_t items = has_chunks(args) ? leaves : (uint64_t) leaves * (uint32_t) args.lanes;
    // All leaves there can be fit in 2^31.
    // The largest shift of the lowest cost, a lane a shift. Floats above 0 are ordered as integers.
    uint32_t cost = __float_as_uint(attn_decode_unit_cost(items, args.grid_magic, args.grid_shift,
                                                          args.most_units, are_even, lane_id()));
    if (may_skip && args.min_shift + lane_id() < RUN_SHIFT) cost = ~0u;
    const uint32_t best = __ballot_sync(~0u, cost == __reduce_min_sync(~0u, cost));
    return min(args.min_shift + 31 - __clz(best), 31);
}

static __device__ __forceinline__ int32_t shift_of(const deal &dealt, int32_t piece_index)
{
    const bool is_late = !SKIPS && piece_index >= dealt.first_late;
    return (is_late ? dealt.shifts >> 5 : dealt.shifts) & 31;
}

// Where two blocks share an SM a block is faster while the other one has nothing, and units that
// are not whole pieces are no gain.
constexpr bool WHOLE_ALONE = ROW_PER_SM > 1;

// Of even pieces that cost so much in units of 2^shift leaves if none is late: what costs less. Not
// inline: calls that don't need it would have to fetch what lies behind it later. Not static: nvcc
// names what is after the source's path, and the same source would give different packs. By value:
// arguments in memory are slow.
__device__ __noinline__ deal cut_late(attn_decode_even even, uint32_t cost, int32_t shift)
{
    attn_decode_late own = attn_decode_find_late(even, lane_id());
    if (WHOLE_ALONE && 1u << lane_id() < even.leaves) own.cost = ~0u;
    const uint32_t lowest = __reduce_min_sync(~0u, own.cost);
    if (lowest >= cost) return { 0, INT32_MAX, shift };
    const int32_t best = 31 - __clz(__ballot_sync(~0u, own.cost == lowest));
    const int32_t first_late = even.pieces - __shfl_sync(~0u, own.pieces, best);
    return { 0, first_late, best | __shfl_sync(~0u, own.shift, best) << 5 };
}

// How pieces of so many leaves are dealt, all but the number of units. All lanes together.
static __device__ __forceinline__ deal choose_deal(const attn_decode_args &args, uint32_t leaves,
                                                   uint32_t longest, bool may_skip)
{
    const int32_t shift = choose_shift(args, leaves, longest, may_skip);
    const deal none_late = { 0, INT32_MAX, shift };
    if (SKIPS || leaves < args.least_late_leaves ||
        !attn_decode_are_even(leaves, longest, args.batch))
        return none_late;
    attn_decode_even even;
    even.pieces = args.batch, even.lanes = args.lanes, even.leaves = longest;
    even.blocks = gridDim.x, even.grid_magic = args.grid_magic, even.grid_shift = args.grid_shift;
    even.num_roots = args.num_roots, even.may_begin_within = args.may_begin_within;
    const uint32_t rounds = attn_decode_even_rounds(even, even.pieces * even.lanes, shift);
    const uint32_t cost = attn_decode_even_cost(even, rounds, shift);
    return attn_decode_may_be_late(even, cost) ? cut_late(even, cost, shift) : none_late;
}

// So few pieces that the copying warp counts them alone.
static __device__ __forceinline__ bool are_few(const attn_decode_args &args)
{
    return args.batch * args.splits <= 32;
}

// Lines that all need first. What the grids before this one may still write there is not lost: L2
// has it.
static __device__ __forceinline__ void prefetch_lens(const attn_decode_args &args)
{
    constexpr int LINE = 32;
    if (args.seq_lens && threadIdx.x * LINE < (uint32_t) args.batch)
        prefetch_line(args.seq_lens + threadIdx.x * LINE);
}

// Where there are few pieces their lines of the table, too: a part by each block.
static __device__ __forceinline__ void prefetch_table(const attn_decode_args &args)
{
    constexpr int LINE = 32;
    const int64_t entries = (args.batch - 1) * args.table_stride + args.table_columns;
    const int64_t first = ((int64_t) blockIdx.x * THREADS + threadIdx.x) * LINE;
    if (threadIdx.x < THREADS && first < entries) prefetch_line(args.block_table + first);
}

// The translations of where results will be, which are needed last, and in a hurry. By a warp that has
// nothing else to do.
static __device__ __forceinline__ void prefetch_results(const attn_decode_args &args)
{
    if (lane_id() != 0) return;
    if (args.num_roots > 0) {
        prefetch_line(args.slots);
        prefetch_line(args.counters);
    }
    prefetch_line(args.o);
    if (args.lse) prefetch_line(args.lse);
}

// Leaves of a piece, as they are counted to choose units: of chunks, whose lanes differ, of all
// lanes. One more where it may begin within a unit.
static __device__ __forceinline__ uint32_t count_coarsely(const attn_decode_args &args,
                                                          const piece &p)
{
    const uint32_t rounding = (1u << args.min_shift) - 1;
    const uint32_t leaves = ((count_leaves(p) + rounding) >> args.min_shift) + (p.first > 0);
    return has_chunks(args) ? leaves * p.lanes : leaves;
}

// Pieces of a thread.
static __device__ __forceinline__ int32_t share_of(int32_t num_pieces)
{
    return (num_pieces - 1) / COUNT_THREADS + 1;
}

// Beside a number of leaves: of some sequence blocks may be left out.
constexpr uint32_t MAY_SKIP = 1u << 31;

// Leaves their sums in shared memory: thread i has pieces [i * share, ...). Whole blocks.
static __device__ __forceinline__ void count_all(const attn_decode_args &args, smem &s)
{
    const int32_t num_pieces = args.batch * args.splits;
    const int32_t share = share_of(num_pieces);
    const int32_t first = threadIdx.x * share, stop = min(first + share, num_pieces);
    uint32_t leaves = 0, longest = 0;
    bool own_may_skip = false;
#pragma unroll 1
    for (int32_t i = first; i < stop; i++) {
        const int32_t len = length_of(args, sequence_of(args, i));
        const piece p = describe(args, i, len);
        if (p.is_fault && blockIdx.x == 0) report_fault(args, p.sequence);
        const uint32_t of_piece = count_coarsely(args, p);
        if (SKIPS && find_lambda(args, p.stop) > 0.0f) own_may_skip = true;
        leaves += of_piece;
        longest = max(longest, of_piece);
        s.lens[threadIdx.x] = len;
    }
    leaves = __reduce_add_sync(~0u, leaves);
    longest = __reduce_max_sync(~0u, longest);
    if (SKIPS && __ballot_sync(~0u, own_may_skip)) longest |= MAY_SKIP;
    const bool counts_some = COUNT_WARPS == BLOCK_WARPS || warp_id() < COUNT_WARPS;
    if (counts_some && lane_id() == 0)
        s.warp_sum[warp_id()][0] = leaves, s.warp_sum[warp_id()][1] = longest;
    __syncthreads();
    leaves = longest = 0;
    uint32_t skips = 0;
#pragma unroll
    for (int i = 0; i < COUNT_WARPS; i++) {
        leaves += s.warp_sum[i][0];
        const uint32_t of_warp = s.warp_sum[i][1];
        longest = max(longest, SKIPS ? of_warp & ~MAY_SKIP : of_warp);
        skips |= of_warp & MAY_SKIP;
    }
    deal dealt = choose_deal(args, leaves, longest, SKIPS && skips);
    counts own = { 0, 0 };
#pragma unroll 1
    for (int32_t i = first; i < stop; i++) {
        const counts of_piece = count(describe(args, i), shift_of(dealt, i));
        own.units += of_piece.units, own.slots += of_piece.slots;
    }
    const counts end = sum_up(own);
    __syncthreads();
    if (counts_some && lane_id() == 31)
        s.warp_sum[warp_id()][0] = end.units, s.warp_sum[warp_id()][1] = end.slots;
    __syncthreads();
    counts before = { end.units - own.units, end.slots - own.slots };
    int32_t total = 0;
#pragma unroll
    for (int i = 0; i < COUNT_WARPS; i++) {
        if (i < warp_id()) before.units += s.warp_sum[i][0], before.slots += s.warp_sum[i][1];
        total += s.warp_sum[i][0];
    }
    if (counts_some) s.units[threadIdx.x] = before.units, s.slots[threadIdx.x] = before.slots;
    dealt.total = total;
    if (threadIdx.x == 0) s.dealt = dealt;
    __syncthreads();
}

// Where a unit is: its piece, and units and roots before that.
struct place {
    piece p;
    int32_t index;
    counts before;
};

// As the copying warp sees it.
struct schedule {
    deal dealt;
    // If there are few pieces: this lane's, its units and roots, and with those before it. If there
    // is one piece all lanes have it.
    piece p;
    counts own, end;

    // One piece a lane.
    __device__ __forceinline__ void count(const attn_decode_args &args)
    {
        const int32_t num_pieces = args.batch * args.splits;
        const bool is_alone = num_pieces == 1, is_piece = is_alone || lane_id() < num_pieces;
        p = describe(args, lane_id() < num_pieces ? lane_id() : 0);
        if (p.is_fault) report_fault(args, p.sequence);
        const uint32_t of_piece = count_coarsely(args, p);
        uint32_t leaves = is_piece ? of_piece : 0, longest = leaves;
        const bool may_skip =
            SKIPS && __ballot_sync(~0u, is_piece && find_lambda(args, p.stop) > 0.0f);
        if (!is_alone) {
            leaves = __reduce_add_sync(~0u, leaves);
            longest = __reduce_max_sync(~0u, longest);
        }
        dealt = choose_deal(args, leaves, longest, may_skip);
        own = ::count(p, shift_of(dealt, lane_id()));
        if (!is_piece) own = { 0, 0 };
        end = own;
        if (!is_alone) end = sum_up(own);
        dealt.total = __shfl_sync(~0u, end.units, 31);
    }

    // What is needed of a lane's piece.
    __device__ __forceinline__ piece fetch(int at) const
    {
        piece of;
        of.sequence = __shfl_sync(~0u, p.sequence, at);
        of.origin = __shfl_sync(~0u, p.origin, at);
        of.start = __shfl_sync(~0u, p.start, at);
        of.stop = __shfl_sync(~0u, p.stop, at);
        of.past = __shfl_sync(~0u, p.past, at);
        if (TAKES_CHUNKS) {
            of.q_len = __shfl_sync(~0u, p.q_len, at);
            of.first_token = __shfl_sync(~0u, p.first_token, at);
            of.lanes = __shfl_sync(~0u, p.lanes, at);
            of.row_groups = __shfl_sync(~0u, p.row_groups, at);
        }
        find_leaves(of);
        return of;
    }

    // All lanes together, for one unit of those that there are.
    __device__ __forceinline__ place find(const attn_decode_args &args, const smem &s,
                                          int32_t unit) const
    {
        // All lanes have it.
        if (!SKIPS && args.batch * args.splits == 1) return { p, 0, { 0, 0 } };
        if (are_few(args)) {
            const int at = __ffs(__ballot_sync(~0u, unit < end.units)) - 1;
            // Kernels of skip-softmax have no registers to keep the lanes' pieces in.
            return { SKIPS ? describe(args, at) : fetch(at),
                     at,
                     { __shfl_sync(~0u, end.units - own.units, at),
                       __shfl_sync(~0u, end.slots - own.slots, at) } };
        }
        const int32_t num_pieces = args.batch * args.splits;
        const int32_t share = share_of(num_pieces);
        const int32_t thread = find_thread(s, unit);
        const counts before = { s.units[thread], s.slots[thread] };
        if (share == 1) return { describe(args, thread, s.lens[thread]), thread, before };
        return search(args, thread * share, min((thread + 1) * share, num_pieces), unit, before);
    }

    // The last thread whose pieces begin at or before the unit; those of the first one do.
    static __device__ __forceinline__ int32_t find_thread(const smem &s, int32_t unit)
    {
        const int32_t warp = lane_id() < COUNT_WARPS ? lane_id() : 0;
        const int32_t warps =
            __popc(__ballot_sync(~0u, lane_id() < COUNT_WARPS && s.units[warp * 32] <= unit));
        const int32_t first = (warps - 1) * 32;
        return first + __popc(__ballot_sync(~0u, s.units[first + lane_id()] <= unit)) - 1;
    }

    // Among pieces first .. stop - 1, before which there is what `before` says.
    __device__ __forceinline__ place search(const attn_decode_args &args, int32_t first,
                                            int32_t stop, int32_t unit, counts before) const
    {
#pragma unroll 1
        for (;; first += 32) {
            const int32_t index = first + lane_id();
            counts lane_own = { 0, 0 };
            if (index < stop) lane_own = ::count(describe(args, index), shift_of(dealt, index));
            counts lane_end = sum_up(lane_own);
            lane_end.units += before.units, lane_end.slots += before.slots;
            const uint32_t found = __ballot_sync(~0u, unit < lane_end.units);
            const int at = found ? __ffs(found) - 1 : 31;
            before = { __shfl_sync(~0u, lane_end.units, at), __shfl_sync(~0u, lane_end.slots, at) };
            // Lengths that change under the kernel may leave the unit nowhere.
            if (!found && first + 32 < stop) continue;
            before.units -= __shfl_sync(~0u, lane_own.units, at);
            before.slots -= __shfl_sync(~0u, lane_own.slots, at);
            const int32_t piece_index = min(first + at, stop - 1);
            return { describe(args, piece_index), piece_index, before };
        }
    }
};

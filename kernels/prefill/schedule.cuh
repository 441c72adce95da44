/* SPDX-License-Identifier: Apache-2.0 */
// Which block does what: a tile of ROWS query tokens of a sequence, for one query head. Heads come
// fastest, as those of a KV head share K and V in L2; then tiles, those that see most keys first.
// Which block does a tile changes no bit.
#pragma once

#include "prefill/span.cuh"

// A block's work.
struct alignas(16) work {
    span of;
    // Keys that some query token of the sequence sees: others are never looked at.
    key_range keys;
    // Key tiles of the block.
    key_range tiles;
    // Negative: there is nothing to do.
    int32_t sequence;
    int32_t head, kv_head;
    // The query token of the sequence that is the block's first.
    int32_t first_row;
};

// Which tile of which sequence. Negative: none.
struct tile_place {
    int32_t sequence, tile;
};

// None of a sequence that the short form has.
static __device__ __forceinline__ int32_t count_tiles(const attn_prefill_args &args, const span &of)
{
    return of.q_len > args.short_tokens ? (of.q_len - 1) / ROWS + 1 : 0;
}

// ---- sequences of one length

static __device__ __forceinline__ tile_place find_uniform(const attn_prefill_args &args,
                                                          uint32_t rank)
{
    const uint32_t batch = (uint32_t) args.batch;
    const uint32_t tiles = ((uint32_t) args.q_len - 1) / ROWS + 1;
    // The last tiles see most; under a window, or not causal, all see about the same, and those of
    // a sequence share keys.
    const bool differ = args.causal && args.window == 0;
    const uint32_t sequence = differ ? rank % batch : rank / tiles;
    const uint32_t from_last = differ ? rank / batch : rank % tiles;
    if (sequence >= batch || from_last >= tiles) return { -1, 0 };
    return { (int32_t) sequence, (int32_t) (tiles - 1 - from_last) };
}

// ---- ragged ones

// Tiles are sorted by the keys that they see, in steps of so many.
constexpr int32_t SORT_KEYS = 128;
// In larger batches they are not.
constexpr int32_t SORT_SEQUENCES = ATTN_PREFILL_SORT_SEQUENCES;

// What is asked of each sequence for each item.
struct sequence_size {
    int32_t q_len, kv_len, q_offset;
};

// Those of a batch that is sorted, if they are kept; the null pointer: they are read again.
struct kept_sizes {
    const sequence_size *s_sizes;

    // Only sizes, if they are kept.
    __device__ __forceinline__ span of(const attn_prefill_args &args, int32_t sequence) const
    {
        if (!s_sizes || args.batch > SORT_SEQUENCES) return span_of(args, sequence);
        const sequence_size size = s_sizes[sequence];
        span of = {};
        of.q_len = size.q_len, of.kv_len = size.kv_len, of.q_offset = size.q_offset;
        return of;
    }
};

// A warp reads them.
static __device__ __forceinline__ void keep_sizes(const attn_prefill_args &args,
                                                  sequence_size (&s_sizes)[SORT_SEQUENCES])
{
    if (!args.cu_seqlens || args.batch > SORT_SEQUENCES) return;
#pragma unroll 1
    for (int32_t sequence = lane_id(); sequence < args.batch; sequence += 32) {
        const span of = span_of(args, sequence);
        s_sizes[sequence] = { of.q_len, of.kv_len, (int32_t) of.q_offset };
    }
    __syncwarp();
}

// The last tiles of a sequence that see keys in step `step` or more, by an estimate that never
// falls from tile to tile.
static __device__ __forceinline__ int32_t count_from(const attn_prefill_args &args, const span &of,
                                                     int32_t step)
{
    const int32_t tiles = count_tiles(args, of);
    if (step <= 0 || tiles == 0) return tiles;
    const int64_t least = (int64_t) (step - 1) * SORT_KEYS + 1;
    const int64_t most =
        args.window > 0 ? min((int64_t) of.kv_len, (int64_t) args.window + ROWS) : of.kv_len;
    if (most < least) return 0;
    if (!args.causal) return tiles;
    // So many query tokens have to be before the end of the tile.
    const int64_t tokens = least - of.q_offset;
    if (tokens > of.q_len) return 0;
    return tokens <= 1 ? tiles : tiles - (int32_t) ((tokens - 1) / ROWS);
}

// The same of the sequence that is lane_id() after `first`; 0 where there is none.
static __device__ __forceinline__ int32_t count_own(const attn_prefill_args &args,
                                                    const kept_sizes &sizes, int32_t first,
                                                    int32_t step)
{
    const int32_t sequence = first + lane_id();
    return sequence < args.batch ? count_from(args, sizes.of(args, sequence), step) : 0;
}

// The highest step that has a tile with a rank up to `rank`; 0 if tiles are not sorted. A warp.
static __device__ __forceinline__ int32_t find_step(const attn_prefill_args &args,
                                                    const kept_sizes &sizes, uint32_t rank)
{
    if (args.batch > SORT_SEQUENCES) return 0;
    span own[SORT_SEQUENCES / 32];
    uint32_t longest = 0;
#pragma unroll
    for (int i = 0; i < SORT_SEQUENCES / 32; i++) {
        const int32_t sequence = i * 32 + lane_id();
        own[i] = {};
        if (sequence < args.batch) own[i] = sizes.of(args, sequence);
        longest = max(longest, (uint32_t) own[i].kv_len);
    }
    int32_t low = 0, high = (int32_t) (__reduce_max_sync(~0u, longest) / SORT_KEYS) + 2;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < SORT_SEQUENCES / 32; i++)
            count += (uint32_t) count_from(args, own[i], middle);
        if (__reduce_add_sync(~0u, count) > rank)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Tiles of one step come by sequence. A warp.
static __device__ __forceinline__ tile_place find_ragged(const attn_prefill_args &args,
                                                         const kept_sizes &sizes, uint32_t rank)
{
    const int32_t step = find_step(args, sizes, rank);
    const bool sorted = args.batch <= SORT_SEQUENCES;
    // Without those of higher steps.
    for (int32_t first = 0; sorted && first < args.batch; first += 32)
        rank -= __reduce_add_sync(~0u, (uint32_t) count_own(args, sizes, first, step + 1));
#pragma unroll 1
    for (int32_t first = 0; first < args.batch; first += 32) {
        const uint32_t above = sorted ? (uint32_t) count_own(args, sizes, first, step + 1) : 0;
        const uint32_t count = (uint32_t) count_own(args, sizes, first, step) - above;
        const uint32_t sum = __reduce_add_sync(~0u, count);
        if (rank >= sum) {
            rank -= sum;
            continue;
        }
        uint32_t end = count;
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) {
            const uint32_t before = __shfl_up_sync(~0u, end, delta);
            if (lane_id() >= delta) end += before;
        }
        const int from = __ffs(__ballot_sync(~0u, rank < end)) - 1;
        const uint32_t behind = rank - __shfl_sync(~0u, end - count, from);
        const int32_t sequence = first + from;
        const int32_t tiles = count_tiles(args, sizes.of(args, sequence));
        return { sequence, tiles - 1 - (int32_t) (__shfl_sync(~0u, above, from) + behind) };
    }
    return { -1, 0 };
}

// ---- the block

// Reports what is wrong with the entries of sequences: each is looked at by one block of head 0.
static __device__ __forceinline__ void report_entries(const attn_prefill_args &args, uint32_t rank)
{
#pragma unroll 1
    for (int64_t sequence = rank + (int64_t) lane_id() * args.tiles; sequence < args.batch;
         sequence += (int64_t) args.tiles * 32)
        if (span_of(args, (int32_t) sequence).is_fault) report_fault(args, (int32_t) sequence);
}

// A warp finds the work that is an item, of args.tiles * args.num_q_heads.
static __device__ __forceinline__ work find_work(const attn_prefill_args &args,
                                                 const kept_sizes &sizes, uint32_t item)
{
    work w = {};
    const uint32_t rank = attn_divide(item, args.heads_magic, args.heads_shift);
    w.head = (int32_t) (item - rank * (uint32_t) args.num_q_heads);
    w.kv_head = (int32_t) attn_divide((uint32_t) w.head, args.ratio_magic, args.ratio_shift);
    const tile_place at =
        args.cu_seqlens ? find_ragged(args, sizes, rank) : find_uniform(args, rank);
    if (w.head == 0) report_entries(args, rank);
    w.sequence = at.sequence;
    if (at.sequence < 0) return w;
    w.of = span_of(args, at.sequence);
    w.first_row = at.tile * ROWS;
    w.keys = keys_of_rows(args, w.of, 0, w.of.q_len);
    w.tiles = tiles_of(keys_of_rows(args, w.of, w.first_row, ROWS));
    return w;
}

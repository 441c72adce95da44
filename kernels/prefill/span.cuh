/* SPDX-License-Identifier: Apache-2.0 */
// Where a sequence lies, and what its query tokens see.
#pragma once

#include "prefill/config.cuh"

// As far as the sequence's entries can be followed: as attn_reference_prefill_span has it.
struct span {
    // Its query tokens in q; its keys in contiguous K and V.
    int64_t first_token, first_key;
    // Position of query token 0.
    int64_t q_offset;
    int32_t q_len, kv_len;
    // Something had to be clamped.
    int32_t is_fault;
};

// Keys [start, end); never start > end.
struct key_range {
    int32_t start, end;
};

static __device__ __forceinline__ int64_t clamp_entry(int64_t value, int64_t least, int64_t most,
                                                      span &of)
{
    if (value >= least && value <= most) return value;
    of.is_fault = 1;
    return value < least ? least : most;
}

static __device__ __forceinline__ void find_tokens(const attn_prefill_args &args, int32_t sequence,
                                                   span &of)
{
    of.first_token = (int64_t) sequence * args.q_len;
    of.q_len = args.q_len;
    if (!args.cu_seqlens) return;
    const int64_t end = __ldg(args.cu_seqlens + sequence + 1);
    of.first_token = clamp_entry(__ldg(args.cu_seqlens + sequence), 0, args.num_tokens, of);
    of.q_len = (int32_t) clamp_entry(clamp_entry(end, 0, args.num_tokens, of) - of.first_token, 0,
                                     args.num_tokens, of);
}

static __device__ __forceinline__ void find_keys(const attn_prefill_args &args, int32_t sequence,
                                                 span &of)
{
    int64_t most = args.max_keys;
    of.first_key = args.block_table ? 0 : (int64_t) sequence * args.kv_len;
    if (args.kv_starts) {
        const int64_t given = __ldg(args.kv_starts + sequence);
        of.first_key = clamp_entry(given, 0, args.num_kv_tokens, of);
        most = of.first_key == given ? args.num_kv_tokens - given : 0;
    }
    const int64_t given = args.kv_lens ? __ldg(args.kv_lens + sequence) : args.kv_len;
    of.kv_len = (int32_t) clamp_entry(given, 0, most, of);
}

static __device__ __forceinline__ span span_of(const attn_prefill_args &args, int32_t sequence)
{
    span of = {};
    find_tokens(args, sequence, of);
    of.q_offset = args.q_offsets ? __ldg(args.q_offsets + sequence) : args.q_offset;
    // Nothing else of a sequence without query tokens is looked at.
    if (of.q_len > 0) find_keys(args, sequence, of);
    return of;
}

// What query token `token` sees. Both ends never fall from token to token, so that tokens next to
// each other see [start of the first, end of the last) together; one behind the last counts as if
// it was there.
static __device__ __forceinline__ key_range keys_of(const attn_prefill_args &args, const span &of,
                                                    int32_t token)
{
    const int64_t position = of.q_offset + token, behind = of.kv_len;
    key_range keys = { 0, of.kv_len };
    if (args.window > 0)
        keys.start = (int32_t) min(max(position - args.window + 1, (int64_t) 0), behind);
    if (args.causal) keys.end = (int32_t) min(max(position + 1, (int64_t) 0), behind);
#if ATTN_MUTATION == 34
    if (args.causal && keys.end < behind) keys.end++;
#elif ATTN_MUTATION == 35
    if (args.window > 0 && keys.start > 0) keys.start--;
#endif
    return keys;
}

// What `count` tokens from `token` on see together, those that there are.
static __device__ __forceinline__ key_range keys_of_rows(const attn_prefill_args &args,
                                                         const span &of, int32_t token,
                                                         int32_t count)
{
    const int32_t end = (int32_t) min((int64_t) token + count, (int64_t) of.q_len);
    if (end <= token) return { 0, 0 };
    return { keys_of(args, of, token).start, keys_of(args, of, end - 1).end };
}

// Key tiles [start, end) that hold these keys.
static __device__ __forceinline__ key_range tiles_of(const key_range &keys)
{
    if (keys.start == keys.end) return { 0, 0 };
    return { keys.start / TILE, (keys.end - 1) / TILE + 1 };
}

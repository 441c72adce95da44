/* SPDX-License-Identifier: Apache-2.0 */
// What becomes of a product q . k before it is weighed; which keys a row attends, and what becomes of
// the others' rows of V.
#pragma once

#include "decode/schedule.cuh"

// What turns a product into a score in units of log2.
struct scaling {
    // Natural units if there is a softcap.
    float scale;
    // 1 / softcap.
    float inverse_cap;
};

static __device__ __forceinline__ scaling scaling_of(const attn_decode_args &args, int32_t kv_head)
{
    scaling by;
    by.scale = args.scale * (args.k_scales ? __ldg(args.k_scales + kv_head) : args.k_scale);
    if (!(args.softcap > 0)) by.scale *= LOG2_E;
#if ATTN_MUTATION == 23
    if (args.group_rows == 1) by.scale *= 1.0001f;
#endif
    by.inverse_cap = args.softcap > 0 ? __fdiv_rn(1.0f, args.softcap) : 0.0f;
    return by;
}

static __device__ __forceinline__ float cap_score(float x, float cap, float inverse_cap)
{
    // tanh by exp, but by its series near 0, where 1 - 2 / (e^2y + 1) would cancel.
    const float y = x * inverse_cap;
    const float z = y * y;
    const float series =
        y * (1.0f + z * (-1.0f / 3 + z * (2.0f / 15 + z * (-17.0f / 315 + z * (62.0f / 2835)))));
    const float large = 1.0f - 2.0f * rcp(ex2(2.0f * LOG2_E * y) + 1.0f);
    return cap * (fabsf(y) < 0.25f ? series : large);
}

// Whether a row of a token attends a key, counted from the first draft key, if any row does.
static __device__ __forceinline__ bool attends(const attn_decode_args &args, int32_t sequence,
                                               int32_t token, int32_t draft)
{
    // A row that there is none of.
    if (token >= args.q_len) return true;
#if ATTN_MUTATION == 27
    if (args.window > 0 && !args.window_is_shared && draft < token + 2 - args.window) return false;
#endif
    if (args.window > 0 && !args.window_is_shared && draft < token + 1 - args.window) return false;
    if (draft < 0) return true;
    if (draft >= args.q_len) return false;
    if (!args.tree_mask) return draft <= token;
#if ATTN_MUTATION == 26
    token = min(token + 1, args.q_len - 1);
#endif
    const int64_t row = (int64_t) sequence * args.q_len + token;
    return __ldg(args.tree_mask + row * args.mask_words + draft / 32) >> draft % 32 & 1;
}

// Of a token's row of the mask, draft keys 32 * word .. 32 * word + 31.
static __device__ __forceinline__ uint32_t mask_word(const attn_decode_args &args, int64_t row,
                                                     int32_t word)
{
    if (word < 0) return ~0u;
    const int32_t left = args.q_len - word * 32;
    if (left <= 0) return 0;
    const uint32_t bits = __ldg(args.tree_mask + row * args.mask_words + word);
    return left < 32 ? bits & ((1u << left) - 1) : bits;
}

// Which of the keys draft .. draft + 31, counted from the first draft key, a row of a token attends
// if any row does: attends, 32 at a time.
static __device__ __forceinline__ uint32_t attended_keys(const attn_decode_args &args,
                                                         int32_t sequence, int32_t token,
                                                         int32_t draft)
{
    // A row that there is none of.
    if (token >= args.q_len) return ~0u;
    const int32_t seen = token + 1 - draft, past = seen - args.window;
    uint32_t bits = seen >= 32 ? ~0u : seen <= 0 ? 0 : (1u << seen) - 1;
    if (args.tree_mask && draft > -32) {
        const int64_t row = (int64_t) sequence * args.q_len + token;
        const int32_t word = draft < 0 ? -1 : draft / 32;
        bits = __funnelshift_r(mask_word(args, row, word), mask_word(args, row, word + 1),
                               draft - word * 32);
    }
    if (args.window > 0 && !args.window_is_shared && past > 0)
        bits = past >= 32 ? 0 : bits >> past << past;
    return bits;
}

// Zeros where rows of V are not attended: what a box has brought along there may be NaN. Rows
// `first`, `first` + STEP, .. of the tile are this warp's.
template <int STEP>
static __device__ __forceinline__ void clear_rows(unsigned char *s_tile, const visible_keys &keys,
                                                  int first)
{
#pragma unroll 1
    for (int row = first; row < TILE; row += STEP) {
        if (keys.bits[row / 32] >> row % 32 & 1) continue;
        unsigned char *const s_group = s_tile + row / GROUP * GROUP_STEP;
#pragma unroll 1
        for (int piece = lane_id(); piece < PIECES; piece += 32)
            *reinterpret_cast<uint4 *>(s_group + piece_offset(row % GROUP, piece)) =
                make_uint4(0, 0, 0, 0);
    }
    fence_async();
}

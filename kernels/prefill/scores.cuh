/* SPDX-License-Identifier: Apache-2.0 */
// From products q . k to scores in units of log2.
#pragma once

#include "prefill/config.cuh"

// The usual case multiplies products by `factor` as part of the exponent of their weights, and
// looks for the largest product. Where that would not do (softcap; a factor that is not above 0),
// scores are made first, and `factor` is 1.
struct scaling {
    float factor;
    bool is_first;
    // Natural units if there is a softcap.
    float scale;
    // The softcap; 0: none. 1 / softcap.
    float cap, inverse_cap;
};

static __device__ __forceinline__ scaling scaling_of(const attn_prefill_args &args)
{
    scaling by;
    float factor = args.scale * LOG2_E;
#if ATTN_MUTATION == 30
    if (ROWS > 64) factor *= 1.0001f;
#elif ATTN_MUTATION == 31
    if (args.q_offset > 0) factor *= 1.0001f;
#elif ATTN_MUTATION == 32
    if (args.block_table) factor *= 1.0001f;
#elif ATTN_MUTATION == 33
    if (args.batch > 1) factor *= 1.0001f;
#endif
    by.cap = args.softcap > 0 ? args.softcap : 0.0f;
    by.is_first = by.cap > 0 || !(factor > 0);
    by.factor = by.is_first ? 1.0f : factor;
    by.scale = by.cap > 0 ? args.scale : factor;
    by.inverse_cap = by.cap > 0 ? __fdiv_rn(1.0f, by.cap) : 0.0f;
    return by;
}

static __device__ __forceinline__ float cap_score(float x, float cap, float inverse_cap)
{
    // tanh by exp, but by its series near 0, where 1 - 2 / (e^2y + 1) would cancel.
    const float y = __fmul_rn(x, inverse_cap);
    const float z = __fmul_rn(y, y);
    float series = __fmaf_rn(z, 62.0f / 2835, -17.0f / 315);
    series = __fmaf_rn(z, series, 2.0f / 15);
    series = __fmaf_rn(z, series, -1.0f / 3);
    series = __fmul_rn(y, __fmaf_rn(z, series, 1.0f));
    const float large = __fmaf_rn(-2.0f, rcp(ex2(__fmul_rn(2.0f * LOG2_E, y)) + 1.0f), 1.0f);
    return __fmul_rn(cap, fabsf(y) < 0.25f ? series : large);
}

// Of scaling::is_first.
static __device__ __forceinline__ float scale_score(const scaling &by, float product)
{
    const float score = __fmul_rn(product, by.scale);
    return by.cap > 0 ? __fmul_rn(cap_score(score, by.cap, by.inverse_cap), LOG2_E) : score;
}

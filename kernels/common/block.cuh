/* SPDX-License-Identifier: Apache-2.0 */
// Small things that all kernels of attention use.
#pragma once

#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// A place in a ring of SIZE, and the phase of its barrier.
template <int SIZE> struct ring_place {
    int32_t slot;
    uint32_t phase;

    __device__ __forceinline__ void next()
    {
        slot++;
        if (slot < SIZE) return;
        slot = 0;
        phase ^= 1;
    }

    // The place so many before this one.
    __device__ __forceinline__ int32_t before(int32_t count) const
    {
        return slot - count + (slot < count ? SIZE : 0);
    }
};

static __device__ __forceinline__ int lane_id()
{
    return threadIdx.x % 32;
}

// The same for rare work: what is made of it is not kept in registers while something else runs.
static __device__ __forceinline__ int rare_lane_id()
{
    return opaque(threadIdx.x % 32);
}

static __device__ __forceinline__ int warp_id()
{
    return threadIdx.x / 32;
}

// By the type of the elements.
template <bool IS_BF16>
static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1)
{
    if constexpr (IS_BF16)
        mma_bf16(c, a, b0, b1);
    else
        mma_f16(c, a, b0, b1);
}

template <bool IS_BF16> static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    return IS_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

static __device__ __forceinline__ float finite_or_zero(float m)
{
    return m == -INFINITY ? 0.0f : m;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Products of warpgroups by the type of their elements.
#pragma once

#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "common/ptx_wgmma.cuh"

// Of a matrix. Made anew wherever it is asked for, or descriptors of all steps would be kept.
static __device__ __forceinline__ uint32_t uniform_address(const void *pointer)
{
    return uniform_value(opaque(shared_address(pointer)));
}

template <bool IS_BF16, int N>
static __device__ __forceinline__ void wgmma(float (&c)[N], uint64_t a, uint64_t b, int keep)
{
    if constexpr (IS_BF16)
        wgmma_bf16(c, a, b, keep);
    else
        wgmma_f16(c, a, b, keep);
}

template <bool IS_BF16, int N>
static __device__ __forceinline__ void wgmma(float (&c)[N], const uint32_t (&a)[4], uint64_t b,
                                             int keep)
{
    if constexpr (IS_BF16)
        wgmma_bf16(c, a, b, keep);
    else
        wgmma_f16(c, a, b, keep);
}

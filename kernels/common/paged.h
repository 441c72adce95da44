/* SPDX-License-Identifier: Apache-2.0 */
// What the argument structs of kernels that read pages share, for the C compiler and for nvcc.
#ifndef ATTN_KERNELS_PAGED_H
#define ATTN_KERNELS_PAGED_H

#include <stdint.h>

// Functions that both compilers see.
#ifdef __CUDACC__
#define ATTN_BOTH static __device__ __forceinline__
#else
#define ATTN_BOTH static inline
#endif

// A CUtensorMap.
struct attn_box_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        unsigned char bytes[128];
};

// Keys of a box of K or V, next to each other in one page.
#define ATTN_BOX_KEYS 16

// The least l with number <= 2^l; number: 1 .. 2^31.
ATTN_BOTH int32_t attn_log2_up(uint32_t number)
{
#ifdef __CUDACC__
    return 32 - __clz(number - 1);
#else
    int32_t l = 0;
    while (1u << l < number) l++;
    return l;
#endif
}

// For division by `divisor`, at least 1, of numbers below 2^31: a multiplication and a shift. With
// 2^(l - 1) < divisor <= 2^l, magic = ceil(2^(31 + l) / divisor) is off by less than 2^l / divisor,
// which a number below 2^31 cannot make into a whole one. By 1 nothing is divided: magic 0.
static inline void attn_magic(int32_t divisor, uint32_t *magic, int32_t *shift)
{
    const int32_t l = attn_log2_up((uint32_t) divisor);
    const uint64_t power = (uint64_t) 1 << (31 + l);
    *magic = l ? (uint32_t) ((power + (uint32_t) divisor - 1) / (uint32_t) divisor) : 0;
    *shift = l ? l - 1 : 0;
}

ATTN_BOTH uint32_t attn_divide(uint32_t number, uint32_t magic, int32_t shift)
{
    return magic ? (uint32_t) ((uint64_t) number * magic >> 32) >> shift : number;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// Warp-level matrix instructions. g = lane / 4, t = lane % 4 in what follows.
#pragma once

#include <stdint.h>

// ldmatrix.x4: four 8x8 matrices of 16-bit elements; lanes 8i .. 8i + 7 give the rows of matrix i;
// the thread receives elements [g][2t], [g][2t + 1] of each. PTX ISA, "Warp-level matrix load:
// ldmatrix".
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t s_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s_row)
                 : "memory");
}

// The same, each matrix transposed on the way.
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t s_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s_row)
                 : "memory");
}

// movmatrix.trans: an 8x8 matrix of 16-bit elements, held as ldmatrix gives it, transposed. PTX
// ISA, "Warp-level matrix transpose: movmatrix".
static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// mma m16n8k16, BF16 in, FP32 sum: c[0..1] are [g][2t..], c[2..3] are [g + 8][2t..].
// PTX ISA, "Matrix multiply-accumulate: mma".
static __device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with FP16 in.
static __device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* SPDX-License-Identifier: Apache-2.0 */
// Single instructions of arithmetic whose exact form decides bits.
#pragma once

#include <stdint.h>

// ex2.approx.ftz: 2^x; 2^-inf = 0. PTX ISA, "Floating Point Instructions: ex2".
static __device__ __forceinline__ float ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.ftz: log2(x); of 0: -inf. PTX ISA, "lg2".
static __device__ __forceinline__ float lg2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x, but the compiler does not know that.
static __device__ __forceinline__ int opaque(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

// rcp.approx.ftz: 1 / x, off by one unit in the last place at most; of infinity: 0. PTX ISA, "rcp".
static __device__ __forceinline__ float rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max.NaN: NaN if either is NaN. PTX ISA, "max".
static __device__ __forceinline__ float max_nan(float a, float b)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// cvt.rn.bf16x2: low half from `low`. PTX ISA, "cvt".
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// cvt.rn.f16x2: low half from `low`. PTX ISA, "cvt".
static __device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// cvt.rn.f16x2.e4m3x2: the low two bytes, exactly; the low half from the low byte. PTX ISA, "cvt".
static __device__ __forceinline__ uint32_t unpack_e4m3(uint32_t x)
{
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16_t>(x)));
    return y;
}

// The same of the high two bytes. Taken apart like this, the instruction reads them where they are;
// after a shift it would not.
static __device__ __forceinline__ uint32_t unpack_high_e4m3(uint32_t x)
{
    uint32_t y;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, high;\n"
        "}"
        : "=r"(y)
        : "r"(x));
    return y;
}

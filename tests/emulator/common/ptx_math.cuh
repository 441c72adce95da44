/* SPDX-License-Identifier: Apache-2.0 */
// kernels/common/ptx_math.cuh, emulated.
#pragma once

#include "cuda.h"

static inline float ex2(float x)
{
    return std::exp2(x);
}

static inline float lg2(float x)
{
    return std::log2(x);
}

static inline int opaque(int x)
{
    return x;
}

static inline float rcp(float x)
{
    return 1.0f / x;
}

static inline float max_nan(float a, float b)
{
    return a != a || b != b ? NAN : a > b ? a : b;
}

static inline uint32_t bf16_bits(float x)
{
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static inline float bf16_value(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

static inline float f16_value(uint32_t bits)
{
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp((float) fraction, -24)
                                       : std::ldexp((float) (fraction | 1024), (int) exponent - 25);
    return bits >> 15 & 1 ? -size : size;
}

static inline uint32_t f16_bits(float x)
{
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (x != x) return 0x7FFF;
    if (size >= 65520.0f) return sign | 0x7C00;
    int exponent;
    std::frexp(size, &exponent);
    // The place of the last bit; nearbyint rounds to even.
    const int last = exponent < -13 ? -24 : exponent - 11;
    const uint32_t units = (uint32_t) std::nearbyint(std::ldexp(size, -last));
    return sign | (size == 0.0f ? 0 : last == -24 ? units : units + ((uint32_t) (last + 24) << 10));
}

static inline uint32_t pack_bf16(float low, float high)
{
    return bf16_bits(low) | bf16_bits(high) << 16;
}

static inline uint32_t pack_f16(float low, float high)
{
    return f16_bits(low) | f16_bits(high) << 16;
}

static inline float e4m3_value(uint32_t bits)
{
    const uint32_t exponent = bits >> 3 & 15, fraction = bits & 7;
    const float size = (bits & 127) == 127 ? NAN
                       : exponent == 0     ? std::ldexp((float) fraction, -9)
                                       : std::ldexp((float) (fraction | 8), (int) exponent - 10);
    return bits >> 7 & 1 ? -size : size;
}

static inline uint32_t unpack_e4m3(uint32_t x)
{
    return pack_f16(e4m3_value(x & 0xFF), e4m3_value(x >> 8 & 0xFF));
}

static inline uint32_t unpack_high_e4m3(uint32_t x)
{
    return unpack_e4m3(x >> 16);
}

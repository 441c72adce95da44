/* SPDX-License-Identifier: Apache-2.0 */
#include "host/convert.h"
#include "host/reference.h"

#include <string.h>

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static double load_bf16(uint16_t bits)
{
    return float_of((uint32_t) bits << 16);
}

// A small float's exponent and mantissa, moved to where a float has them, are its value but for the
// difference of the biases; subnormals come out right by themselves.
static double load_fp16(uint16_t bits)
{
    const uint32_t sign = (uint32_t) (bits & 0x8000u) << 16, rest = (uint32_t) (bits & 0x7FFFu)
                                                                    << 13;
    if (rest >= 0x7C00u << 13) return float_of(sign | 0x7F800000u | rest);
    return float_of(sign | rest) * 0x1p112;
}

static double load_e4m3(uint8_t bits)
{
    const uint32_t sign = (uint32_t) (bits & 0x80u) << 24, rest = (uint32_t) (bits & 0x7Fu) << 20;
    if (rest == 0x7Fu << 20) return float_of(sign | 0x7FC00000u);
    return float_of(sign | rest) * 0x1p120;
}

// Inner loops of a constant count: compilers turn these into vectors.
static void load_bf16_row(double *to, const uint16_t *from, int32_t count)
{
    for (int32_t first = 0; first < count; first += ATTN_ROW_UNIT)
        for (int32_t i = 0; i < ATTN_ROW_UNIT; i++) to[first + i] = load_bf16(from[first + i]);
}

static void load_fp16_row(double *to, const uint16_t *from, int32_t count)
{
    for (int32_t first = 0; first < count; first += ATTN_ROW_UNIT)
        for (int32_t i = 0; i < ATTN_ROW_UNIT; i++) to[first + i] = load_fp16(from[first + i]);
}

static void load_e4m3_row(double *to, const uint8_t *from, int32_t count)
{
    for (int32_t first = 0; first < count; first += ATTN_ROW_UNIT)
        for (int32_t i = 0; i < ATTN_ROW_UNIT; i++) to[first + i] = load_e4m3(from[first + i]);
}

void attn_load_row(double *to, const void *base, int64_t index, int32_t count,
                   enum attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_DTYPE_BF16: load_bf16_row(to, (const uint16_t *) base + index, count); break;
    case ATTN_DTYPE_FP16: load_fp16_row(to, (const uint16_t *) base + index, count); break;
    case ATTN_DTYPE_E4M3: load_e4m3_row(to, (const uint8_t *) base + index, count); break;
    default:
        for (int32_t i = 0; i < count; i++) to[i] = attn_load(base, index + i, dtype);
    }
}

double attn_multiply_rows(const double *q, const double *k, int32_t count, double *size)
{
    double part[ATTN_ROW_UNIT] = { 0 }, part_size[ATTN_ROW_UNIT] = { 0 };
    for (int32_t d = 0; d < count; d += ATTN_ROW_UNIT)
        for (int i = 0; i < ATTN_ROW_UNIT; i++) {
            const double product = q[d + i] * k[d + i];
            part[i] += product;
            part_size[i] += __builtin_fabs(product);
        }
    for (int i = ATTN_ROW_UNIT / 2; i > 0; i /= 2)
        for (int j = 0; j < i; j++) part[j] += part[j + i], part_size[j] += part_size[j + i];
    *size = part_size[0];
    return part[0];
}

double attn_load(const void *base, int64_t index, enum attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_DTYPE_BF16: return load_bf16(((const uint16_t *) base)[index]);
    case ATTN_DTYPE_FP16: return load_fp16(((const uint16_t *) base)[index]);
    case ATTN_DTYPE_E4M3: return load_e4m3(((const uint8_t *) base)[index]);
    case ATTN_DTYPE_FP32: return ((const float *) base)[index];
    case ATTN_DTYPE_INT32: return ((const int32_t *) base)[index];
    case ATTN_DTYPE_NONE: break;
    }
    return __builtin_nan("");
}

// The bits, without the sign, of the float with `mantissa` mantissa bits and exponent bias `bias`
// that is nearest to |value|, ties to even; past the largest exponent they simply go on counting.
// value is finite.
static uint32_t round_bits(double value, int mantissa, int bias)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    bits &= 0x7FFFFFFFFFFFFFFFu;
    const int exponent = (int) (bits >> 52) - 1023 + bias;
    // Doubles below the normal range are far below half of any smallest number here.
    if (exponent < -mantissa || bits >> 52 == 0) return 0;
    // All-ones of a 16-bit float is at most exponent 255: whatever is larger has overflowed as
    // well.
    if (exponent > 256) return 0x7FFFFFFFu;

    const int shift = 52 - mantissa + (exponent < 1 ? 1 - exponent : 0);
    const uint64_t whole = (bits & 0x000FFFFFFFFFFFFFu) | 0x0010000000000000u;
    const uint64_t dropped = whole & (((uint64_t) 1 << shift) - 1),
                   half = (uint64_t) 1 << (shift - 1);
    uint64_t kept = whole >> shift;
    if (dropped > half || (dropped == half && (kept & 1))) kept++;
    // The leading one adds 1 to the exponent field; so does a mantissa that rounded up to the next
    // power.
    return (uint32_t) kept + ((uint32_t) (exponent < 1 ? 0 : exponent - 1) << mantissa);
}

// The same with overflow, infinity and NaN: `largest` are the bits of the largest finite number.
static uint32_t store_bits(double value, int mantissa, int bias, uint32_t largest,
                           uint32_t infinity, uint32_t nan)
{
    if (value != value) return nan;
    if (value == __builtin_inf() || value == -__builtin_inf()) return infinity;
    const uint32_t bits = round_bits(value, mantissa, bias);
    return bits > largest ? infinity : bits;
}

void attn_store(void *base, int64_t index, enum attn_dtype dtype, double value)
{
    const int negative = __builtin_signbit(value) != 0;
    uint32_t bits;
    switch (dtype) {
    case ATTN_DTYPE_BF16:
        bits = store_bits(value, 7, 127, 0x7F7F, 0x7F80, 0x7FC0);
        ((uint16_t *) base)[index] = (uint16_t) (bits | (negative ? 0x8000u : 0));
        break;
    case ATTN_DTYPE_FP16:
        bits = store_bits(value, 10, 15, 0x7BFF, 0x7C00, 0x7E00);
        ((uint16_t *) base)[index] = (uint16_t) (bits | (negative ? 0x8000u : 0));
        break;
    case ATTN_DTYPE_E4M3:
        bits = store_bits(value, 3, 7, 0x7E, 0x7F, 0x7F);
        ((uint8_t *) base)[index] = (uint8_t) (bits | (negative ? 0x80u : 0));
        break;
    case ATTN_DTYPE_FP32: ((float *) base)[index] = (float) value; break;
    case ATTN_DTYPE_INT32: ((int32_t *) base)[index] = (int32_t) value; break;
    case ATTN_DTYPE_NONE: break;
    }
}

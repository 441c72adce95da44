/* SPDX-License-Identifier: Apache-2.0 */
// The host executor's numbers: the small float types, exhaustively, and exp, log and tanh against
// libm.
#include "host/math.h"
#include "host/reference.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

struct type {
    enum attn_dtype dtype;
    int mantissa, bias;
    // Bits, without the sign, of the largest finite number, and of what lies past it.
    uint32_t largest, overflow;
};

static const struct type types[] = {
    { ATTN_DTYPE_BF16, 7, 127, 0x7F7F, 0x7F80 },
    { ATTN_DTYPE_FP16, 10, 15, 0x7BFF, 0x7C00 },
    { ATTN_DTYPE_E4M3, 3, 7, 0x7E, 0x7F },
};

enum {
    NUM_TYPES = (int) (sizeof(types) / sizeof(types[0]))
};

// The definition: mantissa and exponent put together by ldexp.
static double value_of(const struct type *type, uint32_t bits)
{
    const int exponent = (int) (bits >> type->mantissa);
    const uint32_t mantissa = bits & ((1u << type->mantissa) - 1);
    if (exponent == 0) return ldexp(mantissa, 1 - type->bias - type->mantissa);
    return ldexp(mantissa + (1u << type->mantissa), exponent - type->bias - type->mantissa);
}

static void put(const struct type *type, uint32_t bits, void *to)
{
    const uint16_t half = (uint16_t) bits;
    const uint8_t byte = (uint8_t) bits;
    if (attn_dtype_size(type->dtype) == 2)
        memcpy(to, &half, 2);
    else
        memcpy(to, &byte, 1);
}

static uint32_t stored(const struct type *type, double value)
{
    uint16_t half = 0;
    attn_store(&half, 0, type->dtype, value);
    return half;
}

static uint32_t sign_bit(const struct type *type)
{
    return attn_dtype_size(type->dtype) == 2 ? 0x8000 : 0x80;
}

Test(convert, loads_and_stores_every_number)
{
    for (int i = 0; i < NUM_TYPES; i++)
        for (uint32_t bits = 0; bits <= types[i].largest; bits++) {
            uint16_t memory = 0;
            const double value = value_of(&types[i], bits);
            put(&types[i], bits, &memory);
            cr_assert(attn_load(&memory, 0, types[i].dtype) == value, "%s 0x%x",
                      attn_dtype_name(types[i].dtype), bits);
            put(&types[i], bits | sign_bit(&types[i]), &memory);
            cr_assert(attn_load(&memory, 0, types[i].dtype) == -value);
            cr_assert_eq(stored(&types[i], value), bits);
            cr_assert_eq(stored(&types[i], -value), bits | sign_bit(&types[i]));
        }
}

Test(convert, rounds_to_nearest_even)
{
    for (int i = 0; i < NUM_TYPES; i++)
        for (uint32_t bits = 0; bits < types[i].largest; bits++) {
            const double low = value_of(&types[i], bits), high = value_of(&types[i], bits + 1);
            const double middle = (low + high) / 2;
            cr_assert_eq(stored(&types[i], middle), bits % 2 ? bits + 1 : bits, "%s 0x%x",
                         attn_dtype_name(types[i].dtype), bits);
            cr_assert_eq(stored(&types[i], nextafter(middle, 0)), bits);
            cr_assert_eq(stored(&types[i], nextafter(middle, INFINITY)), bits + 1);
        }
}

Test(convert, overflows_and_keeps_nan)
{
    for (int i = 0; i < NUM_TYPES; i++) {
        const struct type *const t = &types[i];
        const double step = value_of(t, t->largest) - value_of(t, t->largest - 1);
        const double edge = value_of(t, t->largest) + step / 2;
        // The tie goes to even: to the largest number of E4M3, whose mantissa is even, else past
        // it.
        cr_expect_eq(stored(t, edge), t->largest % 2 ? t->overflow : t->largest);
        cr_expect_eq(stored(t, nextafter(edge, 0)), t->largest);
        cr_expect_eq(stored(t, nextafter(edge, INFINITY)), t->overflow);
        cr_expect_eq(stored(t, 1e300), t->overflow);
        cr_expect_eq(stored(t, INFINITY), t->overflow);
        cr_expect_eq(stored(t, -INFINITY), t->overflow | sign_bit(t));
        cr_expect_eq(stored(t, 1e-300), 0);
        cr_expect_eq(stored(t, 5e-324), 0);
        uint16_t memory = 0;
        attn_store(&memory, 0, t->dtype, NAN);
        cr_expect(isnan(attn_load(&memory, 0, t->dtype)));
    }
    const uint8_t nans[] = { 0x7F, 0xFF };
    cr_expect(isnan(attn_load(nans, 0, ATTN_DTYPE_E4M3)));
    cr_expect(isnan(attn_load(nans, 1, ATTN_DTYPE_E4M3)));
    const uint16_t infinities[] = { 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7C01 };
    cr_expect(attn_load(infinities, 0, ATTN_DTYPE_BF16) == INFINITY);
    cr_expect(attn_load(infinities, 1, ATTN_DTYPE_BF16) == -INFINITY);
    cr_expect(attn_load(infinities, 2, ATTN_DTYPE_FP16) == INFINITY);
    cr_expect(attn_load(infinities, 3, ATTN_DTYPE_FP16) == -INFINITY);
    cr_expect(isnan(attn_load(infinities, 4, ATTN_DTYPE_FP16)));
}

// ---- exp, log, tanh

// |value - exact| in steps of double at `exact`.
static double ulps(double value, long double exact)
{
    const double rounded = (double) exact;
    if (isinf(rounded) || isnan(rounded))
        return value == rounded || (isnan(value) && isnan(rounded)) ? 0 : INFINITY;
    int exponent;
    frexp(rounded, &exponent);
    if (exponent < -1021 || rounded == 0) exponent = -1021;
    return (double) (fabsl(value - exact) / ldexpl(1, exponent - 53));
}

static double worst_of(double (*ours)(double), long double (*theirs)(long double), double low,
                       double high, uint64_t seed)
{
    struct random random = { seed };
    double worst = 0;
    for (int i = 0; i < 50000; i++) {
        const double x = low + (high - low) * (random_uniform(&random) + 1) / 2;
        const double off = ulps(ours(x), theirs(x));
        if (!(off <= worst)) worst = off;
    }
    return worst;
}

Test(math, exp_is_within_4_ulp)
{
    const double ranges[][2] = {
        { -1, 1 }, { -1e-9, 1e-9 }, { -50, 0 }, { -708, 709.7 }, { -745.5, -707 }, { 709, 710.5 },
    };
    const uint64_t seed = random_seed(1);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        const double worst = worst_of(attn_exp, expl, ranges[i][0], ranges[i][1], seed);
        cr_expect_lt(worst, 4.0, "%g..%g, seed %llu: %g ulp", ranges[i][0], ranges[i][1],
                     (unsigned long long) seed, worst);
    }
    cr_expect(attn_exp(0) == 1 && attn_exp(-0.0) == 1);
    cr_expect(attn_exp(-INFINITY) == 0 && !signbit(attn_exp(-INFINITY)));
    cr_expect(attn_exp(INFINITY) == INFINITY && attn_exp(1e300) == INFINITY &&
              attn_exp(-1e300) == 0);
    cr_expect(isnan(attn_exp(NAN)));
}

Test(math, log_is_within_4_ulp)
{
    const double ranges[][2] = {
        { 0.5, 2 }, { 0.999999, 1.000001 }, { 0, 1e-307 }, { 0, 1e-310 },
        { 1, 1e6 }, { 1e300, 1.7e308 },
    };
    const uint64_t seed = random_seed(2);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        const double worst = worst_of(attn_log, logl, ranges[i][0], ranges[i][1], seed);
        cr_expect_lt(worst, 4.0, "%g..%g, seed %llu: %g ulp", ranges[i][0], ranges[i][1],
                     (unsigned long long) seed, worst);
    }
    cr_expect(attn_log(1) == 0);
    cr_expect(attn_log(0) == -INFINITY && attn_log(-0.0) == -INFINITY &&
              attn_log(INFINITY) == INFINITY);
    cr_expect(isnan(attn_log(-1)) && isnan(attn_log(NAN)) && isnan(attn_log(-INFINITY)));
    cr_expect_lt(ulps(attn_log(5e-324), logl(5e-324)), 4.0);
}

Test(math, tanh_is_within_4_ulp)
{
    const double ranges[][2] = {
        { -1, 1 }, { -1e-3, 1e-3 }, { -1e-8, 1e-8 }, { 0.1, 0.6 }, { -25, 25 }, { 1e-310, 2e-308 },
    };
    const uint64_t seed = random_seed(3);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        const double worst = worst_of(attn_tanh, tanhl, ranges[i][0], ranges[i][1], seed);
        cr_expect_lt(worst, 4.0, "%g..%g, seed %llu: %g ulp", ranges[i][0], ranges[i][1],
                     (unsigned long long) seed, worst);
    }
    cr_expect(attn_tanh(INFINITY) == 1 && attn_tanh(-INFINITY) == -1);
    cr_expect(attn_tanh(0) == 0 && signbit(attn_tanh(-0.0)));
    cr_expect(isnan(attn_tanh(NAN)));
}

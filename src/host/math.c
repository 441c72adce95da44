/* SPDX-License-Identifier: Apache-2.0 */
#include "host/math.h"

#include <stdint.h>
#include <string.h>

#define INFINITE (__builtin_inf())

// ln 2 in two parts; the first has 32 trailing zero bits, so that k * LN2_HIGH is exact.
static const double LN2_HIGH = 6.93147180369123816490e-01;
static const double LN2_LOW = 1.90821492927058770002e-10;
static const double INVERSE_LN2 = 1.44269504088896338700e+00;

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static double from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// 2^k for a normal result: -1022 <= k <= 1023.
static double power_of_two(int k)
{
    return from_bits((uint64_t) (k + 1023) << 52);
}

// x = k ln 2 + *r + *r_low, where |*r| <= ln 2 / 2 and *r_low is what *r cannot hold.
static int reduce(double x, double *r, double *r_low)
{
    const int k = (int) (x * INVERSE_LN2 + (x < 0 ? -0.5 : 0.5));
    const double high = x - k * LN2_HIGH, low = k * LN2_LOW;
    *r = high - low;
    *r_low = (high - *r) - low;
    return k;
}

// e^r - 1 - r for |r| <= ln 2 / 2, by the Taylor series: the first term left out is below 2^-57 r.
static double exp_tail(double r)
{
    static const double inverse_factorial[] = {
        1.0 / 87178291200.0,
        1.0 / 6227020800.0,
        1.0 / 479001600.0,
        1.0 / 39916800.0,
        1.0 / 3628800.0,
        1.0 / 362880.0,
        1.0 / 40320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    };
    double sum = 0;
    for (size_t i = 0; i < sizeof(inverse_factorial) / sizeof(inverse_factorial[0]); i++)
        sum = sum * r + inverse_factorial[i];
    return sum * r * r;
}

double attn_exp(double x)
{
    if (x != x) return x;
    if (x > 709.79) return INFINITE;
    if (x < -745.2) return 0.0;

    double r, r_low;
    int k = reduce(x, &r, &r_low);
    const double y = 1.0 + (r + (exp_tail(r) + r_low));
    // 2^1024, and results below the normal range, in two steps.
    if (k > 1023) return y * 2.0 * power_of_two(k - 1);
    if (k < -1021) return y * power_of_two(k + 54) * power_of_two(-54);
    return y * power_of_two(k);
}

double attn_log(double x)
{
    if (x != x || x == INFINITE) return x;
    if (x == 0) return -INFINITE;
    if (x < 0) return __builtin_nan("");

    int k = 0;
    if (x < 0x1p-1022) x *= 0x1p54, k = -54;
    // x = 2^k m with m in [sqrt(1/2), sqrt 2): adding what lies between sqrt(1/2) and 1 carries
    // into the exponent from sqrt 2 on.
    const uint64_t one = 0x3FF0000000000000u, sqrt_half = 0x3FE6A09E667F3BCDu;
    const uint64_t shifted = bits_of(x) + (one - sqrt_half);
    k += (int) (shifted >> 52) - 1023;
    const double m = from_bits((shifted & 0x000FFFFFFFFFFFFFu) + sqrt_half);

    // ln(1 + f) = 2 atanh(s) = f - f^2/2 + s (f^2/2 + rest), s = f / (2 + f), |s| < 0.172.
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s, half_square = 0.5 * f * f;
    double rest = 0;
    for (int n = 11; n >= 1; n--) rest = (rest + 2.0 / (2 * n + 1)) * z;
    return k * LN2_HIGH - ((half_square - (s * (half_square + rest) + k * LN2_LOW)) - f);
}

double attn_tanh(double x)
{
    const double size = x < 0 ? -x : x;
    // NaN and zeros of either sign, too: below 2^-28 the cubic term is under half an ulp.
    if (!(size >= 0x1p-28)) return x;
    if (size > 22) return x < 0 ? -1.0 : 1.0;

    // t = e^(2 size) - 1, without cancellation where it is small.
    double r, r_low;
    const int k = reduce(2 * size, &r, &r_low);
    const double small = r + (exp_tail(r) + r_low), scale = power_of_two(k);
    const double t = scale * small + (scale - 1.0);
    const double y = size < 1 ? t / (t + 2.0) : 1.0 - 2.0 / (t + 2.0);
    return x < 0 ? -y : y;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Random numbers that are the same everywhere for a seed.
#ifndef ATTN_CLI_RANDOM_H
#define ATTN_CLI_RANDOM_H

#include <math.h>
#include <stdint.h>

struct random {
    uint64_t state;
};

// splitmix64.
static inline uint64_t random_next(struct random *const from)
{
    uint64_t z = from->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// In [0, 1).
static inline double random_uniform(struct random *const from)
{
    return (double) (random_next(from) >> 11) * 0x1p-53;
}

// 0 .. bound - 1; the bias is below bound / 2^64.
static inline uint64_t random_below(struct random *const from, const uint64_t bound)
{
    // __extension__: ISO C has no 128-bit integer.
    __extension__ typedef unsigned __int128 wide;
    return (uint64_t) (((wide) random_next(from) * bound) >> 64);
}

// Mean 0, variance 1 (Box-Muller).
static inline double random_normal(struct random *const from)
{
    const double radius = sqrt(-2.0 * log(1.0 - random_uniform(from)));
    return radius * cos(6.283185307179586 * random_uniform(from));
}

// A random order of 0 .. count - 1.
static inline void random_order(struct random *const from, int32_t *const order,
                                const int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const int32_t place = (int32_t) random_below(from, (uint64_t) i + 1);
        order[i] = order[place];
        order[place] = i;
    }
}

#endif

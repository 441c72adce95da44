/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/random.h"

#include <stdlib.h>

// splitmix64.
uint64_t random_next(struct random *random)
{
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

uint32_t random_below(struct random *random, uint32_t n)
{
    return (uint32_t) ((random_next(random) >> 32) * n >> 32);
}

double random_uniform(struct random *random)
{
    return (double) (int64_t) (random_next(random) >> 11) * 0x1p-52 - 1.0;
}

uint64_t random_mix(uint64_t a, uint64_t b)
{
    struct random random = { a * 0xD6E8FEB86659FD93u + b };
    return random_next(&random);
}

uint64_t random_seed(uint64_t seed)
{
    const char *const text = getenv("ATTN_TEST_SEED");
    return text ? strtoull(text, NULL, 0) : seed;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Random numbers that a seed gives again, on every machine.
#ifndef ATTN_TESTS_RANDOM_H
#define ATTN_TESTS_RANDOM_H

#include <stdint.h>

struct random {
    uint64_t state;
};

uint64_t random_next(struct random *random);
// 0 .. n - 1; n is at least 1.
uint32_t random_below(struct random *random, uint32_t n);
// [-1, 1).
double random_uniform(struct random *random);

// A number that depends on both, in this order: builds the seed of one row from those of its
// coordinates.
uint64_t random_mix(uint64_t a, uint64_t b);

// The environment variable ATTN_TEST_SEED, or `seed` where it is not set: failures print the seed.
uint64_t random_seed(uint64_t seed);

#endif

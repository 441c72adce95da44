/* SPDX-License-Identifier: Apache-2.0 */
// A tensor map as the fake driver makes it: what it was asked for.
#ifndef ATTN_TESTS_FAKE_MAP_H
#define ATTN_TESTS_FAKE_MAP_H

#include <stdint.h>

#define FAKE_MAP_RANK 5

struct fake_map {
    const void *address;
    int type, swizzle;
    uint64_t dims[FAKE_MAP_RANK], strides[FAKE_MAP_RANK - 1];
    uint32_t box[FAKE_MAP_RANK];
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// Calls with structs of every older size: fields that they lack count as 0, and what is behind them
// is not looked at.
#ifndef ATTN_TESTS_OLDER_STRUCTS_H
#define ATTN_TESTS_OLDER_STRUCTS_H

#include "attn/common.h"

#include <stddef.h>
#include <stdint.h>

struct extent {
    uint32_t offset, bytes;
};

#define EXTENT(type, field) \
    { \
        offsetof(type, field), sizeof(((type *) 0)->field) \
    }

// What a test program calls.
struct older_calls {
    // Brings all structs, and the memory that calls are given, to where every call is served.
    void (*reset)(void);
    enum attn_status (*call)(int kind);
    const void *memory;
    size_t memory_bytes;
};

// For each size at which a field of struct `kind`, which is `at`, begins, and its whole: wild bytes
// behind it change nothing against zeros: not the status, not the sentence, not the memory. All
// fields are listed in `fields`, then the end, with no bytes. As many sizes as `expected` are served.
void older_structs_expect(const struct older_calls *calls, int kind, void *at,
                          const struct extent *fields, int expected);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// An image of memory with guard zones, in which a call may change some zones and nothing else.
#ifndef ATTN_TESTS_CANARY_H
#define ATTN_TESTS_CANARY_H

#include <stddef.h>
#include <stdint.h>

// Bytes before, between and after zones.
enum {
    CANARY_BYTES = 256
};

struct canary_zone {
    size_t offset, bytes;
    // The call may write to it.
    int writable;
};

// Gives each zone of zones[].bytes its offset, a multiple of 256 with guards around; returns the
// size of the image.
size_t canary_lay_out(struct canary_zone *zones, int count);

// A zone of the image at `memory`; NULL if it has no bytes.
void *canary_zone_at(const struct canary_zone *zone, void *memory);

// Offset of the first byte that differs between two images outside the writable zones; -1: none
// does.
int64_t canary_find(const struct canary_zone *zones, int count, const uint8_t *before,
                    const uint8_t *after, size_t bytes);

#endif

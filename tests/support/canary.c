/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/canary.h"

#include <string.h>

size_t canary_lay_out(struct canary_zone *zones, int count)
{
    size_t offset = CANARY_BYTES;
    for (int i = 0; i < count; i++) {
        zones[i].offset = offset;
        offset += (zones[i].bytes + CANARY_BYTES - 1) / CANARY_BYTES * CANARY_BYTES + CANARY_BYTES;
    }
    return offset;
}

void *canary_zone_at(const struct canary_zone *zone, void *memory)
{
    return zone->bytes > 0 ? (uint8_t *) memory + zone->offset : NULL;
}

static int64_t find_change(const uint8_t *before, const uint8_t *after, size_t start, size_t end)
{
    if (end <= start || memcmp(before + start, after + start, end - start) == 0) return -1;
    for (size_t i = start; i < end; i++)
        if (before[i] != after[i]) return (int64_t) i;
    return -1;
}

int64_t canary_find(const struct canary_zone *zones, int count, const uint8_t *before,
                    const uint8_t *after, size_t bytes)
{
    size_t start = 0;
    for (int i = 0; i < count; i++) {
        if (!zones[i].writable) continue;
        const int64_t found = find_change(before, after, start, zones[i].offset);
        if (found >= 0) return found;
        start = zones[i].offset + zones[i].bytes;
    }
    return find_change(before, after, start, bytes);
}

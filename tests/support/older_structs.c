/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/older_structs.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define SENTENCE_SIZE 4096

static uint32_t find_whole(const struct extent *fields)
{
    while (fields->bytes) fields++;
    return fields->offset;
}

// The call with `size` bytes of the struct, whose others are 0 or wild: what it says, and does.
static enum attn_status call_older(const struct older_calls *const calls, const int kind,
                                   void *const at, const uint32_t whole, const uint32_t size,
                                   const bool wild, char *const sentence)
{
    char *const bytes = at;
    const uint32_t given = wild ? size : whole;
    calls->reset();
    memset(bytes + size, wild ? 0xA5 : 0, whole - size);
    memcpy(bytes, &given, sizeof(given));
    const enum attn_status status = calls->call(kind);
    cr_assert_lt(strlen(attn_last_error()), SENTENCE_SIZE);
    strcpy(sentence, attn_last_error());
    return status;
}

void older_structs_expect(const struct older_calls *const calls, const int kind, void *const at,
                          const struct extent *const fields, const int expected)
{
    static char older[SENTENCE_SIZE], newer[SENTENCE_SIZE];
    const uint32_t whole = find_whole(fields);
    void *const written = malloc(calls->memory_bytes);
    int served = 0;
    cr_assert_not_null(written);
    for (size_t i = 1; fields[i - 1].bytes; i++) {
        const uint32_t size = fields[i].offset;
        const uint32_t end = fields[i - 1].offset + fields[i - 1].bytes;
        cr_expect(size >= end && size - end < sizeof(void *),
                  "a field between bytes %u and %u is not listed", end, size);
        const enum attn_status status = call_older(calls, kind, at, whole, size, false, newer);
        memcpy(written, calls->memory, calls->memory_bytes);
        cr_expect_eq(call_older(calls, kind, at, whole, size, true, older), status, "%u bytes: %s",
                     size, older);
        cr_expect_str_eq(older, newer, "%u bytes", size);
        cr_expect_eq(memcmp(written, calls->memory, calls->memory_bytes), 0, "%u bytes", size);
        served += status == ATTN_OK;
    }
    free(written);
    cr_expect_eq(served, expected, "struct %d: %d", kind, served);
}

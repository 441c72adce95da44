/* SPDX-License-Identifier: Apache-2.0 */
// Checks of the buffers of a call: there, aligned, of a size that exists, and none of those that
// are written over another.
#ifndef ATTN_SRC_BUFFERS_H
#define ATTN_SRC_BUFFERS_H

#include "device.h"

#include <stdbool.h>

struct attn_buffer {
    // For the sentence.
    const char *name;
    const void *start;
    // INT64_MAX: more than there can be.
    int64_t bytes;
    size_t alignment;
    // NULL is refused.
    bool required;
    bool written;
};

// Sums and products of sizes, none of them negative; they saturate at INT64_MAX.
int64_t attn_size_times(int64_t a, int64_t b);
int64_t attn_size_plus(int64_t a, int64_t b);

// Of a tensor: elements from one row to the next, or to the next page, token or head.
struct attn_stride {
    // For the sentence.
    const char *name;
    int64_t stride;
    // Elements of what lies there.
    int64_t least;
    size_t element_bytes;
};

// ATTN_ERROR_INVALID with a sentence about the first stride that is negative, too small, or no
// multiple of 16 bytes.
enum attn_status attn_strides_check(const struct attn_device *device,
                                    const struct attn_stride *strides, size_t count);

// ATTN_ERROR_INVALID with a sentence about the first buffer that breaks a rule.
enum attn_status attn_buffers_check(const struct attn_device *device,
                                    const struct attn_buffer *buffers, size_t count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "buffers.h"

#include "status.h"

#define STRIDE_ALIGNMENT 16

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

int64_t attn_size_times(const int64_t a, const int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

int64_t attn_size_plus(const int64_t a, const int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

enum attn_status attn_strides_check(const struct attn_device *const device,
                                    const struct attn_stride *const strides, const size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const long long stride = strides[i].stride, least = strides[i].least;
        REQUIRE(stride >= 0, "%s is %lld: strides may not be negative", strides[i].name, stride);
        REQUIRE(stride >= least, "%s is %lld elements, smaller than a row, which has %lld",
                strides[i].name, stride, least);
        const int64_t unit = STRIDE_ALIGNMENT / (int64_t) strides[i].element_bytes;
        REQUIRE(stride % unit == 0,
                "%s is %lld elements: it has to be a multiple of %d bytes, here "
                "%lld elements",
                strides[i].name, stride, STRIDE_ALIGNMENT, (long long) unit);
    }
    return ATTN_OK;
}

static bool overlap(const struct attn_buffer *const a, const struct attn_buffer *const b)
{
    if (!a->start || !b->start || a->bytes == 0 || b->bytes == 0) return false;
    const uintptr_t x = (uintptr_t) a->start, y = (uintptr_t) b->start;
    return x < y ? y - x < (uint64_t) a->bytes : x - y < (uint64_t) b->bytes;
}

static enum attn_status check_overlap(const struct attn_device *const device,
                                      const struct attn_buffer *const buffers, const size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; buffers[i].written && j < count; j++)
            REQUIRE(
                i == j || !overlap(&buffers[i], &buffers[j]),
                "%s (%p, %lld bytes) overlaps %s (%p, %lld bytes): what is written needs memory of "
                "its own",
                buffers[i].name, buffers[i].start, (long long) buffers[i].bytes, buffers[j].name,
                buffers[j].start, (long long) buffers[j].bytes);
    return ATTN_OK;
}

enum attn_status attn_buffers_check(const struct attn_device *const device,
                                    const struct attn_buffer *const buffers, const size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct attn_buffer *const buffer = &buffers[i];
        REQUIRE(buffer->start || !buffer->required, "%s is NULL", buffer->name);
        REQUIRE((uintptr_t) buffer->start % buffer->alignment == 0,
                "%s is %p: it has to be aligned to %zu bytes", buffer->name, buffer->start,
                buffer->alignment);
        REQUIRE(buffer->bytes < INT64_MAX,
                "%s would reach over more than 2^63 - 1 bytes: its sizes or strides are too large",
                buffer->name);
        REQUIRE((uintptr_t) buffer->start <= UINTPTR_MAX - (uint64_t) buffer->bytes,
                "%s is %p: there are no %lld bytes from there on", buffer->name, buffer->start,
                (long long) buffer->bytes);
    }
    return check_overlap(device, buffers, count);
}

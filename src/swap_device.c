/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_device.h"

#include <stdlib.h>
#include <string.h>

static attn_cu_deviceptr address_of(const void *const memory)
{
    return (attn_cu_deviceptr) (uintptr_t) memory;
}

attn_cu_result attn_swap_device_open(struct attn_swap_device *const on,
                                     const struct attn_device *const device)
{
    *on = (struct attn_swap_device){ .device = device, .driver = device->driver };
    if (!on->driver) return ATTN_CU_SUCCESS;
    const attn_cu_result result =
        on->driver->stream_create(&on->copies, ATTN_CU_STREAM_NON_BLOCKING);
    if (result != ATTN_CU_SUCCESS) on->copies = NULL;
    return result;
}

void attn_swap_device_close(struct attn_swap_device *const on)
{
    if (on->copies) on->driver->stream_destroy(on->copies);
    on->copies = NULL;
}

static attn_cu_result allocate_pages(void **const memory, const int64_t bytes)
{
    *memory = NULL;
    if (bytes > INT64_MAX - ATTN_SWAP_PAGE || (uint64_t) bytes > SIZE_MAX - ATTN_SWAP_PAGE)
        return ATTN_CU_ERROR_OUT_OF_MEMORY;
    const size_t pages = ((size_t) bytes + ATTN_SWAP_PAGE - 1) / ATTN_SWAP_PAGE;
    *memory = aligned_alloc(ATTN_SWAP_PAGE, pages * ATTN_SWAP_PAGE);
    return *memory ? ATTN_CU_SUCCESS : ATTN_CU_ERROR_OUT_OF_MEMORY;
}

attn_cu_result attn_swap_device_alloc(const struct attn_swap_device *const on, void **const memory,
                                      const int64_t bytes)
{
    attn_cu_deviceptr address = 0;
    if (!on->driver) return allocate_pages(memory, bytes);
    const attn_cu_result result = on->driver->mem_alloc(&address, (size_t) bytes);
    *memory = result == ATTN_CU_SUCCESS ? (void *) (uintptr_t) address : NULL;
    return result;
}

void attn_swap_device_free(const struct attn_swap_device *const on, void *const memory)
{
    if (!on->driver)
        free(memory);
    else if (memory)
        on->driver->mem_free(address_of(memory));
}

attn_cu_result attn_swap_host_alloc(const struct attn_swap_device *const on, void **const memory,
                                    const int64_t bytes)
{
    if (!on->driver) return allocate_pages(memory, bytes);
    const attn_cu_result result =
        on->driver->host_alloc(memory, (size_t) bytes, ATTN_CU_HOST_PORTABLE);
    if (result != ATTN_CU_SUCCESS) *memory = NULL;
    return result;
}

void attn_swap_host_free(const struct attn_swap_device *const on, void *const memory)
{
    if (!on->driver)
        free(memory);
    else if (memory)
        on->driver->host_free(memory);
}

attn_cu_result attn_swap_host_pin(const struct attn_swap_device *const on, void *const memory,
                                  const int64_t bytes)
{
    if (!on->driver) return ATTN_CU_SUCCESS;
    return on->driver->host_register(memory, (size_t) bytes, ATTN_CU_HOST_PORTABLE);
}

void attn_swap_host_unpin(const struct attn_swap_device *const on, void *const memory)
{
    if (on->driver) on->driver->host_unregister(memory);
}

static attn_cu_result create_event(const struct attn_swap_device *const on,
                                   attn_cu_event *const event, const unsigned flags)
{
    *event = NULL;
    if (!on->driver) return ATTN_CU_SUCCESS;
    const attn_cu_result result = on->driver->event_create(event, flags);
    if (result != ATTN_CU_SUCCESS) *event = NULL;
    return result;
}

attn_cu_result attn_swap_event_create(const struct attn_swap_device *const on,
                                      attn_cu_event *const event)
{
    return create_event(on, event, ATTN_CU_EVENT_DISABLE_TIMING);
}

attn_cu_result attn_swap_timer_create(const struct attn_swap_device *const on,
                                      attn_cu_event *const event)
{
    return create_event(on, event, 0);
}

attn_cu_result attn_swap_timer_read(const struct attn_swap_device *const on,
                                    const attn_cu_event start, const attn_cu_event end,
                                    double *const us)
{
    float milliseconds;
    if (!on->driver) return ATTN_CU_SUCCESS;
    const attn_cu_result result = on->driver->event_elapsed(&milliseconds, start, end);
    if (result == ATTN_CU_SUCCESS) *us = 1e3 * (double) milliseconds;
    return result;
}

void attn_swap_event_destroy(const struct attn_swap_device *const on, const attn_cu_event event)
{
    if (event) on->driver->event_destroy(event);
}

attn_cu_result attn_swap_event_record(const struct attn_swap_device *const on,
                                      const attn_cu_event event, const attn_stream stream)
{
    return on->driver ? on->driver->event_record(event, stream) : ATTN_CU_SUCCESS;
}

// An event that was never recorded counts as past, there as here.
attn_cu_result attn_swap_event_wait(const struct attn_swap_device *const on,
                                    const attn_cu_event event, const attn_stream stream)
{
    return on->driver ? on->driver->stream_wait(stream, event, 0) : ATTN_CU_SUCCESS;
}

attn_cu_result attn_swap_event_sync(const struct attn_swap_device *const on,
                                    const attn_cu_event event)
{
    return on->driver ? on->driver->event_sync(event) : ATTN_CU_SUCCESS;
}

attn_cu_result attn_swap_copies_sync(const struct attn_swap_device *const on)
{
    return on->driver ? on->driver->stream_sync(on->copies) : ATTN_CU_SUCCESS;
}

attn_cu_result attn_swap_copy(const struct attn_swap_device *const on, void *const to,
                              const void *const from, const size_t bytes)
{
    if (on->driver) return on->driver->copy_in(address_of(to), from, bytes, on->copies);
    memcpy(to, from, bytes);
    return ATTN_CU_SUCCESS;
}

attn_cu_result attn_swap_pages_alloc(const struct attn_swap_device *const on, void **const memory,
                                     const int64_t bytes)
{
    attn_cu_result result = allocate_pages(memory, bytes);
    // So that no read has to wait for a page.
    if (result == ATTN_CU_SUCCESS) memset(*memory, 0, (size_t) bytes);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_host_pin(on, *memory, bytes);
    if (result == ATTN_CU_SUCCESS) return ATTN_CU_SUCCESS;
    free(*memory);
    *memory = NULL;
    return result;
}

void attn_swap_pages_free(const struct attn_swap_device *const on, void *const memory)
{
    if (memory) attn_swap_host_unpin(on, memory);
    free(memory);
}

static attn_cu_result copy_batch(const struct attn_swap_device *const on,
                                 const struct attn_swap_copies *const copies)
{
    struct attn_cu_copy_attributes attributes = {
        .order = ATTN_CU_COPY_ORDER_STREAM,
        .flags = ATTN_CU_COPY_PREFER_OVERLAP,
    };
    size_t start = 0;
    return on->driver->copy_batch(copies->to, copies->from, copies->bytes, copies->count,
                                  &attributes, &start, 1, on->copies);
}

attn_cu_result attn_swap_copy_all(const struct attn_swap_device *const on,
                                  const struct attn_swap_copies *const copies)
{
    attn_cu_result result = ATTN_CU_SUCCESS;
    if (copies->count > 1 && on->driver && on->driver->copy_batch) {
        result = copy_batch(on, copies);
        if (result != ATTN_CU_ERROR_NOT_SUPPORTED) return result;
        result = ATTN_CU_SUCCESS;
    }
    for (size_t i = 0; result == ATTN_CU_SUCCESS && i < copies->count; i++)
        result = attn_swap_copy(on, (void *) (uintptr_t) copies->to[i],
                                (const void *) (uintptr_t) copies->from[i], copies->bytes[i]);
    return result;
}

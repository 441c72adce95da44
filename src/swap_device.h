/* SPDX-License-Identifier: Apache-2.0 */
// The slots' side of the swap engine: memory, the copy stream, events, copies. On the host executor
// device memory is host memory, copies are done at once, and events are always past.
#ifndef ATTN_SRC_SWAP_DEVICE_H
#define ATTN_SRC_SWAP_DEVICE_H

#include "device.h"

// Alignment of host memory: a page, which files without the page cache want, too.
#define ATTN_SWAP_PAGE 4096

struct attn_swap_device {
    const struct attn_device *device;
    // NULL on the host.
    const struct attn_driver *driver;
    attn_stream copies;
};

// Copies of a tile, as many as there is room for.
struct attn_swap_copies {
    size_t count;
    attn_cu_deviceptr *to, *from;
    size_t *bytes;
};

// All return what the driver does; on the host, and where memory has run out there, the same codes.
// The device's context has to be current (attn_device_enter), but for those that are the host's.

attn_cu_result attn_swap_device_open(struct attn_swap_device *on, const struct attn_device *device);
void attn_swap_device_close(struct attn_swap_device *on);

// On the host with padding: the result is aligned to a page. `bytes` is positive.
attn_cu_result attn_swap_device_alloc(const struct attn_swap_device *on, void **memory,
                                      int64_t bytes);
void attn_swap_device_free(const struct attn_swap_device *on, void *memory);
// Of the host, pinned, aligned to a page.
attn_cu_result attn_swap_host_alloc(const struct attn_swap_device *on, void **memory,
                                    int64_t bytes);
void attn_swap_host_free(const struct attn_swap_device *on, void *memory);
// The same, in pages of the program's own: files may be read into them without the page cache, and
// the kernel may keep them for that, of which the driver's pages promise nothing.
attn_cu_result attn_swap_pages_alloc(const struct attn_swap_device *on, void **memory,
                                     int64_t bytes);
void attn_swap_pages_free(const struct attn_swap_device *on, void *memory);
// The caller's.
attn_cu_result attn_swap_host_pin(const struct attn_swap_device *on, void *memory, int64_t bytes);
void attn_swap_host_unpin(const struct attn_swap_device *on, void *memory);

// On the host an event is NULL.
attn_cu_result attn_swap_event_create(const struct attn_swap_device *on, attn_cu_event *event);
void attn_swap_event_destroy(const struct attn_swap_device *on, attn_cu_event event);
attn_cu_result attn_swap_event_record(const struct attn_swap_device *on, attn_cu_event event,
                                      attn_stream stream);
// What is enqueued on `stream` from now on comes after the event; the host waits for it.
attn_cu_result attn_swap_event_wait(const struct attn_swap_device *on, attn_cu_event event,
                                    attn_stream stream);
attn_cu_result attn_swap_event_sync(const struct attn_swap_device *on, attn_cu_event event);
// Events that can tell when they were past, and the microseconds between two of them that are. On
// the host *us stays as it is.
attn_cu_result attn_swap_timer_create(const struct attn_swap_device *on, attn_cu_event *event);
attn_cu_result attn_swap_timer_read(const struct attn_swap_device *on, attn_cu_event start,
                                    attn_cu_event end, double *us);
// The host waits for all copies.
attn_cu_result attn_swap_copies_sync(const struct attn_swap_device *on);

// From pinned memory, on the copy stream.
attn_cu_result attn_swap_copy(const struct attn_swap_device *on, void *to, const void *from,
                              size_t bytes);
// All of them in one call of the driver, if it has one for that.
attn_cu_result attn_swap_copy_all(const struct attn_swap_device *on,
                                  const struct attn_swap_copies *copies);

#endif

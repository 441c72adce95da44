/* SPDX-License-Identifier: Apache-2.0 */
// What a device handle holds. It doesn't change while it is open, so any thread may use it.
#ifndef ATTN_SRC_DEVICE_H
#define ATTN_SRC_DEVICE_H

#include "attn/device.h"
#include "driver.h"
#include "pack.h"

#include <stdbool.h>

struct attn_device {
    // As described to the caller; kind, counts and policies are read from here.
    struct attn_device_info info;
    attn_log_fn log;
    void *log_user;
    // 0: no limit.
    int32_t grid_limit;
    // The twins of prefill (attn/prefill.h) decline.
    bool no_fa128;
    // NULL on the host.
    const struct attn_pack *pack;
    // Of dlopen; NULL on the host and for a built-in pack.
    void *pack_handle;
    // The rest is NULL without a GPU.
    const struct attn_driver *driver;
    attn_cu_device cu_device;
    attn_cu_context context;
    // The context is the primary one and was retained by this handle.
    bool retained;
    attn_cu_library library;
    // One for each row of the pack.
    attn_cu_function *functions;
};

// Makes the device's context current if it isn't; *pushed says whether it has to be popped.
attn_cu_result attn_device_enter(const struct attn_device *device, bool *pushed);
void attn_device_leave(const struct attn_device *device, bool pushed);

// Enqueues a row of the device's pack: `grid` blocks, one argument struct.
enum attn_status attn_device_launch(const struct attn_device *device,
                                    const struct attn_pack_row *row, int32_t grid, void *args,
                                    attn_stream stream);

// Fails with the sentence "`what`: the CUDA driver says NAME (code)" and the status of that code.
enum attn_status attn_device_cu_fail(const struct attn_device *device, attn_cu_result result,
                                     const char *what);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// What a benchmark needs beside the operations: the memory's own speed.
#ifndef ATTN_BENCH_H
#define ATTN_BENCH_H

#include "common.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Enqueues on `stream` a kernel that reads `bytes` bytes at `base` once and keeps nothing: its time
// is the limit of any operation that has to read as much.
// base: device memory, 16-byte aligned. bytes: a multiple of 16; 0 enqueues nothing. sink: one
// uint32 in device memory that the kernel may write to.
// ATTN_ERROR_INVALID: a rule above is broken; nothing was enqueued. ATTN_ERROR_UNSUPPORTED: a host
// device, or a pack without the kernel. ATTN_ERROR_NO_DEVICE: a target without a GPU.
// ATTN_ERROR_DRIVER: the launch failed.
// Thread-safety: safe.
ATTN_API enum attn_status attn_bandwidth_probe(struct attn_device *device, const void *base,
                                               size_t bytes, uint32_t *sink, attn_stream stream);

#ifdef __cplusplus
}
#endif

#endif

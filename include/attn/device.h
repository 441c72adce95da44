/* SPDX-License-Identifier: Apache-2.0 */
// A device: a GPU with the pack that fits it, or the host executor. Everything that depends on the
// environment is decided here, once.
#ifndef ATTN_DEVICE_H
#define ATTN_DEVICE_H

#include "common.h"
#include "log.h"
#include "splitk.h"

#ifdef __cplusplus
extern "C" {
#endif

struct attn_device;

enum attn_device_kind {
    // Plain C on host pointers, in double precision: the definition of every operation. `stream` is
    // ignored, and calls return when the result is there.
    ATTN_DEVICE_HOST = 1,
    // The GPU of the CUDA context that is current in the calling thread.
    ATTN_DEVICE_CURRENT = 2,
    // The GPU of that ordinal. Its primary context is retained until attn_device_close.
    ATTN_DEVICE_ORDINAL = 3,
    // The declarations and kernel table of one target, without a GPU: for sizes and plans. Calls
    // that would enqueue work return ATTN_ERROR_NO_DEVICE.
    ATTN_DEVICE_TARGET = 4,
};

struct attn_device_open_params {
    // sizeof(struct attn_device_open_params).
    uint32_t size;
    enum attn_device_kind kind;
    // ATTN_DEVICE_ORDINAL: which GPU, as the CUDA driver counts. Else ignored.
    int32_t ordinal;
    // Test override: launch at most this many blocks. 0: no limit. Never changes bits.
    int32_t grid_limit;
    // ATTN_DEVICE_TARGET: the target's name. Else ignored.
    const char *target;
    // Folder of the packs; NULL: the search order of target.h.
    const char *pack_dir;
    // Split-K policy (splitk.h). NULL: METRALE_ATTN_DECODE_SPLITK if it parses, else the target's.
    const char *splitk_policy;
    // Receives sentences, now and for as long as the device is open. NULL: none.
    attn_log_fn log;
    void *log_user;
};

// The host executor; everything else 0 or NULL.
#define ATTN_DEVICE_OPEN_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_device_open_params), ATTN_DEVICE_HOST, 0, 0, 0, 0, 0, 0, 0 \
    }

// Where a setting in force came from.
enum attn_source {
    // The target's declaration, or on the host executor the library's own default.
    ATTN_SOURCE_DECLARED = 1,
    ATTN_SOURCE_ENVIRONMENT = 2,
    // The open parameters.
    ATTN_SOURCE_CALLER = 3,
};

struct attn_device_info {
    // sizeof(struct attn_device_info), set by the caller; no more than that is written.
    uint32_t size;
    enum attn_device_kind kind;
    // What the driver calls the GPU; "host executor"; or the target's name.
    char name[128];
    // Of the GPU, or declared by the target; 0 on the host.
    int32_t compute_capability_major, compute_capability_minor;
    // SMs the GPU has (the schedule uses these), and that the target declares (the policy uses
    // those).
    int32_t sm_count;
    int32_t declared_sm_count;
    int32_t memory_bandwidth_gbs;
    int32_t smem_per_block;
    // As cuDriverGetVersion counts (13000 is CUDA 13.0); 0 without a driver.
    int32_t driver_version;
    int32_t num_kernels;
    // Target, file and architecture of the pack in use; "" on the host.
    char target[64];
    char arch[32];
    char pack_path[1024];
    // In force, and where it came from. gqa_pack is 0 or 1.
    struct attn_splitk_policy splitk_policy;
    enum attn_source splitk_source;
    int32_t gqa_pack;
    enum attn_source gqa_pack_source;
    // 1 if a sequence's bits depend on that sequence alone; 0 under policy legacy.
    int32_t batch_invariant;
};

// Opens a device; *device is NULL on failure. For a GPU: finds the driver, the GPU and the packs,
// takes the pack whose compute capability fits, and loads every kernel, so that no later call has
// to.
// ATTN_ERROR_INVALID: a null pointer, an unknown kind, a policy that does not parse, a negative
// ordinal or grid limit. ATTN_ERROR_NO_DEVICE: no driver, no GPU, no such ordinal, no current
// context. ATTN_ERROR_NO_PACK: no pack fits; the sentence names the GPU and what was seen.
// ATTN_ERROR_DRIVER: the driver is too old, or refused the pack. ATTN_ERROR_NO_MEMORY.
// ATTN_ERROR_IO: pack_dir cannot be read.
// Thread-safety: safe.
ATTN_API enum attn_status attn_device_open(struct attn_device **device,
                                           const struct attn_device_open_params *params);

// Closes *device and sets it to NULL; NULL and a pointer to NULL are fine. Work in flight on the
// device must be done: the kernels are unloaded.
// Thread-safety: handle.
ATTN_API void attn_device_close(struct attn_device **device);

// Fills *info. ATTN_ERROR_INVALID: a null pointer or info->size below 4.
// Thread-safety: safe.
ATTN_API enum attn_status attn_device_describe(const struct attn_device *device,
                                               struct attn_device_info *info);

// The name of kernel `index` (0 .. num_kernels - 1) of the pack in use, in order of preference;
// NULL beyond.
// Thread-safety: safe.
ATTN_API const char *attn_device_kernel(const struct attn_device *device, int32_t index);

#ifdef __cplusplus
}
#endif

#endif

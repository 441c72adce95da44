/* SPDX-License-Identifier: Apache-2.0 */
// Targets: the chips that kernels were built for. Each target is one pack, libattn-<target>.so: the
// kernels of that chip, their table, and what the chip declares of itself.
//
// Packs are looked for in the first of these that is set: `pack_dir` of the call; the environment
// variable ATTN_PACK_PATH; else in `attn/` beside the library, then in the folder configured at
// build time. In a static build the packs are part of the program and no folder is read.
#ifndef ATTN_TARGET_H
#define ATTN_TARGET_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

// One pack that was seen. Strings are valid during the callback only.
struct attn_target_info {
    // Name of the target; the file's name where the pack could not be read.
    const char *name;
    // Where it was found; "built in" in a static build.
    const char *path;
    // Architecture the kernels were compiled for, as nvcc spells it. "" where the pack could not be
    // read.
    const char *arch;
    // What the chip declares: compute capability, SMs, memory bandwidth in GB/s, shared memory of a
    // block in bytes, split-K policy (splitk.h), GQA packing. 0 and "" where the pack could not be
    // read.
    int32_t compute_capability_major, compute_capability_minor;
    int32_t sm_count;
    int32_t memory_bandwidth_gbs;
    int32_t smem_per_block;
    const char *splitk_policy;
    int32_t gqa_pack;
    // Kernels in the pack.
    int32_t num_kernels;
    // ATTN_OK: fits the compute capability asked about (or none was given and the pack is sound).
    // ATTN_ERROR_NO_PACK: sound, but for another chip. ATTN_ERROR_IO: unreadable, truncated,
    // foreign, or of another ABI.
    enum attn_status status;
    // Why it does not fit: one sentence. "" where it does.
    const char *reason;
};

// Called once for each pack; `user` is the pointer given with it.
typedef void (*attn_target_fn)(void *user, const struct attn_target_info *info);

// Calls `fn` once for each pack, sorted by name. Needs no driver and no GPU.
// pack_dir: as above; NULL: the search order above. major, minor: the compute capability that a
// pack has to fit; 0, 0: none is asked for.
// ATTN_ERROR_INVALID: fn is NULL, or major or minor is negative. ATTN_ERROR_IO: pack_dir was given
// and cannot be read.
// Thread-safety: safe.
ATTN_API enum attn_status attn_target_scan(const char *pack_dir, int32_t major, int32_t minor,
                                           attn_target_fn fn, void *user);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// How the calls of a tiled state run on a GPU: which kernel, with what, and the state's memory.
#ifndef ATTN_SRC_TILED_LAUNCH_H
#define ATTN_SRC_TILED_LAUNCH_H

#include "device.h"
#include "host/tiled.h"

struct attn_tiled_gpu {
    const struct attn_device *device;
    const struct attn_pack_row *row;
    struct attn_tiled_dims dims;
    struct attn_tiled_state state;
    // What is freed with it: m, l and o, or 0; the workspace of partials, or 0.
    attn_cu_deviceptr owned_state, owned_partials;
    // Of the workspace.
    float *partials;
    int64_t partials_bytes;
};

// Finds the kernel, and how large the workspace is; *gpu owns nothing. ATTN_ERROR_UNSUPPORTED.
enum attn_status attn_tiled_gpu_find(struct attn_tiled_gpu *gpu, const struct attn_device *device,
                                     const struct attn_tiled_dims *dims);
// Of one that was found: allocates the workspace and the state where *state has none; its pointers
// to m, l and o are filled in. On failure *gpu owns nothing. ATTN_ERROR_NO_DEVICE,
// ATTN_ERROR_NO_MEMORY, ATTN_ERROR_DRIVER.
enum attn_status attn_tiled_gpu_open(struct attn_tiled_gpu *gpu, struct attn_tiled_state *state);
void attn_tiled_gpu_close(struct attn_tiled_gpu *gpu);

// Kernel, turns, launch and workspace of a tile of num_seqs sequences.
void attn_tiled_gpu_plan(const struct attn_tiled_gpu *gpu, int32_t num_seqs,
                         struct attn_tiled_plan *plan);

// Enqueue; of checked params, strides and scale filled in.
enum attn_status attn_tiled_gpu_begin(const struct attn_tiled_gpu *gpu, int32_t num_seqs,
                                      attn_stream stream);
enum attn_status attn_tiled_gpu_step(const struct attn_tiled_gpu *gpu,
                                     const struct attn_tiled_step_params *params,
                                     attn_stream stream);
enum attn_status attn_tiled_gpu_finalize(const struct attn_tiled_gpu *gpu,
                                         const struct attn_tiled_finalize_params *params,
                                         attn_stream stream);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The definition of tiled decode, on host pointers.
#ifndef ATTN_HOST_TILED_H
#define ATTN_HOST_TILED_H

#include "attn/tiled.h"

// Keys of a block that are folded into the state at a time, at most.
#define ATTN_TILED_UNIT_KEYS 256

// FP32 [max_seqs, num_q_heads], the same, and [max_seqs, num_q_heads, head_dim]. The caller's
// workspace, or NULL, for GPUs alone.
struct attn_tiled_state {
    float *m, *l, *o;
    void *workspace;
    int64_t workspace_bytes;
};

// All take checked params: pointers are host pointers, strides and scale filled in (no 0 that
// stands for something else), head_dim a multiple of 16.
void attn_reference_tiled_begin(const struct attn_tiled_dims *dims,
                                const struct attn_tiled_state *state, int32_t num_seqs);
void attn_reference_tiled_step(const struct attn_tiled_dims *dims,
                               const struct attn_tiled_state *state,
                               const struct attn_tiled_step_params *params);
void attn_reference_tiled_finalize(const struct attn_tiled_dims *dims,
                                   const struct attn_tiled_state *state,
                                   const struct attn_tiled_finalize_params *params);

#endif

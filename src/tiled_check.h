/* SPDX-License-Identifier: Apache-2.0 */
// The rules of include/attn/tiled.h, as checks.
#ifndef ATTN_SRC_TILED_CHECK_H
#define ATTN_SRC_TILED_CHECK_H

#include "host/tiled.h"

// `device` is NULL where there is none to log to.
enum attn_status attn_tiled_check_dims(const struct attn_device *device,
                                       const struct attn_tiled_dims *dims);

// The buffers of a state, `state` the caller's or none.
enum attn_status attn_tiled_check_state(const struct attn_device *device,
                                        const struct attn_tiled_dims *dims,
                                        const struct attn_tiled_state *state);

// The workspace of a state whose calls want so many bytes.
enum attn_status attn_tiled_check_workspace(const struct attn_device *device,
                                            const struct attn_tiled_dims *dims,
                                            const struct attn_tiled_state *state, int64_t wanted);

enum attn_status attn_tiled_check_num_seqs(const struct attn_device *device,
                                           const struct attn_tiled_dims *dims, int32_t num_seqs);

// Replaces the strides and the scale that are 0 by what they stand for.
enum attn_status attn_tiled_check_step(const struct attn_device *device,
                                       const struct attn_tiled_dims *dims,
                                       const struct attn_tiled_state *state,
                                       struct attn_tiled_step_params *params);

enum attn_status attn_tiled_check_finalize(const struct attn_device *device,
                                           const struct attn_tiled_dims *dims,
                                           const struct attn_tiled_state *state,
                                           const struct attn_tiled_finalize_params *params);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The rules of include/attn/decode.h, as checks.
#ifndef ATTN_SRC_DECODE_CHECK_H
#define ATTN_SRC_DECODE_CHECK_H

#include "attn/decode.h"

// Every rule about the fields of a shape.
enum attn_status attn_decode_check_shape(const struct attn_device *device,
                                         const struct attn_decode_shape *shape);

// Every other rule but those of the workspace, for a shape that was checked. Replaces the strides
// that are 0, and a v_block_table that is NULL, by what they stand for.
enum attn_status attn_decode_check_params(const struct attn_device *device,
                                          struct attn_decode_params *params);

// `needed` and `num_counters` are what attn_decode_workspace and attn_decode_counters say of the
// call's shape.
enum attn_status attn_decode_check_workspace(const struct attn_device *device,
                                             const struct attn_decode_params *params, size_t needed,
                                             int32_t num_counters);

#endif

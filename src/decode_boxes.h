/* SPDX-License-Identifier: Apache-2.0 */
// K and V as tensors that the copy engine takes boxes of.
#ifndef ATTN_SRC_DECODE_BOXES_H
#define ATTN_SRC_DECODE_BOXES_H

#include "attn/decode.h"
#include "kernels/decode/decode_params.h"

// Describes K and V of a call that was checked in args->k_map and v_map, and sets args->has_boxes:
// if each group of keys lies in one page, and the driver takes the strides. `box_lines`: see boxes.h.
void attn_decode_set_boxes(const struct attn_device *device,
                           const struct attn_decode_params *params,
                           int32_t box_lines, struct attn_decode_args *args);

#endif

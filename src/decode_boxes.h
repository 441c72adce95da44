/* SPDX-License-Identifier: Apache-2.0 */
// K and V as tensors that the copy engine takes boxes of.
#ifndef ATTN_SRC_DECODE_BOXES_H
#define ATTN_SRC_DECODE_BOXES_H

#include "attn/decode.h"
#include "kernels/decode/decode_params.h"
#include "pack.h"

// Describes K and V of a call that was checked in args->k_map and v_map, for a kernel of this row,
// and sets args->has_boxes: if each group of keys lies in one page, and the driver takes the strides.
void attn_decode_set_boxes(const struct attn_device *device,
                           const struct attn_decode_params *params, const struct attn_pack_row *row,
                           struct attn_decode_args *args);

#endif

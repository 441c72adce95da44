/* SPDX-License-Identifier: Apache-2.0 */
// Rows of Q, K or V as a tensor that the copy engine takes boxes of.
#ifndef ATTN_SRC_BOXES_H
#define ATTN_SRC_BOXES_H

#include "attn/common.h"
#include "kernels/common/paged.h"

#include <stdbool.h>

struct attn_device;

// [pages, slots, heads, head_dim], with strides in elements.
struct attn_box_view {
    const void *base;
    enum attn_dtype dtype;
    int32_t head_dim, heads;
    int64_t slots, pages;
    int64_t slot_stride, head_stride, page_stride;
    // Lines of a box; 0: all of a row.
    int32_t box_lines;
};

// The view as a tensor of columns of a line of at most 128 bytes, slots, lines of a row, heads,
// pages; a box of it is a line, `box_slots` slots and `box_lines` lines, swizzled. false: the
// driver does not take these strides, or there is nothing to describe.
bool attn_box_map_fill(const struct attn_device *device, const struct attn_box_view *view,
                       int32_t box_slots, struct attn_box_map *map);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "boxes.h"

#include "device.h"

enum {
    RANK = 5,
    // Bytes of a line of a row at most: the longest that the copy engine swizzles.
    MAX_LINE = 128,
};

_Static_assert(sizeof(struct attn_box_map) == ATTN_CU_TENSOR_MAP_BYTES, "a map is a map");

// The driver's limit is 2^32; coordinates are signed.
static uint64_t dimension(const int64_t count)
{
    return count < INT32_MAX ? (uint64_t) count : (uint64_t) INT32_MAX;
}

bool attn_box_map_fill(const struct attn_device *const device,
                       const struct attn_box_view *const view, const int32_t box_slots,
                       struct attn_box_map *const map)
{
    if (view->slots < 1 || view->pages < 1) return false;
    const uint64_t element = attn_dtype_size(view->dtype);
    const uint64_t row = (uint64_t) view->head_dim * element;
    const uint64_t line = row < MAX_LINE ? row : MAX_LINE;
    const uint64_t dims[RANK] = { line / element, dimension(view->slots), row / line,
                                  (uint64_t) view->heads, dimension(view->pages) };
    const uint64_t strides[RANK - 1] = { (uint64_t) view->slot_stride * element, line,
                                         (uint64_t) view->head_stride * element,
                                         (uint64_t) view->page_stride * element };
    const uint32_t lines =
        view->box_lines > 0 ? (uint32_t) view->box_lines : (uint32_t) (row / line);
    const uint32_t box[RANK] = { (uint32_t) (line / element), (uint32_t) box_slots, lines, 1, 1 };
    const uint32_t steps[RANK] = { 1, 1, 1, 1, 1 };
    const int swizzle = line == 128  ? ATTN_CU_SWIZZLE_128B
                        : line == 64 ? ATTN_CU_SWIZZLE_64B
                                     : ATTN_CU_SWIZZLE_32B;
    return device->driver->tensor_map(map,
                                      element == 1 ? ATTN_CU_TENSOR_UINT8 : ATTN_CU_TENSOR_UINT16,
                                      RANK, view->base, dims, strides, box, steps, 0, swizzle,
                                      ATTN_CU_L2_PROMOTION_128B, 0) == ATTN_CU_SUCCESS;
}

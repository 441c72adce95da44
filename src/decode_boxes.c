/* SPDX-License-Identifier: Apache-2.0 */
#include "decode_boxes.h"

#include "device.h"

#include <string.h>

enum {
    RANK = 5,
    // Bytes of a line of a row at most: the longest that the copy engine swizzles.
    MAX_LINE = 128,
};

_Static_assert(sizeof(struct attn_decode_map) == ATTN_CU_TENSOR_MAP_BYTES, "a map is a map");

// Strides in elements.
static bool set_map(const struct attn_device *const device, struct attn_decode_map *const map,
                    const struct attn_decode_params *const params, const void *const pool,
                    const int64_t token_stride, const int64_t head_stride,
                    const int64_t page_stride)
{
    const uint64_t element = attn_dtype_size(params->kv_dtype);
    const uint64_t row = (uint64_t) params->head_dim * element;
    const uint64_t line = row < MAX_LINE ? row : MAX_LINE;
    const uint64_t pages =
        params->num_pages < INT32_MAX ? (uint64_t) params->num_pages : (uint64_t) INT32_MAX;
    const uint64_t dims[RANK] = { line / element, (uint64_t) params->page_size, row / line,
                                  (uint64_t) params->num_kv_heads, pages };
    const uint64_t strides[RANK - 1] = { (uint64_t) token_stride * element, line,
                                         (uint64_t) head_stride * element,
                                         (uint64_t) page_stride * element };
    const uint32_t box[RANK] = { (uint32_t) (line / element), ATTN_DECODE_GROUP,
                                 (uint32_t) (row / line), 1, 1 };
    const uint32_t steps[RANK] = { 1, 1, 1, 1, 1 };
    const int swizzle = line == 128  ? ATTN_CU_SWIZZLE_128B
                        : line == 64 ? ATTN_CU_SWIZZLE_64B
                                     : ATTN_CU_SWIZZLE_32B;
    return device->driver->tensor_map(map,
                                      element == 1 ? ATTN_CU_TENSOR_UINT8 : ATTN_CU_TENSOR_UINT16,
                                      RANK, pool, dims, strides, box, steps, 0, swizzle,
                                      ATTN_CU_L2_PROMOTION_128B, 0) == ATTN_CU_SUCCESS;
}

void attn_decode_set_boxes(const struct attn_device *const device,
                           const struct attn_decode_params *const params,
                           struct attn_decode_args *const args)
{
    // Pieces of a split count begin anywhere.
    args->has_boxes = params->page_size % ATTN_DECODE_GROUP == 0 && args->splits == 1 &&
                      params->num_pages > 0 &&
                      set_map(device, &args->k_map, params, params->k_pool, params->k_token_stride,
                              params->k_head_stride, params->k_page_stride) &&
                      set_map(device, &args->v_map, params, params->v_pool, params->v_token_stride,
                              params->v_head_stride, params->v_page_stride);
}

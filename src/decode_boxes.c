/* SPDX-License-Identifier: Apache-2.0 */
#include "decode_boxes.h"

#include "boxes.h"

// Keys of a box. Warps that have rows take K and V in lines, where larger boxes are as good, and
// fewer are less work to ask for.
static int32_t count_keys(const struct attn_pack_row *const row, const int32_t page_size)
{
    int32_t keys = ATTN_BOX_KEYS;
    if (row->warpgroups > 0)
        while (keys < row->tile && page_size % (keys * 2) == 0) keys *= 2;
    return keys;
}

void attn_decode_set_boxes(const struct attn_device *const device,
                           const struct attn_decode_params *const params,
                           const struct attn_pack_row *const row,
                           struct attn_decode_args *const args)
{
    const int32_t keys = count_keys(row, params->page_size);
    const struct attn_box_view k = {
        .base = params->k_pool,
        .dtype = params->kv_dtype,
        .head_dim = params->head_dim,
        .heads = params->num_kv_heads,
        .slots = params->page_size,
        .pages = params->num_pages,
        .slot_stride = params->k_token_stride,
        .head_stride = params->k_head_stride,
        .page_stride = params->k_page_stride,
        .box_lines = row->warpgroups > 0,
    };
    struct attn_box_view v = k;
    v.base = params->v_pool;
    v.slot_stride = params->v_token_stride;
    v.head_stride = params->v_head_stride;
    v.page_stride = params->v_page_stride;
    // Pieces of a split count begin anywhere.
    args->has_boxes = params->page_size % ATTN_BOX_KEYS == 0 && args->splits == 1 &&
                      attn_box_map_fill(device, &k, keys, &args->k_map) &&
                      attn_box_map_fill(device, &v, keys, &args->v_map);
    args->box_groups = keys / ATTN_BOX_KEYS;
}

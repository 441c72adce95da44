/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the prefill kernels, read by the C compiler and by nvcc. Strides are in
// elements.
#ifndef ATTN_PREFILL_PARAMS_H
#define ATTN_PREFILL_PARAMS_H

#include "../common/paged.h"

struct attn_prefill_args {
    // If has_boxes: K and V as src/boxes.h describes them, with boxes of ATTN_BOX_KEYS slots.
    // Contiguous, they are one page of all tokens.
    struct attn_box_map k_map, v_map;
    const void *q;
    void *o;
    const void *k, *v;
    // Null: K and V are contiguous.
    const int32_t *block_table;
    // As in attn/prefill.h: null, or of each sequence.
    const int32_t *cu_seqlens, *kv_lens, *q_offsets, *kv_starts;
    const float *sinks;
    float *lse;
    int32_t *fault;
    int64_t q_token_stride;
    int64_t k_page_stride, k_token_stride, k_head_stride;
    int64_t v_page_stride, v_token_stride, v_head_stride;
    int64_t num_pages;
    int64_t table_stride;
    int32_t page_size;
    // See attn_divide.
    uint32_t page_magic;
    int32_t page_shift;
    // Keys a sequence can have, saturated at INT32_MAX: of its table, or kv_len if contiguous
    // without kv_starts, or num_kv_tokens.
    int32_t max_keys;
    int32_t batch;
    int32_t q_len, kv_len, q_offset;
    int32_t num_tokens, num_kv_tokens;
    int32_t num_q_heads, num_kv_heads;
    // Query heads of a KV head; for division by it.
    int32_t ratio;
    uint32_t ratio_magic;
    int32_t ratio_shift;
    // For division by num_q_heads.
    uint32_t heads_magic;
    int32_t heads_shift;
    // Tiles of query tokens that the sequences can have together, at most. The grid has one block
    // for each, and each query head.
    int32_t tiles;
    int32_t causal, window;
    int32_t has_boxes;
    float scale;
    float softcap;
};

#endif

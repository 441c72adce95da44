/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the prefill kernels, read by the C compiler and by nvcc. Strides are in
// elements.
#ifndef ATTN_PREFILL_PARAMS_H
#define ATTN_PREFILL_PARAMS_H

#include "../common/paged.h"

struct attn_prefill_args {
    // If has_boxes: K and V as src/boxes.h describes them, with boxes of ATTN_BOX_KEYS slots and of
    // the row's box_lines (0: all lines). Contiguous, they are one page of all tokens.
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
    // Tiles of query tokens that the sequences can have together, at most: for each query head an
    // item. Kernels of warpgroups have as many blocks as there are SMs, others one for each item.
    int32_t tiles;
    // Sequences with fewer query tokens, or as many, are left alone.
    int32_t short_tokens;
    int32_t causal, window;
    int32_t has_boxes;
    float scale;
    float softcap;
};

// Query tokens of a block of the originals, and of their twins: the `rows` of their rows.
#define ATTN_PREFILL_ROWS 64
#define ATTN_PREFILL_TWIN_ROWS 128

// Threads of a block: those of `warps` warps that multiply and of `copiers` that copy.
#define ATTN_PREFILL_THREADS(warps, copiers) (((warps) + (copiers)) * 32)

// Kernels of warpgroups keep the sizes of so many sequences; in larger batches tiles are not sorted.
#define ATTN_PREFILL_SORT_SEQUENCES 64

// Dynamic shared memory of a block, in bytes: Q, `stages` tiles of K or V, what warps that share
// rows tell each other (weights, and a number for each row), barriers, and the block's work; of
// kernels of warpgroups also the next work, and sizes of sequences.
#ifdef __cplusplus
static constexpr int32_t
#else
static inline int32_t
#endif
attn_prefill_smem_bytes(int32_t head_dim, int32_t rows, int32_t tile, int32_t warps,
                        int32_t warpgroups, int32_t stages)
{
    const int32_t tiles = (rows + stages * tile) * head_dim * 2;
    const int32_t told = head_dim > 256 ? warps * (tile * 16 + 64) : 0;
    const int32_t stays = warpgroups > 0 ? 128 + ATTN_PREFILL_SORT_SEQUENCES * 12 : 0;
    return tiles + told + stages * 32 + 160 + stays;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "host/ctm.h"

static void set_strides(struct attn_decode_params *const to)
{
    to->q_token_stride = (int64_t) to->num_q_heads * to->head_dim;
    to->q_stride = to->q_len * to->q_token_stride;
    to->k_head_stride = to->v_head_stride = to->head_dim;
    to->k_token_stride = to->v_token_stride = (int64_t) to->num_kv_heads * to->head_dim;
    to->k_page_stride = to->v_page_stride = ATTN_CTM_PAGE_SIZE * to->k_token_stride;
    to->table_stride = (int64_t) to->max_pages_per_seq * 2;
}

struct attn_decode_params attn_reference_ctm(const struct attn_ctm_params *const p)
{
    const bool tree = p->q_len > 1, skip = p->skip_softmax_scale_table_length > 0;
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = ATTN_DTYPE_FP16;
    params.kv_dtype = p->fp8_kv ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16;
    params.batch = params.max_decode_seqs = p->batch_size;
    params.q_len = p->q_len;
    params.num_q_heads = p->num_q_heads;
    params.num_kv_heads = p->num_kv_heads;
    params.head_dim = p->head_dim;
    params.page_size = ATTN_CTM_PAGE_SIZE;
    params.max_pages_per_seq = p->max_pages_per_seq;
    params.num_pages = (int64_t) p->num_pages * 2;
    params.q = p->q;
    params.o = p->output;
    params.k_pool = params.v_pool = p->kv_pool;
    params.block_table = p->page_table;
    params.v_block_table = p->page_table ? p->page_table + p->max_pages_per_seq : NULL;
    params.seq_lens = p->seq_lens;
    params.sinks = p->sinks;
    params.scale = p->attention_scale;
    params.window = p->sliding_window;
    params.window_form = p->contiguous_query_swa ? ATTN_WINDOW_PER_TOKEN : ATTN_WINDOW_SHARED;
    params.k_scale = p->fp8_kv ? p->k_scale : 1.0f;
    params.v_scale = p->fp8_kv ? p->v_scale : 1.0f;
    params.tree_mask = tree ? p->tree_mask : NULL;
    params.mask_words = tree ? p->mask_words : 0;
    params.skip_table = skip ? p->skip_softmax_scale_table : NULL;
    params.skip_table_length = p->skip_softmax_scale_table_length;
    params.dropped_blocks = p->dropped_pages;
    params.fault = p->fault;
    set_strides(&params);
    return params;
}

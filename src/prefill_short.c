/* SPDX-License-Identifier: Apache-2.0 */
#include "prefill_short.h"

#include "buffers.h"
#include "device.h"

static int32_t most_tokens(const struct attn_prefill_shape *const shape)
{
    const int32_t tokens = shape->is_ragged ? shape->num_tokens : shape->q_len;
    return tokens < ATTN_PREFILL_SHORT_TOKENS ? tokens : ATTN_PREFILL_SHORT_TOKENS;
}

static struct attn_decode_shape decode_shape(const struct attn_prefill_shape *const shape,
                                             const int32_t tokens)
{
    return (struct attn_decode_shape){
        .size = (uint32_t) sizeof(struct attn_decode_shape),
        .q_dtype = shape->dtype,
        .kv_dtype = shape->dtype,
        .batch = shape->batch,
        .q_len = tokens,
        .num_q_heads = shape->num_q_heads,
        .num_kv_heads = shape->num_kv_heads,
        .head_dim = shape->head_dim,
        .page_size = shape->page_size,
        .max_pages_per_seq = shape->max_pages_per_seq,
        .window = shape->window,
    };
}

bool attn_prefill_has_short(const struct attn_device *const device,
                            const struct attn_prefill_shape *const shape)
{
    if (device->info.kind == ATTN_DEVICE_HOST || shape->rows != 0 || shape->page_size == 0 ||
        !shape->causal || shape->window > ATTN_PREFILL_SHORT_WINDOW)
        return false;
    // Kernels for few and for many query rows are all there, or the form is not.
    const struct attn_decode_shape least = decode_shape(shape, 1);
    const struct attn_decode_shape most = decode_shape(shape, ATTN_PREFILL_SHORT_TOKENS);
    return attn_decode_has_kernel(device, &least) && attn_decode_has_kernel(device, &most);
}

struct attn_prefill_forms attn_prefill_find_forms(const struct attn_prefill_shape *const shape)
{
    const bool is_long = shape->q_len > ATTN_PREFILL_SHORT_TOKENS;
    return shape->is_ragged
               ? (struct attn_prefill_forms){ true, shape->num_tokens > ATTN_PREFILL_SHORT_TOKENS }
               : (struct attn_prefill_forms){ !is_long, is_long };
}

enum attn_status attn_prefill_find_needs(const struct attn_device *const device,
                                         const struct attn_prefill_shape *const shape,
                                         struct attn_decode_limits *const needs)
{
    // Those of one query token and those of most, whatever this shape has: then a larger shape
    // never needs less. Other numbers may want more for as many blocks, and fit with fewer: a
    // kernel for few rows has one lane a KV head, and smaller slots.
    static const int32_t tokens[] = { 1, ATTN_PREFILL_SHORT_TOKENS };
    static const struct attn_decode_limits any = { SIZE_MAX, INT32_MAX };
    struct attn_decode_limits most = { 0 };
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        struct attn_decode_shape decode = decode_shape(shape, tokens[i]);
        // More is needed with a window, whatever it is.
        decode.window = 1;
        struct attn_decode_plan plan;
        const enum attn_status status = attn_decode_plan_within(device, &decode, &any, &plan);
        if (status != ATTN_OK) return status;
        if (plan.workspace_bytes > most.workspace_bytes)
            most.workspace_bytes = plan.workspace_bytes;
        if (plan.num_counters > most.num_counters) most.num_counters = plan.num_counters;
    }
    *needs = most;
    return ATTN_OK;
}

enum attn_status attn_prefill_plan_short(const struct attn_device *const device,
                                         const struct attn_prefill_shape *const shape,
                                         const struct attn_decode_limits *const needs,
                                         struct attn_decode_plan *const plan)
{
    const struct attn_decode_shape decode = decode_shape(shape, most_tokens(shape));
    return attn_decode_plan_within(device, &decode, needs, plan);
}

enum attn_status attn_prefill_launch_short(const struct attn_device *const device,
                                           const struct attn_prefill_params *const p,
                                           const struct attn_decode_limits *const needs,
                                           const attn_stream stream)
{
    const struct attn_prefill_shape shape = attn_prefill_shape_of(p);
    const int32_t tokens = most_tokens(&shape);
    const struct attn_decode_chunks chunks = {
        .most_tokens = ATTN_PREFILL_SHORT_TOKENS,
        .num_tokens = p->num_tokens,
        .kv_len = p->kv_len,
        .q_offset = p->q_offset,
        .cu_seqlens = p->cu_seqlens,
        .q_offsets = p->q_offsets,
    };
    struct attn_decode_params decode = ATTN_DECODE_PARAMS_INIT;
    decode.q_dtype = decode.kv_dtype = p->dtype;
    decode.batch = p->batch;
    decode.q_len = tokens;
    decode.num_q_heads = p->num_q_heads;
    decode.num_kv_heads = p->num_kv_heads;
    decode.head_dim = p->head_dim;
    decode.page_size = p->page_size;
    decode.max_pages_per_seq = p->max_pages_per_seq;
    decode.num_pages = p->num_pages;
    decode.q = p->q;
    decode.q_token_stride = p->q_token_stride;
    decode.q_stride = attn_size_times(tokens, p->q_token_stride);
    decode.o = p->o;
    decode.k_pool = p->k;
    decode.v_pool = p->v;
    decode.k_page_stride = p->k_page_stride;
    decode.k_token_stride = p->k_token_stride;
    decode.k_head_stride = p->k_head_stride;
    decode.v_page_stride = p->v_page_stride;
    decode.v_token_stride = p->v_token_stride;
    decode.v_head_stride = p->v_head_stride;
    decode.block_table = decode.v_block_table = p->block_table;
    decode.table_stride = p->table_stride;
    decode.seq_lens = p->kv_lens;
    decode.sinks = p->sinks;
    decode.lse = p->lse;
    decode.scale = p->scale;
    decode.softcap = p->softcap;
    decode.window = p->window;
    decode.workspace = p->workspace;
    decode.workspace_bytes = p->workspace_bytes;
    decode.counters = p->counters;
    decode.fault = p->fault;
    return attn_decode_run_chunks(device, &decode, &chunks, needs, stream);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "host/prefill.h"

#include <stdbool.h>

enum {
    MAX_HEAD_DIM = 512,
    // Of BF16 and FP16.
    ELEMENT_BYTES = 2,
};

static int64_t clamp(const int64_t value, const int64_t least, const int64_t most, int *const fault)
{
    if (value >= least && value <= most) return value;
    *fault = 1;
    return value < least ? least : most;
}

// ---- where a sequence lies

static void find_tokens(const struct attn_prefill_params *const p, const int32_t sequence,
                        struct attn_prefill_span *const span)
{
    span->first_token = (int64_t) sequence * p->q_len;
    span->q_len = p->q_len;
    if (!p->cu_seqlens) return;
    const int64_t first = clamp(p->cu_seqlens[sequence], 0, p->num_tokens, &span->fault);
    const int64_t end = clamp(p->cu_seqlens[sequence + 1], 0, p->num_tokens, &span->fault);
    span->first_token = first;
    span->q_len = (int32_t) clamp(end - first, 0, p->num_tokens, &span->fault);
}

static void find_keys(const struct attn_prefill_params *const p, const int32_t sequence,
                      struct attn_prefill_span *const span)
{
    int64_t first = (int64_t) sequence * p->kv_len, most = p->kv_len;
    if (p->block_table) {
        first = 0;
        most = (int64_t) p->max_pages_per_seq * p->page_size;
    } else if (p->kv_starts) {
        const int64_t given = p->kv_starts[sequence];
        first = clamp(given, 0, p->num_kv_tokens, &span->fault);
        most = first == given ? p->num_kv_tokens - first : 0;
    }
    span->first_key = first;
    span->kv_len =
        (int32_t) clamp(p->kv_lens ? p->kv_lens[sequence] : p->kv_len, 0, most, &span->fault);
}

struct attn_prefill_span attn_reference_prefill_span(const struct attn_prefill_params *const params,
                                                     const int32_t sequence)
{
    struct attn_prefill_span span = { .fault = 0 };
    find_tokens(params, sequence, &span);
    span.q_offset = params->q_offsets ? params->q_offsets[sequence] : params->q_offset;
    // Nothing else of a sequence without query tokens is looked at.
    if (span.q_len > 0) find_keys(params, sequence, &span);
    return span;
}

// ---- a row

// NULL stays NULL: K and V without keys.
static const void *element(const void *const base, const int64_t index)
{
    return base ? (const char *) base + index * ELEMENT_BYTES : NULL;
}

// The keys that query token `token` sees: [*start, *end).
static void find_visible(const struct attn_prefill_params *const p,
                         const struct attn_prefill_span *const span, const int32_t token,
                         int32_t *const start, int32_t *const end)
{
    const int64_t position = span->q_offset + token;
    int64_t first = 0, behind = span->kv_len;
    if (p->window > 0 && position - p->window + 1 > 0) first = position - p->window + 1;
    if (p->causal && position + 1 < behind) behind = position + 1;
    if (first >= behind) first = behind = 0;
    *start = (int32_t) first;
    *end = (int32_t) behind;
}

// K and V as decode sees them. Contiguous, they are one page.
static void view_keys(const struct attn_prefill_params *const p, const int32_t sequence,
                      const struct attn_prefill_span *const span,
                      struct attn_decode_params *const decode)
{
    static const int32_t only_page = 0;
    const int64_t first_key = p->block_table ? 0 : span->first_key;
    decode->k_pool = element(p->k, first_key * p->k_token_stride);
    decode->v_pool = element(p->v, first_key * p->v_token_stride);
    decode->k_page_stride = p->k_page_stride;
    decode->k_token_stride = p->k_token_stride;
    decode->k_head_stride = p->k_head_stride;
    decode->v_page_stride = p->v_page_stride;
    decode->v_token_stride = p->v_token_stride;
    decode->v_head_stride = p->v_head_stride;
    decode->block_table = p->block_table ? p->block_table + sequence * p->table_stride : &only_page;
    decode->page_size = p->block_table ? p->page_size : INT32_MAX;
    decode->max_pages_per_seq = p->block_table ? p->max_pages_per_seq : 1;
    decode->num_pages = p->block_table ? p->num_pages : 1;
}

// A query token is the only one of a sequence that ends with the last key that it sees, under a
// window that begins with the first.
static void compute_row(const struct attn_prefill_params *const p, const int32_t sequence,
                        const struct attn_prefill_span *const span, const int32_t token,
                        const int32_t head, struct attn_reference_row *const row)
{
    struct attn_decode_params decode = ATTN_DECODE_PARAMS_INIT;
    int32_t start, end;
    find_visible(p, span, token, &start, &end);
    view_keys(p, sequence, span, &decode);
    decode.seq_lens = &end;
    decode.window = end - start;
    decode.q_dtype = decode.kv_dtype = p->dtype;
    decode.batch = 1;
    decode.num_q_heads = p->num_q_heads;
    decode.num_kv_heads = p->num_kv_heads;
    decode.head_dim = p->head_dim;
    decode.q = element(p->q, (span->first_token + token) * p->q_token_stride);
    decode.q_stride = p->q_token_stride;
    decode.sinks = p->sinks;
    decode.scale = p->scale;
    decode.softcap = p->softcap;
    attn_reference_decode_row(&decode, 0, 0, head, NULL, row);
}

void attn_reference_prefill_row(const struct attn_prefill_params *const params,
                                const int32_t sequence, const int32_t token, const int32_t head,
                                struct attn_reference_row *const row)
{
    const struct attn_prefill_span span = attn_reference_prefill_span(params, sequence);
    compute_row(params, sequence, &span, token, head, row);
}

// ---- the whole call

static bool store_row(const struct attn_prefill_params *const p, const int32_t sequence,
                      const struct attn_prefill_span *const span, const int32_t token,
                      const int32_t head)
{
    double o[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = o };
    const int64_t index = (span->first_token + token) * p->num_q_heads + head;
    compute_row(p, sequence, span, token, head, &row);
    // + 0.0: a sum of zeros has no sign.
    for (int32_t d = 0; d < p->head_dim; d++)
        attn_store(p->o, index * p->head_dim + d, p->dtype, o[d] + 0.0);
    if (p->lse) p->lse[index] = (float) row.lse;
    return row.fault;
}

void attn_reference_prefill(const struct attn_prefill_params *const params)
{
    for (int32_t sequence = 0; sequence < params->batch; sequence++) {
        const struct attn_prefill_span span = attn_reference_prefill_span(params, sequence);
        bool fault = span.fault;
        for (int32_t token = 0; token < span.q_len; token++)
            for (int32_t head = 0; head < params->num_q_heads; head++)
                fault |= store_row(params, sequence, &span, token, head);
        if (params->fault && fault && sequence < *params->fault) *params->fault = sequence;
    }
}

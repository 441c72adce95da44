/* SPDX-License-Identifier: Apache-2.0 */
// Prefill cases: contiguous (q, k, v), paged (one sequence and its block_table), and ragged
// (sequences of cu_seqlens, paged).
#include "cli/case_read.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum form {
    FORM_CONTIGUOUS,
    FORM_PAGED,
    FORM_RAGGED,
};

static enum form find_form(const struct case_reader *const in)
{
    if (safetensors_find(in->to->file, "cu_seqlens")) return FORM_RAGGED;
    return safetensors_find(in->to->file, "k_pool") ? FORM_PAGED : FORM_CONTIGUOUS;
}

// [batch, q_len, num_q_heads, head_dim], or with pages without batch.
static int read_query(const struct case_reader *const in, const enum form form)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    const int64_t extents[] = { -1, -1, -1, -1 };
    const int rank = form == FORM_CONTIGUOUS ? 4 : 3;
    const struct safetensors_tensor *q;
    int result = case_find_tensor(in, "q", false, rank, extents, &q);
    if (!result) result = case_check_dtype(in, q, "F16", "BF16");
    if (result) return result;
    in->to->has_query_axis = rank == 4;
    p->dtype = strcmp(q->dtype, "BF16") ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16;
    if (rank == 4) p->batch = (int32_t) q->shape[0];
    *(form == FORM_RAGGED ? &p->num_tokens : &p->q_len) = (int32_t) q->shape[rank - 3];
    p->num_q_heads = (int32_t) q->shape[rank - 2];
    p->head_dim = (int32_t) q->shape[rank - 1];
    if (p->num_q_heads < 1 || p->head_dim < 1)
        return case_refuse_shape(in, q, "at least one head of one element");
    p->q_token_stride = (int64_t) p->num_q_heads * p->head_dim;
    return case_align_data(in, q, &p->q);
}

// Of q's type: [batch, kv_len, num_kv_heads, head_dim], or with pages [num_pages, page_size, ...].
static int read_keys(const struct case_reader *const in, const enum form form)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    const bool paged = form != FORM_CONTIGUOUS;
    const int64_t extents[] = { paged ? -1 : p->batch, -1, -1, p->head_dim };
    const char *const dtype = p->dtype == ATTN_DTYPE_BF16 ? "BF16" : "F16";
    const struct safetensors_tensor *k;
    int result = case_find_tensor(in, paged ? "k_pool" : "k", false, 4, extents, &k);
    if (!result) result = case_check_dtype(in, k, dtype, NULL);
    if (!result) result = case_align_data(in, k, &p->k);
    if (!result)
        result = case_read_data(in, paged ? "v_pool" : "v", false, dtype, 4, k->shape, &p->v);
    if (result) return result;
    if ((paged && k->shape[1] < 1) || k->shape[2] < 1)
        return case_refuse_shape(in, k, "at least one token a page and one KV head");
    p->num_kv_heads = (int32_t) k->shape[2];
    p->k_head_stride = p->v_head_stride = p->head_dim;
    p->k_token_stride = p->v_token_stride = (int64_t) p->num_kv_heads * p->head_dim;
    if (!paged) {
        p->kv_len = (int32_t) k->shape[1];
        return 0;
    }
    p->num_pages = k->shape[0];
    p->page_size = (int32_t) k->shape[1];
    // An empty tensor may be of any shape.
    if (__builtin_mul_overflow(p->page_size, p->k_token_stride, &p->k_page_stride))
        return case_refuse_shape(in, k, "a smaller page");
    p->v_page_stride = p->k_page_stride;
    return 0;
}

static int read_table(const struct case_reader *const in, const enum form form)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    const int64_t extents[] = { form == FORM_RAGGED ? p->batch : -1, -1 };
    const int rank = form == FORM_RAGGED ? 2 : 1;
    const void *data;
    const int result = case_read_data(in, "block_table", false, "I32", rank, extents, &data);
    if (result) return result;
    p->max_pages_per_seq = (int32_t) safetensors_find(in->to->file, "block_table")->shape[rank - 1];
    p->table_stride = p->max_pages_per_seq;
    p->block_table = data;
    return 0;
}

static int read_lists(const struct case_reader *const in)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    const int64_t any[] = { -1 };
    const void *data[3];
    int result = case_read_data(in, "cu_seqlens", false, "I32", 1, any, &data[0]);
    if (result) return result;
    const struct safetensors_tensor *const cu_seqlens =
        safetensors_find(in->to->file, "cu_seqlens");
    if (cu_seqlens->shape[0] < 1)
        return case_refuse_shape(in, cu_seqlens, "one more than there are sequences");
    p->batch = (int32_t) cu_seqlens->shape[0] - 1;
    const int64_t batch[] = { p->batch };
    result = case_read_data(in, "kv_lens", false, "I32", 1, batch, &data[1]);
    if (!result) result = case_read_data(in, "q_offsets", false, "I32", 1, batch, &data[2]);
    if (result) return result;
    p->cu_seqlens = data[0];
    p->kv_lens = data[1];
    p->q_offsets = data[2];
    return 0;
}

// The last query token sees all keys unless the file says otherwise.
static int read_position(const struct case_reader *const in, const enum form form)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    if (form == FORM_PAGED && !case_find_scalar(in, "kv_len"))
        return safetensors_fail(in->why, "%s: scalar 'kv_len' is missing", in->to->file->name);
    const int result = form == FORM_PAGED ? case_read_count(in, "kv_len", &p->kv_len) : 0;
    p->q_offset = p->kv_len - p->q_len;
    return result ? result : case_read_int(in, "q_offset", &p->q_offset);
}

static int read_kernel(const struct case_reader *const in)
{
    static const char *const names[] = { "auto", "64", "128" };
    const char *const text = case_find_scalar(in, "kernel");
    if (!text) return 0;
    for (int i = CASE_KERNEL_AUTO; i <= CASE_KERNEL_128; i++) {
        if (strcmp(text, names[i])) continue;
        in->to->kernel = (enum case_kernel) i;
        return 0;
    }
    return safetensors_fail(in->why, "%s: scalar 'kernel' is '%s'; it is auto, 64 or 128",
                            in->to->file->name, text);
}

static int read_scalars(const struct case_reader *const in)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    int32_t causal = 1;
    int result = case_read_float(in, "scale", 1.0f / sqrtf((float) p->head_dim), &p->scale);
    if (!result) result = case_read_float(in, "softcap", 0.0f, &p->softcap);
    if (!result) result = case_read_count(in, "window", &p->window);
    if (!result) result = case_read_int(in, "causal", &causal);
    if (!result && causal != 0 && causal != 1)
        return safetensors_fail(in->why, "%s: scalar 'causal' is '%s'; it is 0 or 1",
                                in->to->file->name, case_find_scalar(in, "causal"));
    p->causal = causal;
    return result ? result : read_kernel(in);
}

int case_read_prefill(const struct case_reader *const in)
{
    struct attn_prefill_params *const p = &in->to->prefill;
    const enum form form = find_form(in);
    const void *sinks = NULL;
    *p = ATTN_PREFILL_PARAMS_INIT;
    int result = read_query(in, form);
    if (!result && form == FORM_RAGGED) result = read_lists(in);
    if (!result) result = read_keys(in, form);
    if (!result && form != FORM_CONTIGUOUS) result = read_table(in, form);
    if (!result && form != FORM_RAGGED) result = read_position(in, form);
    const int64_t heads[] = { p->num_q_heads };
    if (!result) result = case_read_data(in, "sinks", true, "F32", 1, heads, &sinks);
    p->sinks = sinks;
    return result ? result : read_scalars(in);
}

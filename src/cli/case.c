/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/case.h"

#include "attn/splitk.h"
#include "cli/case_read.h"
#include "host/ctm.h"

#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MASK_WORD_BITS 32
#define SKIP_TABLE "skip_softmax_scale_table"

size_t case_rows(const struct attn_decode_params *const params)
{
    return (size_t) params->batch * (size_t) params->q_len * (size_t) params->num_q_heads;
}

size_t case_elements(const struct attn_decode_params *const params)
{
    return case_rows(params) * (size_t) params->head_dim;
}

int case_shape(const struct case_file *const loaded, int64_t shape[4])
{
    const struct attn_decode_params *const decode = &loaded->params;
    const struct attn_prefill_params *const prefill = &loaded->prefill;
    const bool is_prefill = loaded->op == CASE_PREFILL;
    int rank = 0;
    if (prefill->cu_seqlens)
        shape[rank++] = prefill->num_tokens;
    else if (loaded->has_query_axis || !is_prefill)
        shape[rank++] = is_prefill ? prefill->batch : decode->batch;
    if (!prefill->cu_seqlens && (loaded->has_query_axis || is_prefill))
        shape[rank++] = is_prefill ? prefill->q_len : decode->q_len;
    shape[rank++] = is_prefill ? prefill->num_q_heads : decode->num_q_heads;
    shape[rank++] = is_prefill ? prefill->head_dim : decode->head_dim;
    return rank;
}

enum attn_dtype case_dtype(const struct case_file *const loaded)
{
    return loaded->op == CASE_PREFILL ? loaded->prefill.dtype : loaded->params.q_dtype;
}

const char *case_op_name(const enum case_op op)
{
    static const char *const names[] = { "decode", "ctm", "prefill", "tiled", "swap" };
    return names[op];
}

static int read_policy(const struct case_reader *const in)
{
    struct attn_splitk_policy policy;
    const char *const text = case_find_scalar(in, "policy");
    if (!text) return 0;
    if (!attn_splitk_parse(text, &policy) || strlen(text) >= sizeof(in->to->policy))
        return safetensors_fail(in->why,
                                "%s: scalar 'policy' is '%s'; it is one of legacy, auto, chunk, "
                                "chunk:N, a count, off",
                                in->to->file->name, text);
    snprintf(in->to->policy, sizeof(in->to->policy), "%s", text);
    return 0;
}

// [batch, q_len, num_q_heads, head_dim]; decode has it without q_len, too, for one token.
static int read_query(const struct case_reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const bool ctm = in->to->op == CASE_CTM;
    const int64_t extents[] = { -1, -1, -1, -1 };
    const struct safetensors_tensor *q = safetensors_find(in->to->file, "q");
    const int rank = ctm || (q && q->rank == 4) ? 4 : 3;
    int result = case_find_tensor(in, "q", false, rank, extents, &q);
    if (!result) result = case_check_dtype(in, q, "F16", ctm ? NULL : "BF16");
    if (result) return result;
    in->to->has_query_axis = rank == 4;
    params->q_dtype = strcmp(q->dtype, "BF16") ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16;
    params->batch = (int32_t) q->shape[0];
    params->q_len = rank == 4 ? (int32_t) q->shape[1] : 1;
    params->num_q_heads = (int32_t) q->shape[rank - 2];
    params->head_dim = (int32_t) q->shape[rank - 1];
    if (params->q_len < 1 || params->num_q_heads < 1 || params->head_dim < 1)
        return case_refuse_shape(in, q, "at least one token of one head of one element");
    // An empty tensor may be of any shape.
    params->q_token_stride = (int64_t) params->num_q_heads * params->head_dim;
    if (__builtin_mul_overflow(params->q_len, params->q_token_stride, &params->q_stride))
        return case_refuse_shape(in, q, "a smaller sequence");
    return case_align_data(in, q, &params->q);
}

// K sets page size, pages and KV heads; V has to agree.
static int read_pools(const struct case_reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const int64_t extents[] = { -1, -1, -1, params->head_dim };
    const char *const q_dtype = params->q_dtype == ATTN_DTYPE_BF16 ? "BF16" : "F16";
    const struct safetensors_tensor *k;
    int result = case_find_tensor(in, "k_pool", false, 4, extents, &k);
    if (!result) result = case_check_dtype(in, k, q_dtype, "F8_E4M3");
    if (!result) result = case_align_data(in, k, &params->k_pool);
    if (!result)
        result = case_read_data(in, "v_pool", false, k->dtype, 4, k->shape, &params->v_pool);
    if (result) return result;
    if (k->shape[1] < 1 || k->shape[2] < 1)
        return case_refuse_shape(in, k, "at least one token a page and one KV head");
    params->kv_dtype = strcmp(k->dtype, q_dtype) ? ATTN_DTYPE_E4M3 : params->q_dtype;
    params->num_pages = k->shape[0];
    params->page_size = (int32_t) k->shape[1];
    params->num_kv_heads = (int32_t) k->shape[2];
    params->k_head_stride = params->head_dim;
    params->k_token_stride = (int64_t) params->num_kv_heads * params->head_dim;
    // The tensor's size has been checked, so this fits; an empty one may be of any shape.
    if (__builtin_mul_overflow(params->page_size, params->k_token_stride, &params->k_page_stride))
        return case_refuse_shape(in, k, "a smaller page");
    params->v_head_stride = params->k_head_stride;
    params->v_token_stride = params->k_token_stride;
    params->v_page_stride = params->k_page_stride;
    return 0;
}

static int read_tables(const struct case_reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const int64_t table[] = { params->batch, -1 }, lens[] = { params->batch };
    const int64_t q_heads[] = { params->num_q_heads }, kv_heads[] = { params->num_kv_heads };
    const void *data[5];
    int result = case_read_data(in, "block_table", false, "I32", 2, table, &data[0]);
    if (!result) result = case_read_data(in, "seq_lens", false, "I32", 1, lens, &data[1]);
    if (!result) result = case_read_data(in, "sinks", true, "F32", 1, q_heads, &data[2]);
    if (!result) result = case_read_data(in, "k_scales", true, "F32", 1, kv_heads, &data[3]);
    if (!result) result = case_read_data(in, "v_scales", true, "F32", 1, kv_heads, &data[4]);
    if (result) return result;
    if (!data[3] != !data[4])
        return safetensors_fail(in->why,
                                "%s: tensor '%s' is missing: k_scales and v_scales come together",
                                in->to->file->name, data[3] ? "v_scales" : "k_scales");
    params->max_pages_per_seq = (int32_t) safetensors_find(in->to->file, "block_table")->shape[1];
    params->block_table = data[0];
    params->seq_lens = data[1];
    params->sinks = data[2];
    params->k_scales = data[3];
    params->v_scales = data[4];
    return 0;
}

// [batch, q_len, words]. *mask stays NULL where it is optional and missing.
static int read_mask(const struct case_reader *const in, const bool optional,
                     const int32_t **const mask, int32_t *const mask_words)
{
    const struct attn_decode_params *const params = &in->to->params;
    const int64_t extents[] = { params->batch, params->q_len, -1 };
    const int64_t words = (params->q_len - 1) / MASK_WORD_BITS + 1;
    const void *data;
    const int result = case_read_data(in, "tree_mask", optional, "I32", 3, extents, &data);
    if (result || !data) return result;
    const struct safetensors_tensor *const tensor = safetensors_find(in->to->file, "tree_mask");
    if (tensor->shape[2] < words)
        return case_refuse_shape(in, tensor, "a bit for each query token");
    *mask = data;
    *mask_words = (int32_t) tensor->shape[2];
    return 0;
}

static int read_all_expected(const struct case_reader *const in)
{
    int64_t shape[4];
    const int rank = case_shape(in->to, shape);
    const int result = case_read_expected(in, "expected_o", rank, shape, &in->to->expected_o);
    return result || in->to->op == CASE_CTM
               ? result
               : case_read_expected(in, "expected_lse", rank - 1, shape, &in->to->expected_lse);
}

static int read_scalars(const struct case_reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const float usual = params->head_dim ? 1.0f / sqrtf((float) params->head_dim) : 1.0f;
    int result = case_read_float(in, "scale", usual, &params->scale);
    if (!result) result = case_read_float(in, "softcap", 0.0f, &params->softcap);
    if (!result) result = case_read_float(in, "k_scale", 1.0f, &params->k_scale);
    if (!result) result = case_read_float(in, "v_scale", 1.0f, &params->v_scale);
    if (!result) result = case_read_count(in, "window", &params->window);
    return result ? result : read_policy(in);
}

static int read_decode(const struct case_reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    int result = read_query(in);
    if (!result) result = read_pools(in);
    if (!result) result = read_tables(in);
    if (!result) result = read_mask(in, true, &params->tree_mask, &params->mask_words);
    if (!result) result = read_scalars(in);
    // Under policy legacy the file's own batch is the largest there is.
    params->max_decode_seqs = params->batch;
    return result;
}

static int read_ctm_pool(const struct case_reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    const int64_t extents[] = { -1, ATTN_CTM_PAGE_SIZE, -1, ctm->head_dim };
    const struct safetensors_tensor *pool;
    int result = case_find_tensor(in, "kv_pool", false, 4, extents, &pool);
    if (!result) result = case_check_dtype(in, pool, "F16", "F8_E4M3");
    if (!result) result = case_align_data(in, pool, &ctm->kv_pool);
    if (result) return result;
    if (pool->shape[0] < 2 || pool->shape[0] % 2 || pool->shape[2] < 1)
        return case_refuse_shape(in, pool,
                                 "as many pages for V as for K, and at least one KV head");
    ctm->fp8_kv = strcmp(pool->dtype, "F16") != 0;
    ctm->num_pages = (int32_t) (pool->shape[0] / 2);
    ctm->num_kv_heads = (int32_t) pool->shape[2];
    return 0;
}

static int read_ctm_tables(const struct case_reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    const int64_t table[] = { ctm->batch_size, 2, -1 }, lens[] = { ctm->batch_size };
    const int64_t heads[] = { ctm->num_q_heads }, pairs[] = { -1 };
    const void *data[4];
    int result = case_read_data(in, "page_table", false, "I32", 3, table, &data[0]);
    if (!result) result = case_read_data(in, "seq_lens", false, "I32", 1, lens, &data[1]);
    if (!result) result = case_read_data(in, "sinks", true, "F32", 1, heads, &data[2]);
    if (!result) result = case_read_data(in, SKIP_TABLE, true, "I32", 1, pairs, &data[3]);
    if (result) return result;
    ctm->max_pages_per_seq = (int32_t) safetensors_find(in->to->file, "page_table")->shape[2];
    ctm->page_table = data[0];
    ctm->seq_lens = data[1];
    ctm->sinks = data[2];
    ctm->skip_softmax_scale_table = data[3];
    if (!data[3]) return 0;
    const struct safetensors_tensor *const skip = safetensors_find(in->to->file, SKIP_TABLE);
    if (skip->shape[0] % 2) return case_refuse_shape(in, skip, "two int32 for each pair");
    ctm->skip_softmax_scale_table_length = (int32_t) skip->shape[0];
    return 0;
}

static int read_ctm_scalars(const struct case_reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    int result = case_read_float(in, "scale", 1.0f, &ctm->attention_scale);
    if (!result) result = case_read_float(in, "k_scale", 1.0f, &ctm->k_scale);
    if (!result) result = case_read_float(in, "v_scale", 1.0f, &ctm->v_scale);
    if (!result) result = case_read_count(in, "window", &ctm->sliding_window);
    if (!result) result = case_read_count(in, "contiguous_query_swa", &ctm->contiguous_query_swa);
    if (result || ctm->contiguous_query_swa <= 1) return result;
    return safetensors_fail(in->why, "%s: scalar 'contiguous_query_swa' is '%s'; it is 0 or 1",
                            in->to->file->name, case_find_scalar(in, "contiguous_query_swa"));
}

static int read_ctm(const struct case_reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    *ctm = ATTN_CTM_PARAMS_INIT;
    int result = read_query(in);
    if (result) return result;
    ctm->q = in->to->params.q;
    ctm->batch_size = in->to->params.batch;
    ctm->q_len = in->to->params.q_len;
    ctm->num_q_heads = in->to->params.num_q_heads;
    ctm->head_dim = in->to->params.head_dim;
    result = read_ctm_pool(in);
    if (!result) result = read_ctm_tables(in);
    if (!result && ctm->q_len > 1) result = read_mask(in, false, &ctm->tree_mask, &ctm->mask_words);
    if (!result) result = read_ctm_scalars(in);
    if (result) return result;
    if (ctm->q_len == 1 && safetensors_find(in->to->file, "tree_mask"))
        case_warn(in, "tensor 'tree_mask' is ignored, as there is one query token a sequence");
    snprintf(in->to->policy, sizeof(in->to->policy), "chunk");
    in->to->params = attn_reference_ctm(ctm);
    return 0;
}

static bool is_listed(const char *const name, const char *const *const list)
{
    for (size_t i = 0; list[i]; i++)
        if (!strcmp(name, list[i])) return true;
    return false;
}

// Of tiled and of swap.
#define LIST_TENSORS \
    "q", "k_pool", "v_pool", "block_list", "block_counts", "last_block_valid_slots", "expected_o", \
        "expected_lse"

static void warn_about_extras(const struct case_reader *const in)
{
    // In the order of enum case_op.
    static const char *const tensors[][16] = {
        { "q", "k_pool", "v_pool", "block_table", "seq_lens", "sinks", "tree_mask", "k_scales",
          "v_scales", "expected_o", "expected_lse", NULL },
        { "q", "kv_pool", "page_table", "seq_lens", "tree_mask", "sinks", SKIP_TABLE, "expected_o",
          NULL },
        { "q", "k", "v", "k_pool", "v_pool", "block_table", "cu_seqlens", "kv_lens", "q_offsets",
          "sinks", "expected_o", "expected_lse", NULL },
        { LIST_TENSORS, NULL },
        { LIST_TENSORS, NULL },
    };
    static const char *const keys[][16] = {
        { "format", "version", "op", "scale", "window", "softcap", "k_scale", "v_scale", "policy",
          NULL },
        { "format", "version", "op", "scale", "window", "contiguous_query_swa", "k_scale",
          "v_scale", NULL },
        { "format", "version", "op", "scale", "causal", "window", "softcap", "kernel", "kv_len",
          "q_offset", NULL },
        { "format", "version", "op", "scale", "tile_capacity", NULL },
        { "format", "version", "op", "scale", "tile_capacity", "resident_blocks", "num_planes",
          NULL },
    };
    const char *key;
    json_t *value;
    const enum case_op op = in->to->op;
    for (size_t i = 0; i < in->to->file->num_tensors; i++)
        if (!is_listed(in->to->file->tensors[i].name, tensors[op]))
            case_warn(in, "tensor '%.80s' is not one of this operation's, and ignored",
                      in->to->file->tensors[i].name);
    json_object_foreach((json_t *) in->to->file->metadata, key,
                        value) if (!is_listed(key, keys[op]))
        case_warn(in, "scalar '%.80s' is not one of this operation's, and ignored", key);
}

static int check_identity(const struct case_reader *const in)
{
    const char *const format = case_find_scalar(in, "format"), *const version =
                                                                   case_find_scalar(in, "version");
    const char *const op = case_find_scalar(in, "op"), *const name = in->to->file->name;
    if (!format || strcmp(format, "attn-case"))
        return safetensors_fail(in->why,
                                "%s: not a case file: __metadata__ has no format = attn-case",
                                name);
    if (!version || strcmp(version, "1"))
        return safetensors_fail(in->why, "%s: case file version '%s'; this program reads version 1",
                                name, version ? version : "(none)");
    if (!op) return safetensors_fail(in->why, "%s: scalar 'op' is missing", name);
    for (int i = CASE_DECODE; i <= CASE_SWAP; i++) {
        in->to->op = (enum case_op) i;
        if (!strcmp(op, case_op_name(in->to->op))) return 0;
    }
    return safetensors_fail(in->why, "%s: unknown operation '%s'", name, op);
}

static int read_case(const struct case_reader *const in)
{
    in->to->params = ATTN_DECODE_PARAMS_INIT;
    int result = check_identity(in);
    if (!result)
        result = in->to->op == CASE_CTM       ? read_ctm(in)
                 : in->to->op == CASE_PREFILL ? case_read_prefill(in)
                 : in->to->op == CASE_TILED   ? case_read_tiled(in)
                 : in->to->op == CASE_SWAP    ? case_read_swap(in)
                                              : read_decode(in);
    if (!result) result = read_all_expected(in);
    if (!result) warn_about_extras(in);
    if (result) case_free(in->to);
    return result;
}

int case_load(struct case_file *const loaded, const char *const path, const case_warn_fn warn,
              void *const user, char *const why)
{
    const struct case_reader in = { loaded, warn, user, why };
    memset(loaded, 0, sizeof(*loaded));
    const int result = safetensors_open(&loaded->file, path, why);
    return result ? result : read_case(&in);
}

int case_parse(struct case_file *const loaded, const char *const name, const void *const bytes,
               const size_t size, const case_warn_fn warn, void *const user, char *const why)
{
    const struct case_reader in = { loaded, warn, user, why };
    memset(loaded, 0, sizeof(*loaded));
    const int result = safetensors_parse(&loaded->file, name, bytes, size, why);
    return result ? result : read_case(&in);
}

void case_free(struct case_file *const loaded)
{
    for (int i = 0; i < loaded->num_copies; i++) free(loaded->copies[i]);
    free(loaded->expected_o);
    free(loaded->expected_lse);
    safetensors_close(&loaded->file);
    memset(loaded, 0, sizeof(*loaded));
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/case.h"

#include "attn/splitk.h"
#include "host/ctm.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the library asks of its tensors; copies get more.
#define TENSOR_ALIGNMENT 16u
#define COPY_ALIGNMENT 64u
#define MASK_WORD_BITS 32
#define SKIP_TABLE "skip_softmax_scale_table"

// What read_* share: the case, where sentences go.
struct reader {
    struct case_file *to;
    case_warn_fn warn;
    void *user;
    char *why;
};

size_t case_rows(const struct attn_decode_params *const params)
{
    return (size_t) params->batch * (size_t) params->q_len * (size_t) params->num_q_heads;
}

size_t case_elements(const struct attn_decode_params *const params)
{
    return case_rows(params) * (size_t) params->head_dim;
}

const char *case_op_name(const enum case_op op)
{
    return op == CASE_CTM ? "ctm" : "decode";
}

__attribute__((format(printf, 2, 3))) static void send_warning(const struct reader *const in,
                                                               const char *const format, ...)
{
    char name[192], sentence[SAFETENSORS_WHY_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof(name), format, args);
    va_end(args);
    safetensors_fail(sentence, "%s: %s", in->to->file->name, name);
    if (in->warn) in->warn(in->user, sentence);
}

static const char *find_scalar(const struct reader *const in, const char *const key)
{
    return json_string_value(json_object_get(in->to->file->metadata, key));
}

// Digits, signs, a point and an exponent only: no blanks, no "nan", no hexadecimal.
static bool is_plain_number(const char *const text)
{
    return *text && strspn(text, "0123456789+-.eE") == strlen(text);
}

static int read_float(const struct reader *const in, const char *const key, const float otherwise,
                      float *const value)
{
    const char *const text = find_scalar(in, key);
    char *end = NULL;
    *value = otherwise;
    if (!text) return 0;
    if (is_plain_number(text)) *value = strtof(text, &end);
    if (!end || *end || end == text || !isfinite(*value))
        return safetensors_fail(in->why,
                                "%s: scalar '%s' is '%s'; a finite decimal number is needed",
                                in->to->file->name, key, text);
    return 0;
}

static int read_count(const struct reader *const in, const char *const key, int32_t *const value)
{
    const char *const text = find_scalar(in, key);
    char *end = NULL;
    *value = 0;
    if (!text) return 0;
    errno = 0;
    const long long number =
        strspn(text, "0123456789") == strlen(text) ? strtoll(text, &end, 10) : -1;
    if (!*text || !end || errno || number < 0 || number > INT32_MAX)
        return safetensors_fail(in->why,
                                "%s: scalar '%s' is '%s'; a whole number from 0 to %" PRId32
                                " is needed",
                                in->to->file->name, key, text, INT32_MAX);
    *value = (int32_t) number;
    return 0;
}

static int read_policy(const struct reader *const in)
{
    struct attn_splitk_policy policy;
    const char *const text = find_scalar(in, "policy");
    if (!text) return 0;
    if (!attn_splitk_parse(text, &policy) || strlen(text) >= sizeof(in->to->policy))
        return safetensors_fail(in->why,
                                "%s: scalar 'policy' is '%s'; it is one of legacy, auto, chunk, "
                                "chunk:N, a count, off",
                                in->to->file->name, text);
    snprintf(in->to->policy, sizeof(in->to->policy), "%s", text);
    return 0;
}

static int refuse_shape(const struct reader *const in,
                        const struct safetensors_tensor *const tensor, const char *const wanted)
{
    char shape[160];
    safetensors_format_shape(tensor->shape, tensor->rank, shape, sizeof(shape));
    return safetensors_fail(in->why, "%s: tensor '%s' has shape %s; %s is needed",
                            in->to->file->name, tensor->name, shape, wanted);
}

// The tensor `name` if it has this rank and these extents (-1: any up to INT32_MAX). *tensor is
// NULL where it is missing and optional.
static int find_tensor(const struct reader *const in, const char *const name, const bool optional,
                       const int rank, const int64_t *const extents,
                       const struct safetensors_tensor **const tensor)
{
    char wanted[160];
    int64_t shown[SAFETENSORS_MAX_RANK];
    bool fits = true;
    *tensor = safetensors_find(in->to->file, name);
    if (!*tensor && optional) return 0;
    if (!*tensor)
        return safetensors_fail(in->why, "%s: tensor '%s' is missing", in->to->file->name, name);
    fits = (*tensor)->rank == rank;
    for (int i = 0; i < rank && fits; i++) {
        const int64_t extent = (*tensor)->shape[i];
        fits = extents[i] < 0 ? extent <= INT32_MAX : extent == extents[i];
    }
    if (fits) return 0;
    for (int i = 0; i < rank; i++) shown[i] = extents[i];
    safetensors_format_shape(shown, rank, wanted, sizeof(wanted));
    char rule[256];
    snprintf(rule, sizeof(rule), "%s (-1: any up to %" PRId32 ")", wanted, INT32_MAX);
    return refuse_shape(in, *tensor, rule);
}

static int check_dtype(const struct reader *const in, const struct safetensors_tensor *const tensor,
                       const char *const first, const char *const second)
{
    if (!strcmp(tensor->dtype, first) || (second && !strcmp(tensor->dtype, second))) return 0;
    return safetensors_fail(in->why, "%s: tensor '%s' is of type %s; %s%s%s is needed",
                            in->to->file->name, tensor->name, tensor->dtype, first,
                            second ? " or " : "", second ? second : "");
}

// The tensor's data where it is aligned, else a copy.
static int align_data(const struct reader *const in, const struct safetensors_tensor *const tensor,
                      const void **const data)
{
    *data = tensor->data;
    // An empty tensor may lie at the very end of the file.
    if (tensor->bytes && !((uintptr_t) tensor->data % TENSOR_ALIGNMENT)) return 0;
    const size_t rounded = (tensor->bytes / COPY_ALIGNMENT + 1) * COPY_ALIGNMENT;
    void *const copy = aligned_alloc(COPY_ALIGNMENT, rounded);
    if (!copy)
        return safetensors_fail(in->why, "%s: tensor '%s': out of memory (%zu bytes)",
                                in->to->file->name, tensor->name, rounded);
    memcpy(copy, tensor->data, tensor->bytes);
    in->to->copies[in->to->num_copies++] = copy;
    *data = copy;
    return 0;
}

// Finds, checks the type, and aligns. *data stays NULL where the tensor is optional and missing.
static int read_data(const struct reader *const in, const char *const name, const bool optional,
                     const char *const dtype, const int rank, const int64_t *const extents,
                     const void **const data)
{
    const struct safetensors_tensor *tensor;
    *data = NULL;
    int result = find_tensor(in, name, optional, rank, extents, &tensor);
    if (result || !tensor) return result;
    result = check_dtype(in, tensor, dtype, NULL);
    return result ? result : align_data(in, tensor, data);
}

// [batch, q_len, num_q_heads, head_dim]; decode has it without q_len, too, for one token.
static int read_query(const struct reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const bool ctm = in->to->op == CASE_CTM;
    const int64_t extents[] = { -1, -1, -1, -1 };
    const struct safetensors_tensor *q = safetensors_find(in->to->file, "q");
    const int rank = ctm || (q && q->rank == 4) ? 4 : 3;
    int result = find_tensor(in, "q", false, rank, extents, &q);
    if (!result) result = check_dtype(in, q, "F16", ctm ? NULL : "BF16");
    if (result) return result;
    in->to->has_query_axis = rank == 4;
    params->q_dtype = strcmp(q->dtype, "BF16") ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16;
    params->batch = (int32_t) q->shape[0];
    params->q_len = rank == 4 ? (int32_t) q->shape[1] : 1;
    params->num_q_heads = (int32_t) q->shape[rank - 2];
    params->head_dim = (int32_t) q->shape[rank - 1];
    if (params->q_len < 1 || params->num_q_heads < 1 || params->head_dim < 1)
        return refuse_shape(in, q, "at least one token of one head of one element");
    // An empty tensor may be of any shape.
    params->q_token_stride = (int64_t) params->num_q_heads * params->head_dim;
    if (__builtin_mul_overflow(params->q_len, params->q_token_stride, &params->q_stride))
        return refuse_shape(in, q, "a smaller sequence");
    return align_data(in, q, &params->q);
}

// K sets page size, pages and KV heads; V has to agree.
static int read_pools(const struct reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const int64_t extents[] = { -1, -1, -1, params->head_dim };
    const char *const q_dtype = params->q_dtype == ATTN_DTYPE_BF16 ? "BF16" : "F16";
    const struct safetensors_tensor *k;
    int result = find_tensor(in, "k_pool", false, 4, extents, &k);
    if (!result) result = check_dtype(in, k, q_dtype, "F8_E4M3");
    if (!result) result = align_data(in, k, &params->k_pool);
    if (!result) result = read_data(in, "v_pool", false, k->dtype, 4, k->shape, &params->v_pool);
    if (result) return result;
    if (k->shape[1] < 1 || k->shape[2] < 1)
        return refuse_shape(in, k, "at least one token a page and one KV head");
    params->kv_dtype = strcmp(k->dtype, q_dtype) ? ATTN_DTYPE_E4M3 : params->q_dtype;
    params->num_pages = k->shape[0];
    params->page_size = (int32_t) k->shape[1];
    params->num_kv_heads = (int32_t) k->shape[2];
    params->k_head_stride = params->head_dim;
    params->k_token_stride = (int64_t) params->num_kv_heads * params->head_dim;
    // The tensor's size has been checked, so this fits; an empty one may be of any shape.
    if (__builtin_mul_overflow(params->page_size, params->k_token_stride, &params->k_page_stride))
        return refuse_shape(in, k, "a smaller page");
    params->v_head_stride = params->k_head_stride;
    params->v_token_stride = params->k_token_stride;
    params->v_page_stride = params->k_page_stride;
    return 0;
}

static int read_tables(const struct reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const int64_t table[] = { params->batch, -1 }, lens[] = { params->batch };
    const int64_t q_heads[] = { params->num_q_heads }, kv_heads[] = { params->num_kv_heads };
    const void *data[5];
    int result = read_data(in, "block_table", false, "I32", 2, table, &data[0]);
    if (!result) result = read_data(in, "seq_lens", false, "I32", 1, lens, &data[1]);
    if (!result) result = read_data(in, "sinks", true, "F32", 1, q_heads, &data[2]);
    if (!result) result = read_data(in, "k_scales", true, "F32", 1, kv_heads, &data[3]);
    if (!result) result = read_data(in, "v_scales", true, "F32", 1, kv_heads, &data[4]);
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
static int read_mask(const struct reader *const in, const bool optional, const int32_t **const mask,
                     int32_t *const mask_words)
{
    const struct attn_decode_params *const params = &in->to->params;
    const int64_t extents[] = { params->batch, params->q_len, -1 };
    const int64_t words = (params->q_len - 1) / MASK_WORD_BITS + 1;
    const void *data;
    const int result = read_data(in, "tree_mask", optional, "I32", 3, extents, &data);
    if (result || !data) return result;
    const struct safetensors_tensor *const tensor = safetensors_find(in->to->file, "tree_mask");
    if (tensor->shape[2] < words) return refuse_shape(in, tensor, "a bit for each query token");
    *mask = data;
    *mask_words = (int32_t) tensor->shape[2];
    return 0;
}

// F32 or F64 in `rank` dimensions, as doubles of its own.
static int read_expected(const struct reader *const in, const char *const name, const int rank,
                         const int64_t *const extents, double **const values)
{
    const struct safetensors_tensor *tensor;
    int result = find_tensor(in, name, true, rank, extents, &tensor);
    if (result || !tensor) return result;
    result = check_dtype(in, tensor, "F32", "F64");
    if (result) return result;
    const size_t width = strcmp(tensor->dtype, "F32") ? sizeof(double) : sizeof(float);
    const size_t count = tensor->bytes / width;
    *values = calloc(count + 1, sizeof(double));
    if (!*values)
        return safetensors_fail(in->why, "%s: tensor '%s': out of memory", in->to->file->name,
                                name);
    for (size_t i = 0; i < count; i++) {
        const unsigned char *const place = (const unsigned char *) tensor->data + i * width;
        float single;
        memcpy(&single, place, sizeof(single));
        if (width == sizeof(single))
            (*values)[i] = single;
        else
            memcpy(&(*values)[i], place, sizeof(double));
    }
    return 0;
}

static int read_all_expected(const struct reader *const in)
{
    const struct attn_decode_params *const params = &in->to->params;
    int64_t extents[4] = { params->batch };
    int rank = 1;
    if (in->to->has_query_axis) extents[rank++] = params->q_len;
    extents[rank++] = params->num_q_heads;
    extents[rank] = params->head_dim;
    const int result = read_expected(in, "expected_o", rank + 1, extents, &in->to->expected_o);
    return result || in->to->op == CASE_CTM
               ? result
               : read_expected(in, "expected_lse", rank, extents, &in->to->expected_lse);
}

static int read_scalars(const struct reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const float usual = params->head_dim ? 1.0f / sqrtf((float) params->head_dim) : 1.0f;
    int result = read_float(in, "scale", usual, &params->scale);
    if (!result) result = read_float(in, "softcap", 0.0f, &params->softcap);
    if (!result) result = read_float(in, "k_scale", 1.0f, &params->k_scale);
    if (!result) result = read_float(in, "v_scale", 1.0f, &params->v_scale);
    if (!result) result = read_count(in, "window", &params->window);
    return result ? result : read_policy(in);
}

static int read_decode(const struct reader *const in)
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

static int read_ctm_pool(const struct reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    const int64_t extents[] = { -1, ATTN_CTM_PAGE_SIZE, -1, ctm->head_dim };
    const struct safetensors_tensor *pool;
    int result = find_tensor(in, "kv_pool", false, 4, extents, &pool);
    if (!result) result = check_dtype(in, pool, "F16", "F8_E4M3");
    if (!result) result = align_data(in, pool, &ctm->kv_pool);
    if (result) return result;
    if (pool->shape[0] < 2 || pool->shape[0] % 2 || pool->shape[2] < 1)
        return refuse_shape(in, pool, "as many pages for V as for K, and at least one KV head");
    ctm->fp8_kv = strcmp(pool->dtype, "F16") != 0;
    ctm->num_pages = (int32_t) (pool->shape[0] / 2);
    ctm->num_kv_heads = (int32_t) pool->shape[2];
    return 0;
}

static int read_ctm_tables(const struct reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    const int64_t table[] = { ctm->batch_size, 2, -1 }, lens[] = { ctm->batch_size };
    const int64_t heads[] = { ctm->num_q_heads }, pairs[] = { -1 };
    const void *data[4];
    int result = read_data(in, "page_table", false, "I32", 3, table, &data[0]);
    if (!result) result = read_data(in, "seq_lens", false, "I32", 1, lens, &data[1]);
    if (!result) result = read_data(in, "sinks", true, "F32", 1, heads, &data[2]);
    if (!result) result = read_data(in, SKIP_TABLE, true, "I32", 1, pairs, &data[3]);
    if (result) return result;
    ctm->max_pages_per_seq = (int32_t) safetensors_find(in->to->file, "page_table")->shape[2];
    ctm->page_table = data[0];
    ctm->seq_lens = data[1];
    ctm->sinks = data[2];
    ctm->skip_softmax_scale_table = data[3];
    if (!data[3]) return 0;
    const struct safetensors_tensor *const skip = safetensors_find(in->to->file, SKIP_TABLE);
    if (skip->shape[0] % 2) return refuse_shape(in, skip, "two int32 for each pair");
    ctm->skip_softmax_scale_table_length = (int32_t) skip->shape[0];
    return 0;
}

static int read_ctm_scalars(const struct reader *const in)
{
    struct attn_ctm_params *const ctm = &in->to->ctm;
    int result = read_float(in, "scale", 1.0f, &ctm->attention_scale);
    if (!result) result = read_float(in, "k_scale", 1.0f, &ctm->k_scale);
    if (!result) result = read_float(in, "v_scale", 1.0f, &ctm->v_scale);
    if (!result) result = read_count(in, "window", &ctm->sliding_window);
    if (!result) result = read_count(in, "contiguous_query_swa", &ctm->contiguous_query_swa);
    if (result || ctm->contiguous_query_swa <= 1) return result;
    return safetensors_fail(in->why, "%s: scalar 'contiguous_query_swa' is '%s'; it is 0 or 1",
                            in->to->file->name, find_scalar(in, "contiguous_query_swa"));
}

static int read_ctm(const struct reader *const in)
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
        send_warning(in, "tensor 'tree_mask' is ignored, as there is one query token a sequence");
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

static void warn_about_extras(const struct reader *const in)
{
    // In the order of enum case_op.
    static const char *const tensors[][14] = {
        { "q", "k_pool", "v_pool", "block_table", "seq_lens", "sinks", "tree_mask", "k_scales",
          "v_scales", "expected_o", "expected_lse", NULL },
        { "q", "kv_pool", "page_table", "seq_lens", "tree_mask", "sinks", SKIP_TABLE, "expected_o",
          NULL },
    };
    static const char *const keys[][14] = {
        { "format", "version", "op", "scale", "window", "softcap", "k_scale", "v_scale", "policy",
          NULL },
        { "format", "version", "op", "scale", "window", "contiguous_query_swa", "k_scale",
          "v_scale", NULL },
    };
    const char *key;
    json_t *value;
    const enum case_op op = in->to->op;
    for (size_t i = 0; i < in->to->file->num_tensors; i++)
        if (!is_listed(in->to->file->tensors[i].name, tensors[op]))
            send_warning(in, "tensor '%.80s' is not one of this operation's, and ignored",
                         in->to->file->tensors[i].name);
    json_object_foreach((json_t *) in->to->file->metadata, key,
                        value) if (!is_listed(key, keys[op]))
        send_warning(in, "scalar '%.80s' is not one of this operation's, and ignored", key);
}

static int check_identity(const struct reader *const in)
{
    static const char *const later[] = { "prefill", "tiled", NULL };
    const char *const format = find_scalar(in, "format"), *const version =
                                                              find_scalar(in, "version");
    const char *const op = find_scalar(in, "op"), *const name = in->to->file->name;
    if (!format || strcmp(format, "attn-case"))
        return safetensors_fail(in->why,
                                "%s: not a case file: __metadata__ has no format = attn-case",
                                name);
    if (!version || strcmp(version, "1"))
        return safetensors_fail(in->why, "%s: case file version '%s'; this program reads version 1",
                                name, version ? version : "(none)");
    if (!op) return safetensors_fail(in->why, "%s: scalar 'op' is missing", name);
    in->to->op = strcmp(op, "ctm") ? CASE_DECODE : CASE_CTM;
    if (!strcmp(op, case_op_name(in->to->op))) return 0;
    if (is_listed(op, later))
        return safetensors_fail(in->why, "%s: operation %s is not supported by this version", name,
                                op);
    return safetensors_fail(in->why, "%s: unknown operation '%s'", name, op);
}

static int read_case(const struct reader *const in)
{
    in->to->params = ATTN_DECODE_PARAMS_INIT;
    int result = check_identity(in);
    if (!result) result = in->to->op == CASE_CTM ? read_ctm(in) : read_decode(in);
    if (!result) result = read_all_expected(in);
    if (!result) warn_about_extras(in);
    if (result) case_free(in->to);
    return result;
}

int case_load(struct case_file *const loaded, const char *const path, const case_warn_fn warn,
              void *const user, char *const why)
{
    const struct reader in = { loaded, warn, user, why };
    memset(loaded, 0, sizeof(*loaded));
    const int result = safetensors_open(&loaded->file, path, why);
    return result ? result : read_case(&in);
}

int case_parse(struct case_file *const loaded, const char *const name, const void *const bytes,
               const size_t size, const case_warn_fn warn, void *const user, char *const why)
{
    const struct reader in = { loaded, warn, user, why };
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

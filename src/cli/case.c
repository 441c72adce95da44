/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/case.h"

#include "attn/splitk.h"

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

// What read_* share: the case, where sentences go.
struct reader {
    struct case_file *to;
    case_warn_fn warn;
    void *user;
    char *why;
};

size_t case_elements(const struct attn_decode_params *const params)
{
    return (size_t) params->batch * (size_t) params->num_q_heads * (size_t) params->head_dim;
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

static int read_query(const struct reader *const in)
{
    struct attn_decode_params *const params = &in->to->params;
    const int64_t extents[] = { -1, -1, -1, -1 };
    const struct safetensors_tensor *q = safetensors_find(in->to->file, "q");
    const int rank = q && q->rank == 4 ? 4 : 3;
    int result = find_tensor(in, "q", false, rank, extents, &q);
    if (!result) result = check_dtype(in, q, "BF16", "F16");
    if (result) return result;
    if (rank == 4 && q->shape[1] != 1)
        return safetensors_fail(in->why,
                                "%s: tensor 'q' has %" PRId64 " query tokens a sequence; only 1 "
                                "is supported by this version",
                                in->to->file->name, q->shape[1]);
    if (safetensors_find(in->to->file, "tree_mask"))
        return safetensors_fail(in->why,
                                "%s: tensor 'tree_mask': trees are not supported by this version",
                                in->to->file->name);
    if (q->shape[rank - 2] < 1 || q->shape[rank - 1] < 1)
        return refuse_shape(in, q, "at least one head of at least one element");
    in->to->has_query_axis = rank == 4;
    params->q_dtype = strcmp(q->dtype, "BF16") ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16;
    params->batch = (int32_t) q->shape[0];
    params->num_q_heads = (int32_t) q->shape[rank - 2];
    params->head_dim = (int32_t) q->shape[rank - 1];
    params->q_stride = (int64_t) params->num_q_heads * params->head_dim;
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
    if (in->to->has_query_axis) extents[rank++] = 1;
    extents[rank++] = params->num_q_heads;
    extents[rank] = params->head_dim;
    const int result = read_expected(in, "expected_o", rank + 1, extents, &in->to->expected_o);
    return result ? result
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

static bool is_listed(const char *const name, const char *const *const list)
{
    for (size_t i = 0; list[i]; i++)
        if (!strcmp(name, list[i])) return true;
    return false;
}

static void warn_about_extras(const struct reader *const in)
{
    static const char *const tensors[] = { "q",          "k_pool",       "v_pool",   "block_table",
                                           "seq_lens",   "sinks",        "k_scales", "v_scales",
                                           "expected_o", "expected_lse", NULL };
    static const char *const keys[] = { "format",  "version", "op",      "scale",  "window",
                                        "softcap", "k_scale", "v_scale", "policy", NULL };
    const char *key;
    json_t *value;
    for (size_t i = 0; i < in->to->file->num_tensors; i++)
        if (!is_listed(in->to->file->tensors[i].name, tensors))
            send_warning(in, "tensor '%.80s' is not one of this operation's, and ignored",
                         in->to->file->tensors[i].name);
    json_object_foreach((json_t *) in->to->file->metadata, key, value) if (!is_listed(key, keys))
        send_warning(in, "scalar '%.80s' is not one of this operation's, and ignored", key);
}

static int check_identity(const struct reader *const in)
{
    static const char *const later[] = { "ctm", "prefill", "tiled", NULL };
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
    if (!strcmp(op, "decode")) return 0;
    if (is_listed(op, later))
        return safetensors_fail(in->why, "%s: operation %s is not supported by this version", name,
                                op);
    return safetensors_fail(in->why, "%s: unknown operation '%s'", name, op);
}

static int read_case(const struct reader *const in)
{
    in->to->params = ATTN_DECODE_PARAMS_INIT;
    int result = check_identity(in);
    if (!result) result = read_query(in);
    if (!result) result = read_pools(in);
    if (!result) result = read_tables(in);
    if (!result) result = read_scalars(in);
    if (!result) result = read_all_expected(in);
    // Under policy legacy the file's own batch is the largest there is.
    in->to->params.max_decode_seqs = in->to->params.batch;
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

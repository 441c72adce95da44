/* SPDX-License-Identifier: Apache-2.0 */
#include "decode_check.h"

#include "buffers.h"
#include "device.h"
#include "status.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define MIN_HEAD_DIM 16
#define MAX_HEAD_DIM 512
#define ROW_ALIGNMENT 16
#define WORKSPACE_ALIGNMENT 256

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

static enum attn_status check_types(const struct attn_device *const device,
                                    const struct attn_decode_shape *const shape)
{
    const enum attn_dtype q = shape->q_dtype, kv = shape->kv_dtype;
    REQUIRE(q == ATTN_DTYPE_BF16 || q == ATTN_DTYPE_FP16,
            "q_dtype is %d (%s): q has to be bf16 or fp16", (int) q, attn_dtype_name(q));
    REQUIRE(kv == q || kv == ATTN_DTYPE_E4M3,
            "kv_dtype is %d (%s): the pools have to be of q's type, here %s, or e4m3", (int) kv,
            attn_dtype_name(kv), attn_dtype_name(q));
    return ATTN_OK;
}

static enum attn_status check_heads(const struct attn_device *const device,
                                    const struct attn_decode_shape *const shape)
{
    REQUIRE(shape->num_q_heads >= 1, "num_q_heads is %d: it has to be at least 1",
            shape->num_q_heads);
    REQUIRE(shape->num_kv_heads >= 1, "num_kv_heads is %d: it has to be at least 1",
            shape->num_kv_heads);
    REQUIRE(shape->num_q_heads % shape->num_kv_heads == 0,
            "num_q_heads is %d, num_kv_heads %d: the first has to be a multiple of the second",
            shape->num_q_heads, shape->num_kv_heads);
    REQUIRE(shape->head_dim >= MIN_HEAD_DIM && shape->head_dim <= MAX_HEAD_DIM &&
                shape->head_dim % MIN_HEAD_DIM == 0,
            "head_dim is %d: it has to be a multiple of %d in %d..%d", shape->head_dim,
            MIN_HEAD_DIM, MIN_HEAD_DIM, MAX_HEAD_DIM);
    return ATTN_OK;
}

enum attn_status attn_decode_check_shape(const struct attn_device *const device,
                                         const struct attn_decode_shape *const shape)
{
    enum attn_status status = check_types(device, shape);
    if (status == ATTN_OK) status = check_heads(device, shape);
    if (status != ATTN_OK) return status;
    REQUIRE(shape->batch >= 0, "batch is %d: it may not be negative", shape->batch);
    REQUIRE(shape->q_len >= 1 && shape->q_len <= ATTN_DECODE_MAX_Q_LEN,
            "q_len is %d: it has to be in 1..%d", shape->q_len, ATTN_DECODE_MAX_Q_LEN);
    REQUIRE(shape->has_skip_table == 0 || shape->has_skip_table == 1,
            "has_skip_table is %d: it has to be 0 or 1", shape->has_skip_table);
    REQUIRE(!shape->has_skip_table || shape->q_len == 1,
            "there is a skip_table (has_skip_table is 1), but q_len is %d: skip-softmax is for 1 "
            "query token a sequence",
            shape->q_len);
    REQUIRE(shape->page_size >= 1, "page_size is %d: it has to be at least 1", shape->page_size);
    // A batch of 0 may have no table, and no pool.
    REQUIRE(shape->max_pages_per_seq >= (shape->batch > 0),
            "max_pages_per_seq is %d: it has to be at least %d", shape->max_pages_per_seq,
            shape->batch > 0);
    REQUIRE(shape->window >= 0, "window is %d: it has to be 0 (all keys) or positive",
            shape->window);
    REQUIRE(
        device->info.splitk_policy.kind != ATTN_SPLITK_LEGACY ||
            shape->max_decode_seqs >= shape->batch,
        "max_decode_seqs is %d, batch %d: under the split-K policy legacy it has to be at least "
        "batch, as bits depend on it",
        shape->max_decode_seqs, shape->batch);
    return ATTN_OK;
}

static enum attn_status check_scalars(const struct attn_device *const device,
                                      const struct attn_decode_params *const params)
{
    REQUIRE(isfinite(params->scale), "scale is %g: it has to be finite", (double) params->scale);
    // Of a smaller one the reciprocal is infinite.
    REQUIRE(isfinite(params->softcap) && (params->softcap == 0 || params->softcap >= FLT_MIN),
            "softcap is %g: it has to be finite, and 0 (none) or at least %g",
            (double) params->softcap, (double) FLT_MIN);
    REQUIRE(!params->k_scales == !params->v_scales,
            "%s is NULL and %s is not: give both arrays or neither",
            params->k_scales ? "v_scales" : "k_scales", params->k_scales ? "k_scales" : "v_scales");
    if (params->k_scales) return ATTN_OK;
    REQUIRE(isfinite(params->k_scale), "k_scale is %g: it has to be finite",
            (double) params->k_scale);
    REQUIRE(isfinite(params->v_scale), "v_scale is %g: it has to be finite",
            (double) params->v_scale);
    return ATTN_OK;
}

static enum attn_status check_tokens(const struct attn_device *const device,
                                     const struct attn_decode_params *const params)
{
    const int32_t words = (params->q_len - 1) / 32 + 1;
    REQUIRE(!params->tree_mask || params->mask_words >= words,
            "mask_words is %d: a row of tree_mask has a bit for each of %d draft keys, at least %d "
            "words",
            params->mask_words, params->q_len, words);
    REQUIRE(params->window_form == ATTN_WINDOW_PER_TOKEN ||
                params->window_form == ATTN_WINDOW_SHARED,
            "window_form is %d: it has to be %d (per token) or %d (shared)", params->window_form,
            ATTN_WINDOW_PER_TOKEN, ATTN_WINDOW_SHARED);
    return ATTN_OK;
}

static enum attn_status check_tables(const struct attn_device *const device,
                                     const struct attn_decode_params *const params)
{
    const int32_t length = params->skip_table_length;
    REQUIRE(params->table_stride == 0 || params->table_stride >= params->max_pages_per_seq,
            "table_stride is %lld elements, smaller than a row, which has max_pages_per_seq = %d",
            (long long) params->table_stride, params->max_pages_per_seq);
    REQUIRE(!params->skip_table || length >= 2,
            "skip_table_length is %d: a skip_table has at least one pair, 2 int32", length);
    REQUIRE(!params->skip_table || length % 2 == 0,
            "skip_table_length is %d: it counts int32, two for each pair", length);
    return ATTN_OK;
}

static void fill_strides(struct attn_decode_params *const params)
{
    const int64_t token = (int64_t) params->num_kv_heads * params->head_dim;
    const int64_t page = attn_size_times(params->page_size, token);
    if (params->q_len == 1 || params->q_token_stride == 0)
        params->q_token_stride = (int64_t) params->num_q_heads * params->head_dim;
    if (params->q_stride == 0)
        params->q_stride = attn_size_times(params->q_len, params->q_token_stride);
    if (params->table_stride == 0) params->table_stride = params->max_pages_per_seq;
    if (!params->v_block_table) params->v_block_table = params->block_table;
    if (!params->k_page_stride && !params->k_token_stride && !params->k_head_stride) {
        params->k_page_stride = page;
        params->k_token_stride = token;
        params->k_head_stride = params->head_dim;
    }
    if (!params->v_page_stride && !params->v_token_stride && !params->v_head_stride) {
        params->v_page_stride = page;
        params->v_token_stride = token;
        params->v_head_stride = params->head_dim;
    }
}

static enum attn_status check_strides(const struct attn_device *const device,
                                      const struct attn_decode_params *const params)
{
    const int64_t q_row = (int64_t) params->num_q_heads * params->head_dim, row = params->head_dim;
    const size_t q_size = attn_dtype_size(params->q_dtype),
                 kv_size = attn_dtype_size(params->kv_dtype);
    const struct attn_stride strides[] = {
        { "q_token_stride", params->q_token_stride, q_row, q_size },
        { "q_stride", params->q_stride, q_row, q_size },
        { "k_page_stride", params->k_page_stride, row, kv_size },
        { "k_token_stride", params->k_token_stride, row, kv_size },
        { "k_head_stride", params->k_head_stride, row, kv_size },
        { "v_page_stride", params->v_page_stride, row, kv_size },
        { "v_token_stride", params->v_token_stride, row, kv_size },
        { "v_head_stride", params->v_head_stride, row, kv_size },
    };
    return attn_strides_check(device, strides, sizeof(strides) / sizeof(strides[0]));
}

static int64_t pool_bytes(const struct attn_decode_params *const params, const int64_t page,
                          const int64_t token, const int64_t head)
{
    int64_t elements = attn_size_times(params->num_pages - 1, page);
    elements = attn_size_plus(elements, attn_size_times(params->page_size - 1, token));
    elements = attn_size_plus(elements, attn_size_times(params->num_kv_heads - 1, head));
    elements = attn_size_plus(elements, params->head_dim);
    return attn_size_times(elements, (int64_t) attn_dtype_size(params->kv_dtype));
}

#define NUM_BUFFERS 16
// Its index among them.
#define COUNTERS 15

static void list_buffers(const struct attn_decode_params *const params,
                         struct attn_buffer buffers[NUM_BUFFERS])
{
    const int64_t batch = params->batch, tokens = attn_size_times(batch, params->q_len);
    const int64_t q_size = (int64_t) attn_dtype_size(params->q_dtype), word = 4;
    const int64_t q_row = (int64_t) params->num_q_heads * params->head_dim;
    const int64_t q_tokens =
        attn_size_plus(attn_size_times(params->q_len - 1, params->q_token_stride), q_row);
    const int64_t q_bytes =
        attn_size_times(attn_size_plus(attn_size_times(batch - 1, params->q_stride), q_tokens),
                        q_size);
    const int64_t o_bytes = attn_size_times(attn_size_times(tokens, q_row), q_size);
    const int64_t k_bytes =
        pool_bytes(params, params->k_page_stride, params->k_token_stride, params->k_head_stride);
    const int64_t v_bytes =
        pool_bytes(params, params->v_page_stride, params->v_token_stride, params->v_head_stride);
    const int64_t table_words =
        attn_size_plus(attn_size_times(batch - 1, params->table_stride), params->max_pages_per_seq);
    const int64_t table_bytes = attn_size_times(table_words, word);
    const int64_t mask_bytes =
        params->tree_mask ? attn_size_times(attn_size_times(tokens, params->mask_words), word) : 0;
    const int64_t skip_bytes = params->skip_table ? params->skip_table_length * word : 0;
    const int64_t lse_bytes = attn_size_times(attn_size_times(tokens, params->num_q_heads), word);
    const int64_t scales_bytes = params->num_kv_heads * word;
    const int64_t sinks_bytes = params->num_q_heads * word;
    const struct attn_buffer all[NUM_BUFFERS] = {
        { "q", params->q, q_bytes, ROW_ALIGNMENT, true, false },
        { "o", params->o, o_bytes, ROW_ALIGNMENT, true, true },
        { "k_pool", params->k_pool, k_bytes, ROW_ALIGNMENT, true, false },
        { "v_pool", params->v_pool, v_bytes, ROW_ALIGNMENT, true, false },
        { "block_table", params->block_table, table_bytes, 4, true, false },
        { "v_block_table", params->v_block_table, table_bytes, 4, true, false },
        { "seq_lens", params->seq_lens, batch * word, 4, true, false },
        { "tree_mask", params->tree_mask, mask_bytes, 4, false, false },
        { "skip_table", params->skip_table, skip_bytes, 4, false, false },
        { "sinks", params->sinks, sinks_bytes, 4, false, false },
        { "lse", params->lse, lse_bytes, 4, false, true },
        { "k_scales", params->k_scales, scales_bytes, 4, false, false },
        { "v_scales", params->v_scales, scales_bytes, 4, false, false },
        { "fault", params->fault, word, 4, false, true },
        { "dropped_blocks", params->dropped_blocks, 2 * word, 8, false, true },
        { "counters", params->counters, 0, 4, false, true },
    };
    memcpy(buffers, all, sizeof(all));
}

enum attn_status attn_decode_check_params(const struct attn_device *const device,
                                          struct attn_decode_params *const params)
{
    enum attn_status status = check_scalars(device, params);
    if (status != ATTN_OK) return status;
    REQUIRE(params->num_pages >= (params->batch > 0) && params->num_pages <= INT32_MAX,
            "num_pages is %lld: it has to be in %d..%d, as page ids are int32",
            (long long) params->num_pages, params->batch > 0, INT32_MAX);
    status = check_tokens(device, params);
    if (status == ATTN_OK) status = check_tables(device, params);
    if (status != ATTN_OK) return status;
    fill_strides(params);
    status = check_strides(device, params);
    // Nothing will be read or written: the pointers don't matter.
    if (status != ATTN_OK || params->batch == 0) return status;
    struct attn_buffer buffers[NUM_BUFFERS];
    list_buffers(params, buffers);
    return attn_buffers_check(device, buffers, NUM_BUFFERS);
}

enum attn_status attn_decode_check_workspace(const struct attn_device *const device,
                                             const struct attn_decode_params *const params,
                                             const size_t needed, const int32_t num_counters)
{
    REQUIRE(params->counters || num_counters == 0,
            "counters is NULL: this call needs %d of them (attn_decode_counters tells)",
            num_counters);
    REQUIRE(params->workspace || needed == 0, "workspace is NULL: this call needs %zu bytes",
            needed);
    REQUIRE(needed == 0 || (uintptr_t) params->workspace % WORKSPACE_ALIGNMENT == 0,
            "workspace is %p: it has to be aligned to %d bytes", params->workspace,
            WORKSPACE_ALIGNMENT);
    REQUIRE(needed == 0 || params->workspace_bytes >= needed,
            "workspace_bytes is %zu: this call needs %zu (attn_decode_workspace tells)",
            params->workspace_bytes, needed);
    REQUIRE((uintptr_t) params->workspace <= UINTPTR_MAX - needed,
            "workspace is %p: there are no %zu bytes from there on", params->workspace, needed);
    // Nothing will be read or written, and nothing has a size.
    if (params->batch == 0) return ATTN_OK;
    struct attn_buffer buffers[NUM_BUFFERS + 1];
    list_buffers(params, buffers);
    buffers[COUNTERS].bytes = (int64_t) num_counters * (int64_t) sizeof(*params->counters);
    buffers[NUM_BUFFERS] =
        (struct attn_buffer){ "workspace", params->workspace, (int64_t) needed, 1, false, true };
    return attn_buffers_check(device, buffers, NUM_BUFFERS + 1);
}

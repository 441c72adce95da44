/* SPDX-License-Identifier: Apache-2.0 */
#include "prefill_check.h"

#include "buffers.h"
#include "device.h"
#include "kernels/prefill/prefill_params.h"
#include "status.h"

#include <float.h>
#include <math.h>

#define MIN_HEAD_DIM 16
#define MAX_HEAD_DIM 512
#define ROW_ALIGNMENT 16
#define WORKSPACE_ALIGNMENT 256
// Of BF16 and FP16.
#define ELEMENT_BYTES 2

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

enum attn_status attn_prefill_check_layout(const struct attn_device *const device,
                                           const struct attn_prefill_params *const params,
                                           const char *const name, const bool paged)
{
    REQUIRE(params->block_table || !paged,
            "block_table is NULL: %s reads pages, contiguous K and V are for the entries without "
            "'paged' in their names",
            name);
    REQUIRE(!params->block_table || paged,
            "block_table is not NULL: %s reads contiguous K and V, pages are for the entries with "
            "'paged' in their names",
            name);
    const struct {
        const char *name;
        const void *array;
    } ragged[] = {
        { "cu_seqlens", params->cu_seqlens },
        { "kv_lens", params->kv_lens },
        { "q_offsets", params->q_offsets },
        { "kv_starts", params->kv_starts },
    };
    for (size_t i = 0; i < sizeof(ragged) / sizeof(ragged[0]); i++)
        REQUIRE(!ragged[i].array,
                "%s is not NULL: %s takes sequences of one length, attn_prefill those that differ",
                ragged[i].name, name);
    return ATTN_OK;
}

static int64_t count_tokens(const struct attn_prefill_params *const params)
{
    return params->cu_seqlens ? params->num_tokens : (int64_t) params->batch * params->q_len;
}

bool attn_prefill_is_empty(const struct attn_prefill_params *const params)
{
    return params->batch == 0 || count_tokens(params) == 0;
}

int64_t attn_prefill_kv_tokens(const struct attn_prefill_params *const params)
{
    return params->kv_starts ? params->num_kv_tokens : (int64_t) params->batch * params->kv_len;
}

static enum attn_status check_heads(const struct attn_device *const device,
                                    const struct attn_prefill_params *const params)
{
    const enum attn_dtype dtype = params->dtype;
    REQUIRE(dtype == ATTN_DTYPE_BF16 || dtype == ATTN_DTYPE_FP16,
            "dtype is %d (%s): it has to be bf16 or fp16", (int) dtype, attn_dtype_name(dtype));
    REQUIRE(params->num_q_heads >= 1, "num_q_heads is %d: it has to be at least 1",
            params->num_q_heads);
    REQUIRE(params->num_kv_heads >= 1, "num_kv_heads is %d: it has to be at least 1",
            params->num_kv_heads);
    REQUIRE(params->num_q_heads % params->num_kv_heads == 0,
            "num_q_heads is %d, num_kv_heads %d: the first has to be a multiple of the second",
            params->num_q_heads, params->num_kv_heads);
    REQUIRE(params->head_dim >= MIN_HEAD_DIM && params->head_dim <= MAX_HEAD_DIM &&
                params->head_dim % MIN_HEAD_DIM == 0,
            "head_dim is %d: it has to be a multiple of %d in %d..%d", params->head_dim,
            MIN_HEAD_DIM, MIN_HEAD_DIM, MAX_HEAD_DIM);
    return ATTN_OK;
}

static enum attn_status check_scalars(const struct attn_device *const device,
                                      const struct attn_prefill_params *const params)
{
    REQUIRE(params->causal == 0 || params->causal == 1, "causal is %d: it has to be 0 or 1",
            params->causal);
    REQUIRE(params->window >= 0, "window is %d: it has to be 0 (all keys) or positive",
            params->window);
    REQUIRE(isfinite(params->scale), "scale is %g: it has to be finite", (double) params->scale);
    // Of a smaller one the reciprocal is infinite.
    REQUIRE(isfinite(params->softcap) && (params->softcap == 0 || params->softcap >= FLT_MIN),
            "softcap is %g: it has to be finite, and 0 (none) or at least %g",
            (double) params->softcap, (double) FLT_MIN);
    return ATTN_OK;
}

static enum attn_status check_lengths(const struct attn_device *const device,
                                      const struct attn_prefill_params *const params)
{
    const bool one_capacity = !params->block_table && !params->kv_starts;
    REQUIRE(!params->block_table || !params->kv_starts,
            "kv_starts and block_table are both given: keys are contiguous or paged");
    REQUIRE(params->batch >= 0, "batch is %d: it may not be negative", params->batch);
    REQUIRE(params->cu_seqlens || params->q_len >= 0, "q_len is %d: it may not be negative",
            params->q_len);
    REQUIRE(!params->cu_seqlens || params->num_tokens >= 0,
            "num_tokens is %d: it may not be negative", params->num_tokens);
    REQUIRE((params->kv_lens && !one_capacity) || params->kv_len >= 0,
            "kv_len is %d: it may not be negative", params->kv_len);
    REQUIRE(!params->kv_starts || params->num_kv_tokens >= 0,
            "num_kv_tokens is %d: it may not be negative", params->num_kv_tokens);
    REQUIRE(!params->kv_starts || params->kv_lens || params->kv_len <= params->num_kv_tokens,
            "kv_len is %d, num_kv_tokens %d: a sequence has no more keys than there are tokens",
            params->kv_len, params->num_kv_tokens);
    return ATTN_OK;
}

static enum attn_status check_pages(const struct attn_device *const device,
                                    const struct attn_prefill_params *const params)
{
    if (!params->block_table) return ATTN_OK;
    const int64_t most = (int64_t) params->max_pages_per_seq * params->page_size;
    REQUIRE(params->page_size >= 1, "page_size is %d: it has to be at least 1", params->page_size);
    REQUIRE(params->max_pages_per_seq >= 1, "max_pages_per_seq is %d: it has to be at least 1",
            params->max_pages_per_seq);
    REQUIRE(params->num_pages >= 1 && params->num_pages <= INT32_MAX,
            "num_pages is %lld: it has to be in 1..%d, as page ids are int32",
            (long long) params->num_pages, INT32_MAX);
    REQUIRE(params->table_stride == 0 || params->table_stride >= params->max_pages_per_seq,
            "table_stride is %lld elements, smaller than a row, which has max_pages_per_seq = %d",
            (long long) params->table_stride, params->max_pages_per_seq);
    REQUIRE(params->kv_lens || params->kv_len <= most,
            "kv_len is %d: %d pages of %d tokens hold no more than %lld keys", params->kv_len,
            params->max_pages_per_seq, params->page_size, (long long) most);
    return ATTN_OK;
}

static void fill_strides(struct attn_prefill_params *const params)
{
    const int64_t token = (int64_t) params->num_kv_heads * params->head_dim;
    const int64_t page = params->block_table ? attn_size_times(params->page_size, token) : 0;
    if (params->q_token_stride == 0)
        params->q_token_stride = (int64_t) params->num_q_heads * params->head_dim;
    if (params->table_stride == 0) params->table_stride = params->max_pages_per_seq;
    if (!params->block_table) params->k_page_stride = params->v_page_stride = 0;
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
                                      const struct attn_prefill_params *const params)
{
    const int64_t q_row = (int64_t) params->num_q_heads * params->head_dim, row = params->head_dim;
    // Contiguous keys have no pages.
    const int64_t page_row = params->block_table ? row : 0;
    const struct attn_stride strides[] = {
        { "q_token_stride", params->q_token_stride, q_row, ELEMENT_BYTES },
        { "k_page_stride", params->k_page_stride, page_row, ELEMENT_BYTES },
        { "k_token_stride", params->k_token_stride, row, ELEMENT_BYTES },
        { "k_head_stride", params->k_head_stride, row, ELEMENT_BYTES },
        { "v_page_stride", params->v_page_stride, page_row, ELEMENT_BYTES },
        { "v_token_stride", params->v_token_stride, row, ELEMENT_BYTES },
        { "v_head_stride", params->v_head_stride, row, ELEMENT_BYTES },
    };
    return attn_strides_check(device, strides, sizeof(strides) / sizeof(strides[0]));
}

// Of k or v, with these strides.
static int64_t kv_bytes(const struct attn_prefill_params *const params, const int64_t page,
                        const int64_t token, const int64_t head)
{
    const bool paged = params->block_table;
    const int64_t tokens = paged ? params->page_size : attn_prefill_kv_tokens(params);
    if (tokens == 0) return 0;
    int64_t elements = paged ? attn_size_times(params->num_pages - 1, page) : 0;
    elements = attn_size_plus(elements, attn_size_times(tokens - 1, token));
    elements = attn_size_plus(elements, attn_size_times(params->num_kv_heads - 1, head));
    elements = attn_size_plus(elements, params->head_dim);
    return attn_size_times(elements, ELEMENT_BYTES);
}

static int64_t table_bytes(const struct attn_prefill_params *const params)
{
    if (!params->block_table) return 0;
    const int64_t rows = attn_size_times(params->batch - 1, params->table_stride);
    return attn_size_times(attn_size_plus(rows, params->max_pages_per_seq), 4);
}

// Without the workspace if `needed` is 0, and without the counters if their number is.
static enum attn_status check_buffers(const struct attn_device *const device,
                                      const struct attn_prefill_params *const params,
                                      const size_t needed, const int32_t num_counters)
{
    const int64_t tokens = count_tokens(params), word = 4, batch = params->batch;
    const int64_t q_row = (int64_t) params->num_q_heads * params->head_dim;
    const int64_t q_elements =
        attn_size_plus(attn_size_times(tokens - 1, params->q_token_stride), q_row);
    const int64_t o_elements = attn_size_times(tokens, q_row);
    const int64_t lse_elements = attn_size_times(tokens, params->num_q_heads);
    const int64_t k_bytes =
        kv_bytes(params, params->k_page_stride, params->k_token_stride, params->k_head_stride);
    const int64_t v_bytes =
        kv_bytes(params, params->v_page_stride, params->v_token_stride, params->v_head_stride);
    const bool has_keys = k_bytes > 0;
    const struct attn_buffer buffers[] = {
        { "q", params->q, attn_size_times(q_elements, ELEMENT_BYTES), ROW_ALIGNMENT, true, false },
        { "o", params->o, attn_size_times(o_elements, ELEMENT_BYTES), ROW_ALIGNMENT, true, true },
        { "k", params->k, k_bytes, ROW_ALIGNMENT, has_keys, false },
        { "v", params->v, v_bytes, ROW_ALIGNMENT, has_keys, false },
        { "block_table", params->block_table, table_bytes(params), 4, false, false },
        { "cu_seqlens", params->cu_seqlens, (batch + 1) * word, 4, false, false },
        { "kv_lens", params->kv_lens, batch * word, 4, false, false },
        { "q_offsets", params->q_offsets, batch * word, 4, false, false },
        { "kv_starts", params->kv_starts, batch * word, 4, false, false },
        { "sinks", params->sinks, params->num_q_heads * word, 4, false, false },
        { "lse", params->lse, attn_size_times(lse_elements, word), 4, false, true },
        { "fault", params->fault, word, 4, false, true },
        { "counters", num_counters > 0 ? params->counters : NULL, num_counters * word, 4, false,
          true },
        { "workspace", needed > 0 ? params->workspace : NULL, (int64_t) needed, 1, false, true },
    };
    return attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
}

enum attn_status attn_prefill_check_params(const struct attn_device *const device,
                                           struct attn_prefill_params *const params)
{
    enum attn_status status = check_heads(device, params);
    if (status == ATTN_OK) status = check_scalars(device, params);
    if (status == ATTN_OK) status = check_lengths(device, params);
    if (status == ATTN_OK) status = check_pages(device, params);
    if (status != ATTN_OK) return status;
    fill_strides(params);
    status = check_strides(device, params);
    // Nothing will be read or written: the pointers don't matter.
    if (status != ATTN_OK || attn_prefill_is_empty(params)) return status;
    return check_buffers(device, params, 0, 0);
}

enum attn_status attn_prefill_check_workspace(const struct attn_device *const device,
                                              const struct attn_prefill_params *const params,
                                              const size_t needed, const int32_t num_counters)
{
    REQUIRE((uintptr_t) params->workspace % WORKSPACE_ALIGNMENT == 0,
            "workspace is %p: it has to be aligned to %d bytes", params->workspace,
            WORKSPACE_ALIGNMENT);
    REQUIRE(params->workspace_bytes >= needed,
            "workspace_bytes is %zu: this call needs %zu (attn_prefill_workspace tells)",
            params->workspace_bytes, needed);
    REQUIRE(params->counters,
            "counters is NULL: a call with a workspace needs %d of them (attn_prefill_counters "
            "tells)",
            num_counters);
    return check_buffers(device, params, needed, num_counters);
}

enum attn_status attn_prefill_check_shape(const struct attn_device *const device,
                                          const struct attn_prefill_shape *const shape)
{
    static const int32_t some_seqlens[1];
    struct attn_prefill_params params = ATTN_PREFILL_PARAMS_INIT;
    params.dtype = shape->dtype;
    params.batch = shape->batch;
    params.q_len = shape->q_len;
    params.kv_len = shape->is_ragged ? 0 : shape->kv_len;
    params.q_offset = shape->q_offset;
    params.num_q_heads = shape->num_q_heads;
    params.num_kv_heads = shape->num_kv_heads;
    params.head_dim = shape->head_dim;
    params.causal = shape->causal;
    params.window = shape->window;
    params.num_tokens = shape->num_tokens;
    params.cu_seqlens = shape->is_ragged ? some_seqlens : NULL;
    REQUIRE(shape->is_ragged == 0 || shape->is_ragged == 1, "is_ragged is %d: it has to be 0 or 1",
            shape->is_ragged);
    REQUIRE(shape->rows == 0 || shape->rows == ATTN_PREFILL_ROWS ||
                shape->rows == ATTN_PREFILL_TWIN_ROWS,
            "rows is %d: it has to be 0 (as attn_prefill), %d or %d", shape->rows,
            ATTN_PREFILL_ROWS, ATTN_PREFILL_TWIN_ROWS);
    REQUIRE(shape->page_size >= 0, "page_size is %d: it has to be 0 (no pages) or positive",
            shape->page_size);
    REQUIRE(shape->page_size == 0 || shape->max_pages_per_seq >= 1,
            "max_pages_per_seq is %d: it has to be at least 1", shape->max_pages_per_seq);
    enum attn_status status = check_heads(device, &params);
    if (status == ATTN_OK) status = check_scalars(device, &params);
    return status == ATTN_OK ? check_lengths(device, &params) : status;
}

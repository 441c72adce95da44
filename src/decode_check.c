/* SPDX-License-Identifier: Apache-2.0 */
#include "decode_check.h"

#include "device.h"
#include "status.h"

#include <math.h>
#include <string.h>

#define MIN_HEAD_DIM 16
#define MAX_HEAD_DIM 512
#define ROW_ALIGNMENT 16
#define WORKSPACE_ALIGNMENT 256

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

// Sums and products of sizes, none of them negative; they saturate.
static int64_t times(const int64_t a, const int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t plus(const int64_t a, const int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

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
    REQUIRE(shape->q_len >= 1, "q_len is %d: it has to be at least 1", shape->q_len);
    REQUIRE(shape->page_size >= 1, "page_size is %d: it has to be at least 1", shape->page_size);
    REQUIRE(shape->max_pages_per_seq >= 1, "max_pages_per_seq is %d: it has to be at least 1",
            shape->max_pages_per_seq);
    REQUIRE(shape->window >= 0, "window is %d: it has to be 0 (all keys) or positive",
            shape->window);
    REQUIRE(
        device->info.splitk_policy.kind != ATTN_SPLITK_LEGACY ||
            shape->max_decode_seqs >= shape->batch,
        "max_decode_seqs is %d, batch %d: under the split-K policy legacy it has to be at least "
        "batch, as bits depend on it",
        shape->max_decode_seqs, shape->batch);
    if (shape->q_len > 1)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                         "q_len is %d: decode takes 1 query token a sequence in this version",
                         shape->q_len);
    return ATTN_OK;
}

static enum attn_status check_scalars(const struct attn_device *const device,
                                      const struct attn_decode_params *const params)
{
    REQUIRE(isfinite(params->scale), "scale is %g: it has to be finite", (double) params->scale);
    REQUIRE(isfinite(params->softcap) && params->softcap >= 0,
            "softcap is %g: it has to be finite, and 0 (none) or positive",
            (double) params->softcap);
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

static void fill_strides(struct attn_decode_params *const params)
{
    const int64_t token = (int64_t) params->num_kv_heads * params->head_dim;
    const int64_t page = times(params->page_size, token);
    if (params->q_stride == 0) params->q_stride = (int64_t) params->num_q_heads * params->head_dim;
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
    const struct {
        const char *name;
        int64_t stride, least;
        size_t size;
    } strides[] = {
        { "q_stride", params->q_stride, q_row, q_size },
        { "k_page_stride", params->k_page_stride, row, kv_size },
        { "k_token_stride", params->k_token_stride, row, kv_size },
        { "k_head_stride", params->k_head_stride, row, kv_size },
        { "v_page_stride", params->v_page_stride, row, kv_size },
        { "v_token_stride", params->v_token_stride, row, kv_size },
        { "v_head_stride", params->v_head_stride, row, kv_size },
    };
    for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); i++) {
        const long long stride = strides[i].stride, least = strides[i].least;
        REQUIRE(stride >= 0, "%s is %lld: strides may not be negative", strides[i].name, stride);
        REQUIRE(stride >= least, "%s is %lld elements, smaller than a row, which has %lld",
                strides[i].name, stride, least);
        const int64_t unit = ROW_ALIGNMENT / (int64_t) strides[i].size;
        REQUIRE(stride % unit == 0,
                "%s is %lld elements: it has to be a multiple of %d bytes, here "
                "%lld elements",
                strides[i].name, stride, ROW_ALIGNMENT, (long long) unit);
    }
    return ATTN_OK;
}

// A buffer of the call.
struct buffer {
    const char *name;
    const void *start;
    int64_t bytes;
    size_t alignment;
    bool required;
    bool written;
};

static int64_t pool_bytes(const struct attn_decode_params *const params, const int64_t page,
                          const int64_t token, const int64_t head)
{
    int64_t elements = times(params->num_pages - 1, page);
    elements = plus(elements, times(params->page_size - 1, token));
    elements = plus(elements, times(params->num_kv_heads - 1, head));
    elements = plus(elements, params->head_dim);
    return times(elements, (int64_t) attn_dtype_size(params->kv_dtype));
}

#define NUM_BUFFERS 12
// Its index among them.
#define COUNTERS 11

static void list_buffers(const struct attn_decode_params *const params,
                         struct buffer buffers[NUM_BUFFERS])
{
    const int64_t batch = params->batch;
    const int64_t q_size = (int64_t) attn_dtype_size(params->q_dtype), word = 4;
    const int64_t q_row = (int64_t) params->num_q_heads * params->head_dim;
    const int64_t q_bytes = times(plus(times(batch - 1, params->q_stride), q_row), q_size);
    const int64_t o_bytes = times(times(batch, q_row), q_size);
    const int64_t k_bytes =
        pool_bytes(params, params->k_page_stride, params->k_token_stride, params->k_head_stride);
    const int64_t v_bytes =
        pool_bytes(params, params->v_page_stride, params->v_token_stride, params->v_head_stride);
    const int64_t table_bytes = times(batch * params->max_pages_per_seq, word);
    const int64_t lse_bytes = times(batch * params->num_q_heads, word);
    const int64_t scales_bytes = params->num_kv_heads * word;
    const int64_t sinks_bytes = params->num_q_heads * word;
    const struct buffer all[NUM_BUFFERS] = {
        { "q", params->q, q_bytes, ROW_ALIGNMENT, true, false },
        { "o", params->o, o_bytes, ROW_ALIGNMENT, true, true },
        { "k_pool", params->k_pool, k_bytes, ROW_ALIGNMENT, true, false },
        { "v_pool", params->v_pool, v_bytes, ROW_ALIGNMENT, true, false },
        { "block_table", params->block_table, table_bytes, 4, true, false },
        { "seq_lens", params->seq_lens, batch * word, 4, true, false },
        { "sinks", params->sinks, sinks_bytes, 4, false, false },
        { "lse", params->lse, lse_bytes, 4, false, true },
        { "k_scales", params->k_scales, scales_bytes, 4, false, false },
        { "v_scales", params->v_scales, scales_bytes, 4, false, false },
        { "fault", params->fault, word, 4, false, true },
        { "counters", params->counters, 0, 4, false, true },
    };
    memcpy(buffers, all, sizeof(all));
}

static bool overlap(const struct buffer *const a, const struct buffer *const b)
{
    if (!a->start || !b->start || a->bytes == 0 || b->bytes == 0) return false;
    const uintptr_t x = (uintptr_t) a->start, y = (uintptr_t) b->start;
    return x < y ? y - x < (uint64_t) a->bytes : x - y < (uint64_t) b->bytes;
}

static enum attn_status check_overlap(const struct attn_device *const device,
                                      const struct buffer *const buffers, const size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; buffers[i].written && j < count; j++)
            REQUIRE(
                i == j || !overlap(&buffers[i], &buffers[j]),
                "%s (%p, %lld bytes) overlaps %s (%p, %lld bytes): what is written needs memory of "
                "its own",
                buffers[i].name, buffers[i].start, (long long) buffers[i].bytes, buffers[j].name,
                buffers[j].start, (long long) buffers[j].bytes);
    }
    return ATTN_OK;
}

static enum attn_status check_buffers(const struct attn_device *const device,
                                      const struct attn_decode_params *const params)
{
    struct buffer buffers[NUM_BUFFERS];
    list_buffers(params, buffers);
    for (size_t i = 0; i < NUM_BUFFERS; i++) {
        const struct buffer *const buffer = &buffers[i];
        REQUIRE(buffer->start || !buffer->required, "%s is NULL", buffer->name);
        REQUIRE((uintptr_t) buffer->start % buffer->alignment == 0,
                "%s is %p: it has to be aligned to %zu bytes", buffer->name, buffer->start,
                buffer->alignment);
        REQUIRE(buffer->bytes < INT64_MAX,
                "%s would reach over more than 2^63 - 1 bytes: its sizes or strides are too large",
                buffer->name);
    }
    return check_overlap(device, buffers, NUM_BUFFERS);
}

enum attn_status attn_decode_check_params(const struct attn_device *const device,
                                          struct attn_decode_params *const params)
{
    enum attn_status status = check_scalars(device, params);
    if (status != ATTN_OK) return status;
    REQUIRE(params->num_pages >= 1 && params->num_pages <= INT32_MAX,
            "num_pages is %lld: it has to be in 1..%d, as page ids are int32",
            (long long) params->num_pages, INT32_MAX);
    fill_strides(params);
    status = check_strides(device, params);
    // Nothing will be read or written: the pointers don't matter.
    if (status != ATTN_OK || params->batch == 0) return status;
    return check_buffers(device, params);
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
    struct buffer buffers[NUM_BUFFERS + 1];
    list_buffers(params, buffers);
    buffers[COUNTERS].bytes = (int64_t) num_counters * (int64_t) sizeof(*params->counters);
    buffers[NUM_BUFFERS] = (struct buffer){
        "workspace", params->workspace, (int64_t) needed, WORKSPACE_ALIGNMENT, true, true
    };
    return check_overlap(device, buffers, NUM_BUFFERS + 1);
}

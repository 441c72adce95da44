/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/execute.h"

#include "host/ctm.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 256u

// Fills of what a call writes: NaN in every type, so that an element it leaves out shows.
#define POISON 0xFF

static void *alloc_aligned(const size_t bytes)
{
    return bytes > SIZE_MAX - ALIGNMENT
               ? NULL
               : aligned_alloc(ALIGNMENT, (bytes / ALIGNMENT + 1) * ALIGNMENT);
}

// A call of one of the operations. Of calls of ctm, tiled and swap, `decode` is what they are as one
// of decode: sizes of tensors are those of both.
struct call {
    enum case_op op;
    struct attn_decode_params decode;
    struct attn_ctm_params ctm;
    struct attn_prefill_params prefill;
    enum case_kernel kernel;
    struct case_tiled tiled;
    size_t workspace_bytes;
    int32_t num_counters;
};

// What a call writes.
struct outputs {
    void *o;
    float *lse;
    int32_t *fault;
    int64_t *dropped;
    void *workspace;
    int32_t *counters;
};

size_t execute_pool_bytes(const struct attn_decode_params *const params)
{
    return (size_t) params->num_pages * (size_t) params->k_page_stride *
           attn_dtype_size(params->kv_dtype);
}

struct execute_ctm_sizes execute_find_ctm_sizes(const struct attn_ctm_params *const p)
{
    const bool tree = p->q_len > 1;
    const int64_t floats =
        tree ? attn_ctm_tree_workspace_elems(p->batch_size, p->q_len, p->num_q_heads,
                                             p->num_kv_heads, p->head_dim)
             : attn_ctm_workspace_elems(p->batch_size, p->num_q_heads, p->head_dim);
    const int64_t semaphores = tree ? attn_ctm_tree_semaphore_elems(p->batch_size, p->q_len,
                                                                    p->num_q_heads, p->num_kv_heads)
                                    : attn_ctm_semaphore_elems(p->batch_size, p->num_kv_heads);
    if (floats < 0 || semaphores < 0) return (struct execute_ctm_sizes){ 0, 0 };
    return (struct execute_ctm_sizes){ (size_t) floats * sizeof(float), (int32_t) semaphores };
}

static void set_outputs(struct call *const call, const struct outputs *const to)
{
    call->decode.o = call->ctm.output = call->prefill.o = to->o;
    call->decode.lse = call->prefill.lse = to->lse;
    call->decode.fault = call->ctm.fault = call->prefill.fault = to->fault;
    call->decode.dropped_blocks = call->ctm.dropped_pages = to->dropped;
    call->decode.workspace = call->workspace_bytes ? to->workspace : NULL;
    call->decode.workspace_bytes = call->workspace_bytes;
    call->ctm.workspace = call->prefill.workspace = call->decode.workspace;
    call->prefill.workspace_bytes = call->workspace_bytes;
    call->decode.counters = call->ctm.semaphores = call->num_counters ? to->counters : NULL;
    call->prefill.counters = call->decode.counters;
}

enum attn_status execute_prefill_enqueue(struct attn_device *const device,
                                         const struct attn_prefill_params *const params,
                                         const enum case_kernel kernel, const attn_stream stream)
{
    const bool paged = params->block_table;
    if (kernel == CASE_KERNEL_AUTO) return attn_prefill(device, params, stream);
    if (kernel == CASE_KERNEL_64)
        return paged ? attn_prefill_paged_64(device, params, stream)
                     : attn_prefill_64(device, params, stream);
    return paged ? attn_prefill_fa128_paged(device, params, stream)
                 : attn_prefill_fa128(device, params, stream);
}

static enum attn_status enqueue(struct attn_device *const device, struct gpu *const gpu,
                                struct call *const call, const attn_stream stream)
{
    if (call->op == CASE_PREFILL)
        return execute_prefill_enqueue(device, &call->prefill, call->kernel, stream);
    if (call->op == CASE_TILED)
        return execute_tiled_run(device, gpu, &call->decode, &call->tiled, stream);
    if (call->op == CASE_SWAP)
        return execute_swap_run(device, gpu, &call->decode, &call->tiled, stream);
    call->ctm.stream = stream;
    return call->op == CASE_CTM ? attn_ctm_run(device, &call->ctm)
                                : attn_decode(device, &call->decode, stream);
}

static size_t count_prefill_rows(const struct attn_prefill_params *const params)
{
    const size_t tokens = params->cu_seqlens ? (size_t) params->num_tokens
                                             : (size_t) params->batch * (size_t) params->q_len;
    return tokens * (size_t) params->num_q_heads;
}

static size_t count_o_bytes(const struct call *const call)
{
    if (call->op == CASE_PREFILL)
        return count_prefill_rows(&call->prefill) * (size_t) call->prefill.head_dim *
               attn_dtype_size(call->prefill.dtype);
    return case_elements(&call->decode) * attn_dtype_size(call->decode.q_dtype);
}

static size_t count_lse_bytes(const struct call *const call)
{
    if (call->op == CASE_PREFILL) return count_prefill_rows(&call->prefill) * sizeof(float);
    return call->op == CASE_CTM ? 0 : case_rows(&call->decode) * sizeof(float);
}

static enum attn_status fail_memory(char *const why, const size_t why_size)
{
    snprintf(why, why_size, "out of host memory");
    return ATTN_ERROR_NO_MEMORY;
}

static enum attn_status fail_driver(const int code, char *const why, const size_t why_size)
{
    // 2: the driver's own "out of memory".
    if (code == 2)
        snprintf(why, why_size, "out of GPU memory");
    else
        snprintf(why, why_size, "the CUDA driver failed with error %d", code);
    return code == 2 ? ATTN_ERROR_NO_MEMORY : ATTN_ERROR_DRIVER;
}

static enum attn_status fail_library(const enum attn_status status, char *const why,
                                     const size_t why_size)
{
    // Only the program itself runs out of memory, or fails at the driver, without a sentence.
    const bool is_own = !*attn_last_error();
    if (status == ATTN_ERROR_NO_MEMORY && is_own) return fail_memory(why, why_size);
    snprintf(why, why_size, "%s",
             status == ATTN_DECLINED ? "the kernel of 128 query tokens declines this call"
             : status == ATTN_ERROR_DRIVER && is_own ? "the CUDA driver failed"
                                                     : attn_last_error());
    return status;
}

static enum attn_status run_on_host(struct attn_device *const device, struct call *const call,
                                    struct execution *const result, char *const why,
                                    const size_t why_size)
{
    void *const workspace = alloc_aligned(call->workspace_bytes);
    int32_t *const counters = calloc((size_t) call->num_counters + 1, sizeof(*counters));
    enum attn_status status = ATTN_ERROR_NO_MEMORY;
    if (!workspace || !counters) {
        fail_memory(why, why_size);
        goto out;
    }
    set_outputs(call, &(struct outputs){ result->o, result->lse, &result->fault, &result->dropped,
                                         workspace, counters });
    status = enqueue(device, NULL, call, NULL);
    if (status != ATTN_OK) fail_library(status, why, why_size);
out:
    free(workspace);
    free(counters);
    return status;
}

// What a call needs on the GPU: up to this many buffers.
#define MAX_BUFFERS 16

struct buffers {
    struct gpu *gpu;
    void *pointers[MAX_BUFFERS];
    int count;
    // Of the first driver call that failed.
    int error;
};

// A buffer with `bytes` of `from`, or filled with `byte` where that is NULL.
static void *make_buffer(struct buffers *const all, const void *const from, const int byte,
                         const size_t bytes)
{
    void *pointer = NULL;
    if (all->error) return NULL;
    all->error = gpu_alloc(all->gpu, &pointer, bytes);
    if (all->error) return NULL;
    all->pointers[all->count++] = pointer;
    all->error = from ? gpu_upload(all->gpu, pointer, from, bytes)
                      : gpu_fill(all->gpu, pointer, byte, bytes);
    return pointer;
}

// A copy; NULL stays NULL.
static void *upload(struct buffers *const all, const void *const from, const size_t bytes)
{
    return from ? make_buffer(all, from, 0, bytes) : NULL;
}

static void upload_decode(struct buffers *const all, struct attn_decode_params *const to)
{
    const size_t batch = (size_t) to->batch, word = sizeof(int32_t);
    const size_t pool = execute_pool_bytes(to), kv_heads = (size_t) to->num_kv_heads;
    const size_t mask = batch * (size_t) to->q_len * (size_t) to->mask_words;
    to->q = upload(all, to->q, case_elements(to) * attn_dtype_size(to->q_dtype));
    to->k_pool = upload(all, to->k_pool, pool);
    to->v_pool = upload(all, to->v_pool, pool);
    to->block_table = upload(all, to->block_table, batch * (size_t) to->max_pages_per_seq * word);
    to->seq_lens = upload(all, to->seq_lens, batch * word);
    to->tree_mask = upload(all, to->tree_mask, mask * word);
    to->skip_table = upload(all, to->skip_table, (size_t) to->skip_table_length * word);
    to->sinks = upload(all, to->sinks, (size_t) to->num_q_heads * sizeof(float));
    to->k_scales = upload(all, to->k_scales, kv_heads * sizeof(float));
    to->v_scales = upload(all, to->v_scales, kv_heads * sizeof(float));
}

static void upload_ctm(struct buffers *const all, const struct attn_decode_params *const decode,
                       struct attn_ctm_params *const to)
{
    const size_t batch = (size_t) to->batch_size, word = sizeof(int32_t);
    const size_t table = batch * 2 * (size_t) to->max_pages_per_seq;
    const size_t mask = batch * (size_t) to->q_len * (size_t) to->mask_words;
    to->q = upload(all, to->q, case_elements(decode) * attn_dtype_size(decode->q_dtype));
    to->kv_pool = upload(all, to->kv_pool, execute_pool_bytes(decode));
    to->page_table = upload(all, to->page_table, table * word);
    to->seq_lens = upload(all, to->seq_lens, batch * word);
    to->tree_mask = upload(all, to->tree_mask, mask * word);
    to->sinks = upload(all, to->sinks, (size_t) to->num_q_heads * sizeof(float));
    to->skip_softmax_scale_table = upload(all, to->skip_softmax_scale_table,
                                          (size_t) to->skip_softmax_scale_table_length * word);
}

static void upload_prefill(struct buffers *const all, struct attn_prefill_params *const to)
{
    const size_t batch = (size_t) to->batch, word = sizeof(int32_t);
    const size_t tokens = to->block_table ? (size_t) to->num_pages * (size_t) to->page_size
                                          : batch * (size_t) to->kv_len;
    const size_t element = attn_dtype_size(to->dtype);
    const size_t keys = tokens * (size_t) to->k_token_stride * element;
    to->q = upload(all, to->q, count_prefill_rows(to) * (size_t) to->head_dim * element);
    to->k = upload(all, to->k, keys);
    to->v = upload(all, to->v, keys);
    to->block_table = upload(all, to->block_table, batch * (size_t) to->table_stride * word);
    to->cu_seqlens = upload(all, to->cu_seqlens, (batch + 1) * word);
    to->kv_lens = upload(all, to->kv_lens, batch * word);
    to->q_offsets = upload(all, to->q_offsets, batch * word);
    to->sinks = upload(all, to->sinks, (size_t) to->num_q_heads * sizeof(float));
}

static void make_outputs(struct buffers *const all, const struct call *const call,
                         const struct execution *const result, struct outputs *const to)
{
    const size_t counters = (size_t) call->num_counters * sizeof(int32_t);
    to->o = make_buffer(all, NULL, POISON, count_o_bytes(call));
    to->lse = call->op == CASE_CTM ? NULL : make_buffer(all, NULL, POISON, count_lse_bytes(call));
    to->fault = make_buffer(all, &result->fault, 0, sizeof(result->fault));
    to->dropped = make_buffer(all, &result->dropped, 0, sizeof(result->dropped));
    to->workspace =
        call->workspace_bytes ? make_buffer(all, NULL, POISON, call->workspace_bytes) : NULL;
    to->counters = call->num_counters ? make_buffer(all, NULL, 0, counters) : NULL;
}

static int download(struct gpu *const gpu, const struct call *const call,
                    const struct outputs *const from, struct execution *const result)
{
    int error = gpu_download(gpu, result->o, from->o, count_o_bytes(call));
    if (!error && from->lse)
        error = gpu_download(gpu, result->lse, from->lse, count_lse_bytes(call));
    if (!error) error = gpu_download(gpu, &result->fault, from->fault, sizeof(result->fault));
    if (!error) error = gpu_download(gpu, &result->dropped, from->dropped, sizeof(result->dropped));
    return error;
}

static enum attn_status run_on_gpu(struct attn_device *const device, struct gpu *const gpu,
                                   struct call *const call, struct execution *const result,
                                   char *const why, const size_t why_size)
{
    struct buffers all = { .gpu = gpu };
    struct outputs outputs;
    attn_stream stream = NULL;
    enum attn_status status = ATTN_OK;
    if (call->op == CASE_PREFILL)
        upload_prefill(&all, &call->prefill);
    else if (call->op == CASE_CTM)
        upload_ctm(&all, &call->decode, &call->ctm);
    else if (call->op == CASE_SWAP)
        call->decode.q = upload(&all, call->decode.q, count_o_bytes(call));
    else
        upload_decode(&all, &call->decode);
    make_outputs(&all, call, result, &outputs);
    set_outputs(call, &outputs);
    if (!all.error) all.error = gpu_stream_create(gpu, &stream);
    if (!all.error) {
        status = enqueue(device, gpu, call, stream);
        if (status != ATTN_OK) fail_library(status, why, why_size);
    }
    if (!all.error && status == ATTN_OK) all.error = gpu_stream_sync(gpu, stream);
    if (!all.error && status == ATTN_OK) all.error = download(gpu, call, &outputs, result);
    if (all.error) status = fail_driver(all.error, why, why_size);
    gpu_stream_destroy(gpu, stream);
    for (int i = 0; i < all.count; i++) gpu_free(gpu, all.pointers[i]);
    return status;
}

static enum attn_status run_call(struct attn_device *const device, struct gpu *const gpu,
                                 struct call *const call, const char *const kernel,
                                 struct execution *const result, char *const why,
                                 const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    result->fault = INT32_MAX;
    result->kernel = kernel;
    result->o = alloc_aligned(count_o_bytes(call));
    result->lse = call->op == CASE_CTM ? NULL : alloc_aligned(count_lse_bytes(call));
    if (!result->o || (call->op != CASE_CTM && !result->lse))
        status = fail_memory(why, why_size);
    else
        // Rows that no sequence has stay so.
        memset(result->o, POISON, count_o_bytes(call));
    if (result->lse) memset(result->lse, POISON, count_lse_bytes(call));
    if (status == ATTN_OK && gpu)
        status = run_on_gpu(device, gpu, call, result, why, why_size);
    else if (status == ATTN_OK)
        status = run_on_host(device, call, result, why, why_size);
    if (status != ATTN_OK) execution_free(result);
    return status;
}

enum attn_status execute_decode(struct attn_device *const device, struct gpu *const gpu,
                                const struct attn_decode_params *const params,
                                struct execution *const result, char *const why,
                                const size_t why_size)
{
    struct call call = { .op = CASE_DECODE, .decode = *params };
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    memset(result, 0, sizeof(*result));
    const enum attn_status status = attn_decode_plan(device, &shape, &plan);
    if (status != ATTN_OK) return fail_library(status, why, why_size);
    call.workspace_bytes = plan.workspace_bytes;
    call.num_counters = plan.num_counters;
    return run_call(device, gpu, &call, plan.kernel, result, why, why_size);
}

enum attn_status execute_ctm(struct attn_device *const device, struct gpu *const gpu,
                             const struct attn_ctm_params *const params,
                             struct execution *const result, char *const why, const size_t why_size)
{
    struct call call = { .op = CASE_CTM, .decode = attn_reference_ctm(params), .ctm = *params };
    const struct attn_decode_shape shape = attn_decode_shape_of(&call.decode);
    const struct execute_ctm_sizes sizes = execute_find_ctm_sizes(params);
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    memset(result, 0, sizeof(*result));
    // For the kernel's name alone. What ctm does not serve, it says itself.
    if (attn_decode_plan(device, &shape, &plan) != ATTN_OK) plan.kernel = "";
    call.workspace_bytes = sizes.workspace_bytes;
    call.num_counters = sizes.num_semaphores;
    return run_call(device, gpu, &call, plan.kernel, result, why, why_size);
}

enum attn_status execute_prefill(struct attn_device *const device, struct gpu *const gpu,
                                 const struct attn_prefill_params *const params,
                                 const enum case_kernel kernel, struct execution *const result,
                                 char *const why, const size_t why_size)
{
    struct call call = { .op = CASE_PREFILL, .prefill = *params, .kernel = kernel };
    struct attn_prefill_shape shape = attn_prefill_shape_of(params);
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    memset(result, 0, sizeof(*result));
    shape.rows = kernel == CASE_KERNEL_AUTO ? 0 : kernel == CASE_KERNEL_64 ? 64 : 128;
    // For the kernel's name alone. What has none, the call says itself.
    if (attn_prefill_plan(device, &shape, &plan) != ATTN_OK)
        plan = (struct attn_prefill_plan){ .kernel = "" };
    call.workspace_bytes = plan.workspace_bytes;
    call.num_counters = plan.num_counters;
    if (!plan.kernel) plan.kernel = plan.short_kernel;
    result->short_kernel = plan.kernel != plan.short_kernel ? plan.short_kernel : NULL;
    return run_call(device, gpu, &call, plan.kernel, result, why, why_size);
}

enum attn_status execute_tiled(struct attn_device *const device, struct gpu *const gpu,
                               const struct attn_decode_params *const params,
                               const struct case_tiled *const tiled, struct execution *const result,
                               char *const why, const size_t why_size)
{
    struct call call = { .op = CASE_TILED, .decode = *params, .tiled = *tiled };
    const char *const kernel =
        gpu ? execute_tiled_kernel(device, params->q_dtype, params->head_dim) : "host executor";
    memset(result, 0, sizeof(*result));
    return run_call(device, gpu, &call, kernel, result, why, why_size);
}

enum attn_status execute_swap(struct attn_device *const device, struct gpu *const gpu,
                              const struct attn_decode_params *const params,
                              const struct case_tiled *const tiled, struct execution *const result,
                              char *const why, const size_t why_size)
{
    struct call call = { .op = CASE_SWAP, .decode = *params, .tiled = *tiled };
    const char *const kernel =
        gpu ? execute_tiled_kernel(device, params->q_dtype, params->head_dim) : "host executor";
    memset(result, 0, sizeof(*result));
    const enum attn_status status = run_call(device, gpu, &call, kernel, result, why, why_size);
    if (status == ATTN_OK) execute_report_counts(tiled, params->batch, &result->fault);
    return status;
}

enum attn_status execute_case(struct attn_device *const device, struct gpu *const gpu,
                              const struct case_file *const loaded, struct execution *const result,
                              char *const why, const size_t why_size)
{
    if (loaded->op == CASE_PREFILL)
        return execute_prefill(device, gpu, &loaded->prefill, loaded->kernel, result, why,
                               why_size);
    if (loaded->op == CASE_TILED)
        return execute_tiled(device, gpu, &loaded->params, &loaded->tiled, result, why, why_size);
    if (loaded->op == CASE_SWAP)
        return execute_swap(device, gpu, &loaded->params, &loaded->tiled, result, why, why_size);
    return loaded->op == CASE_CTM
               ? execute_ctm(device, gpu, &loaded->ctm, result, why, why_size)
               : execute_decode(device, gpu, &loaded->params, result, why, why_size);
}

void execution_free(struct execution *const result)
{
    free(result->o);
    free(result->lse);
    memset(result, 0, sizeof(*result));
}

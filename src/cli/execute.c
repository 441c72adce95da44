/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/execute.h"

#include <limits.h>
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

size_t execute_pool_bytes(const struct attn_decode_params *const params)
{
    return (size_t) params->num_pages * (size_t) params->k_page_stride *
           attn_dtype_size(params->kv_dtype);
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
    snprintf(why, why_size, "%s", attn_last_error());
    return status;
}

static enum attn_status run_on_host(struct attn_device *const device,
                                    const struct attn_decode_params *const params,
                                    const struct attn_decode_plan *const plan,
                                    struct execution *const result, char *const why,
                                    const size_t why_size)
{
    struct attn_decode_params call = *params;
    void *const workspace = alloc_aligned(plan->workspace_bytes);
    int32_t *const counters = calloc((size_t) plan->num_counters + 1, sizeof(*counters));
    enum attn_status status = ATTN_ERROR_NO_MEMORY;
    if (!workspace || !counters) {
        fail_memory(why, why_size);
        goto out;
    }
    call.o = result->o;
    call.lse = result->lse;
    call.fault = &result->fault;
    call.workspace = plan->workspace_bytes ? workspace : NULL;
    call.workspace_bytes = plan->workspace_bytes;
    call.counters = plan->num_counters ? counters : NULL;
    status = attn_decode(device, &call, NULL);
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

static void upload_inputs(struct buffers *const all, struct attn_decode_params *const call)
{
    const size_t batch = (size_t) call->batch, heads = (size_t) call->num_q_heads;
    const size_t kv_heads = (size_t) call->num_kv_heads, pool = execute_pool_bytes(call);
    call->q = make_buffer(all, call->q, 0,
                          batch * heads * (size_t) call->head_dim * attn_dtype_size(call->q_dtype));
    call->k_pool = make_buffer(all, call->k_pool, 0, pool);
    call->v_pool = make_buffer(all, call->v_pool, 0, pool);
    call->block_table = make_buffer(all, call->block_table, 0,
                                    batch * (size_t) call->max_pages_per_seq * sizeof(int32_t));
    call->seq_lens = make_buffer(all, call->seq_lens, 0, batch * sizeof(int32_t));
    if (call->sinks) call->sinks = make_buffer(all, call->sinks, 0, heads * sizeof(float));
    if (call->k_scales)
        call->k_scales = make_buffer(all, call->k_scales, 0, kv_heads * sizeof(float));
    if (call->v_scales)
        call->v_scales = make_buffer(all, call->v_scales, 0, kv_heads * sizeof(float));
}

static enum attn_status run_on_gpu(struct attn_device *const device, struct gpu *const gpu,
                                   const struct attn_decode_params *const params,
                                   const struct attn_decode_plan *const plan,
                                   struct execution *const result, char *const why,
                                   const size_t why_size)
{
    struct attn_decode_params call = *params;
    struct buffers all = { .gpu = gpu };
    attn_stream stream = NULL;
    enum attn_status status = ATTN_OK;
    const size_t rows = (size_t) call.batch * (size_t) call.num_q_heads;
    const size_t o_bytes = rows * (size_t) call.head_dim * attn_dtype_size(call.q_dtype);
    upload_inputs(&all, &call);
    call.o = make_buffer(&all, NULL, POISON, o_bytes);
    call.lse = make_buffer(&all, NULL, POISON, rows * sizeof(float));
    call.fault = make_buffer(&all, &result->fault, 0, sizeof(result->fault));
    call.workspace_bytes = plan->workspace_bytes;
    call.workspace =
        plan->workspace_bytes ? make_buffer(&all, NULL, POISON, plan->workspace_bytes) : NULL;
    call.counters = plan->num_counters
                        ? make_buffer(&all, NULL, 0, (size_t) plan->num_counters * sizeof(int32_t))
                        : NULL;
    if (!all.error) all.error = gpu_stream_create(gpu, &stream);
    if (!all.error) {
        status = attn_decode(device, &call, stream);
        if (status != ATTN_OK) fail_library(status, why, why_size);
    }
    if (!all.error && status == ATTN_OK) all.error = gpu_stream_sync(gpu, stream);
    if (!all.error && status == ATTN_OK) {
        all.error = gpu_download(gpu, result->o, call.o, o_bytes);
        if (!all.error) all.error = gpu_download(gpu, result->lse, call.lse, rows * sizeof(float));
        if (!all.error)
            all.error = gpu_download(gpu, &result->fault, call.fault, sizeof(result->fault));
    }
    if (all.error) status = fail_driver(all.error, why, why_size);
    gpu_stream_destroy(gpu, stream);
    for (int i = 0; i < all.count; i++) gpu_free(gpu, all.pointers[i]);
    return status;
}

enum attn_status execute_decode(struct attn_device *const device, struct gpu *const gpu,
                                const struct attn_decode_params *const params,
                                struct execution *const result, char *const why,
                                const size_t why_size)
{
    const struct attn_decode_shape shape = attn_decode_shape_of(params);
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    const size_t rows = (size_t) params->batch * (size_t) params->num_q_heads;
    memset(result, 0, sizeof(*result));
    enum attn_status status = attn_decode_plan(device, &shape, &plan);
    if (status != ATTN_OK) return fail_library(status, why, why_size);
    result->fault = INT32_MAX;
    result->kernel = plan.kernel;
    result->o = alloc_aligned(rows * (size_t) params->head_dim * attn_dtype_size(params->q_dtype));
    result->lse = alloc_aligned(rows * sizeof(float));
    if (!result->o || !result->lse)
        status = fail_memory(why, why_size);
    else if (gpu)
        status = run_on_gpu(device, gpu, params, &plan, result, why, why_size);
    else
        status = run_on_host(device, params, &plan, result, why, why_size);
    if (status != ATTN_OK) execution_free(result);
    return status;
}

void execution_free(struct execution *const result)
{
    free(result->o);
    free(result->lse);
    memset(result, 0, sizeof(*result));
}

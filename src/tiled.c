/* SPDX-License-Identifier: Apache-2.0 */
// Tiled decode: sizes, the running state, and the calls of a step.
#include "attn/tiled.h"

#include "device.h"
#include "host/tiled.h"
#include "status.h"
#include "tiled_check.h"
#include "tiled_launch.h"

#include <stdlib.h>

// Of BF16 and FP16.
#define ELEMENT_BYTES 2
// Of m, l and o.
#define STATE_ALIGNMENT 64

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

struct attn_tiled {
    struct attn_device *device;
    struct attn_tiled_dims dims;
    struct attn_tiled_state state;
    // On the host: m, l and o are freed with it.
    bool owns_state;
    // On a GPU.
    struct attn_tiled_gpu gpu;
};

static bool is_on_host(const struct attn_tiled *const tiled)
{
    return tiled->device->info.kind == ATTN_DEVICE_HOST;
}

// ---- sizes

static enum attn_status copy_dims(const struct attn_device *const device,
                                  const struct attn_tiled_dims *const dims,
                                  struct attn_tiled_dims *const own)
{
    const attn_log_fn log = device ? device->log : NULL;
    void *const user = device ? device->log_user : NULL;
    ATTN_REQUIRE(log, user, dims, "dims is NULL");
    const enum attn_status status = attn_params_copy(log, user, "dims", own, sizeof(*own), dims);
    return status == ATTN_OK ? attn_tiled_check_dims(device, own) : status;
}

enum attn_status attn_tiled_validate(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    attn_error_clear();
    return copy_dims(NULL, dims, &own);
}

// The dims of a size function, which has no status; false with a sentence.
static bool read_dims(const struct attn_tiled_dims *const dims, struct attn_tiled_dims *const own)
{
    attn_error_clear();
    return copy_dims(NULL, dims, own) == ATTN_OK;
}

int32_t attn_tiled_gqa_ratio(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    return read_dims(dims, &own) ? own.num_q_heads / own.num_kv_heads : -1;
}

// In range, as attn_tiled_check_dims has seen to.
static int64_t count_rows(const struct attn_tiled_dims *const dims)
{
    return (int64_t) dims->max_seqs * dims->num_q_heads;
}

int64_t attn_tiled_m_bytes(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    return read_dims(dims, &own) ? count_rows(&own) * (int64_t) sizeof(float) : -1;
}

int64_t attn_tiled_l_bytes(const struct attn_tiled_dims *const dims)
{
    return attn_tiled_m_bytes(dims);
}

int64_t attn_tiled_o_bytes(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    return read_dims(dims, &own) ? count_rows(&own) * own.head_dim * (int64_t) sizeof(float) : -1;
}

int64_t attn_tiled_output_bytes(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    return read_dims(dims, &own) ? count_rows(&own) * own.head_dim * ELEMENT_BYTES : -1;
}

struct attn_tiled_strides attn_tiled_paged_strides(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    struct attn_tiled_strides strides = { 0, 0, 0, 0 };
    if (!read_dims(dims, &own)) return strides;
    strides.head = own.head_dim;
    strides.token = (int64_t) own.num_kv_heads * own.head_dim;
    strides.block = own.block_size * strides.token;
    return strides;
}

struct attn_tiled_strides attn_tiled_scratch_pool_strides(const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    struct attn_tiled_strides strides = { 0, 0, 0, 0 };
    if (!read_dims(dims, &own)) return strides;
    strides.token = own.head_dim;
    strides.head = (int64_t) own.block_size * own.head_dim;
    strides.v_offset = own.num_kv_heads * strides.head;
    strides.block = 2 * strides.v_offset;
    return strides;
}

// ---- the state

static enum attn_status check_served(const struct attn_device *const device,
                                     const struct attn_tiled_dims *const dims)
{
    const int32_t head_dim = dims->head_dim;
    if (head_dim == 64 || head_dim == 128 || head_dim == 256) return ATTN_OK;
    return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                     "head_dim is %d: tiled decode serves 64, 128 and 256", head_dim);
}

// What serves it on a GPU; on the host nothing has to be found.
static enum attn_status find_gpu(const struct attn_device *const device,
                                 const struct attn_tiled_dims *const dims,
                                 struct attn_tiled_gpu *const gpu)
{
    const enum attn_status status = check_served(device, dims);
    if (status != ATTN_OK || device->info.kind == ATTN_DEVICE_HOST) return status;
    return attn_tiled_gpu_find(gpu, device, dims);
}

int64_t attn_tiled_workspace_bytes(const struct attn_device *const device,
                                   const struct attn_tiled_dims *const dims)
{
    struct attn_tiled_dims own;
    struct attn_tiled_gpu gpu = { .partials_bytes = 0 };
    attn_error_clear();
    if (!device) {
        attn_fail(NULL, NULL, ATTN_ERROR_INVALID, "device is NULL");
        return -1;
    }
    enum attn_status status = copy_dims(device, dims, &own);
    if (status == ATTN_OK) status = find_gpu(device, &own, &gpu);
    return status == ATTN_OK ? gpu.partials_bytes : -1;
}

static enum attn_status read_create(const struct attn_device *const device,
                                    const struct attn_tiled_create_params *const params,
                                    struct attn_tiled *const made)
{
    struct attn_tiled_create_params own;
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK) status = copy_dims(device, own.dims, &made->dims);
    if (status != ATTN_OK) return status;
    made->state =
        (struct attn_tiled_state){ own.m, own.l, own.o, own.workspace, own.workspace_bytes };
    made->owns_state = is_on_host(made) && !own.m && !own.l && !own.o;
    status = attn_tiled_check_state(device, &made->dims, &made->state);
    if (status == ATTN_OK) status = find_gpu(device, &made->dims, &made->gpu);
    if (status != ATTN_OK) return status;
    return attn_tiled_check_workspace(device, &made->dims, &made->state, made->gpu.partials_bytes);
}

// NULL if there is no memory; `bytes` is positive.
static float *allocate(const int64_t bytes)
{
    const uint64_t most = SIZE_MAX - STATE_ALIGNMENT;
    if ((uint64_t) bytes > most) return NULL;
    const size_t units = ((size_t) bytes - 1) / STATE_ALIGNMENT + 1;
    return aligned_alloc(STATE_ALIGNMENT, units * STATE_ALIGNMENT);
}

static enum attn_status allocate_state(struct attn_tiled *const made)
{
    const struct attn_device *const device = made->device;
    const int64_t rows = count_rows(&made->dims) * (int64_t) sizeof(float);
    const int64_t o = rows * made->dims.head_dim;
    if (!made->owns_state) return ATTN_OK;
    made->state.m = allocate(rows);
    made->state.l = allocate(rows);
    made->state.o = allocate(o);
    if (made->state.m && made->state.l && made->state.o) {
        attn_reference_tiled_begin(&made->dims, &made->state, made->dims.max_seqs);
        return ATTN_OK;
    }
    return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_MEMORY,
                     "out of memory: the state of %d sequences needs %lld + %lld + %lld bytes",
                     made->dims.max_seqs, (long long) rows, (long long) rows, (long long) o);
}

enum attn_status attn_tiled_create(struct attn_tiled **const tiled,
                                   struct attn_device *const device,
                                   const struct attn_tiled_create_params *const params)
{
    attn_error_clear();
    if (tiled) *tiled = NULL;
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    REQUIRE(tiled, "tiled is NULL: there has to be a place for the state");
    REQUIRE(params, "params is NULL");
    struct attn_tiled read = { .device = device };
    enum attn_status status = read_create(device, params, &read);
    if (status != ATTN_OK) return status;

    struct attn_tiled *made = malloc(sizeof(*made));
    if (!made)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_MEMORY,
                         "out of memory: a tiled state needs %zu bytes", sizeof(*made));
    *made = read;
    status =
        is_on_host(made) ? allocate_state(made) : attn_tiled_gpu_open(&made->gpu, &made->state);
    if (status == ATTN_OK)
        *tiled = made;
    else
        attn_tiled_destroy(&made);
    return status;
}

void attn_tiled_destroy(struct attn_tiled **const tiled)
{
    if (!tiled || !*tiled) return;
    if ((*tiled)->owns_state) {
        free((*tiled)->state.m);
        free((*tiled)->state.l);
        free((*tiled)->state.o);
    }
    attn_tiled_gpu_close(&(*tiled)->gpu);
    free(*tiled);
    *tiled = NULL;
}

enum attn_status attn_tiled_get_dims(const struct attn_tiled *const tiled,
                                     struct attn_tiled_dims *const dims)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, tiled, "tiled is NULL");
    const struct attn_device *const device = tiled->device;
    REQUIRE(dims, "dims is NULL");
    return attn_result_copy(device->log, device->log_user, "dims", dims, &tiled->dims,
                            sizeof(tiled->dims));
}

// ---- a step

enum attn_status attn_tiled_begin_step(struct attn_tiled *const tiled, const int32_t num_seqs,
                                       const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, tiled, "tiled is NULL");
    const enum attn_status status =
        attn_tiled_check_num_seqs(tiled->device, &tiled->dims, num_seqs);
    if (status != ATTN_OK) return status;
    if (!is_on_host(tiled)) return attn_tiled_gpu_begin(&tiled->gpu, num_seqs, stream);
    attn_reference_tiled_begin(&tiled->dims, &tiled->state, num_seqs);
    return ATTN_OK;
}

enum attn_status attn_tiled_step_tile(struct attn_tiled *const tiled,
                                      const struct attn_tiled_step_params *const params,
                                      const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, tiled, "tiled is NULL");
    const struct attn_device *const device = tiled->device;
    struct attn_tiled_step_params own;
    REQUIRE(params, "params is NULL");
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK)
        status = attn_tiled_check_step(device, &tiled->dims, &tiled->state, &own);
    if (status != ATTN_OK) return status;
    if (!is_on_host(tiled)) return attn_tiled_gpu_step(&tiled->gpu, &own, stream);
    attn_reference_tiled_step(&tiled->dims, &tiled->state, &own);
    return ATTN_OK;
}

enum attn_status attn_tiled_finalize(struct attn_tiled *const tiled,
                                     const struct attn_tiled_finalize_params *const params,
                                     const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, tiled, "tiled is NULL");
    const struct attn_device *const device = tiled->device;
    struct attn_tiled_finalize_params own;
    REQUIRE(params, "params is NULL");
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK)
        status = attn_tiled_check_finalize(device, &tiled->dims, &tiled->state, &own);
    if (status != ATTN_OK) return status;
    if (!is_on_host(tiled)) return attn_tiled_gpu_finalize(&tiled->gpu, &own, stream);
    attn_reference_tiled_finalize(&tiled->dims, &tiled->state, &own);
    return ATTN_OK;
}

// ---- a plan

enum attn_status attn_tiled_plan(const struct attn_device *const device,
                                 const struct attn_tiled_dims *const dims, const int32_t num_seqs,
                                 struct attn_tiled_plan *const plan)
{
    struct attn_tiled_dims own;
    struct attn_tiled_gpu gpu;
    struct attn_tiled_plan full = { .size = (uint32_t) sizeof(full), .kernel = "host executor" };
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    REQUIRE(plan, "plan is NULL");
    enum attn_status status = copy_dims(device, dims, &own);
    if (status == ATTN_OK) status = attn_tiled_check_num_seqs(device, &own, num_seqs);
    if (status == ATTN_OK) status = find_gpu(device, &own, &gpu);
    if (status != ATTN_OK) return status;
    if (device->info.kind != ATTN_DEVICE_HOST) attn_tiled_gpu_plan(&gpu, num_seqs, &full);
    const double rows = (double) num_seqs * own.num_q_heads, dim = own.head_dim;
    const double keys = (double) num_seqs * own.tile_capacity * own.block_size;
    full.kv_bytes = 2 * keys * own.num_kv_heads * dim * ELEMENT_BYTES;
    full.other_bytes = rows * (dim * ELEMENT_BYTES + 2 * (dim + 2) * sizeof(float));
    full.flops = 4 * dim * own.num_q_heads * keys;
    return attn_result_copy(device->log, device->log_user, "plan", plan, &full, sizeof(full));
}

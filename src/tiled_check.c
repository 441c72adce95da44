/* SPDX-License-Identifier: Apache-2.0 */
#include "tiled_check.h"

#include "buffers.h"
#include "host/math.h"
#include "status.h"

#include <math.h>

#define MAX_HEAD_DIM 256
#define ROW_ALIGNMENT 16
// Of BF16 and FP16; of FP32 and int32.
#define ELEMENT_BYTES 2
#define WORD_BYTES 4

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)
// The same where `device` may be NULL.
#define REQUIRE_DIMS(condition, ...) \
    ATTN_REQUIRE(device ? device->log : NULL, device ? device->log_user : NULL, condition, \
                 __VA_ARGS__)

// ---- dims

static int64_t product_of(const int64_t a, const int64_t b, const int64_t c, const int64_t d)
{
    return attn_size_times(attn_size_times(attn_size_times(a, b), c), d);
}

static enum attn_status check_counts(const struct attn_device *const device,
                                     const struct attn_tiled_dims *const dims)
{
    const struct {
        const char *name;
        int32_t count;
    } counts[] = {
        { "max_seqs", dims->max_seqs },         { "num_q_heads", dims->num_q_heads },
        { "num_kv_heads", dims->num_kv_heads }, { "head_dim", dims->head_dim },
        { "block_size", dims->block_size },     { "tile_capacity", dims->tile_capacity },
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        REQUIRE_DIMS(counts[i].count >= 1, "%s is %d: it has to be at least 1", counts[i].name,
                     counts[i].count);
    return ATTN_OK;
}

static enum attn_status check_sizes(const struct attn_device *const device,
                                    const struct attn_tiled_dims *const dims)
{
    const int64_t row = (int64_t) dims->num_q_heads * dims->head_dim;
    // A block of both K and V is the larger of the two presets.
    const int64_t block =
        product_of(2 * ELEMENT_BYTES, dims->num_kv_heads, dims->block_size, dims->head_dim);
    REQUIRE_DIMS(product_of(dims->max_seqs, row, WORD_BYTES, 1) < INT64_MAX,
                 "max_seqs is %d, num_q_heads %d, head_dim %d: the state o would have more than "
                 "2^63 - 1 bytes",
                 dims->max_seqs, dims->num_q_heads, dims->head_dim);
    REQUIRE_DIMS(block < INT64_MAX,
                 "block_size is %d, num_kv_heads %d, head_dim %d: a block would have more than "
                 "2^63 - 1 bytes",
                 dims->block_size, dims->num_kv_heads, dims->head_dim);
    REQUIRE_DIMS(product_of(dims->max_seqs, dims->tile_capacity, WORD_BYTES, 1) < INT64_MAX,
                 "max_seqs is %d, tile_capacity %d: a tile's list of blocks would have more than "
                 "2^63 - 1 bytes",
                 dims->max_seqs, dims->tile_capacity);
    return ATTN_OK;
}

enum attn_status attn_tiled_check_dims(const struct attn_device *const device,
                                       const struct attn_tiled_dims *const dims)
{
    const enum attn_dtype dtype = dims->dtype;
    REQUIRE_DIMS(dtype == ATTN_DTYPE_BF16 || dtype == ATTN_DTYPE_FP16,
                 "dtype is %d (%s): it has to be bf16 or fp16", (int) dtype,
                 attn_dtype_name(dtype));
    const enum attn_status status = check_counts(device, dims);
    if (status != ATTN_OK) return status;
    REQUIRE_DIMS(dims->num_q_heads % dims->num_kv_heads == 0,
                 "num_q_heads is %d, num_kv_heads %d: the first has to be a multiple of the second",
                 dims->num_q_heads, dims->num_kv_heads);
    REQUIRE_DIMS(dims->head_dim <= MAX_HEAD_DIM, "head_dim is %d: it has to be in 1..%d",
                 dims->head_dim, MAX_HEAD_DIM);
    return check_sizes(device, dims);
}

// ---- buffers

// m, l and o; with the workspace.
enum {
    STATE_BUFFERS = 3,
    ALL_BUFFERS,
};

static void list_state(const struct attn_tiled_dims *const dims,
                       const struct attn_tiled_state *const state,
                       struct attn_buffer buffers[ALL_BUFFERS])
{
    const int64_t rows = (int64_t) dims->max_seqs * dims->num_q_heads * WORD_BYTES;
    const int64_t o = rows * dims->head_dim;
    buffers[0] = (struct attn_buffer){ "m", state->m, rows, ROW_ALIGNMENT, true, true };
    buffers[1] = (struct attn_buffer){ "l", state->l, rows, ROW_ALIGNMENT, true, true };
    buffers[2] = (struct attn_buffer){ "o", state->o, o, ROW_ALIGNMENT, true, true };
    buffers[3] = (struct attn_buffer){
        "workspace", state->workspace, state->workspace_bytes, ROW_ALIGNMENT, false, true,
    };
}

enum attn_status attn_tiled_check_state(const struct attn_device *const device,
                                        const struct attn_tiled_dims *const dims,
                                        const struct attn_tiled_state *const state)
{
    struct attn_buffer buffers[ALL_BUFFERS];
    if (!state->m && !state->l && !state->o) return ATTN_OK;
    list_state(dims, state, buffers);
    for (int i = 0; i < STATE_BUFFERS; i++)
        REQUIRE(buffers[i].start,
                "%s is NULL, and not all of m, l and o are: the caller gives all three or none",
                buffers[i].name);
    return attn_buffers_check(device, buffers, STATE_BUFFERS);
}

enum attn_status attn_tiled_check_workspace(const struct attn_device *const device,
                                            const struct attn_tiled_dims *const dims,
                                            const struct attn_tiled_state *const state,
                                            const int64_t wanted)
{
    struct attn_buffer buffers[ALL_BUFFERS];
    REQUIRE(state->workspace || state->workspace_bytes == 0,
            "workspace is NULL, but workspace_bytes is %lld", (long long) state->workspace_bytes);
    REQUIRE(!state->workspace || state->workspace_bytes >= wanted,
            "workspace_bytes is %lld: these dims want %lld on this device, as "
            "attn_tiled_workspace_bytes says",
            (long long) state->workspace_bytes, (long long) wanted);
    list_state(dims, state, buffers);
    // Without m, l and o of the caller there is nothing that it could overlap.
    return state->m ? attn_buffers_check(device, buffers, ALL_BUFFERS)
                    : attn_buffers_check(device, &buffers[STATE_BUFFERS], 1);
}

enum attn_status attn_tiled_check_num_seqs(const struct attn_device *const device,
                                           const struct attn_tiled_dims *const dims,
                                           const int32_t num_seqs)
{
    REQUIRE(num_seqs >= 0 && num_seqs <= dims->max_seqs,
            "num_seqs is %d: it has to be in 0..%d, the max_seqs that the state was made for",
            num_seqs, dims->max_seqs);
    return ATTN_OK;
}

static void fill_defaults(const struct attn_tiled_dims *const dims,
                          struct attn_tiled_step_params *const params)
{
    // The square root without libm, which doubles have the digits for.
    if (params->scale == 0) params->scale = (float) attn_exp(-0.5 * attn_log(dims->head_dim));
    if (params->block_stride || params->token_stride || params->head_stride) return;
    params->head_stride = dims->head_dim;
    params->token_stride = (int64_t) dims->num_kv_heads * dims->head_dim;
    params->block_stride = dims->block_size * params->token_stride;
}

static enum attn_status check_strides(const struct attn_device *const device,
                                      const struct attn_tiled_dims *const dims,
                                      const struct attn_tiled_step_params *const params)
{
    const struct attn_stride strides[] = {
        { "block_stride", params->block_stride, dims->head_dim, ELEMENT_BYTES },
        { "token_stride", params->token_stride, dims->head_dim, ELEMENT_BYTES },
        { "head_stride", params->head_stride, dims->head_dim, ELEMENT_BYTES },
    };
    return attn_strides_check(device, strides, sizeof(strides) / sizeof(strides[0]));
}

// Of k_pool and of v_pool.
static int64_t count_pool_bytes(const struct attn_tiled_dims *const dims,
                                const struct attn_tiled_step_params *const params)
{
    int64_t elements = attn_size_times(params->num_pool_blocks - 1, params->block_stride);
    elements =
        attn_size_plus(elements, attn_size_times(dims->block_size - 1, params->token_stride));
    elements =
        attn_size_plus(elements, attn_size_times(dims->num_kv_heads - 1, params->head_stride));
    return attn_size_times(attn_size_plus(elements, dims->head_dim), ELEMENT_BYTES);
}

static enum attn_status check_step_buffers(const struct attn_device *const device,
                                           const struct attn_tiled_dims *const dims,
                                           const struct attn_tiled_state *const state,
                                           const struct attn_tiled_step_params *const params)
{
    const int64_t seqs = params->num_seqs, word = WORD_BYTES;
    const int64_t q = seqs * dims->num_q_heads * dims->head_dim * ELEMENT_BYTES;
    const int64_t pool = count_pool_bytes(dims, params);
    struct attn_buffer buffers[] = {
        [ALL_BUFFERS] = { "q", params->q, q, ROW_ALIGNMENT, true, false },
        { "k_pool", params->k_pool, pool, ROW_ALIGNMENT, true, false },
        { "v_pool", params->v_pool, pool, ROW_ALIGNMENT, true, false },
        { "tile_blocks", params->tile_blocks, seqs * dims->tile_capacity * word, sizeof(int32_t),
          true, false },
        { "tile_block_counts", params->tile_block_counts, seqs * word, sizeof(int32_t), true,
          false },
        { "valid_slots", params->valid_slots, seqs * word, sizeof(int32_t), false, false },
        { "fault", params->fault, word, sizeof(int32_t), false, true },
    };
    list_state(dims, state, buffers);
    return attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
}

enum attn_status attn_tiled_check_step(const struct attn_device *const device,
                                       const struct attn_tiled_dims *const dims,
                                       const struct attn_tiled_state *const state,
                                       struct attn_tiled_step_params *const params)
{
    enum attn_status status = attn_tiled_check_num_seqs(device, dims, params->num_seqs);
    if (status != ATTN_OK) return status;
    REQUIRE(params->num_pool_blocks >= 1 && params->num_pool_blocks <= INT32_MAX,
            "num_pool_blocks is %lld: it has to be in 1..%d, as block ids are int32",
            (long long) params->num_pool_blocks, INT32_MAX);
    REQUIRE(isfinite(params->scale), "scale is %g: it has to be finite", (double) params->scale);
    fill_defaults(dims, params);
    status = check_strides(device, dims, params);
    // Nothing will be read or written: the pointers don't matter.
    if (status != ATTN_OK || params->num_seqs == 0) return status;
    return check_step_buffers(device, dims, state, params);
}

enum attn_status attn_tiled_check_finalize(const struct attn_device *const device,
                                           const struct attn_tiled_dims *const dims,
                                           const struct attn_tiled_state *const state,
                                           const struct attn_tiled_finalize_params *const params)
{
    const enum attn_status status = attn_tiled_check_num_seqs(device, dims, params->num_seqs);
    if (status != ATTN_OK || params->num_seqs == 0) return status;
    const int64_t rows = (int64_t) params->num_seqs * dims->num_q_heads;
    const int64_t output = rows * dims->head_dim * ELEMENT_BYTES;
    struct attn_buffer buffers[] = {
        [ALL_BUFFERS] = { "output", params->output, output, ROW_ALIGNMENT, true, true },
        { "lse", params->lse, rows * WORD_BYTES, sizeof(float), false, true },
    };
    list_state(dims, state, buffers);
    return attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
}

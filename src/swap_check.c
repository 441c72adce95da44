/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_check.h"

#include "buffers.h"
#include "status.h"
#include "tiled_check.h"

#include <math.h>

#define ROW_ALIGNMENT 16
// Of BF16 and FP16; of FP32 and int32.
#define ELEMENT_BYTES 2
#define WORD_BYTES 4
#define DEFAULT_PLANES 2
#define MAX_PLANES 16
#define DEFAULT_TILE_BYTES (64 << 20)
// Slots of tiles in work do not keep what they have: so many times as many others do.
#define DEFAULT_TILE_PART 4
#define DEFAULT_STAGING_BYTES (32 << 20)
#define MAX_TRACE_TILES 65536
#define MAX_STAGING_BYTES (1 << 30)

// ATTN_REQUIRE with the log of `device`, and of one that may be NULL.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)
#define REQUIRE_DIMS(condition, ...) \
    ATTN_REQUIRE(device ? device->log : NULL, device ? device->log_user : NULL, condition, \
                 __VA_ARGS__)

// ---- dims

struct attn_tiled_dims attn_swap_tiled_dims(const struct attn_swap_dims *const dims)
{
    return (struct attn_tiled_dims){
        .size = (uint32_t) sizeof(struct attn_tiled_dims),
        .dtype = dims->dtype,
        .max_seqs = dims->max_seqs,
        .num_q_heads = dims->num_q_heads,
        .num_kv_heads = dims->num_kv_heads,
        .head_dim = dims->head_dim,
        .block_size = dims->block_size,
        .tile_capacity = dims->tile_blocks,
    };
}

static void fill_dims(struct attn_swap_dims *const dims, const int64_t block_bytes)
{
    if (dims->num_planes == 0) dims->num_planes = DEFAULT_PLANES;
    if (dims->tile_blocks != 0) return;
    int64_t blocks = DEFAULT_TILE_BYTES / block_bytes;
    const int64_t most = dims->resident_blocks / (DEFAULT_TILE_PART * dims->num_planes);
    if (blocks > most) blocks = most;
    dims->tile_blocks = blocks < 1 ? 1 : (int32_t) blocks;
}

static enum attn_status check_counts(const struct attn_device *const device,
                                     const struct attn_swap_dims *const dims)
{
    REQUIRE_DIMS(dims->num_layers >= 1, "num_layers is %d: it has to be at least 1",
                 dims->num_layers);
    REQUIRE_DIMS(dims->num_blocks >= 1, "num_blocks is %d: it has to be at least 1",
                 dims->num_blocks);
    REQUIRE_DIMS((int64_t) dims->num_layers * dims->num_blocks <= INT32_MAX,
                 "num_layers is %d, num_blocks %d: their product has to be at most %d",
                 dims->num_layers, dims->num_blocks, INT32_MAX);
    REQUIRE_DIMS(dims->resident_blocks >= 1, "resident_blocks is %d: it has to be at least 1",
                 dims->resident_blocks);
    REQUIRE_DIMS(dims->tile_blocks >= 0, "tile_blocks is %d: it has to be 0 or positive",
                 dims->tile_blocks);
    REQUIRE_DIMS(dims->num_planes == 0 || (dims->num_planes >= 2 && dims->num_planes <= MAX_PLANES),
                 "num_planes is %d: it has to be 0 or in 2..%d", dims->num_planes, MAX_PLANES);
    return ATTN_OK;
}

enum attn_status attn_swap_check_dims(const struct attn_device *const device,
                                      struct attn_swap_dims *const dims, const bool is_file)
{
    enum attn_status status = check_counts(device, dims);
    if (status != ATTN_OK) return status;
    // The rest is what tiled decode asks for, whose tiles have blocks of at least one slot.
    struct attn_tiled_dims tiled = attn_swap_tiled_dims(dims);
    if (tiled.tile_capacity == 0) tiled.tile_capacity = 1;
    status = attn_tiled_check_dims(device, &tiled);
    if (status != ATTN_OK) return status;
    const struct attn_swap_layout layout = attn_swap_layout_of(dims, is_file);
    const int64_t block = layout.block_bytes;
    const int64_t all = attn_size_times(block, layout.num_blocks);
    REQUIRE_DIMS(attn_size_plus(all, layout.data_offset) < INT64_MAX &&
                     attn_size_times(block, dims->resident_blocks) < INT64_MAX,
                 "a block has %lld bytes: %lld blocks, or %d slots, would have more than 2^63 - 1",
                 (long long) block, (long long) layout.num_blocks, dims->resident_blocks);
    fill_dims(dims, block);
    REQUIRE_DIMS((int64_t) dims->num_planes * dims->tile_blocks <= dims->resident_blocks,
                 "resident_blocks is %d: %d tiles of %d blocks (num_planes, tile_blocks) need %lld "
                 "slots",
                 dims->resident_blocks, dims->num_planes, dims->tile_blocks,
                 (long long) dims->num_planes * dims->tile_blocks);
    tiled = attn_swap_tiled_dims(dims);
    return attn_tiled_check_dims(device, &tiled);
}

// ---- params of create

static enum attn_status check_host(const struct attn_device *const device,
                                   const struct attn_swap_dims *const dims,
                                   const struct attn_swap_create_params *const params)
{
    const struct attn_swap_layout layout = attn_swap_layout_of(dims, false);
    const struct attn_buffer pool = {
        "pool", params->pool, layout.num_blocks * layout.block_bytes, ATTN_SWAP_PAGE, false, false,
    };
    REQUIRE_DIMS(!params->path, "path is given, and backing is ATTN_SWAP_HOST, which has no file");
    REQUIRE_DIMS(params->staging_bytes == 0,
                 "staging_bytes is %lld: with ATTN_SWAP_HOST it has to be 0, as nothing is staged",
                 (long long) params->staging_bytes);
    return device ? attn_buffers_check(device, &pool, 1) : ATTN_OK;
}

static enum attn_status check_file(const struct attn_device *const device,
                                   struct attn_swap_create_params *const params)
{
    const int64_t bytes = params->staging_bytes;
    REQUIRE_DIMS(!params->pool, "pool is given, and backing is ATTN_SWAP_FILE, which has no pool");
    // Without a device nothing is opened.
    REQUIRE_DIMS(!device || (params->path && params->path[0]),
                 "path is missing: ATTN_SWAP_FILE needs the name of a file");
    REQUIRE_DIMS(bytes >= 0 && bytes <= MAX_STAGING_BYTES && bytes % ATTN_SWAP_PAGE == 0 &&
                     bytes != ATTN_SWAP_PAGE,
                 "staging_bytes is %lld: it has to be 0, or a multiple of %d in %d..%d",
                 (long long) bytes, ATTN_SWAP_PAGE, 2 * ATTN_SWAP_PAGE, MAX_STAGING_BYTES);
    if (bytes == 0) params->staging_bytes = DEFAULT_STAGING_BYTES;
    return ATTN_OK;
}

enum attn_status attn_swap_check_create(const struct attn_device *const device,
                                        const struct attn_swap_dims *const dims,
                                        struct attn_swap_create_params *const params)
{
    REQUIRE_DIMS(params->open >= ATTN_SWAP_OPEN_OR_CREATE && params->open <= ATTN_SWAP_CREATE,
                 "open is %d: it has to be in %d..%d", (int) params->open, ATTN_SWAP_OPEN_OR_CREATE,
                 ATTN_SWAP_CREATE);
    REQUIRE_DIMS(params->reader >= ATTN_SWAP_READER_AUTO &&
                     params->reader <= ATTN_SWAP_READER_THREADS,
                 "reader is %d: it has to be in %d..%d", (int) params->reader,
                 ATTN_SWAP_READER_AUTO, ATTN_SWAP_READER_THREADS);
    REQUIRE_DIMS(params->trace_tiles >= 0 && params->trace_tiles <= MAX_TRACE_TILES,
                 "trace_tiles is %d: it has to be in 0..%d", params->trace_tiles, MAX_TRACE_TILES);
    if (params->backing == ATTN_SWAP_FILE) return check_file(device, params);
    return check_host(device, dims, params);
}

// ---- blocks

enum attn_status attn_swap_check_block(const struct attn_swap *const swap, const int32_t layer,
                                       const int32_t block)
{
    const struct attn_device *const device = swap->device;
    REQUIRE(layer >= 0 && layer < swap->dims.num_layers, "layer is %d: it has to be in 0..%d",
            layer, swap->dims.num_layers - 1);
    REQUIRE(block >= 0 && block < swap->dims.num_blocks, "block is %d: it has to be in 0..%d",
            block, swap->dims.num_blocks - 1);
    return ATTN_OK;
}

static enum attn_status check_tokens(const struct attn_swap *const swap,
                                     const struct attn_swap_write_params *const params)
{
    const struct attn_device *const device = swap->device;
    const int32_t size = swap->dims.block_size;
    const int32_t held =
        swap->store.tokens[(int64_t) params->layer * swap->dims.num_blocks + params->block];
    REQUIRE(params->first_token >= 0 && params->first_token < size,
            "first_token is %d: it has to be in 0..%d", params->first_token, size - 1);
    REQUIRE(params->first_token <= held,
            "first_token is %d: block %d of layer %d holds %d tokens, and there may be no gap",
            params->first_token, params->block, params->layer, held);
    REQUIRE(params->num_tokens >= 1 && params->num_tokens <= size - params->first_token,
            "num_tokens is %d: it has to be in 1..%d, as first_token is %d and block_size %d",
            params->num_tokens, size - params->first_token, params->first_token, size);
    return ATTN_OK;
}

static enum attn_status check_rows(const struct attn_swap *const swap,
                                   const struct attn_swap_write_params *const params)
{
    const struct attn_device *const device = swap->device;
    const int64_t dim = swap->dims.head_dim;
    const int64_t elements =
        attn_size_plus(attn_size_times(params->num_tokens - 1, params->token_stride),
                       attn_size_times(swap->dims.num_kv_heads - 1, params->head_stride));
    const int64_t bytes = attn_size_times(attn_size_plus(elements, dim), ELEMENT_BYTES);
    const struct attn_buffer buffers[] = {
        { "k", params->k, bytes, ELEMENT_BYTES, true, false },
        { "v", params->v, bytes, ELEMENT_BYTES, true, false },
    };
    REQUIRE(params->token_stride >= dim, "token_stride is %lld: it has to be at least head_dim, %d",
            (long long) params->token_stride, (int) dim);
    REQUIRE(params->head_stride >= dim, "head_stride is %lld: it has to be at least head_dim, %d",
            (long long) params->head_stride, (int) dim);
    return attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
}

enum attn_status attn_swap_check_write(const struct attn_swap *const swap,
                                       struct attn_swap_write_params *const params)
{
    enum attn_status status = attn_swap_check_block(swap, params->layer, params->block);
    if (status == ATTN_OK) status = check_tokens(swap, params);
    if (status != ATTN_OK) return status;
    if (params->token_stride == 0 && params->head_stride == 0) {
        params->head_stride = swap->dims.head_dim;
        params->token_stride = (int64_t) swap->dims.num_kv_heads * swap->dims.head_dim;
    }
    return check_rows(swap, params);
}

// ---- decode

static enum attn_status check_list(const struct attn_swap *const swap,
                                   const struct attn_swap_decode_params *const params,
                                   const int32_t sequence)
{
    const struct attn_device *const device = swap->device;
    const struct attn_swap_dims *const dims = &swap->dims;
    const int32_t *const list = params->blocks + sequence * params->blocks_stride;
    const int32_t *const held = swap->store.tokens + (int64_t) params->layer * dims->num_blocks;
    int32_t left = params->seq_lens[sequence];
    for (int32_t i = 0; left > 0; i++) {
        const int32_t block = list[i], wanted = left < dims->block_size ? left : dims->block_size;
        REQUIRE(block >= 0 && block < dims->num_blocks,
                "blocks[%d][%d] is %d: it has to be in 0..%d", sequence, i, block,
                dims->num_blocks - 1);
        REQUIRE(held[block] >= wanted,
                "blocks[%d][%d] is %d, of which %d tokens are to be attended: in layer %d it holds "
                "%d",
                sequence, i, block, wanted, params->layer, held[block]);
        left -= wanted;
    }
    return ATTN_OK;
}

static enum attn_status check_lists(const struct attn_swap *const swap,
                                    const struct attn_swap_decode_params *const params)
{
    const struct attn_device *const device = swap->device;
    REQUIRE(params->seq_lens, "seq_lens is NULL");
    REQUIRE(params->blocks_stride >= 0, "blocks_stride is %lld: strides may not be negative",
            (long long) params->blocks_stride);
    for (int32_t i = 0; i < params->num_seqs; i++) {
        const int32_t len = params->seq_lens[i];
        const int64_t blocks = ((int64_t) len + swap->dims.block_size - 1) / swap->dims.block_size;
        REQUIRE(len >= 0, "seq_lens[%d] is %d: it has to be 0 or positive", i, len);
        REQUIRE(params->blocks || len == 0, "blocks is NULL, and seq_lens[%d] is %d", i, len);
        REQUIRE(blocks <= params->blocks_stride || params->num_seqs == 1,
                "seq_lens[%d] is %d, which takes %lld blocks: blocks_stride is %lld", i, len,
                (long long) blocks, (long long) params->blocks_stride);
        const enum attn_status status = check_list(swap, params, i);
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

enum attn_status attn_swap_check_decode(const struct attn_swap *const swap,
                                        const struct attn_swap_decode_params *const params)
{
    const struct attn_device *const device = swap->device;
    const struct attn_swap_dims *const dims = &swap->dims;
    const int64_t rows = (int64_t) params->num_seqs * dims->num_q_heads;
    const int64_t bytes = rows * dims->head_dim * ELEMENT_BYTES;
    const struct attn_buffer buffers[] = {
        { "q", params->q, bytes, ROW_ALIGNMENT, true, false },
        { "output", params->output, bytes, ROW_ALIGNMENT, true, true },
        { "lse", params->lse, rows * WORD_BYTES, WORD_BYTES, false, true },
    };
    REQUIRE(params->num_seqs >= 0 && params->num_seqs <= dims->max_seqs,
            "num_seqs is %d: it has to be in 0..%d, the max_seqs of the cache", params->num_seqs,
            dims->max_seqs);
    REQUIRE(params->layer >= 0 && params->layer < dims->num_layers,
            "layer is %d: it has to be in 0..%d", params->layer, dims->num_layers - 1);
    REQUIRE(isfinite(params->scale), "scale is %g: it has to be finite", (double) params->scale);
    if (params->num_seqs == 0) return ATTN_OK;
    const enum attn_status status =
        attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
    return status == ATTN_OK ? check_lists(swap, params) : status;
}

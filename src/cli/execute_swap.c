/* SPDX-License-Identifier: Apache-2.0 */
// One call of a swap case: its pools become a cache in host memory, of which so many blocks have
// slots as the file says.
#include "cli/execute.h"

#include <string.h>

static struct attn_swap_dims find_dims(const struct attn_decode_params *const call,
                                       const struct case_tiled *const tiled)
{
    struct attn_swap_dims dims = ATTN_SWAP_DIMS_INIT;
    dims.dtype = call->q_dtype;
    dims.num_layers = 1;
    dims.num_blocks = (int32_t) call->num_pages;
    dims.max_seqs = call->batch;
    dims.num_q_heads = call->num_q_heads;
    dims.num_kv_heads = call->num_kv_heads;
    dims.head_dim = call->head_dim;
    dims.block_size = call->page_size;
    dims.num_planes = tiled->num_planes;
    // A tile wider than the lists would only cost memory.
    dims.tile_blocks =
        tiled->tile_capacity < tiled->list_length ? tiled->tile_capacity : tiled->list_length;
    dims.resident_blocks = tiled->resident_blocks;
    return dims;
}

// All tokens of all blocks: those that no sequence has may hold anything.
static enum attn_status fill(struct attn_swap *const swap,
                             const struct attn_decode_params *const call)
{
    struct attn_swap_write_params write = ATTN_SWAP_WRITE_PARAMS_INIT;
    enum attn_status status = ATTN_OK;
    const size_t block = (size_t) call->k_page_stride * attn_dtype_size(call->kv_dtype);
    write.num_tokens = call->page_size;
    write.token_stride = call->k_token_stride;
    write.head_stride = call->k_head_stride;
    for (int32_t i = 0; status == ATTN_OK && i < (int32_t) call->num_pages; i++) {
        write.block = i;
        write.k = (const char *) call->k_pool + (size_t) i * block;
        write.v = (const char *) call->v_pool + (size_t) i * block;
        status = attn_swap_write(swap, &write);
    }
    return status;
}

enum attn_status execute_swap_run(struct attn_device *const device, struct gpu *const gpu,
                                  const struct attn_decode_params *const call,
                                  const struct case_tiled *const tiled, const attn_stream stream)
{
    const struct attn_swap_dims dims = find_dims(call, tiled);
    struct attn_swap_create_params create = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap_decode_params params = ATTN_SWAP_DECODE_PARAMS_INIT;
    struct attn_swap *swap = NULL;
    create.dims = &dims;
    params.num_seqs = call->batch;
    params.scale = call->scale;
    params.q = call->q;
    params.output = call->o;
    params.lse = call->lse;
    params.seq_lens = call->seq_lens;
    params.blocks = tiled->block_list;
    params.blocks_stride = tiled->list_length;
    enum attn_status status = attn_swap_create(&swap, device, &create);
    if (status == ATTN_OK) status = fill(swap, call);
    if (status == ATTN_OK) status = attn_swap_decode(swap, &params, stream);
    // The cache ends with this call.
    if (status == ATTN_OK && gpu && gpu_stream_sync(gpu, stream)) status = ATTN_ERROR_DRIVER;
    attn_swap_destroy(&swap);
    return status;
}

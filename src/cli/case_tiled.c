/* SPDX-License-Identifier: Apache-2.0 */
// Cases of tiled and swap: each sequence has a list of blocks, which the run cuts into tiles.
#include "cli/case_read.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int read_query(const struct case_reader *const in)
{
    struct attn_decode_params *const p = &in->to->params;
    const int64_t extents[] = { -1, -1, -1 };
    const struct safetensors_tensor *q;
    int result = case_find_tensor(in, "q", false, 3, extents, &q);
    if (!result) result = case_check_dtype(in, q, "F16", "BF16");
    if (result) return result;
    p->q_dtype = p->kv_dtype = strcmp(q->dtype, "BF16") ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16;
    p->batch = (int32_t) q->shape[0];
    p->num_q_heads = (int32_t) q->shape[1];
    p->head_dim = (int32_t) q->shape[2];
    if (p->batch < 1 || p->num_q_heads < 1 || p->head_dim < 1)
        return case_refuse_shape(in, q, "at least one sequence, of one head of one element");
    p->q_stride = p->q_token_stride = (int64_t) p->num_q_heads * p->head_dim;
    return case_align_data(in, q, &p->q);
}

// Of q's type. K sets block size, blocks and KV heads; V has to agree.
static int read_pools(const struct case_reader *const in)
{
    struct attn_decode_params *const p = &in->to->params;
    const int64_t extents[] = { -1, -1, -1, p->head_dim };
    const char *const dtype = p->q_dtype == ATTN_DTYPE_BF16 ? "BF16" : "F16";
    const struct safetensors_tensor *k;
    int result = case_find_tensor(in, "k_pool", false, 4, extents, &k);
    if (!result) result = case_check_dtype(in, k, dtype, NULL);
    if (!result) result = case_align_data(in, k, &p->k_pool);
    if (!result) result = case_read_data(in, "v_pool", false, dtype, 4, k->shape, &p->v_pool);
    if (result) return result;
    if (k->shape[0] < 1 || k->shape[1] < 1 || k->shape[2] < 1)
        return case_refuse_shape(in, k, "at least one block, of one token of one KV head");
    p->num_pages = k->shape[0];
    p->page_size = (int32_t) k->shape[1];
    p->num_kv_heads = (int32_t) k->shape[2];
    p->k_head_stride = p->v_head_stride = p->head_dim;
    // The tensor's size has been checked, so these fit.
    p->k_token_stride = p->v_token_stride = (int64_t) p->num_kv_heads * p->head_dim;
    p->k_page_stride = p->v_page_stride = p->page_size * p->k_token_stride;
    return 0;
}

static int read_lists(const struct case_reader *const in)
{
    struct attn_decode_params *const p = &in->to->params;
    struct case_tiled *const tiled = &in->to->tiled;
    const int64_t list[] = { p->batch, -1 }, batch[] = { p->batch };
    const void *data[3];
    int result = case_read_data(in, "block_list", false, "I32", 2, list, &data[0]);
    if (!result) result = case_read_data(in, "block_counts", false, "I32", 1, batch, &data[1]);
    if (!result)
        result = case_read_data(in, "last_block_valid_slots", true, "I32", 1, batch, &data[2]);
    if (result) return result;
    const struct safetensors_tensor *const blocks = safetensors_find(in->to->file, "block_list");
    if (blocks->shape[1] < 1 || blocks->shape[1] * p->page_size > INT32_MAX)
        return case_refuse_shape(in, blocks, "room for one block, and for less than 2^31 slots,");
    tiled->list_length = p->max_pages_per_seq = (int32_t) blocks->shape[1];
    tiled->block_list = p->block_table = data[0];
    tiled->block_counts = data[1];
    tiled->valid_slots = data[2];
    return 0;
}

// Keys of a list, as far as it goes; past its end where its count is.
static int32_t count_keys(const struct case_file *const loaded, const int32_t sequence)
{
    const struct case_tiled *const tiled = &loaded->tiled;
    const int32_t count = tiled->block_counts[sequence], size = loaded->params.page_size;
    const int32_t valid = tiled->valid_slots ? tiled->valid_slots[sequence] : size;
    if (count <= 0) return 0;
    const int32_t blocks = count > tiled->list_length ? tiled->list_length : count;
    return (blocks - 1) * size + (valid < 0 ? 0 : valid > size ? size : valid);
}

static int fill_lengths(const struct case_reader *const in)
{
    struct attn_decode_params *const p = &in->to->params;
    int32_t *const lens = malloc((size_t) p->batch * sizeof(*lens));
    if (!lens) return safetensors_fail(in->why, "%s: out of memory", in->to->file->name);
    in->to->copies[in->to->num_copies++] = lens;
    for (int32_t i = 0; i < p->batch; i++) lens[i] = count_keys(in->to, i);
    p->seq_lens = lens;
    return 0;
}

int case_read_tiled(const struct case_reader *const in)
{
    struct attn_decode_params *const p = &in->to->params;
    struct case_tiled *const tiled = &in->to->tiled;
    int result = read_query(in);
    if (!result) result = read_pools(in);
    if (!result) result = read_lists(in);
    if (!result) result = fill_lengths(in);
    if (!result) result = case_read_float(in, "scale", 1 / sqrtf((float) p->head_dim), &p->scale);
    if (!result) result = case_read_count(in, "tile_capacity", &tiled->tile_capacity);
    if (result) return result;
    if (!case_find_scalar(in, "tile_capacity"))
        return safetensors_fail(in->why, "%s: scalar 'tile_capacity' is missing",
                                in->to->file->name);
    if (tiled->tile_capacity < 1)
        return safetensors_fail(in->why,
                                "%s: scalar 'tile_capacity' is '%s'; at least one block is needed",
                                in->to->file->name, case_find_scalar(in, "tile_capacity"));
    return 0;
}

int case_read_swap(const struct case_reader *const in)
{
    struct case_tiled *const tiled = &in->to->tiled;
    int result = case_read_tiled(in);
    if (!result) result = case_read_count(in, "resident_blocks", &tiled->resident_blocks);
    if (!result) result = case_read_count(in, "num_planes", &tiled->num_planes);
    if (!result && !case_find_scalar(in, "resident_blocks"))
        return safetensors_fail(in->why, "%s: scalar 'resident_blocks' is missing",
                                in->to->file->name);
    return result;
}

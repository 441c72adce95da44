/* SPDX-License-Identifier: Apache-2.0 */
#include "support/swap_case.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void swap_path_make(char path[SWAP_PATH_SIZE])
{
    char folder[] = "/tmp/attn-swap-XXXXXX";
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, SWAP_PATH_SIZE, "%s/blocks", folder);
}

void swap_path_remove(const char path[SWAP_PATH_SIZE])
{
    char folder[SWAP_PATH_SIZE];
    unlink(path);
    snprintf(folder, sizeof(folder), "%s", path);
    *strrchr(folder, '/') = '\0';
    rmdir(folder);
}

static void *need(const size_t bytes)
{
    const size_t rounded = (bytes + 63) / 64 * 64 + 64;
    void *const memory = aligned_alloc(64, rounded);
    cr_assert_not_null(memory);
    memset(memory, 0xFF, rounded);
    return memory;
}

struct attn_swap_dims swap_dims_make(void)
{
    struct attn_swap_dims dims = ATTN_SWAP_DIMS_INIT;
    dims.num_layers = 2;
    dims.num_blocks = 23;
    dims.max_seqs = 4;
    dims.num_q_heads = 4;
    dims.num_kv_heads = 2;
    dims.head_dim = 64;
    dims.block_size = 5;
    dims.resident_blocks = 9;
    dims.tile_blocks = 3;
    dims.num_planes = 2;
    return dims;
}

int64_t swap_case_elements(const struct swap_case *const c)
{
    return (int64_t) 2 * c->dims.num_kv_heads * c->dims.block_size * c->dims.head_dim;
}

void swap_case_init(struct swap_case *const c, const struct attn_swap_dims *const dims,
                    const uint64_t seed)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    const size_t blocks = (size_t) dims->num_layers * (size_t) dims->num_blocks;
    *c = (struct swap_case){ .dims = *dims, .random = { random_seed(seed) } };
    cr_assert_eq(attn_device_open(&c->host, &open), ATTN_OK, "%s", attn_last_error());
    c->truth = need(blocks * (size_t) swap_case_elements(c) * 2);
    c->tokens = need(blocks * sizeof(int32_t));
    memset(c->tokens, 0, blocks * sizeof(int32_t));
}

void swap_case_free(struct swap_case *const c)
{
    attn_device_close(&c->host);
    for (int i = 0; i < c->num_kept; i++) swap_result_free(&c->kept[i]);
    free(c->truth);
    free(c->tokens);
    *c = (struct swap_case){ .truth = NULL };
}

static int64_t number_of(const struct swap_case *const c, const int32_t layer, const int32_t block)
{
    return (int64_t) layer * c->dims.num_blocks + block;
}

uint16_t *swap_case_rows(const struct swap_case *const c, const int32_t layer, const int32_t block,
                         const int32_t v, const int32_t head, const int32_t token)
{
    const struct attn_swap_dims *const d = &c->dims;
    const int64_t stripe = ((int64_t) v * d->num_kv_heads + head) * d->block_size + token;
    return c->truth + number_of(c, layer, block) * swap_case_elements(c) + stripe * d->head_dim;
}

// BF16 or FP16 of about -2 .. 2: the same bit patterns are small numbers in both.
static uint16_t draw_element(struct random *const random, const enum attn_dtype dtype)
{
    const uint32_t bits = (uint32_t) random_next(random);
    const uint32_t sign = bits & 0x8000,
                   mantissa = bits & (dtype == ATTN_DTYPE_FP16 ? 0x3FF : 0x7F);
    const uint32_t low = bits >> 16 & 3;
    return dtype == ATTN_DTYPE_FP16 ? (uint16_t) (sign | (12 + low) << 10 | mantissa)
                                    : (uint16_t) (sign | (124 + low) << 7 | mantissa);
}

void swap_case_draw(struct swap_case *const c, const int32_t layer, const int32_t block,
                    const int32_t first, const int32_t count)
{
    const struct attn_swap_dims *const d = &c->dims;
    for (int32_t v = 0; v < 2; v++)
        for (int32_t head = 0; head < d->num_kv_heads; head++) {
            uint16_t *const rows = swap_case_rows(c, layer, block, v, head, first);
            for (int32_t i = 0; i < count * d->head_dim; i++)
                rows[i] = draw_element(&c->random, d->dtype);
        }
    c->tokens[number_of(c, layer, block)] = first + count;
}

enum attn_status swap_case_send(const struct swap_case *const c, struct attn_swap *const swap,
                                const int32_t layer, const int32_t block, const int32_t first,
                                const int32_t count)
{
    const struct attn_swap_dims *const d = &c->dims;
    const size_t dim = (size_t) d->head_dim;
    uint16_t *const sent = need((size_t) count * (size_t) d->num_kv_heads * dim * 4);
    uint16_t *to = sent;
    for (int32_t v = 0; v < 2; v++)
        for (int32_t t = 0; t < count; t++)
            for (int32_t head = 0; head < d->num_kv_heads; head++, to += dim)
                memcpy(to, swap_case_rows(c, layer, block, v, head, first + t), dim * 2);
    struct attn_swap_write_params write = ATTN_SWAP_WRITE_PARAMS_INIT;
    write.layer = layer;
    write.block = block;
    write.first_token = first;
    write.num_tokens = count;
    write.k = sent;
    write.v = sent + (size_t) count * (size_t) d->num_kv_heads * dim;
    const enum attn_status status = attn_swap_write(swap, &write);
    free(sent);
    return status;
}

void swap_case_write(struct swap_case *const c, struct attn_swap *const swap, const int32_t layer,
                     const int32_t block, const int32_t first, const int32_t count)
{
    swap_case_draw(c, layer, block, first, count);
    cr_assert_eq(swap_case_send(c, swap, layer, block, first, count), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(attn_swap_tokens(swap, layer, block), first + count);
}

void swap_case_write_all(struct swap_case *const c, struct attn_swap *const swap)
{
    for (int32_t layer = 0; layer < c->dims.num_layers; layer++)
        for (int32_t block = 0; block < c->dims.num_blocks; block++)
            swap_case_write(c, swap, layer, block, 0, c->dims.block_size);
}

// ---- batches

static void draw_q(struct swap_case *const c, struct swap_batch *const batch)
{
    const int64_t elements = (int64_t) batch->num_seqs * c->dims.num_q_heads * c->dims.head_dim;
    batch->q = need((size_t) elements * 2);
    for (int64_t i = 0; i < elements; i++) batch->q[i] = draw_element(&c->random, c->dims.dtype);
}

struct swap_batch swap_batch_draw(struct swap_case *const c, const int32_t layer,
                                  const int32_t num_seqs, const int32_t most)
{
    const int32_t size = c->dims.block_size, stride = (most - 1) / size + 2;
    struct swap_batch batch = { .layer = layer, .num_seqs = num_seqs, .stride = stride };
    const size_t seqs = (size_t) num_seqs;
    batch.lens = need(seqs * sizeof(int32_t));
    // What is not listed is wild.
    batch.blocks = need(seqs * (size_t) stride * sizeof(int32_t));
    for (int32_t s = 0; s < num_seqs; s++) {
        batch.lens[s] = random_below(&c->random, 5)
                            ? (int32_t) random_below(&c->random, (uint32_t) most + 1)
                            : 0;
        for (int32_t i = 0; i * size < batch.lens[s]; i++)
            batch.blocks[s * stride + i] =
                (int32_t) random_below(&c->random, (uint32_t) c->dims.num_blocks);
    }
    draw_q(c, &batch);
    return batch;
}

struct swap_batch swap_batch_range(struct swap_case *const c, const int32_t layer,
                                   const int32_t first, const int32_t count)
{
    struct swap_batch batch = { .layer = layer, .num_seqs = 1, .stride = count };
    batch.lens = need(sizeof(int32_t));
    batch.blocks = need((size_t) count * sizeof(int32_t));
    batch.lens[0] = count * c->dims.block_size;
    for (int32_t i = 0; i < count; i++) batch.blocks[i] = first + i;
    draw_q(c, &batch);
    return batch;
}

void swap_batch_free(struct swap_batch *const batch)
{
    free(batch->lens);
    free(batch->blocks);
    free(batch->q);
}

struct attn_swap_decode_params swap_batch_params(const struct swap_batch *const batch)
{
    struct attn_swap_decode_params params = ATTN_SWAP_DECODE_PARAMS_INIT;
    params.layer = batch->layer;
    params.num_seqs = batch->num_seqs;
    params.q = batch->q;
    params.seq_lens = batch->lens;
    params.blocks = batch->blocks;
    params.blocks_stride = batch->stride;
    return params;
}

// ---- results

struct swap_result swap_result_make(const struct swap_case *const c, const int32_t num_seqs)
{
    struct swap_result result = { .rows = (size_t) num_seqs * (size_t) c->dims.num_q_heads };
    result.elements = result.rows * (size_t) c->dims.head_dim;
    result.output = need(result.elements * 2);
    result.lse = need(result.rows * sizeof(float));
    return result;
}

void swap_result_free(struct swap_result *const result)
{
    free(result->output);
    free(result->lse);
}

bool swap_result_same(const struct swap_result *const a, const struct swap_result *const b)
{
    return !memcmp(a->output, b->output, a->elements * 2) &&
           !memcmp(a->lse, b->lse, a->rows * sizeof(float));
}

static struct attn_tiled *make_state(const struct swap_case *const c,
                                     const struct swap_batch *const batch)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled *tiled;
    dims.dtype = c->dims.dtype;
    dims.max_seqs = batch->num_seqs;
    dims.num_q_heads = c->dims.num_q_heads;
    dims.num_kv_heads = c->dims.num_kv_heads;
    dims.head_dim = c->dims.head_dim;
    dims.block_size = c->dims.block_size;
    dims.tile_capacity = batch->stride;
    create.dims = &dims;
    cr_assert_eq(attn_tiled_create(&tiled, c->host, &create), ATTN_OK, "%s", attn_last_error());
    return tiled;
}

struct swap_result swap_case_expect(const struct swap_case *const c,
                                    const struct swap_batch *const batch)
{
    struct swap_result result = swap_result_make(c, batch->num_seqs);
    struct attn_tiled *tiled = make_state(c, batch);
    struct attn_tiled_dims dims = { .size = sizeof(dims) };
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    int32_t *const counts = need((size_t) batch->num_seqs * 2 * sizeof(int32_t));
    int32_t *const valid = counts + batch->num_seqs, size = c->dims.block_size;
    attn_tiled_get_dims(tiled, &dims);
    const struct attn_tiled_strides strides = attn_tiled_scratch_pool_strides(&dims);
    for (int32_t s = 0; s < batch->num_seqs; s++) {
        const int32_t len = batch->lens[s];
        counts[s] = len / size + (len % size > 0);
        valid[s] = len % size ? len % size : size;
    }
    step.num_seqs = last.num_seqs = batch->num_seqs;
    step.q = batch->q;
    step.k_pool = swap_case_rows(c, batch->layer, 0, 0, 0, 0);
    step.v_pool = swap_case_rows(c, batch->layer, 0, 1, 0, 0);
    step.block_stride = strides.block;
    step.token_stride = strides.token;
    step.head_stride = strides.head;
    step.num_pool_blocks = c->dims.num_blocks;
    step.tile_blocks = batch->blocks;
    step.tile_block_counts = counts;
    step.valid_slots = valid;
    last.output = result.output;
    last.lse = result.lse;
    cr_assert_eq(attn_tiled_begin_step(tiled, batch->num_seqs, NULL), ATTN_OK);
    cr_assert_eq(attn_tiled_step_tile(tiled, &step, NULL), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(attn_tiled_finalize(tiled, &last, NULL), ATTN_OK, "%s", attn_last_error());
    attn_tiled_destroy(&tiled);
    free(counts);
    return result;
}

static bool is_untouched(const struct swap_result *const result)
{
    bool untouched = true;
    for (size_t i = 0; i < result->elements; i++) untouched &= result->output[i] == 0xFFFF;
    for (size_t i = 0; i < result->rows * sizeof(float); i++)
        untouched &= ((const unsigned char *) result->lse)[i] == 0xFF;
    return untouched;
}

enum attn_status swap_case_run(struct swap_case *const c, struct attn_swap *const swap,
                               const struct swap_batch *const batch, bool *const same)
{
    struct swap_result expected = swap_case_expect(c, batch);
    struct swap_result result = swap_result_make(c, batch->num_seqs);
    struct attn_swap_decode_params params = swap_batch_params(batch);
    params.output = result.output;
    params.lse = result.lse;
    cr_assert_lt(c->num_kept, SWAP_MAX_KEPT);
    const enum attn_status status = attn_swap_decode(swap, &params, NULL);
    if (c->finish) c->finish();
    *same = status == ATTN_OK && swap_result_same(&result, &expected);
    cr_expect(status == ATTN_OK || is_untouched(&result), "a failed call has written something");
    if (status == ATTN_OK)
        swap_result_free(&result);
    else
        c->kept[c->num_kept++] = result;
    swap_result_free(&expected);
    return status;
}

bool swap_case_agrees(struct swap_case *const c, struct attn_swap *const swap,
                      const struct swap_batch *const batch)
{
    bool same;
    const enum attn_status status = swap_case_run(c, swap, batch, &same);
    cr_assert_eq(status, ATTN_OK, "%s", attn_last_error());
    return same;
}

struct attn_swap_stats swap_stats(const struct attn_swap *const swap)
{
    struct attn_swap_stats stats = { .size = sizeof(stats) };
    cr_assert_eq(attn_swap_get_stats(swap, &stats), ATTN_OK, "%s", attn_last_error());
    return stats;
}

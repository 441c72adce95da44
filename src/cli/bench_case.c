/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_case.h"

#include "cli/shape.h"
#include "host/reference.h"

#include <stdlib.h>
#include <string.h>

// Bytes of the host's block of K, and of V.
#define BLOCK_BYTES (16 << 20)

static void fill_normal(struct random *const random, void *const to, const size_t count,
                        const enum attn_dtype dtype)
{
    for (size_t i = 0; i < count; i++) attn_store(to, (int64_t) i, dtype, random_normal(random));
}

// Pages before it lie wholly left of the window, and are not there at all.
static int32_t find_first_page(const struct bench_shape *const shape, const int32_t sequence)
{
    const int32_t len = shape->lens[sequence];
    return (len - shape_attended(len, shape->window)) / shape->page_size;
}

// Each copy's pages in random order among its own.
static int fill_tables(struct bench_case *const made, struct random *const random)
{
    const size_t table = (size_t) made->shape->batch * (size_t) made->columns;
    int32_t *const order = malloc(((size_t) made->pages + 1) * sizeof(*order));
    if (!order) return -1;
    for (int32_t copy = 0; copy < made->copies; copy++) {
        size_t next = 0;
        random_order(random, order, made->pages);
        for (int32_t i = 0; i < made->shape->batch; i++) {
            const int32_t used = shape_pages(made->shape->lens[i], made->shape->page_size);
            const int32_t first = find_first_page(made->shape, i);
            for (int32_t j = 0; j < made->columns; j++) {
                const size_t place =
                    (size_t) copy * table + (size_t) i * (size_t) made->columns + (size_t) j;
                const bool attended = j >= first && j < used;
                const int32_t page = attended ? copy * made->pages + order[next++] : -1;
                made->tables[place] = page;
                made->host_tables[place] = page < 0 ? -1 : page % made->block_pages;
            }
        }
    }
    free(order);
    return 0;
}

int bench_case_make(struct bench_case *const made, const struct bench_shape *const shape,
                    const int32_t copies, const uint64_t seed)
{
    struct random random = { seed };
    const size_t page_elements =
        (size_t) shape->page_size * (size_t) shape->num_kv_heads * (size_t) shape->head_dim;
    const size_t q_elements =
        (size_t) shape->batch * (size_t) shape->num_q_heads * (size_t) shape->head_dim;
    memset(made, 0, sizeof(*made));
    made->shape = shape;
    made->copies = copies;
    made->pages = (int32_t) bench_shape_pages(shape);
    made->columns = shape_pages(shape->max_len, shape->page_size);
    made->page_bytes = page_elements * attn_dtype_size(shape->kv_dtype);
    const size_t wanted = BLOCK_BYTES / made->page_bytes + 1;
    const size_t total = (size_t) made->pages * (size_t) copies;
    made->block_pages = (int32_t) (wanted < total ? wanted : total ? total : 1);
    const size_t block = (size_t) made->block_pages * page_elements;
    const size_t table = (size_t) copies * (size_t) shape->batch * (size_t) made->columns;
    // 64: what the library's tensors are aligned to, and more.
    made->k_block = aligned_alloc(64, (block * attn_dtype_size(shape->kv_dtype) / 64 + 1) * 64);
    made->v_block = aligned_alloc(64, (block * attn_dtype_size(shape->kv_dtype) / 64 + 1) * 64);
    made->q = aligned_alloc(64, (q_elements * attn_dtype_size(shape->q_dtype) / 64 + 1) * 64);
    made->tables = malloc((table + 1) * sizeof(*made->tables));
    made->host_tables = malloc((table + 1) * sizeof(*made->host_tables));
    if (!made->k_block || !made->v_block || !made->q || !made->tables || !made->host_tables ||
        fill_tables(made, &random)) {
        bench_case_free(made);
        return -1;
    }
    fill_normal(&random, made->k_block, block, shape->kv_dtype);
    fill_normal(&random, made->v_block, block, shape->kv_dtype);
    fill_normal(&random, made->q, q_elements, shape->q_dtype);
    return 0;
}

void bench_case_free(struct bench_case *const made)
{
    free(made->k_block);
    free(made->v_block);
    free(made->q);
    free(made->tables);
    free(made->host_tables);
    memset(made, 0, sizeof(*made));
}

// A call of the shape, without memory.
static struct attn_decode_params make_params(const struct bench_shape *const shape)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = shape->q_dtype;
    params.kv_dtype = shape->kv_dtype;
    params.batch = shape->batch;
    params.num_q_heads = shape->num_q_heads;
    params.num_kv_heads = shape->num_kv_heads;
    params.head_dim = shape->head_dim;
    params.page_size = shape->page_size;
    params.max_pages_per_seq = shape_pages(shape->max_len, shape->page_size);
    params.window = shape->window;
    params.max_decode_seqs = shape->batch;
    return params;
}

struct attn_decode_params bench_case_params(const struct bench_case *const from, const int32_t copy)
{
    const struct bench_shape *const shape = from->shape;
    struct attn_decode_params params = make_params(shape);
    params.num_pages = from->block_pages;
    params.q = from->q;
    params.q_stride = (int64_t) shape->num_q_heads * shape->head_dim;
    params.k_pool = from->k_block;
    params.v_pool = from->v_block;
    params.k_head_stride = params.v_head_stride = shape->head_dim;
    params.k_token_stride = params.v_token_stride = (int64_t) shape->num_kv_heads * shape->head_dim;
    params.k_page_stride = params.v_page_stride = params.k_token_stride * shape->page_size;
    params.block_table =
        from->host_tables + (size_t) copy * (size_t) shape->batch * (size_t) from->columns;
    params.seq_lens = shape->lens;
    params.scale = 1.0f / sqrtf((float) shape->head_dim);
    return params;
}

struct attn_decode_shape bench_shape_library(const struct bench_shape *const shape)
{
    const struct attn_decode_params params = make_params(shape);
    return attn_decode_shape_of(&params);
}

int64_t bench_shape_pages(const struct bench_shape *const shape)
{
    int64_t pages = 0;
    for (int32_t i = 0; i < shape->batch; i++)
        pages += shape_pages(shape->lens[i], shape->page_size) - find_first_page(shape, i);
    return pages;
}

double bench_shape_kv_bytes(const struct bench_shape *const shape)
{
    double keys = 0.0;
    for (int32_t i = 0; i < shape->batch; i++)
        keys += shape_attended(shape->lens[i], shape->window);
    return 2.0 * keys * shape->num_kv_heads * shape->head_dim *
           (double) attn_dtype_size(shape->kv_dtype);
}

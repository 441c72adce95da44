/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_prefill.h"
#include "cli/random.h"
#include "cli/shape.h"
#include "host/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Normally distributed numbers that a tensor repeats: not a multiple of any row.
#define BLOCK_ELEMENTS ((1 << 20) + 37)
#define RAGGED_BATCH 32
#define RAGGED_MIN 64.0
#define RAGGED_MAX 8192.0
#define SEED 1

#define BF16 ATTN_DTYPE_BF16
#define FP16 ATTN_DTYPE_FP16

// Chunks of a prompt at its end, for which the short form is, and the first for which it is not.
#define CHUNK(model, tokens, keys, q, kv, dim, total) \
    { \
        model ", " #tokens " of " keys, BF16, 1, tokens, total - tokens, q, kv, dim, 16, false, \
            true \
    }
#define CHUNKS(model, keys, q, kv, dim, total) \
    CHUNK(model, 1, keys, q, kv, dim, total), CHUNK(model, 16, keys, q, kv, dim, total), \
        CHUNK(model, 64, keys, q, kv, dim, total), CHUNK(model, 128, keys, q, kv, dim, total), \
        CHUNK(model, 129, keys, q, kv, dim, total)

static const struct prefill_bench_shape shapes[] = {
    { "24q4 d256, 2k", BF16, 1, 2048, 0, 24, 4, 256, 16, false, false },
    { "24q4 d256, 8k", BF16, 1, 8192, 0, 24, 4, 256, 16, false, false },
    { "24q4 d256, 16k", BF16, 1, 16384, 0, 24, 4, 256, 16, false, false },
    { "24q4 d256 contiguous, 2k", BF16, 1, 2048, 0, 24, 4, 256, 0, false, false },
    { "24q4 d256 contiguous, 8k", BF16, 1, 8192, 0, 24, 4, 256, 0, false, false },
    { "24q4 d256 contiguous, 16k", BF16, 1, 16384, 0, 24, 4, 256, 0, false, false },
    { "16q2 d256, 2k", BF16, 1, 2048, 0, 16, 2, 256, 16, false, false },
    { "16q2 d256, 8k", BF16, 1, 8192, 0, 16, 2, 256, 16, false, false },
    { "16q2 d256, 16k", BF16, 1, 16384, 0, 16, 2, 256, 16, false, false },
    { "16q2 d256 contiguous, 2k", BF16, 1, 2048, 0, 16, 2, 256, 0, false, false },
    { "16q2 d256 contiguous, 8k", BF16, 1, 8192, 0, 16, 2, 256, 0, false, false },
    { "16q2 d256 contiguous, 16k", BF16, 1, 16384, 0, 16, 2, 256, 0, false, false },
    { "32q8 d128, 2k", BF16, 1, 2048, 0, 32, 8, 128, 16, false, false },
    { "32q8 d128, 8k", BF16, 1, 8192, 0, 32, 8, 128, 16, false, false },
    { "32q8 d128, 16k", BF16, 1, 16384, 0, 32, 8, 128, 16, false, false },
    { "32q8 d128 contiguous, 2k", BF16, 1, 2048, 0, 32, 8, 128, 0, false, false },
    { "32q8 d128 contiguous, 8k", BF16, 1, 8192, 0, 32, 8, 128, 0, false, false },
    { "32q8 d128 contiguous, 16k", BF16, 1, 16384, 0, 32, 8, 128, 0, false, false },
    { "64q8 d64, 8k", BF16, 1, 8192, 0, 64, 8, 64, 16, false, false },
    { "64q8 d64 contiguous, 8k", BF16, 1, 8192, 0, 64, 8, 64, 0, false, false },
    { "16q2 d512, 8k", BF16, 1, 8192, 0, 16, 2, 512, 16, false, false },
    { "24q4 d256 fp16, 8k", FP16, 1, 8192, 0, 24, 4, 256, 16, false, false },
    { "16q2 d256, 777 at 5000", BF16, 1, 777, 5000, 16, 2, 256, 16, false, false },
    { "16q2 d256, 8200 at 16392", BF16, 1, 8200, 16392, 16, 2, 256, 16, false, false },
    { "24q4 d256, 1000", BF16, 1, 1000, 0, 24, 4, 256, 16, false, false },
    { "16q2 d256 page 24, 777 at 5000", BF16, 1, 777, 5000, 16, 2, 256, 24, false, false },
    { "32q8 d128, 4 x 8k", BF16, 4, 8192, 0, 32, 8, 128, 16, false, false },
    { "32q8 d128, 32 of 64 to 8k", BF16, RAGGED_BATCH, 0, 0, 32, 8, 128, 16, true, false },
    // For the host executor.
    { "2q1 d64, 200", BF16, 1, 200, 0, 2, 1, 64, 16, false, false },
    { "2q1 d64 contiguous, 3 x 100 at 30", FP16, 3, 100, 30, 2, 1, 64, 0, false, false },
    CHUNKS("24q4 d256", "8k", 24, 4, 256, 8192),
    CHUNKS("24q4 d256", "32k", 24, 4, 256, 32768),
    CHUNKS("24q4 d256", "128k", 24, 4, 256, 131072),
    CHUNKS("32q8 d128", "8k", 32, 8, 128, 8192),
    CHUNKS("32q8 d128", "32k", 32, 8, 128, 32768),
    CHUNKS("32q8 d128", "128k", 32, 8, 128, 131072),
};

const struct prefill_bench_shape *prefill_bench_shapes(int *const count)
{
    *count = sizeof(shapes) / sizeof(shapes[0]);
    return shapes;
}

int32_t prefill_bench_tokens(const struct prefill_bench_case *const made, const int32_t sequence)
{
    if (!made->cu_seqlens) return made->params.q_len;
    return made->cu_seqlens[sequence + 1] - made->cu_seqlens[sequence];
}

// As many elements as fill the bytes, over and over the same.
static void *fill_tensor(struct random *const random, const size_t bytes,
                         const enum attn_dtype dtype)
{
    const size_t block = BLOCK_ELEMENTS * attn_dtype_size(dtype);
    const size_t first = bytes < block ? bytes : block;
    char *const tensor = aligned_alloc(256, (bytes / 256 + 1) * 256);
    if (!tensor) return NULL;
    for (size_t i = 0; i < first / attn_dtype_size(dtype); i++)
        attn_store(tensor, (int64_t) i, dtype, random_normal(random));
    for (size_t done = first; done < bytes; done += block)
        memcpy(tensor + done, tensor, bytes - done < block ? bytes - done : block);
    return tensor;
}

static int make_lists(struct prefill_bench_case *const made, struct random *const random)
{
    const size_t batch = (size_t) made->shape->batch;
    made->list_bytes = (batch + 1) * sizeof(int32_t);
    made->cu_seqlens = calloc(batch + 1, sizeof(int32_t));
    made->kv_lens = calloc(batch + 1, sizeof(int32_t));
    made->q_offsets = calloc(batch + 1, sizeof(int32_t));
    if (!made->cu_seqlens || !made->kv_lens || !made->q_offsets) return -1;
    for (size_t i = 0; i < batch; i++) {
        made->kv_lens[i] =
            (int32_t) (RAGGED_MIN * pow(RAGGED_MAX / RAGGED_MIN, random_uniform(random)));
        made->cu_seqlens[i + 1] = made->cu_seqlens[i] + made->kv_lens[i];
    }
    made->params.cu_seqlens = made->cu_seqlens;
    made->params.kv_lens = made->kv_lens;
    made->params.q_offsets = made->q_offsets;
    made->params.num_tokens = made->cu_seqlens[batch];
    return 0;
}

static int32_t count_keys(const struct prefill_bench_case *const made, const int32_t sequence)
{
    return made->kv_lens ? made->kv_lens[sequence] : made->params.kv_len;
}

// Pages in random order, and -1 beyond a sequence's last one.
static int make_table(struct prefill_bench_case *const made, struct random *const random)
{
    struct attn_prefill_params *const p = &made->params;
    int32_t longest = 0, next = 0;
    for (int32_t i = 0; i < p->batch; i++) {
        const int32_t keys = count_keys(made, i);
        longest = keys > longest ? keys : longest;
        p->num_pages += shape_pages(keys, p->page_size);
    }
    p->max_pages_per_seq = shape_pages(longest, p->page_size);
    p->table_stride = p->max_pages_per_seq;
    made->table_bytes = (size_t) p->batch * (size_t) p->table_stride * sizeof(int32_t);
    made->table = malloc(made->table_bytes);
    int32_t *const order = malloc((size_t) p->num_pages * sizeof(*order));
    if (!made->table || !order) {
        free(order);
        return -1;
    }
    random_order(random, order, (int32_t) p->num_pages);
    for (int32_t i = 0; i < p->batch; i++)
        for (int32_t j = 0; j < p->max_pages_per_seq; j++)
            made->table[i * p->table_stride + j] =
                j < shape_pages(count_keys(made, i), p->page_size) ? order[next++] : -1;
    free(order);
    p->block_table = made->table;
    return 0;
}

static double count_flops(const struct prefill_bench_case *const made)
{
    const struct attn_prefill_params *const p = &made->params;
    double pairs = 0.0;
    for (int32_t i = 0; i < p->batch; i++) {
        const double tokens = prefill_bench_tokens(made, i);
        pairs += tokens * (made->kv_lens ? 0 : p->q_offset) + tokens * (tokens + 1.0) / 2.0;
    }
    return 4.0 * p->head_dim * p->num_q_heads * pairs;
}

static void set_params(struct prefill_bench_case *const made)
{
    const struct prefill_bench_shape *const shape = made->shape;
    struct attn_prefill_params *const p = &made->params;
    *p = ATTN_PREFILL_PARAMS_INIT;
    p->dtype = shape->dtype;
    p->batch = shape->batch;
    p->q_len = shape->q_len;
    p->q_offset = shape->q_offset;
    p->kv_len = shape->q_offset + shape->q_len;
    p->num_q_heads = shape->num_q_heads;
    p->num_kv_heads = shape->num_kv_heads;
    p->head_dim = shape->head_dim;
    p->page_size = shape->page_size;
    p->scale = 1.0f / sqrtf((float) shape->head_dim);
    // As the definition wants them.
    p->q_token_stride = (int64_t) p->num_q_heads * p->head_dim;
    p->k_head_stride = p->v_head_stride = p->head_dim;
    p->k_token_stride = p->v_token_stride = (int64_t) p->num_kv_heads * p->head_dim;
    p->k_page_stride = p->v_page_stride = p->page_size * p->k_token_stride;
}

int prefill_bench_make(struct prefill_bench_case *const made,
                       const struct prefill_bench_shape *const shape)
{
    struct random random = { SEED };
    struct attn_prefill_params *const p = &made->params;
    memset(made, 0, sizeof(*made));
    made->shape = shape;
    set_params(made);
    if ((shape->ragged && make_lists(made, &random)) ||
        (shape->page_size && make_table(made, &random)))
        goto fail;
    const int64_t element = (int64_t) attn_dtype_size(shape->dtype);
    const int64_t tokens = shape->ragged ? p->num_tokens : (int64_t) p->batch * p->q_len;
    const int64_t keys =
        shape->page_size ? p->num_pages * p->page_size : (int64_t) p->batch * p->kv_len;
    made->q_bytes = (size_t) (tokens * p->q_token_stride * element);
    made->kv_bytes = (size_t) (keys * p->k_token_stride * element);
    made->flops = count_flops(made);
    p->q = made->q = fill_tensor(&random, made->q_bytes, shape->dtype);
    p->k = made->k = fill_tensor(&random, made->kv_bytes, shape->dtype);
    p->v = made->v = fill_tensor(&random, made->kv_bytes, shape->dtype);
    if (made->q && made->k && made->v) return 0;
fail:
    prefill_bench_free(made);
    return -1;
}

void prefill_bench_free(struct prefill_bench_case *const made)
{
    free(made->q);
    free(made->k);
    free(made->v);
    free(made->table);
    free(made->cu_seqlens);
    free(made->kv_lens);
    free(made->q_offsets);
    memset(made, 0, sizeof(*made));
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_case.h"

#include "cli/random.h"
#include "cli/shape.h"
#include "host/ctm.h"
#include "host/reference.h"

#include <stdlib.h>
#include <string.h>

// Bytes of the host's block of K, and of V.
#define BLOCK_BYTES (16 << 20)

// Skip-softmax: a page with a peak, a key of this score for every query, is kept, as it ties with
// the first page of its run. One without is some e^-PEAK times e^5 below that: so far normally
// distributed scores go.
#define PEAK 12.0
#define THRESHOLD 0.1
// Element 0 of every query; peaks are along it, and other keys have 0 there.
#define PEAK_QUERY 8.0

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

// Contents repeat after so many pages, and matter to which pages of a sequence have which.
static int32_t find_period(const struct bench_shape *const shape)
{
    return shape->has_skip ? BENCH_SKIP_PAGES : 1;
}

// Pages in random order, each in a place of its own kind.
static void order_pages(struct random *const random, int32_t *const order, int32_t *const room,
                        const int32_t pages, const int32_t period)
{
    for (int32_t kind = 0; kind < period; kind++) {
        random_order(random, room, pages / period);
        for (int32_t i = 0; i < pages / period; i++)
            order[i * period + kind] = room[i] * period + kind;
    }
}

// Each copy's pages in random order among its own.
static int fill_tables(struct bench_case *const made, struct random *const random)
{
    const struct bench_shape *const shape = made->shape;
    const int32_t period = find_period(shape), columns = made->columns;
    int32_t *const order = malloc(2 * ((size_t) made->pages + 1) * sizeof(*order));
    if (!order) return -1;
    for (int32_t copy = 0; copy < made->copies; copy++) {
        size_t next = 0;
        order_pages(random, order, order + made->pages + 1, made->pages, period);
        for (int32_t i = 0; i < shape->batch; i++) {
            const int32_t used = shape_pages(shape->lens[i], shape->page_size);
            const int32_t first = find_first_page(shape, i);
            const size_t row = (size_t) copy * (size_t) shape->batch + (size_t) i;
            int32_t *const to = made->tables + row * (size_t) (made->table_rows * columns);
            int32_t *const host = made->host_tables + (to - made->tables);
            for (int32_t j = 0; j < columns; j++) {
                const bool attended = j >= first && j < used;
                const int32_t page = attended ? copy * made->pages + order[next++] : -1;
                to[j] = page;
                host[j] = page < 0 ? -1 : page % made->block_pages;
                if (made->table_rows == 1) continue;
                to[columns + j] = page < 0 ? -1 : page + made->pages * made->copies;
                host[columns + j] = page < 0 ? -1 : host[j] + made->block_pages;
            }
        }
    }
    free(order);
    return 0;
}

// Of the pages of the pattern, as many with a peak as the share says: in each run the first ones.
static bool has_peak(const double skip_share, const int32_t page)
{
    const int32_t run = page % BENCH_SKIP_PAGES / ATTN_SKIP_SCOPE, place = page % ATTN_SKIP_SCOPE;
    const int32_t runs = BENCH_SKIP_PAGES / ATTN_SKIP_SCOPE;
    const int32_t kept = (int32_t) lround((1.0 - skip_share) * BENCH_SKIP_PAGES);
    return place < kept / runs + (run < kept % runs);
}

static void make_peaks(struct bench_case *const made)
{
    const struct bench_shape *const shape = made->shape;
    const int64_t rows = (int64_t) shape->batch * shape->num_q_heads;
    const double key = PEAK / (PEAK_QUERY / sqrt((double) shape->head_dim));
    for (int64_t i = 0; i < rows; i++)
        attn_store(made->q, i * shape->head_dim, shape->q_dtype, PEAK_QUERY);
    for (int32_t page = 0; page < made->block_pages; page++)
        for (int32_t slot = 0; slot < shape->page_size; slot++)
            for (int32_t head = 0; head < shape->num_kv_heads; head++) {
                const int64_t place =
                    (((int64_t) page * shape->page_size + slot) * shape->num_kv_heads + head) *
                    shape->head_dim;
                const bool peak = slot == 0 && has_peak(shape->skip_share, page);
                for (int32_t d = 1; d < shape->head_dim && peak; d++)
                    attn_store(made->k_block, place + d, shape->kv_dtype, 0.0);
                attn_store(made->k_block, place, shape->kv_dtype, peak ? key : 0.0);
            }
    // A threshold of 0 leaves out nothing, and is taken for none.
    made->skip_table[1] = shape->skip_share > 0.0 ? (int32_t) (THRESHOLD * shape->max_len) : 0;
}

static int fill_masks(struct bench_case *const made, struct random *const random)
{
    const struct bench_shape *const shape = made->shape;
    const int32_t words = tree_words(shape->q_len);
    const size_t count = (size_t) shape->q_len * (size_t) words;
    if (shape->tree == TREE_NONE) return 0;
    made->mask = malloc(((size_t) shape->batch * count + 1) * sizeof(*made->mask));
    if (!made->mask) return -1;
    for (int32_t i = 0; i < shape->batch; i++)
        tree_fill(made->mask + (size_t) i * count, shape->tree, shape->q_len, shape->q_len, words,
                  random);
    return 0;
}

static int fill_counts(struct bench_case *const made)
{
    const struct bench_shape *const shape = made->shape;
    if (shape->op != CASE_TILED) return 0;
    made->counts = malloc((2 * (size_t) shape->batch + 1) * sizeof(*made->counts));
    if (!made->counts) return -1;
    for (int32_t i = 0; i < shape->batch; i++) {
        made->counts[i] = shape_pages(shape->lens[i], shape->page_size);
        made->counts[shape->batch + i] = shape->lens[i] - (made->counts[i] - 1) * shape->page_size;
    }
    return 0;
}

int bench_case_make(struct bench_case *const made, const struct bench_shape *const shape,
                    const int32_t copies, const uint64_t seed)
{
    struct random random = { seed };
    const size_t page_elements =
        (size_t) shape->page_size * (size_t) shape->num_kv_heads * (size_t) shape->head_dim;
    const size_t q_elements = (size_t) shape->batch * (size_t) shape->q_len *
                              (size_t) shape->num_q_heads * (size_t) shape->head_dim;
    memset(made, 0, sizeof(*made));
    made->shape = shape;
    made->copies = copies;
    made->pages = (int32_t) bench_shape_pages(shape);
    made->table_rows = shape->op == CASE_CTM ? 2 : 1;
    made->columns = shape_pages(shape->max_len, shape->page_size);
    made->page_bytes = page_elements * attn_dtype_size(shape->kv_dtype);
    const size_t period = (size_t) find_period(shape);
    const size_t wanted = (BLOCK_BYTES / made->page_bytes / period + 1) * period;
    const size_t total = (size_t) made->pages * (size_t) copies;
    made->block_pages = (int32_t) (wanted < total ? wanted : total ? total : 1);
    const size_t block = (size_t) made->block_pages * page_elements;
    const size_t table = (size_t) copies * bench_case_table(made);
    // 64: what the library's tensors are aligned to, and more. Pages of ctm are a multiple of that.
    const size_t half = (block * attn_dtype_size(shape->kv_dtype) + 63) / 64 * 64;
    made->k_block = aligned_alloc(64, 2 * half + 64);
    made->v_block = made->k_block ? (char *) made->k_block + half : NULL;
    made->q = aligned_alloc(64, (q_elements * attn_dtype_size(shape->q_dtype) / 64 + 1) * 64);
    made->tables = malloc((table + 1) * sizeof(*made->tables));
    made->host_tables = malloc((table + 1) * sizeof(*made->host_tables));
    if (!made->k_block || !made->q || !made->tables || !made->host_tables ||
        fill_tables(made, &random) || fill_masks(made, &random) || fill_counts(made)) {
        bench_case_free(made);
        return -1;
    }
    fill_normal(&random, made->k_block, block, shape->kv_dtype);
    fill_normal(&random, made->v_block, block, shape->kv_dtype);
    fill_normal(&random, made->q, q_elements, shape->q_dtype);
    if (shape->has_skip) make_peaks(made);
    return 0;
}

void bench_case_free(struct bench_case *const made)
{
    free(made->k_block);
    free(made->q);
    free(made->tables);
    free(made->host_tables);
    free(made->mask);
    free(made->counts);
    memset(made, 0, sizeof(*made));
}

// A call of the shape, without memory.
static struct attn_decode_params make_params(const struct bench_shape *const shape)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = shape->q_dtype;
    params.kv_dtype = shape->kv_dtype;
    params.batch = shape->batch;
    params.q_len = shape->q_len;
    params.num_q_heads = shape->num_q_heads;
    params.num_kv_heads = shape->num_kv_heads;
    params.head_dim = shape->head_dim;
    params.page_size = shape->page_size;
    params.max_pages_per_seq = shape_pages(shape->max_len, shape->page_size);
    params.window = shape->window;
    params.max_decode_seqs = shape->batch;
    return params;
}

size_t bench_case_table(const struct bench_case *const from)
{
    return (size_t) from->shape->batch * (size_t) from->table_rows * (size_t) from->columns;
}

struct attn_ctm_params bench_case_ctm(const struct bench_case *const from, const int32_t copy)
{
    const struct bench_shape *const shape = from->shape;
    struct attn_ctm_params params = ATTN_CTM_PARAMS_INIT;
    params.batch_size = shape->batch;
    params.q_len = shape->q_len;
    params.num_q_heads = shape->num_q_heads;
    params.num_kv_heads = shape->num_kv_heads;
    params.head_dim = shape->head_dim;
    params.num_pages = from->block_pages;
    params.max_pages_per_seq = from->columns;
    params.sliding_window = shape->window;
    params.q = from->q;
    params.kv_pool = from->k_block;
    params.fp8_kv = shape->kv_dtype == ATTN_DTYPE_E4M3;
    params.attention_scale = 1.0f / sqrtf((float) shape->head_dim);
    params.page_table = from->host_tables + (size_t) copy * bench_case_table(from);
    params.seq_lens = shape->lens;
    params.tree_mask = from->mask;
    params.mask_words = tree_words(shape->q_len);
    if (!shape->has_skip) return params;
    params.skip_softmax_scale_table = from->skip_table;
    params.skip_softmax_scale_table_length = 2;
    return params;
}

struct case_tiled bench_case_tiled(const struct bench_case *const from, const int32_t copy)
{
    return (struct case_tiled){
        .block_list = from->host_tables + (size_t) copy * bench_case_table(from),
        .block_counts = from->counts,
        .valid_slots = from->counts + from->shape->batch,
        .list_length = from->columns,
        .tile_capacity = from->columns,
    };
}

struct attn_decode_params bench_case_params(const struct bench_case *const from, const int32_t copy)
{
    const struct bench_shape *const shape = from->shape;
    if (shape->op == CASE_CTM) {
        const struct attn_ctm_params ctm = bench_case_ctm(from, copy);
        return attn_reference_ctm(&ctm);
    }
    struct attn_decode_params params = make_params(shape);
    params.num_pages = from->block_pages;
    params.q = from->q;
    params.q_token_stride = (int64_t) shape->num_q_heads * shape->head_dim;
    params.q_stride = shape->q_len * params.q_token_stride;
    params.k_pool = from->k_block;
    params.v_pool = from->v_block;
    params.k_head_stride = params.v_head_stride = shape->head_dim;
    params.k_token_stride = params.v_token_stride = (int64_t) shape->num_kv_heads * shape->head_dim;
    params.k_page_stride = params.v_page_stride = params.k_token_stride * shape->page_size;
    params.block_table = from->host_tables + (size_t) copy * bench_case_table(from);
    params.seq_lens = shape->lens;
    params.tree_mask = from->mask;
    params.mask_words = tree_words(shape->q_len);
    params.scale = 1.0f / sqrtf((float) shape->head_dim);
    if (!shape->has_skip) return params;
    params.skip_table = from->skip_table;
    params.skip_table_length = 2;
    return params;
}

struct attn_decode_shape bench_shape_library(const struct bench_shape *const shape)
{
    const struct attn_decode_params params = make_params(shape);
    struct attn_decode_shape found = attn_decode_shape_of(&params);
    found.has_skip_table = shape->has_skip;
    return found;
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

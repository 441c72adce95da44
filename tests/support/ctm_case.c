/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/ctm_case.h"

#include "host/reference.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ATTN_CTM_PAGE_SIZE
#define WILD INT32_MIN

const struct ctm_case ctm_contract_cases[NUM_CTM_CONTRACT_CASES] = {
    { "4 heads a KV head", 1, 32, 8, 128, 60, .lens = { 320 }, .seed = 100 },
    { "8 heads a KV head", 1, 24, 3, 128, 60, .lens = { 192 }, .seed = 101 },
    { "7 heads a KV head", 1, 14, 2, 64, 60, .lens = { 192 }, .seed = 102 },
    { "head_dim 256", 1, 8, 1, 256, 10, .lens = { 978 }, .seed = 103 },
    { "head_dim 512", 1, 32, 4, 512, 33, .lens = { 128 }, .seed = 104 },
    { "16 heads a KV head", 2, 32, 2, 128, 8, .lens = { 1150, 1150 }, .window = 1024, .per_row = 1,
      .seed = 105 },
    { "alternating sinks", 1, 14, 2, 64, 8, .lens = { 72 }, .window = 64,
      .sinks = CTM_SINKS_ALTERNATING, .seed = 106 },
    { "window past all", 1, 32, 4, 128, 48, .lens = { 96 }, .window = 192, .seed = 107 },
};

void *ctm_image(const struct ctm_data *data, enum ctm_zone zone)
{
    return data->image + data->zones[zone].offset;
}

const void *ctm_result(const struct ctm_data *data, enum ctm_zone zone)
{
    return data->result + data->zones[zone].offset;
}

// ---- the contract once more

static bool has_bit(const struct ctm_data *data, int32_t b, int32_t i, int32_t j)
{
    const int32_t *const mask = ctm_image(data, CTM_ZONE_MASK);
    const int64_t row = (int64_t) b * data->c.q_len + i;
    return (uint32_t) mask[row * data->params.mask_words + j / 32] >> j % 32 & 1;
}

static int32_t past_of(const struct ctm_case *c, int32_t b)
{
    return c->lens[b] > c->q_len ? c->lens[b] - c->q_len : 0;
}

// The first key that the window leaves to token i.
static int32_t edge_of(const struct ctm_case *c, int32_t b, int32_t i)
{
    if (c->window == 0) return 0;
    const int32_t edge = c->per_row ? past_of(c, b) + i - c->window + 1 : c->lens[b] - c->window;
    return edge > 0 ? edge : 0;
}

bool ctm_data_sees(const struct ctm_data *data, int32_t b, int32_t i, int32_t t)
{
    const struct ctm_case *const c = &data->c;
    const int32_t past = past_of(c, b);
    if (t >= c->lens[b] || t < edge_of(c, b, i)) return false;
    return c->q_len == 1 || t < past || has_bit(data, b, i, t - past);
}

// ---- building a case

static enum attn_dtype kv_type(const struct ctm_case *c)
{
    return c->fp8 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16;
}

int64_t ctm_data_kv_index(const struct ctm_data *data, int32_t b, int32_t kv, int32_t t,
                          int32_t head)
{
    const struct ctm_case *const c = &data->c;
    const int32_t *const table = ctm_image(data, CTM_ZONE_TABLE);
    const int64_t page = table[(b * 2 + kv) * data->params.max_pages_per_seq + t / PAGE];
    return ((page * PAGE + t % PAGE) * c->num_kv_heads + head) * c->head_dim;
}

static void fill_uniform(const struct ctm_case *c, void *base, int64_t index, enum attn_dtype dtype,
                         struct random *random)
{
    for (int32_t d = 0; d < c->head_dim; d++)
        attn_store(base, index + d, dtype, random_uniform(random));
}

static double token_bit(int32_t head_dim, int32_t t)
{
    return ldexp(1, t / head_dim % 8);
}

static void fill_token(struct ctm_data *data, int32_t b, int32_t t, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    const enum attn_dtype dtype = kv_type(c);
    void *const pool = ctm_image(data, CTM_ZONE_POOL);
    for (int32_t head = 0; head < c->num_kv_heads; head++) {
        const int64_t k = ctm_data_kv_index(data, b, 0, t, head),
                      v = ctm_data_kv_index(data, b, 1, t, head);
        if (c->fill == CTM_FILL_UNIFORM) {
            fill_uniform(c, pool, k, dtype, random);
            fill_uniform(c, pool, v, dtype, random);
            continue;
        }
        for (int32_t d = 0; d < c->head_dim; d++) {
            attn_store(pool, k + d, dtype, 0);
            const bool own = d == t % c->head_dim;
            attn_store(pool, v + d, dtype, own ? token_bit(c->head_dim, t) : 0);
        }
    }
}

static void fill_pool(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    memset(ctm_image(data, CTM_ZONE_POOL), 0xFF, data->zones[CTM_ZONE_POOL].bytes);
    for (int32_t b = 0; b < c->batch; b++)
        for (int32_t t = 0; t < c->lens[b]; t++) {
            bool seen = false;
            for (int32_t i = 0; i < c->q_len && !seen; i++) seen = ctm_data_sees(data, b, i, t);
            if (seen) fill_token(data, b, t, random);
        }
}

static void fill_table(struct ctm_data *data, struct random *random)
{
    static const int32_t stale[] = { -1, WILD, INT32_MAX, 0 };
    const struct ctm_case *const c = &data->c;
    const int32_t columns = data->params.max_pages_per_seq, pages = 2 * data->params.num_pages;
    int32_t *const table = ctm_image(data, CTM_ZONE_TABLE);
    int32_t *const ids = malloc((size_t) pages * sizeof(*ids));
    cr_assert(ids);
    for (int32_t i = 0; i < pages; i++) {
        const int32_t j = (int32_t) random_below(random, (uint32_t) i + 1);
        ids[i] = ids[j];
        ids[j] = i;
    }
    int32_t used = 0;
    for (int32_t row = 0; row < c->batch * 2; row++)
        for (int32_t column = 0; column < columns; column++) {
            const int32_t first = edge_of(c, row / 2, 0) / PAGE, len = c->lens[row / 2];
            const bool live = column >= first && column * PAGE < len;
            table[row * columns + column] = live ? ids[used++] : stale[(row + column) % 4];
        }
    free(ids);
}

// Any bits, those above the diagonal and beyond q_len included; the last row of a sequence with an
// odd number is one of padding.
static void fill_mask(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    const int32_t mask_words = data->params.mask_words;
    int32_t *const mask = ctm_image(data, CTM_ZONE_MASK);
    for (int32_t row = 0; row < c->batch * c->q_len; row++) {
        const bool padding = row / c->q_len % 2 == 1 && row % c->q_len == c->q_len - 1;
        for (int32_t word = 0; word < mask_words; word++) {
            uint32_t bits = (uint32_t) random_next(random);
            for (int32_t j = 0; padding && j < 32 && word * 32 + j < c->q_len; j++)
                bits &= ~(1u << j);
            mask[(int64_t) row * mask_words + word] = (int32_t) bits;
        }
    }
}

static void fill_rest(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    float *const sinks = ctm_image(data, CTM_ZONE_SINKS);
    const int32_t infinite = INT32_MAX;
    for (int32_t row = 0; row < c->batch * c->q_len * c->num_q_heads; row++)
        fill_uniform(c, ctm_image(data, CTM_ZONE_Q), (int64_t) row * c->head_dim, ATTN_DTYPE_FP16,
                     random);
    for (int32_t h = 0; h < c->num_q_heads; h++)
        sinks[h] = c->sinks == CTM_SINKS_ALTERNATING ? (h % 2 ? 100.0f : -80.0f)
                                                     : (float) (4 * random_uniform(random));
    memcpy(ctm_image(data, CTM_ZONE_LENS), c->lens, (size_t) c->batch * sizeof(int32_t));
    if (c->skip)
        memcpy(ctm_image(data, CTM_ZONE_SKIP), c->skip, (size_t) c->skip_length * sizeof(int32_t));
    memset(ctm_image(data, CTM_ZONE_OUTPUT), 0xFF, data->zones[CTM_ZONE_OUTPUT].bytes);
    memcpy(ctm_image(data, CTM_ZONE_FAULT), &infinite, sizeof(infinite));
}

static void lay_out(struct ctm_data *data)
{
    const struct ctm_case *const c = &data->c;
    const struct attn_ctm_params *const p = &data->params;
    const size_t q = (size_t) c->batch * c->q_len * c->num_q_heads * c->head_dim * 2;
    const size_t token = (size_t) c->num_kv_heads * c->head_dim * attn_dtype_size(kv_type(c));
    const size_t bytes[NUM_CTM_ZONES] = {
        [CTM_ZONE_Q] = q,
        [CTM_ZONE_POOL] = token * PAGE * 2 * (size_t) p->num_pages,
        [CTM_ZONE_TABLE] = (size_t) c->batch * 2 * p->max_pages_per_seq * 4,
        [CTM_ZONE_LENS] = (size_t) c->batch * 4,
        [CTM_ZONE_SINKS] = (size_t) c->num_q_heads * 4,
        [CTM_ZONE_MASK] = (size_t) c->batch * c->q_len * p->mask_words * 4,
        [CTM_ZONE_SKIP] = (size_t) c->skip_length * 4,
        [CTM_ZONE_OUTPUT] = q,
        [CTM_ZONE_FAULT] = 4,
        [CTM_ZONE_DROPPED] = 8,
    };
    for (int z = 0; z < NUM_CTM_ZONES; z++)
        data->zones[z] = (struct canary_zone){ 0, bytes[z], z >= CTM_ZONE_OUTPUT };
    data->bytes = canary_lay_out(data->zones, NUM_CTM_ZONES);
    data->image = aligned_alloc(256, data->bytes);
    data->result = aligned_alloc(256, data->bytes);
    cr_assert(data->image && data->result);
    memset(data->image, 0, data->bytes);
}

static void set_params(struct ctm_data *data)
{
    const struct ctm_case *const c = &data->c;
    struct attn_ctm_params *const p = &data->params;
    int32_t longest = 1;
    for (int32_t b = 0; b < c->batch; b++)
        if (c->lens[b] > longest) longest = c->lens[b];
    *p = ATTN_CTM_PARAMS_INIT;
    p->batch_size = c->batch;
    p->q_len = c->q_len;
    p->num_q_heads = c->num_q_heads;
    p->num_kv_heads = c->num_kv_heads;
    p->head_dim = c->head_dim;
    p->max_pages_per_seq = (longest - 1) / PAGE + 3;
    p->num_pages = c->batch * p->max_pages_per_seq + 1;
    p->sliding_window = c->window;
    p->contiguous_query_swa = c->per_row;
    p->fp8_kv = c->fp8;
    if (c->fp8) p->k_scale = 0.5f, p->v_scale = 0.75f;
    p->attention_scale = 1.0f / sqrtf((float) c->head_dim);
    p->mask_words = (c->q_len - 1) / 32 + 1 + (int32_t) (c->seed % 2);
    p->skip_softmax_scale_table_length = c->skip_length;
}

struct ctm_data *ctm_data_build(const struct ctm_case *c)
{
    struct ctm_data *const data = calloc(1, sizeof(*data));
    cr_assert(data);
    struct random random = { random_seed(c->seed + 31) };
    data->c = *c;
    set_params(data);
    lay_out(data);
    fill_mask(data, &random);
    fill_table(data, &random);
    fill_pool(data, &random);
    fill_rest(data, &random);
    return data;
}

void ctm_data_free(struct ctm_data **data)
{
    if (!*data) return;
    free((*data)->image);
    free((*data)->result);
    free(*data);
    *data = NULL;
}

// ---- the call, and what came of it

int64_t ctm_data_workspace_elems(const struct ctm_data *data)
{
    const struct attn_ctm_params *const p = &data->params;
    if (p->q_len == 1) return attn_ctm_workspace_elems(p->batch_size, p->num_q_heads, p->head_dim);
    return attn_ctm_tree_workspace_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads,
                                         p->head_dim);
}

int64_t ctm_data_semaphore_elems(const struct ctm_data *data)
{
    const struct attn_ctm_params *const p = &data->params;
    if (p->q_len == 1) return attn_ctm_semaphore_elems(p->batch_size, p->num_kv_heads);
    return attn_ctm_tree_semaphore_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads);
}

struct attn_ctm_params ctm_data_params(const struct ctm_data *data, uint8_t *base)
{
    const struct canary_zone *const zones = data->zones;
    struct attn_ctm_params p = data->params;
    p.q = base + zones[CTM_ZONE_Q].offset;
    p.output = base + zones[CTM_ZONE_OUTPUT].offset;
    p.kv_pool = base + zones[CTM_ZONE_POOL].offset;
    p.page_table = (void *) (base + zones[CTM_ZONE_TABLE].offset);
    p.seq_lens = (void *) (base + zones[CTM_ZONE_LENS].offset);
    p.sinks = data->c.sinks ? (void *) (base + zones[CTM_ZONE_SINKS].offset) : NULL;
    p.tree_mask = (void *) (base + zones[CTM_ZONE_MASK].offset);
    if (data->c.skip) p.skip_softmax_scale_table = (void *) (base + zones[CTM_ZONE_SKIP].offset);
    p.fault = (void *) (base + zones[CTM_ZONE_FAULT].offset);
    p.dropped_pages = (void *) (base + zones[CTM_ZONE_DROPPED].offset);
    return p;
}

bool ctm_data_intact(const struct ctm_data *data)
{
    return canary_find(data->zones, NUM_CTM_ZONES, data->image, data->result, data->bytes) < 0;
}

double ctm_data_output(const struct ctm_data *data, int32_t b, int32_t i, int32_t h, int32_t d)
{
    const struct ctm_case *const c = &data->c;
    const int64_t row = ((int64_t) b * c->q_len + i) * c->num_q_heads + h;
    return attn_load(ctm_result(data, CTM_ZONE_OUTPUT), row * c->head_dim + d, ATTN_DTYPE_FP16);
}

int32_t ctm_data_fault(const struct ctm_data *data)
{
    return *(const int32_t *) ctm_result(data, CTM_ZONE_FAULT);
}

int32_t ctm_case_fault(const struct ctm_case *c)
{
    for (int32_t b = 0; b < c->batch; b++)
        if (c->lens[b] > 0 && c->lens[b] < c->q_len) return b;
    return INT32_MAX;
}

int64_t ctm_data_dropped(const struct ctm_data *data)
{
    return *(const int64_t *) ctm_result(data, CTM_ZONE_DROPPED);
}

bool ctm_data_equal(const struct ctm_data *a, int32_t i, const struct ctm_data *b, int32_t j)
{
    const size_t size = a->zones[CTM_ZONE_OUTPUT].bytes / (size_t) a->c.batch;
    const char *const a_o = ctm_result(a, CTM_ZONE_OUTPUT);
    const char *const b_o = ctm_result(b, CTM_ZONE_OUTPUT);
    return memcmp(a_o + (size_t) i * size, b_o + (size_t) j * size, size) == 0;
}

const char *ctm_case_text(const struct ctm_case *c, char *text, size_t size)
{
    snprintf(
        text, size,
        "%s: batch %d, heads %d/%d, head_dim %d, q_len %d, lengths %d %d %d %d, window %d (per "
        "row %d), fp8 %d, sinks %d, fill %d, seed %llu",
        c->name, c->batch, c->num_q_heads, c->num_kv_heads, c->head_dim, c->q_len, c->lens[0],
        c->lens[1], c->lens[2], c->lens[3], c->window, c->per_row, c->fp8, (int) c->sinks,
        (int) c->fill, (unsigned long long) c->seed);
    return text;
}

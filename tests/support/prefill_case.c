/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/prefill_case.h"

#include "tests/support/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    // Tokens of no sequence at both ends of a ragged q.
    SPARE_TOKENS = 3,
    SPARE_PAGES = 2,
    ELEMENT_BYTES = 2,
};

#define POISON 0xFF

void *prefill_zone(const struct prefill_data *data, void *memory, enum prefill_zone zone)
{
    return canary_zone_at(&data->zones[zone], memory);
}

// ---- sizes

static int32_t find_longest(const struct prefill_data *data)
{
    int32_t longest = 0;
    for (int32_t b = 0; b < data->c.batch; b++)
        if (data->sequences[b].kv_len > longest) longest = data->sequences[b].kv_len;
    return longest;
}

static void set_strides(struct prefill_data *data)
{
    const struct prefill_case *const c = &data->c;
    struct attn_prefill_params *const p = &data->params;
    const int64_t dim = c->head_dim, row = c->num_kv_heads * dim;
    p->q_token_stride = c->num_q_heads * dim + (c->strided ? 24 : 0);
    p->k_token_stride = c->strided ? (c->page_size ? dim : row + 8) : row;
    p->k_head_stride = c->strided && c->page_size ? c->page_size * dim : dim;
    p->k_page_stride = c->page_size * row;
    p->v_token_stride = row;
    p->v_head_stride = dim;
    p->v_page_stride = c->page_size * row + (c->strided && c->page_size ? 8 : 0);
}

static void place_sequences(struct prefill_data *data)
{
    struct attn_prefill_params *const p = &data->params;
    p->num_tokens = data->c.ragged ? SPARE_TOKENS : 0;
    for (int32_t b = 0; b < data->c.batch; b++) {
        data->first_token[b] = p->num_tokens;
        data->first_key[b] = p->num_kv_tokens;
        p->num_tokens += data->sequences[b].q_len;
        // Ragged, a token of nobody's lies between two sequences.
        p->num_kv_tokens += data->sequences[b].kv_len + data->c.ragged;
    }
    if (data->c.ragged) p->num_tokens += SPARE_TOKENS;
}

static void set_params(struct prefill_data *data)
{
    const struct prefill_case *const c = &data->c;
    struct attn_prefill_params *const p = &data->params;
    *p = ATTN_PREFILL_PARAMS_INIT;
    p->dtype = c->dtype;
    p->batch = c->batch;
    // Of no meaning where ragged.
    p->q_len = c->ragged ? -5 : data->sequences[0].q_len;
    p->kv_len = c->ragged ? -5 : data->sequences[0].kv_len;
    p->q_offset = data->sequences[0].q_offset;
    p->num_q_heads = c->num_q_heads;
    p->num_kv_heads = c->num_kv_heads;
    p->head_dim = c->head_dim;
    p->causal = !c->not_causal;
    p->window = c->window;
    p->softcap = c->softcap;
    p->scale = c->scale != 0 ? c->scale : (float) (1 / sqrt(c->head_dim));
    place_sequences(data);
    set_strides(data);
    if (!c->page_size) return;
    p->page_size = c->page_size;
    p->max_pages_per_seq = find_longest(data) / c->page_size + 1;
    p->table_stride = p->max_pages_per_seq + c->strided;
    p->num_pages = (int64_t) p->max_pages_per_seq * c->batch + SPARE_PAGES;
}

static bool lay_out(struct prefill_data *data)
{
    const struct prefill_case *const c = &data->c;
    const struct attn_prefill_params *const p = &data->params;
    const size_t tokens = (size_t) p->num_tokens, batch = (size_t) c->batch;
    const size_t kv_tokens = (size_t) p->num_kv_tokens, pages = (size_t) p->num_pages;
    const bool paged = c->page_size;
    const size_t k =
        paged ? pages * (size_t) p->k_page_stride : kv_tokens * (size_t) p->k_token_stride;
    const size_t v =
        paged ? pages * (size_t) p->v_page_stride : kv_tokens * (size_t) p->v_token_stride;
    const size_t bytes[NUM_PREFILL_ZONES] = {
        [PREFILL_ZONE_Q] = tokens * (size_t) p->q_token_stride * ELEMENT_BYTES,
        [PREFILL_ZONE_K] = k * ELEMENT_BYTES,
        [PREFILL_ZONE_V] = v * ELEMENT_BYTES,
        [PREFILL_ZONE_TABLE] = paged ? batch * (size_t) p->table_stride * 4 : 0,
        [PREFILL_ZONE_CU_SEQLENS] = c->ragged ? (batch + 1) * 4 : 0,
        [PREFILL_ZONE_KV_LENS] = c->ragged ? batch * 4 : 0,
        [PREFILL_ZONE_Q_OFFSETS] = c->ragged ? batch * 4 : 0,
        [PREFILL_ZONE_KV_STARTS] = c->ragged && !paged ? batch * 4 : 0,
        [PREFILL_ZONE_SINKS] = c->sinks ? (size_t) c->num_q_heads * 4 : 0,
        [PREFILL_ZONE_O] = tokens * (size_t) (c->num_q_heads * c->head_dim) * ELEMENT_BYTES,
        [PREFILL_ZONE_LSE] = tokens * (size_t) c->num_q_heads * 4,
        [PREFILL_ZONE_FAULT] = 4,
    };
    for (int i = 0; i < NUM_PREFILL_ZONES; i++)
        data->zones[i] = (struct canary_zone){ .bytes = bytes[i], .writable = i >= PREFILL_ZONE_O };
    data->bytes = canary_lay_out(data->zones, NUM_PREFILL_ZONES);
    data->image = aligned_alloc(256, (data->bytes + 255) / 256 * 256);
    data->result = aligned_alloc(256, (data->bytes + 255) / 256 * 256);
    if (!data->image || !data->result) return false;
    memset(data->image, POISON, data->bytes);
    return true;
}

// ---- contents

// A row of uniform numbers that its coordinates decide.
static void fill_row(const struct prefill_data *data, uint16_t *to, int64_t at, double size,
                     uint64_t seed)
{
    struct random random = { random_mix(data->c.seed, seed) };
    for (int32_t d = 0; d < data->c.head_dim; d++)
        attn_store(to, at + d, data->c.dtype, size * random_uniform(&random));
}

static void fill_query(const struct prefill_data *data, int32_t b, int32_t token, uint64_t id)
{
    static const double sizes[NUM_PREFILL_FILLS] = { 3, 60, 0, 3 };
    const int64_t at = (int64_t) (data->first_token[b] + token) * data->params.q_token_stride;
    // The position decides, not where the call begins.
    const uint64_t position = (uint64_t) ((int64_t) data->sequences[b].q_offset + token);
    for (int32_t h = 0; h < data->c.num_q_heads; h++)
        fill_row(data, prefill_zone(data, data->image, PREFILL_ZONE_Q),
                 at + (int64_t) h * data->c.head_dim, sizes[data->c.fill],
                 random_mix(id, random_mix(1 + (uint64_t) h * 4, position)));
}

static void fill_key(const struct prefill_data *data, int32_t b, int32_t key, uint64_t id)
{
    const struct prefill_case *const c = &data->c;
    const double largest = c->dtype == ATTN_DTYPE_FP16 ? 65504 : 3e38;
    uint16_t *const k = prefill_zone(data, data->image, PREFILL_ZONE_K);
    uint16_t *const v = prefill_zone(data, data->image, PREFILL_ZONE_V);
    for (int32_t h = 0; h < c->num_kv_heads; h++) {
        const uint64_t at = random_mix(id, random_mix(2 + (uint64_t) h * 4, (uint64_t) key));
        const int64_t v_at = prefill_key_at(data, b, key, h, true);
        const bool ones = c->fill == PREFILL_FILL_ONES;
        fill_row(data, k, prefill_key_at(data, b, key, h, false), ones ? 0 : 1, at);
        fill_row(data, v, v_at,
                 ones                           ? 0
                 : c->fill == PREFILL_FILL_HUGE ? largest
                                                : 1,
                 random_mix(3, at));
        if (ones) attn_store(v, v_at + key % c->head_dim, c->dtype, 1);
    }
}

// Keys that some query token sees: [*first, *behind).
static void find_seen(const struct prefill_data *data, int32_t b, int32_t *first, int32_t *behind)
{
    const struct prefill_sequence *const s = &data->sequences[b];
    const int64_t end = (int64_t) s->q_offset + s->q_len;
    const int64_t start = data->c.window ? (int64_t) s->q_offset - data->c.window + 1 : 0;
    const int64_t last = data->c.not_causal || end > s->kv_len ? s->kv_len : end;
    *first = start > 0 ? (int32_t) start : 0;
    *behind = s->q_len > 0 && last > *first ? (int32_t) last : *first;
}

// Pages that nobody sees have no id, and what nobody sees of others stays NaN.
static void fill_sequence(const struct prefill_data *data, int32_t b, const int32_t *pages)
{
    const struct prefill_case *const c = &data->c;
    const uint64_t id = random_mix(7, data->sequences[b].id);
    int32_t first, behind;
    find_seen(data, b, &first, &behind);
    for (int32_t i = 0; pages && i < data->params.max_pages_per_seq; i++) {
        static const int32_t wild[] = { -1, INT32_MAX, INT32_MIN };
        int32_t *const entry = prefill_table_at(data, b, i * c->page_size);
        const int64_t start = (int64_t) i * c->page_size;
        const bool seen = start < behind && start + c->page_size > first;
        *entry = seen ? pages[b * data->params.max_pages_per_seq + i] : wild[i % 3];
    }
    for (int32_t token = 0; token < data->sequences[b].q_len; token++)
        fill_query(data, b, token, id);
    for (int32_t key = first; key < behind; key++) fill_key(data, b, key, id);
}

static void fill_lists(const struct prefill_data *data)
{
    int32_t *const cu_seqlens = prefill_zone(data, data->image, PREFILL_ZONE_CU_SEQLENS);
    int32_t *const kv_lens = prefill_zone(data, data->image, PREFILL_ZONE_KV_LENS);
    int32_t *const offsets = prefill_zone(data, data->image, PREFILL_ZONE_Q_OFFSETS);
    int32_t *const starts = prefill_zone(data, data->image, PREFILL_ZONE_KV_STARTS);
    float *const sinks = prefill_zone(data, data->image, PREFILL_ZONE_SINKS);
    for (int32_t b = 0; b < data->c.batch && cu_seqlens; b++) {
        cu_seqlens[b] = data->first_token[b];
        cu_seqlens[b + 1] = data->first_token[b] + data->sequences[b].q_len;
        kv_lens[b] = data->sequences[b].kv_len;
        offsets[b] = data->sequences[b].q_offset;
        if (starts) starts[b] = data->first_key[b];
    }
    for (int32_t h = 0; sinks && h < data->c.num_q_heads; h++) sinks[h] = (float) h - 1.5f;
    *(int32_t *) prefill_zone(data, data->image, PREFILL_ZONE_FAULT) = INT32_MAX;
}

// A random order of all pages; NULL if contiguous or memory ran out.
static int32_t *order_pages(const struct prefill_data *data)
{
    const int32_t count = (int32_t) data->params.num_pages;
    struct random random = { random_mix(data->c.page_seed, 11) };
    int32_t *const pages = data->c.page_size ? malloc((size_t) count * sizeof(*pages)) : NULL;
    for (int32_t i = 0; pages && i < count; i++) {
        const int32_t place = (int32_t) random_below(&random, (uint32_t) i + 1);
        pages[i] = pages[place];
        pages[place] = i;
    }
    return pages;
}

struct prefill_data *prefill_data_build(const struct prefill_case *c)
{
    struct prefill_data *data = calloc(1, sizeof(*data));
    const size_t batch = (size_t) c->batch;
    if (!data) return NULL;
    data->c = *c;
    if (!data->c.dtype) data->c.dtype = ATTN_DTYPE_BF16;
    data->sequences = calloc(batch + 1, sizeof(*data->sequences));
    data->first_token = calloc(batch + 1, sizeof(*data->first_token));
    data->first_key = calloc(batch + 1, sizeof(*data->first_key));
    if (!data->sequences || !data->first_token || !data->first_key) goto fail;
    for (int32_t b = 0; b < c->batch; b++) {
        data->sequences[b] = c->sequences[c->ragged ? b : 0];
        data->sequences[b].id = c->sequences[b].id;
    }
    set_params(data);
    if (!lay_out(data)) goto fail;
    int32_t *const pages = order_pages(data);
    if (c->page_size && !pages) goto fail;
    for (int32_t b = 0; b < c->batch; b++) fill_sequence(data, b, pages);
    fill_lists(data);
    free(pages);
    return data;
fail:
    prefill_data_free(&data);
    return NULL;
}

void prefill_data_free(struct prefill_data **data)
{
    if (!*data) return;
    free((*data)->sequences);
    free((*data)->first_token);
    free((*data)->first_key);
    free((*data)->image);
    free((*data)->result);
    free(*data);
    *data = NULL;
}

struct attn_prefill_params prefill_data_params(const struct prefill_data *data, void *memory)
{
    struct attn_prefill_params p = data->params;
    p.q = prefill_zone(data, memory, PREFILL_ZONE_Q);
    p.k = prefill_zone(data, memory, PREFILL_ZONE_K);
    p.v = prefill_zone(data, memory, PREFILL_ZONE_V);
    p.o = prefill_zone(data, memory, PREFILL_ZONE_O);
    p.block_table = prefill_zone(data, memory, PREFILL_ZONE_TABLE);
    p.cu_seqlens = prefill_zone(data, memory, PREFILL_ZONE_CU_SEQLENS);
    p.kv_lens = prefill_zone(data, memory, PREFILL_ZONE_KV_LENS);
    p.q_offsets = prefill_zone(data, memory, PREFILL_ZONE_Q_OFFSETS);
    p.kv_starts = prefill_zone(data, memory, PREFILL_ZONE_KV_STARTS);
    p.sinks = prefill_zone(data, memory, PREFILL_ZONE_SINKS);
    p.lse = prefill_zone(data, memory, PREFILL_ZONE_LSE);
    p.fault = prefill_zone(data, memory, PREFILL_ZONE_FAULT);
    // Of no meaning, and wild.
    if (!p.cu_seqlens) p.num_tokens = -9;
    if (!p.kv_starts) p.num_kv_tokens = -9;
    return p;
}

int32_t *prefill_table_at(const struct prefill_data *data, int32_t sequence, int32_t key)
{
    int32_t *const table = prefill_zone(data, data->image, PREFILL_ZONE_TABLE);
    return table + sequence * data->params.table_stride + key / data->c.page_size;
}

int64_t prefill_key_at(const struct prefill_data *data, int32_t sequence, int32_t key, int32_t head,
                       bool is_v)
{
    const struct attn_prefill_params *const p = &data->params;
    const bool paged = data->c.page_size;
    const int64_t page = paged ? *prefill_table_at(data, sequence, key) : 0;
    const int64_t slot =
        paged ? key % data->c.page_size : data->first_key[sequence] + (int64_t) key;
    return is_v ? page * p->v_page_stride + slot * p->v_token_stride + head * p->v_head_stride
                : page * p->k_page_stride + slot * p->k_token_stride + head * p->k_head_stride;
}

// ---- results

enum attn_status prefill_data_run_host(struct prefill_data *data, struct attn_device *device,
                                       prefill_entry entry)
{
    memcpy(data->result, data->image, data->bytes);
    const struct attn_prefill_params params = prefill_data_params(data, data->result);
    return entry(device, &params, NULL);
}

int32_t prefill_data_fault(const struct prefill_data *data)
{
    return *(const int32_t *) prefill_zone(data, data->result, PREFILL_ZONE_FAULT);
}

// Rows of o and lse before `token` and from it on that belong to nobody, `count` of them.
static bool are_untouched(const struct prefill_data *data, int32_t token, int32_t count)
{
    const size_t heads = (size_t) data->c.num_q_heads, row = heads * (size_t) data->c.head_dim;
    const uint8_t *const o = prefill_zone(data, data->result, PREFILL_ZONE_O);
    const uint8_t *const lse = prefill_zone(data, data->result, PREFILL_ZONE_LSE);
    const size_t first = (size_t) token, rows = (size_t) count;
    for (size_t i = first * row * ELEMENT_BYTES; i < (first + rows) * row * ELEMENT_BYTES; i++)
        if (o[i] != POISON) return false;
    for (size_t i = first * heads * 4; i < (first + rows) * heads * 4; i++)
        if (lse[i] != POISON) return false;
    return true;
}

bool prefill_data_intact(const struct prefill_data *data)
{
    if (canary_find(data->zones, NUM_PREFILL_ZONES, data->image, data->result, data->bytes) >= 0)
        return false;
    return !data->c.ragged || data->has_other_tokens ||
           (are_untouched(data, 0, SPARE_TOKENS) &&
            are_untouched(data, data->params.num_tokens - SPARE_TOKENS, SPARE_TOKENS));
}

static struct attn_check_place pick_place(const struct prefill_data *data, int32_t i,
                                          struct random *random)
{
    struct attn_check_place place = { .token = 0 };
    // Some sequence has tokens.
    do place.sequence = (int32_t) random_below(random, (uint32_t) data->c.batch);
    while (data->sequences[place.sequence].q_len == 0);
    const uint32_t q_len = (uint32_t) data->sequences[place.sequence].q_len;
    place.token = i % 8 == 0   ? 0
                  : i % 8 == 1 ? (int32_t) q_len - 1
                               : (int32_t) random_below(random, q_len);
    place.head = (int32_t) random_below(random, (uint32_t) data->c.num_q_heads);
    return place;
}

bool prefill_data_check(const struct prefill_data *data, int32_t rows, enum attn_check_bound bound,
                        struct attn_check *check)
{
    const struct attn_prefill_params params = prefill_data_params(data, data->image);
    const struct attn_check_prefill call = {
        .params = &params,
        .o = prefill_zone(data, data->result, PREFILL_ZONE_O),
        .lse = prefill_zone(data, data->result, PREFILL_ZONE_LSE),
    };
    struct random random = { data->c.seed };
    int64_t all = 0;
    for (int32_t b = 0; b < data->c.batch; b++)
        all += (int64_t) data->sequences[b].q_len * data->c.num_q_heads;
    if (all <= rows) {
        attn_check_prefill(&call, bound, check);
    } else {
        struct attn_check_place *const places = malloc((size_t) rows * sizeof(*places));
        if (!places) return false;
        for (int32_t i = 0; i < rows; i++) places[i] = pick_place(data, i, &random);
        attn_check_prefill_rows(&call, places, rows, bound, check);
        free(places);
    }
    return check->failed == 0 && check->lse_failed == 0;
}

const char *prefill_check_text(const struct attn_check *check, char *text, size_t size)
{
    snprintf(text, size,
             "%lld of %lld elements, %lld lse beyond the bound; worst is sequence %d token %d head "
             "%d dim %d: %.9g, exactly %.9g (%.3f of the bound; lse %.3f)",
             (long long) check->failed, (long long) check->compared, (long long) check->lse_failed,
             check->worst_sequence, check->worst_token, check->worst_head, check->worst_dim,
             check->worst_value, check->worst_exact, check->max_ratio, check->lse_max_ratio);
    return text;
}

int64_t prefill_count_differences(const struct prefill_data *a, int32_t sequence_a, int32_t token_a,
                                  const struct prefill_data *b, int32_t sequence_b, int32_t token_b,
                                  int32_t count)
{
    const int64_t heads = a->c.num_q_heads, row = heads * a->c.head_dim;
    const int64_t first_a = a->first_token[sequence_a] + token_a;
    const int64_t first_b = b->first_token[sequence_b] + token_b;
    const uint16_t *const o_a =
        (const uint16_t *) prefill_zone(a, a->result, PREFILL_ZONE_O) + first_a * row;
    const uint16_t *const o_b =
        (const uint16_t *) prefill_zone(b, b->result, PREFILL_ZONE_O) + first_b * row;
    const uint32_t *const lse_a =
        (const uint32_t *) prefill_zone(a, a->result, PREFILL_ZONE_LSE) + first_a * heads;
    const uint32_t *const lse_b =
        (const uint32_t *) prefill_zone(b, b->result, PREFILL_ZONE_LSE) + first_b * heads;
    int64_t differences = 0;
    for (int64_t i = 0; i < count * row; i++) differences += o_a[i] != o_b[i];
    for (int64_t i = 0; i < count * heads; i++) differences += lse_a[i] != lse_b[i];
    return differences;
}

int64_t prefill_count_all_differences(const struct prefill_data *a, const struct prefill_data *b)
{
    int64_t differences = 0;
    for (int32_t s = 0; s < a->c.batch; s++)
        differences += prefill_count_differences(a, s, 0, b, s, 0, a->sequences[s].q_len);
    return differences;
}

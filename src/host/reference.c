/* SPDX-License-Identifier: Apache-2.0 */
#include "host/reference.h"

#include "host/convert.h"
#include "host/math.h"

#include <stdbool.h>
#include <string.h>

#define INFINITE (__builtin_inf())

enum {
    MAX_HEAD_DIM = 512,
    // Keys whose scores are known before their values are added up. Blocks lie between absolute
    // multiples of this, so that how a sequence is computed depends on the sequence alone.
    BLOCK_KEYS = 256,
};

// One row's view of the call.
struct view {
    const struct attn_decode_params *params;
    const int32_t *table;
    int32_t kv_head;
    // Attended keys: [start, len).
    int64_t start, len;
    // Of the scores, and of v.
    double scale, v_scale;
    double q[MAX_HEAD_DIM];
    bool fault;
};

// A sum of e^(s_j - m) v_j over the keys so far.
struct sum {
    double m, l;
    double o[MAX_HEAD_DIM];
    // Of |v_j|, with and without weights; only where the bound is asked for.
    double weighted[MAX_HEAD_DIM], plain[MAX_HEAD_DIM];
    double score_size;
    bool with_bound;
};

#ifdef ATTN_MUTATION
#include "tests/mutations/reference.h"
#endif

static void view_row(struct view *view, const struct attn_decode_params *params, int32_t sequence,
                     int32_t head)
{
    const int64_t given = params->seq_lens[sequence];
    const int64_t most = (int64_t) params->max_pages_per_seq * params->page_size;
    view->params = params;
    view->table = params->block_table + (int64_t) sequence * params->max_pages_per_seq;
    view->kv_head = head / (params->num_q_heads / params->num_kv_heads);
    view->len = given < 0 ? 0 : given > most ? most : given;
    view->start = params->window > 0 && view->len > params->window ? view->len - params->window : 0;
    view->fault = view->len != given;
    view->scale = (double) params->scale *
                  (params->k_scales ? params->k_scales[view->kv_head] : params->k_scale);
    view->v_scale = params->v_scales ? params->v_scales[view->kv_head] : params->v_scale;
    attn_load_row(view->q, params->q,
                  sequence * params->q_stride + (int64_t) head * params->head_dim, params->head_dim,
                  params->q_dtype);
#ifdef ATTN_MUTATION
    mutate_view(view, sequence, head);
#endif
}

// The page of an attended key; -1 if the table names none of the pool.
static int64_t find_page(struct view *view, int64_t key)
{
    const int64_t page = view->table[key / view->params->page_size];
    if (page >= 0 && page < view->params->num_pages) return page;
    view->fault = true;
    return -1;
}

// q . k, and sum |q_d k_d|. Sixteen partial sums, for speed: the order is part of no promise, but
// is fixed.
static double multiply(const double *q, const double *k, int32_t head_dim, double *size)
{
    double part[ATTN_ROW_UNIT] = { 0 }, part_size[ATTN_ROW_UNIT] = { 0 };
    for (int32_t d = 0; d < head_dim; d += ATTN_ROW_UNIT)
        for (int i = 0; i < ATTN_ROW_UNIT; i++) {
            const double product = q[d + i] * k[d + i];
            part[i] += product;
            part_size[i] += __builtin_fabs(product);
        }
    for (int i = ATTN_ROW_UNIT / 2; i > 0; i /= 2)
        for (int j = 0; j < i; j++) part[j] += part[j + i], part_size[j] += part_size[j + i];
    *size = part_size[0];
    return part[0];
}

static double score_key(const struct view *view, int64_t page, int64_t slot, struct sum *sum)
{
    const struct attn_decode_params *const p = view->params;
    double k[MAX_HEAD_DIM], size;
    attn_load_row(k, p->k_pool,
                  page * p->k_page_stride + slot * p->k_token_stride +
                      view->kv_head * p->k_head_stride,
                  p->head_dim, p->kv_dtype);
    const double s = view->scale * multiply(view->q, k, p->head_dim, &size);
    size *= __builtin_fabs(view->scale);
    // An infinite score is exact: it has no rounding error for the bound to allow for.
    if (size > sum->score_size && size < INFINITE) sum->score_size = size;
    return p->softcap > 0 ? p->softcap * attn_tanh(s / p->softcap) : s;
}

// Scores of the attended keys of [first, end), and their pages (-1: absent). Returns the largest
// score; a NaN is not the largest, but makes every sum it is added to NaN.
static double score_block(struct view *view, int64_t first, int64_t end, double *scores,
                          int64_t *pages, struct sum *sum)
{
    double m = -INFINITE;
    for (int64_t key = first; key < end; key++) {
        const int64_t i = key - first;
        pages[i] = find_page(view, key);
        if (pages[i] < 0) continue;
        scores[i] = score_key(view, pages[i], key % view->params->page_size, sum);
        if (scores[i] > m) m = scores[i];
    }
    return m;
}

static void rescale(struct sum *sum, double m, int32_t head_dim)
{
    if (m <= sum->m) return;
    // Nothing weighs anything yet under -inf, but 0 * NaN has to stay NaN.
    const double factor = attn_exp(sum->m - m);
    sum->l *= factor;
    for (int32_t d = 0; d < head_dim; d++) sum->o[d] *= factor;
    if (sum->with_bound)
        for (int32_t d = 0; d < head_dim; d++) sum->weighted[d] *= factor;
    sum->m = m;
}

static void add(struct sum *sum, const double *v, double weight, int32_t head_dim)
{
    for (int32_t d = 0; d < head_dim; d += ATTN_ROW_UNIT)
        for (int32_t i = d; i < d + ATTN_ROW_UNIT; i++) sum->o[i] += weight * v[i];
}

static void add_with_bound(struct sum *sum, const double *v, double weight, int32_t head_dim)
{
    for (int32_t d = 0; d < head_dim; d += ATTN_ROW_UNIT)
        for (int32_t i = d; i < d + ATTN_ROW_UNIT; i++) {
            const double size = __builtin_fabs(v[i]);
            sum->o[i] += weight * v[i];
            sum->weighted[i] += weight * size;
            sum->plain[i] += size;
        }
}

static void add_value(const struct view *view, int64_t page, int64_t slot, double weight,
                      struct sum *sum)
{
    const struct attn_decode_params *const p = view->params;
    double v[MAX_HEAD_DIM];
    attn_load_row(v, p->v_pool,
                  page * p->v_page_stride + slot * p->v_token_stride +
                      view->kv_head * p->v_head_stride,
                  p->head_dim, p->kv_dtype);
    sum->l += weight;
    if (sum->with_bound)
        add_with_bound(sum, v, weight, p->head_dim);
    else
        add(sum, v, weight, p->head_dim);
}

static void sum_keys(struct view *view, struct sum *sum)
{
    double scores[BLOCK_KEYS];
    int64_t pages[BLOCK_KEYS];
    for (int64_t first = view->start; first < view->len;) {
        int64_t edge = (first / BLOCK_KEYS + 1) * BLOCK_KEYS;
#ifdef ATTN_MUTATION
        edge = mutate_edge(view, sum, first, edge);
#endif
        const int64_t end = edge < view->len ? edge : view->len;
        rescale(sum, score_block(view, first, end, scores, pages, sum), view->params->head_dim);
        // Under a largest score of -inf every weight is 0, not e^NaN.
        const double m = sum->m == -INFINITE ? 0 : sum->m;
        for (int64_t key = first; key < end; key++) {
            const int64_t i = key - first;
            if (pages[i] < 0) continue;
            add_value(view, pages[i], key % view->params->page_size, attn_exp(scores[i] - m), sum);
        }
        first = end;
    }
}

// Brings in the sink, and divides. What all scores of -inf leave is 0, with an lse of -inf.
static void finish_row(const struct view *view, double sink, const struct sum *sum,
                       struct attn_reference_row *row)
{
    const bool has_sink = sink != -INFINITE;
    // The larger of the two; NaN if the sink is.
    const double top = has_sink && !(sink <= sum->m) ? sink : sum->m;
    const double m = top == -INFINITE ? 0 : top;
    const double factor = attn_exp(sum->m - m);
    const double l = sum->l * factor + (has_sink ? attn_exp(sink - m) : 0);
    const double v_size = __builtin_fabs(view->v_scale);
    const bool nothing = l == 0;
    row->lse = nothing ? -INFINITE : m + attn_log(l);
    row->score_size = sum->score_size;
    row->fault = view->fault;
    for (int32_t d = 0; d < view->params->head_dim; d++) {
        row->o[d] = nothing ? 0 : view->v_scale * (sum->o[d] * factor / l);
        if (row->weighted_abs)
            row->weighted_abs[d] = nothing ? 0 : v_size * (sum->weighted[d] * factor / l);
        if (row->plain_abs) row->plain_abs[d] = sum->l == 0 ? 0 : v_size * (sum->plain[d] / sum->l);
    }
}

void attn_reference_decode_row(const struct attn_decode_params *params, int32_t sequence,
                               int32_t head, struct attn_reference_row *row)
{
    struct view view;
    struct sum sum;
    view_row(&view, params, sequence, head);
    sum.m = -INFINITE;
    sum.l = 0;
    sum.score_size = 0;
    sum.with_bound = row->weighted_abs || row->plain_abs;
    const size_t bytes = (size_t) params->head_dim * sizeof(double);
    memset(sum.o, 0, bytes);
    memset(sum.weighted, 0, bytes);
    memset(sum.plain, 0, bytes);

    sum_keys(&view, &sum);
    finish_row(&view, params->sinks ? params->sinks[head] : -INFINITE, &sum, row);
}

int attn_reference_decode(const struct attn_decode_params *params)
{
    double o[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = o };
    for (int32_t sequence = 0; sequence < params->batch; sequence++)
        for (int32_t head = 0; head < params->num_q_heads; head++) {
            const int64_t index = (int64_t) sequence * params->num_q_heads + head;
            attn_reference_decode_row(params, sequence, head, &row);
            // + 0.0: a sum of zeros has no sign.
            for (int32_t d = 0; d < params->head_dim; d++)
                attn_store(params->o, index * params->head_dim + d, params->q_dtype, o[d] + 0.0);
            if (params->lse) params->lse[index] = (float) row.lse;
            if (params->fault && row.fault && sequence < *params->fault) *params->fault = sequence;
        }
    return 0;
}

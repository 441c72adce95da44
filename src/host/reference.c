/* SPDX-License-Identifier: Apache-2.0 */
#include "host/reference.h"

#include "host/convert.h"
#include "host/math.h"

#include <stdbool.h>
#include <stdlib.h>
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
    const int32_t *k_table, *v_table;
    int32_t kv_head;
    // Keys that the row may attend: [start, end), and of those from `past` on the ones whose bit is
    // set in `mask`: NULL where all are.
    int64_t start, past, end;
    const int32_t *mask;
    // Of the scores, and of v.
    double scale, v_scale;
    double q[MAX_HEAD_DIM];
    bool fault;
};

// Where a key is: in which page of K and of V, -1 if the row does not attend it; and in which slot.
struct place {
    int64_t k_page, v_page, slot;
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

// The length of a sequence as far as its table goes; *fault is set if it is another one.
static int64_t clamp_len(const struct attn_decode_params *params, int32_t sequence, bool *fault)
{
    const int64_t given = params->seq_lens[sequence];
    const int64_t most = (int64_t) params->max_pages_per_seq * params->page_size;
    const int64_t len = given < 0 ? 0 : given > most ? most : given;
    if (len != given) *fault = true;
    return len;
}

static const int32_t *table_row(const struct attn_decode_params *params, const int32_t *table,
                                int32_t sequence)
{
    const int64_t stride = params->table_stride ? params->table_stride : params->max_pages_per_seq;
    return table + sequence * stride;
}

// Which keys query token `token` of a sequence of `len` keys sees.
static void view_keys(struct view *view, int32_t sequence, int32_t token, int64_t len)
{
    const struct attn_decode_params *const p = view->params;
    const int64_t past = len > p->q_len ? len - p->q_len : 0, position = past + token;
    const bool shared = p->window_form == ATTN_WINDOW_SHARED;
    // One behind the last key of a full window.
    const int64_t window_end = shared ? len : position + 1;
    const int64_t row = (int64_t) sequence * p->q_len + token;
    view->start = p->window > 0 && window_end > p->window ? window_end - p->window : 0;
    view->past = past;
    view->mask = p->tree_mask ? p->tree_mask + row * p->mask_words : NULL;
    view->end = view->mask || position >= len ? len : position + 1;
    if (len > 0 && len < p->q_len) view->fault = true;
}

static void load_q(struct view *view, int32_t sequence, int32_t token, int32_t head)
{
    const struct attn_decode_params *const p = view->params;
    const int64_t dense = (int64_t) p->num_q_heads * p->head_dim;
    const int64_t stride = p->q_token_stride ? p->q_token_stride : dense;
    attn_load_row(view->q, p->q,
                  sequence * p->q_stride + token * stride + (int64_t) head * p->head_dim,
                  p->head_dim, p->q_dtype);
}

static void view_row(struct view *view, const struct attn_decode_params *params, int32_t sequence,
                     int32_t token, int32_t head)
{
    const int32_t *const v_table =
        params->v_block_table ? params->v_block_table : params->block_table;
    view->params = params;
    view->fault = false;
    view->k_table = table_row(params, params->block_table, sequence);
    view->v_table = table_row(params, v_table, sequence);
    view->kv_head = head / (params->num_q_heads / params->num_kv_heads);
    view->scale = (double) params->scale *
                  (params->k_scales ? params->k_scales[view->kv_head] : params->k_scale);
    view->v_scale = params->v_scales ? params->v_scales[view->kv_head] : params->v_scale;
    view_keys(view, sequence, token, clamp_len(params, sequence, &view->fault));
    load_q(view, sequence, token, head);
#ifdef ATTN_MUTATION
    mutate_view(view, sequence, token, head);
#endif
}

static bool is_visible(const struct view *view, int64_t key)
{
    if (key < view->start || key >= view->end) return false;
    if (!view->mask || key < view->past) return true;
    const int64_t draft = key - view->past;
    return (uint32_t) view->mask[draft / 32] >> draft % 32 & 1;
}

// Keys with a page outside the pool count as absent.
static struct place find_key(struct view *view, int64_t key)
{
    const struct place absent = { -1, -1, 0 };
    const int64_t num_pages = view->params->num_pages;
    if (!is_visible(view, key)) return absent;
    const int64_t column = key / view->params->page_size;
    const struct place place = { view->k_table[column], view->v_table[column],
                                 key % view->params->page_size };
    if (place.k_page >= 0 && place.k_page < num_pages && place.v_page >= 0 &&
        place.v_page < num_pages)
        return place;
    view->fault = true;
    return absent;
}

static double score_key(const struct view *view, struct place place, double *score_size)
{
    const struct attn_decode_params *const p = view->params;
    double k[MAX_HEAD_DIM], size;
    attn_load_row(k, p->k_pool,
                  place.k_page * p->k_page_stride + place.slot * p->k_token_stride +
                      view->kv_head * p->k_head_stride,
                  p->head_dim, p->kv_dtype);
    const double s = view->scale * attn_multiply_rows(view->q, k, p->head_dim, &size);
    size *= __builtin_fabs(view->scale);
    // An infinite score is exact: it has no rounding error for the bound to allow for.
    if (size > *score_size && size < INFINITE) *score_size = size;
    return p->softcap > 0 ? p->softcap * attn_tanh(s / p->softcap) : s;
}

// Scores of the attended keys of [first, end), and where they are. Returns the largest score; a NaN
// is not the largest, but makes every sum it is added to NaN.
static double score_block(struct view *view, int64_t first, int64_t end, const uint8_t *dropped,
                          double *scores, struct place *places, double *score_size)
{
    double m = -INFINITE;
    for (int64_t key = first; key < end; key++) {
        const int64_t i = key - first;
        places[i] = find_key(view, key);
        if (dropped && dropped[key / ATTN_SKIP_KEYS]) places[i].k_page = -1;
        if (places[i].k_page < 0) continue;
        scores[i] = score_key(view, places[i], score_size);
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

static void add_value(const struct view *view, struct place place, double weight, struct sum *sum)
{
    const struct attn_decode_params *const p = view->params;
    double v[MAX_HEAD_DIM];
    attn_load_row(v, p->v_pool,
                  place.v_page * p->v_page_stride + place.slot * p->v_token_stride +
                      view->kv_head * p->v_head_stride,
                  p->head_dim, p->kv_dtype);
    sum->l += weight;
    if (sum->with_bound)
        add_with_bound(sum, v, weight, p->head_dim);
    else
        add(sum, v, weight, p->head_dim);
}

static void sum_keys(struct view *view, const uint8_t *dropped, struct sum *sum)
{
    double scores[BLOCK_KEYS];
    struct place places[BLOCK_KEYS];
    for (int64_t first = view->start; first < view->end;) {
        int64_t edge = (first / BLOCK_KEYS + 1) * BLOCK_KEYS;
#ifdef ATTN_MUTATION
        edge = mutate_edge(view, sum, first, edge);
#endif
        const int64_t end = edge < view->end ? edge : view->end;
        rescale(sum, score_block(view, first, end, dropped, scores, places, &sum->score_size),
                view->params->head_dim);
        // Under a largest score of -inf every weight is 0, not e^NaN.
        const double m = sum->m == -INFINITE ? 0 : sum->m;
        for (int64_t i = 0; i < end - first; i++)
            if (places[i].k_page >= 0) add_value(view, places[i], attn_exp(scores[i] - m), sum);
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
                               int32_t token, int32_t head, const uint8_t *dropped,
                               struct attn_reference_row *row)
{
    struct view view;
    struct sum sum;
    view_row(&view, params, sequence, token, head);
    sum.m = -INFINITE;
    sum.l = 0;
    sum.score_size = 0;
    sum.with_bound = row->weighted_abs || row->plain_abs;
    const size_t bytes = (size_t) params->head_dim * sizeof(double);
    memset(sum.o, 0, bytes);
    memset(sum.weighted, 0, bytes);
    memset(sum.plain, 0, bytes);

    sum_keys(&view, dropped, &sum);
    finish_row(&view, params->sinks ? params->sinks[head] : -INFINITE, &sum, row);
}

// ---- skip-softmax

// S / len of a sequence of `len` keys; 0 where no block may be left out.
static double find_lambda(const struct attn_decode_params *params, int64_t len)
{
    int32_t s = 0;
    for (int32_t i = 0; params->skip_table && i + 1 < params->skip_table_length; i += 2)
        if (params->skip_table[i] <= len) s = params->skip_table[i + 1];
    return s > 0 && s < len ? (double) s / (double) len : 0;
}

// A run of blocks, as far as it has been walked: for each query head of a group its view, and the
// largest score so far.
struct skip_run {
    struct view *views;
    double *largest;
    int32_t heads;
    double lambda;
};

static bool is_nan(double x)
{
    return x != x;
}

// The largest score of the attended keys of [first, end) for one query head: a NaN is larger than
// all. *attended is set if there are any.
static double find_largest(struct view *view, int64_t first, int64_t end, bool *attended)
{
    double largest = -INFINITE, unused = 0;
    for (int64_t key = first; key < end && !is_nan(largest); key++) {
        const struct place place = find_key(view, key);
        if (place.k_page < 0) continue;
        *attended = true;
        const double score = score_key(view, place, &unused);
        if (is_nan(score) || score > largest) largest = score;
    }
    return largest;
}

// Whether the block of keys [first, end) is left out. `is_first`: nothing of its run was attended
// before it. *attended is set if it has attended keys.
static bool drops_block(struct skip_run *run, int64_t first, int64_t end, bool is_first,
                        bool *attended)
{
    bool drop = !is_first;
    for (int32_t h = 0; h < run->heads; h++) {
        const double largest = find_largest(&run->views[h], first, end, attended);
        double *const so_far = &run->largest[h];
        // False with a NaN on either side, and where both are the same infinity.
        drop = drop && attn_exp(largest - *so_far) < run->lambda;
        if (is_first || is_nan(largest) || largest > *so_far) *so_far = largest;
    }
    return drop && *attended;
}

// Walks the blocks of all runs; returns how many are left out.
static int64_t drop_blocks(struct skip_run *run, uint8_t *dropped)
{
    const int64_t start = run->views[0].start, end = run->views[0].end;
    int64_t count = 0;
    bool is_first = true;
    for (int64_t block = start / ATTN_SKIP_KEYS; block * ATTN_SKIP_KEYS < end; block++) {
        const int64_t first = block * ATTN_SKIP_KEYS, behind = first + ATTN_SKIP_KEYS;
        bool begins = block % ATTN_SKIP_SCOPE == 0, attended = false;
#ifdef ATTN_MUTATION
        begins = mutate_run(begins);
#endif
        if (begins) is_first = true;
        dropped[block] = drops_block(run, first, behind < end ? behind : end, is_first, &attended);
        count += dropped[block];
        if (attended) is_first = false;
    }
    return count;
}

int attn_reference_find_dropped(const struct attn_decode_params *params, int32_t sequence,
                                int32_t kv_head, uint8_t **dropped, int64_t *count)
{
    bool fault = false;
    const int64_t len = clamp_len(params, sequence, &fault);
    const int32_t ratio = params->num_q_heads / params->num_kv_heads;
    struct skip_run run = { .heads = ratio, .lambda = find_lambda(params, len) };
    int result = -1;
    *dropped = NULL;
    *count = 0;
    if (run.lambda <= 0) return 0;

    run.views = malloc((size_t) ratio * sizeof(*run.views));
    run.largest = malloc((size_t) ratio * sizeof(*run.largest));
    uint8_t *blocks = calloc((size_t) (len / ATTN_SKIP_KEYS + 1), sizeof(*blocks));
    if (!run.views || !run.largest || !blocks) goto out;
    for (int32_t h = 0; h < ratio; h++)
        view_row(&run.views[h], params, sequence, 0, kv_head * ratio + h);
    *count = drop_blocks(&run, blocks);
    if (*count > 0) {
        *dropped = blocks;
        blocks = NULL;
    }
    result = 0;
out:
    free(run.views);
    free(run.largest);
    free(blocks);
    return result;
}

// ---- the whole call

static void store_row(const struct attn_decode_params *params, int32_t sequence, int32_t token,
                      int32_t head, const uint8_t *dropped)
{
    double o[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = o };
    const int64_t index = ((int64_t) sequence * params->q_len + token) * params->num_q_heads + head;
    attn_reference_decode_row(params, sequence, token, head, dropped, &row);
    // + 0.0: a sum of zeros has no sign.
    for (int32_t d = 0; d < params->head_dim; d++)
        attn_store(params->o, index * params->head_dim + d, params->q_dtype, o[d] + 0.0);
    if (params->lse) params->lse[index] = (float) row.lse;
    if (params->fault && row.fault && sequence < *params->fault) *params->fault = sequence;
}

int attn_reference_decode(const struct attn_decode_params *params)
{
    const int32_t ratio = params->num_q_heads / params->num_kv_heads;
    for (int32_t sequence = 0; sequence < params->batch; sequence++)
        for (int32_t kv_head = 0; kv_head < params->num_kv_heads; kv_head++) {
            uint8_t *dropped;
            int64_t count;
            if (attn_reference_find_dropped(params, sequence, kv_head, &dropped, &count)) return -1;
            for (int32_t token = 0; token < params->q_len; token++)
                for (int32_t h = 0; h < ratio; h++)
                    store_row(params, sequence, token, kv_head * ratio + h, dropped);
            if (params->dropped_blocks) *params->dropped_blocks += count;
            free(dropped);
        }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "host/tiled.h"

#include "host/convert.h"
#include "host/math.h"
#include "host/reference.h"

#include <stdbool.h>

#define INFINITE (__builtin_inf())

enum {
    MAX_HEAD_DIM = 256
};

// One query head of one sequence, and its part of the state: in FP32 between two units, in double
// within one.
struct row {
    const struct attn_tiled_dims *dims;
    const struct attn_tiled_step_params *params;
    int32_t kv_head;
    double q[MAX_HEAD_DIM];
    float *m, *l, *o;
};

void attn_reference_tiled_begin(const struct attn_tiled_dims *const dims,
                                const struct attn_tiled_state *const state, const int32_t num_seqs)
{
    const int64_t rows = (int64_t) num_seqs * dims->num_q_heads;
    for (int64_t i = 0; i < rows; i++) {
        state->m[i] = -__builtin_inff();
        state->l[i] = 0;
    }
    for (int64_t i = 0; i < rows * dims->head_dim; i++) state->o[i] = 0;
}

static int64_t find_key(const struct row *const row, const int32_t block, const int32_t slot)
{
    const struct attn_tiled_step_params *const p = row->params;
    return block * p->block_stride + slot * p->token_stride + row->kv_head * p->head_stride;
}

// In FP32, as m is: the difference of two scores, however large, is then exact.
static float score_key(const struct row *const row, const int64_t key)
{
    double k[MAX_HEAD_DIM], size;
    attn_load_row(k, row->params->k_pool, key, row->dims->head_dim, row->dims->dtype);
    return (float) (row->params->scale * attn_multiply_rows(row->q, k, row->dims->head_dim, &size));
}

// Scores of `count` keys of a block from slot `first` on. Returns the largest, m at least; a NaN is
// not the largest, but makes every sum it is added to NaN.
static float score_unit(const struct row *const row, const int32_t block, const int32_t first,
                        const int32_t count, float *const scores)
{
    float m = *row->m;
    for (int32_t i = 0; i < count; i++) {
        scores[i] = score_key(row, find_key(row, block, first + i));
        if (scores[i] > m) m = scores[i];
    }
    return m;
}

// Folds `count` keys of a block into the state, from slot `first` on.
static void fold_unit(const struct row *const row, const int32_t block, const int32_t first,
                      const int32_t count)
{
    const int32_t head_dim = row->dims->head_dim;
    float scores[ATTN_TILED_UNIT_KEYS];
    double o[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
    const float m = score_unit(row, block, first, count, scores);
    // Nothing weighs anything yet under -inf, but 0 * NaN has to stay NaN.
    const double factor = m > *row->m ? attn_exp((double) *row->m - m) : 1;
    // Under a largest score of -inf every weight is 0, not e^NaN.
    const double top = m == -INFINITE ? 0 : m;
    double l = *row->l * factor;
    for (int32_t d = 0; d < head_dim; d++) o[d] = row->o[d] * factor;
    for (int32_t i = 0; i < count; i++) {
        const double weight = attn_exp(scores[i] - top);
        attn_load_row(v, row->params->v_pool, find_key(row, block, first + i), head_dim,
                      row->dims->dtype);
        l += weight;
        for (int32_t d = 0; d < head_dim; d++) o[d] += weight * v[d];
    }
    *row->m = m;
    *row->l = (float) l;
    for (int32_t d = 0; d < head_dim; d++) row->o[d] = (float) o[d];
}

// Units lie between multiples of their size within a block, so that what is folded at a time
// depends on the list of blocks alone, and not on how it is cut into tiles.
static void fold_block(const struct row *const row, const int32_t block, const int32_t slots)
{
    for (int32_t first = 0; first < slots;) {
        const int32_t left = slots - first;
        const int32_t count = left < ATTN_TILED_UNIT_KEYS ? left : ATTN_TILED_UNIT_KEYS;
        fold_unit(row, block, first, count);
        first += count;
    }
}

// The part of a tile's list that a sequence has, as far as it can be followed.
struct list {
    const int32_t *blocks;
    int32_t count, last_slots;
    bool fault;
};

static bool is_in_pool(const struct attn_tiled_step_params *const params, const int32_t block)
{
    return block >= 0 && block < params->num_pool_blocks;
}

static struct list find_list(const struct attn_tiled_dims *const dims,
                             const struct attn_tiled_step_params *const params,
                             const int32_t sequence)
{
    const int32_t given = params->tile_block_counts[sequence], most = dims->tile_capacity;
    const int32_t slots =
        params->valid_slots ? params->valid_slots[sequence] : params->last_block_valid_slots;
    struct list list = { .blocks = params->tile_blocks + (int64_t) sequence * most };
    list.count = given < 0 ? 0 : given > most ? most : given;
    list.last_slots = slots < dims->block_size ? slots : dims->block_size;
    list.fault = list.count != given;
    for (int32_t i = 0; i < list.count; i++)
        if (!is_in_pool(params, list.blocks[i])) list.fault = true;
    return list;
}

static void fold_list(const struct attn_tiled_dims *const dims,
                      const struct attn_tiled_state *const state,
                      const struct attn_tiled_step_params *const params, const int32_t sequence,
                      const int32_t head, const struct list *const list)
{
    const int64_t index = (int64_t) sequence * dims->num_q_heads + head;
    struct row row = { .dims = dims, .params = params };
    row.kv_head = head / (dims->num_q_heads / dims->num_kv_heads);
    row.m = state->m + index;
    row.l = state->l + index;
    row.o = state->o + index * dims->head_dim;
    attn_load_row(row.q, params->q, index * dims->head_dim, dims->head_dim, dims->dtype);
    for (int32_t i = 0; i < list->count; i++)
        if (is_in_pool(params, list->blocks[i]))
            fold_block(&row, list->blocks[i],
                       i + 1 < list->count ? dims->block_size : list->last_slots);
}

void attn_reference_tiled_step(const struct attn_tiled_dims *const dims,
                               const struct attn_tiled_state *const state,
                               const struct attn_tiled_step_params *const params)
{
    for (int32_t sequence = 0; sequence < params->num_seqs; sequence++) {
        const struct list list = find_list(dims, params, sequence);
        for (int32_t head = 0; head < dims->num_q_heads; head++)
            fold_list(dims, state, params, sequence, head, &list);
        if (params->fault && list.fault && sequence < *params->fault) *params->fault = sequence;
    }
}

// What all scores of -inf leave is 0, with an lse of -inf.
void attn_reference_tiled_finalize(const struct attn_tiled_dims *const dims,
                                   const struct attn_tiled_state *const state,
                                   const struct attn_tiled_finalize_params *const params)
{
    const int64_t rows = (int64_t) params->num_seqs * dims->num_q_heads;
    for (int64_t row = 0; row < rows; row++) {
        const double m = state->m[row], l = state->l[row];
        const bool nothing = l == 0;
        for (int64_t i = row * dims->head_dim; i < (row + 1) * dims->head_dim; i++)
            // + 0.0: a sum of zeros has no sign.
            attn_store(params->output, i, dims->dtype, nothing ? 0 : state->o[i] / l + 0.0);
        if (params->lse)
            params->lse[row] =
                (float) (nothing ? -INFINITE : (m == -INFINITE ? 0 : m) + attn_log(l));
    }
}

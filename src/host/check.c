/* SPDX-License-Identifier: Apache-2.0 */
#include "host/check.h"

#include "host/math.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define INFINITE (__builtin_inf())

enum {
    MAX_HEAD_DIM = 512
};

// Where the bound comes from (include/attn/decode.h states it): u |exact| is the rounding of o, u A
// the rounding of P to q's type, 2^-15 A the FP32 sums and exponentials, and 2^-21 S A what an
// error of 2^-21 S in a score (FP32 products and sums, scaled) does to its weight. FP16's P and o
// have an absolute error where they are subnormal: 2^-25 B and 2^-25. With E4M3 KV weights are FP16
// under BF16 q, too, 2^14 times as large: 2^-39 B.
struct limits {
    double unit, smallest, weight;
    bool kernel;
};

// What is compared with what.
struct comparison {
    const struct attn_decode_params *params;
    const void *o;
    const float *lse;
    // Instead of the definition; NULL: the definition.
    const double *expected_o, *expected_lse;
};

// Of one query head: in which elements of o, and whether in lse, the NaN or infinity that one query
// token attends may come out as NaN for the others.
struct leak {
    bool is_known;
    bool o[MAX_HEAD_DIM], lse;
};

// Sums for the relative RMS, and the worst so far.
struct tally {
    struct attn_check *check;
    double error_squares, exact_squares;
    // An element with a misplaced NaN or infinity is worse than any ratio.
    bool has_misplaced;
};

static struct limits find_limits(enum attn_dtype q_dtype, enum attn_dtype kv_dtype,
                                 enum attn_check_bound bound)
{
    const bool fp16 = q_dtype == ATTN_DTYPE_FP16;
    const struct limits limits = {
        .unit = fp16 ? 0x1p-11 : 0x1p-8,
        // Half the smallest number: nothing rounded to the type can be nearer.
        .smallest = fp16 ? 0x1p-25 : 0x1p-134,
        .weight = fp16                          ? 0x1p-25
                  : kv_dtype == ATTN_DTYPE_E4M3 ? 0x1p-39
                                                : 0,
        .kernel = bound == ATTN_CHECK_KERNEL,
    };
    return limits;
}

static bool is_finite(double x)
{
    return x - x == 0;
}

static double bound_o(const struct limits *limits, const struct attn_reference_row *row, int32_t d,
                      double exact)
{
    const double own = limits->unit * __builtin_fabs(exact) + limits->smallest;
    if (!limits->kernel) return own + 0x1p-20 * row->weighted_abs[d];
    const double kernel =
        (limits->unit + 0x1p-15 + 0x1p-21 * row->score_size) * row->weighted_abs[d];
    return own + kernel + (limits->weight > 0 ? limits->weight * row->plain_abs[d] : 0);
}

// An FP32 lse can't be nearer than half its own step, 2^-24 of its size.
static double bound_lse(const struct limits *limits, const struct attn_reference_row *row,
                        double exact)
{
    const double own = 0x1p-24 * __builtin_fabs(exact);
    return own + (limits->kernel ? 0x1p-15 + 0x1p-21 * row->score_size : 0x1p-20);
}

// True if `value` is as finite as it should be. Past the largest number of the type, infinity is
// right for an exact value within its bound of there; infinity in V under a weight that FP32 cannot
// tell from 0 is 0 * infinity in a kernel, so NaN stands for infinity as well.
static bool is_placed(const struct limits *limits, double value, double exact, double bound)
{
    const double largest = limits->unit < 0x1p-8 ? 65520.0 : 0x1.FFp127;
    if (exact != exact) return value != value;
    if (!is_finite(exact)) return value == exact || (limits->kernel && value != value);
    if (is_finite(value)) return true;
    return value == value && (value > 0) == (exact > 0) && __builtin_fabs(exact) + bound >= largest;
}

static void note_worst(struct tally *tally, const struct attn_check_place *place, int32_t dim,
                       double value, double exact)
{
    struct attn_check *const check = tally->check;
    check->worst_sequence = place->sequence;
    check->worst_token = place->token;
    check->worst_head = place->head;
    check->worst_dim = dim;
    check->worst_value = value;
    check->worst_exact = exact;
}

static void compare_o(struct tally *tally, const struct limits *limits,
                      const struct attn_reference_row *row, const struct attn_check_place *place,
                      int32_t dim, double value, double exact)
{
    struct attn_check *const check = tally->check;
    const double bound = bound_o(limits, row, dim, exact);
    check->compared++;
    if (!is_placed(limits, value, exact, bound)) {
        check->failed++;
        if (!tally->has_misplaced) note_worst(tally, place, dim, value, exact);
        tally->has_misplaced = true;
        return;
    }
    if (!is_finite(value) || !is_finite(exact)) return;

    const double error = __builtin_fabs(value - exact), ratio = error == 0 ? 0 : error / bound;
    // Not `ratio > 1`: a bound that is NaN (infinities cancel) holds nothing.
    if (!(ratio <= 1)) check->failed++;
    if (error > check->max_error) check->max_error = error;
    if (!(ratio <= check->max_ratio)) {
        check->max_ratio = ratio;
        if (!tally->has_misplaced) note_worst(tally, place, dim, value, exact);
    }
    tally->error_squares += error * error;
    tally->exact_squares += exact * exact;
}

static void compare_lse(struct attn_check *check, const struct limits *limits,
                        const struct attn_reference_row *row, double value, double exact)
{
    if (!is_finite(exact) || !is_finite(value)) {
        const bool same = exact != exact ? value != value : value == exact;
        if (!same) check->lse_failed++;
        return;
    }
    const double error = __builtin_fabs(value - exact);
    const double ratio = error == 0 ? 0 : error / bound_lse(limits, row, exact);
    if (!(ratio <= 1)) check->lse_failed++;
    if (error > check->lse_max_error) check->lse_max_error = error;
    if (!(ratio <= check->lse_max_ratio)) check->lse_max_ratio = ratio;
}

// The square root without libm; a printed RMS needs no last bit.
static double root(double x)
{
    return x > 0 ? attn_exp(0.5 * attn_log(x)) : 0;
}

static void find_leak(struct leak *leak, const struct attn_decode_params *params,
                      const struct attn_check_place *place)
{
    double o[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = o };
    memset(leak, 0, sizeof(*leak));
    leak->is_known = true;
    for (int32_t token = 0; token < params->q_len; token++) {
        attn_reference_decode_row(params, place->sequence, token, place->head, NULL, &row);
        for (int32_t d = 0; d < params->head_dim; d++) leak->o[d] |= !is_finite(o[d]);
        leak->lse |= !(row.lse < INFINITE);
    }
}

// True for a kernel's NaN that may come from what another query token attends. That of `leak` is
// found out when it is asked for: all tokens of the head have to be looked at.
static bool is_leaked(const struct limits *limits, struct leak *leak, const bool *which,
                      const struct attn_decode_params *params, const struct attn_check_place *place,
                      double value, double exact)
{
    if (!limits->kernel || params->q_len == 1 || value == value || exact != exact) return false;
    if (!leak->is_known) find_leak(leak, params, place);
    return *which;
}

static void compare_row(struct tally *tally, const struct limits *limits,
                        const struct comparison *comparison, const struct attn_check_place *place,
                        const uint8_t *dropped, struct leak *leak)
{
    const struct attn_decode_params *const p = comparison->params;
    double exact_o[MAX_HEAD_DIM], weighted[MAX_HEAD_DIM], plain[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = exact_o, .weighted_abs = weighted, .plain_abs = plain };
    const int64_t index =
        ((int64_t) place->sequence * p->q_len + place->token) * p->num_q_heads + place->head;
    const int64_t first = index * p->head_dim;
    attn_reference_decode_row(p, place->sequence, place->token, place->head, dropped, &row);
    for (int32_t d = 0; d < p->head_dim; d++) {
        const double value = attn_load(comparison->o, first + d, p->q_dtype);
        const double exact =
            comparison->expected_o ? comparison->expected_o[first + d] : exact_o[d];
        const bool leaked = is_leaked(limits, leak, &leak->o[d], p, place, value, exact);
        compare_o(tally, limits, &row, place, d, leaked ? exact : value, exact);
    }
    if (!comparison->lse) return;
    const double value = comparison->lse[index];
    const double exact = comparison->expected_lse ? comparison->expected_lse[index] : row.lse;
    const bool leaked = is_leaked(limits, leak, &leak->lse, p, place, value, exact);
    compare_lse(tally->check, limits, &row, leaked ? exact : value, exact);
}

// All query tokens of one KV head of one sequence.
static int compare_head(struct tally *tally, const struct limits *limits,
                        const struct comparison *comparison, int32_t sequence, int32_t kv_head)
{
    const struct attn_decode_params *const p = comparison->params;
    const int32_t ratio = p->num_q_heads / p->num_kv_heads;
    uint8_t *dropped;
    int64_t count;
    if (attn_reference_find_dropped(p, sequence, kv_head, &dropped, &count)) return -1;
    for (int32_t h = kv_head * ratio; h < (kv_head + 1) * ratio; h++) {
        struct leak leak = { .is_known = false };
        for (int32_t token = 0; token < p->q_len; token++) {
            const struct attn_check_place place = { sequence, token, h };
            compare_row(tally, limits, comparison, &place, dropped, &leak);
        }
    }
    free(dropped);
    return 0;
}

static void finish_tally(struct tally *tally)
{
    if (tally->exact_squares > 0)
        tally->check->relative_rms = root(tally->error_squares / tally->exact_squares);
}

int attn_check_decode_expected(const struct attn_decode_params *params, const void *o,
                               const float *lse, const double *expected_o,
                               const double *expected_lse, enum attn_check_bound bound,
                               struct attn_check *check)
{
    const struct comparison comparison = { params, o, lse, expected_o, expected_lse };
    const struct limits limits = find_limits(params->q_dtype, params->kv_dtype, bound);
    struct tally tally = { .check = check };
    memset(check, 0, sizeof(*check));
    for (int32_t sequence = 0; sequence < params->batch; sequence++)
        for (int32_t kv_head = 0; kv_head < params->num_kv_heads; kv_head++)
            if (compare_head(&tally, &limits, &comparison, sequence, kv_head)) return -1;
    finish_tally(&tally);
    return 0;
}

int attn_check_decode(const struct attn_decode_params *params, const void *o, const float *lse,
                      enum attn_check_bound bound, struct attn_check *check)
{
    return attn_check_decode_expected(params, o, lse, NULL, NULL, bound, check);
}

int attn_check_decode_head(const struct attn_decode_params *params, int32_t sequence,
                           int32_t kv_head, const void *o, const float *lse,
                           enum attn_check_bound bound, struct attn_check *check)
{
    const struct comparison comparison = { params, o, lse, NULL, NULL };
    const struct limits limits = find_limits(params->q_dtype, params->kv_dtype, bound);
    struct tally tally = { .check = check };
    memset(check, 0, sizeof(*check));
    if (compare_head(&tally, &limits, &comparison, sequence, kv_head)) return -1;
    finish_tally(&tally);
    return 0;
}

// ---- prefill

static void find_prefill_leak(struct leak *leak, const struct attn_prefill_params *params,
                              const struct attn_check_place *place, int32_t q_len)
{
    double o[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = o };
    memset(leak, 0, sizeof(*leak));
    leak->is_known = true;
    for (int32_t token = 0; token < q_len; token++) {
        attn_reference_prefill_row(params, place->sequence, token, place->head, &row);
        for (int32_t d = 0; d < params->head_dim; d++) leak->o[d] |= !is_finite(o[d]);
        leak->lse |= !(row.lse < INFINITE);
    }
}

// As is_leaked; `leak` is of the place's sequence and head.
static bool is_prefill_leaked(const struct limits *limits, struct leak *leak, const bool *which,
                              const struct attn_prefill_params *params,
                              const struct attn_check_place *place, int32_t q_len, double value,
                              double exact)
{
    if (!limits->kernel || q_len == 1 || value == value || exact != exact) return false;
    if (!leak->is_known) find_prefill_leak(leak, params, place, q_len);
    return *which;
}

static void compare_prefill_row(struct tally *tally, const struct limits *limits,
                                const struct attn_check_prefill *call,
                                const struct attn_check_place *place, struct leak *leak)
{
    const struct attn_prefill_params *const p = call->params;
    const struct attn_prefill_span span = attn_reference_prefill_span(p, place->sequence);
    double exact_o[MAX_HEAD_DIM], weighted[MAX_HEAD_DIM], plain[MAX_HEAD_DIM];
    struct attn_reference_row row = { .o = exact_o, .weighted_abs = weighted, .plain_abs = plain };
    const int64_t index = (span.first_token + place->token) * p->num_q_heads + place->head;
    const int64_t first = index * p->head_dim;
    attn_reference_prefill_row(p, place->sequence, place->token, place->head, &row);
    for (int32_t d = 0; d < p->head_dim; d++) {
        const double value = attn_load(call->o, first + d, p->dtype);
        const double exact = call->expected_o ? call->expected_o[first + d] : exact_o[d];
        const bool leaked =
            is_prefill_leaked(limits, leak, &leak->o[d], p, place, span.q_len, value, exact);
        compare_o(tally, limits, &row, place, d, leaked ? exact : value, exact);
    }
    if (!call->lse) return;
    const double value = call->lse[index];
    const double exact = call->expected_lse ? call->expected_lse[index] : row.lse;
    const bool leaked =
        is_prefill_leaked(limits, leak, &leak->lse, p, place, span.q_len, value, exact);
    compare_lse(tally->check, limits, &row, leaked ? exact : value, exact);
}

void attn_check_prefill(const struct attn_check_prefill *call, enum attn_check_bound bound,
                        struct attn_check *check)
{
    const struct attn_prefill_params *const p = call->params;
    const struct limits limits = find_limits(p->dtype, p->dtype, bound);
    struct tally tally = { .check = check };
    memset(check, 0, sizeof(*check));
    for (int32_t sequence = 0; sequence < p->batch; sequence++) {
        const int32_t q_len = attn_reference_prefill_span(p, sequence).q_len;
        for (int32_t head = 0; head < p->num_q_heads; head++) {
            struct leak leak = { .is_known = false };
            for (int32_t token = 0; token < q_len; token++) {
                const struct attn_check_place place = { sequence, token, head };
                compare_prefill_row(&tally, &limits, call, &place, &leak);
            }
        }
    }
    finish_tally(&tally);
}

void attn_check_prefill_rows(const struct attn_check_prefill *call,
                             const struct attn_check_place *places, int32_t count,
                             enum attn_check_bound bound, struct attn_check *check)
{
    const struct limits limits = find_limits(call->params->dtype, call->params->dtype, bound);
    struct tally tally = { .check = check };
    memset(check, 0, sizeof(*check));
    for (int32_t i = 0; i < count; i++) {
        struct leak leak = { .is_known = false };
        compare_prefill_row(&tally, &limits, call, &places[i], &leak);
    }
    finish_tally(&tally);
}

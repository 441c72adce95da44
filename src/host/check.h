/* SPDX-License-Identifier: Apache-2.0 */
// Holds a result of decode or prefill against the definition: the error bound of
// include/attn/decode.h.
#ifndef ATTN_HOST_CHECK_H
#define ATTN_HOST_CHECK_H

#include "host/prefill.h"
#include "host/reference.h"

struct attn_check {
    // Elements compared, and how many broke the bound or have NaN / infinity where the other has
    // not.
    int64_t compared, failed;
    // Largest |o - exact|, largest |o - exact| / bound, and relative RMS over all elements that are
    // finite.
    double max_error, max_ratio, relative_rms;
    // Of the element with the largest ratio (or the first with a misplaced NaN / infinity).
    int32_t worst_sequence, worst_token, worst_head, worst_dim;
    double worst_value, worst_exact;
    // The same for lse; compared only where the call has one.
    double lse_max_error, lse_max_ratio;
    int64_t lse_failed;
};

enum attn_check_bound {
    // A kernel: FP32 scores and sums, P and o rounded to q's type; and with more than one query
    // token the NaN that one's keys may hand to the others of its sequence.
    ATTN_CHECK_KERNEL = 1,
    // The host executor: u |exact| + 2^-20 A.
    ATTN_CHECK_HOST = 2,
};

// Compares `o` ([batch, q_len, num_q_heads, head_dim] of q_dtype, host memory) and `lse` (may be
// NULL) with the definition of `params` (as attn_reference_decode_row wants them; its o and lse are
// not read). Returns 0, or -1 if memory ran out.
int attn_check_decode(const struct attn_decode_params *params, const void *o, const float *lse,
                      enum attn_check_bound bound, struct attn_check *check);

// The same against given values (expected_o of a case file) instead of the definition; the bound is
// still computed from the tensors. One of them may be NULL: the definition, then.
int attn_check_decode_expected(const struct attn_decode_params *params, const void *o,
                               const float *lse, const double *expected_o,
                               const double *expected_lse, enum attn_check_bound bound,
                               struct attn_check *check);

// As attn_check_decode, for what one KV head of one sequence gives; `o` and `lse` are the whole
// call's.
int attn_check_decode_head(const struct attn_decode_params *params, int32_t sequence,
                           int32_t kv_head, const void *o, const float *lse,
                           enum attn_check_bound bound, struct attn_check *check);

// What a call of prefill gave, and what it is held against.
struct attn_check_prefill {
    // As attn_reference_prefill_row wants them; o and lse are not read.
    const struct attn_prefill_params *params;
    const void *o;
    // NULL: not looked at.
    const float *lse;
    // As in attn_check_decode_expected; NULL: the definition.
    const double *expected_o, *expected_lse;
};

// A row of a call; of o it is row first_token * num_q_heads + head of its sequence's tokens.
struct attn_check_place {
    int32_t sequence, token, head;
};

// All rows of all sequences. worst_token counts from the sequence's first.
void attn_check_prefill(const struct attn_check_prefill *call, enum attn_check_bound bound,
                        struct attn_check *check);
// These alone.
void attn_check_prefill_rows(const struct attn_check_prefill *call,
                             const struct attn_check_place *places, int32_t count,
                             enum attn_check_bound bound, struct attn_check *check);

#endif

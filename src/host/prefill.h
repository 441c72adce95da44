/* SPDX-License-Identifier: Apache-2.0 */
// The definition of prefill: what each of its rows is as a call of decode.
#ifndef ATTN_HOST_PREFILL_H
#define ATTN_HOST_PREFILL_H

#include "attn/prefill.h"
#include "host/reference.h"

// Where a sequence lies, as far as its entries can be followed.
struct attn_prefill_span {
    // Of its query tokens in q, and how many.
    int64_t first_token;
    int32_t q_len;
    // Of its keys in contiguous k and v, and how many.
    int64_t first_key;
    int32_t kv_len;
    int64_t q_offset;
    // 1 if something had to be clamped (see attn_prefill_params.fault).
    int fault;
};

// `params` are checked ones in both: pointers are host pointers, strides filled in (no 0 that
// stands for dense).
struct attn_prefill_span attn_reference_prefill_span(const struct attn_prefill_params *params,
                                                     int32_t sequence);

// Computes one row: of query token `token` (0 .. span.q_len - 1) of a sequence.
void attn_reference_prefill_row(const struct attn_prefill_params *params, int32_t sequence,
                                int32_t token, int32_t head, struct attn_reference_row *row);

// Writes o, lse and fault of the whole call as attn_prefill does.
void attn_reference_prefill(const struct attn_prefill_params *params);

#endif

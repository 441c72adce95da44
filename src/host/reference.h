/* SPDX-License-Identifier: Apache-2.0 */
// The definition of decode, in double precision on host pointers. attn_decode on a host device
// rounds its result; tests, `attn run --check` and `attn bench` compare kernels with it.
#ifndef ATTN_HOST_REFERENCE_H
#define ATTN_HOST_REFERENCE_H

#include "attn/decode.h"

// What one (sequence, query head) gives. All but lse and max_score have head_dim values.
struct attn_reference_row {
    double *o;
    // sum_j p_j |v_j|: A of the error bound.
    double *weighted_abs;
    // sum_j |v_j| / sum_j e^(s_j - max s): B of the bound (FP16).
    double *plain_abs;
    double lse;
    // Largest scale * k_scale * sum_d |q_d k_d| over the attended keys: S of the bound.
    double score_size;
    // 1 if the sequence was faulty (see attn_decode_params.fault).
    int fault;
};

// Computes one row. `params` are checked ones: pointers are host pointers, strides filled in (no 0
// that stands for dense). weighted_abs and plain_abs may be NULL.
void attn_reference_decode_row(const struct attn_decode_params *params, int32_t sequence,
                               int32_t head, struct attn_reference_row *row);

// Writes o, lse and fault of the whole call as attn_decode does. Returns 0, or -1 if memory ran
// out.
int attn_reference_decode(const struct attn_decode_params *params);

// Conversions of the 16- and 8-bit types; to_* round to nearest even, and overflow to infinity
// (E4M3: to NaN, it has none).
double attn_load(const void *base, int64_t index, enum attn_dtype dtype);
void attn_store(void *base, int64_t index, enum attn_dtype dtype, double value);

#endif

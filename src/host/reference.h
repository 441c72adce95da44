/* SPDX-License-Identifier: Apache-2.0 */
// The definition of decode, in double precision on host pointers. attn_decode on a host device
// rounds its result; tests, `attn run --check` and `attn bench` compare kernels with it.
#ifndef ATTN_HOST_REFERENCE_H
#define ATTN_HOST_REFERENCE_H

#include "attn/decode.h"

// What one (sequence, query token, query head) gives. All but lse, score_size and fault have
// head_dim values.
struct attn_reference_row {
    double *o;
    // sum_j p_j |v_j|: A of the error bound.
    double *weighted_abs;
    // sum_j |v_j| / sum_j e^(s_j - max s): B of the bound (FP16).
    double *plain_abs;
    double lse;
    // Largest scale * k_scale * sum_d |q_d k_d| over the attended keys: S of the bound.
    double score_size;
    // 1 if the row found a fault (see attn_decode_params.fault).
    int fault;
};

// Computes one row. `params` are checked ones: pointers are host pointers, strides filled in (no 0
// that stands for dense; but q_token_stride, table_stride and v_block_table may be 0). `dropped` is
// what attn_reference_find_dropped gave for the sequence and the head's KV head; NULL: no block is
// left out. weighted_abs and plain_abs may be NULL.
void attn_reference_decode_row(const struct attn_decode_params *params, int32_t sequence,
                               int32_t token, int32_t head, const uint8_t *dropped,
                               struct attn_reference_row *row);

// Skip-softmax: allocates *dropped, a byte for each block of ATTN_SKIP_KEYS keys, 1 if it is left
// out; the caller frees it. NULL where none is. *count is the number of those that are left out.
// Returns 0, or -1 if memory ran out.
int attn_reference_find_dropped(const struct attn_decode_params *params, int32_t sequence,
                                int32_t kv_head, uint8_t **dropped, int64_t *count);

// Writes o, lse, fault and dropped_blocks of the whole call as attn_decode does. Returns 0, or -1
// if memory ran out.
int attn_reference_decode(const struct attn_decode_params *params);

// Conversions of the 16- and 8-bit types; to_* round to nearest even, and overflow to infinity
// (E4M3: to NaN, it has none).
double attn_load(const void *base, int64_t index, enum attn_dtype dtype);
void attn_store(void *base, int64_t index, enum attn_dtype dtype, double value);

#endif

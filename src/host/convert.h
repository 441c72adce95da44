/* SPDX-License-Identifier: Apache-2.0 */
// Rows of 16- and 8-bit floats as doubles. attn_load and attn_store, for one element, are in
// reference.h.
#ifndef ATTN_HOST_CONVERT_H
#define ATTN_HOST_CONVERT_H

#include "attn/common.h"

// Rows come in multiples of this many elements: every head_dim is one.
#define ATTN_ROW_UNIT 16

// to[i] = element index + i of `base`, for `count` elements, a multiple of ATTN_ROW_UNIT.
void attn_load_row(double *to, const void *base, int64_t index, int32_t count,
                   enum attn_dtype dtype);

// q . k of `count` elements, a multiple of ATTN_ROW_UNIT; *size: sum |q_d k_d|. Sixteen partial
// sums, for speed: the order is part of no promise, but is fixed.
double attn_multiply_rows(const double *q, const double *k, int32_t count, double *size);

#endif

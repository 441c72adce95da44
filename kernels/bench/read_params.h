/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the bandwidth probe, read by the C compiler and by nvcc.
#ifndef ATTN_READ_PARAMS_H
#define ATTN_READ_PARAMS_H

#include <stdint.h>

struct attn_read_args {
    const void *base;
    uint32_t *sink;
    int64_t num_pieces;
};

#endif

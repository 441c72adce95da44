/* SPDX-License-Identifier: Apache-2.0 */
// One benchmark case in memory: pools that are one random block repeated, so that the GPU can hold
// gigabytes of keys which the host, for the check, holds in megabytes.
#ifndef ATTN_CLI_BENCH_CASE_H
#define ATTN_CLI_BENCH_CASE_H

#include "attn/decode.h"
#include "cli/random.h"

#include <stdbool.h>

struct bench_shape {
    char name[64];
    enum attn_dtype q_dtype, kv_dtype;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, page_size, window;
    // [batch]; max_len is the largest.
    int32_t *lens;
    int32_t max_len;
    // A step of a sweep: the shape before it in the list is its neighbour.
    bool follows;
};

struct bench_case {
    const struct bench_shape *shape;
    // Sets of pages with a table each, used in turn.
    int32_t copies;
    int32_t columns;
    // Of one copy; the pool has copies * pages.
    int32_t pages;
    size_t page_bytes;
    // Pages of the host's blocks of K and V: page p of the pool has the contents of page p %
    // block_pages.
    int32_t block_pages;
    void *k_block, *v_block;
    void *q;
    // [copies][batch][columns], ids of the pool; and the same modulo block_pages.
    int32_t *tables, *host_tables;
};

// 0, or -1 if memory ran out; *made then owns nothing.
int bench_case_make(struct bench_case *made, const struct bench_shape *shape, int32_t copies,
                    uint64_t seed);
void bench_case_free(struct bench_case *made);

// The call of one copy on host pointers, for the definition and the host executor.
struct attn_decode_params bench_case_params(const struct bench_case *from, int32_t copy);

struct attn_decode_shape bench_shape_library(const struct bench_shape *shape);
// Pages that hold an attended key.
int64_t bench_shape_pages(const struct bench_shape *shape);
// Bytes of K and V that the lengths make a call read.
double bench_shape_kv_bytes(const struct bench_shape *shape);

#endif

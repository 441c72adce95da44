/* SPDX-License-Identifier: Apache-2.0 */
// One benchmark case in memory: pools that are one random block repeated, so that the GPU can hold
// gigabytes of keys which the host, for the check, holds in megabytes.
#ifndef ATTN_CLI_BENCH_CASE_H
#define ATTN_CLI_BENCH_CASE_H

#include "attn/ctm.h"
#include "attn/decode.h"
#include "cli/case.h"
#include "cli/tree.h"

// The length of a shape with skip-softmax, one for all, is a multiple of this: pages of two kinds
// alternate in a pattern of so many keys.
#define BENCH_SKIP_KEYS (BENCH_SKIP_PAGES * ATTN_SKIP_KEYS)
// Of ATTN_SKIP_KEYS keys: runs enough for the shares of pages that are timed.
#define BENCH_SKIP_PAGES (4 * ATTN_SKIP_SCOPE)
// The first page of each run is never left out.
#define BENCH_MAX_SKIP (1.0 - 1.0 / ATTN_SKIP_SCOPE)

struct bench_shape {
    char name[64];
    // CASE_CTM: through attn_ctm_run, with pages of ATTN_CTM_PAGE_SIZE and FP16 q. CASE_TILED: a
    // step whose only tile has all pages.
    enum case_op op;
    enum attn_dtype q_dtype, kv_dtype;
    int32_t batch, q_len, num_q_heads, num_kv_heads, head_dim, page_size, window;
    // [batch]; max_len is the largest.
    int32_t *lens;
    int32_t max_len;
    // Of the draft keys; TREE_NONE is causal.
    enum tree_kind tree;
    // With a skip_table, and keys such that about this share of the pages is left out. For q_len 1,
    // pages of ATTN_SKIP_KEYS, FP16 and no window.
    bool has_skip;
    double skip_share;
    // A step of a sweep: the shape before it in the list is its neighbour.
    bool follows;
};

struct bench_case {
    const struct bench_shape *shape;
    // Sets of pages with a table each, used in turn.
    int32_t copies;
    // Rows of a sequence in a table: for ctm one for K and one for V.
    int32_t table_rows, columns;
    // Of one copy; the pool has copies * pages.
    int32_t pages;
    size_t page_bytes;
    // Pages of the host's blocks of K and V: page p of the pool has the contents of page p %
    // block_pages. V's block is behind K's, in the same allocation.
    int32_t block_pages;
    void *k_block, *v_block;
    void *q;
    // [copies][batch][table_rows][columns], ids of the pool; and the same modulo block_pages. Those
    // of V for ctm count on from those of K.
    int32_t *tables, *host_tables;
    // [batch][q_len][tree_words(q_len)]; NULL without a tree.
    int32_t *mask;
    // One pair; of no meaning without skip-softmax.
    int32_t skip_table[2];
    // Of CASE_TILED, else NULL: [batch] blocks of each list, then [batch] slots of the last block
    // that hold keys.
    int32_t *counts;
};

// 0, or -1 if memory ran out; *made then owns nothing.
int bench_case_make(struct bench_case *made, const struct bench_shape *shape, int32_t copies,
                    uint64_t seed);
void bench_case_free(struct bench_case *made);

// The call of one copy on host pointers, for the definition and the host executor. For ctm: what it
// is as a call of decode.
struct attn_decode_params bench_case_params(const struct bench_case *from, int32_t copy);
// The same as a call of ctm, for a shape of that.
struct attn_ctm_params bench_case_ctm(const struct bench_case *from, int32_t copy);
// For CASE_TILED: the lists of one copy, on host pointers.
struct case_tiled bench_case_tiled(const struct bench_case *from, int32_t copy);
// int32 in the table of one copy.
size_t bench_case_table(const struct bench_case *from);

struct attn_decode_shape bench_shape_library(const struct bench_shape *shape);
// Pages that hold an attended key.
int64_t bench_shape_pages(const struct bench_shape *shape);
// Bytes of K and V that the lengths make a call read.
double bench_shape_kv_bytes(const struct bench_shape *shape);

#endif

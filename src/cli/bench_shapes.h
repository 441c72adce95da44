/* SPDX-License-Identifier: Apache-2.0 */
// The shapes that `attn bench` times: those of the tests, or a JSON file's.
#ifndef ATTN_CLI_BENCH_SHAPES_H
#define ATTN_CLI_BENCH_SHAPES_H

#include "cli/bench_case.h"

struct bench_shapes {
    struct bench_shape *list;
    int count;
};

enum bench_set {
    // Models that people serve.
    BENCH_SET_DEFAULT,
    // One shape at page sizes from 1 to 64.
    BENCH_SET_PAGES,
    // Sweeps, in steps small enough to show a jump: batch 1 .. 256, and GQA ratio 1 .. 16.
    BENCH_SET_BATCH,
    BENCH_SET_RATIO,
    // Decode through the CTM runner, at each of its head_dims but 32.
    BENCH_SET_CTM,
    // A chain of one token, and random trees.
    BENCH_SET_TREE,
    // Skip-softmax that leaves out more and more.
    BENCH_SET_SKIP,
    // Tiled decode, everything resident, of few and of many sequences.
    BENCH_SET_TILED,
    BENCH_SET_ALL,
};

#define BENCH_SET_NAMES "default, pages, batch, ratio, ctm, tree, skip, tiled or all"
// One of those.
bool bench_shapes_read_set(const char *text, enum bench_set *set);

// Both: 0, or -1 and a sentence in `why`.
int bench_shapes_make(struct bench_shapes *shapes, enum bench_set set, char *why, size_t why_size);
// A JSON array of objects with name, batch, num_q_heads, num_kv_heads, head_dim, page_size and len
// (a number or an array of `batch` numbers), and where they differ from plain decode in BF16 with
// one query token q_dtype, kv_dtype, window, op, q_len, tree, skip (a share of pages).
int bench_shapes_load(struct bench_shapes *shapes, const char *path, char *why, size_t why_size);
void bench_shapes_free(struct bench_shapes *shapes);

#endif

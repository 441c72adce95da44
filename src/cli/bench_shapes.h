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
    BENCH_SET_ALL,
};

// "default", "pages", "batch", "ratio", "all".
bool bench_shapes_read_set(const char *text, enum bench_set *set);

// Both: 0, or -1 and a sentence in `why`.
int bench_shapes_make(struct bench_shapes *shapes, enum bench_set set, char *why, size_t why_size);
// A JSON array of objects with name, batch, num_q_heads, num_kv_heads, head_dim, page_size and len
// (a number or an array of `batch` numbers), and where they differ from BF16 and no window q_dtype,
// kv_dtype, window.
int bench_shapes_load(struct bench_shapes *shapes, const char *path, char *why, size_t why_size);
void bench_shapes_free(struct bench_shapes *shapes);

#endif

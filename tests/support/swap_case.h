/* SPDX-License-Identifier: Apache-2.0 */
// A swap cache beside a plain copy of what it should hold: blocks are written to both, calls are
// held against tiled decode over the copy, bit by bit.
#ifndef ATTN_TESTS_SWAP_CASE_H
#define ATTN_TESTS_SWAP_CASE_H

#include "attn/attn.h"
#include "support/random.h"

#include <stdbool.h>

// Bits of a call.
struct swap_result {
    size_t rows, elements;
    uint16_t *output;
    float *lse;
};

enum {
    SWAP_MAX_KEPT = 256,
    SWAP_PATH_SIZE = 64,
};

// Where a test's file may be: in a new folder, which has nothing else in it. Removes both.
void swap_path_make(char path[SWAP_PATH_SIZE]);
void swap_path_remove(const char path[SWAP_PATH_SIZE]);

struct swap_case {
    struct attn_swap_dims dims;
    // Of the host executor.
    struct attn_device *host;
    // [layer][block][K, V][kv_head][token][head_dim], NaN where nothing was written; tokens of each
    // block.
    uint16_t *truth;
    int32_t *tokens;
    struct random random;
    // Called before what attn_swap_decode gave is looked at; NULL: not.
    void (*finish)(void);
    // What failed calls were given: work that they have left may still write there.
    struct swap_result kept[SWAP_MAX_KEPT];
    int num_kept;
};

// Sequences of one layer.
struct swap_batch {
    int32_t layer, num_seqs, stride;
    int32_t *lens, *blocks;
    uint16_t *q;
};

// All of these fail the test where memory or a call of the host executor does.

// Small dims that divide nothing evenly.
struct attn_swap_dims swap_dims_make(void);
void swap_case_init(struct swap_case *c, const struct attn_swap_dims *dims, uint64_t seed);
void swap_case_free(struct swap_case *c);

// Elements of a block, and those of K of one of its heads from `token` on.
int64_t swap_case_elements(const struct swap_case *c);
uint16_t *swap_case_rows(const struct swap_case *c, int32_t layer, int32_t block, int32_t v,
                         int32_t head, int32_t token);

// Random tokens first .. first + count - 1 of a block, in the copy alone; and then with
// attn_swap_write, from a tensor [token][kv_head][head_dim].
void swap_case_draw(struct swap_case *c, int32_t layer, int32_t block, int32_t first,
                    int32_t count);
enum attn_status swap_case_send(const struct swap_case *c, struct attn_swap *swap, int32_t layer,
                                int32_t block, int32_t first, int32_t count);
void swap_case_write(struct swap_case *c, struct attn_swap *swap, int32_t layer, int32_t block,
                     int32_t first, int32_t count);
// Every block of every layer, in full.
void swap_case_write_all(struct swap_case *c, struct attn_swap *swap);

// Random lists: blocks from 0 .. num_blocks - 1, some twice, of up to `most` tokens, lengths of 0
// among them.
struct swap_batch swap_batch_draw(struct swap_case *c, int32_t layer, int32_t num_seqs,
                                  int32_t most);
// One sequence of blocks first .. first + count - 1, in full.
struct swap_batch swap_batch_range(struct swap_case *c, int32_t layer, int32_t first,
                                   int32_t count);
void swap_batch_free(struct swap_batch *batch);
struct attn_swap_decode_params swap_batch_params(const struct swap_batch *batch);

struct swap_result swap_result_make(const struct swap_case *c, int32_t num_seqs);
void swap_result_free(struct swap_result *result);
bool swap_result_same(const struct swap_result *a, const struct swap_result *b);
// What tiled decode over the copy gives, on c->host.
struct swap_result swap_case_expect(const struct swap_case *c, const struct swap_batch *batch);

// attn_swap_decode, and whether its bits are those of the copy; fails the test
// where the call does.
bool swap_case_agrees(struct swap_case *c, struct attn_swap *swap, const struct swap_batch *batch);
// The same of a call that may fail: then nothing was written.
enum attn_status swap_case_run(struct swap_case *c, struct attn_swap *swap,
                               const struct swap_batch *batch, bool *same);

struct attn_swap_stats swap_stats(const struct attn_swap *swap);

#endif

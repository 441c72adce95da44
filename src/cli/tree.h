/* SPDX-License-Identifier: Apache-2.0 */
// Tree masks: which draft key each query token attends, as tree_mask of attn/decode.h has it.
#ifndef ATTN_CLI_TREE_H
#define ATTN_CLI_TREE_H

#include "cli/random.h"

#include <stdbool.h>

enum tree_kind {
    // No mask.
    TREE_NONE,
    // A chain: each token attends itself and those before it.
    TREE_CAUSAL,
    // Each attends all.
    TREE_FULL,
    // Children of token 0: each attends token 0 and itself.
    TREE_STAR,
    // Random parents, and the nodes in random order: bits lie above the diagonal, too.
    TREE_RANDOM,
};

#define TREE_NAMES "none, causal, full, star or random"

bool tree_read_kind(const char *text, enum tree_kind *kind);
const char *tree_name(enum tree_kind kind);

// Words of a mask's row.
int32_t tree_words(int32_t q_len);
bool tree_has_bit(const int32_t *mask_row, int32_t key);

// Sets the bits of one sequence's [q_len][mask_words], 1 <= nodes <= q_len <= 128: a tree of the
// first `nodes` tokens; the rows after those are padding, all 0. Bits past q_len are random.
void tree_fill(int32_t *mask, enum tree_kind kind, int32_t q_len, int32_t nodes, int32_t mask_words,
               struct random *random);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/tree.h"

#include "attn/decode.h"

#include <string.h>

#define WORD_BITS 32

static const char *const names[] = { "none", "causal", "full", "star", "random" };

bool tree_read_kind(const char *const text, enum tree_kind *const kind)
{
    for (int i = TREE_NONE; i <= TREE_RANDOM; i++) {
        if (strcmp(text, names[i])) continue;
        *kind = (enum tree_kind) i;
        return true;
    }
    return false;
}

const char *tree_name(const enum tree_kind kind)
{
    return names[kind];
}

int32_t tree_words(const int32_t q_len)
{
    return (q_len - 1) / WORD_BITS + 1;
}

bool tree_has_bit(const int32_t *const mask_row, const int32_t key)
{
    return (uint32_t) mask_row[key / WORD_BITS] >> key % WORD_BITS & 1;
}

static void set_bit(int32_t *const mask_row, const int32_t key, const bool set)
{
    const uint32_t bit = (uint32_t) 1 << key % WORD_BITS,
                   word = (uint32_t) mask_row[key / WORD_BITS];
    mask_row[key / WORD_BITS] = (int32_t) (set ? word | bit : word & ~bit);
}

// parents[i] of node i, -1 for the root; nodes are numbered so that parents come first.
static bool is_ancestor(const int32_t *const parents, const int32_t above, const int32_t below)
{
    int32_t node = below;
    while (node > above) node = parents[node];
    return node == above;
}

void tree_fill(int32_t *const mask, const enum tree_kind kind, const int32_t q_len,
               const int32_t nodes, const int32_t mask_words, struct random *const random)
{
    int32_t parents[ATTN_DECODE_MAX_Q_LEN], order[ATTN_DECODE_MAX_Q_LEN];
    for (int32_t i = 0; i < q_len * mask_words; i++) mask[i] = (int32_t) random_next(random);
    for (int32_t i = 0; i < nodes; i++) {
        parents[i] = !i                    ? -1
                     : kind == TREE_STAR   ? 0
                     : kind == TREE_RANDOM ? (int32_t) random_below(random, (uint64_t) i)
                                           : i - 1;
        order[i] = i;
    }
    if (kind == TREE_RANDOM) random_order(random, order, nodes);
    for (int32_t i = 0; i < q_len; i++)
        for (int32_t j = 0; j < q_len; j++) {
            const bool inside = i < nodes && j < nodes;
            const bool set =
                inside && (kind == TREE_FULL || is_ancestor(parents, order[j], order[i]));
            set_bit(mask + (int64_t) i * mask_words, j, set);
        }
}

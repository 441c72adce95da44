/* SPDX-License-Identifier: Apache-2.0 */
// A call of the CTM decode runner, made from a description: the pool is NaN wherever no query token
// of a sequence looks, pages lie anywhere in both halves of it, V's without regard to K's, and what
// the table may hold anywhere else is wild.
#ifndef ATTN_TESTS_CTM_CASE_H
#define ATTN_TESTS_CTM_CASE_H

#include "attn/ctm.h"
#include "tests/support/canary.h"

#include <stdbool.h>

enum {
    CTM_MAX_BATCH = 4
};

enum ctm_sinks {
    CTM_SINKS_NONE,
    CTM_SINKS_RANDOM,
    // -80 for even heads, 100 for odd ones.
    CTM_SINKS_ALTERNATING,
};

enum ctm_fill {
    // q, K and V in (-1, 1).
    CTM_FILL_UNIFORM,
    // Keys of 0, and V one power of two a token: o tells which keys were seen, each once.
    CTM_FILL_MEAN,
};

struct ctm_case {
    const char *name;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, q_len;
    int32_t lens[CTM_MAX_BATCH];
    int32_t window;
    bool per_row, fp8;
    enum ctm_sinks sinks;
    enum ctm_fill fill;
    // Pairs; NULL: none.
    const int32_t *skip;
    int32_t skip_length;
    uint64_t seed;
};

// The shapes that the contract names: those of its peers' tests.
enum {
    NUM_CTM_CONTRACT_CASES = 8
};
extern const struct ctm_case ctm_contract_cases[NUM_CTM_CONTRACT_CASES];

enum ctm_zone {
    CTM_ZONE_Q,
    CTM_ZONE_POOL,
    CTM_ZONE_TABLE,
    CTM_ZONE_LENS,
    CTM_ZONE_SINKS,
    CTM_ZONE_MASK,
    CTM_ZONE_SKIP,
    CTM_ZONE_OUTPUT,
    CTM_ZONE_FAULT,
    CTM_ZONE_DROPPED,
    NUM_CTM_ZONES,
};

struct ctm_data {
    struct ctm_case c;
    // Everything but the pointers.
    struct attn_ctm_params params;
    struct canary_zone zones[NUM_CTM_ZONES];
    size_t bytes;
    // Memory of the call before and after it; workspace and semaphores are somewhere else.
    uint8_t *image, *result;
};

// Fails the test where memory runs out.
struct ctm_data *ctm_data_build(const struct ctm_case *c);
void ctm_data_free(struct ctm_data **data);

// The call on a copy of the image at `base`, in whatever memory, without workspace and semaphores.
struct attn_ctm_params ctm_data_params(const struct ctm_data *data, uint8_t *base);
// What the call needs of them, by the sizes that ctm.h gives.
int64_t ctm_data_workspace_elems(const struct ctm_data *data);
int64_t ctm_data_semaphore_elems(const struct ctm_data *data);

void *ctm_image(const struct ctm_data *data, enum ctm_zone zone);
const void *ctm_result(const struct ctm_data *data, enum ctm_zone zone);

// The contract once more: whether token i of sequence b sees key t.
bool ctm_data_sees(const struct ctm_data *data, int32_t b, int32_t i, int32_t t);
// The first element of a key in the pool, by row `kv` (0: K, 1: V) of the table.
int64_t ctm_data_kv_index(const struct ctm_data *data, int32_t b, int32_t kv, int32_t t,
                          int32_t head);

// True if nothing but outputs has changed.
bool ctm_data_intact(const struct ctm_data *data);
double ctm_data_output(const struct ctm_data *data, int32_t b, int32_t i, int32_t h, int32_t d);
int32_t ctm_data_fault(const struct ctm_data *data);
// What it has to be: the first sequence that is too short for its query tokens, or INT32_MAX.
int32_t ctm_case_fault(const struct ctm_case *c);
int64_t ctm_data_dropped(const struct ctm_data *data);
// True if the outputs of sequence i of a and sequence j of b have equal bits.
bool ctm_data_equal(const struct ctm_data *a, int32_t i, const struct ctm_data *b, int32_t j);

// The case in words, with its seed.
const char *ctm_case_text(const struct ctm_case *c, char *text, size_t size);

#endif

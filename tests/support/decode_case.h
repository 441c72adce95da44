/* SPDX-License-Identifier: Apache-2.0 */
// A call of decode, made from a description: tensors, scrambled pages, and poison wherever the call
// has no business. What a sequence contains depends on the seed and on the sequence's id, never on
// where it lies: so the same id gives the same bits in every batch, page size and layout, or
// something is wrong.
#ifndef ATTN_TESTS_DECODE_CASE_H
#define ATTN_TESTS_DECODE_CASE_H

#include "attn/attn.h"
#include "host/check.h"
#include "tests/support/canary.h"

#include <stdbool.h>

enum decode_fill {
    DECODE_FILL_UNIFORM,
    // One key takes nearly all the weight.
    DECODE_FILL_PEAKED,
    // Scores 0: o is the mean of V, and V tells tokens apart so that a wrong edge shows.
    DECODE_FILL_MEAN,
    // Scores 0, and V one bit a token: o tells which tokens were attended (see decode_bits_mean).
    DECODE_FILL_BITS,
    // One element of V near the largest number of its type.
    DECODE_FILL_HUGE,
    // Every score is near -66855.
    DECODE_FILL_FAR,
    // Every score is -inf.
    DECODE_FILL_MINUS_INF,
    // An infinity or a NaN in one attended key, in its value, or in q.
    DECODE_FILL_INF_K,
    DECODE_FILL_NAN_K,
    DECODE_FILL_INF_V,
    DECODE_FILL_NAN_V,
    DECODE_FILL_NAN_Q,
    // Scores within 0.5 of -10, -5, 0, 5 or 10, the same for all keys of a block of skip-softmax,
    // not always for all heads of a group: with S = len / 8 every decision is clear.
    DECODE_FILL_LEVELS,
    NUM_DECODE_FILLS,
};

enum decode_lens {
    // Every sequence has len keys.
    DECODE_LENS_FULL,
    // Log-uniform in 1 .. len, by id.
    DECODE_LENS_LOG,
    // By id through the lengths at which things break: 0, 1, around 16, 128, the window, ...; at
    // most len.
    DECODE_LENS_EDGES,
};

enum decode_layout {
    DECODE_LAYOUT_NHD,
    DECODE_LAYOUT_HND,
    // K token-major, V head-major.
    DECODE_LAYOUT_MIXED,
    // One layer's K and V inside pages that hold three layers.
    DECODE_LAYOUT_LAYER,
    NUM_DECODE_LAYOUTS,
};

// Which draft keys each query token attends; see tree_mask.
enum decode_tree {
    // No mask: causal.
    DECODE_TREE_NONE,
    // The same as a mask.
    DECODE_TREE_CAUSAL,
    // All, those behind the token included.
    DECODE_TREE_FULL,
    // The first, and the token's own.
    DECODE_TREE_STAR,
    // A spine of the even ones, each with an odd one as its tooth: those of the spine up to the
    // token, and its own.
    DECODE_TREE_COMB,
    // Any half of them, and for every fifth token none: by id.
    DECODE_TREE_RANDOM,
    // None.
    DECODE_TREE_EMPTY,
    NUM_DECODE_TREES,
};

// Fields left at 0 mean what the comment says first.
struct decode_case {
    const char *name;
    // BF16, and as q.
    enum attn_dtype q_dtype, kv_dtype;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, page_size;
    // The longest sequence.
    int32_t len;
    enum decode_lens lens;
    // [batch], instead of `lens`.
    const int32_t *given_lens;
    // [batch]: NULL: 0, 1, 2, ...
    const int32_t *ids;
    int32_t window;
    // Query tokens a sequence: 1.
    int32_t q_len;
    // Token i has the q that token i + first_token has in a call where this is 0: so that a plain
    // decode can ask for one token of many.
    int32_t first_token;
    enum decode_tree tree;
    enum attn_window_form window_form;
    // Pairs (length, S), as in skip_table; skip_length counts the int32. The call asks for
    // dropped_blocks, then.
    const int32_t *skip;
    int32_t skip_length;
    float softcap;
    // 1 / sqrt(head_dim).
    float scale;
    // 1.
    float k_scale, v_scale;
    // A scale for each KV head, instead.
    bool scales;
    bool sinks, lse;
    enum decode_layout layout;
    // q is the first part of a fused row of Q, K and V.
    bool fused_q;
    enum decode_fill fill;
    // Byte in unreferenced slots, and in outputs and workspace before the call: 0xFF, which is NaN
    // in every type. 0x7F is NaN in E4M3 and FP16, and a huge number in BF16 and FP32.
    uint8_t poison;
    // Columns of the table beyond the pages of the longest sequence, elements of its stride beyond
    // the columns, and words of the rows of the mask beyond those that q_len needs.
    int32_t extra_columns, extra_stride, extra_words;
    // V has a table of its own, with other page ids.
    bool v_table;
    // Where pages lie; and bits of the mask that belong to no draft key.
    uint64_t page_seed;
    uint64_t seed;
};

enum decode_zone {
    DECODE_ZONE_Q,
    DECODE_ZONE_K,
    // Empty where V lies in the same pool.
    DECODE_ZONE_V,
    DECODE_ZONE_TABLE,
    DECODE_ZONE_V_TABLE,
    DECODE_ZONE_LENS,
    DECODE_ZONE_MASK,
    DECODE_ZONE_SKIP,
    DECODE_ZONE_SINKS,
    DECODE_ZONE_K_SCALES,
    DECODE_ZONE_V_SCALES,
    DECODE_ZONE_O,
    DECODE_ZONE_LSE,
    DECODE_ZONE_WORKSPACE,
    DECODE_ZONE_COUNTERS,
    DECODE_ZONE_FAULT,
    DECODE_ZONE_DROPPED,
    NUM_DECODE_ZONES,
};

// Types and head_dim: what a kernel is made for.
struct decode_kind {
    enum attn_dtype q_dtype, kv_dtype;
    int32_t head_dim;
};

// Every kind that a GPU may serve.
enum {
    NUM_DECODE_KINDS = 18
};
extern const struct decode_kind decode_kinds[NUM_DECODE_KINDS];

// Makes the case one of that kind. E4M3 gets k_scale 0.25 and v_scale 0.5, so that a scale that is
// dropped or swapped shows.
void decode_case_set_kind(struct decode_case *c, const struct decode_kind *kind);

struct decode_data {
    struct decode_case c;
    // Everything but the pointers.
    struct attn_decode_params params;
    struct canary_zone zones[NUM_DECODE_ZONES];
    // Elements from the start of their zones.
    int64_t k_offset, v_offset;
    size_t bytes;
    // The memory of the call before it (256-byte aligned), and, once it has run, after it.
    uint8_t *image, *result;
    // The row that takes it.
    const char *kernel;
};

// Builds the case for a device, whose workspace it gets exactly. Status as attn_decode_plan.
enum attn_status decode_data_build(struct decode_data **data, const struct decode_case *c,
                                   const struct attn_device *device);
void decode_data_free(struct decode_data **data);

// The call on a copy of the image at `base`, in whatever memory.
struct attn_decode_params decode_data_params(const struct decode_data *data, void *base);

// Zones of the image and of the result.
void *decode_image(const struct decode_data *data, enum decode_zone zone);
const void *decode_result(const struct decode_data *data, enum decode_zone zone);

// Runs the call on a host device: result = what the image has become.
enum attn_status decode_data_run_host(struct decode_data *data, struct attn_device *device);

// Holds the result against the definition, on all cores. relative_rms: the largest of a KV head's.
bool decode_data_check(const struct decode_data *data, enum attn_check_bound bound,
                       struct attn_check *check);
// True if nothing but outputs has changed, and the counters are 0.
bool decode_data_intact(const struct decode_data *data);
// What the fault word has become.
int32_t decode_data_fault(const struct decode_data *data);
// Blocks that skip-softmax has left out; the word did not begin with 0.
int64_t decode_data_dropped(const struct decode_data *data);
// What the definition leaves out of it; -1 if memory ran out.
int64_t decode_data_exact_dropped(const struct decode_data *data);
// True if sequence i of a and sequence j of b have equal bits in o, and in lse if both have one.
bool decode_data_equal(const struct decode_data *a, int32_t i, const struct decode_data *b,
                       int32_t j);
// The same of query token s of sequence i, and query token t of sequence j.
bool decode_data_equal_token(const struct decode_data *a, int32_t i, int32_t s,
                             const struct decode_data *b, int32_t j, int32_t t);
// Row (sequence, token, head) of o, and its lse.
double decode_data_o(const struct decode_data *data, int32_t sequence, int32_t token, int32_t head,
                     int32_t d);
double decode_data_lse(const struct decode_data *data, int32_t sequence, int32_t token,
                       int32_t head);

// Whether a query token of a sequence attends a key: by c.tree, c.window and the length.
bool decode_case_sees(const struct decode_case *c, int32_t sequence, int32_t token, int32_t key);
// What the fault word becomes: the first sequence that is too short for its query tokens.
int32_t decode_case_fault(const struct decode_case *c);
// The plain decode that has the bits of a query token, in every sequence whose length is at least
// lens[sequence]. False: the draft keys that the token attends are not the first few, and there is
// none. lens is [batch].
bool decode_case_as_plain(const struct decode_case *c, int32_t token, struct decode_case *plain,
                          int32_t *lens);

// Under DECODE_FILL_BITS, o / v_scale in column d where [start, len) is attended.
double decode_bits_mean(int32_t head_dim, int32_t start, int32_t len, int32_t d);
// Under DECODE_FILL_BITS, o / v_scale of a query token, [head_dim]; returns the number of keys that
// it attends.
int32_t decode_bits_row(const struct decode_case *c, int32_t sequence, int32_t token, double *mean);

// The case in words, with its seed; and what the check found.
const char *decode_case_text(const struct decode_case *c, char *text, size_t size);
const char *decode_check_text(const struct attn_check *check, char *text, size_t size);

#endif

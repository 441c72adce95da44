/* SPDX-License-Identifier: Apache-2.0 */
// A call of prefill on random data: an image of memory with guards between its parts, in which
// everything that the call has no business with is NaN, or a wild page id.
//
// What a sequence holds is decided by its id and by positions alone, so that calls that cut, page,
// batch or place it in other ways have the same rows.
#ifndef ATTN_TESTS_PREFILL_CASE_H
#define ATTN_TESTS_PREFILL_CASE_H

#include "attn/prefill.h"
#include "host/check.h"
#include "tests/support/canary.h"

#include <stdbool.h>
#include <stdint.h>

// attn_prefill, or an original, or a twin.
typedef enum attn_status (*prefill_entry)(struct attn_device *, const struct attn_prefill_params *,
                                          attn_stream);

enum prefill_fill {
    // Q in +-3, K and V in +-1.
    PREFILL_FILL_UNIFORM,
    // Q in +-60: next to all weight on a few keys.
    PREFILL_FILL_PEAKED,
    // Q and K 0, V a unit vector: which keys are seen shows in o and lse.
    PREFILL_FILL_ONES,
    // V up to the largest number of the type.
    PREFILL_FILL_HUGE,
    NUM_PREFILL_FILLS,
};

struct prefill_sequence {
    uint64_t id;
    int32_t q_len, kv_len, q_offset;
};

struct prefill_case {
    const char *name;
    enum attn_dtype dtype;
    int32_t num_q_heads, num_kv_heads, head_dim;
    int32_t batch;
    // Not ragged, all have the lengths of the first.
    const struct prefill_sequence *sequences;
    bool ragged;
    // 0: contiguous.
    int32_t page_size;
    bool not_causal, sinks;
    int32_t window;
    float softcap, scale;
    // Gaps between tokens of q; heads before tokens in pages, gaps between contiguous tokens.
    bool strided;
    enum prefill_fill fill;
    uint64_t seed, page_seed;
};

enum prefill_zone {
    PREFILL_ZONE_Q,
    PREFILL_ZONE_K,
    PREFILL_ZONE_V,
    PREFILL_ZONE_TABLE,
    PREFILL_ZONE_CU_SEQLENS,
    PREFILL_ZONE_KV_LENS,
    PREFILL_ZONE_Q_OFFSETS,
    PREFILL_ZONE_KV_STARTS,
    PREFILL_ZONE_SINKS,
    // Written from here on.
    PREFILL_ZONE_O,
    PREFILL_ZONE_LSE,
    PREFILL_ZONE_FAULT,
    NUM_PREFILL_ZONES,
};

struct prefill_data {
    struct prefill_case c;
    struct prefill_sequence *sequences;
    // Of each sequence, in q and in contiguous k and v.
    int32_t *first_token, *first_key;
    // Without pointers, strides filled in.
    struct attn_prefill_params params;
    struct canary_zone zones[NUM_PREFILL_ZONES];
    // Any query token may be one of a sequence, for tests that change cu_seqlens.
    bool has_other_tokens;
    size_t bytes;
    uint8_t *image, *result;
};

// NULL if memory ran out. c->sequences is copied.
struct prefill_data *prefill_data_build(const struct prefill_case *c);
void prefill_data_free(struct prefill_data **data);

// A zone of the image at `memory`; NULL if it has no bytes.
void *prefill_zone(const struct prefill_data *data, void *memory, enum prefill_zone zone);
// Parameters for the image at `memory`.
struct attn_prefill_params prefill_data_params(const struct prefill_data *data, void *memory);

// Place of an element of k or of v, in elements.
int64_t prefill_key_at(const struct prefill_data *data, int32_t sequence, int32_t key, int32_t head,
                       bool is_v);
// In the first column that a sequence has for the key.
int32_t *prefill_table_at(const struct prefill_data *data, int32_t sequence, int32_t key);

// Runs an entry on a copy of the image, which is the result.
enum attn_status prefill_data_run_host(struct prefill_data *data, struct attn_device *device,
                                       prefill_entry entry);
// What the result has.
int32_t prefill_data_fault(const struct prefill_data *data);
// False if something but o, lse and fault has changed, or a row of no sequence.
bool prefill_data_intact(const struct prefill_data *data);
// Up to `rows` rows against the definition: all, or the first and the last tokens and random ones.
bool prefill_data_check(const struct prefill_data *data, int32_t rows, enum attn_check_bound bound,
                        struct attn_check *check);
const char *prefill_check_text(const struct attn_check *check, char *text, size_t size);
// 16-bit values of o and of lse that differ between tokens of two results.
int64_t prefill_count_differences(const struct prefill_data *a, int32_t sequence_a, int32_t token_a,
                                  const struct prefill_data *b, int32_t sequence_b, int32_t token_b,
                                  int32_t count);
// Of all tokens of calls with the same sequences.
int64_t prefill_count_all_differences(const struct prefill_data *a, const struct prefill_data *b);

#endif

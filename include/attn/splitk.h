/* SPDX-License-Identifier: Apache-2.0 */
// How the attended keys of a sequence are cut into pieces, and how wide GQA packing is: pure
// functions, without a GPU and without state. Source of the counts: the Metrale decode launch
// policy; `chunk` is libattn's own.
//
//   auto      about two waves of blocks over the declared SMs, from the head count alone
//   legacy    fill the SMs once, from heads x sequences. Bits depend on max_decode_seqs.
//   pinned n  always n pieces
//   chunk N   pieces between absolute multiples of N keys: a growing sequence keeps its pieces, and
//             the order in which they merge is a function of their index
//
// A count n cuts the attended range [start, len) into pieces of max(256, ceil((len - start) / n))
// keys from `start` on, so at most n of them. attn_decode takes any
// count; on a GPU chunk:N has to be that of the kernel (attn_decode_plan tells).
//
// GQA packing lets the query heads of a KV head share its loads. attn_decode always does under
// chunk and where a sequence is cut into more than one piece; where a count is 1 it does if packing
// is on and attn_gqa_pack_shape_ok. The bits are the same.
#ifndef ATTN_SPLITK_H
#define ATTN_SPLITK_H

#include "common.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// Waves of blocks that `auto` aims at.
#define ATTN_SPLITK_TARGET_WAVES 2
// Most pieces under auto and pinned.
#define ATTN_MAX_DECODE_SPLITS 16
// Fewest keys in a piece, the last one excepted.
#define ATTN_SPLITK_MIN_KEYS_PER_SPLIT 256
// The shape that the original's GQA-packed kernel serves.
#define ATTN_DECODE_GQA_PACK_WIDTH 6
#define ATTN_DECODE_GQA_PACK_HEAD_DIM 256
// GQA packing where no pack is open.
#define ATTN_DECODE_GQA_PACK_DECLARED 0
// Range of N in chunk:N, a power of two.
#define ATTN_SPLITK_MIN_CHUNK 64
#define ATTN_SPLITK_MAX_CHUNK 65536

enum attn_splitk_kind {
    ATTN_SPLITK_LEGACY = 0,
    ATTN_SPLITK_AUTO = 1,
    ATTN_SPLITK_PINNED = 2,
    ATTN_SPLITK_CHUNK = 3,
};

struct attn_splitk_policy {
    // Which of them.
    enum attn_splitk_kind kind;
    // pinned: 1 .. ATTN_MAX_DECODE_SPLITS. chunk: N, or 0 for the kernel's own. Else 0.
    int32_t count;
};

// Reads "legacy", "auto", "chunk", "chunk:N", a count, or "0" "off" "false" "no" (pinned 1). Blanks
// around it and case don't matter; a count saturates, however many digits, and is clamped to 1 ..
// ATTN_MAX_DECODE_SPLITS. False for anything else (NULL, empty, a sign, N not a power of two in
// range);
// *policy is then untouched.
// Thread-safety: pure.
ATTN_API bool attn_splitk_parse(const char *text, struct attn_splitk_policy *policy);

// Writes the policy as attn_splitk_parse reads it. Returns what snprintf would.
// Thread-safety: pure.
ATTN_API int attn_splitk_format(struct attn_splitk_policy policy, char *text, size_t size);

// `env` if it parses, else `declared` if it parses, else legacy. Either may be NULL.
// Thread-safety: pure.
ATTN_API struct attn_splitk_policy attn_splitk_resolve_policy(const char *declared,
                                                              const char *env);

// The same with env = the environment variable METRALE_ATTN_DECODE_SPLITK, read now. A device does
// this once, when it is opened.
// Thread-safety: safe, as long as no thread changes the environment.
ATTN_API struct attn_splitk_policy attn_splitk_policy_from_env(const char *declared);

// clamp(ceil(ATTN_SPLITK_TARGET_WAVES * sm_count / num_q_heads), 1, ATTN_MAX_DECODE_SPLITS).
// num_q_heads below 1 counts as 1, sm_count below 0 as 0.
// Thread-safety: pure.
ATTN_API int32_t attn_splitk_auto_splits(int32_t sm_count, int32_t num_q_heads);

// The larger of the two.
// Thread-safety: pure.
ATTN_API int32_t attn_splitk_ref_seqs(int32_t num_seqs, int32_t max_decode_seqs);

// 1 if num_q_heads * ref_seqs blocks fill the SMs, else sm_count / (num_q_heads * ref_seqs). Not
// clamped to ATTN_MAX_DECODE_SPLITS; at least 1. Factors below 1 count as 1.
// Thread-safety: pure.
ATTN_API int32_t attn_splitk_legacy_splits(int32_t sm_count, int32_t num_q_heads, int32_t ref_seqs);

// Pieces of a launch. auto and pinned read neither sequence count; 0 under chunk: "by length".
// Thread-safety: pure.
ATTN_API int32_t attn_splitk_num_splits(struct attn_splitk_policy policy, int32_t sm_count,
                                        int32_t num_q_heads, int32_t num_seqs,
                                        int32_t max_decode_seqs);

// Slots of the split-K workspace for `rows` sequences: rows * num_q_heads * splits under auto and
// pinned, max(sm_count, 1) under legacy, 0 under chunk. A slot is (head_dim + 2) floats. Where
// splits is above 1, and max_decode_seqs at least rows, every piece has one. INT64_MAX if the
// product does not fit; 0 for rows or heads below 1. attn_decode_workspace tells what a call needs.
// Thread-safety: pure.
ATTN_API int64_t attn_splitk_workspace_slots(struct attn_splitk_policy policy, int32_t sm_count,
                                             int32_t num_q_heads, int32_t rows);

// slots * (head_dim + 2) * 4; INT64_MAX if that does not fit; 0 if either is below 1.
// Thread-safety: pure.
ATTN_API int64_t attn_splitk_workspace_bytes(int64_t slots, int32_t head_dim);

// Reads "1" "on" "true" "yes" or "0" "off" "false" "no", trimmed, any case. False for anything
// else; *on is then untouched.
// Thread-safety: pure.
ATTN_API bool attn_gqa_pack_parse(const char *text, bool *on);

// `env` if it parses, else `declared`.
// Thread-safety: pure.
ATTN_API bool attn_gqa_pack_resolve(bool declared, const char *env);

// The same with env = the environment variable METRALE_ATTN_DECODE_GQA_PACK, read now.
// Thread-safety: safe, as long as no thread changes the environment.
ATTN_API bool attn_gqa_pack_enabled(bool declared);

// True if num_q_heads == ATTN_DECODE_GQA_PACK_WIDTH * num_kv_heads and head_dim ==
// ATTN_DECODE_GQA_PACK_HEAD_DIM, heads positive.
// Thread-safety: pure.
ATTN_API bool attn_gqa_pack_shape_ok(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim);

// num_kv_heads * num_seqs blocks; 0 if either is below 1.
// Thread-safety: pure.
ATTN_API int64_t attn_gqa_pack_ctas(int32_t num_kv_heads, int32_t num_seqs);

#ifdef __cplusplus
}
#endif

#endif

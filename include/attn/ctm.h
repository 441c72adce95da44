/* SPDX-License-Identifier: Apache-2.0 */
// Decode behind the interface of a CTM decode runner: one fixed layout of tensors, everything else
// given at run time. A front of attn_decode, with its numbers and its reproducibility (decode.h).
//
//   s_j = attention_scale * k_scale * (q . k_j) for every visible key j
//   o   = v_scale * sum_j e^(s_j) v_j / (sum_j e^(s_j) + e^(sink))
//
// L = seq_lens[b] keys, the q_len newest of which are the draft keys of the query tokens. Before
// them are past = L - q_len keys; token i stands at position p = past + i. Visible to token i is
// key t
//   decode (q_len 1)      if max(0, L - W) <= t < L
//   tree                  if t < L, and t < past or tree_mask has bit t - past of row i, and it is
//                         not left of the window
//   window, shared edge   t >= L - W for all tokens
//   contiguous_query_swa  t >= p - W + 1 for token i; draft keys after p whose bit is set count
// with W = sliding_window; 0 is no window, in both forms. A tree has no causality of its own: bits
// above the diagonal count, and a clear diagonal hides a token's own key. The window cuts draft
// keys, too. q_len is the same for all sequences: a shorter tree is padded with mask rows of 0,
// whose tokens attend the past alone.
//
// No visible key, or L = 0 (padding): zeros. L in 1 .. q_len - 1: past = 0, reported through
// `fault`. A sink belongs to its query head for every token, and counts in the denominator alone,
// once. NaN and infinity in q or in a visible key or value reach the output; in a key that no token
// of its sequence sees, never; in one that some see, perhaps also the tokens that don't.
//
// Page tables. Row 0 of a sequence has the pages of its keys, row 1 those of its values, the offset
// num_pages included: both are used as they stand, none is derived from the other, and in both 0 ..
// 2 * num_pages - 1 is a page of kv_pool. Anything else (-1: unused) is a fault where a visible key
// would be; entries wholly left of the window, or at and past ceil(L / 128), are never looked at,
// and may be -1, recycled or stale. Sequences may share pages.
//
// Skip-softmax (decode only). With S of the largest seqlen_bin <= L and lambda = S / L, a page of a
// KV head is left out, its values unread, if for every query head of its group
//   e^(largest score of the page - largest score so far) < lambda
// "So far": over the visible keys of earlier pages in the same run of 16 pages, at absolute
// multiples of 16, the sink aside. The first page of a run that has visible keys always counts, and
// so does one with a NaN score. Dense, that is every page counts, if no bin is that small, S <= 0,
// or lambda >= 1. The last is our choice: the pages that weigh most would go. Where a GPU has both
// sides of the comparison closer together than its FP32 scores are to the exact ones, it may decide
// otherwise than the host; what it decides is always the same for the same sequence.
//
// Source of the contract: the CTM decode-runner interface of TensorRT Edge-LLM.
#ifndef ATTN_CTM_H
#define ATTN_CTM_H

#include "common.h"
#include "device.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// Tokens of a page.
#define ATTN_CTM_PAGE_SIZE 128
// Query tokens of a tree at most.
#define ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN 128
// Query heads of a KV head at most: in decode with FP16 keys and values of head_dim below 128, and
// in everything else.
#define ATTN_CTM_MAX_GQA_RATIO 8
#define ATTN_CTM_MAX_GQA_RATIO_R16 16

struct attn_ctm_params {
    // sizeof(struct attn_ctm_params).
    uint32_t size;
    // Sequences; 0 is fine and enqueues nothing.
    int32_t batch_size;
    // Query tokens of each: 1 (decode) .. ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN.
    int32_t q_len;
    // num_q_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_q_heads /
    // num_kv_heads).
    int32_t num_q_heads, num_kv_heads;
    int32_t head_dim;
    // Half the pages of kv_pool: 1 .. 2^30 - 1.
    int32_t num_pages;
    // Columns of page_table.
    int32_t max_pages_per_seq;
    // Keys attended, the current one included. 0: all.
    int32_t sliding_window;
    // 1: the edge of the window moves with the query token. 0: it is that of the last one. Of no
    // meaning if q_len is 1 or sliding_window 0.
    int32_t contiguous_query_swa;

    // [batch_size, q_len, num_q_heads, head_dim] FP16, RoPE applied, 16-byte aligned.
    const void *q;
    // As q. Must not overlap an input.
    void *output;
    // [2 * num_pages, 128, num_kv_heads, head_dim] FP16, or E4M3 if fp8_kv; 16-byte aligned. By
    // custom K has the first half of the pages and V the second; the tables decide.
    const void *kv_pool;
    // 1: kv_pool is E4M3. 0: FP16.
    int32_t fp8_kv;
    // Real K = k_scale * kv_pool, real V = v_scale * kv_pool. Finite. Ignored if not fp8_kv.
    float k_scale, v_scale;
    // Multiplies q . k. Finite.
    float attention_scale;
    // int32 [batch_size, 2, max_pages_per_seq]: see "Page tables".
    const int32_t *page_table;
    // int32 [batch_size]: keys of each sequence, the q_len newest included. 0: padding.
    const int32_t *seq_lens;
    // [num_q_heads] FP32, natural-log units, not scaled; NULL: none.
    const float *sinks;
    // int32 [batch_size, q_len, mask_words]: token i attends draft key j if bit j % 32 of word j /
    // 32 of its row is set. Bits at j >= q_len: anything. Ignored if q_len is 1.
    const int32_t *tree_mask;
    // Words of a row of tree_mask: at least ceil(q_len / 32). Ignored if q_len is 1.
    int32_t mask_words;

    // 1: the caller has something to fall back to, and the call may be declined. Of no effect:
    // attn_ctm_run declines nothing that is supported.
    int32_t fallback_available;

    // int32 pairs (seqlen_bin, S) in device memory, bins ascending; NULL: none. For q_len 1.
    const int32_t *skip_softmax_scale_table;
    // int32 in it, two for each pair; 0: none.
    int32_t skip_softmax_scale_table_length;

    // attn_ctm_workspace_elems FP32, or with q_len > 1 attn_ctm_tree_workspace_elems; any contents,
    // 256-byte aligned.
    float *workspace;
    // attn_ctm_semaphore_elems, or with q_len > 1 attn_ctm_tree_semaphore_elems; 0 before their
    // first use; the call leaves them at 0. One set for each stream with calls in flight. After a
    // launch that was aborted: attn_decode_reset_counters of decode.h.
    int32_t *semaphores;

    // One int32 in device memory, set to INT32_MAX by the caller; NULL: not wanted. Lowered to the
    // smallest index of a sequence whose length is below 0, past its table or in 1 .. q_len - 1, or
    // with a page id outside the pool among the visible keys. Lengths are clamped to the table;
    // such keys count as absent.
    int32_t *fault;
    // One int64 in device memory, raised by the number of pages (of each KV head of each sequence)
    // that skip-softmax left out; NULL: not wanted.
    int64_t *dropped_pages;

    // What the call is enqueued on.
    attn_stream stream;
};

// Everything 0 or NULL, except size, q_len 1, the three scales 1 and fallback_available 1.
#define ATTN_CTM_PARAMS_INIT attn_ctm_params_init()

// What ATTN_CTM_PARAMS_INIT stands for.
// Thread-safety: pure.
static inline struct attn_ctm_params attn_ctm_params_init(void)
{
    struct attn_ctm_params params;
    unsigned char *const bytes = (unsigned char *) &params;
    for (size_t i = 0; i < sizeof(params); i++) bytes[i] = 0;
    params.size = (uint32_t) sizeof(params);
    params.q_len = 1;
    params.attention_scale = 1.0f;
    params.k_scale = 1.0f;
    params.v_scale = 1.0f;
    params.fallback_available = 1;
    return params;
}

// True if decode serves the shape: head_dim 32, 64, 128, 256 or 512; 1 .. 16 query heads a KV head,
// with FP16 keys and values of head_dim below 128 1 .. 8; any sliding_window from 0 up, with sinks
// or without.
// Thread-safety: pure.
ATTN_API bool attn_ctm_supported(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                                 bool fp8_kv, int32_t sliding_window, bool sinks);

// True if trees serve the shape: head_dim 64, 128, 256 or 512, with FP16 keys and values also 32; 1
// .. 16 query heads a KV head; any sliding_window from 0 up, in both forms, with sinks or without.
// Thread-safety: pure.
ATTN_API bool attn_ctm_supported_tree(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                                      bool fp8_kv, int32_t sliding_window,
                                      bool contiguous_query_swa);

// True if 1 <= q_len <= ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN.
// Thread-safety: pure.
ATTN_API bool attn_ctm_supports_tree_query_seq_len(int32_t q_len);

// Sizes. They depend on their arguments alone: not on lengths, table width, the device or its SMs,
// and none of them falls when an argument grows. Those of a tree are at least those of decode, so
// that one allocation serves both. 0 for batch_size 0. -1 where an argument is not one that the
// functions above support, or is negative, or where the size does not fit (semaphores: an int32;
// the workspace in bytes: an int64); attn_ctm_run refuses such a call.

// FP32 elements of `workspace` in decode, whatever num_kv_heads is.
// Thread-safety: pure.
ATTN_API int64_t attn_ctm_workspace_elems(int32_t batch_size, int32_t num_q_heads,
                                          int32_t head_dim);

// int32 of `semaphores` in decode, whatever num_q_heads is.
// Thread-safety: pure.
ATTN_API int64_t attn_ctm_semaphore_elems(int32_t batch_size, int32_t num_kv_heads);

// FP32 elements of `workspace` for trees of q_len tokens.
// Thread-safety: pure.
ATTN_API int64_t attn_ctm_tree_workspace_elems(int32_t batch_size, int32_t q_len,
                                               int32_t num_q_heads, int32_t num_kv_heads,
                                               int32_t head_dim);

// int32 of `semaphores` for trees of q_len tokens.
// Thread-safety: pure.
ATTN_API int64_t attn_ctm_tree_semaphore_elems(int32_t batch_size, int32_t q_len,
                                               int32_t num_q_heads, int32_t num_kv_heads);

// Enqueues decode (q_len 1) or a tree step on params->stream and returns at once; `params` need
// only live until then, everything it points to until the work is done. On the host: computes it.
// May be captured into a CUDA graph: lengths, tables and masks are read when it runs.
//
// What attn_ctm_supported, or attn_ctm_supported_tree, says yes to is served, with either value of
// fallback_available: ATTN_DECLINED is never returned. With q_len 1 one of the two has to say yes.
// The split-K policy of the device has no say: sequences are cut as under policy chunk.
//
// ATTN_ERROR_INVALID: a rule above is broken; nothing was enqueued, nothing written.
// ATTN_ERROR_UNSUPPORTED: the heads, head_dim or q_len are none that the functions above support,
// or this target has no kernel for them. ATTN_ERROR_NO_DEVICE: the device is a target without a
// GPU. ATTN_ERROR_DRIVER: the launch failed. ATTN_ERROR_NO_MEMORY: on the host only.
// Thread-safety: safe.
ATTN_API enum attn_status attn_ctm_run(struct attn_device *device,
                                       const struct attn_ctm_params *params);

#ifdef __cplusplus
}
#endif

#endif

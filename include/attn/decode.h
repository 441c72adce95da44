/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode: the newest tokens of each sequence, one or a few, attend the sequence's keys
// through a block table.
//
//   s_j = scale * k_scale * (q . k_j), then softcap, for every attended key j
//   o   = v_scale * sum_j e^(s_j) v_j / (sum_j e^(s_j) + e^(sink))
//   lse = ln(sum_j e^(s_j) + e^(sink))
//
// Attended are the keys max(0, len - window) .. len - 1; window 0 means all of them. The sink is
// added once, whatever the window and however the keys were cut into pieces.
//
// With q_len > 1 the last q_len keys of a sequence are the draft keys of its query tokens: token i
// stands at position p = len - q_len + i. It attends the keys before len - q_len, and draft keys up
// to p, its own included (a chain to verify), or those that tree_mask names (a tree of drafts). The
// window cuts off both; where it begins for each token is window_form. Tokens that attend nothing
// are like those of a sequence of length 0.
//
// Numbers: scores and row sums in FP32 (the host executor: double), weights rounded to q's type
// before they meet V (with E4M3 KV: to FP16), one division and one rounding at the end. With u =
// the unit roundoff of q's type, A = sum_j p_j |v_j| and S = the largest scale * k_scale * sum_d
// |q_d k_d| over the attended keys:
//   |o - exact| <= u |exact| + (u + 2^-15 + 2^-21 S) A          |lse - exact| <= 2^-15 + 2^-21 S
// FP16 adds 2^-25 B + 2^-25, B = sum_j |v_j| / sum_j e^(s_j - max s); BF16 q with E4M3 KV adds
// 2^-39 B: what weights lose where FP16 has no smaller number. The host executor meets u |exact| +
// 2^-20 A.
//
// NaN and infinity in an attended key or value, or in q, reach the output; those in keys that no
// query token of the sequence attends never do. Where one token attends a key and another does not,
// NaN and infinity in it may come out as NaN for both. A score of -inf weighs 0. A sequence of
// length 0 gives o = 0 and lse = the sink, or -inf without one.
#ifndef ATTN_DECODE_H
#define ATTN_DECODE_H

#include "common.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Query tokens of a sequence at most.
#define ATTN_DECODE_MAX_Q_LEN 128

// The first key that token i of q_len may attend under a window W > 0.
enum attn_window_form {
    // p - W + 1, as if its sequence ended with it.
    ATTN_WINDOW_PER_TOKEN = 0,
    // len - W: the same for all tokens.
    ATTN_WINDOW_SHARED = 1,
};

struct attn_decode_params {
    // sizeof(struct attn_decode_params).
    uint32_t size;
    // Type of q and o: BF16 or FP16. Type of k_pool and v_pool: as q, or E4M3.
    enum attn_dtype q_dtype, kv_dtype;
    // Sequences; 0 is fine and enqueues nothing.
    int32_t batch;
    // Query tokens a sequence: 1 .. ATTN_DECODE_MAX_Q_LEN.
    int32_t q_len;
    // num_q_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_q_heads /
    // num_kv_heads).
    int32_t num_q_heads, num_kv_heads;
    // On a GPU 64, 128, 256, 512, and with an FP16 q 32; on the host a multiple of 16 up to 512.
    int32_t head_dim;
    // Tokens of a page; any from 1 up.
    int32_t page_size;
    // Columns of block_table.
    int32_t max_pages_per_seq;
    // Pages in k_pool and in v_pool: valid page ids are 0 .. num_pages - 1.
    int64_t num_pages;

    // [batch, q_len, num_q_heads, head_dim], 16-byte aligned.
    const void *q;
    // Elements between two sequences of q, a multiple of 16 bytes. 0: q_len * q_token_stride.
    int64_t q_stride;
    // [batch, q_len, num_q_heads, head_dim], dense, 16-byte aligned. Must not overlap an input.
    void *o;

    // [num_pages, page_size, num_kv_heads, head_dim], 16-byte aligned. V may lie in the same pool
    // as K.
    const void *k_pool, *v_pool;
    // Elements between two pages, two tokens of a page, two heads of a token; multiples of 16
    // bytes. All three 0: dense, as in the shape above. Head-major pools are a matter of strides.
    int64_t k_page_stride, k_token_stride, k_head_stride;
    int64_t v_page_stride, v_token_stride, v_head_stride;

    // [batch, max_pages_per_seq], rows table_stride apart: the page of key t of sequence b is
    // block_table[b][t / page_size]. Entries of pages in which no query token attends a key (wholly
    // left of the window, at or past ceil(len / page_size), draft keys that no row of tree_mask
    // names) may hold anything.
    const int32_t *block_table;
    // [batch]: keys of each sequence, its query tokens included. 0: padding.
    const int32_t *seq_lens;

    // [num_q_heads] FP32, natural-log units, not scaled; NULL: none. -inf is the same as none.
    const float *sinks;
    // [batch, q_len, num_q_heads] FP32, natural log, sink included; NULL: not wanted.
    float *lse;

    // Multiplies q . k; usually 1 / sqrt(head_dim). Finite.
    float scale;
    // c: s = c * tanh(s / c) before the softmax. 0: none. Finite, and at least FLT_MIN.
    float softcap;
    // Keys attended, the current one included. 0: all. Not negative. See window_form.
    int32_t window;
    // Real K = k_scale * k_pool, real V = v_scale * v_pool. Finite.
    float k_scale, v_scale;
    // [num_kv_heads] FP32 in device memory, instead of the two above; NULL: none. Both or neither.
    const float *k_scales, *v_scales;

    // Policy legacy only: the largest batch the caller will ever pass, at least batch. Else
    // ignored.
    int32_t max_decode_seqs;

    // At least attn_decode_workspace bytes, 256-byte aligned; any contents. NULL if that is 0.
    void *workspace;
    size_t workspace_bytes;
    // At least attn_decode_counters words, 0 before their first use; the call leaves them at 0. One
    // set for each stream with calls in flight. NULL if that is 0.
    int32_t *counters;

    // One int32 in device memory, set to INT32_MAX by the caller; NULL: not wanted. Lowered to the
    // smallest index of a sequence whose length is below 0 or past its table, or with a page id
    // outside the pool, of K or of V, for a key that one of its query tokens attends. Such lengths
    // are clamped; such keys count as absent, as key and as value. A length in 1 .. q_len - 1 is
    // reported, too: nothing is before its draft keys then, and token i is at position i.
    int32_t *fault;

    // Elements between two query tokens of a sequence in q, a multiple of 16 bytes. 0: num_q_heads
    // * head_dim. Of no meaning if q_len is 1.
    int64_t q_token_stride;
    // [batch, q_len, mask_words]: token i attends draft key j if bit j % 32 of word j / 32 of its
    // row is set, and no other draft key: not those before it, nor its own. Bits at j >= q_len:
    // anything. NULL: token i attends draft keys 0 .. i. Counts if q_len is 1, too.
    const int32_t *tree_mask;
    // Words of a row of tree_mask: at least ceil(q_len / 32). Of no meaning without tree_mask.
    int32_t mask_words;
    // An enum attn_window_form. Without effect if q_len is 1 or window 0.
    int32_t window_form;
    // The table for v_pool, of the shape and stride of block_table; NULL: block_table.
    const int32_t *v_block_table;
    // Elements between two rows of a table, at least max_pages_per_seq. 0: max_pages_per_seq.
    int64_t table_stride;

    // Skip-softmax, for q_len 1: NULL, or pairs (length, S) of int32 in device memory, lengths
    // ascending. Let S be that of the last pair whose length is at most len; where there is none,
    // S <= 0 or S >= len, nothing is left out. Keys are taken in blocks of ATTN_SKIP_KEYS, and
    // those in runs of ATTN_SKIP_SCOPE, both at absolute multiples. A block of a KV head is left
    // out of o and lse if for every query head of its group
    //   e^(largest score of the block - largest score of the run before the block) < S / len.
    // Scores are those of attended keys, those of blocks left out included, and a NaN is larger
    // than all; sinks don't count. So the first block of a run that has attended keys is never left
    // out, nor one with a NaN score, nor one after that in its run. On a GPU, where scores are
    // FP32, a comparison of nearly equal sides may go the other way than on the host, but always
    // goes the same way for the same sequence; q is FP16 there, and a KV head has at most 16 query
    // heads. The split-K policy has no say.
    const int32_t *skip_table;
    // int32 in skip_table, two for each pair; at least 2. Of no meaning without skip_table.
    int32_t skip_table_length;
    // One int64 in device memory, 8-byte aligned, raised by the number of blocks with attended keys
    // (of each KV head of each sequence) that were left out; NULL: not wanted.
    int64_t *dropped_blocks;
};

// Keys of a block of skip-softmax, and blocks of a run of them.
#define ATTN_SKIP_KEYS 128
#define ATTN_SKIP_SCOPE 16

// Everything 0 or NULL, except size, q_len 1, and the scales 1.
#define ATTN_DECODE_PARAMS_INIT attn_decode_params_init()

// What ATTN_DECODE_PARAMS_INIT stands for.
// Thread-safety: pure.
static inline struct attn_decode_params attn_decode_params_init(void)
{
    struct attn_decode_params params;
    unsigned char *const bytes = (unsigned char *) &params;
    for (size_t i = 0; i < sizeof(params); i++) bytes[i] = 0;
    params.size = (uint32_t) sizeof(params);
    params.q_len = 1;
    params.scale = 1.0f;
    params.k_scale = 1.0f;
    params.v_scale = 1.0f;
    return params;
}

// The part of a call that sizes depend on. Fields as in attn_decode_params. Types, heads, head_dim,
// page_size and max_decode_seqs are those of the calls; the others are the largest that the caller
// will pass, window 0 if any call has none.
struct attn_decode_shape {
    // sizeof(struct attn_decode_shape).
    uint32_t size;
    enum attn_dtype q_dtype, kv_dtype;
    int32_t batch, q_len;
    int32_t num_q_heads, num_kv_heads, head_dim;
    int32_t page_size, max_pages_per_seq;
    int32_t window;
    int32_t max_decode_seqs;
    // 1 if calls may have a skip_table, for which q_len is 1; else 0.
    int32_t has_skip_table;
};

// The shape of a call, for the functions below.
// Thread-safety: pure.
static inline struct attn_decode_shape attn_decode_shape_of(
    const struct attn_decode_params *const params)
{
    struct attn_decode_shape shape;
    shape.size = (uint32_t) sizeof(shape);
    shape.q_dtype = params->q_dtype;
    shape.kv_dtype = params->kv_dtype;
    shape.batch = params->batch;
    shape.q_len = params->q_len;
    shape.num_q_heads = params->num_q_heads;
    shape.num_kv_heads = params->num_kv_heads;
    shape.head_dim = params->head_dim;
    shape.page_size = params->page_size;
    shape.max_pages_per_seq = params->max_pages_per_seq;
    shape.window = params->window;
    shape.max_decode_seqs = params->max_decode_seqs;
    shape.has_skip_table = params->skip_table ? 1 : 0;
    return shape;
}

// How a call of a shape would run.
struct attn_decode_plan {
    // sizeof(struct attn_decode_plan), set by the caller; no more than that is written.
    uint32_t size;
    // The kernel: a row of the pack's table; "host executor" on the host.
    const char *kernel;
    // Pieces a sequence (0: by length), and keys of a piece under policy chunk (0: not chunk).
    int32_t num_splits;
    int32_t chunk_keys;
    // Blocks, threads of a block, and dynamic shared memory of a block in bytes; 0 on the host.
    int32_t grid, block, smem_bytes;
    // Of this call; the functions below tell what all calls up to the shape need.
    size_t workspace_bytes;
    int32_t num_counters;
    // For sequences of `max_pages_per_seq * page_size` keys each, the window considered: bytes of K
    // and V that have to be read, bytes of everything else, and floating-point operations.
    double kv_bytes, other_bytes, flops;
};

// Fills *plan. ATTN_ERROR_INVALID: a rule of the shape is broken. ATTN_ERROR_UNSUPPORTED: legal,
// but no kernel of this target accepts it.
// Thread-safety: safe.
ATTN_API enum attn_status attn_decode_plan(const struct attn_device *device,
                                           const struct attn_decode_shape *shape,
                                           struct attn_decode_plan *plan);

// The workspace, in bytes, that calls up to this shape need, with fewer sequences, query tokens or
// pages, a smaller window or no skip_table, whatever the lengths turn out to be.
// Status as attn_decode_plan; *bytes is 0 on failure.
// Thread-safety: safe.
ATTN_API enum attn_status attn_decode_workspace(const struct attn_device *device,
                                                const struct attn_decode_shape *shape,
                                                size_t *bytes);

// The counters, in int32 words, that calls up to this shape need. Status as attn_decode_plan;
// *count is 0 on failure.
// Thread-safety: safe.
ATTN_API enum attn_status attn_decode_counters(const struct attn_device *device,
                                               const struct attn_decode_shape *shape,
                                               int32_t *count);

// Enqueues zeroing of `count` counters: after a launch that was aborted. On the host: zeroes them.
// ATTN_ERROR_INVALID: counters is NULL and count is not 0, or count is negative.
// Thread-safety: safe.
ATTN_API enum attn_status attn_decode_reset_counters(struct attn_device *device, int32_t *counters,
                                                     int32_t count, attn_stream stream);

// Enqueues the operation on `stream` and returns at once; `params` need only live until then,
// everything it points to until the work is done. On the host: computes it.
// ATTN_ERROR_INVALID: a rule above is broken; nothing was enqueued, nothing written.
// ATTN_ERROR_UNSUPPORTED: legal, but no kernel of this target accepts it.
// ATTN_ERROR_NO_DEVICE: the device is a target without a GPU. ATTN_ERROR_DRIVER: the launch failed.
// Source of the contract: the Metrale paged-decode kernels.
// Thread-safety: safe.
ATTN_API enum attn_status attn_decode(struct attn_device *device,
                                      const struct attn_decode_params *params, attn_stream stream);

#ifdef __cplusplus
}
#endif

#endif

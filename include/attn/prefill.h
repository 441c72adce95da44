/* SPDX-License-Identifier: Apache-2.0 */
// Prefill: many query tokens of each sequence attend the sequence's keys, contiguous or paged.
//
//   s_k = scale * (q . k_k), then softcap, for every visible key k
//   o   = sum_k e^(s_k) v_k / (sum_k e^(s_k) + e^(sink))
//   lse = ln(sum_k e^(s_k) + e^(sink))
//
// Token r of a sequence stands at position p = q_offset + r. Visible to it is key k if
//   k < kv_len, and with `causal` k <= p, and with a window W > 0 p - k < W.
// Without `causal` that is every key up to kv_len, those behind p included, whatever the window. A
// token that sees no key gives o = 0 and lse = the sink, or -inf without one.
//
// Numbers, NaN and infinity: as decode.h has them, with k_scale and v_scale 1. The host executor
// meets u |exact| + 2^-20 A, FP16 + 2^-25.
//
// There are two forms. The long one has a thread block for 64 to 192 query tokens of a head, which
// fills a GPU only where there are many of them. The short one also cuts the keys of a sequence,
// and so fills it with one token, too: it is decode of several query tokens (decode.h, a chain to
// verify), and has its bits, those of the policy chunk. attn_prefill takes the short form for each
// sequence with 1 .. ATTN_PREFILL_SHORT_TOKENS query tokens of its own, if the call has a workspace
// and attn_prefill_workspace is not 0 for it: K and V are paged, `causal` is 1, window is at most
// ATTN_PREFILL_SHORT_WINDOW, and the target has decode kernels of that type and head_dim. Else, and
// for all other sequences, the form is the long one. Which form a sequence has never depends on
// others. The host executor has the same bits in both.
//
// The bits of a row depend on its query token, its position, the keys of its sequence, and the form
// alone. Where the keys that the rows of its sequence see are finite, they are the same with any
// page size, in one call or in chunks of that form, alone or in a batch; in the long form they are
// the same contiguous and paged.
//
// On a GPU head_dim is 64, 128, 256 or 512. Nothing is planned on the host: lengths are read on the
// device, a call is one launch, or one of each form, and a captured one stays right for any lengths
// that the sizes in its parameters allow.
#ifndef ATTN_PREFILL_H
#define ATTN_PREFILL_H

#include "common.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

// The head_dim that the twins serve.
#define ATTN_PREFILL_FA128_HEAD_DIM 256

// Query tokens of a sequence at most, and the largest window, in the short form.
#define ATTN_PREFILL_SHORT_TOKENS 128
#define ATTN_PREFILL_SHORT_WINDOW (1 << 30)

struct attn_prefill_params {
    // sizeof(struct attn_prefill_params).
    uint32_t size;
    // Type of q, k, v and o: BF16 or FP16.
    enum attn_dtype dtype;
    // Sequences; 0 is fine and enqueues nothing.
    int32_t batch;
    // Query tokens of each sequence; 0 is fine and enqueues nothing. Of no meaning with cu_seqlens.
    int32_t q_len;
    // Keys of each sequence; 0 or more. With kv_lens: without block_table and kv_starts the tokens
    // that k and v have for each sequence, else of no meaning.
    int32_t kv_len;
    // Position of query token 0 of each sequence: kv_len - q_len where the last one attends all
    // keys. Below 0, tokens before position 0 see no key if causal. Of no meaning with q_offsets.
    int32_t q_offset;
    // num_q_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_q_heads /
    // num_kv_heads).
    int32_t num_q_heads, num_kv_heads;
    // A multiple of 16 up to 512; on a GPU one that has a kernel: 64, 128, 256, 512.
    int32_t head_dim;

    // 1: a token sees no key behind its own position. 0: it does.
    int32_t causal;
    // Keys back from the token's position that it sees, its own included. 0: all. Not negative.
    int32_t window;
    // Multiplies q . k; usually 1 / sqrt(head_dim). Finite.
    float scale;
    // c: s = c * tanh(s / c) before the softmax. 0: none. Finite, and at least FLT_MIN.
    float softcap;

    // [batch, q_len, num_q_heads, head_dim]; with cu_seqlens [num_tokens, num_q_heads, head_dim].
    // 16-byte aligned.
    const void *q;
    // Elements between two query tokens in q, a multiple of 16 bytes. 0: num_q_heads * head_dim.
    int64_t q_token_stride;
    // Of the shape of q, dense, 16-byte aligned. Must not overlap an input.
    void *o;

    // 16-byte aligned; V may lie in the same memory as K.
    //   block_table  [num_pages, page_size, num_kv_heads, head_dim]
    //   kv_starts    [num_kv_tokens, num_kv_heads, head_dim]
    //   neither      [batch, kv_len, num_kv_heads, head_dim]
    const void *k, *v;
    // Elements between two pages, two tokens (of a page), two heads of a token; multiples of 16
    // bytes. All of them 0: dense, as in the shape above. Those between pages are of no meaning
    // without block_table.
    int64_t k_page_stride, k_token_stride, k_head_stride;
    int64_t v_page_stride, v_token_stride, v_head_stride;

    // [batch, max_pages_per_seq], rows table_stride apart: the page of key t of sequence b is
    // block_table[b][t / page_size]. Entries of pages in which no query token sees a key may hold
    // anything. NULL: K and V are contiguous.
    const int32_t *block_table;
    // Elements between two rows of the table, at least max_pages_per_seq. 0: max_pages_per_seq.
    int64_t table_stride;
    // Tokens of a page, any from 1 up; columns of block_table; pages in k and in v, whose valid ids
    // are 0 .. num_pages - 1. Of no meaning without block_table.
    int32_t page_size;
    int32_t max_pages_per_seq;
    int64_t num_pages;

    // [num_q_heads] FP32, natural-log units, not scaled; NULL: none. -inf is the same as none.
    const float *sinks;
    // [batch, q_len, num_q_heads] or [num_tokens, num_q_heads] FP32, natural log, sink included;
    // NULL: not wanted.
    float *lse;
    // One int32 in device memory, set to INT32_MAX by the caller; NULL: not wanted. Lowered to the
    // smallest index of a sequence whose entries of cu_seqlens fall or leave 0 .. num_tokens, or
    // that has query tokens and
    //   a length below 0, or past its table, its part of k, or num_kv_tokens,
    //   a kv_starts outside 0 .. num_kv_tokens,
    //   a page id outside the pool for a key that one of its query tokens sees.
    // Such entries and lengths are clamped (a sequence that ends before it starts has no query
    // tokens, one that starts outside no keys); keys on such pages count as absent, as key and as
    // value. Where entries that fall make sequences share query tokens, rows of any sequence may be
    // left as they are, and a page id that only those would have met unreported.
    int32_t *fault;

    // The rest is for attn_prefill: sequences that differ.

    // [batch + 1]: sequence b has the query tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of q.
    // Those of no sequence are not looked at, and their rows of o and lse not written. NULL: q_len
    // each.
    const int32_t *cu_seqlens;
    // Query tokens in q and o; 0 is fine and enqueues nothing. Of no meaning without cu_seqlens.
    int32_t num_tokens;
    // [batch]: keys of each sequence. NULL: kv_len each.
    const int32_t *kv_lens;
    // [batch]: position of query token 0 of each sequence. NULL: q_offset each.
    const int32_t *q_offsets;
    // [batch]: the token of k and v that is key 0 of each sequence; sequences may share tokens. Has
    // to be NULL with block_table. NULL without block_table: b * kv_len.
    const int32_t *kv_starts;
    // Tokens in k and in v. Of no meaning without kv_starts.
    int32_t num_kv_tokens;

    // For attn_prefill: turns the short form on. At least attn_prefill_workspace bytes, 256-byte
    // aligned; any contents. NULL: the long form for all sequences. Ignored if those bytes are 0.
    void *workspace;
    size_t workspace_bytes;
    // At least attn_prefill_counters words, 0 before their first use; the call leaves them at 0.
    // One set, and one workspace, for each stream with calls in flight; zeroed after an aborted
    // launch by attn_decode_reset_counters. Of no meaning where the workspace is not.
    int32_t *counters;
};

// Everything 0 or NULL, except size, batch 1, causal 1 and scale 1.
#define ATTN_PREFILL_PARAMS_INIT attn_prefill_params_init()

// What ATTN_PREFILL_PARAMS_INIT stands for.
// Thread-safety: pure.
static inline struct attn_prefill_params attn_prefill_params_init(void)
{
    struct attn_prefill_params params;
    unsigned char *const bytes = (unsigned char *) &params;
    for (size_t i = 0; i < sizeof(params); i++) bytes[i] = 0;
    params.size = (uint32_t) sizeof(params);
    params.batch = 1;
    params.causal = 1;
    params.scale = 1.0f;
    return params;
}

// All functions below enqueue the operation on `stream` and return at once; `params` need only live
// until then, everything it points to until the work is done. On the host they compute it.
// ATTN_ERROR_INVALID: a rule above is broken; nothing was enqueued, nothing written.
// ATTN_ERROR_UNSUPPORTED: legal, but no kernel of this device accepts it: another head_dim, or more
// than 2^31 - 1 blocks.
// ATTN_ERROR_NO_DEVICE: the device is a target without a GPU. ATTN_ERROR_DRIVER: the launch failed.

// Sequences of any lengths, contiguous or paged; those that are short, with a workspace, in the
// short form. In the long one with 128 query tokens a block, as the twins, unless
// METRALE_NO_ATTN_FA128 was there or there is no such kernel of that head_dim; else with 64. The
// bits are the same.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill(struct attn_device *device,
                                       const struct attn_prefill_params *params,
                                       attn_stream stream);

// The originals, of 64 query tokens a block: contiguous K and V (block_table has to be NULL), and
// paged (it may not be NULL). Sequences of one length: cu_seqlens, kv_lens, q_offsets and kv_starts
// have to be NULL. They ignore a workspace.
// Source of the contract: the Metrale prefill kernels.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill_64(struct attn_device *device,
                                          const struct attn_prefill_params *params,
                                          attn_stream stream);
ATTN_API enum attn_status attn_prefill_paged_64(struct attn_device *device,
                                                const struct attn_prefill_params *params,
                                                attn_stream stream);

// Their twins, of 128 query tokens a block: what they write is bit for bit what the original
// writes. A twin applies if head_dim is ATTN_PREFILL_FA128_HEAD_DIM, `causal` not 0, window 0,
// num_kv_heads positive, num_q_heads a multiple of it, batch and q_len not 0, its kernel is there
// (on the host it always is), and the environment variable METRALE_NO_ATTN_FA128 was not there,
// with whatever value, when the device was opened.
// ATTN_DECLINED: it does not apply, whatever else may be wrong with the call; nothing was enqueued,
// nothing written, attn_last_error() is "". The caller runs the original.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill_fa128(struct attn_device *device,
                                             const struct attn_prefill_params *params,
                                             attn_stream stream);
ATTN_API enum attn_status attn_prefill_fa128_paged(struct attn_device *device,
                                                   const struct attn_prefill_params *params,
                                                   attn_stream stream);

// What a plan depends on; fields mean what they mean in the parameters.
struct attn_prefill_shape {
    // sizeof(struct attn_prefill_shape).
    uint32_t size;
    enum attn_dtype dtype;
    int32_t batch, q_len, kv_len, q_offset;
    int32_t num_q_heads, num_kv_heads, head_dim;
    int32_t causal, window;
    // 1: calls have cu_seqlens, with that many tokens; q_len, kv_len and q_offset are then of no
    // meaning. Else 0.
    int32_t is_ragged, num_tokens;
    // Query tokens of a block: 64 as the originals, 128 as their twins. 0: as attn_prefill.
    int32_t rows;
    // For the short form: of calls with a block_table and a workspace. page_size 0: neither.
    int32_t page_size, max_pages_per_seq;
};

// The shape of a call of attn_prefill; as if it had a workspace, if it has a block_table.
// Thread-safety: pure.
static inline struct attn_prefill_shape attn_prefill_shape_of(
    const struct attn_prefill_params *const params)
{
    struct attn_prefill_shape shape;
    shape.size = (uint32_t) sizeof(shape);
    shape.dtype = params->dtype;
    shape.batch = params->batch;
    shape.q_len = params->q_len;
    shape.kv_len = params->kv_len;
    shape.q_offset = params->q_offset;
    shape.num_q_heads = params->num_q_heads;
    shape.num_kv_heads = params->num_kv_heads;
    shape.head_dim = params->head_dim;
    shape.causal = params->causal;
    shape.window = params->window;
    shape.is_ragged = params->cu_seqlens ? 1 : 0;
    shape.num_tokens = params->num_tokens;
    shape.rows = 0;
    shape.page_size = params->block_table ? params->page_size : 0;
    shape.max_pages_per_seq = params->block_table ? params->max_pages_per_seq : 0;
    return shape;
}

// How a call of a shape would run.
struct attn_prefill_plan {
    // sizeof(struct attn_prefill_plan), set by the caller; no more than that is written.
    uint32_t size;
    // The kernel of the long form: a row of the pack's table; "host executor" on the host. NULL: no
    // sequence has that form, and the next five are 0.
    const char *kernel;
    // Query tokens of a block, and tiles of so many in all sequences together, at most: a piece of
    // work for each, and each query head. 0 on the host.
    int32_t rows, tiles;
    // Blocks: one for each piece of work, or, if the kernel's blocks take one piece after another,
    // one for each SM. Threads of a block, and dynamic shared memory of a block in bytes. 0 on the
    // host.
    int32_t grid, block, smem_bytes;
    // Bytes of K and V that have to be read, bytes of q and o, and floating-point operations: 4 *
    // head_dim * num_q_heads for each visible pair of a query token and a key. For sequences of
    // kv_len keys from q_offset on; of K, V and operations 0 if is_ragged, as the host can't know.
    double kv_bytes, other_bytes, flops;
    // The kernel of the short form, NULL: no sequence has that form, or on the host; its blocks,
    // their threads, their dynamic shared memory in bytes.
    const char *short_kernel;
    int32_t short_grid, short_block, short_smem_bytes;
    // What attn_prefill_workspace and attn_prefill_counters say.
    size_t workspace_bytes;
    int32_t num_counters;
};

// Fills *plan. ATTN_ERROR_INVALID: a rule of the shape is broken. ATTN_ERROR_UNSUPPORTED: legal,
// but no kernel of this target accepts it.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill_plan(const struct attn_device *device,
                                            const struct attn_prefill_shape *shape,
                                            struct attn_prefill_plan *plan);

// The workspace, in bytes, that calls up to this shape need for the short form, whatever the
// lengths turn out to be; 0: they have the long form alone. It grows with batch and
// max_pages_per_seq, and does not depend on the number of query tokens, kv_len, q_offset and
// window. ATTN_ERROR_INVALID: a rule of the shape is broken. ATTN_ERROR_UNSUPPORTED: sequences are
// too many. *bytes is 0 on failure.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill_workspace(const struct attn_device *device,
                                                 const struct attn_prefill_shape *shape,
                                                 size_t *bytes);

// The counters, in int32 words, that go with that workspace. Status as attn_prefill_workspace;
// *count is 0 on failure.
// Thread-safety: safe.
ATTN_API enum attn_status attn_prefill_counters(const struct attn_device *device,
                                                const struct attn_prefill_shape *shape,
                                                int32_t *count);

#ifdef __cplusplus
}
#endif

#endif

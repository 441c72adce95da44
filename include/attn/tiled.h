/* SPDX-License-Identifier: Apache-2.0 */
// Tiled decode: the KV cache passes through a pool block by block, tile by tile, and the state of a
// running softmax carries over from one tile to the next.
//
//   s_j = scale * (q . k_j) for every key j of the listed blocks
//   o   = sum_j e^(s_j) v_j / sum_j e^(s_j)          lse = ln(sum_j e^(s_j))
//
// A step is attn_tiled_begin_step, then attn_tiled_step_tile for each tile of each sequence's list
// of blocks, then attn_tiled_finalize. Between calls a query head of a sequence has
//   m  the largest score so far, -inf before the first
//   l  sum_j e^(s_j - m)
//   o  sum_j e^(s_j - m) v_j
// in FP32: that is all there is of the state. Blocks are folded into it one after the other, in
// list order, each by itself: any cutting of the same list into tiles gives the same bits. So do
// any block ids, strides, pool sizes, neighbours in the batch, and any bytes in slots that are not
// listed or not valid. A sequence whose list is empty gives o = 0 and lse = -inf.
//
// Numbers: scores are rounded to FP32, as m is; the state is rounded to FP32 after every block, or
// part of one: of 16 keys on a GPU, of 256 on the host executor. With u the unit roundoff of the
// type, A = sum_j p_j |v_j|, S = the largest scale * sum_d |q_d k_d|, n the number of those blocks
// and parts, a GPU, where scores and sums are FP32 and weights are rounded to the type before they
// meet V, meets
//   |o - exact|   <= u |exact| + (u + 2^-15 + 2^-21 S + 2^-23 n) A
//   |lse - exact| <= 2^-15 + 2^-21 S + 2^-23 n + 2^-24 |exact|
// FP16 adds 2^-25 B + 2^-25 to that of o, B = sum_j |v_j| / sum_j e^(s_j - max s). (2^-23 n is what
// roundings add up to if all go the same way: tests find the bounds met without.) The host
// executor, otherwise in double, meets
//   |o - exact|   <= u |exact| + (2^-20 + 2^-23 (n + S)) A, FP16 + 2^-25
//   |lse - exact| <= 2^-20 + 2^-23 (n + S) + 2^-24 |exact|
// A score, or an o of the state, that passes FP32's range is infinite.
//
// NaN and infinity in q, or in a key or value of a valid slot of a listed block, reach the output;
// in any other slot, never. A score of -inf weighs 0.
#ifndef ATTN_TILED_H
#define ATTN_TILED_H

#include "common.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

// What sizes depend on.
struct attn_tiled_dims {
    // sizeof(struct attn_tiled_dims).
    uint32_t size;
    // Type of q, the pools and the output: BF16 or FP16.
    enum attn_dtype dtype;
    // Sequences of a step at most.
    int32_t max_seqs;
    // num_q_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_q_heads /
    // num_kv_heads).
    int32_t num_q_heads, num_kv_heads;
    // 1 .. 256; attn_tiled_create serves 64, 128 and 256.
    int32_t head_dim;
    // Slots (tokens) of a block.
    int32_t block_size;
    // Blocks that a tile has for one sequence at most.
    int32_t tile_capacity;
};

// Everything 0, except size and dtype BF16.
#define ATTN_TILED_DIMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_tiled_dims), ATTN_DTYPE_BF16, 0, 0, 0, 0, 0, 0 \
    }

// ATTN_ERROR_INVALID: dims is NULL, breaks a rule above, has a count below 1, or sizes, of the
// state, of a tile's list or of a block, that are more than 2^63 - 1 bytes.
// Thread-safety: safe.
ATTN_API enum attn_status attn_tiled_validate(const struct attn_tiled_dims *dims);

// Query heads a KV head. All of these: -1, with its sentence, for dims that attn_tiled_validate
// refuses.
// Thread-safety: safe.
ATTN_API int32_t attn_tiled_gqa_ratio(const struct attn_tiled_dims *dims);

// Bytes of m and of l: max_seqs * num_q_heads * 4; of o: that * head_dim; of the output: max_seqs *
// num_q_heads * head_dim * 2.
// Thread-safety: safe.
ATTN_API int64_t attn_tiled_m_bytes(const struct attn_tiled_dims *dims);
ATTN_API int64_t attn_tiled_l_bytes(const struct attn_tiled_dims *dims);
ATTN_API int64_t attn_tiled_o_bytes(const struct attn_tiled_dims *dims);
ATTN_API int64_t attn_tiled_output_bytes(const struct attn_tiled_dims *dims);

// How blocks lie in a pool, in elements.
struct attn_tiled_strides {
    // From one block, one token of a block, one head of a token to the next.
    int64_t block, token, head;
    // From the first element of K to that of V, where one pool has both; 0: each has its own.
    int64_t v_offset;
};

// Pools [block][token][kv_head][head_dim], one for K and one for V: (block_size * num_kv_heads *
// head_dim, num_kv_heads * head_dim, head_dim), v_offset 0. Both: all 0, with its sentence, for
// dims that attn_tiled_validate refuses.
// Thread-safety: safe.
ATTN_API struct attn_tiled_strides attn_tiled_paged_strides(const struct attn_tiled_dims *dims);

// One pool [slot][K, V][kv_head][token][head_dim]: (2 * num_kv_heads * block_size * head_dim,
// head_dim, block_size * head_dim), v_offset num_kv_heads * block_size * head_dim.
// Thread-safety: safe.
ATTN_API struct attn_tiled_strides attn_tiled_scratch_pool_strides(
    const struct attn_tiled_dims *dims);

// The running state of up to max_seqs sequences.
struct attn_tiled;

struct attn_tiled_create_params {
    // sizeof(struct attn_tiled_create_params).
    uint32_t size;
    // Copied.
    const struct attn_tiled_dims *dims;
    // FP32 [max_seqs, num_q_heads], the same, and [max_seqs, num_q_heads, head_dim]: device memory,
    // 16-byte aligned, apart from one another, which has to be there until attn_tiled_destroy. All
    // three or none; NULL: allocated here.
    float *m, *l, *o;
    // Where several thread blocks leave what they find out about one sequence: device memory of
    // attn_tiled_workspace_bytes or more, 16-byte aligned, apart from m, l and o, which has to be
    // there until attn_tiled_destroy. It holds nothing between calls: states whose work never
    // overlaps may share one. NULL, with 0 bytes: allocated here.
    void *workspace;
    int64_t workspace_bytes;
};

// Everything 0 or NULL, except size.
#define ATTN_TILED_CREATE_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_tiled_create_params), 0, 0, 0, 0, 0, 0 \
    }

// Bytes of the workspace that calls of a state of these dims want on that device: 32 MiB at most, 0
// on the host and where lanes are many or tiles short. A device without a GPU (ATTN_DEVICE_TARGET)
// will do. -1, with its sentence, for what attn_tiled_create refuses, or does not serve.
// Thread-safety: safe.
ATTN_API int64_t attn_tiled_workspace_bytes(const struct attn_device *device,
                                            const struct attn_tiled_dims *dims);

// Makes a state; *tiled is NULL on failure. `device` has to be open until attn_tiled_destroy.
// Nothing else here allocates: on a GPU the state and the workspace, if the caller gives none. The
// calls of one state come one after the other. The state is undefined, and the caller's buffers are
// left as they are, until attn_tiled_begin_step.
// ATTN_ERROR_INVALID: a null pointer, or a rule of the params or of attn_tiled_validate is broken.
// ATTN_ERROR_UNSUPPORTED: another head_dim than 64, 128 or 256; no kernel of the target has it; or
// max_seqs KV heads are, with a part of 8 for every begun 8 query heads, more than 2^31 - 1.
// ATTN_ERROR_NO_DEVICE: ATTN_DEVICE_TARGET. ATTN_ERROR_NO_MEMORY. ATTN_ERROR_DRIVER.
// Thread-safety: safe.
ATTN_API enum attn_status attn_tiled_create(struct attn_tiled **tiled, struct attn_device *device,
                                            const struct attn_tiled_create_params *params);

// Frees *tiled, without the caller's buffers, and sets it to NULL; NULL and a pointer to NULL are
// fine. Work in flight on it must be done.
// Thread-safety: handle.
ATTN_API void attn_tiled_destroy(struct attn_tiled **tiled);

// Fills *dims, whose size is set by the caller; no more than that is written. ATTN_ERROR_INVALID: a
// null pointer, or dims->size below 4.
// Thread-safety: safe.
ATTN_API enum attn_status attn_tiled_get_dims(const struct attn_tiled *tiled,
                                              struct attn_tiled_dims *dims);

// All three calls of a step enqueue on `stream` and return at once; params need only live until
// then, everything they point to until the work is done. All of them can be captured in a graph,
// which stays right for other lists, counts and contents of blocks. On the host they compute it.
// ATTN_ERROR_INVALID: a null pointer, a rule is broken, num_seqs outside 0 .. max_seqs; nothing was
// enqueued, and nothing has changed. ATTN_ERROR_DRIVER: a launch failed.

// (m, l, o) = (-inf, 0, 0) for the first num_seqs sequences; the others stay as they are.
// Thread-safety: handle.
ATTN_API enum attn_status attn_tiled_begin_step(struct attn_tiled *tiled, int32_t num_seqs,
                                                attn_stream stream);

struct attn_tiled_step_params {
    // sizeof(struct attn_tiled_step_params).
    uint32_t size;
    // The first sequences of the state; 0 is fine and enqueues nothing.
    int32_t num_seqs;
    // [num_seqs, num_q_heads, head_dim], dense, 16-byte aligned; the same for all tiles of a step.
    const void *q;
    // Blocks of K and of V, as the strides say; 16-byte aligned. May lie in the same memory.
    const void *k_pool, *v_pool;
    // int32 [num_seqs, tile_capacity]: the blocks of each sequence, in list order; 0 ..
    // num_pool_blocks - 1. The same one may be listed any number of times.
    const int32_t *tile_blocks;
    // int32 [num_seqs]: how many of them there are, 0 .. tile_capacity; entries behind may hold
    // anything. At 0 the sequence's state stays as it is, bit for bit.
    const int32_t *tile_block_counts;
    // Elements between two blocks, two tokens of a block, two heads of a token, in k_pool as in
    // v_pool; multiples of 16 bytes. All 0: attn_tiled_paged_strides.
    int64_t block_stride, token_stride, head_stride;
    // 1 .. 2^31 - 1.
    int64_t num_pool_blocks;
    // Slots of the last listed block of each sequence that hold keys, from the first on: none if
    // not positive, all from block_size on. All slots of the other blocks do. So on all but the
    // last tile of a step it is block_size or more.
    int32_t last_block_valid_slots;
    // Multiplies q . k. Finite; 0: 1 / sqrt(head_dim).
    float scale;
    // int32 [num_seqs]: last_block_valid_slots of each sequence, which is then not looked at. NULL:
    // the same for all.
    const int32_t *valid_slots;
    // One int32 in device memory, set to INT32_MAX by the caller; NULL: not wanted. Lowered to the
    // smallest index of a sequence with a count outside 0 .. tile_capacity, or a listed block
    // outside the pool, even one without valid slots. Counts are clamped; such blocks count as
    // absent.
    int32_t *fault;
};

// Everything 0 or NULL, except size and last_block_valid_slots INT32_MAX: all slots.
#define ATTN_TILED_STEP_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_tiled_step_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, INT32_MAX, \
            0, 0, 0 \
    }

// Folds the listed blocks into the state, in list order.
// Thread-safety: handle.
ATTN_API enum attn_status attn_tiled_step_tile(struct attn_tiled *tiled,
                                               const struct attn_tiled_step_params *params,
                                               attn_stream stream);

struct attn_tiled_finalize_params {
    // sizeof(struct attn_tiled_finalize_params).
    uint32_t size;
    // The first sequences of the state; 0 is fine and enqueues nothing.
    int32_t num_seqs;
    // [num_seqs, num_q_heads, head_dim], dense, 16-byte aligned.
    void *output;
    // [num_seqs, num_q_heads] FP32, natural log; NULL: not wanted.
    float *lse;
};

// Everything 0 or NULL, except size.
#define ATTN_TILED_FINALIZE_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_tiled_finalize_params), 0, 0, 0 \
    }

// output = o / l, 0 where l is 0; lse = m + ln(l). The state stays as it is: more tiles may follow.
// Source of the contract, of all calls: the Metrale tiled-decode kernels.
// Thread-safety: handle.
ATTN_API enum attn_status attn_tiled_finalize(struct attn_tiled *tiled,
                                              const struct attn_tiled_finalize_params *params,
                                              attn_stream stream);

// How attn_tiled_step_tile would run.
struct attn_tiled_plan {
    // sizeof(struct attn_tiled_plan), set by the caller; no more than that is written.
    uint32_t size;
    // The kernel: a row of the pack's table; "host executor" on the host.
    const char *kernel;
    // 0: one launch folds the tile. Else so many pairs of launches do: one leaves partials in the
    // workspace, the other folds them.
    int32_t turns;
    // Blocks of the launch that reads K and V, the largest if there are several; threads of a block,
    // and dynamic shared memory of a block in bytes. 0 on the host, and without sequences.
    int32_t grid, block, smem_bytes;
    // attn_tiled_workspace_bytes.
    int64_t workspace_bytes;
    // Of tiles that are full: bytes of K and V; those of q, and of the state, read and written;
    // floating-point operations, 4 * head_dim * num_q_heads for each key.
    double kv_bytes, other_bytes, flops;
};

// Fills *plan, of a tile of num_seqs sequences. No GPU is needed: see ATTN_DEVICE_TARGET.
// ATTN_ERROR_INVALID: a null pointer, num_seqs outside 0 .. max_seqs, a rule of attn_tiled_validate
// is broken. ATTN_ERROR_UNSUPPORTED: as attn_tiled_create.
// Thread-safety: safe.
ATTN_API enum attn_status attn_tiled_plan(const struct attn_device *device,
                                          const struct attn_tiled_dims *dims, int32_t num_seqs,
                                          struct attn_tiled_plan *plan);

#ifdef __cplusplus
}
#endif

#endif

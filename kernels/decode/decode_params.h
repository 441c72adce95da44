/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the decode kernels, read by the C compiler and by nvcc: a paged view of K and V,
// and what to do with it. Strides are in elements.
#ifndef ATTN_DECODE_PARAMS_H
#define ATTN_DECODE_PARAMS_H

#include <stdint.h>

// A CUtensorMap.
struct attn_decode_map {
#ifdef __cplusplus
    alignas(64)
#else
    _Alignas(64)
#endif
        unsigned char bytes[128];
};

struct attn_decode_args {
    // If has_boxes: K and V as tensors of columns of a line of at most 128 bytes, slots, lines of a
    // row, heads, pages, with boxes of a line, ATTN_DECODE_GROUP slots, all lines, swizzled.
    struct attn_decode_map k_map, v_map;
    const void *q;
    void *o;
    const void *k, *v;
    const int32_t *block_table;
    const int32_t *seq_lens;
    const float *sinks;
    float *lse;
    const float *k_scales, *v_scales;
    int32_t *fault;
    // Of each (block run, lane), or of each block if there is one block run: a region of warps *
    // run_roots slots, each of attn_decode_slot_floats: blocks of the merge tree that wait, and
    // those that others will merge.
    float *roots;
    // splits > 1: what pieces have given, [batch, num_q_heads, splits][head_dim + 2]: unnormalised
    // o, m, l.
    float *pieces;
    // Arrivals; 0 before and after. If block_runs > 1, one word for each (piece, lane); then, if
    // splits > 1, one for each (sequence, lane).
    int32_t *counters;
    int64_t q_stride;
    int64_t k_page_stride, k_token_stride, k_head_stride;
    int64_t v_page_stride, v_token_stride, v_head_stride;
    int64_t num_pages;
    int64_t table_stride;
    int32_t page_size;
    // See attn_decode_divide.
    uint32_t page_magic;
    int32_t page_shift;
    // Keys a table row can hold, saturated at INT32_MAX.
    int32_t max_keys;
    int32_t batch;
    int32_t num_q_heads, num_kv_heads;
    int32_t ratio;
    // Query rows of a lane, at most the kernel's, and lanes of a KV head: ceil(ratio / group_rows).
    int32_t group_rows, row_groups;
    int32_t window;
    // Pieces of a sequence, each a reduction of its own; 1: none.
    int32_t splits;
    uint32_t splits_magic;
    int32_t splits_shift;
    // num_kv_heads * row_groups.
    int32_t lanes;
    // A lane's leaves are cut into this many runs for blocks, each of which is cut for its warps.
    int32_t block_runs;
    // Slots of a warp.
    int32_t run_roots;
    // Leaves are counted in units of 2^min_shift: the largest count stays below 2^30.
    int32_t min_shift;
    int32_t has_boxes;
    float scale;
    float softcap;
    float k_scale, v_scale;
};

// For division by `divisor`, at least 1, of numbers below 2^31: a multiplication and a shift. With
// 2^(l - 1) < divisor <= 2^l, magic = ceil(2^(31 + l) / divisor) is off by less than 2^l / divisor,
// which a number below 2^31 cannot make into a whole one. By 1 nothing is divided: magic 0.
static inline void attn_decode_magic(int32_t divisor, uint32_t *magic, int32_t *shift)
{
    int32_t l = 0;
    while ((int64_t) 1 << l < divisor) l++;
    const uint64_t power = (uint64_t) 1 << (31 + l);
    *magic = l ? (uint32_t) ((power + (uint32_t) divisor - 1) / (uint32_t) divisor) : 0;
    *shift = l ? l - 1 : 0;
}

#ifdef __CUDACC__
static __device__ __forceinline__ uint32_t
#else
static inline uint32_t
#endif
attn_decode_divide(uint32_t number, uint32_t magic, int32_t shift)
{
    return magic ? (uint32_t) ((uint64_t) number * magic >> 32) >> shift : number;
}

// Blocks of a launch at most; work beyond is walked.
#define ATTN_DECODE_MAX_GRID 512
// Runs are cut at multiples of at least 2^-ATTN_DECODE_SNAP of the smaller of the run and the
// sequence: so few aligned blocks of the tree are cut off.
#define ATTN_DECODE_SNAP 3
// Slots for the part of a sequence that begins before the run of a warp, of a block.
#define ATTN_DECODE_WARP_HEAD 5
#define ATTN_DECODE_BLOCK_HEAD 8
// Slots that a block needs for the roots that its warps' come to.
#define ATTN_DECODE_BLOCK_ROOTS 18
// Keys of the smallest piece under a split count.
#define ATTN_DECODE_MIN_PIECE 256

// Floats of a slot: o of each row, then m and l of each row.
static inline int64_t attn_decode_slot_floats(int32_t head_dim, int32_t rows)
{
    return (int64_t) rows * (head_dim + 2);
}

// Slots that a warp needs for a run of up to `leaves` leaves. Of the sequence that the run's end
// cuts off wait blocks of distinct levels, the leftmost of any.
static inline int32_t attn_decode_run_roots(int64_t leaves, int32_t warps, int32_t head_dim,
                                            int32_t rows)
{
    // The lowest level waits elsewhere, and is a root only of short runs.
    const int32_t elsewhere = rows == 8 && head_dim <= 256 && leaves >= 64;
    const int64_t longest = leaves + (leaves >> ATTN_DECODE_SNAP) + 1;
    int32_t levels = 1;
    while (((int64_t) 1 << levels) - 1 <= longest) levels++;
    const int32_t roots = ATTN_DECODE_WARP_HEAD + levels - elsewhere;
    const int32_t least = (ATTN_DECODE_BLOCK_ROOTS + warps - 1) / warps;
    return roots > least ? roots : least;
}

// Keys of a tile of K or V.
#define ATTN_DECODE_GROUP 16

// Dynamic shared memory of a block, in bytes: of struct smem in config.cuh.
#ifdef __cplusplus
static constexpr int32_t
#else
static inline int32_t
#endif
attn_decode_smem_bytes(int32_t head_dim, int32_t kv_bytes, int32_t rows, int32_t warps,
                       int32_t stages)
{
    const int32_t ring = warps * stages * ATTN_DECODE_GROUP * head_dim * kv_bytes;
    // Queries that do not fit the registers.
    const int32_t q =
        rows * head_dim > (rows == 8 ? 2048 : 1024) ? warps * rows * head_dim * 2 : 16;
    const int32_t level_0 = rows == 8 && head_dim <= 256 ? warps * rows * (head_dim + 2) * 4 : 16;
    const int32_t barriers = warps * stages * 8;
    // Sums of units, one a thread and one a warp; two cuts a warp; six words.
    const int32_t schedule = warps * (32 + 1) * 4 + warps * 2 * 20 + 6 * 4;
    return (ring + q + level_0 + barriers + schedule + 15) / 16 * 16;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the decode kernels, read by the C compiler and by nvcc: a paged view of K and V,
// and what to do with it. Strides are in elements.
#ifndef ATTN_DECODE_PARAMS_H
#define ATTN_DECODE_PARAMS_H

#include <stdint.h>

struct attn_decode_args {
    const void *q;
    void *o;
    const void *k, *v;
    const int32_t *block_table;
    const int32_t *seq_lens;
    const float *sinks;
    float *lse;
    const float *k_scales, *v_scales;
    int32_t *fault;
    // Pending blocks of the merge tree: a slice of `stack_levels` levels for each block of the
    // grid.
    float *stack;
    // Roots of runs that hold a part of a sequence: for each (run, lane) `max_roots` for the
    // sequence whose part starts the run or lies within it from the run's begin, then `max_roots`
    // for the one that the run's end cuts off.
    float *roots;
    // Arrivals: one word for each (sequence, lane); 0 before and after.
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
    // Row groups of a KV head: ceil(ratio / rows of the kernel).
    int32_t row_groups;
    int32_t window;
    int32_t stack_levels;
    // Runs that the leaves of all sequences are cut into, and lanes: num_kv_heads * row_groups.
    int32_t runs, lanes;
    // Of `runs`: see attn_decode_divide.
    uint32_t runs_magic;
    int32_t runs_shift;
    // Leaves are counted in units of 2^min_shift at least: the largest count stays below 2^30.
    int32_t min_shift;
    int32_t max_roots;
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

// Levels of the merge tree that a thread keeps in registers, at least.
#define ATTN_DECODE_REGISTER_LEVELS 2
// Blocks of a launch at most; work beyond is walked.
#define ATTN_DECODE_MAX_GRID 512

// Floats of one level of one block's stack: of each row its o, m and l, as the threads hold them.
// Thread: head_dim * rows / threads of o, then m and l for 2 columns of every 8 rows.
static inline int64_t attn_decode_level_floats(int32_t head_dim, int32_t rows, int32_t warps)
{
    return (int64_t) head_dim * rows + (int64_t) warps * 32 * (rows / 8) * 4;
}

// Levels above the registers that sequences of up to `keys` keys need with leaves of `tile` keys.
static inline int32_t attn_decode_stack_levels(int64_t keys, int32_t tile)
{
    int32_t levels = 0;
    for (int64_t span = (int64_t) tile << ATTN_DECODE_REGISTER_LEVELS; span < keys; span *= 2)
        levels++;
    return levels;
}

// Most aligned blocks that a stretch of the leaves of a sequence of up to `keys` keys falls into.
static inline int32_t attn_decode_max_roots(int64_t keys, int32_t tile)
{
    const int64_t leaves = (keys + tile - 1) / tile;
    int32_t levels = 0;
    while ((int64_t) 1 << levels < leaves) levels++;
    return leaves < 2 * levels ? (int32_t) leaves : 2 * levels;
}

// Dynamic shared memory of a block, in bytes; decode.cu asserts that its struct smem has this size.
static inline int32_t attn_decode_smem_bytes(int32_t head_dim, int32_t rows, int32_t tile,
                                             int32_t warps, int32_t stages)
{
    const int32_t ring = stages * tile * (head_dim + 8) * 2;
    const int32_t p = rows * (tile + 8) * 2;
    const int32_t offsets = 4 * tile * 2 * 8;
    const int32_t visible = 8 * (tile / 32) * 4;
    const int32_t reduce = 2 * warps * rows * 4;
    const int32_t scan = warps * 4 + 32;
    return ring + p + offsets + visible + reduce + scan;
}

#endif

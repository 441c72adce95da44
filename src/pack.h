/* SPDX-License-Identifier: Apache-2.0 */
// What a pack gives the core: the one symbol it exports. Everything in it is generated from
// targets/<name>/target.conf and kernels.conf; see src/pack/.
#ifndef ATTN_SRC_PACK_H
#define ATTN_SRC_PACK_H

#include <stddef.h>
#include <stdint.h>

// Raised whenever a struct below, or the argument struct of a kernel, changes.
#define ATTN_PACK_ABI 8u
// The symbol of a shared pack. In a static build it is attn_pack_<target>.
#define ATTN_PACK_SYMBOL "attn_pack"

// Values that a word in kernels.conf stands for: `q=bf16` is ATTN_ROW_BF16; kernels are given the
// number. The types are those of enum attn_dtype.
enum {
    ATTN_ROW_BF16 = 1,
    ATTN_ROW_FP16 = 2,
    ATTN_ROW_E4M3 = 3,
    // Operations.
    ATTN_ROW_DECODE = 1,
    ATTN_ROW_READ = 2,
    ATTN_ROW_PREFILL = 3,
    ATTN_ROW_TILED = 4,
};

// One row of kernels.conf. A key that a row leaves out is 0.
struct attn_pack_row {
    const char *name;
    int32_t op;
    int32_t q, kv;
    int32_t head_dim;
    // Query rows that share a block's K/V loads; a wider GQA group is walked in parts. Of
    // op=prefill: query tokens of a block.
    int32_t rows;
    // Largest GQA ratio accepted; 0: any.
    int32_t max_ratio;
    // Keys of a tile, which is also the leaf of the merge tree; warps of a block (of op=decode and
    // op=prefill: those that multiply); tiles of K or V (of op=read: 16-byte loads of a thread; of
    // op=tiled: units of each warp) in flight.
    int32_t tile, warps, stages;
    // Blocks that an SM holds (of op=prefill, 0: 1); of op=decode: levels of the merge tree that wait
    // in shared memory.
    int32_t per_sm, levels;
    // Rows of equal operation, types and head_dim with equal math give equal bits.
    int32_t math;
    // Of op=prefill: warps of a block that copy, and lines of a box (see src/boxes.h).
    int32_t copiers, box_lines;
    // Of op=decode: leaves by which K is ahead of V in a kernel for skip-softmax; 0: it is for calls
    // without.
    int32_t ahead;
    // Warpgroups that multiply; 0: warps do. Of op=prefill: such blocks take one item after another.
    // Of op=decode: 0 or 2; query rows of a KV head from which on a kernel is taken.
    int32_t warpgroups, min_rows;
};

struct attn_pack {
    uint32_t abi;
    // sizeof(struct attn_pack), sizeof(struct attn_pack_row).
    uint32_t size, row_size;
    uint32_t num_rows;
    const struct attn_pack_row *rows;
    const char *target;
    // As declared: what nvcc calls the architecture, and a version such as "9.0".
    const char *arch;
    const char *compute_capability;
    const char *splitk_policy;
    int32_t sm_count;
    int32_t memory_bandwidth_gbs;
    int32_t smem_per_block;
    int32_t gqa_pack;
    const void *fatbin;
    const void *fatbin_end;
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The arguments of the decode kernels, read by the C compiler and by nvcc: a paged view of K and V,
// and what to do with it. Strides are in elements.
#ifndef ATTN_DECODE_PARAMS_H
#define ATTN_DECODE_PARAMS_H

#include "../common/paged.h"

#include <math.h>
#include <stdint.h>

struct attn_decode_args {
    // If has_boxes: K and V as tensors of columns of a line of at most 128 bytes, slots, lines of a
    // row, heads, pages, with boxes of a line, ATTN_BOX_KEYS slots, all lines, swizzled. Where
    // warpgroups multiply, of box_groups times as many slots, and one line.
    struct attn_box_map k_map, v_map;
    const void *q;
    void *o;
    const void *k, *v;
    const int32_t *block_table;
    // Of V, if not the same; else null.
    const int32_t *v_table;
    const int32_t *seq_lens;
    // [batch, q_len, mask_words]; null: causal.
    const int32_t *tree_mask;
    const float *sinks;
    float *lse;
    const float *k_scales, *v_scales;
    int32_t *fault;
    // Slots, of ATTN_DECODE_SLOT_FLOATS each, for blocks of the merge tree: num_roots of those that
    // meet others' in the end, then stack_slots for each block of the grid.
    float *slots;
    // splits > 1: what pieces have given, [batch, q_len, num_q_heads, splits][head_dim + 2]:
    // unnormalised o, m, l.
    float *pieces;
    // 0 before and after. Items that blocks have asked for; blocks that are done; root_levels times
    // num_roots arrivals of roots; then, if splits > 1, those of pieces of each (sequence, lane).
    int32_t *counters;
    int64_t q_stride, q_token_stride;
    int64_t k_page_stride, k_token_stride, k_head_stride;
    int64_t v_page_stride, v_token_stride, v_head_stride;
    int64_t num_pages;
    int64_t table_stride;
    int32_t table_columns;
    int32_t page_size;
    // See attn_divide.
    uint32_t page_magic;
    int32_t page_shift;
    // Keys a table row can hold, saturated at INT32_MAX.
    int32_t max_keys;
    int32_t batch;
    int32_t q_len, mask_words;
    int32_t num_q_heads, num_kv_heads;
    // Query heads of a KV head; for division by it. Its query rows are those of token 0, of token
    // 1, and so on.
    int32_t ratio;
    uint32_t ratio_magic;
    int32_t ratio_shift;
    // Query rows of a lane, at most the kernel's, and lanes of a KV head: ceil(ratio * q_len /
    // group_rows).
    int32_t group_rows, row_groups;
    uint32_t groups_magic;
    int32_t groups_shift;
    // With window_is_shared from the end of the sequence, else from each token.
    int32_t window, window_is_shared;
    // Pieces of a sequence, each a reduction of its own; 1: none.
    int32_t splits;
    uint32_t splits_magic;
    int32_t splits_shift;
    // num_kv_heads * row_groups.
    int32_t lanes;
    uint32_t lanes_magic;
    int32_t lanes_shift;
    // For division by the number of blocks.
    uint32_t grid_magic;
    int32_t grid_shift;
    int32_t num_roots, root_levels, stack_slots;
    // Leaves are counted in units of 2^min_shift: the largest count stays below 2^30.
    int32_t min_shift;
    // Of all blocks, at most.
    int32_t most_units;
    // Of all pieces, at least, for late ones; whether a piece may begin within a unit.
    uint32_t least_late_leaves;
    int32_t may_begin_within;
    int32_t has_boxes, box_groups;
    float scale;
    float softcap;
    float k_scale, v_scale;
    // Of kernels that leave out blocks of ATTN_DECODE_SKIP_KEYS keys: the table, int32 in it, and
    // where the number of those that were left out is added; null: nowhere.
    const int32_t *skip_table;
    int64_t *dropped;
    int32_t skip_table_length;
    // Chunks of prompts, as attn/prefill.h has them, if most_tokens is not 0: of sequences with 1
    // .. most_tokens query tokens of their own, which q_len is the most of; others are left alone.
    // Null: q_len, q_offset each; seq_lens may be null, too: kv_len each.
    int32_t most_tokens;
    int32_t num_tokens, kv_len, q_offset;
    const int32_t *cu_seqlens, *q_offsets;
};

// Blocks of a launch at most; work beyond is walked.
#define ATTN_DECODE_MAX_GRID 1024
// At most 2^ATTN_DECODE_FAN_LOG roots of a row are merged by one block. 32 of 8 kB take one SM longer
// to read than several take with a part each; where roots are small the levels cost more than they
// save.
#define ATTN_DECODE_FAN_LOG(head_dim, rows) ((head_dim) * (rows) >= 2048 ? 3 : 5)
#define ATTN_DECODE_LEAST_FAN_LOG 3
#define ATTN_DECODE_MOST_FAN_LOG 5
// Units of a block, on average, at most; fewer where the workspace is given.
#define ATTN_DECODE_BLOCK_UNITS 16
// Of a kernel of warpgroups, whose slots are larger.
#define ATTN_DECODE_GROUP_UNITS 4
// Leaves are dealt in units of 2^shift. What that costs, in the time of a leaf: the units of the
// block that has most, and what was measured to be lost with each of them, and at the end a part of
// a unit, as not all blocks are done at the same time. More of it where pieces differ. `items`: of
// (leaf, lane); magic and shift divide by the number of blocks. Infinity: more units than allowed.
ATTN_BOTH float attn_decode_unit_cost(uint64_t items, uint32_t grid_magic, int32_t grid_shift,
                                      int32_t most_units, int32_t are_even, int32_t shift)
{
    const uint64_t units = items >> shift;
    const uint32_t last = units ? (uint32_t) units - 1 : 0;
    const uint32_t most = attn_divide(last, grid_magic, grid_shift) + 1;
    const float leaves = (float) (1u << shift);
    const float cost = (float) most * (leaves + 16.0f) + leaves * (are_even ? 0.25f : 2.0f);
    return units > (uint32_t) most_units ? INFINITY : cost;
}

// Whether pieces differ little: they have `leaves`, and the longest `longest`.
ATTN_BOTH int32_t attn_decode_are_even(uint64_t leaves, uint64_t longest, int32_t pieces)
{
    return longest * (uint32_t) pieces <= leaves + leaves / 4;
}

// Where pieces differ little their units may be few rounds of the blocks, and the last round for few
// of the blocks. The last pieces are late then: they are cut finer, so that all blocks have some of
// them. `pieces` of `leaves` on `lanes` lanes, and roots there is room for.
struct attn_decode_even {
    uint32_t pieces, lanes, leaves, blocks, grid_magic;
    int32_t grid_shift;
    uint32_t num_roots, may_begin_within;
};
// What it costs in the time of a leaf, how many pieces, and in units of 2^shift.
struct attn_decode_late {
    uint32_t cost, pieces;
    int32_t shift;
};
// Leaves a block, at least: with fewer it is not worth while; and rounds, at most.
#define ATTN_DECODE_LATE_LEAVES 8
#define ATTN_DECODE_LATE_ROUNDS 3

// Of units of 2^shift leaves: rounds of all blocks, and in the time of a leaf.
ATTN_BOTH uint32_t attn_decode_even_rounds(struct attn_decode_even e, uint32_t lanes, int32_t shift)
{
    return attn_divide(lanes * (((e.leaves - 1) >> shift) + 1) - 1, e.grid_magic, e.grid_shift) + 1;
}

ATTN_BOTH uint32_t attn_decode_even_cost(struct attn_decode_even e, uint32_t rounds, int32_t shift)
{
    const uint32_t unit = 1u << shift < e.leaves ? 1u << shift : e.leaves;
    return rounds * (unit + 1);
}

// Whether late pieces may cost less, see below: they cost a block at least the mean, two units, and
// roots, of all pieces where these are not whole in each round.
ATTN_BOTH int32_t attn_decode_may_be_late(struct attn_decode_even e, uint32_t cost)
{
    const uint32_t lanes = e.pieces * e.lanes;
    const uint32_t mean = attn_divide(lanes * e.leaves, e.grid_magic, e.grid_shift);
    return cost > mean + (lanes < e.blocks ? 6 + mean / 16 : 4);
}

// Late pieces where all others have units of 2^shift leaves. The highest cost: there are none.
ATTN_BOTH struct attn_decode_late attn_decode_find_late(struct attn_decode_even e, int32_t shift)
{
    struct attn_decode_late late = { UINT32_MAX, 0, shift };
    const uint32_t of_lane = ((e.leaves - 1) >> shift) + 1, of_piece = e.lanes * of_lane;
    const uint32_t units = e.pieces * of_piece;
    const uint32_t rounds = attn_divide(units, e.grid_magic, e.grid_shift);
    const uint32_t over = units - rounds * e.blocks;
    if (rounds == 0 || rounds > ATTN_DECODE_LATE_ROUNDS || over == 0) return late;
    const uint32_t pieces = (over - 1) / of_piece + 1, lanes = pieces * e.lanes;
    if (pieces >= e.pieces) return late;
    // A unit for each block, or for some.
    const uint32_t share = attn_divide(lanes * e.leaves - 1, e.grid_magic, e.grid_shift) + 1;
    const int32_t late_shift = attn_log2_up(share);
    // A lone unit leaves no root; a piece that begins within a unit may have one more.
    const uint32_t late_of_lane = ((e.leaves - 1) >> late_shift) + 1 + e.may_begin_within;
    const uint32_t others = of_lane > 1 ? (e.pieces - pieces) * e.lanes : 0;
    const uint64_t roots =
        (uint64_t) lanes * late_of_lane + (uint64_t) others * (of_lane + e.may_begin_within);
    if (roots > e.num_roots || late_shift >= shift) return late;
    const uint32_t cost =
        attn_decode_even_cost(e, rounds, shift) +
        attn_decode_even_cost(e, attn_decode_even_rounds(e, lanes, late_shift), late_shift);
    // Roots of late pieces, or of all; of these also a part for blocks that are not equally fast.
    late.cost = cost + (of_lane > 1 ? 4 + cost / 16 : 2);
    late.pieces = pieces;
    late.shift = late_shift;
    return late;
}

#ifndef __CUDACC__
// The largest shift of the lowest cost. Kernels do the same, a lane a shift.
static inline int32_t attn_decode_unit_shift(uint64_t items, int32_t blocks, int32_t most_units,
                                             int32_t are_even)
{
    uint32_t grid_magic;
    int32_t grid_shift, best = 31;
    attn_magic(blocks, &grid_magic, &grid_shift);
    for (int32_t shift = 30; shift >= 0; shift--)
        if (attn_decode_unit_cost(items, grid_magic, grid_shift, most_units, are_even, shift) <
            attn_decode_unit_cost(items, grid_magic, grid_shift, most_units, are_even, best))
            best = shift;
    return best;
}

// The largest shift of the lowest cost for all but the late pieces; `shift`, and none are late,
// where that costs no more. Kernels do the same, a lane a shift.
static inline int32_t attn_decode_late_cut(struct attn_decode_even e, int32_t shift,
                                           int32_t whole_alone, struct attn_decode_late *late)
{
    int32_t best = shift;
    late->cost =
        attn_decode_even_cost(e, attn_decode_even_rounds(e, e.pieces * e.lanes, shift), shift);
    late->pieces = 0;
    late->shift = shift;
    if (!attn_decode_may_be_late(e, late->cost)) return best;
    for (int32_t other = 31; other >= 0; other--) {
        const struct attn_decode_late own = attn_decode_find_late(e, other);
        if ((whole_alone && 1u << other < e.leaves) || own.cost >= late->cost) continue;
        *late = own;
        best = other;
    }
    return best;
}
#endif

// Keys of a block that may be left out, and blocks of a run, within which one is compared with
// those before it; both at absolute multiples. Units of such sequences hold whole runs.
#define ATTN_DECODE_SKIP_KEYS 128
#define ATTN_DECODE_SKIP_SCOPE 16
// Blocks whose fate may wait to be read.
#define ATTN_DECODE_DECISIONS 8

// Keys of the smallest piece under a split count.
#define ATTN_DECODE_MIN_PIECE 256

// Threads of a block: those of `warps` warps that multiply, of one that copies, and of one that
// counts arrivals.
#define ATTN_DECODE_THREADS(warps) (((warps) + 2) * 32)
// Where warpgroups multiply, two more that do nothing: registers move between warpgroups.
#define ATTN_DECODE_GROUP_THREADS(warps) (((warps) + 4) * 32)
// Floats of a slot: o of each row, then m and l of each row, for each warp; where warpgroups
// multiply, for each of the two, of the 64 rows that a product has.
#define ATTN_DECODE_SLOT_FLOATS(head_dim, rows, warps) ((rows) * ((head_dim) + 2 * (warps)))
#define ATTN_DECODE_GROUP_SLOT_FLOATS(head_dim, rows) ((rows) * (head_dim) + 2 * 2 * 64)
#define ATTN_DECODE_Q_IN_REGISTERS(rows, head_dim) \
    ((rows) * (head_dim) <= ((rows) == 8 ? 2048 : 1024))
#define ATTN_DECODE_INFOS(stages) (((stages) + 1) / 2 + 1)
// Leaves that are known at the same time, and those whose weights are: where K is `ahead` leaves
// ahead of V.
#define ATTN_DECODE_LEAF_INFOS(stages, ahead) \
    ((ahead) > 0 ? (stages) + (ahead) + 1 : ATTN_DECODE_INFOS(stages))
#define ATTN_DECODE_PARTS(ahead) ((ahead) > 0 ? (ahead) + 2 : 1)

// Dynamic shared memory of a block, in bytes: of struct smem in config.cuh, for each row.
#ifdef __cplusplus
#define ATTN_DECODE_SIZE static constexpr int32_t
#else
#define ATTN_DECODE_SIZE static inline int32_t
#endif

// Of what all rows have: the ring, what waits in the merge tree, what warps tell each other.
ATTN_DECODE_SIZE attn_decode_common_bytes(int32_t tile_bytes, int32_t rows, int32_t slot_floats,
                                          int32_t threads, int32_t stages, int32_t levels,
                                          int32_t ahead)
{
    const int32_t slots = levels * slot_floats * 4;
    const int32_t fan = (1 << ATTN_DECODE_MOST_FAN_LOG) * rows * 8;
    const int32_t leaves = ATTN_DECODE_LEAF_INFOS(stages, ahead);
    const int32_t infos =
        ATTN_DECODE_INFOS(stages) * (48 + 8) + leaves * 32 + (ahead > 0 ? 1 : leaves) * 8;
    const int32_t barriers = stages * 16 + 2 * 16;
    // Of the threads that count, a thread's length and sums of units and roots, a warp's sums; three
    // words.
    const int32_t schedule = threads * 12 + threads / 32 * 8 + 3 * 4;
    // Two units, and what is posted of them.
    const int32_t arrivals = 2 * 48 + 16 + 2 * 8;
    return stages * tile_bytes + (slots > fan ? slots : fan) + infos + barriers + schedule +
           arrivals;
}

ATTN_DECODE_SIZE attn_decode_smem_bytes(int32_t head_dim, int32_t kv_bytes, int32_t rows,
                                        int32_t tile, int32_t warps, int32_t stages, int32_t levels,
                                        int32_t ahead)
{
    const int32_t groups = tile / ATTN_BOX_KEYS, scorers = groups < warps ? groups : warps;
    const int32_t common =
        attn_decode_common_bytes(tile * head_dim * kv_bytes, rows,
                                 ATTN_DECODE_SLOT_FLOATS(head_dim, rows, warps),
                                 ATTN_DECODE_THREADS(warps), stages, levels, ahead);
    const int32_t fragments =
        kv_bytes == 2 || ATTN_DECODE_Q_IN_REGISTERS(rows, head_dim) ? 16 : 2 * rows * head_dim * 2;
    const int32_t q = fragments + ATTN_DECODE_INFOS(stages) * rows * (head_dim * 2 + 16);
    const int32_t part = groups * rows * (32 + 4) + scorers * rows * 4;
    const int32_t weights = ATTN_DECODE_PARTS(ahead) * part;
    // A number of each unit; what was decided, and its barriers.
    const int32_t decisions =
        ahead > 0 ? 16 + (ATTN_DECODE_INFOS(stages) + ATTN_DECODE_PARTS(ahead)) * 4 +
                        ATTN_DECODE_DECISIONS * (4 + 8)
                  : 0;
    return (common + q + weights + decisions + 15) / 16 * 16;
}

// Where warpgroups multiply; 16-bit types.
ATTN_DECODE_SIZE attn_decode_group_smem_bytes(int32_t head_dim, int32_t rows, int32_t tile,
                                              int32_t stages, int32_t levels)
{
    const int32_t mma_rows = 64, warps = 8;
    const int32_t common = attn_decode_common_bytes(tile * head_dim * 2, rows,
                                                    ATTN_DECODE_GROUP_SLOT_FLOATS(head_dim, rows),
                                                    ATTN_DECODE_THREADS(warps), stages, levels, 0);
    // One unit and one leaf more.
    const int32_t infos = 48 + 8 + 32 + 8;
    // Weights of half a leaf; of each warp largest scores and sums.
    const int32_t exchange = tile / 2 * rows * 2 + warps * (rows / 32) * (32 + 16) * 4;
    return (common + infos + mma_rows * head_dim * 2 + exchange + 15) / 16 * 16;
}

#undef ATTN_DECODE_SIZE

#endif

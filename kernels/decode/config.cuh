/* SPDX-License-Identifier: Apache-2.0 */
// What a row of kernels.conf fixes, and the shared memory of a block.
#pragma once

#include "common/block.cuh"
#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"
#include "decode/decode_params.h"

constexpr int HEAD_DIM = ROW_HEAD_DIM;
constexpr int ROWS = ROW_ROWS;
constexpr int TILE = ROW_TILE;
constexpr int WARPS = ROW_WARPS;
constexpr int STAGES = ROW_STAGES;
// Levels of the merge tree, from the second on, that come and go with every few leaves: what waits
// there has a place in shared memory.
constexpr int LEVELS = ROW_LEVELS;
// Leaves by which K is ahead of V, which is read once it is known that it counts; 0: the kernel has
// no skip-softmax.
#ifndef ROW_AHEAD
#define ROW_AHEAD 0
#endif
constexpr int AHEAD = ROW_AHEAD;
constexpr bool SKIPS = AHEAD > 0;
// Whether two warpgroups multiply, for 32 or 64 query rows; else warps do.
#ifndef ROW_WARPGROUPS
#define ROW_WARPGROUPS 0
#endif
// Of the result a warp has 16 rows, and half of the columns, those of its warpgroup; else all rows,
// some columns.
constexpr bool OWNS_ROWS = ROW_WARPGROUPS > 0;
// Rows of a product, and of a lane's two those that are query rows. Of 32 query rows each warp has 8,
// the first of its 16, so that all have as much to do.
constexpr int MMA_ROWS = OWNS_ROWS ? 64 : ROWS;
constexpr int LANE_ROWS = OWNS_ROWS && ROWS == 32 ? 1 : 2;

// Types as in src/pack.h.
constexpr bool Q_IS_BF16 = ROW_Q == 1;
constexpr bool KV_IS_E4M3 = ROW_KV == 3;
// MMAs take BF16 if everything is BF16. E4M3 is exact in FP16; BF16 queries are, too, once each row
// is scaled by a power of two.
constexpr bool MMA_IS_BF16 = Q_IS_BF16 && !KV_IS_E4M3;
constexpr bool SCALE_Q = Q_IS_BF16 && KV_IS_E4M3;
constexpr int KV_BYTES = KV_IS_E4M3 ? 1 : 2;
// Prefill has keys of the queries' type.
constexpr bool TAKES_CHUNKS = !KV_IS_E4M3 && !SKIPS;

// WARPS warps multiply, the next one copies, the one after it counts arrivals.
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_THREADS =
    OWNS_ROWS ? ATTN_DECODE_GROUP_THREADS(WARPS) : ATTN_DECODE_THREADS(WARPS);
constexpr int BLOCK_WARPS = BLOCK_THREADS / 32;
// Those that count pieces, each some of them: not those that only lend their registers.
constexpr int COUNT_THREADS = ATTN_DECODE_THREADS(WARPS), COUNT_WARPS = COUNT_THREADS / 32;
constexpr int DIM_STEPS = HEAD_DIM / 16;
// What a lane has of a block of the merge tree: of row blocks some steps, four values each. Columns
// of a step; those of a warp are from step warp * STEPS on, and a warp beyond has none; where a
// warp has rows, from step warpgroup * STEPS on.
constexpr int ROW_BLOCKS = OWNS_ROWS ? 1 : ROWS / 8;
constexpr int STEP_COLUMNS = OWNS_ROWS ? 8 : 16;
constexpr int STEPS = OWNS_ROWS ? HEAD_DIM / 16 : DIM_STEPS > WARPS ? DIM_STEPS / WARPS : 1;
// Keys of a tile go through the MMAs in groups. A warp has groups warp, warp + WARPS, ...
constexpr int GROUP = ATTN_BOX_KEYS;
constexpr int GROUPS = TILE / GROUP;
constexpr int OWN_GROUPS = GROUPS > WARPS ? GROUPS / WARPS : 1;
// Warps that have scores.
constexpr int SCORERS = GROUPS < WARPS ? GROUPS : WARPS;
// Words of a bit for each key of a tile; keys of a tile that one lane looks up.
constexpr int WORDS = TILE / 32;
// Bytes and 16-byte pieces of a key's row; bytes of a group, of a tile.
constexpr int ROW_BYTES = HEAD_DIM * KV_BYTES;
constexpr int PIECES = ROW_BYTES / 16;
constexpr int GROUP_BYTES = GROUP * ROW_BYTES;
constexpr int TILE_BYTES = TILE * ROW_BYTES;
// Rows lie in lines of at most 128 bytes: a group, or where a warp has rows a tile, is all first
// lines, then all second ones, ...
constexpr int LINES_KEYS = OWNS_ROWS ? TILE : GROUP;
constexpr int LINE_BYTES = ROW_BYTES < 128 ? ROW_BYTES : 128;
constexpr int LINE_PIECES = LINE_BYTES / 16;
constexpr int LINES = ROW_BYTES / LINE_BYTES;
// Bytes from line to line of a row, from group to group.
constexpr int LINE_STEP = LINES_KEYS * LINE_BYTES;
constexpr int GROUP_STEP = OWNS_ROWS ? GROUP * LINE_BYTES : GROUP_BYTES;
// Queries stay in registers where there is room for them and the sums.
constexpr bool Q_IN_REGISTERS = !OWNS_ROWS && ATTN_DECODE_Q_IN_REGISTERS(ROWS, HEAD_DIM);
// E4M3: else they are brought into order once.
constexpr bool KEEPS_Q = !Q_IN_REGISTERS && KV_IS_E4M3;
// Registers of a thread, at most. Warps are dealt to four parts of an SM, of 16,384 each.
constexpr int MOST_REGISTERS = 512 / ((ROW_PER_SM * BLOCK_WARPS + 3) / 4);
// Where warpgroups multiply, those of a thread that does and of one that does not: of two
// warpgroups and one.
constexpr int MULTIPLY_REGISTERS = 192, COPY_REGISTERS = 120;
// Bytes from row to row of q: the 8 rows of a fragment lie in different banks. Where a warp has
// rows they lie in lines, as keys do.
constexpr int Q_PITCH = HEAD_DIM * 2 + 16;
// Slots, of which a block of the merge tree takes one: [warp][step][row block][lane] of o, then
// [warp][row block][row pair] of m and l; float4 each. Nobody reads what another warp has written.
constexpr int SLOT_FLOATS = OWNS_ROWS ? ATTN_DECODE_GROUP_SLOT_FLOATS(HEAD_DIM, ROWS)
                                      : ATTN_DECODE_SLOT_FLOATS(HEAD_DIM, ROWS, WARPS);
// Roots that meet in one place: one a lane, of the first lanes.
constexpr int FAN_LOG = ATTN_DECODE_FAN_LOG(HEAD_DIM, ROWS);
constexpr int FAN = 1 << FAN_LOG;

// Weights are 2^(score - m - SHIFT). BF16: a sum of 2^16 values of V stays finite, however large
// they are. FP16: small weights stay clear of the subnormals.
constexpr float SHIFT = MMA_IS_BF16 ? 16.0f : -14.0f;

// How the leaves of all pieces are dealt: in units of 2^shift leaves, those of pieces from first_late
// on of 2^late_shift.
struct deal {
    // Units of all lanes; more than there are blocks: blocks ask for more once they are done.
    int32_t total;
    int32_t first_late;
    // shift, and 32 * late_shift: a register for both.
    int32_t shifts;
};

// A unit, as the copying warp tells the others.
struct alignas(16) unit_info {
    // Its leaves [first, end).
    uint32_t first, end;
    int32_t sequence;
    // Negative: there are no more units.
    int32_t lane;
    // Its piece, and of that units first_unit .. last_unit, of which this is `unit`; where the root
    // of the first one is, and from there on each other `lanes` further.
    int32_t piece;
    int32_t unit, first_unit, last_unit;
    int32_t slot, lanes;
    // The sequence's query tokens, and the first of them among those of all.
    int32_t q_len;
    uint32_t first_token;
};

// An arrival: one of `count` at a counter. The null pointer: there will be no more.
struct alignas(16) mail {
    int32_t *g_counter;
    int32_t count;
    // The answer: it was the last.
    int32_t is_last;
};

// Of the tree over 2^LOG roots, what each node multiplies its left and its right half with, of each
// row; and m and l of all of them.
template <int LOG> struct alignas(16) tree_weights {
    float2 node[(1 << LOG) - 1][ROWS];
    float2 ml[ROWS];

    // The first node of a level, the lowest of which merges two roots.
    static __device__ __forceinline__ constexpr int first_node(int level)
    {
        return (1 << LOG) - (1 << LOG >> level);
    }
};

using fan_weights = tree_weights<FAN_LOG>;

// Roots of a lane that are merged together, at most: where blocks have them at the same time, as many
// as there are steps of columns or more, these merge a step each.
constexpr int TOGETHER_LOG = 5, TOGETHER = 1 << TOGETHER_LOG;

// Besides these, of a step what each warp's part comes to; steps that this block is to merge.
struct alignas(16) together_weights : tree_weights<TOGETHER_LOG> {
    float4 part[WARPS][ROW_BLOCKS][32];
    uint32_t steps;
};

constexpr bool MERGES_TOGETHER = !SKIPS && !OWNS_ROWS && HEAD_DIM >= 64 && HEAD_DIM <= 256;
// By then no tile is in the ring, and they lie there.
static_assert(!MERGES_TOGETHER || sizeof(together_weights) <= STAGES * TILE_BYTES,
              "the ring has room");

// Query tokens at most: draft keys have bits in so many words.
constexpr int DRAFT_WORDS = 4;

// Which keys of a leaf are attended.
struct alignas(16) visible_keys {
    // By any row of the sequence.
    uint32_t bits[4];
    // All of them are set; rows differ in what they attend.
    int32_t are_whole, are_mixed;
    // Its first key counted from the first draft key.
    int32_t draft;
};

// Units, and leaves, that are known at the same time: those in the ring, and one more; where warps
// have rows, which free a tile as soon as they have read it, the one before them, too.
constexpr int INFOS = ATTN_DECODE_INFOS(STAGES) + OWNS_ROWS;
constexpr int LEAF_INFOS = ATTN_DECODE_LEAF_INFOS(STAGES, AHEAD) + OWNS_ROWS;
// Leaves of a block of skip-softmax; decisions that may wait to be read.
constexpr int SKIP_LEAVES = ATTN_DECODE_SKIP_KEYS / TILE;
constexpr int DECISIONS = ATTN_DECODE_DECISIONS;

// What K of a leaf gives: MMA fragments of the weights; of each warp's keys the largest score, of
// each group the sum of weights, of each row, two rows together.
struct alignas(16) leaf_part {
    uint2 p[GROUPS][ROW_BLOCKS][32];
    alignas(16) float2 max[ROWS / 2][SCORERS];
    alignas(16) float2 sum[ROWS / 2][GROUPS];
};

// Leaves whose parts are there at the same time.
constexpr int PARTS = ATTN_DECODE_PARTS(AHEAD);

struct smem {
    // Tiles in turn: of a leaf K, then V.
    unsigned char ring[STAGES][TILE_BYTES];
    // Queries: [INFOS][ROWS][Q_PITCH] of the units told; where a warp has rows, of this unit, in
    // lines.
    alignas(16) unsigned char q_bytes[OWNS_ROWS ? MMA_ROWS * ROW_BYTES : INFOS * ROWS * Q_PITCH];
    // Between units the levels are empty.
    union {
        alignas(16) float levels[LEVELS > 0 ? LEVELS : 1][LEVELS > 0 ? SLOT_FLOATS : 4];
        fan_weights fan;
    };
    // Draft keys that are seen, of two units.
    uint32_t seen[2][DRAFT_WORDS];
    unit_info units_told[INFOS];
    visible_keys visible[LEAF_INFOS];
    // Of the arrival that was posted last, and of the one before: the unit.
    unit_info posted_units[2];
    mail post;
    // One for each place in the ring: it is there; it was read. One for each place in units_told.
    // There is mail; it is answered. For the second warp that copies, one for each place in visible.
    uint64_t full[STAGES], empty[STAGES], told[INFOS], posted, answered;
    uint64_t seen_leaf[SKIPS ? 1 : LEAF_INFOS];
    // Units before the pieces of thread i, and roots. Its length if it has one piece.
    int32_t units[COUNT_THREADS], slots[COUNT_THREADS], lens[COUNT_THREADS];
    int32_t warp_sum[COUNT_WARPS][2];
    deal dealt;
};

// Of a lane, the weights of a group of keys: of its rows the first two keys, then those 8 further.
struct alignas(LANE_ROWS * 8) told_weights {
    uint32_t pair[2 * LANE_ROWS];
};

// What the two warps that have the same rows tell each other of a leaf, where a warp has rows: each
// its weights, one after the other in the same place; the largest scores of its keys, for each of a
// lane's rows; the sums of weights, of as many pairs of groups as it has, a pair of lanes each.
struct group_smem : smem {
    told_weights p[WARPS / 2][GROUPS / 2][32];
    alignas(16) float max[WARPS][LANE_ROWS][32], sum[WARPS][LANE_ROWS][16];
};

// What else there is where warps share rows.
struct shared_smem : smem {
    // MMA fragments of the queries, of this unit and of the one before: [row block][step][lane].
    alignas(16) uint2 q[KEEPS_Q ? 2 : 1][KEEPS_Q ? ROW_BLOCKS * DIM_STEPS * 32 : 1];
    leaf_part parts[PARTS];
};

// And where blocks may be left out.
struct skip_smem : shared_smem {
    // Of the units told: S / len, or 0 where nothing may be left out.
    float lambda[INFOS];
    // Whether a block is left out, for the copying warp. Barriers: that was decided.
    int32_t is_dropped[DECISIONS];
    uint64_t decided[DECISIONS];
    // The same for the others, of the leaves in `parts`.
    int32_t is_part_dropped[PARTS];
};

constexpr int SMEM_BYTES =
    OWNS_ROWS
        ? attn_decode_group_smem_bytes(HEAD_DIM, ROWS, TILE, STAGES, LEVELS)
        : attn_decode_smem_bytes(HEAD_DIM, KV_BYTES, ROWS, TILE, WARPS, STAGES, LEVELS, AHEAD);
constexpr int USED_BYTES = OWNS_ROWS ? sizeof(group_smem)
                           : SKIPS   ? sizeof(skip_smem)
                                     : sizeof(shared_smem);

static_assert(ROWS % 8 == 0, "query rows come in MMA columns of 8");
static_assert(TILE % 32 == 0 && TILE <= 128 && (TILE & (TILE - 1)) == 0,
              "visible_keys has the bits");
static_assert((WARPS & (WARPS - 1)) == 0, "groups and steps are dealt evenly");
static_assert(FAN <= 32 && FAN_LOG >= ATTN_DECODE_LEAST_FAN_LOG &&
                  FAN_LOG <= ATTN_DECODE_MOST_FAN_LOG,
              "a lane has a root");
static_assert(LEVELS >= 0 && SCORERS % 2 == 0, "see smem");
static_assert(STAGES >= 2, "a leaf is in the ring as a whole");
static_assert(HEAD_DIM % 32 == 0, "an ldmatrix takes two pieces");
static_assert(!SKIPS || AHEAD >= SKIP_LEAVES - 1, "a block is decided on before its V is due");
static_assert(AHEAD / SKIP_LEAVES + 2 <= DECISIONS, "no decision is forgotten before it is read");
static_assert(USED_BYTES <= SMEM_BYTES, "the host asks for what the kernel uses");
static_assert(SMEM_BYTES <= ATTN_SMEM_PER_BLOCK, "the chip's shared memory holds a block's");

static __device__ __forceinline__ unsigned char (&q_rows(smem &s, int slot))[ROWS][Q_PITCH]
{
    return reinterpret_cast<unsigned char(*)[ROWS][Q_PITCH]>(s.q_bytes)[slot];
}

// Pieces of a line lie in swizzled order, piece ^ swizzle(row), as boxes are copied: so the 8 rows
// of an ldmatrix lie in different banks.
static __device__ __forceinline__ constexpr int swizzle(int row)
{
    return LINE_PIECES == 8 ? row & 7 : LINE_PIECES == 4 ? row >> 1 & 3 : row >> 2 & 1;
}

// Where a piece of a row lies in its group, or tile.
static __device__ __forceinline__ constexpr int piece_offset(int row, int piece)
{
    return piece / LINE_PIECES * LINE_STEP + row * LINE_BYTES +
           (piece % LINE_PIECES ^ swizzle(row)) * 16;
}

static __device__ __forceinline__ void report_fault(const attn_decode_args &args, int32_t sequence)
{
    if (args.fault) atomicMin(args.fault, sequence);
}

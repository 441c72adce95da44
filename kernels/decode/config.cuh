/* SPDX-License-Identifier: Apache-2.0 */
// What a row of kernels.conf fixes, and the shared memory of a block.
#pragma once

#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"
#include "decode/decode_params.h"

constexpr int HEAD_DIM = ROW_HEAD_DIM;
constexpr int ROWS = ROW_ROWS;
constexpr int TILE = ROW_TILE;
constexpr int WARPS = ROW_WARPS;
constexpr int STAGES = ROW_STAGES;

// Types as in src/pack.h.
constexpr bool Q_IS_BF16 = ROW_Q == 1;
constexpr bool KV_IS_E4M3 = ROW_KV == 3;
// MMAs take BF16 if everything is BF16. E4M3 is exact in FP16; BF16 queries are, too, once each row
// is scaled by a power of two.
constexpr bool MMA_IS_BF16 = Q_IS_BF16 && !KV_IS_E4M3;
constexpr bool SCALE_Q = Q_IS_BF16 && KV_IS_E4M3;
constexpr int KV_BYTES = KV_IS_E4M3 ? 1 : 2;

constexpr int THREADS = WARPS * 32;
constexpr int ROW_BLOCKS = ROWS / 8;
constexpr int DIM_STEPS = HEAD_DIM / 16;
// Keys of a leaf go through the MMAs in groups.
constexpr int GROUP = ATTN_DECODE_GROUP;
constexpr int GROUPS = TILE / GROUP;
// Parts of a leaf: groups of K, then groups of V.
constexpr int PARTS = 2 * GROUPS;
// Keys of a leaf that one lane looks up.
constexpr int LANE_KEYS = TILE / 32;
// Bytes and 16-byte pieces of a key's row, and bytes of a group.
constexpr int ROW_BYTES = HEAD_DIM * KV_BYTES;
constexpr int PIECES = ROW_BYTES / 16;
constexpr int GROUP_BYTES = GROUP * ROW_BYTES;
// Rows that a warp copies at once, and copies of a lane for each of them.
constexpr int ROW_LANES = PIECES < 32 ? PIECES : 32;
constexpr int ROWS_AT_ONCE = 32 / ROW_LANES;
constexpr int ROW_COPIES = PIECES / ROW_LANES;
// Rows lie in lines of at most 128 bytes: a group is all first lines, then all second ones, ...
constexpr int LINE_BYTES = ROW_BYTES < 128 ? ROW_BYTES : 128;
constexpr int LINE_PIECES = LINE_BYTES / 16;
// Queries stay in registers where there is room for them and the sums.
constexpr bool Q_IN_REGISTERS = ROWS * HEAD_DIM <= (ROWS == 8 ? 2048 : 1024);
// A left half of the lowest level of the merge tree waits in shared memory where there is room.
constexpr bool LEVEL_0_IN_SHARED = ROWS == 8 && HEAD_DIM <= 256;

constexpr int SLOT_FLOATS = ROWS * (HEAD_DIM + 2);

// ---- merging of roots, see gather.cuh. An entry: o, m and l of a root, as far as a warp has them

constexpr int ML_BYTES = ROW_BLOCKS * 4 * 16;
constexpr int LIST_BYTES = 33 * 16;

static constexpr int steps_in(int passes)
{
    return (DIM_STEPS - 1) / (WARPS * passes) + 1;
}

static constexpr int working_in(int passes)
{
    return (DIM_STEPS - 1) / (steps_in(passes) * passes) + 1;
}

// What of the ring a warp gets.
static constexpr int pool_bytes(int passes)
{
    return STAGES * GROUP_BYTES * WARPS / working_in(passes) / 128 * 128;
}

static constexpr int entry_bytes(int passes)
{
    return steps_in(passes) * ROW_BLOCKS * 32 * 16 + ML_BYTES;
}

static constexpr int entries_in(int passes)
{
    const int entries = (pool_bytes(passes) - LIST_BYTES) / entry_bytes(passes);
    return entries < 32 ? entries : 32;
}

// Columns are gone through in passes if the ring would hold too few roots. What cannot be merged
// yet are, of 2^n units, n + 1 roots at most: 512 blocks of 16 warps have fewer than 2^18.
static constexpr int count_passes()
{
    int passes = 1;
    while (entries_in(passes) < 22 && passes < DIM_STEPS) passes++;
    return passes;
}

constexpr int PASSES = count_passes();
constexpr int SHARE_STEPS = steps_in(PASSES);
constexpr int WORKING = working_in(PASSES);
constexpr int POOL_BYTES = pool_bytes(PASSES);
constexpr int ENTRY_BYTES = entry_bytes(PASSES);
constexpr int ROOTS = entries_in(PASSES);

static_assert(ROOTS >= 22, "the ring holds what waits, and more");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// Weights are 2^(score - m - SHIFT). BF16: a sum of 2^16 values of V stays finite, however large
// they are. FP16: small weights stay clear of the subnormals.
constexpr float SHIFT = MMA_IS_BF16 ? 16.0f : -14.0f;

// Where a run begins or ends: before leaf `leaf` of piece `piece`. Of the piece: the sum of counts
// before it, and its own.
struct cut {
    int32_t piece;
    uint32_t leaf;
    int32_t before, count;
    // Whether the piece has leaves on both sides.
    bool is_inside;
};

// How units are dealt: the first `rest` block runs have size + 1, the others `size`; a block run
// goes in equal parts to `warps` warps.
struct deal {
    int32_t total;
    int32_t size, rest;
    int32_t warps;
    // log2 of the units of a warp's run.
    int32_t run_log;
};

// Much of what follows could be in registers, but those have better uses.
struct smem {
    // Of each warp the parts of leaves in turn: groups of K, then groups of V. While roots are
    // merged, they lie here.
    unsigned char ring[WARPS][STAGES][GROUP_BYTES];
    // MMA fragments of the queries: [row block][step][lane].
    alignas(
        16) uint2 q[Q_IN_REGISTERS ? 1 : WARPS][Q_IN_REGISTERS ? 1 : ROW_BLOCKS * DIM_STEPS * 32];
    alignas(16) float level_0[LEVEL_0_IN_SHARED ? WARPS : 1][LEVEL_0_IN_SHARED ? SLOT_FLOATS : 4];
    // One for each place in the ring: it is there.
    uint64_t full[WARPS][STAGES];
    // Units before the pieces of thread i; of all pieces.
    int32_t prefix[THREADS];
    int32_t warp_sum[WARPS];
    deal dealt;
    // Where the warps' runs begin and end.
    cut cuts[WARPS][2];
    int32_t arrived;
};

// Where a warp is in its ring: which place is next, and the phase of its barrier.
struct ring_place {
    int32_t slot;
    uint32_t phase;

    __device__ __forceinline__ void next()
    {
        slot++;
        if (slot < STAGES) return;
        slot = 0;
        phase ^= 1;
    }
};

static_assert(ROWS % 8 == 0, "query rows come in MMA columns of 8");
static_assert(TILE % 32 == 0 && (TILE & (TILE - 1)) == 0, "a leaf is a power of two, whole words");
static_assert(STAGES >= 2 && STAGES <= PARTS, "a warp has at most a leaf in flight");
static_assert(HEAD_DIM % 32 == 0, "an ldmatrix takes two pieces");
static_assert(sizeof(smem) == attn_decode_smem_bytes(HEAD_DIM, KV_BYTES, ROWS, WARPS, STAGES),
              "the host asks for what the kernel uses");
static_assert(sizeof(smem) <= ATTN_SMEM_PER_BLOCK, "the chip's shared memory holds a block's");

static __device__ __forceinline__ int lane_id()
{
    return threadIdx.x % 32;
}

// The same for rare work: what is made of it is not kept in registers while something else runs.
static __device__ __forceinline__ int rare_lane_id()
{
    return opaque(threadIdx.x % 32);
}

static __device__ __forceinline__ int warp_id()
{
    return threadIdx.x / 32;
}

// Pieces of a line lie in swizzled order, piece ^ swizzle(row), as boxes are copied: so the 8 rows
// of an ldmatrix lie in different banks.
static __device__ __forceinline__ constexpr int swizzle(int row)
{
    return LINE_PIECES == 8 ? row & 7 : LINE_PIECES == 4 ? row >> 1 & 3 : row >> 2 & 1;
}

// Where a piece of a row lies in its group.
static __device__ __forceinline__ constexpr int piece_offset(int row, int piece)
{
    return (piece / LINE_PIECES * GROUP + row) * LINE_BYTES +
           (piece % LINE_PIECES ^ swizzle(row)) * 16;
}

static __device__ __forceinline__ float finite_or_zero(float m)
{
    return m == -INFINITY ? 0.0f : m;
}

static __device__ __forceinline__ void report_fault(const attn_decode_args &args, int32_t sequence)
{
    if (args.fault) atomicMin(args.fault, sequence);
}

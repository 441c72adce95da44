/* SPDX-License-Identifier: Apache-2.0 */
// What a row of kernels.conf fixes, and small things that all prefill kernels share.
#pragma once

#include "common/block.cuh"
#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "prefill/prefill_params.h"

constexpr int HEAD_DIM = ROW_HEAD_DIM;
// Query tokens of a block, and of a part of it for which all that is decided for several rows at
// once is decided: the blocks of the originals.
constexpr int ROWS = ROW_ROWS;
constexpr int PART_ROWS = ATTN_PREFILL_ROWS;
constexpr int TILE = ROW_TILE;
// WARPS warps multiply, the next COPIERS copy.
constexpr int WARPS = ROW_WARPS;
constexpr int COPIERS = ROW_COPIERS;
constexpr int STAGES = ROW_STAGES;
// Warpgroups that multiply; 0: warps do.
#ifndef ROW_WARPGROUPS
#define ROW_WARPGROUPS 0
#endif

// Types as in src/pack.h.
constexpr bool IS_BF16 = ROW_Q == 1;

constexpr int BLOCK_THREADS = ATTN_PREFILL_THREADS(WARPS, COPIERS);
// Keys of a tile are copied in groups, each in one page.
constexpr int GROUP = ATTN_BOX_KEYS;
constexpr int GROUPS = TILE / GROUP;
// Words of a bit for each key of a tile.
constexpr int WORDS = (TILE + 31) / 32;
// Bytes, and 16-byte pieces, of a row of Q, K, V or O; it lies in lines of LINE_BYTES.
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PIECES = ROW_BYTES / 16;
constexpr int LINE_BYTES = 128;
constexpr int LINE_PIECES = LINE_BYTES / 16;
constexpr int GROUP_BYTES = GROUP * ROW_BYTES;
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int SMEM_BYTES =
    attn_prefill_smem_bytes(HEAD_DIM, ROWS, TILE, WARPS, ROW_WARPGROUPS, STAGES);

// Weights are 2^(score - m - SHIFT). BF16: a sum of 2^16 values of V stays finite, however large
// they are. FP16: small weights stay clear of the subnormals.
constexpr float SHIFT = IS_BF16 ? 16.0f : -14.0f;

static_assert(ROWS % PART_ROWS == 0, "a block is some of the originals' next to each other");
static_assert(TILE % GROUP == 0 && TILE <= 128, "a tile is some groups; see tile_keys");
static_assert(HEAD_DIM % 64 == 0, "rows are whole lines");
static_assert(SMEM_BYTES <= ATTN_SMEM_PER_BLOCK, "the chip's shared memory holds a block's");

// Where a piece of a row lies in a group of GROUP rows: all first lines, then all second ones, ...
// Pieces of a line lie in swizzled order, as boxes are copied: so the 8 rows of an ldmatrix lie in
// different banks.
static __device__ __forceinline__ constexpr int piece_offset(int row, int piece)
{
    return (piece / LINE_PIECES * GROUP + row) * LINE_BYTES +
           (piece % LINE_PIECES ^ (row & 7)) * 16;
}

static __device__ __forceinline__ void report_fault(const attn_prefill_args &args, int32_t sequence)
{
    if (args.fault) atomicMin(args.fault, sequence);
}

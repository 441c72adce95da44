/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode: o = softmax(scale * q k^T) v for one query token of each sequence.
//
// The arithmetic, which no schedule changes: keys are cut into leaves of TILE keys at absolute
// multiples of TILE. A leaf gives its largest score m, the sum l of 2^(score - m), and the weighted
// sum o of V. Leaves are merged by the binary tree of aligned power-of-two blocks of leaf indices;
// a block without attended keys is left out. Scores are kept in units of log2.
//
// Who gets what: the leaves of all sequences, in a row, are cut into `runs` equal runs, wherever
// that may be; a block takes one run of one lane (KV head, group of ROWS query rows). Lanes run
// fastest: whoever reads the same tokens runs at the same time. Of a sequence that ends up in
// several runs, each block writes down the few aligned blocks of the tree that it has in full (its
// roots), and the block that arrives last merges those of all runs. Nobody waits for another block.
//
// Within a block: it walks the keys of a run, a leaf at a time. For S^T = K Q^T a warp takes 16
// keys; for O^T = V^T P^T it takes HEAD_DIM / WARPS columns of V, over all keys of the leaf: so
// each thread holds its part of o for good, and merging two blocks of the tree needs no other
// thread. What warps exchange is the largest score and P, through shared memory.
//
// Step t of a block, with two barriers:
//   A   largest scores of leaf t are visible; K(t) and V(t - 1) are read: their places in the ring are free
//       fetch(...)      start loading two tiles into them
//       weigh           P(t) from the scores, into shared memory
//   B   P(t) is visible, V(t) and K(t + 1) have arrived
//       accumulate      o(t) = V(t)^T P(t)^T
//       score           scores of leaf t + 1
//       merge           o(t) into the tree
//
// Bound by memory: every K and V byte is read once. 64 sequences of 8192 keys, 8 KV heads, HEAD_DIM
// 128 are 2.15 GB, 0.45 ms at 4.8 TB/s; arithmetic is two 16-bit MMAs of 8 columns a 16x16 block of
// K or V.
//
// Shared memory: ring of STAGES tiles (K(0), V(0), K(1), V(1), ... in turn; rows padded by 16
// bytes, so that the 8 rows of an ldmatrix lie in different banks), P, the row offsets of the tiles
// to come, which of their keys are attended, one float a warp and row for reductions, and what
// finds the run. While roots are merged they lie in the ring.

#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"
#include "decode/decode_params.h"

constexpr int HEAD_DIM = ROW_HEAD_DIM;
constexpr int ROWS = ROW_ROWS;
constexpr int TILE = ROW_TILE;
constexpr int WARPS = ROW_WARPS;
constexpr int STAGES = ROW_STAGES;

constexpr int THREADS = WARPS * 32;
constexpr int ROW_BLOCKS = ROWS / 8;
constexpr int SCORE_WARPS = TILE / 16 < WARPS ? TILE / 16 : WARPS;
constexpr int SCORE_GROUPS = TILE / 16 / SCORE_WARPS;
constexpr int DIM_BLOCKS = HEAD_DIM / 16 / WARPS;
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int KEY_STEPS = TILE / 16;
constexpr int PITCH = HEAD_DIM + 8;
constexpr int P_PITCH = TILE + 8;
// 16-byte pieces of a key and of a 128-byte line, and keys that the block loads at once.
constexpr int PIECES = HEAD_DIM / 8;
constexpr int LINE_PIECES = PIECES < 8 ? PIECES : 8;
constexpr int KEYS_AT_ONCE = THREADS / LINE_PIECES;
// Row offsets are ready this many leaves ahead of the one that is scored.
constexpr int LEAD = STAGES / 2;
constexpr int OFFSET_BUFFERS = 4;
constexpr int VISIBLE_BUFFERS = 8;
// Levels of the tree that stay in registers: a third one where there is room.
constexpr int LEVELS = ATTN_DECODE_REGISTER_LEVELS + (DIM_BLOCKS * ROW_BLOCKS < 4 ? 1 : 0);
// Of a block of the tree, as the threads hold it.
constexpr int LEVEL_FLOATS = HEAD_DIM * ROWS + THREADS * ROW_BLOCKS * 4;
constexpr int LEVEL_PIECES = DIM_BLOCKS * ROW_BLOCKS + ROW_BLOCKS;
// Roots that the ring holds at once.
constexpr int RING_ROOTS = STAGES * TILE * PITCH * 2 / (LEVEL_FLOATS * 4);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// Weights are 2^(score - m - SHIFT): so a sum of 2^16 values of V stays finite, however large they
// are.
constexpr float SHIFT = 16.0f;

// The leaves of all sequences in a row, and the runs they are cut into, between units: 2^shift
// leaves at absolute multiples, so that a run holds few aligned blocks of the tree. A sequence
// without keys counts as one unit: every sequence is some run's. The first `rest` runs have size +
// 1 units, the others `size`.
struct units {
    int32_t total, runs, shift;
    int32_t size, rest;
};

struct smem {
    uint16_t ring[STAGES][TILE][PITCH];
    uint16_t p[ROWS][P_PITCH];
    // Offsets of the K and the V row of each key, in bytes from the head's base; negative: not
    // loaded.
    int64_t offset[OFFSET_BUFFERS][TILE][2];
    uint32_t visible[VISIBLE_BUFFERS][TILE / 32];
    float reduce[2][WARPS][ROWS];
    int32_t scan[WARPS];
    units all;
    int32_t found_sequence, found_unit, arrived;
};

static_assert(ROWS % 8 == 0, "query rows come in MMA columns of 8");
static_assert(TILE % 32 == 0 && (TILE & (TILE - 1)) == 0,
              "a leaf is a power of two, whole ballot words");
static_assert(TILE <= THREADS, "one thread looks up each key of a tile");
static_assert(HEAD_DIM % (16 * WARPS) == 0, "each warp owns whole 16-column blocks of V");
static_assert(KEY_STEPS % SCORE_WARPS == 0, "each scoring warp owns whole 16-key groups");
static_assert(PIECES % LINE_PIECES == 0 && TILE % KEYS_AT_ONCE == 0,
              "a tile loads in whole rounds");
static_assert(STAGES >= 4, "fewer tiles leave nothing in flight while a leaf is scored");
static_assert(LEAD + 2 <= VISIBLE_BUFFERS, "attended bits live from lookup to scoring");
static_assert(RING_ROOTS >= 1, "the ring holds a root");
static_assert(LEVELS == 2 || LEVELS == 3, "struct tree spells the register levels out");

static_assert(sizeof(smem) <= ATTN_SMEM_PER_BLOCK, "the chip's shared memory holds a block's");

// A block of the merge tree, as one thread holds it: columns 2t and 2t + 1 of each 8 rows.
struct block {
    float o[DIM_BLOCKS][ROW_BLOCKS][4];
    float m[ROW_BLOCKS][2];
    float l[ROW_BLOCKS][2];
};

// Pending left halves of the merge tree; bit i of `present`: level i holds one. The first levels are
// fields of their own, since an array would be moved to local memory.
struct tree {
    block level_0, level_1, level_2;
    uint32_t present;
    float *g_stack;
};

// What a block of threads works on: some leaves of one sequence.
struct work {
    // K and V of the head.
    const unsigned char *g_k, *g_v;
    const int32_t *g_table;
    int32_t sequence;
    // Attended keys, and the leaves that hold them: [first, end).
    int32_t start, len;
    uint32_t first, end;
    // The leaves of this block: first_leaf and how many.
    int32_t first_leaf, num_leaves;
    // Multiplies q . k: in units of log2 without a softcap, natural with one.
    float scale;
    // 1 / softcap.
    float inverse_cap;
};

static __device__ __forceinline__ float finite_or_zero(float m)
{
    return m == -INFINITY ? 0.0f : m;
}

static __device__ __forceinline__ void report_fault(const attn_decode_args &args, int32_t sequence)
{
    if (args.fault) atomicMin(args.fault, sequence);
}

// ---- lookup: block table -> row offsets

// Leaves looked up beyond the last one may wrap; the callers' bounds tell them apart.
static __device__ __forceinline__ int32_t key_of_thread(const work &w, int leaf)
{
    return (int32_t) ((uint32_t) (w.first_leaf + leaf) * TILE + threadIdx.x);
}

// Where this thread's key of a leaf lies: its table entry, and its place in the page.
struct place {
    int32_t page, slot;
};

static __device__ __forceinline__ bool is_attended(const work &w, int leaf, int32_t key)
{
    return threadIdx.x < TILE && leaf < w.num_leaves && key >= w.start && key < w.len;
}

// Page -1 for keys that are not attended: their table entries are not looked at.
static __device__ __forceinline__ place lookup(const attn_decode_args &args, const work &w,
                                               int leaf)
{
    const int32_t key = key_of_thread(w, leaf);
    place at = { -1, 0 };
    if (is_attended(w, leaf, key)) {
        const uint32_t index = attn_decode_divide(key, args.page_magic, args.page_shift);
        at.page = __ldg(w.g_table + index);
        at.slot = key - index * args.page_size;
    }
    return at;
}

// Turns the place into offsets and the attended bit, where the block's loads and scores find them.
static __device__ __forceinline__ void publish(const attn_decode_args &args, const work &w, smem &s,
                                               int leaf, place at)
{
    if (threadIdx.x >= TILE || leaf >= w.num_leaves) return;

    const bool attended = is_attended(w, leaf, key_of_thread(w, leaf));
    const bool valid = attended && at.page >= 0 && at.page < args.num_pages;
    int64_t *const s_offset = s.offset[leaf % OFFSET_BUFFERS][threadIdx.x];
    s_offset[0] = valid ? (at.page * args.k_page_stride + at.slot * args.k_token_stride) * 2 : -1;
    s_offset[1] = valid ? (at.page * args.v_page_stride + at.slot * args.v_token_stride) * 2 : -1;

    const uint32_t bits = __ballot_sync(~0u, valid);
    if (threadIdx.x % 32 == 0) s.visible[leaf % VISIBLE_BUFFERS][threadIdx.x / 32] = bits;
    if (attended && !valid) report_fault(args, w.sequence);
}

// ---- fetch: tile number `half` of K(0), V(0), K(1), ... into the ring, as one group of copies

static __device__ __forceinline__ void fetch(const work &w, smem &s, int half)
{
    const int leaf = half / 2;
    const int is_v = half % 2;
    if (leaf < w.num_leaves) {
        // Eight threads copy a 128-byte line of a key, then the key's next line.
        const int piece = threadIdx.x % LINE_PIECES;
        const int first = threadIdx.x / LINE_PIECES;
        const unsigned char *const g_piece = (is_v ? w.g_v : w.g_k) + piece * 16;
        const int64_t *const s_offset = &s.offset[leaf % OFFSET_BUFFERS][first][is_v];
        const uint32_t s_tile = shared_address(&s.ring[half % STAGES][first][piece * 8]);
#pragma unroll
        for (int i = 0; i < TILE / KEYS_AT_ONCE; i++) {
            // Of a negative offset nothing is read.
            const int64_t offset = s_offset[i * KEYS_AT_ONCE * 2];
            const uint32_t bytes = (int32_t) (offset >> 32) < 0 ? 0 : 16;
            const unsigned char *const g_row = g_piece + offset;
            const uint32_t s_row = s_tile + i * KEYS_AT_ONCE * PITCH * 2;
#pragma unroll
            for (int line = 0; line < PIECES / LINE_PIECES; line++)
                cp_async_16(s_row + line * LINE_PIECES * 16, g_row + line * LINE_PIECES * 16,
                            bytes);
        }
    }
    cp_async_commit();
}

// ---- score: S^T = K Q^T of this warp's keys, and their largest

static __device__ __forceinline__ float cap_score(float x, float cap, float inverse_cap)
{
    // tanh by exp, but by its series near 0, where 1 - 2 / (e^2y + 1) would cancel.
    const float y = x * inverse_cap;
    const float z = y * y;
    const float series =
        y * (1.0f + z * (-1.0f / 3 + z * (2.0f / 15 + z * (-17.0f / 315 + z * (62.0f / 2835)))));
    const float large = 1.0f - __fdiv_rn(2.0f, ex2(2.0f * LOG2_E * y) + 1.0f);
    return cap * (fabsf(y) < 0.25f ? series : large);
}

using scores = float[SCORE_GROUPS][ROW_BLOCKS][4];

static __device__ __forceinline__ void multiply_k(const uint32_t (&r_q)[ROW_BLOCKS][DIM_STEPS][2],
                                                  uint32_t s_keys, float (&sum)[ROW_BLOCKS][4])
{
    // Two chains of MMAs, even and odd steps, halve the latency.
    float odd[ROW_BLOCKS][4] = {};
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        uint32_t k[4];
        ldmatrix_x4(k, s_keys + step * 32);
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
            mma_bf16(step % 2 ? odd[n] : sum[n], k, r_q[n][step][0], r_q[n][step][1]);
    }
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
        for (int i = 0; i < 4; i++) sum[n][i] += odd[n][i];
}

static __device__ __forceinline__ void score(const attn_decode_args &args, const work &w, smem &s,
                                             int leaf,
                                             const uint32_t (&r_q)[ROW_BLOCKS][DIM_STEPS][2],
                                             scores &r_s)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= SCORE_WARPS || leaf >= w.num_leaves) return;

    float largest[ROW_BLOCKS][2];
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) largest[n][0] = largest[n][1] = -INFINITY;

#pragma unroll
    for (int g = 0; g < SCORE_GROUPS; g++) {
        const int group = warp * SCORE_GROUPS + g;
        const uint32_t s_keys =
            shared_address(&s.ring[leaf * 2 % STAGES][group * 16 + lane % 16][lane / 16 * 8]);
        const uint32_t visible =
            s.visible[leaf % VISIBLE_BUFFERS][group / 2] >> (group % 2 * 16 + lane / 4);
        float sum[ROW_BLOCKS][4] = {};
        multiply_k(r_q, s_keys, sum);
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x = sum[n][i] * w.scale;
                if (args.softcap > 0) x = cap_score(x, args.softcap, w.inverse_cap) * LOG2_E;
                r_s[g][n][i] = visible >> (i / 2 * 8) & 1 ? x : -INFINITY;
                largest[n][i % 2] = max_nan(largest[n][i % 2], r_s[g][n][i]);
            }
    }

#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int delta = 4; delta < 32; delta *= 2)
                largest[n][c] = max_nan(largest[n][c], __shfl_xor_sync(~0u, largest[n][c], delta));
        if (lane < 4)
            *reinterpret_cast<float2 *>(&s.reduce[leaf % 2][warp][n * 8 + lane * 2]) =
                make_float2(largest[n][0], largest[n][1]);
    }
}

// ---- weigh: m and l of the leaf, and P to shared memory

static __device__ __forceinline__ void weigh(smem &s, int leaf, const scores &r_s,
                                             block &leaf_block)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        float2 m = make_float2(-INFINITY, -INFINITY);
#pragma unroll
        for (int i = 0; i < SCORE_WARPS; i++) {
            const float2 part =
                *reinterpret_cast<const float2 *>(&s.reduce[leaf % 2][i][n * 8 + lane % 4 * 2]);
            m = make_float2(max_nan(m.x, part.x), max_nan(m.y, part.y));
        }
        leaf_block.m[n][0] = m.x;
        leaf_block.m[n][1] = m.y;
        leaf_block.l[n][0] = leaf_block.l[n][1] = 0.0f;
        if (warp >= SCORE_WARPS) continue;

        const float base[2] = { finite_or_zero(m.x) + SHIFT, finite_or_zero(m.y) + SHIFT };
#pragma unroll
        for (int g = 0; g < SCORE_GROUPS; g++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = ex2(r_s[g][n][i] - base[i % 2]);
            leaf_block.l[n][0] += p[0] + p[2];
            leaf_block.l[n][1] += p[1] + p[3];
            const uint32_t s_row = shared_address(
                &s.p[n * 8 + lane % 8][(warp * SCORE_GROUPS + g) * 16 + lane / 8 % 2 * 8]);
            stmatrix_x2_trans(s_row, pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]));
        }
    }
}

// ---- accumulate: O^T = V^T P^T of this warp's columns

static __device__ __forceinline__ void accumulate(smem &s, int leaf, block &leaf_block)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; d++)
        for (int n = 0; n < ROW_BLOCKS; n++)
            for (int i = 0; i < 4; i++) leaf_block.o[d][n][i] = 0.0f;

    const int half = leaf * 2 + 1;
    const uint32_t s_v = shared_address(&s.ring[half % STAGES][lane % 8 + lane / 16 * 8]
                                               [warp * DIM_BLOCKS * 16 + lane / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step += 2) {
        uint32_t p[ROW_BLOCKS][4];
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
            ldmatrix_x4(p[n], shared_address(&s.p[n * 8 + lane % 8][step * 16 + lane / 8 * 8]));
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++) {
                uint32_t v[4];
                ldmatrix_x4_trans(v, s_v + ((step + pair) * 16 * PITCH + d * 16) * 2);
#pragma unroll
                for (int n = 0; n < ROW_BLOCKS; n++)
                    mma_bf16(leaf_block.o[d][n], v, p[n][pair * 2], p[n][pair * 2 + 1]);
            }
    }
}

// ---- merge: the tree

// right = left + right. Written with explicit roundings: the same bits wherever it is inlined.
static __device__ __forceinline__ void merge(const block &left, block &right)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float m = max_nan(left.m[n][c], right.m[n][c]);
            const float base = finite_or_zero(m);
            const float weight_left = ex2(left.m[n][c] - base);
            const float weight_right = ex2(right.m[n][c] - base);
            right.m[n][c] = m;
            right.l[n][c] =
                __fmaf_rn(left.l[n][c], weight_left, __fmul_rn(right.l[n][c], weight_right));
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
                for (int i = c; i < 4; i += 2)
                    right.o[d][n][i] = __fmaf_rn(left.o[d][n][i], weight_left,
                                                 __fmul_rn(right.o[d][n][i], weight_right));
        }
}

static __device__ __forceinline__ void store_level(float *g_level, const block &b)
{
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
            reinterpret_cast<float4 *>(g_level)[(d * ROW_BLOCKS + n) * THREADS + threadIdx.x] =
                make_float4(b.o[d][n][0], b.o[d][n][1], b.o[d][n][2], b.o[d][n][3]);
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
        reinterpret_cast<float4 *>(g_level)[(DIM_BLOCKS * ROW_BLOCKS + n) * THREADS + threadIdx.x] =
            make_float4(b.m[n][0], b.m[n][1], b.l[n][0], b.l[n][1]);
}

static __device__ __forceinline__ void load_level(const float *g_level, block &b)
{
#pragma unroll
    for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++) {
            const float4 o = reinterpret_cast<const float4 *>(
                g_level)[(d * ROW_BLOCKS + n) * THREADS + threadIdx.x];
            b.o[d][n][0] = o.x, b.o[d][n][1] = o.y, b.o[d][n][2] = o.z, b.o[d][n][3] = o.w;
        }
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const float4 ml = reinterpret_cast<const float4 *>(
            g_level)[(DIM_BLOCKS * ROW_BLOCKS + n) * THREADS + threadIdx.x];
        b.m[n][0] = ml.x, b.m[n][1] = ml.y, b.l[n][0] = ml.z, b.l[n][1] = ml.w;
    }
}

static __device__ __forceinline__ float *stack_level(const tree &t, int level)
{
    return t.g_stack + (int64_t) (level - LEVELS) * LEVEL_FLOATS;
}

// Where a block of the tree is, once it has gone up as far as it can.
enum fate {
    // Waits for its right half.
    WAITS,
    // Its left half is another block's: a root of this run.
    IS_ROOT,
    // It is the sequence.
    IS_WHOLE,
};

// One step up, through a level in registers; true if it ends there, with `fate`.
static __device__ __forceinline__ bool climb(tree &t, block &waiting, int i, const work &w,
                                             uint32_t index, int level, bool last, block &b,
                                             fate &end)
{
    const uint32_t first = index >> i << i;
    if (level > i) return false;
    if (last && first <= w.first) {
        end = IS_WHOLE;
        return true;
    }
    if (index >> i & 1) {
        if (t.present >> i & 1) {
            merge(waiting, b);
            t.present &= ~(1u << i);
            return false;
        }
        end = IS_ROOT;
        return first > w.first;
    }
    if (last) return false;
    waiting = b;
    t.present |= 1u << i;
    end = WAITS;
    return true;
}

// Adds the block of the tree that is `level` levels high and starts at leaf `index` (absolute): a
// binary counter. `last`: no leaf of the sequence follows.
static __device__ __forceinline__ fate push(tree &t, const work &w, uint32_t index, int level,
                                            bool last, block &b)
{
    fate end;
    if (climb(t, t.level_0, 0, w, index, level, last, b, end)) return end;
    if (climb(t, t.level_1, 1, w, index, level, last, b, end)) return end;
    if (LEVELS > 2 && climb(t, t.level_2, 2, w, index, level, last, b, end)) return end;
    for (int i = max(LEVELS, level);; i++) {
        const uint32_t first = index >> i << i;
        if (last && first <= w.first) return IS_WHOLE;
        if (index >> i & 1) {
            if (t.present >> i & 1) {
                block left;
                load_level(stack_level(t, i), left);
                merge(left, b);
                t.present &= ~(1u << i);
            } else if (first > w.first) {
                return IS_ROOT;
            }
        } else if (!last) {
            store_level(stack_level(t, i), b);
            t.present |= 1u << i;
            return WAITS;
        }
    }
}

// Writes down what still waits, left to right.
static __device__ __forceinline__ void write_waiting(const tree &t, float *g_root)
{
    for (int i = 31; i >= LEVELS; i--) {
        if (!(t.present >> i & 1)) continue;
        block waiting;
        load_level(stack_level(t, i), waiting);
        store_level(g_root, waiting);
        g_root += LEVEL_FLOATS;
    }
    if (LEVELS > 2 && t.present & 4) store_level(g_root, t.level_2), g_root += LEVEL_FLOATS;
    if (t.present & 2) store_level(g_root, t.level_1), g_root += LEVEL_FLOATS;
    if (t.present & 1) store_level(g_root, t.level_0);
}

// ---- store: sum l over the threads, sink, division, o and lse

static __device__ __forceinline__ void sum_rows(smem &s, block &b)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int delta = 4; delta < 32; delta *= 2)
                b.l[n][c] += __shfl_xor_sync(~0u, b.l[n][c], delta);
        if (lane < 4)
            *reinterpret_cast<float2 *>(&s.reduce[0][warp][n * 8 + lane * 2]) =
                make_float2(b.l[n][0], b.l[n][1]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        float2 l = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < SCORE_WARPS; i++) {
            const float2 part =
                *reinterpret_cast<const float2 *>(&s.reduce[0][i][n * 8 + lane % 4 * 2]);
            l.x += part.x, l.y += part.y;
        }
        b.l[n][0] = l.x, b.l[n][1] = l.y;
    }
}

static __device__ __forceinline__ void store(const attn_decode_args &args, smem &s, block &b,
                                             int32_t sequence, int32_t kv_head, int32_t first_head,
                                             int32_t num_rows)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The ring is done with: no copy is in flight, and the barriers of sum_rows stand in between.
    uint16_t(*const s_o)[PITCH] = s.ring[0];
    const float v_scale = args.v_scales ? args.v_scales[kv_head] : args.v_scale;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int row = n * 8 + lane % 4 * 2 + c;
            const int64_t head = first_head + row;
            const bool is_row = row < num_rows;
            const float sink = is_row && args.sinks ? args.sinks[head] * LOG2_E : -INFINITY;
            const float m = max_nan(b.m[n][c], sink);
            const float base = finite_or_zero(m);
            const float weight = ex2(b.m[n][c] - base);
            const float sum = __fmaf_rn(b.l[n][c], weight, ex2(sink - base - SHIFT));
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
                for (int i = c; i < 4; i += 2) {
                    const float o = __fdiv_rn(b.o[d][n][i] * weight, sum) * v_scale;
                    // + 0: a masked group may have turned a -0 into +0; let it always be +0.
                    const uint32_t bits = pack_bf16(sum == 0.0f ? 0.0f : o + 0.0f, 0.0f);
                    s_o[row][(warp * DIM_BLOCKS + d) * 16 + i / 2 * 8 + lane / 4] = (uint16_t) bits;
                }
            if (args.lse && is_row && warp == 0 && lane < 4)
                args.lse[(int64_t) sequence * args.num_q_heads + head] =
                    (m + (lg2(sum) + SHIFT)) * LN_2;
        }
    __syncthreads();

    uint16_t *const g_o = static_cast<uint16_t *>(args.o) +
                          ((int64_t) sequence * args.num_q_heads + first_head) * HEAD_DIM;
    for (int i = threadIdx.x; i < num_rows * PIECES; i += THREADS)
        *reinterpret_cast<uint4 *>(g_o + i * 8) =
            *reinterpret_cast<const uint4 *>(&s_o[i / PIECES][i % PIECES * 8]);
    __syncthreads();
}

// ---- runs: who gets which leaves

// Attended keys of a sequence, and the leaves that hold them.
static __device__ __forceinline__ void attended(const attn_decode_args &args, int32_t given,
                                                work &w)
{
    w.len = min(max(given, 0), args.max_keys);
    w.start = args.window > 0 && w.len > args.window ? w.len - args.window : 0;
    w.first = w.start / TILE;
    w.end = w.len > 0 ? (w.len - 1) / TILE + 1 : w.first;
}

static __device__ __forceinline__ int32_t count_units(const attn_decode_args &args,
                                                      int32_t sequence, int32_t shift)
{
    work w;
    attended(args, args.seq_lens[sequence], w);
    return w.end > w.first ? ((w.end - 1) >> shift) - (w.first >> shift) + 1 : 1;
}

// The first unit of a run.
static __device__ __forceinline__ int32_t run_begin(const units &u, int32_t run)
{
    return run * u.size + min(run, u.rest);
}

// The run that a unit is in.
static __device__ __forceinline__ int32_t run_of(const units &u, int32_t unit)
{
    const uint32_t longer = u.rest * (u.size + 1);
    return (uint32_t) unit < longer ? (uint32_t) unit / (uint32_t) (u.size + 1)
                                    : u.rest + (unit - longer) / (uint32_t) u.size;
}

// Units of all sequences, in every thread.
static __device__ __forceinline__ int32_t sum_units(const attn_decode_args &args, smem &s,
                                                    int32_t shift)
{
    int32_t sum = 0;
    for (int32_t i = threadIdx.x; i < args.batch; i += THREADS) sum += count_units(args, i, shift);
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x % 32 == 0) s.scan[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += s.scan[i];
    __syncthreads();
    return sum;
}

static __device__ __forceinline__ int32_t divide_by_runs(const attn_decode_args &args,
                                                         uint32_t number)
{
    return attn_decode_divide(number, args.runs_magic, args.runs_shift);
}

// The largest unit that makes the longest run at most a sixteenth longer than runs of single leaves
// would be, while units that sequences fill in part stay few. `leaves` are counted in units of
// args.min_shift.
static __device__ __forceinline__ int32_t choose_shift(const attn_decode_args &args,
                                                       uint32_t leaves)
{
    const uint32_t longest = divide_by_runs(args, leaves + args.runs - 1);
    int32_t shift = 0;
    for (uint32_t all = (leaves + 1) / 2; all >= 16 * (uint32_t) args.batch; all = (all + 1) / 2) {
        if (divide_by_runs(args, all + args.runs - 1) << (shift + 1) > longest + longest / 16)
            break;
        shift++;
    }
    return shift + args.min_shift;
}

// Leaves the result in shared memory, where it takes no registers.
static __device__ __forceinline__ void count_all(const attn_decode_args &args, smem &s)
{
    int32_t shift = args.min_shift;
    int32_t total = sum_units(args, s, shift);
    if (args.runs > 1) {
        shift = choose_shift(args, total);
        if (shift > args.min_shift) total = sum_units(args, s, shift);
    }
    if (threadIdx.x == 0) {
        const int32_t runs = min(args.runs, total);
        s.all.total = total;
        s.all.runs = runs;
        s.all.shift = shift;
        s.all.size = runs == total ? 1 : divide_by_runs(args, total);
        s.all.rest = total - s.all.size * runs;
    }
    __syncthreads();
}

// The sequence that holds a unit, and its first unit.
static __device__ __forceinline__ int32_t find_unit(const attn_decode_args &args, smem &s,
                                                    int32_t unit, int32_t &first_unit)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t before = 0;
    for (int32_t base = 0; base < args.batch; base += THREADS) {
        const int32_t sequence = base + threadIdx.x;
        const int32_t own = sequence < args.batch ? count_units(args, sequence, s.all.shift) : 0;
        int32_t end = own;
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) {
            const int32_t left = __shfl_up_sync(~0u, end, delta);
            if (lane >= delta) end += left;
        }
        if (lane == 31) s.scan[warp] = end;
        __syncthreads();
        int32_t all = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) end += s.scan[i];
            all += s.scan[i];
        }
        end += before;
        if (unit >= end - own && unit < end) {
            s.found_sequence = sequence;
            s.found_unit = end - own;
        }
        __syncthreads();
        before += all;
        if (unit < before) break;
    }
    first_unit = s.found_unit;
    return s.found_sequence;
}

// ---- gather: the roots of all runs of a sequence, merged

// A walk over the roots of a sequence, left to right.
struct walk {
    int32_t first_unit, num_units;
    int32_t run, lane;
    // Leaves of the run that are left: from pos to end; beyond `stop` the sequence has none.
    uint32_t pos, end, stop;
    const float *g_root;
};

static __device__ __forceinline__ float *find_roots(const attn_decode_args &args, int32_t run,
                                                    int32_t lane, bool from_begin)
{
    const int64_t slot = ((int64_t) run * args.lanes + lane) * 2 + (from_begin ? 0 : 1);
    return args.roots + slot * args.max_roots * LEVEL_FLOATS;
}

// The first leaf of a sequence's unit.
static __device__ __forceinline__ uint32_t leaf_of(const units &u, const work &w, int32_t unit)
{
    return unit > 0 ? ((w.first >> u.shift) + unit) << u.shift : w.first;
}

// Where a sequence is cut off, missing leaves count as empty ones: so the aligned blocks of a run
// reach as far as they can.
static __device__ __forceinline__ void enter_run(const attn_decode_args &args, const units &u,
                                                 const work &w, walk &at)
{
    const int32_t begin = run_begin(u, at.run), end = run_begin(u, at.run + 1);
    const int32_t end_unit = at.first_unit + at.num_units;
    at.pos = begin > at.first_unit ? leaf_of(u, w, begin - at.first_unit) : 0;
    at.stop = end < end_unit ? leaf_of(u, w, end - at.first_unit) : w.end;
    at.end = end < end_unit ? at.stop : 1u << 31;
    at.g_root = find_roots(args, at.run, at.lane, begin >= at.first_unit);
}

// The next root: its first leaf and its level. Goes on to the next run by itself.
static __device__ __forceinline__ uint32_t next_root(const attn_decode_args &args, const units &u,
                                                     const work &w, walk &at, int &level,
                                                     const float *&g_root)
{
    if (at.pos >= at.stop) {
        at.run++;
        enter_run(args, u, w, at);
    }
    uint32_t first;
    do {
        first = at.pos;
        level = first ? __ffs(first) - 1 : 31;
        while (first + (1u << level) > at.end) level--;
        at.pos += 1u << level;
    } while (at.pos <= w.first);
    g_root = at.g_root;
    at.g_root += LEVEL_FLOATS;
    return first;
}

static __device__ __forceinline__ void gather(const attn_decode_args &args, smem &s, const units &u,
                                              const work &w, int32_t lane, int32_t first_unit,
                                              int32_t num_units, tree &t, block &b)
{
    float *const s_roots = reinterpret_cast<float *>(s.ring);
    walk at;
    at.first_unit = first_unit;
    at.num_units = num_units;
    at.lane = lane;
    at.run = run_of(u, first_unit);
    enter_run(args, u, w, at);
    t.present = 0;
    while (at.pos < w.end) {
        // As many roots as the ring holds are on their way at once. Each thread copies what it will
        // read.
        walk ahead = at;
        int level, num_roots = 0;
        for (; num_roots < RING_ROOTS && ahead.pos < w.end; num_roots++) {
            const float *g_root;
            next_root(args, u, w, ahead, level, g_root);
#pragma unroll
            for (int i = 0; i < LEVEL_PIECES; i++) {
                const int piece = (i * THREADS + threadIdx.x) * 4;
                cp_async_16(shared_address(s_roots + num_roots * LEVEL_FLOATS + piece),
                            g_root + piece, 16);
            }
        }
        cp_async_commit();
        cp_async_wait<0>();
        for (int i = 0; i < num_roots; i++) {
            const float *g_root;
            const uint32_t first = next_root(args, u, w, at, level, g_root);
            load_level(s_roots + i * LEVEL_FLOATS, b);
            push(t, w, first, level, at.pos >= w.end, b);
        }
    }
}

// True in the block that arrives last at a sequence of one lane: the others' roots are there to be
// read.
static __device__ __forceinline__ bool arrive(const attn_decode_args &args, smem &s,
                                              int64_t counter, int32_t num_runs)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const int32_t before = atomicAdd(args.counters + counter, 1);
        s.arrived = before == num_runs - 1;
        if (s.arrived) args.counters[counter] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!s.arrived) return false;
    __threadfence();
    return true;
}

// ---- one run's share of a sequence

static __device__ __forceinline__ work describe(const attn_decode_args &args, int32_t sequence,
                                                int32_t kv_head)
{
    work w;
    const int32_t given = args.seq_lens[sequence];
    attended(args, given, w);
    w.sequence = sequence;
    if (w.len != given && threadIdx.x == 0) report_fault(args, sequence);
    w.g_k = static_cast<const unsigned char *>(args.k) + kv_head * args.k_head_stride * 2;
    w.g_v = static_cast<const unsigned char *>(args.v) + kv_head * args.v_head_stride * 2;
    w.g_table = args.block_table + sequence * args.table_stride;
    w.scale = args.scale * (args.k_scales ? args.k_scales[kv_head] : args.k_scale);
    if (!(args.softcap > 0)) w.scale *= LOG2_E;
    w.inverse_cap = args.softcap > 0 ? __fdiv_rn(1.0f, args.softcap) : 0.0f;
    return w;
}

static __device__ __forceinline__ void load_q(const attn_decode_args &args, int32_t sequence,
                                              int32_t first_head, int32_t num_rows,
                                              uint32_t (&r_q)[ROW_BLOCKS][DIM_STEPS][2])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
        const int row = n * 8 + lane / 4;
        const uint16_t *const g_row = static_cast<const uint16_t *>(args.q) +
                                      sequence * args.q_stride +
                                      (int64_t) (first_head + row) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                r_q[n][step][i] =
                    row < num_rows ? *reinterpret_cast<const uint32_t *>(g_row + step * 16 + i * 8)
                                   : 0;
    }
}

static __device__ __forceinline__ void clear(block &b)
{
#pragma unroll
    for (int n = 0; n < ROW_BLOCKS; n++) {
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) b.o[d][n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 2; c++) b.m[n][c] = -INFINITY, b.l[n][c] = 0.0f;
    }
}

// Attends the block's leaves. The sequence is b if they are all of it; else their roots go to
// g_root.
static __device__ __forceinline__ void attend(const attn_decode_args &args, smem &s, const work &w,
                                              const uint32_t (&r_q)[ROW_BLOCKS][DIM_STEPS][2],
                                              float *g_root, tree &t, block &b)
{
    scores r_s;
    t.present = 0;
    place at[LEAD + 1];
#pragma unroll
    for (int i = 0; i <= LEAD; i++) at[i] = lookup(args, w, i);
    place next = lookup(args, w, LEAD + 1);
#pragma unroll
    for (int i = 0; i <= LEAD; i++) publish(args, w, s, i, at[i]);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch(w, s, i);

#pragma unroll 1
    for (int leaf = -1; leaf < w.num_leaves; leaf++) {
        // Step -1 only scores leaf 0. One copy of each step keeps the code small: it is fetched
        // from memory, too, and in a short call that counts.
        __syncthreads();
        if (leaf >= 0) {
            fetch(w, s, leaf * 2 - 1 + STAGES);
            fetch(w, s, leaf * 2 + STAGES);
            publish(args, w, s, leaf + LEAD + 1, next);
            next = lookup(args, w, leaf + LEAD + 2);
            weigh(s, leaf, r_s, b);
        }
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (leaf >= 0) accumulate(s, leaf, b);
        score(args, w, s, leaf + 1, r_q, r_s);
        if (leaf < 0) continue;
        const uint32_t index = w.first_leaf + leaf;
        if (push(t, w, index, 0, index + 1 == w.end, b) == IS_ROOT) {
            store_level(g_root, b);
            g_root += LEVEL_FLOATS;
        }
    }
    write_waiting(t, g_root);
    cp_async_wait<0>();
    __syncthreads();
}

// Units [begin, end) of a sequence that has `num_units` of them from `first_unit` on.
static __device__ __forceinline__ void do_share(const attn_decode_args &args, smem &s,
                                                const units &u, int32_t run, int32_t lane,
                                                int32_t sequence, int32_t first_unit, int32_t begin,
                                                int32_t end, int32_t num_units)
{
    const int32_t row_group = lane % args.row_groups, kv_head = lane / args.row_groups;
    const int32_t first_head = kv_head * args.ratio + row_group * ROWS;
    const int32_t num_rows = min(ROWS, args.ratio - row_group * ROWS);
    const bool is_whole = end - begin == num_units;

    work w = describe(args, sequence, kv_head);
    w.first_leaf = leaf_of(u, w, begin);
    w.num_leaves = (end < num_units ? leaf_of(u, w, end) : w.end) - w.first_leaf;
    uint32_t r_q[ROW_BLOCKS][DIM_STEPS][2];
    block b;
    tree t;
    t.g_stack = args.stack + (int64_t) blockIdx.x * args.stack_levels * LEVEL_FLOATS;
    if (w.num_leaves > 0) {
        load_q(args, sequence, first_head, num_rows, r_q);
        const bool from_begin = run_begin(u, run) >= first_unit;
        attend(args, s, w, r_q, is_whole ? nullptr : find_roots(args, run, lane, from_begin), t, b);
    } else {
        clear(b);
    }
    if (!is_whole) {
        const int32_t num_runs = run_of(u, first_unit + num_units - 1) - run_of(u, first_unit) + 1;
        if (!arrive(args, s, (int64_t) sequence * args.lanes + lane, num_runs)) return;
        gather(args, s, u, w, lane, first_unit, num_units, t, b);
    }
    sum_rows(s, b);
    store(args, s, b, sequence, kv_head, first_head, num_rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ROW_NAME(const __grid_constant__ struct attn_decode_args args)
{
    extern __shared__ __align__(16) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);
    static_assert(sizeof(smem) ==
                      STAGES * TILE * PITCH * 2 + ROWS * P_PITCH * 2 + OFFSET_BUFFERS * TILE * 16 +
                          VISIBLE_BUFFERS * (TILE / 32) * 4 + 2 * WARPS * ROWS * 4 + WARPS * 4 + 32,
                  "attn_decode_smem_bytes is what the host asks for");

    count_all(args, s);
    const units &u = s.all;
    const int64_t num_items = (int64_t) u.runs * args.lanes;
    for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
        const int32_t lane = (int32_t) (item % args.lanes), run = (int32_t) (item / args.lanes);
        int32_t unit = run_begin(u, run);
        const int32_t end = run_begin(u, run + 1);
        int32_t first_unit;
        int32_t sequence = find_unit(args, s, unit, first_unit);
        while (unit < end) {
            const int32_t num_units = count_units(args, sequence, u.shift);
            const int32_t next_unit = first_unit + num_units;
            do_share(args, s, u, run, lane, sequence, first_unit, unit - first_unit,
                     min(next_unit, end) - first_unit, num_units);
            unit = first_unit = next_unit;
            sequence++;
        }
    }
}

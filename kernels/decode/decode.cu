/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode: o = softmax(scale * q k^T) v for one query token of each sequence.
//
// The arithmetic, which no schedule changes: keys are cut into leaves of TILE keys at absolute
// multiples of TILE. A leaf gives its largest score m, the sum l of 2^(score - m), and the weighted
// sum o of V. Leaves are merged by the binary tree of aligned power-of-two blocks of leaf indices;
// a block without attended keys is left out. Scores are kept in units of log2. Under a split count
// each piece of a sequence is such a tree, with leaves counted from the piece's first key, and
// pieces are merged from the last to the first.
//
// Who gets what: a lane is a KV head and up to ROWS of its query rows. The leaves of all sequences,
// in a row, are cut into runs for blocks, and those into runs for warps: wherever that may be, as
// far as bits are concerned. A block takes one run of one lane; lanes run fastest, so that whoever
// reads the same tokens runs at the same time. A warp walks its run alone, a leaf at a time, with
// copies of the next leaf in flight, and no barrier of the block: so there is always something in
// flight, and nobody waits for anybody. What it keeps of a sequence that its run holds only a part
// of are a few aligned blocks of the tree, the roots. Once its warps are done a block merges roots
// of the same sequence; of a sequence that several blocks share, the block that arrives last merges
// what they have left.
//
// Bound by memory: every K and V byte is read once. 64 sequences of 8192 keys, 8 KV heads, HEAD_DIM
// 128 are 2.15 GB, 0.45 ms at 4.8 TB/s, in which each of 8 warps of a block has 13,000 clocks for a
// leaf of 64 keys; alone it takes about 5,000, most of them latency.

#include "decode/config.cuh"
#include "decode/feed.cuh"
#include "decode/gather.cuh"
#include "decode/leaf.cuh"
#include "decode/output.cuh"
#include "decode/schedule.cuh"
#include "decode/tree.cuh"

// ---- a warp's run

// After a part of a leaf was read: its place is free for the part STAGES further on.
static __device__ __forceinline__ void refill(const attn_decode_args &args, smem &s, feed &f,
                                              int32_t kv_head, int part, ring_place &at)
{
    __syncwarp();
    if (part == PARTS - STAGES) f.place(args);
    f.copy(args, s, kv_head, (part + STAGES) % PARTS, at.slot);
    if (part == PARTS - STAGES) f.advance(args, s);
    at.next();
}

// Multiplies a leaf whose copies were started before. Loops that are short enough to stay loops: a
// warp that runs alone waits for instructions, too.
static __device__ __forceinline__ void attend_leaf(const attn_decode_args &args, smem &s, feed &f,
                                                   int32_t kv_head, const scaling &by,
                                                   const query &q, uint32_t s_piece, ring_place &at,
                                                   block<DIM_STEPS> &b)
{
    const uint32_t s_full = shared_address(s.full[warp_id()]);
    scores r_s = {};
    uint32_t visible[LANE_KEYS];
#pragma unroll
    for (int j = 0; j < LANE_KEYS; j++) visible[j] = f.visible[j];
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        // The scores move up, so that each group's have a fixed place in the end.
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int to = 0; to < GROUPS - 1; to++) r_s[to][n][i] = r_s[to + 1][n][i];
                r_s[GROUPS - 1][n][i] = 0.0f;
            }
        barrier_wait(s_full + at.slot * 8, at.phase);
        __syncwarp();
        multiply_k(q, s_piece, at.slot * GROUP_BYTES, r_s[GROUPS - 1]);
        refill(args, s, f, kv_head, g, at);
    }

    uint32_t p[GROUPS][ROW_BLOCKS][2];
    weigh(args, by, q, visible, r_s, p, b);
#pragma unroll
    for (int d = 0; d < DIM_STEPS; d++)
#pragma unroll
        for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) b.o[d][n][i] = 0.0f;
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        barrier_wait(s_full + at.slot * 8, at.phase);
        __syncwarp();
        if (args.has_boxes && (visible[0] & 0xFFFF) != 0xFFFF)
            clear_rows(s.ring[warp_id()][at.slot], visible[0]);
        multiply_v(p[0], s_piece, at.slot * GROUP_BYTES, b);
        refill(args, s, f, kv_head, GROUPS + g, at);
#pragma unroll
        for (int to = 0; to < GROUPS - 1; to++)
#pragma unroll
            for (int n = 0; n < ROW_BLOCKS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) p[to][n][i] = p[to + 1][n][i];
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++)
            visible[j] =
                visible[j] >> 16 | (j + 1 < LANE_KEYS ? visible[(j + 1) % LANE_KEYS] << 16 : 0);
    }
}

// The piece is b.
static __device__ __forceinline__ void finish_by_warp(const attn_decode_args &args, const piece &p,
                                                      const rows &r, block<DIM_STEPS> &b)
{
    if (args.splits == 1) {
        store_output(args, p.sequence, r, 0, b);
    } else {
        store_piece(args, p, r, 0, b);
        arrive_piece(args, p, r);
    }
}

static __device__ __forceinline__ void attend_run(const attn_decode_args &args, smem &s,
                                                  int32_t lane, float *g_slots, ring_place &at)
{
    const uint32_t s_piece = first_piece(s.ring[warp_id()]);
    const int32_t kv_head = rows_of(args, lane).kv_head;
    const scaling by = scaling_of(args, kv_head);
    feed f;
    f.begin(args, s, kv_head, at.slot);
    for (int32_t index = s.cuts[warp_id()][0].piece; index < args.batch * args.splits; index++) {
        const cut from = s.cuts[warp_id()][0], to = s.cuts[warp_id()][1];
        if (index > to.piece) break;
        const piece p = describe(args, index);
        const span leaves = clip(p, index, from, to);
        const bool is_empty = p.first == p.end;
        // An empty one belongs to the run that goes beyond it.
        if (is_empty ? index == to.piece || p.split > 0 : leaves.begin >= leaves.end) continue;
        if (p.is_fault && lane_id() == 0) report_fault(args, p.sequence);

        query q;
        warp_stack waiting;
        uint32_t present = 0;
        const bool is_head = leaves.begin > p.first;
        waiting.used = 0;
        waiting.s_level_0 = s.level_0[LEVEL_0_IN_SHARED ? warp_id() : 0];
        waiting.g_slots = g_slots + (is_head ? 0 : ATTN_DECODE_WARP_HEAD * SLOT_FLOATS);
        waiting.size = args.run_roots - (is_head ? 0 : ATTN_DECODE_WARP_HEAD);
        if (!is_empty) {
            const rows r = rows_of(args, opaque(lane));
            load_query(args, p.sequence, r.first_head, r.num_rows,
                       s.q[Q_IN_REGISTERS ? 0 : warp_id()], q);
        }
        uint32_t leaf = leaves.begin;
#pragma unroll 1
        do {
            block<DIM_STEPS> b;
            fate end = IS_WHOLE;
            if (is_empty) {
                clear(b);
            } else {
                attend_leaf(args, s, f, kv_head, by, q, s_piece, at, b);
                end = push(waiting, present, p.first, leaf, leaf + 1 == p.end, b);
            }
            if (end == IS_ROOT) waiting.add_root(b);
            if (end == IS_WHOLE)
                finish_by_warp(args, describe(args, index), rows_of(args, opaque(lane)), b);
        } while (++leaf < leaves.end);
        waiting.end(present);
    }
}

// ---- a block's run

static __device__ __forceinline__ void gather_piece(const attn_decode_args &args, smem &s,
                                                    const runs &source, const piece &p,
                                                    int32_t first, int32_t last, bool is_whole,
                                                    float *g_list)
{
    const rows r = rows_of(args, source.lane);
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        block<SHARE_STEPS> b;
        if (warp_id() >= WORKING) continue;
        gather(s, source, p, first, last, is_whole, pass, g_list, b);
        if (!is_whole) continue;
        if (args.splits == 1)
            store_output(args, p.sequence, r, first_step_of(pass), b);
        else
            store_piece(args, p, r, first_step_of(pass), b);
    }
    if (is_whole && args.splits > 1) {
        __syncthreads();
        if (warp_id() == 0) arrive_piece(args, p, r);
    }
    // The ring, and m and l of the list, are the next one's.
    __syncthreads();
}

// True if this block arrives last at a piece: the others' roots are there to be read.
static __device__ __forceinline__ bool arrive(const attn_decode_args &args, smem &s,
                                              int64_t counter, int32_t count)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        s.arrived = atomicAdd(args.counters + counter, 1) == count - 1;
#if ATTN_MUTATION != 20
        if (s.arrived) args.counters[counter] = 0;
#endif
        __threadfence();
    }
    __syncthreads();
    if (!s.arrived) return false;
    __threadfence();
    return true;
}

// Merges what the warps have left of pieces that are cut.
static __device__ __forceinline__ void gather_run(const attn_decode_args &args, smem &s,
                                                  int32_t lane, int32_t region)
{
    const int32_t warps = s.dealt.warps;
    // At most two are shared with other blocks: those that the run's ends cut.
    uint32_t shared = 0;
    int32_t done = -1;
    // First what this block has of each piece, then pieces that are shared.
#pragma unroll 1
    for (int32_t i = 0; i <= warps || shared; i++) {
        const bool are_blocks = i > warps;
        const int32_t at = are_blocks ? __ffs(shared) - 1 : i;
        const cut c = at < warps ? s.cuts[at][0] : s.cuts[warps - 1][1];
        if (!c.is_inside || (!are_blocks && c.piece == done)) continue;
        const piece p = describe(args, c.piece);
        done = c.piece;
        const runs source = { args, s, p, c, lane, are_blocks, region };
        const cut end = s.cuts[warps - 1][1];
        int32_t first = max(i - 1, 0), last = warps - 1;
        bool is_whole = true;
        if (are_blocks) {
            shared &= shared - 1;
            if (!arrive(args, s, (int64_t) c.piece * args.lanes + lane, source.count_blocks()))
                continue;
            first = source.first_block();
            last = source.last_block();
        } else {
            const bool goes_on = end.piece == c.piece && end.is_inside;
            is_whole = i > 0 && !goes_on;
            if (!is_whole) shared |= 1u << i;
            // The roots of a lone warp are the block's.
            if (warps == 1) continue;
        }
        gather_piece(args, s, source, p, first, last, is_whole,
                     region_slots(args, region, 0) +
                         (i == 0 ? 0 : ATTN_DECODE_BLOCK_HEAD * SLOT_FLOATS));
    }
}

// Item `item` of all (run, lane).
static __device__ __forceinline__ void attend_item(const attn_decode_args &args, smem &s,
                                                   int32_t item, ring_place &at)
{
    const int32_t run = item / args.lanes, lane = item - run * args.lanes;
    const int32_t region = args.block_runs > 1 ? item : blockIdx.x;
    if (warp_id() >= s.dealt.warps) return;
    find_cuts(args, s, run);
    attend_run(args, s, lane, region_slots(args, region, warp_id()), at);
}

static __device__ __forceinline__ void gather_item(const attn_decode_args &args, smem &s,
                                                   int32_t item)
{
    const int32_t lane = item - item / args.lanes * args.lanes;
    gather_run(args, s, lane, args.block_runs > 1 ? item : blockIdx.x);
    // What threads have put into the ring, boxes will write over.
    fence_async();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ROW_NAME(const __grid_constant__ struct attn_decode_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);

    if (threadIdx.x < WARPS * STAGES)
        barrier_init(shared_address(&s.full[0][threadIdx.x]), args.has_boxes ? 1 : 32);
    fence_async();
    count_all(args, s);
    ring_place at = { 0, 0 };
#pragma unroll 1
    for (int32_t item = blockIdx.x; item < args.block_runs * args.lanes; item += gridDim.x) {
        const int32_t run = item / args.lanes;
        if (block_begin(s.dealt, run) == block_begin(s.dealt, run + 1)) continue;
        attend_item(args, s, item, at);
        __syncthreads();
        gather_item(args, s, opaque(item));
        __syncthreads();
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
// Tiled decode: folds the keys of a list of blocks into a running softmax (include/attn/tiled.h).
//
// What is folded at a time is a unit: up to 16 keys of one block, from a multiple of 16 slots on,
// so that it depends on the list alone. A unit gives a partial from its own keys, m_b = the largest
// score, l_b = sum e^(s - m_b), o_b = sum e^(s - m_b) v; and partials are folded into the state
// one after the other, in list order. That is all that decides bits.
//
// A block of threads has a lane: a sequence, a KV head, up to 8 of its query heads. Its warps take
// the units in turn, WARPS of them a round. Each copies its own units, STAGES - 1 rounds ahead, and
// has their scores (S^T = K Q^T) and weights; then, for all units of the round, each has the sums
// of its own columns (O^T = V^T P^T), and folds them. So a round needs one barrier, and the state
// stays in registers.
//
// It is bound by bytes: 64 sequences of 8192 keys, 8 KV heads of 128 are 2.1 GB, 450 us of an H200.
// With few lanes an SM's own bandwidth is the limit. Then partials come from many blocks of
// threads, by way of a workspace, and have the same bits.

#include "common/block.cuh"
#include "common/ptx_copy.cuh"
#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"
#include "tiled/tiled_params.h"

constexpr int HEAD_DIM = ROW_HEAD_DIM;
constexpr int WARPS = ROW_WARPS;
constexpr int STAGES = ROW_STAGES;
// Types as in src/pack.h.
constexpr bool IS_BF16 = ROW_Q == 1;

constexpr int THREADS = WARPS * 32;
constexpr int KEYS = ATTN_TILED_KEYS;
constexpr int ROWS = ATTN_TILED_ROWS;
constexpr int DIM_STEPS = HEAD_DIM / 16;
// Steps of 16 columns whose sums a warp has, from step warp * STEPS on; a warp beyond has none.
constexpr int STEPS = DIM_STEPS > WARPS ? DIM_STEPS / WARPS : 1;
// Bytes, and 16-byte pieces, of a key's row; it lies in lines of LINE_BYTES.
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int PIECES = ROW_BYTES / 16;
constexpr int LINE_BYTES = 128;
constexpr int LINE_PIECES = LINE_BYTES / 16;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
// Rows that a warp copies at once.
constexpr int COPY_ROWS = 32 / PIECES;
constexpr int SMEM_BYTES = attn_tiled_smem_bytes(HEAD_DIM, WARPS, STAGES);

// Weights within a unit are 2^(score - m_b - SHIFT). FP16: small ones stay clear of the subnormals.
constexpr float SHIFT = IS_BF16 ? 0.0f : -14.0f;

struct smem {
    // Of each warp's units: K and V.
    unsigned char ring[STAGES][WARPS][2][TILE_BYTES];
    // Of the units of a round and of the one before: weights, as MMA fragments; m and l.
    uint2 p[2][WARPS][32];
    alignas(16) float2 ml[2][WARPS][ROWS];
    // Valid keys; 0: there is no such unit.
    int32_t keys[STAGES][WARPS];
};

static_assert(KEYS == 16 && ROWS == 8, "of an MMA");
static_assert(ROW_TILE == KEYS, "the row says how units are cut, which decides bits");
static_assert(HEAD_DIM % 64 == 0, "rows are whole lines");
static_assert(HEAD_DIM <= 256, "a warp copies whole rows");
static_assert(DIM_STEPS % WARPS == 0 || WARPS % DIM_STEPS == 0, "steps are dealt evenly");
static_assert(STAGES >= 2, "copies are a round ahead");
static_assert(ATTN_TILED_CHUNK % WARPS == 0, "warps have equal shares of a chunk");
static_assert(sizeof(smem) <= SMEM_BYTES, "the host asks for what the kernel uses");
static_assert(SMEM_BYTES <= ATTN_SMEM_PER_BLOCK, "the chip's shared memory holds a block's");

// Where a piece of a row lies: all first lines, then all second ones, ... Pieces of a line lie in
// swizzled order: so the 8 rows of an ldmatrix lie in different banks.
static __device__ __forceinline__ constexpr int piece_offset(int row, int piece)
{
    return (piece / LINE_PIECES * KEYS + row) * LINE_BYTES + (piece % LINE_PIECES ^ (row & 7)) * 16;
}

// The same of pieces 2 * step and 2 * step + 1, from that of pieces 0 and 1.
static __device__ __forceinline__ uint32_t step_address(uint32_t s_piece, int step)
{
    constexpr int LINE_STEPS = LINE_PIECES / 2;
    return (s_piece ^ (step % LINE_STEPS * 32)) + step / LINE_STEPS * KEYS * LINE_BYTES;
}

// ---- lanes and lists

// A sequence, and query heads of it that share a KV head.
struct lane {
    int32_t sequence, kv_head, first_head, rows;
};

static __device__ __forceinline__ lane lane_of(const attn_tiled_args &args, uint32_t index)
{
    lane of;
    of.sequence = attn_divide(index, args.lanes_magic, args.lanes_shift);
    const uint32_t own = index - of.sequence * args.lanes;
    of.kv_head = attn_divide(own, args.groups_magic, args.groups_shift);
    const int32_t first = (own - of.kv_head * args.groups) * ROWS;
    of.first_head = of.kv_head * args.ratio + first;
    of.rows = min(args.ratio - first, ROWS);
    return of;
}

// Of the state, of q and of the output.
static __device__ __forceinline__ int64_t row_of(const attn_tiled_args &args, const lane &of,
                                                 int row)
{
    return (int64_t) of.sequence * args.num_q_heads + of.first_head + row;
}

static __device__ __forceinline__ void report_fault(const attn_tiled_args &args, int32_t sequence)
{
    if (args.fault) atomicMin(args.fault, sequence);
}

// What of a tile a sequence has, as far as it can be followed.
struct list {
    const int32_t *g_blocks;
    uint32_t count;
    // Slots of the last block that hold keys.
    uint32_t last_slots;
    int64_t units;
};

static __device__ __forceinline__ bool is_in_pool(const attn_tiled_args &args, int32_t block)
{
#if ATTN_MUTATION == 40
    return block >= 0;
#else
    return (uint32_t) block < args.num_pool_blocks;
#endif
}

static __device__ __forceinline__ list list_of(const attn_tiled_args &args, int32_t sequence)
{
    const int32_t given = __ldg(args.counts + sequence);
    const int32_t slots = args.valid ? __ldg(args.valid + sequence) : args.last_slots;
    list of;
    of.g_blocks = args.blocks + (int64_t) sequence * args.tile_capacity;
    of.count = max(min(given, args.tile_capacity), 0);
    of.last_slots = max(min(slots, args.block_size), 0);
#if ATTN_MUTATION == 41
    of.last_slots = args.block_size;
#endif
    of.units = 0;
    if (of.count > 0)
        of.units = (int64_t) (of.count - 1) * args.parts + (of.last_slots + KEYS - 1) / KEYS;
    if (threadIdx.x != 0) return of;
    if ((int32_t) of.count != given) report_fault(args, sequence);
    // Without valid slots nobody else looks at it.
    if (of.count > 0 && !is_in_pool(args, __ldg(of.g_blocks + of.count - 1)))
        report_fault(args, sequence);
    return of;
}

// ---- copies

// Where a unit lies in the pools, in elements; no keys: there is none.
struct unit_place {
    int64_t offset;
    int32_t keys;
};

// Of a warp: units `first` + WARPS * 0, 1, 2, ... of a list, counted from block `first_block` on.
// Lanes look up 32 of them at a time, a turn before the first of those is copied.
struct feed {
    const attn_tiled_args &args;
    const list &of;
    int32_t sequence;
    const unsigned char *g_k, *g_v;
    // The unit that this lane looks up next.
    uint32_t index, part;
    uint32_t step_blocks, step_parts;
    unit_place now, next;
    int turn;
    // Of this lane: its first piece in a unit.
    int64_t token_bytes;
    uint32_t s_piece;

    __device__ __forceinline__ feed(const attn_tiled_args &args, const lane &at, const list &of,
                                    uint32_t first_block, uint32_t first)
        : args(args), of(of), sequence(at.sequence), turn(0)
    {
        const int64_t head = at.kv_head * args.head_stride * 2;
        const int row = lane_id() / PIECES, piece = lane_id() % PIECES;
        token_bytes = args.token_stride * 2;
        g_k = static_cast<const unsigned char *>(args.k) + head + row * token_bytes + piece * 16;
        g_v = static_cast<const unsigned char *>(args.v) + head + row * token_bytes + piece * 16;
        s_piece = piece_offset(row, piece);
        const uint32_t own = first + lane_id() * WARPS;
        const uint32_t blocks = attn_divide(own, args.parts_magic, args.parts_shift);
        index = first_block + blocks;
        part = own - blocks * args.parts;
        step_blocks = attn_divide(32 * WARPS, args.parts_magic, args.parts_shift);
        step_parts = 32 * WARPS - step_blocks * args.parts;
        next = look_up();
    }

    __device__ __forceinline__ unit_place look_up()
    {
        unit_place found = { 0, 0 };
        const uint32_t slots = index + 1 < of.count ? args.block_size : of.last_slots;
        const uint32_t first = part * KEYS;
        if (index < of.count && first < slots) {
            const int32_t block = __ldg(of.g_blocks + index);
            if (is_in_pool(args, block)) {
                found.offset = block * args.block_stride + first * args.token_stride;
#if ATTN_MUTATION == 43
                found.offset = (int32_t) found.offset;
#endif
                found.keys = min(slots - first, (uint32_t) KEYS);
            } else {
                report_fault(args, sequence);
            }
        }
        index += step_blocks;
        part += step_parts;
        if (part >= args.parts) part -= args.parts, index++;
        return found;
    }

    // Starts the copies of the next unit, a group of them. Returns its keys; other rows are 0.
    __device__ __forceinline__ int32_t copy(const void *s_unit)
    {
        if (turn % 32 == 0) {
            now = next;
            next = look_up();
        }
        const int64_t offset = __shfl_sync(~0u, now.offset, turn % 32) * 2;
        const int32_t keys = __shfl_sync(~0u, now.keys, turn % 32);
        turn++;
        if (keys > 0) {
            copy_rows(shared_address(s_unit), g_k + offset, keys);
            copy_rows(shared_address(s_unit) + TILE_BYTES, g_v + offset, keys);
        }
        cp_async_commit();
        return keys;
    }

    __device__ __forceinline__ void copy_rows(uint32_t s_tile, const unsigned char *g_row,
                                              int32_t keys) const
    {
        const int row = lane_id() / PIECES;
        s_tile += s_piece;
#pragma unroll
        for (int i = 0; i < KEYS; i += COPY_ROWS) {
            // Of rows i + row, where row is below COPY_ROWS: the swizzle's bits don't meet.
            cp_async_16_unless((s_tile ^ (i & 7) * 16) + i * LINE_BYTES, g_row, row + i >= keys);
            g_row += COPY_ROWS * token_bytes;
        }
    }
};

// ---- a unit's partial

// MMA fragments of the queries of a lane; rows that there are none of are 0.
struct query {
    uint2 r[DIM_STEPS];

    __device__ __forceinline__ void load(const attn_tiled_args &args, const lane &of)
    {
        const int g = lane_id() / 4, t = lane_id() % 4;
        const uint32_t *const g_row =
            reinterpret_cast<const uint32_t *>(static_cast<const unsigned char *>(args.q) +
                                               row_of(args, of, g) * ROW_BYTES) +
            t;
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++)
            r[step] = g < of.rows ? make_uint2(__ldg(g_row + step * 8), __ldg(g_row + step * 8 + 4))
                                  : make_uint2(0, 0);
    }
};

// Of keys g and g + 8, rows 2t and 2t + 1.
static __device__ __forceinline__ void multiply_k(const query &q, const void *s_k, float (&sum)[4])
{
    // Chains of MMAs: less latency, and shorter sums, as MMAs do not round to nearest.
    constexpr int CHAINS = 2;
    float part[CHAINS][4] = {};
    const uint32_t s_piece = shared_address(s_k) + piece_offset(lane_id() % 16, lane_id() / 16);
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        uint32_t a[4];
        ldmatrix_x4(a, step_address(s_piece, step));
        mma<IS_BF16>(part[step % CHAINS], a, q.r[step].x, q.r[step].y);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = part[0][i] + part[1][i];
}

// Over the lanes of a row.
template <class F> static __device__ __forceinline__ float reduce_row(float x, F combine)
{
    x = combine(x, __shfl_xor_sync(~0u, x, 4));
    x = combine(x, __shfl_xor_sync(~0u, x, 8));
    return combine(x, __shfl_xor_sync(~0u, x, 16));
}

// e^(x - base), times 2^-shift.
static __device__ __forceinline__ float weigh(float x, float base, float shift)
{
    return ex2(__fmaf_rn(x - base, LOG2_E, -shift));
}

// Weights, as an MMA's B; m and l of rows 2t and 2t + 1.
struct unit_weights {
    uint2 p;
    float4 ml;
};

static __device__ __forceinline__ unit_weights weigh_unit(const query &q, const void *s_k,
                                                          int32_t keys, float scale)
{
    const int g = lane_id() / 4;
    float s[4], w[4], m[2], l[2];
    multiply_k(q, s_k, s);
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = g + i / 2 * 8 < keys ? __fmul_rn(s[i], scale) : -INFINITY;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        m[c] = reduce_row(max_nan(s[c], s[c + 2]), max_nan);
        const float base = finite_or_zero(m[c]);
        w[c] = weigh(s[c], base, SHIFT);
        w[c + 2] = weigh(s[c + 2], base, SHIFT);
        l[c] = reduce_row(w[c] + w[c + 2], [](float x, float y) { return x + y; });
    }
    unit_weights made;
    made.p = make_uint2(movmatrix_trans(pack<IS_BF16>(w[0], w[1])),
                        movmatrix_trans(pack<IS_BF16>(w[2], w[3])));
    made.ml = make_float4(m[0], l[0], m[1], l[1]);
    return made;
}

// Of this lane: where ldmatrix finds V transposed: rows 0 .. 7 of two pieces, then rows 8 .. 15.
static __device__ __forceinline__ uint32_t first_v(const void *s_v)
{
    const int lane = lane_id();
    return shared_address(s_v) + piece_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Columns 16 * step + g and + 8 of o, of rows 2t and 2t + 1.
static __device__ __forceinline__ void multiply_v(uint2 p, uint32_t s_row, int step,
                                                  float (&part)[4])
{
    uint32_t a[4];
    ldmatrix_x4_trans(a, step_address(s_row, step));
#pragma unroll
    for (int i = 0; i < 4; i++) part[i] = 0.0f;
    mma<IS_BF16>(part, a, p.x, p.y);
}

// ---- the fold

// What the state of a row and a partial are multiplied with.
struct fold_weights {
    float keep, add;

    __device__ __forceinline__ float apply(float state, float part) const
    {
        return __fmaf_rn(part, add, __fmul_rn(state, keep));
    }
};

static __device__ __forceinline__ fold_weights fold_row(float &m, float &l, float part_m,
                                                        float part_l)
{
    const float top = max_nan(m, part_m), base = finite_or_zero(top);
    const fold_weights by = { weigh(m, base, 0.0f), weigh(part_m, base, -SHIFT) };
    m = top;
    l = by.apply(l, part_l);
    return by;
}

// The state of a lane: of rows 2t and 2t + 1, this warp's columns 16 * step + g and + 8.
struct state {
    float m[2], l[2], o[STEPS][4];

    template <bool IS_LOAD, class F>
    __device__ __forceinline__ void each(const attn_tiled_args &args, const lane &of, F visit)
    {
        const int g = lane_id() / 4, t = lane_id() % 4, first = warp_id() * STEPS;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int row = t * 2 + c;
            const int64_t g_row = row_of(args, of, row);
            if (row >= of.rows) continue;
            // All warps that have columns have the same m and l.
            if (lane_id() < 4 && (first == 0 || IS_LOAD)) {
                visit(args.m + g_row, m[c]);
                visit(args.l + g_row, l[c]);
            }
            float *const g_o = args.o + g_row * HEAD_DIM + first * 16 + g;
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                if (first + d >= DIM_STEPS) continue;
                visit(g_o + d * 16, o[d][c]);
                visit(g_o + d * 16 + 8, o[d][c + 2]);
            }
        }
    }

    __device__ __forceinline__ void load(const attn_tiled_args &args, const lane &of)
    {
#pragma unroll
        for (int c = 0; c < 2; c++) m[c] = l[c] = 0.0f;
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[d][i] = 0.0f;
        each<true>(args, of, [](const float *g_x, float &x) { x = *g_x; });
#pragma unroll
        for (int c = 0; c < 2; c++) {
            m[c] = __shfl_sync(~0u, m[c], lane_id() % 4);
            l[c] = __shfl_sync(~0u, l[c], lane_id() % 4);
        }
    }

    __device__ __forceinline__ void store(const attn_tiled_args &args, const lane &of)
    {
        each<false>(args, of, [](float *g_x, float x) { *g_x = x; });
    }

    __device__ __forceinline__ void fold(const float4 &ml, const float (&part)[STEPS][4])
    {
        const fold_weights by[2] = { fold_row(m[0], l[0], ml.x, ml.y),
                                     fold_row(m[1], l[1], ml.z, ml.w) };
#pragma unroll
        for (int d = 0; d < STEPS; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[d][i] = by[i % 2].apply(o[d][i], part[d][i]);
    }
};

// IS_WHOLE: all units of the round are there, and nothing is in the way of doing much at a time.
template <bool IS_WHOLE>
static __device__ __forceinline__ void fold_units(const smem &s, int stage, int told, state &r)
{
    const int t = lane_id() % 4, first = warp_id() * STEPS;
    float part[WARPS][STEPS][4];
    const uint32_t s_row = first_v(s.ring[stage][0][1]);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const uint2 p = s.p[told][i][lane_id()];
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            multiply_v(p, s_row + i * 2 * TILE_BYTES, first + d, part[i][d]);
    }
#pragma unroll
#if ATTN_MUTATION == 42
    for (int i = WARPS - 1; i >= 0; i--)
#else
    for (int i = 0; i < WARPS; i++)
#endif
        if (IS_WHOLE || s.keys[stage][i] > 0)
            r.fold(*reinterpret_cast<const float4 *>(&s.ml[told][i][t * 2]), part[i]);
}

static __device__ __forceinline__ void fold_round(const smem &s, int stage, int told, state &r)
{
    bool is_whole = true;
    if (warp_id() * STEPS >= DIM_STEPS) return;
#pragma unroll
    for (int i = 0; i < WARPS; i++) is_whole &= s.keys[stage][i] > 0;
    if (is_whole)
        fold_units<true>(s, stage, told, r);
    else
        fold_units<false>(s, stage, told, r);
}

static __device__ __forceinline__ void fold_tile(const attn_tiled_args &args, smem &s)
{
    const lane at = lane_of(args, blockIdx.x);
    const list of = list_of(args, at.sequence);
    if (of.units == 0) return;
    const int64_t rounds = (of.units - 1) / WARPS + 1;
    const int warp = warp_id();
    feed copies(args, at, of, 0, warp);
    const auto copy = [&](int stage) {
        const int32_t keys = copies.copy(s.ring[stage][warp]);
        if (lane_id() == 0) s.keys[stage][warp] = keys;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copy(i);
    query q;
    state r;
    q.load(args, at);
    r.load(args, at);
    int stage = 0, told = 0;
#pragma unroll 1
    for (int64_t round = 0; round < rounds; round++) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        const int32_t keys = s.keys[stage][warp];
        if (keys > 0) {
            const unit_weights w = weigh_unit(q, s.ring[stage][warp][0], keys, args.scale);
            s.p[told][warp][lane_id()] = w.p;
            if (lane_id() < 4) *reinterpret_cast<float4 *>(&s.ml[told][warp][lane_id() * 2]) = w.ml;
        }
        // The round before is done with, too: its place is free.
        __syncthreads();
        copy(stage == 0 ? STAGES - 1 : stage - 1);
        fold_round(s, stage, told, r);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        told ^= 1;
    }
    r.store(args, at);
}

// ---- partials by way of the workspace

// The units of the range that a list has.
static __device__ __forceinline__ int32_t count_units(const attn_tiled_args &args, const list &of)
{
    return (int32_t) max(min(of.units - args.first_unit, (int64_t) args.range), (int64_t) 0);
}

// The first row of a unit of the range.
static __device__ __forceinline__ int64_t partial_of(const attn_tiled_args &args, uint32_t lane,
                                                     int32_t unit)
{
    return ((int64_t) lane * args.range + unit) * args.lane_rows;
}

static __device__ __forceinline__ void store_partial(const attn_tiled_args &args, const lane &at,
                                                     int64_t g_row, const unit_weights &w,
                                                     const void *s_v)
{
    const int g = lane_id() / 4, t = lane_id() % 4;
    float *const g_o = args.partials + (g_row + t * 2) * HEAD_DIM + g;
    float *const g_ml = args.partials_ml + (g_row + t * 2) * 2;
    const uint32_t s_row = first_v(s_v);
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
        float part[4];
        multiply_v(w.p, s_row, step, part);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (t * 2 + i % 2 < at.rows) g_o[i % 2 * HEAD_DIM + step * 16 + i / 2 * 8] = part[i];
    }
    if (g != 0) return;
    if (t * 2 < at.rows) g_ml[0] = w.ml.x, g_ml[1] = w.ml.y;
    if (t * 2 + 1 < at.rows) g_ml[2] = w.ml.z, g_ml[3] = w.ml.w;
}

static __device__ __forceinline__ void make_partials(const attn_tiled_args &args, smem &s)
{
    const uint32_t chunk = attn_divide(blockIdx.x, args.all_lanes_magic, args.all_lanes_shift);
    const uint32_t index = blockIdx.x - chunk * args.all_lanes;
    const lane at = lane_of(args, index);
    const list of = list_of(args, at.sequence);
    const int32_t first = chunk * ATTN_TILED_CHUNK + warp_id(), units = count_units(args, of);
    const int32_t end = min(units, (int32_t) (chunk + 1) * ATTN_TILED_CHUNK);
    if (first >= end) return;
    feed copies(args, at, of, args.first_block, args.first_part + first);
    const auto copy = [&](int stage) {
        const int32_t keys = copies.copy(s.ring[stage][warp_id()]);
        if (lane_id() == 0) s.keys[stage][warp_id()] = keys;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copy(i);
    query q;
    q.load(args, at);
    int stage = 0;
#pragma unroll 1
    for (int32_t unit = first; unit < end; unit += WARPS) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        // Nor does this warp read its place of before any more.
        copy(stage == 0 ? STAGES - 1 : stage - 1);
        const int32_t keys = s.keys[stage][warp_id()];
        const int64_t g_row = partial_of(args, index, unit);
        if (keys > 0) {
            const unsigned char(&s_unit)[2][TILE_BYTES] = s.ring[stage][warp_id()];
            store_partial(args, at, g_row, weigh_unit(q, s_unit[0], keys, args.scale), s_unit[1]);
        } else if (lane_id() < at.rows) {
            args.partials_ml[(g_row + lane_id()) * 2 + 1] = -1.0f;
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
}

// Columns of a thread.
constexpr int COLUMNS = (HEAD_DIM + THREADS - 1) / THREADS;

static __device__ __forceinline__ bool is_column(int i)
{
    return HEAD_DIM % THREADS == 0 || (int) threadIdx.x + i * THREADS < HEAD_DIM;
}

// Some units' partials, of a row and a thread's columns.
struct partials {
    static constexpr int UNITS = 16;
    float2 ml[UNITS];
    float o[UNITS][COLUMNS];

    // Beyond the last unit: that one again.
    __device__ __forceinline__ void load(const attn_tiled_args &args, int64_t g_row, int32_t first,
                                         int32_t units)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
#if ATTN_MUTATION == 44
            const int64_t row = g_row + (int64_t) min(first + (u ^ 1), units - 1) * args.lane_rows;
#else
            const int64_t row = g_row + (int64_t) min(first + u, units - 1) * args.lane_rows;
#endif
            ml[u] = __ldcg(reinterpret_cast<const float2 *>(args.partials_ml) + row);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                o[u][i] = is_column(i)
                              ? __ldcg(args.partials + row * HEAD_DIM + threadIdx.x + i * THREADS)
                              : 0.0f;
        }
    }
};

struct row_state {
    float m, l, o[COLUMNS];

    template <bool IS_WHOLE>
    __device__ __forceinline__ void fold_units(const partials &p, int32_t count)
    {
#pragma unroll
        for (int u = 0; u < partials::UNITS; u++) {
            if (!IS_WHOLE && (u >= count || p.ml[u].y < 0.0f)) continue;
            const fold_weights by = fold_row(m, l, p.ml[u].x, p.ml[u].y);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) o[i] = by.apply(o[i], p.o[u][i]);
        }
    }

    // The first `count` of them, as far as they are units.
    __device__ __forceinline__ void fold(const partials &p, int32_t count)
    {
        bool is_whole = count >= partials::UNITS;
#pragma unroll
        for (int u = 0; u < partials::UNITS; u++) is_whole &= !(p.ml[u].y < 0.0f);
        if (is_whole)
            fold_units<true>(p, count);
        else
            fold_units<false>(p, count);
    }
};

static __device__ __forceinline__ void fold_partials(const attn_tiled_args &args)
{
    const uint32_t index = blockIdx.x / ROWS;
    const int row = blockIdx.x % ROWS;
    const lane at = lane_of(args, index);
    if (row >= at.rows) return;
    const list of = list_of(args, at.sequence);
    const int32_t units = count_units(args, of);
    if (units == 0) return;
    const int64_t g_row = row_of(args, at, row), g_part = partial_of(args, index, 0) + row;
    float *const g_o = args.o + g_row * HEAD_DIM + threadIdx.x;
    partials now, next;
    now.load(args, g_part, 0, units);
    row_state r;
    r.m = args.m[g_row];
    r.l = args.l[g_row];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) r.o[i] = is_column(i) ? g_o[i * THREADS] : 0.0f;
    // All have read m and l.
    __syncthreads();
#pragma unroll 1
    for (int32_t first = 0; first < units; first += 2 * partials::UNITS) {
        next.load(args, g_part, first + partials::UNITS, units);
        r.fold(now, units - first);
        now.load(args, g_part, first + 2 * partials::UNITS, units);
        r.fold(next, units - first - partials::UNITS);
    }
    if (threadIdx.x == 0) args.m[g_row] = r.m, args.l[g_row] = r.l;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (is_column(i)) g_o[i * THREADS] = r.o[i];
}

// ---- before and after

// Rows of the state, a warp one at a time.
template <class F> static __device__ __forceinline__ void each_row(const attn_tiled_args &args, F f)
{
    for (int64_t row = (int64_t) blockIdx.x * WARPS + warp_id(); row < args.num_rows;
         row += (int64_t) gridDim.x * WARPS)
        f(row);
}

static __device__ __forceinline__ void begin(const attn_tiled_args &args)
{
    each_row(args, [&](int64_t row) {
        float2 *const g_o = reinterpret_cast<float2 *>(args.o + row * HEAD_DIM);
        if (lane_id() == 0) args.m[row] = -INFINITY, args.l[row] = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += 32) g_o[i + lane_id()] = make_float2(0.0f, 0.0f);
    });
}

static __device__ __forceinline__ void finalize(const attn_tiled_args &args)
{
    each_row(args, [&](int64_t row) {
        const float m = args.m[row], l = args.l[row];
        const float2 *const g_o = reinterpret_cast<const float2 *>(args.o + row * HEAD_DIM);
        uint32_t *const g_output = static_cast<uint32_t *>(args.output) + row * (HEAD_DIM / 2);
        // + 0: a sum of zeros has no sign.
        const auto divide = [=](float o) { return l == 0.0f ? 0.0f : __fdiv_rn(o, l) + 0.0f; };
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += 32) {
            const float2 o = g_o[i + lane_id()];
            g_output[i + lane_id()] = pack<IS_BF16>(divide(o.x), divide(o.y));
        }
        if (args.lse && lane_id() == 0)
            args.lse[row] = l == 0.0f ? -INFINITY : __fmaf_rn(lg2(l), LN_2, finite_or_zero(m));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, ROW_PER_SM)
    ROW_NAME(const __grid_constant__ struct attn_tiled_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);
    let_next_grid_come();
    wait_for_grids_before();
    switch (args.what) {
    case ATTN_TILED_BEGIN: begin(args); break;
    case ATTN_TILED_FOLD: fold_tile(args, s); break;
    case ATTN_TILED_PARTIALS: make_partials(args, s); break;
    case ATTN_TILED_FOLD_PARTIALS: fold_partials(args); break;
    default: finalize(args); break;
    }
}

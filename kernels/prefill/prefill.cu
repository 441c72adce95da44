/* SPDX-License-Identifier: Apache-2.0 */
// Prefill: a block takes ROWS query tokens of one query head and folds the tiles of keys that they
// see, from the first to the last. Each warp has 16 rows, or several times 16: S = Q K^T, weights
// relative to the largest score so far, O += P V, all of it in its registers. Of rows too wide for
// that, two warps share 16: each has half of the keys of a tile, whose weights they exchange, and
// half of the columns of O. One warp copies K and V into a ring, as far ahead as that has room.
//
// Rows in parts of 64 are what the originals' blocks are: a part leaves out the tiles that none of
// its rows sees, whatever the others do. So a twin's bits are the original's.
//
// Bound by the tensor cores: 8192 tokens, causal, 24 heads, HEAD_DIM 256, are 0.82 TFLOP, 0.83 ms
// at 990 TFLOP/s. An MMA takes 256 bytes of K or V from shared memory, two clocks of it: 16 rows a
// warp reach half of that at most, 32 rows, which take half as many, what mma.sync has.

#include "common/ptx_matrix.cuh"
#include "common/ptx_team.cuh"
#include "prefill/output.cuh"
#include "prefill/scores.cuh"

// Warps that share 16 rows.
constexpr int SHARES = HEAD_DIM > 256 ? 2 : 1;
constexpr int TELLERS = SHARES > 1 ? WARPS : 1;
// Of a warp: times 16 rows; 8 keys of a tile; 8 columns of O.
constexpr int ROW_TILES = ROWS * SHARES / (WARPS * 16);
constexpr int KEY_BLOCKS = TILE / 8 / SHARES;
constexpr int DIM_BLOCKS = HEAD_DIM / 8 / SHARES;
// Steps of 16 columns of Q and K, of 16 keys of P and V.
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int KEY_STEPS = TILE / 16;
// Registers of a thread at the start, then of one that copies and of one that multiplies. They can
// be moved between warps 4 by 4.
constexpr bool MOVES_REGISTERS = COPIERS == 4;
constexpr int START_REGISTERS = 65536 / (ROW_PER_SM * BLOCK_THREADS) / 8 * 8;
constexpr int COPY_REGISTERS = 40;
constexpr int ALL_REGISTERS = START_REGISTERS * (WARPS + COPIERS);
constexpr int MATH_REGISTERS = (ALL_REGISTERS - COPY_REGISTERS * COPIERS) / WARPS / 8 * 8;

struct smem {
    // Later O: each warp's own rows.
    unsigned char q[ROWS / GROUP][GROUP_BYTES];
    // Tiles in turn: K, V.
    unsigned char ring[STAGES][TILE_BYTES];
    // What warps that share rows tell each other: weights, of each row the largest score.
    alignas(16) uint2 p[TELLERS][SHARES > 1 ? KEY_BLOCKS : 1][SHARES > 1 ? 32 : 1];
    float row[TELLERS][SHARES > 1 ? 16 : 1];
    // It is there; it was read.
    uint64_t full[STAGES], empty[STAGES];
    // Of K: a bit for each key that is not on a bad page.
    uint64_t there[STAGES];
    work w;
};

static_assert(ROWS * SHARES == ROW_TILES * WARPS * 16, "each warp has as many rows");
static_assert(ROW_TILES * 16 <= PART_ROWS, "a warp's rows are in one part");
static_assert(TILE <= 64, "smem::there has the bits");
static_assert(KEY_BLOCKS == 1 || KEY_BLOCKS % 2 == 0, "an ldmatrix takes 8 or 16 keys");
static_assert(STAGES >= 2, "K and V of a tile");
static_assert(sizeof(smem) <= SMEM_BYTES, "the host asks for what the kernel uses");

// ---- the warp that copies

struct feed {
    const attn_prefill_args &args;
    smem &s;
    ring_place<STAGES> at;

    __device__ __forceinline__ feed(const attn_prefill_args &the_args, smem &the_smem)
        : args(the_args), s(the_smem), at{ 0, 0 }
    {
    }

    // The page of a key; -1: some query token of the sequence sees it, but it is not in the pool.
    // Entries of keys that none sees are not looked at.
    __device__ __forceinline__ int32_t find_page(int32_t key) const
    {
        if (!args.block_table) return 0;
        const int64_t entry = s.w.sequence * args.table_stride +
                              attn_divide((uint32_t) key, args.page_magic, args.page_shift);
        const int32_t page = __ldg(args.block_table + entry);
        if (page >= 0 && page < args.num_pages) return page;
        report_fault(args, s.w.sequence);
        return -1;
    }

    // A key's place in its page, which is all of contiguous K and V.
    __device__ __forceinline__ int64_t slot_of(int32_t key) const
    {
        if (!args.block_table) return s.w.of.first_key + key;
        const uint32_t page = attn_divide((uint32_t) key, args.page_magic, args.page_shift);
        return (int32_t) ((uint32_t) key - page * (uint32_t) args.page_size);
    }

    // Returns the barrier of the place.
    __device__ __forceinline__ uint32_t wait_for_room() const
    {
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        return shared_address(&s.full[at.slot]);
    }

    // ---- by boxes

    // The page of the group of keys that is lane_id() groups after the first of a tile; -1: none of
    // them is wanted, or there is no such page.
    __device__ __forceinline__ int32_t find_group(int32_t tile) const
    {
        const int64_t key = (int64_t) tile * TILE + lane_id() * GROUP;
        if (key >= s.w.keys.end || key >= s.w.tiles.end * (int64_t) TILE) return -1;
        return key + GROUP <= s.w.keys.start ? -1 : find_page((int32_t) key);
    }

    // K or V of a tile. `groups`: those that there are; `index`: the lane that has the first one's
    // page.
    __device__ __forceinline__ void copy_boxes(const attn_box_map &map, uint32_t s_full,
                                               int32_t page, uint32_t groups, int index,
                                               int32_t slot)
    {
        const int group = lane_id() - index;
        // Rows may have been copied there before.
        fence_async();
        if (lane_id() == 0) barrier_arrive_expect(s_full, __popc(groups) * GROUP_BYTES);
        __syncwarp();
        if (group >= 0 && group < GROUPS && groups >> group & 1)
            copy_box(shared_address(s.ring[at.slot]) + group * GROUP_BYTES, &map, s_full, slot,
                     s.w.kv_head, page);
        __syncwarp();
        at.next();
    }

    static __device__ __forceinline__ uint64_t keys_of_groups(uint32_t groups)
    {
        uint64_t keys = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            if (groups >> g & 1) keys |= (uint64_t) 0xFFFF << g * GROUP;
        return keys;
    }

    // What no query token of the sequence sees must not be in V, where a box may bring NaN along:
    // such tiles are copied by rows.
    __device__ __forceinline__ void feed_boxes(int32_t tile, int32_t page, int index)
    {
        constexpr uint32_t ALL = (1u << GROUPS) - 1;
        const uint32_t groups = __ballot_sync(~0u, page >= 0) >> index & ALL;
        const int32_t key = tile * TILE;
        const int32_t slot = (int32_t) slot_of(key + (lane_id() - index) * GROUP);
        const uint32_t s_k = wait_for_room();
        if (lane_id() == 0) s.there[at.slot] = keys_of_groups(groups);
        copy_boxes(args.k_map, s_k, page, groups, index, slot);
        const uint32_t s_v = wait_for_room();
        if (groups == ALL && key >= s.w.keys.start && key <= s.w.keys.end - TILE) {
            copy_boxes(args.v_map, s_v, page, groups, index, slot);
        } else {
            int32_t pages[WORDS];
            find_pages(tile, pages);
            copy_rows(args.v, s_v, args.v_page_stride, args.v_token_stride,
                      s.w.kv_head * args.v_head_stride, tile, pages);
        }
    }

    __device__ __forceinline__ void run_boxes()
    {
        // Pages of as many tiles are looked up together, and those of the next as many meanwhile.
        constexpr int AT_ONCE = 32 / GROUPS;
        const key_range tiles = s.w.tiles;
        int32_t next = find_group(tiles.start);
#pragma unroll 1
        for (int32_t first = tiles.start; first < tiles.end; first += AT_ONCE) {
            const int32_t now = next, end = min(first + AT_ONCE, tiles.end);
            next = end < tiles.end ? find_group(end) : -1;
#pragma unroll 1
            for (int32_t tile = first; tile < end; tile++)
                feed_boxes(tile, now, (tile - first) * GROUPS);
        }
    }

    // ---- by rows

    // Pages of this lane's keys of a tile, one of each 32; -1: absent.
    __device__ __forceinline__ void find_pages(int32_t tile, int32_t (&pages)[WORDS]) const
    {
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const int own = j * 32 + lane_id();
            const int64_t key = (int64_t) tile * TILE + own;
            pages[j] = -1;
            if (own < TILE && key >= s.w.keys.start && key < s.w.keys.end)
                pages[j] = find_page((int32_t) key);
        }
    }

    // K or V of a tile; zeros for absent keys.
    __device__ __forceinline__ void copy_rows(const void *g_pool, uint32_t s_full,
                                              int64_t page_stride, int64_t token_stride,
                                              int64_t head_offset, int32_t tile,
                                              const int32_t (&pages)[WORDS])
    {
        constexpr int ROW_LANES = PIECES < 32 ? PIECES : 32, AT_ONCE = 32 / ROW_LANES;
        const unsigned char *const g_head =
            static_cast<const unsigned char *>(g_pool) + head_offset * 2;
        const int column = lane_id() % ROW_LANES, first_row = lane_id() / ROW_LANES;
        const uint32_t s_tile = shared_address(s.ring[at.slot]);
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const int count = TILE - j * 32 < 32 ? TILE - j * 32 : 32;
            const int32_t key = tile * TILE + j * 32 + lane_id();
            int64_t offset = -1;
            if (pages[j] >= 0) offset = (pages[j] * page_stride + slot_of(key) * token_stride) * 2;
#pragma unroll 2
            for (int i = first_row; i < count; i += AT_ONCE) {
                const int64_t from = __shfl_sync(~0u, offset, i);
                const int row = j * 32 + i;
                const uint32_t s_group = s_tile + row / GROUP * GROUP_BYTES;
                // Of a negative offset nothing is read.
#pragma unroll
                for (int piece = 0; piece < PIECES; piece += ROW_LANES)
                    cp_async_16(s_group + piece_offset(row % GROUP, piece + column),
                                g_head + (from < 0 ? 0 : from) + (piece + column) * 16,
                                from < 0 ? 0 : 16);
            }
        }
        cp_async_arrive_extra(s_full);
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(s_full);
        at.next();
    }

    __device__ __forceinline__ void feed_rows(int32_t tile, const int32_t (&pages)[WORDS])
    {
        uint64_t there = 0;
#pragma unroll
        for (int j = 0; j < WORDS; j++)
            there |= (uint64_t) __ballot_sync(~0u, pages[j] >= 0) << j * 32;
        const uint32_t s_k = wait_for_room();
        if (lane_id() == 0) s.there[at.slot] = there;
        copy_rows(args.k, s_k, args.k_page_stride, args.k_token_stride,
                  s.w.kv_head * args.k_head_stride, tile, pages);
        copy_rows(args.v, wait_for_room(), args.v_page_stride, args.v_token_stride,
                  s.w.kv_head * args.v_head_stride, tile, pages);
    }

    __device__ __forceinline__ void run_rows()
    {
        const key_range tiles = s.w.tiles;
        int32_t next[WORDS];
        if (tiles.start < tiles.end) find_pages(tiles.start, next);
#pragma unroll 1
        for (int32_t tile = tiles.start; tile < tiles.end; tile++) {
            int32_t now[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; j++) now[j] = next[j];
            if (tile + 1 < tiles.end) find_pages(tile + 1, next);
            feed_rows(tile, now);
        }
    }

    __device__ __forceinline__ void run()
    {
        if (args.has_boxes)
            run_boxes();
        else
            run_rows();
    }
};

// ---- the warps that multiply

// Of a lane that gives the address of piece s_piece of a row of a group: of the piece `pair` pairs
// further on. All of a tile come from few values of the xor.
static __device__ __forceinline__ uint32_t pair_address(uint32_t s_piece, uint32_t offset, int pair)
{
    constexpr int LINE_PAIRS = LINE_PIECES / 2;
    return (s_piece ^ (pair % LINE_PAIRS * 32)) + offset + pair / LINE_PAIRS * GROUP * LINE_BYTES;
}

struct team {
    const attn_prefill_args &args;
    smem &s;
    ring_place<STAGES> at;
    scaling by;
    // Where this lane's part of an ldmatrix lies, without the place in the ring: of the warp's rows
    // of Q; of K; of V, from the warp's first column on.
    uint32_t s_q, s_k, s_v;
    // All rows of the warp see keys [whole.start, whole.end).
    key_range whole;
    // Sums; the largest score so far, not scaled yet; this lane's part of the sum of weights.
    float o[ROW_TILES][DIM_BLOCKS][4];
    float m[ROW_TILES][2], l[ROW_TILES][2];

    // The warp's first row; which of the warps that share it this is.
    static __device__ __forceinline__ int first_row()
    {
        return warp_id() / SHARES * ROW_TILES * 16;
    }
    static __device__ __forceinline__ int share()
    {
        return SHARES > 1 ? warp_id() % SHARES : 0;
    }

    __device__ __forceinline__ team(const attn_prefill_args &the_args, smem &the_smem)
        : args(the_args), s(the_smem), at{ 0, 0 }, by(scaling_of(the_args)), o{}, l{}
    {
        const int lane = lane_id();
        const int32_t token = s.w.first_row + first_row();
        s_q = shared_address(s.q[first_row() / GROUP]) + piece_offset(lane % 16, lane / 16);
        s_k = shared_address(s.ring);
        if constexpr (KEY_BLOCKS == 1)
            s_k += piece_offset(share() * 8 + lane % 8, lane / 8);
        else
            s_k += share() * (KEY_BLOCKS / 2) * GROUP_BYTES +
                   piece_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        s_v = shared_address(s.ring) + share() * DIM_BLOCKS / LINE_PIECES * GROUP * LINE_BYTES +
              piece_offset(lane % 16, lane / 16);
        whole.start = keys_of(args, s.w.of, token + ROW_TILES * 16 - 1).start;
        whole.end = keys_of(args, s.w.of, token).end;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) m[i][0] = m[i][1] = -INFINITY;
    }

    // The warp's rows of Q, each half of a row by one of the warps that share it; zeros where the
    // sequence has no more.
    __device__ __forceinline__ void load_q()
    {
        constexpr int COUNT = PIECES / SHARES;
        const int64_t head_offset = (int64_t) s.w.head * HEAD_DIM;
        const uint16_t *const g_q = static_cast<const uint16_t *>(args.q) + head_offset;
#pragma unroll 8
        for (int i = lane_id(); i < ROW_TILES * 16 * COUNT; i += 32) {
            const int row = i / COUNT, piece = share() * COUNT + i % COUNT;
            const int32_t token = s.w.first_row + first_row() + row;
            const bool is_token = token < s.w.of.q_len;
            const int64_t offset =
                is_token ? (s.w.of.first_token + token) * args.q_token_stride : 0;
            cp_async_16(shared_address(s.q[(first_row() + row) / GROUP]) +
                            piece_offset(row % GROUP, piece),
                        g_q + offset + piece * 8, is_token ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        sync_sharers();
    }

    // The warps that share rows.
    static __device__ __forceinline__ void sync_sharers()
    {
        if constexpr (SHARES > 1)
            named_sync(1 + warp_id() / SHARES, SHARES * 32);
        else
            __syncwarp();
    }

    __device__ __forceinline__ void wait_for_tile() const
    {
        barrier_wait(shared_address(&s.full[at.slot]), at.phase);
    }

    __device__ __forceinline__ void free_tile()
    {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.empty[at.slot]));
        at.next();
    }

    // ---- scores: of a lane, row g, then g + 8, of each 8 keys 2t and 2t + 1

    using scores = float[ROW_TILES][KEY_BLOCKS][4];

    __device__ __forceinline__ void load_q_step(int step, uint32_t (&a)[ROW_TILES][4]) const
    {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
            ldmatrix_x4(a[i], pair_address(s_q, i * GROUP_BYTES, step));
    }

    // 8 keys: an ldmatrix takes two steps of them.
    __device__ __forceinline__ void score_8(scores &r_s) const
    {
        const uint32_t offset = at.slot * TILE_BYTES;
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step += 2) {
            uint32_t b[4], a[ROW_TILES][4];
            ldmatrix_x4(b, pair_address(s_k, offset, step));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                load_q_step(step + half, a);
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++)
                    mma<IS_BF16>(r_s[i][0], a[i], b[half * 2], b[half * 2 + 1]);
            }
        }
    }

    // 16 keys at a time.
    __device__ __forceinline__ void score_16(scores &r_s) const
    {
#pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            uint32_t a[ROW_TILES][4];
            load_q_step(step, a);
#pragma unroll
            for (int j = 0; j < KEY_BLOCKS / 2; j++) {
                uint32_t b[4];
                ldmatrix_x4(b, pair_address(s_k, at.slot * TILE_BYTES + j * GROUP_BYTES, step));
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        mma<IS_BF16>(r_s[i][j * 2 + half], a[i], b[half * 2], b[half * 2 + 1]);
            }
        }
    }

    __device__ __forceinline__ void score(scores &r_s) const
    {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int j = 0; j < KEY_BLOCKS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) r_s[i][j][c] = 0.0f;
        if constexpr (KEY_BLOCKS == 1)
            score_8(r_s);
        else
            score_16(r_s);
    }

    // Scores of keys that a row does not see, or that are on a bad page.
    __device__ __forceinline__ void mask(int32_t tile, uint64_t there, scores &r_s) const
    {
        const int lane = rare_lane_id();
        const int first = share() * KEY_BLOCKS * 8 + lane % 4 * 2;
        const uint64_t own = there >> first;
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int32_t token = s.w.first_row + first_row() + i * 16 + r * 8 + lane / 4;
                const key_range keys = keys_of(args, s.w.of, token);
                const uint32_t count = (uint32_t) (keys.end - keys.start);
                const uint32_t from = (uint32_t) (tile * TILE + first - keys.start);
#pragma unroll
                for (int j = 0; j < KEY_BLOCKS; j++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        if (from + j * 8 + c >= count || !(own >> (j * 8 + c) & 1))
                            r_s[i][j][r * 2 + c] = -INFINITY;
            }
    }

    __device__ __forceinline__ void mask_if_needed(int32_t tile, uint64_t there, scores &r_s) const
    {
        const int32_t key = tile * TILE;
        const bool all = there == ~(uint64_t) 0 >> (64 - TILE);
        if (!all || key < whole.start || key > whole.end - TILE) mask(tile, there, r_s);
    }

    // ---- weights

    // The largest score of each row, those before included.
    __device__ __forceinline__ void find_max(const scores &r_s, float (&top)[ROW_TILES][2])
    {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = max_nan(r_s[i][0][r * 2], r_s[i][0][r * 2 + 1]);
#pragma unroll
                for (int j = 1; j < KEY_BLOCKS; j++)
                    x = max_nan(x, max_nan(r_s[i][j][r * 2], r_s[i][j][r * 2 + 1]));
                x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
                x = max_nan(x, __shfl_xor_sync(~0u, x, 2));
                top[i][r] = max_nan(m[i][r], x);
            }
        if constexpr (SHARES > 1) {
            float other[2] = { top[0][0], top[0][1] };
            exchange_rows(other);
            top[0][0] = max_nan(top[0][0], other[0]);
            top[0][1] = max_nan(top[0][1], other[1]);
        }
    }

    // What lanes of the warp have for rows g and g + 8, and what those of the other have.
    __device__ __forceinline__ void exchange_rows(float (&value)[2])
    {
        const int g = lane_id() / 4;
        if (lane_id() % 4 == 0) {
            s.row[warp_id()][g] = value[0];
            s.row[warp_id()][g + 8] = value[1];
        }
        sync_sharers();
        value[0] = s.row[warp_id() ^ 1][g];
        value[1] = s.row[warp_id() ^ 1][g + 8];
    }

    // Of a row, from scores weights; what was summed before counts less by what is returned.
    __device__ __forceinline__ float weigh_row(scores &r_s, int i, int r, float top)
    {
        // -inf before any key is seen: alpha is 0.
        const float before = __fmaf_rn(m[i][r], by.factor, SHIFT);
        const float base = top == -INFINITY ? SHIFT : __fmaf_rn(top, by.factor, SHIFT);
        const float alpha = ex2(before - base);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; j++)
#pragma unroll
            for (int c = r * 2; c < r * 2 + 2; c++) {
                r_s[i][j][c] = ex2(__fmaf_rn(r_s[i][j][c], by.factor, -base));
                sum += r_s[i][j][c];
            }
        l[i][r] = __fmaf_rn(l[i][r], alpha, sum);
        m[i][r] = top;
        return alpha;
    }

    __device__ __forceinline__ void weigh(scores &r_s)
    {
        float top[ROW_TILES][2];
        find_max(r_s, top);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const float alpha[2] = { weigh_row(r_s, i, 0, top[i][0]),
                                     weigh_row(r_s, i, 1, top[i][1]) };
            // Times 1 changes nothing.
            if (!__ballot_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) continue;
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][d][c] = __fmul_rn(o[i][d][c], alpha[c / 2]);
        }
    }

    // ---- sums

    // Weights as the MMA's A.
    using weights = uint32_t[ROW_TILES][KEY_STEPS][4];

    __device__ __forceinline__ void pack_weights(const scores &r_s, weights &p)
    {
        if constexpr (SHARES > 1) {
#pragma unroll
            for (int j = 0; j < KEY_BLOCKS; j++)
                s.p[warp_id()][j][lane_id()] =
                    make_uint2(pack<IS_BF16>(r_s[0][j][0], r_s[0][j][1]),
                               pack<IS_BF16>(r_s[0][j][2], r_s[0][j][3]));
            sync_sharers();
#pragma unroll
            for (int j = 0; j < KEY_STEPS * 2; j++) {
                const uint2 pair =
                    s.p[warp_id() / SHARES * SHARES + j / KEY_BLOCKS][j % KEY_BLOCKS][lane_id()];
                p[0][j / 2][j % 2 * 2] = pair.x;
                p[0][j / 2][j % 2 * 2 + 1] = pair.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                for (int j = 0; j < KEY_BLOCKS; j++) {
                    p[i][j / 2][j % 2 * 2] = pack<IS_BF16>(r_s[i][j][0], r_s[i][j][1]);
                    p[i][j / 2][j % 2 * 2 + 1] = pack<IS_BF16>(r_s[i][j][2], r_s[i][j][3]);
                }
        }
    }

    __device__ __forceinline__ void accumulate(const weights &p)
    {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS / 2; d++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b,
                                  pair_address(s_v, at.slot * TILE_BYTES + step * GROUP_BYTES, d));
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        mma<IS_BF16>(o[i][d * 2 + half], p[i][step], b[half * 2], b[half * 2 + 1]);
            }
    }

    // ---- in order

    __device__ __forceinline__ void attend(int32_t tile)
    {
        scores r_s;
        weights p;
        wait_for_tile();
        const uint64_t there = s.there[at.slot];
        score(r_s);
        free_tile();
        if (by.is_first) scale_first(r_s);
        mask_if_needed(tile, there, r_s);
        weigh(r_s);
        pack_weights(r_s, p);
        wait_for_tile();
        accumulate(p);
        free_tile();
    }

    __device__ __forceinline__ void scale_first(scores &r_s) const
    {
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int j = 0; j < KEY_BLOCKS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) r_s[i][j][c] = scale_score(by, r_s[i][j][c]);
    }

    __device__ __forceinline__ void skip()
    {
        wait_for_tile();
        free_tile();
        wait_for_tile();
        free_tile();
    }

    __device__ __forceinline__ void store()
    {
        const float sink = sink_of(args, s.w.head);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int row = first_row() + i * 16;
            const int32_t token = s.w.first_row + row;
            float sum[2] = { sum_quad(l[i][0]), sum_quad(l[i][1]) };
            if constexpr (SHARES > 1) {
                float other[2] = { sum[0], sum[1] };
                exchange_rows(other);
                sum[0] += other[0];
                sum[1] += other[1];
            }
            row_end ends[2];
#pragma unroll
            for (int r = 0; r < 2; r++)
                ends[r] = end_row(__fmaf_rn(m[i][r], by.factor, SHIFT), sum[r], sink);
            if (share() == 0) store_lse(args, s.w, token, ends);
            store_rows(args, s.w, token, share() * DIM_BLOCKS * 8, ends, o[i],
                       s.q[row / GROUP] + share() * DIM_BLOCKS / LINE_PIECES * GROUP * LINE_BYTES);
        }
    }

    __device__ __forceinline__ void run()
    {
        const int32_t part = s.w.first_row + first_row() / PART_ROWS * PART_ROWS;
        const key_range tiles = tiles_of(keys_of_rows(args, s.w.of, part, PART_ROWS));
        const key_range all = s.w.tiles;
        load_q();
#pragma unroll 1
        for (int32_t tile = all.start; tile < all.end; tile++)
            if (tile >= tiles.start && tile < tiles.end)
                attend(tile);
            else
                skip();
        store();
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, ROW_PER_SM)
    ROW_NAME(const __grid_constant__ struct attn_prefill_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);
    let_next_grid_come();
    if (args.has_boxes && threadIdx.x == 0) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    if (threadIdx.x < STAGES) {
        barrier_init(shared_address(&s.full[threadIdx.x]), 1);
        barrier_init(shared_address(&s.empty[threadIdx.x]), WARPS);
    }
    fence_async();
    wait_for_grids_before();
    if (warp_id() == WARPS) {
        const work found = find_work(args, { nullptr }, blockIdx.x);
        if (lane_id() == 0) s.w = found;
    }
    __syncthreads();
    if (s.w.sequence < 0) return;
    if (warp_id() >= WARPS) {
        if constexpr (MOVES_REGISTERS) lower_registers<COPY_REGISTERS>();
        if (warp_id() == WARPS) feed(args, s).run();
        return;
    }
    if constexpr (MOVES_REGISTERS) raise_registers<MATH_REGISTERS>();
    team(args, s).run();
}

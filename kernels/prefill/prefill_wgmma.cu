/* SPDX-License-Identifier: Apache-2.0 */
// Prefill by the matrix instructions of warpgroups: o = softmax(scale * q k^T) v for a block of
// query tokens of one sequence and one head, in the arithmetic of prefill.cu but for what its
// matrix instructions do inside.
//
// Who does what: a block has ROWS query tokens, of which each warpgroup that multiplies takes 64,
// and one more copies K and V, tile after tile, into a ring that the others share. The scores of the
// next tile are asked for before P V of this one, so that the tensor cores multiply while
// exponentials are taken; and warpgroups take turns in asking, so that one takes exponentials while
// the other multiplies. Weights stay in registers as the A of P V.
//
// Blocks stay, one on each SM, and take one tile of query tokens after another: K and V of the next
// one are on their way while the last of this one is multiplied and its output stored.
//
// The arithmetic: 64 query tokens fold the tiles of TILE keys, at absolute multiples of TILE, from
// the first in which one of them sees a key to the last. Tiles that only the other warpgroup's
// tokens see are passed over, so a row has the same bits whatever ROWS is.
//
// Bound by the tensor cores: 128 tokens and 80 keys of HEAD_DIM 256 are 2,560 clocks of them. 24
// heads of 8192 tokens, causal, are 0.82e12 operations: 0.83 ms at 989 TFLOP/s.

#include "common/ptx_team.cuh"
#include "common/wgmma.cuh"
#include "prefill/output.cuh"
#include "prefill/scores.cuh"

// Warpgroups that multiply: a part of the block has one.
constexpr int PARTS = ROWS / PART_ROWS;
constexpr int PART_THREADS = 128;
// Warps that copy K, and as many that copy V.
constexpr int FEEDERS = COPIERS / 2;
// Words of a tile's keys that one of them has.
constexpr int OWN_WORDS = (WORDS + FEEDERS - 1) / FEEDERS;
constexpr int PART_WARPS = PART_THREADS / 32;
// 8 rows of a line, which the swizzle is over; lines of a part's Q, and of a tile.
constexpr int ATOM_BYTES = 8 * LINE_BYTES;
constexpr int LINES = HEAD_DIM * 2 / LINE_BYTES;
constexpr int Q_LINE_BYTES = PART_ROWS * LINE_BYTES;
constexpr int TILE_LINE_BYTES = TILE * LINE_BYTES;
// A box is a group of keys, of one line.
constexpr int BOX_BYTES = GROUP * LINE_BYTES;
// Registers of a thread that multiplies and of one that copies: together what an SM has.
constexpr int MULTIPLY_REGISTERS = PARTS == 3 ? 160 : PARTS == 2 ? 216 : 232;
constexpr int COPY_REGISTERS = PARTS == 3 ? 32 : PARTS == 2 ? 72 : 120;
// Named barriers, one for each part: it is its turn; its own threads.
constexpr int TURN_BARRIER = 1;
constexpr int PART_BARRIER = TURN_BARRIER + PARTS;

// A bit for each key of a tile, but for those that some query token of the sequence sees and whose
// page is not in the pool. Bits beyond are set.
struct alignas(16) tile_keys {
    uint32_t bits[4];
};

struct smem {
    // Each line is swizzled: piece ^ row % 8.
    unsigned char q[PARTS][LINES][Q_LINE_BYTES];
    // Tiles in turn: K of the first, K of the second, V of the first, K of the third, ...
    unsigned char ring[STAGES][TILE_BYTES];
    // Of this item, and of the one before or after it.
    work works[2];
    sequence_size sizes[SORT_SEQUENCES];
    // Of each K in the ring.
    tile_keys there[STAGES];
    // One for each place in the ring: it is there; all warps have read it. One for each place in
    // works: it is told; it is done with.
    uint64_t full[STAGES], empty[STAGES], told[2], done[2];
};

static_assert(ROWS == WARPS * 16 && PARTS == ROW_WARPGROUPS, "a warp has 16 query tokens");
static_assert(COPIERS == 4, "registers are moved between warpgroups");
static_assert(ROW_BOX_LINES == 1, "the lines of a tile lie one after the other");
static_assert(LINES % FEEDERS == 0 || (LINES == 1 && GROUPS % FEEDERS == 0), "halves of a tile");
static_assert(OWN_WORDS <= 2 && LINE_PIECES == 8, "see lookup and copy_rows");
static_assert(STAGES >= 3, "K waits for the V that comes after it");
static_assert(sizeof(smem) <= SMEM_BYTES, "the host asks for what the kernel uses");

// Where a piece of a row lies, among lines of so many bytes.
static __device__ __forceinline__ constexpr int line_offset(int line_bytes, int row, int piece)
{
    return piece / LINE_PIECES * line_bytes + row * LINE_BYTES +
           (piece % LINE_PIECES ^ (row & 7)) * 16;
}

// ---- a block's items

// Item after item of those that all blocks share: the largest come first, and blocks take those of
// every other round in reverse, so that all have about as much to do.
struct item_list {
    int32_t turn;

    __device__ __forceinline__ int64_t number() const
    {
        const uint32_t own = turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        return (int64_t) turn * gridDim.x + own;
    }

    __device__ __forceinline__ bool has(const attn_prefill_args &args) const
    {
        return number() < (int64_t) args.tiles * args.num_q_heads;
    }

    __device__ __forceinline__ int32_t place() const
    {
        return turn & 1;
    }

    // All warps but the one that tells.
    __device__ __forceinline__ const work &wait(smem &s) const
    {
        barrier_wait(shared_address(&s.told[place()]), turn >> 1 & 1);
        return s.works[place()];
    }

    __device__ __forceinline__ void finish(smem &s)
    {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.done[place()]));
        turn++;
    }

    // The warp that tells; the item two before this one is done with.
    __device__ __forceinline__ const work &tell(const attn_prefill_args &args, smem &s) const
    {
        if (turn > 1) barrier_wait(shared_address(&s.done[place()]), (turn >> 1 & 1) ^ 1);
        const work w = find_work(args, { s.sizes }, (uint32_t) number());
        if (lane_id() == 0) {
            s.works[place()] = w;
            barrier_arrive(shared_address(&s.told[place()]));
        }
        __syncwarp();
        return s.works[place()];
    }
};

// ---- the warps that copy

// What a lane looks up for a tile, a tile ahead. With boxes: page and slot of the group that is
// lane_id() % GROUPS. Else the pages of its keys of the warp's words of the tile. A negative page: no
// query token of the sequence sees that key.
struct lookup {
    int32_t found[2];
};

// Two of the warps copy K, two V. What they do for a tile takes them about as long as the others
// need to multiply it, since each instruction waits for the one before.
struct feed {
    const attn_prefill_args &args;
    smem &s;
    const work &w;
    const key_range keys;
    const bool is_v;
    // Which half of each tile.
    const int32_t half;
    ring_place<STAGES> at;
    // The place of a tile whose rows have been asked for and may not be there yet. Negative: none.
    int32_t unfinished;

    __device__ __forceinline__ feed(const attn_prefill_args &the_args, smem &the_smem,
                                    const work &the_work, const ring_place<STAGES> &from)
        : args(the_args), s(the_smem), w(the_work), keys(the_work.keys), is_v(copies_v()),
          half((warp_id() - WARPS) % FEEDERS), at(from), unfinished(-1)
    {
    }

    static __device__ __forceinline__ bool copies_v()
    {
        return warp_id() >= WARPS + FEEDERS;
    }

    __device__ __forceinline__ bool is_page(int32_t found) const
    {
        return found >= 0 && (!args.block_table || found < args.num_pages);
    }

    // Whether a query token of the sequence sees the key.
    __device__ __forceinline__ bool is_seen(int32_t key) const
    {
        return key >= keys.start && key < keys.end;
    }

    // The page of a key, which some query token has to see: other entries are not looked at.
    __device__ __forceinline__ int32_t find_page(int32_t key) const
    {
        if (!is_seen(key)) return -1;
        if (!args.block_table) return 0;
        return __ldg(args.block_table + w.sequence * args.table_stride +
                     attn_divide(key, args.page_magic, args.page_shift));
    }

    // A key's place in its page.
    __device__ __forceinline__ int64_t slot_of(int32_t key) const
    {
        if (!args.block_table) return w.of.first_key + key;
        return key - attn_divide(key, args.page_magic, args.page_shift) * args.page_size;
    }

    __device__ __forceinline__ lookup find_box(int32_t tile) const
    {
        const int32_t key = tile * TILE + lane_id() % GROUPS * GROUP;
        return { { find_page(key), (int32_t) slot_of(key) } };
    }

    // This warp's words of a tile's keys.
    __device__ __forceinline__ int32_t own_word(int index) const
    {
        return half + index * FEEDERS;
    }

    __device__ __forceinline__ lookup find_rows(int32_t tile) const
    {
        lookup pages;
#pragma unroll
        for (int i = 0; i < OWN_WORDS; i++) {
            const int32_t row = own_word(i) * 32 + lane_id();
            pages.found[i] = row < TILE ? find_page(tile * TILE + row) : -1;
        }
        return pages;
    }

    __device__ __forceinline__ lookup look_up(int32_t tile) const
    {
        return args.has_boxes ? find_box(tile) : find_rows(tile);
    }

    __device__ __forceinline__ void wait_for_room() const
    {
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
    }

    // Half of the lines of a tile, or of the groups of its only line. One lane asks for all boxes:
    // with several the assembler would go over them in a loop, which takes longer than a tile has.
    __device__ __forceinline__ void copy_boxes(const lookup &own) const
    {
        constexpr int OWN_LINES = LINES > 1 ? LINES / FEEDERS : 1;
        constexpr int OWN_GROUPS = LINES > 1 ? GROUPS : GROUPS / FEEDERS;
        // Of which the lane has all places in registers.
        constexpr int AT_ONCE = OWN_GROUPS % 4 == 0 ? 4 : OWN_GROUPS;
        const int32_t first_line = LINES > 1 ? half * OWN_LINES : 0;
        const int32_t first_group = LINES > 1 ? 0 : half * OWN_GROUPS;
        const uint32_t s_full = shared_address(&s.full[at.slot]);
        const uint32_t s_boxes = shared_address(s.ring[at.slot]) + first_line * TILE_LINE_BYTES +
                                 first_group * BOX_BYTES;
        if (!is_v && half == 0 && lane_id() < 4) s.there[at.slot].bits[lane_id()] = ~0u;
        __syncwarp();
#pragma unroll
        for (int from = 0; from < OWN_GROUPS; from += AT_ONCE) {
            int32_t page[AT_ONCE], slot[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                page[i] = __shfl_sync(~0u, own.found[0], first_group + from + i);
                slot[i] = __shfl_sync(~0u, own.found[1], first_group + from + i);
            }
            if (!is_elected()) continue;
            if (from == 0) barrier_arrive_expect(s_full, TILE_BYTES / FEEDERS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int line = 0; line < OWN_LINES; line++)
                    copy_line(s_boxes + line * TILE_LINE_BYTES + (from + i) * BOX_BYTES,
                              is_v ? &args.v_map : &args.k_map, s_full, slot[i], first_line + line,
                              w.kv_head, page[i]);
        }
    }

    // Which keys of a word are there, or are seen by no query token. `page`: of this lane's.
    __device__ __forceinline__ void tell_there(int32_t tile, int32_t word, int32_t page) const
    {
        const int32_t row = word * 32 + lane_id();
        const bool is_wanted = row < TILE && is_seen(tile * TILE + row);
        const uint32_t there = __ballot_sync(~0u, !is_wanted || is_page(page));
        if (lane_id() != 0) return;
        s.there[at.slot].bits[word] = there;
        if (there != ~0u) report_fault(args, w.sequence);
    }

    // This warp's words of a tile; zeros where no query token sees a key: what is there might be NaN.
    // What lanes copy at once are whole lines, as in decode/feed.cuh.
    __device__ __forceinline__ void copy_rows(int32_t tile, const lookup &pages)
    {
        constexpr int AT_ONCE = 32 / LINE_PIECES;
        const int row = lane_id() / LINE_PIECES, piece = lane_id() % LINE_PIECES;
        // Of 8 rows, which the swizzle is over, those in the first and in the last 4.
        uint32_t s_own[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            s_own[i] = shared_address(s.ring[at.slot]) +
                       line_offset(TILE_LINE_BYTES, row + i * AT_ONCE, piece);
        const char *const g_pool = static_cast<const char *>(is_v ? args.v : args.k);
#pragma unroll
        for (int j = 0; j < OWN_WORDS; j++) {
            const int32_t word = own_word(j), page = pages.found[j];
            if (word >= WORDS) break;
            tell_there(tile, word, page);
            const int64_t slot = slot_of(tile * TILE + word * 32 + lane_id());
            const int64_t offset = page * (is_v ? args.v_page_stride : args.k_page_stride) +
                                   slot * (is_v ? args.v_token_stride : args.k_token_stride) +
                                   w.kv_head * (is_v ? args.v_head_stride : args.k_head_stride);
            // 0: absent.
            const uint64_t g_key =
                is_page(page) ? reinterpret_cast<uint64_t>(g_pool + offset * 2) : 0;
#pragma unroll 1
            for (int32_t i = 0; i < min(TILE - word * 32, 32); i += 2 * AT_ONCE)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const uint64_t g_found = __shfl_sync(~0u, g_key, i + k * AT_ONCE + row);
                    const char *const g_row =
                        (g_found ? reinterpret_cast<const char *>(g_found) : g_pool) + piece * 16;
#pragma unroll
                    for (int line = 0; line < LINES; line++)
                        cp_async_16_unless(s_own[k] + (word * 32 + i) * LINE_BYTES +
                                               line * TILE_LINE_BYTES,
                                           g_row + line * LINE_BYTES, !g_found);
                }
        }
        cp_async_commit();
        finish_rows<1>();
        unfinished = at.slot;
    }

    // Tells of the tile that was asked for before the last PENDING.
    template <int PENDING> __device__ __forceinline__ void finish_rows()
    {
        if (unfinished < 0) return;
        cp_async_wait<PENDING>();
        fence_async();
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(shared_address(&s.full[unfinished]));
        unfinished = -1;
    }

    // Whether a tile is all boxes.
    __device__ __forceinline__ bool are_boxes(int32_t tile, const lookup &own) const
    {
        const bool is_inside = tile * TILE >= keys.start && tile * TILE <= keys.end - TILE;
        return args.has_boxes && is_inside && __ballot_sync(~0u, is_page(own.found[0])) == ~0u;
    }

    __device__ __forceinline__ void copy(int32_t tile, const lookup &own)
    {
        wait_for_room();
        if (are_boxes(tile, own)) {
            finish_rows<0>();
            copy_boxes(own);
        } else {
            copy_rows(tile, args.has_boxes ? find_rows(tile) : own);
        }
    }

    // To the next tile's place. K of a tile lies before V of the one before it.
    __device__ __forceinline__ void go_on(int32_t tile)
    {
        at.next();
        const bool is_next = is_v ? tile + 2 == w.tiles.end : tile == w.tiles.start;
        if (!is_next) at.next();
    }

    __device__ __forceinline__ void run()
    {
        const int32_t start = w.tiles.start, end = w.tiles.end;
        lookup own = look_up(start);
        // The first of V lies behind one of K, or behind two, K of the next item behind the last of V.
        if (is_v && end - start > 1) at.next();
#pragma unroll 1
        for (int32_t tile = start; tile < end; tile++) {
            const lookup next = look_up(tile + 1);
            copy(tile, own);
            go_on(tile);
            own = next;
        }
        if (!is_v && start < end) at.next();
        finish_rows<0>();
    }
};

// The first of the warps that copy tells all others what there is to do.
static __device__ __forceinline__ void feed_items(const attn_prefill_args &args, smem &s)
{
    const bool tells = warp_id() == WARPS;
    ring_place<STAGES> at = { 0, 0 };
    if (feed::copies_v()) at.next();
    if (tells) keep_sizes(args, s.sizes);
#pragma unroll 1
    for (item_list items = { 0 }; items.has(args);) {
        const work &w = tells ? items.tell(args, s) : items.wait(s);
        if (w.sequence >= 0) {
            feed f(args, s, w, at);
            f.run();
            at = f.at;
        }
        if (tells)
            items.turn++;
        else
            items.finish(s);
    }
}

// ---- the warps that multiply

// Of a thread: rows g and g + 8 of its warp's 16; elements 4i + 0..1 of the first, 4i + 2..3 of the
// second.
struct team {
    const attn_prefill_args &args;
    smem &s;
    const work &w;
    ring_place<STAGES> at;
    // The warpgroup, and the tiles that its query tokens see.
    int32_t part;
    key_range tiles;
    // Keys that all of them see.
    key_range common;
    scaling by;
    // Scores, then their weights before rounding; weights of the tile before; sums.
    float r_s[TILE / 2];
    uint32_t r_p[TILE / 16][4];
    float r_o[HEAD_DIM / 2];
    // Of each row: the largest score so far, in units of log2 and + SHIFT too; the sum of this
    // thread's weights, relative to that.
    float m[2], base[2], l[2];

    __device__ __forceinline__ team(const attn_prefill_args &the_args, smem &the_smem,
                                    const work &the_work, const ring_place<STAGES> &from)
        : args(the_args), s(the_smem), w(the_work), at(from),
          part(__shfl_sync(~0u, (int) threadIdx.x / PART_THREADS, 0)), by(scaling_of(the_args)),
          r_o{}, m{ -INFINITY, -INFINITY }, base{ -INFINITY, -INFINITY }, l{}
    {
        const int32_t first = w.first_row + part * PART_ROWS;
        tiles = tiles_of(keys_of_rows(args, w.of, first, PART_ROWS));
        common.start = keys_of(args, w.of, first + PART_ROWS - 1).start;
        common.end = keys_of(args, w.of, first).end;
    }

    __device__ __forceinline__ void sync_part() const
    {
        named_sync(PART_BARRIER + part, PART_THREADS);
    }

    // ---- whose turn it is to ask for products

    __device__ __forceinline__ void take_turn() const
    {
        if (PARTS > 1) named_sync(TURN_BARRIER + part, 2 * PART_THREADS);
    }

    __device__ __forceinline__ void give_turn() const
    {
        if (PARTS == 1) return;
        const int32_t next = part + 1 < PARTS ? part + 1 : 0;
        named_arrive(TURN_BARRIER + next, 2 * PART_THREADS);
    }

    // ---- the ring

    __device__ __forceinline__ void wait_for_tile() const
    {
        barrier_wait(shared_address(&s.full[at.slot]), at.phase);
    }

    __device__ __forceinline__ void free_tile(int32_t slot) const
    {
        if (lane_id() == 0) barrier_arrive(shared_address(&s.empty[slot]));
    }

    // Tiles that the query tokens of this warpgroup do not see.
    __device__ __forceinline__ void pass_over()
    {
        wait_for_tile();
        __syncwarp();
        free_tile(at.slot);
        at.next();
    }

    // ---- queries

    // Rows beyond the sequence are zeros. All on their way at once.
    __device__ __forceinline__ void load_q() const
    {
        const int thread = threadIdx.x % PART_THREADS;
        // The output of the item before has left.
        sync_part();
        const char *const g_q = static_cast<const char *>(args.q) + (int64_t) w.head * HEAD_DIM * 2;
        const uint32_t s_q = shared_address(s.q[part][0]);
#pragma unroll
        for (int i = thread; i < PART_ROWS * PIECES; i += PART_THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            const int32_t token = w.first_row + part * PART_ROWS + row;
            const bool is_token = token < w.of.q_len;
            const int64_t offset = is_token ? (w.of.first_token + token) * args.q_token_stride : 0;
            cp_async_16(s_q + line_offset(Q_LINE_BYTES, row, piece), g_q + offset * 2 + piece * 16,
                        is_token ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_async();
        sync_part();
    }

    // ---- products

    __device__ __forceinline__ void ask_for_scores(int32_t slot)
    {
        const uint64_t q = wgmma_matrix(uniform_address(s.q[part]), 0, ATOM_BYTES);
        const uint64_t k = wgmma_matrix(uniform_address(s.ring[slot]), 0, ATOM_BYTES);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++)
            wgmma<IS_BF16>(r_s, wgmma_further(q, step / 4 * Q_LINE_BYTES + step % 4 * 32),
                           wgmma_further(k, step / 4 * TILE_LINE_BYTES + step % 4 * 32), step > 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void ask_for_sums(int32_t slot)
    {
        const uint64_t v = wgmma_matrix(uniform_address(s.ring[slot]), TILE_LINE_BYTES, ATOM_BYTES);
#pragma unroll
        for (int step = 0; step < TILE / 16; step++)
            wgmma<IS_BF16>(r_o, r_p[step], wgmma_further(v, step * 2 * ATOM_BYTES), 1);
        wgmma_commit();
    }

    // ---- softmax

    __device__ __forceinline__ void mask_scores(int32_t tile, const tile_keys &there,
                                                bool are_there)
    {
        const int lane = rare_lane_id();
        const int32_t key = tile * TILE + lane % 4 * 2;
        const int32_t token =
            w.first_row + part * PART_ROWS + warp_id() % PART_WARPS * 16 + lane / 4;
        const key_range visible[2] = { keys_of(args, w.of, token), keys_of(args, w.of, token + 8) };
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int column = i / 4 * 8 + i % 2, row = i / 2 % 2;
            const int32_t from = visible[row].start - key, to = visible[row].end - key;
            if (column < from || column >= to) r_s[i] = -INFINITY;
        }
        if (are_there) return;
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int column = i / 4 * 8 + i % 2;
            const uint32_t bits = there.bits[column / 32] >> lane % 4 * 2;
            if (!(bits >> column % 32 & 1)) r_s[i] = -INFINITY;
        }
    }

    // What is to be done to scores before they are compared.
    __device__ __forceinline__ void settle_scores(int32_t tile, int32_t slot)
    {
        const tile_keys there = s.there[slot];
        const bool are_there =
            (there.bits[0] & there.bits[1] & there.bits[2] & there.bits[3]) == ~0u;
        const bool is_inside = tile * TILE >= common.start && tile * TILE <= common.end - TILE;
        if (by.is_first) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) r_s[i] = scale_score(by, r_s[i]);
        }
        if (!is_inside || !are_there) mask_scores(tile, there, are_there);
    }

    // K, once all weights are there. Sums of weights are never below 0; but so the assembler cannot
    // put off the exponentials until the tensor cores are done with V.
    __device__ __forceinline__ void free_weighed(int32_t slot) const
    {
        __syncwarp();
        if (lane_id() == 0 && !(l[0] + l[1] < 0)) barrier_arrive(shared_address(&s.empty[slot]));
    }

    // Weights; `alpha`: what they were before is to be multiplied with.
    __device__ __forceinline__ void weigh(float (&alpha)[2])
    {
        float finite[2], sum[2] = {};
#pragma unroll
        for (int i = 0; i < TILE / 2; i += 2)
            m[i / 2 % 2] = max_nan(m[i / 2 % 2], max_nan(r_s[i], r_s[i + 1]));
#pragma unroll
        for (int row = 0; row < 2; row++) {
            m[row] = max_nan(m[row], __shfl_xor_sync(~0u, m[row], 1));
            m[row] = max_nan(m[row], __shfl_xor_sync(~0u, m[row], 2));
            const float before = base[row];
            base[row] = __fmaf_rn(m[row], by.factor, SHIFT);
            finite[row] = finite_or_zero(base[row]);
            alpha[row] = ex2(before - finite[row]);
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            r_s[i] = ex2(__fmaf_rn(r_s[i], by.factor, -finite[i / 2 % 2]));
            sum[i / 2 % 2] += r_s[i];
        }
#pragma unroll
        for (int row = 0; row < 2; row++) l[row] = __fmaf_rn(l[row], alpha[row], sum[row]);
    }

    __device__ __forceinline__ void round_weights()
    {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++)
            r_p[i / 4][i % 4] = pack<IS_BF16>(r_s[i * 2], r_s[i * 2 + 1]);
    }

    __device__ __forceinline__ void rescale(const float (&alpha)[2])
    {
        if (!__ballot_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) r_o[i] = __fmul_rn(r_o[i], alpha[i / 2 % 2]);
    }

    // ---- tiles

    __device__ __forceinline__ void begin(int32_t tile)
    {
        float alpha[2];
        const int32_t slot = at.slot;
        wait_for_tile();
        wgmma_fence();
        ask_for_scores(slot);
        at.next();
        wgmma_wait<0>();
        hold_registers(r_s);
        settle_scores(tile, slot);
        weigh(alpha);
        free_weighed(slot);
        round_weights();
    }

    // K of the tile, V of the one before.
    __device__ __forceinline__ void go_on(int32_t tile)
    {
        float alpha[2];
        const int32_t k_slot = at.slot;
        wait_for_tile();
        at.next();
        take_turn();
        wgmma_fence();
        ask_for_scores(k_slot);
        const int32_t v_slot = at.slot;
        wait_for_tile();
        at.next();
        wgmma_fence();
        ask_for_sums(v_slot);
        give_turn();
        wgmma_wait<1>();
        hold_registers(r_s);
        settle_scores(tile, k_slot);
        weigh(alpha);
        free_weighed(k_slot);
        wgmma_wait<0>();
        hold_registers(r_o);
        free_tile(v_slot);
        rescale(alpha);
        round_weights();
    }

    __device__ __forceinline__ void end()
    {
        const int32_t slot = at.slot;
        wait_for_tile();
        wgmma_fence();
        ask_for_sums(slot);
        at.next();
        wgmma_wait<0>();
        hold_registers(r_o);
        free_tile(slot);
    }

    // K of a tile, V of the one before, and the turn.
    __device__ __forceinline__ void pass_over_step()
    {
        pass_over();
        take_turn();
        give_turn();
        pass_over();
    }

    // To the tile, of which K is next.
    __device__ __forceinline__ void pass_over_until(int32_t tile)
    {
        pass_over();
#pragma unroll 1
        for (int32_t i = w.tiles.start + 1; i < tile; i++) pass_over_step();
    }

    // Of the block's tiles those that this warpgroup's query tokens see.
    __device__ __forceinline__ void fold()
    {
        if (tiles.start >= tiles.end) {
            if (w.tiles.start >= w.tiles.end) return;
            pass_over_until(w.tiles.end);
            pass_over();
            return;
        }
        const bool is_first = tiles.start == w.tiles.start, is_last = tiles.end == w.tiles.end;
        if (!is_first) {
            pass_over_until(tiles.start);
            take_turn();
            give_turn();
        }
        begin(tiles.start);
        if (!is_first) pass_over();
#pragma unroll 1
        for (int32_t tile = tiles.start + 1; tile < tiles.end; tile++) go_on(tile);
        if (!is_last) {
            pass_over();
            take_turn();
            give_turn();
        }
        end();
        if (is_last) return;
#pragma unroll 1
        for (int32_t i = tiles.end + 1; i < w.tiles.end; i++) pass_over_step();
        pass_over();
    }

    // ---- output

    // Each warp brings its rows in order in a part of what its queries were in.
    __device__ __forceinline__ void store()
    {
        const int warp = warp_id() % PART_WARPS;
        const int32_t token = w.first_row + part * PART_ROWS + warp * 16;
        const float sink = sink_of(args, w.head);
        float o[HEAD_DIM / 8][4];
        row_end ends[2];
#pragma unroll
        for (int row = 0; row < 2; row++) ends[row] = end_row(base[row], sum_quad(l[row]), sink);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i / 4][i % 4] = r_o[i];
        store_lse(args, w, token, ends);
        sync_part();
        store_rows(args, w, token, 0, ends, o, s.q[part][0] + warp * 16 * ROW_BYTES);
    }
};

static __device__ __forceinline__ void multiply_items(const attn_prefill_args &args, smem &s)
{
    ring_place<STAGES> at = { 0, 0 };
    bool is_first = true;
#pragma unroll 1
    for (item_list items = { 0 }; items.has(args); items.finish(s)) {
        const work &w = items.wait(s);
        if (w.sequence < 0) continue;
        team t(args, s, w, at);
        t.load_q();
        // Later ones begin with the turn that was given last.
        if (is_first && t.part == PARTS - 1) t.give_turn();
        is_first = false;
        t.fold();
        t.store();
        at = t.at;
    }
}

// By one thread: the assembler lets more take turns.
static __device__ __forceinline__ void init_barriers(smem &s)
{
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&s.full[i]), FEEDERS);
        barrier_init(shared_address(&s.empty[i]), WARPS);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_address(&s.told[i]), 1);
        barrier_init(shared_address(&s.done[i]), WARPS + COPIERS - 1);
    }
    fence_async();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    ROW_NAME(const __grid_constant__ struct attn_prefill_args args)
{
    extern __shared__ __align__(1024) unsigned char s_bytes[];
    smem &s = *reinterpret_cast<smem *>(s_bytes);
    let_next_grid_come();
    if (threadIdx.x < STAGES) s.there[threadIdx.x] = { { ~0u, ~0u, ~0u, ~0u } };
    if (threadIdx.x == 0) init_barriers(s);
    if (args.has_boxes && threadIdx.x == WARPS * 32) {
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    wait_for_grids_before();
    __syncthreads();
    if (warp_id() >= WARPS) {
        lower_registers<COPY_REGISTERS>();
        feed_items(args, s);
    } else {
        raise_registers<MULTIPLY_REGISTERS>();
        multiply_items(args, s);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
// The warp that copies: K and V of one unit after another into the ring, as far ahead of the others
// as that has room, and with each leaf what it is. What it needs to know of the leaves after those
// that it copies is on its way meanwhile.
//
// Where a group of keys lies in one page, the copy engine takes it as a box of the tensor that K or
// V is (args.k_map, args.v_map), and brings keys along that are not attended. Else lanes copy row
// by row, and put zeros where nothing is attended. One warp has only so many copies under way, so
// the warp that counts arrivals copies V then.
//
// Skip-softmax: K of a unit of which blocks may be left out is AHEAD leaves ahead of V, which is
// copied once its block is known to count. Of a block that does not, there is no V in the ring.
#pragma once

#include "decode/schedule.cuh"

// The column of a key's page in the table.
static __device__ __forceinline__ uint32_t column_of(const attn_decode_args &args, uint32_t key)
{
    return attn_divide(key, args.page_magic, args.page_shift);
}

static __device__ __forceinline__ bool is_page(const attn_decode_args &args, int32_t found)
{
    return found >= 0 && found < args.num_pages;
}

// Groups of a leaf, a bit each.
constexpr uint32_t ALL_GROUPS = (1u << GROUPS) - 1;

// Leaves of a unit whose pages are looked up together.
struct batch {
    unit_info unit;
    // Kernels of skip-softmax, which have three batches and few registers, find this and `slot` as
    // they need them.
    int32_t kv_head;
    // Some row attends keys [start, stop) of the piece; of draft keys, from `past` on, those in
    // s_seen. The null pointer: all.
    int32_t origin, start, stop, past;
    const uint32_t *s_seen;
    // Leaves [leaf, end).
    uint32_t leaf, end;
    // Table entries. Boxes: of the group that is lane_id() groups after the first, and where in its
    // page that begins. Else of this lane's keys of the leaf. Those of V are there only if V has a
    // table of its own: a copy of K's would have to wait for them.
    int32_t page[WORDS], v_entry[WORDS], slot;
    // Without boxes: those keys of the leaf that are attended.
    uint32_t wanted[WORDS];

    __device__ __forceinline__ uint32_t first_key() const
    {
        return origin + leaf * TILE;
    }

    // Of 32 draft keys from `draft` on, those that are seen, and all that are before the first.
    __device__ __forceinline__ uint32_t seen_drafts(int32_t draft) const
    {
        if (draft <= -32) return ~0u;
        const int32_t word = draft < 0 ? -1 : draft / 32;
        const uint32_t low = word < 0 ? ~0u : word < DRAFT_WORDS ? s_seen[word] : 0;
        const uint32_t high = word + 1 < DRAFT_WORDS ? s_seen[word + 1] : 0;
        return __funnelshift_r(low, high, draft - word * 32);
    }

    // Of 32 keys from `key` on, those that are attended.
    __device__ __forceinline__ uint32_t attended(uint32_t key) const
    {
        const int32_t low = min(max(start - (int32_t) key, 0), 32);
        const int32_t high = min(max(stop - (int32_t) key, 0), 32);
        const uint32_t within = low >= high ? 0 : ~0u >> (32 - high + low) << low;
        return s_seen ? within & seen_drafts((int32_t) key - past) : within;
    }

    // Whether some key of a group is.
    __device__ __forceinline__ bool is_attended(int32_t group) const
    {
        if (s_seen) return attended(group) & 0xFFFF;
        return min(stop - group, GROUP) > max(start - group, 0);
    }

    // Whether all keys of the leaf are.
    __device__ __forceinline__ bool is_whole() const
    {
        const int32_t key = (int32_t) first_key();
        return !s_seen && key >= start && key + TILE <= stop;
    }

    // Entry j, of a key: of one that is not attended nothing is looked at.
    __device__ __forceinline__ void look_up(const attn_decode_args &args, uint32_t column,
                                            bool is_attended, int j)
    {
        page[j] = v_entry[j] = -1;
        // Addresses first: what is left are loads, for which there is no branch.
        const int64_t entry = unit.sequence * args.table_stride + column;
        const int32_t *const g_page = args.block_table + entry, *const g_v = args.v_table + entry;
        if (is_attended) page[j] = __ldg(g_page);
        if (is_attended & (args.v_table != nullptr)) v_entry[j] = __ldg(g_v);
#if ATTN_MUTATION == 25
        page[j] = min((int64_t) page[j], args.num_pages - 1);
#endif
    }

    __device__ __forceinline__ int32_t v_page(const attn_decode_args &args, int j) const
    {
#if ATTN_MUTATION == 28
        return page[j];
#else
        return args.v_table ? v_entry[j] : page[j];
#endif
    }

    // Takes as many leaves as are looked up at once.
    __device__ __forceinline__ void take(const attn_decode_args &args, uint32_t first)
    {
        leaf = first;
        end = min(first + (args.has_boxes ? 32 / GROUPS : 1), unit.end);
        if (args.has_boxes) {
            const uint32_t group = first_key() + lane_id() * GROUP;
            const uint32_t column = column_of(args, group);
            if (!SKIPS) slot = group - column * args.page_size;
            const bool is_leaf = leaf + lane_id() / GROUPS < end;
            look_up(args, column, is_leaf & is_attended(group), 0);
        } else {
            const uint32_t key = first_key();
            const bool are_all = is_whole();
#pragma unroll
            for (int j = 0; j < WORDS; j++) wanted[j] = ~0u;
            if (!are_all)
#pragma unroll
                for (int j = 0; j < WORDS; j++) wanted[j] = attended(key + j * 32);
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                look_up(args, column_of(args, key + j * 32 + lane_id()), wanted[j] >> lane_id() & 1,
                        j);
        }
    }

    // Which draft keys the rows of the mask have, into s_words.
    __device__ __forceinline__ void find_seen(const attn_decode_args &args, uint32_t *s_words)
    {
        s_seen = nullptr;
        if (!args.tree_mask || (int32_t) (origin + unit.end * TILE) <= past) return;
        const int32_t *const g_mask =
            args.tree_mask + (int64_t) unit.sequence * args.q_len * args.mask_words;
#pragma unroll 1
        for (int i = 0; i < DRAFT_WORDS; i++) {
            uint32_t word = 0;
            const int32_t stop_token = i * 32 < args.q_len ? args.q_len : 0;
#pragma unroll 1
            for (int32_t token = lane_id(); token < stop_token; token += 32)
                word |= in_window(args, token, i, __ldg(g_mask + token * args.mask_words + i));
            word = __reduce_or_sync(~0u, word);
            if (lane_id() == 0) s_words[i] = word;
        }
        __syncwarp();
        s_seen = s_words;
    }

    // Of a word of a token's row of the mask, what its window leaves.
    static __device__ __forceinline__ uint32_t in_window(const attn_decode_args &args,
                                                         int32_t token, int word, uint32_t bits)
    {
        if (args.window == 0 || args.window_is_shared) return bits;
        const int32_t first = token + 1 - args.window - word * 32;
        return first >= 32 ? 0 : first <= 0 ? bits : bits >> first << first;
    }

    // Of a sequence that has as many query tokens as the others.
    static __device__ __forceinline__ void name_tokens(const attn_decode_args &args,
                                                       unit_info &unit)
    {
        unit.q_len = args.q_len;
        unit.first_token = (uint32_t) unit.sequence * args.q_len;
        unit.lanes = args.lanes;
    }

    // Lane and unit of number `own` of those that a piece has: the lane among those that a sequence
    // with most rows has, and among the piece's own.
    __device__ __forceinline__ void find_lane(const attn_decode_args &args, const piece &p,
                                              int32_t own, int32_t &number, int32_t &lane)
    {
        if (has_chunks(args)) {
            // Entries that change under the kernel may leave the piece none.
            const int32_t lanes = max(p.lanes, 1), groups = max(p.row_groups, 1);
            number = own / lanes;
            lane = own - number * lanes;
            const int32_t kv_head = lane / groups;
            unit.lane = kv_head * args.row_groups + lane - kv_head * groups;
            unit.q_len = p.q_len, unit.first_token = p.first_token, unit.lanes = lanes;
            return;
        }
        number = attn_divide(own, args.lanes_magic, args.lanes_shift);
        unit.lane = lane = own - number * args.lanes;
        if (TAKES_CHUNKS) name_tokens(args, unit);
    }

    // The first of item `item` of all (unit, lane).
    __device__ __forceinline__ void begin(const attn_decode_args &args, smem &s,
                                          const schedule &dealt_as, int32_t item, int half)
    {
        const place found = dealt_as.find(args, s, item);
        const int32_t shift = shift_of(dealt_as.dealt, found.index);
        const piece &p = found.p;
        const uint32_t last = max(p.end, p.first + 1);
        origin = p.origin, start = p.start, stop = p.stop, past = p.past;
        unit.sequence = p.sequence;
        unit.piece = found.index;
        int32_t number, lane;
        find_lane(args, p, item - found.before.units, number, lane);
        unit.slot = found.before.slots + lane;
        // As count_units has it. A piece that is one unit is one of 2^31 leaves.
        const int32_t own_shift = last - p.first > 1u << shift ? shift : 31;
        unit.first_unit = (int32_t) (p.first >> own_shift);
        unit.last_unit = (int32_t) ((last - 1) >> own_shift);
        unit.unit = min(unit.first_unit + number, unit.last_unit);
        unit.first = max(p.first, (uint32_t) unit.unit << own_shift);
        unit.end = min(last, (uint32_t) (unit.unit + 1) << own_shift);
        find_seen(args, s.seen[half]);
        take(args, unit.first);
        if (!SKIPS) kv_head = kv_head_of(args, unit.lane);
    }
};

// A tile of K or V row by row. What the lanes of a warp copy at once are whole lines: so it is in all
// banks of shared memory alike, and in as few lines of memory as there can be, each of which takes
// the load unit a clock. `offset`: where this lane's keys lie, in bytes; negative: nowhere.
static __device__ __forceinline__ void copy_tile(const void *g_pool, unsigned char *s_tile,
                                                 uint32_t s_full, int64_t head_offset,
                                                 const int64_t (&offset)[WORDS])
{
    constexpr int AT_ONCE = 32 / LINE_PIECES;
    // The swizzle is the same 8 rows further.
    constexpr int SWIZZLES = AT_ONCE < 8 ? 8 / AT_ONCE : 1;
    const int row = lane_id() / LINE_PIECES, piece = lane_id() % LINE_PIECES;
    const unsigned char *const g_head =
        static_cast<const unsigned char *>(g_pool) + head_offset * KV_BYTES + piece * 16;
    uint32_t s_piece[SWIZZLES];
#pragma unroll
    for (int i = 0; i < SWIZZLES; i++)
        s_piece[i] = shared_address(s_tile) + piece_offset(i * AT_ONCE + row, piece);
#pragma unroll
    for (int i = 0; i < TILE / AT_ONCE; i++) {
        const int first = i * AT_ONCE, swizzled = i / SWIZZLES * SWIZZLES * AT_ONCE;
        const int64_t from = __shfl_sync(~0u, offset[first / 32], first % 32 + row);
        const bool is_absent = from < 0;
#pragma unroll
        for (int line = 0; line < LINES; line++)
            cp_async_16_unless(s_piece[i % SWIZZLES] + swizzled / GROUP * GROUP_STEP +
                                   swizzled % GROUP * LINE_BYTES + line * LINE_STEP,
                               g_head + from + line * LINE_BYTES, is_absent);
    }
    cp_async_arrive(s_full);
    if (lane_id() == 0) barrier_arrive(s_full);
    __syncwarp();
}

// V of a unit whose K is ahead.
struct trail {
    batch b;
    // As in feed_boxes.
    int index;
    // The next, and the last that was read; how many of the unit's blocks were left out.
    ring_place<DECISIONS> decision;
    bool is_dropped;
    uint32_t num_dropped;
};

struct feed {
    const attn_decode_args &args;
    smem &s;
    ring_place<STAGES> at;
    // The next in s.units_told, and in s.visible.
    ring_place<INFOS> told;
    ring_place<LEAF_INFOS> info;
    // Of s.seen: that of the unit begun last.
    int half;
    // Skip-softmax: leaves by which K of this unit is ahead, and where V is.
    uint32_t ahead;
    trail behind;

    __device__ __forceinline__ feed(const attn_decode_args &the_args, smem &the_smem)
        : args(the_args), s(the_smem), at{ 0, 0 }, told{ 0, 0 }, info{ 0, 0 }, half(0),
          ahead(0), behind{ {}, 0, { 0, 0 }, false, 0 }
    {
    }

    // A key's place in its page.
    __device__ __forceinline__ int32_t slot_of(uint32_t key) const
    {
        return key - column_of(args, key) * args.page_size;
    }

    // The keys of a leaf that are attended and lie in `there`.
    __device__ __forceinline__ visible_keys see(const batch &b, const uint32_t (&wanted)[WORDS],
                                                const uint32_t (&there)[WORDS]) const
    {
        visible_keys keys = {};
        uint32_t missing = 0, all = ~0u;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            keys.bits[j] = wanted[j] & there[j];
            all &= keys.bits[j];
            missing |= wanted[j] & ~there[j];
        }
        keys.are_whole = all == ~0u;
        // Draft keys, and keys that the window of the first token has and that of the last has not.
        keys.draft = (int32_t) b.first_key() - b.past;
        const bool has_edges = args.window > 0 && !args.window_is_shared;
        if (args.q_len > 1 || args.tree_mask)
            keys.are_mixed =
                keys.draft + TILE > 0 || (has_edges && keys.draft < args.q_len - args.window);
        if (missing && lane_id() == 0) report_fault(args, b.unit.sequence);
        return keys;
    }

    // With boxes. `groups`: those that are in the pool.
    __device__ __forceinline__ visible_keys see(const batch &b, uint32_t groups) const
    {
        uint32_t wanted[WORDS], there[WORDS];
#pragma unroll
        for (int j = 0; j < WORDS; j++) wanted[j] = there[j] = ~0u;
        if (groups != ALL_GROUPS || !b.is_whole()) {
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                there[j] = (groups >> j * 2 & 1 ? 0xFFFF : 0) |
                           (groups >> (j * 2 + 1) & 1 ? 0xFFFF0000 : 0);
#pragma unroll
            for (int j = 0; j < WORDS; j++) wanted[j] = b.attended(b.first_key() + j * 32);
        }
        return see(b, wanted, there);
    }

    __device__ __forceinline__ uint32_t wait_for_room() const
    {
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        return shared_address(&s.full[at.slot]);
    }

    __device__ __forceinline__ void tell_visible(const visible_keys &keys)
    {
        if (lane_id() == 0) {
            s.visible[info.slot] = keys;
            if (!SKIPS && !args.has_boxes) barrier_arrive(shared_address(&s.seen_leaf[info.slot]));
        }
        info.next();
    }

    // A lane a query row, unless warps have rows and take them themselves. Rows that the lane of the
    // unit has not are left as they are: nobody reads what comes of them.
    __device__ __forceinline__ void copy_queries(const unit_info &unit, uint32_t s_told,
                                                 const rows &r)
    {
        const unsigned char *const g_q =
            static_cast<const unsigned char *>(args.q) + queries_of(args, unit) * 2;
        if (lane_id() >= r.num_rows) return;
        const token_head of = locate(args, r, lane_id());
        copy_bytes(shared_address(q_rows(s, told.slot)) + lane_id() * Q_PITCH,
                   g_q + (of.token * args.q_token_stride + of.head * HEAD_DIM) * 2, HEAD_DIM * 2,
                   s_told);
    }

    // Negative lane: there are no more.
    __device__ __forceinline__ void tell_unit(unit_info unit)
    {
        if (!TAKES_CHUNKS) batch::name_tokens(args, unit);
        const uint32_t s_told = shared_address(&s.told[told.slot]);
        const bool has_queries = !OWNS_ROWS && unit.lane >= 0;
        rows r = {};
        if (has_queries) r = rows_of(args, unit);
        if (lane_id() == 0) {
            s.units_told[told.slot] = unit;
            barrier_arrive_expect(s_told, r.num_rows * HEAD_DIM * 2);
        }
        __syncwarp();
        if (has_queries) copy_queries(unit, s_told, r);
        told.next();
    }

    // Groups of a batch that are in the pool: of a leaf GROUPS of them.
    __device__ __forceinline__ uint32_t find_groups(const batch &b) const
    {
        return __ballot_sync(~0u, is_page(args, b.page[0]) & is_page(args, b.v_page(args, 0)));
    }

    __device__ __forceinline__ int32_t kv_head_of_batch(const batch &b) const
    {
        return SKIPS ? kv_head_of(args, b.unit.lane) : b.kv_head;
    }

    // Where in its page this lane's group begins.
    __device__ __forceinline__ int32_t slot_of_group(const batch &b, int index) const
    {
        return SKIPS ? slot_of(b.first_key() + (lane_id() - index) * GROUP) : b.slot;
    }

    // Groups of a leaf that come with these: a box brings all that it has.
    __device__ __forceinline__ uint32_t groups_of_boxes(uint32_t groups) const
    {
        if (!OWNS_ROWS || groups == ALL_GROUPS) return groups;
        if (args.box_groups >= 2) groups |= (groups & 0x55) << 1 | (groups & 0xAA) >> 1;
        if (args.box_groups >= 4) groups |= (groups & 0x33) << 2 | (groups & 0xCC) >> 2;
        if (args.box_groups >= 8) groups |= groups << 4 | groups >> 4;
        return groups & ALL_GROUPS;
    }

    // A group of K or V: a box, or as many as there are lines.
    __device__ __forceinline__ void copy_group(const attn_box_map &map, uint32_t s_group,
                                               uint32_t s_full, int32_t slot, int32_t kv_head,
                                               int32_t page)
    {
        if constexpr (OWNS_ROWS)
#pragma unroll
            for (int line = 0; line < LINES; line++)
                copy_line(s_group + line * LINE_STEP, &map, s_full, slot, line, kv_head, page);
        else
            copy_box(s_group, &map, s_full, slot, kv_head, page);
    }

    // The same of boxes of several groups: a page is known where one of them is wanted.
    __device__ __forceinline__ void begin_large_boxes(const attn_box_map &map, uint32_t s_tile,
                                                      uint32_t s_full, int32_t page,
                                                      int32_t kv_head, uint32_t groups, int index,
                                                      int32_t slot, bool is_one)
    {
#pragma unroll 1
        for (int g = 0; g < GROUPS; g += args.box_groups) {
            const uint32_t wanted = groups >> g & ((1u << args.box_groups) - 1);
            if (wanted == 0) continue;
            const int32_t own_page = __shfl_sync(~0u, page, index + g + __ffs(wanted) - 1);
            const int32_t own_slot = __shfl_sync(~0u, slot, index + g);
            if (is_one)
                copy_group(map, s_tile + g * GROUP_STEP, s_full, own_slot, kv_head, own_page);
        }
    }

    // K or V of a leaf. `groups`: those that are to be copied; `index`: the lane of the first one's
    // page. Their bytes are still to be expected.
    __device__ __forceinline__ void begin_boxes(const attn_box_map &map, int32_t page,
                                                int32_t kv_head, uint32_t groups, int index,
                                                int32_t slot)
    {
        const uint32_t s_tile = shared_address(s.ring[at.slot]);
        const uint32_t s_full = shared_address(&s.full[at.slot]);
        const bool is_one = is_elected();
        if (OWNS_ROWS && args.box_groups > 1) {
            begin_large_boxes(map, s_tile, s_full, page, kv_head, groups, index, slot, is_one);
        } else if (groups == ALL_GROUPS) {
            // One after the other, with no branch between them.
            int32_t pages[GROUPS], slots[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                pages[g] = __shfl_sync(~0u, page, index + g);
                slots[g] = __shfl_sync(~0u, slot, index + g);
            }
            if (is_one)
#pragma unroll
                for (int g = 0; g < GROUPS; g++)
                    copy_group(map, s_tile + g * GROUP_STEP, s_full, slots[g], kv_head, pages[g]);
        } else {
#pragma unroll 1
            for (int g = 0; g < GROUPS; g++) {
                const int32_t own_page = __shfl_sync(~0u, page, index + g);
                const int32_t own_slot = __shfl_sync(~0u, slot, index + g);
                if (is_one && groups >> g & 1)
                    copy_group(map, s_tile + g * GROUP_STEP, s_full, own_slot, kv_head, own_page);
            }
        }
        __syncwarp();
        at.next();
    }

    __device__ __forceinline__ void expect_boxes(uint32_t s_full, uint32_t groups)
    {
        if (lane_id() == 0)
            barrier_arrive_expect(s_full, __popc(groups_of_boxes(groups)) * GROUP_BYTES);
    }

    __device__ __forceinline__ void copy_boxes(const attn_box_map &map, uint32_t s_full,
                                               int32_t page, int32_t kv_head, uint32_t groups,
                                               int index, int32_t slot)
    {
        expect_boxes(s_full, groups);
        begin_boxes(map, page, kv_head, groups, index, slot);
    }

    // What is read first is asked for first, and what is to be told is told while that is on its
    // way.
    __device__ __forceinline__ void feed_boxes(batch b, bool is_new)
    {
#pragma unroll 1
        for (int index = 0; b.leaf < b.end; b.leaf++, index += GROUPS) {
            const uint32_t s_k = wait_for_room();
            const uint32_t groups = find_groups(b) >> index & ALL_GROUPS;
            const int32_t kv_head = kv_head_of_batch(b), slot = slot_of_group(b, index);
            begin_boxes(args.k_map, b.page[0], kv_head, groups, index, slot);
            if (is_new && index == 0) tell_unit(b.unit);
            tell_visible(see(b, groups));
            expect_boxes(s_k, groups);
            copy_boxes(args.v_map, wait_for_room(), b.v_page(args, 0), kv_head, groups, index,
                       slot);
        }
    }

    __device__ __forceinline__ void copy_rows(const void *g_pool, uint32_t s_full,
                                              int64_t head_offset, const int64_t (&offset)[WORDS])
    {
        copy_tile(g_pool, s.ring[at.slot], s_full, head_offset, offset);
        at.next();
    }

    // Where this lane's keys of a leaf lie in K or V. `there`: those that are in both pools.
    template <bool IS_V>
    __device__ __forceinline__ void find_rows(const batch &b, int64_t page_stride,
                                              int64_t token_stride, int64_t (&offset)[WORDS],
                                              uint32_t (&there)[WORDS]) const
    {
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const int32_t v_page = b.v_page(args, j), page = IS_V ? v_page : b.page[j];
            const bool valid = is_page(args, b.page[j]) && is_page(args, v_page);
            const int32_t slot = slot_of(b.first_key() + j * 32 + lane_id());
            offset[j] = valid ? (page * page_stride + slot * token_stride) * KV_BYTES : -1;
#if ATTN_MUTATION == 24
            offset[j] = (int32_t) offset[j];
#endif
            there[j] = __ballot_sync(~0u, valid);
        }
    }

    __device__ __forceinline__ void feed_k_rows(const batch &b, int32_t kv_head)
    {
        int64_t offset[WORDS];
        uint32_t there[WORDS];
        find_rows<false>(b, args.k_page_stride, args.k_token_stride, offset, there);
        const visible_keys keys = see(b, b.wanted, there);
        const uint32_t s_k = wait_for_room();
        tell_visible(keys);
        copy_rows(args.k, s_k, kv_head * args.k_head_stride, offset);
    }

    // ---- skip-softmax

    __device__ __forceinline__ void feed_k_boxes(const batch &b, int32_t kv_head, uint32_t groups,
                                                 int index)
    {
        const visible_keys keys = see(b, groups);
        const uint32_t s_k = wait_for_room();
        tell_visible(keys);
        copy_boxes(args.k_map, s_k, b.page[0], kv_head, groups, index, slot_of_group(b, index));
    }

    __device__ __forceinline__ void feed_k(const batch &b, int index, int32_t kv_head)
    {
        if (args.has_boxes) {
            feed_k_boxes(b, kv_head, find_groups(b) >> index & ALL_GROUPS, index);
            return;
        }
        feed_k_rows(b, kv_head);
    }

    __device__ __forceinline__ void feed_v(const batch &b, int index, int32_t kv_head)
    {
        if (args.has_boxes) {
            const uint32_t groups = find_groups(b) >> index & ALL_GROUPS;
            copy_boxes(args.v_map, wait_for_room(), b.v_page(args, 0), kv_head, groups, index,
                       slot_of_group(b, index));
            return;
        }
        int64_t offset[WORDS];
        uint32_t there[WORDS];
        find_rows<true>(b, args.v_page_stride, args.v_token_stride, offset, there);
        copy_rows(args.v, wait_for_room(), kv_head * args.v_head_stride, offset);
    }

    // Waits until it is known whether the next block of the unit is left out.
    __device__ __forceinline__ void read_decision()
    {
        const skip_smem &skip = static_cast<const skip_smem &>(s);
        const int32_t slot = behind.decision.slot;
        barrier_wait(shared_address(&skip.decided[slot]), behind.decision.phase);
        behind.is_dropped = skip.is_dropped[slot];
        behind.num_dropped += behind.is_dropped;
        behind.decision.next();
    }

    // V of the next leaf, if it counts.
    __device__ __forceinline__ void follow(int32_t kv_head)
    {
        batch &b = behind.b;
        if (b.leaf == b.end) {
            b.take(args, b.end);
            behind.index = 0;
        }
        if (ahead > 0 && (b.leaf == b.unit.first || b.leaf % SKIP_LEAVES == 0)) read_decision();
        if (!behind.is_dropped) feed_v(b, behind.index, kv_head);
        b.leaf++;
        behind.index += GROUPS;
    }

    // Before a unit is told.
    __device__ __forceinline__ void begin_trail(const batch &b)
    {
        const float lambda = find_lambda(args, b.stop);
        ahead = lambda > 0.0f ? AHEAD : 0;
        behind.b = b;
        behind.index = 0;
        behind.is_dropped = false;
        behind.num_dropped = 0;
        if (lane_id() == 0) static_cast<skip_smem &>(s).lambda[told.slot] = lambda;
    }

    __device__ __forceinline__ void end_trail(int32_t kv_head)
    {
#pragma unroll 1
        while (behind.b.leaf < behind.b.unit.end) follow(kv_head);
        if (behind.num_dropped > 0 && args.dropped && lane_id() == 0)
            atomicAdd(reinterpret_cast<unsigned long long *>(args.dropped),
                      (unsigned long long) behind.num_dropped);
    }

    __device__ __forceinline__ void feed_ahead(batch b, int32_t kv_head)
    {
#pragma unroll 1
        for (int index = 0; b.leaf < b.end; b.leaf++, index += GROUPS) {
            feed_k(b, index, kv_head);
            if (b.leaf - b.unit.first >= ahead) follow(kv_head);
        }
        if (b.end == b.unit.end) end_trail(kv_head);
    }

    // What comes after a batch: of the same unit, or of the next item that nobody has taken; the
    // first one is that of the block's number. `next`: in lane 0, how many others had been asked
    // for when this block asked last. False: there is none.
    __device__ __forceinline__ bool look_ahead(const schedule &dealt_as, bool is_first,
                                               const batch &now, int32_t &next, batch &then)
    {
        if (!is_first && now.end < now.unit.end) {
            then = now;
            then.take(args, now.end);
            return true;
        }
        const int64_t after = (int64_t) gridDim.x + __shfl_sync(~0u, next, 0);
        const int64_t item = is_first ? blockIdx.x : after;
        if (item >= dealt_as.dealt.total) return false;
        half ^= 1;
        then.begin(args, s, dealt_as, (int32_t) item, half);
        count_up_if(lane_id() == 0, &args.counters[0], next);
        return true;
    }

    // No earlier than there is room for its K: till then those that multiply, and the warp that copies
    // V where that is another one, may be behind by all units told.
    __device__ __forceinline__ void tell_next_unit(const unit_info &unit)
    {
        wait_for_room();
        tell_unit(unit);
    }

    __device__ __forceinline__ void copy(const batch &b)
    {
        const bool is_new = b.leaf == b.unit.first;
        if (SKIPS && is_new) begin_trail(b);
        // Without K ahead of V a unit is as it is without skip-softmax.
        if (args.has_boxes && (!SKIPS || ahead == 0)) {
            feed_boxes(b, is_new);
            return;
        }
        if (is_new) tell_next_unit(b.unit);
        if (SKIPS) {
            feed_ahead(b, kv_head_of_batch(b));
            return;
        }
        feed_k_rows(b, b.kv_head);
        // Another warp copies V.
        at.next();
    }

    // The block's items. The first batch does not wait until more is known, nor until it is known
    // what others have taken; later there is always one in hand.
    __device__ __forceinline__ void run(const schedule &dealt_as)
    {
        batch now, then;
        int32_t next = 0;
        bool has_more = true;
#pragma unroll 1
        for (int turn = 0; has_more; turn = min(turn + 1, 2)) {
            has_more = look_ahead(dealt_as, turn == 0, now, next, then);
            if (turn == 0) {
                if (!has_more) break;
                now = then;
            }
            if (turn != 1) copy(now);
            if (turn != 0) now = then;
        }
        unit_info none = {};
        none.lane = -1;
        tell_next_unit(none);
        // Whoever is done last leaves the counters as they were.
        if (lane_id() == 0) {
            __threadfence();
            if (atomicAdd(&args.counters[1], 1) == (int32_t) gridDim.x - 1)
                args.counters[0] = args.counters[1] = 0;
        }
    }
};

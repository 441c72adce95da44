/* SPDX-License-Identifier: Apache-2.0 */
// The warp that copies: K and V of one unit after another into the ring, as far ahead of the others
// as that has room, and with each leaf what it is.
//
// Where a group of keys lies in one page, the copy engine takes it as a box of the tensor that K or
// V is (args.k_map, args.v_map), and brings keys along that are not attended. Else lanes copy row
// by row, and put zeros where nothing is attended.
#pragma once

#include "decode/schedule.cuh"

// Boxes: leaves whose pages a warp looks up at once, a group each lane.
constexpr int LOOK_UP_LEAVES = 32 / GROUPS;

struct feed {
    const attn_decode_args &args;
    smem &s;
    const schedule &dealt_as;
    ring_place<STAGES> at;
    // The next in s.units_told, and in s.visible.
    int32_t told, info;
    // What is being copied; the keys [start, stop) of its piece are attended.
    unit_info own;
    uint32_t leaf;
    visible_keys visible;
    int32_t origin, start, stop;
    int32_t kv_head;
    // Table entries. Boxes: of the group that is lane_id() groups after the first of the leaves that
    // were looked up together. Else of this lane's keys of a leaf: of the next one.
    int32_t page[WORDS];

    __device__ __forceinline__ feed(const attn_decode_args &the_args, smem &the_smem,
                                    const schedule &the_schedule)
        : args(the_args), s(the_smem), dealt_as(the_schedule), at{ 0, 0 }, told(0), info(0), own{},
          visible{}
    {
    }

    __device__ __forceinline__ uint32_t first_key(uint32_t of_leaf) const
    {
        return origin + of_leaf * TILE;
    }

    // Of 32 keys from `key` on, those that are attended.
    __device__ __forceinline__ uint32_t attended(uint32_t key) const
    {
        const int32_t low = min(max(start - (int32_t) key, 0), 32);
        const int32_t high = min(max(stop - (int32_t) key, 0), 32);
        return low >= high ? 0 : ~0u >> (32 - high + low) << low;
    }

    // Entries of keys that are not attended are not looked at.
    __device__ __forceinline__ int32_t look_up(uint32_t key) const
    {
        const int32_t *const g_table = args.block_table + own.sequence * args.table_stride;
        int32_t found = -1;
        if (key >= (uint32_t) start && key < (uint32_t) stop)
            found = __ldg(g_table + attn_decode_divide(key, args.page_magic, args.page_shift));
#if ATTN_MUTATION == 25
        found = min((int64_t) found, args.num_pages - 1);
#endif
        return found;
    }

    // Of the groups from leaf `leaf` on, up to the unit's end.
    __device__ __forceinline__ void look_up_boxes()
    {
        const uint32_t group = first_key(leaf) + lane_id() * GROUP;
        // Any attended key of it.
        const uint32_t key = max(group, (uint32_t) start);
        page[0] = -1;
        if (lane_id() < LOOK_UP_LEAVES * GROUPS && key < group + GROUP &&
            leaf + lane_id() / GROUPS < own.end)
            page[0] = look_up(key);
    }

    __device__ __forceinline__ void look_up_keys(uint32_t of_leaf)
    {
#pragma unroll
        for (int j = 0; j < WORDS; j++) page[j] = look_up(first_key(of_leaf) + j * 32 + lane_id());
    }

    __device__ __forceinline__ bool is_page(int32_t found) const
    {
        return found >= 0 && found < args.num_pages;
    }

    // The keys of a leaf that are attended and lie in `there`.
    __device__ __forceinline__ void note_visible(const uint32_t (&there)[WORDS])
    {
        uint32_t missing = 0;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const uint32_t wanted = attended(first_key(leaf) + j * 32);
            visible.bits[j] = wanted & there[j];
            missing |= wanted & ~there[j];
        }
        if (missing && lane_id() == 0) report_fault(args, own.sequence);
    }

    __device__ __forceinline__ uint32_t wait_for_room() const
    {
        barrier_wait(shared_address(&s.empty[at.slot]), at.phase ^ 1);
        return shared_address(&s.full[at.slot]);
    }

    __device__ __forceinline__ void tell_visible()
    {
        if (lane_id() == 0) s.visible[info] = visible;
        info = info + 1 < INFOS ? info + 1 : 0;
    }

    // Before its copies are started: the others read their queries meanwhile.
    __device__ __forceinline__ void tell_unit()
    {
        if (lane_id() == 0) {
            s.units_told[told] = own;
            barrier_arrive(shared_address(&s.told[told]));
        }
        told = told + 1 < INFOS ? told + 1 : 0;
    }

    // K or V of a leaf. `groups`: those that are to be copied; `index`: lane of the first one's page.
    __device__ __forceinline__ void copy_boxes(const attn_decode_map &map, uint32_t groups,
                                               int index, int32_t slot)
    {
        const uint32_t s_full = wait_for_room();
        if (&map == &args.k_map) tell_visible();
        const int group = lane_id() - index;
        if (lane_id() == 0) barrier_arrive_expect(s_full, __popc(groups) * GROUP_BYTES);
        if (group >= 0 && group < GROUPS && groups >> group & 1)
            copy_box(shared_address(s.ring[at.slot]) + group * GROUP_BYTES, &map, s_full, slot,
                     kv_head, page[0]);
        __syncwarp();
        at.next();
    }

    __device__ __forceinline__ void feed_boxes()
    {
        look_up_boxes();
#pragma unroll 1
        for (int index = 0; leaf < own.end; leaf++, index += GROUPS) {
            if (index == LOOK_UP_LEAVES * GROUPS) {
                look_up_boxes();
                index = 0;
            }
            const uint32_t groups =
                __ballot_sync(~0u, is_page(page[0])) >> index & ((1u << GROUPS) - 1);
            uint32_t there[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                there[j] = (groups >> j * 2 & 1 ? 0xFFFF : 0) |
                           (groups >> (j * 2 + 1) & 1 ? 0xFFFF0000 : 0);
            note_visible(there);
            const uint32_t key = first_key(leaf) + (lane_id() - index) * GROUP;
            const int32_t slot =
                key - attn_decode_divide(key, args.page_magic, args.page_shift) * args.page_size;
            copy_boxes(args.k_map, groups, index, slot);
            copy_boxes(args.v_map, groups, index, slot);
        }
    }

    // K or V of a leaf, each lane the pieces of some rows. `offset`: where this lane's keys lie, in
    // bytes; negative: nowhere.
    __device__ __forceinline__ void copy_rows(const void *g_pool, int64_t head_offset,
                                              const int64_t (&offset)[WORDS], bool is_k)
    {
        const uint32_t s_full = wait_for_room(), s_tile = shared_address(s.ring[at.slot]);
        const unsigned char *const g_head =
            static_cast<const unsigned char *>(g_pool) + head_offset * KV_BYTES;
        const int column = lane_id() % ROW_LANES, first_row = lane_id() / ROW_LANES;
#pragma unroll
        for (int j = 0; j < WORDS; j++)
#pragma unroll 2
            for (int i = 0; i < 32 / ROWS_AT_ONCE; i++) {
                const int row = i * ROWS_AT_ONCE + first_row;
                const int64_t from = __shfl_sync(~0u, offset[j], row);
                // Of a negative offset nothing is read.
                const uint32_t bytes = from < 0 ? 0 : 16;
                const uint32_t s_group = s_tile + (j * 2 + row / GROUP) * GROUP_BYTES;
#pragma unroll
                for (int line = 0; line < ROW_COPIES; line++) {
                    const int piece = line * ROW_LANES + column;
                    cp_async_16(s_group + piece_offset(row % GROUP, piece),
                                g_head + from + piece * 16, bytes);
                }
            }
        if (is_k) tell_visible();
        cp_async_arrive(s_full);
        if (lane_id() == 0) barrier_arrive(s_full);
        __syncwarp();
        at.next();
    }

    __device__ __forceinline__ void feed_rows()
    {
        look_up_keys(leaf);
#pragma unroll 1
        for (; leaf < own.end; leaf++) {
            int64_t k_offset[WORDS], v_offset[WORDS];
            uint32_t there[WORDS];
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                const bool valid = is_page(page[j]);
                const uint32_t key = first_key(leaf) + j * 32 + lane_id();
                const int32_t slot =
                    key - attn_decode_divide(key, args.page_magic, args.page_shift) * args.page_size;
                k_offset[j] = v_offset[j] = -1;
                if (valid) {
                    k_offset[j] =
                        (page[j] * args.k_page_stride + slot * args.k_token_stride) * KV_BYTES;
                    v_offset[j] =
                        (page[j] * args.v_page_stride + slot * args.v_token_stride) * KV_BYTES;
#if ATTN_MUTATION == 24
                    k_offset[j] = (int32_t) k_offset[j], v_offset[j] = (int32_t) v_offset[j];
#endif
                }
                there[j] = __ballot_sync(~0u, valid);
            }
            note_visible(there);
            if (leaf + 1 < own.end) look_up_keys(leaf + 1);
            copy_rows(args.k, kv_head * args.k_head_stride, k_offset, true);
            copy_rows(args.v, kv_head * args.v_head_stride, v_offset, false);
        }
    }

    // Item `item` of all (unit, lane).
    __device__ __forceinline__ void feed_item(int32_t item)
    {
        const int32_t shift = dealt_as.dealt.shift, unit = item / args.lanes;
        own.lane = item - unit * args.lanes;
        kv_head = own.lane / args.row_groups;
        const place found = dealt_as.find(args, s, unit);
        const piece p = describe(args, found.piece);
        const uint32_t end = p.first + max(count_leaves(p), 1u);
        own.sequence = p.sequence, origin = p.origin, start = p.start, stop = p.stop;
        own.piece = found.piece;
        own.first = p.first, own.end = end;
        own.first_unit = own.last_unit = own.unit = 0;
        own.slot = found.before.slots;
        if (count_units(p, shift) > 1) {
            own.first_unit = (int32_t) (p.first >> shift);
            own.last_unit = (int32_t) ((end - 1) >> shift);
            own.unit = min(own.first_unit + unit - found.before.units, own.last_unit);
            own.first = max(p.first, (uint32_t) own.unit << shift);
            own.end = min(end, (uint32_t) (own.unit + 1) << shift);
        }
        if (p.is_fault && lane_id() == 0) report_fault(args, p.sequence);
        tell_unit();
        leaf = own.first;
        if (args.has_boxes)
            feed_boxes();
        else
            feed_rows();
    }

    // The block's items: the one of its number, then what is left.
    __device__ __forceinline__ void run()
    {
        const int64_t num_items = (int64_t) dealt_as.dealt.total * args.lanes;
        const bool asks = num_items > gridDim.x;
        int64_t item = blockIdx.x;
#pragma unroll 1
        while (item < num_items) {
            int32_t next = 0;
            if (asks && lane_id() == 0) next = atomicAdd(&args.counters[0], 1);
            feed_item((int32_t) item);
            item = asks ? (int64_t) gridDim.x + __shfl_sync(~0u, next, 0) : num_items;
        }
        own.lane = -1;
        tell_unit();
        // Whoever is done last leaves the counters as they were.
        if (asks && lane_id() == 0) {
            __threadfence();
            if (atomicAdd(&args.counters[1], 1) == (int32_t) gridDim.x - 1)
                args.counters[0] = args.counters[1] = 0;
        }
    }
};

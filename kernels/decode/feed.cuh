/* SPDX-License-Identifier: Apache-2.0 */
// The copies of a warp: K and V of its run, from its first piece to its last, a leaf ahead of what
// is multiplied. Looked up are pages one leaf further on.
//
// Where a group of keys lies in one page, the copy engine takes it as a box of the tensor that K or
// V is (args.k_map, args.v_map), and brings keys along that are not attended. Else lanes copy row
// by row, and put zeros where nothing is attended.
#pragma once

#include "decode/schedule.cuh"

// Leaf `leaf` of piece `index` is the one that is looked up.
struct feed {
    int32_t index;
    int32_t sequence, origin, start, stop;
    uint32_t leaf, end;
    // Whether there is such a leaf; whether the one before it is being copied.
    bool looks_up, copies;
    // Of the leaf that is looked up: table entries of this lane's keys; boxes: of this lane's
    // group.
    int32_t page[LANE_KEYS];
    // Of the leaf that is copied: which keys are attended.
    uint32_t visible[LANE_KEYS];
    // Boxes: page and slot of this lane's group. Else where this lane's keys lie, in bytes;
    // negative: nowhere.
    int32_t box_page, box_slot;
    // Groups with attended keys.
    uint32_t box_groups;
    int64_t k_offset[LANE_KEYS], v_offset[LANE_KEYS];

    // The first leaf of the run from piece `index` on.
    __device__ __forceinline__ void find_leaf(const attn_decode_args &args, const smem &s)
    {
        const cut from = s.cuts[warp_id()][0], to = s.cuts[warp_id()][1];
#pragma unroll 1
        for (; index <= to.piece && index < args.batch * args.splits; index++) {
            const piece p = describe(args, index);
            const span own = clip(p, index, from, to);
            if (own.begin >= own.end) continue;
            sequence = p.sequence, origin = p.origin, start = p.start, stop = p.stop;
            leaf = own.begin, end = own.end;
            break;
        }
        looks_up = index <= to.piece && index < args.batch * args.splits;
    }

    __device__ __forceinline__ uint32_t first_key() const
    {
        return origin + leaf * TILE;
    }

    // Of 32 keys from `key` on, those that are attended.
    __device__ __forceinline__ uint32_t attended(uint32_t key) const
    {
        const int32_t low = min(max(start - (int32_t) key, 0), 32);
        const int32_t high = min(max(stop - (int32_t) key, 0), 32);
        return low >= high ? 0 : ~0u >> (32 - high + low) << low;
    }

    // Entries of keys that are not attended are not looked at.
    __device__ __forceinline__ void look_up(const attn_decode_args &args)
    {
        const int32_t *const g_table = args.block_table + sequence * args.table_stride;
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++) {
            // Boxes: any attended key of the group.
            uint32_t key = first_key() + j * 32 + lane_id();
            if (args.has_boxes) {
                const uint32_t group = first_key() + lane_id() % GROUPS * GROUP;
                key = max(group, (uint32_t) start);
                if (j > 0 || lane_id() >= PARTS || key >= group + GROUP) key = ~0u;
            }
            page[j] = -1;
            if (looks_up && key >= (uint32_t) start && key < (uint32_t) stop)
                page[j] =
                    __ldg(g_table + attn_decode_divide(key, args.page_magic, args.page_shift));
#if ATTN_MUTATION == 25
            page[j] = min((int64_t) page[j], args.num_pages - 1);
#endif
        }
    }

    __device__ __forceinline__ void place_boxes(const attn_decode_args &args)
    {
        const uint32_t key = first_key() + lane_id() % GROUPS * GROUP;
        const bool valid = page[0] >= 0 && page[0] < args.num_pages;
        box_groups = __ballot_sync(~0u, valid);
        box_page = page[0];
        box_slot = key - attn_decode_divide(key, args.page_magic, args.page_shift) * args.page_size;
        uint32_t missing = 0;
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++) {
            const uint32_t wanted = attended(first_key() + j * 32);
            const uint32_t low = box_groups >> (j * 2) & 1 ? 0xFFFF : 0;
            const uint32_t high = box_groups >> (j * 2 + 1) & 1 ? 0xFFFF0000 : 0;
            visible[j] = wanted & (low | high);
            missing |= wanted & ~visible[j];
        }
        if (missing && lane_id() == 0) report_fault(args, sequence);
    }

    __device__ __forceinline__ void place_keys(const attn_decode_args &args)
    {
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++) {
            const uint32_t key = first_key() + j * 32 + lane_id();
            const bool wanted = key >= (uint32_t) start && key < (uint32_t) stop;
            const bool valid = wanted && page[j] >= 0 && page[j] < args.num_pages;
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
            visible[j] = __ballot_sync(~0u, valid);
            if (wanted && !valid) report_fault(args, sequence);
        }
    }

    // What was looked up is what is copied.
    __device__ __forceinline__ void place(const attn_decode_args &args)
    {
        copies = looks_up;
        if (!copies) return;
        if (args.has_boxes)
            place_boxes(args);
        else
            place_keys(args);
    }

    // Looks up the leaf after it.
    __device__ __forceinline__ void advance(const attn_decode_args &args, const smem &s)
    {
        if (!copies) return;
        leaf++;
        if (leaf >= end) {
            index++;
            find_leaf(args, s);
        }
        look_up(args);
    }

    // Each lane the pieces of some rows.
    __device__ __forceinline__ void copy_rows(const unsigned char *g_head, uint32_t s_group,
                                              uint32_t s_barrier, int group, bool is_v) const
    {
        const int column = lane_id() % ROW_LANES, first_row = lane_id() / ROW_LANES;
        // Copies first: a choice between members would be one between addresses in local memory.
        int64_t offset = 0;
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++) {
            const int64_t k = k_offset[j], v = v_offset[j];
            if (group / 2 == j) offset = is_v ? v : k;
        }
#pragma unroll 2
        for (int i = 0; i < GROUP / ROWS_AT_ONCE; i++) {
            const int row = i * ROWS_AT_ONCE + first_row;
            const int64_t at = __shfl_sync(~0u, offset, group % 2 * 16 + row);
            // Of a negative offset nothing is read.
            const uint32_t bytes = at < 0 ? 0 : 16;
#pragma unroll
            for (int line = 0; line < ROW_COPIES; line++) {
                const int piece = line * ROW_LANES + column;
                cp_async_16(s_group + piece_offset(row, piece), g_head + at + piece * 16, bytes);
            }
        }
        cp_async_arrive(s_barrier);
    }

    // This lane's group of K (parts 0 ..) or V (parts GROUPS ..).
    __device__ __forceinline__ void copy_own_box(const attn_decode_args &args, smem &s,
                                                 int32_t kv_head, int part, int slot) const
    {
        const uint32_t s_barrier = shared_address(&s.full[warp_id()][slot]);
        if (box_groups >> part % GROUPS & 1) {
            barrier_arrive_expect(s_barrier, GROUP_BYTES);
            const uint32_t s_part = shared_address(s.ring[warp_id()][slot]);
            // No choice of an address: nvcc 13.0 crashes over one between kernel parameters.
            if (part < GROUPS)
                copy_box(s_part, &args.k_map, s_barrier, box_slot, kv_head, box_page);
            else
                copy_box(s_part, &args.v_map, s_barrier, box_slot, kv_head, box_page);
        } else {
            barrier_arrive(s_barrier);
        }
    }

    // Starts copying a part of the leaf; its barrier tells when it is there.
    __device__ __forceinline__ void copy(const attn_decode_args &args, smem &s, int32_t kv_head,
                                         int part, int slot) const
    {
        if (!copies) return;
        if (args.has_boxes) {
            if (lane_id() == part % GROUPS) copy_own_box(args, s, kv_head, part, slot);
            return;
        }
        const unsigned char *const g_head = part >= GROUPS
                                                ? static_cast<const unsigned char *>(args.v) +
                                                      kv_head * args.v_head_stride * KV_BYTES
                                                : static_cast<const unsigned char *>(args.k) +
                                                      kv_head * args.k_head_stride * KV_BYTES;
        copy_rows(g_head, shared_address(s.ring[warp_id()][slot]),
                  shared_address(&s.full[warp_id()][slot]), part % GROUPS, part >= GROUPS);
    }

    __device__ __forceinline__ void begin(const attn_decode_args &args, smem &s, int32_t kv_head,
                                          int slot)
    {
        index = s.cuts[warp_id()][0].piece;
        find_leaf(args, s);
        look_up(args);
        place(args);
        if (args.has_boxes) {
            const int part = lane_id();
            if (copies && part < STAGES)
                copy_own_box(args, s, kv_head, part, (slot + part) % STAGES);
        } else {
#pragma unroll 1
            for (int part = 0; part < STAGES; part++)
                copy(args, s, kv_head, part, (slot + part) % STAGES);
        }
        __syncwarp();
        advance(args, s);
    }
};

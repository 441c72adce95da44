/* SPDX-License-Identifier: Apache-2.0 */
// The second warp that copies, where rows are copied one by one: V, as the first one's leaves come.
// It counts arrivals, too, whenever it has to wait.
#pragma once

#include "decode/feed.cuh"
#include "decode/output.cuh"

struct v_feed {
    const attn_decode_args &args;
    smem &s;
    ring_place<STAGES> at;
    ring_place<INFOS> told;
    ring_place<LEAF_INFOS> info;
    counter arrivals;

    __device__ __forceinline__ v_feed(const attn_decode_args &the_args, smem &the_smem)
        : args(the_args),
          s(the_smem), at{ 0, 0 }, told{ 0, 0 }, info{ 0, 0 }, arrivals{ the_smem, 0 }
    {
    }

    __device__ __forceinline__ void wait(const uint64_t &barrier, uint32_t phase)
    {
        const uint32_t s_barrier = shared_address(&barrier);
        // Lanes may see different ends: the first one's counts.
        while (!__shfl_sync(~0u,
                            barrier_wait_either(s_barrier, phase, shared_address(&s.posted),
                                                arrivals.phase),
                            0))
            arrivals.count();
        barrier_wait(s_barrier, phase);
    }

    // Of a leaf from `key` on: keys that are attended and whose pages are in the pool have bits.
    __device__ __forceinline__ void copy_leaf(const unit_info &unit, uint32_t key, int32_t kv_head)
    {
#if ATTN_MUTATION == 28
        const int32_t *const g_pages = args.block_table;
#else
        const int32_t *const g_pages = args.v_table ? args.v_table : args.block_table;
#endif
        const int32_t *const g_table = g_pages + unit.sequence * args.table_stride;
        wait(s.seen_leaf[info.slot], info.phase);
        int32_t page[WORDS], slot[WORDS];
        int64_t offset[WORDS];
        // All of them on their way before one is waited for.
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const uint32_t own = key + j * 32 + lane_id();
            const int32_t column = column_of(args, own);
            slot[j] = own - column * args.page_size;
            page[j] = -1;
            if (s.visible[info.slot].bits[j] >> lane_id() & 1) page[j] = __ldg(g_table + column);
        }
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            // As the first warp has found; but a table may change under the kernel.
            offset[j] =
                is_page(args, page[j])
                    ? (page[j] * args.v_page_stride + slot[j] * args.v_token_stride) * KV_BYTES
                    : -1;
#if ATTN_MUTATION == 24
            offset[j] = (int32_t) offset[j];
#endif
        }
        info.next();
        // K.
        at.next();
        wait(s.empty[at.slot], at.phase ^ 1);
        copy_tile(args.v, s.ring[at.slot], shared_address(&s.full[at.slot]),
                  kv_head * args.v_head_stride, offset);
        at.next();
    }

    __device__ __forceinline__ void run()
    {
#pragma unroll 1
        for (;; told.next()) {
            wait(s.told[told.slot], told.phase);
            const unit_info unit = s.units_told[told.slot];
            if (unit.lane < 0) break;
            const int32_t kv_head = kv_head_of(args, unit.lane);
            const uint32_t origin = describe(args, unit.piece).origin;
#pragma unroll 1
            for (uint32_t leaf = unit.first; leaf < unit.end; leaf++)
                copy_leaf(unit, origin + leaf * TILE, kv_head);
        }
        while (arrivals.count()) continue;
    }
};

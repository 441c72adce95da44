/* SPDX-License-Identifier: Apache-2.0 */
// kernels/common/ptx_copy.cuh, emulated: copies are there at once.
#pragma once

#include "cuda.h"

namespace emulator
{
void barrier_init(uint32_t s_barrier, uint32_t count);
void barrier_arrive(uint32_t s_barrier, int64_t bytes);
void barrier_bring(uint32_t s_barrier, int64_t bytes);
bool barrier_passed(uint32_t s_barrier, uint32_t phase);
// The box of a map as fake_driver.c makes it; returns its bytes.
int64_t copy_box(uint32_t s_target, const void *map, int row, int line, int head, int page);
} // namespace emulator

static inline uint32_t shared_address(const void *pointer)
{
    return (uint32_t) (static_cast<const unsigned char *>(pointer) - emulator_shared);
}

static inline void cp_async_16(uint32_t s_target, const void *g_source, uint32_t bytes)
{
    std::memset(emulator_shared + s_target, 0, 16);
    if (bytes) std::memcpy(emulator_shared + s_target, g_source, bytes);
}
static inline void cp_async_16_unless(uint32_t s_target, const void *g_source, bool is_absent)
{
    cp_async_16(s_target, g_source, is_absent ? 0 : 16);
}

static inline void cp_async_commit()
{
}

template <int PENDING> static inline void cp_async_wait()
{
}

static inline void let_next_grid_come()
{
}

static inline void wait_for_grids_before()
{
}

static inline void prefetch_line(const void *)
{
}

static inline void prefetch_map(const void *)
{
}

static inline int32_t add_in_order(int32_t *g_target, int32_t value)
{
    return atomicAdd(g_target, value);
}

static inline int32_t or_in_order(int32_t *g_target, int32_t value)
{
    const int32_t before = *g_target;
    *g_target |= value;
    return before;
}

// Whoever asks again and again waits for other blocks.
static inline int32_t load_in_order(const int32_t *g_source)
{
    emulator::let_blocks_run();
    return *g_source;
}

static inline void count_up_if(bool is_one, int32_t *g_target, int32_t &before)
{
    if (is_one) before = atomicAdd(g_target, 1);
}

static inline float load_global_float(const float *g_source)
{
    return *g_source;
}

static inline float2 load_global_float2(const float2 *g_source)
{
    return *g_source;
}

static inline float4 load_global_float4(const float4 *g_source)
{
    return *g_source;
}

static inline void barrier_init(uint32_t s_barrier, uint32_t count)
{
    emulator::barrier_init(s_barrier, count);
}

static inline void barrier_arrive(uint32_t s_barrier)
{
    emulator::barrier_arrive(s_barrier, 0);
}

static inline void barrier_arrive_times(uint32_t s_barrier, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) emulator::barrier_arrive(s_barrier, 0);
}

static inline void barrier_arrive_expect(uint32_t s_barrier, uint32_t bytes)
{
    emulator::barrier_arrive(s_barrier, bytes);
}

static inline void cp_async_arrive(uint32_t s_barrier)
{
    emulator::barrier_arrive(s_barrier, 0);
}

static inline void barrier_wait(uint32_t s_barrier, uint32_t phase)
{
    emulator::wait([=] { return emulator::barrier_passed(s_barrier, phase); });
}

static inline bool barrier_wait_either(uint32_t s_first, uint32_t first_phase, uint32_t s_second,
                                       uint32_t second_phase)
{
    emulator::wait([=] {
        return emulator::barrier_passed(s_first, first_phase) ||
               emulator::barrier_passed(s_second, second_phase);
    });
    return emulator::barrier_passed(s_first, first_phase);
}

static inline void fence_async()
{
}

static inline void copy_bytes(uint32_t s_target, const void *g_source, uint32_t bytes,
                              uint32_t s_barrier)
{
    std::memcpy(emulator_shared + s_target, g_source, bytes);
    emulator::barrier_bring(s_barrier, bytes);
}

static inline bool is_elected()
{
    return threadIdx.x % 32 == 0;
}

static inline void copy_box(uint32_t s_target, const void *map, uint32_t s_barrier, int row,
                            int head, int page)
{
    emulator::barrier_bring(s_barrier, emulator::copy_box(s_target, map, row, 0, head, page));
}

static inline void copy_line(uint32_t s_target, const void *map, uint32_t s_barrier, int row,
                             int line, int head, int page)
{
    emulator::barrier_bring(s_barrier, emulator::copy_box(s_target, map, row, line, head, page));
}

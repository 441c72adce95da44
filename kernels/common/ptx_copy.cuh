/* SPDX-License-Identifier: Apache-2.0 */
// Copies from global to shared memory that run beside the threads.
#pragma once

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// cp.async, 16 bytes past L1 with a 128-byte L2 prefetch; bytes beyond `bytes` (0 or 16) arrive as
// 0 and are not read. PTX ISA, "Data Movement and Conversion Instructions: cp.async".
static __device__ __forceinline__ void cp_async_16(uint32_t s_target, const void *g_source,
                                                   uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s_target),
                 "l"(g_source), "r"(bytes)
                 : "memory");
}

// cp.async.commit_group, same section.
static __device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group, same section: all but the newest PENDING groups of this thread are complete.
template <int PENDING> static __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ld.global.nc with no allocation in L1, 16 bytes. PTX ISA, "ld.global.nc".
static __device__ __forceinline__ uint4 ld_global_stream(const void *g_source)
{
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(g_source));
    return value;
}

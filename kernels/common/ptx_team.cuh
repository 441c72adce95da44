/* SPDX-License-Identifier: Apache-2.0 */
// How warps of a block that do different things get along.
#pragma once

#include <stdint.h>

// setmaxnreg.inc, setmaxnreg.dec: of all warps of a warpgroup (4 warps, the first a multiple of 4),
// registers of a thread, a multiple of 8. More: waits until they are free. PTX ISA, "setmaxnreg".
template <int N> static __device__ __forceinline__ void raise_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void lower_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// barrier.sync: of `threads` threads of whole warps, at barrier 1 .. 15. PTX ISA, "barrier".
static __device__ __forceinline__ void named_sync(int barrier, int threads)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.arrive: whole warps come to barrier 1 .. 15 and do not wait; `threads` come in all, with
// those that do. PTX ISA, "barrier".
static __device__ __forceinline__ void named_arrive(int barrier, int threads)
{
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The phase that a barrier in shared memory is in waits for all copies (cp.async) that this thread
// has started, beyond the arrivals that it waits for anyway. PTX ISA, "cp.async.mbarrier.arrive",
// without .noinc.
static __device__ __forceinline__ void cp_async_arrive_extra(uint32_t s_barrier)
{
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(s_barrier) : "memory");
}

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

// The same; if `is_absent` zeros arrive, and nothing is read. Unlike with a number of bytes, the
// address needs no arithmetic.
static __device__ __forceinline__ void cp_async_16_unless(uint32_t s_target, const void *g_source,
                                                          bool is_absent)
{
    asm volatile("{\n"
                 ".reg .pred absent;\n"
                 "setp.ne.u32 absent, %2, 0;\n"
                 "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, absent;\n"
                 "}" ::"r"(s_target),
                 "l"(g_source), "r"(static_cast<uint32_t>(is_absent))
                 : "memory");
}

// cp.async.commit_group: what was started since the last one is a group. PTX ISA,
// "cp.async.commit_group".
static __device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: all groups of this thread but the last PENDING are there. PTX ISA,
// "cp.async.wait_group".
template <int PENDING> static __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- barriers in shared memory. PTX ISA, "Parallel Synchronization and Communication
// Instructions: mbarrier".

static __device__ __forceinline__ void barrier_init(uint32_t s_barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(s_barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t s_barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(s_barrier) : "memory");
}

// Arrives for as many.
static __device__ __forceinline__ void barrier_arrive_times(uint32_t s_barrier, uint32_t count)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(s_barrier), "r"(count) : "memory");
}

// Arrives, and makes the phase wait for that many bytes as well.
static __device__ __forceinline__ void barrier_arrive_expect(uint32_t s_barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(s_barrier), "r"(bytes)
                 : "memory");
}

// Arrives once all copies (cp.async) that this thread has started are there.
static __device__ __forceinline__ void cp_async_arrive(uint32_t s_barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(s_barrier) : "memory");
}

// Waits for the end of a phase: the first is 0, then 1, 0, ...
static __device__ __forceinline__ void barrier_wait(uint32_t s_barrier, uint32_t phase)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(s_barrier),
                 "r"(phase)
                 : "memory");
}

// Waits for the end of a phase of either of two barriers: true if it is the first one's.
static __device__ __forceinline__ bool barrier_wait_either(uint32_t s_first, uint32_t first_phase,
                                                           uint32_t s_second,
                                                           uint32_t second_phase)
{
    uint32_t is_first;
    asm volatile("{\n"
                 ".reg .pred first, second;\n"
                 "again:\n"
                 "mbarrier.test_wait.parity.shared.b64 first, [%1], %2;\n"
                 "@first bra done;\n"
                 "mbarrier.test_wait.parity.shared.b64 second, [%3], %4;\n"
                 "@!second bra again;\n"
                 "done:\n"
                 "selp.u32 %0, 1, 0, first;\n"
                 "}"
                 : "=r"(is_first)
                 : "r"(s_first), "r"(first_phase), "r"(s_second), "r"(second_phase)
                 : "memory");
    return is_first;
}

// What threads have written before, copies of boxes see, and the other way round. PTX ISA,
// "membar/fence: fence.proxy".
static __device__ __forceinline__ void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// elect.sync: true in one lane of the warp. Behind a branch on it the assembler knows that no other
// lane is there, which it takes from no comparison of lanes: it would put a loop over lanes around
// each of the copies below. PTX ISA, "elect.sync".
static __device__ __forceinline__ bool is_elected()
{
    uint32_t elected = 0;
    asm volatile("{\n"
                 ".reg .pred elected;\n"
                 "elect.sync _|elected, 0xFFFFFFFF;\n"
                 "@elected mov.u32 %0, 1;\n"
                 "}"
                 : "+r"(elected));
    return elected;
}

// cp.async.bulk.tensor: the box of a tensor map at column 0, row `row`, line 0, head `head`, page
// `page`, into shared memory; its bytes are counted at the barrier. PTX ISA,
// "cp.async.bulk.tensor".
static __device__ __forceinline__ void copy_box(uint32_t s_target, const void *map,
                                                uint32_t s_barrier, int row, int head, int page)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %2, %4, %5}], [%6];" ::"r"(s_target),
                 "l"(map), "r"(0), "r"(row), "r"(head), "r"(page), "r"(s_barrier)
                 : "memory");
}

// The same of a map whose boxes have one line: at line `line`.
static __device__ __forceinline__ void copy_line(uint32_t s_target, const void *map,
                                                 uint32_t s_barrier, int row, int line, int head,
                                                 int page)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(s_target),
                 "l"(map), "r"(0), "r"(row), "r"(line), "r"(head), "r"(page), "r"(s_barrier)
                 : "memory");
}

// cp.async.bulk: `bytes`, a multiple of 16, from a multiple of 16 to a multiple of 16; they are
// counted at the barrier. PTX ISA, "cp.async.bulk".
static __device__ __forceinline__ void copy_bytes(uint32_t s_target, const void *g_source,
                                                  uint32_t bytes, uint32_t s_barrier)
{
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
                 "[%3];" ::"r"(s_target),
                 "l"(g_source), "r"(bytes), "r"(s_barrier)
                 : "memory");
}

// prefetch.tensormap: of a map among the kernel's parameters. PTX ISA, "prefetch".
static __device__ __forceinline__ void prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// atom.acq_rel.gpu.add: after what this thread knows to be written, before what it reads later. PTX
// ISA, "atom".
static __device__ __forceinline__ int32_t add_in_order(int32_t *g_target, int32_t value)
{
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(g_target), "r"(value)
                 : "memory");
    return before;
}

// The same, with or.
static __device__ __forceinline__ int32_t or_in_order(int32_t *g_target, int32_t value)
{
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(g_target), "r"(value)
                 : "memory");
    return before;
}

// ld.acquire.gpu: before what this thread reads later. PTX ISA, "ld".
static __device__ __forceinline__ int32_t load_in_order(const int32_t *g_source)
{
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_source) : "memory");
    return value;
}

// atom.relaxed.gpu.inc: if `is_one`, adds 1 to what is below 2^31 - 1, and gives what was there.
// Additions of several lanes the assembler makes into one, and they wait for its result where they
// meet; not so these, and nothing waits before the result is read. PTX ISA, "atom".
static __device__ __forceinline__ void count_up_if(bool is_one, int32_t *g_target, int32_t &before)
{
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "setp.ne.u32 one, %2, 0;\n"
                 "@one atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;\n"
                 "}"
                 : "+r"(before)
                 : "l"(g_target), "r"(static_cast<uint32_t>(is_one)));
}

// griddepcontrol.launch_dependents, griddepcontrol.wait: a grid launched behind this one may come
// onto the chip from now on; waits until the grids before this one are done and what they have
// written is there to be read. PTX ISA, "griddepcontrol".
static __device__ __forceinline__ void let_next_grid_come()
{
    asm volatile("griddepcontrol.launch_dependents;");
}

static __device__ __forceinline__ void wait_for_grids_before()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ld.relaxed.gpu.global: what other blocks have written, once a fence lets it be seen. PTX ISA,
// "ld".
static __device__ __forceinline__ float load_global_float(const float *g_source)
{
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(g_source) : "memory");
    return value;
}

// The same, 8 bytes.
static __device__ __forceinline__ float2 load_global_float2(const float2 *g_source)
{
    float2 value;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "l"(g_source)
                 : "memory");
    return value;
}

// The same, 16 bytes.
static __device__ __forceinline__ float4 load_global_float4(const float4 *g_source)
{
    float4 value;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(g_source)
                 : "memory");
    return value;
}

// prefetch.global.L2. PTX ISA, "prefetch".
static __device__ __forceinline__ void prefetch_line(const void *g_line)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(g_line));
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

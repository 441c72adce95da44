/* SPDX-License-Identifier: Apache-2.0 */
// Matrix instructions of a warpgroup, four warps next to each other, that run beside the threads.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". g = lane / 4,
// t = lane % 4 in what follows.
#pragma once

#include <stdint.h>

// wgmma.fence: before the first wgmma that reads registers which this thread has written.
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: what was issued since the last one is a group.
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: all groups but the last PENDING are done.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of its own for an array that has no value yet: where two such arrays share registers
// ptxas 13.0 drops the products of the first one.
template <int N> static __device__ __forceinline__ void take_registers(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "=f"(r[i]));
}

// What reads or writes these registers stays on its side of here.
template <int N> static __device__ __forceinline__ void hold_registers(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// The same in all lanes, for uniform registers: what lane 0 has, of values that the assembler must
// not see to be equal, or it would take the shuffle for superfluous and move each descriptor of a
// product from vector registers.
static __device__ __forceinline__ uint32_t uniform_value(uint32_t value)
{
    return __shfl_sync(~0u, value + threadIdx.x % 32, 0);
}

// The descriptor of a matrix of 16-bit elements in shared memory, made of atoms of 8 rows of 128
// bytes, swizzled by 128 bytes, at multiples of 1024. `line`, `atom`: bytes between atoms.
//   K-major: a row is 64 elements along K; next to it along M or N is the atom `atom` further.
//   `line` means nothing.
//   MN-major: a row is 64 elements along N; next to it along N is the atom `line` further, along K
//   the atom `atom` further.
// PTX ISA, "Matrix Descriptor Format".
static __device__ __forceinline__ uint64_t wgmma_matrix(uint32_t s_matrix, uint32_t line,
                                                        uint32_t atom)
{
    return (uint64_t) 1 << 62 | (uint64_t) (atom >> 4) << 32 | (uint64_t) (line >> 4) << 16 |
           s_matrix >> 4;
}

// The same matrix from `bytes` further on.
static __device__ __forceinline__ uint64_t wgmma_further(uint64_t matrix, uint32_t bytes)
{
    // Addresses do not carry into the upper half.
    return matrix >> 32 << 32 | (uint32_t) (static_cast<uint32_t>(matrix) + (bytes >> 4));
}

// ---- m64nNk16, FP32 sums, N twice the registers of the sum: c[4i + 0..1] are row g, columns
// 8i + 2t and the next one, of the 16 rows of the warp; c[4i + 2..3] are row g + 8.

// Operands 8 * i .. 8 * i + 7, and what they are called.
#define WGMMA_IN_8(i)                                                                              \
    "+f"(c[8 * i]), "+f"(c[8 * i + 1]), "+f"(c[8 * i + 2]), "+f"(c[8 * i + 3]), "+f"(c[8 * i + 4]),\
        "+f"(c[8 * i + 5]), "+f"(c[8 * i + 6]), "+f"(c[8 * i + 7])
#define WGMMA_NAMES_32                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_SUMS_32                                                                              \
    WGMMA_IN_8(0), WGMMA_IN_8(1)
#define WGMMA_NAMES_64                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_64                                                                              \
    WGMMA_IN_8(0), WGMMA_IN_8(1), WGMMA_IN_8(2), WGMMA_IN_8(3)
#define WGMMA_NAMES_80                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "             \
    "%34, %35, %36, %37, %38, %39"
#define WGMMA_SUMS_80                                                                              \
    WGMMA_IN_8(0), WGMMA_IN_8(1), WGMMA_IN_8(2), WGMMA_IN_8(3), WGMMA_IN_8(4)
#define WGMMA_NAMES_128                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "             \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "             \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_128                                                                             \
    WGMMA_IN_8(0), WGMMA_IN_8(1), WGMMA_IN_8(2), WGMMA_IN_8(3), WGMMA_IN_8(4), WGMMA_IN_8(5),      \
    WGMMA_IN_8(6), WGMMA_IN_8(7)
#define WGMMA_NAMES_256                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "             \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "             \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "             \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "             \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "             \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "         \
    "%126, %127"
#define WGMMA_SUMS_256                                                                             \
    WGMMA_IN_8(0), WGMMA_IN_8(1), WGMMA_IN_8(2), WGMMA_IN_8(3), WGMMA_IN_8(4), WGMMA_IN_8(5),      \
    WGMMA_IN_8(6), WGMMA_IN_8(7), WGMMA_IN_8(8), WGMMA_IN_8(9), WGMMA_IN_8(10),                    \
    WGMMA_IN_8(11), WGMMA_IN_8(12), WGMMA_IN_8(13), WGMMA_IN_8(14), WGMMA_IN_8(15)

// wgmma with A and B in shared memory, both K-major. keep 0: the sum begins with 0.
#define WGMMA_SHARED(name, type, n, a_name, b_name, keep_name)                                     \
    static __device__ __forceinline__ void name(float(&c)[n / 2], uint64_t a, uint64_t b, int keep)\
    {                                                                                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred keep;\n"                                                          \
                     "setp.ne.b32 keep, " keep_name ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                     " {" WGMMA_NAMES_##n "}, " a_name ", " b_name ", keep, 1, 1, 0, 0;\n"         \
                     "}"                                                                           \
                     : WGMMA_SUMS_##n                                                              \
                     : "l"(a), "l"(b), "r"(keep));                                                 \
    }

// wgmma with A in registers, as mma.m16n8k16 has it for the 16 rows of the warp, and B in shared
// memory, MN-major.
#define WGMMA_REGISTERS(name, type, n, a0, a1, a2, a3, b_name, keep_name)                          \
    static __device__ __forceinline__ void name(float(&c)[n / 2], const uint32_t(&a)[4],           \
                                                uint64_t b, int keep)                              \
    {                                                                                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred keep;\n"                                                          \
                     "setp.ne.b32 keep, " keep_name ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type               \
                     " {" WGMMA_NAMES_##n "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_name           \
                     ", keep, 1, 1, 1;\n"                                                          \
                     "}"                                                                           \
                     : WGMMA_SUMS_##n                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));             \
    }

WGMMA_SHARED(wgmma_bf16, "bf16", 32, "%16", "%17", "%18")
WGMMA_SHARED(wgmma_f16, "f16", 32, "%16", "%17", "%18")
WGMMA_SHARED(wgmma_bf16, "bf16", 64, "%32", "%33", "%34")
WGMMA_SHARED(wgmma_f16, "f16", 64, "%32", "%33", "%34")
WGMMA_SHARED(wgmma_bf16, "bf16", 80, "%40", "%41", "%42")
WGMMA_SHARED(wgmma_f16, "f16", 80, "%40", "%41", "%42")
WGMMA_SHARED(wgmma_bf16, "bf16", 128, "%64", "%65", "%66")
WGMMA_SHARED(wgmma_f16, "f16", 128, "%64", "%65", "%66")
WGMMA_REGISTERS(wgmma_bf16, "bf16", 32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_REGISTERS(wgmma_f16, "f16", 32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_REGISTERS(wgmma_bf16, "bf16", 64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_REGISTERS(wgmma_f16, "f16", 64, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_REGISTERS(wgmma_bf16, "bf16", 128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_REGISTERS(wgmma_f16, "f16", 128, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_REGISTERS(wgmma_bf16, "bf16", 256, "%128", "%129", "%130", "%131", "%132", "%133")
WGMMA_REGISTERS(wgmma_f16, "f16", 256, "%128", "%129", "%130", "%131", "%132", "%133")

#undef WGMMA_NAMES_32
#undef WGMMA_SUMS_32
#undef WGMMA_NAMES_64
#undef WGMMA_SUMS_64
#undef WGMMA_NAMES_80
#undef WGMMA_SUMS_80
#undef WGMMA_NAMES_128
#undef WGMMA_SUMS_128
#undef WGMMA_NAMES_256
#undef WGMMA_SUMS_256
#undef WGMMA_IN_8
#undef WGMMA_REGISTERS
#undef WGMMA_SHARED

/* SPDX-License-Identifier: Apache-2.0 */
// What of CUDA C++ the kernels use, for a host compiler: a thread of a block is a fiber, and lanes
// of a warp meet where they exchange something. Slow, and blind to races between warps; but every
// index, mask, schedule and conversion is the kernels' own.
#ifndef ATTN_TESTS_EMULATOR_CUDA_H
#define ATTN_TESTS_EMULATOR_CUDA_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
// Here, since it uses a word that is defined below.
#include <memory>

#define __device__
#define __global__
// Functions of several kernels have the same names: none may be left to the linker.
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ static __attribute__((noinline))
#define __shared__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return { x, y };
}
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return { x, y, z, w };
}
static inline float2 make_float2(float x, float y)
{
    return { x, y };
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return { x, y, z, w };
}

namespace emulator
{
struct index {
    unsigned x;
};
extern index thread, block, grid;

// Shared memory of the block that runs.
extern unsigned char shared[];

// Lets other threads run until `done`.
void wait(const std::function<bool()> &done);

// Lets other blocks run, if it is to be so.
void let_blocks_run();

// All lanes of the warp bring a T; whoever is last makes of all 32 of them what each gets.
struct meeting {
    alignas(16) unsigned char in[32][64], out[32][64];
    int count;
    unsigned turn;
};
meeting &own_meeting();

template <class R, class T, class F> static inline R meet(const T &value, F make)
{
    static_assert(sizeof(T) <= 64 && sizeof(R) <= 64);
    meeting &m = own_meeting();
    const unsigned lane = thread.x % 32, turn = m.turn;
    std::memcpy(m.in[lane], &value, sizeof(value));
    if (++m.count == 32) {
        T in[32];
        R out[32];
        for (int i = 0; i < 32; i++) std::memcpy(&in[i], m.in[i], sizeof(T));
        make(in, out);
        for (int i = 0; i < 32; i++) std::memcpy(m.out[i], &out[i], sizeof(R));
        m.count = 0;
        m.turn++;
    } else {
        wait([&] { return m.turn != turn; });
    }
    R result;
    std::memcpy(&result, m.out[lane], sizeof(result));
    return result;
}

void sync_block(int barrier, int threads);
void arrive_block(int barrier, int threads);
} // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid
#define s_bytes emulator_shared

// ---- between the lanes of a warp

template <class T> static inline T __shfl_sync(unsigned, T value, int from)
{
    struct both {
        T value;
        int from;
    };
    return emulator::meet<T>(both{ value, from }, [](const both *in, T *out) {
        for (int i = 0; i < 32; i++) out[i] = in[in[i].from & 31].value;
    });
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with)
{
    return __shfl_sync(mask, value, (int) (threadIdx.x % 32) ^ with);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, int delta)
{
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane < delta ? lane : lane - delta);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, int delta)
{
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane + delta > 31 ? lane : lane + delta);
}
static inline uint32_t __ballot_sync(unsigned, bool vote)
{
    return emulator::meet<uint32_t>(vote, [](const bool *in, uint32_t *out) {
        uint32_t all = 0;
        for (int i = 0; i < 32; i++) all |= (uint32_t) in[i] << i;
        for (int i = 0; i < 32; i++) out[i] = all;
    });
}
static inline uint32_t __reduce_min_sync(unsigned, uint32_t value)
{
    return emulator::meet<uint32_t>(value, [](const uint32_t *in, uint32_t *out) {
        uint32_t least = in[0];
        for (int i = 1; i < 32; i++) least = in[i] < least ? in[i] : least;
        for (int i = 0; i < 32; i++) out[i] = least;
    });
}
static inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value)
{
    return ~__reduce_min_sync(mask, ~value);
}
static inline uint32_t __reduce_or_sync(unsigned, uint32_t value)
{
    return emulator::meet<uint32_t>(value, [](const uint32_t *in, uint32_t *out) {
        uint32_t all = 0;
        for (int i = 0; i < 32; i++) all |= in[i];
        for (int i = 0; i < 32; i++) out[i] = all;
    });
}
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift)
{
    return (uint32_t) (((uint64_t) high << 32 | low) >> (shift & 31));
}
static inline uint32_t __reduce_add_sync(unsigned, uint32_t value)
{
    return emulator::meet<uint32_t>(value, [](const uint32_t *in, uint32_t *out) {
        uint32_t sum = 0;
        for (int i = 0; i < 32; i++) sum += in[i];
        for (int i = 0; i < 32; i++) out[i] = sum;
    });
}
static inline void __syncwarp()
{
    emulator::meet<int>(0, [](const int *, int *out) { std::memset(out, 0, 32 * sizeof(*out)); });
}
static inline void __syncthreads()
{
    emulator::sync_block(0, 0);
}
static inline void __threadfence()
{
}

// ---- of one thread

template <class T> static inline T __ldg(const T *g)
{
    return *g;
}
template <class T> static inline T __ldcg(const T *g)
{
    return *g;
}
static inline int32_t atomicAdd(int32_t *g, int32_t value)
{
    const int32_t before = *g;
    *g += value;
    return before;
}
static inline void atomicAdd(unsigned long long *g, unsigned long long value)
{
    *g += value;
}
static inline void atomicMin(int32_t *g, int32_t value)
{
    if (value < *g) *g = value;
}
static inline int __ffs(uint32_t x)
{
    return __builtin_ffs((int) x);
}
static inline int __clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector)
{
    const uint64_t both = (uint64_t) y << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++)
        result |= (uint32_t) (both >> ((selector >> i * 4 & 7) * 8) & 0xFF) << i * 8;
    return result;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
static inline uint32_t __float_as_uint(float x)
{
    uint32_t y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}
static inline float __uint_as_float(uint32_t x)
{
    float y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}
static inline int32_t min(int32_t a, int32_t b)
{
    return a < b ? a : b;
}
static inline int32_t max(int32_t a, int32_t b)
{
    return a > b ? a : b;
}
static inline int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline uint32_t min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}
static inline uint32_t max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

extern "C" unsigned char emulator_shared[];

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// kernels/common/ptx_wgmma.cuh, emulated: products are there as soon as they are asked for. Each
// warp computes its own 16 rows, from shared memory as the hardware finds it there.
#pragma once

#include "common/ptx_math.cuh"
#include "common/ptx_matrix.cuh"

static inline void wgmma_fence()
{
}

static inline void wgmma_commit()
{
}

template <int PENDING> static inline void wgmma_wait()
{
}

template <int N> static inline void take_registers(float (&)[N])
{
}

template <int N> static inline void hold_registers(float (&)[N])
{
}

static inline uint64_t wgmma_matrix(uint32_t s_matrix, uint32_t line, uint32_t atom)
{
    return (uint64_t) 1 << 62 | (uint64_t) (atom >> 4) << 32 | (uint64_t) (line >> 4) << 16 |
           s_matrix >> 4;
}

static inline uint32_t uniform_value(uint32_t value)
{
    return value;
}

static inline uint64_t wgmma_further(uint64_t matrix, uint32_t bytes)
{
    return matrix + (bytes >> 4);
}

// An element of a matrix: `along` K, and across it.
static inline uint32_t matrix_element(uint64_t matrix, int across, int along, bool is_k_major)
{
    const uint32_t start = (matrix & 0x3FFF) << 4, line = (matrix >> 16 & 0x3FFF) << 4,
                   atom = (matrix >> 32 & 0x3FFF) << 4;
    const uint32_t address = is_k_major ? start + across / 8 * atom + across % 8 * 128 + along * 2
                                        : start + across / 64 * line + across % 64 * 2 +
                                              along / 8 * atom + along % 8 * 128;
    return shared_half(address ^ (address >> 7 & 7) << 4);
}

// What a warp multiplies: [row][along], [along][column].
struct wgmma_operands {
    float a[16][16], b[16][256];
};

// Sums of all lanes of a warp.
struct wgmma_sums {
    float c[32][128];
};

// `a`: whole lanes bring what they have of it, or nothing if it is in shared memory.
template <class A, class VALUE, int N>
static inline void wgmma(float (&c)[N], const A &mine, uint64_t b, bool is_k_major, bool keep,
                         VALUE value, void (*take)(const A *, wgmma_operands &, VALUE))
{
    static wgmma_operands o;
    // Lanes of several warps may still have to fetch theirs.
    static wgmma_sums of_warp[32];
    wgmma_sums &sums = of_warp[threadIdx.x / 32];
    emulator::meet<int>(mine, [&](const A *in, int *) {
        take(in, o, value);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < N * 2; n++) o.b[k][n] = value(matrix_element(b, n, k, is_k_major));
        for (int row = 0; row < 16; row++)
            for (int n = 0; n < N * 2; n++) {
                float sum = 0.0f;
                for (int k = 0; k < 16; k++) sum += o.a[row][k] * o.b[k][n];
                sums.c[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2] = sum;
            }
    });
    for (int i = 0; i < N; i++) c[i] = (keep ? c[i] : 0.0f) + sums.c[threadIdx.x % 32][i];
}

template <class VALUE>
static inline void take_shared(const uint64_t *in, wgmma_operands &o, VALUE value)
{
    const int first = threadIdx.x / 32 % 4 * 16;
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            o.a[row][k] = value(matrix_element(in[0], first + row, k, true));
}

template <class VALUE>
static inline void take_registers(const four *in, wgmma_operands &o, VALUE value)
{
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 2; j++)
                o.a[lane / 4 + i % 2 * 8][lane % 4 * 2 + j + i / 2 * 8] =
                    value(in[lane].r[i] >> j * 16 & 0xFFFF);
}

using half_value = float (*)(uint32_t);

template <int N> static inline void wgmma_bf16(float (&c)[N], uint64_t a, uint64_t b, int keep)
{
    wgmma<uint64_t, half_value>(c, a, b, true, keep, bf16_value, take_shared<half_value>);
}

template <int N> static inline void wgmma_f16(float (&c)[N], uint64_t a, uint64_t b, int keep)
{
    wgmma<uint64_t, half_value>(c, a, b, true, keep, f16_value, take_shared<half_value>);
}

template <int N>
static inline void wgmma_bf16(float (&c)[N], const uint32_t (&a)[4], uint64_t b, int keep)
{
    const four mine = { { a[0], a[1], a[2], a[3] } };
    wgmma<four, half_value>(c, mine, b, false, keep, bf16_value, take_registers<half_value>);
}

template <int N>
static inline void wgmma_f16(float (&c)[N], const uint32_t (&a)[4], uint64_t b, int keep)
{
    const four mine = { { a[0], a[1], a[2], a[3] } };
    wgmma<four, half_value>(c, mine, b, false, keep, f16_value, take_registers<half_value>);
}

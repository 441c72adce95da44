/* SPDX-License-Identifier: Apache-2.0 */
// kernels/common/ptx_matrix.cuh, emulated. g = lane / 4, t = lane % 4.
#pragma once

#include "common/ptx_math.cuh"

struct four {
    uint32_t r[4];
};

static inline uint32_t shared_half(uint32_t s_address)
{
    uint16_t half;
    std::memcpy(&half, emulator_shared + s_address, sizeof(half));
    return half;
}

static inline void load_matrices(uint32_t (&r)[4], uint32_t s_row, bool transposed)
{
    const four got = emulator::meet<four>(s_row, [=](const uint32_t *s_rows, four *out) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int g = lane / 4, t = lane % 4;
                uint32_t both = 0;
                for (int j = 0; j < 2; j++) {
                    const int row = transposed ? t * 2 + j : g, column = transposed ? g : t * 2 + j;
                    both |= shared_half(s_rows[i * 8 + row] + column * 2) << j * 16;
                }
                out[lane].r[i] = both;
            }
    });
    for (int i = 0; i < 4; i++) r[i] = got.r[i];
}

static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t s_row)
{
    load_matrices(r, s_row, false);
}

static inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t s_row)
{
    load_matrices(r, s_row, true);
}

static inline uint32_t movmatrix_trans(uint32_t x)
{
    return emulator::meet<uint32_t>(x, [](const uint32_t *in, uint32_t *out) {
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            uint32_t both = 0;
            for (int j = 0; j < 2; j++)
                both |= (in[(t * 2 + j) * 4 + g / 2] >> g % 2 * 16 & 0xFFFF) << j * 16;
            out[lane] = both;
        }
    });
}

struct operands {
    uint32_t a[4], b[2];
    float c[4];
};

struct sums {
    float c[4];
};

template <class VALUE>
static inline void multiply_matrices(const operands *in, sums *out, VALUE value)
{
    static float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 2; j++)
                a[g + i % 2 * 8][t * 2 + j + i / 2 * 8] = value(in[lane].a[i] >> j * 16 & 0xFFFF);
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++)
                b[t * 2 + j + i * 8][g] = value(in[lane].b[i] >> j * 16 & 0xFFFF);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            out[lane].c[i] = in[lane].c[i] + sum;
        }
}

template <class VALUE>
static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, VALUE value)
{
    operands mine = { { a[0], a[1], a[2], a[3] }, { b0, b1 }, { c[0], c[1], c[2], c[3] } };
    const sums got = emulator::meet<sums>(mine, [=](const operands *in, sums *out) {
        multiply_matrices(in, out, value);
    });
    for (int i = 0; i < 4; i++) c[i] = got.c[i];
}

static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma(c, a, b0, b1, bf16_value);
}

static inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma(c, a, b0, b1, f16_value);
}

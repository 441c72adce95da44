/* SPDX-License-Identifier: Apache-2.0 */
// The bandwidth probe: reads memory once, in pieces of 16 bytes, and keeps nothing. What decode,
// which reads every K and V byte once, is held against.
//
// A block takes THREADS * LOADS consecutive pieces at a time, then goes a grid's width further;
// each thread has LOADS loads in flight. The sink is written only if all that a thread read XORs to
// one value, which keeps the loads alive and all but never happens.

#include "bench/read_params.h"
#include "common/ptx_copy.cuh"

constexpr int THREADS = ROW_WARPS * 32;
constexpr int LOADS = ROW_STAGES;

extern "C" __global__ void __launch_bounds__(THREADS)
    ROW_NAME(const __grid_constant__ struct attn_read_args args)
{
    let_next_grid_come();
    wait_for_grids_before();
    const uint4 *const g_base = static_cast<const uint4 *>(args.base);
    uint4 mix = make_uint4(0, 0, 0, 0);
    for (int64_t first = (int64_t) blockIdx.x * THREADS * LOADS; first < args.num_pieces;
         first += (int64_t) gridDim.x * THREADS * LOADS) {
        uint4 piece[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int64_t index = first + i * THREADS + threadIdx.x;
            piece[i] =
                index < args.num_pieces ? ld_global_stream(g_base + index) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            mix = make_uint4(mix.x ^ piece[i].x, mix.y ^ piece[i].y, mix.z ^ piece[i].z,
                             mix.w ^ piece[i].w);
    }
    if ((mix.x ^ mix.y ^ mix.z ^ mix.w) == 0x5eed1e55u) *args.sink = mix.x;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Kernels on the host: see cuda.h. Not for several threads.
#ifndef ATTN_TESTS_EMULATOR_H
#define ATTN_TESTS_EMULATOR_H

#include "kernels/decode/decode_params.h"
#include "kernels/prefill/prefill_params.h"
#include "kernels/tiled/tiled_params.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// From now on warps do not take turns: some are left out at random, and one at a time, for a while,
// nearly always. What a barrier has to keep in order so comes in many orders. 0: they take turns.
void emulator_shuffle(uint64_t seed);

// Runs a decode kernel of this name, block after block. What a block finds in shared memory is not
// 0. 0: done; -1: there is no such kernel; -2: all threads of a block wait for each other.
int emulator_run(const char *kernel, unsigned grid, unsigned threads,
                 const struct attn_decode_args *args);

// The same of a prefill kernel.
int emulator_run_prefill(const char *kernel, unsigned grid, unsigned threads,
                         const struct attn_prefill_args *args);

// The same of a tiled kernel.
int emulator_run_tiled(const char *kernel, unsigned grid, unsigned threads,
                       const struct attn_tiled_args *args);

#ifdef __cplusplus
}
#endif

#endif

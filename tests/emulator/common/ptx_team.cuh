/* SPDX-License-Identifier: Apache-2.0 */
// kernels/common/ptx_team.cuh, emulated: there are registers for all.
#pragma once

#include "cuda.h"

template <int N> static inline void raise_registers()
{
}

template <int N> static inline void lower_registers()
{
}

static inline void named_sync(int barrier, int threads)
{
    emulator::sync_block(barrier, threads);
}

static inline void named_arrive(int barrier, int threads)
{
    emulator::arrive_block(barrier, threads);
}

// Copies are there at once.
static inline void cp_async_arrive_extra(uint32_t)
{
}

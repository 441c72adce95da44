/* SPDX-License-Identifier: Apache-2.0 */
// A CUDA driver without a GPU: says what a test tells it to, fails where a test wants it to, and
// keeps a record of what it was asked for. One per process; not for several threads.
#ifndef ATTN_TESTS_FAKE_DRIVER_H
#define ATTN_TESTS_FAKE_DRIVER_H

#include "driver.h"
#include "kernels/bench/read_params.h"
#include "kernels/decode/decode_params.h"
#include "kernels/prefill/prefill_params.h"
#include "kernels/tiled/tiled_params.h"
#include "tests/support/fake_map.h"

#include <stdbool.h>

#define FAKE_MAX_DEVICES 4
#define FAKE_MAX_LAUNCHES 16
#define FAKE_MAX_MAPS 16

struct fake_gpu {
    const char *name;
    int major, minor, sm_count, smem_optin;
};

struct fake_launch {
    char kernel[64];
    unsigned grid[3], block[3], smem_bytes;
    attn_stream stream;
    // Current when it was launched.
    attn_cu_context context;
    // Of a decode kernel, of a prefill kernel, of a tiled kernel, or of kernel "read".
    struct attn_decode_args args;
    struct attn_prefill_args prefill;
    struct attn_tiled_args tiled;
    struct attn_read_args read;
};

struct fake_driver {
    // Told by the test.
    struct fake_gpu gpus[FAKE_MAX_DEVICES];
    int num_gpus;
    int version;
    // The fail_at-th call (from 1) of this symbol, and those after it, return fail_code; NULL:
    // none.
    const char *fail_symbol;
    int fail_at;
    attn_cu_result fail_code;
    // Called for every launch of a decode kernel, a prefill kernel, and a tiled kernel, if not NULL:
    // 0 if it ran.
    int (*run)(const char *kernel, unsigned grid, unsigned threads,
               const struct attn_decode_args *args);
    int (*run_prefill)(const char *kernel, unsigned grid, unsigned threads,
                       const struct attn_prefill_args *args);
    int (*run_tiled)(const char *kernel, unsigned grid, unsigned threads,
                     const struct attn_tiled_args *args);

    // Kept by the driver.
    attn_cu_context current;
    int num_calls, num_failed;
    int pushes, pops, retains, releases, loads, unloads;
    int kernels, functions_loaded, functions_set, largest_smem;
    // Memory of the device, which is the host's.
    int allocations, frees;
    size_t allocated_bytes;
    int memsets;
    attn_cu_deviceptr memset_address;
    size_t memset_count;
    int num_maps;
    struct fake_map maps[FAKE_MAX_MAPS];
    int num_launches;
    struct fake_launch launches[FAKE_MAX_LAUNCHES];
};

extern struct fake_driver fake;

// Back to one GPU like the one of the pack "hopper", driver 13.0, no context current, an empty
// record; the library uses this driver from then on.
void fake_driver_install(void);

// The primary context of a GPU, to be made current by setting fake.current.
attn_cu_context fake_primary_context(int ordinal);
// A context that belongs to no primary one.
attn_cu_context fake_other_context(void);

// True if everything taken was given back: contexts, libraries, pushes.
bool fake_driver_balanced(void);

// The symbols of all calls, NULL-terminated.
extern const char *const fake_driver_symbols[];

#endif

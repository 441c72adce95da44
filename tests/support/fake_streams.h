/* SPDX-License-Identifier: Apache-2.0 */
// Memory, streams, events and copies for the fake driver. What is enqueued is done late, in a
// random order among those that streams and events allow: whoever relies on an order that nothing
// enforces reads the wrong bytes, sooner or later. Device memory is host memory.
#ifndef ATTN_TESTS_FAKE_STREAMS_H
#define ATTN_TESTS_FAKE_STREAMS_H

#include "driver.h"

#include <stdbool.h>

struct fake_streams {
    // Told by the test. The fail_at-th call (from 1) of this symbol, and with `fail_on` those after
    // it, return fail_code; NULL: none.
    const char *fail_symbol;
    int fail_at;
    bool fail_on;
    attn_cu_result fail_code;
    // No more memory than this can be had on the device, and pinned on the host; 0: no limit.
    size_t device_limit, host_limit;
    // This stream does something only when no other one can, and somebody waits.
    bool has_slow;
    attn_stream slow;

    // Kept. Calls of fail_symbol, and those that failed.
    int num_calls, num_failed;
    // What is there now: allocations and their bytes, memory pinned in place, streams, events.
    int allocations, host_allocations, pinned, streams, events;
    // Events with times that were ever made.
    int timed_events;
    size_t device_bytes, host_bytes;
    // Copies enqueued, calls of the driver for them, and their bytes.
    int num_copies, num_copy_calls, num_batches;
    size_t bytes_copied;
    // Copies that are done.
    int num_copied;
};

extern struct fake_streams fake_streams;

// After fake_driver_install: takes part of its table's place, with an empty record. Without
// `batches` the driver has no call for several copies.
void fake_streams_install(uint64_t seed, bool batches);

// Does work(copy of argument) when its turn comes; up to 512 bytes.
void fake_streams_enqueue(attn_stream stream, void (*work)(const void *argument),
                          const void *argument, size_t bytes);
// Does everything that is enqueued.
void fake_streams_finish(void);
// Forgets what was counted and is to fail; what is enqueued stays.
void fake_streams_reset(void);

// Symbols that are taken over, NULL-terminated.
extern const char *const fake_streams_symbols[];

#endif

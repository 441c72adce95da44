/* SPDX-License-Identifier: Apache-2.0 */
// Checks one case, then times it.
#ifndef ATTN_CLI_BENCH_TIME_H
#define ATTN_CLI_BENCH_TIME_H

#include "attn/attn.h"
#include "cli/bench_case.h"
#include "cli/gpu.h"

struct bench_times {
    char kernel[64];
    // Of one call: median, and the 10th and 90th hundredth of the samples.
    double median_us, p10_us, p90_us;
    // Of a kernel that only reads as many bytes, measured in turn with the above; 0 on the host.
    double limit_us;
    // Median time the host spends in a call, and in the smallest launch that there is: a probe of
    // 16 bytes. Neither waits for the GPU. 0 on the host.
    double host_us, launch_us;
    // Skip-softmax: of a call on the same tensors without it, measured in turn with the above; 0 on
    // the host.
    double dense_us;
    // Of the pages of KV heads, how many skip-softmax left out.
    double dropped_share;
    // That the lengths make a call read and write; not the V of pages that are left out.
    double bytes;
    // Sets of pages used in turn, and calls in a graph; 0 on the host.
    int32_t copies, calls;
    // Rows compared with the definition, the largest share of the error bound among them, and
    // rms(o - exact) / rms(exact) over all of them.
    int32_t rows_checked;
    double max_ratio, relative_rms;
};

enum bench_result {
    BENCH_DONE,
    // No kernel takes the shape, or it does not fit the GPU's memory.
    BENCH_SKIPPED,
    // Or the result is beyond the error bound.
    BENCH_FAILED,
};

// Both: unless done, a sentence is in `why`.
enum bench_result bench_on_gpu(struct attn_device *device, struct gpu *gpu,
                               const struct bench_shape *shape, struct bench_times *times,
                               char *why, size_t why_size);
enum bench_result bench_on_host(struct attn_device *device, const struct bench_shape *shape,
                                struct bench_times *times, char *why, size_t why_size);

// ---- what other benchmarks share

// Sorts the samples.
double bench_take_median(double *samples, int count);
// Copies what went wrong first, of a driver call and of a call of the library; returns 0 if nothing
// did.
int bench_explain(int driver, enum attn_status status, char *why, size_t why_size);
// Microseconds of one of the graph's calls in a replay. A replay before it keeps the GPU busy until
// the host has enqueued the one that is timed. Returns 0, or what the driver did.
int bench_time_graph(struct gpu *gpu, attn_stream stream, struct gpu_graph *graph, int32_t calls,
                     double *us);
// Microseconds.
double bench_read_clock(void);

#endif

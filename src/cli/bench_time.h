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
    // That the lengths make a call read and write.
    double bytes;
    // Sets of pages used in turn.
    int32_t copies;
    // Rows compared with the definition, and the largest share of the error bound among them.
    int32_t rows_checked;
    double max_ratio;
};

// Both: 0, or -1 and a sentence in `why`: it failed, or the result is beyond the error bound.
int bench_on_gpu(struct attn_device *device, struct gpu *gpu, const struct bench_shape *shape,
                 struct bench_times *times, char *why, size_t why_size);
int bench_on_host(struct attn_device *device, const struct bench_shape *shape,
                  struct bench_times *times, char *why, size_t why_size);

#endif

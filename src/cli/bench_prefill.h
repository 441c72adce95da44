/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench prefill`: its shapes, their tensors, and their times.
#ifndef ATTN_CLI_BENCH_PREFILL_H
#define ATTN_CLI_BENCH_PREFILL_H

#include "attn/attn.h"
#include "cli/bench_time.h"

#include <stdbool.h>

struct prefill_bench_shape {
    char name[64];
    enum attn_dtype dtype;
    // Sequences of q_len query tokens at q_offset, which see all keys before them and their own.
    int32_t batch, q_len, q_offset;
    int32_t num_q_heads, num_kv_heads, head_dim;
    // 0: contiguous.
    int32_t page_size;
    // Lengths from RAGGED_MIN to RAGGED_MAX in place of q_len, at 0.
    bool ragged;
    // Of the set short: a chunk behind many keys, which are not in the cache.
    bool is_short;
};

// The list, and how long it is.
const struct prefill_bench_shape *prefill_bench_shapes(int *count);

// The tensors of a shape on the host.
struct prefill_bench_case {
    const struct prefill_bench_shape *shape;
    // Everything but what is written.
    struct attn_prefill_params params;
    // 4 * head_dim * num_q_heads for each visible pair.
    double flops;
    size_t q_bytes, kv_bytes, table_bytes, list_bytes;
    void *q, *k, *v;
    int32_t *table, *cu_seqlens, *kv_lens, *q_offsets;
};

// 0, or -1 if memory ran out.
int prefill_bench_make(struct prefill_bench_case *made, const struct prefill_bench_shape *shape);
void prefill_bench_free(struct prefill_bench_case *made);
// Query tokens of a sequence.
int32_t prefill_bench_tokens(const struct prefill_bench_case *made, int32_t sequence);

struct prefill_bench_times {
    char kernel[64], original[64];
    // Of one call of attn_prefill: median, and the 10th and 90th hundredth of the samples.
    double median_us, p10_us, p90_us;
    // Of a call of the original, of 64 query tokens a block, in turn with the above; 0 on the host,
    // and where sequences differ.
    double original_us;
    // What a call reads and writes; 0 where sequences differ. Of the set short, on a GPU: GB/s of a
    // kernel that only reads K and V, measured in turn with the above; else 0.
    double bytes, limit_gbs;
    // What the call's short form needs; 0: it has none.
    size_t workspace_bytes;
    int32_t num_counters;
    // Median time that the host spends in a call; 0 on the host.
    double host_us;
    double flops;
    // Calls in a graph; 0 on the host.
    int32_t calls;
    // As in struct bench_times.
    int32_t rows_checked;
    double max_ratio, relative_rms;
};

// Both: unless done, a sentence is in `why`.
enum bench_result prefill_bench_on_gpu(struct attn_device *device, struct gpu *gpu,
                                       const struct prefill_bench_shape *shape,
                                       struct prefill_bench_times *times, char *why,
                                       size_t why_size);
enum bench_result prefill_bench_on_host(struct attn_device *device,
                                        const struct prefill_bench_shape *shape,
                                        struct prefill_bench_times *times, char *why,
                                        size_t why_size);

// The command: argv[0] is "prefill".
int bench_prefill(int argc, char **argv);

#endif

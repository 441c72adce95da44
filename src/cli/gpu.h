/* SPDX-License-Identifier: Apache-2.0 */
// Memory, streams, graphs and timing on a GPU for the program and the tests, straight on libcuda
// (opened with dlopen). Every call returns 0, or the CUresult of the first driver call that failed.
#ifndef ATTN_CLI_GPU_H
#define ATTN_CLI_GPU_H

#include "attn/common.h"

struct gpu;

// Opens the GPU of that ordinal and makes its primary context current, until it is closed: opened
// ones nest, last opened, first closed. On failure *gpu is NULL and `why` has a sentence; returns
// the CUresult, or -1 if there is no driver.
int gpu_open(struct gpu **gpu, int ordinal, char *why, size_t why_size);
void gpu_close(struct gpu **gpu);

int gpu_alloc(struct gpu *gpu, void **pointer, size_t bytes);
// Memory that the host sees, too, while the GPU is idle.
int gpu_alloc_managed(struct gpu *gpu, void **pointer, size_t bytes);
void gpu_free(struct gpu *gpu, void *pointer);
// Synchronous copies and fills.
int gpu_upload(struct gpu *gpu, void *device, const void *host, size_t bytes);
int gpu_download(struct gpu *gpu, void *host, const void *device, size_t bytes);
int gpu_fill(struct gpu *gpu, void *device, int byte, size_t bytes);

// A non-blocking stream of its own.
int gpu_stream_create(struct gpu *gpu, attn_stream *stream);
void gpu_stream_destroy(struct gpu *gpu, attn_stream stream);
int gpu_stream_sync(struct gpu *gpu, attn_stream stream);
int gpu_sync(struct gpu *gpu);

struct gpu_graph;
// Whatever is enqueued on `stream` between begin and end goes into *graph instead of running.
int gpu_graph_begin(struct gpu *gpu, attn_stream stream);
int gpu_graph_end(struct gpu *gpu, attn_stream stream, struct gpu_graph **graph);
int gpu_graph_launch(struct gpu *gpu, struct gpu_graph *graph, attn_stream stream);
void gpu_graph_destroy(struct gpu *gpu, struct gpu_graph **graph);

// Milliseconds between two points of a stream: mark start, mark end, then read (waits for the end).
int gpu_timer_start(struct gpu *gpu, attn_stream stream);
int gpu_timer_stop(struct gpu *gpu, attn_stream stream);
int gpu_timer_read(struct gpu *gpu, float *milliseconds);

// What a benchmark has to name beside its numbers.
struct gpu_description {
    char name[128];
    int driver_version;
    int sm_count;
    int compute_capability_major, compute_capability_minor;
    int l2_bytes;
    int clock_khz, memory_clock_khz;
    size_t memory_bytes;
};
int gpu_describe(struct gpu *gpu, struct gpu_description *description);

#endif

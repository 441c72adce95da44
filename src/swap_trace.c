/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_trace.h"

#include <stdlib.h>
#include <time.h>

// No mark is that early.
#define NOT_YET (-1.0)

static double read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double) now.tv_sec + 1e-3 * (double) now.tv_nsec;
}

static struct attn_swap_times *times_of(const struct attn_swap_trace *const trace,
                                        const uint64_t tile)
{
    return &trace->tiles[tile % (uint64_t) trace->room];
}

int64_t attn_swap_trace_bytes(const int32_t count, const int32_t num_planes)
{
    return count ? ((int64_t) count + num_planes) * (int64_t) sizeof(struct attn_swap_times) : 0;
}

bool attn_swap_trace_init(struct attn_swap_trace *const trace, const int32_t count,
                          const int32_t num_planes)
{
    *trace = (struct attn_swap_trace){ .count = count, .room = count + num_planes };
    if (count == 0) return true;
    trace->tiles = calloc((size_t) trace->room, sizeof(*trace->tiles));
    return trace->tiles != NULL;
}

attn_cu_result attn_swap_trace_open(struct attn_swap_trace *const trace,
                                    const struct attn_swap_device *const on)
{
    if (trace->count == 0) return ATTN_CU_SUCCESS;
    attn_cu_result result = attn_swap_timer_create(on, &trace->base);
    for (int32_t i = 0; i < trace->room; i++)
        for (int j = 0; result == ATTN_CU_SUCCESS && j < ATTN_SWAP_NUM_MARKS; j++)
            result = attn_swap_timer_create(on, &trace->tiles[i].events[j]);
    return result;
}

void attn_swap_trace_free(struct attn_swap_trace *const trace,
                          const struct attn_swap_device *const on)
{
    attn_swap_event_destroy(on, trace->base);
    for (int32_t i = 0; trace->tiles && i < trace->room; i++)
        for (int j = 0; j < ATTN_SWAP_NUM_MARKS; j++)
            attn_swap_event_destroy(on, trace->tiles[i].events[j]);
    free(trace->tiles);
    *trace = (struct attn_swap_trace){ 0 };
}

attn_cu_result attn_swap_trace_start(struct attn_swap_trace *const trace,
                                     const struct attn_swap_device *const on)
{
    if (trace->count == 0 || trace->started) return ATTN_CU_SUCCESS;
    attn_cu_result result = attn_swap_event_record(on, trace->base, on->copies);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_sync(on, trace->base);
    trace->base_us = read_clock();
    trace->started = result == ATTN_CU_SUCCESS;
    return result;
}

void attn_swap_trace_begin(struct attn_swap_trace *const trace, const uint64_t tile,
                           const int32_t layer, const int64_t bytes)
{
    if (trace->count == 0) return;
    struct attn_swap_times *const times = times_of(trace, tile);
    times->layer = layer;
    times->bytes = bytes;
    times->read_start = times->read_end = 0;
    times->marks[ATTN_SWAP_COPY_START] = NOT_YET;
}

void attn_swap_trace_submit(struct attn_swap_trace *const trace, const uint64_t tile)
{
    if (trace->count == 0) return;
    struct attn_swap_times *const times = times_of(trace, tile);
    if (times->read_start == 0) times->read_start = read_clock() - trace->base_us;
}

void attn_swap_trace_wait(struct attn_swap_trace *const trace, const uint64_t tile)
{
    if (trace->count > 0) times_of(trace, tile)->read_end = read_clock() - trace->base_us;
}

attn_cu_result attn_swap_trace_mark(struct attn_swap_trace *const trace,
                                    const struct attn_swap_device *const on, const uint64_t tile,
                                    const enum attn_swap_mark mark, const attn_stream stream)
{
    if (trace->count == 0) return ATTN_CU_SUCCESS;
    struct attn_swap_times *const times = times_of(trace, tile);
    if (mark == ATTN_SWAP_COPY_START && times->marks[mark] != NOT_YET) return ATTN_CU_SUCCESS;
    times->marks[mark] = read_clock() - trace->base_us;
    return attn_swap_event_record(on, times->events[mark], stream);
}

attn_cu_result attn_swap_trace_read(const struct attn_swap_trace *const trace,
                                    const struct attn_swap_device *const on, const uint64_t tile,
                                    struct attn_swap_tile *const to)
{
    const struct attn_swap_times *const times = times_of(trace, tile);
    double marks[ATTN_SWAP_NUM_MARKS];
    attn_cu_result result = attn_swap_event_sync(on, times->events[ATTN_SWAP_COMPUTE_END]);
    for (int i = 0; result == ATTN_CU_SUCCESS && i < ATTN_SWAP_NUM_MARKS; i++) {
        marks[i] = times->marks[i];
        result = attn_swap_timer_read(on, trace->base, times->events[i], &marks[i]);
    }
    if (result != ATTN_CU_SUCCESS) return result;
    to->layer = times->layer;
    to->number = tile;
    to->bytes = times->bytes;
    to->read_start = times->read_start;
    to->read_end = times->read_end;
    to->copy_start = marks[ATTN_SWAP_COPY_START];
    to->copy_end = marks[ATTN_SWAP_COPY_END];
    to->compute_start = marks[ATTN_SWAP_COMPUTE_START];
    to->compute_end = marks[ATTN_SWAP_COMPUTE_END];
    return ATTN_CU_SUCCESS;
}

/* SPDX-License-Identifier: Apache-2.0 */
// When the parts of the last tiles began and ended. On a GPU by events, which take a little time of
// the streams; on the host by its clock. A trace of no tiles does nothing.
#ifndef ATTN_SRC_SWAP_TRACE_H
#define ATTN_SRC_SWAP_TRACE_H

#include "attn/swap.h"
#include "swap_device.h"

enum attn_swap_mark {
    ATTN_SWAP_COPY_START,
    ATTN_SWAP_COPY_END,
    ATTN_SWAP_COMPUTE_START,
    ATTN_SWAP_COMPUTE_END,
    ATTN_SWAP_NUM_MARKS,
};

struct attn_swap_times {
    int32_t layer;
    int64_t bytes;
    // Microseconds, as struct attn_swap_tile has them; of marks on the host alone.
    double read_start, read_end, marks[ATTN_SWAP_NUM_MARKS];
    attn_cu_event events[ATTN_SWAP_NUM_MARKS];
};

struct attn_swap_trace {
    // Tiles that can be asked for; 0: there is no trace. There is room for those that are planned
    // beside them.
    int32_t count, room;
    // Of tile n: tiles[n % room].
    struct attn_swap_times *tiles;
    // Where times count from: on the device, and of the host's clock in microseconds.
    attn_cu_event base;
    double base_us;
    bool started;
};

// Bytes that init allocates.
int64_t attn_swap_trace_bytes(int32_t count, int32_t num_planes);
// False without memory; free in either case.
bool attn_swap_trace_init(struct attn_swap_trace *trace, int32_t count, int32_t num_planes);
attn_cu_result attn_swap_trace_open(struct attn_swap_trace *trace,
                                    const struct attn_swap_device *on);
void attn_swap_trace_free(struct attn_swap_trace *trace, const struct attn_swap_device *on);

// Before the first call's work. Waits for the device.
attn_cu_result attn_swap_trace_start(struct attn_swap_trace *trace,
                                     const struct attn_swap_device *on);
// The tile is planned: it has no times as yet.
void attn_swap_trace_begin(struct attn_swap_trace *trace, uint64_t tile, int32_t layer,
                           int64_t bytes);
// A read of the tile is submitted; one was waited for.
void attn_swap_trace_submit(struct attn_swap_trace *trace, uint64_t tile);
void attn_swap_trace_wait(struct attn_swap_trace *trace, uint64_t tile);
// What comes next on the stream. Of a tile's first ATTN_SWAP_COPY_START only, if there are several.
attn_cu_result attn_swap_trace_mark(struct attn_swap_trace *trace,
                                    const struct attn_swap_device *on, uint64_t tile,
                                    enum attn_swap_mark mark, attn_stream stream);
// Waits until the tile is computed.
attn_cu_result attn_swap_trace_read(const struct attn_swap_trace *trace,
                                    const struct attn_swap_device *on, uint64_t tile,
                                    struct attn_swap_tile *times);

#endif

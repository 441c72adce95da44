/* SPDX-License-Identifier: Apache-2.0 */
// What a swap cache holds, and what tests may put in place of files and of tiled decode.
#ifndef ATTN_SRC_SWAP_H
#define ATTN_SRC_SWAP_H

#include "attn/swap.h"
#include "attn/tiled.h"
#include "swap_device.h"
#include "swap_slots.h"
#include "swap_store.h"
#include "swap_trace.h"

// Tiled decode, as its header has it.
struct attn_swap_compute {
    enum attn_status (*create)(struct attn_tiled **tiled, struct attn_device *device,
                               const struct attn_tiled_create_params *params);
    void (*destroy)(struct attn_tiled **tiled);
    enum attn_status (*begin_step)(struct attn_tiled *tiled, int32_t num_seqs, attn_stream stream);
    enum attn_status (*step_tile)(struct attn_tiled *tiled,
                                  const struct attn_tiled_step_params *params, attn_stream stream);
    enum attn_status (*finalize)(struct attn_tiled *tiled,
                                 const struct attn_tiled_finalize_params *params,
                                 attn_stream stream);
};

// A tile in work. Its table, on the host and on the device: how many blocks of each sequence, how
// many slots of the last of them, and from there on a row of slots for each sequence.
struct attn_swap_plane {
    int32_t *table;
    int32_t *device_table;
    // The tile's copies are done, its table is read: slots and table may be read by the tile. The
    // tile is computed: both may be written again.
    attn_cu_event copied, computed;
    // Blocks that had no slot, ascending, and the slots they get, ascending.
    int32_t num_wanted;
    int32_t *wanted, *slots;
    // Sequences that have blocks in it: from first on, up to end.
    int32_t first_seq, end_seq;
    // Reads submitted when the last of its own had been.
    uint64_t end_read;
};

// A read that was submitted and not used yet.
struct attn_swap_read {
    int64_t bytes, offset;
    unsigned char *to;
};

// Reads go through buffers in turn, in the order in which they are used.
struct attn_swap_staging {
    struct attn_swap_buffers buffers;
    bool direct;
    // Of each buffer: its read, and the copy out of it.
    struct attn_swap_read *reads;
    attn_cu_event *copied;
    // Numbers of reads, from 0 on: used, and submitted.
    uint64_t used, submitted;
    // Where the next read begins: of which tile, which of its wanted blocks, how far into them.
    uint64_t tile;
    int32_t wanted;
    int64_t done;
};

struct attn_swap {
    struct attn_device *device;
    struct attn_swap_device on;
    struct attn_swap_dims dims;
    struct attn_swap_info info;
    struct attn_swap_stats stats;
    struct attn_swap_store store;
    struct attn_swap_slots slots;
    struct attn_tiled *tiled;
    const struct attn_swap_compute *compute;
    // Slots on the device.
    unsigned char *memory;
    struct attn_swap_plane *planes;
    struct attn_swap_staging staging;
    struct attn_swap_copies copies;
    struct attn_swap_trace trace;
    // The pool is this handle's; the caller's was pinned.
    bool owns_pool, pinned;
    // Tiles that were planned, and that were enqueued, each with 0 before the first.
    uint64_t planned, enqueued;
    // Of the last call: what another stream has to wait for.
    attn_cu_event last;
    // Of the present call: blocks of each sequence's list that are in tiles.
    int32_t *done;
    // A call has failed: what is in flight is not known, nothing is resident.
    bool unsettled;
    // Copies from the pool may be in flight.
    bool copying;
};

// attn_swap_create with another table for files, or another tiled decode; NULL: the library's own.
enum attn_status attn_swap_create_with(struct attn_swap **swap, struct attn_device *device,
                                       const struct attn_swap_create_params *params,
                                       const struct attn_swap_io *io,
                                       const struct attn_swap_compute *compute);

// attn_swap_decode with checked params, in the device's context.
enum attn_status attn_swap_run(struct attn_swap *swap, const struct attn_swap_decode_params *params,
                               attn_stream stream);

// After a failed call: waits until nothing is in flight; nothing is resident then.
enum attn_status attn_swap_settle(struct attn_swap *swap);

// A failure of the device: the driver's sentence, or that of memory.
enum attn_status attn_swap_fail(const struct attn_swap *swap, attn_cu_result result,
                                const char *what);

// Words of a plane's table: a count and a number of slots for each of max_seqs, then their rows of
// tile_blocks.
int64_t attn_swap_table_words(const struct attn_swap_dims *dims);

#endif

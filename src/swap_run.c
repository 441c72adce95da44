/* SPDX-License-Identifier: Apache-2.0 */
// A call of attn_swap_decode: its lists are cut into tiles; a tile is planned (which
// blocks get which slots), its reads are submitted, its copies enqueued, and then it is computed.
// From a file up to num_planes tiles are between planned and enqueued, from memory one.
//
// What is in which slot, and what is computed in which order, follows from the calls alone, never
// from when reads or copies are done.
#include "swap.h"

#include "status.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#ifdef ATTN_MUTATION
#include "tests/mutations/swap.h"
#endif

// Of BF16 and FP16.
#define ELEMENT_BYTES 2

int64_t attn_swap_table_words(const struct attn_swap_dims *const dims)
{
    return (int64_t) dims->max_seqs * (2 + (int64_t) dims->tile_blocks);
}

static struct attn_swap_plane *plane_of(const struct attn_swap *const swap, const uint64_t tile)
{
    return &swap->planes[tile % (uint64_t) swap->dims.num_planes];
}

static int32_t *row_of(const struct attn_swap *const swap, int32_t *const table,
                       const int32_t sequence)
{
    const int64_t words = swap->dims.tile_blocks;
    return table + (int64_t) 2 * swap->dims.max_seqs + sequence * words;
}

static int32_t count_blocks(const struct attn_swap *const swap, const int32_t len)
{
    return len / swap->dims.block_size + (len % swap->dims.block_size > 0);
}

// Numbered over all layers.
static int32_t block_at(const struct attn_swap *const swap,
                        const struct attn_swap_decode_params *const params, const int32_t sequence,
                        const int32_t index)
{
    return params->layer * swap->dims.num_blocks +
           params->blocks[sequence * params->blocks_stride + index];
}

enum attn_status attn_swap_fail(const struct attn_swap *const swap, const attn_cu_result result,
                                const char *const what)
{
    if (swap->on.driver) return attn_device_cu_fail(swap->device, result, what);
    return attn_fail(swap->device->log, swap->device->log_user, ATTN_ERROR_NO_MEMORY,
                     "%s: out of memory", what);
}

static enum attn_status check_result(const struct attn_swap *const swap,
                                     const attn_cu_result result, const char *const what)
{
    return result == ATTN_CU_SUCCESS ? ATTN_OK : attn_swap_fail(swap, result, what);
}

// ---- planning

static void sift_down(int32_t *const numbers, const int32_t count, int32_t at)
{
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && numbers[child + 1] > numbers[child]) child++;
        if (numbers[at] >= numbers[child]) return;
        const int32_t number = numbers[at];
        numbers[at] = numbers[child];
        numbers[child] = number;
    }
}

// By a heap: qsort may allocate.
static void sort_numbers(int32_t *const numbers, const int32_t count)
{
    bool sorted = true;
    for (int32_t i = 1; sorted && i < count; i++) sorted = numbers[i - 1] <= numbers[i];
    if (sorted) return;
    for (int32_t i = count / 2; i-- > 0;) sift_down(numbers, count, i);
    for (int32_t i = count; i-- > 1;) {
        const int32_t largest = numbers[0];
        numbers[0] = numbers[i];
        numbers[i] = largest;
        sift_down(numbers, i, 0);
    }
}

// One round of a layer lists each of its blocks in one call.
static void start_call(struct attn_swap *const swap,
                       const struct attn_swap_decode_params *const params)
{
    for (int32_t i = 0; i < params->num_seqs; i++)
        for (int32_t j = 0; j < count_blocks(swap, params->seq_lens[i]); j++)
            if (attn_swap_slots_starts_round(&swap->slots, params->layer,
                                             block_at(swap, params, i, j))) {
                attn_swap_slots_next_round(&swap->slots, params->layer);
                return;
            }
}

// Lists a block in the tile that is being planned; false if it has no room for another one.
static bool list_block(struct attn_swap *const swap, const uint64_t tile, const int32_t layer,
                       const int32_t block, int32_t *const distinct)
{
    struct attn_swap_plane *const plane = plane_of(swap, tile);
    bool is_new;
    if (*distinct == swap->dims.tile_blocks &&
        !attn_swap_slots_is_listed(&swap->slots, tile, block))
        return false;
    const bool resident = attn_swap_slots_list(&swap->slots, tile, layer, block, &is_new);
    if (is_new) (*distinct)++;
    if (is_new && !resident) {
        plane->wanted[plane->num_wanted++] = block;
        swap->stats.misses++;
    } else {
        swap->stats.hits++;
    }
    return true;
}

// More blocks of a sequence, up to `most` and as far as there is room. Their numbers stand in its
// row until they have slots.
static void list_sequence(struct attn_swap *const swap, const uint64_t tile,
                          const struct attn_swap_decode_params *const params,
                          const int32_t sequence, const int32_t most, int32_t *const distinct)
{
    struct attn_swap_plane *const plane = plane_of(swap, tile);
    const int32_t blocks = count_blocks(swap, params->seq_lens[sequence]);
    int32_t *const row = row_of(swap, plane->table, sequence), *const done = &swap->done[sequence];
    int32_t *const count = &plane->table[sequence];
    for (int32_t i = 0; i < most && *done < blocks && *count < swap->dims.tile_blocks; i++) {
        const int32_t block = block_at(swap, params, sequence, *done);
        if (!list_block(swap, tile, params->layer, block, distinct)) return;
        row[(*count)++] = block;
        (*done)++;
    }
}

// Slots of the last block that a sequence has in the tile.
static int32_t count_slots(const struct attn_swap *const swap, const int32_t len,
                           const int32_t done)
{
    const int32_t size = swap->dims.block_size, blocks = count_blocks(swap, len);
    return done == blocks && len % size > 0 ? len % size : size;
}

// Sequences that have blocks left share a tile, so that all of the device has work; what some do
// not need, the first ones get.
static void list_blocks(struct attn_swap *const swap, const uint64_t tile,
                        const struct attn_swap_decode_params *const params)
{
    struct attn_swap_plane *const plane = plane_of(swap, tile);
    int32_t active = 0, distinct = 0;
    for (int32_t s = 0; s < params->num_seqs; s++)
        active += swap->done[s] < count_blocks(swap, params->seq_lens[s]);
    const int32_t share = active < swap->dims.tile_blocks ? swap->dims.tile_blocks / active : 1;
    for (int32_t s = 0; s < params->num_seqs; s++)
        list_sequence(swap, tile, params, s, share, &distinct);
    plane->first_seq = params->num_seqs;
    plane->end_seq = 0;
    for (int32_t s = 0; s < params->num_seqs; s++) {
        list_sequence(swap, tile, params, s, INT32_MAX, &distinct);
        plane->table[swap->dims.max_seqs + s] =
            count_slots(swap, params->seq_lens[s], swap->done[s]);
        if (plane->table[s] == 0) continue;
        if (plane->first_seq > s) plane->first_seq = s;
        plane->end_seq = s + 1;
    }
}

static void assign_slots(struct attn_swap *const swap, const uint64_t tile)
{
    struct attn_swap_plane *const plane = plane_of(swap, tile);
    // Adjacent blocks get adjacent slots, if there are any: that makes one copy of them.
    sort_numbers(plane->wanted, plane->num_wanted);
    for (int32_t i = 0; i < plane->num_wanted; i++) {
        bool evicted;
        plane->slots[i] = attn_swap_slots_take(&swap->slots, &evicted);
        swap->stats.evictions += evicted;
    }
    sort_numbers(plane->slots, plane->num_wanted);
    for (int32_t i = 0; i < plane->num_wanted; i++)
        attn_swap_slots_assign(&swap->slots, tile, plane->slots[i], plane->wanted[i]);
    for (int32_t s = plane->first_seq; s < plane->end_seq; s++) {
        int32_t *const row = row_of(swap, plane->table, s);
        for (int32_t i = 0; i < plane->table[s]; i++) row[i] = swap->slots.slot_of[row[i]];
    }
}

static enum attn_status plan_tile(struct attn_swap *const swap,
                                  const struct attn_swap_decode_params *const params)
{
    const uint64_t tile = swap->planned + 1;
    struct attn_swap_plane *const plane = plane_of(swap, tile);
    // The table is about to be written: the copy of what it was is done.
    const enum attn_status status =
        check_result(swap, attn_swap_event_sync(&swap->on, plane->copied),
                     "the copies of an earlier tile cannot be waited for");
    if (status != ATTN_OK) return status;
    attn_swap_slots_begin_tile(&swap->slots, tile);
    memset(plane->table, 0, (size_t) swap->dims.max_seqs * 2 * sizeof(int32_t));
    plane->num_wanted = 0;
    list_blocks(swap, tile, params);
    assign_slots(swap, tile);
    attn_swap_trace_begin(&swap->trace, tile, params->layer,
                          plane->num_wanted * swap->info.block_bytes);
    swap->planned = tile;
    return ATTN_OK;
}

static bool is_listed(const struct attn_swap *const swap,
                      const struct attn_swap_decode_params *const params)
{
    for (int32_t s = 0; s < params->num_seqs; s++)
        if (swap->done[s] < count_blocks(swap, params->seq_lens[s])) return false;
    return true;
}

// ---- times

static enum attn_status mark(struct attn_swap *const swap, const uint64_t tile,
                             const enum attn_swap_mark what, const attn_stream stream)
{
    return check_result(swap, attn_swap_trace_mark(&swap->trace, &swap->on, tile, what, stream),
                        "a tile's times cannot be taken");
}

// ---- where blocks are and go to

// Of wanted blocks from `first` on, how many lie side by side, in the store as in slots.
static int32_t count_adjacent(const struct attn_swap_plane *const plane, const int32_t first)
{
    int32_t end = first + 1;
    while (end < plane->num_wanted && plane->wanted[end] == plane->wanted[end - 1] + 1 &&
           plane->slots[end] == plane->slots[end - 1] + 1)
        end++;
    return end - first;
}

static unsigned char *slot_at(const struct attn_swap *const swap, const int32_t slot)
{
    return swap->memory + slot * swap->info.block_bytes;
}

// ---- from host memory

static enum attn_status copy_blocks(struct attn_swap *const swap, const uint64_t tile)
{
    const struct attn_swap_plane *const plane = plane_of(swap, tile);
    struct attn_swap_copies *const copies = &swap->copies;
    const enum attn_status status = mark(swap, tile, ATTN_SWAP_COPY_START, swap->on.copies);
    if (status != ATTN_OK) return status;
    copies->count = 0;
    for (int32_t i = 0, adjacent; i < plane->num_wanted; i += adjacent) {
        const unsigned char *const from =
            swap->store.pool + attn_swap_store_place(&swap->store, plane->wanted[i]);
        adjacent = count_adjacent(plane, i);
        copies->to[copies->count] = (uintptr_t) slot_at(swap, plane->slots[i]);
        copies->from[copies->count] = (uintptr_t) from;
        copies->bytes[copies->count] = (size_t) (adjacent * swap->info.block_bytes);
        swap->stats.bytes_copied += copies->bytes[copies->count++];
    }
    swap->stats.copies += copies->count;
    return check_result(swap, attn_swap_copy_all(&swap->on, copies),
                        "blocks cannot be copied to the device");
}

// ---- from a file

static int32_t buffer_of(const struct attn_swap_staging *const staging, const uint64_t read)
{
    return (int32_t) (read % (uint64_t) staging->buffers.count);
}

// The next part of the tile's blocks that fits a buffer. False: there is none.
static bool next_read(struct attn_swap *const swap, struct attn_swap_read *const read)
{
    struct attn_swap_staging *const staging = &swap->staging;
    const struct attn_swap_plane *const plane = plane_of(swap, staging->tile);
    if (staging->wanted == plane->num_wanted) return false;
    const int32_t first = staging->wanted, adjacent = count_adjacent(plane, first);
    const int64_t all = adjacent * swap->info.block_bytes, left = all - staging->done;
    read->bytes = left < staging->buffers.bytes ? left : staging->buffers.bytes;
    read->offset = attn_swap_store_place(&swap->store, plane->wanted[first]) + staging->done;
    read->to = slot_at(swap, plane->slots[first]) + staging->done;
    staging->done += read->bytes;
    if (staging->done == all) {
        staging->wanted += adjacent;
        staging->done = 0;
    }
    return true;
}

static enum attn_status submit_read(struct attn_swap *const swap,
                                    const struct attn_swap_read *const read)
{
    struct attn_swap_staging *const staging = &swap->staging;
    const int32_t buffer = buffer_of(staging, staging->submitted);
    // What the buffer had has been copied.
    const enum attn_status status =
        check_result(swap, attn_swap_event_sync(&swap->on, staging->copied[buffer]),
                     "the copy of an earlier read cannot be waited for");
    if (status != ATTN_OK) return status;
    const int error = swap->store.io->submit(swap->store.file, buffer, read->bytes, read->offset);
    if (error)
        return attn_swap_store_fail(&swap->store, "reading", read->bytes, read->offset, error);
    attn_swap_trace_submit(&swap->trace, staging->tile);
    staging->reads[buffer] = *read;
    staging->submitted++;
    return ATTN_OK;
}

// As many reads of planned tiles as there are buffers for.
static enum attn_status submit_reads(struct attn_swap *const swap)
{
    struct attn_swap_staging *const staging = &swap->staging;
    enum attn_status status = ATTN_OK;
    while (status == ATTN_OK && staging->tile <= swap->planned &&
           staging->submitted - staging->used < (uint64_t) staging->buffers.count) {
        struct attn_swap_read read;
        if (next_read(swap, &read)) {
            status = submit_read(swap, &read);
        } else {
            plane_of(swap, staging->tile++)->end_read = staging->submitted;
            staging->wanted = 0;
        }
    }
    return status;
}

// A read may end early. What it lacks comes the plain way.
static enum attn_status finish_read(struct attn_swap *const swap,
                                    const struct attn_swap_read *const read,
                                    unsigned char *const buffer, int64_t got)
{
    const struct attn_swap_store *const store = &swap->store;
    if (got >= 0 && got < read->bytes) {
        const int64_t more =
            store->io->read(store->file, buffer + got, read->bytes - got, read->offset + got);
        got = more < 0 ? more : got + more;
    }
    if (got < 0) return attn_swap_store_fail(store, "reading", read->bytes, read->offset, got);
    if (got < read->bytes) return attn_swap_store_fail_short(store, read->offset + got);
    swap->stats.bytes_read += (uint64_t) got;
    return ATTN_OK;
}

// The oldest read, which is one of the tile's: waits for it, and enqueues its copy.
static enum attn_status use_read(struct attn_swap *const swap, const uint64_t tile)
{
    struct attn_swap_staging *const staging = &swap->staging;
    const int32_t buffer = buffer_of(staging, staging->used);
    const struct attn_swap_read *const read = &staging->reads[buffer];
    unsigned char *const memory = staging->buffers.memory + buffer * staging->buffers.bytes;
    bool stalled = false;
    const int64_t got = swap->store.io->wait(swap->store.file, buffer, &stalled);
    staging->used++;
    swap->stats.stalls += stalled;
    enum attn_status status = finish_read(swap, read, memory, got);
    attn_swap_trace_wait(&swap->trace, tile);
    if (status == ATTN_OK) status = mark(swap, tile, ATTN_SWAP_COPY_START, swap->on.copies);
    if (status != ATTN_OK) return status;
    attn_cu_result result = attn_swap_copy(&swap->on, read->to, memory, (size_t) read->bytes);
    if (result == ATTN_CU_SUCCESS)
        result = attn_swap_event_record(&swap->on, staging->copied[buffer], swap->on.copies);
    swap->stats.bytes_copied += (uint64_t) read->bytes;
    swap->stats.copies++;
    return check_result(swap, result, "what was read cannot be copied to the device");
}

// All reads of the tile; those of tiles behind it are submitted meanwhile.
static enum attn_status read_blocks(struct attn_swap *const swap, const uint64_t tile)
{
    const struct attn_swap_staging *const staging = &swap->staging;
    const struct attn_swap_plane *const plane = plane_of(swap, tile);
    enum attn_status status = submit_reads(swap);
    while (status == ATTN_OK && (staging->tile <= tile || staging->used < plane->end_read)) {
        status = use_read(swap, tile);
        if (status == ATTN_OK) status = submit_reads(swap);
    }
    return status;
}

// Nothing of a failed call comes back later: buffers are free again.
static void drain_reads(struct attn_swap *const swap)
{
    struct attn_swap_staging *const staging = &swap->staging;
    for (; staging->used < staging->submitted; staging->used++) {
        bool stalled;
        swap->store.io->wait(swap->store.file, buffer_of(staging, staging->used), &stalled);
    }
}

// ---- a tile, on the device

static enum attn_status upload_table(const struct attn_swap *const swap,
                                     const struct attn_swap_plane *const plane)
{
    const size_t word = sizeof(int32_t);
    const size_t heads = (size_t) swap->dims.max_seqs * 2 * word;
    const size_t row = (size_t) swap->dims.tile_blocks * word;
    const size_t rows = (size_t) (plane->end_seq - plane->first_seq) * row;
    int32_t *const to = row_of(swap, plane->device_table, plane->first_seq);
    attn_cu_result result = attn_swap_copy(&swap->on, plane->device_table, plane->table, heads);
    if (result == ATTN_CU_SUCCESS && rows > 0)
        result = attn_swap_copy(&swap->on, to, row_of(swap, plane->table, plane->first_seq), rows);
    return check_result(swap, result, "a tile's table cannot be copied to the device");
}

static enum attn_status compute_tile(const struct attn_swap *const swap,
                                     const struct attn_swap_decode_params *const params,
                                     const struct attn_swap_plane *const plane,
                                     const attn_stream stream)
{
    const struct attn_swap_info *const info = &swap->info;
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    step.num_seqs = params->num_seqs;
    step.q = params->q;
    step.k_pool = swap->memory;
    step.v_pool = swap->memory + swap->dims.num_kv_heads * info->stripe_bytes;
    step.tile_blocks = row_of(swap, plane->device_table, 0);
    step.tile_block_counts = plane->device_table;
    step.valid_slots = plane->device_table + swap->dims.max_seqs;
    step.block_stride = info->block_bytes / ELEMENT_BYTES;
    step.token_stride = swap->dims.head_dim;
    step.head_stride = info->stripe_bytes / ELEMENT_BYTES;
    step.num_pool_blocks = swap->dims.resident_blocks;
    step.scale = params->scale;
    return swap->compute->step_tile(swap->tiled, &step, stream);
}

static enum attn_status enqueue_tile(struct attn_swap *const swap,
                                     const struct attn_swap_decode_params *const params,
                                     const attn_stream stream)
{
    const uint64_t tile = swap->enqueued + 1;
    const struct attn_swap_plane *const plane = plane_of(swap, tile);
    const struct attn_swap_device *const on = &swap->on;
    static const char order[] = "copies and tiles cannot be put in order";
    // The slots that it takes, and its table, are those of tiles up to the plane's last one.
    enum attn_status status =
        check_result(swap, attn_swap_event_wait(on, plane->computed, on->copies), order);
    if (status == ATTN_OK)
        status = swap->store.file ? read_blocks(swap, tile) : copy_blocks(swap, tile);
    if (status == ATTN_OK) status = mark(swap, tile, ATTN_SWAP_COPY_START, on->copies);
    if (status == ATTN_OK) status = upload_table(swap, plane);
    if (status == ATTN_OK) status = mark(swap, tile, ATTN_SWAP_COPY_END, on->copies);
    if (status != ATTN_OK) return status;
    attn_cu_result result = attn_swap_event_record(on, plane->copied, on->copies);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_wait(on, plane->copied, stream);
    status = check_result(swap, result, order);
    if (status == ATTN_OK) status = mark(swap, tile, ATTN_SWAP_COMPUTE_START, stream);
    if (status == ATTN_OK) status = compute_tile(swap, params, plane, stream);
    if (status == ATTN_OK) status = mark(swap, tile, ATTN_SWAP_COMPUTE_END, stream);
    if (status == ATTN_OK)
        status = check_result(swap, attn_swap_event_record(on, plane->computed, stream), order);
    if (status != ATTN_OK) return status;
    swap->enqueued = tile;
    swap->stats.tiles++;
    return ATTN_OK;
}

// ---- a call

static enum attn_status run_tiles(struct attn_swap *const swap,
                                  const struct attn_swap_decode_params *const params,
                                  const attn_stream stream)
{
    // Reads of a file are submitted as far ahead as there are planes. Copies from memory are enqueued
    // at once: to plan the tile after that waits for those of an earlier one.
    const uint64_t ahead = swap->store.file ? (uint64_t) swap->dims.num_planes : 1;
    enum attn_status status = ATTN_OK;
    memset(swap->done, 0, (size_t) swap->dims.max_seqs * sizeof(*swap->done));
    swap->staging.tile = swap->planned + 1;
    swap->staging.wanted = 0;
    swap->staging.done = 0;
    start_call(swap, params);
    for (bool listed = false; status == ATTN_OK;) {
        while (status == ATTN_OK && swap->planned - swap->enqueued < ahead &&
               !(listed = is_listed(swap, params)))
            status = plan_tile(swap, params);
        if (listed && swap->enqueued == swap->planned) break;
        if (status == ATTN_OK) status = enqueue_tile(swap, params, stream);
    }
    return status;
}

enum attn_status attn_swap_run(struct attn_swap *const swap,
                               const struct attn_swap_decode_params *const params,
                               const attn_stream stream)
{
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    static const char order[] = "calls cannot be put in order";
    last.num_seqs = params->num_seqs;
    last.output = params->output;
    last.lse = params->lse;
    swap->copying = true;
    enum attn_status status =
        check_result(swap, attn_swap_event_wait(&swap->on, swap->last, stream), order);
    if (status == ATTN_OK)
        status = check_result(swap, attn_swap_trace_start(&swap->trace, &swap->on),
                              "the time cannot be taken");
    if (status == ATTN_OK)
        status = swap->compute->begin_step(swap->tiled, params->num_seqs, stream);
    if (status == ATTN_OK) status = run_tiles(swap, params, stream);
    if (status == ATTN_OK) status = swap->compute->finalize(swap->tiled, &last, stream);
    if (status == ATTN_OK)
        status = check_result(swap, attn_swap_event_record(&swap->on, swap->last, stream), order);
    if (status == ATTN_OK) {
        swap->stats.calls++;
        return ATTN_OK;
    }
    if (swap->store.file) drain_reads(swap);
    swap->unsettled = true;
    return status;
}

enum attn_status attn_swap_settle(struct attn_swap *const swap)
{
    const struct attn_swap_device *const on = &swap->on;
    attn_cu_result result = attn_swap_copies_sync(on);
    for (int32_t i = 0; result == ATTN_CU_SUCCESS && i < swap->dims.num_planes; i++)
        result = attn_swap_event_sync(on, swap->planes[i].computed);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_sync(on, swap->last);
    if (result != ATTN_CU_SUCCESS)
        return attn_swap_fail(swap, result, "what an earlier call left cannot be waited for");
    attn_swap_slots_clear(&swap->slots);
    swap->planned = swap->enqueued;
    swap->unsettled = swap->copying = false;
    return ATTN_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Swap: making a cache, and what is said to it between calls of attn_swap_decode.
#include "swap.h"

#include "buffers.h"
#include "status.h"
#include "swap_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef ATTN_MUTATION
#include "tests/mutations/swap.h"
#endif

// Of the buffers that reads go through.
#define MAX_BUFFERS 64
#define BUFFER_BYTES (512 << 10)

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

static const struct attn_swap_compute tiled_decode = {
    .create = attn_tiled_create,
    .destroy = attn_tiled_destroy,
    .begin_step = attn_tiled_begin_step,
    .step_tile = attn_tiled_step_tile,
    .finalize = attn_tiled_finalize,
};

// ---- params and sizes

// Both in whole, with defaults filled in; `device` may be NULL.
static enum attn_status read_params(const struct attn_device *const device,
                                    const struct attn_swap_create_params *const params,
                                    struct attn_swap_create_params *const own,
                                    struct attn_swap_dims *const dims)
{
    const attn_log_fn log = device ? device->log : NULL;
    void *const user = device ? device->log_user : NULL;
    ATTN_REQUIRE(log, user, params, "params is NULL");
    enum attn_status status = attn_params_copy(log, user, "params", own, sizeof(*own), params);
    if (status != ATTN_OK) return status;
    ATTN_REQUIRE(log, user, own->backing == ATTN_SWAP_HOST || own->backing == ATTN_SWAP_FILE,
                 "backing is %d: it has to be ATTN_SWAP_HOST (%d) or ATTN_SWAP_FILE (%d)",
                 (int) own->backing, ATTN_SWAP_HOST, ATTN_SWAP_FILE);
    ATTN_REQUIRE(log, user, own->dims, "dims is NULL");
    status = attn_params_copy(log, user, "dims", dims, sizeof(*dims), own->dims);
    if (status == ATTN_OK)
        status = attn_swap_check_dims(device, dims, own->backing == ATTN_SWAP_FILE);
    return status == ATTN_OK ? attn_swap_check_create(device, dims, own) : status;
}

enum attn_status attn_swap_validate(const struct attn_swap_dims *const dims)
{
    struct attn_swap_dims own;
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, dims, "dims is NULL");
    const enum attn_status status = attn_params_copy(NULL, NULL, "dims", &own, sizeof(own), dims);
    // With a file blocks may be larger; then attn_swap_create says so.
    return status == ATTN_OK ? attn_swap_check_dims(NULL, &own, false) : status;
}

static struct attn_swap_buffers find_buffers(const int64_t staging_bytes)
{
    struct attn_swap_buffers buffers = { .bytes = BUFFER_BYTES };
    if (staging_bytes == 0) return (struct attn_swap_buffers){ 0 };
    if (buffers.bytes < staging_bytes / MAX_BUFFERS) buffers.bytes = staging_bytes / MAX_BUFFERS;
    if (buffers.bytes > staging_bytes / 2) buffers.bytes = staging_bytes / 2;
    buffers.bytes = buffers.bytes / ATTN_SWAP_PAGE * ATTN_SWAP_PAGE;
    buffers.count = (int32_t) (staging_bytes / buffers.bytes);
    if (buffers.count > MAX_BUFFERS) buffers.count = MAX_BUFFERS;
    return buffers;
}

static int64_t count_host_bytes(const struct attn_swap_dims *const dims,
                                const struct attn_swap_layout *const layout,
                                const struct attn_swap_buffers *const buffers, const bool is_file,
                                const int32_t trace_tiles)
{
    const int64_t word = sizeof(int32_t), long_word = sizeof(uint64_t);
    const int64_t tables = attn_swap_table_words(dims) * word;
    const int64_t lists = 2 * dims->tile_blocks * word;
    const int64_t plane = tables + lists + (int64_t) sizeof(struct attn_swap_plane);
    const int64_t reads = (int64_t) sizeof(struct attn_swap_read) + (int64_t) sizeof(attn_cu_event);
    return dims->num_planes * plane + dims->max_seqs * word + 3 * dims->tile_blocks * long_word +
           buffers->count * (buffers->bytes + reads) +
           attn_swap_slots_bytes(dims->resident_blocks, dims->num_planes, dims->num_layers,
                                 dims->num_blocks) +
           attn_swap_store_bytes(layout, is_file) +
           attn_swap_trace_bytes(trace_tiles, dims->num_planes) +
           (int64_t) sizeof(struct attn_swap);
}

static struct attn_swap_info find_info(const struct attn_swap_dims *const dims,
                                       const struct attn_swap_create_params *const params)
{
    const bool is_file = params->backing == ATTN_SWAP_FILE;
    const struct attn_swap_layout layout = attn_swap_layout_of(dims, is_file);
    const struct attn_swap_buffers buffers = find_buffers(params->staging_bytes);
    const int64_t rows = (int64_t) dims->max_seqs * dims->num_q_heads;
    struct attn_swap_info info = {
        .size = (uint32_t) sizeof(info),
        .tile_blocks = dims->tile_blocks,
        .num_planes = dims->num_planes,
        .block_bytes = layout.block_bytes,
        .stripe_bytes = layout.stripe_bytes,
        .pool_bytes = is_file ? 0 : layout.num_blocks * layout.block_bytes,
        .file_bytes = layout.file_bytes,
        .num_reads = buffers.count,
        .read_bytes = buffers.bytes,
    };
    info.device_bytes = dims->resident_blocks * layout.block_bytes +
                        dims->num_planes * attn_swap_table_words(dims) * (int64_t) sizeof(int32_t) +
                        rows * (2 + dims->head_dim) * (int64_t) sizeof(float);
    info.host_bytes = count_host_bytes(dims, &layout, &buffers, is_file, params->trace_tiles);
    if (!is_file) snprintf(info.backend, sizeof(info.backend), "host memory");
    return info;
}

enum attn_status attn_swap_sizes(const struct attn_swap_create_params *const params,
                                 struct attn_swap_info *const info)
{
    struct attn_swap_create_params own;
    struct attn_swap_dims dims;
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, info, "info is NULL");
    const enum attn_status status = read_params(NULL, params, &own, &dims);
    if (status != ATTN_OK) return status;
    const struct attn_swap_info found = find_info(&dims, &own);
    return attn_result_copy(NULL, NULL, "info", info, &found, sizeof(found));
}

// ---- making a cache

static enum attn_status fail_memory(const struct attn_swap *const swap)
{
    return attn_fail(swap->device->log, swap->device->log_user, ATTN_ERROR_NO_MEMORY,
                     "out of memory: the cache needs %lld bytes on the host beside its pool",
                     (long long) swap->info.host_bytes);
}

// What the library holds for itself.
static enum attn_status allocate_lists(struct attn_swap *const swap, const int32_t trace_tiles)
{
    const struct attn_swap_dims *const dims = &swap->dims;
    const size_t tile = (size_t) dims->tile_blocks, buffers = (size_t) swap->staging.buffers.count;
    swap->planes = calloc((size_t) dims->num_planes, sizeof(*swap->planes));
    swap->done = calloc((size_t) dims->max_seqs, sizeof(*swap->done));
    swap->copies.to = calloc(tile, sizeof(*swap->copies.to));
    swap->copies.from = calloc(tile, sizeof(*swap->copies.from));
    swap->copies.bytes = calloc(tile, sizeof(*swap->copies.bytes));
    swap->staging.reads = calloc(buffers + 1, sizeof(*swap->staging.reads));
    swap->staging.copied = calloc(buffers + 1, sizeof(attn_cu_event));
    if (!swap->planes || !swap->done || !swap->copies.to || !swap->copies.from ||
        !swap->copies.bytes || !swap->staging.reads || !swap->staging.copied ||
        !attn_swap_slots_init(&swap->slots, dims->resident_blocks, dims->num_planes,
                              dims->num_layers, dims->num_blocks) ||
        !attn_swap_trace_init(&swap->trace, trace_tiles, dims->num_planes))
        return fail_memory(swap);
    for (int32_t i = 0; i < dims->num_planes; i++) {
        swap->planes[i].wanted = calloc(tile, sizeof(int32_t));
        swap->planes[i].slots = calloc(tile, sizeof(int32_t));
        if (!swap->planes[i].wanted || !swap->planes[i].slots) return fail_memory(swap);
    }
    return ATTN_OK;
}

static attn_cu_result allocate_plane(const struct attn_swap *const swap,
                                     struct attn_swap_plane *const plane)
{
    const int64_t bytes = attn_swap_table_words(&swap->dims) * (int64_t) sizeof(int32_t);
    void *host = NULL, *device = NULL;
    attn_cu_result result = attn_swap_host_alloc(&swap->on, &host, bytes);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_device_alloc(&swap->on, &device, bytes);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_create(&swap->on, &plane->copied);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_create(&swap->on, &plane->computed);
    plane->table = host;
    plane->device_table = device;
    return result;
}

static attn_cu_result allocate_staging(const struct attn_swap_device *const on,
                                       struct attn_swap_staging *const staging)
{
    struct attn_swap_buffers *const buffers = &staging->buffers;
    void *memory = NULL;
    if (buffers->count == 0) return ATTN_CU_SUCCESS;
    attn_cu_result result = attn_swap_pages_alloc(on, &memory, buffers->count * buffers->bytes);
    buffers->memory = memory;
    for (int32_t i = 0; result == ATTN_CU_SUCCESS && i < buffers->count; i++)
        result = attn_swap_event_create(on, &staging->copied[i]);
    return result;
}

static attn_cu_result allocate_slots(struct attn_swap *const swap)
{
    void *memory = NULL;
    const int64_t bytes = swap->dims.resident_blocks * swap->info.block_bytes;
    attn_cu_result result = attn_swap_device_alloc(&swap->on, &memory, bytes);
    swap->memory = memory;
    for (int32_t i = 0; result == ATTN_CU_SUCCESS && i < swap->dims.num_planes; i++)
        result = allocate_plane(swap, &swap->planes[i]);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_event_create(&swap->on, &swap->last);
    if (result == ATTN_CU_SUCCESS) result = attn_swap_trace_open(&swap->trace, &swap->on);
    return result == ATTN_CU_SUCCESS ? allocate_staging(&swap->on, &swap->staging) : result;
}

static attn_cu_result take_pool(struct attn_swap *const swap, void **const pool)
{
    attn_cu_result result;
    if (*pool) {
        result = attn_swap_host_pin(&swap->on, *pool, swap->info.pool_bytes);
        swap->pinned = result == ATTN_CU_SUCCESS;
    } else {
        result = attn_swap_host_alloc(&swap->on, pool, swap->info.pool_bytes);
        swap->owns_pool = result == ATTN_CU_SUCCESS;
    }
    return result;
}

static enum attn_status open_store(struct attn_swap *const swap,
                                   const struct attn_swap_create_params *const params,
                                   const struct attn_swap_io *io)
{
    const char *reason;
    enum attn_status status;
    if (params->backing == ATTN_SWAP_HOST) {
        void *pool = params->pool;
        const attn_cu_result result = take_pool(swap, &pool);
        status = attn_swap_store_open_host(&swap->store, pool);
        if (result == ATTN_CU_SUCCESS) return status;
        swap->store.pool = NULL;
        return attn_swap_fail(swap, result, "the pool in host memory cannot be had");
    }
    if (!io && params->reader == ATTN_SWAP_READER_URING) io = attn_swap_io_uring(&reason);
    if (!io && params->reader == ATTN_SWAP_READER_THREADS) io = &attn_swap_io_threads;
    // The last thing: nothing fails after a file has been made.
    status = attn_swap_store_open_file(&swap->store, io, params->path, params->open,
                                       &swap->staging.buffers, &swap->staging.direct);
    if (status != ATTN_OK) return status;
    const int32_t most = swap->store.io->max_reads;
    if (most && swap->info.num_reads > most) swap->info.num_reads = most;
    snprintf(swap->info.backend, sizeof(swap->info.backend), "%s", swap->store.io->name);
    swap->info.direct = swap->staging.direct;
    return ATTN_OK;
}

static enum attn_status build(struct attn_swap *const swap,
                              const struct attn_swap_create_params *const params,
                              const struct attn_swap_io *const io)
{
    struct attn_tiled_dims dims = attn_swap_tiled_dims(&swap->dims);
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    create.dims = &dims;
    // The first thing: it says what is not served.
    enum attn_status status = swap->compute->create(&swap->tiled, swap->device, &create);
    if (status == ATTN_OK) status = allocate_lists(swap, params->trace_tiles);
    if (status != ATTN_OK) return status;
    attn_cu_result result = attn_swap_device_open(&swap->on, swap->device);
    if (result == ATTN_CU_SUCCESS) result = allocate_slots(swap);
    if (result != ATTN_CU_SUCCESS) {
        char what[160];
        snprintf(what, sizeof(what),
                 "slots, tables and streams (%lld bytes on the device) cannot "
                 "be had",
                 (long long) swap->info.device_bytes);
        return attn_swap_fail(swap, result, what);
    }
    return open_store(swap, params, io);
}

static enum attn_status check_served(const struct attn_device *const device,
                                     const struct attn_swap_create_params *const params)
{
    if (device->info.kind == ATTN_DEVICE_TARGET)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                         "%s is a target without a GPU (ATTN_DEVICE_TARGET): attn_swap_sizes needs "
                         "none",
                         device->info.name);
    const char *reason;
    if (params->backing == ATTN_SWAP_FILE && params->reader == ATTN_SWAP_READER_URING &&
        !attn_swap_io_uring(&reason))
        return attn_fail(
            device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
            "reader is ATTN_SWAP_READER_URING: %s; ATTN_SWAP_READER_AUTO takes threads "
            "then",
            reason);
    return ATTN_OK;
}

enum attn_status attn_swap_create_with(struct attn_swap **const swap,
                                       struct attn_device *const device,
                                       const struct attn_swap_create_params *const params,
                                       const struct attn_swap_io *const io,
                                       const struct attn_swap_compute *const compute)
{
    struct attn_swap_create_params own;
    struct attn_swap_dims dims;
    bool pushed = false;
    attn_error_clear();
    if (swap) *swap = NULL;
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    REQUIRE(swap, "swap is NULL: there has to be a place for the cache");
    enum attn_status status = read_params(device, params, &own, &dims);
    if (status == ATTN_OK) status = check_served(device, &own);
    if (status != ATTN_OK) return status;
    struct attn_swap *made = calloc(1, sizeof(*made));
    if (!made)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_MEMORY,
                         "out of memory: a cache needs %zu bytes", sizeof(*made));
    made->device = device;
    made->dims = dims;
    made->compute = compute ? compute : &tiled_decode;
    made->info = find_info(&dims, &own);
    made->staging.buffers = find_buffers(own.staging_bytes);
    made->store.device = device;
    made->store.dims = dims;
    const attn_cu_result result =
        device->driver ? attn_device_enter(device, &pushed) : ATTN_CU_SUCCESS;
    status = result == ATTN_CU_SUCCESS
                 ? build(made, &own, io)
                 : attn_device_cu_fail(device, result, "the GPU's context cannot be had");
    if (device->driver) attn_device_leave(device, pushed);
    if (status == ATTN_OK)
        *swap = made;
    else
        attn_swap_destroy(&made);
    return status;
}

enum attn_status attn_swap_create(struct attn_swap **const swap, struct attn_device *const device,
                                  const struct attn_swap_create_params *const params)
{
    return attn_swap_create_with(swap, device, params, NULL, NULL);
}

static void free_planes(struct attn_swap *const swap)
{
    const struct attn_swap_device *const on = &swap->on;
    for (int32_t i = 0; swap->planes && i < swap->dims.num_planes; i++) {
        struct attn_swap_plane *const plane = &swap->planes[i];
        attn_swap_event_destroy(on, plane->copied);
        attn_swap_event_destroy(on, plane->computed);
        attn_swap_host_free(on, plane->table);
        attn_swap_device_free(on, plane->device_table);
        free(plane->wanted);
        free(plane->slots);
    }
    free(swap->planes);
}

static void free_staging(struct attn_swap *const swap)
{
    const struct attn_swap_device *const on = &swap->on;
    for (int32_t i = 0; swap->staging.copied && i < swap->staging.buffers.count; i++)
        attn_swap_event_destroy(on, swap->staging.copied[i]);
    attn_swap_pages_free(on, swap->staging.buffers.memory);
    free(swap->staging.copied);
    free(swap->staging.reads);
}

void attn_swap_destroy(struct attn_swap **const swap)
{
    if (!swap || !*swap) return;
    struct attn_swap *const old = *swap;
    bool pushed = false;
    // A failure here has nobody to go to, and changes nothing of what is freed.
    if (old->device->driver) attn_device_enter(old->device, &pushed);
    if (old->on.copies && old->planned > 0) attn_swap_settle(old);
    unsigned char *const pool = old->store.pool;
    // Its reader has the staging buffers.
    attn_swap_store_close(&old->store);
    if (old->pinned) attn_swap_host_unpin(&old->on, pool);
    if (old->owns_pool) attn_swap_host_free(&old->on, pool);
    free_planes(old);
    free_staging(old);
    attn_swap_trace_free(&old->trace, &old->on);
    attn_swap_event_destroy(&old->on, old->last);
    attn_swap_device_free(&old->on, old->memory);
    attn_swap_device_close(&old->on);
    attn_swap_slots_free(&old->slots);
    free(old->done);
    free(old->copies.to);
    free(old->copies.from);
    free(old->copies.bytes);
    old->compute->destroy(&old->tiled);
    if (old->device->driver) attn_device_leave(old->device, pushed);
    free(old);
    *swap = NULL;
}

enum attn_status attn_swap_describe(const struct attn_swap *const swap,
                                    struct attn_swap_info *const info)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    REQUIRE(info, "info is NULL");
    return attn_result_copy(device->log, device->log_user, "info", info, &swap->info,
                            sizeof(swap->info));
}

enum attn_status attn_swap_get_stats(const struct attn_swap *const swap,
                                     struct attn_swap_stats *const stats)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    REQUIRE(stats, "stats is NULL");
    struct attn_swap_stats now = swap->stats;
    // After a failed call none is, as soon as what is in flight is done.
    now.resident = swap->unsettled ? 0 : swap->slots.num_resident;
    return attn_result_copy(device->log, device->log_user, "stats", stats, &now, sizeof(now));
}

enum attn_status attn_swap_get_tile(const struct attn_swap *const swap, const int32_t ago,
                                    struct attn_swap_tile *const tile)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    struct attn_swap_tile found = { .size = (uint32_t) sizeof(found) };
    bool pushed = false;
    REQUIRE(tile, "tile is NULL");
    REQUIRE(swap->trace.count > 0,
            "no times are kept: trace_tiles of struct attn_swap_create_params was 0");
    REQUIRE(ago >= 0 && ago < swap->trace.count && (uint64_t) ago < swap->enqueued,
            "ago is %d: of %llu tiles the last %d are kept", ago,
            (unsigned long long) swap->enqueued, swap->trace.count);
    attn_cu_result result = device->driver ? attn_device_enter(device, &pushed) : ATTN_CU_SUCCESS;
    if (result == ATTN_CU_SUCCESS)
        result =
            attn_swap_trace_read(&swap->trace, &swap->on, swap->enqueued - (uint64_t) ago, &found);
    if (device->driver) attn_device_leave(device, pushed);
    if (result != ATTN_CU_SUCCESS)
        return attn_swap_fail(swap, result, "a tile's times cannot be had");
    return attn_result_copy(device->log, device->log_user, "tile", tile, &found, sizeof(found));
}

const char *attn_swap_file_backend(void)
{
    return attn_swap_io_best()->name;
}

// ---- blocks

// Nothing in flight reads the pool any more, nor counts on a slot that a failed call has taken.
static enum attn_status wait_for_copies(struct attn_swap *const swap, const bool of_pool)
{
    const struct attn_device *const device = swap->device;
    const bool copying = of_pool && swap->copying;
    bool pushed = false;
    enum attn_status status = ATTN_OK;
    if (!swap->unsettled && !copying) return ATTN_OK;
    attn_cu_result result = device->driver ? attn_device_enter(device, &pushed) : ATTN_CU_SUCCESS;
    if (result == ATTN_CU_SUCCESS && swap->unsettled)
        status = attn_swap_settle(swap);
    else if (result == ATTN_CU_SUCCESS)
        result = attn_swap_copies_sync(&swap->on);
    if (device->driver) attn_device_leave(device, pushed);
    if (result != ATTN_CU_SUCCESS)
        return attn_swap_fail(swap, result, "copies from the pool cannot be waited for");
    if (status == ATTN_OK) swap->copying = false;
    return status;
}

static int32_t number_of(const struct attn_swap *const swap, const int32_t layer,
                         const int32_t block)
{
    return layer * swap->dims.num_blocks + block;
}

enum attn_status attn_swap_write(struct attn_swap *const swap,
                                 const struct attn_swap_write_params *const params)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    struct attn_swap_write_params own;
    REQUIRE(params, "params is NULL");
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK) status = attn_swap_check_write(swap, &own);
    if (status == ATTN_OK) status = wait_for_copies(swap, !swap->store.file);
    if (status != ATTN_OK) return status;
    // Before anything else: what is resident is right no more, whatever comes of the write.
    attn_swap_slots_drop(&swap->slots, number_of(swap, own.layer, own.block));
    return attn_swap_store_write(&swap->store, &own, &swap->stats.bytes_written);
}

enum attn_status attn_swap_invalidate(struct attn_swap *const swap, const int32_t layer,
                                      const int32_t block, const int32_t num_tokens)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    enum attn_status status = attn_swap_check_block(swap, layer, block);
    if (status != ATTN_OK) return status;
    const int32_t number = number_of(swap, layer, block), held = swap->store.tokens[number];
    const bool may_grow = !swap->store.file && !swap->owns_pool;
    const int32_t most = may_grow ? swap->dims.block_size : held;
    REQUIRE(num_tokens >= 0 && num_tokens <= most,
            "num_tokens is %d: block %d of layer %d holds %d tokens, and %s, so that it has to be "
            "in 0..%d",
            num_tokens, block, layer, held,
            may_grow ? "has room for block_size" : "only attn_swap_write adds to them", most);
    status = wait_for_copies(swap, false);
    if (status != ATTN_OK) return status;
    attn_swap_slots_drop(&swap->slots, number);
    attn_swap_store_set_tokens(&swap->store, number, num_tokens);
    return ATTN_OK;
}

int32_t attn_swap_tokens(const struct attn_swap *const swap, const int32_t layer,
                         const int32_t block)
{
    attn_error_clear();
    if (!swap) {
        attn_fail(NULL, NULL, ATTN_ERROR_INVALID, "swap is NULL");
        return -1;
    }
    if (attn_swap_check_block(swap, layer, block) != ATTN_OK) return -1;
    return swap->store.tokens[number_of(swap, layer, block)];
}

enum attn_status attn_swap_flush(struct attn_swap *const swap)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    return attn_swap_store_flush(&swap->store);
}

// ---- decode

enum attn_status attn_swap_decode(struct attn_swap *const swap,
                                  const struct attn_swap_decode_params *const params,
                                  const attn_stream stream)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, swap, "swap is NULL");
    const struct attn_device *const device = swap->device;
    struct attn_swap_decode_params own;
    bool pushed = false;
    REQUIRE(params, "params is NULL");
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK) status = attn_swap_check_decode(swap, &own);
    if (status != ATTN_OK || own.num_seqs == 0) return status;
    const attn_cu_result result =
        device->driver ? attn_device_enter(device, &pushed) : ATTN_CU_SUCCESS;
    if (result != ATTN_CU_SUCCESS)
        status = attn_device_cu_fail(device, result, "the GPU's context cannot be had");
    else if (swap->unsettled)
        status = attn_swap_settle(swap);
    if (status == ATTN_OK) status = attn_swap_run(swap, &own, stream);
    if (device->driver) attn_device_leave(device, pushed);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_store.h"

#include "buffers.h"
#include "device.h"
#include "status.h"
#include "swap_format.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

// Of BF16 and FP16.
#define ELEMENT_BYTES 2
// In the index, per page.
#define PAGE_TOKENS (ATTN_SWAP_FILE_PAGE / (int64_t) sizeof(int32_t))
// Of dirty.
#define UNHASHED 4
#define UNWRITTEN 3

static int64_t round_up(const int64_t bytes, const int64_t unit)
{
    if (bytes > INT64_MAX - unit) return INT64_MAX;
    return (bytes + unit - 1) / unit * unit;
}

struct attn_swap_layout attn_swap_layout_of(const struct attn_swap_dims *const dims,
                                            const bool is_file)
{
    struct attn_swap_layout layout = { 0 };
    layout.row_bytes = (int64_t) dims->head_dim * ELEMENT_BYTES;
    layout.stripe_bytes = attn_size_times(layout.row_bytes, dims->block_size);
    if (is_file) layout.stripe_bytes = round_up(layout.stripe_bytes, ATTN_SWAP_FILE_PAGE);
    layout.block_bytes = attn_size_times(layout.stripe_bytes, (int64_t) 2 * dims->num_kv_heads);
    layout.num_blocks = (int64_t) dims->num_layers * dims->num_blocks;
    if (!is_file) return layout;
    layout.index_offset = (int64_t) 3 * ATTN_SWAP_FILE_PAGE;
    layout.index_bytes =
        round_up(layout.num_blocks * (int64_t) sizeof(int32_t), ATTN_SWAP_FILE_PAGE);
    layout.data_offset = layout.index_offset + 2 * layout.index_bytes;
    layout.file_bytes =
        attn_size_plus(layout.data_offset, attn_size_times(layout.num_blocks, layout.block_bytes));
    return layout;
}

static int64_t count_pages(const struct attn_swap_layout *const layout)
{
    return layout->index_bytes / ATTN_SWAP_FILE_PAGE;
}

int64_t attn_swap_store_bytes(const struct attn_swap_layout *const layout, const bool is_file)
{
    if (!is_file) return layout->num_blocks * (int64_t) sizeof(int32_t);
    return attn_size_plus(layout->index_bytes + count_pages(layout) * 9, layout->block_bytes);
}

int64_t attn_swap_store_place(const struct attn_swap_store *const store, const int64_t block)
{
    return store->layout.data_offset + block * store->layout.block_bytes;
}

// ---- sentences

static enum attn_status fail_memory(const struct attn_swap_store *const store)
{
    return attn_fail(store->device->log, store->device->log_user, ATTN_ERROR_NO_MEMORY,
                     "out of memory for the index of %lld blocks",
                     (long long) store->layout.num_blocks);
}

enum attn_status attn_swap_store_fail(const struct attn_swap_store *const store,
                                      const char *const what, const int64_t bytes,
                                      const int64_t offset, const int64_t error)
{
    return attn_fail(store->device->log, store->device->log_user, ATTN_ERROR_IO,
                     "%s: %s %lld bytes at offset %lld failed: %s (errno %d)", store->path, what,
                     (long long) bytes, (long long) offset, strerror((int) -error), (int) -error);
}

enum attn_status attn_swap_store_fail_short(const struct attn_swap_store *const store,
                                            const int64_t offset)
{
    return attn_fail(
        store->device->log, store->device->log_user, ATTN_ERROR_IO,
        "%s: it ends at offset %lld, and should have %lld bytes: it was cut off (errno 0)",
        store->path, (long long) offset, (long long) store->layout.file_bytes);
}

#ifdef ATTN_MUTATION
#include "tests/mutations/swap.h"
#endif

// ---- host memory

enum attn_status attn_swap_store_open_host(struct attn_swap_store *const store, void *const pool)
{
    store->layout = attn_swap_layout_of(&store->dims, false);
    store->tokens = calloc((size_t) store->layout.num_blocks, sizeof(*store->tokens));
    store->pool = pool;
    return store->tokens ? ATTN_OK : fail_memory(store);
}

// ---- a file

static enum attn_status read_page(const struct attn_swap_store *const store, void *const page,
                                  const int64_t offset)
{
    const int64_t got = store->io->read(store->file, page, ATTN_SWAP_FILE_PAGE, offset);
    if (got < 0) return attn_swap_store_fail(store, "reading", ATTN_SWAP_FILE_PAGE, offset, got);
    // The rest counts as zeros, which no page that is looked for begins with.
    memset((char *) page + got, 0, (size_t) (ATTN_SWAP_FILE_PAGE - got));
    return ATTN_OK;
}

static enum attn_status write_file(const struct attn_swap_store *const store,
                                   const void *const from, const int64_t bytes,
                                   const int64_t offset)
{
    const int64_t put = store->io->write(store->file, from, bytes, offset);
    if (put < 0) return attn_swap_store_fail(store, "writing", bytes, offset, put);
    return ATTN_OK;
}

// What is not on the disk now may never be: later calls that succeed would not tell.
static enum attn_status sync_file(struct attn_swap_store *const store)
{
    const int error = store->io->sync(store->file);
    if (!error) return ATTN_OK;
    store->lost = true;
    return attn_fail(store->device->log, store->device->log_user, ATTN_ERROR_IO,
                     "%s: the disk did not take what was written: %s (errno %d)", store->path,
                     strerror(-error), -error);
}

static uint64_t sum_hashes(struct attn_swap_store *const store)
{
    uint64_t sum = 0;
    for (int64_t p = 0; p < count_pages(&store->layout); p++) {
        if (store->dirty[p] & UNHASHED) {
            store->hashes[p] =
                attn_swap_format_hash_page(store->tokens + p * PAGE_TOKENS, (uint64_t) p);
            store->dirty[p] &= UNWRITTEN;
        }
        sum += store->hashes[p];
    }
    return sum;
}

static void mark_all(struct attn_swap_store *const store, const int bits)
{
    memset(store->dirty, bits, (size_t) count_pages(&store->layout));
}

// Pages of index `which` that are not up to date, neighbours together.
static enum attn_status write_index(const struct attn_swap_store *const store, const int which)
{
    const int64_t pages = count_pages(&store->layout);
    const int64_t start = store->layout.index_offset + which * store->layout.index_bytes;
    enum attn_status status = ATTN_OK;
    for (int64_t p = 0, end; status == ATTN_OK && p < pages; p = end) {
        for (end = p; end < pages && store->dirty[end] & 1 << which;) end++;
        if (end > p)
            status = write_file(store, store->tokens + p * PAGE_TOKENS,
                                (end - p) * ATTN_SWAP_FILE_PAGE, start + p * ATTN_SWAP_FILE_PAGE);
        else
            end++;
    }
    return status;
}

static enum attn_status commit(struct attn_swap_store *const store)
{
    unsigned char page[ATTN_SWAP_FILE_PAGE];
    const uint64_t number = store->commit + 1;
    const int which = (int) (number % 2);
    enum attn_status status = write_index(store, which);
    if (status == ATTN_OK) status = sync_file(store);
    if (status != ATTN_OK) return status;
    attn_swap_format_commit(page, number, sum_hashes(store));
    status = write_file(store, page, sizeof(page), (1 + which) * (int64_t) sizeof(page));
    if (status == ATTN_OK) status = sync_file(store);
    if (status != ATTN_OK) return status;
    for (int64_t p = 0; p < count_pages(&store->layout); p++)
        store->dirty[p] &= (unsigned char) ~(1 << which);
    store->commit = number;
    store->changed = false;
    return ATTN_OK;
}

// A commit of an index of zeros; the header comes last: without it the file is nothing.
static enum attn_status fill_new(struct attn_swap_store *const store)
{
    unsigned char page[ATTN_SWAP_FILE_PAGE];
    const int64_t bytes = store->layout.file_bytes;
    const int error = store->io->grow(store->file, bytes);
    if (error)
        return attn_fail(store->device->log, store->device->log_user, ATTN_ERROR_IO,
                         "%s: there is no room for %lld bytes: %s (errno %d)", store->path,
                         (long long) bytes, strerror(-error), -error);
    mark_all(store, UNHASHED | UNWRITTEN);
    enum attn_status status = commit(store);
    if (status != ATTN_OK) return status;
    attn_swap_format_header(page, &store->dims, &store->layout);
    status = write_file(store, page, sizeof(page), 0);
    return status == ATTN_OK ? sync_file(store) : status;
}

static enum attn_status check_size(const struct attn_swap_store *const store)
{
    const struct attn_device *const device = store->device;
    const int64_t bytes = store->io->size(store->file);
    if (bytes < 0)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_IO,
                         "%s: its end cannot be found: %s (errno %d)", store->path,
                         strerror((int) -bytes), (int) -bytes);
    ATTN_REQUIRE(device->log, device->log_user, bytes >= store->layout.file_bytes,
                 "%s has %lld bytes: its header says that it has %lld; it was cut off", store->path,
                 (long long) bytes, (long long) store->layout.file_bytes);
    return ATTN_OK;
}

// Whether index `which` is what its record says; its tokens are then those of the store.
static enum attn_status try_index(struct attn_swap_store *const store, const int which,
                                  const uint64_t checksum, bool *const good)
{
    const int64_t bytes = store->layout.index_bytes;
    const int64_t offset = store->layout.index_offset + which * bytes;
    const int64_t got = store->io->read(store->file, store->tokens, bytes, offset);
    *good = false;
    if (got < 0) return attn_swap_store_fail(store, "reading", bytes, offset, got);
    if (got < bytes) return attn_swap_store_fail_short(store, offset + got);
    mark_all(store, UNHASHED | UNWRITTEN);
    *good = sum_hashes(store) == checksum;
    for (int64_t i = 0; *good && i < store->layout.num_blocks; i++)
        *good = store->tokens[i] >= 0 && store->tokens[i] <= store->dims.block_size;
    return ATTN_OK;
}

static enum attn_status read_commits(struct attn_swap_store *const store)
{
    const struct attn_device *const device = store->device;
    uint64_t numbers[2], checksums[2];
    bool valid[2], good = false;
    unsigned char page[ATTN_SWAP_FILE_PAGE];
    for (int i = 0; i < 2; i++) {
        const enum attn_status status = read_page(store, page, (1 + i) * (int64_t) sizeof(page));
        if (status != ATTN_OK) return status;
        valid[i] = attn_swap_format_read_commit(page, &numbers[i], &checksums[i]) &&
                   numbers[i] % 2 == (uint64_t) i;
    }
    const int later = valid[1] && (!valid[0] || numbers[1] > numbers[0]);
    for (int i = 0; i < 2 && !good; i++) {
        const int which = i ? !later : later;
        if (!valid[which]) continue;
        const enum attn_status status = try_index(store, which, checksums[which], &good);
        if (status != ATTN_OK) return status;
        store->commit = numbers[which];
    }
    ATTN_REQUIRE(device->log, device->log_user, good,
                 "%s is damaged: neither of its two indexes is what its commit record says",
                 store->path);
    // The other index is one of before.
    mark_all(store, 1 << (store->commit + 1) % 2);
    return ATTN_OK;
}

static enum attn_status read_existing(struct attn_swap_store *const store)
{
    unsigned char page[ATTN_SWAP_FILE_PAGE];
    char why[512];
    const struct attn_device *const device = store->device;
    enum attn_status status = read_page(store, page, 0);
    if (status != ATTN_OK) return status;
    ATTN_REQUIRE(device->log, device->log_user,
                 attn_swap_format_check_header(page, &store->dims, &store->layout, why,
                                               sizeof(why)),
                 "%s %s", store->path, why);
    status = check_size(store);
    return status == ATTN_OK ? read_commits(store) : status;
}

static enum attn_status allocate_index(struct attn_swap_store *const store, const char *const path)
{
    const size_t pages = (size_t) count_pages(&store->layout);
    store->path = strdup(path);
    store->tokens = calloc(pages, ATTN_SWAP_FILE_PAGE);
    store->dirty = calloc(pages, 1);
    store->hashes = calloc(pages, sizeof(*store->hashes));
    store->image = malloc((size_t) store->layout.block_bytes);
    return store->path && store->tokens && store->dirty && store->hashes && store->image
               ? ATTN_OK
               : fail_memory(store);
}

static enum attn_status fail_open(const struct attn_swap_store *const store, const int error,
                                  const enum attn_swap_open mode)
{
    const attn_log_fn log = store->device->log;
    void *const user = store->device->log_user;
    const char *const path = store->path;
    switch (-error) {
    case EISDIR:
        return attn_fail(log, user, ATTN_ERROR_INVALID, "%s is a folder: path names a file", path);
    case EINVAL:
        return attn_fail(log, user, ATTN_ERROR_INVALID, "%s is not a file but a device or a pipe",
                         path);
    case EWOULDBLOCK:
        return attn_fail(log, user, ATTN_ERROR_INVALID,
                         "%s is open elsewhere: one swap cache at a time has a file", path);
    case EEXIST:
        return attn_fail(log, user, ATTN_ERROR_INVALID,
                         "%s is there already: ATTN_SWAP_CREATE makes a new file", path);
    default:
        return attn_fail(log, user, ATTN_ERROR_IO, "%s cannot be %s: %s (errno %d)", path,
                         mode == ATTN_SWAP_CREATE ? "made" : "opened", strerror(-error), -error);
    }
}

static enum attn_status start_reader(struct attn_swap_store *const store, const bool is_given,
                                     const struct attn_swap_buffers *const buffers,
                                     bool *const direct)
{
    int error = store->io->start(store->file, buffers, direct);
    if (error && !is_given && store->io != &attn_swap_io_threads) {
        // Both are made for the same files.
        store->io = &attn_swap_io_threads;
        error = store->io->start(store->file, buffers, direct);
    }
    if (!error) return ATTN_OK;
    return attn_fail(store->device->log, store->device->log_user, ATTN_ERROR_IO,
                     "%s: its reader (%s) cannot be started: %s (errno %d)", store->path,
                     store->io->name, strerror(-error), -error);
}

enum attn_status attn_swap_store_open_file(struct attn_swap_store *const store,
                                           const struct attn_swap_io *io, const char *const path,
                                           const enum attn_swap_open mode,
                                           const struct attn_swap_buffers *const buffers,
                                           bool *const direct)
{
    const bool is_given = io != NULL;
    bool is_new = mode == ATTN_SWAP_CREATE;
    if (!io) io = attn_swap_io_best();
    store->io = io;
    store->layout = attn_swap_layout_of(&store->dims, true);
    enum attn_status status = allocate_index(store, path);
    if (status != ATTN_OK) return status;
    int error = io->open(&store->file, path, is_new);
    if (error == -ENOENT && mode == ATTN_SWAP_OPEN_OR_CREATE) {
        is_new = true;
        error = io->open(&store->file, path, true);
    }
    if (error) {
        store->file = NULL;
        return fail_open(store, error, mode);
    }
    status = is_new ? fill_new(store) : read_existing(store);
    if (status == ATTN_OK) status = start_reader(store, is_given, buffers, direct);
    if (status != ATTN_OK && is_new) io->remove(path);
    return status;
}

void attn_swap_store_close(struct attn_swap_store *const store)
{
    if (store->file) store->io->close(store->file);
    free(store->tokens);
    free(store->path);
    free(store->image);
    free(store->dirty);
    free(store->hashes);
    *store = (struct attn_swap_store){ 0 };
}

// ---- writing

void attn_swap_store_set_tokens(struct attn_swap_store *const store, const int64_t block,
                                const int32_t num_tokens)
{
    if (store->tokens[block] == num_tokens) return;
    store->tokens[block] = num_tokens;
    if (!store->file) return;
    store->dirty[block / PAGE_TOKENS] = UNHASHED | UNWRITTEN;
    store->changed = true;
}

// Rows of one stripe, from `from` on, to `to`, where the stripe has its first token.
static void copy_rows(const struct attn_swap_store *const store,
                      const struct attn_swap_write_params *const params, unsigned char *const to,
                      const unsigned char *const from)
{
    const int64_t row = store->layout.row_bytes, stride = params->token_stride * ELEMENT_BYTES;
    for (int32_t t = 0; t < params->num_tokens; t++)
        memcpy(to + (params->first_token + t) * row, from + t * stride, (size_t) row);
}

// All stripes of the block that begins at `block`.
static void copy_stripes(const struct attn_swap_store *const store,
                         const struct attn_swap_write_params *const params,
                         unsigned char *const block)
{
    const int32_t heads = store->dims.num_kv_heads;
    const int64_t stripe = store->layout.stripe_bytes;
    const int64_t stride = params->head_stride * ELEMENT_BYTES;
    for (int32_t h = 0; h < heads; h++) {
        copy_rows(store, params, block + h * stripe,
                  (const unsigned char *) params->k + h * stride);
        copy_rows(store, params, block + (heads + h) * stripe,
                  (const unsigned char *) params->v + h * stride);
    }
}

// A block from its first token on as a whole, with zeros behind; else the rows of each stripe, so
// that those before stay untouched.
static enum attn_status write_block(const struct attn_swap_store *const store,
                                    const struct attn_swap_write_params *const params,
                                    const int64_t block)
{
    const struct attn_swap_layout *const layout = &store->layout;
    const int64_t start = attn_swap_store_place(store, block);
    const int64_t rows = params->num_tokens * layout->row_bytes;
    enum attn_status status = ATTN_OK;
    if (params->first_token == 0) memset(store->image, 0, (size_t) layout->block_bytes);
    copy_stripes(store, params, store->image);
    if (params->first_token == 0)
        return write_file(store, store->image, layout->block_bytes, start);
    for (int32_t i = 0; status == ATTN_OK && i < 2 * store->dims.num_kv_heads; i++) {
        const int64_t at = i * layout->stripe_bytes + params->first_token * layout->row_bytes;
        status = write_file(store, store->image + at, rows, start + at);
    }
    return status;
}

enum attn_status attn_swap_store_write(struct attn_swap_store *const store,
                                       const struct attn_swap_write_params *const params,
                                       uint64_t *const bytes_written)
{
    const int64_t block = (int64_t) params->layer * store->dims.num_blocks + params->block;
    enum attn_status status = ATTN_OK;
    // Until all of it is there.
    if (store->tokens[block] > params->first_token)
        attn_swap_store_set_tokens(store, block, params->first_token);
    store->changed = true;
    if (store->file)
        status = write_block(store, params, block);
    else
        copy_stripes(store, params, store->pool + attn_swap_store_place(store, block));
    if (status != ATTN_OK) return status;
    attn_swap_store_set_tokens(store, block, params->first_token + params->num_tokens);
    *bytes_written += (uint64_t) params->num_tokens * (uint64_t) store->layout.row_bytes * 2 *
                      (uint64_t) store->dims.num_kv_heads;
    return ATTN_OK;
}

enum attn_status attn_swap_store_flush(struct attn_swap_store *const store)
{
    if (!store->file || !store->changed) return ATTN_OK;
    if (store->lost)
        return attn_fail(
            store->device->log, store->device->log_user, ATTN_ERROR_IO,
            "%s: the disk has failed before to take what was written, and what it has is not "
            "known: write the blocks to another file, or open this one again for what was "
            "acknowledged before that",
            store->path);
    return commit(store);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Where the blocks of a swap cache are: a pool in host memory, or a file of the format that
// include/attn/swap.h describes; and how many tokens each holds.
#ifndef ATTN_SRC_SWAP_STORE_H
#define ATTN_SRC_SWAP_STORE_H

#include "attn/swap.h"
#include "swap_io.h"

// Of a page of the file, and what stripes are padded to there.
#define ATTN_SWAP_FILE_PAGE 4096

// How blocks lie in a store and in slots, and where things are in a file.
struct attn_swap_layout {
    int64_t row_bytes, stripe_bytes, block_bytes;
    int64_t num_blocks;
    // 0 in host memory.
    int64_t index_offset, index_bytes, data_offset, file_bytes;
};

struct attn_swap_store {
    const struct attn_device *device;
    struct attn_swap_dims dims;
    struct attn_swap_layout layout;
    // Of all blocks, layer after layer; with a file, padded with zeros to pages.
    int32_t *tokens;
    // Host memory: the blocks. NULL with a file.
    unsigned char *pool;

    // The rest is for files.
    const struct attn_swap_io *io;
    struct attn_swap_file *file;
    char *path;
    // One block, as it is written.
    unsigned char *image;
    // Of each page of the index: what has to be written, bit n to index n, and ATTN_SWAP_UNHASHED;
    // and the page's part of the checksum.
    unsigned char *dirty;
    uint64_t *hashes;
    uint64_t commit;
    // Something was written since; the disk has failed to take it.
    bool changed, lost;
};

// Sizes saturate at INT64_MAX.
struct attn_swap_layout attn_swap_layout_of(const struct attn_swap_dims *dims, bool is_file);
// Bytes that opening allocates, without a pool.
int64_t attn_swap_store_bytes(const struct attn_swap_layout *layout, bool is_file);

// Both fill *store, whose device and dims are set; attn_swap_store_close in any case. The pool is
// the caller's business.
enum attn_status attn_swap_store_open_host(struct attn_swap_store *store, void *pool);
// With `io` NULL: io_uring where it works, else threads.
enum attn_status attn_swap_store_open_file(struct attn_swap_store *store,
                                           const struct attn_swap_io *io, const char *path,
                                           enum attn_swap_open mode,
                                           const struct attn_swap_buffers *buffers, bool *direct);
void attn_swap_store_close(struct attn_swap_store *store);

// Checked params, strides filled in. On failure the block holds at most first_token tokens.
enum attn_status attn_swap_store_write(struct attn_swap_store *store,
                                       const struct attn_swap_write_params *params,
                                       uint64_t *bytes_written);
void attn_swap_store_set_tokens(struct attn_swap_store *store, int64_t block, int32_t num_tokens);
enum attn_status attn_swap_store_flush(struct attn_swap_store *store);

// Offset of a block in the pool, or in the file.
int64_t attn_swap_store_place(const struct attn_swap_store *store, int64_t block);
// What is wrong with `bytes` at `offset` of the file, as a status with its sentence; `what` is
// "reading" or "writing".
enum attn_status attn_swap_store_fail(const struct attn_swap_store *store, const char *what,
                                      int64_t bytes, int64_t offset, int64_t error);
// Of a read that ended early.
enum attn_status attn_swap_store_fail_short(const struct attn_swap_store *store, int64_t offset);

#endif

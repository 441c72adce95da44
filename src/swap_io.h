/* SPDX-License-Identifier: Apache-2.0 */
// How the swap engine reaches a file: a table of functions, which tests replace. Results below 0
// are -errno. Reads that are submitted go into registered buffers, one at a time each, and may
// complete in any order; everything else is done when the call returns.
#ifndef ATTN_SRC_SWAP_IO_H
#define ATTN_SRC_SWAP_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct attn_swap_file;

struct attn_swap_buffers {
    int32_t count;
    // Bytes of each; they follow one another. Both multiples of a page.
    int64_t bytes;
    unsigned char *memory;
};

struct attn_swap_io {
    // As attn_swap_describe names it.
    const char *name;
    // Reads that are under way at a time at most; 0: as many as there are buffers.
    int32_t max_reads;
    // Opens what is there, or with `create` makes a file that was not. Locks it: -EWOULDBLOCK if it
    // is open elsewhere. Folders are -EISDIR.
    int (*open)(struct attn_swap_file **file, const char *path, bool create);
    void (*close)(struct attn_swap_file *file);
    int64_t (*size)(struct attn_swap_file *file);
    // Makes the file that large, with its space taken where the file system can.
    int (*grow)(struct attn_swap_file *file, int64_t bytes);
    int (*remove)(const char *path);
    // Less than `bytes` at the end of the file.
    int64_t (*read)(struct attn_swap_file *file, void *to, int64_t bytes, int64_t offset);
    // All of it, or an error.
    int64_t (*write)(struct attn_swap_file *file, const void *from, int64_t bytes, int64_t offset);
    int (*sync)(struct attn_swap_file *file);

    // Once, before the first submit. *direct: reads go around the page cache.
    int (*start)(struct attn_swap_file *file, const struct attn_swap_buffers *buffers,
                 bool *direct);
    // Reads into the buffer of that number, from its first byte on.
    int (*submit)(struct attn_swap_file *file, int32_t buffer, int64_t bytes, int64_t offset);
    // Waits for that read. What was read: less than asked for if the device gives no more at once.
    // *stalled: it was not there yet.
    int64_t (*wait)(struct attn_swap_file *file, int32_t buffer, bool *stalled);
};

extern const struct attn_swap_io attn_swap_io_threads;
// io_uring, by liburing. NULL where it can't be used, and in *reason why; found out once.
const struct attn_swap_io *attn_swap_io_uring(const char **reason);
// io_uring where it can be used, else threads.
const struct attn_swap_io *attn_swap_io_best(void);

// ---- what both share

struct attn_swap_queue;

struct attn_swap_file {
    // Through the page cache, and without it: -1 where that can't be.
    int fd, direct_fd;
    struct attn_swap_queue *queue;
    struct attn_swap_buffers buffers;
};

int attn_swap_posix_open(struct attn_swap_file **file, const char *path, bool create);
void attn_swap_posix_close(struct attn_swap_file *file);
int64_t attn_swap_posix_size(struct attn_swap_file *file);
int attn_swap_posix_grow(struct attn_swap_file *file, int64_t bytes);
int attn_swap_posix_remove(const char *path);
int64_t attn_swap_posix_read(struct attn_swap_file *file, void *to, int64_t bytes, int64_t offset);
int64_t attn_swap_posix_write(struct attn_swap_file *file, const void *from, int64_t bytes,
                              int64_t offset);
int attn_swap_posix_sync(struct attn_swap_file *file);
// Sets direct_fd if the first page can be read that way.
void attn_swap_posix_start(struct attn_swap_file *file, const struct attn_swap_buffers *buffers,
                           bool *direct);

// The table without the reader's own functions.
#define ATTN_SWAP_POSIX_CALLS \
    .size = attn_swap_posix_size, .grow = attn_swap_posix_grow, .remove = attn_swap_posix_remove, \
    .read = attn_swap_posix_read, .write = attn_swap_posix_write, .sync = attn_swap_posix_sync, \
    .open = attn_swap_posix_open

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// Files of the swap engine, but for reads that are submitted.
#include "swap_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096

const struct attn_swap_io *attn_swap_io_best(void)
{
    const char *reason;
    const struct attn_swap_io *const uring = attn_swap_io_uring(&reason);
    return uring ? uring : &attn_swap_io_threads;
}

static int lock_file(const int fd)
{
    struct stat found;
    if (fstat(fd, &found)) return -errno;
    if (S_ISDIR(found.st_mode)) return -EISDIR;
    if (!S_ISREG(found.st_mode)) return -EINVAL;
    // Only for the sake of pipes; a read that would have to wait must not fail.
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK)) return -errno;
    return flock(fd, LOCK_EX | LOCK_NB) ? -errno : 0;
}

int attn_swap_posix_open(struct attn_swap_file **const file, const char *const path,
                         const bool create)
{
    *file = NULL;
    // Not to wait for the other end of a pipe.
    const int flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | (create ? O_CREAT | O_EXCL : 0);
    struct attn_swap_file *const opened = malloc(sizeof(*opened));
    if (!opened) return -ENOMEM;
    *opened = (struct attn_swap_file){ .fd = open(path, flags, 0600), .direct_fd = -1 };
    const int result = opened->fd < 0 ? -errno : lock_file(opened->fd);
    if (result) {
        attn_swap_posix_close(opened);
        free(opened);
        return result;
    }
    *file = opened;
    return 0;
}

void attn_swap_posix_close(struct attn_swap_file *const file)
{
    if (file->direct_fd >= 0) close(file->direct_fd);
    if (file->fd >= 0) close(file->fd);
}

int64_t attn_swap_posix_size(struct attn_swap_file *const file)
{
    struct stat found;
    return fstat(file->fd, &found) ? -errno : (int64_t) found.st_size;
}

int attn_swap_posix_grow(struct attn_swap_file *const file, const int64_t bytes)
{
    int result;
    do {
        result = fallocate(file->fd, 0, 0, bytes);
    } while (result && errno == EINTR);
    // Some file systems take space only for what is written.
    if (result && errno == EOPNOTSUPP) result = ftruncate(file->fd, bytes);
    return result ? -errno : 0;
}

int attn_swap_posix_remove(const char *const path)
{
    return unlink(path) ? -errno : 0;
}

int64_t attn_swap_posix_read(struct attn_swap_file *const file, void *const to, const int64_t bytes,
                             const int64_t offset)
{
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t got =
            pread(file->fd, (char *) to + done, (size_t) (bytes - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        done += got;
    }
    return done;
}

int64_t attn_swap_posix_write(struct attn_swap_file *const file, const void *const from,
                              const int64_t bytes, const int64_t offset)
{
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t put =
            pwrite(file->fd, (const char *) from + done, (size_t) (bytes - done), offset + done);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -errno;
        if (put == 0) return -ENOSPC;
        done += put;
    }
    return done;
}

int attn_swap_posix_sync(struct attn_swap_file *const file)
{
    return fdatasync(file->fd) ? -errno : 0;
}

// Writes go through the page cache, of which a read around it sees everything.
void attn_swap_posix_start(struct attn_swap_file *const file,
                           const struct attn_swap_buffers *const buffers, bool *const direct)
{
    char name[64];
    file->buffers = *buffers;
    // The same file, whatever its path names by now.
    snprintf(name, sizeof(name), "/proc/self/fd/%d", file->fd);
    file->direct_fd = open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file->direct_fd >= 0 && pread(file->direct_fd, buffers->memory, PAGE, 0) != PAGE) {
        close(file->direct_fd);
        file->direct_fd = -1;
    }
    *direct = file->direct_fd >= 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Reads by io_uring. The few calls of it that are needed are the kernel's own, so that the library
// depends on no other; where headers, kernel or a security policy lack them, threads read.
#include "swap_io.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define HAVE_URING 1
#endif
#endif

#ifdef HAVE_URING

#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

// Not in every libc: the same number on all machines.
enum {
    URING_SETUP = 425,
    URING_ENTER = 426,
    URING_REGISTER = 427,
};

// What the kernel shares: the ring of submissions, that of completions, and submissions themselves.
struct ring {
    void *memory;
    size_t bytes;
};

struct attn_swap_queue {
    int fd;
    struct ring submissions, completions, entries;
    _Atomic uint32_t *sub_tail, *com_head, *com_tail;
    uint32_t *sub_slots, sub_mask, com_mask;
    const struct io_uring_cqe *cqes;
    // Reads that the kernel has, and that have not come back.
    int32_t in_flight;
    bool registered;
    // Of each buffer.
    struct iovec *vectors;
    int64_t *results;
    bool *done;
};

static int setup(const unsigned entries, struct io_uring_params *const params)
{
    memset(params, 0, sizeof(*params));
    const long fd = syscall(URING_SETUP, entries, params);
    return fd < 0 ? -errno : (int) fd;
}

static bool uring_works;
static pthread_once_t uring_once = PTHREAD_ONCE_INIT;

static void try_uring(void)
{
    struct io_uring_params params;
    const int fd = setup(1, &params);
    uring_works = fd >= 0;
    if (fd >= 0) close(fd);
}

bool attn_swap_uring_works(void)
{
    pthread_once(&uring_once, try_uring);
    return uring_works;
}

static int map(struct ring *const ring, const int fd, const size_t bytes, const int64_t offset)
{
    void *const memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (memory == MAP_FAILED) return -errno;
    *ring = (struct ring){ memory, bytes };
    return 0;
}

static void unmap(const struct ring *const ring)
{
    if (ring->memory) munmap(ring->memory, ring->bytes);
}

static int map_rings(struct attn_swap_queue *const queue, const struct io_uring_params *const p)
{
    int result = map(&queue->submissions, queue->fd,
                     p->sq_off.array + p->sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING);
    if (!result)
        result =
            map(&queue->completions, queue->fd,
                p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    if (!result)
        result = map(&queue->entries, queue->fd, p->sq_entries * sizeof(struct io_uring_sqe),
                     IORING_OFF_SQES);
    if (result) return result;
    char *const submissions = queue->submissions.memory, *const completions =
                                                             queue->completions.memory;
    queue->sub_tail = (void *) (submissions + p->sq_off.tail);
    queue->sub_slots = (void *) (submissions + p->sq_off.array);
    queue->sub_mask = *(uint32_t *) (void *) (submissions + p->sq_off.ring_mask);
    queue->com_head = (void *) (completions + p->cq_off.head);
    queue->com_tail = (void *) (completions + p->cq_off.tail);
    queue->com_mask = *(uint32_t *) (void *) (completions + p->cq_off.ring_mask);
    queue->cqes = (void *) (completions + p->cq_off.cqes);
    return 0;
}

static void free_queue(struct attn_swap_queue *const queue)
{
    if (!queue) return;
    unmap(&queue->submissions);
    unmap(&queue->completions);
    unmap(&queue->entries);
    if (queue->fd >= 0) close(queue->fd);
    free(queue->vectors);
    free(queue->results);
    free(queue->done);
    free(queue);
}

// Takes what has come back; with `least`, waits for so many reads.
static int reap(struct attn_swap_queue *const queue, const unsigned least)
{
    while (least) {
        if (syscall(URING_ENTER, queue->fd, 0, least, IORING_ENTER_GETEVENTS, NULL, 0) >= 0) break;
        if (errno != EINTR) return -errno;
    }
    uint32_t head = atomic_load_explicit(queue->com_head, memory_order_relaxed);
    const uint32_t tail = atomic_load_explicit(queue->com_tail, memory_order_acquire);
    for (; head != tail; head++) {
        const struct io_uring_cqe *const cqe = &queue->cqes[head & queue->com_mask];
        queue->results[cqe->user_data] = cqe->res;
        queue->done[cqe->user_data] = true;
        queue->in_flight--;
    }
    atomic_store_explicit(queue->com_head, head, memory_order_release);
    return 0;
}

static void close_file(struct attn_swap_file *const file)
{
    // The kernel must not write to the buffers any more.
    while (file->queue && file->queue->in_flight > 0)
        if (reap(file->queue, 1)) break;
    free_queue(file->queue);
    attn_swap_posix_close(file);
    free(file);
}

static int start(struct attn_swap_file *const file, const struct attn_swap_buffers *const buffers,
                 bool *const direct)
{
    const size_t count = (size_t) buffers->count;
    struct io_uring_params params;
    struct attn_swap_queue *const queue = calloc(1, sizeof(*queue));
    attn_swap_posix_start(file, buffers, direct);
    if (!queue) return -ENOMEM;
    queue->vectors = calloc(count, sizeof(*queue->vectors));
    queue->results = calloc(count, sizeof(*queue->results));
    queue->done = calloc(count, sizeof(*queue->done));
    queue->fd = setup((unsigned) count, &params);
    int result = queue->fd < 0 ? queue->fd : 0;
    if (!queue->vectors || !queue->results || !queue->done) result = -ENOMEM;
    if (!result) result = map_rings(queue, &params);
    if (result) {
        free_queue(queue);
        return result;
    }
    for (size_t i = 0; i < count; i++)
        queue->vectors[i] = (struct iovec){ buffers->memory + (int64_t) i * buffers->bytes,
                                            (size_t) buffers->bytes };
    // More than the limit of locked memory: then without.
    queue->registered = syscall(URING_REGISTER, queue->fd, IORING_REGISTER_BUFFERS, queue->vectors,
                                (unsigned) count) == 0;
    file->queue = queue;
    return 0;
}

static void fill_entry(const struct attn_swap_file *const file, struct io_uring_sqe *const sqe,
                       const int32_t buffer, const int64_t bytes, const int64_t offset)
{
    struct iovec *const vector = &file->queue->vectors[buffer];
    memset(sqe, 0, sizeof(*sqe));
    sqe->fd = file->direct_fd >= 0 ? file->direct_fd : file->fd;
    sqe->off = (uint64_t) offset;
    sqe->user_data = (uint64_t) buffer;
    vector->iov_len = (size_t) bytes;
    if (file->queue->registered) {
        sqe->opcode = IORING_OP_READ_FIXED;
        sqe->addr = (uint64_t) (uintptr_t) vector->iov_base;
        sqe->len = (uint32_t) bytes;
        sqe->buf_index = (uint16_t) buffer;
    } else {
        sqe->opcode = IORING_OP_READV;
        sqe->addr = (uint64_t) (uintptr_t) vector;
        sqe->len = 1;
    }
}

static bool is_busy(const int error)
{
    return error == EAGAIN || error == EBUSY;
}

// The kernel has no room for another read: one of those that it has may give some back. False: it
// has none.
static bool make_room(struct attn_swap_queue *const queue)
{
    return queue->in_flight > 0 && reap(queue, 1) == 0;
}

// There is room: a buffer has one read at a time, and the ring an entry for each.
static int submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                  const int64_t offset)
{
    struct attn_swap_queue *const queue = file->queue;
    const uint32_t tail = atomic_load_explicit(queue->sub_tail, memory_order_relaxed);
    const uint32_t slot = tail & queue->sub_mask;
    fill_entry(file, (struct io_uring_sqe *) queue->entries.memory + slot, buffer, bytes, offset);
    queue->sub_slots[slot] = slot;
    queue->done[buffer] = false;
    atomic_store_explicit(queue->sub_tail, tail + 1, memory_order_release);
    long taken;
    do {
        taken = syscall(URING_ENTER, queue->fd, 1, 0, 0, NULL, 0);
    } while (taken < 0 && (errno == EINTR || (is_busy(errno) && make_room(queue))));
    if (taken == 1) {
        queue->in_flight++;
        return 0;
    }
    // Not taken: it is not to be taken with the next one.
    const int result = taken < 0 ? -errno : -EAGAIN;
    atomic_store_explicit(queue->sub_tail, tail, memory_order_release);
    return result;
}

static int64_t wait_for(struct attn_swap_file *const file, const int32_t buffer,
                        bool *const stalled)
{
    struct attn_swap_queue *const queue = file->queue;
    int result = reap(queue, 0);
    *stalled = !queue->done[buffer];
    while (!result && !queue->done[buffer]) result = reap(queue, 1);
    return result ? result : queue->results[buffer];
}

#else

bool attn_swap_uring_works(void)
{
    return false;
}

static void close_file(struct attn_swap_file *const file)
{
    attn_swap_posix_close(file);
    free(file);
}

static int start(struct attn_swap_file *const file, const struct attn_swap_buffers *const buffers,
                 bool *const direct)
{
    (void) file, (void) buffers;
    *direct = false;
    return -ENOSYS;
}

static int submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                  const int64_t offset)
{
    (void) file, (void) buffer, (void) bytes, (void) offset;
    return -ENOSYS;
}

static int64_t wait_for(struct attn_swap_file *const file, const int32_t buffer,
                        bool *const stalled)
{
    (void) file, (void) buffer;
    *stalled = false;
    return -ENOSYS;
}

#endif

const struct attn_swap_io attn_swap_io_uring = {
    .name = "io_uring",
    ATTN_SWAP_POSIX_CALLS,
    .close = close_file,
    .start = start,
    .submit = submit,
    .wait = wait_for,
};

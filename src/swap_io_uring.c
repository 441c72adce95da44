/* SPDX-License-Identifier: Apache-2.0 */
// Reads by io_uring, through liburing. It is opened at run time, as the driver is: nothing links it.
// Where it, or the kernel's part of it, is missing or refused, threads read.
//
// Of its header's inline functions only those are used that touch nothing but an entry, or what
// every liburing.so.2 has in the same place: the library that is found need not be the header's.
#include "swap_io.h"

#ifdef ATTN_LIBURING

#include <dlfcn.h>
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// X(member, symbol, type of the result, parameters).
#define URING_CALLS(X) \
    X(queue_init, "io_uring_queue_init", int, (unsigned, struct io_uring *, unsigned) ) \
    X(queue_exit, "io_uring_queue_exit", void, (struct io_uring *) ) \
    X(register_buffers, "io_uring_register_buffers", int, \
      (struct io_uring *, const struct iovec *, unsigned) ) \
    X(get_sqe, "io_uring_get_sqe", struct io_uring_sqe *, (struct io_uring *) ) \
    X(submit, "io_uring_submit", int, (struct io_uring *) ) \
    X(wait_cqes, "io_uring_wait_cqes", int, \
      (struct io_uring *, struct io_uring_cqe **, unsigned, struct __kernel_timespec *, \
       sigset_t *) ) \
    X(peek_batch_cqe, "io_uring_peek_batch_cqe", unsigned, \
      (struct io_uring *, struct io_uring_cqe **, unsigned) )

struct uring_library {
#define CALL_MEMBER(member, symbol, result, parameters) result(*member) parameters;
    URING_CALLS(CALL_MEMBER)
#undef CALL_MEMBER
};

// User data of an entry that reads nothing.
#define NO_BUFFER UINT64_MAX
// Completions that are taken at a time.
#define BATCH 16

struct attn_swap_queue {
    struct io_uring ring;
    // Reads that the kernel has, and that have not come back.
    int32_t in_flight;
    bool registered;
    // Of each buffer.
    struct iovec *vectors;
    int64_t *results;
    bool *done;
};

// ---- the library

static struct uring_library uring;
static bool uring_works;
static char uring_reason[256];
static pthread_once_t uring_once = PTHREAD_ONCE_INIT;

static bool load_library(void)
{
    static const struct {
        const char *symbol;
        size_t offset;
    } calls[] = {
#define CALL_ENTRY(member, symbol, result, parameters) \
    { symbol, offsetof(struct uring_library, member) },
        URING_CALLS(CALL_ENTRY)
#undef CALL_ENTRY
    };
    // Never closed: files may be open with it until the end.
    void *const library = dlopen("liburing.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *const why = dlerror();
        snprintf(uring_reason, sizeof(uring_reason), "liburing.so.2 cannot be opened (%s)",
                 why ? why : "unknown reason");
        return false;
    }
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *const call = dlsym(library, calls[i].symbol);
        if (!call) {
            snprintf(uring_reason, sizeof(uring_reason), "liburing.so.2 has no %s",
                     calls[i].symbol);
            return false;
        }
        memcpy((char *) &uring + calls[i].offset, &call, sizeof(call));
    }
    return true;
}

static void try_uring(void)
{
    struct io_uring ring;
    if (!load_library()) return;
    const int error = uring.queue_init(1, &ring, 0);
    if (error)
        snprintf(uring_reason, sizeof(uring_reason),
                 "the kernel does not let this process use io_uring: %s (errno %d)",
                 strerror(-error), -error);
    else
        uring.queue_exit(&ring);
    uring_works = !error;
}

// ---- a queue

static bool is_busy(const int error)
{
    return error == -EAGAIN || error == -EBUSY;
}

static void take_completions(struct attn_swap_queue *const queue)
{
    struct io_uring_cqe *found[BATCH];
    unsigned count;
    while ((count = uring.peek_batch_cqe(&queue->ring, found, BATCH)) > 0) {
        for (unsigned i = 0; i < count; i++) {
            const uint64_t buffer = found[i]->user_data;
            if (buffer == NO_BUFFER) continue;
            queue->results[buffer] = found[i]->res;
            queue->done[buffer] = true;
            queue->in_flight--;
        }
        io_uring_cq_advance(&queue->ring, count);
    }
}

static int wait_for_any(struct attn_swap_queue *const queue)
{
    struct io_uring_cqe *first;
    int error;
    do {
        error = uring.wait_cqes(&queue->ring, &first, 1, NULL, NULL);
    } while (error == -EINTR);
    if (!error) take_completions(queue);
    return error;
}

// Hands the kernel what is in the ring. Where it has no room, a read that it has may give some back.
static int push(struct attn_swap_queue *const queue)
{
    while (io_uring_sq_ready(&queue->ring) > 0) {
        const int taken = uring.submit(&queue->ring);
        if (taken > 0 || taken == -EINTR) continue;
        if (taken < 0 && !is_busy(taken)) return taken;
        const int error = queue->in_flight > 0 ? wait_for_any(queue) : -EAGAIN;
        if (error) return error;
    }
    return 0;
}

static void free_queue(struct attn_swap_queue *const queue)
{
    if (!queue) return;
    free(queue->vectors);
    free(queue->results);
    free(queue->done);
    free(queue);
}

static void close_file(struct attn_swap_file *const file)
{
    struct attn_swap_queue *const queue = file->queue;
    // The kernel must not write to the buffers any more.
    while (queue && queue->in_flight > 0)
        if (wait_for_any(queue)) break;
    if (queue) uring.queue_exit(&queue->ring);
    free_queue(queue);
    attn_swap_posix_close(file);
    free(file);
}

static int start(struct attn_swap_file *const file, const struct attn_swap_buffers *const buffers,
                 bool *const direct)
{
    const size_t count = (size_t) buffers->count;
    struct attn_swap_queue *const queue = calloc(1, sizeof(*queue));
    attn_swap_posix_start(file, buffers, direct);
    if (!queue) return -ENOMEM;
    queue->vectors = calloc(count, sizeof(*queue->vectors));
    queue->results = calloc(count, sizeof(*queue->results));
    queue->done = calloc(count, sizeof(*queue->done));
    int error = -ENOMEM;
    if (queue->vectors && queue->results && queue->done)
        error = uring.queue_init((unsigned) count, &queue->ring, 0);
    if (error) {
        free_queue(queue);
        return error;
    }
    for (size_t i = 0; i < count; i++)
        queue->vectors[i] = (struct iovec){ buffers->memory + (int64_t) i * buffers->bytes,
                                            (size_t) buffers->bytes };
    // More than the limit of locked memory: then without.
    queue->registered = uring.register_buffers(&queue->ring, queue->vectors, (unsigned) count) == 0;
    file->queue = queue;
    return 0;
}

static void fill_entry(const struct attn_swap_file *const file, struct io_uring_sqe *const entry,
                       const int32_t buffer, const int64_t bytes, const int64_t offset)
{
    struct iovec *const vector = &file->queue->vectors[buffer];
    const int fd = file->direct_fd >= 0 ? file->direct_fd : file->fd;
    vector->iov_len = (size_t) bytes;
    if (file->queue->registered)
        io_uring_prep_read_fixed(entry, fd, vector->iov_base, (unsigned) bytes, (uint64_t) offset,
                                 buffer);
    else
        io_uring_prep_readv(entry, fd, vector, 1, (uint64_t) offset);
    entry->user_data = (uint64_t) buffer;
}

// A buffer has one read at a time, and the ring an entry for each.
static int submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                  const int64_t offset)
{
    struct attn_swap_queue *const queue = file->queue;
    struct io_uring_sqe *entry = uring.get_sqe(&queue->ring);
    // Full of what was refused before.
    if (!entry && push(queue) == 0) entry = uring.get_sqe(&queue->ring);
    if (!entry) return -EBUSY;
    fill_entry(file, entry, buffer, bytes, offset);
    queue->done[buffer] = false;
    const int error = push(queue);
    if (!error) {
        queue->in_flight++;
        return 0;
    }
    // Not taken: nor is the read to be taken with the next one.
    io_uring_prep_nop(entry);
    entry->user_data = NO_BUFFER;
    return error;
}

static int64_t wait_for(struct attn_swap_file *const file, const int32_t buffer,
                        bool *const stalled)
{
    struct attn_swap_queue *const queue = file->queue;
    int error = 0;
    take_completions(queue);
    *stalled = !queue->done[buffer];
    while (!error && !queue->done[buffer]) error = wait_for_any(queue);
    return error ? error : queue->results[buffer];
}

static const struct attn_swap_io table = {
    .name = "io_uring",
    ATTN_SWAP_POSIX_CALLS,
    .close = close_file,
    .start = start,
    .submit = submit,
    .wait = wait_for,
};

const struct attn_swap_io *attn_swap_io_uring(const char **const reason)
{
    pthread_once(&uring_once, try_uring);
    *reason = uring_reason;
    return uring_works ? &table : NULL;
}

#else

const struct attn_swap_io *attn_swap_io_uring(const char **const reason)
{
    *reason = "this library was built without liburing";
    return NULL;
}

#endif

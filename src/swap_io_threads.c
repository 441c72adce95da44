/* SPDX-License-Identifier: Apache-2.0 */
// Reads by a pool of threads.
#include "swap_io.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

// So many reads are under way at a time.
#define MAX_THREADS 16

struct request {
    int64_t bytes, offset, result;
    bool done;
};

struct attn_swap_queue {
    pthread_mutex_t lock;
    // There is a request to take, or nothing more to come; a request is done.
    pthread_cond_t work, done;
    bool stopping;
    int32_t num_threads;
    pthread_t threads[MAX_THREADS];
    // Of each buffer; those not taken yet, a ring with room for all.
    struct request *requests;
    int32_t *waiting;
    int32_t first, count;
};

static int64_t read_request(const struct attn_swap_file *const file, const int32_t buffer,
                            const struct request *const request)
{
    const int fd = file->direct_fd >= 0 ? file->direct_fd : file->fd;
    void *const to = file->buffers.memory + buffer * file->buffers.bytes;
    ssize_t got;
    do {
        got = pread(fd, to, (size_t) request->bytes, request->offset);
    } while (got < 0 && errno == EINTR);
    return got < 0 ? -errno : got;
}

static void *serve(void *const argument)
{
    struct attn_swap_file *const file = argument;
    struct attn_swap_queue *const queue = file->queue;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (!queue->count && !queue->stopping) pthread_cond_wait(&queue->work, &queue->lock);
        if (!queue->count) break;
        const int32_t buffer = queue->waiting[queue->first];
        queue->first = (queue->first + 1) % file->buffers.count;
        queue->count--;
        const struct request request = queue->requests[buffer];
        pthread_mutex_unlock(&queue->lock);
        const int64_t result = read_request(file, buffer, &request);
        pthread_mutex_lock(&queue->lock);
        queue->requests[buffer].result = result;
        queue->requests[buffer].done = true;
        pthread_cond_signal(&queue->done);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static void stop(struct attn_swap_file *const file)
{
    struct attn_swap_queue *const queue = file->queue;
    if (!queue) return;
    pthread_mutex_lock(&queue->lock);
    queue->stopping = true;
    pthread_cond_broadcast(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    for (int32_t i = 0; i < queue->num_threads; i++) pthread_join(queue->threads[i], NULL);
    pthread_cond_destroy(&queue->work);
    pthread_cond_destroy(&queue->done);
    pthread_mutex_destroy(&queue->lock);
    free(queue->requests);
    free(queue->waiting);
    free(queue);
    file->queue = NULL;
}

static void close_file(struct attn_swap_file *const file)
{
    stop(file);
    attn_swap_posix_close(file);
    free(file);
}

// With all signals blocked: they are for the program's own threads.
static int start_threads(struct attn_swap_file *const file)
{
    struct attn_swap_queue *const queue = file->queue;
    const int32_t wanted = file->buffers.count < MAX_THREADS ? file->buffers.count : MAX_THREADS;
    sigset_t all, before;
    int result = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (!result && queue->num_threads < wanted) {
        result = pthread_create(&queue->threads[queue->num_threads], NULL, serve, file);
        if (!result) queue->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    // Some are enough.
    return queue->num_threads ? 0 : -result;
}

static int start(struct attn_swap_file *const file, const struct attn_swap_buffers *const buffers,
                 bool *const direct)
{
    struct attn_swap_queue *const queue = calloc(1, sizeof(*queue));
    attn_swap_posix_start(file, buffers, direct);
    if (!queue) return -ENOMEM;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->work, NULL);
    pthread_cond_init(&queue->done, NULL);
    file->queue = queue;
    queue->requests = calloc((size_t) buffers->count, sizeof(*queue->requests));
    queue->waiting = calloc((size_t) buffers->count, sizeof(*queue->waiting));
    const int result = queue->requests && queue->waiting ? start_threads(file) : -ENOMEM;
    if (result) stop(file);
    return result;
}

static int submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                  const int64_t offset)
{
    struct attn_swap_queue *const queue = file->queue;
    pthread_mutex_lock(&queue->lock);
    queue->requests[buffer] = (struct request){ .bytes = bytes, .offset = offset };
    queue->waiting[(queue->first + queue->count++) % file->buffers.count] = buffer;
    pthread_cond_signal(&queue->work);
    pthread_mutex_unlock(&queue->lock);
    return 0;
}

static int64_t wait_for(struct attn_swap_file *const file, const int32_t buffer,
                        bool *const stalled)
{
    struct attn_swap_queue *const queue = file->queue;
    const struct request *const request = &queue->requests[buffer];
    pthread_mutex_lock(&queue->lock);
    *stalled = !request->done;
    while (!request->done) pthread_cond_wait(&queue->done, &queue->lock);
    const int64_t result = request->result;
    pthread_mutex_unlock(&queue->lock);
    return result;
}

const struct attn_swap_io attn_swap_io_threads = {
    .name = "threads",
    .max_reads = MAX_THREADS,
    ATTN_SWAP_POSIX_CALLS,
    .close = close_file,
    .start = start,
    .submit = submit,
    .wait = wait_for,
};

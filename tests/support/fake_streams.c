/* SPDX-License-Identifier: Apache-2.0 */
#include "support/fake_streams.h"

#include "support/fake_driver.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STREAMS 8
#define MAX_EVENTS 256
#define MAX_OPERATIONS 65536
#define MAX_ALLOCATIONS 64
#define MAX_ARGUMENT 512
#define INVALID_CONTEXT 201

enum kind {
    COPY,
    RECORD,
    WAIT,
    WORK,
};

struct operation {
    enum kind kind;
    // Of a copy.
    void *to;
    const void *from;
    size_t bytes;
    // Of a record and of a wait: which, and the number of its record.
    struct attn_cu_event_st *event;
    uint64_t number;
    void (*work)(const void *argument);
    _Alignas(16) unsigned char argument[MAX_ARGUMENT];
};

struct CUstream_st {
    bool open;
};

// Operations of a stream, first to last.
struct queue {
    attn_stream stream;
    bool used;
    int *operations;
    int first, end;
};

struct attn_cu_event_st {
    bool open, timed;
    uint64_t recorded, done;
    int time;
};

struct allocation {
    void *memory;
    size_t bytes;
    bool host;
};

struct fake_streams fake_streams;

static struct CUstream_st streams[MAX_STREAMS];
static struct attn_cu_event_st events[MAX_EVENTS];
static struct queue queues[MAX_STREAMS + 4];
static struct operation *operations;
static int num_operations, num_done;
// Every operation takes a millisecond.
static int clock_ms;
static struct allocation allocations[MAX_ALLOCATIONS];
static struct random order;

const char *const fake_streams_symbols[] = {
#define SYMBOL(name, symbol, parameters) symbol,
    ATTN_DRIVER_COPY_CALLS(SYMBOL) ATTN_DRIVER_OPTIONAL_CALLS(SYMBOL)
#undef SYMBOL
        NULL,
};

// ---- doing what is enqueued

static struct queue *find_queue(const attn_stream stream)
{
    size_t i = 0;
    while (queues[i].used && queues[i].stream != stream) i++;
    if (i == sizeof(queues) / sizeof(queues[0])) abort();
    if (queues[i].used) return &queues[i];
    queues[i] = (struct queue){ .stream = stream, .used = true };
    queues[i].operations = malloc(MAX_OPERATIONS * sizeof(int));
    if (!queues[i].operations) abort();
    return &queues[i];
}

static bool is_ready(const struct queue *const queue)
{
    if (!queue->used || queue->first == queue->end) return false;
    const struct operation *const next = &operations[queue->operations[queue->first]];
    return next->kind != WAIT || next->event->done >= next->number;
}

static void do_next(struct queue *const queue)
{
    const struct operation *const next = &operations[queue->operations[queue->first++]];
    num_done++;
    clock_ms++;
    if (next->kind == COPY) memcpy(next->to, next->from, next->bytes);
    if (next->kind == COPY) fake_streams.num_copied++;
    if (next->kind == RECORD) next->event->done = next->number;
    if (next->kind == RECORD) next->event->time = clock_ms;
    if (next->kind == WORK) next->work(next->argument);
}

static bool is_slow(const struct queue *const queue)
{
    return fake_streams.has_slow && queue->stream == fake_streams.slow;
}

// False if there is nothing to do. Streams wait for nothing but records before them: something is
// ready, if anything is there.
static bool do_any(const bool slow)
{
    struct queue *ready[sizeof(queues) / sizeof(queues[0])];
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof(queues) / sizeof(queues[0]); i++)
        if (is_ready(&queues[i]) && (slow || !is_slow(&queues[i]))) ready[count++] = &queues[i];
    if (!count) return false;
    uint32_t chosen = random_below(&order, count);
    if (is_slow(ready[chosen])) chosen = (chosen + 1) % count;
    do_next(ready[chosen]);
    return true;
}

void fake_streams_finish(void)
{
    while (do_any(true)) {
    }
    if (num_done != num_operations) abort();
    num_done = num_operations = 0;
    for (size_t i = 0; i < sizeof(queues) / sizeof(queues[0]); i++)
        queues[i].first = queues[i].end = 0;
}

// As on a device, some work goes on meanwhile: nothing, or a little, or a lot.
static void go_on(void)
{
    uint32_t count = random_below(&order, 3) ? 0 : random_below(&order, 12);
    while (count-- > 0 && do_any(false)) {
    }
}

static struct operation *add(const attn_stream stream, const enum kind kind)
{
    struct queue *const queue = find_queue(stream);
    if (num_operations == MAX_OPERATIONS) abort();
    queue->operations[queue->end++] = num_operations;
    struct operation *const added = &operations[num_operations++];
    *added = (struct operation){ .kind = kind };
    return added;
}

void fake_streams_enqueue(const attn_stream stream, void (*const work)(const void *argument),
                          const void *const argument, const size_t bytes)
{
    struct operation *const added = add(stream, WORK);
    if (bytes > MAX_ARGUMENT) abort();
    added->work = work;
    memcpy(added->argument, argument, bytes);
}

// ---- the driver's calls

// The result that the test wants from this call.
static attn_cu_result enter(const char *const symbol)
{
    if (fake_streams.fail_symbol && !strcmp(fake_streams.fail_symbol, symbol)) {
        const int call = ++fake_streams.num_calls, at = fake_streams.fail_at;
        if (call == at || (fake_streams.fail_on && call > at)) {
            fake_streams.num_failed++;
            return fake_streams.fail_code;
        }
    }
    go_on();
    return fake.current ? ATTN_CU_SUCCESS : INVALID_CONTEXT;
}

#define ENTER(symbol) \
    do { \
        const attn_cu_result wanted = enter(symbol); \
        if (wanted != ATTN_CU_SUCCESS) return wanted; \
    } while (0)

static attn_cu_result take_memory(void **const memory, const size_t bytes, const bool host)
{
    const size_t limit = host ? fake_streams.host_limit : fake_streams.device_limit;
    size_t *const taken = host ? &fake_streams.host_bytes : &fake_streams.device_bytes;
    struct allocation *place = allocations;
    while (place < allocations + MAX_ALLOCATIONS && place->memory) place++;
    if (place == allocations + MAX_ALLOCATIONS) abort();
    if (bytes == 0) return ATTN_CU_ERROR_INVALID_VALUE;
    if (limit && *taken + bytes > limit) return ATTN_CU_ERROR_OUT_OF_MEMORY;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*memory) return ATTN_CU_ERROR_OUT_OF_MEMORY;
    memset(*memory, 0xFF, bytes);
    *place = (struct allocation){ *memory, bytes, host };
    *taken += bytes;
    *(host ? &fake_streams.host_allocations : &fake_streams.allocations) += 1;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result give_memory(void *const memory, const bool host)
{
    for (struct allocation *a = allocations; a < allocations + MAX_ALLOCATIONS; a++) {
        if (a->memory != memory || a->host != host) continue;
        *(host ? &fake_streams.host_bytes : &fake_streams.device_bytes) -= a->bytes;
        *(host ? &fake_streams.host_allocations : &fake_streams.allocations) -= 1;
        // As the driver: what uses it is done first.
        fake_streams_finish();
        free(memory);
        a->memory = NULL;
        return ATTN_CU_SUCCESS;
    }
    return ATTN_CU_ERROR_INVALID_VALUE;
}

static attn_cu_result fake_mem_alloc(attn_cu_deviceptr *const address, const size_t bytes)
{
    void *memory = NULL;
    ENTER("cuMemAlloc_v2");
    const attn_cu_result result = take_memory(&memory, bytes, false);
    *address = (uintptr_t) memory;
    return result;
}

static attn_cu_result fake_mem_free(const attn_cu_deviceptr address)
{
    ENTER("cuMemFree_v2");
    return give_memory((void *) (uintptr_t) address, false);
}

static attn_cu_result fake_host_alloc(void **const address, const size_t bytes,
                                      const unsigned flags)
{
    ENTER("cuMemHostAlloc");
    if (flags != ATTN_CU_HOST_PORTABLE) return ATTN_CU_ERROR_INVALID_VALUE;
    return take_memory(address, bytes, true);
}

static attn_cu_result fake_host_free(void *const address)
{
    ENTER("cuMemFreeHost");
    return give_memory(address, true);
}

static attn_cu_result fake_host_register(void *const address, const size_t bytes,
                                         const unsigned flags)
{
    ENTER("cuMemHostRegister_v2");
    if (!address || !bytes || flags != ATTN_CU_HOST_PORTABLE) return ATTN_CU_ERROR_INVALID_VALUE;
    fake_streams.pinned++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_host_unregister(void *const address)
{
    ENTER("cuMemHostUnregister");
    if (!address) return ATTN_CU_ERROR_INVALID_VALUE;
    fake_streams.pinned--;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_stream_create(attn_stream *const stream, const unsigned flags)
{
    ENTER("cuStreamCreate");
    int i = 0;
    while (streams[i].open) i++;
    if (i == MAX_STREAMS || flags != ATTN_CU_STREAM_NON_BLOCKING)
        return ATTN_CU_ERROR_INVALID_VALUE;
    streams[i].open = true;
    fake_streams.streams++;
    *stream = &streams[i];
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_stream_destroy(const attn_stream stream)
{
    ENTER("cuStreamDestroy_v2");
    if (!stream || !stream->open) return ATTN_CU_ERROR_INVALID_VALUE;
    stream->open = false;
    fake_streams.streams--;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_stream_sync(const attn_stream stream)
{
    ENTER("cuStreamSynchronize");
    const struct queue *const queue = find_queue(stream);
    while (queue->first < queue->end)
        if (!do_any(true)) abort();
    return ATTN_CU_SUCCESS;
}

// What counts is the record before this call.
static attn_cu_result fake_stream_wait(const attn_stream stream, const attn_cu_event event,
                                       const unsigned flags)
{
    ENTER("cuStreamWaitEvent");
    if (!event || !event->open || flags) return ATTN_CU_ERROR_INVALID_VALUE;
    struct operation *const added = add(stream, WAIT);
    added->event = event;
    added->number = event->recorded;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_event_create(attn_cu_event *const event, const unsigned flags)
{
    ENTER("cuEventCreate");
    int i = 0;
    while (i < MAX_EVENTS && events[i].open) i++;
    if (i == MAX_EVENTS || (flags && flags != ATTN_CU_EVENT_DISABLE_TIMING))
        return ATTN_CU_ERROR_INVALID_VALUE;
    events[i] = (struct attn_cu_event_st){ .open = true, .timed = !flags };
    fake_streams.timed_events += !flags;
    fake_streams.events++;
    *event = &events[i];
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_event_destroy(const attn_cu_event event)
{
    ENTER("cuEventDestroy_v2");
    if (!event || !event->open) return ATTN_CU_ERROR_INVALID_VALUE;
    fake_streams_finish();
    event->open = false;
    fake_streams.events--;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_event_record(const attn_cu_event event, const attn_stream stream)
{
    ENTER("cuEventRecord");
    if (!event || !event->open) return ATTN_CU_ERROR_INVALID_VALUE;
    struct operation *const added = add(stream, RECORD);
    added->event = event;
    added->number = ++event->recorded;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_event_sync(const attn_cu_event event)
{
    ENTER("cuEventSynchronize");
    if (!event || !event->open) return ATTN_CU_ERROR_INVALID_VALUE;
    while (event->done < event->recorded)
        if (!do_any(true)) abort();
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_event_elapsed(float *const milliseconds, const attn_cu_event start,
                                         const attn_cu_event end)
{
    ENTER("cuEventElapsedTime");
    const attn_cu_event both[] = { start, end };
    for (int i = 0; i < 2; i++)
        if (!both[i] || !both[i]->open || !both[i]->timed || !both[i]->recorded ||
            both[i]->done < both[i]->recorded)
            return ATTN_CU_ERROR_INVALID_VALUE;
    *milliseconds = (float) (end->time - start->time);
    return ATTN_CU_SUCCESS;
}

static void add_copy(const attn_cu_deviceptr to, const void *const from, const size_t bytes,
                     const attn_stream stream)
{
    struct operation *const added = add(stream, COPY);
    added->to = (void *) (uintptr_t) to;
    added->from = from;
    added->bytes = bytes;
    fake_streams.num_copies++;
    fake_streams.bytes_copied += bytes;
}

static attn_cu_result fake_copy_in(const attn_cu_deviceptr to, const void *const from,
                                   const size_t bytes, const attn_stream stream)
{
    ENTER("cuMemcpyHtoDAsync_v2");
    if (!to || !from || !bytes) return ATTN_CU_ERROR_INVALID_VALUE;
    add_copy(to, from, bytes, stream);
    fake_streams.num_copy_calls++;
    return ATTN_CU_SUCCESS;
}

// Not on the legacy default stream, which the driver refuses here.
static attn_cu_result fake_copy_batch(attn_cu_deviceptr *const to, attn_cu_deviceptr *const from,
                                      size_t *const bytes, const size_t count,
                                      struct attn_cu_copy_attributes *const attributes,
                                      size_t *const starts, const size_t num_attributes,
                                      const attn_stream stream)
{
    ENTER("cuMemcpyBatchAsync_v2");
    if (!stream || !count || num_attributes != 1 || starts[0] != 0 ||
        attributes->order != ATTN_CU_COPY_ORDER_STREAM)
        return ATTN_CU_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        add_copy(to[i], (const void *) (uintptr_t) from[i], bytes[i], stream);
    fake_streams.num_copy_calls++;
    fake_streams.num_batches++;
    return ATTN_CU_SUCCESS;
}

void fake_streams_reset(void)
{
    fake_streams.fail_symbol = NULL;
    fake_streams.num_calls = fake_streams.num_failed = 0;
    fake_streams.num_copies = fake_streams.num_copy_calls = fake_streams.num_batches = 0;
    fake_streams.bytes_copied = 0;
    fake_streams.num_copied = 0;
    fake_streams.has_slow = false;
}

void fake_streams_install(const uint64_t seed, const bool batches)
{
    static struct attn_driver table;
    const char *reason;
    table = *attn_driver_get(&reason);
#define TAKE(name, symbol, parameters) table.name = fake_##name;
    ATTN_DRIVER_COPY_CALLS(TAKE)
    ATTN_DRIVER_OPTIONAL_CALLS(TAKE)
#undef TAKE
    if (!batches) table.copy_batch = NULL;
    if (!operations) operations = malloc(MAX_OPERATIONS * sizeof(*operations));
    if (!operations) abort();
    memset(&fake_streams, 0, sizeof(fake_streams));
    memset(events, 0, sizeof(events));
    memset(streams, 0, sizeof(streams));
    order.state = seed;
    attn_driver_replace(&table);
}

/* SPDX-License-Identifier: Apache-2.0 */
// A cold cache: calls go round over copies of the pages, so that what a call reads has left the L2
// since. Calls are replayed from a CUDA graph, in turn with a graph of plain reads: as many reads
// as calls, each of as many bytes, going round over the same pages.
#include "cli/bench_time.h"

#include "cli/execute.h"
#include "host/check.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Copies together hold this many times what the L2 does.
#define L2_MULTIPLE 4
// Calls in a graph: at least MIN_CALLS, and as many as read CHAIN_BYTES, so that what a replay
// costs beside its calls is lost in it; MAX_CALLS will do for calls that read next to nothing.
#define MIN_CALLS 8
#define MAX_CALLS 1024
#define CHAIN_BYTES 2e9
// Replays before the first sample, and samples.
#define WARM_UPS 3
#define GPU_SAMPLES 31
#define HOST_SAMPLES 5
// Calls whose host time is taken.
#define LAUNCH_SAMPLES 101
// Rows checked at most; fewer where that many keys have been walked.
#define MAX_ROWS 8
#define MIN_ROWS 2
#define MAX_KEYS (1 << 18)
#define SEED 1

enum {
    CU_OUT_OF_MEMORY = 2,
};

static int compare_double(const void *const left, const void *const right)
{
    const double a = *(const double *) left, b = *(const double *) right;
    return (a > b) - (a < b);
}

// Sorts the samples.
static double take_median(double *const samples, const int count)
{
    qsort(samples, (size_t) count, sizeof(*samples), compare_double);
    return samples[count / 2];
}

static void summarise(struct bench_times *const times, double *const samples, const int count)
{
    times->median_us = take_median(samples, count);
    times->p10_us = samples[count / 10];
    times->p90_us = samples[count - 1 - count / 10];
}

static double sum_bytes(const struct bench_shape *const shape,
                        const struct attn_decode_plan *const plan)
{
    return bench_shape_kv_bytes(shape) + plan->other_bytes;
}

// The call of one (sequence, head) alone, so that the definition need not walk the rest.
static struct attn_decode_params pick_row(const struct attn_decode_params *const params,
                                          const int32_t sequence, const int32_t head)
{
    struct attn_decode_params row = *params;
    const int64_t kv_head = head / (params->num_q_heads / params->num_kv_heads);
    const int64_t pool = kv_head * params->head_dim * (int64_t) attn_dtype_size(params->kv_dtype);
    const int64_t q = ((int64_t) sequence * params->num_q_heads + head) * params->head_dim;
    row.batch = row.num_q_heads = row.num_kv_heads = 1;
    row.q = (const char *) params->q + q * (int64_t) attn_dtype_size(params->q_dtype);
    row.k_pool = (const char *) params->k_pool + pool;
    row.v_pool = (const char *) params->v_pool + pool;
    row.block_table += (int64_t) sequence * params->max_pages_per_seq;
    row.seq_lens += sequence;
    return row;
}

static double sum_squares(const void *const row, const int32_t count, const enum attn_dtype dtype)
{
    double sum = 0.0;
    for (int32_t i = 0; i < count; i++) {
        const double value = attn_load(row, i, dtype);
        sum += value * value;
    }
    return sum;
}

// Compares rows of `o`, all copies' results, with the definition: the last row of the last copy,
// then random ones.
static int check_rows(const struct bench_case *const made, const char *const o,
                      const enum attn_check_bound bound, struct bench_times *const times,
                      char *const why, const size_t why_size)
{
    const struct bench_shape *const shape = made->shape;
    const size_t row_bytes = (size_t) shape->head_dim * attn_dtype_size(shape->q_dtype);
    const size_t rows = (size_t) shape->batch * (size_t) shape->num_q_heads;
    struct random random = { SEED };
    size_t place = rows * (size_t) made->copies - 1;
    int64_t keys = 0;
    double error_squares = 0.0, squares = 0.0;
    for (int i = 0; i < MAX_ROWS && (i < MIN_ROWS || keys < MAX_KEYS); i++) {
        const int32_t sequence = (int32_t) (place % rows / (size_t) shape->num_q_heads);
        const int32_t head = (int32_t) (place % (size_t) shape->num_q_heads);
        const struct attn_decode_params params = bench_case_params(made, (int32_t) (place / rows));
        const struct attn_decode_params row = pick_row(&params, sequence, head);
        struct attn_check found;
        if (attn_check_decode(&row, o + place * row_bytes, NULL, bound, &found)) {
            snprintf(why, why_size, "out of memory in the check");
            return -1;
        }
        if (found.failed) {
            snprintf(
                why, why_size,
                "not timed, as kernel %s is wrong: o[%d][%d][%d] is %.9g and should be %.9g; %lld elements of "
                "the row are beyond the bound",
                times->kernel, sequence, head, found.worst_dim, found.worst_value,
                found.worst_exact, (long long) found.failed);
            return -1;
        }
        if (found.max_ratio > times->max_ratio) times->max_ratio = found.max_ratio;
        // Rows are weighed by the result's size in place of the exact one: the same but for that
        // row's error.
        const double size = sum_squares(o + place * row_bytes, shape->head_dim, shape->q_dtype);
        error_squares += found.relative_rms * found.relative_rms * size;
        squares += size;
        times->rows_checked++;
        keys += shape->lens[sequence];
        place = random_below(&random, rows * (size_t) made->copies);
    }
    if (squares > 0.0) times->relative_rms = sqrt(error_squares / squares);
    return 0;
}

// A case on the GPU.
struct session {
    struct attn_device *device;
    struct gpu *gpu;
    const struct bench_case *made;
    const struct attn_decode_plan *plan;
    attn_stream stream;
    // K of all copies, then V of all copies, then room for a read of `other_bytes` more.
    char *pool;
    size_t half;
    char *q, *o, *workspace;
    int32_t *tables, *lens, *counters;
    uint32_t *sink;
    size_t o_bytes;
    int32_t calls;
    struct gpu_graph *decode, *read;
    char *host_o, *host_again;
};

static int upload_repeated(const struct session *const s, char *const to, const void *const block)
{
    const size_t block_bytes = (size_t) s->made->block_pages * s->made->page_bytes;
    for (size_t done = 0; done < s->half; done += block_bytes) {
        const size_t left = s->half - done;
        const int result =
            gpu_upload(s->gpu, to + done, block, left < block_bytes ? left : block_bytes);
        if (result) return result;
    }
    return 0;
}

static int alloc_and_fill(struct session *const s)
{
    const struct bench_case *const made = s->made;
    const struct bench_shape *const shape = made->shape;
    const size_t lens = (size_t) shape->batch * sizeof(int32_t);
    const size_t tables = (size_t) made->copies * (size_t) made->columns * lens;
    const size_t counters = (size_t) s->plan->num_counters * sizeof(int32_t);
    const size_t slack = (size_t) s->plan->other_bytes + 64;
    const struct {
        void *pointer;
        size_t bytes;
        const void *from;
    } buffers[] = {
        { &s->q, s->o_bytes, made->q },
        { &s->o, s->o_bytes * (size_t) made->copies, NULL },
        { &s->workspace, s->plan->workspace_bytes, NULL },
        { &s->tables, tables, made->tables },
        { &s->lens, lens, shape->lens },
        { &s->counters, counters, NULL },
        { &s->sink, sizeof(*s->sink), NULL },
        { &s->pool, 2 * s->half + slack, NULL },
    };
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        void *pointer = NULL;
        int result = gpu_alloc(s->gpu, &pointer, buffers[i].bytes);
        memcpy(buffers[i].pointer, &pointer, sizeof(pointer));
        if (!result)
            result = buffers[i].from
                         ? gpu_upload(s->gpu, pointer, buffers[i].from, buffers[i].bytes)
                         : gpu_fill(s->gpu, pointer, 0, buffers[i].bytes);
        if (result) return result;
    }
    const int result = upload_repeated(s, s->pool, made->k_block);
    return result ? result : upload_repeated(s, s->pool + s->half, made->v_block);
}

static struct attn_decode_params make_params(const struct session *const s, const int32_t copy)
{
    struct attn_decode_params params = bench_case_params(s->made, copy);
    params.num_pages = (int64_t) s->made->pages * s->made->copies;
    params.q = s->q;
    params.o = s->o + (size_t) copy * s->o_bytes;
    params.k_pool = s->pool;
    params.v_pool = s->pool + s->half;
    params.block_table =
        s->tables + (size_t) copy * (size_t) params.batch * (size_t) s->made->columns;
    params.seq_lens = s->lens;
    params.workspace = s->plan->workspace_bytes ? s->workspace : NULL;
    params.workspace_bytes = s->plan->workspace_bytes;
    params.counters = s->plan->num_counters ? s->counters : NULL;
    return params;
}

static enum attn_status call_decode(const struct session *const s, const int32_t copy)
{
    const struct attn_decode_params params = make_params(s, copy);
    return attn_decode(s->device, &params, s->stream);
}

static enum attn_status call_read(const struct session *const s, const int32_t copy)
{
    const double bytes = sum_bytes(s->made->shape, s->plan);
    const size_t start = (size_t) copy * (2 * s->half / (size_t) s->made->copies) / 16 * 16;
    return attn_bandwidth_probe(s->device, s->pool + start, ((size_t) bytes + 15) / 16 * 16,
                                s->sink, s->stream);
}

// Copies what went wrong first; returns 0 if nothing did.
static int explain(const int driver, const enum attn_status status, char *const why,
                   const size_t why_size)
{
    if (driver == CU_OUT_OF_MEMORY)
        snprintf(why, why_size, "out of GPU memory");
    else if (driver)
        snprintf(why, why_size, "the CUDA driver failed with error %d", driver);
    else if (status != ATTN_OK)
        snprintf(why, why_size, "%s", attn_last_error());
    return driver || status != ATTN_OK ? -1 : 0;
}

// Every copy once, outside a graph, and the results on the host.
static int run_once(struct session *const s, char *const why, const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    for (int32_t copy = 0; copy < s->made->copies && status == ATTN_OK; copy++)
        status = call_decode(s, copy);
    int driver = status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
    if (!driver && status == ATTN_OK)
        driver = gpu_download(s->gpu, s->host_o, s->o, s->o_bytes * (size_t) s->made->copies);
    return explain(driver, status, why, why_size);
}

static int capture(struct session *const s,
                   enum attn_status (*const call)(const struct session *, int32_t),
                   struct gpu_graph **const graph, char *const why, const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    int driver = gpu_graph_begin(s->gpu, s->stream);
    if (driver) return explain(driver, status, why, why_size);
    for (int32_t i = 0; i < s->calls && status == ATTN_OK; i++)
        status = call(s, i % s->made->copies);
    // Before the capture ends: the sentence is the failed call's.
    const int failed = explain(0, status, why, why_size);
    driver = gpu_graph_end(s->gpu, s->stream, graph);
    return failed ? failed : explain(driver, ATTN_OK, why, why_size);
}

// Microseconds of one call in a replay of the graph. A replay before it keeps the GPU busy until
// the host has enqueued the one that is timed.
static int time_graph(const struct session *const s, struct gpu_graph *const graph,
                      double *const us)
{
    float milliseconds = 0.0f;
    int driver = gpu_graph_launch(s->gpu, graph, s->stream);
    if (!driver) driver = gpu_timer_start(s->gpu, s->stream);
    if (!driver) driver = gpu_graph_launch(s->gpu, graph, s->stream);
    if (!driver) driver = gpu_timer_stop(s->gpu, s->stream);
    if (!driver) driver = gpu_timer_read(s->gpu, &milliseconds);
    *us = (double) milliseconds * 1e3 / s->calls;
    return driver;
}

static int sample_times(struct session *const s, struct bench_times *const times, char *const why,
                        const size_t why_size)
{
    double decode[WARM_UPS + GPU_SAMPLES], read[WARM_UPS + GPU_SAMPLES];
    int driver = 0;
    if (capture(s, call_decode, &s->decode, why, why_size)) return -1;
    if (capture(s, call_read, &s->read, why, why_size)) return -1;
    for (int i = 0; i < WARM_UPS + GPU_SAMPLES && !driver; i++) {
        driver = time_graph(s, s->read, &read[i]);
        if (!driver) driver = time_graph(s, s->decode, &decode[i]);
    }
    if (driver) return explain(driver, ATTN_OK, why, why_size);
    summarise(times, read + WARM_UPS, GPU_SAMPLES);
    times->limit_us = times->median_us;
    summarise(times, decode + WARM_UPS, GPU_SAMPLES);
    return 0;
}

static double read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec * 1e6 + (double) now.tv_nsec * 1e-3;
}

// Host time of a call on an idle stream; without params, of the smallest launch that there is.
static int time_launch(const struct session *const s, const struct attn_decode_params *const params,
                       double *const us, enum attn_status *const status)
{
    const double start = read_clock();
    *status = params ? attn_decode(s->device, params, s->stream)
                     : attn_bandwidth_probe(s->device, s->pool, 16, s->sink, s->stream);
    *us = read_clock() - start;
    return *status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
}

static int sample_launches(struct session *const s, struct bench_times *const times,
                           char *const why, const size_t why_size)
{
    const struct attn_decode_params params = make_params(s, 0);
    double decode[LAUNCH_SAMPLES], smallest[LAUNCH_SAMPLES];
    for (int i = 0; i < LAUNCH_SAMPLES; i++) {
        enum attn_status status;
        int driver = time_launch(s, &params, &decode[i], &status);
        if (!driver && status == ATTN_OK) driver = time_launch(s, NULL, &smallest[i], &status);
        if (explain(driver, status, why, why_size)) return -1;
    }
    times->host_us = take_median(decode, LAUNCH_SAMPLES);
    times->launch_us = take_median(smallest, LAUNCH_SAMPLES);
    return 0;
}

// What was timed has to have given the bits that were checked.
static int check_again(struct session *const s, char *const why, const size_t why_size)
{
    const size_t bytes = s->o_bytes * (size_t) s->made->copies;
    const int driver = gpu_download(s->gpu, s->host_again, s->o, bytes);
    if (driver) return explain(driver, ATTN_OK, why, why_size);
    if (!memcmp(s->host_o, s->host_again, bytes)) return 0;
    snprintf(why, why_size, "the timed calls gave other bits than the checked ones");
    return -1;
}

static void close_session(struct session *const s)
{
    void *const buffers[] = { s->pool,   s->q,    s->o,        s->workspace,
                              s->tables, s->lens, s->counters, s->sink };
    gpu_graph_destroy(s->gpu, &s->decode);
    gpu_graph_destroy(s->gpu, &s->read);
    gpu_stream_destroy(s->gpu, s->stream);
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) gpu_free(s->gpu, buffers[i]);
    free(s->host_o);
    free(s->host_again);
}

static enum bench_result run_session(struct session *const s, struct bench_times *const times,
                                     char *const why, const size_t why_size)
{
    s->host_o = malloc(s->o_bytes * (size_t) s->made->copies + 1);
    s->host_again = malloc(s->o_bytes * (size_t) s->made->copies + 1);
    if (!s->host_o || !s->host_again) {
        snprintf(why, why_size, "out of memory");
        return BENCH_FAILED;
    }
    int driver = gpu_stream_create(s->gpu, &s->stream);
    if (!driver) driver = alloc_and_fill(s);
    if (driver == CU_OUT_OF_MEMORY) {
        snprintf(why, why_size, "K and V of %.1f GB do not fit the GPU's memory",
                 2e-9 * (double) s->half);
        return BENCH_SKIPPED;
    }
    if (explain(driver, ATTN_OK, why, why_size) || run_once(s, why, why_size) ||
        check_rows(s->made, s->host_o, ATTN_CHECK_KERNEL, times, why, why_size) ||
        sample_times(s, times, why, why_size) || sample_launches(s, times, why, why_size) ||
        check_again(s, why, why_size))
        return BENCH_FAILED;
    return BENCH_DONE;
}

// Sets of pages that hold L2_MULTIPLE times the L2 together; one if one alone does.
static int32_t count_copies(const struct bench_shape *const shape, const int l2_bytes)
{
    const double bytes = bench_shape_kv_bytes(shape), wanted = (double) L2_MULTIPLE * l2_bytes;
    if (bytes <= 0.0 || bytes >= wanted) return 1;
    const double copies = ceil(wanted / bytes);
    return copies < 2.0 ? 2 : copies > 4096.0 ? 4096 : (int32_t) copies;
}

// Whole rounds over the copies.
static int32_t count_calls(const double bytes, const int32_t copies)
{
    const double wanted = fmin(fmax(MIN_CALLS, CHAIN_BYTES / bytes), MAX_CALLS);
    return copies * (int32_t) ceil(wanted / copies);
}

static enum bench_result start_case(const struct attn_device *const device,
                                    const struct bench_shape *const shape, const int32_t copies,
                                    struct bench_case *const made,
                                    struct attn_decode_plan *const plan,
                                    struct bench_times *const times, char *const why,
                                    const size_t why_size)
{
    const struct attn_decode_shape wanted = bench_shape_library(shape);
    memset(times, 0, sizeof(*times));
    memset(made, 0, sizeof(*made));
    const enum attn_status status = attn_decode_plan(device, &wanted, plan);
    if (explain(0, status, why, why_size))
        return status == ATTN_ERROR_UNSUPPORTED ? BENCH_SKIPPED : BENCH_FAILED;
    snprintf(times->kernel, sizeof(times->kernel), "%s", plan->kernel);
    times->bytes = sum_bytes(shape, plan);
    times->copies = copies;
    if (bench_shape_pages(shape) * copies > INT32_MAX) {
        snprintf(why, why_size, "more than 2^31 - 1 pages");
        return BENCH_FAILED;
    }
    if (!bench_case_make(made, shape, copies, SEED)) return BENCH_DONE;
    snprintf(why, why_size, "out of memory");
    return BENCH_FAILED;
}

enum bench_result bench_on_gpu(struct attn_device *const device, struct gpu *const gpu,
                               const struct bench_shape *const shape,
                               struct bench_times *const times, char *const why,
                               const size_t why_size)
{
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    struct gpu_description found;
    struct bench_case made;
    if (explain(gpu_describe(gpu, &found), ATTN_OK, why, why_size)) return BENCH_FAILED;
    const int32_t copies = count_copies(shape, found.l2_bytes);
    enum bench_result result =
        start_case(device, shape, copies, &made, &plan, times, why, why_size);
    if (result != BENCH_DONE) return result;
    times->calls = count_calls(times->bytes, copies);
    struct session session = {
        .device = device,
        .gpu = gpu,
        .made = &made,
        .plan = &plan,
        .half = (size_t) copies * (size_t) made.pages * made.page_bytes,
        .o_bytes = (size_t) shape->batch * (size_t) shape->num_q_heads * (size_t) shape->head_dim *
                   attn_dtype_size(shape->q_dtype),
        .calls = times->calls,
    };
    result = run_session(&session, times, why, why_size);
    close_session(&session);
    bench_case_free(&made);
    return result;
}

enum bench_result bench_on_host(struct attn_device *const device,
                                const struct bench_shape *const shape,
                                struct bench_times *const times, char *const why,
                                const size_t why_size)
{
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    struct bench_case made;
    double samples[HOST_SAMPLES];
    enum bench_result result = start_case(device, shape, 1, &made, &plan, times, why, why_size);
    if (result != BENCH_DONE) return result;
    const struct attn_decode_params params = bench_case_params(&made, 0);
    for (int i = 0; i < HOST_SAMPLES && result == BENCH_DONE; i++) {
        struct execution execution;
        const double start = read_clock();
        if (execute_decode(device, NULL, &params, &execution, why, why_size) != ATTN_OK)
            result = BENCH_FAILED;
        samples[i] = read_clock() - start;
        if (result == BENCH_DONE && !i &&
            check_rows(&made, execution.o, ATTN_CHECK_HOST, times, why, why_size))
            result = BENCH_FAILED;
        execution_free(&execution);
    }
    if (result == BENCH_DONE) summarise(times, samples, HOST_SAMPLES);
    bench_case_free(&made);
    return result;
}

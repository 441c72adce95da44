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
#define WARM_UPS 2
#define GPU_SAMPLES 15
#define HOST_SAMPLES 5
// Calls whose host time is taken.
#define LAUNCH_SAMPLES 101
// KV heads of a sequence checked at most; fewer where so many keys have been walked, for each row.
#define MAX_HEADS 8
#define MIN_HEADS 1
#define MAX_KEYS (1 << 17)
#define SEED 1

enum {
    CU_OUT_OF_MEMORY = 2,
};

static int compare_double(const void *const left, const void *const right)
{
    const double a = *(const double *) left, b = *(const double *) right;
    return (a > b) - (a < b);
}

double bench_take_median(double *const samples, const int count)
{
    qsort(samples, (size_t) count, sizeof(*samples), compare_double);
    return samples[count / 2];
}

static void summarise(struct bench_times *const times, double *const samples, const int count)
{
    times->median_us = bench_take_median(samples, count);
    times->p10_us = samples[count / 10];
    times->p90_us = samples[count - 1 - count / 10];
}

// Half of the bytes of a page are V.
static double sum_bytes(const struct bench_shape *const shape,
                        const struct attn_decode_plan *const plan, const double dropped_share)
{
    return bench_shape_kv_bytes(shape) * (1.0 - 0.5 * dropped_share) + plan->other_bytes;
}

// `dropped` of `calls` calls.
static void note_dropped(struct bench_times *const times, const struct bench_shape *const shape,
                         const struct attn_decode_plan *const plan, const int64_t dropped,
                         const int32_t calls)
{
    const double pages = (double) bench_shape_pages(shape) * shape->num_kv_heads * calls;
    if (shape->has_skip && pages > 0.0) times->dropped_share = (double) dropped / pages;
    times->bytes = sum_bytes(shape, plan, times->dropped_share);
}

// Of the query heads of one KV head of one sequence, in a call's o.
static double sum_squares(const struct attn_decode_params *const params, const int32_t sequence,
                          const int32_t kv_head, const void *const o)
{
    const int64_t ratio = params->num_q_heads / params->num_kv_heads,
                  count = ratio * params->head_dim;
    double sum = 0.0;
    for (int32_t token = 0; token < params->q_len; token++) {
        const int64_t row = ((int64_t) sequence * params->q_len + token) * params->num_q_heads;
        const int64_t first = (row + kv_head * ratio) * params->head_dim;
        for (int64_t i = first; i < first + count; i++) {
            const double value = attn_load(o, i, params->q_dtype);
            sum += value * value;
        }
    }
    return sum;
}

static size_t count_o_bytes(const struct bench_shape *const shape)
{
    return (size_t) shape->batch * (size_t) shape->q_len * (size_t) shape->num_q_heads *
           (size_t) shape->head_dim * attn_dtype_size(shape->q_dtype);
}

// Compares `o`, all copies' results, with the definition: the last KV head of the last sequence of
// the last copy, then random ones; of each all query heads and tokens.
static int check_heads(const struct bench_case *const made, const char *const o,
                       const enum attn_check_bound bound, struct bench_times *const times,
                       char *const why, const size_t why_size)
{
    const struct bench_shape *const shape = made->shape;
    const int32_t rows = shape->num_q_heads / shape->num_kv_heads * shape->q_len;
    const size_t heads = (size_t) shape->batch * (size_t) shape->num_kv_heads;
    struct random random = { SEED };
    size_t place = heads * (size_t) made->copies - 1;
    int64_t keys = 0;
    double error_squares = 0.0, squares = 0.0;
    for (int i = 0; i < MAX_HEADS && (i < MIN_HEADS || keys < MAX_KEYS); i++) {
        const int32_t sequence = (int32_t) (place % heads / (size_t) shape->num_kv_heads);
        const int32_t kv_head = (int32_t) (place % (size_t) shape->num_kv_heads);
        const struct attn_decode_params params = bench_case_params(made, (int32_t) (place / heads));
        const char *const result = o + place / heads * count_o_bytes(shape);
        struct attn_check found;
        if (attn_check_decode_head(&params, sequence, kv_head, result, NULL, bound, &found)) {
            snprintf(why, why_size, "out of memory in the check");
            return -1;
        }
        if (found.failed) {
            snprintf(
                why, why_size,
                "not timed, as kernel %s is wrong: o[%d][%d][%d][%d] is %.9g and should be %.9g; %lld of "
                "%lld elements of the KV head are beyond the bound",
                times->kernel, sequence, found.worst_token, found.worst_head, found.worst_dim,
                found.worst_value, found.worst_exact, (long long) found.failed,
                (long long) found.compared);
            return -1;
        }
        if (found.max_ratio > times->max_ratio) times->max_ratio = found.max_ratio;
        // Heads are weighed by the result's size in place of the exact one: the same but for that
        // head's error.
        const double size = sum_squares(&params, sequence, kv_head, result);
        error_squares += found.relative_rms * found.relative_rms * size;
        squares += size;
        times->rows_checked += rows;
        keys += (int64_t) shape->lens[sequence] * rows;
        place = random_below(&random, heads * (size_t) made->copies);
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
    int32_t *tables, *lens, *counters, *mask, *skip_table, *counts;
    // Of CASE_TILED.
    struct attn_tiled *tiled;
    int64_t *dropped;
    uint32_t *sink;
    size_t o_bytes;
    int32_t calls;
    // Bytes that a read reads.
    double bytes;
    struct gpu_graph *decode, *dense, *read;
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
    const size_t counts = made->counts ? 2 * lens : 0;
    const size_t tables = (size_t) made->copies * bench_case_table(made) * sizeof(int32_t);
    const size_t mask = (size_t) shape->q_len * (size_t) tree_words(shape->q_len) * lens;
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
        { &s->mask, made->mask ? mask : 0, made->mask },
        { &s->skip_table, sizeof(made->skip_table), made->skip_table },
        { &s->counts, counts, made->counts },
        { &s->dropped, sizeof(*s->dropped), NULL },
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
    params.block_table = s->tables + (size_t) copy * bench_case_table(s->made);
    params.seq_lens = s->lens;
    params.tree_mask = s->made->mask ? s->mask : NULL;
    params.skip_table = params.skip_table ? s->skip_table : NULL;
    params.workspace = s->plan->workspace_bytes ? s->workspace : NULL;
    params.workspace_bytes = s->plan->workspace_bytes;
    params.counters = s->plan->num_counters ? s->counters : NULL;
    return params;
}

// K of all copies and then V is what a pool of ctm is.
static struct attn_ctm_params make_ctm(const struct session *const s, const int32_t copy)
{
    struct attn_ctm_params params = bench_case_ctm(s->made, copy);
    params.num_pages = s->made->pages * s->made->copies;
    params.q = s->q;
    params.output = s->o + (size_t) copy * s->o_bytes;
    params.kv_pool = s->pool;
    params.page_table = s->tables + (size_t) copy * bench_case_table(s->made);
    params.seq_lens = s->lens;
    params.tree_mask = s->made->mask ? s->mask : NULL;
    if (params.skip_softmax_scale_table_length) params.skip_softmax_scale_table = s->skip_table;
    params.workspace = (float *) (void *) s->workspace;
    params.semaphores = s->counters;
    params.stream = s->stream;
    return params;
}

static enum attn_status create_tiled(struct session *const s)
{
    const struct bench_shape *const shape = s->made->shape;
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    if (shape->op != CASE_TILED) return ATTN_OK;
    dims.dtype = shape->q_dtype;
    dims.max_seqs = shape->batch;
    dims.num_q_heads = shape->num_q_heads;
    dims.num_kv_heads = shape->num_kv_heads;
    dims.head_dim = shape->head_dim;
    dims.block_size = shape->page_size;
    dims.tile_capacity = s->made->columns;
    create.dims = &dims;
    return attn_tiled_create(&s->tiled, s->device, &create);
}

// A whole step.
static enum attn_status call_tiled(const struct session *const s, const int32_t copy)
{
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    const int32_t batch = s->made->shape->batch;
    step.num_seqs = last.num_seqs = batch;
    step.q = s->q;
    step.k_pool = s->pool;
    step.v_pool = s->pool + s->half;
    step.num_pool_blocks = (int64_t) s->made->pages * s->made->copies;
    step.tile_blocks = s->tables + (size_t) copy * bench_case_table(s->made);
    step.tile_block_counts = s->counts;
    step.valid_slots = s->counts + batch;
    last.output = s->o + (size_t) copy * s->o_bytes;
    enum attn_status status = attn_tiled_begin_step(s->tiled, batch, s->stream);
    if (status == ATTN_OK) status = attn_tiled_step_tile(s->tiled, &step, s->stream);
    return status == ATTN_OK ? attn_tiled_finalize(s->tiled, &last, s->stream) : status;
}

static enum attn_status call_with(const struct session *const s, const int32_t copy,
                                  const bool skip, int64_t *const dropped)
{
    if (s->made->shape->op == CASE_CTM) {
        struct attn_ctm_params params = make_ctm(s, copy);
        params.dropped_pages = dropped;
        if (!skip) params.skip_softmax_scale_table_length = 0;
        if (!skip) params.skip_softmax_scale_table = NULL;
        return attn_ctm_run(s->device, &params);
    }
    if (s->made->shape->op == CASE_TILED) return call_tiled(s, copy);
    struct attn_decode_params params = make_params(s, copy);
    params.dropped_blocks = dropped;
    if (!skip) params.skip_table = NULL;
    return attn_decode(s->device, &params, s->stream);
}

static enum attn_status call_decode(const struct session *const s, const int32_t copy)
{
    return call_with(s, copy, true, NULL);
}

static enum attn_status call_dense(const struct session *const s, const int32_t copy)
{
    return call_with(s, copy, false, NULL);
}

static enum attn_status call_read(const struct session *const s, const int32_t copy)
{
    const size_t start = (size_t) copy * (2 * s->half / (size_t) s->made->copies) / 16 * 16;
    return attn_bandwidth_probe(s->device, s->pool + start, ((size_t) s->bytes + 15) / 16 * 16,
                                s->sink, s->stream);
}

// The smallest launch that there is.
static enum attn_status call_probe(const struct session *const s, const int32_t copy)
{
    (void) copy;
    return attn_bandwidth_probe(s->device, s->pool, 16, s->sink, s->stream);
}

int bench_explain(const int driver, const enum attn_status status, char *const why,
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
static int run_once(struct session *const s, struct bench_times *const times, char *const why,
                    const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    int64_t dropped = 0;
    for (int32_t copy = 0; copy < s->made->copies && status == ATTN_OK; copy++)
        status = call_with(s, copy, true, s->dropped);
    int driver = status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
    if (!driver && status == ATTN_OK)
        driver = gpu_download(s->gpu, s->host_o, s->o, s->o_bytes * (size_t) s->made->copies);
    if (!driver && status == ATTN_OK)
        driver = gpu_download(s->gpu, &dropped, s->dropped, sizeof(dropped));
    note_dropped(times, s->made->shape, s->plan, dropped, s->made->copies);
    s->bytes = times->bytes;
    return bench_explain(driver, status, why, why_size);
}

static int capture(struct session *const s,
                   enum attn_status (*const call)(const struct session *, int32_t),
                   struct gpu_graph **const graph, char *const why, const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    int driver = gpu_graph_begin(s->gpu, s->stream);
    if (driver) return bench_explain(driver, status, why, why_size);
    for (int32_t i = 0; i < s->calls && status == ATTN_OK; i++)
        status = call(s, i % s->made->copies);
    // Before the capture ends: the sentence is the failed call's.
    const int failed = bench_explain(0, status, why, why_size);
    driver = gpu_graph_end(s->gpu, s->stream, graph);
    return failed ? failed : bench_explain(driver, ATTN_OK, why, why_size);
}

int bench_time_graph(struct gpu *const gpu, const attn_stream stream, struct gpu_graph *const graph,
                     const int32_t calls, double *const us)
{
    float milliseconds = 0.0f;
    int driver = gpu_graph_launch(gpu, graph, stream);
    if (!driver) driver = gpu_timer_start(gpu, stream);
    if (!driver) driver = gpu_graph_launch(gpu, graph, stream);
    if (!driver) driver = gpu_timer_stop(gpu, stream);
    if (!driver) driver = gpu_timer_read(gpu, &milliseconds);
    *us = (double) milliseconds * 1e3 / calls;
    return driver;
}

static int time_graph(const struct session *const s, struct gpu_graph *const graph,
                      double *const us)
{
    return bench_time_graph(s->gpu, s->stream, graph, s->calls, us);
}

static int sample_times(struct session *const s, struct bench_times *const times, char *const why,
                        const size_t why_size)
{
    const int count = WARM_UPS + GPU_SAMPLES;
    double decode[WARM_UPS + GPU_SAMPLES], dense[WARM_UPS + GPU_SAMPLES];
    double read[WARM_UPS + GPU_SAMPLES];
    const bool has_skip = s->made->shape->has_skip;
    int driver = 0;
    if (capture(s, call_decode, &s->decode, why, why_size)) return -1;
    if (capture(s, call_read, &s->read, why, why_size)) return -1;
    if (has_skip && capture(s, call_dense, &s->dense, why, why_size)) return -1;
    for (int i = 0; i < count && !driver; i++) {
        driver = time_graph(s, s->read, &read[i]);
        if (!driver && has_skip) driver = time_graph(s, s->dense, &dense[i]);
        // Last, so that its results are what is looked at again.
        if (!driver) driver = time_graph(s, s->decode, &decode[i]);
    }
    if (driver) return bench_explain(driver, ATTN_OK, why, why_size);
    times->limit_us = bench_take_median(read + WARM_UPS, GPU_SAMPLES);
    if (has_skip) times->dense_us = bench_take_median(dense + WARM_UPS, GPU_SAMPLES);
    summarise(times, decode + WARM_UPS, GPU_SAMPLES);
    return 0;
}

double bench_read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec * 1e6 + (double) now.tv_nsec * 1e-3;
}

// Host time of a call on an idle stream.
static int time_launch(const struct session *const s,
                       enum attn_status (*const call)(const struct session *, int32_t),
                       double *const us, enum attn_status *const status)
{
    const double start = bench_read_clock();
    *status = call(s, 0);
    *us = bench_read_clock() - start;
    return *status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
}

static int sample_launches(struct session *const s, struct bench_times *const times,
                           char *const why, const size_t why_size)
{
    double decode[LAUNCH_SAMPLES], smallest[LAUNCH_SAMPLES];
    for (int i = 0; i < LAUNCH_SAMPLES; i++) {
        enum attn_status status;
        int driver = time_launch(s, call_decode, &decode[i], &status);
        if (!driver && status == ATTN_OK)
            driver = time_launch(s, call_probe, &smallest[i], &status);
        if (bench_explain(driver, status, why, why_size)) return -1;
    }
    times->host_us = bench_take_median(decode, LAUNCH_SAMPLES);
    times->launch_us = bench_take_median(smallest, LAUNCH_SAMPLES);
    return 0;
}

// What was timed has to have given the bits that were checked.
static int check_again(struct session *const s, char *const why, const size_t why_size)
{
    const size_t bytes = s->o_bytes * (size_t) s->made->copies;
    const int driver = gpu_download(s->gpu, s->host_again, s->o, bytes);
    if (driver) return bench_explain(driver, ATTN_OK, why, why_size);
    if (!memcmp(s->host_o, s->host_again, bytes)) return 0;
    snprintf(why, why_size, "the timed calls gave other bits than the checked ones");
    return -1;
}

static void close_session(struct session *const s)
{
    void *const buffers[] = { s->pool,       s->q,       s->o,        s->workspace,
                              s->tables,     s->lens,    s->counters, s->mask,
                              s->skip_table, s->dropped, s->sink,     s->counts };
    gpu_graph_destroy(s->gpu, &s->decode);
    gpu_graph_destroy(s->gpu, &s->dense);
    gpu_graph_destroy(s->gpu, &s->read);
    gpu_stream_destroy(s->gpu, s->stream);
    attn_tiled_destroy(&s->tiled);
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
    const enum attn_status created = driver ? ATTN_OK : create_tiled(s);
    if (bench_explain(driver, created, why, why_size))
        return created == ATTN_ERROR_UNSUPPORTED ? BENCH_SKIPPED : BENCH_FAILED;
    if (run_once(s, times, why, why_size) ||
        check_heads(s->made, s->host_o, ATTN_CHECK_KERNEL, times, why, why_size) ||
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
    if (bench_explain(0, status, why, why_size))
        return status == ATTN_ERROR_UNSUPPORTED ? BENCH_SKIPPED : BENCH_FAILED;
    snprintf(times->kernel, sizeof(times->kernel), "%s", plan->kernel);
    times->bytes = sum_bytes(shape, plan, 0.0);
    times->copies = copies;
    // Twice as many in the one pool of ctm.
    if (bench_shape_pages(shape) * copies > INT32_MAX / 2) {
        snprintf(why, why_size, "more than 2^30 - 1 pages");
        return BENCH_FAILED;
    }
    if (bench_case_make(made, shape, copies, SEED)) {
        snprintf(why, why_size, "out of memory");
        return BENCH_FAILED;
    }
    if (shape->op == CASE_CTM) {
        const struct attn_ctm_params params = bench_case_ctm(made, 0);
        const struct execute_ctm_sizes sizes = execute_find_ctm_sizes(&params);
        plan->workspace_bytes = sizes.workspace_bytes;
        plan->num_counters = sizes.num_semaphores;
    }
    if (shape->op == CASE_TILED) {
        const char *const kernel = execute_tiled_kernel(device, shape->q_dtype, shape->head_dim);
        plan->workspace_bytes = 0;
        plan->num_counters = 0;
        if (*kernel) snprintf(times->kernel, sizeof(times->kernel), "%s", kernel);
    }
    return BENCH_DONE;
}

enum bench_result bench_on_gpu(struct attn_device *const device, struct gpu *const gpu,
                               const struct bench_shape *const shape,
                               struct bench_times *const times, char *const why,
                               const size_t why_size)
{
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    struct gpu_description found;
    struct bench_case made;
    if (bench_explain(gpu_describe(gpu, &found), ATTN_OK, why, why_size)) return BENCH_FAILED;
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
        .o_bytes = count_o_bytes(shape),
        .calls = times->calls,
    };
    result = run_session(&session, times, why, why_size);
    close_session(&session);
    bench_case_free(&made);
    return result;
}

static enum attn_status execute_shape(struct attn_device *const device,
                                      const struct bench_case *const made,
                                      struct execution *const execution, char *const why,
                                      const size_t why_size)
{
    if (made->shape->op == CASE_CTM) {
        const struct attn_ctm_params params = bench_case_ctm(made, 0);
        return execute_ctm(device, NULL, &params, execution, why, why_size);
    }
    const struct attn_decode_params params = bench_case_params(made, 0);
    if (made->shape->op == CASE_TILED) {
        const struct case_tiled tiled = bench_case_tiled(made, 0);
        return execute_tiled(device, NULL, &params, &tiled, execution, why, why_size);
    }
    return execute_decode(device, NULL, &params, execution, why, why_size);
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
    for (int i = 0; i < HOST_SAMPLES && result == BENCH_DONE; i++) {
        struct execution execution;
        const double start = bench_read_clock();
        if (execute_shape(device, &made, &execution, why, why_size) != ATTN_OK)
            result = BENCH_FAILED;
        samples[i] = bench_read_clock() - start;
        if (result == BENCH_DONE && !i &&
            check_heads(&made, execution.o, ATTN_CHECK_HOST, times, why, why_size))
            result = BENCH_FAILED;
        note_dropped(times, shape, &plan, execution.dropped, 1);
        execution_free(&execution);
    }
    if (result == BENCH_DONE) summarise(times, samples, HOST_SAMPLES);
    bench_case_free(&made);
    return result;
}

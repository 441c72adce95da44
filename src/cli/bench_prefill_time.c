/* SPDX-License-Identifier: Apache-2.0 */
// Calls are replayed from a CUDA graph, then those of the original. Long ones bring the card to its
// limit of power: each graph is timed after it has been replayed for a while. Between calls the cache
// is as they leave it: what they read they read many times. Short chunks read it once: their calls go
// round over copies of K and V, so that these have left the L2.
#include "cli/bench_prefill.h"
#include "cli/execute.h"
#include "cli/random.h"
#include "host/check.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Calls in a graph: as many as CHAIN_FLOPS make.
#define CHAIN_FLOPS 4e12
#define MIN_CALLS 2
#define MAX_CALLS 64
// Microseconds of replays before the first sample, and samples.
#define WARM_UP_US 200000
#define GPU_SAMPLES 11
#define HOST_SAMPLES 3
// Calls whose host time is taken.
#define LAUNCH_SAMPLES 51
// Rows checked: at most, and at least; between them as many as have so many keys together.
#define MAX_ROWS 128
#define MIN_ROWS 24
#define MAX_KEYS (1 << 18)
#define SEED 2
// Bytes of K and V that those of the set short go round over, as a multiple of the L2.
#define COLD_CACHES 4.0

// A case on the GPU.
struct session {
    struct attn_device *device;
    struct gpu *gpu;
    const struct prefill_bench_case *made;
    attn_stream stream;
    // `other` is the original's o.
    void *q, *k, *o, *other, *table, *cu_seqlens, *kv_lens, *q_offsets;
    // Copies of K, each before its V; k is all of them.
    int32_t copies;
    // Turns on the short form, and is what a probe writes to.
    void *workspace, *counters, *sink;
    size_t workspace_bytes;
    int32_t num_counters;
    bool has_original;
    int32_t calls;
    struct gpu_graph *graph, *original, *read;
    char *host_o, *host_other;
};

// The first rows and the last ones of random sequences and heads, and random ones.
static struct attn_check_place pick_place(const struct prefill_bench_case *const made, const int i,
                                          struct random *const random)
{
    const struct attn_prefill_params *const p = &made->params;
    struct attn_check_place place;
    place.sequence = (int32_t) random_below(random, (uint64_t) p->batch);
    place.head = (int32_t) random_below(random, (uint64_t) p->num_q_heads);
    const int32_t tokens = prefill_bench_tokens(made, place.sequence);
    place.token = i == 0   ? tokens - 1
                  : i == 1 ? 0
                           : (int32_t) random_below(random, (uint64_t) tokens);
    return place;
}

static int check_rows(const struct prefill_bench_case *const made, const void *const o,
                      const enum attn_check_bound bound, struct prefill_bench_times *const times,
                      char *const why, const size_t why_size)
{
    struct attn_check_place places[MAX_ROWS];
    const struct attn_check_prefill call = { .params = &made->params, .o = o };
    struct random random = { SEED };
    struct attn_check found;
    int64_t keys = 0;
    int rows = 0;
    for (; rows < MAX_ROWS && (rows < MIN_ROWS || keys < MAX_KEYS); rows++) {
        places[rows] = pick_place(made, rows, &random);
        keys += places[rows].token + (made->kv_lens ? 0 : made->params.q_offset) + 1;
    }
    attn_check_prefill_rows(&call, places, rows, bound, &found);
    times->rows_checked = rows;
    times->max_ratio = found.max_ratio;
    times->relative_rms = found.relative_rms;
    if (!found.failed) return 0;
    snprintf(
        why, why_size,
        "not timed, as kernel %s is wrong: token %d of sequence %d, head %d, element %d is %.9g "
        "and should be %.9g; %lld of %lld elements are beyond the bound",
        times->kernel, found.worst_token, found.worst_sequence, found.worst_head, found.worst_dim,
        found.worst_value, found.worst_exact, (long long) found.failed, (long long) found.compared);
    return -1;
}

static char *find_copy(const struct session *const s, const int32_t turn)
{
    return (char *) s->k + (size_t) (turn % s->copies) * 2 * s->made->kv_bytes;
}

static struct attn_prefill_params make_params(const struct session *const s, const int32_t turn,
                                              void *const o)
{
    struct attn_prefill_params params = s->made->params;
    params.q = s->q;
    params.k = find_copy(s, turn);
    params.v = find_copy(s, turn) + s->made->kv_bytes;
    params.o = o;
    params.workspace = s->workspace;
    params.workspace_bytes = s->workspace_bytes;
    params.counters = s->counters;
    params.block_table = s->table;
    params.cu_seqlens = s->cu_seqlens;
    params.kv_lens = s->kv_lens;
    params.q_offsets = s->q_offsets;
    return params;
}

static enum attn_status call_any(const struct session *const s, const int32_t turn)
{
    const struct attn_prefill_params params = make_params(s, turn, s->o);
    return execute_prefill_enqueue(s->device, &params, CASE_KERNEL_AUTO, s->stream);
}

static enum attn_status call_original(const struct session *const s, const int32_t turn)
{
    const struct attn_prefill_params params = make_params(s, turn, s->other);
    return execute_prefill_enqueue(s->device, &params, CASE_KERNEL_64, s->stream);
}

static enum attn_status call_read(const struct session *const s, const int32_t turn)
{
    return attn_bandwidth_probe(s->device, find_copy(s, turn), 2 * s->made->kv_bytes, s->sink,
                                s->stream);
}

static int alloc_and_fill(struct session *const s)
{
    const struct prefill_bench_case *const made = s->made;
    const struct {
        void **pointer;
        size_t bytes;
        const void *from;
    } buffers[] = {
        { &s->q, made->q_bytes, made->q },
        { &s->k, 2 * made->kv_bytes * (size_t) s->copies, NULL },
        { &s->o, made->q_bytes, NULL },
        { &s->other, made->q_bytes, NULL },
        { &s->table, made->table_bytes, made->table },
        { &s->cu_seqlens, made->list_bytes, made->cu_seqlens },
        { &s->kv_lens, made->list_bytes, made->kv_lens },
        { &s->q_offsets, made->list_bytes, made->q_offsets },
        { &s->workspace, s->workspace_bytes, NULL },
        { &s->counters, (size_t) s->num_counters * sizeof(int32_t), NULL },
        { &s->sink, sizeof(uint32_t), NULL },
    };
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        if (!buffers[i].bytes) continue;
        int result = gpu_alloc(s->gpu, buffers[i].pointer, buffers[i].bytes);
        if (!result)
            result =
                buffers[i].from
                    ? gpu_upload(s->gpu, *buffers[i].pointer, buffers[i].from, buffers[i].bytes)
                    : gpu_fill(s->gpu, *buffers[i].pointer, 0xFF, buffers[i].bytes);
        if (result) return result;
    }
    int result = s->num_counters
                     ? gpu_fill(s->gpu, s->counters, 0, (size_t) s->num_counters * sizeof(int32_t))
                     : 0;
    for (int32_t i = 0; i < s->copies && !result; i++) {
        result = gpu_upload(s->gpu, find_copy(s, i), made->k, made->kv_bytes);
        if (!result)
            result = gpu_upload(s->gpu, find_copy(s, i) + made->kv_bytes, made->v, made->kv_bytes);
    }
    return result;
}

// Each call once, outside a graph, and the results on the host.
static int run_once(struct session *const s, char *const why, const size_t why_size)
{
    enum attn_status status = call_any(s, 0);
    if (status == ATTN_OK && s->has_original) status = call_original(s, 0);
    int driver = status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
    if (!driver && status == ATTN_OK)
        driver = gpu_download(s->gpu, s->host_o, s->o, s->made->q_bytes);
    if (!driver && status == ATTN_OK && s->has_original)
        driver = gpu_download(s->gpu, s->host_other, s->other, s->made->q_bytes);
    if (bench_explain(driver, status, why, why_size)) return -1;
    if (!s->has_original || !memcmp(s->host_o, s->host_other, s->made->q_bytes)) return 0;
    snprintf(why, why_size, "not timed, as it and the original give other bits");
    return -1;
}

static int capture(struct session *const s,
                   enum attn_status (*const call)(const struct session *, int32_t),
                   struct gpu_graph **const graph, char *const why, const size_t why_size)
{
    enum attn_status status = ATTN_OK;
    int driver = gpu_graph_begin(s->gpu, s->stream);
    if (driver) return bench_explain(driver, status, why, why_size);
    for (int32_t i = 0; i < s->calls && status == ATTN_OK; i++) status = call(s, i);
    // Before the capture ends: the sentence is the failed call's.
    const int failed = bench_explain(0, status, why, why_size);
    driver = gpu_graph_end(s->gpu, s->stream, graph);
    return failed ? failed : bench_explain(driver, ATTN_OK, why, why_size);
}

static int sample_graph(const struct session *const s, struct gpu_graph *const graph,
                        double samples[GPU_SAMPLES])
{
    const double start = bench_read_clock();
    int driver;
    do driver = bench_time_graph(s->gpu, s->stream, graph, s->calls, &samples[0]);
    while (!driver && bench_read_clock() - start < WARM_UP_US);
    for (int i = 0; i < GPU_SAMPLES && !driver; i++)
        driver = bench_time_graph(s->gpu, s->stream, graph, s->calls, &samples[i]);
    return driver;
}

static int sample_times(struct session *const s, struct prefill_bench_times *const times,
                        char *const why, const size_t why_size)
{
    double samples[GPU_SAMPLES], original[GPU_SAMPLES], reads[GPU_SAMPLES];
    const bool is_short = s->made->shape->is_short;
    if (capture(s, call_any, &s->graph, why, why_size)) return -1;
    if (s->has_original && capture(s, call_original, &s->original, why, why_size)) return -1;
    if (is_short && capture(s, call_read, &s->read, why, why_size)) return -1;
    int driver = sample_graph(s, s->graph, samples);
    if (!driver && s->has_original) driver = sample_graph(s, s->original, original);
    if (!driver && is_short) driver = sample_graph(s, s->read, reads);
    if (driver) return bench_explain(driver, ATTN_OK, why, why_size);
    times->median_us = bench_take_median(samples, GPU_SAMPLES);
    times->p10_us = samples[GPU_SAMPLES / 10];
    times->p90_us = samples[GPU_SAMPLES - 1 - GPU_SAMPLES / 10];
    if (s->has_original) times->original_us = bench_take_median(original, GPU_SAMPLES);
    if (is_short)
        times->limit_gbs =
            2.0 * (double) s->made->kv_bytes * 1e-3 / bench_take_median(reads, GPU_SAMPLES);
    return 0;
}

static int sample_launches(struct session *const s, struct prefill_bench_times *const times,
                           char *const why, const size_t why_size)
{
    double samples[LAUNCH_SAMPLES];
    for (int i = 0; i < LAUNCH_SAMPLES; i++) {
        const double start = bench_read_clock();
        const enum attn_status status = call_any(s, i);
        samples[i] = bench_read_clock() - start;
        const int driver = status == ATTN_OK ? gpu_stream_sync(s->gpu, s->stream) : 0;
        if (bench_explain(driver, status, why, why_size)) return -1;
    }
    times->host_us = bench_take_median(samples, LAUNCH_SAMPLES);
    return 0;
}

// What was timed has to have given the bits that were checked.
static int check_again(struct session *const s, char *const why, const size_t why_size)
{
    const int driver = gpu_download(s->gpu, s->host_other, s->o, s->made->q_bytes);
    if (driver) return bench_explain(driver, ATTN_OK, why, why_size);
    if (!memcmp(s->host_o, s->host_other, s->made->q_bytes)) return 0;
    snprintf(why, why_size, "the timed calls gave other bits than the checked ones");
    return -1;
}

static void close_session(struct session *const s)
{
    void *const buffers[] = { s->q,         s->k,          s->o,       s->other,
                              s->table,     s->cu_seqlens, s->kv_lens, s->q_offsets,
                              s->workspace, s->counters,   s->sink };
    gpu_graph_destroy(s->gpu, &s->graph);
    gpu_graph_destroy(s->gpu, &s->original);
    gpu_graph_destroy(s->gpu, &s->read);
    gpu_stream_destroy(s->gpu, s->stream);
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) gpu_free(s->gpu, buffers[i]);
    free(s->host_o);
    free(s->host_other);
}

static enum bench_result run_session(struct session *const s,
                                     struct prefill_bench_times *const times, char *const why,
                                     const size_t why_size)
{
    s->host_o = malloc(s->made->q_bytes + 1);
    s->host_other = malloc(s->made->q_bytes + 1);
    if (!s->host_o || !s->host_other) {
        snprintf(why, why_size, "out of memory");
        return BENCH_FAILED;
    }
    int driver = gpu_stream_create(s->gpu, &s->stream);
    if (!driver) driver = alloc_and_fill(s);
    if (bench_explain(driver, ATTN_OK, why, why_size) || run_once(s, why, why_size) ||
        check_rows(s->made, s->host_o, ATTN_CHECK_KERNEL, times, why, why_size) ||
        sample_times(s, times, why, why_size) || sample_launches(s, times, why, why_size) ||
        check_again(s, why, why_size))
        return BENCH_FAILED;
    return BENCH_DONE;
}

// Which kernels take the shape; that it has an original does not matter where sequences differ.
static enum bench_result plan_case(const struct attn_device *const device,
                                   const struct prefill_bench_case *const made,
                                   struct prefill_bench_times *const times, char *const why,
                                   const size_t why_size)
{
    struct attn_prefill_shape shape = attn_prefill_shape_of(&made->params);
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    // The set long has no workspace, and so the long form alone.
    if (!made->shape->is_short) shape.page_size = 0;
    const enum attn_status status = attn_prefill_plan(device, &shape, &plan);
    if (bench_explain(0, status, why, why_size))
        return status == ATTN_ERROR_UNSUPPORTED ? BENCH_SKIPPED : BENCH_FAILED;
    snprintf(times->kernel, sizeof(times->kernel), "%s",
             plan.kernel ? plan.kernel : plan.short_kernel);
    if (!shape.is_ragged) times->bytes = plan.kv_bytes + plan.other_bytes;
    times->workspace_bytes = plan.workspace_bytes;
    times->num_counters = plan.num_counters;
    shape.rows = 64;
    if (!shape.is_ragged && plan.rows > 64 && attn_prefill_plan(device, &shape, &plan) == ATTN_OK)
        snprintf(times->original, sizeof(times->original), "%s", plan.kernel);
    times->flops = made->flops;
    return BENCH_DONE;
}

static int32_t count_calls(const double flops)
{
    return (int32_t) fmin(fmax(MIN_CALLS, ceil(CHAIN_FLOPS / flops)), MAX_CALLS);
}

static int32_t count_copies(const struct prefill_bench_case *const made, struct gpu *const gpu)
{
    struct gpu_description found = { 0 };
    if (!made->shape->is_short || gpu_describe(gpu, &found)) return 1;
    const double copies = ceil(COLD_CACHES * found.l2_bytes / (2.0 * (double) made->kv_bytes));
    return copies > 1.0 ? (int32_t) copies : 1;
}

enum bench_result prefill_bench_on_gpu(struct attn_device *const device, struct gpu *const gpu,
                                       const struct prefill_bench_shape *const shape,
                                       struct prefill_bench_times *const times, char *const why,
                                       const size_t why_size)
{
    struct prefill_bench_case made;
    memset(times, 0, sizeof(*times));
    if (prefill_bench_make(&made, shape)) {
        snprintf(why, why_size, "out of memory");
        return BENCH_FAILED;
    }
    enum bench_result result = plan_case(device, &made, times, why, why_size);
    if (result == BENCH_DONE) {
        times->calls = count_calls(made.flops);
        struct session session = {
            .device = device,
            .gpu = gpu,
            .made = &made,
            .calls = times->calls,
            .has_original = times->original[0],
            .copies = count_copies(&made, gpu),
            .workspace_bytes = times->workspace_bytes,
            .num_counters = times->num_counters,
        };
        result = run_session(&session, times, why, why_size);
        close_session(&session);
    }
    prefill_bench_free(&made);
    return result;
}

enum bench_result prefill_bench_on_host(struct attn_device *const device,
                                        const struct prefill_bench_shape *const shape,
                                        struct prefill_bench_times *const times, char *const why,
                                        const size_t why_size)
{
    struct prefill_bench_case made;
    double samples[HOST_SAMPLES];
    memset(times, 0, sizeof(*times));
    if (prefill_bench_make(&made, shape)) {
        snprintf(why, why_size, "out of memory");
        return BENCH_FAILED;
    }
    enum bench_result result = plan_case(device, &made, times, why, why_size);
    for (int i = 0; i < HOST_SAMPLES && result == BENCH_DONE; i++) {
        struct execution execution;
        const double start = bench_read_clock();
        if (execute_prefill(device, NULL, &made.params, CASE_KERNEL_AUTO, &execution, why,
                            why_size) != ATTN_OK)
            result = BENCH_FAILED;
        samples[i] = bench_read_clock() - start;
        if (result == BENCH_DONE && !i &&
            check_rows(&made, execution.o, ATTN_CHECK_HOST, times, why, why_size))
            result = BENCH_FAILED;
        execution_free(&execution);
    }
    if (result == BENCH_DONE) {
        times->median_us = bench_take_median(samples, HOST_SAMPLES);
        times->p10_us = samples[0];
        times->p90_us = samples[HOST_SAMPLES - 1];
    }
    prefill_bench_free(&made);
    return result;
}

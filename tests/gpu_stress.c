/* SPDX-License-Identifier: Apache-2.0 */
// Many calls at once, many after each other, and calls on rubbish. The memcheck_* tests are small
// enough for compute-sanitizer:
//   compute-sanitizer tests/gpu_stress -j1 --filter 'gpu_stress/memcheck_*'
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

// The kinds that the pack's table has.
static size_t find_kinds(const struct gpu_session *session,
                         const struct decode_kind *kinds[NUM_DECODE_KINDS])
{
    size_t count = 0;
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        if (gpu_session_serves(session, &decode_kinds[i])) kinds[count++] = &decode_kinds[i];
    cr_assert_gt(count, 0);
    return count;
}

static bool all_equal(const struct decode_data *a, const struct decode_data *b)
{
    for (int32_t i = 0; i < a->c.batch; i++)
        if (!decode_data_equal(a, i, b, i)) return false;
    return true;
}

// ---- 8 threads, each with a stream, a workspace and counters of its own, on one device handle

enum {
    NUM_WORKERS = 8,
    NUM_LOOPS = 40
};

struct worker {
    pthread_t thread;
    struct gpu_session *session;
    pthread_barrier_t *start;
    attn_stream stream;
    struct decode_data *data;
    struct decode_remote remote;
    // What the call gives where it runs alone.
    struct decode_data *base;
    // One set of outputs a loop.
    uint8_t *outputs;
    // Of the last call that failed.
    enum attn_status status;
    char why[256];
};

static size_t outputs_stride(const struct decode_data *data)
{
    return data->zones[DECODE_ZONE_O].bytes + data->zones[DECODE_ZONE_LSE].bytes;
}

// No assertions here: they would leave the thread.
static void *work(void *arg)
{
    struct worker *const w = arg;
    struct attn_decode_params params = decode_remote_params(&w->remote);
    pthread_barrier_wait(w->start);
    for (int n = 0; n < NUM_LOOPS; n++) {
        uint8_t *const o = w->outputs + (size_t) n * outputs_stride(w->data);
        params.o = o;
        params.lse = (float *) (o + w->data->zones[DECODE_ZONE_O].bytes);
        const enum attn_status status = attn_decode(w->session->device, &params, w->stream);
        if (status == ATTN_OK) continue;
        w->status = status;
        strncpy(w->why, attn_last_error(), sizeof(w->why) - 1);
    }
    return NULL;
}

static struct decode_case many_sequences(int index)
{
    return (struct decode_case){
        .name = "worker",
        .batch = 20 + 13 * index,
        .num_q_heads = index % 2 ? 12 : 4,
        .num_kv_heads = 1 + index % 2,
        .page_size = index % 3 ? 16 : 48,
        .len = 3000,
        .lens = DECODE_LENS_LOG,
        .window = index % 4 == 2 ? 500 : 0,
        .sinks = index % 2,
        .lse = true,
        .seed = random_seed(71) + (uint64_t) index,
    };
}

// Whose roots blocks merge together where they are on the chip at the same time; here they often are
// not, and give up.
static struct decode_case one_sequence(int index)
{
    return (struct decode_case){
        .name = "worker",
        .batch = 1,
        .num_q_heads = index % 2 ? 32 : 16,
        .num_kv_heads = index % 2 ? 8 : 4,
        .page_size = 16,
        .len = 8000 - 100 * index,
        .lens = DECODE_LENS_FULL,
        .lse = true,
        .seed = random_seed(73) + (uint64_t) index,
    };
}

static void open_worker(struct worker *w, struct decode_case c, struct gpu_session *session,
                        const struct decode_kind *kind)
{
    decode_case_set_kind(&c, kind);
    w->session = session;
    w->base = decode_data_need(&c, session);
    w->data = decode_data_need(&c, session);
    decode_data_need_run(w->base, session);
    const size_t bytes = NUM_LOOPS * outputs_stride(w->data);
    void *outputs;
    cr_assert_eq(decode_remote_open(&w->remote, session->gpu, w->data), 0);
    cr_assert_eq(gpu_alloc(session->gpu, &outputs, bytes), 0);
    cr_assert_eq(gpu_fill(session->gpu, outputs, 0xFF, bytes), 0);
    cr_assert_eq(gpu_stream_create(session->gpu, &w->stream), 0);
    w->outputs = outputs;
}

static void check_worker(struct worker *w)
{
    struct gpu *const gpu = w->session->gpu;
    const size_t stride = outputs_stride(w->data), o = w->data->zones[DECODE_ZONE_O].bytes;
    const size_t lse = w->data->zones[DECODE_ZONE_LSE].bytes;
    uint8_t *const outputs = malloc(NUM_LOOPS * stride);
    cr_assert_not_null(outputs);
    cr_expect_eq(w->status, ATTN_OK, "%s: %s", w->data->kernel, w->why);
    cr_assert_eq(gpu_stream_sync(gpu, w->stream), 0, "%s", w->data->kernel);
    cr_assert_eq(gpu_download(gpu, outputs, w->outputs, NUM_LOOPS * stride), 0);
    for (size_t n = 0; n < NUM_LOOPS; n++) {
        const uint8_t *const at = outputs + n * stride;
        cr_expect_eq(memcmp(at, decode_result(w->base, DECODE_ZONE_O), o), 0, "%s: o of loop %zu",
                     w->data->kernel, n);
        cr_expect_eq(memcmp(at + o, decode_result(w->base, DECODE_ZONE_LSE), lse), 0,
                     "%s: lse of loop %zu", w->data->kernel, n);
    }
    cr_assert_eq(decode_remote_fetch(&w->remote), 0);
    cr_expect(decode_data_intact(w->data), "%s wrote where it should not", w->data->kernel);
    free(outputs);
}

static void close_worker(struct worker *w)
{
    gpu_stream_destroy(w->session->gpu, w->stream);
    gpu_free(w->session->gpu, w->outputs);
    decode_remote_close(&w->remote);
    decode_data_free(&w->data);
    decode_data_free(&w->base);
}

static void expect_results_of_their_own(struct decode_case (*make_case)(int index))
{
    static struct worker workers[NUM_WORKERS];
    struct gpu_session session;
    const struct decode_kind *kinds[NUM_DECODE_KINDS];
    pthread_barrier_t start;
    gpu_session_open(&session, 0);
    const size_t num_kinds = find_kinds(&session, kinds);
    cr_assert_eq(pthread_barrier_init(&start, NULL, NUM_WORKERS), 0);
    for (int i = 0; i < NUM_WORKERS; i++) {
        open_worker(&workers[i], make_case(i), &session, kinds[(size_t) i * 5 % num_kinds]);
        workers[i].start = &start;
    }
    for (int i = 0; i < NUM_WORKERS; i++)
        cr_assert_eq(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    for (int i = 0; i < NUM_WORKERS; i++) pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < NUM_WORKERS; i++) check_worker(&workers[i]);
    for (int i = 0; i < NUM_WORKERS; i++) close_worker(&workers[i]);
    pthread_barrier_destroy(&start);
    gpu_session_close(&session);
}

Test(gpu_stress, threads_and_streams, .timeout = 120)
{
    expect_results_of_their_own(many_sequences);
}

Test(gpu_stress, roots_that_meet_on_a_shared_chip, .timeout = 120)
{
    expect_results_of_their_own(one_sequence);
}

// ---- 10,000 calls of all shapes through one workspace and one set of counters

enum {
    NUM_SHAPES = 96,
    NUM_CALLS = 10000,
    // One call in so many is looked at.
    SAMPLE = 20
};

struct mixed {
    struct gpu_session session;
    struct decode_data *first[NUM_SHAPES], *data[NUM_SHAPES];
    struct decode_remote remotes[NUM_SHAPES];
    void *workspace;
    size_t workspace_bytes;
    int32_t *counters;
    size_t counters_bytes;
};

static struct decode_case random_case(struct random *random, const struct decode_kind *kind)
{
    const int32_t ratios[] = { 1, 2, 4, 6, 7, 8, 16 };
    const int32_t page_sizes[] = { 1, 8, 16, 16, 48, 64 };
    const int32_t q_lens[] = { 1, 1, 2, 7 };
    struct decode_case c = {
        .name = "mixed",
        .batch = 1 + (int32_t) random_below(random, 24),
        .num_kv_heads = 1 + (int32_t) random_below(random, 3),
        .page_size = page_sizes[random_below(random, COUNT(page_sizes))],
        .len = 1 + (int32_t) random_below(random, 2500),
        .lens = random_below(random, 2) ? DECODE_LENS_LOG : DECODE_LENS_EDGES,
        .window = random_below(random, 2) ? 1 + (int32_t) random_below(random, 600) : 0,
        .window_form = (enum attn_window_form) random_below(random, 2),
        .q_len = q_lens[random_below(random, COUNT(q_lens))],
        .tree = random_below(random, 2) ? (enum decode_tree) random_below(random, NUM_DECODE_TREES)
                                        : DECODE_TREE_NONE,
        .v_table = random_below(random, 2),
        .extra_stride = (int32_t) random_below(random, 3),
        .softcap = random_below(random, 4) ? 0 : 15,
        .sinks = random_below(random, 2),
        .lse = true,
        .scales = random_below(random, 2),
        .layout = (enum decode_layout) random_below(random, NUM_DECODE_LAYOUTS),
        .fused_q = random_below(random, 2),
        .extra_columns = (int32_t) random_below(random, 200),
        .seed = random_next(random),
    };
    c.num_q_heads = c.num_kv_heads * ratios[random_below(random, COUNT(ratios))];
    decode_case_set_kind(&c, kind);
    return c;
}

static void open_mixed(struct mixed *m, struct random *random)
{
    const struct decode_kind *kinds[NUM_DECODE_KINDS];
    gpu_session_open_policy(&m->session, "chunk");
    const size_t num_kinds = find_kinds(&m->session, kinds);
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const struct decode_case c = random_case(random, kinds[i % num_kinds]);
        m->first[i] = decode_data_need(&c, &m->session);
        m->data[i] = decode_data_need(&c, &m->session);
        decode_data_need_run(m->first[i], &m->session);
        cr_assert_eq(decode_remote_open(&m->remotes[i], m->session.gpu, m->data[i]), 0);
        const size_t workspace = m->data[i]->zones[DECODE_ZONE_WORKSPACE].bytes;
        const size_t counters = m->data[i]->zones[DECODE_ZONE_COUNTERS].bytes;
        if (workspace > m->workspace_bytes) m->workspace_bytes = workspace;
        if (counters > m->counters_bytes) m->counters_bytes = counters;
    }
    void *counters;
    cr_assert(m->workspace_bytes > 0 && m->counters_bytes > 0, "nothing is shared");
    cr_assert_eq(gpu_alloc(m->session.gpu, &m->workspace, m->workspace_bytes), 0);
    cr_assert_eq(gpu_fill(m->session.gpu, m->workspace, 0xFF, m->workspace_bytes), 0);
    cr_assert_eq(gpu_alloc(m->session.gpu, &counters, m->counters_bytes), 0);
    cr_assert_eq(gpu_fill(m->session.gpu, counters, 0, m->counters_bytes), 0);
    m->counters = counters;
}

static void close_mixed(struct mixed *m)
{
    gpu_free(m->session.gpu, m->workspace);
    gpu_free(m->session.gpu, m->counters);
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        decode_remote_close(&m->remotes[i]);
        decode_data_free(&m->first[i]);
        decode_data_free(&m->data[i]);
    }
    gpu_session_close(&m->session);
}

static struct attn_decode_params mixed_params(const struct mixed *m, size_t i)
{
    struct attn_decode_params params = decode_remote_params(&m->remotes[i]);
    params.workspace = m->workspace;
    params.workspace_bytes = m->workspace_bytes;
    params.counters = m->counters;
    return params;
}

static void call_sampled(struct mixed *m, size_t i, int call)
{
    const struct attn_decode_params params = mixed_params(m, i);
    cr_assert_eq(gpu_stream_sync(m->session.gpu, m->session.stream), 0);
    cr_assert_eq(decode_remote_reset_outputs(&m->remotes[i]), 0);
    decode_remote_need_run(&m->remotes[i], &m->session, &params);
    cr_expect(all_equal(m->first[i], m->data[i]), "%s: call %d, shape %zu", m->data[i]->kernel,
              call, i);
}

static void expect_zero_counters(const struct mixed *m)
{
    int32_t *const words = malloc(m->counters_bytes);
    cr_assert_not_null(words);
    cr_assert_eq(gpu_download(m->session.gpu, words, m->counters, m->counters_bytes), 0);
    for (size_t i = 0; i < m->counters_bytes / sizeof(*words); i++)
        cr_expect_eq(words[i], 0, "counter %zu is left at %d", i, words[i]);
    free(words);
}

Test(gpu_stress, one_workspace_for_all, .timeout = 180)
{
    static struct mixed m;
    struct random random = { random_seed(72) };
    open_mixed(&m, &random);
    for (int call = 0; call < NUM_CALLS; call++) {
        const size_t i = random_below(&random, NUM_SHAPES);
        if (call % SAMPLE == 0) {
            call_sampled(&m, i, call);
            continue;
        }
        const struct attn_decode_params params = mixed_params(&m, i);
        cr_assert_eq(attn_decode(m.session.device, &params, m.session.stream), ATTN_OK, "%s",
                     attn_last_error());
    }
    cr_assert_eq(gpu_stream_sync(m.session.gpu, m.session.stream), 0);
    expect_zero_counters(&m);
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        cr_assert_eq(decode_remote_fetch(&m.remotes[i]), 0);
        cr_expect(decode_data_intact(m.data[i]), "%s wrote where it should not", m.data[i]->kernel);
    }
    close_mixed(&m);
}

// ---- one token more a step: the bits of a fresh call at that length

enum {
    NUM_STEPS = 500
};

struct growth {
    int32_t first_len, window;
};

// One sequence at every length, each with pages of its own.
static struct decode_data *run_fresh(struct gpu_session *session, const struct decode_case *given,
                                     const struct growth *g)
{
    int32_t lens[NUM_STEPS];
    static const int32_t same[NUM_STEPS];
    struct decode_case c = *given;
    for (int32_t i = 0; i < NUM_STEPS; i++) lens[i] = g->first_len + i;
    c.batch = NUM_STEPS;
    c.given_lens = lens;
    c.ids = same;
    c.window = g->window;
    c.page_seed = 1;
    struct decode_data *fresh = decode_data_need(&c, session);
    decode_data_need_run(fresh, session);
    return fresh;
}

static void expect_growth(struct gpu_session *session, const char *policy,
                          const struct decode_kind *kind, const struct growth *g)
{
    const int32_t last = g->first_len + NUM_STEPS - 1;
    struct decode_case c = {
        .name = "growth",
        .batch = 1,
        .given_lens = &last,
        .num_q_heads = 6,
        .num_kv_heads = 1,
        .page_size = 16,
        .lse = true,
        .seed = random_seed(73),
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *fresh = run_fresh(session, &c, g), *grown = decode_data_need(&c, session);
    struct attn_check check;
    struct decode_remote remote;
    cr_expect(decode_data_check(fresh, ATTN_CHECK_KERNEL, &check), "%s, policy %s: %lld wrong",
              fresh->kernel, policy, (long long) (check.failed + check.lse_failed));
    cr_assert_eq(decode_remote_open(&remote, session->gpu, grown), 0);
    struct attn_decode_params params = decode_remote_params(&remote);
    void *const lens = (uint8_t *) remote.base + grown->zones[DECODE_ZONE_LENS].offset;
    params.window = g->window;
    for (int32_t i = 0; i < NUM_STEPS; i++) {
        const int32_t len = g->first_len + i;
        cr_assert_eq(gpu_upload(session->gpu, lens, &len, sizeof(len)), 0);
        decode_remote_need_run(&remote, session, &params);
        cr_expect(decode_data_equal(grown, 0, fresh, i), "%s, policy %s, window %d: %d keys",
                  grown->kernel, policy, g->window, len);
    }
    decode_remote_close(&remote);
    decode_data_free(&fresh);
    decode_data_free(&grown);
}

Test(gpu_stress, one_token_more_a_step, .timeout = 180)
{
    const char *const policies[] = { "chunk", "auto", "3" };
    const struct decode_kind kinds[] = {
        { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 64 },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 },
    };
    const struct growth growths[] = { { 1, 0 }, { 800, 0 }, { 150, 300 } };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct gpu_session session;
        gpu_session_open_policy(&session, policies[p]);
        for (size_t i = 0; i < COUNT(kinds); i++)
            for (size_t n = 0; n < COUNT(growths); n++)
                if (gpu_session_serves(&session, &kinds[i]))
                    expect_growth(&session, policies[p], &kinds[i], &growths[n]);
        gpu_session_close(&session);
    }
}

// ---- rubbish in tables and lengths

enum {
    RUBBISH_BATCH = 12
};

static int32_t random_len(struct random *random, int32_t keys)
{
    const int32_t lens[] = { -1, INT32_MIN, INT32_MAX, keys + 1,
                             (int32_t) random_below(random, (uint32_t) keys + 1) };
    return lens[random_below(random, COUNT(lens))];
}

static int32_t random_page(struct random *random, int32_t num_pages, int32_t seen)
{
    const int32_t pages[] = { -1,        INT32_MIN,
                              INT32_MAX, num_pages,
                              seen,      (int32_t) random_below(random, (uint32_t) num_pages) };
    return pages[random_below(random, COUNT(pages))];
}

// All of a row of a table, one entry, or a cycle of the first pages.
static void spoil_row(const struct decode_data *data, int32_t *row, struct random *random)
{
    const int32_t width = data->params.max_pages_per_seq;
    const int32_t num_pages = (int32_t) data->params.num_pages;
    const uint32_t how = random_below(random, 3);
    for (int32_t i = 0; how == 0 && i < width; i++) row[i] = random_page(random, num_pages, row[0]);
    if (how == 1)
        row[random_below(random, (uint32_t) width)] = random_page(random, num_pages, row[0]);
    for (int32_t i = 2; how == 2 && i < width; i++) row[i] = row[i % 2];
}

// Spoils about a third of the sequences; those that stay sane are marked.
static void spoil(struct decode_data *data, struct random *random, bool sane[RUBBISH_BATCH])
{
    const int32_t keys = data->params.max_pages_per_seq * data->params.page_size;
    int32_t *const lens = decode_image(data, DECODE_ZONE_LENS);
    int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
    int32_t *const v_table = decode_image(data, DECODE_ZONE_V_TABLE);
    for (int32_t b = 0; b < RUBBISH_BATCH; b++) {
        const int64_t row = b * data->params.table_stride;
        sane[b] = random_below(random, 3) != 0;
        if (sane[b]) continue;
        if (random_below(random, 2)) lens[b] = random_len(random, keys);
        if (!data->c.v_table || random_below(random, 2)) spoil_row(data, table + row, random);
        if (data->c.v_table && random_below(random, 2)) spoil_row(data, v_table + row, random);
    }
}

// The host executor says which sequence is the first faulty one, and what comes of the keys that
// are left.
static void expect_rubbish(struct gpu_session *session, struct attn_device *host,
                           const struct decode_case *c, struct random *random)
{
    bool sane[RUBBISH_BATCH];
    char text[512], found[512];
    struct attn_check check;
    struct decode_data *clean = decode_data_need(c, session), *data = decode_data_need(c, session);
    decode_data_need_run(clean, session);
    spoil(data, random, sane);
    cr_assert_eq(decode_data_run_host(data, host), ATTN_OK, "%s", attn_last_error());
    const int32_t fault = decode_data_fault(data);
    decode_data_need_run(data, session);
    decode_case_text(c, text, sizeof(text));
    cr_expect_eq(decode_data_fault(data), fault, "%s, %s: fault %d for %d", data->kernel, text,
                 decode_data_fault(data), fault);
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    for (int32_t b = 0; b < RUBBISH_BATCH; b++)
        cr_expect(!sane[b] || decode_data_equal(data, b, clean, b), "%s, %s: sequence %d",
                  data->kernel, text, b);
    decode_data_free(&clean);
    decode_data_free(&data);
}

static void expect_rubbish_survived(const char *policy, int rounds)
{
    const struct attn_device_open_params host_params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    const struct decode_kind *kinds[NUM_DECODE_KINDS];
    struct random random = { random_seed(74) };
    struct gpu_session session;
    struct attn_device *host;
    gpu_session_open_policy(&session, policy);
    cr_assert_eq(attn_device_open(&host, &host_params), ATTN_OK, "%s", attn_last_error());
    const size_t num_kinds = find_kinds(&session, kinds);
    for (size_t i = 0; i < (size_t) rounds * num_kinds; i++) {
        struct decode_case c = random_case(&random, kinds[i % num_kinds]);
        c.name = "rubbish";
        c.batch = RUBBISH_BATCH;
        if (c.len > 700) c.len = 700;
        c.extra_columns %= 8;
        expect_rubbish(&session, host, &c, &random);
    }
    attn_device_close(&host);
    gpu_session_close(&session);
}

Test(gpu_stress, memcheck_random_tables, .timeout = 300)
{
    expect_rubbish_survived("chunk", 1);
}

Test(gpu_stress, memcheck_random_tables_in_pieces, .timeout = 300)
{
    expect_rubbish_survived("3", 1);
}

Test(gpu_stress, random_tables, .timeout = 120)
{
    expect_rubbish_survived("chunk", 25);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

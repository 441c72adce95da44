/* SPDX-License-Identifier: Apache-2.0 */
// The CTM decode runner on the host executor, against a second computation of its contract in long
// double, and against cases whose answer is an exact mean.
#include "attn/ctm.h"
#include "host/convert.h"
#include "host/reference.h"
#include "tests/support/ctm_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define PAGE ATTN_CTM_PAGE_SIZE
#define MAX_DIM 512
#define MAX_TABLE 64
#define SCOPE_PAGES 16

static struct attn_device *device;

static void set_up(void)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
}

TestSuite(ctm, .init = set_up, .fini = tear_down);

// ---- running it

// What the host executor has no business in.
static void *reserve(int64_t elements)
{
    cr_assert(elements > 0);
    void *const memory = mmap(NULL, (size_t) elements * 4, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert(memory != MAP_FAILED);
    return memory;
}

static void run(struct ctm_data *data)
{
    const int64_t floats = ctm_data_workspace_elems(data), words = ctm_data_semaphore_elems(data);
    memcpy(data->result, data->image, data->bytes);
    struct attn_ctm_params p = ctm_data_params(data, data->result);
    p.workspace = reserve(floats);
    p.semaphores = reserve(words);
    cr_assert_eq(attn_ctm_run(device, &p), ATTN_OK, "%s: %s", data->c.name, attn_last_error());
    cr_expect(ctm_data_intact(data), "%s wrote where it should not", data->c.name);
    munmap(p.workspace, (size_t) floats * 4);
    munmap(p.semaphores, (size_t) words * 4);
}

static bool same_output(const struct ctm_data *a, const struct ctm_data *b)
{
    for (int32_t i = 0; i < a->c.batch; i++)
        if (!ctm_data_equal(a, i, b, i)) return false;
    return true;
}

static enum attn_dtype kv_type(const struct ctm_case *c)
{
    return c->fp8 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16;
}

// ---- the second computation

struct exact {
    long double o[MAX_DIM], weighted[MAX_DIM];
};

static void load_q(const struct ctm_data *data, int32_t b, int32_t i, int32_t h, double *q)
{
    const struct ctm_case *const c = &data->c;
    const int64_t row = ((int64_t) b * c->q_len + i) * c->num_q_heads + h;
    attn_load_row(q, ctm_image(data, CTM_ZONE_Q), row * c->head_dim, c->head_dim, ATTN_DTYPE_FP16);
}

static long double score(const struct ctm_data *data, const double *q, int32_t b, int32_t t,
                         int32_t kv_head)
{
    const struct ctm_case *const c = &data->c;
    double k[MAX_DIM];
    long double dot = 0;
    attn_load_row(k, ctm_image(data, CTM_ZONE_POOL), ctm_data_kv_index(data, b, 0, t, kv_head),
                  c->head_dim, kv_type(c));
    for (int32_t d = c->head_dim - 1; d >= 0; d--) dot += (long double) q[d] * k[d];
    return dot * data->params.attention_scale * data->params.k_scale;
}

// 0: dense.
static double find_lambda(const struct ctm_data *data, int32_t b)
{
    const struct ctm_case *const c = &data->c;
    double lambda = 0;
    for (int32_t pair = 0; pair < c->skip_length / 2; pair++)
        if (c->skip[2 * pair] <= c->lens[b]) lambda = (double) c->skip[2 * pair + 1] / c->lens[b];
    return lambda > 0 && lambda < 1 ? lambda : 0;
}

// Largest score of each page for one head; -inf: nothing visible.
static void find_page_maxima(const struct ctm_data *data, int32_t b, int32_t h, long double *maxima)
{
    const struct ctm_case *const c = &data->c;
    double q[MAX_DIM];
    load_q(data, b, 0, h, q);
    for (int32_t page = 0; page < MAX_TABLE; page++) maxima[page] = -INFINITY;
    for (int32_t t = 0; t < c->lens[b]; t++) {
        if (!ctm_data_sees(data, b, 0, t)) continue;
        const long double s = score(data, q, b, t, h / (c->num_q_heads / c->num_kv_heads));
        maxima[t / PAGE] = fmaxl(maxima[t / PAGE], s);
    }
}

// Sets dropped[page]; returns their number. No case has a NaN score here.
static int32_t find_dropped(const struct ctm_data *data, int32_t b, int32_t kv_head, bool *dropped)
{
    const struct ctm_case *const c = &data->c;
    const double lambda = find_lambda(data, b);
    const int32_t ratio = c->num_q_heads / c->num_kv_heads, pages = (c->lens[b] + PAGE - 1) / PAGE;
    long double maxima[MAX_TABLE];
    int32_t count = 0;
    for (int32_t page = 0; page < MAX_TABLE; page++) dropped[page] = lambda > 0 && page < pages;
    for (int32_t h = kv_head * ratio; lambda > 0 && h < (kv_head + 1) * ratio; h++) {
        long double running = -INFINITY;
        find_page_maxima(data, b, h, maxima);
        for (int32_t page = 0; page < pages; page++) {
            if (page % SCOPE_PAGES == 0) running = -INFINITY;
            const bool first = running == -INFINITY;
            if (first || expl(maxima[page] - running) >= lambda) dropped[page] = false;
            running = fmaxl(running, maxima[page]);
        }
    }
    for (int32_t page = 0; page < MAX_TABLE; page++) count += dropped[page];
    return count;
}

// Backwards over the keys, each weighted against 0: these cases have scores that allow it.
static void compute(const struct ctm_data *data, int32_t b, int32_t i, int32_t h,
                    const bool *dropped, struct exact *exact)
{
    const struct ctm_case *const c = &data->c;
    const int32_t kv_head = h / (c->num_q_heads / c->num_kv_heads);
    long double sum = c->sinks ? expl(((const float *) ctm_image(data, CTM_ZONE_SINKS))[h]) : 0;
    double q[MAX_DIM], v[MAX_DIM];
    load_q(data, b, i, h, q);
    memset(exact, 0, sizeof(*exact));
    for (int32_t t = c->lens[b] - 1; t >= 0; t--) {
        if (dropped[t / PAGE] || !ctm_data_sees(data, b, i, t)) continue;
        const long double weight = expl(score(data, q, b, t, kv_head));
        attn_load_row(v, ctm_image(data, CTM_ZONE_POOL), ctm_data_kv_index(data, b, 1, t, kv_head),
                      c->head_dim, kv_type(c));
        sum += weight;
        for (int32_t d = 0; d < c->head_dim; d++) {
            const long double value = weight * data->params.v_scale * v[d];
            exact->o[d] += value;
            exact->weighted[d] += fabsl(value);
        }
    }
    for (int32_t d = 0; sum > 0 && d < c->head_dim; d++)
        exact->o[d] /= sum, exact->weighted[d] /= sum;
}

// The bound of decode.h for the host executor; the contract's own for inputs in (-1, 1); and means
// to the bit.
static void expect_row(const struct ctm_data *data, int32_t b, int32_t i, int32_t h,
                       const bool *dropped)
{
    const struct ctm_case *const c = &data->c;
    struct exact exact;
    compute(data, b, i, h, dropped, &exact);
    for (int32_t d = 0; d < c->head_dim; d++) {
        const double got = ctm_data_output(data, b, i, h, d);
        const long double error = fabsl(got - exact.o[d]), size = fabsl(exact.o[d]);
        uint16_t mean;
        attn_store(&mean, 0, ATTN_DTYPE_FP16, (double) exact.o[d]);
        cr_assert(error <= 0x1p-11L * size + 0x1p-20L * exact.weighted[d] + 0x1p-25L &&
                      error <= 1e-3L + 1e-3L * size &&
                      (c->fill != CTM_FILL_MEAN || got == attn_load(&mean, 0, ATTN_DTYPE_FP16)),
                  "%s, seed %llu: output[%d][%d][%d][%d] is %g, exactly %Lg", c->name,
                  (unsigned long long) c->seed, b, i, h, d, got, exact.o[d]);
    }
}

static void expect_exact(const struct ctm_data *data)
{
    const struct ctm_case *const c = &data->c;
    const int32_t ratio = c->num_q_heads / c->num_kv_heads;
    int64_t all_dropped = 0;
    for (int32_t b = 0; b < c->batch; b++)
        for (int32_t kv_head = 0; kv_head < c->num_kv_heads; kv_head++) {
            bool dropped[MAX_TABLE];
            all_dropped += find_dropped(data, b, kv_head, dropped);
            for (int32_t row = 0; row < c->q_len * ratio; row++)
                expect_row(data, b, row / ratio, kv_head * ratio + row % ratio, dropped);
        }
    cr_expect_eq(ctm_data_dropped(data), all_dropped, "%s: %lld pages dropped, not %lld", c->name,
                 (long long) ctm_data_dropped(data), (long long) all_dropped);
}

static void expect_case(const struct ctm_case *c)
{
    struct ctm_data *data = ctm_data_build(c);
    run(data);
    expect_exact(data);
    cr_expect_eq(ctm_data_fault(data), INT32_MAX, "%s: fault is %d", c->name, ctm_data_fault(data));
    ctm_data_free(&data);
}

// ---- tests

Test(ctm, agrees_with_long_double)
{
    static const struct ctm_case cases[] = {
        { "plain", 3, 6, 2, 64, 1, .lens = { 300, 128, 1 } },
        { "window", 3, 6, 2, 128, 1, .lens = { 700, 256, 100 }, .window = 200 },
        { "sinks", 2, 14, 2, 32, 1, .lens = { 129, 40 }, .sinks = CTM_SINKS_RANDOM },
        { "extreme sinks", 2, 8, 1, 64, 1, .lens = { 129, 40 }, .sinks = CTM_SINKS_ALTERNATING },
        { "tree", 3, 6, 2, 64, 12, .lens = { 300, 128, 12 } },
        { "tree, window", 3, 6, 2, 64, 12, .lens = { 700, 256, 30 }, .window = 150 },
        { "tree, windows", 3, 6, 2, 64, 12, .lens = { 700, 256, 30 }, .window = 150, .per_row = 1 },
        { "window in a tree", 2, 4, 4, 64, 40, .lens = { 300, 41 }, .window = 7 },
        { "windows in a tree", 2, 4, 4, 64, 40, .lens = { 300, 41 }, .window = 7, .per_row = 1 },
        { "sinks of a tree", 2, 14, 2, 64, 8, .lens = { 72, 200 }, .sinks = CTM_SINKS_ALTERNATING },
        { "longest tree", 1, 2, 1, 256, 128, .lens = { 200 } },
        { "tree alone", 2, 3, 1, 512, 33, .lens = { 33, 34 }, .sinks = CTM_SINKS_RANDOM },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int fp8 = 0; fp8 < 2; fp8++) {
            struct ctm_case c = cases[i];
            c.fp8 = fp8;
            c.seed = 2 * i + (uint64_t) fp8;
            expect_case(&c);
        }
}

Test(ctm, agrees_at_the_shapes_of_the_contract)
{
    for (size_t i = 0; i < NUM_CTM_CONTRACT_CASES; i++) expect_case(&ctm_contract_cases[i]);
}

Test(ctm, serves_every_ratio_at_every_head_dim)
{
    static const int32_t dims[] = { 32, 64, 128, 256, 512 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int32_t ratio = 1; ratio <= 16; ratio++)
            for (int32_t kind = 0; kind < 4; kind++) {
                const struct ctm_case c = {
                    .name = kind / 2 ? "a tree of 3" : "decode",
                    .batch = 1,
                    .num_q_heads = ratio,
                    .num_kv_heads = 1,
                    .head_dim = dims[i],
                    .q_len = kind / 2 ? 3 : 1,
                    .lens = { 120 + ratio },
                    .fp8 = kind % 2,
                    .seed = 200 + (uint64_t) ratio,
                };
                const bool served =
                    c.q_len > 1 ? attn_ctm_supported_tree(ratio, 1, dims[i], c.fp8, 0, false)
                                : attn_ctm_supported(ratio, 1, dims[i], c.fp8, 0, false);
                if (served) expect_case(&c);
            }
}

// A tree may be of one token, with the heads of a tree.
Test(ctm, serves_a_tree_of_one)
{
    cr_expect_not(attn_ctm_supported(16, 1, 64, false, 0, false));
    cr_expect(attn_ctm_supported_tree(16, 1, 64, false, 0, false));
    expect_case(
        &(struct ctm_case){ "a tree of one", 1, 16, 1, 64, 1, .lens = { 130 }, .seed = 300 });
}

Test(ctm, cuts_at_the_right_key)
{
    static const int32_t lens[] = { 1, 2, 127, 128, 129, 255, 256, 257, 383, 384, 385 };
    static const int32_t windows[] = { 0, 1, 2, 16, 64, 127, 128, 129, 256 };
    for (size_t i = 0; i < COUNT(lens); i++)
        for (size_t w = 0; w < COUNT(windows); w++)
            for (int32_t form = 0; form < 3; form++) {
                const struct ctm_case c = {
                    .name = form == 0   ? "decode"
                            : form == 1 ? "shared edge"
                                        : "edge a token",
                    .batch = 2,
                    .num_q_heads = 2,
                    .num_kv_heads = 1,
                    .head_dim = 64,
                    .q_len = form && lens[i] > 8 ? 9 : 1,
                    .lens = { lens[i], lens[(i + 5) % COUNT(lens)] },
                    .window = windows[w],
                    .per_row = form == 2,
                    .fp8 = w % 2,
                    .fill = CTM_FILL_MEAN,
                    .seed = 400 + i * 32 + w,
                };
                struct ctm_case fits = c;
                if (c.q_len > 1 && fits.lens[1] < c.q_len) fits.lens[1] = 0;
                expect_case(&fits);
            }
}

Test(ctm, has_lengths_around_the_window)
{
    enum {
        WINDOW = 300
    };
    static const int32_t lens[] = { WINDOW + 37, WINDOW, WINDOW / 2 };
    for (size_t i = 0; i < COUNT(lens); i++)
        for (int32_t q_len = 1; q_len <= 33; q_len += 16) {
            const struct ctm_case c = {
                .name = "length around the window",
                .batch = 1,
                .num_q_heads = 3,
                .num_kv_heads = 1,
                .head_dim = 128,
                .q_len = q_len,
                .lens = { lens[i] },
                .window = WINDOW,
                .per_row = i % 2,
                .fill = CTM_FILL_MEAN,
                .seed = 900 + i,
            };
            expect_case(&c);
        }
}

// L = 0 is padding: zeros, no fault. A length below q_len has no past, and is reported.
Test(ctm, takes_short_sequences)
{
    const struct ctm_case c = { "short",     4, 4, 2, 64, 8, { 0, 8, 5, 3 }, .fill = CTM_FILL_MEAN,
                                .seed = 1000 };
    struct ctm_data *data = ctm_data_build(&c);
    run(data);
    expect_exact(data);
    cr_expect_eq(ctm_data_fault(data), 2);
    for (int32_t i = 0; i < c.q_len * c.num_q_heads * c.head_dim; i++)
        cr_expect_eq(((const uint16_t *) ctm_result(data, CTM_ZONE_OUTPUT))[i], 0);
    ctm_data_free(&data);
}

// A page id that is none, where a key is visible: reported, and its keys are absent.
Test(ctm, reports_pages_that_are_none)
{
    const struct ctm_case c = { "faults", 3, 4, 2, 64, 1, .lens = { 300, 300, 300 }, .seed = 1100 };
    struct ctm_data *data = ctm_data_build(&c);
    const int32_t pages = 2 * data->params.num_pages, columns = data->params.max_pages_per_seq;
    const int32_t bad[] = { -1, pages, INT32_MIN, INT32_MAX };
    for (int32_t row = 2; row < 6; row++)
        for (size_t i = 0; i < COUNT(bad); i++) {
            int32_t *const entry = (int32_t *) ctm_image(data, CTM_ZONE_TABLE) + row * columns + 1;
            const int32_t right = *entry;
            *entry = bad[i];
            run(data);
            cr_expect_eq(ctm_data_fault(data), row / 2, "%d in row %d: fault is %d", bad[i], row,
                         ctm_data_fault(data));
            for (int32_t d = 0; d < c.head_dim; d++)
                cr_expect(isfinite(ctm_data_output(data, row / 2, 0, 3, d)));
            *entry = right;
        }
    run(data);
    cr_expect_eq(ctm_data_fault(data), INT32_MAX);
    ctm_data_free(&data);
}

Test(ctm, lets_nan_out_of_visible_keys_alone)
{
    const struct ctm_case c = { "NaN", 2, 4, 2, 64, 4, .lens = { 140, 140 }, .seed = 1200 };
    struct ctm_data *data = ctm_data_build(&c);
    attn_store(ctm_image(data, CTM_ZONE_POOL), ctm_data_kv_index(data, 1, 0, 7, 1), ATTN_DTYPE_FP16,
               NAN);
    run(data);
    for (int32_t row = 0; row < c.batch * c.q_len * c.num_q_heads; row++) {
        const int32_t b = row / (c.q_len * c.num_q_heads), h = row % c.num_q_heads;
        const double o = ctm_data_output(data, b, row / c.num_q_heads % c.q_len, h, 5);
        cr_expect_eq(isnan(o) != 0, b == 1 && h >= 2, "sequence %d, head %d: %g", b, h, o);
    }
    ctm_data_free(&data);
}

Test(ctm, shares_pages)
{
    const struct ctm_case c = {
        "shared pages", 2, 4, 2, 64, 1, .lens = { 300, 300 }, .seed = 1300
    };
    struct ctm_data *data = ctm_data_build(&c);
    const size_t row = data->zones[CTM_ZONE_TABLE].bytes / 2, q = data->zones[CTM_ZONE_Q].bytes / 2;
    memcpy((char *) ctm_image(data, CTM_ZONE_TABLE) + row, ctm_image(data, CTM_ZONE_TABLE), row);
    memcpy((char *) ctm_image(data, CTM_ZONE_Q) + q, ctm_image(data, CTM_ZONE_Q), q);
    run(data);
    expect_exact(data);
    const char *const output = ctm_result(data, CTM_ZONE_OUTPUT);
    cr_expect_eq(memcmp(output, output + q, q), 0);
    ctm_data_free(&data);
}

// The same bits, whatever a field holds that is said to have no say.
Test(ctm, ignores_what_it_says_it_ignores)
{
    static const struct ctm_case cases[] = {
        { "decode", 2, 6, 2, 64, 1, .lens = { 300, 200 }, .window = 150 },
        { "tree", 2, 6, 2, 64, 5, .lens = { 300, 200 } },
        { "tree, fp8", 2, 6, 2, 64, 5, .lens = { 300, 200 }, .fp8 = true },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ctm_data *a = ctm_data_build(&cases[i]), *b = ctm_data_build(&cases[i]);
        run(a);
        expect_exact(a);
        b->params.fallback_available = 0;
        b->params.contiguous_query_swa = !b->params.contiguous_query_swa;
        if (!cases[i].fp8) b->params.k_scale = NAN, b->params.v_scale = 7;
        if (cases[i].q_len == 1) b->params.mask_words = -5;
        run(b);
        cr_expect(same_output(a, b), "%s", cases[i].name);
        ctm_data_free(&a);
        ctm_data_free(&b);
    }
}

// ---- skip-softmax

static const struct ctm_case skip_case = {
    "skip", 4, 6, 2, 64, 1, { 5000, 2049, 2048, 130 }, .seed = 1400,
};

Test(ctm, skips_pages)
{
    static const int32_t tables[][6] = {
        // lambda about 0.9 for all; another S for long ones; none for short ones.
        { 1, 115, 200, 1850, 3000, 4500 },
        { 1, 1, 2049, 1800, 5001, 5000 },
        { 0, -3, 2048, 1000, 4000, 0 },
    };
    int64_t dropped = 0;
    for (size_t i = 0; i < COUNT(tables); i++)
        for (int32_t variant = 0; variant < 3; variant++) {
            struct ctm_case c = skip_case;
            c.skip = tables[i];
            c.skip_length = COUNT(tables[i]);
            c.window = variant == 1 ? 1700 : 0;
            c.fp8 = variant == 2;
            c.sinks = variant == 2 ? CTM_SINKS_RANDOM : CTM_SINKS_NONE;
            struct ctm_data *data = ctm_data_build(&c);
            run(data);
            expect_exact(data);
            dropped += ctm_data_dropped(data);
            ctm_data_free(&data);
        }
    // Some pages, and not all.
    cr_expect(dropped > 20 && dropped < 9 * 140, "%lld", (long long) dropped);
}

Test(ctm, is_dense_where_it_has_to_be)
{
    static const int32_t tables[][2] = { { 5001, 4000 }, { 1, 0 },         { 1, -7 },
                                         { 1, 5000 },    { 1, INT32_MAX }, { 0, INT32_MIN } };
    struct ctm_data *dense = ctm_data_build(&skip_case);
    run(dense);
    for (size_t i = 0; i < COUNT(tables); i++) {
        struct ctm_case c = skip_case;
        c.skip = tables[i];
        c.skip_length = COUNT(tables[i]);
        struct ctm_data *data = ctm_data_build(&c);
        run(data);
        cr_expect_eq(ctm_data_dropped(data), 0, "table %zu", i);
        cr_expect(same_output(data, dense), "table %zu", i);
        ctm_data_free(&data);
    }
    ctm_data_free(&dense);
}

/* SPDX-License-Identifier: Apache-2.0 */
// The CTM decode runner on the host executor, against a second computation of its contract in long
// double, and against cases whose answer is an exact mean. The pool is NaN wherever no query token
// of a sequence looks, pages lie anywhere in both halves of it, V's without regard to K's, and what
// the table may hold anywhere else is wild.
#include "attn/ctm.h"
#include "host/convert.h"
#include "host/reference.h"
#include "tests/support/canary.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define PAGE ATTN_CTM_PAGE_SIZE
#define MAX_BATCH 4
#define MAX_DIM 512
#define MAX_TABLE 64
#define SCOPE_PAGES 16
#define WILD INT32_MIN

enum ctm_sinks {
    SINKS_NONE,
    SINKS_RANDOM,
    // -80 for even heads, 100 for odd ones.
    SINKS_ALTERNATING,
};

enum ctm_fill {
    // q, K and V in (-1, 1).
    FILL_UNIFORM,
    // Keys of 0, and V one power of two a token: o tells which keys were seen, each once.
    FILL_MEAN,
};

struct ctm_case {
    const char *name;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, q_len;
    int32_t lens[MAX_BATCH];
    int32_t window;
    bool per_row, fp8;
    enum ctm_sinks sinks;
    enum ctm_fill fill;
    // Pairs; NULL: none.
    const int32_t *skip;
    int32_t skip_length;
    uint64_t seed;
};

enum zone {
    ZONE_Q,
    ZONE_POOL,
    ZONE_TABLE,
    ZONE_LENS,
    ZONE_SINKS,
    ZONE_MASK,
    ZONE_SKIP,
    ZONE_OUTPUT,
    ZONE_FAULT,
    ZONE_DROPPED,
    NUM_ZONES,
};

struct ctm_data {
    struct ctm_case c;
    struct attn_ctm_params params;
    struct canary_zone zones[NUM_ZONES];
    size_t bytes;
    // Memory of the call before and after it.
    uint8_t *image, *result;
};

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

static void *zone(const struct ctm_data *data, enum zone z)
{
    return data->image + data->zones[z].offset;
}

static const void *result(const struct ctm_data *data, enum zone z)
{
    return data->result + data->zones[z].offset;
}

// ---- the contract once more

static bool has_bit(const struct ctm_data *data, int32_t b, int32_t i, int32_t j)
{
    const int32_t *const mask = zone(data, ZONE_MASK);
    const int64_t row = (int64_t) b * data->c.q_len + i;
    return (uint32_t) mask[row * data->params.mask_words + j / 32] >> j % 32 & 1;
}

static int32_t past_of(const struct ctm_case *c, int32_t b)
{
    return c->lens[b] > c->q_len ? c->lens[b] - c->q_len : 0;
}

// The first key that the window leaves to token i.
static int32_t edge_of(const struct ctm_case *c, int32_t b, int32_t i)
{
    if (c->window == 0) return 0;
    const int32_t edge = c->per_row ? past_of(c, b) + i - c->window + 1 : c->lens[b] - c->window;
    return edge > 0 ? edge : 0;
}

static bool sees(const struct ctm_data *data, int32_t b, int32_t i, int32_t t)
{
    const struct ctm_case *const c = &data->c;
    const int32_t past = past_of(c, b);
    if (t >= c->lens[b] || t < edge_of(c, b, i)) return false;
    return c->q_len == 1 || t < past || has_bit(data, b, i, t - past);
}

// ---- building a case

static enum attn_dtype kv_type(const struct ctm_case *c)
{
    return c->fp8 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16;
}

// Of row `kv` (0: K, 1: V) of the table.
static int64_t kv_index(const struct ctm_data *data, int32_t b, int32_t kv, int32_t t, int32_t head)
{
    const struct ctm_case *const c = &data->c;
    const int32_t *const table = zone(data, ZONE_TABLE);
    const int64_t page = table[(b * 2 + kv) * data->params.max_pages_per_seq + t / PAGE];
    return ((page * PAGE + t % PAGE) * c->num_kv_heads + head) * c->head_dim;
}

static void fill_uniform(const struct ctm_case *c, void *base, int64_t index, enum attn_dtype dtype,
                         struct random *random)
{
    for (int32_t d = 0; d < c->head_dim; d++)
        attn_store(base, index + d, dtype, random_uniform(random));
}

static double token_bit(int32_t head_dim, int32_t t)
{
    return ldexp(1, t / head_dim % 8);
}

static void fill_token(struct ctm_data *data, int32_t b, int32_t t, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    const enum attn_dtype dtype = kv_type(c);
    void *const pool = zone(data, ZONE_POOL);
    for (int32_t head = 0; head < c->num_kv_heads; head++) {
        const int64_t k = kv_index(data, b, 0, t, head), v = kv_index(data, b, 1, t, head);
        if (c->fill == FILL_UNIFORM) {
            fill_uniform(c, pool, k, dtype, random);
            fill_uniform(c, pool, v, dtype, random);
            continue;
        }
        for (int32_t d = 0; d < c->head_dim; d++) {
            attn_store(pool, k + d, dtype, 0);
            const bool own = d == t % c->head_dim;
            attn_store(pool, v + d, dtype, own ? token_bit(c->head_dim, t) : 0);
        }
    }
}

static void fill_pool(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    memset(zone(data, ZONE_POOL), 0xFF, data->zones[ZONE_POOL].bytes);
    for (int32_t b = 0; b < c->batch; b++)
        for (int32_t t = 0; t < c->lens[b]; t++) {
            bool seen = false;
            for (int32_t i = 0; i < c->q_len && !seen; i++) seen = sees(data, b, i, t);
            if (seen) fill_token(data, b, t, random);
        }
}

static void fill_table(struct ctm_data *data, struct random *random)
{
    static const int32_t stale[] = { -1, WILD, INT32_MAX, 0 };
    const struct ctm_case *const c = &data->c;
    const int32_t columns = data->params.max_pages_per_seq, pages = 2 * data->params.num_pages;
    int32_t *const table = zone(data, ZONE_TABLE);
    int32_t *const ids = malloc((size_t) pages * sizeof(*ids));
    cr_assert(ids);
    for (int32_t i = 0; i < pages; i++) {
        const int32_t j = (int32_t) random_below(random, (uint32_t) i + 1);
        ids[i] = ids[j];
        ids[j] = i;
    }
    int32_t used = 0;
    for (int32_t row = 0; row < c->batch * 2; row++)
        for (int32_t column = 0; column < columns; column++) {
            const int32_t first = edge_of(c, row / 2, 0) / PAGE, len = c->lens[row / 2];
            const bool live = column >= first && column * PAGE < len;
            table[row * columns + column] = live ? ids[used++] : stale[(row + column) % 4];
        }
    free(ids);
}

// Any bits, those above the diagonal and beyond q_len included; the last row of a sequence with an
// odd number is one of padding.
static void fill_mask(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    const int32_t mask_words = data->params.mask_words;
    int32_t *const mask = zone(data, ZONE_MASK);
    for (int32_t row = 0; row < c->batch * c->q_len; row++) {
        const bool padding = row / c->q_len % 2 == 1 && row % c->q_len == c->q_len - 1;
        for (int32_t word = 0; word < mask_words; word++) {
            uint32_t bits = (uint32_t) random_next(random);
            for (int32_t j = 0; padding && j < 32 && word * 32 + j < c->q_len; j++)
                bits &= ~(1u << j);
            mask[(int64_t) row * mask_words + word] = (int32_t) bits;
        }
    }
}

static void fill_rest(struct ctm_data *data, struct random *random)
{
    const struct ctm_case *const c = &data->c;
    float *const sinks = zone(data, ZONE_SINKS);
    const int32_t infinite = INT32_MAX;
    for (int32_t row = 0; row < c->batch * c->q_len * c->num_q_heads; row++)
        fill_uniform(c, zone(data, ZONE_Q), (int64_t) row * c->head_dim, ATTN_DTYPE_FP16, random);
    for (int32_t h = 0; h < c->num_q_heads; h++)
        sinks[h] = c->sinks == SINKS_ALTERNATING ? (h % 2 ? 100.0f : -80.0f)
                                                 : (float) (4 * random_uniform(random));
    memcpy(zone(data, ZONE_LENS), c->lens, (size_t) c->batch * sizeof(int32_t));
    if (c->skip) memcpy(zone(data, ZONE_SKIP), c->skip, (size_t) c->skip_length * sizeof(int32_t));
    memset(zone(data, ZONE_OUTPUT), 0xFF, data->zones[ZONE_OUTPUT].bytes);
    memcpy(zone(data, ZONE_FAULT), &infinite, sizeof(infinite));
}

static void lay_out(struct ctm_data *data)
{
    const struct ctm_case *const c = &data->c;
    const struct attn_ctm_params *const p = &data->params;
    const size_t q = (size_t) c->batch * c->q_len * c->num_q_heads * c->head_dim * 2;
    const size_t token = (size_t) c->num_kv_heads * c->head_dim * attn_dtype_size(kv_type(c));
    const size_t bytes[NUM_ZONES] = {
        [ZONE_Q] = q,
        [ZONE_POOL] = token * PAGE * 2 * (size_t) p->num_pages,
        [ZONE_TABLE] = (size_t) c->batch * 2 * p->max_pages_per_seq * 4,
        [ZONE_LENS] = (size_t) c->batch * 4,
        [ZONE_SINKS] = (size_t) c->num_q_heads * 4,
        [ZONE_MASK] = (size_t) c->batch * c->q_len * p->mask_words * 4,
        [ZONE_SKIP] = (size_t) c->skip_length * 4,
        [ZONE_OUTPUT] = q,
        [ZONE_FAULT] = 4,
        [ZONE_DROPPED] = 8,
    };
    for (int z = 0; z < NUM_ZONES; z++)
        data->zones[z] = (struct canary_zone){ 0, bytes[z], z >= ZONE_OUTPUT };
    data->bytes = canary_lay_out(data->zones, NUM_ZONES);
    data->image = aligned_alloc(256, data->bytes);
    data->result = aligned_alloc(256, data->bytes);
    cr_assert(data->image && data->result);
    memset(data->image, 0, data->bytes);
}

static struct ctm_data *build(const struct ctm_case *c)
{
    struct ctm_data *const data = calloc(1, sizeof(*data));
    cr_assert(data);
    struct random random = { random_seed(c->seed + 31) };
    int32_t longest = 1;
    data->c = *c;
    for (int32_t b = 0; b < c->batch; b++)
        if (c->lens[b] > longest) longest = c->lens[b];
    data->params = ATTN_CTM_PARAMS_INIT;
    struct attn_ctm_params *const p = &data->params;
    p->batch_size = c->batch;
    p->q_len = c->q_len;
    p->num_q_heads = c->num_q_heads;
    p->num_kv_heads = c->num_kv_heads;
    p->head_dim = c->head_dim;
    p->max_pages_per_seq = (longest - 1) / PAGE + 3;
    p->num_pages = c->batch * p->max_pages_per_seq + 1;
    p->sliding_window = c->window;
    p->contiguous_query_swa = c->per_row;
    p->fp8_kv = c->fp8;
    if (c->fp8) p->k_scale = 0.5f, p->v_scale = 0.75f;
    p->attention_scale = 1.0f / sqrtf((float) c->head_dim);
    p->mask_words = (c->q_len - 1) / 32 + 1 + (int32_t) (c->seed % 2);
    p->skip_softmax_scale_table_length = c->skip_length;
    lay_out(data);
    fill_mask(data, &random);
    fill_table(data, &random);
    fill_pool(data, &random);
    fill_rest(data, &random);
    return data;
}

static void release(struct ctm_data *data)
{
    free(data->image);
    free(data->result);
    free(data);
}

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

static int64_t workspace_elems(const struct attn_ctm_params *p)
{
    if (p->q_len == 1) return attn_ctm_workspace_elems(p->batch_size, p->num_q_heads, p->head_dim);
    return attn_ctm_tree_workspace_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads,
                                         p->head_dim);
}

static int64_t semaphore_elems(const struct attn_ctm_params *p)
{
    if (p->q_len == 1) return attn_ctm_semaphore_elems(p->batch_size, p->num_kv_heads);
    return attn_ctm_tree_semaphore_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads);
}

static void point(const struct ctm_data *data, struct attn_ctm_params *p, uint8_t *base)
{
    p->q = base + data->zones[ZONE_Q].offset;
    p->output = base + data->zones[ZONE_OUTPUT].offset;
    p->kv_pool = base + data->zones[ZONE_POOL].offset;
    p->page_table = (void *) (base + data->zones[ZONE_TABLE].offset);
    p->seq_lens = (void *) (base + data->zones[ZONE_LENS].offset);
    p->sinks = data->c.sinks ? (void *) (base + data->zones[ZONE_SINKS].offset) : NULL;
    p->tree_mask = (void *) (base + data->zones[ZONE_MASK].offset);
    if (data->c.skip) p->skip_softmax_scale_table = (void *) (base + data->zones[ZONE_SKIP].offset);
    p->fault = (void *) (base + data->zones[ZONE_FAULT].offset);
    p->dropped_pages = (void *) (base + data->zones[ZONE_DROPPED].offset);
}

static void run(struct ctm_data *data)
{
    struct attn_ctm_params p = data->params;
    const int64_t floats = workspace_elems(&p), words = semaphore_elems(&p);
    memcpy(data->result, data->image, data->bytes);
    point(data, &p, data->result);
    p.workspace = reserve(floats);
    p.semaphores = reserve(words);
    cr_assert_eq(attn_ctm_run(device, &p), ATTN_OK, "%s: %s", data->c.name, attn_last_error());
    cr_expect_eq(canary_find(data->zones, NUM_ZONES, data->image, data->result, data->bytes), -1,
                 "%s wrote where it should not", data->c.name);
    munmap(p.workspace, (size_t) floats * 4);
    munmap(p.semaphores, (size_t) words * 4);
}

static double output_at(const struct ctm_data *data, int32_t b, int32_t i, int32_t h, int32_t d)
{
    const struct ctm_case *const c = &data->c;
    const int64_t row = ((int64_t) b * c->q_len + i) * c->num_q_heads + h;
    return attn_load(result(data, ZONE_OUTPUT), row * c->head_dim + d, ATTN_DTYPE_FP16);
}

static int32_t fault_of(const struct ctm_data *data)
{
    return *(const int32_t *) result(data, ZONE_FAULT);
}

static int64_t dropped_of(const struct ctm_data *data)
{
    return *(const int64_t *) result(data, ZONE_DROPPED);
}

static bool same_output(const struct ctm_data *a, const struct ctm_data *b)
{
    return memcmp(result(a, ZONE_OUTPUT), result(b, ZONE_OUTPUT), a->zones[ZONE_OUTPUT].bytes) == 0;
}

// ---- the second computation

struct exact {
    long double o[MAX_DIM], weighted[MAX_DIM];
};

static void load_q(const struct ctm_data *data, int32_t b, int32_t i, int32_t h, double *q)
{
    const struct ctm_case *const c = &data->c;
    const int64_t row = ((int64_t) b * c->q_len + i) * c->num_q_heads + h;
    attn_load_row(q, zone(data, ZONE_Q), row * c->head_dim, c->head_dim, ATTN_DTYPE_FP16);
}

static long double score(const struct ctm_data *data, const double *q, int32_t b, int32_t t,
                         int32_t kv_head)
{
    const struct ctm_case *const c = &data->c;
    double k[MAX_DIM];
    long double dot = 0;
    attn_load_row(k, zone(data, ZONE_POOL), kv_index(data, b, 0, t, kv_head), c->head_dim,
                  kv_type(c));
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
        if (!sees(data, b, 0, t)) continue;
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
    long double sum = c->sinks ? expl(((const float *) zone(data, ZONE_SINKS))[h]) : 0;
    double q[MAX_DIM], v[MAX_DIM];
    load_q(data, b, i, h, q);
    memset(exact, 0, sizeof(*exact));
    for (int32_t t = c->lens[b] - 1; t >= 0; t--) {
        if (dropped[t / PAGE] || !sees(data, b, i, t)) continue;
        const long double weight = expl(score(data, q, b, t, kv_head));
        attn_load_row(v, zone(data, ZONE_POOL), kv_index(data, b, 1, t, kv_head), c->head_dim,
                      kv_type(c));
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
        const double got = output_at(data, b, i, h, d);
        const long double error = fabsl(got - exact.o[d]), size = fabsl(exact.o[d]);
        uint16_t mean;
        attn_store(&mean, 0, ATTN_DTYPE_FP16, (double) exact.o[d]);
        cr_assert(error <= 0x1p-11L * size + 0x1p-20L * exact.weighted[d] + 0x1p-25L &&
                      error <= 1e-3L + 1e-3L * size &&
                      (c->fill != FILL_MEAN || got == attn_load(&mean, 0, ATTN_DTYPE_FP16)),
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
    cr_expect_eq(dropped_of(data), all_dropped, "%s: %lld pages dropped, not %lld", c->name,
                 (long long) dropped_of(data), (long long) all_dropped);
}

static void expect_case(const struct ctm_case *c)
{
    struct ctm_data *const data = build(c);
    run(data);
    expect_exact(data);
    cr_expect_eq(fault_of(data), INT32_MAX, "%s: fault is %d", c->name, fault_of(data));
    release(data);
}

// ---- tests

Test(ctm, agrees_with_long_double)
{
    static const struct ctm_case cases[] = {
        { "plain", 3, 6, 2, 64, 1, .lens = { 300, 128, 1 } },
        { "window", 3, 6, 2, 128, 1, .lens = { 700, 256, 100 }, .window = 200 },
        { "sinks", 2, 14, 2, 32, 1, .lens = { 129, 40 }, .sinks = SINKS_RANDOM },
        { "extreme sinks", 2, 8, 1, 64, 1, .lens = { 129, 40 }, .sinks = SINKS_ALTERNATING },
        { "tree", 3, 6, 2, 64, 12, .lens = { 300, 128, 12 } },
        { "tree, window", 3, 6, 2, 64, 12, .lens = { 700, 256, 30 }, .window = 150 },
        { "tree, windows", 3, 6, 2, 64, 12, .lens = { 700, 256, 30 }, .window = 150, .per_row = 1 },
        { "window in a tree", 2, 4, 4, 64, 40, .lens = { 300, 41 }, .window = 7 },
        { "windows in a tree", 2, 4, 4, 64, 40, .lens = { 300, 41 }, .window = 7, .per_row = 1 },
        { "sinks of a tree", 2, 14, 2, 64, 8, .lens = { 72, 200 }, .sinks = SINKS_ALTERNATING },
        { "longest tree", 1, 2, 1, 256, 128, .lens = { 200 } },
        { "tree alone", 2, 3, 1, 512, 33, .lens = { 33, 34 }, .sinks = SINKS_RANDOM },
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
    static const struct ctm_case cases[] = {
        { "4 heads a KV head", 1, 32, 8, 128, 60, .lens = { 320 } },
        { "8 heads a KV head", 1, 24, 3, 128, 60, .lens = { 192 } },
        { "7 heads a KV head", 1, 14, 2, 64, 60, .lens = { 192 } },
        { "head_dim 256", 1, 8, 1, 256, 10, .lens = { 978 } },
        { "head_dim 512", 1, 32, 4, 512, 33, .lens = { 128 } },
        { "16 heads a KV head", 2, 32, 2, 128, 8, .lens = { 1150, 1150 }, .window = 1024,
          .per_row = 1 },
        { "alternating sinks", 1, 14, 2, 64, 8, .lens = { 72 }, .window = 64,
          .sinks = SINKS_ALTERNATING },
        { "window past all", 1, 32, 4, 128, 48, .lens = { 96 }, .window = 192 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ctm_case c = cases[i];
        c.seed = 100 + i;
        expect_case(&c);
    }
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
                    .fill = FILL_MEAN,
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
                .fill = FILL_MEAN,
                .seed = 900 + i,
            };
            expect_case(&c);
        }
}

// L = 0 is padding: zeros, no fault. A length below q_len has no past, and is reported.
Test(ctm, takes_short_sequences)
{
    const struct ctm_case c = { "short",           4,           4, 2, 64, 8, { 0, 8, 5, 3 },
                                .fill = FILL_MEAN, .seed = 1000 };
    struct ctm_data *const data = build(&c);
    run(data);
    expect_exact(data);
    cr_expect_eq(fault_of(data), 2);
    for (int32_t i = 0; i < c.q_len * c.num_q_heads * c.head_dim; i++)
        cr_expect_eq(((const uint16_t *) result(data, ZONE_OUTPUT))[i], 0);
    release(data);
}

// A page id that is none, where a key is visible: reported, and its keys are absent.
Test(ctm, reports_pages_that_are_none)
{
    const struct ctm_case c = { "faults", 3, 4, 2, 64, 1, .lens = { 300, 300, 300 }, .seed = 1100 };
    struct ctm_data *const data = build(&c);
    const int32_t pages = 2 * data->params.num_pages, columns = data->params.max_pages_per_seq;
    const int32_t bad[] = { -1, pages, WILD, INT32_MAX };
    for (int32_t row = 2; row < 6; row++)
        for (size_t i = 0; i < COUNT(bad); i++) {
            int32_t *const entry = (int32_t *) zone(data, ZONE_TABLE) + row * columns + 1;
            const int32_t right = *entry;
            *entry = bad[i];
            run(data);
            cr_expect_eq(fault_of(data), row / 2, "%d in row %d: fault is %d", bad[i], row,
                         fault_of(data));
            for (int32_t d = 0; d < c.head_dim; d++)
                cr_expect(isfinite(output_at(data, row / 2, 0, 3, d)));
            *entry = right;
        }
    run(data);
    cr_expect_eq(fault_of(data), INT32_MAX);
    release(data);
}

Test(ctm, lets_nan_out_of_visible_keys_alone)
{
    const struct ctm_case c = { "NaN", 2, 4, 2, 64, 4, .lens = { 140, 140 }, .seed = 1200 };
    struct ctm_data *const data = build(&c);
    attn_store(zone(data, ZONE_POOL), kv_index(data, 1, 0, 7, 1), ATTN_DTYPE_FP16, NAN);
    run(data);
    for (int32_t row = 0; row < c.batch * c.q_len * c.num_q_heads; row++) {
        const int32_t b = row / (c.q_len * c.num_q_heads), h = row % c.num_q_heads;
        const double o = output_at(data, b, row / c.num_q_heads % c.q_len, h, 5);
        cr_expect_eq(isnan(o) != 0, b == 1 && h >= 2, "sequence %d, head %d: %g", b, h, o);
    }
    release(data);
}

Test(ctm, shares_pages)
{
    const struct ctm_case c = {
        "shared pages", 2, 4, 2, 64, 1, .lens = { 300, 300 }, .seed = 1300
    };
    struct ctm_data *const data = build(&c);
    const size_t row = data->zones[ZONE_TABLE].bytes / 2, q = data->zones[ZONE_Q].bytes / 2;
    memcpy((char *) zone(data, ZONE_TABLE) + row, zone(data, ZONE_TABLE), row);
    memcpy((char *) zone(data, ZONE_Q) + q, zone(data, ZONE_Q), q);
    run(data);
    expect_exact(data);
    const char *const output = result(data, ZONE_OUTPUT);
    cr_expect_eq(memcmp(output, output + q, q), 0);
    release(data);
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
        struct ctm_data *const a = build(&cases[i]), *const b = build(&cases[i]);
        run(a);
        expect_exact(a);
        b->params.fallback_available = 0;
        b->params.contiguous_query_swa = !b->params.contiguous_query_swa;
        if (!cases[i].fp8) b->params.k_scale = NAN, b->params.v_scale = 7;
        if (cases[i].q_len == 1) b->params.mask_words = -5;
        run(b);
        cr_expect(same_output(a, b), "%s", cases[i].name);
        release(a);
        release(b);
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
            c.sinks = variant == 2 ? SINKS_RANDOM : SINKS_NONE;
            struct ctm_data *const data = build(&c);
            run(data);
            expect_exact(data);
            dropped += dropped_of(data);
            release(data);
        }
    // Some pages, and not all.
    cr_expect(dropped > 20 && dropped < 9 * 140, "%lld", (long long) dropped);
}

Test(ctm, is_dense_where_it_has_to_be)
{
    static const int32_t tables[][2] = { { 5001, 4000 }, { 1, 0 },         { 1, -7 },
                                         { 1, 5000 },    { 1, INT32_MAX }, { 0, INT32_MIN } };
    struct ctm_data *const dense = build(&skip_case);
    run(dense);
    for (size_t i = 0; i < COUNT(tables); i++) {
        struct ctm_case c = skip_case;
        c.skip = tables[i];
        c.skip_length = COUNT(tables[i]);
        struct ctm_data *const data = build(&c);
        run(data);
        cr_expect_eq(dropped_of(data), 0, "table %zu", i);
        cr_expect(same_output(data, dense), "table %zu", i);
        release(data);
    }
    release(dense);
}

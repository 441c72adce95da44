/* SPDX-License-Identifier: Apache-2.0 */
// Prefill on the host executor, against a second computation of its contract in long double; and
// what may not change bits.
#include "attn/prefill.h"
#include "host/reference.h"
#include "tests/support/canary.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MAX_DIM 512

enum {
    MAX_BATCH = 4,
    // Query tokens in front of the first sequence of a ragged call and behind its last, that belong
    // to none.
    SPARE_TOKENS = 3,
    POISON = 0xFF,
};

static struct attn_device *device;

static void set_up(void)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    unsetenv("METRALE_NO_ATTN_FA128");
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK, "%s", attn_last_error());
}

static void tear_down(void)
{
    attn_device_close(&device);
}

TestSuite(prefill, .init = set_up, .fini = tear_down);

// ---- a call from a description

// What the query, key or value of a sequence is at a position does not depend on the rest of it.
enum fill {
    // Q in +-3, K and V in +-1.
    FILL_UNIFORM,
    // Scores 0; V is 1 in the column that is the key's number, so that o tells which keys are
    // visible.
    FILL_ONES,
    // V near the largest number of its type, of either sign.
    FILL_HUGE,
};

struct data;

struct call {
    const char *name;
    // BF16 where 0.
    enum attn_dtype dtype;
    int32_t num_q_heads, num_kv_heads, head_dim;
    // Each sequence has an id; not ragged, all have the lengths of the first.
    int32_t batch, ids[MAX_BATCH], q_lens[MAX_BATCH], kv_lens[MAX_BATCH], q_offsets[MAX_BATCH];
    bool ragged;
    // 0: contiguous.
    int32_t page_size;
    int32_t not_causal, window;
    float softcap;
    bool sinks;
    // Gaps between tokens of q; heads before tokens in pages, gaps between contiguous tokens.
    bool strided;
    enum fill fill;
    // Changes K and V as doubles before they are stored.
    void (*change)(struct data *data);
};

enum zone {
    ZONE_Q,
    ZONE_K,
    ZONE_V,
    ZONE_TABLE,
    ZONE_CU_SEQLENS,
    ZONE_KV_LENS,
    ZONE_Q_OFFSETS,
    ZONE_KV_STARTS,
    ZONE_SINKS,
    ZONE_O,
    ZONE_LSE,
    ZONE_FAULT,
    NUM_ZONES,
};

struct data {
    struct call c;
    struct attn_prefill_params params;
    struct canary_zone zones[NUM_ZONES];
    size_t bytes;
    uint8_t *image, *result;
    // Of each sequence [token][head][dim], as the type has it.
    double *q[MAX_BATCH], *k[MAX_BATCH], *v[MAX_BATCH];
    int32_t first_token[MAX_BATCH];
};

static void *in(const struct data *data, uint8_t *memory, enum zone zone)
{
    return data->zones[zone].bytes > 0 ? memory + data->zones[zone].offset : NULL;
}

static double round_to(enum attn_dtype dtype, double value)
{
    uint16_t bits;
    attn_store(&bits, 0, dtype, value);
    return attn_load(&bits, 0, dtype);
}

static double *make_rows(int32_t rows, int32_t row)
{
    double *const made = calloc((size_t) rows * row + 1, sizeof(*made));
    cr_assert(made);
    return made;
}

// A row of uniform numbers that its coordinates decide.
static void fill_row(double *to, int32_t count, double size, enum attn_dtype dtype, uint64_t seed)
{
    struct random random = { random_mix(random_seed(1), seed) };
    for (int32_t d = 0; d < count; d++) to[d] = round_to(dtype, size * random_uniform(&random));
}

static void fill_sequence(struct data *data, int32_t b)
{
    const struct call *const c = &data->c;
    const int32_t q_row = c->num_q_heads * c->head_dim, kv_row = c->num_kv_heads * c->head_dim;
    const uint64_t id = random_mix(7, (uint64_t) c->ids[b]);
    data->q[b] = make_rows(c->q_lens[b], q_row);
    data->k[b] = make_rows(c->kv_lens[b], kv_row);
    data->v[b] = make_rows(c->kv_lens[b], kv_row);
    for (int32_t r = 0; r < c->q_lens[b]; r++)
        fill_row(data->q[b] + (int64_t) r * q_row, q_row, c->fill == FILL_ONES ? 0 : 3, c->dtype,
                 random_mix(id, random_mix(1, (uint64_t) c->q_offsets[b] + (uint64_t) r)));
    for (int32_t t = 0; t < c->kv_lens[b]; t++) {
        double *const v = data->v[b] + (int64_t) t * kv_row;
        const double largest = c->dtype == ATTN_DTYPE_FP16 ? 65504 : 3.3e38;
        fill_row(data->k[b] + (int64_t) t * kv_row, kv_row, 1, c->dtype,
                 random_mix(id, random_mix(2, (uint64_t) t)));
        fill_row(v, kv_row, c->fill == FILL_HUGE ? largest : 1, c->dtype,
                 random_mix(id, random_mix(3, (uint64_t) t)));
        for (int32_t d = 0; c->fill == FILL_ONES && d < kv_row; d++)
            v[d] = d % c->head_dim == t % c->head_dim;
    }
}

static void set_strides(struct data *data)
{
    const struct call *const c = &data->c;
    struct attn_prefill_params *const p = &data->params;
    const int64_t dim = c->head_dim, row = c->num_kv_heads * dim;
    p->q_token_stride = c->num_q_heads * dim + (c->strided ? 24 : 0);
    p->k_token_stride = c->strided ? (c->page_size ? dim : row + 8) : row;
    p->k_head_stride = c->strided && c->page_size ? c->page_size * dim : dim;
    p->k_page_stride = c->page_size * row;
    p->v_token_stride = row;
    p->v_head_stride = dim;
    p->v_page_stride = c->page_size * row + (c->strided ? 8 : 0);
}

static void set_params(struct data *data)
{
    const struct call *const c = &data->c;
    struct attn_prefill_params *const p = &data->params;
    int32_t longest = 0;
    *p = ATTN_PREFILL_PARAMS_INIT;
    p->dtype = c->dtype;
    p->batch = c->batch;
    p->q_len = c->ragged ? -5 : c->q_lens[0];
    p->kv_len = c->ragged ? -5 : c->kv_lens[0];
    p->q_offset = c->q_offsets[0];
    p->num_q_heads = c->num_q_heads;
    p->num_kv_heads = c->num_kv_heads;
    p->head_dim = c->head_dim;
    p->causal = !c->not_causal;
    p->window = c->window;
    p->softcap = c->softcap;
    p->scale = (float) (1 / sqrt(c->head_dim));
    p->num_tokens = c->ragged ? SPARE_TOKENS : 0;
    for (int32_t b = 0; b < c->batch; b++) {
        data->first_token[b] = p->num_tokens;
        p->num_tokens += c->q_lens[b];
        p->num_kv_tokens += c->kv_lens[b] + 1;
        if (c->kv_lens[b] > longest) longest = c->kv_lens[b];
    }
    if (c->ragged) p->num_tokens += SPARE_TOKENS;
    set_strides(data);
    if (!c->page_size) return;
    p->page_size = c->page_size;
    p->max_pages_per_seq = longest / c->page_size + 1;
    p->table_stride = p->max_pages_per_seq + c->strided;
    // Two more than there can be in use.
    p->num_pages = (int64_t) p->max_pages_per_seq * c->batch + 2;
}

static void lay_out(struct data *data)
{
    const struct call *const c = &data->c;
    const struct attn_prefill_params *const p = &data->params;
    const size_t tokens = (size_t) p->num_tokens, batch = (size_t) c->batch;
    const size_t kv_tokens = (size_t) (c->ragged ? p->num_kv_tokens : c->batch * c->kv_lens[0]);
    const bool paged = c->page_size;
    const size_t bytes[NUM_ZONES] = {
        [ZONE_Q] = tokens * (size_t) p->q_token_stride * 2,
        [ZONE_K] = (paged ? (size_t) (p->num_pages * p->k_page_stride)
                          : kv_tokens * (size_t) p->k_token_stride) *
                   2,
        [ZONE_V] = (paged ? (size_t) (p->num_pages * p->v_page_stride)
                          : kv_tokens * (size_t) p->v_token_stride) *
                   2,
        [ZONE_TABLE] = paged ? batch * (size_t) p->table_stride * 4 : 0,
        [ZONE_CU_SEQLENS] = c->ragged ? (batch + 1) * 4 : 0,
        [ZONE_KV_LENS] = c->ragged ? batch * 4 : 0,
        [ZONE_Q_OFFSETS] = c->ragged ? batch * 4 : 0,
        [ZONE_KV_STARTS] = c->ragged && !paged ? batch * 4 : 0,
        [ZONE_SINKS] = c->sinks ? (size_t) c->num_q_heads * 4 : 0,
        [ZONE_O] = tokens * (size_t) (c->num_q_heads * c->head_dim) * 2,
        [ZONE_LSE] = tokens * (size_t) c->num_q_heads * 4,
        [ZONE_FAULT] = 4,
    };
    for (int i = 0; i < NUM_ZONES; i++)
        data->zones[i] = (struct canary_zone){ .bytes = bytes[i], .writable = i >= ZONE_O };
    data->bytes = canary_lay_out(data->zones, NUM_ZONES);
    data->image = aligned_alloc(256, (data->bytes + 255) / 256 * 256);
    data->result = aligned_alloc(256, (data->bytes + 255) / 256 * 256);
    cr_assert(data->image && data->result);
    memset(data->image, POISON, data->bytes);
}

// Every third page, from the last, round and round: no sequence has its pages in order.
static int32_t page_of(const struct data *data, int32_t b, int32_t column)
{
    const int64_t n = data->params.num_pages, i = b * data->params.max_pages_per_seq + column;
    const int64_t step = n % 3 ? 3 : n % 5 ? 5 : n % 7 ? 7 : 1;
    return (int32_t) (n - 1 - i * step % n);
}

static void store_key(struct data *data, int32_t b, int64_t first, int32_t t, int32_t head)
{
    const struct call *const c = &data->c;
    const struct attn_prefill_params *const p = &data->params;
    const int64_t page = c->page_size ? page_of(data, b, t / c->page_size) : 0;
    const int64_t slot = c->page_size ? t % c->page_size : first + t;
    const int64_t row = (int64_t) t * c->num_kv_heads + head;
    for (int32_t d = 0; d < c->head_dim; d++) {
        attn_store(in(data, data->image, ZONE_K),
                   page * p->k_page_stride + slot * p->k_token_stride + head * p->k_head_stride + d,
                   c->dtype, data->k[b][row * c->head_dim + d]);
        attn_store(in(data, data->image, ZONE_V),
                   page * p->v_page_stride + slot * p->v_token_stride + head * p->v_head_stride + d,
                   c->dtype, data->v[b][row * c->head_dim + d]);
    }
}

static void store_sequence(struct data *data, int32_t b, int64_t first_key)
{
    const struct call *const c = &data->c;
    const struct attn_prefill_params *const p = &data->params;
    const int32_t q_row = c->num_q_heads * c->head_dim;
    int32_t *const table = in(data, data->image, ZONE_TABLE);
    for (int32_t r = 0; r < c->q_lens[b]; r++)
        for (int32_t d = 0; d < q_row; d++)
            attn_store(in(data, data->image, ZONE_Q),
                       (data->first_token[b] + r) * p->q_token_stride + d, c->dtype,
                       data->q[b][(int64_t) r * q_row + d]);
    for (int32_t t = 0; t < c->kv_lens[b]; t++)
        for (int32_t head = 0; head < c->num_kv_heads; head++)
            store_key(data, b, first_key, t, head);
    for (int32_t i = 0; c->page_size && i * c->page_size < c->kv_lens[b]; i++)
        table[b * p->table_stride + i] = page_of(data, b, i);
}

static void store_lists(struct data *data, int32_t b, int32_t first_key)
{
    const struct call *const c = &data->c;
    int32_t *const starts = in(data, data->image, ZONE_KV_STARTS);
    int32_t *const cu_seqlens = in(data, data->image, ZONE_CU_SEQLENS);
    if (!c->ragged) return;
    cu_seqlens[b] = data->first_token[b];
    cu_seqlens[b + 1] = data->first_token[b] + c->q_lens[b];
    ((int32_t *) in(data, data->image, ZONE_KV_LENS))[b] = c->kv_lens[b];
    ((int32_t *) in(data, data->image, ZONE_Q_OFFSETS))[b] = c->q_offsets[b];
    if (starts) starts[b] = first_key;
}

static struct data *build(const struct call *call)
{
    struct data *const data = calloc(1, sizeof(*data));
    cr_assert(data);
    data->c = *call;
    struct call *const c = &data->c;
    if (!c->dtype) c->dtype = ATTN_DTYPE_BF16;
    for (int32_t b = 1; !c->ragged && b < c->batch; b++) {
        c->q_lens[b] = c->q_lens[0];
        c->kv_lens[b] = c->kv_lens[0];
        c->q_offsets[b] = c->q_offsets[0];
    }
    set_params(data);
    lay_out(data);
    int32_t first_key = 0;
    for (int32_t b = 0; b < c->batch; b++) fill_sequence(data, b);
    if (c->change) c->change(data);
    for (int32_t b = 0; b < c->batch; b++) {
        store_sequence(data, b, first_key);
        store_lists(data, b, first_key);
        // Ragged, a token of nobody's lies between two sequences.
        first_key += c->kv_lens[b] + c->ragged;
    }
    float *const sinks = in(data, data->image, ZONE_SINKS);
    for (int32_t h = 0; sinks && h < c->num_q_heads; h++) sinks[h] = (float) h - 1.5f;
    *(int32_t *) in(data, data->image, ZONE_FAULT) = INT32_MAX;
    return data;
}

static void discard(struct data *data)
{
    for (int32_t b = 0; b < data->c.batch; b++) {
        free(data->q[b]);
        free(data->k[b]);
        free(data->v[b]);
    }
    free(data->image);
    free(data->result);
    free(data);
}

typedef enum attn_status (*entry)(struct attn_device *, const struct attn_prefill_params *,
                                  attn_stream);

static void run_entry(struct data *data, entry function)
{
    struct attn_prefill_params p = data->params;
    memcpy(data->result, data->image, data->bytes);
    p.q = in(data, data->result, ZONE_Q);
    p.k = in(data, data->result, ZONE_K);
    p.v = in(data, data->result, ZONE_V);
    p.o = in(data, data->result, ZONE_O);
    p.block_table = in(data, data->result, ZONE_TABLE);
    p.cu_seqlens = in(data, data->result, ZONE_CU_SEQLENS);
    p.kv_lens = in(data, data->result, ZONE_KV_LENS);
    p.q_offsets = in(data, data->result, ZONE_Q_OFFSETS);
    p.kv_starts = in(data, data->result, ZONE_KV_STARTS);
    p.sinks = in(data, data->result, ZONE_SINKS);
    p.lse = in(data, data->result, ZONE_LSE);
    p.fault = in(data, data->result, ZONE_FAULT);
    // Of no meaning, and wild.
    if (!p.cu_seqlens) p.num_tokens = -9;
    if (!p.kv_starts) p.num_kv_tokens = -9;
    const enum attn_status status = function(device, &p, NULL);
    cr_assert_eq(status, ATTN_OK, "%s: %s: %s", data->c.name, attn_status_name(status),
                 attn_last_error());
    cr_expect_eq(canary_find(data->zones, NUM_ZONES, data->image, data->result, data->bytes), -1,
                 "%s wrote where it should not", data->c.name);
}

static struct data *run(const struct call *call)
{
    struct data *const data = build(call);
    run_entry(data, attn_prefill);
    return data;
}

static int64_t row_of(const struct data *data, int32_t b, int32_t r, int32_t h)
{
    return (int64_t) (data->first_token[b] + r) * data->c.num_q_heads + h;
}

static double get_o(const struct data *data, int32_t b, int32_t r, int32_t h, int32_t d)
{
    return attn_load(in(data, data->result, ZONE_O), row_of(data, b, r, h) * data->c.head_dim + d,
                     data->c.dtype);
}

static double get_lse(const struct data *data, int32_t b, int32_t r, int32_t h)
{
    return ((const float *) in(data, data->result, ZONE_LSE))[row_of(data, b, r, h)];
}

static int32_t get_fault(const struct data *data)
{
    return *(const int32_t *) in(data, data->result, ZONE_FAULT);
}

// ---- the second computation

static bool sees(const struct call *c, int32_t b, int32_t r, int32_t key)
{
    const int64_t position = (int64_t) c->q_offsets[b] + r;
    return key < c->kv_lens[b] && (c->not_causal || key <= position) &&
           (c->window == 0 || position - key < c->window);
}

static long double score(const struct data *data, int32_t b, int32_t r, int32_t h, int32_t key)
{
    const struct call *const c = &data->c;
    const int32_t kv_head = h / (c->num_q_heads / c->num_kv_heads);
    const double *const q = data->q[b] + ((int64_t) r * c->num_q_heads + h) * c->head_dim;
    const double *const k = data->k[b] + ((int64_t) key * c->num_kv_heads + kv_head) * c->head_dim;
    long double dot = 0;
    for (int32_t d = c->head_dim - 1; d >= 0; d--) dot += (long double) q[d] * k[d];
    dot *= data->params.scale;
    return c->softcap > 0 ? c->softcap * tanhl(dot / c->softcap) : dot;
}

struct exact {
    long double o[MAX_DIM], weighted[MAX_DIM], lse;
};

static void compute(const struct data *data, int32_t b, int32_t r, int32_t h, struct exact *exact)
{
    const struct call *const c = &data->c;
    const int32_t kv_head = h / (c->num_q_heads / c->num_kv_heads);
    const float *const sinks = in(data, data->image, ZONE_SINKS);
    long double largest = sinks ? sinks[h] : -INFINITY, sum;
    memset(exact, 0, sizeof(*exact));
    for (int32_t key = 0; key < c->kv_lens[b]; key++)
        if (sees(c, b, r, key)) largest = fmaxl(largest, score(data, b, r, h, key));
    sum = sinks ? expl(sinks[h] - largest) : 0;
    for (int32_t key = c->kv_lens[b] - 1; key >= 0; key--) {
        if (!sees(c, b, r, key)) continue;
        const double *const v =
            data->v[b] + ((int64_t) key * c->num_kv_heads + kv_head) * c->head_dim;
        const long double weight = expl(score(data, b, r, h, key) - largest);
        sum += weight;
        for (int32_t d = 0; d < c->head_dim; d++) {
            exact->o[d] += weight * v[d];
            exact->weighted[d] += weight * fabs(v[d]);
        }
    }
    exact->lse = sum > 0 ? largest + logl(sum) : -INFINITY;
    for (int32_t d = 0; sum > 0 && d < c->head_dim; d++) {
        exact->o[d] /= sum;
        exact->weighted[d] /= sum;
    }
}

// u |exact| + 2^-20 A, and with FP16 2^-25: see decode.h.
static void expect_row(const struct data *data, int32_t b, int32_t r, int32_t h)
{
    const struct call *const c = &data->c;
    const bool fp16 = c->dtype == ATTN_DTYPE_FP16;
    const double lse = get_lse(data, b, r, h);
    struct exact exact;
    compute(data, b, r, h, &exact);
    for (int32_t d = 0; d < c->head_dim; d++) {
        const long double value = get_o(data, b, r, h, d);
        const long double bound = (fp16 ? 0x1p-11L : 0x1p-8L) * fabsl(exact.o[d]) +
                                  0x1p-20L * exact.weighted[d] + (fp16 ? 0x1p-25L : 0);
        cr_expect(fabsl(value - exact.o[d]) <= bound,
                  "%s: o of sequence %d, token %d, head %d, dim %d is %Lg instead of %Lg", c->name,
                  b, r, h, d, value, exact.o[d]);
    }
    cr_expect(lse == exact.lse || fabsl(lse - exact.lse) <= 0x1p-20L + 0x1p-24L * fabsl(exact.lse),
              "%s: lse of sequence %d, token %d, head %d is %g instead of %Lg", c->name, b, r, h,
              lse, exact.lse);
}

static void expect_exact(const struct data *data)
{
    for (int32_t b = 0; b < data->c.batch; b++)
        for (int32_t r = 0; r < data->c.q_lens[b]; r++)
            for (int32_t h = 0; h < data->c.num_q_heads; h++) expect_row(data, b, r, h);
    cr_expect_eq(get_fault(data), INT32_MAX, "%s: fault %d", data->c.name, get_fault(data));
}

#define IDS \
    { \
        0, 1, 2, 3 \
    }
// `sequences` of the same lengths.
#define UNIFORM(sequences, queries, keys, offset) \
    .batch = (sequences), .ids = IDS, .q_lens = { (queries) }, .kv_lens = { (keys) }, \
    .q_offsets = { (offset) }
#define RAGGED \
    .batch = 4, .ids = IDS, .ragged = true, .q_lens = { 5, 0, 17, 1 }, \
    .kv_lens = { 5, 9, 40, 300 }, .q_offsets = { 0, 3, 23, 299 }

static const struct call calls[] = {
    { "contiguous", 0, 4, 2, 64, UNIFORM(2, 33, 33, 0) },
    { "contiguous fp16", ATTN_DTYPE_FP16, 4, 4, 128, UNIFORM(1, 20, 20, 0) },
    { "more keys than queries", 0, 2, 1, 64, UNIFORM(2, 7, 300, 293) },
    { "fewer keys than positions", 0, 2, 1, 64, UNIFORM(1, 12, 10, 4) },
    { "keys behind the last query", 0, 2, 1, 64, UNIFORM(1, 6, 30, 5) },
    { "before position 0", 0, 2, 2, 32, UNIFORM(1, 9, 5, -4) },
    { "not causal", 0, 6, 3, 64, UNIFORM(2, 9, 23, 0), .not_causal = 1 },
    { "not causal, window", 0, 2, 1, 64, UNIFORM(1, 9, 23, 5), .not_causal = 1, .window = 3 },
    { "window", ATTN_DTYPE_FP16, 2, 1, 64, UNIFORM(1, 40, 340, 300), .window = 270 },
    { "window of 1", 0, 2, 1, 64, UNIFORM(1, 10, 10, 0), .window = 1 },
    { "softcap, sinks", 0, 4, 1, 64, UNIFORM(2, 21, 21, 0), .softcap = 2.5f, .sinks = true },
    { "strided", 0, 4, 2, 80, UNIFORM(2, 19, 19, 0), .strided = true },
    { "wide", 0, 2, 1, 512, UNIFORM(1, 18, 18, 0) },
    { "long", 0, 1, 1, 16, UNIFORM(2, 3, 5000, 4997) },
    { "paged", 0, 4, 2, 64, UNIFORM(1, 30, 77, 47), .page_size = 16 },
    { "paged fp16, not causal", ATTN_DTYPE_FP16, 2, 2, 256, UNIFORM(1, 9, 50, 0), .page_size = 24,
      .not_causal = 1 },
    { "paged, window, sinks, strided", 0, 4, 2, 128, UNIFORM(2, 31, 61, 30), .page_size = 4,
      .window = 20, .sinks = true, .strided = true },
    { "ragged", 0, 4, 2, 64, RAGGED },
    { "ragged, strided, sinks", ATTN_DTYPE_FP16, 4, 2, 64, RAGGED, .strided = true, .sinks = true },
    { "ragged, paged", 0, 4, 2, 64, RAGGED, .page_size = 7 },
    { "ragged, paged, window", 0, 2, 2, 64, RAGGED, .page_size = 16, .window = 12, .strided = true,
      .softcap = 30 },
    { "huge values", 0, 2, 1, 64, UNIFORM(1, 20, 20, 0), .fill = FILL_HUGE },
    { "huge values fp16", ATTN_DTYPE_FP16, 2, 1, 64, UNIFORM(1, 20, 20, 0), .page_size = 3,
      .fill = FILL_HUGE },
};

Test(prefill, agrees_with_a_second_computation)
{
    for (size_t i = 0; i < COUNT(calls); i++) {
        struct data *const data = run(&calls[i]);
        expect_exact(data);
        discard(data);
    }
}

// ---- what each token sees, key by key

static void expect_visible(const struct call *call)
{
    struct data *const data = run(call);
    for (int32_t r = 0; r < call->q_lens[0]; r++) {
        int32_t count = 0;
        for (int32_t key = 0; key < call->kv_lens[0]; key++) count += sees(call, 0, r, key);
        const double part = count > 0 ? round_to(ATTN_DTYPE_BF16, 1.0 / count) : 0;
        for (int32_t key = 0; key < 64; key++)
            cr_assert_eq(get_o(data, 0, r, 0, key), sees(call, 0, r, key) ? part : 0,
                         "offset %d, window %d, causal %d: token %d, key %d", call->q_offsets[0],
                         call->window, !call->not_causal, r, key);
        cr_expect(count > 0 || get_lse(data, 0, r, 0) == -INFINITY);
    }
    discard(data);
}

Test(prefill, sees_exactly_the_visible_keys)
{
    static const int32_t offsets[] = { -3, 0, 1, 20, 60, 70 }, windows[] = { 0, 1, 2, 16, 64, 100 };
    for (int not_causal = 0; not_causal < 2; not_causal++)
        for (size_t i = 0; i < COUNT(offsets); i++)
            for (size_t j = 0; j < COUNT(windows); j++)
                for (int32_t page = 0; page <= 16; page += 16) {
                    const struct call call = { "visible",
                                               0,
                                               1,
                                               1,
                                               64,
                                               UNIFORM(1, 12, 62, offsets[i]),
                                               .page_size = page,
                                               .not_causal = not_causal,
                                               .window = windows[j],
                                               .fill = FILL_ONES };
                    expect_visible(&call);
                }
    // The largest position and window that there are.
    struct call far = { "far", 0, 1, 1, 64, UNIFORM(1, 3, 50, INT32_MAX - 1) };
    far.fill = FILL_ONES;
    expect_visible(&far);
    far.window = INT32_MAX;
    expect_visible(&far);
}

// ---- what may not change bits

// The same bits in `count` tokens of sequence i of a, from token r on, and of j of b, from s on.
static void expect_equal(const struct data *a, int32_t i, int32_t r, const struct data *b,
                         int32_t j, int32_t s, int32_t count)
{
    const size_t row = (size_t) (a->c.num_q_heads * a->c.head_dim) * 2;
    const size_t lse_row = (size_t) a->c.num_q_heads * 4;
    const size_t a_token = (size_t) (a->first_token[i] + r),
                 b_token = (size_t) (b->first_token[j] + s);
    const char *const a_o = in(a, a->result, ZONE_O), *const b_o = in(b, b->result, ZONE_O);
    const char *const a_lse = in(a, a->result, ZONE_LSE), *const b_lse = in(b, b->result, ZONE_LSE);
    cr_expect_eq(memcmp(a_o + a_token * row, b_o + b_token * row, (size_t) count * row), 0,
                 "o of %s and %s", a->c.name, b->c.name);
    cr_expect_eq(memcmp(a_lse + a_token * lse_row, b_lse + b_token * lse_row,
                        (size_t) count * lse_row),
                 0, "lse of %s and %s", a->c.name, b->c.name);
}

// Tokens [first, first + count) of the only sequence.
static struct call chunk_of(const struct call *whole, int32_t first, int32_t count)
{
    struct call chunk = *whole;
    chunk.name = "a chunk";
    chunk.q_lens[0] = count;
    chunk.q_offsets[0] += first;
    return chunk;
}

static void expect_chunks_equal(const struct data *whole, int32_t size)
{
    for (int32_t first = 0; first < whole->c.q_lens[0]; first += size) {
        const int32_t left = whole->c.q_lens[0] - first, count = left < size ? left : size;
        struct call chunk = chunk_of(&whole->c, first, count);
        // Causal, the keys behind it may not be there yet.
        if (!chunk.not_causal) chunk.kv_lens[0] = chunk.q_offsets[0] + count;
        struct data *const data = run(&chunk);
        expect_equal(whole, 0, first, data, 0, 0, count);
        discard(data);
    }
}

static void expect_layouts_equal(const struct call *call)
{
    static const int32_t pages[] = { 1, 3, 16, 24, 64, 512 };
    struct data *const whole = run(call);
    for (size_t i = 0; i < COUNT(pages); i++) {
        struct call paged = *call;
        paged.name = "pages";
        paged.page_size = pages[i];
        paged.strided = i % 2;
        struct data *const data = run(&paged);
        expect_equal(whole, 0, 0, data, 0, 0, call->q_lens[0]);
        if (i == 2) expect_chunks_equal(data, 50);
        discard(data);
    }
    expect_chunks_equal(whole, 1);
    expect_chunks_equal(whole, 7);
    expect_chunks_equal(whole, 64);
    discard(whole);
}

Test(prefill, has_the_same_bits_in_pages_and_chunks)
{
    static const struct call wholes[] = {
        { "whole", 0, 4, 2, 64, UNIFORM(1, 120, 420, 300) },
        { "whole, window",
          ATTN_DTYPE_FP16,
          2,
          1,
          128,
          1,
          { 6 },
          { 90 },
          { 390 },
          { 300 },
          .window = 260,
          .sinks = true },
        { "whole, not causal",
          0,
          2,
          1,
          64,
          1,
          { 7 },
          { 70 },
          { 300 },
          { 0 },
          .not_causal = 1,
          .softcap = 4 },
    };
    for (size_t i = 0; i < COUNT(wholes); i++) expect_layouts_equal(&wholes[i]);
}

Test(prefill, has_the_same_bits_alone_and_in_a_batch)
{
    for (int32_t page = 0; page < 10; page += 9) {
        struct call call = { "batch", 0, 4, 2, 64, RAGGED, .page_size = page };
        struct data *const batch = run(&call);
        for (int32_t b = 0; b < 4; b++) {
            struct call alone = { "alone", 0, 4, 2, 64, .batch = 1, .ids = { b } };
            alone.q_lens[0] = call.q_lens[b];
            alone.kv_lens[0] = call.kv_lens[b];
            alone.q_offsets[0] = call.q_offsets[b];
            if (alone.q_lens[0] == 0) continue;
            struct data *const data = run(&alone);
            expect_equal(batch, b, 0, data, 0, 0, call.q_lens[b]);
            discard(data);
        }
        discard(batch);
    }
}

Test(prefill, has_the_same_bits_from_twin_and_original)
{
    static const entry entries[2][2] = {
        { attn_prefill_64, attn_prefill_fa128 },
        { attn_prefill_paged_64, attn_prefill_fa128_paged },
    };
    for (int paged = 0; paged < 2; paged++) {
        struct call call = { "twin", 0, 4, 2, 256, UNIFORM(2, 70, 80, 10) };
        call.page_size = paged * 16;
        struct data *const original = build(&call), *const twin = build(&call);
        run_entry(original, entries[paged][0]);
        run_entry(twin, entries[paged][1]);
        expect_equal(original, 0, 0, twin, 0, 0, 70);
        expect_equal(original, 1, 0, twin, 1, 0, 70);
        discard(original);
        discard(twin);
    }
}

// ---- rows, NaN, infinity, nothing

Test(prefill, leaves_rows_of_no_sequence)
{
    const struct call call = { "ragged", 0, 4, 2, 64, RAGGED };
    struct data *const data = run(&call);
    const int32_t behind = data->first_token[3] + call.q_lens[3];
    for (int32_t token = 0; token < data->params.num_tokens; token++) {
        const uint8_t *const o = in(data, data->result, ZONE_O);
        const uint8_t *const lse = in(data, data->result, ZONE_LSE);
        const bool spare = token < SPARE_TOKENS || token >= behind;
        for (int i = 0; spare && i < 4 * 64 * 2; i++)
            cr_assert_eq(o[token * 4 * 64 * 2 + i], POISON, "token %d", token);
        for (int i = 0; spare && i < 4 * 4; i++)
            cr_assert_eq(lse[token * 4 * 4 + i], POISON, "token %d", token);
    }
    discard(data);
}

// A NaN in the value of key 20, an infinity in that of key 25.
static void change_values(struct data *data)
{
    data->v[0][20 * 64] = NAN;
    data->v[0][25 * 64 + 1] = -INFINITY;
}

// NaN scores for key 20; those of key 10 are -inf or inf.
static void change_keys(struct data *data)
{
    data->k[0][20 * 64] = NAN;
    data->k[0][10 * 64 + 1] = INFINITY;
}

Test(prefill, passes_on_what_tokens_see_and_nothing_else)
{
    struct call call = { "values", 0, 1, 1, 64, UNIFORM(1, 40, 40, 0), .window = 8 };
    call.change = change_values;
    struct data *data = run(&call);
    for (int32_t r = 0; r < 40; r++) {
        cr_expect_eq(isnan(get_o(data, 0, r, 0, 0)), sees(&call, 0, r, 20), "token %d", r);
        cr_expect_eq(get_o(data, 0, r, 0, 1) == -INFINITY, sees(&call, 0, r, 25), "token %d", r);
        cr_expect(isfinite(get_o(data, 0, r, 0, 2)) && isfinite(get_lse(data, 0, r, 0)));
    }
    discard(data);
    call.change = change_keys;
    data = run(&call);
    for (int32_t r = 0; r < 40; r++) {
        const bool nan = sees(&call, 0, r, 20);
        // An infinite score is NaN over itself, one of -inf weighs nothing.
        const bool infinite = sees(&call, 0, r, 10) && data->q[0][r * 64 + 1] > 0;
        cr_expect_eq(isnan(get_o(data, 0, r, 0, 0)), nan || infinite, "token %d", r);
        cr_expect_eq(isfinite(get_lse(data, 0, r, 0)), !nan && !infinite, "token %d", r);
    }
    discard(data);
}

Test(prefill, gives_zeros_without_keys)
{
    for (int i = 0; i < 4; i++) {
        struct call call = { "no keys", 0, 2, 1, 64, UNIFORM(2, 3, 0, 0) };
        call.sinks = i % 2;
        call.page_size = i / 2 * 16;
        struct data *const data = run(&call);
        expect_exact(data);
        const uint16_t *const o = in(data, data->result, ZONE_O);
        for (int j = 0; j < 2 * 3 * 2 * 64; j++) cr_assert_eq(o[j], 0);
        cr_expect_eq(get_lse(data, 1, 2, 1), call.sinks ? -0.5 : -INFINITY);
        discard(data);
    }
}

Test(prefill, writes_nothing_without_query_tokens)
{
    struct call call = { "empty", 0, 2, 1, 64, UNIFORM(1, 0, 9, 0) };
    for (int i = 0; i < 2; i++) {
        struct data *const data = build(&call);
        data->params.batch = 1 - i;
        run_entry(data, i ? attn_prefill_64 : attn_prefill);
        cr_expect_eq(memcmp(data->image, data->result, data->bytes), 0);
        discard(data);
    }
}

// ---- faults

// Of a ragged call, paged or not, with one entry of a list or of the table changed.
static int32_t fault_with(int32_t page_size, enum zone zone, int32_t index, int32_t value)
{
    const struct call call = { "faulty", 0, 2, 1, 64, RAGGED, .page_size = page_size };
    struct data *const data = build(&call);
    ((int32_t *) in(data, data->image, zone))[index] = value;
    run_entry(data, attn_prefill);
    const int32_t fault = get_fault(data);
    discard(data);
    return fault;
}

Test(prefill, reports_entries_that_cannot_be_followed)
{
    // Tokens are 29, those of sequences begin at 3, 8, 8 and 25 and end at 26; keys are 358.
    static const struct {
        int32_t page_size;
        enum zone zone;
        int32_t index, value, fault;
    } cases[] = {
        { 0, ZONE_CU_SEQLENS, 0, -1, 0 },
        { 0, ZONE_CU_SEQLENS, 0, 9, 0 },
        { 0, ZONE_CU_SEQLENS, 2, 7, 1 },
        { 0, ZONE_CU_SEQLENS, 2, INT32_MIN, 1 },
        { 0, ZONE_CU_SEQLENS, 4, 29, INT32_MAX },
        { 0, ZONE_CU_SEQLENS, 4, 30, 3 },
        { 0, ZONE_CU_SEQLENS, 4, INT32_MAX, 3 },
        { 0, ZONE_KV_LENS, 0, -1, 0 },
        { 0, ZONE_KV_LENS, 1, -1, INT32_MAX },
        { 0, ZONE_KV_LENS, 3, 301, INT32_MAX },
        { 0, ZONE_KV_LENS, 3, 302, 3 },
        { 0, ZONE_KV_LENS, 2, INT32_MAX, 2 },
        { 0, ZONE_KV_STARTS, 0, -1, 0 },
        { 0, ZONE_KV_STARTS, 2, 359, 2 },
        { 0, ZONE_KV_STARTS, 2, INT32_MAX, 2 },
        { 0, ZONE_KV_STARTS, 2, INT32_MIN, 2 },
        { 0, ZONE_Q_OFFSETS, 2, INT32_MAX, INT32_MAX },
        { 0, ZONE_Q_OFFSETS, 2, INT32_MIN, INT32_MAX },
        { 16, ZONE_KV_LENS, 3, 304, INT32_MAX },
        { 16, ZONE_KV_LENS, 3, 305, 3 },
        { 16, ZONE_KV_LENS, 2, INT32_MIN, 2 },
        { 16, ZONE_TABLE, 0, -1, 0 },
        { 16, ZONE_TABLE, 19, -1, INT32_MAX },
        { 16, ZONE_TABLE, 38, 78, 2 },
        { 16, ZONE_TABLE, 40, INT32_MAX, 2 },
        { 16, ZONE_TABLE, 41, INT32_MAX, INT32_MAX },
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        cr_expect_eq(fault_with(cases[i].page_size, cases[i].zone, cases[i].index, cases[i].value),
                     cases[i].fault, "case %zu: zone %d, entry %d is %d", i, (int) cases[i].zone,
                     cases[i].index, cases[i].value);
}

// A sequence that starts outside has no keys, one that ends before it starts no tokens: the others
// are what they were.
Test(prefill, leaves_others_alone_where_a_sequence_is_bad)
{
    static const int32_t starts[] = { -1, INT32_MIN, 359, INT32_MAX };
    const struct call call = { "bad start", 0, 2, 1, 64, RAGGED };
    struct data *const right = run(&call), *const data = build(&call);
    int32_t *const kv_starts = in(data, data->image, ZONE_KV_STARTS);
    for (size_t i = 0; i < COUNT(starts); i++) {
        kv_starts[0] = starts[i];
        run_entry(data, attn_prefill);
        cr_expect_eq(get_fault(data), 0);
        for (int32_t r = 0; r < call.q_lens[0]; r++)
            cr_expect(get_o(data, 0, r, 1, 0) == 0 && get_lse(data, 0, r, 1) == -INFINITY);
        expect_equal(right, 2, 0, data, 2, 0, call.q_lens[2]);
        expect_equal(right, 3, 0, data, 3, 0, call.q_lens[3]);
    }
    kv_starts[0] = 0;
    ((int32_t *) in(data, data->image, ZONE_CU_SEQLENS))[0] = 9;
    run_entry(data, attn_prefill);
    cr_expect_eq(get_fault(data), 0);
    cr_expect(isnan(get_o(data, 0, 0, 0, 0)), "a row of no sequence was written");
    expect_equal(right, 2, 0, data, 2, 0, call.q_lens[2]);
    discard(right);
    discard(data);
}

// The first one stays, and keys on bad pages are as if they were not there.
Test(prefill, takes_bad_pages_for_absent)
{
    struct call call = { "bad page", 0, 1, 1, 64, UNIFORM(1, 12, 62, 50) };
    call.page_size = 16;
    call.fill = FILL_ONES;
    struct data *const data = build(&call);
    ((int32_t *) in(data, data->image, ZONE_TABLE))[1] = (int32_t) data->params.num_pages;
    run_entry(data, attn_prefill_paged_64);
    cr_expect_eq(get_fault(data), 0);
    for (int32_t r = 0; r < 12; r++)
        for (int32_t key = 0; key < 64; key++) {
            const bool there = sees(&call, 0, r, key) && key / 16 != 1;
            const double part = round_to(ATTN_DTYPE_BF16, 1.0 / (50 + r + 1 - 16));
            cr_assert_eq(get_o(data, 0, r, 0, key), there ? part : 0, "token %d, key %d", r, key);
        }
    *(int32_t *) in(data, data->image, ZONE_FAULT) = -7;
    run_entry(data, attn_prefill_paged_64);
    cr_expect_eq(get_fault(data), -7);
    discard(data);
}

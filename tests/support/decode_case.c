/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/decode_case.h"

#include "tests/support/random.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Kinds of rows, for their seeds.
enum {
    ROW_Q = 1,
    ROW_K,
    ROW_V,
    ROW_SINKS,
    ROW_SCALES,
    ROW_LEN,
    ROW_SPECIAL,
    ROW_PAGES,
    ROW_V_PAGES,
    ROW_TREE,
    ROW_UNUSED_BITS,
    ROW_LEVEL,
};

enum {
    MAX_HELPERS = 31,
    // What dropped_blocks begins with.
    FIRST_DROPPED = 1000,
};

// Scale and q . k that give -66855.55 for every key; two of them have an lse of -66854.86.
static const float FAR_SCALE = 66855.55f;

const struct decode_kind decode_kinds[NUM_DECODE_KINDS] = {
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 },  { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256 }, { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 512 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 64 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 128 }, { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 256 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 512 }, { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 64 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 }, { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 256 },
    { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 512 }, { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 32 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 64 },  { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 128 },
    { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 256 }, { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 512 },
};

void decode_case_set_kind(struct decode_case *c, const struct decode_kind *kind)
{
    c->q_dtype = kind->q_dtype;
    c->kv_dtype = kind->kv_dtype;
    c->head_dim = kind->head_dim;
    if (kind->kv_dtype != ATTN_DTYPE_E4M3) return;
    c->k_scale = 0.25f;
    c->v_scale = 0.5f;
}

static int32_t id_of(const struct decode_case *c, int32_t sequence)
{
    return c->ids ? c->ids[sequence] : sequence;
}

static int32_t edge_len(const struct decode_case *c, int32_t id)
{
    const int32_t w = c->window;
    const int32_t edges[] = {
        1335,  0, 1,     17,  128, 15, 129, 16, 127, 1000, 2, 257, w > 1 ? w - 1 : 3,
        w + 1, w, w + 2, 640, 63,
    };
    const int32_t len = edges[(uint32_t) id % (sizeof(edges) / sizeof(edges[0]))];
    return len < c->len ? len : c->len;
}

static int32_t len_of(const struct decode_case *c, int32_t sequence)
{
    if (c->given_lens) return c->given_lens[sequence];
    const int32_t id = id_of(c, sequence);
    if (c->lens == DECODE_LENS_EDGES) return edge_len(c, id);
    if (c->lens == DECODE_LENS_FULL) return c->len;
    struct random random = { random_mix(random_mix(c->seed, ROW_LEN), (uint64_t) id) };
    const int32_t len = (int32_t) exp((random_uniform(&random) + 1) / 2 * log(c->len + 1.0));
    return len < 1 ? 1 : len > c->len ? c->len : len;
}

static int32_t q_len_of(const struct decode_case *c)
{
    return c->q_len > 0 ? c->q_len : 1;
}

// Keys before the draft keys of a sequence.
static int32_t past_of(const struct decode_case *c, int32_t len)
{
    return len > q_len_of(c) ? len - q_len_of(c) : 0;
}

// The first key that the window of a query token has.
static int32_t token_start(const struct decode_case *c, int32_t len, int32_t token)
{
    const bool shared = c->window_form == ATTN_WINDOW_SHARED;
    const int32_t behind = shared ? len : past_of(c, len) + token + 1;
    return c->window > 0 && behind > c->window ? behind - c->window : 0;
}

// The first key that any query token has.
static int32_t start_of(const struct decode_case *c, int32_t len)
{
    return token_start(c, len, 0);
}

// Bit `draft` of the row of the mask of a query token.
static bool tree_bit(const struct decode_case *c, int32_t id, int32_t token, int32_t draft)
{
    const uint64_t seed = random_mix(random_mix(c->seed, ROW_TREE), (uint64_t) id);
    switch (c->tree) {
    case DECODE_TREE_NONE:
    case DECODE_TREE_CAUSAL: return draft <= token;
    case DECODE_TREE_FULL: return true;
    case DECODE_TREE_STAR: return draft == 0 || draft == token;
    case DECODE_TREE_COMB: return draft == token || (draft < token && draft % 2 == 0);
    case DECODE_TREE_RANDOM:
        return (token + id) % 5 != 4 &&
               random_mix(random_mix(seed, (uint64_t) token), (uint64_t) draft) >> 63;
    default: return false;
    }
}

static bool sees(const struct decode_case *c, int32_t id, int32_t len, int32_t token, int32_t key)
{
    if (key >= len || key < token_start(c, len, token)) return false;
    const int32_t past = past_of(c, len);
    return key < past || tree_bit(c, id, token, key - past);
}

bool decode_case_sees(const struct decode_case *c, int32_t sequence, int32_t token, int32_t key)
{
    return sees(c, id_of(c, sequence), len_of(c, sequence), token, key);
}

int32_t decode_case_fault(const struct decode_case *c)
{
    for (int32_t b = 0; b < c->batch; b++)
        if (len_of(c, b) > 0 && len_of(c, b) < q_len_of(c)) return b;
    return INT32_MAX;
}

bool decode_case_as_plain(const struct decode_case *c, int32_t token, struct decode_case *plain,
                          int32_t *lens)
{
    const int32_t q_len = q_len_of(c);
    int32_t count = 0, last = 0;
    for (int32_t draft = 0; draft < q_len; draft++) {
        if (!tree_bit(c, 0, token, draft)) continue;
        count++;
        last = draft + 1;
    }
    // What the window has to be, for the row to begin where it does.
    const int32_t behind = c->window_form == ATTN_WINDOW_SHARED ? q_len : token + 1;
    const int32_t window = c->window > 0 ? c->window + last - behind : 0;
    if (c->tree == DECODE_TREE_RANDOM || count != last || (c->window > 0 && window < 1))
        return false;
    for (int32_t b = 0; b < c->batch; b++) lens[b] = past_of(c, len_of(c, b)) + last;
    *plain = *c;
    plain->name = "plain";
    plain->q_len = 1;
    plain->first_token = c->first_token + token;
    plain->tree = DECODE_TREE_NONE;
    plain->window = window;
    plain->given_lens = lens;
    return true;
}

// Whether any query token attends the key.
static bool is_seen(const struct decode_case *c, int32_t id, int32_t len, int32_t key)
{
    // The first token's window reaches back the furthest.
    if (key < past_of(c, len)) return sees(c, id, len, 0, key);
    for (int32_t token = 0; token < q_len_of(c); token++)
        if (sees(c, id, len, token, key)) return true;
    return false;
}

// The key of a sequence that a fill treats in its own way.
static int32_t special_key(const struct decode_case *c, int32_t id, int32_t len)
{
    struct random random = { random_mix(random_mix(c->seed, ROW_SPECIAL), (uint64_t) id) };
    const int32_t start = start_of(c, len);
    return len > start ? start + (int32_t) random_below(&random, (uint32_t) (len - start)) : -1;
}

static uint64_t row_seed(const struct decode_case *c, int kind, int32_t id, int32_t token,
                         int32_t head)
{
    const uint64_t sequence = random_mix(random_mix(c->seed, (uint64_t) kind), (uint64_t) id);
    return random_mix(random_mix(sequence, (uint64_t) token), (uint64_t) head);
}

// Most of what is filled is BF16, and much: this is faster than attn_store.
static uint16_t round_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t) ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void fill_random(void *base, int64_t index, int32_t count, enum attn_dtype dtype,
                        uint64_t seed, double size)
{
    struct random random = { seed };
    const float step = (float) (size / 32768);
    for (int32_t d = 0; d < count; d += 4) {
        uint64_t bits = random_next(&random);
        for (int32_t i = d; i < d + 4; i++, bits >>= 16) {
            const float value = ((float) (bits & 0xFFFF) - 32767.5f) * step;
            if (dtype == ATTN_DTYPE_BF16)
                ((uint16_t *) base)[index + i] = round_bf16(value);
            else
                attn_store(base, index + i, dtype, value);
        }
    }
}

static void fill_zeros(void *base, int64_t index, int32_t count, enum attn_dtype dtype)
{
    for (int32_t d = 0; d < count; d++) attn_store(base, index + d, dtype, 0);
}

// Of a block of keys, -5, 0 or 5: `part` 0 for all query heads, 1 for the odd ones in addition.
static double level_of(const struct decode_case *c, int32_t id, int32_t token, int32_t head,
                       int part)
{
    struct random random = { row_seed(c, ROW_LEVEL, id, token / ATTN_SKIP_KEYS, 2 * head + part) };
    return 5 * ((int) random_below(&random, 3) - 1);
}

static bool is_flat(enum decode_fill fill)
{
    return fill == DECODE_FILL_MEAN || fill == DECODE_FILL_BITS || fill == DECODE_FILL_FAR ||
           fill == DECODE_FILL_MINUS_INF;
}

static void fill_q_row(const struct decode_case *c, int32_t id, int32_t token, int32_t head,
                       void *base, int64_t index)
{
    if (!is_flat(c->fill)) {
        fill_random(base, index, c->head_dim, c->q_dtype, row_seed(c, ROW_Q, id, token, head), 3);
    } else {
        fill_zeros(base, index, c->head_dim, c->q_dtype);
        const bool zero = c->fill == DECODE_FILL_MEAN || c->fill == DECODE_FILL_BITS;
        if (!zero) attn_store(base, index, c->q_dtype, 1);
    }
    if (c->fill == DECODE_FILL_LEVELS) {
        const double unit = sqrt(c->head_dim) / (c->k_scale != 0 ? c->k_scale : 1);
        fill_random(base, index, c->head_dim, c->q_dtype, row_seed(c, ROW_Q, id, token, head), 0.5);
        attn_store(base, index, c->q_dtype, unit);
        attn_store(base, index + 1, c->q_dtype, head % 2 ? unit : 0);
    }
    if (c->fill == DECODE_FILL_NAN_Q && head % 2 == 0) attn_store(base, index + 1, c->q_dtype, NAN);
}

static void fill_k_row(const struct decode_case *c, int32_t id, int32_t token, int32_t special,
                       int32_t head, void *base, int64_t index)
{
    const enum attn_dtype dtype = c->kv_dtype;
    if (is_flat(c->fill)) {
        fill_zeros(base, index, c->head_dim, dtype);
        if (c->fill == DECODE_FILL_FAR) attn_store(base, index, dtype, -1);
        if (c->fill == DECODE_FILL_MINUS_INF) attn_store(base, index, dtype, -INFINITY);
        return;
    }
    // Along the first token's query of the group's first head: its score is about 6 sqrt(head_dim).
    const bool along = c->fill == DECODE_FILL_PEAKED && token == special;
    const int32_t first = head * (c->num_q_heads / c->num_kv_heads);
    fill_random(base, index, c->head_dim, dtype,
                along ? row_seed(c, ROW_Q, id, 0, first) : row_seed(c, ROW_K, id, token, head),
                along ? 6 : 1);
    if (c->fill == DECODE_FILL_LEVELS) {
        fill_random(base, index, c->head_dim, dtype, row_seed(c, ROW_K, id, token, head), 0.5);
        for (int part = 0; part < 2; part++)
            attn_store(base, index + part, dtype, level_of(c, id, token, head, part));
    }
    if (token != special) return;
    if (c->fill == DECODE_FILL_INF_K) attn_store(base, index + 5, dtype, INFINITY);
    if (c->fill == DECODE_FILL_NAN_K) attn_store(base, index + 5, dtype, NAN);
}

static double huge_value(enum attn_dtype dtype)
{
    return dtype == ATTN_DTYPE_BF16 ? 3e38 : dtype == ATTN_DTYPE_FP16 ? 65000 : 448;
}

// Of token t in column t % head_dim: a power of two that names it among those that share the
// column.
static double token_bit(int32_t head_dim, int32_t token)
{
    return ldexp(1, token / head_dim % 8);
}

double decode_bits_mean(int32_t head_dim, int32_t start, int32_t len, int32_t d)
{
    double sum = 0;
    for (int32_t t = start; t < len; t++)
        if (t % head_dim == d) sum += token_bit(head_dim, t);
    return len > start ? sum / (len - start) : 0;
}

int32_t decode_bits_row(const struct decode_case *c, int32_t sequence, int32_t token, double *mean)
{
    const int32_t len = len_of(c, sequence);
    int32_t count = 0;
    for (int32_t d = 0; d < c->head_dim; d++) mean[d] = 0;
    for (int32_t key = token_start(c, len, token); key < len; key++) {
        if (!decode_case_sees(c, sequence, token, key)) continue;
        mean[key % c->head_dim] += token_bit(c->head_dim, key);
        count++;
    }
    for (int32_t d = 0; count > 0 && d < c->head_dim; d++) mean[d] /= count;
    return count;
}

static void fill_v_row(const struct decode_case *c, int32_t id, int32_t token, int32_t special,
                       int32_t head, void *base, int64_t index)
{
    const enum attn_dtype dtype = c->kv_dtype;
    if (c->fill == DECODE_FILL_MEAN) {
        for (int32_t d = 0; d < c->head_dim; d++)
            attn_store(base, index + d, dtype, token % 32 == d % 32 ? 32 : 0);
        return;
    }
    if (c->fill == DECODE_FILL_BITS) {
        fill_zeros(base, index, c->head_dim, dtype);
        attn_store(base, index + token % c->head_dim, dtype, token_bit(c->head_dim, token));
        return;
    }
    fill_random(base, index, c->head_dim, dtype, row_seed(c, ROW_V, id, token, head), 1);
    if (token != special) return;
    const int64_t at = index + c->head_dim / 2;
    if (c->fill == DECODE_FILL_HUGE) attn_store(base, at, dtype, huge_value(dtype));
    if (c->fill == DECODE_FILL_INF_V) attn_store(base, at, dtype, INFINITY);
    if (c->fill == DECODE_FILL_NAN_V) attn_store(base, at, dtype, NAN);
}

// ---- layout

static void set_strides(struct decode_data *data)
{
    struct attn_decode_params *const p = &data->params;
    const int64_t token = (int64_t) p->num_kv_heads * p->head_dim, page = p->page_size * token;
    const bool layer = data->c.layout == DECODE_LAYOUT_LAYER;
    const bool k_heads = data->c.layout == DECODE_LAYOUT_HND;
    const bool v_heads = k_heads || data->c.layout == DECODE_LAYOUT_MIXED;
    p->k_page_stride = p->v_page_stride = layer ? 6 * page : page;
    p->k_token_stride = k_heads ? p->head_dim : token;
    p->k_head_stride = k_heads ? (int64_t) p->page_size * p->head_dim : p->head_dim;
    p->v_token_stride = v_heads ? p->head_dim : token;
    p->v_head_stride = v_heads ? (int64_t) p->page_size * p->head_dim : p->head_dim;
    // The second of three layers.
    data->k_offset = layer ? 2 * page : 0;
    data->v_offset = layer ? 3 * page : 0;
    p->q_token_stride =
        (int64_t) (p->num_q_heads + (data->c.fused_q ? 2 * p->num_kv_heads : 0)) * p->head_dim;
    p->q_stride = p->q_len * p->q_token_stride;
}

// Pages that hold the first `keys` tokens.
static int64_t pages_before(int32_t keys, int32_t page_size)
{
    return ((int64_t) keys + page_size - 1) / page_size;
}

// Sets the sizes that follow from the lengths.
static void count_pages(struct decode_data *data)
{
    const struct decode_case *const c = &data->c;
    int64_t needed = 0, widest = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t len = len_of(c, b);
        const int64_t end = pages_before(len, c->page_size);
        needed += end - start_of(c, len) / c->page_size;
        if (end > widest) widest = end;
    }
    data->params.num_pages = needed + 3;
    data->params.max_pages_per_seq = (int32_t) widest + c->extra_columns;
    if (data->params.max_pages_per_seq < 1) data->params.max_pages_per_seq = 1;
    data->params.table_stride = data->params.max_pages_per_seq + c->extra_stride;
}

static void set_params(struct decode_data *data)
{
    const struct decode_case *const c = &data->c;
    struct attn_decode_params *const p = &data->params;
    *p = ATTN_DECODE_PARAMS_INIT;
    p->q_dtype = c->q_dtype;
    p->kv_dtype = c->kv_dtype;
    p->batch = c->batch;
    p->q_len = q_len_of(c);
    p->num_q_heads = c->num_q_heads;
    p->num_kv_heads = c->num_kv_heads;
    p->head_dim = c->head_dim;
    p->page_size = c->page_size;
    p->scale = c->scale != 0                ? c->scale
               : c->fill == DECODE_FILL_FAR ? FAR_SCALE
                                            : (float) (1 / sqrt(c->head_dim));
    p->softcap = c->softcap;
    p->window = c->window;
    p->window_form = c->window_form;
    if (c->tree != DECODE_TREE_NONE) p->mask_words = (p->q_len - 1) / 32 + 1 + c->extra_words;
    p->skip_table_length = c->skip ? c->skip_length : 0;
    if (c->k_scale != 0) p->k_scale = c->k_scale;
    if (c->v_scale != 0) p->v_scale = c->v_scale;
    p->max_decode_seqs = c->batch;
    count_pages(data);
    set_strides(data);
}

static enum attn_status size_zones(struct decode_data *data, const struct attn_device *device)
{
    const struct attn_decode_params *const p = &data->params;
    struct attn_decode_shape shape = attn_decode_shape_of(p);
    shape.has_skip_table = data->c.skip ? 1 : 0;
    struct attn_decode_plan plan = { .size = (uint32_t) sizeof(plan) };
    size_t workspace = 0;
    int32_t counters = 0;
    enum attn_status status = attn_decode_plan(device, &shape, &plan);
    if (status == ATTN_OK) status = attn_decode_workspace(device, &shape, &workspace);
    if (status == ATTN_OK) status = attn_decode_counters(device, &shape, &counters);
    if (status != ATTN_OK) return status;

    const size_t batch = (size_t) p->batch, heads = (size_t) p->num_q_heads;
    const size_t tokens = batch * (size_t) p->q_len;
    const size_t q_size = attn_dtype_size(p->q_dtype);
    const size_t pool = (size_t) (p->num_pages * p->k_page_stride) * attn_dtype_size(p->kv_dtype);
    struct canary_zone *const zones = data->zones;
    data->kernel = plan.kernel;
    zones[DECODE_ZONE_Q].bytes = batch * (size_t) p->q_stride * q_size;
    zones[DECODE_ZONE_K].bytes = pool;
    zones[DECODE_ZONE_V].bytes = data->c.layout == DECODE_LAYOUT_LAYER ? 0 : pool;
    zones[DECODE_ZONE_TABLE].bytes = batch * (size_t) p->table_stride * sizeof(int32_t);
    zones[DECODE_ZONE_V_TABLE].bytes = data->c.v_table ? zones[DECODE_ZONE_TABLE].bytes : 0;
    zones[DECODE_ZONE_MASK].bytes = tokens * (size_t) p->mask_words * sizeof(int32_t);
    zones[DECODE_ZONE_SKIP].bytes = (size_t) p->skip_table_length * sizeof(int32_t);
    zones[DECODE_ZONE_LENS].bytes = batch * sizeof(int32_t);
    zones[DECODE_ZONE_SINKS].bytes = data->c.sinks ? heads * sizeof(float) : 0;
    zones[DECODE_ZONE_K_SCALES].bytes =
        data->c.scales ? (size_t) p->num_kv_heads * sizeof(float) : 0;
    zones[DECODE_ZONE_V_SCALES].bytes = zones[DECODE_ZONE_K_SCALES].bytes;
    zones[DECODE_ZONE_O].bytes = tokens * heads * (size_t) p->head_dim * q_size;
    zones[DECODE_ZONE_LSE].bytes = data->c.lse ? tokens * heads * sizeof(float) : 0;
    zones[DECODE_ZONE_WORKSPACE].bytes = workspace;
    zones[DECODE_ZONE_COUNTERS].bytes = (size_t) counters * sizeof(int32_t);
    zones[DECODE_ZONE_FAULT].bytes = sizeof(int32_t);
    zones[DECODE_ZONE_DROPPED].bytes = data->c.skip ? sizeof(int64_t) : 0;
    for (int i = DECODE_ZONE_O; i < NUM_DECODE_ZONES; i++) zones[i].writable = 1;
    data->params.workspace_bytes = workspace;
    data->bytes = canary_lay_out(zones, NUM_DECODE_ZONES);
    return ATTN_OK;
}

// ---- all cores: the KV heads of all sequences are independent of each other

struct crew {
    const struct decode_data *data;
    void (*work)(const struct crew *crew, int32_t sequence, int32_t kv_head);
    // What checks are held to, and one of them for each KV head of each sequence.
    enum attn_check_bound bound;
    struct attn_check *checks;
    atomic_int next;
};

static void *take_work(void *arg)
{
    struct crew *const crew = arg;
    const int32_t heads = crew->data->params.num_kv_heads;
    const int32_t items = crew->data->params.batch * heads;
    int32_t i;
    while ((i = atomic_fetch_add(&crew->next, 1)) < items) crew->work(crew, i / heads, i % heads);
    return NULL;
}

// Threads that the case is worth, this one not counted.
static int count_helpers(const struct decode_data *data)
{
    const struct attn_decode_params *const p = &data->params;
    const int64_t width = (int64_t) p->max_pages_per_seq * p->page_size;
    const int32_t *const lens = decode_image(data, DECODE_ZONE_LENS);
    int64_t keys = 0;
    for (int32_t b = 0; b < p->batch; b++) keys += lens[b] < width ? lens[b] : width;
    const int64_t worth = (keys * p->q_len * p->num_q_heads * p->head_dim) >> 18;
    const int64_t items = (int64_t) p->batch * p->num_kv_heads - 1;
    const int64_t cores = sysconf(_SC_NPROCESSORS_ONLN) - 1;
    const int64_t most = items < MAX_HELPERS ? items : MAX_HELPERS;
    const int64_t useful = worth < cores ? worth : cores;
    return (int) (useful < most ? useful : most);
}

static void share_work(struct crew *crew)
{
    pthread_t helpers[MAX_HELPERS];
    const int wanted = count_helpers(crew->data);
    int count = 0;
    while (count < wanted && pthread_create(&helpers[count], NULL, take_work, crew) == 0) count++;
    take_work(crew);
    for (int i = 0; i < count; i++) pthread_join(helpers[i], NULL);
}

// ---- contents

static void fill_token(const struct decode_data *data, const struct attn_decode_params *p,
                       int32_t sequence, int32_t head, int32_t token, int32_t special)
{
    const struct decode_case *const c = &data->c;
    const int32_t id = id_of(c, sequence);
    const int64_t entry = sequence * p->table_stride + token / c->page_size;
    const int64_t k_page = p->block_table[entry];
    const int64_t v_page = p->v_block_table ? p->v_block_table[entry] : k_page;
    const int64_t slot = token % c->page_size;
    const int64_t k_row =
        k_page * p->k_page_stride + slot * p->k_token_stride + head * p->k_head_stride;
    const int64_t v_row =
        v_page * p->v_page_stride + slot * p->v_token_stride + head * p->v_head_stride;
    void *const k = decode_image(data, DECODE_ZONE_K);
    void *const v = c->layout == DECODE_LAYOUT_LAYER ? k : decode_image(data, DECODE_ZONE_V);
    fill_k_row(c, id, token, special, head, k, data->k_offset + k_row);
    fill_v_row(c, id, token, special, head, v, data->v_offset + v_row);
}

static void fill_head(const struct crew *crew, int32_t sequence, int32_t head)
{
    const struct decode_data *const data = crew->data;
    const struct decode_case *const c = &data->c;
    const struct attn_decode_params p = decode_data_params(data, data->image);
    const int32_t id = id_of(c, sequence), len = p.seq_lens[sequence];
    const int32_t special = special_key(c, id, len), ratio = c->num_q_heads / c->num_kv_heads;
    for (int32_t token = 0; token < p.q_len; token++)
        for (int32_t h = head * ratio; h < (head + 1) * ratio; h++)
            fill_q_row(c, id, c->first_token + token, h, decode_image(data, DECODE_ZONE_Q),
                       sequence * p.q_stride + token * p.q_token_stride +
                           (int64_t) h * c->head_dim);
    for (int32_t key = start_of(c, len); key < len; key++)
        if (is_seen(c, id, len, key)) fill_token(data, &p, sequence, head, key, special);
}

// Stale entries: ids of no page, or of a page that is poison or someone else's.
static int32_t stale_entry(struct random *random, int64_t num_pages)
{
    const int32_t choices[] = {
        -1,
        INT32_MAX,
        INT32_MIN,
        (int32_t) num_pages,
        (int32_t) random_below(random, (uint32_t) num_pages),
    };
    return choices[random_below(random, 5)];
}

// Whether any key of the page is attended.
static bool is_page_seen(const struct decode_case *c, int32_t id, int32_t len, int64_t column)
{
    const int64_t first = column * c->page_size, behind = first + c->page_size;
    for (int64_t key = first; key < behind && key < len; key++)
        if (is_seen(c, id, len, (int32_t) key)) return true;
    return false;
}

// A table with pages in the order of a seed.
static int fill_table(struct decode_data *data, int32_t *table, uint64_t seed)
{
    const struct decode_case *const c = &data->c;
    const int64_t num_pages = data->params.num_pages, stride = data->params.table_stride;
    int32_t *const order = malloc((size_t) num_pages * sizeof(*order));
    if (!order) return -1;

    struct random random = { seed };
    for (int32_t i = 0; i < num_pages; i++) {
        const int32_t j = (int32_t) random_below(&random, (uint32_t) i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    int64_t next = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t len = len_of(c, b);
        for (int64_t i = 0; i < stride; i++)
            table[b * stride + i] = is_page_seen(c, id_of(c, b), len, i)
                                        ? order[next++]
                                        : stale_entry(&random, num_pages);
    }
    free(order);
    return 0;
}

static int fill_tables(struct decode_data *data)
{
    const uint64_t page_seed = data->c.page_seed;
    int32_t *const lens = decode_image(data, DECODE_ZONE_LENS);
    for (int32_t b = 0; b < data->c.batch; b++) lens[b] = len_of(&data->c, b);
    if (fill_table(data, decode_image(data, DECODE_ZONE_TABLE), random_mix(page_seed, ROW_PAGES)))
        return -1;
    if (!data->c.v_table) return 0;
    return fill_table(data, decode_image(data, DECODE_ZONE_V_TABLE),
                      random_mix(page_seed, ROW_V_PAGES));
}

static void fill_mask(struct decode_data *data)
{
    const struct decode_case *const c = &data->c;
    const int32_t q_len = data->params.q_len, words = data->params.mask_words;
    uint32_t *row = decode_image(data, DECODE_ZONE_MASK);
    struct random random = { random_mix(c->page_seed, ROW_UNUSED_BITS) };
    for (int32_t b = 0; words > 0 && b < c->batch; b++)
        for (int32_t token = 0; token < q_len; token++, row += words)
            for (int32_t j = 0; j < 32 * words; j++) {
                const bool bit =
                    j < q_len ? tree_bit(c, id_of(c, b), token, j) : random_below(&random, 2) == 1;
                row[j / 32] = (row[j / 32] & ~(1u << j % 32)) | (uint32_t) bit << j % 32;
            }
}

static void fill_scalars(struct decode_data *data)
{
    const struct decode_case *const c = &data->c;
    struct random random = { random_mix(c->seed, ROW_SINKS) };
    float *const sinks = decode_image(data, DECODE_ZONE_SINKS);
    for (int32_t h = 0; c->sinks && h < c->num_q_heads; h++)
        sinks[h] = h % 5 == 4 ? -INFINITY : (float) (4 * random_uniform(&random));
    float *const k = decode_image(data, DECODE_ZONE_K_SCALES);
    float *const v = decode_image(data, DECODE_ZONE_V_SCALES);
    for (int32_t h = 0; c->scales && h < c->num_kv_heads; h++) {
        k[h] = (float) (0.75 + 0.5 * random_uniform(&random));
        v[h] = (float) (0.5 + 0.25 * random_uniform(&random));
    }
}

static int fill_image(struct decode_data *data)
{
    size_t end = 0;
    for (int i = 0; i < NUM_DECODE_ZONES; i++) {
        const struct canary_zone *const zone = &data->zones[i];
        memset(data->image + end, 0xA5, zone->offset - end);
        memset(data->image + zone->offset, data->c.poison, zone->bytes);
        end = zone->offset + zone->bytes;
    }
    memset(data->image + end, 0xA5, data->bytes - end);
    if (data->zones[DECODE_ZONE_COUNTERS].bytes > 0)
        memset(decode_image(data, DECODE_ZONE_COUNTERS), 0,
               data->zones[DECODE_ZONE_COUNTERS].bytes);
    *(int32_t *) decode_image(data, DECODE_ZONE_FAULT) = INT32_MAX;
    if (data->c.skip) {
        const int64_t first = FIRST_DROPPED;
        memcpy(decode_image(data, DECODE_ZONE_DROPPED), &first, sizeof(first));
        memcpy(decode_image(data, DECODE_ZONE_SKIP), data->c.skip,
               data->zones[DECODE_ZONE_SKIP].bytes);
    }
    if (fill_tables(data)) return -1;
    fill_mask(data);
    fill_scalars(data);
    struct crew crew = { .data = data, .work = fill_head };
    share_work(&crew);
    return 0;
}

enum attn_status decode_data_build(struct decode_data **out, const struct decode_case *c,
                                   const struct attn_device *device)
{
    *out = NULL;
    struct decode_data *data = calloc(1, sizeof(*data));
    if (!data) return ATTN_ERROR_NO_MEMORY;
    data->c = *c;
    if (data->c.q_dtype == ATTN_DTYPE_NONE) data->c.q_dtype = ATTN_DTYPE_BF16;
    if (data->c.kv_dtype == ATTN_DTYPE_NONE) data->c.kv_dtype = data->c.q_dtype;
    if (data->c.poison == 0) data->c.poison = 0xFF;
    set_params(data);
    enum attn_status status = size_zones(data, device);
    if (status != ATTN_OK) goto out;
    status = ATTN_ERROR_NO_MEMORY;
    data->image = aligned_alloc(CANARY_BYTES, data->bytes);
    data->result = aligned_alloc(CANARY_BYTES, data->bytes);
    if (!data->image || !data->result || fill_image(data)) goto out;
    *out = data;
    return ATTN_OK;
out:
    decode_data_free(&data);
    return status;
}

void decode_data_free(struct decode_data **data)
{
    if (!*data) return;
    free((*data)->image);
    free((*data)->result);
    free(*data);
    *data = NULL;
}

// ---- the call, and what came of it

static void *zone_at(const struct decode_data *data, void *base, enum decode_zone zone)
{
    return canary_zone_at(&data->zones[zone], base);
}

void *decode_image(const struct decode_data *data, enum decode_zone zone)
{
    return data->image + data->zones[zone].offset;
}

const void *decode_result(const struct decode_data *data, enum decode_zone zone)
{
    return data->result + data->zones[zone].offset;
}

struct attn_decode_params decode_data_params(const struct decode_data *data, void *base)
{
    struct attn_decode_params p = data->params;
    const int64_t size = (int64_t) attn_dtype_size(p.kv_dtype);
    uint8_t *const k = zone_at(data, base, DECODE_ZONE_K);
    uint8_t *const v =
        data->c.layout == DECODE_LAYOUT_LAYER ? k : zone_at(data, base, DECODE_ZONE_V);
    p.q = zone_at(data, base, DECODE_ZONE_Q);
    p.k_pool = k + data->k_offset * size;
    p.v_pool = v + data->v_offset * size;
    p.block_table = zone_at(data, base, DECODE_ZONE_TABLE);
    p.v_block_table = zone_at(data, base, DECODE_ZONE_V_TABLE);
    p.seq_lens = zone_at(data, base, DECODE_ZONE_LENS);
    p.tree_mask = zone_at(data, base, DECODE_ZONE_MASK);
    p.skip_table = zone_at(data, base, DECODE_ZONE_SKIP);
    p.sinks = zone_at(data, base, DECODE_ZONE_SINKS);
    p.k_scales = zone_at(data, base, DECODE_ZONE_K_SCALES);
    p.v_scales = zone_at(data, base, DECODE_ZONE_V_SCALES);
    p.o = zone_at(data, base, DECODE_ZONE_O);
    p.lse = zone_at(data, base, DECODE_ZONE_LSE);
    p.workspace = zone_at(data, base, DECODE_ZONE_WORKSPACE);
    p.counters = zone_at(data, base, DECODE_ZONE_COUNTERS);
    p.fault = zone_at(data, base, DECODE_ZONE_FAULT);
    p.dropped_blocks = zone_at(data, base, DECODE_ZONE_DROPPED);
    return p;
}

enum attn_status decode_data_run_host(struct decode_data *data, struct attn_device *device)
{
    memcpy(data->result, data->image, data->bytes);
    const struct attn_decode_params params = decode_data_params(data, data->result);
    return attn_decode(device, &params, NULL);
}

static void check_head(const struct crew *crew, int32_t sequence, int32_t head)
{
    const struct decode_data *const data = crew->data;
    const struct attn_decode_params p = decode_data_params(data, data->image);
    struct attn_check *const check = &crew->checks[(int64_t) sequence * p.num_kv_heads + head];
    const float *const lse = data->c.lse ? decode_result(data, DECODE_ZONE_LSE) : NULL;
    // Out of memory.
    if (attn_check_decode_head(&p, sequence, head, decode_result(data, DECODE_ZONE_O), lse,
                               crew->bound, check))
        check->failed++;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

// Brings one KV head's check into that of the call. What failed is worse than any ratio.
static void join_check(struct attn_check *to, const struct attn_check *from)
{
    const bool worse = from->failed > 0 && to->failed > 0 ? from->max_ratio > to->max_ratio
                                                          : from->failed > to->failed;
    if (worse || (to->failed == 0 && from->failed == 0 && from->max_ratio > to->max_ratio)) {
        to->worst_sequence = from->worst_sequence;
        to->worst_token = from->worst_token;
        to->worst_head = from->worst_head;
        to->worst_dim = from->worst_dim;
        to->worst_value = from->worst_value;
        to->worst_exact = from->worst_exact;
    }
    to->compared += from->compared;
    to->failed += from->failed;
    to->lse_failed += from->lse_failed;
    to->max_error = larger(to->max_error, from->max_error);
    to->max_ratio = larger(to->max_ratio, from->max_ratio);
    to->relative_rms = larger(to->relative_rms, from->relative_rms);
    to->lse_max_error = larger(to->lse_max_error, from->lse_max_error);
    to->lse_max_ratio = larger(to->lse_max_ratio, from->lse_max_ratio);
}

bool decode_data_check(const struct decode_data *data, enum attn_check_bound bound,
                       struct attn_check *check)
{
    const size_t count = (size_t) data->params.batch * (size_t) data->params.num_kv_heads;
    struct crew crew = { .data = data, .work = check_head, .bound = bound };
    memset(check, 0, sizeof(*check));
    crew.checks = calloc(count, sizeof(*crew.checks));
    if (!crew.checks) return false;
    share_work(&crew);
    for (size_t i = 0; i < count; i++) join_check(check, &crew.checks[i]);
    free(crew.checks);
    return check->failed == 0 && check->lse_failed == 0;
}

bool decode_data_intact(const struct decode_data *data)
{
    const size_t counters = data->zones[DECODE_ZONE_COUNTERS].bytes;
    return canary_find(data->zones, NUM_DECODE_ZONES, data->image, data->result, data->bytes) < 0 &&
           memcmp(decode_result(data, DECODE_ZONE_COUNTERS),
                  decode_image(data, DECODE_ZONE_COUNTERS), counters) == 0;
}

int32_t decode_data_fault(const struct decode_data *data)
{
    return *(const int32_t *) decode_result(data, DECODE_ZONE_FAULT);
}

int64_t decode_data_dropped(const struct decode_data *data)
{
    int64_t dropped;
    memcpy(&dropped, decode_result(data, DECODE_ZONE_DROPPED), sizeof(dropped));
    return dropped - FIRST_DROPPED;
}

int64_t decode_data_exact_dropped(const struct decode_data *data)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    int64_t all = 0;
    for (int32_t i = 0; i < p.batch * p.num_kv_heads; i++) {
        uint8_t *dropped;
        int64_t count;
        const int32_t sequence = i / p.num_kv_heads, kv_head = i % p.num_kv_heads;
        if (attn_reference_find_dropped(&p, sequence, kv_head, &dropped, &count)) return -1;
        free(dropped);
        all += count;
    }
    return all;
}

// Rows of o and lse are `count` query tokens, from a's token i and b's token j on.
static bool equal_tokens(const struct decode_data *a, int64_t i, const struct decode_data *b,
                         int64_t j, size_t count)
{
    const size_t heads = (size_t) a->params.num_q_heads, lse = heads * sizeof(float);
    const size_t o = heads * (size_t) a->params.head_dim * attn_dtype_size(a->params.q_dtype);
    const uint8_t *const o_a = decode_result(a, DECODE_ZONE_O);
    const uint8_t *const o_b = decode_result(b, DECODE_ZONE_O);
    if (memcmp(o_a + (size_t) i * o, o_b + (size_t) j * o, count * o) != 0) return false;
    if (!a->c.lse || !b->c.lse) return true;
    const uint8_t *const lse_a = decode_result(a, DECODE_ZONE_LSE);
    const uint8_t *const lse_b = decode_result(b, DECODE_ZONE_LSE);
    return memcmp(lse_a + (size_t) i * lse, lse_b + (size_t) j * lse, count * lse) == 0;
}

bool decode_data_equal(const struct decode_data *a, int32_t i, const struct decode_data *b,
                       int32_t j)
{
    const int64_t q_len = a->params.q_len;
    return equal_tokens(a, i * q_len, b, j * q_len, (size_t) q_len);
}

bool decode_data_equal_token(const struct decode_data *a, int32_t i, int32_t s,
                             const struct decode_data *b, int32_t j, int32_t t)
{
    return equal_tokens(a, (int64_t) i * a->params.q_len + s, b, (int64_t) j * b->params.q_len + t,
                        1);
}

static int64_t row_of(const struct decode_data *data, int32_t sequence, int32_t token, int32_t head)
{
    const struct attn_decode_params *const p = &data->params;
    return ((int64_t) sequence * p->q_len + token) * p->num_q_heads + head;
}

double decode_data_o(const struct decode_data *data, int32_t sequence, int32_t token, int32_t head,
                     int32_t d)
{
    const int64_t row = row_of(data, sequence, token, head);
    return attn_load(decode_result(data, DECODE_ZONE_O), row * data->params.head_dim + d,
                     data->params.q_dtype);
}

double decode_data_lse(const struct decode_data *data, int32_t sequence, int32_t token,
                       int32_t head)
{
    const float *const lse = decode_result(data, DECODE_ZONE_LSE);
    return lse[row_of(data, sequence, token, head)];
}

static const char *name_type(enum attn_dtype dtype, enum attn_dtype otherwise)
{
    const enum attn_dtype given = dtype != ATTN_DTYPE_NONE ? dtype : otherwise;
    return attn_dtype_name(given != ATTN_DTYPE_NONE ? given : ATTN_DTYPE_BF16);
}

const char *decode_case_text(const struct decode_case *c, char *text, size_t size)
{
    snprintf(text, size,
             "%s: q %s, KV %s, batch %d, heads %d/%d, head_dim %d, page %d, len %d (kind %d), "
             "q_len %d (tree %d, from %d), window %d (form %d), V table %d, skip %d, softcap %g, "
             "scales %d, sinks %d, lse %d, layout %d, fused q %d, fill %d, "
             "seed %llu",
             c->name ? c->name : "case", name_type(c->q_dtype, ATTN_DTYPE_BF16),
             name_type(c->kv_dtype, c->q_dtype), c->batch, c->num_q_heads, c->num_kv_heads,
             c->head_dim, c->page_size, c->len, (int) c->lens, q_len_of(c), (int) c->tree,
             c->first_token, c->window, (int) c->window_form, c->v_table,
             c->skip ? c->skip_length : 0, (double) c->softcap, c->scales, c->sinks, c->lse,
             (int) c->layout, c->fused_q, (int) c->fill, (unsigned long long) c->seed);
    return text;
}

const char *decode_check_text(const struct attn_check *check, char *text, size_t size)
{
    snprintf(text, size,
             "%lld of %lld elements and %lld lse beyond the bound; worst at [%d][%d][%d][%d]: "
             "%.9g for %.9g, %.3g of the bound, lse %.3g of it",
             (long long) check->failed, (long long) check->compared, (long long) check->lse_failed,
             check->worst_sequence, check->worst_token, check->worst_head, check->worst_dim,
             check->worst_value, check->worst_exact, check->max_ratio, check->lse_max_ratio);
    return text;
}

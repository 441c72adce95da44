/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_shapes.h"

#include "cli/shape.h"
#include "tests/cases/decode_cases.h"

#include <stdlib.h>
#include <string.h>

// The ragged case: lengths log-uniform in this range.
#define RAGGED_NAME "32q8 d128, 64 ragged, 128 to 64k"
#define RAGGED_BATCH 64
#define RAGGED_MIN 128.0
#define RAGGED_MAX 65536.0

#define MAX_SWEPT_BATCH 256

// Lengths of a given file: beyond that a pool no longer fits a GPU anyway.
#define MAX_LEN (1 << 28)
#define MAX_BATCH 65536

static int set_lens(struct bench_shape *const shape, const int32_t len)
{
    shape->lens = malloc(((size_t) shape->batch + 1) * sizeof(*shape->lens));
    if (!shape->lens) return -1;
    for (int32_t i = 0; i < shape->batch; i++) shape->lens[i] = len;
    shape->max_len = len;
    return 0;
}

// NULL if memory ran out.
static struct bench_shape *add_empty(struct bench_shapes *const shapes)
{
    const size_t count = (size_t) shapes->count + 1;
    struct bench_shape *const list = realloc(shapes->list, count * sizeof(*list));
    if (!list) return NULL;
    shapes->list = list;
    shapes->count++;
    memset(&list[count - 1], 0, sizeof(*list));
    return &list[count - 1];
}

static int add_ragged(struct bench_shapes *const shapes)
{
    struct random random = { 1 };
    struct bench_shape *const shape = add_empty(shapes);
    if (!shape) return -1;
    *shape = (struct bench_shape){
        .name = RAGGED_NAME,
        .q_dtype = ATTN_DTYPE_BF16,
        .kv_dtype = ATTN_DTYPE_BF16,
        .batch = RAGGED_BATCH,
        .q_len = 1,
        .num_q_heads = 32,
        .num_kv_heads = 8,
        .head_dim = 128,
        .page_size = 16,
    };
    if (set_lens(shape, 0)) return -1;
    for (int32_t i = 0; i < RAGGED_BATCH; i++) {
        shape->lens[i] =
            (int32_t) (RAGGED_MIN * pow(RAGGED_MAX / RAGGED_MIN, random_uniform(&random)));
        if (shape->lens[i] > shape->max_len) shape->max_len = shape->lens[i];
    }
    return 0;
}

static int add_shape(struct bench_shapes *const shapes, const struct decode_shape *const from,
                     const bool follows)
{
    struct bench_shape *const to = add_empty(shapes);
    if (!to) return -1;
    *to = (struct bench_shape){
        .q_dtype = from->q_dtype,
        .kv_dtype = from->kv_dtype,
        .batch = from->batch,
        .q_len = 1,
        .num_q_heads = from->num_q_heads,
        .num_kv_heads = from->num_kv_heads,
        .head_dim = from->head_dim,
        .page_size = from->page_size,
        .window = from->window,
        .follows = follows,
    };
    snprintf(to->name, sizeof(to->name), "%s", from->name);
    return set_lens(to, from->len);
}

static int add_served(struct bench_shapes *const shapes)
{
    for (int i = 0; i < NUM_DECODE_SHAPES; i++)
        if (add_shape(shapes, &decode_shapes[i], false)) return -1;
    return add_ragged(shapes);
}

static int add_pages(struct bench_shapes *const shapes)
{
    static const int32_t page_sizes[] = { 64, 1, 2, 4, 8, 16, 48 };
    for (size_t i = 0; i < sizeof(page_sizes) / sizeof(page_sizes[0]); i++) {
        char name[64];
        snprintf(name, sizeof(name), "32q8 d128 page %d, 64 x 8k", page_sizes[i]);
        const struct decode_shape shape = {
            name, 64, 32, 8, 128, page_sizes[i], 8192, 0, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16
        };
        if (add_shape(shapes, &shape, false)) return -1;
    }
    return 0;
}

static int add_batch(struct bench_shapes *const shapes)
{
    int32_t step;
    for (int32_t batch = 1; batch <= MAX_SWEPT_BATCH; batch += step) {
        char name[64];
        snprintf(name, sizeof(name), "32q8 d128, batch %d x 2k", batch);
        const struct decode_shape shape = {
            name, batch, 32, 8, 128, 16, 2048, 0, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16
        };
        if (add_shape(shapes, &shape, batch > 1)) return -1;
        step = batch < 16 ? 1 : batch / 8;
        if (batch < MAX_SWEPT_BATCH && batch + step > MAX_SWEPT_BATCH)
            step = MAX_SWEPT_BATCH - batch;
    }
    return 0;
}

static int add_ratio(struct bench_shapes *const shapes)
{
    for (int32_t ratio = 1; ratio <= 16; ratio++) {
        char name[64];
        snprintf(name, sizeof(name), "%dq8 d128, ratio %d, 64 x 4k", 8 * ratio, ratio);
        const struct decode_shape shape = {
            name, 64, 8 * ratio, 8, 128, 16, 4096, 0, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16
        };
        if (add_shape(shapes, &shape, ratio > 1)) return -1;
    }
    return 0;
}

// FP16 and pages of 128 tokens. NULL if memory ran out.
static struct bench_shape *add_fp16(struct bench_shapes *const shapes, const char *const name,
                                    const int32_t batch, const int32_t num_q_heads,
                                    const int32_t num_kv_heads, const int32_t head_dim)
{
    const struct decode_shape shape = {
        name, batch, num_q_heads, num_kv_heads,    head_dim,
        128,  8192,  0,           ATTN_DTYPE_FP16, ATTN_DTYPE_FP16
    };
    return add_shape(shapes, &shape, false) ? NULL : &shapes->list[shapes->count - 1];
}

static int add_ctm(struct bench_shapes *const shapes)
{
    static const struct {
        int32_t num_q_heads, num_kv_heads, head_dim;
    } heads[] = { { 32, 8, 128 }, { 64, 8, 64 }, { 16, 2, 256 }, { 16, 2, 512 } };
    for (size_t i = 0; i < 2 * sizeof(heads) / sizeof(heads[0]); i++) {
        const int32_t q = heads[i / 2].num_q_heads, kv = heads[i / 2].num_kv_heads;
        const int32_t dim = heads[i / 2].head_dim, batch = i % 2 ? 1 : 64;
        char name[64];
        snprintf(name, sizeof(name), "ctm %dq%d d%d, %s", q, kv, dim,
                 i % 2 ? "one, 8k" : "64 x 8k");
        struct bench_shape *const added = add_fp16(shapes, name, batch, q, kv, dim);
        if (!added) return -1;
        added->op = CASE_CTM;
    }
    return 0;
}

static int add_tree(struct bench_shapes *const shapes)
{
    static const int32_t q_lens[] = { 1, 8, 64 };
    for (size_t i = 0; i < sizeof(q_lens) / sizeof(q_lens[0]); i++) {
        char name[64];
        snprintf(name, sizeof(name), "tree of %d, 32q8 d128, 64 x 8k", q_lens[i]);
        struct bench_shape *const added = add_fp16(shapes, name, 64, 32, 8, 128);
        if (!added) return -1;
        added->q_len = q_lens[i];
        added->tree = q_lens[i] > 1 ? TREE_RANDOM : TREE_NONE;
    }
    return 0;
}

static int add_skip(struct bench_shapes *const shapes)
{
    static const double shares[] = { 0.0, 0.01, 0.25, 0.5, 0.75, 0.9 };
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        char name[64];
        snprintf(name, sizeof(name), "skip %.0f %%, 32q8 d128, 64 x 8k", 100.0 * shares[i]);
        struct bench_shape *const added = add_fp16(shapes, name, 64, 32, 8, 128);
        if (!added) return -1;
        added->has_skip = true;
        added->skip_share = shares[i];
    }
    return 0;
}

static int add_tiled(struct bench_shapes *const shapes)
{
    static const struct {
        int32_t num_q_heads, num_kv_heads, head_dim, batch;
    } cases[] = { { 32, 8, 128, 1 }, { 32, 8, 128, 17 }, { 24, 4, 256, 1 }, { 24, 4, 256, 33 } };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const int32_t q = cases[i].num_q_heads, kv = cases[i].num_kv_heads;
        const int32_t dim = cases[i].head_dim, batch = cases[i].batch;
        char name[64];
        snprintf(name, sizeof(name), "tiled %dq%d d%d, %d x 32k", q, kv, dim, batch);
        const struct decode_shape shape = {
            name, batch, q, kv, dim, 16, 32768, 0, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16
        };
        if (add_shape(shapes, &shape, false)) return -1;
        shapes->list[shapes->count - 1].op = CASE_TILED;
    }
    return 0;
}

// In the order of enum bench_set.
static const struct {
    const char *name;
    int (*add)(struct bench_shapes *shapes);
} sets[] = {
    { "default", add_served }, { "pages", add_pages }, { "batch", add_batch },
    { "ratio", add_ratio },    { "ctm", add_ctm },     { "tree", add_tree },
    { "skip", add_skip },      { "tiled", add_tiled }, { "all", NULL },
};

bool bench_shapes_read_set(const char *const text, enum bench_set *const set)
{
    for (int i = 0; i <= BENCH_SET_ALL; i++) {
        if (strcmp(text, sets[i].name)) continue;
        *set = (enum bench_set) i;
        return true;
    }
    return false;
}

int bench_shapes_make(struct bench_shapes *const shapes, const enum bench_set set, char *const why,
                      const size_t why_size)
{
    int result = 0;
    memset(shapes, 0, sizeof(*shapes));
    for (int i = 0; i < BENCH_SET_ALL && !result; i++)
        if (set == BENCH_SET_ALL || i == (int) set) result = sets[i].add(shapes);
    if (result) {
        snprintf(why, why_size, "out of memory");
        bench_shapes_free(shapes);
    }
    return result;
}

static bool read_number(const json_t *const from, const char *const key, const int64_t min,
                        const int64_t max, int32_t *const value)
{
    const json_t *const found = json_object_get(from, key);
    const json_int_t number = json_integer_value(found);
    if (!json_is_integer(found) || number < min || number > max) return false;
    *value = (int32_t) number;
    return true;
}

static bool read_dtype(const json_t *const from, const char *const key,
                       const enum attn_dtype otherwise, enum attn_dtype *const dtype)
{
    const json_t *const found = json_object_get(from, key);
    *dtype = otherwise;
    return !found || (json_is_string(found) && shape_read_dtype(json_string_value(found), dtype));
}

// NULL, or the key that is wrong.
static const char *read_lens(struct bench_shape *const shape, const json_t *const from)
{
    const json_t *const found = json_object_get(from, "len");
    int32_t len = 0;
    if (!json_is_array(found) && !read_number(from, "len", 0, MAX_LEN, &len)) return "len";
    if (set_lens(shape, len)) return "len";
    if (!json_is_array(found)) return NULL;
    if (json_array_size(found) != (size_t) shape->batch) return "len";
    for (int32_t i = 0; i < shape->batch; i++) {
        const json_t *const item = json_array_get(found, (size_t) i);
        const json_int_t number = json_integer_value(item);
        if (!json_is_integer(item) || number < 0 || number > MAX_LEN) return "len";
        shape->lens[i] = (int32_t) number;
        if (number > shape->max_len) shape->max_len = (int32_t) number;
    }
    return NULL;
}

static bool read_name(const json_t *const from, const char *const key, const char **const name)
{
    const json_t *const found = json_object_get(from, key);
    *name = json_string_value(found);
    return !found || *name;
}

static bool is_uniform(const struct bench_shape *const shape)
{
    for (int32_t i = 0; i < shape->batch; i++)
        if (shape->lens[i] != shape->max_len) return false;
    return true;
}

// What is not plain decode; NULL, or the key that is wrong.
static const char *read_extras(struct bench_shape *const shape, const json_t *const from)
{
    const json_t *const skip = json_object_get(from, "skip");
    const char *op, *tree;
    shape->q_len = 1;
    if (json_object_get(from, "q_len") &&
        !read_number(from, "q_len", 1, ATTN_DECODE_MAX_Q_LEN, &shape->q_len))
        return "q_len";
    if (!read_name(from, "tree", &tree) || (tree && !tree_read_kind(tree, &shape->tree)))
        return "tree";
    if (!read_name(from, "op", &op)) return "op";
    shape->op = op && !strcmp(op, "ctm")     ? CASE_CTM
                : op && !strcmp(op, "tiled") ? CASE_TILED
                                             : CASE_DECODE;
    if (op && strcmp(op, case_op_name(shape->op))) return "op";
    if (shape->op == CASE_TILED) {
        if (shape->kv_dtype != shape->q_dtype) return "kv_dtype";
        if (shape->window) return "window";
        if (shape->q_len > 1) return "q_len";
        if (skip) return "skip";
    }
    const bool fp16 = shape->q_dtype == ATTN_DTYPE_FP16;
    if (shape->op == CASE_CTM) {
        if (!fp16) return "q_dtype";
        if (shape->page_size != ATTN_CTM_PAGE_SIZE) return "page_size";
        if (shape->q_len > 1 && shape->tree == TREE_NONE) return "tree";
    }
    if (!skip) return NULL;
    shape->has_skip = true;
    shape->skip_share = json_number_value(skip);
    const bool taken = fp16 && shape->kv_dtype == ATTN_DTYPE_FP16 && !shape->window &&
                       shape->q_len == 1 && shape->page_size == ATTN_SKIP_KEYS;
    if (!json_is_number(skip) || !taken || !is_uniform(shape) || shape->max_len % BENCH_SKIP_KEYS ||
        shape->skip_share < 0.0 || shape->skip_share > BENCH_MAX_SKIP)
        return "skip";
    return NULL;
}

static const char *read_shape(struct bench_shape *const shape, const json_t *const from)
{
    const char *const name = json_string_value(json_object_get(from, "name"));
    if (!name) return "name";
    snprintf(shape->name, sizeof(shape->name), "%s", name);
    if (!read_number(from, "batch", 1, MAX_BATCH, &shape->batch)) return "batch";
    if (!read_number(from, "num_q_heads", 1, 4096, &shape->num_q_heads)) return "num_q_heads";
    if (!read_number(from, "num_kv_heads", 1, 4096, &shape->num_kv_heads)) return "num_kv_heads";
    if (shape->num_q_heads % shape->num_kv_heads) return "num_kv_heads";
    if (!read_number(from, "head_dim", 1, 4096, &shape->head_dim)) return "head_dim";
    if (!read_number(from, "page_size", 1, 65536, &shape->page_size)) return "page_size";
    if (json_object_get(from, "window") &&
        !read_number(from, "window", 0, INT32_MAX, &shape->window))
        return "window";
    if (!read_dtype(from, "q_dtype", ATTN_DTYPE_BF16, &shape->q_dtype)) return "q_dtype";
    if (!read_dtype(from, "kv_dtype", shape->q_dtype, &shape->kv_dtype)) return "kv_dtype";
    const char *const wrong = read_lens(shape, from);
    if (wrong) return wrong;
    return read_extras(shape, from);
}

int bench_shapes_load(struct bench_shapes *const shapes, const char *const path, char *const why,
                      const size_t why_size)
{
    json_error_t error;
    int result = -1;
    json_t *const document = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    memset(shapes, 0, sizeof(*shapes));
    if (!document) {
        snprintf(why, why_size, "%s: %s (line %d)", path, error.text, error.line);
        return -1;
    }
    if (!json_array_size(document)) {
        snprintf(why, why_size, "%s: an array of at least one shape is needed", path);
        goto out;
    }
    shapes->list = calloc(json_array_size(document), sizeof(*shapes->list));
    if (!shapes->list) {
        snprintf(why, why_size, "out of memory");
        goto out;
    }
    for (size_t i = 0; i < json_array_size(document); i++) {
        const char *const key =
            read_shape(&shapes->list[shapes->count++], json_array_get(document, i));
        if (!key) continue;
        snprintf(why, why_size,
                 "%s: shape %zu: '%s' is missing, of the wrong kind, or out of range", path, i,
                 key);
        goto out;
    }
    result = 0;
out:
    json_decref(document);
    if (result) bench_shapes_free(shapes);
    return result;
}

void bench_shapes_free(struct bench_shapes *const shapes)
{
    for (int i = 0; i < shapes->count && shapes->list; i++) free(shapes->list[i].lens);
    free(shapes->list);
    memset(shapes, 0, sizeof(*shapes));
}

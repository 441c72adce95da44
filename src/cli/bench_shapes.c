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

static int make_ragged(struct bench_shape *const shape)
{
    struct random random = { 1 };
    *shape = (struct bench_shape){
        .name = RAGGED_NAME,
        .q_dtype = ATTN_DTYPE_BF16,
        .kv_dtype = ATTN_DTYPE_BF16,
        .batch = RAGGED_BATCH,
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

int bench_shapes_default(struct bench_shapes *const shapes, char *const why, const size_t why_size)
{
    int result = 0;
    shapes->count = NUM_DECODE_SHAPES + 1;
    shapes->list = calloc((size_t) shapes->count, sizeof(*shapes->list));
    if (!shapes->list) result = -1;
    for (int i = 0; i < NUM_DECODE_SHAPES && !result; i++) {
        const struct decode_shape *const from = &decode_shapes[i];
        struct bench_shape *const to = &shapes->list[i];
        *to = (struct bench_shape){
            .q_dtype = ATTN_DTYPE_BF16,
            .kv_dtype = ATTN_DTYPE_BF16,
            .batch = from->batch,
            .num_q_heads = from->num_q_heads,
            .num_kv_heads = from->num_kv_heads,
            .head_dim = from->head_dim,
            .page_size = from->page_size,
            .window = from->window,
        };
        snprintf(to->name, sizeof(to->name), "%s", from->name);
        result = set_lens(to, from->len);
    }
    if (!result) result = make_ragged(&shapes->list[NUM_DECODE_SHAPES]);
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
    return read_lens(shape, from);
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

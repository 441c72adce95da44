/* SPDX-License-Identifier: Apache-2.0 */
// Prefill kernels against the definition, within the bound of include/attn/decode.h, on sampled
// rows, with guards around every buffer and NaN in all that nobody sees; and the bits that have to
// be equal: twins and originals, contiguous and paged, whole and in chunks, alone and in a batch.
#include "device.h"
#include "tests/support/decode_gpu.h"
#include "tests/support/prefill_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    MAX_KERNELS = 256,
    // Rows held against the definition: of a small case, and of one with thousands of keys.
    ROWS = 200,
    FEW_ROWS = 60,
};

struct kind {
    enum attn_dtype dtype;
    int32_t head_dim;
};

static const struct kind kinds[] = {
    { ATTN_DTYPE_BF16, 64 },  { ATTN_DTYPE_BF16, 128 }, { ATTN_DTYPE_BF16, 256 },
    { ATTN_DTYPE_BF16, 512 }, { ATTN_DTYPE_FP16, 64 },  { ATTN_DTYPE_FP16, 128 },
    { ATTN_DTYPE_FP16, 256 }, { ATTN_DTYPE_FP16, 512 },
};

static struct gpu_session session;
static bool used[MAX_KERNELS];

static void set_up(void)
{
    unsetenv("METRALE_NO_ATTN_FA128");
    gpu_session_open(&session, 0);
}

static void tear_down(void)
{
    gpu_session_close(&session);
}

TestSuite(gpu_prefill, .init = set_up, .fini = tear_down);

// ---- running

static prefill_entry original_of(const struct prefill_data *data)
{
    return data->c.page_size ? attn_prefill_paged_64 : attn_prefill_64;
}

static prefill_entry twin_of(const struct prefill_data *data)
{
    return data->c.page_size ? attn_prefill_fa128_paged : attn_prefill_fa128;
}

static bool has_kernel(const struct kind *kind, int32_t rows)
{
    const struct attn_pack *const pack = session.device->pack;
    for (uint32_t i = 0; i < pack->num_rows; i++) {
        const struct attn_pack_row *const row = &pack->rows[i];
        if (row->op == ATTN_ROW_PREFILL && row->q == (int32_t) kind->dtype &&
            row->head_dim == kind->head_dim && row->rows == rows)
            return true;
    }
    return false;
}

// Notes the kernel that a call of the entry takes.
static void note_kernel(const struct prefill_data *data, prefill_entry entry)
{
    struct attn_prefill_shape shape = attn_prefill_shape_of(&data->params);
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    const char *name;
    shape.is_ragged = data->c.ragged;
    shape.rows = entry == original_of(data) ? 64 : entry == twin_of(data) ? 128 : 0;
    cr_assert_eq(attn_prefill_plan(session.device, &shape, &plan), ATTN_OK, "%s",
                 attn_last_error());
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(session.device, i)); i++)
        if (strcmp(name, plan.kernel) == 0) used[i] = true;
}

static struct prefill_data *need(const struct prefill_case *c)
{
    struct prefill_data *const data = prefill_data_build(c);
    cr_assert_not_null(data, "%s: out of memory", c->name);
    return data;
}

// The image in GPU memory.
static void *need_upload(const struct prefill_data *data)
{
    void *memory;
    cr_assert_eq(gpu_alloc(session.gpu, &memory, data->bytes), 0, "%s: %zu bytes", data->c.name,
                 data->bytes);
    cr_assert_eq(gpu_upload(session.gpu, memory, data->image, data->bytes), 0);
    return memory;
}

static void fetch(struct prefill_data *data, const void *memory)
{
    cr_assert_eq(gpu_stream_sync(session.gpu, session.stream), 0, "%s", data->c.name);
    cr_assert_eq(gpu_download(session.gpu, data->result, memory, data->bytes), 0);
}

static void run(struct prefill_data *data, prefill_entry entry)
{
    void *const memory = need_upload(data);
    const struct attn_prefill_params params = prefill_data_params(data, memory);
    const enum attn_status status = entry(session.device, &params, session.stream);
    cr_assert_eq(status, ATTN_OK, "%s: %s: %s", data->c.name, attn_status_name(status),
                 attn_last_error());
    fetch(data, memory);
    gpu_free(session.gpu, memory);
    cr_expect(prefill_data_intact(data), "%s wrote where it should not", data->c.name);
}

static void format_case(const struct prefill_data *data, char *text, size_t size)
{
    const struct prefill_case *const c = &data->c;
    snprintf(text, size,
             "%s, %s, %d/%d heads of %d, batch %d%s, first %d tokens at %d of %d keys, page %d, "
             "window %d, softcap %g%s%s%s, fill %d, seed %llu",
             c->name, attn_dtype_name(c->dtype), c->num_q_heads, c->num_kv_heads, c->head_dim,
             c->batch, c->ragged ? " ragged" : "", data->sequences[0].q_len,
             data->sequences[0].q_offset, data->sequences[0].kv_len, c->page_size, c->window,
             (double) c->softcap, c->not_causal ? ", not causal" : "", c->sinks ? ", sinks" : "",
             c->strided ? ", strided" : "", (int) c->fill, (unsigned long long) c->seed);
}

static void expect_right(struct prefill_data *data, int32_t rows)
{
    char text[512], found[512];
    struct attn_check check;
    format_case(data, text, sizeof(text));
    cr_expect(prefill_data_check(data, rows, ATTN_CHECK_KERNEL, &check), "%s: %s", text,
              prefill_check_text(&check, found, sizeof(found)));
    cr_expect_eq(prefill_data_fault(data), INT32_MAX, "%s: fault %d", text,
                 prefill_data_fault(data));
}

static void expect_all_equal(const struct prefill_data *a, const struct prefill_data *b,
                             const char *what)
{
    char text[512];
    format_case(b, text, sizeof(text));
    const int64_t differences = prefill_count_all_differences(a, b);
    cr_expect_eq(differences, 0, "%s: %s: %lld values differ", text, what, (long long) differences);
}

// By attn_prefill against the definition, and by the original: equal bits.
static void expect_case(const struct prefill_case *c, int32_t rows)
{
    struct prefill_data *data = need(c);
    run(data, attn_prefill);
    expect_right(data, rows);
    note_kernel(data, attn_prefill);
    if (!c->ragged) {
        struct prefill_data *other = need(c);
        run(other, original_of(other));
        expect_all_equal(data, other, "original");
        note_kernel(other, original_of(other));
        prefill_data_free(&other);
    }
    prefill_data_free(&data);
}

// ---- against the definition

static const struct prefill_sequence uniform[][3] = {
    { { 1, 1, 1, 0 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 64, 64, 0 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 129, 200, 71 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 300, 1111, 811 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    // Fewer and more keys than positions, and tokens before the first.
    { { 1, 200, 150, 10 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 130, 700, 100 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 190, 400, -70 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    { { 1, 77, 0, 0 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
};

static const struct prefill_sequence ragged[] = {
    { 1, 1, 1, 0 },      { 2, 0, 40, 3 },     { 3, 65, 300, 235 }, { 4, 128, 128, 0 },
    { 5, 127, 500, 9 },  { 6, 3, 0, 0 },      { 7, 200, 190, 0 },  { 8, 64, 900, 836 },
    { 9, 1, 1000, 999 }, { 10, 63, 64, -30 },
};

static const int32_t page_sizes[] = { 0, 16, 1, 3, 24, 32, 64, 128, 100, 256 };
static const int32_t windows[] = { 0, 1, 63, 64, 65, 200, 5000 };
static const int32_t heads[][2] = { { 4, 2 }, { 3, 3 }, { 6, 1 }, { 5, 1 }, { 16, 2 }, { 8, 1 } };

static struct prefill_case vary(const struct kind *kind, size_t n)
{
    return (struct prefill_case){
        .dtype = kind->dtype,
        .head_dim = kind->head_dim,
        .num_q_heads = heads[n % COUNT(heads)][0],
        .num_kv_heads = heads[n % COUNT(heads)][1],
        .page_size = page_sizes[n % COUNT(page_sizes)],
        .window = windows[n / 2 % COUNT(windows)],
        .not_causal = n % 3 == 2,
        .softcap = n % 4 == 1 ? 5 : 0,
        .sinks = n % 5 < 2,
        .strided = n % 7 < 3,
        .seed = random_seed(61) + n,
        .page_seed = n,
    };
}

static void expect_uniform(const struct kind *kind)
{
    for (size_t n = 0; n < 5 * COUNT(uniform); n++) {
        struct prefill_case c = vary(kind, n);
        c.name = "uniform";
        c.batch = 1 + (int32_t) (n / 2 % 3);
        c.sequences = uniform[n % COUNT(uniform)];
        c.fill = (enum prefill_fill)(n / 3 % NUM_PREFILL_FILLS);
        expect_case(&c, ROWS);
    }
}

static void expect_ragged(const struct kind *kind)
{
    for (size_t n = 0; n < 2 * COUNT(page_sizes); n++) {
        struct prefill_case c = vary(kind, n);
        c.name = "ragged";
        c.batch = COUNT(ragged);
        c.sequences = ragged;
        c.ragged = true;
        c.fill = (enum prefill_fill)(n % NUM_PREFILL_FILLS);
        expect_case(&c, ROWS);
    }
}

Test(gpu_prefill, agrees_with_the_definition, .timeout = 600)
{
    for (size_t i = 0; i < COUNT(kinds); i++) {
        expect_uniform(&kinds[i]);
        expect_ragged(&kinds[i]);
    }
    const char *name;
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(session.device, i)); i++)
        if (strncmp(name, "prefill", 7) == 0) cr_expect(used[i], "no case has run %s", name);
}

Test(gpu_prefill, serves_long_sequences, .timeout = 300)
{
    static const struct prefill_sequence sequences[] = { { 1, 2100, 20011, 17911 } };
    for (size_t i = 0; i < COUNT(kinds); i++)
        for (int32_t n = 0; n < 3; n++) {
            struct prefill_case c = vary(&kinds[i], (size_t) n + 1);
            c.name = "long";
            c.num_q_heads = 2;
            c.num_kv_heads = 1;
            c.window = n == 2 ? 9001 : 0;
            c.batch = 1;
            c.sequences = sequences;
            c.fill = n == 1 ? PREFILL_FILL_PEAKED : PREFILL_FILL_ONES;
            expect_case(&c, FEW_ROWS);
        }
}

Test(gpu_prefill, refuses_what_has_no_kernel)
{
    static const int32_t dims[] = { 16, 32, 80, 96, 192, 320 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        const struct prefill_case c = { .name = "no kernel",
                                        .num_q_heads = 1,
                                        .num_kv_heads = 1,
                                        .head_dim = dims[i],
                                        .batch = 1,
                                        .sequences = uniform[1] };
        struct prefill_data *data = need(&c);
        const struct attn_prefill_params params = prefill_data_params(data, data->image);
        cr_expect_eq(attn_prefill(session.device, &params, session.stream), ATTN_ERROR_UNSUPPORTED);
        cr_expect_eq(attn_prefill_fa128(session.device, &params, session.stream), ATTN_DECLINED);
        prefill_data_free(&data);
    }
}

// ---- twins and originals

// Breaks the image before it is run.
typedef void (*spoil_image)(struct prefill_data *data);

static void expect_twin_equal(const struct prefill_case *c, spoil_image spoil, int32_t rows)
{
    struct prefill_data *twin = need(c), *original = need(c);
    if (spoil) spoil(twin);
    if (spoil) spoil(original);
    run(twin, twin_of(twin));
    run(original, original_of(original));
    expect_all_equal(twin, original, "twin");
    if (rows > 0) expect_right(twin, rows);
    prefill_data_free(&twin);
    prefill_data_free(&original);
}

// The original's cases: q_len, q_offset, query heads, KV heads, page size.
static const int32_t microtest[][5] = {
    { 8200, 0, 16, 2, 16 },   { 8200, 16392, 16, 2, 16 }, { 1000, 0, 24, 4, 16 },
    { 777, 5000, 24, 4, 16 }, { 300, 0, 16, 2, 16 },      { 65, 130, 16, 2, 16 },
    { 777, 5000, 16, 2, 32 }, { 777, 5000, 16, 2, 24 },
};

static void expect_microtest(const int32_t numbers[5], enum attn_dtype dtype)
{
    const int32_t keys = numbers[0] + numbers[1];
    const struct prefill_sequence paged = { 1, numbers[0], keys, numbers[1] };
    const struct prefill_sequence contiguous = { 1, numbers[0], numbers[0], 0 };
    struct prefill_case c = {
        .name = "microtest",
        .dtype = dtype,
        .num_q_heads = numbers[2],
        .num_kv_heads = numbers[3],
        .head_dim = ATTN_PREFILL_FA128_HEAD_DIM,
        .batch = 1,
        .sequences = &paged,
        .page_size = numbers[4],
        .seed = random_seed(62),
        .page_seed = 3,
    };
    expect_twin_equal(&c, NULL, FEW_ROWS);
    c.page_size = 0;
    c.sequences = &contiguous;
    expect_twin_equal(&c, NULL, FEW_ROWS);
}

Test(gpu_prefill, twins_have_the_bits_of_originals, .timeout = 600)
{
    for (size_t i = 0; i < COUNT(microtest); i++) {
        expect_microtest(microtest[i], ATTN_DTYPE_BF16);
        if (microtest[i][0] < 8200) expect_microtest(microtest[i], ATTN_DTYPE_FP16);
    }
}

// NaN, infinities, denormals and the largest numbers, in K, V and Q.
static void spoil_values(struct prefill_data *data)
{
    static const double values[] = { NAN, INFINITY, -INFINITY, 1e-40, -3e38, 3e38, 1e-7, 0 };
    struct random random = { 5 };
    for (int i = 0; i < 24; i++) {
        const int32_t b = (int32_t) random_below(&random, (uint32_t) data->c.batch);
        const struct prefill_sequence *const s = &data->sequences[b];
        const int32_t h = (int32_t) random_below(&random, (uint32_t) data->c.num_kv_heads);
        const int32_t d = (int32_t) random_below(&random, (uint32_t) data->c.head_dim);
        const int32_t end = s->q_offset + s->q_len < s->kv_len ? s->q_offset + s->q_len : s->kv_len;
        const int32_t key = (int32_t) random_below(&random, (uint32_t) end);
        const int32_t token = (int32_t) random_below(&random, (uint32_t) s->q_len);
        const int64_t q_at = (data->first_token[b] + token) * data->params.q_token_stride + d;
        // A third each, so that most rows stay finite.
        if (i % 3 == 0)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_K),
                       prefill_key_at(data, b, key, h, false) + d, data->c.dtype, values[i / 3]);
        if (i % 3 == 1)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_V),
                       prefill_key_at(data, b, key, h, true) + d, data->c.dtype, values[i / 3]);
        if (i % 3 == 2)
            attn_store(prefill_zone(data, data->image, PREFILL_ZONE_Q), q_at, data->c.dtype,
                       values[i / 3]);
    }
}

Test(gpu_prefill, twins_have_the_bits_beyond_the_microtest, .timeout = 300)
{
    static const struct prefill_sequence shapes[][3] = {
        { { 1, 1, 1, 0 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
        { { 1, 64, 1000, 936 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
        { { 1, 65, 300, 200 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
        { { 1, 500, 400, 10 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
        { { 1, 257, 3000, 100 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
        { { 1, 193, 777, 800 }, { 2, 0, 0, 0 }, { 3, 0, 0, 0 } },
    };
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (int n = 0; n < 8; n++) {
            const struct prefill_case c = {
                .name = "beyond",
                .dtype = n % 2 ? ATTN_DTYPE_FP16 : ATTN_DTYPE_BF16,
                .num_q_heads = 4,
                .num_kv_heads = n % 4 < 2 ? 4 : 2,
                .head_dim = ATTN_PREFILL_FA128_HEAD_DIM,
                .batch = 1 + n % 3,
                .sequences = shapes[i],
                .page_size = n % 3 == 0   ? 0
                             : n % 3 == 1 ? 16
                                          : 20,
                .sinks = n % 2,
                .softcap = n == 5 ? 20 : 0,
                .scale = n == 6   ? -0.3f
                         : n == 7 ? 3
                                  : 0,
                .fill = n % 4 == 3 ? PREFILL_FILL_HUGE : (enum prefill_fill)(n % 3),
                .seed = random_seed(63) + (uint64_t) n,
            };
            expect_twin_equal(&c, NULL, ROWS);
            expect_twin_equal(&c, spoil_values, 0);
        }
}

// ---- the same bits however a sequence is laid out, cut and accompanied

enum {
    WHOLE = 700,
    KEYS = 900
};

static const struct prefill_sequence whole = { 9, WHOLE, KEYS, KEYS - WHOLE };

static struct prefill_case whole_case(const struct kind *kind)
{
    return (struct prefill_case){
        .name = "whole",
        .dtype = kind->dtype,
        .num_q_heads = 4,
        .num_kv_heads = 2,
        .head_dim = kind->head_dim,
        .batch = 1,
        .sequences = &whole,
        .seed = random_seed(64),
    };
}

static void expect_pages(const struct kind *kind, int32_t window)
{
    struct prefill_case c = whole_case(kind);
    c.window = window;
    struct prefill_data *base = need(&c);
    run(base, attn_prefill);
    expect_right(base, ROWS);
    for (size_t i = 0; i < COUNT(page_sizes); i++)
        for (int n = 0; n < 3; n++) {
            c.page_size = page_sizes[i];
            c.page_seed = i + 1;
            c.ragged = n == 1;
            c.strided = n == 2;
            struct prefill_data *other = need(&c);
            run(other, attn_prefill);
            expect_all_equal(base, other, "layout");
            prefill_data_free(&other);
        }
    prefill_data_free(&base);
}

// Chunks see keys of their own only as far as they reach.
static void expect_chunks(const struct kind *kind, int32_t window, const int32_t *cuts, size_t num)
{
    struct prefill_case c = whole_case(kind);
    c.window = window;
    struct prefill_data *base = need(&c);
    run(base, attn_prefill);
    int32_t first = 0;
    for (size_t i = 0; i < num; i++) {
        const int32_t end = WHOLE - first < cuts[i] ? WHOLE : first + cuts[i];
        const struct prefill_sequence part = { whole.id, end - first, whole.q_offset + end,
                                               whole.q_offset + first };
        c.name = "chunk";
        c.sequences = &part;
        c.page_size = i % 3 == 0 ? 16 : i % 3 == 1 ? 0 : 40;
        struct prefill_data *chunk = need(&c);
        run(chunk, attn_prefill);
        const int64_t found = prefill_count_differences(base, 0, first, chunk, 0, 0, part.q_len);
        cr_expect_eq(found, 0, "%s, %d, window %d: chunk of %d at %d: %lld values differ",
                     attn_dtype_name(kind->dtype), kind->head_dim, window, part.q_len, first,
                     (long long) found);
        prefill_data_free(&chunk);
        first = end;
        if (first == WHOLE) break;
    }
    cr_expect_eq(first, WHOLE);
    prefill_data_free(&base);
}

Test(gpu_prefill, has_the_same_bits_in_pages_and_chunks, .timeout = 300)
{
    static const int32_t cuts[][8] = { { 248, 129, 323 },
                                       { 1, 63, 64, 65, 128, 200, 179 },
                                       { 640, 60 },
                                       { 7, 693 } };
    for (size_t i = 0; i < COUNT(kinds); i++)
        for (int window = 0; window < 400; window += 150) {
            expect_pages(&kinds[i], window);
            for (size_t n = 0; n < COUNT(cuts); n++)
                expect_chunks(&kinds[i], window, cuts[n], COUNT(cuts[n]));
        }
}

enum {
    COMPANY = 128
};

// Lengths log-uniform, in random order; the neighbours are full of NaN where nobody looks.
Test(gpu_prefill, has_the_same_bits_alone_and_in_company, .timeout = 300)
{
    static struct prefill_sequence sequences[COMPANY];
    for (size_t i = 0; i < COUNT(kinds); i++) {
        struct random random = { random_seed(65) + i };
        for (int32_t b = 0; b < COMPANY; b++) {
            const double u = 0.5 * (random_uniform(&random) + 1);
            const int32_t keys = (int32_t) pow(3000, u);
            const int32_t tokens = 1 + (int32_t) random_below(&random, (uint32_t) keys);
            sequences[b] = (struct prefill_sequence){ (uint64_t) b, tokens, keys, keys - tokens };
        }
        struct prefill_case c = whole_case(&kinds[i]);
        c.name = "company";
        c.ragged = true;
        c.batch = COMPANY;
        c.sequences = sequences;
        c.page_size = i % 2 ? 16 : 0;
        struct prefill_data *all = need(&c);
        run(all, attn_prefill);
        expect_right(all, ROWS);
        for (int32_t b = 0; b < COMPANY; b += 9) {
            c.batch = 1;
            c.sequences = &sequences[b];
            c.ragged = b % 2;
            struct prefill_data *alone = need(&c);
            run(alone, attn_prefill);
            const int64_t found =
                prefill_count_differences(all, b, 0, alone, 0, 0, sequences[b].q_len);
            cr_expect_eq(found, 0, "%s, %d: sequence %d of %d keys: %lld values differ",
                         attn_dtype_name(kinds[i].dtype), kinds[i].head_dim, b, sequences[b].kv_len,
                         (long long) found);
            prefill_data_free(&alone);
        }
        prefill_data_free(&all);
    }
}

// ---- pages beyond 32 bits

// The pages of a call on the last pages of a pool of over 2^33 bytes, `stride` bytes apart (0: one
// after the other).
static void expect_high_pages(const struct kind *kind, int32_t page_size, size_t stride)
{
    struct prefill_case c = whole_case(kind);
    c.name = "high pages";
    c.page_size = page_size;
    struct prefill_data *low = need(&c), *high = need(&c);
    run(low, attn_prefill);
    const struct attn_prefill_params *const p = &high->params;
    const size_t page = (size_t) p->k_page_stride * 2;
    if (stride == 0) stride = page;
    const int64_t pages = (int64_t) ((((size_t) 17 << 29) + stride - 1) / stride);
    void *pools[2];
    for (int i = 0; i < 2; i++) {
        const uint8_t *const from =
            prefill_zone(high, high->image, i ? PREFILL_ZONE_V : PREFILL_ZONE_K);
        cr_assert_eq(gpu_alloc(session.gpu, &pools[i], (size_t) pages * stride), 0);
        cr_assert_eq(gpu_fill(session.gpu, pools[i], 0xFF, (size_t) pages * stride), 0);
        for (int64_t n = 0; n < p->num_pages; n++)
            cr_assert_eq(gpu_upload(session.gpu,
                                    (uint8_t *) pools[i] +
                                        (size_t) (pages - p->num_pages + n) * stride,
                                    from + (size_t) n * page, page),
                         0);
    }
    int32_t *const table = prefill_table_at(high, 0, 0);
    for (int32_t i = 0; i < p->max_pages_per_seq; i++)
        if (table[i] >= 0 && table[i] < p->num_pages) table[i] += (int32_t) (pages - p->num_pages);
    void *const memory = need_upload(high);
    struct attn_prefill_params params = prefill_data_params(high, memory);
    params.k = pools[0];
    params.v = pools[1];
    params.num_pages = pages;
    params.k_page_stride = params.v_page_stride = (int64_t) (stride / 2);
    cr_assert_eq(attn_prefill(session.device, &params, session.stream), ATTN_OK, "%s",
                 attn_last_error());
    fetch(high, memory);
    expect_all_equal(low, high, "high pages");
    cr_expect_eq(prefill_data_fault(high), INT32_MAX);
    for (int i = 0; i < 2; i++) gpu_free(session.gpu, pools[i]);
    gpu_free(session.gpu, memory);
    prefill_data_free(&low);
    prefill_data_free(&high);
}

Test(gpu_prefill, reads_pages_beyond_32_bits, .timeout = 300)
{
    const struct kind wide = { ATTN_DTYPE_BF16, 256 }, narrow = { ATTN_DTYPE_FP16, 64 };
    expect_high_pages(&wide, 16, 0);
    expect_high_pages(&wide, 24, 0);
    expect_high_pages(&narrow, 1, 0);
    expect_high_pages(&narrow, 128, 0);
    // A layer of an allocation of 80.
    expect_high_pages(&wide, 16, 1435968);
}

// ---- bad data

// The smallest faulty sequence, as the host executor finds it; o and lse too.
static int32_t run_on_host(struct prefill_data *data)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *host;
    open.kind = ATTN_DEVICE_HOST;
    cr_assert_eq(attn_device_open(&host, &open), ATTN_OK);
    memcpy(data->result, data->image, data->bytes);
    const struct attn_prefill_params params = prefill_data_params(data, data->result);
    cr_assert_eq(attn_prefill(host, &params, NULL), ATTN_OK, "%s", attn_last_error());
    attn_device_close(&host);
    return prefill_data_fault(data);
}

static int32_t pick_wild(struct random *random, int32_t most)
{
    switch (random_below(random, 8)) {
    case 0: return INT32_MIN;
    case 1: return INT32_MAX;
    case 2: return -1 - (int32_t) random_below(random, 100);
    case 3: return most + (int32_t) random_below(random, 3);
    default: return (int32_t) random_below(random, (uint32_t) most + 1);
    }
}

// Sequences keep their tokens: the rows of each can be compared.
static void spoil_lists(struct prefill_data *data, struct random *random)
{
    int32_t *const kv_lens = prefill_zone(data, data->image, PREFILL_ZONE_KV_LENS);
    int32_t *const starts = prefill_zone(data, data->image, PREFILL_ZONE_KV_STARTS);
    int32_t *const table = prefill_zone(data, data->image, PREFILL_ZONE_TABLE);
    const int64_t entries = data->c.page_size ? data->c.batch * data->params.table_stride : 0;
    const int32_t keys = data->c.page_size ? data->params.max_pages_per_seq * data->c.page_size
                                           : data->params.num_kv_tokens;
    for (int32_t b = 0; b < data->c.batch; b++) {
        if (random_below(random, 4) == 0) kv_lens[b] = pick_wild(random, keys);
        if (starts && random_below(random, 4) == 0)
            starts[b] = pick_wild(random, data->params.num_kv_tokens);
    }
    for (int64_t i = 0; i < entries; i++)
        if (random_below(random, 8) == 0)
            table[i] = pick_wild(random, (int32_t) data->params.num_pages);
}

// Whether entries that fall have given sequences more query tokens together than there are.
static bool has_shared_tokens(const struct prefill_data *data)
{
    const struct attn_prefill_params params = prefill_data_params(data, data->image);
    int64_t tokens = 0;
    for (int32_t b = 0; b < data->c.batch; b++)
        tokens += attn_reference_prefill_span(&params, b).q_len;
    return tokens > data->params.num_tokens;
}

// Runs on what a memory full of accidents has; finite numbers wherever keys may come from.
static void expect_accident(const struct prefill_case *c, uint64_t seed, bool spoil_tokens)
{
    struct random random = { seed };
    struct prefill_data *data = need(c);
    struct attn_check check;
    char text[512];
    int32_t *const cu_seqlens = prefill_zone(data, data->image, PREFILL_ZONE_CU_SEQLENS);
    for (int z = PREFILL_ZONE_K; z <= PREFILL_ZONE_V; z++)
        memset(prefill_zone(data, data->image, (enum prefill_zone) z), 0x3C, data->zones[z].bytes);
    spoil_lists(data, &random);
    data->has_other_tokens = spoil_tokens;
    for (int32_t b = 0; spoil_tokens && b <= c->batch; b++)
        if (random_below(&random, 5) == 0)
            cu_seqlens[b] = pick_wild(&random, data->params.num_tokens);
    const int32_t fault = run_on_host(data);
    run(data, attn_prefill);
    const int32_t found = prefill_data_fault(data);
    cr_expect(has_shared_tokens(data) ? found >= fault && found < c->batch : found == fault,
              "seed %llu: fault %d, not %d", (unsigned long long) seed, found, fault);
    if (!spoil_tokens)
        cr_expect(prefill_data_check(data, 2 * ROWS, ATTN_CHECK_KERNEL, &check), "seed %llu: %s",
                  (unsigned long long) seed, prefill_check_text(&check, text, sizeof(text)));
    prefill_data_free(&data);
}

Test(gpu_prefill, survives_bad_tables_and_lengths, .timeout = 600)
{
    for (uint64_t seed = random_seed(66), end = seed + 64; seed < end; seed++) {
        struct prefill_case c = vary(&kinds[seed % COUNT(kinds)], seed);
        c.name = "accident";
        c.batch = COUNT(ragged);
        c.sequences = ragged;
        c.ragged = true;
        c.num_q_heads = 2;
        c.num_kv_heads = 1;
        expect_accident(&c, seed, seed % 3 == 0);
    }
}

// A NaN that some token sees reaches it; tokens of other sequences, and keys that nobody sees,
// have nothing to do with it.
Test(gpu_prefill, passes_on_what_tokens_see, .timeout = 300)
{
    for (size_t i = 0; i < COUNT(kinds); i++)
        for (int n = 0; n < 4; n++) {
            struct prefill_case c = vary(&kinds[i], (size_t) n);
            struct attn_check check;
            char text[512];
            c.name = "NaN";
            c.batch = COUNT(ragged);
            c.sequences = ragged;
            c.ragged = true;
            c.not_causal = false;
            c.window = 0;
            // All rows are checked.
            c.num_q_heads = 2;
            c.num_kv_heads = 1;
            struct prefill_data *data = need(&c), *clean = need(&c);
            // Sequence 4: 127 tokens at 9; sees key 100 from token 91 on.
            const bool is_v = n % 2;
            const enum prefill_zone zone = is_v ? PREFILL_ZONE_V : PREFILL_ZONE_K;
            attn_store(prefill_zone(data, data->image, zone),
                       prefill_key_at(data, 4, 100, 0, is_v) + 3, kinds[i].dtype,
                       n < 2 ? NAN : INFINITY);
            run(data, attn_prefill);
            run(clean, attn_prefill);
            cr_expect(prefill_data_check(data, 1 << 20, ATTN_CHECK_KERNEL, &check), "%s",
                      prefill_check_text(&check, text, sizeof(text)));
            for (int32_t b = 0; b < c.batch; b++)
                if (b != 4)
                    cr_expect_eq(prefill_count_differences(data, b, 0, clean, b, 0,
                                                           ragged[b].q_len),
                                 0, "sequence %d", b);
            prefill_data_free(&data);
            prefill_data_free(&clean);
        }
}

// ---- graphs

// Captured while all lists are 0, then replayed for other lengths of the same sizes.
Test(gpu_prefill, replays_a_graph_at_other_lengths, .timeout = 300)
{
    for (size_t i = 0; i < COUNT(kinds); i++) {
        struct prefill_case c = whole_case(&kinds[i]);
        struct gpu_graph *graph;
        c.name = "graph";
        c.ragged = true;
        c.batch = COUNT(ragged);
        c.sequences = ragged;
        c.page_size = i % 2 ? 16 : 0;
        struct prefill_data *data = need(&c), *eager = need(&c);
        run(eager, attn_prefill);
        void *const memory = need_upload(data);
        const struct attn_prefill_params params = prefill_data_params(data, memory);
        const struct canary_zone *const lists = &data->zones[PREFILL_ZONE_CU_SEQLENS];
        cr_assert_eq(gpu_fill(session.gpu, (uint8_t *) memory + lists->offset, 0, lists->bytes), 0);
        cr_assert_eq(gpu_graph_begin(session.gpu, session.stream), 0);
        cr_assert_eq(attn_prefill(session.device, &params, session.stream), ATTN_OK, "%s",
                     attn_last_error());
        cr_assert_eq(gpu_graph_end(session.gpu, session.stream, &graph), 0);
        // Without tokens nothing is written.
        cr_assert_eq(gpu_graph_launch(session.gpu, graph, session.stream), 0);
        fetch(data, memory);
        for (size_t z = PREFILL_ZONE_O; z < NUM_PREFILL_ZONES; z++)
            cr_expect_eq(memcmp(data->image + data->zones[z].offset,
                                data->result + data->zones[z].offset, data->zones[z].bytes),
                         0, "zone %zu", z);
        for (int n = 0; n < 2; n++) {
            cr_assert_eq(gpu_upload(session.gpu, memory, data->image, data->bytes), 0);
            cr_assert_eq(gpu_graph_launch(session.gpu, graph, session.stream), 0);
            fetch(data, memory);
            cr_expect(prefill_data_intact(data));
            expect_all_equal(eager, data, "graph replay");
        }
        gpu_graph_destroy(session.gpu, &graph);
        gpu_free(session.gpu, memory);
        prefill_data_free(&data);
        prefill_data_free(&eager);
    }
}

// Nothing of a call stays: one right after the other, and many streams' worth of them in order.
Test(gpu_prefill, repeats_itself, .timeout = 120)
{
    for (size_t i = 0; i < COUNT(kinds); i++) {
        const struct prefill_case c = whole_case(&kinds[i]);
        struct prefill_data *first = need(&c), *last = need(&c);
        run(first, attn_prefill);
        void *const memory = need_upload(last);
        const struct attn_prefill_params params = prefill_data_params(last, memory);
        for (int n = 0; n < 20; n++)
            cr_assert_eq(attn_prefill(session.device, &params, session.stream), ATTN_OK);
        fetch(last, memory);
        expect_all_equal(first, last, "repetition");
        gpu_free(session.gpu, memory);
        prefill_data_free(&first);
        prefill_data_free(&last);
    }
}

// The environment turns the kernels of 128 query tokens off; the bits are the same.
Test(gpu_prefill, has_the_same_bits_without_twins, .timeout = 120)
{
    for (size_t i = 0; i < COUNT(kinds); i++) {
        struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
        struct attn_device *const device = session.device;
        struct prefill_case c = whole_case(&kinds[i]);
        c.ragged = true;
        c.batch = COUNT(ragged);
        c.sequences = ragged;
        struct prefill_data *with = need(&c), *without = need(&c);
        run(with, attn_prefill);
        open.kind = ATTN_DEVICE_ORDINAL;
        setenv("METRALE_NO_ATTN_FA128", "1", 1);
        cr_assert_eq(attn_device_open(&session.device, &open), ATTN_OK, "%s", attn_last_error());
        unsetenv("METRALE_NO_ATTN_FA128");
        run(without, attn_prefill);
        attn_device_close(&session.device);
        session.device = device;
        expect_all_equal(with, without, "no twins");
        if (kinds[i].head_dim == ATTN_PREFILL_FA128_HEAD_DIM)
            cr_expect(has_kernel(&kinds[i], 128), "no twin of %s", attn_dtype_name(kinds[i].dtype));
        prefill_data_free(&with);
        prefill_data_free(&without);
    }
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

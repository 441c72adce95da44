/* SPDX-License-Identifier: Apache-2.0 */
// Decode kernels against the definition, within the bound of include/attn/decode.h, with guards
// around every buffer, all memory that a call has no business with full of NaN, and inputs compared
// afterwards.
//
// The bound is |o - exact| <= u |exact| + (u + 2^-15 + 2^-21 S) A: rounding of o, rounding of the
// weights to q's type, FP32 sums and exponentials, and what an FP32 error of a score of size S does
// to its weight.
#include "tests/cases/decode_cases.h"
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    MAX_KERNELS = 256,
    EDGE_BATCH = 18
};

static const int32_t head_dims[] = { 64, 128, 256 };
static const int32_t page_sizes[] = { 16, 1, 2, 3, 8, 48, 64, 100, 128 };
static const int32_t windows[] = { 0, 1, 100, 127, 128, 129, 1000 };

struct fixture {
    struct gpu_session session;
    uint64_t seed;
    // Which kernels of the pack have run.
    bool used[MAX_KERNELS];
};

static void note_kernel(struct fixture *f, const char *kernel)
{
    const char *name;
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(f->session.device, i)); i++)
        if (strcmp(name, kernel) == 0) f->used[i] = true;
}

// Runs the case and holds it against the definition. False if the pack has no kernel for it, which
// only a type other than BF16 may lack.
static bool expect_case(struct fixture *f, const struct decode_case *c)
{
    char text[512], found[512];
    struct decode_data *data;
    struct attn_check check;
    decode_case_text(c, text, sizeof(text));
    const enum attn_status status = decode_data_build(&data, c, f->session.device);
    if (status == ATTN_ERROR_UNSUPPORTED && c->q_dtype + c->kv_dtype > 2 * ATTN_DTYPE_BF16)
        return false;
    cr_assert_eq(status, ATTN_OK, "%s: %s", text, attn_last_error());
    cr_assert_eq(decode_data_run_gpu(data, &f->session), ATTN_OK, "%s, %s: %s", data->kernel, text,
                 attn_last_error());
    const bool right = decode_data_check(data, ATTN_CHECK_KERNEL, &check);
    cr_expect(right, "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    cr_expect(decode_data_intact(data), "%s, %s: wrote where it should not", data->kernel, text);
    cr_expect_eq(decode_data_fault(data), INT32_MAX, "%s, %s: fault %d", data->kernel, text,
                 decode_data_fault(data));
    note_kernel(f, data->kernel);
    decode_data_free(&data);
    return true;
}

// Every GQA ratio, with the other properties taking turns.
static void expect_ratios(struct fixture *f)
{
    const int32_t ratios[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 71 };
    for (size_t d = 0; d < COUNT(head_dims); d++)
        for (size_t i = 0; i < COUNT(ratios); i++) {
            const size_t n = d * COUNT(ratios) + i;
            const int32_t kv_heads = ratios[i] > 8 ? 1 : 2;
            const struct decode_case c = {
                .name = "ratio",
                .batch = EDGE_BATCH,
                .num_kv_heads = kv_heads,
                .num_q_heads = kv_heads * ratios[i],
                .head_dim = head_dims[d],
                .page_size = page_sizes[n % COUNT(page_sizes)],
                .len = ratios[i] > 16 ? 700 : 1335,
                .lens = DECODE_LENS_EDGES,
                .window = windows[n % COUNT(windows)],
                .sinks = n % 2,
                .softcap = n % 5 == 3 ? 2 : 0,
                .lse = n % 11 != 5,
                .scales = n % 3 == 1,
                .layout = (enum decode_layout)(n % NUM_DECODE_LAYOUTS),
                .fused_q = n % 5 < 2,
                .extra_columns = (int32_t) (n % 4),
                .page_seed = n,
                .seed = f->seed + n,
            };
            expect_case(f, &c);
        }
}

// Every page size in every layout.
static void expect_layouts(struct fixture *f)
{
    for (size_t d = 0; d < COUNT(head_dims); d++)
        for (size_t i = 0; i < COUNT(page_sizes); i++)
            for (int layout = 0; layout < NUM_DECODE_LAYOUTS; layout++) {
                const struct decode_case c = {
                    .name = "layout",
                    .batch = 5,
                    .num_kv_heads = 3,
                    .num_q_heads = 6,
                    .head_dim = head_dims[d],
                    .page_size = page_sizes[i],
                    .len = 290,
                    .lens = DECODE_LENS_LOG,
                    .window = i % 2 ? 70 : 0,
                    .lse = true,
                    .layout = (enum decode_layout) layout,
                    .fused_q = layout % 2,
                    .poison = 0xFF,
                    .k_scale = 0.25f,
                    .v_scale = 0.5f,
                    .seed = f->seed + i,
                };
                expect_case(f, &c);
            }
}

// Every fill with every window, with and without sink and softcap.
static void expect_fills(struct fixture *f)
{
    for (size_t d = 0; d < COUNT(head_dims); d++)
        for (int fill = 0; fill < NUM_DECODE_FILLS; fill++)
            for (size_t i = 0; i < COUNT(windows); i++) {
                const size_t n = (size_t) fill + i;
                const struct decode_case c = {
                    .name = "fill",
                    .batch = EDGE_BATCH,
                    .num_kv_heads = 1,
                    .num_q_heads = 3,
                    .head_dim = head_dims[d],
                    .page_size = page_sizes[n % COUNT(page_sizes)],
                    .len = 1335,
                    .lens = DECODE_LENS_EDGES,
                    .window = windows[i],
                    .sinks = n % 3 == 1,
                    .softcap = n % 4 == 1 ? 30 : 0,
                    .lse = true,
                    .fill = (enum decode_fill) fill,
                    .seed = f->seed + n,
                };
                expect_case(f, &c);
            }
}

static void expect_served_shapes(struct fixture *f)
{
    for (int i = 0; i < NUM_DECODE_SHAPES; i++) {
        const struct decode_shape *const s = &decode_shapes[i];
        const struct decode_case c = {
            .name = s->name,
            .batch = s->batch < 3 ? s->batch : 3,
            .num_q_heads = s->num_q_heads,
            .num_kv_heads = s->num_kv_heads,
            .head_dim = s->head_dim,
            .page_size = s->page_size,
            .len = s->window ? s->window + 300 : 500,
            .lens = DECODE_LENS_LOG,
            .window = s->window,
            .lse = true,
            .seed = f->seed + (uint64_t) i,
        };
        expect_case(f, &c);
    }
}

// Long enough that the merge tree leaves the registers.
static void expect_long(struct fixture *f)
{
    const int32_t lens[] = { 4097, 8192, 20011, 70000 };
    const int32_t long_windows[] = { 0, 0, 15000, 69001 };
    for (size_t d = 0; d < COUNT(head_dims); d++)
        for (size_t i = 0; i < COUNT(lens); i++) {
            const struct decode_case c = {
                .name = "long",
                .batch = 1,
                .given_lens = &lens[i],
                .num_kv_heads = 1,
                .num_q_heads = 2,
                .head_dim = head_dims[d],
                .page_size = 16,
                .window = long_windows[i],
                .lse = true,
                .sinks = true,
                .extra_columns = i == 3 ? 60000 : 0,
                .seed = f->seed + i,
                .fill = i % 2 ? DECODE_FILL_UNIFORM : DECODE_FILL_PEAKED,
            };
            expect_case(f, &c);
        }
}

static void expect_types(struct fixture *f)
{
    const enum attn_dtype types[][2] = {
        { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16 },
        { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3 },
        { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3 },
    };
    const enum decode_fill fills[] = { DECODE_FILL_UNIFORM, DECODE_FILL_PEAKED, DECODE_FILL_MEAN,
                                       DECODE_FILL_HUGE };
    for (size_t t = 0; t < COUNT(types); t++)
        for (size_t d = 0; d < COUNT(head_dims); d++)
            for (size_t i = 0; i < COUNT(fills); i++) {
                const struct decode_case c = {
                    .name = "type",
                    .q_dtype = types[t][0],
                    .kv_dtype = types[t][1],
                    .batch = EDGE_BATCH,
                    .num_kv_heads = 2,
                    .num_q_heads = 12,
                    .head_dim = head_dims[d],
                    .page_size = 16,
                    .len = 1335,
                    .lens = DECODE_LENS_EDGES,
                    .window = i % 2 ? 128 : 0,
                    .lse = true,
                    .sinks = i % 2,
                    .k_scale = 0.25f,
                    .v_scale = 0.5f,
                    .fill = fills[i],
                    .seed = f->seed + i,
                };
                if (!expect_case(f, &c)) break;
            }
}

Test(gpu_decode, agrees_with_the_definition, .timeout = 300)
{
    static struct fixture f;
    f.seed = random_seed(41);
    gpu_session_open(&f.session, 0);
    expect_ratios(&f);
    expect_layouts(&f);
    expect_fills(&f);
    expect_served_shapes(&f);
    expect_long(&f);
    expect_types(&f);
    const char *name;
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(f.session.device, i)); i++)
        if (strncmp(name, "decode", 6) == 0) cr_expect(f.used[i], "no case has run %s", name);
    gpu_session_close(&f.session);
}

// ---- faults: bad data leaves all other sequences alone, is reported, and is never followed

enum {
    FAULT_BATCH = 8
};

static struct decode_data *build_faulty(const struct gpu_session *session, int32_t head_dim)
{
    static const int32_t lens[FAULT_BATCH] = { 300, 17, 1000, 290, 64, 0, 513, 200 };
    const struct decode_case c = {
        .name = "faults",
        .batch = FAULT_BATCH,
        .given_lens = lens,
        .num_q_heads = 4,
        .num_kv_heads = 2,
        .head_dim = head_dim,
        .page_size = 16,
        .window = 250,
        .lse = true,
        .extra_columns = 3,
        .seed = random_seed(42),
    };
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, &c, session->device), ATTN_OK, "%s", attn_last_error());
    return data;
}

static void run_gpu(struct decode_data *data, struct gpu_session *session)
{
    cr_assert_eq(decode_data_run_gpu(data, session), ATTN_OK, "%s: %s", data->kernel,
                 attn_last_error());
    cr_expect(decode_data_intact(data), "%s wrote where it should not", data->kernel);
}

// Compares with a clean run all sequences but the two bad ones, and those with the definition.
static void expect_fault(struct decode_data *data, struct decode_data *clean,
                         struct gpu_session *session, int32_t first, int32_t second,
                         const char *what)
{
    struct attn_check check;
    char text[512];
    run_gpu(data, session);
    cr_expect_eq(decode_data_fault(data), first, "%s, %s: fault %d", data->kernel, what,
                 decode_data_fault(data));
    for (int32_t b = 0; b < FAULT_BATCH; b++)
        if (b != first && b != second)
            cr_expect(decode_data_equal(data, b, clean, b), "%s, %s: sequence %d", data->kernel,
                      what, b);
    const bool right = decode_data_check(data, ATTN_CHECK_KERNEL, &check);
    cr_expect(right, "%s, %s: %s", data->kernel, what,
              decode_check_text(&check, text, sizeof(text)));
}

static void expect_bad_pages(struct gpu_session *session, struct decode_data *clean,
                             int32_t head_dim)
{
    const int32_t pages[] = { -1, INT32_MIN, INT32_MAX, (int32_t) clean->params.num_pages };
    const int32_t width = clean->params.max_pages_per_seq;
    for (size_t i = 0; i < COUNT(pages); i++)
        for (int32_t whole = 0; whole < 2; whole++) {
            struct decode_data *data = build_faulty(session, head_dim);
            int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
            // Sequence 3 has 290 keys, 40 .. 289 attended; sequence 6 513, 263 .. 512.
            table[3 * width + 5] = table[6 * width + 32] = pages[i];
            for (int32_t p = 0; whole && p < width; p++) table[3 * width + p] = pages[i];
            expect_fault(data, clean, session, 3, 6, whole ? "no page is valid" : "a bad page");
            decode_data_free(&data);
        }
}

static void expect_bad_lens(struct gpu_session *session, struct decode_data *clean,
                            int32_t head_dim)
{
    const int32_t lens[] = { -1, INT32_MIN };
    for (size_t i = 0; i < COUNT(lens); i++) {
        struct decode_data *data = build_faulty(session, head_dim);
        int32_t *const given = decode_image(data, DECODE_ZONE_LENS);
        int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
        const int32_t width = data->params.max_pages_per_seq;
        // Past the table: clamped to its width, whose entries then count. Page 62 was half full.
        given[2] = INT32_MAX;
        for (int32_t p = 62; p < width; p++) table[2 * width + p] = table[2 * width + 60];
        given[4] = lens[i];
        expect_fault(data, clean, session, 2, 4, "bad lengths");
        decode_data_free(&data);
    }
}

// Tables that name one page over and over are legal: prefix caches do.
static void expect_shared_pages(struct gpu_session *session, struct decode_data *clean,
                                int32_t head_dim)
{
    struct decode_data *data = build_faulty(session, head_dim);
    struct attn_check check;
    int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
    const int32_t width = data->params.max_pages_per_seq;
    for (int32_t p = 0; p < width; p++)
        table[3 * width + p] = table[(2 * (p % 2)) * width + 10 + 43 * (p % 2)];
    run_gpu(data, session);
    cr_expect_eq(decode_data_fault(data), INT32_MAX);
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s: cyclic table", data->kernel);
    cr_expect(decode_data_equal(data, 2, clean, 2));
    decode_data_free(&data);
}

Test(gpu_decode, survives_bad_data, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t d = 0; d < COUNT(head_dims); d++) {
        struct decode_data *clean = build_faulty(&session, head_dims[d]);
        run_gpu(clean, &session);
        cr_expect_eq(decode_data_fault(clean), INT32_MAX);
        expect_bad_pages(&session, clean, head_dims[d]);
        expect_bad_lens(&session, clean, head_dims[d]);
        expect_shared_pages(&session, clean, head_dims[d]);
        decode_data_free(&clean);
    }
    gpu_session_close(&session);
}

// A sink of -inf is none; no keys give zeros, and the sink as lse.
Test(gpu_decode, follows_the_sink, .timeout = 60)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t d = 0; d < COUNT(head_dims); d++) {
        struct decode_case c = {
            .name = "sink",
            .batch = EDGE_BATCH,
            .num_q_heads = 8,
            .num_kv_heads = 2,
            .head_dim = head_dims[d],
            .page_size = 16,
            .len = 700,
            .lens = DECODE_LENS_EDGES,
            .lse = true,
            .sinks = true,
            .seed = 43,
        };
        struct decode_data *with, *without;
        cr_assert_eq(decode_data_build(&with, &c, session.device), ATTN_OK, "%s",
                     attn_last_error());
        c.sinks = false;
        cr_assert_eq(decode_data_build(&without, &c, session.device), ATTN_OK, "%s",
                     attn_last_error());
        float *const sinks = decode_image(with, DECODE_ZONE_SINKS);
        for (int32_t h = 0; h < 8; h++) sinks[h] = -INFINITY;
        run_gpu(with, &session);
        run_gpu(without, &session);
        for (int32_t b = 0; b < EDGE_BATCH; b++)
            cr_expect(decode_data_equal(with, b, without, b), "%s, sequence %d", with->kernel, b);

        for (int32_t h = 0; h < 8; h++) sinks[h] = h % 2 ? NAN : INFINITY;
        run_gpu(with, &session);
        struct attn_check check;
        cr_expect(decode_data_check(with, ATTN_CHECK_KERNEL, &check),
                  "%s: sinks of NaN and infinity", with->kernel);
        decode_data_free(&with);
        decode_data_free(&without);
    }
    gpu_session_close(&session);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Decode kernels against the definition, within the bound of include/attn/decode.h, with guards
// around every buffer, all memory that a call has no business with full of NaN, and inputs compared
// afterwards: every kind (types and head_dim) that the pack has, so that every kernel is run.
//
// The bound is |o - exact| <= u |exact| + (u + 2^-15 + 2^-21 S) A: rounding of o, rounding of the
// weights to q's type, FP32 sums and exponentials, and what an FP32 error of a score of size S does
// to its weight.
#include "tests/cases/decode_cases.h"
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum {
    MAX_KERNELS = 256,
    EDGE_BATCH = 18
};

static const int32_t page_sizes[] = { 16, 1, 2, 3, 8, 48, 64, 100, 128 };
static const int32_t windows[] = { 0, 1, 100, 127, 128, 129, 1000 };

struct fixture {
    struct gpu_session session;
    uint64_t seed;
    const struct decode_kind *kinds[NUM_DECODE_KINDS];
    size_t num_kinds;
    // Which kernels of the pack have run.
    bool used[MAX_KERNELS];
};

static void note_kernel(struct fixture *f, const char *kernel)
{
    const char *name;
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(f->session.device, i)); i++)
        if (strcmp(name, kernel) == 0) f->used[i] = true;
}

// Collects the kinds that the pack's table has. The others are refused, and BF16 is never missing.
static void find_kinds(struct fixture *f)
{
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++) {
        const struct decode_kind *const kind = &decode_kinds[i];
        if (gpu_session_serves(&f->session, kind)) {
            f->kinds[f->num_kinds++] = kind;
            continue;
        }
        const int dtypes = (int) kind->q_dtype + (int) kind->kv_dtype;
        cr_expect(dtypes > 2 * ATTN_DTYPE_BF16 || kind->head_dim > 256, "no kernel of BF16, %d",
                  kind->head_dim);
        struct decode_case c = { .batch = 1, .num_q_heads = 1, .num_kv_heads = 1, .page_size = 16 };
        struct decode_data *data;
        c.len = 1;
        decode_case_set_kind(&c, kind);
        cr_expect_eq(decode_data_build(&data, &c, f->session.device), ATTN_ERROR_UNSUPPORTED);
    }
}

// Runs the case, as one of that kind, and holds it against the definition.
static void expect_case(struct fixture *f, const struct decode_kind *kind,
                        const struct decode_case *given)
{
    char text[512], found[512];
    struct attn_check check;
    struct decode_case c = *given;
    decode_case_set_kind(&c, kind);
    decode_case_text(&c, text, sizeof(text));
    struct decode_data *data = decode_data_need(&c, &f->session);
    decode_data_need_run(data, &f->session);
    const bool right = decode_data_check(data, ATTN_CHECK_KERNEL, &check);
    cr_expect(right, "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    cr_expect_eq(decode_data_fault(data), INT32_MAX, "%s, %s: fault %d", data->kernel, text,
                 decode_data_fault(data));
    note_kernel(f, data->kernel);
    decode_data_free(&data);
}

// Every GQA ratio, with the other properties taking turns.
static void expect_ratios(struct fixture *f)
{
    const int32_t ratios[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 71 };
    for (size_t d = 0; d < f->num_kinds; d++)
        for (size_t i = 0; i < COUNT(ratios); i++) {
            const size_t n = d * COUNT(ratios) + i;
            const int32_t kv_heads = ratios[i] > 8 ? 1 : 2;
            const struct decode_case c = {
                .name = "ratio",
                .batch = EDGE_BATCH,
                .num_kv_heads = kv_heads,
                .num_q_heads = kv_heads * ratios[i],
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
            expect_case(f, f->kinds[d], &c);
        }
}

// Every page size in every layout.
static void expect_layouts(struct fixture *f)
{
    for (size_t d = 0; d < f->num_kinds; d++)
        for (size_t i = 0; i < COUNT(page_sizes); i++)
            for (int layout = 0; layout < NUM_DECODE_LAYOUTS; layout++) {
                const struct decode_case c = {
                    .name = "layout",
                    .batch = 5,
                    .num_kv_heads = 3,
                    .num_q_heads = 6,
                    .page_size = page_sizes[i],
                    .len = 290,
                    .lens = DECODE_LENS_LOG,
                    .window = i % 2 ? 70 : 0,
                    .lse = true,
                    .layout = (enum decode_layout) layout,
                    .fused_q = layout % 2,
                    .poison = i % 2 ? 0x7F : 0xFF,
                    .seed = f->seed + i,
                };
                expect_case(f, f->kinds[d], &c);
            }
}

// Every fill with every window, with and without sink and softcap.
static void expect_fills(struct fixture *f)
{
    for (size_t d = 0; d < f->num_kinds; d++)
        for (int fill = 0; fill < NUM_DECODE_FILLS; fill++)
            for (size_t i = 0; i < COUNT(windows); i++) {
                const size_t n = (size_t) fill + i;
                const struct decode_case c = {
                    .name = "fill",
                    .batch = EDGE_BATCH,
                    .num_kv_heads = 1,
                    .num_q_heads = 3,
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
                expect_case(f, f->kinds[d], &c);
            }
}

static void expect_served_shape(struct fixture *f, const struct decode_kind *kind, int i)
{
    const struct decode_shape *const s = &decode_shapes[i];
    const struct decode_case c = {
        .name = s->name,
        .batch = s->batch < 3 ? s->batch : 3,
        .num_q_heads = s->num_q_heads,
        .num_kv_heads = s->num_kv_heads,
        .page_size = s->page_size,
        .len = s->window ? s->window + 300 : 500,
        .lens = DECODE_LENS_LOG,
        .window = s->window,
        .lse = true,
        .seed = f->seed + (uint64_t) i,
    };
    expect_case(f, kind, &c);
}

// Every shape that people serve, in every type.
static void expect_served_shapes(struct fixture *f)
{
    for (size_t d = 0; d < f->num_kinds; d++)
        for (int i = 0; i < NUM_DECODE_SHAPES; i++)
            if (decode_shapes[i].head_dim == f->kinds[d]->head_dim)
                expect_served_shape(f, f->kinds[d], i);
}

// Long enough that the merge tree leaves the registers.
static void expect_long(struct fixture *f)
{
    const int32_t lens[] = { 4097, 8192, 20011, 70000 };
    const int32_t long_windows[] = { 0, 0, 15000, 69001 };
    for (size_t d = 0; d < f->num_kinds; d++)
        for (size_t i = 0; i < COUNT(lens); i++) {
            const struct decode_case c = {
                .name = "long",
                .batch = 1,
                .given_lens = &lens[i],
                .num_kv_heads = 1,
                .num_q_heads = 2,
                .page_size = 16,
                .window = long_windows[i],
                .lse = true,
                .sinks = true,
                .extra_columns = i == 3 ? 60000 : 0,
                .seed = f->seed + i,
                .fill = i % 2 ? DECODE_FILL_UNIFORM : DECODE_FILL_PEAKED,
            };
            expect_case(f, f->kinds[d], &c);
        }
}

Test(gpu_decode, agrees_with_the_definition, .timeout = 300)
{
    static struct fixture f;
    f.seed = random_seed(41);
    gpu_session_open(&f.session, 0);
    find_kinds(&f);
    expect_ratios(&f);
    expect_layouts(&f);
    expect_fills(&f);
    expect_served_shapes(&f);
    expect_long(&f);
    const char *name;
    for (int32_t i = 0; i < MAX_KERNELS && (name = attn_device_kernel(f.session.device, i)); i++)
        // Those of skip-softmax are for gpu_ctm.
        if (strncmp(name, "decode", 6) == 0 && !strstr(name, "_skip"))
            cr_expect(f.used[i], "no case has run %s", name);
    gpu_session_close(&f.session);
}

// ---- faults: bad data leaves all other sequences alone, is reported, and is never followed

enum {
    FAULT_BATCH = 8
};

static struct decode_data *build_faulty(const struct gpu_session *session,
                                        const struct decode_kind *kind)
{
    static const int32_t lens[FAULT_BATCH] = { 300, 17, 1000, 290, 64, 0, 513, 200 };
    struct decode_case c = {
        .name = "faults",
        .batch = FAULT_BATCH,
        .given_lens = lens,
        .num_q_heads = 4,
        .num_kv_heads = 2,
        .page_size = 16,
        .window = 250,
        .lse = true,
        .extra_columns = 3,
        .seed = random_seed(42),
    };
    decode_case_set_kind(&c, kind);
    return decode_data_need(&c, session);
}

// Compares with a clean run all sequences but the two bad ones, and those with the definition.
static void expect_fault(struct decode_data *data, struct decode_data *clean,
                         struct gpu_session *session, int32_t first, int32_t second,
                         const char *what)
{
    struct attn_check check;
    char text[512];
    decode_data_need_run(data, session);
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
                             const struct decode_kind *kind)
{
    const int32_t pages[] = { -1, INT32_MIN, INT32_MAX, (int32_t) clean->params.num_pages };
    const int32_t width = clean->params.max_pages_per_seq;
    for (size_t i = 0; i < COUNT(pages); i++)
        for (int32_t whole = 0; whole < 2; whole++) {
            struct decode_data *data = build_faulty(session, kind);
            int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
            // Sequence 3 has 290 keys, 40 .. 289 attended; sequence 6 513, 263 .. 512.
            table[3 * width + 5] = table[6 * width + 32] = pages[i];
            for (int32_t p = 0; whole && p < width; p++) table[3 * width + p] = pages[i];
            expect_fault(data, clean, session, 3, 6, whole ? "no page is valid" : "a bad page");
            decode_data_free(&data);
        }
}

static void expect_bad_lens(struct gpu_session *session, struct decode_data *clean,
                            const struct decode_kind *kind)
{
    const int32_t lens[] = { -1, INT32_MIN };
    for (size_t i = 0; i < COUNT(lens); i++) {
        struct decode_data *data = build_faulty(session, kind);
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
                                const struct decode_kind *kind)
{
    struct decode_data *data = build_faulty(session, kind);
    struct attn_check check;
    int32_t *const table = decode_image(data, DECODE_ZONE_TABLE);
    const int32_t width = data->params.max_pages_per_seq;
    for (int32_t p = 0; p < width; p++)
        table[3 * width + p] = table[(2 * (p % 2)) * width + 10 + 43 * (p % 2)];
    decode_data_need_run(data, session);
    cr_expect_eq(decode_data_fault(data), INT32_MAX);
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s: cyclic table", data->kernel);
    cr_expect(decode_data_equal(data, 2, clean, 2));
    decode_data_free(&data);
}

Test(gpu_decode, survives_bad_data, .timeout = 120)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++) {
        const struct decode_kind *const kind = &decode_kinds[i];
        if (!gpu_session_serves(&session, kind)) continue;
        struct decode_data *clean = build_faulty(&session, kind);
        decode_data_need_run(clean, &session);
        cr_expect_eq(decode_data_fault(clean), INT32_MAX);
        expect_bad_pages(&session, clean, kind);
        expect_bad_lens(&session, clean, kind);
        expect_shared_pages(&session, clean, kind);
        decode_data_free(&clean);
    }
    gpu_session_close(&session);
}

// ---- sinks: -inf is none; no keys give zeros, and the sink as lse

static void expect_sinks(struct gpu_session *session, const struct decode_kind *kind)
{
    struct decode_case c = {
        .name = "sink",
        .batch = EDGE_BATCH,
        .num_q_heads = 8,
        .num_kv_heads = 2,
        .page_size = 16,
        .len = 700,
        .lens = DECODE_LENS_EDGES,
        .lse = true,
        .sinks = true,
        .seed = 43,
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *with = decode_data_need(&c, session);
    c.sinks = false;
    struct decode_data *without = decode_data_need(&c, session);
    float *const sinks = decode_image(with, DECODE_ZONE_SINKS);
    for (int32_t h = 0; h < 8; h++) sinks[h] = -INFINITY;
    decode_data_need_run(with, session);
    decode_data_need_run(without, session);
    for (int32_t b = 0; b < EDGE_BATCH; b++)
        cr_expect(decode_data_equal(with, b, without, b), "%s, sequence %d", with->kernel, b);

    for (int32_t h = 0; h < 8; h++) sinks[h] = h % 2 ? NAN : INFINITY;
    decode_data_need_run(with, session);
    struct attn_check check;
    cr_expect(decode_data_check(with, ATTN_CHECK_KERNEL, &check), "%s: sinks of NaN and infinity",
              with->kernel);
    decode_data_free(&with);
    decode_data_free(&without);
}

Test(gpu_decode, follows_the_sink, .timeout = 60)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        if (gpu_session_serves(&session, &decode_kinds[i]))
            expect_sinks(&session, &decode_kinds[i]);
    gpu_session_close(&session);
}

// ---- policies

static void expect_right(struct decode_data *data, const char *policy)
{
    char text[512], found[512];
    struct attn_check check;
    const bool right = decode_data_check(data, ATTN_CHECK_KERNEL, &check);
    cr_expect(right, "%s, policy %s, %s: %s", data->kernel, policy,
              decode_case_text(&data->c, text, sizeof(text)),
              decode_check_text(&check, found, sizeof(found)));
}

// Windows, sinks and pieces in every type. Of window 300 the pieces beyond the second are empty.
static void expect_cross(struct gpu_session *session, const char *policy,
                         const struct decode_kind *kind)
{
    const int32_t cross_windows[] = { 0, 100, 300 };
    for (size_t i = 0; i < 2 * COUNT(cross_windows); i++) {
        struct decode_case c = {
            .name = "cross",
            .batch = EDGE_BATCH,
            .num_q_heads = 4,
            .num_kv_heads = 2,
            .page_size = page_sizes[i],
            .len = 1335,
            .lens = DECODE_LENS_EDGES,
            .window = cross_windows[i / 2],
            .sinks = i % 2,
            .lse = true,
            .fill = i == 1 ? DECODE_FILL_BITS : DECODE_FILL_UNIFORM,
            .seed = random_seed(44) + i,
        };
        decode_case_set_kind(&c, kind);
        struct decode_data *data = decode_data_need(&c, session);
        decode_data_need_run(data, session);
        expect_right(data, policy);
        decode_data_free(&data);
    }
}

Test(gpu_decode, types_windows_sinks_and_policies, .timeout = 120)
{
    const char *const policies[] = { "chunk", "auto", "3", "legacy" };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct gpu_session session;
        gpu_session_open_policy(&session, policies[p]);
        for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
            if (gpu_session_serves(&session, &decode_kinds[i]))
                expect_cross(&session, policies[p], &decode_kinds[i]);
        gpu_session_close(&session);
    }
}

// In a workspace that isn't the call's own.
static void run_in(struct decode_remote *remote, struct gpu_session *session, void *workspace,
                   size_t bytes)
{
    struct attn_decode_params params = decode_remote_params(remote);
    params.workspace = workspace;
    params.workspace_bytes = bytes;
    decode_remote_need_run(remote, session, &params);
}

// Short sequences in the workspace that long ones have left full.
static void expect_reused_workspace(struct gpu_session *session, const char *policy,
                                    struct decode_data *data[2])
{
    const size_t sizes[2] = { data[0]->params.workspace_bytes, data[1]->params.workspace_bytes };
    const size_t bytes = sizes[0] > sizes[1] ? sizes[0] : sizes[1];
    struct decode_remote remotes[2];
    void *workspace = NULL;
    if (bytes > 0) {
        cr_assert_eq(gpu_alloc(session->gpu, &workspace, bytes), 0);
        cr_assert_eq(gpu_fill(session->gpu, workspace, 0xFF, bytes), 0);
    }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(decode_remote_open(&remotes[i], session->gpu, data[i]), 0);
        run_in(&remotes[i], session, workspace, bytes);
        expect_right(data[i], policy);
        decode_remote_close(&remotes[i]);
    }
    if (workspace) gpu_free(session->gpu, workspace);
}

static void expect_policy(struct gpu_session *session, const char *policy, int32_t batch,
                          const struct decode_kind *kind, int32_t window)
{
    int32_t short_lens[33];
    for (int32_t b = 0; b < batch; b++) short_lens[b] = b % 3 ? 260 * (b % 3) : 1 + b;
    struct decode_case c = {
        .name = "policy",
        .batch = batch,
        .num_q_heads = 2,
        .num_kv_heads = 1,
        .page_size = 16,
        .len = 1800,
        .window = window,
        .sinks = true,
        .lse = true,
        .seed = random_seed(45),
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *data[2];
    data[0] = decode_data_need(&c, session);
    c.given_lens = short_lens;
    data[1] = decode_data_need(&c, session);
    expect_reused_workspace(session, policy, data);
    struct decode_data *own = decode_data_need(&c, session);
    decode_data_need_run(own, session);
    for (int32_t b = 0; b < batch; b++)
        cr_expect(decode_data_equal(own, b, data[1], b),
                  "%s, policy %s, batch %d: sequence %d after long ones", own->kernel, policy,
                  batch, b);
    decode_data_free(&data[0]);
    decode_data_free(&data[1]);
    decode_data_free(&own);
}

// Every policy with every batch; kinds and windows take turns.
Test(gpu_decode, every_policy, .timeout = 120)
{
    const char *const policies[] = { "chunk", "auto", "1", "2", "3", "8", "16", "legacy" };
    const int32_t batches[] = { 2, 3, 33 };
    const int32_t some_windows[] = { 0, 300, 1500 };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct gpu_session session;
        gpu_session_open_policy(&session, policies[p]);
        for (size_t b = 0; b < COUNT(batches); b++)
            for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
                if ((i + p + b) % 3 == 0 && gpu_session_serves(&session, &decode_kinds[i]))
                    expect_policy(&session, policies[p], batches[b], &decode_kinds[i],
                                  some_windows[(i / 3 + b) % COUNT(some_windows)]);
        gpu_session_close(&session);
    }
}

// ---- the GQA packing lever: the same bytes on and off

static struct decode_data *run_packed(const struct decode_case *c, const char *policy, bool on)
{
    struct gpu_session session;
    struct attn_device_info info = { .size = (uint32_t) sizeof(info) };
    cr_assert_eq(setenv("METRALE_ATTN_DECODE_GQA_PACK", on ? "on" : "off", 1), 0);
    gpu_session_open_policy(&session, policy);
    cr_assert_eq(unsetenv("METRALE_ATTN_DECODE_GQA_PACK"), 0);
    cr_assert_eq(attn_device_describe(session.device, &info), ATTN_OK);
    cr_assert_eq(info.gqa_pack, on);
    struct decode_data *data = NULL;
    const struct decode_kind kind = { c->q_dtype, c->kv_dtype, c->head_dim };
    if (gpu_session_serves(&session, &kind)) {
        data = decode_data_need(c, &session);
        decode_data_need_run(data, &session);
    }
    gpu_session_close(&session);
    return data;
}

static void expect_pack_neutral(const struct decode_case *c, const char *policy)
{
    struct decode_data *off = run_packed(c, policy, false), *on = run_packed(c, policy, true);
    cr_assert_eq(!off, !on);
    if (!off) return;
    for (int32_t b = 0; b < c->batch; b++)
        cr_expect(decode_data_equal(off, b, on, b), "%s, policy %s, window %d: sequence %d, len %d",
                  off->kernel, policy, c->window, b, c->given_lens[b]);
    expect_right(on, policy);
    decode_data_free(&off);
    decode_data_free(&on);
}

Test(gpu_decode, gqa_packing_changes_no_byte, .timeout = 120)
{
    const int32_t lens[] = { 1335, 0, 1, 255, 256, 257, 258, 5000 };
    const char *const policies[] = { "auto", "1", "3", "16", "legacy" };
    const int32_t pack_windows[] = { 0, 257, 1000 };
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (size_t n = 0; n < COUNT(policies) * COUNT(pack_windows); n++) {
            struct decode_case c = {
                .name = "pack",
                .batch = COUNT(lens),
                .given_lens = lens,
                .num_q_heads = 2 * ATTN_DECODE_GQA_PACK_WIDTH,
                .num_kv_heads = 2,
                .page_size = 16,
                .window = pack_windows[n % COUNT(pack_windows)],
                .sinks = n % 2,
                .lse = true,
                .seed = random_seed(46) + n,
            };
            if (decode_kinds[i].head_dim != ATTN_DECODE_GQA_PACK_HEAD_DIM) continue;
            decode_case_set_kind(&c, &decode_kinds[i]);
            expect_pack_neutral(&c, policies[n / COUNT(pack_windows)]);
        }
}

// ---- the workspace: with the exact size a call works (every test here has it, between guards),
// with a byte less it is refused, and nothing has happened

static void expect_refused(struct gpu_session *session, const struct decode_case *c)
{
    struct decode_data *data = decode_data_need(c, session);
    struct decode_remote remote;
    cr_assert_eq(decode_remote_open(&remote, session->gpu, data), 0);
    struct attn_decode_params params = decode_remote_params(&remote);
    cr_assert_gt(params.workspace_bytes, 0, "%s: no workspace to fall short of", data->kernel);
    params.workspace_bytes--;
    cr_expect_eq(attn_decode(session->device, &params, session->stream), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "workspace_bytes"), "%s", attn_last_error());
    cr_assert_eq(gpu_stream_sync(session->gpu, session->stream), 0);
    cr_assert_eq(decode_remote_fetch(&remote), 0);
    cr_expect_eq(memcmp(data->result, data->image, data->bytes), 0, "%s: a refused call wrote",
                 data->kernel);
    params.workspace_bytes++;
    decode_remote_need_run(&remote, session, &params);
    expect_right(data, "with the workspace that was a byte short");
    decode_remote_close(&remote);
    decode_data_free(&data);
}

Test(gpu_decode, needs_its_workspace_to_the_byte, .timeout = 60)
{
    const char *const policies[] = { "chunk", "auto", "8", "legacy" };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct gpu_session session;
        gpu_session_open_policy(&session, policies[p]);
        for (size_t i = 0; i < NUM_DECODE_KINDS; i++) {
            struct decode_case c = {
                .name = "workspace",
                .batch = 2,
                .num_q_heads = 4,
                .num_kv_heads = 2,
                .page_size = 16,
                .len = 2000,
                .lse = true,
                .seed = random_seed(47),
            };
            decode_case_set_kind(&c, &decode_kinds[i]);
            if (gpu_session_serves(&session, &decode_kinds[i])) expect_refused(&session, &c);
        }
        gpu_session_close(&session);
    }
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

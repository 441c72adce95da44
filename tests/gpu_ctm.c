/* SPDX-License-Identifier: Apache-2.0 */
// The CTM decode runner on a GPU, between guards and with exactly the workspace and the semaphores
// that ctm.h gives: against the definition of the call of decode that it is. Where inputs are in
// (-1, 1) it has to be within 1e-3, which is less than the contract allows.
#include "host/check.h"
#include "host/ctm.h"
#include "tests/support/ctm_case.h"
#include "tests/support/decode_gpu.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define CONTRACT_ERROR 1e-3

enum {
    GUARD_BYTES = 256,
    GUARD = 0xA5
};

static const int32_t dims[] = { 32, 64, 128, 256, 512 };

// Memory of the GPU with a guard before and behind what a call gets of it.
struct guarded {
    uint8_t *base;
    size_t room, bytes;
};

struct fixture {
    struct gpu_session session;
    struct guarded workspace, semaphores;
};

static void *guarded_take(struct gpu *gpu, struct guarded *memory, int64_t words)
{
    cr_assert_gt(words, 0);
    memory->bytes = (size_t) words * 4;
    if (memory->room < memory->bytes) {
        void *base;
        if (memory->base) gpu_free(gpu, memory->base);
        cr_assert_eq(gpu_alloc(gpu, &base, memory->bytes + 2 * GUARD_BYTES), 0, "%zu bytes",
                     memory->bytes);
        cr_assert_eq(gpu_fill(gpu, base, 0xFF, memory->bytes + 2 * GUARD_BYTES), 0);
        memory->base = base;
        memory->room = memory->bytes;
    }
    uint8_t *const behind = memory->base + GUARD_BYTES + memory->bytes;
    cr_assert_eq(gpu_fill(gpu, memory->base, GUARD, GUARD_BYTES), 0);
    cr_assert_eq(gpu_fill(gpu, behind, GUARD, GUARD_BYTES), 0);
    return memory->base + GUARD_BYTES;
}

static bool is_all(struct gpu *gpu, const uint8_t *at, size_t bytes, int byte)
{
    uint8_t *const copy = malloc(bytes);
    cr_assert(copy);
    cr_assert_eq(gpu_download(gpu, copy, at, bytes), 0);
    size_t same = 0;
    while (same < bytes && copy[same] == byte) same++;
    free(copy);
    return same == bytes;
}

static bool guards_intact(struct gpu *gpu, const struct guarded *memory)
{
    return is_all(gpu, memory->base, GUARD_BYTES, GUARD) &&
           is_all(gpu, memory->base + GUARD_BYTES + memory->bytes, GUARD_BYTES, GUARD);
}

static void open_fixture(struct fixture *f, const char *policy)
{
    *f = (struct fixture){ 0 };
    gpu_session_open_policy(&f->session, policy);
}

static void close_fixture(struct fixture *f)
{
    if (f->workspace.base) gpu_free(f->session.gpu, f->workspace.base);
    if (f->semaphores.base) gpu_free(f->session.gpu, f->semaphores.base);
    gpu_session_close(&f->session);
}

static bool serves(const struct fixture *f, const struct ctm_case *c)
{
    const struct decode_kind kind = { ATTN_DTYPE_FP16, c->fp8 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16,
                                      c->head_dim };
    return gpu_session_serves(&f->session, &kind);
}

// Of a workspace nothing is asked, and what earlier calls have left there stays.
static struct attn_ctm_params take_params(struct fixture *f, const struct ctm_data *data,
                                          void *base)
{
    struct attn_ctm_params p = ctm_data_params(data, base);
    p.workspace = guarded_take(f->session.gpu, &f->workspace, ctm_data_workspace_elems(data));
    p.semaphores = guarded_take(f->session.gpu, &f->semaphores, ctm_data_semaphore_elems(data));
    p.stream = f->session.stream;
    cr_assert_eq(gpu_fill(f->session.gpu, p.semaphores, 0, f->semaphores.bytes), 0);
    return p;
}

static void call(struct fixture *f, const struct attn_ctm_params *p, const struct ctm_data *data)
{
    char text[512];
    cr_assert_eq(attn_ctm_run(f->session.device, p), ATTN_OK, "%s: %s",
                 ctm_case_text(&data->c, text, sizeof(text)), attn_last_error());
}

static void *upload(struct fixture *f, const struct ctm_data *data)
{
    void *base;
    cr_assert_eq(gpu_alloc(f->session.gpu, &base, data->bytes), 0);
    cr_assert_eq(gpu_upload(f->session.gpu, base, data->image, data->bytes), 0);
    return base;
}

// Waits, and looks at all that the call had to leave alone.
static void fetch(struct fixture *f, struct ctm_data *data, const void *base)
{
    struct gpu *const gpu = f->session.gpu;
    char text[512];
    ctm_case_text(&data->c, text, sizeof(text));
    cr_assert_eq(gpu_stream_sync(gpu, f->session.stream), 0, "%s", text);
    cr_assert_eq(gpu_download(gpu, data->result, base, data->bytes), 0);
    cr_expect(ctm_data_intact(data), "%s: wrote where it should not", text);
    cr_expect(guards_intact(gpu, &f->workspace), "%s: wrote beside the workspace", text);
    cr_expect(guards_intact(gpu, &f->semaphores), "%s: wrote beside the semaphores", text);
    cr_expect(is_all(gpu, f->semaphores.base + GUARD_BYTES, f->semaphores.bytes, 0),
              "%s: semaphores are not 0", text);
}

static void run(struct fixture *f, struct ctm_data *data)
{
    void *const base = upload(f, data);
    const struct attn_ctm_params p = take_params(f, data, base);
    call(f, &p, data);
    fetch(f, data, base);
    gpu_free(f->session.gpu, base);
}

static void expect_right(const struct ctm_data *data)
{
    const struct attn_ctm_params p = ctm_data_params(data, data->image);
    const struct attn_decode_params decode = attn_reference_ctm(&p);
    struct attn_check check;
    char text[512], found[512];
    ctm_case_text(&data->c, text, sizeof(text));
    cr_assert_eq(attn_check_decode(&decode, ctm_result(data, CTM_ZONE_OUTPUT), NULL,
                                   ATTN_CHECK_KERNEL, &check),
                 0);
    cr_expect(check.failed == 0, "%s: %s", text, decode_check_text(&check, found, sizeof(found)));
    cr_expect(data->c.fill != CTM_FILL_UNIFORM || check.max_error <= CONTRACT_ERROR,
              "%s: an error of %g", text, check.max_error);
}

static void expect_case(struct fixture *f, const struct ctm_case *c, int32_t fallback_available)
{
    char text[512];
    if (!serves(f, c)) return;
    struct ctm_data *data = ctm_data_build(c);
    data->params.fallback_available = fallback_available;
    run(f, data);
    expect_right(data);
    cr_expect_eq(ctm_data_fault(data), ctm_case_fault(c), "%s: fault %d",
                 ctm_case_text(c, text, sizeof(text)), ctm_data_fault(data));
    ctm_data_free(&data);
}

Test(gpu_ctm, agrees_at_the_shapes_of_the_contract, .timeout = 60)
{
    struct fixture f;
    open_fixture(&f, NULL);
    for (int i = 0; i < NUM_CTM_CONTRACT_CASES; i++)
        for (int fp8 = 0; fp8 < 2; fp8++) {
            struct ctm_case c = ctm_contract_cases[i];
            c.fp8 = fp8;
            expect_case(&f, &c, 1);
        }
    close_fixture(&f);
}

// Decode and trees, with and without a window of either form and sinks.
static void expect_ratio(struct fixture *f, int32_t head_dim, int32_t ratio, bool fp8)
{
    for (uint64_t n = 0; n < 12; n++) {
        const struct ctm_case c = {
            .name = "ratio",
            .batch = 2,
            .num_q_heads = ratio,
            .num_kv_heads = 1,
            .head_dim = head_dim,
            .q_len = n % 2 ? 2 + ratio % 7 : 1,
            .lens = { 120 + 9 * ratio, 1 + 5 * ratio },
            .window = n / 2 % 3 ? 90 : 0,
            .per_row = n / 2 % 3 == 2,
            .fp8 = fp8,
            .sinks = n / 6 == 0  ? CTM_SINKS_NONE
                     : ratio % 2 ? CTM_SINKS_ALTERNATING
                                 : CTM_SINKS_RANDOM,
            .seed = 12 * (uint64_t) ratio + n,
        };
        const bool served = attn_ctm_supported(ratio, 1, head_dim, fp8, c.window, c.sinks) ||
                            attn_ctm_supported_tree(ratio, 1, head_dim, fp8, c.window, c.per_row);
        if (c.q_len > 1 && fp8 && head_dim == 32) continue;
        cr_assert(served);
        expect_case(f, &c, (int32_t) (n / 2 % 2));
    }
}

Test(gpu_ctm, serves_every_ratio_at_every_head_dim, .timeout = 180)
{
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int32_t ratio = 1; ratio <= ATTN_CTM_MAX_GQA_RATIO_R16; ratio++)
            for (int fp8 = 0; fp8 < 2; fp8++) expect_ratio(&f, dims[i], ratio, fp8);
    close_fixture(&f);
}

// Keys around every edge of a page and of the window; each is seen exactly once, or not at all.
Test(gpu_ctm, cuts_at_the_right_key, .timeout = 120)
{
    const int32_t windows[] = { 0, 1, 5, 64, 127, 128, 129, 300 };
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < COUNT(dims); i++)
        for (size_t w = 0; w < COUNT(windows); w++)
            for (int form = 0; form < 3; form++) {
                const int32_t window = windows[w];
                const int32_t lens[][CTM_MAX_BATCH] = {
                    { 127, 128, 129, window + 37 },
                    { 255, 256, 257, window },
                    { 383, 384, 385, window / 2 },
                    { 9, 10, 8, 1 },
                };
                struct ctm_case c = {
                    .name = "edges",
                    .batch = CTM_MAX_BATCH,
                    .num_q_heads = 2 + 3 * form,
                    .num_kv_heads = 1,
                    .head_dim = dims[i],
                    .q_len = form ? 9 : 1,
                    .window = window,
                    .per_row = form == 2,
                    .fp8 = (w + (size_t) form) % 2,
                    .fill = CTM_FILL_MEAN,
                    .seed = w,
                };
                if (form && c.fp8 && c.head_dim == 32) c.fp8 = false;
                for (size_t n = 0; n < COUNT(lens); n++) {
                    memcpy(c.lens, lens[n], sizeof(c.lens));
                    expect_case(&f, &c, 1);
                }
            }
    close_fixture(&f);
}

// Long enough for many blocks to have a part; 128 tokens.
Test(gpu_ctm, serves_long_sequences_and_trees, .timeout = 120)
{
    static const struct ctm_case cases[] = {
        { "long decode", 2, 8, 1, 128, 1, .lens = { 20000, 3 }, .seed = 1 },
        { "long decode, window", 2, 8, 2, 64, 1, .lens = { 20000, 700 }, .window = 9000 },
        { "long tree", 2, 8, 2, 128, 9, .lens = { 6000, 400 }, .sinks = CTM_SINKS_RANDOM },
        { "long tree, windows", 2, 4, 1, 256, 5, .lens = { 6000, 90 }, .window = 2500,
          .per_row = 1 },
        { "128 tokens", 3, 4, 1, 64, 128, .lens = { 128, 1000, 100 }, .window = 120 },
        { "128 tokens, windows", 2, 2, 1, 512, 128, .lens = { 300, 128 }, .window = 50,
          .per_row = 1, .seed = 1 },
        { "127 tokens", 2, 16, 1, 32, 127, .lens = { 300, 127 } },
    };
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < COUNT(cases); i++) expect_case(&f, &cases[i], 0);
    close_fixture(&f);
}

// L = 0 is padding: zeros, no fault. A length below q_len has no past, and is reported.
Test(gpu_ctm, takes_short_sequences, .timeout = 60)
{
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < COUNT(dims); i++) {
        const struct ctm_case c = {
            "short", 4, 4, 2, dims[i], 8, { 0, 8, 5, 3 }, .seed = 1000, .sinks = CTM_SINKS_RANDOM
        };
        if (!serves(&f, &c)) continue;
        struct ctm_data *data = ctm_data_build(&c);
        run(&f, data);
        expect_right(data);
        cr_expect_eq(ctm_data_fault(data), 2);
        const uint16_t *const o = ctm_result(data, CTM_ZONE_OUTPUT);
        for (int32_t n = 0; n < c.q_len * c.num_q_heads * c.head_dim; n++) cr_assert_eq(o[n], 0);
        ctm_data_free(&data);
    }
    close_fixture(&f);
}

// A page id that is none, in either row of the table: reported, and nobody else's trouble.
Test(gpu_ctm, reports_pages_that_are_none, .timeout = 60)
{
    struct fixture f;
    open_fixture(&f, NULL);
    for (int32_t q_len = 1; q_len < 8; q_len += 5) {
        const struct ctm_case c = { "faults", 3, 4, 2, 64, q_len, .lens = { 300, 300, 300 } };
        struct ctm_data *data = ctm_data_build(&c), *clean = ctm_data_build(&c);
        const int32_t bad[] = { -1, 2 * data->params.num_pages, INT32_MIN, INT32_MAX };
        if (serves(&f, &c)) run(&f, clean);
        for (size_t n = 0; serves(&f, &c) && n < 6 * COUNT(bad); n++) {
            const int32_t row = (int32_t) (n / COUNT(bad));
            int32_t *const entry = (int32_t *) ctm_image(data, CTM_ZONE_TABLE) +
                                   row * data->params.max_pages_per_seq + 1;
            const int32_t right = *entry;
            *entry = bad[n % COUNT(bad)];
            run(&f, data);
            cr_expect_eq(ctm_data_fault(data), row / 2, "%d in row %d: fault %d",
                         bad[n % COUNT(bad)], row, ctm_data_fault(data));
            for (int32_t b = 0; b < c.batch; b++)
                cr_expect_eq(ctm_data_equal(data, b, clean, b), b != row / 2,
                             "%d in row %d: sequence %d", bad[n % COUNT(bad)], row, b);
            *entry = right;
        }
        ctm_data_free(&data);
        ctm_data_free(&clean);
    }
    close_fixture(&f);
}

// The same bits, whatever a field holds that is said to have no say, and under any policy.
Test(gpu_ctm, ignores_what_it_says_it_ignores, .timeout = 60)
{
    static const struct ctm_case cases[] = {
        { "decode", 2, 6, 2, 64, 1, .lens = { 3000, 200 }, .window = 1500 },
        { "tree", 2, 6, 2, 64, 5, .lens = { 3000, 200 } },
        { "tree, fp8", 2, 6, 2, 64, 5, .lens = { 3000, 200 }, .fp8 = true },
    };
    const char *const policies[] = { "chunk", "auto", "1", "legacy" };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct ctm_data *first = NULL;
        for (size_t n = 0; n < COUNT(policies); n++) {
            struct fixture f;
            open_fixture(&f, policies[n]);
            struct ctm_data *data = ctm_data_build(&cases[i]);
            if (n % 2) {
                data->params.fallback_available = 0;
                data->params.contiguous_query_swa = 1;
                if (!cases[i].fp8) data->params.k_scale = data->params.v_scale = 7;
                if (cases[i].q_len == 1) data->params.mask_words = -5;
            }
            if (serves(&f, &cases[i])) run(&f, data);
            for (int32_t b = 0; first && serves(&f, &cases[i]) && b < cases[i].batch; b++)
                cr_expect(ctm_data_equal(first, b, data, b), "%s, policy %s: sequence %d",
                          cases[i].name, policies[n], b);
            close_fixture(&f);
            if (first)
                ctm_data_free(&data);
            else
                first = data;
        }
        ctm_data_free(&first);
    }
}

// ---- skip-softmax

// Of a sequence alone and in company, on few blocks and on all: what the definition leaves out, and
// always the same bits. Scores are such that no decision is close.
static void expect_skips(const struct decode_kind *kind, int32_t ratio, int32_t page_size,
                         int32_t window, uint64_t seed)
{
    static const int32_t lens[] = { 130, 2049, 5000, 20000 };
    static const int32_t table[] = { 130, 16, 2049, 256, 5000, 625, 20000, 2500 };
    struct decode_case c = {
        .name = "skip",
        .q_dtype = kind->q_dtype,
        .kv_dtype = kind->kv_dtype,
        .batch = COUNT(lens),
        .given_lens = lens,
        .num_kv_heads = 2,
        .num_q_heads = 2 * ratio,
        .head_dim = kind->head_dim,
        .page_size = page_size,
        .window = window,
        .lse = true,
        .fill = DECODE_FILL_LEVELS,
        .skip = table,
        .skip_length = COUNT(table),
        .seed = seed,
    };
    struct decode_data *base = NULL;
    for (int32_t limit = 0; limit < 8; limit += 3) {
        struct gpu_session session;
        struct attn_check check;
        char found[512];
        gpu_session_open(&session, limit);
        struct decode_data *data = decode_data_need(&c, &session);
        decode_data_need_run(data, &session);
        cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s: %s", data->kernel,
                  decode_check_text(&check, found, sizeof(found)));
        cr_expect_eq(decode_data_dropped(data), decode_data_exact_dropped(data), "%s: %lld",
                     data->kernel, (long long) decode_data_dropped(data));
        for (int32_t i = 0; base && i < c.batch; i++)
            cr_expect(decode_data_equal(base, i, data, i), "%s: limit %d, sequence %d",
                      data->kernel, limit, i);
        for (int32_t i = 0; !base && i < c.batch; i++) {
            struct decode_case alone = c;
            alone.ids = &i;
            alone.given_lens = &lens[i];
            alone.batch = 1;
            struct decode_data *other = decode_data_need(&alone, &session);
            decode_data_need_run(other, &session);
            cr_expect(decode_data_equal(data, i, other, 0), "%s: sequence %d alone", data->kernel,
                      i);
            decode_data_free(&other);
        }
        gpu_session_close(&session);
        if (base)
            decode_data_free(&data);
        else
            base = data;
    }
    decode_data_free(&base);
}

Test(gpu_ctm, skips_what_the_definition_skips, .timeout = 300)
{
    const int32_t pages[] = { 128, 16, 48, 5 }, windows[] = { 0, 3000 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (size_t n = 0; n < 4; n++) {
            const struct decode_kind kind = { ATTN_DTYPE_FP16,
                                              n % 2 ? ATTN_DTYPE_E4M3 : ATTN_DTYPE_FP16, dims[i] };
            expect_skips(&kind, n < 2 ? 4 : 16, pages[(i + n) % COUNT(pages)], windows[n / 2], n);
        }
}

// Where nothing is left out: the bits of a call without a table.
Test(gpu_ctm, is_dense_where_it_has_to_be, .timeout = 60)
{
    static const int32_t tables[][2] = { { 0, 0 }, { 1, -7 }, { 1, INT32_MAX }, { 30000, 1 } };
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int fp8 = 0; fp8 < 2; fp8++) {
            struct ctm_case c = { "dense", 3, 8, 2, dims[i], 1, .lens = { 20000, 2500, 0 } };
            c.fp8 = fp8;
            struct ctm_data *dense = ctm_data_build(&c);
            run(&f, dense);
            for (size_t n = 0; n < COUNT(tables); n++) {
                c.skip = tables[n];
                c.skip_length = 2;
                struct ctm_data *data = ctm_data_build(&c);
                run(&f, data);
                expect_right(data);
                cr_expect_eq(ctm_data_dropped(data), 0, "table %zu", n);
                for (int32_t b = 0; b < c.batch; b++)
                    cr_expect(ctm_data_equal(dense, b, data, b), "head_dim %d, table %zu", dims[i],
                              n);
                ctm_data_free(&data);
            }
            ctm_data_free(&dense);
        }
    close_fixture(&f);
}

// ---- replay

static void fill_zone(struct fixture *f, const struct ctm_data *data, void *base,
                      enum ctm_zone zone, int byte)
{
    const struct canary_zone *const z = &data->zones[zone];
    cr_assert_eq(gpu_fill(f->session.gpu, (uint8_t *) base + z->offset, byte, z->bytes), 0);
}

// Captured while all lengths were 0, the table all -1 and the mask empty; run at the lengths of
// either case, which are of the same sizes.
static void expect_replay(struct fixture *f, const struct ctm_case cases[2])
{
    struct ctm_data *eager[2], *data[2];
    struct gpu_graph *graph;
    for (int i = 0; i < 2; i++) {
        eager[i] = ctm_data_build(&cases[i]);
        data[i] = ctm_data_build(&cases[i]);
        run(f, eager[i]);
    }
    cr_assert_eq(data[0]->bytes, data[1]->bytes);
    void *const base = upload(f, data[0]);
    const struct attn_ctm_params p = take_params(f, data[0], base);
    fill_zone(f, data[0], base, CTM_ZONE_LENS, 0);
    fill_zone(f, data[0], base, CTM_ZONE_TABLE, 0xFF);
    fill_zone(f, data[0], base, CTM_ZONE_MASK, 0);
    cr_assert_eq(gpu_graph_begin(f->session.gpu, f->session.stream), 0);
    call(f, &p, data[0]);
    cr_assert_eq(gpu_graph_end(f->session.gpu, f->session.stream, &graph), 0);
    for (int turn = 0; turn < 4; turn++) {
        struct ctm_data *const now = data[turn % 2];
        cr_assert_eq(gpu_upload(f->session.gpu, base, now->image, now->bytes), 0);
        cr_assert_eq(gpu_graph_launch(f->session.gpu, graph, f->session.stream), 0);
        fetch(f, now, base);
        for (int32_t b = 0; b < now->c.batch; b++)
            cr_expect(ctm_data_equal(now, b, eager[turn % 2], b), "%s, replay %d: sequence %d",
                      now->c.name, turn, b);
    }
    gpu_graph_destroy(f->session.gpu, &graph);
    gpu_free(f->session.gpu, base);
    for (int i = 0; i < 2; i++) {
        ctm_data_free(&eager[i]);
        ctm_data_free(&data[i]);
    }
}

Test(gpu_ctm, replays_at_other_lengths, .timeout = 60)
{
    struct fixture f;
    open_fixture(&f, NULL);
    for (size_t i = 0; i < 2 * COUNT(dims); i++) {
        const struct ctm_case c = {
            .name = "replay",
            .batch = 3,
            .num_q_heads = 6,
            .num_kv_heads = 2,
            .head_dim = dims[i / 2],
            .q_len = i % 2 ? 6 : 1,
            .lens = { 2000, 50, 333 },
            .window = 700,
            .per_row = true,
            .sinks = CTM_SINKS_RANDOM,
        };
        struct ctm_case cases[2] = { c, c };
        cases[1].lens[0] = 6;
        cases[1].lens[1] = 2000;
        cases[1].lens[2] = 0;
        cases[1].seed = 2;
        if (serves(&f, &c)) expect_replay(&f, cases);
    }
    close_fixture(&f);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Several query tokens a sequence and trees of drafts on a GPU: the definition, exact values at
// every edge of masks and windows, plain decode where a row is one, and bits that depend on the
// sequence alone. Slots that no query token of a sequence attends are NaN, and masks have any bits
// where there is no draft key.
//
// The bound is that of gpu_decode.c.
#include "tests/support/decode_gpu.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const int32_t ratios[] = { 1, 2, 3, 4, 5, 7, 8, 12, 16 };
static const int32_t page_sizes[] = { 1, 16, 48, 128 };

static void expect_right(const struct decode_data *data)
{
    char text[640], found[512];
    struct attn_check check;
    const bool right = decode_data_check(data, ATTN_CHECK_KERNEL, &check);
    decode_case_text(&data->c, text, sizeof(text));
    cr_expect(right, "%s, %s: %s", data->kernel, text,
              decode_check_text(&check, found, sizeof(found)));
    cr_expect_eq(decode_data_fault(data), decode_case_fault(&data->c), "%s, %s: fault %d",
                 data->kernel, text, decode_data_fault(data));
}

static struct decode_data *run(const struct decode_case *c, struct gpu_session *session)
{
    struct decode_data *data = decode_data_need(c, session);
    decode_data_need_run(data, session);
    return data;
}

static void expect_case(const struct decode_case *c, struct gpu_session *session)
{
    struct decode_data *data = run(c, session);
    expect_right(data);
    decode_data_free(&data);
}

// ---- the definition

enum {
    BATCH = 4,
    // Of q, in elements a sequence, where tokens are many: the definition takes its time.
    MAX_ELEMENTS = 1 << 17
};

// Sets what is no part of a product.
static void vary(struct decode_case *c, struct random *random)
{
    c->page_size = page_sizes[random_below(random, COUNT(page_sizes))];
    c->layout = (enum decode_layout) random_below(random, NUM_DECODE_LAYOUTS);
    c->v_table = random_below(random, 2);
    c->extra_columns = (int32_t) random_below(random, 3);
    c->extra_stride = (int32_t) random_below(random, 3) * 5;
    c->extra_words = (int32_t) random_below(random, 3);
    c->fused_q = random_below(random, 2);
    c->lse = random_below(random, 4) != 0;
    c->scales = random_below(random, 3) == 0;
    c->softcap = random_below(random, 8) == 0 ? 20 : 0;
    c->poison = random_below(random, 4) ? 0xFF : 0x7F;
    c->page_seed = random_next(random);
    c->seed = random_next(random);
}

// Windows of 1 key to more than there are.
static void set_window(struct decode_case *c, int form, struct random *random)
{
    const uint32_t most[] = { (uint32_t) c->q_len, 64, 300 };
    if (form == 0) return;
    c->window = 1 + (int32_t) random_below(random, most[random_below(random, COUNT(most))]);
    c->window_form = form == 1 ? ATTN_WINDOW_SHARED : ATTN_WINDOW_PER_TOKEN;
}

// Lengths from 0, or too few for the tokens, to a few leaves.
static void set_lens(struct decode_case *c, struct random *random, int32_t lens[BATCH])
{
    const uint32_t q_len = (uint32_t) c->q_len;
    lens[0] = (int32_t) random_below(random, q_len + 1);
    lens[1] = (int32_t) (q_len + random_below(random, 40));
    lens[2] = (int32_t) (100 + random_below(random, 60));
    lens[3] = (int32_t) (190 + random_below(random, 80));
    c->batch = BATCH;
    c->given_lens = lens;
}

static void expect_combination(const struct decode_case *given, const struct decode_kind *kind,
                               int form, struct random *random, struct gpu_session *session)
{
    int32_t lens[BATCH];
    struct decode_case c = *given;
    vary(&c, random);
    set_window(&c, form, random);
    set_lens(&c, random, lens);
    decode_case_set_kind(&c, kind);
    expect_case(&c, session);
}

// Every ratio with every tree, form of the window, and sinks or none.
static void expect_kind(const struct decode_kind *kind, struct random *random,
                        struct gpu_session *session)
{
    const int32_t q_lens[] = { 2, 5, 8, 1 };
    for (size_t i = 0; i < COUNT(ratios); i++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++)
            for (int form = 0; form < 3; form++)
                for (int sinks = 0; sinks < 2; sinks++) {
                    const int32_t kv_heads = ratios[i] > 4 ? 1 : 2;
                    const struct decode_case c = {
                        .name = "tree",
                        .num_q_heads = ratios[i] * kv_heads,
                        .num_kv_heads = kv_heads,
                        .q_len = q_lens[random_below(random, COUNT(q_lens))],
                        .tree = (enum decode_tree) tree,
                        .sinks = sinks,
                    };
                    expect_combination(&c, kind, form, random, session);
                }
}

// As many ratios as the definition can follow.
static void expect_long(const struct decode_kind *kind, struct random *random,
                        struct gpu_session *session)
{
    const int32_t q_lens[] = { 31, 33, 60, 64, 128 };
    for (size_t i = 0; i < COUNT(q_lens); i++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
            int32_t ratio;
            do ratio = ratios[random_below(random, COUNT(ratios))];
            while (ratio * q_lens[i] * kind->head_dim > MAX_ELEMENTS);
            const struct decode_case c = {
                .name = "long tree",
                .num_q_heads = ratio,
                .num_kv_heads = 1,
                .q_len = q_lens[i],
                .tree = (enum decode_tree) tree,
                .sinks = random_below(random, 2),
            };
            expect_combination(&c, kind, (tree + (int) i) % 3, random, session);
        }
}

Test(gpu_trees, agrees_with_the_definition, .timeout = 300)
{
    struct gpu_session session;
    struct random random = { random_seed(81) };
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        if (gpu_session_serves(&session, &decode_kinds[i]))
            expect_kind(&decode_kinds[i], &random, &session);
    gpu_session_close(&session);
}

Test(gpu_trees, agrees_with_many_tokens, .timeout = 300)
{
    struct gpu_session session;
    struct random random = { random_seed(82) };
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        if (gpu_session_serves(&session, &decode_kinds[i]))
            expect_long(&decode_kinds[i], &random, &session);
    gpu_session_close(&session);
}

// Every fill: NaN and infinities in what some tokens attend, far and huge values.
Test(gpu_trees, takes_all_values, .timeout = 120)
{
    struct gpu_session session;
    struct random random = { random_seed(83) };
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (int fill = 0; fill < NUM_DECODE_FILLS; fill++) {
            const struct decode_case c = {
                .name = "fill",
                .num_q_heads = 6,
                .num_kv_heads = 2,
                .q_len = 5,
                .tree = (enum decode_tree)((fill + (int) i) % NUM_DECODE_TREES),
                .fill = (enum decode_fill) fill,
            };
            if (gpu_session_serves(&session, &decode_kinds[i]))
                expect_combination(&c, &decode_kinds[i], fill % 3, &random, &session);
        }
    gpu_session_close(&session);
}

// Where the policy cuts sequences into numbers of pieces. Of long windows some are empty.
Test(gpu_trees, every_policy, .timeout = 120)
{
    static const int32_t lens[] = { 1100, 0, 3, 300, 257, 9, 700 };
    const char *const policies[] = { "auto", "1", "3", "16", "legacy" };
    for (size_t p = 0; p < COUNT(policies); p++) {
        struct gpu_session session;
        struct random random = { random_seed(84) + p };
        gpu_session_open_policy(&session, policies[p]);
        for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
            for (int form = 0; form < 4; form++) {
                // The last: a piece that has a key more than the window, in units of a leaf.
                struct decode_case c = {
                    .name = policies[p],
                    .num_q_heads = 6,
                    .num_kv_heads = 1 + form % 3,
                    .q_len = form == 2 ? 9 : form == 3 ? 2 : 4,
                    .tree = (enum decode_tree) random_below(&random, NUM_DECODE_TREES),
                    .sinks = true,
                };
                vary(&c, &random);
                c.batch = form == 3 ? 1 : COUNT(lens);
                c.given_lens = lens;
                c.window = form == 0 ? 0 : form == 3 ? 128 : i % 2 ? 600 : 2;
                c.window_form = (enum attn_window_form)(form == 1);
                decode_case_set_kind(&c, &decode_kinds[i]);
                if (gpu_session_serves(&session, &decode_kinds[i])) expect_case(&c, &session);
            }
        gpu_session_close(&session);
    }
}

// ---- means: scores 0, and V one bit a token, so that o names the attended tokens

enum {
    MAX_DIM = 512
};

// Weights and sums are exact here: what is left is a division and a rounding.
static void expect_mean(const struct decode_data *data, int32_t sequence, int32_t token)
{
    const struct decode_case *const c = &data->c;
    const double unit = data->params.q_dtype == ATTN_DTYPE_FP16 ? 0x1p-11 : 0x1p-8;
    const double v_scale = data->params.v_scale;
    char text[640];
    double mean[MAX_DIM];
    const int32_t count = decode_bits_row(c, sequence, token, mean);
    for (int32_t h = 0; h < c->num_q_heads; h++)
        for (int32_t d = 0; d < c->head_dim; d++) {
            const double o = decode_data_o(data, sequence, token, h, d), exact = v_scale * mean[d];
            cr_assert(fabs(o - exact) <= exact * (unit + 0x1p-20) && !signbit(o),
                      "%s, %s: length %d, token %d, head %d, dim %d: %g for %g", data->kernel,
                      decode_case_text(c, text, sizeof(text)), c->given_lens[sequence], token, h, d,
                      o, exact);
        }
    for (int32_t h = 0; c->lse && h < c->num_q_heads; h++) {
        const double lse = decode_data_lse(data, sequence, token, h);
        const double exact = count > 0 ? log(count) : -INFINITY;
        cr_assert(lse == exact || fabs(lse - exact) <= 0x1p-15, "%s, %s: lse %g for %g",
                  data->kernel, decode_case_text(c, text, sizeof(text)), lse, exact);
    }
}

static void expect_means(const struct decode_case *c, struct gpu_session *session)
{
    struct decode_data *data = run(c, session);
    for (int32_t b = 0; b < c->batch; b++)
        for (int32_t token = 0; token < c->q_len; token++) expect_mean(data, b, token);
    cr_expect_eq(decode_data_fault(data), decode_case_fault(c), "%s: fault %d", data->kernel,
                 decode_data_fault(data));
    decode_data_free(&data);
}

static struct decode_case bits_case(const struct decode_kind *kind, int tree, size_t turn)
{
    struct decode_case c = {
        .name = "bits",
        .num_q_heads = ratios[turn % COUNT(ratios)],
        .num_kv_heads = 1,
        .page_size = page_sizes[turn % COUNT(page_sizes)],
        .tree = (enum decode_tree) tree,
        .lse = true,
        .fill = DECODE_FILL_BITS,
        .layout = (enum decode_layout)(turn % NUM_DECODE_LAYOUTS),
        .v_table = turn % 3 > 0,
        .extra_words = (int32_t) turn % 2,
        .extra_stride = (int32_t) turn % 3,
        .page_seed = turn,
        .seed = random_seed(85) + turn,
    };
    decode_case_set_kind(&c, kind);
    return c;
}

// Lengths around edges of pages and leaves, of q_len and of the window.
static void expect_edges(const struct decode_kind *kind, int tree, int32_t q_len, size_t turn,
                         struct gpu_session *session)
{
    const int32_t windows[] = { 0, 1, q_len - 1, q_len, 40, 127, 128, 129, 200 };
    for (size_t w = 0; w < 2 * COUNT(windows); w++) {
        const int32_t window = windows[w / 2];
        const int32_t lens[] = { window + 37, window, window / 2, 0,   q_len - 1, q_len,
                                 q_len + 1,   15,     16,         17,  127,       128,
                                 129,         255,    256,        257, 384,       385 };
        struct decode_case c = bits_case(kind, tree, turn + w);
        c.batch = COUNT(lens);
        c.given_lens = lens;
        c.q_len = q_len;
        c.window = window;
        c.window_form = (enum attn_window_form)(w % 2);
        if (window > 0 || w % 2 == 0) expect_means(&c, session);
    }
}

// q_len, ratio, pages and tables take turns.
Test(gpu_trees, exact_means, .timeout = 180)
{
    const int32_t q_lens[] = { 2, 7, 33, 1 };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++)
            if (gpu_session_serves(&session, &decode_kinds[i]))
                expect_edges(&decode_kinds[i], tree, q_lens[(i + (size_t) tree) % COUNT(q_lens)],
                             i + 5 * (size_t) tree, &session);
    gpu_session_close(&session);
}

// Of the longest call: every bit of every word of a row, in every ratio.
Test(gpu_trees, exact_means_of_128_tokens, .timeout = 120)
{
    static const int32_t lens[] = { 100, 128, 129, 300 };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
            struct decode_case c = bits_case(&decode_kinds[i], tree, i + (size_t) tree);
            c.batch = COUNT(lens);
            c.given_lens = lens;
            c.q_len = ATTN_DECODE_MAX_Q_LEN;
            c.window = tree % 2 ? 60 : 0;
            c.window_form = (enum attn_window_form)(i % 2);
            if (gpu_session_serves(&session, &decode_kinds[i])) expect_means(&c, &session);
        }
    gpu_session_close(&session);
}

// ---- verify == decode

// Rows whose draft keys are the first few have the bits of plain decode of these.
static int32_t expect_decode(const struct decode_data *verify, struct gpu_session *session)
{
    const int32_t *const own_lens = verify->c.given_lens;
    char text[640];
    int32_t lens[16], count = 0;
    struct decode_case c;
    for (int32_t token = 0; token < verify->params.q_len; token++) {
        if (!decode_case_as_plain(&verify->c, token, &c, lens)) continue;
        struct decode_data *plain = run(&c, session);
        for (int32_t b = 0; b < c.batch; b++)
            cr_expect(lens[b] > own_lens[b] ||
                          decode_data_equal_token(verify, b, token, plain, b, 0),
                      "%s and %s: length %d, token %d: %s", verify->kernel, plain->kernel,
                      own_lens[b], token, decode_case_text(&verify->c, text, sizeof(text)));
        decode_data_free(&plain);
        count++;
    }
    return count;
}

static void expect_verify(const struct decode_kind *kind, int32_t ratio, int32_t window,
                          struct gpu_session *session)
{
    // Around edges of leaves, and of as many that they are dealt out.
    static const int32_t lens[] = { 3, 5, 6, 33, 64, 130, 131, 257, 300, 1029, 4100, 9003 };
    struct decode_case c = {
        .name = "verify",
        .batch = COUNT(lens),
        .given_lens = lens,
        .num_q_heads = ratio,
        .num_kv_heads = 1,
        .page_size = ratio % 3 ? 16 : 5,
        .window = window,
        .q_len = 5,
        .tree = ratio % 8 ? DECODE_TREE_NONE : DECODE_TREE_CAUSAL,
        .sinks = ratio % 5 != 0,
        .lse = true,
        .v_table = ratio == 8,
        .seed = random_seed(86) + (uint64_t) ratio,
    };
    decode_case_set_kind(&c, kind);
    struct decode_data *verify = run(&c, session);
    cr_expect_eq(expect_decode(verify, session), c.q_len);
    decode_data_free(&verify);
}

Test(gpu_trees, verify_is_decode, .timeout = 180)
{
    const int32_t some_ratios[] = { 1, 4, 8, 12, 16 }, windows[] = { 0, 129 };
    struct gpu_session session;
    gpu_session_open_policy(&session, "chunk");
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (size_t n = 0; n < COUNT(some_ratios) * COUNT(windows); n++)
            if (gpu_session_serves(&session, &decode_kinds[i]))
                expect_verify(&decode_kinds[i], some_ratios[n / COUNT(windows)],
                              windows[n % COUNT(windows)], &session);
    gpu_session_close(&session);
}

// Of trees: chains, rows that attend all, and rows that attend the past alone.
Test(gpu_trees, rows_are_plain_decode, .timeout = 120)
{
    static const int32_t lens[] = { 4, 9, 10, 130, 140, 300, 700 };
    struct gpu_session session;
    gpu_session_open_policy(&session, "chunk");
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++)
        for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
            const size_t n = i + (size_t) tree;
            struct decode_case c = {
                .name = "rows",
                .batch = COUNT(lens),
                .given_lens = lens,
                .num_q_heads = 3,
                .num_kv_heads = 1,
                .page_size = page_sizes[n % COUNT(page_sizes)],
                .q_len = 9,
                .tree = (enum decode_tree) tree,
                .window = n % 2 ? 130 : 0,
                .window_form = (enum attn_window_form)(i % 2),
                .sinks = n % 3,
                .lse = true,
                .seed = random_seed(87),
            };
            decode_case_set_kind(&c, &decode_kinds[i]);
            if (!gpu_session_serves(&session, &decode_kinds[i])) continue;
            struct decode_data *data = run(&c, &session);
            expect_decode(data, &session);
            decode_data_free(&data);
        }
    gpu_session_close(&session);
}

// ---- the bits of a sequence depend on that sequence alone

enum {
    CROWD = 48
};

// Few tokens and many, narrow groups and wide ones, all pairs of types.
static const struct {
    struct decode_kind kind;
    int32_t num_q_heads, num_kv_heads, q_len;
} shapes[] = {
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 }, 8, 1, 5 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 8, 2, 8 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 256 }, 6, 1, 3 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 128 }, 20, 1, 2 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, 64 }, 3, 3, 40 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 128 }, 7, 1, 12 },
    { { ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3, 128 }, 6, 1, 4 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_E4M3, 256 }, 12, 1, 7 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 32 }, 4, 2, 16 },
    { { ATTN_DTYPE_FP16, ATTN_DTYPE_FP16, 512 }, 2, 1, 33 },
};

static struct decode_case crowd_case(size_t shape)
{
    struct decode_case c = {
        .name = "crowd",
        .batch = CROWD,
        .num_q_heads = shapes[shape].num_q_heads,
        .num_kv_heads = shapes[shape].num_kv_heads,
        .page_size = 16,
        .len = 3000,
        .lens = DECODE_LENS_LOG,
        .q_len = shapes[shape].q_len,
        .tree = DECODE_TREE_RANDOM,
        .window = shape % 3 ? 900 : 0,
        .window_form = (enum attn_window_form)(shape % 2),
        .sinks = true,
        .lse = true,
        .seed = random_seed(88),
    };
    decode_case_set_kind(&c, &shapes[shape].kind);
    return c;
}

static void expect_equal(const struct decode_data *a, const struct decode_data *b, const char *what)
{
    for (int32_t i = 0; i < a->c.batch; i++)
        cr_expect(decode_data_equal(a, i, b, i), "%s and %s, %s: sequence %d, seed %llu", a->kernel,
                  b->kernel, what, i, (unsigned long long) a->c.seed);
}

static void expect_same(const struct decode_case *c, const struct decode_data *base,
                        struct gpu_session *session, const char *what)
{
    struct decode_data *data = run(c, session);
    expect_equal(base, data, what);
    decode_data_free(&data);
}

static void expect_layout_free(const struct decode_data *base, struct gpu_session *session)
{
    const struct decode_case b = base->c;
    struct {
        const char *what;
        struct decode_case c;
    } changes[] = {
        { "words of the mask", b }, { "pages, unused bits", b }, { "stride of the table", b },
        { "a table for V", b },     { "pages of 1", b },         { "pages of 100, strides", b },
        { "other poison", b },      { "without lse", b },
    };
    changes[0].c.extra_words = 3;
    changes[1].c.page_seed = 7;
    changes[2].c.extra_stride = 11;
    changes[3].c.v_table = true;
    changes[3].c.extra_columns = 400;
    changes[4].c.page_size = 1;
    changes[4].c.v_table = true;
    changes[5].c.page_size = 100;
    changes[5].c.fused_q = true;
    changes[5].c.layout = DECODE_LAYOUT_MIXED;
    changes[6].c.poison = 0x01;
    changes[6].c.layout = DECODE_LAYOUT_LAYER;
    changes[7].c.lse = false;
    for (size_t i = 0; i < COUNT(changes); i++)
        expect_same(&changes[i].c, base, session, changes[i].what);
}

static void expect_company_free(const struct decode_data *base, struct gpu_session *session)
{
    int32_t reversed[CROWD];
    for (int32_t i = 0; i < CROWD; i++) reversed[i] = CROWD - 1 - i;
    struct decode_case c = base->c;
    c.ids = reversed;
    struct decode_data *data = run(&c, session);
    for (int32_t i = 0; i < CROWD; i++)
        cr_expect(decode_data_equal(base, i, data, CROWD - 1 - i),
                  "%s: sequence %d in another order", base->kernel, i);
    decode_data_free(&data);
    c.batch = 1;
    for (int32_t i = 0; i < CROWD; i++) {
        c.ids = &i;
        data = run(&c, session);
        cr_expect(decode_data_equal(base, i, data, 0), "%s and %s: sequence %d alone", base->kernel,
                  data->kernel, i);
        decode_data_free(&data);
    }
}

// Every odd sequence has NaN in all of q: the even ones don't notice.
static void expect_neighbour_free(const struct decode_data *base, struct gpu_session *session)
{
    struct decode_data *data = decode_data_need(&base->c, session);
    const int64_t stride = data->params.q_stride;
    uint16_t *const q = decode_image(data, DECODE_ZONE_Q);
    for (int32_t b = 1; b < CROWD; b += 2)
        for (int64_t i = 0; i < stride; i++) q[b * stride + i] = 0x7FC0;
    decode_data_need_run(data, session);
    for (int32_t b = 0; b < CROWD; b += 2)
        cr_expect(decode_data_equal(base, b, data, b), "%s: sequence %d, odd ones are NaN",
                  base->kernel, b);
    decode_data_free(&data);
}

Test(gpu_trees, company_and_layout, .timeout = 180)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < COUNT(shapes); shape++) {
        if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
        const struct decode_case c = crowd_case(shape);
        struct decode_data *base = run(&c, &session);
        expect_layout_free(base, &session);
        expect_company_free(base, &session);
        expect_neighbour_free(base, &session);
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

Test(gpu_trees, schedule, .timeout = 120)
{
    const int32_t limits[] = { 1, 7, 132 };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < COUNT(shapes); shape++) {
        if (!gpu_session_serves(&session, &shapes[shape].kind)) continue;
        struct decode_case c = crowd_case(shape);
        c.len = 1500;
        struct decode_data *base = run(&c, &session);
        for (size_t i = 0; i < COUNT(limits); i++) {
            struct gpu_session limited;
            gpu_session_open(&limited, limits[i]);
            expect_same(&c, base, &limited, "grid limit");
            gpu_session_close(&limited);
        }
        decode_data_free(&base);
    }
    gpu_session_close(&session);
}

// ---- replay

static void fill_zone(const struct decode_remote *remote, enum decode_zone zone, int byte)
{
    const struct canary_zone *const z = &remote->data->zones[zone];
    cr_assert_eq(gpu_fill(remote->gpu, (uint8_t *) remote->base + z->offset, byte, z->bytes), 0);
}

// The call as captured while all lengths were 0, tables all -1 and masks empty.
static void capture(const struct decode_remote *remote, struct gpu_session *session,
                    struct gpu_graph **graph)
{
    const struct attn_decode_params params = decode_remote_params(remote);
    fill_zone(remote, DECODE_ZONE_LENS, 0);
    fill_zone(remote, DECODE_ZONE_TABLE, 0xFF);
    fill_zone(remote, DECODE_ZONE_V_TABLE, 0xFF);
    fill_zone(remote, DECODE_ZONE_MASK, 0);
    cr_assert_eq(gpu_graph_begin(session->gpu, session->stream), 0);
    cr_assert_eq(attn_decode(session->device, &params, session->stream), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(gpu_graph_end(session->gpu, session->stream, graph), 0);
}

// On what `data`, of the same sizes, has in memory.
static void replay(struct decode_remote *remote, struct gpu_session *session,
                   struct gpu_graph *graph, struct decode_data *data)
{
    remote->data = data;
    cr_assert_eq(decode_remote_reset(remote), 0);
    cr_assert_eq(gpu_graph_launch(session->gpu, graph, session->stream), 0);
    cr_assert_eq(gpu_stream_sync(session->gpu, session->stream), 0);
    cr_assert_eq(decode_remote_fetch(remote), 0);
    cr_expect(decode_data_intact(data), "%s wrote where it should not", data->kernel);
}

// Then other lengths and masks: sequences in the opposite order take the same memory.
static void expect_replay(struct gpu_session *session, size_t shape)
{
    int32_t reversed[CROWD];
    for (int32_t i = 0; i < CROWD; i++) reversed[i] = CROWD - 1 - i;
    struct decode_case c = crowd_case(shape);
    c.v_table = true;
    struct decode_data *base = run(&c, session), *data = decode_data_need(&c, session);
    c.ids = reversed;
    struct decode_data *other = decode_data_need(&c, session);
    struct decode_remote remote;
    struct gpu_graph *graph;
    cr_assert_eq(data->bytes, other->bytes);
    cr_assert_eq(decode_remote_open(&remote, session->gpu, data), 0);
    capture(&remote, session, &graph);
    for (int turn = 0; turn < 2; turn++) {
        replay(&remote, session, graph, data);
        expect_equal(base, data, "replay");
        replay(&remote, session, graph, other);
        for (int32_t i = 0; i < CROWD; i++)
            cr_expect(decode_data_equal(base, i, other, CROWD - 1 - i),
                      "%s: sequence %d, replay in another order", base->kernel, i);
    }
    gpu_graph_destroy(session->gpu, &graph);
    decode_remote_close(&remote);
    decode_data_free(&base);
    decode_data_free(&data);
    decode_data_free(&other);
}

Test(gpu_trees, graphs, .timeout = 60)
{
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t shape = 0; shape < COUNT(shapes); shape++)
        if (gpu_session_serves(&session, &shapes[shape].kind)) expect_replay(&session, shape);
    gpu_session_close(&session);
}

// ---- pages that the pool does not have, of K or of V: reported, their keys absent, nobody else
// troubled

enum {
    BAD_BATCH = 5,
    BAD_LEN = 200,
};

// A page of sequences 1 and 3 is none: in the past, of draft keys, or behind the last.
static void expect_bad_page(const struct decode_data *clean, int32_t key, bool is_v, int32_t page,
                            struct gpu_session *session)
{
    struct attn_check check;
    char found[512];
    struct decode_data *data = decode_data_need(&clean->c, session);
    int32_t *const table = decode_image(data, is_v ? DECODE_ZONE_V_TABLE : DECODE_ZONE_TABLE);
    const int32_t column = key / data->c.page_size, last = (BAD_LEN - 1) / data->c.page_size;
    for (int32_t b = 1; b < BAD_BATCH; b += 2) table[b * data->params.table_stride + column] = page;
    decode_data_need_run(data, session);
    const int32_t fault = column <= last ? 1 : INT32_MAX;
    cr_expect_eq(decode_data_fault(data), fault, "%s: key %d of %s on page %d: fault %d",
                 data->kernel, key, is_v ? "V" : "K", page, decode_data_fault(data));
    cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check), "%s: key %d of %s on page %d: %s",
              data->kernel, key, is_v ? "V" : "K", page,
              decode_check_text(&check, found, sizeof(found)));
    for (int32_t b = 0; b < BAD_BATCH; b += fault == 1 ? 2 : 1)
        cr_expect(decode_data_equal(clean, b, data, b), "%s: key %d of %s on page %d: sequence %d",
                  data->kernel, key, is_v ? "V" : "K", page, b);
    decode_data_free(&data);
}

static void expect_bad_pages(const struct decode_case *c, struct gpu_session *session)
{
    const int32_t keys[] = { 0, BAD_LEN - 2, BAD_LEN + 16 };
    struct decode_data *clean = run(c, session);
    const int32_t pages[] = { -1, INT32_MIN, INT32_MAX, (int32_t) clean->params.num_pages };
    for (size_t i = 0; i < COUNT(keys) * COUNT(pages); i++) {
        expect_bad_page(clean, keys[i / COUNT(pages)], false, pages[i % COUNT(pages)], session);
        expect_bad_page(clean, keys[i / COUNT(pages)], true, pages[i % COUNT(pages)], session);
    }
    decode_data_free(&clean);
}

// A page of one key, and one of 16, that only the last token attends but one.
Test(gpu_trees, survives_bad_pages, .timeout = 120)
{
    static const int32_t lens[BAD_BATCH] = { BAD_LEN, BAD_LEN, BAD_LEN, BAD_LEN, BAD_LEN };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t i = 0; i < NUM_DECODE_KINDS; i++) {
        struct decode_case c = {
            .name = "bad pages",
            .batch = BAD_BATCH,
            .given_lens = lens,
            .num_q_heads = 4,
            .num_kv_heads = 2,
            .page_size = i % 2 ? 16 : 1,
            .q_len = 4,
            .tree = DECODE_TREE_STAR,
            .lse = true,
            .v_table = true,
            .extra_columns = 20,
            .seed = random_seed(89),
        };
        decode_case_set_kind(&c, &decode_kinds[i]);
        if (gpu_session_serves(&session, &decode_kinds[i])) expect_bad_pages(&c, &session);
    }
    gpu_session_close(&session);
}

// Lengths below 0, past the table, and too short: the first of them is reported.
Test(gpu_trees, survives_bad_lengths, .timeout = 60)
{
    static const int32_t lens[] = { 100, 130, 64, 7, 90, 0 };
    static const int32_t bad_lens[] = { -1, INT32_MIN, INT32_MAX, 3 };
    struct gpu_session session;
    gpu_session_open(&session, 0);
    for (size_t n = 0; n < NUM_DECODE_KINDS * COUNT(bad_lens); n++) {
        const struct decode_kind *const kind = &decode_kinds[n / COUNT(bad_lens)];
        struct decode_case c = {
            .name = "bad lengths",
            .batch = COUNT(lens),
            .given_lens = lens,
            .num_q_heads = 4,
            .num_kv_heads = 1,
            .page_size = 16,
            .q_len = 7,
            .tree = DECODE_TREE_RANDOM,
            .lse = true,
            .seed = random_seed(90),
        };
        decode_case_set_kind(&c, kind);
        if (!gpu_session_serves(&session, kind)) continue;
        struct decode_data *clean = run(&c, &session), *data = decode_data_need(&c, &session);
        int32_t *const given = decode_image(data, DECODE_ZONE_LENS);
        // Sequence 1 fills the table, or nearly.
        given[2] = given[4] = bad_lens[n % COUNT(bad_lens)];
        decode_data_need_run(data, &session);
        cr_expect_eq(decode_data_fault(data), 2, "%s, length %d: fault %d", data->kernel, given[2],
                     decode_data_fault(data));
        for (int32_t b = 0; b < c.batch; b++)
            cr_expect(b == 2 || b == 4 || decode_data_equal(clean, b, data, b),
                      "%s, length %d: sequence %d", data->kernel, given[2], b);
        decode_data_free(&clean);
        decode_data_free(&data);
    }
    gpu_session_close(&session);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Several query tokens a sequence, trees of drafts, a table for V alone, and skip-softmax, on the
// host executor: against answers that follow from arithmetic, plain decode, and definitions written
// a second time.
#include "tests/support/decode_case.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static struct attn_device *device;

static void open_host(void)
{
    const struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
}

static void close_host(void)
{
    attn_device_close(&device);
}

TestSuite(trees, .init = open_host, .fini = close_host);
TestSuite(skip, .init = open_host, .fini = close_host);

static struct decode_data *build(const struct decode_case *c)
{
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, c, device), ATTN_OK, "%s", attn_last_error());
    return data;
}

static void rerun(struct decode_data *data)
{
    cr_assert_eq(decode_data_run_host(data, device), ATTN_OK, "%s", attn_last_error());
    cr_expect(decode_data_intact(data));
}

static struct decode_data *run(const struct decode_case *c)
{
    struct decode_data *data = build(c);
    rerun(data);
    return data;
}

static double round_fp16(double value)
{
    uint16_t rounded;
    attn_store(&rounded, 0, ATTN_DTYPE_FP16, value);
    return attn_load(&rounded, 0, ATTN_DTYPE_FP16);
}

// ---- means: scores 0, and V a power of two that names its key

enum {
    DIM = 32
};

static struct decode_case bits_case(const int32_t *lens, int32_t batch)
{
    const struct decode_case c = {
        .name = "bits",
        .q_dtype = ATTN_DTYPE_FP16,
        .batch = batch,
        .given_lens = lens,
        .num_q_heads = 1,
        .num_kv_heads = 1,
        .head_dim = DIM,
        .page_size = 16,
        .lse = true,
        .fill = DECODE_FILL_BITS,
        .seed = random_seed(61),
    };
    return c;
}

// Every row is the mean of what it attends, to the bit.
static void expect_means(const struct decode_data *data)
{
    const struct decode_case *const c = &data->c;
    char text[640];
    decode_case_text(c, text, sizeof(text));
    for (int32_t b = 0; b < c->batch; b++)
        for (int32_t token = 0; token < data->params.q_len; token++) {
            double mean[DIM];
            const int32_t count = decode_bits_row(c, b, token, mean);
            for (int32_t d = 0; d < DIM; d++) {
                const double o = decode_data_o(data, b, token, 0, d);
                cr_assert(o == round_fp16(mean[d]) && !signbit(o),
                          "%s: length %d, token %d, dim %d: %g for %g", text, c->given_lens[b],
                          token, d, o, mean[d]);
            }
            const double lse = decode_data_lse(data, b, token, 0);
            const double exact = count > 0 ? log(count) : -INFINITY;
            cr_assert(lse == exact || fabs(lse - exact) < 1e-6, "%s: lse %g for %g", text, lse,
                      exact);
        }
}

Test(trees, exact_means)
{
    // Around the edges of pages of 16 and of 128, and of q_len.
    static const int32_t lens[] = { 0,  1,  6,  7,  8,  9,  15, 16, 17, 23,  24,  25,
                                    31, 32, 33, 34, 39, 40, 41, 64, 72, 127, 128, 129 };
    static const int32_t q_lens[] = { 1, 2, 7, 33 }, page_sizes[] = { 16, 5, 128, 1 };
    for (int tree = 0; tree < NUM_DECODE_TREES; tree++)
        for (size_t i = 0; i < COUNT(q_lens); i++) {
            // Off, within the draft keys, of half a context and more, and longer than any.
            const int32_t windows[] = { 0, 1, q_lens[i] - 1, q_lens[i], 20, 40, 77, 166 };
            for (size_t w = 0; w < 2 * COUNT(windows); w++) {
                struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
                c.q_len = q_lens[i];
                c.page_size = page_sizes[i];
                c.tree = (enum decode_tree) tree;
                c.window = windows[w / 2];
                c.window_form = (enum attn_window_form)(w % 2);
                c.v_table = w % 2 == 1;
                c.extra_words = tree % 3;
                c.extra_stride = (int32_t) i;
                struct decode_data *data = run(&c);
                expect_means(data);
                cr_assert_eq(decode_data_fault(data), decode_case_fault(&c));
                decode_data_free(&data);
            }
        }
}

// Of the longest call: every bit of every word of a row.
Test(trees, exact_means_of_128_tokens)
{
    static const int32_t lens[] = { 100, 128, 129, 200 };
    for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
        struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
        c.q_len = ATTN_DECODE_MAX_Q_LEN;
        c.tree = (enum decode_tree) tree;
        c.window = tree % 2 ? 60 : 0;
        struct decode_data *data = run(&c);
        expect_means(data);
        cr_expect_eq(decode_data_fault(data), 0);
        decode_data_free(&data);
    }
}

// A row of the mask without bits attends the past alone: that is plain decode without a key more.
Test(trees, empty_rows_attend_the_past_alone)
{
    static const int32_t lens[] = { 4, 3, 0, 20, 21 }, past[] = { 0, 0, 0, 16, 17 };
    for (int sinks = 0; sinks < 2; sinks++) {
        struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
        c.fill = DECODE_FILL_UNIFORM;
        c.num_q_heads = 3;
        c.q_len = 4;
        c.tree = DECODE_TREE_EMPTY;
        c.sinks = sinks;
        struct decode_data *tree = run(&c);
        const float *const sink = decode_image(tree, DECODE_ZONE_SINKS);
        c.given_lens = past;
        c.tree = DECODE_TREE_NONE;
        c.q_len = 1;
        for (int32_t token = 0; token < 4; token++) {
            c.first_token = token;
            struct decode_data *plain = run(&c);
            for (int32_t b = 0; b < 5; b++) {
                cr_expect(decode_data_equal_token(tree, b, token, plain, b, 0), "sequence %d", b);
                for (int32_t d = 0; b < 3 && d < DIM; d++) {
                    const double o = decode_data_o(tree, b, token, 1, d);
                    cr_assert(o == 0 && !signbit(o));
                }
                if (b < 3)
                    cr_expect_eq(decode_data_lse(tree, b, token, 1),
                                 sinks ? (double) sink[1] : -INFINITY);
            }
            decode_data_free(&plain);
        }
        decode_data_free(&tree);
    }
}

// ---- verify == decode

// Rows whose draft keys are the first few are plain decode of these, bit for bit: all of a causal
// call.
static int32_t expect_decode(const struct decode_data *verify)
{
    int32_t lens[16], count = 0;
    struct decode_case c;
    for (int32_t token = 0; token < verify->params.q_len; token++) {
        if (!decode_case_as_plain(&verify->c, token, &c, lens)) continue;
        struct decode_data *plain = run(&c);
        for (int32_t b = 0; b < c.batch; b++)
            cr_expect(lens[b] > verify->c.given_lens[b] ||
                          decode_data_equal_token(verify, b, token, plain, b, 0),
                      "length %d, token %d, window %d (form %d), tree %d, seed %llu",
                      verify->c.given_lens[b], token, verify->c.window, (int) verify->c.window_form,
                      (int) verify->c.tree, (unsigned long long) c.seed);
        decode_data_free(&plain);
        count++;
    }
    return count;
}

Test(trees, verify_is_decode)
{
    static const int32_t lens[] = { 3, 6, 7, 40, 129, 261, 300, 515 };
    const int32_t windows[] = { 0, 1, 4, 50, 270 };
    for (size_t w = 0; w < COUNT(windows); w++)
        for (int kind = 0; kind < NUM_DECODE_KINDS; kind += 5) {
            struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
            decode_case_set_kind(&c, &decode_kinds[kind]);
            c.fill = DECODE_FILL_UNIFORM;
            c.num_q_heads = 3;
            c.q_len = 6;
            c.tree = w % 2 ? DECODE_TREE_CAUSAL : DECODE_TREE_NONE;
            c.window = windows[w];
            c.sinks = kind > 0;
            c.fused_q = w % 2;
            c.v_table = w == 2;
            struct decode_data *verify = run(&c);
            cr_expect_eq(expect_decode(verify), c.q_len);
            decode_data_free(&verify);
        }
}

// Of the other trees: all rows, the first two, or the past alone.
Test(trees, rows_are_plain_decode)
{
    static const int32_t lens[] = { 6, 7, 40, 129, 261, 300, 515 };
    static const int32_t counts[NUM_DECODE_TREES] = { 6, 6, 6, 2, 2, 0, 6 };
    const int32_t windows[] = { 0, 50, 270 };
    for (int tree = 0; tree < NUM_DECODE_TREES; tree++)
        for (size_t w = 0; w < 2 * COUNT(windows); w++) {
            struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
            c.fill = DECODE_FILL_UNIFORM;
            c.num_q_heads = 3;
            c.q_len = 6;
            c.tree = (enum decode_tree) tree;
            c.window = windows[w / 2];
            c.window_form = (enum attn_window_form)(w % 2);
            c.sinks = w > 2;
            struct decode_data *data = run(&c);
            cr_expect_eq(expect_decode(data), counts[tree], "tree %d", tree);
            decode_data_free(&data);
        }
}

// ---- where keys lie

// The slot of a key in K (or V) of a call with one KV head.
static int64_t element_of(const struct decode_data *data, bool is_v, int32_t sequence, int32_t key)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    const int32_t *const table = is_v && p.v_block_table ? p.v_block_table : p.block_table;
    const int64_t page = table[sequence * p.table_stride + key / p.page_size];
    const int64_t slot = key % p.page_size;
    return is_v ? page * p.v_page_stride + slot * p.v_token_stride
                : page * p.k_page_stride + slot * p.k_token_stride;
}

Test(trees, v_has_a_table_of_its_own)
{
    static const int32_t lens[] = { 5, 40, 131, 300 };
    for (int tree = 0; tree < NUM_DECODE_TREES; tree++) {
        struct decode_case c = bits_case(lens, (int32_t) COUNT(lens));
        c.fill = DECODE_FILL_UNIFORM;
        c.q_len = tree % 2 ? 5 : 1;
        c.tree = (enum decode_tree) tree;
        c.window = 100;
        struct decode_data *one = run(&c);
        c.v_table = true;
        c.extra_stride = 3;
        struct decode_data *two = run(&c);
        const int32_t *const k = decode_image(two, DECODE_ZONE_TABLE);
        const int32_t *const v = decode_image(two, DECODE_ZONE_V_TABLE);
        cr_expect_neq(memcmp(k, v, two->zones[DECODE_ZONE_TABLE].bytes), 0);
        for (int32_t b = 0; b < c.batch; b++)
            cr_expect(decode_data_equal(one, b, two, b), "tree %d, sequence %d", tree, b);
        decode_data_free(&one);
        decode_data_free(&two);
    }
}

// A NaN in a draft key that token 1 attends and token 0 does not.
Test(trees, nan_stays_with_the_rows_that_attend_it)
{
    static const int32_t len = 21;
    for (int is_v = 0; is_v < 2; is_v++) {
        struct decode_case c = bits_case(&len, 1);
        c.q_len = 3;
        c.tree = DECODE_TREE_STAR;
        struct decode_data *clean = run(&c), *data = build(&c);
        uint16_t *const pool = decode_image(data, is_v ? DECODE_ZONE_V : DECODE_ZONE_K);
        pool[element_of(data, is_v, 0, 19)] = 0x7E00;
        rerun(data);
        cr_expect(decode_data_equal_token(data, 0, 0, clean, 0, 0));
        cr_expect(decode_data_equal_token(data, 0, 2, clean, 0, 2));
        cr_expect(isnan(decode_data_o(data, 0, 1, 0, 0)));
        cr_expect_eq(isnan(decode_data_o(data, 0, 1, 0, 1)), !is_v);
        decode_data_free(&clean);
        decode_data_free(&data);
    }
}

// A kernel may hand it to the rows that do not, and nothing else: so says the check.
Test(trees, check_lets_nan_of_other_tokens_pass)
{
    static const int32_t len = 21;
    for (int is_v = 0; is_v < 2; is_v++) {
        struct decode_case c = bits_case(&len, 1);
        c.q_len = 3;
        c.tree = DECODE_TREE_STAR;
        struct decode_data *clean = run(&c), *data = build(&c);
        struct attn_check check;
        uint16_t *const pool = decode_image(data, is_v ? DECODE_ZONE_V : DECODE_ZONE_K);
        pool[element_of(data, is_v, 0, 19)] = 0x7E00;
        rerun(data);
        cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check));
        // Dim 0 of token 2; then dim 1, which the NaN in V does not reach.
        uint16_t *const o = (uint16_t *) (data->result + data->zones[DECODE_ZONE_O].offset);
        uint16_t *const clean_o = (uint16_t *) (clean->result + clean->zones[DECODE_ZONE_O].offset);
        o[2 * DIM] = clean_o[2 * DIM] = 0x7E00;
        cr_expect(decode_data_check(data, ATTN_CHECK_KERNEL, &check));
        cr_expect(!decode_data_check(data, ATTN_CHECK_HOST, &check));
        cr_expect(!decode_data_check(clean, ATTN_CHECK_KERNEL, &check) && check.failed == 1);
        o[2 * DIM + 1] = 0x7E00;
        cr_expect_eq(decode_data_check(data, ATTN_CHECK_KERNEL, &check), !is_v);
        float *const lse = (float *) (data->result + data->zones[DECODE_ZONE_LSE].offset);
        o[2 * DIM + 1] = clean_o[2 * DIM + 1];
        lse[0] = NAN;
        cr_expect_eq(decode_data_check(data, ATTN_CHECK_KERNEL, &check), !is_v);
        decode_data_free(&clean);
        decode_data_free(&data);
    }
}

// A page that the pool does not have, of K or of V: its keys are absent as both.
Test(trees, reports_bad_pages_and_leaves_them_out)
{
    static const int32_t lens[] = { 25, 25, 25 };
    // Pages of one key: column 0 is in the past, 23 is the draft key that only token 1 attends, 25
    // is past the length. Whose rows lack the key, and is it reported?
    static const struct {
        int32_t column, page;
        bool is_v, hurts[3];
    } cases[] = {
        { 0, -1, false, { true, true, true } },
        { 0, INT32_MAX, true, { true, true, true } },
        { 23, INT32_MIN, false, { false, true } },
        { 23, 1000, true, { false, true } },
        { 25, -1, false, { false } },
        { 25, 1000, true, { false } },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct decode_case c = bits_case(lens, 3);
        c.page_size = 1;
        c.q_len = 3;
        c.tree = DECODE_TREE_STAR;
        c.v_table = true;
        c.extra_columns = 1;
        struct decode_data *clean = run(&c), *data = build(&c);
        int32_t *const table =
            decode_image(data, cases[i].is_v ? DECODE_ZONE_V_TABLE : DECODE_ZONE_TABLE);
        table[data->params.table_stride + cases[i].column] = cases[i].page;
        rerun(data);
        cr_expect_eq(decode_data_fault(data), cases[i].hurts[1] ? 1 : INT32_MAX, "case %zu", i);
        for (int32_t token = 0; token < 3; token++) {
            // Scores are 0: e^lse counts the keys.
            const double keys = token == 0 ? 23 : 24, hurt = cases[i].hurts[token];
            cr_expect_float_eq(exp(decode_data_lse(data, 1, token, 0)), keys - hurt, 1e-4,
                               "case %zu, token %d", i, token);
            cr_expect_eq(decode_data_equal_token(clean, 1, token, data, 1, token), hurt == 0);
        }
        cr_expect(decode_data_equal(clean, 0, data, 0) && decode_data_equal(clean, 2, data, 2));
        decode_data_free(&clean);
        decode_data_free(&data);
    }
}

// ---- invariance

enum {
    BATCH = 12
};

static struct decode_case base_case(void)
{
    const struct decode_case c = {
        .name = "trees",
        .batch = BATCH,
        .num_q_heads = 6,
        .num_kv_heads = 2,
        .head_dim = 64,
        .page_size = 16,
        .len = 300,
        .lens = DECODE_LENS_LOG,
        .q_len = 5,
        .tree = DECODE_TREE_RANDOM,
        .window = 120,
        .sinks = true,
        .lse = true,
        .seed = random_seed(62),
    };
    return c;
}

Test(trees, bits_do_not_depend_on_what_should_not_matter)
{
    const struct decode_case base = base_case();
    struct decode_case changes[] = { base, base, base, base, base, base, base, base };
    changes[0].extra_words = 3;
    changes[1].page_seed = 7;
    changes[2].extra_stride = 11;
    changes[3].v_table = true;
    changes[3].extra_columns = 4;
    changes[4].page_size = 7;
    changes[5].fused_q = true;
    changes[5].layout = DECODE_LAYOUT_MIXED;
    changes[6].poison = 0x7F;
    changes[6].layout = DECODE_LAYOUT_LAYER;
    changes[7].lse = false;
    struct decode_data *first = run(&base);
    for (size_t i = 0; i < COUNT(changes); i++) {
        struct decode_data *other = run(&changes[i]);
        for (int32_t b = 0; b < BATCH; b++)
            cr_expect(decode_data_equal(first, b, other, b), "change %zu, sequence %d, seed %llu",
                      i, b, (unsigned long long) base.seed);
        decode_data_free(&other);
    }
    decode_data_free(&first);
}

Test(trees, alone_and_in_any_order)
{
    const struct decode_case base = base_case();
    struct decode_data *all = run(&base);
    int32_t reversed[BATCH];
    for (int32_t i = 0; i < BATCH; i++) reversed[i] = BATCH - 1 - i;
    struct decode_case c = base;
    c.ids = reversed;
    struct decode_data *backwards = run(&c);
    for (int32_t i = 0; i < BATCH; i++) {
        c.ids = &i;
        c.batch = 1;
        struct decode_data *alone = run(&c);
        cr_expect(decode_data_equal(alone, 0, all, i), "sequence %d alone", i);
        cr_expect(decode_data_equal(backwards, BATCH - 1 - i, all, i), "sequence %d", i);
        decode_data_free(&alone);
    }
    decode_data_free(&backwards);
    decode_data_free(&all);
}

// The check against the definition, too, can tell one token from another.
Test(trees, check_names_the_token)
{
    const struct decode_case c = base_case();
    struct decode_data *data = run(&c);
    struct attn_check check;
    char text[512];
    cr_expect(decode_data_check(data, ATTN_CHECK_HOST, &check), "%s",
              decode_check_text(&check, text, sizeof(text)));
    cr_expect_eq(check.compared, BATCH * 5 * 6 * 64);
    uint16_t *const o = (uint16_t *) (data->result + data->zones[DECODE_ZONE_O].offset);
    float *const lse = (float *) (data->result + data->zones[DECODE_ZONE_LSE].offset);
    // Sequence 3, token 2, head 4, dim 9.
    o[((3 * 5 + 2) * 6 + 4) * 64 + 9] ^= 0x4000;
    cr_expect(!decode_data_check(data, ATTN_CHECK_HOST, &check));
    cr_expect(check.failed == 1 && check.worst_sequence == 3 && check.worst_token == 2 &&
              check.worst_head == 4 && check.worst_dim == 9);
    o[((3 * 5 + 2) * 6 + 4) * 64 + 9] ^= 0x4000;
    lse[(11 * 5 + 4) * 6 + 5] += 0.01f;
    cr_expect(!decode_data_check(data, ATTN_CHECK_HOST, &check));
    cr_expect(check.failed == 0 && check.lse_failed == 1);
    decode_data_free(&data);
}

// ---- skip-softmax

enum {
    SKIP_LEN = 4500,
    SKIP_BLOCKS = SKIP_LEN / ATTN_SKIP_KEYS + 1,
    SKIP_HEADS = 4,
    SKIP_RATIO = 2,
};

// Of one sequence: scores, and which blocks of which KV head are left out.
struct skipped {
    double scores[SKIP_HEADS][SKIP_LEN];
    bool dropped[SKIP_HEADS / SKIP_RATIO][SKIP_BLOCKS];
    int32_t start, len;
    int64_t count;
};

static struct decode_case skip_case(const int32_t *lens, int32_t batch, const int32_t *table,
                                    int32_t length)
{
    const struct decode_case c = {
        .name = "skip",
        .q_dtype = ATTN_DTYPE_FP16,
        .batch = batch,
        .given_lens = lens,
        .num_q_heads = SKIP_HEADS,
        .num_kv_heads = SKIP_HEADS / SKIP_RATIO,
        .head_dim = 16,
        .page_size = 16,
        .lse = true,
        .skip = table,
        .skip_length = length,
        .seed = random_seed(63),
    };
    return c;
}

static double score_of(const struct attn_decode_params *p, int32_t sequence, int32_t head,
                       int32_t key)
{
    const int64_t page = p->block_table[sequence * p->table_stride + key / p->page_size];
    const int64_t k = page * p->k_page_stride + key % p->page_size * p->k_token_stride +
                      head / SKIP_RATIO * p->k_head_stride;
    const int64_t q = sequence * p->q_stride + (int64_t) head * p->head_dim;
    double dot = 0;
    for (int32_t d = 0; d < p->head_dim; d++)
        dot += attn_load(p->q, q + d, p->q_dtype) * attn_load(p->k_pool, k + d, p->kv_dtype);
    return (double) p->scale * p->k_scale * dot;
}

// The largest score of the attended keys of [first, end); NaN is larger than all.
static double largest_of(const struct skipped *skipped, int32_t head, int32_t first, int32_t end)
{
    double largest = -INFINITY;
    for (int32_t key = first > skipped->start ? first : skipped->start;
         key < end && key < skipped->len; key++)
        if (!(skipped->scores[head][key] <= largest)) largest = skipped->scores[head][key];
    return largest;
}

// By the words of decode.h, block by block.
static bool is_dropped(const struct skipped *skipped, int32_t kv_head, int32_t block, double lambda)
{
    const int32_t first = block * ATTN_SKIP_KEYS;
    const int32_t run_first = block / ATTN_SKIP_SCOPE * ATTN_SKIP_SCOPE * ATTN_SKIP_KEYS;
    if (run_first >= first || skipped->start >= first) return false;
    for (int32_t h = kv_head * SKIP_RATIO; h < (kv_head + 1) * SKIP_RATIO; h++) {
        const double own = largest_of(skipped, h, first, first + ATTN_SKIP_KEYS);
        const double before = largest_of(skipped, h, run_first, first);
        if (isnan(own) || isnan(before) || exp(own - before) >= lambda) return false;
    }
    return true;
}

static void find_skipped(const struct decode_data *data, int32_t sequence, double s,
                         struct skipped *skipped)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    memset(skipped, 0, sizeof(*skipped));
    skipped->len = p.seq_lens[sequence];
    skipped->start = p.window > 0 && skipped->len > p.window ? skipped->len - p.window : 0;
    for (int32_t h = 0; h < SKIP_HEADS; h++)
        for (int32_t key = skipped->start; key < skipped->len; key++)
            skipped->scores[h][key] = score_of(&p, sequence, h, key);
    if (s <= 0 || s >= skipped->len) return;
    for (int32_t kv_head = 0; kv_head < SKIP_HEADS / SKIP_RATIO; kv_head++)
        for (int32_t block = 0; block * ATTN_SKIP_KEYS < skipped->len; block++) {
            skipped->dropped[kv_head][block] =
                is_dropped(skipped, kv_head, block, s / skipped->len);
            skipped->count += skipped->dropped[kv_head][block];
        }
}

static void expect_rest(const struct decode_data *data, int32_t sequence,
                        const struct skipped *skipped)
{
    const struct attn_decode_params p = decode_data_params(data, data->image);
    for (int32_t h = 0; h < SKIP_HEADS; h++) {
        double sum = 0, o[16] = { 0 }, size = 0;
        for (int32_t key = skipped->start; key < skipped->len; key++) {
            if (skipped->dropped[h / SKIP_RATIO][key / ATTN_SKIP_KEYS]) continue;
            const double weight = exp(skipped->scores[h][key]);
            const int64_t page = p.block_table[sequence * p.table_stride + key / p.page_size];
            const int64_t v = page * p.v_page_stride + key % p.page_size * p.v_token_stride +
                              h / SKIP_RATIO * p.v_head_stride;
            sum += weight;
            for (int32_t d = 0; d < 16; d++)
                o[d] += weight * attn_load(p.v_pool, v + d, p.kv_dtype);
        }
        size = sum > 0 ? 1 / sum : 0;
        for (int32_t d = 0; d < 16; d++)
            cr_assert(fabs(decode_data_o(data, sequence, 0, h, d) - o[d] * size) < 0x1p-11,
                      "sequence %d, head %d, dim %d, seed %llu", sequence, h, d,
                      (unsigned long long) data->c.seed);
        const double lse = decode_data_lse(data, sequence, 0, h);
        cr_assert(lse == log(sum) || fabs(lse - log(sum)) < 1e-6);
    }
}

Test(skip, agrees_with_its_definition)
{
    static const int32_t lens[] = { 0, 1, 127, 129, 700, 2047, 2049, 2500, SKIP_LEN };
    struct skipped *const skipped = malloc(sizeof(*skipped));
    cr_assert(skipped);
    const int32_t windows[] = { 0, 600, 2100 };
    int64_t all = 0;
    for (size_t w = 0; w < COUNT(windows); w++)
        for (size_t i = 0; i < 2 * COUNT(lens); i++) {
            const int32_t len = lens[i / 2];
            // One sequence a call, so that the count is its own.
            const int32_t table[] = { 0, 7, 1, len / 8, len + 1, 0 };
            struct decode_case c = skip_case(&len, 1, table, (int32_t) COUNT(table));
            c.fill = i % 2 ? DECODE_FILL_UNIFORM : DECODE_FILL_LEVELS;
            c.window = windows[w];
            c.page_size = i % 2 ? 48 : 16;
            struct decode_data *data = run(&c);
            struct attn_check check;
            find_skipped(data, 0, len / 8, skipped);
            expect_rest(data, 0, skipped);
            cr_expect_eq(decode_data_dropped(data), skipped->count, "length %d, seed %llu", len,
                         (unsigned long long) c.seed);
            cr_expect(decode_data_check(data, ATTN_CHECK_HOST, &check));
            all += skipped->count;
            decode_data_free(&data);
        }
    cr_expect_gt(all, 50);
    free(skipped);
}

// The bits of a call with a table are those of one without, and nothing is counted.
static void expect_dense(const struct decode_case *c)
{
    struct decode_case dense = *c;
    dense.skip = NULL;
    struct decode_data *with = run(c), *without = run(&dense);
    cr_expect_eq(decode_data_dropped(with), 0);
    for (int32_t b = 0; b < c->batch; b++)
        cr_expect(decode_data_equal(with, b, without, b), "sequence %d", b);
    decode_data_free(&with);
    decode_data_free(&without);
}

Test(skip, is_dense_where_it_should_be)
{
    static const int32_t lens[] = { 100, 1000, 3000 };
    static const int32_t zero[] = { 0, 0 }, negative[] = { 0, -5 };
    static const int32_t longer[] = { 3001, 1000 }, back_to_dense[] = { 0, 100, 90, 0 };
    // lambda 1 and more: S is the length, or larger.
    static const int32_t large[] = { 0, INT32_MAX }, one[] = { 0, 100, 1000, 1000, 3000, 3000 };
    // lambda is tiny, and no score is so far below another.
    static const int32_t tiny[] = { 0, 1 };
    const struct {
        const int32_t *table;
        int32_t length;
    } cases[] = { { zero, 2 },  { negative, 2 }, { longer, 2 }, { back_to_dense, 4 },
                  { large, 2 }, { one, 6 },      { tiny, 2 } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct decode_case c = skip_case(lens, 3, cases[i].table, cases[i].length);
        if (cases[i].table != tiny) c.fill = DECODE_FILL_LEVELS;
        expect_dense(&c);
    }
}

// A bin serves the lengths from its own on.
Test(skip, takes_the_largest_bin_that_the_length_reaches)
{
    static const int32_t lens[] = { 999, 1000, 1001 }, table[] = { 1000, 125 };
    for (int32_t b = 0; b < 3; b++) {
        struct decode_case c = skip_case(&lens[b], 1, table, 2);
        c.fill = DECODE_FILL_LEVELS;
        struct decode_data *data = run(&c);
        cr_expect_eq(decode_data_dropped(data) > 0, b > 0, "length %d", lens[b]);
        decode_data_free(&data);
    }
}

// The V of what is left out is not read.
Test(skip, values_of_dropped_blocks_do_not_matter)
{
    static const int32_t len = 4000, table[] = { 0, 500 };
    struct skipped *const skipped = malloc(sizeof(*skipped));
    cr_assert(skipped);
    struct decode_case c = skip_case(&len, 1, table, 2);
    c.fill = DECODE_FILL_LEVELS;
    struct decode_data *clean = run(&c), *data = build(&c);
    uint16_t *const v = decode_image(data, DECODE_ZONE_V);
    find_skipped(data, 0, 500, skipped);
    cr_expect_gt(skipped->count, 0);
    for (int32_t key = 0; key < len; key++)
        for (int32_t h = 0; h < SKIP_HEADS / SKIP_RATIO; h++)
            if (skipped->dropped[h][key / ATTN_SKIP_KEYS])
                v[element_of(data, true, 0, key) + h * data->params.v_head_stride] = 0x7E00;
    rerun(data);
    cr_expect(decode_data_equal(clean, 0, data, 0));
    free(skipped);
    decode_data_free(&clean);
    decode_data_free(&data);
}

// A NaN in K of a block that was left out: neither it nor the rest of its run is, any more.
Test(skip, never_drops_nan)
{
    static const int32_t len = 4000, table[] = { 0, 500 };
    struct skipped *const skipped = malloc(sizeof(*skipped));
    cr_assert(skipped);
    struct decode_case c = skip_case(&len, 1, table, 2);
    c.fill = DECODE_FILL_LEVELS;
    struct decode_data *clean = run(&c), *data = build(&c);
    find_skipped(data, 0, 500, skipped);
    int32_t block = 0, rest = 0;
    while (!skipped->dropped[1][block]) block++;
    const int32_t run_end = (block / ATTN_SKIP_SCOPE + 1) * ATTN_SKIP_SCOPE;
    for (int32_t i = block; i < run_end; i++) rest += skipped->dropped[1][i];
    uint16_t *const k = decode_image(data, DECODE_ZONE_K);
    k[element_of(data, false, 0, block * ATTN_SKIP_KEYS + 5) + data->params.k_head_stride] = 0x7E00;
    rerun(data);
    cr_expect_eq(decode_data_dropped(data), decode_data_dropped(clean) - rest);
    for (int32_t h = 0; h < SKIP_HEADS; h++)
        cr_expect_eq(isnan(decode_data_o(data, 0, 0, h, 3)), h >= SKIP_RATIO);
    free(skipped);
    decode_data_free(&clean);
    decode_data_free(&data);
}

// A block whose page the pool does not have, for K or for V, has no attended keys: it is not
// counted, and reported.
Test(skip, does_not_count_absent_keys)
{
    static const int32_t len = 4000, table[] = { 0, 500 };
    struct skipped *const skipped = malloc(sizeof(*skipped));
    cr_assert(skipped);
    struct decode_case c = skip_case(&len, 1, table, 2);
    c.fill = DECODE_FILL_LEVELS;
    c.page_size = ATTN_SKIP_KEYS;
    c.v_table = true;
    struct decode_data *clean = run(&c);
    find_skipped(clean, 0, 500, skipped);
    int32_t block = 0;
    while (block < SKIP_BLOCKS && !(skipped->dropped[0][block] && skipped->dropped[1][block]))
        block++;
    cr_assert_lt(block, SKIP_BLOCKS);
    for (int is_v = 0; is_v < 2; is_v++) {
        struct decode_data *data = build(&c);
        int32_t *const pages = decode_image(data, is_v ? DECODE_ZONE_V_TABLE : DECODE_ZONE_TABLE);
        pages[block] = -1;
        rerun(data);
        cr_expect_eq(decode_data_fault(data), 0);
        cr_expect_eq(decode_data_dropped(data), decode_data_dropped(clean) - 2);
        cr_expect(decode_data_equal(clean, 0, data, 0));
        decode_data_free(&data);
    }
    free(skipped);
    decode_data_free(&clean);
}

// Blocks, runs and decisions are those of the sequence alone.
Test(skip, bits_do_not_depend_on_what_should_not_matter)
{
    static const int32_t lens[] = { 4000, 300, 2200, 1 };
    static const int32_t table[] = { 0, 40, 1000, 250, 3000, 500 };
    struct decode_case base = skip_case(lens, 4, table, 6);
    base.fill = DECODE_FILL_LEVELS;
    base.window = 3500;
    base.sinks = true;
    struct decode_case changes[] = { base, base, base, base };
    changes[0].page_size = 100;
    changes[0].page_seed = 3;
    changes[1].v_table = true;
    changes[1].extra_stride = 5;
    changes[2].layout = DECODE_LAYOUT_LAYER;
    changes[2].poison = 0x7F;
    changes[3].lse = false;
    struct decode_data *first = run(&base);
    cr_expect_gt(decode_data_dropped(first), 0);
    for (size_t i = 0; i < COUNT(changes); i++) {
        struct decode_data *other = run(&changes[i]);
        cr_expect_eq(decode_data_dropped(other), decode_data_dropped(first));
        for (int32_t b = 0; b < base.batch; b++)
            cr_expect(decode_data_equal(first, b, other, b), "change %zu, sequence %d", i, b);
        decode_data_free(&other);
    }
    for (int32_t b = 0; b < base.batch; b++) {
        struct decode_case c = base;
        c.batch = 1;
        c.ids = &b;
        c.given_lens = &lens[b];
        struct decode_data *alone = run(&c);
        cr_expect(decode_data_equal(alone, 0, first, b), "sequence %d alone", b);
        decode_data_free(&alone);
    }
    decode_data_free(&first);
}

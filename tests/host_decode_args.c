/* SPDX-License-Identifier: Apache-2.0 */
// Every rule of include/attn/decode.h that is checked has its own sentence, and a refused call
// writes nothing: on the host executor, which shares the checks with the GPU.
#include "attn/attn.h"

#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BATCH 2
#define TOKENS 3
#define Q_HEADS 4
#define KV_HEADS 2
#define DIM 64
#define PAGE 4
#define TABLE 3
#define PAGES 8

// A call that is right, for each test to break.
static struct {
    // Room for TOKENS query tokens; a right call has 1.
    _Alignas(256) uint16_t q[BATCH * TOKENS * Q_HEADS * DIM + 8];
    _Alignas(256) uint16_t o[BATCH * TOKENS * Q_HEADS * DIM + 8];
    _Alignas(256) uint16_t k[PAGES * PAGE * KV_HEADS * DIM + 8];
    _Alignas(256) uint16_t v[PAGES * PAGE * KV_HEADS * DIM + 8];
    _Alignas(256) float sinks[Q_HEADS + 1], lse[BATCH * TOKENS * Q_HEADS + 1], scales[KV_HEADS + 1];
    _Alignas(256) int32_t table[BATCH * TABLE + 1], v_table[BATCH * TABLE + 1];
    _Alignas(256) int32_t lens[BATCH + 1], fault[2], counters[2];
    _Alignas(256) int32_t mask[BATCH * TOKENS + 1], skip[4];
    _Alignas(256) int64_t dropped[2];
} memory, before;

static struct attn_device *device;
static struct attn_decode_params params;

static void open_device(const char *const policy)
{
    attn_device_close(&device);
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    open.splitk_policy = policy;
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
}

static struct attn_decode_params right_params(void)
{
    struct attn_decode_params right = ATTN_DECODE_PARAMS_INIT;
    right.q_dtype = right.kv_dtype = ATTN_DTYPE_BF16;
    right.batch = BATCH;
    right.num_q_heads = Q_HEADS;
    right.num_kv_heads = KV_HEADS;
    right.head_dim = DIM;
    right.page_size = PAGE;
    right.max_pages_per_seq = TABLE;
    right.num_pages = PAGES;
    right.q = memory.q;
    right.o = memory.o;
    right.k_pool = memory.k;
    right.v_pool = memory.v;
    right.block_table = memory.table;
    right.seq_lens = memory.lens;
    right.lse = memory.lse;
    right.fault = memory.fault;
    return right;
}

static void set_up(void)
{
    memset(&memory, 0, sizeof(memory));
    memset(memory.o, 0xEE, sizeof(memory.o));
    memset(memory.lse, 0xEE, sizeof(memory.lse));
    for (int i = 0; i < BATCH * TABLE; i++) memory.table[i] = memory.v_table[i] = i;
    for (int i = 0; i < BATCH; i++) memory.lens[i] = PAGE + i;
    memory.fault[0] = INT32_MAX;
    memcpy(&before, &memory, sizeof(memory));
    open_device("chunk");
    params = right_params();
}

static void tear_down(void)
{
    attn_device_close(&device);
}

// Refused with a sentence that has `part`; the next test starts from a right call again.
static void expect_refused(const enum attn_status expected, const char *const part)
{
    const enum attn_status status = attn_decode(device, &params, NULL);
    cr_expect_eq(status, expected, "%s: %s instead of %s", part, attn_status_name(status),
                 attn_status_name(expected));
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s: memory changed", part);
    params = right_params();
}

#define REFUSED(field, value, part) \
    do { \
        params.field = value; \
        expect_refused(ATTN_ERROR_INVALID, part); \
    } while (0)

TestSuite(decode_args, .init = set_up, .fini = tear_down);

Test(decode_args, accepts_a_right_call)
{
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_empty(attn_last_error());
    cr_expect_neq(memcmp(memory.o, before.o, sizeof(memory.o)), 0);
    // Nothing behind o and lse.
    cr_expect_eq(memory.o[BATCH * Q_HEADS * DIM], before.o[BATCH * Q_HEADS * DIM]);
    cr_expect_eq(memcmp(&memory.lse[BATCH * Q_HEADS], &before.lse[BATCH * Q_HEADS], 4), 0);
    cr_expect_eq(memory.fault[0], INT32_MAX);
}

Test(decode_args, forgets_the_last_error)
{
    REFUSED(batch, -1, "batch is -1");
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK);
    cr_expect_str_empty(attn_last_error());
}

Test(decode_args, needs_a_device_and_params)
{
    cr_expect_eq(attn_decode(NULL, &params, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "device is NULL"));
    cr_expect_eq(attn_decode(device, NULL, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "params is NULL"));
    REFUSED(size, 0, "size is 0");
    REFUSED(size, 3, "size is 3");
    REFUSED(size, UINT32_MAX, "size is");
}

Test(decode_args, checks_types)
{
    REFUSED(q_dtype, ATTN_DTYPE_NONE, "q_dtype is 0");
    REFUSED(q_dtype, ATTN_DTYPE_E4M3, "q_dtype is 3");
    REFUSED(q_dtype, ATTN_DTYPE_FP32, "q_dtype is 4");
    REFUSED(q_dtype, (enum attn_dtype) 99, "q_dtype is 99");
    REFUSED(q_dtype, ATTN_DTYPE_FP16, "kv_dtype is 1");
    REFUSED(kv_dtype, ATTN_DTYPE_FP16, "kv_dtype is 2");
    REFUSED(kv_dtype, ATTN_DTYPE_INT32, "kv_dtype is 5");
    REFUSED(kv_dtype, (enum attn_dtype) - 1, "kv_dtype");
}

Test(decode_args, checks_sizes)
{
    REFUSED(batch, -1, "batch is -1");
    REFUSED(q_len, 0, "q_len is 0");
    REFUSED(q_len, INT32_MIN, "q_len is -2147483648");
    REFUSED(q_len, ATTN_DECODE_MAX_Q_LEN + 1, "q_len is 129: it has to be in 1..128");
    REFUSED(num_q_heads, 0, "num_q_heads is 0");
    REFUSED(num_kv_heads, 0, "num_kv_heads is 0");
    REFUSED(num_kv_heads, -2, "num_kv_heads is -2");
    REFUSED(num_q_heads, 5, "multiple of the second");
    REFUSED(head_dim, 0, "head_dim is 0");
    REFUSED(head_dim, -16, "head_dim is -16");
    REFUSED(head_dim, 72, "head_dim is 72");
    REFUSED(head_dim, 528, "head_dim is 528");
    REFUSED(page_size, 0, "page_size is 0");
    REFUSED(page_size, -4, "page_size is -4");
    REFUSED(max_pages_per_seq, 0, "max_pages_per_seq is 0");
    REFUSED(num_pages, 0, "num_pages is 0");
    REFUSED(num_pages, -1, "num_pages is -1");
    REFUSED(num_pages, (int64_t) INT32_MAX + 1, "num_pages is 2147483648");
    REFUSED(window, -1, "window is -1");
    REFUSED(window_form, 2, "window_form is 2");
    REFUSED(window_form, -1, "window_form is -1");
}

// A right call of more query tokens, with everything that it may have.
static void set_tokens(void)
{
    params.q_len = TOKENS;
    params.tree_mask = memory.mask;
    params.mask_words = 1;
    params.v_block_table = memory.v_table;
    params.window = 2;
    params.window_form = ATTN_WINDOW_SHARED;
    params.dropped_blocks = memory.dropped;
}

#define REFUSED_TOKENS(field, value, part) \
    do { \
        set_tokens(); \
        REFUSED(field, value, part); \
    } while (0)

Test(decode_args, takes_many_tokens)
{
    set_tokens();
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    // Everything of o and lse, and nothing behind it.
    const size_t o = BATCH * TOKENS * Q_HEADS * DIM, lse = BATCH * TOKENS * Q_HEADS;
    for (size_t i = 0; i < o; i++) cr_assert_eq(memory.o[i], 0, "element %zu", i);
    cr_expect_eq(memory.o[o], before.o[o]);
    for (size_t i = 0; i < lse; i++) cr_assert_neq(memcmp(&memory.lse[i], &before.lse[i], 4), 0);
    cr_expect_eq(memcmp(&memory.lse[lse], &before.lse[lse], 4), 0);
    cr_expect_eq(memory.fault[0], INT32_MAX);
    params = right_params();
    params.q_len = ATTN_DECODE_MAX_Q_LEN;
    params.batch = 0;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, checks_what_many_tokens_have)
{
    REFUSED_TOKENS(mask_words, 0, "mask_words is 0: a row of tree_mask has a bit for each of 3");
    REFUSED_TOKENS(mask_words, -1, "mask_words is -1");
    params.tree_mask = memory.mask;
    params.mask_words = 1;
    REFUSED(q_len, 33,
            "mask_words is 1: a row of tree_mask has a bit for each of 33 draft keys, at "
            "least 2 words");
    REFUSED_TOKENS(q_token_stride, -8, "q_token_stride is -8");
    REFUSED_TOKENS(q_token_stride, Q_HEADS * DIM - 8, "q_token_stride is 248 elements, smaller");
    REFUSED_TOKENS(q_token_stride, Q_HEADS * DIM + 4, "q_token_stride is 260");
    REFUSED_TOKENS(q_token_stride, INT64_MAX / 32 * 8, "q would reach");
    REFUSED_TOKENS(mask_words, INT32_MAX, "overlaps tree_mask");
    REFUSED_TOKENS(tree_mask, (const void *) ((char *) memory.mask + 2), "tree_mask is 0x");
    // Of no meaning, then.
    params.q_token_stride = -5;
    params.mask_words = -1;
    params.skip_table_length = -3;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, checks_tables)
{
    REFUSED(table_stride, -1, "table_stride is -1");
    REFUSED(table_stride, TABLE - 1,
            "table_stride is 2 elements, smaller than a row, which has "
            "max_pages_per_seq = 3");
    REFUSED(table_stride, INT64_MAX, "block_table would reach");
    REFUSED(v_block_table, (const void *) ((char *) memory.table + 1), "v_block_table is 0x");
    params.v_block_table = (const int32_t *) memory.lse;
    expect_refused(ATTN_ERROR_INVALID, "overlaps v_block_table");
    // The last row ends with its columns: the stride reaches no further.
    params.lse = (float *) &memory.table[BATCH * TABLE];
    params.batch = 1;
    params.table_stride = 1 << 20;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

static void set_skip(void)
{
    params.skip_table = memory.skip;
    params.skip_table_length = 4;
    params.dropped_blocks = memory.dropped;
}

#define REFUSED_SKIP(field, value, part) \
    do { \
        set_skip(); \
        REFUSED(field, value, part); \
    } while (0)

Test(decode_args, checks_skip_softmax)
{
    REFUSED_SKIP(skip_table_length, 0,
                 "skip_table_length is 0: a skip_table has at least one pair");
    REFUSED_SKIP(skip_table_length, -2, "skip_table_length is -2");
    REFUSED_SKIP(skip_table_length, 1, "skip_table_length is 1");
    REFUSED_SKIP(skip_table_length, 3,
                 "skip_table_length is 3: it counts int32, two for each pair");
    REFUSED_SKIP(q_len, 2, "there is a skip_table (has_skip_table is 1), but q_len is 2");
    REFUSED_SKIP(skip_table, (const void *) ((char *) memory.skip + 2), "skip_table is 0x");
    REFUSED_SKIP(dropped_blocks, (void *) ((char *) memory.dropped + 4), "dropped_blocks is 0x");
    REFUSED_SKIP(skip_table, (const int32_t *) memory.o, "overlaps skip_table");
    REFUSED_SKIP(dropped_blocks, (int64_t *) memory.table, "dropped_blocks (0x");
    REFUSED_SKIP(dropped_blocks, (int64_t *) memory.skip, "overlaps skip_table");
    REFUSED(dropped_blocks, (int64_t *) memory.lse, "overlaps dropped_blocks");
    set_skip();
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(memory.dropped[0], 0);
}

Test(decode_args, checks_scalars)
{
    REFUSED(scale, NAN, "scale is");
    REFUSED(scale, INFINITY, "scale is inf");
    REFUSED(softcap, NAN, "softcap is");
    REFUSED(softcap, -1.0f, "softcap is -1");
    REFUSED(softcap, 1e-39f, "softcap is 1e-39");
    REFUSED(k_scale, -INFINITY, "k_scale is -inf");
    REFUSED(v_scale, NAN, "v_scale is");
    REFUSED(k_scales, memory.scales, "v_scales is NULL and k_scales is not");
    REFUSED(v_scales, memory.scales, "k_scales is NULL and v_scales is not");
    // The arrays stand instead of the floats, which may then hold anything.
    params.k_scales = params.v_scales = memory.scales;
    params.k_scale = params.v_scale = NAN;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, checks_pointers)
{
    REFUSED(q, NULL, "q is NULL");
    REFUSED(o, NULL, "o is NULL");
    REFUSED(k_pool, NULL, "k_pool is NULL");
    REFUSED(v_pool, NULL, "v_pool is NULL");
    REFUSED(block_table, NULL, "block_table is NULL");
    REFUSED(seq_lens, NULL, "seq_lens is NULL");
    REFUSED(q, memory.q + 4, "aligned to 16 bytes");
    REFUSED(o, memory.o + 1, "o is 0x");
    REFUSED(k_pool, memory.k + 4, "k_pool is 0x");
    REFUSED(v_pool, memory.v + 4, "v_pool is 0x");
    REFUSED(block_table, (const void *) ((char *) memory.table + 1), "block_table is 0x");
    REFUSED(seq_lens, (const void *) ((char *) memory.lens + 2), "seq_lens is 0x");
    REFUSED(sinks, (const void *) ((char *) memory.sinks + 2), "sinks is 0x");
    REFUSED(lse, (void *) ((char *) memory.lse + 2), "lse is 0x");
    REFUSED(fault, (void *) ((char *) memory.fault + 1), "fault is 0x");
    REFUSED(counters, (void *) ((char *) memory.counters + 1), "counters is 0x");
}

Test(decode_args, checks_strides)
{
    REFUSED(q_stride, -8, "q_stride is -8");
    REFUSED(q_stride, Q_HEADS * DIM - 8, "smaller than a row");
    REFUSED(q_stride, Q_HEADS * DIM + 4, "multiple of 16 bytes");
    // One of three that is given makes the others count: their 0 stands for itself.
    REFUSED(k_page_stride, PAGE * KV_HEADS * DIM, "k_token_stride is 0");
    REFUSED(v_head_stride, DIM, "v_page_stride is 0");
    static const struct {
        int64_t page, token, head;
        const char *k, *v;
    } cases[] = {
        { -512, 128, 64, "k_page_stride is -512", "v_page_stride is -512" },
        { 512, 56, 64, "k_token_stride is 56", "v_token_stride is 56" },
        { 512, 128, 63, "k_head_stride is 63", "v_head_stride is 63" },
        { 512, 132, 64, "k_token_stride is 132", "v_token_stride is 132" },
        { 512, 128, 68, "k_head_stride is 68", "v_head_stride is 68" },
        { INT64_MAX / 8 * 8, 128, 64, "k_pool would reach", "v_pool would reach" },
        { INT64_MAX / 16 / PAGES * 8, 128, INT64_MAX / 8 * 8, "k_pool would reach",
          "v_pool would reach" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        params.k_page_stride = cases[i].page;
        params.k_token_stride = cases[i].token;
        params.k_head_stride = cases[i].head;
        expect_refused(ATTN_ERROR_INVALID, cases[i].k);
        params.v_page_stride = cases[i].page;
        params.v_token_stride = cases[i].token;
        params.v_head_stride = cases[i].head;
        expect_refused(ATTN_ERROR_INVALID, cases[i].v);
    }
}

Test(decode_args, checks_sizes_that_overflow)
{
    REFUSED(q_stride, INT64_MAX / 8 * 8, "q would reach");
    params.num_q_heads = INT32_MAX / 2 * 2;
    params.batch = INT32_MAX;
    expect_refused(ATTN_ERROR_INVALID, "would reach");
    params.page_size = INT32_MAX;
    params.num_kv_heads = params.num_q_heads = INT32_MAX;
    expect_refused(ATTN_ERROR_INVALID, "stride");
}

Test(decode_args, refuses_output_over_input)
{
    REFUSED(o, memory.q, "o (");
    REFUSED(o, memory.q + (BATCH * Q_HEADS - 1) * DIM, "overlaps q");
    REFUSED(o, memory.k + (PAGES * PAGE * KV_HEADS - 1) * DIM, "overlaps k_pool");
    REFUSED(o, memory.v, "overlaps v_pool");
    REFUSED(lse, (float *) memory.q, "overlaps q");
    REFUSED(lse, (float *) memory.o, "overlaps lse");
    REFUSED(lse, (float *) memory.lens, "overlaps seq_lens");
    REFUSED(lse, (float *) memory.table, "overlaps block_table");
    REFUSED(fault, memory.table + 1, "overlaps block_table");
    REFUSED(fault, (int32_t *) memory.o, "overlaps fault");
    params.sinks = memory.lse + 3;
    expect_refused(ATTN_ERROR_INVALID, "overlaps sinks");
    params.k_scales = memory.scales;
    params.v_scales = (float *) memory.o;
    expect_refused(ATTN_ERROR_INVALID, "overlaps v_scales");
    // Side by side is fine, and inputs may share memory.
    params.v_pool = memory.k;
    params.lse = (float *) (memory.o + BATCH * Q_HEADS * DIM);
    params.batch = 1;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

// What is written, and one token more of it.
Test(decode_args, keeps_outputs_of_many_tokens_apart)
{
    const size_t o = BATCH * TOKENS * Q_HEADS * DIM;
    set_tokens();
    params.lse = (float *) (memory.o + o - DIM);
    expect_refused(ATTN_ERROR_INVALID, "overlaps lse");
    set_tokens();
    params.o = memory.q + o - 8;
    expect_refused(ATTN_ERROR_INVALID, "overlaps q");
    set_tokens();
    params.tree_mask = (const int32_t *) (memory.lse + BATCH * TOKENS * Q_HEADS - 1);
    expect_refused(ATTN_ERROR_INVALID, "overlaps tree_mask");
    set_tokens();
    params.fault = memory.mask + BATCH * TOKENS - 1;
    expect_refused(ATTN_ERROR_INVALID, "overlaps tree_mask");
    set_tokens();
    params.fault = memory.mask + BATCH * TOKENS;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, enqueues_nothing_for_an_empty_batch)
{
    params.batch = 0;
    params.q = params.k_pool = params.v_pool = NULL;
    params.o = NULL;
    params.block_table = params.seq_lens = NULL;
    params.lse = NULL;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    // Nor is there a pool or a table.
    params.num_pages = params.max_pages_per_seq = 0;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    params.num_pages = -1;
    expect_refused(ATTN_ERROR_INVALID, "num_pages is -1: it has to be in 0..");
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0);
    // Strides reach nowhere.
    params = right_params();
    params.batch = 0;
    params.q_stride = params.table_stride = 4096;
    params.fault = (int32_t *) memory.q;
    params.block_table = (int32_t *) memory.k;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, needs_max_decode_seqs_under_legacy_only)
{
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK);
    memcpy(&memory, &before, sizeof(memory));
    open_device("legacy");
    REFUSED(max_decode_seqs, BATCH - 1, "max_decode_seqs is 1, batch 2");
    params.max_decode_seqs = BATCH;
    cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(decode_args, gives_equal_bits_under_every_policy)
{
    static const char *const policies[] = { "legacy", "auto", "1", "7", "chunk", "chunk:4096" };
    cr_assert_eq(attn_decode(device, &params, NULL), ATTN_OK);
    memcpy(&before, &memory, sizeof(memory));
    params.max_decode_seqs = 9;
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        memset(memory.o, 0, BATCH * Q_HEADS * DIM * sizeof(*memory.o));
        open_device(policies[i]);
        cr_expect_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s", policies[i]);
    }
}

Test(decode_args, resets_counters)
{
    memory.counters[0] = memory.counters[1] = 7;
    cr_expect_eq(attn_decode_reset_counters(device, memory.counters, 1, NULL), ATTN_OK);
    cr_expect_eq(memory.counters[0], 0);
    cr_expect_eq(memory.counters[1], 7);
    cr_expect_eq(attn_decode_reset_counters(device, NULL, 0, NULL), ATTN_OK);
    cr_expect_eq(attn_decode_reset_counters(device, NULL, 1, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_decode_reset_counters(device, memory.counters, -1, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "count is -1"));
    cr_expect_eq(attn_decode_reset_counters(NULL, memory.counters, 1, NULL), ATTN_ERROR_INVALID);
}

static struct attn_decode_shape right_shape(void)
{
    return (struct attn_decode_shape){
        .size = sizeof(struct attn_decode_shape),
        .q_dtype = ATTN_DTYPE_FP16,
        .kv_dtype = ATTN_DTYPE_E4M3,
        .batch = 3,
        .q_len = 1,
        .num_q_heads = 12,
        .num_kv_heads = 4,
        .head_dim = 32,
        .page_size = 16,
        .max_pages_per_seq = 5,
    };
}

Test(decode_args, plans_on_the_host)
{
    struct attn_decode_shape shape = right_shape();
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    cr_assert_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(plan.kernel, "host executor");
    cr_expect_eq(plan.grid, 0);
    cr_expect_eq(plan.workspace_bytes, 0);
    cr_expect_eq(plan.num_splits, 0);
    cr_expect_eq(plan.kv_bytes, 2.0 * 3 * 4 * 80 * 32);
    cr_expect_eq(plan.other_bytes, 2.0 * 3 * 12 * 32 * 2 + 4 * 3 * (5 + 1));
    cr_expect_eq(plan.flops, 4.0 * 3 * 12 * 80 * 32);
    // 17 keys end with page 4 and begin in page 3.
    shape.window = 17;
    cr_assert_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK);
    cr_expect_eq(plan.kv_bytes, 2.0 * 3 * 4 * 17 * 32);
    cr_expect_eq(plan.other_bytes, 2.0 * 3 * 12 * 32 * 2 + 4 * 3 * (2 + 1));
}

Test(decode_args, checks_shapes)
{
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    size_t bytes = 7;
    int32_t count = 7;
    struct attn_decode_shape shape = right_shape();
    cr_expect_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_OK);
    cr_expect_eq(attn_decode_counters(device, &shape, &count), ATTN_OK);
    cr_expect(bytes == 0 && count == 0);
    shape.head_dim = 31;
    bytes = 7;
    count = 7;
    cr_expect_eq(attn_decode_workspace(device, &shape, &bytes), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "head_dim is 31"));
    cr_expect_eq(attn_decode_counters(device, &shape, &count), ATTN_ERROR_INVALID);
    cr_expect(bytes == 0 && count == 0);
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect_null(plan.kernel);
    shape = right_shape();
    shape.has_skip_table = 2;
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "has_skip_table is 2"));
    shape.has_skip_table = 1;
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK);
    shape.q_len = 2;
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "q_len is 2: skip-softmax"));
    shape = right_shape();
    cr_expect_eq(attn_decode_plan(device, &shape, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_decode_plan(device, NULL, &plan), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_decode_plan(NULL, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_decode_workspace(device, &shape, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_decode_counters(device, &shape, NULL), ATTN_ERROR_INVALID);
    shape.size = 2;
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "shape->size is 2"));
    shape = right_shape();
    plan.size = 1;
    cr_expect_eq(attn_decode_plan(device, &shape, &plan), ATTN_ERROR_INVALID);
}

// ---- sizes of older structs: fields that they lack count as 0

// Where the fields begin, and the end. Each field has to be here: see expect_all_fields.
#define AT(field) \
    { \
        offsetof(struct attn_decode_params, field), sizeof(params.field) \
    }

struct extent {
    uint32_t offset, bytes;
};

static const struct extent params_fields[] = {
    AT(size),           AT(q_dtype),
    AT(kv_dtype),       AT(batch),
    AT(q_len),          AT(num_q_heads),
    AT(num_kv_heads),   AT(head_dim),
    AT(page_size),      AT(max_pages_per_seq),
    AT(num_pages),      AT(q),
    AT(q_stride),       AT(o),
    AT(k_pool),         AT(v_pool),
    AT(k_page_stride),  AT(k_token_stride),
    AT(k_head_stride),  AT(v_page_stride),
    AT(v_token_stride), AT(v_head_stride),
    AT(block_table),    AT(seq_lens),
    AT(sinks),          AT(lse),
    AT(scale),          AT(softcap),
    AT(window),         AT(k_scale),
    AT(v_scale),        AT(k_scales),
    AT(v_scales),       AT(max_decode_seqs),
    AT(workspace),      AT(workspace_bytes),
    AT(counters),       AT(fault),
    AT(q_token_stride), AT(tree_mask),
    AT(mask_words),     AT(window_form),
    AT(v_block_table),  AT(table_stride),
    AT(skip_table),     AT(skip_table_length),
    AT(dropped_blocks), { sizeof(struct attn_decode_params), 0 },
};

// Nothing but padding lies between one field and the next.
static void expect_all_fields(const struct extent *const fields, const size_t count)
{
    for (size_t i = 1; i < count; i++) {
        const uint32_t end = fields[i - 1].offset + fields[i - 1].bytes;
        cr_expect(fields[i].offset >= end && fields[i].offset - end < sizeof(void *),
                  "a field between bytes %u and %u is not listed", end, fields[i].offset);
    }
}

// The call with `size` bytes of params, whose others are 0 or wild: what it says, and does.
static enum attn_status call_older(const uint32_t size, const bool wild, char *const sentence)
{
    memcpy(&memory, &before, sizeof(memory));
    params = right_params();
    memset((char *) &params + size, wild ? 0xA5 : 0, sizeof(params) - size);
    params.size = wild ? size : (uint32_t) sizeof(params);
    const enum attn_status status = attn_decode(device, &params, NULL);
    strcpy(sentence, attn_last_error());
    return status;
}

Test(decode_args, takes_params_of_every_older_size)
{
    const size_t count = sizeof(params_fields) / sizeof(params_fields[0]);
    static char older[4096], newer[4096];
    int served = 0;
    expect_all_fields(params_fields, count);
    for (size_t i = 1; i < count; i++) {
        const uint32_t size = params_fields[i].offset;
        const enum attn_status status = call_older(size, false, newer);
        static unsigned char written[sizeof(memory)];
        memcpy(written, &memory, sizeof(memory));
        cr_expect_eq(call_older(size, true, older), status, "%u bytes: %s", size, older);
        cr_expect_str_eq(older, newer, "%u bytes", size);
        cr_expect_eq(memcmp(written, &memory, sizeof(memory)), 0, "%u bytes", size);
        served += status == ATTN_OK;
    }
    // All from those that end with seq_lens on.
    cr_expect_eq(served, 24);
}

Test(decode_args, takes_shapes_and_plans_of_every_older_size)
{
    static const uint32_t shapes[] = {
        offsetof(struct attn_decode_shape, q_dtype),
        offsetof(struct attn_decode_shape, kv_dtype),
        offsetof(struct attn_decode_shape, batch),
        offsetof(struct attn_decode_shape, q_len),
        offsetof(struct attn_decode_shape, num_q_heads),
        offsetof(struct attn_decode_shape, num_kv_heads),
        offsetof(struct attn_decode_shape, head_dim),
        offsetof(struct attn_decode_shape, page_size),
        offsetof(struct attn_decode_shape, max_pages_per_seq),
        offsetof(struct attn_decode_shape, window),
        offsetof(struct attn_decode_shape, max_decode_seqs),
        offsetof(struct attn_decode_shape, has_skip_table),
    };
    static const uint32_t plans[] = {
        offsetof(struct attn_decode_plan, kernel),
        offsetof(struct attn_decode_plan, num_splits),
        offsetof(struct attn_decode_plan, chunk_keys),
        offsetof(struct attn_decode_plan, grid),
        offsetof(struct attn_decode_plan, block),
        offsetof(struct attn_decode_plan, smem_bytes),
        offsetof(struct attn_decode_plan, workspace_bytes),
        offsetof(struct attn_decode_plan, num_counters),
        offsetof(struct attn_decode_plan, kv_bytes),
        offsetof(struct attn_decode_plan, other_bytes),
        offsetof(struct attn_decode_plan, flops),
    };
    struct attn_decode_plan whole = { .size = sizeof(whole) };
    struct attn_decode_shape shape = right_shape();
    cr_assert_eq(attn_decode_plan(device, &shape, &whole), ATTN_OK, "%s", attn_last_error());
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct attn_decode_plan plan = whole;
        shape = right_shape();
        memset((char *) &shape + shapes[i], 0xA5, sizeof(shape) - shapes[i]);
        shape.size = shapes[i];
        const bool enough = shapes[i] >= offsetof(struct attn_decode_shape, window);
        cr_expect_eq(attn_decode_plan(device, &shape, &plan), enough ? ATTN_OK : ATTN_ERROR_INVALID,
                     "%u bytes: %s", shapes[i], attn_last_error());
        if (enough) cr_expect_eq(plan.kv_bytes, whole.kv_bytes);
    }
    shape = right_shape();
    for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
        const size_t size = plans[i];
        struct attn_decode_plan plan;
        unsigned char untouched[sizeof(plan)];
        memset(untouched, 0x55, sizeof(untouched));
        memset(&plan, 0x55, sizeof(plan));
        plan.size = plans[i];
        cr_assert_eq(attn_decode_plan(device, &shape, &plan), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(plan.size, plans[i]);
        if (size > offsetof(struct attn_decode_plan, kernel))
            cr_expect_eq(plan.kernel, whole.kernel);
        if (size > offsetof(struct attn_decode_plan, kv_bytes))
            cr_expect_eq(plan.kv_bytes, whole.kv_bytes);
        cr_expect_eq(memcmp((char *) &plan + size, untouched, sizeof(plan) - size), 0, "%zu bytes",
                     size);
    }
}

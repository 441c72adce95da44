/* SPDX-License-Identifier: Apache-2.0 */
// What include/attn/ctm.h supports, the sizes it asks for, and its rules: each has its own
// sentence, and a refused call writes nothing.
#include "attn/attn.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define BATCH 2
#define Q_LEN 3
#define Q_HEADS 4
#define KV_HEADS 2
#define DIM 64
#define TABLE 2
#define PAGES 4

static const int32_t dims[] = { 32, 64, 128, 256, 512 };

// ---- what is supported

// As the contract's table says.
static bool table_says(bool tree, int32_t ratio, int32_t head_dim, bool fp8)
{
    bool served = false;
    for (size_t i = 0; i < COUNT(dims); i++) served |= dims[i] == head_dim;
    if (tree) return served && ratio >= 1 && ratio <= 16 && !(fp8 && head_dim == 32);
    return served && ratio >= 1 && ratio <= (!fp8 && head_dim < 128 ? 8 : 16);
}

Test(ctm_supported, says_what_the_table_says)
{
    for (int32_t ratio = 0; ratio <= 17; ratio++)
        for (int32_t head_dim = -1; head_dim <= 1024; head_dim++)
            for (int32_t flags = 0; flags < 4; flags++)
                for (int32_t kv_heads = 1; kv_heads <= 8; kv_heads += 7) {
                    const bool fp8 = flags & 1, other = flags & 2;
                    const int32_t q_heads = ratio * kv_heads, window = ratio % 3 * 100;
                    cr_assert_eq(attn_ctm_supported(q_heads, kv_heads, head_dim, fp8, window,
                                                    other),
                                 table_says(false, ratio, head_dim, fp8),
                                 "ratio %d, head_dim %d, fp8 %d", ratio, head_dim, fp8);
                    cr_assert_eq(attn_ctm_supported_tree(q_heads, kv_heads, head_dim, fp8, window,
                                                         other),
                                 table_says(true, ratio, head_dim, fp8),
                                 "tree, ratio %d, head_dim %d, fp8 %d", ratio, head_dim, fp8);
                }
}

Test(ctm_supported, takes_no_remainder_zero_or_negative)
{
    static const struct {
        int32_t q_heads, kv_heads, head_dim, window;
    } wrong[] = {
        { 7, 2, 128, 0 },         { 0, 1, 128, 0 },         { 1, 0, 128, 0 },
        { 0, 0, 128, 0 },         { -8, -2, 128, 0 },       { 8, -2, 128, 0 },
        { -8, 2, 128, 0 },        { 8, 2, 0, 0 },           { 8, 2, -128, 0 },
        { 8, 2, 128, -1 },        { 1, 2, 128, 0 },         { INT32_MIN, -1, 128, 0 },
        { INT32_MAX, 1, 128, 0 }, { 8, 2, 128, INT32_MIN },
    };
    for (size_t i = 0; i < COUNT(wrong); i++)
        for (int32_t flags = 0; flags < 4; flags++) {
            cr_expect_not(attn_ctm_supported(wrong[i].q_heads, wrong[i].kv_heads, wrong[i].head_dim,
                                             flags & 1, wrong[i].window, flags & 2),
                          "%zu", i);
            cr_expect_not(attn_ctm_supported_tree(wrong[i].q_heads, wrong[i].kv_heads,
                                                  wrong[i].head_dim, flags & 1, wrong[i].window,
                                                  flags & 2),
                          "%zu", i);
        }
    cr_expect(attn_ctm_supported(INT32_MAX, INT32_MAX, 128, false, INT32_MAX, true));
}

Test(ctm_supported, has_trees_of_1_to_128_tokens)
{
    for (int32_t q_len = -2; q_len < 300; q_len++)
        cr_expect_eq(attn_ctm_supports_tree_query_seq_len(q_len), q_len >= 1 && q_len <= 128);
    cr_expect_not(attn_ctm_supports_tree_query_seq_len(INT32_MIN));
    cr_expect_not(attn_ctm_supports_tree_query_seq_len(INT32_MAX));
    cr_expect_eq(ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN, 128);
    cr_expect_eq(ATTN_CTM_MAX_GQA_RATIO, 8);
    cr_expect_eq(ATTN_CTM_MAX_GQA_RATIO_R16, 16);
    cr_expect_eq(ATTN_CTM_PAGE_SIZE, 128);
}

// ---- sizes

static const int32_t batches[] = { 0, 1, 2, 7, 64, 513, 65536, INT32_MAX };
static const int32_t q_lens[] = { 1, 2, 8, 60, 127, 128 };
// Times the ratio they stay within int32.
static const int32_t heads[] = { 1, 2, 8, 32, 1024, INT32_MAX / 16 };

// What does not fit, -1, counts as more than all that does.
static void expect_not_less(int64_t larger, int64_t smaller, const char *what)
{
    cr_assert(larger >= -1 && smaller >= -1, "%s: %lld, %lld", what, (long long) larger,
              (long long) smaller);
    cr_assert((uint64_t) larger >= (uint64_t) smaller, "%s: %lld < %lld", what, (long long) larger,
              (long long) smaller);
}

Test(ctm_sizes, of_decode_grow_with_every_argument)
{
    for (size_t b = 0; b < COUNT(batches); b++)
        for (size_t h = 0; h < COUNT(heads); h++) {
            const int64_t semaphores = attn_ctm_semaphore_elems(batches[b], heads[h]);
            if (b)
                expect_not_less(semaphores, attn_ctm_semaphore_elems(batches[b - 1], heads[h]),
                                "batch");
            if (h)
                expect_not_less(semaphores, attn_ctm_semaphore_elems(batches[b], heads[h - 1]),
                                "heads");
            for (size_t d = 0; d < COUNT(dims); d++) {
                const int64_t floats = attn_ctm_workspace_elems(batches[b], heads[h], dims[d]);
                cr_assert(batches[b] ? floats > 0 : floats == 0);
                if (b)
                    expect_not_less(floats,
                                    attn_ctm_workspace_elems(batches[b - 1], heads[h], dims[d]),
                                    "batch");
                if (h)
                    expect_not_less(floats,
                                    attn_ctm_workspace_elems(batches[b], heads[h - 1], dims[d]),
                                    "heads");
                if (d)
                    expect_not_less(floats,
                                    attn_ctm_workspace_elems(batches[b], heads[h], dims[d - 1]),
                                    "head_dim");
            }
        }
}

static int64_t tree_floats(size_t b, size_t q, size_t h, int32_t ratio, size_t d)
{
    return attn_ctm_tree_workspace_elems(batches[b], q_lens[q], heads[h] * ratio, heads[h],
                                         dims[d]);
}

static int64_t tree_semaphores(size_t b, size_t q, size_t h, int32_t ratio)
{
    return attn_ctm_tree_semaphore_elems(batches[b], q_lens[q], heads[h] * ratio, heads[h]);
}

static void expect_tree_sizes(size_t b, size_t q, size_t h, int32_t ratio)
{
    const int64_t semaphores = tree_semaphores(b, q, h, ratio);
    expect_not_less(semaphores, attn_ctm_semaphore_elems(batches[b], heads[h]), "decode");
    if (b) expect_not_less(semaphores, tree_semaphores(b - 1, q, h, ratio), "batch");
    if (q) expect_not_less(semaphores, tree_semaphores(b, q - 1, h, ratio), "q_len");
    if (h) expect_not_less(semaphores, tree_semaphores(b, q, h - 1, ratio), "heads");
    if (ratio > 1) expect_not_less(semaphores, tree_semaphores(b, q, h, ratio - 1), "ratio");
    for (size_t d = 0; d < COUNT(dims); d++) {
        const int64_t floats = tree_floats(b, q, h, ratio, d);
        cr_assert(batches[b] ? floats > 0 : floats == 0);
        expect_not_less(floats, attn_ctm_workspace_elems(batches[b], heads[h] * ratio, dims[d]),
                        "decode");
        if (b) expect_not_less(floats, tree_floats(b - 1, q, h, ratio, d), "batch");
        if (q) expect_not_less(floats, tree_floats(b, q - 1, h, ratio, d), "q_len");
        if (h) expect_not_less(floats, tree_floats(b, q, h - 1, ratio, d), "heads");
        if (d) expect_not_less(floats, tree_floats(b, q, h, ratio, d - 1), "head_dim");
        if (ratio > 1) expect_not_less(floats, tree_floats(b, q, h, ratio - 1, d), "ratio");
    }
}

Test(ctm_sizes, of_trees_grow_with_every_argument)
{
    for (size_t b = 0; b < COUNT(batches); b++)
        for (size_t q = 0; q < COUNT(q_lens); q++)
            for (size_t h = 0; h < COUNT(heads); h++)
                for (int32_t ratio = 1; ratio <= 16; ratio++) expect_tree_sizes(b, q, h, ratio);
}

// Nothing wraps: what cannot be counted is -1.
Test(ctm_sizes, do_not_wrap)
{
    const int32_t most = INT32_MAX;
    cr_expect_eq(attn_ctm_semaphore_elems(most, most), -1);
    cr_expect_eq(attn_ctm_semaphore_elems(1, most), -1);
    cr_expect_eq(attn_ctm_tree_semaphore_elems(most, 128, most, most), -1);
    cr_expect_eq(attn_ctm_tree_semaphore_elems(1, 128, most / 16 * 16, most / 16), -1);
    cr_expect(attn_ctm_semaphore_elems(most, 8) > 0);
    cr_expect(attn_ctm_workspace_elems(most, most, 512) > (int64_t) 512 * most);
    cr_expect(attn_ctm_tree_workspace_elems(most, 128, most, most, 512) > (int64_t) 512 * most);
    cr_expect(attn_ctm_tree_workspace_elems(most, 128, most, most, 512) < INT64_MAX / 4);
}

Test(ctm_sizes, are_minus_one_for_wrong_arguments)
{
    cr_expect_eq(attn_ctm_workspace_elems(-1, 8, 128), -1);
    cr_expect_eq(attn_ctm_workspace_elems(INT32_MIN, 8, 128), -1);
    cr_expect_eq(attn_ctm_workspace_elems(1, 0, 128), -1);
    cr_expect_eq(attn_ctm_workspace_elems(1, -8, 128), -1);
    cr_expect_eq(attn_ctm_workspace_elems(0, 0, 128), -1);
    static const int32_t wrong_dims[] = { 0, -64, 16, 96, 129, 1024, INT32_MAX, INT32_MIN };
    for (size_t i = 0; i < COUNT(wrong_dims); i++) {
        cr_expect_eq(attn_ctm_workspace_elems(1, 8, wrong_dims[i]), -1);
        cr_expect_eq(attn_ctm_tree_workspace_elems(1, 8, 8, 8, wrong_dims[i]), -1);
    }
    cr_expect_eq(attn_ctm_semaphore_elems(-1, 8), -1);
    cr_expect_eq(attn_ctm_semaphore_elems(1, 0), -1);
    cr_expect_eq(attn_ctm_semaphore_elems(1, INT32_MIN), -1);
    static const struct {
        int32_t batch, q_len, q_heads, kv_heads;
    } wrong[] = {
        { -1, 8, 8, 2 }, { 1, 0, 8, 2 },  { 1, -1, 8, 2 }, { 1, 129, 8, 2 }, { 1, INT32_MAX, 8, 2 },
        { 1, 8, 0, 2 },  { 1, 8, -8, 2 }, { 1, 8, 8, 0 },  { 1, 8, 8, -2 },  { 1, 8, 8, 3 },
        { 1, 8, 34, 2 }, { 1, 8, 2, 8 },  { 0, 0, 8, 2 },
    };
    for (size_t i = 0; i < COUNT(wrong); i++) {
        cr_expect_eq(attn_ctm_tree_workspace_elems(wrong[i].batch, wrong[i].q_len, wrong[i].q_heads,
                                                   wrong[i].kv_heads, 128),
                     -1, "%zu", i);
        cr_expect_eq(attn_ctm_tree_semaphore_elems(wrong[i].batch, wrong[i].q_len, wrong[i].q_heads,
                                                   wrong[i].kv_heads),
                     -1, "%zu", i);
    }
}

// ---- rules

// A tree step that is right, for each test to break.
static struct {
    _Alignas(256) uint16_t q[BATCH * Q_LEN * Q_HEADS * DIM + 8];
    _Alignas(256) uint16_t output[BATCH * Q_LEN * Q_HEADS * DIM + 8];
    _Alignas(256) uint16_t pool[2 * PAGES * ATTN_CTM_PAGE_SIZE * KV_HEADS * DIM + 8];
    _Alignas(256) int32_t table[BATCH * 2 * TABLE + 1];
    _Alignas(256) int32_t lens[BATCH + 1], mask[BATCH * Q_LEN + 1], skip[4], fault[2];
    _Alignas(256) float sinks[Q_HEADS + 1];
    _Alignas(256) int64_t dropped[2];
} memory, before;

static float *workspace;
static int32_t *semaphores;
static int64_t num_floats, num_words;
static struct attn_device *device;
static struct attn_ctm_params params;

static struct attn_ctm_params right_params(void)
{
    struct attn_ctm_params right = ATTN_CTM_PARAMS_INIT;
    right.batch_size = BATCH;
    right.q_len = Q_LEN;
    right.num_q_heads = Q_HEADS;
    right.num_kv_heads = KV_HEADS;
    right.head_dim = DIM;
    right.num_pages = PAGES;
    right.max_pages_per_seq = TABLE;
    right.q = memory.q;
    right.output = memory.output;
    right.kv_pool = memory.pool;
    right.page_table = memory.table;
    right.seq_lens = memory.lens;
    right.sinks = memory.sinks;
    right.tree_mask = memory.mask;
    right.mask_words = 1;
    right.workspace = workspace;
    right.semaphores = semaphores;
    right.fault = memory.fault;
    right.dropped_pages = memory.dropped;
    return right;
}

static struct attn_ctm_params right_decode(void)
{
    struct attn_ctm_params right = right_params();
    right.q_len = 1;
    right.skip_softmax_scale_table = memory.skip;
    right.skip_softmax_scale_table_length = (int32_t) COUNT(memory.skip);
    return right;
}

// What the host executor has no business in.
static void *reserve(int64_t elements)
{
    void *const pointer = mmap(NULL, (size_t) elements * 4, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert(pointer != MAP_FAILED);
    return pointer;
}

static void set_up(void)
{
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
    num_floats = attn_ctm_tree_workspace_elems(BATCH, Q_LEN, Q_HEADS, KV_HEADS, DIM);
    num_words = attn_ctm_tree_semaphore_elems(BATCH, Q_LEN, Q_HEADS, KV_HEADS);
    workspace = reserve(num_floats);
    semaphores = reserve(num_words);
    memset(&memory, 0, sizeof(memory));
    memset(memory.output, 0xEE, sizeof(memory.output));
    for (int i = 0; i < BATCH * 2 * TABLE; i++) memory.table[i] = i;
    for (int i = 0; i < BATCH; i++) memory.lens[i] = 100 + i;
    memory.skip[2] = 1000;
    memory.fault[0] = INT32_MAX;
    memcpy(&before, &memory, sizeof(memory));
    params = right_params();
}

static void tear_down(void)
{
    attn_device_close(&device);
    munmap(workspace, (size_t) num_floats * 4);
    munmap(semaphores, (size_t) num_words * 4);
}

TestSuite(ctm_args, .init = set_up, .fini = tear_down);

static void expect_refused(enum attn_status expected, const char *part)
{
    const enum attn_status status = attn_ctm_run(device, &params);
    cr_expect_eq(status, expected, "%s: %s instead of %s: %s", part, attn_status_name(status),
                 attn_status_name(expected), attn_last_error());
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s: memory changed", part);
    params = right_params();
}

#define REFUSED(field, value, part) \
    do { \
        params.field = value; \
        expect_refused(ATTN_ERROR_INVALID, part); \
    } while (0)

#define UNSUPPORTED(field, value, part) \
    do { \
        params.field = value; \
        expect_refused(ATTN_ERROR_UNSUPPORTED, part); \
    } while (0)

static void expect_right(void)
{
    cr_expect_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_empty(attn_last_error());
    memcpy(&memory, &before, sizeof(memory));
    params = right_params();
}

Test(ctm_args, has_the_published_defaults)
{
    const struct attn_ctm_params p = ATTN_CTM_PARAMS_INIT;
    struct attn_ctm_params zero;
    cr_expect_eq(p.size, sizeof(p));
    cr_expect_eq(p.q_len, 1);
    cr_expect(p.attention_scale == 1.0f && p.k_scale == 1.0f && p.v_scale == 1.0f);
    cr_expect_eq(p.fallback_available, 1);
    memset(&zero, 0, sizeof(zero));
    zero.size = sizeof(zero);
    zero.q_len = zero.fallback_available = 1;
    zero.attention_scale = zero.k_scale = zero.v_scale = 1;
    cr_expect_eq(memcmp(&p, &zero, sizeof(p)), 0);
}

Test(ctm_args, accepts_right_calls)
{
    cr_expect_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
    const size_t last = COUNT(memory.output) - 8;
    cr_expect_neq(memory.output[last - 1], before.output[last - 1]);
    cr_expect_eq(memory.output[last], before.output[last]);
    cr_expect_eq(memory.fault[0], INT32_MAX);
    expect_right();
    params = right_decode();
    expect_right();
    params.sinks = NULL;
    params.fault = NULL;
    params.dropped_pages = NULL;
    params.tree_mask = memory.table;
    params.mask_words = 2;
    params.batch_size = 1;
    expect_right();
}

Test(ctm_args, needs_a_device_and_params)
{
    cr_expect_eq(attn_ctm_run(NULL, &params), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "device is NULL"));
    cr_expect_eq(attn_ctm_run(device, NULL), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "params is NULL"));
    REFUSED(size, 0, "size is 0");
    REFUSED(size, 3, "size is 3");
    REFUSED(size, UINT32_MAX, "size is");
}

Test(ctm_args, checks_sizes)
{
    REFUSED(batch_size, -1, "batch_size is -1");
    REFUSED(q_len, 0, "q_len is 0");
    REFUSED(q_len, INT32_MIN, "q_len is -2147483648");
    REFUSED(num_q_heads, 0, "num_q_heads is 0");
    REFUSED(num_q_heads, -4, "num_q_heads is -4");
    REFUSED(num_kv_heads, 0, "num_kv_heads is 0");
    REFUSED(num_kv_heads, -2, "num_kv_heads is -2");
    REFUSED(num_q_heads, 5, "multiple of the second");
    REFUSED(head_dim, 0, "head_dim is 0");
    REFUSED(head_dim, -64, "head_dim is -64");
    REFUSED(num_pages, 0, "num_pages is 0");
    REFUSED(num_pages, -1, "num_pages is -1");
    REFUSED(num_pages, 1 << 30, "num_pages is 1073741824");
    REFUSED(max_pages_per_seq, 0, "max_pages_per_seq is 0");
    REFUSED(sliding_window, -1, "sliding_window is -1");
}

Test(ctm_args, refuses_what_is_not_supported)
{
    UNSUPPORTED(q_len, 129, "q_len is 129");
    UNSUPPORTED(q_len, INT32_MAX, "q_len is 2147483647");
    UNSUPPORTED(head_dim, 96, "head_dim is 96: a tree with fp16 keys and values is served at 32");
    UNSUPPORTED(head_dim, INT32_MAX, "head_dim is 2147483647");
    UNSUPPORTED(num_q_heads, 34, "17 query heads a KV head");
    params.fp8_kv = 1;
    UNSUPPORTED(head_dim, 32, "a tree with e4m3 keys and values is served at 64");
    params = right_decode();
    UNSUPPORTED(head_dim, 16, "head_dim is 16: decode with fp16 keys");
    params = right_decode();
    params.num_q_heads = 17;
    UNSUPPORTED(num_kv_heads, 1, "17 query heads a KV head");
    params.num_kv_heads = params.num_q_heads = INT32_MAX;
    expect_refused(ATTN_ERROR_UNSUPPORTED, "semaphores");
}

Test(ctm_args, checks_scalars)
{
    REFUSED(attention_scale, NAN, "attention_scale is");
    REFUSED(attention_scale, INFINITY, "attention_scale is inf");
    params.fp8_kv = 1;
    REFUSED(k_scale, -INFINITY, "k_scale is -inf");
    params.fp8_kv = 1;
    REFUSED(v_scale, NAN, "v_scale is");
    params.k_scale = params.v_scale = NAN;
    expect_right();
    REFUSED(mask_words, 0, "mask_words is 0: with q_len 3 it has to be at least 1");
    REFUSED(mask_words, -1, "mask_words is -1");
    REFUSED(q_len, 33, "mask_words is 1: with q_len 33 it has to be at least 2");
    params = right_decode();
    params.mask_words = -1;
    expect_right();
}

Test(ctm_args, checks_the_skip_table)
{
    params = right_decode();
    REFUSED(skip_softmax_scale_table_length, 3, "skip_softmax_scale_table_length is 3");
    params = right_decode();
    REFUSED(skip_softmax_scale_table_length, -2, "skip_softmax_scale_table_length is -2");
    params = right_decode();
    REFUSED(skip_softmax_scale_table, NULL, "skip_softmax_scale_table is NULL");
    params = right_decode();
    REFUSED(q_len, 2, "skip-softmax is for one query token");
    // A table of no pairs is none.
    params.skip_softmax_scale_table = memory.skip;
    expect_right();
    params = right_decode();
    params.skip_softmax_scale_table_length = 0;
    expect_right();
}

Test(ctm_args, checks_pointers)
{
    REFUSED(q, NULL, "q is NULL");
    REFUSED(output, NULL, "output is NULL");
    REFUSED(kv_pool, NULL, "kv_pool is NULL");
    REFUSED(page_table, NULL, "page_table is NULL");
    REFUSED(seq_lens, NULL, "seq_lens is NULL");
    REFUSED(tree_mask, NULL, "tree_mask is NULL");
    REFUSED(workspace, NULL, "workspace is NULL");
    REFUSED(semaphores, NULL, "semaphores is NULL");
    REFUSED(q, memory.q + 4, "q is 0x");
    REFUSED(output, memory.output + 1, "aligned to 16 bytes");
    REFUSED(kv_pool, memory.pool + 4, "kv_pool is 0x");
    REFUSED(page_table, (const void *) ((char *) memory.table + 1), "page_table is 0x");
    REFUSED(seq_lens, (const void *) ((char *) memory.lens + 2), "seq_lens is 0x");
    REFUSED(sinks, (const void *) ((char *) memory.sinks + 2), "sinks is 0x");
    REFUSED(tree_mask, (const void *) ((char *) memory.mask + 2), "tree_mask is 0x");
    REFUSED(workspace, workspace + 4, "aligned to 256 bytes");
    REFUSED(semaphores, (void *) ((char *) semaphores + 2), "semaphores is 0x");
    REFUSED(fault, (void *) ((char *) memory.fault + 1), "fault is 0x");
    REFUSED(dropped_pages, (void *) ((char *) memory.dropped + 4), "aligned to 8 bytes");
    REFUSED(workspace, (void *) (UINTPTR_MAX - 255), "from there on");
    params = right_decode();
    params.skip_softmax_scale_table = (const void *) ((char *) memory.skip + 1);
    expect_refused(ATTN_ERROR_INVALID, "skip_softmax_scale_table is 0x");
    params = right_decode();
    params.tree_mask = (const void *) ((char *) memory.mask + 1);
    expect_right();
}

Test(ctm_args, refuses_output_over_input)
{
    const size_t last = COUNT(memory.output) - 16;
    REFUSED(output, memory.q, "overlaps");
    REFUSED(output, memory.pool + COUNT(memory.pool) - 16, "overlaps kv_pool");
    REFUSED(q, memory.output + last, "overlaps");
    REFUSED(page_table, (int32_t *) (memory.output + last), "overlaps page_table");
    REFUSED(seq_lens, (int32_t *) (memory.output + last), "overlaps seq_lens");
    REFUSED(sinks, (float *) (memory.output + last), "overlaps sinks");
    REFUSED(tree_mask, (int32_t *) (memory.output + last), "overlaps tree_mask");
    REFUSED(fault, memory.table + 1, "overlaps");
    REFUSED(dropped_pages, (int64_t *) memory.lens, "overlaps");
    REFUSED(semaphores, (int32_t *) memory.pool, "overlaps");
    REFUSED(workspace, (float *) memory.pool, "overlaps");
    REFUSED(semaphores, (int32_t *) workspace + 4, "overlaps");
    params = right_decode();
    params.skip_softmax_scale_table = (int32_t *) memory.output;
    expect_refused(ATTN_ERROR_INVALID, "overlaps skip_softmax_scale_table");
}

Test(ctm_args, checks_sizes_that_overflow)
{
    params.batch_size = INT32_MAX;
    params.q_len = 128;
    params.mask_words = INT32_MAX;
    params.num_q_heads = params.num_kv_heads = 1 << 19;
    expect_refused(ATTN_ERROR_INVALID, "would reach");
    params.num_pages = INT32_MAX / 2;
    params.num_q_heads = params.num_kv_heads = 1 << 16;
    params.head_dim = 512;
    expect_refused(ATTN_ERROR_INVALID, "would reach");
}

Test(ctm_args, enqueues_nothing_for_an_empty_batch)
{
    const struct attn_ctm_params right = right_params();
    params = (struct attn_ctm_params) ATTN_CTM_PARAMS_INIT;
    params.num_q_heads = right.num_q_heads;
    params.num_kv_heads = right.num_kv_heads;
    params.head_dim = right.head_dim;
    params.num_pages = params.max_pages_per_seq = 1;
    for (int32_t q_len = 1; q_len <= 33; q_len += 32) {
        params.q_len = q_len;
        params.mask_words = 2;
        cr_expect_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
    }
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0);
}

// The policy of the device has no say, and legacy asks for no max_decode_seqs.
Test(ctm_args, gives_equal_bits_under_every_policy)
{
    static const char *const policies[] = { "legacy", "auto", "1", "7", "chunk", "chunk:4096" };
    cr_expect_eq(attn_ctm_run(device, &params), ATTN_OK);
    memcpy(&before, &memory, sizeof(memory));
    for (size_t i = 0; i < COUNT(policies); i++) {
        struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
        open.splitk_policy = policies[i];
        attn_device_close(&device);
        cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
        memset(memory.output, 0, sizeof(memory.output) - 16);
        cr_expect_eq(attn_ctm_run(device, &params), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s", policies[i]);
    }
}

// ---- sizes of older structs: fields that they lack count as 0

#define AT(field) \
    { \
        offsetof(struct attn_ctm_params, field), sizeof(params.field) \
    }

// All of them, and the end.
static const struct {
    uint32_t offset, bytes;
} fields[] = {
    AT(size),
    AT(batch_size),
    AT(q_len),
    AT(num_q_heads),
    AT(num_kv_heads),
    AT(head_dim),
    AT(num_pages),
    AT(max_pages_per_seq),
    AT(sliding_window),
    AT(contiguous_query_swa),
    AT(q),
    AT(output),
    AT(kv_pool),
    AT(fp8_kv),
    AT(k_scale),
    AT(v_scale),
    AT(attention_scale),
    AT(page_table),
    AT(seq_lens),
    AT(sinks),
    AT(tree_mask),
    AT(mask_words),
    AT(fallback_available),
    AT(skip_softmax_scale_table),
    AT(skip_softmax_scale_table_length),
    AT(workspace),
    AT(semaphores),
    AT(fault),
    AT(dropped_pages),
    AT(stream),
    { sizeof(struct attn_ctm_params), 0 },
};

// The call with `size` bytes of params, whose others are 0 or wild: what it says, and does.
static enum attn_status call_older(uint32_t size, bool wild, char *sentence)
{
    memcpy(&memory, &before, sizeof(memory));
    params = right_params();
    memset((char *) &params + size, wild ? 0xA5 : 0, sizeof(params) - size);
    params.size = wild ? size : (uint32_t) sizeof(params);
    const enum attn_status status = attn_ctm_run(device, &params);
    strcpy(sentence, attn_last_error());
    return status;
}

Test(ctm_args, takes_params_of_every_older_size)
{
    static char older[4096], newer[4096];
    static unsigned char written[sizeof(memory)];
    int served = 0;
    for (size_t i = 1; i < COUNT(fields); i++) {
        const uint32_t size = fields[i].offset, end = fields[i - 1].offset + fields[i - 1].bytes;
        cr_expect(size >= end && size - end < sizeof(void *), "a field before %u is not listed",
                  size);
        const enum attn_status status = call_older(size, false, newer);
        memcpy(written, &memory, sizeof(memory));
        cr_expect_eq(call_older(size, true, older), status, "%u bytes: %s", size, older);
        cr_expect_str_eq(older, newer, "%u bytes", size);
        cr_expect_eq(memcmp(written, &memory, sizeof(memory)), 0, "%u bytes", size);
        served += status == ATTN_OK;
    }
    // All from those that end with semaphores on.
    cr_expect_eq(served, 4);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Every rule of include/attn/prefill.h that is checked has its own sentence, a refused or declined
// call writes nothing, and the twins decline what is not theirs.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/pack_folder.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BATCH 2
#define TOKENS 3
#define KEYS 5
#define Q_HEADS 4
#define KV_HEADS 2
#define DIM 64
#define TWIN_DIM 256
#define PAGE 4
#define TABLE 2
#define PAGES 6

// Calls that are right, for each test to break. Room for TWIN_DIM and for pages.
static struct {
    _Alignas(256) uint16_t q[BATCH * TOKENS * Q_HEADS * TWIN_DIM + 8];
    _Alignas(256) uint16_t o[BATCH * TOKENS * Q_HEADS * TWIN_DIM + 8];
    _Alignas(256) uint16_t k[PAGES * PAGE * KV_HEADS * TWIN_DIM + 8];
    _Alignas(256) uint16_t v[PAGES * PAGE * KV_HEADS * TWIN_DIM + 8];
    _Alignas(256) float sinks[Q_HEADS + 1], lse[BATCH * TOKENS * Q_HEADS + 1];
    _Alignas(256) int32_t table[BATCH * TABLE + 1], cu_seqlens[BATCH + 2], kv_lens[BATCH + 1];
    _Alignas(256) int32_t q_offsets[BATCH + 1], kv_starts[BATCH + 1], fault[2];
} memory, before;

typedef enum attn_status (*entry)(struct attn_device *, const struct attn_prefill_params *,
                                  attn_stream);

static const entry entries[] = {
    attn_prefill,       attn_prefill_64,          attn_prefill_paged_64,
    attn_prefill_fa128, attn_prefill_fa128_paged,
};

static struct attn_device *device;
static struct attn_prefill_params params;

// Contiguous.
static struct attn_prefill_params right_params(void)
{
    struct attn_prefill_params right = ATTN_PREFILL_PARAMS_INIT;
    right.dtype = ATTN_DTYPE_BF16;
    right.batch = BATCH;
    right.q_len = TOKENS;
    right.kv_len = KEYS;
    right.q_offset = KEYS - TOKENS;
    right.num_q_heads = Q_HEADS;
    right.num_kv_heads = KV_HEADS;
    right.head_dim = DIM;
    right.q = memory.q;
    right.o = memory.o;
    right.k = memory.k;
    right.v = memory.v;
    right.lse = memory.lse;
    right.fault = memory.fault;
    return right;
}

static void set_pages(void)
{
    params.block_table = memory.table;
    params.page_size = PAGE;
    params.max_pages_per_seq = TABLE;
    params.num_pages = PAGES;
}

static void set_lists(void)
{
    params.cu_seqlens = memory.cu_seqlens;
    params.num_tokens = BATCH * TOKENS;
    params.kv_lens = memory.kv_lens;
    params.q_offsets = memory.q_offsets;
    params.kv_starts = memory.kv_starts;
    params.num_kv_tokens = BATCH * KEYS;
}

static void reopen(void)
{
    attn_device_close(&device);
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK);
}

static void set_up(void)
{
    memset(&memory, 0, sizeof(memory));
    memset(memory.o, 0xEE, sizeof(memory.o));
    memset(memory.lse, 0xEE, sizeof(memory.lse));
    for (int i = 0; i < BATCH * TABLE; i++) memory.table[i] = i;
    for (int i = 0; i < BATCH; i++) {
        memory.cu_seqlens[i + 1] = (i + 1) * TOKENS;
        memory.kv_lens[i] = KEYS;
        memory.kv_starts[i] = i * KEYS;
    }
    memory.fault[0] = INT32_MAX;
    memcpy(&before, &memory, sizeof(memory));
    unsetenv("METRALE_NO_ATTN_FA128");
    reopen();
    params = right_params();
}

static void tear_down(void)
{
    attn_device_close(&device);
}

TestSuite(prefill_args, .init = set_up, .fini = tear_down);

static void expect_unchanged(const char *const what)
{
    cr_expect_eq(memcmp(&memory, &before, sizeof(memory)), 0, "%s: memory changed", what);
}

// Refused with a sentence that has `part`; the next call starts from a right one again.
static void expect_status(const entry function, const enum attn_status expected,
                          const char *const part)
{
    const enum attn_status status = function(device, &params, NULL);
    cr_expect_eq(status, expected, "%s: %s instead of %s", part, attn_status_name(status),
                 attn_status_name(expected));
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    expect_unchanged(part);
    params = right_params();
}

static void expect_refused(const char *const part)
{
    expect_status(attn_prefill, ATTN_ERROR_INVALID, part);
}

#define REFUSED(field, value, part) \
    do { \
        params.field = value; \
        expect_refused(part); \
    } while (0)

#define REFUSED_PAGED(field, value, part) \
    do { \
        set_pages(); \
        REFUSED(field, value, part); \
    } while (0)

#define REFUSED_RAGGED(field, value, part) \
    do { \
        set_lists(); \
        REFUSED(field, value, part); \
    } while (0)

static void expect_accepted(const entry function)
{
    memcpy(&memory, &before, sizeof(memory));
    cr_expect_eq(function(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_empty(attn_last_error());
    // Everything of o and lse, nothing behind them.
    const size_t o = (size_t) (BATCH * TOKENS * Q_HEADS * params.head_dim);
    const size_t lse = BATCH * TOKENS * Q_HEADS;
    for (size_t i = 0; i < o; i++) cr_assert_eq(memory.o[i], 0, "element %zu", i);
    cr_expect_eq(memory.o[o], before.o[o]);
    for (size_t i = 0; i < lse; i++) cr_assert_neq(memcmp(&memory.lse[i], &before.lse[i], 4), 0);
    cr_expect_eq(memcmp(&memory.lse[lse], &before.lse[lse], 4), 0);
    cr_expect_eq(memory.fault[0], INT32_MAX);
}

Test(prefill_args, accepts_right_calls)
{
    expect_accepted(attn_prefill);
    expect_accepted(attn_prefill_64);
    set_lists();
    expect_accepted(attn_prefill);
    params = right_params();
    set_pages();
    expect_accepted(attn_prefill);
    expect_accepted(attn_prefill_paged_64);
    set_lists();
    params.kv_starts = NULL;
    expect_accepted(attn_prefill);
}

Test(prefill_args, has_defaults)
{
    const struct attn_prefill_params init = ATTN_PREFILL_PARAMS_INIT;
    struct attn_prefill_params expected;
    memset(&expected, 0, sizeof(expected));
    expected.size = sizeof(expected);
    expected.batch = expected.causal = 1;
    expected.scale = 1;
    cr_expect_eq(memcmp(&init, &expected, sizeof(init)), 0);
}

// The host executor needs none, and does not look at it.
Test(prefill_args, ignores_a_workspace)
{
    params = right_params();
    set_pages();
    params.workspace = (void *) (uintptr_t) 3;
    params.counters = (int32_t *) (uintptr_t) 5;
    cr_expect_eq(attn_prefill(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_prefill_paged_64(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(prefill_args, needs_a_device_and_params)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        cr_expect_eq(entries[i](NULL, &params, NULL), ATTN_ERROR_INVALID);
        cr_expect(strstr(attn_last_error(), "device is NULL"));
        cr_expect_eq(entries[i](device, NULL, NULL), ATTN_ERROR_INVALID);
        cr_expect(strstr(attn_last_error(), "params is NULL"));
        params.size = 3;
        expect_status(entries[i], ATTN_ERROR_INVALID, "size is 3");
    }
    REFUSED(size, 0, "size is 0");
    REFUSED(size, UINT32_MAX, "size is");
}

Test(prefill_args, checks_types_and_heads)
{
    REFUSED(dtype, ATTN_DTYPE_NONE, "dtype is 0");
    REFUSED(dtype, ATTN_DTYPE_E4M3, "dtype is 3 (e4m3): it has to be bf16 or fp16");
    REFUSED(dtype, (enum attn_dtype) 99, "dtype is 99");
    REFUSED(num_q_heads, 0, "num_q_heads is 0");
    REFUSED(num_kv_heads, 0, "num_kv_heads is 0");
    REFUSED(num_kv_heads, -2, "num_kv_heads is -2");
    REFUSED(num_q_heads, 5, "multiple of the second");
    REFUSED(head_dim, 0, "head_dim is 0");
    REFUSED(head_dim, 72, "head_dim is 72");
    REFUSED(head_dim, 528, "head_dim is 528: it has to be a multiple of 16 in 16..512");
}

Test(prefill_args, checks_lengths)
{
    REFUSED(batch, -1, "batch is -1");
    REFUSED(q_len, -1, "q_len is -1");
    REFUSED(kv_len, -1, "kv_len is -1");
    REFUSED_PAGED(kv_len, -1, "kv_len is -1");
    REFUSED_PAGED(kv_len, PAGE * TABLE + 1,
                  "kv_len is 9: 2 pages of 4 tokens hold no more than 8 keys");
    REFUSED_RAGGED(num_tokens, -1, "num_tokens is -1");
    REFUSED_RAGGED(num_kv_tokens, -1, "num_kv_tokens is -1");
    set_lists();
    params.kv_lens = NULL;
    REFUSED(kv_len, BATCH * KEYS + 1, "kv_len is 11, num_kv_tokens 10");
    // What k and v have room for, a sequence.
    set_lists();
    params.kv_starts = NULL;
    REFUSED(kv_len, -1, "kv_len is -1");
}

Test(prefill_args, checks_scalars)
{
    REFUSED(causal, 2, "causal is 2: it has to be 0 or 1");
    REFUSED(causal, -1, "causal is -1");
    REFUSED(window, -1, "window is -1");
    REFUSED(scale, NAN, "scale is");
    REFUSED(scale, INFINITY, "scale is inf");
    REFUSED(softcap, NAN, "softcap is");
    REFUSED(softcap, -1.0f, "softcap is -1");
    REFUSED(softcap, 1e-39f, "softcap is 1e-39");
}

Test(prefill_args, checks_pages)
{
    REFUSED_PAGED(page_size, 0, "page_size is 0");
    REFUSED_PAGED(page_size, -4, "page_size is -4");
    REFUSED_PAGED(max_pages_per_seq, 0, "max_pages_per_seq is 0");
    REFUSED_PAGED(num_pages, 0, "num_pages is 0");
    REFUSED_PAGED(num_pages, (int64_t) INT32_MAX + 1, "num_pages is 2147483648");
    REFUSED_PAGED(table_stride, TABLE - 1, "table_stride is 1 elements, smaller than a row");
    REFUSED_PAGED(table_stride, -1, "table_stride is -1");
    REFUSED_PAGED(table_stride, INT64_MAX, "block_table would reach");
    REFUSED_PAGED(kv_starts, memory.kv_starts, "kv_starts and block_table are both given");
}

Test(prefill_args, checks_strides)
{
    REFUSED(q_token_stride, -8, "q_token_stride is -8");
    REFUSED(q_token_stride, Q_HEADS * DIM - 8, "q_token_stride is 248 elements, smaller");
    REFUSED(q_token_stride, Q_HEADS * DIM + 4,
            "q_token_stride is 260 elements: it has to be a multiple of 16 bytes");
    // One that is given makes the others count: their 0 stands for itself.
    REFUSED(k_token_stride, KV_HEADS * DIM, "k_head_stride is 0");
    REFUSED(v_head_stride, DIM, "v_token_stride is 0");
    REFUSED_PAGED(k_page_stride, PAGE * KV_HEADS * DIM, "k_token_stride is 0");
    set_pages();
    params.v_token_stride = KV_HEADS * DIM;
    REFUSED(v_head_stride, DIM, "v_page_stride is 0");
    params.k_token_stride = KV_HEADS * DIM;
    REFUSED(k_head_stride, DIM + 4, "k_head_stride is 68");
    params.v_token_stride = 56;
    REFUSED(v_head_stride, DIM, "v_token_stride is 56");
    REFUSED(q_token_stride, INT64_MAX / 8 * 8, "q would reach");
    params.k_token_stride = INT64_MAX / 8 * 8;
    REFUSED(k_head_stride, DIM, "k would reach");
    params.num_q_heads = params.num_kv_heads = INT32_MAX;
    params.batch = params.q_len = INT32_MAX;
    expect_refused("would reach");
}

Test(prefill_args, checks_pointers)
{
    REFUSED(q, NULL, "q is NULL");
    REFUSED(o, NULL, "o is NULL");
    REFUSED(k, NULL, "k is NULL");
    REFUSED(v, NULL, "v is NULL");
    REFUSED_PAGED(v, NULL, "v is NULL");
    REFUSED(q, memory.q + 4, "aligned to 16 bytes");
    REFUSED(o, memory.o + 1, "o is 0x");
    REFUSED(k, memory.k + 4, "k is 0x");
    REFUSED(v, memory.v + 4, "v is 0x");
    REFUSED(sinks, (const void *) ((char *) memory.sinks + 2), "sinks is 0x");
    REFUSED(lse, (void *) ((char *) memory.lse + 2), "lse is 0x");
    REFUSED(fault, (void *) ((char *) memory.fault + 1), "fault is 0x");
    REFUSED_PAGED(block_table, (const void *) ((char *) memory.table + 1), "block_table is 0x");
    REFUSED_RAGGED(cu_seqlens, (const void *) ((char *) memory.table + 2), "cu_seqlens is 0x");
    REFUSED_RAGGED(kv_lens, (const void *) ((char *) memory.table + 2), "kv_lens is 0x");
    REFUSED_RAGGED(q_offsets, (const void *) ((char *) memory.table + 2), "q_offsets is 0x");
    REFUSED_RAGGED(kv_starts, (const void *) ((char *) memory.table + 2), "kv_starts is 0x");
}

Test(prefill_args, refuses_output_over_input)
{
    REFUSED(o, memory.q + (BATCH * TOKENS * Q_HEADS - 1) * DIM, "overlaps q");
    REFUSED(o, memory.k + (BATCH * KEYS * KV_HEADS - 1) * DIM, "overlaps k");
    REFUSED_PAGED(o, memory.v + (PAGES * PAGE * KV_HEADS - 1) * DIM, "overlaps v");
    REFUSED(lse, (float *) memory.o, "overlaps lse");
    REFUSED(fault, (int32_t *) memory.q, "overlaps q");
    REFUSED(sinks, memory.lse + BATCH * TOKENS * Q_HEADS - 1, "overlaps sinks");
    REFUSED_PAGED(fault, memory.table + BATCH * TABLE - 1, "overlaps block_table");
    REFUSED_RAGGED(fault, memory.cu_seqlens + BATCH, "overlaps cu_seqlens");
    REFUSED_RAGGED(fault, memory.kv_lens + BATCH - 1, "overlaps kv_lens");
    REFUSED_RAGGED(fault, memory.q_offsets, "overlaps q_offsets");
    REFUSED_RAGGED(fault, memory.kv_starts, "overlaps kv_starts");
    // Side by side is fine, and inputs may share memory.
    params.v = memory.k;
    params.fault = NULL;
    params.lse = (float *) (memory.o + BATCH * TOKENS * Q_HEADS * DIM);
    cr_expect_eq(attn_prefill(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
}

Test(prefill_args, looks_at_nothing_without_query_tokens)
{
    for (int i = 0; i < 3; i++) {
        struct attn_prefill_params empty = right_params();
        empty.q = empty.k = empty.v = (const void *) 3;
        empty.o = (void *) 5;
        empty.lse = (void *) 7;
        empty.fault = (void *) 9;
        if (i == 0) empty.batch = 0;
        if (i == 1) empty.q_len = 0;
        if (i == 2) empty.cu_seqlens = (const void *) 11;
        cr_expect_eq(attn_prefill(device, &empty, NULL), ATTN_OK, "%s", attn_last_error());
    }
    // No keys: k and v may be NULL.
    params.kv_len = 0;
    params.k = params.v = NULL;
    expect_accepted(attn_prefill_64);
}

// ---- originals and twins

Test(prefill_args, keeps_entries_apart)
{
    expect_status(attn_prefill_paged_64, ATTN_ERROR_INVALID,
                  "block_table is NULL: attn_prefill_paged_64 reads pages");
    set_pages();
    expect_status(attn_prefill_64, ATTN_ERROR_INVALID,
                  "block_table is not NULL: attn_prefill_64 reads contiguous K and V");
    params.head_dim = TWIN_DIM;
    expect_status(attn_prefill_fa128_paged, ATTN_ERROR_INVALID, "block_table is NULL");
    set_pages();
    params.head_dim = TWIN_DIM;
    expect_status(attn_prefill_fa128, ATTN_ERROR_INVALID, "block_table is not NULL");
    params.cu_seqlens = memory.cu_seqlens;
    expect_status(attn_prefill_64, ATTN_ERROR_INVALID,
                  "cu_seqlens is not NULL: attn_prefill_64 takes sequences of one length");
    params.kv_lens = memory.kv_lens;
    expect_status(attn_prefill_64, ATTN_ERROR_INVALID, "kv_lens is not NULL");
    params.q_offsets = memory.q_offsets;
    expect_status(attn_prefill_64, ATTN_ERROR_INVALID, "q_offsets is not NULL");
    params.kv_starts = memory.kv_starts;
    expect_status(attn_prefill_64, ATTN_ERROR_INVALID, "kv_starts is not NULL");
}

static void set_twin(const bool paged)
{
    params = right_params();
    params.head_dim = TWIN_DIM;
    if (paged) set_pages();
}

static entry twin_of(const bool paged)
{
    return paged ? attn_prefill_fa128_paged : attn_prefill_fa128;
}

#define DECLINED(field, value) \
    do { \
        for (int paged = 0; paged < 2; paged++) { \
            set_twin(paged); \
            params.field = value; \
            /* Wrong in every other way, too. */ \
            params.o = NULL; \
            params.q = (const void *) 3; \
            cr_expect_eq(twin_of(paged)(device, &params, NULL), ATTN_DECLINED, "%s", #field); \
            cr_expect_str_empty(attn_last_error()); \
            expect_unchanged(#field); \
        } \
    } while (0)

Test(prefill_args, twins_decline_what_is_not_theirs)
{
    DECLINED(head_dim, 64);
    DECLINED(head_dim, 128);
    DECLINED(head_dim, 512);
    DECLINED(head_dim, -1);
    DECLINED(causal, 0);
    DECLINED(window, 1);
    DECLINED(window, INT32_MAX);
    DECLINED(num_kv_heads, 0);
    DECLINED(num_kv_heads, -1);
    DECLINED(num_kv_heads, 3);
    DECLINED(num_q_heads, 5);
    DECLINED(batch, 0);
    DECLINED(q_len, 0);
}

Test(prefill_args, twins_take_what_is_theirs)
{
    for (int paged = 0; paged < 2; paged++) {
        set_twin(paged);
        expect_accepted(twin_of(paged));
        // As many heads, other types, and what the rule says nothing about.
        params.num_kv_heads = Q_HEADS;
        params.num_q_heads = Q_HEADS;
        params.kv_len = TOKENS;
        params.num_pages = PAGES / 2;
        params.dtype = ATTN_DTYPE_FP16;
        params.softcap = 3;
        params.sinks = memory.sinks;
        params.q_offset = 0;
        expect_accepted(twin_of(paged));
        set_twin(paged);
        params.kv_len = 0;
        expect_accepted(twin_of(paged));
        memcpy(&memory, &before, sizeof(memory));
        set_twin(paged);
        params.dtype = ATTN_DTYPE_E4M3;
        expect_status(twin_of(paged), ATTN_ERROR_INVALID, "dtype is 3");
        set_twin(paged);
        params.o = NULL;
        expect_status(twin_of(paged), ATTN_ERROR_INVALID, "o is NULL");
    }
}

// Presence counts, whatever the value, and when the device was opened.
Test(prefill_args, twins_decline_by_environment)
{
    static const char *const values[] = { "", "0", "1", "off" };
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++)
        for (int paged = 0; paged < 2; paged++) {
            set_twin(paged);
            setenv("METRALE_NO_ATTN_FA128", values[i], 1);
            expect_accepted(twin_of(paged));
            memcpy(&memory, &before, sizeof(memory));
            reopen();
            unsetenv("METRALE_NO_ATTN_FA128");
            cr_expect_eq(twin_of(paged)(device, &params, NULL), ATTN_DECLINED, "'%s'", values[i]);
            cr_expect_str_empty(attn_last_error());
            expect_unchanged(values[i]);
            // Nobody else minds.
            expect_accepted(attn_prefill);
            expect_accepted(paged ? attn_prefill_paged_64 : attn_prefill_64);
            reopen();
        }
}

// ---- devices without a kernel

// The fake pack has no twin of FP16, and nothing of head_dim 96.
static void expect_no_kernel(const enum attn_device_kind kind)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    static const char sentence[] = "bf16, head_dim 96; it has: prefill_";
    attn_device_close(&device);
    open.kind = kind;
    open.target = "hopper";
    open.pack_dir = pack_folder_make_with("hopper");
    cr_assert_not_null(open.pack_dir);
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK, "%s", attn_last_error());
    for (int paged = 0; paged < 2; paged++) {
        const entry original = paged ? attn_prefill_paged_64 : attn_prefill_64;
        set_twin(paged);
        params.head_dim = 96;
        expect_status(attn_prefill, ATTN_ERROR_UNSUPPORTED, sentence);
        set_twin(paged);
        params.head_dim = 96;
        expect_status(original, ATTN_ERROR_UNSUPPORTED, sentence);
        set_twin(paged);
        params.head_dim = 96;
        params.window = -1;
        expect_status(original, ATTN_ERROR_INVALID, "window is -1");
        set_twin(paged);
        params.dtype = ATTN_DTYPE_FP16;
        cr_expect_eq(twin_of(paged)(device, &params, NULL), ATTN_DECLINED);
        cr_expect_str_empty(attn_last_error());
        expect_unchanged("twin");
    }
    pack_folder_remove();
}

Test(prefill_args, has_no_kernels)
{
    fake_driver_install();
    expect_no_kernel(ATTN_DEVICE_TARGET);
    expect_no_kernel(ATTN_DEVICE_ORDINAL);
    cr_expect_eq(fake.num_launches, 0);
}

// ---- sizes of older structs: fields that they lack count as 0

#define AT(field) \
    { \
        offsetof(struct attn_prefill_params, field), sizeof(params.field) \
    }

struct extent {
    uint32_t offset, bytes;
};

// Where the fields begin, and the end.
static const struct extent fields[] = {
    AT(size),
    AT(dtype),
    AT(batch),
    AT(q_len),
    AT(kv_len),
    AT(q_offset),
    AT(num_q_heads),
    AT(num_kv_heads),
    AT(head_dim),
    AT(causal),
    AT(window),
    AT(scale),
    AT(softcap),
    AT(q),
    AT(q_token_stride),
    AT(o),
    AT(k),
    AT(v),
    AT(k_page_stride),
    AT(k_token_stride),
    AT(k_head_stride),
    AT(v_page_stride),
    AT(v_token_stride),
    AT(v_head_stride),
    AT(block_table),
    AT(table_stride),
    AT(page_size),
    AT(max_pages_per_seq),
    AT(num_pages),
    AT(sinks),
    AT(lse),
    AT(fault),
    AT(cu_seqlens),
    AT(num_tokens),
    AT(kv_lens),
    AT(q_offsets),
    AT(kv_starts),
    AT(num_kv_tokens),
    AT(workspace),
    AT(workspace_bytes),
    AT(counters),
    { sizeof(struct attn_prefill_params), 0 },
};

// The call with `size` bytes of params, whose others are 0 or wild: what it says, and does.
static enum attn_status call_older(const uint32_t size, const bool wild, char *const sentence)
{
    memcpy(&memory, &before, sizeof(memory));
    params = right_params();
    memset((char *) &params + size, wild ? 0xA5 : 0, sizeof(params) - size);
    params.size = wild ? size : (uint32_t) sizeof(params);
    const enum attn_status status = attn_prefill(device, &params, NULL);
    strcpy(sentence, attn_last_error());
    return status;
}

Test(prefill_args, takes_params_of_every_older_size)
{
    static char older[4096], newer[4096];
    static unsigned char written[sizeof(memory)];
    int served = 0;
    for (size_t i = 1; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const uint32_t size = fields[i].offset, end = fields[i - 1].offset + fields[i - 1].bytes;
        cr_expect(size >= end && size - end < sizeof(void *),
                  "a field between bytes %u and %u is not listed", end, size);
        const enum attn_status status = call_older(size, false, newer);
        memcpy(written, &memory, sizeof(memory));
        cr_expect_eq(call_older(size, true, older), status, "%u bytes: %s", size, older);
        cr_expect_str_eq(older, newer, "%u bytes", size);
        cr_expect_eq(memcmp(written, &memory, sizeof(memory)), 0, "%u bytes", size);
        served += status == ATTN_OK;
    }
    // All from those that end with v on.
    cr_expect_eq(served, 24);
}

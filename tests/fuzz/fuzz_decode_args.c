/* SPDX-License-Identifier: Apache-2.0 */
// Random params of attn_decode, on the host executor over small real buffers and on a GPU behind
// the fake driver: no call may crash, and what is accepted is within the rules. Built with
//   clang -fsanitize=fuzzer,address,undefined
//
// The input is a list of changes (field, value) to a call that is right.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/pack_folder.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BATCH 4
#define MAX_TOKENS 4
#define MAX_HEADS 8
#define MAX_DIM 128
#define MAX_PAGE 8
#define MAX_TABLE 8
#define MAX_PAGES 16
#define ROOM (MAX_PAGES * MAX_PAGE * MAX_HEADS * MAX_DIM)
#define MAX_STRIDE (MAX_PAGE * MAX_DIM)

static _Alignas(256) uint16_t q[ROOM], o[ROOM], k[ROOM], v[ROOM];
// One size for all that is small, so that each may stand for each.
#define WORDS 512
// Elements of a row of a table, words of a row of the mask and of a table for skip-softmax.
#define MAX_TABLE_STRIDE 64
#define MAX_MASK_WORDS 8
#define MAX_SKIP 64
static _Alignas(256) float floats[4][WORDS];
static _Alignas(256) int32_t table[WORDS], lens[WORDS], fault[WORDS];
// Of 16 pieces a sequence, and of the sequence.
static _Alignas(256) int32_t counters[MAX_BATCH * MAX_HEADS * 17];
static _Alignas(256) unsigned char workspace[1 << 24];

static struct attn_device *open_device(const enum attn_device_kind kind, const char *const folder,
                                       const char *const policy)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device;
    params.kind = kind;
    params.pack_dir = folder;
    params.splitk_policy = policy;
    if (attn_device_open(&device, &params) != ATTN_OK) abort();
    return device;
}

static struct attn_decode_params right_params(void)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = 2;
    params.num_q_heads = 4;
    params.num_kv_heads = 2;
    params.head_dim = 64;
    params.page_size = 4;
    params.max_pages_per_seq = MAX_TABLE;
    params.num_pages = MAX_PAGES;
    params.q = q;
    params.o = o;
    params.k_pool = k;
    params.v_pool = v;
    params.block_table = table;
    params.seq_lens = lens;
    params.fault = fault;
    params.lse = floats[0];
    params.workspace = workspace;
    params.workspace_bytes = sizeof(workspace);
    params.counters = counters;
    params.max_decode_seqs = MAX_BATCH;
    return params;
}

struct reader {
    const uint8_t *data;
    size_t size;
};

static void take(struct reader *const reader, void *const to, const size_t size)
{
    memset(to, 0, size);
    const size_t taken = size < reader->size ? size : reader->size;
    if (taken) memcpy(to, reader->data, taken);
    reader->data += taken;
    reader->size -= taken;
}

// Small, extreme, or any.
static int64_t take_number(struct reader *const reader)
{
    static const int64_t extreme[] = {
        INT64_MIN,      INT32_MIN, -1, 0, 1, INT32_MAX, (int64_t) INT32_MAX + 1,
        INT64_MAX / 16, INT64_MAX,
    };
    uint8_t kind;
    int64_t value;
    take(reader, &kind, 1);
    if (kind < 200) return (int8_t) kind;
    if (kind < 230) return extreme[kind % (sizeof(extreme) / sizeof(extreme[0]))];
    take(reader, &value, sizeof(value));
    return value;
}

static void *take_pointer(struct reader *const reader)
{
    void *const known[] = {
        NULL,
        q,
        o,
        k,
        v,
        table,
        lens,
        fault,
        floats[0],
        floats[1],
        floats[2],
        floats[3],
        workspace,
        counters,
        q + 1,
        (char *) o + 1,
        workspace + 128,
        (void *) (uintptr_t) (UINTPTR_MAX - 255),
    };
    uint8_t which;
    take(reader, &which, 1);
    return known[which % (sizeof(known) / sizeof(known[0]))];
}

// A number of elements, whole vectors of `unit` as a rule.
static int64_t take_stride(struct reader *const reader, const uint64_t unit)
{
    return (int64_t) ((uint64_t) take_number(reader) * unit);
}

static float take_float(struct reader *const reader)
{
    float value;
    take(reader, &value, sizeof(value));
    return value;
}

static void change_field(struct attn_decode_params *const p, struct reader *const r)
{
    uint8_t field;
    take(r, &field, 1);
    switch (field % 50) {
    // Older structs end between fields that pointers are aligned to.
    case 0: p->size = (uint32_t) take_number(r) / 8 * 8; break;
    case 1: p->q_dtype = (enum attn_dtype) take_number(r); break;
    case 2: p->kv_dtype = (enum attn_dtype) take_number(r); break;
    case 3: p->batch = (int32_t) take_number(r); break;
    case 4: p->q_len = (int32_t) take_number(r); break;
    case 5: p->num_q_heads = (int32_t) take_number(r); break;
    case 6: p->num_kv_heads = (int32_t) take_number(r); break;
    case 7: p->head_dim = (int32_t) take_stride(r, 16); break;
    case 8: p->page_size = (int32_t) take_number(r); break;
    case 9: p->max_pages_per_seq = (int32_t) take_number(r); break;
    case 10: p->num_pages = take_number(r); break;
    case 11: p->q = take_pointer(r); break;
    case 12: p->q_stride = take_stride(r, 8); break;
    case 13: p->o = take_pointer(r); break;
    case 14: p->k_pool = take_pointer(r); break;
    case 15: p->v_pool = take_pointer(r); break;
    case 16: p->k_page_stride = take_stride(r, 16); break;
    case 17: p->k_token_stride = take_stride(r, 16); break;
    case 18: p->k_head_stride = take_stride(r, 16); break;
    case 19: p->v_page_stride = take_stride(r, 16); break;
    case 20: p->v_token_stride = take_stride(r, 16); break;
    case 21: p->v_head_stride = take_stride(r, 16); break;
    case 22: p->block_table = take_pointer(r); break;
    case 23: p->seq_lens = take_pointer(r); break;
    case 24: p->sinks = take_pointer(r); break;
    case 25: p->lse = take_pointer(r); break;
    case 26: p->scale = take_float(r); break;
    case 27: p->softcap = take_float(r); break;
    case 28: p->window = (int32_t) take_number(r); break;
    case 29: p->k_scale = take_float(r); break;
    case 30: p->v_scale = take_float(r); break;
    case 31: p->k_scales = take_pointer(r); break;
    case 32: p->v_scales = take_pointer(r); break;
    case 33: p->max_decode_seqs = (int32_t) take_number(r); break;
    case 34: p->workspace = take_pointer(r); break;
    case 35: p->workspace_bytes = (size_t) take_number(r); break;
    case 36: p->counters = take_pointer(r); break;
    case 37: p->fault = take_pointer(r); break;
    case 38: p->q_token_stride = take_stride(r, 8); break;
    case 39: p->tree_mask = take_pointer(r); break;
    case 40: p->mask_words = (int32_t) take_number(r); break;
    case 41: p->window_form = (int32_t) take_number(r); break;
    case 42: p->v_block_table = take_pointer(r); break;
    case 43: p->table_stride = take_number(r); break;
    case 44: p->skip_table = take_pointer(r); break;
    case 45: p->skip_table_length = (int32_t) take_number(r); break;
    case 46: p->dropped_blocks = take_pointer(r); break;
    case 47: fault[(uint8_t) take_number(r) % WORDS] = (int32_t) take_number(r); break;
    case 48: table[(uint8_t) take_number(r) % WORDS] = (int32_t) take_number(r); break;
    default: lens[(uint8_t) take_number(r) % MAX_BATCH] = (int32_t) take_number(r); break;
    }
}

// Whether the buffers are as large as the call says: the library can't know.
static bool is_backed(const struct attn_decode_params *const p)
{
    const int64_t strides[] = {
        p->q_stride,      p->k_page_stride,  p->k_token_stride, p->k_head_stride,
        p->v_page_stride, p->v_token_stride, p->v_head_stride,  p->q_token_stride,
    };
    for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); i++)
        if (strides[i] > MAX_STRIDE) return false;
    const void *const large[] = { p->q, p->o, p->k_pool, p->v_pool };
    for (size_t i = 0; i < 4; i++)
        if (large[i] && large[i] != q && large[i] != o && large[i] != k && large[i] != v)
            return false;
    const void *const small[] = {
        p->block_table, p->seq_lens,       p->sinks,     p->lse,
        p->k_scales,    p->v_scales,       p->tree_mask, p->v_block_table,
        p->skip_table,  p->dropped_blocks, p->fault,
    };
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++)
        if ((uintptr_t) small[i] > UINTPTR_MAX / 2) return false;
    return p->batch <= MAX_BATCH && p->num_q_heads <= MAX_HEADS && p->head_dim <= MAX_DIM &&
           p->q_len <= MAX_TOKENS && p->mask_words <= MAX_MASK_WORDS &&
           p->table_stride <= MAX_TABLE_STRIDE && p->skip_table_length <= MAX_SKIP &&
           p->page_size <= MAX_PAGE && p->max_pages_per_seq <= MAX_TABLE &&
           p->num_pages <= MAX_PAGES;
}

// Checks that an accepted call keeps the rules that memory safety hangs on.
static void expect_sound(const struct attn_decode_params *const p)
{
    if (p->q_len < 1 || p->q_len > ATTN_DECODE_MAX_Q_LEN || p->window_form < 0 ||
        p->window_form > 1 || (p->table_stride != 0 && p->table_stride < p->max_pages_per_seq))
        abort();
    if (p->tree_mask && p->mask_words < (p->q_len + 31) / 32) abort();
    if (p->skip_table &&
        (p->q_len > 1 || p->skip_table_length < 2 || p->skip_table_length % 2 != 0))
        abort();
    if (p->batch < 0 || p->num_q_heads < 1 || p->num_kv_heads < 1 ||
        p->num_q_heads % p->num_kv_heads != 0 || p->head_dim < 16 || p->page_size < 1 ||
        p->max_pages_per_seq < (p->batch > 0) || p->num_pages < (p->batch > 0) ||
        !isfinite(p->scale))
        abort();
    if (p->batch > 0 &&
        (!p->q || !p->o || !p->k_pool || !p->v_pool || !p->block_table || !p->seq_lens))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *const data, const size_t size)
{
    static const char *const policies[] = { "chunk", "legacy", "1", "auto" };
    static struct attn_device *host[4], *gpu[4];
    if (!host[0]) {
        fake_driver_install();
        const char *const folder = pack_folder_make();
        if (!folder || pack_folder_add("hopper", "libattn-hopper.so", SIZE_MAX) != 0) abort();
        for (int i = 0; i < 4; i++) {
            host[i] = open_device(ATTN_DEVICE_HOST, NULL, policies[i]);
            gpu[i] = open_device(ATTN_DEVICE_ORDINAL, folder, policies[i]);
        }
        pack_folder_remove();
    }
    for (int i = 0; i < WORDS; i++) table[i] = i % MAX_PAGES;
    for (int i = 0; i < MAX_BATCH; i++) lens[i] = 5 * i;
    struct reader reader = { data, size };
    // What an older size leaves out counts as 0, so the struct that is judged is cut like that,
    // too.
    struct attn_decode_params params = right_params(), seen = { 0 };
    uint8_t policy;
    take(&reader, &policy, 1);
    while (reader.size > 0) change_field(&params, &reader);
    if (params.size > sizeof(params)) params.size = UINT32_MAX;
    memcpy(&seen, &params, params.size < sizeof(params) ? params.size : sizeof(params));
    fake.num_launches = 0;
    const enum attn_status status = attn_decode(gpu[policy % 4], &params, NULL);
    if (status == ATTN_OK) expect_sound(&seen);
    if ((status == ATTN_OK) != (attn_last_error()[0] == '\0')) abort();
    if ((status == ATTN_OK && seen.batch > 0) != (fake.num_launches == 1)) abort();
    if (is_backed(&seen) && attn_decode(host[policy % 4], &params, NULL) == ATTN_OK)
        expect_sound(&seen);
    return 0;
}

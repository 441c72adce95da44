/* SPDX-License-Identifier: Apache-2.0 */
// Any bytes as a case file: reading it must not crash, what is accepted must lie within the file,
// and the host executor must run it, whatever its tables and lengths hold. Built with
//   clang -fsanitize=fuzzer,address,undefined
#include "attn/attn.h"
#include "cli/case.h"
#include "cli/execute.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Calls beyond these are read but not run: they would only be slow.
#define MAX_ELEMENTS 65536
#define MAX_KEYS 4096

static volatile unsigned char sink;

// The sanitizer watches each byte.
static void touch(const void *const data, const size_t bytes)
{
    const unsigned char *const from = data;
    unsigned char sum = 0;
    for (size_t i = 0; i < bytes; i++) sum ^= from[i];
    sink = sum;
}

static void touch_tensors(const struct case_file *const loaded)
{
    for (size_t i = 0; i < loaded->file->num_tensors; i++)
        touch(loaded->file->tensors[i].data, loaded->file->tensors[i].bytes);
    int64_t shape[4];
    size_t elements = 1;
    const int rank = case_shape(loaded, shape);
    for (int i = 0; i < rank; i++) elements *= (size_t) shape[i];
    if (loaded->expected_o) touch(loaded->expected_o, elements * sizeof(double));
}

static int is_small(const struct attn_decode_params *const params)
{
    return params->batch <= 64 && params->q_len <= ATTN_DECODE_MAX_Q_LEN &&
           params->num_q_heads <= 64 && params->head_dim <= 512 &&
           case_elements(params) <= MAX_ELEMENTS && params->page_size <= MAX_KEYS &&
           params->max_pages_per_seq <= MAX_KEYS / params->page_size;
}

static struct attn_device *open_host(void)
{
    static struct attn_device *host;
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    open.splitk_policy = "chunk";
    if (!host && attn_device_open(&host, &open) != ATTN_OK) abort();
    return host;
}

static void *allocate(const size_t bytes)
{
    void *const made = malloc(bytes + (bytes == 0));
    if (!made) abort();
    return made;
}

// Workspace and semaphores are memory that nobody may touch: the host executor has no use for them.
static enum attn_status run_ctm(const struct attn_ctm_params *const params)
{
    const size_t room = (size_t) 1 << 36;
    static char *nothing;
    struct attn_ctm_params call = *params;
    const struct execute_ctm_sizes sizes = execute_find_ctm_sizes(params);
    if (!nothing)
        nothing =
            mmap(NULL, 2 * room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (nothing == MAP_FAILED || sizes.workspace_bytes > room) abort();
    call.workspace = (float *) (void *) nothing;
    call.semaphores = (int32_t *) (void *) (nothing + room);
    return attn_ctm_run(open_host(), &call);
}

static void run_case(const struct case_file *const loaded)
{
    const struct attn_decode_params *const params = &loaded->params;
    struct attn_decode_params call = *params;
    struct attn_ctm_params ctm = loaded->ctm;
    int32_t fault = INT32_MAX;
    int64_t dropped = 0;
    // 16-byte aligned, and as large as the shape says: the sanitizer sees one element more.
    const size_t bytes = case_elements(params) * attn_dtype_size(params->q_dtype);
    const size_t lse_bytes = case_rows(params) * sizeof(float);
    const bool is_ctm = loaded->op == CASE_CTM;
    call.o = ctm.output = allocate(bytes);
    call.lse = allocate(lse_bytes);
    call.fault = ctm.fault = &fault;
    ctm.dropped_pages = &dropped;
    if ((is_ctm ? run_ctm(&ctm) : attn_decode(open_host(), &call, NULL)) == ATTN_OK) {
        if (fault < 0 || (fault >= call.batch && fault != INT32_MAX)) abort();
        if (dropped < 0) abort();
        touch(call.o, bytes);
        if (!is_ctm) touch(call.lse, lse_bytes);
    } else if (!*attn_last_error()) {
        abort();
    }
    free(call.o);
    free(call.lse);
}

// More slots would only cost time. Tiles are no wider than the lists.
#define MAX_SLOTS 256

static void run_lists(const struct case_file *const loaded)
{
    struct attn_decode_params call = loaded->params;
    const size_t bytes = case_elements(&call) * attn_dtype_size(call.q_dtype);
    const size_t lse_bytes = case_rows(&call) * sizeof(float);
    int32_t fault = INT32_MAX;
    call.o = allocate(bytes);
    call.lse = allocate(lse_bytes);
    call.fault = &fault;
    const enum attn_status status =
        loaded->op == CASE_SWAP ? execute_swap_run(open_host(), NULL, &call, &loaded->tiled, NULL)
                                : execute_tiled_run(open_host(), NULL, &call, &loaded->tiled, NULL);
    if (status == ATTN_OK) {
        if (fault < 0 || (fault >= call.batch && fault != INT32_MAX)) abort();
        touch(call.o, bytes);
        touch(call.lse, lse_bytes);
    } else if (!*attn_last_error()) {
        abort();
    }
    free(call.o);
    free(call.lse);
}

static bool is_small_prefill(const struct attn_prefill_params *const p)
{
    const int64_t tokens = p->cu_seqlens ? p->num_tokens : (int64_t) p->batch * p->q_len;
    const bool paged = p->block_table;
    const int64_t keys = paged ? (int64_t) p->max_pages_per_seq * p->page_size : p->kv_len;
    return p->batch <= 64 && p->num_q_heads <= 64 && p->head_dim <= 512 && keys <= MAX_KEYS &&
           tokens * p->num_q_heads * p->head_dim <= MAX_ELEMENTS &&
           (!p->cu_seqlens || (int64_t) p->batch * tokens * p->num_q_heads <= MAX_KEYS);
}

static void run_prefill(const struct case_file *const loaded)
{
    struct attn_prefill_params call = loaded->prefill;
    const size_t tokens =
        call.cu_seqlens ? (size_t) call.num_tokens : (size_t) call.batch * (size_t) call.q_len;
    const size_t rows = tokens * (size_t) call.num_q_heads;
    const size_t bytes = rows * (size_t) call.head_dim * attn_dtype_size(call.dtype);
    int32_t fault = INT32_MAX;
    // Rows of no sequence stay as they are.
    call.o = allocate(bytes);
    call.lse = allocate(rows * sizeof(float));
    memset(call.o, 0, bytes);
    memset(call.lse, 0, rows * sizeof(float));
    call.fault = &fault;
    if (execute_prefill_enqueue(open_host(), &call, loaded->kernel, NULL) == ATTN_OK) {
        if (fault < 0 || (fault >= call.batch && fault != INT32_MAX)) abort();
        touch(call.o, bytes);
        touch(call.lse, rows * sizeof(float));
    }
    free(call.o);
    free(call.lse);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *const data, const size_t size)
{
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct case_file loaded;
    // A block of its own ends where the file does.
    void *const bytes = malloc(size + (size == 0));
    if (!bytes) abort();
    memcpy(bytes, data, size);
    if (case_parse(&loaded, "fuzz", bytes, size, NULL, NULL, why)) {
        if (!*why) abort();
    } else {
        touch_tensors(&loaded);
        if (loaded.op == CASE_PREFILL && is_small_prefill(&loaded.prefill)) run_prefill(&loaded);
        if (loaded.op != CASE_PREFILL && is_small(&loaded.params)) run_case(&loaded);
        if (loaded.tiled.block_list && is_small(&loaded.params) &&
            loaded.tiled.resident_blocks <= MAX_SLOTS)
            run_lists(&loaded);
        case_free(&loaded);
    }
    free(bytes);
    return 0;
}

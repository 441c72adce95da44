/* SPDX-License-Identifier: Apache-2.0 */
// Any bytes as a case file: reading it must not crash, what is accepted must lie within the file,
// and the host executor must run it, whatever its tables and lengths hold. Built with
//   clang -fsanitize=fuzzer,address,undefined
#include "attn/attn.h"
#include "cli/case.h"

#include <stdlib.h>
#include <string.h>

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
    if (loaded->expected_o)
        touch(loaded->expected_o, case_elements(&loaded->params) * sizeof(double));
}

static int is_small(const struct attn_decode_params *const params)
{
    return params->batch <= 64 && params->num_q_heads <= 64 && params->head_dim <= 512 &&
           case_elements(params) <= MAX_ELEMENTS && params->page_size <= MAX_KEYS &&
           params->max_pages_per_seq <= MAX_KEYS / params->page_size;
}

static void run_case(const struct attn_decode_params *const params)
{
    static struct attn_device *host;
    struct attn_decode_params call = *params;
    int32_t fault = INT32_MAX;
    if (!host) {
        struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
        open.splitk_policy = "chunk";
        if (attn_device_open(&host, &open) != ATTN_OK) abort();
    }
    // 16-byte aligned, and as large as the shape says: the sanitizer sees one element more.
    const size_t bytes = case_elements(params) * attn_dtype_size(params->q_dtype);
    const size_t rows = (size_t) params->batch * (size_t) params->num_q_heads;
    call.o = malloc(bytes + (bytes == 0));
    call.lse = malloc(rows * sizeof(float) + (rows == 0));
    call.fault = &fault;
    if (!call.o || !call.lse) abort();
    if (attn_decode(host, &call, NULL) == ATTN_OK) {
        if (fault < 0 || (fault >= call.batch && fault != INT32_MAX)) abort();
        touch(call.o, bytes);
        touch(call.lse, rows * sizeof(float));
    } else if (!*attn_last_error()) {
        abort();
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
        if (is_small(&loaded.params)) run_case(&loaded.params);
        case_free(&loaded);
    }
    free(bytes);
    return 0;
}

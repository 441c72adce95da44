/* SPDX-License-Identifier: Apache-2.0 */
// Random bytes as a swap file, and as what reads of it give: opening either refuses it, or the cache
// works within the rules. Built with
//   clang -fsanitize=fuzzer,address,undefined
//
// The input has a byte of what is to be mended, so that more than the first check is reached, and
// then changes of a sound file: an offset (2 bytes) and a byte for it.
#include "attn/attn.h"
#include "swap.h"
#include "swap_format.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE ATTN_SWAP_FILE_PAGE
// Header, two records, two indexes of one page, 6 blocks of two stripes.
#define FILE_BYTES ((5 + 12) * PAGE)

enum {
    MEND_HEADER = 1,
    MEND_RECORDS = 2,
    MEND_INDEX = 4,
    CUT = 8,
};

static unsigned char content[FILE_BYTES], sound[FILE_BYTES];
static int64_t size;
static struct attn_swap_buffers buffers;

static int open_file(struct attn_swap_file **const file, const char *const path, const bool create)
{
    static struct attn_swap_file only;
    (void) path;
    *file = &only;
    return create ? -EEXIST : 0;
}

static void close_file(struct attn_swap_file *const file)
{
    (void) file;
}

static int64_t get_size(struct attn_swap_file *const file)
{
    (void) file;
    return size;
}

static int grow(struct attn_swap_file *const file, const int64_t bytes)
{
    (void) file;
    return bytes <= size ? 0 : -ENOSPC;
}

static int remove_file(const char *const path)
{
    (void) path;
    return 0;
}

static int64_t read_file(struct attn_swap_file *const file, void *const to, const int64_t bytes,
                         const int64_t offset)
{
    (void) file;
    if (offset < 0 || bytes < 0) abort();
    if (offset >= size) return 0;
    const int64_t left = size - offset, count = bytes < left ? bytes : left;
    memcpy(to, content + offset, (size_t) count);
    return count;
}

static int64_t write_file(struct attn_swap_file *const file, const void *const from,
                          const int64_t bytes, const int64_t offset)
{
    (void) file;
    if (offset < 0 || bytes < 0) abort();
    if (bytes > size || offset > size - bytes) return -ENOSPC;
    memcpy(content + offset, from, (size_t) bytes);
    return bytes;
}

static int sync_file(struct attn_swap_file *const file)
{
    (void) file;
    return 0;
}

static int start(struct attn_swap_file *const file, const struct attn_swap_buffers *const given,
                 bool *const direct)
{
    (void) file;
    buffers = *given;
    *direct = false;
    return 0;
}

static int64_t results[64];

static int submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                  const int64_t offset)
{
    results[buffer] = read_file(file, buffers.memory + buffer * buffers.bytes, bytes, offset);
    return 0;
}

static int64_t wait_for(struct attn_swap_file *const file, const int32_t buffer,
                        bool *const stalled)
{
    (void) file;
    *stalled = false;
    return results[buffer];
}

static const struct attn_swap_io memory = {
    .name = "memory",
    .open = open_file,
    .close = close_file,
    .size = get_size,
    .grow = grow,
    .remove = remove_file,
    .read = read_file,
    .write = write_file,
    .sync = sync_file,
    .start = start,
    .submit = submit,
    .wait = wait_for,
};

static struct attn_swap_dims make_dims(void)
{
    struct attn_swap_dims dims = ATTN_SWAP_DIMS_INIT;
    dims.num_layers = 2;
    dims.num_blocks = 3;
    dims.max_seqs = 2;
    dims.num_q_heads = dims.num_kv_heads = 1;
    dims.head_dim = 64;
    dims.block_size = 4;
    dims.resident_blocks = 2;
    return dims;
}

static void make_sound(const struct attn_swap_dims *const dims)
{
    const struct attn_swap_layout layout = attn_swap_layout_of(dims, true);
    const int32_t tokens[] = { 4, 4, 2, 0, 4, 1 };
    if (layout.file_bytes != FILE_BYTES) abort();
    attn_swap_format_header(sound, dims, &layout);
    for (int i = 0; i < 2; i++) {
        unsigned char *const index = sound + (3 + i) * PAGE;
        memcpy(index, tokens, sizeof(tokens));
        attn_swap_format_commit(sound + (1 + i) * PAGE, (uint64_t) 2 + (uint64_t) i,
                                attn_swap_format_hash_page(index, 0));
    }
}

// Checksums that are right for what is there.
static void mend(const int what, const struct attn_swap_dims *const dims)
{
    const struct attn_swap_layout layout = attn_swap_layout_of(dims, true);
    if (what & MEND_HEADER) attn_swap_format_header(content, dims, &layout);
    for (int i = 0; i < 2; i++) {
        uint64_t number, checksum;
        unsigned char *const record = content + (1 + i) * PAGE;
        attn_swap_format_read_commit(record, &number, &checksum);
        if (what & MEND_INDEX) checksum = attn_swap_format_hash_page(content + (3 + i) * PAGE, 0);
        if (what & MEND_RECORDS) attn_swap_format_commit(record, number, checksum);
    }
}

// What a file that was taken says is within the rules, and served.
static void use(struct attn_swap *const swap)
{
    static _Alignas(64) uint16_t q[64], output[64];
    struct attn_swap_decode_params params = ATTN_SWAP_DECODE_PARAMS_INIT;
    params.num_seqs = 1;
    params.q = q;
    params.output = output;
    for (int32_t layer = 0; layer < 2; layer++)
        for (int32_t block = 0; block < 3; block++) {
            const int32_t tokens = attn_swap_tokens(swap, layer, block);
            if (tokens < 0 || tokens > 4) abort();
            params.layer = layer;
            params.seq_lens = &tokens;
            params.blocks = &block;
            const enum attn_status status = attn_swap_decode(swap, &params, NULL);
            if (status != ATTN_OK && status != ATTN_ERROR_IO) abort();
        }
    if (attn_swap_invalidate(swap, 0, 0, 0) != ATTN_OK) abort();
    if (attn_swap_flush(swap) != ATTN_OK) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *const data, const size_t bytes)
{
    static struct attn_device *device;
    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    const struct attn_swap_dims dims = make_dims();
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap *swap;
    if (!device) {
        if (attn_device_open(&device, &open) != ATTN_OK) abort();
        make_sound(&dims);
    }
    const int what = bytes ? data[0] : 0;
    memcpy(content, sound, sizeof(content));
    size = FILE_BYTES;
    for (size_t i = 1; i + 3 <= bytes; i += 3)
        content[(data[i] | data[i + 1] << 8) % (5 * PAGE)] = data[i + 2];
    if (what & CUT && bytes >= 3) size = (data[1] | data[2] << 8) % FILE_BYTES;
    mend(what, &dims);
    params.backing = ATTN_SWAP_FILE;
    params.dims = &dims;
    params.path = "memory";
    params.staging_bytes = 2 * PAGE;
    const enum attn_status status = attn_swap_create_with(&swap, device, &params, &memory, NULL);
    if (status != ATTN_OK) {
        if (status != ATTN_ERROR_INVALID && status != ATTN_ERROR_IO) abort();
        if (swap || !*attn_last_error()) abort();
        return 0;
    }
    use(swap);
    attn_swap_destroy(&swap);
    // And it opens again.
    if (attn_swap_create_with(&swap, device, &params, &memory, NULL) != ATTN_OK) abort();
    if (attn_swap_tokens(swap, 0, 0) != 0) abort();
    attn_swap_destroy(&swap);
    return 0;
}

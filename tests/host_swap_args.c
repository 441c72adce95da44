/* SPDX-License-Identifier: Apache-2.0 */
// Every rule of include/attn/swap.h that is checked has its own sentence, and a refused call
// changes nothing.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/older_structs.h"
#include "support/pack_folder.h"
#include "support/swap_case.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SEQS = 2
};

static struct swap_case c;
static struct attn_swap *swap;
static struct attn_swap_dims dims;
static struct attn_swap_create_params create;
static struct attn_swap_write_params write_params;
static struct attn_swap_decode_params decode;
static char path[SWAP_PATH_SIZE];

// What calls read, and what they write.
static struct {
    _Alignas(64) uint16_t k[5 * 2 * 64 + 8], v[5 * 2 * 64 + 8], q[SEQS * 4 * 64 + 8];
    _Alignas(64) uint16_t output[SEQS * 4 * 64 + 8];
    _Alignas(64) float lse[SEQS * 4 + 4];
    int32_t lens[SEQS], blocks[SEQS * 3];
} memory, before;

static void reset(void)
{
    dims = swap_dims_make();
    create = (struct attn_swap_create_params) ATTN_SWAP_CREATE_PARAMS_INIT;
    create.dims = &dims;
    write_params = (struct attn_swap_write_params) ATTN_SWAP_WRITE_PARAMS_INIT;
    write_params.num_tokens = 5;
    write_params.k = memory.k;
    write_params.v = memory.v;
    decode = (struct attn_swap_decode_params) ATTN_SWAP_DECODE_PARAMS_INIT;
    decode.num_seqs = SEQS;
    decode.q = memory.q;
    decode.output = memory.output;
    decode.lse = memory.lse;
    decode.seq_lens = memory.lens;
    decode.blocks = memory.blocks;
    decode.blocks_stride = 3;
    memcpy(&memory, &before, sizeof(memory));
}

static void set_up(void)
{
    swap_path_make(path);
    memset(before.output, 0xEE, sizeof(before.output));
    memset(before.lse, 0xEE, sizeof(before.lse));
    before.lens[0] = 12;
    before.lens[1] = 5;
    for (int32_t i = 0; i < SEQS * 3; i++) before.blocks[i] = i;
    reset();
    swap_case_init(&c, &dims, 1);
    cr_assert_eq(attn_swap_create(&swap, c.host, &create), ATTN_OK, "%s", attn_last_error());
    for (int32_t i = 0; i < 6; i++) swap_case_write(&c, swap, 0, i, 0, 5);
    swap_case_write(&c, swap, 0, 6, 0, 2);
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    swap_path_remove(path);
}

TestSuite(swap_args, .init = set_up, .fini = tear_down);

// Failed with a sentence that has `part`; the next call starts from right ones again.
static void expect_status(const enum attn_status status, const enum attn_status expected,
                          const char *const part)
{
    cr_expect_eq(status, expected, "%s: %s instead of %s", part, attn_status_name(status),
                 attn_status_name(expected));
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect_eq(memcmp(memory.output, before.output, sizeof(before.output)), 0, "%s", part);
    cr_expect_eq(memcmp(memory.lse, before.lse, sizeof(before.lse)), 0, "%s", part);
    reset();
}

static void expect_no_swap(const enum attn_status expected, const char *const part)
{
    struct attn_swap *made = swap;
    const enum attn_status status = attn_swap_create(&made, c.host, &create);
    cr_expect_null(made, "%s", part);
    cr_expect_neq(access(path, F_OK), 0, "%s: a file was made", part);
    expect_status(status, expected, part);
}

// Of dims: neither validated, nor sized, nor made.
static void expect_bad_dims(const char *const part)
{
    const struct attn_swap_dims wrong = dims;
    struct attn_swap_info info = { .size = sizeof(info) };
    expect_status(attn_swap_validate(&wrong), ATTN_ERROR_INVALID, part);
    dims = wrong;
    expect_status(attn_swap_sizes(&create, &info), ATTN_ERROR_INVALID, part);
    dims = wrong;
    create.backing = ATTN_SWAP_FILE;
    create.path = path;
    expect_no_swap(ATTN_ERROR_INVALID, part);
    dims = wrong;
    expect_no_swap(ATTN_ERROR_INVALID, part);
}

#define BAD_DIMS(field, value, part) \
    do { \
        dims.field = value; \
        expect_bad_dims(part); \
    } while (0)

#define BAD_CREATE(field, value, part) \
    do { \
        create.field = value; \
        expect_no_swap(ATTN_ERROR_INVALID, part); \
    } while (0)

#define BAD_WRITE(field, value, part) \
    do { \
        write_params.field = value; \
        expect_status(attn_swap_write(swap, &write_params), ATTN_ERROR_INVALID, part); \
    } while (0)

#define BAD_DECODE(field, value, part) \
    do { \
        decode.field = value; \
        expect_status(attn_swap_decode(swap, &decode, NULL), ATTN_ERROR_INVALID, part); \
    } while (0)

// What is broken below is right before.
Test(swap_args, takes_what_is_right)
{
    cr_expect_eq(attn_swap_validate(&dims), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_swap_write(swap, &write_params), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_swap_decode(swap, &decode, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_str_eq(attn_last_error(), "");
    attn_swap_destroy(NULL);
    attn_swap_destroy(&(struct attn_swap *){ NULL });
}

Test(swap_args, checks_dims)
{
    expect_status(attn_swap_validate(NULL), ATTN_ERROR_INVALID, "dims is NULL");
    BAD_DIMS(size, 3, "dims->size is 3");
    BAD_DIMS(dtype, ATTN_DTYPE_E4M3, "dtype is 3 (e4m3): it has to be bf16 or fp16");
    BAD_DIMS(num_layers, 0, "num_layers is 0: it has to be at least 1");
    BAD_DIMS(num_layers, -1, "num_layers is -1");
    BAD_DIMS(num_blocks, 0, "num_blocks is 0: it has to be at least 1");
    BAD_DIMS(num_blocks, (1 << 30) + 1, "num_layers is 2, num_blocks 1073741825: their product");
    BAD_DIMS(max_seqs, 0, "max_seqs is 0: it has to be at least 1");
    BAD_DIMS(num_q_heads, 0, "num_q_heads is 0");
    BAD_DIMS(num_q_heads, 5, "num_q_heads is 5, num_kv_heads 2: the first has to be a multiple");
    BAD_DIMS(num_kv_heads, 0, "num_kv_heads is 0");
    BAD_DIMS(head_dim, 257, "head_dim is 257: it has to be in 1..256");
    BAD_DIMS(block_size, 0, "block_size is 0");
    BAD_DIMS(resident_blocks, 0, "resident_blocks is 0: it has to be at least 1");
    BAD_DIMS(resident_blocks, 5,
             "resident_blocks is 5: 2 tiles of 3 blocks (num_planes, tile_blocks) need 6 slots");
    BAD_DIMS(tile_blocks, -1, "tile_blocks is -1: it has to be 0 or positive");
    BAD_DIMS(tile_blocks, INT32_MAX, "2 tiles of 2147483647 blocks");
    BAD_DIMS(num_planes, 1, "num_planes is 1: it has to be 0 or in 2..16");
    BAD_DIMS(num_planes, 17, "num_planes is 17");
    dims.tile_blocks = dims.num_planes = 0;
    BAD_DIMS(resident_blocks, 1, "resident_blocks is 1: 2 tiles of 1 blocks");
}

Test(swap_args, checks_products)
{
    dims.block_size = INT32_MAX;
    dims.num_q_heads = dims.num_kv_heads = 1 << 19;
    expect_bad_dims("a block has");
    dims.block_size = INT32_MAX;
    dims.num_q_heads = dims.num_kv_heads = INT32_MAX;
    expect_bad_dims("a block would have more than 2^63 - 1 bytes");
}

Test(swap_args, serves_what_tiled_decode_serves)
{
    dims.head_dim = 96;
    create.backing = ATTN_SWAP_FILE;
    create.path = path;
    expect_no_swap(ATTN_ERROR_UNSUPPORTED, "serves 64, 128 and 256");
}

Test(swap_args, checks_what_a_cache_is_made_of)
{
    struct attn_swap *made = swap;
    expect_status(attn_swap_create(NULL, c.host, &create), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_create(&made, NULL, &create), ATTN_ERROR_INVALID, "device is NULL");
    cr_expect_null(made);
    expect_status(attn_swap_create(&made, c.host, NULL), ATTN_ERROR_INVALID, "params is NULL");
    BAD_CREATE(size, 2, "params->size is 2");
    BAD_CREATE(dims, NULL, "dims is NULL");
    BAD_CREATE(backing, (enum attn_swap_backing) 0, "backing is 0: it has to be ATTN_SWAP_HOST");
    BAD_CREATE(backing, (enum attn_swap_backing) 3, "backing is 3");
    BAD_CREATE(path, path, "path is given, and backing is ATTN_SWAP_HOST");
    BAD_CREATE(staging_bytes, 8192, "staging_bytes is 8192: with ATTN_SWAP_HOST it has to be 0");
    BAD_CREATE(pool, memory.k + 1, "pool is 0x");
    BAD_CREATE(trace_tiles, -1, "trace_tiles is -1: it has to be in 0..65536");
    BAD_CREATE(trace_tiles, 65537, "trace_tiles is 65537");
    BAD_CREATE(open, (enum attn_swap_open) 3, "open is 3: it has to be in 0..2");
    BAD_CREATE(reader, (enum attn_swap_reader) - 1, "reader is -1: it has to be in 0..2");
    BAD_CREATE(backing, ATTN_SWAP_FILE, "path is missing: ATTN_SWAP_FILE needs the name");
    static const int64_t bad[] = { -4096, 4096, 10000, (INT64_C(1) << 30) + 4096 };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        create.path = path;
        create.staging_bytes = bad[i];
        BAD_CREATE(backing, ATTN_SWAP_FILE, "it has to be 0, or a multiple of 4096 in 8192..");
    }
    create.path = path;
    create.pool = memory.k;
    BAD_CREATE(backing, ATTN_SWAP_FILE, "pool is given, and backing is ATTN_SWAP_FILE");
    create.path = "";
    BAD_CREATE(backing, ATTN_SWAP_FILE, "path is missing");
}

Test(swap_args, names_what_is_no_file)
{
    create.backing = ATTN_SWAP_FILE;
    create.path = ".";
    expect_no_swap(ATTN_ERROR_INVALID, "is a folder: path names a file");
    create.backing = ATTN_SWAP_FILE;
    create.path = "/dev/null";
    expect_no_swap(ATTN_ERROR_INVALID, "/dev/null is not a file but a device or a pipe");
    create.backing = ATTN_SWAP_FILE;
    create.path = "/nowhere/at/all";
    expect_no_swap(ATTN_ERROR_IO, "/nowhere/at/all cannot be opened: No such file or directory");
    create.backing = ATTN_SWAP_FILE;
    create.path = path;
    create.open = ATTN_SWAP_OPEN;
    expect_no_swap(ATTN_ERROR_IO, "No such file or directory (errno 2)");
}

Test(swap_args, sizes_without_a_path)
{
    struct attn_swap_info info;
    memset(&info, 0xEE, sizeof(info));
    info.size = offsetof(struct attn_swap_info, pool_bytes);
    create.backing = ATTN_SWAP_FILE;
    cr_expect_eq(attn_swap_sizes(&create, &info), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(info.stripe_bytes, 4096);
    cr_expect_eq(info.block_bytes, 4 * 4096);
    cr_expect_eq(info.pool_bytes, (int64_t) 0xEEEEEEEEEEEEEEEE);
    info.size = 3;
    expect_status(attn_swap_sizes(&create, &info), ATTN_ERROR_INVALID, "info->size is 3");
    expect_status(attn_swap_sizes(&create, NULL), ATTN_ERROR_INVALID, "info is NULL");
    expect_status(attn_swap_sizes(NULL, &info), ATTN_ERROR_INVALID, "params is NULL");
}

Test(swap_args, needs_a_gpu_that_is_there)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device;
    struct attn_swap *made;
    open.kind = ATTN_DEVICE_TARGET;
    open.target = "hopper";
    open.pack_dir = pack_folder_make_with("hopper");
    cr_assert_not_null(open.pack_dir);
    cr_assert_eq(attn_device_open(&device, &open), ATTN_OK, "%s", attn_last_error());
    expect_status(attn_swap_create(&made, device, &create), ATTN_ERROR_NO_DEVICE,
                  "hopper is a target without a GPU (ATTN_DEVICE_TARGET)");
    attn_device_close(&device);
    pack_folder_remove();
}

Test(swap_args, fills_what_there_is_room_for)
{
    struct attn_swap_stats stats = { .size = sizeof(stats) };
    struct attn_swap_info info = { .size = sizeof(info) };
    expect_status(attn_swap_get_stats(NULL, &stats), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_get_stats(swap, NULL), ATTN_ERROR_INVALID, "stats is NULL");
    expect_status(attn_swap_describe(NULL, &info), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_describe(swap, NULL), ATTN_ERROR_INVALID, "info is NULL");
    stats.size = info.size = 0;
    expect_status(attn_swap_get_stats(swap, &stats), ATTN_ERROR_INVALID, "stats->size is 0");
    expect_status(attn_swap_describe(swap, &info), ATTN_ERROR_INVALID, "info->size is 0");
    memset(&stats, 0xEE, sizeof(stats));
    stats.size = offsetof(struct attn_swap_stats, misses);
    cr_expect_eq(attn_swap_get_stats(swap, &stats), ATTN_OK);
    cr_expect_eq(stats.resident, 0);
    cr_expect_eq(stats.misses, 0xEEEEEEEEEEEEEEEE);
    info.size = sizeof(info);
    cr_expect_eq(attn_swap_describe(swap, &info), ATTN_OK);
    cr_expect_str_eq(info.backend, "host memory");
    cr_expect_eq(info.direct, 0);
    const char *const reader = attn_swap_file_backend();
    cr_expect(!strcmp(reader, "io_uring") || !strcmp(reader, "threads"), "%s", reader);
}

Test(swap_args, checks_writes)
{
    expect_status(attn_swap_write(NULL, &write_params), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_write(swap, NULL), ATTN_ERROR_INVALID, "params is NULL");
    BAD_WRITE(size, 1, "params->size is 1");
    BAD_WRITE(layer, 2, "layer is 2: it has to be in 0..1");
    BAD_WRITE(layer, -1, "layer is -1");
    BAD_WRITE(block, 23, "block is 23: it has to be in 0..22");
    BAD_WRITE(block, -1, "block is -1");
    BAD_WRITE(first_token, -1, "first_token is -1: it has to be in 0..4");
    BAD_WRITE(first_token, 5, "first_token is 5");
    BAD_WRITE(num_tokens, 0, "num_tokens is 0: it has to be in 1..5");
    BAD_WRITE(num_tokens, 6, "num_tokens is 6: it has to be in 1..5, as first_token is 0");
    write_params.first_token = 2;
    BAD_WRITE(num_tokens, 4, "num_tokens is 4: it has to be in 1..3");
    write_params.block = 6;
    BAD_WRITE(first_token, 3, "block 6 of layer 0 holds 2 tokens, and there may be no gap");
    write_params.layer = 1;
    BAD_WRITE(first_token, 1, "block 0 of layer 1 holds 0 tokens");
    BAD_WRITE(k, NULL, "k is NULL");
    BAD_WRITE(v, NULL, "v is NULL");
    BAD_WRITE(k, (const void *) ((char *) memory.k + 1), "k is 0x");
    BAD_WRITE(v, (const void *) ((char *) memory.v + 1), "aligned to 2 bytes");
    BAD_WRITE(token_stride, 64, "head_stride is 0: it has to be at least head_dim, 64");
    write_params.token_stride = 63;
    BAD_WRITE(head_stride, 64, "token_stride is 63");
    write_params.token_stride = 64;
    BAD_WRITE(head_stride, INT64_MAX, "k would reach over more than");
    // Nothing of that was written.
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 6);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(attn_swap_tokens(swap, 0, 6), 2);
    cr_expect_eq(attn_swap_tokens(swap, 1, 0), 0);
    swap_batch_free(&batch);
}

Test(swap_args, takes_rows_of_any_stride)
{
    // Heads apart, tokens side by side.
    write_params.token_stride = 64;
    write_params.head_stride = 5 * 64;
    for (size_t i = 0; i < 640; i++) memory.k[i] = memory.v[i] = (uint16_t) (i % 64 + i / 64 * 256);
    cr_expect_eq(attn_swap_write(swap, &write_params), ATTN_OK, "%s", attn_last_error());
    memcpy(swap_case_rows(&c, 0, 0, 0, 0, 0), memory.k, 1280);
    memcpy(swap_case_rows(&c, 0, 0, 1, 0, 0), memory.v, 1280);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 2);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

Test(swap_args, checks_what_is_invalidated)
{
    expect_status(attn_swap_invalidate(NULL, 0, 0, 0), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_invalidate(swap, 2, 0, 0), ATTN_ERROR_INVALID, "layer is 2");
    expect_status(attn_swap_invalidate(swap, 0, -1, 0), ATTN_ERROR_INVALID, "block is -1");
    expect_status(attn_swap_invalidate(swap, 0, 6, 3), ATTN_ERROR_INVALID,
                  "num_tokens is 3: block 6 of layer 0 holds 2 tokens, and only attn_swap_write "
                  "adds to them");
    expect_status(attn_swap_invalidate(swap, 0, 6, -1), ATTN_ERROR_INVALID, "num_tokens is -1");
    cr_expect_eq(attn_swap_tokens(swap, 0, 6), 2);
    cr_expect_eq(attn_swap_tokens(NULL, 0, 6), -1);
    cr_expect_str_eq(attn_last_error(), "swap is NULL");
    cr_expect_eq(attn_swap_tokens(swap, 0, 23), -1);
    cr_expect(strstr(attn_last_error(), "block is 23"));
    expect_status(attn_swap_flush(NULL), ATTN_ERROR_INVALID, "swap is NULL");
    cr_expect_eq(attn_swap_flush(swap), ATTN_OK);
}

Test(swap_args, checks_calls)
{
    expect_status(attn_swap_decode(NULL, &decode, NULL), ATTN_ERROR_INVALID, "swap is NULL");
    expect_status(attn_swap_decode(swap, NULL, NULL), ATTN_ERROR_INVALID, "params is NULL");
    BAD_DECODE(size, 3, "params->size is 3");
    BAD_DECODE(layer, 2, "layer is 2: it has to be in 0..1");
    BAD_DECODE(layer, -1, "layer is -1");
    BAD_DECODE(num_seqs, 5, "num_seqs is 5: it has to be in 0..4");
    BAD_DECODE(num_seqs, -1, "num_seqs is -1");
    BAD_DECODE(scale, NAN, "scale is");
    BAD_DECODE(scale, INFINITY, "scale is inf: it has to be finite");
    BAD_DECODE(q, NULL, "q is NULL");
    BAD_DECODE(output, NULL, "output is NULL");
    BAD_DECODE(seq_lens, NULL, "seq_lens is NULL");
    BAD_DECODE(blocks, NULL, "blocks is NULL, and seq_lens[0] is 12");
    BAD_DECODE(q, memory.q + 4, "q is 0x");
    BAD_DECODE(output, memory.output + 4, "aligned to 16 bytes");
    BAD_DECODE(lse, (void *) ((char *) memory.lse + 2), "lse is 0x");
    BAD_DECODE(output, memory.q, "overlaps");
    BAD_DECODE(lse, (float *) memory.output, "overlaps");
    BAD_DECODE(blocks_stride, -1, "blocks_stride is -1");
    BAD_DECODE(blocks_stride, 2, "seq_lens[0] is 12, which takes 3 blocks: blocks_stride is 2");
    memory.lens[1] = -1;
    BAD_DECODE(layer, 0, "seq_lens[1] is -1: it has to be 0 or positive");
    memory.blocks[3] = 23;
    BAD_DECODE(layer, 0, "blocks[1][0] is 23: it has to be in 0..22");
    memory.blocks[2] = -1;
    BAD_DECODE(layer, 0, "blocks[0][2] is -1");
    memory.blocks[3] = 6;
    BAD_DECODE(layer, 0,
               "blocks[1][0] is 6, of which 5 tokens are to be attended: in layer 0 it holds 2");
    BAD_DECODE(layer, 1, "in layer 1 it holds 0");
    memory.lens[0] = INT32_MAX;
    memory.blocks[5] = -1;
    BAD_DECODE(blocks_stride, INT64_MAX / 8, "blocks[0][");
    // What is behind a list is not looked at.
    memory.blocks[4] = -77;
    cr_expect_eq(attn_swap_decode(swap, &decode, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(swap_stats(swap).calls, 1);
}

// A newer program that asks for what this version does not know; an older one that lacks fields.
Test(swap_args, takes_older_structs_and_refuses_newer_ones)
{
    struct {
        struct attn_swap_decode_params known;
        int64_t newer;
    } newer = { decode, 1 };
    newer.known.size = sizeof(newer);
    expect_status(attn_swap_decode(swap, &newer.known, NULL), ATTN_ERROR_INVALID,
                  "params has a nonzero byte at offset");
    newer.known = decode;
    newer.known.size = sizeof(newer);
    newer.newer = 0;
    cr_expect_eq(attn_swap_decode(swap, &newer.known, NULL), ATTN_OK, "%s", attn_last_error());
    // Without strides.
    write_params.size = offsetof(struct attn_swap_write_params, token_stride);
    write_params.token_stride = write_params.head_stride = -1;
    cr_expect_eq(attn_swap_write(swap, &write_params), ATTN_OK, "%s", attn_last_error());
    struct attn_swap *made;
    create.size = offsetof(struct attn_swap_create_params, pool);
    create.pool = memory.k + 1;
    cr_expect_eq(attn_swap_create(&made, c.host, &create), ATTN_OK, "%s", attn_last_error());
    attn_swap_destroy(&made);
    reset();
    dims.size = offsetof(struct attn_swap_dims, tile_blocks);
    dims.tile_blocks = dims.num_planes = -1;
    cr_expect_eq(attn_swap_create(&made, c.host, &create), ATTN_OK, "%s", attn_last_error());
    attn_swap_destroy(&made);
}

// ---- sizes of older structs: fields that they lack count as 0

enum struct_kind {
    DIMS,
    CREATE,
    WRITE,
    DECODE,
    NUM_STRUCTS,
};

#define AT(type, field) EXTENT(struct attn_swap_##type, field)

// Where the fields begin, and the end.
static const struct extent fields[NUM_STRUCTS][16] = {
    { AT(dims, size),
      AT(dims, dtype),
      AT(dims, num_layers),
      AT(dims, num_blocks),
      AT(dims, max_seqs),
      AT(dims, num_q_heads),
      AT(dims, num_kv_heads),
      AT(dims, head_dim),
      AT(dims, block_size),
      AT(dims, resident_blocks),
      AT(dims, tile_blocks),
      AT(dims, num_planes),
      { sizeof(struct attn_swap_dims), 0 } },
    { AT(create_params, size),
      AT(create_params, backing),
      AT(create_params, dims),
      AT(create_params, pool),
      AT(create_params, path),
      AT(create_params, open),
      AT(create_params, reader),
      AT(create_params, staging_bytes),
      AT(create_params, trace_tiles),
      { sizeof(struct attn_swap_create_params), 0 } },
    { AT(write_params, size),
      AT(write_params, layer),
      AT(write_params, block),
      AT(write_params, first_token),
      AT(write_params, num_tokens),
      AT(write_params, k),
      AT(write_params, v),
      AT(write_params, token_stride),
      AT(write_params, head_stride),
      { sizeof(struct attn_swap_write_params), 0 } },
    { AT(decode_params, size),
      AT(decode_params, layer),
      AT(decode_params, num_seqs),
      AT(decode_params, scale),
      AT(decode_params, q),
      AT(decode_params, output),
      AT(decode_params, lse),
      AT(decode_params, seq_lens),
      AT(decode_params, blocks),
      AT(decode_params, blocks_stride),
      { sizeof(struct attn_swap_decode_params), 0 } },
};

static enum attn_status call(const int kind)
{
    struct attn_swap *made = NULL;
    switch (kind) {
    case DIMS: return attn_swap_validate(&dims);
    case WRITE: return attn_swap_write(swap, &write_params);
    case DECODE: return attn_swap_decode(swap, &decode, NULL);
    default: break;
    }
    const enum attn_status status = attn_swap_create(&made, c.host, &create);
    attn_swap_destroy(&made);
    return status;
}

static void expect_older(const enum struct_kind kind, const int expected)
{
    static const struct older_calls calls = { reset, call, &memory, sizeof(memory) };
    void *const structs[] = { &dims, &create, &write_params, &decode };
    older_structs_expect(&calls, kind, structs[kind], fields[kind], expected);
}

Test(swap_args, takes_structs_of_every_older_size)
{
    // From resident_blocks on.
    expect_older(DIMS, 3);
    // From dims on: allocated here, with defaults.
    expect_older(CREATE, 7);
    // Without strides, and whole.
    expect_older(WRITE, 3);
    // Without layer and sequences, without sequences, and whole.
    expect_older(DECODE, 3);
}

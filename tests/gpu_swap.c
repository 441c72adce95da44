/* SPDX-License-Identifier: Apache-2.0 */
// The swap engine on a GPU: the bits of tiled decode over a pool that has all blocks, from host
// memory and from a file, under eviction, with several calls in flight on several streams; nothing
// moved for what is resident; and copies at the rate of the link, computing beside them.
#include "support/swap_case.h"
#include "tests/support/decode_gpu.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    CALLS = 6,
};

static struct gpu_session session;
static struct swap_case c;
static struct attn_swap *swap;
static char path[SWAP_PATH_SIZE];

static void set_up(void)
{
    swap_path_make(path);
    gpu_session_open(&session, 0);
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    gpu_session_close(&session);
    swap_path_remove(path);
}

TestSuite(gpu_swap, .init = set_up, .fini = tear_down);

static void *need_memory(const size_t bytes)
{
    void *memory;
    cr_assert_eq(gpu_alloc(session.gpu, &memory, bytes), 0, "%zu bytes", bytes);
    return memory;
}

static void *need_copy(const void *const from, const size_t bytes)
{
    void *const memory = need_memory(bytes);
    cr_assert_eq(gpu_upload(session.gpu, memory, from, bytes), 0);
    return memory;
}

// ---- tiled decode over all blocks

static struct attn_tiled *make_state(const struct swap_batch *const batch)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled *tiled;
    dims.dtype = c.dims.dtype;
    dims.max_seqs = batch->num_seqs;
    dims.num_q_heads = c.dims.num_q_heads;
    dims.num_kv_heads = c.dims.num_kv_heads;
    dims.head_dim = c.dims.head_dim;
    dims.block_size = c.dims.block_size;
    dims.tile_capacity = batch->stride;
    create.dims = &dims;
    cr_assert_eq(attn_tiled_create(&tiled, session.device, &create), ATTN_OK, "%s",
                 attn_last_error());
    return tiled;
}

static void fetch(const struct swap_result *const result, void *const output, void *const lse)
{
    cr_assert_eq(gpu_download(session.gpu, result->output, output, result->elements * 2), 0);
    cr_assert_eq(gpu_download(session.gpu, result->lse, lse, result->rows * sizeof(float)), 0);
    gpu_free(session.gpu, output);
    gpu_free(session.gpu, lse);
}

static struct swap_result expect_bits(const struct swap_batch *const batch)
{
    struct swap_result result = swap_result_make(&c, batch->num_seqs);
    struct attn_tiled *tiled = make_state(batch);
    struct attn_tiled_dims dims = { .size = sizeof(dims) };
    struct attn_tiled_step_params step = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    const int32_t seqs = batch->num_seqs, size = c.dims.block_size;
    int32_t *const counts = malloc((size_t) seqs * 2 * sizeof(int32_t)), *const valid =
                                                                             counts + seqs;
    for (int32_t s = 0; s < seqs; s++) {
        counts[s] = batch->lens[s] / size + (batch->lens[s] % size > 0);
        valid[s] = batch->lens[s] % size ? batch->lens[s] % size : size;
    }
    attn_tiled_get_dims(tiled, &dims);
    const struct attn_tiled_strides strides = attn_tiled_scratch_pool_strides(&dims);
    uint16_t *const pool =
        need_copy(swap_case_rows(&c, batch->layer, 0, 0, 0, 0),
                  (size_t) c.dims.num_blocks * (size_t) swap_case_elements(&c) * 2);
    void *const q = need_copy(batch->q, result.elements * 2);
    int32_t *const lists =
        need_copy(batch->blocks, (size_t) seqs * (size_t) batch->stride * sizeof(int32_t));
    int32_t *const device_counts = need_copy(counts, (size_t) seqs * 2 * sizeof(int32_t));
    step.num_seqs = last.num_seqs = seqs;
    step.q = q;
    step.k_pool = pool;
    step.v_pool = pool + strides.v_offset;
    step.block_stride = strides.block;
    step.token_stride = strides.token;
    step.head_stride = strides.head;
    step.num_pool_blocks = c.dims.num_blocks;
    step.tile_blocks = lists;
    step.tile_block_counts = device_counts;
    step.valid_slots = device_counts + seqs;
    last.output = need_memory(result.elements * 2);
    last.lse = need_memory(result.rows * sizeof(float));
    cr_assert_eq(attn_tiled_begin_step(tiled, seqs, session.stream), ATTN_OK);
    cr_assert_eq(attn_tiled_step_tile(tiled, &step, session.stream), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(attn_tiled_finalize(tiled, &last, session.stream), ATTN_OK);
    cr_assert_eq(gpu_stream_sync(session.gpu, session.stream), 0);
    fetch(&result, last.output, last.lse);
    attn_tiled_destroy(&tiled);
    gpu_free(session.gpu, pool);
    gpu_free(session.gpu, q);
    gpu_free(session.gpu, lists);
    gpu_free(session.gpu, device_counts);
    free(counts);
    return result;
}

// ---- calls in flight

struct pending {
    struct swap_batch batch;
    struct swap_result expected;
    void *q, *output, *lse;
};

static void start(struct pending *const pending, const struct swap_batch batch)
{
    struct attn_swap_decode_params params = swap_batch_params(&batch);
    pending->batch = batch;
    pending->expected = expect_bits(&batch);
    pending->q = need_copy(batch.q, pending->expected.elements * 2);
    pending->output = need_memory(pending->expected.elements * 2);
    pending->lse = need_memory(pending->expected.rows * sizeof(float));
    params.q = pending->q;
    params.output = pending->output;
    params.lse = pending->lse;
    const attn_stream stream = random_below(&c.random, 2) ? session.stream : NULL;
    cr_assert_eq(attn_swap_decode(swap, &params, stream), ATTN_OK, "%s", attn_last_error());
}

static bool finish(struct pending *const pending)
{
    struct swap_result result = swap_result_make(&c, pending->batch.num_seqs);
    cr_assert_eq(gpu_sync(session.gpu), 0);
    fetch(&result, pending->output, pending->lse);
    const bool same = swap_result_same(&result, &pending->expected);
    gpu_free(session.gpu, pending->q);
    swap_result_free(&result);
    swap_result_free(&pending->expected);
    swap_batch_free(&pending->batch);
    return same;
}

static bool agrees(const struct swap_batch batch)
{
    struct pending pending;
    start(&pending, batch);
    return finish(&pending);
}

static void open_swap(const struct attn_swap_dims *const dims, const enum attn_swap_backing backing,
                      const uint64_t seed)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    unlink(path);
    swap_case_init(&c, dims, seed);
    params.backing = backing;
    params.dims = &c.dims;
    if (backing == ATTN_SWAP_FILE) params.path = path;
    cr_assert_eq(attn_swap_create(&swap, session.device, &params), ATTN_OK, "%s",
                 attn_last_error());
    swap_case_write_all(&c, swap);
}

static void expect_calls(const struct attn_swap_dims *const dims,
                         const enum attn_swap_backing backing, const uint64_t seed)
{
    open_swap(dims, backing, seed);
    for (int round = 0; round < 4; round++) {
        struct pending pending[CALLS];
        for (int i = 0; i < CALLS; i++) {
            const int32_t layer = (int32_t) random_below(&c.random, (uint32_t) dims->num_layers);
            const int32_t seqs = 1 + (int32_t) random_below(&c.random, (uint32_t) dims->max_seqs);
            start(&pending[i], swap_batch_draw(&c, layer, seqs, 40 * dims->block_size));
            const int32_t block = (int32_t) random_below(&c.random, (uint32_t) dims->num_blocks);
            swap_case_write(&c, swap, layer, block, 0, dims->block_size);
        }
        for (int i = 0; i < CALLS; i++)
            cr_assert(finish(&pending[i]), "seed %d, round %d, call %d", (int) seed, round, i);
    }
    cr_expect_gt(swap_stats(swap).evictions, 0);
}

static struct attn_swap_dims dims_of(const enum attn_dtype dtype, const int32_t head_dim)
{
    struct attn_swap_dims dims = ATTN_SWAP_DIMS_INIT;
    dims.dtype = dtype;
    dims.num_layers = 2;
    dims.num_blocks = 300;
    dims.max_seqs = 6;
    dims.num_q_heads = head_dim == 256 ? 24 : 32;
    dims.num_kv_heads = head_dim == 256 ? 4 : 8;
    dims.head_dim = head_dim;
    dims.block_size = 16;
    dims.resident_blocks = 100;
    dims.tile_blocks = 32;
    dims.num_planes = 3;
    return dims;
}

Test(gpu_swap, gives_the_bits_of_tiled_decode)
{
    static const int32_t head_dims[] = { 64, 128, 256 };
    uint64_t seed = 1;
    for (int dtype = ATTN_DTYPE_BF16; dtype <= ATTN_DTYPE_FP16; dtype++)
        for (size_t i = 0; i < 3; i++)
            for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
                const struct attn_swap_dims dims = dims_of((enum attn_dtype) dtype, head_dims[i]);
                expect_calls(&dims, (enum attn_swap_backing) backing, seed++);
            }
}

// Padded stripes, blocks of a few tokens, one block a tile.
Test(gpu_swap, takes_blocks_of_any_size)
{
    struct attn_swap_dims dims = dims_of(ATTN_DTYPE_BF16, 64);
    dims.block_size = 5;
    dims.num_planes = 2;
    expect_calls(&dims, ATTN_SWAP_FILE, 20);
    dims.tile_blocks = 1;
    dims.resident_blocks = 2;
    expect_calls(&dims, ATTN_SWAP_HOST, 21);
    dims.block_size = 600;
    dims.num_blocks = 50;
    dims.resident_blocks = 9;
    dims.tile_blocks = 4;
    expect_calls(&dims, ATTN_SWAP_HOST, 22);
}

Test(gpu_swap, moves_nothing_that_is_resident)
{
    struct attn_swap_dims dims = dims_of(ATTN_DTYPE_BF16, 128);
    dims.resident_blocks = 600;
    open_swap(&dims, ATTN_SWAP_HOST, 30);
    cr_expect(agrees(swap_batch_range(&c, 0, 0, 300)));
    cr_expect(agrees(swap_batch_range(&c, 1, 0, 300)));
    const uint64_t bytes = swap_stats(swap).bytes_copied;
    cr_expect_eq(bytes, (uint64_t) 600 * 65536);
    for (int i = 0; i < 3; i++) cr_expect(agrees(swap_batch_range(&c, i % 2, 0, 300)));
    cr_expect_eq(swap_stats(swap).bytes_copied, bytes);
}

Test(gpu_swap, lets_blocks_grow)
{
    const struct attn_swap_dims dims = dims_of(ATTN_DTYPE_BF16, 128);
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        open_swap(&dims, (enum attn_swap_backing) backing, 31);
        for (int32_t t = 0; t < 48; t++) {
            struct swap_batch batch = swap_batch_range(&c, 1, 50, 3);
            swap_case_write(&c, swap, 1, 50 + t / 16, t % 16, 1);
            batch.lens[0] = t + 1;
            cr_expect(agrees(batch), "%d tokens", t + 1);
        }
    }
}

// ---- the link

static double read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec + 1e-9 * (double) now.tv_nsec;
}

// Seconds of copying this much from `from`, pinned, and nothing else.
static double time_copies(const unsigned char *const from, const size_t bytes)
{
    const size_t part = (size_t) 256 << 20;
    void *const to = need_memory(part);
    double best = 0;
    for (int i = 0; i < 3; i++) {
        const double start = read_clock();
        for (size_t at = 0; at < bytes; at += part)
            cr_assert_eq(gpu_upload(session.gpu, to, from + at, part), 0);
        const double seconds = read_clock() - start;
        if (i == 0 || seconds < best) best = seconds;
    }
    gpu_free(session.gpu, to);
    return best;
}

// 4 GiB through 1 GiB. Were copies and tiles done in turn, it would take the time of both.
Test(gpu_swap, computes_while_it_copies)
{
    struct attn_swap_dims dims = dims_of(ATTN_DTYPE_BF16, 128);
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    dims.num_layers = 1;
    dims.num_blocks = 65536;
    dims.resident_blocks = 16384;
    dims.tile_blocks = dims.num_planes = 0;
    params.dims = &dims;
    const size_t bytes = (size_t) 65536 * 65536;
    unsigned char *const pool =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(pool, MAP_FAILED);
    memset(pool, 0, bytes);
    params.pool = pool;
    cr_assert_eq(attn_swap_create(&swap, session.device, &params), ATTN_OK, "%s",
                 attn_last_error());
    for (int32_t i = 0; i < 65536; i++) cr_assert_eq(attn_swap_invalidate(swap, 0, i, 16), ATTN_OK);
    // Four sequences of 16384 blocks.
    int32_t *const blocks = malloc(65536 * sizeof(int32_t));
    const int32_t lens[] = { 262144, 262144, 262144, 262144 };
    for (int32_t i = 0; i < 65536; i++) blocks[i] = i;
    const size_t elements = (size_t) 4 * 32 * 128;
    uint16_t *const zeros = calloc(elements, 2);
    struct attn_swap_decode_params decode = ATTN_SWAP_DECODE_PARAMS_INIT;
    decode.num_seqs = 4;
    decode.q = need_copy(zeros, elements * 2);
    decode.output = need_memory(elements * 2);
    decode.seq_lens = lens;
    decode.blocks = blocks;
    decode.blocks_stride = 16384;
    double best = 0;
    uint64_t copied = 0;
    for (int i = 0; i < 4; i++) {
        copied = swap_stats(swap).bytes_copied;
        const double start = read_clock();
        cr_assert_eq(attn_swap_decode(swap, &decode, session.stream), ATTN_OK, "%s",
                     attn_last_error());
        cr_assert_eq(gpu_stream_sync(session.gpu, session.stream), 0);
        const double seconds = read_clock() - start;
        copied = swap_stats(swap).bytes_copied - copied;
        // The first one copies everything; the others what the slots do not keep.
        if (i > 0 && (best == 0 || seconds < best)) best = seconds;
    }
    const double alone = time_copies(pool, bytes) / (double) bytes * (double) copied;
    printf("%.2f GB/s, copies alone %.2f GB/s\n", 1e-9 * (double) copied / best,
           1e-9 * (double) copied / alone);
    cr_expect_leq(best, alone / 0.9, "%.1f ms, copies alone %.1f ms", 1e3 * best, 1e3 * alone);
    cr_expect_leq(copied, (uint64_t) bytes / 4 * 3 + ((uint64_t) 256 << 20));
    gpu_free(session.gpu, (void *) (uintptr_t) decode.q);
    gpu_free(session.gpu, decode.output);
    attn_swap_destroy(&swap);
    munmap(pool, bytes);
    free(blocks);
    free(zeros);
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

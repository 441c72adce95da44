/* SPDX-License-Identifier: Apache-2.0 */
// The swap engine on the host executor, from host memory and from a file: the bits of tiled decode
// over a plain copy of all blocks, under eviction, with blocks that are listed twice, shared,
// rewritten and grown; and what statistics say was moved.
#include "attn/attn.h"
#include "support/swap_case.h"

#include <criterion/criterion.h>
#include <malloc.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct swap_case c;
static struct attn_swap *swap;
static char path[SWAP_PATH_SIZE];

static void set_up(void)
{
    swap_path_make(path);
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    swap_path_remove(path);
}

TestSuite(swap, .init = set_up, .fini = tear_down);

static struct attn_swap_create_params params_of(const enum attn_swap_backing backing)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    params.backing = backing;
    params.dims = &c.dims;
    if (backing == ATTN_SWAP_FILE) params.path = path;
    // Two buffers of two stripes: every block takes several reads.
    if (backing == ATTN_SWAP_FILE) params.staging_bytes = 16384;
    return params;
}

static void open_swap(const enum attn_swap_backing backing)
{
    const struct attn_swap_create_params params = params_of(backing);
    cr_assert_eq(attn_swap_create(&swap, c.host, &params), ATTN_OK, "%s", attn_last_error());
}

static void reopen(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    unlink(path);
}

// ---- the bits of the whole list

static void expect_random_calls(const struct attn_swap_dims *const dims,
                                const enum attn_swap_backing backing, const uint64_t seed,
                                const int calls)
{
    swap_case_init(&c, dims, seed);
    open_swap(backing);
    swap_case_write_all(&c, swap);
    for (int i = 0; i < calls; i++) {
        const int32_t layer = (int32_t) random_below(&c.random, (uint32_t) dims->num_layers);
        const int32_t seqs = 1 + (int32_t) random_below(&c.random, (uint32_t) dims->max_seqs);
        struct swap_batch batch = swap_batch_draw(&c, layer, seqs, 60);
        cr_assert(swap_case_agrees(&c, swap, &batch), "seed %llu, call %d",
                  (unsigned long long) seed, i);
        swap_batch_free(&batch);
        const int32_t block = (int32_t) random_below(&c.random, (uint32_t) dims->num_blocks);
        swap_case_write(&c, swap, layer, block, 0, dims->block_size);
    }
    const struct attn_swap_stats stats = swap_stats(swap);
    cr_expect(stats.resident <= dims->resident_blocks);
    cr_expect_eq(stats.calls, (uint64_t) calls);
    reopen();
}

static void expect_dims(const enum attn_swap_backing backing)
{
    struct attn_swap_dims dims = swap_dims_make();
    expect_random_calls(&dims, backing, 1, 60);
    // One block a tile, no slot more than needed.
    dims.tile_blocks = 1;
    dims.resident_blocks = 2;
    expect_random_calls(&dims, backing, 2, 30);
    dims.num_planes = 5;
    dims.resident_blocks = 6;
    expect_random_calls(&dims, backing, 3, 30);
    // All of it resident, and what defaults make of it.
    dims.num_planes = dims.tile_blocks = 0;
    dims.resident_blocks = 46;
    expect_random_calls(&dims, backing, 4, 30);
    dims.dtype = ATTN_DTYPE_FP16;
    dims.head_dim = 128;
    dims.num_q_heads = 9;
    dims.num_kv_heads = 3;
    dims.block_size = 16;
    dims.resident_blocks = 13;
    expect_random_calls(&dims, backing, 5, 20);
    dims.head_dim = 256;
    dims.block_size = 1;
    dims.num_blocks = 200;
    dims.num_layers = 1;
    expect_random_calls(&dims, backing, 6, 20);
}

Test(swap, gives_the_bits_of_the_whole_list)
{
    expect_dims(ATTN_SWAP_HOST);
}

Test(swap, gives_the_same_bits_from_a_file)
{
    expect_dims(ATTN_SWAP_FILE);
}

Test(swap, takes_the_scale)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 7);
    open_swap(ATTN_SWAP_HOST);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 9);
    struct swap_result results[3];
    struct attn_swap_decode_params params = swap_batch_params(&batch);
    const float scales[] = { 0, 0.125f, 0.5f };
    for (int i = 0; i < 3; i++) {
        results[i] = swap_result_make(&c, 1);
        params.scale = scales[i];
        params.output = results[i].output;
        params.lse = results[i].lse;
        cr_assert_eq(attn_swap_decode(swap, &params, NULL), ATTN_OK, "%s", attn_last_error());
    }
    cr_expect(swap_result_same(&results[0], &results[1]));
    cr_expect_not(swap_result_same(&results[0], &results[2]));
    for (int i = 0; i < 3; i++) swap_result_free(&results[i]);
    swap_batch_free(&batch);
}

Test(swap, gives_zeros_without_keys)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 8);
    open_swap(ATTN_SWAP_HOST);
    struct swap_batch batch = swap_batch_draw(&c, 0, 3, 5);
    memset(batch.lens, 0, 3 * sizeof(*batch.lens));
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).tiles, 0);
    // Without lists, too, and without sequences nothing is looked at.
    struct attn_swap_decode_params params = swap_batch_params(&batch);
    struct swap_result result = swap_result_make(&c, 3);
    params.blocks = NULL;
    params.blocks_stride = 0;
    params.output = result.output;
    cr_expect_eq(attn_swap_decode(swap, &params, NULL), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(result.output[0], 0);
    params.num_seqs = 0;
    params.q = params.output = (void *) 3;
    params.seq_lens = NULL;
    cr_expect_eq(attn_swap_decode(swap, &params, NULL), ATTN_OK, "%s", attn_last_error());
    swap_result_free(&result);
    swap_batch_free(&batch);
}

// ---- blocks that change

Test(swap, never_uses_what_was_written_over)
{
    const struct attn_swap_dims dims = swap_dims_make();
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        swap_case_init(&c, &dims, 9);
        open_swap((enum attn_swap_backing) backing);
        swap_case_write_all(&c, swap);
        struct swap_batch batch = swap_batch_range(&c, 1, 3, 4);
        cr_assert(swap_case_agrees(&c, swap, &batch));
        // The first, the last, the middle of what is resident.
        for (int32_t block = 3; block < 7; block++) {
            swap_case_write(&c, swap, 1, block, 0, dims.block_size);
            cr_assert(swap_case_agrees(&c, swap, &batch), "block %d", block);
            // The same block of another layer is another one.
            swap_case_write(&c, swap, 0, block, 0, dims.block_size);
            cr_assert(swap_case_agrees(&c, swap, &batch), "block %d", block);
        }
        swap_batch_free(&batch);
        if (backing == ATTN_SWAP_HOST) reopen();
    }
}

Test(swap, lets_blocks_grow)
{
    const struct attn_swap_dims dims = swap_dims_make();
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        swap_case_init(&c, &dims, 10);
        open_swap((enum attn_swap_backing) backing);
        struct swap_batch batch = swap_batch_range(&c, 1, 0, 8);
        // Token by token, each attended as soon as it is there.
        for (int32_t t = 0; t < 8 * dims.block_size; t++) {
            swap_case_write(&c, swap, 1, t / dims.block_size, t % dims.block_size, 1);
            batch.lens[0] = t + 1;
            cr_assert(swap_case_agrees(&c, swap, &batch), "%d tokens", t + 1);
        }
        // And back: what was behind is gone.
        swap_case_write(&c, swap, 1, 7, 2, 1);
        batch.lens[0] = 7 * dims.block_size + 3;
        cr_expect(swap_case_agrees(&c, swap, &batch));
        swap_batch_free(&batch);
        if (backing == ATTN_SWAP_HOST) reopen();
    }
}

Test(swap, takes_the_pool_of_the_caller)
{
    struct attn_swap_dims dims = swap_dims_make();
    // A whole number of pages a block, so that all blocks could be anywhere.
    swap_case_init(&c, &dims, 11);
    struct attn_swap_create_params params = params_of(ATTN_SWAP_HOST);
    struct attn_swap_info info = { .size = sizeof(info) };
    cr_assert_eq(attn_swap_sizes(&params, &info), ATTN_OK, "%s", attn_last_error());
    const size_t block = (size_t) swap_case_elements(&c) * 2;
    cr_assert_eq((size_t) info.pool_bytes, block * 46);
    unsigned char *const pool =
        aligned_alloc(4096, ((size_t) info.pool_bytes + 4095) / 4096 * 4096);
    cr_assert_not_null(pool);
    params.pool = pool;
    cr_assert_eq(attn_swap_create(&swap, c.host, &params), ATTN_OK, "%s", attn_last_error());
    struct swap_batch batch = swap_batch_range(&c, 1, 4, 3);
    for (int round = 0; round < 3; round++) {
        for (int32_t i = 4; i < 7; i++) {
            swap_case_draw(&c, 1, i, 0, dims.block_size);
            memcpy(pool + (size_t) (23 + i) * block, swap_case_rows(&c, 1, i, 0, 0, 0), block);
            cr_expect_eq(attn_swap_invalidate(swap, 1, i, dims.block_size), ATTN_OK, "%s",
                         attn_last_error());
        }
        cr_expect(swap_case_agrees(&c, swap, &batch), "round %d", round);
    }
    // Written by the library, too.
    swap_case_write(&c, swap, 1, 5, 0, dims.block_size);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(memcmp(pool + (size_t) 28 * block, swap_case_rows(&c, 1, 5, 0, 0, 0), block), 0);
    cr_expect_eq(attn_swap_invalidate(swap, 1, 4, 6), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "holds 5 tokens, and has room for block_size"), "%s",
              attn_last_error());
    attn_swap_destroy(&swap);
    swap_batch_free(&batch);
    free(pool);
}

Test(swap, drops_what_is_invalidated)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 12);
    open_swap(ATTN_SWAP_HOST);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 3);
    cr_assert(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).resident, 3);
    cr_expect_eq(attn_swap_invalidate(swap, 0, 1, 5), ATTN_OK);
    cr_expect_eq(swap_stats(swap).resident, 2);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).misses, 4);
    cr_expect_eq(attn_swap_invalidate(swap, 0, 2, 2), ATTN_OK);
    cr_expect_eq(attn_swap_tokens(swap, 0, 2), 2);
    batch.lens[0] = 12;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

// ---- what is moved

Test(swap, reads_nothing_twice_that_stays_resident)
{
    const struct attn_swap_dims dims = swap_dims_make();
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        swap_case_init(&c, &dims, 13);
        open_swap((enum attn_swap_backing) backing);
        swap_case_write_all(&c, swap);
        struct attn_swap_info info = { .size = sizeof(info) };
        attn_swap_describe(swap, &info);
        struct swap_batch batch = swap_batch_range(&c, 0, 2, 9);
        for (int i = 0; i < 4; i++) cr_assert(swap_case_agrees(&c, swap, &batch));
        const struct attn_swap_stats stats = swap_stats(swap);
        cr_expect_eq(stats.misses, 9);
        cr_expect_eq(stats.hits, 27);
        cr_expect_eq(stats.evictions, 0);
        cr_expect_eq(stats.resident, 9);
        cr_expect_eq(stats.tiles, 12);
        cr_expect_eq(stats.bytes_copied, (uint64_t) (9 * info.block_bytes));
        cr_expect_eq(stats.bytes_read, backing == ATTN_SWAP_FILE ? stats.bytes_copied : 0);
        swap_batch_free(&batch);
        if (backing == ATTN_SWAP_HOST) reopen();
    }
}

// A list that does not fit, over and over: only what does not fit is read again, and the slots of
// tiles in work.
static void expect_share(const enum attn_swap_backing backing, const int32_t resident)
{
    struct attn_swap_dims dims = swap_dims_make();
    struct attn_swap_info info = { .size = sizeof(info) };
    dims.num_blocks = 100;
    dims.num_layers = 2;
    dims.resident_blocks = resident;
    dims.tile_blocks = 5;
    swap_case_init(&c, &dims, 14);
    open_swap(backing);
    attn_swap_describe(swap, &info);
    swap_case_write_all(&c, swap);
    struct swap_batch batches[] = { swap_batch_range(&c, 0, 0, 100),
                                    swap_batch_range(&c, 1, 0, 100) };
    struct attn_swap_stats before = { 0 }, after = swap_stats(swap);
    for (int round = 0; round < 6; round++) {
        before = after;
        for (int layer = 0; layer < 2; layer++)
            cr_assert(swap_case_agrees(&c, swap, &batches[layer]), "round %d", round);
        after = swap_stats(swap);
    }
    // Of 200 blocks so many fit, of which 10 slots are those of two tiles.
    const int32_t misses = (int32_t) (after.misses - before.misses);
    const uint64_t bytes = (uint64_t) misses * (uint64_t) info.block_bytes;
    cr_expect(misses >= 200 - resident && misses <= 200 - resident + 10, "%d slots: %d blocks",
              resident, misses);
    cr_expect_eq(after.bytes_copied - before.bytes_copied, bytes);
    cr_expect_eq(after.bytes_read - before.bytes_read, backing == ATTN_SWAP_FILE ? bytes : 0);
    for (int layer = 0; layer < 2; layer++) swap_batch_free(&batches[layer]);
    reopen();
}

Test(swap, keeps_its_share_of_a_list_that_does_not_fit)
{
    static const int32_t residents[] = { 20, 50, 120, 180 };
    for (size_t i = 0; i < sizeof(residents) / sizeof(residents[0]); i++) {
        expect_share(ATTN_SWAP_HOST, residents[i]);
        expect_share(ATTN_SWAP_FILE, residents[i]);
    }
}

// Blocks of a sequence that has ended make room for those of the others.
Test(swap, lets_go_of_what_is_not_listed_any_more)
{
    struct attn_swap_dims dims = swap_dims_make();
    dims.num_blocks = 40;
    dims.num_layers = 1;
    dims.resident_blocks = 20;
    dims.tile_blocks = 2;
    swap_case_init(&c, &dims, 15);
    open_swap(ATTN_SWAP_HOST);
    swap_case_write_all(&c, swap);
    struct swap_batch ended = swap_batch_range(&c, 0, 0, 20);
    struct swap_batch batch = swap_batch_range(&c, 0, 20, 16);
    for (int i = 0; i < 3; i++) cr_assert(swap_case_agrees(&c, swap, &ended));
    for (int i = 0; i < 6; i++) cr_assert(swap_case_agrees(&c, swap, &batch));
    const uint64_t misses = swap_stats(swap).misses;
    cr_assert(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).misses, misses);
    swap_batch_free(&ended);
    swap_batch_free(&batch);
}

Test(swap, brings_a_block_once_that_is_listed_twice)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 16);
    open_swap(ATTN_SWAP_FILE);
    swap_case_write_all(&c, swap);
    // All sequences list the same three blocks, several times each.
    struct swap_batch batch = swap_batch_draw(&c, 1, 4, 60);
    uint64_t listed = 0;
    for (int32_t s = 0; s < 4; s++) {
        batch.lens[s] = 37 + s;
        for (int32_t i = 0; i * dims.block_size < batch.lens[s]; i++, listed++)
            batch.blocks[s * batch.stride + i] = 5 + 6 * (i % 3);
    }
    cr_assert(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).misses, 3);
    cr_expect_eq(swap_stats(swap).hits, listed - 3);
    swap_batch_free(&batch);
}

// Adjacent blocks are one copy, from the first pass on and after many.
Test(swap, copies_adjacent_blocks_together)
{
    struct attn_swap_dims dims = swap_dims_make();
    dims.num_blocks = 60;
    dims.num_layers = 1;
    dims.resident_blocks = 20;
    dims.tile_blocks = 10;
    swap_case_init(&c, &dims, 17);
    open_swap(ATTN_SWAP_HOST);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 60);
    for (int i = 0; i < 5; i++) cr_assert(swap_case_agrees(&c, swap, &batch));
    const struct attn_swap_stats stats = swap_stats(swap);
    cr_expect_geq(stats.misses, 5 * 40);
    cr_expect_leq(stats.copies, 5 * 6, "%llu copies", (unsigned long long) stats.copies);
    swap_batch_free(&batch);
}

// More than 2^16 copies of one block each.
Test(swap, has_no_limit_of_blocks_in_a_tile)
{
    struct attn_swap_dims dims = swap_dims_make();
    dims.num_layers = dims.num_q_heads = dims.num_kv_heads = dims.block_size = 1;
    dims.num_blocks = 140000;
    dims.tile_blocks = 70000;
    dims.resident_blocks = 140000;
    swap_case_init(&c, &dims, 18);
    open_swap(ATTN_SWAP_HOST);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 70000);
    for (int32_t i = 0; i < 70000; i++) {
        batch.blocks[i] = 2 * (69999 - i);
        swap_case_write(&c, swap, 0, batch.blocks[i], 0, 1);
    }
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).tiles, 1);
    cr_expect_eq(swap_stats(swap).copies, 70000);
    swap_batch_free(&batch);
}

// ---- times

static struct attn_swap_tile tile_of(const int32_t ago)
{
    struct attn_swap_tile tile = { .size = sizeof(tile) };
    cr_assert_eq(attn_swap_get_tile(swap, ago, &tile), ATTN_OK, "%s", attn_last_error());
    return tile;
}

static void expect_no_tile(const int32_t ago, struct attn_swap_tile *const tile,
                           const char *const part)
{
    cr_expect_eq(attn_swap_get_tile(swap, ago, tile), ATTN_ERROR_INVALID, "%s", part);
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
}

static void expect_times(const enum attn_swap_backing backing)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 9);
    struct attn_swap_create_params params = params_of(backing);
    struct attn_swap_tile tile = { .size = sizeof(tile) };
    params.trace_tiles = 5;
    cr_assert_eq(attn_swap_create(&swap, c.host, &params), ATTN_OK, "%s", attn_last_error());
    swap_case_write_all(&c, swap);
    expect_no_tile(0, &tile, "ago is 0: of 0 tiles the last 5 are kept");
    // 8 tiles of 3 blocks, the last of 2.
    struct swap_batch batch = swap_batch_range(&c, 1, 0, 23);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_assert_eq(swap_stats(swap).tiles, 8);
    double before = 0;
    for (int32_t ago = 4; ago >= 0; ago--) {
        tile = tile_of(ago);
        cr_expect(tile.number == (uint64_t) (8 - ago) && tile.layer == 1);
        cr_expect_eq(tile.bytes, (ago ? 3 : 2) * (backing == ATTN_SWAP_FILE ? 4 * 4096 : 2560));
        // A tile is copied, then computed; the host does one thing at a time.
        cr_expect(before <= tile.copy_start && tile.copy_start <= tile.copy_end &&
                  tile.copy_end <= tile.compute_start && tile.compute_start < tile.compute_end);
        before = tile.compute_end;
        if (backing == ATTN_SWAP_HOST) cr_expect(tile.read_start == 0 && tile.read_end == 0);
        // The last read is there before the last copy.
        if (backing == ATTN_SWAP_FILE)
            cr_expect(0 < tile.read_start && tile.read_start <= tile.read_end &&
                      tile.read_end <= tile.copy_end);
    }
    expect_no_tile(5, &tile, "ago is 5: of 8 tiles the last 5 are kept");
    expect_no_tile(-1, &tile, "ago is -1");
    expect_no_tile(0, NULL, "tile is NULL");
    // No more than what the caller has.
    memset(&tile, 0xEE, sizeof(tile));
    tile.size = offsetof(struct attn_swap_tile, number);
    cr_expect_eq(attn_swap_get_tile(swap, 0, &tile), ATTN_OK);
    cr_expect(tile.layer == 1 && tile.number == 0xEEEEEEEEEEEEEEEE);
    swap_batch_free(&batch);
    reopen();
}

Test(swap, tells_when_tiles_were_copied_and_computed)
{
    struct attn_swap_tile tile = { .size = sizeof(tile) };
    expect_times(ATTN_SWAP_HOST);
    expect_times(ATTN_SWAP_FILE);
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 9);
    open_swap(ATTN_SWAP_HOST);
    expect_no_tile(0, &tile, "no times are kept: trace_tiles of struct");
    cr_expect_eq(attn_swap_get_tile(NULL, 0, &tile), ATTN_ERROR_INVALID);
}

// While a tile is computed, reads of the next one are under way.
Test(swap, shows_reads_beside_computing)
{
    struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 10);
    struct attn_swap_create_params params = params_of(ATTN_SWAP_FILE);
    params.trace_tiles = 8;
    params.staging_bytes = 0;
    cr_assert_eq(attn_swap_create(&swap, c.host, &params), ATTN_OK, "%s", attn_last_error());
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    for (int32_t ago = 7; ago > 0; ago--) {
        const struct attn_swap_tile tile = tile_of(ago), next = tile_of(ago - 1);
        cr_expect_lt(next.read_start, tile.compute_start, "tile %d", (int) tile.number);
    }
    swap_batch_free(&batch);
}

// ---- memory

// What the program allocates for a cache is what it says, on the host executor with its slots.
static int64_t count_allocated(void)
{
    const struct mallinfo2 now = mallinfo2();
    return (int64_t) now.uordblks + (int64_t) now.hblkhd;
}

static void expect_memory(const enum attn_swap_backing backing, const int32_t trace_tiles)
{
    struct attn_swap_dims dims = swap_dims_make();
    struct attn_swap_info info = { .size = sizeof(info) };
    dims.num_layers = 8;
    dims.num_blocks = 2000;
    dims.resident_blocks = 1000;
    swap_case_init(&c, &dims, 11);
    struct attn_swap_create_params params = params_of(backing);
    params.trace_tiles = trace_tiles;
    const int64_t before = count_allocated();
    cr_assert_eq(attn_swap_create(&swap, c.host, &params), ATTN_OK, "%s", attn_last_error());
    const int64_t after = count_allocated();
    attn_swap_describe(swap, &info);
    const int64_t said = info.host_bytes + info.device_bytes + info.pool_bytes;
    // The allocator's own, pages that are rounded up to, and what stdio, threads or liburing keep.
    const int64_t other = 100000;
    cr_expect(after - before <= said + other && after - before >= said - other,
              "%lld bytes, and said were %lld", (long long) (after - before), (long long) said);
    reopen();
}

Test(swap, allocates_what_it_says)
{
    // The allocators of sanitizers and of valgrind don't.
    const int64_t before = count_allocated();
    // Volatile: else the compiler leaves it out.
    void *volatile const some = malloc(1 << 20);
    const bool counts = count_allocated() >= before + (1 << 20);
    free(some);
    if (!counts) cr_skip_test("this allocator does not count");
    expect_memory(ATTN_SWAP_HOST, 0);
    expect_memory(ATTN_SWAP_FILE, 0);
    expect_memory(ATTN_SWAP_HOST, 10000);
}

Test(swap, takes_the_memory_it_says)
{
    struct attn_swap_dims dims = swap_dims_make();
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap_info info = { .size = sizeof(info) };
    // 32 GB of 64 KiB blocks through 2 GB of slots.
    dims.num_layers = 32;
    dims.num_blocks = 16384;
    dims.max_seqs = 64;
    dims.num_q_heads = 32;
    dims.num_kv_heads = 8;
    dims.head_dim = 128;
    dims.block_size = 16;
    dims.resident_blocks = 32768;
    dims.tile_blocks = dims.num_planes = 0;
    params.dims = &dims;
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        params.backing = (enum attn_swap_backing) backing;
        cr_assert_eq(attn_swap_sizes(&params, &info), ATTN_OK, "%s", attn_last_error());
        cr_expect_eq(info.block_bytes, 65536);
        cr_expect_eq(info.stripe_bytes, 4096);
        cr_expect_eq(info.tile_blocks, 1024);
        cr_expect_eq(info.num_planes, 2);
        cr_expect_leq(info.host_bytes, 64000000, "%lld", (long long) info.host_bytes);
        cr_expect_leq(info.device_bytes, (INT64_C(2) << 30) + (4 << 20));
        cr_expect_eq(info.pool_bytes, backing == ATTN_SWAP_HOST ? INT64_C(32) << 30 : 0);
    }
}

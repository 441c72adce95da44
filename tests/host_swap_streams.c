/* SPDX-License-Identifier: Apache-2.0 */
// The swap engine on a GPU that the fake driver pretends, whose streams do what is enqueued late
// and in any order that events allow: tiles see the blocks that they list, and nothing is written
// that a tile, a copy or a read still needs. Then every call of the driver fails in turn. Tiles are
// computed by the host executor, when their turn comes.
#include "attn/attn.h"
#include "support/fake_driver.h"
#include "support/fake_streams.h"
#include "support/pack_folder.h"
#include "support/swap_case.h"
#include "swap.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct attn_device *gpu;
static struct swap_case c;
static struct attn_swap *swap;
static char path[SWAP_PATH_SIZE];

// ---- tiled decode, when its turn comes

struct begin {
    struct attn_tiled *tiled;
    int32_t num_seqs;
};

struct step {
    struct attn_tiled *tiled;
    struct attn_tiled_step_params params;
};

struct last {
    struct attn_tiled *tiled;
    struct attn_tiled_finalize_params params;
};

static int states, fail_step;
// Copies that were done when each step was, since the last reset.
static int num_steps, copied_at[64];

static enum attn_status create_state(struct attn_tiled **const tiled,
                                     struct attn_device *const device,
                                     const struct attn_tiled_create_params *const params)
{
    cr_assert_eq(device, gpu);
    const enum attn_status status = attn_tiled_create(tiled, c.host, params);
    states += status == ATTN_OK;
    return status;
}

static void destroy_state(struct attn_tiled **const tiled)
{
    states -= *tiled != NULL;
    attn_tiled_destroy(tiled);
}

static void do_begin(const void *const argument)
{
    const struct begin *const begin = argument;
    cr_assert_eq(attn_tiled_begin_step(begin->tiled, begin->num_seqs, NULL), ATTN_OK);
}

static enum attn_status begin_step(struct attn_tiled *const tiled, const int32_t num_seqs,
                                   const attn_stream stream)
{
    const struct begin begin = { tiled, num_seqs };
    fake_streams_enqueue(stream, do_begin, &begin, sizeof(begin));
    return ATTN_OK;
}

static void do_step(const void *const argument)
{
    const struct step *const step = argument;
    int32_t fault = INT32_MAX;
    copied_at[num_steps++ % 64] = fake_streams.num_copied;
    struct attn_tiled_step_params params = step->params;
    params.fault = &fault;
    cr_assert_eq(attn_tiled_step_tile(step->tiled, &params, NULL), ATTN_OK, "%s",
                 attn_last_error());
    cr_expect_eq(fault, INT32_MAX, "a tile's table names slots that are not there");
}

static enum attn_status step_tile(struct attn_tiled *const tiled,
                                  const struct attn_tiled_step_params *const params,
                                  const attn_stream stream)
{
    const struct step step = { tiled, *params };
    if (fail_step && !--fail_step) return ATTN_ERROR_DRIVER;
    fake_streams_enqueue(stream, do_step, &step, sizeof(step));
    return ATTN_OK;
}

static void do_finalize(const void *const argument)
{
    const struct last *const last = argument;
    cr_assert_eq(attn_tiled_finalize(last->tiled, &last->params, NULL), ATTN_OK);
}

static enum attn_status finalize(struct attn_tiled *const tiled,
                                 const struct attn_tiled_finalize_params *const params,
                                 const attn_stream stream)
{
    const struct last last = { tiled, *params };
    fake_streams_enqueue(stream, do_finalize, &last, sizeof(last));
    return ATTN_OK;
}

static const struct attn_swap_compute late = {
    .create = create_state,
    .destroy = destroy_state,
    .begin_step = begin_step,
    .step_tile = step_tile,
    .finalize = finalize,
};

// ---- the GPU

static void set_up(void)
{
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    swap_path_make(path);
    fake_driver_install();
    fake_streams_install(random_seed(1), true);
    open.kind = ATTN_DEVICE_ORDINAL;
    open.pack_dir = pack_folder_make_with("hopper");
    cr_assert_not_null(open.pack_dir);
    cr_assert_eq(attn_device_open(&gpu, &open), ATTN_OK, "%s", attn_last_error());
}

static bool is_balanced(void)
{
    return fake_streams.allocations == 0 && fake_streams.host_allocations == 0 &&
           fake_streams.pinned == 0 && fake_streams.streams == 0 && fake_streams.events == 0 &&
           fake.pushes == fake.pops && states == 0;
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    cr_expect(is_balanced(), "something that was taken was not given back");
    attn_device_close(&gpu);
    swap_case_free(&c);
    pack_folder_remove();
    swap_path_remove(path);
}

TestSuite(swap_streams, .init = set_up, .fini = tear_down);

static struct attn_swap_create_params params_of(const enum attn_swap_backing backing)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    params.backing = backing;
    params.dims = &c.dims;
    if (backing == ATTN_SWAP_FILE) params.path = path;
    if (backing == ATTN_SWAP_FILE) params.staging_bytes = 3 * 8192;
    return params;
}

static void start(const struct attn_swap_dims *const dims, const enum attn_swap_backing backing,
                  const uint64_t seed)
{
    swap_case_init(&c, dims, seed);
    c.finish = fake_streams_finish;
    const struct attn_swap_create_params params = params_of(backing);
    cr_assert_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_OK, "%s",
                 attn_last_error());
    swap_case_write_all(&c, swap);
}

static void end(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    unlink(path);
}

// ---- order

// A call whose results are looked at later.
struct pending {
    struct swap_batch batch;
    struct swap_result expected, result;
};

static attn_stream stream_of(const uint32_t number)
{
    static int streams[3];
    return number ? (attn_stream) (void *) &streams[number - 1] : NULL;
}

static void enqueue(struct pending *const pending, const struct attn_swap_dims *const dims)
{
    const int32_t layer = (int32_t) random_below(&c.random, (uint32_t) dims->num_layers);
    const int32_t seqs = 1 + (int32_t) random_below(&c.random, (uint32_t) dims->max_seqs);
    pending->batch = swap_batch_draw(&c, layer, seqs, 60);
    pending->expected = swap_case_expect(&c, &pending->batch);
    pending->result = swap_result_make(&c, seqs);
    struct attn_swap_decode_params params = swap_batch_params(&pending->batch);
    params.output = pending->result.output;
    params.lse = pending->result.lse;
    cr_assert_eq(attn_swap_decode(swap, &params, stream_of(random_below(&c.random, 3))), ATTN_OK,
                 "%s", attn_last_error());
    // The lists are read before the call returns.
    memset(pending->batch.blocks, 0xFF,
           (size_t) seqs * (size_t) pending->batch.stride * sizeof(int32_t));
    memset(pending->batch.lens, 0xFF, (size_t) seqs * sizeof(int32_t));
}

static bool check(struct pending *const pending)
{
    const bool same = swap_result_same(&pending->result, &pending->expected);
    swap_result_free(&pending->result);
    swap_result_free(&pending->expected);
    swap_batch_free(&pending->batch);
    return same;
}

// Several calls in flight, with writes between them.
static void expect_order(const struct attn_swap_dims *const dims,
                         const enum attn_swap_backing backing, const uint64_t seed)
{
    enum {
        ROUNDS = 12,
        CALLS = 5
    };
    start(dims, backing, seed);
    for (int round = 0; round < ROUNDS; round++) {
        struct pending pending[CALLS];
        for (int i = 0; i < CALLS; i++) {
            enqueue(&pending[i], dims);
            const int32_t layer = (int32_t) random_below(&c.random, (uint32_t) dims->num_layers);
            const int32_t block = (int32_t) random_below(&c.random, (uint32_t) dims->num_blocks);
            swap_case_write(&c, swap, layer, block, 0, dims->block_size);
        }
        fake_streams_finish();
        for (int i = 0; i < CALLS; i++)
            cr_assert(check(&pending[i]), "seed %llu, round %d, call %d", (unsigned long long) seed,
                      round, i);
    }
    end();
}

Test(swap_streams, keeps_order_in_host_memory)
{
    struct attn_swap_dims dims = swap_dims_make();
    for (uint64_t seed = 0; seed < 12; seed++) {
        dims.num_planes = 2 + (int32_t) (seed % 3);
        dims.tile_blocks = 1 + (int32_t) (seed % 2);
        dims.resident_blocks = dims.num_planes * dims.tile_blocks + (int32_t) (seed % 4);
        fake_streams_install(random_seed(100 + seed), seed % 4 != 0);
        attn_device_close(&gpu);
        pack_folder_remove();
        struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
        open.kind = ATTN_DEVICE_ORDINAL;
        open.pack_dir = pack_folder_make_with("hopper");
        cr_assert_eq(attn_device_open(&gpu, &open), ATTN_OK, "%s", attn_last_error());
        expect_order(&dims, ATTN_SWAP_HOST, seed);
    }
}

Test(swap_streams, keeps_order_from_a_file)
{
    struct attn_swap_dims dims = swap_dims_make();
    for (uint64_t seed = 0; seed < 12; seed++) {
        dims.num_planes = 2 + (int32_t) (seed % 3);
        dims.tile_blocks = 1 + (int32_t) (seed % 2);
        dims.resident_blocks = dims.num_planes * dims.tile_blocks + (int32_t) (seed % 4);
        expect_order(&dims, ATTN_SWAP_FILE, 50 + seed);
    }
}

// However late tiles are, copies of as many tiles as there are planes go on: those of the next one
// are done before a tile is.
Test(swap_streams, copies_ahead_of_tiles)
{
    struct attn_swap_dims dims = swap_dims_make();
    for (int32_t planes = 2; planes < 5; planes++) {
        dims.num_planes = planes;
        dims.resident_blocks = 3 * planes;
        start(&dims, ATTN_SWAP_HOST, 15);
        struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
        // Blocks apart: no two of them are one copy.
        for (int32_t i = 0; i < 23; i++) batch.blocks[i] = i * 7 % 23;
        fake_streams_reset();
        fake_streams.has_slow = true;
        num_steps = 0;
        cr_expect(swap_case_agrees(&c, swap, &batch));
        cr_assert_eq(num_steps, 8);
        // Of each tile its table, in two copies, and at least one of blocks.
        for (int i = 0; i < 8; i++) {
            const int tiles = i + planes < 8 ? i + planes : 8;
            cr_expect_geq(copied_at[i], 3 * tiles, "%d planes, tile %d: %d", planes, i + 1,
                          copied_at[i]);
        }
        swap_batch_free(&batch);
        end();
    }
}

// ---- copies

Test(swap_streams, copies_a_tile_in_one_call)
{
    struct attn_swap_dims dims = swap_dims_make();
    dims.tile_blocks = 4;
    start(&dims, ATTN_SWAP_HOST, 4);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 4);
    // Apart, in no order.
    const int32_t apart[] = { 17, 3, 21, 9 };
    memcpy(batch.blocks, apart, sizeof(apart));
    fake_streams_reset();
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(fake_streams.num_batches, 1);
    // And two copies of the table.
    cr_expect_eq(fake_streams.num_copy_calls, 3);
    cr_expect_eq(swap_stats(swap).copies, 4);
    // Side by side: one copy.
    for (int32_t i = 0; i < 4; i++) batch.blocks[i] = 13 - i;
    fake_streams_reset();
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(fake_streams.num_batches, swap_stats(swap).copies > 5);
    swap_batch_free(&batch);
}

// A driver that has the call for several copies, and does not serve it there.
Test(swap_streams, copies_one_by_one_where_it_has_to)
{
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 14);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 3);
    for (int32_t i = 0; i < 3; i++) batch.blocks[i] = 5 * i;
    fake_streams_reset();
    fake_streams.fail_symbol = "cuMemcpyBatchAsync_v2";
    fake_streams.fail_at = 1;
    fake_streams.fail_on = true;
    fake_streams.fail_code = ATTN_CU_ERROR_NOT_SUPPORTED;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(fake_streams.num_failed, 1);
    cr_expect_eq(fake_streams.num_copy_calls, 5);
    swap_batch_free(&batch);
}

Test(swap_streams, takes_exactly_what_it_says)
{
    const struct attn_swap_dims dims = swap_dims_make();
    for (int backing = ATTN_SWAP_HOST; backing <= ATTN_SWAP_FILE; backing++) {
        struct attn_swap_info info = { .size = sizeof(info) };
        start(&dims, (enum attn_swap_backing) backing, 5);
        attn_swap_describe(swap, &info);
        // The state is tiled decode's own.
        const int64_t state = (int64_t) 4 * 4 * (2 + 64) * 4;
        cr_expect_eq((int64_t) fake_streams.device_bytes, info.device_bytes - state);
        cr_expect_leq((int64_t) fake_streams.host_bytes, info.host_bytes + info.pool_bytes);
        cr_expect_eq(fake_streams.pinned, backing == ATTN_SWAP_FILE);
        const size_t device = fake_streams.device_bytes, host = fake_streams.host_bytes;
        struct swap_batch batch = swap_batch_range(&c, 1, 0, 20);
        cr_expect(swap_case_agrees(&c, swap, &batch));
        cr_expect_eq(fake_streams.device_bytes, device);
        cr_expect_eq(fake_streams.host_bytes, host);
        swap_batch_free(&batch);
        end();
    }
}

// ---- times

// By the events of its streams: copies before the computing that needs them, and beside that of
// tiles before.
static void expect_times(const enum attn_swap_backing backing)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 21);
    c.finish = fake_streams_finish;
    struct attn_swap_create_params params = params_of(backing);
    struct attn_swap_tile tiles[8];
    const int timed = fake_streams.timed_events;
    params.trace_tiles = 6;
    cr_assert_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_OK, "%s",
                 attn_last_error());
    // Of 6 tiles, and of those that are planned beside them, four each; and where time begins.
    cr_expect_eq(fake_streams.timed_events - timed, (6 + 2) * 4 + 1);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    // Computing is what others wait for.
    fake_streams.has_slow = true;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    for (int i = 0; i < 6; i++) {
        tiles[i].size = sizeof(tiles[i]);
        cr_assert_eq(attn_swap_get_tile(swap, 5 - i, &tiles[i]), ATTN_OK, "%s", attn_last_error());
        const struct attn_swap_tile *const tile = &tiles[i], *const last = &tiles[i ? i - 1 : 0];
        cr_expect_eq(tile->number, (uint64_t) i + 3);
        // Something happens between two events of a stream, and each takes a millisecond there.
        cr_expect(tile->copy_start + 1000 < tile->copy_end &&
                  tile->copy_end < tile->compute_start &&
                  tile->compute_start + 1000 < tile->compute_end);
        cr_expect((tile->read_start > 0) == (backing == ATTN_SWAP_FILE));
        if (i == 0) continue;
        cr_expect(last->copy_end < tile->copy_start && last->compute_end < tile->compute_start);
        cr_expect_lt(tile->copy_start, last->compute_end, "tile %d", i + 3);
    }
    // Nothing is asked of a GPU that does not answer.
    fake_streams_reset();
    fake_streams.fail_symbol = "cuEventElapsedTime";
    fake_streams.fail_at = 3;
    fake_streams.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
    const struct attn_swap_tile before = tiles[0];
    cr_expect_eq(attn_swap_get_tile(swap, 0, &tiles[0]), ATTN_ERROR_DRIVER);
    cr_expect(strstr(attn_last_error(), "a tile's times cannot be had"), "%s", attn_last_error());
    cr_expect_eq(memcmp(&tiles[0], &before, sizeof(before)), 0);
    fake_streams_reset();
    swap_batch_free(&batch);
    end();
}

Test(swap_streams, tells_when_tiles_were_copied_and_computed)
{
    expect_times(ATTN_SWAP_HOST);
    expect_times(ATTN_SWAP_FILE);
}

// The first call finds out where time begins; where it can't, the next one does.
Test(swap_streams, begins_to_take_times_with_the_first_call_that_can)
{
    const struct attn_swap_dims dims = swap_dims_make();
    struct attn_swap_tile tile = { .size = sizeof(tile) };
    bool same;
    swap_case_init(&c, &dims, 23);
    c.finish = fake_streams_finish;
    struct attn_swap_create_params params = params_of(ATTN_SWAP_HOST);
    params.trace_tiles = 1;
    cr_assert_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_OK, "%s",
                 attn_last_error());
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    static const char *const symbols[] = { "cuEventRecord", "cuEventSynchronize" };
    for (size_t i = 0; i < 2; i++) {
        fake_streams_reset();
        fake_streams.fail_symbol = symbols[i];
        // After those that wait for what the first failure has left: of two planes, and of a call.
        fake_streams.fail_at = i == 0 ? 1 : 4;
        fake_streams.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
        cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_DRIVER);
        cr_expect(strstr(attn_last_error(), "the time cannot be taken"), "%s", attn_last_error());
    }
    fake_streams_reset();
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(attn_swap_get_tile(swap, 0, &tile), ATTN_OK, "%s", attn_last_error());
    cr_expect(tile.number == 8 && tile.copy_start > 0);
    swap_batch_free(&batch);
    end();
}

// Without a trace no event has a time, and none is recorded beside those that keep order.
Test(swap_streams, takes_no_times_unless_asked)
{
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 22);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    fake_streams_reset();
    fake_streams.fail_symbol = "cuEventRecord";
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(fake_streams.timed_events, 0);
    // Two of each tile, and one of the call.
    cr_expect_eq(fake_streams.num_calls, 8 * 2 + 1);
    swap_batch_free(&batch);
    end();
}

// ---- failures

// Each call of `symbol` while a cache is made fails in turn.
static void expect_undone(const char *const symbol, const enum attn_swap_backing backing,
                          void *const pool)
{
    struct attn_swap_create_params params = params_of(backing);
    params.pool = pool;
    params.trace_tiles = 2;
    for (int at = 1;; at++) {
        fake_streams_reset();
        fake_streams.fail_symbol = symbol;
        fake_streams.fail_at = at;
        fake_streams.fail_code = ATTN_CU_ERROR_OUT_OF_MEMORY;
        const enum attn_status status = attn_swap_create_with(&swap, gpu, &params, NULL, &late);
        if (!fake_streams.num_failed) {
            cr_expect_eq(status, ATTN_OK, "%s", attn_last_error());
            fake_streams.fail_symbol = NULL;
            attn_swap_destroy(&swap);
            unlink(path);
            return;
        }
        cr_expect_eq(status, ATTN_ERROR_NO_MEMORY, "%s, call %d", symbol, at);
        cr_expect(strstr(attn_last_error(), "FAKE_ERROR_2"), "%s", attn_last_error());
        cr_expect_null(swap);
        cr_expect(is_balanced(), "%s, call %d", symbol, at);
        cr_expect_neq(access(path, F_OK), 0, "a file was left");
    }
}

Test(swap_streams, undoes_a_half_made_cache)
{
    static const char *const symbols[] = { "cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamCreate",
                                           "cuEventCreate" };
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 6);
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        expect_undone(symbols[i], ATTN_SWAP_HOST, NULL);
        expect_undone(symbols[i], ATTN_SWAP_FILE, NULL);
    }
    void *const pool = aligned_alloc(4096, (size_t) 46 * 4096);
    expect_undone("cuMemHostRegister_v2", ATTN_SWAP_HOST, pool);
    free(pool);
    expect_undone("cuMemHostRegister_v2", ATTN_SWAP_FILE, NULL);
}

Test(swap_streams, says_when_memory_is_too_small)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 7);
    const struct attn_swap_create_params params = params_of(ATTN_SWAP_HOST);
    fake_streams.device_limit = 9 * 2560 - 1;
    cr_expect_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_ERROR_NO_MEMORY);
    cr_expect(strstr(attn_last_error(), "bytes on the device"), "%s", attn_last_error());
    fake_streams.device_limit = 0;
    fake_streams.host_limit = 46 * 2560;
    cr_expect_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_ERROR_NO_MEMORY);
    cr_expect(strstr(attn_last_error(), "the pool in host memory"), "%s", attn_last_error());
    fake_streams.host_limit = 0;
}

// Calls that a cache makes while it decodes.
static const char *const decode_symbols[] = {
    "cuStreamWaitEvent",    "cuEventRecord",         "cuEventSynchronize",
    "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2",
};

// What a failed call has left goes on meanwhile.
static void finish_success(void)
{
    if (!fake_streams.num_failed) fake_streams_finish();
}

// The at-th call of the symbol fails, and those after it if `on`. False if there are not so many.
static bool expect_clean_start(const char *const symbol, const int at, const bool on)
{
    bool same;
    struct swap_batch batch = swap_batch_draw(&c, 1, 4, 60);
    for (int32_t s = 0; s < 4; s++)
        for (int32_t i = 0; i < batch.stride; i++)
            batch.blocks[s * batch.stride + i] = (int32_t) random_below(&c.random, 23);
    for (int32_t s = 0; s < 4; s++) batch.lens[s] = 40 + s;
    fake_streams_reset();
    fake_streams.fail_symbol = symbol;
    fake_streams.fail_at = at;
    fake_streams.fail_on = on;
    fake_streams.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
    const uint64_t calls = swap_stats(swap).calls;
    c.finish = finish_success;
    const enum attn_status status = swap_case_run(&c, swap, &batch, &same);
    const bool failed = fake_streams.num_failed > 0;
    if (failed) {
        cr_expect_eq(status, ATTN_ERROR_DRIVER, "%s, call %d", symbol, at);
        cr_expect(strstr(attn_last_error(), "FAKE_ERROR_719"), "%s", attn_last_error());
        cr_expect_eq(swap_stats(swap).calls, calls);
        cr_expect_eq(swap_stats(swap).resident, 0);
        // While it goes on failing, so does the next call, or it does not meet the failure.
        fake_streams.num_failed = 0;
    }
    fake_streams_reset();
    // What was resident before is not trusted; what changes meanwhile is seen.
    swap_case_write(&c, swap, 1, batch.blocks[0], 0, c.dims.block_size);
    c.finish = fake_streams_finish;
    cr_expect(swap_case_agrees(&c, swap, &batch), "%s, call %d", symbol, at);
    swap_batch_free(&batch);
    return failed;
}

static void expect_clean_starts(const enum attn_swap_backing backing, const int32_t trace_tiles)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 8);
    c.finish = fake_streams_finish;
    struct attn_swap_create_params params = params_of(backing);
    params.trace_tiles = trace_tiles;
    cr_assert_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_OK, "%s",
                 attn_last_error());
    swap_case_write_all(&c, swap);
    for (size_t i = 0; i < sizeof(decode_symbols) / sizeof(decode_symbols[0]); i++) {
        int at = 1;
        while (expect_clean_start(decode_symbols[i], at, at % 2)) at++;
        // Batches are for host memory.
        const bool batch = strstr(decode_symbols[i], "Batch") != NULL;
        cr_expect(batch && backing == ATTN_SWAP_FILE ? at == 1 : at > 3, "%s: %d calls",
                  decode_symbols[i], at - 1);
    }
    end();
}

Test(swap_streams, starts_clean_after_a_failure)
{
    expect_clean_starts(ATTN_SWAP_HOST, 0);
}

Test(swap_streams, starts_clean_after_a_failure_with_a_trace)
{
    expect_clean_starts(ATTN_SWAP_HOST, 3);
}

Test(swap_streams, starts_clean_after_a_failure_with_a_file)
{
    expect_clean_starts(ATTN_SWAP_FILE, 0);
}

// Waiting for what the failed call has left fails, too: the call after that is the one that works.
Test(swap_streams, waits_again_where_waiting_failed)
{
    bool same;
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 9);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 20);
    c.finish = NULL;
    fail_step = 3;
    cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_DRIVER);
    static const char *const waits[] = { "cuStreamSynchronize", "cuEventSynchronize" };
    for (size_t i = 0; i < 2; i++) {
        fake_streams_reset();
        fake_streams.fail_symbol = waits[i];
        fake_streams.fail_at = 1;
        fake_streams.fail_on = true;
        fake_streams.fail_code = 700;
        cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_DRIVER);
        cr_expect(strstr(attn_last_error(), "what an earlier call left"), "%s", attn_last_error());
        cr_expect_eq(swap_case_send(&c, swap, 0, 0, 0, 5), ATTN_ERROR_DRIVER);
        cr_expect_eq(attn_swap_invalidate(swap, 0, 0, 5), ATTN_ERROR_DRIVER);
    }
    fake_streams_reset();
    c.finish = fake_streams_finish;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

// A write waits for copies from the pool: where that fails nothing is written.
Test(swap_streams, writes_nothing_that_copies_may_still_read)
{
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 12);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 20);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    fake_streams_reset();
    fake_streams.fail_symbol = "cuStreamSynchronize";
    fake_streams.fail_at = 1;
    fake_streams.fail_code = ATTN_CU_ERROR_LAUNCH_FAILED;
    cr_expect_eq(swap_case_send(&c, swap, 0, 3, 0, 2), ATTN_ERROR_DRIVER);
    cr_expect(strstr(attn_last_error(), "copies from the pool cannot be waited for"), "%s",
              attn_last_error());
    cr_expect_eq(attn_swap_tokens(swap, 0, 3), 5);
    fake_streams_reset();
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

// The driver does not give the device's context.
Test(swap_streams, needs_the_context_of_its_device)
{
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 13);
    bool same;
    struct attn_swap *other;
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 20);
    const struct attn_swap_create_params params = params_of(ATTN_SWAP_HOST);
    fake.fail_symbol = "cuCtxGetCurrent";
    fake.fail_at = 1;
    fake.fail_code = ATTN_CU_ERROR_INVALID_VALUE;
    cr_expect_eq(attn_swap_create_with(&other, gpu, &params, NULL, &late), ATTN_ERROR_DRIVER);
    cr_expect(strstr(attn_last_error(), "the GPU's context cannot be had"), "%s",
              attn_last_error());
    cr_expect_null(other);
    c.finish = NULL;
    cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_DRIVER);
    cr_expect(strstr(attn_last_error(), "the GPU's context cannot be had"), "%s",
              attn_last_error());
    fake.fail_symbol = NULL;
    c.finish = fake_streams_finish;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

// A caller's pool is pinned where it is, and let go.
Test(swap_streams, pins_the_pool_of_the_caller)
{
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 10);
    c.finish = fake_streams_finish;
    struct attn_swap_create_params params = params_of(ATTN_SWAP_HOST);
    unsigned char *const pool = aligned_alloc(4096, (size_t) 46 * 4096);
    params.pool = pool;
    cr_assert_eq(attn_swap_create_with(&swap, gpu, &params, NULL, &late), ATTN_OK, "%s",
                 attn_last_error());
    cr_expect_eq(fake_streams.pinned, 1);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 1, 0, 20);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    attn_swap_destroy(&swap);
    cr_expect_eq(fake_streams.pinned, 0);
    swap_batch_free(&batch);
    free(pool);
}

// The thread's own context is not the cache's.
Test(swap_streams, works_in_the_context_of_its_device)
{
    const struct attn_swap_dims dims = swap_dims_make();
    start(&dims, ATTN_SWAP_HOST, 11);
    fake.current = fake_other_context();
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 20);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(fake.current, fake_other_context());
    attn_swap_destroy(&swap);
    cr_expect_eq(fake.current, fake_other_context());
    fake.current = NULL;
    swap_batch_free(&batch);
}

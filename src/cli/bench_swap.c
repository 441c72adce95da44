/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench swap`: decode steps over a cache of which a part is resident, and beside them, in the
// same run, how fast its bytes can be had: copied from pinned memory, or read from the file's disk.
#include "cli/bench_swap.h"

#include "cli/bench_time.h"
#include "cli/bench_timeline.h"
#include "cli/cli.h"
#include "cli/random.h"
#include "cli/shape.h"
#include "commit.h"
#include "host/check.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    // Different blocks that the cache is filled with, in turn.
    PATTERNS = 64,
    MAX_STEPS = 100,
    LINK_SAMPLES = 16,
    // As many as the library ever has reads under way.
    MAX_READERS = 64,
    // Of a step, in the timeline; more make a picture that nobody looks at.
    MAX_TRACE = 16384,
    SEED = 1,
};

// Of one copy that measures the link.
#define LINK_BYTES ((size_t) 256 << 20)
// Of the file, that is read to measure the disk.
#define DISK_TOTAL ((int64_t) 4 << 30)

struct bench {
    float host_gb, resident_gb;
    const char *file, *timeline;
    enum attn_swap_reader reader;
    enum cli_device kind;
    bool as_json;
    int32_t batch, steps;
    struct attn_swap_dims dims;

    struct attn_device *device;
    struct gpu *gpu;
    struct gpu_description found;
    char device_name[128];
    attn_stream stream;
    struct attn_swap *swap;
    struct attn_swap_info info;
    unsigned char *pool;
    // [PATTERNS] blocks [K, V][kv_head][token][head_dim].
    uint16_t *patterns;
    int32_t *lens, *lists, *pattern_lists;
    uint16_t *q;
    // On the device, and what the checked call gave.
    void *device_q, *device_o;
    uint16_t *o, *again;
    size_t q_bytes;

    double samples[MAX_STEPS], disk_samples[MAX_STEPS], median_us, limit_gbs, max_ratio;
    struct attn_swap_stats moved;
    // Of the timeline: tiles that it can have, and the share of their computing beside copies.
    int32_t trace_tiles;
    double hidden;
};

static void print_help(void)
{
    printf(
        "Usage: attn bench swap [options]\n\n"
        "Fills a cache, checks a call against the definition, then times steps that decode all layers:\n"
        "with the bytes that were moved, and beside them, in the same run, how fast bytes can be\n"
        "copied from pinned memory, or with --file be read from that disk by a reader that does nothing\n"
        "else, as many reads under way. The checked bits have to come out of the timed steps, too.\n\n"
        "  --host-gb N       bytes of the cache in 10^9 (32; on the host executor 0.02)\n"
        "  --resident-gb N   of which so many have slots on the GPU (2; 0.005)\n"
        "  --file PATH       a file in place of host memory; it is made, and removed at the end\n"
        "  --reader R        auto, uring, threads\n"
        "  --heads Q/KV      32/8\n"
        "  --dim D           128\n"
        "  --block N         tokens of a block (16)\n"
        "  --layers N        32\n"
        "  --batch N         sequences, which share the cache's blocks evenly (8)\n"
        "  --tile-blocks N   blocks of a tile (what 64 MiB hold)\n"
        "  --planes N        tiles in work (2)\n"
        "  --steps N         that are timed (5)\n"
        "  --timeline FILE   when each tile of the last step was read, copied and computed, for\n"
        "                    chrome://tracing or Perfetto\n"
        "  --device D        gpu (default), or host: times the host executor\n"
        "  --json            for programs\n");
}

__attribute__((format(printf, 1, 2))) static void show_progress(const char *const format, ...)
{
    char line[128];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    cli_progress(line);
}

// ---- the cache

static int64_t count_elements(const struct bench *const b)
{
    return (int64_t) 2 * b->dims.num_kv_heads * b->dims.block_size * b->dims.head_dim;
}

// BF16 of a few units at most.
static void draw(struct random *const random, uint16_t *const to, const int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const float value = (float) random_normal(random);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        to[i] = (uint16_t) (bits >> 16);
    }
}

// Every sequence has its own blocks, side by side.
static int make_inputs(struct bench *const b)
{
    struct random random = { .state = SEED };
    const int32_t each = b->dims.num_blocks / b->batch;
    const size_t rows = (size_t) b->batch * (size_t) b->dims.num_q_heads;
    b->q_bytes = rows * (size_t) b->dims.head_dim * 2;
    b->patterns = malloc((size_t) count_elements(b) * PATTERNS * 2);
    b->lens = malloc((size_t) b->batch * sizeof(int32_t));
    b->lists = malloc((size_t) b->batch * (size_t) each * sizeof(int32_t));
    b->pattern_lists = malloc((size_t) b->batch * (size_t) each * sizeof(int32_t));
    b->q = malloc(b->q_bytes);
    b->o = malloc(b->q_bytes);
    b->again = malloc(b->q_bytes);
    if (!b->patterns || !b->lens || !b->lists || !b->pattern_lists || !b->q || !b->o || !b->again)
        return cli_fail("out of memory");
    draw(&random, b->patterns, count_elements(b) * PATTERNS);
    draw(&random, b->q, (int64_t) b->q_bytes / 2);
    for (int32_t s = 0; s < b->batch; s++) {
        b->lens[s] = each * b->dims.block_size;
        for (int32_t i = 0; i < each; i++) {
            b->lists[s * each + i] = s * each + i;
            b->pattern_lists[s * each + i] = (s * each + i) % PATTERNS;
        }
    }
    return CLI_FINE;
}

// Of a step, if all but the last of each layer are full.
static int32_t count_tiles(const struct bench *const b)
{
    const int64_t tiles =
        (int64_t) b->dims.num_layers * (b->dims.num_blocks / b->info.tile_blocks + 1);
    return tiles < MAX_TRACE ? (int32_t) tiles : MAX_TRACE;
}

static int open_cache(struct bench *const b)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    b->info.size = sizeof(b->info);
    params.dims = &b->dims;
    if (attn_swap_sizes(&params, &b->info) != ATTN_OK) return cli_fail_library();
    if (b->timeline) params.trace_tiles = b->trace_tiles = count_tiles(b);
    if (b->file) {
        params.backing = ATTN_SWAP_FILE;
        params.path = b->file;
        params.open = ATTN_SWAP_CREATE;
        params.reader = b->reader;
    } else {
        // Its own, so that the link can be measured from it.
        b->pool = mmap(NULL, (size_t) b->info.pool_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (b->pool == MAP_FAILED) {
            b->pool = NULL;
            return cli_fail("out of memory: the cache would have %lld bytes",
                            (long long) b->info.pool_bytes);
        }
        madvise(b->pool, (size_t) b->info.pool_bytes, MADV_HUGEPAGE);
        show_progress("pinning %.1f GB ...", 1e-9 * (double) b->info.pool_bytes);
        params.pool = b->pool;
    }
    if (attn_swap_create(&b->swap, b->device, &params) != ATTN_OK ||
        attn_swap_describe(b->swap, &b->info) != ATTN_OK)
        return cli_fail_library();
    return CLI_FINE;
}

static enum attn_status fill_block(const struct bench *const b, const int32_t layer,
                                   const int32_t block)
{
    const int64_t elements = count_elements(b),
                  number = (int64_t) layer * b->dims.num_blocks + block;
    const uint16_t *const pattern = b->patterns + block % PATTERNS * elements;
    struct attn_swap_write_params write = ATTN_SWAP_WRITE_PARAMS_INIT;
    if (b->pool) {
        memcpy(b->pool + number * b->info.block_bytes, pattern, (size_t) elements * 2);
        return attn_swap_invalidate(b->swap, layer, block, b->dims.block_size);
    }
    write.layer = layer;
    write.block = block;
    write.num_tokens = b->dims.block_size;
    write.k = pattern;
    write.v = pattern + elements / 2;
    write.token_stride = b->dims.head_dim;
    write.head_stride = (int64_t) b->dims.block_size * b->dims.head_dim;
    return attn_swap_write(b->swap, &write);
}

static int fill_cache(const struct bench *const b)
{
    const double all =
        (double) b->dims.num_layers * b->dims.num_blocks * (double) b->info.block_bytes;
    enum attn_status status = ATTN_OK;
    for (int32_t layer = 0; layer < b->dims.num_layers; layer++)
        for (int32_t i = 0; status == ATTN_OK && i < b->dims.num_blocks; i++) {
            const double done =
                ((double) layer * b->dims.num_blocks + i) * (double) b->info.block_bytes;
            if (i % 1024 == 0) show_progress("filling: %.1f / %.1f GB", 1e-9 * done, 1e-9 * all);
            status = fill_block(b, layer, i);
        }
    if (status == ATTN_OK && b->file) show_progress("syncing ...");
    if (status == ATTN_OK) status = attn_swap_flush(b->swap);
    return status == ATTN_OK ? CLI_FINE : cli_fail_library();
}

// ---- steps

static int fail_driver(const int code)
{
    return cli_fail("the CUDA driver failed with error %d", code);
}

static int decode_step(const struct bench *const b)
{
    struct attn_swap_decode_params params = ATTN_SWAP_DECODE_PARAMS_INIT;
    params.num_seqs = b->batch;
    params.q = b->device_q;
    params.output = b->device_o;
    params.seq_lens = b->lens;
    params.blocks = b->lists;
    params.blocks_stride = b->dims.num_blocks / b->batch;
    for (params.layer = 0; params.layer < b->dims.num_layers; params.layer++)
        if (attn_swap_decode(b->swap, &params, b->stream) != ATTN_OK) return cli_fail_library();
    const int code = b->gpu ? gpu_stream_sync(b->gpu, b->stream) : 0;
    return code ? fail_driver(code) : CLI_FINE;
}

static int fetch_output(const struct bench *const b, uint16_t *const to)
{
    const int code = b->gpu ? gpu_download(b->gpu, to, b->device_o, b->q_bytes) : 0;
    if (!b->gpu) memcpy(to, b->device_o, b->q_bytes);
    return code ? fail_driver(code) : CLI_FINE;
}

// The first sequence's first KV head, as a call over the patterns.
static int check_output(struct bench *const b)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    struct attn_check check;
    params.q_dtype = params.kv_dtype = b->dims.dtype;
    params.batch = b->batch;
    params.num_q_heads = b->dims.num_q_heads;
    params.num_kv_heads = b->dims.num_kv_heads;
    params.head_dim = b->dims.head_dim;
    params.q_stride = (int64_t) b->dims.num_q_heads * b->dims.head_dim;
    params.page_size = b->dims.block_size;
    params.num_pages = PATTERNS;
    params.max_pages_per_seq = b->dims.num_blocks / b->batch;
    params.q = b->q;
    params.k_pool = b->patterns;
    params.v_pool = b->patterns + count_elements(b) / 2;
    params.k_page_stride = params.v_page_stride = count_elements(b);
    params.k_token_stride = params.v_token_stride = b->dims.head_dim;
    params.k_head_stride = params.v_head_stride = (int64_t) b->dims.block_size * b->dims.head_dim;
    params.block_table = b->pattern_lists;
    params.seq_lens = b->lens;
    params.scale = 1.0f / sqrtf((float) b->dims.head_dim);
    show_progress("checking ...");
    if (attn_check_decode_head(&params, 0, 0, b->o, NULL, ATTN_CHECK_KERNEL, &check))
        return cli_fail("out of memory");
    b->max_ratio = check.max_ratio;
    if (check.failed)
        return cli_fail("%lld elements of the first call are beyond the error bound",
                        (long long) check.failed);
    return CLI_FINE;
}

// ---- the disk alone

// A file that is not read around the page cache is not to be found there either, so that it is its
// disk that is measured.
static void forget_pages(const struct bench *const b)
{
    if (!b->file || b->info.direct) return;
    const int fd = open(b->file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

struct disk {
    int fd;
    int64_t bytes, read_bytes;
    _Atomic int64_t next;
    _Atomic int failed;
};

static void *read_alone(void *const argument)
{
    struct disk *const disk = argument;
    const size_t bytes = (size_t) disk->read_bytes;
    void *const buffer = aligned_alloc(4096, bytes);
    if (!buffer) disk->failed = ENOMEM;
    // So that no read has to wait for a page.
    if (buffer) memset(buffer, 0, bytes);
    while (!disk->failed) {
        const int64_t at = atomic_fetch_add(&disk->next, disk->read_bytes);
        if (at >= disk->bytes) break;
        if (pread(disk->fd, buffer, bytes, at) < 0) disk->failed = errno;
    }
    free(buffer);
    return NULL;
}

static int64_t count_disk_bytes(const struct bench *const b)
{
    return b->info.file_bytes < DISK_TOTAL ? b->info.file_bytes : DISK_TOTAL;
}

// From its beginning on, with as many reads under way as the library has, each as large.
static int time_disk(const struct bench *const b, double *const us)
{
    struct disk disk = { .bytes = count_disk_bytes(b), .read_bytes = b->info.read_bytes };
    pthread_t threads[MAX_READERS];
    const int wanted = b->info.num_reads < MAX_READERS ? b->info.num_reads : MAX_READERS;
    int started = 0;
    forget_pages(b);
    disk.fd = open(b->file, O_RDONLY | O_CLOEXEC | (b->info.direct ? O_DIRECT : 0));
    if (disk.fd < 0) return cli_fail("%s cannot be read: %s", b->file, strerror(errno));
    const double start = bench_read_clock();
    while (started < wanted && !pthread_create(&threads[started], NULL, read_alone, &disk))
        started++;
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    *us = bench_read_clock() - start;
    close(disk.fd);
    if (disk.failed || !started)
        return cli_fail("%s cannot be read: %s", b->file, strerror(disk.failed));
    return CLI_FINE;
}

// ---- timing

static int time_steps(struct bench *const b)
{
    struct attn_swap_stats before = { .size = sizeof(before) };
    b->moved.size = sizeof(b->moved);
    show_progress("first step ...");
    int result = decode_step(b);
    if (!result) result = fetch_output(b, b->o);
    if (!result) result = check_output(b);
    if (result || attn_swap_get_stats(b->swap, &before) != ATTN_OK) return CLI_FAILED;
    for (int32_t i = 0; !result && i < b->steps; i++) {
        show_progress("step %d of %d", i + 1, b->steps);
        forget_pages(b);
        const double start = bench_read_clock();
        result = decode_step(b);
        b->samples[i] = bench_read_clock() - start;
        // By turns: others use the disk, too.
        if (!result && b->file) result = time_disk(b, &b->disk_samples[i]);
    }
    if (!result) result = fetch_output(b, b->again);
    if (result || attn_swap_get_stats(b->swap, &b->moved) != ATTN_OK) return CLI_FAILED;
    if (memcmp(b->o, b->again, b->q_bytes))
        return cli_fail("the timed steps gave other bits than the checked ones");
    b->moved.hits -= before.hits;
    b->moved.misses -= before.misses;
    b->moved.bytes_copied -= before.bytes_copied;
    b->moved.bytes_read -= before.bytes_read;
    b->moved.copies -= before.copies;
    b->moved.stalls -= before.stalls;
    b->moved.tiles -= before.tiles;
    b->median_us = bench_take_median(b->samples, b->steps);
    if (b->file)
        b->limit_gbs =
            (double) count_disk_bytes(b) / bench_take_median(b->disk_samples, b->steps) * 1e-3;
    return CLI_FINE;
}

// Of the last step: each has as many tiles.
static int write_timeline(struct bench *const b)
{
    const int64_t tiles = (int64_t) b->moved.tiles / b->steps;
    const int32_t count = tiles < b->trace_tiles ? (int32_t) tiles : b->trace_tiles;
    return timeline_write(b->timeline, b->swap, count, &b->hidden);
}

// ---- the link alone

// The fastest of some copies: the link is shared with whatever else the machine does.
static int time_link(struct bench *const b)
{
    size_t bytes = LINK_BYTES;
    void *to = NULL;
    double best = 0.0;
    if (bytes > (size_t) b->info.pool_bytes) bytes = (size_t) b->info.pool_bytes;
    show_progress("the link ...");
    int code = gpu_alloc(b->gpu, &to, bytes);
    for (int i = 0; !code && i < LINK_SAMPLES; i++) {
        const size_t places = (size_t) b->info.pool_bytes / bytes;
        const double start = bench_read_clock();
        code = gpu_upload(b->gpu, to, b->pool + (size_t) i % places * bytes, bytes);
        const double us = bench_read_clock() - start;
        if (best == 0.0 || us < best) best = us;
    }
    gpu_free(b->gpu, to);
    if (code) return fail_driver(code);
    b->limit_gbs = (double) bytes / best * 1e-3;
    return CLI_FINE;
}

// ---- results

// Of a step.
static double count_attended(const struct bench *const b)
{
    return (double) b->dims.num_layers * b->batch * (b->dims.num_blocks / b->batch) *
           (double) count_elements(b) * 2.0;
}

static double count_moved(const struct bench *const b)
{
    return (double) (b->file ? b->moved.bytes_read : b->moved.bytes_copied) / b->steps;
}

static double get_gbs(const double bytes, const double us)
{
    return us > 0.0 ? bytes / us * 1e-3 : 0.0;
}

static void print_table(const struct bench *const b)
{
    const double moved = get_gbs(count_moved(b), b->median_us);
    printf("device    %s\n", b->device_name);
    if (!b->gpu) printf("          these are times of the host executor, not of a kernel\n");
    printf("library   %s, commit %s\n", attn_version(), ATTN_BUILD_COMMIT);
    printf("cache     %.2f GB in %s, %.2f GB of slots; tiles of %d blocks, %d planes\n",
           1e-9 * (double) b->dims.num_layers * b->dims.num_blocks * (double) b->info.block_bytes,
           b->file ? "a file" : "host memory",
           1e-9 * (double) b->dims.resident_blocks * (double) b->info.block_bytes,
           b->info.tile_blocks, b->info.num_planes);
    printf("backend   %s%s; %.1f MB on the host beside the pool, %.1f MB on the device\n",
           b->info.backend, b->info.direct ? ", without the page cache" : "",
           1e-6 * (double) b->info.host_bytes, 1e-6 * (double) b->info.device_bytes);
    printf("shape     %s, heads %d/%d, dim %d, block %d; %d layers, %d sequences of %d tokens\n",
           attn_dtype_name(b->dims.dtype), b->dims.num_q_heads, b->dims.num_kv_heads,
           b->dims.head_dim, b->dims.block_size, b->dims.num_layers, b->batch, b->lens[0]);
    printf("step      %.2f ms (%.2f .. %.2f), all layers, at %.2f of the error bound\n",
           1e-3 * b->median_us, 1e-3 * b->samples[0], 1e-3 * b->samples[b->steps - 1],
           b->max_ratio);
    printf("attended  %.2f GB/s\n", get_gbs(count_attended(b), b->median_us));
    printf("%s    %.2f GB/s, of %.2f GB a step in %.0f copies", b->file ? "read  " : "copied",
           moved, 1e-9 * count_moved(b), (double) b->moved.copies / b->steps);
    if (b->file) printf(", %.0f waits", (double) b->moved.stalls / b->steps);
    printf("\nresident  %.1f %% of the blocks that were listed\n",
           100.0 * (double) b->moved.hits / (double) (b->moved.hits + b->moved.misses));
    if (b->timeline)
        printf("hidden    %.1f %% of the time of computing under copies; %s shows them\n",
               100.0 * b->hidden, b->timeline);
    if (b->limit_gbs > 0.0)
        printf("%s      %.2f GB/s in the same run: %.1f %% of it\n", b->file ? "disk" : "link",
               b->limit_gbs, 100.0 * moved / b->limit_gbs);
    if (b->file)
        printf("          both with up to %d reads of %lld bytes under way\n", b->info.num_reads,
               (long long) b->info.read_bytes);
}

static json_t *describe(const struct bench *const b)
{
    const double moved = get_gbs(count_moved(b), b->median_us);
    const double share = b->limit_gbs > 0.0 ? moved / b->limit_gbs : 0.0;
    json_t *const all = json_pack(
        "{s:s, s:s, s:b, s:s, s:s, s:s, s:b, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
        "op", "swap", "device", b->device_name, "host_executor", b->gpu == NULL, "library",
        attn_version(), "commit", ATTN_BUILD_COMMIT, "backend", b->info.backend, "direct",
        b->info.direct, "num_layers", (int) b->dims.num_layers, "num_blocks",
        (int) b->dims.num_blocks, "batch", (int) b->batch, "num_q_heads", (int) b->dims.num_q_heads,
        "num_kv_heads", (int) b->dims.num_kv_heads, "head_dim", (int) b->dims.head_dim,
        "block_size", (int) b->dims.block_size, "resident_blocks", (int) b->dims.resident_blocks,
        "tile_blocks", (int) b->info.tile_blocks, "num_planes", (int) b->info.num_planes);
    json_object_set_new(all, "us", cli_json_real(b->median_us));
    json_object_set_new(all, "bytes_attended", cli_json_real(count_attended(b)));
    json_object_set_new(all, "bytes_moved", cli_json_real(count_moved(b)));
    json_object_set_new(all, "attended_gbs",
                        cli_json_real(get_gbs(count_attended(b), b->median_us)));
    json_object_set_new(all, "moved_gbs", cli_json_real(moved));
    json_object_set_new(all, "limit_gbs",
                        b->limit_gbs > 0.0 ? json_real(b->limit_gbs) : json_null());
    json_object_set_new(all, "limit_share", share > 0.0 ? json_real(share) : json_null());
    json_object_set_new(all, "num_reads", json_integer(b->info.num_reads));
    json_object_set_new(all, "read_bytes", json_integer((json_int_t) b->info.read_bytes));
    json_object_set_new(all, "copies", json_integer((json_int_t) b->moved.copies / b->steps));
    json_object_set_new(all, "hits", json_integer((json_int_t) b->moved.hits / b->steps));
    json_object_set_new(all, "misses", json_integer((json_int_t) b->moved.misses / b->steps));
    json_object_set_new(all, "stalls", json_integer((json_int_t) b->moved.stalls / b->steps));
    json_object_set_new(all, "tiles", json_integer((json_int_t) b->moved.tiles / b->steps));
    if (b->timeline) json_object_set_new(all, "compute_hidden_share", cli_json_real(b->hidden));
    json_object_set_new(all, "host_bytes", json_integer((json_int_t) b->info.host_bytes));
    json_object_set_new(all, "device_bytes", json_integer((json_int_t) b->info.device_bytes));
    json_object_set_new(all, "bound_share", cli_json_real(b->max_ratio));
    return all;
}

// ---- the command

static int place_tensors(struct bench *const b)
{
    if (!b->gpu) {
        b->device_q = aligned_alloc(64, (b->q_bytes + 63) / 64 * 64);
        b->device_o = aligned_alloc(64, (b->q_bytes + 63) / 64 * 64);
        if (!b->device_q || !b->device_o) return cli_fail("out of memory");
        memcpy(b->device_q, b->q, b->q_bytes);
        return CLI_FINE;
    }
    int code = gpu_describe(b->gpu, &b->found);
    if (!code) code = gpu_stream_create(b->gpu, &b->stream);
    if (!code) code = gpu_alloc(b->gpu, &b->device_q, b->q_bytes);
    if (!code) code = gpu_alloc(b->gpu, &b->device_o, b->q_bytes);
    if (!code) code = gpu_upload(b->gpu, b->device_q, b->q, b->q_bytes);
    return code ? fail_driver(code) : CLI_FINE;
}

static void free_bench(struct bench *const b)
{
    const bool made = b->swap != NULL;
    attn_swap_destroy(&b->swap);
    if (made && b->file) unlink(b->file);
    if (b->pool) munmap(b->pool, (size_t) b->info.pool_bytes);
    if (b->gpu) {
        gpu_stream_destroy(b->gpu, b->stream);
        gpu_free(b->gpu, b->device_q);
        gpu_free(b->gpu, b->device_o);
    } else {
        free(b->device_q);
        free(b->device_o);
    }
    free(b->patterns);
    free(b->lens);
    free(b->lists);
    free(b->pattern_lists);
    free(b->q);
    free(b->o);
    free(b->again);
}

// How many blocks and slots the gigabytes are.
static int find_counts(struct bench *const b)
{
    const bool small = b->kind == CLI_DEVICE_HOST;
    const double host = b->host_gb > 0.0f ? b->host_gb : small ? 0.02 : 32.0;
    const double resident = b->resident_gb > 0.0f ? b->resident_gb : small ? 0.005 : 2.0;
    const double stripe = (double) b->dims.block_size * b->dims.head_dim * 2.0;
    const double padded = b->file ? ceil(stripe / 4096.0) * 4096.0 : stripe;
    const double block = padded * 2.0 * b->dims.num_kv_heads;
    const double blocks = floor(host * 1e9 / block / b->dims.num_layers);
    const double slots = floor(resident * 1e9 / block);
    if (blocks < b->batch || blocks * b->dims.num_layers > INT32_MAX || slots > INT32_MAX ||
        blocks / b->batch * b->dims.block_size > INT32_MAX)
        return cli_usage("bench",
                         "--host-gb is %g: with blocks of %.0f bytes these are %.0f for each of %d "
                         "layers, and %d sequences want at least one each, of fewer than 2^31 "
                         "tokens",
                         host, block, blocks, b->dims.num_layers, b->batch);
    b->dims.num_blocks = (int32_t) blocks;
    b->dims.resident_blocks = (int32_t) slots;
    b->dims.max_seqs = b->batch;
    return attn_swap_validate(&b->dims) == ATTN_OK ? CLI_FINE
                                                   : cli_usage("bench", "%s", attn_last_error());
}

static int run_bench(struct bench *const b)
{
    struct attn_device_info info = { .size = sizeof(info) };
    int result = find_counts(b);
    if (!result) result = cli_open_device(b->kind, NULL, &b->device, &b->gpu);
    if (result) return result;
    attn_device_describe(b->device, &info);
    memcpy(b->device_name, info.name, sizeof(b->device_name));
    result = make_inputs(b);
    if (!result) result = place_tensors(b);
    if (!result) result = open_cache(b);
    if (!result) result = fill_cache(b);
    if (!result) result = time_steps(b);
    if (!result && b->timeline) result = write_timeline(b);
    // Of the disk it is known by now; on the host executor from memory there is none.
    if (!result && b->gpu && !b->file) result = time_link(b);
    cli_progress(NULL);
    if (!result && b->as_json) result = cli_print_json(describe(b));
    if (!result && !b->as_json) print_table(b);
    free_bench(b);
    cli_close_device(&b->device, &b->gpu);
    return result;
}

static int read_heads(struct bench *const b)
{
    char q[16], *const cut = strchr(optarg, '/');
    int64_t q_heads, kv_heads;
    const size_t length = cut ? (size_t) (cut - optarg) : 0;
    if (!cut || length >= sizeof(q))
        return cli_usage("bench", "--heads is '%s'; Q/KV is needed, as in 32/8", optarg);
    memcpy(q, optarg, length);
    q[length] = 0;
    if (!cli_read_int(q, 1, INT32_MAX, &q_heads) || !cli_read_int(cut + 1, 1, INT32_MAX, &kv_heads))
        return cli_usage("bench", "--heads is '%s'; Q/KV is needed, as in 32/8", optarg);
    b->dims.num_q_heads = (int32_t) q_heads;
    b->dims.num_kv_heads = (int32_t) kv_heads;
    return CLI_FINE;
}

static int read_gb(const char *const name, float *const gb)
{
    if (cli_read_float(optarg, gb) && *gb > 0.0f) return CLI_FINE;
    return cli_usage("bench", "--%s is '%s'; a number above 0 is needed", name, optarg);
}

static int read_number(const char *const name, const int32_t most, int32_t *const number)
{
    return shape_read_number("bench", name, optarg, 1, most, number);
}

static int read_reader(struct bench *const b)
{
    static const char *const names[] = { "auto", "uring", "threads" };
    for (int i = 0; i < 3; i++) {
        if (strcmp(optarg, names[i])) continue;
        b->reader = (enum attn_swap_reader) i;
        return CLI_FINE;
    }
    return cli_usage("bench", "--reader is '%s'; it is auto, uring or threads", optarg);
}

static int read_option(struct bench *const b, const int option)
{
    const int32_t any = INT32_MAX;
    switch (option) {
    case 'a': return read_gb("host-gb", &b->host_gb);
    case 'r': return read_gb("resident-gb", &b->resident_gb);
    case 'f': b->file = optarg; return CLI_FINE;
    case 'R': return read_reader(b);
    case 'H': return read_heads(b);
    case 'd': return read_number("dim", any, &b->dims.head_dim);
    case 'b': return read_number("block", any, &b->dims.block_size);
    case 'l': return read_number("layers", any, &b->dims.num_layers);
    case 'B': return read_number("batch", any, &b->batch);
    case 't': return read_number("tile-blocks", any, &b->dims.tile_blocks);
    case 'p': return read_number("planes", any, &b->dims.num_planes);
    case 's': return read_number("steps", MAX_STEPS, &b->steps);
    case 'T': b->timeline = optarg; return CLI_FINE;
    case 'j': b->as_json = true; return CLI_FINE;
    case 'D':
        if (cli_read_device(optarg, &b->kind) && b->kind != CLI_DEVICE_AUTO) return CLI_FINE;
        return cli_usage("bench", "--device is '%s'; it is gpu or host", optarg);
    default: return cli_usage("bench", "that option is not known, or lacks its value");
    }
}

int bench_swap(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "batch", required_argument, NULL, 'B' },
        { "block", required_argument, NULL, 'b' },
        { "device", required_argument, NULL, 'D' },
        { "dim", required_argument, NULL, 'd' },
        { "file", required_argument, NULL, 'f' },
        { "heads", required_argument, NULL, 'H' },
        { "help", no_argument, NULL, 'h' },
        { "host-gb", required_argument, NULL, 'a' },
        { "json", no_argument, NULL, 'j' },
        { "layers", required_argument, NULL, 'l' },
        { "planes", required_argument, NULL, 'p' },
        { "reader", required_argument, NULL, 'R' },
        { "resident-gb", required_argument, NULL, 'r' },
        { "steps", required_argument, NULL, 's' },
        { "tile-blocks", required_argument, NULL, 't' },
        { "timeline", required_argument, NULL, 'T' },
        { NULL, 0, NULL, 0 },
    };
    struct bench bench = { .kind = CLI_DEVICE_GPU, .batch = 8, .steps = 5 };
    int option, result = CLI_FINE;
    bench.dims = (struct attn_swap_dims) ATTN_SWAP_DIMS_INIT;
    bench.dims.num_layers = 32;
    bench.dims.num_q_heads = 32;
    bench.dims.num_kv_heads = 8;
    bench.dims.head_dim = 128;
    bench.dims.block_size = 16;
    while (!result && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&bench, option);
    }
    if (!result && optind < argc)
        result = cli_usage("bench", "'%s' is one argument too many", argv[optind]);
    return result ? result : run_bench(&bench);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Files of the swap engine: the format of include/attn/swap.h byte by byte, what is refused and
// left as it is, faults of the disk injected under the engine, and programs that are killed.
#include "attn/attn.h"
#include "support/swap_case.h"
#include "swap.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096

static struct swap_case c;
static struct attn_swap *swap;
static char path[SWAP_PATH_SIZE];

// ---- a disk with faults

static struct {
    // The table beneath.
    const struct attn_swap_io *real;
    // The n-th read that is waited for, from 1, gives this instead: an error, or at most so many
    // bytes. 0: none.
    int read_at;
    int64_t read_result;
    // The n-th write, sync; the error. Also of making the file larger, of starting the reader, of
    // submitting, of the file's size.
    int write_at, write_error, sync_at, sync_error, grow_error, start_error, submit_at,
        submit_error, size_error;
    // After so many writes and syncs nothing is done any more, as if the program had been killed:
    // half of the write at that point is. -1: never.
    int die_at;
    // Every read takes so long.
    long wait_ns;
    int reads, writes, syncs, submits, changes;
} disk;

static int disk_open(struct attn_swap_file **const file, const char *const name, const bool create)
{
    return disk.real->open(file, name, create);
}

static void disk_close(struct attn_swap_file *const file)
{
    disk.real->close(file);
}

static int64_t disk_size(struct attn_swap_file *const file)
{
    return disk.size_error ? -disk.size_error : disk.real->size(file);
}

static int disk_grow(struct attn_swap_file *const file, const int64_t bytes)
{
    return disk.grow_error ? -disk.grow_error : disk.real->grow(file, bytes);
}

static int disk_remove(const char *const name)
{
    return disk.real->remove(name);
}

static int64_t disk_read(struct attn_swap_file *const file, void *const to, const int64_t bytes,
                         const int64_t offset)
{
    return disk.real->read(file, to, bytes, offset);
}

static int64_t disk_write(struct attn_swap_file *const file, const void *const from,
                          const int64_t bytes, const int64_t offset)
{
    if (++disk.writes == disk.write_at) return -disk.write_error;
    const int change = disk.changes++;
    if (disk.die_at >= 0 && change > disk.die_at) return bytes;
    if (disk.die_at >= 0 && change == disk.die_at)
        return disk.real->write(file, from, bytes / 2, offset) < 0 ? -EIO : bytes;
    return disk.real->write(file, from, bytes, offset);
}

static int disk_sync(struct attn_swap_file *const file)
{
    if (++disk.syncs == disk.sync_at) return -disk.sync_error;
    disk.changes++;
    return disk.real->sync(file);
}

static int disk_start(struct attn_swap_file *const file,
                      const struct attn_swap_buffers *const buffers, bool *const direct)
{
    return disk.start_error ? -disk.start_error : disk.real->start(file, buffers, direct);
}

static int disk_submit(struct attn_swap_file *const file, const int32_t buffer, const int64_t bytes,
                       const int64_t offset)
{
    if (++disk.submits == disk.submit_at) return -disk.submit_error;
    return disk.real->submit(file, buffer, bytes, offset);
}

static int64_t disk_wait(struct attn_swap_file *const file, const int32_t buffer,
                         bool *const stalled)
{
    const struct timespec time = { .tv_nsec = disk.wait_ns };
    int64_t got = disk.real->wait(file, buffer, stalled);
    if (disk.wait_ns) nanosleep(&time, NULL);
    if (disk.wait_ns) *stalled = true;
    if (++disk.reads != disk.read_at) return got;
    if (disk.read_result < 0) return disk.read_result;
    // What a short read has not brought is not there.
    const int64_t less = disk.read_result < got ? disk.read_result : got;
    memset(swap->staging.buffers.memory + buffer * swap->staging.buffers.bytes + less, 0xEE,
           (size_t) (got - less));
    return less;
}

// Reads that were submitted when each tile was computed.
static int num_steps, submitted_at[64];

static enum attn_status count_step(struct attn_tiled *const tiled,
                                   const struct attn_tiled_step_params *const params,
                                   const attn_stream stream)
{
    submitted_at[num_steps++ % 64] = disk.submits;
    return attn_tiled_step_tile(tiled, params, stream);
}

static const struct attn_swap_compute counting = {
    .create = attn_tiled_create,
    .destroy = attn_tiled_destroy,
    .begin_step = attn_tiled_begin_step,
    .step_tile = count_step,
    .finalize = attn_tiled_finalize,
};

static const struct attn_swap_io faulty = {
    .name = "faulty",
    .open = disk_open,
    .close = disk_close,
    .size = disk_size,
    .grow = disk_grow,
    .remove = disk_remove,
    .read = disk_read,
    .write = disk_write,
    .sync = disk_sync,
    .start = disk_start,
    .submit = disk_submit,
    .wait = disk_wait,
};

static void repair(void)
{
    memset(&disk, 0, sizeof(disk));
    disk.real = &attn_swap_io_threads;
    disk.die_at = -1;
}

// ---- files

static void set_up(void)
{
    swap_path_make(path);
    repair();
    const struct attn_swap_dims dims = swap_dims_make();
    swap_case_init(&c, &dims, 1);
}

static void tear_down(void)
{
    attn_swap_destroy(&swap);
    swap_case_free(&c);
    swap_path_remove(path);
}

TestSuite(swap_file, .init = set_up, .fini = tear_down);

static enum attn_status try_open(const struct attn_swap_dims *const dims,
                                 const enum attn_swap_open mode)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    params.backing = ATTN_SWAP_FILE;
    params.dims = dims;
    params.path = path;
    params.open = mode;
    params.staging_bytes = 5 * 8192;
    return attn_swap_create_with(&swap, c.host, &params, &faulty, &counting);
}

static void need_open(void)
{
    cr_assert_eq(try_open(&c.dims, ATTN_SWAP_OPEN_OR_CREATE), ATTN_OK, "%s", attn_last_error());
}

static unsigned char *load(size_t *const bytes)
{
    struct stat found;
    const int fd = open(path, O_RDONLY);
    cr_assert(fd >= 0 && !fstat(fd, &found));
    *bytes = (size_t) found.st_size;
    unsigned char *const content = malloc(*bytes + 1);
    cr_assert(content && read(fd, content, *bytes) == (ssize_t) *bytes);
    close(fd);
    return content;
}

static void store(const void *const from, const size_t bytes, const int64_t offset)
{
    const int fd = open(path, O_WRONLY | O_CREAT, 0600);
    cr_assert(fd >= 0 && pwrite(fd, from, bytes, offset) == (ssize_t) bytes);
    close(fd);
}

// ---- the format

static uint64_t take(const unsigned char *const from, const int bytes)
{
    uint64_t value = 0;
    memcpy(&value, from, (size_t) bytes);
    return value;
}

static uint64_t hash(uint64_t state, const unsigned char *const from, const size_t count)
{
    for (size_t i = 0; i < count; i++) state = (state ^ from[i]) * 1099511628211u;
    return state;
}

Test(swap_file, has_the_format_that_the_header_describes)
{
    size_t bytes;
    need_open();
    swap_case_write(&c, swap, 1, 3, 0, 4);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK, "%s", attn_last_error());
    unsigned char *const file = load(&bytes);
    const uint64_t start = 14695981039346656037u;
    // Of two bytes an element: 16 x 5 rows of 64 in a stripe of 4096.
    static const uint32_t words[] = { 1, 0x01020304, 4096, ATTN_DTYPE_BF16, 2, 23, 2, 64, 5, 0 };
    static const uint64_t longs[] = { 4096, 12288, 4096, 20480, 20480 + 46 * 4 * 4096 };
    cr_expect_eq(memcmp(file, "ATTNSWAP", 8), 0);
    for (int i = 0; i < 10; i++) cr_expect_eq(take(file + 8 + 4 * i, 4), words[i], "word %d", i);
    for (int i = 0; i < 5; i++) cr_expect_eq(take(file + 48 + 8 * i, 8), longs[i], "long %d", i);
    cr_expect_eq(bytes, longs[4]);
    const uint64_t checksum = take(file + 88, 8);
    memset(file + 88, 0, 8);
    cr_expect_eq(checksum, hash(start, file, 4096));
    for (int i = 96; i < PAGE; i++) cr_assert_eq(file[i], 0);
    // The second commit, after that of the empty file: record and index 0.
    const unsigned char *const record = file + PAGE, *const index = file + 12288;
    cr_expect_eq(memcmp(record, "ATTNCMIT", 8), 0);
    cr_expect_eq(take(record + 8, 8), 2);
    const uint64_t zero = 0;
    cr_expect_eq(take(record + 16, 8),
                 hash(hash(start, index, PAGE), (const unsigned char *) &zero, 8));
    cr_expect_eq(take(record + 24, 8), hash(start, record, 24));
    cr_expect_eq(take(file + 2 * PAGE + 8, 8), 1);
    for (int i = 0; i < 46; i++) cr_expect_eq(take(index + 4 * i, 4), i == 26 ? 4 : 0);
    for (int v = 0; v < 2; v++)
        for (int head = 0; head < 2; head++) {
            const unsigned char *const stripe = file + 20480 + (26 * 4 + v * 2 + head) * 4096;
            cr_expect_eq(memcmp(stripe, swap_case_rows(&c, 1, 3, v, head, 0), 4 * 128), 0);
            for (int i = 4 * 128; i < 4096; i++) cr_assert_eq(stripe[i], 0);
        }
    free(file);
}

Test(swap_file, opens_again)
{
    need_open();
    swap_case_write_all(&c, swap);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK, "%s", attn_last_error());
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    cr_expect_eq(disk.syncs, 5, "a flush of nothing is none");
    cr_assert_eq(attn_swap_invalidate(swap, 0, 7, 3), ATTN_OK);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    // Not acknowledged.
    cr_assert_eq(attn_swap_invalidate(swap, 0, 8, 0), ATTN_OK);
    attn_swap_destroy(&swap);
    cr_assert_eq(try_open(&c.dims, ATTN_SWAP_OPEN), ATTN_OK, "%s", attn_last_error());
    cr_expect_eq(attn_swap_tokens(swap, 0, 7), 3);
    cr_expect_eq(attn_swap_tokens(swap, 0, 8), 5);
    struct swap_batch batch = swap_batch_range(&c, 1, 0, 23);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    // And once more, after more.
    swap_case_write(&c, swap, 1, 22, 0, 5);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    attn_swap_destroy(&swap);
    need_open();
    cr_expect(swap_case_agrees(&c, swap, &batch));
    const char *reason;
    // On all other kinds of readers.
    static const enum attn_swap_reader readers[] = { ATTN_SWAP_READER_AUTO, ATTN_SWAP_READER_URING,
                                                     ATTN_SWAP_READER_THREADS };
    for (size_t i = 0; i < 3; i++) {
        struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
        struct attn_swap_info info = { .size = sizeof(info) };
        attn_swap_destroy(&swap);
        params.backing = ATTN_SWAP_FILE;
        params.dims = &c.dims;
        params.path = path;
        params.reader = readers[i];
        const enum attn_status status = attn_swap_create(&swap, c.host, &params);
        if (!attn_swap_io_uring(&reason) && readers[i] == ATTN_SWAP_READER_URING) {
            cr_expect_eq(status, ATTN_ERROR_UNSUPPORTED);
            continue;
        }
        cr_assert_eq(status, ATTN_OK, "%s", attn_last_error());
        attn_swap_describe(swap, &info);
        cr_expect_str_eq(info.backend, i == 0   ? attn_swap_file_backend()
                                       : i == 1 ? "io_uring"
                                                : "threads");
        cr_expect(swap_case_agrees(&c, swap, &batch), "%s", info.backend);
    }
    swap_batch_free(&batch);
}

// ---- what reads

// From now on the kernel refuses this process a system call, as policies of containers do: that of
// `number`, if `flags` are among its third argument.
static void refuse_call(const uint32_t number, const uint32_t flags, const int error)
{
    struct sock_filter lines[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, flags, 0, flags ? 1 : 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t) error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = { sizeof(lines) / sizeof(lines[0]), lines };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        cr_skip_test("this process may not set a filter");
}

// Numbers that are the same on every machine.
enum {
    URING_SETUP = 425,
    URING_ENTER,
    URING_REGISTER,
};

static void refuse_uring(const int error)
{
    refuse_call(URING_SETUP, 0, error);
}

static enum attn_status try_reader(const enum attn_swap_reader reader)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    params.backing = ATTN_SWAP_FILE;
    params.dims = &c.dims;
    params.path = path;
    params.reader = reader;
    attn_swap_destroy(&swap);
    return attn_swap_create(&swap, c.host, &params);
}

// AUTO takes threads, and gives the same bits; what asks for io_uring is told why there is none.
static void expect_threads(const char *const why)
{
    struct attn_swap_info info = { .size = sizeof(info) };
    cr_expect_str_eq(attn_swap_file_backend(), "threads");
    cr_expect_eq(try_reader(ATTN_SWAP_READER_URING), ATTN_ERROR_UNSUPPORTED);
    cr_expect(strstr(attn_last_error(), why), "'%s' is not in: %s", why, attn_last_error());
    cr_expect_neq(access(path, F_OK), 0, "a file was left");
    cr_assert_eq(try_reader(ATTN_SWAP_READER_AUTO), ATTN_OK, "%s", attn_last_error());
    attn_swap_describe(swap, &info);
    cr_expect_str_eq(info.backend, "threads");
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 1, 0, 23);
    cr_expect(swap_case_agrees(&c, swap, &batch));
    swap_batch_free(&batch);
}

Test(swap_file, takes_threads_where_the_kernel_refuses)
{
    const char *reason;
    refuse_uring(EPERM);
    attn_swap_io_uring(&reason);
    // Where there is no liburing the kernel is not asked.
    expect_threads(strstr(reason, "liburing")
                       ? reason
                       : "the kernel does not let this process use io_uring: Operation not "
                         "permitted (errno 1)");
}

Test(swap_file, takes_threads_where_the_kernel_has_none)
{
    const char *reason;
    refuse_uring(ENOSYS);
    attn_swap_io_uring(&reason);
    expect_threads(strstr(reason, "liburing") ? reason : "Function not implemented (errno 38)");
}

// It worked once, and not for this file: too many open rings.
Test(swap_file, takes_threads_where_a_ring_cannot_be_had)
{
    struct attn_swap_info info = { .size = sizeof(info) };
    const char *reason;
    if (!attn_swap_io_uring(&reason)) cr_skip_test("%s", reason);
    refuse_uring(EMFILE);
    cr_expect_str_eq(attn_swap_file_backend(), "io_uring");
    cr_expect_eq(try_reader(ATTN_SWAP_READER_URING), ATTN_ERROR_IO);
    cr_expect(strstr(attn_last_error(), "its reader (io_uring) cannot be started: Too many open"),
              "%s", attn_last_error());
    cr_expect_neq(access(path, F_OK), 0, "a file was left");
    cr_assert_eq(try_reader(ATTN_SWAP_READER_AUTO), ATTN_OK, "%s", attn_last_error());
    attn_swap_describe(swap, &info);
    cr_expect_str_eq(info.backend, "threads");
}

static void expect_bits(const enum attn_swap_reader reader, struct attn_swap_info *const info)
{
    cr_assert_eq(try_reader(reader), ATTN_OK, "%s", attn_last_error());
    attn_swap_describe(swap, info);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_draw(&c, 1, 4, 60);
    cr_expect(swap_case_agrees(&c, swap, &batch), "%s", info->backend);
    swap_batch_free(&batch);
}

// More than the limit of locked memory, say.
Test(swap_file, reads_into_buffers_that_are_not_registered)
{
    struct attn_swap_info info = { .size = sizeof(info) };
    const char *reason;
    if (!attn_swap_io_uring(&reason)) cr_skip_test("%s", reason);
    refuse_call(URING_REGISTER, 0, ENOMEM);
    expect_bits(ATTN_SWAP_READER_URING, &info);
    cr_expect_str_eq(info.backend, "io_uring");
}

// As file systems do that have to go by the page cache.
Test(swap_file, reads_through_the_page_cache_where_it_has_to)
{
    struct attn_swap_info info = { .size = sizeof(info) };
    const char *reason;
    refuse_call(SYS_openat, O_DIRECT, EINVAL);
    expect_bits(ATTN_SWAP_READER_THREADS, &info);
    cr_expect_eq(info.direct, 0);
    if (!attn_swap_io_uring(&reason)) return;
    expect_bits(ATTN_SWAP_READER_URING, &info);
    cr_expect_eq(info.direct, 0);
}

// Reads that the kernel does not take are errors, however many there are, and none comes later.
Test(swap_file, says_that_the_kernel_takes_no_reads)
{
    static const int errors[] = { ENOMEM, EAGAIN };
    const char *reason;
    bool same;
    if (!attn_swap_io_uring(&reason)) cr_skip_test("%s", reason);
    cr_assert_eq(try_reader(ATTN_SWAP_READER_URING), ATTN_OK, "%s", attn_last_error());
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    cr_assert(swap_case_agrees(&c, swap, &batch));
    for (int i = 0; i < 2; i++) {
        // The filter that was set last comes first where both have an error of their own.
        refuse_call(URING_ENTER, 0, errors[i]);
        for (int j = 0; j < 100; j++) {
            swap_case_write(&c, swap, 0, 3, 0, 5);
            cr_assert_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_IO);
            cr_assert(strstr(attn_last_error(), "reading "), "%s", attn_last_error());
            cr_assert(strstr(attn_last_error(), "(errno "), "%s", attn_last_error());
            cr_assert_eq(swap_stats(swap).resident, 0);
        }
    }
    swap_batch_free(&batch);
}

// What a plain reader has to do beside it, to be as fast.
Test(swap_file, says_how_much_it_reads_at_a_time)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap_info info = { .size = sizeof(info) };
    const char *reason;
    params.backing = ATTN_SWAP_FILE;
    params.dims = &c.dims;
    cr_assert_eq(attn_swap_sizes(&params, &info), ATTN_OK);
    cr_expect(info.num_reads == 64 && info.read_bytes == 512 << 10);
    cr_assert_eq(try_reader(ATTN_SWAP_READER_THREADS), ATTN_OK, "%s", attn_last_error());
    attn_swap_describe(swap, &info);
    cr_expect(info.num_reads == 16 && info.read_bytes == 512 << 10);
    if (attn_swap_io_uring(&reason)) {
        cr_assert_eq(try_reader(ATTN_SWAP_READER_URING), ATTN_OK, "%s", attn_last_error());
        attn_swap_describe(swap, &info);
        cr_expect(info.num_reads == 64 && info.read_bytes == 512 << 10);
    }
    attn_swap_destroy(&swap);
    params.staging_bytes = 5 * 8192;
    cr_assert_eq(attn_swap_sizes(&params, &info), ATTN_OK);
    cr_expect(info.num_reads == 2 && info.read_bytes == 20480);
    params.backing = ATTN_SWAP_HOST;
    params.staging_bytes = 0;
    cr_assert_eq(attn_swap_sizes(&params, &info), ATTN_OK);
    cr_expect(info.num_reads == 0 && info.read_bytes == 0);
}

// ---- what is refused

// Refused with a sentence, and the file stays what it was.
static void expect_refused(const struct attn_swap_dims *const dims, const char *const part)
{
    size_t before_bytes, after_bytes;
    unsigned char *const before = load(&before_bytes);
    const enum attn_status status = try_open(dims, ATTN_SWAP_OPEN_OR_CREATE);
    cr_expect_eq(status, ATTN_ERROR_INVALID, "%s: %s", part, attn_status_name(status));
    cr_expect_null(swap);
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect(strstr(attn_last_error(), path), "%s", attn_last_error());
    unsigned char *const after = load(&after_bytes);
    cr_expect(before_bytes == after_bytes && !memcmp(before, after, before_bytes), "%s", part);
    free(before);
    free(after);
}

static void make_file(void)
{
    need_open();
    swap_case_write_all(&c, swap);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    attn_swap_destroy(&swap);
}

Test(swap_file, refuses_what_it_does_not_know)
{
    static const char text[] = "Nothing that libattn has ever written.";
    const uint32_t other_order = 0x04030201, newer = 2;
    size_t bytes;
    store("", 0, 0);
    expect_refused(&c.dims, "is no swap file: it does not begin with ATTNSWAP");
    store(text, sizeof(text), 0);
    expect_refused(&c.dims, "is no swap file");
    unlink(path);
    make_file();
    unsigned char *const file = load(&bytes);
    store(&newer, 4, 8);
    expect_refused(&c.dims, "is a swap file of version 2, and this library knows version 1");
    store(file, PAGE, 0);
    store(&other_order, 4, 12);
    expect_refused(&c.dims, "of a machine with the other byte order");
    // Every byte of the header counts, and so does the padding behind it.
    for (int64_t i = 0; i < PAGE; i += i < 100 ? 1 : 173) {
        const unsigned char changed = file[i] ^ 0x10;
        store(file, PAGE, 0);
        store(&changed, 1, i);
        expect_refused(&c.dims, i < 8 ? "no swap file" : i < 12 ? "version" : "is damaged");
    }
    // A checksum that is right does not make blocks lie elsewhere.
    const uint64_t place = 24576, start = 14695981039346656037u;
    unsigned char page[PAGE];
    memcpy(page, file, PAGE);
    memcpy(page + 72, &place, 8);
    memset(page + 88, 0, 8);
    const uint64_t checksum = hash(start, page, PAGE);
    memcpy(page + 88, &checksum, 8);
    store(page, PAGE, 0);
    expect_refused(&c.dims, "its header places blocks where this geometry has none");
    store(file, PAGE, 0);
    disk.size_error = EIO;
    cr_expect_eq(try_open(&c.dims, ATTN_SWAP_OPEN), ATTN_ERROR_IO);
    cr_expect(strstr(attn_last_error(), "its end cannot be found: Input/output error"), "%s",
              attn_last_error());
    repair();
    cr_expect_eq(try_open(&c.dims, ATTN_SWAP_CREATE), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "is there already"), "%s", attn_last_error());
    need_open();
    free(file);
}

Test(swap_file, refuses_another_geometry)
{
    struct attn_swap_dims dims = c.dims;
    make_file();
#define OTHER(field, value, part) \
    do { \
        dims = c.dims; \
        dims.field = value; \
        expect_refused(&dims, part); \
    } while (0)
    OTHER(dtype, ATTN_DTYPE_FP16, "has dtype 1, and dims->dtype is 2: open it with its own");
    OTHER(num_layers, 3, "has num_layers 2, and dims->num_layers is 3");
    OTHER(num_blocks, 22, "has num_blocks 23, and dims->num_blocks is 22");
    OTHER(num_kv_heads, 4, "has num_kv_heads 2, and dims->num_kv_heads is 4");
    OTHER(head_dim, 128, "has head_dim 64, and dims->head_dim is 128");
    OTHER(block_size, 6, "has block_size 5, and dims->block_size is 6");
#undef OTHER
    // What is the call's own may differ.
    dims = c.dims;
    dims.max_seqs = 9;
    dims.num_q_heads = 8;
    dims.resident_blocks = 20;
    cr_expect_eq(try_open(&dims, ATTN_SWAP_OPEN), ATTN_OK, "%s", attn_last_error());
}

Test(swap_file, refuses_what_was_cut_off)
{
    size_t bytes;
    make_file();
    free(load(&bytes));
    static const int64_t cuts[] = { 1, 4096, 400000, 0 };
    for (int i = 0; cuts[i]; i++) {
        cr_assert_eq(truncate(path, (int64_t) bytes - cuts[i]), 0);
        expect_refused(&c.dims, "it was cut off");
    }
    static const int64_t left[] = { 12288, 4096, 100, 8, 3, 0 };
    for (int i = 0; i < 6; i++) {
        cr_assert_eq(truncate(path, left[i]), 0);
        // A header that lacks zeros alone is one.
        expect_refused(&c.dims, left[i] >= 100 ? "it was cut off"
                                : left[i] == 8 ? "is damaged"
                                               : "is no swap file");
    }
}

Test(swap_file, takes_the_other_commit_where_one_is_damaged)
{
    size_t bytes;
    make_file();
    need_open();
    cr_assert_eq(attn_swap_invalidate(swap, 0, 0, 1), ATTN_OK);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    attn_swap_destroy(&swap);
    unsigned char *const file = load(&bytes);
    // Commit 3, in record and index 1: any byte of either, and commit 2 is in force.
    static const int64_t places[] = { 8192, 8199, 8200, 8210, 8223, 16384, 16384 + 100, 20479 };
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        const unsigned char changed = file[places[i]] ^ 1;
        need_open();
        cr_expect_eq(attn_swap_tokens(swap, 0, 0), 1);
        attn_swap_destroy(&swap);
        store(&changed, 1, places[i]);
        need_open();
        cr_expect_eq(attn_swap_tokens(swap, 0, 0), 5, "byte %d", (int) places[i]);
        attn_swap_destroy(&swap);
        store(&file[places[i]], 1, places[i]);
    }
    // Both.
    const unsigned char first = file[4100] ^ 1, second = file[16400] ^ 1;
    store(&first, 1, 4100);
    store(&second, 1, 16400);
    expect_refused(&c.dims,
                   "is damaged: neither of its two indexes is what its commit record says");
    free(file);
}

Test(swap_file, is_open_once)
{
    struct attn_swap *const first = (need_open(), swap);
    swap = NULL;
    cr_expect_eq(try_open(&c.dims, ATTN_SWAP_OPEN), ATTN_ERROR_INVALID);
    cr_expect(strstr(attn_last_error(), "is open elsewhere"), "%s", attn_last_error());
    swap = first;
    attn_swap_destroy(&swap);
    need_open();
}

// ---- faults while a file is made

static void expect_no_file(const enum attn_status expected, const char *const part)
{
    cr_expect_eq(try_open(&c.dims, ATTN_SWAP_CREATE), expected, "%s", part);
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect(strstr(attn_last_error(), path), "%s", attn_last_error());
    cr_expect_neq(access(path, F_OK), 0, "%s: a file was left", part);
    repair();
}

Test(swap_file, leaves_no_half_made_file)
{
    disk.grow_error = ENOSPC;
    expect_no_file(ATTN_ERROR_IO, "there is no room for 774144 bytes: No space left on device");
    for (int i = 1; i <= 3; i++) {
        disk.write_at = i;
        disk.write_error = EIO;
        expect_no_file(ATTN_ERROR_IO, "writing 4096 bytes at offset");
        disk.sync_at = i;
        disk.sync_error = EIO;
        expect_no_file(ATTN_ERROR_IO, "the disk did not take what was written: Input/output error");
    }
    disk.start_error = EMFILE;
    expect_no_file(ATTN_ERROR_IO, "its reader (faulty) cannot be started: Too many open files");
    need_open();
}

// ---- faults of reads

// The batch fails once, with a sentence, and is right the next time; nothing counts as resident in
// between.
static void expect_failed_read(const struct swap_batch *const batch, const char *const part)
{
    bool same;
    cr_expect_eq(swap_case_run(&c, swap, batch, &same), ATTN_ERROR_IO, "%s", part);
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
    cr_expect(strstr(attn_last_error(), path), "%s", attn_last_error());
    cr_expect(strstr(attn_last_error(), "offset "), "%s", attn_last_error());
    cr_expect(strstr(attn_last_error(), "errno "), "%s", attn_last_error());
    cr_expect_eq(swap_stats(swap).resident, 0);
    repair();
    const uint64_t read = swap_stats(swap).bytes_read;
    cr_expect(swap_case_agrees(&c, swap, batch), "%s", part);
    cr_expect_gt(swap_stats(swap).bytes_read, read);
}

Test(swap_file, starts_clean_after_a_failed_read)
{
    need_open();
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 1, 2, 17);
    cr_assert(swap_case_agrees(&c, swap, &batch));
    for (int i = 1; i < 40; i++) {
        // What is written meanwhile is not hidden by what a failed call has left.
        swap_case_write(&c, swap, 1, 2 + i % 17, 0, 5);
        repair();
        disk.read_at = i;
        disk.read_result = -EIO;
        bool same;
        const enum attn_status status = swap_case_run(&c, swap, &batch, &same);
        if (disk.reads < i) {
            cr_expect(status == ATTN_OK && same);
            cr_expect_gt(i, 8);
            break;
        }
        cr_expect_eq(status, ATTN_ERROR_IO);
        disk.reads = 0;
        expect_failed_read(&batch, "failed: Input/output error (errno 5)");
    }
    repair();
    disk.submit_at = 3;
    disk.submit_error = ENOMEM;
    for (int32_t i = 2; i < 19; i++) cr_assert_eq(attn_swap_invalidate(swap, 1, i, 5), ATTN_OK);
    expect_failed_read(&batch, "Cannot allocate memory (errno 12)");
    swap_batch_free(&batch);
}

// A disk may give less than was asked for: the rest is fetched.
Test(swap_file, completes_short_reads)
{
    static const int64_t shorts[] = { 0, 1, 511, 4096, 8191 };
    need_open();
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 21);
    for (size_t i = 0; i < sizeof(shorts) / sizeof(shorts[0]); i++)
        for (int at = 1; at < 20; at += 4) {
            for (int32_t b = 0; b < 21; b++) cr_assert_eq(attn_swap_invalidate(swap, 0, b, 5), 0);
            repair();
            disk.read_at = at;
            disk.read_result = shorts[i];
            cr_expect(swap_case_agrees(&c, swap, &batch), "%d bytes of read %d", (int) shorts[i],
                      at);
            cr_expect_geq(disk.reads, at);
        }
    swap_batch_free(&batch);
}

Test(swap_file, notices_that_it_was_cut_off)
{
    size_t bytes;
    need_open();
    swap_case_write_all(&c, swap);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    struct swap_batch batch = swap_batch_range(&c, 1, 5, 18);
    unsigned char *const file = load(&bytes);
    for (int reader = 0; reader < 2; reader++) {
        cr_assert_eq(truncate(path, (int64_t) bytes - 5000), 0);
        bool same;
        cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_IO);
        cr_expect(strstr(attn_last_error(), "it ends at offset"), "%s", attn_last_error());
        cr_expect(strstr(attn_last_error(), "it was cut off"), "%s", attn_last_error());
        store(file, bytes, 0);
        cr_expect(swap_case_agrees(&c, swap, &batch));
        const char *reason;
        const struct attn_swap_io *const uring = attn_swap_io_uring(&reason);
        if (!uring || reader) break;
        attn_swap_destroy(&swap);
        disk.real = uring;
        need_open();
    }
    free(file);
    swap_batch_free(&batch);
}

Test(swap_file, waits_for_a_slow_disk)
{
    need_open();
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_draw(&c, 1, 4, 60);
    disk.wait_ns = 2000000;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_expect_eq(swap_stats(swap).stalls, (uint64_t) disk.reads);
    swap_batch_free(&batch);
}

// Reads of the next tile are under way when a tile is computed.
Test(swap_file, reads_ahead_of_tiles)
{
    struct attn_swap_create_params params = ATTN_SWAP_CREATE_PARAMS_INIT;
    params.backing = ATTN_SWAP_FILE;
    params.dims = &c.dims;
    params.path = path;
    cr_assert_eq(attn_swap_create_with(&swap, c.host, &params, &faulty, &counting), ATTN_OK);
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 23);
    // Each block is a read.
    for (int32_t i = 0; i < 23; i++) batch.blocks[i] = i * 7 % 23;
    cr_expect(swap_case_agrees(&c, swap, &batch));
    cr_assert_eq(num_steps, 8);
    for (int i = 0; i < 8; i++)
        cr_expect_geq(submitted_at[i], i < 6 ? 3 * (i + 2) : 23, "tile %d: %d", i + 1,
                      submitted_at[i]);
    swap_batch_free(&batch);
}

// ---- faults of writes

Test(swap_file, says_what_a_failed_write_leaves)
{
    static const int errors[] = { ENOSPC, EIO };
    need_open();
    swap_case_write_all(&c, swap);
    struct swap_batch batch = swap_batch_range(&c, 0, 0, 6);
    cr_assert(swap_case_agrees(&c, swap, &batch));
    for (int i = 0; i < 2; i++) {
        // From the third token on, in the third of four stripes: two are as they were.
        repair();
        disk.write_at = 3;
        disk.write_error = errors[i];
        cr_expect_eq(swap_case_send(&c, swap, 0, 2, 2, 3), ATTN_ERROR_IO);
        cr_expect(strstr(attn_last_error(), "writing 384 bytes at offset"), "%s",
                  attn_last_error());
        cr_expect(strstr(attn_last_error(), strerror(errors[i])), "%s", attn_last_error());
        cr_expect_eq(attn_swap_tokens(swap, 0, 2), 2);
        bool same;
        cr_expect_eq(swap_case_run(&c, swap, &batch, &same), ATTN_ERROR_INVALID);
        cr_expect(strstr(attn_last_error(), "it holds 2"), "%s", attn_last_error());
        swap_case_write(&c, swap, 0, 2, 2, 3);
        cr_expect(swap_case_agrees(&c, swap, &batch));
    }
    swap_batch_free(&batch);
}

Test(swap_file, acknowledges_nothing_that_failed)
{
    need_open();
    swap_case_write_all(&c, swap);
    cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
    swap_case_write(&c, swap, 0, 0, 0, 2);
    // Writes of the index and of the record: the next flush does it.
    for (int i = 1; i <= 2; i++) {
        repair();
        disk.write_at = i;
        disk.write_error = ENOSPC;
        cr_expect_eq(attn_swap_flush(swap), ATTN_ERROR_IO);
        cr_expect(strstr(attn_last_error(), "No space left"), "%s", attn_last_error());
    }
    repair();
    cr_expect_eq(attn_swap_flush(swap), ATTN_OK);
    attn_swap_destroy(&swap);
    need_open();
    cr_expect_eq(attn_swap_tokens(swap, 0, 0), 2);
    // A disk that has lost something: what it has is not known any more.
    swap_case_write(&c, swap, 0, 1, 0, 3);
    disk.sync_at = disk.syncs + 1;
    disk.sync_error = EIO;
    cr_expect_eq(attn_swap_flush(swap), ATTN_ERROR_IO);
    cr_expect(strstr(attn_last_error(), "the disk did not take"), "%s", attn_last_error());
    cr_expect_eq(attn_swap_flush(swap), ATTN_ERROR_IO);
    cr_expect(strstr(attn_last_error(), "has failed before to take"), "%s", attn_last_error());
    attn_swap_destroy(&swap);
    need_open();
    cr_expect_eq(attn_swap_tokens(swap, 0, 1), 5);
}

// ---- programs that are killed

#define APPENDS 120

// Append number n of a sequence that fills blocks of layer 1, some tokens at a time.
static void find_append(const int n, int32_t *const block, int32_t *const first,
                        int32_t *const count)
{
    static const int32_t counts[] = { 2, 1, 2 };
    *block = n / 3 % 23;
    *first = (int32_t[]){ 0, 2, 3 }[n % 3];
    *count = counts[n % 3];
}

static void append(const int n, const bool send)
{
    int32_t block, first, count;
    find_append(n, &block, &first, &count);
    swap_case_draw(&c, 1, block, first, count);
    if (send) cr_assert_eq(swap_case_send(&c, swap, 1, block, first, count), ATTN_OK);
}

// The file holds everything of the first `acknowledged` appends, which c.truth has.
static void expect_held(const int acknowledged, const char *const what)
{
    struct swap_batch batch = swap_batch_range(&c, 1, 0, 23);
    cr_assert_eq(try_open(&c.dims, ATTN_SWAP_OPEN), ATTN_OK, "%s: %s", what, attn_last_error());
    int32_t tokens = 0;
    for (int n = 0; n < acknowledged; n++) {
        int32_t block, first, count;
        find_append(n, &block, &first, &count);
        tokens = block * 5 + first + count;
        cr_expect_geq(attn_swap_tokens(swap, 1, block), first + count, "%s: append %d", what, n);
    }
    batch.lens[0] = tokens;
    cr_expect(swap_case_agrees(&c, swap, &batch), "%s: %d appends", what, acknowledged);
    attn_swap_destroy(&swap);
    swap_batch_free(&batch);
}

// Nothing reaches the file after change n, and half of that one does: what the last flush before
// it has acknowledged is there.
Test(swap_file, holds_what_was_flushed_wherever_it_stops)
{
    enum {
        MANY = 24
    };
    for (int die_at = 0, all = 1; die_at < all; die_at++) {
        int acknowledged = 0;
        swap_case_free(&c);
        const struct attn_swap_dims dims = swap_dims_make();
        swap_case_init(&c, &dims, 5);
        repair();
        unlink(path);
        need_open();
        disk.changes = 0;
        disk.die_at = die_at;
        for (int n = 0; n < MANY; n++) {
            append(n, true);
            if (n % 4 < 3) continue;
            cr_assert_eq(attn_swap_flush(swap), ATTN_OK);
            if (disk.changes <= die_at) acknowledged = n + 1;
        }
        all = disk.changes;
        attn_swap_destroy(&swap);
        repair();
        char what[32];
        snprintf(what, sizeof(what), "change %d of %d", die_at, all);
        expect_held(acknowledged, what);
    }
}

// Appends, flushes, and says so, until it is killed.
static void append_until_killed(const int to)
{
    need_open();
    for (int n = 0; n < APPENDS; n++) {
        append(n % 69, true);
        if (n % 2 && attn_swap_flush(swap) == ATTN_OK) {
            const int acknowledged = n + 1;
            if (write(to, &acknowledged, sizeof(acknowledged)) < 0) break;
        }
    }
    _exit(0);
}

Test(swap_file, holds_what_was_flushed_when_it_is_killed)
{
    struct random random = { random_seed(77) };
    for (int round = 0; round < 25; round++) {
        int ends[2], acknowledged = 0, heard;
        const struct attn_swap_dims dims = swap_dims_make();
        swap_case_free(&c);
        swap_case_init(&c, &dims, 100 + (uint64_t) round);
        unlink(path);
        need_open();
        attn_swap_destroy(&swap);
        cr_assert_eq(pipe(ends), 0);
        const pid_t child = fork();
        if (!child) {
            close(ends[0]);
            append_until_killed(ends[1]);
        }
        close(ends[1]);
        // At some point of its way through.
        const int stop = (int) random_below(&random, 34);
        while (acknowledged < 2 * stop && read(ends[0], &heard, sizeof(heard)) == sizeof(heard))
            acknowledged = heard;
        const struct timespec time = { .tv_nsec = random_below(&random, 500000) };
        nanosleep(&time, NULL);
        cr_assert_eq(kill(child, SIGKILL), 0);
        cr_assert_eq(waitpid(child, NULL, 0), child);
        while (read(ends[0], &heard, sizeof(heard)) == sizeof(heard)) acknowledged = heard;
        close(ends[0]);
        if (acknowledged > 69) continue;
        for (int n = 0; n < acknowledged; n++) append(n, false);
        expect_held(acknowledged, "killed");
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
// Paged decode as an engine calls it: four sequences of different lengths, their pages scattered
// over one pool, grouped query heads. `decode` runs on the host executor, `decode gpu` on GPU 0.
// Both print the first outputs of each sequence and hold every one against the mean it has to be.
//
// Build: cc decode.c $(pkg-config --cflags --libs attn) -ldl
#include <attn/attn.h>

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BATCH = 4,
    Q_HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    PAGE_SIZE = 16,
    TABLE_WIDTH = 8,
    NUM_PAGES = BATCH * TABLE_WIDTH,
};

// Memory that host and device both reach. An engine has device memory of its own and no need for
// this part; nor for the dlopen, if it is linked with the CUDA driver.
struct memory {
    void *driver;
    int (*alloc)(unsigned long long *pointer, size_t bytes, unsigned flags);
    int (*release)(unsigned long long pointer);
    int (*synchronize)(void);
};

// Sets the function pointer at `function` to what the driver exports as `name`.
static bool find(void *const driver, const char *const name, void *const function)
{
    void *const symbol = dlsym(driver, name);
    memcpy(function, &symbol, sizeof(symbol));
    return symbol;
}

// Makes the primary context of GPU 0 current, where ATTN_DEVICE_CURRENT will find it.
static bool open_gpu_memory(struct memory *const memory)
{
    void *const driver = memory->driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    void *context;
    return driver && find(driver, "cuInit", &init) &&
           find(driver, "cuDevicePrimaryCtxRetain", &retain) &&
           find(driver, "cuCtxSetCurrent", &set_current) &&
           find(driver, "cuMemAllocManaged", &memory->alloc) &&
           find(driver, "cuMemFree_v2", &memory->release) &&
           find(driver, "cuCtxSynchronize", &memory->synchronize) && !init(0) &&
           !retain(&context, 0) && !set_current(context);
}

// Zeroed, aligned to 256 bytes; NULL if there is none left.
static void *allocate(const struct memory *const memory, const size_t bytes)
{
    const size_t rounded = (bytes + 255) / 256 * 256;
    void *pointer = NULL;
    if (memory->driver) {
        const unsigned attach_global = 1;
        unsigned long long address;
        if (!memory->alloc(&address, rounded, attach_global))
            pointer = (void *) (uintptr_t) address;
    } else {
        pointer = aligned_alloc(256, rounded);
    }
    return pointer ? memset(pointer, 0, rounded) : NULL;
}

static void release(const struct memory *const memory, void *const pointer)
{
    if (!memory->driver)
        free(pointer);
    else if (pointer)
        memory->release((uintptr_t) pointer);
}

static uint16_t bf16_from_float(const float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t) ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float float_from_bf16(const uint16_t value)
{
    const uint32_t bits = (uint32_t) value << 16;
    float result;
    memcpy(&result, &bits, sizeof(result));
    return result;
}

struct buffers {
    uint16_t *q, *o, *k_pool, *v_pool;
    int32_t *block_table, *seq_lens;
    float *lse;
    int32_t *counters, *fault;
    void *workspace;
    size_t workspace_bytes;
};

// What sizes depend on; an engine fills this once, with the largest call that it will make.
static struct attn_decode_shape largest_shape(void)
{
    return (struct attn_decode_shape){
        .size = sizeof(struct attn_decode_shape),
        .q_dtype = ATTN_DTYPE_BF16,
        .kv_dtype = ATTN_DTYPE_BF16,
        .batch = BATCH,
        .q_len = 1,
        .num_q_heads = Q_HEADS,
        .num_kv_heads = KV_HEADS,
        .head_dim = DIM,
        .page_size = PAGE_SIZE,
        .max_pages_per_seq = TABLE_WIDTH,
    };
}

static bool allocate_buffers(struct buffers *const b, const struct memory *const memory,
                             const struct attn_device *const device)
{
    const struct attn_decode_shape shape = largest_shape();
    int32_t num_counters;
    if (attn_decode_workspace(device, &shape, &b->workspace_bytes) ||
        attn_decode_counters(device, &shape, &num_counters))
        return false;
    const size_t pool_elements = (size_t) NUM_PAGES * PAGE_SIZE * KV_HEADS * DIM;
    b->q = allocate(memory, BATCH * Q_HEADS * DIM * sizeof(*b->q));
    b->o = allocate(memory, BATCH * Q_HEADS * DIM * sizeof(*b->o));
    b->k_pool = allocate(memory, pool_elements * sizeof(*b->k_pool));
    b->v_pool = allocate(memory, pool_elements * sizeof(*b->v_pool));
    b->block_table = allocate(memory, BATCH * TABLE_WIDTH * sizeof(*b->block_table));
    b->seq_lens = allocate(memory, BATCH * sizeof(*b->seq_lens));
    b->lse = allocate(memory, BATCH * Q_HEADS * sizeof(*b->lse));
    b->fault = allocate(memory, sizeof(*b->fault));
    // Allocated even where their size is 0: allocate rounds up, and the library ignores them then.
    b->counters = allocate(memory, (size_t) num_counters * sizeof(*b->counters) + 1);
    b->workspace = allocate(memory, b->workspace_bytes + 1);
    return b->q && b->o && b->k_pool && b->v_pool && b->block_table && b->seq_lens && b->lse &&
           b->fault && b->counters && b->workspace;
}

static void release_buffers(const struct buffers *const b, const struct memory *const memory)
{
    release(memory, b->q);
    release(memory, b->o);
    release(memory, b->k_pool);
    release(memory, b->v_pool);
    release(memory, b->block_table);
    release(memory, b->seq_lens);
    release(memory, b->lse);
    release(memory, b->fault);
    release(memory, b->counters);
    release(memory, b->workspace);
}

// Sequence b has 1 + 40 * b keys. Keys are 0, so that every one weighs the same; the value of token
// t, in every dimension, is t modulo 8.
static void fill_buffers(const struct buffers *const b)
{
    for (int i = 0; i < BATCH * Q_HEADS * DIM; i++) b->q[i] = bf16_from_float(1.0f);
    for (int seq = 0; seq < BATCH; seq++) {
        b->seq_lens[seq] = 1 + 40 * seq;
        for (int column = 0; column < TABLE_WIDTH; column++)
            b->block_table[seq * TABLE_WIDTH + column] = (seq + column * BATCH) * 5 % NUM_PAGES;
        for (int t = 0; t < b->seq_lens[seq]; t++) {
            const size_t page = (size_t) b->block_table[seq * TABLE_WIDTH + t / PAGE_SIZE];
            uint16_t *const token = b->v_pool + (page * PAGE_SIZE + t % PAGE_SIZE) * KV_HEADS * DIM;
            for (int i = 0; i < KV_HEADS * DIM; i++) token[i] = bf16_from_float((float) (t % 8));
        }
    }
    *b->fault = INT32_MAX;
}

static enum attn_status decode(struct attn_device *const device, const struct buffers *const b)
{
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = ATTN_DTYPE_BF16;
    params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = BATCH;
    params.num_q_heads = Q_HEADS;
    params.num_kv_heads = KV_HEADS;
    params.head_dim = DIM;
    params.page_size = PAGE_SIZE;
    params.num_pages = NUM_PAGES;
    params.max_pages_per_seq = TABLE_WIDTH;
    params.q = b->q;
    params.o = b->o;
    params.k_pool = b->k_pool;
    params.v_pool = b->v_pool;
    params.block_table = b->block_table;
    params.seq_lens = b->seq_lens;
    params.lse = b->lse;
    params.scale = 1.0f / sqrtf(DIM);
    params.workspace = b->workspace;
    params.workspace_bytes = b->workspace_bytes;
    params.counters = b->counters;
    params.fault = b->fault;
    return attn_decode(device, &params, NULL);
}

// Means and the logarithm of the number of keys: within BF16's rounding, everywhere.
static bool report(const struct buffers *const b)
{
    bool right = *b->fault == INT32_MAX;
    for (int seq = 0; seq < BATCH; seq++) {
        const int len = b->seq_lens[seq];
        float mean = 0.0f;
        for (int t = 0; t < len; t++) mean += (float) (t % 8) / (float) len;
        const uint16_t *const o = b->o + (size_t) seq * Q_HEADS * DIM;
        for (int i = 0; i < Q_HEADS * DIM; i++)
            right = right && fabsf(float_from_bf16(o[i]) - mean) <= 0.01f * mean;
        for (int head = 0; head < Q_HEADS; head++)
            right = right && fabsf(b->lse[seq * Q_HEADS + head] - logf((float) len)) < 1e-3f;
        printf("sequence %d: %3d keys, o = %.4f %.4f %.4f ..., mean %.4f, lse %.4f\n", seq, len,
               float_from_bf16(o[0]), float_from_bf16(o[1]), float_from_bf16(o[2]), mean,
               b->lse[seq * Q_HEADS]);
    }
    printf("%s\n", right ? "every output is right" : "an output is wrong");
    return right;
}

static int fail(const char *const sentence)
{
    fprintf(stderr, "decode: %s\n", sentence);
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    const bool on_gpu = argc == 2 && !strcmp(argv[1], "gpu");
    if (argc > 1 && !on_gpu) return fail("usage: decode [gpu]");

    struct memory memory = { 0 };
    if (on_gpu && !open_gpu_memory(&memory)) return fail("there is no NVIDIA GPU with a driver");

    int result = EXIT_FAILURE;
    struct buffers buffers = { 0 };
    struct attn_device *device;
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    open.kind = on_gpu ? ATTN_DEVICE_CURRENT : ATTN_DEVICE_HOST;
    if (attn_device_open(&device, &open)) return fail(attn_last_error());

    if (!allocate_buffers(&buffers, &memory, device)) {
        fail(attn_last_error()[0] ? attn_last_error() : "memory ran out");
        goto out;
    }
    fill_buffers(&buffers);
    if (decode(device, &buffers)) {
        fail(attn_last_error());
        goto out;
    }
    if (on_gpu && memory.synchronize()) {
        fail("the kernel failed");
        goto out;
    }
    result = report(&buffers) ? EXIT_SUCCESS : EXIT_FAILURE;

out:
    release_buffers(&buffers, &memory);
    attn_device_close(&device);
    return result;
}

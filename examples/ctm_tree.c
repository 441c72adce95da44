/* SPDX-License-Identifier: Apache-2.0 */
// A runtime that speculates, on the CTM interface: a decode step of one token and a tree step of
// five draft tokens for two sequences, both prepared once and run again as the sequences grow.
// `ctm_tree` runs on the host executor, where to prepare is to keep the parameters; `ctm_tree gpu`
// on GPU 0, where each step is captured into a CUDA graph at the first lengths and replayed at all
// the others. Every output is held against the mean it has to be.
//
// Build: cc ctm_tree.c $(pkg-config --cflags --libs attn) -ldl
#include <attn/common.h>
#include <attn/ctm.h>
#include <attn/device.h>

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BATCH = 2,
    DRAFTS = 5,
    Q_HEADS = 6,
    KV_HEADS = 2,
    DIM = 64,
    TABLE_WIDTH = 4,
    // Half the pool.
    NUM_PAGES = BATCH * TABLE_WIDTH,
};

// What each draft token sees of the others: its ancestors and itself. Token 0 is the root, 1 and 2
// are its children, 3 is a child of 1, 4 of 2.
static const int32_t tree[DRAFTS] = { 0x01, 0x03, 0x05, 0x0B, 0x15 };

// The driver's functions that memory and graphs take. An engine has both and no need for this part;
// nor for the dlopen, if it is linked with the CUDA driver.
struct gpu {
    void *driver;
    attn_stream stream;
    int (*alloc)(unsigned long long *pointer, size_t bytes, unsigned flags);
    int (*release)(unsigned long long pointer);
    int (*stream_create)(attn_stream *stream, unsigned flags);
    int (*stream_destroy)(attn_stream stream);
    int (*synchronize)(attn_stream stream);
    int (*begin_capture)(attn_stream stream, int mode);
    int (*end_capture)(attn_stream stream, void **graph);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, attn_stream stream);
    int (*graph_destroy)(void *graph);
    int (*exec_destroy)(void *exec);
};

// Sets the function pointer at `function` to what the driver exports as `name`.
static bool find(void *const driver, const char *const name, void *const function)
{
    void *const symbol = dlsym(driver, name);
    memcpy(function, &symbol, sizeof(symbol));
    return symbol;
}

// Makes the primary context of GPU 0 current, where ATTN_DEVICE_CURRENT will find it.
static bool open_gpu(struct gpu *const gpu)
{
    void *const driver = gpu->driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    void *context;
    const unsigned non_blocking = 1;
    return driver && find(driver, "cuInit", &init) &&
           find(driver, "cuDevicePrimaryCtxRetain", &retain) &&
           find(driver, "cuCtxSetCurrent", &set_current) &&
           find(driver, "cuMemAllocManaged", &gpu->alloc) &&
           find(driver, "cuMemFree_v2", &gpu->release) &&
           find(driver, "cuStreamCreate", &gpu->stream_create) &&
           find(driver, "cuStreamDestroy_v2", &gpu->stream_destroy) &&
           find(driver, "cuStreamSynchronize", &gpu->synchronize) &&
           find(driver, "cuStreamBeginCapture_v2", &gpu->begin_capture) &&
           find(driver, "cuStreamEndCapture", &gpu->end_capture) &&
           find(driver, "cuGraphInstantiateWithFlags", &gpu->instantiate) &&
           find(driver, "cuGraphLaunch", &gpu->launch) &&
           find(driver, "cuGraphDestroy", &gpu->graph_destroy) &&
           find(driver, "cuGraphExecDestroy", &gpu->exec_destroy) && !init(0) &&
           !retain(&context, 0) && !set_current(context) &&
           !gpu->stream_create(&gpu->stream, non_blocking);
}

// Zeroed, aligned to 256 bytes, for host and device; NULL if there is none left.
static void *allocate(const struct gpu *const gpu, const int64_t bytes)
{
    if (bytes < 0) return NULL;
    const size_t rounded = ((size_t) bytes + 255) / 256 * 256;
    void *pointer = NULL;
    if (gpu->driver) {
        const unsigned attach_global = 1;
        unsigned long long address;
        if (!gpu->alloc(&address, rounded, attach_global)) pointer = (void *) (uintptr_t) address;
    } else {
        pointer = aligned_alloc(256, rounded);
    }
    return pointer ? memset(pointer, 0, rounded) : NULL;
}

static void release(const struct gpu *const gpu, void *const pointer)
{
    if (!gpu->driver)
        free(pointer);
    else if (pointer)
        gpu->release((uintptr_t) pointer);
}

// 1.0, and the values 0, 1, 2, 3 in FP16.
static const uint16_t half_one = 0x3C00, halves[] = { 0x0000, 0x3C00, 0x4000, 0x4200 };

static float float_from_half(const uint16_t half)
{
    const int exponent = half >> 10 & 0x1F, fraction = half & 0x3FF;
    return exponent ? ldexpf((float) (fraction + 1024), exponent - 25)
                    : ldexpf((float) fraction, -24);
}

struct buffers {
    uint16_t *q, *output, *kv_pool;
    int32_t *page_table, *seq_lens, *tree_mask, *semaphores, *fault;
    float *workspace;
};

// What a tree of DRAFTS tokens needs is enough for decode.
static bool allocate_buffers(struct buffers *const b, const struct gpu *const gpu)
{
    const int64_t q_bytes = BATCH * DRAFTS * Q_HEADS * DIM * 2;
    b->q = allocate(gpu, q_bytes);
    b->output = allocate(gpu, q_bytes);
    b->kv_pool = allocate(gpu, (int64_t) 2 * NUM_PAGES * ATTN_CTM_PAGE_SIZE * KV_HEADS * DIM * 2);
    b->page_table = allocate(gpu, BATCH * 2 * TABLE_WIDTH * 4);
    b->seq_lens = allocate(gpu, BATCH * 4);
    b->tree_mask = allocate(gpu, BATCH * DRAFTS * 4);
    b->fault = allocate(gpu, 4);
    b->workspace =
        allocate(gpu, 4 * attn_ctm_tree_workspace_elems(BATCH, DRAFTS, Q_HEADS, KV_HEADS, DIM));
    b->semaphores =
        allocate(gpu, 4 * attn_ctm_tree_semaphore_elems(BATCH, DRAFTS, Q_HEADS, KV_HEADS));
    return b->q && b->output && b->kv_pool && b->page_table && b->seq_lens && b->tree_mask &&
           b->fault && b->workspace && b->semaphores;
}

static void release_buffers(const struct buffers *const b, const struct gpu *const gpu)
{
    release(gpu, b->q);
    release(gpu, b->output);
    release(gpu, b->kv_pool);
    release(gpu, b->page_table);
    release(gpu, b->seq_lens);
    release(gpu, b->tree_mask);
    release(gpu, b->fault);
    release(gpu, b->workspace);
    release(gpu, b->semaphores);
}

// All that doesn't depend on lengths. Keys are 0, so that every one weighs the same; the value of
// token t, in every dimension, is t modulo 4.
static void fill_buffers(const struct buffers *const b)
{
    for (int i = 0; i < BATCH * DRAFTS * Q_HEADS * DIM; i++) b->q[i] = half_one;
    for (int seq = 0; seq < BATCH; seq++) {
        int32_t *const keys = b->page_table + seq * 2 * TABLE_WIDTH;
        int32_t *const values = keys + TABLE_WIDTH;
        for (int column = 0; column < TABLE_WIDTH; column++) {
            keys[column] = (seq + column * BATCH) * 3 % NUM_PAGES;
            values[column] = NUM_PAGES + (seq + column * BATCH) * 5 % NUM_PAGES;
        }
        for (int t = 0; t < TABLE_WIDTH * ATTN_CTM_PAGE_SIZE; t++) {
            const size_t slot = (size_t) values[t / ATTN_CTM_PAGE_SIZE] * ATTN_CTM_PAGE_SIZE +
                                (size_t) t % ATTN_CTM_PAGE_SIZE;
            for (size_t i = 0; i < KV_HEADS * DIM; i++)
                b->kv_pool[slot * KV_HEADS * DIM + i] = halves[t % 4];
        }
        memcpy(b->tree_mask + seq * DRAFTS, tree, sizeof(tree));
    }
    *b->fault = INT32_MAX;
}

// Decode if q_len is 1, else a tree.
static struct attn_ctm_params fill_params(const struct buffers *const b, const int32_t q_len,
                                          const attn_stream stream)
{
    struct attn_ctm_params params = ATTN_CTM_PARAMS_INIT;
    params.batch_size = BATCH;
    params.q_len = q_len;
    params.num_q_heads = Q_HEADS;
    params.num_kv_heads = KV_HEADS;
    params.head_dim = DIM;
    params.num_pages = NUM_PAGES;
    params.max_pages_per_seq = TABLE_WIDTH;
    params.attention_scale = 0.125f;
    params.q = b->q;
    params.output = b->output;
    params.kv_pool = b->kv_pool;
    params.page_table = b->page_table;
    params.seq_lens = b->seq_lens;
    params.tree_mask = b->tree_mask;
    params.mask_words = 1;
    params.workspace = b->workspace;
    params.semaphores = b->semaphores;
    params.fault = b->fault;
    params.stream = stream;
    return params;
}

// A step that can be run again.
struct step {
    struct attn_ctm_params params;
    // NULL on the host.
    void *graph, *exec;
};

static bool prepare(struct step *const step, struct attn_device *const device,
                    const struct gpu *const gpu)
{
    const int thread_local_mode = 1;
    if (!gpu->driver) return true;
    if (gpu->begin_capture(gpu->stream, thread_local_mode)) return false;
    const bool captured = attn_ctm_run(device, &step->params) == ATTN_OK;
    return !gpu->end_capture(gpu->stream, &step->graph) && captured &&
           !gpu->instantiate(&step->exec, step->graph, 0);
}

static bool run(const struct step *const step, struct attn_device *const device,
                const struct gpu *const gpu)
{
    if (!gpu->driver) return attn_ctm_run(device, &step->params) == ATTN_OK;
    return !gpu->launch(step->exec, gpu->stream) && !gpu->synchronize(gpu->stream);
}

// The mean that query token `i` has to give: of the values before the draft tokens, and of those
// drafts that it sees.
static float expected(const int32_t len, const int32_t q_len, const int32_t i)
{
    const int past = len - q_len;
    int sum = 0, count = 0;
    for (int t = 0; t < len; t++) {
        if (q_len > 1 && t >= past && !(tree[i] >> (t - past) & 1)) continue;
        sum += t % 4;
        count++;
    }
    return (float) sum / (float) count;
}

static bool report(const struct buffers *const b, const int32_t q_len)
{
    bool right = *b->fault == INT32_MAX;
    for (int seq = 0; seq < BATCH; seq++)
        for (int i = 0; i < q_len; i++) {
            const float mean = expected(b->seq_lens[seq], q_len, i);
            const uint16_t *const output = b->output + (seq * q_len + i) * Q_HEADS * DIM;
            bool row_right = true;
            for (int d = 0; d < Q_HEADS * DIM; d++)
                row_right =
                    row_right && fabsf(float_from_half(output[d]) - mean) <= 0.001f * (1 + mean);
            printf("  sequence %d, %3d keys, token %d: %.4f, mean %.4f%s\n", seq, b->seq_lens[seq],
                   i, float_from_half(output[0]), mean, row_right ? "" : ": wrong");
            right = right && row_right;
        }
    return right;
}

// Both steps at three pairs of lengths, the drafts included.
static bool run_all(struct step steps[2], struct attn_device *const device,
                    const struct gpu *const gpu, const struct buffers *const b)
{
    static const int32_t lens[][BATCH] = { { 7, 100 }, { 133, 256 }, { 512, 129 } };
    bool right = true;
    for (size_t l = 0; l < sizeof(lens) / sizeof(lens[0]); l++) {
        memcpy(b->seq_lens, lens[l], sizeof(lens[l]));
        for (int s = 0; s < 2; s++) {
            if (l == 0 && !prepare(&steps[s], device, gpu)) return false;
            if (!run(&steps[s], device, gpu)) return false;
            printf("%s\n", s ? "tree" : "decode");
            right = report(b, steps[s].params.q_len) && right;
        }
    }
    printf("%s\n", right ? "every output is right" : "an output is wrong");
    return right;
}

static int fail(const char *const sentence)
{
    fprintf(stderr, "ctm_tree: %s\n", sentence);
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    const bool on_gpu = argc == 2 && !strcmp(argv[1], "gpu");
    if (argc > 1 && !on_gpu) return fail("usage: ctm_tree [gpu]");
    // Whoever asks first needs no fallback.
    if (!attn_ctm_supported(Q_HEADS, KV_HEADS, DIM, false, 0, false) ||
        !attn_ctm_supported_tree(Q_HEADS, KV_HEADS, DIM, false, 0, false) ||
        !attn_ctm_supports_tree_query_seq_len(DRAFTS))
        return fail("the shape is not supported");

    struct gpu gpu = { 0 };
    if (on_gpu && !open_gpu(&gpu)) return fail("there is no NVIDIA GPU with a driver");
    struct attn_device *device;
    struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    open.kind = on_gpu ? ATTN_DEVICE_CURRENT : ATTN_DEVICE_HOST;
    if (attn_device_open(&device, &open)) return fail(attn_last_error());

    int result = EXIT_FAILURE;
    struct buffers buffers = { 0 };
    struct step steps[2] = { { .graph = NULL }, { .graph = NULL } };
    if (!allocate_buffers(&buffers, &gpu)) {
        fail("memory ran out");
        goto out;
    }
    fill_buffers(&buffers);
    steps[0].params = fill_params(&buffers, 1, gpu.stream);
    steps[1].params = fill_params(&buffers, DRAFTS, gpu.stream);
    if (run_all(steps, device, &gpu, &buffers))
        result = EXIT_SUCCESS;
    else
        fail(attn_last_error()[0] ? attn_last_error() : "a step failed");

out:
    for (int s = 0; s < 2; s++) {
        if (steps[s].exec) gpu.exec_destroy(steps[s].exec);
        if (steps[s].graph) gpu.graph_destroy(steps[s].graph);
    }
    release_buffers(&buffers, &gpu);
    if (gpu.stream) gpu.stream_destroy(gpu.stream);
    attn_device_close(&device);
    return result;
}

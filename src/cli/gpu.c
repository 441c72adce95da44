/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// CUresult, CUdevice and CUdeviceptr as the driver has them; handles are opaque.
typedef int cu_result;
typedef int cu_device;
typedef unsigned long long cu_pointer;

enum {
    CU_CLOCK_RATE = 13,
    CU_SM_COUNT = 16,
    CU_MEMORY_CLOCK_RATE = 36,
    CU_L2_CACHE_SIZE = 38,
    CU_CC_MAJOR = 75,
    CU_CC_MINOR = 76,
    CU_STREAM_NON_BLOCKING = 1,
    CU_CAPTURE_THREAD_LOCAL = 1,
    CU_MANAGED_BY_ALL_STREAMS = 1,
};

// field, symbol the driver exports, parameters.
#define GPU_CALLS(X) \
    X(init, "cuInit", (unsigned flags)) \
    X(driver_version, "cuDriverGetVersion", (int *version)) \
    X(error_name, "cuGetErrorName", (cu_result error, const char **name)) \
    X(device_get, "cuDeviceGet", (cu_device * device, int ordinal)) \
    X(device_name, "cuDeviceGetName", (char *name, int size, cu_device device)) \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t * bytes, cu_device device)) \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device)) \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (void **context, cu_device device)) \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (cu_device device)) \
    X(context_push, "cuCtxPushCurrent_v2", (void *context)) \
    X(context_pop, "cuCtxPopCurrent_v2", (void **context)) \
    X(context_sync, "cuCtxSynchronize", (void) ) \
    X(alloc, "cuMemAlloc_v2", (cu_pointer * pointer, size_t bytes)) \
    X(alloc_managed, "cuMemAllocManaged", (cu_pointer * pointer, size_t bytes, unsigned flags)) \
    X(free, "cuMemFree_v2", (cu_pointer pointer)) \
    X(upload, "cuMemcpyHtoD_v2", (cu_pointer to, const void *from, size_t bytes)) \
    X(download, "cuMemcpyDtoH_v2", (void *to, cu_pointer from, size_t bytes)) \
    X(fill, "cuMemsetD8_v2", (cu_pointer to, unsigned char byte, size_t bytes)) \
    X(stream_create, "cuStreamCreate", (attn_stream * stream, unsigned flags)) \
    X(stream_destroy, "cuStreamDestroy_v2", (attn_stream stream)) \
    X(stream_sync, "cuStreamSynchronize", (attn_stream stream)) \
    X(capture_begin, "cuStreamBeginCapture_v2", (attn_stream stream, int mode)) \
    X(capture_end, "cuStreamEndCapture", (attn_stream stream, void **graph)) \
    X(graph_instantiate, "cuGraphInstantiateWithFlags", \
      (void **executable, void *graph, unsigned long long flags)) \
    X(graph_launch, "cuGraphLaunch", (void *executable, attn_stream stream)) \
    X(executable_destroy, "cuGraphExecDestroy", (void *executable)) \
    X(graph_destroy, "cuGraphDestroy", (void *graph)) \
    X(event_create, "cuEventCreate", (void **event, unsigned flags)) \
    X(event_destroy, "cuEventDestroy_v2", (void *event)) \
    X(event_record, "cuEventRecord", (void *event, attn_stream stream)) \
    X(event_sync, "cuEventSynchronize", (void *event)) \
    X(event_elapsed, "cuEventElapsedTime", (float *milliseconds, void *start, void *stop))

struct gpu {
#define GPU_FIELD(name, symbol, parameters) cu_result(*name) parameters;
    GPU_CALLS(GPU_FIELD)
#undef GPU_FIELD
    cu_device device;
    int retained, pushed;
    void *start, *stop;
};

struct gpu_graph {
    void *graph;
    void *executable;
};

// -1 and a sentence where libcuda or one of its calls is missing.
static int load_driver(struct gpu *const gpu, char *const why, const size_t why_size)
{
    static const struct {
        const char *symbol;
        size_t offset;
    } calls[] = {
#define GPU_ENTRY(name, symbol, parameters) { symbol, offsetof(struct gpu, name) },
        GPU_CALLS(GPU_ENTRY)
#undef GPU_ENTRY
    };
    // Never closed: the driver doesn't survive it.
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *const error = dlerror();
        snprintf(why, why_size, "no NVIDIA driver: libcuda.so.1 cannot be opened (%s)",
                 error ? error : "unknown reason");
        return -1;
    }
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *const call = dlsym(library, calls[i].symbol);
        if (!call) {
            snprintf(why, why_size, "the NVIDIA driver is too old: its libcuda.so.1 has no %s",
                     calls[i].symbol);
            return -1;
        }
        memcpy((char *) gpu + calls[i].offset, &call, sizeof(call));
    }
    return 0;
}

static int open_context(struct gpu *const gpu, const int ordinal, const char **const step)
{
    void *context = NULL;
    *step = "cuInit";
    int result = gpu->init(0);
    if (result) return result;
    *step = "cuDeviceGet";
    result = gpu->device_get(&gpu->device, ordinal);
    if (result) return result;
    *step = "cuDevicePrimaryCtxRetain";
    result = gpu->primary_retain(&context, gpu->device);
    if (result) return result;
    gpu->retained = 1;
    *step = "cuCtxPushCurrent";
    result = gpu->context_push(context);
    if (result) return result;
    gpu->pushed = 1;
    *step = "cuEventCreate";
    result = gpu->event_create(&gpu->start, 0);
    return result ? result : gpu->event_create(&gpu->stop, 0);
}

int gpu_open(struct gpu **const gpu, const int ordinal, char *const why, const size_t why_size)
{
    const char *step = "";
    *gpu = NULL;
    struct gpu *opened = calloc(1, sizeof(*opened));
    if (!opened) {
        snprintf(why, why_size, "out of memory");
        return -1;
    }
    int result = load_driver(opened, why, why_size);
    if (result) {
        free(opened);
        return result;
    }
    result = open_context(opened, ordinal, &step);
    if (result) {
        const char *name = NULL;
        opened->error_name(result, &name);
        snprintf(why, why_size, "GPU %d cannot be opened: %s returned %d (%s)", ordinal, step,
                 result, name ? name : "unknown error");
        gpu_close(&opened);
        return result;
    }
    *gpu = opened;
    return 0;
}

void gpu_close(struct gpu **const gpu)
{
    struct gpu *const closing = *gpu;
    *gpu = NULL;
    if (!closing) return;
    if (closing->start) closing->event_destroy(closing->start);
    if (closing->stop) closing->event_destroy(closing->stop);
    void *context;
    if (closing->pushed) closing->context_pop(&context);
    if (closing->retained) closing->primary_release(closing->device);
    free(closing);
}

int gpu_alloc(struct gpu *const gpu, void **const pointer, const size_t bytes)
{
    cu_pointer allocated = 0;
    // The driver refuses 0.
    const int result = gpu->alloc(&allocated, bytes ? bytes : 1);
    *pointer = result ? NULL : (void *) (uintptr_t) allocated;
    return result;
}

int gpu_alloc_managed(struct gpu *const gpu, void **const pointer, const size_t bytes)
{
    cu_pointer allocated = 0;
    const int result = gpu->alloc_managed(&allocated, bytes, CU_MANAGED_BY_ALL_STREAMS);
    *pointer = result ? NULL : (void *) (uintptr_t) allocated;
    return result;
}

void gpu_free(struct gpu *const gpu, void *const pointer)
{
    if (pointer) gpu->free((cu_pointer) (uintptr_t) pointer);
}

// Copies from pageable memory and fills return before they are done, and a non-blocking stream
// doesn't wait for them.
static int finish(struct gpu *const gpu, const int result)
{
    return result ? result : gpu->stream_sync(NULL);
}

int gpu_upload(struct gpu *const gpu, void *const device, const void *const host,
               const size_t bytes)
{
    if (!bytes) return 0;
    return finish(gpu, gpu->upload((cu_pointer) (uintptr_t) device, host, bytes));
}

int gpu_download(struct gpu *const gpu, void *const host, const void *const device,
                 const size_t bytes)
{
    if (!bytes) return 0;
    return gpu->download(host, (cu_pointer) (uintptr_t) device, bytes);
}

int gpu_fill(struct gpu *const gpu, void *const device, const int byte, const size_t bytes)
{
    if (!bytes) return 0;
    return finish(gpu, gpu->fill((cu_pointer) (uintptr_t) device, (unsigned char) byte, bytes));
}

int gpu_stream_create(struct gpu *const gpu, attn_stream *const stream)
{
    *stream = NULL;
    return gpu->stream_create(stream, CU_STREAM_NON_BLOCKING);
}

void gpu_stream_destroy(struct gpu *const gpu, const attn_stream stream)
{
    if (stream) gpu->stream_destroy(stream);
}

int gpu_stream_sync(struct gpu *const gpu, const attn_stream stream)
{
    return gpu->stream_sync(stream);
}

int gpu_sync(struct gpu *const gpu)
{
    return gpu->context_sync();
}

int gpu_graph_begin(struct gpu *const gpu, const attn_stream stream)
{
    return gpu->capture_begin(stream, CU_CAPTURE_THREAD_LOCAL);
}

int gpu_graph_end(struct gpu *const gpu, const attn_stream stream, struct gpu_graph **const graph)
{
    void *captured = NULL, *executable = NULL;
    *graph = NULL;
    int result = gpu->capture_end(stream, &captured);
    if (result) return result;
    result = gpu->graph_instantiate(&executable, captured, 0);
    if (result) goto out;
    struct gpu_graph *const made = malloc(sizeof(*made));
    if (!made) {
        result = -1;
        goto out;
    }
    made->graph = captured;
    made->executable = executable;
    *graph = made;
    return 0;
out:
    if (executable) gpu->executable_destroy(executable);
    gpu->graph_destroy(captured);
    return result;
}

int gpu_graph_launch(struct gpu *const gpu, struct gpu_graph *const graph, const attn_stream stream)
{
    return gpu->graph_launch(graph->executable, stream);
}

void gpu_graph_destroy(struct gpu *const gpu, struct gpu_graph **const graph)
{
    if (*graph) {
        gpu->executable_destroy((*graph)->executable);
        gpu->graph_destroy((*graph)->graph);
        free(*graph);
    }
    *graph = NULL;
}

int gpu_timer_start(struct gpu *const gpu, const attn_stream stream)
{
    return gpu->event_record(gpu->start, stream);
}

int gpu_timer_stop(struct gpu *const gpu, const attn_stream stream)
{
    return gpu->event_record(gpu->stop, stream);
}

int gpu_timer_read(struct gpu *const gpu, float *const milliseconds)
{
    const int result = gpu->event_sync(gpu->stop);
    return result ? result : gpu->event_elapsed(milliseconds, gpu->start, gpu->stop);
}

int gpu_describe(struct gpu *const gpu, struct gpu_description *const description)
{
    const struct {
        int attribute;
        int *value;
    } attributes[] = {
        { CU_SM_COUNT, &description->sm_count },
        { CU_CC_MAJOR, &description->compute_capability_major },
        { CU_CC_MINOR, &description->compute_capability_minor },
        { CU_L2_CACHE_SIZE, &description->l2_bytes },
        { CU_CLOCK_RATE, &description->clock_khz },
        { CU_MEMORY_CLOCK_RATE, &description->memory_clock_khz },
    };
    memset(description, 0, sizeof(*description));
    int result = gpu->device_name(description->name, (int) sizeof(description->name), gpu->device);
    if (!result) result = gpu->driver_version(&description->driver_version);
    if (!result) result = gpu->device_memory(&description->memory_bytes, gpu->device);
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]) && !result; i++)
        result = gpu->device_attribute(attributes[i].value, attributes[i].attribute, gpu->device);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
// The CUDA driver as libattn sees it: the types and calls it uses, declared here so that nothing
// includes a CUDA header, and one table that dlopen fills and tests replace.
#ifndef ATTN_SRC_DRIVER_H
#define ATTN_SRC_DRIVER_H

#include "attn/common.h"

typedef int attn_cu_result;
typedef int attn_cu_device;
typedef struct attn_cu_context_st *attn_cu_context;
typedef struct attn_cu_library_st *attn_cu_library;
typedef struct attn_cu_kernel_st *attn_cu_kernel;
typedef struct attn_cu_function_st *attn_cu_function;
typedef struct attn_cu_event_st *attn_cu_event;
typedef unsigned long long attn_cu_deviceptr;

// CUresult values that libattn tells apart.
enum {
    ATTN_CU_SUCCESS = 0,
    ATTN_CU_ERROR_INVALID_VALUE = 1,
    ATTN_CU_ERROR_OUT_OF_MEMORY = 2,
    ATTN_CU_ERROR_NO_DEVICE = 100,
    ATTN_CU_ERROR_INVALID_DEVICE = 101,
    ATTN_CU_ERROR_INVALID_IMAGE = 200,
    ATTN_CU_ERROR_NO_BINARY_FOR_GPU = 209,
    ATTN_CU_ERROR_NOT_FOUND = 500,
    ATTN_CU_ERROR_LAUNCH_FAILED = 719,
    ATTN_CU_ERROR_NOT_SUPPORTED = 801,
};

// CUdevice_attribute and CUfunction_attribute values.
enum {
    ATTN_CU_DEVICE_SM_COUNT = 16,
    ATTN_CU_DEVICE_CC_MAJOR = 75,
    ATTN_CU_DEVICE_CC_MINOR = 76,
    ATTN_CU_DEVICE_SMEM_PER_BLOCK_OPTIN = 97,
    ATTN_CU_FUNC_MAX_DYNAMIC_SMEM = 8,
    ATTN_CU_FUNC_SMEM_CARVEOUT = 9,
};

// CUtensorMap and its enumerations.
enum {
    ATTN_CU_TENSOR_MAP_BYTES = 128,
    ATTN_CU_TENSOR_UINT8 = 0,
    ATTN_CU_TENSOR_UINT16 = 1,
    ATTN_CU_SWIZZLE_32B = 1,
    ATTN_CU_SWIZZLE_64B = 2,
    ATTN_CU_SWIZZLE_128B = 3,
    ATTN_CU_L2_PROMOTION_128B = 2,
};

// A CUlaunchAttribute, and a CUlaunchConfig.
enum {
    ATTN_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,
};
struct attn_cu_launch_attribute {
    int32_t id;
    int32_t padding;
    union {
        int32_t number;
        unsigned char bytes[64];
    } value;
};
struct attn_cu_launch_config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes;
    attn_stream stream;
    const struct attn_cu_launch_attribute *attributes;
    unsigned num_attributes;
};

// Flags of streams, events and pinned memory.
enum {
    ATTN_CU_STREAM_NON_BLOCKING = 1,
    ATTN_CU_EVENT_DISABLE_TIMING = 2,
    ATTN_CU_HOST_PORTABLE = 1,
};

// A CUmemcpyAttributes; the locations are for managed memory alone.
enum {
    ATTN_CU_COPY_ORDER_STREAM = 1,
    ATTN_CU_COPY_PREFER_OVERLAP = 1,
};
struct attn_cu_copy_attributes {
    int32_t order;
    int32_t from_type, from_id, to_type, to_id;
    uint32_t flags;
};

// result name, symbol the driver exports, parameters. The oldest driver accepted (13.0) has all of
// them.
#define ATTN_DRIVER_CALLS(X) \
    X(init, "cuInit", (unsigned flags)) \
    X(driver_version, "cuDriverGetVersion", (int *version)) \
    X(error_name, "cuGetErrorName", (attn_cu_result error, const char **name)) \
    X(device_count, "cuDeviceGetCount", (int *count)) \
    X(device_get, "cuDeviceGet", (attn_cu_device * device, int ordinal)) \
    X(device_name, "cuDeviceGetName", (char *name, int size, attn_cu_device device)) \
    X(device_attribute, "cuDeviceGetAttribute", \
      (int *value, int attribute, attn_cu_device device)) \
    X(primary_retain, "cuDevicePrimaryCtxRetain", \
      (attn_cu_context * context, attn_cu_device device)) \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (attn_cu_device device)) \
    X(context_current, "cuCtxGetCurrent", (attn_cu_context * context)) \
    X(context_device, "cuCtxGetDevice", (attn_cu_device * device)) \
    X(context_push, "cuCtxPushCurrent_v2", (attn_cu_context context)) \
    X(context_pop, "cuCtxPopCurrent_v2", (attn_cu_context * context)) \
    X(library_load, "cuLibraryLoadData", \
      (attn_cu_library * library, const void *code, int *jit_options, void **jit_values, \
       unsigned num_jit, int *options, void **values, unsigned num_options)) \
    X(library_unload, "cuLibraryUnload", (attn_cu_library library)) \
    X(library_kernel, "cuLibraryGetKernel", \
      (attn_cu_kernel * kernel, attn_cu_library library, const char *name)) \
    X(kernel_function, "cuKernelGetFunction", \
      (attn_cu_function * function, attn_cu_kernel kernel)) \
    X(function_load, "cuFuncLoad", (attn_cu_function function)) \
    X(function_set, "cuFuncSetAttribute", (attn_cu_function function, int attribute, int value)) \
    X(launch, "cuLaunchKernelEx", \
      (const struct attn_cu_launch_config *config, attn_cu_function function, void **args, \
       void **extra)) \
    X(tensor_map, "cuTensorMapEncodeTiled", \
      (void *map, int type, uint32_t rank, const void *address, const uint64_t *dims, \
       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, \
       int swizzle, int promotion, int fill)) \
    X(memset_async, "cuMemsetD32Async", \
      (attn_cu_deviceptr address, unsigned value, size_t count, attn_stream stream))

// What the swap engine needs beside them: memory, streams, events, copies.
#define ATTN_DRIVER_COPY_CALLS(X) \
    X(mem_alloc, "cuMemAlloc_v2", (attn_cu_deviceptr * address, size_t bytes)) \
    X(mem_free, "cuMemFree_v2", (attn_cu_deviceptr address)) \
    X(host_alloc, "cuMemHostAlloc", (void **address, size_t bytes, unsigned flags)) \
    X(host_free, "cuMemFreeHost", (void *address)) \
    X(host_register, "cuMemHostRegister_v2", (void *address, size_t bytes, unsigned flags)) \
    X(host_unregister, "cuMemHostUnregister", (void *address)) \
    X(stream_create, "cuStreamCreate", (attn_stream * stream, unsigned flags)) \
    X(stream_destroy, "cuStreamDestroy_v2", (attn_stream stream)) \
    X(stream_sync, "cuStreamSynchronize", (attn_stream stream)) \
    X(stream_wait, "cuStreamWaitEvent", (attn_stream stream, attn_cu_event event, unsigned flags)) \
    X(event_create, "cuEventCreate", (attn_cu_event * event, unsigned flags)) \
    X(event_destroy, "cuEventDestroy_v2", (attn_cu_event event)) \
    X(event_record, "cuEventRecord", (attn_cu_event event, attn_stream stream)) \
    X(event_sync, "cuEventSynchronize", (attn_cu_event event)) \
    X(event_elapsed, "cuEventElapsedTime", \
      (float *milliseconds, attn_cu_event start, attn_cu_event end)) \
    X(copy_in, "cuMemcpyHtoDAsync_v2", \
      (attn_cu_deviceptr to, const void *from, size_t bytes, attn_stream stream))

// NULL where the driver has none.
#define ATTN_DRIVER_OPTIONAL_CALLS(X) \
    X(copy_batch, "cuMemcpyBatchAsync_v2", \
      (attn_cu_deviceptr * to, attn_cu_deviceptr * from, size_t * bytes, size_t count, \
       struct attn_cu_copy_attributes * attributes, size_t * attribute_starts, \
       size_t num_attributes, attn_stream stream))

struct attn_driver {
#define ATTN_DRIVER_FIELD(name, symbol, parameters) attn_cu_result(*name) parameters;
    ATTN_DRIVER_CALLS(ATTN_DRIVER_FIELD)
    ATTN_DRIVER_COPY_CALLS(ATTN_DRIVER_FIELD)
    ATTN_DRIVER_OPTIONAL_CALLS(ATTN_DRIVER_FIELD)
#undef ATTN_DRIVER_FIELD
};

// The table to use: the one given to attn_driver_replace, else libcuda.so.1's, opened at the first
// call and kept. NULL if there is no driver or it lacks a call; *reason then says why (static
// storage or thread-local: valid until the thread's next call).
const struct attn_driver *attn_driver_get(const char **reason);

// Why attn_driver_get returns NULL, as a status: ATTN_ERROR_NO_DEVICE without a driver,
// ATTN_ERROR_DRIVER where it lacks a call; ATTN_OK where it returns a table.
enum attn_status attn_driver_status(void);

// Tests: from now on attn_driver_get returns `table`; NULL restores libcuda. Devices already open
// keep the table they were opened with.
void attn_driver_replace(const struct attn_driver *table);

#endif

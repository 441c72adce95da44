/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_KERNELS 2048
#define MAX_DEPTH 8

struct attn_cu_context_st {
    int ordinal;
};
struct attn_cu_library_st {
    bool loaded;
};
struct attn_cu_kernel_st {
    char name[64];
};
struct attn_cu_function_st {
    struct attn_cu_kernel_st kernel;
    bool loaded;
    int smem_bytes;
};

struct fake_driver fake;

static struct attn_cu_context_st primaries[FAKE_MAX_DEVICES], other;
static struct attn_cu_library_st library;
static struct attn_cu_function_st functions[MAX_KERNELS];
static attn_cu_context stack[MAX_DEPTH];
static int depth;

enum call {
#define CALL_INDEX(name, symbol, parameters) CALL_##name,
    ATTN_DRIVER_CALLS(CALL_INDEX) ATTN_DRIVER_COPY_CALLS(CALL_INDEX)
#undef CALL_INDEX
    NUM_CALLS,
};

#define CALL_SYMBOL(name, symbol, parameters) symbol,
const char *const fake_driver_symbols[] = { ATTN_DRIVER_CALLS(CALL_SYMBOL) NULL };
static const char *const symbols[] = { ATTN_DRIVER_CALLS(CALL_SYMBOL)
                                           ATTN_DRIVER_COPY_CALLS(CALL_SYMBOL) };
#undef CALL_SYMBOL

static int counts[NUM_CALLS];

// The result that the test wants from this call.
static attn_cu_result enter(const enum call call)
{
    fake.num_calls++;
    counts[call]++;
    if (!fake.fail_symbol || strcmp(fake.fail_symbol, symbols[call]) != 0 ||
        counts[call] < fake.fail_at)
        return ATTN_CU_SUCCESS;
    fake.num_failed++;
    return fake.fail_code;
}

#define ENTER(name) \
    do { \
        const attn_cu_result wanted = enter(CALL_##name); \
        if (wanted != ATTN_CU_SUCCESS) return wanted; \
    } while (0)

static bool is_gpu(const int ordinal)
{
    return ordinal >= 0 && ordinal < fake.num_gpus;
}

static attn_cu_result fake_init(const unsigned flags)
{
    ENTER(init);
    if (flags != 0) return ATTN_CU_ERROR_INVALID_VALUE;
    return fake.num_gpus > 0 ? ATTN_CU_SUCCESS : ATTN_CU_ERROR_NO_DEVICE;
}

static attn_cu_result fake_driver_version(int *const version)
{
    ENTER(driver_version);
    *version = fake.version;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_error_name(const attn_cu_result error, const char **const name)
{
    ENTER(error_name);
    static char text[32];
    snprintf(text, sizeof(text), "FAKE_ERROR_%d", error);
    *name = text;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_device_count(int *const count)
{
    ENTER(device_count);
    *count = fake.num_gpus;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_device_get(attn_cu_device *const device, const int ordinal)
{
    ENTER(device_get);
    if (!is_gpu(ordinal)) return ATTN_CU_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_device_name(char *const name, const int size,
                                       const attn_cu_device device)
{
    ENTER(device_name);
    if (!is_gpu(device)) return ATTN_CU_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t) size, "%s", fake.gpus[device].name);
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_device_attribute(int *const value, const int attribute,
                                            const attn_cu_device device)
{
    ENTER(device_attribute);
    if (!is_gpu(device)) return ATTN_CU_ERROR_INVALID_DEVICE;
    const struct fake_gpu *const gpu = &fake.gpus[device];
    switch (attribute) {
    case ATTN_CU_DEVICE_SM_COUNT: *value = gpu->sm_count; return ATTN_CU_SUCCESS;
    case ATTN_CU_DEVICE_CC_MAJOR: *value = gpu->major; return ATTN_CU_SUCCESS;
    case ATTN_CU_DEVICE_CC_MINOR: *value = gpu->minor; return ATTN_CU_SUCCESS;
    case ATTN_CU_DEVICE_SMEM_PER_BLOCK_OPTIN: *value = gpu->smem_optin; return ATTN_CU_SUCCESS;
    default: return ATTN_CU_ERROR_INVALID_VALUE;
    }
}

static attn_cu_result fake_primary_retain(attn_cu_context *const context,
                                          const attn_cu_device device)
{
    ENTER(primary_retain);
    if (!is_gpu(device)) return ATTN_CU_ERROR_INVALID_DEVICE;
    fake.retains++;
    *context = fake_primary_context(device);
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_primary_release(const attn_cu_device device)
{
    ENTER(primary_release);
    if (!is_gpu(device)) return ATTN_CU_ERROR_INVALID_DEVICE;
    fake.releases++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_context_current(attn_cu_context *const context)
{
    ENTER(context_current);
    *context = fake.current;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_context_device(attn_cu_device *const device)
{
    ENTER(context_device);
    if (!fake.current) return ATTN_CU_ERROR_INVALID_VALUE;
    *device = fake.current->ordinal;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_context_push(const attn_cu_context context)
{
    ENTER(context_push);
    if (!context || depth == MAX_DEPTH) return ATTN_CU_ERROR_INVALID_VALUE;
    stack[depth++] = fake.current;
    fake.current = context;
    fake.pushes++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_context_pop(attn_cu_context *const context)
{
    ENTER(context_pop);
    if (depth == 0) return ATTN_CU_ERROR_INVALID_VALUE;
    *context = fake.current;
    fake.current = stack[--depth];
    fake.pops++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_library_load(attn_cu_library *const loaded, const void *const code,
                                        int *const jit_options, void **const jit_values,
                                        const unsigned num_jit, int *const options,
                                        void **const values, const unsigned num_options)
{
    ENTER(library_load);
    if (!code || jit_options || jit_values || num_jit || options || values || num_options)
        return ATTN_CU_ERROR_INVALID_VALUE;
    fake.loads++;
    library.loaded = true;
    *loaded = &library;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_library_unload(const attn_cu_library unloaded)
{
    ENTER(library_unload);
    if (unloaded != &library || !library.loaded) return ATTN_CU_ERROR_INVALID_VALUE;
    library.loaded = false;
    fake.unloads++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_library_kernel(attn_cu_kernel *const kernel, const attn_cu_library from,
                                          const char *const name)
{
    ENTER(library_kernel);
    if (from != &library || !library.loaded || fake.kernels == MAX_KERNELS)
        return ATTN_CU_ERROR_INVALID_VALUE;
    struct attn_cu_function_st *const made = &functions[fake.kernels++];
    *made = (struct attn_cu_function_st){ .loaded = false };
    snprintf(made->kernel.name, sizeof(made->kernel.name), "%s", name);
    *kernel = &made->kernel;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_kernel_function(attn_cu_function *const function,
                                           const attn_cu_kernel kernel)
{
    ENTER(kernel_function);
    // As the real one: the function of a kernel belongs to the current context.
    if (!fake.current) return ATTN_CU_ERROR_INVALID_VALUE;
    // The kernel is the function's first member.
    *function = (attn_cu_function) kernel;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_function_load(const attn_cu_function function)
{
    ENTER(function_load);
    if (!fake.current) return ATTN_CU_ERROR_INVALID_VALUE;
    function->loaded = true;
    fake.functions_loaded++;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_function_set(const attn_cu_function function, const int attribute,
                                        const int value)
{
    ENTER(function_set);
    if (attribute == ATTN_CU_FUNC_SMEM_CARVEOUT && value <= 100) return ATTN_CU_SUCCESS;
    if (attribute != ATTN_CU_FUNC_MAX_DYNAMIC_SMEM || value < 0) return ATTN_CU_ERROR_INVALID_VALUE;
    function->smem_bytes = value;
    fake.functions_set++;
    if (value > fake.largest_smem) fake.largest_smem = value;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_launch_kernel(const struct attn_cu_launch_config *const config,
                                         const attn_cu_function function, void **const args,
                                         void **const extra)
{
    ENTER(launch);
    if (!fake.current || !function->loaded || !library.loaded || extra || config->grid_x == 0 ||
        config->block_x == 0 || config->block_x > 1024 ||
        config->smem_bytes > (unsigned) function->smem_bytes || config->num_attributes != 1 ||
        config->attributes->id != ATTN_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION ||
        config->attributes->value.number != 1)
        return ATTN_CU_ERROR_INVALID_VALUE;
    struct fake_launch *const launch = &fake.launches[fake.num_launches++ % FAKE_MAX_LAUNCHES];
    *launch = (struct fake_launch){
        .grid = { config->grid_x, config->grid_y, config->grid_z },
        .block = { config->block_x, config->block_y, config->block_z },
        .smem_bytes = config->smem_bytes,
        .stream = config->stream,
        .context = fake.current,
    };
    memcpy(launch->kernel, function->kernel.name, sizeof(launch->kernel));
    // The arguments of other kernels are smaller.
    if (strcmp(launch->kernel, "read") == 0)
        memcpy(&launch->read, args[0], sizeof(launch->read));
    else if (strncmp(launch->kernel, "decode_", 7) == 0)
        memcpy(&launch->args, args[0], sizeof(launch->args));
    const bool prefill = strncmp(launch->kernel, "prefill_", 8) == 0;
    const bool tiled = strncmp(launch->kernel, "tiled_", 6) == 0;
    if (prefill) memcpy(&launch->prefill, args[0], sizeof(launch->prefill));
    if (prefill && fake.run_prefill &&
        fake.run_prefill(launch->kernel, config->grid_x, config->block_x, args[0]))
        return ATTN_CU_ERROR_LAUNCH_FAILED;
    if (tiled) memcpy(&launch->tiled, args[0], sizeof(launch->tiled));
    if (tiled && fake.run_tiled &&
        fake.run_tiled(launch->kernel, config->grid_x, config->block_x, args[0]))
        return ATTN_CU_ERROR_LAUNCH_FAILED;
    if (!prefill && !tiled && fake.run &&
        fake.run(launch->kernel, config->grid_x, config->block_x, args[0]))
        return ATTN_CU_ERROR_LAUNCH_FAILED;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_tensor_map(void *const map, const int type, const uint32_t rank,
                                      const void *const address, const uint64_t *const dims,
                                      const uint64_t *const strides, const uint32_t *const box,
                                      const uint32_t *const steps, const int interleave,
                                      const int swizzle, const int promotion, const int fill)
{
    (void) promotion;
    ENTER(tensor_map);
    if ((uintptr_t) map % 64 || (uintptr_t) address % 16 || rank != FAKE_MAP_RANK || interleave ||
        fill)
        return ATTN_CU_ERROR_INVALID_VALUE;
    struct fake_map *const made = &fake.maps[fake.num_maps++ % FAKE_MAX_MAPS];
    *made = (struct fake_map){ .address = address, .type = type, .swizzle = swizzle };
    for (uint32_t i = 0; i < rank; i++) {
        if (dims[i] == 0 || box[i] == 0 || box[i] > 256 || steps[i] != 1)
            return ATTN_CU_ERROR_INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >> 40))
            return ATTN_CU_ERROR_INVALID_VALUE;
        made->dims[i] = dims[i];
        made->box[i] = box[i];
        if (i + 1 < rank) made->strides[i] = strides[i];
    }
    memcpy(map, made, sizeof(*made));
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_memset_async(const attn_cu_deviceptr address, const unsigned value,
                                        const size_t count, const attn_stream stream)
{
    (void) stream;
    ENTER(memset_async);
    if (!fake.current || value != 0) return ATTN_CU_ERROR_INVALID_VALUE;
    fake.memsets++;
    fake.memset_address = address;
    fake.memset_count = count;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_mem_alloc(attn_cu_deviceptr *const address, const size_t bytes)
{
    ENTER(mem_alloc);
    if (!fake.current || bytes == 0) return ATTN_CU_ERROR_INVALID_VALUE;
    void *const memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return ATTN_CU_ERROR_OUT_OF_MEMORY;
    memset(memory, 0xFF, bytes);
    fake.allocations++;
    fake.allocated_bytes += bytes;
    *address = (uintptr_t) memory;
    return ATTN_CU_SUCCESS;
}

static attn_cu_result fake_mem_free(const attn_cu_deviceptr address)
{
    ENTER(mem_free);
    if (!fake.current || !address) return ATTN_CU_ERROR_INVALID_VALUE;
    free((void *) (uintptr_t) address);
    fake.frees++;
    return ATTN_CU_SUCCESS;
}

attn_cu_context fake_primary_context(const int ordinal)
{
    primaries[ordinal].ordinal = ordinal;
    return &primaries[ordinal];
}

attn_cu_context fake_other_context(void)
{
    return &other;
}

bool fake_driver_balanced(void)
{
    return fake.pushes == fake.pops && fake.retains == fake.releases &&
           fake.loads == fake.unloads && fake.allocations == fake.frees && depth == 0;
}

void fake_driver_install(void)
{
    static const struct attn_driver table = {
        .init = fake_init,
        .driver_version = fake_driver_version,
        .error_name = fake_error_name,
        .device_count = fake_device_count,
        .device_get = fake_device_get,
        .device_name = fake_device_name,
        .device_attribute = fake_device_attribute,
        .primary_retain = fake_primary_retain,
        .primary_release = fake_primary_release,
        .context_current = fake_context_current,
        .context_device = fake_context_device,
        .context_push = fake_context_push,
        .context_pop = fake_context_pop,
        .library_load = fake_library_load,
        .library_unload = fake_library_unload,
        .library_kernel = fake_library_kernel,
        .kernel_function = fake_kernel_function,
        .function_load = fake_function_load,
        .function_set = fake_function_set,
        .launch = fake_launch_kernel,
        .tensor_map = fake_tensor_map,
        .memset_async = fake_memset_async,
        .mem_alloc = fake_mem_alloc,
        .mem_free = fake_mem_free,
    };
    fake = (struct fake_driver){
        .gpus = { { "Fake H200", 9, 0, 132, 232448 } },
        .num_gpus = 1,
        .version = 13000,
    };
    memset(counts, 0, sizeof(counts));
    memset(&library, 0, sizeof(library));
    depth = 0;
    attn_driver_replace(&table);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include "env.h"
#include "kernels/decode/decode_params.h"
#include "pack_scan.h"
#include "status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The oldest driver whose cuLibrary calls and cubins are those the packs are built for.
#define MIN_DRIVER_VERSION 13000

#define HOST_POLICY "chunk"

static enum attn_status status_of(const attn_cu_result result)
{
    switch (result) {
    case ATTN_CU_ERROR_OUT_OF_MEMORY: return ATTN_ERROR_NO_MEMORY;
    case ATTN_CU_ERROR_NO_DEVICE:
    case ATTN_CU_ERROR_INVALID_DEVICE: return ATTN_ERROR_NO_DEVICE;
    default: return ATTN_ERROR_DRIVER;
    }
}

enum attn_status attn_device_cu_fail(const struct attn_device *const device,
                                     const attn_cu_result result, const char *const what)
{
    const char *name = NULL;
    if (device->driver->error_name(result, &name) != ATTN_CU_SUCCESS || !name) name = "an error";
    return attn_fail(device->log, device->log_user, status_of(result),
                     "%s: the CUDA driver says %s (%d)", what, name, result);
}

attn_cu_result attn_device_enter(const struct attn_device *const device, bool *const pushed)
{
    attn_cu_context current = NULL;
    *pushed = false;
    attn_cu_result result = device->driver->context_current(&current);
    if (result != ATTN_CU_SUCCESS || current == device->context) return result;
    result = device->driver->context_push(device->context);
    *pushed = result == ATTN_CU_SUCCESS;
    return result;
}

void attn_device_leave(const struct attn_device *const device, const bool pushed)
{
    attn_cu_context popped;
    if (pushed) device->driver->context_pop(&popped);
}

// The policy in force: the caller's, else the environment's, else `declared`.
static void resolve_policy(struct attn_device *const device,
                           const struct attn_device_open_params *const params,
                           const char *const declared)
{
    struct attn_device_info *const info = &device->info;
    const char *const env = attn_env(ATTN_ENV_SPLITK);
    struct attn_splitk_policy parsed;
    const bool env_parses = attn_splitk_parse(env, &parsed);
    if (env && !env_parses)
        attn_report(
            device->log, device->log_user, ATTN_LOG_WARNING,
            "the environment variable %s is '%s', which is no split-K policy: it is ignored "
            "(use legacy, auto, chunk, chunk:N or a count)",
            ATTN_ENV_SPLITK, env);
    if (params->splitk_policy) {
        attn_splitk_parse(params->splitk_policy, &info->splitk_policy);
        info->splitk_source = ATTN_SOURCE_CALLER;
    } else {
        if (!env_parses && !attn_splitk_parse(declared, &parsed))
            attn_report(
                device->log, device->log_user, ATTN_LOG_WARNING,
                "the target declares the split-K policy '%s', which is none: legacy is used, "
                "under which bits depend on max_decode_seqs",
                declared);
        info->splitk_policy = attn_splitk_resolve_policy(declared, env);
        info->splitk_source = env_parses ? ATTN_SOURCE_ENVIRONMENT : ATTN_SOURCE_DECLARED;
    }
    info->batch_invariant = info->splitk_policy.kind != ATTN_SPLITK_LEGACY;
}

static void resolve_gqa_pack(struct attn_device *const device, const bool declared)
{
    const char *const env = attn_env(ATTN_ENV_GQA_PACK);
    bool on;
    const bool parses = attn_gqa_pack_parse(env, &on);
    if (env && !parses)
        attn_report(
            device->log, device->log_user, ATTN_LOG_WARNING,
            "the environment variable %s is '%s', which is neither on nor off: it is ignored",
            ATTN_ENV_GQA_PACK, env);
    device->info.gqa_pack = attn_gqa_pack_resolve(declared, env);
    device->info.gqa_pack_source = parses ? ATTN_SOURCE_ENVIRONMENT : ATTN_SOURCE_DECLARED;
}

static void resolve_settings(struct attn_device *const device,
                             const struct attn_device_open_params *const params)
{
    const char *const declared = device->pack ? device->pack->splitk_policy : HOST_POLICY;
    const bool gqa = device->pack ? device->pack->gqa_pack : ATTN_DECODE_GQA_PACK_DECLARED;
    resolve_gqa_pack(device, gqa);
    device->no_fa128 = attn_env(ATTN_ENV_NO_FA128);
    resolve_policy(device, params, declared);
    char policy[32];
    attn_splitk_format(device->info.splitk_policy, policy, sizeof(policy));
    static const char *const from[] = { "", "declared", "from the environment", "from the caller" };
    attn_report(device->log, device->log_user, ATTN_LOG_INFO, "%s: split-K policy %s, %s",
                device->info.name, policy, from[device->info.splitk_source]);
}

// Writes "name: reason; name: reason" of all packs seen.
static void summarise_packs(const struct attn_pack_list *const list, char *const text,
                            const size_t size)
{
    size_t used = 0;
    snprintf(text, size,
             "no packs were found; install the one of this GPU, or name its folder in "
             "pack_dir or %s",
             ATTN_ENV_PACK_PATH);
    for (size_t i = 0; i < list->count && used < size; i++) {
        const struct attn_pack_seen *const seen = &list->packs[i];
        const int written = snprintf(text + used, size - used, "%s%s: %s", i ? "; " : "",
                                     seen->name, seen->reason[0] ? seen->reason : "sound");
        used += written > 0 ? (size_t) written : 0;
    }
}

static void report_packs(const struct attn_device *const device,
                         const struct attn_pack_list *const list)
{
    for (size_t i = 0; i < list->count; i++) {
        const struct attn_pack_seen *const seen = &list->packs[i];
        const bool unsound = seen->status == ATTN_ERROR_IO;
        attn_report(device->log, device->log_user, unsound ? ATTN_LOG_WARNING : ATTN_LOG_INFO,
                    "pack %s (%s): %s", seen->name, seen->path,
                    seen->reason[0] ? seen->reason : "sound");
    }
}

// The first pack that fits: of that name, if one is given, else the compute capability asked about.
static const struct attn_pack_seen *choose_pack(const struct attn_device *const device,
                                                const struct attn_pack_list *const list,
                                                const char *const target)
{
    const struct attn_pack_seen *chosen = NULL;
    for (size_t i = 0; i < list->count; i++) {
        const struct attn_pack_seen *const seen = &list->packs[i];
        if (seen->status != ATTN_OK || (target && strcmp(seen->name, target) != 0)) continue;
        if (!chosen)
            chosen = seen;
        else
            attn_report(device->log, device->log_user, ATTN_LOG_WARNING,
                        "packs %s and %s both fit %s: %s is used, its name comes first",
                        chosen->path, seen->path, device->info.name, chosen->path);
    }
    return chosen;
}

static void adopt_pack(struct attn_device *const device, const struct attn_pack_seen *const seen)
{
    struct attn_device_info *const info = &device->info;
    device->pack = seen->pack;
    device->pack_handle = seen->handle;
    info->declared_sm_count = seen->pack->sm_count;
    info->memory_bandwidth_gbs = seen->pack->memory_bandwidth_gbs;
    info->num_kernels = (int32_t) seen->pack->num_rows;
    snprintf(info->target, sizeof(info->target), "%s", seen->pack->target);
    snprintf(info->arch, sizeof(info->arch), "%s", seen->pack->arch);
    snprintf(info->pack_path, sizeof(info->pack_path), "%s", seen->path);
}

// `target` NULL: the pack that fits the GPU of device->info.
static enum attn_status find_pack(struct attn_device *const device,
                                  const struct attn_device_open_params *const params,
                                  const char *const target)
{
    struct attn_device_info *const info = &device->info;
    struct attn_pack_list list;
    enum attn_status status =
        attn_pack_list_open(&list, params->pack_dir, attn_env(ATTN_ENV_PACK_PATH),
                            info->compute_capability_major, info->compute_capability_minor,
                            device->log, device->log_user);
    if (status != ATTN_OK) return status;
    report_packs(device, &list);
    const struct attn_pack_seen *const chosen = choose_pack(device, &list, target);
    if (chosen) {
        adopt_pack(device, chosen);
        if (target) {
            info->compute_capability_major = chosen->major;
            info->compute_capability_minor = chosen->minor;
        }
    } else {
        char seen[768];
        summarise_packs(&list, seen, sizeof(seen));
        if (target)
            status = attn_fail(device->log, device->log_user, ATTN_ERROR_NO_PACK,
                               "there is no pack of the target '%s': %s", target, seen);
        else
            status =
                attn_fail(device->log, device->log_user, ATTN_ERROR_NO_PACK,
                          "no pack fits %s (compute capability %d.%d): %s", info->name,
                          info->compute_capability_major, info->compute_capability_minor, seen);
    }
    attn_pack_list_close(&list, chosen);
    return status;
}

static enum attn_status open_target(struct attn_device *const device,
                                    const struct attn_device_open_params *const params)
{
    ATTN_REQUIRE(device->log, device->log_user, params->target && params->target[0] != '\0',
                 "params->target is missing: ATTN_DEVICE_TARGET needs the name of a target");
    snprintf(device->info.name, sizeof(device->info.name), "%s", params->target);
    const enum attn_status status = find_pack(device, params, params->target);
    if (status != ATTN_OK) return status;
    device->info.sm_count = device->pack->sm_count;
    device->info.smem_per_block = device->pack->smem_per_block;
    return ATTN_OK;
}

static enum attn_status start_driver(struct attn_device *const device)
{
    const char *reason = NULL;
    device->driver = attn_driver_get(&reason);
    if (!device->driver)
        return attn_fail(device->log, device->log_user, attn_driver_status(), "%s", reason);
    attn_cu_result result = device->driver->init(0);
    if (result != ATTN_CU_SUCCESS) return attn_device_cu_fail(device, result, "cuInit failed");
    int version = 0;
    result = device->driver->driver_version(&version);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the driver's version cannot be read");
    device->info.driver_version = version;
    if (version < MIN_DRIVER_VERSION)
        return attn_fail(
            device->log, device->log_user, ATTN_ERROR_DRIVER,
            "the NVIDIA driver is too old: it supports CUDA %d.%d, CUDA %d.%d or newer is "
            "needed; the packs are not at fault",
            version / 1000, version % 1000 / 10, MIN_DRIVER_VERSION / 1000,
            MIN_DRIVER_VERSION % 1000 / 10);
    return ATTN_OK;
}

static enum attn_status find_ordinal(struct attn_device *const device, const int32_t ordinal)
{
    int count = 0;
    attn_cu_result result = device->driver->device_count(&count);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the GPUs cannot be counted");
    if (ordinal >= count)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
                         "params->ordinal is %d, but the driver has %d GPU%s, counted from 0",
                         ordinal, count, count == 1 ? "" : "s");
    result = device->driver->device_get(&device->cu_device, ordinal);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the GPU cannot be had");
    return ATTN_OK;
}

static enum attn_status find_current(struct attn_device *const device)
{
    attn_cu_result result = device->driver->context_current(&device->context);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the current CUDA context cannot be read");
    if (!device->context)
        return attn_fail(
            device->log, device->log_user, ATTN_ERROR_NO_DEVICE,
            "no CUDA context is current in this thread: make one current first, or open a "
            "GPU by its ordinal");
    result = device->driver->context_device(&device->cu_device);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the GPU of the current context cannot be read");
    return ATTN_OK;
}

static enum attn_status read_gpu(struct attn_device *const device)
{
    struct attn_device_info *const info = &device->info;
    const struct attn_driver *const driver = device->driver;
    const struct {
        int attribute;
        int32_t *value;
    } wanted[] = {
        { ATTN_CU_DEVICE_CC_MAJOR, &info->compute_capability_major },
        { ATTN_CU_DEVICE_CC_MINOR, &info->compute_capability_minor },
        { ATTN_CU_DEVICE_SM_COUNT, &info->sm_count },
        { ATTN_CU_DEVICE_SMEM_PER_BLOCK_OPTIN, &info->smem_per_block },
    };
    attn_cu_result result =
        driver->device_name(info->name, (int) sizeof(info->name), device->cu_device);
    for (size_t i = 0; result == ATTN_CU_SUCCESS && i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        int value = 0;
        result = driver->device_attribute(&value, wanted[i].attribute, device->cu_device);
        *wanted[i].value = value;
    }
    info->name[sizeof(info->name) - 1] = '\0';
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result, "the properties of the GPU cannot be read");
    return ATTN_OK;
}

static enum attn_status check_smem(const struct attn_device *const device)
{
    for (uint32_t i = 0; i < device->pack->num_rows; i++) {
        const struct attn_pack_row *const row = &device->pack->rows[i];
        if (attn_pack_row_smem(row) > device->info.smem_per_block)
            return attn_fail(
                device->log, device->log_user, ATTN_ERROR_NO_PACK,
                "kernel %s of pack %s needs %d bytes of shared memory a block, %s offers %d",
                row->name, device->info.target, attn_pack_row_smem(row), device->info.name,
                device->info.smem_per_block);
    }
    return ATTN_OK;
}

static attn_cu_result load_kernel(struct attn_device *const device, const uint32_t index)
{
    const struct attn_driver *const driver = device->driver;
    const struct attn_pack_row *const row = &device->pack->rows[index];
    attn_cu_kernel kernel;
    attn_cu_result result = driver->library_kernel(&kernel, device->library, row->name);
    if (result == ATTN_CU_SUCCESS)
        result = driver->kernel_function(&device->functions[index], kernel);
    if (result == ATTN_CU_SUCCESS)
        result = driver->function_set(device->functions[index], ATTN_CU_FUNC_MAX_DYNAMIC_SMEM,
                                      attn_pack_row_smem(row));
    // Several blocks share an SM's, which the driver would rather give to L1.
    if (result == ATTN_CU_SUCCESS && attn_pack_row_smem(row) > 0)
        result = driver->function_set(device->functions[index], ATTN_CU_FUNC_SMEM_CARVEOUT, 100);
    // Loading is lazy otherwise, and the first launch would pay for it.
    if (result == ATTN_CU_SUCCESS) result = driver->function_load(device->functions[index]);
    return result;
}

static enum attn_status load_kernels(struct attn_device *const device)
{
    const struct attn_pack *const pack = device->pack;
    char what[256];
    bool pushed = false;
    attn_cu_result result = attn_device_enter(device, &pushed);
    snprintf(what, sizeof(what), "the context of %s cannot be made current", device->info.name);
    if (result != ATTN_CU_SUCCESS) goto out;
    result =
        device->driver->library_load(&device->library, pack->fatbin, NULL, NULL, 0, NULL, NULL, 0);
    if (result != ATTN_CU_SUCCESS) {
        device->library = NULL;
        snprintf(what, sizeof(what), "the kernels of pack %s cannot be loaded on %s", pack->target,
                 device->info.name);
    }
    for (uint32_t i = 0; result == ATTN_CU_SUCCESS && i < pack->num_rows; i++) {
        result = load_kernel(device, i);
        snprintf(what, sizeof(what), "kernel %s of pack %s cannot be loaded on %s",
                 pack->rows[i].name, pack->target, device->info.name);
    }

out:
    attn_device_leave(device, pushed);
    return result == ATTN_CU_SUCCESS ? ATTN_OK : attn_device_cu_fail(device, result, what);
}

static enum attn_status retain_context(struct attn_device *const device)
{
    const attn_cu_result result =
        device->driver->primary_retain(&device->context, device->cu_device);
    if (result != ATTN_CU_SUCCESS)
        return attn_device_cu_fail(device, result,
                                   "the primary context of the GPU cannot be retained");
    device->retained = true;
    return ATTN_OK;
}

// Everything is checked before anything is loaded: a kernel of another chip would fail only later,
// and some failures would stay with the context.
static enum attn_status open_gpu(struct attn_device *const device,
                                 const struct attn_device_open_params *const params)
{
    const bool by_ordinal = params->kind == ATTN_DEVICE_ORDINAL;
    enum attn_status status = start_driver(device);
    if (status == ATTN_OK)
        status = by_ordinal ? find_ordinal(device, params->ordinal) : find_current(device);
    if (status == ATTN_OK) status = read_gpu(device);
    if (status == ATTN_OK) status = find_pack(device, params, NULL);
    if (status == ATTN_OK) status = check_smem(device);
    if (status != ATTN_OK) return status;
    device->functions = calloc(device->pack->num_rows, sizeof(*device->functions));
    if (!device->functions)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_NO_MEMORY,
                         "out of memory for a table of %u kernels", device->pack->num_rows);
    if (by_ordinal) status = retain_context(device);
    if (status == ATTN_OK) status = load_kernels(device);
    if (status == ATTN_OK && device->info.sm_count != device->info.declared_sm_count)
        attn_report(
            device->log, device->log_user, ATTN_LOG_WARNING,
            "%s has %d SMs, its target %s declares %d: the policy uses the declared count, the "
            "schedule the real one",
            device->info.name, device->info.sm_count, device->info.target,
            device->info.declared_sm_count);
    return status;
}

static enum attn_status open_kind(struct attn_device *const device,
                                  const struct attn_device_open_params *const params)
{
    enum attn_status status = ATTN_OK;
    if (params->kind == ATTN_DEVICE_HOST)
        snprintf(device->info.name, sizeof(device->info.name), "host executor");
    else if (params->kind == ATTN_DEVICE_TARGET)
        status = open_target(device, params);
    else
        status = open_gpu(device, params);
    if (status == ATTN_OK) resolve_settings(device, params);
    return status;
}

static enum attn_status check_params(const struct attn_device_open_params *const params)
{
    ATTN_REQUIRE(params->log, params->log_user,
                 params->kind >= ATTN_DEVICE_HOST && params->kind <= ATTN_DEVICE_TARGET,
                 "params->kind is %d, which is no kind of device (%d..%d)", (int) params->kind,
                 ATTN_DEVICE_HOST, ATTN_DEVICE_TARGET);
    ATTN_REQUIRE(params->log, params->log_user,
                 params->kind != ATTN_DEVICE_ORDINAL || params->ordinal >= 0,
                 "params->ordinal is %d: GPUs are counted from 0", params->ordinal);
    ATTN_REQUIRE(params->log, params->log_user, params->grid_limit >= 0,
                 "params->grid_limit is %d: it has to be 0 (no limit) or positive",
                 params->grid_limit);
    struct attn_splitk_policy policy;
    ATTN_REQUIRE(
        params->log, params->log_user,
        !params->splitk_policy || attn_splitk_parse(params->splitk_policy, &policy),
        "params->splitk_policy is '%s', which is no split-K policy: use legacy, auto, chunk, "
        "chunk:N with N a power of two in %d..%d, or a count",
        params->splitk_policy, ATTN_SPLITK_MIN_CHUNK, ATTN_SPLITK_MAX_CHUNK);
    return ATTN_OK;
}

enum attn_status attn_device_open(struct attn_device **const device,
                                  const struct attn_device_open_params *const params)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL: it receives the handle");
    *device = NULL;
    ATTN_REQUIRE(NULL, NULL, params, "params is NULL");
    struct attn_device_open_params own;
    enum attn_status status = attn_params_copy(NULL, NULL, "params", &own, sizeof(own), params);
    if (status == ATTN_OK) status = check_params(&own);
    if (status != ATTN_OK) return status;
    struct attn_device *opened = calloc(1, sizeof(*opened));
    if (!opened)
        return attn_fail(own.log, own.log_user, ATTN_ERROR_NO_MEMORY, "out of memory for a device");
    opened->info.size = (uint32_t) sizeof(opened->info);
    opened->info.kind = own.kind;
    opened->log = own.log;
    opened->log_user = own.log_user;
    opened->grid_limit = own.grid_limit;
    status = open_kind(opened, &own);
    if (status == ATTN_OK)
        *device = opened;
    else
        attn_device_close(&opened);
    return status;
}

void attn_device_close(struct attn_device **const device)
{
    if (!device || !*device) return;
    struct attn_device *const closing = *device;
    // A failure here has nobody to go to, and leaves nothing to do: the context may be gone
    // already.
    if (closing->library) closing->driver->library_unload(closing->library);
    if (closing->retained) closing->driver->primary_release(closing->cu_device);
    if (closing->pack_handle) dlclose(closing->pack_handle);
    free(closing->functions);
    free(closing);
    *device = NULL;
}

enum attn_status attn_device_launch(const struct attn_device *const device,
                                    const struct attn_pack_row *const row, const int32_t grid,
                                    void *const args, const attn_stream stream)
{
    const attn_cu_function function = device->functions[row - device->pack->rows];
    void *arguments[] = { args };
    // Kernels wait for the work before them themselves: by then they are on the chip.
    const struct attn_cu_launch_attribute overlap = {
        .id = ATTN_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION,
        .value = { .number = 1 },
    };
    const struct attn_cu_launch_config config = {
        .grid_x = (unsigned) grid,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = (unsigned) attn_pack_row_threads(row),
        .block_y = 1,
        .block_z = 1,
        .smem_bytes = (unsigned) attn_pack_row_smem(row),
        .stream = stream,
        .attributes = &overlap,
        .num_attributes = 1,
    };
    bool pushed;
    attn_cu_result result = attn_device_enter(device, &pushed);
    if (result == ATTN_CU_SUCCESS)
        result = device->driver->launch(&config, function, arguments, NULL);
    attn_device_leave(device, pushed);
    if (result == ATTN_CU_SUCCESS) return ATTN_OK;
    char what[128];
    snprintf(what, sizeof(what), "kernel %s cannot be launched", row->name);
    return attn_device_cu_fail(device, result, what);
}

enum attn_status attn_device_describe(const struct attn_device *const device,
                                      struct attn_device_info *const info)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    ATTN_REQUIRE(device->log, device->log_user, info, "info is NULL");
    return attn_result_copy(device->log, device->log_user, "info", info, &device->info,
                            sizeof(device->info));
}

const char *attn_device_kernel(const struct attn_device *const device, const int32_t index)
{
    if (!device || index < 0 || index >= device->info.num_kernels) return NULL;
    return device->pack->rows[index].name;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Prefill: which entry takes a call, and the call itself.
#include "attn/prefill.h"

#include "device.h"
#include "host/prefill.h"
#include "prefill_check.h"
#include "status.h"

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

// An original or a twin.
struct entry {
    const char *name;
    bool paged, twin;
};

static enum attn_status copy_params(const struct attn_device *const device,
                                    const struct attn_prefill_params *const params,
                                    struct attn_prefill_params *const own)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    REQUIRE(params, "params is NULL");
    return attn_params_copy(device->log, device->log_user, "params", own, sizeof(*own), params);
}

// No pack of this version has a twin's kernel; the host executor stands in for any kernel.
static bool twin_applies(const struct attn_device *const device,
                         const struct attn_prefill_params *const p)
{
    return device->info.kind == ATTN_DEVICE_HOST && !device->no_fa128 &&
           p->head_dim == ATTN_PREFILL_FA128_HEAD_DIM && p->causal && p->window == 0 &&
           p->num_kv_heads > 0 && p->num_q_heads % p->num_kv_heads == 0 && p->batch != 0 &&
           p->q_len != 0;
}

static enum attn_status compute(const struct attn_device *const device,
                                struct attn_prefill_params *const own)
{
    const enum attn_status status = attn_prefill_check_params(device, own);
    if (status != ATTN_OK) return status;
    if (device->info.kind != ATTN_DEVICE_HOST)
        return attn_fail(device->log, device->log_user, ATTN_ERROR_UNSUPPORTED,
                         "%s: in this version prefill runs on the host executor alone "
                         "(ATTN_DEVICE_HOST)",
                         device->info.name);
    if (!attn_prefill_is_empty(own)) attn_reference_prefill(own);
    return ATTN_OK;
}

static enum attn_status run(const struct attn_device *const device,
                            const struct attn_prefill_params *const params,
                            const struct entry *const entry)
{
    struct attn_prefill_params own;
    enum attn_status status = copy_params(device, params, &own);
    if (status != ATTN_OK) return status;
    if (entry->twin && !twin_applies(device, &own)) return ATTN_DECLINED;
    status = attn_prefill_check_layout(device, &own, entry->name, entry->paged);
    return status == ATTN_OK ? compute(device, &own) : status;
}

enum attn_status attn_prefill(struct attn_device *const device,
                              const struct attn_prefill_params *const params,
                              const attn_stream stream)
{
    (void) stream;
    struct attn_prefill_params own;
    const enum attn_status status = copy_params(device, params, &own);
    return status == ATTN_OK ? compute(device, &own) : status;
}

enum attn_status attn_prefill_64(struct attn_device *const device,
                                 const struct attn_prefill_params *const params,
                                 const attn_stream stream)
{
    (void) stream;
    const struct entry entry = { "attn_prefill_64", false, false };
    return run(device, params, &entry);
}

enum attn_status attn_prefill_paged_64(struct attn_device *const device,
                                       const struct attn_prefill_params *const params,
                                       const attn_stream stream)
{
    (void) stream;
    const struct entry entry = { "attn_prefill_paged_64", true, false };
    return run(device, params, &entry);
}

enum attn_status attn_prefill_fa128(struct attn_device *const device,
                                    const struct attn_prefill_params *const params,
                                    const attn_stream stream)
{
    (void) stream;
    const struct entry entry = { "attn_prefill_fa128", false, true };
    return run(device, params, &entry);
}

enum attn_status attn_prefill_fa128_paged(struct attn_device *const device,
                                          const struct attn_prefill_params *const params,
                                          const attn_stream stream)
{
    (void) stream;
    const struct entry entry = { "attn_prefill_fa128_paged", true, true };
    return run(device, params, &entry);
}

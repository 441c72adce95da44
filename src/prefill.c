/* SPDX-License-Identifier: Apache-2.0 */
// Prefill: which entry takes a call, and the call itself.
#include "attn/prefill.h"

#include "device.h"
#include "host/prefill.h"
#include "prefill_check.h"
#include "prefill_launch.h"
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

// The host executor stands in for any kernel.
static bool has_twin(const struct attn_device *const device,
                     const struct attn_prefill_params *const p)
{
    return device->info.kind == ATTN_DEVICE_HOST ||
           attn_prefill_find_row(device, p->dtype, p->head_dim, ATTN_PREFILL_TWIN);
}

static bool twin_applies(const struct attn_device *const device,
                         const struct attn_prefill_params *const p)
{
    return !device->no_fa128 && p->head_dim == ATTN_PREFILL_FA128_HEAD_DIM && p->causal &&
           p->window == 0 && p->num_kv_heads > 0 && p->num_q_heads % p->num_kv_heads == 0 &&
           p->batch != 0 && p->q_len != 0 && has_twin(device, p);
}

static enum attn_status compute(const struct attn_device *const device,
                                struct attn_prefill_params *const own,
                                const enum attn_prefill_form form, const attn_stream stream)
{
    const enum attn_status status = attn_prefill_check_params(device, own);
    if (status != ATTN_OK) return status;
    if (device->info.kind != ATTN_DEVICE_HOST)
        return attn_prefill_launch(device, own, form, stream);
    if (!attn_prefill_is_empty(own)) attn_reference_prefill(own);
    return ATTN_OK;
}

static enum attn_status run(const struct attn_device *const device,
                            const struct attn_prefill_params *const params,
                            const struct entry *const entry, const attn_stream stream)
{
    struct attn_prefill_params own;
    enum attn_status status = copy_params(device, params, &own);
    if (status != ATTN_OK) return status;
    if (entry->twin && !twin_applies(device, &own)) return ATTN_DECLINED;
    status = attn_prefill_check_layout(device, &own, entry->name, entry->paged);
    if (status != ATTN_OK) return status;
    return compute(device, &own, entry->twin ? ATTN_PREFILL_TWIN : ATTN_PREFILL_ORIGINAL, stream);
}

enum attn_status attn_prefill(struct attn_device *const device,
                              const struct attn_prefill_params *const params,
                              const attn_stream stream)
{
    struct attn_prefill_params own;
    const enum attn_status status = copy_params(device, params, &own);
    return status == ATTN_OK ? compute(device, &own, ATTN_PREFILL_ANY, stream) : status;
}

enum attn_status attn_prefill_64(struct attn_device *const device,
                                 const struct attn_prefill_params *const params,
                                 const attn_stream stream)
{
    const struct entry entry = { "attn_prefill_64", false, false };
    return run(device, params, &entry, stream);
}

enum attn_status attn_prefill_paged_64(struct attn_device *const device,
                                       const struct attn_prefill_params *const params,
                                       const attn_stream stream)
{
    const struct entry entry = { "attn_prefill_paged_64", true, false };
    return run(device, params, &entry, stream);
}

enum attn_status attn_prefill_fa128(struct attn_device *const device,
                                    const struct attn_prefill_params *const params,
                                    const attn_stream stream)
{
    const struct entry entry = { "attn_prefill_fa128", false, true };
    return run(device, params, &entry, stream);
}

enum attn_status attn_prefill_fa128_paged(struct attn_device *const device,
                                          const struct attn_prefill_params *const params,
                                          const attn_stream stream)
{
    const struct entry entry = { "attn_prefill_fa128_paged", true, true };
    return run(device, params, &entry, stream);
}

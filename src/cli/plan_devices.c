/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/plan.h"

double plan_number(const json_t *const plan, const char *const key)
{
    return json_number_value(json_object_get(plan, key));
}

static void add_name(void *const user, const struct attn_target_info *const info)
{
    if (info->status == ATTN_OK) json_array_append_new(user, json_string(info->name));
}

// The plan of each target asked for; *failed if there was none for one of them.
static json_t *plan_targets(const struct plan_devices *const devices, bool *const failed)
{
    json_t *const plans = json_array(), *const names = json_array();
    size_t i;
    json_t *name;
    if (devices->target)
        json_array_append_new(names, json_string(devices->target));
    else if (attn_target_scan(NULL, 0, 0, add_name, names) != ATTN_OK)
        cli_fail_library();
    else if (!json_array_size(names))
        cli_fail(
            "no packs are found, so there is nothing to plan for; set ATTN_PACK_PATH to their folder");
    *failed = !json_array_size(names);
    json_array_foreach(names, i, name)
    {
        struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
        params.kind = ATTN_DEVICE_TARGET;
        params.target = json_string_value(name);
        json_t *const document = devices->plan(devices->user, &params);
        if (document)
            json_array_append_new(plans, document);
        else
            *failed = true;
    }
    json_decref(names);
    return plans;
}

int plan_all(const struct plan_devices *const devices)
{
    bool failed = false;
    json_t *plans;
    size_t i;
    json_t *plan;
    if (devices->on_device) {
        struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
        params.kind = ATTN_DEVICE_ORDINAL;
        json_t *const document = devices->plan(devices->user, &params);
        plans = json_array();
        failed = !document;
        if (document) json_array_append_new(plans, document);
    } else {
        plans = plan_targets(devices, &failed);
    }
    if (devices->as_json) {
        const int result =
            cli_print_json(json_pack("{s:s, s:o}", "op", devices->op, "plans", plans));
        return failed ? CLI_FAILED : result;
    }
    json_array_foreach(plans, i, plan) devices->print(devices->user, plan);
    json_decref(plans);
    return failed ? CLI_FAILED : CLI_FINE;
}

/* SPDX-License-Identifier: Apache-2.0 */
// `attn info`: what is here, what fits it, and what was decided. Gathered as one JSON document,
// which the readable form is printed from.
#include "cli/cli.h"

// More GPUs than a host has.
#define MAX_GPUS 64

static void print_help(void)
{
    printf(
        "Usage: attn info [--json]\n\n"
        "Shows the GPUs, the packs (one per chip) with the one that fits and why the others don't, the\n"
        "policies in force with where each came from, and what reads swap files. Needs no GPU.\n\n"
        "  --json   one JSON object\n");
}

static const char *name_source(const enum attn_source source)
{
    switch (source) {
    case ATTN_SOURCE_ENVIRONMENT: return "environment";
    case ATTN_SOURCE_CALLER: return "caller";
    case ATTN_SOURCE_DECLARED: break;
    }
    return "declared";
}

static void add_pack(void *const user, const struct attn_target_info *const info)
{
    char cc[32];
    snprintf(cc, sizeof(cc), "%d.%d", info->compute_capability_major,
             info->compute_capability_minor);
    json_array_append_new(user,
                          json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:s, s:b, s:i, s:s, s:s}",
                                    "name", info->name, "path", info->path, "arch", info->arch,
                                    "compute_capability", cc, "sm_count", (int) info->sm_count,
                                    "memory_bandwidth_gbs", (int) info->memory_bandwidth_gbs,
                                    "smem_per_block", (int) info->smem_per_block, "splitk_policy",
                                    info->splitk_policy, "gqa_pack", info->gqa_pack != 0, "kernels",
                                    (int) info->num_kernels, "status",
                                    attn_status_name(info->status), "reason", info->reason));
}

// The packs as seen by compute capability major.minor; 0, 0 asks for none.
static json_t *scan_packs(const int major, const int minor)
{
    json_t *const packs = json_array();
    if (attn_target_scan(NULL, major, minor, add_pack, packs) != ATTN_OK)
        cli_warn("%s", attn_last_error());
    return packs;
}

// Policies of an open device, or why it does not open.
static json_t *describe_policies(const struct attn_device_open_params *const params)
{
    struct attn_device_info info = { .size = sizeof(info) };
    struct attn_device *device = NULL;
    char policy[64] = "";
    const enum attn_status status = attn_device_open(&device, params);
    if (status != ATTN_OK)
        return json_pack("{s:s, s:s}", "status", attn_status_name(status), "error",
                         attn_last_error());
    attn_device_describe(device, &info);
    attn_splitk_format(info.splitk_policy, policy, sizeof(policy));
    attn_device_close(&device);
    return json_pack("{s:s, s:s, s:s, s:i, s:s, s:s, s:b, s:s, s:b}", "status",
                     attn_status_name(status), "target", info.target, "pack", info.pack_path,
                     "kernels", (int) info.num_kernels, "splitk_policy", policy, "splitk_source",
                     name_source(info.splitk_source), "gqa_pack", info.gqa_pack != 0,
                     "gqa_pack_source", name_source(info.gqa_pack_source), "batch_invariant",
                     info.batch_invariant != 0);
}

static json_t *describe_gpu(struct gpu *const gpu, const int ordinal)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct gpu_description found;
    char cc[32];
    const int failed = gpu_describe(gpu, &found);
    if (failed)
        return json_pack("{s:i, s:s}", "ordinal", ordinal, "error",
                         "the driver does not describe it");
    params.kind = ATTN_DEVICE_ORDINAL;
    params.ordinal = ordinal;
    params.log = cli_log;
    snprintf(cc, sizeof(cc), "%d.%d", found.compute_capability_major,
             found.compute_capability_minor);
    return json_pack("{s:i, s:s, s:s, s:i, s:I, s:i, s:i, s:o, s:o}", "ordinal", ordinal, "name",
                     found.name, "compute_capability", cc, "sm_count", found.sm_count,
                     "memory_bytes", (json_int_t) found.memory_bytes, "l2_bytes", found.l2_bytes,
                     "driver_version", found.driver_version, "in_force", describe_policies(&params),
                     "packs",
                     scan_packs(found.compute_capability_major, found.compute_capability_minor));
}

static json_t *gather(void)
{
    struct attn_device_open_params host = ATTN_DEVICE_OPEN_PARAMS_INIT;
    json_t *const gpus = json_array();
    json_t *no_gpu = json_null();
    host.log = cli_log;
    for (int ordinal = 0; ordinal < MAX_GPUS; ordinal++) {
        char why[512];
        struct gpu *gpu;
        if (gpu_open(&gpu, ordinal, why, sizeof(why))) {
            if (!ordinal) no_gpu = json_string(why);
            break;
        }
        json_array_append_new(gpus, describe_gpu(gpu, ordinal));
        gpu_close(&gpu);
    }
    return json_pack("{s:s, s:o, s:o, s:o, s:o, s:s}", "version", attn_version(), "gpus", gpus,
                     "no_gpu", no_gpu, "packs", scan_packs(0, 0), "host_executor",
                     describe_policies(&host), "swap_file_backend", attn_swap_file_backend());
}

static const char *get_text(const json_t *const object, const char *const key)
{
    const char *const text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static int get_int(const json_t *const object, const char *const key)
{
    return (int) json_integer_value(json_object_get(object, key));
}

static void print_policies(const json_t *const in_force, const char *const indent)
{
    if (json_object_get(in_force, "error")) {
        printf("%snot usable: %s\n", indent, get_text(in_force, "error"));
        return;
    }
    printf("%ssplit-K policy %s (%s), GQA packing %s (%s)\n", indent,
           get_text(in_force, "splitk_policy"), get_text(in_force, "splitk_source"),
           json_is_true(json_object_get(in_force, "gqa_pack")) ? "on" : "off",
           get_text(in_force, "gqa_pack_source"));
    printf("%sa sequence's bits depend on %s\n", indent,
           json_is_true(json_object_get(in_force, "batch_invariant"))
               ? "that sequence alone"
               : "max_decode_seqs too (policy legacy)");
}

static void print_packs(const json_t *const packs, const char *const indent, const bool for_gpu)
{
    size_t i;
    json_t *pack;
    if (!json_array_size(packs)) printf("%snone found\n", indent);
    json_array_foreach(packs, i, pack)
    {
        const bool fits = !*get_text(pack, "reason");
        printf("%s%s: ", indent, get_text(pack, "name"));
        if (fits)
            printf("%s%s, %d kernels, %s\n", for_gpu ? "fits; " : "", get_text(pack, "arch"),
                   get_int(pack, "kernels"), get_text(pack, "path"));
        else
            printf("%s\n", get_text(pack, "reason"));
    }
}

static void print_readable(const json_t *const all)
{
    size_t i;
    json_t *gpu;
    printf("attn %s\n\nGPUs\n", get_text(all, "version"));
    if (json_is_string(json_object_get(all, "no_gpu")))
        printf("  none: %s\n", get_text(all, "no_gpu"));
    json_array_foreach(json_object_get(all, "gpus"), i, gpu)
    {
        const json_t *const in_force = json_object_get(gpu, "in_force");
        const int driver = get_int(gpu, "driver_version");
        printf("  %d: %s", get_int(gpu, "ordinal"), get_text(gpu, "name"));
        if (!in_force) {
            printf(": %s\n", get_text(gpu, "error"));
            continue;
        }
        printf(", compute capability %s, %d SMs, %.1f GB, driver for CUDA %d.%d\n",
               get_text(gpu, "compute_capability"), get_int(gpu, "sm_count"),
               (double) json_integer_value(json_object_get(gpu, "memory_bytes")) * 1e-9,
               driver / 1000, driver % 1000 / 10);
        print_policies(in_force, "     ");
        printf("     packs\n");
        print_packs(json_object_get(gpu, "packs"), "       ", true);
    }
    if (!json_array_size(json_object_get(all, "gpus"))) {
        printf("\nPacks\n");
        print_packs(json_object_get(all, "packs"), "  ", false);
    }
    printf("\nHost executor\n");
    print_policies(json_object_get(all, "host_executor"), "  ");
    printf("\nSwap files are read by %s\n", get_text(all, "swap_file_backend"));
}

int command_info(const int argc, char **const argv)
{
    bool as_json;
    int status;
    if (!cli_read_json_option("info", argc, argv, print_help, &as_json, &status)) return status;
    json_t *const all = gather();
    if (as_json) return cli_print_json(all);
    if (!all) return cli_fail("out of memory, or a name that is not UTF-8");
    print_readable(all);
    json_decref(all);
    return CLI_FINE;
}

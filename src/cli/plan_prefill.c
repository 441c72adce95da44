/* SPDX-License-Identifier: Apache-2.0 */
// `attn plan prefill`.
#include "cli/plan.h"
#include "cli/prefill_shape.h"
#include "cli/shape.h"

#include <getopt.h>
#include <string.h>

enum {
    OPTION_TARGET = PREFILL_OPTION_END,
    OPTION_DEVICE,
    OPTION_KERNEL,
    OPTION_JSON,
    OPTION_NO_WORKSPACE,
};

struct plan_prefill {
    struct prefill_shape shape;
    const char *target;
    bool on_device, as_json, without_workspace;
    // As in struct attn_prefill_shape.
    int32_t rows;
};

static void print_help(void)
{
    printf(
        "Usage: attn plan prefill [options]\n\n"
        "Shows the kernel, the launch, and the flops and bytes of a call with sequences of the longest\n"
        "length. Needs no GPU.\n\n" PREFILL_HELP
        "  --kernel K       auto; 64 or 128 query tokens a block (auto)\n"
        "  --no-workspace   the long form, however few the query tokens\n"
        "  --target NAME    one target; without it, every pack that is found\n"
        "  --device         the GPU of this machine\n"
        "  --json           one JSON object\n");
}

static struct attn_prefill_shape make_shape(const struct plan_prefill *const options)
{
    const struct prefill_shape *const from = &options->shape;
    struct attn_prefill_params params = ATTN_PREFILL_PARAMS_INIT;
    params.dtype = from->dtype;
    params.batch = from->batch;
    params.q_len = prefill_shape_tokens(from, from->max_len);
    params.kv_len = from->max_len;
    params.q_offset = params.kv_len - params.q_len;
    params.num_q_heads = from->num_q_heads;
    params.num_kv_heads = from->num_kv_heads;
    params.head_dim = from->head_dim;
    params.causal = !from->not_causal;
    params.window = from->window;
    struct attn_prefill_shape shape = attn_prefill_shape_of(&params);
    shape.rows = options->rows;
    if (options->without_workspace || from->contiguous) return shape;
    shape.page_size = from->page_size;
    shape.max_pages_per_seq = from->max_len > 0 ? shape_pages(from->max_len, from->page_size) : 1;
    return shape;
}

static json_t *plan_device(const void *const user, struct attn_device_open_params *const params)
{
    const struct attn_prefill_shape shape = make_shape(user);
    struct attn_device_info info = { .size = sizeof(info) };
    struct attn_prefill_plan plan = { .size = sizeof(plan) };
    struct attn_device *device = NULL;
    json_t *document = NULL;
    params->log = cli_log;
    const bool planned = attn_device_open(&device, params) == ATTN_OK &&
                         attn_device_describe(device, &info) == ATTN_OK &&
                         attn_prefill_plan(device, &shape, &plan) == ATTN_OK;
    // Sequences of one length have one form.
    const bool is_short = planned && !plan.kernel;
    if (planned)
        document = json_pack(
            "{s:s, s:s, s:i, s:i, s:i, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:I, s:i}",
            "target", info.target, "device", info.name, "q_len", (int) shape.q_len, "kv_len",
            (int) shape.kv_len, "q_offset", (int) shape.q_offset, "kernel",
            is_short ? plan.short_kernel : plan.kernel, "rows", (int) plan.rows, "tiles",
            (int) plan.tiles, "grid", (int) (is_short ? plan.short_grid : plan.grid), "block",
            (int) (is_short ? plan.short_block : plan.block), "smem_bytes",
            (int) (is_short ? plan.short_smem_bytes : plan.smem_bytes), "flops", plan.flops,
            "kv_bytes", plan.kv_bytes, "other_bytes", plan.other_bytes, "workspace_bytes",
            (json_int_t) plan.workspace_bytes, "num_counters", (int) plan.num_counters);
    else
        cli_fail_library();
    attn_device_close(&device);
    return document;
}

static void print_plan(const void *const user, const json_t *const plan)
{
    (void) user;
    printf("%s\n", json_string_value(json_object_get(plan, "target")));
    printf("  kernel      %s\n", json_string_value(json_object_get(plan, "kernel")));
    const double workspace = plan_number(plan, "workspace_bytes");
    if (workspace > 0 && plan_number(plan, "rows") == 0)
        printf("  form        short: blocks share the keys out, as in decode\n");
    else
        printf("  tiles       %.0f of %.0f query tokens, a block for each and each query head\n",
               plan_number(plan, "tiles"), plan_number(plan, "rows"));
    printf("  launch      %.0f blocks of %.0f threads, %.0f bytes of shared memory each\n",
           plan_number(plan, "grid"), plan_number(plan, "block"), plan_number(plan, "smem_bytes"));
    if (workspace > 0)
        printf("  workspace   %.0f bytes, %.0f counters\n", workspace,
               plan_number(plan, "num_counters"));
    printf("  work        %.4g flops; %.0f bytes of K and V, %.0f of q and o\n",
           plan_number(plan, "flops"), plan_number(plan, "kv_bytes"),
           plan_number(plan, "other_bytes"));
}

static int read_option(struct plan_prefill *const to, const int option)
{
    switch (option) {
    case OPTION_TARGET: to->target = optarg; return CLI_FINE;
    case OPTION_DEVICE: to->on_device = true; return CLI_FINE;
    case OPTION_JSON: to->as_json = true; return CLI_FINE;
    case OPTION_NO_WORKSPACE: to->without_workspace = true; return CLI_FINE;
    case OPTION_KERNEL:
        to->rows = !strcmp(optarg, "64") ? 64 : !strcmp(optarg, "128") ? 128 : 0;
        if (to->rows || !strcmp(optarg, "auto")) return CLI_FINE;
        return cli_usage("plan", "--kernel is '%s'; it is auto, 64 or 128", optarg);
    default: return prefill_shape_read(&to->shape, "plan", option, optarg);
    }
}

int plan_prefill(const int argc, char **const argv)
{
    static const struct option options[] = {
        PREFILL_OPTIONS,
        { "device", no_argument, NULL, OPTION_DEVICE },
        { "help", no_argument, NULL, 'h' },
        { "json", no_argument, NULL, OPTION_JSON },
        { "kernel", required_argument, NULL, OPTION_KERNEL },
        { "no-workspace", no_argument, NULL, OPTION_NO_WORKSPACE },
        { "target", required_argument, NULL, OPTION_TARGET },
        { NULL, 0, NULL, 0 },
    };
    struct plan_prefill plan = { .target = NULL };
    int option, result = CLI_FINE;
    prefill_shape_init(&plan.shape);
    while (!result && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&plan, option);
    }
    if (!result && optind < argc)
        result = cli_usage("plan", "'%s' is one argument too many", argv[optind]);
    if (!result) result = prefill_shape_finish(&plan.shape, "plan");
    if (!result && plan.target && plan.on_device)
        result = cli_usage("plan", "--target and --device exclude each other");
    if (result) return result;
    const struct plan_devices devices = {
        .op = "prefill",
        .target = plan.target,
        .on_device = plan.on_device,
        .as_json = plan.as_json,
        .plan = plan_device,
        .print = print_plan,
        .user = &plan,
    };
    return plan_all(&devices);
}

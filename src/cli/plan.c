/* SPDX-License-Identifier: Apache-2.0 */
// `attn plan`: how a call would run on a target, and the time its bytes take there. Needs no GPU.
#include "cli/plan.h"
#include "cli/execute.h"
#include "cli/shape.h"

#include <getopt.h>
#include <string.h>

enum {
    OPTION_TARGET = SHAPE_OPTION_END,
    OPTION_DEVICE,
    OPTION_POLICY,
    OPTION_JSON,
    OPTION_TILE,
    OPTION_RESIDENT,
    OPTION_PLANES,
    OPTION_LAYERS,
};

struct plan_options {
    struct shape_options shape;
    const char *target;
    const char *policy;
    bool on_device;
    bool as_json;
    // Of tiled and swap; 0: not given.
    int32_t tile, resident, planes, layers;
};

static void print_help(void)
{
    printf(
        "Usage: attn plan decode|ctm|tiled|swap [options]\n"
        "       attn plan prefill [options]; 'attn plan prefill --help' has them\n\n"
        "Shows the kernel, how the keys are cut, the launch, the workspace, and the time that reading\n"
        "the bytes takes at the target's memory bandwidth. Needs no GPU.\n\n" SHAPE_HELP
        "  --target NAME    one target; without it, every pack that is found\n"
        "  --device         the GPU of this machine\n"
        "  --policy P       decode; split-K policy: legacy, auto, chunk, chunk:N, a count, off\n"
        "  --tile N         tiled, swap; blocks of a tile (64, or what --len takes)\n"
        "  --resident N     swap; blocks that have slots on the GPU (as few as there can be)\n"
        "  --planes N       swap; tiles in work (2)\n"
        "  --layers N       swap; layers of a step (1)\n"
        "  --json           one JSON object\n");
}

// Bytes are planned for whole pages; a length that ends within one reads less.
static double scale_kv_bytes(const struct shape_options *const shape, const double kv_bytes)
{
    const int64_t keys = (int64_t) shape_pages(shape->max_len, shape->page_size) * shape->page_size;
    const int64_t planned = shape->window && shape->window < keys ? shape->window : keys;
    return planned ? kv_bytes * shape_attended(shape->max_len, shape->window) / (double) planned
                   : 0.0;
}

static json_t *make_document(const struct shape_options *const shape,
                             const struct attn_device_info *const info,
                             const struct attn_decode_plan *const plan)
{
    const double kv_bytes = scale_kv_bytes(shape, plan->kv_bytes);
    const double share = plan->kv_bytes > 0.0 ? kv_bytes / plan->kv_bytes : 0.0;
    const double bytes = kv_bytes + plan->other_bytes;
    char policy[64];
    attn_splitk_format(info->splitk_policy, policy, sizeof(policy));
    return json_pack(
        "{s:s, s:s, s:i, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:i, s:f, s:f, s:f, s:i, s:f}",
        "target", info->target, "device", info->name, "q_len", (int) shape->q_len, "kernel",
        plan->kernel, "splitk_policy", policy, "num_splits", (int) plan->num_splits, "chunk_keys",
        (int) plan->chunk_keys, "grid", (int) plan->grid, "block", (int) plan->block, "smem_bytes",
        (int) plan->smem_bytes, "workspace_bytes", (json_int_t) plan->workspace_bytes, "counters",
        (int) plan->num_counters, "kv_bytes", kv_bytes, "other_bytes", plan->other_bytes, "flops",
        plan->flops * share, "memory_bandwidth_gbs", (int) info->memory_bandwidth_gbs, "limit_us",
        info->memory_bandwidth_gbs ? bytes / info->memory_bandwidth_gbs * 1e-3 : 0.0);
}

static struct attn_ctm_params make_ctm(const struct shape_options *const shape)
{
    struct attn_ctm_params params = ATTN_CTM_PARAMS_INIT;
    params.batch_size = shape->batch;
    params.q_len = shape->q_len;
    params.num_q_heads = shape->num_q_heads;
    params.num_kv_heads = shape->num_kv_heads;
    params.head_dim = shape->head_dim;
    params.sliding_window = shape->window;
    params.fp8_kv = shape->kv_dtype == ATTN_DTYPE_E4M3;
    return params;
}

// With q_len 1 either will do.
static bool is_ctm_served(const struct attn_ctm_params *const p)
{
    return attn_ctm_supported_tree(p->num_q_heads, p->num_kv_heads, p->head_dim, p->fp8_kv,
                                   p->sliding_window, false) ||
           (p->q_len == 1 && attn_ctm_supported(p->num_q_heads, p->num_kv_heads, p->head_dim,
                                                p->fp8_kv, p->sliding_window, false));
}

// Sizes of a ctm call follow from its arguments alone, not from the plan.
static void set_ctm_sizes(const struct shape_options *const shape,
                          struct attn_decode_plan *const plan)
{
    const struct attn_ctm_params params = make_ctm(shape);
    const struct execute_ctm_sizes sizes = execute_find_ctm_sizes(&params);
    plan->workspace_bytes = sizes.workspace_bytes;
    plan->num_counters = sizes.num_semaphores;
}

static void add_ctm_sizes(json_t *const document, const struct attn_decode_plan *const plan)
{
    const json_int_t elems = (json_int_t) (plan->workspace_bytes / sizeof(float));
    json_object_set_new(document, "workspace_elems", json_integer(elems));
    json_object_set_new(document, "semaphore_elems", json_integer(plan->num_counters));
}

// NULL after a sentence.
static json_t *plan_device(const void *const user, struct attn_device_open_params *const params)
{
    const struct plan_options *const options = user;
    const struct attn_decode_shape shape = shape_library(&options->shape);
    struct attn_device_info info = { .size = sizeof(info) };
    struct attn_decode_plan plan = { .size = sizeof(plan) };
    struct attn_device *device = NULL;
    json_t *document = NULL;
    params->log = cli_log;
    params->splitk_policy = options->shape.op == CASE_CTM ? "chunk" : options->policy;
    if (attn_device_open(&device, params) == ATTN_OK &&
        attn_device_describe(device, &info) == ATTN_OK &&
        attn_decode_plan(device, &shape, &plan) == ATTN_OK) {
        if (options->shape.op == CASE_CTM) set_ctm_sizes(&options->shape, &plan);
        document = make_document(&options->shape, &info, &plan);
        if (options->shape.op == CASE_CTM) add_ctm_sizes(document, &plan);
    } else {
        cli_fail_library();
    }
    attn_device_close(&device);
    return document;
}

static void print_plan(const enum case_op op, const json_t *const plan)
{
    const char *const target = json_string_value(json_object_get(plan, "target"));
    const int splits = (int) plan_number(plan, "num_splits"),
              chunk = (int) plan_number(plan, "chunk_keys");
    printf("%s\n", target);
    printf("  kernel      %s\n", json_string_value(json_object_get(plan, "kernel")));
    printf("  partition   policy %s: ", json_string_value(json_object_get(plan, "splitk_policy")));
    if (chunk)
        printf("pieces between absolute multiples of %d keys\n", chunk);
    else if (splits > 1)
        printf("at most %d pieces a sequence, of %d keys or more\n", splits,
               ATTN_SPLITK_MIN_KEYS_PER_SPLIT);
    else if (splits)
        printf("whole sequences\n");
    else
        printf("by length\n");
    printf("  launch      %.0f blocks of %.0f threads, %.0f bytes of shared memory each\n",
           plan_number(plan, "grid"), plan_number(plan, "block"), plan_number(plan, "smem_bytes"));
    if (op == CASE_CTM)
        printf("  workspace   %.0f FP32 elements, %.0f semaphores; for any lengths and tables\n",
               plan_number(plan, "workspace_elems"), plan_number(plan, "semaphore_elems"));
    else
        printf("  workspace   %.0f bytes, %.0f counters\n", plan_number(plan, "workspace_bytes"),
               plan_number(plan, "counters"));
    printf("  bytes       %.0f of K and V, %.0f of the rest; %.3g flops\n",
           plan_number(plan, "kv_bytes"), plan_number(plan, "other_bytes"),
           plan_number(plan, "flops"));
    if (plan_number(plan, "memory_bandwidth_gbs") > 0.0)
        printf("  limit       %.2f us at %.0f GB/s\n", plan_number(plan, "limit_us"),
               plan_number(plan, "memory_bandwidth_gbs"));
}

static void print_plans(const void *const user, const json_t *const plan)
{
    const struct plan_options *const options = user;
    print_plan(options->shape.op, plan);
}

static int show_plans(const struct plan_options *const options)
{
    const struct plan_devices devices = {
        .op = case_op_name(options->shape.op),
        .target = options->target,
        .on_device = options->on_device,
        .as_json = options->as_json,
        .plan = plan_device,
        .print = print_plans,
        .user = options,
    };
    return plan_all(&devices);
}

static int show_ctm_plans(const struct plan_options *const options)
{
    const struct attn_ctm_params params = make_ctm(&options->shape);
    const bool fits = !params.batch_size || execute_find_ctm_sizes(&params).num_semaphores > 0;
    if (is_ctm_served(&params) && fits) return show_plans(options);
    if (!fits && is_ctm_served(&params))
        return cli_fail("the semaphores of %d sequences are more than ctm can count",
                        params.batch_size);
    return cli_fail(
        "ctm does not serve %d query heads on %d KV heads of head_dim %d with %s K and V",
        params.num_q_heads, params.num_kv_heads, params.head_dim,
        attn_dtype_name(options->shape.kv_dtype));
}

static int read_option(struct plan_options *const to, const int option)
{
    struct attn_splitk_policy policy;
    switch (option) {
    case OPTION_TARGET: to->target = optarg; return CLI_FINE;
    case OPTION_DEVICE: to->on_device = true; return CLI_FINE;
    case OPTION_JSON: to->as_json = true; return CLI_FINE;
    case OPTION_POLICY:
        to->policy = optarg;
        if (attn_splitk_parse(optarg, &policy)) return CLI_FINE;
        return cli_usage("plan",
                         "--policy is '%s'; it is legacy, auto, chunk, chunk:N, a count or off",
                         optarg);
    case OPTION_TILE: return shape_read_number("plan", "tile", optarg, 1, INT32_MAX, &to->tile);
    case OPTION_RESIDENT:
        return shape_read_number("plan", "resident", optarg, 1, INT32_MAX, &to->resident);
    case OPTION_PLANES: return shape_read_number("plan", "planes", optarg, 2, 16, &to->planes);
    case OPTION_LAYERS:
        return shape_read_number("plan", "layers", optarg, 1, INT32_MAX, &to->layers);
    case '?': return cli_usage("plan", "that option is not known");
    default: return shape_read(&to->shape, "plan", option, optarg);
    }
}

static int show(const struct plan_options *const plan)
{
    const enum case_op op = plan->shape.op;
    const bool has_lists = op == CASE_TILED || op == CASE_SWAP;
    if (op == CASE_CTM && plan->policy)
        return cli_usage("plan", "--policy is given; sequences of ctm are cut as under chunk");
    if (has_lists && plan->policy)
        return cli_usage("plan", "--policy is given; %s has none", case_op_name(op));
    if (!has_lists && (plan->tile || plan->resident || plan->planes || plan->layers))
        return cli_usage("plan", "--%s is given; tiled and swap alone have it",
                         plan->tile       ? "tile"
                         : plan->resident ? "resident"
                         : plan->planes   ? "planes"
                                          : "layers");
    if (has_lists)
        return plan_lists(&(struct plan_lists){ &plan->shape, plan->target, plan->on_device,
                                                plan->as_json, plan->tile, plan->resident,
                                                plan->planes, plan->layers });
    return op == CASE_CTM ? show_ctm_plans(plan) : show_plans(plan);
}

int command_plan(const int argc, char **const argv)
{
    static const struct option options[] = {
        SHAPE_OPTIONS,
        { "device", no_argument, NULL, OPTION_DEVICE },
        { "help", no_argument, NULL, 'h' },
        { "json", no_argument, NULL, OPTION_JSON },
        { "layers", required_argument, NULL, OPTION_LAYERS },
        { "planes", required_argument, NULL, OPTION_PLANES },
        { "policy", required_argument, NULL, OPTION_POLICY },
        { "resident", required_argument, NULL, OPTION_RESIDENT },
        { "target", required_argument, NULL, OPTION_TARGET },
        { "tile", required_argument, NULL, OPTION_TILE },
        { NULL, 0, NULL, 0 },
    };
    struct plan_options plan = { .target = NULL };
    int option, result = CLI_FINE;
    if (shape_is_prefill(argc, argv)) return plan_prefill(argc - 1, argv + 1);
    shape_init(&plan.shape);
    while (!result && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&plan, option);
    }
    if (result) return result;
    if (plan.target && plan.on_device)
        return cli_usage("plan", "--target and --device exclude each other");
    result = shape_finish(&plan.shape, "plan", argc - optind, argv + optind);
    if (result) return result;
    return show(&plan);
}

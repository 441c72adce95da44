/* SPDX-License-Identifier: Apache-2.0 */
// `attn plan tiled` and `attn plan swap`: a step over sequences of the longest length, in tiles.
#include "cli/plan.h"

#include <string.h>

static bool is_swap(const struct plan_lists *const options)
{
    return options->shape->op == CASE_SWAP;
}

static int32_t count_columns(const struct plan_lists *const options)
{
    return shape_pages(options->shape->max_len, options->shape->page_size);
}

static struct attn_tiled_dims make_tiled(const struct plan_lists *const options, const int32_t tile)
{
    const struct shape_options *const shape = options->shape;
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    dims.dtype = shape->q_dtype;
    dims.max_seqs = shape->batch;
    dims.num_q_heads = shape->num_q_heads;
    dims.num_kv_heads = shape->num_kv_heads;
    dims.head_dim = shape->head_dim;
    dims.block_size = shape->page_size;
    dims.tile_capacity = tile;
    return dims;
}

// Every sequence has its own blocks. Too many for 32 bits are refused as a negative number.
static struct attn_swap_dims make_swap(const struct plan_lists *const options)
{
    const struct shape_options *const shape = options->shape;
    const int64_t blocks = (int64_t) shape->batch * count_columns(options);
    struct attn_swap_dims dims = ATTN_SWAP_DIMS_INIT;
    dims.dtype = shape->q_dtype;
    dims.num_layers = options->layers;
    dims.num_blocks = blocks <= INT32_MAX ? (int32_t) blocks : -1;
    dims.max_seqs = shape->batch;
    dims.num_q_heads = shape->num_q_heads;
    dims.num_kv_heads = shape->num_kv_heads;
    dims.head_dim = shape->head_dim;
    dims.block_size = shape->page_size;
    dims.resident_blocks = options->resident;
    dims.tile_blocks = options->tile;
    dims.num_planes = options->planes;
    return dims;
}

// What a step over all layers has to bring, as attn/swap.h says: what stays is apart from tiles in
// work.
static double count_moved(const struct plan_lists *const options,
                          const struct attn_swap_info *const info)
{
    const double blocks = (double) options->layers * options->shape->batch * count_columns(options);
    const double staying =
        options->resident - (double) info->num_planes * (double) info->tile_blocks;
    return blocks <= options->resident ? 0.0 : (blocks - staying) * (double) info->block_bytes;
}

static json_t *describe_tile(const struct attn_device_info *const info,
                             const struct attn_tiled_dims *const dims,
                             const struct attn_tiled_plan *const plan)
{
    const int64_t state =
        attn_tiled_m_bytes(dims) + attn_tiled_l_bytes(dims) + attn_tiled_o_bytes(dims);
    const double bytes = plan->kv_bytes + plan->other_bytes;
    return json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:f, s:f, s:f, s:i, s:f}",
                     "target", info->target, "device", info->name, "kernel", plan->kernel,
                     "tile_blocks", (int) dims->tile_capacity, "turns", (int) plan->turns, "grid",
                     (int) plan->grid, "block", (int) plan->block, "smem_bytes",
                     (int) plan->smem_bytes, "workspace_bytes", (json_int_t) plan->workspace_bytes,
                     "state_bytes", (json_int_t) state, "kv_bytes", plan->kv_bytes, "other_bytes",
                     plan->other_bytes, "flops", plan->flops, "memory_bandwidth_gbs",
                     (int) info->memory_bandwidth_gbs, "limit_us",
                     info->memory_bandwidth_gbs ? bytes / info->memory_bandwidth_gbs * 1e-3 : 0.0);
}

static void add_swap(json_t *const document, const struct plan_lists *const options,
                     const struct attn_swap_info *const info)
{
    json_object_set_new(document, "num_layers", json_integer(options->layers));
    json_object_set_new(document, "resident_blocks", json_integer(options->resident));
    json_object_set_new(document, "num_planes", json_integer(info->num_planes));
    json_object_set_new(document, "block_bytes", json_integer((json_int_t) info->block_bytes));
    json_object_set_new(document, "pool_bytes", json_integer((json_int_t) info->pool_bytes));
    json_object_set_new(document, "device_bytes", json_integer((json_int_t) info->device_bytes));
    json_object_set_new(document, "host_bytes", json_integer((json_int_t) info->host_bytes));
    json_object_set_new(document, "moved_bytes", json_real(count_moved(options, info)));
}

// NULL after a sentence.
static json_t *plan_device(const void *const user, struct attn_device_open_params *const params)
{
    const struct plan_lists *const options = user;
    const struct attn_swap_dims swap = make_swap(options);
    struct attn_swap_create_params create = ATTN_SWAP_CREATE_PARAMS_INIT;
    struct attn_swap_info sizes = { .size = sizeof(sizes), .tile_blocks = options->tile };
    struct attn_device_info info = { .size = sizeof(info) };
    struct attn_tiled_plan plan = { .size = sizeof(plan) };
    struct attn_tiled_dims dims;
    struct attn_device *device = NULL;
    json_t *document = NULL;
    create.dims = &swap;
    params->log = cli_log;
    bool good = !is_swap(options) || attn_swap_sizes(&create, &sizes) == ATTN_OK;
    if (good) dims = make_tiled(options, sizes.tile_blocks);
    good = good && attn_device_open(&device, params) == ATTN_OK &&
           attn_device_describe(device, &info) == ATTN_OK &&
           attn_tiled_plan(device, &dims, dims.max_seqs, &plan) == ATTN_OK;
    if (good && is_swap(options) && dims.max_seqs > 0) {
        // A tile's blocks are those of all sequences together.
        plan.kv_bytes /= dims.max_seqs;
        plan.flops /= dims.max_seqs;
    }
    if (good)
        document = describe_tile(&info, &dims, &plan);
    else
        cli_fail_library();
    if (document && is_swap(options)) add_swap(document, options, &sizes);
    attn_device_close(&device);
    return document;
}

static void print_swap(const json_t *const plan)
{
    printf("  slots       %.0f blocks of %.0f bytes; %.0f tiles in work\n",
           plan_number(plan, "resident_blocks"), plan_number(plan, "block_bytes"),
           plan_number(plan, "num_planes"));
    printf("  memory      %.0f bytes on the device, %.0f of the host beside a pool of %.0f\n",
           plan_number(plan, "device_bytes"), plan_number(plan, "host_bytes"),
           plan_number(plan, "pool_bytes"));
    printf("  step        %.0f layers: %.0f bytes have to be brought\n",
           plan_number(plan, "num_layers"), plan_number(plan, "moved_bytes"));
}

static void print_plan(const void *const user, const json_t *const plan)
{
    const struct plan_lists *const options = user;
    const double tile = plan_number(plan, "tile_blocks"), turns = plan_number(plan, "turns");
    printf("%s\n", json_string_value(json_object_get(plan, "target")));
    printf("  kernel      %s\n", json_string_value(json_object_get(plan, "kernel")));
    printf("  tile        up to %.0f blocks of %d tokens, for %s %d sequences\n", tile,
           options->shape->page_size, is_swap(options) ? "all" : "each of", options->shape->batch);
    if (turns > 0)
        printf("  fold        by way of the workspace, in %.0f turns of two launches\n", turns);
    else
        printf("  fold        at once\n");
    printf("  launch      %.0f blocks of %.0f threads, %.0f bytes of shared memory each\n",
           plan_number(plan, "grid"), plan_number(plan, "block"), plan_number(plan, "smem_bytes"));
    printf("  workspace   %.0f bytes; the state has %.0f\n", plan_number(plan, "workspace_bytes"),
           plan_number(plan, "state_bytes"));
    printf("  bytes       %.0f of K and V, %.0f of the rest a full tile; %.3g flops\n",
           plan_number(plan, "kv_bytes"), plan_number(plan, "other_bytes"),
           plan_number(plan, "flops"));
    if (plan_number(plan, "memory_bandwidth_gbs") > 0.0)
        printf("  limit       %.2f us a full tile at %.0f GB/s\n", plan_number(plan, "limit_us"),
               plan_number(plan, "memory_bandwidth_gbs"));
    if (is_swap(options)) print_swap(plan);
}

// Of tiled and swap alone, of swap alone; and what they are where they are not given.
static int fill_in(struct plan_lists *const options)
{
    const char *const strange = shape_find_not_listed(options->shape);
    const char *const wrong = options->resident ? "resident"
                              : options->planes ? "planes"
                              : options->layers ? "layers"
                                                : NULL;
    const int32_t columns = count_columns(options);
    if (strange)
        return cli_usage("plan", "--%s is given; %s has none", strange,
                         case_op_name(options->shape->op));
    if (wrong && !is_swap(options))
        return cli_usage("plan", "--%s is given; swap alone has it", wrong);
    if (!options->layers) options->layers = 1;
    if (!options->planes) options->planes = 2;
    if (!options->tile) options->tile = columns > 64 ? 64 : columns > 0 ? columns : 1;
    const int64_t fewest = (int64_t) options->planes * options->tile;
    if (!options->resident) options->resident = fewest < INT32_MAX ? (int32_t) fewest : INT32_MAX;
    return CLI_FINE;
}

int plan_lists(const struct plan_lists *const given)
{
    struct plan_lists options = *given;
    const struct plan_devices devices = {
        .op = case_op_name(options.shape->op),
        .target = options.target,
        .on_device = options.on_device,
        .as_json = options.as_json,
        .plan = plan_device,
        .print = print_plan,
        .user = &options,
    };
    const int result = fill_in(&options);
    return result ? result : plan_all(&devices);
}

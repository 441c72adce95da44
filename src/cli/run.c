/* SPDX-License-Identifier: Apache-2.0 */
// `attn run`: one operation on the tensors of a case file, and how far the result is from the
// definition.
#include "cli/case.h"
#include "cli/cli.h"
#include "cli/execute.h"
#include "cli/shape.h"
#include "host/check.h"

#include <getopt.h>
#include <limits.h>
#include <string.h>

struct run_options {
    const char *file, *output;
    enum cli_device device;
    bool with_lse, check, as_json;
};

// What a check found, against one standard.
struct verdict {
    const char *standard;
    bool done, has_lse;
    struct attn_check found;
};

struct run {
    struct run_options options;
    struct case_file loaded;
    struct attn_device *device;
    struct gpu *gpu;
    struct execution result;
    struct verdict verdicts[2];
};

static void print_help(void)
{
    printf(
        "Usage: attn run FILE [options]\n\n"
        "Runs the operation of a case file (safetensors with format = attn-case in its metadata).\n\n"
        "  -o, --output OUT   write o (and lse) to a safetensors file\n"
        "  --lse              write lse, too; ctm has none\n"
        "  --device D         host, gpu or auto: the GPU if there is one that works (auto)\n"
        "  --check            compare with the double-precision definition, and with expected_o and\n"
        "                     expected_lse if the file has them; exit status 1 beyond the error bound\n"
        "  --json             one JSON object\n");
}

static bool has_lists(const struct case_file *const loaded)
{
    return loaded->op == CASE_TILED || loaded->op == CASE_SWAP;
}

// Tiled decode carries its state in FP32 on the host, too.
static enum attn_check_bound get_bound(const struct run *const run)
{
    return run->gpu || has_lists(&run->loaded) ? ATTN_CHECK_KERNEL : ATTN_CHECK_HOST;
}

static bool is_good(const struct verdict *const verdict)
{
    return !verdict->found.failed && !verdict->found.lse_failed;
}

static bool has_expected(const struct run *const run)
{
    return run->loaded.expected_o || run->loaded.expected_lse;
}

// What is not given is held against the definition.
static const char *name_expected(const struct run *const run)
{
    return run->loaded.expected_o ? "expected_o" : "expected_lse";
}

static void check_prefill(struct run *const run)
{
    struct verdict *const oracle = &run->verdicts[0], *const expected = &run->verdicts[1];
    struct attn_check_prefill call = { .params = &run->loaded.prefill,
                                       .o = run->result.o,
                                       .lse = run->result.lse };
    *oracle = (struct verdict){ .standard = "definition", .done = true, .has_lse = true };
    attn_check_prefill(&call, get_bound(run), &oracle->found);
    if (!has_expected(run)) return;
    call.expected_o = run->loaded.expected_o;
    call.expected_lse = run->loaded.expected_lse;
    if (!call.expected_lse) call.lse = NULL;
    *expected = (struct verdict){ .standard = name_expected(run),
                                  .done = true,
                                  .has_lse = call.expected_lse != NULL };
    attn_check_prefill(&call, get_bound(run), &expected->found);
}

static int check_result(struct run *const run)
{
    const struct attn_decode_params *const params = &run->loaded.params;
    struct verdict *const oracle = &run->verdicts[0], *const expected = &run->verdicts[1];
    if (run->loaded.op == CASE_PREFILL) {
        check_prefill(run);
        return CLI_FINE;
    }
    oracle->standard = "definition";
    oracle->has_lse = run->result.lse != NULL;
    if (attn_check_decode(params, run->result.o, run->result.lse, get_bound(run), &oracle->found))
        return cli_fail("%s: out of memory in the check", run->options.file);
    oracle->done = true;
    if (!has_expected(run)) return CLI_FINE;
    expected->standard = name_expected(run);
    expected->has_lse = run->loaded.expected_lse != NULL;
    if (attn_check_decode_expected(params, run->result.o, run->result.lse, run->loaded.expected_o,
                                   run->loaded.expected_lse, get_bound(run), &expected->found))
        return cli_fail("%s: out of memory in the check", run->options.file);
    expected->done = true;
    return CLI_FINE;
}

static int write_output(struct run *const run)
{
    const enum attn_dtype dtype = case_dtype(&run->loaded);
    struct safetensors_tensor tensors[2] = {
        { .name = "o",
          .dtype = dtype == ATTN_DTYPE_BF16 ? "BF16" : "F16",
          .data = run->result.o,
          .bytes = attn_dtype_size(dtype) },
        { .name = "lse", .dtype = "F32", .data = run->result.lse, .bytes = sizeof(float) },
    };
    for (int i = 0; i < 2; i++) {
        tensors[i].rank = case_shape(&run->loaded, tensors[i].shape) - i;
        for (int d = 0; d < tensors[i].rank; d++) tensors[i].bytes *= (size_t) tensors[i].shape[d];
    }
    char why[SAFETENSORS_WHY_SIZE];
    json_t *const metadata = json_pack("{s:s, s:s, s:s, s:s, s:s}", "format", "attn-result",
                                       "version", "1", "op", case_op_name(run->loaded.op), "kernel",
                                       run->result.kernel, "library", attn_version());
    const int result = safetensors_write(run->options.output, tensors,
                                         run->options.with_lse ? 2 : 1, metadata, why);
    json_decref(metadata);
    return result ? cli_fail("%s", why) : CLI_FINE;
}

static json_t *describe_verdict(const struct verdict *const verdict)
{
    const struct attn_check *const found = &verdict->found;
    json_t *const object =
        json_pack("{s:s, s:b, s:I, s:I, s:o, s:o, s:o, s:i, s:i, s:i, s:i}", "against",
                  verdict->standard, "ok", is_good(verdict), "compared",
                  (json_int_t) found->compared, "failed", (json_int_t) found->failed, "max_error",
                  cli_json_real(found->max_error), "max_ratio", cli_json_real(found->max_ratio),
                  "relative_rms", cli_json_real(found->relative_rms), "worst_sequence",
                  (int) found->worst_sequence, "worst_token", (int) found->worst_token,
                  "worst_head", (int) found->worst_head, "worst_dim", (int) found->worst_dim);
    if (!verdict->has_lse) return object;
    json_object_set_new(object, "lse_failed", json_integer((json_int_t) found->lse_failed));
    json_object_set_new(object, "lse_max_error", cli_json_real(found->lse_max_error));
    json_object_set_new(object, "lse_max_ratio", cli_json_real(found->lse_max_ratio));
    return object;
}

// Of decode, ctm and tiled.
static json_t *describe_decode(const struct run *const run)
{
    const struct attn_decode_params *const params = &run->loaded.params;
    json_t *const dropped =
        params->skip_table ? json_integer((json_int_t) run->result.dropped) : json_null();
    return json_pack("{s:i, s:i, s:b, s:i, s:i, s:i, s:i, s:s, s:s, s:o}", "batch",
                     (int) params->batch, "q_len", (int) params->q_len, "tree_mask",
                     params->tree_mask != NULL, "num_q_heads", (int) params->num_q_heads,
                     "num_kv_heads", (int) params->num_kv_heads, "head_dim", (int) params->head_dim,
                     "page_size", (int) params->page_size, "q_dtype",
                     attn_dtype_name(params->q_dtype), "kv_dtype",
                     attn_dtype_name(params->kv_dtype), "dropped_pages", dropped);
}

// page_size 0: contiguous; q_len, kv_len and q_offset null where sequences differ.
static json_t *describe_prefill(const struct run *const run)
{
    const struct attn_prefill_params *const params = &run->loaded.prefill;
    const bool differ = params->cu_seqlens;
    json_t *const described =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:s, s:b, s:i}", "batch", (int) params->batch,
                  "num_q_heads", (int) params->num_q_heads, "num_kv_heads",
                  (int) params->num_kv_heads, "head_dim", (int) params->head_dim, "page_size",
                  (int) params->page_size, "dtype", attn_dtype_name(params->dtype), "causal",
                  params->causal, "window", (int) params->window);
    json_object_set_new(described, "q_len", differ ? json_null() : json_integer(params->q_len));
    json_object_set_new(described, "kv_len", differ ? json_null() : json_integer(params->kv_len));
    json_object_set_new(described, "q_offset",
                        differ ? json_null() : json_integer(params->q_offset));
    return described;
}

static int print_json(const struct run *const run, const bool good)
{
    struct attn_device_info info = { .size = sizeof(info) };
    json_t *const checks = json_array();
    attn_device_describe(run->device, &info);
    for (int i = 0; i < 2; i++)
        if (run->verdicts[i].done)
            json_array_append_new(checks, describe_verdict(&run->verdicts[i]));
    json_t *const fault =
        run->result.fault == INT32_MAX ? json_null() : json_integer(run->result.fault);
    json_t *const document =
        json_pack("{s:b, s:s, s:s, s:s, s:s, s:o}", "ok", good, "file", run->options.file, "op",
                  case_op_name(run->loaded.op), "device", info.name, "kernel", run->result.kernel,
                  "fault_sequence", fault);
    json_t *const call =
        run->loaded.op == CASE_PREFILL ? describe_prefill(run) : describe_decode(run);
    if (has_lists(&run->loaded))
        json_object_set_new(call, "tile_capacity", json_integer(run->loaded.tiled.tile_capacity));
    if (run->loaded.op == CASE_SWAP)
        json_object_set_new(call, "resident_blocks",
                            json_integer(run->loaded.tiled.resident_blocks));
    json_object_update(document, call);
    json_decref(call);
    json_object_set_new(document, "checks", checks);
    return cli_print_json(document);
}

// "[sequence][token][head][dim]", as o is indexed in the file.
static void format_worst(const struct run *const run, const struct attn_check *const found,
                         char *const text, const size_t size)
{
    char token[16] = "";
    const struct attn_prefill_params *const prefill = &run->loaded.prefill;
    // With pages q is all tokens of all sequences.
    if (prefill->block_table) {
        const int64_t first =
            attn_reference_prefill_span(prefill, found->worst_sequence).first_token;
        snprintf(text, size, "[%lld][%d][%d]", (long long) first + found->worst_token,
                 found->worst_head, found->worst_dim);
        return;
    }
    if (run->loaded.has_query_axis) snprintf(token, sizeof(token), "[%d]", found->worst_token);
    snprintf(text, size, "[%d]%s[%d][%d]", found->worst_sequence, token, found->worst_head,
             found->worst_dim);
}

static void print_verdict(const struct run *const run, const struct verdict *const verdict)
{
    const struct attn_check *const found = &verdict->found;
    char worst[64];
    format_worst(run, found, worst, sizeof(worst));
    printf("%-11s ", verdict->standard);
    cli_print_verdict(stdout, is_good(verdict), is_good(verdict) ? "ok" : "FAILED");
    printf(": o max error %.3g, relative RMS %.3g, at most %.3f of the bound", found->max_error,
           found->relative_rms, found->max_ratio);
    if (found->max_ratio > 0.0) printf(", in o%s", worst);
    if (verdict->has_lse)
        printf("; lse max error %.3g, %.3f of the bound", found->lse_max_error,
               found->lse_max_ratio);
    printf("\n");
    if (found->failed)
        printf(
            "            %lld of %lld elements beyond the bound; the worst is o%s = %.9g, exactly "
            "%.9g\n",
            (long long) found->failed, (long long) found->compared, worst, found->worst_value,
            found->worst_exact);
    if (found->lse_failed)
        printf("            %lld lse beyond the bound\n", (long long) found->lse_failed);
}

// Pages with attended keys, for each KV head of each sequence: what `dropped` is a part of.
static int64_t count_pages(const struct attn_decode_params *const params)
{
    const int64_t most = (int64_t) params->max_pages_per_seq * params->page_size;
    int64_t pages = 0;
    for (int32_t i = 0; i < params->batch; i++) {
        if (params->seq_lens[i] <= 0) continue;
        const int32_t len = params->seq_lens[i] < most ? params->seq_lens[i] : (int32_t) most;
        const int32_t first = (len - shape_attended(len, params->window)) / params->page_size;
        pages += shape_pages(len, params->page_size) - first;
    }
    return pages * params->num_kv_heads;
}

static void print_prefill(const struct run *const run)
{
    const struct attn_prefill_params *const params = &run->loaded.prefill;
    char pages[32] = "contiguous";
    if (params->block_table) snprintf(pages, sizeof(pages), "page %d", params->page_size);
    printf("%-11s ", case_op_name(run->loaded.op));
    if (params->cu_seqlens)
        printf("%d sequences of %d query tokens together", params->batch, params->num_tokens);
    else
        printf("%d sequences of %d query tokens at %d, and %d keys", params->batch, params->q_len,
               params->q_offset, params->kv_len);
    printf(", %d/%d heads, head_dim %d, %s, %s%s", params->num_q_heads, params->num_kv_heads,
           params->head_dim, pages, attn_dtype_name(params->dtype),
           params->causal ? ", causal" : ", not causal");
    if (params->window) printf(", window %d", params->window);
    printf("\n");
}

static void print_decode(const struct run *const run)
{
    const struct attn_decode_params *const params = &run->loaded.params;
    int32_t longest = 0;
    for (int32_t i = 0; i < params->batch; i++)
        if (params->seq_lens[i] > longest) longest = params->seq_lens[i];
    printf(
        "%-11s %d sequences of up to %d keys, %d/%d heads, head_dim %d, page %d, q %s, K and V %s\n",
        case_op_name(run->loaded.op), params->batch, longest, params->num_q_heads,
        params->num_kv_heads, params->head_dim, params->page_size, attn_dtype_name(params->q_dtype),
        attn_dtype_name(params->kv_dtype));
    if (params->q_len > 1)
        printf("tokens      %d a sequence, %s\n", params->q_len,
               params->tree_mask ? "with a tree mask" : "causal");
    if (run->loaded.op == CASE_TILED)
        printf("tiles       of up to %d blocks of each sequence\n",
               run->loaded.tiled.tile_capacity);
    if (run->loaded.op == CASE_SWAP)
        printf("slots       %d, for tiles of up to %d blocks\n", run->loaded.tiled.resident_blocks,
               run->loaded.tiled.tile_capacity);
}

static void print_readable(const struct run *const run)
{
    const struct attn_decode_params *const params = &run->loaded.params;
    struct attn_device_info info = { .size = sizeof(info) };
    attn_device_describe(run->device, &info);
    if (run->loaded.op == CASE_PREFILL)
        print_prefill(run);
    else
        print_decode(run);
    printf("device      %s\nkernel      %s\n", info.name, run->result.kernel);
    if (run->result.short_kernel)
        printf("            %s for up to %d query tokens\n", run->result.short_kernel,
               ATTN_PREFILL_SHORT_TOKENS);
    if (params->skip_table)
        printf("dropped     %lld of %lld pages of a KV head, by skip-softmax\n",
               (long long) run->result.dropped, (long long) count_pages(params));
    for (int i = 0; i < 2; i++)
        if (run->verdicts[i].done) print_verdict(run, &run->verdicts[i]);
    if (run->options.output) printf("written     %s\n", run->options.output);
}

static int execute(struct run *const run)
{
    char why[1024];
    const char *const policy = run->loaded.policy;
    if (cli_open_device(run->options.device, policy, &run->device, &run->gpu)) return CLI_FAILED;
    enum attn_status status =
        execute_case(run->device, run->gpu, &run->loaded, &run->result, why, sizeof(why));
    if (status == ATTN_ERROR_UNSUPPORTED && run->gpu && run->options.device == CLI_DEVICE_AUTO) {
        cli_warn("the host executor is used: %s", why);
        cli_close_device(&run->device, &run->gpu);
        if (cli_open_device(CLI_DEVICE_HOST, policy, &run->device, &run->gpu)) return CLI_FAILED;
        status = execute_case(run->device, NULL, &run->loaded, &run->result, why, sizeof(why));
    }
    return status == ATTN_OK ? CLI_FINE : cli_fail("%s: %s", run->options.file, why);
}

// What a faulty sequence means for the exit status and for the reader.
static int report(struct run *const run)
{
    bool good = run->result.fault == INT32_MAX;
    for (int i = 0; i < 2; i++)
        if (run->verdicts[i].done && !is_good(&run->verdicts[i])) good = false;
    int result = CLI_FINE;
    if (run->options.as_json)
        result = print_json(run, good);
    else
        print_readable(run);
    const bool is_prefill = run->loaded.op == CASE_PREFILL;
    if (run->result.fault != INT32_MAX && is_prefill)
        cli_fail(
            "%s: sequence %d has entries of cu_seqlens that fall or leave q, a length below 0 or "
            "past its page table, or a page id outside the pool among the keys that it sees; "
            "such entries are clamped, and such keys count as absent",
            run->options.file, run->result.fault);
    const bool is_tiled = has_lists(&run->loaded);
    if (run->result.fault != INT32_MAX && is_tiled)
        cli_fail("%s: sequence %d has a count of blocks below 0 or past its list, or lists a block "
                 "outside the pool; counts are clamped, and such blocks count as absent",
                 run->options.file, run->result.fault);
    const char *const fewer =
        run->loaded.params.q_len > 1 ? ", of fewer keys than query tokens," : "";
    if (run->result.fault != INT32_MAX && !is_prefill && !is_tiled)
        cli_fail(
            "%s: sequence %d has a length below 0%s or past its page table, or a page id outside the "
            "pool among its attended keys; such keys count as absent",
            run->options.file, run->result.fault, fewer);
    return good ? result : CLI_FAILED;
}

static int run_case(struct run *const run)
{
    char why[SAFETENSORS_WHY_SIZE];
    if (case_load(&run->loaded, run->options.file, cli_warn_sentence, NULL, why))
        return cli_fail("%s", why);
    int result = CLI_FINE;
    if (run->options.with_lse && run->loaded.op == CASE_CTM)
        result = cli_fail("%s: --lse: the operation ctm has no lse", run->options.file);
    if (!result) result = execute(run);
    if (!result && run->options.check) result = check_result(run);
    if (!result && run->options.output) result = write_output(run);
    if (!result) result = report(run);
    execution_free(&run->result);
    cli_close_device(&run->device, &run->gpu);
    case_free(&run->loaded);
    return result;
}

int command_run(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "check", no_argument, NULL, 'c' },
        { "device", required_argument, NULL, 'd' },
        { "help", no_argument, NULL, 'h' },
        { "json", no_argument, NULL, 'j' },
        { "lse", no_argument, NULL, 'l' },
        { "output", required_argument, NULL, 'o' },
        { NULL, 0, NULL, 0 },
    };
    struct run run = { .device = NULL };
    int option;
    while ((option = getopt_long(argc, argv, "ho:", options, NULL)) != -1) {
        switch (option) {
        case 'c': run.options.check = true; break;
        case 'd':
            if (cli_read_device(optarg, &run.options.device)) break;
            return cli_usage("run", "--device is '%s'; it is host, gpu or auto", optarg);
        case 'h': print_help(); return CLI_FINE;
        case 'j': run.options.as_json = true; break;
        case 'l': run.options.with_lse = true; break;
        case 'o': run.options.output = optarg; break;
        default: return cli_usage("run", "that option is not known, or lacks its value");
        }
    }
    if (optind + 1 != argc) return cli_usage("run", "one case file is needed");
    if (run.options.with_lse && !run.options.output)
        return cli_usage("run", "--lse needs -o: it is written to the output file");
    run.options.file = argv[optind];
    return run_case(&run);
}

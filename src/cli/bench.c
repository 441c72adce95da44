/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench`: which cases, and the numbers as a table, JSON or CSV.
#include "cli/bench_prefill.h"
#include "cli/bench_shapes.h"
#include "cli/bench_swap.h"
#include "cli/bench_time.h"
#include "cli/cli.h"
#include "cli/shape.h"
#include "commit.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// The host executor takes the default shapes with at most this many bytes of K and V.
#define HOST_DEFAULT_BYTES 16e6
#define MAX_NAMES 32

enum format {
    FORMAT_TABLE,
    FORMAT_JSON,
    FORMAT_CSV,
};

struct bench {
    const char *file, *policy;
    enum bench_set set;
    bool has_set;
    const char *names[MAX_NAMES];
    int num_names;
    enum cli_device kind;
    enum format format;
    bool list;

    struct attn_device *device;
    struct gpu *gpu;
    struct gpu_description found;
    char device_name[128];
    // In force.
    char policy_name[64];
    json_t *cases;
    int failed, left_out;
    // Of the shape before in the list: 0 if it was not timed.
    double last_us, last_bytes;
    // Of a sweep, between neighbours; 0 if there are none.
    double max_step;
    const char *max_step_name;
};

static void print_help(void)
{
    printf(
        "Usage: attn bench [decode|ctm|tiled] [options]\n"
        "       attn bench prefill|swap [options]; 'attn bench prefill --help' has them\n\n"
        "Checks rows of each case against the double-precision definition, then times the case: cold\n"
        "cache, CUDA graph replay, median and spread, and next to it a kernel that only reads as many\n"
        "bytes. Then the host time of one call beside that of the smallest launch, and the relative\n"
        "RMS error of the checked rows. Under skip-softmax the share of pages that were left out, and\n"
        "the time of the same call without it. Shapes that no kernel takes, or that do not fit the\n"
        "memory, are skipped with a line. 'bench ctm' is --set ctm,\n"
        "'bench tiled' --set tiled: steps of one tile, with all blocks on the GPU.\n\n"
        "  --device D       gpu (default), or host: times the host executor\n"
        "  --set S          default; pages: page sizes 1 .. 64; batch, ratio: sweeps of the batch and of\n"
        "                   the GQA ratio; ctm: the CTM runner; tree: trees of 1, 8 and 64 query tokens;\n"
        "                   skip: skip-softmax; tiled: tiled decode; all\n"
        "  --policy P       split-K policy: legacy, auto, chunk, chunk:N, a count, off\n"
        "  --shapes FILE    a JSON array of shapes: name, batch, num_q_heads, num_kv_heads, head_dim,\n"
        "                   page_size, len (a number, or one for each sequence), and where wanted\n"
        "                   window, q_dtype, kv_dtype, op, q_len, tree, skip (a share of pages)\n"
        "  --shape NAME     only the shape of that name, of whichever set; may be repeated\n"
        "  --list           print the names of the shapes\n"
        "  --json, --csv    for programs\n");
}

static bool is_wanted(const struct bench *const bench, const struct bench_shape *const shape)
{
    for (int i = 0; i < bench->num_names; i++)
        if (!strcmp(bench->names[i], shape->name)) return true;
    return !bench->num_names;
}

static void format_driver(const struct bench *const bench, char *const text, const size_t size)
{
    const int version = bench->found.driver_version;
    if (version)
        snprintf(text, size, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    else
        snprintf(text, size, "none");
}

static void print_head(const struct bench *const bench)
{
    char driver[32];
    format_driver(bench, driver, sizeof(driver));
    if (bench->format == FORMAT_CSV)
        printf(
            "case,kernel,us,us_p10,us_p90,bytes,gbs,limit_gbs,limit_share,rows_checked,"
            "bound_share,relative_rms,host_us,launch_us,step,op,q_len,tree,dropped_share,dense_us,"
            "policy,device,driver,sm_mhz,memory_mhz,library,commit\n");
    if (bench->format != FORMAT_TABLE) return;
    printf("device   %s\n", bench->device_name);
    if (bench->gpu)
        printf("driver   %s; %d SMs up to %d MHz, memory %d MHz, L2 %.0f MB\n", driver,
               bench->found.sm_count, bench->found.clock_khz / 1000,
               bench->found.memory_clock_khz / 1000, bench->found.l2_bytes * 1e-6);
    else
        printf("driver   none: these are times of the host executor, not of a kernel\n");
    printf("library  %s, commit %s\n", attn_version(), ATTN_BUILD_COMMIT);
    printf("policy   %s\n", bench->policy_name);
    printf("limit    a kernel that only reads as many bytes, in the same run\n");
    printf("host     us of one call that does not wait, and of the smallest launch\n");
    printf("rms      relative RMS error of the checked rows\n\n");
    printf("%-34s %10s %22s %8s %8s %7s %6s %6s %8s  %s\n", "case", "us", "(p10 .. p90)", "GB/s",
           "limit", "share", "host", "launch", "rms", "kernel");
}

static double get_gbs(const double bytes, const double us)
{
    return us > 0.0 ? bytes / us * 1e-3 : 0.0;
}

// How far a time jumps from the one before it in a sweep: 1 is smooth. Time may grow as the bytes
// do. 0: nothing to compare with.
static double find_step(const struct bench *const bench, const struct bench_shape *const shape,
                        const struct bench_times *const times)
{
    if (!shape->follows || bench->last_us <= 0.0 || times->median_us <= 0.0) return 0.0;
    const double growth = times->median_us / bench->last_us;
    const double work = fmax(1.0, times->bytes / bench->last_bytes);
    return growth < 1.0 ? 1.0 / growth : fmax(1.0, growth / work);
}

static void note_step(struct bench *const bench, const struct bench_shape *const shape,
                      const struct bench_times *const times, const double step)
{
    bench->last_us = times->median_us;
    bench->last_bytes = times->bytes;
    if (step <= bench->max_step) return;
    bench->max_step = step;
    bench->max_step_name = shape->name;
}

static void print_csv(const struct bench *const bench, const struct bench_shape *const shape,
                      const struct bench_times *const times, const double step)
{
    char driver[32];
    const double gbs = get_gbs(times->bytes, times->median_us);
    const double limit = get_gbs(times->bytes, times->limit_us);
    format_driver(bench, driver, sizeof(driver));
    cli_print_quoted(shape->name);
    printf(",%s,%.3f,%.3f,%.3f,%.0f,%.1f,%.1f,%.4f,%d,%.4f,%.4e,%.3f,%.3f,%.3f,", times->kernel,
           times->median_us, times->p10_us, times->p90_us, times->bytes, gbs, limit,
           limit > 0.0 ? gbs / limit : 0.0, times->rows_checked, times->max_ratio,
           times->relative_rms, times->host_us, times->launch_us, step);
    printf("%s,%d,%s,%.4f,%.3f,", case_op_name(shape->op), shape->q_len, tree_name(shape->tree),
           times->dropped_share, times->dense_us);
    printf("%s,\"%s\",%s,%d,%d,%s,%s\n", bench->policy_name, bench->device_name, driver,
           bench->found.clock_khz / 1000, bench->found.memory_clock_khz / 1000, attn_version(),
           ATTN_BUILD_COMMIT);
}

// How many times as fast skip-softmax is if its time is that of the bytes of K and V.
static double get_ideal(const struct bench_times *const times)
{
    return 1.0 / (1.0 - 0.5 * times->dropped_share);
}

static void print_line(const struct bench_shape *const shape, const struct bench_times *const times)
{
    const double gbs = get_gbs(times->bytes, times->median_us);
    const double limit = get_gbs(times->bytes, times->limit_us);
    printf("%-34s %10.2f (%8.2f .. %8.2f) %8.1f ", shape->name, times->median_us, times->p10_us,
           times->p90_us, gbs);
    if (limit > 0.0)
        printf("%8.1f %6.1f%% %6.2f %6.2f ", limit, 100.0 * gbs / limit, times->host_us,
               times->launch_us);
    else
        printf("%8s %7s %6s %6s ", "-", "-", "-", "-");
    printf("%8.2e  %s\n", times->relative_rms, times->kernel);
    if (!shape->has_skip) return;
    printf("%-34s   %.1f %% of the pages left out", "", 100.0 * times->dropped_share);
    if (times->dense_us > 0.0)
        printf("; %.2f times as fast as without (%.2f us), ideally %.2f",
               times->dense_us / times->median_us, times->dense_us, get_ideal(times));
    printf("\n");
}

static void print_row(const struct bench *const bench, const struct bench_shape *const shape,
                      const struct bench_times *const times, const double step)
{
    if (bench->format == FORMAT_CSV) print_csv(bench, shape, times, step);
    if (bench->format == FORMAT_TABLE) print_line(shape, times);
    fflush(stdout);
}

static json_t *real_or_null(const double value)
{
    return value > 0.0 ? cli_json_real(value) : json_null();
}

// As --shapes reads it.
static json_t *describe_shape(const struct bench_shape *const shape)
{
    json_t *const lens = json_array();
    bool uniform = true;
    for (int32_t i = 0; i < shape->batch; i++) {
        json_array_append_new(lens, json_integer(shape->lens[i]));
        uniform &= shape->lens[i] == shape->lens[0];
    }
    json_t *const described =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s}", "name", shape->name, "batch",
                  (int) shape->batch, "num_q_heads", (int) shape->num_q_heads, "num_kv_heads",
                  (int) shape->num_kv_heads, "head_dim", (int) shape->head_dim, "page_size",
                  (int) shape->page_size, "window", (int) shape->window, "q_dtype",
                  attn_dtype_name(shape->q_dtype), "kv_dtype", attn_dtype_name(shape->kv_dtype));
    json_object_set_new(described, "op", json_string(case_op_name(shape->op)));
    json_object_set_new(described, "q_len", json_integer(shape->q_len));
    json_object_set_new(described, "tree", json_string(tree_name(shape->tree)));
    if (shape->has_skip) json_object_set_new(described, "skip", json_real(shape->skip_share));
    json_object_set(described, "len", uniform ? json_array_get(lens, 0) : lens);
    json_decref(lens);
    return described;
}

static void add_case(struct bench *const bench, const struct bench_shape *const shape,
                     const struct bench_times *const times, const double step)
{
    const double gbs = get_gbs(times->bytes, times->median_us);
    const double limit = get_gbs(times->bytes, times->limit_us);
    json_t *const added =
        json_pack("{s:s, s:b, s:b, s:s, s:f, s:f, s:f, s:f, s:f, s:i, s:i, s:i}", "case",
                  shape->name, "ok", 1, "skipped", 0, "kernel", times->kernel, "us",
                  times->median_us, "us_p10", times->p10_us, "us_p90", times->p90_us, "bytes",
                  times->bytes, "gbs", gbs, "copies", (int) times->copies, "calls",
                  (int) times->calls, "rows_checked", (int) times->rows_checked);
    json_object_set_new(added, "shape", describe_shape(shape));
    json_object_set_new(added, "limit_gbs", real_or_null(limit));
    json_object_set_new(added, "limit_share", real_or_null(limit > 0.0 ? gbs / limit : 0.0));
    json_object_set_new(added, "bound_share", cli_json_real(times->max_ratio));
    json_object_set_new(added, "relative_rms", cli_json_real(times->relative_rms));
    json_object_set_new(added, "host_us", real_or_null(times->host_us));
    json_object_set_new(added, "launch_us", real_or_null(times->launch_us));
    json_object_set_new(added, "step", real_or_null(step));
    json_object_set_new(added, "dropped_share",
                        shape->has_skip ? json_real(times->dropped_share) : json_null());
    json_object_set_new(added, "dense_us", real_or_null(times->dense_us));
    json_array_append_new(bench->cases, added);
}

static void add_untimed(struct bench *const bench, const struct bench_shape *const shape,
                        const bool skipped, const char *const why)
{
    if (skipped)
        cli_warn("%s: skipped: %s", shape->name, why);
    else
        cli_fail("%s: %s", shape->name, why);
    bench->failed += !skipped;
    bench->last_us = 0.0;
    json_array_append_new(bench->cases, json_pack("{s:s, s:b, s:b, s:s, s:o}", "case", shape->name,
                                                  "ok", 0, "skipped", skipped, "error", why,
                                                  "shape", describe_shape(shape)));
}

static void run_shape(struct bench *const bench, const struct bench_shape *const shape)
{
    char line[128], why[1024];
    struct bench_times times;
    snprintf(line, sizeof(line), "%s ...", shape->name);
    cli_progress(line);
    const enum bench_result result =
        bench->gpu ? bench_on_gpu(bench->device, bench->gpu, shape, &times, why, sizeof(why))
                   : bench_on_host(bench->device, shape, &times, why, sizeof(why));
    cli_progress(NULL);
    if (result != BENCH_DONE) {
        add_untimed(bench, shape, result == BENCH_SKIPPED, why);
        return;
    }
    const double step = find_step(bench, shape, &times);
    note_step(bench, shape, &times, step);
    print_row(bench, shape, &times, step);
    add_case(bench, shape, &times, step);
}

static bool is_too_long(const struct bench *const bench, const struct bench_shape *const shape)
{
    return !bench->gpu && !bench->file && !bench->num_names &&
           bench_shape_kv_bytes(shape) > HOST_DEFAULT_BYTES;
}

static int print_document(const struct bench *const bench)
{
    char driver[32];
    format_driver(bench, driver, sizeof(driver));
    return cli_print_json(
        json_pack("{s:s, s:s, s:b, s:s, s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:o, s:O}", "op",
                  bench->set == BENCH_SET_CTM     ? "ctm"
                  : bench->set == BENCH_SET_TILED ? "tiled"
                                                  : "decode",
                  "device", bench->device_name, "host_executor", bench->gpu == NULL,
                  "splitk_policy", bench->policy_name, "driver", driver, "sm_count",
                  bench->found.sm_count, "sm_mhz", bench->found.clock_khz / 1000, "memory_mhz",
                  bench->found.memory_clock_khz / 1000, "l2_bytes", bench->found.l2_bytes,
                  "library", attn_version(), "commit", ATTN_BUILD_COMMIT, "max_step",
                  real_or_null(bench->max_step), "cases", bench->cases));
}

static int run_shapes(struct bench *const bench, const struct bench_shapes *const shapes)
{
    print_head(bench);
    for (int i = 0; i < shapes->count; i++) {
        if (!is_wanted(bench, &shapes->list[i])) {
            bench->last_us = 0.0;
        } else if (is_too_long(bench, &shapes->list[i])) {
            bench->left_out++;
            bench->last_us = 0.0;
        } else {
            run_shape(bench, &shapes->list[i]);
        }
    }
    if (bench->left_out)
        cli_warn(
            "%d shapes take the host executor too long and were left out; --shape NAME runs one",
            bench->left_out);
    if (bench->format == FORMAT_TABLE && bench->max_step > 0.0)
        printf("\nlargest step between neighbours of a sweep: %.2f, to %s\n", bench->max_step,
               bench->max_step_name);
    const int result = bench->format == FORMAT_JSON ? print_document(bench) : CLI_FINE;
    return bench->failed ? CLI_FAILED : result;
}

static int check_names(const struct bench *const bench, const struct bench_shapes *const shapes)
{
    for (int i = 0; i < bench->num_names; i++) {
        bool found = false;
        for (int j = 0; j < shapes->count; j++)
            found |= !strcmp(bench->names[i], shapes->list[j].name);
        if (!found)
            return cli_usage("bench", "there is no shape '%s'; --list shows the names",
                             bench->names[i]);
    }
    return CLI_FINE;
}

static int open_and_run(struct bench *const bench, const struct bench_shapes *const shapes)
{
    struct attn_device_info info = { .size = sizeof(info) };
    int result = cli_open_device(bench->kind, bench->policy, &bench->device, &bench->gpu);
    if (result) return result;
    attn_device_describe(bench->device, &info);
    memcpy(bench->device_name, info.name, sizeof(bench->device_name));
    attn_splitk_format(info.splitk_policy, bench->policy_name, sizeof(bench->policy_name));
    bench->cases = json_array();
    if (bench->gpu && gpu_describe(bench->gpu, &bench->found))
        result = cli_fail("the CUDA driver does not describe the GPU");
    else
        result = run_shapes(bench, shapes);
    json_decref(bench->cases);
    cli_close_device(&bench->device, &bench->gpu);
    return result;
}

static int run_bench(struct bench *const bench)
{
    struct bench_shapes shapes = { 0 };
    char why[512];
    if (bench->file && bench->has_set)
        return cli_usage("bench", "--shapes and --set are given: it is one or the other");
    // A name may be of any set.
    if (bench->num_names && !bench->has_set) bench->set = BENCH_SET_ALL;
    if (bench->file ? bench_shapes_load(&shapes, bench->file, why, sizeof(why))
                    : bench_shapes_make(&shapes, bench->set, why, sizeof(why)))
        return cli_fail("%s", why);
    int result = check_names(bench, &shapes);
    if (!result && bench->list)
        for (int i = 0; i < shapes.count; i++) printf("%s\n", shapes.list[i].name);
    else if (!result)
        result = open_and_run(bench, &shapes);
    bench_shapes_free(&shapes);
    return result;
}

static int read_option(struct bench *const bench, const int option)
{
    struct attn_splitk_policy policy;
    switch (option) {
    case 'c': bench->format = FORMAT_CSV; return CLI_FINE;
    case 'j': bench->format = FORMAT_JSON; return CLI_FINE;
    case 'l': bench->list = true; return CLI_FINE;
    case 'f': bench->file = optarg; return CLI_FINE;
    case 'd':
        if (cli_read_device(optarg, &bench->kind) && bench->kind != CLI_DEVICE_AUTO)
            return CLI_FINE;
        return cli_usage("bench", "--device is '%s'; it is gpu or host", optarg);
    case 's':
        if (bench->num_names == MAX_NAMES)
            return cli_usage("bench", "--shape may be given %d times", MAX_NAMES);
        bench->names[bench->num_names++] = optarg;
        return CLI_FINE;
    case 'S':
        bench->has_set = true;
        if (bench_shapes_read_set(optarg, &bench->set)) return CLI_FINE;
        return cli_usage("bench", "--set is '%s'; it is " BENCH_SET_NAMES, optarg);
    case 'p':
        bench->policy = optarg;
        if (attn_splitk_parse(optarg, &policy)) return CLI_FINE;
        return cli_usage("bench",
                         "--policy is '%s'; it is legacy, auto, chunk, chunk:N, a count or off",
                         optarg);
    default: return cli_usage("bench", "that option is not known, or lacks its value");
    }
}

int command_bench(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "csv", no_argument, NULL, 'c' },          { "device", required_argument, NULL, 'd' },
        { "help", no_argument, NULL, 'h' },         { "json", no_argument, NULL, 'j' },
        { "list", no_argument, NULL, 'l' },         { "policy", required_argument, NULL, 'p' },
        { "set", required_argument, NULL, 'S' },    { "shape", required_argument, NULL, 's' },
        { "shapes", required_argument, NULL, 'f' }, { NULL, 0, NULL, 0 },
    };
    struct bench bench = { .kind = CLI_DEVICE_GPU };
    int option, result = CLI_FINE;
    if (shape_is_prefill(argc, argv)) return bench_prefill(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "swap")) return bench_swap(argc - 1, argv + 1);
    while (!result && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&bench, option);
    }
    if (result) return result;
    const char *const op = optind < argc ? argv[optind] : "decode";
    if (!strcmp(op, "ctm") || !strcmp(op, "tiled")) {
        if (bench.has_set || bench.file)
            return cli_usage("bench", "%s is given, and %s: 'bench %s' is --set %s", op,
                             bench.file ? "--shapes" : "--set", op, op);
        bench.has_set = true;
        bench_shapes_read_set(op, &bench.set);
        optind++;
    } else if (optind < argc && !strcmp(op, "decode")) {
        optind++;
    }
    if (optind < argc)
        return cli_usage("bench",
                         "'%s' is not an operation; decode, ctm, tiled, prefill and swap are",
                         argv[optind]);
    return run_bench(&bench);
}

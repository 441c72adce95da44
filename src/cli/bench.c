/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench`: which cases, and the numbers as a table, JSON or CSV.
#include "cli/bench_shapes.h"
#include "cli/bench_time.h"
#include "cli/cli.h"
#include "commit.h"

#include <getopt.h>
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
    const char *file;
    const char *names[MAX_NAMES];
    int num_names;
    enum cli_device kind;
    enum format format;
    bool list;

    struct attn_device *device;
    struct gpu *gpu;
    struct gpu_description found;
    char device_name[128];
    json_t *cases;
    int failed, left_out;
};

static void print_help(void)
{
    printf(
        "Usage: attn bench [decode] [options]\n\n"
        "Checks rows of each case against the double-precision definition, then times the case: cold\n"
        "cache, CUDA graph replay, median and spread, and next to it a kernel that only reads as many\n"
        "bytes.\n\n"
        "  --device D       gpu (default), or host: times the host executor\n"
        "  --shapes FILE    a JSON array of shapes: name, batch, num_q_heads, num_kv_heads, head_dim,\n"
        "                   page_size, len (a number, or one for each sequence), and where wanted\n"
        "                   window, q_dtype, kv_dtype\n"
        "  --shape NAME     only the shape of that name; may be repeated\n"
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
        printf("case,kernel,us,us_p10,us_p90,bytes,gbs,limit_gbs,limit_share,rows_checked,"
               "bound_share,device,driver,sm_mhz,memory_mhz,library,commit\n");
    if (bench->format != FORMAT_TABLE) return;
    printf("device   %s\n", bench->device_name);
    if (bench->gpu)
        printf("driver   %s; %d SMs up to %d MHz, memory %d MHz, L2 %.0f MB\n", driver,
               bench->found.sm_count, bench->found.clock_khz / 1000,
               bench->found.memory_clock_khz / 1000, bench->found.l2_bytes * 1e-6);
    else
        printf("driver   none: these are times of the host executor, not of a kernel\n");
    printf("library  %s, commit %s\n", attn_version(), ATTN_BUILD_COMMIT);
    printf("limit    a kernel that only reads as many bytes, in the same run\n\n");
    printf("%-34s %10s %21s %8s %8s %7s  %s\n", "case", "us", "(p10 .. p90)", "GB/s", "limit",
           "share", "kernel");
}

static double get_gbs(const double bytes, const double us)
{
    return us > 0.0 ? bytes / us * 1e-3 : 0.0;
}

static void print_row(const struct bench *const bench, const struct bench_shape *const shape,
                      const struct bench_times *const times)
{
    char driver[32];
    const double gbs = get_gbs(times->bytes, times->median_us);
    const double limit = get_gbs(times->bytes, times->limit_us);
    const double share = limit > 0.0 ? gbs / limit : 0.0;
    format_driver(bench, driver, sizeof(driver));
    if (bench->format == FORMAT_CSV)
        printf("\"%s\",%s,%.3f,%.3f,%.3f,%.0f,%.1f,%.1f,%.4f,%d,%.4f,\"%s\",%s,%d,%d,%s,%s\n",
               shape->name, times->kernel, times->median_us, times->p10_us, times->p90_us,
               times->bytes, gbs, limit, share, times->rows_checked, times->max_ratio,
               bench->device_name, driver, bench->found.clock_khz / 1000,
               bench->found.memory_clock_khz / 1000, attn_version(), ATTN_BUILD_COMMIT);
    if (bench->format == FORMAT_TABLE && limit > 0.0)
        printf("%-34s %10.2f (%8.2f .. %8.2f) %8.1f %8.1f %6.1f%%  %s\n", shape->name,
               times->median_us, times->p10_us, times->p90_us, gbs, limit, 100.0 * share,
               times->kernel);
    if (bench->format == FORMAT_TABLE && limit <= 0.0)
        printf("%-34s %10.2f (%8.2f .. %8.2f) %8.1f %8s %7s  %s\n", shape->name, times->median_us,
               times->p10_us, times->p90_us, gbs, "-", "-", times->kernel);
    fflush(stdout);
}

static void add_case(struct bench *const bench, const struct bench_shape *const shape,
                     const struct bench_times *const times)
{
    const double gbs = get_gbs(times->bytes, times->median_us);
    const double limit = get_gbs(times->bytes, times->limit_us);
    json_array_append_new(
        bench->cases,
        json_pack("{s:s, s:b, s:s, s:f, s:f, s:f, s:f, s:f, s:o, s:o, s:i, s:i, s:o}", "case",
                  shape->name, "ok", 1, "kernel", times->kernel, "us", times->median_us, "us_p10",
                  times->p10_us, "us_p90", times->p90_us, "bytes", times->bytes, "gbs", gbs,
                  "limit_gbs", limit > 0.0 ? json_real(limit) : json_null(), "limit_share",
                  limit > 0.0 ? json_real(gbs / limit) : json_null(), "copies", (int) times->copies,
                  "rows_checked", (int) times->rows_checked, "bound_share",
                  cli_json_real(times->max_ratio)));
}

static void run_shape(struct bench *const bench, const struct bench_shape *const shape)
{
    char line[128], why[1024];
    struct bench_times times;
    snprintf(line, sizeof(line), "%s ...", shape->name);
    cli_progress(line);
    const int result =
        bench->gpu ? bench_on_gpu(bench->device, bench->gpu, shape, &times, why, sizeof(why))
                   : bench_on_host(bench->device, shape, &times, why, sizeof(why));
    cli_progress(NULL);
    if (result) {
        bench->failed++;
        cli_fail("%s: %s", shape->name, why);
        json_array_append_new(bench->cases, json_pack("{s:s, s:b, s:s}", "case", shape->name, "ok",
                                                      0, "error", why));
        return;
    }
    print_row(bench, shape, &times);
    add_case(bench, shape, &times);
}

static bool is_too_long(const struct bench *const bench, const struct bench_shape *const shape)
{
    return !bench->gpu && !bench->file && !bench->num_names &&
           bench_shape_kv_bytes(shape) > HOST_DEFAULT_BYTES;
}

static int run_shapes(struct bench *const bench, const struct bench_shapes *const shapes)
{
    char driver[32];
    print_head(bench);
    for (int i = 0; i < shapes->count; i++) {
        if (!is_wanted(bench, &shapes->list[i])) continue;
        if (is_too_long(bench, &shapes->list[i]))
            bench->left_out++;
        else
            run_shape(bench, &shapes->list[i]);
    }
    if (bench->left_out)
        cli_warn(
            "%d shapes take the host executor too long and were left out; --shape NAME runs one",
            bench->left_out);
    if (bench->format != FORMAT_JSON) return bench->failed ? CLI_FAILED : CLI_FINE;
    format_driver(bench, driver, sizeof(driver));
    const int result = cli_print_json(
        json_pack("{s:s, s:s, s:b, s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:O}", "op", "decode",
                  "device", bench->device_name, "host_executor", bench->gpu == NULL, "driver",
                  driver, "sm_count", bench->found.sm_count, "sm_mhz",
                  bench->found.clock_khz / 1000, "memory_mhz", bench->found.memory_clock_khz / 1000,
                  "l2_bytes", bench->found.l2_bytes, "library", attn_version(), "commit",
                  ATTN_BUILD_COMMIT, "cases", bench->cases));
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
    int result = cli_open_device(bench->kind, NULL, &bench->device, &bench->gpu);
    if (result) return result;
    attn_device_describe(bench->device, &info);
    memcpy(bench->device_name, info.name, sizeof(bench->device_name));
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
    if (bench->file ? bench_shapes_load(&shapes, bench->file, why, sizeof(why))
                    : bench_shapes_default(&shapes, why, sizeof(why)))
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
    default: return cli_usage("bench", "that option is not known, or lacks its value");
    }
}

int command_bench(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "csv", no_argument, NULL, 'c' },          { "device", required_argument, NULL, 'd' },
        { "help", no_argument, NULL, 'h' },         { "json", no_argument, NULL, 'j' },
        { "list", no_argument, NULL, 'l' },         { "shape", required_argument, NULL, 's' },
        { "shapes", required_argument, NULL, 'f' }, { NULL, 0, NULL, 0 },
    };
    struct bench bench = { .kind = CLI_DEVICE_GPU };
    int option, result = CLI_FINE;
    while (!result && (option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&bench, option);
    }
    if (result) return result;
    if (optind < argc && !strcmp(argv[optind], "decode")) optind++;
    if (optind < argc)
        return cli_usage("bench", "'%s' is not an operation; decode is", argv[optind]);
    return run_bench(&bench);
}

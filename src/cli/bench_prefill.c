/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench prefill`: which cases, and the numbers as a table, JSON or CSV.
#include "cli/bench_prefill.h"

#include "cli/cli.h"
#include "commit.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

// The host executor takes shapes that are not named with at most so many pairs of a query row and a
// key.
#define HOST_DEFAULT_PAIRS 200000
#define MAX_NAMES 32

enum format {
    FORMAT_TABLE,
    FORMAT_JSON,
    FORMAT_CSV,
};

struct bench {
    const char *names[MAX_NAMES];
    int num_names;
    enum cli_device kind;
    enum format format;
    bool list;
    // --set short, else long.
    bool is_short;

    struct attn_device *device;
    struct gpu *gpu;
    struct gpu_description found;
    char device_name[128], driver[32];
    json_t *cases;
    int failed, left_out;
};

static void print_help(void)
{
    printf(
        "Usage: attn bench prefill [options]\n\n"
        "Checks rows of each case against the double-precision definition, then times the case: CUDA\n"
        "graph replay, median and spread; TFLOP/s counted as 4 * head_dim * query heads for each pair\n"
        "of a query token and a key that it sees. Beside it, where there are two kernels, the\n"
        "original's time, of 64 query tokens a block, and how many times as fast its twin is; they\n"
        "have to give the same bits. Shapes that no kernel takes are skipped with a line.\n\n"
        "  --device D       gpu (default), or host: times the host executor\n"
        "  --set S          long (default), or short: chunks behind many keys, which are not\n"
        "                   in the cache, beside a kernel that only reads as many bytes\n"
        "  --shape NAME     only the shape of that name, of any set; may be repeated\n"
        "  --list           print the names of the shapes\n"
        "  --json, --csv    for programs\n");
}

static bool is_wanted(const struct bench *const bench,
                      const struct prefill_bench_shape *const shape)
{
    for (int i = 0; i < bench->num_names; i++)
        if (!strcmp(bench->names[i], shape->name)) return true;
    return !bench->num_names && shape->is_short == bench->is_short;
}

static double get_tflops(const double flops, const double us)
{
    return us > 0.0 ? flops / us * 1e-6 : 0.0;
}

static double get_gbs(const struct prefill_bench_times *const times)
{
    return times->median_us > 0.0 ? times->bytes / times->median_us * 1e-3 : 0.0;
}

static double get_speedup(const struct prefill_bench_times *const times)
{
    return times->original_us > 0.0 ? times->original_us / times->median_us : 0.0;
}

static void print_head(const struct bench *const bench)
{
    if (bench->format == FORMAT_CSV)
        printf(
            "case,kernel,us,us_p10,us_p90,tflops,flops,original,original_us,twin_speedup,"
            "rows_checked,bound_share,relative_rms,host_us,calls,bytes,gbs,limit_gbs,dtype,batch,"
            "q_len,q_offset,num_q_heads,num_kv_heads,head_dim,page_size,ragged,device,driver,"
            "sm_mhz,memory_mhz,library,commit\n");
    if (bench->format != FORMAT_TABLE) return;
    printf("device   %s\n", bench->device_name);
    if (bench->gpu)
        printf("driver   %s; %d SMs up to %d MHz, memory %d MHz, L2 %.0f MB\n", bench->driver,
               bench->found.sm_count, bench->found.clock_khz / 1000,
               bench->found.memory_clock_khz / 1000, bench->found.l2_bytes * 1e-6);
    else
        printf("driver   none: these are times of the host executor, not of a kernel\n");
    printf("library  %s, commit %s\n", attn_version(), ATTN_BUILD_COMMIT);
    printf(
        "64       us of the original, of 64 query tokens a block, where the kernel is its twin\n");
    if (bench->is_short)
        printf("limit    of GB/s: a kernel that only reads as many bytes, in the same run\n");
    printf("host     us of one call that does not wait\n");
    printf("rms      relative RMS error of the checked rows\n\n");
    printf("%-34s %10s %22s %8s %8s %8s %10s %6s %6s %8s  %s\n", "case", "us", "(p10 .. p90)",
           "TFLOP/s", "GB/s", "limit", "64", "twin", "host", "rms", "kernel");
}

static void print_csv(const struct bench *const bench,
                      const struct prefill_bench_shape *const shape,
                      const struct prefill_bench_times *const times)
{
    cli_print_quoted(shape->name);
    printf(",%s,%.3f,%.3f,%.3f,%.2f,%.0f,%s,%.3f,%.4f,%d,%.4f,%.4e,%.3f,%d,", times->kernel,
           times->median_us, times->p10_us, times->p90_us,
           get_tflops(times->flops, times->median_us), times->flops, times->original,
           times->original_us, get_speedup(times), times->rows_checked, times->max_ratio,
           times->relative_rms, times->host_us, times->calls);
    printf("%.0f,%.1f,%.1f,", times->bytes, get_gbs(times), times->limit_gbs);
    printf("%s,%d,%d,%d,%d,%d,%d,%d,%d,", attn_dtype_name(shape->dtype), shape->batch, shape->q_len,
           shape->q_offset, shape->num_q_heads, shape->num_kv_heads, shape->head_dim,
           shape->page_size, shape->ragged);
    printf("\"%s\",%s,%d,%d,%s,%s\n", bench->device_name, bench->driver,
           bench->found.clock_khz / 1000, bench->found.memory_clock_khz / 1000, attn_version(),
           ATTN_BUILD_COMMIT);
}

static void print_line(const struct prefill_bench_shape *const shape,
                       const struct prefill_bench_times *const times)
{
    printf("%-34s %10.2f (%8.2f .. %8.2f) %8.1f ", shape->name, times->median_us, times->p10_us,
           times->p90_us, get_tflops(times->flops, times->median_us));
    if (times->limit_gbs > 0.0)
        printf("%8.1f %8.1f ", get_gbs(times), times->limit_gbs);
    else
        printf("%8s %8s ", "-", "-");
    if (times->original_us > 0.0)
        printf("%10.2f %6.2f ", times->original_us, get_speedup(times));
    else
        printf("%10s %6s ", "-", "-");
    if (times->host_us > 0.0)
        printf("%6.2f ", times->host_us);
    else
        printf("%6s ", "-");
    printf("%8.2e  %s\n", times->relative_rms, times->kernel);
}

static json_t *real_or_null(const double value)
{
    return value > 0.0 ? cli_json_real(value) : json_null();
}

static json_t *describe_shape(const struct prefill_bench_shape *const shape)
{
    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b}", "name", shape->name,
                     "dtype", attn_dtype_name(shape->dtype), "batch", (int) shape->batch, "q_len",
                     (int) shape->q_len, "q_offset", (int) shape->q_offset, "num_q_heads",
                     (int) shape->num_q_heads, "num_kv_heads", (int) shape->num_kv_heads,
                     "head_dim", (int) shape->head_dim, "page_size", (int) shape->page_size,
                     "ragged", shape->ragged);
}

static void add_case(struct bench *const bench, const struct prefill_bench_shape *const shape,
                     const struct prefill_bench_times *const times)
{
    json_t *const added =
        json_pack("{s:s, s:b, s:b, s:s, s:f, s:f, s:f, s:f, s:f, s:i, s:i}", "case", shape->name,
                  "ok", 1, "skipped", 0, "kernel", times->kernel, "us", times->median_us, "us_p10",
                  times->p10_us, "us_p90", times->p90_us, "flops", times->flops, "tflops",
                  get_tflops(times->flops, times->median_us), "calls", (int) times->calls,
                  "rows_checked", (int) times->rows_checked);
    json_object_set_new(added, "shape", describe_shape(shape));
    json_object_set_new(added, "original",
                        times->original[0] ? json_string(times->original) : json_null());
    json_object_set_new(added, "original_us", real_or_null(times->original_us));
    json_object_set_new(added, "bytes", real_or_null(times->bytes));
    json_object_set_new(added, "gbs", real_or_null(get_gbs(times)));
    json_object_set_new(added, "limit_gbs", real_or_null(times->limit_gbs));
    json_object_set_new(added, "twin_speedup", real_or_null(get_speedup(times)));
    json_object_set_new(added, "bound_share", cli_json_real(times->max_ratio));
    json_object_set_new(added, "relative_rms", cli_json_real(times->relative_rms));
    json_object_set_new(added, "host_us", real_or_null(times->host_us));
    json_array_append_new(bench->cases, added);
}

static void add_untimed(struct bench *const bench, const struct prefill_bench_shape *const shape,
                        const bool skipped, const char *const why)
{
    if (skipped)
        cli_warn("%s: skipped: %s", shape->name, why);
    else
        cli_fail("%s: %s", shape->name, why);
    bench->failed += !skipped;
    json_array_append_new(bench->cases, json_pack("{s:s, s:b, s:b, s:s, s:o}", "case", shape->name,
                                                  "ok", 0, "skipped", skipped, "error", why,
                                                  "shape", describe_shape(shape)));
}

static void run_shape(struct bench *const bench, const struct prefill_bench_shape *const shape)
{
    char line[128], why[1024];
    struct prefill_bench_times times;
    snprintf(line, sizeof(line), "%s ...", shape->name);
    cli_progress(line);
    const enum bench_result result =
        bench->gpu
            ? prefill_bench_on_gpu(bench->device, bench->gpu, shape, &times, why, sizeof(why))
            : prefill_bench_on_host(bench->device, shape, &times, why, sizeof(why));
    cli_progress(NULL);
    if (result != BENCH_DONE) {
        add_untimed(bench, shape, result == BENCH_SKIPPED, why);
        return;
    }
    if (bench->format == FORMAT_CSV) print_csv(bench, shape, &times);
    if (bench->format == FORMAT_TABLE) print_line(shape, &times);
    fflush(stdout);
    add_case(bench, shape, &times);
}

static bool is_too_long(const struct bench *const bench,
                        const struct prefill_bench_shape *const shape)
{
    const int64_t rows = (int64_t) shape->batch * shape->q_len * shape->num_q_heads;
    const int64_t pairs = rows * (shape->q_offset + shape->q_len);
    return !bench->gpu && !bench->num_names && (shape->ragged || pairs > HOST_DEFAULT_PAIRS);
}

static int print_document(const struct bench *const bench)
{
    return cli_print_json(json_pack("{s:s, s:s, s:b, s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:O}", "op",
                                    "prefill", "device", bench->device_name, "host_executor",
                                    bench->gpu == NULL, "driver", bench->driver, "sm_count",
                                    bench->found.sm_count, "sm_mhz", bench->found.clock_khz / 1000,
                                    "memory_mhz", bench->found.memory_clock_khz / 1000, "l2_bytes",
                                    bench->found.l2_bytes, "library", attn_version(), "commit",
                                    ATTN_BUILD_COMMIT, "cases", bench->cases));
}

static int run_shapes(struct bench *const bench)
{
    int count;
    const struct prefill_bench_shape *const shapes = prefill_bench_shapes(&count);
    print_head(bench);
    for (int i = 0; i < count; i++) {
        if (!is_wanted(bench, &shapes[i])) continue;
        if (is_too_long(bench, &shapes[i]))
            bench->left_out++;
        else
            run_shape(bench, &shapes[i]);
    }
    if (bench->left_out)
        cli_warn(
            "%d shapes take the host executor too long and were left out; --shape NAME runs one",
            bench->left_out);
    const int result = bench->format == FORMAT_JSON ? print_document(bench) : CLI_FINE;
    return bench->failed ? CLI_FAILED : result;
}

static int open_and_run(struct bench *const bench)
{
    struct attn_device_info info = { .size = sizeof(info) };
    int result = cli_open_device(bench->kind, NULL, &bench->device, &bench->gpu);
    if (result) return result;
    attn_device_describe(bench->device, &info);
    memcpy(bench->device_name, info.name, sizeof(bench->device_name));
    snprintf(bench->driver, sizeof(bench->driver), "none");
    bench->cases = json_array();
    if (bench->gpu && gpu_describe(bench->gpu, &bench->found)) {
        result = cli_fail("the CUDA driver does not describe the GPU");
    } else {
        const int version = bench->found.driver_version;
        if (version)
            snprintf(bench->driver, sizeof(bench->driver), "CUDA %d.%d", version / 1000,
                     version % 1000 / 10);
        result = run_shapes(bench);
    }
    json_decref(bench->cases);
    cli_close_device(&bench->device, &bench->gpu);
    return result;
}

static int run_bench(struct bench *const bench)
{
    int count;
    const struct prefill_bench_shape *const shapes = prefill_bench_shapes(&count);
    for (int i = 0; i < bench->num_names; i++) {
        bool found = false;
        for (int j = 0; j < count; j++) found |= !strcmp(bench->names[i], shapes[j].name);
        if (!found)
            return cli_usage("bench", "there is no shape '%s'; --list shows the names",
                             bench->names[i]);
    }
    if (!bench->list) return open_and_run(bench);
    for (int i = 0; i < count; i++)
        if (is_wanted(bench, &shapes[i])) printf("%s\n", shapes[i].name);
    return CLI_FINE;
}

static int read_option(struct bench *const bench, const int option)
{
    switch (option) {
    case 'c': bench->format = FORMAT_CSV; return CLI_FINE;
    case 'j': bench->format = FORMAT_JSON; return CLI_FINE;
    case 'l': bench->list = true; return CLI_FINE;
    case 'd':
        if (cli_read_device(optarg, &bench->kind) && bench->kind != CLI_DEVICE_AUTO)
            return CLI_FINE;
        return cli_usage("bench", "--device is '%s'; it is gpu or host", optarg);
    case 'S':
        bench->is_short = !strcmp(optarg, "short");
        if (bench->is_short || !strcmp(optarg, "long")) return CLI_FINE;
        return cli_usage("bench", "--set is '%s'; it is long or short", optarg);
    case 's':
        if (bench->num_names == MAX_NAMES)
            return cli_usage("bench", "--shape may be given %d times", MAX_NAMES);
        bench->names[bench->num_names++] = optarg;
        return CLI_FINE;
    default: return cli_usage("bench", "that option is not known, or lacks its value");
    }
}

int bench_prefill(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "csv", no_argument, NULL, 'c' },         { "device", required_argument, NULL, 'd' },
        { "help", no_argument, NULL, 'h' },        { "json", no_argument, NULL, 'j' },
        { "list", no_argument, NULL, 'l' },        { "set", required_argument, NULL, 'S' },
        { "shape", required_argument, NULL, 's' }, { NULL, 0, NULL, 0 },
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
    if (!result && optind < argc)
        result = cli_usage("bench", "'%s' is one argument too many", argv[optind]);
    return result ? result : run_bench(&bench);
}

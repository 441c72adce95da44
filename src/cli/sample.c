/* SPDX-License-Identifier: Apache-2.0 */
// `attn sample`: a well-formed case with random tensors, and with everything that a call must not
// look at filled with NaN and wild page ids.
#include "cli/random.h"
#include "cli/safetensors.h"
#include "cli/shape.h"
#include "host/reference.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPTION_SEED = SHAPE_OPTION_END,
    OPTION_SCALE,
    OPTION_SOFTCAP,
    OPTION_SINKS,
    OPTION_POLICY,
};

// E4M3 pools: two scales, so that a swapped one shows.
#define E4M3_K_SCALE 0.25f
#define E4M3_V_SCALE 0.5f
// Columns of the table beyond the longest sequence, and pages that no sequence has.
#define SPARE_COLUMNS 2
#define SPARE_PAGES 3
// So that the columns can be counted in 32 bits.
#define MAX_LEN (1 << 30)

struct sample {
    struct shape_options shape;
    const char *output, *policy;
    int64_t seed;
    float scale, softcap;
    bool with_sinks;

    struct random random;
    int32_t columns;
    int64_t num_pages;
    int32_t *lens, *table, *order;
    void *q, *k, *v;
    float *sinks;
};

static void print_help(void)
{
    printf(
        "Usage: attn sample decode [options] -o FILE\n\n"
        "Writes a well-formed case: normally distributed q, K and V, pages in random order, NaN in every\n"
        "slot that no sequence reaches.\n\n"
        "  -o, --output F   the file\n" SHAPE_HELP
        "  --scale X        multiplies q . k (1 / sqrt(head_dim))\n"
        "  --softcap X      0: none (0)\n"
        "  --sinks          with a sink for each query head\n"
        "  --policy P       split-K policy to write into the case\n"
        "  --seed N         equal seeds give equal files (1)\n");
}

static size_t count_pool(const struct sample *const s)
{
    return (size_t) s->num_pages * (size_t) s->shape.page_size * (size_t) s->shape.num_kv_heads *
           (size_t) s->shape.head_dim;
}

static void fill_normal(struct sample *const s, void *const to, const int64_t from,
                        const int64_t count, const enum attn_dtype dtype, const double factor)
{
    for (int64_t i = from; i < from + count; i++)
        attn_store(to, i, dtype, random_normal(&s->random) * factor);
}

static void draw_lengths(struct sample *const s)
{
    const int64_t span = (int64_t) s->shape.max_len - s->shape.min_len + 1;
    s->num_pages = SPARE_PAGES;
    for (int32_t i = 0; i < s->shape.batch; i++) {
        s->lens[i] = s->shape.min_len + (int32_t) random_below(&s->random, (uint64_t) span);
        s->num_pages += shape_pages(s->lens[i], s->shape.page_size);
    }
}

// Pages in random order; beyond a sequence's last one, in turn nothing, a page past the pool, and a
// page of NaN.
static void fill_table(struct sample *const s)
{
    int64_t next = 0;
    random_order(&s->random, s->order, (int32_t) s->num_pages);
    const int32_t wild[] = { -1, 0x7F7F7F7F, s->order[s->num_pages - 1] };
    for (int32_t i = 0; i < s->shape.batch; i++) {
        int32_t *const row = s->table + (size_t) i * (size_t) s->columns;
        const int32_t used = shape_pages(s->lens[i], s->shape.page_size);
        for (int32_t j = 0; j < s->columns; j++) row[j] = j < used ? s->order[next++] : wild[j % 3];
    }
}

static void fill_pools(struct sample *const s)
{
    const bool e4m3 = s->shape.kv_dtype == ATTN_DTYPE_E4M3;
    const size_t bytes = count_pool(s) * attn_dtype_size(s->shape.kv_dtype);
    const int64_t token = (int64_t) s->shape.num_kv_heads * s->shape.head_dim;
    memset(s->k, 0xFF, bytes);
    memset(s->v, 0xFF, bytes);
    for (int32_t i = 0; i < s->shape.batch; i++) {
        const int32_t attended = shape_attended(s->lens[i], s->shape.window);
        for (int32_t t = s->lens[i] - attended; t < s->lens[i]; t++) {
            const int64_t page =
                s->table[(size_t) i * (size_t) s->columns + (size_t) (t / s->shape.page_size)];
            const int64_t place = (page * s->shape.page_size + t % s->shape.page_size) * token;
            fill_normal(s, s->k, place, token, s->shape.kv_dtype, e4m3 ? 1.0 / E4M3_K_SCALE : 1.0);
            fill_normal(s, s->v, place, token, s->shape.kv_dtype, e4m3 ? 1.0 / E4M3_V_SCALE : 1.0);
        }
    }
}

// Checked before anything is allocated: every count fits where it goes.
static int check_size(const struct sample *const s)
{
    const double pool = (double) s->num_pages * s->shape.page_size * s->shape.num_kv_heads *
                        s->shape.head_dim * (double) attn_dtype_size(s->shape.kv_dtype);
    if (s->num_pages > INT32_MAX || pool > 1e12)
        return cli_fail(
            "the pools would have %lld pages and %.3g bytes each; a sample has at most 2^31 - 1 "
            "pages and 10^12 bytes",
            (long long) s->num_pages, pool);
    return CLI_FINE;
}

static int make_tensors(struct sample *const s)
{
    const size_t batch = (size_t) s->shape.batch;
    s->random.state = (uint64_t) s->seed;
    s->columns = shape_pages(s->shape.max_len, s->shape.page_size) + SPARE_COLUMNS;
    s->lens = malloc((batch + 1) * sizeof(*s->lens));
    if (!s->lens) return cli_fail("out of memory");
    draw_lengths(s);
    if (check_size(s)) return CLI_FAILED;
    const size_t pool = count_pool(s) * attn_dtype_size(s->shape.kv_dtype);
    const size_t rows = batch * (size_t) s->shape.num_q_heads;
    s->order = malloc((size_t) s->num_pages * sizeof(*s->order));
    s->table = calloc(batch * (size_t) s->columns + 1, sizeof(*s->table));
    s->q = calloc(rows * (size_t) s->shape.head_dim + 1, attn_dtype_size(s->shape.q_dtype));
    s->k = malloc(pool + 1);
    s->v = malloc(pool + 1);
    s->sinks = malloc((size_t) s->shape.num_q_heads * sizeof(*s->sinks));
    if (!s->order || !s->table || !s->q || !s->k || !s->v || !s->sinks)
        return cli_fail("out of memory: the pools would have %zu bytes each", pool);
    fill_table(s);
    fill_normal(s, s->q, 0, (int64_t) (rows * (size_t) s->shape.head_dim), s->shape.q_dtype, 1.0);
    fill_pools(s);
    for (int32_t i = 0; i < s->shape.num_q_heads; i++)
        s->sinks[i] = (float) random_normal(&s->random);
    return CLI_FINE;
}

static void set_number(json_t *const metadata, const char *const key, const float value)
{
    char text[32];
    // Nine digits bring a float back exactly.
    snprintf(text, sizeof(text), "%.9g", (double) value);
    json_object_set_new(metadata, key, json_string(text));
}

static json_t *make_metadata(const struct sample *const s)
{
    json_t *const metadata =
        json_pack("{s:s, s:s, s:s}", "format", "attn-case", "version", "1", "op", "decode");
    char window[16];
    set_number(metadata, "scale",
               s->scale > 0.0f ? s->scale : 1.0f / sqrtf((float) s->shape.head_dim));
    if (s->softcap > 0.0f) set_number(metadata, "softcap", s->softcap);
    snprintf(window, sizeof(window), "%d", s->shape.window);
    if (s->shape.window) json_object_set_new(metadata, "window", json_string(window));
    if (s->policy) json_object_set_new(metadata, "policy", json_string(s->policy));
    if (s->shape.kv_dtype == ATTN_DTYPE_E4M3) {
        set_number(metadata, "k_scale", E4M3_K_SCALE);
        set_number(metadata, "v_scale", E4M3_V_SCALE);
    }
    return metadata;
}

static const char *name_dtype(const enum attn_dtype dtype)
{
    return dtype == ATTN_DTYPE_BF16 ? "BF16" : dtype == ATTN_DTYPE_FP16 ? "F16" : "F8_E4M3";
}

static int write_sample(const struct sample *const s)
{
    const size_t batch = (size_t) s->shape.batch, heads = (size_t) s->shape.num_q_heads;
    const size_t pool = count_pool(s) * attn_dtype_size(s->shape.kv_dtype);
    const char *const kv = name_dtype(s->shape.kv_dtype);
    const int64_t kv_heads = s->shape.num_kv_heads, dim = s->shape.head_dim;
    // The large ones first: they stay aligned.
    const struct safetensors_tensor tensors[] = {
        { "k_pool", kv, 4, { s->num_pages, s->shape.page_size, kv_heads, dim }, s->k, pool },
        { "v_pool", kv, 4, { s->num_pages, s->shape.page_size, kv_heads, dim }, s->v, pool },
        { "q",
          name_dtype(s->shape.q_dtype),
          3,
          { s->shape.batch, s->shape.num_q_heads, dim },
          s->q,
          batch * heads * (size_t) dim * attn_dtype_size(s->shape.q_dtype) },
        { "block_table",
          "I32",
          2,
          { s->shape.batch, s->columns },
          s->table,
          batch * (size_t) s->columns * sizeof(int32_t) },
        { "seq_lens", "I32", 1, { s->shape.batch }, s->lens, batch * sizeof(int32_t) },
        { "sinks", "F32", 1, { s->shape.num_q_heads }, s->sinks, heads * sizeof(float) },
    };
    const size_t count = sizeof(tensors) / sizeof(tensors[0]) - (s->with_sinks ? 0 : 1);
    char why[SAFETENSORS_WHY_SIZE];
    json_t *const metadata = make_metadata(s);
    const int result = safetensors_write(s->output, tensors, count, metadata, why);
    json_decref(metadata);
    return result ? cli_fail("%s", why) : CLI_FINE;
}

static int make_sample(struct sample *const s)
{
    int result = make_tensors(s);
    if (!result) result = write_sample(s);
    free(s->lens);
    free(s->table);
    free(s->order);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->sinks);
    return result;
}

static int read_option(struct sample *const s, const int option)
{
    struct attn_splitk_policy policy;
    switch (option) {
    case 'o': s->output = optarg; return CLI_FINE;
    case OPTION_SINKS: s->with_sinks = true; return CLI_FINE;
    case OPTION_SEED:
        if (cli_read_int(optarg, 0, INT64_MAX, &s->seed)) return CLI_FINE;
        return cli_usage("sample", "--seed is '%s'; a whole number from 0 up is needed", optarg);
    case OPTION_SCALE:
        if (cli_read_float(optarg, &s->scale) && s->scale > 0.0f) return CLI_FINE;
        return cli_usage("sample", "--scale is '%s'; a number above 0 is needed", optarg);
    case OPTION_SOFTCAP:
        if (cli_read_float(optarg, &s->softcap) && s->softcap >= 0.0f) return CLI_FINE;
        return cli_usage("sample", "--softcap is '%s'; a number from 0 up is needed", optarg);
    case OPTION_POLICY:
        s->policy = optarg;
        if (attn_splitk_parse(optarg, &policy)) return CLI_FINE;
        return cli_usage("sample",
                         "--policy is '%s'; it is legacy, auto, chunk, chunk:N, a count or off",
                         optarg);
    case '?': return cli_usage("sample", "that option is not known, or lacks its value");
    default: return shape_read(&s->shape, "sample", option, optarg);
    }
}

int command_sample(const int argc, char **const argv)
{
    static const struct option options[] = {
        SHAPE_OPTIONS,
        { "help", no_argument, NULL, 'h' },
        { "output", required_argument, NULL, 'o' },
        { "policy", required_argument, NULL, OPTION_POLICY },
        { "scale", required_argument, NULL, OPTION_SCALE },
        { "seed", required_argument, NULL, OPTION_SEED },
        { "sinks", no_argument, NULL, OPTION_SINKS },
        { "softcap", required_argument, NULL, OPTION_SOFTCAP },
        { NULL, 0, NULL, 0 },
    };
    struct sample sample = { .seed = 1 };
    int option, result = CLI_FINE;
    shape_init(&sample.shape);
    while (!result && (option = getopt_long(argc, argv, "ho:", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&sample, option);
    }
    if (result) return result;
    if (optind + 1 != argc || strcmp(argv[optind], "decode"))
        return cli_usage("sample", "one operation is needed: decode");
    if (sample.shape.max_len > MAX_LEN)
        return cli_usage("sample", "--len is %d; at most %d", sample.shape.max_len, MAX_LEN);
    if (!sample.output) return cli_usage("sample", "-o FILE is needed");
    result = shape_finish(&sample.shape, "sample");
    return result ? result : make_sample(&sample);
}

/* SPDX-License-Identifier: Apache-2.0 */
// `attn sample prefill`: contiguous, one paged sequence, or ragged; NaN in every slot that no query
// token sees.
#include "cli/sample_prefill.h"

#include "cli/prefill_shape.h"
#include "cli/random.h"
#include "cli/sample_file.h"
#include "cli/shape.h"
#include "host/reference.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPTION_SEED = PREFILL_OPTION_END,
    OPTION_SCALE,
    OPTION_SOFTCAP,
    OPTION_SINKS,
    OPTION_KERNEL,
};

// Columns of the table beyond the longest sequence, and pages that no sequence has.
#define SPARE_COLUMNS 2
#define SPARE_PAGES 3
// So that columns and tokens can be counted in 32 bits.
#define MAX_LEN (1 << 30)
// Of a tensor, at most.
#define MAX_BYTES 1e12

struct sample {
    struct prefill_shape shape;
    const char *output, *kernel;
    int64_t seed;
    float scale, softcap;
    bool with_sinks;

    struct random random;
    // More than one sequence with pages.
    bool ragged;
    int32_t columns;
    // With keys or spare; contiguous: 0.
    int64_t num_pages, num_tokens;
    int32_t *kv_lens, *cu_seqlens, *q_offsets, *table, *order;
    void *q, *k, *v;
    float *sinks;
};

static void print_help(void)
{
    printf(
        "Usage: attn sample prefill [options] -o FILE\n\n"
        "Writes a well-formed case: normally distributed q, K and V, NaN in every slot that no query\n"
        "token sees. With --contiguous q, k and v of sequences of one length; else pages in random\n"
        "order, and with --batch above 1 sequences that differ.\n\n"
        "  -o, --output F   the file\n" PREFILL_HELP
        "  --scale X        multiplies q . k (1 / sqrt(head_dim))\n"
        "  --softcap X      0: none (0)\n"
        "  --sinks          with a sink for each query head\n"
        "  --kernel K       auto; 64 or 128: of so many query tokens a block, and of no other (auto)\n"
        "  --seed N         equal seeds give equal files (1)\n");
}

static void fill_normal(struct sample *const s, void *const to, const int64_t from,
                        const int64_t count)
{
    for (int64_t i = from; i < from + count; i++)
        attn_store(to, i, s->shape.dtype, random_normal(&s->random));
}

static void draw_lengths(struct sample *const s)
{
    const int64_t span = (int64_t) s->shape.max_len - s->shape.min_len + 1;
    if (!s->shape.contiguous) s->num_pages = SPARE_PAGES;
    for (int32_t i = 0; i < s->shape.batch; i++) {
        const int32_t len = s->shape.min_len + (int32_t) random_below(&s->random, (uint64_t) span);
        const int32_t tokens = prefill_shape_tokens(&s->shape, len);
        s->kv_lens[i] = len;
        s->q_offsets[i] = len - tokens;
        s->cu_seqlens[i] = (int32_t) s->num_tokens;
        s->num_tokens += tokens;
        if (!s->shape.contiguous) s->num_pages += shape_pages(len, s->shape.page_size);
        if (s->num_tokens > INT32_MAX || s->num_pages > INT32_MAX) return;
    }
    s->cu_seqlens[s->shape.batch] = (int32_t) s->num_tokens;
}

// Pages in random order; beyond a sequence's last one, in turn nothing, a page past the pool, and a
// page of NaN.
static void fill_table(struct sample *const s)
{
    int64_t next = 0;
    random_order(&s->random, s->order, (int32_t) s->num_pages);
    const int32_t wild[] = { -1, 0x7F7F7F7F, s->order[s->num_pages - 1] };
    for (int32_t i = 0; i < s->shape.batch; i++)
        for (int32_t j = 0; j < s->columns; j++)
            s->table[(int64_t) i * s->columns + j] =
                j < shape_pages(s->kv_lens[i], s->shape.page_size) ? s->order[next++] : wild[j % 3];
}

static int64_t find_slot(const struct sample *const s, const int32_t sequence, const int32_t key)
{
    const int32_t page_size = s->shape.page_size;
    if (s->shape.contiguous) return (int64_t) sequence * s->shape.max_len + key;
    const int64_t page = s->table[(int64_t) sequence * s->columns + key / page_size];
    return page * page_size + key % page_size;
}

static void fill_keys(struct sample *const s)
{
    const int64_t row = (int64_t) s->shape.num_kv_heads * s->shape.head_dim;
    for (int32_t i = 0; i < s->shape.batch; i++) {
        // The first query token sees the first key that one sees, the last one the last.
        const int32_t window = s->shape.window, first = s->q_offsets[i] - window + 1;
        for (int32_t t = window && first > 0 ? first : 0; t < s->kv_lens[i]; t++) {
            fill_normal(s, s->k, find_slot(s, i, t) * row, row);
            fill_normal(s, s->v, find_slot(s, i, t) * row, row);
        }
    }
}

static int64_t count_slots(const struct sample *const s)
{
    return s->shape.contiguous ? (int64_t) s->shape.batch * s->shape.max_len
                               : s->num_pages * s->shape.page_size;
}

// Before anything of that size is allocated.
static int check_size(const struct sample *const s)
{
    const double dim = s->shape.head_dim * (double) attn_dtype_size(s->shape.dtype);
    const double q = (double) s->num_tokens * s->shape.num_q_heads * dim;
    const double k = (double) count_slots(s) * s->shape.num_kv_heads * dim;
    if (s->num_tokens <= INT32_MAX && s->num_pages <= INT32_MAX && fmax(q, k) <= MAX_BYTES)
        return CLI_FINE;
    return cli_fail("q would have %.3g bytes, and K and V %.3g each; a sample has at most 2^31 - 1 "
                    "tokens and pages, and 10^12 bytes",
                    q, k);
}

static int make_lists(struct sample *const s)
{
    const size_t batch = (size_t) s->shape.batch;
    s->random.state = (uint64_t) s->seed;
    s->ragged = !s->shape.contiguous && s->shape.batch != 1;
    s->kv_lens = calloc(batch + 1, sizeof(*s->kv_lens));
    s->q_offsets = calloc(batch + 1, sizeof(*s->q_offsets));
    s->cu_seqlens = calloc(batch + 1, sizeof(*s->cu_seqlens));
    if (!s->kv_lens || !s->q_offsets || !s->cu_seqlens) return cli_fail("out of memory");
    draw_lengths(s);
    return check_size(s);
}

static int make_tensors(struct sample *const s)
{
    const size_t dim = (size_t) s->shape.head_dim, element = attn_dtype_size(s->shape.dtype);
    const size_t q = (size_t) s->num_tokens * (size_t) s->shape.num_q_heads * dim;
    const size_t k = (size_t) count_slots(s) * (size_t) s->shape.num_kv_heads * dim;
    s->columns =
        s->shape.contiguous ? 0 : shape_pages(s->shape.max_len, s->shape.page_size) + SPARE_COLUMNS;
    s->order = malloc(((size_t) s->num_pages + 1) * sizeof(*s->order));
    s->table = malloc(((size_t) s->shape.batch * (size_t) s->columns + 1) * sizeof(*s->table));
    s->q = malloc(q * element + 1);
    s->k = malloc(k * element + 1);
    s->v = malloc(k * element + 1);
    s->sinks = malloc((size_t) s->shape.num_q_heads * sizeof(*s->sinks));
    if (!s->order || !s->table || !s->q || !s->k || !s->v || !s->sinks)
        return cli_fail("out of memory: q would have %zu bytes, K and V %zu each", q * element,
                        k * element);
    memset(s->k, 0xFF, k * element);
    memset(s->v, 0xFF, k * element);
    if (!s->shape.contiguous) fill_table(s);
    fill_normal(s, s->q, 0, (int64_t) q);
    fill_keys(s);
    for (int32_t i = 0; i < s->shape.num_q_heads; i++)
        s->sinks[i] = (float) random_normal(&s->random);
    return CLI_FINE;
}

static void set_count(json_t *const metadata, const char *const key, const int32_t value)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", value);
    json_object_set_new(metadata, key, json_string(text));
}

static json_t *make_metadata(const struct sample *const s)
{
    json_t *const metadata =
        json_pack("{s:s, s:s, s:s, s:s}", "format", "attn-case", "version", "1", "op", "prefill",
                  "causal", s->shape.not_causal ? "0" : "1");
    const float usual = 1.0f / sqrtf((float) s->shape.head_dim);
    sample_set_number(metadata, "scale", s->scale > 0.0f ? s->scale : usual);
    if (s->softcap > 0.0f) sample_set_number(metadata, "softcap", s->softcap);
    if (s->shape.window) set_count(metadata, "window", s->shape.window);
    if (s->kernel) json_object_set_new(metadata, "kernel", json_string(s->kernel));
    if (!s->ragged && !s->shape.contiguous) {
        set_count(metadata, "kv_len", s->kv_lens[0]);
        set_count(metadata, "q_offset", s->q_offsets[0]);
    }
    return metadata;
}

// The large ones first: they stay aligned.
static void list_tensors(const struct sample *const s, struct sample_tensors *const to)
{
    const enum attn_dtype dtype = s->shape.dtype, i32 = ATTN_DTYPE_INT32;
    const int64_t batch = s->shape.batch, heads = s->shape.num_q_heads, dim = s->shape.head_dim;
    const int64_t kv_heads = s->shape.num_kv_heads, columns = s->columns;
    const bool paged = !s->shape.contiguous;
    const int64_t q_len = prefill_shape_tokens(&s->shape, s->shape.max_len);
    const int64_t keys[] = { paged ? s->num_pages : batch,
                             paged ? s->shape.page_size : s->shape.max_len, kv_heads, dim };
    sample_add_tensor(to, paged ? "k_pool" : "k", dtype, s->k, keys);
    sample_add_tensor(to, paged ? "v_pool" : "v", dtype, s->v, keys);
    if (paged)
        sample_add_tensor(to, "q", dtype, s->q, (int64_t[]){ s->num_tokens, heads, dim, -1 });
    else
        sample_add_tensor(to, "q", dtype, s->q, (int64_t[]){ batch, q_len, heads, dim });
    if (s->ragged) {
        sample_add_tensor(to, "block_table", i32, s->table, (int64_t[]){ batch, columns, -1, -1 });
        sample_add_tensor(to, "cu_seqlens", i32, s->cu_seqlens,
                          (int64_t[]){ batch + 1, -1, -1, -1 });
        sample_add_tensor(to, "kv_lens", i32, s->kv_lens, (int64_t[]){ batch, -1, -1, -1 });
        sample_add_tensor(to, "q_offsets", i32, s->q_offsets, (int64_t[]){ batch, -1, -1, -1 });
    } else if (paged) {
        sample_add_tensor(to, "block_table", i32, s->table, (int64_t[]){ columns, -1, -1, -1 });
    }
    if (s->with_sinks)
        sample_add_tensor(to, "sinks", ATTN_DTYPE_FP32, s->sinks, (int64_t[]){ heads, -1, -1, -1 });
}

static int write_sample(const struct sample *const s)
{
    struct sample_tensors tensors = { .count = 0 };
    list_tensors(s, &tensors);
    return sample_write_file(s->output, &tensors, make_metadata(s));
}

static int make_sample(struct sample *const s)
{
    int result = make_lists(s);
    if (!result) result = make_tensors(s);
    if (!result) result = write_sample(s);
    free(s->kv_lens);
    free(s->q_offsets);
    free(s->cu_seqlens);
    free(s->order);
    free(s->table);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->sinks);
    return result;
}

static int read_option(struct sample *const s, const int option)
{
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
    case OPTION_KERNEL:
        s->kernel = optarg;
        if (!strcmp(optarg, "auto") || !strcmp(optarg, "64") || !strcmp(optarg, "128"))
            return CLI_FINE;
        return cli_usage("sample", "--kernel is '%s'; it is auto, 64 or 128", optarg);
    default: return prefill_shape_read(&s->shape, "sample", option, optarg);
    }
}

static int check_options(const struct sample *const s)
{
    if (s->shape.max_len > MAX_LEN)
        return cli_usage("sample", "--len is %d; at most %d", s->shape.max_len, MAX_LEN);
    if (s->kernel && strcmp(s->kernel, "auto") && !s->shape.contiguous && s->shape.batch != 1)
        return cli_usage("sample",
                         "--kernel is %s, and --batch %d with pages; it takes one sequence",
                         s->kernel, s->shape.batch);
    return s->output ? CLI_FINE : cli_usage("sample", "-o FILE is needed");
}

int sample_prefill(const int argc, char **const argv)
{
    static const struct option options[] = {
        PREFILL_OPTIONS,
        { "help", no_argument, NULL, 'h' },
        { "kernel", required_argument, NULL, OPTION_KERNEL },
        { "output", required_argument, NULL, 'o' },
        { "scale", required_argument, NULL, OPTION_SCALE },
        { "seed", required_argument, NULL, OPTION_SEED },
        { "sinks", no_argument, NULL, OPTION_SINKS },
        { "softcap", required_argument, NULL, OPTION_SOFTCAP },
        { NULL, 0, NULL, 0 },
    };
    struct sample sample = { .seed = 1 };
    int option, result = CLI_FINE;
    prefill_shape_init(&sample.shape);
    while (!result && (option = getopt_long(argc, argv, "ho:", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&sample, option);
    }
    if (!result && optind < argc)
        result = cli_usage("sample", "'%s' is one argument too many", argv[optind]);
    if (!result) result = prefill_shape_finish(&sample.shape, "sample");
    if (!result) result = check_options(&sample);
    return result ? result : make_sample(&sample);
}

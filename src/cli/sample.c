/* SPDX-License-Identifier: Apache-2.0 */
// `attn sample`: a well-formed case with random tensors, and with everything that a call must not
// look at filled with NaN and wild page ids.
#include "cli/random.h"
#include "cli/sample_file.h"
#include "cli/sample_prefill.h"
#include "cli/shape.h"
#include "cli/tree.h"
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
    OPTION_TREE,
    OPTION_SWA,
    OPTION_SKIP,
    OPTION_TILE,
    OPTION_RESIDENT,
    OPTION_PLANES,
};

// E4M3 pools: two scales, so that a swapped one shows.
#define E4M3_K_SCALE 0.25f
#define E4M3_V_SCALE 0.5f
// Columns of the table beyond the longest sequence, and pages that no sequence has.
#define SPARE_COLUMNS 2
#define SPARE_PAGES 3
// So that the columns can be counted in 32 bits.
#define MAX_LEN (1 << 30)
// Words of a mask's row beyond those that are needed.
#define SPARE_WORDS 1
#define MAX_SKIP_PAIRS 32

struct sample {
    struct shape_options shape;
    const char *output, *policy;
    int64_t seed;
    float scale, softcap;
    bool with_sinks, with_tree, contiguous_query_swa;
    enum tree_kind tree;
    // Pairs (length, S).
    int32_t skip[2 * MAX_SKIP_PAIRS];
    int32_t num_skip;
    // Blocks of a tile, slots, tiles in work; 0: not given.
    int32_t tile, resident, planes;

    struct random random;
    // Rows of a sequence in the table: 1, or for ctm 2, the last of which is V's.
    int32_t table_rows, columns;
    // With keys or spare, and in a pool: that of ctm has those of V behind those of K.
    int64_t num_pages, pool_pages;
    int32_t mask_words;
    int32_t *lens, *table, *order, *mask;
    // Of tiled and swap: blocks of each sequence, then valid slots of the last of each.
    int32_t *counts;
    // V's pool is K's for ctm.
    void *q, *k, *v;
    float *sinks;
};

static void print_help(void)
{
    printf(
        "Usage: attn sample decode|ctm|tiled|swap [options] -o FILE\n"
        "       attn sample prefill [options] -o FILE; 'attn sample prefill --help' has them\n\n"
        "Writes a well-formed case: normally distributed q, K and V, pages in random order, NaN in every\n"
        "slot that no query token attends. A length below --q-len becomes 0.\n\n"
        "  -o, --output F   the file\n" SHAPE_HELP
        "  --scale X        multiplies q . k (1 / sqrt(head_dim))\n"
        "  --sinks          with a sink for each query head\n"
        "  --tree T         none, causal, full, star, or random: a random tree a sequence, some padded\n"
        "                   with rows of 0 (none; ctm with --q-len above 1: causal)\n"
        "  --softcap X      decode; 0: none (0)\n"
        "  --policy P       decode; split-K policy to write into the case\n"
        "  --contiguous-query-swa  ctm; the window moves with the query token\n"
        "  --skip TABLE     ctm; skip-softmax with pairs length:S, as in 0:200,4096:400\n"
        "  --tile N         tiled, swap; blocks of a tile (64)\n"
        "  --resident N     swap; blocks that have slots on the GPU (as few as there can be)\n"
        "  --planes N       swap; tiles in work (2)\n"
        "  --seed N         equal seeds give equal files (1)\n");
}

static size_t count_pool(const struct sample *const s)
{
    return (size_t) s->pool_pages * (size_t) s->shape.page_size * (size_t) s->shape.num_kv_heads *
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
        const int32_t len = s->shape.min_len + (int32_t) random_below(&s->random, (uint64_t) span);
        s->lens[i] = len < s->shape.q_len ? 0 : len;
        s->num_pages += shape_pages(s->lens[i], s->shape.page_size);
    }
    s->pool_pages = s->num_pages * s->table_rows;
}

static int32_t *find_row(const struct sample *const s, const int32_t sequence, const int32_t row)
{
    return s->table +
           ((size_t) sequence * (size_t) s->table_rows + (size_t) row) * (size_t) s->columns;
}

// Pages of K, or of V, in random order; beyond a sequence's last one, in turn nothing, a page past
// the pool, and a page of NaN.
static void fill_table(struct sample *const s, const int32_t row)
{
    const int32_t first = (int32_t) s->num_pages * row;
    int64_t next = 0;
    random_order(&s->random, s->order, (int32_t) s->num_pages);
    const int32_t wild[] = { -1, 0x7F7F7F7F, first + s->order[s->num_pages - 1] };
    for (int32_t i = 0; i < s->shape.batch; i++) {
        int32_t *const pages = find_row(s, i, row);
        const int32_t used = shape_pages(s->lens[i], s->shape.page_size);
        for (int32_t j = 0; j < s->columns; j++)
            pages[j] = j < used ? first + s->order[next++] : wild[j % 3];
    }
}

static void fill_masks(struct sample *const s)
{
    const int32_t q_len = s->shape.q_len;
    for (int32_t i = 0; i < s->shape.batch; i++) {
        const int32_t nodes = s->tree == TREE_RANDOM
                                  ? 1 + (int32_t) random_below(&s->random, (uint64_t) q_len)
                                  : q_len;
        tree_fill(s->mask + (size_t) i * (size_t) q_len * (size_t) s->mask_words, s->tree, q_len,
                  nodes, s->mask_words, &s->random);
    }
}

// Whether a query token of the sequence attends the key.
static bool is_attended(const struct sample *const s, const int32_t sequence, const int32_t key)
{
    const int32_t len = s->lens[sequence], q_len = s->shape.q_len, past = len - q_len;
    const bool shared = s->shape.op == CASE_CTM && !s->contiguous_query_swa;
    for (int32_t i = 0; i < q_len; i++) {
        const int32_t end = shared ? len : past + i + 1;
        const size_t row = (size_t) sequence * (size_t) q_len + (size_t) i;
        if (key < end - shape_attended(end, s->shape.window)) continue;
        if (key < past) return true;
        if (s->with_tree ? tree_has_bit(s->mask + row * (size_t) s->mask_words, key - past)
                         : key <= past + i)
            return true;
    }
    return false;
}

static void fill_key(struct sample *const s, void *const pool, const int32_t page,
                     const int32_t slot, const double factor)
{
    const int64_t token = (int64_t) s->shape.num_kv_heads * s->shape.head_dim;
    fill_normal(s, pool, ((int64_t) page * s->shape.page_size + slot) * token, token,
                s->shape.kv_dtype, factor);
}

static void fill_pools(struct sample *const s)
{
    const bool e4m3 = s->shape.kv_dtype == ATTN_DTYPE_E4M3;
    const size_t bytes = count_pool(s) * attn_dtype_size(s->shape.kv_dtype);
    memset(s->k, 0xFF, bytes);
    memset(s->v, 0xFF, bytes);
    for (int32_t i = 0; i < s->shape.batch; i++) {
        const int32_t *const k_row = find_row(s, i, 0), *const v_row =
                                                            find_row(s, i, s->table_rows - 1);
        for (int32_t t = 0; t < s->lens[i]; t++) {
            const int32_t column = t / s->shape.page_size, slot = t % s->shape.page_size;
            if (!is_attended(s, i, t)) continue;
            fill_key(s, s->k, k_row[column], slot, e4m3 ? 1.0 / E4M3_K_SCALE : 1.0);
            fill_key(s, s->v, v_row[column], slot, e4m3 ? 1.0 / E4M3_V_SCALE : 1.0);
        }
    }
}

// Checked before anything is allocated: every count fits where it goes.
static int check_size(const struct sample *const s)
{
    const double pool = (double) s->pool_pages * s->shape.page_size * s->shape.num_kv_heads *
                        s->shape.head_dim * (double) attn_dtype_size(s->shape.kv_dtype);
    const double q = (double) s->shape.batch * s->shape.q_len * s->shape.num_q_heads *
                     s->shape.head_dim * (double) attn_dtype_size(s->shape.q_dtype);
    if (q > 1e12) return cli_fail("q would have %.3g bytes; a sample has at most 10^12", q);
    if (s->pool_pages > INT32_MAX || pool > 1e12)
        return cli_fail(
            "the pools would have %lld pages and %.3g bytes each; a sample has at most 2^31 - 1 "
            "pages and 10^12 bytes",
            (long long) s->pool_pages, pool);
    return CLI_FINE;
}

static int make_tensors(struct sample *const s)
{
    const size_t batch = (size_t) s->shape.batch, tokens = batch * (size_t) s->shape.q_len;
    s->random.state = (uint64_t) s->seed;
    s->table_rows = s->shape.op == CASE_CTM ? 2 : 1;
    s->columns = shape_pages(s->shape.max_len, s->shape.page_size) + SPARE_COLUMNS;
    s->mask_words = tree_words(s->shape.q_len) + SPARE_WORDS;
    s->lens = malloc((batch + 1) * sizeof(*s->lens));
    if (!s->lens) return cli_fail("out of memory");
    draw_lengths(s);
    if (check_size(s)) return CLI_FAILED;
    const size_t pool = count_pool(s) * attn_dtype_size(s->shape.kv_dtype);
    const size_t q = tokens * (size_t) s->shape.num_q_heads * (size_t) s->shape.head_dim;
    const size_t table = batch * (size_t) s->table_rows * (size_t) s->columns;
    s->order = malloc((size_t) s->num_pages * sizeof(*s->order));
    s->table = calloc(table + 1, sizeof(*s->table));
    s->mask = calloc(tokens * (size_t) s->mask_words + 1, sizeof(*s->mask));
    s->q = calloc(q + 1, attn_dtype_size(s->shape.q_dtype));
    s->k = malloc(pool + 1);
    s->v = s->shape.op == CASE_CTM ? s->k : malloc(pool + 1);
    s->sinks = malloc((size_t) s->shape.num_q_heads * sizeof(*s->sinks));
    s->counts = malloc((2 * batch + 1) * sizeof(*s->counts));
    if (!s->counts || !s->order || !s->table || !s->mask || !s->q || !s->k || !s->v || !s->sinks)
        return cli_fail("out of memory: a pool would have %zu bytes", pool);
    for (int32_t row = 0; row < s->table_rows; row++) fill_table(s, row);
    if (s->with_tree) fill_masks(s);
    fill_normal(s, s->q, 0, (int64_t) q, s->shape.q_dtype, 1.0);
    fill_pools(s);
    for (int32_t i = 0; i < s->shape.batch; i++) {
        const int32_t blocks = shape_pages(s->lens[i], s->shape.page_size);
        s->counts[i] = blocks;
        s->counts[s->shape.batch + i] = s->lens[i] - (blocks - 1) * s->shape.page_size;
    }
    for (int32_t i = 0; i < s->shape.num_q_heads; i++)
        s->sinks[i] = (float) random_normal(&s->random);
    return CLI_FINE;
}

static bool has_lists(const struct sample *const s)
{
    return s->shape.op == CASE_TILED || s->shape.op == CASE_SWAP;
}

static void set_count(json_t *const metadata, const char *const key, const int32_t count)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", count);
    json_object_set_new(metadata, key, json_string(text));
}

static json_t *make_metadata(const struct sample *const s)
{
    json_t *const metadata = json_pack("{s:s, s:s, s:s}", "format", "attn-case", "version", "1",
                                       "op", case_op_name(s->shape.op));
    char window[16];
    sample_set_number(metadata, "scale",
                      s->scale > 0.0f ? s->scale : 1.0f / sqrtf((float) s->shape.head_dim));
    if (s->softcap > 0.0f) sample_set_number(metadata, "softcap", s->softcap);
    snprintf(window, sizeof(window), "%d", s->shape.window);
    if (s->shape.window) json_object_set_new(metadata, "window", json_string(window));
    if (has_lists(s)) set_count(metadata, "tile_capacity", s->tile);
    if (s->shape.op == CASE_SWAP) {
        set_count(metadata, "resident_blocks", s->resident);
        set_count(metadata, "num_planes", s->planes);
    }
    if (s->contiguous_query_swa)
        json_object_set_new(metadata, "contiguous_query_swa", json_string("1"));
    if (s->policy) json_object_set_new(metadata, "policy", json_string(s->policy));
    if (s->shape.kv_dtype == ATTN_DTYPE_E4M3) {
        sample_set_number(metadata, "k_scale", E4M3_K_SCALE);
        sample_set_number(metadata, "v_scale", E4M3_V_SCALE);
    }
    return metadata;
}

// The large ones first: they stay aligned.
static void list_tensors(const struct sample *const s, struct sample_tensors *const to)
{
    const int64_t batch = s->shape.batch, q_len = s->shape.q_len, dim = s->shape.head_dim;
    const int64_t heads = s->shape.num_q_heads, columns = s->columns;
    const int64_t pool[] = { s->pool_pages, s->shape.page_size, s->shape.num_kv_heads, dim };
    const bool ctm = s->shape.op == CASE_CTM, tiled = has_lists(s);
    sample_add_tensor(to, ctm ? "kv_pool" : "k_pool", s->shape.kv_dtype, s->k, pool);
    if (!ctm) sample_add_tensor(to, "v_pool", s->shape.kv_dtype, s->v, pool);
    if (ctm || q_len > 1)
        sample_add_tensor(to, "q", s->shape.q_dtype, s->q, (int64_t[]){ batch, q_len, heads, dim });
    else
        sample_add_tensor(to, "q", s->shape.q_dtype, s->q, (int64_t[]){ batch, heads, dim, -1 });
    if (ctm)
        sample_add_tensor(to, "page_table", ATTN_DTYPE_INT32, s->table,
                          (int64_t[]){ batch, s->table_rows, columns, -1 });
    else
        sample_add_tensor(to, tiled ? "block_list" : "block_table", ATTN_DTYPE_INT32, s->table,
                          (int64_t[]){ batch, columns, -1, -1 });
    sample_add_tensor(to, tiled ? "block_counts" : "seq_lens", ATTN_DTYPE_INT32,
                      tiled ? s->counts : s->lens, (int64_t[]){ batch, -1, -1, -1 });
    if (tiled)
        sample_add_tensor(to, "last_block_valid_slots", ATTN_DTYPE_INT32, s->counts + batch,
                          (int64_t[]){ batch, -1, -1, -1 });
    if (s->with_tree)
        sample_add_tensor(to, "tree_mask", ATTN_DTYPE_INT32, s->mask,
                          (int64_t[]){ batch, q_len, s->mask_words, -1 });
    if (s->with_sinks)
        sample_add_tensor(to, "sinks", ATTN_DTYPE_FP32, s->sinks, (int64_t[]){ heads, -1, -1, -1 });
    if (s->num_skip)
        sample_add_tensor(to, "skip_softmax_scale_table", ATTN_DTYPE_INT32, s->skip,
                          (int64_t[]){ s->num_skip, -1, -1, -1 });
}

static int write_sample(const struct sample *const s)
{
    struct sample_tensors tensors = { .count = 0 };
    list_tensors(s, &tensors);
    return sample_write_file(s->output, &tensors, make_metadata(s));
}

static int make_sample(struct sample *const s)
{
    int result = make_tensors(s);
    if (!result) result = write_sample(s);
    free(s->lens);
    free(s->table);
    free(s->order);
    free(s->mask);
    free(s->q);
    if (s->v != s->k) free(s->v);
    free(s->k);
    free(s->sinks);
    free(s->counts);
    return result;
}

// "length:S,length:S", lengths ascending.
static bool read_skip(struct sample *const s, const char *const text)
{
    const char *from = text;
    s->num_skip = 0;
    while (s->num_skip < 2 * MAX_SKIP_PAIRS) {
        char part[32];
        int64_t len, scale;
        const size_t length = strcspn(from, ",");
        if (length >= sizeof(part)) return false;
        memcpy(part, from, length);
        part[length] = 0;
        char *const cut = strchr(part, ':');
        if (!cut) return false;
        *cut = 0;
        if (!cli_read_int(part, s->num_skip ? s->skip[s->num_skip - 2] + 1 : 0, INT32_MAX, &len) ||
            !cli_read_int(cut + 1, INT32_MIN, INT32_MAX, &scale))
            return false;
        s->skip[s->num_skip++] = (int32_t) len;
        s->skip[s->num_skip++] = (int32_t) scale;
        if (!from[length]) return true;
        from += length + 1;
    }
    return false;
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
    case OPTION_TREE:
        s->with_tree = true;
        if (tree_read_kind(optarg, &s->tree)) return CLI_FINE;
        return cli_usage("sample", "--tree is '%s'; it is " TREE_NAMES, optarg);
    case OPTION_SWA: s->contiguous_query_swa = true; return CLI_FINE;
    case OPTION_SKIP:
        if (read_skip(s, optarg)) return CLI_FINE;
        return cli_usage(
            "sample",
            "--skip is '%s'; up to %d pairs length:S are needed, lengths ascending, as "
            "in 0:200,4096:400",
            optarg, MAX_SKIP_PAIRS);
    case OPTION_TILE: return shape_read_number("sample", "tile", optarg, 1, INT32_MAX, &s->tile);
    case OPTION_RESIDENT:
        return shape_read_number("sample", "resident", optarg, 1, INT32_MAX, &s->resident);
    case OPTION_PLANES: return shape_read_number("sample", "planes", optarg, 2, 16, &s->planes);
    case '?': return cli_usage("sample", "that option is not known, or lacks its value");
    default: return shape_read(&s->shape, "sample", option, optarg);
    }
}

// What tiled and swap have no place for; NULL: nothing.
static const char *find_not_listed(const struct sample *const s)
{
    return s->policy                 ? "policy"
           : s->softcap > 0.0f       ? "softcap"
           : s->with_sinks           ? "sinks"
           : s->with_tree            ? "tree"
           : s->num_skip             ? "skip"
           : s->contiguous_query_swa ? "contiguous-query-swa"
                                     : shape_find_not_listed(&s->shape);
}

// Of tiled and swap alone, of swap alone; and what they are where they are not given.
static int check_lists(struct sample *const s)
{
    const char *const strange = has_lists(s) ? find_not_listed(s) : NULL;
    const char *const op = case_op_name(s->shape.op);
    const int64_t most = shape_pages(s->shape.max_len, s->shape.page_size) + SPARE_COLUMNS;
    if (strange) return cli_usage("sample", "--%s is given; %s has none", strange, op);
    if (s->tile && !has_lists(s))
        return cli_usage("sample", "--tile is given; tiled and swap alone have it");
    if ((s->resident || s->planes) && s->shape.op != CASE_SWAP)
        return cli_usage("sample", "--%s is given; swap alone has it",
                         s->resident ? "resident" : "planes");
    if (has_lists(s) && s->shape.batch == 0)
        return cli_usage("sample", "--batch is 0; %s has at least one sequence", op);
    if (!s->tile) s->tile = 64;
    if (!s->planes) s->planes = 2;
    // A tile is no wider than the lists.
    const int64_t fewest = s->planes * (s->tile < most ? s->tile : most);
    if (s->shape.op == CASE_SWAP && s->resident && s->resident < fewest)
        return cli_usage("sample", "--resident is %d; %d tiles of up to %d blocks need %lld",
                         s->resident, s->planes, s->tile, (long long) fewest);
    if (fewest > INT32_MAX)
        return cli_usage("sample", "%d tiles of up to %d blocks are more than %d", s->planes,
                         s->tile, INT32_MAX);
    if (!s->resident) s->resident = (int32_t) fewest;
    return CLI_FINE;
}

// What one operation has and the other has not.
static int check_op(struct sample *const s)
{
    const struct shape_options *const shape = &s->shape;
    if (check_lists(s)) return CLI_USAGE;
    if (shape->op == CASE_CTM) {
        if (s->policy || s->softcap > 0.0f)
            return cli_usage("sample", "--%s is given; ctm has none",
                             s->policy ? "policy" : "softcap");
        if (!s->with_tree && shape->q_len > 1) {
            s->with_tree = true;
            s->tree = TREE_CAUSAL;
        }
        if (s->tree == TREE_NONE && shape->q_len > 1)
            return cli_usage("sample", "--tree is none; ctm needs one with --q-len above 1");
        if (s->num_skip && shape->q_len > 1)
            return cli_usage("sample", "--skip is given, and --q-len is %d; skip-softmax is for 1",
                             shape->q_len);
    } else if (s->contiguous_query_swa || s->num_skip) {
        return cli_usage("sample", "--%s is given; ctm alone has it",
                         s->num_skip ? "skip" : "contiguous-query-swa");
    }
    if (s->tree == TREE_NONE) s->with_tree = false;
    if (shape->max_len > MAX_LEN)
        return cli_usage("sample", "--len is %d; at most %d", shape->max_len, MAX_LEN);
    return CLI_FINE;
}

int command_sample(const int argc, char **const argv)
{
    static const struct option options[] = {
        SHAPE_OPTIONS,
        { "contiguous-query-swa", no_argument, NULL, OPTION_SWA },
        { "help", no_argument, NULL, 'h' },
        { "output", required_argument, NULL, 'o' },
        { "planes", required_argument, NULL, OPTION_PLANES },
        { "policy", required_argument, NULL, OPTION_POLICY },
        { "resident", required_argument, NULL, OPTION_RESIDENT },
        { "scale", required_argument, NULL, OPTION_SCALE },
        { "seed", required_argument, NULL, OPTION_SEED },
        { "sinks", no_argument, NULL, OPTION_SINKS },
        { "skip", required_argument, NULL, OPTION_SKIP },
        { "softcap", required_argument, NULL, OPTION_SOFTCAP },
        { "tile", required_argument, NULL, OPTION_TILE },
        { "tree", required_argument, NULL, OPTION_TREE },
        { NULL, 0, NULL, 0 },
    };
    struct sample sample = { .seed = 1 };
    int option, result = CLI_FINE;
    if (shape_is_prefill(argc, argv)) return sample_prefill(argc - 1, argv + 1);
    shape_init(&sample.shape);
    while (!result && (option = getopt_long(argc, argv, "ho:", options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            return CLI_FINE;
        }
        result = read_option(&sample, option);
    }
    if (result) return result;
    result = shape_finish(&sample.shape, "sample", argc - optind, argv + optind);
    if (!result) result = check_op(&sample);
    if (result) return result;
    if (!sample.output) return cli_usage("sample", "-o FILE is needed");
    return make_sample(&sample);
}

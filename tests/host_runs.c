/* SPDX-License-Identifier: Apache-2.0 */
// How kernels/decode deals leaves, followed on the host for what attn_decode launches: units, what
// waits while their leaves are merged, roots and where these meet. The workspace has room for all,
// and every merge is one of the tree that a piece alone decides on.
#include "attn/attn.h"
#include "device.h"
#include "support/launches.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILE 64
#define MAX_BATCH 300

static struct attn_device *device;

static void tear_down(void)
{
    launches_tear_down(&device);
}

TestSuite(runs, .init = launches_set_up, .fini = tear_down);

// A block of the tree: leaves.
struct span {
    int64_t begin, end;
};

// What the launch allows, and what of it was used.
struct walk {
    const struct attn_decode_args *args;
    // Blocks of the grid, and of an SM; levels below wait elsewhere; levels whose roots one block
    // merges.
    int32_t blocks, per_sm, levels, fan_log;
    char label[176];
    int32_t shift;
    // Of one lane, so far: units; roots; those that these pieces could have, wherever they began.
    int64_t units, roots, most_roots;
    // For each level and root whether something has met there.
    unsigned char *met;
    // Leaves that may still be followed one by one.
    int64_t budget;
    // Calls that had late pieces.
    int late;
};

// What waits: in registers or shared memory, and in slots of the workspace.
struct stack {
    struct span levels[64], slots[64];
    uint64_t present;
    int32_t used;
};

// The tree: what meets at leaf `middle` are the halves of the largest aligned block around it.
static void merge(const struct walk *const w, const struct span piece, const struct span left,
                  struct span *const right)
{
    const int64_t middle = right->begin, half = middle & -middle;
    const int64_t begin = middle - half > piece.begin ? middle - half : piece.begin;
    const int64_t end = middle + half < piece.end ? middle + half : piece.end;
    cr_assert(left.end == middle && left.begin == begin && right->end == end,
              "%s: [%lld, %lld) meets [%lld, %lld) in the piece [%lld, %lld)", w->label,
              (long long) left.begin, (long long) left.end, (long long) middle,
              (long long) right->end, (long long) piece.begin, (long long) piece.end);
    right->begin = left.begin;
}

// As push in tree.cuh.
static bool push(const struct walk *const w, struct stack *const s, const struct span piece,
                 const int64_t first, const int64_t at, const bool is_last, struct span *const b)
{
    for (int level = 0;; level++) {
        if (is_last && at >> level << level <= first) return true;
        const uint64_t bit = (uint64_t) 1 << level;
        if (at >> level & 1) {
            if (!(s->present & bit)) continue;
            s->present &= ~bit;
            merge(w, piece, level < w->levels ? s->levels[level] : s->slots[--s->used], b);
        } else if (!is_last) {
            s->present |= bit;
            *(level < w->levels ? &s->levels[level] : &s->slots[s->used++]) = *b;
            cr_assert_leq(s->used, w->args->stack_slots, "%s: %d wait", w->label, s->used);
            return false;
        }
    }
}

static void expect_done(const struct walk *const w, const struct stack *const s,
                        const struct span wanted, const struct span got)
{
    cr_assert(!s->present && s->used == 0 && wanted.begin == got.begin && wanted.end == got.end,
              "%s: [%lld, %lld) instead of [%lld, %lld), or something waits", w->label,
              (long long) got.begin, (long long) got.end, (long long) wanted.begin,
              (long long) wanted.end);
}

static void walk_unit(struct walk *const w, const struct span piece, const struct span unit)
{
    if (unit.end - unit.begin > w->budget) return;
    w->budget -= unit.end - unit.begin;
    struct stack s = { .present = 0 };
    struct span b = { 0, 0 };
    for (int64_t leaf = unit.begin; leaf < unit.end; leaf++) {
        b = (struct span){ leaf, leaf + 1 };
        const bool is_last = leaf + 1 == unit.end;
        cr_assert_eq(push(w, &s, piece, unit.begin, leaf, is_last, &b), is_last);
    }
    expect_done(w, &s, unit, b);
}

// Block `index` of 2^log leaves.
static struct span block_of(const struct span piece, const int64_t index, const int32_t log)
{
    const int64_t begin = index << log, end = (index + 1) << log;
    return (struct span){ begin > piece.begin ? begin : piece.begin,
                          end < piece.end ? end : piece.end };
}

// Blocks low .. high of 2^log leaves, 2^fan_log of which are an aligned block, as in gather.cuh.
static void gather(const struct walk *const w, const struct span piece, const int64_t low,
                   const int64_t high, const int32_t log)
{
    struct span part[1 << ATTN_DECODE_MOST_FAN_LOG];
    const int fan = 1 << w->fan_log;
    for (int64_t i = 0; i < fan; i++) {
        const int64_t index = low / fan * fan + i;
        part[i] = block_of(piece, index < low ? low : index > high ? high : index, log);
    }
    for (int width = 1; width < fan; width *= 2)
        for (int i = 0; i < fan; i += width * 2) {
            const int64_t middle = low / fan * fan + i + width;
            if (middle > high)
                part[i + width * 2 - 1] = part[i + width - 1];
            else if (middle > low)
                merge(w, piece, part[i + width - 1], &part[i + width * 2 - 1]);
        }
    const int64_t begin = block_of(piece, low, log).begin, end = block_of(piece, high, log).end;
    const struct span all = part[fan - 1];
    cr_assert(all.begin == begin && all.end == end, "%s: [%lld, %lld) instead of [%lld, %lld)",
              w->label, (long long) all.begin, (long long) all.end, (long long) begin,
              (long long) end);
}

// Block `index` of 2^log units of the piece whose roots begin at `roots` has a place of its own.
static void meet(struct walk *const w, const int32_t level, const int64_t roots,
                 const int64_t first_unit, const int64_t index, const int32_t log)
{
    const struct attn_decode_args *const args = w->args;
    const int64_t unit = index << log > first_unit ? index << log : first_unit;
    const int64_t root = roots + unit - first_unit;
    cr_assert(level < args->root_levels && (root + 1) * args->lanes <= args->num_roots,
              "%s: level %d, root %lld", w->label, level, (long long) root);
    unsigned char *const met = &w->met[(int64_t) level * args->num_roots + root];
    cr_assert_eq(*met, 0, "%s: two blocks at level %d, root %lld", w->label, level,
                 (long long) root);
    *met = 1;
}

// Roots of units first .. last, from level to level.
static void merge_units(struct walk *const w, const struct span piece, const int64_t roots,
                        const int64_t first_unit, const int64_t last_unit)
{
    const int64_t fan = (int64_t) 1 << w->fan_log;
    int64_t first = first_unit, last = last_unit;
    int32_t level = 0;
    for (; first < last; level++) {
        const int32_t log = level * w->fan_log;
        for (int64_t parent = first / fan; parent <= last / fan; parent++) {
            const int64_t low = parent * fan > first ? parent * fan : first;
            const int64_t high = parent * fan + fan - 1 < last ? parent * fan + fan - 1 : last;
            meet(w, level, roots, first_unit, parent, log + w->fan_log);
            if (low < high) gather(w, piece, low, high, log + w->shift);
        }
        first /= fan;
        last /= fan;
    }
    cr_assert_leq(level, w->args->root_levels, "%s: %d levels", w->label, level);
}

static int64_t count_leaves(const struct span piece)
{
    return piece.end - piece.begin;
}

static void walk_piece(struct walk *const w, const struct span piece)
{
    if (count_leaves(piece) <= (int64_t) 1 << w->shift) {
        w->units++;
        walk_unit(w, piece, piece);
        return;
    }
    const int64_t first = piece.begin >> w->shift, last = (piece.end - 1) >> w->shift;
    for (int64_t unit = first; unit <= last; unit++)
        walk_unit(w, piece, block_of(piece, unit, w->shift));
    merge_units(w, piece, w->roots, first, last);
    w->units += last - first + 1;
    w->roots += last - first + 1;
    w->most_roots += (count_leaves(piece) >> w->shift) + (w->args->splits > 1 ? 1 : 2);
    cr_assert(w->roots <= w->most_roots && w->most_roots * w->args->lanes <= w->args->num_roots,
              "%s: %lld roots of a lane, up to %lld", w->label, (long long) w->roots,
              (long long) w->most_roots);
}

// Pieces of a sequence, none of them empty but where there are no keys at all.
static int cut_sequence(const struct attn_decode_args *const args, const int64_t len,
                        struct span *const pieces)
{
    // Of the first query token.
    const int64_t seen = len > args->q_len ? len - args->q_len + 1 : 1;
    const int64_t start = args->window > 0 && seen > args->window ? seen - args->window : 0;
    if (len == 0) {
        pieces[0] = (struct span){ 0, 1 };
        return 1;
    }
    if (args->splits == 1) {
        pieces[0] = (struct span){ start / TILE, (len - 1) / TILE + 1 };
        return 1;
    }
    const int64_t even = (len - start + args->splits - 1) / args->splits;
    const int64_t size = even > ATTN_DECODE_MIN_PIECE ? even : ATTN_DECODE_MIN_PIECE;
    int count = 0;
    for (int64_t left = len - start; left > 0; left -= size)
        pieces[count++] = (struct span){ 0, ((left < size ? left : size) - 1) / TILE + 1 };
    return count;
}

// All pieces, in units as large as choose_deal in schedule.cuh makes them.
static void walk_lengths(struct walk *const w, const int32_t *const lens)
{
    static struct span pieces[MAX_BATCH * ATTN_MAX_DECODE_SPLITS];
    const struct attn_decode_args *const args = w->args;
    int count = 0;
    for (int32_t i = 0; i < args->batch; i++) count += cut_sequence(args, lens[i], &pieces[count]);
    const int64_t rounding = (1 << args->min_shift) - 1;
    int64_t leaves = 0, longest = 0;
    for (int i = 0; i < count; i++) {
        const int64_t of_piece = ((count_leaves(pieces[i]) + rounding) >> args->min_shift) +
                                 (pieces[i].begin > 0 ? 1 : 0);
        leaves += of_piece;
        if (of_piece > longest) longest = of_piece;
    }
    cr_assert_lt(leaves, 1 << 30, "%s", w->label);
    const uint64_t items = (uint64_t) (leaves * args->lanes);
    const int32_t are_even =
        attn_decode_are_even((uint64_t) leaves, (uint64_t) longest, args->batch * args->splits);
    w->shift =
        args->min_shift + attn_decode_unit_shift(items, w->blocks, args->most_units, are_even);
    // No piece has as many leaves; they are numbers of 32 bits, shifted.
    if (w->shift > 31) w->shift = 31;
    const struct attn_decode_even even = {
        .pieces = (uint32_t) args->batch,
        .lanes = (uint32_t) args->lanes,
        .leaves = (uint32_t) longest,
        .blocks = (uint32_t) w->blocks,
        .grid_magic = args->grid_magic,
        .grid_shift = args->grid_shift,
        .num_roots = (uint32_t) args->num_roots,
        .may_begin_within = (uint32_t) args->may_begin_within,
    };
    struct attn_decode_late late = { 0 };
    if (are_even && leaves >= args->least_late_leaves)
        w->shift = attn_decode_late_cut(even, w->shift, w->per_sm > 1, &late);
    if (late.pieces > 0) w->late++;
    w->units = w->roots = w->most_roots = 0;
    w->met = calloc((size_t) args->root_levels * (size_t) args->num_roots + 1, 1);
    cr_assert_not_null(w->met);
    for (int i = 0; i < count; i++) {
        if (i == count - (int) late.pieces) w->shift = late.shift;
        walk_piece(w, pieces[i]);
    }
    free(w->met);
    // Blocks number (unit, lane) by an int32, and ask for one beyond the last.
    cr_assert_lt(w->units * args->lanes + w->blocks, INT32_MAX, "%s", w->label);
}

// ---- what is drawn

static int32_t draw_log(struct random *const random, const uint32_t max_log)
{
    const uint32_t log = random_below(random, max_log + 1);
    return (int32_t) (((uint32_t) 1 << log) + random_below(random, (uint32_t) 1 << log));
}

// Of one call: full rows; any; a length that makes windows begin just before an aligned block; one
// long sequence among short ones.
static void draw_lengths(struct random *const random, const struct attn_decode_args *const args,
                         int32_t *const lens)
{
    const uint32_t kind = random_below(random, 5), most = (uint32_t) args->max_keys;
    const uint32_t same = random_below(random, most) + 1, the_long = random_below(random, 8);
    for (int32_t i = 0; i < args->batch; i++) {
        const int64_t keys = ((int64_t) TILE << random_below(random, 20)) + args->window -
                             random_below(random, TILE + 2);
        const uint32_t little = random_below(random, most < 700 ? most + 1 : 700);
        const int64_t len[] = { most, same, random_below(random, most) + 1, keys,
                                (uint32_t) i == the_long ? most : little };
        lens[i] = len[kind] > most ? (int32_t) most : len[kind] < 0 ? 0 : (int32_t) len[kind];
    }
}

static struct attn_decode_params draw_params(struct random *const random, const uint32_t max_log)
{
    static const int32_t heads[] = { 1, 1, 1, 2, 3, 4, 8, 13, 32, 100, 300 };
    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.head_dim = random_below(random, 2) ? 64 : 256;
    params.num_kv_heads = heads[random_below(random, sizeof(heads) / sizeof(heads[0]))];
    params.num_q_heads = params.num_kv_heads * (random_below(random, 2) ? 1 : 6);
    params.q_len = random_below(random, 3) ? 1 : 1 + (int32_t) random_below(random, 40);
    // That of 256 takes few rows.
    if (params.q_len > 1) params.head_dim = 64;
    params.batch = 1 + (int32_t) random_below(random, random_below(random, 2) ? 6 : MAX_BATCH);
    params.page_size = 16;
    params.max_pages_per_seq = draw_log(random, max_log);
    // Some tables have room for all lengths there are.
    if (random_below(random, 8) == 0) params.max_pages_per_seq = INT32_MAX / 16 + 1;
    const int32_t windows[] = { 0, 0, 1, 50, TILE, TILE + 1, 300, draw_log(random, 17) };
    params.window = windows[random_below(random, sizeof(windows) / sizeof(windows[0]))];
    params.num_pages = 1000;
    params.max_decode_seqs = params.batch + (int32_t) random_below(random, 3);
    params.q = AT(1);
    params.o = AT(2);
    params.k_pool = AT(3);
    params.v_pool = AT(4);
    params.block_table = AT(5);
    params.seq_lens = AT(6);
    params.workspace = AT(9);
    params.workspace_bytes = SIZE_MAX / 4;
    params.counters = AT(1 << 10);
    return params;
}

static void open_device(struct random *const random)
{
    static const char *const policies[] = {
        NULL, NULL, NULL, "1", "2", "7", "16", "auto", "legacy"
    };
    static const int32_t limits[] = { 0, 0, 1, 3, 7 };
    static const int sm_counts[] = { 132, 132, 132, 1, 2, 48, 700 };
    attn_device_close(&device);
    // Or it would run out of kernels.
    fake_driver_install();
    fake.gpus[0].sm_count = sm_counts[random_below(random, 7)];
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = ATTN_DEVICE_ORDINAL;
    params.splitk_policy = policies[random_below(random, 9)];
    params.grid_limit = limits[random_below(random, 5)];
    launches_open(&device, params);
}

// `max_log`: of pages of a sequence.
static void walk_launches(const uint64_t seed, const int devices, const uint32_t max_log,
                          const int64_t budget)
{
    struct random random = { random_seed(seed) };
    int late = 0;
    for (int trial = 0; trial < devices * 8; trial++) {
        if (trial % 8 == 0) open_device(&random);
        const struct attn_decode_params params = draw_params(&random, max_log);
        cr_assert_eq(attn_decode(device, &params, NULL), ATTN_OK, "%s", attn_last_error());
        const struct fake_launch *const launch = last_launch();
        struct walk w = { .args = &launch->args,
                          .blocks = (int32_t) launch->grid[0],
                          .budget = budget };
        int32_t lens[MAX_BATCH];
        for (int i = 0; i < 4; i++) {
            draw_lengths(&random, w.args, lens);
            const struct attn_pack_row *const row = last_row(device);
            w.levels = row->levels;
            w.per_sm = row->per_sm;
            w.fan_log = ATTN_DECODE_FAN_LOG(row->head_dim, row->rows);
            snprintf(w.label, sizeof(w.label),
                     "trial %d.%d: grid %u, batch %d, %d lanes, %d pages, window %d, %d splits, "
                     "%d levels, room for %d",
                     trial, i, launch->grid[0], params.batch, w.args->lanes,
                     params.max_pages_per_seq, params.window, w.args->splits, w.levels,
                     w.args->stack_slots);
            walk_lengths(&w, lens);
        }
        late += w.late;
    }
    // Very long pieces seldom come to so few rounds.
    if (max_log < 20) cr_expect_gt(late, 0);
}

Test(runs, have_room)
{
    walk_launches(41, 400, 14, 1 << 16);
}

Test(runs, of_short_pieces_have_room)
{
    walk_launches(42, 400, 7, 1 << 16);
}

// Units of very many leaves.
Test(runs, of_long_pieces_have_room)
{
    walk_launches(43, 30, 22, 1 << 22);
}

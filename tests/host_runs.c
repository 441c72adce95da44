/* SPDX-License-Identifier: Apache-2.0 */
// Leaves cut into runs of blocks and warps, as kernels/decode/decode_params.h says: the blocks of
// the merge tree that a run keeps never outnumber the slots it is given. Followed leaf by leaf.
#include "kernels/decode/decode_params.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <stdbool.h>

#define MAX_PIECES 24

// A reduction of its own: leaves [first, end) have attended keys.
struct piece {
    int64_t first, end;
};

// How the leaves of some pieces are dealt.
struct deal {
    struct piece pieces[MAX_PIECES];
    int num_pieces;
    int64_t total, longest;
    int32_t block_runs, warps;
    // Of each run: at least this many leaves, as a power of two.
    int32_t run_log;
    // Of the kernel. Of 8 rows as wide as 256 the lowest level waits outside the slots, see
    // attn_decode_run_roots.
    int32_t head_dim, rows;
};

struct cut {
    int piece;
    int64_t leaf;
};

static int32_t log2_floor(int64_t number)
{
    int32_t log = 0;
    while (number >>= 1) log++;
    return log;
}

static int64_t count_run_leaves(const struct deal *const d)
{
    const int64_t runs = (int64_t) d->block_runs * d->warps;
    return (d->total - 1) / runs + 1;
}

// The cut before leaf number `at` of all pieces.
static struct cut find_cut(const struct deal *const d, int64_t at)
{
    if (at >= d->total) return (struct cut){ d->num_pieces, 0 };
    int piece = 0;
    while (at >= d->pieces[piece].end - d->pieces[piece].first) {
        at -= d->pieces[piece].end - d->pieces[piece].first;
        piece++;
    }
    const struct piece *const p = &d->pieces[piece];
    if (at == 0) return (struct cut){ piece, p->first };
    const int32_t piece_log = log2_floor(p->end - p->first);
    const int32_t log = (piece_log < d->run_log ? piece_log : d->run_log) - ATTN_DECODE_SNAP;
    const int64_t step = (int64_t) 1 << (log > 0 ? log : 0);
    const int64_t leaf = (p->first + at + step / 2) / step * step;
    return (struct cut){ piece, leaf < p->first ? p->first : leaf > p->end ? p->end : leaf };
}

// Adds leaf `leaf` to the binary counter of its piece. `waiting`: levels that hold a left half.
// Returns whether it became a root: a block whose left half is another run's.
static bool push(const struct piece *const p, const int64_t leaf, uint64_t *const waiting)
{
    const bool last = leaf == p->end - 1;
    for (int level = 0;; level++) {
        const int64_t start = leaf >> level << level;
        if (last && start <= p->first) return false;
        if (leaf >> level & 1) {
            if (!(*waiting >> level & 1) && start > p->first) return true;
            *waiting &= ~((uint64_t) 1 << level);
        } else if (!last) {
            *waiting |= (uint64_t) 1 << level;
            return false;
        }
    }
}

// What a run keeps of one piece: at most, and where the run ends.
struct kept {
    int most, last;
};

// `elsewhere`: levels that take no slot before the run's end.
static struct kept walk_piece(const struct piece *const p, const int64_t begin, const int64_t end,
                              const uint64_t elsewhere)
{
    struct kept kept = { 0, 0 };
    uint64_t waiting = 0;
    int roots = 0;
    for (int64_t leaf = begin; leaf < end; leaf++) {
        roots += push(p, leaf, &waiting);
        const int used = roots + __builtin_popcountll(waiting & ~elsewhere);
        if (used > kept.most) kept.most = used;
    }
    kept.last = roots + __builtin_popcountll(waiting);
    if (kept.last > kept.most) kept.most = kept.last;
    return kept;
}

// A run of `slots` slots, `head` of which are for what is left of a piece that begins before it, if
// others follow.
static void expect_room(const struct deal *const d, const struct cut from, const struct cut to,
                        const int head, const int slots, const bool is_warp)
{
    for (int i = from.piece; i < d->num_pieces && i <= to.piece; i++) {
        const struct piece *const p = &d->pieces[i];
        const int64_t begin = i == from.piece ? from.leaf : p->first;
        const int64_t end = i == to.piece ? to.leaf : p->end;
        const struct kept kept = walk_piece(p, begin, end, d->head_dim == 256);
        const bool is_head = begin > p->first;
        const int room = is_head ? slots : slots - head;
        // A block has room elsewhere for what waits while it merges.
        const int most = is_warp ? kept.most : kept.last;
        cr_assert(most <= room && (!is_head || end < p->end || kept.last <= head),
                  "%s: [%lld, %lld) of the piece [%lld, %lld): %d blocks, %d at the end, for %d "
                  "slots, %d of them at its head; %lld leaves, %d runs of %d warps, %d rows of %d",
                  is_warp ? "warp" : "block", (long long) begin, (long long) end,
                  (long long) p->first, (long long) p->end, most, kept.last, slots, head,
                  (long long) d->total, d->block_runs, d->warps, d->rows, d->head_dim);
    }
}

static void deal_leaves(struct deal *const d)
{
    d->total = d->longest = 0;
    for (int i = 0; i < d->num_pieces; i++) {
        const int64_t leaves = d->pieces[i].end - d->pieces[i].first;
        d->total += leaves;
        if (d->pieces[i].end > d->longest) d->longest = d->pieces[i].end;
    }
}

static int32_t slots_of(const struct deal *const d)
{
    int64_t rounded = 1;
    while (rounded < d->longest) rounded *= 2;
    const int64_t run = count_run_leaves(d);
    return attn_decode_run_roots(run < rounded ? run : rounded, d->warps, d->head_dim, d->rows);
}

static void walk_runs(struct deal *const d)
{
    const int64_t size = d->total / d->block_runs, rest = d->total % d->block_runs;
    const int64_t longest_block = size + (rest > 0);
    const int64_t warps = longest_block < d->warps ? longest_block : d->warps;
    const int32_t slots = slots_of(d);
    d->run_log = log2_floor(size / warps > 1 ? size / warps : 1);
    for (int64_t run = 0, begin = 0; run < d->block_runs; run++) {
        const int64_t count = size + (run < rest);
        const int64_t each = count / warps, longer = count % warps;
        expect_room(d, find_cut(d, begin), find_cut(d, begin + count), ATTN_DECODE_BLOCK_HEAD,
                    slots * d->warps, false);
        for (int64_t warp = 0; warp < warps; warp++) {
            const int64_t length = each + (warp < longer);
            expect_room(d, find_cut(d, begin), find_cut(d, begin + length), ATTN_DECODE_WARP_HEAD,
                        slots, true);
            begin += length;
        }
    }
}

// Walks all runs, of either kind of kernel.
static void walk(struct deal *const d)
{
    static const int32_t kernels[][2] = { { 64, 16 }, { 256, 8 } };
    deal_leaves(d);
    for (size_t i = 0; i < 2; i++) {
        d->head_dim = kernels[i][0];
        d->rows = kernels[i][1];
        walk_runs(d);
    }
}

// Every length and window start of one piece, cut into few and many runs.
Test(runs, of_one_piece_have_room)
{
    for (int64_t end = 1; end <= 260; end++)
        for (int64_t first = 0; first < end; first += first < 20 || end - first < 40 ? 1 : 7)
            for (int32_t block_runs = 1; block_runs <= 5 && block_runs <= end - first; block_runs++)
                for (int32_t warps = 1; warps <= 16; warps += warps < 4 ? 3 : 6) {
                    struct deal d = { .pieces = { { first, end } }, .num_pieces = 1 };
                    d.block_runs = block_runs;
                    d.warps = warps;
                    walk(&d);
                }
}

static int64_t draw_leaves(struct random *const random, const int32_t max_log)
{
    const uint32_t log = random_below(random, (uint32_t) max_log + 1);
    return 1 + random_below(random, (uint32_t) 1 << log);
}

Test(runs, of_many_pieces_have_room)
{
    struct random random = { random_seed(41) };
    for (int trial = 0; trial < 40000; trial++) {
        struct deal d = { .num_pieces = 1 + (int) random_below(&random, MAX_PIECES) };
        // Some trials: one length for all.
        const int64_t same = random_below(&random, 3) ? 0 : draw_leaves(&random, 11);
        int64_t total = 0;
        for (int i = 0; i < d.num_pieces; i++) {
            const int64_t leaves = same ? same : draw_leaves(&random, 11);
            // Windows start anywhere; a leaf before a power of two lets a block wait high up.
            const int64_t before[] = { 0, draw_leaves(&random, 12),
                                       ((int64_t) 1 << random_below(&random, 13)) - 1 };
            const int64_t first = before[random_below(&random, 3)];
            d.pieces[i] = (struct piece){ first, first + leaves };
            total += leaves;
        }
        d.warps = 1 + (int32_t) random_below(&random, 16);
        d.block_runs = 1 + (int32_t) random_below(&random, 12);
        if (d.block_runs > total) d.block_runs = (int32_t) total;
        walk(&d);
    }
}

// Of long runs: a piece that begins just before an aligned block, a cut at its ends.
Test(runs, of_long_pieces_have_room)
{
    struct random random = { random_seed(42) };
    for (int trial = 0; trial < 60; trial++) {
        struct deal d = { .num_pieces = 1 + (int) random_below(&random, 3) };
        for (int i = 0; i < d.num_pieces; i++) {
            const int64_t first =
                ((int64_t) 1 << random_below(&random, 18)) - 1 - random_below(&random, 2);
            const int64_t leaves = 1 + random_below(&random, 1 << 17);
            d.pieces[i] = (struct piece){ first < 0 ? 0 : first, first + 1 + leaves };
        }
        d.warps = 1 + (int32_t) random_below(&random, 16);
        d.block_runs = 1 + (int32_t) random_below(&random, 3);
        walk(&d);
    }
}

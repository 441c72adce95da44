/* SPDX-License-Identifier: Apache-2.0 */
// Tests of tiled decode that hold for every device; a program includes them once. It is the
// definition of decode over each sequence's whole list, has the same bits however the list is cut
// into tiles, and reads nothing but valid slots of listed blocks.
//
// The program has, before it includes them:
//   device, stream   what the calls are given
//   is_kernel        which error bound holds: that of a kernel, or that of the host executor
//   take, release    memory that host and device see, 64-byte aligned; take gives NULL if there is
//                    none
//   finish           waits until all calls are done
// and TestSuite(tiled), which opens them.
#ifndef ATTN_TESTS_TILED_SUITE_H
#define ATTN_TESTS_TILED_SUITE_H

#include "attn/attn.h"
#include "host/reference.h"
#include "host/tiled.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_FAULT INT32_MAX
// Of BF16 and of FP16.
#define NAN_BITS 0xFFFF

enum layout {
    PAGED,
    SCRATCH,
};

struct shape {
    enum attn_dtype dtype;
    int32_t q_heads, kv_heads, head_dim, block_size, num_seqs;
    // Of each sequence's list: blocks, and valid slots of the last.
    const int32_t *counts, *valid;
    enum layout layout;
    // Which blocks: two seeds give two orders in two pools.
    uint64_t block_seed;
    // Keys are this much larger; 0: 1.
    double peak;
};

// The tensors of a step. Slots that no list has are NaN.
struct step {
    struct shape shape;
    int32_t longest, num_blocks;
    struct attn_tiled_strides strides;
    uint16_t *q, *k, *v, *both;
    int32_t *list;
};

struct outcome {
    size_t rows, elements;
    float *m, *l, *o, *lse;
    uint16_t *output;
    int32_t *fault;
};

static void *need(const size_t bytes)
{
    const size_t whole = (bytes + 127) / 64 * 64;
    void *const memory = take(whole);
    cr_assert_not_null(memory);
    memset(memory, 0xFF, whole);
    return memory;
}

// ---- building a step

static struct attn_tiled_dims dims_of(const struct shape *const shape, const int32_t capacity)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    dims.dtype = shape->dtype;
    dims.max_seqs = shape->num_seqs;
    dims.num_q_heads = shape->q_heads;
    dims.num_kv_heads = shape->kv_heads;
    dims.head_dim = shape->head_dim;
    dims.block_size = shape->block_size;
    dims.tile_capacity = capacity;
    return dims;
}

static double normal(struct random *const random)
{
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += random_uniform(random);
    return sum / 2;
}

static void fill_row(uint16_t *const row, const struct shape *const shape, const uint64_t seed,
                     const double size)
{
    struct random random = { seed };
    for (int32_t d = 0; d < shape->head_dim; d++)
        attn_store(row, d, shape->dtype, size * normal(&random));
}

static int32_t slots_of(const struct shape *const shape, const int32_t sequence,
                        const int32_t index)
{
    const int32_t valid = shape->valid[sequence], all = shape->block_size;
    if (index + 1 < shape->counts[sequence] || valid >= all) return all;
    return valid < 0 ? 0 : valid;
}

static int64_t place(const struct step *const step, const int32_t block, const int32_t slot,
                     const int32_t head)
{
    return block * step->strides.block + slot * step->strides.token + head * step->strides.head;
}

static int32_t *list_at(const struct step *const step, const int32_t sequence, const int32_t index)
{
    return &step->list[(int64_t) sequence * step->longest + index];
}

// What a slot holds is decided by sequence, place in the list, slot and head: not by the block.
static void fill_block(const struct step *const step, const int32_t sequence, const int32_t index)
{
    const struct shape *const s = &step->shape;
    const int32_t block = *list_at(step, sequence, index);
    const double peak = s->peak ? s->peak : 1;
    for (int32_t slot = 0; slot < slots_of(s, sequence, index); slot++)
        for (int32_t head = 0; head < s->kv_heads; head++) {
            const int64_t at = place(step, block, slot, head);
            uint64_t seed = random_mix(random_seed(7), (uint64_t) sequence);
            seed = random_mix(random_mix(seed, (uint64_t) index), (uint64_t) slot);
            seed = random_mix(seed, (uint64_t) head);
            fill_row(step->k + at, s, random_mix(seed, 1), peak);
            fill_row(step->v + at, s, random_mix(seed, 2), 1);
        }
}

static void list_blocks(struct step *const step)
{
    struct random random = { step->shape.block_seed };
    int32_t next = 0, *const ids = need((size_t) step->num_blocks * sizeof(*ids));
    for (int32_t i = 0; i < step->num_blocks; i++) ids[i] = i;
    for (int32_t i = step->num_blocks - 1; i > 0; i--) {
        const int32_t j = (int32_t) random_below(&random, (uint32_t) i + 1), id = ids[i];
        ids[i] = ids[j];
        ids[j] = id;
    }
    for (int32_t i = 0; i < step->shape.num_seqs; i++)
        for (int32_t j = 0; j < step->shape.counts[i]; j++) *list_at(step, i, j) = ids[next++];
    release(ids);
}

static struct step build(const struct shape *const shape)
{
    struct step step = { .shape = *shape, .longest = 1, .num_blocks = 3 };
    const struct attn_tiled_dims dims = dims_of(shape, 1);
    const size_t rows = (size_t) shape->num_seqs * (size_t) shape->q_heads;
    for (int32_t i = 0; i < shape->num_seqs; i++) {
        step.num_blocks += shape->counts[i];
        if (shape->counts[i] > step.longest) step.longest = shape->counts[i];
    }
    step.strides = shape->layout == SCRATCH ? attn_tiled_scratch_pool_strides(&dims)
                                            : attn_tiled_paged_strides(&dims);
    const size_t pool = (size_t) step.num_blocks * (size_t) step.strides.block * 2;
    step.both = need(pool * 2);
    step.k = step.both;
    step.v = step.both + (step.strides.v_offset ? (size_t) step.strides.v_offset : pool / 2);
    step.list = need((size_t) shape->num_seqs * (size_t) step.longest * sizeof(int32_t));
    step.q = need(rows * (size_t) shape->head_dim * 2);
    for (size_t i = 0; i < rows; i++)
        fill_row(step.q + i * (size_t) shape->head_dim, shape, random_mix(random_seed(3), i), 1);
    list_blocks(&step);
    for (int32_t i = 0; i < shape->num_seqs; i++)
        for (int32_t j = 0; j < shape->counts[i]; j++) fill_block(&step, i, j);
    return step;
}

static void free_step(struct step *const step)
{
    release(step->both);
    release(step->list);
    release(step->q);
}

// ---- running it

static struct outcome make_outcome(const struct step *const step)
{
    struct outcome out = { .fault = need(sizeof(int32_t)) };
    *out.fault = NO_FAULT;
    out.rows = (size_t) step->shape.num_seqs * (size_t) step->shape.q_heads;
    out.elements = out.rows * (size_t) step->shape.head_dim;
    out.m = need(out.rows * sizeof(float));
    out.l = need(out.rows * sizeof(float));
    out.lse = need(out.rows * sizeof(float));
    out.o = need(out.elements * sizeof(float));
    out.output = need(out.elements * 2);
    return out;
}

static void free_outcome(struct outcome *const out)
{
    release(out->m);
    release(out->l);
    release(out->o);
    release(out->lse);
    release(out->output);
    release(out->fault);
}

static bool is_same(const struct outcome *const a, const struct outcome *const b)
{
    return !memcmp(a->output, b->output, a->elements * 2) &&
           !memcmp(a->lse, b->lse, a->rows * sizeof(float)) &&
           !memcmp(a->m, b->m, a->rows * sizeof(float)) &&
           !memcmp(a->l, b->l, a->rows * sizeof(float)) &&
           !memcmp(a->o, b->o, a->elements * sizeof(float));
}

static struct attn_tiled *make_state(const struct attn_tiled_dims *const dims,
                                     const struct outcome *const out)
{
    struct attn_tiled_create_params create = ATTN_TILED_CREATE_PARAMS_INIT;
    struct attn_tiled *tiled;
    create.dims = dims;
    if (out) create.m = out->m, create.l = out->l, create.o = out->o;
    cr_assert_eq(attn_tiled_create(&tiled, device, &create), ATTN_OK, "%s", attn_last_error());
    return tiled;
}

static void begin(struct attn_tiled *const tiled, const int32_t num_seqs)
{
    cr_assert_eq(attn_tiled_begin_step(tiled, num_seqs, stream), ATTN_OK, "%s", attn_last_error());
    finish();
}

static void fold(struct attn_tiled *const tiled, const struct attn_tiled_step_params *const params)
{
    cr_assert_eq(attn_tiled_step_tile(tiled, params, stream), ATTN_OK, "%s", attn_last_error());
    finish();
}

static void finalize(struct attn_tiled *const tiled,
                     const struct attn_tiled_finalize_params *const params)
{
    cr_assert_eq(attn_tiled_finalize(tiled, params, stream), ATTN_OK, "%s", attn_last_error());
    finish();
}

static int32_t *copy_counts(const int32_t *const counts, const int32_t num_seqs)
{
    const size_t bytes = (size_t) num_seqs * sizeof(*counts);
    return memcpy(need(bytes), counts, bytes);
}

static struct attn_tiled_step_params params_of(const struct step *const step)
{
    struct attn_tiled_step_params params = ATTN_TILED_STEP_PARAMS_INIT;
    params.num_seqs = step->shape.num_seqs;
    params.q = step->q;
    params.k_pool = step->k;
    params.v_pool = step->v;
    params.num_pool_blocks = step->num_blocks;
    if (step->shape.layout == SCRATCH) {
        params.block_stride = step->strides.block;
        params.token_stride = step->strides.token;
        params.head_stride = step->strides.head;
    }
    return params;
}

// One tile of each sequence: up to `capacity` blocks of its list from done[i] on, or a random
// number of them. Entries behind are wild. Returns whether there are blocks left.
static bool take_tile(const struct step *const step, const int32_t capacity,
                      struct random *const random, int32_t *const done, int32_t *const blocks,
                      int32_t *const counts, int32_t *const valid)
{
    bool more = false;
    for (int32_t i = 0; i < step->shape.num_seqs; i++) {
        const int32_t left = step->shape.counts[i] - done[i];
        int32_t take = random ? (int32_t) random_below(random, (uint32_t) capacity + 1) : capacity;
        if (take > left) take = left;
        for (int32_t j = 0; j < capacity; j++)
            blocks[i * capacity + j] = j < take ? *list_at(step, i, done[i] + j) : -1 - j;
        counts[i] = take;
        // Of no meaning without blocks.
        valid[i] = take == left ? step->shape.valid[i] : INT32_MAX;
        if (take == 0) valid[i] = 1;
        done[i] += take;
        if (take < left) more = true;
    }
    return more;
}

static struct outcome run(const struct step *const step, const int32_t capacity,
                          struct random *const random)
{
    const size_t seqs = (size_t) step->shape.num_seqs, word = sizeof(int32_t);
    struct outcome out = make_outcome(step);
    const struct attn_tiled_dims dims = dims_of(&step->shape, capacity);
    struct attn_tiled *tiled = make_state(&dims, &out);
    struct attn_tiled_step_params params = params_of(step);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    int32_t *const blocks = need(seqs * (size_t) capacity * word), *const counts =
                                                                       need(seqs * word);
    int32_t *const valid = need(seqs * word), *const done = need(seqs * word);
    memset(done, 0, seqs * word);
    params.tile_blocks = blocks;
    params.tile_block_counts = counts;
    params.valid_slots = valid;
    params.fault = out.fault;
    begin(tiled, params.num_seqs);
    for (bool more = true; more;) {
        more = take_tile(step, capacity, random, done, blocks, counts, valid);
        fold(tiled, &params);
    }
    last.num_seqs = params.num_seqs;
    last.output = out.output;
    last.lse = out.lse;
    finalize(tiled, &last);
    attn_tiled_destroy(&tiled);
    release(blocks);
    release(counts);
    release(valid);
    release(done);
    return out;
}

// ---- the definition

static int32_t count_keys(const struct shape *const shape, const int32_t sequence)
{
    int32_t keys = 0;
    for (int32_t i = 0; i < shape->counts[sequence]; i++) keys += slots_of(shape, sequence, i);
    return keys;
}

// One sequence's list is its block table.
static void find_exact(const struct step *const step, const int32_t sequence, const int32_t head,
                       struct attn_reference_row *const row)
{
    const struct shape *const s = &step->shape;
    struct attn_decode_params decode = ATTN_DECODE_PARAMS_INIT;
    const int32_t len = count_keys(s, sequence);
    decode.q_dtype = decode.kv_dtype = s->dtype;
    decode.batch = 1;
    decode.num_q_heads = s->q_heads;
    decode.num_kv_heads = s->kv_heads;
    decode.head_dim = s->head_dim;
    decode.q_stride = (int64_t) s->q_heads * s->head_dim;
    decode.q = step->q + sequence * decode.q_stride;
    decode.k_pool = step->k;
    decode.v_pool = step->v;
    decode.k_page_stride = decode.v_page_stride = step->strides.block;
    decode.k_token_stride = decode.v_token_stride = step->strides.token;
    decode.k_head_stride = decode.v_head_stride = step->strides.head;
    decode.block_table = list_at(step, sequence, 0);
    decode.page_size = s->block_size;
    decode.max_pages_per_seq = step->longest;
    decode.num_pages = step->num_blocks;
    decode.seq_lens = &len;
    decode.scale = 1 / sqrtf((float) s->head_dim);
    attn_reference_decode_row(&decode, 0, 0, head, NULL, row);
}

// Of the host executor: see tiled.h. n, of what is folded at a time.
static double host_slack(const struct shape *const shape, const int32_t sequence,
                         const double score_size)
{
    const int32_t units = (shape->block_size - 1) / ATTN_TILED_UNIT_KEYS + 1;
    return 0x1p-20 + 0x1p-23 * ((double) units * shape->counts[sequence] + score_size);
}

// False unless |value - exact| is within the bound, or both are the same infinity.
static bool is_near(const double value, const double exact, const double bound)
{
    return value == exact || fabs(value - exact) <= bound;
}

static void expect_row(const struct step *const step, const struct outcome *const out,
                       const int32_t sequence, const int32_t head)
{
    const struct shape *const s = &step->shape;
    double o[256], weighted[256], plain[256];
    struct attn_reference_row row = { .o = o, .weighted_abs = weighted, .plain_abs = plain };
    const int64_t index = (int64_t) sequence * s->q_heads + head;
    const bool fp16 = s->dtype == ATTN_DTYPE_FP16;
    find_exact(step, sequence, head, &row);
    const double unit = fp16 ? 0x1p-11 : 0x1p-8;
    const double slack =
        is_kernel ? 0x1p-15 + 0x1p-21 * row.score_size : host_slack(s, sequence, row.score_size);
    cr_expect(is_near(out->lse[index], row.lse, slack + 0x1p-24 * fabs(row.lse)),
              "[%d][%d]: lse %.9g, exactly %.9g", sequence, head, (double) out->lse[index],
              row.lse);
    for (int32_t d = 0; d < s->head_dim; d++) {
        const double value = attn_load(out->output, index * s->head_dim + d, s->dtype);
        const double weights = is_kernel ? unit * weighted[d] + (fp16 ? 0x1p-25 * plain[d] : 0) : 0;
        const double bound =
            unit * fabs(o[d]) + slack * weighted[d] + weights + (fp16 ? 0x1p-25 : 0x1p-134);
        cr_assert(is_near(value, o[d], bound), "[%d][%d][%d]: %.9g, exactly %.9g, bound %g",
                  sequence, head, d, value, o[d], bound);
    }
}

static void expect_exact(const struct step *const step, const struct outcome *const out)
{
    cr_expect_eq(*out->fault, NO_FAULT);
    for (int32_t i = 0; i < step->shape.num_seqs; i++)
        for (int32_t h = 0; h < step->shape.q_heads; h++) expect_row(step, out, i, h);
}

// ---- the definition is met

#define RAGGED_SEQS 5
static const int32_t ragged_counts[RAGGED_SEQS] = { 7, 0, 1, 16, 3 };
static const int32_t ragged_valid[RAGGED_SEQS] = { 1, 5, 3, INT32_MAX, 15 };

static const struct shape shapes[] = {
    { .dtype = ATTN_DTYPE_BF16, .q_heads = 4, .kv_heads = 2, .head_dim = 64, .block_size = 16 },
    { .dtype = ATTN_DTYPE_FP16, .q_heads = 9, .kv_heads = 3, .head_dim = 64, .block_size = 1 },
    { .dtype = ATTN_DTYPE_BF16, .q_heads = 6, .kv_heads = 1, .head_dim = 256, .block_size = 16 },
    { .dtype = ATTN_DTYPE_FP16, .q_heads = 2, .kv_heads = 2, .head_dim = 256, .block_size = 33 },
    { .dtype = ATTN_DTYPE_BF16, .q_heads = 1, .kv_heads = 1, .head_dim = 128, .block_size = 300 },
    { .dtype = ATTN_DTYPE_FP16, .q_heads = 8, .kv_heads = 2, .head_dim = 128, .block_size = 16 },
    { .dtype = ATTN_DTYPE_BF16,
      .q_heads = 4,
      .kv_heads = 1,
      .head_dim = 64,
      .block_size = 8,
      .layout = SCRATCH },
    { .dtype = ATTN_DTYPE_FP16,
      .q_heads = 4,
      .kv_heads = 2,
      .head_dim = 64,
      .block_size = 16,
      .peak = 40 },
};
#define NUM_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

static struct shape ragged(const struct shape *const of)
{
    struct shape shape = *of;
    shape.num_seqs = RAGGED_SEQS;
    shape.counts = ragged_counts;
    shape.valid = ragged_valid;
    return shape;
}

Test(tiled, is_decode_over_the_whole_list)
{
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const struct shape shape = ragged(&shapes[i]);
        struct step step = build(&shape);
        struct outcome out = run(&step, 16, NULL);
        expect_exact(&step, &out);
        free_outcome(&out);
        free_step(&step);
    }
}

// The contract's own: normal inputs, q over sqrt(D), less than 2e-3 off.
Test(tiled, has_the_parity_of_the_contract)
{
    static const int32_t counts[] = { 16 }, valid[] = { 16 }, tiles[] = { 1, 2, 4, 8, 16 };
    const struct shape shape = { .dtype = ATTN_DTYPE_BF16,
                                 .q_heads = 32,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .block_size = 16,
                                 .num_seqs = 1,
                                 .counts = counts,
                                 .valid = valid };
    struct step step = build(&shape);
    for (int32_t h = 0; h < 32; h++)
        fill_row(step.q + h * 128, &shape, random_mix(5, (uint64_t) h), 1 / sqrt(128));
    for (int64_t i = 0; i < step.num_blocks * step.strides.block; i++)
        if (step.v[i] != NAN_BITS)
            attn_store(step.v, i, shape.dtype, attn_load(step.v, i, shape.dtype) / sqrt(128));
    for (size_t t = 0; t < sizeof(tiles) / sizeof(tiles[0]); t++) {
        struct outcome out = run(&step, tiles[t], NULL);
        double exact[256], largest = 0;
        struct attn_reference_row row = { .o = exact };
        for (int32_t h = 0; h < 32; h++) {
            find_exact(&step, 0, h, &row);
            for (int32_t d = 0; d < 128; d++) {
                const double value = attn_load(out.output, h * 128 + d, shape.dtype);
                largest = fmax(largest, fabs(value - exact[d]));
            }
        }
        cr_expect_lt(largest, 2e-3, "tiles of %d: %g", tiles[t], largest);
        expect_exact(&step, &out);
        free_outcome(&out);
    }
    free_step(&step);
}

// ---- tiles

Test(tiled, has_the_same_bits_in_any_cutting)
{
    struct random random = { random_seed(11) };
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        const struct shape shape = ragged(&shapes[i]);
        struct step step = build(&shape);
        struct outcome whole = run(&step, 16, NULL);
        for (int32_t capacity = 1; capacity <= 17; capacity++)
            for (int cut = 0; cut < 3; cut++) {
                struct outcome cuts = run(&step, capacity, cut ? &random : NULL);
                cr_assert(is_same(&whole, &cuts), "shape %zu, tiles of %s%d", i,
                          cut ? "up to " : "", capacity);
                free_outcome(&cuts);
            }
        free_outcome(&whole);
        free_step(&step);
    }
}

Test(tiled, has_the_same_bits_in_any_layout)
{
    for (size_t i = 0; i < NUM_SHAPES; i++) {
        struct shape shape = ragged(&shapes[i]);
        struct step paged, scratch;
        shape.layout = PAGED;
        paged = build(&shape);
        shape.layout = SCRATCH;
        shape.block_seed = 99;
        scratch = build(&shape);
        struct outcome a = run(&paged, 5, NULL), b = run(&scratch, 16, NULL);
        cr_expect(is_same(&a, &b), "shape %zu", i);
        free_outcome(&a);
        free_outcome(&b);
        free_step(&paged);
        free_step(&scratch);
    }
}

// Each sequence alone has the bits that it has in the batch, and leaves the others' state.
Test(tiled, has_the_same_bits_alone)
{
    const struct shape shape = ragged(&shapes[0]);
    struct step step = build(&shape);
    struct outcome all = run(&step, 16, NULL);
    const size_t row = (size_t) shape.q_heads * (size_t) shape.head_dim;
    for (int32_t i = 0; i < RAGGED_SEQS; i++) {
        struct step one = step;
        one.shape.num_seqs = 1;
        one.shape.counts += i;
        one.shape.valid += i;
        one.q += (size_t) i * row;
        one.list = list_at(&step, i, 0);
        struct outcome alone = run(&one, 4, NULL);
        cr_expect_eq(memcmp(alone.output, all.output + (size_t) i * row, row * 2), 0, "%d", i);
        cr_expect_eq(memcmp(alone.o, all.o + (size_t) i * row, row * sizeof(float)), 0, "%d", i);
        free_outcome(&alone);
    }
    free_outcome(&all);
    free_step(&step);
}

// ---- valid slots

// A tile of all blocks of each list, with one count of valid slots for all sequences.
static struct outcome run_scalar(const struct step *const step, const int32_t valid)
{
    struct outcome out = make_outcome(step);
    const struct attn_tiled_dims dims = dims_of(&step->shape, step->longest);
    struct attn_tiled *tiled = make_state(&dims, &out);
    struct attn_tiled_step_params params = params_of(step);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    params.tile_blocks = step->list;
    int32_t *const counts = copy_counts(step->shape.counts, step->shape.num_seqs);
    params.tile_block_counts = counts;
    params.last_block_valid_slots = valid;
    params.fault = out.fault;
    last.num_seqs = params.num_seqs;
    last.output = out.output;
    last.lse = out.lse;
    begin(tiled, params.num_seqs);
    fold(tiled, &params);
    finalize(tiled, &last);
    attn_tiled_destroy(&tiled);
    release(counts);
    return out;
}

Test(tiled, counts_valid_slots_of_the_last_block)
{
    static const int32_t slots[] = { INT32_MIN, -1, 0, 1, 15, 16, 17, INT32_MAX };
    static const int32_t counts[] = { 3, 0, 1 };
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        const int32_t valid[] = { slots[i], slots[i], slots[i] };
        struct shape shape = shapes[0];
        shape.num_seqs = 3;
        shape.counts = counts;
        shape.valid = valid;
        struct step step = build(&shape);
        struct outcome scalar = run_scalar(&step, slots[i]), array = run(&step, 2, NULL);
        expect_exact(&step, &scalar);
        cr_expect(is_same(&scalar, &array), "%d valid slots", slots[i]);
        free_outcome(&scalar);
        free_outcome(&array);
        free_step(&step);
    }
}

// Without valid slots the last block might as well not be listed.
Test(tiled, skips_a_last_block_without_valid_slots)
{
    static const int32_t longer[] = { 4, 1 }, shorter[] = { 3, 0 }, none[] = { 0, -7 };
    static const int32_t all[] = { 16, 16 };
    struct shape shape = shapes[0];
    shape.num_seqs = 2;
    shape.counts = longer;
    shape.valid = none;
    struct step step = build(&shape);
    struct outcome a = run(&step, 4, NULL);
    step.shape.counts = shorter;
    step.shape.valid = all;
    struct outcome b = run(&step, 4, NULL);
    cr_expect(is_same(&a, &b));
    free_outcome(&a);
    free_outcome(&b);
    free_step(&step);
}

// ---- the state

static void poison(struct outcome *const out)
{
    // Signalling NaN: no arithmetic leaves it as it is.
    for (size_t i = 0; i < out->rows; i++)
        memcpy(&out->m[i], &(uint32_t){ 0x7FA00000u + (uint32_t) i }, 4),
            memcpy(&out->l[i], &(uint32_t){ 0xFFA00000u + (uint32_t) i }, 4);
    for (size_t i = 0; i < out->elements; i++)
        memcpy(&out->o[i], &(uint32_t){ 0x7F900000u + (uint32_t) i }, 4);
}

Test(tiled, leaves_the_state_at_count_0)
{
    static const int32_t zeros[RAGGED_SEQS];
    int32_t *const counts = copy_counts(zeros, RAGGED_SEQS);
    const struct shape shape = ragged(&shapes[0]);
    struct step step = build(&shape);
    const struct attn_tiled_dims dims = dims_of(&shape, step.longest);
    struct outcome out = make_outcome(&step), before = make_outcome(&step);
    struct attn_tiled *tiled = make_state(&dims, &out);
    struct attn_tiled_step_params params = params_of(&step);
    poison(&out);
    poison(&before);
    memset(step.list, 0x7F, (size_t) (RAGGED_SEQS * step.longest) * sizeof(int32_t));
    params.tile_blocks = step.list;
    params.tile_block_counts = counts;
    params.fault = out.fault;
    for (int32_t valid = -1; valid < 18; valid++) {
        params.last_block_valid_slots = valid;
        fold(tiled, &params);
        cr_expect(is_same(&out, &before), "%d", valid);
    }
    cr_expect_eq(*out.fault, NO_FAULT);
    attn_tiled_destroy(&tiled);
    release(counts);
    free_outcome(&out);
    free_outcome(&before);
    free_step(&step);
}

Test(tiled, begins_the_first_sequences_alone)
{
    const struct shape shape = ragged(&shapes[0]);
    struct step step = build(&shape);
    const struct attn_tiled_dims dims = dims_of(&shape, 4);
    struct outcome out = make_outcome(&step), before = make_outcome(&step);
    struct attn_tiled *tiled = make_state(&dims, &out);
    const size_t begun = 2 * (size_t) shape.q_heads, dim = (size_t) shape.head_dim;
    poison(&out);
    poison(&before);
    begin(tiled, 0);
    cr_expect(is_same(&out, &before));
    begin(tiled, 2);
    for (size_t i = 0; i < begun; i++) {
        cr_expect(out.m[i] == -INFINITY && out.l[i] == 0);
        for (size_t d = 0; d < dim; d++) cr_assert(out.o[i * dim + d] == 0);
    }
    memcpy(out.m, before.m, begun * sizeof(float));
    memcpy(out.l, before.l, begun * sizeof(float));
    memcpy(out.o, before.o, begun * dim * sizeof(float));
    cr_expect(is_same(&out, &before));
    attn_tiled_destroy(&tiled);
    free_outcome(&out);
    free_outcome(&before);
    free_step(&step);
}

// m is the largest score, and o / l what is finalized, any number of times.
Test(tiled, keeps_a_running_softmax)
{
    const struct shape shape = ragged(&shapes[0]);
    struct step step = build(&shape);
    struct outcome out = run(&step, 3, NULL);
    for (size_t i = 0; i < out.rows; i++) {
        const int32_t sequence = (int32_t) i / shape.q_heads;
        if (count_keys(&shape, sequence) == 0) {
            cr_expect(out.m[i] == -INFINITY && out.l[i] == 0 && out.lse[i] == -INFINITY);
            continue;
        }
        cr_expect(out.l[i] >= 1 && out.l[i] <= (float) count_keys(&shape, sequence));
        cr_expect_float_eq(out.lse[i], out.m[i] + logf(out.l[i]), 1e-5f);
    }
    free_outcome(&out);
    free_step(&step);
}

// A state that the library allocates, and one used for many steps, have the caller's bits.
Test(tiled, owns_a_state_for_many_steps)
{
    const struct shape shape = ragged(&shapes[5]);
    struct step step = build(&shape);
    struct outcome given = run_scalar(&step, 7), own = make_outcome(&step);
    const struct attn_tiled_dims dims = dims_of(&shape, step.longest);
    struct attn_tiled *tiled = make_state(&dims, NULL);
    struct attn_tiled_step_params params = params_of(&step);
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    params.tile_blocks = step.list;
    int32_t *const counts = copy_counts(shape.counts, shape.num_seqs);
    params.tile_block_counts = counts;
    params.last_block_valid_slots = 7;
    last.num_seqs = shape.num_seqs;
    last.output = own.output;
    for (int i = 0; i < 3; i++) {
        memset(own.output, 0xFF, own.elements * 2);
        memset(own.lse, 0xFF, own.rows * sizeof(float));
        last.lse = i == 1 ? NULL : own.lse;
        begin(tiled, shape.num_seqs);
        fold(tiled, &params);
        for (int again = 0; again < 2; again++) finalize(tiled, &last);
        cr_expect_eq(memcmp(own.output, given.output, own.elements * 2), 0);
        if (last.lse) cr_expect_eq(memcmp(own.lse, given.lse, own.rows * sizeof(float)), 0);
    }
    attn_tiled_destroy(&tiled);
    cr_expect_null(tiled);
    attn_tiled_destroy(&tiled);
    attn_tiled_destroy(NULL);
    release(counts);
    free_outcome(&given);
    free_outcome(&own);
    free_step(&step);
}

// ---- numbers

#define PLAIN_DIM 64

// One sequence, one head, one block of four keys; all of it 0.
struct plain {
    uint16_t q[PLAIN_DIM], k[4 * PLAIN_DIM], v[4 * PLAIN_DIM], output[PLAIN_DIM];
    float lse;
    int32_t slots;
};

static void set_first(uint16_t *const row, const double value)
{
    attn_store(row, 0, ATTN_DTYPE_BF16, value);
}

// Each key a tile of its own; scale 1.
static void run_plain(struct plain *const p, const int32_t keys)
{
    struct attn_tiled_dims dims = ATTN_TILED_DIMS_INIT;
    struct attn_tiled_step_params params = ATTN_TILED_STEP_PARAMS_INIT;
    struct attn_tiled_finalize_params last = ATTN_TILED_FINALIZE_PARAMS_INIT;
    struct plain *const copy = need(sizeof(*copy));
    int32_t *const list = need(2 * sizeof(*list));
    dims.max_seqs = dims.num_q_heads = dims.num_kv_heads = dims.block_size = 1;
    dims.tile_capacity = 1;
    dims.head_dim = PLAIN_DIM;
    *copy = *p;
    list[1] = 1;
    params.num_seqs = last.num_seqs = 1;
    params.q = copy->q;
    params.k_pool = copy->k;
    params.v_pool = copy->v;
    params.num_pool_blocks = 4;
    params.tile_blocks = list;
    params.tile_block_counts = list + 1;
    params.scale = 1;
    last.output = copy->output;
    last.lse = &copy->lse;
    struct attn_tiled *tiled = make_state(&dims, NULL);
    begin(tiled, 1);
    for (int32_t key = 0; key < keys; key++) {
        *list = key;
        fold(tiled, &params);
    }
    finalize(tiled, &last);
    attn_tiled_destroy(&tiled);
    *p = *copy;
    release(copy);
    release(list);
}

static double first_of(const struct plain *const p)
{
    return attn_load(p->output, 0, ATTN_DTYPE_BF16);
}

// Q = K = 0: the mean of V, which shows every key.
Test(tiled, has_exact_means)
{
    for (int32_t keys = 1; keys <= 4; keys *= 2) {
        struct plain p = { .slots = 0 };
        double mean = 0;
        for (int32_t key = 0; key < 4; key++) {
            set_first(p.v + key * PLAIN_DIM, ldexp(1, key));
            if (key < keys) mean += ldexp(1, key) / keys;
        }
        run_plain(&p, keys);
        cr_expect_eq(first_of(&p), mean);
        cr_expect_float_eq(p.lse, logf((float) keys), 1e-6f);
    }
}

// No floor under m: scores far below -1e5 weigh what they should.
Test(tiled, takes_scores_of_any_size)
{
    static const double sizes[] = { -1e5, -1e9, -1e30, 1e5, 1e9, 1e30 };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct plain p = { .slots = 0 };
        set_first(p.q, 1);
        for (int32_t key = 0; key < 2; key++) set_first(p.k + key * PLAIN_DIM, sizes[i]);
        set_first(p.v, 1);
        set_first(p.v + PLAIN_DIM, 3);
        run_plain(&p, 2);
        const double exact = attn_load(p.k, 0, ATTN_DTYPE_BF16) + log(2);
        cr_expect_eq(first_of(&p), 2, "%g: %g", sizes[i], first_of(&p));
        cr_expect_float_eq((double) p.lse, exact, 0x1p-23 * fabs(exact));
    }
}

// -inf weighs nothing, first or last; where all do, o = 0 and lse = -inf.
Test(tiled, gives_scores_of_minus_infinity_no_weight)
{
    for (int32_t key = 0; key < 3; key++) {
        struct plain p = { .slots = 0 };
        set_first(p.q, 1);
        for (int32_t other = 0; other < 3; other++) {
            set_first(p.k + other * PLAIN_DIM, other == key ? 0 : -INFINITY);
            set_first(p.v + other * PLAIN_DIM, other == key ? 5 : 100);
        }
        run_plain(&p, 3);
        cr_expect_eq(first_of(&p), 5);
        cr_expect_eq(p.lse, 0);
        set_first(p.k + key * PLAIN_DIM, -INFINITY);
        run_plain(&p, 3);
        cr_expect_eq(first_of(&p), 0);
        cr_expect_eq(p.lse, -INFINITY);
    }
}

Test(tiled, hands_on_nan_and_infinity_that_it_sees)
{
    static const double values[] = { NAN, INFINITY };
    for (size_t i = 0; i < 2; i++)
        for (int32_t key = 0; key < 3; key++) {
            struct plain p = { .slots = 0 };
            set_first(p.v + key * PLAIN_DIM, values[i]);
            run_plain(&p, 3);
            cr_expect(i == 0 ? isnan(first_of(&p)) : first_of(&p) == INFINITY);
            cr_expect(isfinite(p.lse));
            struct plain scored = { .slots = 0 };
            set_first(scored.q, 1);
            set_first(scored.k + key * PLAIN_DIM, values[i]);
            run_plain(&scored, 3);
            cr_expect(isnan(first_of(&scored)) && isnan(scored.lse));
        }
    struct plain q = { .slots = 0 };
    set_first(q.q, NAN);
    run_plain(&q, 1);
    cr_expect(isnan(first_of(&q)) && isnan(q.lse));
}

// A key of NaN that only one of two sequences has doesn't reach the other.
Test(tiled, keeps_nan_within_its_sequence)
{
    static const int32_t counts[] = { 2, 2, 2 }, valid[] = { 16, 16, 9 };
    struct shape shape = shapes[0];
    shape.num_seqs = 3;
    shape.counts = counts;
    shape.valid = valid;
    struct step step = build(&shape);
    struct outcome clean = run(&step, 2, NULL);
    const int64_t at = place(&step, *list_at(&step, 1, 0), 3, 0);
    const size_t row = (size_t) shape.q_heads * (size_t) shape.head_dim;
    step.v[at] = NAN_BITS;
    struct outcome with = run(&step, 2, NULL);
    cr_expect(isnan(attn_load(with.output, (int64_t) row, shape.dtype)));
    cr_expect_eq(memcmp(with.output, clean.output, row * 2), 0);
    cr_expect_eq(memcmp(with.output + 2 * row, clean.output + 2 * row, row * 2), 0);
    free_outcome(&clean);
    free_outcome(&with);
    free_step(&step);
}

// ---- lists that can't be followed

Test(tiled, counts_blocks_outside_the_pool_as_absent)
{
    static const int32_t wild[] = { -1, INT32_MIN, INT32_MAX };
    static const int32_t without[] = { 7, 0, 1, 15, 3 };
    for (size_t i = 0; i < sizeof(wild) / sizeof(wild[0]) + 1; i++) {
        const struct shape shape = ragged(&shapes[0]);
        struct step step = build(&shape);
        const int32_t block = i < sizeof(wild) / sizeof(wild[0]) ? wild[i] : step.num_blocks;
        *list_at(&step, 3, 4) = block;
        struct outcome found = run(&step, 5, NULL);
        cr_expect_eq(*found.fault, 3, "block %d", block);
        memmove(list_at(&step, 3, 4), list_at(&step, 3, 5), 11 * sizeof(int32_t));
        step.shape.counts = without;
        struct outcome expected = run(&step, 16, NULL);
        cr_expect_eq(*expected.fault, NO_FAULT);
        cr_expect(is_same(&found, &expected), "block %d", block);
        free_outcome(&found);
        free_outcome(&expected);
        free_step(&step);
    }
}

Test(tiled, clamps_counts)
{
    static const int32_t wild[] = { 17, -1, 1, 16, INT32_MIN }, clamped[] = { 16, 0, 1, 16, 0 };
    static const int32_t valid[] = { 16, 16, 16, 16, 16 };
    struct shape shape = shapes[0];
    shape.num_seqs = RAGGED_SEQS;
    shape.counts = clamped;
    shape.valid = valid;
    struct step step = build(&shape);
    struct outcome expected = run_scalar(&step, 16);
    cr_expect_eq(*expected.fault, NO_FAULT);
    step.shape.counts = wild;
    struct outcome found = run_scalar(&step, 16);
    cr_expect_eq(*found.fault, 0);
    cr_expect(is_same(&found, &expected));
    free_outcome(&found);
    free_outcome(&expected);
    free_step(&step);
}

// Only ever lowered.
Test(tiled, lowers_the_fault_word)
{
    static const int32_t given[] = { NO_FAULT, 4, 2, 1, 0, -5 };
    const struct shape shape = ragged(&shapes[0]);
    struct step step = build(&shape);
    const struct attn_tiled_dims dims = dims_of(&shape, step.longest);
    struct attn_tiled *tiled = make_state(&dims, NULL);
    struct attn_tiled_step_params params = params_of(&step);
    *list_at(&step, 2, 0) = *list_at(&step, 4, 0) = -1;
    params.tile_blocks = step.list;
    int32_t *const counts = copy_counts(shape.counts, shape.num_seqs);
    params.tile_block_counts = counts;
    // None of them counts: reported nevertheless.
    params.last_block_valid_slots = 0;
    int32_t *const fault = need(sizeof(*fault));
    params.fault = fault;
    for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++) {
        *fault = given[i];
        begin(tiled, shape.num_seqs);
        fold(tiled, &params);
        cr_expect_eq(*fault, given[i] < 2 ? given[i] : 2);
    }
    attn_tiled_destroy(&tiled);
    release(fault);
    release(counts);
    free_step(&step);
}

// A list may have the same block twice: its keys count twice.
Test(tiled, folds_a_block_as_often_as_it_is_listed)
{
    static const int32_t once[] = { 1 }, twice[] = { 2 }, valid[] = { 16 };
    struct shape shape = shapes[0];
    shape.num_seqs = 1;
    shape.counts = twice;
    shape.valid = valid;
    struct step step = build(&shape);
    *list_at(&step, 0, 1) = *list_at(&step, 0, 0);
    struct outcome two = run(&step, 2, NULL);
    expect_exact(&step, &two);
    step.shape.counts = once;
    struct outcome one = run(&step, 2, NULL);
    for (size_t i = 0; i < one.rows; i++)
        cr_expect_float_eq(two.lse[i], one.lse[i] + logf(2), 1e-5f);
    free_outcome(&one);
    free_outcome(&two);
    free_step(&step);
}

#endif

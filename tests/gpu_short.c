/* SPDX-License-Identifier: Apache-2.0 */
// The short form of prefill on a GPU: all that holds for every device, in managed memory; then
// many keys, few blocks, graphs, a workspace for several calls.
#include "tests/support/suite_gpu.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static const enum attn_check_bound bound = ATTN_CHECK_KERNEL;

static const struct {
    enum attn_dtype dtype;
    int32_t head_dim;
} kinds[] = {
    { ATTN_DTYPE_BF16, 64 },  { ATTN_DTYPE_BF16, 128 }, { ATTN_DTYPE_BF16, 256 },
    { ATTN_DTYPE_BF16, 512 }, { ATTN_DTYPE_FP16, 64 },  { ATTN_DTYPE_FP16, 128 },
    { ATTN_DTYPE_FP16, 256 }, { ATTN_DTYPE_FP16, 512 },
};

enum {
    NUM_KINDS = sizeof(kinds) / sizeof(kinds[0])
};

#include "tests/support/short_suite.h"

static void set_up(void)
{
    open_session(0);
}

static void tear_down(void)
{
    gpu_session_close(&session);
}

TestSuite(short_form, .init = set_up, .fini = tear_down, .timeout = 600);

// Chunks behind many keys, in heads as models have them.
static const struct prefill_sequence far[] = {
    { 1, 16, 9000, 8984 },  { 2, MOST, 20011, 20011 - MOST }, { 3, 1, 33000, 32999 },
    { 4, 100, 4321, 4221 }, { 5, 700, 3000, 2300 },
};

static struct prefill_case far_case(const size_t kind, const int32_t page_size)
{
    struct prefill_case c = vary(kind, 5, "far");
    c.sequences = far;
    c.batch = COUNT(far);
    c.num_q_heads = c.head_dim == 256 ? 12 : 8;
    c.num_kv_heads = 2;
    c.page_size = page_size;
    c.window = 0;
    c.fill = PREFILL_FILL_UNIFORM;
    return c;
}

Test(short_form, spreads_many_keys)
{
    for (size_t k = 0; k < NUM_KINDS; k++) {
        const struct prefill_case c = far_case(k, k % 2 ? 16 : 3);
        struct prefill_data *data = run(&c, true);
        expect_right(data);
        for (int32_t b = 0; b < c.batch; b++)
            if (is_chain(&far[b])) expect_bits_of_decode(data, b);
        prefill_data_free(&data);
    }
}

// On any number of SMs.
Test(short_form, has_the_same_bits_on_few_blocks)
{
    static const int32_t limits[] = { 1, 7, 50 };
    for (size_t k = 0; k < NUM_KINDS; k += 3) {
        const struct prefill_case c = far_case(k, 16);
        struct prefill_data *all = run(&c, true);
        for (size_t i = 0; i < COUNT(limits); i++) {
            tear_down();
            open_session(limits[i]);
            struct prefill_data *few = run(&c, true);
            cr_expect_eq(prefill_count_all_differences(all, few), 0, "head_dim %d, %d blocks",
                         c.head_dim, limits[i]);
            prefill_data_free(&few);
        }
        tear_down();
        set_up();
        prefill_data_free(&all);
    }
}

// Captured while all lists are 0, then replayed for other lengths of the same sizes.
Test(short_form, replays_a_graph_at_other_lengths)
{
    for (size_t k = 0; k < NUM_KINDS; k++) {
        const struct prefill_case c = vary(k, 5, "graph");
        struct prefill_data *eager = run(&c, true), *data = build(&c);
        uint8_t *const memory = need(data->bytes);
        struct attn_prefill_params params = prefill_data_params(data, memory);
        struct scratch s = need_scratch(&params);
        struct gpu_graph *graph;
        params.workspace = s.workspace;
        params.workspace_bytes = s.bytes;
        params.counters = s.counters;
        memcpy(memory, data->image, data->bytes);
        const struct canary_zone *const lists = &data->zones[PREFILL_ZONE_CU_SEQLENS];
        memset(memory + lists->offset, 0, lists->bytes);
        cr_assert_eq(gpu_graph_begin(session.gpu, stream), 0);
        cr_assert_eq(attn_prefill(device, &params, stream), ATTN_OK, "%s", attn_last_error());
        cr_assert_eq(gpu_graph_end(session.gpu, stream, &graph), 0);
        // Without tokens nothing is written.
        cr_assert_eq(gpu_graph_launch(session.gpu, graph, stream), 0);
        finish();
        for (size_t z = PREFILL_ZONE_O; z < NUM_PREFILL_ZONES; z++)
            cr_expect_eq(memcmp(data->image + data->zones[z].offset, memory + data->zones[z].offset,
                                data->zones[z].bytes),
                         0, "zone %zu", z);
        for (int n = 0; n < 2; n++) {
            memcpy(memory, data->image, data->bytes);
            cr_assert_eq(gpu_graph_launch(session.gpu, graph, stream), 0);
            finish();
            memcpy(data->result, memory, data->bytes);
            cr_expect(prefill_data_intact(data));
            cr_expect_eq(prefill_count_all_differences(eager, data), 0, "head_dim %d", c.head_dim);
        }
        gpu_graph_destroy(session.gpu, &graph);
        release_scratch(&s);
        release(memory);
        prefill_data_free(&data);
        prefill_data_free(&eager);
    }
}

// Calls right after each other, of two shapes, on one workspace and one set of counters.
Test(short_form, shares_a_workspace_between_calls)
{
    const struct prefill_case cases[] = { far_case(1, 16), vary(1, 5, "near") };
    struct prefill_data *once[2], *data[2];
    uint8_t *memory[2];
    struct attn_prefill_params params[2];
    for (int i = 0; i < 2; i++) {
        once[i] = run(&cases[i], true);
        data[i] = build(&cases[i]);
        memory[i] = need(data[i]->bytes);
        memcpy(memory[i], data[i]->image, data[i]->bytes);
        params[i] = prefill_data_params(data[i], memory[i]);
    }
    struct scratch first = need_scratch(&params[0]), second = need_scratch(&params[1]);
    const bool is_second = second.bytes > first.bytes;
    for (int i = 0; i < 2; i++) {
        params[i].workspace = is_second ? second.workspace : first.workspace;
        params[i].workspace_bytes = is_second ? second.bytes : first.bytes;
        params[i].counters =
            second.num_counters > first.num_counters ? second.counters : first.counters;
    }
    for (int n = 0; n < 60; n++)
        cr_assert_eq(attn_prefill(device, &params[n % 2], stream), ATTN_OK, "%s",
                     attn_last_error());
    finish();
    release_scratch(&first);
    release_scratch(&second);
    for (int i = 0; i < 2; i++) {
        memcpy(data[i]->result, memory[i], data[i]->bytes);
        cr_expect_eq(prefill_count_all_differences(once[i], data[i]), 0, "%s", cases[i].name);
        release(memory[i]);
        prefill_data_free(&once[i]);
        prefill_data_free(&data[i]);
    }
}

int main(int argc, char **argv)
{
    return gpu_main(argc, argv);
}

/* SPDX-License-Identifier: Apache-2.0 */
// Faults of the host executor, for builds with -Dmutation=N; mutations.py says what each is and
// which test has to notice it. src/host/reference.c includes this after its structs.

enum {
    // 1 .. NUM_EDGE_MUTATIONS - 1 put the edges of blocks where they may not depend on.
    NUM_EDGE_MUTATIONS = 7
};

// What edges follow, by number.
static int64_t mutation_edge(const struct view *view, int number)
{
    const struct attn_decode_params *const p = view->params;
    int64_t longest = 0;
    for (int32_t b = 0; b < p->batch; b++)
        if (p->seq_lens[b] > longest) longest = p->seq_lens[b];
    const int64_t follows[NUM_EDGE_MUTATIONS] = {
        [1] = p->batch,
        [2] = longest,
        [3] = p->page_size,
        [4] = p->max_pages_per_seq,
        [5] = view->k_table[view->start / p->page_size],
        [6] = p->v_token_stride / p->head_dim,
    };
    return 16 + follows[number] % 7 * 16;
}

// Called between blocks: the edge of the next one. As kernels do, and unlike the host executor, it
// keeps sums in FP32: else edges hardly show in results of 16 bits.
static int64_t mutate_edge(const struct view *view, struct sum *sum, int64_t first, int64_t edge)
{
    if (ATTN_MUTATION >= NUM_EDGE_MUTATIONS) return edge;
    sum->l = (float) sum->l;
    for (int32_t d = 0; d < view->params->head_dim; d++) sum->o[d] = (float) sum->o[d];
    const int64_t size = mutation_edge(view, ATTN_MUTATION);
    return (first / size + 1) * size;
}

static void mutate_tokens(struct view *view, int32_t token)
{
    const struct attn_decode_params *const p = view->params;
    const bool per_token = p->q_len > 1 && p->window_form == ATTN_WINDOW_PER_TOKEN;
    if (ATTN_MUTATION == 12 && per_token && view->start > 0) view->start++;
    if (ATTN_MUTATION == 13 && view->mask) {
        view->mask = NULL;
        if (view->end > view->past + token + 1) view->end = view->past + token + 1;
    }
    // The row of the mask that has the token's own bit, besides those of the others.
    static int32_t row[ATTN_DECODE_MAX_Q_LEN / 32];
    if (ATTN_MUTATION == 14 && view->mask) {
        memcpy(row, view->mask, (size_t) (p->q_len + 31) / 32 * sizeof(*row));
        row[token / 32] |= (int32_t) (1u << token % 32);
        view->mask = row;
    }
}

static void mutate_view(struct view *view, int32_t sequence, int32_t token, int32_t head)
{
    static int32_t first_window = -1;
    const struct attn_decode_params *const p = view->params;
    const int64_t tail = view->end % p->page_size;
    if (ATTN_MUTATION == 7 && !p->lse && view->end > 1) view->end--;
    // Slots of the last page past the length, and of the first one before the window.
    if (ATTN_MUTATION == 8 && tail > 0) view->end += p->page_size - tail;
    if (ATTN_MUTATION == 9) view->start -= view->start % p->page_size;
    // A NaN of the sequence before.
    if (ATTN_MUTATION == 10 && sequence > 0)
        view->q[0] +=
            0 * attn_load(p->q, (sequence - 1) * p->q_stride + (int64_t) head * p->head_dim,
                          p->q_dtype);
    // The window of the first call.
    if (first_window < 0) first_window = p->window;
    const bool cut = first_window > 0 && view->end > first_window;
    if (ATTN_MUTATION == 11) view->start = cut ? view->end - first_window : 0;
    mutate_tokens(view, token);
}

// Called for each block of skip-softmax: whether a run begins with it.
static bool mutate_run(bool begins)
{
    return begins && ATTN_MUTATION != 15;
}

/* SPDX-License-Identifier: Apache-2.0 */
// The options that describe a call of prefill, for the commands that make one up.
#ifndef ATTN_CLI_PREFILL_SHAPE_H
#define ATTN_CLI_PREFILL_SHAPE_H

#include "cli/cli.h"

struct prefill_shape {
    enum attn_dtype dtype;
    // q_len 0: as many query tokens as keys.
    int32_t batch, q_len, num_q_heads, num_kv_heads, head_dim;
    // Keys are drawn from min_len .. max_len, for each sequence.
    int32_t min_len, max_len;
    int32_t page_size, window;
    bool contiguous, not_causal;
};

// Values of getopt's `val`; a command's own start after the last.
enum {
    PREFILL_BATCH = 256,
    PREFILL_Q_LEN,
    PREFILL_HEADS,
    PREFILL_DIM,
    PREFILL_LEN,
    PREFILL_PAGE,
    PREFILL_CONTIGUOUS,
    PREFILL_NOT_CAUSAL,
    PREFILL_WINDOW,
    PREFILL_DTYPE,
    PREFILL_OPTION_END,
};

// For the array of struct option.
#define PREFILL_OPTIONS \
    { "batch", required_argument, NULL, PREFILL_BATCH }, \
        { "q-len", required_argument, NULL, PREFILL_Q_LEN }, \
        { "heads", required_argument, NULL, PREFILL_HEADS }, \
        { "dim", required_argument, NULL, PREFILL_DIM }, \
        { "len", required_argument, NULL, PREFILL_LEN }, \
        { "page", required_argument, NULL, PREFILL_PAGE }, \
        { "contiguous", no_argument, NULL, PREFILL_CONTIGUOUS }, \
        { "not-causal", no_argument, NULL, PREFILL_NOT_CAUSAL }, \
        { "window", required_argument, NULL, PREFILL_WINDOW }, \
    { \
        "dtype", required_argument, NULL, PREFILL_DTYPE \
    }

#define PREFILL_HELP \
    "  --batch N        sequences (1)\n" \
    "  --q-len N        query tokens a sequence, the last of its keys; 0: as many as keys (0)\n" \
    "  --heads Q/KV     query heads and KV heads (32/8)\n" \
    "  --dim N          head_dim (128)\n" \
    "  --len N or A:B   keys a sequence, or lengths from A to B (1024)\n" \
    "  --page N         tokens of a page (16)\n" \
    "  --contiguous     K and V without pages\n" \
    "  --not-causal     query tokens see keys behind their own position, too\n" \
    "  --window N       keys back that a query token sees, 0: all (0)\n" \
    "  --dtype T        bf16 or fp16 (bf16)\n"

void prefill_shape_init(struct prefill_shape *shape);
// Takes option `option` with its argument. CLI_FINE, or CLI_USAGE after a sentence.
int prefill_shape_read(struct prefill_shape *shape, const char *command, int option,
                       const char *argument);
// What only all of them together can tell.
int prefill_shape_finish(const struct prefill_shape *shape, const char *command);

// Query tokens of a sequence of `len` keys.
int32_t prefill_shape_tokens(const struct prefill_shape *shape, int32_t len);

#endif

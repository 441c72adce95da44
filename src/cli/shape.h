/* SPDX-License-Identifier: Apache-2.0 */
// The options that describe a call of decode or ctm, for the commands that make one up.
#ifndef ATTN_CLI_SHAPE_H
#define ATTN_CLI_SHAPE_H

#include "cli/case.h"
#include "cli/cli.h"

struct shape_options {
    enum case_op op;
    enum attn_dtype q_dtype, kv_dtype;
    int32_t batch, q_len, num_q_heads, num_kv_heads, head_dim;
    int32_t page_size, window;
    // Lengths are drawn from min_len .. max_len.
    int32_t min_len, max_len;
};

// Values of getopt's `val`; a command's own start after the last.
enum {
    SHAPE_BATCH = 256,
    SHAPE_Q_LEN,
    SHAPE_HEADS,
    SHAPE_DIM,
    SHAPE_LEN,
    SHAPE_PAGE,
    SHAPE_WINDOW,
    SHAPE_DTYPE,
    SHAPE_KV_DTYPE,
    SHAPE_OPTION_END,
};

// For the array of struct option.
#define SHAPE_OPTIONS \
    { "batch", required_argument, NULL, SHAPE_BATCH }, \
        { "q-len", required_argument, NULL, SHAPE_Q_LEN }, \
        { "heads", required_argument, NULL, SHAPE_HEADS }, \
        { "dim", required_argument, NULL, SHAPE_DIM }, \
        { "len", required_argument, NULL, SHAPE_LEN }, \
        { "page", required_argument, NULL, SHAPE_PAGE }, \
        { "window", required_argument, NULL, SHAPE_WINDOW }, \
        { "dtype", required_argument, NULL, SHAPE_DTYPE }, \
    { \
        "kv-dtype", required_argument, NULL, SHAPE_KV_DTYPE \
    }

#define SHAPE_HELP \
    "  --batch N        sequences (1)\n" \
    "  --q-len N        query tokens a sequence, up to 128 (1)\n" \
    "  --heads Q/KV     query heads and KV heads (32/8)\n" \
    "  --dim N          head_dim (128)\n" \
    "  --len N or A:B   keys a sequence, or lengths from A to B (1024)\n" \
    "  --page N         tokens of a page (16; ctm: 128)\n" \
    "  --window N       keys attended, 0: all (0)\n" \
    "  --dtype T        bf16 or fp16: q, o, and K and V unless --kv-dtype says otherwise (bf16;\n" \
    "                   ctm: fp16)\n" \
    "  --kv-dtype T     bf16, fp16 or e4m3\n"

void shape_init(struct shape_options *shape);
// Takes option `option` with its argument. CLI_FINE, or CLI_USAGE after a sentence.
int shape_read(struct shape_options *shape, const char *command, int option, const char *argument);
// The operation's name, and what only all of them together can tell. CLI_FINE, or CLI_USAGE after a
// sentence.
int shape_finish(struct shape_options *shape, const char *command, int argc, char *const *argv);

// A whole number, "--name" of `command`. CLI_FINE, or CLI_USAGE after a sentence.
int shape_read_number(const char *command, const char *name, const char *text, int32_t min,
                      int32_t max, int32_t *value);
// Whether the first argument after the command's name is "prefill", which has options of its own.
bool shape_is_prefill(int argc, char *const *argv);

// What calls of tiled and swap have no place for, as an option's name; NULL: nothing.
const char *shape_find_not_listed(const struct shape_options *shape);

// Names as in --dtype.
bool shape_read_dtype(const char *text, enum attn_dtype *dtype);

// Table columns that `len` keys need.
int32_t shape_pages(int32_t len, int32_t page_size);
// Keys a sequence of `len` keys attends.
int32_t shape_attended(int32_t len, int32_t window);

// The shape as the library wants it, for lengths up to max_len.
struct attn_decode_shape shape_library(const struct shape_options *shape);

#endif

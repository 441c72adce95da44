/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/shape.h"

#include <string.h>

void shape_init(struct shape_options *const shape)
{
    *shape = (struct shape_options){
        // Not given: what follows from others.
        .q_dtype = ATTN_DTYPE_NONE,
        .kv_dtype = ATTN_DTYPE_NONE,
        .page_size = 0,
        .batch = 1,
        .q_len = 1,
        .num_q_heads = 32,
        .num_kv_heads = 8,
        .head_dim = 128,
        .min_len = 1024,
        .max_len = 1024,
    };
}

bool shape_read_dtype(const char *const text, enum attn_dtype *const dtype)
{
    for (int i = ATTN_DTYPE_BF16; i <= ATTN_DTYPE_E4M3; i++) {
        if (strcmp(text, attn_dtype_name((enum attn_dtype) i))) continue;
        *dtype = (enum attn_dtype) i;
        return true;
    }
    return false;
}

// "A<separator>B"; one number alone sets both.
static bool read_pair(const char *const text, const char separator, const int64_t min,
                      int32_t *const a, int32_t *const b)
{
    char first[16];
    int64_t left, right;
    const char *const cut = strchr(text, separator);
    const size_t length = cut ? (size_t) (cut - text) : strlen(text);
    if (length >= sizeof(first)) return false;
    memcpy(first, text, length);
    first[length] = 0;
    if (!cli_read_int(first, min, INT32_MAX, &left)) return false;
    if (!cli_read_int(cut ? cut + 1 : first, min, INT32_MAX, &right)) return false;
    *a = (int32_t) left;
    *b = (int32_t) right;
    return true;
}

int shape_read_number(const char *const command, const char *const name, const char *const text,
                      const int32_t min, const int32_t max, int32_t *const value)
{
    int64_t number;
    if (!cli_read_int(text, min, max, &number))
        return cli_usage(command, "--%s is '%s'; a whole number from %d to %d is needed", name,
                         text, min, max);
    *value = (int32_t) number;
    return CLI_FINE;
}

bool shape_is_prefill(const int argc, char *const *const argv)
{
    return argc > 1 && !strcmp(argv[1], "prefill");
}

int shape_read(struct shape_options *const shape, const char *const command, const int option,
               const char *const argument)
{
    const int32_t any = INT32_MAX, tokens = ATTN_DECODE_MAX_Q_LEN;
    switch (option) {
    case SHAPE_BATCH: return shape_read_number(command, "batch", argument, 0, any, &shape->batch);
    case SHAPE_Q_LEN:
        return shape_read_number(command, "q-len", argument, 1, tokens, &shape->q_len);
    case SHAPE_DIM: return shape_read_number(command, "dim", argument, 1, any, &shape->head_dim);
    case SHAPE_PAGE: return shape_read_number(command, "page", argument, 1, any, &shape->page_size);
    case SHAPE_WINDOW:
        return shape_read_number(command, "window", argument, 0, any, &shape->window);
    case SHAPE_HEADS:
        if (strchr(argument, '/') &&
            read_pair(argument, '/', 1, &shape->num_q_heads, &shape->num_kv_heads))
            return CLI_FINE;
        return cli_usage(command, "--heads is '%s'; query heads / KV heads are needed, as in 32/8",
                         argument);
    case SHAPE_LEN:
        if (read_pair(argument, ':', 0, &shape->min_len, &shape->max_len) &&
            shape->min_len <= shape->max_len)
            return CLI_FINE;
        return cli_usage(command, "--len is '%s'; a length, or a range as in 1:4096, is needed",
                         argument);
    case SHAPE_DTYPE:
        if (shape_read_dtype(argument, &shape->q_dtype) && shape->q_dtype != ATTN_DTYPE_E4M3)
            return CLI_FINE;
        return cli_usage(command, "--dtype is '%s'; it is bf16 or fp16", argument);
    case SHAPE_KV_DTYPE:
        if (shape_read_dtype(argument, &shape->kv_dtype)) return CLI_FINE;
        return cli_usage(command, "--kv-dtype is '%s'; it is bf16, fp16 or e4m3", argument);
    default: return CLI_USAGE;
    }
}

// FP16 q and pages of 128 tokens are what there is.
static int finish_ctm(struct shape_options *const shape, const char *const command)
{
    if (!shape->q_dtype) shape->q_dtype = ATTN_DTYPE_FP16;
    if (!shape->page_size) shape->page_size = ATTN_CTM_PAGE_SIZE;
    if (shape->q_dtype != ATTN_DTYPE_FP16)
        return cli_usage(command, "--dtype is %s; ctm takes fp16", attn_dtype_name(shape->q_dtype));
    if (shape->page_size != ATTN_CTM_PAGE_SIZE)
        return cli_usage(command, "--page is %d; pages of ctm have %d tokens", shape->page_size,
                         ATTN_CTM_PAGE_SIZE);
    return CLI_FINE;
}

int shape_finish(struct shape_options *const shape, const char *const command, const int argc,
                 char *const *const argv)
{
    if (argc == 1 && !strcmp(argv[0], "ctm"))
        shape->op = CASE_CTM;
    else if (argc == 1 && !strcmp(argv[0], "tiled"))
        shape->op = CASE_TILED;
    else if (argc == 1 && !strcmp(argv[0], "swap"))
        shape->op = CASE_SWAP;
    else if (argc == 1 && !strcmp(argv[0], "prefill"))
        return cli_usage(command, "prefill has options of its own: it comes before them");
    else if (argc != 1 || strcmp(argv[0], "decode"))
        return cli_usage(command, "one operation is needed: decode, ctm, tiled, swap or prefill");
    if (shape->op == CASE_CTM && finish_ctm(shape, command)) return CLI_USAGE;
    if (!shape->q_dtype) shape->q_dtype = ATTN_DTYPE_BF16;
    if (!shape->page_size) shape->page_size = 16;
    if (!shape->kv_dtype) shape->kv_dtype = shape->q_dtype;
    if (shape->kv_dtype != shape->q_dtype && shape->kv_dtype != ATTN_DTYPE_E4M3)
        return cli_usage(command, "--kv-dtype is %s with --dtype %s; it is the same, or e4m3",
                         attn_dtype_name(shape->kv_dtype), attn_dtype_name(shape->q_dtype));
    if (shape->num_q_heads % shape->num_kv_heads)
        return cli_usage(command, "--heads is %d/%d; query heads are a multiple of KV heads",
                         shape->num_q_heads, shape->num_kv_heads);
    return CLI_FINE;
}

const char *shape_find_not_listed(const struct shape_options *const shape)
{
    return shape->window                       ? "window"
           : shape->q_len > 1                  ? "q-len"
           : shape->kv_dtype != shape->q_dtype ? "kv-dtype"
                                               : NULL;
}

int32_t shape_pages(const int32_t len, const int32_t page_size)
{
    return len / page_size + (len % page_size != 0);
}

int32_t shape_attended(const int32_t len, const int32_t window)
{
    return window && window < len ? window : len;
}

struct attn_decode_shape shape_library(const struct shape_options *const shape)
{
    return (struct attn_decode_shape){
        .size = sizeof(struct attn_decode_shape),
        .q_dtype = shape->q_dtype,
        .kv_dtype = shape->kv_dtype,
        .batch = shape->batch,
        .q_len = shape->q_len,
        .num_q_heads = shape->num_q_heads,
        .num_kv_heads = shape->num_kv_heads,
        .head_dim = shape->head_dim,
        .page_size = shape->page_size,
        .max_pages_per_seq = shape_pages(shape->max_len, shape->page_size),
        .window = shape->window,
        .max_decode_seqs = shape->batch,
    };
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/prefill_shape.h"

#include "cli/shape.h"

#include <string.h>

void prefill_shape_init(struct prefill_shape *const shape)
{
    *shape = (struct prefill_shape){
        .dtype = ATTN_DTYPE_BF16,
        .batch = 1,
        .num_q_heads = 32,
        .num_kv_heads = 8,
        .head_dim = 128,
        .min_len = 1024,
        .max_len = 1024,
        .page_size = 16,
    };
}

int prefill_shape_read(struct prefill_shape *const shape, const char *const command,
                       const int option, const char *const argument)
{
    struct shape_options common;
    int result;
    switch (option) {
    case PREFILL_CONTIGUOUS: shape->contiguous = true; return CLI_FINE;
    case PREFILL_NOT_CAUSAL: shape->not_causal = true; return CLI_FINE;
    case PREFILL_BATCH:
        return shape_read_number(command, "batch", argument, 0, INT32_MAX, &shape->batch);
    case PREFILL_Q_LEN:
        return shape_read_number(command, "q-len", argument, 0, INT32_MAX, &shape->q_len);
    case PREFILL_DIM:
        return shape_read_number(command, "dim", argument, 1, INT32_MAX, &shape->head_dim);
    case PREFILL_PAGE:
        return shape_read_number(command, "page", argument, 1, INT32_MAX, &shape->page_size);
    case PREFILL_WINDOW:
        return shape_read_number(command, "window", argument, 0, INT32_MAX, &shape->window);
    case PREFILL_HEADS:
        result = shape_read(&common, command, SHAPE_HEADS, argument);
        if (result) return result;
        shape->num_q_heads = common.num_q_heads;
        shape->num_kv_heads = common.num_kv_heads;
        return CLI_FINE;
    case PREFILL_LEN:
        result = shape_read(&common, command, SHAPE_LEN, argument);
        if (result) return result;
        shape->min_len = common.min_len;
        shape->max_len = common.max_len;
        return CLI_FINE;
    case PREFILL_DTYPE:
        result = shape_read(&common, command, SHAPE_DTYPE, argument);
        if (result) return result;
        shape->dtype = common.q_dtype;
        return CLI_FINE;
    default: return cli_usage(command, "that option is not known, or lacks its value");
    }
}

int prefill_shape_finish(const struct prefill_shape *const shape, const char *const command)
{
    if (shape->num_q_heads % shape->num_kv_heads)
        return cli_usage(command, "--heads is %d/%d; query heads are a multiple of KV heads",
                         shape->num_q_heads, shape->num_kv_heads);
    if (shape->contiguous && shape->min_len != shape->max_len)
        return cli_usage(command,
                         "--contiguous is given, and --len is %d:%d; contiguous sequences "
                         "have one length",
                         shape->min_len, shape->max_len);
    return CLI_FINE;
}

int32_t prefill_shape_tokens(const struct prefill_shape *const shape, const int32_t len)
{
    return shape->q_len > 0 && shape->q_len < len ? shape->q_len : len;
}

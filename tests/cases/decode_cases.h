/* SPDX-License-Identifier: Apache-2.0 */
// The shapes of decode: models that people serve. `attn bench` times them as they stand; the tests
// take their heads, head_dim, pages and windows, at lengths that a double-precision oracle can
// follow.
#ifndef ATTN_TESTS_DECODE_CASES_H
#define ATTN_TESTS_DECODE_CASES_H

#include "attn/common.h"

struct decode_shape {
    const char *name;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, page_size;
    // Keys of every sequence; keys attended, 0 for all.
    int32_t len, window;
    enum attn_dtype q_dtype, kv_dtype;
};

// q_dtype, kv_dtype.
#define BF16 ATTN_DTYPE_BF16, ATTN_DTYPE_BF16
#define FP16 ATTN_DTYPE_FP16, ATTN_DTYPE_FP16
#define BF16_E4M3 ATTN_DTYPE_BF16, ATTN_DTYPE_E4M3

static const struct decode_shape decode_shapes[] = {
    { "24q4 d256, one, 1k", 1, 24, 4, 256, 16, 1024, 0, BF16 },
    { "24q4 d256, one, 8k", 1, 24, 4, 256, 16, 8192, 0, BF16 },
    { "24q4 d256, one, 128k", 1, 24, 4, 256, 16, 131072, 0, BF16 },
    { "24q4 d256, 16 x 1335", 16, 24, 4, 256, 16, 1335, 0, BF16 },
    { "24q4 d256, 64 x 8k", 64, 24, 4, 256, 16, 8192, 0, BF16 },
    { "16q2 d256, 16 x 4k", 16, 16, 2, 256, 16, 4096, 0, BF16 },
    { "8q1 d256, 32 x 4k", 32, 8, 1, 256, 16, 4096, 0, BF16 },
    { "32q8 d128, one, 1k", 1, 32, 8, 128, 16, 1024, 0, BF16 },
    { "32q8 d128, one, 8k", 1, 32, 8, 128, 16, 8192, 0, BF16 },
    { "32q8 d128, one, 128k", 1, 32, 8, 128, 16, 131072, 0, BF16 },
    { "32q8 d128, 16 x 8k", 16, 32, 8, 128, 16, 8192, 0, BF16 },
    { "32q8 d128, 64 x 8k", 64, 32, 8, 128, 16, 8192, 0, BF16 },
    { "32q8 d128, 128 x 2k", 128, 32, 8, 128, 16, 2048, 0, BF16 },
    { "32q8 d128, 64 x 8k, window 4k", 64, 32, 8, 128, 16, 8192, 4096, BF16 },
    { "64q4 d128 page 32, 64 x 16k", 64, 64, 4, 128, 32, 16384, 0, BF16 },
    { "64q4 d128 page 32, 64 x 64k", 64, 64, 4, 128, 32, 65536, 0, BF16 },
    { "64q8 d128, 32 x 4k", 32, 64, 8, 128, 16, 4096, 0, BF16 },
    { "28q4 d128, 32 x 4k", 32, 28, 4, 128, 16, 4096, 0, BF16 },
    { "32q32 d128, 16 x 2k", 16, 32, 32, 128, 16, 2048, 0, BF16 },
    { "64q8 d64, one, 8k", 1, 64, 8, 64, 16, 8192, 0, BF16 },
    { "64q8 d64, 64 x 8k", 64, 64, 8, 64, 16, 8192, 0, BF16 },
    { "64q8 d64, 64 x 8k, window 128", 64, 64, 8, 64, 16, 8192, 128, BF16 },
    { "14q2 d64, 64 x 4k", 64, 14, 2, 64, 16, 4096, 0, BF16 },
    { "71q1 d64, 32 x 2k", 32, 71, 1, 64, 16, 2048, 0, BF16 },
    { "24q4 d256 e4m3, 64 x 8k", 64, 24, 4, 256, 16, 8192, 0, BF16_E4M3 },
    { "32q8 d128 e4m3, 64 x 8k", 64, 32, 8, 128, 16, 8192, 0, BF16_E4M3 },
    { "64q4 d128 e4m3 page 32, 64 x 16k", 64, 64, 4, 128, 32, 16384, 0, BF16_E4M3 },
    { "32q8 d128 fp16 page 128, one, 8k", 1, 32, 8, 128, 128, 8192, 0, FP16 },
    { "32q8 d128 fp16 page 128, 64 x 8k", 64, 32, 8, 128, 128, 8192, 0, FP16 },
    { "64q8 d64 fp16 page 128, one, 8k", 1, 64, 8, 64, 128, 8192, 0, FP16 },
    { "64q8 d64 fp16 page 128, 64 x 8k", 64, 64, 8, 64, 128, 8192, 0, FP16 },
    { "16q2 d256 fp16 page 128, 64 x 8k", 64, 16, 2, 256, 128, 8192, 0, FP16 },
    { "16q2 d512 fp16, 64 x 8k", 64, 16, 2, 512, 16, 8192, 0, FP16 },
};

#undef BF16
#undef FP16
#undef BF16_E4M3

enum {
    NUM_DECODE_SHAPES = (int) (sizeof(decode_shapes) / sizeof(decode_shapes[0]))
};

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The shapes of decode: models that people serve. `attn bench` times them as they stand; the tests
// take their heads, head_dim, pages and windows, at lengths that a double-precision oracle can
// follow.
#ifndef ATTN_TESTS_DECODE_CASES_H
#define ATTN_TESTS_DECODE_CASES_H

#include <stdint.h>

struct decode_shape {
    const char *name;
    int32_t batch, num_q_heads, num_kv_heads, head_dim, page_size;
    // Keys of every sequence; keys attended, 0 for all.
    int32_t len, window;
};

static const struct decode_shape decode_shapes[] = {
    { "24q4 d256, one, 1k", 1, 24, 4, 256, 16, 1024, 0 },
    { "24q4 d256, one, 8k", 1, 24, 4, 256, 16, 8192, 0 },
    { "24q4 d256, one, 128k", 1, 24, 4, 256, 16, 131072, 0 },
    { "24q4 d256, 16 x 1335", 16, 24, 4, 256, 16, 1335, 0 },
    { "24q4 d256, 64 x 8k", 64, 24, 4, 256, 16, 8192, 0 },
    { "16q2 d256, 16 x 4k", 16, 16, 2, 256, 16, 4096, 0 },
    { "8q1 d256, 32 x 4k", 32, 8, 1, 256, 16, 4096, 0 },
    { "32q8 d128, one, 1k", 1, 32, 8, 128, 16, 1024, 0 },
    { "32q8 d128, one, 8k", 1, 32, 8, 128, 16, 8192, 0 },
    { "32q8 d128, one, 128k", 1, 32, 8, 128, 16, 131072, 0 },
    { "32q8 d128, 16 x 8k", 16, 32, 8, 128, 16, 8192, 0 },
    { "32q8 d128, 64 x 8k", 64, 32, 8, 128, 16, 8192, 0 },
    { "32q8 d128, 128 x 2k", 128, 32, 8, 128, 16, 2048, 0 },
    { "32q8 d128, 64 x 8k, window 4k", 64, 32, 8, 128, 16, 8192, 4096 },
    { "64q4 d128 page 32, 64 x 16k", 64, 64, 4, 128, 32, 16384, 0 },
    { "64q8 d128, 32 x 4k", 32, 64, 8, 128, 16, 4096, 0 },
    { "28q4 d128, 32 x 4k", 32, 28, 4, 128, 16, 4096, 0 },
    { "32q32 d128, 16 x 2k", 16, 32, 32, 128, 16, 2048, 0 },
    { "64q8 d64, one, 8k", 1, 64, 8, 64, 16, 8192, 0 },
    { "64q8 d64, 64 x 8k", 64, 64, 8, 64, 16, 8192, 0 },
    { "64q8 d64, 64 x 8k, window 128", 64, 64, 8, 64, 16, 8192, 128 },
    { "14q2 d64, 64 x 4k", 64, 14, 2, 64, 16, 4096, 0 },
    { "71q1 d64, 32 x 2k", 32, 71, 1, 64, 16, 2048, 0 },
};

enum {
    NUM_DECODE_SHAPES = (int) (sizeof(decode_shapes) / sizeof(decode_shapes[0]))
};

#endif

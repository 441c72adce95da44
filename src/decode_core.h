/* SPDX-License-Identifier: Apache-2.0 */
// The decode core, for the operations that are fronts of it.
#ifndef ATTN_SRC_DECODE_CORE_H
#define ATTN_SRC_DECODE_CORE_H

#include "attn/decode.h"

// What a front has set aside, whatever the device. The policy is chunk then.
struct attn_decode_limits {
    size_t workspace_bytes;
    int32_t num_counters;
};

// attn_decode without what only a caller of the library can get wrong: `device` and a `params` of
// the library's own size are there. Sentences have the names of decode.h. `limits`: NULL for what
// attn_decode_workspace and attn_decode_counters say; else as many blocks run as these allow, one
// at least.
enum attn_status attn_decode_run_within(struct attn_device *device,
                                        const struct attn_decode_params *params,
                                        const struct attn_decode_limits *limits,
                                        attn_stream stream);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The decode core, for the operations that are fronts of it.
#ifndef ATTN_SRC_DECODE_CORE_H
#define ATTN_SRC_DECODE_CORE_H

#include "attn/decode.h"

#include <stdbool.h>

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

// Chunks of prompts: sequences that have query tokens of their own number, from cu_seqlens[b] on in
// q and o, and positions of their own, as attn/prefill.h has them. Those with 1 .. most_tokens are
// computed, others left alone. NULL: q_len of the parameters, which is the most that there may be,
// and q_offset each. seq_lens may be NULL, too: kv_len each.
struct attn_decode_chunks {
    int32_t most_tokens, num_tokens, kv_len, q_offset;
    const int32_t *cu_seqlens, *q_offsets;
};

// Whether the device's pack has a kernel for calls of a shape under policy chunk.
bool attn_decode_has_kernel(const struct attn_device *device,
                            const struct attn_decode_shape *shape);

// attn_decode_plan under policy chunk, for a shape that was checked and a device that is not the
// host, within `limits`.
enum attn_status attn_decode_plan_within(const struct attn_device *device,
                                         const struct attn_decode_shape *shape,
                                         const struct attn_decode_limits *limits,
                                         struct attn_decode_plan *plan);

// Enqueues such a call on a GPU, of parameters that were checked: no stride is 0, v_block_table is
// there. attn_decode_plan_within has to have fit its shape into `limits`.
enum attn_status attn_decode_run_chunks(const struct attn_device *device,
                                        const struct attn_decode_params *params,
                                        const struct attn_decode_chunks *chunks,
                                        const struct attn_decode_limits *limits,
                                        attn_stream stream);

#endif

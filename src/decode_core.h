/* SPDX-License-Identifier: Apache-2.0 */
// The decode core, for the operations that are fronts of it.
#ifndef ATTN_SRC_DECODE_CORE_H
#define ATTN_SRC_DECODE_CORE_H

#include "attn/decode.h"

// What bounds the workspace and the counters of a call.
enum attn_decode_sizes {
    // attn_decode_workspace and attn_decode_counters, for the device and its policy.
    ATTN_DECODE_SIZES_OWN = 0,
    // attn_ctm_*_elems of ctm.h, whatever the device; the policy is chunk.
    ATTN_DECODE_SIZES_CTM = 1,
};

// attn_decode without what only a caller of the library can get wrong: `device` and a `params` of
// the library's own size are there. Sentences have the names of decode.h.
enum attn_status attn_decode_run_sized(struct attn_device *device,
                                       const struct attn_decode_params *params,
                                       enum attn_decode_sizes sizes, attn_stream stream);

#endif

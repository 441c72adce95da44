/* SPDX-License-Identifier: Apache-2.0 */
// The short form of prefill: sequences with few query tokens, by the kernels of decode.
#ifndef ATTN_SRC_PREFILL_SHORT_H
#define ATTN_SRC_PREFILL_SHORT_H

#include "attn/prefill.h"
#include "decode_core.h"

#include <stdbool.h>

// Which sequences of a call have which form, as far as the host can tell.
struct attn_prefill_forms {
    bool may_be_short, may_be_long;
};

// Whether sequences of calls of a shape have the short form if they are short, given a workspace.
// For a shape that was checked; false on the host.
bool attn_prefill_has_short(const struct attn_device *device,
                            const struct attn_prefill_shape *shape);

// For a shape that has it, and query tokens.
struct attn_prefill_forms attn_prefill_find_forms(const struct attn_prefill_shape *shape);

// Workspace and counters for a shape that has the short form.
enum attn_status attn_prefill_find_needs(const struct attn_device *device,
                                         const struct attn_prefill_shape *shape,
                                         struct attn_decode_limits *needs);

// How short sequences of a shape run, within these.
enum attn_status attn_prefill_plan_short(const struct attn_device *device,
                                         const struct attn_prefill_shape *shape,
                                         const struct attn_decode_limits *needs,
                                         struct attn_decode_plan *plan);

// Enqueues the short sequences of a call, of checked parameters, on a GPU.
enum attn_status attn_prefill_launch_short(const struct attn_device *device,
                                           const struct attn_prefill_params *params,
                                           const struct attn_decode_limits *needs,
                                           attn_stream stream);

#endif

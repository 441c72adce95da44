/* SPDX-License-Identifier: Apache-2.0 */
// The rules of include/attn/prefill.h, as checks.
#ifndef ATTN_SRC_PREFILL_CHECK_H
#define ATTN_SRC_PREFILL_CHECK_H

#include "attn/prefill.h"

#include <stdbool.h>

// What an original, `name`, and its twin want beyond the rules below: sequences of one length, and
// paged K and V or contiguous ones.
enum attn_status attn_prefill_check_layout(const struct attn_device *device,
                                           const struct attn_prefill_params *params,
                                           const char *name, bool paged);

// Every rule that holds for all calls. Replaces the strides that are 0 by what they stand for.
enum attn_status attn_prefill_check_params(const struct attn_device *device,
                                           struct attn_prefill_params *params);

// The rules of the workspace, for other parameters that were checked. `needed` and `num_counters`:
// what attn_prefill_workspace and attn_prefill_counters say of the call's shape.
enum attn_status attn_prefill_check_workspace(const struct attn_device *device,
                                              const struct attn_prefill_params *params,
                                              size_t needed, int32_t num_counters);

// The rules that a shape can break, for the parameters that `shape` stands for.
enum attn_status attn_prefill_check_shape(const struct attn_device *device,
                                          const struct attn_prefill_shape *shape);

// Tokens of contiguous k and v.
int64_t attn_prefill_kv_tokens(const struct attn_prefill_params *params);

// True if the call has no query tokens: nothing is looked at, then, and nothing written.
bool attn_prefill_is_empty(const struct attn_prefill_params *params);

#endif

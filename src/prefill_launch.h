/* SPDX-License-Identifier: Apache-2.0 */
// How a prefill call runs on a GPU: which kernel, and with what.
#ifndef ATTN_SRC_PREFILL_LAUNCH_H
#define ATTN_SRC_PREFILL_LAUNCH_H

#include "attn/prefill.h"

#include <stdbool.h>

struct attn_pack_row;

// Which kernels may take a call.
enum attn_prefill_form {
    // As attn_prefill: the first that accepts it.
    ATTN_PREFILL_ANY,
    // Those of the originals, and of their twins.
    ATTN_PREFILL_ORIGINAL,
    ATTN_PREFILL_TWIN,
};

// The first row of the device's pack that accepts a call; NULL if none does.
const struct attn_pack_row *attn_prefill_find_row(const struct attn_device *device,
                                                  enum attn_dtype dtype, int32_t head_dim,
                                                  enum attn_prefill_form form);

// Enqueues a call, on a device that is not the host. `params` are checked ones, strides filled in.
enum attn_status attn_prefill_launch(const struct attn_device *device,
                                     const struct attn_prefill_params *params,
                                     enum attn_prefill_form form, attn_stream stream);

#endif

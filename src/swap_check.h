/* SPDX-License-Identifier: Apache-2.0 */
// The rules of include/attn/swap.h, as checks.
#ifndef ATTN_SRC_SWAP_CHECK_H
#define ATTN_SRC_SWAP_CHECK_H

#include "swap.h"

// `device` is NULL where there is none to log to, in both. Replaces what is 0 by what it stands
// for.
enum attn_status attn_swap_check_dims(const struct attn_device *device, struct attn_swap_dims *dims,
                                      bool is_file);
enum attn_status attn_swap_check_create(const struct attn_device *device,
                                        const struct attn_swap_dims *dims,
                                        struct attn_swap_create_params *params);

enum attn_status attn_swap_check_block(const struct attn_swap *swap, int32_t layer, int32_t block);
// Fills strides in.
enum attn_status attn_swap_check_write(const struct attn_swap *swap,
                                       struct attn_swap_write_params *params);
enum attn_status attn_swap_check_decode(const struct attn_swap *swap,
                                        const struct attn_swap_decode_params *params);

// The dims of the running state.
struct attn_tiled_dims attn_swap_tiled_dims(const struct attn_swap_dims *dims);

#endif

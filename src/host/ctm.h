/* SPDX-License-Identifier: Apache-2.0 */
// What a call of the CTM decode runner is as a call of decode.
#ifndef ATTN_HOST_CTM_H
#define ATTN_HOST_CTM_H

#include "attn/ctm.h"
#include "attn/decode.h"

// Strides are filled in; lse, workspace and counters are left out. batch_size, q_len, heads and
// head_dim are ones that have a product.
struct attn_decode_params attn_reference_ctm(const struct attn_ctm_params *params);

#endif

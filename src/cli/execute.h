/* SPDX-License-Identifier: Apache-2.0 */
// Runs a decode call given on host pointers, on the host executor or with its tensors copied to a
// GPU.
#ifndef ATTN_CLI_EXECUTE_H
#define ATTN_CLI_EXECUTE_H

#include "attn/attn.h"
#include "cli/gpu.h"

struct execution {
    // [batch, num_q_heads, head_dim] of q_dtype, and [batch, num_q_heads].
    void *o;
    float *lse;
    // Smallest index of a faulty sequence, or INT32_MAX.
    int32_t fault;
    // Of the plan; valid as long as the device.
    const char *kernel;
};

// `params` as case_load fills them; its o, lse, fault, workspace and counters are not looked at.
// `gpu` is NULL for a host device. ATTN_OK, or a status and a sentence in `why`; *result then owns
// nothing.
enum attn_status execute_decode(struct attn_device *device, struct gpu *gpu,
                                const struct attn_decode_params *params, struct execution *result,
                                char *why, size_t why_size);
void execution_free(struct execution *result);

// Bytes of the pools as strides lay them out, the last page whole.
size_t execute_pool_bytes(const struct attn_decode_params *params);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// Runs a call given on host pointers, on the host executor or with its tensors copied to a GPU.
#ifndef ATTN_CLI_EXECUTE_H
#define ATTN_CLI_EXECUTE_H

#include "attn/attn.h"
#include "cli/case.h"
#include "cli/gpu.h"

struct execution {
    // [batch, q_len, num_q_heads, head_dim] of q_dtype, and [batch, q_len, num_q_heads]; of a
    // ragged call [num_tokens, ...], where rows of no sequence are NaN. lse is NULL for ctm, which
    // has none.
    void *o;
    float *lse;
    // Smallest index of a faulty sequence, or INT32_MAX.
    int32_t fault;
    // Blocks that skip-softmax left out.
    int64_t dropped;
    // Of the plan; valid as long as the device. "": the device has no plan of that shape.
    const char *kernel;
    // Of prefill: that of its short sequences, if it may have both forms; else NULL.
    const char *short_kernel;
};

// `params` as case_load fills them; what is written, workspace and counters are not looked at.
// `gpu` is NULL for a host device. ATTN_OK, or a status and a sentence in `why`; *result then owns
// nothing.
enum attn_status execute_decode(struct attn_device *device, struct gpu *gpu,
                                const struct attn_decode_params *params, struct execution *result,
                                char *why, size_t why_size);
// The same for attn_ctm_run.
enum attn_status execute_ctm(struct attn_device *device, struct gpu *gpu,
                             const struct attn_ctm_params *params, struct execution *result,
                             char *why, size_t why_size);
// The same for prefill, where CASE_KERNEL_AUTO has a workspace, and so the short form.
// ATTN_DECLINED, too, with a sentence.
enum attn_status execute_prefill(struct attn_device *device, struct gpu *gpu,
                                 const struct attn_prefill_params *params, enum case_kernel kernel,
                                 struct execution *result, char *why, size_t why_size);
// The same for a tiled case, in tiles of its tile_capacity; `params` are what it is as a call of
// decode.
enum attn_status execute_tiled(struct attn_device *device, struct gpu *gpu,
                               const struct attn_decode_params *params,
                               const struct case_tiled *tiled, struct execution *result, char *why,
                               size_t why_size);
// The same for a swap case.
enum attn_status execute_swap(struct attn_device *device, struct gpu *gpu,
                              const struct attn_decode_params *params,
                              const struct case_tiled *tiled, struct execution *result, char *why,
                              size_t why_size);
// Whichever the case is of.
enum attn_status execute_case(struct attn_device *device, struct gpu *gpu,
                              const struct case_file *loaded, struct execution *result, char *why,
                              size_t why_size);
void execution_free(struct execution *result);

// Calls the entry that `kernel` stands for, for the layout of `params`.
enum attn_status execute_prefill_enqueue(struct attn_device *device,
                                         const struct attn_prefill_params *params,
                                         enum case_kernel kernel, attn_stream stream);

// A whole step; `call` has what is read and what is written, in memory of the device; `tiled` is in
// host memory. On a GPU it is done when this returns.
enum attn_status execute_tiled_run(struct attn_device *device, struct gpu *gpu,
                                   const struct attn_decode_params *call,
                                   const struct case_tiled *tiled, attn_stream stream);
// The same of a swap case, whose pools and lengths are in host memory.
enum attn_status execute_swap_run(struct attn_device *device, struct gpu *gpu,
                                  const struct attn_decode_params *call,
                                  const struct case_tiled *tiled, attn_stream stream);
// Lowers *fault to the first sequence whose count the list has no room for: no tile has such
// blocks.
void execute_report_counts(const struct case_tiled *tiled, int32_t batch, int32_t *fault);
// The kernel's name; valid as long as the device. "": the device has none.
const char *execute_tiled_kernel(const struct attn_device *device, enum attn_dtype dtype,
                                 int32_t head_dim);

// Bytes of K as strides lay it out, the last page whole; V is alike.
size_t execute_pool_bytes(const struct attn_decode_params *params);

// What attn_ctm_run needs for a call. 0 where it would refuse the call.
struct execute_ctm_sizes {
    size_t workspace_bytes;
    int32_t num_semaphores;
};
struct execute_ctm_sizes execute_find_ctm_sizes(const struct attn_ctm_params *params);

#endif

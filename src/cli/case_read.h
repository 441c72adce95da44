/* SPDX-License-Identifier: Apache-2.0 */
// What readers of case files share: scalars and tensors by name, with sentences for what is wrong.
#ifndef ATTN_CLI_CASE_READ_H
#define ATTN_CLI_CASE_READ_H

#include "cli/case.h"

#include <stdbool.h>

// The case, and where sentences go.
struct case_reader {
    struct case_file *to;
    case_warn_fn warn;
    void *user;
    char *why;
};

__attribute__((format(printf, 2, 3))) void case_warn(const struct case_reader *in,
                                                     const char *format, ...);

// NULL if there is none of that name.
const char *case_find_scalar(const struct case_reader *in, const char *key);

// All below return 0, or -1 after a sentence in in->why.

// `otherwise` where it is missing.
int case_read_float(const struct case_reader *in, const char *key, float otherwise, float *value);
// From 0 up; 0 where it is missing.
int case_read_count(const struct case_reader *in, const char *key, int32_t *value);
// Any int32; *value stays as it is where it is missing.
int case_read_int(const struct case_reader *in, const char *key, int32_t *value);

// The tensor `name` if it has this rank and these extents (-1: any up to INT32_MAX). *tensor is
// NULL where it is missing and optional.
int case_find_tensor(const struct case_reader *in, const char *name, bool optional, int rank,
                     const int64_t *extents, const struct safetensors_tensor **tensor);
// `second` may be NULL.
int case_check_dtype(const struct case_reader *in, const struct safetensors_tensor *tensor,
                     const char *first, const char *second);
// Fails, always: its shape is not what is wanted.
int case_refuse_shape(const struct case_reader *in, const struct safetensors_tensor *tensor,
                      const char *wanted);
// The tensor's data where it is aligned, else a copy.
int case_align_data(const struct case_reader *in, const struct safetensors_tensor *tensor,
                    const void **data);
// Finds, checks the type, and aligns. *data stays NULL where the tensor is optional and missing.
int case_read_data(const struct case_reader *in, const char *name, bool optional, const char *dtype,
                   int rank, const int64_t *extents, const void **data);
// An optional tensor of F32 or F64 in `rank` dimensions, as doubles of its own.
int case_read_expected(const struct case_reader *in, const char *name, int rank,
                       const int64_t *extents, double **values);

// The tensors and scalars of a prefill case, into in->to->prefill and in->to->kernel.
int case_read_prefill(const struct case_reader *in);
// Those of a tiled case, into in->to->params and in->to->tiled.
int case_read_tiled(const struct case_reader *in);
// The same of a swap case.
int case_read_swap(const struct case_reader *in);

#endif

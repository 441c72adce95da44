/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/sample_file.h"

#include "cli/cli.h"

#include <stdio.h>

static const char *name_dtype(const enum attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_DTYPE_INT32: return "I32";
    case ATTN_DTYPE_FP32: return "F32";
    case ATTN_DTYPE_BF16: return "BF16";
    case ATTN_DTYPE_FP16: return "F16";
    default: return "F8_E4M3";
    }
}

void sample_add_tensor(struct sample_tensors *const to, const char *const name,
                       const enum attn_dtype dtype, const void *const data,
                       const int64_t extents[4])
{
    struct safetensors_tensor *const tensor = &to->list[to->count++];
    *tensor = (struct safetensors_tensor){ .name = name, .dtype = name_dtype(dtype), .data = data };
    tensor->bytes = attn_dtype_size(dtype);
    for (int i = 0; i < 4 && extents[i] >= 0; i++) {
        tensor->shape[tensor->rank++] = extents[i];
        tensor->bytes *= (size_t) extents[i];
    }
}

void sample_set_number(json_t *const metadata, const char *const key, const float value)
{
    char text[32];
    // Nine digits bring a float back exactly.
    snprintf(text, sizeof(text), "%.9g", (double) value);
    json_object_set_new(metadata, key, json_string(text));
}

int sample_write_file(const char *const path, const struct sample_tensors *const tensors,
                      json_t *const metadata)
{
    char why[SAFETENSORS_WHY_SIZE];
    const int result = safetensors_write(path, tensors->list, tensors->count, metadata, why);
    json_decref(metadata);
    return result ? cli_fail("%s", why) : CLI_FINE;
}

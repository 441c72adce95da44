/* SPDX-License-Identifier: Apache-2.0 */
// The file of a sample: its tensors, and numbers of its metadata.
#ifndef ATTN_CLI_SAMPLE_FILE_H
#define ATTN_CLI_SAMPLE_FILE_H

#include "attn/common.h"
#include "cli/safetensors.h"

#define SAMPLE_MAX_TENSORS 8

struct sample_tensors {
    struct safetensors_tensor list[SAMPLE_MAX_TENSORS];
    size_t count;
};

// Adds a tensor, whose shape is that of the extents before the first that is -1. `name` and `data`
// are borrowed.
void sample_add_tensor(struct sample_tensors *to, const char *name, enum attn_dtype dtype,
                       const void *data, const int64_t extents[4]);

void sample_set_number(json_t *metadata, const char *key, float value);

// Writes the file, and lets go of the metadata. What a command returns.
int sample_write_file(const char *path, const struct sample_tensors *tensors, json_t *metadata);

#endif

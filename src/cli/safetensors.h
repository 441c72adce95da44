/* SPDX-License-Identifier: Apache-2.0 */
// safetensors files: a little-endian uint64 with the size of a JSON header, the header, the data. A
// file is mapped and never trusted: every size and offset in it is checked before anything is
// handed out.
#ifndef ATTN_CLI_SAFETENSORS_H
#define ATTN_CLI_SAFETENSORS_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#define SAFETENSORS_MAX_RANK 8
// Room for a sentence.
#define SAFETENSORS_WHY_SIZE 1024

struct safetensors_tensor {
    const char *name;
    // As the format spells it ("BF16"); may be one that this program does not know.
    const char *dtype;
    int rank;
    int64_t shape[SAFETENSORS_MAX_RANK];
    // `bytes` bytes at any alignment.
    const void *data;
    size_t bytes;
};

struct safetensors {
    // For sentences.
    char name[256];
    struct safetensors_tensor *tensors;
    size_t num_tensors;
    // The object `__metadata__`; every value is a string. NULL: the file has none.
    const json_t *metadata;
    json_t *header;
    void *mapping;
    size_t mapping_size;
};

// Both: 0, or -1 and a sentence in `why` (SAFETENSORS_WHY_SIZE bytes) that names the file, the
// tensor and the value; *file is then NULL.
int safetensors_open(struct safetensors **file, const char *path, char *why);
// The same on bytes in memory, which have to outlive *file.
int safetensors_parse(struct safetensors **file, const char *name, const void *bytes, size_t size,
                      char *why);
void safetensors_close(struct safetensors **file);

// NULL if there is none of that name.
const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name);

// Writes "[2, 3]"; cut to fit.
void safetensors_format_shape(const int64_t *shape, int rank, char *text, size_t size);

// Writes beside `path` and renames, so that a file of that name is whole or as it was. `metadata`
// is an object of strings, borrowed. 0, or -1 and a sentence.
int safetensors_write(const char *path, const struct safetensors_tensor *tensors,
                      size_t num_tensors, json_t *metadata, char *why);

// Puts a sentence into `why`, with control characters (names come from files) replaced; returns -1.
__attribute__((format(printf, 2, 3))) int safetensors_fail(char *why, const char *format, ...);

#endif

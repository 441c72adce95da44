/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/case_read.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the library asks of its tensors; copies get more.
#define TENSOR_ALIGNMENT 16u
#define COPY_ALIGNMENT 64u

void case_warn(const struct case_reader *const in, const char *const format, ...)
{
    char name[192], sentence[SAFETENSORS_WHY_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof(name), format, args);
    va_end(args);
    safetensors_fail(sentence, "%s: %s", in->to->file->name, name);
    if (in->warn) in->warn(in->user, sentence);
}

const char *case_find_scalar(const struct case_reader *const in, const char *const key)
{
    return json_string_value(json_object_get(in->to->file->metadata, key));
}

// Digits, signs, a point and an exponent only: no blanks, no "nan", no hexadecimal.
static bool is_plain_number(const char *const text)
{
    return *text && strspn(text, "0123456789+-.eE") == strlen(text);
}

int case_read_float(const struct case_reader *const in, const char *const key,
                    const float otherwise, float *const value)
{
    const char *const text = case_find_scalar(in, key);
    char *end = NULL;
    *value = otherwise;
    if (!text) return 0;
    if (is_plain_number(text)) *value = strtof(text, &end);
    if (!end || *end || end == text || !isfinite(*value))
        return safetensors_fail(in->why,
                                "%s: scalar '%s' is '%s'; a finite decimal number is needed",
                                in->to->file->name, key, text);
    return 0;
}

int case_read_count(const struct case_reader *const in, const char *const key, int32_t *const value)
{
    const char *const text = case_find_scalar(in, key);
    char *end = NULL;
    *value = 0;
    if (!text) return 0;
    errno = 0;
    const long long number =
        strspn(text, "0123456789") == strlen(text) ? strtoll(text, &end, 10) : -1;
    if (!*text || !end || errno || number < 0 || number > INT32_MAX)
        return safetensors_fail(in->why,
                                "%s: scalar '%s' is '%s'; a whole number from 0 to %" PRId32
                                " is needed",
                                in->to->file->name, key, text, INT32_MAX);
    *value = (int32_t) number;
    return 0;
}

int case_read_int(const struct case_reader *const in, const char *const key, int32_t *const value)
{
    const char *const text = case_find_scalar(in, key);
    char *end = NULL;
    if (!text) return 0;
    const char *const digits = *text == '-' ? text + 1 : text;
    errno = 0;
    const long long number =
        *digits && strspn(digits, "0123456789") == strlen(digits) ? strtoll(text, &end, 10) : 0;
    if (!end || errno || number < INT32_MIN || number > INT32_MAX)
        return safetensors_fail(in->why,
                                "%s: scalar '%s' is '%s'; a whole number from %" PRId32
                                " to %" PRId32 " is needed",
                                in->to->file->name, key, text, INT32_MIN, INT32_MAX);
    *value = (int32_t) number;
    return 0;
}

int case_refuse_shape(const struct case_reader *const in,
                      const struct safetensors_tensor *const tensor, const char *const wanted)
{
    char shape[160];
    safetensors_format_shape(tensor->shape, tensor->rank, shape, sizeof(shape));
    return safetensors_fail(in->why, "%s: tensor '%s' has shape %s; %s is needed",
                            in->to->file->name, tensor->name, shape, wanted);
}

// The tensor `name` if it has this rank and these extents (-1: any up to INT32_MAX). *tensor is
// NULL where it is missing and optional.
int case_find_tensor(const struct case_reader *const in, const char *const name,
                     const bool optional, const int rank, const int64_t *const extents,
                     const struct safetensors_tensor **const tensor)
{
    char wanted[160];
    int64_t shown[SAFETENSORS_MAX_RANK];
    bool fits = true;
    *tensor = safetensors_find(in->to->file, name);
    if (!*tensor && optional) return 0;
    if (!*tensor)
        return safetensors_fail(in->why, "%s: tensor '%s' is missing", in->to->file->name, name);
    fits = (*tensor)->rank == rank;
    for (int i = 0; i < rank && fits; i++) {
        const int64_t extent = (*tensor)->shape[i];
        fits = extents[i] < 0 ? extent <= INT32_MAX : extent == extents[i];
    }
    if (fits) return 0;
    for (int i = 0; i < rank; i++) shown[i] = extents[i];
    safetensors_format_shape(shown, rank, wanted, sizeof(wanted));
    char rule[256];
    snprintf(rule, sizeof(rule), "%s (-1: any up to %" PRId32 ")", wanted, INT32_MAX);
    return case_refuse_shape(in, *tensor, rule);
}

int case_check_dtype(const struct case_reader *const in,
                     const struct safetensors_tensor *const tensor, const char *const first,
                     const char *const second)
{
    if (!strcmp(tensor->dtype, first) || (second && !strcmp(tensor->dtype, second))) return 0;
    return safetensors_fail(in->why, "%s: tensor '%s' is of type %s; %s%s%s is needed",
                            in->to->file->name, tensor->name, tensor->dtype, first,
                            second ? " or " : "", second ? second : "");
}

// The tensor's data where it is aligned, else a copy.
int case_align_data(const struct case_reader *const in,
                    const struct safetensors_tensor *const tensor, const void **const data)
{
    *data = tensor->data;
    // An empty tensor may lie at the very end of the file.
    if (tensor->bytes && !((uintptr_t) tensor->data % TENSOR_ALIGNMENT)) return 0;
    const size_t rounded = (tensor->bytes / COPY_ALIGNMENT + 1) * COPY_ALIGNMENT;
    void *const copy = aligned_alloc(COPY_ALIGNMENT, rounded);
    if (!copy)
        return safetensors_fail(in->why, "%s: tensor '%s': out of memory (%zu bytes)",
                                in->to->file->name, tensor->name, rounded);
    memcpy(copy, tensor->data, tensor->bytes);
    in->to->copies[in->to->num_copies++] = copy;
    *data = copy;
    return 0;
}

// Finds, checks the type, and aligns. *data stays NULL where the tensor is optional and missing.
int case_read_data(const struct case_reader *const in, const char *const name, const bool optional,
                   const char *const dtype, const int rank, const int64_t *const extents,
                   const void **const data)
{
    const struct safetensors_tensor *tensor;
    *data = NULL;
    int result = case_find_tensor(in, name, optional, rank, extents, &tensor);
    if (result || !tensor) return result;
    result = case_check_dtype(in, tensor, dtype, NULL);
    return result ? result : case_align_data(in, tensor, data);
}

// F32 or F64 in `rank` dimensions, as doubles of its own.
int case_read_expected(const struct case_reader *const in, const char *const name, const int rank,
                       const int64_t *const extents, double **const values)
{
    const struct safetensors_tensor *tensor;
    int result = case_find_tensor(in, name, true, rank, extents, &tensor);
    if (result || !tensor) return result;
    result = case_check_dtype(in, tensor, "F32", "F64");
    if (result) return result;
    const size_t width = strcmp(tensor->dtype, "F32") ? sizeof(double) : sizeof(float);
    const size_t count = tensor->bytes / width;
    *values = calloc(count + 1, sizeof(double));
    if (!*values)
        return safetensors_fail(in->why, "%s: tensor '%s': out of memory", in->to->file->name,
                                name);
    for (size_t i = 0; i < count; i++) {
        const unsigned char *const place = (const unsigned char *) tensor->data + i * width;
        float single;
        memcpy(&single, place, sizeof(single));
        if (width == sizeof(single))
            (*values)[i] = single;
        else
            memcpy(&(*values)[i], place, sizeof(double));
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// The format's own limit.
#define MAX_HEADER 100000000u
#define PREFIX 8u
// Data starts at a multiple of this in files written here.
#define DATA_ALIGNMENT 64u

int safetensors_fail(char *const why, const char *const format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, SAFETENSORS_WHY_SIZE, format, args);
    va_end(args);
    for (unsigned char *c = (unsigned char *) why; *c; c++)
        if (*c < 0x20 || *c == 0x7F) *c = '?';
    return -1;
}

// 0 for a type that is not known here; such a tensor can be skipped but not used.
static size_t find_dtype_size(const char *const dtype)
{
    static const struct {
        const char *name;
        size_t size;
    } dtypes[] = {
        { "BOOL", 1 }, { "U8", 1 },  { "I8", 1 },  { "F8_E4M3", 1 }, { "F8_E5M2", 1 },
        { "I16", 2 },  { "U16", 2 }, { "F16", 2 }, { "BF16", 2 },    { "I32", 4 },
        { "U32", 4 },  { "F32", 4 }, { "I64", 8 }, { "U64", 8 },     { "F64", 8 },
    };
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (!strcmp(dtype, dtypes[i].name)) return dtypes[i].size;
    return 0;
}

void safetensors_format_shape(const int64_t *const shape, const int rank, char *const text,
                              const size_t size)
{
    size_t used = (size_t) snprintf(text, size, "[");
    for (int i = 0; i < rank && used < size; i++)
        used += (size_t) snprintf(text + used, size - used, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (used < size) snprintf(text + used, size - used, "]");
}

static int read_shape(const struct safetensors *const file, struct safetensors_tensor *const tensor,
                      const json_t *const shape, char *const why)
{
    if (!json_is_array(shape))
        return safetensors_fail(why, "%s: tensor '%s' has no shape", file->name, tensor->name);
    if (json_array_size(shape) > SAFETENSORS_MAX_RANK)
        return safetensors_fail(why, "%s: tensor '%s' has %zu dimensions; at most %d are supported",
                                file->name, tensor->name, json_array_size(shape),
                                SAFETENSORS_MAX_RANK);
    tensor->rank = (int) json_array_size(shape);
    for (int i = 0; i < tensor->rank; i++) {
        const json_t *const extent = json_array_get(shape, (size_t) i);
        if (!json_is_integer(extent) || json_integer_value(extent) < 0)
            return safetensors_fail(
                why,
                "%s: tensor '%s': dimension %d of its shape is not a whole number "
                "from 0 up",
                file->name, tensor->name, i);
        tensor->shape[i] = json_integer_value(extent);
    }
    return 0;
}

// The bytes that dtype and shape ask for have to be those between the offsets.
static int check_size(const struct safetensors *const file,
                      const struct safetensors_tensor *const tensor, char *const why)
{
    size_t bytes = find_dtype_size(tensor->dtype);
    char shape[160];
    if (!bytes) return 0;
    safetensors_format_shape(tensor->shape, tensor->rank, shape, sizeof(shape));
    // A product with a 0 in it is 0, however large the rest.
    for (int i = 0; i < tensor->rank; i++)
        if (!tensor->shape[i]) bytes = 0;
    for (int i = 0; i < tensor->rank && bytes; i++)
        if (__builtin_mul_overflow(bytes, (uint64_t) tensor->shape[i], &bytes))
            return safetensors_fail(why, "%s: tensor '%s': shape %s is too large", file->name,
                                    tensor->name, shape);
    if (bytes != tensor->bytes)
        return safetensors_fail(
            why,
            "%s: tensor '%s': shape %s of %s is %zu bytes, but its data_offsets span "
            "%zu",
            file->name, tensor->name, shape, tensor->dtype, bytes, tensor->bytes);
    return 0;
}

static int read_offsets(const struct safetensors *const file,
                        struct safetensors_tensor *const tensor, const json_t *const offsets,
                        const unsigned char *const data, const size_t data_size, char *const why)
{
    const json_t *const first = json_array_get(offsets, 0), *const last =
                                                                json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return safetensors_fail(why, "%s: tensor '%s': data_offsets is not a pair of whole numbers",
                                file->name, tensor->name);
    const json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t) end > data_size)
        return safetensors_fail(why,
                                "%s: tensor '%s': data_offsets [%" JSON_INTEGER_FORMAT
                                ", %" JSON_INTEGER_FORMAT
                                "] are not within the %zu bytes of data in the "
                                "file",
                                file->name, tensor->name, begin, end, data_size);
    tensor->data = data + begin;
    tensor->bytes = (size_t) (end - begin);
    return 0;
}

static int read_tensor(const struct safetensors *const file,
                       struct safetensors_tensor *const tensor, const json_t *const entry,
                       const unsigned char *const data, const size_t data_size, char *const why)
{
    if (!json_is_object(entry))
        return safetensors_fail(why, "%s: tensor '%s' is not described by an object", file->name,
                                tensor->name);
    tensor->dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!tensor->dtype)
        return safetensors_fail(why, "%s: tensor '%s' has no dtype", file->name, tensor->name);
    int result = read_shape(file, tensor, json_object_get(entry, "shape"), why);
    if (!result)
        result = read_offsets(file, tensor, json_object_get(entry, "data_offsets"), data, data_size,
                              why);
    return result ? result : check_size(file, tensor, why);
}

static int read_metadata(struct safetensors *const file, json_t *const metadata, char *const why)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return safetensors_fail(why, "%s: __metadata__ is not an object", file->name);
    json_object_foreach(metadata, key, value) if (!json_is_string(value)) return safetensors_fail(
        why, "%s: __metadata__: the value of '%s' is not a string", file->name, key);
    file->metadata = metadata;
    return 0;
}

static int compare_place(const void *const left, const void *const right)
{
    const struct safetensors_tensor *const a = left, *const b = right;
    if (a->data != b->data) return (uintptr_t) a->data < (uintptr_t) b->data ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;
}

// The format wants the data covered without overlap and without a hole.
static int check_cover(const struct safetensors *const file, const unsigned char *const data,
                       const size_t data_size, char *const why)
{
    const unsigned char *covered = data;
    qsort(file->tensors, file->num_tensors, sizeof(file->tensors[0]), compare_place);
    for (size_t i = 0; i < file->num_tensors; i++) {
        const struct safetensors_tensor *const tensor = &file->tensors[i];
        const unsigned char *const start = tensor->data;
        if (start < covered)
            return safetensors_fail(why,
                                    "%s: tensor '%s' starts at byte %zu of the data, inside tensor "
                                    "'%s'",
                                    file->name, tensor->name, (size_t) (start - data),
                                    file->tensors[i - 1].name);
        if (start > covered)
            return safetensors_fail(
                why,
                "%s: bytes %zu to %zu of the data belong to no tensor; the next "
                "one is '%s'",
                file->name, (size_t) (covered - data), (size_t) (start - data), tensor->name);
        covered = start + tensor->bytes;
    }
    if ((size_t) (covered - data) != data_size)
        return safetensors_fail(why,
                                "%s: the tensors end at byte %zu of the data, the file at byte %zu",
                                file->name, (size_t) (covered - data), data_size);
    return 0;
}

static int read_entries(struct safetensors *const file, const unsigned char *const data,
                        const size_t data_size, char *const why)
{
    const char *key;
    json_t *entry;
    file->tensors = calloc(json_object_size(file->header) + 1, sizeof(file->tensors[0]));
    if (!file->tensors) return safetensors_fail(why, "%s: out of memory", file->name);
    json_object_foreach(file->header, key, entry)
    {
        int result;
        if (!strcmp(key, "__metadata__")) {
            result = read_metadata(file, entry, why);
        } else {
            struct safetensors_tensor *const tensor = &file->tensors[file->num_tensors++];
            tensor->name = key;
            result = read_tensor(file, tensor, entry, data, data_size, why);
        }
        if (result) return result;
    }
    return check_cover(file, data, data_size, why);
}

static int read_file(struct safetensors *const file, const unsigned char *const bytes,
                     const size_t size, char *const why)
{
    uint64_t header_size = 0;
    json_error_t error;
    if (size < PREFIX)
        return safetensors_fail(why, "%s: %zu bytes are too few for a safetensors file", file->name,
                                size);
    for (unsigned i = 0; i < PREFIX; i++) header_size |= (uint64_t) bytes[i] << (8 * i);
    if (header_size > size - PREFIX || header_size > MAX_HEADER)
        return safetensors_fail(why,
                                "%s: not a safetensors file: the header claims %" PRIu64
                                " bytes; the "
                                "file has %zu after the first 8, and the limit is %u",
                                file->name, header_size, size - PREFIX, MAX_HEADER);
    file->header = json_loadb((const char *) bytes + PREFIX, (size_t) header_size,
                              JSON_REJECT_DUPLICATES, &error);
    if (!file->header)
        return safetensors_fail(why, "%s: the header is not valid JSON: %s (byte %d)", file->name,
                                error.text, error.position);
    if (!json_is_object(file->header))
        return safetensors_fail(why, "%s: the header is not a JSON object", file->name);
    return read_entries(file, bytes + PREFIX + header_size, size - PREFIX - (size_t) header_size,
                        why);
}

int safetensors_parse(struct safetensors **const file, const char *const name,
                      const void *const bytes, const size_t size, char *const why)
{
    struct safetensors *parsed = calloc(1, sizeof(*parsed));
    *file = NULL;
    if (!parsed) return safetensors_fail(why, "%s: out of memory", name);
    snprintf(parsed->name, sizeof(parsed->name), "%s", name);
    const int result = read_file(parsed, bytes, size, why);
    if (result)
        safetensors_close(&parsed);
    else
        *file = parsed;
    return result;
}

int safetensors_open(struct safetensors **const file, const char *const path, char *const why)
{
    struct stat status;
    void *mapping = MAP_FAILED;
    int result = -1;
    *file = NULL;
    // Of a pipe nobody is waited for.
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0 || fstat(descriptor, &status)) {
        safetensors_fail(why, "%s: cannot be read: %s", path, strerror(errno));
        goto out;
    }
    if (!S_ISREG(status.st_mode) || status.st_size < (off_t) PREFIX) {
        safetensors_fail(why, "%s: not a safetensors file: %s", path,
                         S_ISREG(status.st_mode) ? "it has fewer than 8 bytes"
                                                 : "not a regular file");
        goto out;
    }
    mapping = mmap(NULL, (size_t) status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapping == MAP_FAILED) {
        safetensors_fail(why, "%s: cannot be mapped: %s", path, strerror(errno));
        goto out;
    }
    result = safetensors_parse(file, path, mapping, (size_t) status.st_size, why);
    if (result) {
        munmap(mapping, (size_t) status.st_size);
        goto out;
    }
    (*file)->mapping = mapping;
    (*file)->mapping_size = (size_t) status.st_size;
out:
    if (descriptor >= 0) close(descriptor);
    return result;
}

void safetensors_close(struct safetensors **const file)
{
    struct safetensors *const closing = *file;
    *file = NULL;
    if (!closing) return;
    if (closing->mapping) munmap(closing->mapping, closing->mapping_size);
    json_decref(closing->header);
    free(closing->tensors);
    free(closing);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *const file,
                                                  const char *const name)
{
    for (size_t i = 0; i < file->num_tensors; i++)
        if (!strcmp(file->tensors[i].name, name)) return &file->tensors[i];
    return NULL;
}

static json_t *describe_tensor(const struct safetensors_tensor *const tensor, const size_t offset)
{
    json_t *const shape = json_array();
    for (int i = 0; i < tensor->rank; i++)
        json_array_append_new(shape, json_integer((json_int_t) tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor->dtype, "shape", shape, "data_offsets",
                     (json_int_t) offset, (json_int_t) (offset + tensor->bytes));
}

// The header's text, padded with blanks so that the data is aligned; NULL if memory ran out.
static char *make_header(const struct safetensors_tensor *const tensors, const size_t num_tensors,
                         json_t *const metadata, size_t *const size)
{
    json_t *const header = json_object();
    size_t offset = 0;
    json_object_set(header, "__metadata__", metadata);
    for (size_t i = 0; i < num_tensors; i++) {
        json_object_set_new(header, tensors[i].name, describe_tensor(&tensors[i], offset));
        offset += tensors[i].bytes;
    }
    char *const text =
        json_object_size(header) == num_tensors + 1 ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return NULL;
    const size_t length = strlen(text);
    *size = (PREFIX + length + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT - PREFIX;
    char *const padded = malloc(*size);
    if (padded) {
        memset(padded, ' ', *size);
        memcpy(padded, text, length);
    }
    free(text);
    return padded;
}

static int write_all(FILE *const out, const char *const header, const size_t header_size,
                     const struct safetensors_tensor *const tensors, const size_t num_tensors)
{
    unsigned char prefix[PREFIX];
    for (unsigned i = 0; i < PREFIX; i++)
        prefix[i] = (unsigned char) ((uint64_t) header_size >> (8 * i));
    if (fwrite(prefix, 1, PREFIX, out) != PREFIX) return -1;
    if (fwrite(header, 1, header_size, out) != header_size) return -1;
    for (size_t i = 0; i < num_tensors; i++)
        if (tensors[i].bytes &&
            fwrite(tensors[i].data, 1, tensors[i].bytes, out) != tensors[i].bytes)
            return -1;
    return 0;
}

// Where to write: `place` itself where it is something that must not be replaced, like /dev/null.
static int open_output(const char *const place, char *const temporary, const size_t size)
{
    struct stat status;
    temporary[0] = 0;
    if (!stat(place, &status) && !S_ISREG(status.st_mode)) return open(place, O_WRONLY | O_CLOEXEC);
    if (snprintf(temporary, size, "%s.%ld.tmp", place, (long) getpid()) >= (int) size) {
        temporary[0] = 0;
        errno = ENAMETOOLONG;
        return -1;
    }
    const int descriptor = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) temporary[0] = 0;
    return descriptor;
}

int safetensors_write(const char *const path, const struct safetensors_tensor *const tensors,
                      const size_t num_tensors, json_t *const metadata, char *const why)
{
    char temporary[PATH_MAX + 32];
    size_t header_size = 0;
    int result = -1;
    // Through a symbolic link, not over it.
    char *const real = realpath(path, NULL);
    const char *const place = real ? real : path;
    char *const header = make_header(tensors, num_tensors, metadata, &header_size);
    FILE *out = NULL;
    temporary[0] = 0;
    if (!header) {
        safetensors_fail(why, "%s: out of memory, or a name that is not UTF-8", path);
        goto out;
    }
    const int descriptor = open_output(place, temporary, sizeof(temporary));
    out = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (!out) {
        safetensors_fail(why, "%s: cannot be written: %s", path, strerror(errno));
        if (descriptor >= 0) close(descriptor);
        goto out;
    }
    result = write_all(out, header, header_size, tensors, num_tensors);
    if (fclose(out)) result = -1;
    if (!result && temporary[0]) result = rename(temporary, place);
    if (result) safetensors_fail(why, "%s: cannot be written: %s", path, strerror(errno));
out:
    if (result && temporary[0]) unlink(temporary);
    free(header);
    free(real);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Reading and writing safetensors files: what is in a sound one, and a sentence for each way to
// lie.
#include "cli/safetensors.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct image {
    unsigned char bytes[4096];
    size_t size;
};

// A file of that header with `data` bytes of 1, 2, 3 ... after it; the header's size may be a lie.
static struct image make_image(const char *const header, const uint64_t claimed, const size_t data)
{
    struct image image = { .size = 8 + strlen(header) + data };
    cr_assert_leq(image.size, sizeof(image.bytes));
    for (int i = 0; i < 8; i++) image.bytes[i] = (unsigned char) (claimed >> (8 * i));
    memcpy(image.bytes + 8, header, strlen(header));
    for (size_t i = 0; i < data; i++) image.bytes[8 + strlen(header) + i] = (unsigned char) (i + 1);
    return image;
}

static void expect_refused(const char *const header, const size_t data, const char *const part)
{
    const struct image image = make_image(header, strlen(header), data);
    struct safetensors *file;
    char why[SAFETENSORS_WHY_SIZE] = "";
    const int result = safetensors_parse(&file, "lie", image.bytes, image.size, why);
    cr_expect_eq(result, -1, "accepted: %s", header);
    cr_expect_null(file);
    cr_expect_not_null(strstr(why, part), "'%s' has no '%s' (%s)", why, part, header);
    cr_expect_eq(strncmp(why, "lie: ", 5), 0, "'%s' does not name the file", why);
    if (!result) safetensors_close(&file);
}

Test(safetensors, reads_tensors_and_metadata)
{
    const char *const header =
        "{\"__metadata__\":{\"format\":\"x\"},"
        "\"b\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,9223372036854775807,4],\"data_offsets\":[28,28]},"
        "\"scalar\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[28,29]}}   ";
    const struct image image = make_image(header, strlen(header), 29);
    struct safetensors *file;
    char why[SAFETENSORS_WHY_SIZE] = "";
    cr_assert_eq(safetensors_parse(&file, "sound", image.bytes, image.size, why), 0, "%s", why);
    cr_expect_eq(file->num_tensors, 4);
    cr_expect_str_eq(json_string_value(json_object_get(file->metadata, "format")), "x");
    const struct safetensors_tensor *const b = safetensors_find(file, "b");
    cr_assert_not_null(b);
    cr_expect_str_eq(b->dtype, "I32");
    cr_expect(b->rank == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->bytes == 24);
    cr_expect_eq(*(const unsigned char *) b->data, 5);
    cr_expect_eq(safetensors_find(file, "scalar")->rank, 0);
    cr_expect_eq(safetensors_find(file, "empty")->bytes, 0);
    cr_expect_null(safetensors_find(file, "c"));
    safetensors_close(&file);
    cr_expect_null(file);
}

Test(safetensors, refuses_a_header_that_lies_about_its_size)
{
    static const uint64_t claims[] = {
        3, 30, 100000001, UINT64_MAX, UINT64_MAX - 7, (uint64_t) 1 << 63
    };
    struct safetensors *file;
    char why[SAFETENSORS_WHY_SIZE];
    for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++) {
        const struct image image = make_image("{}", claims[i], 0);
        why[0] = 0;
        cr_expect_eq(safetensors_parse(&file, "lie", image.bytes, image.size, why), -1);
        cr_expect_not_null(strstr(why, "header claims"), "%s", why);
    }
    for (size_t size = 0; size < 8; size++) {
        cr_expect_eq(safetensors_parse(&file, "short", "\2\0\0\0\0\0\0", size, why), -1);
        cr_expect_not_null(strstr(why, "too few"), "%s", why);
    }
}

#define ONE(dtype, shape, offsets) \
    "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

Test(safetensors, refuses_headers_that_are_not_what_they_should_be)
{
    expect_refused("{\"t\":", 0, "not valid JSON");
    expect_refused("[]", 0, "not a JSON object");
    expect_refused("{} {}", 0, "not valid JSON");
    expect_refused("{\"t\":1}", 0, "'t' is not described");
    expect_refused("{\"__metadata__\":[]}", 0, "__metadata__ is not an object");
    expect_refused("{\"__metadata__\":{\"scale\":1}}", 0, "'scale' is not a string");
    expect_refused("{\"t\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1, "'t' has no dtype");
    expect_refused("{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "'t' has no shape");
    expect_refused("{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets");
    expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                   "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                   1, "duplicate");
}

Test(safetensors, refuses_shapes_and_offsets_that_do_not_fit)
{
    expect_refused(ONE("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions");
    expect_refused(ONE("\"U8\"", "[-1]", "[0,1]"), 1, "dimension 0");
    expect_refused(ONE("\"U8\"", "[1.0]", "[0,1]"), 1, "dimension 0");
    expect_refused(ONE("\"U8\"", "[2]", "[0,1]"), 1, "is 2 bytes");
    expect_refused(ONE("\"F32\"", "[1]", "[0,1]"), 1, "is 4 bytes");
    // 2^62 * 4 * 1 wraps to 0; 2^63 * 2 would as well.
    expect_refused(ONE("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "too large");
    expect_refused(ONE("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "too large");
    expect_refused(ONE("\"U8\"", "[9223372036854775808]", "[0,0]"), 0, "JSON");
    expect_refused(ONE("\"U8\"", "[2]", "[0,2]"), 1, "not within the 1 bytes");
    expect_refused(ONE("\"U8\"", "[1]", "[-1,0]"), 1, "not within");
    expect_refused(ONE("\"U8\"", "[1]", "[1,0]"), 1, "not within");
    expect_refused(ONE("\"U8\"", "[1]", "[0,9223372036854775807]"), 1, "not within");
    expect_refused(ONE("\"U8\"", "[1]", "[0]"), 1, "pair");
    expect_refused(ONE("\"U8\"", "[1]", "[0,\"1\"]"), 1, "pair");
}

#define PAIR(first, second) \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" first "}," \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" second "}}"

Test(safetensors, refuses_overlap_and_holes)
{
    expect_refused(PAIR("[0,2]", "[1,3]"), 3, "inside tensor 'a'");
    expect_refused(PAIR("[0,2]", "[0,2]"), 2, "inside tensor");
    expect_refused(PAIR("[0,2]", "[3,5]"), 5, "belong to no tensor");
    expect_refused(PAIR("[1,3]", "[3,5]"), 5, "belong to no tensor");
    expect_refused(PAIR("[0,2]", "[2,4]"), 5, "end at byte 4");
}

Test(safetensors, replaces_control_characters_in_sentences)
{
    const char *const header = "{\"\\u001b[31m\":1}";
    const struct image image = make_image(header, strlen(header), 0);
    struct safetensors *file;
    char why[SAFETENSORS_WHY_SIZE] = "";
    cr_expect_eq(safetensors_parse(&file, "x", image.bytes, image.size, why), -1);
    cr_expect_null(strchr(why, 0x1B), "an escape sequence got through");
    cr_expect_not_null(strstr(why, "?[31m"), "%s", why);
}

static void write_and_compare(const char *const path)
{
    static const uint16_t halves[] = { 1, 2, 3 };
    static const int32_t words[] = { -1, 7 };
    const struct safetensors_tensor tensors[] = {
        { "o", "BF16", 3, { 1, 3, 1 }, halves, sizeof(halves) },
        { "lens", "I32", 1, { 2 }, words, sizeof(words) },
        { "none", "F32", 2, { 0, 5 }, words, 0 },
    };
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct safetensors *file;
    json_t *const metadata = json_pack("{s:s}", "key", "value");
    cr_assert_eq(safetensors_write(path, tensors, 3, metadata, why), 0, "%s", why);
    json_decref(metadata);
    cr_assert_eq(safetensors_open(&file, path, why), 0, "%s", why);
    cr_expect_eq(file->num_tensors, 3);
    cr_expect_str_eq(json_string_value(json_object_get(file->metadata, "key")), "value");
    const struct safetensors_tensor *const o = safetensors_find(file, "o");
    cr_expect(o->rank == 3 && o->shape[1] == 3 && !memcmp(o->data, halves, sizeof(halves)));
    cr_expect_eq((uintptr_t) o->data % 64, 0, "the data of a written file is aligned");
    cr_expect_eq(memcmp(safetensors_find(file, "lens")->data, words, sizeof(words)), 0);
    safetensors_close(&file);
}

Test(safetensors, writes_what_it_reads)
{
    char folder[] = "/tmp/attn-safetensors-XXXXXX", path[128], link[128];
    struct stat status;
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/a", folder);
    snprintf(link, sizeof(link), "%s/link", folder);
    write_and_compare(path);
    // Over itself, and through a symbolic link, which stays one.
    write_and_compare(path);
    cr_assert_eq(symlink("a", link), 0);
    write_and_compare(link);
    cr_expect(!lstat(link, &status) && S_ISLNK(status.st_mode));
    unlink(link);
    unlink(path);
    // Empty again: no temporary file is left.
    cr_expect_eq(rmdir(folder), 0);
}

Test(safetensors, does_not_wait_at_a_pipe, .timeout = 10)
{
    char folder[] = "/tmp/attn-safetensors-XXXXXX", path[128], why[SAFETENSORS_WHY_SIZE] = "";
    struct safetensors *file;
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/pipe", folder);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_expect_eq(safetensors_open(&file, path, why), -1);
    cr_expect_not_null(strstr(why, "not a regular file"), "%s", why);
    unlink(path);
    cr_expect_eq(rmdir(folder), 0);
}

Test(safetensors, reports_what_cannot_be_read_or_written)
{
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct safetensors *file;
    cr_expect_eq(safetensors_open(&file, "/nonexistent/file", why), -1);
    cr_expect_not_null(strstr(why, "/nonexistent/file: cannot be read"), "%s", why);
    cr_expect_eq(safetensors_open(&file, "/tmp", why), -1);
    cr_expect_not_null(strstr(why, "not a regular file"), "%s", why);
    json_t *const metadata = json_object();
    cr_expect_eq(safetensors_write("/nonexistent/file", NULL, 0, metadata, why), -1);
    cr_expect_not_null(strstr(why, "cannot be written"), "%s", why);
    // Every write fails there, and it's not to be replaced.
    cr_expect_eq(safetensors_write("/dev/full", NULL, 0, metadata, why), -1);
    cr_expect_not_null(strstr(why, "/dev/full: cannot be written"), "%s", why);
    json_decref(metadata);
}

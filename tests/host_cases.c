/* SPDX-License-Identifier: Apache-2.0 */
// Case files of real models on the host executor, against the values in the files, which come from
// another program. ATTN_CASE_DIR names a folder with more of them.
#include "attn/attn.h"
#include "cli/case.h"
#include "cli/execute.h"
#include "host/check.h"

#include <criterion/criterion.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

static struct attn_device *open_host(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device;
    cr_assert_eq(attn_device_open(&device, &params), ATTN_OK, "%s", attn_last_error());
    return device;
}

static void check_expected(const struct case_file *const loaded,
                           const struct execution *const result, struct attn_check *const found)
{
    // Tiled decode carries its state in FP32.
    const bool has_lists = loaded->op == CASE_TILED || loaded->op == CASE_SWAP;
    const enum attn_check_bound bound = has_lists ? ATTN_CHECK_KERNEL : ATTN_CHECK_HOST;
    const struct attn_check_prefill prefill = { &loaded->prefill, result->o, result->lse,
                                                loaded->expected_o, loaded->expected_lse };
    if (loaded->op == CASE_PREFILL)
        attn_check_prefill(&prefill, bound, found);
    else
        cr_assert_eq(attn_check_decode_expected(&loaded->params, result->o, result->lse,
                                                loaded->expected_o, loaded->expected_lse, bound,
                                                found),
                     0);
}

static int64_t count_elements(const struct case_file *const loaded)
{
    int64_t shape[4], elements = 1;
    const int rank = case_shape(loaded, shape);
    for (int i = 0; i < rank; i++) elements *= shape[i];
    return elements;
}

static void run_loaded(struct attn_device *const device, const struct case_file *const loaded,
                       const char *const path)
{
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct execution result;
    struct attn_check found;
    cr_assert_eq(execute_case(device, NULL, loaded, &result, why, sizeof(why)), ATTN_OK, "%s: %s",
                 path, why);
    cr_expect_eq(result.fault, INT32_MAX, "%s: sequence %d is faulty", path, result.fault);
    check_expected(loaded, &result, &found);
    cr_expect_eq(found.compared, count_elements(loaded), "%s: not all compared", path);
    cr_expect(
        !found.failed && !found.lse_failed,
        "%s: %lld elements and %lld lse beyond the bound; o[%d][%d][%d][%d] is %.9g, expected %.9g",
        path, (long long) found.failed, (long long) found.lse_failed, found.worst_sequence,
        found.worst_token, found.worst_head, found.worst_dim, found.worst_value, found.worst_exact);
    execution_free(&result);
}

static void run_file(struct attn_device *const device, const char *const path)
{
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct case_file loaded;
    cr_assert_eq(case_load(&loaded, path, NULL, NULL, why), 0, "%s", why);
    cr_assert_not_null(loaded.expected_o, "%s has no expected_o", path);
    run_loaded(device, &loaded, path);
    if (loaded.op == CASE_TILED) {
        // The same through as few slots as there can be.
        loaded.op = CASE_SWAP;
        loaded.tiled.tile_capacity = 3;
        loaded.tiled.resident_blocks = 6;
        run_loaded(device, &loaded, path);
    }
    case_free(&loaded);
}

// How many files of the operation there are.
static size_t run_op(struct attn_device *const device, const char *const folder,
                     const char *const op)
{
    char pattern[4096];
    glob_t files;
    snprintf(pattern, sizeof(pattern), "%s/*%s*.safetensors", folder, op);
    if (glob(pattern, 0, NULL, &files)) return 0;
    const size_t count = files.gl_pathc;
    for (size_t i = 0; i < count; i++) run_file(device, files.gl_pathv[i]);
    globfree(&files);
    return count;
}

static size_t run_folder(struct attn_device *const device, const char *const folder)
{
    return run_op(device, folder, "decode") + run_op(device, folder, "ctm") +
           run_op(device, folder, "prefill") + run_op(device, folder, "tiled");
}

Test(cases, real_ones_meet_their_expected_values, .timeout = 100)
{
    const char *const data = getenv("ATTN_TEST_DATA"), *const more = getenv("ATTN_CASE_DIR");
    char golden[4096];
    struct attn_device *device = open_host();
    cr_assert_not_null(data, "ATTN_TEST_DATA is not set");
    cr_expect_gt(run_folder(device, data), 0, "%s has no cases", data);
    snprintf(golden, sizeof(golden), "%s/../golden", data);
    run_folder(device, golden);
    if (more) cr_expect_gt(run_folder(device, more), 0, "%s has no cases", more);
    attn_device_close(&device);
}

// A copy of the real case with one value changed has to be found wrong: the check can fail.
Test(cases, a_wrong_expected_value_is_noticed)
{
    char path[4096], why[SAFETENSORS_WHY_SIZE] = "";
    struct attn_device *device = open_host();
    struct case_file loaded;
    struct execution result;
    struct attn_check found;
    const char *const data = getenv("ATTN_TEST_DATA");
    cr_assert_not_null(data, "ATTN_TEST_DATA is not set");
    snprintf(path, sizeof(path), "%s/smollm2_decode_bf16_page16.safetensors", data);
    cr_assert_eq(case_load(&loaded, path, NULL, NULL, why), 0, "%s", why);
    cr_assert_eq(execute_case(device, NULL, &loaded, &result, why, sizeof(why)), ATTN_OK, "%s",
                 why);
    loaded.expected_o[7] *= 1.02;
    loaded.expected_lse[3] += 1e-4;
    cr_assert_eq(attn_check_decode_expected(&loaded.params, result.o, result.lse, loaded.expected_o,
                                            loaded.expected_lse, ATTN_CHECK_HOST, &found),
                 0);
    cr_expect_eq(found.failed, 1);
    cr_expect_eq(found.lse_failed, 1);
    cr_expect_eq(found.worst_dim, 7);
    execution_free(&result);
    case_free(&loaded);
    attn_device_close(&device);
}

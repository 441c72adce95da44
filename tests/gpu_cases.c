/* SPDX-License-Identifier: Apache-2.0 */
// Case files of real models on the GPU, against the values in the files, which come from another
// program. ATTN_CASE_DIR names a folder with more of them. Exits with 77 where no GPU fits a pack.
#include "attn/attn.h"
#include "cli/case.h"
#include "cli/execute.h"
#include "cli/gpu.h"
#include "host/check.h"

#include <criterion/criterion.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static struct attn_device *open_device(void)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device = NULL;
    params.kind = ATTN_DEVICE_ORDINAL;
    if (attn_device_open(&device, &params) != ATTN_OK) return NULL;
    return device;
}

// 1 if the file was run; 0 where this target has no kernel for it.
static size_t run_file(struct attn_device *const device, struct gpu *const gpu,
                       const char *const path)
{
    char why[SAFETENSORS_WHY_SIZE] = "";
    struct case_file loaded;
    struct execution result;
    struct attn_check found;
    cr_assert_eq(case_load(&loaded, path, NULL, NULL, why), 0, "%s", why);
    cr_assert_not_null(loaded.expected_o, "%s has no expected_o", path);
    const enum attn_status status = execute_case(device, gpu, &loaded, &result, why, sizeof(why));
    if (status == ATTN_ERROR_UNSUPPORTED) {
        cr_log_info("%s: %s", path, why);
        case_free(&loaded);
        return 0;
    }
    cr_assert_eq(status, ATTN_OK, "%s: %s", path, why);
    cr_expect_eq(result.fault, INT32_MAX, "%s: sequence %d is faulty", path, result.fault);
    cr_assert_eq(attn_check_decode_expected(&loaded.params, result.o, result.lse, loaded.expected_o,
                                            loaded.expected_lse, ATTN_CHECK_KERNEL, &found),
                 0);
    cr_expect(
        !found.failed && !found.lse_failed,
        "%s: kernel %s: %lld elements and %lld lse beyond the bound; o[%d][%d][%d][%d] is %.9g, expected "
        "%.9g",
        path, result.kernel, (long long) found.failed, (long long) found.lse_failed,
        found.worst_sequence, found.worst_token, found.worst_head, found.worst_dim,
        found.worst_value, found.worst_exact);
    cr_log_info("%s: kernel %s: at most %.3f of the bound", path, result.kernel, found.max_ratio);
    execution_free(&result);
    case_free(&loaded);
    return 1;
}

static size_t run_op(struct attn_device *const device, struct gpu *const gpu,
                     const char *const folder, const char *const op)
{
    char pattern[4096];
    size_t count = 0;
    glob_t files;
    snprintf(pattern, sizeof(pattern), "%s/*%s*.safetensors", folder, op);
    if (glob(pattern, 0, NULL, &files)) return 0;
    for (size_t i = 0; i < files.gl_pathc; i++) count += run_file(device, gpu, files.gl_pathv[i]);
    globfree(&files);
    return count;
}

static size_t run_folder(struct attn_device *const device, struct gpu *const gpu,
                         const char *const folder)
{
    return run_op(device, gpu, folder, "decode") + run_op(device, gpu, folder, "ctm") +
           run_op(device, gpu, folder, "tiled");
}

Test(cases, real_ones_meet_their_expected_values, .timeout = 300)
{
    const char *const data = getenv("ATTN_TEST_DATA"), *const more = getenv("ATTN_CASE_DIR");
    char golden[4096], why[512] = "";
    struct gpu *gpu;
    cr_assert_not_null(data, "ATTN_TEST_DATA is not set");
    cr_assert_eq(gpu_open(&gpu, 0, why, sizeof(why)), 0, "%s", why);
    struct attn_device *device = open_device();
    cr_assert_not_null(device, "%s", attn_last_error());
    cr_expect_gt(run_folder(device, gpu, data), 0, "nothing in %s was run", data);
    snprintf(golden, sizeof(golden), "%s/../golden", data);
    run_folder(device, gpu, golden);
    if (more) cr_expect_gt(run_folder(device, gpu, more), 0, "nothing in %s was run", more);
    attn_device_close(&device);
    gpu_close(&gpu);
}

// In a process of its own: a CUDA context does not survive the forks of the tests. 0, or 77: a
// skip.
static int probe_device(void)
{
    int status = 0;
    const pid_t child = fork();
    if (!child) {
        struct attn_device *device = open_device();
        if (!device) fprintf(stderr, "skipped: %s\n", attn_last_error());
        const int usable = device != NULL;
        attn_device_close(&device);
        _exit(usable ? 0 : 77);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 1;
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    const int probed = probe_device();
    if (probed) return probed;
    struct criterion_test_set *const tests = criterion_initialize();
    int result = 0;
    if (criterion_handle_args(argc, argv, true)) result = !criterion_run_all_tests(tests);
    criterion_finalize(tests);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
// Opening, describing and closing devices, on a fake driver and fake packs.
#include "attn/attn.h"
#include "device.h"
#include "pack_scan.h"
#include "status.h"
#include "support/fake_driver.h"
#include "support/pack_folder.h"

#include <criterion/criterion.h>
#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Sentences received, one after another.
struct log {
    char text[16384];
    int errors, warnings;
};

static struct log heard;

static void hear(void *const user, const enum attn_log_level level, const char *const sentence)
{
    struct log *const log = user;
    const size_t used = strlen(log->text);
    snprintf(log->text + used, sizeof(log->text) - used, "%s\n", sentence);
    log->errors += level == ATTN_LOG_ERROR;
    log->warnings += level == ATTN_LOG_WARNING;
}

static const char *folder;

static void set_up(void)
{
    unsetenv("METRALE_ATTN_DECODE_SPLITK");
    unsetenv("METRALE_ATTN_DECODE_GQA_PACK");
    unsetenv("ATTN_PACK_PATH");
    fake_driver_install();
    heard = (struct log){ 0 };
    folder = pack_folder_make();
    cr_assert_not_null(folder);
}

static void add_pack(const char *const kind, const char *const name)
{
    cr_assert_eq(pack_folder_add(kind, name, SIZE_MAX), 0, "fake pack %s", kind);
}

static struct attn_device_open_params open_params(const enum attn_device_kind kind)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = kind;
    params.pack_dir = folder;
    params.log = hear;
    params.log_user = &heard;
    return params;
}

// Opens, and expects that status; a failure has a sentence, no handle, and everything undone.
static struct attn_device *open_expecting(const struct attn_device_open_params *const params,
                                          const enum attn_status expected)
{
    struct attn_device *device = (struct attn_device *) &heard;
    const enum attn_status status = attn_device_open(&device, params);
    cr_expect_eq(status, expected, "%s instead of %s: %s", attn_status_name(status),
                 attn_status_name(expected), attn_last_error());
    if (status == ATTN_OK) {
        cr_expect_str_empty(attn_last_error());
        return device;
    }
    cr_expect_null(device);
    cr_expect_str_not_empty(attn_last_error());
    cr_expect(fake_driver_balanced(), "not undone after: %s", attn_last_error());
    cr_expect_eq(fake.num_launches, 0);
    return NULL;
}

static void expect_sentence(const char *const part)
{
    cr_expect(strstr(attn_last_error(), part), "'%s' is not in: %s", part, attn_last_error());
}

static void expect_heard(const char *const part)
{
    cr_expect(strstr(heard.text, part), "'%s' is not in: %s", part, heard.text);
}

TestSuite(status);
TestSuite(device, .init = set_up, .fini = pack_folder_remove);
TestSuite(target, .init = set_up, .fini = pack_folder_remove);

Test(status, names_everything)
{
    cr_expect_str_eq(attn_version(), "0.1.0");
    cr_expect_str_eq(attn_status_name(ATTN_ERROR_NO_PACK), "ATTN_ERROR_NO_PACK");
    cr_expect_str_eq(attn_status_name((enum attn_status) 77), "unknown status");
    cr_expect_str_eq(attn_dtype_name(ATTN_DTYPE_E4M3), "e4m3");
    cr_expect_str_eq(attn_dtype_name((enum attn_dtype) - 1), "unknown");
    cr_expect_eq(attn_dtype_size(ATTN_DTYPE_BF16), 2);
    cr_expect_eq(attn_dtype_size(ATTN_DTYPE_E4M3), 1);
    cr_expect_eq(attn_dtype_size(ATTN_DTYPE_FP32), 4);
    cr_expect_eq(attn_dtype_size(ATTN_DTYPE_NONE), 0);
    cr_expect_eq(attn_dtype_size((enum attn_dtype) 1000), 0);
}

Test(status, cuts_long_sentences)
{
    char text[3000];
    memset(text, 'x', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    cr_expect_eq(attn_fail(hear, &heard, ATTN_ERROR_IO, "%s", text), ATTN_ERROR_IO);
    cr_expect_eq(strlen(attn_last_error()), ATTN_SENTENCE_SIZE - 1);
    attn_error_clear();
    cr_expect_str_empty(attn_last_error());
}

Test(device, refuses_bad_arguments)
{
    struct attn_device *device;
    struct attn_device_open_params params = open_params(ATTN_DEVICE_HOST);
    cr_expect_eq(attn_device_open(NULL, &params), ATTN_ERROR_INVALID);
    expect_sentence("device is NULL");
    cr_expect_eq(attn_device_open(&device, NULL), ATTN_ERROR_INVALID);
    expect_sentence("params is NULL");
    params.size = 3;
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("size is 3");
    params.size = UINT32_MAX;
    open_expecting(&params, ATTN_ERROR_INVALID);
    params = open_params((enum attn_device_kind) 0);
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("kind is 0");
    params.kind = (enum attn_device_kind) 5;
    open_expecting(&params, ATTN_ERROR_INVALID);
    params = open_params(ATTN_DEVICE_ORDINAL);
    params.ordinal = -1;
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("ordinal is -1");
    params = open_params(ATTN_DEVICE_HOST);
    params.grid_limit = -2;
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("grid_limit is -2");
    params = open_params(ATTN_DEVICE_HOST);
    params.splitk_policy = "chunk:65";
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("chunk:65");
    params = open_params(ATTN_DEVICE_TARGET);
    open_expecting(&params, ATTN_ERROR_INVALID);
    expect_sentence("target is missing");
    cr_expect_eq(heard.errors, 6, "%s", heard.text);
    cr_expect_eq(fake.num_calls, 0);
}

Test(device, takes_params_of_every_size)
{
    struct {
        struct attn_device_open_params params;
        unsigned char beyond[16];
    } newer = { .params = open_params(ATTN_DEVICE_HOST) };
    // What lies beyond an older struct isn't its own: this policy, which does not parse, is read by
    // the newest alone.
    newer.params.splitk_policy = "nonsense";
    newer.params.log = NULL;
    static const uint32_t sizes[] = {
        offsetof(struct attn_device_open_params, ordinal),
        offsetof(struct attn_device_open_params, grid_limit),
        offsetof(struct attn_device_open_params, target),
        offsetof(struct attn_device_open_params, pack_dir),
        offsetof(struct attn_device_open_params, splitk_policy),
        offsetof(struct attn_device_open_params, log),
        offsetof(struct attn_device_open_params, log_user),
        sizeof(struct attn_device_open_params),
    };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        newer.params.size = sizes[i];
        const bool has_policy = sizes[i] > offsetof(struct attn_device_open_params, splitk_policy);
        struct attn_device *device =
            open_expecting(&newer.params, has_policy ? ATTN_ERROR_INVALID : ATTN_OK);
        attn_device_close(&device);
    }
    newer.params.size = 4;
    open_expecting(&newer.params, ATTN_ERROR_INVALID);
    expect_sentence("kind is 0");
    newer.params.splitk_policy = NULL;
    newer.params.size = sizeof(newer);
    struct attn_device *device = open_expecting(&newer.params, ATTN_OK);
    attn_device_close(&device);
    newer.beyond[15] = 1;
    open_expecting(&newer.params, ATTN_ERROR_INVALID);
    expect_sentence("nonzero byte");
}

Test(device, opens_the_host)
{
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_HOST);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    cr_assert_eq(attn_device_describe(device, &info), ATTN_OK);
    cr_expect_str_eq(info.name, "host executor");
    cr_expect_eq(info.kind, ATTN_DEVICE_HOST);
    cr_expect_eq(info.splitk_policy.kind, ATTN_SPLITK_CHUNK);
    cr_expect_eq(info.splitk_source, ATTN_SOURCE_DECLARED);
    cr_expect_eq(info.batch_invariant, 1);
    cr_expect_eq(info.num_kernels, 0);
    cr_expect_null(attn_device_kernel(device, 0));
    cr_expect_eq(fake.num_calls, 0);
    attn_device_close(&device);
    cr_expect_null(device);
    attn_device_close(&device);
    attn_device_close(NULL);
}

Test(device, describes_no_more_than_asked)
{
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_HOST);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info;
    memset(&info, 0xAB, sizeof(info));
    info.size = 12;
    cr_expect_eq(attn_device_describe(device, &info), ATTN_OK);
    cr_expect_eq(info.size, 12);
    cr_expect_eq(memcmp(info.name, "host", 4), 0);
    cr_expect_eq((unsigned char) info.name[4], 0xAB);
    info.size = 0;
    cr_expect_eq(attn_device_describe(device, &info), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_device_describe(NULL, &info), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_device_describe(device, NULL), ATTN_ERROR_INVALID);
    expect_sentence("info is NULL");
    attn_device_close(&device);
}

Test(device, takes_settings_from_caller_environment_target)
{
    setenv("METRALE_ATTN_DECODE_SPLITK", "legacy", 1);
    setenv("METRALE_ATTN_DECODE_GQA_PACK", "yes", 1);
    struct attn_device_open_params params = open_params(ATTN_DEVICE_HOST);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    attn_device_describe(device, &info);
    cr_expect_eq(info.splitk_policy.kind, ATTN_SPLITK_LEGACY);
    cr_expect_eq(info.splitk_source, ATTN_SOURCE_ENVIRONMENT);
    cr_expect_eq(info.batch_invariant, 0);
    cr_expect_eq(info.gqa_pack, 1);
    cr_expect_eq(info.gqa_pack_source, ATTN_SOURCE_ENVIRONMENT);
    attn_device_close(&device);

    params.splitk_policy = "5";
    device = open_expecting(&params, ATTN_OK);
    attn_device_describe(device, &info);
    cr_expect_eq(info.splitk_policy.count, 5);
    cr_expect_eq(info.splitk_source, ATTN_SOURCE_CALLER);
    attn_device_close(&device);
    cr_expect_eq(heard.warnings, 0, "%s", heard.text);
}

Test(device, warns_about_unusable_environment)
{
    setenv("METRALE_ATTN_DECODE_SPLITK", "sometimes", 1);
    setenv("METRALE_ATTN_DECODE_GQA_PACK", "maybe", 1);
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_HOST);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    cr_expect_eq(heard.warnings, 2);
    expect_heard("METRALE_ATTN_DECODE_SPLITK is 'sometimes'");
    expect_heard("METRALE_ATTN_DECODE_GQA_PACK is 'maybe'");
    attn_device_close(&device);
}

Test(device, opens_a_gpu_and_gives_everything_back)
{
    add_pack("hopper", "libattn-hopper.so");
    add_pack("gb10", "libattn-gb10.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    cr_assert_eq(attn_device_describe(device, &info), ATTN_OK);
    cr_expect_str_eq(info.name, "Fake H200");
    cr_expect_str_eq(info.target, "hopper");
    cr_expect_str_eq(info.arch, "sm_90a");
    cr_expect(strstr(info.pack_path, "/libattn-hopper.so"));
    cr_expect_eq(info.compute_capability_major, 9);
    cr_expect_eq(info.sm_count, 132);
    cr_expect_eq(info.declared_sm_count, 132);
    cr_expect_eq(info.driver_version, 13000);
    const int32_t kernels = (int32_t) device->pack->num_rows;
    cr_expect(kernels > 9 && info.num_kernels == kernels);
    cr_expect_str_eq(attn_device_kernel(device, 1), "decode_bf16_bf16_d128_r64");
    cr_expect_null(attn_device_kernel(device, kernels));
    cr_expect_null(attn_device_kernel(device, -1));
    // Every kernel is loaded and has its shared memory; nothing is left for the first call.
    cr_expect_eq(fake.functions_loaded, kernels);
    cr_expect_eq(fake.functions_set, kernels);
    int32_t largest = 0;
    for (uint32_t i = 0; i < device->pack->num_rows; i++) {
        const int32_t smem = attn_pack_row_smem(&device->pack->rows[i]);
        if (smem > largest) largest = smem;
    }
    cr_expect_eq(fake.largest_smem, largest);
    cr_expect_eq(fake.pushes, 1);
    cr_expect_eq(fake.pops, 1);
    cr_expect_eq(heard.warnings, 0, "%s", heard.text);
    expect_heard("sm_121a needs exactly compute capability 12.1");
    attn_device_close(&device);
    cr_expect(fake_driver_balanced());
    cr_expect_eq(fake.unloads, 1);
    cr_expect_eq(fake.releases, 1);
}

Test(device, opens_the_current_context)
{
    add_pack("hopper", "libattn-hopper.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_CURRENT);
    open_expecting(&params, ATTN_ERROR_NO_DEVICE);
    expect_sentence("no CUDA context is current");
    fake.current = fake_primary_context(0);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    cr_expect_eq(fake.retains, 0);
    cr_expect_eq(fake.pushes, 0);
    attn_device_close(&device);
    cr_expect(fake_driver_balanced());
    cr_expect_eq(fake.current, fake_primary_context(0));
}

Test(device, says_what_it_could_not_learn_of_the_current_context)
{
    static const struct {
        const char *symbol, *sentence;
    } cases[] = {
        { "cuCtxGetCurrent", "the current CUDA context cannot be read" },
        { "cuCtxGetDevice", "the GPU of the current context cannot be read" },
    };
    add_pack("hopper", "libattn-hopper.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_CURRENT);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake_driver_install();
        fake.current = fake_primary_context(0);
        fake.fail_symbol = cases[i].symbol;
        fake.fail_at = 1;
        fake.fail_code = 999;
        open_expecting(&params, ATTN_ERROR_DRIVER);
        expect_sentence(cases[i].sentence);
    }
}

Test(device, warns_of_a_declared_policy_that_is_none)
{
    add_pack("policy", "libattn-hopper.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    cr_expect_eq(heard.warnings, 1, "%s", heard.text);
    expect_heard("declares the split-K policy 'fast', which is none");
    struct attn_device_info info = { .size = sizeof(info) };
    cr_expect_eq(attn_device_describe(device, &info), ATTN_OK);
    cr_expect_eq(info.splitk_policy.kind, ATTN_SPLITK_LEGACY);
    cr_expect_eq(info.batch_invariant, 0);
    attn_device_close(&device);
}

Test(device, refuses_an_ordinal_that_is_not_there)
{
    add_pack("hopper", "libattn-hopper.so");
    struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    params.ordinal = 1;
    open_expecting(&params, ATTN_ERROR_NO_DEVICE);
    expect_sentence("ordinal is 1");
    fake.num_gpus = 0;
    params.ordinal = 0;
    open_expecting(&params, ATTN_ERROR_NO_DEVICE);
}

Test(device, refuses_an_old_driver)
{
    add_pack("hopper", "libattn-hopper.so");
    fake.version = 12090;
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    open_expecting(&params, ATTN_ERROR_DRIVER);
    expect_sentence("CUDA 12.9");
    expect_sentence("CUDA 13.0 or newer is needed");
    cr_expect_eq(fake.retains, 0);
}

// Which of the targets fits which compute capability; nothing is loaded where none does.
Test(device, takes_the_pack_of_the_compute_capability)
{
    static const char *const targets[] = { "b200", "b300", "gb10", "hopper" };
    static const struct {
        int major, minor;
        const char *target;
    } cases[] = {
        { 9, 0, "hopper" }, { 10, 0, "b200" }, { 10, 3, "b300" }, { 11, 0, NULL },
        { 12, 0, NULL },    { 12, 1, "gb10" }, { 13, 0, NULL },   { 8, 0, NULL },
    };
    for (size_t i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof(name), "libattn-%s.so", targets[i]);
        add_pack(targets[i], name);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake_driver_install();
        fake.gpus[0].major = cases[i].major;
        fake.gpus[0].minor = cases[i].minor;
        const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
        if (!cases[i].target) {
            open_expecting(&params, ATTN_ERROR_NO_PACK);
            char capability[32];
            snprintf(capability, sizeof(capability), "(compute capability %d.%d)", cases[i].major,
                     cases[i].minor);
            expect_sentence(capability);
            expect_sentence("hopper: ");
            cr_expect_eq(fake.loads + fake.retains, 0);
            continue;
        }
        struct attn_device *device = open_expecting(&params, ATTN_OK);
        struct attn_device_info info = { .size = sizeof(info) };
        cr_assert_eq(attn_device_describe(device, &info), ATTN_OK);
        cr_expect_str_eq(info.target, cases[i].target);
        attn_device_close(&device);
    }
}

Test(device, takes_the_first_name_if_two_packs_fit)
{
    add_pack("hopper", "libattn-b.so");
    add_pack("hopper", "libattn-a.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    attn_device_describe(device, &info);
    cr_expect(strstr(info.pack_path, "/libattn-a.so"), "%s", info.pack_path);
    cr_expect_eq(heard.warnings, 1, "%s", heard.text);
    expect_heard("both fit Fake H200");
    attn_device_close(&device);
}

Test(device, warns_if_the_sm_count_is_another)
{
    add_pack("hopper", "libattn-hopper.so");
    fake.gpus[0].sm_count = 114;
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    attn_device_describe(device, &info);
    cr_expect_eq(info.sm_count, 114);
    cr_expect_eq(info.declared_sm_count, 132);
    cr_expect_eq(heard.warnings, 1, "%s", heard.text);
    expect_heard("has 114 SMs");
    attn_device_close(&device);
}

Test(device, refuses_a_gpu_with_too_little_shared_memory)
{
    add_pack("hopper", "libattn-hopper.so");
    fake.gpus[0].smem_optin = 30000;
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    open_expecting(&params, ATTN_ERROR_NO_PACK);
    expect_sentence("offers 30000");
    cr_expect_eq(fake.loads + fake.retains, 0);
}

// Each call of the driver fails in turn, with each kind of error: the status is the error's, the
// sentence names it, and whatever was taken before is given back.
Test(device, undoes_a_half_open_device)
{
    static const struct {
        attn_cu_result code;
        enum attn_status status;
    } errors[] = {
        { ATTN_CU_ERROR_OUT_OF_MEMORY, ATTN_ERROR_NO_MEMORY },
        { ATTN_CU_ERROR_NO_DEVICE, ATTN_ERROR_NO_DEVICE },
        { ATTN_CU_ERROR_INVALID_DEVICE, ATTN_ERROR_NO_DEVICE },
        { ATTN_CU_ERROR_INVALID_IMAGE, ATTN_ERROR_DRIVER },
        { ATTN_CU_ERROR_NO_BINARY_FOR_GPU, ATTN_ERROR_DRIVER },
        { ATTN_CU_ERROR_NOT_FOUND, ATTN_ERROR_DRIVER },
        { 999, ATTN_ERROR_DRIVER },
    };
    // Not called, or of no consequence, while a device is opened by ordinal.
    static const char *const other[] = {
        "cuGetErrorName",         "cuCtxGetDevice",
        "cuLaunchKernelEx",       "cuMemsetD32Async",
        "cuTensorMapEncodeTiled", "cuCtxPopCurrent_v2",
        "cuLibraryUnload",        "cuDevicePrimaryCtxRelease_v2",
    };
    add_pack("hopper", "libattn-hopper.so");
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    int tried = 0;
    for (size_t i = 0; fake_driver_symbols[i]; i++) {
        bool skip = false;
        for (size_t j = 0; j < sizeof(other) / sizeof(other[0]); j++)
            skip |= strcmp(fake_driver_symbols[i], other[j]) == 0;
        for (size_t j = 0; !skip && j < sizeof(errors) / sizeof(errors[0]); j++) {
            // Some calls are made once for each of the kernels or attributes.
            for (int at = 1; at <= 4; at++) {
                fake_driver_install();
                fake.fail_symbol = fake_driver_symbols[i];
                fake.fail_at = at;
                fake.fail_code = errors[j].code;
                struct attn_device *device = NULL;
                const enum attn_status status = attn_device_open(&device, &params);
                if (fake.num_failed == 0) {
                    cr_expect(status == ATTN_OK && at > 1, "%s", fake_driver_symbols[i]);
                    attn_device_close(&device);
                    continue;
                }
                char code[16];
                snprintf(code, sizeof(code), "(%d)", errors[j].code);
                cr_expect_eq(status, errors[j].status, "%s: %s", fake_driver_symbols[i],
                             attn_last_error());
                expect_sentence(code);
                cr_expect_null(device);
                cr_expect(fake_driver_balanced(), "%s, call %d", fake_driver_symbols[i], at);
                tried++;
            }
        }
    }
    // 10 calls once, 5 of them four times.
    cr_expect_geq(tried, 25 * (int) (sizeof(errors) / sizeof(errors[0])));
}

Test(device, opens_a_target_without_a_gpu)
{
    add_pack("gb10", "libattn-gb10.so");
    add_pack("hopper", "libattn-hopper.so");
    fake.num_gpus = 0;
    struct attn_device_open_params params = open_params(ATTN_DEVICE_TARGET);
    params.target = "gb10";
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    struct attn_device_info info = { .size = sizeof(info) };
    attn_device_describe(device, &info);
    cr_expect_str_eq(info.name, "gb10");
    cr_expect_eq(info.compute_capability_major, 12);
    cr_expect_eq(info.compute_capability_minor, 1);
    cr_expect_eq(info.sm_count, 48);
    cr_expect_eq(info.smem_per_block, 101376);
    cr_expect_eq(info.splitk_policy.kind, ATTN_SPLITK_LEGACY);
    cr_expect_eq(info.batch_invariant, 0);
    cr_expect_eq(fake.num_calls, 0);
    attn_device_close(&device);
    params.target = "b200";
    open_expecting(&params, ATTN_ERROR_NO_PACK);
    expect_sentence("'b200'");
}

Test(device, says_why_there_is_no_pack)
{
    struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    open_expecting(&params, ATTN_ERROR_NO_PACK);
    expect_sentence("no packs were found");
    params.pack_dir = "/nonexistent/packs";
    open_expecting(&params, ATTN_ERROR_IO);
    expect_sentence("/nonexistent/packs");
    params.pack_dir = NULL;
    setenv("ATTN_PACK_PATH", "/nonexistent/elsewhere", 1);
    open_expecting(&params, ATTN_ERROR_NO_PACK);
    expect_sentence("ATTN_PACK_PATH: the folder cannot be read");
    setenv("ATTN_PACK_PATH", folder, 1);
    add_pack("hopper", "libattn-hopper.so");
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    attn_device_close(&device);
}

// What a scan saw.
struct seen {
    int count, sound;
    char names[1024];
    char reason[512];
    enum attn_status status;
};

static void see(void *const user, const struct attn_target_info *const info)
{
    struct seen *const seen = user;
    const size_t used = strlen(seen->names);
    snprintf(seen->names + used, sizeof(seen->names) - used, "%s ", info->name);
    snprintf(seen->reason, sizeof(seen->reason), "%s", info->reason);
    seen->status = info->status;
    seen->count++;
    seen->sound += info->status == ATTN_OK;
    cr_expect_eq(info->status == ATTN_OK, info->reason[0] == '\0');
    cr_expect(info->status != ATTN_ERROR_IO || (info->num_kernels == 0 && info->arch[0] == '\0'));
}

static struct seen scan(const int32_t major, const int32_t minor)
{
    struct seen seen = { 0 };
    const enum attn_status status = attn_target_scan(folder, major, minor, see, &seen);
    cr_expect_eq(status, ATTN_OK, "%s", attn_last_error());
    return seen;
}

Test(target, scans_in_order_of_names)
{
    add_pack("hopper", "libattn-hopper.so");
    add_pack("b200", "libattn-b200.so");
    add_pack("gb10", "libattn-gb10.so");
    add_pack("gb10", "other.so");
    add_pack("gb10", "libattn-.so");
    add_pack("gb10", "libattn-x.so.1");
    const struct seen all = scan(0, 0);
    cr_expect_str_eq(all.names, "b200 gb10 hopper ");
    cr_expect_eq(all.sound, 3);
    cr_expect_eq(scan(9, 0).sound, 1);
    cr_expect_eq(scan(9, 9).sound, 0);
    cr_expect_eq(attn_target_scan(folder, 0, 0, NULL, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_target_scan(folder, -1, 0, see, NULL), ATTN_ERROR_INVALID);
    cr_expect_eq(attn_target_scan("/nonexistent/packs", 0, 0, see, NULL), ATTN_ERROR_IO);
    expect_sentence("/nonexistent/packs");
}

Test(target, follows_the_arch_rule)
{
    static const struct {
        const char *kind;
        int32_t major, minor;
        bool fits;
    } cases[] = {
        { "b200", 10, 0, true },   { "b200", 10, 3, false },  { "b200", 11, 0, false },
        { "family", 10, 0, true }, { "family", 10, 3, true }, { "family", 11, 0, false },
        { "family", 9, 0, false }, { "plain", 10, 0, true },  { "plain", 10, 3, true },
        { "plain", 12, 1, true },  { "plain", 9, 0, false },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        add_pack(cases[i].kind, "libattn-it.so");
        const struct seen seen = scan(cases[i].major, cases[i].minor);
        cr_expect_eq(seen.status, cases[i].fits ? ATTN_OK : ATTN_ERROR_NO_PACK, "%s on %d.%d: %s",
                     cases[i].kind, cases[i].major, cases[i].minor, seen.reason);
    }
}

Test(target, skips_unsound_packs_with_a_sentence)
{
    static const struct {
        const char *kind, *sentence;
    } cases[] = {
        { "abi", "ABI 1, this library needs 8" },
        { "size", "have 8 and" },
        { "row_size", "and 4 bytes" },
        { "arch", "disagree" },
        { "nameless", "one of its names is missing" },
        { "declared", "it declares 0 SMs" },
        { "empty", "it has 0 kernels" },
        { "magic", "no whole fatbin" },
        { "body", "no whole fatbin" },
        { "tile", "row 0" },
        { "warps", "row 0" },
        { "per_sm", "row 0" },
        { "levels", "row 0" },
        // The first tiled one.
        { "stages", "row 1" },
        { "smem", "shared memory" },
        { "foreign", "no symbol attn_pack" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        add_pack(cases[i].kind, "libattn-it.so");
        const struct seen seen = scan(0, 0);
        cr_expect_eq(seen.status, ATTN_ERROR_IO, "%s", cases[i].kind);
        cr_expect_str_eq(seen.names, "libattn-it.so ");
        cr_expect(strstr(seen.reason, cases[i].sentence), "%s: %s", cases[i].kind, seen.reason);
    }
}

Test(target, skips_what_is_no_readable_file)
{
    char path[2048];
    snprintf(path, sizeof(path), "%s/libattn-it.so", folder);
    cr_assert_eq(symlink("/nonexistent/pack", path), 0);
    struct seen seen = scan(0, 0);
    cr_expect(seen.count == 1 && seen.status == ATTN_ERROR_IO);
    cr_expect(strstr(seen.reason, "cannot be read"), "%s", seen.reason);
    cr_assert_eq(remove(path), 0);
    // Whose opening would wait for a writer.
    cr_assert_eq(mkfifo(path, 0600), 0);
    seen = scan(0, 0);
    cr_expect(seen.count == 1 && seen.status == ATTN_ERROR_IO);
    cr_expect(strstr(seen.reason, "not a regular file"), "%s", seen.reason);
}

Test(target, skips_paths_that_are_too_long)
{
    enum {
        PART = 200
    };
    char path[2048];
    size_t length = (size_t) snprintf(path, sizeof(path), "%s", folder);
    while (length + 1 + PART < 1020) {
        path[length] = '/';
        memset(path + length + 1, 'x', PART);
        length += 1 + PART;
        path[length] = '\0';
        cr_assert_eq(mkdir(path, 0700), 0);
    }
    char file[4096];
    snprintf(file, sizeof(file), "%s/libattn-%0*d.so", path, PART, 0);
    cr_assert_eq(symlink("/nonexistent/pack", file), 0);
    struct seen seen = { 0 };
    cr_expect_eq(attn_target_scan(path, 0, 0, see, &seen), ATTN_OK, "%s", attn_last_error());
    cr_expect(strstr(seen.reason, "path is longer than"), "%s", seen.reason);
    cr_expect_eq(remove(file), 0);
    for (const size_t root = strlen(folder); length > root; length -= 1 + PART) {
        path[length] = '\0';
        cr_expect_eq(remove(path), 0);
    }
}

// A bad file beside a good one is a warning, and the good one is used.
Test(target, works_beside_unsound_packs)
{
    add_pack("hopper", "libattn-hopper.so");
    add_pack("abi", "libattn-abi.so");
    char text[256];
    memset(text, 'x', sizeof(text));
    cr_assert_eq(pack_folder_write("libattn-text.so", text, sizeof(text)), 0);
    cr_assert_eq(pack_folder_write("libattn-void.so", "", 0), 0);
    cr_assert_eq(pack_folder_add("hopper", "libattn-cut.so", 3000), 0);
    const struct attn_device_open_params params = open_params(ATTN_DEVICE_ORDINAL);
    struct attn_device *device = open_expecting(&params, ATTN_OK);
    cr_expect_eq(heard.warnings, 4, "%s", heard.text);
    expect_heard("is not an ELF file");
    expect_heard("is cut short");
    attn_device_close(&device);
}

// dlopen of a file that was cut anywhere would be a SIGBUS or worse.
Test(target, survives_truncated_packs)
{
    size_t size;
    free(fake_pack_read("hopper", &size));
    for (size_t keep = 0; keep < size; keep += size / 61 + 1) {
        cr_assert_eq(pack_folder_add("hopper", "libattn-it.so", keep), 0);
        const struct seen seen = scan(0, 0);
        cr_expect_eq(seen.status, ATTN_ERROR_IO, "%zu of %zu bytes", keep, size);
    }
    cr_assert_eq(pack_folder_add("hopper", "libattn-it.so", size - 1), 0);
    cr_expect_eq(scan(0, 0).status, ATTN_ERROR_IO);
}

// Each word of the ELF header and of the segment table becomes zeros, and 0xFF: whatever comes of
// it, the process lives.
Test(target, survives_damaged_packs)
{
    size_t size;
    unsigned char *const sound = fake_pack_read("hopper", &size);
    unsigned char *const damaged = malloc(size);
    cr_assert(sound && damaged);
    int refused = 0;
    for (size_t at = 0; at < 64 + 8 * 56; at += 8) {
        for (int fill = 0; fill <= 0xFF; fill += 0xFF) {
            memcpy(damaged, sound, size);
            memset(damaged + at, fill, 8);
            cr_assert_eq(pack_folder_write("libattn-it.so", damaged, size), 0);
            const struct seen seen = scan(0, 0);
            cr_expect_eq(seen.count, 1);
            refused += seen.status == ATTN_ERROR_IO;
        }
    }
    cr_expect_geq(refused, 32);
    free(damaged);
    free(sound);
}

// Where the first segment of a type is described; its description.
static size_t find_segment(const unsigned char *const image, const uint32_t type,
                           Elf64_Phdr *const segment)
{
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof(header));
    for (int i = 0; i < header.e_phnum; i++) {
        const size_t at = header.e_phoff + (size_t) i * sizeof(*segment);
        memcpy(segment, image + at, sizeof(*segment));
        if (segment->p_type == type) return at;
    }
    cr_assert_fail("the pack has no segment of type %u", type);
    return 0;
}

// Address and size of DT_RELA, which the fake pack has for the names of its rows. Its first
// segment lies in the file as in memory.
static size_t find_relocations(const unsigned char *const image)
{
    Elf64_Phdr segment;
    Elf64_Dyn entry;
    find_segment(image, PT_DYNAMIC, &segment);
    for (size_t at = segment.p_offset;; at += sizeof(entry)) {
        memcpy(&entry, image + at, sizeof(entry));
        if (entry.d_tag == DT_NULL) return 0;
        if (entry.d_tag == DT_RELA) return entry.d_un.d_ptr;
    }
}

static void expect_unsound(const unsigned char *const image, const size_t size,
                           const char *const sentence)
{
    cr_assert_eq(pack_folder_write("libattn-it.so", image, size), 0);
    const struct seen seen = scan(0, 0);
    cr_expect_eq(seen.status, ATTN_ERROR_IO);
    cr_expect(strstr(seen.reason, sentence), "%s: %s", sentence, seen.reason);
}

Test(target, says_what_is_damaged)
{
    size_t size;
    unsigned char *const image = fake_pack_read("hopper", &size);
    cr_assert(image);
    const uint16_t program = ET_EXEC, shared = ET_DYN;
    memcpy(image + offsetof(Elf64_Ehdr, e_type), &program, sizeof(program));
    expect_unsound(image, size, "is not a shared object");
    memcpy(image + offsetof(Elf64_Ehdr, e_type), &shared, sizeof(shared));
    const size_t relocations = find_relocations(image);
    cr_assert(relocations > 0 && relocations + sizeof(Elf64_Rela) < size);
    memset(image + relocations + offsetof(Elf64_Rela, r_offset), 0xFF, sizeof(Elf64_Addr));
    expect_unsound(image, size, "has damaged relocations");
    free(image);
}

// glibc 2.35 reads notes as far as they are said to go in memory.
Test(target, refuses_notes_that_end_outside)
{
    size_t size;
    unsigned char *const image = fake_pack_read("hopper", &size);
    cr_assert(image);
    Elf64_Phdr note;
    const size_t at = find_segment(image, PT_NOTE, &note);
    note.p_memsz = UINT64_MAX;
    memcpy(image + at, &note, sizeof(note));
    expect_unsound(image, size, "has a damaged segment table");
    free(image);
}

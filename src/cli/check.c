/* SPDX-License-Identifier: Apache-2.0 */
// `attn check`: opens the GPU, which loads every kernel of its pack.
#include "cli/cli.h"

static void print_help(void)
{
    printf(
        "Usage: attn check [--json]\n\n"
        "Opens the GPU and loads every kernel of the pack that fits it. Prints how many were loaded;\n"
        "the exit status is 1 if anything failed.\n\n"
        "  --json   one JSON object\n");
}

static int check_device(const bool as_json)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device_info info = { .size = sizeof(info) };
    struct attn_device *device = NULL;
    int result = CLI_FINE;
    params.kind = ATTN_DEVICE_ORDINAL;
    params.log = cli_log;
    enum attn_status status = attn_device_open(&device, &params);
    if (status == ATTN_OK) status = attn_device_describe(device, &info);
    if (status != ATTN_OK) result = cli_fail_library();
    if (as_json) {
        const char *const sentence = status == ATTN_OK ? "" : attn_last_error();
        const int printed = cli_print_json(
            json_pack("{s:b, s:i, s:s, s:s, s:s, s:s, s:s}", "ok", status == ATTN_OK, "kernels",
                      (int) info.num_kernels, "device", info.name, "target", info.target, "pack",
                      info.pack_path, "status", attn_status_name(status), "error", sentence));
        result = result ? result : printed;
    } else if (status == ATTN_OK) {
        printf("%d kernels of %s loaded on %s: ", info.num_kernels, info.pack_path, info.name);
        cli_print_verdict(stdout, true, "ok");
        printf("\n");
    } else {
        printf("0 kernels loaded: ");
        cli_print_verdict(stdout, false, "failed");
        printf("\n");
    }
    attn_device_close(&device);
    return result;
}

int command_check(const int argc, char **const argv)
{
    bool as_json;
    int status;
    if (!cli_read_json_option("check", argc, argv, print_help, &as_json, &status)) return status;
    return check_device(as_json);
}

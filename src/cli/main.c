/* SPDX-License-Identifier: Apache-2.0 */
// The `attn` program: a command table.
#include "cli/cli.h"

#include <getopt.h>
#include <string.h>

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    { "info", command_info, "devices, packs, the policies in force" },
    { "check", command_check, "open the GPU and load every kernel" },
    { "plan", command_plan, "how a call would run, and the time its bytes take" },
    { "run", command_run, "run a case file, and check the result" },
    { "sample", command_sample, "write a case file with random tensors" },
    { "bench", command_bench, "check, then time" },
};

static void print_help(void)
{
    printf(
        "Usage: attn [--version] [--help] COMMAND ...\n\n"
        "Attention for LLM inference: runs, checks and times the kernels of libattn.\n\nCommands:\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        printf("  %-8s %s\n", commands[i].name, commands[i].summary);
    printf("\n'attn COMMAND --help' has the options of a command.\n\n"
           "Exit status: 0 fine, 1 the check or the operation failed, 2 usage.\n");
}

static int run_command(const int argc, char **const argv)
{
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (!strcmp(argv[0], commands[i].name)) return commands[i].run(argc, argv);
    return cli_usage(NULL, "there is no command '%s'", argv[0]);
}

static int run(const int argc, char **const argv)
{
    static const struct option options[] = {
        { "help", no_argument, NULL, 'h' },
        { "version", no_argument, NULL, 'V' },
        { NULL, 0, NULL, 0 },
    };
    // '+': what follows the command is the command's.
    const int option = getopt_long(argc, argv, "+h", options, NULL);
    if (option == 'h') {
        print_help();
        return CLI_FINE;
    }
    if (option == 'V') {
        printf("attn %s\n", attn_version());
        return CLI_FINE;
    }
    if (option != -1) return cli_usage(NULL, "that option is not known");
    if (optind == argc) return cli_usage(NULL, "a command is missing");
    char **const rest = argv + optind;
    const int num_rest = argc - optind;
    // 0 makes getopt start afresh.
    optind = 0;
    return run_command(num_rest, rest);
}

int main(int argc, char **argv)
{
    const int status = run(argc, argv);
    // A full disk or a closed pipe shows only now.
    if (fflush(stdout) || ferror(stdout))
        return status ? status : cli_fail("stdout cannot be written");
    return status;
}

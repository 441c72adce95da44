/* SPDX-License-Identifier: Apache-2.0 */
// What the commands of the program share. Results go to stdout, everything else to stderr.
#ifndef ATTN_CLI_CLI_H
#define ATTN_CLI_CLI_H

#include "attn/attn.h"
#include "cli/gpu.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

enum {
    CLI_FINE = 0,
    // The check or the operation failed.
    CLI_FAILED = 1,
    CLI_USAGE = 2,
};

// Each takes what follows the program's name, its own name first, and returns the exit status.
int command_info(int argc, char **argv);
int command_check(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_run(int argc, char **argv);
int command_sample(int argc, char **argv);
int command_bench(int argc, char **argv);

// "attn COMMAND: sentence" and where to find help; returns CLI_USAGE.
__attribute__((format(printf, 2, 3))) int cli_usage(const char *command, const char *format, ...);
// "attn: error: sentence"; returns CLI_FAILED.
__attribute__((format(printf, 1, 2))) int cli_fail(const char *format, ...);
// The library's own sentence of the call that just failed; returns CLI_FAILED.
int cli_fail_library(void);
__attribute__((format(printf, 1, 2))) void cli_warn(const char *format, ...);
// cli_warn, as a case_warn_fn.
void cli_warn_sentence(void *user, const char *sentence);
// An attn_log_fn: warnings to stderr. Errors are printed where they end the program.
void cli_log(void *user, enum attn_log_level level, const char *sentence);

// Results in colour on a terminal, unless NO_COLOR is set: `good` decides which.
void cli_print_verdict(FILE *out, bool good, const char *text);
// A line on stderr that the next one overwrites, on a terminal only; NULL removes it.
void cli_progress(const char *text);

// The options of a command that has --help and --json alone. False: the command is done, with
// *status.
bool cli_read_json_option(const char *command, int argc, char **argv, void (*print_help)(void),
                          bool *as_json, int *status);

// Whole numbers in decimal, all of the text. False: not one, or out of range.
bool cli_read_int(const char *text, int64_t min, int64_t max, int64_t *value);
// Finite, all of the text.
bool cli_read_float(const char *text, float *value);

// A field of a line of CSV, in quotes, to stdout.
void cli_print_quoted(const char *text);
// Prints a JSON document to stdout, and drops the reference; returns CLI_FINE or CLI_FAILED.
int cli_print_json(json_t *document);
// null where JSON has no way to write the number.
json_t *cli_json_real(double value);

enum cli_device {
    CLI_DEVICE_AUTO,
    CLI_DEVICE_HOST,
    CLI_DEVICE_GPU,
};

// "host", "gpu", "auto".
bool cli_read_device(const char *text, enum cli_device *device);

// Opens GPU 0 with its pack, or the host executor: *gpu is NULL there. AUTO: the GPU if there is
// one that works, else the host. `policy` may be NULL or "". Returns CLI_FINE, or CLI_FAILED after
// a sentence.
int cli_open_device(enum cli_device kind, const char *policy, struct attn_device **device,
                    struct gpu **gpu);
void cli_close_device(struct attn_device **device, struct gpu **gpu);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool has_colour(FILE *const out)
{
    const char *const off = getenv("NO_COLOR"), *const terminal = getenv("TERM");
    return !(off && *off) && isatty(fileno(out)) && !(terminal && !strcmp(terminal, "dumb"));
}

static void print_sentence(const char *const label, const char *const colour,
                           const char *const format, va_list args)
{
    cli_progress(NULL);
    const bool coloured = has_colour(stderr);
    fprintf(stderr, "attn: %s%s%s: ", coloured ? colour : "", label, coloured ? "\033[0m" : "");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

int cli_usage(const char *const command, const char *const format, ...)
{
    va_list args;
    fprintf(stderr, "attn%s%s: ", command ? " " : "", command ? command : "");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\nTry 'attn%s%s --help'.\n", command ? " " : "", command ? command : "");
    return CLI_USAGE;
}

int cli_fail(const char *const format, ...)
{
    va_list args;
    va_start(args, format);
    print_sentence("error", "\033[31m", format, args);
    va_end(args);
    return CLI_FAILED;
}

int cli_fail_library(void)
{
    return cli_fail("%s", attn_last_error());
}

void cli_warn(const char *const format, ...)
{
    va_list args;
    va_start(args, format);
    print_sentence("warning", "\033[33m", format, args);
    va_end(args);
}

void cli_warn_sentence(void *const user, const char *const sentence)
{
    (void) user;
    cli_warn("%s", sentence);
}

void cli_log(void *const user, const enum attn_log_level level, const char *const sentence)
{
    (void) user;
    if (level == ATTN_LOG_WARNING) cli_warn("%s", sentence);
}

void cli_print_verdict(FILE *const out, const bool good, const char *const text)
{
    const bool coloured = has_colour(out);
    fprintf(out, "%s%s%s", coloured ? good ? "\033[32m" : "\033[31m" : "", text,
            coloured ? "\033[0m" : "");
}

void cli_progress(const char *const text)
{
    if (!isatty(STDERR_FILENO)) return;
    // Back to the first column, and clear the line.
    fprintf(stderr, "\r\033[K%s", text ? text : "");
    fflush(stderr);
}

bool cli_read_json_option(const char *const command, const int argc, char **const argv,
                          void (*const print_help)(void), bool *const as_json, int *const status)
{
    static const struct option options[] = {
        { "help", no_argument, NULL, 'h' },
        { "json", no_argument, NULL, 'j' },
        { NULL, 0, NULL, 0 },
    };
    int option;
    *as_json = false;
    *status = CLI_FINE;
    while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        switch (option) {
        case 'h': print_help(); return false;
        case 'j': *as_json = true; break;
        default: *status = cli_usage(command, "that option is not known"); return false;
        }
    }
    if (optind == argc) return true;
    *status = cli_usage(command, "'%s' is one argument too many", argv[optind]);
    return false;
}

bool cli_read_int(const char *const text, const int64_t min, const int64_t max,
                  int64_t *const value)
{
    char *end;
    const char *const digits = *text == '-' ? text + 1 : text;
    if (!*digits || strspn(digits, "0123456789") != strlen(digits)) return false;
    errno = 0;
    const long long number = strtoll(text, &end, 10);
    if (errno || *end || number < min || number > max) return false;
    *value = number;
    return true;
}

bool cli_read_float(const char *const text, float *const value)
{
    char *end;
    if (!*text || strspn(text, "0123456789+-.eE") != strlen(text)) return false;
    const float number = strtof(text, &end);
    if (end == text || *end || !isfinite(number)) return false;
    *value = number;
    return true;
}

void cli_print_quoted(const char *const text)
{
    putchar('"');
    for (const char *c = text; *c; c++) {
        if (*c == '"') putchar('"');
        putchar(*c);
    }
    putchar('"');
}

int cli_print_json(json_t *const document)
{
    const int result = document ? json_dumpf(document, stdout, JSON_INDENT(2)) : -1;
    json_decref(document);
    if (result) return cli_fail("the result cannot be written as JSON");
    putchar('\n');
    return CLI_FINE;
}

json_t *cli_json_real(const double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

bool cli_read_device(const char *const text, enum cli_device *const device)
{
    static const char *const names[] = { "auto", "host", "gpu" };
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i])) continue;
        *device = (enum cli_device) i;
        return true;
    }
    return false;
}

int cli_open_device(const enum cli_device kind, const char *const policy,
                    struct attn_device **const device, struct gpu **const gpu)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    char why[512] = "";
    *device = NULL;
    *gpu = NULL;
    params.splitk_policy = policy && *policy ? policy : NULL;
    params.log = cli_log;
    if (kind != CLI_DEVICE_HOST) {
        // The library first: its sentence says what is missing.
        params.kind = ATTN_DEVICE_ORDINAL;
        const enum attn_status status = attn_device_open(device, &params);
        if (status == ATTN_OK && !gpu_open(gpu, 0, why, sizeof(why))) return CLI_FINE;
        if (status == ATTN_ERROR_INVALID || kind == CLI_DEVICE_GPU) {
            const int result = cli_fail("%s", status == ATTN_OK ? why : attn_last_error());
            attn_device_close(device);
            return result;
        }
        if (status != ATTN_ERROR_NO_DEVICE)
            cli_warn("the host executor is used: %s", status == ATTN_OK ? why : attn_last_error());
        attn_device_close(device);
    }
    params.kind = ATTN_DEVICE_HOST;
    if (attn_device_open(device, &params) != ATTN_OK) return cli_fail_library();
    return CLI_FINE;
}

void cli_close_device(struct attn_device **const device, struct gpu **const gpu)
{
    attn_device_close(device);
    gpu_close(gpu);
}

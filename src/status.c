/* SPDX-License-Identifier: Apache-2.0 */
#include "status.h"
#include "attn/version.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// Largest size a params struct may claim: what an uninitialised one claims is refused, not read.
#define MAX_STRUCT_SIZE 4096u

static _Thread_local char last_error[ATTN_SENTENCE_SIZE];

const char *attn_status_name(const enum attn_status status)
{
    switch (status) {
    case ATTN_OK: return "ATTN_OK";
    case ATTN_DECLINED: return "ATTN_DECLINED";
    case ATTN_ERROR_INVALID: return "ATTN_ERROR_INVALID";
    case ATTN_ERROR_UNSUPPORTED: return "ATTN_ERROR_UNSUPPORTED";
    case ATTN_ERROR_NO_DEVICE: return "ATTN_ERROR_NO_DEVICE";
    case ATTN_ERROR_NO_PACK: return "ATTN_ERROR_NO_PACK";
    case ATTN_ERROR_NO_MEMORY: return "ATTN_ERROR_NO_MEMORY";
    case ATTN_ERROR_DRIVER: return "ATTN_ERROR_DRIVER";
    case ATTN_ERROR_IO: return "ATTN_ERROR_IO";
    }
    return "unknown status";
}

const char *attn_dtype_name(const enum attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_DTYPE_NONE: return "none";
    case ATTN_DTYPE_BF16: return "bf16";
    case ATTN_DTYPE_FP16: return "fp16";
    case ATTN_DTYPE_E4M3: return "e4m3";
    case ATTN_DTYPE_FP32: return "fp32";
    case ATTN_DTYPE_INT32: return "int32";
    }
    return "unknown";
}

size_t attn_dtype_size(const enum attn_dtype dtype)
{
    switch (dtype) {
    case ATTN_DTYPE_NONE: return 0;
    case ATTN_DTYPE_BF16:
    case ATTN_DTYPE_FP16: return 2;
    case ATTN_DTYPE_E4M3: return 1;
    case ATTN_DTYPE_FP32:
    case ATTN_DTYPE_INT32: return 4;
    }
    return 0;
}

const char *attn_last_error(void)
{
    return last_error;
}

void attn_error_clear(void)
{
    last_error[0] = '\0';
}

enum attn_status attn_fail(const attn_log_fn log, void *const user, const enum attn_status status,
                           const char *const format, ...)
{
    // Not straight into last_error: an argument may point there.
    char sentence[ATTN_SENTENCE_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    memcpy(last_error, sentence, sizeof(sentence));
    if (log) log(user, ATTN_LOG_ERROR, last_error);
    return status;
}

void attn_report(const attn_log_fn log, void *const user, const enum attn_log_level level,
                 const char *const format, ...)
{
    if (!log) return;
    char sentence[ATTN_SENTENCE_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    log(user, level, sentence);
}

enum attn_status attn_params_copy(const attn_log_fn log, void *const user, const char *const name,
                                  void *const to, const size_t size, const void *const from)
{
    uint32_t given;
    memcpy(&given, from, sizeof(given));
    ATTN_REQUIRE(log, user, given >= sizeof(given) && given <= MAX_STRUCT_SIZE,
                 "%s->size is %u: it has to be the sizeof of the struct, here %zu", name, given,
                 size);
    const unsigned char *const bytes = from;
    for (size_t i = size; i < given; i++)
        ATTN_REQUIRE(
            log, user, bytes[i] == 0,
            "%s has a nonzero byte at offset %zu, beyond the %zu bytes this library knows: it "
            "asks for something newer than version %s",
            name, i, size, attn_version());
    memset(to, 0, size);
    memcpy(to, from, given < size ? given : size);
    return ATTN_OK;
}

enum attn_status attn_result_copy(const attn_log_fn log, void *const user, const char *const name,
                                  void *const to, const void *const from, const size_t size)
{
    uint32_t given;
    memcpy(&given, to, sizeof(given));
    ATTN_REQUIRE(log, user, given >= sizeof(given),
                 "%s->size is %u: set it to the sizeof of the struct, here %zu", name, given, size);
    const size_t bytes = given < size ? given : size;
    memcpy((unsigned char *) to + sizeof(given), (const unsigned char *) from + sizeof(given),
           bytes - sizeof(given));
    return ATTN_OK;
}

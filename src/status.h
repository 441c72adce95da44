/* SPDX-License-Identifier: Apache-2.0 */
// Sentences: this thread's last error, and the log callback.
#ifndef ATTN_SRC_STATUS_H
#define ATTN_SRC_STATUS_H

#include "attn/log.h"

// Room for a sentence, its end included; longer ones are cut.
#define ATTN_SENTENCE_SIZE 1024

// Forgets this thread's last error: the first thing in each public call that returns a status.
void attn_error_clear(void);

// Makes the sentence this thread's last error, hands it to `log` (may be NULL), and returns
// `status`.
__attribute__((format(printf, 4, 5))) enum attn_status attn_fail(attn_log_fn log, void *user,
                                                                 enum attn_status status,
                                                                 const char *format, ...);

// Hands a sentence to `log` (may be NULL); the last error stays as it is.
__attribute__((format(printf, 4, 5))) void attn_report(attn_log_fn log, void *user,
                                                       enum attn_log_level level,
                                                       const char *format, ...);

// Copies a params struct of the caller, whose first field is its uint32_t size, into `to`, which
// has `size` bytes: what the caller's lacks is 0. `name` is for the sentence. ATTN_ERROR_INVALID:
// its size is below 4 or absurd, or it has nonzero bytes beyond `size`.
enum attn_status attn_params_copy(attn_log_fn log, void *user, const char *name, void *to,
                                  size_t size, const void *from);

// Copies `from`, of `size` bytes, into a result struct of the caller, whose first field is its
// uint32_t size; no more than that is written, and the field stays.
enum attn_status attn_result_copy(attn_log_fn log, void *user, const char *name, void *to,
                                  const void *from, size_t size);

// Checks an argument at the top of a public function.
#define ATTN_REQUIRE(log, user, condition, ...) \
    do { \
        if (!(condition)) return attn_fail((log), (user), ATTN_ERROR_INVALID, __VA_ARGS__); \
    } while (0)

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// Where the library's sentences go. The library itself never prints.
#ifndef ATTN_LOG_H
#define ATTN_LOG_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

enum attn_log_level {
    // A call was refused or failed: the sentence of attn_last_error().
    ATTN_LOG_ERROR = 1,
    // Something works, but not as one would expect: two packs fit, an environment value is
    // unusable.
    ATTN_LOG_WARNING = 2,
    // What was chosen, and why: packs seen, policy in force.
    ATTN_LOG_INFO = 3,
};

// Called with one sentence, no newline, valid during the call only; `user` is the pointer given
// with the callback. It may be called from every thread that uses the handle, also at the same
// time, and must not call into the library.
typedef void (*attn_log_fn)(void *user, enum attn_log_level level, const char *sentence);

#ifdef __cplusplus
}
#endif

#endif

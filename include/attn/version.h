/* SPDX-License-Identifier: Apache-2.0 */
// The version of the headers, and of the library that is loaded.
#ifndef ATTN_VERSION_H
#define ATTN_VERSION_H

#include "common.h"

// Of these headers.
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

// "MAJOR.MINOR.PATCH" of the library that is loaded, which may be newer than these headers.
// Thread-safety: pure.
ATTN_API const char *attn_version(void);

#ifdef __cplusplus
}
#endif

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "attn/version.h"

#define STRING_OF(x) #x
#define VERSION_STRING(major, minor, patch) \
    STRING_OF(major) "." STRING_OF(minor) "." STRING_OF(patch)

const char *attn_version(void)
{
    return VERSION_STRING(ATTN_VERSION_MAJOR, ATTN_VERSION_MINOR, ATTN_VERSION_PATCH);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "env.h"

#include <stdlib.h>

const char *attn_env(const char *const name)
{
    return getenv(name);
}

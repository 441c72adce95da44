/* SPDX-License-Identifier: Apache-2.0 */
// The environment variables that libattn reads: here and nowhere else, and only while a device is
// opened or a function of splitk.h asks for it.
#ifndef ATTN_SRC_ENV_H
#define ATTN_SRC_ENV_H

#define ATTN_ENV_SPLITK "METRALE_ATTN_DECODE_SPLITK"
#define ATTN_ENV_GQA_PACK "METRALE_ATTN_DECODE_GQA_PACK"
#define ATTN_ENV_NO_FA128 "METRALE_NO_ATTN_FA128"
#define ATTN_ENV_PACK_PATH "ATTN_PACK_PATH"

// The value of one of the names above, or NULL.
const char *attn_env(const char *name);

#endif

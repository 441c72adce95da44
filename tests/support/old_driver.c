/* SPDX-License-Identifier: Apache-2.0 */
// A libcuda.so.1 from before most of what libattn calls.
#include "driver.h"

attn_cu_result cuInit(unsigned flags);
attn_cu_result cuInit(const unsigned flags)
{
    return flags == 0 ? ATTN_CU_SUCCESS : ATTN_CU_ERROR_INVALID_VALUE;
}

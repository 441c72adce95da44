/* SPDX-License-Identifier: Apache-2.0 */
// One kernel, by a host compiler: ROW_... say which.
#include "decode/decode.cu"

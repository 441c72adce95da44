/* SPDX-License-Identifier: Apache-2.0 */
// The same of the kernel for wgmma.
#include "decode/decode_wgmma.cu"

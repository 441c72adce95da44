/* SPDX-License-Identifier: Apache-2.0 */
// The same of the kernel for wgmma.
#include "prefill/prefill_wgmma.cu"

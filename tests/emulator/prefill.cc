/* SPDX-License-Identifier: Apache-2.0 */
// One prefill kernel, by a host compiler: ROW_... say which.
#include "prefill/prefill.cu"

/* SPDX-License-Identifier: Apache-2.0 */
// One tiled kernel, by a host compiler: ROW_... say which.
#include "tiled/tiled.cu"

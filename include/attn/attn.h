/* SPDX-License-Identifier: Apache-2.0 */
// libattn: attention for LLM inference engines. This header brings in all the others.
#ifndef ATTN_ATTN_H
#define ATTN_ATTN_H

#include "bench.h"
#include "common.h"
#include "ctm.h"
#include "decode.h"
#include "device.h"
#include "log.h"
#include "prefill.h"
#include "splitk.h"
#include "swap.h"
#include "target.h"
#include "tiled.h"
#include "version.h"

#endif

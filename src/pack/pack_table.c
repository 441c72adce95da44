/* SPDX-License-Identifier: Apache-2.0 */
// The one symbol of a pack: the kernels that embed.S holds, their table, and what the chip
// declares. The build compiles this once per target, with the two headers it generated from that
// target's files.
#include "pack.h"

#include PACK_CONFIG
#include PACK_ROWS

#define QUOTE(text) #text
#define STRING(macro) QUOTE(macro)

// The words of gqa_pack.
enum {
    off = 0,
    on = 1
};

extern const unsigned char PACK_FATBIN[], PACK_FATBIN_END[];
extern const struct attn_pack PACK_SYMBOL;

__attribute__((visibility(PACK_VISIBILITY))) const struct attn_pack PACK_SYMBOL = {
    .abi = ATTN_PACK_ABI,
    .size = sizeof(struct attn_pack),
    .row_size = sizeof(struct attn_pack_row),
    .num_rows = sizeof(rows) / sizeof(rows[0]),
    .rows = rows,
    .target = PACK_TARGET,
    .arch = STRING(ATTN_ARCH),
    .compute_capability = STRING(ATTN_COMPUTE_CAPABILITY),
    .splitk_policy = STRING(ATTN_SPLITK_POLICY),
    .sm_count = ATTN_SM_COUNT,
    .memory_bandwidth_gbs = ATTN_MEMORY_BANDWIDTH_GBS,
    .smem_per_block = ATTN_SMEM_PER_BLOCK,
    .gqa_pack = ATTN_GQA_PACK,
    .fatbin = PACK_FATBIN,
    .fatbin_end = PACK_FATBIN_END,
};

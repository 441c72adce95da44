/* SPDX-License-Identifier: Apache-2.0 */
// A pack without kernels that run: what a pack is to the core, for tests without nvcc. The build
// compiles it once per kind of pack, sound and damaged ones, with other -D.
#include "pack.h"

#ifndef FAKE_TARGET
#define FAKE_TARGET "hopper"
#endif
#ifndef FAKE_ARCH
#define FAKE_ARCH "sm_90a"
#endif
#ifndef FAKE_CAPABILITY
#define FAKE_CAPABILITY "9.0"
#endif
#ifndef FAKE_SM_COUNT
#define FAKE_SM_COUNT 132
#endif
#ifndef FAKE_SMEM
#define FAKE_SMEM 232448
#endif
#ifndef FAKE_POLICY
#define FAKE_POLICY "chunk"
#endif
#ifndef FAKE_ABI
#define FAKE_ABI ATTN_PACK_ABI
#endif
#ifndef FAKE_SIZE
#define FAKE_SIZE sizeof(struct attn_pack)
#endif
#ifndef FAKE_ROW_SIZE
#define FAKE_ROW_SIZE sizeof(struct attn_pack_row)
#endif
#ifndef FAKE_MAGIC
#define FAKE_MAGIC 0xBA55ED50u
#endif
#ifndef FAKE_BODY
#define FAKE_BODY 16
#endif
#ifndef FAKE_SYMBOL
#define FAKE_SYMBOL attn_pack
#endif
#ifndef FAKE_NUM_ROWS
#define FAKE_NUM_ROWS sizeof(rows) / sizeof(rows[0])
#endif
#ifndef FAKE_TILE
#define FAKE_TILE 64
#endif
#ifndef FAKE_WARPS
#define FAKE_WARPS 4
#endif
#ifndef FAKE_PER_SM
#define FAKE_PER_SM 2
#endif
#ifndef FAKE_LEVELS
#define FAKE_LEVELS 3
#endif
#ifndef FAKE_STAGES
#define FAKE_STAGES 2
#endif

static const struct {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t body_size;
    unsigned char body[16];
} fatbin = { FAKE_MAGIC, 1, 16, FAKE_BODY, { 0 } };

static const struct attn_pack_row rows[] = {
#ifdef FAKE_EMULATED
#define ROW(id, type, dim, of_group, keys, depth, near, least) \
    { .name = #id, .op = ATTN_ROW_DECODE, .q = type, .kv = type, .head_dim = dim, \
      .rows = of_group, .tile = keys, .warps = 8, .stages = depth, .per_sm = 1, .levels = near, \
      .math = 1, .warpgroups = 2, .min_rows = least },
#include "emulated_groups.inc"
#undef ROW
#define ROW(name, q, kv, head_dim, rows, max_ratio, tile, warps, stages, per_sm, levels, ahead) \
    { #name, ATTN_ROW_DECODE, q,      kv,     head_dim, rows, max_ratio, tile, \
      warps, stages,          per_sm, levels, 1,        0,    0,   ahead,     0, 0 },
#include "emulated_rows.inc"
#undef ROW
#define ROW(id, type, dim, tokens, keys, team, copying, depth, sm, lines, bits) \
    { .name = #id, .op = ATTN_ROW_PREFILL, .q = type, .kv = type, .head_dim = dim, .rows = tokens, \
      .tile = keys, .warps = team, .copiers = copying, .stages = depth, .per_sm = sm, \
      .box_lines = lines, .math = bits, .warpgroups = (lines) > 0 ? (team) / 4 : 0 },
#include FAKE_PREFILL
#undef ROW
#define ROW(id, type, dim, team, depth, sm) \
    { .name = #id, .op = ATTN_ROW_TILED, .q = type, .kv = type, .head_dim = dim, .tile = 16, \
      .warps = team, .stages = depth, .per_sm = sm, .math = 1 },
#include "emulated_tiled.inc"
#else
    { "decode_bf16_bf16_d64", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_BF16, 64, 16, 0, FAKE_TILE,
      FAKE_WARPS, 3, FAKE_PER_SM, FAKE_LEVELS, 1, 0, 0, 0, 0, 0 },
    { .name = "decode_bf16_bf16_d128_r64", .op = ATTN_ROW_DECODE, .q = ATTN_ROW_BF16,
      .kv = ATTN_ROW_BF16, .head_dim = 128, .rows = 64, .tile = FAKE_TILE, .warps = 8, .stages = 2,
      .per_sm = 1, .levels = 1, .math = 2, .warpgroups = 2, .min_rows = 129 },
    { "decode_bf16_bf16_d128", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_BF16, 128, 8, 8, FAKE_TILE,
      4, 2, 1, 1, 2, 0, 0, 0, 0, 0 },
    { "decode_bf16_bf16_d128_wide", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_BF16, 128, 16, 0,
      FAKE_TILE, 4, 2, 1, 1, 2, 0, 0, 0, 0, 0 },
    { "decode_bf16_bf16_d256", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_BF16, 256, 8, 8, FAKE_TILE,
      4, 2, 1, 1, 3, 0, 0, 0, 0, 0 },
    { "decode_bf16_bf16_d512", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_BF16, 512, 8, 0, 32, 2, 2,
      1, 1, 4, 0, 0, 0, 0, 0 },
    { "decode_bf16_e4m3_d128", ATTN_ROW_DECODE, ATTN_ROW_BF16, ATTN_ROW_E4M3, 128, 16, 0, FAKE_TILE,
      4, 2, 1, 1, 5, 0, 0, 0, 0, 0 },
    { "decode_fp16_fp16_d32", ATTN_ROW_DECODE, ATTN_ROW_FP16, ATTN_ROW_FP16, 32, 16, 0, FAKE_TILE,
      4, 2, 1, 1, 6, 0, 0, 0, 0, 0 },
    { "decode_fp16_e4m3_d64", ATTN_ROW_DECODE, ATTN_ROW_FP16, ATTN_ROW_E4M3, 64, 16, 0, FAKE_TILE,
      4, 3, 1, 1, 7, 0, 0, 0, 0, 0 },
    { "decode_fp16_e4m3_d64_skip", ATTN_ROW_DECODE, ATTN_ROW_FP16, ATTN_ROW_E4M3, 64, 8, 8,
      FAKE_TILE, 4, 3, 1, 1, 7, 0, 0, 128 / FAKE_TILE + 2, 0, 0 },
    { "prefill_bf16_d64_r128", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 64, 128, 0, 80, 8, 3,
      0, 0, 1, 4, 1, 0, 2, 0 },
    { "prefill_bf16_d64", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 64, 64, 0, 80, 4, 3, 0, 0,
      1, 4, 0, 0, 0, 0 },
    { "prefill_bf16_d128", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 128, 64, 0, 64, 4, 2, 0,
      0, 1, 1, 0, 0, 0, 0 },
    { "prefill_bf16_d256_fa128", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 256, 128, 0, 16, 8,
      2, 0, 0, 1, 1, 0, 0, 0, 0 },
    { "prefill_bf16_d256", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 256, 64, 0, 16, 4, 2, 0,
      0, 1, 1, 0, 0, 0, 0 },
    { "prefill_bf16_d512", ATTN_ROW_PREFILL, ATTN_ROW_BF16, ATTN_ROW_BF16, 512, 64, 0, 16, 8, 1, 0,
      0, 1, 1, 0, 0, 0, 0 },
    { "prefill_fp16_d256", ATTN_ROW_PREFILL, ATTN_ROW_FP16, ATTN_ROW_FP16, 256, 64, 0, 16, 4, 2, 0,
      0, 1, 1, 0, 0, 0, 0 },
    { .name = "tiled_bf16_d128", .op = ATTN_ROW_TILED, .q = ATTN_ROW_BF16, .kv = ATTN_ROW_BF16,
      .head_dim = 128, .tile = 16, .warps = 4, .stages = FAKE_STAGES, .per_sm = 1, .math = 1 },
    { .name = "tiled_fp16_d64", .op = ATTN_ROW_TILED, .q = ATTN_ROW_FP16, .kv = ATTN_ROW_FP16,
      .head_dim = 64, .tile = 16, .warps = 8, .stages = 2, .per_sm = 1, .math = 1 },
#endif
    { .name = "read", .op = ATTN_ROW_READ, .warps = 8, .stages = 4 },
};

extern const struct attn_pack FAKE_SYMBOL;

__attribute__((visibility("default"))) const struct attn_pack FAKE_SYMBOL = {
    .abi = FAKE_ABI,
    .size = FAKE_SIZE,
    .row_size = FAKE_ROW_SIZE,
    .num_rows = FAKE_NUM_ROWS,
    .rows = rows,
    .target = FAKE_TARGET,
    .arch = FAKE_ARCH,
    .compute_capability = FAKE_CAPABILITY,
    .splitk_policy = FAKE_POLICY,
    .sm_count = FAKE_SM_COUNT,
    .memory_bandwidth_gbs = 4800,
    .smem_per_block = FAKE_SMEM,
    .gqa_pack = 0,
    .fatbin = &fatbin,
    .fatbin_end = &fatbin + 1,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "attn/bench.h"
#include "device.h"
#include "kernels/bench/read_params.h"
#include "status.h"

// Blocks an SM: enough loads in flight, whatever the latency.
#define BLOCKS_PER_SM 4

static const struct attn_pack_row *find_row(const struct attn_pack *const pack)
{
    for (uint32_t i = 0; pack && i < pack->num_rows; i++)
        if (pack->rows[i].op == ATTN_ROW_READ) return &pack->rows[i];
    return NULL;
}

enum attn_status attn_bandwidth_probe(struct attn_device *const device, const void *const base,
                                      const size_t bytes, uint32_t *const sink,
                                      const attn_stream stream)
{
    attn_error_clear();
    if (!device) return attn_fail(NULL, NULL, ATTN_ERROR_INVALID, "device is NULL: open one first");
    const attn_log_fn log = device->log;
    void *const user = device->log_user;
    ATTN_REQUIRE(log, user, bytes % 16 == 0, "bytes is %zu: it has to be a multiple of 16", bytes);
    ATTN_REQUIRE(log, user, bytes == 0 || base, "base is NULL, but bytes is %zu", bytes);
    ATTN_REQUIRE(log, user, (uintptr_t) base % 16 == 0, "base is %p: it has to be 16-byte aligned",
                 base);
    ATTN_REQUIRE(log, user, sink && (uintptr_t) sink % 4 == 0,
                 "sink is %p: it has to be 4 bytes of device memory, 4-byte aligned",
                 (void *) sink);
    const struct attn_pack_row *const row = find_row(device->pack);
    if (!row)
        return attn_fail(log, user, ATTN_ERROR_UNSUPPORTED,
                         "%s has no kernel that measures bandwidth: open a GPU whose pack has one",
                         device->info.name);
    if (!device->driver)
        return attn_fail(log, user, ATTN_ERROR_NO_DEVICE,
                         "%s is a target without a GPU: it plans, and runs nothing",
                         device->info.name);
    if (bytes == 0) return ATTN_OK;

    struct attn_read_args args = { base, sink, (int64_t) (bytes / 16) };
    const int64_t pieces_per_block = (int64_t) row->warps * 32 * row->stages;
    const int64_t blocks = (args.num_pieces + pieces_per_block - 1) / pieces_per_block;
    int64_t grid = (int64_t) device->info.sm_count * BLOCKS_PER_SM;
    if (grid > blocks) grid = blocks;
    if (device->grid_limit > 0 && grid > device->grid_limit) grid = device->grid_limit;
    return attn_device_launch(device, row, (int32_t) grid, &args, stream);
}

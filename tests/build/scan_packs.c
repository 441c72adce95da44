/* SPDX-License-Identifier: Apache-2.0 */
// Has the library look at the packs that were just built: it must find each of them sound.
// usage: scan_packs FOLDER TARGET ...
#include "attn/target.h"

#include <stdio.h>
#include <string.h>

struct scan {
    char **targets;
    int num_targets, found, failed;
};

static void see_pack(void *const user, const struct attn_target_info *const info)
{
    struct scan *const scan = user;
    for (int i = 0; i < scan->num_targets; i++)
        scan->found += strcmp(scan->targets[i], info->name) == 0;
    printf("%s: %s, %d kernels%s%s\n", info->name, info->path, info->num_kernels,
           info->reason[0] ? ": " : "", info->reason);
    scan->failed += info->status != ATTN_OK;
}

int main(const int argc, char **const argv)
{
    if (argc < 2) return 2;
    struct scan scan = { argv + 2, argc - 2, 0, 0 };
    const enum attn_status status = attn_target_scan(argv[1], 0, 0, see_pack, &scan);
    if (status != ATTN_OK) fprintf(stderr, "%s\n", attn_last_error());
    return status != ATTN_OK || scan.failed != 0 || scan.found != scan.num_targets;
}

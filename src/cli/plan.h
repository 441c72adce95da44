/* SPDX-License-Identifier: Apache-2.0 */
// What the plans of all operations share: which devices there are to plan for.
#ifndef ATTN_CLI_PLAN_H
#define ATTN_CLI_PLAN_H

#include "cli/cli.h"
#include "cli/shape.h"

struct plan_devices {
    const char *op;
    // NULL: all that are found.
    const char *target;
    // The GPU instead.
    bool on_device;
    bool as_json;
    // The plan of the device that `params` open; NULL after a sentence.
    json_t *(*plan)(const void *user, struct attn_device_open_params *params);
    void (*print)(const void *user, const json_t *plan);
    const void *user;
};

// Plans, and prints the plans; returns the exit status.
int plan_all(const struct plan_devices *devices);

double plan_number(const json_t *plan, const char *key);

// `attn plan tiled` and `attn plan swap`. Counts are 0 where they are not given.
struct plan_lists {
    const struct shape_options *shape;
    const char *target;
    bool on_device, as_json;
    // Blocks of a tile; of swap: slots, tiles in work, layers.
    int32_t tile, resident, planes, layers;
};
int plan_lists(const struct plan_lists *options);

// `attn plan prefill`: argv[0] is "prefill".
int plan_prefill(int argc, char **argv);

#endif

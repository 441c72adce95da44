/* SPDX-License-Identifier: Apache-2.0 */
// When the parts of tiles ran, as a file for viewers of traces, and how much of it ran at a time.
#ifndef ATTN_CLI_BENCH_TIMELINE_H
#define ATTN_CLI_BENCH_TIMELINE_H

#include "attn/swap.h"

// Writes the last `count` tiles to `path`, in the Trace Event format that chrome://tracing and
// Perfetto open. *hidden: the share of the time of computing during which blocks of other tiles were
// copied. Returns CLI_FINE, or CLI_FAILED after a sentence.
int timeline_write(const char *path, const struct attn_swap *swap, int32_t count, double *hidden);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// `attn bench swap`: how fast a KV cache streams from host memory or from a file.
#ifndef ATTN_CLI_BENCH_SWAP_H
#define ATTN_CLI_BENCH_SWAP_H

// The command: argv[0] is "swap".
int bench_swap(int argc, char **argv);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// `attn sample prefill`: argv[0] is "prefill".
#ifndef ATTN_CLI_SAMPLE_PREFILL_H
#define ATTN_CLI_SAMPLE_PREFILL_H

int sample_prefill(int argc, char **argv);

#endif

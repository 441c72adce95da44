/* SPDX-License-Identifier: Apache-2.0 */
// Case files: the tensors and scalars of one call, as safetensors with `format` = "attn-case" and
// `version` = "1" in the metadata.
//
// Offsets and shapes are checked here. What tables and lengths hold is data like any other: the
// operation's own business.
#ifndef ATTN_CLI_CASE_H
#define ATTN_CLI_CASE_H

#include "attn/ctm.h"
#include "attn/decode.h"
#include "attn/prefill.h"
#include "attn/tiled.h"
#include "cli/safetensors.h"

enum case_op {
    CASE_DECODE,
    CASE_CTM,
    CASE_PREFILL,
    CASE_TILED,
    CASE_SWAP,
};

// What a prefill case asks for: attn_prefill, or the original or its twin for its layout.
enum case_kernel {
    CASE_KERNEL_AUTO,
    CASE_KERNEL_64,
    CASE_KERNEL_128,
};

// What a case of tiled or swap has beside the tensors that it shares with decode.
struct case_tiled {
    // [batch, list_length], [batch], and [batch] or NULL: all slots.
    const int32_t *block_list, *block_counts, *valid_slots;
    int32_t list_length;
    // Blocks of a tile: 1 or more.
    int32_t tile_capacity;
    // Of swap: slots, and tiles in work.
    int32_t resident_blocks, num_planes;
};

struct case_file {
    struct safetensors *file;
    enum case_op op;
    // A decode call on host pointers, strides filled in; o, lse, fault, dropped_blocks and what a
    // launch needs (workspace, counters) are NULL. Of a case of ctm, tiled or swap: what it is as a
    // call of decode.
    struct attn_decode_params params;
    // The call of a ctm case on host pointers, without the same; all 0 otherwise.
    struct attn_ctm_params ctm;
    // The call of a prefill case on host pointers, strides filled in, without what it writes; all 0
    // otherwise. params is then that of no call.
    struct attn_prefill_params prefill;
    enum case_kernel kernel;
    // Of a case of tiled or swap; all 0 otherwise.
    struct case_tiled tiled;
    // As written in the file; "": the target's. Of a ctm case: chunk, whatever the file has.
    char policy[32];
    // In o's shape, and in that without head_dim; NULL where the file has none.
    double *expected_o, *expected_lse;
    // 1 if q is [batch, q_len, num_q_heads, head_dim] in the file, and o shall be, too. (0: without
    // q_len; of a prefill case without batch.)
    int has_query_axis;
    // Copies of tensors that are not aligned in the file, and how many.
    void *copies[16];
    int num_copies;
};

// Receives sentences about what is ignored.
typedef void (*case_warn_fn)(void *user, const char *sentence);

// Both: 0, or -1 and a sentence in `why` (SAFETENSORS_WHY_SIZE bytes); *loaded then owns nothing.
int case_load(struct case_file *loaded, const char *path, case_warn_fn warn, void *user, char *why);
// The same on bytes in memory, which have to outlive *loaded.
int case_parse(struct case_file *loaded, const char *name, const void *bytes, size_t size,
               case_warn_fn warn, void *user, char *why);
void case_free(struct case_file *loaded);

// Of decode, ctm and tiled: elements of q and of o, and of lse.
size_t case_elements(const struct attn_decode_params *params);
size_t case_rows(const struct attn_decode_params *params);
// The shape of q in the file, and of o; returns its rank.
int case_shape(const struct case_file *loaded, int64_t shape[4]);
// Type of q and o.
enum attn_dtype case_dtype(const struct case_file *loaded);
// "decode", "ctm", "prefill", "tiled", "swap".
const char *case_op_name(enum case_op op);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
// The packs that are to be seen: found, checked, and held against a compute capability.
#ifndef ATTN_SRC_PACK_SCAN_H
#define ATTN_SRC_PACK_SCAN_H

#include "attn/log.h"
#include "pack.h"

// Dynamic shared memory of a block of the row, in bytes.
int32_t attn_pack_row_smem(const struct attn_pack_row *row);
// Threads of a block.
int32_t attn_pack_row_threads(const struct attn_pack_row *row);
// Of op=decode: floats of a slot of the merge tree.
int32_t attn_pack_row_slot_floats(const struct attn_pack_row *row);

// Names of the rows of an operation, with commas between; as far as `size` bytes hold them.
void attn_pack_name_rows(const struct attn_pack *pack, int32_t op, char *names, size_t size);

struct attn_pack_seen {
    // The target's name; the file's where the pack is not sound.
    char name[64];
    // The file; "built in" in a static build.
    char path[1024];
    // Of dlopen; NULL where the pack is built in or not sound.
    void *handle;
    // NULL where the pack is not sound.
    const struct attn_pack *pack;
    int32_t major, minor;
    // As in attn_target_info.
    enum attn_status status;
    char reason[512];
};

struct attn_pack_list {
    struct attn_pack_seen *packs;
    size_t count;
};

// Opens every pack of `pack_dir` (NULL: the search order of target.h), sorted by name, and holds
// each against the compute capability major.minor (0.0: none). `env_path` is the value of
// ATTN_PACK_PATH. ATTN_ERROR_IO: pack_dir cannot be read. ATTN_ERROR_NO_MEMORY. The sentence goes
// to `log`.
enum attn_status attn_pack_list_open(struct attn_pack_list *list, const char *pack_dir,
                                     const char *env_path, int32_t major, int32_t minor,
                                     attn_log_fn log, void *user);

// Closes all packs but `keep` (may be NULL), whose handle the caller has taken.
void attn_pack_list_close(struct attn_pack_list *list, const struct attn_pack_seen *keep);

#endif

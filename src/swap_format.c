/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_format.h"

#include <stdio.h>
#include <string.h>

#define MAGIC "ATTNSWAP"
#define COMMIT_MAGIC "ATTNCMIT"
#define VERSION 1
#define BYTE_ORDER_MARK 0x01020304u
#define OTHER_ORDER_MARK 0x04030201u

// As they lie in the file: no compiler pads them.
struct header {
    char magic[8];
    uint32_t version, byte_order, header_bytes;
    int32_t dtype, num_layers, num_blocks, num_kv_heads, head_dim, block_size, zero;
    uint64_t stripe_bytes, index_offset, index_bytes, data_offset, file_bytes, checksum;
};
_Static_assert(sizeof(struct header) == 96, "the header of a swap file has 96 bytes");

struct commit {
    char magic[8];
    uint64_t number, index_checksum, checksum;
};
_Static_assert(sizeof(struct commit) == 32, "a commit record of a swap file has 32 bytes");

// FNV-1a, continued from `hash`.
static uint64_t hash_bytes(uint64_t hash, const void *const bytes, const size_t count)
{
    const unsigned char *const from = bytes;
    for (size_t i = 0; i < count; i++) hash = (hash ^ from[i]) * UINT64_C(0x100000001B3);
    return hash;
}

#define HASH_START UINT64_C(0xCBF29CE484222325)

uint64_t attn_swap_format_hash_page(const void *const page, const uint64_t number)
{
    return hash_bytes(hash_bytes(HASH_START, page, ATTN_SWAP_FILE_PAGE), &number, sizeof(number));
}

static struct header make_header(const struct attn_swap_dims *const dims,
                                 const struct attn_swap_layout *const layout)
{
    struct header header = {
        .version = VERSION,
        .byte_order = BYTE_ORDER_MARK,
        .header_bytes = ATTN_SWAP_FILE_PAGE,
        .dtype = (int32_t) dims->dtype,
        .num_layers = dims->num_layers,
        .num_blocks = dims->num_blocks,
        .num_kv_heads = dims->num_kv_heads,
        .head_dim = dims->head_dim,
        .block_size = dims->block_size,
        .stripe_bytes = (uint64_t) layout->stripe_bytes,
        .index_offset = (uint64_t) layout->index_offset,
        .index_bytes = (uint64_t) layout->index_bytes,
        .data_offset = (uint64_t) layout->data_offset,
        .file_bytes = (uint64_t) layout->file_bytes,
    };
    memcpy(header.magic, MAGIC, sizeof(header.magic));
    return header;
}

// Of the page, with 0 for the checksum that is in it.
static uint64_t hash_header(const unsigned char *const page)
{
    static const unsigned char zeros[sizeof(uint64_t)];
    const size_t before = offsetof(struct header, checksum), after = sizeof(struct header);
    const uint64_t hash = hash_bytes(hash_bytes(HASH_START, page, before), zeros, sizeof(zeros));
    return hash_bytes(hash, page + after, ATTN_SWAP_FILE_PAGE - after);
}

void attn_swap_format_header(unsigned char *const page, const struct attn_swap_dims *const dims,
                             const struct attn_swap_layout *const layout)
{
    struct header header = make_header(dims, layout);
    memset(page, 0, ATTN_SWAP_FILE_PAGE);
    memcpy(page, &header, sizeof(header));
    header.checksum = hash_header(page);
    memcpy(page, &header, sizeof(header));
}

// Everything that the geometry decides beyond these follows from them.
static bool check_geometry(const struct header *const found, const struct header *const wanted,
                           char *const why, const size_t why_size)
{
    const struct {
        const char *name;
        int32_t found, wanted;
    } fields[] = {
        { "dtype", found->dtype, wanted->dtype },
        { "num_layers", found->num_layers, wanted->num_layers },
        { "num_blocks", found->num_blocks, wanted->num_blocks },
        { "num_kv_heads", found->num_kv_heads, wanted->num_kv_heads },
        { "head_dim", found->head_dim, wanted->head_dim },
        { "block_size", found->block_size, wanted->block_size },
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].found == fields[i].wanted) continue;
        snprintf(why, why_size, "has %s %d, and dims->%s is %d: open it with its own geometry",
                 fields[i].name, fields[i].found, fields[i].name, fields[i].wanted);
        return false;
    }
    const size_t rest = offsetof(struct header, checksum) - offsetof(struct header, stripe_bytes);
    if (!memcmp(&found->stripe_bytes, &wanted->stripe_bytes, rest) && found->zero == 0) return true;
    snprintf(why, why_size, "is damaged: its header places blocks where this geometry has none");
    return false;
}

bool attn_swap_format_check_header(const unsigned char *const page,
                                   const struct attn_swap_dims *const dims,
                                   const struct attn_swap_layout *const layout, char *const why,
                                   const size_t why_size)
{
    const struct header wanted = make_header(dims, layout);
    struct header found;
    memcpy(&found, page, sizeof(found));
    if (memcmp(found.magic, wanted.magic, sizeof(found.magic)) != 0)
        snprintf(why, why_size,
                 "is no swap file: it does not begin with " MAGIC
                 ", or its making was interrupted");
    else if (found.byte_order == OTHER_ORDER_MARK)
        snprintf(why, why_size, "is a swap file of a machine with the other byte order");
    else if (found.version != VERSION && found.byte_order == BYTE_ORDER_MARK)
        snprintf(why, why_size, "is a swap file of version %u, and this library knows version %d",
                 found.version, VERSION);
    else if (found.checksum != hash_header(page) || found.byte_order != BYTE_ORDER_MARK ||
             found.header_bytes != ATTN_SWAP_FILE_PAGE)
        snprintf(why, why_size, "is damaged: the checksum of its header is wrong");
    else
        return check_geometry(&found, &wanted, why, why_size);
    return false;
}

void attn_swap_format_commit(unsigned char *const page, const uint64_t number,
                             const uint64_t index_checksum)
{
    struct commit commit = { .number = number, .index_checksum = index_checksum };
    memcpy(commit.magic, COMMIT_MAGIC, sizeof(commit.magic));
    commit.checksum = hash_bytes(HASH_START, &commit, offsetof(struct commit, checksum));
    memset(page, 0, ATTN_SWAP_FILE_PAGE);
    memcpy(page, &commit, sizeof(commit));
}

bool attn_swap_format_read_commit(const unsigned char *const page, uint64_t *const number,
                                  uint64_t *const index_checksum)
{
    struct commit found;
    memcpy(&found, page, sizeof(found));
    *number = found.number;
    *index_checksum = found.index_checksum;
    return !memcmp(found.magic, COMMIT_MAGIC, sizeof(found.magic)) &&
           found.checksum == hash_bytes(HASH_START, &found, offsetof(struct commit, checksum));
}

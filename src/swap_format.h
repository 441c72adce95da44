/* SPDX-License-Identifier: Apache-2.0 */
// Pages of a swap file: the header and commit records, as include/attn/swap.h describes them. Pages
// are of ATTN_SWAP_FILE_PAGE bytes.
#ifndef ATTN_SRC_SWAP_FORMAT_H
#define ATTN_SRC_SWAP_FORMAT_H

#include "swap_store.h"

void attn_swap_format_header(unsigned char *page, const struct attn_swap_dims *dims,
                             const struct attn_swap_layout *layout);
// False unless it is the header of a file of that geometry; `why` then goes on where its name
// ends.
bool attn_swap_format_check_header(const unsigned char *page, const struct attn_swap_dims *dims,
                                   const struct attn_swap_layout *layout, char *why,
                                   size_t why_size);

void attn_swap_format_commit(unsigned char *page, uint64_t number, uint64_t index_checksum);
// False if it is none.
bool attn_swap_format_read_commit(const unsigned char *page, uint64_t *number,
                                  uint64_t *index_checksum);

// Of page `number` of an index.
uint64_t attn_swap_format_hash_page(const void *page, uint64_t number);

#endif

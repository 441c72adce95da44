/* SPDX-License-Identifier: Apache-2.0 */
// Which block is in which slot, and which slot is to be had next. Knows nothing of memory or of
// time on the device: a tile's slots are out of reach until begin_tile on the same plane, which is
// when num_planes tiles have been planned since.
#ifndef ATTN_SRC_SWAP_SLOTS_H
#define ATTN_SRC_SWAP_SLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct attn_swap_slots {
    int32_t num_slots, num_planes, num_layers, num_blocks;
    // Of block layer * num_blocks + block: its slot, or ATTN_SWAP_NOWHERE, or ATTN_SWAP_WANTED.
    int32_t *slot_of;
    // The round of its layer in which a block was last listed.
    uint32_t *seen;
    // Rounds of each layer: a new one begins with a call that lists a block of the present one.
    uint32_t *rounds;
    // Of each slot: its block, or ATTN_SWAP_NOWHERE; the tile that last used it.
    int32_t *block_of;
    uint64_t *used;
    // Rings of slots, with a head each behind the slots: free ones, those of no plane in order of
    // use, those of each plane.
    int32_t *next, *prev;
    int32_t num_resident;
    // Begun last.
    uint64_t tile;
};

enum {
    ATTN_SWAP_NOWHERE = -1,
    // Listed by the tile that is being planned, and without a slot as yet.
    ATTN_SWAP_WANTED = -2,
};

// Bytes that init allocates.
int64_t attn_swap_slots_bytes(int32_t num_slots, int32_t num_planes, int32_t num_layers,
                              int32_t num_blocks);
// False without memory; free in either case.
bool attn_swap_slots_init(struct attn_swap_slots *slots, int32_t num_slots, int32_t num_planes,
                          int32_t num_layers, int32_t num_blocks);
void attn_swap_slots_free(struct attn_swap_slots *slots);

// No block is resident, and every slot may be had.
void attn_swap_slots_clear(struct attn_swap_slots *slots);

// Of a call of `layer` that lists a block, numbered over all layers: whether it begins a round,
// which next_round does once, before the first tile.
bool attn_swap_slots_starts_round(const struct attn_swap_slots *slots, int32_t layer,
                                  int32_t block);
void attn_swap_slots_next_round(struct attn_swap_slots *slots, int32_t layer);

// Tile number `tile`, from 1 on, of plane tile % num_planes. What the plane held may be had.
void attn_swap_slots_begin_tile(struct attn_swap_slots *slots, uint64_t tile);
// The tile lists a block: true if it has a slot, which the tile then keeps. False: the block is
// wanted now. *is_new: the tile had not listed it.
bool attn_swap_slots_list(struct attn_swap_slots *slots, uint64_t tile, int32_t layer,
                          int32_t block, bool *is_new);
// Whether the tile has listed it.
bool attn_swap_slots_is_listed(const struct attn_swap_slots *slots, uint64_t tile, int32_t block);
// A slot for the tile, its block evicted: true in *evicted if it had one.
int32_t attn_swap_slots_take(struct attn_swap_slots *slots, bool *evicted);
void attn_swap_slots_assign(struct attn_swap_slots *slots, uint64_t tile, int32_t slot,
                            int32_t block);

// The block is not resident any more. Its slot waits as long as it would have.
void attn_swap_slots_drop(struct attn_swap_slots *slots, int32_t block);

#endif

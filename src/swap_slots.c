/* SPDX-License-Identifier: Apache-2.0 */
#include "swap_slots.h"

#include <stdlib.h>

// Rounds of its layer that a block may miss before its slot goes first.
#define COLD_ROUNDS 2

// Heads of rings, behind the slots.
static int32_t head_free(const struct attn_swap_slots *const slots)
{
    return slots->num_slots;
}

static int32_t head_main(const struct attn_swap_slots *const slots)
{
    return slots->num_slots + 1;
}

static int32_t head_plane(const struct attn_swap_slots *const slots, const uint64_t tile)
{
    return slots->num_slots + 2 + (int32_t) (tile % (uint64_t) slots->num_planes);
}

int64_t attn_swap_slots_bytes(const int32_t num_slots, const int32_t num_planes,
                              const int32_t num_layers, const int32_t num_blocks)
{
    const int64_t word = sizeof(int32_t), nodes = (int64_t) num_slots + 2 + num_planes;
    return (int64_t) num_layers * num_blocks * 2 * word + num_layers * word +
           num_slots * (word + (int64_t) sizeof(uint64_t)) + nodes * 2 * word;
}

bool attn_swap_slots_init(struct attn_swap_slots *const slots, const int32_t num_slots,
                          const int32_t num_planes, const int32_t num_layers,
                          const int32_t num_blocks)
{
    const size_t blocks = (size_t) num_layers * (size_t) num_blocks, own = (size_t) num_slots;
    const size_t nodes = own + 2 + (size_t) num_planes;
    *slots = (struct attn_swap_slots){
        .num_slots = num_slots,
        .num_planes = num_planes,
        .num_layers = num_layers,
        .num_blocks = num_blocks,
        .slot_of = malloc(blocks * sizeof(int32_t)),
        .seen = calloc(blocks, sizeof(uint32_t)),
        .rounds = malloc((size_t) num_layers * sizeof(uint32_t)),
        .block_of = malloc(own * sizeof(int32_t)),
        .used = malloc(own * sizeof(uint64_t)),
        .next = malloc(nodes * sizeof(int32_t)),
        .prev = malloc(nodes * sizeof(int32_t)),
    };
    if (!slots->slot_of || !slots->seen || !slots->rounds || !slots->block_of || !slots->used ||
        !slots->next || !slots->prev)
        return false;
    // No block has been seen in round 1.
    for (int32_t i = 0; i < num_layers; i++) slots->rounds[i] = 1;
    attn_swap_slots_clear(slots);
    return true;
}

void attn_swap_slots_free(struct attn_swap_slots *const slots)
{
    free(slots->slot_of);
    free(slots->seen);
    free(slots->rounds);
    free(slots->block_of);
    free(slots->used);
    free(slots->next);
    free(slots->prev);
    *slots = (struct attn_swap_slots){ 0 };
}

// ---- rings

static void take_out(struct attn_swap_slots *const slots, const int32_t node)
{
    slots->next[slots->prev[node]] = slots->next[node];
    slots->prev[slots->next[node]] = slots->prev[node];
}

static void put_last(struct attn_swap_slots *const slots, const int32_t head, const int32_t node)
{
    const int32_t last = slots->prev[head];
    slots->next[last] = node;
    slots->prev[node] = last;
    slots->next[node] = head;
    slots->prev[head] = node;
}

static bool is_empty(const struct attn_swap_slots *const slots, const int32_t head)
{
    return slots->next[head] == head;
}

void attn_swap_slots_clear(struct attn_swap_slots *const slots)
{
    const int64_t blocks = (int64_t) slots->num_layers * slots->num_blocks;
    for (int64_t i = 0; i < blocks; i++) slots->slot_of[i] = ATTN_SWAP_NOWHERE;
    for (int32_t i = 0; i < slots->num_planes + 2; i++) {
        const int32_t head = slots->num_slots + i;
        slots->next[head] = slots->prev[head] = head;
    }
    for (int32_t i = 0; i < slots->num_slots; i++) {
        slots->block_of[i] = ATTN_SWAP_NOWHERE;
        slots->used[i] = 0;
        put_last(slots, head_free(slots), i);
    }
    slots->num_resident = 0;
}

// ---- rounds

bool attn_swap_slots_starts_round(const struct attn_swap_slots *const slots, const int32_t layer,
                                  const int32_t block)
{
    return slots->seen[block] == slots->rounds[layer];
}

void attn_swap_slots_next_round(struct attn_swap_slots *const slots, const int32_t layer)
{
    slots->rounds[layer]++;
}

static bool is_cold(const struct attn_swap_slots *const slots, const int32_t slot)
{
    const int32_t block = slots->block_of[slot];
    return slots->rounds[block / slots->num_blocks] - slots->seen[block] > COLD_ROUNDS;
}

// ---- a tile

void attn_swap_slots_begin_tile(struct attn_swap_slots *const slots, const uint64_t tile)
{
    const int32_t head = head_plane(slots, tile);
    slots->tile = tile;
    while (!is_empty(slots, head)) {
        const int32_t slot = slots->next[head];
        const bool empty = slots->block_of[slot] == ATTN_SWAP_NOWHERE;
        take_out(slots, slot);
        put_last(slots, empty ? head_free(slots) : head_main(slots), slot);
    }
}

bool attn_swap_slots_is_listed(const struct attn_swap_slots *const slots, const uint64_t tile,
                               const int32_t block)
{
    const int32_t slot = slots->slot_of[block];
    return slot == ATTN_SWAP_WANTED || (slot >= 0 && slots->used[slot] == tile);
}

bool attn_swap_slots_list(struct attn_swap_slots *const slots, const uint64_t tile,
                          const int32_t layer, const int32_t block, bool *const is_new)
{
    const int32_t slot = slots->slot_of[block];
    *is_new = !attn_swap_slots_is_listed(slots, tile, block);
    slots->seen[block] = slots->rounds[layer];
    if (slot < 0) {
        slots->slot_of[block] = ATTN_SWAP_WANTED;
        return false;
    }
    if (!*is_new) return true;
    slots->used[slot] = tile;
    take_out(slots, slot);
    put_last(slots, head_plane(slots, tile), slot);
    return true;
}

// Lists are read over and over, in the same order: of the blocks that are still listed, the one
// used last is the one that will not be needed for longest.
int32_t attn_swap_slots_take(struct attn_swap_slots *const slots, bool *const evicted)
{
    int32_t slot = slots->next[head_free(slots)];
    *evicted = is_empty(slots, head_free(slots));
    if (*evicted) {
        slot = slots->next[head_main(slots)];
        if (!is_cold(slots, slot)) slot = slots->prev[head_main(slots)];
        slots->slot_of[slots->block_of[slot]] = ATTN_SWAP_NOWHERE;
        slots->block_of[slot] = ATTN_SWAP_NOWHERE;
        slots->num_resident--;
    }
    take_out(slots, slot);
    return slot;
}

void attn_swap_slots_assign(struct attn_swap_slots *const slots, const uint64_t tile,
                            const int32_t slot, const int32_t block)
{
    slots->slot_of[block] = slot;
    slots->block_of[slot] = block;
    slots->used[slot] = tile;
    slots->num_resident++;
    put_last(slots, head_plane(slots, tile), slot);
}

void attn_swap_slots_drop(struct attn_swap_slots *const slots, const int32_t block)
{
    const int32_t slot = slots->slot_of[block];
    if (slot < 0) return;
    slots->slot_of[block] = ATTN_SWAP_NOWHERE;
    slots->block_of[slot] = ATTN_SWAP_NOWHERE;
    slots->num_resident--;
    // In the ring of a plane it stays: work that reads it may be queued.
    if (slots->used[slot] + (uint64_t) slots->num_planes > slots->tile) return;
    take_out(slots, slot);
    put_last(slots, head_free(slots), slot);
}

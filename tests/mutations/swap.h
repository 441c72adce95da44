/* SPDX-License-Identifier: Apache-2.0 */
// Faults of the swap engine, for builds with -Dmutation=N; mutations.py says what each is and which
// test has to notice it. src/swap.c, swap_run.c and swap_store.c include this after their headers.

#if ATTN_MUTATION == 50
#define attn_swap_event_wait(on, event, stream) \
    ((stream) == (on)->copies ? (attn_swap_event_wait) (on, event, stream) : ATTN_CU_SUCCESS)
#elif ATTN_MUTATION == 51
#define attn_swap_event_wait(on, event, stream) \
    ((stream) != (on)->copies ? (attn_swap_event_wait) (on, event, stream) : ATTN_CU_SUCCESS)
#elif ATTN_MUTATION == 52
#define attn_swap_event_sync(on, event) ((void) (event), ATTN_CU_SUCCESS)
#elif ATTN_MUTATION == 53
#define attn_swap_slots_drop(slots, block) ((void) (slots), (void) (block))
#elif ATTN_MUTATION == 54
#define attn_swap_slots_clear(slots) ((void) (slots))
#elif ATTN_MUTATION == 55
#define attn_swap_store_fail_short(store, offset) ((void) (store), (void) (offset), ATTN_OK)
#elif ATTN_MUTATION == 56
#define attn_swap_format_hash_page(page, number) ((void) (page), (void) (number), UINT64_C(0))
#elif ATTN_MUTATION == 57
#define attn_swap_slots_next_round(slots, layer) ((void) (slots), (void) (layer))
#endif

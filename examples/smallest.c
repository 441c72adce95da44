/* SPDX-License-Identifier: Apache-2.0 */
// One sequence of three keys on the host executor. All keys are 0, so every score is, and the
// output is the mean of the three values.
#include <attn/attn.h>

#include <stdalign.h>
#include <stdio.h>

enum {
    DIM = 64,
    PAGE_SIZE = 16,
    NUM_PAGES = 4
};

// 1, 2 and 3 in BF16: the upper half of the float.
static const uint16_t one_two_three[] = { 0x3F80, 0x4000, 0x4040 };

int main(void)
{
    alignas(16) static uint16_t q[DIM], o[DIM];
    alignas(16) static uint16_t k[NUM_PAGES][PAGE_SIZE][DIM], v[NUM_PAGES][PAGE_SIZE][DIM];
    const int32_t block_table[] = { 2 }, seq_lens[] = { 3 };
    for (int t = 0; t < 3; t++)
        for (int d = 0; d < DIM; d++) v[2][t][d] = one_two_three[t];

    const struct attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    struct attn_device *device;
    if (attn_device_open(&device, &open)) goto failed;

    struct attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = params.num_q_heads = params.num_kv_heads = 1;
    params.head_dim = DIM;
    params.page_size = PAGE_SIZE;
    params.num_pages = NUM_PAGES;
    params.max_pages_per_seq = 1;
    params.q = q;
    params.o = o;
    params.k_pool = k;
    params.v_pool = v;
    params.block_table = block_table;
    params.seq_lens = seq_lens;
    params.scale = 0.125f;
    if (attn_decode(device, &params, NULL)) goto failed;

    attn_device_close(&device);
    printf("o[0] is 0x%04X: %s\n", o[0], o[0] == one_two_three[1] ? "2, the mean" : "wrong");
    return o[0] == one_two_three[1] ? 0 : 1;

failed:
    fprintf(stderr, "%s\n", attn_last_error());
    attn_device_close(&device);
    return 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
// The library from C++: one sequence of two keys on the host executor. The second key scores log(3)
// more than the first, so it weighs three times as much: o = (1 * 0 + 3 * 4) / 4 = 3.
#include <attn/attn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace
{

constexpr int DIM = 64;
constexpr int PAGE_SIZE = 16;

struct close_device {
    void operator()(attn_device *device) const
    {
        attn_device_close(&device);
    }
};

// The upper half of the float.
std::uint16_t to_bf16(const float value)
{
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<std::uint16_t>(bits >> 16);
}

int fail(const char *const call)
{
    std::fprintf(stderr, "%s: %s\n", call, attn_last_error());
    return 1;
}

} // namespace

int main()
{
    // The first elements of q and of the second key are 1: their product is the scale.
    alignas(16) std::uint16_t q[DIM] = { to_bf16(1) }, o[DIM] = {};
    std::vector<std::uint16_t> k(PAGE_SIZE * DIM), v(PAGE_SIZE * DIM);
    k[DIM] = to_bf16(1);
    for (int d = 0; d < DIM; d++) v[DIM + d] = to_bf16(4);
    const std::int32_t block_table[] = { 0 }, seq_lens[] = { 2 };

    attn_device *opened = nullptr;
    const attn_device_open_params open = ATTN_DEVICE_OPEN_PARAMS_INIT;
    if (attn_device_open(&opened, &open)) return fail("attn_device_open");
    const std::unique_ptr<attn_device, close_device> device(opened);

    attn_decode_params params = ATTN_DECODE_PARAMS_INIT;
    params.q_dtype = params.kv_dtype = ATTN_DTYPE_BF16;
    params.batch = params.num_q_heads = params.num_kv_heads = 1;
    params.head_dim = DIM;
    params.page_size = PAGE_SIZE;
    params.num_pages = params.max_pages_per_seq = 1;
    params.q = q;
    params.o = o;
    params.k_pool = k.data();
    params.v_pool = v.data();
    params.block_table = block_table;
    params.seq_lens = seq_lens;
    params.scale = std::log(3.0f);
    if (attn_decode(device.get(), &params, nullptr)) return fail("attn_decode");

    int wrong = 0;
    for (int d = 0; d < DIM; d++) wrong += o[d] != to_bf16(3);
    std::printf("o[0] is 0x%04X: %s\n", o[0], wrong ? "wrong" : "3, as it has to be");
    return wrong ? 1 : 0;
}

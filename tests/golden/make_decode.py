#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes golden decode cases: inputs, and what PyTorch makes of them.

    make_decode.py [FOLDER]      (default: the folder of this script)

Each file is a case for `attn run FILE --check` (safetensors; contract of the case files: `attn sample decode
--help`). expected_o is scaled_dot_product_attention in float64, expected_lse the float64 logsumexp of the
scores, both stored as F32. Where a GPU is there, the BF16 result of PyTorch's own kernels has to meet the
bound of include/attn/decode.h against it, or the script stops: an independent kernel agrees with what the
files say. Needs torch and safetensors, no network.
"""
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

# name, query heads, KV heads, head_dim, page size, lengths, window
CASES = [
    ("decode_d64", 4, 1, 64, 8, [1, 19], 0),
    ("decode_d128_gqa", 4, 2, 128, 4, [5, 12], 0),
    ("decode_d128_window", 3, 1, 128, 4, [17, 3], 6),
    ("decode_d256", 2, 1, 256, 4, [9], 0),
]


def make_inputs(q_heads, kv_heads, dim, page, lens, seed):
    """Random tensors; pages scattered, stale table entries -1, unreferenced slots NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lens]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    table = torch.full((len(lens), max(counts) + 1), -1, dtype=torch.int32)
    shape = (sum(counts), page, kv_heads, dim)
    k_pool, v_pool = (torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(2))
    for b, n in enumerate(lens):
        for i in range(counts[b]):
            table[b, i] = order.pop()
            used = min(page, n - i * page)
            for pool in (k_pool, v_pool):
                rows = torch.randn(used, kv_heads, dim, generator=generator)
                pool[table[b, i], :used] = rows.to(torch.bfloat16)
    q = (2 * torch.randn(len(lens), q_heads, dim, generator=generator)).to(torch.bfloat16)
    return q, k_pool, v_pool, table


def gather(pool, table, start, length):
    """[heads, keys, dim] of the attended tokens of one sequence."""
    page = pool.shape[1]
    rows = [pool[table[t // page], t % page] for t in range(start, length)]
    return torch.stack(rows).transpose(0, 1)


def attend(q, k, v, dtype, device):
    """PyTorch's own attention; KV heads repeated for their query heads."""
    ratio = q.shape[0] // k.shape[0]
    q, k, v = (x.to(device=device, dtype=dtype) for x in (q[:, None], k, v))
    k, v = (x.repeat_interleave(ratio, dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0, :, 0], k, v


def check_gpu(name, q, k, v, exact):
    """BF16 on the GPU against float64: |o - exact| <= u |exact| + (u + 2^-15 + 2^-21 S) A."""
    o, _, _ = attend(q, k, v, torch.bfloat16, "cuda")
    ratio = q.shape[0] // k.shape[0]
    keys, values = (x.repeat_interleave(ratio, dim=0).double() for x in (k, v))
    queries = q.double()[:, None]
    scale = 1 / math.sqrt(q.shape[-1])
    weights = torch.softmax(scale * (queries * keys).sum(-1), dim=-1)
    a = (weights[..., None] * values.abs()).sum(1)
    s = (scale * (queries * keys).abs().sum(-1)).amax(-1, keepdim=True)
    u = 2.0**-8
    bound = u * exact.abs() + (u + 2.0**-15 + 2.0**-21 * s) * a
    worst = ((o.cpu().double() - exact).abs() / bound).max().item()
    print(f"{name}: BF16 on {torch.cuda.get_device_name()} reaches {worst:.2f} of the bound")
    if not worst <= 1:
        sys.exit(f"{name}: PyTorch's BF16 result is beyond the bound")


def make_case(folder, name, q_heads, kv_heads, dim, page, lens, window, seed):
    q, k_pool, v_pool, table = make_inputs(q_heads, kv_heads, dim, page, lens, seed)
    expected_o = torch.empty(q.shape, dtype=torch.float64)
    expected_lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for b, n in enumerate(lens):
        start = max(0, n - window) if window else 0
        k, v = gather(k_pool, table[b], start, n), gather(v_pool, table[b], start, n)
        expected_o[b], keys, _ = attend(q[b], k, v, torch.float64, "cpu")
        scores = (q[b].double()[:, None] * keys).sum(-1) / math.sqrt(dim)
        expected_lse[b] = torch.logsumexp(scores, dim=-1)
        single, _, _ = attend(q[b], k, v, torch.float32, "cpu")
        torch.testing.assert_close(single.double(), expected_o[b], rtol=1e-4, atol=1e-5)
        if torch.cuda.is_available():
            check_gpu(name, q[b], k, v, expected_o[b])
    # Pages wholly left of the window hold nothing that may be read.
    if window:
        for b, n in enumerate(lens):
            table[b, : max(0, n - window) // page] = -1
    tensors = {
        "q": q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "expected_o": expected_o.float(),
        "expected_lse": expected_lse.float(),
    }
    scale = torch.tensor(1 / math.sqrt(dim), dtype=torch.float32).item()
    metadata = {
        "format": "attn-case",
        "version": "1",
        "op": "decode",
        "scale": repr(scale),
        "window": str(window),
    }
    save_file({key: value.contiguous() for key, value in tensors.items()},
              str(folder / f"{name}.safetensors"), metadata)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, case in enumerate(CASES):
        make_case(folder, *case, seed)


main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`attn bench decode` beside PyTorch's scaled_dot_product_attention, on one GPU in one go.

    decode_torch.py PROGRAM [--set S] [--shape NAME]... [--bench FILE] [--json] [--seconds N]

PyTorch reads contiguous K and V of the same shape, not pages, and is timed as attn bench times: a
CUDA graph of as many calls, going round over as many copies, so that the cache is cold. Each fused
backend is tried with the query heads of a group as query rows of their KV head, and with
enable_gqa; the fastest counts. A window is expressed as that many keys. Ragged lengths and E4M3,
which PyTorch has no call for, show the program's numbers alone.

Accuracy: both get the same tensors, a file of `attn sample` of the same shape with at most
ACCURACY_KEYS keys in all, and are held against the softmax in double precision.

--bench: what `attn bench decode --json` has just printed on this machine, in place of a run.
--seconds: after so many the rest has the program's numbers alone.

Exit status 77 where PyTorch, CUDA or a pack for the GPU is missing; 1 if a shape is slower than
PyTorch, or its relative RMS error more than RMS_SLACK times PyTorch's.
"""

import sys

from beside_torch import (SDPBackend, compare, compute_exact, find_type, gather, is_over, make_parser,
                          relative_rms, run_sample, scaled_dot_product_attention, sdpa_kernel, time_graph,
                          torch)

SAMPLES = 15
ACCURACY_KEYS = 16384


def has_call(shape):
    plain = shape["q_len"] == 1 and "skip" not in shape
    return plain and isinstance(shape["len"], int) and shape["q_dtype"] == shape["kv_dtype"]


def attended(shape):
    return min(shape["len"], shape["window"] or shape["len"])


def make_calls(shape, q):
    """(label, function of k and v) of everything that might run; q is [batch, heads, dim]."""
    heads, kv_heads = shape["num_q_heads"], shape["num_kv_heads"]
    rows = q.view(q.shape[0], kv_heads, heads // kv_heads, q.shape[2])
    alone = q.view(q.shape[0], heads, 1, q.shape[2])

    def call_rows(k, v):
        return scaled_dot_product_attention(rows, k, v)

    def call_gqa(k, v):
        return scaled_dot_product_attention(alone, k, v, enable_gqa=True)

    forms = [("rows", call_rows)] + ([("gqa", call_gqa)] if heads != kv_heads else [])
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        for form, call in forms:
            yield f"{name.split('_', maxsplit=1)[0].lower()} {form}", getattr(SDPBackend, name), call


def works(backend, call, k, v):
    """Whether the backend takes it; its plan is then made, which a capture could not."""
    try:
        with sdpa_kernel(backend):
            call(k, v)
        torch.cuda.synchronize()
    except (RuntimeError, TypeError):
        return False
    return True


def time_backend(backend, call, k, v, calls):
    graph = torch.cuda.CUDAGraph()
    with sdpa_kernel(backend), torch.cuda.graph(graph):
        for i in range(calls):
            call(k[i % len(k)], v[i % len(v)])
    us = time_graph(graph, calls, SAMPLES)
    graph.reset()
    return us


def time_torch(shape, copies, calls):
    """[(us, label, backend)], the fastest first."""
    dtype = find_type(shape["q_dtype"])
    size = (copies, shape["batch"], shape["num_kv_heads"], attended(shape), shape["head_dim"])
    k, v = (torch.empty(size, dtype=dtype, device="cuda").normal_() for _ in range(2))
    q = torch.randn((shape["batch"], shape["num_q_heads"], shape["head_dim"]), device="cuda").to(dtype)
    found = [(time_backend(backend, call, k, v, calls), label, backend)
             for label, backend, call in make_calls(shape, q) if works(backend, call, k[0], v[0])]
    del k, v, q
    torch.cuda.empty_cache()
    return sorted(found, key=lambda timed: timed[0])


def gather_batch(pool, tensors, shape):
    """[batch, kv_heads, keys, dim] of the attended keys."""
    sequences = []
    for pages, length in zip(tensors["block_table"], tensors["seq_lens"].tolist()):
        keys = gather(pool, pages, length)
        sequences.append(keys[length - attended(dict(shape, len=length)):].transpose(0, 1))
    return torch.stack(sequences).contiguous()


def compare_accuracy(program, shape, label):
    """Relative RMS errors of the program and of PyTorch on the same tensors."""
    batch = min(shape["batch"], 2)
    length = min(shape["len"], max(ACCURACY_KEYS // batch, shape["window"]))
    tensors, own = run_sample(
        program, "decode", "--batch", batch, "--len", length, "--heads",
        f"{shape['num_q_heads']}/{shape['num_kv_heads']}", "--dim", shape["head_dim"], "--page",
        shape["page_size"], "--window", shape["window"], "--dtype", shape["q_dtype"])
    q, k, v = tensors["q"], *(gather_batch(tensors[name], tensors, shape) for name in ("k_pool", "v_pool"))
    (backend, call), = [(backend, call) for name, backend, call in make_calls(shape, q) if name == label]
    with sdpa_kernel(backend):
        peer = call(k, v).reshape(q.shape)
    exact = compute_exact(q.unsqueeze(2), k, v).squeeze(2)
    return relative_rms(own.view(q.shape), exact), relative_rms(peer, exact)


def compare_case(options, case):
    shape = case["shape"]
    row = {"case": case["case"], "us": case.get("us"), "limit_share": case.get("limit_share"),
           "host_us": case.get("host_us"), "launch_us": case.get("launch_us"), "torch_us": None,
           "torch_backend": None, "ratio": None, "rms": case.get("relative_rms"), "torch_rms": None,
           "error": case.get("error")}
    if not case["ok"] or not has_call(shape) or is_over(options):
        return row
    found = time_torch(shape, case["copies"], case["calls"])
    if not found:
        return row
    row["torch_us"], row["torch_backend"], _ = found[0]
    row["ratio"] = row["torch_us"] / row["us"]
    row["rms"], row["torch_rms"] = compare_accuracy(options.program, shape, row["torch_backend"])
    torch.cuda.empty_cache()
    return row


def print_row(row):
    def text(key, form):
        return "-" if row[key] is None else format(row[key], form)
    print(f"{row['case']:34} {text('us', '.2f'):>9} {text('limit_share', '.1%'):>7} "
          f"{text('torch_us', '.2f'):>9} {row['torch_backend'] or '-':16} {text('ratio', '.3f'):>6} "
          f"{text('host_us', '.2f'):>6} {text('launch_us', '.2f'):>6} {text('rms', '.3e'):>9} "
          f"{text('torch_rms', '.3e'):>9}", flush=True)


def print_head():
    print("ratio: time of PyTorch / time of attn; host, launch: us of one call, and of the smallest launch\n")
    print(f"{'case':34} {'us':>9} {'share':>7} {'torch us':>9} {'backend':16} {'ratio':>6} {'host':>6} "
          f"{'launch':>6} {'rms':>9} {'torch rms':>9}")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--set", help="as of attn bench")
    options = parser.parse_args()
    arguments = ["decode", *(["--set", options.set] if options.set else [])]
    sys.exit(compare(options, arguments, compare_case, print_head, print_row))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`attn bench prefill` beside PyTorch's scaled_dot_product_attention, on one GPU.

    prefill_torch.py PROGRAM [--shape NAME]... [--bench FILE] [--json] [--seconds N]

PyTorch reads contiguous K and V of the same shape, and is timed as attn bench times: a CUDA graph of
as many calls, or of those that take REPLAY_US, replayed, after a fifth of a second. Each fused backend
is tried with enable_gqa, and with K and V repeated for each query head; the fastest counts, and where
both run flash and cuDNN are shown apart. A chunk, whose queries are the last of the keys, is a causal
mask aligned to the lower right. Ragged calls, which PyTorch has no call for, show the program's numbers
alone.

Accuracy: both get the same tensors, a file of `attn sample` of one sequence of the same shape with at
most ACCURACY_TOKENS query tokens and ACCURACY_KEYS keys, in pages or contiguous as the shape is, and
are held against the softmax in double precision. Of PyTorch the fastest backend and cuDNN compute it;
the smaller error counts.

--bench: what `attn bench prefill --json` has just printed on this machine, in place of a run.
--seconds: after so many the rest has the program's numbers alone.

Exit status 77 where PyTorch, CUDA or a pack for the GPU is missing; 1 if a shape is slower than
PyTorch, or its relative RMS error more than RMS_SLACK times PyTorch's.
"""

import functools
import sys

from beside_torch import (SDPBackend, causal_lower_right, compare, compute_exact, find_type, gather, is_over,
                          make_parser, relative_rms, run_sample, scaled_dot_product_attention, sdpa_kernel,
                          time_graph, torch)

SAMPLES = 11
# Long calls bring the card to its limit of power: as attn bench, after so many seconds of them.
WARM_UP_S = 0.2
# Microseconds of a replay, about; and how many times as long as the fastest one a call may take that is
# still timed, unless it is flash or cuDNN as they come.
REPLAY_US = 5000
TOO_SLOW = 3
# Of the case whose errors are compared, at most.
ACCURACY_TOKENS = 2048
ACCURACY_KEYS = 4096
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def make_calls(shape, q, k, v):
    """(label, function) of everything that might run."""
    if shape["q_offset"]:
        # Query token i sees keys up to q_offset + i.
        mask = causal_lower_right(q.shape[2], k.shape[2])
        options = {"attn_mask": mask}
    else:
        options = {"is_causal": True}
    ratio = shape["num_q_heads"] // shape["num_kv_heads"]
    wide_k, wide_v = (k, v) if ratio == 1 else (t.repeat_interleave(ratio, dim=1) for t in (k, v))

    def call_gqa():
        return scaled_dot_product_attention(q, k, v, enable_gqa=ratio > 1, **options)

    def call_wide():
        return scaled_dot_product_attention(q, wide_k, wide_v, **options)

    for name in BACKENDS:
        label = name.split("_", maxsplit=1)[0].lower()
        yield f"{label} gqa", getattr(SDPBackend, name), call_gqa
        if ratio > 1:
            yield f"{label} repeated", getattr(SDPBackend, name), call_wide


def try_call(backend, call):
    """Microseconds of a call, about, or None if the backend does not take it; its plan is then made,
    which a capture could not."""
    try:
        with sdpa_kernel(backend):
            call()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError, ValueError):
        return None
    return max(start.elapsed_time(stop) * 1e3, 1.0)


def time_backend(backend, call, calls):
    graph = torch.cuda.CUDAGraph()
    with sdpa_kernel(backend), torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    us = time_graph(graph, calls, SAMPLES, WARM_UP_S)
    graph.reset()
    return us


def make_tensor(shape, heads, tokens):
    # As models hold them, tokens before heads.
    size = (shape["batch"], tokens, heads, shape["head_dim"])
    return torch.randn(size, dtype=torch.float32, device="cuda").to(find_type(shape["dtype"])).transpose(1, 2)


def time_torch(shape, calls):
    """{label: us}."""
    q = make_tensor(shape, shape["num_q_heads"], shape["q_len"])
    k, v = (make_tensor(shape, shape["num_kv_heads"], shape["q_offset"] + shape["q_len"]) for _ in range(2))
    tried = [(try_call(backend, call), label, backend, call)
             for label, backend, call in make_calls(shape, q, k, v)]
    tried = [way for way in tried if way[0] is not None]
    least = min((way[0] for way in tried), default=0)
    found = {}
    for us, label, backend, call in tried:
        if us <= TOO_SLOW * least or label in ("cudnn gqa", "flash gqa"):
            found[label] = time_backend(backend, call, max(min(calls, int(REPLAY_US / us)), 1))
    del q, k, v
    torch.cuda.empty_cache()
    return found


def fastest(found, prefix=""):
    """The label, or None."""
    return min((label for label in found if label.startswith(prefix)), key=found.get, default=None)


@functools.lru_cache(maxsize=1)
def run_exact(program, tokens, keys, *options):
    """q, k and v of one sequence, o of the program, and the exact one; [1, heads, tokens, dim] all."""
    tensors, own = run_sample(program, "prefill", "--q-len", tokens, "--len", keys, *options)
    if "k" in tensors:
        k, v = tensors["k"], tensors["v"]
    else:
        k, v = (gather(tensors[name], tensors["block_table"], keys)[None] for name in ("k_pool", "v_pool"))
    q = tensors["q"].view(1, *tensors["q"].shape[-3:])
    q, k, v, own = (tensor.transpose(1, 2) for tensor in (q, k, v, own.view(q.shape)))
    return q, k, v, own, compute_exact(q, k, v)


def compare_accuracy(program, shape, labels):
    """Relative RMS errors of the program and of PyTorch on the same tensors; of those that are named,
    the smallest."""
    tokens = min(shape["q_len"], ACCURACY_TOKENS)
    offset = min(shape["q_offset"], ACCURACY_KEYS - tokens)
    kind = ["--page", shape["page_size"]] if shape["page_size"] else ["--contiguous"]
    q, k, v, own, exact = run_exact(
        program, tokens, offset + tokens, *kind, "--heads", f"{shape['num_q_heads']}/{shape['num_kv_heads']}",
        "--dim", shape["head_dim"], "--dtype", shape["dtype"])
    errors = []
    for label, backend, call in make_calls(dict(shape, q_len=tokens, q_offset=offset), q, k, v):
        if label in labels:
            with sdpa_kernel(backend):
                errors.append(relative_rms(call(), exact))
    return relative_rms(own, exact), min(errors)


def compare_case(options, case):
    row = {"case": case["case"], "us": case.get("us"), "tflops": case.get("tflops"),
           "twin_speedup": case.get("twin_speedup"), "rms": case.get("relative_rms"), "torch_rms": None,
           "cudnn_us": None, "cudnn_tflops": None, "cudnn_ratio": None, "flash_us": None,
           "flash_tflops": None, "flash_ratio": None, "torch_backend": None, "ratio": None,
           "error": case.get("error")}
    if not case["ok"] or case["shape"]["ragged"] or is_over(options):
        return row
    found = time_torch(case["shape"], max(case["calls"], 1))
    if not found:
        return row
    for name in ("cudnn", "flash"):
        if fastest(found, name):
            us = found[fastest(found, name)]
            row.update({f"{name}_us": us, f"{name}_tflops": case["flops"] / us * 1e-6,
                        f"{name}_ratio": us / case["us"]})
    row["torch_backend"] = fastest(found)
    row["ratio"] = found[row["torch_backend"]] / case["us"]
    if not is_over(options):
        labels = (row["torch_backend"], fastest(found, "cudnn"))
        row["rms"], row["torch_rms"] = compare_accuracy(options.program, case["shape"], labels)
        torch.cuda.empty_cache()
    return row


COLUMNS = (("us", 10, ".2f"), ("tflops", 8, ".1f"), ("twin_speedup", 6, ".2f"),
           ("cudnn_tflops", 8, ".1f"), ("cudnn_ratio", 7, ".3f"), ("flash_tflops", 8, ".1f"),
           ("flash_ratio", 7, ".3f"), ("ratio", 7, ".3f"), ("rms", 9, ".3e"), ("torch_rms", 9, ".3e"))
TITLES = ("us", "TFLOP/s", "twin", "cuDNN", "ratio", "flash", "ratio", "best", "rms", "torch rms")


def print_head():
    print("twin: time of the original / time of its twin; cuDNN, flash: TFLOP/s of those backends;\n"
          "ratio: their time / time of attn; best: of the fastest backend, which is named last;\n"
          "rms: relative RMS errors\n")
    cells = " ".join(f"{title:>{width}}" for title, (_, width, _) in zip(TITLES, COLUMNS))
    print(f"{'case':36} {cells}  backend")


def print_row(row):
    cells = " ".join(f"{'-' if row[key] is None else format(row[key], form):>{width}}"
                     for key, width, form in COLUMNS)
    print(f"{row['case']:36} {cells}  {row['torch_backend'] or '-'}", flush=True)


if __name__ == "__main__":
    sys.exit(compare(make_parser(__doc__).parse_args(), ["prefill"], compare_case, print_head, print_row))

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

import argparse
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import warnings

SKIPPED = 77
WARM_UPS = 2
SAMPLES = 15
ACCURACY_KEYS = 16384
RMS_SLACK = 1.05


def skip(sentence):
    print(f"skipped: {sentence}")
    sys.exit(SKIPPED)


def attn(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)


def run_bench(options):
    checked = attn(options.program, "check")
    if checked.returncode:
        skip(checked.stderr.strip() or "the program finds no GPU that fits a pack")
    if options.bench:
        return json.loads(pathlib.Path(options.bench).read_text(encoding="utf-8"))
    arguments = ["--set", options.set] if options.set else []
    for name in options.shape:
        arguments += ["--shape", name]
    done = attn(options.program, "bench", "decode", "--json", *arguments)
    sys.stderr.write(done.stderr)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    return json.loads(done.stdout)


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


def time_graph(graph, calls):
    samples = []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM_UPS + SAMPLES):
        # The first keeps the GPU busy until the second has been enqueued.
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / calls)
    return sorted(samples[WARM_UPS:])[SAMPLES // 2]


def time_backend(backend, call, k, v, calls):
    graph = torch.cuda.CUDAGraph()
    with sdpa_kernel(backend), torch.cuda.graph(graph):
        for i in range(calls):
            call(k[i % len(k)], v[i % len(v)])
    us = time_graph(graph, calls)
    graph.reset()
    return us


def time_torch(shape, copies, calls):
    """[(us, label, backend)], the fastest first."""
    dtype = DTYPES[shape["q_dtype"]]
    size = (copies, shape["batch"], shape["num_kv_heads"], attended(shape), shape["head_dim"])
    k, v = (torch.empty(size, dtype=dtype, device="cuda").normal_() for _ in range(2))
    q = torch.randn((shape["batch"], shape["num_q_heads"], shape["head_dim"]), device="cuda").to(dtype)
    found = [(time_backend(backend, call, k, v, calls), label, backend)
             for label, backend, call in make_calls(shape, q) if works(backend, call, k[0], v[0])]
    del k, v, q
    torch.cuda.empty_cache()
    return sorted(found, key=lambda timed: timed[0])


def read_tensors(path):
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        part = torch.frombuffer(bytearray(data[begin:end]), dtype=FILE_DTYPES[entry["dtype"]])
        tensors[name] = part.reshape(entry["shape"]).cuda()
    return tensors


def gather(pool, tensors, shape):
    """[batch, kv_heads, keys, dim] of the attended keys."""
    sequences = []
    for row, length in zip(tensors["block_table"], tensors["seq_lens"].tolist()):
        pages = pool[row[:-(-length // shape["page_size"])].long()]
        keys = pages.flatten(0, 1)[:length]
        sequences.append(keys[length - attended(dict(shape, len=length)):].transpose(0, 1))
    return torch.stack(sequences).contiguous()


def compute_exact(q, k, v):
    batch, heads, dim = q.shape
    rows = q.double().view(batch, k.shape[1], heads // k.shape[1], dim)
    weights = torch.softmax(rows @ k.double().mT / math.sqrt(dim), dim=-1)
    return (weights @ v.double()).view(batch, heads, dim)


def relative_rms(o, exact):
    return ((o.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


def compare_accuracy(program, shape, label):
    """Relative RMS errors of the program and of PyTorch on the same tensors."""
    batch = min(shape["batch"], 2)
    length = min(shape["len"], max(ACCURACY_KEYS // batch, shape["window"]))
    with tempfile.TemporaryDirectory() as folder:
        case, out = (os.path.join(folder, name) for name in ("case", "out"))
        for arguments in (
                ("sample", "decode", "--batch", batch, "--len", length, "--heads",
                 f"{shape['num_q_heads']}/{shape['num_kv_heads']}", "--dim", shape["head_dim"], "--page",
                 shape["page_size"], "--window", shape["window"], "--dtype", shape["q_dtype"], "-o", case),
                ("run", case, "--device", "gpu", "-o", out)):
            done = attn(program, *arguments)
            if done.returncode:
                sys.exit(f"attn {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        tensors, own = read_tensors(case), read_tensors(out)["o"]
    q, k, v = tensors["q"], gather(tensors["k_pool"], tensors, shape), gather(tensors["v_pool"], tensors, shape)
    (backend, call), = [(backend, call) for name, backend, call in make_calls(shape, q) if name == label]
    with sdpa_kernel(backend):
        peer = call(k, v).reshape(q.shape)
    exact = compute_exact(q, k, v)
    return relative_rms(own.view(q.shape), exact), relative_rms(peer, exact)


def compare_case(program, case):
    shape = case["shape"]
    row = {"case": case["case"], "us": case.get("us"), "limit_share": case.get("limit_share"),
           "host_us": case.get("host_us"), "launch_us": case.get("launch_us"), "torch_us": None,
           "torch_backend": None, "ratio": None, "rms": case.get("relative_rms"), "torch_rms": None,
           "error": case.get("error")}
    if not case["ok"] or not has_call(shape) or time.monotonic() > END:
        return row
    found = time_torch(shape, case["copies"], case["calls"])
    if not found:
        return row
    row["torch_us"], row["torch_backend"], _ = found[0]
    row["ratio"] = row["torch_us"] / row["us"]
    row["rms"], row["torch_rms"] = compare_accuracy(program, shape, row["torch_backend"])
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
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"{torch.cuda.get_device_name()}\n"
          "ratio: time of PyTorch / time of attn; host, launch: us of one call, and of the smallest launch\n")
    print(f"{'case':34} {'us':>9} {'share':>7} {'torch us':>9} {'backend':16} {'ratio':>6} {'host':>6} "
          f"{'launch':>6} {'rms':>9} {'torch rms':>9}")


def find_fault(row):
    if row["ratio"] is not None and row["ratio"] < 1:
        return f"{row['us']:.2f} us, slower than PyTorch's {row['torch_us']:.2f}"
    if row["torch_rms"] is not None and row["rms"] > RMS_SLACK * row["torch_rms"]:
        return f"relative RMS error {row['rms']:.3e}, more than {RMS_SLACK} times PyTorch's {row['torch_rms']:.3e}"
    return None


def compare(options):
    bench = run_bench(options)
    rows = []
    if not options.json:
        print_head()
    for case in bench["cases"]:
        rows.append(compare_case(options.program, case))
        if not options.json:
            print_row(rows[-1])
    if options.json:
        json.dump({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                   "device": torch.cuda.get_device_name(), "rows": rows}, sys.stdout, indent=2)
        print()
    faults = [(row["case"], find_fault(row)) for row in rows if find_fault(row)]
    for name, fault in faults:
        print(f"{name}: {fault}", file=sys.stderr)
    failed = any(not case["ok"] and not case["skipped"] for case in bench["cases"])
    return 1 if faults or failed else 0


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="path of attn")
    parser.add_argument("--set", help="as of attn bench")
    parser.add_argument("--shape", action="append", default=[], help="as of attn bench")
    parser.add_argument("--bench", metavar="FILE", help="its cases, in place of a run")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = read_options()
    END = time.monotonic() + OPTIONS.seconds
    warnings.simplefilter("ignore")
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
        SDPBackend.CUDNN_ATTENTION  # pylint: disable=pointless-statement
    except (ImportError, AttributeError):
        skip("PyTorch 2.5 or newer is needed")
    if not torch.cuda.is_available():
        skip("PyTorch finds no CUDA device")
    DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
    FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
    sys.exit(compare(OPTIONS))

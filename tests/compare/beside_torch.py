# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with PyTorch share: the program, a graph's time, and both on the same tensors."""

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

warnings.simplefilter("ignore")
try:
    # Not all are used here.  pylint: disable=unused-import
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention
    SDPBackend.CUDNN_ATTENTION  # pylint: disable=pointless-statement
except (ImportError, AttributeError):
    # require_torch says so.
    torch = SDPBackend = sdpa_kernel = causal_lower_right = scaled_dot_product_attention = None

START = time.monotonic()
SKIPPED = 77
WARM_UPS = 2
RMS_SLACK = 1.05
# As attn bench, and as safetensors call them.
TYPES = {"bf16": "bfloat16", "fp16": "float16",
         "BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32"}


def make_parser(text):
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="path of attn")
    parser.add_argument("--shape", action="append", default=[], help="as of attn bench")
    parser.add_argument("--bench", metavar="FILE", help="its cases, in place of a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--seconds", type=float, default=3600)
    return parser


def skip(sentence):
    print(f"skipped: {sentence}")
    sys.exit(SKIPPED)


def is_over(options):
    """Whether --seconds have passed."""
    return time.monotonic() > START + options.seconds


def require_torch():
    if torch is None:
        skip("PyTorch 2.5 or newer is needed")
    if not torch.cuda.is_available():
        skip("PyTorch finds no CUDA device")


def find_type(name):
    return getattr(torch, TYPES[name])


# ---- the program

def attn(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, check=False)


def run_bench(options, arguments):
    """The cases of `attn bench` with the arguments, or those of --bench."""
    checked = attn(options.program, "check")
    if checked.returncode:
        skip(checked.stderr.strip() or "the program finds no GPU that fits a pack")
    if options.bench:
        return json.loads(pathlib.Path(options.bench).read_text(encoding="utf-8"))["cases"]
    shapes = [part for name in options.shape for part in ("--shape", name)]
    done = attn(options.program, "bench", *arguments, "--json", *shapes)
    sys.stderr.write(done.stderr)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    return json.loads(done.stdout)["cases"]


def read_tensors(path):
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        part = torch.frombuffer(bytearray(data[begin:end]), dtype=find_type(entry["dtype"]))
        tensors[name] = part.reshape(entry["shape"]).cuda()
    return tensors


def run_sample(program, *options):
    """The tensors of a file of `attn sample` with the options, and o of the program on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        case, out = (os.path.join(folder, name) for name in ("case", "out"))
        for arguments in (("sample", *options, "-o", case), ("run", case, "--device", "gpu", "-o", out)):
            done = attn(program, *arguments)
            if done.returncode:
                sys.exit(f"attn {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return read_tensors(case), read_tensors(out)["o"]


# ---- PyTorch

def time_graph(graph, calls, samples, warm_up_s=0.0):
    """Microseconds of one of so many calls: the median of the samples, after WARM_UPS of them, or as many
    as take so long."""
    begin, warm_ups = time.monotonic(), 0
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_replay():
        # The first keeps the GPU busy until the second has been enqueued.
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / calls

    while warm_ups < WARM_UPS or time.monotonic() - begin < warm_up_s:
        time_replay()
        warm_ups += 1
    return sorted(time_replay() for _ in range(samples))[samples // 2]


def gather(pool, pages, length):
    """[keys, kv_heads, dim] of the first keys of a sequence."""
    return pool[pages[:-(-length // pool.shape[1])].long()].flatten(0, 1)[:length]


def compute_exact(q, k, v):
    """[batch, heads, tokens, dim] in double precision: the last query token sees every key, each one
    before it one key less."""
    tokens, keys = q.shape[2], k.shape[2]
    hidden = torch.ones((tokens, keys), dtype=torch.bool, device=q.device).triu(keys - tokens + 1)

    def attend(q, k, v):
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[3])
        return torch.softmax(scores.masked_fill_(hidden, -math.inf), dim=-1) @ v.double()

    # A KV head at a time: the scores of all of them would be gigabytes.
    heads = zip(*(tensor.chunk(k.shape[1], dim=1) for tensor in (q, k, v)))
    return torch.cat([attend(*head) for head in heads], dim=1)


def relative_rms(o, exact):
    return ((o.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


# ---- the table

def find_fault(row):
    if row["ratio"] is not None and row["ratio"] < 1:
        return f"{row['us']:.2f} us, slower than PyTorch's {row['us'] * row['ratio']:.2f}"
    if row["torch_rms"] is not None and row["rms"] > RMS_SLACK * row["torch_rms"]:
        return (f"relative RMS error {row['rms']:.3e}, more than {RMS_SLACK} times PyTorch's "
                f"{row['torch_rms']:.3e}")
    return None


def compare(options, arguments, compare_case, print_head, print_row):
    """The exit status, after the table or the JSON, and what is wrong."""
    require_torch()
    cases, rows = run_bench(options, arguments), []
    found = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
             "device": torch.cuda.get_device_name()}
    if not options.json:
        print(f"PyTorch {found['torch']}, cuDNN {found['cudnn']}, {found['device']}")
        print_head()
    for case in cases:
        rows.append(compare_case(options, case))
        if not options.json:
            print_row(rows[-1])
    if options.json:
        json.dump({**found, "rows": rows}, sys.stdout, indent=2)
        print()
    faults = [(row["case"], find_fault(row)) for row in rows if find_fault(row)]
    for name, fault in faults:
        print(f"{name}: {fault}", file=sys.stderr)
    failed = any(not case["ok"] and not case["skipped"] for case in cases)
    return 1 if faults or failed else 0

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`attn bench prefill` beside PyTorch's scaled_dot_product_attention, on one GPU.

    prefill_torch.py PROGRAM [--shape NAME]... [--bench FILE] [--json] [--seconds N]

PyTorch reads contiguous K and V of the same shape, and is timed as attn bench times: a CUDA graph of
as many calls, or of those that take REPLAY_US, replayed. Each fused backend is tried with
enable_gqa, and with K and V repeated for each query head; the fastest counts, and where both run
flash and cuDNN are shown apart. A chunk, whose
queries are the last of the keys, is a causal mask aligned to the lower right. Ragged calls, which
PyTorch has no call for, show the program's numbers alone.

--bench: what `attn bench prefill --json` has just printed on this machine, in place of a run.
--seconds: after so many the rest has the program's numbers alone.

Exit status 77 where PyTorch, CUDA or a pack for the GPU is missing; 1 if a shape is slower than
PyTorch.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
import warnings

SKIPPED = 77
WARM_UPS = 2
SAMPLES = 11
# Microseconds of a replay, about; and how many times as long as the fastest one a call may take that is
# still timed, unless it is flash or cuDNN as they come.
REPLAY_US = 5000
TOO_SLOW = 3
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


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
        return json.loads(pathlib.Path(options.bench).read_text(encoding="utf-8"))["cases"]
    arguments = [part for name in options.shape for part in ("--shape", name)]
    done = attn(options.program, "bench", "prefill", "--json", *arguments)
    sys.stderr.write(done.stderr)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    return json.loads(done.stdout)["cases"]


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
    graph.reset()
    return sorted(samples[WARM_UPS:])[SAMPLES // 2]


def make_tensor(shape, heads, tokens):
    # As models hold them, tokens before heads.
    size = (shape["batch"], tokens, heads, shape["head_dim"])
    return torch.randn(size, dtype=torch.float32, device="cuda").to(DTYPES[shape["dtype"]]).transpose(1, 2)


def time_torch(shape, calls):
    """{label: us}."""
    q = make_tensor(shape, shape["num_q_heads"], shape["q_len"])
    k, v = (make_tensor(shape, shape["num_kv_heads"], shape["q_offset"] + shape["q_len"]) for _ in range(2))
    tried = [(try_call(backend, call), label, backend, call) for label, backend, call in make_calls(shape, q, k, v)]
    tried = [way for way in tried if way[0] is not None]
    least = min((way[0] for way in tried), default=0)
    found = {}
    for us, label, backend, call in tried:
        if us <= TOO_SLOW * least or label in ("cudnn gqa", "flash gqa"):
            found[label] = time_backend(backend, call, max(min(calls, int(REPLAY_US / us)), 1))
    del q, k, v
    torch.cuda.empty_cache()
    return found


def fastest(found, prefix):
    return min((us for label, us in found.items() if label.startswith(prefix)), default=None)


def compare_case(case):
    row = {"case": case["case"], "us": case.get("us"), "tflops": case.get("tflops"),
           "twin_speedup": case.get("twin_speedup"), "rms": case.get("relative_rms"),
           "cudnn_us": None, "cudnn_tflops": None, "cudnn_ratio": None, "flash_us": None,
           "flash_tflops": None, "flash_ratio": None, "torch_backend": None, "ratio": None,
           "error": case.get("error")}
    if not case["ok"] or case["shape"]["ragged"] or time.monotonic() > END:
        return row
    found = time_torch(case["shape"], max(case["calls"], 1))
    for name in ("cudnn", "flash"):
        us = fastest(found, name)
        if us is not None:
            row.update({f"{name}_us": us, f"{name}_tflops": case["flops"] / us * 1e-6,
                        f"{name}_ratio": us / case["us"]})
    if found:
        row["torch_backend"] = min(found, key=found.get)
        row["ratio"] = found[row["torch_backend"]] / case["us"]
    return row


COLUMNS = (("us", 10, ".2f"), ("tflops", 8, ".1f"), ("twin_speedup", 6, ".2f"), ("cudnn_tflops", 8, ".1f"),
           ("cudnn_ratio", 7, ".3f"), ("flash_tflops", 8, ".1f"), ("flash_ratio", 7, ".3f"), ("ratio", 7, ".3f"))
TITLES = ("us", "TFLOP/s", "twin", "cuDNN", "ratio", "flash", "ratio", "best")


def print_head():
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"{torch.cuda.get_device_name()}\n"
          "twin: time of the original / time of its twin; cuDNN, flash: TFLOP/s of those backends;\n"
          "ratio: their time / time of attn; best: of the fastest backend, which is named last\n")
    cells = " ".join(f"{title:>{width}}" for title, (_, width, _) in zip(TITLES, COLUMNS))
    print(f"{'case':36} {cells}  backend")


def print_row(row):
    cells = " ".join(f"{'-' if row[key] is None else format(row[key], form):>{width}}"
                     for key, width, form in COLUMNS)
    print(f"{row['case']:36} {cells}  {row['torch_backend'] or '-'}", flush=True)


def compare(options):
    cases, rows = run_bench(options), []
    if not options.json:
        print_head()
    for case in cases:
        rows.append(compare_case(case))
        if not options.json:
            print_row(rows[-1])
    if options.json:
        json.dump({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                   "device": torch.cuda.get_device_name(), "rows": rows}, sys.stdout, indent=2)
        print()
    slower = [row for row in rows if row["ratio"] is not None and row["ratio"] < 1]
    for row in slower:
        print(f"{row['case']}: {row['us']:.2f} us, slower than PyTorch's {row['us'] * row['ratio']:.2f}",
              file=sys.stderr)
    failed = any(not case["ok"] and not case["skipped"] for case in cases)
    return 1 if slower or failed else 0


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="path of attn")
    parser.add_argument("--shape", action="append", default=[], help="as of attn bench prefill")
    parser.add_argument("--bench", metavar="FILE", help="its cases, in place of a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--seconds", type=float, default=3600)
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = read_options()
    END = time.monotonic() + OPTIONS.seconds
    warnings.simplefilter("ignore")
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention
        SDPBackend.CUDNN_ATTENTION  # pylint: disable=pointless-statement
    except (ImportError, AttributeError):
        skip("PyTorch 2.5 or newer is needed")
    if not torch.cuda.is_available():
        skip("PyTorch finds no CUDA device")
    DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
    sys.exit(compare(OPTIONS))

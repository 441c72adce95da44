#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Paged decode on PyTorch tensors, by ctypes, in a CUDA graph: captured once, and replayed for
other lengths, other pages and other queries than it was captured with.

    torch_decode.py [LIBATTN]

LIBATTN is libattn.so.0 unless given. The structs are those of attn/decode.h and attn/device.h, field
by field. Exit status 77 where PyTorch, a GPU, or a pack that fits it is missing.
"""

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t
from ctypes import c_uint32, c_void_p

SKIPPED = 77

OK, NO_DEVICE, NO_PACK = 0, -3, -4
DEVICE_HOST, DEVICE_CURRENT = 1, 2
BF16, FP16, E4M3 = 1, 2, 3


class Sized(ctypes.Structure):
    """A struct whose first field is its size. All else is 0, as the C initialisers have it."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), **fields)


class OpenParams(Sized):
    """struct attn_device_open_params"""

    _fields_ = [
        ("size", c_uint32), ("kind", c_int32), ("ordinal", c_int32), ("grid_limit", c_int32),
        ("target", c_char_p), ("pack_dir", c_char_p), ("splitk_policy", c_char_p),
        ("log", c_void_p), ("log_user", c_void_p),
    ]

    def __init__(self, **fields):
        super().__init__(**{"kind": DEVICE_HOST, **fields})


class DecodeParams(Sized):
    """struct attn_decode_params"""

    _fields_ = [
        ("size", c_uint32), ("q_dtype", c_int32), ("kv_dtype", c_int32), ("batch", c_int32),
        ("q_len", c_int32), ("num_q_heads", c_int32), ("num_kv_heads", c_int32),
        ("head_dim", c_int32), ("page_size", c_int32), ("max_pages_per_seq", c_int32),
        ("num_pages", c_int64), ("q", c_void_p), ("q_stride", c_int64), ("o", c_void_p),
        ("k_pool", c_void_p), ("v_pool", c_void_p), ("k_page_stride", c_int64),
        ("k_token_stride", c_int64), ("k_head_stride", c_int64), ("v_page_stride", c_int64),
        ("v_token_stride", c_int64), ("v_head_stride", c_int64), ("block_table", c_void_p),
        ("seq_lens", c_void_p), ("sinks", c_void_p), ("lse", c_void_p), ("scale", c_float),
        ("softcap", c_float), ("window", c_int32), ("k_scale", c_float), ("v_scale", c_float),
        ("k_scales", c_void_p), ("v_scales", c_void_p), ("max_decode_seqs", c_int32),
        ("workspace", c_void_p), ("workspace_bytes", c_size_t), ("counters", c_void_p),
        ("fault", c_void_p), ("q_token_stride", c_int64), ("tree_mask", c_void_p),
        ("mask_words", c_int32), ("window_form", c_int32), ("v_block_table", c_void_p),
        ("table_stride", c_int64), ("skip_table", c_void_p), ("skip_table_length", c_int32),
        ("dropped_blocks", c_void_p),
    ]

    def __init__(self, **fields):
        super().__init__(**{"q_len": 1, "scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, **fields})


class DecodeShape(Sized):
    """struct attn_decode_shape"""

    _fields_ = [
        ("size", c_uint32), ("q_dtype", c_int32), ("kv_dtype", c_int32), ("batch", c_int32),
        ("q_len", c_int32), ("num_q_heads", c_int32), ("num_kv_heads", c_int32),
        ("head_dim", c_int32), ("page_size", c_int32), ("max_pages_per_seq", c_int32),
        ("window", c_int32), ("max_decode_seqs", c_int32), ("has_skip_table", c_int32),
    ]


class DecodePlan(Sized):
    """struct attn_decode_plan"""

    _fields_ = [
        ("size", c_uint32), ("kernel", c_char_p), ("num_splits", c_int32), ("chunk_keys", c_int32),
        ("grid", c_int32), ("block", c_int32), ("smem_bytes", c_int32),
        ("workspace_bytes", c_size_t), ("num_counters", c_int32), ("kv_bytes", c_double),
        ("other_bytes", c_double), ("flops", c_double),
    ]


class AttnError(Exception):
    """A refused call: its status, and the sentence that says why."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


class Attn:
    """The library, and a device."""

    def __init__(self, path, kind):
        self.library = ctypes.CDLL(path)
        self.library.attn_last_error.restype = c_char_p
        for name, *arguments in [
            ("attn_device_open", POINTER(c_void_p), POINTER(OpenParams)),
            ("attn_decode_plan", c_void_p, POINTER(DecodeShape), POINTER(DecodePlan)),
            ("attn_decode", c_void_p, POINTER(DecodeParams), c_void_p),
        ]:
            getattr(self.library, name).argtypes = arguments
        self.library.attn_device_close.argtypes = [POINTER(c_void_p)]
        self.library.attn_device_close.restype = None
        self.device = c_void_p()
        self.call("attn_device_open", byref(self.device), byref(OpenParams(kind=kind)))

    def call(self, name, *arguments):
        # The sentence is that of this thread's last call: it is read before another one.
        status = getattr(self.library, name)(*arguments)
        if status != OK:
            raise AttnError(status, self.library.attn_last_error().decode())

    def plan(self, params):
        """The kernel, and the sizes of workspace and counters, for all lengths of this shape."""
        fields = [name for name, _ in DecodeShape._fields_[1:-1]]
        shape = DecodeShape(**{name: getattr(params, name) for name in fields},
                            has_skip_table=1 if params.skip_table else 0)
        plan = DecodePlan()
        self.call("attn_decode_plan", self.device, byref(shape), byref(plan))
        return plan

    def decode(self, params, stream=None):
        self.call("attn_decode", self.device, byref(params), stream)

    def close(self):
        """Work in flight has to be done."""
        self.library.attn_device_close(byref(self.device))


# The rest needs PyTorch and a GPU.
BATCH, Q_HEADS, KV_HEADS, DIM, PAGE, PAGES_PER_SEQ = 8, 32, 8, 128, 16, 64


def make_tensors(torch):
    """A batch of the largest size, whose contents change in place: a graph keeps addresses."""
    num_pages = BATCH * PAGES_PER_SEQ
    pool = (num_pages, PAGE, KV_HEADS, DIM)
    heads = (BATCH, Q_HEADS, DIM)
    return {
        "q": torch.randn(heads, device="cuda").bfloat16(),
        "o": torch.empty(heads, device="cuda", dtype=torch.bfloat16),
        "k_pool": torch.randn(pool, device="cuda").bfloat16(),
        "v_pool": torch.randn(pool, device="cuda").bfloat16(),
        "block_table": torch.randperm(num_pages, device="cuda", dtype=torch.int32)
                       .view(BATCH, PAGES_PER_SEQ),
        "seq_lens": torch.full((BATCH,), 100, device="cuda", dtype=torch.int32),
        "fault": torch.full((1,), 2**31 - 1, device="cuda", dtype=torch.int32),
    }


def make_params(torch, attn, tensors):
    """The call, and what it needs beside its tensors; both have to live as long as the graph."""
    params = DecodeParams(
        q_dtype=BF16, kv_dtype=BF16, batch=BATCH, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, page_size=PAGE, max_pages_per_seq=PAGES_PER_SEQ,
        num_pages=len(tensors["k_pool"]), scale=DIM**-0.5,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()})
    plan = attn.plan(params)
    workspace = torch.empty(plan.workspace_bytes, device="cuda", dtype=torch.uint8)
    counters = torch.zeros(plan.num_counters, device="cuda", dtype=torch.int32)
    params.workspace, params.workspace_bytes = workspace.data_ptr() or None, workspace.numel()
    params.counters = counters.data_ptr() or None
    print(f"{plan.kernel.decode()}: {plan.grid} blocks, {plan.workspace_bytes} bytes of workspace")
    return params, (workspace, counters)


def reference(torch, tensors):
    """The definition in double precision, and the error bound of attn/decode.h, of each element."""
    rows, bounds = [], []
    for b, length in enumerate(tensors["seq_lens"].tolist()):
        pages = tensors["block_table"][b].long()
        k, v = (tensors[name][pages].flatten(0, 1)[:length].double().transpose(0, 1)
                for name in ("k_pool", "v_pool"))
        q = tensors["q"][b].double().view(KV_HEADS, Q_HEADS // KV_HEADS, DIM)
        weights = torch.softmax(q @ k.transpose(1, 2) * DIM**-0.5, dim=-1)
        exact = weights @ v
        largest = (q.abs() @ k.abs().transpose(1, 2) * DIM**-0.5).amax(dim=-1, keepdim=True)
        bound = 2**-8 * exact.abs() + (2**-8 + 2**-15 + 2**-21 * largest) * (weights @ v.abs())
        rows.append(exact.view(Q_HEADS, DIM))
        bounds.append(bound.view(Q_HEADS, DIM))
    return torch.stack(rows), torch.stack(bounds)


def check(torch, tensors, label):
    """False beyond the bound, or if a page or a length was reported."""
    exact, bound = reference(torch, tensors)
    worst = ((tensors["o"].double() - exact).abs() / bound).max().item()
    has_fault = tensors["fault"].item() != 2**31 - 1
    print(f"{label}: at most {worst:.3f} of the bound{', with a fault' if has_fault else ''}")
    return worst <= 1 and not has_fault


def run(torch, attn):
    torch.manual_seed(1)
    tensors = make_tensors(torch)
    params, kept = make_params(torch, attn, tensors)
    attn.decode(params, torch.cuda.current_stream().cuda_stream)
    passed = check(torch, tensors, "eager")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.decode(params, torch.cuda.current_stream().cuda_stream)
    for length in (1, 17, 500, PAGE * PAGES_PER_SEQ):
        tensors["q"].normal_()
        tensors["seq_lens"].copy_(torch.randint(1, length + 1, (BATCH,)))
        tensors["block_table"].copy_(torch.randperm(BATCH * PAGES_PER_SEQ).view(BATCH, -1))
        tensors["o"].fill_(float("nan"))
        graph.replay()
        passed &= check(torch, tensors, f"replayed, up to {length} keys")
        replayed = tensors["o"].clone()
        attn.decode(params, torch.cuda.current_stream().cuda_stream)
        if not torch.equal(replayed, tensors["o"]):
            print("an eager call gives other bits")
            passed = False
    torch.cuda.synchronize()
    del graph, kept
    return passed


def main():
    try:
        import torch
    except ImportError:
        print("skipped: there is no PyTorch here")
        return SKIPPED
    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU")
        return SKIPPED
    # Makes PyTorch's context current, where DEVICE_CURRENT finds it.
    torch.cuda.synchronize()
    try:
        attn = Attn(sys.argv[1] if len(sys.argv) > 1 else "libattn.so.0", DEVICE_CURRENT)
    except AttnError as error:
        print(f"skipped: {error}")
        return SKIPPED if error.status in (NO_DEVICE, NO_PACK) else 1
    try:
        return 0 if run(torch, attn) else 1
    finally:
        attn.close()


if __name__ == "__main__":
    sys.exit(main())

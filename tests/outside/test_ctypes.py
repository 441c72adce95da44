# SPDX-License-Identifier: Apache-2.0
"""The structs of examples/torch_decode.py are those of the headers, byte for byte, and its calls work:
on the host executor, for which it needs neither PyTorch nor a GPU.

usage: test_ctypes.py SOURCE_ROOT LIBATTN [COMPILER ...]
"""

import ctypes
import pathlib
import sys
import tempfile

from installed import expect, run

DIM, PAGE = 64, 16
INITS = {"OpenParams": "ATTN_DEVICE_OPEN_PARAMS_INIT", "DecodeParams": "ATTN_DECODE_PARAMS_INIT"}


def describe(example):
    """What Python says of each struct, enum value and initialiser, and the C that says the same."""
    said, asked = [], []
    for name in ("OpenParams", "DecodeParams", "DecodeShape", "DecodePlan"):
        struct = getattr(example, name)
        c_name = struct.__doc__
        said.append(f"{c_name} {ctypes.sizeof(struct)}")
        asked.append(f'printf("{c_name} %zu\\n", sizeof({c_name}));')
        for field, kind in struct._fields_:
            said.append(f"{field} {getattr(struct, field).offset} {ctypes.sizeof(kind)}")
            asked.append(f'printf("{field} %zu %zu\\n", offsetof({c_name}, {field}), '
                         f"sizeof((({c_name} *) 0)->{field}));")
        if name in INITS:
            said.append(bytes(struct()).hex())
            asked.append(f"{{ const {c_name} init = {INITS[name]}; print(&init, sizeof(init)); }}")
    for python, c in [("OK", "OK"), ("NO_DEVICE", "ERROR_NO_DEVICE"), ("NO_PACK", "ERROR_NO_PACK"),
                      ("DEVICE_HOST", "DEVICE_HOST"), ("DEVICE_CURRENT", "DEVICE_CURRENT"),
                      ("BF16", "DTYPE_BF16"), ("FP16", "DTYPE_FP16"), ("E4M3", "DTYPE_E4M3")]:
        said.append(f"{c} {getattr(example, python)}")
        asked.append(f'printf("{c} %d\\n", ATTN_{c});')
    return said, asked


def check_layout(example, source, compiler, folder):
    said, asked = describe(example)
    (folder / "layout.c").write_text(
        "#include <attn/attn.h>\n#include <stdio.h>\n"
        "static void print(const void *const bytes, const size_t size)\n{\n"
        "    for (size_t i = 0; i < size; i++) printf(\"%02x\", ((const unsigned char *) bytes)[i]);\n"
        "    printf(\"\\n\");\n}\n"
        "int main(void)\n{\n" + "".join(f"    {line}\n" for line in asked) + "    return 0;\n}\n")
    run(*compiler, "-std=c11", "-I", source / "include", folder / "layout.c", "-o", folder / "layout")
    lines = run(folder / "layout").splitlines()
    different = [pair for pair in zip(said, lines, strict=True) if pair[0] != pair[1]]
    expect(not different, f"Python, C: {different}")


def check_call(example, library):
    """Two keys that score alike: the mean of their values, 1 and 3."""
    attn = example.Attn(library, example.DEVICE_HOST)
    kind = ctypes.c_uint16 * (PAGE * DIM)
    q, o, k, v = kind(), kind(), kind(), kind()
    for at in range(DIM):
        v[at], v[DIM + at] = 0x3F80, 0x4040
    params = example.DecodeParams(
        q_dtype=example.BF16, kv_dtype=example.BF16, batch=1, num_q_heads=1, num_kv_heads=1,
        head_dim=DIM, page_size=PAGE, max_pages_per_seq=1, num_pages=1,
        q=ctypes.addressof(q), o=ctypes.addressof(o), k_pool=ctypes.addressof(k),
        v_pool=ctypes.addressof(v))
    numbers = (ctypes.c_int32 * 2)(0, 2)
    params.block_table = ctypes.addressof(numbers)
    params.seq_lens = ctypes.addressof(numbers) + 4
    expect(attn.plan(params).kernel == b"host executor", "the plan names another kernel")
    attn.decode(params)
    expect(list(o[:DIM]) == [0x4000] * DIM, f"the output is {o[:DIM]}")
    params.head_dim = 65
    try:
        attn.decode(params)
    except example.AttnError as error:
        expect("head_dim is 65" in str(error) and error.status < 0, f"it says: {error}")
    else:
        sys.exit("a head_dim of 65 was not refused")
    attn.close()


def main():
    source, library = pathlib.Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(source / "examples"))
    import torch_decode
    with tempfile.TemporaryDirectory() as name:
        check_layout(torch_decode, source, sys.argv[3:] or ["cc"], pathlib.Path(name))
    check_call(torch_decode, library)


if __name__ == "__main__":
    main()

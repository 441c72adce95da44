#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ptxas says of each kernel, beside what its target has: registers, spills, local and shared
memory. `ninja kernel-report` prints it; the test `packs` fails where a limit is passed.

usage: kernel_report.py SOURCE_ROOT FOLDER TARGET ...
FOLDER has the *.ptxas that the build keeps, one a kernel.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Of an SM, of every chip that is or was a target.
REGISTERS = 65536
# Threads are given registers 8 at a time.
REGISTER_UNIT = 8
# What the system takes of an SM's shared memory for each block, in bytes.
RESERVED_SMEM = 1024

# Bytes that a thread of a kernel may spill, by the end of its name. Others may not spill at all: in
# the loop over leaves it costs as much of L2 as K and V.
SPILLS = {"_d32": 8, "_d64": 8, "_e4m3_d32": 32, "_e4m3_d128_r16": 32,
          # Skip-softmax, not tuned yet: scores of leaves whose V is not there wait beside a leaf.
          "_skip": 80, "_d512_r16_skip": 256,
          # Of a tile of 32 keys for 32 rows a warp a few: still faster than 16 rows a warp.
          "_d128_fa128": 64,
          # In the warps that copy, whose registers the others have, and outside of that loop.
          "_d64_r192": 256, "_r32": 100, "_r64": 100, "_d128_r32": 128, "_d128_r64": 128}

# The library counts threads and shared memory of a row's blocks here, which needs the rest.
SOURCES = ["pack", "elf_check", "env", "status", "version"]


def read_conf(path):
    """Key -> value, as keyval reads it."""
    pairs = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0]
        if "=" in line:
            key, value = line.split("=", 1)
            pairs[key.strip()] = value.strip()
    return pairs


def read_rows(path):
    """Name -> (key -> value) of a kernels.conf."""
    return {name: dict(word.split("=") for word in words.split()[1:])
            for name, words in read_conf(path).items()}


def write_row(row):
    """The initialiser that targets/meson.build makes of a row."""
    words = (f".{key} = {value if value.isdigit() else f'ATTN_ROW_{value.upper()}'}"
             for key, value in row.items())
    return "{ " + ", ".join(words) + " }"


def count_blocks(root, rows):
    """(threads, dynamic shared memory) of a block of each row, as the library counts them."""
    listed = ",\n".join(map(write_row, rows))
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "blocks.c"), pathlib.Path(folder, "blocks")
        source.write_text(f"""
#include "pack_scan.h"
#include <stdio.h>
static const struct attn_pack_row rows[] = {{ {listed} }};
int main(void)
{{
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        printf("%d %d\\n", attn_pack_row_threads(&rows[i]), attn_pack_row_smem(&rows[i]));
    return 0;
}}
""")
        compiler = os.environ.get("CC", "cc").split()
        folders = [word for name in (".", "src", "include") for word in ("-I", root / name)]
        subprocess.run([*compiler, "-std=c11", "-D_GNU_SOURCE", '-DATTN_PACK_DIR=""', *folders,
                        source, *(root / "src" / f"{name}.c" for name in SOURCES),
                        "-o", program, "-ldl"], check=True)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [tuple(map(int, line.split())) for line in lines.splitlines()]


def read_ptxas(path):
    """What ptxas says of the one kernel that it compiled, with the functions that are not inline; None
    if it says nothing of one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    used = re.search(r"Used (\d+) registers", text)
    if not frames or not used:
        return None
    smem = re.search(r"(\d+) bytes smem", text)
    local, stores, loads = (sum(map(int, column)) for column in zip(*frames))
    return {"registers": int(used[1]), "local": local, "spills": max(stores, loads),
            "static": int(smem[1]) if smem else 0, "warned": "C75" in text}


def allowed_spills(name):
    if name.startswith("prefill") and not name.endswith(("_r192", "_fa128")):
        return 0
    return max((most for end, most in SPILLS.items() if name.endswith(end)), default=0)


def find_faults(name, row, figures, block, smem_per_block):
    """Sentences, one a limit that is passed. `block` is that of count_blocks."""
    threads, dynamic = block
    per_sm = int(row.get("per_sm", 1))
    most = allowed_spills(name)
    registers = -(-figures["registers"] // REGISTER_UNIT) * REGISTER_UNIT * threads * per_sm
    smem = figures["static"] + dynamic
    taken, room = per_sm * (smem + RESERVED_SMEM), smem_per_block + RESERVED_SMEM
    # Local memory is where registers are spilled to, and arrays that have no fixed index.
    for kind in ("spills", "local"):
        if figures[kind] > most:
            what = "spills" if kind == "spills" else "has local memory of"
            yield f"{name} {what} {figures[kind]} bytes a thread, more than {most}"
    if registers > REGISTERS:
        yield f"{per_sm} blocks of {name} take {registers} registers of an SM's {REGISTERS}"
    if taken > room:
        yield f"{per_sm} blocks of {name} take {taken} bytes of an SM's {room}"
    if figures["warned"]:
        yield f"ptxas ignores something that {name} asks for: a C75xx line"


def report(root, folder, target):
    """Prints a target's table; returns what find_faults says of its rows."""
    chip = read_conf(root / "targets" / target / "target.conf")
    rows = read_rows(root / "targets" / target / "kernels.conf")
    room = int(chip["smem_per_block"])
    print(f"{target} ({chip['arch']}): {REGISTERS} registers an SM, {room} bytes of shared memory "
          "a block\n"
          f"{'kernel':34}{'threads':>8}{'an SM':>6}{'registers':>10}{'spills':>7}{'local':>6}"
          f"{'shared':>8}{'of it':>6}")
    faults = []
    for (name, row), block in zip(rows.items(), count_blocks(root, rows.values()), strict=True):
        figures = read_ptxas(folder / f"{target}-{name}.ptxas")
        if not figures:
            faults.append(f"{target}-{name}.ptxas says nothing of a kernel")
            continue
        smem = figures["static"] + block[1]
        print(f"{name:34}{block[0]:8}{row.get('per_sm', '-'):>6}{figures['registers']:10}"
              f"{figures['spills']:7}{figures['local']:6}{smem:8}{100 * smem / room:5.0f}%")
        faults += find_faults(name, row, figures, block, room)
    print("".join(f"limit passed: {fault}\n" for fault in faults))
    return faults


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__.strip())
    root, folder = map(pathlib.Path, sys.argv[1:3])
    faults = [fault for target in sys.argv[3:] for fault in report(root, folder, target)]
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

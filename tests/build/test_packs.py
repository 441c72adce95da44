# SPDX-License-Identifier: Apache-2.0
"""What the build made: each fatbin holds its rows and its chip's code and nothing else, no kernel
spills, packs are small, and the shared objects export and need what they should. Of every target,
built or not: an SM holds the blocks that kernels.conf says, and kernels that have to give equal
bits cut equal leaves.

usage: test_packs.py SOURCE_ROOT [--core LIBATTN] [--pack TARGET FATBIN PACK] ...
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import fatbin

KIND_ELF = 2
MAX_PACK_BYTES = 20 * 1000 * 1000
# libc, what older C libraries keep beside it, and the loader, which thread-local variables need.
MAY_NEED = {"libc", "libdl", "libpthread"}
LOADER = re.compile(r"ld-linux")
# Runtimes of sanitizers, in such builds.
SANITIZER = re.compile(r"lib(a|ub|t|l)san$")

failures = []


def expect(condition, sentence):
    if not condition:
        failures.append(sentence)


def read_conf(path):
    """Key -> value, as keyval reads it."""
    pairs = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0]
        if "=" in line:
            key, value = line.split("=", 1)
            pairs[key.strip()] = value.strip()
    return pairs


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def exported(library):
    """Names of the dynamic symbols that a library defines for others."""
    lines = [line.split() for line in run("nm", "-D", "--defined-only", str(library)).splitlines()]
    return {words[-1].split("@")[0] for words in lines if words[-2] not in "wv"}


def read_needed(library):
    return re.findall(r"\(NEEDED\).*\[(.+?)\.so", run("readelf", "-d", "-W", str(library)))


def needed(library):
    return {n for n in read_needed(library) if not SANITIZER.search(n) and not LOADER.match(n)}


# Bytes that a lane of a kernel may spill, by the end of its name. Others may not spill at all: in
# the loop over leaves it costs as much of L2 as K and V.
SPILLS = {"_d128": 8, "_e4m3_d128": 16, "_d128_r16": 24, "_e4m3_d128_r16": 144, "_d512": 96,
          # Skip-softmax, not tuned yet: scores of leaves whose V is not there wait beside a leaf.
          "_skip": 96, "_e4m3_d128_r16_skip": 192, "_d512_r16_skip": 336,
          # In the warps that copy.
          "_d64_r192": 16}


def check_ptxas(target, row, report, limit):
    text = report.read_text(encoding="utf-8")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
    expect(spills, f"{target}: {report.name} says nothing of spills")
    prefill = row.startswith("prefill") and not row.endswith("_r192")
    allowed = max((most for end, most in SPILLS.items() if not prefill and row.endswith(end)),
                  default=0)
    expect(max(spills, default=0) <= allowed,
           f"{target}: {row} spills {spills} bytes, more than {allowed}")
    expect("C75" not in text, f"{target}: {report.name} has a C75xx line")
    used = [int(n) for n in re.findall(r"(\d+) bytes smem", text)]
    expect(all(n <= limit for n in used), f"{target}: {row} uses {used} bytes of {limit}")


def check_pack(root, target, fatbin_path, pack):
    chip = read_conf(root / "targets" / target / "target.conf")
    rows = read_conf(root / "targets" / target / "kernels.conf")
    number = int(re.sub(r"\D", "", chip["arch"]))
    kernels = []
    for kind, arch, payload in fatbin.read_entries(fatbin_path.read_bytes()):
        expect(kind == KIND_ELF, f"{target}: an entry of kind {kind}, which is no cubin")
        expect(arch == number, f"{target}: code for architecture {arch}, not {number}")
        if kind == KIND_ELF:
            kernels += fatbin.read_kernels(payload)
    expect(
        sorted(kernels) == sorted(rows),
        f"{target}: the fatbin holds {sorted(kernels)}, kernels.conf {sorted(rows)}",
    )
    expect(
        b" -L /" not in fatbin_path.read_bytes(),
        f"{target}: the fatbin names folders that nvlink was to find libraries in",
    )
    for row, words in rows.items():
        report = fatbin_path.parent / f"{target}-{row}.ptxas"
        check_ptxas(target, row, report, int(chip["smem_per_block"]))
    if pack.suffix == ".so":
        size = pack.stat().st_size
        expect(
            size <= MAX_PACK_BYTES, f"{pack.name} has {size} bytes, the limit is {MAX_PACK_BYTES}"
        )
        expect(exported(pack) == {"attn_pack"}, f"{pack.name} exports {sorted(exported(pack))}")
        expect(needed(pack) <= {"libc"}, f"{pack.name} needs {sorted(needed(pack))}")
        check_paths(root, pack)


def check_paths(root, library):
    """Nothing of the machine that built it. (Sanitizers name source files, so such builds do.)"""
    if any(map(SANITIZER.search, read_needed(library))):
        return
    contents = library.read_bytes()
    for path in (root.resolve(), library.resolve().parents[1]):
        expect(str(path).encode() not in contents, f"{library.name} holds the path {path}")


# What the system takes of an SM's shared memory for each block, in bytes.
RESERVED_SMEM = 1024
PREFILL_ARGUMENTS = ["head_dim", "rows", "tile", "warps", "stages"]
SMEM_ARGUMENTS = ["head_dim", "kv_bytes", "rows", "tile", "warps", "stages", "levels", "ahead"]


def read_rows(path):
    """Name -> (key -> value), of kernels of attention."""
    rows = {}
    for name, words in read_conf(path).items():
        row = dict(word.split("=") for word in words.split()[1:])
        if row["op"] in ("decode", "prefill"):
            rows[name] = {**row, "kv_bytes": 1 if row["kv"] == "e4m3" else 2}
    return rows


def count_smem(root, rows):
    """Bytes of a block of each row, as the library counts them."""
    prints = ""
    for row in rows:
        keys = PREFILL_ARGUMENTS if row["op"] == "prefill" else SMEM_ARGUMENTS
        call = ", ".join(str(row.get(key, 0)) for key in keys)
        prints += f'printf("%d\\n", attn_{row["op"]}_smem_bytes({call}));'
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "smem.c"), pathlib.Path(folder, "smem")
        source.write_text(
            '#include "kernels/decode/decode_params.h"\n'
            '#include "kernels/prefill/prefill_params.h"\n#include <stdio.h>\n'
            f"int main(void) {{ {prints} return 0; }}\n"
        )
        compiler = os.environ.get("CC", "cc").split()
        run(*compiler, "-std=c11", "-I", str(root), "-o", str(program), str(source))
        return [int(line) for line in run(str(program)).split()]


# Rows of a target that are equal in these give equal bits: `tile` cuts the leaves.
KIND = ["op", "q", "kv", "head_dim", "math"]


def check_tiles(targets):
    for target, rows in targets.items():
        firsts = {}
        for name, row in rows.items():
            first = firsts.setdefault(tuple(row.get(key) for key in KIND), name)
            tile, wanted = row.get("tile"), rows[first].get("tile")
            expect(tile is not None and tile == wanted,
                   f"{target}: {name} has tile={tile}, {first} of the same kind tile={wanted}")


def check_blocks(root, targets):
    sizes = iter(count_smem(root, [row for rows in targets.values() for row in rows.values()]))
    for target, rows in targets.items():
        chip = read_conf(root / "targets" / target / "target.conf")
        # An SM has that of the largest block, and what the system takes of it.
        room = int(chip["smem_per_block"]) + RESERVED_SMEM
        for name, row in rows.items():
            prefill = row["op"] == "prefill"
            # Of prefill, what the kernel's registers allow, and 1 unless it says so.
            per_sm, smem = int(row.get("per_sm", prefill)), next(sizes)
            expect(per_sm >= 1, f"{target}: {name} has no per_sm")
            expect(prefill or int(row.get("levels", -1)) >= 0, f"{target}: {name} has no levels")
            taken = per_sm * (smem + RESERVED_SMEM)
            expect(
                taken <= room,
                f"{target}: {per_sm} blocks of {name} take {taken} bytes of an SM's {room}",
            )


def check_core(root, core):
    strangers = [name for name in exported(core) if not name.startswith("attn_")]
    expect(not strangers, f"{core.name} exports {strangers}")
    expect("attn_decode" in exported(core), f"{core.name} does not export attn_decode")
    expect(needed(core) <= MAY_NEED, f"{core.name} needs {sorted(needed(core) - MAY_NEED)}")
    # The pack folder is a path that it may hold: the rest is not.
    check_paths(root, core)
    headers = "".join(f.read_text() for f in sorted((root / "include" / "attn").glob("*.h")))
    declared = set(re.findall(r"ATTN_API[^;]*?\b(attn_\w+)\(", headers))
    expect(
        exported(core) == declared,
        f"exported, and in no header: {sorted(exported(core) - declared)}; "
        f"in a header, and not exported: {sorted(declared - exported(core))}",
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--core", type=pathlib.Path)
    parser.add_argument("--pack", nargs=3, action="append", default=[])
    args = parser.parse_args()
    confs = sorted(args.root.glob("targets/*/kernels.conf"))
    expect(confs, f"there is no target in {args.root}")
    targets = {conf.parent.name: read_rows(conf) for conf in confs}
    check_tiles(targets)
    if shutil.which(os.environ.get("CC", "cc").split()[0]):
        check_blocks(args.root, targets)
    if args.core and args.core.suffix != ".a":
        check_core(args.root, args.core)
    for target, image, pack in args.pack:
        check_pack(args.root, target, pathlib.Path(image), pathlib.Path(pack))
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

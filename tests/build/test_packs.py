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

import fatbin

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from kernel_report import count_blocks, find_faults, read_conf, read_rows, report  # noqa: E402

KIND_ELF = 2
MAX_PACK_BYTES = 20 * 1000 * 1000
# libc, what older C libraries keep beside it, and the loader, which thread-local variables need.
MAY_NEED = {"libc", "libdl", "libpthread"}
LOADER = re.compile(r"ld-linux")
# Runtimes of sanitizers, in such builds.
SANITIZER = re.compile(r"lib(a|ub|t|l)san$")

# Of a kernel that is not built.
NOTHING = {"registers": 0, "spills": 0, "local": 0, "static": 0, "warned": False}
# ptxas and nvlink leave their command lines in what they make.
ARCH = re.compile(rb"-arch (sm_\w+)")
# What a compiler makes of names that no other source may see has a hash of the source's path.
HASHED = re.compile(r"_INTERNAL_|_GLOBAL__N_|__nv_static|_[0-9a-f]{8}_")

failures = []


def expect(condition, sentence):
    if not condition:
        failures.append(sentence)


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


def check_limits():
    """Each limit can be passed, and is then named."""
    row, block = {"op": "decode", "per_sm": "2"}, (192, 100_000)
    sound = {"registers": 168, "spills": 0, "local": 0, "static": 0, "warned": False}
    assert not list(find_faults("decode_bf16_d64", row, sound, block, 232_448))
    for key, value, word in [
        ("registers", 169, "registers"), ("spills", 12, "spills 12"), ("local", 16, "local memory"),
        ("static", 16_000, "bytes of an SM"), ("warned", True, "C75"),
    ]:
        faults = list(find_faults("decode_bf16_d64", row, {**sound, key: value}, block, 232_448))
        assert len(faults) == 1 and word in faults[0], f"{key} = {value}: {faults}"
    assert HASHED.search("_ZN34_INTERNAL_0c5a1f3e_9_decode_cu_fEv")


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
            hashed = list(filter(HASHED.search, fatbin.read_symbols(payload)))
            expect(not hashed, f"{target}: names that follow the source's path: {hashed}")
    expect(
        sorted(kernels) == sorted(rows),
        f"{target}: the fatbin holds {sorted(kernels)}, kernels.conf {sorted(rows)}",
    )
    expect(
        b" -L /" not in fatbin_path.read_bytes(),
        f"{target}: the fatbin names folders that nvlink was to find libraries in",
    )
    for fault in report(root, fatbin_path.parent, target):
        expect(False, f"{target}: {fault}")
    archs = {arch.decode() for arch in ARCH.findall(pack.read_bytes())}
    expect(archs == {chip["arch"]}, f"{pack.name} holds code for {archs}, not {chip['arch']}")
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


# Rows of a target that are equal in these give equal bits: `tile` cuts the leaves.
KIND = ["op", "q", "kv", "head_dim", "math"]


def check_tiles(targets):
    for target, rows in targets.items():
        firsts = {}
        for name, row in rows.items():
            if row["op"] == "read":
                continue
            first = firsts.setdefault(tuple(row.get(key) for key in KIND), name)
            tile, wanted = row.get("tile"), rows[first].get("tile")
            expect(tile is not None and tile == wanted,
                   f"{target}: {name} has tile={tile}, {first} of the same kind tile={wanted}")


def check_blocks(root, targets):
    """Blocks an SM, as kernels.conf says, by shared memory alone: also of what is not built."""
    blocks = iter(count_blocks(root, [row for rows in targets.values() for row in rows.values()]))
    for target, rows in targets.items():
        smem = int(read_conf(root / "targets" / target / "target.conf")["smem_per_block"])
        for name, row in rows.items():
            if row["op"] == "decode":
                expect(int(row.get("per_sm", 0)) >= 1, f"{target}: {name} has no per_sm")
                expect("levels" in row, f"{target}: {name} has no levels")
            for fault in find_faults(name, row, NOTHING, next(blocks), smem):
                expect(False, f"{target}: {fault}")


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
    check_limits()
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

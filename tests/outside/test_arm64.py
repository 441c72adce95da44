# SPDX-License-Identifier: Apache-2.0
"""The program built for arm64, with tools/aarch64-linux-gnu.ini, and run by qemu-user: calls of every
operation on the host executor, from files of this machine and of its own, held against the
definition and against what they expect.

usage: test_arm64.py SOURCE_ROOT
Exit status 77, a skip, where the cross compiler, its Jansson or qemu-user is missing.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

from installed import attempt, expect, run, skip

CROSS = "aarch64-linux-gnu"
QEMU = "qemu-aarch64-static"
# Small enough for an emulated host executor; the sample's options.
SAMPLES = {
    "decode": ["decode", "--batch", 3, "--len", "0:70", "--heads", "6/2", "--dim", 64, "--page", 7],
    "decode_e4m3": ["decode", "--kv-dtype", "e4m3", "--len", 65, "--heads", "8/2", "--dim", 64],
    "decode_tree": ["decode", "--len", 40, "--heads", "4/2", "--dim", 64, "--q-len", 5, "--tree", "random"],
    "ctm": ["ctm", "--batch", 2, "--len", "20:90", "--heads", "8/2", "--dim", 64, "--q-len", 4,
            "--tree", "random"],
    "prefill": ["prefill", "--batch", 3, "--len", "5:40", "--heads", "4/2", "--dim", 64],
    "tiled": ["tiled", "--batch", 2, "--len", "10:60", "--heads", "4/2", "--dim", 64],
}
BENCHES = [
    ["decode", "--shape", "32q8 d128, one, 1k"],
    ["prefill", "--shape", "2q1 d64, 200"],
    ["swap", "--host-gb", "0.004", "--resident-gb", "0.001", "--layers", 2, "--batch", 2, "--steps", 1],
]


def build_program(source, folder):
    for tool in (f"{CROSS}-gcc", QEMU, "meson", "ninja", "pkg-config"):
        if not shutil.which(tool):
            skip(f"{tool} is not in PATH")
    if not pathlib.Path(f"/usr/lib/{CROSS}/pkgconfig/jansson.pc").exists():
        skip("there is no libjansson-dev:arm64 here")
    run("meson", "setup", folder, source, "--cross-file", source / "tools" / f"{CROSS}.ini",
        "-Dtarget=none", "-Dtests=disabled", "-Dcli=enabled", "-Dbuildtype=release")
    run("meson", "compile", "-C", folder)
    return folder / "src" / "cli" / "attn"


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        program = build_program(source, folder / "build")
        environment = {**os.environ, "ATTN_PACK_PATH": str(folder)}

        def attn(*words):
            return run(QEMU, program, *words, env=environment)

        machine = program.read_bytes()[18:20]
        expect(machine == b"\xb7\x00", f"the program is for machine {machine}")
        expect(json.loads(attn("info", "--json"))["packs"] == [], "attn info finds packs")
        cases = sorted(source.glob("tests/data/*.safetensors")) + sorted(source.glob("tests/golden/*.safetensors"))
        more = os.environ.get("ATTN_CASE_DIR")
        cases += sorted(pathlib.Path(more).glob("*.safetensors")) if more else []
        expect(cases, "there are no case files")
        for sample, options in SAMPLES.items():
            cases.append(folder / f"{sample}.safetensors")
            attn("sample", *options, "-o", cases[-1])
        for case in cases:
            found = json.loads(attn("run", case, "--device", "host", "--check", "--json"))
            expect(found["ok"] and found["checks"], f"{case}: {found}")
            print(f"{case.name}: {', '.join(check['against'] for check in found['checks'])}")
        for options in BENCHES:
            found = json.loads(attn("bench", *options, "--device", "host", "--json"))
            expect(found["op"] == options[0] and found["host_executor"], f"bench {options}: {found}")
            expect(all(case["ok"] for case in found.get("cases", [])), f"bench {options}: {found}")
        refused = attempt(QEMU, program, "run", folder / "missing", env=environment)
        expect(refused.returncode == 1 and "missing" in refused.stdout, f"a missing file: {refused.stdout}")


if __name__ == "__main__":
    main()

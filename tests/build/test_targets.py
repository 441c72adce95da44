# SPDX-License-Identifier: Apache-2.0
"""What -Dtarget and the files of targets/ may say: every configure-time error has a sentence that
names file and key, and a new chip is a new folder and nothing else.

usage: test_targets.py SOURCE_ROOT
Exit status 77, a skip, where there is no Meson, or no nvcc to build the new chip's kernels with.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import fatbin

SKIP = 77
ROOMS = ["include", "kernels", "src", "targets", "tests", "tools", "examples", "docs"]
FILES = ["meson.build", "meson_options.txt", "README.md"]

CHIP = "targets/hopper/target.conf"
ROWS = "targets/hopper/kernels.conf"
ROW = "decode_bf16_d64"

# -Dtarget, what the sentence has to contain.
BAD_LISTS = [
    ("h100", ["'h100'", "hopper", "all", "none"]),
    ("", ["empty", "hopper"]),
    ("hopper,hopper", ["'hopper'", "twice", "b200"]),
    ("all,hopper", ["all and none stand alone"]),
    ("none,hopper", ["all and none stand alone"]),
    ("hopper,none", ["all and none stand alone"]),
]

# File, pattern, what takes the place of its first match, what the sentence has to say beside the
# file's name.
BAD_FILES = [
    (CHIP, r"^arch = .*\n", "", ["arch", "missing"]),
    (CHIP, r"^arch = .*", "arch =", ["arch", "missing"]),
    (CHIP, r"^sm_count = .*\n", "", ["sm_count", "missing"]),
    (CHIP, r"^sm_count", "sm_cuont", ["sm_count", "missing"]),
    (CHIP, r"^(sm_count = .*)", r"\1\ncolour = green", ["colour", "unknown"]),
    (CHIP, r"^(sm_count = .*)", r"\1\n\1", ["sm_count", "twice"]),
    (CHIP, r"^sm_count = .*", "sm_count 132", ["sm_count 132", "key = value"]),
    (CHIP, r"^sm_count = .*", "sm_count = 0", ["sm_count = 0", "positive"]),
    (CHIP, r"^sm_count = .*", "sm_count = -3", ["sm_count = -3", "positive"]),
    (CHIP, r"^sm_count = .*", "sm_count = 12x", ["sm_count = 12x", "positive"]),
    (CHIP, r"^smem_per_block = .*", "smem_per_block = 1e5", ["smem_per_block = 1e5", "positive"]),
    (
        CHIP,
        r"^memory_bandwidth_gbs = .*",
        "memory_bandwidth_gbs = 99999999999",
        ["memory_bandwidth_gbs", "positive"],
    ),
    (
        CHIP,
        r"^compute_capability = .*",
        "compute_capability = 90",
        ["compute_capability = 90", "form"],
    ),
    (
        CHIP,
        r"^compute_capability = .*",
        "compute_capability = .9",
        ["compute_capability = .9", "form"],
    ),
    (CHIP, r"^compute_capability = .*", "compute_capability = 10.0", ["arch = ", "disagree"]),
    (CHIP, r"^arch = .*", "arch = sm_90z", ["arch = sm_90z", "disagree"]),
    (CHIP, r"^splitk_policy = .*", "splitk_policy = fast", ["splitk_policy = fast", "chunk:N"]),
    (
        CHIP,
        r"^splitk_policy = .*",
        "splitk_policy = chunk:100",
        ["splitk_policy = chunk:100", "power of two"],
    ),
    (
        CHIP,
        r"^splitk_policy = .*",
        "splitk_policy = chunk:32",
        ["splitk_policy = chunk:32", "power of two"],
    ),
    (
        CHIP,
        r"^splitk_policy = .*",
        "splitk_policy = chunk:",
        ["splitk_policy = chunk:", "power of two"],
    ),
    (CHIP, r"^hosts = .*", "hosts = amd64 x86", ["hosts = amd64 x86", "amd64 or arm64"]),
    (CHIP, r"^gqa_pack = .*", "gqa_pack = maybe", ["gqa_pack = maybe", "on nor off"]),
    (ROWS, rf"^{ROW} = \S+ ", f"{ROW} = ", [ROW, "source"]),
    (ROWS, rf"^{ROW} = .*", f"{ROW} =", [ROW, "source"]),
    (ROWS, rf"^{ROW} = \S+ ", f"{ROW} = decode/none.cu ", [ROW, "kernels/decode/none.cu"]),
    (ROWS, rf"^({ROW} = .*) warps=\d+", r"\1 warps", [ROW, "'warps'", "key=value"]),
    (ROWS, rf"^({ROW} = .*) warps=\d+", r"\1 warps=", [ROW, "'warps='", "key=value"]),
    (ROWS, rf"^({ROW} = .*) warps=\d+", r"\1 warps=4=4", [ROW, "'warps=4=4'", "key=value"]),
    (ROWS, rf"^({ROW} = .*) warps=\d+", r"\1 warps=four", [ROW, "warps=four", "integer"]),
    (ROWS, rf"^({ROW} = .*) per_sm=\d+", r"\1 per_sm", [ROW, "'per_sm'", "key=value"]),
    (ROWS, rf"^({ROW} = .*) per_sm=\d+", r"\1 per_sm=two", [ROW, "per_sm=two", "integer"]),
    (ROWS, rf"^({ROW} = .*) levels=\d+", r"\1 levels", [ROW, "'levels'", "key=value"]),
    (ROWS, rf"^({ROW} = .*) levels=\d+", r"\1 levels=two", [ROW, "levels=two", "integer"]),
    (ROWS, rf"^({ROW} = .*)", r"\1 warps=4", [ROW, "'warps'", "twice"]),
    (ROWS, rf"^({ROW} = .*)", r"\1 per_sm=1", [ROW, "'per_sm'", "twice"]),
    (ROWS, rf"^({ROW} = .*)", r"\1 levels=1", [ROW, "'levels'", "twice"]),
    (ROWS, rf"^({ROW} = .*)", r"\1 wraps=4", [ROW, "'wraps'", "unknown"]),
    (ROWS, rf"^({ROW} = .*) kv=\w+", r"\1 kv=int4", [ROW, "kv=int4", "e4m3"]),
    (ROWS, rf"^({ROW} = .*) op=\w+", r"\1", [ROW, "'op'", "missing"]),
    (ROWS, rf"^({ROW} = .*)", r"\1\n\1", [ROW, "twice"]),
]

failures = []


def expect(condition, sentence):
    if not condition:
        failures.append(sentence)


class Tree:
    """A copy of the source tree that may be damaged, and build folders beside it."""

    def __init__(self, source, folder):
        self.root = folder / "source"
        self.folder = folder
        self.count = 0
        for room in ROOMS:
            if (source / room).is_dir():
                shutil.copytree(source / room, self.root / room)
        for file in FILES:
            if (source / file).is_file():
                shutil.copy(source / file, self.root / file)

    def setup(self, *options):
        """Configures into a new folder; returns it, success, and what Meson said, as one line."""
        self.count += 1
        build = self.folder / f"build{self.count}"
        command = [
            "meson",
            "setup",
            build,
            self.root,
            "-Dtests=disabled",
            "-Dcli=disabled",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        return build, done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    @contextlib.contextmanager
    def edited(self, name, pattern, text):
        """With one line of a file replaced."""
        path = self.root / name
        whole = path.read_text(encoding="utf-8")
        damaged, found = re.subn(pattern, text, whole, count=1, flags=re.M)
        assert found == 1, f"{name} has no line like {pattern}"
        path.write_text(damaged, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(whole, encoding="utf-8")


def expect_error(tree, label, words, *options):
    build, passed, said = tree.setup(*options)
    shutil.rmtree(build, ignore_errors=True)
    expect(not passed, f"{label}: configured, and should not have")
    said = said[said.find("ERROR:") :]
    for word in words:
        expect(word in said, f"{label}: the sentence does not say {word!r}: {said}")


def write_nvcc(tree, version):
    """A native file that names an nvcc, which only knows its version, as does the nvlink beside it."""
    nvcc = tree.folder / f"nvcc-{version}"
    for tool in (nvcc, tree.folder / "nvlink"):
        tool.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n"
        )
        tool.chmod(0o755)
    native = tree.folder / f"nvcc-{version}.ini"
    native.write_text(f"[binaries]\nnvcc = '{nvcc}'\n")
    return ["--native-file", str(native)]


def test_errors(tree):
    known = write_nvcc(tree, "13.0")
    for value, words in BAD_LISTS:
        expect_error(tree, f"-Dtarget={value}", words, f"-Dtarget={value}", *known)
    for name, pattern, text, words in BAD_FILES:
        with tree.edited(name, pattern, text):
            expect_error(tree, f"{name}: {text!r}", [name, *words], "-Dtarget=hopper", *known)
    expect_error(
        tree,
        "nvcc 12.9",
        ["12.9", "13.0", "-Dtarget=none"],
        "-Dtarget=hopper",
        *write_nvcc(tree, "12.9"),
    )
    with tree.edited(
        "targets/meson.build", r"find_program\('nvcc'.*", "find_program('nvcc-0', required: false)"
    ):
        expect_error(tree, "no nvcc", ["nvcc", "install", "-Dtarget=none"], "-Dtarget=hopper")
        _, passed, said = tree.setup("-Dtarget=none")
        expect(passed, f"-Dtarget=none needs nvcc: {said}")


def list_packs(build):
    done = subprocess.run(
        ["meson", "introspect", "--targets", build], capture_output=True, text=True, check=True
    )
    names = [pathlib.Path(target["filename"][0]).name for target in json.loads(done.stdout)]
    return sorted(name[8:-3] for name in names if re.fullmatch(r"libattn-\w+\.so", name))


def test_lists(tree):
    known = write_nvcc(tree, "13.0")
    every = sorted(path.parent.name for path in tree.root.glob("targets/*/target.conf"))
    for value, wanted in [
        ("none", []),
        ("hopper", ["hopper"]),
        ("hopper,b200", ["b200", "hopper"]),
        ("all", every),
    ]:
        build, passed, said = tree.setup(f"-Dtarget={value}", *known)
        expect(passed, f"-Dtarget={value}: {said}")
        if passed:
            expect(list_packs(build) == wanted, f"-Dtarget={value} builds {list_packs(build)}")


def list_installed(build, tags):
    """Installs into a folder of its own; the paths there, without the prefix."""
    there = build / ("install-" + tags)
    subprocess.run(
        ["meson", "install", "-C", build, "--no-rebuild", "--tags", tags, "--destdir", there],
        capture_output=True,
        check=True,
    )
    return sorted(str(f.relative_to(there / "usr")) for f in there.rglob("*") if not f.is_dir())


def test_new_chip(tree):
    """A fifth chip: a copied folder, and its two files edited."""
    shutil.copytree(tree.root / "targets" / "hopper", tree.root / "targets" / "rubin")
    rows = tree.root / "targets" / "rubin" / "kernels.conf"
    row = next(line for line in rows.read_text().splitlines() if line.startswith(ROW + " "))
    rows.write_text(row.replace(ROW, "decode_new") + "\n")
    with tree.edited("targets/rubin/target.conf", r"^sm_count = .*", "sm_count = 140"):
        build, passed, said = tree.setup("-Dtarget=rubin", "--prefix=/usr", "-Dlibdir=lib")
        expect(passed, f"-Dtarget=rubin: {said}")
        if not passed:
            return
        done = subprocess.run(["ninja", "-C", build], capture_output=True, text=True)
        expect(done.returncode == 0, f"-Dtarget=rubin: {done.stdout}")
    if done.returncode != 0:
        return
    config = (build / "targets" / "attn_rubin_config.h").read_text()
    expect("#define ATTN_SM_COUNT 140\n" in config, f"attn_rubin_config.h: {config}")
    image = (build / "targets" / "attn-rubin.fatbin").read_bytes()
    kernels = [
        name for _, _, elf in fatbin.read_entries(image) for name in fatbin.read_kernels(elf)
    ]
    expect(kernels == ["decode_new"], f"attn-rubin.fatbin holds {kernels}")

    runtime = list_installed(build, "runtime,target-rubin")
    wanted = [r"lib/attn/libattn-rubin\.so", r"lib/libattn\.so\.0", r"lib/libattn\.so\.0\.[\d.]+"]
    expect(
        len(runtime) == 3 and all(map(re.fullmatch, wanted, runtime)),
        f"runtime,target-rubin: {runtime}",
    )
    expect(
        list_installed(build, "target-rubin") == ["lib/attn/libattn-rubin.so"], "target-rubin alone"
    )
    devel = list_installed(build, "devel")
    headers = sorted("include/attn/" + f.name for f in (tree.root / "include" / "attn").glob("*.h"))
    cmake = [f"lib/cmake/attn/attn-config{end}.cmake" for end in ("", "-version")]
    wanted = sorted([*headers, *cmake, "lib/libattn.so", "lib/pkgconfig/attn.pc"])
    expect(devel == wanted, f"devel: {devel}")
    pc = (build / "meson-private" / "attn.pc").read_text()
    for line in ["targets=rubin", "packdir=${libdir}/attn"]:
        expect(line in pc.splitlines(), f"attn.pc lacks {line}: {pc}")


def main():
    if not shutil.which("meson"):
        print("skipped: no meson on PATH")
        return SKIP
    os.environ.pop("DESTDIR", None)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(pathlib.Path(sys.argv[1]), pathlib.Path(folder))
        test_errors(tree)
        test_lists(tree)
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc:
            test_new_chip(tree)
    print("\n".join(failures))
    if not failures and not nvcc:
        print("skipped: no nvcc for the new chip; the rest passed")
        return SKIP
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""No room knows what another is for: who may name a chip, use asm, include CUDA, print. And
every source is named by the build.

usage: test_rooms.py SOURCE_ROOT
"""

import pathlib
import re
import sys

SOURCE = {".c", ".h", ".in", ".S", ".cu", ".cuh", ".build"}

# Rooms, pattern, files that may have it, and the rule. Comments count as well for chips: a name is
# a name.
RULES = [
    (("src", "kernels"), r"(?i)hopper|b200|b300|gb10|sm_[0-9]", r"$^", "names a chip"),
    (("src", "include", "kernels"), r"\basm\b|__asm", r"kernels/common/ptx_\w+\.cuh", "has asm"),
    (("src", "include"), r"#\s*include\s*[<\"](cuda|nv|cu[A-Z])", r"$^", "includes a CUDA header"),
    (("src", "include"), r"\bgetenv\s*\(", r"src/(env|cli/cli)\.c", "reads the environment"),
    (
        ("src",),
        r"(?<![\w_])(printf|puts|putchar|perror|exit|_exit|abort|assert)\s*\(|\b(stdout|stderr)\b",
        r"src/cli/.*",
        "prints or ends the process",
    ),
    (
        ("kernels",),
        r"__CUDA_ARCH__|using\s+namespace|__constant__",
        r"$^",
        "depends on the architecture",
    ),
]


def strip_comments(text):
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def offences(root):
    for rooms, pattern, exempt, rule in RULES:
        files = [
            f for room in rooms for f in sorted((root / room).rglob("*")) if f.suffix in SOURCE
        ]
        for file in files:
            name = file.relative_to(root).as_posix()
            if re.fullmatch(exempt, name):
                continue
            text = file.read_text(encoding="utf-8")
            if rule != "names a chip":
                text = strip_comments(text)
                # A format attribute names printf and prints nothing.
                text = text.replace("format(printf", "format(      ")
            for number, line in enumerate(text.splitlines(), 1):
                if re.search(pattern, line):
                    yield f"{name}:{number}: {rule}: {line.strip()}"


def unlisted(root):
    """Sources and test programs that no meson.build names would be neither built nor run."""
    for folder, pattern in [("src", "*.c"), ("tests", "*.c"), ("kernels", "*/*.cu")]:
        lists = [*(root / folder).rglob("meson.build"), *(root / "targets").glob("*/kernels.conf")]
        words = set(re.findall(r"[\w/.-]+", " ".join(f.read_text(encoding="utf-8") for f in lists)))
        for file in sorted((root / folder).glob(pattern)):
            name = file.relative_to(root / folder).as_posix()
            if not words & {name, name.removesuffix(".c")}:
                yield f"{folder}/{name}: no meson.build or kernels.conf names it"


def check_itself():
    """Each pattern finds what it is for."""
    samples = [
        "sm_90a",
        'asm volatile("");',
        "#include <cuda.h>",
        "getenv(x)",
        "exit(1)",
        "__CUDA_ARCH__",
    ]
    for (_, pattern, _, rule), sample in zip(RULES, samples, strict=True):
        assert re.search(pattern, sample), f"the rule '{rule}' misses {sample}"


def main():
    check_itself()
    root = pathlib.Path(sys.argv[1])
    assert (root / "src" / "pack.h").is_file(), f"{root} is not the source tree"
    found = [*offences(root), *unlisted(root)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What the tests of installed files share."""

import os
import pathlib
import re
import subprocess
import sys

SKIPPED = 77


def skip(sentence):
    print(f"skipped: {sentence}")
    sys.exit(SKIPPED)


def run(*command, **kwargs):
    """What the command prints; if it fails, all of that and an end."""
    done = attempt(*command, **kwargs)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def attempt(*command, **kwargs):
    return subprocess.run([str(word) for word in command], text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs)


def expect(condition, sentence):
    if not condition:
        sys.exit(sentence)


def install(build, root, tags):
    """Installs what is built, as it is: a test that compiles would compile beside others."""
    run("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", root,
        "--tags", tags)


class Devel:
    """An installed library with what its users compile against."""

    def __init__(self, root):
        found = list(root.rglob("attn.pc"))
        expect(len(found) == 1, f"{root} has {len(found)} files attn.pc")
        self.pc = found[0]
        self.libdir = self.pc.parents[1]
        text = self.pc.read_text(encoding="utf-8")
        self.configured = re.search(r"^prefix=(.*)$", text, re.M)[1]
        self.version = re.search(r"^Version: (.*)$", text, re.M)[1]
        self.prefix = pathlib.Path(f"{root}{self.configured}")
        self.is_static = not (self.libdir / "libattn.so").exists()

    def environment(self):
        return {**os.environ, "LD_LIBRARY_PATH": str(self.libdir)}

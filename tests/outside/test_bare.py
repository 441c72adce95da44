# SPDX-License-Identifier: Apache-2.0
"""The program where there is nothing but the runtime files and the libraries they need: a root of
its own without compiler, shell, headers, /tmp, /proc, /dev or HOME. It starts no other program and
writes nothing but the output.

usage: test_bare.py SOURCE_ROOT BUILD_ROOT
"""

import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

from installed import attempt, expect, install, run, skip

CASE = "smollm2_decode_bf16_page16.safetensors"
DEVEL = {".a", ".cmake", ".h", ".pc", ".so"}
OUTPUT = "/out/"
EXECS = {"execve", "execveat"}
WRITES = {"chmod", "chown", "creat", "fchmodat", "fchownat", "link", "linkat", "mkdir", "mkdirat",
          "mknod", "mknodat", "rename", "renameat", "renameat2", "rmdir", "symlink", "symlinkat",
          "truncate", "unlink", "unlinkat"}
OPENS_TO_WRITE = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)")


def make_root(source, build, root):
    """Installs the runtime files; returns the program and its library folder, as seen inside."""
    install(build, root, "runtime")
    files = [file for file in root.rglob("*") if not file.is_dir()]
    devel = [file.name for file in files if file.suffix in DEVEL]
    expect(not devel, f"among the runtime files are {devel}")
    (program,) = [file for file in files if file.name == "attn"]
    folders = {str(file.parent) for file in files if file.name.startswith("libattn.so.")}
    libdir = folders.pop() if folders else ""
    # What the system has to bring, loader included.
    listing = run("ldd", program, env={**os.environ, "LD_LIBRARY_PATH": libdir})
    for path in re.findall(r"(?:^|\s)(/\S+)", listing):
        if not path.startswith(str(root)):
            copy = pathlib.Path(f"{root}{path}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (root / "in").mkdir()
    shutil.copy(source / "tests" / "data" / CASE, root / "in")
    (root / OUTPUT.strip("/")).mkdir()
    return str(program).removeprefix(str(root)), libdir.removeprefix(str(root))


def find_way_in(root):
    """The command that runs another inside the root."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    chroot, unshare = shutil.which("chroot", path=path), shutil.which("unshare", path=path)
    if chroot and os.geteuid() == 0:
        return [chroot, root]
    if chroot and unshare:
        return [unshare, "--map-root-user", chroot, root]
    skip("there is no chroot here, or no unshare for users other than root")


def snapshot(root):
    """Path -> what a write would change."""
    states = {}
    for path in root.rglob("*"):
        state = path.lstat()
        if not str(path).removeprefix(str(root)).startswith(OUTPUT.rstrip("/")):
            states[path] = (state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino)
    return states


def read_trace(log, program):
    """(system call, its line) of all that the program did, itself and its threads."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [n for n, line in enumerate(lines) if f'execve("{program}"' in line]
    expect(starts, f"the trace does not show the start of {program}")
    for line in lines[starts[-1] + 1:]:
        call = re.match(r"\d*\s*(\w+)\(", line)
        if call:
            yield call[1], line


def check_trace(log, program):
    """Returns how many calls wrote to the output folder."""
    writes = 0
    for call, line in read_trace(log, program):
        expect(call not in EXECS, f"it starts a program: {line}")
        if call in WRITES or (call.startswith("open") and OPENS_TO_WRITE.search(line)):
            paths = re.findall(r'"([^"]*)"', line)
            expect(paths and all(path.startswith(OUTPUT) for path in paths), f"it writes: {line}")
            writes += 1
    return writes


def main():
    source, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    for tool in ("meson", "ldd"):
        if not shutil.which(tool):
            skip(f"{tool} is not in PATH")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        root, log = folder / "root", folder / "trace"
        program, libdir = make_root(source, build, root)
        environment = {"LD_LIBRARY_PATH": libdir} if libdir else {}
        enter = find_way_in(root)
        if attempt(*enter, program, "--version", env=environment).returncode == 125:
            skip("this user may not enter another root")
        before = snapshot(root)

        run(*enter, program, "info", env=environment)
        info = json.loads(run(*enter, program, "info", "--json", env=environment))
        expect(info, "attn info --json prints nothing")
        # liburing is opened where it is there, and nothing is linked with it.
        expect(info["swap_file_backend"] == "threads", f"liburing is among what it needs: {info}")
        case = ["run", f"/in/{CASE}", "--device", "host", "--check", "--output"]
        print(run(*enter, program, *case, f"{OUTPUT}o.safetensors", env=environment), end="")
        expect((root / "out" / "o.safetensors").stat().st_size > 0, "the output is empty")

        if attempt("strace", "-o", os.devnull, "true").returncode if shutil.which("strace") else 1:
            print("not traced: strace is missing here, or may not trace")
        else:
            trace = ["strace", "-f", "-o", log, "-e", "trace=%file,%process", *enter, program]
            run(*trace, "info", env=environment)
            expect(check_trace(log, program) == 0, "attn info writes")
            run(*trace, *case, f"{OUTPUT}traced.safetensors", env=environment)
            expect(check_trace(log, program) > 0, "the trace does not show the output's file")
        changed = {path for path, state in snapshot(root).items() if before.get(path) != state}
        changed |= before.keys() - snapshot(root).keys()
        expect(not changed, f"changed: {sorted(map(str, changed))}")


if __name__ == "__main__":
    main()

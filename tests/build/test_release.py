# SPDX-License-Identifier: Apache-2.0
"""tools/release: two clones at different paths give equal bytes, whoever builds; what is in archives
and packages; and both used where there is nothing else of libattn. With three kernels of one chip,
or without nvcc with none.

usage: test_release.py SOURCE_ROOT
Exit status 77, a skip, where tools are missing.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

SKIP = 77
# Not before the files were written: dpkg-deb by itself makes none younger than SOURCE_DATE_EPOCH.
EPOCH = 4_000_000_000
TARGET = "hopper"
KERNELS = {"decode_bf16_d64", "prefill_bf16_d64", "read"}
CASE = "tests/data/smollm2_decode_bf16_page16.safetensors"


def expect(condition, sentence):
    if not condition:
        sys.exit(sentence)


def run(*command, **kwargs):
    done = subprocess.run([str(word) for word in command], text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs)
    expect(done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}")
    return done.stdout


def make_clone(source, clone):
    def left_out(folder, names):
        """What git has not, at the top: builds, tools that were installed."""
        return [name for name in names if folder == str(source) and
                (name in (".git", ".venv") or name.startswith("build"))]

    shutil.copytree(source, clone, ignore=left_out, symlinks=True)
    rows = clone / "targets" / TARGET / "kernels.conf"
    lines = rows.read_text(encoding="utf-8").splitlines()
    rows.write_text("".join(f"{line}\n" for line in lines if line.split(" ")[0] in KERNELS))


def start_release(clone, out, targets, **environment):
    # No compiler's output is taken from a cache.
    environment = {**os.environ, "CCACHE_DISABLE": "1", "SOURCE_DATE_EPOCH": str(EPOCH),
                   **environment}
    return subprocess.Popen([clone / "tools" / "release", "--no-install", "--target", targets, out],
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)


def read_all(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_equal(first, second):
    expect(first.keys() == second.keys(), f"{sorted(first)} and {sorted(second)}")
    different = [name for name in first if first[name] != second[name]]
    expect(not different, f"two clones built different bytes: {different}")


def check_sums(files):
    listed = dict(reversed(line.split("  ")) for line in
                  files["SHA256SUMS"].decode().splitlines())
    found = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()
             if name != "SHA256SUMS"}
    expect(listed == found, f"SHA256SUMS has {listed}, the files {found}")


def check_times(archive):
    with tarfile.open(archive) as members:
        for member in members:
            expect(member.mtime == EPOCH, f"{archive.name}: {member.name} has time {member.mtime}")
            expect((member.uid, member.gid) == (0, 0), f"{member.name} has an owner")
            expect(member.mode & 0o777 in (0o644, 0o755, 0o777), f"{member.name}: {member.mode:o}")


def check_refusals(clone, folder):
    full = folder / "full"
    full.mkdir()
    (full / "file").touch()
    for options, words in [
        ([], "DIR is missing"), ([full], "is not empty"), ([folder / "x", folder / "y"], "two folders"),
        (["--arch", "i386", folder / "x"], "neither amd64 nor arm64"), (["--target"], "needs a value"),
        (["--target", "h100", folder / "x"], "no target 'h100'"), (["--fast"], "no option '--fast'"),
    ]:
        done = subprocess.run([clone / "tools" / "release", "--no-install", *options], text=True,
                              check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)})
        expect(done.returncode and words in done.stdout, f"{options}: {done.stdout}")


def list_files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def check_packages(out, root, targets, installed):
    """Unpacks them all into one root, each file from one package."""
    version = re.search(r"version: '(.*)'", (installed["clone"] / "meson.build").read_text())[1]
    wanted = {"libattn0", "libattn-dev", "attn-tools", *(f"libattn-{name}" for name in targets)}
    found = {}
    for package in sorted(out.glob("*.deb")):
        fields = dict(re.findall(r"^(\S+): (.*)", run("dpkg-deb", "-f", package), re.M))
        name = fields["Package"]
        expect(package.name == f"{name}_{version}_{fields['Architecture']}.deb", f"{package}: {fields}")
        depends = fields["Depends"]
        expect(name == "libattn0" or f"libattn0 (= {version})" in depends, f"{name}: {depends}")
        expect(name not in ("libattn0", "attn-tools") or "libc6 (>= 2." in depends, f"{name}: {depends}")
        expect((name == "libattn0") == (fields.get("Recommends") == "liburing2"), f"{name}: {fields}")
        expect("uring" not in depends, f"{name}: {depends}")
        expect(name != "attn-tools" or "libjansson4 (>= 2." in depends, f"{name}: {depends}")
        alone = root.parent / name
        run("dpkg-deb", "-x", package, alone)
        files = list_files(alone)
        notice = f"usr/share/doc/{name}/copyright"
        expect(notice in files, f"{package.name} has no {notice}")
        expect("Apache-2.0" in (alone / notice).read_text(), f"{notice} names no licence")
        found[name] = files - {notice}
        run("dpkg-deb", "-x", package, root)
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True,
                              stdout=subprocess.PIPE).stdout
        (root.parent / "data.tar").write_bytes(data)
        check_times(root.parent / "data.tar")
    expect(found.keys() == wanted, f"the packages are {sorted(found)}, not {sorted(wanted)}")
    files = sorted(file for names in found.values() for file in names)
    # What has no tag would be in none; what has two, in two.
    expect(files == sorted(installed["files"]),
           f"the packages have {files}, meson install without tags {sorted(installed['files'])}")
    for target in targets:
        expect({pathlib.Path(file).name for file in found[f"libattn-{target}"]} ==
               {f"libattn-{target}.so"}, f"libattn-{target} has {found[f'libattn-{target}']}")
    return root / "usr"


def use_program(source, prefix, targets):
    """The program finds the library and the packs of its prefix, with nothing in the environment."""
    info = json.loads(run(prefix / "bin" / "attn", "info", "--json", env={}))
    packs = {pack["name"]: pack["path"] for pack in info["packs"]}
    expect(packs.keys() == set(targets), f"attn info in {prefix}: {info}")
    for path in packs.values():
        expect(pathlib.Path(path).resolve().is_relative_to(prefix.resolve()), f"the pack is {path}")
    run(prefix / "bin" / "attn", "run", source / CASE, "--device", "host", "--check", env={})


def use_archive(source, prefix, folder):
    """A program that is compiled against it."""
    if not shutil.which("pkg-config"):
        return
    (folder_of_pc,) = prefix.glob("lib/*/pkgconfig")
    flags = run("pkg-config", "--cflags", "--libs", "attn",
                env={**os.environ, "PKG_CONFIG_PATH": str(folder_of_pc)}).split()
    compiler = os.environ.get("CC", "cc").split()
    run(*compiler, "-std=c11", source / "examples" / "smallest.c", *flags, "-o", folder / "smallest")
    run(folder / "smallest", env={"LD_LIBRARY_PATH": str(folder_of_pc.parent)})


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    for tool in ("meson", "ninja", "xz", "sha256sum"):
        if not shutil.which(tool):
            print(f"skipped: {tool} is not in PATH")
            return SKIP
    has_nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    machine = os.uname().machine
    # gb10 is packed for arm64 alone.
    wanted = f"{TARGET},gb10" if machine == "x86_64" else TARGET
    targets = [TARGET] if has_nvcc else []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        clones = [folder / "a" / "clone", folder / "another and a longer path" / "libattn"]
        outs = [folder / "out0", folder / "out1"]
        # A user's umask, language and time zone don't count either.
        users = [{}, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"}]
        releases = []
        for clone, out, user in zip(clones, outs, users, strict=True):
            make_clone(source, clone)
            os.umask(0o077 if user else 0o022)
            releases.append(start_release(clone, out, wanted if has_nvcc else "none", **user))
        os.umask(0o022)
        for release in releases:
            text = release.communicate()[0]
            expect(release.returncode == 0, text)
        files = read_all(outs[0])
        check_equal(files, read_all(outs[1]))
        check_sums(files)
        check_refusals(clones[0], folder)

        (build,) = clones[0].glob("build-release-*")
        run("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", folder / "all")
        installed = {"clone": clones[0], "files": list_files(folder / "all")}
        (archive,) = outs[0].glob("*.tar.xz")
        check_times(archive)
        run("tar", "-C", folder, "-xJf", archive)
        prefix = folder / archive.name.removesuffix(".tar.xz")
        missing = {"LICENSE", "NEWS.md", "README.md"} - list_files(prefix)
        expect(not missing, f"{archive.name} lacks {missing}")
        use_program(source, prefix, targets)
        use_archive(source, prefix, folder)
        if not shutil.which("dpkg-deb"):
            print("skipped: no dpkg-deb for the packages; the archives passed")
            return SKIP
        (folder / "debs").mkdir()
        usr = check_packages(outs[0], folder / "debs" / "root", targets, installed)
        use_program(source, usr, targets)
        print("\n".join(sorted(files)))
    if not has_nvcc:
        print("skipped: no nvcc for kernels; the rest passed")
        return SKIP
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Small projects that know of libattn only what is installed, in a prefix that was moved after it
was configured: C through pkg-config, C++ through CMake, C with libattn as a Meson subproject. The
last builds a static library, which the first two ways then use as well.

usage: test_outside.py SOURCE_ROOT BUILD_ROOT pkg-config|cmake|subproject
"""

import os
import pathlib
import shutil
import sys
import tempfile

from installed import Devel, attempt, expect, install, run, skip

HERE = pathlib.Path(__file__).resolve().parent
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def versions_to_ask_for(version):
    """Versions and ranges of them that CMake has to accept, and such that it has to refuse."""
    major, minor = map(int, version.split(".")[:2])
    accepted = [f"{major}", f"{major}.{minor}", f"{major}.{minor}...<{major + 1}"]
    refused = [f"{major + 1}", f"{major}.{minor + 1}", f"0.0...<{major}.{minor}",
               f"{major + 1}...{major + 2}"]
    return accepted, refused


def use_pkg_config(source, devel, folder):
    text = devel.pc.read_text(encoding="utf-8").replace(f"prefix={devel.configured}\n", "")
    expect(devel.configured not in text, f"attn.pc names its prefix more than once:\n{text}")
    ask = ["pkg-config", f"--define-variable=prefix={devel.prefix}"]
    environment = {**os.environ, "PKG_CONFIG_PATH": str(devel.pc.parent)}
    packs = run(*ask, "--variable=packdir", "attn", env=environment).strip()
    expect(packs == str(devel.libdir / "attn"), f"packdir is {packs}")
    # liburing, whose header the library is built with, is nobody's business here.
    asked = run(*ask, "--print-requires-private", "attn", env=environment).split()
    expect(not asked, f"attn.pc asks for {asked}")
    ask += ["--static"] if devel.is_static else []
    flags = run(*ask, "--cflags", "--libs", "attn", env=environment).split()
    program = folder / "smallest"
    compiler = os.environ.get("CC", "cc").split()
    run(*compiler, "-std=c11", *WARNINGS, source / "examples" / "smallest.c", *flags, "-o", program)
    print(run(program, env=devel.environment()), end="")


def use_cmake(_source, devel, folder):
    for file in devel.libdir.glob("cmake/attn/*"):
        text = file.read_text(encoding="utf-8")
        expect(devel.configured not in text, f"{file.name} holds the prefix {devel.configured}")
    where = f"-DCMAKE_PREFIX_PATH={devel.prefix}"
    if devel.libdir.name == "lib64":
        # Not every system's CMake looks there by itself.
        where = f"-Dattn_DIR={devel.libdir}/cmake/attn"
    configure = ["cmake", "-S", HERE / "cmake", "-B", folder, where,
                 f"-DCMAKE_CXX_FLAGS={' '.join(WARNINGS)}"]
    accepted, refused = versions_to_ask_for(devel.version)
    for version in accepted:
        run(*configure, f"-DWANTED={version}")
    run("cmake", "--build", folder)
    # CMake writes where the library lies into the program.
    print(run(folder / "softmax"), end="")
    for version in refused:
        done = attempt(*configure, f"-DWANTED={version}")
        expect(done.returncode and "considered but not accepted" in done.stdout,
               f"find_package(attn {version}) was not refused for its version:\n{done.stdout}")
    for library in devel.libdir.glob("libattn.*"):
        library.unlink()
    done = attempt(*configure, f"-DWANTED={devel.version}")
    # CMake breaks its lines where it likes.
    expect(done.returncode and "is missing: besides the headers" in " ".join(done.stdout.split()),
           f"a prefix without the library gave no sentence:\n{done.stdout}")


def use_subproject(source, folder):
    project, build = folder / "project", folder / "build"
    shutil.copytree(HERE / "subproject", project)
    shutil.copy(source / "examples" / "smallest.c", project)
    (project / "subprojects").mkdir()
    (project / "subprojects" / "attn").symlink_to(source)
    run("meson", "setup", build, project, "-Ddefault_library=static", "-Dbuildtype=plain")
    run("meson", "compile", "-C", build)
    print(run(build / "smallest"), end="")
    tests = run("meson", "test", "-C", build, "--list").splitlines()
    expect(sum("smallest" in line for line in tests) == 1 and not any("host" in t for t in tests),
           f"a project that contains libattn has these tests: {tests}")
    return build


WAYS = {"pkg-config": use_pkg_config, "cmake": use_cmake}


def use_installed(way, source, build, folder):
    install(build, folder / way, "runtime,devel")
    devel = Devel(folder / way)
    print(f"{way}, {'static' if devel.is_static else 'shared'}: ", end="", flush=True)
    WAYS[way](source, devel, folder)


def main():
    source, build = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    project = sys.argv[3]
    if project in WAYS and not shutil.which(project):
        skip(f"there is no {project} here")
    if not shutil.which("meson"):
        skip("meson, which installs what is tested, is not in PATH")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        if project in WAYS:
            use_installed(project, source, build, folder)
            return
        build = use_subproject(source, folder)
        for way in WAYS:
            if shutil.which(way):
                (folder / f"static-{way}").mkdir()
                use_installed(way, source, build, folder / f"static-{way}")
            else:
                print(f"{way}, static: not tested, there is no {way} here")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""tools/record: what it runs, what it does about benchmarks that fail, hang or are missing, and that
the tables have the numbers of the run; with a program that says what the test wants, then with the
real one on the host executor.

usage: test_record.py SOURCE_ROOT BUILD_ROOT [PROGRAM]
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HEAD = {"device": "A GPU", "host_executor": False, "driver": "CUDA 13.0", "sm_count": 7, "sm_mhz": 1980,
        "memory_mhz": 3201, "library": "0.1.0", "commit": "abc"}
# Prints the document of the set that is asked for.
PROGRAM = '''#!/usr/bin/env python3
import json, pathlib, sys, time
words = sys.argv[1:]
if words == ["check"]:
    sys.exit(0)
assert words[0] == "bench" and words[-1] == "--json", words
name = words[words.index("--set") + 1] if "--set" in words else "split" if "--policy" in words else words[1]
said = json.loads((pathlib.Path(sys.argv[0]).parent / "said.json").read_text())[name]
if said == "hang":
    time.sleep(600)
print(said if isinstance(said, str) else json.dumps(said))
sys.exit(any(not case["ok"] for case in said.get("cases", [])))
'''
# A PyTorch that can't be imported, whatever this machine has.
NO_TORCH = "raise ImportError\n"


def timed(name, us, **more):
    return {"case": name, "ok": True, "skipped": False, "us": us, "bytes": 1e9, "limit_gbs": 4000.0,
            "limit_share": 1e6 / us / 4000, "step": None, "dense_us": None, "dropped_share": None,
            "shape": {"q_len": 1}, **more}


def document(op, *cases):
    return {"op": op, **HEAD, "cases": list(cases)}


SAID = {
    "decode": document("decode", timed("32q8 d128, one, 8k", 500.0), timed("alone", 1000.0)),
    "prefill": document("prefill", {
        "case": "2k", "ok": True, "skipped": False, "us": 100.0, "flops": 4e10, "tflops": 400.0,
        "original_us": 150.0, "twin_speedup": 1.5, "shape": {"q_len": 2048, "q_offset": 0, "ragged": False}}),
    "tree": document("decode", timed("t1", 500.0), timed("t8", 750.0, shape={"q_len": 8})),
    "skip": document("decode", timed("s", 400.0, dense_us=500.0, dropped_share=0.5)),
    "split": document("decode", timed("32q8 d128, one, 8k", 850.0)),
    "pages": document("decode", timed("p64", 400.0, shape={"page_size": 64, "q_len": 1}),
                      timed("p1", 1000.0, shape={"page_size": 1, "q_len": 1})),
    "ctm": document("ctm", timed("ctm case", 625.0)),
    "tiled": document("tiled", timed("tiled case", 2500.0)),
    "short": document("prefill", timed("16 of 8k", 20.0, tflops=200.0, gbs=1000.0)),
    "batch": document("decode", timed("b1", 1.0), timed("b2", 1.0, step=1.25), timed("b3", 1.0, step=1.125)),
    "ratio": document("decode", timed("r1", 1.0), timed("r2", 1.0, step=1.75)),
    "swap": {"op": "swap", **HEAD, "num_layers": 32, "num_blocks": 1000, "batch": 8, "block_size": 16,
             "us": 592000.0, "attended_gbs": 54.0, "moved_gbs": 51.0, "limit_gbs": 60.0, "limit_share": 0.85},
}
DECODE_TORCH = {"torch": "2.11", "cudnn": 91900, "rows": [
    {"case": "32q8 d128, one, 8k", "us": 500.0, "torch_us": 450.0, "ratio": 0.9}]}
PREFILL_TORCH = {"torch": "2.11", "cudnn": 91900, "rows": [{"case": "2k", "us": 100.0, "ratio": 2.0}]}
# In README then, of each block; of the whole text where there is no block named.
WANTED = {
    "run": ["at commit abc: A GPU, driver CUDA 13.0, 7 SMs up to 1980 MHz, memory 3201 MHz.",
            "PyTorch 2.11 with cuDNN 9.19.0."],
    "decode": ["| 32q8 d128, one, 8k | 500.0 | 50.0 % | 450.0 | 0.90 |", "| alone | 1000.0 | 25.0 % |  |  |"],
    "tree": ["| a tree of 1 | 500.0 | 1.00 |", "| a tree of 8 | 750.0 | 1.50 |"],
    "pages": ["times as long as pages of 64", "| pages of 1 | 1000.0 | 2.50 |"],
    "split": ["| 32q8 d128, one, 8k | 500.0 | 850.0 | 1.70 |"],
    "batch": ["| 3 batches | 1.25 | b2 |"],
    "ratio": ["| 2 query heads a KV head | 1.75 | r2 |"],
    "skip": ["| 50.0 % | 400.0 | 500.0 | 1.25 | 1.33 |"],
    "ctm": ["| ctm case | 625.0 | 40.0 % |"],
    "prefill": ["| 2k | 100.0 | 400 | 150.0 | 1.50 | 2.00 |"],
    "short": ["| 16 of 8k | 20.0 | 200 | 1000 | 25.0 % |"],
    "tiled": ["| tiled case | 2500.0 | 10.0 % |"],
    "swap": ["| 32 | 8 of 2000 tokens | 592.0 | 54.0 | 51.0 | 60.0 | 85.0 % |"],
    "pictures": ["(docs/decode.svg)", "(docs/prefill.svg)"],
}
BLOCK = re.compile(r"<!-- record: (\w+) -->\n(.*?)<!-- end -->", re.S)


class Here:
    """A folder with a build whose program says SAID, and a copy of README."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.build = folder / "build"
        program = self.build / "src" / "cli" / "attn"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM)
        program.chmod(0o755)
        (folder / "modules").mkdir()
        (folder / "modules" / "torch.py").write_text(NO_TORCH)
        self.say({})
        self.readme = folder / "README.md"
        shutil.copy(root / "README.md", self.readme)

    def say(self, changes):
        (self.build / "src" / "cli" / "said.json").write_text(json.dumps({**SAID, **changes}))

    def record(self, *words):
        return subprocess.run([sys.executable, self.root / "tools" / "record", *map(str, words)], text=True,
                              capture_output=True, check=False, timeout=120,
                              env={**os.environ, "PYTHONPATH": str(self.folder / "modules")})

    def write(self, run, *words):
        return self.record("readme", run, "--readme", self.readme, "--pictures", self.folder / "docs", *words)

    def blocks(self):
        return dict(BLOCK.findall(self.readme.read_text(encoding="utf-8")))


def expect_ok(done):
    assert done.returncode == 0, done.stdout + done.stderr


def expect_refused(done, words):
    assert done.returncode == 1 and words in done.stderr, (words, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr


def check_tables(here):
    run, before = here.folder / "run", here.readme.read_text(encoding="utf-8")
    done = here.record("run", here.build, run)
    expect_ok(done)
    states = {name: found["state"] for name, found in json.loads((run / "run.json").read_text())["sets"].items()}
    assert {name for name, state in states.items() if state == "done"} == set(SAID), states
    assert {name for name, state in states.items() if state == "skipped"} == {"decode_torch", "prefill_torch"}, states
    # As if PyTorch had been there.
    for name, found in (("decode_torch", DECODE_TORCH), ("prefill_torch", PREFILL_TORCH)):
        (run / f"{name}.json").write_text(json.dumps(found))
    (run / "run.json").write_text(re.sub(r'"gpu": {[^}]*}', '"gpu": {}', (run / "run.json").read_text()))
    expect_ok(here.write(run, "--peak", "989"))
    blocks = here.blocks()
    assert blocks.keys() == WANTED.keys(), sorted(blocks)
    for name, lines in WANTED.items():
        for line in lines:
            assert line in blocks[name], (name, line, blocks[name])
    for name in ("decode", "prefill"):
        assert "PyTorch" in (here.folder / "docs" / f"{name}.svg").read_text(encoding="utf-8"), name
    # Nothing but the blocks changes, and a second time nothing at all.
    after = here.readme.read_text(encoding="utf-8")
    assert BLOCK.sub("", after) == BLOCK.sub("", before)
    expect_ok(here.write(run, "--peak", "989"))
    assert here.readme.read_text(encoding="utf-8") == after
    expect_refused(here.record("run", here.build, run), "is not empty")
    expect_refused(here.write(run, "--peak", "0"), "the pictures were not drawn")


def check_faults(here):
    wrong = dict(SAID["tree"], cases=[*SAID["tree"]["cases"], {"case": "wrong", "ok": False, "skipped": False}])
    here.say({"decode": "nonsense", "tree": wrong, "pages": "hang"})
    run = here.folder / "faults"
    done = here.record("run", here.build, run, "--seconds", "5")
    sets = json.loads((run / "run.json").read_text())["sets"]
    # What hangs takes the time of all behind it.
    behind = ["ctm", "tiled", "swap", "short", "batch", "ratio"]
    failed = ["decode", "decode_torch", "tree", "pages", *behind]
    expect_refused(done, "not all was recorded: ")
    assert [name for name, found in sets.items() if found["state"] == "failed"] in (
        failed, [name for name in failed if name != "decode_torch"]), sets
    assert "took longer than" in sets["pages"]["sentence"] and "were over" in sets["ratio"]["sentence"], sets
    assert "no JSON; see decode.log" in sets["decode"]["sentence"], sets
    assert sets["prefill"]["state"] == "done" and (run / "tree.json").exists(), sets
    # README says so, in place of numbers of another run.
    expect_refused(here.write(run), "this run has no decode")
    blocks = here.blocks()
    for name, words in (("decode", "This run has no decode"), ("pages", "took longer than"), ("swap", "were over"),
                        ("skip", "| 50.0 % | 400.0 |")):
        assert words in blocks[name], (name, blocks[name])


def check_sets(here):
    run = here.folder / "sets"
    expect_ok(here.record("run", here.build, run, "--sets", "swap,decode"))
    assert list(json.loads((run / "run.json").read_text())["sets"]) == ["swap", "decode"]
    # One block of a later run, and no other, not even to say what that run lacks.
    before = here.blocks()
    expect_ok(here.write(run, "--blocks", "swap"))
    after = here.blocks()
    assert after["swap"] == before["swap"] + "\nIn a later run, at commit abc.\n", after["swap"]
    assert {**after, "swap": before["swap"]} == before
    expect_refused(here.write(run, "--blocks", "swap,swab"), "swab: none of run, decode, ")
    expect_refused(here.record("run", here.build, here.folder / "none", "--sets", "decod"), "there is no decod; ")


def check_refusals(here):
    here.say({})
    expect_refused(here.record("run", here.folder, here.folder / "x"), "compile the build folder first")
    expect_refused(here.write(here.folder), "has no run.json")
    run = here.folder / "run"
    two = dict(SAID["skip"], commit="def")
    (run / "skip.json").write_text(json.dumps(two))
    expect_refused(here.write(run), "it has to be one run")
    here.readme.write_text(here.readme.read_text(encoding="utf-8").replace("record: swap", "record: swab"))
    (run / "skip.json").write_text(json.dumps(SAID["skip"]))
    expect_refused(here.write(run), "has no block for swap")
    here.say({"decode": dict(SAID["decode"], commit="abc-dirty")})
    expect_refused(here.record("run", here.build, here.folder / "dirty"), "of commit 'abc-dirty'")


def check_program(root, build, folder):
    """The real documents have what the tables ask for."""
    here = Here(root, folder / "real")
    run = folder / "host"
    expect_ok(here.record("run", build, run, "--device", "host"))
    # Most shapes are too long for the host executor.
    expect_refused(here.write(run), "no case of tree was timed in this run")
    blocks = here.blocks()
    assert "of the host executor" in blocks["run"], blocks["run"]
    for name in ("decode", "prefill", "split", "swap"):
        rows = [line.strip("| ").split(" | ") for line in blocks[name].splitlines() if line.startswith("| ")]
        assert len(rows) >= 3 and float(rows[2][1 if name != "swap" else 2]) > 0, (name, blocks[name])


def main():
    root, build = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        here = Here(root, folder / "said")
        check_tables(here)
        check_sets(here)
        check_faults(here)
        check_refusals(here)
        if len(sys.argv) > 3:
            check_program(root, build, folder)


if __name__ == "__main__":
    main()

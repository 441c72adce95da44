#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds libattn with faults put in on purpose (-Dmutation=N), and demands that the test of the
invariance that each breaks fails.

usage: mutations.py SOURCE                           the host executor's and the swap engine's
       mutations.py SOURCE --build-packs TARGET DIR  the kernels': one pack each into DIR/N
       mutations.py SOURCE --run-packs BUILD DIR     on a GPU: the tests of BUILD with those packs

Where a fault is built in: tests/mutations/reference.h, swap.h, and `#if ATTN_MUTATION == N` in kernels/.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIP = 77

# Number, test, and the fault. The numbers of a fault that both have are the same.
HOST = [
    (1, "invariance/alone_and_in_any_order", "edges of blocks follow the batch"),
    (2, "invariance/alone_and_in_any_order", "edges follow the longest sequence of the batch"),
    (3, "invariance/any_pages", "edges follow the page size"),
    (4, "invariance/any_pages", "edges follow the width of the table"),
    (5, "invariance/any_pages", "edges follow the page id of the first key"),
    (6, "invariance/any_strides", "edges follow a stride of V"),
    (7, "invariance/lse_asked_for_or_not", "without lse the last key is left out"),
    (8, "invariance/any_bytes_where_nothing_is_read", "the tail of the last page is attended"),
    (9, "invariance/any_bytes_where_nothing_is_read", "what lies before the window is attended"),
    (10, "invariance/neighbours_full_of_nan", "a NaN reaches the next sequence"),
    (11, "invariance/takes_its_own_scalars", "the window of the first call is kept"),
    (12, "trees/exact_means", "the window of a query token begins one key later"),
    (13, "trees/exact_means", "the mask is taken for a causal one"),
    (14, "trees/exact_means", "a query token always attends its own key"),
    (15, "skip/agrees_with_its_definition", "runs of skip-softmax never end"),
    (50, "swap_streams/keeps_order_in_host_memory", "tiles do not wait for their copies"),
    (51, "swap_streams/keeps_order_in_host_memory", "copies do not wait for tiles"),
    (52, "swap_streams/keeps_order_from_a_file", "the host waits for no copy"),
    (53, "swap/never_uses_what_was_written_over", "blocks stay resident when they are written"),
    (54, "swap_streams/starts_clean_after_a_failure", "blocks stay resident after a failure"),
    (55, "swap_file/notices_that_it_was_cut_off", "a read that ends early counts as whole"),
    (56, "swap_file/takes_the_other_commit_where_one_is_damaged", "indexes are not checked"),
    (57, "swap/lets_go_of_what_is_not_listed_any_more", "rounds of a layer never end"),
]

# The programs of the host's tests, by suite.
HOST_PROGRAMS = {
    "invariance": "host_invariance",
    "skip": "host_trees",
    "swap": "host_swap",
    "swap_file": "host_swap_file",
    "swap_streams": "host_swap_streams",
    "trees": "host_trees",
}

# Of kernels, with the program that has the test.
KERNEL = [
    (1, "gpu_probes", "gpu_probes/company", "leaves begin where the batch says"),
    (8, "gpu_probes", "gpu_probes/exact_window_edges", "the tail of the last page is attended"),
    (9, "gpu_probes", "gpu_probes/exact_window_edges", "what lies before the window is attended"),
    (20, "gpu_stress", "gpu_stress/one_workspace_for_all", "counters are not reset"),
    (21, "gpu_probes", "gpu_probes/sm_sweep", "roots of a sequence merge from left to right"),
    (22, "gpu_decode", "gpu_decode/every_policy", "pieces without keys are merged as well"),
    (23, "gpu_decode", "gpu_decode/gqa_packing_changes_no_byte", "unpacked rows scale q"),
    (24, "gpu_probes", "gpu_probes/high_pages", "offsets into the pool in 32 bits"),
    (25, "gpu_stress", "gpu_stress/random_tables", "a page id past the pool is clamped"),
    (26, "gpu_trees", "gpu_trees/exact_means", "a token takes its draft keys from the next row"),
    (27, "gpu_trees", "gpu_trees/exact_means", "the window of a token begins one key later"),
    (28, "gpu_trees", "gpu_trees/exact_means", "pages of V are taken from the table of K"),
    (29, "gpu_invariance", "gpu_invariance/roots_that_meet", "roots that meet have a tree of their own"),
    (30, "gpu_prefill", "gpu_prefill/twins_have_the_bits_of_originals", "twins scale q"),
    (31, "gpu_prefill", "gpu_prefill/has_the_same_bits_in_pages_and_chunks", "chunks scale q"),
    (32, "gpu_prefill", "gpu_prefill/has_the_same_bits_in_pages_and_chunks", "pages scale q"),
    (33, "gpu_prefill", "gpu_prefill/has_the_same_bits_alone_and_in_company", "batches scale q"),
    (34, "gpu_prefill", "gpu_prefill/agrees_with_the_definition", "a token sees the next key"),
    (35, "gpu_prefill", "gpu_prefill/agrees_with_the_definition", "windows begin a key early"),
    (36, "gpu_short", "short_form/has_the_bits_of_decode", "rows of longer neighbours are written"),
    (37, "gpu_short", "short_form/has_the_same_bits_alone_and_in_company", "chunks see a key more"),
    (40, "gpu_tiled", "tiled/counts_blocks_outside_the_pool_as_absent", "ids past the pool are read"),
    (41, "gpu_tiled", "tiled/counts_valid_slots_of_the_last_block", "all slots of it hold keys"),
    (42, "gpu_tiled", "tiled/has_the_same_bits_in_any_cutting", "a round is folded from its end"),
    (43, "gpu_tiled", "tiled/follows_blocks_beyond_32_bits", "offsets into a pool in 32 bits"),
    (44, "gpu_tiled", "tiled/has_the_same_bits_alone_and_in_company", "partials change places"),
]

# The rows that these tests need: of decode they leave out what a pack does not serve.
DECODE_ROWS = re.compile(r"decode_bf16_d(64|128|256)(_r16)? *=")
PREFILL_ROWS = re.compile(r"prefill_")
TILED_ROWS = re.compile(r"tiled_")
SHORT_ROWS = re.compile(r"(decode_(bf16|fp16)_d(64|128|256|512)(_r16|_r64)?|prefill_.*) *=")
ROWS = {"gpu_prefill": PREFILL_ROWS, "gpu_short": SHORT_ROWS, "gpu_tiled": TILED_ROWS}


def run(command, **kwargs):
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **kwargs
    )
    return done.returncode, done.stdout


def need(command):
    code, text = run(command)
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {code}\n{text}")


def run_test(program, test, env=None):
    """True if it passed, False if it failed; anything else ends this program."""
    # A test may be killed by what the fault does: that counts as a failure, too.
    code, text = run([program, "-j1", "--filter", test], env=env)
    if code == SKIP:
        print(text, end="")
        sys.exit(SKIP)
    if code not in (0, 1) or "Tested: 1 " not in text:
        sys.exit(f"{program} --filter {test}: exit status {code}, not of one test\n{text}")
    return code == 0


def report(wrong, number, test, passed, fault):
    """A line; notes what is not as it should be: 0 is the build without a fault."""
    good = passed == (number == 0)
    outcome = "passed" if passed else "failed"
    print(f"{'ok' if good else 'WRONG'}: {number:2} {test} {outcome}: {fault}")
    if not good:
        wrong.append(number)


def check_host(source):
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        build = pathlib.Path(folder) / "build"
        options = ["-Dtarget=none", "-Dcli=disabled", "-Dtests=enabled"]
        need(["meson", "setup", build, source, *options])
        tests = sorted({test for _, test, _ in HOST})
        for number, test, fault in [(0, test, "none") for test in tests] + HOST:
            need(["meson", "configure", build, f"-Dmutation={number}"])
            program = HOST_PROGRAMS[test.split("/")[0]]
            need(["ninja", "-C", build, f"tests/{program}", "tests/support/fake_pack_hopper.so"])
            passed = run_test(build / "tests" / program, test)
            report(wrong, number, test, passed, fault)
    return wrong


def make_thin_source(source, target, thin, needed):
    """The source tree, but of the target only the rows that match `needed`."""
    thin.mkdir()
    for part in source.iterdir():
        if part.name not in (".git", "targets"):
            (thin / part.name).symlink_to(part)
    (thin / "targets" / target).mkdir(parents=True)
    for name in ("meson.build", f"{target}/target.conf"):
        (thin / "targets" / name).symlink_to(source / "targets" / name)
    conf = (source / "targets" / target / "kernels.conf").read_text(encoding="utf-8")
    rows = [line for line in conf.splitlines(keepends=True) if needed.match(line)]
    if not rows:
        sys.exit(f"{target} has no row that matches {needed.pattern}")
    (thin / "targets" / target / "kernels.conf").write_text("".join(rows), encoding="utf-8")


def build_pack(thin, target, packs, number):
    pack = f"libattn-{target}.so"
    build = thin.parent / f"build-{number}"
    options = [f"-Dtarget={target}", "-Dcli=disabled", "-Dtests=disabled"]
    need(["meson", "setup", build, thin, *options, f"-Dmutation={number}"])
    need(["ninja", "-C", build, f"targets/{pack}"])
    (packs / str(number)).mkdir(parents=True, exist_ok=True)
    shutil.copy(build / "targets" / pack, packs / str(number) / pack)


def build_packs(source, target, packs):
    with tempfile.TemporaryDirectory() as folder:
        # Faults are built into the rows that they are in, what has none into all that are needed.
        faults = {
            number: ROWS.get(program, DECODE_ROWS) for number, program, _, _ in KERNEL
        }
        all_rows = (SHORT_ROWS, TILED_ROWS)
        faults[0] = re.compile("|".join(rows.pattern for rows in all_rows))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            builds = []
            for number, needed in faults.items():
                thin = pathlib.Path(folder) / f"source-{number}"
                make_thin_source(pathlib.Path(source).resolve(), target, thin, needed)
                builds.append(pool.submit(build_pack, thin, target, pathlib.Path(packs), number))
            for done in builds:
                done.result()


def run_packs(build, packs):
    wrong = []
    tests = sorted({(program, test) for _, program, test, _ in KERNEL})
    for number, program, test, fault in [(0, *pair, "none") for pair in tests] + KERNEL:
        env = {**os.environ, "ATTN_PACK_PATH": str(pathlib.Path(packs) / str(number))}
        passed = run_test(pathlib.Path(build) / "tests" / program, test, env)
        report(wrong, number, test, passed, fault)
    return wrong


def main():
    source, mode = sys.argv[1], sys.argv[2:3]
    wrong = []
    if mode == ["--build-packs"]:
        build_packs(source, *sys.argv[3:5])
    elif mode == ["--run-packs"]:
        wrong = run_packs(*sys.argv[3:5])
    elif not shutil.which("meson") or not shutil.which("ninja"):
        print("skipped: no meson or no ninja on PATH")
        return SKIP
    else:
        wrong = check_host(source)
    if wrong:
        print("not as it should be:", *sorted(set(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The `attn` program from outside: exit statuses, sentences, files. ATTN_PROGRAM is the program."""

import csv
import io
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["ATTN_PROGRAM"]
DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
CASE = DATA / "smollm2_decode_bf16_page16.safetensors"
COMMANDS = ("info", "check", "plan", "run", "sample", "bench")


def attn(*arguments, **environment):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, check=False)


def read_file(path):
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + size]), data[8 + size:]


def write_file(path, header, data, claimed=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if claimed is None else claimed
    pathlib.Path(path).write_bytes(struct.pack("<Q", size) + text + data)


class Program(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def expect(self, status, *arguments, **environment):
        done = attn(*arguments, **environment)
        self.assertEqual(done.returncode, status,
                         f"attn {arguments}: stdout {done.stdout!r} stderr {done.stderr!r}")
        return done

    def has_gpu(self):
        return attn("check").returncode == 0


class Usage(Program):
    def test_version_and_help(self):
        self.assertRegex(self.expect(0, "--version").stdout, r"^attn \d+\.\d+\.\d+\n$")
        text = self.expect(0, "--help").stdout
        for command in COMMANDS:
            self.assertIn(command, text)
            done = self.expect(0, command, "--help")
            self.assertTrue(done.stdout.startswith(f"Usage: attn {command}"), done.stdout)
            self.assertEqual(done.stderr, "")

    def test_wrong_usage_is_2(self):
        for arguments in ((), ("nonsense",), ("--nonsense",), ("info", "x"), ("check", "--x"), ("run",),
                          ("run", "a", "b"), ("run", CASE, "--device", "tpu"), ("run", CASE, "--lse"),
                          ("plan",), ("plan", "prefill"), ("plan", "decode", "--heads", "24"),
                          ("plan", "decode", "--heads", "7/2"), ("plan", "decode", "--batch", "-1"),
                          ("plan", "decode", "--len", "5:1"), ("plan", "decode", "--policy", "maybe"),
                          ("plan", "decode", "--dtype", "e4m3"), ("sample", "decode"),
                          ("sample", "decode", "-o"), ("bench", "ctm"), ("bench", "--shape", "no such"),
                          ("bench", "--device", "auto"), ("bench", "--set", "none"),
                          ("bench", "--policy", "maybe"),
                          ("bench", "--set", "all", "--shapes", "shapes.json")):
            done = self.expect(2, *arguments)
            self.assertEqual(done.stdout, "")
            self.assertIn("--help'", done.stderr)

    def test_no_colour_off_a_terminal(self):
        for arguments in (("run", CASE, "--check"), ("info",), ("run", "/nonexistent")):
            done = attn(*arguments)
            self.assertNotIn("\033", done.stdout + done.stderr)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run([PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("stdout cannot be written", done.stderr)


class Devices(Program):
    def test_info_needs_no_gpu(self):
        text = self.expect(0, "info").stdout
        self.assertIn("Host executor", text)
        info = json.loads(self.expect(0, "info", "--json").stdout)
        self.assertEqual(info["host_executor"]["splitk_source"], "declared")
        self.assertTrue(info["host_executor"]["batch_invariant"])
        self.assertEqual(info["gpus"] == [], info["no_gpu"] is not None)

    def test_info_says_where_a_policy_comes_from(self):
        done = self.expect(0, "info", "--json", METRALE_ATTN_DECODE_SPLITK="legacy")
        host = json.loads(done.stdout)["host_executor"]
        self.assertEqual((host["splitk_policy"], host["splitk_source"]), ("legacy", "environment"))
        self.assertFalse(host["batch_invariant"])

    def test_check_counts_kernels(self):
        done = attn("check", "--json")
        found = json.loads(done.stdout)
        self.assertEqual(done.returncode, 0 if found["ok"] else 1)
        self.assertEqual(found["kernels"] > 0, found["ok"])
        self.assertEqual(found["status"] == "ATTN_OK", found["ok"])

    def test_without_a_gpu_the_sentence_of_no_device(self):
        if self.has_gpu():
            self.skipTest("there is a GPU")
        for arguments in (("check",), ("bench",), ("run", CASE, "--device", "gpu"),
                          ("plan", "decode", "--device")):
            done = self.expect(1, *arguments)
            self.assertRegex(done.stderr, "^attn: error: ..")
        self.assertEqual(json.loads(self.expect(1, "check", "--json").stdout)["kernels"], 0)

    def test_a_driver_that_is_too_old(self):
        os.symlink(os.environ["ATTN_OLD_DRIVER"], self.path("libcuda.so.1"))
        folders = os.pathsep.join([self.folder.name, os.environ.get("LD_LIBRARY_PATH", "")])
        done = self.expect(1, "check", "--json", LD_LIBRARY_PATH=folders)
        self.assertEqual(json.loads(done.stdout)["status"], "ATTN_ERROR_DRIVER")
        self.assertIn("the NVIDIA driver is too old", done.stderr)
        info = json.loads(self.expect(0, "info", "--json", LD_LIBRARY_PATH=folders).stdout)
        self.assertIn("the NVIDIA driver is too old", info["no_gpu"])
        self.expect(0, "run", CASE, LD_LIBRARY_PATH=folders)


class Plan(Program):
    def packs(self):
        return [pack["name"] for pack in json.loads(attn("info", "--json").stdout)["packs"]
                if pack["status"] == "ATTN_OK"]

    def test_plans_for_each_target(self):
        for target in self.packs():
            done = self.expect(0, "plan", "decode", "--batch", 64, "--heads", "24/4", "--dim", 256, "--len",
                               8192, "--target", target, "--json")
            (plan,) = json.loads(done.stdout)["plans"]
            self.assertEqual(plan["target"], target)
            # K and V, two bytes an element.
            self.assertEqual(plan["kv_bytes"], 64 * 8192 * 4 * 256 * 2 * 2)
            limit = (plan["kv_bytes"] + plan["other_bytes"]) / plan["memory_bandwidth_gbs"] / 1e3
            self.assertAlmostEqual(plan["limit_us"], limit, delta=1e-6 * limit)
            self.assertGreater(plan["grid"], 0)
            text = self.expect(0, "plan", "decode", "--target", target).stdout
            self.assertIn("workspace", text)

    def test_a_window_and_a_part_page_read_less(self):
        for target in self.packs():
            def keys(*options):
                done = self.expect(0, "plan", "decode", "--heads", "32/8", "--dim", 128, "--target", target,
                                   "--json", *options)
                return json.loads(done.stdout)["plans"][0]["kv_bytes"] / (8 * 128 * 2 * 2)
            self.assertEqual(keys("--len", 1001), 1001)
            self.assertEqual(keys("--len", 5000, "--window", 128), 128)

    def test_refusals(self):
        done = self.expect(1, "plan", "decode", "--target", "no-such-target")
        self.assertIn("no-such-target", done.stderr)
        with tempfile.TemporaryDirectory() as empty:
            packs = json.loads(self.expect(0, "info", "--json", ATTN_PACK_PATH=empty).stdout)["packs"]
            # A static build has its packs in itself, and reads no folder.
            self.assertEqual([pack["path"] for pack in packs], ["built in"] * len(packs))
            done = self.expect(0 if packs else 1, "plan", "decode", ATTN_PACK_PATH=empty)
        if not packs:
            self.assertIn("no packs are found", done.stderr)
        for target in self.packs():
            done = self.expect(1, "plan", "decode", "--dim", 24, "--target", target)
            self.assertIn("24", done.stderr)


class Run(Program):
    def test_a_real_case_checks(self):
        done = self.expect(0, "run", CASE, "--check", "--device", "host")
        self.assertIn("definition  ok", done.stdout)
        self.assertIn("expected_o  ok", done.stdout)
        found = json.loads(self.expect(0, "run", CASE, "--check", "--device", "host", "--json").stdout)
        self.assertTrue(found["ok"])
        self.assertIsNone(found["fault_sequence"])
        self.assertEqual([check["against"] for check in found["checks"]], ["definition", "expected_o"])
        for check in found["checks"]:
            self.assertEqual((check["failed"], check["lse_failed"]), (0, 0))
            self.assertEqual(check["compared"], 3 * 9 * 64)
            self.assertLessEqual(check["max_ratio"], 1)

    def test_output_has_what_was_expected(self):
        out = self.path("out.safetensors")
        self.expect(0, "run", CASE, "--device", "host", "-o", out, "--lse")
        header, data = read_file(out)
        self.assertEqual(header["o"]["dtype"], "BF16")
        self.assertEqual(header["o"]["shape"], [3, 9, 64])
        self.assertEqual(header["lse"]["dtype"], "F32")
        self.assertEqual(header["lse"]["shape"], [3, 9])
        source, source_data = read_file(CASE)

        def floats(head, body, name):
            begin, end = head[name]["data_offsets"]
            part = body[begin:end]
            if head[name]["dtype"] == "F32":
                return struct.unpack(f"<{len(part) // 4}f", part)
            return [struct.unpack("<f", b"\0\0" + part[i:i + 2])[0] for i in range(0, len(part), 2)]
        for got, wanted in zip(floats(header, data, "o"), floats(source, source_data, "expected_o")):
            self.assertLessEqual(abs(got - wanted), 2 ** -8 * abs(wanted) + 1e-6)
        for got, wanted in zip(floats(header, data, "lse"), floats(source, source_data, "expected_lse")):
            self.assertTrue(got == wanted or abs(got - wanted) < 1e-5)
        self.expect(0, "run", CASE, "--device", "host", "-o", out)
        self.assertNotIn("lse", read_file(out)[0])

    def test_output_that_cannot_be_written(self):
        done = self.expect(1, "run", CASE, "--device", "host", "-o", self.path("no/such/folder"))
        self.assertIn("cannot be written", done.stderr)
        done = self.expect(1, "run", CASE, "--device", "host", "-o", "/dev/full")
        self.assertIn("/dev/full: cannot be written", done.stderr)

    def test_a_wrong_expected_value_fails(self):
        header, data = read_file(CASE)
        begin, _ = header["expected_o"]["data_offsets"]
        data = bytearray(data)
        data[begin:begin + 4] = struct.pack("<f", 100.0)
        bad = self.path("bad.safetensors")
        write_file(bad, header, bytes(data))
        done = self.expect(1, "run", bad, "--check", "--device", "host")
        self.assertIn("definition  ok", done.stdout)
        self.assertIn("expected_o  FAILED", done.stdout)
        self.assertIn("o[0][0][0]", done.stdout)

    def test_a_fault_is_reported_and_the_output_written(self):
        for name, value in (("seq_lens", 10 ** 6), ("seq_lens", -1), ("block_table", -5),
                            ("block_table", 2 ** 31 - 1)):
            header, data = read_file(CASE)
            begin, _ = header[name]["data_offsets"]
            data = bytearray(data)
            data[begin:begin + 4] = struct.pack("<i", value)
            bad, out = self.path("bad.safetensors"), self.path("out.safetensors")
            write_file(bad, header, bytes(data))
            done = self.expect(1, "run", bad, "--device", "host", "-o", out)
            self.assertIn("sequence 0", done.stderr)
            self.assertIn("o", read_file(out)[0])
            os.remove(out)
            found = json.loads(self.expect(1, "run", bad, "--device", "host", "--json").stdout)
            self.assertEqual((found["ok"], found["fault_sequence"]), (False, 0))


class Sample(Program):
    def test_samples_run_and_check(self):
        for name, options in {
                "plain": (),
                "ragged": ("--batch", 5, "--len", "0:70", "--heads", "6/2", "--dim", 64, "--page", 7),
                "window": ("--batch", 3, "--len", "20:90", "--heads", "4/4", "--dim", 64, "--window", 33),
                "fp16": ("--dtype", "fp16", "--len", 65, "--heads", "8/1", "--dim", 64, "--sinks"),
                "e4m3": ("--kv-dtype", "e4m3", "--len", 65, "--heads", "8/2", "--dim", 64, "--softcap", 3),
                "none": ("--batch", 0, "--len", 10, "--heads", "2/1", "--dim", 64)}.items():
            with self.subTest(name):
                small = ("--len", 100, "--heads", "4/2", "--dim", 64) if name == "plain" else options
                path = self.path(name)
                self.expect(0, "sample", "decode", *small, "-o", path)
                done = self.expect(0, "run", path, "--check", "--device", "host", "--json")
                (check,) = json.loads(done.stdout)["checks"]
                self.assertTrue(check["ok"])
                self.assertEqual(done.stderr, "")

    def test_samples_check_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        for name, options in {
                "ragged": ("--batch", 9, "--len", "0:3000", "--heads", "32/8", "--dim", 128),
                "window": ("--batch", 3, "--len", "200:900", "--heads", "24/4", "--dim", 256, "--window", 333),
                "sinks": ("--len", 1500, "--heads", "64/8", "--dim", 64, "--page", 33, "--sinks"),
                "softcap": ("--len", 700, "--heads", "16/1", "--dim", 128, "--softcap", 5)}.items():
            with self.subTest(name):
                path = self.path(name)
                self.expect(0, "sample", "decode", *options, "-o", path)
                done = self.expect(0, "run", path, "--check", "--device", "gpu", "--json")
                self.assertNotEqual(json.loads(done.stdout)["kernel"], "host executor")

    def test_a_seed_gives_the_same_file(self):
        options = ("--len", "1:50", "--heads", "2/1", "--dim", 64)
        for name, seed in (("a", 7), ("b", 7), ("c", 8)):
            self.expect(0, "sample", "decode", *options, "--seed", seed, "-o", self.path(name))
        a, b, c = (pathlib.Path(self.path(name)).read_bytes() for name in "abc")
        self.assertEqual(a, b)
        self.assertNotEqual(a, c)


class HostileFiles(Program):
    def refuse(self, header, data, *parts, claimed=None):
        path = self.path("hostile.safetensors")
        write_file(path, header, data, claimed)
        done = self.expect(1, "run", path, "--device", "host")
        self.assertEqual(done.stdout, "")
        self.assertIn("hostile.safetensors", done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    def test_headers_that_lie(self):
        for claimed in (2 ** 64 - 1, 2 ** 63, 10 ** 9, 100):
            self.refuse(b"{}", b"", "header", claimed=claimed)
        self.refuse(b"{", b"", "JSON")
        self.refuse(b"[" * 100000, b"", "JSON")
        self.refuse(b"{}", b"", "not a case file")

    def test_truncated_at_every_part(self):
        whole = CASE.read_bytes()
        for size in (0, 1, 7, 8, 100, 5000, len(whole) - 1):
            path = self.path("cut.safetensors")
            pathlib.Path(path).write_bytes(whole[:size])
            self.assertIn("cut.safetensors", self.expect(1, "run", path).stderr)

    def test_offsets(self):
        for offsets in ([0, 2 ** 62], [2 ** 62, 2 ** 63 - 1], [-8, 0], [10, 2], [0, 10], ["0", "1"], [0]):
            header, data = read_file(CASE)
            header["k_pool"]["data_offsets"] = offsets
            self.refuse(header, data, "'k_pool'")
        header, data = read_file(CASE)
        header["v_pool"]["data_offsets"] = header["k_pool"]["data_offsets"]
        self.refuse(header, data, "inside tensor")
        header, data = read_file(CASE)
        header["k_pool"]["shape"] = [2 ** 32, 2 ** 31, 2, 64]
        self.refuse(header, data, "'k_pool'", "too large")

    def test_missing_and_misshapen_tensors(self):
        for name in ("q", "k_pool", "v_pool", "block_table", "seq_lens"):
            header, data = read_file(CASE)
            # The bytes stay, under another name.
            header["other"] = header.pop(name)
            self.refuse(header, data, f"'{name}' is missing")
            header, data = read_file(CASE)
            header[name]["shape"] = [1, *header[name]["shape"], 1, 1]
            self.refuse(header, data, f"'{name}'", "shape")
        header, data = read_file(CASE)
        header["seq_lens"] = dict(header["seq_lens"], dtype="F32")
        self.refuse(header, data, "'seq_lens'", "F32", "I32")
        header, data = read_file(CASE)
        pages, *page = header["k_pool"]["shape"]
        header["k_pool"].update(dtype="F8_E5M2", shape=[2 * pages, *page])
        self.refuse(header, data, "'k_pool'", "F8_E5M2")
        header, data = read_file(CASE)
        header["q"]["dtype"] = "F16"
        self.refuse(header, data, "'k_pool'", "BF16")
        header, data = read_file(CASE)
        header["q"]["shape"] = [3, 3, 3, 64]
        self.refuse(header, data, "'q'", "query tokens")
        header, data = read_file(CASE)
        header["expected_o"]["shape"] = [9, 3, 64]
        self.refuse(header, data, "'expected_o'")
        header, data = read_file(CASE)
        header["tree_mask"] = header.pop("expected_lse")
        self.refuse(header, data, "'tree_mask'", "not supported")

    def test_scalars(self):
        for key, value in (("scale", "nan"), ("scale", "inf"), ("scale", "1e99"), ("scale", "0.5x"),
                           ("scale", ""), ("scale", " 1"), ("scale", "0x1"), ("softcap", "--1"),
                           ("k_scale", "nan"), ("window", "-1"), ("window", "1.5"), ("window", "2147483648"),
                           ("window", ""), ("policy", "quick"), ("version", "2"), ("op", "nonsense"),
                           ("format", "other")):
            header, data = read_file(CASE)
            header["__metadata__"][key] = value
            self.refuse(header, data)
        for op in ("ctm", "prefill", "tiled"):
            header, data = read_file(CASE)
            header["__metadata__"]["op"] = op
            self.refuse(header, data, f"operation {op} is not supported by this version")
        header, data = read_file(CASE)
        header["__metadata__"]["scale"] = 0.5
        self.refuse(header, data, "'scale' is not a string")

    def test_values_the_operation_refuses(self):
        for key, value in (("softcap", "-1"),):
            header, data = read_file(CASE)
            header["__metadata__"][key] = value
            self.refuse(header, data, "softcap")

    def test_extras_are_ignored_with_a_warning(self):
        header, data = read_file(CASE)
        header["__metadata__"]["mood"] = "good"
        header["extra"] = {"dtype": "F4_NEW", "shape": [3], "data_offsets": [len(data), len(data) + 2]}
        path = self.path("extra.safetensors")
        write_file(path, header, data + b"\1\2")
        done = self.expect(0, "run", path, "--check", "--device", "host")
        self.assertIn("'mood'", done.stderr)
        self.assertIn("'extra'", done.stderr)

    def test_unaligned_data_gives_the_same_bits(self):
        header, data = read_file(CASE)
        shifted = {"__metadata__": header.pop("__metadata__"),
                   "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        for name, entry in header.items():
            shifted[name] = dict(entry, data_offsets=[offset + 1 for offset in entry["data_offsets"]])
        path = self.path("shifted.safetensors")
        write_file(path, shifted, b"\0" + data)
        outputs = []
        for source, out in ((CASE, self.path("a")), (path, self.path("b"))):
            self.expect(0, "run", source, "--device", "host", "-o", out)
            outputs.append(pathlib.Path(out).read_bytes())
        self.assertEqual(*outputs)

    def test_a_query_axis_is_kept(self):
        header, data = read_file(CASE)
        for name in ("q", "expected_o", "expected_lse"):
            header[name]["shape"].insert(1, 1)
        path, out = self.path("axis.safetensors"), self.path("out")
        write_file(path, header, data)
        self.expect(0, "run", path, "--check", "--device", "host", "-o", out)
        self.assertEqual(read_file(out)[0]["o"]["shape"], [3, 1, 9, 64])


class Bench(Program):
    SHAPES = [{"name": "tiny, one", "batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64,
               "page_size": 16, "len": [70, 33]},
              {"name": "tiny, two", "batch": 1, "num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128,
               "page_size": 7, "len": 50, "window": 20}]

    def shapes(self, shapes):
        path = self.path("shapes.json")
        pathlib.Path(path).write_text(json.dumps(shapes), encoding="ascii")
        return path

    def test_the_host_executor_is_checked_and_timed(self):
        path = self.shapes(self.SHAPES)
        done = self.expect(0, "bench", "decode", "--device", "host", "--shapes", path, "--json")
        found = json.loads(done.stdout)
        self.assertTrue(found["host_executor"])
        self.assertEqual([case["case"] for case in found["cases"]], ["tiny, one", "tiny, two"])
        for case, shape in zip(found["cases"], self.SHAPES):
            self.assertEqual(case["shape"], {"window": 0, "q_dtype": "bf16", "kv_dtype": "bf16", **shape})
            # Rounding to BF16 alone: between 2^-11 and half a step.
            self.assertTrue(2 ** -11 < case["relative_rms"] < 2 ** -8, case)
            self.assertEqual((case["host_us"], case["limit_gbs"]), (None, None))
            self.assertTrue(case["ok"] and case["us"] > 0 and case["rows_checked"] >= 2)
            self.assertLessEqual(case["us_p10"], case["us_p90"])
        text = self.expect(0, "bench", "--device", "host", "--shapes", path).stdout
        self.assertIn("not of a kernel", text)
        table = self.expect(0, "bench", "--device", "host", "--shapes", path, "--csv", "--shape",
                            "tiny, two").stdout
        (row,) = csv.DictReader(io.StringIO(table))
        self.assertEqual(row["case"], "tiny, two")
        self.assertTrue(row["commit"] and row["device"] == "host executor")

    def test_a_policy_is_taken_and_named(self):
        path = self.shapes(self.SHAPES)
        for policy in ("chunk:64", "2", "legacy"):
            done = self.expect(0, "bench", "--device", "host", "--shapes", path, "--policy", policy, "--json")
            self.assertEqual(json.loads(done.stdout)["splitk_policy"], policy)

    def test_a_shape_that_fails_leaves_the_rest(self):
        path = self.shapes([dict(self.SHAPES[0], name="odd", head_dim=24), *self.SHAPES])
        done = self.expect(1, "bench", "--device", "host", "--shapes", path, "--json")
        self.assertRegex(done.stderr, "error: odd: .*24")
        cases = json.loads(done.stdout)["cases"]
        self.assertEqual([(case["ok"], case["skipped"]) for case in cases],
                         [(False, False), (True, False), (True, False)])
        self.assertIn("24", cases[0]["error"])

    def test_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        path = self.shapes([dict(self.SHAPES[0], name="odd", head_dim=48),
                            dict(self.SHAPES[0], name="vast", batch=2048, len=1 << 20,
                                 page_size=65536), *self.SHAPES])
        done = self.expect(0, "bench", "--shapes", path, "--json")
        self.assertRegex(done.stderr, "odd: skipped: .*48")
        self.assertRegex(done.stderr, "vast: skipped: .*GB")
        *skipped, one, two = json.loads(done.stdout)["cases"]
        self.assertEqual([(case["ok"], case["skipped"]) for case in skipped], [(False, True)] * 2)
        for case in (one, two):
            self.assertTrue(case["ok"] and case["limit_gbs"] > 0, case)
            self.assertTrue(0 < case["launch_us"] and 0 < case["host_us"], case)
            self.assertEqual(case["calls"] % case["copies"], 0)

    def test_a_sweep_compares_neighbours(self):
        names = [name for name in self.expect(0, "bench", "--list", "--set", "batch").stdout.splitlines()
                 if " 1 x " in name or " 2 x " in name or " 4 x " in name]
        self.assertEqual(len(names), 3)
        wanted = [part for name in names for part in ("--shape", name)]
        found = json.loads(self.expect(0, "bench", "--device", "host", "--json", *wanted).stdout)
        first, second, fourth = found["cases"]
        growth, work = second["us"] / first["us"], second["bytes"] / first["bytes"]
        self.assertAlmostEqual(second["step"], max(1, growth / work) if growth >= 1 else 1 / growth, places=9)
        self.assertEqual(found["max_step"], second["step"])
        # The neighbour of 4, which is 3, was not timed.
        self.assertEqual((first["step"], fourth["step"]), (None, None))

    def test_list_needs_no_device(self):
        count = {}
        for chosen in ("default", "pages", "batch", "ratio", "all"):
            names = self.expect(0, "bench", "--list", "--set", chosen).stdout.splitlines()
            self.assertEqual(len(set(names)), len(names))
            count[chosen] = len(names)
        self.assertEqual(count["all"], sum(count.values()) - count["all"])
        self.assertEqual((count["pages"], count["ratio"]), (7, 16))
        self.assertEqual(count["default"], len(self.expect(0, "bench", "--list").stdout.splitlines()))

    def test_shapes_that_are_wrong(self):
        for key, value in (("batch", 0), ("batch", 1.5), ("num_kv_heads", 3), ("len", [1]), ("len", -1),
                           ("name", 3), ("q_dtype", "fp64")):
            path = self.shapes([dict(self.SHAPES[0], **{key: value})])
            self.assertIn(f"'{key}'", self.expect(1, "bench", "--device", "host", "--shapes", path).stderr)
        for wrong in ({}, []):
            self.assertIn("array", self.expect(1, "bench", "--shapes", self.shapes(wrong)).stderr)


if __name__ == "__main__":
    unittest.main()

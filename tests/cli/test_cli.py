#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The `attn` program from outside: exit statuses, sentences, files. ATTN_PROGRAM is the program."""

import csv
import io
import json
import math
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["ATTN_PROGRAM"]
# Where tests/messages collects what the program says.
HEARD = os.environ.get("ATTN_HEARD")
DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
CASE = DATA / "smollm2_decode_bf16_page16.safetensors"
COMMANDS = ("info", "check", "plan", "run", "sample", "bench")


def note(text):
    if HEARD:
        with open(HEARD, "a", encoding="utf-8") as file:
            file.write(text)


def attn(*arguments, **environment):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, check=False)
    note(done.stdout + done.stderr)
    return done


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

    def use_fake_hopper(self):
        """The environment of a pack that needs no nvcc; a static build has its packs in itself."""
        built = pathlib.Path(os.environ["ATTN_OLD_DRIVER"]).parent / "fake_pack_hopper.so"
        if not os.path.islink(self.path("libattn-hopper.so")):
            os.symlink(built, self.path("libattn-hopper.so"))
        folder = {"ATTN_PACK_PATH": self.folder.name}
        packs = json.loads(self.expect(0, "info", "--json", **folder).stdout)["packs"]
        if [pack["name"] for pack in packs if pack["path"] != "built in"] != ["hopper"]:
            self.skipTest("packs are built in")
        return folder


class Usage(Program):
    def test_version_and_help(self):
        self.assertRegex(self.expect(0, "--version").stdout, r"^attn \d+\.\d+\.\d+\n$")
        text = self.expect(0, "--help").stdout
        for command in COMMANDS:
            self.assertIn(command, text)
            done = self.expect(0, command, "--help")
            self.assertTrue(done.stdout.startswith(f"Usage: attn {command}"), done.stdout)
            self.assertEqual(done.stderr, "")
        for command in ("plan", "sample", "bench"):
            done = self.expect(0, command, "prefill", "--help")
            self.assertTrue(done.stdout.startswith(f"Usage: attn {command} prefill"), done.stdout)

    def test_wrong_usage_is_2(self):
        for arguments in ((), ("nonsense",), ("--nonsense",), ("info", "x"), ("check", "--x"), ("run",),
                          ("run", "a", "b"), ("run", CASE, "--device", "tpu"), ("run", CASE, "--lse"),
                          ("plan",), ("plan", "bench"), ("plan", "decode", "--heads", "24"),
                          ("plan", "tiled", "--planes", "3"), ("plan", "decode", "--tile", "3"),
                          ("plan", "tiled", "--window", "3"), ("plan", "swap", "--kv-dtype", "e4m3"),
                          ("plan", "swap", "--planes", "17"), ("plan", "swap", "--policy", "auto"),
                          ("plan", "decode", "--heads", "7/2"), ("plan", "decode", "--batch", "-1"),
                          ("plan", "decode", "--len", "5:1"), ("plan", "decode", "--policy", "maybe"),
                          ("plan", "decode", "--dtype", "e4m3"), ("sample", "decode"),
                          ("sample", "decode", "-o"), ("bench", "swapped"), ("bench", "--shape", "no such"),
                          ("bench", "ctm", "--set", "tree"), ("bench", "tiled", "--shapes", "shapes.json"),
                          ("plan", "ctm", "--policy", "chunk"), ("plan", "ctm", "--page", "64"),
                          ("plan", "ctm", "--dtype", "bf16"), ("plan", "decode", "--q-len", "0"),
                          ("plan", "decode", "--q-len", "129"), ("plan", "decode", "ctm"),
                          ("bench", "--device", "auto"), ("bench", "--set", "none"),
                          ("bench", "--policy", "maybe"),
                          ("bench", "--set", "all", "--shapes", "shapes.json"),
                          ("plan", "decode", "prefill"), ("plan", "prefill", "x"),
                          ("plan", "prefill", "--kernel", "96"), ("plan", "prefill", "--heads", "7/2"),
                          ("plan", "prefill", "--device", "--target", "hopper"),
                          ("plan", "prefill", "--contiguous", "--len", "5:9"), ("sample", "prefill"),
                          ("sample", "prefill", "-o", "x", "--page", "0"),
                          ("sample", "prefill", "-o", "x", "--batch", "2", "--kernel", "64"),
                          ("sample", "prefill", "-o", "x", "--dtype", "e4m3"),
                          ("sample", "prefill", "-o", "x", "--policy", "chunk"),
                          ("bench", "prefill", "--shape", "no such"), ("bench", "prefill", "x"),
                          ("bench", "prefill", "--set", "all"), ("bench", "prefill", "--device", "auto")):
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
        note(done.stderr)
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
        for arguments in (("check",), ("bench",), ("bench", "prefill"), ("run", CASE, "--device", "gpu"),
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

    def test_ctm_has_its_own_sizes(self):
        folder = self.use_fake_hopper()

        def plan(*options, policy="chunk"):
            done = self.expect(0, "plan", "ctm", "--dim", 32, "--target", "hopper", "--json", *options,
                               METRALE_ATTN_DECODE_SPLITK=policy, **folder)
            found = json.loads(done.stdout)
            self.assertEqual(found["op"], "ctm")
            return found["plans"][0]
        one = plan("--batch", 4, "--len", 1000)
        self.assertEqual((one["q_len"], one["splitk_policy"]), (1, "chunk"))
        self.assertEqual(one["workspace_bytes"], 4 * one["workspace_elems"])
        self.assertGreater(one["semaphore_elems"], 2)
        # Neither the length nor the policy of the environment matters.
        other = plan("--batch", 4, "--len", 100000, policy="legacy")
        self.assertEqual([other[key] for key in ("workspace_elems", "semaphore_elems")],
                         [one[key] for key in ("workspace_elems", "semaphore_elems")])
        text = self.expect(0, "plan", "ctm", "--dim", 32, "--target", "hopper", **folder).stdout
        self.assertRegex(text, r"FP32 elements, \d+ semaphores")

    def test_tiles_are_planned(self):
        built = pathlib.Path(os.environ["ATTN_OLD_DRIVER"]).parent / "fake_pack_hopper.so"
        os.symlink(built, self.path("libattn-hopper.so"))
        folder = {"ATTN_PACK_PATH": self.folder.name}
        packs = json.loads(self.expect(0, "info", "--json", **folder).stdout)["packs"]
        if [pack["name"] for pack in packs if pack["path"] != "built in"] != ["hopper"]:
            self.skipTest("packs are built in")

        def plan(*options):
            found = json.loads(self.expect(0, "plan", *options, "--target", "hopper", "--json", **folder).stdout)
            self.assertEqual(found["op"], options[0])
            return found["plans"][0]
        # 24576 keys of 8 KV heads of 128 in BF16, K and V; a wide tile and few lanes: by way of the workspace.
        one = plan("tiled", "--len", 24576, "--tile", 1536)
        self.assertEqual((one["kernel"], one["kv_bytes"]), ("tiled_bf16_d128", 24576 * 8 * 128 * 4))
        self.assertEqual(one["flops"], 4 * 128 * 32 * 24576)
        self.assertEqual(one["state_bytes"], 32 * (128 + 2) * 4)
        self.assertGreater(one["turns"], 0)
        self.assertGreater(one["workspace_bytes"], 0)
        many = plan("tiled", "--batch", 64, "--len", 24576)
        self.assertEqual((many["turns"], many["tile_blocks"], many["workspace_bytes"]), (0, 64, 0))
        self.assertEqual(many["grid"], 64 * 8)
        # 32 layers of 8 x 1250 blocks of 64 KiB; of 5000 slots 2 x 64 are those of tiles in work.
        swap = plan("swap", "--batch", 8, "--len", 20000, "--layers", 32, "--resident", 5000)
        self.assertEqual((swap["block_bytes"], swap["pool_bytes"]), (65536, 32 * 10000 * 65536))
        self.assertEqual(swap["moved_bytes"], (32 * 10000 - (5000 - 128)) * 65536)
        self.assertGreater(swap["device_bytes"], 5000 * 65536)
        self.assertLess(swap["host_bytes"], 64000000)
        self.assertEqual(swap["kv_bytes"], 64 * 65536)
        self.assertEqual(plan("swap", "--len", 1000, "--resident", 126)["moved_bytes"], 0)
        text = self.expect(0, "plan", "swap", "--len", 1000, "--target", "hopper", **folder).stdout
        self.assertIn("slots       126 blocks of 65536 bytes; 2 tiles in work", text)
        self.assertIn("fold        at once", text)
        text = self.expect(0, "plan", "tiled", "--len", 24576, "--tile", 1536, "--target", "hopper", **folder).stdout
        self.assertRegex(text, r"by way of the workspace, in \d+ turns of two launches")
        for options, words in ((("tiled", "--dim", 256), "no tiled kernel for bf16, head_dim 256"),
                               (("swap", "--resident", 3), "resident_blocks is 3: 2 tiles of 64 blocks"),
                               (("swap", "--batch", 2000000, "--len", 100000), "num_blocks is -1")):
            self.assertIn(words, self.expect(1, "plan", *options, "--target", "hopper", **folder).stderr)

    def test_trees_are_planned(self):
        for target in self.packs():
            for op in ("decode", "ctm"):
                done = attn("plan", op, "--dtype", "fp16", "--page", 128, "--q-len", 8, "--target", target,
                            "--json")
                if done.returncode:
                    self.assertIn("q_len is 8", done.stderr)
                else:
                    self.assertEqual(json.loads(done.stdout)["plans"][0]["q_len"], 8)

    def test_what_ctm_does_not_serve(self):
        for options in (("--dim", 48), ("--heads", "34/2"), ("--dim", 32, "--kv-dtype", "e4m3", "--q-len", 2)):
            self.assertIn("does not serve", self.expect(1, "plan", "ctm", *options).stderr)


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

    def test_a_wrong_expected_lse_fails(self):
        header, data = read_file(CASE)
        begin, _ = header["expected_lse"]["data_offsets"]
        bad = self.path("bad.safetensors")
        wrong = data[:begin] + struct.pack("<f", 100.0) + data[begin + 4:]
        write_file(bad, header, wrong)
        done = self.expect(1, "run", bad, "--check", "--device", "host")
        self.assertIn("expected_o  FAILED", done.stdout)
        # Without expected_o, too.
        header["o"] = header.pop("expected_o")
        for contents, code, text in ((data, 0, "expected_lse ok"), (wrong, 1, "expected_lse FAILED")):
            write_file(bad, header, contents)
            done = self.expect(code, "run", bad, "--check", "--device", "host")
            self.assertIn("definition  ok", done.stdout)
            self.assertIn(text, done.stdout)

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

    def run_sample(self, name, *options):
        """Samples, runs, checks; nothing that must not be looked at may show as NaN."""
        path, out = self.path(name), self.path("out")
        self.expect(0, "sample", *options, "-o", path)
        done = self.expect(0, "run", path, "--check", "--device", "host", "--json", "-o", out)
        found = json.loads(done.stdout)
        (check,) = found["checks"]
        self.assertTrue(check["ok"])
        header, data = read_file(out)
        self.assertEqual(header["o"]["shape"], read_file(path)[0]["q"]["shape"])
        begin, end = header["o"]["data_offsets"]
        infinity = 0x7C00 if header["o"]["dtype"] == "F16" else 0x7F80
        words = struct.unpack(f"<{(end - begin) // 2}H", data[begin:end])
        self.assertTrue(all(word & infinity != infinity for word in words), name)
        return found, done.stderr

    def test_samples_in_tiles(self):
        for more in (("--dtype", "fp16", "--page", 7), ("--page", 33, "--tile", 1), ("--tile", 5)):
            with self.subTest(more=more):
                found, warned = self.run_sample("tiles", "tiled", *self.SMALL, *more)
                self.assertEqual((found["op"], found["kernel"], warned), ("tiled", "host executor", ""))

    def test_samples_that_would_be_malformed(self):
        done = self.expect(1, "sample", "decode", "--batch", "16777216", "--heads", "16777216/1", "--dim", "65536",
                           "--len", "0", "-o", self.path("big"))
        self.assertIn("q would have", done.stderr)
        for op in ("tiled", "swap"):
            done = self.expect(2, "sample", op, "--batch", "0", "-o", self.path("none"))
            self.assertIn("--batch is 0", done.stderr)
        done = self.expect(2, "sample", "swap", "--batch", "1", "--len", "1000000000", "--page", "1", "--tile",
                           "2147483647", "--planes", "16", "-o", self.path("wide"))
        self.assertIn("are more than 2147483647", done.stderr)

    def test_samples_for_swap(self):
        for more in (("--dtype", "fp16", "--page", 7), ("--page", 33, "--tile", 1), ("--tile", 5, "--planes", 4),
                     ("--tile", 3, "--resident", 17), ("--resident", 100)):
            with self.subTest(more=more):
                found, warned = self.run_sample("blocks", "swap", *self.SMALL, *more)
                self.assertEqual((found["op"], found["kernel"], warned), ("swap", "host executor", ""))
                if "--resident" in more:
                    self.assertEqual(found["resident_blocks"], more[more.index("--resident") + 1])

    SMALL = ("--batch", 3, "--len", "0:300", "--heads", "6/2", "--dim", 64)

    def test_samples_of_several_tokens(self):
        for tree in ("none", "causal", "full", "star", "random"):
            for more in ((), ("--window", 40), ("--window", 3), ("--sinks", "--page", 7)):
                with self.subTest(tree=tree, more=more):
                    found, warned = self.run_sample("tree", "decode", *self.SMALL, "--q-len", 9, "--tree",
                                                    tree, *more)
                    self.assertEqual((found["op"], found["q_len"], found["tree_mask"], warned),
                                     ("decode", 9, tree != "none", ""))
        found, _ = self.run_sample("one", "decode", *self.SMALL, "--tree", "full")
        self.assertEqual((found["q_len"], found["tree_mask"]), (1, True))

    def test_samples_of_ctm(self):
        swa = "--contiguous-query-swa"
        for options in ((), ("--sinks",), ("--window", 150), ("--kv-dtype", "e4m3"), ("--q-len", 2),
                        ("--q-len", 8, "--tree", "random"), ("--q-len", 40, "--tree", "random", "--sinks"),
                        ("--q-len", 8, "--tree", "star", "--window", 5),
                        ("--q-len", 8, "--tree", "star", "--window", 5, swa),
                        ("--q-len", 8, "--tree", "full", "--window", 130, swa, "--kv-dtype", "e4m3")):
            with self.subTest(options=options):
                found, warned = self.run_sample("ctm", "ctm", *self.SMALL, *options)
                self.assertEqual((found["op"], found["page_size"], warned), ("ctm", 128, ""))
                self.assertEqual(found["tree_mask"], "--q-len" in options)
                self.assertNotIn("lse_failed", found["checks"][0])
                self.assertIsNone(found["dropped_pages"])

    def test_skip_softmax_counts_pages(self):
        options = ("ctm", "--len", 2500, "--heads", "2/2", "--dim", 64)
        found, _ = self.run_sample("skip", *options, "--skip", "0:1250,4000:1")
        # 2 KV heads of 20 pages; the first page of each run of 16 stays.
        self.assertTrue(0 < found["dropped_pages"] <= 2 * (20 - 2), found["dropped_pages"])
        text = self.expect(0, "run", self.path("skip"), "--device", "host").stdout
        self.assertIn(f"dropped     {found['dropped_pages']} of 40 pages", text)
        for table in ("3000:1250", "0:0", "0:2500"):
            found, _ = self.run_sample("dense", *options, "--skip", table)
            self.assertEqual(found["dropped_pages"], 0)

    def test_options_of_the_other_operation(self):
        for options in (("ctm", "--policy", "auto"), ("ctm", "--softcap", 3), ("ctm", "--page", 16),
                        ("ctm", "--dtype", "bf16"), ("ctm", "--q-len", 4, "--tree", "none"),
                        ("ctm", "--q-len", 4, "--skip", "0:1"), ("decode", "--skip", "0:1"),
                        ("decode", "--contiguous-query-swa"), ("ctm", "--tree", "oak"), ("ctm", "--skip", "0"),
                        ("ctm", "--skip", "5:1,5:2"), ("ctm", "--skip", ""), ("ctm", "--skip", "0:1,"),
                        ("bench",), ("ctm", "--q-len", 200), ("decode", "--tile", 3),
                        ("tiled", "--tile", 0), ("tiled", "--sinks"), ("tiled", "--window", 9),
                        ("tiled", "--q-len", 2), ("tiled", "--kv-dtype", "e4m3"),
                        ("tiled", "--policy", "auto"), ("tiled", "--tree", "full"),
                        ("tiled", "--resident", 9), ("tiled", "--planes", 3), ("swap", "--planes", 1),
                        ("swap", "--resident", 3), ("swap", "--window", 9), ("swap", "--sinks")):
            done = self.expect(2, "sample", *options, "-o", self.path("none"))
            self.assertIn("--help'", done.stderr)

    def test_samples_check_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        for name, options in {
                "ragged": ("decode", "--batch", 9, "--len", "0:3000", "--heads", "32/8", "--dim", 128),
                "window": ("decode", "--batch", 3, "--len", "200:900", "--heads", "24/4", "--dim", 256,
                           "--window", 333),
                "sinks": ("decode", "--len", 1500, "--heads", "64/8", "--dim", 64, "--page", 33, "--sinks"),
                "softcap": ("decode", "--len", 700, "--heads", "16/1", "--dim", 128, "--softcap", 5),
                "chain": ("decode", "--batch", 3, "--len", "0:900", "--q-len", 5, "--window", 100),
                "ctm": ("ctm", "--batch", 5, "--len", "0:900", "--sinks"),
                "tree": ("ctm", "--batch", 5, "--len", "0:900", "--q-len", 8, "--tree", "random"),
                "skip": ("ctm", "--len", 2500, "--heads", "8/8", "--skip", "0:1250"),
                "tiled": ("tiled", "--batch", 5, "--len", "0:900", "--tile", 7),
                "swap": ("swap", "--batch", 5, "--len", "0:900", "--tile", 7, "--resident", 40)}.items():
            with self.subTest(name):
                path = self.path(name)
                self.expect(0, "sample", *options, "-o", path)
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
        self.refuse(header, data, "'expected_o'", "[3, 3, 3, 64]")
        header, data = read_file(CASE)
        header["expected_o"]["shape"] = [9, 3, 64]
        self.refuse(header, data, "'expected_o'")
        header, data = read_file(CASE)
        header["tree_mask"] = header.pop("expected_lse")
        self.refuse(header, data, "'tree_mask'", "[3, 1, -1]")

    def test_scalars(self):
        for key, value in (("scale", "nan"), ("scale", "inf"), ("scale", "1e99"), ("scale", "0.5x"),
                           ("scale", ""), ("scale", " 1"), ("scale", "0x1"), ("softcap", "--1"),
                           ("k_scale", "nan"), ("window", "-1"), ("window", "1.5"), ("window", "2147483648"),
                           ("window", ""), ("policy", "quick"), ("version", "2"), ("op", "nonsense"),
                           ("format", "other")):
            header, data = read_file(CASE)
            header["__metadata__"][key] = value
            self.refuse(header, data)
        header, data = read_file(CASE)
        header["__metadata__"]["op"] = "tiled"
        self.refuse(header, data, "'block_list' is missing")
        header, data = read_file(CASE)
        header["__metadata__"]["scale"] = 0.5
        self.refuse(header, data, "'scale' is not a string")

    def sample(self, *options):
        path = self.path("case")
        self.expect(0, "sample", *options, "-o", path)
        return read_file(path)

    TREE = ("ctm", "--batch", 2, "--len", 140, "--heads", "4/2", "--dim", 64, "--q-len", 40, "--tree", "random")

    def test_a_ctm_case_that_is_wrong(self):
        for name in ("q", "kv_pool", "page_table", "seq_lens", "tree_mask"):
            header, data = self.sample(*self.TREE)
            header["other"] = header.pop(name)
            self.refuse(header, data, f"'{name}' is missing")
            header, data = self.sample(*self.TREE)
            header[name]["shape"] = [1, *header[name]["shape"], 1]
            self.refuse(header, data, f"'{name}'", "shape")
        # 40 tokens need two words, a page 128 slots, each half of the pool as many pages.
        for name, change, part in (("tree_mask", lambda b, t, w: [b * w, t, 1], "tree_mask"),
                                   ("tree_mask", lambda b, t, w: [b, t * w, 1], "[2, 40, -1]"),
                                   ("page_table", lambda b, r, n: [b, r * n, 1], "[2, 2, -1]"),
                                   ("page_table", lambda b, r, n: [b * r, n, 1], "[2, 2, -1]"),
                                   ("kv_pool", lambda p, s, h, d: [p * 2, s // 2, h, d], "128"),
                                   ("kv_pool", lambda p, s, h, d: [1, s, h * p, d], "as many pages"),
                                   ("q", lambda b, t, h, d: [b, t * h, d], "'q'")):
            header, data = self.sample(*self.TREE)
            header[name]["shape"] = change(*header[name]["shape"])
            self.refuse(header, data, f"'{name}'", part)
        header, data = self.sample(*self.TREE)
        for name in ("q", "kv_pool"):
            changed = {**header, name: dict(header[name], dtype="BF16")}
            self.refuse(changed, data, f"'{name}'", "BF16", "F16")
        header["__metadata__"]["op"] = "decode"
        self.refuse(header, data, "'k_pool' is missing")
        for key, value in (("contiguous_query_swa", "2"), ("contiguous_query_swa", "-1"), ("scale", "inf"),
                           ("window", "-1"), ("k_scale", "x")):
            header, data = self.sample(*self.TREE)
            header["__metadata__"][key] = value
            self.refuse(header, data, f"'{key}'")

    def tiled(self, capacity=3):
        """The decode case as lists of blocks, cut into tiles."""
        header, data = read_file(CASE)
        size = header["k_pool"]["shape"][1]
        begin, end = header["seq_lens"]["data_offsets"]
        lens = struct.unpack(f"<{(end - begin) // 4}i", data[begin:end])
        counts = [-(-length // size) for length in lens]
        # Where there is no block, nobody looks at its slots.
        valid = [length - (count - 1) * size if count else -5 for length, count in zip(lens, counts)]
        header["block_list"] = header.pop("block_table")
        header["block_counts"] = header.pop("seq_lens")
        header["last_block_valid_slots"] = {"dtype": "I32", "shape": [len(lens)],
                                            "data_offsets": [len(data), len(data) + 4 * len(lens)]}
        header["__metadata__"] = {"format": "attn-case", "version": "1", "op": "tiled",
                                  "tile_capacity": str(capacity)}
        pack = struct.Struct(f"<{len(lens)}i").pack
        return header, data[:begin] + pack(*counts) + data[end:] + pack(*valid)

    def test_a_tiled_case_in_any_tiles(self):
        path, out = self.path("tiled.safetensors"), self.path("out")
        results = []
        for capacity in (1, 3, 2147483647):
            write_file(path, *self.tiled(capacity))
            done = self.expect(0, "run", path, "--check", "--device", "host", "--lse", "-o", out)
            self.assertEqual(done.stderr, "")
            self.assertIn("definition  ok", done.stdout)
            self.assertIn("expected_o  ok", done.stdout)
            self.assertIn(f"tiles       of up to {capacity} blocks", done.stdout)
            header, data = read_file(out)
            self.assertEqual(header["__metadata__"]["op"], "tiled")
            results.append(data)
        self.assertEqual(results, results[:1] * 3)
        found = json.loads(self.expect(0, "run", path, "--check", "--device", "host", "--json").stdout)
        self.assertEqual((found["op"], found["tile_capacity"]), ("tiled", 2147483647))
        # All slots of the last block where the file does not say: NaN among them.
        header, data = self.tiled()
        header["other"] = header.pop("last_block_valid_slots")
        write_file(path, header, data)
        done = self.expect(1, "run", path, "--check", "--device", "host")
        self.assertIn("expected_o  FAILED", done.stdout)

    def swap(self, resident="4", capacity=2, **more):
        """The same through slots."""
        header, data = self.tiled(capacity)
        header["__metadata__"].update(op="swap", resident_blocks=resident, **more)
        return header, data

    def test_a_swap_case_with_any_slots(self):
        path, out = self.path("swap.safetensors"), self.path("out")
        write_file(path, *self.tiled())
        self.expect(0, "run", path, "--device", "host", "--lse", "-o", out)
        results = [read_file(out)[1]]
        for resident, capacity, planes in (("2", 1, "0"), ("9", 3, "3"), ("1000", 2, "2")):
            write_file(path, *self.swap(resident, capacity, num_planes=planes))
            done = self.expect(0, "run", path, "--check", "--device", "host", "--lse", "-o", out)
            self.assertEqual(done.stderr, "")
            for part in ("definition  ok", "expected_o  ok",
                         f"slots       {resident}, for tiles of up to {capacity} blocks"):
                self.assertIn(part, done.stdout)
            results.append(read_file(out)[1])
        self.assertEqual(results, results[:1] * 4)
        found = json.loads(self.expect(0, "run", path, "--check", "--device", "host", "--json").stdout)
        self.assertEqual((found["op"], found["tile_capacity"], found["resident_blocks"]), ("swap", 2, 1000))

    def test_a_swap_case_that_is_wrong(self):
        header, data = self.swap()
        del header["__metadata__"]["resident_blocks"]
        self.refuse(header, data, "scalar 'resident_blocks' is missing")
        for key, value in (("resident_blocks", "-1"), ("resident_blocks", "x"), ("num_planes", "-2"),
                           ("tile_capacity", "0")):
            header, data = self.swap()
            header["__metadata__"][key] = value
            self.refuse(header, data, f"'{key}'")
        for more, words in (({"resident": "0"}, "resident_blocks is 0"),
                            ({"resident": "3"}, "resident_blocks is 3: 2 tiles of 2 blocks"),
                            ({"num_planes": "1"}, "num_planes is 1")):
            self.refuse(*self.swap(**more), words)
        header, data = self.swap()
        blocks, counts = header["block_list"]["data_offsets"][0], header["block_counts"]["data_offsets"][0]
        # A block that is not there is refused; a count that the list has no room for is clamped, and named.
        path = self.path("faulty.safetensors")
        write_file(path, header, data[:blocks] + struct.pack("<i", 2 ** 30) + data[blocks + 4:])
        self.assertIn("blocks[0][0] is 1073741824: it has to be in 0..",
                      self.expect(1, "run", path, "--device", "host").stderr)
        write_file(path, header, data[:counts] + struct.pack("<i", -1) + data[counts + 4:])
        self.assertIn("sequence 0 has a count of blocks below 0 or past its list",
                      self.expect(1, "run", path, "--device", "host").stderr)

    def test_a_tiled_case_that_is_wrong(self):
        for name in ("q", "k_pool", "v_pool", "block_list", "block_counts"):
            header, data = self.tiled()
            header["other"] = header.pop(name)
            self.refuse(header, data, f"'{name}' is missing")
            header, data = self.tiled()
            header[name]["shape"] = [1, *header[name]["shape"], 1]
            self.refuse(header, data, f"'{name}'", "shape")
        header, data = self.tiled()
        header["last_block_valid_slots"]["shape"].append(1)
        self.refuse(header, data, "'last_block_valid_slots'", "shape")
        header, data = self.tiled()
        header["v_pool"]["dtype"] = "F16"
        self.refuse(header, data, "'v_pool'", "F16", "BF16")
        header, data = self.tiled()
        begin, end = header["k_pool"]["data_offsets"]
        pages, size, heads, dim = header["k_pool"]["shape"]
        header["k_pool"].update(dtype="F8_E4M3", shape=[pages, size, 2 * heads, dim])
        self.refuse(header, data, "'k_pool'", "F8_E4M3", "BF16")
        for value in ("0", "-1", "x", "2147483648"):
            header, data = self.tiled()
            header["__metadata__"]["tile_capacity"] = value
            self.refuse(header, data, "'tile_capacity'")
        header, data = self.tiled()
        del header["__metadata__"]["tile_capacity"]
        self.refuse(header, data, "scalar 'tile_capacity' is missing")
        header, data = self.tiled()
        rows, heads, dim = header["q"]["shape"]
        header["q"]["shape"] = [rows, heads * 2, dim // 2]
        for name in ("k_pool", "v_pool"):
            pages, size, heads, dim = header[name]["shape"]
            header[name]["shape"] = [pages, size, heads * 2, dim // 2]
        header["o"], header["lse"] = header.pop("expected_o"), header.pop("expected_lse")
        self.refuse(header, data, "head_dim is 32: tiled decode serves 64, 128 and 256")

    def test_a_tiled_case_with_faults(self):
        header, data = self.tiled()
        sequences, width = header["block_list"]["shape"]
        counts, blocks = header["block_counts"]["data_offsets"][0], header["block_list"]["data_offsets"][0]
        path = self.path("faulty.safetensors")
        for place, value, sequence in ((counts + 4 * (sequences - 1), width + 1, sequences - 1),
                                       (counts, -1, 0), (blocks, -7, 0), (blocks, 2 ** 30, 0)):
            write_file(path, header, data[:place] + struct.pack("<i", value) + data[place + 4:])
            done = self.expect(1, "run", path, "--device", "host")
            self.assertIn(f"sequence {sequence} has a count of blocks below 0 or past its list", done.stderr)

    def test_too_few_words_of_a_mask(self):
        header, data = self.sample(*self.TREE)
        begin, end = header["tree_mask"]["data_offsets"]
        header["tree_mask"].update(shape=[2, 40, 1], data_offsets=[begin, begin + (end - begin) // 3])
        header["other"] = {"dtype": "U8", "shape": [2 * (end - begin) // 3],
                           "data_offsets": [begin + (end - begin) // 3, end]}
        self.refuse(header, data, "'tree_mask'", "a bit for each query token")

    def test_skip_tables_that_are_wrong(self):
        header, data = self.sample("ctm", "--len", 140, "--heads", "4/2", "--dim", 64, "--skip", "0:1,9:1")
        begin, end = header["skip_softmax_scale_table"]["data_offsets"]
        header["skip_softmax_scale_table"].update(shape=[3], data_offsets=[begin, end - 4])
        header["rest"] = {"dtype": "I32", "shape": [1], "data_offsets": [end - 4, end]}
        self.refuse(header, data, "'skip_softmax_scale_table'", "two int32 for each pair")
        header, data = self.sample(*self.TREE)
        header["skip_softmax_scale_table"] = {"dtype": "I32", "shape": [2],
                                              "data_offsets": [len(data), len(data) + 8]}
        self.refuse(header, data + struct.pack("<2i", 0, 1), "skip_softmax_scale_table", "q_len is 40")

    def test_a_tree_mask_for_one_token(self):
        options = ("--batch", 2, "--len", 140, "--heads", "4/2", "--dim", 64)
        path, out = self.path("one"), self.path("out")
        results = []
        for tree in ("none", "full"):
            self.expect(0, "sample", "ctm", *options, "--tree", tree, "-o", path)
            if tree == "full":
                # Ignored even if its shape makes no sense, or its bits would hide the key.
                header, data = read_file(path)
                begin, end = header["tree_mask"]["data_offsets"]
                header["tree_mask"]["shape"] = [1, 1, (end - begin) // 4]
                write_file(path, header, data[:begin] + bytes(end - begin) + data[end:])
            done = self.expect(0, "run", path, "--check", "--device", "host", "-o", out)
            self.assertEqual("'tree_mask' is ignored" in done.stderr, tree == "full", done.stderr)
            self.assertIn("definition  ok", done.stdout)
            results.append(read_file(out)[0]["o"]["shape"])
        self.assertEqual(results, [[2, 1, 4, 64]] * 2)

    def test_ctm_has_no_lse(self):
        self.sample(*self.TREE)
        done = self.expect(1, "run", self.path("case"), "--device", "host", "--lse", "-o", self.path("out"))
        self.assertIn("the operation ctm has no lse", done.stderr)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_extras_of_ctm_are_ignored_with_a_warning(self):
        header, data = self.sample(*self.TREE)
        header["__metadata__"].update(policy="legacy", softcap="2")
        header["expected_lse"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        path = self.path("extra.safetensors")
        write_file(path, header, data + bytes(4))
        done = self.expect(0, "run", path, "--check", "--device", "host")
        for name in ("'policy'", "'softcap'", "'expected_lse'"):
            self.assertIn(name, done.stderr)

    def test_the_worst_element_has_its_token(self):
        header, data = self.sample(*self.TREE)
        path, out = self.path("case"), self.path("out")
        self.expect(0, "run", path, "--device", "host", "-o", out)
        result, values = read_file(out)
        begin, end = result["o"]["data_offsets"]
        expected = list(struct.unpack(f"<{(end - begin) // 2}e", values[begin:end]))
        # Sequence 1, token 17, head 3, dim 5.
        expected[((1 * 40 + 17) * 4 + 3) * 64 + 5] += 10
        blob = struct.pack(f"<{len(expected)}f", *expected)
        header["expected_o"] = {"dtype": "F32", "shape": header["q"]["shape"],
                                "data_offsets": [len(data), len(data) + len(blob)]}
        write_file(path, header, data + blob)
        done = self.expect(1, "run", path, "--check", "--device", "host")
        self.assertIn("definition  ok", done.stdout)
        self.assertIn("the worst is o[1][17][3][5] = ", done.stdout)
        found = json.loads(self.expect(1, "run", path, "--check", "--device", "host", "--json").stdout)
        self.assertEqual([found["checks"][1][f"worst_{key}"] for key in ("sequence", "token", "head", "dim")],
                         [1, 17, 3, 5])

    def test_fewer_keys_than_tokens_is_a_fault(self):
        header, data = self.sample(*self.TREE)
        begin, _ = header["seq_lens"]["data_offsets"]
        path = self.path("short")
        write_file(path, header, data[:begin] + struct.pack("<i", 39) + data[begin + 4:])
        done = self.expect(1, "run", path, "--device", "host")
        self.assertIn("sequence 0 has a length below 0, of fewer keys than query tokens,", done.stderr)

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


class Prefill(Program):
    SAMPLES = {
        "paged": ("--len", 90, "--q-len", 33, "--heads", "6/2", "--dim", 64, "--page", 7),
        "whole": ("--len", 70, "--heads", "2/1", "--dim", 256, "--dtype", "fp16", "--softcap", 5),
        "ragged": ("--batch", 4, "--len", "0:60", "--heads", "4/4", "--dim", 32, "--window", 9, "--sinks"),
        "contiguous": ("--contiguous", "--batch", 2, "--len", 40, "--q-len", 9, "--heads", "4/1", "--dim", 80,
                       "--not-causal"),
        "tiny": ("--contiguous", "--len", 1, "--heads", "1/1", "--dim", 16),
        "nothing": ("--batch", 0, "--heads", "1/1", "--dim", 16),
    }

    def sample(self, *options):
        path = self.path("prefill.safetensors")
        self.expect(0, "sample", "prefill", *options, "-o", path)
        return path

    def test_samples_run_and_check(self):
        out = self.path("out.safetensors")
        for name, options in self.SAMPLES.items():
            path = self.sample(*options)
            done = self.expect(0, "run", path, "--check", "--device", "host", "-o", out, "--lse", "--json")
            self.assertEqual(done.stderr, "", name)
            found, head = json.loads(done.stdout), read_file(out)[0]
            shape = read_file(path)[0]["q"]["shape"]
            self.assertEqual((found["ok"], found["op"], found["fault_sequence"]), (True, "prefill", None))
            self.assertEqual(found["checks"][0]["compared"], math.prod(shape), name)
            self.assertEqual((head["o"]["shape"], head["lse"]["shape"]), (shape, shape[:-1]), name)
            self.assertEqual(found["q_len"] is None, name in ("ragged", "nothing"))
            text = self.expect(0, "run", path, "--check", "--device", "host").stdout
            self.assertIn("definition  ok", text)

    def test_samples_check_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        for options in (self.SAMPLES["paged"], self.SAMPLES["whole"],
                        ("--batch", 9, "--len", "0:500", "--dim", 128, "--sinks"),
                        ("--contiguous", "--batch", 3, "--len", 333, "--dim", 64, "--window", 50)):
            self.expect(0, "run", self.sample(*options), "--check", "--device", "gpu")

    def test_a_seed_gives_the_same_file(self):
        first, again, other = (pathlib.Path(self.sample(*self.SAMPLES["ragged"], "--seed", seed)).read_bytes()
                               for seed in (5, 5, 6))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_the_kernel_is_chosen(self):
        for kernel, dim, status in (("64", 256, 0), ("128", 256, 0), ("auto", 64, 0), ("128", 64, 1)):
            path = self.sample("--len", 20, "--heads", "2/1", "--dim", dim, "--kernel", kernel)
            done = self.expect(status, "run", path, "--device", "host")
            self.assertEqual("declines this call" in done.stderr, status == 1)

    def test_what_follows_from_the_tensors(self):
        # Scalars that are not given: the last token sees all keys, causal, 1 / sqrt(head_dim).
        for options, dropped in ((self.SAMPLES["paged"], ("q_offset", "causal", "scale")),
                                 (("--contiguous", "--len", 30, "--q-len", 8, "--dim", 64, "--heads", "2/2"),
                                  ("causal", "scale"))):
            path = self.sample(*options)
            before, after = self.path("before"), self.path("after")
            self.expect(0, "run", path, "--device", "host", "-o", before)
            header, data = read_file(path)
            for key in dropped:
                del header["__metadata__"][key]
            write_file(path, header, data)
            self.expect(0, "run", path, "--device", "host", "-o", after)
            self.assertEqual(pathlib.Path(before).read_bytes(), pathlib.Path(after).read_bytes())

    def change(self, options, change):
        path = self.sample(*options)
        header, data = read_file(path)
        change(header)
        write_file(path, header, data)
        return self.expect(1, "run", path, "--device", "host")

    def test_cases_that_are_wrong(self):
        def scalar(key, value):
            return lambda header: header["__metadata__"].update({key: value})

        def dtype(name, value):
            return lambda header: header[name].update(dtype=value)

        def shape(name, value):
            return lambda header: header[name].update(shape=value)

        def hide(name):
            return lambda header: header.update({"other": header.pop(name)})
        paged, ragged, contiguous = (self.SAMPLES[name] for name in ("paged", "ragged", "contiguous"))
        for options, change, sentence in (
                (paged, scalar("kernel", "96"), "'kernel' is '96'"),
                (paged, scalar("causal", "2"), "'causal' is '2'"),
                (paged, scalar("q_offset", "x"), "'q_offset' is 'x'"),
                (paged, scalar("kv_len", "-1"), "'kv_len' is '-1'"),
                (paged, scalar("kv_len", "100000"), "kv_len is 100000"),
                (paged, lambda header: header["__metadata__"].pop("kv_len"), "'kv_len' is missing"),
                (paged, hide("block_table"), "'block_table' is missing"),
                (paged, dtype("k_pool", "F16"), "'k_pool' is of type F16"),
                (paged, shape("q", [33, 3, 128]), "'k_pool' has shape"),
                (ragged, hide("kv_lens"), "'kv_lens' is missing"),
                (ragged, shape("cu_seqlens", [1, 5]), "'cu_seqlens' has shape"),
                (contiguous, shape("k", [1, 80, 1, 80]), "'k' has shape"),
                (contiguous, scalar("window", "-3"), "'window' is '-3'")):
            self.assertIn(sentence, self.change(options, change).stderr)

    def test_a_fault_is_reported_and_the_output_written(self):
        for name, place, value in (("kv_lens", 1, 10 ** 6), ("cu_seqlens", 2, -3), ("block_table", -1, None)):
            path, out = self.sample("--batch", 3, "--len", "20:40", "--dim", 32), self.path("out")
            header, data = read_file(path)
            begin, end = header[name]["data_offsets"]
            data = bytearray(data)
            if value is None:
                data[begin:end] = struct.pack("<i", -7) * ((end - begin) // 4)
            else:
                data[begin + 4 * place:begin + 4 * place + 4] = struct.pack("<i", value)
            write_file(path, header, bytes(data))
            done = self.expect(1, "run", path, "--device", "host", "-o", out, "--check", "--json")
            self.assertRegex(done.stderr, "sequence [01] has entries of cu_seqlens")
            self.assertIn("o", read_file(out)[0])
            self.assertFalse(json.loads(done.stdout)["ok"])

    def test_a_wrong_expected_value_fails(self):
        path, out = self.sample(*self.SAMPLES["paged"]), self.path("out")
        self.expect(0, "run", path, "--device", "host", "-o", out, "--lse")
        header, data = read_file(path)
        made, lse = read_file(out)
        begin, end = made["lse"]["data_offsets"]
        header["expected_lse"] = {"dtype": "F32", "shape": made["lse"]["shape"],
                                  "data_offsets": [len(data), len(data) + end - begin]}
        o = [struct.unpack("<f", b"\0\0" + lse[i:i + 2])[0] for i in range(*made["o"]["data_offsets"], 2)]
        data += lse[begin:end]
        o[5 * 6 * 64 + 2 * 64 + 7] += 1
        header["expected_o"] = {"dtype": "F32", "shape": made["o"]["shape"],
                                "data_offsets": [len(data), len(data) + 4 * len(o)]}
        write_file(path, header, data + struct.pack(f"<{len(o)}f", *o))
        done = self.expect(1, "run", path, "--check", "--device", "host")
        self.assertIn("definition  ok", done.stdout)
        self.assertIn("expected_o  FAILED", done.stdout)
        self.assertIn("o[5][2][7]", done.stdout)

    def plan(self, *options, says="query tokens, a block for each"):
        # A pack that needs no nvcc; a static build has its packs in itself.
        folder = self.use_fake_hopper()
        text = self.expect(0, "plan", "prefill", "--target", "hopper", *options, **folder).stdout
        self.assertIn(says, text)
        done = self.expect(0, "plan", "prefill", "--target", "hopper", "--json", *options, **folder)
        return json.loads(done.stdout)["plans"][0]

    def test_plans(self):
        plan = self.plan("--dim", 256, "--heads", "24/4", "--len", 1000)
        self.assertEqual((plan["kernel"], plan["rows"], plan["tiles"]), ("prefill_bf16_d256_fa128", 128, 8))
        self.assertEqual(plan["grid"], 8 * 24)
        self.assertEqual(plan["flops"], 4 * 256 * 24 * 1000 * 1001 / 2)
        self.assertEqual(plan["kv_bytes"], 2 * 1000 * 4 * 256 * 2)
        plan = self.plan("--dim", 256, "--heads", "24/4", "--len", 1000, "--q-len", 100, "--kernel", "64",
                         "--batch", 3, "--not-causal")
        self.assertEqual((plan["kernel"], plan["tiles"], plan["q_offset"]), ("prefill_bf16_d256", 6, 900))
        self.assertEqual(plan["flops"], 4 * 256 * 24 * 3 * 100 * 1000)
        done = self.expect(1, "plan", "prefill", "--dim", 96, "--target", "hopper",
                           ATTN_PACK_PATH=self.folder.name)
        self.assertIn("head_dim 96; it has: prefill_", done.stderr)

    def test_plans_the_short_form(self):
        chunk = ("--dim", 128, "--heads", "32/8", "--len", 8192, "--q-len", 16)
        plan = self.plan(*chunk, "--no-workspace")
        self.assertEqual((plan["kernel"], plan["workspace_bytes"]), ("prefill_bf16_d128", 0))
        plan = self.plan(*chunk, says="form        short")
        self.assertEqual((plan["kernel"], plan["rows"], plan["tiles"]), ("decode_bf16_bf16_d128_wide", 0, 0))
        self.assertTrue(plan["workspace_bytes"] > 0 and plan["num_counters"] > 0 and plan["grid"] > 0, plan)
        plan = self.plan(*chunk, "--contiguous")
        self.assertEqual((plan["kernel"], plan["num_counters"]), ("prefill_bf16_d128", 0))

    def test_bench_on_the_host_executor(self):
        done = self.expect(0, "bench", "prefill", "--device", "host", "--json")
        self.assertIn("take the host executor too long", done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual((found["op"], found["host_executor"]), ("prefill", True))
        self.assertGreater(len(found["cases"]), 1)
        for case in found["cases"]:
            self.assertTrue(case["ok"] and case["us"] > 0 and case["tflops"] > 0, case)
            self.assertTrue(32 <= case["rows_checked"] <= 256 and case["bound_share"] <= 1, case)
            shape = case["shape"]
            pairs = shape["batch"] * sum(shape["q_offset"] + i + 1 for i in range(shape["q_len"]))
            self.assertEqual(case["flops"], 4 * shape["head_dim"] * shape["num_q_heads"] * pairs)
        name = found["cases"][0]["case"]
        table = self.expect(0, "bench", "prefill", "--device", "host", "--csv", "--shape", name).stdout
        (row,) = csv.DictReader(io.StringIO(table))
        self.assertEqual((row["case"], row["device"]), (name, "host executor"))
        self.assertTrue(row["commit"] and None not in row)
        text = self.expect(0, "bench", "prefill", "--device", "host", "--set", "short", "--shape",
                           name).stdout
        self.assertIn("not of a kernel", text)
        self.assertIn("limit    of GB/s", text)

    def test_bench_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        names = ("24q4 d256, 1000", "16q2 d256, 777 at 5000", "32q8 d128, 32 of 64 to 8k")
        wanted = [part for name in names for part in ("--shape", name)]
        cases = json.loads(self.expect(0, "bench", "prefill", "--json", *wanted).stdout)["cases"]
        for case in cases:
            self.assertTrue(case["ok"] and case["tflops"] > 1 and case["host_us"] > 0, case)
            self.assertEqual(case["twin_speedup"] is None, case["shape"]["ragged"])

    def test_list_needs_no_device(self):
        names = self.expect(0, "bench", "prefill", "--list").stdout.splitlines()
        self.assertEqual(len(set(names)), len(names))
        for wanted in ("24q4 d256, 16k", "32q8 d128 contiguous, 8k", "64q8 d64, 8k",
                       "16q2 d256, 8200 at 16392"):
            self.assertIn(wanted, names)
        short = self.expect(0, "bench", "prefill", "--list", "--set", "short").stdout.splitlines()
        self.assertEqual(len(short), 30)
        self.assertTrue({"24q4 d256, 1 of 8k", "32q8 d128, 129 of 128k"} <= set(short), short)
        self.assertFalse(set(short) & set(names))


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
            self.assertEqual(case["shape"], {"window": 0, "q_dtype": "bf16", "kv_dtype": "bf16", "op": "decode",
                                             "q_len": 1, "tree": "none", **shape})
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
        path = self.shapes([dict(self.SHAPES[0], name='7" of it')])
        table = self.expect(0, "bench", "--device", "host", "--shapes", path, "--csv").stdout
        (row,) = csv.DictReader(io.StringIO(table))
        self.assertEqual((row["case"], row["device"]), ('7" of it', "host executor"))

    def test_ctm_trees_and_skip_softmax(self):
        small = dict(self.SHAPES[0], page_size=128, q_dtype="fp16", kv_dtype="fp16", window=0, q_len=1,
                     op="decode", tree="none")
        shapes = [dict(small, name="ctm", op="ctm"), dict(small, name="chain", q_len=3),
                  dict(small, name="tree", q_len=8, tree="random", page_size=16),
                  dict(small, name="ctm tree", op="ctm", q_len=8, tree="random"),
                  *(dict(small, name=f"skip {share}", op=op, len=8192, skip=share)
                    for share, op in ((0, "decode"), (0.5, "ctm"), (0.9, "decode"))),
                  dict(small, name="tiled", op="tiled", page_size=16)]
        path = self.shapes(shapes)
        done = self.expect(0, "bench", "--device", "host", "--shapes", path, "--json")
        cases = json.loads(done.stdout)["cases"]
        self.assertEqual([case["shape"] for case in cases], shapes)
        self.assertTrue(all(case["ok"] and case["relative_rms"] < 2 ** -11 for case in cases), cases)
        # 64 pages, of which 6.4 should stay, and 6 do.
        self.assertEqual([case["dropped_share"] for case in cases], [None] * 4 + [0, 0.5, 58 / 64, None])
        kv_bytes = 2 * 8192 * 2 * 64 * 2 * 2
        dense, half, _ = (case["bytes"] for case in cases[4:7])
        self.assertEqual(dense - half, kv_bytes / 4)
        table = self.expect(0, "bench", "--device", "host", "--shapes", path, "--csv").stdout
        rows = list(csv.DictReader(io.StringIO(table)))
        self.assertEqual([(row["op"], row["q_len"], row["tree"]) for row in rows[:4]],
                         [("ctm", "1", "none"), ("decode", "3", "none"), ("decode", "8", "random"),
                          ("ctm", "8", "random")])
        self.assertEqual(rows[5]["dropped_share"], "0.5000")
        text = self.expect(0, "bench", "--device", "host", "--shapes", path).stdout
        self.assertIn("90.6 % of the pages left out", text)
        for wrong in ({"op": "swap"}, {"tree": "oak"}, {"q_len": 129}, {"skip": 0.95}, {"skip": "much"},
                      {"op": "tiled", "q_len": 2}, {"op": "tiled", "window": 5},
                      {"op": "ctm", "page_size": 16}, {"op": "ctm", "q_dtype": "bf16", "kv_dtype": "bf16"},
                      {"op": "ctm", "q_len": 2}, {"skip": 0.5, "len": 8000}, {"skip": 0.5, "q_len": 2}):
            path = self.shapes([{**small, "len": 8192, **wrong}])
            done = self.expect(1, "bench", "--device", "host", "--shapes", path)
            self.assertRegex(done.stderr, "'(op|tree|q_len|skip|page_size|q_dtype|window)' is missing")

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
                                 page_size=65536), *self.SHAPES,
                            dict(self.SHAPES[0], name="tiles", op="tiled")])
        done = self.expect(0, "bench", "--shapes", path, "--json")
        self.assertRegex(done.stderr, "odd: skipped: .*48")
        self.assertRegex(done.stderr, "vast: skipped: .*GB")
        *skipped, one, two, tiles = json.loads(done.stdout)["cases"]
        self.assertEqual([(case["ok"], case["skipped"]) for case in skipped], [(False, True)] * 2)
        self.assertTrue(tiles["kernel"].startswith("tiled_"))
        for case in (one, two, tiles):
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
        for chosen in ("default", "pages", "batch", "ratio", "ctm", "tree", "skip", "tiled", "all"):
            names = self.expect(0, "bench", "--list", "--set", chosen).stdout.splitlines()
            self.assertEqual(len(set(names)), len(names))
            count[chosen] = len(names)
        self.assertEqual(count["all"], sum(count.values()) - count["all"])
        self.assertEqual((count["pages"], count["ratio"], count["ctm"], count["tree"], count["skip"]),
                         (7, 16, 8, 3, 6))
        self.assertEqual(self.expect(0, "bench", "ctm", "--list").stdout,
                         self.expect(0, "bench", "--list", "--set", "ctm").stdout)
        self.assertEqual(count["default"], len(self.expect(0, "bench", "--list").stdout.splitlines()))

    def test_shapes_that_are_wrong(self):
        for key, value in (("batch", 0), ("batch", 1.5), ("num_kv_heads", 3), ("len", [1]), ("len", -1),
                           ("name", 3), ("q_dtype", "fp64")):
            path = self.shapes([dict(self.SHAPES[0], **{key: value})])
            self.assertIn(f"'{key}'", self.expect(1, "bench", "--device", "host", "--shapes", path).stderr)
        for wrong in ({}, []):
            self.assertIn("array", self.expect(1, "bench", "--shapes", self.shapes(wrong)).stderr)


class Sentences(Program):
    """Those that no other test provokes; tests/messages looks for all of them."""

    def say(self, status, words, *arguments, **environment):
        done = self.expect(status, *arguments, **environment)
        self.assertIn(words, done.stderr if status else done.stdout)

    def test_options(self):
        out = ("-o", self.path("none"))
        for operation in ("decode", "prefill"):
            for option, value, words in (
                    ("--seed", "-1", "--seed is '-1'; a whole number from 0 up"),
                    ("--scale", "0", "--scale is '0'; a number above 0"),
                    ("--softcap", "-1", "--softcap is '-1'; a number from 0 up"),
                    ("--len", 2147483647, "--len is 2147483647; at most")):
                self.say(2, words, "sample", operation, option, value, *out)
            names = ("--shape", "x") * 33
            self.say(2, "--shape may be given 32 times", "bench", operation, *names)
        self.say(2, "prefill has options of its own", "plan", "--batch", "2", "prefill")
        self.say(2, "--kv-dtype is 'fp8'; it is", "plan", "decode", "--kv-dtype", "fp8")
        self.say(2, "--kv-dtype is fp16 with --dtype bf16", "plan", "decode", "--kv-dtype", "fp16")

    def test_sizes(self):
        out = ("-o", self.path("none"))
        large = ("--batch", 60000, "--len", 1 << 30, "--dim", 512)
        self.say(1, "a sample has at most 2^31 - 1 pages", "sample", "decode", *large, *out)
        self.say(1, "a sample has at most 2^31 - 1 tokens", "sample", "prefill", *large, *out)

    def test_plans(self):
        folder = self.use_fake_hopper()
        plan = ("plan", "decode", "--dim", 64, "--target", "hopper", "--policy", "8")
        self.say(0, "at most 8 pieces a sequence, of 256 keys or more", *plan, **folder)
        self.say(0, " counters\n", *plan, **folder)

    def test_info_of_a_policy_that_follows_the_batch(self):
        self.say(0, "max_decode_seqs too (policy legacy)", "info", METRALE_ATTN_DECODE_SPLITK="legacy")

    def write_zeros(self, scalars, **tensors):
        """A case file of zeros, of these types and shapes; its path."""
        sizes = {"BF16": 2, "F32": 4, "I32": 4}
        header, end = {"__metadata__": {"format": "attn-case", "version": "1", **scalars}}, 0
        for name, (dtype, *shape) in tensors.items():
            begin, end = end, end + sizes[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        path = self.path("zeros.safetensors")
        write_file(path, header, bytes(end))
        return path

    def test_cases(self):
        q, pool = ("BF16", 1, 2, 64), ("BF16", 1, 16, 1, 64)
        void = ("BF16", 1, 0, 1, 64)
        table, lens = ("I32", 1, 1), ("I32", 1)
        decode = {"q": q, "k_pool": pool, "v_pool": pool, "block_table": table, "seq_lens": lens}
        prefill = {"q": q, "k_pool": pool, "v_pool": pool, "block_table": lens}
        ragged = {**prefill, "block_table": table, "kv_lens": lens, "q_offsets": lens}
        tiled = {"q": q, "k_pool": pool, "v_pool": pool, "block_list": table, "block_counts": lens}
        for op, tensors, words in (
                ("decode", {**decode, "q": ("BF16", 1, 0, 64)}, "at least one token of one head of one element"),
                ("decode", {**decode, "k_pool": void, "v_pool": void}, "at least one token a page and one KV head"),
                ("decode", {**decode, "k_scales": ("F32", 1)}, "k_scales and v_scales come together"),
                ("prefill", {**prefill, "q": ("BF16", 1, 0, 64)}, "at least one head of one element"),
                ("prefill", {**prefill, "k_pool": void, "v_pool": void},
                 "at least one token a page and one KV head"),
                ("prefill", {**ragged, "cu_seqlens": ("I32", 0)}, "one more than there are sequences"),
                ("tiled", {**tiled, "q": ("BF16", 0, 2, 64)}, "at least one sequence, of one head of one element"),
                ("tiled", {**tiled, "k_pool": void, "v_pool": void},
                 "at least one block, of one token of one KV head"),
                ("tiled", {**tiled, "block_list": ("I32", 1, 0)}, "room for one block, and for less than 2^31")):
            with self.subTest(op=op, words=words):
                path = self.write_zeros({"op": op, "tile_capacity": "1", "kv_len": "0"}, **tensors)
                self.say(1, words, "run", path, "--device", "host")
        self.say(1, "scalar 'op' is missing", "run", self.write_zeros({}, **decode))


class Swap(Program):
    SMALL = ("--device", "host", "--host-gb", "0.004", "--resident-gb", "0.001", "--layers", "2", "--steps", "2",
             "--batch", "3", "--dim", "64", "--heads", "4/2")

    def bench(self, *options):
        return json.loads(self.expect(0, "bench", "swap", *self.SMALL, *options, "--json").stdout)

    def test_help(self):
        self.assertIn("Usage: attn bench swap", self.expect(0, "bench", "swap", "--help").stdout)

    def test_info_names_what_reads_files(self):
        named = json.loads(self.expect(0, "info", "--json").stdout)["swap_file_backend"]
        self.assertIn(named, ("io_uring", "threads"))
        self.assertIn(f"Swap files are read by {named}\n", self.expect(0, "info").stdout)

    def test_without_liburing_threads_read(self):
        folder = self.path("libraries")
        os.mkdir(folder)
        library = pathlib.Path(folder) / "liburing.so.2"
        environment = {"LD_LIBRARY_PATH": folder + ":" + os.environ.get("LD_LIBRARY_PATH", "")}
        # One that is none, and one of another library.
        other = pathlib.Path(os.environ["ATTN_OLD_DRIVER"]).read_bytes()
        for content, words in ((b"rubbish", "liburing.so.2 cannot be opened"),
                               (other, "liburing.so.2 has no io_uring_queue_init")):
            library.write_bytes(content)
            done = self.expect(0, "info", "--json", **environment)
            self.assertEqual(json.loads(done.stdout)["swap_file_backend"], "threads")
            done = self.expect(1, "bench", "swap", *self.SMALL, "--file", self.path("blocks"), "--reader", "uring",
                               **environment)
            if "built without liburing" not in done.stderr:
                self.assertIn(words, done.stderr)
            self.assertIn("ATTN_SWAP_READER_AUTO takes threads then", done.stderr)
            self.assertFalse(os.path.exists(self.path("blocks")))

    def test_from_host_memory(self):
        done = self.bench()
        self.assertEqual((done["op"], done["backend"], done["limit_gbs"]), ("swap", "host memory", None))
        self.assertLess(done["bound_share"], 1)
        # 2 layers of 244 blocks of 8192 bytes, 81 of each sequence; 122 slots, of which tiles have 30.
        self.assertEqual(done["bytes_attended"], 2 * 3 * 81 * 8192)
        self.assertEqual(done["hits"] + done["misses"], 2 * 3 * 81)
        self.assertGreaterEqual(done["hits"], 122 - 30)
        self.assertEqual(done["bytes_moved"], done["misses"] * 8192)
        text = self.expect(0, "bench", "swap", *self.SMALL).stdout
        for part in ("host executor", "attended", "of the error bound", "0.00 GB in host memory"):
            self.assertIn(part, text)

    def test_from_a_file(self):
        path = self.path("blocks")
        for reader in ("auto", "threads"):
            done = self.bench("--file", path, "--reader", reader)
            self.assertIn(done["backend"], ("io_uring", "threads") if reader == "auto" else ("threads",))
            self.assertGreater(done["limit_share"], 0)
            self.assertEqual((done["num_reads"], done["read_bytes"]),
                             (16 if done["backend"] == "threads" else 64, 512 << 10))
            self.assertFalse(os.path.exists(path))
        self.assertIn("in a file", self.expect(0, "bench", "swap", *self.SMALL, "--file", path).stdout)

    def read_timeline(self, path):
        """Events of each row, by name; and the share that the file names."""
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        rows, events = {}, {}
        for event in document["traceEvents"]:
            if event["ph"] == "M":
                rows[event["tid"]] = event["args"]["name"]
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                self.assertEqual(event["cat"], rows[event["tid"]])
                self.assertGreaterEqual(event["dur"], 0)
                events.setdefault(event["cat"], []).append(event)
        # What stands in a row does not overlap.
        for tid in rows:
            row = [event for found in events.values() for event in found if event["tid"] == tid]
            for last, event in zip(row, row[1:]):
                self.assertGreaterEqual(event["ts"] + 0.01, last["ts"] + last["dur"])
        return events, document["otherData"]["compute_hidden_share"]

    def test_timeline(self):
        path, timeline = self.path("blocks"), self.path("timeline")
        for options in ((), ("--file", path)):
            done = self.bench("--timeline", timeline, *options)
            events, share = self.read_timeline(timeline)
            self.assertEqual(share, done["compute_hidden_share"])
            # One thread does both on the host executor.
            self.assertEqual(share, 0)
            self.assertEqual(len(events["compute"]), done["tiles"])
            self.assertEqual(len(events["copies"]), done["tiles"])
            self.assertEqual({event["args"]["layer"] for event in events["compute"]}, {0, 1})
            moved = sum(event["args"]["bytes"] for event in events["copies"])
            self.assertAlmostEqual(moved, done["bytes_moved"], delta=0.1 * done["bytes_moved"])
            self.assertEqual("reads" in events, bool(options))
            names = [event["name"] for event in events["compute"]]
            self.assertEqual(names, sorted(set(names), key=lambda name: int(name.split()[1])))
        text = self.expect(0, "bench", "swap", *self.SMALL, "--timeline", timeline).stdout
        self.assertIn(f"hidden    0.0 % of the time of computing under copies; {timeline} shows them", text)
        self.assertNotIn("compute_hidden_share", self.bench())
        self.assertIn("cannot be written: No such file", self.expect(
            1, "bench", "swap", *self.SMALL, "--timeline", self.path("none/timeline")).stderr)

    def test_a_file_that_is_there_stays(self):
        path = self.path("blocks")
        with open(path, "wb") as file:
            file.write(b"mine")
        self.assertIn("is there already", self.expect(1, "bench", "swap", *self.SMALL, "--file", path).stderr)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), b"mine")

    def test_wrong_options(self):
        for options, part in ((("--host-gb", "0"), "a number above 0"), (("--resident-gb", "x"), "above 0"),
                              (("--heads", "32"), "as in 32/8"), (("--heads", "a/b"), "as in 32/8"),
                              (("--heads", "7/2"), "multiple"), (("--reader", "fast"), "uring or threads"),
                              (("--device", "auto"), "gpu or host"), (("--steps", "101"), "--steps"),
                              (("--host-gb", "1e-6"), "at least one each"), (("--planes", "1"), "num_planes is 1"),
                              (("--resident-gb", "1e-9"), "resident_blocks is 0"), (("more",), "too many"),
                              (("--nonsense",), "not known")):
            self.assertIn(part, self.expect(2, "bench", "swap", *options).stderr, options)

    def test_without_a_gpu_the_sentence_of_no_device(self):
        if self.has_gpu():
            self.skipTest("there is a GPU")
        self.assertIn("NVIDIA driver", self.expect(1, "bench", "swap").stderr)

    def test_on_the_gpu(self):
        if not self.has_gpu():
            self.skipTest("there is no GPU that fits a pack")
        timeline = self.path("timeline")
        small = ("--host-gb", "2", "--resident-gb", "0.5", "--layers", "2", "--steps", "2", "--json")
        done = json.loads(self.expect(0, "bench", "swap", *small, "--timeline", timeline).stdout)
        self.assertLess(done["bound_share"], 1)
        self.assertGreater(done["limit_share"], 0.5)
        events, share = self.read_timeline(timeline)
        self.assertEqual(len(events["compute"]), done["tiles"])
        self.assertGreater(share, 0.5)


if __name__ == "__main__":
    unittest.main()

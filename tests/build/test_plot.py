# SPDX-License-Identifier: Apache-2.0
"""tools/plot: the points of its pictures are those of the files, and what it can't use has a
sentence.

usage: test_plot.py SOURCE_ROOT
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

SVG = "{http://www.w3.org/2000/svg}"
HEAD = {"device": "A <GPU> & more", "library": "0.1.0", "commit": "abc", "driver": "580.1"}


def decode_case(name, size, us, limit, **shape):
    return {"case": name, "ok": True, "skipped": False, "us": us, "bytes": size,
            "gbs": size / us * 1e-3, "limit_gbs": limit, "shape": {"q_len": 1, **shape}}


DECODE = {"op": "decode", **HEAD, "cases": [
    decode_case("small", 4e6, 10.0, 500.0),
    decode_case("large", 2e9, 500.0, 4100.0),
    decode_case("tree", 2e9, 400.0, 4100.0, **{"q_len": 8}),
    decode_case("skip", 2e9, 300.0, 4100.0, skip=0.5),
    {"case": "failed", "ok": False, "skipped": False, "error": "?", "shape": {"q_len": 1}},
]}
DECODE_TORCH = {"torch": "2.11", "rows": [
    {"case": "large", "us": 500.0, "torch_us": 1000.0}, {"case": "small", "us": 10, "torch_us": None},
    {"case": "unknown", "torch_us": 3.0},
]}


def prefill_case(name, q_len, us, q_offset=0, ragged=False):
    return {"case": name, "ok": True, "skipped": False, "us": us, "flops": 1e12,
            "tflops": 1e6 / us, "shape": {"q_len": q_len, "q_offset": q_offset, "ragged": ragged}}


PREFILL = {"op": "prefill", **HEAD, "cases": [
    prefill_case("2k", 2048, 4000.0), prefill_case("chunk", 1024, 2000.0, q_offset=7168),
    prefill_case("ragged", 0, 1.0, ragged=True),
]}
PREFILL_TORCH = {"torch": "2.11", "rows": [{"case": "2k", "us": 4000.0, "ratio": 2.0}]}

# What it is given, more options, what it has to say.
REFUSED = [
    (["{"], [], "cannot be read"), ([[1]], [], "is no output of"), ([{"op": "decode"}], [], "is no output of"),
    ([DECODE, DECODE], [], "two files are of attn bench decode"),
    ([DECODE_TORCH], [], "no file is of attn bench"),
    ([{**DECODE, "cases": DECODE["cases"][4:]}], [], "no case of decode was timed"),
    ([PREFILL], ["--peak", "0"], "--peak 0: it has to be above 0"),
]


def plot(root, folder, documents, *options):
    paths = []
    for i, document in enumerate(documents):
        paths.append(folder / f"{i}.json")
        paths[-1].write_text(document if isinstance(document, str) else json.dumps(document))
    return subprocess.run([sys.executable, root / "tools" / "plot", "-o", folder / "out", *options, *paths],
                          text=True, capture_output=True, check=False)


def read_picture(path):
    """(title, x, y in pixels) of each point; all texts; how many dashed lines."""
    root = ElementTree.parse(path).getroot()
    points = {}
    for kind, x, y, size in (("circle", "cx", "cy", 0), ("rect", "x", "y", 3)):
        for mark in root.iter(SVG + kind):
            if mark.find(SVG + "title") is not None:
                points[mark.find(SVG + "title").text] = (float(mark.get(x)) + size,
                                                         float(mark.get(y)) + size)
    dashed = [way for way in root.iter(SVG + "path") if way.get("stroke-dasharray")]
    return points, [text.text for text in root.iter(SVG + "text")], dashed


def check_decode(folder):
    points, texts, dashed = read_picture(folder / "out" / "decode.svg")
    wanted = {"small, attn: 400.0", "large, attn: 4000.0", "large, PyTorch: 2000.0"}
    assert set(points) == wanted, points
    assert "Decode on A <GPU> & more" in texts and any("commit abc" in text for text in texts), texts
    # Up is more; twice the speed is twice the height above the axis.
    at = {title.split(":")[0]: point for title, point in points.items()}
    zero = at["small, attn"][1] + (at["small, attn"][1] - at["large, attn"][1]) / 9
    heights = {name: zero - y for name, (_, y) in at.items()}
    assert abs(heights["large, attn"] / heights["large, PyTorch"] - 2) < 0.01, heights
    assert at["large, attn"][0] == at["large, PyTorch"][0] > at["small, attn"][0], at
    (limit,) = dashed
    ys = [float(y) for y in re.findall(r" ([\d.]+)", limit.get("d"))]
    assert len(ys) == 2 and abs((zero - ys[1]) / heights["large, attn"] - 4100 / 4000) < 0.01, ys


def check_prefill(folder, has_limit):
    points, texts, dashed = read_picture(folder / "out" / "prefill.svg")
    assert set(points) == {"2k, attn: 250.0", "2k, PyTorch: 125.0", "chunk, attn: 500.0"}, points
    assert points["chunk, attn: 500.0"][0] > points["2k, attn: 250.0"][0], points
    assert len(dashed) == has_limit and ("┄ limit" in texts) == has_limit, texts


def main():
    root = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        done = plot(root, folder, [DECODE, DECODE_TORCH])
        assert done.returncode == 0 and not (folder / "out" / "prefill.svg").exists(), done.stderr
        check_decode(folder)
        for options in ([], ["--peak", "989"]):
            done = plot(root, folder, [PREFILL_TORCH, PREFILL, DECODE], *options)
            assert done.returncode == 0, done.stderr
            check_prefill(folder, bool(options))
        for documents, options, words in REFUSED:
            done = plot(root, folder, documents, *options)
            assert done.returncode == 1 and words in done.stderr, (words, done.stderr)
            assert "Traceback" not in done.stderr, done.stderr


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes golden cases of the CTM runner: inputs, and what the formulas of include/attn/ctm.h give.

    make_ctm.py [FOLDER]      (default: the folder of this script)

Each file is a case for `attn run FILE --check`: FP16, trees of draft tokens, pages of K and V scrambled
independently. expected_o is computed here key by key in double precision. NaN is in every slot that no query
token sees, table entries that must not be followed are wild. Needs the standard library only.
"""

import json
import math
import pathlib
import random
import struct
import sys

HEADS, DIM, PAGE, WORDS = 3, 32, 128, 2
PAGES = 4
NAN = float("nan")

# Who is whose parent, in the order of the tokens: a tree whose root is not its first token, and one of two
# nodes padded with two rows that see the past alone.
TREES = ([1, -1, 1, 0], [-1, 0, None, None])
LENGTHS = (133, 6)
Q_LEN = 4

# name, window, contiguous_query_swa, sinks
CASES = [("ctm_tree_shared_edge", 7, 0, True), ("ctm_tree_swa", 3, 1, False)]


def is_ancestor(tree, above, below):
    while below >= 0:
        if below == above:
            return True
        below = tree[below]
    return False


def sees(tree, token, key):
    return None not in (tree[token], tree[key]) and is_ancestor(tree, key, token)


def visible(tree, length, token, window, swa):
    past = length - Q_LEN
    start = (past + token - window + 1) if swa else (length - window)
    return [t for t in range(max(0, start), length) if t < past or sees(tree, token, t - past)]


def to_half(value):
    return struct.unpack("<e", struct.pack("<e", value))[0]


def attend(q, keys, values, scale, sink):
    scores = [scale * sum(a * b for a, b in zip(q, key)) for key in keys]
    top = max(scores + ([] if sink is None else [sink]), default=0.0)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
    return [sum(w * v[d] for w, v in zip(weights, values)) / total if keys else 0.0 for d in range(DIM)]


def write_case(path, metadata, tensors):
    header, parts, offset = {"__metadata__": metadata}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def make_masks(generator):
    """Bits at and past q_len are anything."""
    words = []
    for tree in TREES:
        for token in range(Q_LEN):
            row = generator.getrandbits(32 * WORDS) >> Q_LEN << Q_LEN
            row |= sum(1 << key for key in range(Q_LEN) if sees(tree, token, key))
            words += [row & 0xFFFFFFFF, row >> 32]
    return struct.pack(f"<{len(words)}I", *words)


def make_case(folder, name, window, swa, with_sinks, seed):
    generator = random.Random(seed)

    def row():
        return [to_half(generator.gauss(0, 1)) for _ in range(DIM)]
    scale = 0.1875
    sinks = [generator.uniform(-2, 2) for _ in range(HEADS)]
    sinks = list(struct.unpack(f"<{HEADS}f", struct.pack(f"<{HEADS}f", *sinks)))
    pool = [[[NAN] * DIM for _ in range(PAGE)] for _ in range(2 * PAGES)]
    k_pages, v_pages = generator.sample(range(PAGES), PAGES), generator.sample(range(PAGES, 2 * PAGES), PAGES)
    table, q, expected = [], [], []
    for tree, length in zip(TREES, LENGTHS):
        seen = set().union(*(visible(tree, length, i, window, swa) for i in range(Q_LEN)))
        rows = [[], []]
        for column in range(3):
            # Wild: left of the window, and past the end.
            used = any(t // PAGE == column for t in seen)
            for entries, pages in zip(rows, (k_pages, v_pages)):
                entries.append(pages.pop() if used else (-1, 0x7F7F7F7F, 2 * PAGES)[column])
        table += rows
        for t in seen:
            for entries in rows:
                pool[entries[t // PAGE]][t % PAGE] = row()
        for i in range(Q_LEN):
            keys = visible(tree, length, i, window, swa)
            for head in range(HEADS):
                q.append(row())
                k, v = ([pool[entries[t // PAGE]][t % PAGE] for t in keys] for entries in rows)
                expected += attend(q[-1], k, v, scale, sinks[head] if with_sinks else None)
    halves = [value for page in pool for slot in page for value in slot]
    tensors = {
        "kv_pool": ("F16", [2 * PAGES, PAGE, 1, DIM], struct.pack(f"<{len(halves)}e", *halves)),
        "q": ("F16", [2, Q_LEN, HEADS, DIM], b"".join(struct.pack(f"<{DIM}e", *values) for values in q)),
        "page_table": ("I32", [2, 2, 3], struct.pack("<12i", *sum(table, []))),
        "seq_lens": ("I32", [2], struct.pack("<2i", *LENGTHS)),
        "tree_mask": ("I32", [2, Q_LEN, WORDS], make_masks(generator)),
        "expected_o": ("F32", [2, Q_LEN, HEADS, DIM], struct.pack(f"<{len(expected)}f", *expected)),
    }
    if with_sinks:
        tensors["sinks"] = ("F32", [HEADS], struct.pack(f"<{HEADS}f", *sinks))
    metadata = {"format": "attn-case", "version": "1", "op": "ctm", "scale": str(scale),
                "window": str(window), "contiguous_query_swa": str(swa)}
    write_case(folder / f"{name}.safetensors", metadata, tensors)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, case in enumerate(CASES):
        make_case(folder, *case, seed)


main()

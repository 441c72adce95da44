#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts a small decode case (BF16, no sinks, no softcap) out of a large one.

    cut_case.py IN.safetensors OUT.safetensors SEQUENCE[:LENGTH] ...

Keeps the sequences named, each shortened to its first LENGTH keys. Pages are scrambled; slots that no
sequence reaches and one page more are filled with NaN; table entries past a sequence's end are stale. The
expected values are computed here in double precision, key by key. Needs the standard library only.
"""

import argparse
import json
import math
import struct

PAD = b"\xff\xff"
WILD = (-1, 0x7F7F7F7F)
# Table columns past the longest sequence.
SPARE_COLUMNS = 2


def read_case(path):
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return metadata, tensors


def write_case(path, metadata, tensors):
    header, parts, offset = {"__metadata__": metadata}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    # So that the data is aligned.
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))


def read_bf16(data):
    values = struct.unpack("<%dH" % (len(data) // 2), data)
    return [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]


def read_int32(data):
    return struct.unpack("<%di" % (len(data) // 4), data)


def attend(q, keys, values, scale, window):
    """One query head over lists of keys and values; o and the natural log of the sum."""
    first = max(0, len(keys) - window) if window else 0
    keys, values = keys[first:], values[first:]
    if not keys:
        return [0.0] * len(q), -math.inf
    scores = [scale * math.fsum(a * b for a, b in zip(q, key)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    o = [math.fsum(w * value[d] for w, value in zip(weights, values)) / total for d in range(len(q))]
    return o, top + math.log(total)


def split(items, size):
    return [items[i:i + size] for i in range(0, len(items), size)]


class Source:
    def __init__(self, path):
        self.metadata, self.tensors = read_case(path)
        if self.tensors["q"][0] != "BF16" or self.tensors["k_pool"][0] != "BF16":
            raise SystemExit(f"{path}: only BF16 cases can be cut")
        if {"sinks", "k_scales"} & set(self.tensors) or {"softcap", "k_scale"} & set(self.metadata):
            raise SystemExit(f"{path}: sinks, softcap and scales of K and V are not supported")
        self.batch, self.num_q_heads, self.head_dim = self.tensors["q"][1]
        _, self.page_size, self.num_kv_heads, _ = self.tensors["k_pool"][1]
        self.columns = self.tensors["block_table"][1][1]
        self.table = read_int32(self.tensors["block_table"][2])
        self.lens = read_int32(self.tensors["seq_lens"][2])
        self.token_bytes = self.num_kv_heads * self.head_dim * 2
        self.scale = float(self.metadata.get("scale", 1 / math.sqrt(self.head_dim)))
        self.window = int(self.metadata.get("window", "0"))

    def token(self, pool, sequence, t):
        page = self.table[sequence * self.columns + t // self.page_size]
        start = (page * self.page_size + t % self.page_size) * self.token_bytes
        return self.tensors[pool][2][start:start + self.token_bytes]

    def query(self, sequence):
        size = self.num_q_heads * self.head_dim * 2
        return self.tensors["q"][2][sequence * size:(sequence + 1) * size]


def place_pages(lens, page_size):
    """A table row of each sequence, with page ids scrambled by a multiplier; pages in all."""
    used = [-(-length // page_size) for length in lens]
    total = sum(used) + 1
    step = next(n for n in range(total // 2 + 1, 2 * total + 2) if math.gcd(n, total) == 1)
    ids = [i * step % total for i in range(total)]
    poison, columns, rows = ids.pop(), max(used) + SPARE_COLUMNS, []
    for count in used:
        row, ids = ids[:count], ids[count:]
        rows.append(row + [(WILD + (poison,))[i % 3] for i in range(columns - count)])
    return rows, total


def fill_pool(source, name, kept, rows, num_pages):
    slots = [PAD * (source.token_bytes // 2)] * (num_pages * source.page_size)
    for (sequence, length), row in zip(kept, rows):
        for t in range(length):
            slots[row[t // source.page_size] * source.page_size + t % source.page_size] = \
                source.token(name, sequence, t)
    return b"".join(slots)


def expect(source, sequence, length):
    """o and lse of all query heads of one sequence, row by row."""
    q = split(read_bf16(source.query(sequence)), source.head_dim)
    k = [split(read_bf16(source.token("k_pool", sequence, t)), source.head_dim) for t in range(length)]
    v = [split(read_bf16(source.token("v_pool", sequence, t)), source.head_dim) for t in range(length)]
    o, lse = [], []
    for head, row in enumerate(q):
        kv_head = head // (source.num_q_heads // source.num_kv_heads)
        row_o, row_lse = attend(row, [key[kv_head] for key in k], [value[kv_head] for value in v],
                                source.scale, source.window)
        o += row_o
        lse.append(row_lse)
    return o, lse


def cut(source, kept):
    lens = [length for _, length in kept]
    rows, num_pages = place_pages(lens, source.page_size)
    pool_shape = [num_pages, source.page_size, source.num_kv_heads, source.head_dim]
    o, lse = [], []
    for sequence, length in kept:
        row_o, row_lse = expect(source, sequence, length)
        o += row_o
        lse += row_lse
    heads = [len(kept), source.num_q_heads]
    table = [page for row in rows for page in row]
    return {
        "k_pool": ("BF16", pool_shape, fill_pool(source, "k_pool", kept, rows, num_pages)),
        "v_pool": ("BF16", pool_shape, fill_pool(source, "v_pool", kept, rows, num_pages)),
        "q": ("BF16", heads + [source.head_dim], b"".join(source.query(s) for s, _ in kept)),
        "expected_o": ("F32", heads + [source.head_dim], struct.pack("<%df" % len(o), *o)),
        "expected_lse": ("F32", heads, struct.pack("<%df" % len(lse), *lse)),
        "block_table": ("I32", [len(rows), len(rows[0])], struct.pack("<%di" % len(table), *table)),
        "seq_lens": ("I32", [len(lens)], struct.pack("<%di" % len(lens), *lens)),
    }


def main():
    parser = argparse.ArgumentParser(description="Cuts a small decode case out of a large one.")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("sequences", nargs="+", metavar="SEQUENCE[:LENGTH]")
    arguments = parser.parse_args()
    source, kept = Source(arguments.input), []
    for text in arguments.sequences:
        sequence, _, length = text.partition(":")
        number = int(sequence)
        if not 0 <= number < source.batch:
            parser.error(f"there is no sequence {number}; the case has {source.batch}")
        wanted = int(length) if length else source.lens[number]
        if not 0 <= wanted <= source.lens[number]:
            parser.error(f"sequence {number} has {source.lens[number]} keys, not {wanted}")
        kept.append((number, wanted))
    write_case(arguments.output, source.metadata, cut(source, kept))


if __name__ == "__main__":
    main()

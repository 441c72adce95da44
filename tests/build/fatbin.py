# SPDX-License-Identifier: Apache-2.0
"""Reads an uncompressed fatbin: the kernels (ELF cubins) in it, and their architecture."""

import struct

FATBIN_MAGIC = 0xBA55ED50
EM_CUDA = 190
STT_FUNC = 2
STO_CUDA_ENTRY = 0x10


def u16(data, at):
    return struct.unpack_from("<H", data, at)[0]


def u32(data, at):
    return struct.unpack_from("<I", data, at)[0]


def u64(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def read_entries(data):
    """Yields (kind, arch number, payload) of each entry; kind 1 is PTX, 2 an ELF."""
    magic, _, header_size, body_size = struct.unpack_from("<IHHQ", data, 0)
    if magic != FATBIN_MAGIC:
        raise ValueError("no fatbin")
    at, end = header_size, header_size + body_size
    if end > len(data):
        raise ValueError("the fatbin is truncated")
    while at < end:
        kind, _, entry_header = struct.unpack_from("<HHI", data, at)
        size = u64(data, at + 8)
        payload = data[at + entry_header : at + entry_header + size]
        yield kind, u32(data, at + 28), payload
        at += entry_header + size


def read_elf_sections(elf):
    """The (name, type, contents, link) of each section of a cubin."""
    if elf[:4] != b"\x7fELF" or u16(elf, 18) != EM_CUDA:
        raise ValueError("no cubin")
    table, size, count, names_index = u64(elf, 40), u16(elf, 58), u16(elf, 60), u16(elf, 62)
    raw = []
    for i in range(count):
        at = table + i * size
        raw.append(
            (
                u32(elf, at),
                u32(elf, at + 4),
                u64(elf, at + 24),
                u64(elf, at + 32),
                u32(elf, at + 40),
            )
        )
    names_at = raw[names_index][2]
    sections = []
    for name, kind, offset, length, link in raw:
        text = elf[names_at + name : elf.index(b"\0", names_at + name)].decode()
        # SHT_NOBITS takes no room in the file.
        sections.append((text, kind, b"" if kind == 8 else elf[offset : offset + length], link))
    return sections


def read_symbols(elf):
    """Name -> (info, other) of each symbol of a cubin."""
    sections = read_elf_sections(elf)
    symbols = {}
    for name, _, contents, link in sections:
        if name != ".symtab":
            continue
        strings = sections[link][2]
        for at in range(0, len(contents), 24):
            start = u32(contents, at)
            text = strings[start : strings.index(b"\0", start)].decode()
            symbols[text] = contents[at + 4], contents[at + 5]
    return symbols


def read_kernels(elf):
    """Names of the entry functions of a cubin."""
    return [name for name, (info, other) in read_symbols(elf).items()
            if info & 15 == STT_FUNC and other & STO_CUDA_ENTRY]

# SPDX-License-Identifier: Apache-2.0
"""Makes of the headers' comments, // before what they explain, comments that Doxygen reads.

usage: filter.py HEADER
The first block of comment lines explains the file. Another explains what follows it up to the next
blank line or comment. A type without one is explained by its file. Lines indented by two more
blanks, which are no list, are formulas and tables.
"""

import os
import re
import sys

COMMENT = re.compile(r"\s*// ?(.*)")
# Several names in one declaration.
FIELDS = re.compile(r"(\s*)((?:const )?(?:enum |struct )?\w+) (\*?\w+(?:, \*?\w+)+);")
TYPE = re.compile(r"(struct|enum|typedef)\b.*")


def escape(text):
    # Else a tag, a command, a list, emphasis across words.
    text = re.sub(r"([<\\@&#])", r"\\\1", text)
    text = re.sub(r"^([*-] )", r"\\\1", text)
    text = re.sub(r"(^| )\.\.( |$)", r"\1\.\.\2", text)
    return re.sub(r"(?<=\S) \* (?=\S)", r" \\* ", text)


def convert_block(lines):
    """Lines of one block, without their slashes -> those of a Doxygen comment."""
    in_list = in_table = False
    for text in lines:
        in_list = text.startswith("  ") and (in_list or text.lstrip().startswith("* "))
        is_table = text.startswith("  ") and not in_list
        if is_table != in_table:
            yield "/// <pre>" if is_table else "/// </pre>"
            in_table = is_table
        item = re.match(r"(\s*\* )(.*)", text) if in_list else None
        if in_table:
            yield f"/// {escape(text)}"
        elif item:
            yield f"/// {item[1]}{escape(item[2])}"
        else:
            yield f"/// {escape(text)}".rstrip()
    if in_table:
        yield "/// </pre>"


class Header:
    def __init__(self, name):
        self.out = []
        self.block = []
        # What explains the declarations to come.
        self.said = []
        self.has_file = False
        self.depth = 0
        self.at_start = True
        self.elsewhere = [f"/// See the head of attn/{name}."]

    def end_block(self):
        if self.block and not self.has_file:
            self.out += ["/// \\file", *convert_block(self.block), ""]
            self.has_file = True
        else:
            self.said = list(convert_block(self.block)) or self.said
        self.block = []

    def take_code(self, line):
        starts = self.at_start and not line.strip().startswith("}")
        said = self.said or (self.elsewhere if TYPE.match(line) and "{" in line else [])
        fields = FIELDS.fullmatch(line)
        for name in fields[3].split(", ") if fields else [None]:
            self.out += said if starts else []
            self.out.append(f"{fields[1]}{fields[2]} {name};" if name else line)
        self.depth += line.count("(") - line.count(")")
        self.at_start = self.depth == 0 and not line.endswith("\\") and (
            line.endswith((";", ",", "{", "}")) or line.startswith("#"))
        if line.endswith(("{", "}")):
            self.said = []

    def take(self, line):
        comment = COMMENT.fullmatch(line)
        if comment:
            self.block.append(comment[1])
            return
        self.end_block()
        if line.strip():
            self.take_code(line)
        else:
            self.said = []
            self.out.append(line)


def main():
    header = Header(os.path.basename(sys.argv[1]))
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file.read().splitlines():
            header.take(line)
    print("\n".join(header.out))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Every sentence in src/ is one that a test provokes. Runs the host tests and those of the program,
notes what is said, and looks for each string of the sources that reads like a sentence.

usage: test_messages.py SOURCE_ROOT CLI_TEST PROGRAM ...
CLI_TEST is tests/cli/test_cli.py, or - without the program; PROGRAM a host test.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from known import UNHEARD

# A string, a comment, a character, a format macro, blanks, anything else.
TOKEN = re.compile(r'"((?:[^"\\\n]|\\.)*)"|(//[^\n]*|/\*.*?\*/)|(\'(?:[^\'\\]|\\.)+\')|(\bPRI\w+\b)'
                   r"|(\s+)|(.)", re.S)
CONVERSION = re.compile(r"%[-+ #0]*[\d*]*(?:\.[\d*]*)?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]?|\0")
ESCAPES = {"n": "\n", "t": "\t"}
# Fewer words are parts of sentences, names, headings.
FEWEST_WORDS = 3


def read_strings(text):
    """The strings of a C source, neighbours joined; a format macro is a NUL in them."""
    joined = None
    text = re.sub(r"^\s*#.*$|_Static_assert\([^;]*\);", "", text, flags=re.M)
    for token in TOKEN.finditer(text):
        if token[1] is not None:
            joined = (joined or "") + re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[1]), token[1])
        elif token[4] and joined is not None:
            joined += "\0"
        elif not token[2] and not token[5]:
            if joined is not None:
                yield joined
            joined = None


def is_sentence(string):
    return len(re.findall(r"(?<!\S)[('%]*[A-Za-z']{2,}", CONVERSION.sub(" ", string))) >= FEWEST_WORDS


def make_pattern(string):
    """What a line of a string has become once it was printed."""
    parts = [re.escape(part) for part in CONVERSION.split(string.strip().replace("%%", "\1"))]
    return re.compile(".*?".join(parts).replace("\1", "%"))


def list_sentences(root):
    for file in sorted((root / "src").rglob("*.[ch]")):
        for string in read_strings(file.read_text(encoding="utf-8")):
            for line in filter(is_sentence, string.split("\n")):
                yield file.relative_to(root).as_posix(), line


def listen(cli_test, programs):
    """All lines that were said. A test that fails fails elsewhere, and says so there."""
    with tempfile.TemporaryDirectory() as folder:
        heard = pathlib.Path(folder, "heard")
        heard.touch()
        commands = [[program] for program in programs]
        if cli_test != "-":
            commands.append([sys.executable, "-B", cli_test])
        for command in commands:
            subprocess.run(command, env={**os.environ, "ATTN_HEARD": str(heard)}, check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = heard.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(dict.fromkeys(lines))


def check_itself():
    """Strings are found and joined, and a sentence that is not said is missed."""
    source = 'f("a is %" PRId64 ": it" // "not this one"\n  " has to be %s", g("b"));'
    assert list(read_strings(source)) == ["a is %\0: it has to be %s", "b"], list(read_strings(source))
    pattern = make_pattern("a is %\0: it has to be %s")
    assert pattern.search("x: a is 7: it has to be 8") and not pattern.search("a is 7: it has been")
    assert make_pattern("takes %.1f %% of %s").search("takes 3.0 % of it")


def main():
    check_itself()
    root, cli_test, programs = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    said = listen(cli_test, programs)
    sentences = list(list_sentences(root))
    missing = [f"known.py has {part!r}, which no sentence has" for part in UNHEARD
               if not any(part in string for _, string in sentences)]
    for file, string in sentences:
        is_known = any(part in string for part in UNHEARD)
        is_built = cli_test != "-" or not file.startswith("src/cli/")
        if is_built and not is_known and not make_pattern(string).search(said):
            missing.append(f"{file}: no test provokes: {string!r}")
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

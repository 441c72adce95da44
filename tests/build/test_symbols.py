# SPDX-License-Identifier: Apache-2.0
"""What libattn exports is what symbols.txt lists: a name that comes or goes is seen in review.

usage: test_symbols.py [--write] LIBATTN
--write writes the list instead of comparing with it.
"""

import argparse
import pathlib
import subprocess
import sys

LIST = pathlib.Path(__file__).resolve().parent / "symbols.txt"
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# What libattn exports. A name that leaves this list breaks programs that are linked already.
# Written by: python3 tests/build/test_symbols.py --write build/src/libattn.so
"""


def exported(library):
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, text=True,
                             capture_output=True).stdout
    words = [line.split() for line in listing.splitlines()]
    return {word[-1].split("@")[0] for word in words if word[-2] not in "wv"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = exported(args.library)
    if args.write:
        LIST.write_text(HEAD + "".join(f"{name}\n" for name in sorted(found)), encoding="utf-8")
        return
    lines = LIST.read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    gone, new = sorted(set(listed) - found), sorted(found - set(listed))
    if gone or new:
        sys.exit(f"no longer exported: {gone}; exported, and not in {LIST.name}: {new}. If that is "
                 f"meant: {LIST.name} says how it is written")
    if listed != sorted(listed):
        sys.exit(f"{LIST.name} is not sorted: it says how it is written")


if __name__ == "__main__":
    main()

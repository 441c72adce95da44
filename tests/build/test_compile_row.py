# SPDX-License-Identifier: Apache-2.0
"""tools/compile-row lets a good compile pass, and stops at what must not: errors, warnings, C75xx.

usage: test_compile_row.py SOURCE_ROOT
"""

import pathlib
import subprocess
import sys
import tempfile

GOOD = "ptxas info    : Used 32 registers, used 0 barriers"
# What the compiler says, its exit status, whether the row may pass.
CASES = [
    (GOOD, 0, True),
    (GOOD, 1, False),
    ("ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored", 0, False),
    ("ptxas info    : (C7509) Potential Performance Loss: wgmma serialized", 0, False),
    ("ptxas warning : Registers are spilled to local memory in function 'f'", 0, False),
    ("x.cu(3): warning #177-D: variable was declared but never referenced", 0, False),
]

# Stands in for nvcc: says its line and writes the file after -o.
NVCC = """#!/bin/sh
echo "{line}"
while [ "$1" != -o ]; do shift; done
echo code >"$2"
exit {status}
"""


def main():
    script = pathlib.Path(sys.argv[1]) / "tools" / "compile-row"
    failures = []
    for line, status, passes in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            nvcc, cubin, report = folder / "nvcc", folder / "x.cubin", folder / "x.ptxas"
            nvcc.write_text(NVCC.format(line=line, status=status))
            nvcc.chmod(0o755)
            command = [script, nvcc, folder / "x.d", cubin, report, "x.cu", "-arch=sm_90a"]
            done = subprocess.run(command, capture_output=True, text=True)
            if (done.returncode == 0) != passes or cubin.exists() != passes:
                failures.append(f"exit status {done.returncode}, cubin {cubin.exists()}: {line}")
            if passes and report.read_text() != line + "\n":
                failures.append(f"not kept: {line}")
            if not passes and line not in done.stderr:
                failures.append(f"not passed on: {line}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

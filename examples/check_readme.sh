#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check_readme.sh README PROGRAM: the first C block of README is PROGRAM, letter by letter.
sed -n '/^```c$/,/^```$/p' "$1" | sed '1d; /^```$/q' | sed '/^```$/d' | diff "$2" - && exit 0
echo "README.md shows another program than $2: copy it anew" >&2
exit 1

# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
# Shared by tools/try, tools/test and .ci/run, which source it: finds out what this machine lacks and
# installs it. Works as root and through sudo, asks nothing, reads no standard input.
#
# After `setup "$@"`: the working directory is the project's root, and PATH has the tools.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
install=yes
werror=
exec </dev/null

say() { printf '\n== %s\n' "$*"; }

fail()
{
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# The options that all the scripts know; $1 is the text of --help.
read_options()
{
    local -r help=$1
    shift
    local option
    for option; do
        case $option in
            --no-install) install=no ;;
            --werror) werror=--werror ;;
            -h | --help)
                printf '%s\n' "$help"
                exit 0
                ;;
            *)
                printf "%s: there is no option '%s'; --help lists them\n" "${0##*/}" "$option" >&2
                exit 2
                ;;
        esac
    done
}

# What is there is found out by using it, so that tools from elsewhere count, too.
has_compiler() { echo 'int main(void) { return 0; }' | "$1" -x "$2" -o /dev/null - 2>/dev/null; }

has_library() { command -v pkg-config >/dev/null && pkg-config --exists "$1"; }

has_fuzzer()
{
    command -v clang >/dev/null &&
        echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang -fsanitize=fuzzer,address,undefined -x c -o /dev/null - 2>/dev/null
}

has_venv() { python3 -c 'import ensurepip, venv' 2>/dev/null; }

# $1: try or test. Prints Debian's names of what is missing, one a line.
list_missing()
{
    has_compiler cc c || echo build-essential
    command -v ninja >/dev/null || echo ninja-build
    command -v pkg-config >/dev/null || echo pkg-config
    command -v python3 >/dev/null || echo python3
    command -v meson >/dev/null || echo meson
    has_library jansson || echo libjansson-dev
    has_library liburing || echo liburing-dev
    [ "$1" = test ] || return 0
    has_compiler c++ c++ || echo build-essential
    has_library criterion || echo libcriterion-dev
    command -v valgrind >/dev/null || echo valgrind
    command -v cmake >/dev/null || echo cmake
    command -v strace >/dev/null || echo strace
    command -v doxygen >/dev/null || echo doxygen
    command -v clang >/dev/null || echo clang
    command -v clang-format >/dev/null || echo clang-format
    has_nvcc || [ -x /usr/local/cuda/bin/nvcc ] || [ -n "$(find_venv_nvcc)" ] || has_venv ||
        echo python3-venv
}

as_root()
{
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

# Installs the Debian packages named, or says how to.
install_packages()
{
    local sudo=
    [ "$(id -u)" = 0 ] || sudo='sudo '
    local -r commands="${sudo}apt-get update && ${sudo}apt-get install --no-install-recommends $*"
    [ $install = yes ] || fail "missing here: $*. To install them: $commands"
    command -v apt-get >/dev/null ||
        fail "missing here, and there is no apt-get to install them with: $* (Debian's names)"
    as_root true 2>/dev/null ||
        fail "missing here: $*. This user may not install packages; ask for: $commands"
    say "Installing $*"
    local -r quiet=(-qq -o=Dpkg::Use-Pty=0 -o=DPkg::Lock::Timeout=120)
    as_root apt-get "${quiet[@]}" update ||
        fail "the package lists can't be fetched; is this machine on a network?"
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null ||
        fail "apt-get could not install $*; its own words are above"
}

# Installs Python packages into .venv, or says how to. $1: what they are, for people.
install_python()
{
    local -r what=$1
    shift
    local -r commands="python3 -m venv '$venv' && '$venv/bin/pip' install ${*@Q}"
    has_venv || install_packages python3-venv
    [ $install = yes ] || fail "missing here: $what. To install it: $commands"
    say "Installing $what into .venv"
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv" ||
        fail "python3 could not make the virtual environment $venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $what; is this machine on a network?"
}

# True if dotted version $1 is at least $2.
at_least() { [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Debian 12 has a Meson that is new enough; Ubuntu 22.04 has not.
setup_meson()
{
    at_least "$(meson --version)" 1.0.0 || install_python 'Meson 1.0 or newer' 'meson>=1.0'
    hash -r
}

# Where the compiler from the Python packages lies; nothing if it is not there.
find_venv_nvcc()
{
    local nvcc
    for nvcc in "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
        [ ! -x "$nvcc" ] || printf '%s\n' "$nvcc"
    done
}

# True if an nvcc that is new enough is in PATH.
has_nvcc()
{
    command -v nvcc >/dev/null || return 1
    local -r version=$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    at_least "$version" 13.0
}

# Kernels need nvcc; the C compiler alone is enough for the rest.
setup_nvcc()
{
    has_nvcc || PATH=$PATH:/usr/local/cuda/bin
    has_nvcc || install_nvcc
    has_nvcc || fail "nvcc is installed, but does not run"
}

install_nvcc()
{
    local nvcc
    nvcc=$(find_venv_nvcc)
    if [ -z "$nvcc" ]; then
        install_python 'the CUDA compiler 13.0' 'nvidia-cuda-nvcc==13.0.*' \
            'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*'
        nvcc=$(find_venv_nvcc)
    fi
    PATH=${nvcc%/*}:$PATH
}

# The fuzz targets are skipped without libFuzzer, so a package that can't be had is no failure.
setup_fuzzer()
{
    has_fuzzer && return
    local -r major=$(clang -dumpversion | cut -d. -f1)
    (install_packages "libclang-rt-$major-dev") || true
    has_fuzzer || echo "clang has no libFuzzer here: the fuzz targets will be skipped"
}

# The target whose chip is in this machine; nothing without an NVIDIA GPU, or for a chip without one.
find_target()
{
    local capability conf
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) ||
        return 0
    for conf in targets/*/target.conf; do
        grep -Eq "^compute_capability *= *'?${capability//./\\.}'? *(#.*)?$" "$conf" || continue
        basename "$(dirname "$conf")"
    done
}

# $1: try or test.
setup()
{
    PATH=$venv/bin:$PATH
    local missing
    missing=$(list_missing "$1" | sort -u | tr '\n' ' ')
    # shellcheck disable=SC2086 # one word a package
    [ -z "$missing" ] || install_packages $missing
    hash -r
    setup_meson
}

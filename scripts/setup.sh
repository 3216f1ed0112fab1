#!/usr/bin/env bash
# Makes .venv in the project's root with everything that setup.cfg asks for, at the versions of
# constraints.txt. Quick when nothing changed. The other scripts call it.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/setup.sh [operator] [cuda12|cuda13]

  operator         leave out fairseq: the operator and its tests, with Python 3.11 or newer
  cuda12, cuda13   also install CuPy for that CUDA version, which must be PyTorch's. Without it, CuPy
                   is installed where there is a GPU that PyTorch can use

The Python is $PYTHON, or the first of python3.11, python3.12, python3.13, python3 that is 3.11 to
3.13, on the PATH or under pyenv. With 3.13, and on machines other than Linux on x86-64, fairseq is
compiled, which takes a C++ compiler and some 4 minutes. If .venv was not made by this script, has
another Python, or is a link to that of another folder, it is left alone and the script stops. If it
was moved, or its Python is gone, it is made again.
USAGE
}

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)

fairseq=fairseq, cuda='' pythons=(python3.11 python3.12 python3.13 python3) range='3.11 to 3.13'
for argument in "$@"; do
    case "$argument" in
        operator) fairseq='' range='3.11 or newer' pythons+=(python3.14) ;;
        cuda12 | cuda13) cuda=,$argument ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done
[[ -z "${PYTHON-}" ]] || pythons=("$PYTHON")

# Ends the script, after the CuPy of PyTorch's CUDA version where there is a GPU for it.
finish() { # the script's arguments
    local for_gpu=''
    if [[ -z "$cuda" ]] && command -v nvidia-smi >/dev/null; then
        for_gpu=$(.venv/bin/python -c 'import torch
version = (torch.version.cuda or "").split(".")[0]
print("cuda" + version if torch.cuda.is_available() and version in ("12", "13") else "")')
    fi
    [[ -n "$for_gpu" ]] || exit 0
    exec 9>&- # which the next call locks
    scripts/setup.sh "$@" "$for_gpu" || {
        printf '%s\n' "$wanted" >"$stamp"
        echo "setup.sh: could not install CuPy for $for_gpu: the operator has no kernels for GPUs" >&2
    }
    exit 0
}

version_of() { # PYTHON: such as 3.12, or none
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none
}
is_supported() { # VERSION
    [[ "$1" =~ ^3\.1[1-3]$ ]] || [[ -z "$fairseq" && "$1" =~ ^3\.(1[4-9]|[2-9][0-9])$ ]]
}
find_python() {
    local name candidate
    for name in "${pythons[@]}"; do
        for candidate in "$name" "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/*/bin/"$name"; do
            # pyenv's python3.13 on the PATH may be a script that only says which to choose.
            if is_supported "$(version_of "$candidate")"; then
                command -v "$candidate"
                return
            fi
        done
    done
    fail "expected Python $range, found ${PYTHON:-python3}:" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo none); name another as" \
        "PYTHON=/path/to/it${fairseq:+, or install the operator alone: scripts/setup.sh operator}"
}

# One at a time: a second one waits, and finds the work of the first done.
if command -v flock >/dev/null; then
    { exec 9<>setup.cfg; } 2>/dev/null || exec 9<setup.cfg # NFS locks what is open for writing
    flock 9 || echo "setup.sh: this file system has no locks: run one command at a time" >&2
fi

# Says what was installed, and from what; "unfinished" from the moment that .venv is made.
stamp=.venv/installed
instead='remove it (rm -rf .venv) or give it another name (mv .venv old)'
if [[ -e .venv && ! -f "$stamp" ]]; then
    fail "expected a .venv that scripts/setup.sh made, got another; $instead"
fi
version=$(version_of .venv/bin/python)
if [[ -f "$stamp" ]]; then
    there=$(sed -n 2p "$stamp")
    if [[ "${there:-$root }" != "$root "* ]]; then # programs in it name the folder that it was in
        [[ ! -L .venv ]] || fail "expected the .venv of this folder, got a link to another; $instead"
        version=none
    elif [[ "$(head -1 "$stamp")" == unfinished* ]] && ! .venv/bin/python -m pip -V &>/dev/null; then
        version=none
    fi
fi
python=.venv/bin/python
[[ "$version" != none && -z "${PYTHON-}" ]] || python=$(find_python)
expected=$(version_of "$python")
if [[ "$version" != none ]] && { [[ "$version" != "$expected" ]] || ! is_supported "$version"; }; then
    [[ -n "${PYTHON-}" ]] || expected=$range
    fail "expected .venv to have Python $expected, got $version; $instead"
fi
if [[ -z "$cuda" && -f "$stamp" ]]; then # keep a CuPy that an earlier call asked for
    cuda=$(head -1 "$stamp" | grep -o ',cuda1[23]' || true)
fi
extras=${fairseq}test$cuda
wanted="$extras
$root $(cat setup.cfg pyproject.toml constraints.txt scripts/fairseq.txt scripts/setup.sh | cksum)"
[[ "$version" == none || "$(cat "$stamp")" != "$wanted" ]] || finish "$@"

plan="Python $expected: the operator${fairseq:+ and the plugin for fairseq} in 1 to 5 minutes"
if [[ -n "$fairseq" && "$(uname -sm) $expected" != 'Linux x86_64 3.1'[12] ]]; then
    plan+=", and some 4 more the first time, to compile fairseq"
    command -v c++ g++ clang++ >/dev/null ||
        fail "expected a C++ compiler, which builds fairseq for Python $expected, found none; on" \
            "Debian: apt install g++ python3-dev. On Linux x86_64, Python 3.11 and 3.12 need none"
fi
echo "setup.sh: $plan" >&2

mkdir -p .venv || fail "could not write to $root/.venv"
printf '%s\n' "unfinished $cuda" "$root " >"$stamp"
if [[ "$version" == none ]]; then
    rm -rf .venv/bin .venv/include .venv/lib .venv/lib64 .venv/pyvenv.cfg
    "$python" -m venv .venv ||
        fail "could not make .venv with $python; on Debian: apt install python3-venv"
fi
pip() {
    echo "setup.sh: pip $1: $step" >&2
    .venv/bin/python -m pip --disable-pip-version-check "$@" >&2
}
if [[ -n "$fairseq" ]]; then
    step='PyTorch, and what fairseq is built with'
    pip install --constraint constraints.txt torch numpy cython setuptools wheel
    step='fairseq' # it has to see the PyTorch that it will run with, so is not built in isolation
    pip install --no-deps --no-build-isolation --require-hashes --requirement scripts/fairseq.txt
fi
if [[ -n "$cuda" ]]; then # two CuPys would overwrite each other
    step='the CuPy of another CUDA version'
    pip uninstall --yes "cupy-cuda$((25 - ${cuda#,cuda}))x"
fi
step='the project, and everything else'
pip install --constraint constraints.txt --editable ".[$extras]"
step='whether all of it fits together'
pip check || fail ".venv holds packages that do not fit together; remove .venv and run this again"
printf '%s\n' "$wanted" >"$stamp"
echo "setup.sh: ready" >&2
finish "$@"

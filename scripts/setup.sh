#!/usr/bin/env bash
# Makes .venv in the project's root with everything that setup.cfg asks for, at the versions of
# constraints.txt. Quick when nothing changed. scripts/quickstart.sh and scripts/test.sh call it.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/setup.sh [cuda12|cuda13]

  cuda12, cuda13   also install CuPy for that CUDA version, which must be PyTorch's. Without it, CuPy
                   is installed where there is a GPU that PyTorch can use

A .venv that has no pip or another Python is deleted and made again.

The Python is $PYTHON, or the first of python3.11, python3.12, python3 that is 3.11 or 3.12.
USAGE
}

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=fairseq,test
case "${1-}" in
    "") ;;
    cuda12 | cuda13) extras+=",$1" ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
esac

# Ends the script, after the CuPy of PyTorch's CUDA version where there is a GPU for it.
finish() {
    local cuda=''
    if [[ "$extras" != *cuda* ]] && command -v nvidia-smi >/dev/null; then
        cuda=$(.venv/bin/python -c 'import torch
version = (torch.version.cuda or "").split(".")[0]
print("cuda" + version if torch.cuda.is_available() and version in ("12", "13") else "")')
    fi
    [[ -z "$cuda" ]] || exec scripts/setup.sh "$cuda"
    exit 0
}

supported='import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c "$supported" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "expected Python 3.11 or 3.12, found ${PYTHON:-python3}:" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo none); name another as PYTHON=/path/to/it"
}

# What was installed, from what: the same answer again means that there is nothing to do.
stamp=.venv/installed
if [[ -z "${1-}" && -f "$stamp" ]]; then
    extras=$(head -1 "$stamp") # keep a CuPy that an earlier call asked for
fi
wanted="$extras
$PWD $(cat setup.cfg pyproject.toml constraints.txt scripts/setup.sh | cksum)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && .venv/bin/python -c "$supported"; then
    finish
fi

python=$(find_python)
if ! .venv/bin/python -c "import pip; $supported" >/dev/null 2>&1; then
    rm -rf .venv
    "$python" -m venv .venv || fail "could not make .venv with $python; on Debian: apt install python3-venv"
fi
rm -f "$stamp"
echo "setup.sh: installing into .venv (a few minutes the first time)" >&2
pip() {
    .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"
}
# This distribution names no author: only the two wheels whose code was read may come in.
pip install --no-deps --require-hashes --requirement /dev/stdin <<'WHEELS'
ve-fairseq==0.12.3; sys_platform == "linux" and platform_machine == "x86_64" \
    --hash=sha256:5e84da7a92db08aae7f9cc3d155d4574d915fe1959dc1e041d514b6ef7bc000a \
    --hash=sha256:9ba18767af12978b4700ac7d9914e6abfe365a50ce17faa6a79e8f07f4129be5
WHEELS
if [[ -n "${1-}" ]]; then # two CuPys would overwrite each other
    pip uninstall --yes cupy-cuda12x cupy-cuda13x 2>/dev/null
fi
pip install --constraint constraints.txt --editable ".[$extras]"
pip check ||
    fail ".venv holds packages that do not fit together; remove .venv and run this again"
if [[ "$extras" =~ cuda([0-9]+) ]]; then
    built_for=$(.venv/bin/python -c 'import torch; print((torch.version.cuda or "no").split(".")[0])')
    [[ "$built_for" == "${BASH_REMATCH[1]}" ]] ||
        echo "setup.sh: this PyTorch is built for CUDA $built_for, so ${BASH_REMATCH[0]} will not" \
            "work with it: choose the same version for both" >&2
fi
printf '%s\n' "$wanted" >"$stamp"
echo "setup.sh: ready" >&2
finish

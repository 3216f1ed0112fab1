#!/usr/bin/env bash
# What the kernels do on this GPU, in one page; scripts/gpu_report.sh --help says how. Installs
# nothing: the Python is $PYTHON, or that of .venv, or python3.
set -euo pipefail

scripts=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$scripts/../.venv/bin/python}
[[ -n "${PYTHON-}" ]] || command -v "$python" >/dev/null || python=python3
PYTHONPATH=$scripts/..${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$scripts/run.py" benchmarks.gpu_report "$@"

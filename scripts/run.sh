#!/usr/bin/env bash
# Sets up .venv where needed, and runs a module of the pipeline in it: run.sh recipes.train --help
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ " $* " =~ ' '(-h|--help)' ' && -x $scripts/../.venv/bin/python ]] || "$scripts/setup.sh" >&2
export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated
exec "$scripts/../.venv/bin/python" "$scripts/run.py" "$@"

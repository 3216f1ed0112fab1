#!/usr/bin/env bash
# Sets up .venv where needed, and runs a module of the pipeline in it: run.sh recipes.train --help
set -euo pipefail

scripts=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! " $* " =~ ' '(-h|--help)' ' ]] || ! grep -qs ^fairseq "$scripts/../.venv/installed"; then
    "$scripts/setup.sh" >&2
fi
export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated
exec "$scripts/../.venv/bin/python" "$scripts/run.py" "$@"

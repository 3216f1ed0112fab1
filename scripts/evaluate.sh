#!/usr/bin/env bash
# Scores a row of the papers' tables; scripts/evaluate.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$scripts/setup.sh" >&2
export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated
exec "$scripts/../.venv/bin/python" "$scripts/evaluate.py" "$@"

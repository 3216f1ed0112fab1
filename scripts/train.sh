#!/usr/bin/env bash
# Trains a row of the papers' tables; scripts/train.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$scripts/setup.sh" >&2
exec "$scripts/../.venv/bin/python" "$scripts/train.py" "$@"

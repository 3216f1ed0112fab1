#!/usr/bin/env bash
# Tests with each supported Python, torch and NumPy; scripts/test_matrix.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$scripts/setup.sh" >&2
exec "$scripts/../.venv/bin/python" "$scripts/matrix.py" "$@"

#!/usr/bin/env bash
# The ablation of the paper's Table 7; scripts/ablation.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$scripts/setup.sh" >&2
exec "$scripts/../.venv/bin/python" "$scripts/ablation.py" "$@"

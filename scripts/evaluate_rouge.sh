#!/usr/bin/env bash
# ROUGE of summaries; scripts/evaluate_rouge.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$scripts/setup.sh" >&2
exec "$scripts/../.venv/bin/python" "$scripts/score_rouge.py" "$@"

#!/usr/bin/env bash
# Sets up .venv where needed, and runs a module of the pipeline in it: run.sh recipes.train --help
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case " $* " in
    *' -h '* | *' --help '*) [[ -x $scripts/../.venv/bin/python ]] || "$scripts/setup.sh" >&2 ;;
    *) "$scripts/setup.sh" >&2 ;;
esac
export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated
exec "$scripts/../.venv/bin/python" "$scripts/run.py" "$@"

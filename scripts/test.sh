#!/usr/bin/env bash
# Lint and every test. Arguments go to pytest: scripts/test.sh -k oracle -x
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ "${1-}" == -h || "${1-}" == --help ]]; then
    echo "usage: scripts/test.sh [--fairseq-tests DIR] [pytest arguments]; see docs/development.md"
    exit 0
fi

scripts/setup.sh
# shellcheck disable=SC1091
source .venv/bin/activate

if [[ "${1-}" == --fairseq-tests ]]; then
    suite=$PWD/tests/fairseq_suite.py
    cd "$OLDPWD" # to which DIR is relative
    exec python "$suite" "${2-}" -n 2 "${@:3}"
fi
ruff check .
ruff format --check .
shellcheck scripts/*.sh .ci/run
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two processes share the cores
python -m pytest -n 2 --dist loadfile "$@"

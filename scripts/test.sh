#!/usr/bin/env bash
# Lint and every test. Arguments go to pytest: scripts/test.sh -k oracle -x
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ "${1-}" == -h || "${1-}" == --help ]]; then
    echo "usage: scripts/test.sh [pytest arguments]"
    echo "Sets up .venv where needed, then runs the linters and the tests; tests that need a GPU"
    echo "are skipped where there is none. Leave out the slow ones with -m 'not slow'. Two"
    echo "processes share the files of tests; -n 0 runs all in one, as --pdb needs it."
    exit 0
fi

scripts/setup.sh
# shellcheck disable=SC1091
source .venv/bin/activate

ruff check .
ruff format --check .
shellcheck scripts/*.sh .ci/run
python -m pytest -n 2 --dist loadfile "$@"

#!/usr/bin/env bash
# Lint and every test. Arguments go to pytest: scripts/test.sh -k oracle -x
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ "${1-}" == -h || "${1-}" == --help ]]; then
    echo "usage: scripts/test.sh [--fairseq-tests DIR] [pytest arguments]"
    echo "Sets up .venv where needed, then runs the linters and the tests; tests that need a GPU"
    echo "are skipped where there is none. Leave out the slow ones with -m 'not slow'. Two"
    echo "processes share the files of tests; -n 0 runs all in one, as --pdb needs it."
    echo "--fairseq-tests runs, instead, a list of fairseq's own tests with the plugin loaded, from"
    echo "the source tree of fairseq in DIR."
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
python -m pytest -n 2 --dist loadfile "$@"

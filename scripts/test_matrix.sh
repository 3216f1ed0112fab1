#!/usr/bin/env bash
# Tests with each supported Python, PyTorch and NumPy, by tox, whose options it takes: -l lists the
# combinations, -e py313-torch213-numpy24 runs one, `-- tests/ops -x` runs other tests.
set -euo pipefail

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh >&2
PATH+=$(printf ':%s' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin) # which pyenv may not have chosen
exec .venv/bin/tox "$@"

#!/usr/bin/env bash
# Scores a row of the papers' tables; scripts/evaluate.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" recipes.evaluate "$@"

#!/usr/bin/env bash
# Trains a row of the papers' tables; scripts/train.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" recipes.train "$@"

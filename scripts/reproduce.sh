#!/usr/bin/env bash
# A row of the papers' tables in one command; scripts/reproduce.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" recipes.reproduce "$@"

#!/usr/bin/env bash
# Trains TaLK and its peers on the same text and compares them; scripts/compare.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" compare.sweep "$@"

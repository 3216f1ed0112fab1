#!/usr/bin/env bash
# Compares units on synthetic tasks, each for one mechanism; scripts/synthetic.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" compare.synthetic "$@"

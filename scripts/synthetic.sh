#!/usr/bin/env bash
# Synthetic tasks that one mechanism solves or does not; scripts/synthetic.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" compare.synthetic "$@"

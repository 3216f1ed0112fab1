#!/usr/bin/env bash
# ROUGE of summaries; scripts/evaluate_rouge.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" recipes.rouge "$@"

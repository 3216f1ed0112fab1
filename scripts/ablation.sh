#!/usr/bin/env bash
# The ablation of the paper's Table 7; scripts/ablation.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" recipes.ablation "$@"

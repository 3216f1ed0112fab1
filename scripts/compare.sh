#!/usr/bin/env bash
# Trains TaLK and its peers on the same text and compares them; scripts/compare.sh --help says how.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Threads that spin while they wait starve each other as soon as anything else runs; and memory is
# kept instead of being handed back to the system after each tensor: a tenth faster on a CPU.
export OMP_WAIT_POLICY=PASSIVE
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=64000000
exec "$scripts/run.sh" compare.comparison "$@"

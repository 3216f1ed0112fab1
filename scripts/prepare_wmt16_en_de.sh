#!/usr/bin/env bash
# WMT 2016, English to German: from its archives to a folder that fairseq trains on.
set -euo pipefail
# shellcheck source=scripts/prepare_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/prepare_wmt16_en_de.sh --data PATH|URL … [options]
       scripts/prepare_wmt16_en_de.sh --download [options]

Prepares WMT 2016 En-De out of Europarl v7, Common Crawl and News Commentary v11 or v12, with
newstest2013 to validate and newstest2014 to test: Moses tokens, a BPE of 32K pieces of both
languages, 1 to 250 pieces a sentence and at most 1.5 times as many on one side as on the other.
The archives:

  training-parallel-europarl-v7.tgz  training-parallel-commoncrawl.tgz
  training-parallel-nc-v11.tgz or -v12.tgz  dev.tgz  test-full.tgz

  published pairs: 4,562,102 before cleaning, about 3,976,000 after it, 3,000 and 3,003

The papers trained on a set of 4.5M pairs that was cleaned less (80 tokens, ratio 9) and that its
host no longer serves; --longest and --ratio set other limits. Takes about 10 GB while it runs.
USAGE
}

prepare wmt16_en_de "$@"

#!/usr/bin/env bash
# WMT 2014, English to French: from its archives to a folder that fairseq trains on.
set -euo pipefail
# shellcheck source=scripts/prepare_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/prepare_wmt14_en_fr.sh --data PATH|URL … [options]
       scripts/prepare_wmt14_en_fr.sh --download [options]

Prepares WMT 2014 En-Fr out of Europarl v7, Common Crawl, UN, News Commentary v9 and Giga-FrEn, with
newstest2012 and 2013 to validate and newstest2014 to test: punctuation normalised, Moses tokens
with dashes split, a BPE of 40K pieces of both languages, 1 to 250 pieces a sentence and at most
1.5 times as many on one side as on the other. The archives:

  training-parallel-europarl-v7.tgz  training-parallel-commoncrawl.tgz
  training-parallel-un.tgz  training-parallel-nc-v9.tgz  training-giga-fren.tar
  dev.tgz  test-full.tgz

  published pairs: 40.8M before cleaning, about 35.8M after it, 6,003 and 3,003

Takes about 60 GB while it runs, and hours: tokenising 4,000 sentences a second on a processor.
USAGE
}

prepare wmt14_en_fr "$@"

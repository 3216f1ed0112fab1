#!/usr/bin/env bash
# IWSLT 2014, German to English: from its archive to a folder that fairseq trains on.
set -euo pipefail
# shellcheck source=scripts/prepare_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/prepare_iwslt14_de_en.sh --data PATH|URL … [options]
       scripts/prepare_iwslt14_de_en.sh --download [options]

Prepares IWSLT 2014 De-En out of de-en.tgz, or of the folder in it: Moses tokens, 1 to 175 a
sentence and at most 1.5 times as many on one side as on the other, lower-cased; every 23rd pair
validates; dev2010, dev2012, tst2010, tst2011 and tst2012 are the test set; a BPE of both languages
and a dictionary each.

  published pairs: 160,239 to train on, 7,283 to validate, 6,750 to test

The original host, wit3.fbk.eu, is gone; --download takes the archive from
https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz
USAGE
}

prepare iwslt14_de_en "$@"

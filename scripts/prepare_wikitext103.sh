#!/usr/bin/env bash
# WikiText-103: from its archive to a folder that fairseq trains on.
set -euo pipefail
# shellcheck source=scripts/prepare_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/prepare_wikitext103.sh --data PATH|URL … [options]
       scripts/prepare_wikitext103.sh --download [options]

Prepares WikiText-103 out of wikitext-103-v1.zip, or of the folder in it with the files
wiki.{train,valid,test}.tokens: every word as it stands.

  published lines: 1,801,350, 3,760 and 4,358; words with ends of line: 103,227,021, 217,646 and
  245,569

The original host, research.metamind.io on Amazon S3, is gone; --download takes the archive from
https://wikitext.smerity.com/wikitext-103-v1.zip
USAGE
}

prepare wikitext103 "$@"

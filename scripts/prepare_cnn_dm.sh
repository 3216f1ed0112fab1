#!/usr/bin/env bash
# CNN-DailyMail summaries: from its archives to a folder that fairseq trains on.
set -euo pipefail
# shellcheck source=scripts/prepare_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/prepare_cnn_dm.sh --data PATH|URL … [options]
       scripts/prepare_cnn_dm.sh --download [options]

Prepares CNN-DM, with one dictionary of a BPE of 30K pieces, out of either

  cnn_stories.tgz and dailymail_stories.tgz, or the folders of their *.story files, with the lists
  all_train.txt, all_val.txt and all_test.txt: what follows @highlight is the summary; Moses tokens
  {train,val,test}.txt.{src,tgt}, or their archive cnndm.tar.gz: tokenised already

  published pairs: 287,227 to train on (114 without an article fall out), 13,368 and 11,490

--download takes the latter. The stories are linked from https://cs.nyu.edu/~kcho/DMQA, the lists
are in url_lists of https://github.com/abisee/cnn-dailymail. Articles are not cut: the task does it.
USAGE
}

prepare cnn_dm "$@"

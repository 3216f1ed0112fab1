#!/usr/bin/env bash
# Prepares WMT 2014, English to French; scripts/prepare_wmt14_en_fr.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" data.prepare wmt14_en_fr "$@"

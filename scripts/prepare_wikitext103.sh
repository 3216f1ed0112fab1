#!/usr/bin/env bash
# Prepares WikiText-103; scripts/prepare_wikitext103.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" data.prepare wikitext103 "$@"

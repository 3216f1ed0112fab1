#!/usr/bin/env bash
# Prepares WMT 2016, English to German; scripts/prepare_wmt16_en_de.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" data.prepare wmt16_en_de "$@"

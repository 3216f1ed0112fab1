#!/usr/bin/env bash
# Prepares IWSLT 2014, German to English; scripts/prepare_iwslt14_de_en.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" data.prepare iwslt14_de_en "$@"

#!/usr/bin/env bash
# Compares two small language models of English verses, TaLK and a Transformer; see --help.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" quickstart.language_model "$@"

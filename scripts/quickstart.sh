#!/usr/bin/env bash
# Learns to translate Spanish verses into English, and scores what it learnt; see --help.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" quickstart.translation "$@"

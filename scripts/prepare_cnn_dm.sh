#!/usr/bin/env bash
# Prepares CNN and Daily Mail; scripts/prepare_cnn_dm.sh --help says how.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" data.prepare cnn_dm "$@"

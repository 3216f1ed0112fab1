# shellcheck shell=bash
# What the prepare scripts share: the options that all of them take, and set-up. Sourced; each of
# them has its own `usage`.
set -euo pipefail

common_options() {
    cat <<'USAGE'

The folder appears once all of it is there. Run again, a preparation that was stopped goes on with
the stage it was in. Line counts that are not the published ones are an error, with both numbers.

  --data PATH|URL      a folder, an archive or the address of one; may be given several times
  --download           get what --data lacks from its published hosts (with curl)
  --downloads DIR      where downloads are kept, each under its address, for the next time
                       (default: data-bin/downloads, in the project's root)
  --output DIR         the folder to write (default: data-bin/BENCHMARK, in the project's root)
  --workers N          processes (default: the processors there are)
  --other-counts       the data is other than the published on purpose: only report line counts
  --restart            throw away what an earlier run left, and prepare it again
  -h, --help           show this
USAGE
}

subword_options() {
    cat <<'USAGE'

  --vocabulary N       words of a dictionary, for other data than the published
  --longest N, --ratio X   clean the training data by other limits
  --pretokenized DIR   in place of --data: {train,valid,test}.LANG, tokenised and cut by
                       subword-nmt, are taken as they are; train and valid may be missing where
                       the dictionaries are given
  --dict FILE          with it: the dictionary of both languages (else DIR/dict.LANG.txt, and
                       else new ones)
USAGE
}

prepare() { # BENCHMARK ARGUMENT…
    local root argument
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    for argument in "${@:2}"; do
        if [[ "$argument" == -h || "$argument" == --help ]]; then
            usage
            common_options
            [[ "$1" == wikitext103 ]] || subword_options
            exit 0
        fi
    done
    exec "$root/scripts/run.sh" data.prepare "$@"
}

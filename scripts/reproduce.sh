#!/usr/bin/env bash
# A row of the papers' tables in one command: prepare, train, average, evaluate.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scripts=$root/scripts

usage() {
    cat <<'USAGE'
usage: scripts/reproduce.sh NAME --data PATH [options] [GROUP.KEY=VALUE …]

Prepares the data of configs/NAME.yaml, trains the model, averages its last checkpoints, scores the
test set and appends the result to results/NAME.json, which scripts/results_table.py prints beside
the papers' scores. Stopped and run again, it goes on where it was; what is done is not repeated.

  --data PATH|URL      the published archive or its folder, as for scripts/prepare_BENCHMARK.sh; may
                       be given several times, and not at all once the data is prepared
  --prepare 'OPTIONS'  more options of scripts/prepare_BENCHMARK.sh, such as '--workers 8' or
                       --download
  --tune               choose the length penalty and how many checkpoints to average on the
                       validation set
  --devices N, --precision fp32|fp16|bf16, --cpu   as for scripts/train.sh
  --data-bin DIR       where the prepared data is (default: data-bin/BENCHMARK)
  --save-dir DIR       where the checkpoints are (default: checkpoints/NAME)
  --results FILE       where the result goes (default: results/NAME.json)
  GROUP.KEY=VALUE      options that replace the config's; the result says so
  -h, --help           show this
USAGE
}

fail() { # for input that cannot be used
    echo "reproduce.sh: $*" >&2
    exit 2
}

name='' data=() prepare=() overrides=() precision=() devices=() cpu=() tune=()
data_bin='' save_dir='' results=''
while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --cpu) cpu=(--cpu) ;;
        --tune) tune=(--tune) ;;
        --data | --prepare | --devices | --precision | --data-bin | --save-dir | --results)
            (($# > 1)) && [[ -n "$2" ]] || fail "$1: expected a value (see --help)"
            case "$1" in
                --data) data+=(--data "$2") ;;
                --prepare) read -ra prepare <<<"$2" ;;
                --devices) devices=(--devices "$2") ;;
                --precision) precision=(--precision "$2") ;;
                --data-bin) data_bin=$2 ;;
                --save-dir) save_dir=$2 ;;
                --results) results=$2 ;;
            esac
            shift
            ;;
        -*) fail "$1: no such option (see --help)" ;;
        *=*) overrides+=("$1") ;;
        *)
            [[ -z "$name" ]] || fail "NAME: expected one, got $name and $1"
            name=${1#configs/}
            name=${name%.yaml}
            ;;
    esac
    shift
done
[[ -n "$name" ]] || fail "NAME: expected a config such as iwslt14_de_en/talkconv (see --help)"

# What train.sh would refuse is refused here, before hours of preparing.
"$scripts/train.sh" "$name" --dry-run "${precision[@]}" "${devices[@]}" "${cpu[@]}" \
    "${overrides[@]}" >/dev/null

benchmark=${name%%/*}
data_bin=${data_bin:-$root/data-bin/$benchmark}
save_dir=${save_dir:-$root/checkpoints/$name}
results=${results:-$root/results/$name.json}
prepare_script=$scripts/prepare_$benchmark.sh
if [[ ! -e "$data_bin/prepared.json" ]]; then
    [[ -e "$prepare_script" ]] ||
        fail "NAME: expected data in $data_bin, got none; there is no script for $benchmark"
    ((${#data[@]} + ${#prepare[@]})) ||
        fail "--data: expected the published data (scripts/${prepare_script##*/} --help), got none"
fi
mkdir -p "$save_dir"
exec 9>>"$save_dir/lock"
! command -v flock >/dev/null || flock -n 9 || fail "another run is in $save_dir; wait for it"

# Runs a stage unless it has already ended well with the same command. What follows -- only says
# where it runs: what was done elsewhere is done.
once() { # STAGE COMMAND… -- [OPTION…]
    local done=$save_dir/$1.done command=()
    echo -n "== $1"
    while shift && [[ "$1" != -- ]]; do command+=("$1"); done
    shift
    if [[ "$(cat "$done" 2>/dev/null)" == "${command[*]}" ]]; then
        echo ": done before"
        return
    fi
    echo
    rm -f "$done" "$save_dir/evaluate.done" # what is trained anew is to be scored anew
    "${command[@]}" "$@"
    printf '%s\n' "${command[*]}" >"$done.partial"
    mv "$done.partial" "$done"
}

if ((${#data[@]} + ${#prepare[@]})); then
    echo "== prepare"
    "$prepare_script" --output "$data_bin" "${data[@]}" "${prepare[@]}"
fi
once train "$scripts/train.sh" "$name" --data "$data_bin" --save-dir "$save_dir" \
    "${precision[@]}" "${overrides[@]}" -- "${devices[@]}" "${cpu[@]}"
once evaluate "$scripts/evaluate.sh" "$name" "$save_dir" --data "$data_bin" --results "$results" \
    "${tune[@]}" "${overrides[@]}" -- "${cpu[@]}"
echo "== the result is in $results"

# shellcheck shell=bash
# What the quick starts share: options, set-up, the folder of a run, progress bars, and training by
# the clock. Sourced, it goes to the project's root; each of them has its own `usage`.
# shellcheck disable=SC2034 # some variables are for the script that sources this
set -euo pipefail

from_here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { # for input that cannot be used
    echo "${0##*/}: $*" >&2
    exit 2
}

# --- What is asked for ---

minutes=9 updates='' cpu=false restart=false data='' out=''

# Sets the variable of each option that is given (source_lang for --source-lang), and `length` and
# `seconds`, what is asked for in words and in seconds.
parse_options() { # "OPTIONS WITH A VALUE" ARGUMENT…
    local with_value=" $1 "
    shift
    while (($#)); do
        case "$1" in
            -h | --help) usage && exit 0 ;;
            --cpu) cpu=true ;;
            --restart) restart=true ;;
            *)
                [[ "$1" == --* && "$with_value" == *" $1 "* ]] ||
                    fail "$1: no such option (see --help)"
                (($# > 1)) && [[ -n "$2" ]] || fail "$1: expected a value (see --help)"
                local name=${1#--}
                printf -v "${name//-/_}" %s "$2"
                shift
                ;;
        esac
        shift
    done
    [[ "$minutes" =~ ^([2-9]|[1-9][0-9]{1,4})(\.[0-9]+)?$ ]] ||
        fail "--minutes: expected a number of at least 2, got $minutes"
    [[ -z "$updates" || "$updates" =~ ^[1-9][0-9]{0,8}$ ]] ||
        fail "--updates: expected a whole number of at least 1, got $updates"
    seconds=$(awk -v minutes="$minutes" 'BEGIN { printf "%d", minutes * 60 }')
    length="$minutes minutes"
    [[ -z "$updates" ]] || length="$updates updates"
}

# Paths are relative to where the script was called.
absolute() {
    case "$1" in /*) echo "$1" ;; *) echo "$from_here/$1" ;; esac
}

# The corpus is checked before set-up takes its minutes, with any Python that can do it.
check_corpus() { # OPTION… of prepare_corpus.py
    local python
    for python in .venv/bin/python python3.12 python3.11 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            "$python" scripts/prepare_corpus.py "$@" --check
            break
        fi
    done
}

check_folder() {
    [[ ! -e "$out" || -d "$out" ]] || fail "--out: expected a folder, got the file $out"
    [[ -e "$out/settings" || -z "$(find "$out" -mindepth 1 ! -name lock ! -name settings.partial \
        2>/dev/null | head -n 1)" ]] ||
        fail "--out: $out holds files that are not of a quick start; choose another folder"
}

# --- Set-up ---

# Makes .venv where needed and enters it; sets `device` to cpu or gpu. Bash's clock, SECONDS,
# starts from here.
set_up() {
    scripts/setup.sh
    # shellcheck disable=SC1091
    source .venv/bin/activate
    export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated

    device=cpu
    if ! $cpu && python -c 'import sys, torch as t
sys.exit(not (t.cuda.is_available() and t.version.cuda))'; then
        device=gpu
    fi
    if [[ "$device" == cpu ]]; then
        # Threads that spin while they wait starve each other as soon as anything else runs.
        export OMP_WAIT_POLICY=PASSIVE
        # Keep memory instead of handing it back to the system after each tensor: a tenth faster.
        export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=64000000
    fi
    SECONDS=0
}

# --- The folder: one run, with one set of settings ---

# Everything that a quick start leaves in its folder, for --restart.
made=(corpus corpus.partial binarised binarised.partial training averaged.pt
    translations.partial translations {transformer_lm,talkconv_lm}{.pt,.txt,.txt.partial}
    prompt.txt continuations.txt{,.partial} results.json{,.partial}
    commands.txt log.txt settings)

open_folder() { # SETTINGS
    mkdir -p "$out"
    exec 9>>"$out/lock"
    ! command -v flock >/dev/null || flock -n 9 ||
        fail "another quick start is running in $out; wait for it or choose another --out"
    if $restart; then
        (cd "$out" && rm -rf "${made[@]}")
    fi
    if [[ ! -e "$out/settings" ]]; then
        printf '%s\n' "$1" >"$out/settings.partial"
        mv "$out/settings.partial" "$out/settings"
    elif [[ "$(cat "$out/settings")" != "$1" ]]; then
        fail "$out holds a run with other settings (see $out/settings);" \
            "choose another --out, or --restart to replace it"
    fi
}

# --- Running a command ---

announce() {
    printf '\n== %s\n' "$*"
}

# Prints a command, and notes it for the list at the end.
show() {
    local word line=''
    for word in "$@"; do
        case "$word" in
            *\'*) printf -v word %q "$word" ;;
            "" | *[!a-zA-Z0-9_./,:=+-]*) word="'$word'" ;;
        esac
        line+="${line:+ }$word"
    done
    echo "\$ $line"
    grep -qxF -- "$line" "$out/commands.txt" 2>/dev/null || echo "$line" >>"$out/commands.txt"
}

# Runs a command; what it says goes to log.txt.
run() {
    show "$@"
    "$@" >>"$out/log.txt" 2>&1 || failed
}

# The same with a progress bar, for training and what goes through a data set: of `seconds N`, of
# `updates N`, or of the batches that the log counts.
run_with_bar() { # UNIT TOTAL COMMAND…
    show "${@:3}"
    "${@:3}" --log-format simple 2>&1 | progress_bar "$1" "$2" || failed
}

progress_bar() { # UNIT TOTAL, and the log of fairseq on the standard input
    local line start=$SECONDS percent told=-10 note filled
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$out/log.txt"
        if [[ "$line" =~ \ loss=([0-9.]+),.*\ ppl=([0-9.]+),.*\ num_updates=([0-9]+) ]]; then
            note="update ${BASH_REMATCH[3]}, loss ${BASH_REMATCH[1]}, perplexity ${BASH_REMATCH[2]}"
            percent=$((100 * BASH_REMATCH[3] / $2))
        elif [[ "$line" =~ :\ +([0-9]+)\ /\ ([0-9]+)\ wps= ]]; then
            note="batch ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
            percent=$((100 * BASH_REMATCH[1] / BASH_REMATCH[2]))
        else
            continue
        fi
        [[ "$1" != seconds ]] || percent=$((100 * (SECONDS - start) / $2))
        percent=$((percent < 100 ? percent : 100))
        printf -v filled '%*s' $((percent * 40 / 100)) ''
        if [[ -t 1 ]]; then
            printf '\r[%-40s] %3d%%  %-60s' "${filled// /=}" "$percent" "$note"
        elif ((percent >= told + 10)); then
            printf '[%-40s] %3d%%  %s\n' "${filled// /=}" "$percent" "$note"
            told=$percent
        fi
    done
    [[ ! -t 1 ]] || echo
}

failed() {
    echo "${0##*/}: that command failed; $out/log.txt ends with" >&2
    tail -n 15 "$out/log.txt" >&2
    exit 1
}

# --- Training ---

last_leg=() # which checkpoints stay of it, as options

# For `updates`, where asked for, and else by the clock, which takes two legs. In the first the
# learning rate stays up, for a third of the time. The updates it made tell how many this machine
# will make in the rest, over which the second lets the rate fall to zero. Should the machine turn
# slower, the second leg still stops in time.
train() { # TITLE FOLDER SECONDS WARM-UP-UPDATES COMMAND…
    local title=$1 training=$2 all=$3 warmup=$4 command=("${@:5}")
    local from=0 to=$updates warm start='' interval bar=(updates "$updates") stop=()
    [[ ! -e "$training/done" ]] || return 0
    mkdir -p "$training"
    if [[ -n "$updates" ]]; then
        warm=$((warmup < updates / 4 ? warmup : updates / 4))
        announce "$title for $updates updates"
    else
        [[ -e "$training/seconds" ]] || echo "$all" >"$training/seconds"
        all=$(<"$training/seconds")
        all=$((all > 20 ? all : 20))
        if [[ ! -e "$training/plan" ]]; then
            announce "$title, first leg: $((all / 3)) seconds"
            train_leg "$training/steady" "" seconds $((all / 3)) "${command[@]}" \
                --stop-time-hours "$(hours $((all / 3)))" \
                --warmup-updates "$warmup" --total-num-update 1000000000 \
                --save-interval-updates 100 --keep-interval-updates 1
            from=$(grep -o '@ [0-9]* updates' "$out/log.txt" | tail -n 1 | tr -dc 0-9) || failed
            echo "$from $((from + from * 19 / 10))" >"$training/plan.partial"
            mv "$training/plan.partial" "$training/plan"
        fi
        read -r from to <"$training/plan"
        warm=$from start=$training/steady/checkpoint_last.pt
        bar=(seconds $((all - all / 3))) stop=(--stop-time-hours "$(hours "$all")")
        announce "$title, second leg: updates $from to $to, at most $((all - all / 3)) seconds"
    fi
    interval=$(((to - from) / 40))
    train_leg "$training/falling" "$start" "${bar[@]}" "${command[@]}" "${stop[@]}" \
        --warmup-updates "$warm" --total-num-update "$to" --max-update "$to" \
        --save-interval-updates $((interval > 0 ? interval : 1)) "${last_leg[@]}"
    touch "$training/done"
}

train_leg() { # FOLDER CHECKPOINT-TO-START-FROM-OR-NOTHING UNIT TOTAL COMMAND…
    local restore
    mkdir -p "$1"
    restore=$(newest_checkpoints "$1" 1)
    restore=${restore:-$2}
    run_with_bar "$3" "$4" "${@:5}" --save-dir "$1" ${restore:+--restore-file "$restore"}
}

newest_checkpoints() { # FOLDER COUNT: the newest one last
    find "$1" -name 'checkpoint_*_*.pt' |
        sed 's/.*_\([0-9]*\)\.pt$/\1 &/' | sort -n | tail -n "$2" | cut -d ' ' -f 2-
}

hours() {
    awk -v seconds="$1" 'BEGIN { printf "%.4f", seconds / 3600 }'
}

finish() {
    announce "the commands, in order"
    sed 's/\.partial//g' "$out/commands.txt"
    announce "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; everything is in $out"
}

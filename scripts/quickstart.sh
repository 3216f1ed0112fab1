#!/usr/bin/env bash
# The quick start: learns to translate Spanish verses into English, and scores what it learnt.
#
#   check -> set-up -> prepare -> binarise -> train -> average -> translate -> score
#
# Each stage writes under a temporary name and renames it when done, so that running this again
# skips what is finished and resumes what is not.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: scripts/quickstart.sh [options]

Trains a small TaLK-Conv model on the verses in data/bible-es-en, translates the held-out test
verses, and prints the sacreBLEU score, five translations and the commands it ran. Run it again
to resume where it stopped.

  --minutes N         time for all of it after set-up (default: 9)
  --updates N         train for N updates, however long they take, instead of by the clock
  --cpu               do not use a GPU
  --out DIR           folder for everything it makes (default: quickstart, in the project's root)
  --restart           throw away what an earlier run left in that folder, and start over
  --data DIR          another corpus: {train,valid,test}.{SOURCE,TARGET}, one sentence a line,
                      also with .gz (default: data/bible-es-en)
  --source-lang NAME  how its source files end (default: es)
  --target-lang NAME  how its target files end (default: en)
  -h, --help          show this
USAGE
}

fail() { # for input that cannot be used
    echo "quickstart.sh: $*" >&2
    exit 2
}

# --- What is asked for ---

minutes=9 updates='' force_cpu=false restart=false
data='' out='' source_lang=es target_lang=en
from_here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --cpu) force_cpu=true ;;
        --restart) restart=true ;;
        --minutes | --updates | --out | --data | --source-lang | --target-lang)
            (($# > 1)) && [[ -n "$2" ]] || fail "$1: expected a value (see --help)"
            case "$1" in
                --minutes) minutes=$2 ;;
                --updates) updates=$2 ;;
                --out) out=$2 ;;
                --data) data=$2 ;;
                --source-lang) source_lang=$2 ;;
                --target-lang) target_lang=$2 ;;
            esac
            shift
            ;;
        *) fail "$1: no such option (see --help)" ;;
    esac
    shift
done

[[ "$minutes" =~ ^([2-9]|[1-9][0-9]{1,4})(\.[0-9]+)?$ ]] ||
    fail "--minutes: expected a number of at least 2, got $minutes"
[[ -z "$updates" || "$updates" =~ ^[1-9][0-9]{0,8}$ ]] ||
    fail "--updates: expected a whole number of at least 1, got $updates"
length="$minutes minutes"
[[ -z "$updates" ]] || length="$updates updates"
seconds=$(awk -v minutes="$minutes" 'BEGIN { printf "%d", minutes * 60 }')

# Paths are relative to where this was called.
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$from_here/$1" ;; esac; }
[[ -z "$data" ]] && data=data/bible-es-en || data=$(absolute "$data")
[[ -z "$out" ]] && out=quickstart || out=$(absolute "$out")
languages=(--source-lang "$source_lang" --target-lang "$target_lang")

# The corpus is checked before set-up takes its minutes, with any Python that can do it.
for python in .venv/bin/python python3.12 python3.11 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
        "$python" scripts/prepare_corpus.py --data "$data" "${languages[@]}" --check
        break
    fi
done
[[ ! -e "$out" || -d "$out" ]] || fail "--out: expected a folder, got the file $out"
[[ -e "$out/settings" || -z "$(find "$out" -mindepth 1 ! -name lock ! -name settings.partial \
    2>/dev/null | head -n 1)" ]] ||
    fail "--out: $out holds files that are not of a quick start; choose another folder"

# --- Set-up ---

scripts/setup.sh
# shellcheck disable=SC1091
source .venv/bin/activate
export PYTHONWARNINGS=ignore # fairseq calls much that PyTorch has deprecated

device=cpu
if ! $force_cpu; then
    # On a GPU, CuPy for the CUDA version that PyTorch was built for.
    cuda=$(python -c 'import torch as t
print("cuda" + t.version.cuda.split(".")[0] if t.cuda.is_available() and t.version.cuda else "")')
    if [[ -n "$cuda" ]]; then
        device=gpu
        scripts/setup.sh "$cuda"
    fi
fi
SECONDS=0 # bash counts on from here

# --- The model and how it is trained ---

fairseq_train=(fairseq-train)
if [[ "$device" == cpu ]]; then
    vocabulary=4000
    # Small batches, a deep decoder and narrow windows in the first layers learn the fastest here.
    model=(--arch talkconv --encoder-talk-heads 16 --decoder-talk-heads 16
        --encoder-embed-dim 256 --encoder-attention-heads 4
        --decoder-embed-dim 256 --decoder-attention-heads 4
        --encoder-normalize-before --decoder-normalize-before)
    if ((seconds < 1800)); then
        model+=(--encoder-layers 3 --encoder-max-left '1,3,7' --encoder-ffn-embed-dim 512
            --decoder-layers 3 --decoder-max-left '1,3,7' --decoder-ffn-embed-dim 512
            --dropout 0.1)
        batch=(--max-tokens 800)
    else
        model+=(--encoder-layers 4 --encoder-max-left '1,3,7,15' --encoder-ffn-embed-dim 1024
            --decoder-layers 3 --decoder-max-left '1,3,7' --decoder-ffn-embed-dim 1024
            --dropout 0.2)
        batch=(--max-tokens 1600)
    fi
    lr=2e-3 warmup=150
    on_device=(--cpu --num-workers 0) log_interval=20
    # Matrix products in bfloat16 on processors that have them in hardware, where training then
    # takes little more than half the time.
    fairseq_train=(env TALK_MATMUL_PRECISION=medium fairseq-train)
    # Threads that spin while they wait starve each other as soon as anything else runs.
    export OMP_WAIT_POLICY=PASSIVE
    # Keep memory instead of handing it back to the system after each tensor: a tenth faster.
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=64000000
else
    vocabulary=8000
    model=(--arch talkconv_iwslt_de_en --dropout 0.3 --weight-decay 1e-4)
    batch=(--max-tokens 8000)
    lr=5e-4 warmup=1000
    on_device=(--fp16 --num-workers 2) log_interval=200
fi
train_command=("${fairseq_train[@]}" "$out/binarised" --user-dir talk_fairseq "${model[@]}"
    --share-all-embeddings --max-source-positions 1024 --max-target-positions 1024
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas '0.9,0.98' --clip-norm 1.0
    --lr "$lr" --lr-scheduler polynomial_decay
    "${batch[@]}" "${on_device[@]}" --seed 1 --log-interval "$log_interval"
    --disable-validation --no-epoch-checkpoints)
averaged_checkpoints=5

# --- The folder: one run, with one set of settings ---

mkdir -p "$out"
exec 9>>"$out/lock"
! command -v flock >/dev/null || flock -n 9 ||
    fail "another quick start is running in $out; wait for it or choose another --out"

made=(corpus corpus.partial binarised binarised.partial training averaged.pt
    translations.partial translations commands.txt log.txt settings)
if $restart; then
    (cd "$out" && rm -rf "${made[@]}")
fi
corpus_files=("$data"/{train,valid,test}.{"$source_lang","$target_lang"}{,.gz})
settings="data $data $({ cat "${corpus_files[@]}" 2>/dev/null || true; } | cksum)
languages $source_lang $target_lang
device $device
length $length
training ${train_command[*]}"
if [[ ! -e "$out/settings" ]]; then
    printf '%s\n' "$settings" >"$out/settings.partial"
    mv "$out/settings.partial" "$out/settings"
elif [[ "$(cat "$out/settings")" != "$settings" ]]; then
    fail "$out holds a run with other settings (see $out/settings);" \
        "choose another --out, or --restart to replace it"
fi

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

# The same for training and translating, with a progress bar: of `seconds N`, of `updates N`,
# or of the batches that the log counts.
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
    echo "quickstart.sh: that command failed; $out/log.txt ends with" >&2
    tail -n 15 "$out/log.txt" >&2
    exit 1
}

# --- The stages ---

# Plain text, a SentencePiece model, and the sentences in pieces.
prepare() {
    [[ ! -d "$out/corpus" ]] || return 0
    announce "preparing the corpus"
    run python scripts/prepare_corpus.py --data "$data" "${languages[@]}" \
        --vocabulary "$vocabulary" --output "$out/corpus"
    tail -n 3 "$out/log.txt"
}

# One dictionary for both languages, and the pieces as its numbers.
binarise() {
    [[ ! -d "$out/binarised" ]] || return 0
    announce "binarising"
    rm -rf "$out/binarised.partial"
    local pieces=$out/corpus/pieces
    run fairseq-preprocess "${languages[@]}" --joined-dictionary --workers 2 \
        --trainpref "$pieces/train" --validpref "$pieces/valid" --testpref "$pieces/test" \
        --destdir "$out/binarised.partial"
    mv "$out/binarised.partial" "$out/binarised"
}

# By the clock it takes two legs. In the first the learning rate stays up, for a third of the time.
# The updates it made tell how many this machine will make in the rest, over which the second lets
# the rate fall to zero. Should the machine turn slower, the second leg still stops in time.
train() {
    local training=$out/training from=0 to=$updates warm start='' all interval
    local bar=(updates "$updates") stop=()
    [[ ! -e "$training/done" ]] || return 0
    mkdir -p "$training"
    if [[ -n "$updates" ]]; then
        warm=$((warmup < updates / 4 ? warmup : updates / 4))
        announce "training for $updates updates"
    else
        # Kept back: the time to load fairseq thrice, to average, to translate and to score.
        [[ -e "$training/seconds" ]] || echo $((seconds - SECONDS - 90)) >"$training/seconds"
        all=$(<"$training/seconds")
        all=$((all > 20 ? all : 20))
        if [[ ! -e "$training/plan" ]]; then
            announce "training, first leg: $((all / 3)) seconds"
            train_leg "$training/steady" "" seconds $((all / 3)) \
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
        announce "training, second leg: updates $from to $to, at most $((all - all / 3)) seconds"
    fi
    interval=$(((to - from) / 40))
    train_leg "$training/falling" "$start" "${bar[@]}" "${stop[@]}" \
        --warmup-updates "$warm" --total-num-update "$to" --max-update "$to" \
        --save-interval-updates $((interval > 0 ? interval : 1)) \
        --keep-interval-updates "$averaged_checkpoints" --no-last-checkpoints
    touch "$training/done"
}

train_leg() { # FOLDER CHECKPOINT-TO-START-FROM-OR-NOTHING UNIT TOTAL OPTION…
    local restore
    mkdir -p "$1"
    restore=$(newest_checkpoints "$1" 1)
    restore=${restore:-$2}
    run_with_bar "$3" "$4" "${train_command[@]}" --save-dir "$1" \
        ${restore:+--restore-file "$restore"} "${@:5}"
}

newest_checkpoints() { # FOLDER COUNT: the newest one last
    find "$1" -name 'checkpoint_*_*.pt' |
        sed 's/.*_\([0-9]*\)\.pt$/\1 &/' | sort -n | tail -n "$2" | cut -d ' ' -f 2-
}

hours() {
    awk -v seconds="$1" 'BEGIN { printf "%.4f", seconds / 3600 }'
}

average() {
    [[ ! -e "$out/averaged.pt" ]] || return 0
    announce "averaging the last checkpoints"
    local last
    mapfile -t last < <(newest_checkpoints "$out/training/falling" "$averaged_checkpoints")
    run python scripts/average_checkpoints.py --output "$out/averaged.pt" \
        --inputs "${last[@]:-$out/training/steady/checkpoint_last.pt}"
}

# The test set, which nothing above has learnt from.
translate() {
    [[ ! -d "$out/translations" ]] || return 0
    announce "translating the test set"
    rm -rf "$out/translations.partial"
    run_with_bar batches 1 fairseq-generate "$out/binarised" --user-dir talk_fairseq \
        "${on_device[@]}" --path "$out/averaged.pt" --gen-subset test \
        --remove-bpe sentencepiece --beam 5 --lenpen 1 --max-tokens 4000 --log-interval 1 \
        --results-path "$out/translations.partial"
    mv "$out/translations.partial" "$out/translations"
}

score() {
    announce "five translations, and the score"
    local command=(python scripts/show_translations.py "$out/translations/generate-test.txt"
        --source "$out/corpus/test.$source_lang" --reference "$out/corpus/test.$target_lang")
    show "${command[@]}"
    "${command[@]}"
}

main() {
    prepare
    binarise
    train
    average
    translate
    score
    announce "the commands, in order"
    sed 's/\.partial//g' "$out/commands.txt"
    announce "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; everything is in $out"
}

# On one line, which bash has read when it starts: an edit of this file does not disturb a run.
main; exit

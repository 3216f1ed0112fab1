#!/usr/bin/env bash
# The quick start: learns to translate Spanish verses into English, and scores what it learnt.
#
#   check -> set-up -> prepare -> binarise -> train -> average -> translate -> score
#
# Each stage writes under a temporary name and renames it when done, so that running this again
# skips what is finished and resumes what is not.
set -euo pipefail
# shellcheck source=scripts/quickstart_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_common.sh"

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
                      (without it, a run that was stopped, also by Ctrl-C, continues)
  --data DIR          another corpus: {train,valid,test}.{SOURCE,TARGET}, one sentence a line,
                      also with .gz (default: data/bible-es-en)
  --source-lang NAME  how its source files end (default: es)
  --target-lang NAME  how its target files end (default: en)
  -h, --help          show this
USAGE
}

# --- What is asked for ---

source_lang=es target_lang=en
parse_options '--minutes --updates --out --data --source-lang --target-lang' "$@"
[[ -z "$data" ]] && data=data/bible-es-en || data=$(absolute "$data")
[[ -z "$out" ]] && out=quickstart || out=$(absolute "$out")
languages=(--source-lang "$source_lang" --target-lang "$target_lang")

check_corpus --data "$data" "${languages[@]}"
check_folder
set_up

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
last_leg=(--keep-interval-updates "$averaged_checkpoints" --no-last-checkpoints)

# --- The folder: one run, with one set of settings ---

corpus_files=("$data"/{train,valid,test}.{"$source_lang","$target_lang"}{,.gz})
open_folder "data $data $({ cat "${corpus_files[@]}" 2>/dev/null || true; } | cksum)
languages $source_lang $target_lang
device $device
length $length
training ${train_command[*]}"

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
    local command=(python scripts/run.py quickstart.translations "$out/translations/generate-test.txt"
        --source "$out/corpus/test.$source_lang" --reference "$out/corpus/test.$target_lang")
    show "${command[@]}"
    "${command[@]}"
}

main() {
    prepare
    binarise
    # Kept back: the time to load fairseq thrice, to average, to translate and to score.
    train training "$out/training" $((seconds - SECONDS - 90)) "$warmup" "${train_command[@]}"
    average
    translate
    score
    finish
}

# On one line, which bash has read when it starts: an edit of this file does not disturb a run.
main; exit

#!/usr/bin/env bash
# The quick start for language models: learns English verses with a TaLK-Conv and with a Transformer
# of the same size and budget, and compares the two.
#
#   check -> set-up -> prepare -> binarise -> train both -> evaluate both -> continue a prompt
#         -> compare
#
# Each stage writes under a temporary name and renames it when done, so that running this again
# skips what is finished and resumes what is not.
set -euo pipefail
# shellcheck source=scripts/quickstart_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/quickstart_common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/quickstart_lm.sh [options]

Trains two small language models on the English verses in data/bible-es-en, a TaLK-Conv and a
Transformer of the same size, each for the same time, and prints continuations of a prompt and
the perplexity of both on the held-out test verses, beside that of a unigram. Run it again to
resume where it stopped.

  --minutes N         time for all of it after set-up (default: 9)
  --updates N         train each for N updates, however long they take, instead of by the clock
  --prompt TEXT       what the TaLK-Conv is to continue (default: Jesus said to them,)
  --cpu               do not use a GPU
  --out DIR           folder for everything it makes (default: quickstart_lm, in the project's
                      root)
  --restart           throw away what an earlier run left in that folder, and start over
                      (without it, a run that was stopped, also by Ctrl-C, continues)
  --data DIR          another corpus: {train,valid,test}.LANG, one sentence a line, also with .gz
                      (default: data/bible-es-en)
  --lang LANG         how its files end (default: en)
  -h, --help          show this
USAGE
}

# --- What is asked for ---

lang=en prompt='Jesus said to them,'
parse_options '--minutes --updates --prompt --out --data --lang' "$@"
[[ -z "$data" ]] && data=data/bible-es-en || data=$(absolute "$data")
[[ -z "$out" ]] && out=quickstart_lm || out=$(absolute "$out")
[[ "$prompt" != *$'\n'* ]] || fail "--prompt: expected one line, got several"

check_corpus --data "$data" --source-lang "$lang"
check_folder
set_up

# --- The models and how they are trained ---

fairseq_train=(fairseq-train)
if [[ "$device" == cpu ]]; then
    # Text that is read once or twice needs no dropout.
    ((seconds < 1800)) && dropout=0 || dropout=0.2
    batch=(--max-tokens 1024) warmup=100 log_interval=20
    on_device=(--cpu --num-workers 0) precision=()
    # Matrix products in bfloat16 on processors that have them in hardware, where training then
    # takes little more than half the time.
    fairseq_train=(env TALK_MATMUL_PRECISION=medium fairseq-train)
else
    dropout=0.3
    batch=(--max-tokens 8192) warmup=400 log_interval=200
    on_device=(--num-workers 0) precision=(--fp16)
fi
vocabulary=4000 block=256
# A queue of batches that is open at the end aborts a run of a language model now and then.
on_device+=(--data-buffer-size 0)
fairseq_train+=("$out/binarised" --user-dir talk_fairseq --task language_modeling
    --sample-break-mode none --tokens-per-sample "$block"
    --optimizer adam --adam-betas '0.9,0.98' --clip-norm 1.0 --lr 4e-3
    --lr-scheduler polynomial_decay
    "${batch[@]}" "${on_device[@]}" "${precision[@]}" --seed 1 --log-interval "$log_interval"
    --disable-validation --no-epoch-checkpoints)
last_leg=(--keep-interval-updates 1)

# The same width, depth and embeddings; TaLK's feed-forward layers are wider by what its units have
# less than attention has. Both are trained alike, at the learning rate that is the Transformer's
# best and, within a hair, TaLK's.
models=(transformer_lm talkconv_lm)
sizes=(--decoder-layers 4 --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256
    --decoder-attention-heads 4 --decoder-normalize-before --share-decoder-input-output-embed
    --dropout "$dropout")
transformer_lm=(--arch transformer_lm "${sizes[@]}" --decoder-ffn-embed-dim 1024)
talkconv_lm=(--arch talkconv_lm "${sizes[@]}" --decoder-ffn-embed-dim 1152
    --decoder-max-left '1,3,7,15' --decoder-talk-heads 16 --offset-dropout "$dropout")

# --- The folder: one run, with one set of settings ---

corpus_files=("$data"/{train,valid,test}."$lang"{,.gz})
open_folder "data $data $({ cat "${corpus_files[@]}" 2>/dev/null || true; } | cksum)
language $lang
device $device
length $length
training ${fairseq_train[*]}
transformer_lm ${transformer_lm[*]}
talkconv_lm ${talkconv_lm[*]}"

# --- The stages ---

# The operator is compiled where it is first used, which is not for one model's time to pay.
compile() {
    [[ ! -e "$out/training" ]] || return 0
    announce "compiling the operator"
    python - "$device" <<'PYTHON'
import sys, torch
from talk_fairseq import talk_conv

x, offsets = torch.ones(2, 2, 1, 4, device="cuda" if sys.argv[1] == "gpu" else "cpu")
talk_conv(x.requires_grad_(), offsets, None, max_left=1, max_right=0).sum().backward()
PYTHON
}

# Plain text, a SentencePiece model, and the verses in pieces.
prepare() {
    [[ ! -d "$out/corpus" ]] || return 0
    announce "preparing the corpus"
    run python scripts/prepare_corpus.py --data "$data" --source-lang "$lang" \
        --vocabulary "$vocabulary" --output "$out/corpus"
    tail -n 3 "$out/log.txt"
}

# The pieces as numbers of a dictionary.
binarise() {
    [[ ! -d "$out/binarised" ]] || return 0
    announce "binarising"
    rm -rf "$out/binarised.partial"
    local pieces=$out/corpus/pieces
    run fairseq-preprocess --only-source --workers 2 --trainpref "$pieces/train.$lang" \
        --validpref "$pieces/valid.$lang" --testpref "$pieces/test.$lang" \
        --destdir "$out/binarised.partial"
    mv "$out/binarised.partial" "$out/binarised"
}

# Half of the time for each. Kept back: the time to load fairseq four times for training, to
# evaluate, to continue a prompt and to compare.
train_both() {
    local model each
    mkdir -p "$out/training"
    [[ -e "$out/training/seconds" ]] ||
        echo $(((seconds - SECONDS - 90) / 2)) >"$out/training/seconds"
    each=$(<"$out/training/seconds")
    for model in "${models[@]}"; do
        local -n options=$model
        train "training $model" "$out/training/$model" "$each" "$warmup" \
            "${fairseq_train[@]}" "${options[@]}"
        [[ -e "$out/$model.pt" ]] ||
            run mv "$out/training/$model/falling/checkpoint_last.pt" "$out/$model.pt"
    done
}

# On the test set, which nothing above has learnt from.
evaluate() {
    local model
    for model in "${models[@]}"; do
        [[ ! -e "$out/$model.txt" ]] || continue
        announce "evaluating $model on the test set"
        # In blocks as in training: by default fairseq would cut others, of 1,024 tokens.
        run_into "$out/$model.txt" fairseq-eval-lm "$out/binarised" \
            --user-dir talk_fairseq --path "$out/$model.pt" --gen-subset test \
            --sample-break-mode none --tokens-per-sample "$block" \
            --max-tokens 4096 "${on_device[@]}"
    done
}

# Three continuations, sampled from the most likely pieces of each step.
continue_prompt() {
    local written=$out/continuations.txt
    if [[ ! -e "$written" || "$(cat "$out/prompt.txt")" != "$prompt" ]]; then
        announce "continuing a prompt"
        rm -f "$written"
        printf '%s\n' "$prompt" >"$out/prompt.txt"
        run_into "$written" fairseq-interactive "$out/binarised" --user-dir talk_fairseq \
            --task language_modeling --path "$out/talkconv_lm.pt" \
            --bpe sentencepiece --sentencepiece-model "$out/corpus/sentencepiece.model" \
            --input "$out/prompt.txt" --sampling --sampling-topk 40 --temperature 0.8 \
            --beam 3 --nbest 3 --max-len-b 80 --seed 1 "${on_device[@]}"
    fi
    announce "continuations of: $prompt"
    grep '^D-' "$written" | cut -f 3
}

compare() {
    announce "perplexity on the test set"
    local command=(python scripts/run.py quickstart.perplexities --corpus "$out/corpus"
        --language "$lang" --models "$out"/{transformer_lm,talkconv_lm}.pt
        --output "$out/results.json")
    show "${command[@]}"
    "${command[@]}"
}

# Runs a command, and keeps what it says once it has ended well.
run_into() { # FILE COMMAND…
    show "${@:2}"
    "${@:2}" 2>&1 | tee "$1.partial" >>"$out/log.txt" || failed
    mv "$1.partial" "$1"
}

main() {
    compile
    prepare
    binarise
    train_both
    evaluate
    continue_prompt
    compare
    finish
}

# On one line, which bash has read when it starts: an edit of this file does not disturb a run.
main; exit

"""Compare language models on a test set, beside the frequencies of its tokens alone.

    compare_language_models.py --corpus corpus --language en --models a.pt b.pt --output c.json

``corpus`` is what prepare_corpus.py wrote for one language. Beside each checkpoint, as ``a.txt``,
stands what fairseq-eval-lm printed for it. Tokens are the pieces and one end of each sentence;
words are separated by spaces, and the ends count as words too. A model that was not scored on all
tokens is an error. Prints a table, and writes it as JSON.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

from pipeline.common.files import write_whole
from talk_fairseq.checkpoint_files import read_checkpoint

END, UNKNOWN = "</s>", "<unk>"
HEADER = ("model", "parameters", "updates", "seconds", "test tokens", "ppl/token", "ppl/word")


def read_tokens(path):
    """The pieces of each line of `path` and, after each line, its end."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [token for line in lines for token in (*line.split(" "), END)]


def unigram_loss(train, test):
    """The mean of ``-log2 p`` over the tokens `test`, each by how frequent it is in `train`.

    Every token counts once more than it occurs, and so does the unknown one, which stands for
    what is not in `train`.
    """
    counts = Counter([*train, *set(train), UNKNOWN])
    total = counts.total()
    return -sum(math.log2(counts.get(token, 1) / total) for token in test) / len(test)


def read_model(checkpoint, tokens):
    """``(row of the table without its perplexities, loss in bits a token)`` of a checkpoint.

    Raises ValueError if it was not scored on `tokens` tokens.
    """
    evaluated = checkpoint.with_suffix(".txt")
    text = evaluated.read_text(encoding="utf-8")
    found = [
        re.findall(pattern, text)
        for pattern in (
            r"num\. model params: ([\d,]+)",
            r"Evaluated ([\d,]+) tokens",
            r"Loss \(base 2\): ([\d.]+),",
        )
    ]
    if [len(matches) for matches in found] != [1, 1, 1]:
        raise ValueError(f"{evaluated}: expected the output of fairseq-eval-lm")
    parameters, scored = (int(matches[0].replace(",", "")) for matches in found[:2])
    if scored != tokens:
        raise ValueError(f"{evaluated}: expected a score of all {tokens:,} tokens, got {scored:,}")
    state = read_checkpoint(checkpoint)
    row = {
        "model": checkpoint.stem,
        "parameters": parameters,
        "updates": state["optimizer_history"][-1]["num_updates"],
        "seconds": round(state["extra_state"]["previous_training_time"]),
    }
    return row, float(found[2][0])


def compare(corpus, language, checkpoints):
    """The results, as they are written: ``{"test": {…}, "models": [row, …]}``."""
    train, test = (
        read_tokens(corpus / "pieces" / f"{split}.{language}") for split in ("train", "test")
    )
    sentences = test.count(END)
    words = len((corpus / f"test.{language}").read_text(encoding="utf-8").split())
    losses = [({"model": "unigram"}, unigram_loss(train, test))]
    losses += [read_model(checkpoint, len(test)) for checkpoint in checkpoints]
    known = set(train)
    return {
        "test": {
            "sentences": sentences,
            "words": words,
            "tokens": len(test),
            "unknown tokens": sum(token not in known for token in test),
        },
        "models": [
            {
                **row,
                "perplexity of a token": 2**loss,
                "perplexity of a word": 2 ** (loss * len(test) / (words + sentences)),
            }
            for row, loss in losses
        ],
    }


def table(results):
    """The lines of the table."""
    tokens = f"{results['test']['tokens']:,}"
    rows = [HEADER]
    for model in results["models"]:
        counts = (model.get(name) for name in ("parameters", "updates", "seconds"))
        rows.append(
            (
                model["model"],
                *("" if count is None else f"{count:,}" for count in counts),
                tokens,
                f"{model['perplexity of a token']:,.2f}",
                f"{model['perplexity of a word']:,.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        yield "  ".join((first.ljust(widths[0]), *cells))


def main(arguments=None):
    """Run the command; one line and status 1 if corpus, checkpoints and scores do not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the corpus")
    parser.add_argument("--language", required=True, help="how its files end")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="their checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    args = parser.parse_args(arguments)
    try:
        results = compare(args.corpus, args.language, args.models)
    except (OSError, ValueError) as error:
        sys.exit(f"compare_language_models.py: {error}")
    write_whole(args.output, json.dumps(results, indent=2) + "\n")
    print(*table(results), sep="\n")
    test = results["test"]
    print(
        f"\non {test['sentences']:,} sentences of {test['words']:,} words; "
        f"unknown tokens: {test['unknown tokens']:,}"
    )

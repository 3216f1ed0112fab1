"""Compare language models on a test set, beside the frequencies of its tokens alone.

    run.py quickstart.perplexities --corpus corpus --language en --models a.pt b.pt --output c.json

``corpus`` is what prepare_corpus.py wrote for one language. Beside each checkpoint, as ``a.txt``,
stands what fairseq-eval-lm printed for it. Tokens are the pieces and one end of each sentence;
words are separated by spaces, and the ends count as words too. A model that was not scored on all
tokens is an error. Prints a table, and writes it as JSON.
"""

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from pipeline.common.files import write_json
from pipeline.common.perplexity import END, read_model, read_tokens, unigram_loss

HEADER = ("model", "parameters", "updates", "seconds", "test tokens", "ppl/token", "ppl/word")


def compare(corpus, language, checkpoints):
    """Return the results, as they are written: ``{"test": {…}, "models": [row, …]}``."""
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
    """Return the table as text."""
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
    alignment = ["left"] + ["right"] * (len(HEADER) - 1)
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=alignment)


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
        sys.exit(f"quickstart.perplexities: {error}")
    write_json(args.output, results)
    print(table(results))
    test = results["test"]
    print(
        f"\non {test['sentences']:,} sentences of {test['words']:,} words; "
        f"unknown tokens: {test['unknown tokens']:,}"
    )

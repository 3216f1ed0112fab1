"""Compare language models on a test set, beside the frequencies of its tokens alone.

    run.py quickstart.perplexities --corpus corpus --language en --models a.pt b.pt --output c.json

``corpus`` is what prepare_corpus.py wrote for one language. Beside each checkpoint, as ``a.txt``,
stands what fairseq-eval-lm printed for it. Tokens are the pieces and one end of each sentence;
words are separated by spaces, and the ends count as words too. A model that was not scored on all
tokens is an error. Prints a table, and writes it as JSON.
"""

from pathlib import Path

from tabulate import tabulate

from pipeline.common import command
from pipeline.common.files import write_json
from pipeline.common.perplexity import TestSet, read_model

HEADER = ("model", "parameters", "updates", "seconds", "test tokens", "ppl/token", "ppl/word")


def compare(corpus, language, checkpoints):
    """Return the results, as they are written: ``{"test": {…}, "models": [row, …]}``."""
    test = TestSet(corpus, language)
    losses = [({"model": "unigram"}, test.unigram_loss)]
    for checkpoint in checkpoints:
        facts, loss = read_model(checkpoint, test.counts["tokens"])
        losses.append(({"model": checkpoint.stem, **facts}, loss))
    rows = []
    for row, loss in losses:
        token, word = test.perplexities(loss)
        rows.append({**row, "perplexity of a token": token, "perplexity of a word": word})
    return {"test": {**test.counts, "unknown tokens": test.unknown}, "models": rows}


def table(results):
    """Return the table as text."""
    tokens = f"{results['test']['tokens']:,}"
    rows = [HEADER]
    for model in results["models"]:
        counts = [model.get(name) for name in ("parameters", "updates", "seconds")]
        counts = ["" if count is None else f"{count:,}" for count in counts]
        token, word = model["perplexity of a token"], model["perplexity of a word"]
        rows.append((model["model"], *counts, tokens, f"{token:,.2f}", f"{word:,.1f}"))
    alignment = ["left"] + ["right"] * (len(HEADER) - 1)
    return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=alignment)


def main(arguments=None):
    """Run the command; one line and status 1 if corpus, checkpoints and scores do not fit."""
    parser = command.parser("run.py quickstart.perplexities", __doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with the corpus")
    parser.add_argument("--language", required=True, help="how its files end")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="their checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    args = parser.parse_args(arguments)

    def body():
        results = compare(args.corpus, args.language, args.models)
        write_json(args.output, results)
        print(table(results))
        test = results["test"]
        print(
            f"\non {test['sentences']:,} sentences of {test['words']:,} words; "
            f"unknown tokens: {test['unknown tokens']:,}"
        )

    return command.run("quickstart.perplexities", body)

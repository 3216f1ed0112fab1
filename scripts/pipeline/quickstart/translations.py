"""Score what fairseq-generate wrote with sacreBLEU, and show a few of the translations.

    show_translations.py generated.txt --source corpus/test.es --reference corpus/test.en

The score is of detokenised text against the untouched reference, over all of it: a missing
translation is an error.
"""

import argparse
import sys
from pathlib import Path

from sacrebleu.metrics import BLEU


def read_hypotheses(path):
    """``{sentence number: text}`` from the ``D-<number> <score> <text>`` lines of ``path``."""
    hypotheses = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("D-"):
            number, _, text = line.split("\t")
            hypotheses[int(number[2:])] = text
    return hypotheses


def read_lines(path):
    """The lines of a text file."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def main():
    """Run the command; one line and status 1 if source, reference and translations do not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("generated", type=Path, help="output of fairseq-generate")
    parser.add_argument("--source", type=Path, required=True, help="the sentences, as plain text")
    parser.add_argument("--reference", type=Path, required=True, help="their translations")
    parser.add_argument("--samples", type=int, default=5, help="translations to show (5)")
    args = parser.parse_args()
    sources, references = read_lines(args.source), read_lines(args.reference)
    hypotheses = read_hypotheses(args.generated)
    if len(sources) != len(references) or hypotheses.keys() != set(range(len(references))):
        sys.exit(
            f"show_translations.py: expected a translation for each sentence, got "
            f"{len(hypotheses)} for {len(sources)} sources and {len(references)} references"
        )

    # Spread evenly, so that nobody has picked them.
    count = min(args.samples, len(references))
    for number in (len(references) * (2 * i + 1) // (2 * count) for i in range(count)):
        print(f"source      {sources[number]}")
        print(f"reference   {references[number]}")
        print(f"translation {hypotheses[number]}\n")
    bleu = BLEU()
    score = bleu.corpus_score([hypotheses[i] for i in range(len(references))], [references])
    print(f"sacreBLEU {score.score:.2f} on {len(references):,} sentences ({bleu.get_signature()})")

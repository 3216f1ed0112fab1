"""Score what fairseq-generate wrote with sacreBLEU, and show a few of the translations.

    run.py quickstart.translations generated.txt --source corpus/test.es --reference corpus/test.en

The score is of detokenised text against the untouched reference, over all of it: a missing
translation is an error.
"""

import argparse
from pathlib import Path

from sacrebleu.metrics import BLEU

from pipeline.common.command import Failed, run
from pipeline.common.files import read_lines
from pipeline.common.generated import lines_of_kind


def report(generated, source, reference, samples=5):
    """Print a few translations and the score.

    Args:
        generated: output of fairseq-generate.
        source, reference: the sentences and their translations, as plain text.
        samples: translations to show.

    Raises Failed if these do not fit.
    """
    sources, references = read_lines(source), read_lines(reference)
    hypotheses = lines_of_kind(read_lines(generated), "D")
    if len(sources) != len(references) or hypotheses.keys() != set(range(len(references))):
        raise Failed(
            f"expected a translation for each sentence, got {len(hypotheses)} for "
            f"{len(sources)} sources and {len(references)} references"
        )

    # Spread evenly, so that nobody has picked them.
    count = min(samples, len(references))
    for number in (len(references) * (2 * i + 1) // (2 * count) for i in range(count)):
        print(f"source      {sources[number]}")
        print(f"reference   {references[number]}")
        print(f"translation {hypotheses[number]}\n")
    bleu = BLEU()
    score = bleu.corpus_score([hypotheses[i] for i in range(len(references))], [references])
    print(f"sacreBLEU {score.score:.2f} on {len(references):,} sentences ({bleu.get_signature()})")


def main(arguments=None):
    """Run the command; one line and status 1 if source, reference and translations do not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("generated", type=Path, help="output of fairseq-generate")
    parser.add_argument("--source", type=Path, required=True, help="the sentences, as plain text")
    parser.add_argument("--reference", type=Path, required=True, help="their translations")
    parser.add_argument("--samples", type=int, default=5, help="translations to show (5)")
    args = parser.parse_args(arguments)
    return run("quickstart.translations", lambda: report(**vars(args)))

"""Score what fairseq-generate wrote with sacreBLEU, and show a few of the translations.

    run.py quickstart.translations generated.txt --source corpus/test.es --reference corpus/test.en

The score is of detokenised text against the untouched reference, over all of it: a missing
translation is an error.
"""

from pathlib import Path

from sacrebleu.metrics import BLEU

from pipeline.common import command
from pipeline.common.files import read_lines
from pipeline.common.generated import read_hypotheses

SAMPLES = 5  # translations to show


def report(generated, source, reference):
    """Print a few translations and the score.

    Args:
        generated: output of fairseq-generate.
        source, reference: the sentences and their translations, as plain text.

    Raises ValueError if these do not fit.
    """
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise ValueError(
            f"--source: expected {len(references):,} lines as in {reference}, got {len(sources):,}"
        )
    hypotheses = read_hypotheses(generated, len(references))

    # Spread evenly, so that nobody has picked them.
    count = min(SAMPLES, len(references))
    for number in (len(references) * (2 * i + 1) // (2 * count) for i in range(count)):
        print(f"source      {sources[number]}")
        print(f"reference   {references[number]}")
        print(f"translation {hypotheses[number]}\n")
    bleu = BLEU()
    score = bleu.corpus_score(hypotheses, [references])
    print(f"sacreBLEU {score.score:.2f} on {len(references):,} sentences ({bleu.get_signature()})")


def main(arguments=None):
    """Run the command; one line and status 1 if source, reference and translations do not fit."""
    parser = command.parser("run.py quickstart.translations", __doc__)
    parser.add_argument("generated", type=Path, help="output of fairseq-generate")
    parser.add_argument("--source", type=Path, required=True, help="the sentences, as plain text")
    parser.add_argument("--reference", type=Path, required=True, help="their translations")
    args = parser.parse_args(arguments)
    return command.run("quickstart.translations", lambda: report(**vars(args)))

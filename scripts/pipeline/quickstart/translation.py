"""Trains a small TaLK-Conv model on the verses in data/bible-es-en, translates the held-out test
verses, and prints the sacreBLEU score, five translations and the commands it ran. Run it again
to resume where it stopped.
"""

from sacrebleu.metrics import BLEU

from pipeline.common.command import run
from pipeline.common.fairseq import generation, last_checkpoints
from pipeline.common.files import read_lines
from pipeline.common.folder import show
from pipeline.common.logs import read_hypotheses
from pipeline.common.systems import words
from pipeline.compare.scores import bleu_tokenizer
from pipeline.quickstart.session import Session, options

NAME = "quickstart"
AVERAGED = 5  # checkpoints
SAMPLES = 5  # translations to show


def learn(args):
    """Prepare, train, average, translate and score, but for what an earlier run has done."""
    languages = [args.source_lang, args.target_lang]
    session = Session(args, languages, NAME)
    sides = session.folder.sides  # which fairseq's guess by the names of files misses for pt-BR
    training = session.training(sides)
    session.open(training=training)
    out = session.out

    session.prepare()
    updates = session.train("training", out / "training", training, AVERAGED)

    averaged = out / "averaged.pt"
    last = last_checkpoints(out / "training/falling", updates, AVERAGED)
    session.once("averaging the last checkpoints", averaged, [
        "python", "scripts/average_checkpoints.py", "--output", averaged, "--inputs", *last,
    ])  # fmt: skip

    # The test set, which nothing above has learnt from.
    translated = out / "translations"
    session.once("translating the test set", translated, [
        "fairseq-generate", session.binarised, "--user-dir", "talk_fairseq", *words(sides),
        *session.on_device, "--path", averaged, "--gen-subset", "test",
        "--remove-bpe", "sentencepiece", "--beam", 5, "--lenpen", 1, "--max-tokens", 4000,
        "--log-interval", 1, "--results-path", translated,
    ], generation)  # fmt: skip

    show("\n== five translations, and the score")
    report(translated, *(session.corpus / f"test.{language}" for language in languages))
    session.finish()


def report(generated, source, reference):
    """Show a few translations and the score, of detokenised text against the untouched reference.

    `generated` is output of fairseq-generate, a file or a folder; the others are plain text. Raises
    ValueError unless there is a translation of each sentence.
    """
    sources, references = read_lines(source), read_lines(reference)
    hypotheses = read_hypotheses(generated, len(references))
    # Spread evenly, so that nobody has picked them.
    count = min(SAMPLES, len(references))
    for number in (len(references) * (2 * i + 1) // (2 * count) for i in range(count)):
        show(f"source      {sources[number]}")
        show(f"reference   {references[number]}")
        show(f"translation {hypotheses[number]}\n")
    bleu = BLEU(tokenize=bleu_tokenizer(reference.name.partition(".")[2]))
    score = bleu.corpus_score(hypotheses, [references])
    show(f"sacreBLEU {score.score:.2f} on {len(references):,} sentences ({bleu.get_signature()})")


def main(arguments=None):
    """Run the command and return its exit status."""
    parser = options(NAME, __doc__)
    for side, language in (("source", "es"), ("target", "en")):
        parser.add_argument(f"--{side}-lang", metavar="NAME", default=language,
                            help=f"how its {side} files end (default: {language})")  # fmt: skip
    args = parser.parse_args(arguments)
    return run(f"{NAME}.sh", lambda: learn(args), resumes=True)

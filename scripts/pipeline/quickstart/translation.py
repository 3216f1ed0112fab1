"""Learn to translate Spanish verses into English; see scripts/quickstart.sh --help."""

from pipeline.common.command import run
from pipeline.common.fairseq import BatchBar, last_checkpoints
from pipeline.quickstart import translations
from pipeline.quickstart.clock import Training
from pipeline.quickstart.session import Session, announce, given, options

NAME = "quickstart.sh"
DESCRIPTION = """\
Trains a small TaLK-Conv model on the verses in data/bible-es-en, translates the held-out test
verses, and prints the sacreBLEU score, five translations and the commands it ran. Run it again
to resume where it stopped.
"""
AVERAGED = 5  # checkpoints


def learn(args):
    """Prepare, train, average, translate and score, but for what an earlier run has done."""
    languages = [args.source_lang, args.target_lang]
    session = Session(args, languages, "quickstart")
    training = session.training()
    session.open(training=training)
    out = session.out

    session.prepare()
    updates = Training(session, "training", out / "training", training, AVERAGED).run(
        session.seconds_left()
    )

    averaged = out / "averaged.pt"
    last = last_checkpoints(out / "training/falling", updates, AVERAGED)
    session.once("averaging the last checkpoints", averaged, [
        "python", "scripts/average_checkpoints.py", "--output", averaged, "--inputs", *last,
    ])  # fmt: skip

    # The test set, which nothing above has learnt from.
    translated = out / "translations"
    session.once("translating the test set", translated, [
        "fairseq-generate", session.binarised, "--user-dir", "talk_fairseq", *session.on_device,
        "--path", averaged, "--gen-subset", "test", "--remove-bpe", "sentencepiece",
        "--beam", 5, "--lenpen", 1, "--max-tokens", 4000, "--log-interval", 1,
        "--results-path", translated,
    ], BatchBar())  # fmt: skip

    announce("five translations, and the score")
    generated = translated / "generate-test.txt"
    source, reference = (session.corpus / f"test.{language}" for language in languages)
    session.show(["python", "scripts/run.py", "quickstart.translations", generated,
                  "--source", source, "--reference", reference])  # fmt: skip
    translations.report(generated, source, reference)
    session.finish()


def main(arguments=None):
    """Run the command and return its exit status."""
    parser = options(NAME, DESCRIPTION, "quickstart")
    add = parser.add_argument
    for side, language in (("source", "es"), ("target", "en")):
        add(f"--{side}-lang", metavar="NAME", type=given, default=language,
            help=f"how its {side} files end (default: {language})")  # fmt: skip
    args = parser.parse_args(arguments)
    return run(NAME, lambda: learn(args))

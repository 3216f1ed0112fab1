"""Trains two small language models on the English verses in data/bible-es-en, a TaLK-Conv and a
Transformer of the same size, each for the same time, and prints continuations of a prompt and
the perplexity of both on the held-out test verses, beside that of a unigram. Run it again to
resume where it stopped.
"""

from pipeline.common.command import BadInput, run
from pipeline.common.files import read_lines, remove, write_json, write_lines
from pipeline.common.folder import show
from pipeline.common.systems import words
from pipeline.common.tables import markdown
from pipeline.quickstart.session import Session, options

NAME = "quickstart_lm"
TALK = "talkconv_plus_wide_lm"  # of the models, the one that continues a prompt
HEADER = ("model", "parameters", "updates", "seconds", "test tokens", "ppl/token", "ppl/word")


def learn(args):
    """Prepare, train, evaluate, continue and compare, but for what an earlier run has done."""
    if not args.prompt or "\n" in args.prompt:
        raise BadInput(f"--prompt: expected one line, got {args.prompt!r}")
    session = Session(args, [args.lang], NAME)
    models = session.settings["models"]
    trainings = {name: session.training(flags) for name, flags in models.items()}
    session.open(**trainings)
    out = session.out

    session.prepare()
    for name, command in trainings.items():
        folder, model = out / "training" / name, out / f"{name}.pt"
        session.train(f"training {name}", folder, command, keep=1)
        if not model.exists():
            session.run(["mv", folder / "falling/checkpoint_last.pt", model])
    for name in models:
        evaluate(session, name)
    continue_prompt(session, args.prompt)

    show("\n== perplexity on the test set")
    results = compare(session.corpus, args.lang, [out / f"{name}.pt" for name in models])
    write_json(out / "results.json", results)
    show(table(results))
    session.finish()


def evaluate(session, name):
    """Score a model on the test set, which nothing has learnt from."""
    training = session.settings["training"]
    # In blocks as in training: by default fairseq would cut others, of 1,024 tokens.
    flags = {flag: training[flag] for flag in ("sample-break-mode", "tokens-per-sample")}
    session.once(f"evaluating {name} on the test set", session.out / f"{name}.txt", [
        "fairseq-eval-lm", session.binarised, "--user-dir", "talk_fairseq",
        "--path", session.out / f"{name}.pt", "--gen-subset", "test", *words(flags),
        "--max-tokens", 4096, *session.on_device,
    ])  # fmt: skip


def continue_prompt(session, prompt):
    """Show three continuations, sampled from the most likely pieces of each step."""
    written, file = session.out / "continuations.txt", session.out / "prompt.txt"
    if not file.exists() or read_lines(file) != [prompt]:
        remove(written)
        write_lines(file, [prompt])
    session.once("continuing a prompt", written, [
        "fairseq-interactive", session.binarised, "--user-dir", "talk_fairseq",
        "--task", "language_modeling", "--path", session.out / f"{TALK}.pt",
        "--bpe", "sentencepiece",
        "--sentencepiece-model", session.corpus / "sentencepiece.model",
        "--input", file, "--sampling", "--sampling-topk", 40, "--temperature", 0.8,
        "--beam", 3, "--nbest", 3, "--max-len-b", 80, "--seed", 1, *session.on_device,
    ])  # fmt: skip
    show(f"\n== continuations of: {prompt}")
    for line in read_lines(written):
        if line.startswith("D-"):
            show(line.split("\t")[2])


def compare(corpus, language, checkpoints):
    """Return the results, as they are written: ``{"test": {…}, "models": [row, …]}``.

    `corpus` is what prepare_corpus.py wrote, and beside each of the `checkpoints`, as ``NAME.txt``,
    stands what fairseq-eval-lm printed. Raises ValueError unless it has scored all tokens.
    """
    from pipeline.common.perplexity import TestSet, read_model  # takes seconds

    test = TestSet(corpus, language)
    rows = [{"model": "unigram", **test.perplexities(test.unigram_loss)}]
    for checkpoint in checkpoints:
        facts, loss = read_model(checkpoint, test.counts["tokens"])
        rows.append({"model": checkpoint.stem, **facts, **test.perplexities(loss)})
    return {"test": {**test.counts, "unknown tokens": test.unknown}, "models": rows}


def table(results):
    """Return the table as text, with a line on the test set."""
    test, rows = results["test"], []
    tokens = f"{test['tokens']:,}"
    for model in results["models"]:
        counts = [f"{model[name]:,}" if name in model else None for name in HEADER[1:4]]
        token, word = model["perplexity_per_token"], model["perplexity_per_word"]
        rows.append((model["model"], *counts, tokens, f"{token:,.2f}", f"{word:,.1f}"))
    of = f"on {test['sentences']:,} sentences of {test['words']:,} words"
    return f"{markdown(HEADER, rows)}\n\n{of}; unknown tokens: {test['unknown tokens']:,}"


def main(arguments=None):
    """Run the command and return its exit status."""
    parser = options(NAME, __doc__)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", default="Jesus said to them,",
        help="what the TaLK-Conv is to continue (default: %(default)s)")  # fmt: skip
    add("--lang", metavar="LANG", default="en", help="how its files end (default: en)")
    args = parser.parse_args(arguments)
    return run(f"{NAME}.sh", lambda: learn(args), resumes=True)

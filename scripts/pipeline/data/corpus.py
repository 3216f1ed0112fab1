"""Check a corpus of one or two languages, learn a SentencePiece BPE of it, and cut it into pieces.

    prepare_corpus.py --data data/bible-es-en --source-lang es --target-lang en --check
    prepare_corpus.py --data data/bible-es-en --source-lang es --target-lang en --output corpus
    prepare_corpus.py --data data/bible-es-en --source-lang en --output corpus

Reads ``{train,valid,test}.{es,en}``, one sentence a line, also with ``.gz``. Writes the same files
as plain text, ``sentencepiece.model`` (one for both languages), and the sentences as pieces in
``pieces/``, which is what fairseq-preprocess reads. The output folder appears only once all of it
is written.
"""

import gzip
import zlib
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import BadInput
from pipeline.common.files import remove, write_lines
from pipeline.data.archives import most_unpacked
from pipeline.data.benchmarks import SPLITS
from pipeline.data.text import learn_pieces

LONGEST = 1000  # pieces of a sentence to translate; the models take 1,024 positions


def read_sentences(folder, name):
    """Return the lines of ``folder/name`` or ``folder/name.gz``.

    Raises ValueError if the file is missing, empty, has an empty line, or is not UTF-8 text.
    """
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise ValueError(f"{folder / name}: no such file, nor with .gz")
    opened, most = gzip.open if path.suffix == ".gz" else open, most_unpacked(path)
    try:
        with opened(path, "rb") as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text: {error}") from None
    if len(content) > most:
        raise ValueError(f"{path}: over {most:,} bytes are packed in it; expected text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}: not readable as UTF-8 text: line {line}: {error}") from None
    # Not splitlines(): only line feeds end a sentence, for fairseq too.
    lines = [" ".join(line.split()) for line in text.removesuffix("\n").split("\n")]
    if not any(lines):
        raise ValueError(f"{path}: empty; expected one sentence a line")
    if "" in lines:
        raise ValueError(f"{path}: line {lines.index('') + 1} is empty; expected a sentence")
    return lines


def read_corpus(folder, languages):
    """Return ``{"train.es": [sentence, …], …}`` of one language or two.

    Raises ValueError for a file that cannot be used and where the two sides do not fit.
    """
    if len(set(languages)) < len(languages):
        raise ValueError(f"expected two languages, got {languages[0]} twice")
    corpus = {}
    for split in SPLITS:
        names = [f"{split}.{language}" for language in languages]
        corpus.update((name, read_sentences(folder, name)) for name in names)
        first, last = (len(corpus[name]) for name in (names[0], names[-1]))
        if first != last:
            raise ValueError(
                f"{folder}: expected as many lines in {names[0]} as in {names[-1]}, "
                f"got {first} and {last}"
            )
    return corpus


def prepare(corpus, languages, vocabulary, output, cut_source=None):
    """Write the folder ``output``, whole or not at all; return ``{name: number of pieces}``.

    A small corpus gives fewer pieces than `vocabulary`. Of each source `cut_source` pieces are
    kept (None: all). Raises ValueError for a sentence to translate that is too long, and if the
    pieces cannot be learnt.
    """
    partial = output.with_name(output.name + ".partial")
    remove(partial)
    (partial / "pieces").mkdir(parents=True)
    training = (line for language in languages for line in corpus[f"train.{language}"])
    model = partial / "sentencepiece.model"
    pieces = learn_pieces(training, vocabulary, model, character_coverage=1.0)
    counts = {}
    for name, sentences in corpus.items():
        encoded = pieces.encode(sentences, out_type=str)
        if cut_source is not None and name.endswith(f".{languages[0]}"):
            encoded = [sentence[:cut_source] for sentence in encoded]
        lengths = [len(sentence) for sentence in encoded]
        if len(languages) == 2 and max(lengths) > LONGEST:
            raise ValueError(
                f"{name}: expected at most {LONGEST} pieces a sentence, got {max(lengths)} in line "
                f"{lengths.index(max(lengths)) + 1}; shorten it, or keep the first N pieces of "
                "each source with --cut-source N of prepare_corpus.py"
            )
        counts[name] = sum(lengths)
        write_lines(partial / name, sentences)
        write_lines(partial / "pieces" / name, map(" ".join, encoded))
    partial.rename(output)
    return counts


def parse(arguments):
    """Return the options of the command. Raises BadInput."""
    parser = command.parser("prepare_corpus.py", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the corpus")
    add("--source-lang", required=True)
    add("--target-lang", help="leave out for a corpus of one language")
    add("--vocabulary", type=int, default=4000, help="pieces to learn (default: 4000)")
    add("--cut-source", type=int, metavar="N", help="keep the first N pieces of each source; a "
        "document may have 1,000")  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder to write")
    what.add_argument("--check", action="store_true", help="only check the corpus")
    args = parser.parse_args(arguments)
    if args.cut_source is not None and args.cut_source < 1:
        raise BadInput(f"--cut-source: expected at least 1 piece, got {args.cut_source}")
    if args.cut_source is not None and args.target_lang is None:
        raise BadInput("--cut-source: expected --target-lang with it, got none")
    return args


def main(arguments=None):
    """Run the command; one line and status 2 for input that cannot be used."""

    def body():
        args = parse(arguments)
        languages = [language for language in (args.source_lang, args.target_lang) if language]
        corpus = read_corpus(args.data, languages)
        if args.check:
            return
        counts = prepare(corpus, languages, args.vocabulary, args.output, args.cut_source)
        for split in SPLITS:
            names = [f"{split}.{language}" for language in languages]
            sizes = " and ".join(f"{counts[name]:,}" for name in names)
            sentences = "sentence pairs" if len(names) == 2 else "sentences"
            print(f"{split}: {len(corpus[names[0]]):,} {sentences}, {sizes} pieces")

    return command.run("prepare_corpus.py", body, (BadInput, OSError, ValueError))

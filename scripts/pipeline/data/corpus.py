"""Check a corpus of one or two languages, learn a SentencePiece BPE of it, and cut it into pieces.

    prepare_corpus.py --data data/bible-es-en --source-lang es --target-lang en --check
    prepare_corpus.py --data data/bible-es-en --source-lang es --target-lang en --output corpus
    prepare_corpus.py --data data/bible-es-en --source-lang en --output corpus

Reads ``{train,valid,test}.{es,en}``, one sentence a line, also with ``.gz``. Writes the same files
as plain text, ``sentencepiece.model`` (one for both languages), and the sentences as pieces in
``pieces/``, which is what fairseq-preprocess reads. The output folder appears only once all of it
is written.
"""

import argparse
import gzip
import shutil
import sys
import zlib
from pathlib import Path

from pipeline.data.archives import most_unpacked

SPLITS = ("train", "valid", "test")
LONGEST = 1000  # pieces of a sentence to translate; the models take 1,024 positions


def unpack(path, most):
    """The bytes in a gzipped file, up to about `most`: a file may declare, or hold, any number."""
    content = bytearray()
    with gzip.open(path, "rb") as file:
        while len(content) <= most and (part := file.read(1 << 24)):
            content += part
    return content


def read_sentences(folder, name):
    """The lines of ``folder/name`` or ``folder/name.gz``.

    Raises ValueError if the file is missing, empty, has an empty line, or is not UTF-8 text.
    """
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise ValueError(f"{folder / name}: no such file, nor with .gz")
    most = most_unpacked(path)
    try:
        content = path.read_bytes() if path.suffix != ".gz" else unpack(path, most)
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
    """``{"train.es": [sentence, …], …}`` of one language or two.

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


def learn_pieces(corpus, languages, vocabulary, path):
    """Write ``path``, one BPE of all `languages`, and return it.

    A small corpus gives fewer pieces than `vocabulary`. Raises ValueError if it cannot be learnt.
    """
    import sentencepiece

    sentences = [line for language in languages for line in corpus[f"train.{language}"]]
    with open(path, "wb") as model:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary,
                hard_vocab_limit=False,
                character_coverage=1.0,
                normalization_rule_name="identity",  # the reference is not normalised either
                minloglevel=2,
            )
        except RuntimeError as error:  # for one, fewer pieces than the text has characters
            raise ValueError(f"SentencePiece: {error}") from None
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def write_lines(path, lines):
    """One line each."""
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def prepare(corpus, languages, vocabulary, output, cut_source=None):
    """Write the folder ``output``, whole or not at all; return ``{name: number of pieces}``.

    Of each source `cut_source` pieces are left, if it is given. Raises ValueError for a sentence to
    translate that is too long, and as :func:`learn_pieces`.
    """
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "pieces").mkdir(parents=True)
    pieces = learn_pieces(corpus, languages, vocabulary, partial / "sentencepiece.model")
    counts = {}
    for name, sentences in corpus.items():
        encoded = pieces.encode(sentences, out_type=str)
        if cut_source is not None and name.endswith(f".{languages[0]}"):
            encoded = [sentence[:cut_source] for sentence in encoded]
        longest = max(map(len, encoded))
        if len(languages) == 2 and longest > LONGEST:
            raise ValueError(f"{name}: expected at most {LONGEST} pieces a sentence, got {longest}")
        counts[name] = sum(map(len, encoded))
        write_lines(partial / name, sentences)
        write_lines(partial / "pieces" / name, map(" ".join, encoded))
    partial.rename(output)
    return counts


def main():
    """Run the command; one line and status 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpus")
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", help="leave out for a corpus of one language")
    parser.add_argument(
        "--vocabulary", type=int, default=4000, help="pieces to learn (default: 4000)"
    )
    parser.add_argument(
        "--cut-source",
        type=int,
        metavar="N",
        help="keep the first N pieces of each source; a document may have 1,000",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder to write")
    what.add_argument("--check", action="store_true", help="only check the corpus")
    args = parser.parse_args()
    if args.cut_source is not None and args.cut_source < 1:
        parser.error(f"--cut-source: expected at least 1 piece, got {args.cut_source}")
    if args.cut_source is not None and args.target_lang is None:
        parser.error("--cut-source: expected --target-lang with it, got none")
    languages = [args.source_lang]
    if args.target_lang is not None:
        languages.append(args.target_lang)
    try:
        corpus = read_corpus(args.data, languages)
        if args.check:
            return
        counts = prepare(corpus, languages, args.vocabulary, args.output, args.cut_source)
    except (OSError, ValueError) as error:
        print(f"prepare_corpus.py: {error}", file=sys.stderr)
        sys.exit(2)
    for split in SPLITS:
        names = [f"{split}.{language}" for language in languages]
        sizes = " and ".join(f"{counts[name]:,}" for name in names)
        sentences = "sentence pairs" if len(names) == 2 else "sentences"
        print(f"{split}: {len(corpus[names[0]]):,} {sentences}, {sizes} pieces")

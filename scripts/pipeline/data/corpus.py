"""Check a corpus of one or two languages, learn a SentencePiece BPE of it, and cut it into pieces.

    prepare_corpus.py --data data/bible-es-en --source-lang es --target-lang en --output corpus
    prepare_corpus.py --data data/bible-es-en --source-lang en --output corpus

Reads ``{train,valid,test}.{es,en}``, one sentence a line, also with ``.gz``. Writes the same files
as plain text, ``sentencepiece.model`` (one for both languages), and the sentences as pieces in
``pieces/``, which is what fairseq-preprocess reads. The output folder appears only once all of it
is written.
"""

import gzip
import hashlib
import json
import zlib
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import BadInput
from pipeline.common.files import is_taken, remove, write_lines
from pipeline.common.folder import Folder
from pipeline.common.systems import words
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
    lines = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for line in file:  # only line feeds end a sentence, for fairseq too
                lines.append(" ".join(line.decode().removeprefix("\ufeff").split()))
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        where = f"line {len(lines) + 1}: {error}"
        raise ValueError(f"{path}: not readable as UTF-8 text: {where}") from None
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
            wanted = f"as many lines in {names[0]} as in {names[-1]}"
            raise ValueError(f"{folder}: expected {wanted}, got {first} and {last}")
    return corpus


def prepare(corpus, languages, vocabulary, output, cut_source=None):
    """Write the folder ``output``, whole or not at all; return ``{name: number of pieces}``.

    A small corpus gives fewer pieces than `vocabulary`. Of each source `cut_source` pieces are
    kept (None: all). Raises ValueError for a sentence to translate that is too long, and if the
    pieces cannot be learnt.
    """
    if is_taken(output):
        raise ValueError(f"--output: expected a new folder, got {output}, which holds other things")
    partial = output.with_name(output.name + ".partial")
    remove(partial)
    (partial / "pieces").mkdir(parents=True)
    training = (line for language in languages for line in corpus[f"train.{language}"])
    model = partial / "sentencepiece.model"
    pieces = learn_pieces(training, vocabulary, model, character_coverage=1.0)
    counts = {}
    for name, sentences in corpus.items():
        encoded = pieces.encode(sentences, out_type=str)
        if name.partition(".")[2] == languages[0]:
            encoded = [sentence[:cut_source] for sentence in encoded]
        lengths = [len(sentence) for sentence in encoded]
        if len(languages) == 2 and max(lengths) > LONGEST:
            raise ValueError(
                f"{name}: expected at most {LONGEST} pieces per sentence, got {max(lengths)} in "
                f"line {lengths.index(max(lengths)) + 1}; shorten it, or keep the first N pieces "
                "of each source with --cut-source N of prepare_corpus.py"
            )
        counts[name] = sum(lengths)
        write_lines(partial / name, sentences)
        write_lines(partial / "pieces" / name, map(" ".join, encoded))
    partial.rename(output)
    return counts


class CorpusFolder(Folder):
    """The folder of a run on a corpus, which is cut into pieces and binarised there.

    Args:
        path, what, made: as of Folder; `corpus` and `binarised` are added.
        data, languages: as of `read_corpus`.

    Attributes:
        corpus: the folder that `prepare` writes.
        binarised: what fairseq-preprocess makes of it.
        sides: the flags that name its languages to fairseq.
        facts: what the settings of the run say of the corpus.

    Raises BadInput for a folder or a corpus that cannot be used. Makes nothing.
    """

    def __init__(self, path, what, made, data, languages):
        super().__init__(path, what, ["corpus", "binarised", *made])
        self.check()
        try:
            text = json.dumps(read_corpus(data, languages))
        except (OSError, ValueError) as error:
            raise BadInput(error) from None
        self.data, self.languages = data, languages
        self.sides = dict(zip(("source-lang", "target-lang"), languages))
        self.corpus, self.binarised = path / "corpus", path / "binarised"
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.facts = {"data": str(data), "sha256": sha256, "languages": languages}

    def preparation(self, vocabulary, cut_source=None):
        """Return ``(title, path, words)`` of each command, which writes the path."""
        cutting = words({**self.sides, "vocabulary": vocabulary, "cut-source": cut_source})
        cut = ["python", "scripts/prepare_corpus.py", "--data", self.data, *cutting]
        kind, end = {**self.sides, "joined-dictionary": True}, ""
        if len(self.sides) == 1:
            kind, end = {"only-source": True}, f".{self.languages[0]}"
        prefixes = {f"{split}pref": self.corpus / "pieces" / f"{split}{end}" for split in SPLITS}
        binarise = ["fairseq-preprocess", *words({**kind, "workers": 2, **prefixes})]
        return [
            ("preparing the corpus", self.corpus, [*cut, "--output", self.corpus]),
            ("binarising", self.binarised, [*binarise, "--destdir", self.binarised]),
        ]


def main(arguments=None):
    """Run the command; one line and status 2 for input that cannot be used."""
    parser = command.parser("prepare_corpus.py", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the corpus")
    add("--source-lang", required=True, help="suffix of its (source) files")
    add("--target-lang", help="leave out for a corpus of one language")
    add("--vocabulary", type=command.at_least(1), default=4000, help="pieces to learn "
        "(default: 4000)")  # fmt: skip
    add("--cut-source", type=command.at_least(1), metavar="N", help="keep the first N pieces of "
        "each source; a document may have 1,000")  # fmt: skip
    add("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args(arguments)

    def body():
        languages = [language for language in (args.source_lang, args.target_lang) if language]
        corpus, output = read_corpus(args.data, languages), args.output.absolute()
        counts = prepare(corpus, languages, args.vocabulary, output, args.cut_source)
        for name, count in counts.items():
            print(f"{name}: {len(corpus[name]):,} sentences, {count:,} pieces")

    return command.run("prepare_corpus.py", body, (OSError, ValueError))

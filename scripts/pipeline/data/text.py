"""Text of parallel corpora: reading the published formats, tokenising, cleaning, subwords.

Everything works on lines or chunks of lines, so no corpus is ever in memory.
"""

import functools
import gzip
import multiprocessing
import os
import re
import signal
import sys
import threading
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice, zip_longest

from pipeline.data.archives import EXPANDS, most_unpacked

# What Python or a reader after us may take for the end of a line, though it is none here.
BREAKS = dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
LONGEST_LINE = 10_000_000  # bytes; in what is gzipped a line could be of any length
CHUNK = 1000  # pairs that a worker is given at a time


# --- Reading ---


def lines_of(path):
    """Yield the lines of a UTF-8 text, also gzipped, without surrounding space.

    Bytes that are not UTF-8 become U+FFFD; a warning at the end counts their lines. Raises
    ValueError for gzip that is damaged or incomplete, for a line over `LONGEST_LINE`, and for text
    of over `EXPANDS` times the size of its file.
    """
    most = most_unpacked(path)
    with open(path, "rb") as file:
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    damaged = 0
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 2), b"")):
                if len(line.removesuffix(b"\n")) > LONGEST_LINE:
                    raise ValueError(
                        f"{path}: line {number + 1}: expected at most {LONGEST_LINE:,} bytes"
                    )
                most -= len(line)
                if most < 0:
                    raise ValueError(f"{path}: over {EXPANDS} times its size is packed in it")
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError:
                    damaged += 1
                    text = line.decode("utf-8", errors="replace")
                if number == 0:
                    text = text.removeprefix("\ufeff")
                yield text.translate(BREAKS).strip()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got {error}; get it again") from None
    if damaged:
        print(
            f"warning: {path}: {damaged:,} lines held bytes that are not UTF-8; they became U+FFFD",
            file=sys.stderr,
        )


def pairs_of(source, target, names):
    """Yield pairs of two iterables of lines. Raises ValueError if one of them is longer."""
    source, target = iter(source), iter(target)
    nothing = object()
    count = 0
    for one, two in zip_longest(source, target, fillvalue=nothing):
        if one is nothing or two is nothing:
            rest = 1 + sum(1 for _ in (target if one is nothing else source))
            lines = (count, count + rest) if one is nothing else (count + rest, count)
            raise ValueError(
                f"expected as many lines in {names[0]} as in {names[1]}, got {lines[0]:,} and "
                f"{lines[1]:,}"
            )
        count += 1
        yield one, two


def without_tags(lines):
    """Yield the text of IWSLT's ``train.tags.*`` without metadata; titles lose their tags."""
    for line in lines:
        if not re.search("<(url|talkid|keywords)>", line):
            yield re.sub("</?(title|description)>", "", line).strip()


def segments(lines, path):
    """Yield the segments of an SGML or XML test set, one a line, as they are.

    Raises ValueError for a segment that does not end on its line.
    """
    for number, line in enumerate(lines, 1):
        if re.search("<seg[ >]", line, re.IGNORECASE):
            match = re.fullmatch(r".*<seg[^>]*>(.*)</seg>.*", line, re.IGNORECASE)
            if not match:
                raise ValueError(f"{path}: line {number}: expected <seg …> … </seg>, got {line!r}")
            yield match[1].strip()


END_OF_SENTENCE = tuple(".!?'`\"\u2019\u201d)")


def story(text):
    """Return ``(article, summary)`` of a CNN-DM story, each on one line.

    The summary is what follows ``@highlight`` lines. A line that ends without punctuation is
    closed with `` .``, as the published preparation does.
    """
    article, summary = [], []
    part = article
    for line in text.translate(BREAKS).split("\n"):
        line = " ".join(line.split())
        if line == "@highlight":
            part = summary
        elif line:
            part.append(line if line.endswith(END_OF_SENTENCE) else line + " .")
    return " ".join(article), " ".join(summary)


def without_sentence_tags(line):
    """Return a summary without the tags ``<t>`` and ``</t>`` around its sentences."""
    return " ".join(re.sub("</?t>", " ", line).split())


# --- Writing ---


class Writer:
    """Text files of one split, written side by side."""

    def __init__(self, paths):
        self.paths, self.lines = paths, 0

    def __enter__(self):
        self.files = [open(path, "w", encoding="utf-8", newline="\n") for path in self.paths]
        return self

    def write(self, lines):
        self.lines += 1
        for file, line in zip(self.files, lines):
            file.write(line + "\n")

    def __exit__(self, *error):
        for file in self.files:
            file.close()


# --- Tokenising and cleaning ---


@functools.cache
def moses(language):
    """Return the tokeniser and the punctuation normaliser of a language, one each per process."""
    import sacremoses

    return sacremoses.MosesTokenizer(language), sacremoses.MosesPunctNormalizer(language)


def tokenize(line, language, normalize=False, split_dashes=False, straight=False, lowercase=False):
    """Return a line in Moses tokens, escaped as Moses does (``&apos;``).

    Args:
        normalize: normalise punctuation and drop characters that do not print.
        split_dashes: ``self-made`` becomes ``self @-@ made``.
        straight: a right single quotation mark becomes an apostrophe.
        lowercase: make the text lower-case, as the last step.
    """
    tokenizer, normalizer = moses(language)
    if straight:
        line = line.replace("\u2019", "'")
    if normalize:
        import regex

        line = regex.sub(r"\p{C}", " ", normalizer.normalize(line))
    # Split again: Moses keeps spaces that are not ASCII, at which fairseq splits.
    tokens = " ".join(tokenizer.tokenize(line, aggressive_dash_splits=split_dashes)).split()
    line = " ".join(tokens)
    return line.lower() if lowercase else line


def tokenize_pairs(pairs, languages, **options):
    """Return pairs with both sides tokenised by `tokenize`, in the two languages."""
    return [
        tuple(tokenize(line, lang, **options) for line, lang in zip(pair, languages))
        for pair in pairs
    ]


def is_kept(source, target, longest, ratio):
    """Return whether a pair passes cleaning.

    Both sides have 1 to `longest` tokens, and neither has more than `ratio` times the other's.
    """
    lengths = sorted((len(source.split()), len(target.split())))
    return 1 <= lengths[0] and lengths[1] <= longest and lengths[1] <= ratio * lengths[0]


# --- Subwords ---


def learn_pieces(lines, size, path, **options):
    """Write `path`, a SentencePiece BPE of at most `size` pieces, and return the model.

    Few lines give fewer pieces. `options` are those of SentencePiece's trainer. Raises ValueError
    if it cannot be learnt.
    """
    import sentencepiece

    sentencepiece.set_random_generator_seed(1)  # draws the lines, where not all are read
    with open(path, "wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=file,
                model_type="bpe",
                vocab_size=size,
                hard_vocab_limit=False,
                normalization_rule_name="identity",  # the references are not normalised either
                minloglevel=2,
                **options,
            )
        except RuntimeError as error:  # for one, fewer pieces than the text has characters
            raise ValueError(f"SentencePiece: {error}") from None
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@functools.cache
def pieces_of(model):
    """Return the SentencePiece model of a file, one per process."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def encode_pairs(pairs, model):
    """Return pairs with both sides as pieces, with spaces between."""
    pieces = pieces_of(model).encode(list(chain.from_iterable(pairs)), out_type=str)
    lines = map(" ".join, pieces)
    return list(zip(lines, lines))


def without_bpe(line):
    """Return a line without the marks of subword-nmt."""
    return re.sub("@@( |$)", "", line)


# --- Going through a corpus ---


def follow_parent():
    """Make this worker leave interrupts to its parent, and end when that is killed."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def in_parallel(function, items, workers):
    """Yield ``(item, result)`` in order; `function` takes a list and gives one as long.

    Each worker has a few chunks at a time, so memory does not grow with the corpus.
    """
    items = iter(items)
    chunks = iter(lambda: list(islice(items, CHUNK)), [])
    if workers == 1:
        for chunk in chunks:
            yield from zip(chunk, function(chunk))
        return
    with ProcessPoolExecutor(workers, initializer=follow_parent) as pool:
        waiting = deque()
        for chunk in chunks:
            waiting.append((chunk, pool.submit(function, chunk)))
            if len(waiting) > 2 * workers:
                chunk, result = waiting.popleft()
                yield from zip(chunk, result.result())
        for chunk, result in waiting:
            yield from zip(chunk, result.result())

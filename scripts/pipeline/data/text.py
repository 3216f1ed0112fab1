"""Text of parallel corpora: reading the published formats, tokenising, cleaning, subwords.

Everything works on lines or chunks of lines; only the lines to learn pieces from are in memory.
"""

import functools
import gzip
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice, zip_longest

# What Python or a reader after us may take for the end of a line, though it is none here.
BREAKS = dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
CHUNK = 1000  # pairs that a worker is given at a time


def lines_of(path):
    """Yield the lines of a text, also gzipped, without surrounding space.

    Only a line feed ends a line. Bytes that are not UTF-8 become U+FFFD. Raises ValueError for
    gzip that is damaged or incomplete.
    """
    with open(path, "rb") as file:
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="\n") as file:
            for line in file:
                yield line.translate(BREAKS).strip()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got {error}; get it again") from None


def without_tags(path):
    """Yield the text of IWSLT's ``train.tags.*`` without metadata; titles lose their tags."""
    for line in lines_of(path):
        if not re.search("<(url|talkid|keywords)>", line):
            yield re.sub("</?(title|description)>", "", line).strip()


def segments(path):
    """Yield the segments of an SGML or XML test set, one per line, as they are."""
    for line in lines_of(path):
        if match := re.search("<seg[^>]*>(.*)</seg>", line, re.IGNORECASE):
            yield match[1].strip()


def without_sentence_tags(path):
    """Yield summaries without the tags ``<t>`` and ``</t>`` around their sentences."""
    for line in lines_of(path):
        yield " ".join(re.sub("</?t>", " ", line).split())


def pairs_of(paths, read=lines_of):
    """Yield the lines of files side by side. Raises ValueError if one has more than another."""
    for number, lines in enumerate(zip_longest(*map(read, paths))):
        if None in lines:
            names = " as in ".join(path.name for path in paths)
            raise ValueError(f"expected as many lines in {names}, got {number:,} in the shorter")
        yield lines


class Writer(ExitStack):
    """Text files that are written side by side, and how many lines each has."""

    def __init__(self, paths):
        super().__init__()
        self.lines, self.files = 0, []
        for path in paths:
            self.files.append(self.enter_context(open(path, "w", encoding="utf-8", newline="\n")))

    def write(self, lines):
        self.lines += 1
        for file, line in zip(self.files, lines):
            file.write(line + "\n")


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
                max_sentence_length=1_000_000,  # bytes; longer lines are not learnt from
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

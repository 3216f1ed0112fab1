"""Prepare a benchmark of the papers: from published archives to a folder that fairseq trains on.

``scripts/prepare_BENCHMARK.sh`` runs this. data/benchmarks.yaml says what a benchmark consists of
and how many lines it has. The stages are

    plain -> tokenized -> pieces -> data-bin

They work in ``OUTPUT.partial/made``, which becomes OUTPUT. Its ``prepared.json`` says which stages
are done; so a run that was stopped goes on with the stage it was in.
"""

import functools
import logging
import sys
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, closing
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from pipeline.common import command
from pipeline.common.command import BadInput, Failed
from pipeline.common.files import is_taken, read_json, remove, write_json
from pipeline.common.folder import Folder, show
from pipeline.common.machine import cores
from pipeline.common.paths import ROOT
from pipeline.data import text
from pipeline.data.archives import URL, download, gather
from pipeline.data.benchmarks import BENCHMARKS, SPLITS, archives_of, describe, fits, how_to_get


class Preparation:
    """What is asked for, the folder where it is made, and what is found out on the way.

    `prepared` becomes ``prepared.json``.
    """

    def __init__(self, name, args):
        self.name, self.args, self.benchmark = name, args, BENCHMARKS[name]
        self.output = Path(args.output or ROOT / "data-bin" / name).resolve()
        self.folder = self.output.with_name(f"{self.output.name}.partial") / "made"
        self.languages = self.benchmark.languages
        self.vocabulary = args.vocabulary or self.benchmark.vocabulary
        source, target = [*self.languages, None][:2]
        self.prepared = {
            "benchmark": name,
            "source_lang": source,
            "target_lang": target,
            "tokenizer": self.benchmark.tokenizer,
            "lowercase": self.benchmark.lowercase,
            "subwords": "sentencepiece" if target else "none",
            "lines": {},
            "checks": [],
            "settings": {
                "data": args.data,
                "download": args.download,
                "pretokenized": args.pretokenized,
                "vocabulary": self.vocabulary,
            },
            "stages": [],
        }

    def check(self, what, found, published, exact=True):
        """Note a number beside the published ones.

        Raises ValueError if an `exact` one is none of these, unless --other-counts was given. Any
        other may differ by one in fifty; beyond that a warning is printed.
        """
        values = {"what": what, "found": found, "published": published, "exact": exact}
        self.prepared["checks"].append(values)
        if fits(values):
            return
        numbers = " or ".join(f"{number:,}" for number in published)
        message = f"{what}: expected {'' if exact else 'about '}{numbers}, got {found:,}"
        if exact and not self.args.other_counts:
            raise ValueError(f"{message} (--other-counts, if the data is other on purpose)")
        print(f"warning: {message}", file=sys.stderr)

    def check_cleaned(self, made):
        """Check the number of pairs that cleaning left, if it counts what is `made`."""
        if self.benchmark.clean != made:
            return
        for split in ("train", "valid") if self.benchmark.valid_every else ("train",):
            found, published = self.prepared["lines"][split], self.benchmark.lines[split]
            self.check(f"pairs of {split}", found, published, exact=False)

    def paths(self, prefix, split):
        """Return the files of a split, one a language."""
        return [self.folder / f"{prefix}{split}.{lang}" for lang in self.languages]

    def go_through(self, function, prefix, split, made):
        """Yield ``(pair, result)`` of `in_parallel` over a split with a progress bar.

        The results are what is `made`: "tokens" or "pieces". Where cleaning counts these, the pairs
        that it drops are left out.
        """
        benchmark, pairs = self.benchmark, text.pairs_of(self.paths(prefix, split))
        cleaning = split == "train" and benchmark.clean == made
        for pair, result in tqdm(
            text.in_parallel(function, pairs, self.args.workers),
            desc=split,
            total=self.prepared["lines"][split],
            unit=" lines",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,
        ):
            if not cleaning or text.is_kept(*result, benchmark.longest, benchmark.ratio):
                yield pair, result


def write_plain(prep):
    """Write ``{train,valid,test}.LANG``, one sentence per line, from the published files."""
    benchmark, downloads = prep.benchmark, Path(prep.args.downloads)
    archives = {PurePosixPath(url).name: starts for url, starts in benchmark.archives.items()}
    locations = [
        download(place, downloads) if URL.match(place) else Path(place) for place in prep.args.data
    ]
    for place in locations:
        if not place.exists():
            raise ValueError(f"--data: expected a folder, a file or an address, got {place}")
    found = gather(benchmark.files, locations, archives, prep.folder / "extracted")
    missing = [name for name in benchmark.files if name not in found]
    if missing and prep.args.download:
        fetched = [download(address, downloads) for address in archives_of(missing, benchmark)]
        found |= gather(missing, fetched, archives, prep.folder / "fetched")
        missing = [name for name in missing if name not in found]
    if missing:
        raise ValueError(how_to_get(missing, benchmark))
    for split in dict.fromkeys(part.split for part in benchmark.parts):
        with text.Writer(prep.paths("", split)) as writer:
            for part in benchmark.parts:
                if part.split == split:
                    before = writer.lines
                    for lines in text.pairs_of([found[name] for name in part.files], part.read):
                        writer.write(lines)
                    what = f"lines of {' and '.join(part.files)}"
                    prep.check(what, writer.lines - before, part.lines)
        prep.prepared["lines"][split] = writer.lines


def write_tokenized(prep):
    """Write ``tokenized.{train,valid,test}.LANG``, and clean by tokens where that is asked."""
    benchmark, lines = prep.benchmark, prep.prepared["lines"]
    for split in list(lines):
        training = split == "train"
        every = benchmark.valid_every if training else 0
        tokenize = list  # of what comes tokenised
        if benchmark.tokenizer == "moses":
            tokenize = functools.partial(
                text.tokenize_pairs,
                languages=benchmark.languages,
                normalize=benchmark.normalize and training,
                split_dashes=benchmark.split_dashes,
                straight=benchmark.straight and not training,
                lowercase=benchmark.lowercase,
            )
        with ExitStack() as stack:
            tokens = stack.enter_context(text.Writer(prep.paths("tokenized.", split)))
            if every:
                valid = stack.enter_context(text.Writer(prep.paths("tokenized.", "valid")))
                plain = stack.enter_context(text.Writer(prep.paths("", "valid")))
            found = prep.go_through(tokenize, "", split, "tokens")
            for number, (pair, tokenized) in enumerate(found, 1):
                if every and number % every == 0:
                    valid.write(tokenized)
                    plain.write(pair)
                else:
                    tokens.write(tokenized)
        lines[split] = tokens.lines
        if every:
            lines["valid"] = valid.lines
    prep.check_cleaned("tokens")


def write_pieces(prep):
    """Write ``sentencepiece.model``, learnt from both languages, and all splits as ``pieces.…``."""
    benchmark, model = prep.benchmark, prep.folder / "sentencepiece.model"
    show("learning the pieces")
    learnt = text.learn_pieces(
        (line for pair in text.pairs_of(prep.paths("tokenized.", "train")) for line in pair),
        prep.vocabulary - 3,  # fairseq adds four special words, of which one is among these
        model,
        bos_id=-1,
        eos_id=-1,
        character_coverage=0.9995,  # rarer characters stay whole, if the dictionary has room
        # A token such as &apos;s, l&apos; or 1990s may be one piece, as with subword-nmt.
        split_by_unicode_script=False,
        max_sentencepiece_length=100,
        input_sentence_size=benchmark.learn_from,
        shuffle_input_sentence=True,
    )
    encode = functools.partial(text.encode_pairs, model=model)
    for split in prep.prepared["lines"]:
        with text.Writer(prep.paths("pieces.", split)) as writer:
            for _, pieces in prep.go_through(encode, "tokenized.", split, "pieces"):
                writer.write(pieces)
        prep.prepared["lines"][split] = writer.lines
    prep.check_cleaned("pieces")
    found = learnt.get_piece_size() + 3
    prep.check("words of a dictionary", found, [benchmark.vocabulary], exact=False)


def copy_pretokenized(prep):
    """Write pieces of subword-nmt unchanged, and their tokens, in place of the earlier stages."""
    given = Path(prep.args.pretokenized)
    prep.prepared["subwords"] = "subword_nmt"
    for split in SPLITS:
        paths = [given / path.name for path in prep.paths("", split)]
        needed = split == "test" or (split == "train" and not dictionaries(prep))
        if not needed and not any(path.exists() for path in paths):
            continue
        with (
            text.Writer(prep.paths("pieces.", split)) as pieces,
            text.Writer(prep.paths("tokenized.", split)) as tokens,
        ):
            for pair in text.pairs_of(paths):
                pieces.write(pair)
                tokens.write(map(text.without_bpe, pair))
        prep.prepared["lines"][split] = pieces.lines
        published = prep.benchmark.lines[split]
        prep.check(f"lines of {split}", pieces.lines, published, exact=split == "test")


def dictionaries(prep):
    """Return the dictionaries beside pre-tokenised text, one a language; or none."""
    if not prep.args.pretokenized:
        return []
    paths = [Path(prep.args.pretokenized, f"dict.{lang}.txt") for lang in prep.languages]
    return paths if all(path.exists() for path in paths) else []


def binarize(prep):
    """Write what fairseq-preprocess makes."""
    logging.basicConfig(level=logging.WARNING)  # not a screenful of options
    import talk_fairseq  # noqa: F401  patches fairseq

    from fairseq import options
    from fairseq_cli import preprocess

    for path in prep.folder.glob("dict*.txt"):  # of a run that was stopped
        path.unlink()
    words = ["--destdir", prep.folder, "--workers", prep.args.workers]
    if len(prep.languages) == 2:
        prefix, end = "pieces.", ""
        words += ["--source-lang", prep.languages[0], "--target-lang", prep.languages[1]]
        if given := dictionaries(prep):
            words += ["--srcdict", given[0], "--tgtdict", given[1]]
        elif prep.benchmark.joined:
            words += ["--joined-dictionary"]
        if prep.prepared["subwords"] == "sentencepiece":
            words += ["--nwordssrc", prep.vocabulary, "--nwordstgt", prep.vocabulary]
    else:
        prefix, end = "", f".{prep.languages[0]}"
        words += ["--only-source"]
    for split in prep.prepared["lines"]:
        words += [f"--{split}pref", prep.folder / f"{prefix}{split}{end}"]
    preprocess.main(options.get_preprocessing_parser().parse_args([str(word) for word in words]))


def stages_of(prep):
    """Return ``{name: (function, what nothing needs after it)}``."""
    plain, tokenized = (prep.paths(prefix, "train") for prefix in ("", "tokenized."))
    pieces = [path for split in SPLITS for path in prep.paths("pieces.", split)]
    if prep.args.pretokenized:
        return {"pieces": (copy_pretokenized, tokenized), "data-bin": (binarize, pieces)}
    stages = {"plain": (write_plain, [prep.folder / "extracted", prep.folder / "fetched"])}
    if len(prep.languages) == 1:
        return stages | {"data-bin": (binarize, plain)}
    stages |= {"tokenized": (write_tokenized, plain), "pieces": (write_pieces, tokenized)}
    return stages | {"data-bin": (binarize, pieces)}


def go_on(prep):
    """Run the stages that are left to do."""
    record = prep.folder / "prepared.json"
    prep.prepared = read_json(record, prep.prepared)
    prep.folder.mkdir(exist_ok=True)
    for name, (write, used) in stages_of(prep).items():
        if name not in prep.prepared["stages"]:
            show(f"\n== {prep.name}: {name}")
            write(prep)
            lines = prep.prepared["lines"]
            prep.prepared["lines"] = {split: lines[split] for split in SPLITS if split in lines}
            prep.prepared["stages"].append(name)
            write_json(record, prep.prepared)
        for path in used:
            remove(path)


def prepare(prep):
    """Prepare the folder, whole or not at all, unless it is there already."""
    output, ready, restart = prep.output, prep.output / "prepared.json", prep.args.restart
    if is_taken(output) and not ready.exists():
        raise BadInput(f"--output: expected a new folder, got {output}, which holds other things")
    if ready.exists() and not restart:
        there, again = read_json(ready).get("settings", {}), "--restart prepares it again"
        for name in ("vocabulary", "pretokenized"):
            given, had = getattr(prep.args, name) or "none", there.get(name) or "none"
            if given != had and (given != "none" or name == "pretokenized"):
                raise BadInput(f"--{name}: expected {had} of {output}, got {given}; {again}")
        print(f"{output} is ready; {again}")
        return
    with closing(Folder(prep.folder.parent, "preparation", ["made"], "--output")) as folder:
        settings = prep.prepared["settings"]
        if not restart and not (prep.folder / "prepared.json").exists():  # no stage is done
            there = read_json(folder.settings, settings)
            restart = there | settings != there  # what others have unpacked is of no use
        folder.open(settings, restart)
        go_on(prep)
        remove(output)
        prep.folder.rename(output)
        remove(prep.folder.parent)
    lines = ", ".join(f"{split} {count:,}" for split, count in prep.prepared["lines"].items())
    print(f"{output} is ready: {lines} lines")


def parse(name, arguments):
    """Return the options of ``scripts/prepare_NAME.sh``. Raises BadInput."""
    benchmark = BENCHMARKS[name]
    parser = command.parser(f"prepare_{name}.sh", describe(benchmark))
    parser.set_defaults(vocabulary=None, pretokenized=None)
    add = parser.add_argument
    add("--data", action="append", default=[], metavar="PATH|URL", help="a folder, an archive or "
        "its address; may be given several times")  # fmt: skip
    add("--download", action="store_true", help="get what --data lacks from its published hosts")
    add("--downloads", default=ROOT / "data-bin/downloads", metavar="DIR", help="where downloads "
        "are kept, each under its address (default: data-bin/downloads)")  # fmt: skip
    add("--output", metavar="DIR", help=f"the folder to write (default: data-bin/{name})")
    add("--workers", type=command.at_least(1), default=cores(), metavar="N", help="processes "
        "(default: as many as there are cores)")  # fmt: skip
    add("--other-counts", action="store_true", help="warn of counts that are not as published")
    add("--restart", action="store_true", help="remove what an earlier run left, and prepare again")
    if len(benchmark.languages) == 2:
        add("--vocabulary", type=command.at_least(1), metavar="N", help="words of a dictionary")
        add("--pretokenized", metavar="DIR", help="in place of --data: {train,valid,test}.LANG cut "
            "by subword-nmt; with dict.LANG.txt there, test is enough")  # fmt: skip
    args = parser.parse_args(arguments)
    args.data = [place if URL.match(place) else str(Path(place).resolve()) for place in args.data]
    if args.pretokenized:
        args.pretokenized = str(Path(args.pretokenized).resolve())
        if args.data or args.download or args.vocabulary:
            raise BadInput("--pretokenized: expected no --data, --download or --vocabulary")
    elif not (args.data or args.download):
        raise BadInput(how_to_get(benchmark.files, benchmark))
    return args


def main(arguments=None):
    """Run ``prepare_NAME.sh`` with ``[NAME, argument, …]`` and return its exit status."""
    name, *rest = sys.argv[1:] if arguments is None else arguments

    def body():
        try:
            prepare(Preparation(name, parse(name, rest)))
        except BrokenExecutor:
            raise Failed("a process was killed; try fewer --workers") from None

    return command.run(f"prepare_{name}.sh", body, (BadInput, OSError, ValueError), resumes=True)

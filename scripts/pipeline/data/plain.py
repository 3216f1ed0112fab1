"""The first stage of preparing a benchmark: plain text out of the published files."""

import hashlib
import sys
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from pipeline.data.archives import URL, download, gather, read_members, walk
from pipeline.data.benchmarks import LISTS, PUBLISHED_STORIES, archives_of, how_to_get, missing
from pipeline.data.text import (
    LONGEST_LINE,
    Writer,
    lines_of,
    pairs_of,
    segments,
    story,
    without_sentence_tags,
    without_tags,
)


def write_plain(prep, _, folder):
    """Write ``{train,valid,test}.LANG``, one sentence per line, from the published files."""
    locations = locate(prep)
    benchmark = prep.benchmark
    wanted = set(benchmark.files)
    archives = {PurePosixPath(url).name: starts for url, starts in benchmark.archives.items()}
    copied = folder.with_name("extracted")
    texts = [place for place in locations if place.name not in benchmark.stories]
    paths = gather(wanted, texts, archives, copied)
    if benchmark.stories and not any(name in paths for name in wanted):
        lists = gather(set(LISTS.values()), texts, {}, copied)
        if lists or not prep.args.download:
            return write_stories(prep, lists, locations, folder)
    if prep.args.download:
        for address in archives_of(missing(benchmark, paths), benchmark):
            texts.append(download(address, Path(prep.args.downloads)))
        paths = gather(wanted, texts, archives, copied)
    lacking = missing(benchmark, paths)
    if lacking:
        raise ValueError(how_to_get(lacking, benchmark))
    with ExitStack() as stack:
        writers = {}
        for choices in benchmark.parts:
            part = next(part for part in choices if paths.keys() >= set(part.files))
            if part.split not in writers:
                files = prep.languages_of(folder, "", part.split)
                writers[part.split] = stack.enter_context(Writer(files))
            read_part(prep, part, [paths[name] for name in part.files], writers[part.split])
        for split, writer in writers.items():
            prep.prepared["lines"][split] = writer.lines
    if any(part.format == "sentence tags" for choices in benchmark.parts for part in choices):
        prep.prepared["tokenizer"] = "none"  # these come tokenised


def locate(prep):
    """Return the folders and files of ``--data``; what is an address is downloaded."""
    locations = []
    for place in prep.args.data:
        if URL.match(place):
            locations.append(download(place, Path(prep.args.downloads)))
        elif Path(place).exists():
            locations.append(Path(place))
        else:
            raise ValueError(f"--data: expected a folder, a file or an address, got {place}")
    return locations


def read_part(prep, part, paths, writer):
    """Append the lines of some files, and check how many they are."""
    before, tokens = writer.lines, 0
    readers = {
        "text": lines_of,
        "tags": lambda path: without_tags(lines_of(path)),
        "segments": lambda path: segments(lines_of(path), path),
        "sentence tags": lambda path: map(without_sentence_tags, lines_of(path)),
    }
    sides = [readers[part.format](path) for path in paths]
    name = part.files[0] if len(paths) == 1 else " and ".join(part.files)
    for lines in pairs_of(*sides, part.files) if len(sides) == 2 else zip(*sides):
        writer.write(lines)
        if part.tokens:
            tokens += len(lines[0].split()) + 1
    prep.check(f"lines of {name}", writer.lines - before, part.lines)
    if part.tokens:
        prep.check(f"words of {name}, ends of line among them", tokens, (part.tokens,))


def write_stories(prep, lists, locations, folder):
    """Write CNN-DM's plain text from its story files, in the order of the lists of addresses.

    A story's file is named by the SHA-1 of its address. The stories of all lists go to one file
    first, as they come, since an archive can only be read in its own order.
    """
    absent = [name for name in LISTS.values() if name not in lists]
    if absent:
        how = how_to_get(prep.benchmark.files, prep.benchmark)
        raise ValueError(f"missing {', '.join(absent)}; or {how}")
    names = {}
    for split, name in LISTS.items():
        addresses = [line for line in lines_of(lists[name]) if line]
        prep.check(f"lines of {name}", len(addresses), (PUBLISHED_STORIES[split],))
        names[split] = [hashlib.sha1(line.encode()).hexdigest() for line in addresses]
    listed = set().union(*names.values())
    places = {}  # of each story in the file: where it starts, and its length

    def take(name, stream):
        name = PurePosixPath(name)
        if name.suffix == ".story" and name.stem in listed and name.stem not in places:
            text = stream.read(LONGEST_LINE + 1)  # a story becomes a line
            if len(text) > LONGEST_LINE:
                raise ValueError(f"{name.name}: expected at most {LONGEST_LINE:,} bytes")
            places[name.stem] = (spool.tell(), len(text))
            spool.write(text)

    files, archives = walk(locations, prep.benchmark.stories)
    spooled = folder / "stories"
    with open(spooled, "wb+") as spool:
        for path in tqdm(files, desc="story files", mininterval=10, disable=not files):
            if path.suffix == ".story":
                with open(path, "rb") as stream:
                    take(path.name, stream)
        for archive in archives:
            print(f"reading {archive}", file=sys.stderr, flush=True)
            read_members(archive, take)
        for split, hashes in names.items():
            there = [name for name in hashes if name in places]
            if not there:
                raise ValueError(f"no story of {LISTS[split]} is there. {prep.benchmark.elsewhere}")
            prep.check(f"stories of {LISTS[split]}", len(there), (len(hashes),))
            with Writer(prep.languages_of(folder, "", split)) as writer:
                for name in there:
                    spool.seek(places[name][0])
                    text = spool.read(places[name][1])
                    try:
                        writer.write(story(text.decode("utf-8")))
                    except UnicodeDecodeError as error:
                        raise ValueError(f"{name}.story: expected UTF-8, got {error}") from None
            prep.prepared["lines"][split] = writer.lines
    spooled.unlink()

"""Reading what fairseq-generate and fairseq-interactive wrote."""

import re

from pipeline.common.files import read_lines


def generated_file(path):
    """Return a file, or of the folder of ``--results-path`` the one ``generate-SPLIT.txt``.

    Raises ValueError if there is none or there are several.
    """
    found = sorted(path.glob("generate-*.txt")) if path.is_dir() else [path]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{path}: expected one generate-*.txt, got {names}")
    return found[0]


def lines_of_kind(lines, kind):
    """Return ``{sentence number: text}`` of the lines of one kind.

    Args:
        kind: "S" (source), "T" (target), "H" (hypothesis as tokens) or "D" (detokenised).
            Of several hypotheses of a sentence the first counts, which is the best.
    """
    score = r"[^\t]*\t" if kind in "HD" else ""
    found = {}
    for line in lines:
        if match := re.fullmatch(rf"{kind}-(\d+)\t{score}(.*)", line):
            found.setdefault(int(match[1]), match[2])
    return found


def read_hypotheses(path, count, kind="D"):
    """Return the hypotheses in fairseq-generate's output, in the order of the test set.

    Args:
        path: the file, or the folder of ``--results-path``.
        count: sentences of the test set.
        kind: as for `lines_of_kind`.

    Raises ValueError unless there is one for each sentence.
    """
    file = generated_file(path)
    found = lines_of_kind(read_lines(file), kind)
    if found.keys() != set(range(count)):
        lost = sorted(set(range(count)) - found.keys())
        raise ValueError(
            f"hypotheses: expected {count:,} in {file}, one a line of the test set, got "
            f"{len(found):,}" + (f"; line {lost[0] + 1} is the first without one" if lost else "")
        )
    return [found[number] for number in range(count)]

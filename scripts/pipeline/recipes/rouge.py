"""Prints ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum: mean F-measures in percent, by the package
rouge-score with stemming. HYPOTHESES and REFERENCES are text files of one summary a line, in the
same order. HYPOTHESES may also be what fairseq-generate printed or the folder of its
--results-path; its T- lines are then the references, unless REFERENCES is given.

ROUGE-L takes a summary as one sequence of words, ROUGE-Lsum sentence by sentence; the papers'
ROUGE-L, by the Perl program, is the latter. --sentence-separator tells the sentences of a line
('<n>', where that marks them; ' . ' for tokenised text); without it, both scores are the same.
"""

import json
from importlib.metadata import version
from pathlib import Path

from pipeline.common import command
from pipeline.common.files import read_lines
from pipeline.common.logs import generated_file, lines_of_kind
from talk_fairseq.rouge import rouge


def read_summaries(path):
    """Return ``(hypotheses, references or None)`` of a text file or of fairseq-generate's output.

    Raises ValueError where a sentence has no hypothesis, or for text that is not UTF-8; OSError.
    """
    path = generated_file(path)
    lines = read_lines(path)
    hypotheses, references = (lines_of_kind(lines, kind) for kind in "DT")
    if not path.name.startswith("generate-") and not hypotheses:
        return lines, None
    numbers = range(max([*hypotheses, *references], default=0) + 1)
    for kind, found in (("D", hypotheses), ("T", references or hypotheses)):
        if missing := [number for number in numbers if number not in found]:
            raise ValueError(f"{path}: expected {kind}-{missing[0]} of fairseq-generate, got none")
    # An unknown word of a reference must not match one of a hypothesis.
    known = {n: text.replace("<<unk>>", "unknowninreference") for n, text in references.items()}
    return [hypotheses[n] for n in numbers], [known[n] for n in numbers] if known else None


def score(hypothesis_path, reference_path=None, sentence_separator=None):
    """Return the scores and how they were made, as a dictionary that JSON can hold.

    Raises ValueError for files that do not fit, are damaged or empty; OSError.
    """
    hypotheses, references = read_summaries(hypothesis_path)
    if reference_path is not None:
        references = read_lines(reference_path)
    if references is None:
        wanted = f"expected a file, got none, nor T- lines in {hypothesis_path}"
        raise ValueError(f"REFERENCES: {wanted}")
    scores = rouge(hypotheses, references, sentence_separator)
    return {
        "tool": "rouge-score",
        "version": version("rouge-score"),
        "sentence_separator": sentence_separator,
        "summaries": len(references),
        **{kind: round(value, 4) for kind, value in scores.items()},
    }


def table(result):
    """Return the scores for a person."""
    names = ("1", "2", "L", "Lsum")
    lines = [f"{'ROUGE-' + name:<10} {result['rouge_' + name.lower()]:.2f}" for name in names]
    sentences = "a summary is one sentence"
    if separator := result["sentence_separator"]:
        sentences = f"sentences separated by {separator!r}"
    how = f"{result['tool']} {result['version']}, stemming, {sentences}"
    lines.append(f"F-measures in percent of {result['summaries']:,} summaries ({how})")
    return "\n".join(lines)


def main(arguments=None):
    """Run the command; one line and status 2 for input that cannot be used."""
    parser = command.parser("evaluate_rouge.sh", __doc__)
    add = parser.add_argument
    add("hypotheses", metavar="HYPOTHESES", type=Path)
    add("references", metavar="REFERENCES", type=Path, nargs="?")
    add("--sentence-separator", metavar="TEXT", help="what separates the sentences of a summary")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)

    def body():
        result = score(args.hypotheses, args.references, args.sentence_separator)
        print(json.dumps(result) if args.json else table(result))

    return command.run("evaluate_rouge.sh", body, (ImportError, OSError, ValueError))

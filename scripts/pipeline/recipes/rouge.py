"""Score summaries by ROUGE; see scripts/evaluate_rouge.sh --help."""

import json
from pathlib import Path

from pipeline.common import command
from pipeline.common.generated import generated_file, lines_of_kind
from talk_fairseq.rouge import rouge, version

DESCRIPTION = """\
Prints ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum: mean F-measures in percent, by the package
rouge-score with stemming. HYPOTHESES and REFERENCES are text files of one summary a line, in the
same order. HYPOTHESES may also be what fairseq-generate printed or the folder of its
--results-path; its T- lines are then the references, unless REFERENCES is given.

ROUGE-L takes a summary as one sequence of words, ROUGE-Lsum sentence by sentence; the papers'
ROUGE-L, by the Perl program, is the latter. --sentence-separator tells the sentences of a line
('<n>', where that marks them; ' . ' for tokenised text); without it, both scores are the same.
"""
EXAMPLES = """\
examples:
  scripts/evaluate_rouge.sh summaries.txt references.txt
  scripts/evaluate_rouge.sh generated/ data-bin/cnn_dm/test.target --sentence-separator ' . '
  scripts/evaluate_rouge.sh generated/generate-test.txt --json
"""


def read_text(path):
    """Return the text of a file. Raises ValueError if it is empty or not UTF-8; OSError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # only line feeds end a line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error}") from None
    if not text:
        raise ValueError(f"{path}: expected one summary a line, got an empty file")
    return text


def read_hypotheses(path):
    """Return ``(hypotheses, references or None)`` of a text file or of fairseq-generate's output.

    Raises ValueError for damaged output of fairseq-generate; OSError.
    """
    path = generated_file(path) if path.is_dir() else path
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")
    hypotheses, references = (lines_of_kind(lines, kind) for kind in "DT")
    if not path.name.startswith("generate-") and not hypotheses:
        return lines, None
    if not text.endswith("\n"):
        raise ValueError(f"{path}: expected whole lines of fairseq-generate, got one cut short")
    numbers = range(len(hypotheses))
    if not hypotheses or hypotheses.keys() != set(numbers):
        missing = sorted(set(range(max(hypotheses, default=0) + 1)) - hypotheses.keys())
        raise ValueError(f"{path}: expected a D- line of each sentence, got none of {missing[0]}")
    if references and references.keys() != hypotheses.keys():
        raise ValueError(
            f"{path}: expected a D- and a T- line of each sentence, "
            f"got {len(hypotheses)} and {len(references)}"
        )
    # An unknown word of a reference must not match one of a hypothesis.
    known = {n: text.replace("<<unk>>", "unknowninreference") for n, text in references.items()}
    return [hypotheses[n] for n in numbers], [known[n] for n in numbers] if known else None


def read_references(path):
    """Return the lines of a file. Raises ValueError if one is empty; OSError."""
    lines = read_text(path).removesuffix("\n").split("\n")
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise ValueError(f"{path}: expected a summary, got an empty line {empty}")
    return lines


def score(hypothesis_path, reference_path=None, sentence_separator=None, stemming=True):
    """Return the scores and how they were made, as a dictionary that JSON can hold.

    Raises ValueError for files that do not fit, are damaged or empty; OSError.
    """
    hypotheses, references = read_hypotheses(hypothesis_path)
    if reference_path is not None:
        references = read_references(reference_path)
    if references is None:
        raise ValueError(
            f"REFERENCES: expected a file, got none, nor T- lines in {hypothesis_path}"
        )
    if len(hypotheses) != len(references):
        raise ValueError(
            f"expected as many hypotheses as references, got {len(hypotheses)} in "
            f"{hypothesis_path} and {len(references)} in {reference_path}"
        )
    scores = rouge(hypotheses, references, sentence_separator, stemming)
    return {
        "tool": "rouge-score",
        "version": version(),
        "stemming": stemming,
        "sentence_separator": sentence_separator,
        "summaries": len(references),
        **{kind: round(value, 4) for kind, value in scores.items()},
    }


def main(arguments=None):
    """Run the command; one line and status 2 for input that cannot be used."""
    parser = command.parser("evaluate_rouge.sh", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("hypotheses", metavar="HYPOTHESES", type=Path)
    add("references", metavar="REFERENCES", type=Path, nargs="?")
    add("--sentence-separator", metavar="TEXT", help="what separates the sentences of a summary")
    add("--no-stemming", action="store_true", help="compare words, not stems")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if args.sentence_separator == "":
        parser.error("--sentence-separator: expected text, got none")

    def body():
        stemming = not args.no_stemming
        result = score(args.hypotheses, args.references, args.sentence_separator, stemming)
        print(json.dumps(result) if args.json else table(result))

    return command.run("evaluate_rouge.sh", body, (ImportError, OSError, ValueError))


def table(result):
    """Return the scores for a person."""
    lines = [
        f"{'ROUGE-' + name:<10} {result['rouge_' + name.lower()]:.2f}"
        for name in ("1", "2", "L", "Lsum")
    ]
    stems = "stemming" if result["stemming"] else "no stemming"
    separator = result["sentence_separator"]
    sentences = (
        f"sentences separated by {separator!r}" if separator else "a summary is one sentence"
    )
    lines.append(
        f"F-measures in percent of {result['summaries']:,} summaries "
        f"({result['tool']} {result['version']}, {stems}, {sentences})"
    )
    return "\n".join(lines)

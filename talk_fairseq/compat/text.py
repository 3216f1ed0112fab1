"""Patches of how fairseq reads text: its lines, its corpora and their lengths."""

import contextlib
import functools
import itertools
import sys

import fairseq.file_chunker_utils
import torch

from talk_fairseq.compat.models import end_commands_in_one_line
from talk_fairseq.compat.patching import patches, patches_command


def utf8_lines(file, name):
    """Yield the lines of a binary ``file``, ended by line feeds alone, as text.

    A byte order mark is dropped. Raises ValueError that names file and line for bytes that are not
    UTF-8.
    """
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            raise ValueError(f"{name}: line {number}: expected UTF-8, got {got}") from None


# ``fairseq-preprocess`` ends lines at line feeds alone. Without it: they also end at lone carriage
# returns, so that there are more sentences than ``wc -l`` counts, and every later pair is one off.
fairseq.file_chunker_utils.open = functools.partial(open, newline="\n")


@patches_command("interactive", "buffered_read")
def read_lines_of_input(original, input, buffer_size):
    """End lines at line feeds alone in ``fairseq-interactive``, and check that they are UTF-8.

    Raises ValueError that names file and line for other bytes, before anything is translated if
    the file can be read twice. Without it: lines also end at lone carriage returns, so that there
    are more hypotheses than lines.
    """
    with contextlib.ExitStack() as stack:
        if input == "-":
            # What a program puts in place of standard input may hold text alone.
            name, file = "standard input", getattr(sys.stdin, "buffer", map(str.encode, sys.stdin))
        else:
            name, file = input, stack.enter_context(open(input, "rb"))
            if file.seekable():
                for _ in utf8_lines(file, name):
                    pass
                file.seek(0)
        lines = (line.strip() for line in utf8_lines(file, name))
        while buffer := list(itertools.islice(lines, buffer_size)):
            yield buffer


@patches_command("preprocess", "main")
def check_corpora_first(original, args):
    """Check the corpora of ``fairseq-preprocess --user-dir`` before it writes anything.

    Raises FileNotFoundError unless all files are there, and ValueError unless they are UTF-8 and
    have as many lines in both languages. Without it: a missing file is found after the training
    set has been written, and lines that do not match fail in training.
    """
    languages = [args.source_lang] + ([] if args.only_source else [args.target_lang])
    prefixes = [args.trainpref]
    if not args.dict_only:
        prefixes += [*(args.validpref or "").split(","), *(args.testpref or "").split(",")]
    for prefix in filter(None, prefixes):
        lines = {}
        for language in languages:
            path = f"{prefix}.{language}" if language else prefix
            with open(path, "rb") as file:
                lines[path] = sum(1 for _ in utf8_lines(file, path))
        if len(set(lines.values())) > 1:
            raise ValueError(f"expected as many lines in both languages, got {lines}")
    return original(args)


patches_command("preprocess", "main")(end_commands_in_one_line)  # around the check


@patches("fairseq.tasks.fairseq_task.FairseqTask", "filter_indices_by_size")
def name_flags_that_limit_lengths(original, self, *args, **kwargs):
    """Name the flags to raise where a sentence is over the maximum length.

    A trained model keeps its maximum whatever the flags are; ``--model-overrides`` changes that of
    sinusoidal positions. Without it: the error names no flag but one to skip such sentences.
    """
    try:
        return original(self, *args, **kwargs)
    except Exception as error:
        if type(error) is not Exception:
            raise
        flags = "--max-source-positions, --max-target-positions or --tokens-per-sample"
        trained = "of a trained model in --model-overrides, as \"{'max_source_positions': N}\""
        raise ValueError(f"{str(error).rstrip('.')}, or raise {flags} ({trained})") from None


@patches("fairseq.modules.learned_positional_embedding.LearnedPositionalEmbedding", "__call__")
def check_learned_positions(original, self, input, incremental_state=None, positions=None):
    """Raise ValueError that names the flags for more tokens than learned positions.

    Tokens are only counted where there are more columns than positions; a step of decoding takes
    the position of its column. Nothing is checked while a model is compiled or traced, which must
    hold for other lengths too. ``forward`` stays as it is, since TorchScript compiles it. Without
    it: ``IndexError: index out of range in self``, or on a GPU a failed assertion of the device
    that ends the process.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if positions is None and not traced and (longest := input.shape[1]) > self.max_positions:
        if incremental_state is None:
            longest = int(input.ne(self.padding_idx).sum(dim=1).max())
        if longest > self.max_positions:
            raise ValueError(
                f"expected at most {self.max_positions} tokens, one for each learned position, got "
                f"{longest}: train with a larger --max-source-positions, --max-target-positions "
                "or --tokens-per-sample"
            )
    return original(self, input, incremental_state, positions)

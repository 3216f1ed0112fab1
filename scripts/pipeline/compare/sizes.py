"""Models of the same size: how wide a system's layers are."""

import re

import numpy as np

from pipeline.common.models import build_model, parse_words
from pipeline.compare.flags import training_words

TOLERANCE = 0.025  # by which a system may have more or fewer parameters than the reference


def with_width(flags, width):
    """Return the flags of a system with the number `width` in place of FFN."""
    return {
        flag: re.sub(r"\bFFN\b", str(width), value) if isinstance(value, str) else value
        for flag, value in flags.items()
    }


def count_parameters(words):
    """Return the parameters of the model of some words after fairseq-train, without its memory."""
    import torch
    from fairseq import tasks

    options = parse_words(words)  # which do for a model, without the second that a config takes
    with torch.device("meta"):
        model = build_model(options, tasks.setup_task(options))
    return sum(parameter.numel() for parameter in model.parameters())


def reference_size(args, data):
    """Return the number of parameters that all systems should have."""
    return count_parameters(training_words(args, data, args.reference_flags))


def fit(args, data, name, target):
    """Return ``(flags, parameters)`` of a system, with the FFN that comes closest to `target`.

    Widths are multiples of 8. Raises ValueError if that is not within the tolerance.
    """

    def count(width):
        return count_parameters(training_words(args, data, with_width(args.systems[name], width)))

    # The number is a polynomial of the width, of degree 1, or 2 between two such layers.
    sampled = (8, 512, 1024)
    polynomial = np.polyfit(sampled, [count(width) for width in sampled], 2)
    width = min(range(8, 1 << 13, 8), key=lambda width: abs(np.polyval(polynomial, width) - target))
    parameters = count(width)
    if not 1 / (1 + TOLERANCE) <= parameters / target <= 1 + TOLERANCE:
        raise ValueError(
            f"parameters: expected {target:,} within {TOLERANCE:.1%}, got {parameters:,}"
        )
    return with_width(args.systems[name], width), parameters

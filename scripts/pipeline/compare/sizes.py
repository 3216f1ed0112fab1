"""Models of the same size: how wide a system's layers are, and whether it can run."""

import numpy as np

from pipeline.common.models import build_model, configure, parse_words
from pipeline.common.systems import with_width
from pipeline.compare.flags import training_words

TOLERANCE = 0.05  # by which the largest may have more parameters than the smallest


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
    if not 1 / (1 + TOLERANCE / 2) <= parameters / target <= 1 + TOLERANCE / 2:
        raise ValueError(
            f"parameters: expected {target:,} within {TOLERANCE / 2:.1%}, got {parameters:,}"
        )
    return with_width(args.systems[name], width), parameters


def check_sizes(parameters):
    """Raise ValueError unless ``{name: parameters}`` are within the tolerance of each other."""
    if parameters and max(parameters.values()) > (1 + TOLERANCE) * min(parameters.values()):
        counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
        raise ValueError(f"parameters: expected sizes within {TOLERANCE:.0%}, got {counts}")


def try_step(words, device):
    """Make one forward and backward pass over a few sentences; raises what stops it."""
    cfg, task = configure(words)
    task.load_dataset(cfg.dataset.valid_subset)
    dataset = task.dataset(cfg.dataset.valid_subset)
    model, criterion = build_model(cfg.model, task), task.build_criterion(cfg.criterion)
    batch = dataset.collater([dataset[i] for i in range(min(4, len(dataset)))])
    if device == "cuda":
        from fairseq import utils

        model, batch = model.cuda().half(), utils.move_to_cuda(batch)
    criterion(model, batch)[0].backward()

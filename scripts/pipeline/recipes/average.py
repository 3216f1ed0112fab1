"""Average the parameters of several checkpoints of one training run.

    average_checkpoints.py --inputs a.pt b.pt c.pt --output averaged.pt
    average_checkpoints.py --inputs checkpoints/ --last-epochs 5 --output averaged.pt
    average_checkpoints.py --inputs checkpoints/ --last-updates 10 --output averaged.pt
    average_checkpoints.py --inputs checkpoints/ --best 10 --output averaged.pt

The output holds the mean of every floating-point tensor, computed in float64 and rounded once to
its own type. Integers (counters) and all else come from the last input; the optimizer's state is
left out. Files are read one after the other, without running code from them.
"""

import os

import torch

from pipeline.common import command
from talk_fairseq.checkpoint_files import read_checkpoint, whole_file

from fairseq.checkpoint_utils import checkpoint_paths

# The number in brackets orders the files.
EPOCHS = r"checkpoint(\d+)\.pt"
UPDATES = r"checkpoint_\d+_(\d+)\.pt"
BEST = r"checkpoint\.best_.+_(-?\d+\.?\d*)\.pt"


def find_checkpoints(folder, pattern, count):
    """Return the ``count`` files of ``folder`` that match and have the highest numbers, in order.

    For `BEST` it is the lowest number unless the run maximized its metric, and the best comes
    last. Raises ValueError if there are fewer files, or best ones by several metrics.
    """
    found = checkpoint_paths(folder, pattern)[::-1]
    if len(found) < count:
        raise ValueError(f"expected {count} files like {pattern} in {folder}, got {len(found)}")
    if pattern == BEST:
        metrics = {name.rpartition("_")[0] for name in found}
        if len(metrics) > 1:
            raise ValueError(f"expected files of one metric, got {' and '.join(sorted(metrics))}")
        if not _maximizes(read_checkpoint(found[0], mmap=True)):
            found.reverse()
    return found[-count:]


def _maximizes(state):
    """Return whether the run that wrote ``state`` looked for the highest value of its metric."""
    if state.get("cfg"):
        return state["cfg"].get("checkpoint", {}).get("maximize_best_checkpoint_metric", False)
    return getattr(state.get("args"), "maximize_best_checkpoint_metric", False)


def average_checkpoints(paths):
    """Return the last checkpoint of ``paths``, with the mean of all in place of its parameters.

    Raises ValueError where keys, shapes or kinds of numbers differ, or a file is broken; OSError
    for one that is missing.
    """
    sums, shapes = {}, None
    for path in paths:
        state = model = None  # frees the one before
        state = read_checkpoint(path, mmap=True)  # the optimizer's state stays on disk
        state.pop("last_optimizer_state", None)
        model = state["model"]
        here = {(key, value.shape, value.is_floating_point()) for key, value in model.items()}
        shapes = shapes or here
        if other := sorted({key for key, _, _ in shapes ^ here}):
            raise ValueError(f"expected tensors as in {paths[0]}, got another {other[0]} in {path}")
        for key, value in model.items():
            if value.is_floating_point():
                if key in sums:
                    sums[key].add_(value)
                else:
                    sums[key] = value.to(torch.float64, copy=True)
    first = _first_names(model)
    for key in list(sums):
        mean = sums.pop(key).div_(len(paths)).to(model[key].dtype)  # frees the sum
        # Names that shared one tensor, as tied embeddings do, share its average: saved once.
        model[key] = model[first[key]] if torch.equal(model[first[key]], mean) else mean
    return state


def _first_names(model):
    """Return, for each tensor's name, the first name under which the same memory is known."""
    names = {}
    return {
        key: names.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), key)
        for key, value in model.items()
    }


def save(state, path):
    """Write ``state`` to ``path``, in a new folder if need be, whole or not at all."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with whole_file(path) as file:
        torch.save(state, file)


def main(arguments=None):
    """Run the command; one line and status 1 for what cannot be averaged."""
    parser = command.parser("average_checkpoints.py", __doc__)
    parser.add_argument("--inputs", nargs="+", required=True, help="checkpoints, or one folder")
    which, count = parser.add_mutually_exclusive_group(), command.at_least(1)
    which.add_argument("--last-epochs", type=count, metavar="N", help="the last N epochs' files")
    which.add_argument("--last-updates", type=count, metavar="N", help="the last N updates' files")
    which.add_argument("--best", type=count, metavar="N", help="N of --keep-best-checkpoints")
    parser.add_argument("--output", required=True, help="file to write")
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    args = parser.parse_args(arguments)
    patterns = {EPOCHS: args.last_epochs, UPDATES: args.last_updates, BEST: args.best}
    choice = [(pattern, count) for pattern, count in patterns.items() if count is not None]

    def body():
        if os.path.exists(args.output) and not args.force:
            raise ValueError(f"expected a new file, got {args.output}, which exists (see --force)")
        paths = args.inputs
        if choice:
            if len(paths) != 1:
                raise ValueError(f"--inputs: expected one folder, got {' '.join(paths)}")
            paths = find_checkpoints(paths[0], *choice[0])
        elif folders := [path for path in paths if os.path.isdir(path)]:
            wanted = "files, or a folder with a choice such as --last-epochs 5"
            raise ValueError(f"--inputs: expected {wanted}, got the folder {folders[0]}")
        save(average_checkpoints(paths), args.output)
        print(f"{args.output}: the average of {' '.join(map(str, paths))}")

    return command.run("average_checkpoints.py", body)

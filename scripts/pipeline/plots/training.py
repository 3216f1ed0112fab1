"""Draw the curves of training runs, from their logs.

    plot_training.py quickstart
    plot_training.py TaLK=checkpoints/iwslt14_de_en/talkconv \\
        Transformer=checkpoints/iwslt14_de_en/transformer --output curves.png

A RUN is what fairseq-train or fairseq-hydra-train printed (`--log-format simple` or `json`), or a
folder with one such file, as the quick starts and scripts/train.sh leave it; of several trainings
in one file the last counts. NAME=RUN gives it a name. The folder of the language models' quick
start gives a curve for each model.

Draws loss, perplexity, the scores of the validation and the learning rate, over updates and over
wall-clock, in which validating and saving count. A run that was resumed goes on with the time of
its checkpoint. Thin lines are training; thick ones, with markers, are validation.
"""

from pathlib import Path

from pipeline.common import command
from pipeline.common.logs import read_runs
from pipeline.plots.curves import curves_figure
from pipeline.plots.figures import save_figure


def named_runs(arguments):
    """Return ``{name: run}`` of the arguments ``PATH`` and ``NAME=PATH``.

    Raises ValueError for what cannot be read, and for a name that is given twice.
    """
    runs = {}
    for argument in arguments:
        name, given, path = argument.partition("=")
        if not given or Path(argument).exists():
            path = Path(argument)
            name = path.name if path.is_dir() else path.stem
            if path.name in ("log.txt", "train.log", "hydra_train.log"):
                name = path.absolute().parent.name
        found = read_runs(path)
        for arch, run in found.items():
            full = name if len(found) == 1 else f"{name} {arch}"
            if full in runs:
                raise ValueError(f"RUN: expected different names, got {full!r} twice; see NAME=RUN")
            runs[full] = run
    return runs


def main(arguments=None):
    """Run the command; one line and status 2 for a run that cannot be read."""
    parser = command.parser("plot_training.py", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="[NAME=]RUN", help="logs, or folders with one")
    add("--output", type=Path, default=Path("curves.png"), help="default: curves.png")
    args = parser.parse_args(arguments)

    def draw():
        runs = named_runs(args.runs)
        save_figure(curves_figure(runs), args.output)
        print(f"written: {args.output} of {', '.join(runs)}")

    return command.run("plot_training.py", draw, (OSError, ValueError))

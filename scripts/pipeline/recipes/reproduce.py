"""Reproduce a row of the papers' tables in one command; see scripts/reproduce.sh --help."""

import shlex
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import BadInput, run_module
from pipeline.common.files import write_whole
from pipeline.common.folder import Folder, show
from pipeline.common.paths import ROOT
from pipeline.common.systems import words
from pipeline.recipes import train
from pipeline.recipes.config import find_config

DESCRIPTION = """\
Prepares the data of configs/NAME.yaml, trains the model, averages its last checkpoints, scores the
test set and appends the result to results/NAME.json, which scripts/results_table.py prints beside
the papers' scores. Stopped and run again, it goes on where it was; what is done is not repeated.
"""
EXAMPLES = """\
examples:
  scripts/reproduce.sh iwslt14_de_en/talkconv --data de-en.tgz
  scripts/reproduce.sh iwslt14_de_en/talkconv --prepare '--download --workers 8' --dry-run
  scripts/reproduce.sh iwslt14_de_en/talkconv --data de-en.tgz --average 1 \\
      optimization.max_update=10                                      # a short trial
"""


def parse(arguments):
    parser = command.parser("reproduce.sh", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a file of configs/, without .yaml")
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the "
        "config's; the result says so")  # fmt: skip
    add("--data", action="append", default=[], metavar="PATH|URL", help="the published archive or "
        "its folder, as for scripts/prepare_BENCHMARK.sh; may be given several times, and not at "
        "all once the data is prepared")  # fmt: skip
    add("--prepare", default="", metavar="OPTIONS", help="more options of "
        "scripts/prepare_BENCHMARK.sh, such as '--workers 8' or --download")  # fmt: skip
    add("--average", type=command.positive(int), metavar="N", help="checkpoints to average "
        "(default: the config's)")  # fmt: skip
    add("--tune", action="store_true", help="choose the length penalty and how many checkpoints to "
        "average on the validation set")  # fmt: skip
    add("--devices", metavar="N", help="as for scripts/train.sh")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="as for scripts/train.sh")
    add("--cpu", action="store_true", help="use no GPU")
    add("--data-bin", metavar="DIR", help="the prepared data (default: data-bin/BENCHMARK)")
    add("--save-dir", metavar="DIR", help="the checkpoints (default: checkpoints/NAME)")
    add("--results", metavar="FILE", help="where the result goes (default: results/NAME.json)")
    add("--dry-run", action="store_true", help="print the command of each step and stop")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--prepare" in given[:-1]:  # argparse takes a value such as --download for an option
        at = given.index("--prepare")
        given[at : at + 2] = [f"--prepare={given[at + 1]}"]
    args = parser.parse_intermixed_args(given)
    given = [word for word in (args.name, *args.overrides) if word is not None]
    names = [word for word in given if "=" not in word]
    if not names:
        raise BadInput("NAME: expected a config such as iwslt14_de_en/talkconv (see --help)")
    if names[1:]:
        raise BadInput(f"NAME: expected one, got {' and '.join(names)} (see --help)")
    args.name, args.overrides = names[0], [word for word in given if "=" in word]
    return args


@dataclass(frozen=True)
class Step:
    """A step of the pipeline: a script of ``scripts/`` and the module that it runs.

    Attributes:
        module: the module, with the words that the script adds.
        words: of the command, which say what is made.
        where: of the command, which say on which devices.
    """

    script: str
    module: tuple
    words: list
    where: list

    def __str__(self):
        return shlex.join(map(str, [f"scripts/{self.script}.sh", *self.words, *self.where]))

    def run(self, lock):
        """Run it while the open file `lock` is locked; return its exit status."""
        show(f"== {self.script}")
        return run_module(*self.module, *self.words, *self.where, lock=lock)


def steps_of(args):
    """Return the folder of the run, the file of the result and the steps.

    Raises BadInput for what a step would refuse, so that it is refused before hours of preparing.
    """
    name = find_config(args.name)[0]
    benchmark = name.partition("/")[0]
    script = f"prepare_{benchmark}"
    data_bin = Path(args.data_bin or ROOT / "data-bin" / benchmark)
    save_dir = Path(args.save_dir or ROOT / "checkpoints" / name)
    results = Path(args.results or ROOT / "results" / f"{name}.json")

    prepare = [word for place in args.data for word in ("--data", place)]
    prepare += shlex.split(args.prepare)
    cpu = words({"cpu": args.cpu})
    where = words({"devices": args.devices}) + cpu
    trained = words({"precision": args.precision}) + args.overrides
    scored = words({"average": args.average, "tune": args.tune}) + args.overrides

    train.plan(train.parse([args.name, "--dry-run", *where, *trained]))
    if not (data_bin / "prepared.json").exists():
        if not (ROOT / f"scripts/{script}.sh").exists():
            raise BadInput(
                f"NAME: expected data in {data_bin}, got none; there is no script for {benchmark}"
            )
        if not prepare:
            raise BadInput(
                f"--data: expected the published data (scripts/{script}.sh --help), got none"
            )
    train_words = [args.name, "--data", data_bin, "--save-dir", save_dir, *trained]
    evaluate_words = [args.name, save_dir, "--data", data_bin, "--results", results, *scored]
    steps = [
        Step("train", ("recipes.train",), train_words, where),
        Step("evaluate", ("recipes.evaluate",), evaluate_words, cpu),
    ]
    if prepare:
        module = ("data.prepare", benchmark)
        steps.insert(0, Step(script, module, ["--output", data_bin, *prepare], []))
    return save_dir, results, steps


def once(step, folder):
    """Run a step unless it has ended well with the same words; return its exit status."""
    done, said = folder.path / f"{step.script}.done", shlex.join(map(str, step.words))
    if done.exists() and done.read_text() == said:
        show(f"== {step.script}: done before")
        return 0
    done.unlink(missing_ok=True)
    (folder.path / "evaluate.done").unlink(missing_ok=True)  # what is trained anew is scored anew
    status = step.run(folder.lock)
    if status == 0:
        write_whole(done, said)
    return status


def reproduce(args):
    """Run what is left to do; return the exit status of the step that failed, if one did."""
    save_dir, results, steps = steps_of(args)
    if args.dry_run:
        print("\n".join(map(str, steps)))
        return 0
    with closing(Folder(save_dir, "run", (), "--save-dir")) as folder:
        folder.acquire()
        for step in steps:
            # Preparing finds out itself what is done, which other runs may have done.
            prepares = step.script.startswith("prepare_")
            if status := step.run(folder.lock) if prepares else once(step, folder):
                return status
    show(f"== the result is in {results}")


def main(arguments=None):
    """Run the command and return its exit status."""
    return command.run("reproduce.sh", lambda: reproduce(parse(arguments)))

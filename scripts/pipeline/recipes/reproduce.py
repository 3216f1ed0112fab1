"""Prepares the data of configs/NAME.yaml, trains the model, averages its last checkpoints, scores
the test set and appends the result to results/NAME.json. Run it again to continue.
"""

import shlex
import sys
from contextlib import closing
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import BadInput, in_shell, run_module
from pipeline.common.files import read_json, write_json, write_whole
from pipeline.common.folder import Folder, show
from pipeline.common.paths import ROOT
from pipeline.common.systems import words
from pipeline.data.benchmarks import BENCHMARKS
from pipeline.recipes import config as configs
from pipeline.recipes import train


def parse(arguments):
    parser = command.parser("reproduce.sh", __doc__)
    add = parser.add_argument
    add("name", metavar="NAME", help="a file of configs/, without .yaml")
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the config's")
    add("--data", action="append", default=[], metavar="PATH|URL", help="the published archive or "
        "its folder, unless the data is prepared; may be given several times")  # fmt: skip
    add("--prepare", default="", metavar="OPTIONS", help="more options of "
        "scripts/prepare_BENCHMARK.sh, such as '--workers 8' or --download")  # fmt: skip
    add("--average", type=command.at_least(1), metavar="N", help="as for scripts/evaluate.sh")
    add("--tune", action="store_true", help="as for scripts/evaluate.sh")
    add("--devices", type=command.at_least(1), metavar="N", help="as for scripts/train.sh")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="as for scripts/train.sh")
    add("--cpu", action="store_true", help="use no GPU")
    add("--data-bin", metavar="DIR", help="the prepared data (default: as for train.sh)")
    add("--save-dir", metavar="DIR", help="the checkpoints (default: as for train.sh)")
    add("--results", metavar="FILE", help="where the result goes (default: results/NAME.json)")
    add("--dry-run", action="store_true", help="print the command of each step and stop")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--prepare" in given[:-1]:  # argparse takes a value such as --download for an option
        at = given.index("--prepare")
        given[at : at + 2] = [f"--prepare={given[at + 1]}"]
    return parser.parse_intermixed_args(given)


def steps_of(args):
    """Return the folder of the run, the file of the result and the steps.

    A step is ``(script, words, where)``: the words of its command say what is made, and `where` on
    which devices. Raises BadInput for what a step would refuse, so that it is refused before hours
    of preparing.
    """
    from pipeline.recipes import evaluate  # with fairseq

    name, config = configs.read_config(args.name)
    config = configs.with_overrides(config, args.overrides)
    benchmark = name.partition("/")[0]
    script = f"prepare_{benchmark}"
    data_bin = configs.chosen_folder(args.data_bin, config, "task.data", name)
    save_dir = configs.chosen_folder(args.save_dir, config, "checkpoint.save_dir", name)
    results = Path(args.results or ROOT / "results" / f"{name}.json")

    prepare = [word for place in args.data for word in ("--data", place)]
    try:
        prepare += shlex.split(args.prepare)
    except ValueError:
        raise BadInput(f"--prepare: expected words of a shell, got {args.prepare!r}") from None
    cpu = words({"cpu": args.cpu})
    where = words({"devices": args.devices}) + cpu
    trained = words({"precision": args.precision}) + args.overrides
    scored = words({"average": args.average, "tune": args.tune}) + args.overrides

    train_words = [args.name, "--data", data_bin, "--save-dir", save_dir, *trained]
    planned = [*map(str, train_words), *where, *words({"dry-run": args.dry_run})]
    *_, config = train.plan(train.parse(planned), has_data=False)
    kept = evaluate.recipe_average(config)[0]
    average = args.average or kept
    configs.check_average(config, average)
    if average > kept > 1:
        raise BadInput(f"--average: expected at most {kept}, which are kept, got {average}")
    configs.read_results(results)
    if not prepare:
        evaluate.read_prepared(name, data_bin)
    elif benchmark not in BENCHMARKS:
        raise BadInput(f"--data: expected none, as there is no scripts/{script}.sh; see --data-bin")
    evaluate_words = [args.name, save_dir, "--data", data_bin, "--results", results, *scored]
    steps = [("train", train_words, where), ("evaluate", evaluate_words, cpu)]
    if prepare:
        steps.insert(0, (script, ["--output", data_bin, *prepare], []))
    return save_dir, results, steps


def reproduce(args):
    """Run what is left to do; return the exit status of the step that failed, if one did."""
    save_dir, results, steps = steps_of(args)
    if args.dry_run:
        print("\n".join(in_shell(script, *words, *where) for script, words, where in steps))
        return 0
    with closing(Folder(save_dir, "run", (), "--save-dir")) as folder:
        folder.acquire()
        if not results.exists():
            (save_dir / "evaluate.done").unlink(missing_ok=True)
        for step in steps:
            if status := once(folder, *step):
                return status
    show(f"== the result is in {results}")


def once(folder, script, words, where):
    """Run a step unless it has ended well with the same words; return its exit status."""
    if benchmark := script.partition("prepare_")[2]:
        # Preparing finds out itself what is done, which other runs may have done.
        show(f"== {script}")
        return run_module("data.prepare", benchmark, *words, lock=folder.lock)
    if script == "train":
        data = words[words.index("--data") + 1]
        of_run, prepared = folder.path / "prepared.json", read_json(Path(data, "prepared.json"))
        if read_json(of_run, prepared) != prepared:
            what = f"a run of the data in {data}, got one of other data in {folder.path}"
            raise BadInput(f"--save-dir: expected {what}; choose another folder")
        write_json(of_run, prepared)
    done, said = folder.path / f"{script}.done", shlex.join(map(str, words))
    if done.exists() and done.read_text() == said:
        show(f"== {script}: done before")
        return 0
    show(f"== {script}")
    done.unlink(missing_ok=True)
    (folder.path / "evaluate.done").unlink(missing_ok=True)  # what is trained anew is scored
    status = run_module(f"recipes.{script}", *words, *where, lock=folder.lock)
    if status == 0:
        write_whole(done, said)
    return status


def main(arguments=None):
    """Run the command and return its exit status."""
    return command.run("reproduce.sh", lambda: reproduce(parse(arguments)), resumes=True)

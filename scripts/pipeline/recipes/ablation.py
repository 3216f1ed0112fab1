"""Trains the rows of Table 7 (configs/iwslt14_de_en/ablation_*.yaml), each from several seeds, and
prints the mean and deviation of tokenised BLEU on the validation set. Run it again to go on where
it stopped. Runs with other settings or on other data need another --save-dir and --results.
"""

import statistics
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import BadInput, Failed, in_shell, one_of, run_module, several
from pipeline.common.files import read_json, write_json
from pipeline.common.paths import ROOT
from pipeline.common.tables import markdown
from pipeline.recipes.config import check_options, from_header, read_config, rows, with_overrides

BENCHMARK = "iwslt14_de_en"


def parse(arguments):
    names = [name.partition("/")[2] for name in rows() if name.startswith(f"{BENCHMARK}/ablation_")]
    parser = command.parser("ablation.sh", __doc__)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the configs'")
    add("--data", type=Path, default=ROOT / "data-bin" / BENCHMARK, help="binarised data "
        f"(default: data-bin/{BENCHMARK})")  # fmt: skip
    add("--save-dir", type=Path, default=ROOT / "checkpoints" / BENCHMARK / "ablation",
        help=f"folder of the runs (default: checkpoints/{BENCHMARK}/ablation)")  # fmt: skip
    add("--results", type=Path, default=ROOT / "results" / BENCHMARK / "ablation.json",
        help=f"file of the scores (default: results/{BENCHMARK}/ablation.json)")  # fmt: skip
    add("--rows", type=several(one_of(names)), default=names, metavar="A,B", help=",".join(names))
    add("--seeds", type=several(command.at_least(0)), default=range(1, 6), help="(default: 1 to 5)")
    add("--cpu", action="store_true", help="use no GPU")
    add("--dry-run", action="store_true", help="print the command of each step and stop")
    return parser.parse_intermixed_args(arguments)


def steps_of(row, seed, args):
    """Return the folder of a run, and the words of the commands that train and score it."""
    folder = args.save_dir.absolute() / row / f"seed_{seed}"
    shared = ["--data", args.data, *(["--cpu"] if args.cpu else []), *args.overrides]
    name = f"{BENCHMARK}/{row}"
    training = ["train", name, "--save-dir", folder, *shared, f"common.seed={seed}"]
    return folder, [training, ["evaluate", name, folder, "--split", "valid", *shared]]


def score(row, seed, args):
    """Train `row` from `seed` unless that is done; return its validation BLEU, or "diverged".

    Raises Failed.
    """
    folder, steps = steps_of(row, seed, args)
    crash = folder / "crash.pt"  # fairseq writes it when gradients are no numbers
    crash.unlink(missing_ok=True)  # of an earlier run
    for script, *words in steps:
        print("$", in_shell(script, *words), flush=True)
        if status := run_module(f"recipes.{script}", *words):
            if crash.exists():
                return "diverged"
            raise Failed(f"{row}, seed {seed}: scripts/{script}.sh failed with status {status}")
    result = read_json(folder / "evaluation/scores.json")
    return round(result["scores"]["tokenised_bleu"]["score"], 2)


def not_the_recipe(row, args):
    """Return what is not the paper's in runs of `row`: ``{"changed": {…}, "other_data": […]}``.

    Raises BadInput for overrides and data that cannot be used.
    """
    from pipeline.recipes import evaluate  # takes seconds

    name, recipe = read_config(f"{BENCHMARK}/{row}")
    config = with_overrides(recipe, args.overrides)
    check_options(config)
    return {
        "changed": evaluate.other_settings(name, recipe, config),
        "other_data": evaluate.other_data(evaluate.read_prepared(name, args.data)),
    }


def in_words(result):
    """Return mean and deviation of the seeds of a row, and how many diverged."""
    numbers = [score for score in result["seeds"].values() if score != "diverged"]
    if not numbers:
        return "diverged"
    words = f"{statistics.mean(numbers):.2f}"
    if len(numbers) > 1:
        words += f" +- {statistics.stdev(numbers):.2f}"
    diverged = len(result["seeds"]) - len(numbers)
    return words + (f", {diverged} diverged" if diverged else "")


def table(results):
    """Return the rows for a person."""
    rows = []
    for row, result in results.items():
        paper = from_header(f"{BENCHMARK}/{row}", "paper").partition(" validation BLEU")[0]
        others = [f"{key} {value}" for key, value in result["changed"].items()]
        others += result["other_data"]
        rows.append([row, paper, in_words(result), len(result["seeds"]), ", ".join(others)])
    return markdown(["row", "paper", "measured", "seeds", "not the recipe"], rows)


def ablate(args):
    """Train and score what has no score yet. Raises BadInput, or Failed for a step that failed."""
    if args.dry_run:
        runs = [steps_of(row, seed, args)[1] for row in args.rows for seed in args.seeds]
        print("\n".join(in_shell(*step) for steps in runs for step in steps))
        return
    others = {row: not_the_recipe(row, args) for row in args.rows}
    results = read_json(args.results, {})
    for row, other in others.items():
        if row in results and any(results[row].get(key) != value for key, value in other.items()):
            got = f"got others in {args.results}; choose another file, and another --save-dir"
            raise BadInput(f"--results: expected results of {row} with the same settings, {got}")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for row in args.rows:
        for seed in args.seeds:
            if str(seed) in results.get(row, {}).get("seeds", {}):
                continue
            found = score(row, seed, args)
            results = read_json(args.results, {})  # to which others may have added
            scores = results.get(row, {}).get("seeds", {}) | {str(seed): found}
            results[row] = {"seeds": scores, **others[row]}
            write_json(args.results, dict(sorted(results.items())))
    print(table(results))


def main(arguments=None):
    """Run the command and return its exit status."""
    return command.run("ablation.sh", lambda: ablate(parse(arguments)), resumes=True)

"""Train and score the ablation of the paper's Table 7; see scripts/ablation.sh --help."""

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from pipeline.common.files import write_whole
from pipeline.recipes.train import (
    CONFIGS,
    ROOT,
    BadInput,
    check_options,
    read_config,
    with_overrides,
)

BENCHMARK = "iwslt14_de_en"

DESCRIPTION = """\
Trains the rows of Table 7 (configs/iwslt14_de_en/ablation_*.yaml), each from several seeds,
averages the last checkpoints, translates the validation set with the row's beam, and prints the
mean and deviation of tokenised BLEU (sacreBLEU without its tokeniser). Run it again to go on where
it stopped: a run that has a score is not repeated. Runs with other settings or on other data say
so, and are kept apart from those of the recipe.
"""


class Failed(Exception):
    """A command that did not do what it should; the message says which."""


def parse(arguments):
    rows = sorted(path.stem for path in (CONFIGS / BENCHMARK).glob("ablation_*.yaml"))
    parser = argparse.ArgumentParser(
        prog="scripts/ablation.sh",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the configs'"
    )
    parser.add_argument("--data", default=str(ROOT / "data-bin" / BENCHMARK), help="binarised data")
    parser.add_argument(
        "--save-dir",
        default=str(ROOT / "checkpoints" / BENCHMARK / "ablation"),
        help="folder of the runs (default: checkpoints/iwslt14_de_en/ablation)",
    )
    parser.add_argument(
        "--results",
        default=str(ROOT / "results" / BENCHMARK / "ablation.json"),
        help="file of the scores (default: results/iwslt14_de_en/ablation.json)",
    )
    parser.add_argument(
        "--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=f"of {', '.join(rows)}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    return parser.parse_intermixed_args(arguments)


def run(name, *command):
    """Run the script `name` beside this one. Raises Failed."""
    print("$", name, *command, flush=True)
    done = subprocess.run(
        [sys.executable, *map(str, (ROOT / "scripts/run.py", name, *command))],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        raise Failed(f"{name} failed with status {done.returncode}")


def diverged(folder):
    """Whether fairseq stopped a run because its gradients were no numbers."""
    return (folder / "crash.pt").exists()


def run_folder(key, seed, args):
    """Where a run of the results' `key` is kept: others than the recipe's have their own folder.

    How many checkpoints are averaged makes no other run.
    """
    row, *others = key.split(" ")
    others = [other for other in others if not other.startswith("checkpoint.keep_last_epochs=")]
    if others:
        own = [*others, str(Path(args.data).absolute())]
        row += "-" + hashlib.sha256("\0".join(own).encode()).hexdigest()[:8]
    return Path(args.save_dir).absolute() / row / f"seed_{seed}"


def score(row, key, seed, args):
    """Train `row` from `seed` where that is not done; its validation BLEU, or "diverged"."""
    name = f"{BENCHMARK}/{row}"
    folder = run_folder(key, seed, args)
    shared = ["--data", args.data, *(["--cpu"] if args.cpu else []), *args.overrides]
    (folder / "crash.pt").unlink(missing_ok=True)  # of an earlier run
    try:
        run("recipes.train", name, "--save-dir", folder, *shared, f"common.seed={seed}")
    except Failed:
        if diverged(folder):
            return "diverged"
        raise
    run("recipes.evaluate", name, folder, "--split", "valid", *shared)
    result = json.loads((folder / "evaluation/scores.json").read_text())
    return round(result["scores"]["tokenised_bleu"]["score"], 2)


def summary(scores):
    """Mean and deviation of the runs that have a number, and how many diverged."""
    numbers = [score for score in scores.values() if score != "diverged"]
    return {
        "mean": round(statistics.mean(numbers), 2) if numbers else None,
        "deviation": round(statistics.stdev(numbers), 2) if len(numbers) > 1 else None,
        "diverged": len(scores) - len(numbers),
    }


def other_settings(row, args):
    """What is not the paper's in runs of `row`: ``{"changed": {key: value}, "other_data": […]}``.

    Raises BadInput for overrides and data that cannot be used.
    """
    from pipeline.recipes import evaluate  # takes seconds

    name, recipe = read_config(f"{BENCHMARK}/{row}")
    config = with_overrides(recipe, args.overrides)
    check_options(config)
    prepared = evaluate.read_prepared(name, Path(args.data), config)
    return {
        "changed": evaluate.other_settings(name, config),
        "other_data": evaluate.other_data(prepared),
    }


def label(row, others):
    """The key of a row's results: runs that are not the paper's stand apart from those that are."""
    changed = [f"{key}={value}" for key, value in others["changed"].items()]
    return " ".join([row, *changed, *(["other data"] if others["other_data"] else [])])


def paper(row):
    """What the header of a config says that the paper reports."""
    text = (CONFIGS / BENCHMARK / f"{row}.yaml").read_text()
    return re.search(r"^# paper: +(\S.*?)( validation BLEU.*)?$", text, re.MULTILINE)[1]


def table(results):
    """The rows for a person; below each what is not the recipe's."""
    lines = [f"{'row':<32}{'paper':>14}{'measured':>16}{'seeds':>7}"]
    for key, result in results.items():
        row = key.partition(" ")[0]
        measured = "diverged" if result["mean"] is None else f"{result['mean']:.2f}"
        if result["deviation"] is not None:
            measured += f" +- {result['deviation']:.2f}"
        if result["mean"] is not None and result["diverged"]:
            measured += f", {result['diverged']} diverged"
        lines.append(f"{row:<32}{paper(row):>14}{measured:>16}{len(result['seeds']):>7}")
        others = [f"{key} {value}" for key, value in result["changed"].items()]
        if others or result["other_data"]:
            lines.append(f"  not the recipe: {', '.join(others + result['other_data'])}")
    return "\n".join(lines)


def main(arguments=None):
    args = parse(arguments)
    try:
        others = {row: other_settings(row, args) for row in args.rows}
    except BadInput as error:
        print(f"ablation.sh: {error}", file=sys.stderr)
        return 2
    path = Path(args.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    for row in args.rows:
        key = label(row, others[row])
        for seed in args.seeds:
            scores = results.get(key, {}).get("seeds", {})
            if str(seed) in scores:
                continue
            try:
                scores[str(seed)] = score(row, key, seed, args)
            except Failed as error:
                print(f"ablation.sh: {row}, seed {seed}: {error}", file=sys.stderr)
                return 1
            results[key] = {"seeds": scores, **summary(scores), **others[row]}
            write_whole(path, json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    print(table(results))
    return 0

"""Train and score the ablation of the paper's Table 7; see scripts/ablation.sh --help."""

import hashlib
import statistics
from pathlib import Path

from pipeline.common import command
from pipeline.common.command import Failed, run_module
from pipeline.common.files import read_json, write_json
from pipeline.common.paths import ROOT
from pipeline.recipes.config import check_options, from_header, read_config, rows, with_overrides

BENCHMARK = "iwslt14_de_en"

DESCRIPTION = """\
Trains the rows of Table 7 (configs/iwslt14_de_en/ablation_*.yaml), each from several seeds,
averages the last checkpoints, translates the validation set with the row's beam, and prints the
mean and deviation of tokenised BLEU (sacreBLEU without its tokeniser). Run it again to go on where
it stopped: a run that has a score is not repeated. Runs with other settings or on other data say
so, and are kept apart from those of the recipe.
"""


def parse(arguments):
    names = [name.partition("/")[2] for name in rows() if name.startswith(f"{BENCHMARK}/ablation_")]
    default = {
        "data": ROOT / "data-bin" / BENCHMARK,
        "save_dir": ROOT / "checkpoints" / BENCHMARK / "ablation",
        "results": ROOT / "results" / BENCHMARK / "ablation.json",
        "rows": names,
        "seeds": [1, 2, 3, 4, 5],
    }
    parser = command.parser("ablation.sh", DESCRIPTION)
    parser.set_defaults(**default)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the configs'")
    add("--data", help=f"binarised data (default: data-bin/{BENCHMARK})")
    add("--save-dir", help=f"folder of the runs (default: checkpoints/{BENCHMARK}/ablation)")
    add("--results", help=f"file of the scores (default: results/{BENCHMARK}/ablation.json)")
    add("--rows", nargs="+", choices=names, metavar="ROW", help=f"of {', '.join(names)}")
    add("--seeds", type=int, nargs="+", metavar="N", help="(default: 1 2 3 4 5)")
    add("--cpu", action="store_true", help="use no GPU")
    return parser.parse_intermixed_args(arguments)


def run(name, *arguments):
    """Run a module of the pipeline. Raises Failed."""
    print("$", name, *arguments, flush=True)
    if status := run_module(name, *arguments):
        raise Failed(f"{name} failed with status {status}")


def diverged(folder):
    """Return whether fairseq stopped a run because its gradients were no numbers."""
    return (folder / "crash.pt").exists()


def run_folder(key, seed, args):
    """Return the folder of a run of the results' `key`; runs unlike the recipe have their own.

    How many checkpoints are averaged makes no other run.
    """
    row, *others = key.split(" ")
    others = [other for other in others if not other.startswith("checkpoint.keep_last_epochs=")]
    if others:
        own = [*others, str(Path(args.data).absolute())]
        row += "-" + hashlib.sha256("\0".join(own).encode()).hexdigest()[:8]
    return Path(args.save_dir).absolute() / row / f"seed_{seed}"


def score(row, key, seed, args):
    """Train `row` from `seed` unless that is done; return its validation BLEU, or "diverged"."""
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
    result = read_json(folder / "evaluation/scores.json")
    return round(result["scores"]["tokenised_bleu"]["score"], 2)


def summary(scores):
    """Return mean and deviation of the runs that have a number, and how many diverged."""
    numbers = [score for score in scores.values() if score != "diverged"]
    return {
        "mean": round(statistics.mean(numbers), 2) if numbers else None,
        "deviation": round(statistics.stdev(numbers), 2) if len(numbers) > 1 else None,
        "diverged": len(scores) - len(numbers),
    }


def other_settings(row, args):
    """Return what is not the paper's in runs of `row`: ``{"changed": {…}, "other_data": […]}``.

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
    """Return the key of a row's results: runs that are not the paper's have a key of their own."""
    changed = [f"{key}={value}" for key, value in others["changed"].items()]
    return " ".join([row, *changed, *(["other data"] if others["other_data"] else [])])


def table(results):
    """Return the rows for a person, each with what is not the recipe's below it."""
    lines = [f"{'row':<32}{'paper':>14}{'measured':>16}{'seeds':>7}"]
    for key, result in results.items():
        row = key.partition(" ")[0]
        paper = from_header(f"{BENCHMARK}/{row}", "paper").partition(" validation BLEU")[0]
        measured = "diverged" if result["mean"] is None else f"{result['mean']:.2f}"
        if result["deviation"] is not None:
            measured += f" +- {result['deviation']:.2f}"
        if result["mean"] is not None and result["diverged"]:
            measured += f", {result['diverged']} diverged"
        lines.append(f"{row:<32}{paper:>14}{measured:>16}{len(result['seeds']):>7}")
        others = [f"{key} {value}" for key, value in result["changed"].items()]
        if others or result["other_data"]:
            lines.append(f"  not the recipe: {', '.join(others + result['other_data'])}")
    return "\n".join(lines)


def main(arguments=None):
    """Run the command and return its exit status."""
    return command.run("ablation.sh", lambda: ablate(parse(arguments)))


def ablate(args):
    """Train and score what has no score yet. Raises BadInput, or Failed for a step that failed."""
    others = {row: other_settings(row, args) for row in args.rows}
    path = Path(args.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_json(path) if path.exists() else {}
    for row in args.rows:
        key = label(row, others[row])
        for seed in args.seeds:
            scores = results.get(key, {}).get("seeds", {})
            if str(seed) in scores:
                continue
            try:
                scores[str(seed)] = score(row, key, seed, args)
            except Failed as error:
                raise Failed(f"{row}, seed {seed}: {error}") from None
            results[key] = {"seeds": scores, **summary(scores), **others[row]}
            write_json(path, dict(sorted(results.items())))
    print(table(results))

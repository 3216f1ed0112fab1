#!/usr/bin/env python3
"""Train and score the ablation of the paper's Table 7; see scripts/ablation.sh --help."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import sacrebleu
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
BENCHMARK = "iwslt14_de_en"

DESCRIPTION = """\
Trains the rows of Table 7 (configs/iwslt14_de_en/ablation_*.yaml), each from several seeds,
averages the last checkpoints, translates the validation set with the row's beam, and prints the
mean and deviation of tokenised BLEU (sacreBLEU without its tokeniser). Run it again to go on where
it stopped: a run that has a score is not repeated.
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
        "overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options for scripts/train.sh"
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
    """Run a program of this environment or a script beside this one. Raises Failed."""
    script = Path(__file__).with_name(name)
    if script.exists():
        program = [sys.executable, script]
    else:
        program = [Path(sys.executable).with_name(name)]
    print("$", name, *command, flush=True)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*map(str, (*program, *command))], env=environment)
    if done.returncode:
        raise Failed(f"{name} failed with status {done.returncode}")


def diverged(folder):
    """Whether fairseq stopped a run because its gradients were no numbers."""
    return (folder / "crash.pt").exists()


def bleu_of(output, references):
    """Tokenised BLEU of the translations that fairseq-generate wrote to `output`."""
    found = re.findall(r"^H-(\d+)\t[^\t]*\t(.*)$", output.read_text("utf-8"), re.MULTILINE)
    translations = {int(number): text for number, text in found}
    if translations.keys() != set(range(len(references))):
        raise Failed(
            f"expected translations of {len(references)} sentences in {output}, "
            f"got {len(translations)}"
        )
    ordered = [translations[number] for number in range(len(references))]
    return round(sacrebleu.corpus_bleu(ordered, [references], tokenize="none", force=True).score, 2)


def score(row, seed, args):
    """Train `row` from `seed` where that is not done; its validation BLEU, or "diverged"."""
    folder = Path(args.save_dir).absolute() / row / f"seed_{seed}"
    config = OmegaConf.load(CONFIGS / BENCHMARK / f"{row}.yaml")
    on_cpu = ["--cpu"] if args.cpu else []
    try:
        run(
            "train.py", f"{BENCHMARK}/{row}", "--data", args.data, "--save-dir", folder, *on_cpu,
            *args.overrides, f"common.seed={seed}",
        )  # fmt: skip
    except Failed:
        if diverged(folder):
            return "diverged"
        raise
    averaged = folder / "averaged.pt"
    epochs = len([path for path in folder.glob("checkpoint*.pt") if path.stem[10:].isdigit()])
    run(
        "average_checkpoints.py", "--inputs", folder, "--output", averaged,
        "--last-epochs", min(config.checkpoint.keep_last_epochs, epochs),
    )  # fmt: skip
    data = Path(args.data)
    prepared = json.loads((data / "prepared.json").read_text("utf-8"))
    run(
        "fairseq-generate", data, "--user-dir", ROOT / "talk_fairseq", "--path", averaged,
        "--gen-subset", "valid", "--remove-bpe", prepared["subwords"],
        "--beam", config.generation.beam, "--lenpen", config.generation.lenpen,
        "--max-tokens", config.dataset.max_tokens, "--results-path", folder, *on_cpu,
    )  # fmt: skip
    references = (data / f"tokenized.valid.{prepared['target_lang']}").read_text("utf-8")
    return bleu_of(folder / "generate-valid.txt", references.removesuffix("\n").split("\n"))


def summary(scores):
    """Mean and deviation of the runs that have a number, and how many diverged."""
    numbers = [score for score in scores.values() if score != "diverged"]
    return {
        "mean": round(statistics.mean(numbers), 2) if numbers else None,
        "deviation": round(statistics.stdev(numbers), 2) if len(numbers) > 1 else None,
        "diverged": len(scores) - len(numbers),
    }


def paper(row):
    """What the header of a config says that the paper reports."""
    text = (CONFIGS / BENCHMARK / f"{row}.yaml").read_text()
    return re.search(r"^# paper: +(\S.*?)( validation BLEU.*)?$", text, re.MULTILINE)[1]


def table(results):
    lines = [f"{'row':<32}{'paper':>14}{'measured':>16}{'seeds':>7}"]
    for row, result in results.items():
        measured = "diverged" if result["mean"] is None else f"{result['mean']:.2f}"
        if result["deviation"] is not None:
            measured += f" +- {result['deviation']:.2f}"
        if result["mean"] is not None and result["diverged"]:
            measured += f", {result['diverged']} diverged"
        lines.append(f"{row:<32}{paper(row):>14}{measured:>16}{len(result['seeds']):>7}")
    return "\n".join(lines)


def main(arguments=None):
    args = parse(arguments)
    if not (Path(args.data) / "prepared.json").exists():
        print(
            f"ablation.sh: --data: expected a folder of scripts/prepare_{BENCHMARK}.sh, "
            f"got {args.data}",
            file=sys.stderr,
        )
        return 2
    path = Path(args.results)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    for row in args.rows:
        for seed in args.seeds:
            scores = results.get(row, {}).get("seeds", {})
            if str(seed) in scores:
                continue
            try:
                scores[str(seed)] = score(row, seed, args)
            except Failed as error:
                print(f"ablation.sh: {row}, seed {seed}: {error}", file=sys.stderr)
                return 1
            results[row] = {"seeds": scores, **summary(scores)}
            part = path.with_name(path.name + ".partial")
            part.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
            part.replace(path)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

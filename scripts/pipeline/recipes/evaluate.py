"""Score the checkpoints of configs/NAME.yaml; see scripts/evaluate.sh --help."""

import dataclasses
import json
import logging
import math
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from fairseq.dataclass.configs import GenerationConfig
from omegaconf import OmegaConf

import talk_fairseq  # noqa: F401  registers the models and patches fairseq
from pipeline.common import command
from pipeline.common.command import BadInput
from pipeline.common.files import read_json, read_lines, write_json, write_lines, write_whole
from pipeline.common.generated import read_hypotheses
from pipeline.common.paths import ROOT
from pipeline.recipes.average import EPOCHS, UPDATES, average_checkpoints, find_checkpoints, save
from pipeline.recipes.config import (
    check_options,
    differences,
    find_config,
    read_config,
    with_overrides,
)
from pipeline.recipes.scores import (
    REPORTED,
    TITLES,
    detokenise,
    detokenised_scores,
    rouge_scores,
    translation_scores,
)
from talk_fairseq.checkpoint_files import read_checkpoint

DESCRIPTION = """\
Scores the model of configs/NAME.yaml on the test set of its data: averages checkpoints, generates
with the row's beam and length penalty, checks that each line of the test set has its hypothesis,
and prints every score by the name of its tool. A language model gets its perplexity per word, with
the row's context. The scores, as JSON, and the hypotheses are kept in CHECKPOINTS/evaluation.
"""
EXAMPLES = """\
examples:
  scripts/evaluate.sh iwslt14_de_en/talkconv checkpoints/iwslt14_de_en/talkconv
  scripts/evaluate.sh iwslt14_de_en/talkconv released.pt            # a checkpoint, not averaged
  scripts/evaluate.sh wmt16_en_de/talkconv checkpoints/wmt16_en_de/talkconv --tune
  scripts/evaluate.sh wmt16_en_de/talkconv checkpoints/wmt16_en_de/talkconv --tune \\
      --try average=5,10,15 --try generation.lenpen=0.3,0.35,0.4
  scripts/evaluate.sh cnn_dm/talkconv checkpoints/cnn_dm/talkconv generation.max_len_b=120
"""

# What --tune tries, one key after the other; the recipe's own value comes first.
LENPENS = [0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8, 2]
AVERAGES = [1, 5, 10]
LENGTHS = [80, 100, 120, 140, 160]


def parse(arguments):
    parser = command.parser("evaluate.sh", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("name", metavar="NAME", help="a file of configs/, without .yaml")
    add("checkpoints", metavar="CHECKPOINTS", help="the folder of a run, or one checkpoint")
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the config's")
    add("--data", help="folder of scripts/prepare_BENCHMARK.sh (default: data-bin/BENCHMARK)")
    add("--split", choices=("test", "valid"), default="test", help="what to score")
    add("--average", type=int, metavar="N", help="checkpoints to average (default: the config's)")
    add("--tune", action="store_true", help="choose what scores best on the validation set: how "
        "many checkpoints are averaged, the length penalty, the longest summary")  # fmt: skip
    add("--try", action="append", default=[], dest="candidates", metavar="KEY=V1,V2", help="with "
        "--tune: values to try in place of its own, of average, generation.lenpen, …")  # fmt: skip
    add("--cpu", action="store_true", help="use no GPU")
    add("--output", help="where to write (default: CHECKPOINTS/evaluation)")
    add("--results", metavar="FILE", help="append the result to this JSON list")
    add("--json", action="store_true", help="print JSON in place of the table")
    return parser.parse_intermixed_args(arguments)


def append_result(path, result):
    """Add a line to the JSON list in `path`. Raises ValueError if there is something else."""
    results = []
    if path.exists():
        try:
            results = read_json(path)
        except ValueError as error:
            raise ValueError(f"--results: expected a JSON list in {error}") from None
        if not isinstance(results, list):
            raise ValueError(f"--results: expected a JSON list in {path}, got something else")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(each, ensure_ascii=False) for each in [*results, result]]
    write_whole(path, "[\n" + ",\n".join(lines) + "\n]\n")


# --- The data and the checkpoints ---


def read_prepared(name, data, config):
    """Return ``prepared.json`` of a data folder. Raises BadInput unless the config fits it."""
    benchmark = name.partition("/")[0]
    path = data / "prepared.json"
    if not path.exists():
        raise BadInput(
            f"--data: expected the folder of scripts/prepare_{benchmark}.sh in {data}, got "
            f"{'one without prepared.json' if data.is_dir() else 'none'}"
        )
    prepared = read_json(path)
    if prepared["benchmark"] != benchmark:
        raise BadInput(f"--data: expected {benchmark} in {data}, got {prepared['benchmark']}")
    for side in ("source_lang", "target_lang"):
        wanted = OmegaConf.select(config, f"task.{side}")
        if wanted is not None and wanted != prepared[side]:
            raise BadInput(f"--data: expected task.{side} {wanted} in {data}, got {prepared[side]}")
    return prepared


def other_data(prepared):
    """Return which numbers of the data are not the published ones, even roughly."""
    return [
        check["what"]
        for check in prepared.get("checks") or []
        if check["published"]
        and not any(abs(check["found"] - number) <= number / 50 for number in check["published"])
    ]


def other_settings(given, config, folder=None):
    """Return ``{key: value}`` of what `config` and the run in `folder` have other than the recipe.

    Raises BadInput if it is the run of another recipe than `given`.
    """
    name, recipe = read_config(given)
    record = folder and folder / "trained.yaml"
    if record and record.exists():
        trained = OmegaConf.to_container(OmegaConf.load(record))
        of_run = trained.pop("name", name)
        if of_run != name:
            raise BadInput(f"CHECKPOINTS: expected a run of {name}, got one of {of_run}")
        # Training sets what is learnt, and evaluation what is generated.
        of_evaluation = OmegaConf.masked_copy(config, ["generation", "eval_lm"])
        config = OmegaConf.create(trained | OmegaConf.to_container(of_evaluation))
    return {key: value for key, (_, value) in differences(recipe, config).items()}


def recipe_average(config):
    """Return ``(how many checkpoints the recipe averages, the pattern of their names)``."""
    for key, pattern in (("keep_last_epochs", EPOCHS), ("keep_interval_updates", UPDATES)):
        if (count := OmegaConf.select(config, f"checkpoint.{key}") or -1) > 0:
            return count, pattern
    return 1, EPOCHS


def choose_checkpoints(folder, config, count):
    """Return the checkpoints to average: the last `count`; of one, the best in validation.

    Raises BadInput if there are not so many.
    """
    if count == 1:
        names = ["checkpoint_best.pt", "checkpoint_last.pt"]
        if ema(config):
            names.reverse()
        paths = [folder / name for name in names if (folder / name).exists()]
        if not paths:
            raise BadInput(f"CHECKPOINTS: expected {names[0]} in {folder}, got none")
        return paths[:1]
    if ema(config):
        raise BadInput(
            f"--average: expected 1 of a row with a moving average of its own, got {count}"
        )
    try:
        return [Path(path) for path in find_checkpoints(folder, recipe_average(config)[1], count)]
    except ValueError as error:
        raise BadInput(f"--average: {error}") from None


def ema(config):
    """Return whether a row trains a moving average of its parameters."""
    return bool(OmegaConf.select(config, "ema.store_ema"))


class Evaluation:
    """A row with its data and its checkpoints; scores them with any settings, on any split.

    Settings are ``{"average": 10, "generation.lenpen": 0.6, …}``; what they do not name is the
    config's.
    """

    def __init__(self, args):
        self.name, recipe = read_config(args.name)
        self.given, self.overrides = args.name, args.overrides
        self.config = with_overrides(recipe, args.overrides)
        check_options(self.config)
        self.benchmark = self.name.partition("/")[0]
        self.data = Path(args.data or ROOT / "data-bin" / self.benchmark).absolute()
        self.prepared = read_prepared(self.name, self.data, self.config)
        self.target = self.prepared["target_lang"]
        self.checkpoints = Path(args.checkpoints).absolute()
        if not self.checkpoints.exists():
            raise BadInput(f"CHECKPOINTS: expected a folder or a file, got {self.checkpoints}")
        self.folder = self.checkpoints if self.checkpoints.is_dir() else self.checkpoints.parent
        self.changed = other_settings(args.name, self.config, self.folder)
        self.output = Path(args.output).absolute() if args.output else self.folder / "evaluation"
        self.on_cpu = args.cpu or not torch.cuda.is_available()
        self.reported = (
            "perplexity" if self.target is None else REPORTED.get(self.benchmark, "tokenised_bleu")
        )
        self.generation = {
            option.name: option.default for option in dataclasses.fields(GenerationConfig)
        } | dict(self.config.get("generation") or {})
        self.average = args.average or recipe_average(self.config)[0]
        if self.checkpoints.is_file():
            if args.average:
                raise BadInput("--average: expected the folder of a run with it, got one file")
            self.average = 1
        if args.average and args.average != recipe_average(self.config)[0]:
            self.changed["average"] = args.average
        self._ready = None  # (average, the file of it)

    # -- The model --

    def paths(self, average):
        """Return the checkpoints of which a mean of so many is made."""
        if self.checkpoints.is_file():
            return [self.checkpoints]
        return choose_checkpoints(self.folder, self.config, average)

    def model(self, average):
        """Return the checkpoint file to score; make it where it is a mean."""
        if self._ready and self._ready[0] == average:
            return self._ready[1]
        paths = self.paths(average)
        path = paths[0]
        if self.checkpoints.is_dir() and (len(paths) > 1 or ema(self.config)):
            path = self.output / "averaged.pt"
            state = average_checkpoints(paths)
            if ema(self.config):
                if "ema" not in (state.get("extra_state") or {}):
                    raise BadInput(
                        f"CHECKPOINTS: expected a moving average in {paths[0]}, got none"
                    )
                state["model"] = state["extra_state"]["ema"]
            save(state, path)
            del state
        self._ready = average, path
        return path

    # -- Scores --

    def score(self, split, settings):
        """Return ``{name: {"score", "tool"}}`` of a split."""
        overrides = [f"{key}={value}" for key, value in settings.items() if key != "average"]
        cfg = composed(self.given, [*self.overrides, *overrides])
        cfg.task.data = str(self.data)
        cfg.common_eval.path = str(self.model(settings["average"]))
        cfg.common.cpu = self.on_cpu
        cfg.common.fp16 = cfg.common.bf16 = False
        cfg.common.tensorboard_logdir = None
        cfg.common.log_format = "tqdm" if sys.stderr.isatty() else "simple"
        cfg.distributed_training.distributed_world_size = 1
        cfg.dataset.gen_subset = split
        cfg.dataset.num_workers = 0
        if self.target is None:
            return self.perplexity(cfg, split)
        return self.generated(cfg, split)

    def lines(self, prefix, split):
        """Return the references of a split, or None without a file. Raises BadInput."""
        path = self.data / f"{prefix}{split}.{self.target or self.prepared['source_lang']}"
        if not path.exists():
            return None
        lines = read_lines(path)
        if len(lines) != self.prepared["lines"].get(split):
            raise BadInput(
                f"--data: expected {self.prepared['lines'].get(split)} lines in {path}, as "
                f"prepared.json says, got {len(lines)}"
            )
        return lines

    def generated(self, cfg, split):
        """Return the scores of hypotheses, which are kept in the output folder."""
        from fairseq_cli import generate

        tokenised, plain = (self.lines(prefix, split) for prefix in ("tokenized.", ""))
        if tokenised is None:
            raise BadInput(f"--data: expected the references of {split} in {self.data}, got none")
        pieces = self.prepared["subwords"]
        cfg.common_eval.post_process = None if pieces == "none" else pieces
        cfg.common_eval.results_path = str(self.output)
        cfg.scoring = "bleu"  # of fairseq, which is not read
        generate.main(cfg)
        count = self.prepared["lines"][split]
        hypotheses = read_hypotheses(self.output / f"generate-{split}.txt", count, kind="H")
        text = hypotheses
        if self.prepared["tokenizer"] == "moses":
            text = detokenise(hypotheses, self.target)
        write_lines(self.output / f"tokenized.{split}.{self.target}", hypotheses)
        write_lines(self.output / f"{split}.{self.target}", text)
        if self.benchmark == "cnn_dm":
            return rouge_scores(hypotheses, tokenised)
        scores = translation_scores(
            hypotheses, tokenised, compounds=self.reported == "compound_split_tokenised_bleu"
        )
        if plain is not None:
            scores |= detokenised_scores(text, plain, self.prepared["lowercase"])
        return scores

    def perplexity(self, cfg, split):
        """Return the perplexity per word; every word and end of line is scored once."""
        from fairseq import checkpoint_utils, tasks, utils
        from fairseq.logging import progress_bar
        from fairseq.sequence_scorer import SequenceScorer

        text = self.lines("", split)
        if text is None:
            raise BadInput(f"--data: expected the text of {split} in {self.data}, got none")
        words = sum(len(line.split()) + 1 for line in text)
        context = cfg.eval_lm.context_window
        cfg.task.tokens_per_sample -= context  # of a block, these are scored
        task = tasks.setup_task(cfg.task)
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [cfg.common_eval.path], task=task
        )
        if not self.on_cpu:
            models[0].cuda()
        models[0].prepare_for_inference_(cfg)
        task.load_dataset(split)
        batches = task.eval_lm_dataloader(
            task.dataset(split),
            max_tokens=cfg.dataset.max_tokens,
            max_positions=utils.resolve_max_positions(models[0].max_positions()),
            context_window=context,
        )
        scorer = SequenceScorer(task.target_dictionary, softmax_batch=1024)  # limits memory
        loss, count = 0.0, 0
        for sample in progress_bar.progress_bar(batches, cfg.common.log_format, log_interval=100):
            sample = sample if self.on_cpu else utils.move_to_cuda(sample)
            for [hypothesis] in scorer.generate(models, sample):
                loss -= hypothesis["positional_scores"].double().sum().item()
                count += hypothesis["positional_scores"].numel()
        if count != words:
            raise ValueError(
                f"tokens: expected {words:,}, the words and ends of line of {split}, got {count:,}"
            )
        tool = f"talk-fairseq: {words:,} words, {context} tokens of context"
        return {"perplexity": {"score": math.exp(loss / words), "tool": tool}}


def composed(given, overrides):
    """Return the config with every option of fairseq in it, as fairseq-hydra-train has it."""
    from fairseq.dataclass import initialize
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    path = find_config(given)[1]
    initialize.hydra_init(path.stem)
    try:
        with initialize_config_dir(str(path.parent), version_base="1.1"):
            cfg = compose(path.stem, ["++" + override.lstrip("+") for override in overrides])
    except HydraException as error:
        raise BadInput(f"overrides: {str(error).partition(chr(10))[0]}") from None
    initialize.add_defaults(cfg)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


# --- Tuning ---


def candidates_of(evaluation, given):
    """Return ``{key: values}`` to try, in order, the present value of each first.

    `given` are texts ``KEY=V1,V2``. Raises BadInput for what cannot be tried.
    """
    keys = {}
    if evaluation.checkpoints.is_dir() and not ema(evaluation.config):
        present = evaluation.average
        keys["average"] = [present, *(n for n in AVERAGES if n != present and fits(evaluation, n))]
    if evaluation.target is not None:
        keys["generation.lenpen"] = LENPENS
    if evaluation.benchmark == "cnn_dm":
        keys["generation.max_len_b"] = LENGTHS
    for key in keys.keys() - {"average"}:
        present = evaluation.generation[key.removeprefix("generation.")]
        keys[key] = [present, *(value for value in keys[key] if value != present)]
    for text in given:
        key, _, values = text.partition("=")
        known = {f"generation.{name}" for name in evaluation.generation}
        if key not in keys and key not in known:
            raise BadInput(f"--try: expected {', '.join(keys)} or generation.KEY, got {key!r}")
        try:
            keys[key] = [json.loads(value) for value in values.split(",")]
        except ValueError:
            raise BadInput(f"--try: expected {key}=V1,V2 with numbers, got {text!r}") from None
    if not keys:
        raise BadInput("--tune: expected several checkpoints to choose from, got one")
    return keys


def fits(evaluation, count):
    """Return whether so many checkpoints are there."""
    try:
        return bool(evaluation.paths(count))
    except BadInput:
        return False


def tune(evaluation, settings, candidates):
    """Return ``(settings, trials)``: those that score best on the validation set, and all.

    One key after the other is chosen, with the best values so far of the ones before; of equal
    scores the first stays.
    """
    sign = -1 if evaluation.reported == "perplexity" else 1
    trials, best = [], None
    for key, values in candidates.items():
        for value in values:
            trial = {**settings, key: value}
            score = next((each["score"] for each in trials if each["settings"] == trial), None)
            if score is None:
                scores = evaluation.score("valid", trial)
                if evaluation.reported not in scores:
                    raise BadInput("--tune: expected untokenised references of valid, got none")
                score = scores[evaluation.reported]["score"]
                trials.append({"settings": trial, "score": score})
                told = ", ".join(f"{key} {value}" for key, value in trial.items())
                title = TITLES[evaluation.reported]
                print(f"validation: {title} {score:.2f} with {told}", file=sys.stderr)
            if best is None or sign * score > sign * best[0]:
                best = score, trial
        settings = best[1]
    return settings, trials


# --- The command ---


def evaluate(args):
    """Return the result, as in scores.json. Raises BadInput, ValueError or OSError."""
    evaluation = Evaluation(args)
    if args.candidates and not args.tune:
        raise BadInput("--try: expected --tune beside it")
    settings = {"average": evaluation.average}
    if args.tune:
        candidates = candidates_of(evaluation, args.candidates)
        for key in candidates.keys() - settings.keys():
            settings[key] = evaluation.generation[key.removeprefix("generation.")]
        if "valid" not in evaluation.prepared["lines"]:
            raise BadInput(f"--tune: expected a validation set in {evaluation.data}, got none")
    else:
        evaluation.paths(evaluation.average)
    evaluation.output.mkdir(parents=True, exist_ok=True)
    written = evaluation.output / "scores.json"
    written.unlink(missing_ok=True)
    trials = None
    if args.tune:
        settings, trials = tune(evaluation, settings, candidates)
        evaluation.changed.pop("average", None)
    scores = evaluation.score(args.split, settings)
    paths = evaluation.paths(settings["average"])
    history = read_checkpoint(paths[-1]).get("optimizer_history") or [{}]
    generation = evaluation.config.get("generation") or {}
    result = {
        "name": evaluation.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "split": args.split,
        "lines": evaluation.prepared["lines"][args.split],
        "checkpoints": [path.name for path in paths],
        "updates": history[-1].get("num_updates"),
        "settings": {f"generation.{key}": value for key, value in generation.items()} | settings,
        "tuned": args.tune,
        "changed": evaluation.changed,
        "other_data": other_data(evaluation.prepared),
        "reported": evaluation.reported,
        "scores": scores,
    }
    if trials:
        result["trials"] = trials
    write_json(written, result)
    if args.results:
        append_result(Path(args.results), result)
    return result


def table(result):
    """Return the scores for a person."""
    paths = result["checkpoints"]
    model = paths[0] if len(paths) == 1 else f"mean of {len(paths)}, {paths[0]} to {paths[-1]}"
    lines = [f"{result['name']} on {result['split']}, {result['lines']:,} lines", f"  {model}"]
    told = [f"{key.removeprefix('generation.')} {v}" for key, v in result["settings"].items()]
    lines.append("  " + ", ".join(told) + (" (tuned on validation)" if result["tuned"] else ""))
    if result["changed"] or result["other_data"]:
        others = [f"{key} {value}" for key, value in result["changed"].items()]
        lines.append(f"  not the recipe: {', '.join(others + result['other_data'])}")
    lines.append("")
    for name, score in result["scores"].items():
        lines.append(f"  {TITLES[name]:<32}{score['score']:>8.2f}   {score['tool']}")
    if "tokenised_bleu" in result["scores"] and "sacrebleu" not in result["scores"]:
        lines.append("  no detokenised scores: the data has no untokenised references")
    return "\n".join(lines)


def main(arguments=None):
    """Run the command and return its exit status."""
    args = parse(arguments)
    # Before fairseq sets up its own logging, which prints a screenful of options.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("fairseq.logging.progress_bar").setLevel(logging.INFO)

    def body():
        result = evaluate(args)
        print(json.dumps(result, indent=2, ensure_ascii=False) if args.json else table(result))

    return command.run("evaluate.sh", body, (BadInput, OSError, ValueError))

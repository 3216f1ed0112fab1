"""Scores the model of configs/NAME.yaml on the test set of its data: averages checkpoints,
generates with the row's beam and length penalty, and prints every score by the name of its tool.
The scores, as JSON, and the hypotheses are kept in CHECKPOINTS/evaluation.
"""

import functools
import html
import logging
import re
import sys
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from omegaconf import OmegaConf
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesDetokenizer

from pipeline.common import command
from pipeline.common.command import BadInput, check_path
from pipeline.common.files import read_json, read_lines, write_json, write_lines
from pipeline.common.folder import Folder
from pipeline.common.logs import read_hypotheses
from pipeline.common.machine import has_gpu
from pipeline.data.benchmarks import BENCHMARKS, fits
from pipeline.recipes import config as configs
from pipeline.recipes.average import EPOCHS, UPDATES, average_checkpoints, find_checkpoints, save
from talk_fairseq.checkpoint_files import read_checkpoint
from talk_fairseq.rouge import rouge

from fairseq.checkpoint_utils import checkpoint_paths
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.dataclass.initialize import add_defaults

# The score that the papers report of a benchmark; of others, tokenised BLEU or perplexity.
REPORTED = {
    "wmt16_en_de": "compound_split_tokenised_bleu",
    "wmt17_zh_en": "sacrebleu",
    "cnn_dm": "rouge_lsum",
}
# What --tune tries, one key after the other; the recipe's own value comes first.
LENPENS = [0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8, 2]
AVERAGES = [1, 5, 10]
LENGTHS = [80, 100, 120, 140, 160]


def compound_split(line):
    """Return a tokenised line with its compounds split, as for the published En-De scores.

    ``a-b`` becomes ``a ##AT##-##AT## b`` from left to right. A character is matched once, so
    that of ``a-b-c``, whose middle part has one, the second hyphen stays.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def scores_by(hypotheses, references, **metrics):
    """Return ``{name: {"score", "tool"}}`` by metrics of sacreBLEU.

    Raises ValueError unless there is one hypothesis for each reference.
    """
    if (found := len(hypotheses)) != (wanted := len(references)):
        raise ValueError(f"hypotheses: expected {wanted:,}, one a reference, got {found:,}")
    scores = {}
    for name, metric in metrics.items():
        score = metric.corpus_score(hypotheses, [references]).score
        scores[name] = {"score": score, "tool": f"sacreBLEU {metric.get_signature()}"}
    return scores


def translation_scores(hypotheses, references, compounds=False):
    """Return ``{name: {"score", "tool"}}`` of tokenised lines, with `compounds` split ones too.

    The tokens are taken as they stand (``--tokenize none --force`` of sacreBLEU).
    """
    bleu = BLEU(tokenize="none", force=True)
    scores = scores_by(hypotheses, references, tokenised_bleu=bleu)
    if compounds:
        split = [[compound_split(line) for line in lines] for lines in (hypotheses, references)]
        scores |= scores_by(*split, compound_split_tokenised_bleu=bleu)
    return scores


def detokenised_scores(hypotheses, references, lowercase=False):
    """Return ``{name: {"score", "tool"}}`` of plain text; `lowercase` for lower-cased models."""
    metrics = {"sacrebleu": BLEU(lowercase=lowercase), "chrf": CHRF(lowercase=lowercase)}
    return scores_by(hypotheses, references, **metrics)


def rouge_scores(hypotheses, references):
    """Return ``{name: {"score", "tool"}}`` of tokenised summaries, in percent.

    ``" . "`` ends a sentence. Moses's escapes (``&apos;``) are undone: their letters would count
    as a word.
    """
    texts = [[html.unescape(line) for line in lines] for lines in (hypotheses, references)]
    settings = "F-measure, stemming, sentences separated by ' . '"
    tool = f"rouge-score {version('rouge-score')}, {settings}"
    scores = rouge(*texts, sentence_separator=" . ")
    return {name: {"score": score, "tool": tool} for name, score in scores.items()}


def detokenise(lines, language):
    """Return Moses tokens as plain text."""
    moses = MosesDetokenizer(language)
    return [moses.detokenize(line.split()) for line in lines]


def parse(arguments):
    parser = command.parser("evaluate.sh", __doc__)
    add = parser.add_argument
    add("name", metavar="NAME", help="a file of configs/, without .yaml")
    add("checkpoints", metavar="CHECKPOINTS", help="the folder of a run, or one checkpoint")
    add("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="options that replace the config's")
    add("--data", help="folder of scripts/prepare_BENCHMARK.sh (default: as for train.sh)")
    add("--split", choices=("test", "valid"), default="test", help="what to score")
    add("--average", type=command.at_least(1), metavar="N", help="(default: the config's)")
    add("--tune", action="store_true", help="choose the number of averaged checkpoints, the length "
        "penalty and the longest summary on the validation set")  # fmt: skip
    add("--cpu", action="store_true", help="use no GPU")
    add("--output", help="where to write (default: CHECKPOINTS/evaluation)")
    add("--results", metavar="FILE", type=Path, help="append the result to this JSON list")
    return parser.parse_intermixed_args(arguments)


def read_prepared(name, data):
    """Return ``prepared.json`` of a data folder. Raises BadInput unless it is the config's."""
    benchmark = name.partition("/")[0]
    path = data / "prepared.json"
    if not path.exists():
        named = f"scripts/prepare_{benchmark}.sh" if benchmark in BENCHMARKS else "docs/recipes.md"
        raise BadInput(f"--data: expected prepared.json, see {named}, in {data}, got none")
    prepared = read_json(path)
    wanted = "benchmark lines checks source_lang target_lang tokenizer subwords lowercase"
    if missing := {*wanted.split()} - {*prepared}:
        raise BadInput(f"--data: expected {sorted(missing)[0]} in {path}, got none")
    if prepared["benchmark"] != benchmark:
        raise BadInput(f"--data: expected {benchmark} in {data}, got {prepared['benchmark']}")
    return prepared


def other_data(prepared):
    """Return which numbers of the data are not the published ones."""
    return [check["what"] for check in prepared["checks"] if not fits(check)]


def other_settings(name, recipe, config, folder=None):
    """Return ``{key: value}`` of what `config` and the run in `folder` have other than `recipe`.

    Raises BadInput if it is the run of another recipe than `name`.
    """
    others = configs.differences(recipe, config)
    record = folder and folder / "trained.yaml"
    if record and record.exists():
        trained = OmegaConf.to_container(OmegaConf.load(record))
        of_run = trained.pop("name", name)
        if of_run != name:
            raise BadInput(f"CHECKPOINTS: expected a run of {name}, got one of {of_run}")
        # Training sets what is learnt, evaluation what is generated, and both set a task.
        of_evaluation = OmegaConf.masked_copy(config, ["generation", "eval_lm"])
        of_both = OmegaConf.create(trained | OmegaConf.to_container(of_evaluation))
        tasks = {key: pair for key, pair in others.items() if key.startswith("task.")}
        others = configs.differences(recipe, of_both) | tasks
    return {key: value for key, (_, value) in others.items()}


def recipe_average(config):
    """Return ``(how many checkpoints the recipe averages, the pattern of their names)``."""
    for key, pattern in (("keep_last_epochs", EPOCHS), ("keep_interval_updates", UPDATES)):
        if (count := OmegaConf.select(config, f"checkpoint.{key}") or -1) > 0:
            return count, pattern
    return 1, EPOCHS


class Evaluation:
    """A row with its data and its checkpoints; scores them with any settings, on any split.

    Settings are ``{"average": 10, "generation.lenpen": 0.6, …}``; what they do not name is the
    config's.
    """

    def __init__(self, args):
        self.name, recipe = configs.read_config(args.name)
        self.benchmark = self.name.partition("/")[0]
        self.config = configs.with_overrides(recipe, args.overrides)
        configs.check_options(self.config)
        self.data = configs.chosen_folder(args.data, self.config, "task.data", self.name).absolute()
        self.prepared = read_prepared(self.name, self.data)
        for split in [args.split, "valid"] if args.tune else [args.split]:
            if split not in self.prepared["lines"]:
                raise BadInput(f"--data: expected lines of {split} in {self.data}, got none")
        self.target = self.prepared["target_lang"]
        usual = "tokenised_bleu" if self.target else "perplexity"
        self.reported = REPORTED.get(self.benchmark, usual)
        self.on_cpu = args.cpu or not has_gpu()

        self.checkpoints = Path(args.checkpoints).absolute()
        self.is_run = self.checkpoints.is_dir()
        self.ema = bool(OmegaConf.select(self.config, "ema.store_ema"))
        folder = self.checkpoints if self.is_run else self.checkpoints.parent
        self.output = Path(args.output).absolute() if args.output else folder / "evaluation"
        paths = {"--data": self.data, "CHECKPOINTS": self.checkpoints, "--output": self.output}
        for option, path in paths.items():
            check_path(option, path)
        self.changed = other_settings(self.name, recipe, self.config, folder)
        last, most = self.checkpoints / "checkpoint_last.pt", "optimization.max_update"
        made = updates_of(last) if last.exists() else None
        if made and made < (OmegaConf.select(self.config, most) or 0):  # it is not at its end
            self.changed[most] = made
        kept, self.pattern = recipe_average(self.config)
        self.average = args.average or (kept if self.is_run else 1)
        # A file may be the recipe's mean, unless it has a name that training gives.
        given = r"checkpoint(_best|_last|\d+|_\d+_\d+|\.best_.+)\.pt"
        of_training = self.is_run or re.fullmatch(given, self.checkpoints.name)
        if self.average != (kept if of_training else 1):
            self.changed["average"] = self.average
        self.model = functools.lru_cache(maxsize=1)(self.model)  # there is one file for means

    def paths(self, average):
        """Return the checkpoints to average: the last `average` ones or, for 1, the best one.

        With a moving average, that is the last; a single file is itself. Raises BadInput or
        ValueError if some are missing.
        """
        if average > 1:
            configs.check_average(self.config, average)
            if not self.is_run:
                raise BadInput(f"--average: expected 1 of a single checkpoint, got {average}")
            return list(map(Path, find_checkpoints(self.checkpoints, self.pattern, average)))
        names = ["checkpoint_last.pt"] if self.ema else ["checkpoint_best.pt", "checkpoint_last.pt"]
        paths = [self.checkpoints / name for name in names] if self.is_run else [self.checkpoints]
        there = [path for path in paths if path.exists()]
        if not there:
            raise BadInput(f"CHECKPOINTS: expected {paths[0]}, got none")
        return there[:1]

    def model(self, average):
        """Return the checkpoint file to score; make it where it is a mean."""
        paths = self.paths(average)
        if len(paths) == 1 and not self.ema:
            return paths[0]
        state = average_checkpoints(paths)
        if self.ema:
            state["model"] = (state.get("extra_state") or {}).get("ema")
            if not state["model"]:
                raise BadInput(f"CHECKPOINTS: expected a moving average in {paths[0]}, got none")
        path = self.output / "averaged.pt"
        save(state, path)
        return path

    def score(self, split, settings):
        """Return ``{name: {"score", "tool"}}`` of a split."""
        overrides = [f"{key}={value}" for key, value in settings.items() if key != "average"]
        cfg = composed(configs.with_overrides(self.config, overrides))
        cfg.task.data = str(self.data)
        cfg.common_eval.path = str(self.model(settings["average"]))
        cfg.common.cpu = self.on_cpu
        cfg.common.fp16 = cfg.common.bf16 = False
        cfg.common.tensorboard_logdir = cfg.common.user_dir = None  # models are registered
        cfg.common.log_format = "tqdm" if sys.stderr.isatty() else "simple"
        cfg.distributed_training.distributed_world_size = 1
        cfg.dataset.gen_subset = split
        cfg.dataset.num_workers = 0
        return self.perplexity(cfg, split) if self.target is None else self.generated(cfg, split)

    def generated(self, cfg, split):
        """Return the scores of hypotheses, which are kept in the output folder."""
        from fairseq_cli import generate

        end = f"{split}.{self.target}"
        references, plain = read_lines(self.data / f"tokenized.{end}"), self.data / end
        pieces = self.prepared["subwords"]
        cfg.common_eval.post_process = None if pieces == "none" else pieces
        cfg.common_eval.results_path = str(self.output)
        cfg.scoring = "bleu"  # of fairseq, which is not read
        generate.main(cfg)
        count = self.prepared["lines"][split]
        hypotheses = read_hypotheses(self.output / f"generate-{split}.txt", count, kind="H")
        moses = self.prepared["tokenizer"] == "moses"
        text = detokenise(hypotheses, self.target) if moses else hypotheses
        write_lines(self.output / f"tokenized.{end}", hypotheses)
        write_lines(self.output / end, text)
        if self.benchmark == "cnn_dm":
            return rouge_scores(hypotheses, references)
        compounds = self.reported == "compound_split_tokenised_bleu"
        scores = translation_scores(hypotheses, references, compounds)
        if plain.exists():
            lowercase = self.prepared["lowercase"]
            scores |= detokenised_scores(text, read_lines(plain), lowercase)
        return scores

    def perplexity(self, cfg, split):
        """Return the perplexity per word; every word and end of line is scored once."""
        from fairseq.data.data_utils import load_indexed_dataset
        from fairseq_cli import eval_lm

        text = read_lines(self.data / f"{split}.{self.prepared['source_lang']}")
        words = sum(len(line.split()) + 1 for line in text)
        tokens = load_indexed_dataset(str(self.data / split))  # its sizes live no longer than it
        count = int(tokens.sizes.sum())
        if count != words:
            wanted = f"{words:,}, the words and ends of line of {split}"
            raise ValueError(f"tokens: expected {wanted}, got {count:,}")
        cfg.eval_lm.softmax_batch = 1024  # limits memory
        loss = float(eval_lm.main(cfg)["loss"])  # in bits
        tool = f"fairseq-eval-lm: {words:,} words, {cfg.eval_lm.context_window} tokens of context"
        return {"perplexity": {"score": 2**loss, "tool": tool}}


def composed(config):
    """Return `config` with every option of fairseq in it, as fairseq-hydra-train has it."""
    known = [group for group in config if group != "hydra"]
    cfg = OmegaConf.merge(FairseqConfig, OmegaConf.masked_copy(config, known))
    add_defaults(cfg)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def updates_of(checkpoint):
    """Return how many updates a checkpoint file has had, or None if it does not say."""
    history = read_checkpoint(checkpoint, mmap=True).get("optimizer_history") or [{}]
    return history[-1].get("num_updates")


def candidates_of(evaluation):
    """Return ``{key: values}`` to try, in order, the present value of each first.

    Raises BadInput if there is nothing to choose from.
    """
    values = {}
    if evaluation.is_run and not evaluation.ema:
        there = len(checkpoint_paths(evaluation.checkpoints, evaluation.pattern))
        counts = [count for count in AVERAGES if count <= max(1, there)]
        values["average"] = [evaluation.average, *counts]
    generation = GenerationConfig(**(evaluation.config.get("generation") or {}))
    if evaluation.target is not None:
        values["generation.lenpen"] = [generation.lenpen, *LENPENS]
    if evaluation.benchmark == "cnn_dm":
        values["generation.max_len_b"] = [generation.max_len_b, *LENGTHS]
    values = {key: list(dict.fromkeys(some)) for key, some in values.items()}
    if not any(len(some) > 1 for some in values.values()):
        raise BadInput("--tune: expected several checkpoints to choose from, got one")
    return values


def tune(evaluation, settings, candidates):
    """Return ``(settings, trials)``: those that score best on the validation set, and all.

    One key after the other is chosen, with the best values so far of the ones before; of equal
    scores the first stays. Without candidates the settings stay, and nothing is tried.
    """
    sign = -1 if evaluation.reported == "perplexity" else 1
    trials = []
    for key, values in candidates.items():
        for value in values:
            trial = {**settings, key: value}
            if any(trial == before["settings"] for before in trials):
                continue
            scores = evaluation.score("valid", trial)
            if evaluation.reported not in scores:
                raise BadInput("--tune: expected untokenised references of valid, got none")
            trials.append({"settings": trial, "score": scores[evaluation.reported]["score"]})
            told = ", ".join(f"{key} {value}" for key, value in trial.items())
            print(f"validation: {trials[-1]['score']:.2f} with {told}", file=sys.stderr)
        settings = max(trials, key=lambda trial: sign * trial["score"])["settings"]
    return settings, trials


def evaluate(args):
    """Return the result, as in scores.json. Raises BadInput, ValueError or OSError."""
    evaluation = Evaluation(args)
    evaluation.paths(evaluation.average)
    if args.results:
        configs.read_results(args.results)
    candidates = candidates_of(evaluation) if args.tune else {}
    with closing(Folder(evaluation.output, "evaluation", (), "--output")) as folder:
        folder.acquire()  # there is one file for means, and one for hypotheses
        return choose_and_score(evaluation, candidates, args)


def choose_and_score(evaluation, candidates, args):
    """Return the result of the best settings of the `candidates`, and write it."""
    written = evaluation.output / "scores.json"
    written.unlink(missing_ok=True)
    settings = {"average": evaluation.average}
    settings |= {key: values[0] for key, values in candidates.items()}
    settings, trials = tune(evaluation, settings, candidates)
    if "average" in candidates:
        evaluation.changed.pop("average", None)
    scores = evaluation.score(args.split, settings)
    paths = evaluation.paths(settings["average"])
    generation = evaluation.config.get("generation") or {}
    result = {
        "name": evaluation.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "split": args.split,
        "lines": evaluation.prepared["lines"][args.split],
        "checkpoints": [path.name for path in paths],
        "updates": updates_of(paths[-1]),
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
        write_json(args.results, [*configs.read_results(args.results), result])
    return result


def table(result):
    """Return the scores for a person."""
    lines = [
        f"{result['name']} on {result['split']}, {result['lines']:,} lines",
        f"  of {', '.join(result['checkpoints'])}",
    ]
    told = [f"{key.removeprefix('generation.')} {v}" for key, v in result["settings"].items()]
    lines.append("  " + ", ".join(told) + (" (tuned on validation)" if result["tuned"] else ""))
    if result["changed"] or result["other_data"]:
        others = [f"{key} {value}" for key, value in result["changed"].items()]
        lines.append(f"  not the recipe: {', '.join(others + result['other_data'])}")
    for name, score in result["scores"].items():
        lines.append(f"  {name:<32}{score['score']:>8.2f}   {score['tool']}")
    return "\n".join(lines)


def main(arguments=None):
    """Run the command and return its exit status."""
    args = parse(arguments)
    # Before fairseq sets up its own logging, which prints a screenful of options.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("fairseq.logging.progress_bar").setLevel(logging.INFO)
    unusable = (BadInput, OSError, ValueError)
    return command.run("evaluate.sh", lambda: print(table(evaluate(args))), unusable)

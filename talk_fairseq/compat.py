"""What is mended in fairseq 0.12.3 for today's Python, torch and numpy.

fairseq has had no release since 2022. Importing this module repairs what a user of
its commands meets: each function below is one mend, and its docstring says what
breaks without it. ``--user-dir`` imports it before any checkpoint or data set is
read. Files are always loaded with ``weights_only=True``.

Out of reach, because fairseq imports no user directory there, or too late:

- ``fairseq-score --sacrebleu`` and ``--sentence-bleu`` raise TypeError with
  sacrebleu 2: score with the ``sacrebleu`` command. Plain ``fairseq-score`` works.
- ``fairseq-preprocess`` without ``--user-dir`` (see `check_corpora_first`).
- ``fairseq-hydra-train`` under torchrun on a CPU: the process group is set up before
  the user directory is imported. Pass ``--distributed-init-method env://`` and the
  rank by hand.
"""

import argparse
import functools
import os
import re
import sys
import types
import warnings
import zipfile

import fairseq.checkpoint_utils
import fairseq.criterions.adaptive_loss
import fairseq.data.data_utils
import fairseq.data.language_pair_dataset
import fairseq.data.token_block_dataset
import fairseq.dataclass.initialize
import fairseq.dataclass.utils
import fairseq.distributed.utils
import fairseq.models
import fairseq.models.distributed_fairseq_model
import fairseq.modules.dynamic_crf_layer
import fairseq.ngram_repeat_block
import fairseq.options
import fairseq.search
import fairseq.tasks.language_modeling
import fairseq.tasks.multilingual_language_modeling
import fairseq.trainer
import fairseq.utils
import numpy as np
import torch
from omegaconf import OmegaConf

from talk_fairseq.models import released


def mends(owner, name):
    """Replace ``owner.name`` by the decorated function, which is given the original first.

    Class methods stay class methods: the class comes second. The original stays at
    ``owner.name.__wrapped__``. What is mended already is left alone, so this module may be
    imported twice. Raises AttributeError where fairseq has lost the name.
    """

    def mend(function):
        original = getattr(owner, name, None)
        if original is None:
            raise AttributeError(f"expected {owner.__name__}.{name} in fairseq, got none")
        of_class = isinstance(vars(owner).get(name), classmethod)
        if of_class:
            original = original.__func__
        if not hasattr(original, "mended_by"):

            @functools.wraps(original, updated=())
            def mended(*args, **kwargs):
                return function(original, *args, **kwargs)

            mended.mended_by = function.__name__
            setattr(owner, name, classmethod(mended) if of_class else mended)
        return function

    return mend


class Overlay(types.ModuleType):
    """A module as one other module sees it: some names are ours, the rest is the original's."""

    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self.__dict__.update(names, __wrapped__=module)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)


def overlay(owner, module, **names):
    """Let ``owner`` see ``module`` with these names replaced; ``module`` itself is not touched.

    Raises AttributeError where ``owner`` no longer imports ``module`` under the usual name.
    """
    alias = {"numpy": "np"}.get(module.__name__, module.__name__)
    seen = getattr(owner, alias, None)
    if seen is None:
        raise AttributeError(f"expected {owner.__name__}.{alias} in fairseq, got none")
    if seen is module:
        setattr(owner, alias, Overlay(module, **names))


# Checkpoints


def allow_checkpoint_types():
    """torch >= 2.6 reads files with ``weights_only=True`` and refuses every checkpoint of fairseq.

    Seen: ``UnpicklingError: Unsupported global: argparse.Namespace`` (the model's options);
    numpy's scalars (the metrics of ``--eval-bleu``); ``_TensorPlaceholder`` (optimizer states
    saved after being broadcast). These hold data and run no code, so they are allowed. fairseq
    0.9 saved its meters, whose module is gone: they are read as Namespaces of their values.
    """
    try:
        from numpy._core import multiarray  # numpy 2
    except ImportError:
        from numpy.core import multiarray
    # A pickle names the module of the numpy that wrote it.
    scalars = [
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, function in (
            ("scalar", multiarray.scalar),
            ("_reconstruct", multiarray._reconstruct),
        )
    ]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efdg"}
    meters = [
        (argparse.Namespace, f"fairseq.meters.{name}")
        for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
    ]
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            fairseq.distributed.utils._TensorPlaceholder,
            np.ndarray,
            np.dtype,
            *scalars,
            *dtypes,
            *meters,
        ]
    )


def read_checkpoint(file, map_location="cpu", mmap=False):
    """Read the checkpoint ``file`` (a path or an open file) without running code from it.

    With ``mmap``, tensors of a path are read from the file where they are used, if it is not
    older than PyTorch 1.6.

    Returns the saved dictionary. Raises ValueError that names the file if it is truncated,
    is no checkpoint of fairseq, or holds types that are not on the list of safe ones;
    OSError if it cannot be opened.
    """
    mmap = mmap and zipfile.is_zipfile(file)
    if isinstance(file, (str, os.PathLike)) and not mmap:
        with open(file, "rb") as opened:
            return read_checkpoint(opened, map_location)
    path = getattr(file, "name", file)
    try:
        state = torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:  # a truncated file has raised ten kinds of them
        unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        got = f"the unsafe type {unsafe[1]}" if unsafe else "a truncated or foreign file"
        cause = type(error).__name__ + ": " + str(error).partition("\n")[0]
        raise ValueError(
            f"expected a checkpoint of fairseq in {path}, got {got} ({cause[:100]})"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        held = f"the keys {list(state)[:5]}" if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"expected a checkpoint of fairseq in {path}, got {held}")
    return state


def name_bad_checkpoints():
    """A truncated or foreign checkpoint fails with an error that names no file.

    Seen: ``OSError: Invalid argument``, pickle's ``Unsupported operand``, zip's ``failed finding
    central directory``, ``KeyError: 'best_loss'``. `read_checkpoint` names it.
    """

    def load(file, map_location="cpu", **_):  # other fairseqs ask for weights_only=False
        return read_checkpoint(file, map_location)

    overlay(fairseq.checkpoint_utils, torch, load=load)


@mends(fairseq.checkpoint_utils, "_upgrade_state_dict")
def published_options_become_ours(original, state):
    """fairseq drops options that it does not know from the Namespace of an old checkpoint.

    One of the published TaLK code would get the windows of our arch instead of its own, without a
    word. Here its options are translated first; see models/released.py.
    """
    return original(released.upgrade(state))


def trust_own_job():
    """Resuming in several processes: the other ranks refuse what rank 0 sends them.

    Seen: the "Unsupported global" of above, in ``_broadcast_object_slow``, on bytes that
    come from this very job and hold whatever the trainer holds. They are unpickled fully;
    this module of fairseq reads no files.
    """
    overlay(
        fairseq.distributed.utils, torch, load=functools.partial(torch.load, weights_only=False)
    )


# Data


@mends(fairseq.data.data_utils, "batch_by_size")
def keep_last_batch(original, indices, *args, **kwargs):
    """fairseq drops a last batch whose size is no multiple of 8, without a word.

    Since December 2022, in training, validation and generation alike: 40 of 43 sentences are
    translated, and a data set of fewer than 8 is "empty". Batches follow the order of
    ``indices``, so what is lost is a tail. No indices at all are an IndexError in fairseq;
    here a ValueError that says so.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64)
    try:
        batches = list(original(indices, *args, **kwargs))
    except IndexError:
        if len(indices) > 0:
            raise
        raise ValueError(
            "expected sentences to batch, got none: the data set is empty, "
            "or every sentence is over the maximum length"
        ) from None
    kept = sum(len(batch) for batch in batches)
    return batches + [indices[kept:]] if kept < len(indices) else batches


def old_numpy_names():
    """``np.float``, ``np.compat.long`` and ``percentile(interpolation=)`` are gone in numpy 2.

    Seen in ``--sample-break-mode eos``, ``--num-batch-buckets`` and the CRF layer. Only the four
    modules of fairseq that use the names get them back. (``np.int`` is left: only the masking of
    audio without overlap uses it, which calls a ``Generator.randint`` that never was.)
    """

    def percentile(*args, interpolation="linear", **kwargs):
        return np.percentile(*args, **{"method": interpolation, **kwargs})

    for module in (
        fairseq.data.data_utils,
        fairseq.data.language_pair_dataset,
        fairseq.data.token_block_dataset,
        fairseq.modules.dynamic_crf_layer,
    ):
        overlay(
            module,
            np,
            float=float,
            compat=types.SimpleNamespace(long=np.int64),
            percentile=percentile,
        )


def check_corpora_first(original, args):
    """``fairseq-preprocess`` finds a missing file last and a one-sided corpus never.

    Seen: FileNotFoundError after the training set has been written; lines that do not match
    fail in training. Here, with ``--user-dir``, nothing is written before all files are
    there (FileNotFoundError) and have as many lines in both languages (ValueError).
    """
    languages = [args.source_lang] + ([] if args.only_source else [args.target_lang])
    prefixes = [args.trainpref] if args.trainpref else []
    if not args.dict_only:
        for some in (args.validpref, args.testpref):
            prefixes += some.split(",") if some else []
    for prefix in prefixes:
        lines = {}
        for language in languages:
            path = f"{prefix}.{language}" if language else prefix
            with open(path, encoding="utf-8") as file:
                lines[path] = sum(1 for _ in file)
        if len(set(lines.values())) > 1:
            raise ValueError(f"expected as many lines in both languages, got {lines}")
    return original(args)


@mends(fairseq.tasks.language_modeling.LanguageModelingTask, "eval_lm_dataloader")
@mends(
    fairseq.tasks.multilingual_language_modeling.MultilingualLanguageModelingTask,
    "eval_lm_dataloader",
)
def score_every_token(original, self, dataset, *args, max_positions=None, **kwargs):
    """``fairseq-eval-lm`` skips blocks over the model's maximum, and scores what is left.

    Seen without the ``--tokens-per-sample`` of training, which is then 1024: every block is
    skipped, and the perplexity is 1.00 or that of a short last block. Raises ValueError instead.
    """
    indices = dataset.ordered_indices()
    _, skipped = dataset.filter_indices_by_size(indices, max_positions)
    if len(skipped) > 0:
        raise ValueError(
            f"expected blocks of at most {max_positions} tokens to score, got {len(skipped)} "
            "longer ones: give --tokens-per-sample as in training, or --sample-break-mode none"
        )
    return original(self, dataset, *args, max_positions=max_positions, **kwargs)


# Models


@mends(fairseq.utils, "get_activation_fn")
def swish_is_a_function(original, activation):
    """``swish`` gives the class ``torch.nn.SiLU``: the first forward raises TypeError.

    For configs and architectures that name it: the flags of fairseq's own models do not offer it.
    ``ConformerLayer`` wants the class; it has imported the original by name and keeps it.
    """
    function = original(activation)
    return torch.nn.functional.silu if function is torch.nn.SiLU else function


@mends(fairseq.dataclass.initialize, "add_defaults")
def archs_set_defaults_in_yaml(original, cfg):
    """``fairseq-hydra-train`` takes the defaults of the model for those of the arch.

    Seen: ``_name: transformer_lm_big`` trains the 6 layers of ``transformer_lm``, without a word.
    What the arch sets must be there before the defaults of the model's dataclass are.
    """
    OmegaConf.set_struct(cfg, False)
    model = cfg.get("model")
    name = model if isinstance(model, str) else getattr(model, "_name", None)
    if fairseq.models.ARCH_MODEL_NAME_REGISTRY.get(name) in fairseq.models.MODEL_DATACLASS_REGISTRY:
        if model == name:
            cfg.model = {"_name": name}
        OmegaConf.set_struct(cfg.model, False)
        fairseq.models.ARCH_CONFIG_REGISTRY[name](cfg.model)
        if cfg.model.get("base_shuffle") is False:  # an integer in fairseq's dataclasses
            cfg.model.base_shuffle = 0
    return original(cfg)


@mends(fairseq.models, "build_model")
def older_models_build_from_yaml(original, cfg, task, *args, **kwargs):
    """Models without a dataclass (transformer, lightconv, fconv) want all flags in one Namespace.

    Seen where a YAML names them: ``has no attribute 'weight_softmax'``, since the defaults of the
    flags are not filled in, and those of the task are elsewhere; a list of one kernel size is a
    TypeError.
    """
    model = fairseq.models.ARCH_MODEL_REGISTRY.get(getattr(cfg, "_name", None))
    if OmegaConf.is_config(cfg) and model and getattr(model, "__dataclass", None) is None:
        of_task = getattr(task, "cfg", None) or getattr(task, "args", None)  # of an older task
        cfg = argparse.Namespace(**OmegaConf.to_container(cfg, resolve=True))
        for name in ("max_source_positions", "max_target_positions", "tokens_per_sample"):
            if not hasattr(cfg, name) and getattr(of_task, name, None) is not None:
                setattr(cfg, name, getattr(of_task, name))
        fairseq.dataclass.utils._set_legacy_defaults(cfg, model)
    return original(cfg, task, *args, **kwargs)


@mends(fairseq.ngram_repeat_block.NGramRepeatBlock, "_no_repeat_ngram")
def block_repeated_ngrams(original, self, tokens, lprobs, bsz, beam_size, step):
    """``--no-repeat-ngram-size`` blocks nothing without fairseq's CUDA extension.

    Seen: sixteen times "the" with a size of 3, in any task; wheels have no extension. What is
    generated is compared with the end of the whole buffer, which is padding until the last step.

    Args:
        tokens: (rows, positions) of which the first ``step + 1`` are written, one to begin with.
        lprobs: (rows, words), set to -inf where a word would complete an n-gram that is there.
    """
    n = self.no_repeat_ngram_size
    written = tokens[:, 1 : step + 1]
    if step >= n:
        ngrams = written.unfold(1, n, 1)  # (rows, number, n)
        last = written[:, step - n + 1 :].unsqueeze(1)
        rows, numbers = ngrams[:, :, :-1].eq(last).all(dim=2).nonzero(as_tuple=True)
        lprobs[rows, ngrams[rows, numbers, -1]] = -torch.inf
    return lprobs


@mends(fairseq.search.DiverseBeamSearch, "step")
def diverse_beam_counts_rows(
    original, self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None
):
    """``--diverse-beam-groups`` looks up rows of the batch by the sentences' numbers.

    Seen: IndexError where a number exceeds the batch; where none does, the penalties of another
    sentence. The first step has all sentences, which tells the row of each.
    """
    if step == 0:
        self.first_batch_idxs = original_batch_idxs
    elif original_batch_idxs is not None:
        same = original_batch_idxs.unsqueeze(1).eq(self.first_batch_idxs)
        original_batch_idxs = same.int().argmax(dim=1)
    return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)


# Training without a GPU


@mends(fairseq.options, "parse_args_and_arch")
def bf16_is_no_tpu(original, *args, **kwargs):
    """The flag ``--bf16`` switches on ``--tpu``, on a GPU too.

    Seen: ``'NoneType' object has no attribute 'xla_device'`` (YAML files do not have this).
    Without torch_xla there is no TPU.
    """
    parsed = original(*args, **kwargs)
    options = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(options, "bf16", False) and fairseq.distributed.utils.xm is None:
        options.tpu = False
    return parsed


@mends(fairseq.trainer.Trainer, "__init__")
def fp16_needs_a_gpu(original, self, cfg, *args, **kwargs):
    """``--fp16`` on a CPU fails in the optimizer: ``Torch not compiled with CUDA enabled``.

    Raises ValueError before. ``--bf16``, ``--memory-efficient-fp16`` and ``--amp`` run.
    """
    common = getattr(cfg, "common", cfg)  # old scripts pass a flat Namespace
    on_cpu = common.cpu or not torch.cuda.is_available()
    if on_cpu and common.fp16 and not common.memory_efficient_fp16:
        raise ValueError("expected a GPU for --fp16, got a CPU: use --bf16, --amp or neither")
    return original(self, cfg, *args, **kwargs)


@mends(fairseq.criterions.adaptive_loss.AdaptiveLoss, "build_criterion")
def one_process_needs_no_ddp_backend(original, cls, cfg, task):
    """``--criterion adaptive_loss`` asks for ``--ddp-backend legacy_ddp``, also in one process.

    Bands of the softmax that no token falls into get no gradient, which only matters where
    gradients are exchanged.
    """
    if fairseq.distributed.utils.get_global_world_size() == 1:
        return cls(task, cfg.sentence_avg)
    return original(cls, cfg, task)


@mends(fairseq.distributed.utils, "infer_init_method")
def join_torchrun(original, cfg, *args, **kwargs):
    """``torchrun fairseq-train`` without a GPU runs independent jobs that share one folder.

    fairseq takes the number of GPUs, at least 1, for the number of processes, and never looks at
    torchrun's variables. Without a GPU they are used, with the gloo backend.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if (
        torch.cuda.is_available()
        or processes == 1
        or "MASTER_ADDR" not in os.environ
        or cfg.distributed_init_method is not None
    ):
        return original(cfg, *args, **kwargs)
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = processes
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_backend = "gloo"
    cfg.distributed_no_spawn = True
    cfg.device_id = 0


@mends(fairseq.models.distributed_fairseq_model, "DistributedDataParallel")
def no_devices_on_a_cpu(original, module, device_ids=None, output_device=None, **kwargs):
    """torch's DistributedDataParallel takes no device ids for a module on a CPU (ValueError)."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return original(module, device_ids=device_ids, output_device=output_device, **kwargs)


def matmul_precision_of_the_environment():
    """fairseq has no flag for ``torch.set_float32_matmul_precision``.

    ``TALK_MATMUL_PRECISION=medium`` makes matrix products in bfloat16 on processors that have them
    in hardware, and in tf32 on GPUs. Raises ValueError for a precision that torch does not know.
    """
    precision = os.environ.get("TALK_MATMUL_PRECISION", "highest")
    if precision not in ("highest", "high", "medium"):
        raise ValueError(
            f"TALK_MATMUL_PRECISION: expected highest, high or medium, got {precision!r}"
        )
    if precision != "highest":  # leave alone what the program may have set
        torch.set_float32_matmul_precision(precision)


def quiet_hydra():
    """Each command prints a screenful about how fairseq calls hydra 1.3, which works."""
    warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
    warnings.filterwarnings("ignore", message="\n'config' is validated against ConfigStore")


matmul_precision_of_the_environment()
quiet_hydra()
allow_checkpoint_types()
name_bad_checkpoints()
trust_own_job()
old_numpy_names()
# Commands are mended only where they run: importing them sets up logging.
for command in ("train", "hydra_train", "hydra_validate"):
    if f"fairseq_cli.{command}" in sys.modules:
        mends(sys.modules[f"fairseq_cli.{command}"], "add_defaults")(archs_set_defaults_in_yaml)
if "fairseq_cli.preprocess" in sys.modules:
    mends(sys.modules["fairseq_cli.preprocess"], "main")(check_corpora_first)

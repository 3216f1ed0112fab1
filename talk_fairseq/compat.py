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
import contextlib
import functools
import glob
import itertools
import logging
import math
import os
import shutil
import sys
import tarfile
import time
import types
import warnings

import fairseq.checkpoint_utils
import fairseq.criterions.adaptive_loss
import fairseq.data.data_utils
import fairseq.data.iterators
import fairseq.data.language_pair_dataset
import fairseq.data.token_block_dataset
import fairseq.dataclass.initialize
import fairseq.dataclass.utils
import fairseq.distributed.utils
import fairseq.file_chunker_utils
import fairseq.file_utils
import fairseq.models
import fairseq.models.distributed_fairseq_model
import fairseq.models.fairseq_model
import fairseq.modules.dynamic_crf_layer
import fairseq.modules.learned_positional_embedding
import fairseq.nan_detector
import fairseq.ngram_repeat_block
import fairseq.optim.amp_optimizer
import fairseq.options
import fairseq.search
import fairseq.tasks.fairseq_task
import fairseq.tasks.language_modeling
import fairseq.tasks.multilingual_language_modeling
import fairseq.trainer
import fairseq.utils
import numpy as np
import torch
from fairseq.file_io import PathManager
from fairseq.modules import LayerDropModuleList
from omegaconf import OmegaConf

from talk_fairseq.checkpoint_files import (
    Building,
    allow_checkpoint_types,
    evaluate,
    naming,
    read_checkpoint,
    whole_file,
)
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


def name_bad_checkpoints():
    """A truncated or foreign checkpoint fails with an error that names no file.

    Seen: ``OSError: Invalid argument``, pickle's ``Unsupported operand``, zip's ``failed finding
    central directory``, ``KeyError: 'best_loss'``. `read_checkpoint` names it.
    """

    def load(file, map_location="cpu", **_):  # other fairseqs ask for weights_only=False
        return read_checkpoint(file, map_location)

    overlay(fairseq.checkpoint_utils, torch, load=load)


@mends(fairseq.checkpoint_utils, "load_checkpoint_to_cpu")
def name_bad_options(original, path, *args, **kwargs):
    """Options or a history that cannot be read fail with an error that names no file."""
    with naming(path):
        return original(path, *args, **kwargs)


@mends(fairseq.checkpoint_utils, "load_model_ensemble_and_task")
def name_bad_models(original, filenames, arg_overrides=None, task=None, *args, **kwargs):
    """Of several models, fairseq does not say which one does not fit its options or dictionary.

    Options that ask for a model far beyond the size of the file took all memory there is.
    """
    ensemble, cfg = [], None
    for filename in filenames:
        with naming(filename), Building(filename):
            models, cfg, task = original([filename], arg_overrides, task, *args, **kwargs)
        ensemble += models
    return ensemble, cfg, task


@mends(fairseq.file_utils, "load_archive_file")
def unpack_inside_a_folder(original, archive_file):
    """``from_pretrained`` unpacks an archive wherever the names and links in it lead.

    Here it is refused. Raises ValueError before Python 3.11.4, which cannot tell.
    """

    class Inside(tarfile.TarFile):
        extraction_filter = staticmethod(getattr(tarfile, "data_filter", None))

    if os.path.isfile(archive_file) and not hasattr(tarfile, "data_filter"):
        raise ValueError(f"expected a folder, got {archive_file}: unpack it first")
    overlay(fairseq.file_utils, tarfile, open=Inside.open)
    with naming(archive_file):
        return original(archive_file)


@mends(fairseq.trainer.Trainer, "load_checkpoint")
def name_bad_training_states(original, self, filename, *args, **kwargs):
    """A foreign optimizer or loader state fails with an error that names no file."""
    with naming(filename):
        return original(self, filename, *args, **kwargs)


@mends(fairseq.checkpoint_utils, "torch_persistent_save")
def write_whole_checkpoints(original, obj, filename, async_write=False):
    """A checkpoint gets its name before it is on the disk, and a second try follows the first.

    fairseq tries three times, into the same open file: what a full disk cut short stands before
    what is then written, and nothing can read the file.
    """
    if async_write or not PathManager.supports_rename(filename):
        return original(obj, filename, async_write)
    for pause in (2.5, 2.5, None):  # seconds, as in fairseq
        try:
            with whole_file(filename) as file:
                return torch.save(obj, file)
        except Exception:
            if pause is None:
                raise
            time.sleep(pause)


@mends(PathManager, "copy")
def copy_whole_checkpoints(original, src_path, dst_path, overwrite=False):
    """A run that is killed while it saves leaves a part of a file as ``checkpoint_last.pt``.

    fairseq copies the checkpoint it has written over the last and the best one, in place.
    """
    if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
        return original(src_path, dst_path, overwrite)
    with open(src_path, "rb") as source, whole_file(dst_path) as file:
        shutil.copyfileobj(source, file, 1 << 24)
    return True


@mends(fairseq.checkpoint_utils, "verify_checkpoint_directory")
def remove_unfinished_checkpoints(original, save_dir):
    """What a killed run was writing stays in its folder. The next run there removes it."""
    original(save_dir)
    for path in glob.glob(os.path.join(glob.escape(save_dir), "*.pt.tmp")):
        os.remove(path)


@mends(fairseq.models.fairseq_model.BaseFairseqModel, "load_state_dict")
def parameters_keep_their_kind(original, self, state_dict, *args, **kwargs):
    """torch copies integers into parameters of a model without a word.

    Here they are among the errors that ``load_state_dict`` reports, beside wrong shapes.
    """

    def check(_, given, prefix, local_metadata, strict, missing, unexpected, errors):
        for name, parameter in self.named_parameters(remove_duplicate=False):
            value = given.get(name)
            if not isinstance(value, torch.Tensor) or value.is_floating_point():
                continue
            if parameter.is_floating_point():
                errors.append(f"dtype mismatch for {name}: {value.dtype}, not {parameter.dtype}.")

    hook = self.register_load_state_dict_pre_hook(check)
    try:
        return original(self, state_dict, *args, **kwargs)
    finally:
        hook.remove()


def options_run_no_code():
    """fairseq calls ``eval`` on options, those of a checkpoint among them.

    Seen in ``--encoder-layers`` of fconv and in ``eval_str_list``: loading a model runs what its
    options say. All modules of fairseq get `evaluate` in its place.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            vars(module).setdefault("eval", evaluate)


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


@mends(fairseq.tasks.fairseq_task.FairseqTask, "get_batch_iterator")
def batches_do_not_depend_on_where_a_run_goes_on(original, self, dataset, *args, **kwargs):
    """A run that goes on in its second epoch or later trains on other batches.

    fairseq makes batches once for all epochs, from the seed and the number of the epoch that the
    process begins with. Amid an epoch, some sentences are then seen twice and others never. Here
    the number is 1, unless batches are made anew in each epoch.
    """
    anew = kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
    if anew or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
        return original(self, dataset, *args, **kwargs)
    epoch = kwargs.get("epoch", 1)
    iterator = original(self, dataset, *args, **{**kwargs, "epoch": 1})
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator


@mends(fairseq.data.iterators.GroupedIterator, "__init__")
def groups_begin_where_training_goes_on(
    original, self, iterable, chunk_size, skip_remainder_batch=False
):
    """A run that goes on with another ``--update-freq`` may leave out the end of an epoch.

    And then train on all of that epoch once more: fairseq counts groups from the epoch's
    beginning, also of what begins amid a group.
    """
    batches = len(iterable) - getattr(iterable, "n", 0)
    original(self, iterable, chunk_size, skip_remainder_batch)
    if not skip_remainder_batch:
        self.total = self.n + math.ceil(batches / chunk_size)


@mends(fairseq.data.iterators.EpochBatchIterator, "_get_iterator_for_epoch")
def epochs_after_a_curriculum_are_shuffled(original, self, epoch, shuffle, *args, **kwargs):
    """With ``--curriculum N`` no epoch is shuffled, not only the first N.

    Only a run that goes on later does it: fairseq says whether to shuffle where it makes a data
    loader, which it does once for all epochs.
    """
    if self.reuse_dataloader and self.dataloader is not None:
        self.epoch_batch_sampler.shuffle = shuffle
    return original(self, epoch, shuffle, *args, **kwargs)


@mends(fairseq.data.iterators.EpochBatchIterator, "state_dict")
def remember_how_many_share_an_epoch(original, self):
    """What `an_epoch_goes_on_in_other_processes` has to know."""
    return {**original(self), "num_shards": self.num_shards}


@mends(fairseq.data.iterators.EpochBatchIterator, "load_state_dict")
def an_epoch_goes_on_in_other_processes(original, self, state_dict):
    """Amid an epoch, a run cannot go on in more processes, or in fewer sees sentences again.

    Seen: ``Cannot resume training due to dataloader mismatch``. What is saved is how many batches
    each process has had. Batches are dealt out in one order, so all of them together tell where to
    go on; if that is not the same for all processes, some are seen again.
    """
    done = state_dict.get("iterations_in_epoch", 0) * state_dict.get("num_shards", self.num_shards)
    return original(self, {**state_dict, "iterations_in_epoch": done // self.num_shards})


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


def utf8_lines(file, name):
    """The lines of an open binary ``file``, ended by line feeds alone, as text.

    A byte order mark is dropped. Raises ValueError that names file and line for bytes that are not
    UTF-8.
    """
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            got = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            raise ValueError(f"{name}: line {number}: expected UTF-8, got {got}") from None


def lines_end_at_line_feeds():
    """``fairseq-preprocess`` also ends lines at lone carriage returns.

    Seen: more sentences than ``wc -l`` counts, and every later pair one off.
    """
    fairseq.file_chunker_utils.open = functools.partial(open, newline="\n")


def read_lines_as_they_are(original, input, buffer_size):
    """``fairseq-interactive`` also ends lines at lone carriage returns.

    Seen: more hypotheses than lines. Raises ValueError that names file and line for bytes that
    are not UTF-8, of a file that is no pipe before anything is translated.
    """
    with contextlib.ExitStack() as stack:
        if input == "-":
            name, file = "standard input", sys.stdin.buffer
        else:
            name, file = input, stack.enter_context(open(input, "rb"))
            if file.seekable():
                for _ in utf8_lines(file, name):
                    pass
                file.seek(0)
        lines = (line.strip() for line in utf8_lines(file, name))
        while buffer := list(itertools.islice(lines, buffer_size)):
            yield buffer


def check_corpora_first(original, args):
    """``fairseq-preprocess`` finds a missing file last and a one-sided corpus never.

    Seen: FileNotFoundError after the training set has been written; lines that do not match
    fail in training. Here, with ``--user-dir``, nothing is written before all files are
    there (FileNotFoundError), are UTF-8, and have as many lines in both languages (ValueError).
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
            with open(path, "rb") as file:
                lines[path] = sum(1 for _ in utf8_lines(file, path))
        if len(set(lines.values())) > 1:
            raise ValueError(f"expected as many lines in both languages, got {lines}")
    return original(args)


@mends(fairseq.tasks.fairseq_task.FairseqTask, "filter_indices_by_size")
def name_what_limits_lengths(original, self, *args, **kwargs):
    """A sentence over the maximum length is an error that names no flag but one to skip it."""
    try:
        return original(self, *args, **kwargs)
    except Exception as error:
        if type(error) is not Exception:
            raise
        flags = "--max-source-positions, --max-target-positions or --tokens-per-sample"
        raise ValueError(f"{str(error).rstrip('.')}, or raise {flags}") from None


@mends(fairseq.modules.learned_positional_embedding.LearnedPositionalEmbedding, "__call__")
def name_what_limits_positions(original, self, input, incremental_state=None, positions=None):
    """More tokens than learned positions are ``IndexError: index out of range in self``.

    On a GPU, a failed assertion of the device that ends the process. Only the number of columns
    is looked at, which is at least that of the positions. ``forward`` stays as it is for
    TorchScript, which compiles it.
    """
    tokens = input.shape[1]
    if positions is None and tokens > self.max_positions:
        longest = int(input.ne(self.padding_idx).sum(dim=1).max())
        if longest > self.max_positions:
            raise ValueError(
                f"expected at most {self.max_positions} tokens, one for each learned position, got "
                f"{longest}: train with a larger --max-source-positions, --max-target-positions "
                "or --tokens-per-sample"
            )
    return original(self, input, incremental_state, positions)


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


@mends(fairseq.nan_detector.NanDetector, "add_hooks")
def watch_gradients_of_outputs(original, self, module):
    """fairseq's search for NaN fails itself: ``StopIteration``, without a word about NaN.

    Seen with any encoder-decoder: torch's hooks on the backward of modules want a tensor, or a
    dictionary of tensors, and encoders return lists. Hooks on what modules return want nothing.
    """

    def watch(module, _, output):
        def tensor_hook(tensor):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.bhook_fn(module, (), gradient))

        fairseq.utils.apply_to_sample(tensor_hook, output)

    self.fhooks += [module.register_forward_hook(hook) for hook in (self.fhook_fn, watch)]


@mends(fairseq.nan_detector.NanDetector, "_detect")
def remember_what_is_not_finite(original, self, tensor, name, backward):
    """What `name_where_nan_began` is to say: one line each for forward and backward, the first."""
    found = original(self, tensor, name, backward)
    if found:
        vars(self).setdefault("found", {}).setdefault(backward, found)
    return found


@mends(fairseq.nan_detector.NanDetector, "__exit__")
def name_where_nan_began(original, self, exc_type, exc_value, traceback):
    """Training that ends in gradients that are not finite does not say where they began.

    fairseq has a look at every module then, on the same batch once more, but only warns of what
    it finds, among the norms of all parameters. Here the FloatingPointError that ends the training
    names the first module whose output, or whose gradient, was NaN or infinite.
    """
    original(self, exc_type, exc_value, traceback)
    error = sys.exception()
    if exc_type is None and isinstance(error, FloatingPointError) and hasattr(self, "found"):
        first = self.found.get(False) or self.found[True]
        raise FloatingPointError(f"{str(error).rstrip('.')}; the first: {first}") from error


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


def overflow_needs_no_gpu():
    """Without a GPU, ``--memory-efficient-fp16`` ends at the first overflow.

    Seen: ``Torch not compiled with CUDA enabled``, of the zero that stands for the norm of
    gradients that overflowed. What the trainer makes a tensor of stays on the CPU.
    """

    class OnTheCPU(torch.Tensor):
        def cuda(self, *args, **kwargs):
            return self.as_subclass(torch.Tensor)

    def tensor(*args, **kwargs):
        value = torch.tensor(*args, **kwargs)
        return value if torch.cuda.is_available() else value.as_subclass(OnTheCPU)

    overlay(fairseq.trainer, torch, tensor=tensor)


@mends(fairseq.optim.amp_optimizer.AMPOptimizer, "clip_grad_norm")
def amp_without_a_gpu_scales_nothing(original, self, max_norm, aggregate_norm_fn=None):
    """``--amp`` without a GPU: gradients that are not finite end in an AttributeError.

    torch has disabled the scaler there, which then has no scale to lower. They are the
    FloatingPointError that they are without ``--amp``.
    """
    if self.scaler.is_enabled():
        return original(self, max_norm, aggregate_norm_fn)
    norm = self.fp32_optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)
    if not torch.isfinite(norm).all():
        raise FloatingPointError("gradients are Nan/Inf")
    return norm


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


@mends(fairseq.models, "DistributedFairseqModel")
def layers_are_dropped_where_that_can_be(original, args, model, *more, **kwargs):
    """With ``--encoder-layerdrop`` and several processes, training ends amid an update.

    With an error of gloo or NCCL, or of unused parameters: torch's DistributedDataParallel waits
    for gradients of layers that were dropped. Told to expect that (``--find-unused-parameters``),
    it makes other gradients after a validation, where gradients are accumulated.
    """
    dropped = any(isinstance(part, LayerDropModuleList) and part.p > 0 for part in model.modules())
    if dropped and args.ddp_backend in ("c10d", "pytorch_ddp") and not args.tpu:
        raise ValueError(
            f"--ddp-backend: expected legacy_ddp to drop layers (--encoder-layerdrop, "
            f"--decoder-layerdrop) in several processes, got {args.ddp_backend}"
        )
    return original(args, model, *more, **kwargs)


def a_finished_run_is_finished(original, cfg, trainer, task, epoch_itr):
    """Each time a run that has had its ``--max-update`` is started again, it makes one update more.

    And saves it: the parameters are then not those that it ended with.
    """
    most = cfg.optimization.max_update
    if most and trainer.get_num_updates() >= most:
        logging.getLogger("fairseq_cli.train").info(
            "finished: %d of --max-update %d", trainer.get_num_updates(), most
        )
        return [None], True
    return original(cfg, trainer, task, epoch_itr)


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
options_run_no_code()
trust_own_job()
lines_end_at_line_feeds()
overflow_needs_no_gpu()
old_numpy_names()
# Commands are mended only where they run: importing them sets up logging.
for command in ("train", "hydra_train", "hydra_validate"):
    if f"fairseq_cli.{command}" in sys.modules:
        mends(sys.modules[f"fairseq_cli.{command}"], "add_defaults")(archs_set_defaults_in_yaml)
if "fairseq_cli.train" in sys.modules:
    mends(sys.modules["fairseq_cli.train"], "train")(a_finished_run_is_finished)
if "fairseq_cli.preprocess" in sys.modules:
    mends(sys.modules["fairseq_cli.preprocess"], "main")(check_corpora_first)
if "fairseq_cli.interactive" in sys.modules:
    mends(sys.modules["fairseq_cli.interactive"], "buffered_read")(read_lines_as_they_are)

"""Patches of training: where NaN began, several processes, finished runs, matrix products."""

import logging
import os
import sys
import warnings

import fairseq.criterions.adaptive_loss
import fairseq.distributed.utils
import fairseq.models
import fairseq.nan_detector
import fairseq.utils
import torch
from fairseq.modules import LayerDropModuleList

from talk_fairseq.compat.patching import applies, patches, patches_command

# --- Where NaN began ---


@patches(fairseq.nan_detector.NanDetector, "add_hooks")
def hook_gradients_of_outputs(original, self, module):
    """Watch gradients with hooks on what modules return, which may be of any type.

    Without it: fairseq's search for NaN fails itself with any encoder-decoder, with
    ``StopIteration`` and no word about NaN. torch's hooks on the backward of modules want a
    tensor, or a dictionary of tensors, and encoders return lists.
    """

    def watch(module, _, output):
        def tensor_hook(tensor):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.bhook_fn(module, (), gradient))

        fairseq.utils.apply_to_sample(tensor_hook, output)

    self.fhooks += [module.register_forward_hook(hook) for hook in (self.fhook_fn, watch)]


@patches(fairseq.nan_detector.NanDetector, "_detect")
def remember_first_non_finite(original, self, tensor, name, backward):
    """Remember one line each for forward and backward, the first.

    Without it: `name_module_where_nan_began` has nothing to say.
    """
    found = original(self, tensor, name, backward)
    if found:
        vars(self).setdefault("found", {}).setdefault(backward, found)
    return found


@patches(fairseq.nan_detector.NanDetector, "__exit__")
def name_module_where_nan_began(original, self, exc_type, exc_value, traceback):
    """Name the first module whose output, or whose gradient, was NaN or infinite.

    The FloatingPointError that ends the training says it. Without it: fairseq runs the same batch
    once more to look at every module, but only warns of what it finds, among the norms of all
    parameters.
    """
    original(self, exc_type, exc_value, traceback)
    error = sys.exception()
    if exc_type is None and isinstance(error, FloatingPointError) and hasattr(self, "found"):
        first = self.found.get(False) or self.found[True]
        raise FloatingPointError(f"{str(error).rstrip('.')}; the first: {first}") from error


# --- Processes ---


@patches(fairseq.criterions.adaptive_loss.AdaptiveLoss, "build_criterion")
def allow_adaptive_loss_in_one_process(original, cls, cfg, task):
    """Build ``--criterion adaptive_loss`` in one process with any ``--ddp-backend``.

    Without it: it asks for ``legacy_ddp`` there too. Bands of the softmax that no token falls into
    get no gradient, which only matters where gradients are exchanged.
    """
    if fairseq.distributed.utils.get_global_world_size() == 1:
        return cls(task, cfg.sentence_avg)
    return original(cls, cfg, task)


@patches(fairseq.models, "DistributedFairseqModel")
def require_legacy_ddp_for_layerdrop(original, args, model, *more, **kwargs):
    """Raise ValueError for ``--encoder-layerdrop`` in several processes without legacy_ddp.

    Without it: training ends during an update, with an error of gloo or NCCL, or of unused
    parameters: torch's DistributedDataParallel waits for gradients of layers that were dropped.
    With ``--find-unused-parameters`` it computes other gradients after a validation, where they
    are accumulated.
    """
    dropped = any(isinstance(part, LayerDropModuleList) and part.p > 0 for part in model.modules())
    if dropped and args.ddp_backend in ("c10d", "pytorch_ddp") and not args.tpu:
        raise ValueError(
            f"--ddp-backend: expected legacy_ddp to drop layers (--encoder-layerdrop, "
            f"--decoder-layerdrop) in several processes, got {args.ddp_backend}"
        )
    return original(args, model, *more, **kwargs)


# --- Runs ---


@patches_command("train", "train")
def leave_finished_runs_alone(original, cfg, trainer, task, epoch_itr):
    """Train nothing where a run has already had its ``--max-update``.

    Without it: each time it is started again, it makes one update more and saves it; the
    parameters are then not those that it ended with.
    """
    most = cfg.optimization.max_update
    if most and trainer.get_num_updates() >= most:
        logging.getLogger("fairseq_cli.train").info(
            "finished: %d of --max-update %d", trainer.get_num_updates(), most
        )
        return [None], True
    return original(cfg, trainer, task, epoch_itr)


@applies
def set_matmul_precision():
    """Set torch's precision of matrix products from ``TALK_MATMUL_PRECISION``.

    With ``medium`` they are made in bfloat16 on processors that have it in hardware, and in tf32
    on GPUs. Raises ValueError for a precision that torch does not know. Without it: fairseq has no
    flag for ``torch.set_float32_matmul_precision``.
    """
    precision = os.environ.get("TALK_MATMUL_PRECISION", "highest")
    if precision not in ("highest", "high", "medium"):
        raise ValueError(
            f"TALK_MATMUL_PRECISION: expected highest, high or medium, got {precision!r}"
        )
    if precision != "highest":  # leave alone what the program may have set
        torch.set_float32_matmul_precision(precision)


@applies
def silence_hydra_warnings():
    """Ignore the warnings about how fairseq calls hydra 1.3, which works.

    Without it: each command prints a screenful of them.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
    warnings.filterwarnings("ignore", message="\n'config' is validated against ConfigStore")

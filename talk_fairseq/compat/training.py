"""Patches of training: where NaN began, several processes, finished runs, matrix products."""

import logging
import os
import sys
import warnings
from types import SimpleNamespace

import fairseq.distributed.utils
import fairseq.nan_detector
import fairseq.trainer
import fairseq.utils
import torch
from fairseq.modules import LayerDropModuleList

from talk_fairseq.compat.patching import patches, patches_command


class NanDetector(fairseq.nan_detector.NanDetector):
    """fairseq's search for the module where NaN began, which ends the training with what it found.

    fairseq runs the batch that failed once more, with hooks on every module; the first whose output
    or gradient is NaN or infinite is named in the FloatingPointError. Without it: the search fails
    itself with any encoder-decoder, with ``StopIteration``, and otherwise only warns.
    """

    found = None

    def add_hooks(self, module):
        """Watch gradients where outputs are, since torch's backward hooks refuse lists."""

        def watch(module, _, output):
            def tensor_hook(tensor):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self.bhook_fn(module, (), gradient))

            fairseq.utils.apply_to_sample(tensor_hook, [output])  # which refuses a scalar alone

        self.fhooks += [module.register_forward_hook(hook) for hook in (self.fhook_fn, watch)]

    def _detect(self, tensor, name, backward):
        found = super()._detect(tensor, name, backward)
        self.found = self.found or found
        return found

    def __exit__(self, exc_type, *rest):
        super().__exit__(exc_type, *rest)
        if exc_type is None and self.found:
            said = str(sys.exception()).rstrip(".")
            raise FloatingPointError(f"{said}; the first: {self.found}")


fairseq.trainer.NanDetector = NanDetector


@patches("fairseq.criterions.adaptive_loss.AdaptiveLoss", "build_criterion")
def allow_adaptive_loss_in_one_process(original, cls, cfg, task):
    """Build ``--criterion adaptive_loss`` in one process with any ``--ddp-backend``.

    Without it: it asks for ``legacy_ddp`` there too. Bands of the softmax that no token falls into
    get no gradient, which only matters where gradients are exchanged.
    """
    if fairseq.distributed.utils.get_global_world_size() == 1:
        return cls(task, cfg.sentence_avg)
    return original(cls, cfg, task)


@patches("fairseq.distributed.utils", "infer_init_method")
def join_torchrun(original, cfg, *args, **kwargs):
    """Join the processes of ``torchrun fairseq-train`` without a GPU, or with one on each node.

    Without a GPU, the backend is gloo. Without it: they are independent jobs that share one folder.
    fairseq takes the number of GPUs of its node, at least 1, for that of processes, and looks at
    torchrun's variables only where there are several.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            cfg.distributed_world_size = processes
        return original(cfg, *args, **kwargs)
    started = processes > 1 and "MASTER_ADDR" in os.environ
    if not started or cfg.distributed_init_method is not None:
        return original(cfg, *args, **kwargs)
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = processes
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_backend = "gloo"
    cfg.distributed_no_spawn = True
    cfg.device_id = 0


@patches("fairseq.models", "DistributedFairseqModel")
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


@patches("fairseq.models.ema.ema.EMA", "restore")
def keep_last_norms_in_averages(original, self, state_dict, build_fp32_params=False):
    """Let the moving average of ``--store-ema`` keep the versions of its parts.

    Without it: fairseq averages all but these, takes the average for one of an old model without a
    norm after its last layer, and drops that norm at the first update, silently.
    """
    versions = {k: v for k, v in self.model.named_buffers() if k.endswith("version")}
    return original(self, versions | state_dict, build_fp32_params)


@patches("fairseq.models.ema.ema.EMA", "_step_internal")
def average_shared_parameters_once(original, self, new_model, updates=None):
    """Average each tensor once, by the first of its names.

    Without it: fairseq averages embeddings that three parts of a model share three times at each
    update, so that they forget three times as fast.
    """
    first = {}
    for name, value in new_model.state_dict().items():
        shared = isinstance(value, torch.Tensor) and value.numel() and value.data_ptr()
        first.setdefault(shared or name, (name, value))
    for name in new_model.state_dict().keys() - dict(first.values()).keys():
        self.fp32_params.pop(name, None)  # a copy in float32, which would stay as it is
    return original(self, SimpleNamespace(state_dict=lambda: dict(first.values())), updates)


@patches("fairseq.trainer.Trainer", "__init__")
def refuse_noise_that_stays(original, self, cfg, *args, **kwargs):
    """Raise ValueError for ``--quant-noise-pq`` where its noise stays for a second pass.

    Without it: training destroys the model silently. The noise is written into the parameters, and
    only ``--fp16`` and ``--bf16`` write what was there back, after an update. Before that, another
    batch, SimCut's second pass, or activations that are computed again would add noise to noise.
    """
    model = getattr(cfg, "model", cfg)  # old scripts pass flat options
    if getattr(model, "quant_noise_pq", 0):
        common = getattr(cfg, "common", cfg)
        fp16 = common.fp16 and not common.memory_efficient_fp16
        if not fp16 and not (common.bf16 and not common.memory_efficient_bf16):
            raise ValueError("expected --fp16 or --bf16 with --quant-noise-pq, got neither")
        if max(getattr(cfg, "optimization", cfg).update_freq) > 1:
            raise ValueError("update_freq: expected 1 with --quant-noise-pq, got more")
        if getattr(getattr(cfg, "criterion", cfg), "simcut_alpha", 0):
            raise ValueError("simcut_alpha: expected 0 with --quant-noise-pq, got more")
        for name in ("checkpoint_activations", "offload_activations"):
            if getattr(model, name, False):
                raise ValueError(f"{name}: expected False with --quant-noise-pq, got True")
    return original(self, cfg, *args, **kwargs)


@patches_command("train", "train")
def leave_finished_runs_alone(original, cfg, trainer, task, epoch_itr):
    """Train nothing where a run has already had its ``--max-update``.

    Without it: each time it is started again, it makes one update more and saves it; the
    parameters are then not those that it ended with.
    """
    most, done = cfg.optimization.max_update, trainer.get_num_updates()
    if most and done >= most:
        logging.getLogger("fairseq_cli.train").info("finished: %d of --max-update %d", done, most)
        return [None], True
    return original(cfg, trainer, task, epoch_itr)


# fairseq has no flag for torch's precision of matrix products. With ``medium`` they are made in
# bfloat16 on processors that have it in hardware, and in tf32 on GPUs.
precision = os.environ.get("TALK_MATMUL_PRECISION", "highest")
if precision not in ("highest", "high", "medium"):
    raise ValueError(f"TALK_MATMUL_PRECISION: expected highest, high or medium, got {precision!r}")
if precision != "highest":  # leave alone what the program may have set
    torch.set_float32_matmul_precision(precision)

# Without these: each command prints a screenful about how fairseq calls hydra 1.3, which works.
warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
warnings.filterwarnings("ignore", message="\n'config' is validated against ConfigStore")

"""Patches of training without a GPU, in one process or several."""

import fairseq.distributed.utils
import torch

from talk_fairseq.compat.patching import overlay, patches


@patches("fairseq.options", "parse_args_and_arch")
def train_bf16_without_tpu(original, *args, **kwargs):
    """Switch ``--tpu`` off again, which the flag ``--bf16`` switches on, on a GPU too.

    There is no TPU without torch_xla. Without this patch: ``'NoneType' object has no attribute
    'xla_device'`` (YAML files do not have this).
    """
    parsed = original(*args, **kwargs)
    options = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(options, "bf16", False) and fairseq.distributed.utils.xm is None:
        options.tpu = False
    return parsed


@patches("fairseq.trainer.Trainer", "__init__")
def refuse_fp16_on_cpu(original, self, cfg, *args, **kwargs):
    """Raise ValueError for ``--fp16`` on a CPU, before anything is trained.

    ``--bf16``, ``--memory-efficient-fp16`` and ``--amp`` run. Without it: the optimizer fails with
    ``Torch not compiled with CUDA enabled``.
    """
    common = getattr(cfg, "common", cfg)  # old scripts pass a flat Namespace
    on_cpu = common.cpu or not torch.cuda.is_available()
    if on_cpu and common.fp16 and not common.memory_efficient_fp16:
        raise ValueError("expected a GPU for --fp16, got a CPU: use --bf16, --amp or neither")
    return original(self, cfg, *args, **kwargs)


def tensor_that_stays(*args, **kwargs):
    """Make a tensor whose ``cuda()`` is itself where there is no GPU."""
    value = torch.tensor(*args, **kwargs)
    if not torch.cuda.is_available():
        value.cuda = value.cpu
    return value


# Without it: ``--memory-efficient-fp16`` on a CPU ends at the first overflow with ``Torch not
# compiled with CUDA enabled``: the trainer moves the norm of the gradients, then 0, to a GPU.
overlay("fairseq.trainer", "torch", tensor=tensor_that_stays)


@patches("fairseq.optim.amp_optimizer.AMPOptimizer", "clip_grad_norm")
def clip_gradients_without_scaler(original, self, max_norm, aggregate_norm_fn=None):
    """Clip the gradients of ``--amp`` without a GPU, where torch has disabled the scaler.

    Raises FloatingPointError for gradients that are not finite, as without ``--amp``. Without it:
    an AttributeError, since the disabled scaler has no scale to lower.
    """
    if self.scaler.is_enabled():
        return original(self, max_norm, aggregate_norm_fn)
    norm = self.fp32_optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)
    if not torch.isfinite(norm).all():
        raise FloatingPointError("gradients are Nan/Inf")
    return norm


@patches("fairseq.models.distributed_fairseq_model", "DistributedDataParallel")
def omit_device_ids_on_cpu(original, module, device_ids=None, output_device=None, **kwargs):
    """Pass DistributedDataParallel no device ids on a CPU, where they are a ValueError."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return original(module, device_ids=device_ids, output_device=output_device, **kwargs)

"""``--optimizer fused_adam``: fairseq's Adam, computed by one of PyTorch's fused kernels.

fairseq's own ``adam`` makes seven or eight calls for each parameter, unless apex is installed. This
one reads and writes each number once, on CPUs and GPUs.
"""

import collections
import math

import torch
from fairseq.optim import FairseqOptimizer, adam, register_optimizer

from talk_fairseq.compat.updates import copy_together

_WIDENED = 16  # 16-bit parameters that are copied to float32 at a time


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as ``fairseq.optim.adam.Adam`` computes it.

    Update n of a parameter p, whose gradient is g, computes::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr * weight_decay * p
              - lr * sqrt(1 - beta2**n) / (1 - beta1**n) * m / (sqrt(v) + eps)

    Results differ from fairseq's by rounding alone. The state has fairseq's names and types, so
    that either optimizer can resume from a checkpoint of the other. Parameters in float16 or
    bfloat16 have states in float32, and are rounded once per update; PyTorch's own
    `load_state_dict` rounds these states too, fairseq's ``--memory-efficient-…`` does not.
    `lr`, `betas`, `eps` and `weight_decay` are those of ``torch.optim.AdamW``, but `weight_decay`
    defaults to 0. ValueError for a beta outside [0, 1), RuntimeError for a sparse gradient.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers from 0 to below 1, got {betas}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; return what `closure` returns, or None."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            # One call for all parameters that have the same number of updates: nearly always all.
            same = collections.defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same[self._begin_update(p), p.device, p.dtype].append(p)
            for (step, _, dtype), params in same.items():
                # 16-bit parameters are widened for the kernel: some at a time, to save memory.
                size = _WIDENED if dtype.itemsize == 2 else len(params)
                for first in range(0, len(params), size):
                    self._update(params[first : first + size], step, group)
        return loss

    def _begin_update(self, p):
        """Make the state of `p` float32 (or float64), and return the number of this update."""
        if p.grad.is_sparse:
            raise RuntimeError("gradients: expected dense ones, got a sparse one")
        state = self.state[p]
        dtype = torch.promote_types(p.dtype, torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=dtype)
            # fairseq may load it in p's dtype.
            state[name] = state[name].to(p.device, dtype).contiguous()
        state["step"] = int(state.get("step", 0)) + 1
        return state["step"]

    def _update(self, params, step, group):
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        wide = _contiguous(params, means[0].dtype)
        gradients = _contiguous([p.grad for p in params], means[0].dtype)
        # Filled on the device: a copy from the host would wait for a GPU. A GPU reads float32.
        number = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        steps = [number] * len(params)
        beta1, beta2 = group["betas"]
        # PyTorch adds eps to the corrected root, fairseq to the root as it is.
        eps = group["eps"] / math.sqrt(1 - beta2**step)
        torch._fused_adamw_(
            wide, gradients, means, squares, [], steps, lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        copy_together([(p, rounded) for p, rounded in zip(params, wide) if rounded is not p])


def _contiguous(tensors, dtype):
    """Return the tensors in `dtype` and contiguous, as copies where they are not.

    The fused kernel needs that; on a CPU it reads any other memory wrongly, unchecked.
    """
    fitting = [
        t if t.dtype is dtype and t.is_contiguous() else t.new_empty(t.shape, dtype=dtype)
        for t in tensors
    ]
    copy_together([(copy, t) for copy, t in zip(fitting, tensors) if copy is not t])
    return fitting


@register_optimizer("fused_adam", dataclass=adam.FairseqAdamConfig)
class FairseqAdam(adam.FairseqAdam):
    """:class:`FusedAdam` with the options of fairseq's ``adam``.

    It has the name of fairseq's class, since fairseq goes on from a checkpoint only where the
    optimizer has the name that the checkpoint holds. Raises ValueError for ``--fp16-adam-stats``,
    which needs apex.
    """

    def __init__(self, cfg, params):
        FairseqOptimizer.__init__(self, cfg)
        if cfg.fp16_adam_stats:
            raise ValueError("fp16_adam_stats: expected false with fused_adam, got true")
        self._optimizer = FusedAdam(params, **self.optimizer_config)

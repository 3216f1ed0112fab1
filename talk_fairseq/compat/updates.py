"""Patches of an update: one call for all parameters, where fairseq makes one for each.

On a GPU each call launches a kernel, and most of these take longer to launch than to run. Without
the patches a training step of IWSLT's size makes some 1,080 calls more in bfloat16, 540 more in
float16 and 270 more in float32. Numbers stay the same, bit for bit, but for norms on a GPU and the
gradients that these clip.
"""

import collections

import fairseq.utils
import torch
from torch._utils import _unflatten_dense_tensors

from talk_fairseq.compat.patching import patches


def copy_together(pairs):
    """Copy the second tensor of each pair into the first, in one call for each dtype."""
    groups = collections.defaultdict(list)
    for pair in pairs:
        groups[pair[0].dtype].append(pair)
    for group in groups.values():
        torch._foreach_copy_(*map(list, zip(*group)))


def _with_wide(optimizer, part):
    """Return each 16-bit parameter that trains with `part` of what holds it in float32.

    `part` takes a float32 parameter, and returns it or its gradient. With ``--fp16`` fairseq keeps
    one long parameter for each GPU.
    """
    if not optimizer.has_flat_params:
        pairs = zip(optimizer.fp16_params, optimizer.fp32_params)
        return [(p, part(wide)) for p, wide in pairs if p.requires_grad]
    pairs = []
    for device, flat in optimizer.fp32_params.items():
        params = [p for p in optimizer.fp16_params if p.device.index == device]
        pairs += zip(params, _unflatten_dense_tensors(part(flat), params))
    return pairs


def _gradient(wide):
    if wide.grad is None:
        wide.grad = torch.zeros_like(wide)
    return wide.grad


@patches("fairseq.optim.fp16_optimizer._FP16OptimizerMixin", "_sync_fp16_grads_to_fp32")
def widen_gradients_at_once(original, self):
    """Copy the gradients to float32 in one call, after a backward pass.

    Without it: a call for each parameter.
    """
    if not self._needs_sync:
        return
    pairs = _with_wide(self, _gradient)
    for p, wide in pairs:
        if p.grad is None:
            wide.zero_()
    copy_together([(wide, p.grad) for p, wide in pairs if p.grad is not None])
    self._needs_sync = False


@patches("fairseq.optim.fp16_optimizer._FP16OptimizerMixin", "_sync_fp32_params_to_fp16")
@torch.no_grad()
def round_parameters_at_once(original, self):
    """Copy the parameters back from float32 in one call, after an update.

    Without it: a call for each parameter.
    """
    copy_together(_with_wide(self, lambda wide: wide))


@patches("fairseq.optim.fp16_optimizer._FP16OptimizerMixin", "zero_grad")
def clear_gradients_at_once(original, self):
    """Set the gradients in float32 to 0 in one call, and drop those of 16 bits.

    Without it: a call for each parameter, in bfloat16.
    """
    for p in self.fp16_params:
        p.grad = None
    wide = self.fp32_params.values() if self.has_flat_params else self.fp32_params
    if gradients := [p.grad for p in wide if p.grad is not None]:
        torch._foreach_zero_(gradients)
    self._needs_sync = False
    if self.scaler is not None:
        self._multiply_factor = 1.0 / float(self.scaler.loss_scale)


@patches("fairseq.utils", "multi_tensor_total_norm")
def measure_gradients_at_once(original, grads, *args, **kwargs):
    """Return the norm of all gradients, in float32, from one call that needs no apex.

    Without it: a call for each parameter where there is no apex. Where there is a GPU, fairseq also
    moves the norms of a training on the CPU there.
    """
    norms = torch._foreach_norm(grads, 2, torch.float32)
    return torch.norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


# fairseq calls multi_tensor_total_norm only where it has found apex.
fairseq.utils.multi_tensor_l2norm_available = True

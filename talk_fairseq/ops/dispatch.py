"""How a call reaches a backend: its choice, and registration with PyTorch."""

import os

import torch

from talk_fairseq.ops import cpu_backend, cuda_backend

_LIBRARY = torch.library.Library("talk_conv", "DEF")


def backend_name(x):
    """The backend's name for `x`: by its device, unless TALK_CONV_BACKEND forces one."""
    forced = os.environ.get("TALK_CONV_BACKEND")
    if forced is None:
        return "cpu" if x.is_cpu else "cuda" if x.is_cuda else "reference"
    device = x.device.type
    if forced not in ("reference", "cpu", "cuda"):
        raise ValueError(f"TALK_CONV_BACKEND: expected reference, cpu or cuda, got {forced!r}")
    if forced != "reference" and forced != device:
        raise ValueError(
            f"TALK_CONV_BACKEND: expected {device} or reference for x on {x.device}, got {forced!r}"
        )
    return forced


def backend_of(x):
    """The module whose kernels compute on the device of `x`."""
    return cuda_backend if x.is_cuda else cpu_backend


def empty_like(tensor):
    """Uninitialised memory of the shape and dtype of `tensor`, contiguous whatever its strides."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def register(schema, kernel, fake, setup_context=None, backward=None):
    """An operator of PyTorch, at half the time a call that `torch.library.custom_op` takes.

    Args:
        schema: its name, arguments and results.
        kernel: computes it on a CPU and on CUDA.
        fake: its results with no values in them.
        setup_context, backward: as in :class:`torch.autograd.Function`; without them it has no
            derivatives, and a backward pass that needs them fails.

    Returns:
        The operator.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    op = getattr(torch.ops.talk_conv, name).default
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"talk_conv::{name}", fake, lib=_LIBRARY)
    redispatch, below = op.redispatch, torch._C._after_autograd_keyset

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *inputs):
            output = redispatch(keyset & below, *inputs)
            if setup_context is not None:
                setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *gradients):
            if backward is None:
                raise RuntimeError(
                    f"talk_conv::{name}: expected no derivative of it to be needed; "
                    "talk_conv_reference has second derivatives"
                )
            return None, *backward(ctx, *gradients)

    def autograd(keyset, *inputs):
        if torch.is_grad_enabled():
            for value in inputs:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    return Gradient.apply(keyset, *inputs)
        return redispatch(keyset & below, *inputs)

    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    return op

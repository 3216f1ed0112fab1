"""A short depthwise convolution, which may stand before the windows: not in the paper."""

import torch

from talk_fairseq.ops.dispatch import backend_name, register


def short_conv(x, weight, left):
    """Compute ``out[t] = sum(weight[k] * x[t - left + k] for k in range(K))``, channel by channel.

    It is a depthwise ``torch.nn.functional.conv1d``, with zeros beyond the ends.

    Args:
        x: (T, B, C).
        weight: (K, C), on the same device.
        left: taps on the left of t, 0 to K - 1.

    Returns:
        (T, B, C) in the wider of the two dtypes; differentiable in both. float16 and bfloat16 are
        computed in float32 and rounded once.

    Raises:
        ValueError: shapes or devices do not match, or `left` is not that of a tap.
    """
    K, C = weight.shape
    if x.dim() != 3 or x.shape[2] != C:
        raise ValueError(f"x: expected shape (T, B, {C}) as of weight, got {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x: expected device {weight.device} as of weight, got {x.device}")
    if not 0 <= left < K:
        raise ValueError(f"left: expected 0 to {K - 1}, got {left}")
    dtype = torch.promote_types(x.dtype, weight.dtype)
    function = short_conv_reference if backend_name(x) == "reference" else _short_forward
    return function(x.to(dtype), weight.to(dtype), left)


def short_conv_reference(x, weight, left):
    """Compute :func:`short_conv` in plain PyTorch, for `x` and `weight` of one dtype."""
    K, T, dtype = len(weight), x.shape[0], x.dtype
    if dtype.itemsize == 2:
        weight = weight.float()
    beyond = x.new_zeros(K - 1, *x.shape[1:])
    padded = torch.cat((beyond[:left], x, beyond[left:]))  # F.pad of torch 2.6 takes no empty batch
    return sum(weight[k] * padded[k : k + T] for k in range(K)).to(dtype)


_short_forward = register(
    "short_forward",
    "short_backward",
    "Tensor x, Tensor weight",
    "SymInt left",
    short_conv_reference,
)

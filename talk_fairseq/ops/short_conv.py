"""A short depthwise convolution, which may stand before the windows: not in the paper."""

import torch

from talk_fairseq.ops.dispatch import register, take_steps, uses_reference
from talk_fairseq.ops.state import ShortConvState, compute_dtype


def short_conv(x, weight, left):
    """Compute ``out[t] = sum(weight[k] * x[t - left + k] for k in range(K))``, channel by channel.

    It is a depthwise ``torch.nn.functional.conv1d``, with zeros beyond the ends.

    Args:
        x: (T, B, C).
        weight: (K, C), on the same device.
        left: taps on the left of t, 0 to K - 1.

    Returns:
        (T, B, C) in the dtype that PyTorch promotes both to; differentiable in both. float16 and
        bfloat16 are computed in float32 and rounded once.

    Raises:
        ValueError: shapes or devices do not match, or `left` is not that of a tap.
    """
    x, weight = _of_one_dtype(x, weight)
    if not 0 <= left < len(weight):
        raise ValueError(f"left: expected 0 to {len(weight) - 1}, got {left}")
    function = short_conv_reference if uses_reference(x) else _short_forward
    return function(x, weight, left)


def short_conv_update(x, weight, state):
    """Return the next outputs of a causal sequence: :func:`short_conv`, continued by `x`.

    `state` is changed in place, or where gradients are needed, gets a new tensor.

    Args:
        x: (S, B, C), the next S time steps.
        weight: (K, C), on the same device.
        state: the ShortConvState of the steps so far, for the dtype of the output.

    Returns:
        (S, B, C), as :func:`short_conv`.

    Raises:
        TypeError: `state` is not a ShortConvState.
        ValueError: as :func:`short_conv`; a `state` of other sequences, channels, taps, device or
            dtype.

    Equivalent to ``short_conv(xs, weight, K - 1)[-S:]`` with `xs` of all the steps so far.
    """
    x, weight = _of_one_dtype(x, weight)
    if not isinstance(state, ShortConvState):
        raise TypeError(f"state: expected a ShortConvState, got {type(state).__name__}")
    state.check(x, compute_dtype(x.dtype))
    if (found := len(state.rows)) != (K := len(weight)):
        raise ValueError(f"state: expected one for {K} taps to match weight, got {found}")
    return take_steps(state, x, weight, _short_conv_update_reference, "short_update")


def _of_one_dtype(x, weight):
    """Return `x` and `weight` in the wider of their dtypes, or raise ValueError."""
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape (K, C), got {tuple(weight.shape)}")
    C = weight.shape[1]
    if x.dim() != 3 or x.shape[2] != C:
        raise ValueError(f"x: expected shape (T, B, {C}) to match weight, got {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x: expected device {weight.device} to match weight, got {x.device}")
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def short_conv_reference(x, weight, left):
    """Compute :func:`short_conv` in plain PyTorch, for `x` and `weight` of one dtype."""
    K, T, dtype = len(weight), x.shape[0], x.dtype
    weight = weight.to(compute_dtype(dtype))
    beyond = x.new_zeros(K - 1, *x.shape[1:])
    padded = torch.cat((beyond[:left], x, beyond[left:]))  # F.pad of torch 2.6 takes no empty batch
    return sum(weight[k] * padded[k : k + T] for k in range(K)).to(dtype)


def _short_conv_update_reference(x, weight, rows, steps):
    """Compute :func:`short_conv_update` in plain PyTorch: outputs, and the ring's new rows."""
    S, K = len(x), len(weight)
    rows = torch.cat([rows.roll(-steps, 0), x])
    out = short_conv_reference(rows, weight, K - 1)[K:].to(x.dtype)
    return out, rows[S:].roll(steps + S, 0)


_short_forward = register(
    "short_forward",
    "short_backward",
    "Tensor x, Tensor weight",
    "SymInt left",
    short_conv_reference,
)

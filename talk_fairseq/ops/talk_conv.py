"""The operator: its call, its validation and its gradients."""

import numpy as np
import torch

from talk_fairseq.ops.dispatch import register, take_steps, uses_reference
from talk_fairseq.ops.reference import talk_conv_reference, talk_conv_update_reference
from talk_fairseq.ops.state import DTYPES, TaLKConvState, sums_dtype

_INTEGERS = (int, torch.SymInt, np.integer)


def talk_conv(x, offset_left, offset_right, max_left, max_right):
    """Compute a time-aware large-kernel convolution: at each step a window sum of adaptive size.

    For each time t, batch b and head h, with reaches ``u_l = offset_left[t, b, h] * max_left``
    and ``u_r = offset_right[t, b, h] * max_right`` in tokens (section 3 of the paper)::

        out[t] = sum of x over [t - u_l, t + u_r] / (max_left + max_right + 1)

    where a token at either end counts by the part of it inside, and windows stop at the ends of the
    sequence. Time and memory (see docs/operator.md) are linear in T for any windows, as long as
    offsets are not far above 1 and, for gradients on a GPU, few windows end in the same token.

    Args:
        x: (T, B, C) in float64, float32, float16 or bfloat16; any strides.
        offset_left: (T, B, H) relative reach to the left, finite and >= 0 (above 1 is fine).
            The C / H channels of a head share it. Any of the four dtypes; float32 beside a
            float16 or bfloat16 `x` keeps the positions exact.
        offset_right: the same to the right, or None for the causal form.
        max_left: int >= 0, tokens that an offset of 1 reaches to the left.
        max_right: the same to the right; 0 in the causal form.

    Returns:
        (T, B, C) in x's dtype; differentiable in x and both offsets. float16 and bfloat16
        are computed in float32 or better and rounded once. A negative or NaN offset gives NaN.

    Raises:
        TypeError: `x` or an offset is not a tensor of these dtypes, or a window is not an int.
        ValueError: shapes (H divides C), devices, windows or ``TALK_CONV_BACKEND`` do not fit.
        RuntimeError: the backend's package is missing: Numba on the CPU, CuPy on a GPU.

    Equivalent to a weight for each pair of time steps, which is never built::

        t, j = torch.arange(T)[:, None, None, None], torch.arange(T)
        a_l = (t - offset_left[..., None] * max_left).clamp(min=0)
        a_r = (t + offset_right[..., None] * max_right).clamp(max=T - 1)
        weight = (a_r - j + 1).clamp(0, 1) - (a_l - j).clamp(0, 1)  # (T, B, H, T)
        out = torch.einsum("tbhj,jbhr->tbhr", weight, x.view(T, B, H, C // H))
        out = out.reshape(T, B, C) / (max_left + max_right + 1)
    """
    _validate(x, offset_left, offset_right, max_left, max_right)
    if uses_reference(x):
        return talk_conv_reference(x, offset_left, offset_right, max_left, max_right)
    dtype = x.dtype
    if offset_left.dtype is dtype and (offset_right is None or offset_right.dtype is dtype):
        return _forward(x, offset_left, offset_right, max_left, max_right)
    # Kernels take offsets in x's dtype, or in float32 beside a float16 or bfloat16 `x`.
    dtypes = {tensor.dtype for tensor in (x, offset_left, offset_right) if tensor is not None}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    rows = x.double() if wide is torch.float64 else x
    offset_right = None if offset_right is None else offset_right.to(wide)
    return _forward(rows, offset_left.to(wide), offset_right, max_left, max_right).to(dtype)


def talk_conv_update(x, offset_left, state, max_left):
    """Return the next outputs of a causal sequence: :func:`talk_conv`, continued by `x`.

    Time and memory do not depend on how many steps came before, nor outputs on how many are taken
    at a time. `state` is changed in place. Where gradients are needed, this is a plain PyTorch
    computation that puts new tensors into the state, in time that grows with its reach.

    Args:
        x: (S, B, C), the next S time steps, in float64, float32, float16 or bfloat16.
        offset_left: (S, B, H) relative reach to the left, finite and >= 0, in any of the dtypes.
        state: the :class:`TaLKConvState` of the steps so far.
        max_left: int >= 0, tokens that an offset of 1 reaches to the left.

    Returns:
        (S, B, C) in x's dtype. A negative or NaN offset gives NaN. So does one that is a token or
        more beyond the state's reach, once there have been more steps than that; until then the
        window ends at the first.

    Raises:
        TypeError, ValueError: as :func:`talk_conv`, and for a `state` that does not fit `x`.
        RuntimeError: as :func:`talk_conv`, and during the capture of a CUDA graph.

    Equivalent to ``talk_conv(xs, offsets, None, max_left, 0)[-S:]`` with `xs` and `offsets` of all
    the steps so far.
    """
    _validate(x, offset_left, None, max_left, 0)
    max_left = int(max_left)  # NumPy's integers may overflow
    return talk_conv_update_unchecked(x, offset_left, state, max_left)


def talk_conv_update_unchecked(x, offset_left, state, max_left):
    """:func:`talk_conv_update` where `x` and `offset_left` are known to fit each other."""
    if not isinstance(state, TaLKConvState):
        raise TypeError(f"state: expected a TaLKConvState, got {type(state).__name__}")
    state.check(x, sums_dtype(x.dtype, x.device))
    return take_steps(state, x, offset_left, talk_conv_update_reference, "update", max_left)


def _validate(x, offset_left, offset_right, max_left, max_right):
    """Raise an error that names what is wrong with the arguments.

    Every call comes here, so that it takes a microsecond for arguments that are right.
    """
    _check_tensor("x", x, "(T, B, C)")
    device = x.device
    _check_tensor("offset_left", offset_left, "(T, B, H)", device)
    if offset_right is not None:
        _check_tensor("offset_right", offset_right, "(T, B, H)", device)
    for name, size in (("max_left", max_left), ("max_right", max_right)):
        if type(size) is not int and (type(size) is bool or not isinstance(size, _INTEGERS)):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__} {size!r}")
        if not 0 <= size < 2**31:
            raise ValueError(f"{name}: expected a window of 0 to 2^31 - 1 tokens, got {size}")
    T, B, C = x.shape
    rows, sequences, H = heads = offset_left.shape
    if rows != T or sequences != B:
        raise ValueError(
            f"offset_left: expected shape ({T}, {B}, H) to match x {T, B, C}, got {tuple(heads)}"
        )
    if H == 0 or C % H:
        raise ValueError(f"offset_left: expected a number of heads that divides C = {C}, got {H}")
    if offset_right is None:
        if max_right:
            raise ValueError(f"max_right: expected 0 without offset_right, got {max_right}")
    elif offset_right.shape != heads:
        raise ValueError(
            f"offset_right: expected shape {tuple(heads)} to match offset_left, "
            f"got {tuple(offset_right.shape)}"
        )


def _check_tensor(name, tensor, layout, device=None):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name}: expected float64, float32, float16 or bfloat16, got {tensor.dtype}"
        )
    if tensor.dim() != 3:
        raise ValueError(f"{name}: expected shape {layout}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device} to match x, got {tensor.device}")


_forward = register(
    "forward",
    "backward",
    "Tensor x, Tensor offset_left, Tensor? offset_right",
    "SymInt max_left, SymInt max_right",
    talk_conv_reference,
)

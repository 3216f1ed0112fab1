"""The operators as their definitions say them, in float64: what every backend is checked against.

A literal weighted sum over each window, with weights ``w_j = clamp(a_r - j + 1, 0, 1) -
clamp(a_l - j, 0, 1)``. No prefix sums, and no code shared with any backend.
"""

import math

import numpy as np
import torch

# Worst error of any element, relative to the largest element of the expected tensor, and to the
# type's smallest normal number where that is larger: below it, rounding is an absolute error.
# fp16 and bf16: half a unit in the last place, and a little for float32 arithmetic.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 4e-3,
}
GRADIENT_FACTOR = 4


def _float64(tensor):
    return None if tensor is None else tensor.detach().cpu().double().numpy()


def _windows(x, offset_left, offset_right, max_left, max_right):
    """Yield ``(t, b, h, channels, lo, hi, weights, row_left, row_right)`` for each window.

    ``row_left`` and ``row_right`` are the rows an end lies strictly inside of, else None.
    """
    T, B, C = x.shape
    H = offset_left.shape[2]
    R = C // H if H else 0
    for t in range(T):
        for b in range(B):
            for h in range(H):
                u_l = offset_left[t, b, h] * max_left
                u_r = 0.0 if offset_right is None else offset_right[t, b, h] * max_right
                a_l, a_r = max(t - u_l, 0.0), min(t + u_r, T - 1.0)
                lo, hi = math.floor(a_l), math.ceil(a_r)
                j = np.arange(lo, hi + 1)
                weights = np.clip(a_r - j + 1, 0, 1) - np.clip(a_l - j, 0, 1)
                inside_left = u_l != math.floor(u_l) and t - u_l > 0
                inside_right = u_r != math.floor(u_r) and t + u_r < T - 1
                yield (
                    t, b, h, slice(h * R, (h + 1) * R), lo, hi, weights,
                    t - math.ceil(u_l) if inside_left else None,
                    t + math.ceil(u_r) if inside_right else None,
                )  # fmt: skip


def talk_conv(x, offset_left, offset_right, max_left, max_right):
    """The output, ``(T, B, C)`` in float64 on the CPU."""
    x, offset_left, offset_right = map(_float64, (x, offset_left, offset_right))
    out = np.zeros_like(x)
    for t, b, _, c, lo, hi, w, _, _ in _windows(x, offset_left, offset_right, max_left, max_right):
        out[t, b, c] = w @ x[lo : hi + 1, b, c] / (max_left + max_right + 1)
    return torch.from_numpy(out)


def talk_conv_backward(dout, x, offset_left, offset_right, max_left, max_right):
    """The gradients ``(dx, d_offset_left, d_offset_right)``, the last None in the causal form."""
    dout, x, offset_left, offset_right = map(_float64, (dout, x, offset_left, offset_right))
    K = max_left + max_right + 1
    dx = np.zeros_like(x)
    d_left = np.zeros_like(offset_left)
    d_right = np.zeros_like(offset_left)
    for t, b, h, c, lo, hi, w, row_left, row_right in _windows(
        x, offset_left, offset_right, max_left, max_right
    ):
        dx[lo : hi + 1, b, c] += np.outer(w, dout[t, b, c]) / K
        if row_left is not None:
            d_left[t, b, h] = max_left * (dout[t, b, c] @ x[row_left, b, c]) / K
        if row_right is not None:
            d_right[t, b, h] = max_right * (dout[t, b, c] @ x[row_right, b, c]) / K
    return (
        torch.from_numpy(dx),
        torch.from_numpy(d_left),
        None if offset_right is None else torch.from_numpy(d_right),
    )


def worst_error(actual, expected):
    """Largest ``|actual - expected|`` over the largest ``|expected|``, as TOLERANCE bounds it."""
    if actual.numel() == 0:
        return 0.0
    error = (actual.detach().cpu().double() - expected).abs().max()
    scale = expected.abs().max().clamp(min=torch.finfo(actual.dtype).tiny)
    return torch.nan_to_num(error / scale, nan=math.inf).item()


def rms_error(actual, expected):
    """Root mean square of ``actual - expected`` over that of ``expected``."""
    error = actual.detach().cpu().double() - expected
    return (error.square().mean() / expected.square().mean()).sqrt().item()


def _hold(name, actual, expected, factor=1):
    """Assert that the error is within `factor` times the tolerance of the type, and return it."""
    error = worst_error(actual, expected)
    bound = factor * TOLERANCE[actual.dtype]
    assert error <= bound, f"{name} error {error:.3g} in {actual.dtype}"
    return error


def check_forward(function, x, offset_left, offset_right, max_left, max_right):
    """Call ``function`` on the arguments and hold its output to the oracle; returns the error."""
    arguments = (offset_left, offset_right, max_left, max_right)
    out = function(x, *arguments)
    assert out.dtype == x.dtype and out.shape == x.shape
    return _hold("forward", out, talk_conv(x, *arguments))


def check_backward(function, dout, x, offset_left, offset_right, max_left, max_right):
    """Hold ``function(dout, x, …) -> (dx, d_offset_left, d_offset_right)`` to the oracle."""
    arguments = (offset_left, offset_right, max_left, max_right)
    gradients = function(dout, x, *arguments)
    expected = talk_conv_backward(dout, x, *arguments)
    inputs = (x, offset_left, offset_right)
    names = ("dx", "d_offset_left", "d_offset_right")
    for name, got, want, given in zip(names, gradients, expected, inputs):
        if want is None:
            assert got is None or got.numel() == 0, f"{name} of an argument that was not given"
            continue
        assert got.dtype == given.dtype and got.shape == given.shape, name
        _hold(name, got, want, GRADIENT_FACTOR)


def short_conv(x, weight, dout, left):
    """The output and the gradients ``(out, dx, d_weight)`` of a short convolution."""
    x, weight, dout = map(_float64, (x, weight, dout))
    out, dx, d_weight = map(np.zeros_like, (x, x, weight))
    T, _, _ = x.shape
    for t in range(T):
        for k in range(len(weight)):
            j = t - left + k
            if 0 <= j < T:
                out[t] += weight[k] * x[j]
                dx[j] += weight[k] * dout[t]
                d_weight[k] += (dout[t] * x[j]).sum(0)
    return tuple(map(torch.from_numpy, (out, dx, d_weight)))


def check_short_conv(results, expected):
    """Hold ``(out, dx, d_weight)`` to those of :func:`short_conv`."""
    for name, result, want in zip(("out", "dx", "d_weight"), results, expected):
        assert result.shape == want.shape, name
        _hold(name, result, want, 1 if name == "out" else GRADIENT_FACTOR)

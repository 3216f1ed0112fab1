"""The operator and its peers: each builder takes a Case and returns (function, its inputs)."""

import math
import os
from functools import partial

import torch
import torch.nn.functional as F

from pipeline.benchmarks.harness import Unavailable
from talk_fairseq import talk_conv

WINDOW = 31  # largest window to either side
GRAPH = "TaLK, CUDA graph"


class Case:
    """The inputs of one length and dtype; `x` and the offsets are shared by all peers."""

    def __init__(self, T, B, C, H, dtype, device):
        self.T, self.B, self.C, self.H, self.R = T, B, C, H, C // H
        self.dtype, self.device = dtype, device
        self.x = self.random(T, B, C)
        self.offset_left = torch.rand(T, B, H, device=device).to(dtype)
        self.offset_right = torch.rand(T, B, H, device=device).to(dtype)

    def random(self, *shape):
        """Return normal random numbers of the case's dtype and device."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def moves(self, name, mode):
        """Return the bytes that an iteration of a copy or of TaLK has to move; None for others."""
        x, offsets = self.x.nbytes, 2 * self.offset_left.nbytes
        if name == "copy":
            return 2 * x
        forward, backward = 2 * x + offsets, 3 * x + 2 * offsets
        floors = {"forward": forward, "backward": backward, "forward+backward": forward + backward}
        return floors[mode] if name.startswith("TaLK") else None

    def needs(self, elements):
        """Raise Unavailable where a CPU's memory lacks room for so many elements."""
        if self.device == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
            room = 0.7 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            if (needed := elements * self.dtype.itemsize) > room:
                raise Unavailable(f"out of memory: needs {needed / 2**30:.0f} GiB")


def copy(case):
    """Build a copy of `x`, the least that any operator has to move."""
    return torch.clone, (case.x,)


def talk(case, window=WINDOW):
    """Build talk_conv with windows of 31 to either side, or of another size."""

    def function(x, offset_left, offset_right):
        return talk_conv(x, offset_left, offset_right, window, window)

    return function, (case.x, case.offset_left, case.offset_right)


def published_method(case):
    """Build a prefix sum over the whole sequence in the input's dtype, gather and interpolate."""
    time_steps = torch.arange(case.T, device=case.device, dtype=case.dtype)[:, None, None]
    # Its positions are as rough as the dtype: bfloat16 would have 1003 rows end at 1004.
    positions = torch.arange(case.T + 1, dtype=case.dtype).double()
    end = positions[positions <= case.T].max().item()

    def at(sums, position):
        whole = position.floor()
        fraction = (position - whole)[..., None]
        index = whole.long()[..., None].expand(-1, -1, -1, case.R)
        low, high = sums.gather(0, index), sums.gather(0, (index + 1).clamp(max=case.T))
        return low + fraction * (high - low)

    def function(x, offset_left, offset_right):
        sums = F.pad(x.cumsum(0), (0, 0, 0, 0, 1, 0)).view(case.T + 1, case.B, case.H, case.R)
        left = (time_steps - offset_left * WINDOW).clamp(0, end)
        right = (time_steps + 1 + offset_right * WINDOW).clamp(0, end)
        return (at(sums, right) - at(sums, left)).view_as(x) / (2 * WINDOW + 1)

    case.needs(12 * case.x.numel())
    return function, (case.x, case.offset_left, case.offset_right)


def self_attention(case):
    """Build attention as in the paper, with the whole matrix of scores in memory."""

    def function(query, key, value):
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(case.R)
        return torch.bmm(scores.softmax(dim=-1), value)

    case.needs(3 * case.B * case.H * case.T**2)
    return function, tuple(case.random(case.B * case.H, case.T, case.R) for _ in range(3))


def sdpa(case):
    """Build PyTorch's fused attention."""
    return F.scaled_dot_product_attention, tuple(
        case.random(case.B, case.H, case.T, case.R) for _ in range(3)
    )


def unfold(x, K):
    """Return (T, B, C, K), the K rows of `x` (T, B, C) around each time step, as fairseq does."""
    T, B, C = x.shape
    # PyTorch 2.13 writes gradients of such products past their end on CUDA (pytorch#196431).
    if x.is_cuda and x.requires_grad and x.numel() * K > 2**31:
        raise Unavailable("over 2^31 elements")
    padded = F.pad(x, (0, 0, 0, 0, K // 2, K - 1 - K // 2))
    return padded.as_strided((T, B, C, K), (B * C, C, 1, B * C))


def dynamic_conv_unfolded(case, K):
    """Build DynamicConv of width K as fairseq's models run it, from unfolded windows."""

    def function(x, kernels):
        windows = unfold(x, K).reshape(-1, case.R, K)
        return torch.bmm(windows, kernels.softmax(-1).view(-1, K, 1)).view_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.T, case.B, case.H, K))


def dynamic_conv_band(case, K):
    """Build DynamicConv of width K in fairseq's other form, with band matrices."""

    def function(x, kernels):
        T, groups = case.T, case.B * case.H
        kernels = kernels.softmax(-1).view(T, groups, K).transpose(0, 1)
        band = kernels.new_zeros(groups, T, T + K - 1)
        band.as_strided((groups, T, K), (T * (T + K - 1), T + K, 1)).copy_(kernels)
        rows = x.view(T, groups, case.R).transpose(0, 1)
        return torch.bmm(band.narrow(2, K // 2, T), rows).transpose(0, 1).reshape_as(x)

    case.needs(3 * case.B * case.H * case.T**2)
    return function, (case.x, case.random(case.T, case.B, case.H, K))


def light_conv_unfolded(case, K):
    """Build LightConv of width K, from unfolded windows."""

    def function(x, kernels):
        windows = unfold(x, K).reshape(case.T * case.B, case.H, case.R, K)
        return torch.einsum("nhrk,hk->nhr", windows, kernels.softmax(-1)).reshape_as(x)

    case.needs(2 * K * case.x.numel())
    return function, (case.x, case.random(case.H, K))


def depthwise_conv1d(case, K):
    """Build PyTorch's convolution, in its own layout (B, C, T)."""

    def function(x, kernels):
        return F.conv1d(x, kernels, padding=K // 2, groups=case.C)

    return function, (case.random(case.B, case.C, case.T), case.random(case.C, 1, K))


# name -> (builder, how time grows with T)
PEERS = {
    "copy": (copy, 1),
    "TaLK": (talk, 1),
    "TaLK, windows of 3": (partial(talk, window=3), 1),
    "TaLK, windows of 1,000": (partial(talk, window=1000), 1),
    GRAPH: (talk, 1),
    "published TaLK method": (published_method, 1),
    "self-attention": (self_attention, 2),
    "scaled_dot_product_attention": (sdpa, 2),
    "DynamicConv k=3, unfolded": (partial(dynamic_conv_unfolded, K=3), 1),
    "DynamicConv k=3, band": (partial(dynamic_conv_band, K=3), 2),
    "DynamicConv k=31, unfolded": (partial(dynamic_conv_unfolded, K=31), 1),
    "DynamicConv k=31, band": (partial(dynamic_conv_band, K=31), 2),
    "LightConv k=31, unfolded": (partial(light_conv_unfolded, K=31), 1),
    "depthwise conv1d k=31": (partial(depthwise_conv1d, K=31), 1),
}

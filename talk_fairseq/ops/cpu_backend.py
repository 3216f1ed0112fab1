"""The CPU backend of the TaLK operator, and of the short convolution that may stand before it.

Its Numba kernels read x once and write the output once. float16 and bfloat16 are converted to
float32 before a kernel, and rounded once after it. Numba is imported at the first call.

The work is split over Python threads, as the kernels release the GIL. Numba's own fallback layers
for threads abort under concurrent calls or after a fork.
"""

import ctypes
import functools
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from talk_fairseq.ops.state import compute_dtype

# A result of at least this many bytes is put on huge pages.
_LARGE = 4 << 20
# For fewer elements, starting threads costs more than it saves.
_SERIAL = 1 << 15
# Likewise in decoding, where an element takes about a nanosecond.
_SERIAL_STEPS = 1 << 17
# Time steps of a task, unless windows are large.
_CHUNK = 1024
# Channels of a task: enough to use whole memory pages, few enough for the ring to fit L2.
_SLAB = 256
# The fewest channels of a task of a short convolution, which fill a cache line.
_NARROW = 16
# The tests replace this by a function that fills the memory with NaN.
_empty = np.empty
# Kernels take this where every sequence is in its own column.
_NO_ORIGIN = np.empty((0, 0), np.int32)


@functools.cache
def _kernels():
    """Return the module of the compiled kernels."""
    try:
        from talk_fairseq.ops import cpu_kernels
    except ImportError as error:
        raise RuntimeError(
            "talk_conv on the CPU needs Numba: pip install numba, or set "
            f"TALK_CONV_BACKEND=reference ({error})"
        ) from error
    return cpu_kernels


def forward(x, offset_left, offset_right, max_left, max_right):
    """Return the output (T, B, C) in x's dtype, for contiguous, validated arguments on the CPU."""
    rows = _arithmetic(x)
    out = _fresh_like(rows)
    _run(_kernels().forward, rows, offset_left, offset_right, max_left, max_right, out.numpy())
    return out.to(x.dtype)


def backward(dout, x, offset_left, offset_right, max_left, max_right):
    """Return ``(dx, d_offset_left, d_offset_right)``, the last of which is None when causal."""
    rows = _arithmetic(x)
    dx = _fresh_like(rows)
    d_left = torch.empty_like(offset_left, dtype=rows.dtype)
    d_right = d_left if offset_right is None else torch.empty_like(d_left)
    _run(
        _kernels().backward, rows, offset_left, offset_right, max_left, max_right,
        _array(_arithmetic(dout)), max_left, max_right, dx.numpy(), d_left.numpy(), d_right.numpy(),
    )  # fmt: skip
    d_right = None if offset_right is None else d_right.to(offset_right.dtype)
    return dx.to(x.dtype), d_left.to(offset_left.dtype), d_right


def update(x, offset_left, sums, origin, steps, max_left):
    """Return the next outputs (S, B, C) of a causal sequence, after `steps` others.

    `sums` and `origin` are those of a TaLKConvState; the new steps are written into them.
    """
    return _step(_kernels().update, x, offset_left, sums, origin, steps, max_left)


def short_forward(x, weight, left):
    """Return the output of a short convolution, in the dtype of `x` and `weight`."""
    rows = _arithmetic(x)
    out = _fresh_like(rows)
    _over_channels(_kernels().short_forward, rows, _arithmetic(weight), left, out)
    return out.to(x.dtype)


def short_backward(dout, x, weight, left):
    """Return the gradients ``(dx, d_weight)`` of a short convolution."""
    rows, taps = _arithmetic(x), _arithmetic(weight)
    dx, d_weight = _fresh_like(rows), torch.empty_like(taps)
    _over_channels(_kernels().short_backward, rows, taps, left, _arithmetic(dout), dx, d_weight)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def short_update(x, weight, rows, origin, steps):
    """Return the next outputs (S, B, C) of a causal short convolution, after `steps` others.

    `rows` and `origin` are those of a ShortConvState; the new steps are written into them.
    """
    return _step(_kernels().short_update, x, weight, rows, origin, steps)


def _step(kernel, x, other, rows, origin, *sizes):
    """Call a `kernel` of decoding on groups of sequences, over torch's CPU threads."""
    B = x.shape[1]
    steps, other = _arithmetic(x), _array(_arithmetic(other))
    out = torch.empty_like(steps, requires_grad=False)
    origin = _NO_ORIGIN if origin is None else origin.numpy()
    arguments = _array(steps), other, _array(rows), origin, *sizes, out.numpy()
    threads = min(torch.get_num_threads(), B) if x.numel() >= _SERIAL_STEPS else 1
    if threads == 1:
        kernel(*arguments, 0, B)
    else:
        cuts = [B * index // threads for index in range(threads + 1)]
        _share(lambda i: kernel(*arguments, cuts[i], cuts[i + 1]), threads)
    return out.to(x.dtype)


def _over_channels(kernel, x, weight, left, *others):
    """Call `kernel` on groups of channels, over torch's CPU threads.

    Sums over time and batch do not depend on the number of threads.
    """
    C = x.shape[2]
    threads = torch.get_num_threads() if x.numel() >= _SERIAL else 1
    threads = max(1, min(threads, C // _NARROW))
    cuts = [C * index // threads // _NARROW * _NARROW for index in range(threads)] + [C]
    arrays = [_array(tensor) for tensor in (x, weight, *others)]
    _share(lambda i: kernel(*arrays, left, cuts[i], cuts[i + 1]), threads)


def _fresh_like(tensor):
    """Allocate memory for a result, on huge pages where it is large.

    Linux takes longer to map small pages than a kernel takes to fill them.
    """
    fresh = torch.empty_like(tensor)
    if fresh.nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = fresh.data_ptr() + fresh.nbytes - begin
        libc = ctypes.pythonapi  # which finds all functions of this process
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return fresh


def _arithmetic(tensor):
    """Return `tensor` in the dtype that kernels compute with: float32 for float16 and bfloat16."""
    return tensor.to(compute_dtype(tensor.dtype))


def _array(tensor):
    """Return a NumPy view."""
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


def _reaches(offset_left, offset_right, max_left, max_right, T):
    """Return each side's reaches in tokens, (T, B, H) in float64, and the longest in whole rows."""

    def side(offset, maximum):
        if offset is None:
            return _empty((0, 0, 0)), 0
        offset = _array(_arithmetic(offset))
        u = np.multiply(offset, float(maximum), dtype=np.float64)
        if maximum == 0:
            u[offset < 0] = np.nan
        longest = np.fmax.reduce(u, axis=None, initial=0.0)  # which skips NaN
        return u, T if longest >= T else math.ceil(longest)

    u_left, reach_left = side(offset_left, max_left)
    u_right, reach_right = side(offset_right, max_right)
    return u_left, u_right, reach_left, reach_right


@functools.lru_cache(maxsize=1)
def _pool(process, threads):
    """Return the pool of threads of one process.

    Threads do not survive a fork: `process` keeps a child from using its parent's pool.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="talk_conv")


def _run(kernel, rows, offset_left, offset_right, max_left, max_right, *arguments):
    """Call `kernel` on all tasks (time chunk, batch, group of heads), over torch's CPU threads.

    The time steps of a task follow from the call's sizes other than B, so that a sentence's bits do
    not depend on its batch. Each chunk also reads the rows beyond it that its windows reach.
    """
    x = _array(rows)
    T, B, H = offset_left.shape
    R = x.shape[2] // H
    reaches = _reaches(offset_left, offset_right, max_left, max_right, T)
    scale = 1.0 / (max_left + max_right + 1)
    chunk = min(T, max(_CHUNK, 4 * (max_left + max_right + 1)))
    group = max(1, min(H, _SLAB // R))
    tasks = B * -(-H // group) * -(-T // chunk)
    threads = min(torch.get_num_threads(), tasks) if x.size >= _SERIAL else 1
    # A power of two, so that a row's place in the ring is a mask rather than a division.
    span = 1 << min(sum(reaches[2:]) + 2, T + 1).bit_length()
    ring = _empty((threads, span, group * R))

    def share(index):
        kernel(x, *reaches, scale, *arguments, chunk, group, ring[index], index, tasks, threads)

    _share(share, threads)


def _share(work, threads):
    """Call `work` on 0 to `threads` - 1, each in a thread."""
    if threads == 1:
        return work(0)
    others = _pool(os.getpid(), torch.get_num_threads()).map(work, range(1, threads))
    work(0)
    list(others)  # which waits, and raises what one of them has

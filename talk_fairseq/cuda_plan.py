"""What is launched for a pass on CUDA: it follows from sizes alone.

The kernels are in ``kernels/talk_conv.cu`` and ``kernels/short_conv.cu``, whose constants are read
here; ``cuda_backend`` makes the launches.
"""

import functools
from typing import NamedTuple

import torch

from talk_fairseq.kernel_source import constants

NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_CONSTANTS = constants("talk_conv.cu")
_LANES, _ROWS = _CONSTANTS["LANES"], _CONSTANTS["ROWS"]
_REACH = _CONSTANTS["REACH"]

# Channels that a thread of a `wide` kernel moves at a time.
_FORWARD_WIDTH = {"float64": 2, "float32": 2, "float16": 4, "bfloat16": 4}
_BACKWARD_WIDTH = {"float64": 2, "float32": 4, "float16": 4, "bfloat16": 4}

_TILE = 256  # rows of a tile or chunk, unless memory is short
_STAGED = 320  # rows of a forward tile with its halo: three blocks to a multiprocessor
_MAX_STAGED = 448  # likewise for larger windows, under 64 KiB of shared memory

# Rows that a thread of a short convolution walks: forward; and backward, where a run of rows adds
# to the gradient of the weights, the fewest, and the most that are summed in float32.
_SHORT_FORWARD, _SHORT_BACKWARD, _SHORT_MOST = 8, 32, 128


class Plan(NamedTuple):
    """One pass: fields of the problem, workspace by field, and launches in their order."""

    sizes: dict
    workspace: dict  # field: (count, dtype)
    launches: tuple  # of (kernel, (blocks along x, y, z), threads, bytes of shared memory)


@functools.lru_cache(maxsize=4096)
def plan_forward(dtype, aligned, shared_memory, T, B, C, H, max_left, max_right):
    """The forward pass, for blocks with up to `shared_memory` bytes."""
    name, R = NAMES[dtype], C // H
    kernel, width = _kernel(_FORWARD_WIDTH, name, R, aligned)
    sum_type = torch.float32 if dtype.itemsize == 2 else torch.float64
    row = _LANES * width * sum_type.itemsize  # bytes of one row of prefix sums
    heads, slabs = B * H, _ceil(R, _LANES * width)

    # One kernel, as long as the rows of a tile and its halo fit. The tiles follow from the windows
    # alone, so that a sentence's bits do not depend on the padding behind it.
    before, after = _halo(max_left), _halo(max_right)
    tile = _STAGED - before - after
    if tile < _STAGED // 2:
        tile = _MAX_STAGED - before - after
    if tile < _TILE // 2 and T <= _MAX_STAGED:
        tile, before, after = T, 0, 0  # or if the whole sequence fits
    threads = _whole_warps(_ceil(min(before + tile + after, T), _ROWS) * _LANES)
    staged = threads // _LANES * _ROWS
    window = 8 + 2 * sum_type.itemsize
    shared = _bytes((staged + 3) * row, threads // 32 * row, tile * window)
    if (tile >= _TILE // 2 or tile == T) and shared <= shared_memory:
        sizes = {"before": before, "after": after, "tile": tile}
        blocks = (heads, slabs, _ceil(T, tile))
        return Plan(sizes, {}, ((f"talk_forward_{kernel}", blocks, threads, shared),))

    chunks = _ceil(T, _TILE)
    workspace = {"sums": (T * B * C, sum_type), "totals": (chunks * B * C, torch.float64)}
    threads = _TILE // _ROWS * _LANES
    shared = _bytes(_TILE * (24 if dtype == torch.float64 else 16))
    blocks = (heads, slabs, chunks)
    launches = (
        (f"talk_forward_sums_{kernel}", blocks, threads, _bytes(threads // 32 * row)),
        (f"talk_scan_chunks_{name}", (_ceil(B * C, 128), 1, 1), 128, 0),
        (f"talk_forward_gather_{kernel}", blocks, threads, shared),
    )
    return Plan({"tile": _TILE}, workspace, launches)


@functools.lru_cache(maxsize=4096)
def plan_backward(dtype, aligned, shared_memory, T, B, C, H, max_left, max_right):
    """The backward pass, for blocks with up to `shared_memory` bytes."""
    name, R, heads = NAMES[dtype], C // H, B * H
    number = 8 if dtype == torch.float64 else 4  # bytes of what is computed in
    kernel, width, lanes, rows, threads = _backward_kernel(dtype, R, aligned)
    most = threads // lanes * rows  # of a tile

    def shared_bytes(staged):
        pieces = [2 * threads * width * number, 2 * most * number, 8 * most]
        if staged:
            end = 16 if number == 4 else 24
            pieces += [4 * (most + 1), 4 * 32, 2 * 4, (8 + 2 * number) * _REACH]
            row = lanes * width * dtype.itemsize
            pieces += [staged * row, 2 * end * staged, 4 * staged]
        return _bytes(*pieces)

    # One kernel, as long as a tile and its halo fit: twice on a multiprocessor if half of the
    # threads have rows then; each block takes 1 KiB besides. The tiles follow from the windows
    # alone, so that a sentence's bits do not depend on the padding behind it.
    before, after = _halo(max_right), _halo(max_left)
    tiles = (
        tile
        for memory, least in ((shared_memory // 2 - 1024, most // 2), (shared_memory, 64))
        for tile in range(most, least - 1, -16)
        if before + after <= 2 * tile and shared_bytes(before + tile + after) <= memory
    )
    tile = next(tiles, 0)
    if tile:
        staged = _ceil(min(before + tile + after, T), 4) * 4
        sizes = {"before": before, "after": after, "tile": tile, "staged": staged}
        blocks = (heads, 1, _ceil(T, tile))
        launch = (f"talk_backward_{kernel}", blocks, threads, shared_bytes(staged))
        if tile >= T:
            return Plan(sizes, {}, (launch,))
        units = _ceil(T, _REACH) * heads
        reach = (f"talk_reach_{name}", (_ceil(units, 128), 1, 1), 128, 0)
        return Plan(sizes, {"reach": (2 * units, torch.int32)}, (reach, launch))

    chunks = _ceil(T, most)
    buckets = chunks * most + 1
    workspace = {
        "totals": (chunks * B * C, torch.float64),
        "clipped": (chunks * B * C, torch.float64),
        "starts": (heads * buckets, torch.int32),
        "slots": (heads * 4 * T, torch.int32),
        "entries": (heads * 2 * T * (2 if number == 4 else 3), torch.float64),
    }
    ends = (_ceil(heads * T, 128), 1, 1)
    chunk = ((heads, 1, chunks), threads, shared_bytes(0))
    launches = (
        (f"talk_count_ends_{name}", ends, 128, 0),
        (f"talk_start_ends_{name}", (heads, 1, 1), 512, 4 * 32),
        (f"talk_place_ends_{name}", ends, 128, 0),
        (f"talk_rank_ends_{name}", ends, 128, 0),
        (f"talk_backward_totals_{kernel}", *chunk),
        (f"talk_scan_chunks_{name}", (_ceil(B * C, 128), 1, 1), 128, 0),
        (f"talk_backward_walk_{kernel}", *chunk),
    )
    return Plan({"tile": most, "buckets": buckets}, workspace, launches)


@functools.lru_cache(maxsize=4096)
def plan_update(dtype, aligned, B, C, H):
    """A step of decoding, or several."""
    kernel, width = _kernel(_BACKWARD_WIDTH, NAMES[dtype], C // H, aligned)
    blocks = (_ceil(B * C // width, 128), 1, 1)
    return Plan({}, {}, ((f"talk_update_{kernel}", blocks, 128, 0),))


@functools.lru_cache(maxsize=4096)
def plan_short_forward(dtype, aligned, T, B, C, taps, left):
    """The forward pass of a short convolution."""
    kernel, width = _kernel(_BACKWARD_WIDTH, NAMES[dtype], C, aligned)
    blocks = (_ceil(_ceil(T, _SHORT_FORWARD) * B * (C // width), 128), 1, 1)
    numbers = {"taps": taps, "left": left, "rows": _SHORT_FORWARD}
    return Plan(numbers, {}, ((f"talk_short_forward_{kernel}", blocks, 128, 0),))


@functools.lru_cache(maxsize=4096)
def plan_short_backward(dtype, aligned, T, B, C, taps, left):
    """The backward pass of a short convolution: runs, and the sum over them."""
    kernel, width = _kernel(_BACKWARD_WIDTH, NAMES[dtype], C, aligned)
    rows = min(max(_SHORT_BACKWARD, _ceil(T * B, 512)), _SHORT_MOST)  # some 512 runs or more
    runs = _ceil(T, rows) * B
    launches = (
        (f"talk_short_backward_{kernel}", (_ceil(runs * (C // width), 128), 1, 1), 128, 0),
        (f"talk_short_weights_{NAMES[dtype]}", (_ceil(taps * C, 128), 1, 1), 128, 0),
    )
    workspace = {"sums": (runs * taps * C, torch.float64)}
    return Plan({"taps": taps, "left": left, "rows": rows}, workspace, launches)


def _kernel(widths, dtype, channels, aligned):
    """The end of a kernel's name, and N: several channels at a time where they come in packs."""
    wide = aligned and channels % widths[dtype] == 0
    return (f"{dtype}_wide", widths[dtype]) if wide else (f"{dtype}_narrow", 1)


def _backward_kernel(dtype, R, aligned):
    """A kernel: the end of its name, channels of a thread, lanes, rows of a thread, threads."""
    name, width = NAMES[dtype], 16 // dtype.itemsize
    if not aligned or R % width:
        return f"{name}_narrow", 1, 32, 8, 448
    if R <= 4 * width:
        return f"{name}_slim", width, 4, 4, 256
    return f"{name}_wide", width, 64 // width, min(8, 32 // width), 448


def _halo(size):
    """Rows to stage for a window of `size`: offsets up to 1.25 (dropout of 0.2) still fit."""
    return size + size // 4 + 1


def _ceil(a, b):
    return -(-a // b)


def _whole_warps(threads):
    return _ceil(threads, 32) * 32


def _bytes(*pieces):
    """Shared memory for `pieces`, each of which starts at a multiple of 16 (Shared::take)."""
    return sum(_ceil(piece, 16) * 16 for piece in pieces)

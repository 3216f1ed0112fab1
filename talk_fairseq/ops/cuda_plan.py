"""What is launched for a pass on CUDA: it follows from sizes alone.

The kernels are in ``kernels/talk_conv.cu`` and ``kernels/short_conv.cu``, whose constants are read
here; ``cuda_backend`` makes the launches.
"""

from typing import NamedTuple

import torch

from talk_fairseq.ops.kernel_source import constants
from talk_fairseq.ops.state import DTYPES, compute_dtype

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}

_CONSTANTS = constants("talk_conv.cu")
_LANES, _ROWS, _UNIT = _CONSTANTS["LANES"], _CONSTANTS["ROWS"], _CONSTANTS["UNIT"]
_REACH, _SPAN = _CONSTANTS["REACH"], _CONSTANTS["SPAN"]
_DOTS = _CONSTANTS["DOTS"]
_MAX_THREADS, _BACKWARD_THREADS = _CONSTANTS["MAX_THREADS"], _CONSTANTS["BACKWARD_THREADS"]

_TILE = 256  # rows of a forward tile where prefix sums are in global memory
_STAGED = 320  # rows of a forward tile with its halo; a multiprocessor holds three such blocks

# Rows that a thread of a short convolution walks: forward, and backward at least and at most, since
# it sums the weights' gradient over them in float32.
_SHORT_FORWARD, _SHORT_BACKWARD, _SHORT_MOST = 8, 32, 128


class Plan(NamedTuple):
    """One pass: numbers of the argument, workspace by field, and launches in their order."""

    sizes: dict
    workspace: dict  # field: (count, dtype)
    launches: tuple  # of (kernel, (blocks along x, y, z), threads, bytes of shared memory)
    file: str = "talk_conv.cu"


def plan_forward(dtype, aligned, shared_memory, T, B, C, H, max_left, max_right, float32_offsets):
    """Plan the forward pass, for blocks with up to `shared_memory` bytes."""
    name, heads, R = NAMES[dtype], B * H, C // H
    numbers = _numbers(T, B, C, H, max_left, max_right, float32_offsets)
    number = compute_dtype(dtype).itemsize
    kernel, width = _kernel(dtype, R, aligned)
    pack, window = _LANES * width * number, 8 + 2 * number
    before, after = _halo(max_left), _halo(max_right)
    spans = (before + after) // _UNIT + 2  # units that a window within the halo touches, at most

    def shared_bytes(rows, tile):
        units = rows // _UNIT
        return _bytes((rows + units) * pack, units * spans * pack, tile * window, 4)

    # One kernel, as long as the rows of a tile and its halo fit. What is staged follows from the
    # windows alone, so that a sentence's bits do not depend on the padding behind it.
    most = _MAX_THREADS // _LANES * _ROWS
    for staged in (*range(_STAGED, most + 1, _UNIT), *range(_STAGED, 0, -_UNIT)):
        tile = staged - before - after
        if tile < staged // 2 or shared_bytes(staged, tile) > shared_memory:
            continue
        rows = min(staged, _ceil(T + 2, _UNIT) * _UNIT)  # a short sequence stages less
        tile = min(tile, T)
        threads = rows // _ROWS * _LANES
        sizes = {"before": before, "tile": tile, "units": rows // _UNIT, "spans": spans} | numbers
        blocks = _grid(heads, _ceil(R, _LANES * width), _tiles(T, tile))
        launch = (f"talk_forward_{kernel}", blocks, threads, shared_bytes(rows, tile))
        return Plan(sizes, {}, (launch,))

    units = (T + 1) // _UNIT + 1  # of time steps -1 ... T
    workspace = {
        "sums": (units * (_UNIT + 1) * B * C, torch.float64 if number == 8 else torch.float32),
        "bases": (units * B * C, torch.float64),
    }
    kernel, width = _kernel(dtype, R, aligned, 16 // dtype.itemsize)
    threads, slabs = _TILE // _ROWS * _LANES, _ceil(R, _LANES * width)
    sums = _grid(heads, slabs, _tiles(units * _UNIT, _TILE))
    tiles = _grid(heads, slabs, _tiles(T, _TILE))
    launches = (
        (f"talk_forward_sums_{kernel}", sums, threads, 0),
        (f"talk_forward_bases_{name}", (_ceil(B * C, 32), 1, 1), 512, 512 * 8),
        (f"talk_forward_gather_{kernel}", tiles, threads, _TILE * window),
    )
    return Plan({"tile": _TILE, "units": units} | numbers, workspace, launches)


def plan_backward(dtype, aligned, shared_memory, T, B, C, H, max_left, max_right, float32_offsets):
    """Plan the backward pass, for blocks with up to `shared_memory` bytes."""
    name, R, heads = NAMES[dtype], C // H, B * H
    numbers = _numbers(T, B, C, H, max_left, max_right, float32_offsets)
    if B * C * dtype.itemsize >= 2**32:
        raise ValueError(f"x: expected less than 4 GiB a time step on CUDA, got B, C = {B}, {C}")
    number = compute_dtype(dtype).itemsize
    kernel, width, lanes, rows, threads = _backward_kernel(dtype, R, aligned)

    def shared_bytes(staged, threads):
        most = threads // lanes * rows
        pieces = [2 * threads * width * number, 8 * threads, 2 * most * number, 8 * most]
        if staged:
            end = 16 if number == 4 else 24
            pieces += [4 * (most + 1), 4 * 32, 2 * 4, (8 + 2 * number) * _REACH]
            row = lanes * width * dtype.itemsize
            pieces += [staged * row, 2 * end * staged, 4 * staged]
        return _bytes(*pieces)

    # One kernel, as long as a tile and its halo fit. Two blocks share a multiprocessor if half of
    # the threads have rows then (each takes 1 KiB more). The tiles follow from the windows
    # alone, so that a sentence's bits do not depend on the padding behind it. Larger windows (over
    # some 100 rows on either side) take this kernel too if the whole sequence fits.
    before, after = _halo(max_right), _halo(max_left)
    most = threads // lanes * rows  # rows of a tile
    tiles = (
        tile
        for memory, least in ((shared_memory // 2 - 1024, most // 2), (shared_memory, 64))
        for tile in range(most, least - 1, -16)
        if before + after <= min(2 * tile, threads - tile)  # a thread to a window
        and shared_bytes(before + tile + after, threads) <= memory
    )
    whole = _ceil(T, _DOTS) * _DOTS  # time steps, with those that are read beyond the last
    fits = T <= most and shared_bytes(whole, threads) <= shared_memory
    tile = next(tiles, most if fits else 0)
    if tile:
        kind, few = "", 128  # threads that are enough for a short sequence
        if kernel.endswith("_wide") and T <= min(tile, few // lanes * rows):
            kind, threads, tile = "_small", few, few // lanes * rows
        staged = min(before + tile + after, whole)
        sizes = {"before": before, "after": after, "tile": tile, "staged": staged} | numbers
        blocks = _grid(heads, 1, _tiles(T, tile))
        launch = (f"talk_backward{kind}_{kernel}", blocks, threads, shared_bytes(staged, threads))
        if tile >= T:
            return Plan(sizes, {}, (launch,))
        spans = _ceil(T, _SPAN)
        reach = (f"talk_reach_{name}", _grid(_ceil(heads, 32), 1, spans), _SPAN, _SPAN * 8)
        entries = (_ceil(T, _REACH) + spans) * heads
        return Plan(sizes, {"reach": (2 * entries, torch.int32)}, (reach, launch))

    chunks = _tiles(T, most)
    buckets = chunks * most + 1
    workspace = {
        "totals": (chunks * B * C, torch.float64),
        "clipped": (chunks * B * C, torch.float64),
        "starts": (heads * buckets, torch.int32),
        "slots": (heads * 4 * T, torch.int32),
        "entries": (heads * 2 * T * (2 if number == 4 else 3), torch.float64),
    }
    ends = (_ceil(heads * T, 128), 1, 1)
    chunk = ((heads, 1, chunks), threads, shared_bytes(0, threads))
    launches = (
        (f"talk_count_ends_{name}", ends, 128, 0),
        (f"talk_start_ends_{name}", (heads, 1, 1), 512, 4 * 32),
        (f"talk_place_ends_{name}", ends, 128, 0),
        (f"talk_rank_ends_{name}", ends, 128, 0),
        (f"talk_backward_totals_{kernel}", *chunk),
        (f"talk_scan_chunks_{name}", (_ceil(B * C, 128), 1, 1), 128, 0),
        (f"talk_backward_walk_{kernel}", *chunk),
    )
    return Plan({"tile": most, "buckets": buckets} | numbers, workspace, launches)


def plan_update(
    dtype, aligned, shared_memory, S, B, C, H, max_left, ring, columns, float32_offsets
):
    """Plan S steps of decoding."""
    kernel, width = _kernel(dtype, C // H, aligned)
    blocks = (_ceil(B * C // width, 128), 1, 1)
    sizes = {"ring": ring, "columns": columns} | _numbers(S, B, C, H, max_left, 0, float32_offsets)
    return Plan(sizes, {}, ((f"talk_update_{kernel}", blocks, 128, 0),))


def plan_short_forward(dtype, aligned, shared_memory, T, B, C, taps, left):
    """Plan the forward pass of a short convolution."""
    kernel, width = _kernel(dtype, C, aligned)
    blocks = (_ceil(_runs(T, _SHORT_FORWARD, B) * (C // width), 128), 1, 1)
    numbers = {"T": T, "B": B, "C": C, "taps": taps, "left": left, "rows": _SHORT_FORWARD}
    launches = ((f"talk_short_forward_{kernel}", blocks, 128, 0),)
    return Plan(numbers, {}, launches, "short_conv.cu")


def plan_short_backward(dtype, aligned, shared_memory, T, B, C, taps, left):
    """Plan the backward pass of a short convolution: runs, and the sum over them."""
    kernel, width = _kernel(dtype, C, aligned)
    rows = min(max(_SHORT_BACKWARD, _ceil(T * B, 512)), _SHORT_MOST)  # for about 512 runs
    runs = _runs(T, rows, B)
    numbers = {"T": T, "B": B, "C": C, "taps": taps, "left": left, "rows": rows}
    workspace = {"sums": (runs * taps * C, torch.float64)}
    launches = (
        (f"talk_short_backward_{kernel}", (_ceil(runs * (C // width), 128), 1, 1), 128, 0),
        (f"talk_short_weights_{NAMES[dtype]}", (_ceil(taps * C, 128), 1, 1), 128, 0),
    )
    return Plan(numbers, workspace, launches, "short_conv.cu")


def plan_short_update(dtype, aligned, shared_memory, S, B, C, taps, columns):
    """Plan S steps of decoding of a short convolution."""
    kernel, width = _kernel(dtype, C, aligned)
    numbers = {"T": S, "B": B, "C": C, "taps": taps, "columns": columns}
    launches = ((f"talk_short_update_{kernel}", (_ceil(B * C // width, 128), 1, 1), 128, 0),)
    return Plan(numbers, {}, launches, "short_conv.cu")


def _numbers(T, B, C, H, max_left, max_right, float32_offsets):
    return {
        "T": T, "B": B, "C": C, "H": H, "R": C // H, "max_left": max_left, "max_right": max_right,
        "scale": 1 / (max_left + max_right + 1), "float32_offsets": float32_offsets,
    }  # fmt: skip


def _kernel(dtype, channels, aligned, width=None):
    """Return the end of a kernel's name, and how many channels a thread handles: `width`, or 1.

    By default the width is 16 bytes of the dtype that is computed in.
    """
    width = width or 16 // compute_dtype(dtype).itemsize
    wide = aligned and channels % width == 0
    return f"{NAMES[dtype]}_{'wide' if wide else 'narrow'}", width if wide else 1


def _backward_kernel(dtype, R, aligned):
    """Return the end of a kernel's name; channels of a thread, lanes, rows of a thread, threads."""
    # Lanes and rows of a `wide` kernel are those that TALK_TYPE gets in talk_conv.cu.
    name, width = NAMES[dtype], 16 // dtype.itemsize
    if not aligned or R % width:
        return f"{name}_narrow", 1, 32, 8, _BACKWARD_THREADS
    if R <= 4 * width:
        return f"{name}_slim", width, 4, 4, 256
    return f"{name}_wide", width, 64 // width, min(8, 32 // width), _BACKWARD_THREADS


def _halo(size):
    """Return the rows to stage for a window of `size`, for offsets up to 1.25 (dropout of 0.2).

    At most 2^30, so that sums of a few of them fit a kernel's 32-bit numbers.
    """
    return min(size + size // 4 + 1, 2**30)


def _grid(x, y, z):
    """Return the blocks along three sides, of which CUDA bounds two."""
    if max(y, z) > 65535:
        raise ValueError(f"x: expected at most 65,535 blocks along a side on CUDA, got {y}, {z}")
    return x, y, z


def _tiles(T, tile):
    """Return the blocks along time, which CUDA bounds."""
    if T > 65535 * tile:
        raise ValueError(f"x: expected at most {65535 * tile:,} time steps on CUDA, got {T:,}")
    return _ceil(T, tile)


def _runs(T, rows, B):
    """Return the runs of `rows` time steps in B sequences, which the kernels count in 32 bits."""
    runs, most = _ceil(T, rows) * B, 2**31 - 256
    if max(T, runs) > most:
        raise ValueError(f"x: expected at most {most:,} time steps on CUDA, got {T:,} x {B:,}")
    return runs


def _ceil(a, b):
    return -(-a // b)


def _bytes(*pieces):
    """Shared memory for `pieces`, each of which starts at a multiple of 16 (Shared::take)."""
    return sum(_ceil(piece, 16) * 16 for piece in pieces)

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
_LANES, _LONG_LANES = _CONSTANTS["LANES"], _CONSTANTS["LONG_LANES"]
_ROWS, _UNIT = _CONSTANTS["ROWS"], _CONSTANTS["UNIT"]
_MAX_THREADS, _BACKWARD_THREADS = _CONSTANTS["MAX_THREADS"], _CONSTANTS["BACKWARD_THREADS"]

# Channels that a thread of a `wide` kernel moves at a time.
_FORWARD_WIDTH = {"float64": 2, "float32": 4, "float16": 8, "bfloat16": 8}
_BACKWARD_WIDTH = {"float64": 2, "float32": 4, "float16": 4, "bfloat16": 4}

_TILE = 256  # rows of a tile or chunk, unless memory is short
# Rows of a forward tile with its halo: three blocks to a multiprocessor, two of the wider halves.
_STAGED, _STAGED_HALVES = 320, 352
_MOST_STAGED = 8192  # of large windows

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
    name, heads, R = NAMES[dtype], B * H, C // H
    kernel, width = _kernel(_FORWARD_WIDTH, name, R, aligned)
    number = 8 if name == "float64" else 4  # bytes of what is computed in
    pack, span = width * number, 8 + 2 * number
    before, after = _halo(max_left), _halo(max_right)
    spans = (before + after) // _UNIT + 2  # units that a window within the halo touches, at most
    slabs = _ceil(R, _LANES * width)

    def table_bytes(rows, tile):
        units = rows // _UNIT
        row = _LANES * pack
        return _bytes((rows + units) * row, units * spans * row, tile * span, 4)

    def long_bytes(rows, tile):
        units, lanes = rows // _UNIT, _LONG_LANES
        return _bytes((rows + units) * lanes * pack, units * lanes * width * 8, tile * span, 4)

    def one_kernel(kind, lanes, staged, tile, needed):
        granule = 32 // lanes * _ROWS  # rows of a warp
        rows = min(staged, _ceil(T + 2, granule) * granule)  # a short sequence stages less
        tile = min(tile, T)
        threads = min(_MAX_THREADS, rows // _ROWS * lanes)
        sizes = {"before": before, "tile": tile, "units": rows // _UNIT, "spans": spans}
        blocks = (heads, _ceil(R, lanes * width), _ceil(T, tile))
        launch = (f"talk_forward{kind}_{kernel}", blocks, threads, needed(rows, tile))
        return Plan(sizes, {}, (launch,))

    # One kernel, as long as the rows of a tile and its halo fit. What is staged follows from the
    # windows alone, so that a sentence's bits do not depend on the padding behind it.
    staged_rows = _STAGED_HALVES if dtype.itemsize == 2 and width > 1 else _STAGED
    for staged in (staged_rows, *range(staged_rows, 513, _UNIT), *range(staged_rows, 0, -_UNIT)):
        tile = staged - before - after
        if tile >= staged // 2 and table_bytes(staged, tile) <= shared_memory:
            return one_kernel("", _LANES, staged, tile, table_bytes)

    # Larger windows: fewer channels and more rows to a block, twice on a multiprocessor if at most
    # half of the rows are halo.
    granule = 32 // _LONG_LANES * _ROWS
    for memory, share in ((shared_memory // 2 - 1024, 2), (shared_memory, 3)):
        for staged in range(_MOST_STAGED, 0, -granule):
            tile = staged - before - after
            if tile < staged // share:
                break
            if long_bytes(staged, tile) <= memory:
                return one_kernel("_long", _LONG_LANES, staged, tile, long_bytes)
    whole = _ceil(T + 2, granule) * granule
    if whole <= _MOST_STAGED and long_bytes(whole, T) <= shared_memory:
        return one_kernel("_long", _LONG_LANES, whole, T, long_bytes)

    units = (T + 1) // _UNIT + 1  # of time steps -1 ... T
    workspace = {
        "sums": (units * (_UNIT + 1) * B * C, torch.float64 if number == 8 else torch.float32),
        "bases": (units * B * C, torch.float64),
    }
    threads = _TILE // _ROWS * _LANES
    launches = (
        (f"talk_forward_sums_{kernel}", (heads, slabs, _ceil(units * _UNIT, _TILE)), threads, 0),
        (f"talk_forward_bases_{name}", (_ceil(B * C, 32), 1, 1), 512, 512 * 8),
        (f"talk_forward_gather_{kernel}", (heads, slabs, _ceil(T, _TILE)), threads, _TILE * span),
    )
    return Plan({"tile": _TILE, "units": units}, workspace, launches)


@functools.lru_cache(maxsize=4096)
def plan_backward(dtype, aligned, shared_memory, T, B, C, H, max_left, max_right):
    """The backward pass, for blocks with up to `shared_memory` bytes."""
    name, R, heads = NAMES[dtype], C // H, B * H
    kernel, width = _kernel(_BACKWARD_WIDTH, name, R, aligned)
    number = 8 if dtype == torch.float64 else 4  # bytes of what is computed in
    lanes = min(32, 1 << (_ceil(R, width) - 1).bit_length())
    # Bytes of a staged row (dout, its window, two ends and four slots) and of a row of the tile.
    staged_row = lanes * width * dtype.itemsize + (8 + 2 * number) + 2 * 2 * number + 16
    tile_row = 2 * number + 2 * 4

    def shared_bytes(tile, staged, threads):
        warps = threads // 32 * lanes * width * 8
        return staged * staged_row + tile * tile_row + warps + 256  # 256: of the sort, and rounding

    def fits(tile, staged, memory):
        return shared_bytes(tile, staged, _BACKWARD_THREADS) <= memory

    # One kernel, as long as a tile and its halo fit: twice on a multiprocessor if possible, where
    # each block takes 1 KiB besides.
    twice = shared_memory // 2 - 1024
    before, after = _halo(max_right), _halo(max_left)
    most = min(_TILE, _BACKWARD_THREADS // lanes * _ROWS)
    tiles = range(most, 63, -16)
    tile = next(
        (
            tile
            for memory in (twice, shared_memory)
            for tile in tiles
            if before + after <= 2 * tile and fits(tile, before + tile + after, memory)
        ),
        0,
    )
    if tile == 0 and T <= most and fits(T, T, shared_memory):
        tile, before, after = T, 0, 0  # or if the whole sequence fits
    if tile:
        tile = min(tile, T)
        sizes = {"before": before, "after": after, "tile": tile, "lanes": lanes}
        threads = _whole_warps(_ceil(tile, _ROWS) * lanes)
        shared = shared_bytes(tile, min(before + tile + after, T), threads)
        launch = (f"talk_backward_{kernel}", (heads, 1, _ceil(T, tile)), threads, shared)
        if tile == T:
            return Plan(sizes, {}, (launch,))
        workspace = {"reach": (2 * heads * _ceil(T, tile), torch.int32)}
        reach = (f"talk_reach_{name}", (_ceil(heads * T, 128), 1, 1), 128, 0)
        return Plan(sizes, workspace, (reach, launch))

    tile = min(_TILE, _BACKWARD_THREADS // lanes * _ROWS)
    chunks = _ceil(T, tile)
    threads = _whole_warps(_ceil(tile, _ROWS) * lanes)
    warps = threads // 32 * lanes * width * 8
    shared = _bytes(warps, tile * (8 + 2 * number), tile * 2 * number)
    workspace = {
        "totals": (chunks * B * C, torch.float64),
        "clipped": (chunks * B * C, torch.float64),
        "starts": (heads * (2 * T + 2), torch.int32),
        "slots": (heads * 4 * T, torch.int32),
        "entries": (heads * 2 * T * number // 4, torch.float64),
    }
    ends = (_ceil(heads * 2 * T, 128), 1, 1)
    launches = (
        (f"talk_count_ends_{name}", ends, 128, 0),
        (f"talk_start_ends_{name}", (heads, 1, 1), 512, _bytes(512 // 32 * 4)),
        (f"talk_place_ends_{name}", ends, 128, 0),
        (f"talk_rank_ends_{name}", ends, 128, 0),
        (f"talk_changes_{kernel}", (heads, 1, chunks), threads, _bytes(warps)),
        (f"talk_scan_chunks_{name}", (_ceil(B * C, 128), 1, 1), 128, 0),
        (f"talk_backward_walk_{kernel}", (heads, 1, chunks), threads, shared),
    )
    return Plan({"tile": tile, "lanes": lanes}, workspace, launches)


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

"""The operator on CUDA: plans the launches of ``kernels/talk_conv.cu`` and makes them with CuPy.

The kernels are compiled for a device and a dtype at their first launch, and cached on disk by
CuPy; importing this module compiles nothing and needs neither a GPU nor CuPy. CuPy compiles with
``-ftz=true``: numbers below float32's smallest normal one, 1.2e-38, count as 0 in what is computed
in float32, and are written as 0; so are sums of bfloat16 below 7.7e-34, held at 2^-16 of them.
"""

import functools
import pathlib
import struct
from typing import NamedTuple

import numpy as np
import torch

try:
    import cupy
except ImportError:  # the first launch says what to install
    cupy = None

_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

# Numbers of the kernel file: N of each pass and dtype, and its constants.
_FORWARD_WIDTH = {"float64": 2, "float32": 2, "float16": 4, "bfloat16": 4}
_BACKWARD_WIDTH = {"float64": 2, "float32": 4, "float16": 4, "bfloat16": 4}
_LANES = 8
_ROWS = 8
_BACKWARD_THREADS = 448

_TILE = 256  # rows of a tile or chunk, unless memory is short
_STAGED = 320  # rows of a forward tile with its halo: three blocks to a multiprocessor
_MAX_STAGED = 448  # likewise for larger windows, under 64 KiB of shared memory

# Rows that a thread of a short convolution walks: forward; and backward, where a run of rows adds
# to the gradient of the weights, the fewest, and the most that are summed in float32.
_SHORT_FORWARD, _SHORT_BACKWARD, _SHORT_MOST = 8, 32, 128

# struct Problem of the kernel file.
_POINTERS = (
    "x", "dout", "offset_left", "offset_right", "out", "d_offset_left", "d_offset_right",
    "sums", "totals", "clipped", "reach", "starts", "slots", "entries",
    "origin", "weight", "d_weight",
)  # fmt: skip
_COUNTERS = ("reach", "starts")  # 0 at first; the other workspace holds anything
_SIZES = (
    "T", "B", "C", "H", "R", "max_left", "max_right", "before", "after", "tile", "lanes",
    "float32_offsets", "ring", "columns", "steps", "taps", "left",
)  # fmt: skip
_PROBLEM = np.dtype(
    [(name, np.uintp) for name in _POINTERS]
    + [("scale", np.float64)]
    + [(name, np.int32) for name in _SIZES],
    align=True,
)
_pack = struct.Struct(f"{len(_POINTERS)}Pd{len(_SIZES)}i0P").pack  # 0P: padded as a struct is


def source_path():
    """The kernel file: inside the package (a wheel), or beside it in a checkout."""
    here = pathlib.Path(__file__).resolve().parent
    folders = (here / "kernels", here.parent / "kernels")
    for folder in folders:
        if (folder / "talk_conv.cu").is_file():
            return folder / "talk_conv.cu"
    raise FileNotFoundError(f"talk_conv.cu: neither in {folders[0]} nor in {folders[1]}")


def compile_options(dtype):
    """Options that compile the kernels of one dtype, such as ``"float16"``."""
    return ("-std=c++17", "-DTALK_ONLY", f"-DTALK_{dtype}")


_MODULES = {}
if cupy is not None:
    _SOURCE = source_path().read_text()
    _MODULES = {
        dtype: cupy.RawModule(code=_SOURCE, options=compile_options(dtype))
        for dtype in _NAMES.values()
    }


def forward(x, offset_left, offset_right, max_left, max_right):
    """The operator's output. All tensors are contiguous and on one CUDA device.

    Args:
        x: (T, B, C), none of them 0, in float64, float32, float16 or bfloat16.
        offset_left: (T, B, H), in x's dtype, or in float32 beside a half `x`.
        offset_right: likewise, or None in the causal form.
        max_left: int >= 0.
        max_right: int >= 0.

    Returns:
        (T, B, C) in x's dtype. A negative or NaN offset gives NaN.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    _check_cupy()
    with torch.cuda.device(x.device):
        shared_memory = _shared_memory(x.device.index)
        return forward_with(
            _launch, shared_memory, x, offset_left, offset_right, max_left, max_right
        )


def backward(dout, x, offset_left, offset_right, max_left, max_right):
    """The gradients ``(dx, d_offset_left, d_offset_right)``, the last None in the causal form.

    Args:
        dout: (T, B, C), the gradient of the output, in x's dtype and contiguous.
        x, offset_left, offset_right, max_left, max_right: as in the forward pass.

    Returns:
        Gradients in the shape and dtype of what they belong to; the same bits at every run.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    _check_cupy()
    with torch.cuda.device(x.device):
        shared_memory = _shared_memory(x.device.index)
        return backward_with(
            _launch, shared_memory, dout, x, offset_left, offset_right, max_left, max_right
        )


def update(x, offset_left, sums, origin, steps, max_left):
    """The next outputs (S, B, C) of a causal sequence, after `steps` others, in one launch.

    `sums` and `origin` are those of a TaLKConvState; the new steps are written into them.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    _check_cupy()
    with torch.cuda.device(x.device):
        return update_with(_launch, x, offset_left, sums, origin, steps, max_left)


def short_forward(x, weight, left):
    """The output (T, B, C) of a short convolution, in the dtype of `x` and `weight` (K, C).

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    _check_cupy()
    with torch.cuda.device(x.device):
        return short_forward_with(_launch, x, weight, left)


def short_backward(dout, x, weight, left):
    """Its gradients ``(dx, d_weight)``; the same bits at every run.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    _check_cupy()
    with torch.cuda.device(x.device):
        return short_backward_with(_launch, dout, x, weight, left)


# -------------------------------------------------------------------------------------- planning
# What is launched follows from sizes alone. `launch(dtype, kernel, blocks, threads, shared,
# problem)` makes one launch: on a GPU here, on the host in the tests.


class Plan(NamedTuple):
    """One pass: fields of the problem, workspace by field, and launches in their order."""

    sizes: dict
    workspace: dict  # field: (count, dtype)
    launches: tuple  # of (kernel, blocks, threads, bytes of shared memory)


def forward_with(launch, shared_memory, x, offset_left, offset_right, max_left, max_right):
    """`forward` through any `launch`, for blocks with up to `shared_memory` bytes."""
    out = _empty_like(x)
    sizes = (*x.shape, offset_left.shape[2], max_left, max_right)
    wide = _is_wide(_FORWARD_WIDTH, x.shape[2] // offset_left.shape[2], x)
    plan = _plan_forward(x.dtype, wide, shared_memory, *sizes)
    tensors = {"x": x, "offset_left": offset_left, "offset_right": offset_right, "out": out}
    _run(launch, plan, sizes, tensors)
    return out


def backward_with(launch, shared_memory, dout, x, offset_left, offset_right, max_left, max_right):
    """`backward` through any `launch`, for blocks with up to `shared_memory` bytes."""
    dx, d_left = _empty_like(x), _empty_like(offset_left)
    d_right = None if offset_right is None else _empty_like(offset_right)
    sizes = (*x.shape, offset_left.shape[2], max_left, max_right)
    wide = _is_wide(_BACKWARD_WIDTH, x.shape[2] // offset_left.shape[2], x, dout)
    plan = _plan_backward(x.dtype, wide, shared_memory, *sizes)
    tensors = {"dout": dout, "x": x, "offset_left": offset_left, "offset_right": offset_right}
    tensors |= {"out": dx, "d_offset_left": d_left, "d_offset_right": d_right}
    _run(launch, plan, sizes, tensors)
    return dx, d_left, d_right


def update_with(launch, x, offset_left, sums, origin, steps, max_left):
    """`update` through any `launch`."""
    out = _empty_like(x)
    S, B, C = x.shape
    name, H = _NAMES[x.dtype], offset_left.shape[2]
    wide = _is_wide(_BACKWARD_WIDTH, C // H, x)
    threads = B * C // (_BACKWARD_WIDTH[name] if wide else 1)
    kernel = f"talk_update_{name}_{'wide' if wide else 'narrow'}"
    numbers = {"ring": sums.shape[0], "columns": sums.shape[1], "steps": steps}
    plan = Plan(numbers, {}, ((kernel, _ceil(threads, 128), 128, 0),))
    tensors = {"x": x, "offset_left": offset_left, "sums": sums, "origin": origin, "out": out}
    _run(launch, plan, (S, B, C, H, max_left, 0), tensors)
    return out


def short_forward_with(launch, x, weight, left):
    """`short_forward` through any `launch`."""
    out = _empty_like(x)
    T, B, C = x.shape
    kernel, packs = _short_kernel("talk_short_forward", x, weight)
    blocks = _ceil(_ceil(T, _SHORT_FORWARD) * B * packs, 128)
    numbers = {"taps": len(weight), "left": left, "tile": _SHORT_FORWARD}
    tensors = {"x": x, "weight": weight, "out": out}
    _run(launch, Plan(numbers, {}, ((kernel, blocks, 128, 0),)), (T, B, C, 1, 0, 0), tensors)
    return out


def short_backward_with(launch, dout, x, weight, left):
    """`short_backward` through any `launch`."""
    dx, d_weight = _empty_like(x), _empty_like(weight)
    T, B, C = x.shape
    K = len(weight)
    tile = min(max(_SHORT_BACKWARD, _ceil(T * B, 512)), _SHORT_MOST)  # some 512 runs or more
    runs = _ceil(T, tile) * B
    kernel, packs = _short_kernel("talk_short_backward", x, weight, dout)
    launches = (
        (kernel, _ceil(runs * packs, 128), 128, 0),
        (f"talk_short_weights_{_NAMES[x.dtype]}", _ceil(K * C, 128), 128, 0),
    )
    workspace = {"totals": (runs * K * C, torch.float64)}
    plan = Plan({"taps": K, "left": left, "tile": tile}, workspace, launches)
    tensors = {"dout": dout, "x": x, "weight": weight, "out": dx, "d_weight": d_weight}
    _run(launch, plan, (T, B, C, 1, 0, 0), tensors)
    return dx, d_weight


def _short_kernel(name, x, *others):
    """The kernel's name for these tensors, and how many threads lie across the channels."""
    dtype, C = _NAMES[x.dtype], x.shape[2]
    wide = _is_wide(_BACKWARD_WIDTH, C, x, *others)
    width = _BACKWARD_WIDTH[dtype] if wide else 1
    return f"{name}_{dtype}_{'wide' if wide else 'narrow'}", C // width


def _run(launch, plan, sizes, tensors):
    x, offset_left = tensors["x"], tensors.get("offset_left", tensors["x"])
    for field, (count, dtype) in plan.workspace.items():
        make = torch.zeros if field in _COUNTERS else _empty
        tensors[field] = make(count, dtype=dtype, device=x.device)
    pointers = (tensors.get(field) for field in _POINTERS)
    T, B, C, H, max_left, max_right = sizes
    numbers = {"T": T, "B": B, "C": C, "H": H, "R": C // H}
    numbers |= {"max_left": max_left, "max_right": max_right} | plan.sizes
    numbers["float32_offsets"] = x.dtype.itemsize == 2 and offset_left.dtype == torch.float32
    packed = _pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        1 / (max_left + max_right + 1),
        *(numbers.get(field, 0) for field in _SIZES),
    )
    problem = np.frombuffer(packed, dtype=_PROBLEM)
    for kernel, blocks, threads, shared in plan.launches:
        launch(_NAMES[x.dtype], kernel, blocks, threads, shared, problem)


@functools.lru_cache(maxsize=4096)
def _plan_forward(dtype, wide, shared_memory, T, B, C, H, max_left, max_right):
    name, R = _NAMES[dtype], C // H
    width = _FORWARD_WIDTH[name] if wide else 1
    kernel = f"{name}_wide" if wide else f"{name}_narrow"
    sum_type = torch.float32 if dtype.itemsize == 2 else torch.float64
    row = _LANES * width * sum_type.itemsize  # bytes of one row of prefix sums
    slabs = B * H * _ceil(R, _LANES * width)

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
        blocks = slabs * _ceil(T, tile)
        return Plan(sizes, {}, ((f"talk_forward_{kernel}", blocks, threads, shared),))

    chunks = _ceil(T, _TILE)
    workspace = {"sums": (T * B * C, sum_type), "totals": (chunks * B * C, torch.float64)}
    threads = _TILE // _ROWS * _LANES
    shared = _bytes(_TILE * (24 if dtype == torch.float64 else 16))
    launches = (
        (f"talk_forward_sums_{kernel}", slabs * chunks, threads, _bytes(threads // 32 * row)),
        (f"talk_scan_chunks_{name}", _ceil(B * C, 128), 128, 0),
        (f"talk_forward_gather_{kernel}", slabs * chunks, threads, shared),
    )
    return Plan({"tile": _TILE}, workspace, launches)


@functools.lru_cache(maxsize=4096)
def _plan_backward(dtype, wide, shared_memory, T, B, C, H, max_left, max_right):
    name, R, heads = _NAMES[dtype], C // H, B * H
    width = _BACKWARD_WIDTH[name] if wide else 1
    kernel = f"{name}_wide" if wide else f"{name}_narrow"
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
        launch = (f"talk_backward_{kernel}", heads * _ceil(T, tile), threads, shared)
        if tile == T:
            return Plan(sizes, {}, (launch,))
        workspace = {"reach": (2 * heads * _ceil(T, tile), torch.int32)}
        reach = (f"talk_reach_{name}", _ceil(heads * T, 128), 128, 0)
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
    ends = _ceil(heads * 2 * T, 128)  # blocks
    launches = (
        (f"talk_count_ends_{name}", ends, 128, 0),
        (f"talk_start_ends_{name}", heads, 512, _bytes(512 // 32 * 4)),
        (f"talk_place_ends_{name}", ends, 128, 0),
        (f"talk_rank_ends_{name}", ends, 128, 0),
        (f"talk_changes_{kernel}", heads * chunks, threads, _bytes(warps)),
        (f"talk_scan_chunks_{name}", _ceil(B * C, 128), 128, 0),
        (f"talk_backward_walk_{kernel}", heads * chunks, threads, shared),
    )
    return Plan({"tile": tile, "lanes": lanes}, workspace, launches)


def _is_wide(widths, R, x, *others):
    """May a thread move several channels at once? R is a multiple of them, and rows are aligned."""
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, *others))
    return R % widths[_NAMES[x.dtype]] == 0 and aligned


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


_empty_like = torch.empty_like


def _empty(count, dtype, device):
    """Workspace from PyTorch's allocator, which knows streams and CUDA graphs."""
    return torch.empty(count, dtype=dtype, device=device)


# ------------------------------------------------------------------------------------- launching


@functools.cache
def _shared_memory(device):
    """Bytes of shared memory that a block may use on `device`."""
    return cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]


@functools.cache
def _check_cupy():
    if cupy is None:
        raise RuntimeError(
            "talk_conv on CUDA needs CuPy: run scripts/setup.sh cuda12 (or cuda13, as PyTorch was "
            "built for), or set TALK_CONV_BACKEND=reference"
        )
    ours, theirs = torch.version.cuda, cupy.cuda.runtime.runtimeGetVersion() // 1000
    if ours is None or int(ours.split(".")[0]) != theirs:
        raise RuntimeError(
            f"PyTorch is built for CUDA {ours} and CuPy for CUDA {theirs}: "
            f"run scripts/setup.sh cuda{(ours or '12').split('.')[0]}"
        )


@functools.cache
def _kernel(dtype, name, device):
    """One kernel on one device; compiles all the kernels of `dtype` at the first call.

    Its blocks may use all that the device lets one have: at a launch, two threads might each set
    what they need, and one of them launch with too little.
    """
    kernel = _MODULES[dtype].get_function(name)
    kernel.max_dynamic_shared_size_bytes = _shared_memory(device)
    return kernel


class _Stream(NamedTuple):
    """A stream of PyTorch as an object of the CUDA stream protocol."""

    pointer: int

    def __cuda_stream__(self):
        return 0, self.pointer


def _current_stream(device):
    pointer = torch.cuda.current_stream(device).cuda_stream
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(_Stream(pointer))
    return cupy.cuda.ExternalStream(pointer, device)


def _launch(dtype, name, blocks, threads, shared, problem):
    device = torch.cuda.current_device()
    with cupy.cuda.Device(device), _current_stream(device):
        kernel = _kernel(dtype, name, device)
        kernel((blocks,), (threads,), (problem,), shared_mem=shared)

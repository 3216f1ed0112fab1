"""The operator on CUDA: launches what ``cuda_plan`` plans, with CuPy.

The kernels are compiled for a device and a dtype at their first launch, and cached on disk by
CuPy; importing this module compiles nothing and needs neither a GPU nor CuPy. CuPy compiles with
``-ftz=true``: numbers below float32's smallest normal one, 1.2e-38, count as 0 in what is computed
in float32, and are written as 0; so are sums of bfloat16 below 7.7e-34, held at 2^-16 of them.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from talk_fairseq.cuda_plan import (
    NAMES,
    plan_backward,
    plan_forward,
    plan_short_backward,
    plan_short_forward,
    plan_update,
)
from talk_fairseq.kernel_source import Layout, compile_options, source

try:
    import cupy
except ImportError:  # the first launch says what to install
    cupy = None

_PROBLEM = Layout("talk_conv.cu", "Problem")
_SHORT_PROBLEM = Layout("short_conv.cu", "ShortProblem")
_COUNTERS = ("starts",)  # workspace that is 0 at first; the other holds anything

_MODULES = {}
if cupy is not None:
    _MODULES = {
        (file, dtype): cupy.RawModule(code=source(file), options=compile_options(dtype))
        for file in ("talk_conv.cu", "short_conv.cu")
        for dtype in NAMES.values()
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


# --------------------------------------------------------------------------------------- passes
# `launch(file, dtype, kernel, blocks, threads, shared, problem)` makes one launch: on a GPU here,
# on the host in the tests.


def forward_with(launch, shared_memory, x, offset_left, offset_right, max_left, max_right):
    """`forward` through any `launch`, for blocks with up to `shared_memory` bytes."""
    out = _empty_like(x)
    sizes = (*x.shape, offset_left.shape[2], max_left, max_right)
    plan = plan_forward(x.dtype, _aligned(x), shared_memory, *sizes)
    tensors = {"x": x, "offset_left": offset_left, "offset_right": offset_right, "out": out}
    _run(launch, plan, sizes, tensors)
    return out


def backward_with(launch, shared_memory, dout, x, offset_left, offset_right, max_left, max_right):
    """`backward` through any `launch`, for blocks with up to `shared_memory` bytes."""
    dx, d_left = _empty_like(x), _empty_like(offset_left)
    d_right = None if offset_right is None else _empty_like(offset_right)
    sizes = (*x.shape, offset_left.shape[2], max_left, max_right)
    plan = plan_backward(x.dtype, _aligned(x, dout), shared_memory, *sizes)
    tensors = {"dout": dout, "x": x, "offset_left": offset_left, "offset_right": offset_right}
    tensors |= {"out": dx, "d_offset_left": d_left, "d_offset_right": d_right}
    _run(launch, plan, sizes, tensors)
    return dx, d_left, d_right


def update_with(launch, x, offset_left, sums, origin, steps, max_left):
    """`update` through any `launch`."""
    out = _empty_like(x)
    S, B, C = x.shape
    H = offset_left.shape[2]
    plan = plan_update(x.dtype, _aligned(x), B, C, H)
    tensors = {"x": x, "offset_left": offset_left, "sums": sums, "origin": origin, "out": out}
    ring, columns, _ = sums.shape
    past = {"ring": ring, "columns": columns, "steps": steps}
    _run(launch, plan, (S, B, C, H, max_left, 0), tensors, past)
    return out


def short_forward_with(launch, x, weight, left):
    """`short_forward` through any `launch`."""
    out = _empty_like(x)
    plan = plan_short_forward(x.dtype, _aligned(x, weight), *x.shape, len(weight), left)
    _run_short(launch, plan, {"x": x, "weight": weight, "out": out})
    return out


def short_backward_with(launch, dout, x, weight, left):
    """`short_backward` through any `launch`."""
    dx, d_weight = _empty_like(x), _empty_like(weight)
    plan = plan_short_backward(x.dtype, _aligned(x, weight, dout), *x.shape, len(weight), left)
    tensors = {"dout": dout, "x": x, "weight": weight, "out": dx, "d_weight": d_weight}
    _run_short(launch, plan, tensors)
    return dx, d_weight


def _aligned(*tensors):
    """May several channels be moved at a time, as far as the tensors' addresses go?"""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _run(launch, plan, sizes, tensors, past={}):  # noqa: B006
    x, offset_left = tensors["x"], tensors["offset_left"]
    T, B, C, H, max_left, max_right = sizes
    numbers = {"T": T, "B": B, "C": C, "H": H, "R": C // H}
    numbers |= {"max_left": max_left, "max_right": max_right} | plan.sizes | past
    numbers["float32_offsets"] = x.dtype.itemsize == 2 and offset_left.dtype == torch.float32
    numbers["scale"] = 1 / (max_left + max_right + 1)
    _launch_all(launch, "talk_conv.cu", _PROBLEM, plan, tensors, numbers)


def _run_short(launch, plan, tensors):
    T, B, C = tensors["x"].shape
    numbers = {"T": T, "B": B, "C": C} | plan.sizes
    _launch_all(launch, "short_conv.cu", _SHORT_PROBLEM, plan, tensors, numbers)


def _launch_all(launch, file, layout, plan, tensors, numbers):
    x = tensors["x"]
    for field, (count, dtype) in plan.workspace.items():
        make = torch.zeros if field in _COUNTERS else _empty
        tensors[field] = make(count, dtype=dtype, device=x.device)
    pointers = (tensors.get(field) for field in layout.pointers)
    problem = layout.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
        *(numbers.get(field, 0) for field in layout.numbers),
    )
    for kernel, blocks, threads, shared in plan.launches:
        launch(file, NAMES[x.dtype], kernel, blocks, threads, shared, problem)


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
def _kernel(file, dtype, name, device):
    """One kernel on one device; compiles all the kernels of a file and `dtype` at the first call.

    Its blocks may use all that the device lets one have: at a launch, two threads might each set
    what they need, and one of them launch with too little.
    """
    kernel = _MODULES[file, dtype].get_function(name)
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


def _launch(file, dtype, name, blocks, threads, shared, problem):
    device = torch.cuda.current_device()
    argument = np.frombuffer(problem, dtype=f"V{len(problem)}")
    with cupy.cuda.Device(device), _current_stream(device):
        kernel = _kernel(file, dtype, name, device)
        kernel(blocks, (threads,), (argument,), shared_mem=shared)

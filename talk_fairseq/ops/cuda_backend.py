"""The operator on CUDA: launches what ``cuda_plan`` plans, with CuPy.

The kernels are compiled for a device and a dtype at their first launch, and cached on disk by
CuPy; importing this module compiles nothing and needs neither a GPU nor CuPy. CuPy compiles with
``-ftz=true``: numbers below float32's smallest normal one, 1.2e-38, count as 0 in what is computed
in float32, and are written as 0; so are sums of bfloat16 below
7.7e-34, which are kept as 2^-16 of their value.
"""

import ctypes
import functools
import threading

import torch

from talk_fairseq.ops.cuda_plan import (
    NAMES,
    plan_backward,
    plan_forward,
    plan_short_backward,
    plan_short_forward,
    plan_update,
)
from talk_fairseq.ops.kernel_source import Layout, compile_options, source

try:
    import cupy
except ImportError:  # the first launch says what to install
    cupy = None

_LAYOUTS = {
    "talk_conv.cu": Layout("talk_conv.cu", "Problem"),
    "short_conv.cu": Layout("short_conv.cu", "ShortProblem"),
}
_COUNTERS = ("starts",)  # workspace that is 0 at first; the other holds anything
_ALIGNMENT = 256  # bytes of which a piece of workspace begins at a multiple

_MODULES = {}
if cupy is not None:
    _MODULES = {
        (file, dtype): cupy.RawModule(code=source(file), options=compile_options(dtype))
        for file in ("talk_conv.cu", "short_conv.cu")
        for dtype in NAMES.values()
    }


def forward(x, offset_left, offset_right, max_left, max_right):
    """Return the operator's output. All tensors are contiguous and on one CUDA device.

    Args:
        x: (T, B, C), none of them 0, in float64, float32, float16 or bfloat16.
        offset_left: (T, B, H), in x's dtype, or in float32 beside a float16 or bfloat16 `x`.
        offset_right: likewise, or None in the causal form.
        max_left: int >= 0.
        max_right: int >= 0.

    Returns:
        (T, B, C) in x's dtype. A negative or NaN offset gives NaN.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    return _on_device(forward_with, x, offset_left, offset_right, max_left, max_right)


def backward(dout, x, offset_left, offset_right, max_left, max_right):
    """Return the gradients ``(dx, d_offset_left, d_offset_right)``; the last is None when causal.

    Args:
        dout: (T, B, C), the gradient of the output, in x's dtype and contiguous.
        x, offset_left, offset_right, max_left, max_right: as in the forward pass.

    Returns:
        Gradients in the shape and dtype of what they belong to; the same bits at every run.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    return _on_device(backward_with, dout, x, offset_left, offset_right, max_left, max_right)


def update(x, offset_left, sums, origin, steps, max_left):
    """Return the next outputs (S, B, C) of a causal sequence, after `steps` others, in one launch.

    `sums` and `origin` are those of a TaLKConvState; the new steps are written into them.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    return _on_device(update_with, x, offset_left, sums, origin, steps, max_left)


def short_forward(x, weight, left):
    """Return the output (T, B, C) of a short convolution, in the dtype of `x` and `weight` (K, C).

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    return _on_device(short_forward_with, x, weight, left)


def short_backward(dout, x, weight, left):
    """Return its gradients ``(dx, d_weight)``; the same bits at every run.

    Raises:
        RuntimeError: CuPy is missing, or built for another CUDA than PyTorch.
    """
    return _on_device(short_backward_with, dout, x, weight, left)


# --------------------------------------------------------------------------------------- passes
# `device` is where launches are made: a GPU here, the host in the tests. It has two members:
#   shared_memory: bytes of it that a block may use;
#   launcher(file, dtype, kernel, blocks, threads, shared): a function that makes this launch, given
#       what cuLaunchKernel takes as `kernelParams`, the address of the argument's address.


def forward_with(device, x, offset_left, offset_right, max_left, max_right):
    """`forward` on any `device`."""
    out = _empty_like(x)
    launch = _forward_pass(
        device, x.dtype, offset_left.dtype, _aligned(x), *x.shape, offset_left.shape[2],
        max_left, max_right,
    )  # fmt: skip
    launch(x, offset_left, offset_right, out)
    return out


def backward_with(device, dout, x, offset_left, offset_right, max_left, max_right):
    """`backward` on any `device`."""
    dx, d_left = _empty_like(x), _empty_like(offset_left)
    d_right = None if offset_right is None else _empty_like(offset_right)
    launch = _backward_pass(
        device, x.dtype, offset_left.dtype, _aligned(x, dout), *x.shape, offset_left.shape[2],
        max_left, max_right,
    )  # fmt: skip
    launch(dout, x, offset_left, offset_right, dx, d_left, d_right)
    return dx, d_left, d_right


def update_with(device, x, offset_left, sums, origin, steps, max_left):
    """`update` on any `device`."""
    out = _empty_like(x)
    launch = _update_pass(
        device, x.dtype, offset_left.dtype, _aligned(x), *x.shape, offset_left.shape[2], max_left,
        *sums.shape[:2],
    )  # fmt: skip
    launch(x, offset_left, sums, origin, out, steps=steps)
    return out


def short_forward_with(device, x, weight, left):
    """`short_forward` on any `device`."""
    out = _empty_like(x)
    launch = _short_forward_pass(device, x.dtype, _aligned(x, weight), *x.shape, len(weight), left)
    launch(x, weight, out)
    return out


def short_backward_with(device, dout, x, weight, left):
    """`short_backward` on any `device`."""
    dx, d_weight = _empty_like(x), _empty_like(weight)
    launch = _short_backward_pass(
        device, x.dtype, _aligned(x, weight, dout), *x.shape, len(weight), left
    )
    launch(dout, x, weight, dx, d_weight)
    return dx, d_weight


def _aligned(*tensors):
    """Return whether the tensors' addresses allow several channels to be moved at a time."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % 16 == 0


class _Pass:
    """A plan that is ready for calls of the same sizes: each fills in addresses, and launches.

    Args:
        device: where, as above.
        file: the kernels' file.
        dtype: x's.
        plan: the :class:`talk_fairseq.ops.cuda_plan.Plan`.
        fields: those of the kernels' argument that a call's tensors are for.
        numbers: what its other fields hold, beside the plan's sizes; 0 if nothing.
    """

    def __init__(self, device, file, dtype, plan, fields, numbers):
        layout = _LAYOUTS[file]
        numbers = {**numbers, **plan.sizes}
        numbers = {field: numbers[field] for field in layout.numbers if field in numbers}
        self._argument = functools.partial(layout.struct, **numbers)
        self._fields = fields
        self._launches = [device.launcher(file, NAMES[dtype], *launch) for launch in plan.launches]
        # All that is 0 at first lies in one piece of memory, all the rest in another.
        self._workspace = []
        for make, cleared in ((_zeros, True), (_empty, False)):
            size, places = 0, []
            for field, (count, kind) in plan.workspace.items():
                if (field in _COUNTERS) == cleared:
                    places.append((field, size))
                    size += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
            if places:
                self._workspace.append((make, size, places))
        # Arguments that no call is filling in: each takes one out, and puts it back when a launch
        # has copied it.
        self._idle = []

    def __call__(self, *tensors, **numbers):
        """Launch on `tensors` (None is a null pointer), with `numbers` that are this call's."""
        try:
            argument, parameters, address = self._idle.pop()
        except IndexError:
            argument = self._argument()
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
            address = ctypes.addressof(parameters)
        for field, tensor in zip(self._fields, tensors):
            setattr(argument, field, None if tensor is None else tensor.data_ptr())
        for field, number in numbers.items():
            setattr(argument, field, number)
        pieces = self._workspace and self._allocate(argument, tensors[0].device)
        for launch in self._launches:
            launch(address)
        del pieces  # whose memory the kernels, launched before, have to themselves
        self._idle.append((argument, parameters, address))

    def _allocate(self, argument, device):
        pieces = []
        for make, size, places in self._workspace:
            pieces.append(make(size, device))
            for field, offset in places:
                setattr(argument, field, pieces[-1].data_ptr() + offset)
        return pieces


def _zeros(size, device):
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _empty(size, device):
    """Bytes from PyTorch's allocator, which knows streams and CUDA graphs."""
    return torch.empty(size, dtype=torch.uint8, device=device)


_empty_like = torch.empty_like


@functools.lru_cache(maxsize=4096)
def _forward_pass(device, dtype, offset_dtype, aligned, *sizes):
    plan = plan_forward(dtype, aligned, device.shared_memory, *sizes)
    fields = ("x", "offset_left", "offset_right", "out")
    return _Pass(device, "talk_conv.cu", dtype, plan, fields, _numbers(dtype, offset_dtype, *sizes))


@functools.lru_cache(maxsize=4096)
def _backward_pass(device, dtype, offset_dtype, aligned, *sizes):
    plan = plan_backward(dtype, aligned, device.shared_memory, *sizes)
    fields = ("dout", "x", "offset_left", "offset_right", "out", "d_offset_left", "d_offset_right")
    return _Pass(device, "talk_conv.cu", dtype, plan, fields, _numbers(dtype, offset_dtype, *sizes))


@functools.lru_cache(maxsize=4096)
def _update_pass(device, dtype, offset_dtype, aligned, S, B, C, H, max_left, ring, columns):
    plan = plan_update(dtype, aligned, B, C, H)
    fields = ("x", "offset_left", "sums", "origin", "out")
    numbers = _numbers(dtype, offset_dtype, S, B, C, H, max_left, 0)
    numbers |= {"ring": ring, "columns": columns}
    return _Pass(device, "talk_conv.cu", dtype, plan, fields, numbers)


@functools.lru_cache(maxsize=4096)
def _short_forward_pass(device, dtype, aligned, T, B, C, taps, left):
    plan = plan_short_forward(dtype, aligned, T, B, C, taps, left)
    fields = ("x", "weight", "out")
    return _Pass(device, "short_conv.cu", dtype, plan, fields, {"T": T, "B": B, "C": C})


@functools.lru_cache(maxsize=4096)
def _short_backward_pass(device, dtype, aligned, T, B, C, taps, left):
    plan = plan_short_backward(dtype, aligned, T, B, C, taps, left)
    fields = ("dout", "x", "weight", "out", "d_weight")
    return _Pass(device, "short_conv.cu", dtype, plan, fields, {"T": T, "B": B, "C": C})


def _numbers(dtype, offset_dtype, T, B, C, H, max_left, max_right):
    numbers = {"T": T, "B": B, "C": C, "H": H, "R": C // H}
    numbers |= {"max_left": max_left, "max_right": max_right}
    numbers["float32_offsets"] = dtype.itemsize == 2 and offset_dtype == torch.float32
    numbers["scale"] = 1 / (max_left + max_right + 1)
    return numbers


# ------------------------------------------------------------------------------------- launching

_thread = threading.local()


def _on_device(run, tensor, *arguments):
    """``run(device, tensor, …)`` on the GPU that holds `tensor`, made current for as long."""
    index = tensor.get_device()
    gpu = _gpu(index)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(gpu, tensor, *arguments)
    if not hasattr(_thread, "has_context"):
        # Device 0 is current in a new thread, such as one of autograd's, but not its context.
        cupy.cuda.runtime.setDevice(index)
        _thread.has_context = True
    return run(gpu, tensor, *arguments)


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


class _Gpu:
    """One GPU, as the `device` of a pass."""

    def __init__(self, index):
        _check_cupy()
        self.index = index
        attributes = cupy.cuda.Device(index).attributes
        self.shared_memory = attributes["MaxSharedMemoryPerBlockOptin"]

    def launcher(self, file, dtype, name, blocks, threads, shared):
        """A launch on the stream that is current when it is made.

        It takes the driver's own call: CuPy's looks up its current device and stream besides, and
        reads the argument as an array.
        """
        function = _kernel(self, file, dtype, name).ptr
        launch, stream = cupy.cuda.driver.launchKernel, torch._C._cuda_getCurrentRawStream
        sizes, index = (function, *blocks, threads, 1, 1, shared), self.index
        return lambda parameters: launch(*sizes, stream(index), parameters, 0)


_gpu = functools.cache(_Gpu)


@functools.cache
def _kernel(gpu, file, dtype, name):
    """One kernel on one GPU; compiles all of a file and `dtype` at the first call.

    Its blocks may use all that the device lets one have: at a launch, two threads might each set
    what they need, and one of them launch with too little.
    """
    with cupy.cuda.Device(gpu.index):
        kernel = _MODULES[file, dtype].get_function(name)
        kernel.max_dynamic_shared_size_bytes = gpu.shared_memory
        return kernel.kernel  # which keeps its module loaded

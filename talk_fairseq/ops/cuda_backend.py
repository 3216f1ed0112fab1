"""The operator on CUDA: launches what ``cuda_plan`` plans, with CuPy.

The kernels are compiled for a device and a dtype at their first launch, and cached on disk by
CuPy; importing this module compiles nothing and needs neither a GPU nor CuPy.
"""

import ctypes
import functools
import threading

import torch

from talk_fairseq.ops import cuda_plan
from talk_fairseq.ops.kernel_source import compile_options, source, struct_of

try:
    import cupy

    _why_no_cupy = None
except Exception as error:  # the first launch says what to install
    cupy, _why_no_cupy = None, error

_ARGUMENTS = {
    "talk_conv.cu": struct_of("talk_conv.cu", "Problem"),
    "short_conv.cu": struct_of("short_conv.cu", "ShortProblem"),
}
_COUNTERS = "starts"  # workspace that is 0 at first; the other holds anything

_MODULES = {
    (file, dtype): cupy.RawModule(code=source(file), options=compile_options(dtype))
    for file in _ARGUMENTS
    for dtype in cuda_plan.NAMES.values()
    if cupy is not None
}


# --------------------------------------------------------------------------------------- passes
# `device` is where launches are made: a GPU here, the host in the tests. It has two members:
#   shared_memory: bytes of it that a block may use;
#   launcher(file, dtype, kernel, blocks, threads, shared): a function that makes this launch, given
#       what cuLaunchKernel takes as `kernelParams`, the address of the argument's address.
# All tensors are contiguous and on this device, and none of them is empty; offsets are in the dtype
# of `x`, or in float32 beside a float16 or bfloat16 `x`.


def forward_with(device, x, offset_left, offset_right, max_left, max_right):
    """Return the output (T, B, C) in x's dtype."""
    out = _empty_like(x)
    sizes = *x.shape, offset_left.shape[2], max_left, max_right, offset_left.dtype is torch.float32
    launch = _pass(cuda_plan.plan_forward, device, x.dtype, x.data_ptr() % 16 == 0, *sizes)
    launch(x=x, offset_left=offset_left, offset_right=offset_right, out=out)
    return out


def backward_with(device, dout, x, offset_left, offset_right, max_left, max_right):
    """Return the gradients ``(dx, d_offset_left, d_offset_right)``; the last is None when causal.

    Each has the shape and dtype of what it belongs to, and the same bits at every run.
    """
    dx, d_left = _empty_like(x), _empty_like(offset_left)
    d_right = None if offset_right is None else _empty_like(offset_right)
    sizes = *x.shape, offset_left.shape[2], max_left, max_right, offset_left.dtype is torch.float32
    aligned = (x.data_ptr() | dout.data_ptr()) % 16 == 0
    launch = _pass(cuda_plan.plan_backward, device, x.dtype, aligned, *sizes)
    gradients = {"out": dx, "d_offset_left": d_left, "d_offset_right": d_right}
    launch(x=x, dout=dout, offset_left=offset_left, offset_right=offset_right, **gradients)
    return dx, d_left, d_right


def update_with(device, x, offset_left, sums, origin, steps, max_left):
    """Return the next outputs (S, B, C) in one launch, as `cpu_backend.update` does."""
    out = _empty_like(x)
    L, columns, _ = sums.shape
    float32_offsets = offset_left.dtype is torch.float32
    sizes = *x.shape, offset_left.shape[2], max_left, L, columns, float32_offsets
    launch = _pass(cuda_plan.plan_update, device, x.dtype, x.data_ptr() % 16 == 0, *sizes)
    launch(x=x, steps=steps, offset_left=offset_left, sums=sums, origin=origin, out=out)
    return out


def short_forward_with(device, x, weight, left):
    """Return the short convolution of `x` (T, B, C) with `weight` (K, C), both of one dtype."""
    out = _empty_like(x)
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    sizes = *x.shape, len(weight), left
    launch = _pass(cuda_plan.plan_short_forward, device, x.dtype, aligned, *sizes)
    launch(x=x, weight=weight, out=out)
    return out


def short_backward_with(device, dout, x, weight, left):
    """Return its gradients ``(dx, d_weight)``; the same bits at every run."""
    dx, d_weight = _empty_like(x), _empty_like(weight)
    aligned = (x.data_ptr() | weight.data_ptr() | dout.data_ptr()) % 16 == 0
    sizes = *x.shape, len(weight), left
    launch = _pass(cuda_plan.plan_short_backward, device, x.dtype, aligned, *sizes)
    launch(x=x, dout=dout, weight=weight, out=dx, d_weight=d_weight)
    return dx, d_weight


def short_update_with(device, x, weight, rows, origin, steps):
    """Return its next outputs (S, B, C) in one launch, as `cpu_backend.short_update` does."""
    out = _empty_like(x)
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    sizes = *x.shape, *rows.shape[:2]
    launch = _pass(cuda_plan.plan_short_update, device, x.dtype, aligned, *sizes)
    launch(x=x, weight=weight, ring=rows, origin=origin, steps=steps, out=out)
    return out


class _Pass:
    """A plan that is ready for calls of the same sizes: each fills in addresses, and launches.

    `aligned`: do the tensors' addresses allow several channels to be moved at a time?
    """

    def __init__(self, plan, device, dtype, aligned, *sizes):
        plan = plan(dtype, aligned, device.shared_memory, *sizes)
        name = cuda_plan.NAMES[dtype]
        self._argument = functools.partial(_ARGUMENTS[plan.file], **plan.sizes)
        self._launches = [device.launcher(plan.file, name, *launch) for launch in plan.launches]
        self._workspace = {
            field: count * kind.itemsize for field, (count, kind) in plan.workspace.items()
        }
        # Arguments that no call is using. A call takes one, and puts it back after its launches,
        # which copy it.
        self._idle = []

    def __call__(self, x, **fields):
        """Launch with these fields of the argument: tensors, None (a null pointer) and numbers."""
        try:
            argument, parameters, address = self._idle.pop()
        except IndexError:
            argument = self._argument()
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
            address = ctypes.addressof(parameters)
        argument.x = x.data_ptr()
        for field, value in fields.items():
            plain = value is None or type(value) is int
            setattr(argument, field, value if plain else value.data_ptr())
        pieces = {field: _empty(size, x.device) for field, size in self._workspace.items()}
        for field, piece in pieces.items():
            setattr(argument, field, piece.data_ptr())
        if _COUNTERS in pieces:
            pieces[_COUNTERS].zero_()
        for launch in self._launches:
            launch(address)
        del pieces  # the stream gives their memory to later kernels only
        self._idle.append((argument, parameters, address))


_pass = functools.lru_cache(maxsize=4096)(_Pass)


def _empty(size, device):
    """Bytes from PyTorch's allocator, which knows streams and CUDA graphs."""
    return torch.empty(size, dtype=torch.uint8, device=device)


_empty_like = torch.empty_like  # The tests replace this, as `_empty` of cpu_backend.


_thread = threading.local()


def _on_device(run, tensor, *arguments):
    """Return ``run(gpu, tensor, …)``, with the GPU that holds `tensor` as the current device."""
    index = tensor.get_device()
    gpu = _gpu(index)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(gpu, tensor, *arguments)
    if not hasattr(_thread, "has_context"):
        # A new thread, such as one of autograd's, has device 0 selected but no CUDA context yet.
        cupy.cuda.runtime.setDevice(index)
        _thread.has_context = True
    return run(gpu, tensor, *arguments)


# The passes on the GPU of their first tensor. RuntimeError: CuPy is missing, or built for another
# CUDA than PyTorch.
forward = functools.partial(_on_device, forward_with)
backward = functools.partial(_on_device, backward_with)
update = functools.partial(_on_device, update_with)
short_forward = functools.partial(_on_device, short_forward_with)
short_backward = functools.partial(_on_device, short_backward_with)
short_update = functools.partial(_on_device, short_update_with)


def _check_cupy():
    if cupy is None:
        raise RuntimeError(
            "talk_conv on CUDA needs CuPy: run scripts/setup.sh cuda12 (or cuda13, as PyTorch was "
            f"built for), or set TALK_CONV_BACKEND=reference ({_why_no_cupy})"
        ) from _why_no_cupy
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
        self.shared_memory = cupy.cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"]

    def launcher(self, file, dtype, name, blocks, threads, shared):
        """Return a function that launches a kernel on the stream that is current when it is called.

        It calls the driver itself: CuPy's own launch also looks up a device and a stream, and reads
        the argument as an array.
        """
        # Held here, since CuPy 13 lets go of one if two threads load it at the same time.
        kernel = _kernel(self, file, dtype, name)
        launch, stream = cupy.cuda.driver.launchKernel, torch._C._cuda_getCurrentRawStream
        sizes, index = (*blocks, threads, 1, 1, shared), self.index
        return lambda parameters: launch(kernel.ptr, *sizes, stream(index), parameters, 0)


_gpu = functools.cache(_Gpu)


@functools.cache
def _kernel(gpu, file, dtype, name):
    """Return a kernel on a GPU; the first call compiles all kernels of the file for `dtype`.

    Its limit of shared memory is set once, to the device's: if each launch set what it needs,
    another thread could lower the limit before that launch.
    """
    with cupy.cuda.Device(gpu.index):
        kernel = _MODULES[file, dtype].get_function(name)
        kernel.max_dynamic_shared_size_bytes = gpu.shared_memory
        return kernel.kernel  # which keeps its module loaded

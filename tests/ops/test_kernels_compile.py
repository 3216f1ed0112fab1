"""Compiles the CUDA kernels for every dtype and several GPUs; needs no GPU."""

import contextlib
import ctypes
import re
import shutil
import subprocess
import weakref
from types import SimpleNamespace

import pytest
import torch
from compiler import compile_kernels, nvrtc

from talk_fairseq.ops import cuda_backend
from talk_fairseq.ops.kernel_source import source_path

ARCHITECTURES = (75, 80, 90, 100)
DTYPES = ("float64", "float32", "float16", "bfloat16")
KERNELS = {"talk_conv.cu": 25, "short_conv.cu": 7}  # of one dtype


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(n, marks=pytest.mark.long) for n in (75, 80, 100))]
)
@pytest.mark.parametrize("file", KERNELS)
def test_nvcc(file, architecture, tmp_path):
    """The plain file, all dtypes; no kernel keeps variables in memory for want of registers."""
    command = ["nvcc", "-cubin", "-std=c++17", f"-arch=sm_{architecture}", "-Xptxas", "-v"]
    command += [source_path(file), "-o", tmp_path / "talk.cubin"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = re.findall(r"Compiling entry function '(\w+)'", result.stderr)
    assert len(names) == KERNELS[file] * len(DTYPES)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert len(spills) == len(names)
    spilled = [name for name, spill in zip(names, spills) if spill != ("0", "0")]
    assert not spilled, f"register spills on sm_{architecture}: {spilled}"


def supported_architectures(library):
    """The architectures that NVRTC compiles for, such as 75."""
    number = ctypes.c_int()
    assert not library.nvrtcGetNumSupportedArchs(ctypes.byref(number))
    architectures = (ctypes.c_int * number.value)()
    assert not library.nvrtcGetSupportedArchs(architectures)
    return list(architectures)


# test_occupancy.py compiles all dtypes for sm_90.
@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        pytest.param("float32", marks=pytest.mark.long),
        pytest.param("float16", marks=pytest.mark.long),
        "bfloat16",
    ],
)
@pytest.mark.parametrize("file", KERNELS)
def test_nvrtc(file, dtype):
    """As CuPy compiles them: one dtype at a time, with no header in reach."""
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    architecture = ARCHITECTURES[DTYPES.index(dtype)]
    if architecture not in supported_architectures(library):  # of the NVRTC of torch for CUDA 12.4
        pytest.skip(f"this NVRTC does not know sm_{architecture}: it is older than 12.8")
    log = compile_kernels(library, file, dtype, architecture)
    assert log.count("Compiling entry function") == KERNELS[file]


def test_shared_memory_is_asked_for_once(monkeypatch):
    """CuPy, played: never at a launch, where another thread may be about to launch with more."""
    limit, done = 227 * 1024, []

    class Kernel:
        kernel = SimpleNamespace(ptr=1)

        def __setattr__(self, name, value):
            done.append((name, value))

    def launch(function, x, y, z, threads, threads_y, threads_z, shared, stream, parameters, extra):
        done.append((function, (x, y, z), threads, threads_y, threads_z, shared, stream, extra))

    module = SimpleNamespace(get_function=lambda name: kernel)
    kernel, current = Kernel(), iter((70, 71, 72))
    device = contextlib.nullcontext()
    device.attributes = {"MaxSharedMemoryPerBlockOptin": limit}
    cuda = SimpleNamespace(Device=lambda index: device, driver=SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(cuda_backend, "_MODULES", {("talk_conv.cu", "float32"): module})
    monkeypatch.setattr(cuda_backend, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_backend, "_check_cupy", lambda: None)
    streams = lambda index: next(current)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams, raising=False)
    gpu = cuda_backend._Gpu(0)
    for shared in (0, 64 * 1024, limit):
        gpu.launcher("talk_conv.cu", "float32", "talk_forward", (3, 2, 1), 32, shared)(123)
    assert done == [
        ("max_dynamic_shared_size_bytes", limit),
        (1, (3, 2, 1), 32, 1, 1, 0, 70, 0),
        (1, (3, 2, 1), 32, 1, 1, 64 * 1024, 71, 0),
        (1, (3, 2, 1), 32, 1, 1, limit, 72, 0),
    ]


def test_a_launcher_keeps_its_kernel_loaded(monkeypatch):
    """Two threads that begin together may load one each; CuPy 13 lets go of one of them."""

    class Function:
        ptr = 1

    loaded = [Function()]
    kept = weakref.ref(loaded[0])
    driver = SimpleNamespace(launchKernel=None)
    monkeypatch.setattr(cuda_backend, "cupy", SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(cuda_backend, "_kernel", lambda *_: loaded.pop())
    gpu = SimpleNamespace(index=0)
    launcher = cuda_backend._Gpu.launcher(gpu, "talk_conv.cu", "float32", "f", (1, 1, 1), 32, 0)
    assert kept() is not None
    del launcher
    assert kept() is None


def test_without_cupy(monkeypatch):
    """The import is free of CuPy; the first launch names the extra, and why it is not there."""
    broken = ImportError("libcublas.so.12: cannot open shared object file")
    monkeypatch.setattr(cuda_backend, "cupy", None)
    monkeypatch.setattr(cuda_backend, "_why_no_cupy", broken)
    with pytest.raises(RuntimeError, match="scripts/setup.sh cuda12 .*libcublas") as found:
        cuda_backend.forward(torch.zeros(1, 1, 1), None, None, 1, 1)
    assert found.value.__cause__ is broken


def test_cupy_of_another_cuda(monkeypatch):
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12040)
    monkeypatch.setattr(
        cuda_backend, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    message = "PyTorch is built for CUDA 13.0 and CuPy for CUDA 12: .* cuda13"
    with pytest.raises(RuntimeError, match=message):
        cuda_backend.backward(torch.zeros(1, 1, 1), None, None, None, 1, 1)

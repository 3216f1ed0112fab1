"""Compiles the CUDA kernels for every dtype and several GPUs; needs no GPU."""

import contextlib
import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from talk_fairseq import cuda_backend
from talk_fairseq.kernel_source import compile_options, source, source_path

ARCHITECTURES = (75, 80, 90, 100)
DTYPES = ("float64", "float32", "float16", "bfloat16")
KERNELS = {"talk_conv.cu": 23, "short_conv.cu": 5}  # of one dtype


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
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


def nvrtc():
    """NVRTC from its wheel or from the system, or None."""
    names = []
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations if spec else ():
            names += sorted(map(str, pathlib.Path(folder).glob("lib/libnvrtc.so.*")))
    for name in [*names, "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def supported_architectures(library):
    """The architectures that NVRTC compiles for, such as 75."""
    number = ctypes.c_int()
    assert not library.nvrtcGetNumSupportedArchs(ctypes.byref(number))
    architectures = (ctypes.c_int * number.value)()
    assert not library.nvrtcGetSupportedArchs(architectures)
    return list(architectures)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file", KERNELS)
def test_nvrtc(file, dtype):
    """As CuPy compiles them: one dtype at a time, with no header in reach."""
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    architecture = ARCHITECTURES[DTYPES.index(dtype)]
    if architecture not in supported_architectures(library):  # of the NVRTC of torch for CUDA 12.4
        pytest.skip(f"this NVRTC does not know sm_{architecture}: it is older than 12.8")
    options = [option.encode() for option in compile_options(dtype)]
    options += [b"-arch=sm_%d" % architecture, b"-ftz=true"]  # which CuPy always adds
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None
    )
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    assert not library.nvrtcGetCUBINSize(program, ctypes.byref(size)) and size.value > 0
    library.nvrtcDestroyProgram(ctypes.byref(program))


def test_shared_memory_is_asked_for_once(monkeypatch):
    """CuPy, played: never at a launch, where another thread may be about to launch with more."""
    limit, done = 227 * 1024, []

    class Kernel:
        def __setattr__(self, name, value):
            done.append((name, value))

        def __call__(self, blocks, threads, arguments, shared_mem):
            done.append(("launch", shared_mem))

    kernel = Kernel()
    module = SimpleNamespace(get_function=lambda name: kernel)
    devices = SimpleNamespace(Device=lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cuda_backend, "_MODULES", {("talk_conv.cu", "float32"): module})
    monkeypatch.setattr(cuda_backend, "_shared_memory", lambda device: limit)
    monkeypatch.setattr(cuda_backend, "cupy", SimpleNamespace(cuda=devices))
    monkeypatch.setattr(cuda_backend, "_current_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda_backend._kernel.cache_clear()
    try:
        for shared in (0, 64 * 1024, limit):
            cuda_backend._launch(
                "talk_conv.cu", "float32", "talk_forward", (1, 1, 1), 32, shared, b"\0"
            )
    finally:
        cuda_backend._kernel.cache_clear()
    assert done == [
        ("max_dynamic_shared_size_bytes", limit),
        *(("launch", shared) for shared in (0, 64 * 1024, limit)),
    ]


def test_without_cupy(monkeypatch):
    """The import is free of CuPy; the first launch names the extra."""
    monkeypatch.setattr(cuda_backend, "cupy", None)
    cuda_backend._check_cupy.cache_clear()
    with pytest.raises(RuntimeError, match="run scripts/setup.sh cuda12"):
        cuda_backend.forward(None, None, None, 1, 1)


def test_cupy_of_another_cuda(monkeypatch):
    cupy = pytest.importorskip("cupy")
    other = 11 if cupy.cuda.runtime.runtimeGetVersion() >= 12000 else 12
    monkeypatch.setattr(torch.version, "cuda", f"{other}.8")
    cuda_backend._check_cupy.cache_clear()
    with pytest.raises(RuntimeError, match=rf"PyTorch is built for CUDA {other}.8 and CuPy for"):
        cuda_backend.backward(None, None, None, None, 1, 1)

"""What the compiler says of the kernels: NVRTC compiles them as CuPy does, and needs no GPU."""

import ctypes
import functools
import importlib.util
import pathlib
import re
from typing import NamedTuple

from talk_fairseq.ops.kernel_source import compile_options, source


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


def compile_kernels(library, file, dtype, architecture):
    """The log of compiling a kernel file for one dtype, as CuPy does: no header in reach."""
    options = [option.encode() for option in compile_options(dtype)]
    options += [b"-arch=sm_%d" % architecture, b"-ftz=true"]  # which CuPy always adds
    options += [b"--ptxas-options=-v"]  # for the log
    program = ctypes.c_void_p()
    assert not library.nvrtcCreateProgram(
        ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None
    )
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    assert not library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    assert not library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, log.value.decode()
    return log.value.decode()


class Kernel(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    registers: int
    spills: int  # bytes stored and loaded for want of registers
    shared: int  # bytes, beside those of the launch


@functools.cache
def kernels(file, dtype, architecture=90):
    """{name: Kernel} of a kernel file."""
    found = {}
    log = compile_kernels(nvrtc(), file, dtype, architecture)
    for text in log.split("Compiling entry function '")[1:]:
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", text)))
        found[text.split("'")[0]] = Kernel(registers, spills, shared)
    return found


def blocks_a_multiprocessor(kernel, threads, shared):
    """How many blocks with so many bytes of shared memory there run at a time on sm_90."""
    warps = -(-threads // 32)
    registers_a_warp = -(-kernel.registers * 32 // 256) * 256
    return min(
        65536 // registers_a_warp // 4 * 4 // warps,  # a quarter of the warps to a scheduler
        228 * 1024 // (kernel.shared + shared + 1024),
        2048 // threads,
    )

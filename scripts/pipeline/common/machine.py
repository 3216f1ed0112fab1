"""What numbers depend on: the machine and the versions of what runs on it."""

import contextlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

PACKAGES = (
    *("torch", "numpy", "numba", "sacrebleu", "sentencepiece", "rouge-score"),
    *("ve-fairseq", "fairseq-fixed", "fairseq", "cupy-cuda12x", "cupy-cuda13x"),
)


def cores():
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux alone
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def has_gpu():
    """Return whether PyTorch can use a CUDA GPU."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


def versions():
    """Return ``{name: version}`` of Python and of the installed PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine(device):
    """Return the name of the GPU for the device "cuda", of the processor with its threads else."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    return f"{name}, {torch.get_num_threads()} threads"

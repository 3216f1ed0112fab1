"""What the main kernels take of a multiprocessor of sm_90, which decides how many blocks run there.

The problem is the benchmark's: B=10, C=1024, H=16, windows of 31+31. Needs no GPU.
"""

import pytest
import torch
from compiler import Kernel, blocks_a_multiprocessor, kernels, nvrtc

from talk_fairseq.ops.cuda_plan import NAMES, plan_backward, plan_forward

SHARED_MEMORY = 227 * 1024  # bytes that a block may have on sm_90
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.skipif(
    nvrtc() is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc-cu12"
)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("plan", "blocks", "warps"), [(plan_forward, 3, 30), (plan_backward, 2, 24)]
)
def test_blocks_a_multiprocessor_holds(plan, blocks, warps, dtype, figure):
    """With fewer of them, a multiprocessor of an H100 waits more for memory."""
    planned = plan(dtype, True, SHARED_MEMORY, 10_000, 10, 1024, 16, 31, 31, False)
    launch, _, threads, shared = planned.launches[-1]
    kernel = kernels("talk_conv.cu", NAMES[dtype])[launch]
    figure(
        f"{launch}, sm_90: {kernel.registers} registers, {kernel.shared + shared:,} bytes of "
        f"shared memory, {threads} threads"
    )
    assert blocks_a_multiprocessor(kernel, threads, shared) >= blocks
    assert blocks * threads >= 32 * warps


@pytest.mark.parametrize("file", ["talk_conv.cu", "short_conv.cu"])
def test_no_kernel_keeps_variables_in_memory(file):
    spills = {
        name: kernel.spills
        for dtype in DTYPES
        for name, kernel in kernels(file, NAMES[dtype]).items()
        if kernel.spills
    }
    assert not spills, f"bytes of spills: expected none, got {spills}"


def test_blocks_a_multiprocessor():
    kernel = Kernel(64, 0, 0)
    for threads, shared, blocks in (
        (320, 48 * 1024, 3),
        (320, 0, 3),
        (128, 0, 8),
        (64, 64 * 1024, 3),
    ):
        assert blocks_a_multiprocessor(kernel, threads, shared) == blocks

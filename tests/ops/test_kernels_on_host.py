"""Runs the CUDA kernels on the host: the kernel file compiled by g++ behind host_cuda.h.

The launches are the ones that cuda_backend plans for a GPU, threads run in a shuffled order, and
memory that nothing has written holds NaN.
"""

import ctypes
import functools
import hashlib
import math
import pathlib
import shutil
import subprocess
import tempfile

import pytest
import torch
from test_numbers import NOT_FINITE, check_edges, check_spread, check_spread_of_gradients

from oracle import (
    check_backward,
    check_forward,
    check_short_conv,
    rms_error,
    short_conv,
    talk_conv,
    talk_conv_backward,
)
from talk_fairseq.ops import cuda_backend, cuda_plan
from talk_fairseq.ops.kernel_source import source, source_path, struct_of
from talk_fairseq.ops.state import compute_dtype

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile kernels")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)
SHARED_MEMORY = 227 * 1024


PROBLEMS = {"talk_conv.cu": "Problem", "short_conv.cu": "ShortProblem"}


@functools.cache
def library(file):
    """The kernels of a file as a host library, compiled once and kept by what it is made from."""
    here = pathlib.Path(__file__).parent
    sources = (here / "host_cuda.cpp", here / "host_cuda.h")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    text = "".join((*command, *(path.read_text() for path in sources), source(file)))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = pathlib.Path(tempfile.gettempdir()) / f"talk_kernels_{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = pathlib.Path(folder) / path.name
            command += [f'-DKERNEL_FILE="{source_path(file)}"', f"-DPROBLEM={PROBLEMS[file]}"]
            command += [str(sources[0]), "-o", str(built)]
            subprocess.run(command, check=True)
            built.replace(path)
    return ctypes.CDLL(str(path))


def between_nans(tensor):
    """A tensor (but for one that is not aligned) with NaN before and behind it in memory."""
    if not torch.is_tensor(tensor) or tensor.data_ptr() % 16:
        return tensor
    memory = torch.full((tensor.numel() + 8192,), math.nan, dtype=tensor.dtype)
    copy = memory[4096 : 4096 + tensor.numel()].view_as(tensor)
    assert copy.data_ptr() % 16 == 0
    return copy.copy_(tensor)


class Host:
    """Stands where the CUDA backend stands, and remembers what was launched."""

    def __init__(self, seed=0, shared_memory=SHARED_MEMORY):
        self.seed, self.shared_memory, self.launched = seed, shared_memory, []

    def launcher(self, file, dtype, name, blocks, threads, shared):
        kernel = getattr(library(file), name)
        assert shared <= max(self.shared_memory, 48 * 1024), name

        def launch(parameters):
            self.launched.append(name)
            problem = ctypes.c_void_p.from_address(parameters)
            sizes = *blocks, threads, ctypes.c_size_t(shared)
            code = library(file).launch(kernel, problem, *sizes, self.seed)
            assert code == 0, (name, ("", "a deadlock", "past the shared memory")[code])

        return launch

    def forward(self, *arguments):
        return cuda_backend.forward_with(self, *map(between_nans, arguments))

    def backward(self, *arguments):
        return cuda_backend.backward_with(self, *map(between_nans, arguments))

    def update(self, *arguments):
        return cuda_backend.update_with(self, *arguments)

    def short_update(self, *arguments):
        return cuda_backend.short_update_with(self, *arguments)

    def short_conv(self, x, weight, dout, left):
        out = cuda_backend.short_forward_with(self, x, weight, left)
        return out, *cuda_backend.short_backward_with(self, dout, x, weight, left)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh tensors hold NaN; so does workspace, whose bytes of 255 are -1 as integers."""

    def empty(size, device):
        return torch.full((size,), 255, dtype=torch.uint8)

    def empty_like(tensor):
        return torch.full_like(tensor, math.nan)

    monkeypatch.setattr(cuda_backend, "_empty", empty)
    monkeypatch.setattr(cuda_backend, "_empty_like", empty_like)


def example(T, B, H, R, dtype=torch.float32, offset_dtype=None, causal=False, high=1.0, seed=0):
    """(dout, x, offset_left, offset_right); some offsets are exactly 0 and exactly 1."""
    generator = torch.Generator().manual_seed(seed)
    dout, x = (torch.randn(T, B, H * R, generator=generator).to(dtype) for _ in range(2))
    offsets = []
    for _ in range(2):
        offset = high * torch.rand(T, B, H, generator=generator)
        kind = torch.rand(T, B, H, generator=generator)
        offset[kind < 0.1], offset[kind > 0.9] = 0, 1
        offsets.append(offset.to(offset_dtype or dtype))
    return dout, x, offsets[0], None if causal else offsets[1]


def check(host, arguments, max_left, max_right):
    dout, *inputs = arguments
    check_forward(host.forward, *inputs, max_left, max_right)
    check_backward(host.backward, dout, *inputs, max_left, max_right)


def test_python_and_cuda_agree():
    for file, struct in PROBLEMS.items():
        assert library(file).problem_bytes() == ctypes.sizeof(struct_of(file, struct))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 2, 3, 17, 65, 129, 151])
def test_lengths(T, causal, dtype):
    arguments = example(T, 1 if T > 100 else 3, 3, 8, dtype, causal=causal)
    check(Host(), arguments, 31, 0 if causal else 31)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_with_float32_offsets(dtype):
    check(Host(), example(65, 3, 3, 8, dtype, torch.float32), 31, 31)


@pytest.mark.parametrize("R", [1, 3, 4, 8, 12, 16, 32, 64, 72, 128, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_of_a_head(R, dtype):
    check(Host(), example(37, 1, 3, R, dtype), 7, 5)


@pytest.mark.parametrize("R", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_that_are_open_before_a_tile(R, dtype):
    """Many of them, over several tiles, and ends of many windows at one row."""
    dout, x, left, right = example(600, 1, 1, R, dtype, torch.float32 if dtype in HALVES else None)
    time = torch.arange(600).view(600, 1, 1)
    left[100:160] = (time[100:160] - 95.25) / 60  # all of them cut row 94
    right[200:260] = (270.75 - time[200:260]) / 60
    host = Host()
    check(host, (dout, x, left, right), 60, 60)
    assert sum("talk_backward" in name for name in host.launched) == 1


@pytest.mark.parametrize("windows", [(0, 0), (1, 0), (0, 1), (1, 1), (3, 31), (100, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(windows, dtype):
    check(Host(), example(67, 1, 3, 4, dtype), *windows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 3, 17, 300])
def test_windows_too_large_for_shared_memory(T, causal, dtype):
    host = Host(shared_memory=0)
    arguments = example(T, 1 if T > 100 else 3, 3, 4, dtype, causal=causal)
    check(host, arguments, 200, 0 if causal else 100)
    assert any("gather" in name for name in host.launched)
    assert any("walk" in name for name in host.launched)


@pytest.mark.parametrize("T", [31, 255, 256])
def test_large_windows_of_whole_units_blocks_and_chunks(T):
    """There is a row before the first time step, and one behind the last."""
    check(Host(shared_memory=0), example(T, 1, 2, 4), 200, 100)


@pytest.mark.parametrize("R", [1, 3, 37, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_windows_and_channels_of_a_head(R, dtype):
    check(Host(shared_memory=0), example(240, 1, 2, R, dtype), 20, 20)


@pytest.mark.parametrize("R", [37, 72, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_more_channels_than_lanes(R, dtype):
    """Several turns over the channels of a head, also with windows beyond the halo."""
    host = Host()
    check(host, example(430, 1, 1, R, dtype, high=3), 9, 9)
    assert any("reach" in name for name in host.launched)


def test_far_windows_over_spans():
    """Some reach over 1,024 time steps or more, some spans have none, and there are 33 heads."""
    dout, x, left, right = example(3300, 1, 33, 1)
    left[2100], right[700, 0, ::2], right[3000:3010, 0, 5] = 200, 180, 40
    host = Host()
    check_backward(host.backward, dout, x, left, right, 9, 9)
    assert any("reach" in name for name in host.launched)


@pytest.mark.parametrize("causal", [False, True])
def test_large_windows_of_long_sequences(causal):
    """More chunks than are loaded at a time, and more ends than a block counts in one turn."""
    arguments = example(4400, 1, 1, 2, causal=causal)
    check(Host(), arguments, 3000, 0 if causal else 2000)


@pytest.mark.parametrize(
    "kernel, windows, T, shared_memory",
    [
        ("talk_forward_float32", (31, 31), 700, SHARED_MEMORY),
        ("talk_forward_float32", (200, 0), 700, SHARED_MEMORY),
        ("talk_forward_gather", (300, 100), 3000, SHARED_MEMORY),
        ("talk_forward_gather", (1000, 900), 460, SHARED_MEMORY),
        ("talk_forward_gather", (31, 31), 460, 16 * 1024),
    ],
)
def test_windows_of_all_sizes(kernel, windows, T, shared_memory):
    """The forward kernels, within their reach and (offsets up to 2) beyond."""
    host = Host(shared_memory=shared_memory)
    _, *inputs = example(T, 1, 1, 4, high=2)
    check_forward(host.forward, *inputs, *windows)
    assert any(name.startswith(kernel) for name in host.launched)


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
@pytest.mark.parametrize("T", [40, 300])
def test_the_largest_windows(T, shared_memory):
    check(Host(shared_memory=shared_memory), example(T, 1, 1, 8), 2**31 - 1, 2**31 - 1)


@pytest.mark.parametrize("T", [35, 64, 65, 192, 193, 460])
def test_short_sequences_and_windows_beyond_shared_memory(T):
    host = Host()
    check(host, example(T, 1, 1, 20), 1000, 900)
    assert any("backward_small" in name for name in host.launched) == (T <= 64)
    assert any("walk" in name for name in host.launched) == (T > 192)


@pytest.mark.parametrize("shared_memory", [48 * 1024, SHARED_MEMORY])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_tiles(dtype, shared_memory):
    """Several tiles, and ends beyond the halo of one."""
    host = Host(shared_memory=shared_memory)
    check(host, example(560, 1, 1, 8, dtype, torch.float32, high=3), 9, 12)
    assert any("reach" in name for name in host.launched)


def test_tiles_of_several_heads_and_sentences():
    """Some windows reach beyond the halo, and others do not."""
    dout, x, left, right = example(560, 2, 3, 4)
    left[:, 0, 2], right[:, 1, 0] = 30 * left[:, 0, 2], 30 * right[:, 1, 0]
    host = Host()
    check(host, (dout, x, left, right), 9, 12)
    assert any("reach" in name for name in host.launched)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_far_windows_on_both_sides(dtype):
    """Windows of several heads, from the first tile to the last and back, beside ordinary ones."""
    dout, x, left, right = example(700, 1, 4, 8, dtype, torch.float32)
    left[650:, 0, 1], right[:9, 0, 1], right[3:300:50, 0, 2] = 70, 80.3, 21.7
    left[300::31, 0, 3] *= 20
    host = Host()
    check(host, (dout, x, left, right), 9, 8)
    assert host.launched[1].startswith("talk_reach")


def test_windows_that_end_on_the_first_row_beyond_a_halo():
    """All of them do: of 12 rows on the left in one head, and of 16 on the right in another."""
    dout, x, left, right = example(560, 1, 2, 4)
    left[..., 0], left[..., 1], right[..., 0], right[..., 1] = 12.5 / 9, 0, 0, 16.5 / 12
    host = Host()
    check_backward(host.backward, dout, x, left, right, 9, 12)
    assert host.launched[0].startswith("talk_reach")


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
def test_huge_and_infinite_offsets_reach_the_edges(shared_memory):
    dout, x, left, right = example(300, 1, 3, 4)
    left[::7], right[::5] = 1e30, 3000
    host = Host(shared_memory=shared_memory)
    check(host, (dout, x, left, right), 5, 6)
    finite = host.forward(x, left, right, 5, 6)
    left[::7] = math.inf
    assert torch.equal(finite, host.forward(x, left, right, 5, 6))


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
@pytest.mark.parametrize("value", [-0.25, -math.inf, math.nan])
def test_negative_and_nan_offsets_give_nan(value, shared_memory):
    dout, x, left, right = example(33, 2, 2, 4)
    left[7, 0, 1] = right[0, 1, 0] = right[32, 1, 1] = left[0, 0, 0] = value
    host = Host(shared_memory=shared_memory)
    out = host.forward(x, left, right, 5, 6).view(33, 2, 2, 4)
    bad = (left.isnan() | right.isnan() | (left < 0) | (right < 0)).unsqueeze(-1).expand_as(out)
    assert torch.equal(out.isnan(), bad)
    dx, d_left, d_right = host.backward(dout, x, left, right, 5, 6)
    assert torch.equal(dx.view_as(out).isnan(), bad)
    assert torch.equal(d_left.isnan(), left.isnan() | (left < 0))
    assert torch.equal(d_right.isnan(), right.isnan() | (right < 0))


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_edges_of_the_halves(dtype, shared_memory):
    host = Host(shared_memory=shared_memory)
    check_edges(host.forward, host.backward, dtype)


@pytest.mark.parametrize("shared_memory", [0, 48 * 1024, SHARED_MEMORY])
def test_gradients_of_offsets_where_products_overflow(shared_memory):
    """Two channels of each head whose products, 2^129 and -2^129, are too large for a float."""
    dout, x, *offsets = example(560, 1, 2, 8, torch.bfloat16, torch.float32)
    dout, x = dout * 2.0**60, x * 2.0**60
    for channel, sign in ((0, 1), (1, -1), (8, 1), (9, -1)):
        dout[..., channel], x[..., channel] = sign * 2.0**64, 2.0**65
    check(Host(shared_memory=shared_memory), (dout, x, *offsets), 9, 12)


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
def test_the_least_bfloat16_numbers_are_exact(shared_memory):
    """Although sums hold 2^-16 of them (CuPy's compiler flushes such small numbers to 0)."""
    x = torch.arange(-128, 128).view(128, 1, 2).bfloat16() * 2.0**-133
    offset = torch.ones(128, 1, 1).bfloat16()
    host = Host(shared_memory=shared_memory)
    for max_left in (0, 3):
        out = host.forward(x, offset, None, max_left, 0)
        dx, _, _ = host.backward(x.flip(0), x, offset, None, max_left, 0)
        expected = torch.nn.functional.pad(x.double(), (0, 0, 0, 0, max_left, 0))
        expected = expected.unfold(0, max_left + 1, 1).mean(-1).bfloat16()
        assert torch.equal(out, expected) and torch.equal(dx.flip(0), expected)


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_is_not_finite_is_propagated(value, shared_memory, causal):
    check_spread(Host(shared_memory=shared_memory).forward, value, causal)


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
def test_so_are_gradients(shared_memory):
    check_spread_of_gradients(Host(shared_memory=shared_memory).backward)


@pytest.mark.parametrize("windows", [(31, 31), (1000, 1000)])
def test_error_does_not_grow_with_length(windows):
    _, x, left, right = example(3000, 1, 1, 1)
    x += 1
    out = Host().forward(x, left, right, *windows).double()
    exact = talk_conv(x, left, right, *windows)
    assert ((out - exact).norm() / exact.norm()).item() < 1e-6


def test_errors_of_one_sign_do_not_add_up():
    """Each sum of 0.1 is rounded the same way again and again."""
    dout, x, *offsets = example(6000, 1, 1, 1)
    inputs = (x.fill_(0.1), *offsets, 1000, 1000)
    assert rms_error(Host().forward(*inputs), talk_conv(*inputs)) < 1e-6
    dx = Host().backward(dout.fill_(0.1), *inputs)[0]
    assert rms_error(dx, talk_conv_backward(dout, *inputs)[0]) < 1e-6
    far = torch.zeros(6000, 1, 1)
    far[5900] = 500
    check_forward(Host().forward, x, far, None, 9, 0)


@pytest.mark.parametrize("shared_memory", [0, SHARED_MEMORY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_threads_does_not_matter(dtype, shared_memory):
    dout, *inputs = example(300, 1, 2, 12, dtype, torch.float32, high=1.5)
    results = [
        (host.forward(*inputs, 31, 31), *host.backward(dout, *inputs, 31, 31))
        for host in (Host(seed, shared_memory) for seed in (1, 2, 3))
    ]
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize(
    "T, padded, R, shared_memory",
    [
        (300, 377, 8, 0),
        (300, 377, 8, SHARED_MEMORY),
        (50, 127, 64, SHARED_MEMORY),
        (64, 300, 64, SHARED_MEMORY),
        (200, 300, 16, SHARED_MEMORY),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_sentence_does_not_depend_on_its_batch(dtype, T, padded, R, shared_memory):
    """Alone, or in a batch and behind padding: the same bits."""
    if dtype == torch.float64 and shared_memory == 0:
        pytest.skip("sums over units are no finer than float64, and round")
    rows = slice(1, 2)
    dout, x, left, right = example(T, 3, 2, R, dtype)
    longer = [
        torch.cat((tensor, torch.zeros(padded - T, *tensor.shape[1:], dtype=dtype)))
        for tensor in (dout, x, left, right)
    ]
    host = Host(shared_memory=shared_memory)

    def run(dout, *inputs):
        return host.forward(*inputs, 31, 31), *host.backward(dout, *inputs, 31, 31)

    batch = run(*longer)
    alone = run(*(tensor[:, rows].contiguous() for tensor in (dout, x, left, right)))
    for many, one in zip(batch, alone):
        assert torch.equal(many[:T, rows], one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", [4, 16, 64])
@pytest.mark.parametrize("T", [720, 721, 729, 733])
def test_far_windows_of_the_last_steps(T, R, dtype):
    """Beyond the halo, from steps that a short last tile does not stage."""
    dout, x, left, _ = example(T, 1, 1, R, dtype, torch.float32, causal=True)
    left[-12:] = 5
    check(Host(), (dout, x, left.to(dtype), None), 5, 0)


@pytest.mark.parametrize("shared_memory", [64, 99, 163, 227])  # KiB of sm_75, 86, 80 and 90
@pytest.mark.parametrize("dtype", DTYPES)
def test_plans_keep_within_the_shared_memory(dtype, shared_memory):
    for plan in (cuda_plan.plan_forward, cuda_plan.plan_backward):
        for R, aligned in ((64, True), (16, True), (64, False)):
            for size in range(0, 300, 3):
                for windows in ((size, size), (size, 0)):
                    sizes = (5000, 2, 2 * R, 2, *windows, False)
                    launches = plan(dtype, aligned, shared_memory * 1024, *sizes).launches
                    assert max(launch[3] for launch in launches) <= shared_memory * 1024, sizes


def test_shapes_beyond_a_grid():
    for plan in (cuda_plan.plan_forward, cuda_plan.plan_backward):
        with pytest.raises(ValueError, match=r"x: expected at most [\d,]+ time steps on CUDA"):
            plan(torch.float32, True, SHARED_MEMORY, 2**25, 1, 64, 1, 3, 3, False)
    for plan in (cuda_plan.plan_short_forward, cuda_plan.plan_short_backward):
        with pytest.raises(ValueError, match=r"x: expected at most [\d,]+ time steps on CUDA"):
            plan(torch.float32, True, SHARED_MEMORY, 2**31 - 8, 1, 64, 8, 7)
        plan(torch.float32, True, SHARED_MEMORY, 2**31 - 256, 1, 64, 8, 7)
    with pytest.raises(ValueError, match="x: expected at most 65,535 blocks along a side"):
        cuda_plan.plan_forward(torch.float32, True, SHARED_MEMORY, 1, 1, 2**22, 1, 3, 3, False)
    with pytest.raises(ValueError, match="x: expected less than 4 GiB a time step"):
        cuda_plan.plan_backward(torch.float32, True, SHARED_MEMORY, 9, 2**24, 64, 1, 3, 3, False)


@pytest.mark.parametrize("which", range(2))  # dout, x
def test_misaligned_rows_take_the_scalar_path(which):
    tensors = list(example(33, 1, 2, 8))
    memory = torch.empty(tensors[which].numel() + 1)
    tensors[which] = memory[1:].view_as(tensors[which]).copy_(tensors[which])
    host = Host()
    check(host, tensors, 7, 7)
    narrow = ["narrow" in name for name in host.launched]
    assert narrow == [which == 1, True]  # forward there is no dout


def test_misaligned_steps_take_the_scalar_path():
    x, offset = torch.randn(17)[1:].view(1, 2, 8), torch.rand(1, 2, 2)
    sums, host = torch.empty(6, 2, 8, dtype=torch.float64), Host()
    assert torch.allclose(host.update(x, offset, sums, None, 0, 3), x / 4)
    assert host.launched == ["talk_update_float32_narrow"]


@pytest.mark.parametrize("which", range(2))  # x, weight
def test_misaligned_steps_of_a_short_convolution_take_the_scalar_path(which):
    tensors = [torch.randn(1, 2, 8), torch.randn(3, 8)]
    memory = torch.empty(tensors[which].numel() + 1)
    tensors[which] = memory[1:].view_as(tensors[which]).copy_(tensors[which])
    host = Host()
    out = host.short_update(*tensors, torch.full((3, 2, 8), math.nan), None, 0)
    assert torch.allclose(out, tensors[0] * tensors[1][2])
    assert host.launched == ["talk_short_update_float32_narrow"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 8), (31, 3, 37), (75, 2, 12), (9, 1, 600)])
@pytest.mark.parametrize("K, left", [(1, 0), (2, 0), (3, 1), (7, 3), (8, 7), (11, 5)])
def test_short_convolutions(K, left, shape, dtype):
    x, dout, weight = (torch.randn(*size).to(dtype) for size in (shape, shape, (K, shape[2])))
    host = Host()
    check_short_conv(host.short_conv(x, weight, dout, left), short_conv(x, weight, dout, left))
    wide = shape[2] % (16 // compute_dtype(dtype).itemsize) == 0
    assert sum("wide" in name for name in host.launched) == 2 * wide


@pytest.mark.parametrize("T", [600, 3000])
def test_runs_of_short_convolutions(T):
    """Over many runs, of as many rows as are summed in float32: in any order of the threads."""
    x, dout, weight = torch.randn(T, 50, 4) + 1, torch.randn(T, 50, 4), torch.randn(8, 4)
    first = Host(1).short_conv(x, weight, dout, 3)
    assert all(map(torch.equal, first, Host(2).short_conv(x, weight, dout, 3)))
    check_short_conv(first, short_conv(x, weight, dout, 3))
    x, dout = torch.ones_like(x), torch.full_like(dout, 0.1)  # rounded the same way every time
    check_short_conv(Host().short_conv(x, weight, dout, 3), short_conv(x, weight, dout, 3))


@pytest.mark.parametrize("which", range(3))
def test_misaligned_short_convolutions_take_the_scalar_path(which):
    tensors = [torch.randn(33, 1, 8), torch.randn(3, 8), torch.randn(33, 1, 8)]  # x, weight, dout
    memory = torch.empty(tensors[which].numel() + 1)
    tensors[which] = memory[1:].view_as(tensors[which]).copy_(tensors[which])
    host = Host()
    check_short_conv(host.short_conv(*tensors, 1), short_conv(*tensors, 1))
    narrow = [name for name in host.launched if "narrow" in name]
    assert len(narrow) == (1 if which == 2 else 2)  # forward there is no dout

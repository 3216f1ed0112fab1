"""What only a GPU can show: streams, graphs, devices, memory, sizes beyond 2^31 elements.

That the kernels are right on a GPU is in test_operator.py, test_decoding.py and test_short_conv.py,
with the other backends. Under compute-sanitizer, one tool at a time:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m pytest tests/ops/test_operator.py -k 'cuda and oracle'

and likewise with ``--tool racecheck``. These tests fill fresh memory, which hides reads of memory
that nobody wrote: run ``--tool initcheck``, and the others, on ``tests/ops/test_cuda.py -k every``.
Initcheck then reports PyTorch's gather alone, which copies the rows of a ring that no step has
written yet; none is read.
"""

import statistics
import subprocess
import sys

import pytest
import torch
from test_operator import arguments, gradients

import oracle
from conftest import ROOT, alone
from talk_fairseq import TaLKConvState, talk_conv, talk_conv_update
from talk_fairseq.ops.short_conv import short_conv_update
from talk_fairseq.ops.state import ShortConvState, reorder_rings

pytestmark = pytest.mark.cuda


def on_gpu(*values, device="cuda"):
    return tuple(v.to(device) if torch.is_tensor(v) else v for v in values)


def hold(got, expected):
    """Hold results on the GPU to those on the CPU, of the same type."""
    for actual, want in zip(got, expected, strict=True):
        bound = 2 * oracle.GRADIENT_FACTOR * oracle.TOLERANCE[actual.dtype]
        assert oracle.worst_error(actual, want.double()) <= bound


@pytest.mark.parametrize("dtype", list(oracle.TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "T, B, H, R, window",
    [
        (1, 1, 1, 1, (3, 3)),
        (70, 2, 3, 5, (31, 31)),
        (70, 2, 3, 8, (31, 0)),
        (300, 1, 2, 64, (15, 7)),
        (500, 2, 2, 16, (400, 0)),
        (700, 1, 2, 8, (600, 600)),
    ],
)
def test_every_kernel_of_training(T, B, H, R, window, dtype):
    """In seconds under compute-sanitizer; nothing fills the memory."""
    args = arguments(T, B, H * R, H, *window, dtype)
    expected = talk_conv(*args), *gradients(talk_conv, args[0], *args)
    args = on_gpu(*args)
    got = talk_conv(*args), *gradients(talk_conv, args[0], *args)
    hold(*([x for x in results if x is not None] for results in (got, expected)))


@pytest.mark.parametrize("dtype", list(oracle.TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "B, H, R, max_left, K", [(2, 3, 5, 7, 3), (5, 4, 16, 31, 8), (4, 1, 300, 9, 4)]
)
def test_every_kernel_of_decoding(B, H, R, max_left, K, dtype):
    """In seconds under compute-sanitizer; nothing fills the memory."""
    x, offset, *_ = arguments(24, B, H * R, H, max_left, 0, dtype)
    weight = torch.randn(K, H * R).to(dtype)

    @torch.no_grad()
    def decode(x, offset, weight):
        state = TaLKConvState(B, H * R, 2 * max_left, dtype, x.device)  # some offsets exceed 1
        short = ShortConvState(B, H * R, K, dtype, x.device)
        results = []
        for first, last in [*((t, t + 1) for t in range(18)), (18, 22), (22, 23), (23, 24)]:
            new = x[first:last]
            results.append(talk_conv_update(new, offset[first:last], state, max_left))
            results.append(short_conv_update(new, weight, short))
            if first in (9, 16):
                reorder_rings([state, short], torch.arange(B, device=x.device).flip(0))
        return results

    hold(decode(*on_gpu(x, offset, weight)), decode(x, offset, weight))


@pytest.mark.parametrize("dtype", list(oracle.TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [(31, 31), (5000, 0)], ids=str)
def test_same_bits_in_100_runs(dtype, window):
    args = on_gpu(*arguments(2000, 3, 128, 4, *window, dtype))
    dout = torch.randn_like(args[0])
    first = [talk_conv(*args), *gradients(talk_conv, dout, *args)[: 3 if window[1] else 2]]
    for _ in range(100):
        again = [talk_conv(*args), *gradients(talk_conv, dout, *args)[: 3 if window[1] else 2]]
        assert all(map(torch.equal, again, first))


def test_on_a_stream_of_its_own():
    """The launch follows the current stream: it waits for what that stream does before."""
    x, *rest = on_gpu(*arguments(500, 2, 64, 4, 31, 31))
    expected = talk_conv(x * 2, *rest)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(100_000_000)
        late.copy_(x * 2)
        out = talk_conv(late, *rest)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_device_that_is_not_current():
    """Nor in the thread of autograd that belongs to it."""
    args = arguments(100, 2, 64, 4, 31, 31)

    def results(device):
        there = on_gpu(*args, device=device)
        return talk_conv(*there), *gradients(talk_conv, there[0], *there)

    for first, second in zip(results("cuda:0"), results("cuda:1")):
        assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("window", [(31, 31), (5000, 0)], ids=str)
def test_graph_capture(window):
    x, left, right, *window = on_gpu(*arguments(300, 2, 64, 4, *window))
    inputs = [t.clone().requires_grad_() for t in (x, left, right) if t is not None]

    def step():
        out = talk_conv(inputs[0], inputs[1], inputs[2] if len(inputs) == 3 else None, *window)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        inputs[0].add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


def test_graph_capture_of_a_step_of_decoding_is_refused():
    x, offset = torch.randn(1, 2, 8, device="cuda"), torch.rand(1, 2, 2, device="cuda")
    state = TaLKConvState(2, 8, 5, device="cuda")
    talk_conv_update(x, offset, state, 5)
    with pytest.raises(RuntimeError, match="state: expected no capture of a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            talk_conv_update(x, offset, state, 5)


CAPTURE = """
import torch
from talk_fairseq import talk_conv

x, offsets = torch.randn(1000, 10, 1024, device="cuda"), torch.rand(2, 1000, 10, 16, device="cuda")
inputs = [tensor.requires_grad_() for tensor in (x, *offsets)]

def step():
    out = talk_conv(*inputs, 31, 31)
    return out, *torch.autograd.grad(out.sum(), inputs)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
graph.replay()
assert all(map(torch.equal, captured, step()))
"""


def test_graph_capture_of_the_first_call():
    """In a process where nothing is compiled yet."""
    subprocess.run([sys.executable, "-c", CAPTURE], cwd=ROOT, check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_takes_no_memory_but_its_output(dtype):
    args = on_gpu(*arguments(1000, 10, 1024, 16, 31, 31, dtype))
    talk_conv(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = talk_conv(*args)
    used = torch.cuda.max_memory_allocated() - before
    held = sum(t.numel() * t.element_size() for t in (*args[:3], out))
    inputs = held - out.numel() * out.element_size()
    assert inputs + used <= 1.05 * held


def test_more_than_2_to_the_31_elements():
    """Rows beyond element 2^31, and their gradients, are those of the same rows alone."""
    T, C, tail, window = 2**21 + 300, 1024, 200, 31
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * T * C * 2:
        pytest.skip("too little memory")
    x = torch.randn(1, 1, C, device="cuda", dtype=torch.bfloat16).expand(T, 1, C).contiguous()
    within_reach = slice(T - tail - window, None)
    x[within_reach] = torch.randn(tail + window, 1, C, device="cuda", dtype=torch.bfloat16)
    offsets = torch.rand(2, T, 1, 16, device="cuda")

    def results(rows):
        args = x[rows], *offsets[:, rows], window, window
        found = talk_conv(*args), *gradients(talk_conv, x[rows], *args)
        return [tensor[-tail:].clone() for tensor in found]

    # Their tiles begin elsewhere, so their sums may round otherwise: to the next bfloat16.
    for beyond, few in zip(results(slice(None)), results(within_reach)):
        torch.testing.assert_close(beyond, few, rtol=2**-7, atol=1e-5)


@pytest.mark.skipif(not alone(), reason="other tests share the GPU: give -n 0")
def test_time_hardly_grows_with_the_window():
    """At T = 100,000, windows of 1,000 and 100,000 take up to 4 times as long as those of 10.

    What shared memory does not hold moves twice the bytes: 16 for an element, and 8. An H100 takes
    0.32 ms, and up to 0.91.
    """
    T, milliseconds = 100_000, []
    x = torch.randn(T, 1, 1024, device="cuda")
    offset = torch.rand(T, 1, 16, device="cuda")
    for max_left in (10, 1000, 100_000):
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            talk_conv(x, offset, None, max_left, 0)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        milliseconds.append(statistics.median(times[2:]))
    assert max(milliseconds) <= 4 * min(milliseconds), milliseconds

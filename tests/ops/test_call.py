"""What a call costs on the host, and what importing the package loads."""

import collections
import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test_operator import arguments

from conftest import ROOT, alone
from talk_fairseq import TaLKConvState, talk_conv, talk_conv_update
from talk_fairseq.ops import cuda_backend, dispatch

# ------------------------------------------------------------------------------------- host time


@pytest.fixture
def launches(monkeypatch):
    """The CUDA backend computes tensors on the CPU, with a CuPy that launches nothing.

    Gives the last launches of all, and the devices whose contexts were made current.
    """

    class Modules(dict):
        def __missing__(self, key):
            kernel = SimpleNamespace(ptr=1)
            return SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=kernel))

    launched, contexts = collections.deque(maxlen=8), []
    device = contextlib.nullcontext()
    device.attributes = {"MaxSharedMemoryPerBlockOptin": 227 * 1024}
    cuda = SimpleNamespace(
        Device=lambda index: device,
        driver=SimpleNamespace(launchKernel=lambda *launch: launched.append(launch)),
        runtime=SimpleNamespace(setDevice=contexts.append),
    )
    monkeypatch.setattr(dispatch, "cpu_backend", cuda_backend)
    monkeypatch.setattr(cuda_backend, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_backend, "_check_cupy", lambda: None)
    monkeypatch.setattr(cuda_backend, "_MODULES", Modules())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as `get_device` of a CPU's
    streams = lambda index: 0  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams, raising=False)
    cuda_backend._gpu.cache_clear()
    yield launched, contexts
    cuda_backend._gpu.cache_clear()


SIZES = "Tensor x, Tensor offset_left, Tensor? offset_right, SymInt max_left, SymInt max_right"


@pytest.fixture(scope="module")
def cheapest():
    """An operator of the same arguments that is registered in the same way: a torch Library, and an
    autograd.Function at its key. It allocates its results, and that is all.
    """
    library = torch.library.Library("talk_conv_cheapest", "DEF")
    ops = torch.ops.talk_conv_cheapest

    class Cheapest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            *tensors, ctx.max_left, ctx.max_right = inputs
            ctx.save_for_backward(*tensors)
            with torch._C._AutoDispatchBelowAutograd():
                return ops.forward(*inputs)

        @staticmethod
        def backward(ctx, dout):
            sizes = ctx.max_left, ctx.max_right
            return *ops.backward(dout, *ctx.saved_tensors, *sizes), None, None

    library.define(f"forward({SIZES}) -> Tensor")
    library.define(f"backward(Tensor dout, {SIZES}) -> (Tensor, Tensor, Tensor)")
    library.impl("forward", lambda x, *_: torch.empty_like(x), "CPU")
    library.impl("backward", lambda dout, *inputs: tuple(map(torch.empty_like, inputs[:3])), "CPU")
    library.impl("forward", Cheapest.apply, "Autograd")
    yield ops.forward
    library._destroy()


def without_gradients(function, dout, *args):
    return function(*args)


def with_gradients(function, dout, x, offset_left, offset_right, *windows):
    return function(*(t.requires_grad_() for t in (x, offset_left, offset_right)), *windows)


def both_passes(function, dout, *args):
    inputs = args[:3]
    return torch.autograd.grad(with_gradients(function, dout, *args), inputs, dout)


def microseconds(*calls, rounds=300, repeats=10):
    """The best of `rounds` of each, taken in turn: many short ones, so that some go undisturbed."""
    times = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            taken.append((time.perf_counter() - start) / repeats * 1e6)
    return [min(taken) for taken in times]


@pytest.mark.parametrize(
    "call, most, ratio",
    [(without_gradients, 25, 1.5), (with_gradients, 40, 1.6), (both_passes, 100, 1.6)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_host_time_of_a_call(launches, cheapest, figure, call, most, ratio):
    """The bounds are those of an idle machine; beside other tests, caches are shared."""
    args = arguments(10, 10, 64, 4, 31, 31)
    dout = torch.ones_like(args[0])
    calls = [lambda op=op: call(op, dout, *args) for op in (talk_conv, cheapest)]
    microseconds(*calls, rounds=2)
    assert launches[0]
    ours, least = microseconds(*calls)
    name = call.__name__.replace("_", " ")
    figure(f"host time of a call {name}: {ours:.1f} us, {ours / least:.2f} of the least operator's")
    assert ours <= (ratio if alone() else 1.5 * ratio) * least
    if alone():
        assert ours <= most


@torch.no_grad()
@pytest.mark.parametrize("function, most, ratio", [("talk_conv", 40, 3), ("update", 25, 1.5)])
def test_time_of_a_small_call_on_the_cpu(cheapest, figure, function, most, ratio):
    """One step of one sequence, for which the kernel takes next to no time."""
    x, left, _, *windows = args = arguments(1, 1, 64, 4, 31, 0)
    state = TaLKConvState(1, 64, 31)
    small = {
        "talk_conv": lambda: talk_conv(*args),
        "update": lambda: talk_conv_update(x, left, state, 31),
    }
    call = small[function]
    microseconds(call, rounds=2)
    ours, least = microseconds(call, lambda: cheapest(*args))
    figure(f"{function} of one step on the CPU: {ours:.1f} us, {ours / least:.2f} of the least's")
    assert ours <= (ratio if alone() else 1.5 * ratio) * least
    if alone():
        assert ours <= most


# -------------------------------------------------------------------------------- launches on CUDA


def test_a_new_thread_gets_a_context(launches):
    """Once: what launches a kernel does not make one, and PyTorch may have made none yet."""
    args = arguments(10, 2, 8, 2, 3, 3)

    def work():
        talk_conv(*args)
        talk_conv(*args)

    _, contexts = launches
    for _ in range(2):
        before = len(contexts)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert len(contexts) == before + 1


def test_threads_do_not_share_what_they_launch():
    """A call of the same sizes, made while another fills in or launches, has its own argument."""
    first, second = (arguments(10, 2, 8, 2, 3, 3, seed=seed) for seed in (0, 1))
    waiting, launched = [], []

    class Device:
        shared_memory = 227 * 1024

        def launcher(self, *sizes):
            def launch(parameters):
                if waiting:
                    thread = threading.Thread(target=call, args=waiting.pop())
                    thread.start()
                    thread.join()
                argument = ctypes.c_void_p.from_address(parameters).value
                struct = cuda_backend._ARGUMENTS["talk_conv.cu"]
                launched.append(struct.from_address(argument).x)

            return launch

    call = functools.partial(cuda_backend.forward_with, Device())
    call(*first)  # which leaves an argument to the next
    waiting.append(second)
    call(*first)
    assert launched[1:] == [second[0].data_ptr(), first[0].data_ptr()]


# --------------------------------------------------------------------------------------- imports


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_without_fairseq_and_cupy():
    """Numba is imported at the first call."""
    run("""
        import sys, torch
        sys.modules["fairseq"] = sys.modules["cupy"] = None
        from talk_fairseq import TaLKConv, TaLKConvState, talk_conv, talk_conv_update
        from talk_fairseq import talk_conv_reference
        assert "numba" not in sys.modules
        x, offset = torch.randn(5, 2, 4), torch.rand(5, 2, 2)
        out = talk_conv(x, offset, offset, 3, 3)
        assert "numba" in sys.modules
        assert torch.allclose(out, talk_conv_reference(x, offset, offset, 3, 3), atol=1e-6)
        assert TaLKConv(4, 2, 3, 3)(x).shape == x.shape
    """)


def test_without_numba():
    """Everything but the CPU backend works, which says what to do."""
    run("""
        import os, sys, torch
        sys.modules["fairseq"] = sys.modules["numba"] = None
        from talk_fairseq import TaLKConvState, talk_conv, talk_conv_update
        from talk_fairseq.ops.short_conv import short_conv
        x, offset = torch.randn(5, 2, 4), torch.rand(5, 2, 2)
        state, weight = TaLKConvState(2, 4, 3), torch.randn(3, 4)
        calls = [
            lambda: talk_conv(x, offset, offset, 3, 3),
            lambda: talk_conv_update(x, offset, state, 3),
            lambda: short_conv(x, weight, 1),
        ]
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                assert "pip install numba" in str(error), error
                assert "TALK_CONV_BACKEND=reference" in str(error), error
            else:
                raise AssertionError("no error")
        os.environ["TALK_CONV_BACKEND"] = "reference"
        for call in calls:
            assert call().shape == x.shape
    """)


NAMESAKE = """
import importlib.machinery, importlib.util, sys

find = importlib.util.find_spec
namesake = importlib.machinery.ModuleSpec("fairseq", None, is_package=True)
importlib.util.find_spec = lambda name, *more: namesake if name == "fairseq" else find(name, *more)
import talk_fairseq

assert "talk_fairseq.compat" not in sys.modules
"""


def test_a_folder_called_fairseq_is_no_fairseq():
    """As where Python is started beside a clone of it: the operator works."""
    subprocess.run([sys.executable, "-W", "error", "-c", NAMESAKE], cwd=ROOT, check=True)


def test_a_broken_fairseq_costs_the_plugin_alone(tmp_path):
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq/__init__.py").write_text("raise RuntimeError('broken')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import talk_fairseq; talk_fairseq.TaLKConv(4, 2, 3)"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "its plugin is off: RuntimeError('broken')" in done.stderr

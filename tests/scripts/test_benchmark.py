"""scripts/benchmark_talk_conv.py: what it prints and writes, and that its peers are the peers."""

import contextlib
import gc
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from conftest import ROOT, alone

SCRIPT = ROOT / "scripts/benchmark_talk_conv.py"
SDPA = "scaled_dot_product_attention"
MODES = ["forward", "forward+backward", "backward"]
TINY = (
    "--cpu --lengths 5 --dtypes float32 --batch 2 --channels 32 --heads 4 --turns 2 --output"
).split()


@pytest.fixture(scope="module")
def benchmark():
    from pipeline.benchmarks import operator

    return operator


@pytest.fixture
def case(benchmark):
    torch.manual_seed(0)
    return benchmark.Case(20, 3, 24, 4, torch.float32, "cpu")


@pytest.fixture
def measured(benchmark, case, tmp_path):
    """``measured(limit)`` gives the rows of the case, forward."""

    def measured(limit):
        args = SimpleNamespace(only=[""], limit=limit, turns=3, device="cpu", output=tmp_path / "x")
        report = benchmark.harness.Report(args, "TaLK")
        benchmark.measure(case, "forward", args, report)
        return report.cells[0]["results"]

    return measured


WITH_TORCH_ALONE = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
for name in ("matplotlib", "tqdm", "fairseq"):
    sys.modules[name] = None
import pipeline.benchmarks.gpu_report
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_table_and_json(tmp_path):
    """Without matplotlib and fairseq, as on a machine for scripts/gpu_report.sh."""
    command = [sys.executable, "-c", WITH_TORCH_ALONE, SCRIPT, *TINY, tmp_path / "talk"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    assert "talk_conv is right in float32" in printed and "TaLK, CUDA graph" in printed
    record = json.loads((tmp_path / "talk.json").read_text())
    assert [cell["mode"] for cell in record["cells"]] == MODES
    for cell in record["cells"]:
        assert f"T 5, dtype float32, mode {cell['mode']}" in printed
        for name, row in cell["results"].items():
            if name == "TaLK, CUDA graph":
                assert row == {"error": "needs a GPU"}
            else:
                assert row["seconds"] > 0 and row["memory"] >= 0 and f"| {name} " in printed
        if cell["mode"] == "backward":
            assert all(name == "copy" or name.startswith("TaLK") for name in cell["results"])


def test_bad_options(benchmark, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--channels", "32", "--heads", "3"])
    message = "benchmark_talk_conv.py: --heads: expected a divisor of 32 channels, got 3"
    assert capsys.readouterr().err.startswith(message)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--output: expected a path to write to, got .*file"):
        benchmark.main([*TINY, str(tmp_path / "file/talk")])


def test_bandwidth_is_of_what_has_to_move(benchmark):
    case = benchmark.Case(5, 2, 32, 4, torch.bfloat16, "cpu")
    x, offset = 2 * 5 * 2 * 32, 2 * 5 * 2 * 4
    forward = x + 2 * offset + x
    backward = x + x + 2 * offset + x + 2 * offset  # dout, x, the offsets; their gradients
    assert [case.moves("TaLK", mode) for mode in MODES] == [forward, forward + backward, backward]
    assert {case.moves("copy", mode) for mode in MODES} == {2 * x}
    assert case.moves("self-attention", "forward") is None


def test_numbers(benchmark, case, measured, monkeypatch):
    """A copy takes a second and TaLK two."""
    step = {"copy": 1.0, "TaLK": 2.0, SDPA: 16.0}
    monkeypatch.setattr(benchmark, "PEERS", {name: benchmark.PEERS[name] for name in step})
    monkeypatch.setattr(benchmark, "runner", lambda name, *others: (name, 0))
    monkeypatch.setattr(benchmark, "seconds_of", lambda name, count: step[name])
    results = measured(1e9)
    assert [row["speed_up"] for row in results.values()] == [0.5, 1, 8]
    assert results["copy"]["of_a_copy"] == 1 and "of_a_copy" not in results[SDPA]
    moved = [case.moves(name, "forward") for name in ("copy", "TaLK")]
    assert results["TaLK"]["of_a_copy"] == pytest.approx(moved[1] / 2 / moved[0])


def test_an_interrupted_run_loses_no_other_cell(benchmark, tmp_path, monkeypatch):
    measure = benchmark.measure

    def interrupted(case, mode, *others):
        if (case.T, mode) == (40, "forward"):
            raise KeyboardInterrupt
        return measure(case, mode, *others)

    monkeypatch.setattr(benchmark, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*TINY, str(tmp_path / "talk"), "--lengths", "5,40", "--only", "k=3,|k=31,"])
    cells = json.loads((tmp_path / "talk.json").read_text())["cells"]
    assert [(cell["T"], cell["mode"]) for cell in cells] == [(5, mode) for mode in MODES]
    chosen = {name for name in benchmark.PEERS if name in ("copy", "TaLK") or "k=" in name}
    assert set(cells[0]["results"]) == {*chosen} - {"depthwise conv1d k=31"}


def test_an_interrupted_run_shows_no_traceback(benchmark, monkeypatch):
    from run import run

    monkeypatch.setattr(benchmark, "main", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        run("benchmarks.operator")


def test_a_peer_that_fails_in_a_turn_is_dropped(benchmark, case, measured, monkeypatch):
    calls = []

    def function(x):
        calls.append(len(calls))
        if len(calls) > 4:  # to warm up, for its memory, once to count, and in the first turn
            raise RuntimeError("an illegal memory access\nand more lines")
        return x + 1

    def huge(case):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(benchmark, "PEERS", {
        "fails": (lambda case: (function, (case.x,)), 1), "huge": (huge, 1), **{
            name: benchmark.PEERS[name] for name in ("copy", "TaLK")
        },
    })  # fmt: skip
    monkeypatch.setattr(benchmark, "seconds_of", lambda step, count: step() is None or 0.06)
    results = measured(5)
    assert results["fails"] == {"error": "an illegal memory access"} and len(calls) == 5
    assert results["huge"] == {"error": "out of memory"}
    assert results["copy"]["seconds"] == results["TaLK"]["seconds"] == 0.06


def test_nothing_is_compared_with_what_failed_later(benchmark):
    results = {name: {"turns": [1.0], "bytes": 8} for name in ("copy", "TaLK", "peer")}
    benchmark.harness.summarise(results, "TaLK", {})
    assert results["peer"]["speed_up"] == results["peer"]["of_a_copy"] == 1
    results |= {"copy": {"error": "out of memory"}, "TaLK": {"error": "out of memory"}}
    benchmark.harness.summarise(results, "TaLK", {})
    assert not {"speed_up", "of_a_copy"} & {*results["peer"]}


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_keeps_its_inputs(benchmark, case, monkeypatch, mode):
    """CUDA, played: a replay reads the addresses of the capture, which must still be its own."""
    inputs = []

    def function(x):
        inputs.append(weakref.ref(x))
        return x * 2

    stream = SimpleNamespace(wait_stream=lambda other: None)
    played = {
        "Stream": lambda: stream,
        "current_stream": lambda: None,
        "CUDAGraph": type("Graph", (), {"replay": lambda self: None}),
        "stream": contextlib.nullcontext,
        "graph": lambda graph, stream: contextlib.nullcontext(),
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(benchmark, "peak_memory", lambda capture, device: capture() or 7)
    replay, memory = benchmark.runner(benchmark.GRAPH, function, (case.x,), mode, "cuda")
    gc.collect()
    assert inputs[-1]() is not None and memory == 7  # that of the capture
    del replay
    gc.collect()
    assert inputs[-1]() is None


@pytest.mark.long
@pytest.mark.slow
def test_faster_than_attention(tmp_path):
    """At T=1000, B=10, C=1024, H=16 in float32 on a CPU, in one process: the project's goals."""
    command = [sys.executable, SCRIPT, "--cpu", "--lengths", "1000", "--dtypes", "float32"]
    command += ["--turns", "3", "--only", "attention", "--output", tmp_path / "talk"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record = json.loads((tmp_path / "talk.json").read_text())
    forward, both, _ = (cell["results"] for cell in record["cells"])
    assert forward[SDPA]["speed_up"] >= (12 if alone() else 4), printed
    assert forward["copy"]["speed_up"] >= (1 / 1.5 if alone() else 1 / 4.5), printed
    assert both[SDPA]["speed_up"] >= (12 if alone() else 4), printed


def test_peers_that_are_not_there(benchmark, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse(["--only", "graph|Talk"])
    assert "--only: expected parts of copy | TaLK | " in capsys.readouterr().err


def test_it_refuses_to_measure_a_wrong_operator(benchmark, monkeypatch):
    right = benchmark.talk_conv
    monkeypatch.setattr(benchmark, "talk_conv", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(SystemExit, match="talk_conv is wrong in float32"):
        benchmark.check(["float32"], "cpu")


def test_memory_that_only_caches_files_is_free(benchmark, case, monkeypatch):
    monkeypatch.setattr(benchmark.harness, "linux_bytes", lambda file, field: 1000)
    case.needs(175)  # of 4 bytes each
    with pytest.raises(benchmark.Unavailable):
        case.needs(176)


def test_what_is_too_large_or_too_slow_says_so(benchmark):
    huge = benchmark.Case(2, 10, 1024, 16, torch.float32, "cpu")
    huge.T = 1_000_000
    with pytest.raises(benchmark.Unavailable, match="out of memory: needs .* GiB"):
        benchmark.self_attention(huge)


def test_the_published_method_is_the_same_operator(benchmark, case):
    function, inputs = benchmark.published_method(case)
    ours, _ = benchmark.talk(case)
    assert torch.allclose(function(*inputs), ours(*inputs), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "T"), [(torch.bfloat16, 1003), (torch.bfloat16, 1007), (torch.float16, 2051)]
)
def test_the_published_method_stays_in_bounds_where_its_positions_round_up(benchmark, dtype, T):
    case = benchmark.Case(T, 1, 2, 1, dtype, "cpu")
    case.offset_left[-1] = 0  # its left end is 1006 of 1007 rows, which bfloat16 has at 1008
    function, inputs = benchmark.published_method(case)
    assert function(*inputs).shape == (T, 1, 2)


class Given(torch.nn.Module):
    """In place of the Linear that would predict the kernels."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.out_features = kernels, kernels.shape[-1]

    def forward(self, _):
        return self.kernels


@pytest.mark.parametrize("K", [3, 31])
def test_peers_are_fairseqs_own(benchmark, case, K):
    """The same outputs as fairseq's modules, with their kernels given instead of predicted."""
    pytest.importorskip("fairseq")
    from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
    from fairseq.modules.lightweight_convolution import LightweightConv1dTBC

    sizes = dict(kernel_size=K, padding_l=K // 2, num_heads=case.H, weight_softmax=True)
    module = DynamicConv1dTBC(case.C, **sizes)
    for build, unfolded in (
        (benchmark.dynamic_conv_unfolded, True),
        (benchmark.dynamic_conv_band, False),
    ):
        function, (x, kernels) = build(case, K)
        module.weight_linear = Given(kernels.flatten(2))
        assert torch.allclose(function(x, kernels), module(x, unfold=unfolded), atol=1e-5)

    function, (x, kernels) = benchmark.light_conv_unfolded(case, K)
    module = LightweightConv1dTBC(case.C, **sizes)
    module.weight.data = kernels[:, None]
    assert torch.allclose(function(x, kernels), module(x, unfold=True), atol=1e-5)


def test_a_wrong_gradient_or_step_is_not_measured(benchmark, monkeypatch):
    right, step = benchmark.talk_conv, benchmark.talk_conv_update

    def steep(x, *others):
        return right(1.001 * x - 0.001 * x.detach(), *others)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="wrong in float32"):
        patch.setattr(benchmark, "talk_conv", steep)
        benchmark.check(["float32"], "cpu")
    monkeypatch.setattr(benchmark, "talk_conv_update", lambda *given: 1.001 * step(*given))
    with pytest.raises(SystemExit, match="wrong in float32"):
        benchmark.check(["float32"], "cpu")


def test_seconds_are_those_of_one_iteration(benchmark, monkeypatch):
    calls = []
    monkeypatch.setattr(benchmark.harness, "timed", lambda step: (step(), 8.0)[1])
    assert benchmark.seconds_of(lambda: calls.append(1), 4) == 2 and len(calls) == 4


@pytest.mark.parametrize("mode, forward", zip(MODES, (3, 3, 0)))
def test_what_an_iteration_does(benchmark, case, mode, forward):
    passes, backwards = [], []

    def function(x):
        passes.append(x)
        out = 2 * x
        if out.requires_grad:
            out.register_hook(lambda gradient: backwards.append(gradient))
        return out

    step = benchmark.iteration(function, (case.x,), mode)
    passes.clear()
    for _ in range(3):
        step()
    assert len(passes) == forward and len(backwards) == (0 if mode == "forward" else 3)


def test_windows_are_those_in_the_names(benchmark, case):
    for name, window in (("TaLK", 31), ("TaLK, windows of 3", 3), ("TaLK, windows of 1,000", 1000)):
        function, inputs = benchmark.PEERS[name][0](case)
        expected = benchmark.talk_conv(*inputs, window, window)
        assert torch.equal(function(*inputs), expected), name


def test_time_is_predicted_from_a_shorter_length(benchmark):
    cell = {"T": 100, "dtype": "float32", "mode": "forward"}
    results = {"copy": {"seconds": 1}, "self-attention": {"seconds": 1}}
    cells = [cell | {"T": 10, "results": results}]
    assert benchmark.predicted("copy", cell, cells) == 10
    assert benchmark.predicted("self-attention", cell, cells) == 100
    assert benchmark.predicted("self-attention", cell | {"mode": "backward"}, cells) == 0

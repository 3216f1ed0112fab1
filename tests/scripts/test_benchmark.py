"""scripts/benchmark_talk_conv.py: what it prints and writes, and that its peers are the peers."""

import contextlib
import gc
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, alone, one_space

SCRIPT = ROOT / "scripts/benchmark_talk_conv.py"
MODES = ["forward", "forward+backward", "backward"]
TINY = (
    "--cpu --lengths 5,40 --dtypes float32 --batch 2 --channels 32 --heads 4 --turns 2 --output"
).split()


@pytest.fixture(scope="module")
def program():
    from pipeline.benchmarks import operator

    return operator


@pytest.fixture(scope="module")
def benchmark():
    from pipeline.benchmarks import operator_speed

    return operator_speed


@pytest.fixture(scope="module")
def peers():
    from pipeline.benchmarks import peers

    return peers


@pytest.fixture
def case(peers):
    torch.manual_seed(0)
    return peers.Case(20, 3, 24, 4, torch.float32, "cpu")


def test_table_json_and_plot(tmp_path):
    command = [sys.executable, SCRIPT, *TINY, tmp_path / "talk"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "talk_conv is right in float32" in printed and "TaLK, CUDA graph" in printed
    record = json.loads((tmp_path / "talk.json").read_text())
    assert [(cell["T"], cell["mode"]) for cell in record["cells"]] == [
        (T, mode) for T in (5, 40) for mode in MODES
    ]
    for cell in record["cells"]:
        for name, row in cell["results"].items():
            if name in ("TaLK, CUDA graph", "causal_conv1d k=4"):
                assert row["error"] in ("needs a GPU", "not installed")
            else:
                assert row["seconds"] > 0 and row["memory"] >= 0
        if cell["mode"] == "backward":
            assert list(cell["results"]) == ["copy", "TaLK", "TaLK, CUDA graph"]
    assert (tmp_path / "talk.png").read_bytes().startswith(b"\x89PNG")


def test_bandwidth_is_of_what_has_to_move(program, peers, capsys):
    case = peers.Case(5, 2, 32, 4, torch.bfloat16, "cpu")
    x, offset = 2 * 5 * 2 * 32, 2 * 5 * 2 * 4
    forward = x + 2 * offset + x
    backward = x + x + 2 * offset + x + 2 * offset  # dout, x, the offsets; their gradients
    assert [case.moves("TaLK", mode) for mode in MODES] == [forward, forward + backward, backward]
    assert {case.moves("copy", mode) for mode in MODES} == {2 * x}
    assert case.moves("self-attention", "forward") is None
    results = {
        "copy": {"seconds": 1e-3, "memory": 0, "bytes": 2_000_000},
        "TaLK": {"seconds": 2e-3, "memory": 0, "bytes": 3_000_000},
        "self-attention": {"seconds": 8e-3, "memory": 0},
    }
    program.print_results("title", results)
    assert "500.0 1.0x 1.5 75%" in one_space(capsys.readouterr().out)
    program.print_results("title", {**results, "TaLK": {"error": "out of memory"}})
    printed = one_space(capsys.readouterr().out)
    assert "1,000.0 2.0 100%" in printed and "TaLK out of memory" in printed


def test_goals(benchmark, program, capsys):
    """On a GPU, played: one met, one just missed, one whose peer failed, one not measured."""

    def row(seconds, size=None, memory=0):
        return {"seconds": seconds, "memory": memory} | ({"bytes": size} if size else {})

    copy, talk = row(1e-3, 2000), row(1.25e-3, 2100, 1210)
    results = {"copy": copy, "TaLK": talk, benchmark.SDPA: {"error": "out of memory"}}
    cell = {"T": 10_000, "dtype": "bfloat16", "mode": "forward", "results": results}
    goals = benchmark.goals_of([cell], "cuda")
    start = "T=10,000, bfloat16, forward: at "
    assert [(goal["goal"].removeprefix(start), goal["met"], goal["value"]) for goal in goals] == [
        ("least 0.85 of a copy's bandwidth", False, pytest.approx(0.84)),
        ("least 70 times attention", None, None),
        ("most 1.05 of x, offsets and output at the peak", False, pytest.approx(1.1)),
    ]
    program.print_goals(goals)
    printed = capsys.readouterr().out
    assert "0 of 2 goals are met:" in printed and "MISSED              0.840" in printed
    assert "not measured out of memory" in printed

    talk |= row(1e-3, 2100, 1000)
    results[benchmark.SDPA] = row(70e-3)
    goals = benchmark.goals_of([cell], "cuda")
    assert [goal["value"] for goal in goals] == pytest.approx([1.05, 70, 1])
    assert all(goal["met"] for goal in goals)
    del results["copy"]
    assert [goal.get("error") for goal in benchmark.goals_of([cell], "cuda")] == [
        "left out", None, "left out",
    ]  # fmt: skip
    cell |= {"T": 100, "results": {"TaLK": talk, benchmark.GRAPH: row(9e-6)}}
    goals = benchmark.goals_of([cell], "cuda")
    assert [goal["value"] for goal in goals] == [None, pytest.approx(1e6 / 9)]
    assert benchmark.goals_of([cell], "cpu") == []


def test_one_length_is_drawn_as_bars(benchmark, program):
    row = {"seconds": 0.5, "memory": 2**20}
    results = {"copy": row, "TaLK": row | {"seconds": 0.25}, benchmark.SDPA: {"error": "too slow"}}
    cells = [{"T": T, "dtype": "float32", "mode": "forward", "results": results} for T in (5, 40)]
    speed = program.figure(cells[:1]).axes[0]
    assert [bar.get_width() for bar in speed.patches] == [2, 4]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["copy: 2", "TaLK: 4"]
    speed = program.figure(cells).axes[0]
    curves = {line.get_label(): line.get_xydata().tolist() for line in speed.lines}
    assert not speed.patches and curves == {"copy": [[5, 2], [40, 2]], "TaLK": [[5, 4], [40, 4]]}


def test_an_interrupted_run_loses_no_other_cell(benchmark, program, tmp_path, monkeypatch):
    measure = benchmark.measure

    def interrupted(case, mode, *others):
        if (case.T, mode) == (40, "forward"):
            raise KeyboardInterrupt
        return measure(case, mode, *others)

    monkeypatch.setattr(benchmark, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.main([*TINY, str(tmp_path / "talk"), "--only", "none", "--turns", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    cells = json.loads((tmp_path / "talk.json").read_text())["cells"]
    assert [(cell["T"], cell["mode"]) for cell in cells] == [(5, mode) for mode in MODES]


def test_a_peer_that_fails_in_a_turn_is_dropped(benchmark, case, monkeypatch):
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
    monkeypatch.setattr(
        benchmark, "seconds_of", lambda step, count, device: step() is None or 0.06
    )  # one iteration a turn
    args = SimpleNamespace(only="", limit=5, turns=3, device="cpu")
    results = benchmark.measure(case, "forward", args, {})
    assert results["fails"] == {"error": "an illegal memory access"} and len(calls) == 5
    assert results["huge"] == {"error": "out of memory"}
    assert results["copy"]["seconds"] == results["TaLK"]["seconds"] == 0.06


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
    """At T=1000, B=10, C=1024, H=16 in float32 on a CPU, in one process: the bars of the README."""
    command = [sys.executable, SCRIPT, "--cpu", "--lengths", "1000", "--dtypes", "float32"]
    command += ["--turns", "3", "--only", "attention", "--output", tmp_path / "talk"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "of 2 goals are met" in printed
    record = json.loads((tmp_path / "talk.json").read_text())
    rows = record["cells"][0]["results"]  # forward
    times_faster = rows["scaled_dot_product_attention"]["seconds"] / rows["TaLK"]["seconds"]
    assert times_faster >= (12 if alone() else 4), printed
    a_copy, attention = record["goals"]
    assert a_copy["value"] <= (1.5 if alone() else 4.5), printed
    assert attention["value"] >= (12 if alone() else 4), printed


def test_it_refuses_to_measure_a_wrong_operator(benchmark, monkeypatch):
    right = benchmark.talk_conv
    monkeypatch.setattr(benchmark, "talk_conv", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(SystemExit, match="talk_conv is wrong in float32"):
        benchmark.check(["float32"], "cpu")


def test_what_is_too_large_or_too_slow_says_so(benchmark, peers):
    huge = peers.Case(2, 10, 1024, 16, torch.float32, "cpu")
    huge.T = 1_000_000
    with pytest.raises(benchmark.Unavailable, match="out of memory: needs .* GiB"):
        peers.self_attention(huge)


def test_gradients_that_pytorch_would_write_elsewhere_are_refused(peers, monkeypatch):
    windows = SimpleNamespace(is_cuda=True, requires_grad=True, numel=lambda: 2**31 + 1)
    monkeypatch.delenv("TORCH_DISABLE_NATIVE_JIT", raising=False)
    for fine in ({"is_cuda": False}, {"requires_grad": False}, {"numel": lambda: 2**31}):
        peers.refuse_wrapped_offsets(SimpleNamespace(**{**vars(windows), **fine}))
    with pytest.raises(peers.Unavailable, match="TORCH_DISABLE_NATIVE_JIT=1"):
        peers.refuse_wrapped_offsets(windows)
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    peers.refuse_wrapped_offsets(windows)


def test_the_published_method_is_the_same_operator(peers, case):
    function, inputs = peers.published_method(case)
    ours, _ = peers.talk(case)
    assert torch.allclose(function(*inputs), ours(*inputs), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "T"), [(torch.bfloat16, 1003), (torch.bfloat16, 1007), (torch.float16, 2051)]
)
def test_the_published_method_stays_in_bounds_where_its_positions_round_up(peers, dtype, T):
    case = peers.Case(T, 1, 2, 1, dtype, "cpu")
    case.offset_left[-1] = 0  # its left end is 1006 of 1007 rows, which bfloat16 has at 1008
    function, inputs = peers.published_method(case)
    assert function(*inputs).shape == (T, 1, 2)


class Given(torch.nn.Module):
    """In place of the Linear that would predict the kernels."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.out_features = kernels, kernels.shape[-1]

    def forward(self, _):
        return self.kernels


@pytest.mark.parametrize("K", [3, 31])
def test_peers_are_fairseqs_own(peers, case, K):
    """The same outputs as fairseq's modules, with their kernels given instead of predicted."""
    pytest.importorskip("fairseq")
    from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
    from fairseq.modules.lightweight_convolution import LightweightConv1dTBC

    sizes = dict(kernel_size=K, padding_l=K // 2, num_heads=case.H, weight_softmax=True)
    module = DynamicConv1dTBC(case.C, **sizes)
    for build, unfolded in (
        (peers.dynamic_conv_unfolded, True),
        (peers.dynamic_conv_band, False),
    ):
        function, (x, kernels) = build(case, K)
        module.weight_linear = Given(kernels.flatten(2))
        assert torch.allclose(function(x, kernels), module(x, unfold=unfolded), atol=1e-5)

    function, (x, kernels) = peers.light_conv_unfolded(case, K)
    module = LightweightConv1dTBC(case.C, **sizes)
    module.weight.data = kernels[:, None]
    assert torch.allclose(function(x, kernels), module(x, unfold=True), atol=1e-5)

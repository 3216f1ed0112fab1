"""scripts/benchmark_talk_conv.py: what it prints and writes, and that its peers are the peers."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, alone, load_script

SCRIPT = ROOT / "scripts/benchmark_talk_conv.py"


@pytest.fixture(scope="module")
def benchmark():
    return load_script("benchmark_talk_conv")


@pytest.fixture
def case(benchmark):
    torch.manual_seed(0)
    return benchmark.Case(20, 3, 24, 4, torch.float32, "cpu")


def test_table_json_and_plot(tmp_path):
    printed = subprocess.run(
        [
            sys.executable, SCRIPT, "--cpu", "--lengths", "5,40", "--dtypes", "float32", "--batch",
            "2", "--channels", "32", "--heads", "4", "--turns", "2", "--output", tmp_path / "talk",
        ],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "talk_conv is right in float32" in printed and "TaLK, CUDA graph" in printed
    record = json.loads((tmp_path / "talk.json").read_text())
    assert [(cell["T"], cell["mode"]) for cell in record["cells"]] == [
        (T, mode) for T in (5, 40) for mode in ("forward", "forward+backward")
    ]
    for cell in record["cells"]:
        for name, row in cell["results"].items():
            if name in ("TaLK, CUDA graph", "causal_conv1d k=4"):
                assert row["error"] in ("needs a GPU", "not installed")
            else:
                assert row["seconds"] > 0 and row["memory"] >= 0
    assert (tmp_path / "talk.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_faster_than_attention(tmp_path):
    """At T=1000, B=10, C=1024, H=16 in float32 on a CPU, in one process: the bars of the README."""
    command = [sys.executable, SCRIPT, "--cpu", "--lengths", "1000", "--dtypes", "float32"]
    command += ["--turns", "3", "--only", "attention", "--output", tmp_path / "talk"]
    subprocess.run(command, capture_output=True, check=True)
    for cell in json.loads((tmp_path / "talk.json").read_text())["cells"]:
        seconds = {name: row.get("seconds") for name, row in cell["results"].items()}
        times_faster = seconds["scaled_dot_product_attention"] / seconds["TaLK"]
        bar = {"forward": 12, "forward+backward": 8}[cell["mode"]]
        assert times_faster >= (bar if alone() else bar / 3), seconds


def test_it_refuses_to_measure_a_wrong_operator(benchmark, monkeypatch):
    right = benchmark.talk_conv
    monkeypatch.setattr(benchmark, "talk_conv", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(SystemExit, match="talk_conv is wrong in float32"):
        benchmark.check(["float32"], "cpu")


def test_what_is_too_large_or_too_slow_says_so(benchmark):
    huge = benchmark.Case(2, 10, 1024, 16, torch.float32, "cpu")
    huge.T = 1_000_000
    with pytest.raises(benchmark.Unavailable, match="out of memory: needs .* GiB"):
        benchmark.self_attention(huge)


def test_the_published_method_is_the_same_operator(benchmark, case):
    function, inputs = benchmark.published_method(case)
    ours, _ = benchmark.talk(case)
    assert torch.allclose(function(*inputs), ours(*inputs), atol=1e-5)


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

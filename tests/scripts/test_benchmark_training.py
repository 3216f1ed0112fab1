"""scripts/benchmark_training.py: what it times, prints and writes, and that its models are so."""

import contextlib
import json
import re
import statistics
from types import SimpleNamespace

import pytest
import torch

from conftest import one_space
from pipeline.benchmarks import harness
from pipeline.benchmarks import parts as parts_of_a_step

pytest.importorskip("fairseq")

SMALL = (
    "--cpu --width 16 --ffn 24 --heads 4 --encoder-layers 2 --decoder-layers 1 --vocabulary 40 "
    "--max-tokens 60 --tokens 12 --batches 1 --turns 2"
).split()


@pytest.fixture(scope="module")
def benchmark():
    from pipeline.benchmarks import training

    return training


@pytest.fixture
def run(benchmark, tmp_path, capsys):
    """Run the command at a tiny size; returns what it wrote and printed."""

    def run(options):
        prefix = tmp_path / "out/training"
        benchmark.main([*SMALL, *options.split(), "--output", str(prefix)])
        png = prefix.with_suffix(".png").read_bytes()
        assert png.startswith(b"\x89PNG") and png.endswith(b"IEND\xaeB`\x82")
        record = json.loads(prefix.with_suffix(".json").read_text())
        return SimpleNamespace(
            record=record, cells=record["cells"], printed=one_space(capsys.readouterr().out)
        )

    return run


# --- Timing ---


def test_steps_take_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    calls, told = [], []

    def step(name, seconds):
        def call():
            calls.append(name)
            now[0] += seconds

        return call

    speeds = harness.training_speeds(
        {"a": step("a", 1), "b": step("b", 3)},
        turns=2,
        seconds=2,
        report=lambda so_far: told.append({name: len(turns) for name, turns in so_far.items()}),
    )
    # Each warms up, and "a" needs two calls for 2 seconds; who was first is last in the next turn.
    assert "".join(calls) == "ab" + "aab" + "baa"
    assert speeds == {"a": [1, 1], "b": [3, 3]}
    assert told == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    # The median of ratios within a turn, not the ratio of medians.
    assert harness.times_faster({"a": [1, 10, 2], "b": [2, 30, 8]}, "a", "b") == 3


# --- The table and the files ---


def test_translation(benchmark, run):
    out = run("")
    (cell,) = out.cells
    assert cell["precision"] == "float32" and list(cell["results"]) == list(benchmark.MODELS)
    talk = cell["results"]["talkconv"]["turns"]
    for name, row in cell["results"].items():
        assert len(row["turns"]) == 2 and row["seconds"] == statistics.median(row["turns"])
        ratio = statistics.median(b / a for a, b in zip(talk, row["turns"]))
        assert row["talkconv_is"] == pytest.approx(ratio)
        line = f"{name} {row['parameters']:,} {row['tokens_per_second']:,.1f}"
        assert line in out.printed and f"{ratio:.2f}x" in out.printed
    tokens = {round(r["tokens_per_second"] * r["seconds"]) for r in cell["results"].values()}
    assert len(tokens) == 1  # all train on the same


def test_language_models_and_what_is_not_there(benchmark, run, monkeypatch):
    monkeypatch.setattr(benchmark, "BAND", 11)
    out = run("--task lm --models talkconv,dynamicconv,dynamicconv-band --max-tokens 24 "
              "--precisions float32,medium")  # fmt: skip
    assert [cell["precision"] for cell in out.cells] == ["float32", "medium"]
    assert torch.get_float32_matmul_precision() == "highest"
    for cell in out.cells:
        results = cell["results"]
        assert results["dynamicconv-band"] == {"error": "over 11 tokens fairseq unfolds"}
        assert "over 11 tokens fairseq unfolds" in out.printed
        for name in ("talkconv", "dynamicconv"):
            row = results[name]
            assert row["tokens_per_second"] * row["seconds"] == pytest.approx(24)


def test_profile_names_the_parts(run):
    out = run("--models talkconv --turns 1 --profile")
    parts = out.cells[0]["results"]["talkconv"]["profile"]
    for part in ("mixing over time", "mixing: projections", "encoder attention", "feed-forward",
                 "vocabulary", "norms", "loss", "embeddings"):  # fmt: skip
        assert parts[part]["forward"] > 0 and parts[part]["backward"] > 0 and part in out.printed
    assert any("talk_conv::backward" in op for op in parts["mixing over time"]["operators"])
    assert parts["optimizer"]["forward"] == 0 < parts["optimizer"]["backward"]
    assert "aten::mm" in parts["feed-forward"]["operators"]
    assert not any("talk_conv" in op for op in parts["rest of the step"]["operators"])


def test_profile_counts_a_kernel_once(monkeypatch):
    """A GPU, played: the kernel of an operator is an event of its own, and so is its range."""
    CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(id, name, device, start=0, end=10_000):
        return torch.autograd.profiler_util.FunctionEvent(
            id, name, thread=0, start_us=start, end_us=end, device_type=device, use_device="cuda"
        )

    part, operator = event(1, "part: loss", CPU), event(2, "aten::add", CPU)
    operator.cpu_parent = part
    part.append_cpu_child(operator)
    operator.append_kernel("add_kernel", 0, 4_000)
    events = [
        part, operator, event(2, "add_kernel", CUDA, 0, 4_000), event(1, "part: loss", CUDA),
    ]  # fmt: skip
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    profile, module = parts_of_a_step.profile, torch.nn.Module()
    (row,) = profile(lambda: None, 2, module).items()  # two steps: one is half of it
    assert row == ("loss", {"forward": 2, "backward": 0,
                            "operators": {"part: loss": 0, "aten::add": 2}})  # fmt: skip


def test_models_are_what_they_say(benchmark):
    args = benchmark.parse(SMALL)

    def layers(name):
        model = benchmark.build_trainer(name, args.sizes, "float32", args).model
        return len(model.encoder.layers), len(model.decoder.layers), model

    assert layers("transformer")[:2] == layers("talkconv")[:2] == (2, 1)
    assert layers("transformer-arch")[:2] == (1, 1)
    model = layers("talkconv")[2]
    units = [layer.self_attn for layer in (*model.encoder.layers, *model.decoder.layers)]
    assert [(u.conv.max_left, u.conv.max_right) for u in units] == [(1, 1), (3, 3), (1, 0)]
    assert not any(unit.glu for unit in units)
    for name, kind in (
        ("dynamicconv", "DynamicConv_scripatable"),
        ("dynamicconv-band", "DynamicConv1dTBC"),
        ("lightconv", "LightweightConv1dTBC"),
    ):
        model = layers(name)[2]
        convs = [layer.conv for layer in (*model.encoder.layers, *model.decoder.layers)]
        assert {type(conv).__name__ for conv in convs} == {kind}
        assert [conv.kernel_size for conv in convs] == [3, 7, 2]


# --- Wrong results are not measured ---


@pytest.mark.parametrize("name", ["talkconv", "dynamicconv-band"])
def test_a_model_that_trains_otherwise_is_not_measured(benchmark, run, monkeypatch, name):
    right = benchmark.gradients
    calls = []

    def gradients(trainer, batch):
        loss, found = right(trainer, batch)
        calls.append(trainer)
        if len(calls) == 1:
            found = {n: 1.1 * gradient for n, gradient in found.items()}
        return loss, found

    monkeypatch.setattr(benchmark, "gradients", gradients)
    with pytest.raises(SystemExit, match=f"{name}: the gradients differ from .* not measured"):
        run(f"--models {name}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--models convs2s", "expected some of talkconv, .*, got convs2s"),
        ("--task lm --models transformer-arch", "expected language models, got transformer-arch"),
        ("--precisions float16", "expected a GPU for float16, got a CPU"),
        ("--width 20", "expected a multiple of 2 x 4 heads, got 20"),
        ("--turns 0", "expected at least 1, got 0"),
    ],
)
def test_bad_options(benchmark, capsys, options, message):
    with pytest.raises(SystemExit):
        benchmark.parse([*SMALL, *options.split()])
    assert re.search(message, capsys.readouterr().err)

"""scripts/benchmark_training.py: what it times, prints and writes, and that its models are so."""

import re
from types import SimpleNamespace

import pytest
import torch
from benchmark_runs import check_rows, run_benchmark

from pipeline.benchmarks import harness

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
    return lambda options: run_benchmark(benchmark, [*SMALL, *options.split()], tmp_path, capsys)


# --- Timing ---


def test_steps_take_turns():
    """Who was first is last in the next turn."""
    assert "".join(harness.in_turn({"a": None, "b": None}, turns=2)) == "ab" + "ba"


def test_summary():
    results = {"a": {"turns": [1, 10, 2]}, "b": {"turns": [2, 30, 8]}, "c": {"error": "no"}}
    harness.summarise(results, "a", {"tokens": 16})
    assert results["c"] == {"error": "no"}
    # The median of ratios within a turn, not the ratio of medians.
    assert results["b"] == {
        "turns": [2, 30, 8], "seconds": 8, "tokens_per_second": 2, "speed_up": 3,
    }  # fmt: skip


def test_what_takes_long_takes_one_turn(tmp_path):
    args = SimpleNamespace(output=tmp_path / "x", turns=3, device="cpu")
    report = harness.Report(args, "quick")
    seconds = {"quick": 1.0, "slow": 9.0}
    report.measure({}, seconds, lambda name, row: lambda: seconds[name], {}, enough=5)
    rows = report.cells[0]["results"]
    assert rows["quick"]["turns"] == [1, 1, 1] and rows["slow"]["turns"] == [9]


def test_memory_is_in_mebibytes():
    row = harness.table({"a": {"memory": 300 * 2**20}}).splitlines()[-1]
    assert row.replace(" ", "") == "|a|300|"


# --- The table and the files ---


def test_translation(benchmark, run):
    out = run("")
    (cell,) = out.cells
    assert cell["precision"] == "float32"
    assert list(cell["results"]) == list(benchmark.models.MODELS)
    tokens = {round(r["tokens_per_second"] * r["seconds"]) for r in cell["results"].values()}
    assert len(tokens) == 1  # all train on the same
    check_rows(cell, {"tokens": tokens.pop()}, out.printed)


def test_language_models_and_what_is_not_there(benchmark, run, monkeypatch):
    monkeypatch.setattr(benchmark, "BAND", 11)
    names = "talkconv,dynamicconv,dynamicconv-band,dynamicconv-following"
    out = run(f"--task lm --models {names} --max-tokens 24")
    (cell,) = out.cells
    for form, expected in {
        "band": "over 11 tokens fairseq unfolds",
        "following": "a language model attends to no encoder",
    }.items():
        error = cell["results"].pop(f"dynamicconv-{form}")["error"]
        assert error == expected and error in out.printed
    check_rows(cell, {"tokens": 24}, out.printed)


@pytest.mark.parametrize("options", ["", "--task lm"])
def test_tokens_are_those_of_the_target_without_padding(benchmark, monkeypatch, options):
    args, seen = benchmark.parse([*SMALL, *options.split()]), []
    monkeypatch.setattr(benchmark.models, "measure", lambda cell, prepare, *rest: seen.append(rest))
    batches = benchmark.build_batches(args)
    benchmark.measure("float32", batches, args, None)
    targets = [batch["target"] for batch in batches]
    tokens = sum(int(target.ne(1).sum()) for target in targets)  # 1 is the padding
    assert seen[0][0] == {"tokens": tokens}
    assert options or tokens < sum(target.numel() for target in targets)


def test_profile_counts_the_calls_and_names_the_operators(run):
    out = run("--models talkconv --turns 1 --profile")
    assert "talk_conv::backward" in out.printed
    assert re.search(r"float32: talkconv: \d{3} calls", out.printed)


@pytest.mark.parametrize(
    "option, built", [([], "FusedAdam"), (["--optimizer", "adam"], "Adam")], ids=["default", "adam"]
)
@pytest.mark.parametrize("name", ["talkconv", "transformer"])
def test_all_systems_have_the_optimizer_of_the_option(benchmark, name, option, built):
    args = benchmark.parse([*SMALL, *option])
    trainer = benchmark.build_trainer(name, "float32", args)
    assert type(trainer.optimizer.optimizer).__name__ == built


def test_one_process_trains_whatever_gpus_there_are(benchmark, monkeypatch):
    """fairseq takes the number of GPUs that it sees for that of processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cfg = benchmark.build_trainer("talkconv", "float32", benchmark.parse(SMALL)).cfg
    assert cfg.distributed_training.distributed_world_size == 1


def test_calls_are_those_that_compute():
    from pipeline.benchmarks.models import CountCalls

    x = torch.randn(4, 6)
    with CountCalls() as calls:
        y = torch.empty_like(x).view(24).detach()
        assert calls.count == 0
        y.copy_(x.view(24))  # in place
        x.t().contiguous() + 1
    assert calls.count == 3


def test_models_are_what_they_say(benchmark):
    args = benchmark.parse(SMALL)

    def layers(name):
        model = benchmark.build_trainer(name, "float32", args).model
        assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)
        return *model.encoder.layers, *model.decoder.layers

    assert len(layers("transformer")) == 3
    units = [layer.self_attn for layer in layers("talkconv")]
    assert [(u.conv.max_left, u.conv.max_right) for u in units] == [(1, 1), (3, 3), (1, 0)]
    assert not any(unit.glu for unit in units)
    for name, kind in (
        ("dynamicconv", "DynamicConv_scripatable"),
        ("dynamicconv-band", "DynamicConv1dTBC"),
        ("dynamicconv-following", "DynamicConv_scripatable"),
        ("lightconv", "LightweightConv1dTBC"),
    ):
        convs = [layer.conv for layer in layers(name)]
        assert {type(conv).__name__ for conv in convs} == {kind}
        assert [conv.kernel_size for conv in convs] == [3, 7, 2]


# --- Wrong results are not measured ---


def gradients(benchmark, name):
    """The loss of a batch and {parameter: gradient} of a model, without dropout."""
    args = benchmark.parse(SMALL)
    (batch,), trainer = (
        benchmark.build_batches(args),
        benchmark.build_trainer(name, "float32", args),
    )
    model, criterion = trainer.model.eval(), trainer.criterion.eval()
    loss, size, _ = criterion(model, trainer._prepare_sample(batch)[0])
    (loss / size).backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["talkconv", "talkconv_plus", "dynamicconv-band"])
def test_models_train_as_they_should(benchmark, monkeypatch, name):
    """TaLK as the reference backend does, and band matrices as unfolded windows."""
    loss, found = gradients(benchmark, name)
    monkeypatch.setenv("TALK_CONV_BACKEND", "reference")
    wanted, expected = gradients(benchmark, name.removesuffix("-band"))
    assert loss == pytest.approx(wanted, rel=1e-4) and found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert max((found[n] - expected[n]).abs().max() for n in expected) < 1e-3 * largest


def test_a_wrong_operator_is_not_measured(benchmark, run, monkeypatch):
    right = benchmark.operator.talk_conv
    monkeypatch.setattr(benchmark.operator, "talk_conv", lambda *a: 1.001 * right(*a))
    with pytest.raises(SystemExit, match="talk_conv is wrong in float32 by 0.001: not measured"):
        run("--models talkconv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--models convs2s", "--models: expected some of talkconv, .*, got convs2s"),
        ("--precisions float16", "--precisions: expected a GPU for float16, got a CPU"),
        ("--width 20", "--width: expected a multiple of 2 x 4 heads, got 20"),
        ("--task lm --tokens 64 --max-tokens 63", "--max-tokens: expected at least a block of 64"),
        ("--turns 0", "--turns: expected a whole number of at least 1, got 0"),
    ],
)
def test_bad_options(benchmark, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse([*SMALL, *options.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"benchmark_training.py: {message}", line)


def test_language_models_have_a_file_of_their_own(benchmark):
    """Unless a file is named, be it the one of translation."""

    def output(*arguments):
        return str(benchmark.parse(["--cpu", *arguments]).output)

    assert output() == "results/training" and output("--task", "lm") == "results/training_lm"
    assert output("--task", "lm", "--output", "results/training") == "results/training"

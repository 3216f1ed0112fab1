"""scripts/benchmark_decoding.py: what it prints and writes, and that its models are as it says."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch

from conftest import alone, one_space

pytest.importorskip("fairseq")

SIZES = (
    "--cpu --width 32 --ffn 48 --heads 4 --encoder-layers 2 --decoder-layers 2 --vocabulary 60"
).split()


@pytest.fixture(scope="module")
def benchmark():
    from pipeline.benchmarks import decoding

    return decoding


@pytest.fixture
def run(benchmark, tmp_path, capsys):
    """Run the command at a tiny size; returns what it wrote and printed."""

    def run(options):
        prefix = tmp_path / "out/decoding"
        benchmark.main([*SIZES, *options.split(), "--output", str(prefix)])
        assert [path.name for path in sorted(prefix.parent.iterdir())] == [
            "decoding.json",
            "decoding.png",
        ]
        png = prefix.with_suffix(".png").read_bytes()
        assert png.startswith(b"\x89PNG") and png.endswith(b"IEND\xaeB`\x82")
        record = json.loads(prefix.with_suffix(".json").read_text())
        return SimpleNamespace(
            record=record, cells=record["cells"], printed=one_space(capsys.readouterr().out)
        )

    return run


@pytest.fixture
def build(benchmark):
    """``build(name)`` gives a small model of that name and its task."""

    def build(name, **sizes):
        sizes = {"width": 32, "ffn": 48, "heads": 4, "vocabulary": 60, **sizes}
        sizes = benchmark.Sizes(**{"encoder_layers": 2, "decoder_layers": 2, **sizes})
        task = benchmark.models.build_task(sizes.vocabulary)
        assert len(task.target_dictionary) == sizes.vocabulary
        return benchmark.build_model(name, sizes, task, "cpu", "float32"), task

    return build


# --- The files and the table ---


def test_profile_names_the_parts(run):
    out = run("--models talkconv,transformer --lengths 4 --batches 2 --beams 2 --turns 1 --profile")
    for name in ("talkconv", "transformer"):
        parts = out.cells[0]["results"][name]["profile"]
        for part in ("mixing over time", "encoder attention", "feed-forward", "norms", "embeddings",
                     "vocabulary", "beam search", "dropout, residuals, rest"):  # fmt: skip
            assert parts[part]["forward"] > 0 and part in out.printed
        assert not any(part["backward"] for part in parts.values())
        assert f"{name}: " in out.printed
    operators = out.cells[0]["results"]["talkconv"]["profile"]["mixing over time"]["operators"]
    assert any("talk_conv::" in operator for operator in operators)


def test_table_json_and_plot(benchmark, run):
    out = run("--lengths 3,5 --batches 1,2 --beams 1,2 --turns 2")
    assert out.record["sizes"]["width"] == 32 and out.record["dtype"] == "float32"
    assert [tuple(cell.values())[:4] for cell in out.cells] == [
        (B, beam, S, S) for beam in (1, 2) for S in (3, 5) for B in (1, 2)
    ]
    for cell in out.cells:
        assert benchmark.title(cell) + "\n" in out.printed
        assert sorted(cell["results"]) == sorted(benchmark.MODELS)
        for name, row in cell["results"].items():
            assert len(row["turns"]) == 2 and row["seconds"] == statistics.median(row["turns"])
            assert row["sentences_per_second"] == pytest.approx(cell["batch"] / row["seconds"])
            tokens = cell["batch"] * (cell["target"] + 1)
            assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
            assert row["memory"] >= 0
            ratio = row["seconds"] / cell["results"]["talkconv"]["seconds"]
            line = f"{name} {row['sentences_per_second']:,.2f} {row['tokens_per_second']:,.1f}"
            assert line in out.printed and f"{ratio:.2f}x" in out.printed


def test_target_length_and_models_are_options(run):
    out = run("--lengths 3 --target 7 --batches 1 --beams 2 --turns 1 --models lightconv,talkconv")
    (cell,) = out.cells
    assert (cell["source"], cell["target"]) == (3, 7)
    assert list(cell["results"]) == ["lightconv", "talkconv"]


def test_positions(benchmark, run):
    out = run("--positions 30,60 --batches 2 --turns 2")
    (cell,) = out.cells
    assert cell["batch"] == 2 and sorted(cell["results"]) == sorted(benchmark.MODELS)
    for rows in cell["results"].values():
        for row in rows.values():
            assert row["tokens_per_second"] == pytest.approx(2 / row["seconds"])
            assert f"{row['tokens_per_second']:,.0f}" in out.printed
    talk, transformer = cell["results"]["talkconv"], cell["results"]["transformer"]
    assert talk["60"]["state"] == talk["30"]["state"]
    # Keys and values of 30 more tokens, 2 sentences, 2 layers, width 32.
    assert transformer["60"]["state"] - transformer["30"]["state"] == 30 * 2 * 2 * 2 * 32 * 4


# --- What cannot be measured, and interruptions ---


def test_what_is_too_slow_says_so(run):
    out = run("--lengths 3 --batches 1 --beams 1 --models talkconv,transformer --limit 0")
    for name in ("talkconv", "transformer"):
        why = out.cells[0]["results"][name]["error"]
        assert why.startswith("too slow: about ") and f"{name} {why}" in out.printed

    out = run("--positions 2,600 --batches 1 --turns 1 --models talkconv --limit 1e-6")
    rows = out.cells[0]["results"]["talkconv"]
    assert rows["2"]["seconds"] > 0 and rows["600"]["error"].startswith("too slow: at 2 after")
    assert "too slow: at 2 after" in out.printed


def test_what_is_too_large_says_so(benchmark):
    args = SimpleNamespace(sizes=benchmark.Sizes(), device="cpu", dtype="float32")
    benchmark.refuse_large_batch(args, 1, 1, 20, 20)
    with pytest.raises(benchmark.Unavailable, match="out of memory: may need .* GiB"):
        benchmark.refuse_large_batch(args, 10**7, 10**7, 400, 400)


def test_what_fails_says_so(benchmark, run, monkeypatch):
    right = benchmark.build_model

    def build_model(name, *arguments):
        model = right(name, *arguments)
        if name == "lightconv":
            model.encoder.register_forward_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
        return model

    monkeypatch.setattr(benchmark, "build_model", build_model)
    out = run("--lengths 3 --batches 1 --beams 1 --turns 1 --models talkconv,lightconv")
    results = out.cells[0]["results"]
    assert "inconsistent tensor size" in results["lightconv"]["error"]
    assert results["talkconv"]["seconds"] > 0


def test_an_interrupted_run_loses_nothing(benchmark, run, monkeypatch, tmp_path):
    right = benchmark.measure

    def measure(built, task, cell, args, results, save):
        if cell["source"] == 5:
            # In the second turn of the third length, after both models had one.
            def show_progress(text=""):
                if "transformer, turn 2" in text:
                    raise KeyboardInterrupt

            monkeypatch.setattr(benchmark, "show_progress", show_progress)
        right(built, task, cell, args, results, save)

    monkeypatch.setattr(benchmark, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run("--lengths 3,4,5 --batches 1 --beams 1 --turns 2 --models talkconv,transformer")
    cells = json.loads((tmp_path / "out/decoding.json").read_text())["cells"]
    turns = [[len(row["turns"]) for row in cell["results"].values()] for cell in cells]
    assert turns == [[2, 2], [2, 2], [2, 1]]
    assert (tmp_path / "out/decoding.png").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ("--models talkconv,lstm", "expected some of talkconv, transformer"),
        ("--beams 0", "expected at least 1, got 0"),
        ("--lengths 1", "expected at least 2, got 1"),
        ("--width 36", "--width: expected a multiple of 2 x 4 heads, got 36"),
        ("--beams 40", "--vocabulary: expected at least"),
        ("--profile --positions", "--profile: expected none with --positions"),
    ],
)
def test_bad_options(run, capsys, options, message):
    with pytest.raises(SystemExit):
        run(options)
    assert message in capsys.readouterr().err


# --- What is measured ---


def scale_steps(model):
    """Decoding step by step differs from a full pass by a tenth, in one layer."""

    def hook(layer, inputs, kwargs, out):
        incremental_state = inputs[3] if len(inputs) > 3 else kwargs.get("incremental_state")
        return out if incremental_state is None else (1.1 * out[0], *out[1:])

    model.decoder.layers[0].register_forward_hook(hook, with_kwargs=True)


def forget_to_reorder(model):
    model.decoder.reorder_incremental_state_scripting = lambda *_: None


@pytest.mark.parametrize("name", ["talkconv", "transformer", "dynamicconv"])
@pytest.mark.parametrize(
    "break_it, message",
    [
        (scale_steps, "the logits of decoding step by step differ from a full pass"),
        (forget_to_reorder, "the scores of beam 4 differ from a full pass"),
    ],
)
def test_it_refuses_to_measure_a_wrong_model(benchmark, build, name, break_it, message):
    model, task = build(name)
    benchmark.check(name, model, task, 4, "cpu", "float32")
    break_it(model)
    with pytest.raises(SystemExit, match=f"{name}: {message}"):
        benchmark.check(name, model, task, 4, "cpu", "float32")


def test_a_wrong_model_stops_the_command_before_it_measures(benchmark, run, monkeypatch, tmp_path):
    right = benchmark.build_model

    def build_model(name, *arguments):
        model = right(name, *arguments)
        if name == "lightconv":
            scale_steps(model)
        return model

    monkeypatch.setattr(benchmark, "build_model", build_model)
    with pytest.raises(SystemExit, match="lightconv: the logits"):
        run("--lengths 3 --batches 1 --beams 1 --models talkconv,lightconv")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beam", [1, 3])
def test_lengths_are_forced(benchmark, build, beam):
    """Even where the model would rather end at once."""
    model, task = build("talkconv")
    eos = task.target_dictionary.eos()
    ends = lambda _, inputs, out: out.index_fill(2, torch.tensor([eos]), 50.0)  # noqa: E731
    model.decoder.output_projection.register_forward_hook(ends)
    batch = benchmark.random_batch(task, 2, 4, "cpu")
    generator = benchmark.build_generator(model, task, beam, 9)
    _, hypotheses = benchmark.generate(generator, model, batch, 9)
    assert [len(beams) for beams in hypotheses] == [beam, beam]
    for hypothesis in (hypothesis for beams in hypotheses for hypothesis in beams):
        assert (hypothesis["tokens"] == eos).nonzero().tolist() == [[9]]
    with pytest.raises(SystemExit, match="hypotheses: expected 8 tokens and their end"):
        benchmark.generate(generator, model, batch, 8)


def test_models_have_the_same_sizes(benchmark, build):
    sizes = dict(width=512, ffn=1024, encoder_layers=7, decoder_layers=6, vocabulary=10_000)
    counts = []
    for name in benchmark.MODELS:
        model, _ = build(name, **sizes)
        assert len(model.encoder.layers) == 7 and len(model.decoder.layers) == 6
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert max(counts) <= 1.1 * min(counts), counts


def test_convolutions_span_as_many_tokens(build):
    talk, _ = build("talkconv", encoder_layers=5, decoder_layers=4)
    dynamic, _ = build("dynamicconv", encoder_layers=5, decoder_layers=4)
    for side in ("encoder", "decoder"):
        units = [layer.self_attn.conv for layer in getattr(talk, side).layers]
        convs = [layer.conv for layer in getattr(dynamic, side).layers]
        spans = [unit.max_left + unit.max_right + 1 for unit in units]
        assert spans == [conv.kernel_size for conv in convs]
        assert units[-1].max_left == 15


def test_dynamicconv_band_is_dynamicconv(benchmark, build):
    (one, task), (other, _) = build("dynamicconv"), build("dynamicconv-band")
    net_input = benchmark.random_batch(task, 2, 40, "cpu")["net_input"]
    a, b = (model.encoder(**net_input)["encoder_out"][0] for model in (one, other))
    assert torch.allclose(a, b, atol=1e-5)
    kinds = [type(model.encoder.layers[0].conv).__name__ for model in (one, other)]
    assert kinds == ["DynamicConv_scripatable", "DynamicConv1dTBC"]


def test_peak_memory_sees_what_was_freed(benchmark):
    with benchmark.harness.PeakMemory("cpu") as peak:
        torch.ones(50 << 20, dtype=torch.uint8)
    if peak.bytes is None:
        pytest.skip("no such figure here")
    assert 45 << 20 <= peak.bytes <= 70 << 20


# --- Speed ---


@pytest.mark.long
@pytest.mark.slow
def test_not_slower_than_dynamicconv(benchmark, tmp_path):
    """At the sizes of IWSLT, batch 8, beam 5, 40 tokens, with a margin for a busy machine."""
    options = "--cpu --lengths 40 --batches 8 --beams 5 --models talkconv,dynamicconv --turns 5"
    benchmark.main([*options.split(), "--output", str(tmp_path / "decoding")])
    (cell,) = json.loads((tmp_path / "decoding.json").read_text())["cells"]
    seconds = {name: row["seconds"] for name, row in cell["results"].items()}
    assert seconds["talkconv"] <= (1.1 if alone() else 1.3) * seconds["dynamicconv"], seconds


@pytest.mark.slow
def test_as_fast_after_16000_tokens(run):
    out = run("--positions 16,16000 --batches 1 --models talkconv --turns 60")
    rows = out.cells[0]["results"]["talkconv"]
    fastest = {position: min(row["turns"]) for position, row in rows.items()}
    assert fastest["16"] >= 0.95 * fastest["16000"], fastest
    assert rows["16000"]["state"] == pytest.approx(rows["16"]["state"], rel=0.01)

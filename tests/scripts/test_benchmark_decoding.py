"""scripts/benchmark_decoding.py: what it prints and writes, and that its models are as it says."""

import copy
import io
import json
import re
from functools import partial

import pytest
import torch
from benchmark_runs import check_rows, run_benchmark

from conftest import alone

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
    return lambda options: run_benchmark(benchmark, [*SIZES, *options.split()], tmp_path, capsys)


@pytest.fixture
def build(benchmark):
    """``build(name)`` gives a small model of that name, its task and the options."""

    def build(name, *options):
        args = benchmark.parse([*SIZES, *options])
        task = benchmark.models.build_task(args.sizes.vocabulary)
        assert len(task.target_dictionary) == args.sizes.vocabulary
        return benchmark.build_model(name, task, args), task, args

    return build


# --- The files and the table ---


def test_table_and_json(benchmark, run):
    (cell,) = run("--lengths 3 --batches 1 --beams 2 --turns 1").cells
    assert sorted(cell["results"]) == sorted(benchmark.models.MODELS)
    out = run("--lengths 3,5 --batches 1,2 --beams 1,2 --turns 2 --models lightconv,talkconv")
    assert out.record["sizes"]["width"] == 32 and out.record["dtype"] == "float32"
    assert [tuple(cell.values())[:3] for cell in out.cells] == [
        (B, beam, length) for beam in (1, 2) for length in (3, 5) for B in (1, 2)
    ]
    for cell in out.cells:
        assert sorted(cell["results"]) == ["lightconv", "talkconv"]
        B = cell["batch"]
        check_rows(cell, {"sentences": B, "tokens": B * (cell["length"] + 1)}, out.printed)


def test_profile_names_the_operators(run):
    out = run("--models lightconv,talkconv --lengths 4 --batches 2 --beams 2 --turns 1 --profile")
    assert list(out.cells[0]["results"]) == ["lightconv", "talkconv"]
    assert "length 4: talkconv" in out.printed and "talk_conv::" in out.printed


# --- What cannot be measured, and interruptions ---


def test_what_is_too_slow_says_so(run):
    out = run("--lengths 3 --batches 1 --beams 1 --models talkconv,transformer --limit 0")
    for name in ("talkconv", "transformer"):
        why = out.cells[0]["results"][name]["error"]
        assert why.startswith("too slow: about ") and f"| {name} | {why}" in out.printed


def test_what_fails_says_so(benchmark, run, monkeypatch):
    right = benchmark.build_model

    def build_model(name, *arguments):
        model = right(name, *arguments)
        if name == "lightconv":
            model.encoder.layers[0].register_forward_hook(
                lambda *_: torch.zeros(2) @ torch.zeros(3)
            )
        return model

    monkeypatch.setattr(benchmark, "build_model", build_model)
    out = run("--lengths 3 --batches 1 --beams 1 --turns 1 --models talkconv,lightconv")
    results = out.cells[0]["results"]
    assert "inconsistent tensor size" in results["lightconv"]["error"]
    assert results["talkconv"]["seconds"] > 0


def test_an_interrupted_run_loses_nothing(benchmark, run, monkeypatch, tmp_path):
    """In the second turn of the second length, after one of the models."""
    right, calls = benchmark.harness.timed, []

    def timed(search):
        calls.append(search)
        if len(calls) == 16:  # eight for each length: to warm up, for the memory, and two turns
            raise KeyboardInterrupt
        return right(search)

    monkeypatch.setattr(benchmark.harness, "timed", timed)
    with pytest.raises(KeyboardInterrupt):
        run("--lengths 3,5 --batches 1 --beams 1 --turns 2 --models talkconv,transformer")
    cells = json.loads((tmp_path / "out/result.json").read_text())["cells"]
    turns = [[len(row["turns"]) for row in cell["results"].values()] for cell in cells]
    assert turns == [[2, 2], [1, 2]]  # who was first is last in the next turn


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--models talkconv,lstm",
            "--models: expected some of talkconv, .*, got lstm",
        ),
        ("--models talkconv,talkconv", "--models: expected different values, got talkconv,"),
        ("--beams 5,5", "--beams: expected different values, got 5,5"),
        ("--beams 0", "--beams: expected a whole number of at least 1, got 0"),
        ("--width 36", "--width: expected a multiple of 2 x 4 heads, got 36"),
        ("--vocabulary 4", "--vocabulary: expected a whole number of at least 5, got 4"),
    ],
)
def test_bad_options(run, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        run(options)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"benchmark_decoding.py: {message}", line)


# --- What is measured ---


def test_each_hypothesis_is_as_long_as_its_source(benchmark, run, monkeypatch):
    """Even where the model would rather end at once."""
    build_model, lengths = benchmark.build_model, set()

    def build(name, task, args):
        model, eos = build_model(name, task, args), torch.tensor([task.target_dictionary.eos()])
        model.decoder.output_projection.register_forward_hook(
            lambda _, inputs, out: out.index_fill(2, eos, 50.0)
        )
        return model

    def timed(search):
        lengths.update(len(beam["tokens"]) for beams in search() for beam in beams)
        return 1.0

    monkeypatch.setattr(benchmark, "build_model", build)
    monkeypatch.setattr(benchmark.harness, "timed", timed)
    run("--lengths 9 --batches 2 --beams 2 --turns 1 --models talkconv")
    assert lengths == {9 + 1}  # and its end


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["talkconv", "talkconv_plus", "transformer", "dynamicconv-band", "dynamicconv-following"],
)
def test_decoding_is_a_full_pass(benchmark, build, name):
    """In its scores of beam search, and in its logits step by step."""
    model, task, _ = build(name)
    B, S, target, beam = 3, 12, 24, 4  # more tokens than the largest window
    batch = benchmark.random_batch(task, B, S, "cpu")
    generator = benchmark.build_generator(model, task, beam=beam, min_len=target, max_len_b=target)
    best = [beams[0] for beams in generator.generate([model], batch)]
    tokens = torch.stack([hypothesis["tokens"] for hypothesis in best])
    scores = torch.stack([hypothesis["positional_scores"] for hypothesis in best])
    previous = tokens.roll(1, dims=1)  # each hypothesis ends with what it begins with
    full = model(**batch["net_input"], prev_output_tokens=previous)
    wanted = model.get_normalized_probs(full, log_probs=True).gather(2, tokens[..., None])[..., 0]
    assert (scores - wanted).abs().max() < 1e-4
    encoder_out, state = model.encoder.forward_torchscript(batch["net_input"]), {}
    logits = [
        model.decoder(previous[:, :t], encoder_out=encoder_out, incremental_state=state)[0]
        for t in range(1, target + 2)
    ]
    assert (torch.cat(logits, 1) - full[0]).abs().max() < 1e-4 * full[0].abs().max()


def test_a_wrong_operator_is_not_measured(benchmark, run, monkeypatch, tmp_path):
    right = benchmark.operator.talk_conv_update
    monkeypatch.setattr(benchmark.operator, "talk_conv_update", lambda *a: 1.001 * right(*a))
    with pytest.raises(SystemExit, match="talk_conv is wrong in float32 by 0.001: not measured"):
        run("--lengths 3 --batches 1 --beams 1 --models talkconv")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("beam", [1, 3])
def test_lengths_are_forced(benchmark, build, beam):
    """Even where the model would rather end at once."""
    model, task, _ = build("talkconv")
    eos = task.target_dictionary.eos()
    ends = lambda _, inputs, out: out.index_fill(2, torch.tensor([eos]), 50.0)  # noqa: E731
    model.decoder.output_projection.register_forward_hook(ends)
    batch = benchmark.random_batch(task, 2, 4, "cpu")
    generator = benchmark.build_generator(model, task, beam=beam, min_len=9, max_len_b=9)
    hypotheses = generator.generate([model], batch)
    assert [len(beams) for beams in hypotheses] == [beam, beam]
    for hypothesis in (hypothesis for beams in hypotheses for hypothesis in beams):
        assert (hypothesis["tokens"] == eos).nonzero().tolist() == [[9]]


def test_models_have_the_same_sizes(benchmark):
    sizes = "--width 512 --ffn 1024 --encoder-layers 7 --decoder-layers 6 --vocabulary 10000"
    args = benchmark.parse([*SIZES, *sizes.split()])
    args.device = "meta"
    task, counts = benchmark.models.build_task(args.sizes.vocabulary), []
    for name in benchmark.models.MODELS:
        with torch.device("meta"):
            model = benchmark.build_model(name, task, args)
        assert len(model.encoder.layers) == 7 and len(model.decoder.layers) == 6
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert max(counts) <= 1.1 * min(counts), counts


def test_convolutions_span_as_many_tokens(build):
    talk, dynamic = (
        build(name, "--encoder-layers", "5", "--decoder-layers", "4")[0]
        for name in ("talkconv", "dynamicconv")
    )
    for side in ("encoder", "decoder"):
        units = [layer.self_attn.conv for layer in getattr(talk, side).layers]
        convs = [layer.conv for layer in getattr(dynamic, side).layers]
        spans = [unit.max_left + unit.max_right + 1 for unit in units]
        assert spans == [conv.kernel_size for conv in convs]
        assert units[-1].max_left == 15


def test_dynamicconv_following_shares_keys(benchmark, build, monkeypatch):
    """Its hypotheses decode from one row of keys per sentence, as those of talkconv_plus."""
    for name in ("talkconv_plus", "dynamicconv-following"):
        model, task, _ = build(name)
        attention = model.decoder.layers[0].encoder_attn
        follows = torch.equal(attention.q_proj.weight[0], attention.k_proj.weight[0])
        assert attention.copies and attention.aligns and follows
        rows, right = [], attention.forward

        def look(query, key, *rest, rows=rows, right=right, **options):
            rows.append((query.shape[1], key.shape[1]))
            return right(query, key, *rest, **options)

        monkeypatch.setattr(attention, "forward", look)
        generator = benchmark.build_generator(model, task, beam=3, min_len=5, max_len_b=5)
        generator.generate([model], benchmark.random_batch(task, 2, 6, "cpu"))
        assert set(rows) == {(6, 2)}, name


def test_dynamicconv_band_is_dynamicconv(benchmark, build):
    (one, task, _), (other, *_) = build("dynamicconv"), build("dynamicconv-band")
    net_input = benchmark.random_batch(task, 2, 40, "cpu")["net_input"]
    a, b = (model.encoder(**net_input)["encoder_out"][0] for model in (one, other))
    assert torch.allclose(a, b, atol=1e-5)
    kinds = [type(model.encoder.layers[0].conv).__name__ for model in (one, other)]
    assert kinds == ["DynamicConv_scripatable", "DynamicConv1dTBC"]


def test_peak_memory_of_a_step_that_forgets_it(benchmark, monkeypatch):
    """As fairseq's trainer does on a GPU, whose allocator is played here."""
    held, peak = 5, 5

    def forget():
        nonlocal peak
        peak = held

    for name, value in {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": forget,
        "memory_allocated": lambda: held,
        "max_memory_allocated": lambda: peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def step():
        nonlocal peak
        peak = 25
        torch.cuda.reset_peak_memory_stats()

    assert benchmark.harness.peak_memory(step, "cuda") == 20


def test_peak_memory_sees_what_was_freed(benchmark):
    peak = benchmark.harness.peak_memory(lambda: torch.ones(50 << 20, dtype=torch.uint8), "cpu")
    if peak is None:
        pytest.skip("no such figure here")
    assert 45 << 20 <= peak <= 70 << 20


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


def state_bytes(state):
    """The bytes of an incremental state, as saved."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


@pytest.mark.long
@pytest.mark.slow
def test_as_fast_after_16000_tokens(benchmark, build):
    """A decoder without a search around it: 20 steps from either place, in turn."""
    model, task, _ = build("talkconv", "--lengths", "16100")
    tokens = benchmark.random_batch(task, 1, 16_100, "cpu")["net_input"]["src_tokens"]
    source = benchmark.random_batch(task, 1, 20, "cpu")["net_input"]

    @torch.no_grad()
    def steps(state, first, last):
        for end in range(first + 1, last + 1):
            model.decoder(tokens[:, :end], encoder_out=encoder_out, incremental_state=state)
        return state

    with torch.no_grad():
        encoder_out = model.encoder.forward_torchscript(source)
    states = {16: steps({}, 0, 16), 16_000: steps({}, 0, 16_000)}
    assert state_bytes(states[16_000]) == pytest.approx(state_bytes(states[16]), rel=0.01)
    seconds = {position: [] for position in states}
    for _ in range(60):
        for position, state in states.items():
            again = partial(steps, copy.deepcopy(state), position, position + 20)
            seconds[position].append(benchmark.harness.timed(again))
    assert min(seconds[16]) >= 0.95 * min(seconds[16_000])

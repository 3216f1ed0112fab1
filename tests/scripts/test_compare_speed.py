"""The speeds of scripts/compare.sh: what a turn is, what counts, and which batches are measured."""

from types import SimpleNamespace

import pytest
import torch
from comparisons import dictionaries

pytest.importorskip("fairseq")

from pipeline.benchmarks import harness
from pipeline.common.models import build_model, configure
from pipeline.compare import speed
from pipeline.compare.flags import training_words
from pipeline.compare.options import parse


def test_speeds_are_medians_of_whole_turns(monkeypatch):
    seconds = {  # of each call: three turns of two batches in training, then in generation
        "a": iter([1, 2, 10, 20, 3, 4] + [1, 1, 2, 2, 9, 9]),
        "b": iter([2] * 6 + [4] * 6),
    }
    ran = []

    def step(name, what):
        def run(batch):
            ran.append(name)
            return batch["tokens"]

        return run

    def timed(call):
        call()
        return next(seconds[ran[-1]])

    steps = {n: {what: step(n, what) for what in ("training", "generation")} for n in "ab"}
    train = [{"tokens": 30}, {"tokens": 70}]
    test = [{"tokens": 5, "id": torch.arange(3)}, {"tokens": 7, "id": torch.arange(4)}]
    monkeypatch.setattr(speed, "configure", lambda words: (None, None))
    monkeypatch.setattr(speed, "build_measured", lambda args, words, checkpoint: steps[checkpoint])
    monkeypatch.setattr(speed, "training_batches", lambda args, task: train)
    monkeypatch.setattr(speed, "test_batches", lambda args, task: test)
    monkeypatch.setattr(harness, "timed", timed)
    monkeypatch.setattr(harness, "peak_memory", lambda call, device: call() and 123)
    monkeypatch.setattr(harness, "in_turn", lambda calls, turns: list(calls) * turns)
    args = SimpleNamespace(turns=3, device="cpu")
    rows = speed.measure_speeds(args, {"a": [], "b": []}, {"a": "a", "b": "b"})
    a = rows["a"]
    assert a["training"]["turns"] == [3, 30, 7] and rows["b"]["generation"]["seconds"] == 8
    assert a["seconds_per_update"] == 7 / 2 and a["training_tokens_per_second"] == 100 / 7
    assert a["generated_sentences_per_second"] == 7 / 4
    assert a["generated_tokens_per_second"] == 12 / 4 and a["training"]["memory"] == 123


def test_batches_of_a_measurement_are_spread_over_the_lengths():
    batches = [{"net_input": {"src_tokens": torch.full((2, 20), n)}} for n in range(12)]
    words = SimpleNamespace(eos=lambda: 2, unk=lambda: 3)
    iterator = SimpleNamespace(next_epoch_itr=lambda shuffle: batches)
    task = SimpleNamespace(
        load_dataset=lambda split: None,
        dataset=lambda split: None,
        target_dictionary=words,
        get_batch_iterator=lambda data, max_tokens: iterator,
    )
    schedule = SimpleNamespace(generated=3, max_tokens=10)
    chosen = speed.test_batches(SimpleNamespace(task="mt", schedule=schedule), task)
    assert [int(b["net_input"]["src_tokens"][0, 0]) for b in chosen] == [2, 6, 10]
    # Of a language model, beginnings in which no sentence ends.
    first, *_ = speed.test_batches(SimpleNamespace(task="lm", schedule=schedule), task)
    tokens = first["net_input"]["src_tokens"]
    assert tokens.shape == (2, 16) and (tokens == 3).all()
    assert first["net_input"]["src_lengths"].tolist() == [16, 16]


def test_batches_of_training_are_the_first_of_a_training():
    asked = {}

    def iterator(data, **options):
        asked.update(options)
        return SimpleNamespace(next_epoch_itr=lambda shuffle: list("adcb" if shuffle else "abcd"))

    task = SimpleNamespace(
        load_dataset=lambda split: asked.update(split=split),
        dataset=lambda split: None,
        get_batch_iterator=iterator,
    )
    schedule = SimpleNamespace(batches=2, max_tokens=10)
    args = SimpleNamespace(task="mt", schedule=schedule)
    assert speed.training_batches(args, task) == ["a", "d"]
    assert (asked["split"], asked["max_tokens"], asked["max_positions"]) == ("train", 10, (10, 10))


def test_what_is_measured_is_the_trained_model(tmp_path, monkeypatch):
    args = parse(["--systems", "talkconv"])
    data = dictionaries(tmp_path / "bin", args.languages, 40)
    words = training_words(args, data, args.systems["talkconv"])
    cfg, task = configure(words)
    trained = build_model(cfg.model, task)
    torch.save({"model": trained.state_dict(), "args": None}, tmp_path / "averaged.pt")
    measured = []
    monkeypatch.setattr(speed, "build_generator", lambda model, *_, **__: measured.append(model))
    speed.build_measured(args, words, tmp_path / "averaged.pt")
    (model,) = measured
    expected = trained.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())

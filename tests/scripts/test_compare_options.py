"""scripts/compare.sh: the options and systems that it takes, and the models' sizes."""

import os
import shutil

import pytest
import torch
from comparisons import dictionaries, refusal

pytest.importorskip("fairseq")

from fairseq import tasks

from pipeline.common import fairseq, systems
from pipeline.common.command import BadInput
from pipeline.common.fairseq import CPU_ENVIRONMENT
from pipeline.common.models import build_model, parse_words
from pipeline.common.systems import read_systems, words
from pipeline.compare import sweep
from pipeline.compare.flags import evaluation_words, training_flags, training_words
from pipeline.compare.options import parse

# --- Sizes ---


@pytest.mark.parametrize(
    "preset, task",
    [
        ("cpu", "mt"), ("cpu", "lm"), ("cpu", "summ"), ("gpu", "mt"), ("gpu", "lm"),
        ("cpu_small", "mt"), ("cpu_small", "lm"),
    ],
)  # fmt: skip
def test_parameters_are_within_two_percent(tmp_path, preset, task):
    options = ["--preset", preset, "--task", task, "--data", str(tmp_path)]
    args = parse(options)
    data = dictionaries(tmp_path / "bin", args.languages, 3992)
    counts, ablations = {}, read_systems(f"cpu_{'lm' if task == 'lm' else 'seq2seq'}")["ablations"]
    if preset == "cpu":
        assert not args.systems.keys() & ablations.keys()  # unless they are named
        args.systems |= parse([*options, "--systems", ",".join(ablations)]).systems
    for name, flags in args.systems.items():
        options = parse_words(training_words(args, data, flags))
        with torch.device("meta"):
            model = build_model(options, tasks.setup_task(options))
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    assert max(counts.values()) <= 1.02 * min(counts.values())
    # Long windows have a peer that sees as far.
    assert ("lightconv_wide" in counts) == ("talkconv_plus_wide" in counts)
    if preset == "cpu_small":
        assert len(counts) >= 3 and max(counts.values()) < 1.02e6
    else:
        assert {"talkconv", "transformer", "lightconv", "dynamicconv"} <= counts.keys()


# --- What is refused ---


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--systems", "talkconv,rnn"], "--systems: expected some of talkconv,"),
        (["--systems", "talkconv,talkconv"], "--systems: expected different values, got talkconv,"),
        (["--warmup", "200,200"], "--warmup: expected different values, got 200,200"),
        (["--task", "lm", "--systems", "convs2s"], "--systems: expected some of"),
        (["--lr", "1e-3,much"], "--lr: expected positive numbers or best, got '1e-3,much'"),
        (["--out", "run_12:30"], "--out: expected a path without ':', got"),
        (["--lr", "0"], "--lr: expected positive numbers"),
        (["--lr", "best,1e-3"], "--lr: expected positive numbers or best, got 'best,1e-3'"),
        (["--preset", "gpu", "--lr", "best"], "--lr: expected numbers for talkconv, whose best"),
        (["--lr", "nan"], "--lr: expected positive numbers"),
        (["--task", "summ"], "--data: expected a folder"),
        (["--task", "summ", "--data", "nowhere", "--systems", "convs2s"], "--systems: expected"),
        (["--target-lang", "fr"], "train.fr: no such file"),
        (["--data", "nowhere"], "train.es: no such file"),
        (["--task", "lm", "--source-lang", "es"], "--source-lang: expected none"),
        (["--preset", "cpu_long", "--task", "summ"], "--preset: expected cpu with --task summ"),
        (["--preset", "cpu_small", "--task", "summ"], "--preset: expected cpu with --task summ"),
        (["--preset", "cpu_small", "--systems", "talkconv"], "--systems: expected some of talk"),
        (["--warmup", "400,1600"], "--warmup: expected less than 1600 updates, got 1600"),
        (["--warmup", "0"], "--warmup: expected a whole number of at least 1, got 0"),
        (["--tokens", "512"], "--tokens: expected none without --task lm"),
        (
            ["--task", "lm", "--tokens", "64"],
            "--tokens: expected a whole number of at least 65, got 64",
        ),
        (["--task", "lm", "--tokens", "1025"], "--tokens: expected at most a batch of 1024"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, capsys, arguments, expected):
    assert expected in refusal(capsys, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "option, value", [("--seeds", 0), ("--updates", -1), ("--turns", 0), ("--jobs", 0)]
)
def test_numbers_that_cannot_be_used(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        sweep.main([f"{option}={value}", "--out", str(tmp_path / "run")])
    expected = f"{option}: expected a whole number of at least 1, got {value}"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_blocks_of_another_length():
    args = parse(["--task", "lm", "--tokens", "1024"])
    model = args.systems["talkconv_plus_wide"]
    for words_of_a_command in (
        training_words(args, "bin", model),
        evaluation_words(args, "bin", model, "averaged.pt", None),
    ):
        at = words_of_a_command.index("--tokens-per-sample")
        assert words_of_a_command[at + 1] == "1024"


def test_the_long_preset_has_rates_and_dropout_of_its_own(tmp_path):
    args = parse(["--preset", "cpu_long"])
    assert args.out.name == "mt_cpu_long" and args.device == "cpu"
    assert args.rates.keys() == args.systems.keys() == parse([]).systems.keys()
    assert (args.rates["talkconv_plus"], args.rates["transformer"]) == (["4e-3"], ["1e-3"])
    rates = parse(["--preset", "cpu_long", "--lr", "1, 2"]).rates
    assert set(map(tuple, rates.values())) == {("1", "2")}
    for task, preset, updates, dropout in (
        ("mt", "cpu", 1600, 0.1), ("mt", "cpu_long", 8000, 0.2),
        ("lm", "cpu", 1200, 0), ("lm", "cpu_long", 6000, 0.2),
    ):  # fmt: skip
        args = parse(["--preset", preset, "--task", task])
        data = dictionaries(tmp_path / f"{task}_{preset}", args.languages, 3992)
        for flags in args.systems.values():
            model = parse_words(training_words(args, data, flags))
            assert (model.max_update, model.dropout) == (updates, dropout)


@pytest.mark.parametrize("preset, task", [("cpu", "mt"), ("cpu", "summ"), ("cpu", "lm"),
    ("cpu_long", "mt"), ("cpu_long", "lm"), ("cpu_small", "mt"), ("cpu_small", "lm")])  # fmt: skip
def test_the_best_rates_are_of_systems_that_the_preset_has(preset, task):
    options = ["--preset", preset, "--task", task, "--data", "mine"]
    best = {name: [rate] for name, rate in parse(options).schedule.best.items()}
    assert parse([*options, "--lr", "best", "--systems", ",".join(best)]).rates == best
    if preset != "cpu_small":
        assert parse([*options, "--lr", "best"]).rates.items() <= best.items()


def test_a_gpu_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "run"
    assert "without a GPU" in refusal(capsys, "--preset", "gpu", "--out", out)
    assert not out.exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis").write_text("mine")
    assert "not of a comparison" in refusal(capsys, "--out", tmp_path, "--restart")
    assert "expected a folder" in refusal(capsys, "--out", tmp_path / "thesis")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


# --- One's own systems ---


MINE = """
  mine:
    <<: *talk
    arch: talkconv
    encoder-max-left: 7,7,7
    decoder-max-left: 7,7,7
    warmup-updates: 3
"""


def test_systems_of_ones_own(tmp_path, monkeypatch):
    folder = shutil.copytree(systems.FOLDER, tmp_path / "verses")
    path = folder / "cpu_seq2seq.yaml"
    path.write_text(path.read_text().replace("\nsystems:", "\nsystems:" + MINE.rstrip()))
    monkeypatch.setattr(systems, "FOLDER", folder)
    args = parse(["--systems", "mine,talkconv"])
    assert list(args.systems) == ["mine", "talkconv"]
    assert "mine" in parse([]).systems
    with pytest.raises(BadInput, match="--lr: expected numbers for mine"):
        parse(["--preset", "cpu_long", "--systems", "mine"])
    data = dictionaries(tmp_path / "bin", args.languages, 3992)
    # A system's flags replace what all share.
    mine, other = (
        parse_words(training_words(args, data, flags, "2e-3")) for flags in args.systems.values()
    )
    assert (mine.warmup_updates, other.warmup_updates) == (3, 400)
    assert mine.encoder_max_left == "7,7,7" and mine.lr == other.lr == [2e-3]


VARIANT = """\
from fairseq.models import register_model
from talk_fairseq.models.talkconv import TaLKConvConfig, TaLKConvModel

@register_model("compared_variant", dataclass=TaLKConvConfig)
class Variant(TaLKConvModel):
    pass
"""


def test_a_system_of_ones_own_user_directory(tmp_path):
    user_dir = tmp_path / "compared_variant"
    user_dir.mkdir()
    (user_dir / "__init__.py").write_text(VARIANT)
    args = parse(["--systems", "talkconv_plus"])
    system = args.systems["talkconv_plus"] | {"arch": "compared_variant", "user-dir": user_dir}
    data = dictionaries(tmp_path / "bin", args.languages, 3992)
    assert parse_words(training_words(args, data, system)).arch == "compared_variant"
    words = evaluation_words(args, data, system, "averaged.pt", "generated")
    assert words[words.index("--user-dir") + 1] == str(user_dir)


def test_flags_in_words():
    flags = {"cpu": True, "fp16": False, "dropout": 0, "user-dir": None, "lr": "1e-3"}
    assert words(flags) == ["--cpu", "--dropout", "0", "--lr", "1e-3"]


@pytest.mark.parametrize(
    "task, flags",
    [
        ("lm", {"gen-subset": "test"}),
        ("mt", {"gen-subset": "test", "remove-bpe": "sentencepiece", "beam": 5, "lenpen": 1}),
        (
            "summ",
            {"gen-subset": "test", "remove-bpe": "sentencepiece", "beam": 5, "lenpen": 1}
            | {"max-len-b": 100, "no-repeat-ngram-size": 3},
        ),
    ],
)
def test_the_test_set_is_what_is_scored(task, flags):
    args = parse(["--task", task, "--data", "mine"])
    given = evaluation_words(args, "bin", {}, "averaged.pt", "generated")
    assert {flag: given[given.index(f"--{flag}") + 1] for flag in flags} == {
        flag: str(value) for flag, value in flags.items()
    }
    assert sum(word in ("--beam", "--lenpen", "--no-repeat-ngram-size") for word in given) == (
        len(flags.keys() & {"beam", "lenpen", "no-repeat-ngram-size"})
    )


@pytest.mark.parametrize("preset, task", [("cpu", "mt"), ("cpu", "lm"), ("gpu", "mt")])
def test_what_is_averaged_is_saved_and_kept(preset, task):
    args = parse(["--preset", preset, "--task", task])
    flags = training_flags(args, {}, "1e-3")
    count = args.schedule.averaged
    assert count > 1 and flags["keep-interval-updates"] == count
    assert args.updates // flags["save-interval-updates"] >= count


# --- The command's own process ---


def test_a_process_begins_anew_where_its_environment_does_not_suit(monkeypatch):
    """Threads and memory of a process are as its environment was when it began."""
    begun = []
    monkeypatch.setattr(fairseq.os, "execve", lambda *command: begun.append(command))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    fairseq.set_environment("cpu")
    [(program, command, environment)] = begun
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and CPU_ENVIRONMENT.items() <= (
        environment.items()
    )
    assert environment["TALK_MATMUL_PRECISION"] == "medium"
    assert fairseq.Commands("cuda").environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert fairseq.Commands("cpu").environment["CUDA_VISIBLE_DEVICES"] == ""
    fairseq.set_environment("cuda")
    assert begun[1][2] == {**os.environ, "CUDA_VISIBLE_DEVICES": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fairseq.set_environment("cpu")
    assert len(begun) == 2
    monkeypatch.setenv("TALK_MATMUL_PRECISION", "highest")  # the caller's stays
    fairseq.set_environment("cpu")
    assert len(begun) == 2 and fairseq.environment_of("cpu")["TALK_MATMUL_PRECISION"] == "highest"

"""scripts/compare.sh: sizes, tables and plots, refusals, and a whole comparison that is killed."""

import fcntl
import json
import math
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from quickstart_runs import TEST_VERSES, kill_group, write_verses

from conftest import ROOT

pytest.importorskip("fairseq")


from pipeline.compare import comparison as compare

REAL_RUN = compare.Comparison.run


@pytest.fixture
def verses(tmp_path):
    return write_verses(tmp_path / "verses", ("es", "en"))


def dictionaries(folder, languages, words):
    """A folder with dictionaries for the tasks, as of binarised data."""
    folder.mkdir()
    for name in [f"dict.{language}.txt" for language in languages] + ["dict.txt"]:
        (folder / name).write_text("".join(f"word{n} 1\n" for n in range(words)))
    return folder


# --- Sizes ---


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
@pytest.mark.parametrize("task", ["mt", "lm", "summ"])
def test_parameters_are_within_five_percent(tmp_path, preset, task):
    if (preset, task) == ("gpu", "summ"):
        pytest.skip("the models of mt, with fewer positions: as on the CPU")
    args = compare.parse(["--preset", preset, "--task", task, "--data", str(tmp_path)])
    data = dictionaries(tmp_path / "bin", args.languages, 3992)
    target = compare.reference_size(args, data)
    counts = {name: compare.fit(args, data, name, target)[1] for name in args.systems}
    assert max(counts.values()) <= 1.02 * min(counts.values())  # 1.05 is asked for
    assert counts[compare.REFERENCE] == target
    assert {"talkconv", "transformer", "lightconv", "dynamicconv"} <= counts.keys()


def test_sizes_that_differ_are_an_error():
    compare.check_sizes({"a": 100, "b": 105})
    with pytest.raises(ValueError, match=r"within 5%, got a 100, b 106"):
        compare.check_sizes({"a": 100, "b": 106})


# --- What is refused ---


def refusal(capsys, *arguments):
    """The one line with which a command stops that must not start."""
    assert compare.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--systems", "talkconv,rnn"], "--systems: expected some of talkconv,"),
        (["--task", "lm", "--systems", "convs2s"], "--systems: expected some of"),
        (["--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["--updates", "-1"], "--updates: expected at least 1"),
        (["--turns", "0"], "--turns: expected at least 1"),
        (["--jobs", "0"], "--jobs: expected at least 1"),
        (["--lr", "1e-3,much"], "--lr: expected positive numbers, got '1e-3,much'"),
        (["--lr", "0"], "--lr: expected positive numbers"),
        (["--lr", "nan"], "--lr: expected positive numbers"),
        (["--task", "summ"], "--data: expected a folder"),
        (["--task", "summ", "--data", "nowhere", "--systems", "convs2s"], "--systems: expected"),
        (["--target-lang", "fr"], "train.fr: no such file"),
        (["--data", "nowhere"], "train.es: no such file"),
        (["--task", "lm", "--source-lang", "es"], "--source-lang: expected none"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, capsys, arguments, expected):
    assert expected in refusal(capsys, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


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


# --- A comparison whose commands are played ---


class Played:
    """In place of fairseq: writes what its commands write, and notes what was run."""

    def __init__(self, monkeypatch, verses):
        self.ran, self.stop_at, self.broken, self.nan = [], None, None, None
        self.verses, self.why = verses, "RuntimeError: no"
        monkeypatch.setattr(compare.Comparison, "run", lambda *a, **k: self.run(*a, **k))
        monkeypatch.setattr(compare.Comparison, "check_systems", self.check_systems)
        monkeypatch.setattr(compare, "average", lambda paths, to: to.write_text(str(paths)))
        monkeypatch.setattr(compare, "measure_speeds", self.measure)

    @staticmethod
    def check_systems(comparison):
        comparison.step += 1
        comparison.systems = {
            name: {"options": f"--arch {name}", "parameters": 1000 + len(name)}
            for name in comparison.args.systems
        }

    def run(self, comparison, command, log, watch=None):
        command = [str(word) for word in command]
        name = os.path.basename(command[0])
        if name == "fairseq-train":
            system = command[command.index("--arch") + 1]
            name, rate = f"train {system}", command[command.index("--lr") + 1]
            checkpoints = Path(command[command.index("--save-dir") + 1])
            if rate != "2e-3":
                name += f" at {rate}"
            self.restored = [word for word in command if word.endswith("_2.pt")]
        self.ran.append(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if name == self.broken:
            raise compare.Failed(f"fairseq-train failed; its log ends with\n{self.why}")
        if command[1:] and command[1].endswith("prepare_corpus.py"):
            folder = comparison.corpus.with_name("corpus.partial")
            folder.mkdir()
            for split in ("valid", "test"):
                (folder / f"{split}.en").write_text((self.verses / f"{split}.en").read_text())
        elif name == "fairseq-preprocess":
            comparison.data.with_name("binarised.partial").mkdir()
        elif name.startswith("train"):
            checkpoints.mkdir(parents=True, exist_ok=True)
            (checkpoints / "checkpoint_1_2.pt").touch()
            if name == self.stop_at:
                raise KeyboardInterrupt
            (checkpoints / "checkpoint_1_4.pt").touch()
            with open(log, "a") as file:
                for updates in (2, 4):
                    loss = 9 - updates + abs(2 - 1e3 * float(rate))
                    file.write(valid_line(updates, math.nan if name == self.nan else loss))
        else:
            folder = next(word for word in command if word.endswith("generated.partial"))
            os.mkdir(folder)
            lines = (self.verses / "test.en").read_text().splitlines()
            if "transformer" in folder:
                lines = [line.replace("the", "a") for line in lines]
            with open(f"{folder}/generate-test.txt", "w") as file:
                file.writelines(f"D-{n}\t-0.1\t{line}\n" for n, line in enumerate(lines))

    def measure(self, args, words, checkpoints):
        self.ran.append("measure")
        if self.broken == "measure":
            raise AssertionError("sentences lengths")
        assert list(words) == list(checkpoints) and all(
            path.exists() for path in checkpoints.values()
        )
        return {name: speed(0.5 if name == "talkconv" else 1.0, args.turns) for name in words}


def valid_line(updates, loss):
    """What fairseq logs of a validation."""
    return (
        f"2026-01-01 00:00:0{updates} | INFO | valid | epoch 001 | valid on 'valid' subset | "
        f"loss {loss} | ppl {2**loss} | num_updates {updates}\n"
    )


def speed(seconds, turns=2):
    return {
        "training": {"turns": [seconds] * turns, "seconds": seconds, "memory": 2**20},
        "generation": {"turns": [2 * seconds, seconds], "seconds": seconds, "memory": None},
        "seconds_per_update": seconds,
        "training_tokens_per_second": 800 / seconds,
        "generated_sentences_per_second": 10 / seconds,
    }


@pytest.fixture
def played(monkeypatch, verses):
    return Played(monkeypatch, verses)


def arguments(verses, out, *others):
    return [
        "--data", str(verses), "--out", str(out), "--systems", "talkconv,transformer",
        "--updates", "4", "--lr", "2e-3", "--jobs", "1", *others,
    ]  # fmt: skip


def test_interrupted_it_goes_on_where_it_was(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.stop_at = "train transformer"
    assert compare.main(arguments(verses, out)) == 130
    assert played.ran[2:] == ["train talkconv", "train transformer"]
    assert not (out / "results.json").exists()

    played.stop_at, played.ran = None, []
    assert compare.main(arguments(verses, out)) == 0
    generated = ["fairseq-generate"] * 2
    assert played.ran == ["train transformer", *generated, "measure"]
    assert len(played.restored) == 1  # from its last checkpoint
    assert not list(out.rglob("*.partial")) and not list(out.rglob("checkpoint_*.pt"))

    # A system more needs its own training, and all speeds from one measurement.
    played.ran = []
    assert compare.main(arguments(verses, out, "--systems", "talkconv,transformer,lightconv")) == 0
    assert played.ran == ["train lightconv", "fairseq-generate", "measure"]
    printed = capsys.readouterr().out
    assert "6 of 10: training lightconv, seed 1, at 2e-3" in printed

    # Other settings are refused; a restart replaces them, and leaves alone what is not its own.
    (out / "notes").write_text("mine")
    assert "updates: 4, not 5" in refusal(capsys, *arguments(verses, out), "--updates", 5)
    assert compare.main(arguments(verses, out, "--updates", "5", "--restart")) == 0
    assert not (out / "lightconv").exists() and (out / "notes").read_text() == "mine"


def test_each_system_has_its_best_rate_in_validation(played, verses, tmp_path):
    out = tmp_path / "run"
    options = arguments(verses, out, "--lr", "1e-3,2e-3,5e-3")
    played.broken = "train transformer"  # at 2e-3, the best for both if it did not diverge
    played.why = "FloatingPointError: gradients are Nan/Inf"
    assert compare.main(options) == 0
    assert played.ran[2:] == [
        "train talkconv at 1e-3", "train talkconv", "train talkconv at 5e-3",
        "train transformer at 1e-3", "train transformer", "train transformer at 5e-3",
        "fairseq-generate", "fairseq-generate", "measure",
    ]  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    rates = results["systems"]["transformer"]["rates"]
    assert rates == {"chosen": "1e-3", "validation": {"1e-3": 6, "2e-3": None, "5e-3": 8}}
    assert results["systems"]["talkconv"]["rates"]["chosen"] == "2e-3"
    assert results["systems"]["talkconv"]["seeds"]["1"]["validation"][-1]["loss"] == 5
    table = (out / "compare.md").read_text()
    assert "talkconv 2e-3, transformer 1e-3." in table and "transformer diverged at 2e-3" in table
    assert (out / "transformer/1e-3/1/generated").exists()

    # Another seed has the chosen rate; what diverged is not tried again.
    played.broken, played.ran = None, []
    assert compare.main([*options, "--seeds", "2"]) == 0
    assert played.ran == [
        "train talkconv", "train transformer at 1e-3", "fairseq-generate", "fairseq-generate"
    ]  # fmt: skip


def test_a_rate_that_failed_for_another_reason_is_no_choice(played, verses, tmp_path, capsys):
    options = arguments(verses, tmp_path / "run", "--lr", "1e-3,2e-3")
    played.broken = "train transformer"
    assert compare.main(options) == 1
    assert "failed: transformer (seed 1)" in capsys.readouterr().err

    played.broken, played.ran = None, []
    assert compare.main(options) == 0
    assert played.ran == ["train transformer", "fairseq-generate", "measure"]


def test_a_later_seed_that_diverges_does_not_count(played, verses, tmp_path):
    out = tmp_path / "run"
    assert compare.main(arguments(verses, out)) == 0
    played.broken, played.why = "train transformer", "FloatingPointError: gradients are Nan/Inf"
    assert compare.main(arguments(verses, out, "--seeds", "2")) == 0
    systems = json.loads((out / "results.json").read_text())["systems"]
    assert list(systems["transformer"]["seeds"]) == ["1"] and systems["transformer"]["score"] > 1
    assert list(systems["talkconv"]["seeds"]) == ["1", "2"]
    assert "transformer diverged with seed 2" in (out / "compare.md").read_text()
    played.broken, played.ran = None, []
    assert compare.main(arguments(verses, out, "--seeds", "2")) == 0 and played.ran == []


def test_a_rate_that_ends_in_nan_is_no_choice(played, verses, tmp_path):
    out = tmp_path / "run"
    played.nan = "train talkconv at 1e-3"
    assert compare.main(arguments(verses, out, "--lr", "1e-3,2e-3,5e-3")) == 0
    rates = json.loads((out / "results.json").read_text())["systems"]["talkconv"]["rates"]
    assert rates == {"chosen": "2e-3", "validation": {"1e-3": None, "2e-3": 5, "5e-3": 8}}
    assert "talkconv diverged at 1e-3." in (out / "compare.md").read_text()


def test_speeds_are_those_of_the_chosen_rate(played, verses, tmp_path):
    out = tmp_path / "run"
    assert compare.main(arguments(verses, out)) == 0
    speeds = json.loads((out / "speeds.json").read_text())
    assert {row["rate"] for row in speeds.values()} == {"2e-3"}
    speeds["talkconv"]["rate"] = "1e-3"
    (out / "speeds.json").write_text(json.dumps(speeds))
    played.ran = []
    assert compare.main(arguments(verses, out)) == 0
    assert played.ran == ["measure"]


def test_a_system_that_fails_at_every_rate(played, verses, tmp_path, capsys):
    played.broken, played.why = "train talkconv at 0.001", "FloatingPointError"
    options = arguments(verses, tmp_path / "run", "--lr", "1e-3,0.001", "--seeds", "2")
    assert compare.main(options) == 1
    assert "failed: talkconv (seed 1)" in capsys.readouterr().err
    assert "diverged at every" in (tmp_path / "run/compare.md").read_text()
    # 0.001 is the same rate, of which the last spelling counts.
    assert played.ran.count("train transformer at 0.001") == 2
    assert played.ran.count("train talkconv at 0.001") == 1  # its other seed has no rate


def test_trainings_side_by_side(played, verses, tmp_path, monkeypatch):
    both_there = threading.Barrier(2, timeout=30)
    run = played.run

    def meet(comparison, command, *others, **options):
        if "fairseq-train" in str(command[0]):
            both_there.wait()
        run(comparison, command, *others, **options)

    monkeypatch.setattr(played, "run", meet)
    assert compare.main(arguments(verses, tmp_path / "run", "--jobs", "2")) == 0


def test_what_stops_one_training_stops_those_beside_it(played, verses, tmp_path, monkeypatch):
    """In the thread of each a command runs that would take a minute."""

    class Sleep:
        def __enter__(self):
            return self

        def __init__(self, *_, **__):
            self.process = subprocess_popen(["sleep", "60"])
            self.stdout, self.returncode = self, None

        def __exit__(self, *_):
            self.returncode = self.process.wait()

        def __iter__(self):
            self.process.wait()
            return iter(())

        def terminate(self):
            self.process.terminate()

    subprocess_popen, run = subprocess.Popen, REAL_RUN

    def start(comparison, command, log, watch=None):
        if "fairseq-train" not in str(command[0]):
            return played.run(comparison, command, log, watch)
        if "transformer" in command:
            while not comparison.running:
                time.sleep(0.01)
            raise KeyboardInterrupt
        monkeypatch.setattr(compare.subprocess, "Popen", Sleep)
        return run(comparison, command, log, watch)

    monkeypatch.setattr(compare.Comparison, "run", start)
    begun = time.monotonic()
    assert compare.main(arguments(verses, tmp_path / "run", "--jobs", "2")) == 130
    assert time.monotonic() - begun < 30


def test_other_options_of_a_system_that_is_there_are_refused(
    played, verses, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "run"
    assert compare.main(arguments(verses, out)) == 0
    capsys.readouterr()
    monkeypatch.setitem(compare.SYSTEMS["cpu", "seq2seq"], "transformer", "--arch another")
    assert "(transformer: --arch transformer" in refusal(capsys, *arguments(verses, out))


def test_two_at_once_in_one_folder(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another comparison, or a training" in refusal(capsys, *arguments(verses, out))
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_a_failed_training_does_not_stop_the_others(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.broken = "train talkconv"
    assert compare.main(arguments(verses, out)) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: no" in printed.out and "failed: talkconv (seed 1)" in printed.err
    results = json.loads((out / "results.json").read_text())
    assert "failed" in results["systems"]["talkconv"]["error"]
    assert results["systems"]["transformer"]["score"] > 1

    played.broken = None
    assert compare.main(arguments(verses, out)) == 0
    assert "error" not in json.loads((out / "results.json").read_text())["systems"]["talkconv"]


def test_scores_outlive_a_failed_measurement_of_speed(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.broken = "measure"
    assert compare.main(arguments(verses, out)) == 1
    assert "speeds: AssertionError: sentences lengths" in capsys.readouterr().out
    table = (out / "compare.md").read_text()
    assert "100.00" in table and table.count("not measured") == 4
    assert not list(out.glob("*.png"))

    played.broken, played.ran = None, []
    assert compare.main(arguments(verses, out)) == 0
    assert played.ran == ["measure"] and "not measured" not in (out / "compare.md").read_text()
    assert len(list(out.glob("*.png"))) == 2
    # Once is enough, but for another number of turns.
    for turns, ran in ((5, []), (3, ["measure"])):
        played.ran = []
        assert compare.main(arguments(verses, out, "--turns", str(turns))) == 0
        assert played.ran == ran


def test_a_missing_seed_is_not_averaged_away(played, verses, tmp_path):
    out = tmp_path / "run"
    assert compare.main(arguments(verses, out)) == 0
    played.broken = "train talkconv"  # only its second seed is still to be trained
    assert compare.main(arguments(verses, out, "--seeds", "2")) == 1
    lines = (out / "compare.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith("| talkconv ")]
    assert "seed 2: fairseq-train failed" in row and "100.00" not in row


def test_scores_are_those_of_sacrebleu(played, verses, tmp_path):
    from sacrebleu.metrics import BLEU

    assert compare.main(arguments(verses, tmp_path / "run")) == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    talk, transformer = (results["systems"][name] for name in ("talkconv", "transformer"))
    references = (verses / "test.en").read_text().splitlines()
    hypotheses = [line.replace("the", "a") for line in references]
    assert transformer["score"] == BLEU().corpus_score(hypotheses, [references]).score < 99
    assert talk["score"] == pytest.approx(100)
    assert transformer["p"] < 0.05 and talk["p"] is None
    low, high = transformer["interval"]
    assert low < transformer["score"] < high
    assert "nrefs:1|bs:1000|" in results["signature"] and results["baseline"] == "talkconv"
    table = (tmp_path / "run/compare.md").read_text()
    assert "100.00" in table and f"{TEST_VERSES} sentences" in table


def test_a_system_that_cannot_run_has_a_row_that_says_why(tmp_path, monkeypatch, verses):
    monkeypatch.setitem(compare.SYSTEMS["cpu", "seq2seq"], "talkconv_plus", "--arch none_such")
    monkeypatch.setattr(compare, "reference_size", lambda *_: 1000)
    options = ["--data", str(verses), "--out", str(tmp_path / "run"), "--systems", "talkconv_plus"]
    args = compare.parse(options)
    comparison = compare.Comparison(args, compare.check_input(args))
    comparison.check_systems()
    assert not list(comparison.runs())
    results = synthetic()
    results["systems"] |= {"talkconv_plus": {**comparison.systems["talkconv_plus"], "seeds": {}}}
    assert cells(results, "talkconv_plus")[1].endswith(
        "expected one that fairseq knows, got none_such"
    )


# --- Table and plots ---


def synthetic(task="mt", seeds=2):
    """Results of two systems; TaLK is twice as fast and has the second best score."""
    systems = {}
    for number, (name, seconds) in enumerate((("talkconv", 0.5), ("transformer", 1.0))):
        validation = [{"updates": n, "loss": 9 - n / 100 + number, "ppl": 40} for n in (100, 200)]
        scores = {compare.SCORES[task]: 20.0 + number, "perplexity_per_word": 80}
        scores |= {"interval": [19, 21 + number], "p": 0.04 if number else None}
        systems[name] = {
            "parameters": 4_600_000 + number,
            "score": 20.5 + number,
            "interval": [19, 21 + number],
            "p": 0.04 if number else None,
            "perplexity_per_word": 80.0,
            "rouge_1": 31.0,
            "rouge_2": 11.0,
            "seeds": {
                str(seed): {**scores, "validation": validation} for seed in range(1, seeds + 1)
            },
            "speed": speed(seconds),
        }
    systems["broken"] = {"seeds": {}, "error": "ImportError: no such thing", "speed": None}
    results = {"task": task, "systems": systems, "updates": 200, "test": {"sentences": 1053}}
    return results | {
        "machine": "a machine",
        "signature": "nrefs:1",
        "baseline": "talkconv",
        "preset": "cpu",
    }


def cells(results, name):
    (line,) = (line for line in compare.table(results) if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_table():
    results = synthetic()
    assert cells(results, "talkconv") == [
        "talkconv", "4,600,000", "20.50 ± 0.00", "19.00 to 21.00", "", "1,600", "", "20.00",
        "", "1",
    ]  # fmt: skip
    # TaLK is faster by the median of the turns' ratios: 2 and 2.
    assert cells(results, "transformer")[4:] == ["0.040", "800", "2.00x", "10.00", "2.00x", "1"]
    assert cells(results, "broken")[1].startswith("ImportError")
    widths = {len(line) for line in compare.table(results) if line.startswith("|")}
    assert len(widths) == 1
    notes = "\n".join(compare.table(results))
    assert "2 seeds" in notes and "the largest of the seeds'" in notes and "1,053 sent" in notes


def test_the_tables_of_the_other_tasks():
    models = synthetic("lm", seeds=1)
    models["unigram"] = {"perplexity_per_token": 459.06, "perplexity_per_word": 2992.7}
    assert cells(models, "talkconv")[2:4] == ["20.50", "80.0"]
    assert cells(models, "unigram")[2:4] == ["459.06", "2,992.7"]
    summaries = synthetic("summ", seeds=1)
    summaries["lead"] = {"words": 8, "rouge_1": 20.0, "rouge_2": 5.0, "rouge_l": 18.0}
    assert cells(summaries, "talkconv")[2:5] == ["31.00", "11.00", "20.50"]
    assert cells(summaries, "first 8 words")[2:5] == ["20.00", "5.00", "18.00"]


def test_validation_curves_over_updates_and_measured_time():
    figure = compare.validation_figure(synthetic(seeds=1))
    over_updates, over_time = figure.axes[:2]
    assert over_time.get_ylabel() == "" and over_updates.get_ylabel() == "validation loss (base 2)"
    drawn = [line.get_xydata().tolist() for line in over_updates.get_lines()]
    assert drawn == [[[100, 8], [200, 7]], [[100, 9], [200, 8]]]
    # 0.5 and 1 second an update, in minutes from two of them up.
    assert [list(line.get_xdata()) for line in over_time.get_lines()] == [
        pytest.approx([50 / 60, 100 / 60]), pytest.approx([100 / 60, 200 / 60])
    ]  # fmt: skip
    assert figure.axes[-1].get_xlabel() == "minutes: updates x measured seconds an update"


def test_the_score_over_speed():
    figure = compare.speed_figure(synthetic())
    training, generation = figure.axes
    assert [line.get_xydata().tolist() for line in training.get_lines()] == [
        [[1600, 20.5]], [[800, 21.5]]
    ]  # fmt: skip
    assert [line.get_xydata().tolist() for line in generation.get_lines()] == [
        [[20, 20.5]], [[10, 21.5]]
    ]  # fmt: skip
    assert training.get_ylabel() == "sacreBLEU"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["talkconv", "transformer"]


# --- All of it ---


@pytest.mark.slow
@pytest.mark.long
def test_a_comparison_killed_in_training_resumes_where_it_was(verses, tmp_path):
    out = tmp_path / "run"
    command = [
        ROOT / "scripts/compare.sh",
        *arguments(verses, out, "--updates", "20", "--turns", "1"),
    ]
    checkpoints = out / "transformer/2e-3/1/checkpoints"
    with open(tmp_path / "printed", "w") as printed:
        run = subprocess.Popen(command, start_new_session=True, stdout=printed)
        try:
            deadline = time.monotonic() + 600
            while time.monotonic() < deadline and run.poll() is None:
                if list(checkpoints.glob("checkpoint_*_*.pt")):
                    break
                time.sleep(0.1)
        finally:
            kill_group(run)
    reached = max(map(compare.updates_of, compare.numbered(checkpoints)))
    assert reached < 20
    trained = (out / "talkconv/2e-3/1/averaged.pt").stat().st_mtime_ns
    assert not (out / "results.json").exists()

    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "training talkconv" not in done.stdout and "training transformer" in done.stdout
    assert (out / "talkconv/2e-3/1/averaged.pt").stat().st_mtime_ns == trained
    assert f"@ {reached} updates" in (out / "transformer/2e-3/1/train.log").read_text()
    assert not list(out.rglob("*.partial")) and not checkpoints.exists()

    results = json.loads((out / "results.json").read_text())
    counts = [row["parameters"] for row in results["systems"].values()]
    assert max(counts) <= 1.05 * min(counts)
    for row in results["systems"].values():
        assert 0 <= row["score"] < 50
        assert [e["updates"] for e in row["seeds"]["1"]["validation"]] == list(range(1, 21))
        assert row["speed"]["training_tokens_per_second"] > 0
        assert row["speed"]["generated_sentences_per_second"] > 0
    assert f"{TEST_VERSES} sentences" in done.stdout
    for name in ("validation.png", "speed.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    # The second time everything is there.
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "==" not in again.stdout and (out / "compare.md").read_text() in again.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "task, systems",
    [
        ("mt", "talkconv_plus,lightconv,dynamicconv,convs2s"),
        ("lm", "talkconv,talkconv_plus,transformer,lightconv,dynamicconv"),
        ("summ", "talkconv,transformer,dynamicconv"),
    ],
)
def test_each_task_from_start_to_end(tmp_path, task, systems):
    data = write_verses(tmp_path / "text", ("es", "en"))
    if task == "summ":
        for language, name in (("es", "source"), ("en", "target")):
            for path in data.glob(f"*.{language}*"):
                path.rename(data / path.name.replace(f".{language}", f".{name}"))
    out = tmp_path / "run"
    command = [
        ROOT / "scripts/compare.sh", "--task", task, "--systems", systems,
        "--data", data, "--out", out, "--updates", "2", "--turns", "1", "--lr", "1e-3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((out / "results.json").read_text())
    assert ",".join(results["systems"]) == systems
    for name, row in results["systems"].items():
        assert 0 <= row["score"] < math.inf, name
        for speed in ("training_tokens", "generated_sentences"):
            assert row["speed"][f"{speed}_per_second"] > 0, name
    assert compare.TITLES[task] in (out / "compare.md").read_text() or task == "lm"
    assert len(list(out.glob("*.png"))) == 2

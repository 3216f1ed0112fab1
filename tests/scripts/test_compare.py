"""scripts/compare.sh: what it runs and writes, step by step, where the commands are played."""

import fcntl
import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
from comparisons import Played, arguments, refusal, valid_line
from quickstart_runs import TEST_VERSES, write_verses

pytest.importorskip("fairseq")

from pipeline.common import fairseq
from pipeline.common.command import Failed
from pipeline.compare import options, sweep
from pipeline.recipes import average

REAL_RUN = fairseq.Commands.run


@pytest.fixture
def verses(tmp_path):
    return write_verses(tmp_path / "verses", ("es", "en"))


@pytest.fixture
def played(monkeypatch, verses):
    return Played(monkeypatch, verses)


def change_system(monkeypatch, name, flags):
    """Replace some flags of a system of the preset cpu, for this test."""
    preset = options.read_systems("cpu_seq2seq")
    preset["systems"][name] |= flags
    monkeypatch.setattr(options, "read_systems", lambda _: preset)


def test_interrupted_it_goes_on_where_it_was(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.stop_at = "train transformer"
    assert sweep.main(arguments(verses, out)) == 130
    assert played.ran[2:] == ["train talkconv", "train transformer"]
    assert not (out / "results.json").exists()

    played.stop_at, played.ran = None, []
    assert sweep.main(arguments(verses, out)) == 0
    generated = ["fairseq-generate"] * 2
    assert played.ran == ["train transformer", *generated, "measure"]
    assert played.restored == ["checkpoint_1_2.pt", "checkpoint_last.pt"]
    assert not list(out.rglob("*.partial")) and not list(out.rglob("checkpoint_*.pt"))

    # A system more needs its own training, and all speeds from one measurement.
    played.ran = []
    assert sweep.main(arguments(verses, out, "--systems", "talkconv,transformer,lightconv")) == 0
    assert played.ran == ["train lightconv", "fairseq-generate", "measure"]
    printed = capsys.readouterr().out
    assert "5 of 9: training lightconv, seed 1, at 2e-3" in printed
    assert " 75%  batch 3 of 4" in printed  # of the evaluation

    # Other settings are refused; a restart replaces them, and leaves alone what is not its own.
    (out / "notes").write_text("mine")
    assert "updates: 4, not 5" in refusal(capsys, *arguments(verses, out), "--updates", 5)
    assert sweep.main(arguments(verses, out, "--updates", "5", "--restart")) == 0
    assert not (out / "lightconv").exists() and (out / "notes").read_text() == "mine"


def test_each_system_has_its_best_rate_in_validation(played, verses, tmp_path):
    out = tmp_path / "run"
    options = arguments(verses, out, "--lr", "1e-3,2e-3,5e-3")
    played.broken = "train transformer"  # at 2e-3, the best for both if it did not diverge
    played.why = "FloatingPointError: gradients are Nan/Inf"
    assert sweep.main(options) == 0
    assert played.ran[2:] == [
        "train talkconv at 1e-3", "train talkconv", "train talkconv at 5e-3",
        "train transformer at 1e-3", "train transformer", "train transformer at 5e-3",
        "train transformer at 5e-4",  # as the best was the lowest
        "fairseq-generate", "fairseq-generate", "measure",
    ]  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    rates = results["systems"]["transformer"]["rates"]
    losses = {"5e-4": 6.5, "1e-3": 6, "2e-3": None, "5e-3": 8}
    assert rates == {"chosen": "1e-3", "validation": losses}
    assert results["systems"]["talkconv"]["rates"]["chosen"] == "2e-3"
    assert results["systems"]["talkconv"]["seeds"]["1"]["validation"][-1]["loss"] == 5
    table = (out / "compare.md").read_text()
    assert "talkconv 2e-3 of 1e-3, 2e-3, 5e-3; transformer 1e-3 of 5e-4, 1e-3, 2e-3" in table
    assert "transformer diverged at 2e-3" in table
    assert (out / "transformer/1e-3/1/generated").exists()

    # Another seed has the chosen rate; what diverged is not tried again.
    played.broken, played.ran = None, []
    assert sweep.main([*options, "--seeds", "2"]) == 0
    assert played.ran == [
        "train talkconv", "train transformer at 1e-3", "fairseq-generate", "fairseq-generate"
    ]  # fmt: skip


def test_a_rate_that_failed_for_another_reason_is_no_choice(played, verses, tmp_path, capsys):
    options = arguments(verses, tmp_path / "run", "--lr", "1e-3,2e-3")
    played.broken = "train transformer"
    assert sweep.main(options) == 1
    assert "failed: transformer (seed 1)" in capsys.readouterr().err

    played.broken, played.ran = None, []
    assert sweep.main(options) == 0
    assert played.ran == [
        "train transformer", "train transformer at 4e-3", "fairseq-generate", "measure"
    ]  # fmt: skip


def test_rates_are_widened_until_the_best_is_inside(played, verses, tmp_path, capsys):
    options = arguments(verses, tmp_path / "run", "--systems", "talkconv", "--lr")
    assert sweep.main([*options, "6e-3,9e-3"]) == 0  # of which 2e-3 would be the best
    tried = [name.rpartition(" ")[2] for name in played.ran if name.startswith("train")]
    assert tried == ["6e-3", "9e-3", "3e-3", "1.5e-3", "7.5e-4"]
    assert "talkconv 1.5e-3 of 7.5e-4, 1.5e-3, 3e-3, 6e-3, 9e-3." in capsys.readouterr().out


def test_rates_are_not_widened_without_end(played, verses, tmp_path, capsys):
    played.nan, played.why = "all", "FloatingPointError: gradients are Nan/Inf"
    options = arguments(verses, tmp_path / "run", "--systems", "talkconv", "--lr", "1e-3,4e-3")
    assert sweep.main(options) == 1
    assert "failed: talkconv (seed 1)" in capsys.readouterr().err
    tried = [name.rpartition(" ")[2] for name in played.ran if name.startswith("train")]
    assert tried == ["1e-3", "4e-3", "5e-4", "2.5e-4", "1.25e-4", "6.25e-5"]


def test_warmups_are_chosen_at_the_best_rate_and_rates_again(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    options = arguments(verses, out, "--systems", "talkconv", "--lr", "1e-3,2e-3,4e-3")
    options += ["--updates", "1000", "--seeds", "2", "--warmup", "500"]
    played.best_warmup = 60
    assert sweep.main(options) == 0
    tried = [name.removeprefix("train talkconv") for name in played.ran if "train" in name]
    first = [" at 1e-3", "", " at 4e-3", " with 500", " with 125", " with 62", " with 31"]
    again = [" at 1e-3 with 62", " at 4e-3 with 62"]
    # The last is of the second seed; 250 is the preset's, at each rate.
    assert tried == [*first, *again, " with 62"]
    row = json.loads((out / "results.json").read_text())["systems"]["talkconv"]
    assert row["rates"]["chosen"] == "2e-3" and row["warmups"]["chosen"] == "62"
    assert (out / "talkconv/2e-3_62/2/generated").exists()
    printed = capsys.readouterr().out
    assert "training talkconv, seed 2, at 2e-3, warm-up 62" in printed
    assert "15 of 15: measuring" in printed
    assert "talkconv 2e-3 of 1e-3, 2e-3, 4e-3." in printed
    assert "talkconv 62 of 31, 62, 125, 250, 500." in printed

    played.ran = []
    assert sweep.main(options) == 0 and played.ran == []
    capsys.readouterr()
    assert "warmups" in refusal(capsys, *options[:-2])


def test_the_best_rate_of_another_warmup_may_be_another(played, verses, tmp_path, capsys):
    """It is then tried with other warm-ups too, and what has been trained is not trained again."""
    out = tmp_path / "run"
    options = arguments(verses, out, "--systems", "talkconv", "--lr", "1e-3,2e-3,4e-3")
    options += ["--updates", "4000", "--warmup", "3000"]
    played.best_warmup, played.best_rates = 3000, {3000: 3.5e-3}
    assert sweep.main(options) == 0
    tried = [name.removeprefix("train talkconv") for name in played.ran if "train" in name]
    assert tried == [
        " at 1e-3", "", " at 4e-3", " with 3000", " at 1e-3 with 3000", " at 4e-3 with 3000",
        " at 8e-3 with 3000",
    ]  # fmt: skip
    row = json.loads((out / "results.json").read_text())["systems"]["talkconv"]
    assert row["rates"]["chosen"] == "4e-3" and list(row["rates"]["validation"]) == [
        "1e-3", "2e-3", "4e-3", "8e-3"
    ]  # fmt: skip
    assert row["warmups"]["chosen"] == "3000" and (out / "talkconv/4e-3_3000/1/generated").exists()


def test_rates_between_are_tried_with_another_warmup_too(played, verses, tmp_path):
    """Widened twice, the best rate is far from those that are listed."""
    out = tmp_path / "run"
    options = arguments(verses, out, "--systems", "talkconv", "--lr", "1e-3,2e-3")
    options += ["--updates", "4000", "--warmup", "3000"]
    played.best_warmup, played.best_rates = 3000, {400: 7e-3, 3000: 5e-3}
    assert sweep.main(options) == 0
    row = json.loads((out / "results.json").read_text())["systems"]["talkconv"]
    assert list(row["points"])[:5] == ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2"]
    assert list(row["rates"]["validation"]) == ["1e-3", "2e-3", "4e-3", "8e-3"]
    assert row["rates"]["chosen"] == "4e-3"


def test_a_warmup_can_diverge_or_fail(played, verses, tmp_path, capsys):
    options = arguments(verses, tmp_path / "run", "--updates", "100", "--warmup", "25,50")
    played.broken, played.why = "train talkconv with 50", "FloatingPointError: NaN"
    assert sweep.main(options) == 0
    assert "talkconv diverged at 2e-3 with a warm-up of 50." in capsys.readouterr().out

    played.broken, played.nan = None, "all"
    options = arguments(verses, tmp_path / "nan", "--updates", "100", "--warmup", "50")
    assert sweep.main(options) == 1  # no rate, so no warm-up either
    assert "diverged at every learning rate" in (tmp_path / "nan/results.json").read_text()
    played.nan = None
    played.broken, played.why = "train transformer with 20", "RuntimeError: no"
    options = arguments(verses, tmp_path / "other", "--updates", "100", "--warmup", "20,50")
    assert sweep.main(options) == 1
    assert "failed: transformer (seed 1)" in capsys.readouterr().err


def test_a_later_seed_that_diverges_does_not_count(played, verses, tmp_path):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    played.broken, played.why = "train transformer", "FloatingPointError: gradients are Nan/Inf"
    assert sweep.main(arguments(verses, out, "--seeds", "2")) == 0
    systems = json.loads((out / "results.json").read_text())["systems"]
    assert list(systems["transformer"]["seeds"]) == ["1"] and systems["transformer"]["score"] > 1
    assert list(systems["talkconv"]["seeds"]) == ["1", "2"]
    assert "transformer diverged with seed 2" in (out / "compare.md").read_text()
    played.broken, played.ran = None, []
    assert sweep.main(arguments(verses, out, "--seeds", "2")) == 0 and played.ran == []


def test_a_rate_that_ends_in_nan_is_no_choice(played, verses, tmp_path):
    out = tmp_path / "run"
    played.nan = "train talkconv at 1e-3"
    assert sweep.main(arguments(verses, out, "--lr", "1e-3,2e-3,5e-3")) == 0
    rates = json.loads((out / "results.json").read_text())["systems"]["talkconv"]["rates"]
    assert rates == {"chosen": "2e-3", "validation": {"1e-3": None, "2e-3": 5, "5e-3": 8}}
    assert "talkconv diverged at 1e-3." in (out / "compare.md").read_text()


def test_speeds_are_of_the_chosen_rate_and_of_this_machine(played, verses, tmp_path):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    speeds = json.loads((out / "speeds.json").read_text())
    assert {row["rate"] for row in speeds.values()} == {"2e-3"}
    for key, other in (("rate", "1e-3"), ("machine", "another, 8 threads")):
        changed = speeds | {"talkconv": speeds["talkconv"] | {key: other}}
        (out / "speeds.json").write_text(json.dumps(changed))
        played.ran = []
        assert sweep.main(arguments(verses, out)) == 0
        assert played.ran == ["measure"]


def test_a_system_that_fails_at_every_rate(played, verses, tmp_path, capsys):
    played.broken, played.why = "train talkconv at 0.001", "FloatingPointError"
    options = arguments(verses, tmp_path / "run", "--lr", "1e-3,0.001", "--seeds", "2")
    assert sweep.main(options) == 1
    assert "failed: talkconv (seed 1)" in capsys.readouterr().err
    assert "diverged at every" in (tmp_path / "run/compare.md").read_text()
    # 0.001 is the same rate, of which the last spelling counts.
    assert played.ran.count("train transformer at 0.001") == 2
    assert played.ran.count("train talkconv at 0.001") == 1  # its other seed has no rate


def test_trainings_side_by_side(played, verses, tmp_path, monkeypatch):
    both_there = threading.Barrier(2, timeout=30)
    run = played.run

    def meet(commands, command, *others, **options):
        if "fairseq-train" in str(command[0]):
            both_there.wait()
        run(commands, command, *others, **options)

    monkeypatch.setattr(played, "run", meet)
    assert sweep.main(arguments(verses, tmp_path / "run", "--jobs", "2")) == 0


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

    def start(commands, command, log, *others):
        if "fairseq-train" not in str(command[0]):
            return played.run(commands, command, log, *others)
        if "transformer" in command:
            while not commands._running:
                time.sleep(0.01)
            raise KeyboardInterrupt
        monkeypatch.setattr(fairseq.subprocess, "Popen", Sleep)
        return run(commands, command, log, *others)

    monkeypatch.setattr(fairseq.Commands, "run", start)
    begun = time.monotonic()
    assert sweep.main(arguments(verses, tmp_path / "run", "--jobs", "2")) == 130
    assert time.monotonic() - begun < 30


def test_other_options_of_a_system_that_is_there_are_refused(
    played, verses, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    capsys.readouterr()
    change_system(monkeypatch, "transformer", {"arch": "another"})
    assert "(systems.transformer.arch: transformer, not another)" in refusal(
        capsys, *arguments(verses, out)
    )


def test_two_at_once_in_one_folder(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another comparison, or a command" in refusal(capsys, *arguments(verses, out))
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_a_failed_training_does_not_stop_the_others(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.broken = "train talkconv"
    assert sweep.main(arguments(verses, out)) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: no" in printed.out and "failed: talkconv (seed 1)" in printed.err
    assert "diverged" not in (out / "compare.md").read_text()
    results = json.loads((out / "results.json").read_text())
    assert "failed" in results["systems"]["talkconv"]["error"]
    assert results["systems"]["transformer"]["score"] > 1

    played.broken = None
    assert sweep.main(arguments(verses, out)) == 0
    assert "error" not in json.loads((out / "results.json").read_text())["systems"]["talkconv"]


def test_scores_outlive_a_failed_measurement_of_speed(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    played.broken = "measure"
    assert sweep.main(arguments(verses, out)) == 1
    said = capsys.readouterr()
    assert "speeds: AssertionError: sentences lengths" in said.out
    assert said.err == "compare.sh: failed: speeds\n"
    table = (out / "compare.md").read_text()
    assert "100.00" in table and table.count("not measured") == 4 and table.count("1,234") == 2
    assert not list(out.glob("*.png"))

    played.broken, played.ran = None, []
    assert sweep.main(arguments(verses, out)) == 0
    assert played.ran == ["measure"] and "not measured" not in (out / "compare.md").read_text()
    assert len(list(out.glob("*.png"))) == 2
    # Once is enough, but for another number of turns.
    for turns, ran in ((5, []), (3, ["measure"])):
        played.ran = []
        assert sweep.main(arguments(verses, out, "--turns", str(turns))) == 0
        assert played.ran == ran


def test_a_missing_seed_is_not_averaged_away(played, verses, tmp_path):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    played.broken = "train talkconv"  # only its second seed is still to be trained
    assert sweep.main(arguments(verses, out, "--seeds", "2")) == 1
    lines = (out / "compare.md").read_text().splitlines()
    row, *_ = [line for line in lines if line.startswith("| talkconv ")]
    assert "seed 2: fairseq-train failed: RuntimeError: no" in row and "100.00" not in row


def test_scores_are_those_of_sacrebleu(played, verses, tmp_path):
    from sacrebleu.metrics import BLEU

    assert sweep.main(arguments(verses, tmp_path / "run")) == 0
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


def test_systems_that_are_left_out_stay_in_the_settings(played, verses, tmp_path):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    assert sweep.main(arguments(verses, out, "--systems", "talkconv")) == 0
    settings = json.loads((out / "settings.json").read_text())
    assert list(settings["systems"]) == ["talkconv", "transformer"]


def noting(monkeypatch, played, note):
    """Call ``note(words, log)`` after each command that is played."""
    run = played.run

    def run_and_note(commands, command, log, *others, **options):
        run(commands, command, log, *others, **options)
        note([str(word) for word in command], log)

    monkeypatch.setattr(played, "run", run_and_note)


def test_each_seed_is_trained_and_scored_as_itself(played, verses, tmp_path, monkeypatch):
    trained, scored = [], []

    def note(words, log):
        if words[0] == "fairseq-train":
            trained.append((log.parent.name, words[words.index("--seed") + 1]))
            with open(log, "a") as file:
                file.write(valid_line(5, int(trained[-1][0])))
        elif words[0] == "fairseq-generate":
            paths = (words[words.index(flag) + 1] for flag in ("--path", "--results-path"))
            scored.append([Path(path).parent.relative_to(tmp_path).as_posix() for path in paths])

    noting(monkeypatch, played, note)
    options = arguments(verses, tmp_path / "run", "--systems", "talkconv", "--seeds", "2")
    assert sweep.main(options) == 0
    assert trained == [("1", "1"), ("2", "2")]
    assert scored == [[f"run/talkconv/2e-3/{seed}"] * 2 for seed in (1, 2)]
    row = json.loads((tmp_path / "run/results.json").read_text())["systems"]["talkconv"]
    assert [seed["validation"][-1]["loss"] for seed in row["seeds"].values()] == [1, 2]


def test_a_rate_counts_by_its_last_validation(played, verses, tmp_path, monkeypatch):
    """As the last checkpoints are what is scored."""

    def note(words, log):
        if "2e-3" in words:  # which had the best loss before
            with open(log, "a") as file:
                file.write(valid_line(5, 20))

    noting(monkeypatch, played, note)
    out = tmp_path / "run"
    options = arguments(verses, out, "--systems", "talkconv", "--lr", "1e-3,2e-3,4e-3")
    assert sweep.main(options) == 0
    rates = json.loads((out / "results.json").read_text())["systems"]["talkconv"]["rates"]
    assert rates["chosen"] == "1e-3" and rates["validation"]["2e-3"] == 20


def test_other_rates_are_refused(played, verses, tmp_path, capsys):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    capsys.readouterr()
    assert "(rates: ['2e-3'], not ['1e-3'])" in refusal(
        capsys, *arguments(verses, out), "--lr", "1e-3"
    )


def test_the_last_checkpoints_are_averaged(played, verses, tmp_path):
    assert sweep.main(arguments(verses, tmp_path / "run")) == 0
    paths = (tmp_path / "run/talkconv/2e-3/1/averaged.pt").read_text()  # as played
    assert paths.count("checkpoint_1_") == 2 and paths.index("_2.pt") < paths.index("_4.pt")


def test_checkpoints_are_in_the_order_of_updates(tmp_path):
    names = ["checkpoint_2_900.pt", "checkpoint_3_1000.pt", "checkpoint_10_1100.pt"]
    for name in (*names, "checkpoint1.pt", "checkpoint_last.pt"):
        (tmp_path / name).touch()

    def last(updates):
        return [path.name for path in fairseq.last_checkpoints(tmp_path, updates, 2)]

    assert last(1100) == names[1:]
    assert last(1200) == [names[2], "checkpoint_last.pt"]  # which ended an epoch


def test_a_run_goes_on_where_it_was_not_where_it_began(tmp_path):
    """fairseq-train goes on from checkpoint_last.pt by itself, unless another one is named."""
    origin, words = tmp_path / "origin.pt", ["--save-dir", tmp_path]
    assert fairseq.resuming(tmp_path, origin) == words  # there is none
    origin.touch()
    assert fairseq.resuming(tmp_path, origin) == [*words, "--restore-file", origin]
    (tmp_path / "checkpoint_last.pt").touch()
    assert fairseq.resuming(tmp_path, origin) == words


def test_what_has_no_last_checkpoint_begins_anew(played, verses, tmp_path):
    """Its numbered ones may be of a save that was cut short, and its log would show them twice."""
    out = tmp_path / "run"
    played.stop_at = "train talkconv"
    assert sweep.main(arguments(verses, out, "--systems", "talkconv")) == 130
    checkpoints = out / "talkconv/2e-3/1/checkpoints"
    (checkpoints / "checkpoint_last.pt").unlink()
    played.stop_at = None
    assert sweep.main(arguments(verses, out, "--systems", "talkconv")) == 0
    assert played.restored == []


def test_what_is_trained_and_not_averaged_is_not_trained_anew(
    played, verses, tmp_path, monkeypatch
):
    """fairseq-train leaves a run alone that is at its end."""
    out = tmp_path / "run"
    save, failed = average.save, []

    def fail_once(paths, to):
        if not failed:
            failed.append(to)
            raise KeyboardInterrupt
        save(paths, to)

    monkeypatch.setattr(average, "save", fail_once)
    assert sweep.main(arguments(verses, out, "--systems", "talkconv")) == 130
    assert sweep.main(arguments(verses, out, "--systems", "talkconv")) == 0
    assert "checkpoint_1_4.pt" in played.restored and "checkpoint_last.pt" in played.restored


@pytest.mark.parametrize("damaged", ["[1]", '{"systems"', '{"systems": null}'])
def test_a_restart_replaces_a_damaged_comparison(played, verses, tmp_path, capsys, damaged):
    out = tmp_path / "run"
    assert sweep.main(arguments(verses, out)) == 0
    (out / "settings.json").write_text(damaged)
    capsys.readouterr()
    assert "--restart replaces them" in refusal(capsys, *arguments(verses, out))
    played.ran = []
    assert sweep.main(arguments(verses, out, "--restart")) == 0
    assert {"train talkconv", "train transformer"} < {*played.ran}


def test_a_command_that_is_killed_has_failed(tmp_path):
    with pytest.raises(Failed, match="^sh was killed by signal 9; .*ends with\nhalf"):
        fairseq.Commands("cpu").run(["sh", "-c", "echo half; kill -9 $$"], tmp_path / "log")


def test_a_failure_without_words_loses_no_scores(played, verses, tmp_path, monkeypatch):
    def measure(*_):
        raise AssertionError  # as fairseq's own checks do

    monkeypatch.setattr(sweep, "measure_speeds", measure)
    assert sweep.main(arguments(verses, tmp_path / "run")) == 1
    assert "not measured" in (tmp_path / "run/compare.md").read_text()


def test_a_failed_evaluation_does_not_stop_the_others(played, verses, tmp_path, monkeypatch):
    run = fairseq.Commands.run

    def breaks(commands, command, log, *others, **options):
        if command[0] == "fairseq-generate" and "run/talkconv/" in str(log):
            raise Failed("fairseq-generate failed; its log ends with\nno")
        run(commands, command, log, *others, **options)

    monkeypatch.setattr(fairseq.Commands, "run", breaks)
    assert sweep.main(arguments(verses, tmp_path / "run")) == 1
    systems = json.loads((tmp_path / "run/results.json").read_text())["systems"]
    assert "fairseq-generate failed: no" in systems["talkconv"]["error"]
    assert systems["transformer"]["score"] > 1

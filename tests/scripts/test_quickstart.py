"""scripts/quickstart.sh from end to end on a few verses, and what it refuses."""

import fcntl
import json
import re
import signal
import subprocess
import time
from contextlib import closing

import pytest
from quickstart_runs import TEST_VERSES, QuickStart, kill_group, write_verses

from conftest import ROOT
from pipeline.common.command import BadInput
from pipeline.common.folder import Folder
from pipeline.common.systems import read_systems
from pipeline.data.benchmarks import SPLITS
from pipeline.quickstart import language_model, translation

pytest.importorskip("fairseq")

_script = QuickStart("quickstart.sh", translation.main, timeout=600)
command, quickstart, refusal = _script.command, _script.run, _script.refusal
_other = QuickStart("quickstart_lm.sh", language_model.main, timeout=600)
of_both = pytest.mark.parametrize(
    "refusal", [refusal, _other.refusal], ids=["translation", "language models"]
)


@pytest.fixture
def verses(tmp_path):
    return write_verses(tmp_path / "verses", ("es", "en"))


def files(folder):
    """What a folder holds, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}


def score_line(printed):
    (line,) = re.findall("^sacreBLEU .*", printed, re.MULTILINE)
    return line


@pytest.mark.slow
def test_a_run_a_second_run_and_a_restart(verses, tmp_path, monkeypatch):
    # From another folder, with relative paths, one of them with a space.
    for path in [*verses.iterdir()]:
        path.rename(verses / path.name.replace(".es", ".es-ES").replace(".en", ".en-GB"))
    languages = ("--source-lang", "es-ES", "--target-lang", "en-GB")
    arguments = ("--data", "verses", *languages, "--out", "a run", "--updates", 12)
    first = quickstart(*arguments, cwd=tmp_path)
    assert f" on {TEST_VERSES} sentences (nrefs:1|" in score_line(first)
    for start in ("source      ", "reference   ", "translation "):
        assert len(re.findall(f"^{start}", first, re.MULTILINE)) == 5
    commands = first.split("== the commands, in order\n")[1].split("\n\n")[0].splitlines()
    for line, name in zip(commands, (
        "prepare_corpus.py", "fairseq-preprocess", "--arch talkconv", "average_checkpoints.py",
        "fairseq-generate",
    ), strict=True):  # fmt: skip
        assert name in line
    out = tmp_path / "a run"
    counted = re.findall(r"^(\S+): [\d,]+ sentences, [\d,]+ pieces", first, re.MULTILINE)
    assert counted == [f"{split}.{side}" for split in SPLITS for side in ("es-ES", "en-GB")]
    assert not list(out.rglob("*.partial"))

    # The second time everything is there: only the score is computed again.
    before = files(out)
    second = quickstart(*arguments, cwd=tmp_path)
    assert re.findall("^== (.*)", second, re.MULTILINE)[0] == "five translations, and the score"
    assert score_line(second) == score_line(first)
    assert files(out) == before

    # Other settings, or another corpus under the same name, do not get mixed with these.
    other = ("--data", verses, *languages, "--out", out)
    assert "other settings" in refusal(*other, "--updates", 13)
    (verses / "valid.en-GB").write_text("Word.\n" * 10)
    assert "--restart to replace it" in refusal(*other, "--updates", 12)
    assert files(out) == before

    # Asked to, it starts over, and leaves alone what is not its own.
    monkeypatch.chdir(ROOT)  # and back: it goes there
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    (out / "notes").write_text("mine")
    for path in [*verses.iterdir()]:
        path.rename(verses / path.name.replace("-ES", "").replace("-GB", ""))
    of = session(verses, out, "--updates", 4, "--restart")
    of.open(model=["fairseq-train"])
    of.folder.close()
    assert {path.name for path in out.iterdir()} == {"lock", "notes", "settings.json"}
    assert (out / "notes").read_text() == "mine"


@pytest.mark.long
@pytest.mark.slow
def test_a_run_killed_in_training_resumes_where_it_was(verses, tmp_path):
    out = tmp_path / "run"
    arguments = ("--data", verses, "--out", out, "--updates", 60)
    checkpoints = out / "training/falling"
    with open(tmp_path / "printed", "w") as printed:
        run = subprocess.Popen(command(*arguments), start_new_session=True, stdout=printed)
        try:
            for _ in range(1200):
                if list(checkpoints.glob("checkpoint_*_*.pt")) or run.poll() is not None:
                    break
                time.sleep(0.1)
        finally:
            kill_group(run)
    (reached,) = sorted(updates(checkpoints))[-1:]
    assert reached < 60
    assert not (out / "averaged.pt").exists()

    resumed = quickstart(*arguments)
    assert "preparing" not in resumed
    assert max(updates(checkpoints)) == 60
    log = (out / "training/train.log").read_text()
    loaded = re.findall(r"Loaded checkpoint .* @ (\d+) updates", log)
    assert loaded == [str(reached)]
    assert f" on {TEST_VERSES} sentences" in score_line(resumed)


def updates(folder):
    return [int(path.stem.split("_")[2]) for path in folder.glob("checkpoint_*_*.pt")]


@pytest.mark.long
@pytest.mark.slow
def test_by_the_clock_the_rate_is_up_and_then_falls(verses, tmp_path):
    out = tmp_path / "run"
    start = time.monotonic()
    printed = quickstart("--data", verses, "--out", out, "--minutes", 2)
    taken = time.monotonic() - start
    assert "first leg" in printed and "second leg" in printed
    first = int((out / "training/plan").read_text())
    assert 0 < first < max(updates(out / "training/falling")) <= first + 1.9 * first
    assert taken < 180


def session(verses, out, *options):
    """A quick start on a CPU that has begun just now."""
    words = ("--cpu", "--data", verses, "--out", out, *options)
    args = translation.options("quickstart", "").parse_args([*map(str, words)])
    return translation.Session(args, ["es", "en"], translation.NAME)


def test_a_folder_has_one_name(tmp_path, monkeypatch):
    """So that a run that was begun without options goes on with them."""
    parse = translation.options("quickstart", "").parse_args
    monkeypatch.chdir(ROOT / "docs")
    given = parse(["--out", "../quickstart", "--data", str(ROOT / "data/bible-es-en")])
    assert given == parse([])
    assert parse(["--out", str(tmp_path)]).out == tmp_path


def test_training_keeps_the_precision_that_is_set(verses, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # and back: it goes there
    of, name = session(verses, tmp_path / "run"), "TALK_MATMUL_PRECISION"
    monkeypatch.delenv(name, raising=False)
    assert of.training()[:3] == ["env", f"{name}=medium", "fairseq-train"]
    monkeypatch.setenv(name, "highest")
    assert of.training()[:3] == ["env", f"{name}=highest", "fairseq-train"]


@of_both
def test_a_folder_of_another_command_is_left_alone(refusal, tmp_path):
    (tmp_path / "settings.json").write_text('{"kind": "comparison"}')
    before = files(tmp_path)
    message = refusal("--out", tmp_path, "--restart")
    assert "holds a comparison; choose another folder" in message
    assert files(tmp_path) == before


@pytest.mark.parametrize("damaged", ['{"a"', "[1]"])
def test_a_restart_replaces_damaged_settings(tmp_path, damaged):
    folder = Folder(tmp_path, "quick start", ())
    folder.settings.write_text(damaged)
    with pytest.raises(BadInput, match="damaged .*--restart"), closing(folder):
        folder.open({"a": 1})
    with closing(folder):
        folder.open({"a": 1}, restart=True)
    assert json.loads(folder.settings.read_text()) == {"kind": "quick start", "a": 1}


def test_a_training_by_the_clock_has_two_legs(verses, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # and back: it goes there
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    out, ran = tmp_path / "run", []
    legs = iter(([30, 200], [200, 377]))  # each leg begins with what the one before saved

    def run(command, read, log):
        ran.append(dict(zip(command, command[1:])))
        with open(log, "a") as file:
            file.writelines(f"x.pt @ {updates} updates\n" for updates in next(legs))

    last = out / "training/steady/checkpoint_last.pt"
    last.parent.mkdir(parents=True)
    for made in (last, out / "settings.json"):
        made.touch()
    for minutes, section in ((9, "cpu"), (40, "cpu_long")):  # the second finds all done
        of = session(verses, out, "--minutes", minutes)
        assert of.settings == read_systems(translation.NAME)[section]
        of.count = 1
        of.run = run
        assert of.train("training", out / "training", ["fairseq-train"], keep=5) == 377
    steady, falling = ran  # 9 minutes without the 90 seconds of what follows
    assert steady["--stop-time-hours"] == f"{150 / 3600:.4f}" and steady["--warmup-updates"] == 150
    assert steady["--total-num-update"] == 10**9 and steady["--save-dir"].name == "steady"
    assert falling["--stop-time-hours"] == f"{450 / 3600:.4f}"
    # Twice the time, of which a little is spared; the rate is up where it begins to fall.
    assert falling["--total-num-update"] == falling["--max-update"] == 200 + 380
    assert falling["--warmup-updates"] == 200 and falling["--save-dir"].name == "falling"
    assert falling["--restore-file"] == last
    assert falling["--keep-interval-updates"] == 5


@pytest.mark.long
@pytest.mark.slow
def test_epochs_that_end_exactly_where_checkpoints_are_saved(tmp_path):
    """Two lines make one batch, so that each update ends an epoch."""
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    for split in ("train", "valid", "test"):
        write(tiny, f"{split}.es", "Dijo Dios.\nEn el principio.\n")
        write(tiny, f"{split}.en", "God said.\nIn the beginning.\n")
    out = tmp_path / "run"
    printed = quickstart("--data", tiny, "--out", out, "--updates", 5)
    assert " on 2 sentences (" in score_line(printed)
    assert not updates(out / "training/falling")
    assert "--inputs " + str(out / "training/falling/checkpoint_last.pt") in printed
    assert (out / "training/done").read_text() == "5\n"


def test_ctrl_c_stops_the_run_and_what_it_started(tmp_path):
    out = tmp_path / "run"
    run = subprocess.Popen(
        command("--out", out), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A shell's background jobs, and what they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        for _ in range(1200):
            if list(out.glob("corpus.partial*")) or run.poll() is not None:
                break
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)  # to the quick start alone
        _, told = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            kill_group(run)
    assert told == "quickstart.sh: interrupted; run it again to go on\n"
    assert run.returncode == 130
    assert not (out / "corpus").exists()
    with open(out / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing is left that holds it


def write(folder, name, text):
    (folder / name).write_text(text)


def unreadable(folder):
    (folder / "valid.es").write_bytes(b"\xff\xfe\xfa\n" * 10)


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda v: (v / "test.en").unlink(), "test.en: no such file"),
        (lambda v: (v / "train.en.gz").unlink(), "train.en: no such file"),
        (lambda v: [path.unlink() for path in v.iterdir()], "train.es: no such file"),
        (lambda v: write(v, "train.es", ""), "train.es: empty"),
        (lambda v: write(v, "test.en", "\n" * TEST_VERSES), "test.en: empty"),
        (lambda v: write(v, "valid.es", "Uno.\n\nTres.\n"), "valid.es: line 2 is empty"),
        (lambda v: write(v, "valid.es", "Uno.\n"), "in valid.es as in valid.en, got 1 and 10"),
        (unreadable, "valid.es: not readable as UTF-8"),
        (lambda v: write(v, "train.en.gz", "no gzip"), "train.en.gz: not readable"),
    ],
)
def test_a_corpus_that_cannot_be_used(verses, tmp_path, damage, expected):
    damage(verses)
    out = tmp_path / "run"
    assert expected in refusal("--data", verses, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--minutes", "0"], "--minutes: expected a number of at least 2, got 0"),
        (["--minutes", "1.5"], "--minutes: expected a number of at least 2, got 1.5"),
        (["--minutes", "-5"], "--minutes: expected a number of at least 2, got -5"),
        (["--minutes", "ten"], "--minutes: expected a number of at least 2, got ten"),
        (["--minutes"], "--minutes: expected a value"),
        (["--updates", "0"], "--updates: expected a whole number of at least 1, got 0"),
        (["--updates", "2.5"], "--updates: expected a whole number of at least 1, got 2.5"),
        (["--updates", ""], "--updates: expected a whole number of at least 1, got "),
        (["--target-lang", "fr"], "train.fr: no such file"),
        (["--target-lang", "es"], "expected two languages, got es twice"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["50"], "unrecognized arguments: 50"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, arguments, expected):
    out = tmp_path / "run"
    assert expected in refusal("--out", out, *arguments)
    assert not out.exists()


@pytest.mark.parametrize("script", [_script, _other], ids=["translation", "language models"])
def test_the_script_refuses_as_the_function_does(tmp_path, script):
    words = ("--out", tmp_path / "run", "--minutes", 0)
    done = subprocess.run(script.command(*words), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", script.refusal(*words))


@of_both
def test_a_folder_of_something_else_is_left_alone(tmp_path, refusal):
    (tmp_path / "thesis").write_text("")
    assert "not of a quick start" in refusal("--out", tmp_path, "--restart")
    assert "expected a folder" in refusal("--out", tmp_path / "thesis")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


@of_both
def test_two_runs_at_once_in_one_folder(tmp_path, refusal):
    (tmp_path / "settings.json").write_text("")
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refusal("--out", tmp_path)
    assert "another quick start, or a command of one that was killed, is running" in line


def test_help():
    printed = quickstart("--help")
    for option in ("--minutes", "--updates", "--cpu", "--out", "--restart", "--data"):
        assert option in printed


def test_a_missing_translation_is_an_error_and_no_lower_score(tmp_path, capsys):
    paths = [tmp_path / name for name in ("generated", "source", "reference")]
    for path, text in zip(paths, ("D-1\t-0.5\ttwo\n", "uno\ndos\n", "one\ntwo\n")):
        path.write_text(text)
    with pytest.raises(ValueError, match="hypotheses: expected 2 in .* got 1; line 1 is"):
        translation.report(*paths)
    assert not capsys.readouterr().out
    # Order does not matter, and a translation may be empty.
    paths[0].write_text("D-1\t-0.5\ttwo\nD-0\t-0.5\t\n")
    translation.report(*paths)
    assert "reference   two\ntranslation two\n" in capsys.readouterr().out

"""scripts/plot_training.py: what it reads from logs, and what is drawn of them."""

import json
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from conftest import lightness, lightness_margin
from pipeline.common.logs import read_runs
from pipeline.plots import curves as plot_training
from pipeline.plots.curves import curves_figure, label_logarithm
from pipeline.plots.figures import looks


def test_colours_survive_greyscale():
    for count in range(2, 9):
        colours = [look["color"] for look in looks(count)]
        assert lightness_margin(colours) > 60 / count - 1
        assert lightness(colours[-1]) < 85  # beside white paper


def test_looks_differ():
    """In colour, line and marker for curves that are drawn one after the other."""
    for count in (2, 8, 32):
        some = looks(count)
        for key in ("color", "linestyle", "marker"):
            assert all(a[key] != b[key] for a, b in zip(some, some[1:]))
        assert len({(look["color"], look["linestyle"]) for look in some}) == count


@pytest.mark.parametrize(
    "low, high", [(85, 112), (8, 110), (60, 300), (2, 2000), (1.2, 1.9), (80, 97)]
)
def test_labels_of_a_logarithm_do_not_overlap(low, high):
    figure = Figure(figsize=(5.5, 2.7), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [low, high])
    label_logarithm(axis)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    bottom, top = axis.get_ylim()
    labels = {
        label: place
        for which in ("major", "minor")
        for place, label in zip(
            axis.yaxis.get_ticklocs(minor=which == "minor"), axis.get_yticklabels(which=which)
        )
        if bottom <= place <= top and label.get_text()
    }
    assert len(labels) >= 2
    for label, place in labels.items():
        assert float(label.get_text().replace(",", "")) == pytest.approx(place)
    boxes = sorted((label.get_window_extent(renderer) for label in labels), key=lambda box: box.y0)
    assert all(below.y1 < above.y0 for below, above in zip(boxes, boxes[1:]))


# --- Logs and curves ---

STARTS = (
    "{'_name': None, 'common': {'_name': None}, 'checkpoint': {'_name': None, 'save_dir': "
    "'%s'}, 'model': {'_name': '%s', 'dropout': 0.1}}"
)
NONE = "No existing checkpoint found runs/checkpoint_last.pt"
LOADED = "Loaded checkpoint %s/checkpoint_last.pt (epoch 1 @ %d updates)"
SAVED = "Saved checkpoint %s/checkpoint_last.pt (epoch 1 @ %d updates, score 1) (writing took 1 s)"


class Log:
    """Writes the lines of fairseq-train, each with a time, in one of its formats."""

    def __init__(self, style="simple"):
        self.style, self.lines = style, []

    def say(self, second, message, logger="fairseq.trainer"):
        time = f"2024-02-03 04:{second // 60:02d}:{second % 60:02d}"
        if self.style == "hydra":
            self.lines.append(f"[{time},250][{logger}][INFO] - {message}")
        else:
            self.lines.append(f"{time} | INFO | {logger} | {message}")

    def start(self, second, folder="runs/a", arch="talkconv", loaded=None):
        self.say(second, STARTS % (folder, arch), "fairseq_cli.train")
        self.say(second, LOADED % loaded if loaded else NONE)
        self.say(second, "begin training epoch 1")

    def train(self, second, updates, loss):
        values = {"loss": loss, "ppl": round(2**loss, 2), "num_updates": updates, "lr": 0.5}
        values = {key: str(value) for key, value in {**values, "wall": 0}.items()}
        if self.style == "json":
            values = json.dumps({"epoch": 1, "update": 0.5, **values})
        else:
            values = ", ".join(f"{key}={value}" for key, value in values.items())
            values = f"epoch 001: {updates:6d} / 90 {values}"
        self.say(second, values, "train_inner")

    def epoch(self, second, tag, updates, loss, **others):
        values = {"loss": loss, "ppl": round(2 ** float(loss), 2), **others}
        values["num_updates"] = updates
        if self.style == "json":
            values = {f"{tag}_{key}": str(value) for key, value in values.items()}
            values = json.dumps({"epoch": 1, **values})
        else:
            on = "" if tag == "train" else f"valid on '{tag}' subset | "
            values = f"epoch 001 | {on}" + " | ".join(f"{k} {v}" for k, v in values.items())
        self.say(second, values, tag)

    def write(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in self.lines))
        return path


def resumed(style="simple"):
    """A run that was killed after update 40, and resumed a minute later from update 20."""
    log = Log(style)
    log.start(10)
    log.train(15, 10, 9.0)
    log.train(20, 20, 8.0)
    log.epoch(26, "valid", 20, 8.5, bleu=3.5)
    log.say(28, SAVED % ("runs/a", 20), "fairseq.checkpoint_utils")
    log.train(33, 30, 7.0)
    log.train(38, 40, 6.0)
    log.start(100, loaded=("runs/a", 20))
    log.train(104, 35, 7.5)
    log.train(109, 40, 6.5)
    log.epoch(111, "valid", 40, 6.75, bleu=12.25)
    log.epoch(112, "train", 40, 7.75)
    return log


def read_log(path):
    """The one run at `path`."""
    (run,) = read_runs(path).values()
    return run


def points(entries, *keys):
    return [tuple(entry[key] for key in keys) for entry in entries]


@pytest.mark.parametrize("style", ["simple", "json", "hydra"])
def test_a_resumed_log_is_one_run(style, tmp_path):
    run = read_log(resumed(style).write(tmp_path / "run" / "log.txt"))
    assert list(run) == ["train", "valid"]
    # The second session goes on with the 18 seconds at which its checkpoint was there.
    train = [(10, 5, 9.0), (20, 10, 8.0), (35, 22, 7.5), (40, 27, 6.5)]
    assert points(run["train"], "updates", "seconds", "loss") == train
    assert points(run["train"], "ppl", "lr") == [(round(2**loss, 2), 0.5) for *_, loss in train]
    valid = [(20, 16, 8.5, 3.5), (40, 29, 6.75, 12.25)]
    assert points(run["valid"], "updates", "seconds", "loss", "bleu") == valid
    assert read_log(tmp_path / "run") == run


def test_curves_are_the_log(tmp_path):
    a = read_log(resumed().write(tmp_path / "a.log"))
    other = Log()
    other.start(0)
    other.epoch(200, "train", 50, 5.0)
    other.epoch(400, "train", 100, 4.0)
    b = read_log(other.write(tmp_path / "b.log"))
    figure = curves_figure({"TaLK": [a, a], "other": [b]})
    rows = ("loss (base 2)", "perplexity", "BLEU")
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == [*rows, "learning rate"]
    assert figure.axes[-1].get_xlabel() == "wall-clock, minutes"
    for axis, key, x, unit in (
        (figure.axes[0], "loss", "updates", 1),
        (figure.axes[3], "ppl", "seconds", 60),
        (figure.axes[4], "bleu", "updates", 1),
    ):
        curves = [("TaLK, training", a["train"])] * 2 + [("TaLK, validation", a["valid"])] * 2
        curves = [c for c in (*curves, ("other, training", b["train"])) if key in c[1][0]]
        drawn = sorted(axis.lines, key=lambda line: line.get_label())
        assert [line.get_label() for line in drawn] == [label for label, _ in curves]
        for line, (_, entries) in zip(drawn, curves):
            assert np.allclose(line.get_xydata(), [(e[x] / unit, e[key]) for e in entries])
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 2  # a look for each name
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == ["TaLK, training", "TaLK, validation", "other, training"]
    with pytest.raises(ValueError, match="^RUN: expected a log of loss, .*, got none of them$"):
        curves_figure({"TaLK": [{"train": [{"updates": 1, "seconds": 1.0}], "valid": []}]})


def two_runs(folder):
    """What the quick start of the language models leaves: two legs of each of two models."""
    for start, arch in ((0, "transformer_lm"), (100, "talkconv_lm")):
        log = Log()
        log.start(start, f"q/{arch}/steady", arch)
        log.train(start + 10, 10, 9.0)
        log.say(start + 11, SAVED % (f"q/{arch}/steady", 10))
        log.start(start + 20, f"q/{arch}/falling", arch, loaded=(f"q/{arch}/steady", 10))
        log.train(start + 24, 20, 7.0)
        log.write(folder / "training" / arch / "train.log")
    (folder / "log.txt").write_text("what other commands print\n")
    return folder


def test_a_folder_of_two_runs(tmp_path):
    path = two_runs(tmp_path / "quick")
    runs = read_runs(path)
    assert list(runs) == ["talkconv_lm", "transformer_lm"]
    for run in runs.values():
        assert points(run["train"], "updates", "seconds") == [(10, 10), (20, 15)]
        assert run["valid"] == []


def test_a_run_begun_anew_replaces_the_first(tmp_path):
    log = Log()
    log.start(0)
    log.train(10, 10, 9.0)
    log.start(20)
    log.train(25, 10, 8.0)
    log.epoch(30, "train", 12, 8.5)
    run = read_log(log.write(tmp_path / "log.txt"))
    assert points(run["train"], "updates", "seconds", "loss") == [(10, 5, 8.0)]


def test_epochs_subsets_and_logs_without_times(tmp_path):
    log = Log()
    log.start(0)
    log.epoch(9, "valid", 10, 9.0)
    log.epoch(9, "valid1", 10, 8.0)
    log.epoch(10, "train", 10, "nan", wall=11)
    run = read_log(log.write(tmp_path / "log.txt"))
    assert points(run["valid1"], "updates", "loss") == [(10, 8.0)]
    assert points(run["train"], "updates", "seconds") == [(10, 10)]
    assert math.isnan(run["train"][0]["loss"])
    bare = "\n".join(line.split(" | ", 3)[3] for line in log.lines)  # as --log-file leaves it
    (tmp_path / "bare.log").write_text(bare)
    run = read_log(tmp_path / "bare.log")
    assert run["train"][0]["seconds"] == 11 and math.isnan(run["valid"][0]["seconds"])
    curves_figure({"bare": [run]})


def test_plot_training_command(tmp_path, capsys):
    first = resumed().write(tmp_path / "first" / "log.txt")
    two_runs(tmp_path / "two")
    output = tmp_path / "out" / "curves.png"
    arguments = [str(first), f"second={first.parent}", str(tmp_path / "two")]
    assert plot_training.main([*arguments, "--output", str(output)]) == 0
    names = "first, second, two talkconv_lm, two transformer_lm"
    assert capsys.readouterr().out == f"written: {output} of {names}\n"
    assert output.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in output.parent.iterdir()] == ["curves.png"]

    assert plot_training.main([*arguments, "--output", str(tmp_path / "curves.pdf")]) == 0
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert plot_training.main([*arguments, "--output", str(tmp_path / "curves.doc")]) == 2
    assert "Format 'doc' is not supported" in capsys.readouterr().err
    assert not (tmp_path / "curves.doc").exists()


def test_a_command_that_cannot_resume_does_not_say_so(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot_training, "named_runs", interrupted)
    assert plot_training.main(["quickstart"]) == 130
    assert capsys.readouterr().err == "plot_training.py: interrupted\n"


def test_the_folder_that_one_is_in_has_its_name(tmp_path, monkeypatch):
    resumed().write(tmp_path / "mine" / "log.txt")
    monkeypatch.chdir(tmp_path / "mine")
    assert list(plot_training.named_runs(["."])) == ["mine"]


NO_LOG = (
    "expected a log of fairseq-train in the formats simple or json, or a folder with one, got none"
)


@pytest.mark.parametrize(
    "runs, message",
    [
        (["gone"], f"gone: {NO_LOG}"),
        (["empty.log"], f"empty.log: {NO_LOG}"),
        (["."], f".: {NO_LOG}"),
        (["both"], r"expected one log of fairseq-train, got a.log and log.txt"),
        (["both/log.txt", "both=both/a.log"], "RUN: expected different names, got 'both' twice"),
        (["both="], "expected NAME=PATH, got both="),
    ],
)
def test_plot_training_refusals(runs, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").write_text("nothing\n")
    for name in ("a.log", "log.txt"):
        resumed().write(tmp_path / "both" / name)
    assert plot_training.main([*runs, "--output", "curves.png"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "curves.png").exists()


def test_a_validation_logged_twice_counts_once(tmp_path):
    log = Log()
    log.start(0)
    log.epoch(9, "valid", 10, 9.0)
    log.epoch(10, "valid", 10, 8.0)
    run = read_log(log.write(tmp_path / "log.txt"))
    assert points(run["valid"], "updates", "loss") == [(10, 8.0)]


def test_time_goes_on_over_three_sessions(tmp_path):
    log = Log()
    log.start(0)
    log.train(10, 10, 9.0)
    log.say(12, SAVED % ("runs/a", 10))
    log.start(100, loaded=("runs/a", 10))
    log.say(105, SAVED % ("runs/a", 20))
    log.start(200, loaded=("runs/a", 20))
    log.train(203, 30, 7.0)
    run = read_log(log.write(tmp_path / "log.txt"))
    assert points(run["train"], "updates", "seconds") == [(10, 10), (30, 12 + 5 + 3)]

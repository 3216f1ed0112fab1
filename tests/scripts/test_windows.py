"""scripts/plot_windows.py: what is drawn, by the artists of its figures."""

import functools
import json
import math
import re
from argparse import Namespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

import published
from conftest import lightness_margin, write_dictionaries

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from pipeline.data.text import learn_pieces
from pipeline.plots import windows as plot_windows
from talk_fairseq import TaLKConv, talk_conv_reference

LOAD = plot_windows.load
WORDS = 97
TEXT = "w3 w14 w15 w9 w26 w5 w35 w8 w9 w7 w9 w32 w38 w46"
TARGET = "w2 w71 w82 w81 w82 w84 w59 w0 w45"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the dictionaries of both tasks, of WORDS words."""
    folder = tmp_path_factory.mktemp("dictionaries")
    write_dictionaries(folder, WORDS)
    return folder


@pytest.fixture(scope="module")
def checkpoints(data, tmp_path_factory):
    """``{name: path}``: published ones with GLU (8 heads) and without (4), one of ours, others."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {}

    def save(name, state):
        paths[name] = folder / f"{name.replace(' ', '_')}.pt"
        torch.save(state, paths[name])

    for name in ("iwslt", "wmt", "language model"):
        state = published.checkpoint(published.PUBLISHED[name](), WORDS, last_optimizer_state=None)
        save(name, state)
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(paths["iwslt"])], {"data": str(data)}
    )
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    save("ours", {**state, "args": None, "cfg": cfg, "model": model.state_dict()})

    args = Namespace(
        task="translation", data=str(data), source_lang="es", target_lang="en",
        arch="transformer", encoder_embed_dim=8, decoder_embed_dim=8, encoder_layers=1,
        decoder_layers=1, encoder_ffn_embed_dim=8, decoder_ffn_embed_dim=8,
        encoder_attention_heads=1, decoder_attention_heads=1,
    )  # fmt: skip
    cfg = convert_namespace_to_omegaconf(args)
    transformer = tasks.setup_task(cfg.task).build_model(cfg.model)
    save("transformer", {**state, "args": args, "model": transformer.state_dict()})
    save("unsafe", {"model": {}, "args": print})
    return paths


@pytest.fixture(scope="module")
def load():
    """plot_windows.load, once for each checkpoint and folder."""
    return functools.cache(LOAD)


@pytest.fixture
def run(checkpoints, data, load, tmp_path, capsys, monkeypatch):
    """Run plot_windows.py; returns its status, output, files and the JSON that it wrote, if any."""
    monkeypatch.setattr(plot_windows, "load", load)

    def run(checkpoint, *options):
        prefix = tmp_path / "out" / "w"
        arguments = [checkpoints.get(checkpoint, checkpoint), "--output", prefix, *options]
        if "--data" not in options:
            arguments += ["--data", data]
        try:
            status = plot_windows.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            status = stopped.code
        written = sorted(path.name for path in prefix.parent.glob("*"))
        record = prefix.with_suffix(".json")
        record = json.loads(record.read_text()) if record.exists() else None
        return status, capsys.readouterr(), written, record

    return run


def number(words):
    return [int(word[1:]) + 4 for word in words.split()]


def expected_ends(model, source, target):
    """``{side: [(a_l, a_r), …]}``, each (T, H), of sentences: from the projections' weights.

    `source` and `target` are what the encoder and the decoder are given.
    """
    inputs, hooks = {}, []
    sides = {"encoder": model.encoder, "decoder": model.decoder} if source else {}
    sides = sides or {"decoder": model.decoder}
    for side, part in sides.items():
        for n, layer in enumerate(part.layers):

            def keep(conv, arguments, side=side, n=n):
                inputs[side, n] = conv, arguments[0].detach().double().numpy()[:, 0]

            hooks.append(layer.self_attn.conv.register_forward_pre_hook(keep))
    target = torch.tensor([target])
    if source:
        model(torch.tensor([source]), torch.tensor([len(source)]), target)
    else:
        model(target)
    for hook in hooks:
        hook.remove()
    ends = {side: [] for side in sides}
    for (side, _), (conv, x) in inputs.items():
        weight, bias = (p.detach().double().numpy() for p in conv.offsets.parameters())
        offsets = 1 / (1 + np.exp(-(x @ weight.T + bias)))
        T, H = len(x), conv.heads
        a_l, a_r = np.empty((T, H)), np.empty((T, H))
        for t in range(T):
            for h in range(H):
                a_l[t, h] = max(0, t - conv.max_left * offsets[t, h])
                right = conv.max_right * offsets[t, H + h] if conv.max_right else 0
                a_r[t, h] = min(T - 1, t + right)
        ends[side].append((a_l, a_r))
    return ends


def bars(axis, gid, shape):
    """The bars of a collection: their edges left, right, top and bottom, each of `shape`."""
    (collection,) = (artist for artist in axis.collections if artist.get_gid() == gid)
    corners = np.array([path.vertices[:4] for path in collection.get_paths()])
    x, y = corners[..., 0], corners[..., 1]
    return [edge.reshape(shape) for edge in (x.min(1), x.max(1), y.min(1), y.max(1))]


def drawn_ends(axis, T, H):
    """``(a_l, a_r)``, each (T, H), that the bars of a panel show, and their edges y."""
    left, own = (bars(axis, gid, (T, H)) for gid in ("left", "token"))
    t = np.arange(T)[:, None]
    right = (
        bars(axis, "right", (T, H)) if len(axis.collections) == 4 else [own[1], t + 0.5, *own[2:]]
    )
    assert np.allclose(own[0], t - 0.5) and np.allclose(own[1], t + 0.5)
    assert np.allclose(left[1], own[0]) and np.allclose(right[0], own[1])
    assert np.allclose(left[2:], own[2:]) and np.allclose(right[2:], own[2:])
    return left[0] + 0.5, right[1] - 0.5, own[2:]


# --- The windows of a sentence ---


@pytest.mark.parametrize("name", ["iwslt", "wmt", "language model"])
def test_bars_are_the_windows(name, checkpoints, data, load):
    model, task = load(checkpoints[name], data)
    translator = name != "language model"
    texts = (TEXT, TARGET) if translator else (TARGET,)
    seen = plot_windows.look_at(model, task, str.split, *texts)
    source = [*number(TEXT), 2] if translator else None
    ends = expected_ends(model, source, [2, *number(TARGET)])
    assert list(seen) == list(ends) == (["encoder", "decoder"] if translator else ["decoder"])
    for side, (tokens, layers) in seen.items():
        words = [*TEXT.split(), "</s>"] if side == "encoder" else ["</s>", *TARGET.split()]
        assert tokens == words
        figure = plot_windows.windows_figure(tokens, layers, "title")
        assert len(figure.axes) == len(ends[side]) >= 3
        for axis, (a_l, a_r) in zip(figure.axes, ends[side]):
            T, H = a_l.shape
            assert H == (8 if name == "wmt" else 4)
            got_l, got_r, (top, bottom) = drawn_ends(axis, T, H)
            assert np.abs(got_l - a_l).max() < 1e-4 and np.abs(got_r - a_r).max() < 1e-4
            # A token's bars are in its line, one below the other.
            assert np.all(top[:, 0] > np.arange(T) - 0.5) and np.all(bottom[:, -1] < top[:, 0] + 1)
            assert np.allclose(bottom[:, :-1], top[:, 1:]) and np.all(bottom > top)
            assert axis.get_ylim() == (T - 0.5, -0.5)  # the first token on top
            assert [text.get_text() for text in axis.get_xticklabels()] == words
        assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == words
        assert sum(np.ptp(a_l - np.arange(len(a_l))[:, None]) > 0.5 for a_l, _ in ends[side]) > 1


def test_a_word_is_covered_by_what_it_counts(checkpoints, data, load):
    """Over each word's width, the share under the bar is its weight in the operator's sum."""
    model, task = load(checkpoints["wmt"], data)
    seen = plot_windows.look_at(model, task, str.split, TEXT, TARGET)
    _, layers = seen["encoder"]
    layer = layers[1]
    T, H = layer.left.shape
    offsets = [
        torch.tensor(reach / limit)[:, None]
        for reach, limit in ((layer.left, layer.max_left), (layer.right, layer.max_right))
    ]
    one_hot = torch.eye(T, dtype=torch.float64).repeat(1, H)[:, None]  # (T, 1, H T)
    weights = talk_conv_reference(one_hot, *offsets, layer.max_left, layer.max_right)
    weights = weights.view(T, H, T) * (layer.max_left + layer.max_right + 1)
    axis = plot_windows.windows_figure(["w"] * T, [layer], "").axes[0]
    a_l, a_r, _ = drawn_ends(axis, T, H)
    word = np.arange(T)
    first = np.maximum(a_l[..., None] - 0.5, word - 0.5)
    last = np.minimum(a_r[..., None] + 0.5, word + 0.5)
    assert np.abs(np.maximum(last - first, 0) - weights.numpy()).max() < 1e-6
    left, right, *_ = bars(axis, "limit", (T,))
    assert np.array_equal(left + 0.5, np.maximum(word - layer.max_left, 0))
    assert np.array_equal(right - 0.5, np.minimum(word + layer.max_right, T - 1))


@torch.no_grad()
def test_heads_with_largest_windows_of_their_own():
    conv = TaLKConv(8, 4, max_left=15, max_right=7, spread_windows=True)
    torch.nn.init.constant_(conv.offsets.bias, 40)  # offsets of 1
    layer = plot_windows.Layer(conv, *conv.predict_offsets(torch.randn(30, 1, 8)))
    expected = np.round(2 ** np.linspace(1, np.log2([15, 7]), 4))
    for reach, largest in zip((layer.left, layer.right), expected.T):
        assert np.allclose(reach, largest)
    a_l, a_r, _ = drawn_ends(plot_windows.windows_figure(["w"] * 30, [layer], "").axes[0], 30, 4)
    assert np.allclose(20 - a_l[20], expected[:, 0]) and np.allclose(a_r[20] - 20, expected[:, 1])


def test_files_of_our_checkpoint(run, checkpoints, data, load):
    """The PNGs, and the numbers drawn, which are those of the same model as it was published."""
    status, printed, written, record = run("ours", "--text", TEXT, "--target", TARGET)
    assert status == 0 and not printed.err
    assert written == ["w.decoder.png", "w.encoder.png", "w.json"]
    assert record["checkpoint"] == str(checkpoints["ours"])
    published_model = load(checkpoints["iwslt"], data)
    seen = plot_windows.look_at(*published_model, str.split, TEXT, TARGET)
    for side, windows in seen.items():
        assert record[side] == plot_windows.sentence_record(*windows)
    model, _ = load(checkpoints["ours"], data)
    ends = expected_ends(model, [*number(TEXT), 2], [2, *number(TARGET)])
    for side, layers in ends.items():
        assert len(record[side]["layers"]) == len(layers)
        for layer, (a_l, a_r) in zip(record[side]["layers"], layers):
            for name, want in (("a_l", a_l), ("a_r", a_r)):
                got = np.array([head[name] for head in layer["heads"]]).T
                assert got.shape == want.shape and np.abs(got - want).max() < 1e-4
    limits = [(layer["max_left"], layer["max_right"]) for layer in record["encoder"]["layers"]]
    assert limits == [(1, 1), (3, 3), (7, 7), (15, 15)]


VARIANT = """
import torch
from fairseq.models import register_model

from talk_fairseq.models.talkconv import TaLKConvConfig, TaLKConvModel, register_archs
from talk_fairseq.modules import TaLKConv


class HalfWindow(TaLKConv):
    def predict_offsets(self, x):
        half = torch.full((*x.shape[:2], self.heads), 0.5)
        return half, half if self.max_right else None


@register_model("half_window", dataclass=TaLKConvConfig)
class HalfWindowModel(TaLKConvModel):
    @classmethod
    def build_model(cls, cfg, task):
        model = super().build_model(cfg, task)
        for layer in (*model.encoder.layers, *model.decoder.layers):
            layer.self_attn.conv.__class__ = HalfWindow
        return model


register_archs("half_window", {"half_window_iwslt": {}})
"""


def test_a_variant_of_ones_own(run, checkpoints, tmp_path, monkeypatch):
    """Its checkpoint says only the name of its model, which --user-dir has."""
    package = tmp_path / "half_window"
    package.mkdir()
    (package / "__init__.py").write_text(VARIANT)
    state = torch.load(checkpoints["ours"], weights_only=False)
    state["cfg"]["model"] |= {"_name": "half_window", "arch": "half_window_iwslt"}
    torch.save(state, tmp_path / "variant.pt")
    monkeypatch.syspath_prepend(tmp_path)  # undone at the end
    monkeypatch.setattr(plot_windows, "load", LOAD)
    arguments = (tmp_path / "variant.pt", "--text", TEXT, "--target", TARGET)
    status, printed, written, _ = run(*arguments)
    assert status == 2 and written == [] and "--user-dir" in printed.err
    status, printed, _, _ = run(*arguments, "--user-dir", tmp_path / "gone")
    assert status == 2 and "--user-dir: expected a folder" in printed.err
    status, printed, written, record = run(*arguments, "--user-dir", package)
    assert status == 0, printed.err
    for layer in record["encoder"]["layers"]:
        for head in layer["heads"]:
            assert head["a_l"] == [max(0, t - layer["max_left"] / 2) for t in range(15)]


def test_no_empty_space_around_a_picture(run, tmp_path):
    run("ours", "--text", TEXT, "--target", TARGET)
    for side in ("encoder", "decoder"):
        drawn = imread(tmp_path / f"out/w.{side}.png")[..., :3].min(-1) < 1
        height, width = drawn.shape
        rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
        edges = rows[0], height - rows[-1], columns[0], width - columns[-1]
        assert max(edges) < 30  # a quarter of an inch


def test_without_a_target_the_translation(checkpoints, data, load):
    """The decoder is then given what the beam search finds the best."""
    model, task = load(checkpoints["iwslt"], data)
    found = plot_windows.translate(model, task, [*TEXT.split(), "</s>"])
    tokens, _ = plot_windows.look_at(model, task, str.split, TEXT, found)["decoder"]
    given = [task.target_dictionary.index(token) for token in tokens]
    assert tokens[0] == "</s>" and given[1:] == found.tolist()

    def score(target):
        with torch.no_grad():
            source = torch.tensor([[*number(TEXT), 2]])
            out = model(source, torch.tensor([source.shape[1]]), torch.tensor([[2, *target]]))
            log = model.get_normalized_probs(out, log_probs=True)[0]
        return sum(log[i, token].item() for i, token in enumerate([*target, 2])) / len([2, *target])

    best = score(given[1:])
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 5, len(given) - 1):
        for _ in range(5):
            other = torch.randint(4, WORDS, (length,), generator=generator).tolist()
            assert score(other) < best


def test_a_translation_of_unknown_words(checkpoints, data, load):
    """A model may generate them, as one does that was hardly trained."""
    model, task = load(checkpoints["iwslt"], data)
    unknown = torch.tensor([task.target_dictionary.unk()])
    tokens, layers = plot_windows.look_at(model, task, str.split, TEXT, unknown)["decoder"]
    assert tokens == ["</s>", "<unk>"] and layers


def test_text_is_cut_as_a_corpus_is(tmp_path):
    """Whose words have one space between."""
    learn_pieces(["hello wide world"] * 20, 40, tmp_path / "model", character_coverage=1.0)
    cut = plot_windows.cutter(tmp_path / "model")
    assert cut("hello\u00a0wide\tworld\r") == cut("hello wide world")


def test_pieces_are_labelled_as_words():
    labels = plot_windows.labels
    assert labels(["▁al", "umbre", "▁", ",", "</s>"]) == ["al", "·umbre", "▁", "·,", "</s>"]
    assert labels(["a@@", "b", "$x$"]) == ["a@@", "b", "$x$"]
    assert labels(["abcdefghijklmnopq"]) == ["abcdefghijklm…"]
    layer = random_layer(1, 2, 3)
    axis = plot_windows.windows_figure(["$x$"], [layer], "").axes[0]
    assert not axis.get_xticklabels()[0].get_parse_math()


def random_layer(T, H, max_left, max_right=0, seed=0):
    left, right = np.random.default_rng(seed).random((2, T, H))
    conv = Namespace(max_left=max_left, max_right=max_right)
    offset_right = torch.tensor(right)[:, None] if max_right else None
    return plot_windows.Layer(conv, torch.tensor(left)[:, None], offset_right)


VERSE = (
    "▁In ▁the ▁beginning ▁God ▁created ▁the ▁heaven ▁and ▁the ▁earth . ▁And ▁the ▁earth ▁was "
    "▁without ▁understanding , ▁and ▁void ; ▁and ▁darkness ▁was ▁upon ▁the ▁face ▁of ▁the ▁deep"
).split()


@pytest.mark.parametrize("H", [4, 16])
@pytest.mark.parametrize("tokens", [VERSE, VERSE[:3]], ids=["30 words", "3 words"])
def test_words_do_not_overlap(H, tokens):
    layers = [random_layer(len(tokens), H, 7, 7, seed) for seed in range(3)]
    figure = plot_windows.windows_figure(tokens, layers, "Encoder")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    page = figure.bbox
    for axis in figure.axes:
        words = [text.get_window_extent(renderer) for text in axis.get_xticklabels()]
        lines = [text.get_window_extent(renderer) for text in axis.get_yticklabels()]
        assert len(words) == len(tokens)
        assert all(a.x1 <= b.x0 for a, b in zip(words, words[1:]))
        assert all(a.y0 >= b.y1 for a, b in zip(lines, lines[1:]))
        title = axis._left_title.get_window_extent(renderer)
        for box in (*words, *lines, title):
            assert page.x0 <= box.x0 and box.x1 <= page.x1
            assert page.y0 <= box.y0 and box.y1 <= page.y1
        for other in figure.axes:  # what stands below a panel ends above the next
            if other is not axis:
                assert not any(box.overlaps(other.get_window_extent(renderer)) for box in words)
                assert not title.overlaps(other._left_title.get_window_extent(renderer))
        assert min(text.get_fontsize() for text in axis.get_xticklabels()) >= 8
    assert max(figure.get_size_inches()) <= 26


def test_a_head_is_at_least_a_pixel(tmp_path):
    layers = [random_layer(40, 16, 31, 31)] * 2
    figure = plot_windows.windows_figure(["word"] * 40, layers, "")
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    height = figure.axes[0].get_position().height * figure.get_size_inches()[1] * 120
    _, _, top, bottom = bars(figure.axes[0], "token", (40, 16))
    assert (bottom - top).min() * height / 40 > 1


# --- The reach over a corpus ---


def test_reach_counts(run, checkpoints, data, load, tmp_path):
    corpus, targets = tmp_path / "corpus", tmp_path / "targets"
    sentences = [(TEXT, TARGET), (TARGET, TEXT), ("w1", "w2 w3")]
    corpus.write_text("".join(f"{source}\n" for source, _ in sentences))
    targets.write_text("".join(f"{target}\n" for _, target in sentences))
    status, printed, written, record = run("wmt", "--corpus", corpus, "--corpus-target", targets)
    assert status == 0 and written == ["w.json", "w.reach.png"]

    model, task = load(checkpoints["wmt"], data)
    reached = {}
    for source, target in sentences:
        ends = expected_ends(model, [*number(source), 2], [2, *number(target)])
        for side, layers in ends.items():
            for n, (a_l, a_r) in enumerate(layers):
                for t in range(len(a_l)):
                    reached.setdefault((side, n, "left"), []).extend(t - a_l[t])
                    reached.setdefault((side, n, "right"), []).extend(a_r[t] - t)
    reaches = plot_windows.reach_over_corpus(model, task, str.split, *map(list, zip(*sentences)))
    assert record["reach"] == reaches
    axes = iter(plot_windows.reach_figure(reaches).axes)
    for side, layers in reaches.items():
        for n, layer in enumerate(layers):
            axis = next(axes)
            for way, sign in (("left", -1), ("right", 1)):
                got, limit = reached[side, n, way], layer[f"max_{way}"]
                assert layer["windows"] == len(got)
                drawn = [bar for bar in axis.patches if bar.get_gid() == way]
                if not limit:
                    assert not drawn and way not in layer["counts"]
                    continue
                assert math.isclose(layer["mean"][way], sum(got) / len(got), abs_tol=1e-4)
                inside, asked = np.array(layer["counts"][way]), np.array(layer["asked"][way])
                counts = [0] * 20
                for reach in got:
                    counts[min(19, int(reach / limit * 20))] += 1
                # A reach on the border of two bins may be rounded into either.
                assert np.abs(np.cumsum(inside) - np.cumsum(counts)).max() <= 1
                assert inside.sum() == asked.sum() == len(got)
                # What is asked for is never less, and more where sentences end.
                assert np.all(np.cumsum(asked) <= np.cumsum(inside))
                shares = [bar.get_height() * len(got) / 100 for bar in drawn]
                assert np.allclose(shares, inside)
                edges = [bar.get_x() for bar in drawn]
                assert np.allclose(edges, sign * np.arange(20) * limit / 20)
                (steps,) = (a for a in axis.patches if a.get_gid() == f"asked {way}")
                assert np.allclose(steps.get_data().values * len(got) / 100, asked)
    assert next(axes, None) is None
    last = reaches["encoder"][3]
    assert last["asked"]["left"] != last["counts"]["left"]


def test_without_targets_the_encoder_alone(checkpoints, data, load):
    for name, side in (("iwslt", "encoder"), ("language model", "decoder")):
        model = load(checkpoints[name], data)
        assert list(plot_windows.reach_over_corpus(*model, str.split, [TARGET])) == [side]


# --- Refusals ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["iwslt"], "--text: expected a sentence, or --corpus, got neither"),
        (["iwslt", "--text", " "], "--text: expected 1 to 99 pieces, got 0"),
        (["iwslt", "--text", "Así sea"], "--text: expected pieces of the dictionary, got unknown"),
        (["iwslt", "--text", "w1 " * 101], "--text: expected 1 to 99 pieces, got 101"),
        (["iwslt", "--text", "w1", "--target", ""], "--target: expected 1 to 99 pieces, got 0"),
        (["iwslt", "--target", "w1", "--corpus", "CORPUS"], "--text: expected one with --target"),
        (["language model", "--text", "w1", "--target", "w1"], "--target: expected none for a lan"),
        (["transformer", "--text", "w1"], "CHECKPOINT: expected a TaLK model, got TransformerMo"),
        (["unsafe", "--text", "w1"], "expected a checkpoint of fairseq in .*unsafe.pt, got the un"),
        (["missing.pt", "--text", "w1"], "CHECKPOINT: expected .*, got missing.pt .*not found"),
        (["iwslt", "--text", "w1", "--data", "gone"], "--data: expected a folder, got gone"),
        (["iwslt", "--text", "w1", "--data", "EMPTY"], r"--data .*No such file.*dict\.es\.txt"),
        (["iwslt", "--text", "w1", "--data", "OTHER"], "--data .*size mismatch"),
        (["iwslt", "--text", "w1", "--sentencepiece", "gone"], "--sentencepiece: expected a Sen"),
        (["iwslt", "--text", "w1", "--sentencepiece", "CORPUS"], "--sentencepiece: expected a Sen"),
        (["iwslt", "--text", "w1", "--corpus", "CORPUS"], "--corpus, line 2: expected 1 to "),
        (
            ["iwslt", "--corpus", "ONE", "--corpus-target", "CORPUS"],
            "--corpus-target: expected 1 l",
        ),
        (["iwslt", "--text", "w1", "--corpus-target", "ONE"], "--corpus: expected one with"),
        (["iwslt", "--corpus", "EMPTY"], "Is a directory"),
        (["iwslt", "--corpus", "VOID"], "--corpus: expected sentences, got an empty file"),
    ],
)
def test_refusals(arguments, message, run, tmp_path):
    places = {name: tmp_path / name.lower() for name in ("CORPUS", "ONE", "VOID", "EMPTY", "OTHER")}
    places["CORPUS"].write_text("w1\n\nw2\n")
    places["ONE"].write_text("w1\n")
    places["VOID"].touch()
    places["EMPTY"].mkdir()
    places["OTHER"].mkdir()
    for language in ("es", "en"):
        (places["OTHER"] / f"dict.{language}.txt").write_text("w1 1\n")
    status, printed, written, _ = run(*(places.get(word, word) for word in arguments))
    assert status == 2 and written == []
    assert len(printed.err.splitlines()) == 1 and printed.err.startswith("plot_windows.py: ")
    assert re.search(message, printed.err), printed.err


def test_colours_survive_greyscale():
    figure = plot_windows.windows_figure(["w"] * 5, [random_layer(5, 2, 3, 3)], "")
    drawn = [tuple(c.get_facecolor()[0, :3]) for c in figure.axes[0].collections]
    assert len(set(drawn)) == 4
    assert lightness_margin(drawn) > 15 and lightness_margin([*drawn, "white"]) > 8

"""Draw where the heads of a TaLK model look.

    plot_windows.py quickstart/averaged.pt --data quickstart/binarised \\
        --sentencepiece quickstart/corpus/sentencepiece.model \\
        --text "Así alumbre vuestra luz delante de los hombres."
    plot_windows.py model.pt --data … --sentencepiece … --corpus test.es --corpus-target test.en

For a sentence, PREFIX.encoder.png and PREFIX.decoder.png: in each layer a line for each token, in
it a bar for each head, from the first to the last word of its window; a word at an end counts by
the part of it that the bar covers. The decoder's words are those of --target or else of the
model's own translation (beam search); those of a language model are the text. With a short
convolution (talkconv_plus) a window is over its output, in which each word has its neighbours too.

For a corpus, of one sentence a line, PREFIX.reach.png: in each layer how far the windows reach to
the left and to the right, up to the largest window. Filled areas count windows after the ends of
the sentence have cut them; the outline ("as heads ask for it") counts them as the heads predict
them. Without --corpus-target it is of the encoder alone.

PREFIX.json holds the numbers drawn. Checkpoints are those of this project or of the published
implementation; no code in them is run. Text is cut into pieces by --sentencepiece; without it, it
has to be in pieces already, with spaces between them.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tqdm import tqdm

import talk_fairseq  # noqa: F401 (first, as it mends fairseq and keeps its logging quiet)

# isort: split
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig

from pipeline.common.files import write_whole
from pipeline.plots.curves import save_figure
from talk_fairseq.modules import TaLKConv

# From dark to light, so that they differ in grey too: to the left, the token itself, to the right,
# and as far as the layer can look.
COLOURS = {"left": "#27408b", "token": "#000000", "right": "#f4a13d", "limit": "#e6e6e6"}
LONGEST = 100  # tokens of a sentence that is drawn
LINE = 0.86  # how much of a token's line its bars fill
BINS = 20  # of a reach, from 0 to its limit

# --- What the model looks at ---


@dataclass
class Layer:
    """The windows of a layer in a sentence; arrays are (T, H), in tokens.

    The window of head h at token t is from a_l[t, h] to a_r[t, h], both included: its ends are
    inside the sentence, and between two tokens where it takes only a part of one. `asked_left` and
    `asked_right` are how far the head would look in a longer sentence.
    """

    max_left: int
    max_right: int
    a_l: np.ndarray
    a_r: np.ndarray
    asked_left: np.ndarray
    asked_right: np.ndarray


def layer_of(conv, offset_left, offset_right):
    """The `Layer` of a TaLKConv and the offsets (T, 1, H) that it predicted for one sentence."""

    def asked(offset, limit):
        if offset is None:
            return np.zeros((T, H))
        return offset[:, 0].double().numpy() * limit

    T, _, H = offset_left.shape
    t = np.arange(T)[:, None]
    left, right = asked(offset_left, conv.max_left), asked(offset_right, conv.max_right)
    a_l, a_r = np.maximum(0, t - left), np.minimum(T - 1, t + right)
    return Layer(conv.max_left, conv.max_right, a_l, a_r, left, right)


@contextlib.contextmanager
def recorded(side):
    """A list that gets the `Layer` of each TaLKConv in the module `side`, as they run."""
    layers = []

    def record(conv, arguments, _):
        layers.append(layer_of(conv, *conv.predict_offsets(arguments[0])))

    convs = [module for module in side.modules() if isinstance(module, TaLKConv)]
    handles = [conv.register_forward_hook(record) for conv in convs]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def sides(model):
    """The parts of `model` that have windows: ``{"encoder": module, "decoder": module}``."""
    parts = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {
        name: part
        for name, part in parts.items()
        if part is not None and any(isinstance(module, TaLKConv) for module in part.modules())
    }


@torch.no_grad()
def look(model, source, target):
    """``{side: [Layer, …]}`` of one pass over token numbers, both (T,).

    `target` is what the decoder is given, an end of sentence first; None leaves the decoder out.
    `source` is None for a language model.
    """
    parts = sides(model)
    with contextlib.ExitStack() as stack:
        seen = {name: stack.enter_context(recorded(part)) for name, part in parts.items()}
        encoder_out = None
        if source is not None:
            encoder_out = model.encoder(source[None], torch.tensor([len(source)]))
        if target is not None:
            context = {} if encoder_out is None else {"encoder_out": encoder_out}
            model.decoder(target[None], features_only=True, **context)
    return {name: layers for name, layers in seen.items() if layers}


def load(checkpoint, data=None):
    """``(model, task)`` of a checkpoint file, in evaluation mode on the CPU.

    `data` is the folder with the dictionaries (default: where the checkpoint says they were).

    Raises ValueError or OSError for a file that is no checkpoint, dictionaries that are missing or
    not the model's, and a model without windows.
    """
    if not Path(checkpoint).is_file():
        raise ValueError(f"CHECKPOINT: expected a file, got {checkpoint}, which is none")
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"--data: expected a folder with dictionaries, got {data}")
    overrides = {} if data is None else {"data": str(data)}
    try:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], overrides
        )
    except FileNotFoundError as error:
        missing = error.filename or error
        raise ValueError(f"--data: expected a folder with dictionaries, got no {missing}") from None
    except (AssertionError, KeyError, RuntimeError) as error:
        if "size mismatch" in str(error):
            raise ValueError(
                "--data: expected the dictionaries that the model was trained with, got some of "
                "another size"
            ) from None
        # Of a task or an arch that is not registered, or without what fairseq saves.
        got = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ValueError(f"CHECKPOINT: expected a TaLK model, got {checkpoint} ({got})") from None
    if not sides(model):
        raise ValueError(f"CHECKPOINT: expected a TaLK model, got {type(model).__name__}")
    return model.eval(), task


# --- Text ---


@dataclass
class Cutter:
    """From text to pieces and their numbers.

    `model` is a SentencePiece model's file; without one, pieces are what spaces separate.
    """

    model: Path | None = None
    _processor: object = field(default=None, init=False)

    def __post_init__(self):
        if self.model is not None:
            if not Path(self.model).is_file():
                raise ValueError(f"--sentencepiece: expected a model's file, got {self.model}")
            try:
                self._processor = sentencepiece.SentencePieceProcessor(model_file=str(self.model))
            except (RuntimeError, OSError):
                raise ValueError(
                    f"--sentencepiece: expected a SentencePiece model, got {self.model}, "
                    "which is none"
                ) from None

    def __call__(self, name, text, dictionary, longest):
        """``(pieces, numbers)`` of a sentence, without its end.

        Raises ValueError, naming `name`, for text without pieces, of more than `longest`, or
        without any that `dictionary` knows.
        """
        pieces = self._processor.encode(text, out_type=str) if self._processor else text.split()
        if not pieces:
            raise ValueError(f"{name}: expected words, got none")
        if len(pieces) > longest:
            raise ValueError(f"{name}: expected at most {longest} pieces, got {len(pieces)}")
        numbers = [dictionary.index(piece) for piece in pieces]
        if all(number == dictionary.unk() for number in numbers):
            hint = "" if self._processor else "; --sentencepiece cuts text into pieces"
            raise ValueError(
                f"{name}: expected pieces of the dictionary, got {len(pieces)} unknown{hint}"
            )
        return pieces, torch.tensor(numbers)


def translate(model, task, source):
    """The best translation of the token numbers `source` (T,), without its end."""
    generator = task.build_generator([model], GenerationConfig(beam=5, max_len_b=LONGEST - 1))
    sample = {
        "id": torch.tensor([0]),
        "net_input": {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])},
    }
    best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
    return best[:-1]  # it ends with the end


def look_at_sentence(model, task, cutter, text, target=None):
    """``{side: (tokens, [Layer, …])}`` of a sentence.

    Raises ValueError for text that the model cannot take.
    """
    most = min(LONGEST, shortest_limit(model)) - 1  # beside them, an end
    end_of = {side: dictionary.eos() for side, dictionary in dictionaries(model, task).items()}
    words = {}
    if "source" not in end_of:
        if target is not None:
            raise ValueError("--target: expected none for a language model, got text")
        words["decoder"], numbers = cutter("--text", text, task.target_dictionary, most)
        given = None, with_end(numbers, end_of["target"], first=True)
    else:
        words["encoder"], numbers = cutter("--text", text, task.source_dictionary, most)
        source = with_end(numbers, end_of["source"])
        if target is None:
            numbers = translate(model, task, source)
            words["decoder"] = [task.target_dictionary[number] for number in numbers]
        else:
            words["decoder"], numbers = cutter("--target", target, task.target_dictionary, most)
        given = source, with_end(numbers, end_of["target"], first=True)
    end = task.target_dictionary[end_of["target"]]
    tokens = {"encoder": [*words.get("encoder", []), end], "decoder": [end, *words["decoder"]]}
    return {side: (tokens[side], layers) for side, layers in look(model, *given).items()}


def dictionaries(model, task):
    """``{"source": …, "target": …}``; a language model has no source."""
    found = {"target": task.target_dictionary}
    if getattr(model, "encoder", None) is not None:
        found["source"] = task.source_dictionary
    return found


def with_end(numbers, end, first=False):
    """The token numbers with the sentence's end after or, as a decoder is given it, before."""
    end = numbers.new_tensor([end])
    return torch.cat([end, numbers] if first else [numbers, end])


def shortest_limit(model):
    """The most tokens that each part of the model takes."""
    limit = model.max_positions()
    return min(limit) if isinstance(limit, tuple) else limit


# --- A corpus ---


@dataclass
class Reach:
    """How far the windows of a layer reach over a corpus, in tokens.

    `counts` has, under "left" and "right", windows by their reach inside the sentence, in BINS
    equal bins from 0 to the limit; `asked` likewise by what the heads ask for. `means` is of the
    reaches inside.
    """

    max_left: int
    max_right: int
    windows: int = 0
    counts: dict = field(default_factory=lambda: _both(lambda: np.zeros(BINS, dtype=int)))
    asked: dict = field(default_factory=lambda: _both(lambda: np.zeros(BINS, dtype=int)))
    sums: dict = field(default_factory=lambda: _both(float))

    def add(self, layer):
        """Count the windows of a sentence."""
        t = np.arange(len(layer.a_l))[:, None]
        for side, limit, inside, asked in (
            ("left", self.max_left, t - layer.a_l, layer.asked_left),
            ("right", self.max_right, layer.a_r - t, layer.asked_right),
        ):
            self.sums[side] += inside.sum()
            if limit:
                for counts, reach in ((self.counts, inside), (self.asked, asked)):
                    counts[side] += np.histogram(reach, BINS, (0, limit))[0]
        self.windows += layer.a_l.size

    @property
    def means(self):
        return {side: total / self.windows for side, total in self.sums.items()}


def _both(make):
    return {"left": make(), "right": make()}


def reach_over_corpus(model, task, cutter, corpus, targets=None):
    """``{side: [Reach, …]}`` over lists of sentences.

    Raises ValueError that names the line of a sentence that the model cannot take.
    """
    most = shortest_limit(model) - 1
    of = dictionaries(model, task)
    translator = "source" in of
    if targets is not None:
        if not translator:
            raise ValueError("--corpus-target: expected none for a language model, got a file")
        if len(targets) != len(corpus):
            raise ValueError(
                f"--corpus-target: expected {len(corpus)} lines as in --corpus, got {len(targets)}"
            )
    if translator and targets is None and "encoder" not in sides(model):
        raise ValueError("--corpus-target: expected the sentences of the decoder, got none")

    def numbers(option, number, text, side, first):
        dictionary = of[side]
        cut = cutter(f"{option}, line {number}", text, dictionary, most)[1]
        return with_end(cut, dictionary.eos(), first)

    reaches = {}
    for number, text in enumerate(tqdm(corpus, "sentences", unit="", disable=None), 1):
        source = target = None
        if not translator:
            target = numbers("--corpus", number, text, "target", True)
        else:
            source = numbers("--corpus", number, text, "source", False)
            if targets is not None:
                other = targets[number - 1]
                target = numbers("--corpus-target", number, other, "target", True)
        for side, layers in look(model, source, target).items():
            if side not in reaches:
                reaches[side] = [Reach(layer.max_left, layer.max_right) for layer in layers]
            for reach, layer in zip(reaches[side], layers):
                reach.add(layer)
    return reaches


def read_lines(option, path):
    """The lines of a text file. Raises ValueError, naming `option`, for none."""
    if not path.is_file():
        raise ValueError(f"{option}: expected a file, got {path}, which is none")
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    if not text:
        raise ValueError(f"{option}: expected sentences, got the empty file {path}")
    return text.split("\n")


# --- Drawing ---


def labels(tokens):
    """How tokens are written. Where SentencePiece has cut them, a piece within a word has a "·"."""
    if any(token.startswith("▁") for token in tokens):
        tokens = [
            (token.removeprefix("▁") or "▁")
            if token.startswith("▁") or token.startswith("</")
            else "·" + token
            for token in tokens
        ]
    return [token if len(token) <= 14 else token[:13] + "…" for token in tokens]


def boxes(left, right, top, bottom):
    """Rectangles as a PolyCollection takes them, (N, 4, 2), of arrays that broadcast to (N,)."""
    left, right, top, bottom = np.broadcast_arrays(left, right, top, bottom)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=-2).reshape(-1, 4, 2)


def draw_layer(axis, layer):
    """The windows of a layer: a line for each token from the top, in it a bar for each head.

    The axes count tokens: a token takes from half before to half after its number. The collections
    are, by their gid, "limit" (a box for each token), and "left", "token" and "right" (a box for
    each token and head, heads first).
    """
    T, H = layer.a_l.shape
    t = np.arange(T)
    axis.add_collection(
        PolyCollection(
            boxes(
                np.maximum(t - layer.max_left, 0) - 0.5,
                np.minimum(t + layer.max_right, T - 1) + 0.5,
                t - LINE / 2,
                t + LINE / 2,
            ),
            facecolors=COLOURS["limit"],
            gid="limit",
        )
    )
    t, head = t[:, None], np.arange(H)
    top = t - LINE / 2 + LINE * head / H
    for side, first, last in (
        ("left", layer.a_l - 0.5, t - 0.5),
        ("token", t - 0.5, t + 0.5),
        ("right", t + 0.5, layer.a_r + 0.5),
    ):
        rectangles = boxes(first, last, top, top + LINE / H)
        axis.add_collection(PolyCollection(rectangles, facecolors=COLOURS[side], gid=side))
    axis.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    axis.set_xticks(np.arange(T))
    axis.set_yticks(np.arange(T))
    axis.tick_params(length=0, pad=2)
    for edge in np.arange(T - 1) + 0.5:  # between the words
        axis.axvline(edge, color="0.85", linewidth=0.4, zorder=0.5)


def windows_figure(tokens, layers, title):
    """A Figure with a panel for each of `layers` (see `draw_layer`), its words at both edges."""
    T, H = layers[0].a_l.shape
    cell = min(0.42, max(0.145, 2.6 / T))  # inches; a word on either axis needs 0.145
    width, height = cell * T, max(cell, 0.011 * H) * T
    words = labels(tokens)
    size = 8 if cell < 0.2 else 9
    margin = 0.2 + max(map(len, words)) * 0.58 * size / 72
    # As many columns as bring the figure nearest to a screen's 16:10.
    across, down = max(width + 0.25, 2.5), height + margin + 0.3

    def shape(columns):
        rows = -(-len(layers) // columns)
        return columns * across + margin, rows * down + 0.9

    full_grids = {-(-len(layers) // rows) for rows in range(1, len(layers) + 1)}
    columns = min(full_grids, key=lambda n: abs(np.log(shape(n)[0] / shape(n)[1] / 1.6)))
    full = max(shape(columns)[0], 8.5), shape(columns)[1]
    figure = Figure(figsize=full)
    figure.suptitle(title, x=0.15 / full[0], y=1 - 0.12 / full[1], ha="left", va="top", size=12)
    for number, layer in enumerate(layers):
        row, column = divmod(number, columns)
        left, bottom = margin + column * across, full[1] - 0.8 - row * down - height
        axis = figure.add_axes(
            (left / full[0], bottom / full[1], width / full[0], height / full[1])
        )
        draw_layer(axis, layer)
        reach = f"{layer.max_left} left" + (f", {layer.max_right} right" if layer.max_right else "")
        axis.set_title(f"layer {number + 1}: up to {reach}", size=10, loc="left")
        axis.set_xticklabels(words, rotation=90, size=size, parse_math=False)
        axis.set_yticklabels(words if column == 0 else [], size=size, parse_math=False)
    names = {"left": "to the left", "token": "the token itself", "right": "to the right"}
    names["limit"] = "as far as the layer can look"
    if not any(layer.max_right for layer in layers):
        del names["right"]
    handles = [Patch(facecolor=COLOURS[side], label=name) for side, name in names.items()]
    figure.legend(
        handles=handles, ncols=len(handles), frameon=False, loc="upper left",
        bbox_to_anchor=(0, 1 - 0.3 / full[1]), fontsize=9,
    )  # fmt: skip
    return figure


def reach_figure(reaches):
    """A Figure with a panel for each layer of ``{side: [Reach, …]}``: a histogram to both sides.

    The bars are windows by their reach inside the sentence and the steps what heads ask for, in
    percent; their gids are "left", "right", "asked left" and "asked right".
    """
    panels = [
        (side, n, reach) for side, layers in reaches.items() for n, reach in enumerate(layers)
    ]
    columns = min(4, max(len(layers) for layers in reaches.values()))
    rows = {side: -(-len(layers) // columns) for side, layers in reaches.items()}
    lines = sum(rows.values())
    size = max(3.4 * columns, 7.5), 2.2 * lines + 0.7
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(lines, columns)
    first = dict(zip(rows, np.cumsum([0, *rows.values()])))
    for side, number, reach in panels:
        axis = figure.add_subplot(grid[first[side] + number // columns, number % columns])
        for way, sign, limit in (("left", -1, reach.max_left), ("right", 1, reach.max_right)):
            if not limit:
                continue
            edges = sign * np.linspace(0, limit, BINS + 1)
            share = 100 * reach.counts[way] / reach.windows
            axis.bar(edges[:-1], share, np.diff(edges), align="edge", color=COLOURS[way], gid=way)
            asked = 100 * reach.asked[way] / reach.windows
            axis.stairs(asked, edges, color=COLOURS["token"], linewidth=1, gid=f"asked {way}")
            axis.axvline(sign * limit, color="0.5", linestyle="--", linewidth=1)
        means = [f"{mean:.1f} {way}" for way, mean in reach.means.items()]
        means = means if reach.max_right else means[:1]
        axis.set_title(f"{side} layer {number + 1}: mean {', '.join(means)}", size=9, loc="left")
        low, high = -reach.max_left or -0.5, reach.max_right or (0 if reach.max_left else 0.5)
        margin = 0.04 * (high - low)
        axis.set_xlim(low - margin, high + margin)
        ticks = {
            way * limit for limit in (reach.max_left, -reach.max_right) for way in (-1, -0.5, 0)
        }
        axis.set_xticks(sorted(ticks))
        axis.xaxis.set_major_formatter(lambda x, _: f"{abs(x):g}")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.tick_params(labelsize=8)
    figure.supxlabel("reach in tokens, to the left of 0 and to the right of it", size=9)
    figure.supylabel("windows, %", size=9)
    drawn = [way for way in ("left", "right") if way == "left" or len(reaches.get("encoder", []))]
    handles = [Patch(facecolor=COLOURS[way], label=f"to the {way}") for way in drawn]
    handles.append(Patch(fill=False, edgecolor=COLOURS["token"], label="as heads ask for it"))
    figure.legend(handles=handles, ncols=3, frameon=False, loc="outside upper left", fontsize=9)
    return figure


# --- Output ---


def sentence_record(tokens, layers):
    """The numbers of `windows_figure`; per layer, head and token the ends of its window."""

    def rows(ends):
        return [[round(end, 4) for end in head] for head in ends.T.tolist()]

    return {
        "tokens": tokens,
        "layers": [
            {
                "max_left": layer.max_left,
                "max_right": layer.max_right,
                "heads": [{"a_l": a, "a_r": b} for a, b in zip(rows(layer.a_l), rows(layer.a_r))],
            }
            for layer in layers
        ],
    }


def reach_record(layers):
    """The numbers of `reach_figure`, for the layers of one side."""
    return [
        {
            "max_left": reach.max_left,
            "max_right": reach.max_right,
            "windows": reach.windows,
            "mean": reach.means,
            "counts": {way: counts.tolist() for way, counts in reach.counts.items()},
            "asked": {way: counts.tolist() for way, counts in reach.asked.items()},
        }
        for reach in layers
    ]


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--text", help="a sentence")
    parser.add_argument("--target", help="its translation (default: the model's own)")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="sentences, one a line")
    parser.add_argument("--corpus-target", type=Path, metavar="FILE", help="their translations")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="dictionaries (default: those of the training)"
    )
    parser.add_argument("--sentencepiece", type=Path, metavar="MODEL", help="cuts text into pieces")
    parser.add_argument(
        "--output", type=Path, metavar="PREFIX", default=Path("windows"), help="default: windows"
    )
    return parser.parse_args(arguments)


def check(args):
    """Raise ValueError for options that do not go together."""
    if args.text is None and args.corpus is None:
        raise ValueError("--text: expected a sentence, or --corpus, got neither")
    if args.target is not None and args.text is None:
        raise ValueError("--text: expected a sentence with --target, got none")
    if args.corpus_target is not None and args.corpus is None:
        raise ValueError("--corpus: expected a file with --corpus-target, got none")


def run(args):
    """The paths of the files written. Raises ValueError or OSError, and writes none, if it must."""
    check(args)
    corpus = args.corpus and read_lines("--corpus", args.corpus)
    targets = args.corpus_target and read_lines("--corpus-target", args.corpus_target)
    cutter = Cutter(args.sentencepiece)
    model, task = load(args.checkpoint, args.data)
    record, figures = {"checkpoint": str(args.checkpoint)}, {}
    if args.text is not None:
        seen = look_at_sentence(model, task, cutter, args.text, args.target)
        for side, (tokens, layers) in seen.items():
            record[side] = sentence_record(tokens, layers)
            heads = layers[0].a_l.shape[1]
            title = (
                f"{side.capitalize()}: where each token looks. In its line, a bar for each of "
                f"{heads} heads; · continues a word"
            )
            figures[side] = windows_figure(tokens, layers, title)
    if corpus:
        reaches = reach_over_corpus(model, task, cutter, corpus, targets)
        record["reach"] = {side: reach_record(layers) for side, layers in reaches.items()}
        figures["reach"] = reach_figure(reaches)

    paths = []
    for name, figure in figures.items():
        paths.append(args.output.with_name(f"{args.output.name}.{name}.png"))
        save_figure(figure, paths[-1])
    paths.append(args.output.with_name(f"{args.output.name}.json"))
    write_whole(paths[-1], json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    return paths


def main(arguments=None):
    """Run the command; one line and status 2 for what cannot be drawn."""
    args = parse(arguments)
    try:
        paths = run(args)
    except (OSError, ValueError) as error:
        print(f"plot_windows.py: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    print("written:", ", ".join(map(str, paths)))
    return 0

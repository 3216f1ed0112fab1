"""Draw where the heads of a TaLK model look.

    plot_windows.py quickstart/averaged.pt --data quickstart/binarised \\
        --sentencepiece quickstart/corpus/sentencepiece.model \\
        --text "Así alumbre vuestra luz delante de los hombres."
    plot_windows.py model.pt --data … --sentencepiece … --corpus test.es --corpus-target test.en
    plot_windows.py my_checkpoints/checkpoint_best.pt --user-dir my_variant --data … --text …

For a sentence, PREFIX.encoder.png and PREFIX.decoder.png: in each layer a line for each token, in
it a bar for each head, from the first to the last word of its window; a word at an end counts by
the part of it that the bar covers. The decoder's words are those of --target, or else of the
model's own translation (beam search); those of a language model are the text. With a short
convolution (talkconv_plus) a window is over its output, in which each word has its neighbours too.

For a corpus, with one sentence per line, PREFIX.reach.png: in each layer how far the windows reach
to the left and to the right, up to the largest window. Filled areas count windows after the ends of
the sentence have cut them; the outline counts them as the heads predict them, before that cut.
Without --corpus-target it shows the encoder alone.

PREFIX.json holds the numbers drawn. Checkpoints are those of this project or of the published
implementation, and no code in them is run; or, with --user-dir, those of a model whose convolutions
are subclasses of TaLKConv. Text is cut into pieces by --sentencepiece; without it, it has to be in
pieces already, with spaces between them.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipeline.common.files import write_whole
from pipeline.plots.figures import save_figure
from pipeline.plots.heads import BINS, Cutter, load, look_at_sentence, reach_over_corpus, read_lines

# From dark to light, so that they differ in grey too: to the left, the token itself, to the right,
# and as far as the layer can look.
COLOURS = {"left": "#27408b", "token": "#000000", "right": "#f4a13d", "limit": "#e6e6e6"}
LINE = 0.86  # how much of a token's line its bars fill

# --- Drawing ---


def labels(tokens):
    """Return how tokens are written: with a "·" where SentencePiece has cut within a word."""
    if any(token.startswith("▁") for token in tokens):
        tokens = [
            (token.removeprefix("▁") or "▁")
            if token.startswith("▁") or token.startswith("</")
            else "·" + token
            for token in tokens
        ]
    return [token if len(token) <= 14 else token[:13] + "…" for token in tokens]


def boxes(left, right, top, bottom):
    """Return rectangles (N, 4, 2), as a PolyCollection takes them, of arrays that broadcast."""
    left, right, top, bottom = np.broadcast_arrays(left, right, top, bottom)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=-2).reshape(-1, 4, 2)


def draw_layer(axis, layer):
    """Draw the windows of a layer: a line for each token from the top, in it a bar for each head.

    The axes count tokens: a token takes from half before to half after its number. The collections
    are, by their gid, "limit" (a box for each token), and "left", "token" and "right" (a box for
    each token and head, heads first).
    """
    T, H = layer.a_l.shape
    t = np.arange(T)
    first, last = np.maximum(t - layer.max_left, 0), np.minimum(t + layer.max_right, T - 1)
    rectangles = {"limit": boxes(first - 0.5, last + 0.5, t - LINE / 2, t + LINE / 2)}
    t, head = t[:, None], np.arange(H)
    top = t - LINE / 2 + LINE * head / H
    for side, first, last in (
        ("left", layer.a_l - 0.5, t - 0.5),
        ("token", t - 0.5, t + 0.5),
        ("right", t + 0.5, layer.a_r + 0.5),
    ):
        rectangles[side] = boxes(first, last, top, top + LINE / H)
    for side, corners in rectangles.items():
        axis.add_collection(PolyCollection(corners, facecolors=COLOURS[side], gid=side))
    axis.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    axis.set_xticks(np.arange(T))
    axis.set_yticks(np.arange(T))
    axis.tick_params(length=0, pad=2)
    for edge in np.arange(T - 1) + 0.5:  # between the words
        axis.axvline(edge, color="0.85", linewidth=0.4, zorder=0.5)


def windows_figure(tokens, layers, title):
    """Return a Figure with a panel for each of `layers` (see `draw_layer`), words at both edges."""
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
    figure.suptitle(title, x=0.15 / full[0], y=1 - 0.12 / full[1], ha="left", va="top", size=11)
    for number, layer in enumerate(layers):
        row, column = divmod(number, columns)
        left, bottom = margin + column * across, full[1] - 0.8 - row * down - height
        place = left / full[0], bottom / full[1], width / full[0], height / full[1]
        axis = figure.add_axes(place)
        draw_layer(axis, layer)
        reach = f"{layer.max_left} left" + (f", {layer.max_right} right" if layer.max_right else "")
        axis.set_title(f"layer {number + 1}: up to {reach}", size=10, loc="left")
        axis.set_xticklabels(words, rotation=90, size=size, parse_math=False)
        axis.set_yticklabels(words if column == 0 else [], size=size, parse_math=False)
    names = {"left": "window to the left", "token": "the token itself"}
    names |= {"right": "window to the right", "limit": "largest window of the layer"}
    if not any(layer.max_right for layer in layers):
        del names["right"]
    handles = [Patch(facecolor=COLOURS[side], label=name) for side, name in names.items()]
    figure.legend(
        handles=handles, ncols=len(handles), frameon=False, loc="upper left",
        bbox_to_anchor=(0, 1 - 0.3 / full[1]), fontsize=9,
    )  # fmt: skip
    return figure


def reach_figure(reaches):
    """Return a Figure with a panel for each layer of ``{side: [Reach, …]}``: two histograms.

    The bars are windows by their reach inside the sentence and the outlines what heads predict, in
    percent; their gids are "left", "right", "asked left" and "asked right".
    """
    columns = min(4, max(len(layers) for layers in reaches.values()))
    rows = {side: -(-len(layers) // columns) for side, layers in reaches.items()}
    lines = sum(rows.values())
    size = max(3.4 * columns, 7.5), 2.2 * lines + 0.7
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(lines, columns)
    first = dict(zip(rows, np.cumsum([0, *rows.values()])))
    panels = ((side, *panel) for side, layers in reaches.items() for panel in enumerate(layers))
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
        ticks = {share * end for end in (-reach.max_left, reach.max_right) for share in (0, 0.5, 1)}
        axis.set_xticks(sorted(ticks))
        axis.xaxis.set_major_formatter(lambda x, _: f"{abs(x):g}")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.tick_params(labelsize=8)
    figure.supxlabel("how far windows reach to the left and to the right, in tokens", size=9)
    figure.supylabel("share of the windows, %", size=9)
    drawn = [way for way in ("left", "right") if way == "left" or len(reaches.get("encoder", []))]
    handles = [Patch(facecolor=COLOURS[way], label=f"window to the {way}") for way in drawn]
    outline = {"fill": False, "edgecolor": COLOURS["token"]}
    handles.append(Patch(**outline, label="as predicted, before the sentence's ends cut it"))
    handles.append(Line2D([], [], color="0.5", linestyle="--", label="largest window"))
    columns = len(handles) if size[0] > 9.5 else 2
    figure.legend(
        handles=handles, ncols=columns, frameon=False, loc="outside upper left", fontsize=9
    )
    return figure


# --- Output ---


def sentence_record(tokens, layers):
    """Return the numbers of `windows_figure`: the ends of the window of each head and token."""

    def rows(ends):
        return [[round(end, 4) for end in head] for head in ends.T.tolist()]

    record = {"tokens": tokens, "layers": []}
    for layer in layers:
        heads = [{"a_l": a, "a_r": b} for a, b in zip(rows(layer.a_l), rows(layer.a_r))]
        limits = {"max_left": layer.max_left, "max_right": layer.max_right}
        record["layers"].append({**limits, "heads": heads})
    return record


def reach_record(layers):
    """Return the numbers of `reach_figure`, for the layers of one side."""
    records = []
    for reach in layers:
        record = {key: getattr(reach, key) for key in ("max_left", "max_right", "windows")}
        record["mean"] = reach.means
        for key, found in (("counts", reach.counts), ("asked", reach.asked)):
            record[key] = {way: counts.tolist() for way, counts in found.items()}
        records.append(record)
    return records


def parse(arguments):
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    for option, metavar, kind, text in (
        ("--text", "TEXT", str, "a sentence"),
        ("--target", "TEXT", str, "its translation (default: the model's own)"),
        ("--corpus", "FILE", Path, "sentences, one per line"),
        ("--corpus-target", "FILE", Path, "their translations"),
        ("--data", "FOLDER", Path, "dictionaries (default: those of the training)"),
        ("--user-dir", "FOLDER", Path, "your own models, as for fairseq-train"),
        ("--sentencepiece", "MODEL", Path, "cuts text into pieces"),
    ):
        parser.add_argument(option, metavar=metavar, type=kind, help=text)
    parser.add_argument("--output", metavar="PREFIX", type=Path, default=Path("windows"),
                        help="default: windows")  # fmt: skip
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
    """Write the files and return their paths. Raises ValueError or OSError before it writes any."""
    check(args)
    corpus = args.corpus and read_lines("--corpus", args.corpus)
    targets = args.corpus_target and read_lines("--corpus-target", args.corpus_target)
    cutter = Cutter(args.sentencepiece)
    model, task = load(args.checkpoint, args.data, args.user_dir)
    record, figures = {"checkpoint": str(args.checkpoint)}, {}
    if args.text is not None:
        seen = look_at_sentence(model, task, cutter, args.text, args.target)
        for side, (tokens, layers) in seen.items():
            record[side] = sentence_record(tokens, layers)
            heads = layers[0].a_l.shape[1]
            title = f"{side.capitalize()}: the window around each token. In its line, a bar for "
            title += f"each of {heads} heads; · continues a word"
            figures[side] = windows_figure(tokens, layers, title)
    if corpus:
        reaches = reach_over_corpus(model, task, cutter, corpus, targets)
        record["reach"] = {side: reach_record(layers) for side, layers in reaches.items()}
        figures["reach"] = reach_figure(reaches)

    paths = []
    for name, figure in figures.items():
        paths.append(args.output.with_name(f"{args.output.name}.{name}.png"))
        save_figure(figure, paths[-1], bbox_inches="tight")  # without empty space around it
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

"""Draw where the heads of a TaLK model look.

    plot_windows.py quickstart/averaged.pt --data quickstart/binarised \\
        --sentencepiece quickstart/corpus/sentencepiece.model \\
        --text "Así alumbre vuestra luz delante de los hombres."
    plot_windows.py model.pt --data … --sentencepiece … --corpus test.es --corpus-target test.en
    plot_windows.py my_checkpoints/checkpoint_best.pt --user-dir my_variant --data … --text …

For a sentence, PREFIX.encoder.png and PREFIX.decoder.png: in each layer a line for each token, in
it a bar for each head, from the first to the last word of its window; a word at an end counts by
the part of it that the bar covers. The decoder's words are those of --target, or else of the
model's own translation; those of a language model are the text. With a short convolution
(talkconv_plus) a window is over its output, in which each word has its neighbours too.

For a corpus, PREFIX.reach.png: in each layer how far the windows reach. Filled areas count windows
after the ends of the sentence have cut them; the outline counts them as the heads predict them.
Without --corpus-target it shows the encoder alone.

PREFIX.json holds the numbers drawn. No code in a checkpoint is run. With --user-dir it may be of a
model whose convolutions are subclasses of TaLKConv. Without --sentencepiece, the text has to be in
pieces already, with spaces between them.
"""

import math
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection

from pipeline.common import command
from pipeline.common.files import read_lines, write_json
from pipeline.plots import heads
from pipeline.plots.figures import add_legend, panel_grid, save_figure

# From dark to light, so that they differ in grey too: to the left, the token itself, to the right,
# and as far as the layer can look.
COLOURS = {"left": "#27408b", "token": "#000000", "right": "#f4a13d", "limit": "#e6e6e6"}
NAMES = {
    **{"left": "window to the left", "token": "the token itself", "right": "window to the right"},
    "limit": "largest window of the layer",
}
LINE = 0.86  # how much of a token's line its bars fill


def labels(tokens):
    """Return how tokens are written: with a "·" where SentencePiece has cut within a word."""
    if any(token.startswith("▁") for token in tokens):
        tokens = [
            (token.removeprefix("▁") or "▁") if token.startswith(("▁", "</")) else "·" + token
            for token in tokens
        ]
    return [token if len(token) <= 14 else token[:13] + "…" for token in tokens]


def draw_boxes(axis, side, left, right, top, bottom):
    """Draw boxes in the colour of a `side`, its gid too; their edges are arrays that broadcast."""
    left, right, top, bottom = np.broadcast_arrays(left, right, top, bottom)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    corners = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=-2)
    axis.add_collection(PolyCollection(
        corners.reshape(-1, 4, 2), facecolors=COLOURS[side], gid=side, label=NAMES[side]
    ))  # fmt: skip


def draw_layer(axis, layer):
    """Draw the windows of a layer: a line for each token from the top, in it a bar for each head.

    The axes count tokens: a token takes from half before to half after its number. The collections
    are, by their gid, "limit" (a box for each token), and "left", "token" and "right" (a box for
    each token and head, heads first).
    """
    (T, H), (left, right) = layer.left.shape, layer.inside
    t = np.arange(T)
    first, last = np.maximum(t - layer.max_left, 0), np.minimum(t + layer.max_right, T - 1)
    draw_boxes(axis, "limit", first - 0.5, last + 0.5, t - LINE / 2, t + LINE / 2)
    t = t[:, None]
    top = t - LINE / 2 + LINE * np.arange(H) / H
    draw_boxes(axis, "left", t - left - 0.5, t - 0.5, top, top + LINE / H)
    draw_boxes(axis, "token", t - 0.5, t + 0.5, top, top + LINE / H)
    if layer.max_right:
        draw_boxes(axis, "right", t + 0.5, t + right + 0.5, top, top + LINE / H)
    axis.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    axis.set_xticks(np.arange(T - 1) + 0.5, minor=True)  # between the words
    axis.grid(which="minor", axis="x", color="0.85", linewidth=0.4)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", length=0, pad=2)


def windows_figure(tokens, layers, title):
    """Return a Figure with a panel for each of `layers` (see `draw_layer`), words at both edges."""
    T, H = layers[0].left.shape
    cell = min(0.42, max(0.16, 2.6 / T))  # inches; a word on either axis needs some 0.15
    words = labels(tokens)
    margin = 0.3 + max(map(len, words)) * 0.07
    columns = min(len(layers), math.ceil(math.sqrt(2 * len(layers))))
    width, height = max(cell * T, 2.3) + margin, max(cell, 0.011 * H) * T + margin + 0.3
    figure, axes = panel_grid(len(layers), columns, width, height)
    figure.suptitle(title, x=0.01, ha="left", size=11)
    for number, (axis, layer) in enumerate(zip(axes, layers)):
        draw_layer(axis, layer)
        reach = f"{layer.max_left} left" + (f", {layer.max_right} right" if layer.max_right else "")
        axis.set_title(f"layer {number + 1}: up to {reach}", size=10, loc="left")
        axis.set_xticks(range(T), words, rotation=90, size=8, parse_math=False)
        axis.set_yticks(range(T), [] if number % columns else words, size=8, parse_math=False)
    add_legend(figure, axes, 4)
    return figure


def reach_figure(reaches):
    """Return a Figure of heads.reach_over_corpus with a panel for each layer: two histograms.

    The bars are windows by their reach inside the sentence and the outlines what heads predict, in
    percent; their gids are "left", "right", "asked left" and "asked right".
    """
    panels = [(side, *layer) for side in reaches for layer in enumerate(reaches[side], 1)]
    figure, axes = panel_grid(len(panels), 4, 3.4, 2.2)
    for axis, (side, number, reach) in zip(axes, panels):
        for way, sign in (("left", -1), ("right", 1)):
            if limit := reach[f"max_{way}"]:
                edges = sign * np.linspace(0, limit, heads.BINS + 1)
                share = 100 * np.array(reach["counts"][way]) / reach["windows"]
                axis.bar(edges[:-1], share, np.diff(edges), align="edge", color=COLOURS[way],
                         gid=way, label=NAMES[way])  # fmt: skip
                axis.stairs(
                    100 * np.array(reach["asked"][way]) / reach["windows"], edges,
                    color=COLOURS["token"], gid=f"asked {way}",
                    label="as predicted, before the sentence's ends cut it",
                )  # fmt: skip
                axis.axvline(sign * limit, color="0.5", linestyle="--", label=NAMES["limit"])
        means = ", ".join(f"{mean:.1f} {way}" for way, mean in reach["mean"].items())
        axis.set_title(f"{side} layer {number}: mean {means}", size=9, loc="left")
        axis.xaxis.set_major_formatter(lambda x, _: f"{abs(x):g}")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(xlabel="tokens to the left and to the right", ylabel="windows, %")
    add_legend(figure, axes, 2)
    return figure


def sentence_record(tokens, layers):
    """Return the numbers of `windows_figure`: the ends of the window of each head and token."""
    record, t = {"tokens": tokens, "layers": []}, np.arange(len(tokens))[:, None]
    for layer in layers:
        left, right = layer.inside
        ends = (end.T.round(4).tolist() for end in (t - left, t + right))
        heads = [{"a_l": a_l, "a_r": a_r} for a_l, a_r in zip(*ends)]
        limits = {"max_left": layer.max_left, "max_right": layer.max_right}
        record["layers"].append({**limits, "heads": heads})
    return record


def parse(arguments=None):
    """Return the options."""
    parser = command.parser("plot_windows.py", __doc__)
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
    args = parser.parse_args(arguments)
    if args.text is None and args.corpus is None:
        parser.error("--text: expected a sentence, or --corpus, got neither")
    for one, other in (("target", "text"), ("corpus_target", "corpus")):
        if getattr(args, one) is not None and getattr(args, other) is None:
            parser.error(f"--{other}: expected one with --{one.replace('_', '-')}, got none")
    return args


def draw(args):
    """Write the files. Raises ValueError or OSError before it writes any."""
    corpus = args.corpus and read_lines(args.corpus)
    targets = args.corpus_target and read_lines(args.corpus_target)
    cut = heads.cutter(args.sentencepiece)
    model, task = heads.load(args.checkpoint, args.data, args.user_dir)
    record, figures = {"checkpoint": str(args.checkpoint)}, {}
    if args.text is not None:
        target, longest = args.target, heads.LONGEST
        if target is None and getattr(model, "encoder", None) is not None:
            tokens, _ = heads.look_at(model, task, cut, args.text, longest=longest)["encoder"]
            target = heads.translate(model, task, tokens)
        seen = heads.look_at(model, task, cut, args.text, target, longest=longest)
        for side, (tokens, layers) in seen.items():
            record[side] = sentence_record(tokens, layers)
            title = f"{side.capitalize()}: the window around each token. In its line, a bar for "
            title += f"each of {layers[0].left.shape[1]} heads; · continues a word"
            figures[side] = windows_figure(tokens, layers, title)
    if corpus is not None:
        record["reach"] = heads.reach_over_corpus(model, task, cut, corpus, targets)
        figures["reach"] = reach_figure(record["reach"])

    paths = [args.output.with_name(f"{args.output.name}.{name}.png") for name in figures]
    for path, figure in zip(paths, figures.values()):
        save_figure(figure, path, bbox_inches="tight")  # without empty space around it
    paths.append(args.output.with_name(f"{args.output.name}.json"))
    write_json(paths[-1], record)
    print("written:", ", ".join(map(str, paths)))


def main(arguments=None):
    """Run the command; one line and status 2 for what cannot be drawn."""
    args = parse(arguments)
    return command.run("plot_windows.py", lambda: draw(args), (OSError, ValueError))

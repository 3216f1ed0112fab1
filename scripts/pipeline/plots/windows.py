"""Draw where the heads of a TaLK model look.

    plot_windows.py model.pt --data … --sentencepiece … --text "Así alumbre vuestra luz."
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
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from matplotlib.collections import PolyCollection
from tqdm import tqdm

from pipeline.common import command
from pipeline.common.files import read_lines, write_json
from pipeline.plots.figures import add_legend, panel_grid, save_figure
from talk_fairseq.modules import TaLKConv

from fairseq import checkpoint_utils, utils
from fairseq.dataclass.configs import GenerationConfig

LONGEST = 100  # tokens of a sentence that is drawn
BINS = 20  # of a reach, from 0 to its limit
# From dark to light, so that they differ in grey too: to the left, the token itself, to the right,
# and as far as the layer can look.
COLOURS = {"left": "#27408b", "token": "#000000", "right": "#f4a13d", "limit": "#e6e6e6"}
NAMES = {
    **{"left": "window to the left", "token": "the token itself", "right": "window to the right"},
    "limit": "largest window of the layer",
}
LINE = 0.86  # how much of a token's line its bars fill


class Layer:
    """The windows of a layer, a TaLKConv, in a sentence: of the offsets (T, 1, H) that it predicts.

    Each head would look as far as `left` and `right` (T, H), in tokens, in a longer sentence.
    Between two tokens, a window takes only a part of one.
    """

    def __init__(self, conv, offset_left, offset_right=None):
        self.max_left, self.max_right = conv.max_left, conv.max_right
        self.left = offset_left[:, 0].double().numpy() * conv.max_left
        self.right = np.zeros_like(self.left)
        if offset_right is not None:
            self.right = offset_right[:, 0].double().numpy() * conv.max_right

    @property
    def inside(self):
        """Return how far the windows reach inside the sentence, to the left and right."""
        t = np.arange(len(self.left))[:, None]
        return np.minimum(self.left, t), np.minimum(self.right, t[::-1])


@torch.no_grad()
def look(model, encoder=None, decoder=None):
    """Return ``{side: [Layer, …]}`` of one pass over the token numbers (T,) of each side.

    Those of the decoder begin with an end of sentence; None leaves the decoder out. A language
    model has no encoder.
    """
    seen, context = {}, {}

    def record(layers, conv, arguments, _):
        layers.append(Layer(conv, *conv.predict_offsets(arguments[0])))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, TaLKConv):
                layers = seen.setdefault(name.partition(".")[0], [])
                hooks.enter_context(module.register_forward_hook(partial(record, layers)))
        if encoder is not None:
            lengths = torch.tensor([len(encoder)])
            context["encoder_out"] = model.encoder(encoder[None], lengths)
        if decoder is not None:
            model.decoder(decoder[None], features_only=True, **context)
    return {side: layers for side, layers in seen.items() if layers}


def load(checkpoint, data=None, user_dir=None):
    """Return ``(model, task)`` of a checkpoint file, in evaluation mode on the CPU.

    Args:
        data: the folder with the dictionaries (default: where the checkpoint says they were).
        user_dir: a folder with models of one's own, as for fairseq-train.

    Raises ValueError for a file that is no checkpoint, dictionaries that are missing or not the
    model's, and a model without windows.
    """
    for option, folder in (("--data", data), ("--user-dir", user_dir)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{option}: expected a folder, got {folder}")
    utils.import_user_module(Namespace(user_dir=user_dir and str(user_dir)))
    overrides = {} if data is None else {"data": str(data)}
    try:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], overrides
        )
    except (AssertionError, KeyError, OSError, RuntimeError) as error:
        # Of a task or an arch that is not registered, or dictionaries of another size.
        got = " ".join(f"{type(error).__name__}: {error}".split())[:250]
        wanted = "a TaLK model that --data and, for an arch of your own, --user-dir belong to"
        raise ValueError(f"CHECKPOINT: expected {wanted}, got {checkpoint} ({got})") from None
    if not any(isinstance(module, TaLKConv) for module in model.modules()):
        raise ValueError(f"CHECKPOINT: expected a TaLK model, got {type(model).__name__}")
    return model.eval(), task


def cutter(path=None):
    """Return what cuts a text into pieces: a SentencePiece model's file or, without one, spaces."""
    if path is None:
        return str.split
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise ValueError(f"--sentencepiece: expected a SentencePiece model, got {path}") from None
    return lambda text: processor.encode(" ".join(text.split()), out_type=str)


def pieces_of(text, dictionary, cut, name):
    """Return the pieces of a text, or of token numbers. ValueError if all are unknown."""
    if not isinstance(text, str):
        return [dictionary[number] for number in text]
    pieces = cut(text)
    if pieces and all(dictionary.index(piece) == dictionary.unk() for piece in pieces):
        hint = "; --sentencepiece cuts text into pieces" if cut is str.split else ""
        raise ValueError(f"{name}: expected pieces of the dictionary, got unknown ones{hint}")
    return pieces


def look_at(model, task, cut, text, target=None, names=("--text", "--target"), longest=math.inf):
    """Return ``{side: (tokens, [Layer, …])}`` of a sentence and its translation.

    Without a `target`, only the encoder is in it; a language model takes the `text` alone.

    Args:
        cut: what `cutter` returns.
        target: the translation, as text or as token numbers.
        names: of both texts, for the ValueError where the model cannot take one.
        longest: the most tokens (default: those that the model takes).
    """
    longest = min(longest, np.min(model.max_positions()))
    if hasattr(model, "encoder"):
        given = {"encoder": text} if target is None else {"encoder": text, "decoder": target}
    elif target is None:
        given = {"decoder": text}
    else:
        raise ValueError(f"{names[1]}: expected none for a language model, got text")
    tokens, numbers = {}, {}
    for name, (side, own) in zip(names, given.items()):
        dictionary = task.source_dictionary if side == "encoder" else task.target_dictionary
        pieces = pieces_of(own, dictionary, cut, name)
        if not 0 < len(pieces) < longest:
            raise ValueError(f"{name}: expected 1 to {longest - 1} pieces, got {len(pieces)}")
        end = dictionary[dictionary.eos()]
        tokens[side] = [*pieces, end] if side == "encoder" else [end, *pieces]
        numbers[side] = torch.tensor([dictionary.index(token) for token in tokens[side]])
    return {side: (tokens[side], layers) for side, layers in look(model, **numbers).items()}


def translate(model, task, tokens):
    """Return the best translation of `tokens` as token numbers, without its end."""
    source = torch.tensor([[task.source_dictionary.index(token) for token in tokens]])
    generator = task.build_generator([model], GenerationConfig(beam=5, max_len_b=LONGEST - 1))
    net_input = {"src_tokens": source, "src_lengths": torch.tensor([source.shape[1]])}
    sample = {"id": torch.tensor([0]), "net_input": net_input}
    return task.inference_step(generator, [model], sample)[0][0]["tokens"][:-1]


def reach_over_corpus(model, task, cut, corpus, targets=None):
    """Return ``{side: [how far the windows of a layer reach]}`` over lists of sentences.

    That is a dictionary for each layer, with the limits, the number of windows and, to each side
    to which it looks, under "mean" the mean reach inside the sentence, and under "counts" the
    windows by that reach, in BINS equal bins from 0 to the limit; "asked" has them as the heads
    predict them, before the ends of the sentence cut them.

    Raises ValueError that names the line of a sentence that the model cannot take.
    """
    if not corpus:
        raise ValueError("--corpus: expected sentences, got an empty file")
    if targets is not None and len(targets) != len(corpus):
        wanted = f"{len(corpus)} lines as in --corpus, got {len(targets)}"
        raise ValueError(f"--corpus-target: expected {wanted}")
    seen = {}
    pairs = zip(corpus, targets or [None] * len(corpus))
    for number, pair in enumerate(tqdm(pairs, "sentences", len(corpus), unit="", disable=None), 1):
        names = [f"{option}, line {number}" for option in ("--corpus", "--corpus-target")]
        for side, (_, layers) in look_at(model, task, cut, *pair, names).items():
            seen.setdefault(side, []).append(layers)
    return {side: [reach(layers) for layers in zip(*sentences)] for side, sentences in seen.items()}


def reach(layers):
    """Return one layer's entry of `reach_over_corpus`, from its windows in each sentence."""
    limits = {"left": layers[0].max_left, "right": layers[0].max_right}
    found = {f"max_{way}": limit for way, limit in limits.items()}
    found |= {"windows": sum(layer.left.size for layer in layers)}
    found |= {"mean": {}, "counts": {}, "asked": {}}
    for side, (way, limit) in enumerate(limits.items()):
        if limit:
            inside = np.concatenate([layer.inside[side].ravel() for layer in layers])
            asked = np.concatenate([getattr(layer, way).ravel() for layer in layers])
            found["mean"][way] = inside.mean()
            for key, reaches in (("counts", inside), ("asked", asked)):
                found[key][way] = np.histogram(reaches, BINS, (0, limit))[0].tolist()
    return found


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
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=-1)
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
    columns = math.ceil(math.sqrt(2 * len(layers)))
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
    """Return a Figure of reach_over_corpus with a panel for each layer: two histograms.

    The bars are windows by their reach inside the sentence and the outlines what heads predict, in
    percent; their gids are "left", "right", "asked left" and "asked right".
    """
    panels = [(side, *layer) for side in reaches for layer in enumerate(reaches[side], 1)]
    figure, axes = panel_grid(len(panels), 4, 3.4, 2.2)
    for axis, (side, number, reach) in zip(axes, panels):
        for way, sign in (("left", -1), ("right", 1)):
            if limit := reach[f"max_{way}"]:
                edges = sign * np.linspace(0, limit, BINS + 1)
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
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path)
    add("--text", metavar="TEXT", help="a sentence")
    add("--target", metavar="TEXT", help="its translation (default: the model's own)")
    add("--corpus", metavar="FILE", type=Path, help="sentences, one per line")
    add("--corpus-target", metavar="FILE", type=Path, help="their translations")
    add("--data", metavar="FOLDER", type=Path, help="dictionaries (default: those of the training)")
    add("--user-dir", metavar="FOLDER", type=Path, help="your own models, as for fairseq-train")
    add("--sentencepiece", metavar="MODEL", type=Path, help="cuts text into pieces")
    add("--output", metavar="PREFIX", type=Path, default=Path("windows"), help="(default: windows)")
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
    cut = cutter(args.sentencepiece)
    model, task = load(args.checkpoint, args.data, args.user_dir)
    record, figures = {"checkpoint": str(args.checkpoint)}, {}
    if args.text is not None:
        target = args.target
        if target is None and hasattr(model, "encoder"):
            tokens, _ = look_at(model, task, cut, args.text, longest=LONGEST)["encoder"]
            target = translate(model, task, tokens)
        seen = look_at(model, task, cut, args.text, target, longest=LONGEST)
        for side, (tokens, layers) in seen.items():
            record[side] = sentence_record(tokens, layers)
            title = f"{side.capitalize()}: the window around each token. In its line, a bar for "
            title += f"each of {layers[0].left.shape[1]} heads; · continues a word"
            figures[side] = windows_figure(tokens, layers, title)
    if corpus is not None:
        record["reach"] = reach_over_corpus(model, task, cut, corpus, targets)
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

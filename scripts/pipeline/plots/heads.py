"""Where the heads of a TaLK model look: their windows in a sentence and over a corpus."""

import math
from argparse import Namespace
from dataclasses import dataclass
from functools import partial

import numpy as np
import sentencepiece
import torch
from tqdm import tqdm

import talk_fairseq  # noqa: F401 (first, as it patches fairseq and keeps its logging quiet)

# isort: split
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.configs import GenerationConfig

from talk_fairseq.modules import TaLKConv

LONGEST = 100  # tokens of a sentence that is drawn
BINS = 20  # of a reach, from 0 to its limit


@dataclass
class Layer:
    """The windows of a layer in a sentence of T tokens.

    Each head would look as far as `left` and `right` (T, H), in tokens, in a longer sentence.
    Between two tokens, a window takes only a part of one.
    """

    max_left: int
    max_right: int
    left: np.ndarray
    right: np.ndarray

    @property
    def inside(self):
        """Return how far the windows reach inside the sentence, to the left and right."""
        t = np.arange(len(self.left))[:, None]
        return np.minimum(self.left, t), np.minimum(self.right, t[::-1])


def layer_of(conv, offset_left, offset_right):
    """Return the `Layer` of a TaLKConv with the offsets (T, 1, H) that it predicts."""
    left = offset_left[:, 0].double().numpy() * conv.max_left
    right = np.zeros_like(left)
    if offset_right is not None:
        right = offset_right[:, 0].double().numpy() * conv.max_right
    return Layer(conv.max_left, conv.max_right, left, right)


@torch.no_grad()
def look(model, encoder=None, decoder=None):
    """Return ``{side: [Layer, …]}`` of one pass over the token numbers (T,) of each side.

    Those of the decoder begin with an end of sentence; None leaves the decoder out. A language
    model has no encoder.
    """
    seen, handles = {}, []

    def record(layers, conv, arguments, _):
        layers.append(layer_of(conv, *conv.predict_offsets(arguments[0])))

    for name, module in model.named_modules():
        if isinstance(module, TaLKConv):
            layers = seen.setdefault(name.partition(".")[0], [])
            handles.append(module.register_forward_hook(partial(record, layers)))
    try:
        context = {}
        if encoder is not None:
            lengths = torch.tensor([len(encoder)])
            context["encoder_out"] = model.encoder(encoder[None], lengths)
        if decoder is not None:
            model.decoder(decoder[None], features_only=True, **context)
    finally:
        for handle in handles:
            handle.remove()
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
    if user_dir is not None:
        utils.import_user_module(Namespace(user_dir=str(user_dir)))
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
    return partial(processor.encode, out_type=str)


def look_at(model, task, cut, text, target=None, names=("--text", "--target"), longest=math.inf):
    """Return ``{side: (tokens, [Layer, …])}`` of a sentence and its translation.

    Without a `target` it is the encoder alone; that of a language model is the `text`.

    Args:
        cut: what `cutter` returns.
        target: the translation, as text or as token numbers.
        names: of both texts, for the ValueError where the model cannot take one.
        longest: the most tokens (default: those that the model takes).
    """
    longest = min(longest, np.min(model.max_positions()))

    def tokens_of(name, text, dictionary, end_first):
        is_text = isinstance(text, str)
        pieces = cut(text) if is_text else [dictionary[number] for number in text]
        if not 0 < len(pieces) < longest:
            raise ValueError(f"{name}: expected 1 to {longest - 1} pieces, got {len(pieces)}")
        if is_text and all(dictionary.index(piece) == dictionary.unk() for piece in pieces):
            hint = "; --sentencepiece cuts text into pieces" if cut is str.split else ""
            raise ValueError(f"{name}: expected pieces of the dictionary, got unknown ones{hint}")
        end = dictionary[dictionary.eos()]
        tokens = [end, *pieces] if end_first else [*pieces, end]
        return tokens, torch.tensor([dictionary.index(token) for token in tokens])

    if getattr(model, "encoder", None) is not None:
        sides = {"encoder": (names[0], text, task.source_dictionary, False)}
        if target is not None:
            sides["decoder"] = names[1], target, task.target_dictionary, True
    elif target is not None:
        raise ValueError(f"{names[1]}: expected none for a language model, got text")
    else:
        sides = {"decoder": (names[0], text, task.target_dictionary, True)}
    found = {side: tokens_of(*given) for side, given in sides.items()}
    seen = look(model, **{side: numbers for side, (_, numbers) in found.items()})
    return {side: (found[side][0], layers) for side, layers in seen.items()}


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
    """Return what `reach_over_corpus` does for one layer, of its windows in each sentence."""
    limits = {"left": layers[0].max_left, "right": layers[0].max_right}
    found = {f"max_{way}": limit for way, limit in limits.items()}
    found["windows"] = sum(layer.left.size for layer in layers)
    found |= {"mean": {}, "counts": {}, "asked": {}}
    for side, (way, limit) in enumerate(limits.items()):
        if limit:
            inside = np.concatenate([layer.inside[side].ravel() for layer in layers])
            asked = np.concatenate([getattr(layer, way).ravel() for layer in layers])
            found["mean"][way] = inside.mean()
            for key, reaches in (("counts", inside), ("asked", asked)):
                found[key][way] = np.histogram(reaches, BINS, (0, limit))[0].tolist()
    return found

"""Where the heads of a TaLK model look: their windows in a sentence and over a corpus."""

import contextlib
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

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

# --- The windows of a sentence ---


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
    """Return the `Layer` of a TaLKConv with the offsets (T, 1, H) that it predicts."""

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
    """Give a list that gets the `Layer` of each TaLKConv in the module `side`, as they run."""
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
    """Return the parts of `model` with windows: ``{"encoder": module, "decoder": module}``."""
    parts = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {
        name: part
        for name, part in parts.items()
        if part is not None and any(isinstance(module, TaLKConv) for module in part.modules())
    }


@torch.no_grad()
def look(model, source, target):
    """Return ``{side: [Layer, …]}`` of one pass over token numbers, both (T,).

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


def load(checkpoint, data=None, user_dir=None):
    """Return ``(model, task)`` of a checkpoint file, in evaluation mode on the CPU.

    Args:
        data: the folder with the dictionaries (default: where the checkpoint says they were).
        user_dir: a folder with models of one's own, as for fairseq-train.

    Raises ValueError or OSError for a file that is no checkpoint, dictionaries that are missing or
    not the model's, and a model without windows.
    """
    if not Path(checkpoint).is_file():
        raise ValueError(f"CHECKPOINT: expected a file, got {checkpoint}, which is none")
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"--data: expected a folder with dictionaries, got {data}")
    if user_dir is not None:
        if not Path(user_dir).is_dir():
            raise ValueError(f"--user-dir: expected a folder with a Python package, got {user_dir}")
        utils.import_user_module(Namespace(user_dir=str(user_dir)))
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
            wanted = "the dictionaries that the model was trained with, got some of another size"
            raise ValueError(f"--data: expected {wanted}") from None
        # Of a task or an arch that is not registered, or without what fairseq saves.
        got = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        hint = "; --user-dir names a folder with its arch" if user_dir is None else ""
        text = f"CHECKPOINT: expected a TaLK model, got {checkpoint} ({got}){hint}"
        raise ValueError(text) from None
    if not sides(model):
        raise ValueError(f"CHECKPOINT: expected a TaLK model, got {type(model).__name__}")
    return model.eval(), task


# --- Text ---


class Cutter:
    """Turns text into pieces and their numbers.

    `model` is a SentencePiece model's file; without one, spaces separate the pieces.
    """

    def __init__(self, model=None):
        self._processor = None
        if model is not None:
            if not Path(model).is_file():
                raise ValueError(f"--sentencepiece: expected a model's file, got {model}")
            try:
                self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
            except (RuntimeError, OSError):
                wanted = f"a SentencePiece model, got {model}, which is none"
                raise ValueError(f"--sentencepiece: expected {wanted}") from None

    def __call__(self, name, text, dictionary, longest):
        """Return ``(pieces, numbers)`` of a sentence, without its end.

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
            got = f"{len(pieces)} unknown"
            got += "" if self._processor else "; --sentencepiece cuts text into pieces"
            raise ValueError(f"{name}: expected pieces of the dictionary, got {got}")
        return pieces, torch.tensor(numbers)


def translate(model, task, source):
    """Return the best translation of the token numbers `source` (T,), without its end."""
    generator = task.build_generator([model], GenerationConfig(beam=5, max_len_b=LONGEST - 1))
    sample = {
        "id": torch.tensor([0]),
        "net_input": {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])},
    }
    best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
    return best[:-1]  # it ends with the end


def look_at_sentence(model, task, cutter, text, target=None):
    """Return ``{side: (tokens, [Layer, …])}`` of a sentence.

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
    """Return the dictionaries as ``{"source": …, "target": …}``; a language model has no source."""
    found = {"target": task.target_dictionary}
    if getattr(model, "encoder", None) is not None:
        found["source"] = task.source_dictionary
    return found


def with_end(numbers, end, first=False):
    """Return the token numbers with the sentence's end after or, for a decoder, before them."""
    end = numbers.new_tensor([end])
    return torch.cat([end, numbers] if first else [numbers, end])


def shortest_limit(model):
    """Return the most tokens that every part of the model takes."""
    limit = model.max_positions()
    return min(limit) if isinstance(limit, tuple) else limit


# --- A corpus ---


@dataclass
class Reach:
    """How far the windows of a layer reach over a corpus, in tokens.

    `counts` has, under "left" and "right", windows by their reach inside the sentence, in BINS
    equal bins from 0 to the limit; `asked` has them as the heads predict them, before the ends of
    the sentence cut them. `means` is of the reaches inside.
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
        """Return the mean reach to either side."""
        return {side: total / self.windows for side, total in self.sums.items()}


def _both(make):
    return {"left": make(), "right": make()}


def reach_over_corpus(model, task, cutter, corpus, targets=None):
    """Return ``{side: [Reach, …]}`` over lists of sentences.

    Raises ValueError that names the line of a sentence that the model cannot take.
    """
    most = shortest_limit(model) - 1
    of = dictionaries(model, task)
    translator = "source" in of
    if targets is not None:
        if not translator:
            raise ValueError("--corpus-target: expected none for a language model, got a file")
        if len(targets) != len(corpus):
            wanted = f"{len(corpus)} lines as in --corpus, got {len(targets)}"
            raise ValueError(f"--corpus-target: expected {wanted}")
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
    """Return the lines of a text file. Raises ValueError, naming `option`, for none."""
    if not path.is_file():
        raise ValueError(f"{option}: expected a file, got {path}, which is none")
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    if not text:
        raise ValueError(f"{option}: expected sentences, got the empty file {path}")
    return text.split("\n")

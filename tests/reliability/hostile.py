"""What the tests of untrusted files share: a whole checkpoint, formats, refusals."""

import copy
import pickle

import numpy as np
import pytest
import torch

import published

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

import talk_fairseq  # noqa: F401  patches fairseq

WORDS = 97
OPTIONS = published.translation_args(
    "talkconv_iwslt_de_en",
    encoder_layers=2,
    decoder_layers=1,
    encoder_glu=False,
    decoder_glu=False,
)
WHOLE = published.checkpoint(OPTIONS, WORDS, last_optimizer_state=None)
WHOLE["extra_state"]["train_meters"] = {"loss": np.float64(3.9), "counts": np.arange(4)}


def good(**changes):
    """What a whole checkpoint holds, but for some changes."""
    return {**copy.deepcopy(WHOLE), **changes}


def report(figure, what, refused, tried):
    """Show the figure; all that were tried must have been refused."""
    figure(f"{what}: refused {refused:,} of {tried:,}")
    assert refused == tried > 0


def refusal(door, path):
    """The one line with which `door` refuses the file `path`; None if it takes it."""
    try:
        door(path)
    except (Exception, SystemExit) as error:
        line = str(error)
        assert "\n" not in line and line.isprintable() and len(line) < 1500, line
        assert str(path) in line, f"{type(error).__name__}: {line}"
        return line
    return None


def generates(path, folder):
    """As fairseq-generate, -interactive and -eval-lm read the checkpoints of ``--path``."""
    return checkpoint_utils.load_model_ensemble([str(path)], {"data": str(folder)})


class Call:
    """Pickled, it is a call of `function`, which happens when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def save_zip(state, path):
    torch.save(state, path)


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_pickle(state, path):
    path.write_bytes(pickle.dumps(state, protocol=2))


def save_pickle_4(state, path):
    path.write_bytes(pickle.dumps(state, protocol=4))


LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # opens files of torch < 1.6
FORMATS = (save_zip, save_legacy, save_pickle, save_pickle_4)

"""Models with something else in place of the windows: what do the windows do?

A user directory of fairseq. With ``--user-dir configs/models/windows`` each arch of talk_fairseq
has three counterparts, with `talkconv` in its name replaced: `kernels_plus` is `talkconv_plus` with
lightweight convolutions in place of its windows, `no_windows_plus` has nothing there, and in
`one_window_plus` all tokens share one window. docs/ablations.md has what they score, and
docs/own_variant.md makes an example of the first.
"""

import torch
from torch import nn

from talk_fairseq import TaLKConv, TaLKConvUnit

# isort: split
from fairseq.models import register_model
from fairseq.modules import LightweightConv

from talk_fairseq.models.archs import TALKCONV, TALKCONV_LM, register_archs
from talk_fairseq.models.talkconv import TaLKConvConfig, TaLKConvModel
from talk_fairseq.models.talkconv_lm import TaLKConvLanguageModel, TaLKConvLanguageModelConfig


class Kernel(nn.Module):
    """A lightweight convolution as wide as the largest window."""

    def __init__(self, channels, heads, max_left, max_right=0, **_):  # the rest is for windows
        super().__init__()
        self.before = max_left
        width = max_left + max_right + 1
        self.conv = LightweightConv(channels, width, max_left, heads, weight_softmax=True)

    def forward(self, x):  # (T, B, C) -> (T, B, C)
        return self.conv(x)

    def step(self, x, state=None):
        """Return the outputs for the new steps `x` (S, B, C), and the state for the next ones."""
        past = x.new_zeros(self.before, *x.shape[1:]) if state is None else state.rows
        rows = torch.cat([past, x])
        return self.conv(rows)[self.before :], Past(rows[len(x) :])


class Past:
    """The last inputs of a kernel, (max_left, B, C)."""

    def __init__(self, rows):
        self.rows = rows

    def reorder(self, new_order):  # a beam search keeps, drops and repeats rows of the batch
        self.rows = self.rows.index_select(1, new_order)


class KernelUnit(TaLKConvUnit):
    """A unit with a learned kernel of fixed width in place of its windows."""

    convolution = Kernel


@register_model("kernels", dataclass=TaLKConvConfig)
class KernelModel(TaLKConvModel):
    unit = KernelUnit


@register_model("kernels_lm", dataclass=TaLKConvLanguageModelConfig)
class KernelLanguageModel(TaLKConvLanguageModel):
    unit = KernelUnit


class NoWindow(nn.Module):
    """Nothing: where a unit has a short convolution, only that reads other tokens."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, x):
        return x

    def step(self, x, state=None):
        return x, None


class NoWindowUnit(TaLKConvUnit):
    convolution = NoWindow


@register_model("no_windows", dataclass=TaLKConvConfig)
class NoWindowModel(TaLKConvModel):
    unit = NoWindowUnit


@register_model("no_windows_lm", dataclass=TaLKConvLanguageModelConfig)
class NoWindowLanguageModel(TaLKConvLanguageModel):
    unit = NoWindowUnit


class OneWindow(TaLKConv):
    """A window that each head learns, the same for all tokens: only the biases of offsets count."""

    def predict_offsets(self, x):
        return super().predict_offsets(torch.zeros_like(x))


class OneWindowUnit(TaLKConvUnit):
    convolution = OneWindow


@register_model("one_window", dataclass=TaLKConvConfig)
class OneWindowModel(TaLKConvModel):
    unit = OneWindowUnit


@register_model("one_window_lm", dataclass=TaLKConvLanguageModelConfig)
class OneWindowLanguageModel(TaLKConvLanguageModel):
    unit = OneWindowUnit


for name in ("kernels", "no_windows", "one_window"):
    for model, archs in ((name, TALKCONV), (f"{name}_lm", TALKCONV_LM)):
        register_archs(model, {arch.replace("talkconv", name): archs[arch] for arch in archs})

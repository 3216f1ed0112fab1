"""Windows beside recall by content: what followed the tokens like this one, however long ago.

A user directory of fairseq: ``--user-dir configs/models/recall --arch talkconv_plus_recall_lm``.
docs/synthetic.md says what it can do that windows cannot.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import talk_fairseq

# isort: split
from fairseq.models import register_model

from talk_fairseq.models.archs import TALKCONV_LM, register_archs
from talk_fairseq.models.talkconv_lm import TaLKConvLanguageModel, TaLKConvLanguageModelConfig
from talk_fairseq.modules import TaLKConv
from talk_fairseq.ops.state import TaLKConvState

HEADS = 4  # of the recall, whatever the windows have
CHUNK = 64  # steps that meet each other in products; a running sum holds those before them


@dataclass
class RecallState:
    """What the convolution remembers while it decodes, of constant size.

    Attributes:
        windows: of the windows.
        likeness: (B, HEADS, 1, R) of the last step, see :class:`Recall`.
        sums: (B, HEADS, R, R + 1), for each of R classes the sum over all steps of the values times
            the likeness of the step before; in the last column, the sum of that likeness.
    """

    windows: TaLKConvState
    likeness: torch.Tensor
    sums: torch.Tensor

    def reorder(self, new_order):
        """Follow a beam search that keeps, drops or repeats rows of the batch."""
        self.windows.reorder(new_order)
        self.likeness = self.likeness.index_select(0, new_order)
        self.sums = self.sums.index_select(0, new_order)


class Recall(nn.Module):
    """Average at each step what has followed the earlier steps that are like it.

    Of the channels, the first half are values ``v``, the others, through a norm and a softmax, a
    likeness ``p``: R numbers of sum 1 in each of HEADS heads. So each step names a mixture of R
    classes, and reads the mean of the values that came right after these classes::

        out[t] = sum(a[t, s] v[s] for s <= t) / (sum(a[t, s] for s <= t) + doubt)
        a[t, s] = dot(p[t], p[s - 1])

    `doubt` is learned: where nothing like this step came before, the output is close to zero. Since
    ``a`` is a product of two vectors, a running sum of R (R + 1) numbers a head stands for all of
    the past, and time is linear in T. It has no projections, and two parameters a head.

    Args:
        channels: C, a multiple of 2 HEADS.
    """

    def __init__(self, channels):
        super().__init__()
        if channels % (2 * HEADS):
            raise ValueError(f"channels: expected a multiple of {2 * HEADS}, got {channels}")
        self.R = channels // (2 * HEADS)
        self.sharpness = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))
        self.log_doubt = nn.Parameter(torch.full((HEADS, 1, 1), -2.5))

    def forward(self, x, likeness=None, sums=None):
        """Return the output (T, B, C / 2) of the next steps `x` (T, B, C), `likeness` and `sums`.

        The last two are those of a :class:`RecallState`: after `x` in what it returns, and before
        it in the arguments, or None where `x` begins a sequence. Rows of zeros are padding: they
        are not recalled, nor is the row right after one.
        """
        rows = x.permute(1, 0, 2).float() if x.dtype.itemsize == 2 else x.permute(1, 0, 2)
        B, T, _ = rows.shape
        values, asked = rows.view(B, T, 2, HEADS, self.R).permute(2, 0, 3, 1, 4)
        told = (rows != 0).any(-1).to(rows.dtype)[:, None, :, None]
        p = (F.layer_norm(asked, [self.R]) * self.sharpness).softmax(-1) * told
        if likeness is None:
            likeness = p.new_zeros(B, HEADS, 1, self.R)
            sums = p.new_zeros(B, HEADS, self.R, self.R + 1)
        before = torch.cat([likeness, p], dim=2)
        v = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1) * told

        chunk = max(1, min(CHUNK, T))
        ends = 0, 0, 0, -T % chunk
        a, b, v = (F.pad(i, ends).unflatten(2, (-1, chunk)) for i in (p, before[:, :, :-1], v))
        past = torch.cat([sums.unsqueeze(2), b.mT @ v], dim=2).cumsum(2)
        out = ((a @ b.mT).tril() @ v + a @ past[:, :, :-1]).flatten(2, 3)[:, :, :T]
        out = out[..., :-1] / (out[..., -1:] + self.log_doubt.exp())
        out = out.permute(2, 0, 1, 3).flatten(2)
        return out.to(x.dtype), before[:, :, -1:], past[:, :, -1]


class RecallConv(TaLKConv):
    """Windows over all channels; what is recalled is added to the first half of them."""

    def __init__(self, channels, *args, **options):
        super().__init__(channels, *args, **options)
        self.recall = Recall(channels)

    def forward(self, x):
        """x (T, B, C) -> (T, B, C)."""
        out, _, _ = self.recall(x)
        return super().forward(x) + F.pad(out, (0, out.shape[-1]))

    def step(self, x, state=None):
        """Continue a sequence: the outputs for the new steps `x` (S, B, C), and its state."""
        past = (state.likeness, state.sums) if state else ()
        recalled, *past = self.recall(x, *past)
        out, windows = super().step(x, state and state.windows)
        return out + F.pad(recalled, (0, recalled.shape[-1])), RecallState(windows, *past)


class RecallUnit(talk_fairseq.TaLKConvUnit):
    convolution = RecallConv


@register_model("talkconv_recall_lm", dataclass=TaLKConvLanguageModelConfig)
class RecallLanguageModel(TaLKConvLanguageModel):
    """The language model, whose windows have recall beside them."""

    unit = RecallUnit


register_archs(
    "talkconv_recall_lm", {"talkconv_plus_recall_lm": TALKCONV_LM["talkconv_plus_wide_lm"]}
)

"""Retention (RetNet; Sun et al., 2023), a linear-time peer of the language models.

A user directory of fairseq: ``--user-dir configs/models/retention --arch retention_lm``.
"""

import torch
import torch.nn.functional as F
from torch import nn

import talk_fairseq  # noqa: F401 (first, as it patches fairseq)

# isort: split
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig


@with_incremental_state
class Retention(nn.Module):
    """Multi-scale retention in place of a decoder's self-attention.

    ``out = (silu(x G) * norm((Q K^T * D) V)) O``: Q, K (C wide) and V (2 C wide) are projections of
    x, the first two turned by an angle that grows with the position; ``D[t, s]`` is
    ``decay ** (t - s)`` up to s = t, with a decay for each head; the norm is of each head. The
    paper's two other scales cancel in this norm. Step by step it continues from a state of constant
    size.
    """

    def __init__(self, channels, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, channels // heads  # which fairseq's layers read
        self.q, self.k = (nn.Linear(channels, channels, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(channels, 2 * channels, bias=False) for _ in range(2))
        self.out = nn.Linear(2 * channels, channels, bias=False)
        for linear in (self.q, self.k, self.v, self.gate):
            nn.init.xavier_uniform_(linear.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, query, key=None, value=None, key_padding_mask=None, incremental_state=None,
                need_weights=False, attn_mask=None):  # fmt: skip
        """query (T, B, C), key_padding_mask (B, T) -> ``(out (T, B, C), None)``."""
        T = len(query)
        buffer = self._get_input_buffer(incremental_state)
        t = torch.arange(T, device=query.device)
        # Halves have too few digits for decays close to 1, and for the state.
        exact = torch.promote_types(query.dtype, torch.float32)
        decay, angle = self.decays_and_angles(exact, query.device)
        turn = torch.outer(t + buffer.get("steps", 0), angle)
        turn = torch.polar(torch.ones_like(turn), turn)
        q, k, v = (self._of_heads(linear(query).to(exact)) for linear in (self.q, self.k, self.v))
        q, k = _turned(q, turn), _turned(k * self.head_dim**-0.5, turn)
        if key_padding_mask is not None:
            v = v.masked_fill(key_padding_mask[:, None, :, None], 0)
        heads = (q @ k.mT * (decay ** (t[:, None] - t).clamp(min=0)).tril()) @ v
        if incremental_state is not None:
            if "past" in buffer:
                heads = heads + decay ** (t[:, None] + 1) * (q @ buffer["past"])
            new = k.mT @ (decay ** (T - 1 - t[:, None]) * v)
            past = decay**T * buffer["past"] + new if buffer else new
            buffer = {"past": past, "steps": buffer.get("steps", 0) + T}
            self.set_incremental_state(incremental_state, "retention", buffer)
        heads = F.rms_norm(heads, heads.shape[-1:]).permute(2, 0, 1, 3).flatten(-2)
        return self.out(F.silu(self.gate(query)) * heads.to(query.dtype)), None

    def decays_and_angles(self, dtype, device):
        """Return the decay (H, 1, 1) of each head, and the angle (R / 2,) of each pair."""
        options = {"dtype": dtype, "device": device}
        decay = 1 - 2.0 ** (-5 - torch.arange(self.num_heads, **options))
        return decay.view(-1, 1, 1), 1e4 ** -torch.linspace(0, 1, self.head_dim // 2, **options)

    def _of_heads(self, x):
        """x (T, B, C) -> (B, H, T, R)."""
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def _get_input_buffer(self, incremental_state):
        return self.get_incremental_state(incremental_state, "retention") or {}

    def reorder_incremental_state(self, incremental_state, new_order):
        """Follow a beam search that keeps, drops or repeats rows of the batch."""
        if buffer := self._get_input_buffer(incremental_state):
            buffer["past"] = buffer["past"].index_select(0, new_order)


def _turned(x, turn):
    """Multiply pairs of the channels of x (B, H, T, R), as complex numbers, by turn (T, R / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@register_model("retention_lm", dataclass=TransformerLanguageModelConfig)
class RetentionLanguageModel(TransformerLanguageModel):
    """fairseq's Transformer language model with retention."""

    @classmethod
    def build_model(cls, args, task):
        """Return the model of fairseq's options."""
        model = super().build_model(args, task)
        for layer in model.decoder.layers:
            layer.self_attn = Retention(layer.embed_dim, args.decoder_attention_heads)
        return model

"""Units of the ablation of DynamicConv (Wu et al., 2019, Table 3) that fairseq has no flags for.

A user directory of fairseq, which configs/wmt16_en_de/ablation_*.yaml name as ``common.user_dir``.
"""

import torch
import torch.nn.functional as F
from torch import nn

import talk_fairseq  # noqa: F401 (first, as it patches fairseq)

# isort: split
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.models import register_model, register_model_architecture
from fairseq.models.lightconv import LightConvModel, Linear, lightconv_wmt_en_de_big
from fairseq.models.transformer import TransformerModel, transformer_wmt_en_de_big
from fairseq.modules import LightweightConv1dTBC, MultiheadAttention


@with_incremental_state
class AveragedAttention(nn.Module):
    """Averaged attention (Zhang et al., 2018): ``out = i * x + f * g`` with ``g = FFN(mean)``.

    The gates ``i, f`` are ``sigmoid(Linear([x; g]))``. A decoder's mean is of the tokens up to
    each, whose sum and count it keeps from step to step; an encoder's is of the whole sentence.
    """

    def __init__(self, channels, ffn_channels, causal):
        super().__init__()
        self.causal = causal
        self.fc1, self.fc2 = Linear(channels, ffn_channels), Linear(ffn_channels, channels)
        self.gates = Linear(2 * channels, 2 * channels)

    def forward(self, query, key_padding_mask=None, incremental_state=None, **unused):
        """query (T, B, C), key_padding_mask (B, T) -> ``(out (T, B, C), None)``."""
        rows = F.pad(query, (0, 1), value=1)  # the sum of the last channel is the count
        if key_padding_mask is not None:
            rows = rows.masked_fill(key_padding_mask.t().unsqueeze(-1), 0)
        sums = rows.cumsum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        if not self.causal:
            sums = sums[-1:]
        sums = sums + self._get_input_buffer(incremental_state).get("sums", 0)
        self.set_incremental_state(incremental_state, "averaged", {"sums": sums[-1]})
        mean = (sums[..., :-1] / sums[..., -1:].clamp(min=1)).to(query.dtype)
        g = self.fc2(F.relu(self.fc1(mean))).expand_as(query)
        i, f = self.gates(torch.cat([query, g], -1)).sigmoid().chunk(2, -1)
        return i * query + f * g, None

    def _get_input_buffer(self, incremental_state):
        return self.get_incremental_state(incremental_state, "averaged") or {}

    def reorder_incremental_state(self, incremental_state, new_order):
        """Follow a beam search that keeps, drops or repeats rows of the batch."""
        if buffer := self._get_input_buffer(incremental_state):
            buffer["sums"] = buffer["sums"].index_select(0, new_order)


class LimitedAttention(MultiheadAttention):
    """Self-attention to `window` tokens, `left` of them to the left of each."""

    def apply_sparse_mask(self, attn_weights, tgt_len, src_len, bsz):
        t = torch.arange(src_len, device=attn_weights.device)
        distance = t[src_len - tgt_len :, None] - t
        outside = (distance > self.left) | (distance <= self.left - self.window)
        # Not infinity: a padded token may see padding alone, and a softmax of nothing is no number.
        return attn_weights.masked_fill(outside, -3e4)


class Convolution(LightweightConv1dTBC):
    """A convolution as LightConv's `old`: dense with one group, depthwise with one per channel."""

    def __init__(self, old, groups):
        C, K = old.input_size, old.kernel_size
        super().__init__(C, K, old.padding_l, weight_dropout=old.weight_dropout_module.p)
        self.groups = groups
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(C, C // groups, K)))

    def forward(self, x, incremental_state=None):
        """x (T, B, C) -> (T, B, C)."""
        past = self._get_input_buffer(incremental_state)
        x = torch.cat([x.new_zeros(self.padding_l, *x.shape[1:]) if past is None else past, x])
        self._set_input_buffer(incremental_state, x[len(x) - self.padding_l :])
        x = F.pad(x.permute(1, 2, 0), (0, self.kernel_size - 1 - self.padding_l))
        weight = self.weight_dropout_module(self.weight)
        return F.conv1d(x, weight, groups=self.groups).permute(2, 0, 1)


def limit(layer, index, causal):
    """Let the layers of a Transformer see 3, 7, 15, 31, 31, … tokens."""
    attention, window = layer.self_attn, (3, 7, 15, 31)[min(index, 3)]
    attention.__class__ = LimitedAttention
    attention.window, attention.left = window, window - 1 if causal else window // 2
    attention.skip_embed_dim_check = True  # so that fairseq takes its own path, with a sparse mask


def average(layer, index, causal):
    """Give a layer of a Transformer averaged attention."""
    layer.self_attn = AveragedAttention(layer.embed_dim, layer.fc1.out_features, causal)


def make_depthwise(layer, index, causal):
    """Give a layer of LightConv a kernel for each channel, without a softmax."""
    layer.conv = Convolution(layer.conv, groups=layer.conv_dim)


def make_dense(layer, index, causal):
    """Put a dense convolution into the place of a LightConv layer's kernel and projections."""
    layer.conv = Convolution(layer.conv, groups=1)
    layer.linear1, layer.act, layer.linear2 = nn.Identity(), None, nn.Identity()


def register(name, base, big, change, sides=("encoder", "decoder")):
    """Register fairseq's model `base` with changed layers, and its arch of the size of `big`."""

    class Ablated(base):
        @classmethod
        def build_model(cls, args, task):
            model = super().build_model(args, task)
            for side in sides:
                for index, layer in enumerate(getattr(model, side).layers):
                    change(layer, index, side == "decoder")
            return model

    register_model(name)(Ablated)
    register_model_architecture(name, f"{name}_wmt_en_de_big")(big)


TRANSFORMER = TransformerModel, transformer_wmt_en_de_big
LIGHTCONV = LightConvModel, lightconv_wmt_en_de_big
register("transformer_limited", *TRANSFORMER, limit)
register("transformer_averaged", *TRANSFORMER, average)
register("transformer_averaged_decoder", *TRANSFORMER, average, sides=["decoder"])
register("lightconv_depthwise", *LIGHTCONV, make_depthwise)
register("lightconv_cnn", *LIGHTCONV, make_dense)

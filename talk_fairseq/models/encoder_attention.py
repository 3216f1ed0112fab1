"""A decoder's attention to its encoder, as fairseq's but faster step by step.

The hypotheses of a sentence attend to the same encoder output. A beam search reorders them within
their sentence, so nothing of the encoder has to be repeated, copied or reordered for them: they
share one row of keys and values, and only note the sentence that each belongs to.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import nn

from talk_fairseq.modules import reorder_units

_STEPS = 31  # distances to the source are computed for so many more steps of decoding at once


class _Source(NamedTuple):
    """What the layers of a decoder share of the source: its padding (N, S) or None, and distances.

    If they align, these are the distances (N, 1, any, 1, S) of the next queries, and the positions
    (N, 1, 1, 1, S) relative to the query after these. Else both are None.
    """

    padding: torch.Tensor | None
    distances: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class EncoderAttention(MultiheadAttention):
    """fairseq's encoder-decoder attention, whose keys k neighbouring queries may share.

    With an `incremental_state`, `key` and `value` are (S, N, C) and `query` is (T, k N, C): rows
    ``k n`` to ``k n + k - 1`` belong to sentence n. Without, k is 1.

    Args:
        args, options: as fairseq's.
        copies: `key` is (S, N, 2C), the keys and values of `with_tokens`, and `value` is not read.
            The projections of the values and of the output begin such that, but for biases, a
            token that is attended to comes out halved. So the decoder sees from the first update
            on which tokens it attends to.
        aligns: normalise queries and keys in each head, multiply the scores by its learned
            sharpness (at first 1), and let the score of target token i and source token j fall by
            its learned slope (at first 0) times ``abs(i - j)``. Padding has no position in the
            source, and comes after the tokens of the target.
        follows: with `copies`, half of the heads begin with the same projection for queries and
            keys but for biases; `with_tokens` needs the same flag. So a decoder that has copied a
            token begins by attending to the next one.

    Raises ValueError for `copies` with an encoder of another width, and for `follows` alone.
    """

    need_attn = True

    def __init__(self, *args, copies=False, aligns=False, follows=False, **options):
        super().__init__(*args, **options)
        self.dropout_module.module_name = "MultiheadAttention"  # for --retain-dropout-modules
        self.copies, self.aligns = copies, aligns
        if aligns:
            self.sharpness = nn.Parameter(torch.ones(self.num_heads, 1))
            self.slopes = nn.Parameter(torch.zeros(self.num_heads, 1, 1, 1))
        if copies:
            if self.vdim != self.embed_dim:
                raise ValueError(
                    f"encoder_embed_dim: expected {self.embed_dim}, the decoder's, with "
                    f"copy_attention, got {self.vdim}"
                )
            nn.init.orthogonal_(self.v_proj.weight)
            with torch.no_grad():
                self.out_proj.weight.copy_(self.v_proj.weight.t() / 2)
        if follows:
            if not copies:
                raise ValueError("copy_attention: expected True with follow_attention, got False")
            alike = (self.num_heads + 1) // 2 * self.head_dim
            nn.init.orthogonal_(self.q_proj.weight)
            with torch.no_grad():
                self.k_proj.weight[:alike] = self.q_proj.weight[:alike]

    def make_generation_fast_(self, need_attn=False, **kwargs):
        """Note whether the generator reads weights: fairseq's decoder asks for them in any case."""
        self.need_attn = need_attn

    def forward(
        self, query, key, value, key_padding_mask=None, incremental_state=None,
        need_weights=True, static_kv=True, need_head_weights=False,
    ):  # fmt: skip
        """Return the output (T, k N, C), and the weights (k N, T, S), (H, k N, T, S), or None.

        `key_padding_mask` is (N, S), None, or what a SharingDecoder made of it.
        """
        state = self._get_input_buffer(incremental_state)
        if not state:
            queries = _queries(query.shape[0], incremental_state)
            state = self._encoder_state(key, value, key_padding_mask, queries)
            N = state["values"].shape[0]
            if incremental_state is not None:
                state["sentences"] = _sentences(N, query.shape[1] // N, query.device)
                self._set_input_buffer(incremental_state, state)
        if incremental_state is not None and not self.need_attn:
            need_weights = need_head_weights = False
        T, B, C = query.shape
        H, R = self.num_heads, self.head_dim
        keys, values, padding = state["keys"], state["values"], state["padding"]
        N, _, S, _ = values.shape
        k = B // N
        q = self.q_proj(query).view(T, N, k, H, R)
        if self.aligns:
            q = F.layer_norm(q, [R])
        q = q.permute(1, 3, 0, 2, 4).reshape(N * H, T * k, R)
        scores = torch.bmm(q, keys.view(N * H, R, S)).view(N, H, T, k, S)
        if self.aligns:
            # The result is in float32, also for 16-bit scores.
            distances = _take_distances(state, T)
            scores = torch.addcmul(scores, self.slopes, distances, value=-1)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, None], -math.inf)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        dropped = self.dropout_module(weights.type_as(values)).view(N * H, T * k, S)
        out = torch.bmm(dropped, values.view(N * H, S, R))
        out = out.view(N, H, T, k, R).permute(2, 0, 3, 1, 4).reshape(T, B, C)
        if not (need_weights or need_head_weights):
            return self.out_proj(out), None
        weights = weights.permute(1, 0, 3, 2, 4).reshape(H, B, T, S)
        return self.out_proj(out), weights if need_head_weights else weights.mean(dim=0)

    def _encoder_state(self, key, value, source, queries):
        """Return what is computed once of the encoder's output. All are tensors, or None.

        They are keys (N, H, R, S), which few queries read fastest so, values (N, H, S, R), and what
        `_Source` has. fairseq's decoders reorder each entry. `source` is a _Source or, as from a
        decoder that is no SharingDecoder, a padding mask.
        """
        if not isinstance(source, _Source):
            source = _source(key, source, queries, self.aligns)
        if self.copies:
            key, value = key.chunk(2, dim=-1)
        S, N, _ = key.shape
        heads = S, N, self.num_heads, self.head_dim
        # In two dimensions: in three, the bias of strided rows takes a kernel of its own.
        keys = self.k_proj(key.flatten(0, 1)).view(heads)
        values = self.v_proj(value.flatten(0, 1)).view(heads)
        scale = self.scaling
        if self.aligns:
            keys, scale = F.layer_norm(keys, [self.head_dim]), scale * self.sharpness
        keys = (scale * keys).permute(1, 2, 3, 0).contiguous()
        values = values.permute(1, 2, 0, 3).contiguous()
        return {"keys": keys, "values": values, **source._asdict()}


def _source(key, padding, queries, aligns):
    """Return the _Source of `key` (S, N, any) with its `padding` (N, S), or None, for `queries`."""
    padding = None if padding is None else padding.bool()
    if not aligns:
        return _Source(padding)
    S, N = key.shape[:2]
    real = key.new_ones(N, S, dtype=torch.bool) if padding is None else ~padding
    positions = (real.cumsum(1) - 1).float().view(N, 1, 1, 1, S)
    return _Source(padding, *_distances(positions, queries))


def _queries(T, incremental_state):
    """Return for how many queries distances are made at once: on a GPU, each launch takes time."""
    return T if incremental_state is None else T + _STEPS


def _distances(positions, queries):
    """Return the distances of the next `queries`, and the positions relative to those after."""
    steps = torch.arange(queries, device=positions.device).view(-1, 1, 1)
    return (positions - steps).abs(), positions - queries


def _take_distances(state, T):
    """Return the distances (N, 1, T, 1, S) of the next T queries, and take them off `state`.

    Each layer makes more of its own when those that it shares with the others are used up.
    """
    distances = state["distances"]
    if (left := distances.shape[2]) < T:
        positions = state["positions"] + left
        distances, state["positions"] = _distances(positions, T + _STEPS)
    state["distances"] = distances[:, :, T:]
    return distances[:, :, :T]


class SharingEncoder:
    """A mixin for the encoder of a SharingDecoder, to stand before fairseq's class."""

    def reorder_encoder_out(self, encoder_out, new_order):
        """Note the sentence of each row under "rows", which is all that a SharingDecoder needs."""
        N = encoder_out["encoder_out"][0].shape[1]
        rows = encoder_out.get("rows") or [torch.arange(N, device=new_order.device)]
        return {**encoder_out, "rows": [rows[0].index_select(0, new_order)]}


class SharingDecoder:
    """A mixin for a decoder whose layers have an EncoderAttention, to stand before fairseq's class.

    The subclass calls `shared_encoder_out`, and gives its layers what that returns.
    """

    def shared_encoder_out(self, encoder_out, incremental_state, T):
        """Return `encoder_out` as the layers take it, made once for all of them.

        Args:
            encoder_out: of the encoder, or None. If a SharingEncoder has reordered it, "rows" holds
                the sentence of each row.
            incremental_state: of the decoder, or None.
            T: the number of target tokens.

        There is one row for each sentence if hypotheses can share. Where layers align, a `_Source`
        stands in place of the padding mask. At a later step of decoding, layers have what they need
        of the encoder, and `encoder_out` is returned as it is.
        """
        if not (encoder_out and encoder_out["encoder_out"]):
            return encoder_out
        if next(self._attention_states(incremental_state), None):
            return encoder_out
        (x,) = encoder_out["encoder_out"]
        masks = encoder_out.get("encoder_padding_mask", [])  # LightConv has it for padding alone
        if encoder_out.get("rows"):
            (rows,) = encoder_out["rows"]
            N = x.shape[1]
            sentences = _sentences(N, rows.numel() // N, rows.device)
            if incremental_state is None or not torch.equal(rows, sentences):
                x = x.index_select(1, rows)
                masks = [mask.index_select(0, rows) for mask in masks]
        if incremental_state is not None:
            masks = [mask for mask in masks if mask.any()]  # else steps would fill nothing
        if any(attention.aligns for attention in self._attentions()):
            queries = _queries(T, incremental_state)
            masks = [_source(x, next(iter(masks), None), queries, aligns=True)]
        return {**encoder_out, "encoder_out": [x], "encoder_padding_mask": masks, "rows": []}

    def reorder_incremental_state_scripting(self, incremental_state, new_order):
        """Reorder states as fairseq does, without a search of all modules.

        Nothing of the encoder is copied unless a sentence goes, comes or changes place.
        """
        names = "self_attn", "conv"  # of a Transformer's layer and of a LightConv's
        units = (getattr(layer, name, None) for layer in self.layers.children() for name in names)
        reorder_units(units, incremental_state, new_order)
        states = list(self._attention_states(incremental_state))
        if not states:
            return
        old = states[0]["sentences"]
        sentences = old.index_select(0, new_order.to(old.device))
        if torch.equal(sentences, old):
            return
        k = old.numel() // states[0]["keys"].shape[0]
        kept = sentences[::k]
        if not torch.equal(sentences, kept.repeat_interleave(k)):
            k, kept = 1, sentences
        for state in states:
            for name in ("keys", "values", "padding", "positions", "distances"):
                if state.get(name) is not None:
                    state[name] = state[name].index_select(0, kept)
            state["sentences"] = _sentences(len(kept), k, old.device)

    def _attention_states(self, incremental_state):
        """Iterate over the states of the EncoderAttention of all layers that have one by now."""
        states = (a._get_input_buffer(incremental_state) for a in self._attentions())
        return filter(None, states)

    def _attentions(self):
        """Iterate over the EncoderAttention of all layers that have one."""
        attentions = (getattr(layer, "encoder_attn", None) for layer in self.layers.children())
        return (a for a in attentions if a is not None)


def check_padding_of_targets(task):
    """Raise ValueError where `task` pads targets on the left: aligning counts them from there."""
    options = (getattr(task, name, None) for name in ("cfg", "args"))  # args: of an older task
    if any(getattr(option, "left_pad_target", False) for option in options):
        raise ValueError("left_pad_target: expected False with align_attention, got True")


def with_tokens(encoder_out, tokens, follows):
    """Return `encoder_out` with keys and values (S, N, 2C) for an EncoderAttention that copies.

    Values are the encoder's outputs plus the embeddings `tokens`, both (S, N, C). Keys are the
    outputs; with `follows`, the outputs plus the embedding of the token before.
    """
    (x,) = encoder_out["encoder_out"]
    key, before = x, tokens[:-1]
    if follows:
        if padding := encoder_out.get("encoder_padding_mask"):  # LightConv has it for padding alone
            # The embedding of padding does not stay 0 where the output shares it.
            before = before.masked_fill(padding[0].t()[:-1].unsqueeze(-1), 0)
        key = x + F.pad(before, (0, 0, 0, 0, 1, 0))
    return {**encoder_out, "encoder_out": [torch.cat([key, x + tokens], dim=-1)]}


def _sentences(N, k, device):
    """Return the sentence of each of k N rows."""
    return torch.arange(N, device=device).repeat_interleave(k)

"""A decoder's attention to its encoder, as fairseq's but faster step by step.

The hypotheses of a sentence attend to the same encoder output. A beam search reorders them within
their sentence, so nothing of the encoder has to be repeated, copied or reordered for them: they
share one row of keys and values, and only note the sentence that each belongs to.
"""

import math

import torch
from fairseq.modules import MultiheadAttention


class EncoderAttention(MultiheadAttention):
    """fairseq's encoder-decoder attention, whose keys k neighbouring queries may share.

    With an `incremental_state`, `key` and `value` are (S, N, C) and `query` is (T, k N, C): rows
    ``k n`` to ``k n + k - 1`` belong to sentence n. Without, it is fairseq's.
    """

    need_attn = True

    def make_generation_fast_(self, need_attn=False, **kwargs):
        """Note whether the generator reads weights: fairseq's decoder asks for them in any case."""
        self.need_attn = need_attn

    def forward(self, query, key, value, key_padding_mask=None, incremental_state=None, **options):
        """Return the output (T, k N, C), and the weights (k N, T, S), (H, k N, T, S), or None."""
        if incremental_state is None or options.get("before_softmax"):
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, **options
            )
        need_head_weights = self.need_attn and options.get("need_head_weights", False)
        need_weights = self.need_attn and options.get("need_weights", True)
        T, B, C = query.shape
        H, R = self.num_heads, self.head_dim
        state = self._get_input_buffer(incremental_state)
        if not state:
            S, N, _ = key.shape
            keys = (self.scaling * self.k_proj(key)).view(S, N, H, R)
            values = self.v_proj(value).view(S, N, H, R)
            masked = key_padding_mask is not None and key_padding_mask.any()
            state = {
                # As a product with few queries reads them fastest.
                "keys": keys.permute(1, 2, 3, 0).contiguous(),
                "values": values.permute(1, 2, 0, 3).contiguous(),
                "padding": key_padding_mask.bool() if masked else None,
                "sentences": _sentences(N, B // N, query.device),
            }
            self._set_input_buffer(incremental_state, state)
        keys, values, padding = state["keys"], state["values"], state["padding"]
        N, _, _, S = keys.shape
        k = B // N
        q = self.q_proj(query).view(T, N, k, H, R).permute(1, 3, 0, 2, 4)
        scores = torch.bmm(q.reshape(N * H, T * k, R), keys.view(N * H, R, S))
        if padding is not None:
            scores = scores.view(N, H, T * k, S).masked_fill(padding[:, None, None], -math.inf)
            scores = scores.view(N * H, T * k, S)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        out = torch.bmm(self.dropout_module(weights.type_as(values)), values.view(N * H, S, R))
        out = out.view(N, H, T, k, R).permute(2, 0, 3, 1, 4).reshape(T, B, C)
        if not (need_weights or need_head_weights):
            return self.out_proj(out), None
        weights = weights.view(N, H, T, k, S).permute(1, 0, 3, 2, 4).reshape(H, B, T, S)
        return self.out_proj(out), weights if need_head_weights else weights.mean(dim=0)


def _sentences(N, k, device):
    """Return the sentence of each of k N rows."""
    return torch.arange(N, device=device).repeat_interleave(k)


def reorder(attentions, incremental_state, new_order):
    """Let row i be what row ``new_order[i]`` was, in the EncoderAttention of all layers.

    Nothing is copied unless a sentence goes, comes or changes place.
    """
    states = [attention._get_input_buffer(incremental_state) for attention in attentions]
    states = list(filter(None, states))
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
        for name in ("keys", "values", "padding"):
            if state[name] is not None:
                state[name] = state[name].index_select(0, kept)
        state["sentences"] = _sentences(len(kept), k, old.device)


def encoder_out_of_rows(encoder_out, attentions, incremental_state):
    """Return `encoder_out` as `attentions` take it, one row a sentence if they can share it.

    Its "rows" hold the sentence of each row, where there are other rows than sentences.
    """
    if encoder_out is None or not encoder_out.get("rows"):
        return encoder_out
    if any(attention._get_input_buffer(incremental_state) for attention in attentions):
        return encoder_out  # a later step: they have their keys already
    (rows,) = encoder_out["rows"]
    N = encoder_out["encoder_out"][0].shape[1]
    k = rows.numel() // N
    if incremental_state is not None and torch.equal(rows, _sentences(N, k, rows.device)):
        return encoder_out
    encoder_out = {**encoder_out, "rows": []}
    for name, axis in (("encoder_out", 1), ("encoder_padding_mask", 0)):
        encoder_out[name] = [x.index_select(axis, rows) for x in encoder_out[name]]
    return encoder_out

"""A decoder's attention to its encoder, as fairseq's but faster step by step.

The hypotheses of a sentence look at the same encoder output. A beam search reorders them within
their sentence, so nothing of the encoder has to be repeated, copied or reordered for them: here
they share one row of keys and values, and only which rows they are is written down.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention


class EncoderAttention(MultiheadAttention):
    """fairseq's encoder-decoder attention, whose keys k neighbouring queries may share.

    With an `incremental_state`, `key` and `value` are (S, N, C) and `query` is (T, k N, C): rows
    ``k n`` to ``k n + k - 1`` belong to sentence n. Without, it is fairseq's.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = "MultiheadAttention"  # for --retain-dropout-modules

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        incremental_state=None,
        need_weights=True,
        static_kv=False,
        attn_mask=None,
        before_softmax=False,
        need_head_weights=False,
    ):
        """The output (T, k N, C), and the weights (k N, T, S), (H, k N, T, S), or None."""
        if incremental_state is None or self.use_xformers or before_softmax:
            return super().forward(
                query, key, value, key_padding_mask, incremental_state, need_weights, static_kv,
                attn_mask, before_softmax, need_head_weights,
            )  # fmt: skip
        T, B, C = query.shape
        H, R = self.num_heads, self.head_dim
        state = self._get_input_buffer(incremental_state)
        if not state:
            S, N, _ = key.shape
            state = {
                "prev_key": self.k_proj(key).view(S, N, H, R).permute(1, 2, 0, 3).contiguous(),
                "prev_value": self.v_proj(value).view(S, N, H, R).permute(1, 2, 0, 3).contiguous(),
                "prev_key_padding_mask": key_padding_mask,
            }
            self._set_input_buffer(incremental_state, state)
        keys, values = state["prev_key"], state["prev_value"]
        N, S = keys.shape[0], keys.shape[2]
        k = B // N
        if "sentences" not in state:
            state["sentences"] = _sentences(N, k, query.device)
        q = self.q_proj(query).view(T, N, k, H, R).permute(1, 3, 0, 2, 4).reshape(N, H, T * k, R)
        mask = state.get("prev_key_padding_mask")
        mask = None if mask is None else ~mask.bool()[:, None, None]
        dropout = self.dropout_module
        p = dropout.p if dropout.training or dropout.apply_during_inference else 0.0
        weights = None
        if need_weights or need_head_weights:
            scores = self.scaling * q @ keys.transpose(2, 3)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            weights = scores.float().softmax(dim=-1)
            out = F.dropout(weights.type_as(values), p, p > 0) @ values
            weights = weights.view(N, H, T, k, S).permute(1, 0, 3, 2, 4).reshape(H, B, T, S)
            weights = weights if need_head_weights else weights.mean(dim=0)
        else:
            out = F.scaled_dot_product_attention(
                q, keys, values, mask, dropout_p=p, scale=self.scaling
            )
        out = out.view(N, H, T, k, R).permute(2, 0, 3, 1, 4).reshape(T, B, C)
        return self.out_proj(out), weights


def _sentences(N, k, device):
    """The sentence of each of k N rows."""
    return torch.arange(N, device=device).repeat_interleave(k)


def reorder(attentions, incremental_state, new_order):
    """Row i is from now on what row ``new_order[i]`` was, in all layers' EncoderAttention.

    Nothing is copied unless a sentence goes, comes or changes place.
    """
    states = [attention._get_input_buffer(incremental_state) for attention in attentions]
    states = [state for state in states if "sentences" in state]
    if not states:
        return
    old = states[0]["sentences"]
    sentences = old.index_select(0, new_order.to(old.device))
    if torch.equal(sentences, old):
        return
    k = old.numel() // states[0]["prev_key"].shape[0]
    groups = sentences.view(-1, k) if sentences.numel() % k == 0 else sentences.view(-1, 1)
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        groups = sentences.view(-1, 1)
    kept = groups[:, 0]
    for state in states:
        for name in ("prev_key", "prev_value", "prev_key_padding_mask"):
            if state.get(name) is not None:
                state[name] = state[name].index_select(0, kept)
        state["sentences"] = _sentences(*groups.shape, old.device)


# The encoder's output, as a dictionary of lists; `rows` holds the sentence of each row, if there
# are other rows than sentences.


def reorder_encoder_out(encoder_out, new_order):
    """Row i is from now on what row ``new_order[i]`` was; the output itself stays as it is."""
    N = encoder_out["encoder_out"][0].shape[1]
    rows = encoder_out.get("rows") or [torch.arange(N, device=new_order.device)]
    return {**encoder_out, "rows": [rows[0].index_select(0, new_order)]}


def encoder_out_of_rows(encoder_out, incremental_state):
    """What layers of EncoderAttention take of `encoder_out`: shared where they can share it."""
    if encoder_out is None or not encoder_out.get("rows") or incremental_state:
        return encoder_out  # a later step: they have their keys already
    (rows,) = encoder_out["rows"]
    N = encoder_out["encoder_out"][0].shape[1]
    k = rows.numel() // N
    if incremental_state is not None and torch.equal(rows, _sentences(N, k, rows.device)):
        return encoder_out
    return {
        **encoder_out,
        "encoder_out": [x.index_select(1, rows) for x in encoder_out["encoder_out"]],
        "encoder_padding_mask": [
            mask.index_select(0, rows) for mask in encoder_out["encoder_padding_mask"]
        ],
        "rows": [],
    }

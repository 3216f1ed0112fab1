"""PyTorch modules around the operator: TaLKConv, and the unit that replaces self-attention.

They know nothing of fairseq beyond the call that its Transformer layers make.
"""

import math
import uuid

import torch
import torch.nn.functional as F
from torch import nn

from talk_fairseq.ops.short_conv import short_conv, short_conv_update
from talk_fairseq.ops.state import (
    ShortConvState,
    TaLKConvState,
    compute_dtype,
    reorder_rings,
    whole_number,
)
from talk_fairseq.ops.talk_conv import talk_conv, talk_conv_update_unchecked


def _check_probability(name, p):
    if not 0 <= p < 1:
        raise ValueError(f"{name}: expected 0 <= p < 1, got {p}")


def _check_channels(name, x, channels):
    if x.dim() != 3 or x.shape[2] != channels:
        raise ValueError(f"{name}: expected shape (T, B, {channels}), got {tuple(x.shape)}")


class _RetainsDropout(nn.Module):
    """A module whose dropout stays on in generation where ``--retain-dropout`` says so."""

    retain_dropout = False

    def make_generation_fast_(
        self, name="", retain_dropout=False, retain_dropout_modules=None, **kwargs
    ):
        """Retain dropout if fairseq says so, in all classes (None) or in those with these names."""
        self.retain_dropout = retain_dropout and (
            retain_dropout_modules is None or type(self).__name__ in retain_dropout_modules
        )

    def dropout_active(self):
        """Return whether dropout is on (a method, since torch.jit.trace compiles properties)."""
        return self.training or self.retain_dropout


def _spread_biases(heads, sides):
    """Return biases from -4 to 2 (sigmoids 0.02 to 0.88), pairs for two sides; 0 for one head."""
    if heads == 1:
        return torch.zeros(sides)
    if sides == 1:
        return torch.linspace(-4, 2, heads)
    values = torch.linspace(-4, 2, math.ceil(math.sqrt(heads)))
    pairs = torch.cartesian_prod(values, values)
    return pairs[torch.linspace(0, len(pairs) - 1, heads).round().long()].t().reshape(-1)


def _head_windows(heads, largest):
    """Return a largest window for each head, in whole tokens: 2 to `largest`, in equal ratios."""
    end = math.log2(max(largest, 1))
    start = end if heads == 1 else min(1, end)
    # In float32 whatever PyTorch's default dtype is: they must follow from the options alone.
    powers = torch.linspace(start, end, heads, dtype=torch.float32, device="cpu")
    return (2**powers).round().long().clamp(max=largest).int()


class TaLKConv(_RetainsDropout):
    """Predict at each time step how far each head looks, and sum over that window.

    Offsets are ``dropout(sigmoid(Linear(x)))`` (section 3.1 of the paper), from the sigmoid on in
    float32 or float64: float16 and bfloat16 have too few digits for a position.

    Args:
        channels: C.
        heads: H, which divides C; the channels of a head share a window.
        max_left: the largest window to the left, in tokens.
        max_right: the same to the right; 0 makes the module causal, without a right offset.
        offset_dropout: probability of dropping an offset, which shrinks that side to nothing.
        normalize: divide by ``max_left + max_right + 1`` (section 3.2), or with `spread_windows`
            by the tokens of the head's own largest window; off in an ablation only.
        spread: begin with windows of all lengths, by the biases of the offsets; without it, each
            head begins with about half of the largest window. Not in the paper.
        slow: begin with weights of 0 from tokens to offsets, and divide them by ``sqrt(C)``, so
            that each head's windows are alike for all tokens at first, and learn to differ slowly.
            Not in the paper, where they begin at random and are not divided.
        spread_windows: give each head its own largest window, from 2 tokens to `max_left` (and
            `max_right`) in equal ratios: near and far heads in one layer. Not in the paper.
        root_normalize: divide by the square root of the predicted length of each window in place of
            the largest window, so that short and long windows of independent tokens have outputs
            of one variance. Not in the paper.

    Raises:
        ValueError: H does not divide C, a number is negative or not whole, a probability is outside
            [0, 1), or `root_normalize` without `normalize`.
    """

    def __init__(
        self,
        channels,
        heads,
        max_left,
        max_right=0,
        offset_dropout=0.0,
        normalize=True,
        spread=False,
        slow=False,
        spread_windows=False,
        root_normalize=False,
    ):
        super().__init__()
        channels, heads = whole_number("channels", channels, 1), whole_number("heads", heads, 1)
        if channels % heads:
            raise ValueError(f"heads: expected a divisor of channels = {channels}, got {heads}")
        self.max_left = whole_number("max_left", max_left)
        self.max_right = whole_number("max_right", max_right)
        _check_probability("offset_dropout", offset_dropout)
        if root_normalize and not normalize:
            raise ValueError("root_normalize: expected False without normalize, got True")
        self.channels, self.heads = channels, heads
        self.offset_dropout, self.normalize = offset_dropout, normalize
        self.slow, self.spread_windows, self.root_normalize = slow, spread_windows, root_normalize
        sides = 1 if self.max_right == 0 else 2
        self.offsets = nn.Linear(channels, sides * heads)
        nn.init.xavier_uniform_(self.offsets.weight)
        nn.init.zeros_(self.offsets.bias)
        if slow:  # after the draw, so that all other weights begin as without it
            nn.init.zeros_(self.offsets.weight)
        if spread:
            with torch.no_grad():
                self.offsets.bias.copy_(_spread_biases(heads, sides))
        # Integers stay exact in a model of float16, and out of averages: they follow from options.
        self.register_buffer("windows", None, persistent=False)
        self._make_windows()
        # Windows that leave the meta device are made anew: no checkpoint has them.
        self.register_load_state_dict_post_hook(TaLKConv._make_windows)

    def _make_windows(self, *_):
        """Make the largest windows of the heads: to the left and, if not causal, to the right."""
        if self.spread_windows:
            sides = (self.max_left, self.max_right) if self.max_right else (self.max_left,)
            windows = torch.stack([_head_windows(self.heads, side) for side in sides])
            if self.windows is None or self.windows.is_meta:
                self.windows = windows.to(self.offsets.weight.device)
            self.windows.copy_(windows)  # whatever `to_empty` has left in them

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._make_windows()
        return self

    def extra_repr(self):
        return (
            f"{self.channels}, heads={self.heads}, max_left={self.max_left}, "
            f"max_right={self.max_right}, offset_dropout={self.offset_dropout}, "
            f"normalize={self.normalize}, slow={self.slow}, "
            f"spread_windows={self.spread_windows}, root_normalize={self.root_normalize}"
        )

    def predict_offsets(self, x):
        """Return ``(offset_left, offset_right)`` for `x` (T, B, C), each (T, B, H).

        The second is None when causal. ValueError for an `x` of another shape.
        """
        _check_channels("x", x, self.channels)
        logits = self.offsets(x)
        logits = logits.to(compute_dtype(logits.dtype))
        if self.slow:
            # Adam moves each weight about as far as the bias, so a sum of many moves much faster.
            bias = self.offsets.bias.to(logits.dtype)
            logits = torch.lerp(bias, logits, self.channels**-0.5)
        offsets = torch.sigmoid(logits)
        offsets = F.dropout(offsets, self.offset_dropout, self.dropout_active())
        if self.max_right == 0:
            return self._of_heads(offsets, 0), None
        left, right = offsets.chunk(2, dim=-1)
        return self._of_heads(left, 0), self._of_heads(right, 1)

    def _of_heads(self, offset, side):
        """Convert offsets from fractions of each head's largest window to those of the layer's."""
        if self.windows is None:
            return offset
        largest = max((self.max_left, self.max_right)[side], 1)
        return offset * self.windows[side] / largest

    def forward(self, x):
        """x (T, B, C) -> (T, B, C); 16-bit types are rounded once, at the end."""
        offset_left, offset_right = self.predict_offsets(x)
        factor = self._factor(offset_left, offset_right)
        # In 16 bits, what the operator divides and a factor multiplies may leave their range.
        rows = x if factor is None else x.to(compute_dtype(x.dtype))
        out = talk_conv(rows, offset_left, offset_right, self.max_left, self.max_right)
        return self._scaled(out, factor).to(x.dtype)

    def step(self, x, state=None):
        """Continue a sequence: the outputs for the new steps `x` (S, B, C), and its state.

        `state` is None at the start and what the last call returned from then on: a
        :class:`TaLKConvState` of constant size, which is changed in place. Only for a causal
        module, else ValueError. With another divisor than the layer's largest window, 16-bit types
        are rounded twice, not once as in `forward`, and float16 loses digits below 6e-5 on the way:
        this keeps the state small. Begin a new state when dropout is switched on: it makes offsets
        larger, perhaps beyond the old state's reach.
        """
        if self.max_right:
            raise ValueError(f"step: expected a causal module, got max_right = {self.max_right}")
        offset_left, _ = self.predict_offsets(x)
        if state is None:
            # Dropout divides the offsets that it keeps by the probability of keeping one.
            keep = 1 - self.offset_dropout if self.dropout_active() else 1
            reach = math.ceil(self.max_left / keep)
            state = TaLKConvState(x.shape[1], x.shape[2], reach, x.dtype, x.device)
        out = talk_conv_update_unchecked(x, offset_left, state, self.max_left)
        return self._scaled(out, self._factor(offset_left, None)), state

    def _factor(self, offset_left, offset_right):
        """Return what multiplies the operator: a number, one for each head, or None."""
        largest = self.max_left + self.max_right + 1
        if not self.normalize:
            return largest
        if self.root_normalize:
            length = 1 + offset_left * self.max_left
            if offset_right is not None:
                length = length + offset_right * self.max_right
            return largest * length.rsqrt()
        if self.windows is not None:
            return largest / (1 + self.windows.sum(0)).to(offset_left.dtype)
        return None

    def _scaled(self, out, factor):
        if not isinstance(factor, torch.Tensor):
            return out if factor is None else out * factor
        heads = out.unflatten(-1, (self.heads, -1))
        return (heads * factor.unsqueeze(-1).to(out.dtype)).flatten(-2)


class ShortConv(nn.Module):
    """A depthwise convolution over K neighbouring tokens, which begins close to the identity.

    A window gives its tokens equal weight, whatever their order; this tells neighbours apart. Not
    in the paper. ``out[t] = sum(weight[k] * x[t - left + k] for k in range(K))``, with zeros beyond
    the ends; ``left`` is ``K - 1`` for a causal one, else ``K // 2``.

    Args:
        channels: C.
        K: taps, at least 1.
        causal: read no token to the right.

    Raises ValueError where K is below 1.
    """

    def __init__(self, channels, K, causal):
        super().__init__()
        K = whole_number("short_kernel", K, least=1)
        self.left = K - 1 if causal else K // 2
        self.right = K - 1 - self.left
        self.weight = nn.Parameter(torch.empty(K, channels))
        nn.init.normal_(self.weight, std=0.2)
        with torch.no_grad():
            self.weight[self.left] += 1

    def forward(self, x):
        """x (T, B, C) -> (T, B, C)."""
        return short_conv(x, self.weight, self.left)

    def step(self, x, state=None):
        """Continue a sequence: the outputs for the new steps `x` (S, B, C), and its state.

        Only for a causal one. `state` is None at the start and what the last call returned from
        then on: the ShortConvState of the last K inputs, which is changed in place.
        """
        if self.right:
            raise ValueError(f"step: expected a causal module, got {self.right} taps to the right")
        if state is None:
            dtype = torch.promote_types(x.dtype, self.weight.dtype)
            state = ShortConvState(x.shape[1], x.shape[2], len(self.weight), dtype, x.device)
        return short_conv_update(x, self.weight, state), state


class TaLKConvUnit(_RetainsDropout):
    """The sub-block of figure 2 of the paper, called as fairseq calls a self-attention.

    ``Linear(C, 2C) -> GLU -> zero the padding -> TaLKConv -> Linear(C, C)``; without GLU the
    first is ``Linear(C, C)``. Decoders keep the states of the windows and of the short convolution
    in `incremental_state`.

    Args:
        channels, heads, max_left, max_right: as :class:`TaLKConv`.
        glu: gate the first projection.
        input_dropout: probability of dropping an element of the unit's input.
        conv_channels: channels of the convolution, between the two projections (default: C).
        short_kernel: taps of a :class:`ShortConv` before the windows; 0 for none, as in the paper.
        options: the others of :class:`TaLKConv`, from `offset_dropout` on.

    Attributes:
        convolution: the class of the windows: TaLKConv, or one with the same constructor,
            `forward` and `step`; what `step` returns as its state has ``reorder(new_order)``.

    Raises ValueError as :class:`TaLKConv`, and as :class:`ShortConv` if there is one.
    """

    convolution = TaLKConv

    def __init__(
        self, channels, heads, max_left, max_right=0, *, glu=True, input_dropout=0.0,
        conv_channels=None, short_kernel=0, **options,
    ):  # fmt: skip
        super().__init__()
        _check_probability("input_dropout", input_dropout)
        conv_channels = channels if conv_channels is None else conv_channels
        conv_channels = whole_number("conv_channels", conv_channels, 1)
        self.channels, self.glu, self.input_dropout = channels, glu, input_dropout
        self.linear1 = nn.Linear(channels, 2 * conv_channels if glu else conv_channels)
        self.short = ShortConv(conv_channels, short_kernel, not max_right) if short_kernel else None
        self.conv = self.convolution(conv_channels, heads, max_left, max_right, **options)
        self.linear2 = nn.Linear(conv_channels, channels)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        # fairseq's decoder layers read these of their attention.
        self.num_heads, self.head_dim = int(heads), channels // int(heads)
        # A copy of the unit has the same key, so it finds the states of the unit, as in fairseq.
        self._key = f"{uuid.uuid4()}.TaLKConvUnit"

    def forward(
        self, query, key=None, value=None, key_padding_mask=None, incremental_state=None,
        need_weights=False, attn_mask=None,
    ):  # fmt: skip
        """query (T, B, C) -> ``(out (T, B, C), None)``.

        `key_padding_mask` (B, T) is true at padding. With the dictionary `incremental_state`,
        `query` is the next T steps of a sequence, whose state is kept there and changed in place.
        `key` and `value` are taken to be `query`, and there are no weights to return.

        ValueError for a `query` or `key_padding_mask` of another shape, an `attn_mask`, or an
        `incremental_state` of another batch or in a unit that is not causal.
        """
        _check_channels("query", query, self.channels)
        if attn_mask is not None:
            raise ValueError(f"attn_mask: expected None, got {tuple(attn_mask.shape)}")
        if key_padding_mask is not None and key_padding_mask.shape != query.shape[1::-1]:
            raise ValueError(
                f"key_padding_mask: expected shape {tuple(query.shape[1::-1])}, (B, T) of query, "
                f"got {tuple(key_padding_mask.shape)}"
            )
        x = F.dropout(query, self.input_dropout, self.dropout_active())
        x = self.linear1(x)
        if self.glu:
            x = F.glu(x, dim=-1)
        padding = None if key_padding_mask is None else key_padding_mask.bool().t().unsqueeze(-1)
        buffer = self._get_input_buffer(incremental_state)
        for name, part in (("short", self.short), ("state", self.conv)):
            if part is None:
                continue
            if padding is not None:  # `short` sums its neighbours into it
                x = x.masked_fill(padding, 0)
            if incremental_state is None:
                x = part(x)
            else:
                x, buffer[name] = part.step(x, buffer.get(name))
        if incremental_state is not None:
            incremental_state[self._key] = buffer
        return self.linear2(x), None

    def _get_input_buffer(self, incremental_state):
        return (incremental_state or {}).get(self._key, {})

    def reorder_incremental_state(self, incremental_state, new_order):
        """Follow a beam search that keeps, drops or repeats rows of the batch."""
        _reorder_states([self], incremental_state, new_order)


def reorder_units(modules, incremental_state, new_order):
    """Call ``reorder_incremental_state(incremental_state, new_order)`` of those that have it.

    The states of all TaLKConvUnits among the modules are reordered together.
    """
    units = []
    for module in modules:
        reorder = getattr(type(module), "reorder_incremental_state", None)
        if reorder is TaLKConvUnit.reorder_incremental_state:
            units.append(module)
        elif reorder is not None:
            module.reorder_incremental_state(incremental_state, new_order)
    _reorder_states(units, incremental_state, new_order)


def _reorder_states(units, incremental_state, new_order):
    rings = []
    for unit in units:
        for state in unit._get_input_buffer(incremental_state).values():
            if type(state) in (TaLKConvState, ShortConvState):
                rings.append(state)
            elif state is not None:  # of one's own `convolution`
                state.reorder(new_order)
    reorder_rings(rings, new_order)

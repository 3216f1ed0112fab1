"""The TaLK operator to read: plain PyTorch, any device, twice differentiable."""

import torch
import torch.nn.functional as F


def talk_conv_reference(x, offset_left, offset_right, max_left, max_right):
    """:func:`talk_fairseq.talk_conv` in a few lines of PyTorch, with the same arguments.

    Each output is the difference of a prefix sum at two real-valued positions (equations 3 to 6
    of the paper), computed in float64::

        S(k)   = x[0] + ... + x[k - 1], linear between integers
        out[t] = (S(min(t + 1 + u_r, T)) - S(max(t - u_l, 0))) / (max_left + max_right + 1)

    with ``u_l = offset_left * max_left`` and ``u_r = offset_right * max_right`` in tokens.
    A negative or NaN offset makes its outputs NaN.
    """
    T, B, C = x.shape
    H = offset_left.shape[2]
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    rows = x.to(wide).reshape(T, B, H, C // H)
    prefix = F.pad(rows.cumsum(0), (0, 0, 0, 0, 0, 0, 1, 0))
    time = torch.arange(T, device=x.device)[:, None, None]

    whole, fraction = _split(offset_right, max_right, T - 1 - time, time, wide)
    out = _rows(prefix, time + 1 + whole)
    # The row beyond the last is only ever read with a fraction of 0.
    out = out + fraction * _rows(rows, (time + 1 + whole).clamp(max=T - 1))

    whole, fraction = _split(offset_left, max_left, time, time, wide)
    out = out - _rows(prefix, time - whole)
    out = out + fraction * _rows(rows, (time - whole - 1).clamp(min=0))
    return (out / (max_left + max_right + 1)).reshape(T, B, C).to(x.dtype)


def _split(offset, maximum, limit, time, wide):
    """The reach ``u = offset * maximum`` as whole tokens (T, B, H) and a fraction (T, B, H, 1).

    It ends at the sequence's edge, `limit` tokens away, where the fraction is 0. Splitting `u`
    rather than ``time - u`` keeps the fraction's digits however large the time is. The
    fraction's gradient is 0 on whole tokens, the kinks of the interpolation.
    """
    if offset is None:
        return torch.zeros_like(time), torch.zeros((), dtype=wide, device=time.device)
    u = offset.to(wide) * maximum
    u = torch.where(u >= 0, u, torch.nan)
    inside = ~(u >= limit)
    whole = torch.where(inside, u.detach().floor().nan_to_num(), limit).long()
    fraction = torch.where(inside & (u != whole), u - whole, 0.0)
    return whole, fraction[..., None]


def _rows(values, index):
    """``values[index[t, b, h], b, h]`` for `values` (rows, B, H, R)."""
    _, B, H, R = values.shape
    return values.gather(0, index.expand(-1, B, H)[..., None].expand(-1, -1, -1, R))

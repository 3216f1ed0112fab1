"""The TaLK operator in plain PyTorch, for readers: any device, twice differentiable."""

import torch

from talk_fairseq.ops.state import sums_dtype


def talk_conv_reference(x, offset_left, offset_right, max_left, max_right):
    """Return what :func:`talk_fairseq.talk_conv` does, in plain PyTorch, with arguments unchecked.

    Each output is the difference of a prefix sum at two real-valued positions (equations 3 to 6
    of the paper), computed in float64, or in float32 on devices without it::

        S(k)   = x[0] + ... + x[k - 1], linear between integers
        out[t] = (S(min(t + 1 + u_r, T)) - S(max(t - u_l, 0))) / (max_left + max_right + 1)

    with ``u_l = offset_left * max_left`` and ``u_r = offset_right * max_right`` in tokens.
    A negative or NaN offset makes its outputs NaN.
    """
    T, B, C = x.shape
    H = offset_left.shape[2]
    max_left, max_right = int(max_left), int(max_right)  # NumPy's integers may overflow
    wide = sums_dtype(torch.float64, x.device)
    rows = x.to(wide).reshape(T, B, H, C // H)
    prefix = torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows.cumsum(0)])
    time = torch.arange(T, device=x.device)[:, None, None]

    whole, fraction = _split(offset_right, max_right, T - 1 - time, time, wide)
    out = _rows(prefix, time + 1 + whole)
    # Where nothing is cut, a row of the window: 0 times a NaN outside it would be NaN.
    out = out + fraction[..., None] * _rows(rows, time + whole + (fraction > 0).long())

    whole, fraction = _split(offset_left, max_left, time, time, wide)
    out = out - _rows(prefix, time - whole)
    out = out + fraction[..., None] * _rows(rows, time - whole - (fraction > 0).long())
    return (out / (max_left + max_right + 1)).reshape(T, B, C).to(x.dtype)


def _split(offset, maximum, limit, time, wide):
    """Split the reach ``u = offset * maximum`` into whole tokens and a fraction, each (T, B, H).

    It ends at the sequence's edge, `limit` tokens away, where the fraction is 0. Splitting `u`
    rather than ``time - u`` keeps the fraction's digits however large the time is. The
    fraction's gradient is 0 on whole tokens, the kinks of the interpolation.
    """
    if offset is None:
        return torch.zeros_like(time), torch.zeros(1, dtype=wide, device=time.device)
    u = offset.to(wide) * maximum
    # Not a choice between u and NaN, which would hide NaN from the gradient.
    u = u * torch.where(offset >= 0, 1.0, torch.nan)
    inside = ~(u >= limit)
    whole = torch.where(inside, u.detach().floor().nan_to_num(), limit).long()
    fraction = torch.where(inside & (u != whole), u - whole, 0.0)
    return whole, fraction


def _rows(values, index):
    """Return ``values[index[t, b, h], b, h]`` for `values` (rows, B, H, R)."""
    _, B, H, R = values.shape
    return values.gather(0, index.expand(-1, B, H)[..., None].expand(-1, -1, -1, R))


def talk_conv_update_reference(x, offset_left, sums, steps, max_left):
    """Compute :func:`talk_fairseq.talk_conv_update` in plain PyTorch: outputs and new sums.

    Args:
        x: (S, B, C). offset_left: (S, B, H).
        sums: (L, B, C), a ring of running sums that restart at every L-th step; not changed.
        steps: how many time steps there were before.
        max_left: tokens that an offset of 1 reaches to the left.

    At time t, with ``first = t - t % L`` and ``P(k) = x[first] + ... + x[k]``, which for a k
    before ``first`` is minus the sum of the rows between::

        out[t] = (P(t) - P(t - whole - 1) + fraction * x[t - whole - 1]) / (max_left + 1)
    """
    S, B, C = x.shape
    H = offset_left.shape[2]
    L, wide = sums.shape[0], sums_dtype(torch.float64, x.device)
    outs = []
    for t, row, offset in zip(range(steps, steps + S), x.to(sums.dtype), offset_left):
        slot = t % L
        now = row if slot == 0 else sums[slot - 1] + row
        sums = sums.index_copy(0, torch.tensor([slot], device=x.device), now[None])
        # P of the last steps, this one last; P is 0 before the ring's first slot.
        older = sums[slot + 1 : -1] - sums[-1]
        prefix = torch.cat([older, torch.zeros_like(sums[:1]), sums[: slot + 1]])
        prefix = prefix.reshape(len(prefix), B, H, C // H)
        whole, fraction = _split(offset[None], max_left, t, None, wide)
        fraction = torch.where(whole <= L - 3, fraction, torch.nan)
        end = (len(prefix) - 2 - whole).clamp(min=0)
        before = _rows(prefix, end)
        # The row that the window cuts; there is none where the fraction is 0.
        cut = before - _rows(prefix, (end - (fraction != 0).long()).clamp(min=0))
        out = prefix[-1:] - before + fraction[..., None].to(sums.dtype) * cut
        outs.append((out / (max_left + 1)).reshape(1, B, C).to(x.dtype))
    return torch.cat(outs) if outs else torch.empty_like(x), sums

"""Retention, a peer of the comparison's language models."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("fairseq")

from retention import Retention

T, B, C, H = 9, 2, 32, 4


@pytest.fixture
def unit():
    torch.manual_seed(0)
    unit = Retention(C, H).double()
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=C**-0.5)
    return unit


@pytest.fixture
def x():
    return torch.randn(T, B, C, dtype=torch.float64)


def turned(row, angle, t):
    """A row (R,) of a head at the position t, pair by pair."""
    out = torch.empty_like(row)
    for i, a in enumerate(t * angle):
        left, right = row[2 * i], row[2 * i + 1]
        out[2 * i] = a.cos() * left - a.sin() * right
        out[2 * i + 1] = a.sin() * left + a.cos() * right
    return out


def test_the_recurrence_of_the_paper(unit, x):
    """S_t = decay S_(t-1) + k_t v_t, and q_t S_t is read: equation 6 of the paper, by loops."""
    R = C // H
    angle = 1e4 ** -torch.linspace(0, 1, R // 2, dtype=x.dtype)
    rows = []
    for b in range(B):
        states = [torch.zeros(R, 2 * R, dtype=x.dtype) for _ in range(H)]
        for t in range(T):
            heads = []
            for h in range(H):
                one, two = slice(h * R, (h + 1) * R), slice(2 * h * R, 2 * (h + 1) * R)
                q = turned(unit.q(x[t, b])[one], angle, t)
                k = turned(unit.k(x[t, b])[one] * R**-0.5, angle, t)
                decay = 1 - 2 ** (-5 - h)
                states[h] = decay * states[h] + torch.outer(k, unit.v(x[t, b])[two])
                read = q @ states[h]
                heads.append(read / (read.pow(2).mean() + torch.finfo(x.dtype).eps).sqrt())
            gate = unit.gate(x[t, b])
            rows.append(unit.out(gate * gate.sigmoid() * torch.cat(heads)))
    expected = torch.stack(rows).view(B, T, C).transpose(0, 1)
    assert_close(unit(x)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [[1] * T, [4, 1, 4]])
def test_steps_equal_one_pass(unit, x, lengths):
    state = {}
    steps = [unit(rows, incremental_state=state)[0] for rows in x.split(lengths)]
    assert_close(torch.cat(steps), unit(x)[0], rtol=1e-9, atol=1e-9)


def test_a_beam_search_changes_rows(unit, x):
    order, state = torch.tensor([1, 1]), {}
    unit(x[:4], incremental_state=state)
    unit.reorder_incremental_state(state, order)
    last = unit(x[4:, order], incremental_state=state)[0]
    assert_close(last, unit(x[:, order])[0][4:], rtol=1e-9, atol=1e-9)


def test_padding_is_not_read(unit, x):
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, 3] = True
    changed = x.clone()
    changed[3] = 5
    outs = [unit(rows, key_padding_mask=padding)[0] for rows in (x, changed)]
    assert_close(outs[0][4:], outs[1][4:])


@pytest.mark.parametrize("dtype, error", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_halves_keep_what_each_head_forgets(dtype, error):
    """The last of 8 heads keeps 4095 / 4096 of its state in each step, which is 1 in halves."""
    unit, x = Retention(C, 8).to(dtype), torch.randn(300, 1, C, dtype=dtype)
    exact = Retention(C, 8)
    exact.load_state_dict(unit.state_dict())
    expected, _ = exact(x.float())
    assert (unit(x)[0] - expected).abs().max() < error * expected.abs().max()
    state = {}
    steps = torch.cat([unit(row, incremental_state=state)[0] for row in x.split(1)])
    assert (steps - expected).abs().max() < error * expected.abs().max()

"""Recall by content, beside the windows of a language model."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("fairseq")

from recall import CHUNK, HEADS, Recall, RecallUnit

from pipeline.common.systems import read_systems
from pipeline.compare import synthetic

B, R = 2, 5
C = 2 * HEADS * R


@pytest.fixture
def unit():
    torch.manual_seed(0)
    return RecallUnit(C, HEADS, max_left=7, short_kernel=3, spread_windows=True).double().eval()


def rows(T):
    return torch.randn(T, B, C, dtype=torch.float64)


def oracle(recall, x):
    """The formula of the docstring, by loops over one sequence x (T, C)."""
    out = []
    for h in range(HEADS):
        v = x[:, h * R : (h + 1) * R]
        asked = x[:, C // 2 + h * R : C // 2 + (h + 1) * R]
        asked = (asked - asked.mean(-1, keepdim=True)) / (
            asked.var(-1, correction=0, keepdim=True) + 1e-5
        ).sqrt()
        p = (asked * recall.sharpness[h]).softmax(-1)
        head = []
        for t in range(len(x)):
            total, count = torch.zeros(R, dtype=x.dtype), recall.log_doubt[h].exp()
            for s in range(1, t + 1):
                a = p[t] @ p[s - 1]
                total, count = total + a * v[s], count + a
            head.append(total / count)
        out.append(torch.stack(head))
    return torch.cat(out, dim=-1)


@pytest.mark.parametrize("T", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_the_formula(T):
    torch.manual_seed(1)
    recall, x = Recall(C).double(), rows(T)
    for parameter in recall.parameters():
        torch.nn.init.normal_(parameter)
    out, _, _ = recall(x)
    assert out.shape == (T, B, C // 2)
    for b in range(B if T else 0):
        assert_close(out[:, b], oracle(recall, x[:, b]).view_as(out[:, b]))


def test_gradients():
    torch.manual_seed(1)
    recall, x = Recall(C).double(), rows(4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: recall(x)[0], (x, *recall.parameters()))


@pytest.mark.parametrize("lengths", [[1] * 90, [4, 70, 16], [0, 90]])
def test_steps_equal_one_pass(unit, lengths):
    x, state = rows(90), {}
    with torch.no_grad():
        steps = [unit(part, incremental_state=state)[0] for part in x.split(lengths)]
        assert_close(torch.cat(steps), unit(x)[0])


def test_a_beam_search_changes_rows(unit):
    x, order, state = rows(20), torch.tensor([1, 1, 0]), {}
    with torch.no_grad():
        unit(x[:8], incremental_state=state)
        unit.reorder_incremental_state(state, order)
        last = unit(x[8:, order], incremental_state=state)[0]
        assert_close(last, unit(x[:, order])[0][8:])


def test_a_state_of_constant_size(unit):
    state = {}
    with torch.no_grad():
        sizes = []
        for part in rows(300).split(50):
            unit(part, incremental_state=state)
            past = state[unit._key]["state"]
            sizes.append((past.windows.rows.shape, past.likeness.shape, past.sums.shape))
    assert len(set(sizes)) == 1


def test_padding_is_not_recalled(unit):
    """Padding before a sequence changes nothing of it."""
    x = rows(12)
    padding = torch.zeros(B, 12, dtype=torch.bool)
    padding[0, :5] = True
    with torch.no_grad():
        out = unit(x, key_padding_mask=padding)[0]
        alone = unit(x[5:, :1])[0]
    assert_close(out[5:, :1], alone)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(dtype):
    """And rounded once."""
    torch.manual_seed(1)
    recall, x = Recall(C), rows(70).to(dtype)
    assert torch.equal(recall(x)[0], recall(x.float())[0].to(dtype))


def test_channels_that_do_not_fit():
    with pytest.raises(ValueError, match=f"channels: expected a multiple of {2 * HEADS}, got 12"):
        Recall(12)


def test_the_language_model_decodes_step_by_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its user directory is found from anywhere
    flags = read_systems("synthetic")["systems"]["talkconv_plus_recall"]
    model, first = synthetic.build(flags, seed=1)
    model.eval()
    tokens = first + torch.randint(synthetic.WORDS, (2, 80))
    state = {}
    with torch.no_grad():
        steps = [model.decoder(tokens[:, : t + 1], incremental_state=state)[0] for t in range(80)]
        assert_close(torch.cat(steps, dim=1), model(tokens)[0], rtol=1e-5, atol=1e-5)


def test_it_recalls_what_windows_cannot_reach():
    """Trained as on the synthetic page, for fewer updates."""
    systems = read_systems("synthetic")["systems"]
    scores = {}
    for name in ("talkconv_plus_recall", "talkconv_plus_wide"):
        model, first = synthetic.trained(systems[name], "recall", steps=150, lr=1e-2, seed=1)
        scores[name] = synthetic.accuracy(model, first, "recall", 4 * synthetic.T, seed=1)
    assert scores["talkconv_plus_recall"] > 90 > 30 > scores["talkconv_plus_wide"]

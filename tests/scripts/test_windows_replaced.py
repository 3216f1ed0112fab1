"""Models with something else in place of the windows, systems of the comparison."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

pytest.importorskip("fairseq")

import building
import building_lm
from windows import Kernel, KernelUnit, NoWindowUnit, OneWindow, OneWindowUnit

UNITS = {"kernels": KernelUnit, "no_windows": NoWindowUnit, "one_window": OneWindowUnit}

T, B, C, H = 20, 3, 16, 4


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", UNITS)
def test_an_arch_differs_in_its_units_alone(name):
    for module, arch in ((building, "talkconv_plus"), (building_lm, "talkconv_plus_wide_lm")):
        ours, theirs = (
            module.from_flags("--arch", other) for other in (arch, arch.replace("talkconv", name))
        )
        assert {**theirs, "_name": None, "arch": None} == {**ours, "_name": None, "arch": None}
        layers = module.build(theirs).decoder.layers
        assert {type(layer.self_attn) for layer in layers} == {UNITS[name]}


@torch.no_grad()
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("lengths", [[1] * T, [7, 1, 12]])
def test_steps_equal_a_full_pass(name, lengths):
    torch.manual_seed(0)
    unit = UNITS[name](C, H, max_left=7, short_kernel=3, spread=True).eval()
    x, state = inputs(T, B, C), {}
    steps = [unit(rows, incremental_state=state)[0] for rows in x.split(lengths)]
    assert_close(torch.cat(steps), unit(x)[0], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", UNITS)
def test_a_beam_search_changes_rows(name):
    torch.manual_seed(0)
    unit = UNITS[name](C, H, max_left=7, short_kernel=3).eval()
    x, order, state = inputs(T, B, C), torch.tensor([2, 0, 0]), {}
    unit(x[:9], incremental_state=state)
    unit.reorder_incremental_state(state, order)
    last, _ = unit(x[9:, order], incremental_state=state)
    assert_close(last, unit(x[:, order])[0][9:], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("max_left, max_right", [(3, 0), (3, 2)])
def test_a_kernel_weighs_what_a_window_may_reach(max_left, max_right):
    torch.manual_seed(0)
    kernel, x = Kernel(C, H, max_left, max_right).eval(), inputs(T, B, C)
    kernel.conv.weight.normal_()
    weight = kernel.conv.weight.view(H, -1).softmax(-1)  # (H, max_left + 1 + max_right)
    rows = F.pad(x, (0, 0, 0, 0, max_left, max_right)).view(-1, B, H, C // H)
    expected = sum(rows[k : k + T] * weight[:, k, None] for k in range(weight.shape[1]))
    assert_close(kernel(x), expected.view(T, B, C), rtol=0, atol=1e-5)


def test_without_windows_nothing_but_the_short_convolution_reads_other_tokens():
    unit, x = NoWindowUnit(C, H, max_left=7, short_kernel=3).eval(), inputs(T, B, C)
    expected = unit.linear2(unit.short(F.glu(unit.linear1(x), dim=-1)))
    assert torch.equal(unit(x)[0], expected)


def test_all_tokens_share_one_window():
    torch.manual_seed(0)
    conv = OneWindow(C, H, max_left=7, max_right=3, spread=True).eval()
    torch.nn.init.normal_(conv.offsets.bias)
    for offset, bias in zip(conv.predict_offsets(inputs(T, B, C)), conv.offsets.bias.chunk(2)):
        assert_close(offset, bias.sigmoid().expand(T, B, H))

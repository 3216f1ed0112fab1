"""TaLKConv and TaLKConvUnit: offsets, padding, and steps that equal a full pass."""

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch

import oracle
from talk_fairseq import TaLKConv, TaLKConvUnit


def test_is_the_operator_on_its_own_offsets():
    conv = TaLKConv(12, 3, 5, 2).eval()
    x = torch.randn(20, 2, 12)
    logits = torch.nn.functional.linear(x, conv.offsets.weight, conv.offsets.bias)
    left, right = torch.sigmoid(logits).split(3, dim=-1)
    expected = oracle.talk_conv(x, left, right, 5, 2)
    assert oracle.worst_error(conv(x), expected) <= oracle.TOLERANCE[torch.float32]


def test_without_normalisation_it_is_the_plain_sum():
    conv = TaLKConv(8, 2, 5, 2).eval()
    x = torch.randn(20, 2, 8)
    normalised = conv(x)
    conv.normalize = False
    assert torch.allclose(conv(x), normalised * 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_modules_keep_offsets_in_float32(dtype):
    conv = TaLKConv(8, 2, 5, 2).to(dtype)
    offset_left, offset_right = conv.predict_offsets(torch.randn(4, 1, 8, dtype=dtype))
    assert offset_left.dtype == offset_right.dtype == torch.float32
    assert conv(torch.randn(4, 1, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_modules_with_windows_of_their_own(dtype, root):
    unit = TaLKConvUnit(8, 2, 5, spread_windows=True, root_normalize=root).to(dtype)
    x = torch.randn(4, 1, 8, dtype=dtype)
    assert unit(x)[0].dtype == unit(x, incremental_state={})[0].dtype == dtype


@pytest.mark.parametrize(
    "options", [{"root_normalize": True}, {"normalize": False}, {"spread_windows": True}]
)
def test_halves_are_rounded_once(options):
    """As the same numbers in float32 are, with windows of one token."""
    conv = TaLKConv(8, 2, 99, **options)
    with torch.no_grad():
        conv.offsets.weight.zero_()
        conv.offsets.bias.fill_(-math.inf)
    half, found = copy.deepcopy(conv).half(), []
    x = torch.randn(50, 2, 8).half() * 1e-4  # of a hundredth, float16 has few digits
    for module, rows in ((conv, x.float()), (half, x)):
        out = module(rows.requires_grad_())
        steep = torch.full_like(out, 1000)  # of a hundred times this, float16 has infinity
        found.append([out.half(), torch.autograd.grad(out, rows, steep)[0].half()])
    assert all(map(torch.equal, *found)) and found[0][1].isfinite().all()


def test_autocast():
    conv = TaLKConv(8, 2, 5, 2)
    x = torch.randn(6, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv.predict_offsets(x)[0].dtype == torch.float32
        assert conv(x).dtype == x.dtype


def test_offset_dropout_only_in_training():
    conv = TaLKConv(8, 2, 5, 0, offset_dropout=0.5)
    x = torch.randn(100, 4, 8)
    dropped, _ = conv.predict_offsets(x)
    assert 0.4 < (dropped == 0).float().mean() < 0.6
    kept, _ = conv.eval().predict_offsets(x)
    assert torch.allclose(dropped[dropped > 0], 2 * kept[dropped > 0])


@pytest.mark.parametrize("heads", [1, 2, 4, 7, 16])
def test_spread_offsets_begin_between_nothing_and_the_largest_window(heads):
    causal = TaLKConv(112, heads, 9, spread=True)
    left, none = causal.predict_offsets(torch.zeros(1, 1, 112))
    assert none is None and len(set(left.flatten().tolist())) == heads
    assert 0.017 < left.min() and left.max() < 0.89
    both = TaLKConv(112, heads, 9, 9, spread=True)
    pairs = torch.stack(both.predict_offsets(torch.zeros(1, 1, 112))).reshape(2, heads)
    assert len(set(zip(*pairs.tolist()))) == heads
    assert 0.017 < pairs.min() and pairs.max() < 0.89
    if heads > 1:  # both sides reach from nothing to the largest window
        assert pairs.amax(1).min() > 0.87 and pairs.amin(1).max() < 0.02


def test_slow_offsets_begin_alike_for_all_tokens():
    conv, x = TaLKConv(64, 8, 9, 5, spread=True, slow=True), torch.randn(20, 2, 64)
    for offset, alike in zip(conv.predict_offsets(x), conv.predict_offsets(torch.zeros(1, 1, 64))):
        assert torch.equal(offset, alike.expand_as(offset)) and offset.unique().numel() > 1
    conv(x).square().sum().backward()
    assert conv.offsets.weight.grad.abs().min() > 0  # they learn to differ


def test_weights_of_slow_offsets_count_divided_by_the_root_of_the_channels():
    slow, usual = TaLKConv(64, 8, 9, slow=True), TaLKConv(64, 8, 9)
    slow.load_state_dict(usual.state_dict())
    with torch.no_grad():
        usual.offsets.weight /= 8
    x = torch.randn(20, 2, 64)
    assert torch.allclose(slow(x), usual(x), rtol=0, atol=1e-6)


def test_windows_of_their_own_are_told():
    assert "spread_windows=True" in repr(TaLKConv(8, 4, 15, spread_windows=True))
    assert "spread_windows=False" in repr(TaLKConv(8, 4, 15))


@pytest.mark.parametrize("max_right", [0, 9])
@pytest.mark.parametrize("root_normalize", [False, True])
def test_heads_with_largest_windows_of_their_own(max_right, root_normalize):
    """Each head is the definition with its own window, divided as the options say."""
    H, R, max_left = 4, 2, 31
    options = {"spread": True, "spread_windows": True, "root_normalize": root_normalize}
    conv = TaLKConv(H * R, H, max_left, max_right, **options).double().eval()
    x = torch.randn(40, 2, H * R, dtype=torch.float64)
    offsets = torch.sigmoid(conv.offsets(x)).unflatten(-1, (-1, H))
    left, right = [2, 5, 12, 31], [2, 3, 5, 9] if max_right else [0] * H
    expected = []
    for h in range(H):
        sides = [offsets[:, :, side, h : h + 1] for side in range(offsets.shape[2])]
        length = 1 + sides[0] * left[h] + (sides[1] * right[h] if max_right else 0)
        out = oracle.talk_conv(
            x[..., h * R : (h + 1) * R], sides[0], sides[1] if max_right else None, left[h],
            right[h],
        )  # fmt: skip
        largest = left[h] + right[h] + 1
        expected.append(out * largest / length.sqrt() if root_normalize else out)
    expected = torch.cat(expected, -1).detach()
    assert oracle.worst_error(conv(x), expected) <= oracle.TOLERANCE[torch.float64]


@pytest.mark.parametrize("max_right", [0, 2])
def test_gradients_of_spread_windows_divided_by_their_root(max_right):
    options = {"spread": True, "spread_windows": True, "root_normalize": True}
    conv = TaLKConv(4, 2, 5, max_right, **options).double()
    x = torch.randn(7, 2, 4, dtype=torch.float64, requires_grad=True)
    parameters = dict(conv.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(conv, dict(zip(parameters, values)), x)

    assert torch.autograd.gradcheck(function, (x, *parameters.values()))


def test_independent_tokens_give_windows_of_all_lengths_one_variance():
    options = {"spread": True, "spread_windows": True, "root_normalize": True}
    conv = TaLKConv(64, 8, 63, slow=True, **options)
    heads = conv(torch.randn(2000, 2, 64))[100:].unflatten(-1, (8, 8))
    assert (heads.std((0, 1, 3)) - 1).abs().max() < 0.15


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 2**31 - 1])
def test_no_head_looks_further_than_the_largest_window(largest):
    conv = TaLKConv(8, 4, largest, largest, spread_windows=True).eval()
    assert conv.windows.max() == largest and conv.windows.min() == min(largest, 2)
    assert conv(torch.randn(9, 1, 8)).isfinite().all()


def test_spread_windows_are_exact_in_every_dtype():
    conv = TaLKConv(64, 8, 127, spread_windows=True)
    windows = conv.windows.clone()
    assert windows.tolist() == [[2, 4, 7, 12, 21, 39, 70, 127]]
    assert torch.equal(conv.half().windows, windows) and conv.windows.dtype == torch.int32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(TaLKConv(64, 8, 127, spread_windows=True).windows, windows)
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_head_has_the_largest_window():
    assert TaLKConv(8, 1, 31, spread_windows=True).windows.tolist() == [[31]]


def test_spread_windows_follow_from_the_options_alone():
    """So parameters load with other windows, as without `spread_windows`; steps need no others."""
    conv = TaLKConv(8, 4, 3, spread_windows=True).double()
    conv.load_state_dict(TaLKConv(8, 4, 31, spread_windows=True).state_dict())
    x = torch.randn(40, 1, 8, dtype=torch.float64)
    state, outs = None, []
    for row in x.split(1):
        out, state = conv.step(row, state)
        outs.append(out)
    assert torch.allclose(torch.cat(outs), conv(x), rtol=0, atol=1e-12)


def test_a_root_of_sums_that_are_not_divided_is_refused():
    with pytest.raises(ValueError, match="root_normalize: expected False without normalize"):
        TaLKConv(8, 4, 7, normalize=False, root_normalize=True)


def test_a_short_conv_of_nothing_is_refused():
    with pytest.raises(ValueError, match="short_kernel: expected a whole number from 1"):
        TaLKConvUnit(8, 2, 5, short_kernel=-1)


def test_a_number_of_numpy_is_a_kernel_too():
    assert TaLKConvUnit(8, 2, 5, short_kernel=np.int64(3)).short.weight.shape == (3, 8)


@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("max_right", [0, 4])
@pytest.mark.parametrize("short_kernel", [0, 3])
@pytest.mark.parametrize("root", [False, True])
def test_padding_changes_nothing(glu, max_right, short_kernel, root):
    unit = TaLKConvUnit(
        8, 2, 5, max_right, glu=glu, short_kernel=short_kernel, spread_windows=root,
        root_normalize=root,
    ).eval()  # fmt: skip
    x = torch.randn(9, 1, 8)
    alone, weights = unit(x)
    assert weights is None
    noise = torch.full((3, 1, 8), 1e4)
    right = torch.tensor([[False] * 9 + [True] * 3])
    padded, _ = unit(torch.cat([x, noise]), key_padding_mask=right)
    assert torch.allclose(padded[:9], alone, atol=1e-6)
    padded, _ = unit(torch.cat([noise, x]), key_padding_mask=right.flip(1))
    assert torch.allclose(padded[3:], alone, atol=1e-6)


@pytest.mark.parametrize("chunks", [[1] * 30, [30], [4, 1, 0, 1, 17, 7], [29, 1]], ids=str)
@pytest.mark.parametrize(
    "max_left, short_kernel", [(0, 0), (1, 0), (7, 0), (100, 0), (7, 1), (7, 4), (7, 8)]
)
@pytest.mark.parametrize("root", [False, True])
def test_steps_equal_a_full_pass(max_left, short_kernel, chunks, root):
    unit = TaLKConvUnit(
        8, 2, max_left, short_kernel=short_kernel, spread_windows=root, root_normalize=root
    ).eval()
    x = torch.randn(30, 3, 8)
    expected, _ = unit(x)
    state, outs = {}, []
    for part in x.split(chunks):
        outs.append(unit(part, incremental_state=state)[0])
        (buffer,) = state.values()
        assert len(buffer["state"].rows) == max_left + 3
    assert torch.allclose(torch.cat(outs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("short_kernel", [0, 3])
def test_steps_read_no_padding_inside_a_sequence(short_kernel):
    unit = TaLKConvUnit(8, 2, 6, short_kernel=short_kernel).eval()
    x, padding = torch.randn(12, 2, 8), torch.zeros(2, 12, dtype=torch.bool)
    padding[1, [0, 5, 6]] = True
    expected, _ = unit(x, key_padding_mask=padding)
    state = {}
    for t, row in enumerate(x.split(1)):
        out, _ = unit(row, key_padding_mask=padding[:, t : t + 1], incremental_state=state)
        assert torch.allclose(out[0], expected[t], rtol=0, atol=1e-5)


@pytest.mark.parametrize("short_kernel", [0, 3])
def test_state_follows_a_beam_search(short_kernel):
    unit = TaLKConvUnit(8, 2, 6, short_kernel=short_kernel).eval()
    x = torch.randn(12, 3, 8)
    order = torch.tensor([2, 0, 0, 1])
    state = {}
    unit(x[:7], incremental_state=state)
    unit.reorder_incremental_state(state, order)
    rest, _ = unit(x[7:, order], incremental_state=state)
    expected, _ = unit(x[:, order])
    assert torch.allclose(rest, expected[7:], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_continues_what_the_unit_has_begun(copied):
    unit, state = TaLKConvUnit(8, 2, 5, short_kernel=3).eval(), {}
    x = torch.randn(9, 2, 8)
    expected, _ = unit(x)
    unit(x[:6], incremental_state=state)
    other, state = copied((unit, state))
    out, _ = other(x[6:], incremental_state=state)
    assert torch.allclose(out, expected[6:], atol=1e-6)


@pytest.mark.parametrize("option", ["input_dropout", "offset_dropout"])
def test_dropout_may_be_retained_in_generation(option):
    """As fairseq's dropout modules: everywhere, or in classes that are named."""
    unit = TaLKConvUnit(8, 2, 9, **{option: 0.5}).eval()
    owner = unit if option == "input_dropout" else unit.conv
    x = torch.randn(40, 3, 8)

    def decode():
        state = {}
        return torch.cat([unit(step, incremental_state=state)[0] for step in x.split(1)])

    for modules, drops in (["FairseqDropout"], False), ([type(owner).__name__], True), (None, True):
        for module in (unit, unit.conv):
            module.make_generation_fast_(
                name="", retain_dropout=True, retain_dropout_modules=modules, need_attn=False
            )
        for run in (decode, lambda: unit(x)[0]):
            first, second = run(), run()
            assert torch.equal(first, second) != drops
            assert first.isfinite().all()  # offsets above 1 are within the state's reach
    for module in (unit, unit.conv):
        module.make_generation_fast_(name="")
    assert torch.allclose(decode(), unit(x)[0], atol=1e-6)


def test_projections_begin_by_xavier_without_biases():
    unit = TaLKConvUnit(64, 4, 5, conv_channels=32)
    for linear in (unit.linear1, unit.linear2, unit.conv.offsets):
        bound = (6 / sum(linear.weight.shape)) ** 0.5
        assert not linear.bias.any() and 0.9 * bound < linear.weight.abs().max() <= bound
    assert unit.head_dim == 16  # of its input, which fairseq's layers scale by heads


def test_units_of_one_decoder_keep_their_own_state():
    first, second = TaLKConvUnit(8, 2, 6).eval(), TaLKConvUnit(8, 2, 3).eval()
    x, state = torch.randn(5, 1, 8), {}
    for unit in (first, second):
        unit(x, incremental_state=state)
    assert len(state) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((10, 3, 1), "heads: expected a divisor of channels = 10, got 3"),
        ((10, 0, 1), "heads: expected a whole number from 1 to 2.31 - 1, got 0"),
        ((10, 2.5, 1), "heads: expected a whole number from 1 to 2.31 - 1, got 2.5"),
        ((0, 2, 1), "channels: expected a whole number from 1 to 2.31 - 1, got 0"),
        ((10, 2, -1), "max_left: expected a whole number from 0 to 2.31 - 1, got -1"),
        ((10, 2, "31"), "max_left: expected a whole number from 0 to 2.31 - 1, got '31'"),
        ((10, 2, 2**31), "max_left: expected a whole number from 0 to 2.31 - 1, got 2147483648"),
        ((10, 2, 1, 1.5), "max_right: expected a whole number from 0 to 2.31 - 1, got 1.5"),
        ((10, 2, float("inf")), "max_left: expected a whole number from 0 to 2.31 - 1, got inf"),
        ((10, 2, 1, 1, 1.0), "offset_dropout: expected 0 <= p < 1, got 1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TaLKConv(*arguments)


def test_a_whole_number_that_is_a_float_is_a_window():
    conv = TaLKConv(8, 2, 3.0, spread_windows=True)
    assert conv(torch.randn(5, 1, 8)).shape == (5, 1, 8) and conv.windows.dtype == torch.int32


@pytest.mark.parametrize("shape", [(5, 2, 7), (5, 8), (5, 2, 8, 1)])
def test_an_input_of_another_shape(shape):
    conv, unit = TaLKConv(8, 2, 3), TaLKConvUnit(8, 2, 3)
    message = rf"expected shape \(T, B, 8\), got {re.escape(str(shape))}"
    x = torch.randn(shape)
    for call in (conv, conv.step):
        with pytest.raises(ValueError, match=f"x: {message}"):
            call(x)
    for state in (None, {}):
        with pytest.raises(ValueError, match=f"query: {message}"):
            unit(x, incremental_state=state)


def test_an_attention_mask_is_refused():
    with pytest.raises(ValueError, match=r"attn_mask: expected None, got \(5, 5\)"):
        TaLKConvUnit(8, 2, 3)(torch.randn(5, 1, 8), attn_mask=torch.zeros(5, 5))


@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (1, 2)])
def test_a_mask_of_another_shape_is_refused(shape):
    """It would be broadcast: one step would become five."""
    mask = torch.zeros(shape, dtype=torch.bool)
    message = rf"key_padding_mask: expected shape \(2, 1\).* got {re.escape(str(shape))}"
    for state in (None, {}):
        with pytest.raises(ValueError, match=message):
            TaLKConvUnit(8, 2, 3)(torch.randn(1, 2, 8), None, None, mask, state)


def test_a_mask_of_bytes():
    unit, x = TaLKConvUnit(8, 2, 3, short_kernel=3), torch.randn(5, 2, 8)
    mask = torch.arange(5) >= torch.tensor([[5], [3]])
    assert torch.equal(unit(x, None, None, mask.byte())[0], unit(x, None, None, mask)[0])


def test_a_two_sided_module_cannot_step():
    with pytest.raises(ValueError, match="expected a causal module, got max_right = 2"):
        TaLKConv(8, 2, 3, 2).step(torch.randn(1, 1, 8))


def test_windows_of_heads_are_made_when_parameters_are_assigned():
    made = TaLKConv(8, 4, 31, 7, spread_windows=True)
    with torch.device("meta"):
        empty = TaLKConv(8, 4, 31, 7, spread_windows=True)
    empty.load_state_dict(made.state_dict(), assign=True)
    x = torch.randn(9, 2, 8)
    assert torch.equal(empty(x), made(x))


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="state: expected a TaLKConvState, got tuple"):
        TaLKConv(8, 4, 3).step(torch.randn(1, 2, 8), (None, None))


def test_windows_of_heads_survive_the_meta_device():
    options = dict(heads=4, max_left=5, max_right=3, spread_windows=True)
    made = TaLKConv(12, **options)
    with torch.device("meta"):
        empty = TaLKConv(12, **options)
    empty.to_empty(device="cpu").load_state_dict(made.state_dict())
    assert torch.equal(empty.windows, made.windows)
    x = torch.randn(9, 2, 12)
    assert torch.equal(empty(x), made(x))

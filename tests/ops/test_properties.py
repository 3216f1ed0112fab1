"""What holds for every call of the operator and the unit, tried on calls that hypothesis makes up.

The same cases every time, and none are kept on disk; `--long` tries twenty times as many, and new
ones in each run.
"""

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import oracle
from conftest import LONG
from talk_fairseq import (
    TaLKConvState,
    TaLKConvUnit,
    talk_conv,
    talk_conv_update,
)
from talk_fairseq.ops import cpu_backend

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")
DTYPES = list(oracle.TOLERANCE)
counted = {"cases": 0}


def cases(number, **strategies):
    """Run a test on `number` cases of these strategies, and count them."""

    def decorate(test):
        @functools.wraps(test)
        def count(*args, **kwargs):
            test(*args, **kwargs)
            counted["cases"] += 1

        return settings(
            max_examples=number * (20 if LONG else 1),
            derandomize=not LONG,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],  # the kernels are compiled in the first
        )(given(**strategies)(count))

    return decorate


@pytest.fixture(autouse=True)
def report(request, figure):
    """Shows how many cases were run, once the last test of this file has."""
    yield
    tests = [test for test in request.session.items if test.path == request.path]
    if request.node is tests[-1]:
        figure(f"{counted['cases']:,} cases of {__name__}")


@pytest.fixture(scope="module", params=["cpu", "reference"], autouse=True)
def backend(request):
    """Forces a backend; short sequences are cut in several tasks, as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TALK_CONV_BACKEND", request.param)
        patch.setattr(cpu_backend, "_CHUNK", 9)
        yield request.param


# --- Calls ---


class Call(NamedTuple):
    x: torch.Tensor
    offset_left: torch.Tensor
    offset_right: torch.Tensor | None
    max_left: int
    max_right: int

    def on(self, change):
        """The call with its tensors changed."""
        return Call(*(change(value) if torch.is_tensor(value) else value for value in self))

    def covers(self, begin, end):
        """(T, B, H): which windows lie within the rows `begin` to `end` - 1."""
        time = torch.arange(len(self.x))[:, None, None]
        right = 0 if self.offset_right is None else self.offset_right.double() * self.max_right
        inside = time - self.offset_left.double() * self.max_left >= begin
        return inside & (time + right <= end - 1)


def random_offsets(shape, maximum, generator):
    """Nothing, whole tokens, exact and other fractions, next to nothing, whole, beyond 1."""
    share = torch.rand(shape, dtype=torch.float64, generator=generator)
    tokens = (share * (maximum + 1)).floor()
    kinds = torch.stack(
        [
            0 * share,
            tokens / max(maximum, 1),
            (tokens + 0.5) / max(maximum, 1),
            share,
            1e-6 * share,
            0 * share + 1,
            1 + 2 * share,
        ]
    )
    kind = torch.randint(len(kinds), shape, generator=generator)
    return kinds.gather(0, kind[None])[0]


def laid_out(tensor, layout):
    """The same numbers with other strides, or the last of the batch for all (stride 0)."""
    if layout == "transposed":
        return tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    if layout == "every other":
        return torch.stack([tensor, tensor], dim=-1).flatten(2)[..., ::2]
    if layout == "expanded":
        return tensor[:, -1:].expand(-1, tensor.shape[1], -1)
    return tensor


LAYOUTS = st.sampled_from(["contiguous", "transposed", "every other", "expanded"])


@st.composite
def calls(draw, dtypes=(torch.float32, torch.float64), layouts=LAYOUTS, causal=None):
    T, B = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    H, R = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8]))
    max_left = draw(st.sampled_from([0, 1, 2, 5, 40]))
    causal = draw(st.booleans()) if causal is None else causal
    max_right = 0 if causal else draw(st.sampled_from([0, 1, 3, 50]))
    dtype = draw(st.sampled_from(dtypes))
    offset_dtype = draw(st.sampled_from([dtype, dtype, torch.float32, *dtypes]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def offset(maximum):
        offset = random_offsets((T, B, H), maximum, generator).to(offset_dtype)
        return laid_out(offset, draw(layouts))

    x = torch.randn(T, B, H * R, dtype=torch.float64, generator=generator) + 1
    x = laid_out(x.to(dtype), draw(layouts))
    return Call(x, offset(max_left), None if causal else offset(max_right), max_left, max_right)


def gradients(dout, call):
    """The gradients of x and of the offsets that there are."""
    inputs = [value.detach().requires_grad_() for value in call if torch.is_tensor(value)]
    arguments = [*inputs, None][:3]
    return torch.autograd.grad(talk_conv(*arguments, *call[3:]), inputs, dout)


def dout_like(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)


def close(a, b):
    return oracle.worst_error(a, b.double()) <= 4 * oracle.TOLERANCE[a.dtype]


# --- The operator ---


@cases(200, call=calls(DTYPES))
def test_the_operator_is_its_definition(call):
    oracle.check_forward(talk_conv, *call)
    dout = dout_like(call.x)
    expected = oracle.talk_conv_backward(dout, *call)
    for got, want, given_ in zip(gradients(dout, call), expected, call):
        assert got.dtype == given_.dtype and got.shape == given_.shape
        assert oracle.worst_error(got, want) <= 4 * oracle.TOLERANCE[got.dtype]


FACTORS = st.floats(-3, 3, width=16, allow_subnormal=False)  # with x, not too small for float32


@cases(75, call=calls(), a=FACTORS, b=FACTORS)
def test_it_is_linear_in_x_and_the_gradient_its_transpose(call, a, b):
    other = call._replace(x=dout_like(call.x))
    out, other_out = talk_conv(*call), talk_conv(*other)
    mixed = talk_conv(*call._replace(x=a * call.x + b * other.x))
    scale = abs(a) * out.abs().max() + abs(b) * other_out.abs().max()
    assert (mixed - (a * out + b * other_out)).abs().max() <= 8e-6 * scale
    dout = dout_like(out) + 1
    dx = gradients(dout, call)[0]
    difference = (dout * other_out).double().sum() - (dx * other.x).double().sum()
    assert difference.abs() <= 1e-5 * (dout * other_out).abs().sum().double() + 1e-9


@cases(75, call=calls(), before=st.integers(1, 30), after=st.integers(0, 30))
def test_a_window_does_not_know_when_it_is(call, before, after):
    """Later in a longer sequence, the outputs are the same wherever the window had room."""

    def embedded(tensor):
        ends = [dout_like(tensor[:1].expand(n, -1, -1)).abs() for n in (before, after)]
        return torch.cat([ends[0], tensor, ends[1]])

    T, B, H = call.offset_left.shape
    out, later = talk_conv(*call), talk_conv(*call.on(embedded))[before : before + T]
    inside = call.covers(0, T)[..., None]
    out, later = (torch.where(inside, o.view(T, B, H, -1), 0) for o in (out, later))
    assert close(later, out)


@cases(75, call=calls(), side=st.sampled_from([0, 1]), more=st.floats(0, 2))
def test_a_longer_offset_lowers_no_weight(call, side, more):
    """The weights of a window are its outputs for one-hot rows."""
    T = len(call.x)
    tensors = [o[:, :1, :1] for o in call[1:3] if o is not None]
    one_hot = torch.eye(T, dtype=call.x.dtype).unsqueeze(1)
    weights = []
    for change in (0, more):
        offsets = [o + change * (i == side) for i, o in enumerate(tensors)]
        weights.append(talk_conv(one_hot, *[*offsets, None][:2], *call[3:]))
    assert (weights[1] >= weights[0]).all()
    whole = torch.ones((), dtype=call.x.dtype) / (call.max_left + call.max_right + 1)
    assert (weights[0] >= 0).all() and (weights[1] <= whole * (1 + 1e-6)).all()
    assert torch.allclose(weights[0].diagonal(dim1=0, dim2=2), whole)  # each token counts itself


@cases(100, call=calls(DTYPES), data=st.data())
def test_sentences_do_not_know_each_other(call, data):
    """Permuted, repeated, dropped: each has the same bits, also of its gradients."""
    B = call.x.shape[1]
    order = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=4))
    dout = dout_like(call.x)
    mixed = call.on(lambda tensor: tensor[:, order])
    assert torch.equal(talk_conv(*mixed), talk_conv(*call)[:, order])
    for got, expected in zip(gradients(dout[:, order], mixed), gradients(dout, call)):
        assert torch.equal(got, expected[:, order])


def test_nor_in_long_sequences(backend):
    """Nor how far others reach, with windows that end right where tasks of the CPU begin."""
    T, B, C = 200, 2, 2
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x, dout = torch.randn(2, T, B, C, dtype=torch.float64, generator=generator)
        left, right = torch.rand(2, T, B, 1, dtype=torch.float64, generator=generator)
        left[:, 0] *= 0.3
        right[:, 0], right[::2, 1] = right[:, 0] > 0.25, 2
        call = Call(x, left, right, 5, 3)
        alone = call.on(lambda tensor: tensor[:, :1])
        assert torch.equal(talk_conv(*alone), talk_conv(*call)[:, :1])
        for got, expected in zip(gradients(dout[:, :1], alone), gradients(dout, call)):
            assert torch.equal(got, expected[:, :1])


@cases(75, call=calls(DTYPES), padding=st.integers(1, 20), high=st.floats(0, 3))
def test_zeros_after_the_end_change_nothing(call, padding, high):
    """Nor does what the offsets are there, to the last bit."""

    def padded(tensor):
        value = 0 if tensor is call.x else high
        end = torch.full_like(tensor[:1], value).expand(padding, -1, -1)
        return torch.cat([tensor, end])

    T = len(call.x)
    assert torch.equal(talk_conv(*call.on(padded))[:T], talk_conv(*call))
    assert close(talk_conv(*call.on(lambda t: padded(t).flip(0)))[padding:],
                 talk_conv(*call.on(lambda t: t.flip(0))))  # fmt: skip


@cases(75, call=calls(DTYPES), data=st.data())
def test_the_future_changes_nothing(call, data):
    """Not a bit of an output whose window ends before; in the causal form, of any before."""
    T, B, H = call.offset_left.shape
    now = data.draw(st.integers(0, T - 1))
    value = data.draw(st.sampled_from([0.0, -7.0, 6e4, float("inf"), float("nan")]))
    x, left = call.x.clone(), call.offset_left.clone()
    x[now:], left[now:] = value, 3.0
    out = talk_conv(*call)
    changed = talk_conv(*call._replace(x=x, offset_left=left))
    before = torch.arange(T)[:, None, None] < now
    inside = (before & (call.covers(-torch.inf, now)))[..., None]
    out, changed = (torch.where(inside, o.view(T, B, H, -1), 0) for o in (out, changed))
    assert torch.equal(changed, out)
    if call.offset_right is None:
        assert inside[:now].all()


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@torch.no_grad()
@cases(100, call=calls(DTYPES, causal=True), sizes=SIZES, data=st.data())
def test_steps_are_the_sequence(call, sizes, data):
    """Any number of steps at a time, between which sequences are repeated, dropped and moved."""
    call = call.on(lambda tensor: tensor.repeat(2, 1, 1))
    reach = 3 * call.max_left + 1
    B = call.x.shape[1]
    state = TaLKConvState(B, call.x.shape[2], reach, call.x.dtype)
    history = [call.x[:0], call.offset_left[:0], call.x[:0]]  # of each sequence, and its outputs
    begin = 0
    for size in sizes:
        x, left = (tensor[begin : begin + size] for tensor in call[:2])
        x, left = (tensor[:, [i % B for i in range(state.B)]] for tensor in (x, left))
        out = talk_conv_update(x, left, state, call.max_left)
        history = [torch.cat(parts) for parts in zip(history, (x, left, out))]
        order = data.draw(st.lists(st.integers(0, state.B - 1), min_size=1, max_size=4))
        state.reorder(torch.tensor(order))
        history = [tensor[:, order] for tensor in history]
        begin += size
    x, left, out = history
    expected = talk_conv(x.double(), left, None, call.max_left, 0)
    assert oracle.worst_error(out, expected) <= oracle.TOLERANCE[out.dtype]


# --- The unit ---


@st.composite
def units(draw, causal=None):
    """A unit in evaluation, and an input (T, B, C) for it."""
    heads, R = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4]))
    causal = draw(st.booleans()) if causal is None else causal
    T, B = draw(st.integers(1, 16)), draw(st.integers(1, 3))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    unit = TaLKConvUnit(
        heads * R,
        heads,
        draw(st.sampled_from([0, 1, 6, 30])),
        0 if causal else draw(st.sampled_from([1, 5, 30])),
        glu=draw(st.booleans()),
        normalize=draw(st.booleans()),
    ).eval()
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return unit.to(dtype), torch.randn(T, B, heads * R).to(dtype)


@torch.no_grad()
@cases(75, pair=units())
def test_the_unit_is_its_definition(pair):
    unit, x = pair
    rows = unit.linear1(x)
    rows = torch.nn.functional.glu(rows, dim=-1) if unit.glu else rows
    conv = unit.conv
    out = oracle.talk_conv(rows, *conv.predict_offsets(rows), conv.max_left, conv.max_right)
    out = out if conv.normalize else out * (conv.max_left + conv.max_right + 1)
    got, expected = conv(rows), out
    assert oracle.worst_error(got, expected) <= 2 * oracle.TOLERANCE[x.dtype]
    assert torch.equal(unit(x)[0], unit.linear2(got))


@torch.no_grad()
@cases(75, pair=units(), data=st.data())
def test_the_unit_knows_neither_padding_nor_other_sentences(pair, data):
    unit, x = pair
    T, B, _ = x.shape
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, T), min_size=B, max_size=B)))
    mask = torch.arange(T) >= lengths[:, None]
    out, _ = unit(x, key_padding_mask=mask)
    value = data.draw(st.sampled_from([-30.0, 0.0, 1e4, float("nan")]))
    other, _ = unit(x.masked_fill(mask.t()[..., None], value), key_padding_mask=mask)
    for b, length in enumerate(lengths):
        assert torch.equal(other[:length, b], out[:length, b])
        alone, _ = unit(x[:length, b : b + 1])
        assert close(alone[:, 0], out[:length, b])


@torch.no_grad()
@cases(75, pair=units(causal=True), data=st.data())
def test_a_causal_unit_does_not_see_the_future(pair, data):
    unit, x = pair
    now = data.draw(st.integers(0, len(x) - 1))
    changed = x.clone()
    changed[now:] = data.draw(st.sampled_from([0.0, -30.0, 1e4, float("inf"), float("nan")]))
    assert torch.equal(unit(changed)[0][:now], unit(x)[0][:now])


@torch.no_grad()
@cases(75, pair=units(causal=True), sizes=SIZES, data=st.data())
def test_steps_of_a_unit_are_its_full_pass(pair, sizes, data):
    unit, x = pair
    x = x.repeat(3, 1, 1)
    B = x.shape[1]
    state, rows, history = {}, B, [x[:0], x[:0]]
    begin = 0
    for size in sizes:
        part = x[begin : begin + size, [i % B for i in range(rows)]]
        out, _ = unit(part, incremental_state=state)
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
        unit.reorder_incremental_state(state, torch.tensor(order))
        history = [torch.cat(parts)[:, order] for parts in zip(history, (part, out))]
        rows = len(order)
        begin += size
    x, out = history
    assert close(out, unit(x)[0])

"""talk_conv_update and short_conv_update: step by step as all at once, in constant memory."""

import shutil

import numpy as np
import pytest
import torch
from test_kernels_on_host import Host

import oracle
from talk_fairseq import TaLKConvState, talk_conv, talk_conv_update
from talk_fairseq.ops import cpu_backend, dispatch
from talk_fairseq.ops.short_conv import short_conv_update
from talk_fairseq.ops.state import ShortConvState, reorder_rings

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["reference", "cpu", "kernels on the host", "cuda"])
def backend(request, monkeypatch, poisoned_memory):
    """Forces a backend, and is the device that it runs on."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU")
        return "cuda"
    if request.param == "kernels on the host":
        if shutil.which("g++") is None:
            pytest.skip("no g++ to compile kernels")
        monkeypatch.setattr(dispatch, "cpu_backend", Host())
    name = "reference" if request.param == "reference" else "cpu"  # in whose place the host stands
    monkeypatch.setenv("TALK_CONV_BACKEND", name)
    return "cpu"


def example(T, B, H, R, dtype=torch.float32, high=1.0, offset_dtype=None):
    """x and offsets, some of them exactly 0 and exactly 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, B, H * R, generator=generator) + 1
    offset = high * torch.rand(T, B, H, generator=generator)
    kind = torch.rand(T, B, H, generator=generator)
    offset[kind < 0.1], offset[kind > 0.9] = 0, 1
    return x.to(dtype), offset.to(offset_dtype or dtype)


def decode(x, offset, max_left, sizes=1, reach=None, device="cpu"):
    """The outputs, so many steps at a time, and the state at the end."""
    x, offset = x.to(device), offset.to(device)
    _, B, C = x.shape
    state = TaLKConvState(B, C, max_left if reach is None else reach, x.dtype, device)
    steps = zip(x.split(sizes), offset.split(sizes))
    return torch.cat([talk_conv_update(*step, state, max_left) for step in steps]), state


def check(out, x, offset, max_left):
    expected = oracle.talk_conv(x, offset, None, max_left, 0)
    assert out.dtype == x.dtype and out.shape == x.shape
    error = oracle.worst_error(out, expected)
    assert error <= oracle.TOLERANCE[x.dtype], f"error {error:.3g} in {x.dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [1, 90, [4, 1, 1, 17, 67], [89, 1]], ids=str)
@pytest.mark.parametrize("max_left", [0, 1, 7, 100])
def test_equals_a_full_pass(backend, max_left, sizes, dtype):
    x, offset = example(90, 2, 3, 4, dtype)
    out, _ = decode(x, offset, max_left, sizes, device=backend)
    check(out, x, offset, max_left)


@pytest.mark.parametrize("R", [1, 3, 8, 150])  # the last in several blocks on CUDA
def test_channels_of_a_head(backend, R):
    x, offset = example(30, 2, 3, R)
    check(decode(x, offset, 5, device=backend)[0], x, offset, 5)


@pytest.mark.parametrize("offset_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_offsets_of_another_dtype(backend, dtype, offset_dtype):
    x, offset = example(30, 2, 3, 4, dtype, offset_dtype=offset_dtype)
    check(decode(x, offset, 5, device=backend)[0], x, offset, 5)


def test_offsets_above_1_within_the_reach(backend):
    x, offset = example(60, 2, 3, 4, high=2.5)
    check(decode(x, offset, 6, reach=15, device=backend)[0], x, offset, 6)


@pytest.mark.parametrize("sizes", [1, 8])
@pytest.mark.parametrize(
    "value, max_left",
    # The row that 7.5 tokens cut is one that this step has overwritten.
    [(-0.5, 6), (float("nan"), 6), (3.0, 6), (7.5 / 6, 6), (-0.5, 0), (float("nan"), 0)],
)
def test_offsets_that_cannot_be_give_nan(backend, value, max_left, sizes):
    x, offset = example(40, 2, 3, 4)
    offset[25, 1, 2] = value
    out, _ = decode(x, offset, max_left, sizes, device=backend)
    bad = torch.zeros(40, 2, 3, dtype=bool)
    bad[25, 1, 2] = True
    assert torch.equal(out.isnan().cpu().view(40, 2, 3, 4), bad.unsqueeze(-1).expand(-1, -1, -1, 4))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_left", [0, 2, 9])
def test_follows_a_beam_search(backend, max_left, size):
    """Sequences are repeated, dropped, swapped, and more of them than ever before."""
    generator = torch.Generator().manual_seed(1)
    x, offset = example(60, 9, 2, 4)
    state = TaLKConvState(4, 8, max_left, device=backend)
    past = torch.empty(4, 0, dtype=int)  # which column of x each sequence had at each step
    for step in range(0, 60, size):
        B = state.B
        columns = torch.randint(9, (B,), generator=generator)
        steps = torch.arange(step, step + size)[:, None]
        past = torch.cat([past, columns[:, None].expand(-1, size)], dim=1)
        out = talk_conv_update(
            x[steps, columns].to(backend), offset[steps, columns].to(backend), state, max_left
        )
        time = torch.arange(step + size)[:, None]
        check_inputs = x[time, past.t()], offset[time, past.t()]
        expected = oracle.talk_conv(*check_inputs, None, max_left, 0)[-size:]
        assert oracle.worst_error(out, expected) <= oracle.TOLERANCE[torch.float32]
        order = torch.randint(B, ([4, 2, 4, 6][step // size % 4],), generator=generator)
        state.reorder(order)
        past = past[order]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [1, 40, [4, 0, 1, 17, 18]], ids=str)
@pytest.mark.parametrize("K, C", [(1, 8), (2, 7), (8, 12), (11, 600)])
def test_short_convolutions_equal_a_full_pass(backend, K, C, sizes, dtype):
    x, weight = torch.randn(40, 2, C, dtype=dtype), torch.randn(K, C, dtype=dtype)
    state = ShortConvState(2, C, K, dtype, backend)
    steps, weights = x.to(backend).split(sizes), weight.to(backend)
    out = torch.cat([short_conv_update(step, weights, state) for step in steps])
    expected = oracle.short_conv(x, weight, x, K - 1)[0]
    assert out.dtype == dtype and oracle.worst_error(out, expected) <= oracle.TOLERANCE[dtype]
    assert state.rows.shape == (K, 2, C) and state.steps < 2 * K


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("K", [1, 2, 8])
def test_short_convolutions_follow_a_beam_search(backend, K, size):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(60, 9, 8, generator=generator), torch.randn(K, 8, generator=generator)
    state = ShortConvState(4, 8, K, device=backend)
    past = torch.empty(4, 0, dtype=int)  # as above
    for step in range(0, 60, size):
        columns = torch.randint(9, (state.B,), generator=generator)
        steps = torch.arange(step, step + size)[:, None]
        past = torch.cat([past, columns[:, None].expand(-1, size)], dim=1)
        out = short_conv_update(x[steps, columns].to(backend), weight.to(backend), state)
        seen = x[torch.arange(step + size)[:, None], past.t()]
        expected = oracle.short_conv(seen, weight, seen, K - 1)[0][-size:]
        assert oracle.worst_error(out, expected) <= oracle.TOLERANCE[torch.float32]
        order = torch.randint(state.B, ([4, 2, 4, 6][step // size % 4],), generator=generator)
        state.reorder(order)
        past = past[order]


@torch.no_grad()
def test_sequences_that_other_blocks_keep(backend):
    """Of a beam search whose rows are of many blocks of a GPU."""
    B, C, K, max_left = 8, 1024, 8, 9
    generator = torch.Generator().manual_seed(1)
    x, offset = example(24, B, 4, C // 4)
    weight = torch.randn(K, C, generator=generator)
    states = TaLKConvState(B, C, max_left, device=backend), ShortConvState(B, C, K, device=backend)
    past = torch.arange(B)[:, None].expand(-1, 0)
    for step in range(24):
        row, windows = x[step : step + 1].to(backend), offset[step : step + 1].to(backend)
        outs = (
            talk_conv_update(row, windows, states[0], max_left),
            short_conv_update(row, weight.to(backend), states[1]),
        )
        past = torch.cat([past, torch.arange(B)[:, None]], dim=1)
        seen = torch.arange(step + 1)[:, None], past.t()
        expected = (
            oracle.talk_conv(x[seen], offset[seen], None, max_left, 0)[-1:],
            oracle.short_conv(x[seen], weight, x[seen], K - 1)[0][-1:],
        )
        for out, right in zip(outs, expected):
            assert oracle.worst_error(out, right) <= oracle.TOLERANCE[torch.float32]
        order = torch.randint(B, (B,), generator=generator)
        reorder_rings(states, order)
        past = past[order]


def test_states_of_two_devices_are_reordered_on_their_own():
    states = [ShortConvState(2, 4, 3, device=device) for device in ("cpu", "meta", "cpu")]
    reorder_rings(states, torch.tensor([1, 0]))
    assert [state.origin.device.type for state in states] == ["cpu", "meta", "cpu"]


@pytest.mark.parametrize("K", [0, 2.5])
def test_a_state_has_a_whole_number_of_taps(K):
    with pytest.raises(ValueError, match=f"K: expected a whole number from 1 to .*, got {K}"):
        ShortConvState(2, 4, K)


def test_offsets_that_are_wider_than_x_are_not_rounded():
    """In float32 this one would be a token beyond the state's reach, and its outputs NaN."""
    x = torch.arange(1.0, 9.0)[:, None, None]
    offset = torch.full((8, 1, 1), (5 - 1e-9) / 4, dtype=torch.float64)
    state = TaLKConvState(1, 1, reach=4)
    outs = torch.cat([talk_conv_update(x[t : t + 1], offset[:1], state, 4) for t in range(8)])
    assert oracle.worst_error(outs, oracle.talk_conv(x, offset, None, 4, 0)) <= 1e-6


def test_integers_of_numpy_do_not_overflow(backend):
    x, offset = example(3, 2, 2, 4)
    states = [TaLKConvState(2, 8, 127, device=backend) for _ in range(2)]
    x, offset = x.to(backend), offset.to(backend)
    ours, theirs = (
        talk_conv_update(x, offset, state, max_left)
        for state, max_left in zip(states, (127, np.int8(127)))
    )
    assert torch.equal(ours, theirs)


def test_a_beam_search_copies_no_rows():
    x, offset = example(50, 4, 2, 4)
    state, short = TaLKConvState(4, 8, 5), ShortConvState(4, 8, 3)
    rows, short_rows = state.rows.data_ptr(), short.rows.data_ptr()
    for step in zip(x.split(1), offset.split(1)):
        talk_conv_update(*step, state, 5)
        short_conv_update(step[0], torch.randn(3, 8), short)
        for one in (state, short):
            one.reorder(torch.tensor([1, 0, 3, 3]))
    assert state.rows.data_ptr() == rows and state.rows.shape == (8, 4, 8)
    assert state.origin.shape == (8, 4) and state.steps < 16
    assert short.rows.data_ptr() == short_rows and short.origin.shape == (3, 4)


def test_reordering_states_together():
    """As one by one, in one copy of their columns' numbers; rows are copied for want of columns."""

    def states():
        generator = torch.Generator().manual_seed(1)
        for state in TaLKConvState(4, 8, 5), ShortConvState(4, 8, 3), TaLKConvState(4, 6, 0):
            state.rows = torch.randn(state.rows.shape, generator=generator)
            yield state

    one_by_one, together = list(states()), list(states())
    together[1].reorder(torch.tensor([2, 0, 0, 3]))  # others have their own columns
    one_by_one[1].reorder(torch.tensor([2, 0, 0, 3]))
    for order, copies in ([1, 0, 3, 3], 1), ([0, 2, 2], 1), ([2, 2, 1, 0, 0], 4), ([0, 0], 1):
        for state in one_by_one:
            state.reorder(order)
        with torch.profiler.profile() as profiler:
            reorder_rings(together, order)
        calls = [event.name for event in profiler.events()]
        assert calls.count("aten::index_select") + calls.count("aten::gather") == copies
        for a, b in zip(one_by_one, together):
            assert a.B == b.B == len(order) and torch.equal(a.rows, b.rows)
            assert a.origin is b.origin is None or torch.equal(a.origin, b.origin)
    reorder_rings([], torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_long_reach_costs_no_digits(backend, dtype):
    """Sums over all of the ring, of which short windows are small differences."""
    x, offset = example(2500, 1, 2, 4, dtype, offset_dtype=torch.float64)
    out, _ = decode(x, offset, 4, [2400] + [1] * 100, reach=1000, device=backend)
    check(out, x, offset, 4)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_does_not_drift(dtype):
    """After 20,000 steps the error is what it was after 20, and the state is no larger."""
    max_left = 7
    x, offset = example(20_000, 1, 2, 4, dtype, offset_dtype=torch.float32)
    out, state = decode(x, offset, max_left)

    def error(steps):
        begin = steps.start - 2 * max_left
        near = slice(max(begin, 0), steps.stop)
        expected = oracle.talk_conv(x[near], offset[near], None, max_left, 0)
        return oracle.rms_error(out[steps], expected[len(expected) - len(out[steps]) :])

    early, late = error(slice(20, 220)), error(slice(19_800, 20_000))
    assert late <= 1.2 * early and late <= oracle.TOLERANCE[dtype]
    assert state.rows.shape[0] == max_left + 3 and state.rows.abs().max() < 40


def test_infinities_are_forgotten(backend):
    """A value that is not finite spreads over its turn of the ring and the next, no further."""
    x, offset = example(60, 1, 1, 2)
    x[7] = float("inf")
    out, state = decode(x, offset, 5, device=backend)
    assert out[7 + 2 * state.rows.shape[0] :].isfinite().all()


@pytest.mark.parametrize("threads", [2, 7])
def test_steps_are_shared_among_threads(monkeypatch, poisoned_memory, threads):
    monkeypatch.setattr(cpu_backend, "_SERIAL_STEPS", 0)
    x, offset = example(40, 5, 2, 4)
    weight, short = torch.randn(3, 8), ShortConvState(5, 8, 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out, _ = decode(x, offset, 6, [4] + [1] * 36)
        convolved = torch.cat([short_conv_update(step, weight, short) for step in x.split(1)])
    finally:
        torch.set_num_threads(before)
    check(out, x, offset, 6)
    expected = oracle.short_conv(x, weight, x, 2)[0]
    assert oracle.worst_error(convolved, expected) <= oracle.TOLERANCE[torch.float32]


def test_gradients_reach_earlier_steps_alone():
    x, offset = (tensor.double() for tensor in example(12, 2, 2, 3))
    first, rest = x[:7].clone().requires_grad_(), x[7:]
    state = TaLKConvState(2, 6, 5, torch.float64)
    talk_conv_update(first, offset[:7], state, 5)
    out = talk_conv_update(rest, offset[7:], state, 5)
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, first, dout)
    full = talk_conv(torch.cat([first, rest]), offset, None, 5, 0)[7:]
    (expected,) = torch.autograd.grad(full, first, dout)
    assert torch.allclose(got, expected)


def test_steps_without_gradients_between_steps_with_them():
    """They overwrite nothing that a gradient of the steps before needs."""
    x, offset = (tensor.double() for tensor in example(4, 2, 2, 3))
    x, weight = x.requires_grad_(), torch.randn(2, 6, dtype=torch.float64)
    state, short = TaLKConvState(2, 6, 1, torch.float64), ShortConvState(2, 6, 2, torch.float64)
    outs, convolved = [], []
    for t, step in enumerate(x.split(1)):
        with torch.set_grad_enabled(t != 2):
            outs.append(talk_conv_update(step, offset[t : t + 1], state, 1))
            convolved.append(short_conv_update(step, weight, short))
    for out in (outs[3], convolved[3]):
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not gradient[:3].any() and gradient[3].all()


@pytest.mark.parametrize("S", [1, 4])
def test_gradients_where_they_are_needed(S):
    x, offset = (tensor.double().requires_grad_() for tensor in example(12, 2, 2, 3))
    dout = torch.randn(12, 2, 6, dtype=torch.float64)
    out, _ = decode(x, offset, 5, S)
    got = torch.autograd.grad(out, (x, offset), dout)
    expected = torch.autograd.grad(talk_conv(x, offset, None, 5, 0), (x, offset), dout)
    assert all(torch.allclose(*pair) for pair in zip(got, expected))


def test_compiled():
    compiled = torch.compile(talk_conv_update, backend="eager")
    x, offset = example(3, 2, 2, 3)
    state = TaLKConvState(2, 6, 5)
    steps = zip(x.split(1), offset.split(1))
    out = torch.cat([compiled(*step, state, 5) for step in steps])
    check(out, x, offset, 5)


def test_compiled_steps_are_compiled_anew():
    """PyTorch takes the number of steps in the state for a constant; 2.6 compiles no state."""
    torch.compiler.reset()
    compiled = torch.compile(talk_conv_update, backend="eager", fullgraph=True)
    x, offset = example(20, 2, 2, 3)
    state = TaLKConvState(2, 6, 30)
    errors = torch._dynamo.exc.FailOnRecompileLimitHit, torch._dynamo.exc.Unsupported
    with pytest.raises(errors[torch.__version__.startswith("2.6.")]):
        for step in zip(x.split(1), offset.split(1)):
            compiled(*step, state, 5)


def test_nothing_to_do(backend):
    """No steps, or no sequences; also where gradients are needed."""
    state = TaLKConvState(2, 8, 5, device=backend)
    for needed in (False, True):
        empty = torch.empty(0, 2, 8, device=backend, requires_grad=needed)
        assert talk_conv_update(empty, empty[..., :2], state, 5).shape == (0, 2, 8)
        none = torch.empty(3, 0, 8, device=backend, requires_grad=needed)
        of_none = TaLKConvState(0, 8, 5, device=backend)
        assert talk_conv_update(none, none[..., :2], of_none, 5).shape == (3, 0, 8)
    x, offset = example(20, 2, 2, 4)
    assert state.steps == 0
    check(decode(x, offset, 5, device=backend)[0], x, offset, 5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 8, 5), "state: expected B, C = 2, 8 to match x, got 3, 8"),
        ((2, 4, 5), "state: expected B, C = 2, 8 to match x, got 2, 4"),
        ((2, 8, 5, torch.float16), "state: expected rows in .* for torch.float32, got"),
        ((2, 8, 5, torch.float32, "meta"), "state: expected device cpu to match x, got meta"),
    ],
)
def test_states_that_do_not_fit(arguments, message):
    x, offset = example(1, 2, 2, 4)
    with pytest.raises(ValueError, match=message):
        talk_conv_update(x, offset, TaLKConvState(*arguments), 5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, 8, 3), "state: expected B, C = 2, 8 to match x, got 3, 8"),
        ((2, 4, 3), "state: expected B, C = 2, 8 to match x, got 2, 4"),
        ((2, 8, 5), "state: expected one for 3 taps to match weight, got 5"),
        ((2, 8, 3, torch.float64), "state: expected rows in .* for torch.float32, got"),
        ((2, 8, 3, torch.float32, "meta"), "state: expected device cpu to match x, got meta"),
    ],
)
def test_states_of_short_convolutions_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        short_conv_update(torch.randn(1, 2, 8), torch.randn(3, 8), ShortConvState(*arguments))


def test_bad_arguments():
    x, offset = example(1, 2, 2, 4)
    with pytest.raises(ValueError, match="offset_left: expected a number of heads that divides"):
        talk_conv_update(x, torch.rand(1, 2, 3), TaLKConvState(2, 8, 5), 5)
    for reach in (-1, 3.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"reach: expected a whole number .*, got {reach}"):
            TaLKConvState(2, 8, reach)
    with pytest.raises(TypeError, match="state: expected a TaLKConvState, got NoneType"):
        talk_conv_update(x, offset, None, 5)
    with pytest.raises(TypeError, match="state: expected a ShortConvState, got TaLKConvState"):
        short_conv_update(x, torch.rand(3, 8), TaLKConvState(2, 8, 0, torch.float32))


@pytest.mark.parametrize("order", [[0, 2], [-1, 0]])
@pytest.mark.parametrize("later", [False, True])
def test_orders_of_sequences_that_are_not_there(order, later):
    state = TaLKConvState(2, 8, 5)
    if later:
        state.reorder(torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match="index out of range|out of DATA bounds"):
        state.reorder(torch.tensor(order))
    assert state.B == 2


def test_leaves_that_require_gradients_under_no_grad():
    x, offset = (tensor.requires_grad_() for tensor in example(20, 2, 2, 4))
    with torch.no_grad():
        out, _ = decode(x, offset, 5)
    check(out, x, offset, 5)
    assert not out.requires_grad

"""talk_conv as its users meet it, every backend against the float64 oracle."""

import concurrent.futures
import functools
import math
import multiprocessing

import numpy as np
import pytest
import torch

import oracle
from talk_fairseq import talk_conv, talk_conv_reference
from talk_fairseq.ops import cpu_backend

BACKENDS = ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = list(oracle.TOLERANCE)
SHAPES = [  # T, B, C, H
    (1, 1, 1, 1),
    (2, 1, 4, 2),
    (3, 5, 6, 6),
    (17, 3, 12, 3),
    (65, 2, 64, 4),
    (129, 1, 96, 2),
    (151, 2, 40, 5),
    (70, 1, 500, 5),  # more channels than a task of the CPU backend takes
    (5, 1, 300, 1),  # and so does one head
]
WINDOWS = [(0, 0), (1, 1), (7, 0), (3, 9), (31, 31), (400, 200)]  # the last beyond every T


def arguments(T, B, C, H, max_left, max_right, dtype=torch.float32, offset_dtype=None, seed=0):
    """x with a mean, and offsets up to 1.5 with the exact values 0 and 1 among them."""
    generator = torch.Generator().manual_seed(seed)

    def offset():
        value = torch.rand(T, B, H, dtype=torch.float64, generator=generator) * 1.5
        value = torch.where(value < 0.1, 0.0, torch.where(value > 1.4, 1.0, value))
        return value.to(offset_dtype or dtype)

    x = torch.randn(T, B, C, dtype=torch.float64, generator=generator) + 1
    return x.to(dtype), offset(), offset() if max_right else None, max_left, max_right


def gradients(function, dout, x, offset_left, offset_right, max_left, max_right):
    inputs = [t.detach().requires_grad_() for t in (x, offset_left, offset_right) if t is not None]
    right = inputs[2] if len(inputs) == 3 else None
    out = function(inputs[0], inputs[1], right, max_left, max_right)
    return (*torch.autograd.grad(out, inputs, dout), None)[:3]


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("TALK_CONV_BACKEND", request.param)
    return request.param


@pytest.fixture
def on(backend):
    """Move tensors to the backend's device."""
    device = "cuda" if backend == "cuda" else "cpu"
    return lambda *values: tuple(v.to(device) if torch.is_tensor(v) else v for v in values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_oracle(on, poisoned_memory, shape, dtype):
    for window in WINDOWS:
        args = on(*arguments(*shape, *window, dtype))
        oracle.check_forward(talk_conv, *args)
        oracle.check_backward(
            functools.partial(gradients, talk_conv), torch.randn_like(args[0]), *args
        )


@pytest.mark.parametrize("threads", [2, 7])
def test_cpu_cuts_time_among_threads(monkeypatch, poisoned_memory, threads):
    monkeypatch.setattr(cpu_backend, "_SERIAL", 1)
    monkeypatch.setattr(cpu_backend, "_CHUNK", 10)
    torch.set_num_threads(threads)
    for shape in SHAPES:
        for window in WINDOWS:
            args = arguments(*shape, *window)
            oracle.check_forward(talk_conv, *args)
            backward = functools.partial(gradients, talk_conv)
            oracle.check_backward(backward, torch.randn_like(args[0]), *args)


@pytest.mark.parametrize(
    "dtype, offset_dtype",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_mixed_dtypes(on, dtype, offset_dtype):
    args = on(*arguments(65, 2, 24, 3, 9, 5, dtype, offset_dtype))
    oracle.check_forward(talk_conv, *args)
    dx, d_left, d_right = gradients(talk_conv, torch.ones_like(args[0]), *args)
    assert dx.dtype == dtype and d_left.dtype == d_right.dtype == offset_dtype


@pytest.mark.parametrize("which", [1, 2])
def test_kernels_take_offsets_of_one_dtype(monkeypatch, which):
    args, taken = list(arguments(9, 2, 8, 2, 4, 3)), []
    args[which] = args[which].double()

    def forward(*inputs):
        taken.extend(tensor.dtype for tensor in inputs[:3])
        return torch.zeros_like(inputs[0])

    monkeypatch.setattr(cpu_backend, "forward", forward)
    assert talk_conv(*args).dtype == torch.float32 and taken == [torch.float64] * 3


def test_a_table_by_hand(on):
    x, one = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(4, 1, 1), torch.ones(4, 1, 1)
    for offset_left, offset_right, window, sums in [
        (one, one, (1, 1), [3, 7, 14, 12]),
        (one / 2, None, (1, 0), [1, 2.5, 5, 10]),  # half of the token before
        (one, None, (9, 0), [1, 3, 7, 15]),
        (0 * one, one / 4, (2, 2), [2, 4, 8, 8]),  # half of the token after
    ]:
        out = talk_conv(*on(x, offset_left, offset_right, *window))
        assert out.flatten().tolist() == pytest.approx([s / (sum(window) + 1) for s in sums])


@pytest.mark.parametrize("T", [1, 100, 100_000])
def test_error_does_not_grow_with_length(on, T):
    args = on(*arguments(T, 1, 2, 1, 31, 31))
    assert oracle.rms_error(talk_conv(*args), oracle.talk_conv(*args)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 100, 100_000])
def test_halves_are_rounded_once(on, T, dtype):
    """Within half a unit in the last place of the exact sum (and float32's error) everywhere."""
    x, left, right, *windows = arguments(T, 1, 2, 1, 31, 31)
    args = on((x.abs() + 0.5).to(dtype), left, right, *windows)
    exact = oracle.talk_conv(*args)
    ulp = torch.finfo(dtype).eps * torch.exp2(exact.log2().floor())
    assert ((talk_conv(*args).cpu().double() - exact).abs() / ulp).max() < 0.501


@pytest.mark.parametrize("T", [100, 20_000])
def test_gradient_error_does_not_grow_with_length(on, T):
    args = on(*arguments(T, 1, 4, 2, 31, 31))
    (dout,) = on(torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1)) + 1)
    got = gradients(talk_conv, dout, *args)
    for gradient, expected in zip(got, oracle.talk_conv_backward(dout, *args)):
        assert oracle.rms_error(gradient, expected) < 2e-6


def test_huge_window(on):
    """At 2^24 tokens float32 positions have no fraction left; ours keep it."""
    x, left, right, *_ = arguments(50, 1, 4, 2, 1, 1)
    args = on(x, left * 1e-6, right * 1e-6, 20_000_000, 20_000_000)
    oracle.check_forward(talk_conv, *args)


@pytest.mark.parametrize("shape", [(0, 2, 4, 2), (3, 0, 4, 2), (3, 2, 0, 2)], ids=str)
def test_empty(on, poisoned_memory, shape):
    args = on(*arguments(*shape, 3, 2))
    out = talk_conv(*args)
    assert out.shape == args[0].shape
    dx, d_left, d_right = gradients(talk_conv, torch.ones_like(out), *args)
    assert dx.shape == args[0].shape
    assert not d_left.any() and not d_right.any()


def test_strided_inputs(on):
    x, left, right, *window = on(*arguments(33, 4, 24, 3, 7, 4))
    expected = talk_conv(x, left, right, *window)
    strided = (
        x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        torch.stack([left, left], dim=-1)[..., 0],
        torch.cat([right, right], dim=2)[..., :3],
    )
    assert not any(t.is_contiguous() for t in strided)
    assert torch.equal(talk_conv(*strided, *window), expected)
    want = gradients(talk_conv, torch.ones_like(x), x, left, right, *window)
    got = gradients(talk_conv, torch.ones(1, 1, 1).to(x).expand_as(x), *strided, *window)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_gradcheck_away_from_kinks(on):
    generator = torch.Generator().manual_seed(3)

    def offset(maximum):  # whole tokens and a fraction of 0.2 to 0.8
        whole = torch.randint(maximum, (9, 2, 2), generator=generator)
        return (whole + 0.2 + 0.6 * torch.rand(9, 2, 2, generator=generator)).double() / maximum

    inputs = on(
        torch.randn(9, 2, 4, dtype=torch.float64, generator=generator), offset(4), offset(3)
    )
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: talk_conv(*t, 4, 3), inputs)
    assert torch.autograd.gradcheck(lambda x, left: talk_conv(x, left, None, 4, 0), inputs[:2])


def test_reference_is_twice_differentiable():
    x, left, right, *window = arguments(6, 1, 4, 2, 3, 2, torch.float64)
    inputs = [t.requires_grad_() for t in (x, left * 0.61 + 0.03, right * 0.61 + 0.03)]
    inputs = [t.detach().requires_grad_() for t in inputs]
    assert torch.autograd.gradgradcheck(lambda *t: talk_conv_reference(*t, *window), inputs)


def test_negative_and_nan_offsets_give_nan(on):
    x, left, right, *window = arguments(20, 1, 4, 2, 5, 3)
    left[4, 0, 0], right[9, 0, 1] = -0.1, math.nan
    out = talk_conv(*on(x, left, right, *window)).cpu()
    bad = out.isnan().nonzero().tolist()
    assert bad == [[4, 0, 0], [4, 0, 1], [9, 0, 2], [9, 0, 3]]
    dx, *d_offsets = gradients(talk_conv, *on(torch.ones_like(x), x, left, right, *window))
    assert dx[3:5, 0, :2].isnan().any() and dx[9:11, 0, 2:].isnan().any()
    found = [d.cpu().isnan().nonzero().tolist() for d in d_offsets]
    assert found == [[[4, 0, 0]], [[9, 0, 1]]]


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_offsets_of_no_window_may_not_be_negative_either(on, value):
    x, left, right, *_ = arguments(20, 1, 4, 2, 5, 3)
    left[4, 0, 0], right[9, 0, 1], left[6] = value, value, -0.0
    out = talk_conv(*on(x, left, right, 0, 0)).cpu()
    assert out.isnan().nonzero().tolist() == [[4, 0, 0], [4, 0, 1], [9, 0, 2], [9, 0, 3]]


@pytest.mark.parametrize("value", [-2.0, math.nan])
def test_offsets_that_are_all_wrong(on, value):
    x, left, right, *window = on(*arguments(9, 1, 4, 2, 5, 3))
    left, right = torch.full_like(left, value), torch.full_like(right, value)
    assert talk_conv(x, left, right, *window).isnan().all()
    got = gradients(talk_conv, torch.ones_like(x), x, left, right, *window)
    assert all(gradient.isnan().all() for gradient in got)


def test_infinite_offsets_reach_the_edges(on):
    x = torch.arange(5.0).reshape(5, 1, 1)
    far = torch.full((5, 1, 1), math.inf)
    out = talk_conv(*on(x, far, far, 2, 2))
    assert out.flatten().tolist() == pytest.approx([2.0] * 5)


def test_same_bits_every_time_and_whatever_the_batch(backend, on):
    args = on(*arguments(120, 3, 96, 4, 31, 15))  # enough for two threads
    dout = torch.randn_like(args[0]) + 1
    first = (talk_conv(*args), *gradients(talk_conv, dout, *args))
    for _ in range(5 if backend == "reference" else 100):
        again = (talk_conv(*args), *gradients(talk_conv, dout, *args))
        assert all(torch.equal(a, b) for a, b in zip(again, first))
    alone = [a[:, 1:2] if torch.is_tensor(a) else a for a in args]
    got = (talk_conv(*alone), *gradients(talk_conv, dout[:, 1:2], *alone))
    assert all(torch.equal(a, b[:, 1:2]) for a, b in zip(got, first))


def test_causal_form_does_not_see_the_future(on):
    x, left, _, *_ = on(*arguments(40, 2, 8, 2, 9, 0))
    out = talk_conv(x, left, None, 9, 0)
    changed = x.clone()
    changed[25:] += 100
    assert torch.allclose(talk_conv(changed, left, None, 9, 0)[:25], out[:25], rtol=0, atol=1e-6)


# --- As a PyTorch operator ---


@pytest.mark.parametrize("max_right", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype, max_right):
    x, left, right, *window = arguments(9, 2, 8, 2, 4, max_right, dtype)
    inputs = [t if t is None else t.requires_grad_() for t in (x, left, right)]
    torch.library.opcheck(torch.ops.talk_conv.forward.default, (*inputs, *window))
    dout = torch.randn_like(x)
    inputs = [t if t is None else t.detach() for t in inputs]
    torch.library.opcheck(torch.ops.talk_conv.backward.default, (dout, *inputs, *window))


def test_autocast():
    linear = torch.nn.Linear(8, 8)
    _, left, right, *window = arguments(12, 2, 8, 2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        x = linear(torch.randn(12, 2, 8))
        out = talk_conv(x, left, right, *window)
    assert out.dtype == x.dtype == torch.bfloat16
    oracle.check_forward(talk_conv, x.detach(), left, right, *window)
    out.float().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_compile_fullgraph():
    x, left, right, *window = arguments(12, 2, 8, 2, 4, 3)

    def step(x, left, right):
        return (talk_conv(x * 2, left, right, *window) ** 2).sum()

    inputs = [t.requires_grad_() for t in (x, left, right)]
    expected = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    assert all(torch.allclose(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("max_right", [0, 3])
def test_compile_with_sizes_that_change(max_right):
    def step(x, left, right, max_left, max_right):
        return talk_conv(x.sin(), left, right, max_left, max_right).cos()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for T, max_left in ((12, 4), (15, 6), (9, 5)):
        x, left, right, *window = arguments(T, 2, 8, 2, max_left, max_right)
        inputs = [t.requires_grad_() for t in (x, left, right) if t is not None]
        results = []
        for function in (step, compiled):
            out = function(x, left, right, *window)
            results.append((out, *torch.autograd.grad(out.sum(), inputs)))
        assert all(torch.allclose(a, b) for a, b in zip(*results))


def test_compile_in_autocast():
    linear = torch.nn.Linear(8, 8)
    _, left, right, *window = arguments(12, 2, 8, 2, 4, 3)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return talk_conv(linear(x), left, right, *window)

    x = torch.randn(12, 2, 8)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, step(x))
    out.float().sum().backward()
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("max_right", [0, 3])
def test_fake_tensors(max_right):
    x, left, right, *window = arguments(12, 2, 8, 2, 4, max_right, torch.bfloat16, torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch._subclasses.FakeTensorMode() as mode:
        inputs = [t if t is None else mode.from_tensor(t) for t in (strided, left, right)]
        inputs = [t if t is None else t.requires_grad_() for t in inputs]
        out = talk_conv(*inputs, *window)
        assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
        out.float().sum().backward()
    assert all(t is None or t.grad.shape == t.shape for t in inputs)


def test_a_backend_that_has_no_second_derivatives_says_so(on, backend):
    if backend == "reference":
        pytest.skip("which has them")
    x, left, right, *window = on(*arguments(6, 1, 4, 2, 3, 2))
    x.requires_grad_()
    dout = torch.ones_like(x).requires_grad_()
    (dx,) = torch.autograd.grad(talk_conv(x, left, right, *window), x, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="talk_conv_reference has second derivatives"):
        dx.sum().backward()


def test_vmap():
    x, left, right, *window = arguments(12, 2, 8, 2, 4, 3)
    many = torch.stack([x, 2 * x])
    out = torch.vmap(lambda x: talk_conv(x, left, right, *window))(many)
    assert all(torch.equal(o, talk_conv(x, left, right, *window)) for o, x in zip(out, many))


def test_autograd_keeps_x_and_the_offsets_only():
    x, left, right, *window = arguments(12, 2, 8, 2, 4, 3)
    inputs = [t.requires_grad_() for t in (x, left, right)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        talk_conv(*inputs, *window)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}


def test_activation_checkpointing():
    x, left, right, *window = arguments(12, 2, 8, 2, 4, 3)
    inputs = [t.requires_grad_() for t in (x, left, right)]
    expected = torch.autograd.grad(talk_conv(*inputs, *window).sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(talk_conv, *inputs, *window, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), inputs), expected))


def test_concurrent_calls():
    args = arguments(400, 4, 64, 4, 31, 31)
    expected = talk_conv(*args)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out in [pool.submit(talk_conv, *args) for _ in range(40)]:
            assert torch.equal(out.result(), expected)


def _sum_in_child(args):
    return talk_conv(*args).numpy().sum()  # PyTorch's own threads would hang here, not ours


def test_after_a_fork():
    args = arguments(400, 4, 64, 4, 31, 31)
    expected = talk_conv(*args).numpy().sum()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_sum_in_child, (args,)).get(timeout=60) == pytest.approx(expected)


# --- Bad input ---

X, OFFSET = torch.zeros(5, 2, 6), torch.zeros(5, 2, 3)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (([1.0], OFFSET, None, 1, 0), TypeError, "x: expected a tensor, got list"),
        ((X.long(), OFFSET, None, 1, 0), TypeError, "x: expected float64.*got torch.int64"),
        ((X[0], OFFSET, None, 1, 0), ValueError, r"x: expected shape \(T, B, C\), got \(2, 6\)"),
        ((X, OFFSET[0], None, 1, 0), ValueError, r"offset_left: expected shape \(T, B, H\)"),
        ((X, OFFSET.bool(), None, 1, 0), TypeError, "offset_left: expected float64.*torch.bool"),
        ((X, OFFSET[1:], None, 1, 0), ValueError, r"offset_left: expected shape \(5, 2, H\)"),
        ((X, torch.zeros(5, 2, 4), None, 1, 0), ValueError, "divides C = 6, got 4"),
        ((X, torch.zeros(5, 2, 0), None, 1, 0), ValueError, "divides C = 6, got 0"),
        ((X, None, None, 1, 0), TypeError, "offset_left: expected a tensor, got NoneType"),
        (
            (X, OFFSET, OFFSET[..., :1], 1, 1),
            ValueError,
            r"offset_right: expected shape \(5, 2, 3\)",
        ),
        ((X, OFFSET.to("meta"), None, 1, 0), ValueError, "offset_left: expected device cpu"),
        ((X, OFFSET, OFFSET.to("meta"), 1, 1), ValueError, "offset_right: expected device cpu"),
        ((X, OFFSET, None, 1, 1), ValueError, "max_right: expected 0 without offset_right, got 1"),
        ((X, OFFSET, OFFSET, -1, 1), ValueError, "max_left: expected a window of 0.*got -1"),
        ((X, OFFSET, OFFSET, 2**31, 1), ValueError, "max_left: expected a window of 0 to 2"),
        ((X, OFFSET, OFFSET, 1, 2.0), TypeError, "max_right: expected an int, got float 2.0"),
        ((X, OFFSET, OFFSET, True, 1), TypeError, "max_left: expected an int, got bool True"),
        ((X, OFFSET, [1.0], 1, 1), TypeError, "offset_right: expected a tensor, got list"),
        ((X, OFFSET, OFFSET.int(), 1, 1), TypeError, "offset_right: expected float64.*torch.int32"),
        ((X, OFFSET[:, :1], None, 1, 0), ValueError, r"offset_left: expected shape \(5, 2, H\)"),
    ],
)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        talk_conv(*args)


def test_sizes_of_numpy():
    expected = talk_conv(X + 1, OFFSET + 0.3, OFFSET, 2, 1)
    got = talk_conv(X + 1, OFFSET + 0.3, OFFSET, np.int64(2), np.int32(1))
    assert torch.equal(got, expected)
    wide = talk_conv_reference(X + 1, OFFSET, OFFSET, np.int8(127), np.int8(127))
    assert torch.equal(wide, talk_conv_reference(X + 1, OFFSET, OFFSET, 127, 127))


@pytest.mark.parametrize(
    "forced, message",
    [
        ("gpu", "expected reference, cpu or cuda, got 'gpu'"),
        ("cuda", "expected cpu or reference for x on cpu, got 'cuda'"),
    ],
)
def test_impossible_backend(monkeypatch, forced, message):
    monkeypatch.setenv("TALK_CONV_BACKEND", forced)
    with pytest.raises(ValueError, match=f"TALK_CONV_BACKEND: {message}"):
        talk_conv(X, OFFSET, None, 1, 0)
    elsewhere = X.to("meta"), OFFSET.to("meta")
    for_others = "expected reference, cpu or cuda|expected reference for x on meta"
    with pytest.raises(ValueError, match=f"TALK_CONV_BACKEND: ({for_others}), got '{forced}'"):
        talk_conv(*elsewhere, None, 1, 0)

"""The short convolution: a literal sum over its taps in float64, forward and gradients."""

import pytest
import torch

import oracle
from talk_fairseq.modules import ShortConv
from talk_fairseq.ops import cpu_backend
from talk_fairseq.ops.short_conv import short_conv

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# T, B, C: a single step, fewer steps than taps, odd sizes, several blocks of rows, many channels.
SHAPES = [(1, 1, 1), (2, 3, 5), (31, 3, 37), (130, 2, 8), (9, 1, 600)]
TAPS = [(1, 0), (2, 1), (2, 0), (3, 1), (7, 3), (8, 7), (11, 5)]


@pytest.fixture(params=["cpu", "reference", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    monkeypatch.setenv("TALK_CONV_BACKEND", request.param)
    return "cuda" if request.param == "cuda" else "cpu"


def expected_at_once(x, weight, dout, left):
    """`oracle.short_conv` by PyTorch, for long sequences."""
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, weight)]
    padding = (left, len(weight) - 1 - left)
    padded = torch.nn.functional.pad(leaves[0].permute(1, 2, 0), padding)
    out = torch.nn.functional.conv1d(padded, leaves[1].t().unsqueeze(1), groups=x.shape[2])
    out = out.permute(2, 0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.cpu().double())


def check(x, weight, dout, left, expected=oracle.short_conv):
    """Compare the output and the gradients with `expected`, and return them."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = short_conv(x, weight, left)
    assert out.dtype == torch.promote_types(x.dtype, weight.dtype)
    dout = dout.to(out.dtype)
    results = out.detach(), *torch.autograd.grad(out, (x, weight), dout)
    assert results[1].dtype == x.dtype and results[2].dtype == weight.dtype
    oracle.check_short_conv(results, expected(x, weight, dout, left))
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_sum_over_its_taps(device, poisoned_memory, shape, dtype):
    for K, left in TAPS:
        sizes = shape, (K, shape[2]), shape
        check(*(torch.randn(*size, dtype=dtype, device=device) for size in sizes), left)


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_change_no_bit(monkeypatch, poisoned_memory, threads):
    x, weight, dout = torch.randn(70, 3, 37), torch.randn(7, 37), torch.randn(70, 3, 37)
    alone = check(x, weight, dout, 3)
    monkeypatch.setattr(cpu_backend, "_SERIAL", 1)
    monkeypatch.setattr(cpu_backend, "_NARROW", 2)
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, check(x, weight, dout, 3), alone))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("x_dtype, weight_dtype", [DTYPES[1:3], DTYPES[2:0:-1], DTYPES[2:4]])
def test_mixed_dtypes(device, x_dtype, weight_dtype):
    x, weight = torch.randn(9, 2, 8, dtype=x_dtype), torch.randn(3, 8, dtype=weight_dtype)
    check(x.to(device), weight.to(device), torch.randn(9, 2, 8, device=device), 1)


def test_strided_input(device):
    x = torch.randn(3, 16, 20, device=device).permute(2, 0, 1)[::2, :, ::2]
    dout = torch.randn(1, 3, 8, device=device).expand(10, 3, 8)
    check(x, torch.randn(8, 3, device=device).t(), dout, 1)


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4)])
def test_nothing(device, poisoned_memory, shape):
    x, dout = (torch.randn(*shape, device=device) for _ in range(2))
    check(x, torch.randn(3, 4, device=device), dout, 1)


def test_registration():
    x, weight = torch.randn(5, 2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.talk_conv.short_forward, (x, weight, 1))
    strided = x.detach().transpose(0, 1), weight.detach().t().clone().t()
    torch.library.opcheck(torch.ops.talk_conv.short_forward, (*strided, 1))
    torch.library.opcheck(torch.ops.talk_conv.short_backward, (strided[0], *strided, 1))


def test_bad_arguments(device):
    x, weight = torch.randn(5, 2, 4, device=device), torch.randn(3, 4, device=device)
    for bad in (x[..., :3], x[0], x.repeat(1, 1, 3)):
        with pytest.raises(ValueError, match=r"x: expected shape \(T, B, 4\) to match weight, got"):
            short_conv(bad, weight, 1)
    for bad in (weight[0], weight[..., None]):
        with pytest.raises(ValueError, match=r"weight: expected shape \(K, C\), got"):
            short_conv(x, bad, 1)
    for left in (-1, 3):
        with pytest.raises(ValueError, match=f"left: expected 0 to 2, got {left}"):
            short_conv(x, weight, left)
    with pytest.raises(ValueError, match=f"x: expected device meta to match weight, got {device}"):
        short_conv(x, weight.to("meta"), 1)


def test_error_does_not_grow_with_length(device):
    x, weight, dout = torch.rand(100_000, 1, 2), torch.randn(3, 2), torch.rand(100_000, 1, 2)
    check(x.to(device), weight.to(device), dout.to(device), 1, expected_at_once)
    # Rounded the same way again and again: a running sum in float32 ends 1e-4 off.
    x, dout = torch.ones_like(x), torch.full_like(dout, 0.1)
    check(x.to(device), weight.to(device), dout.to(device), 1, expected_at_once)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_the_module_begins_close_to_the_identity(K, causal):
    conv = ShortConv(600, K, causal)
    left = K - 1 if causal else K // 2
    assert (conv.weight[left] - 1).abs().mean() < 0.3 and conv.weight.std(1).max() < 0.3
    assert conv.weight.std(1).min() > 0.15  # tells neighbours apart
    x = torch.randn(11, 2, 600)
    assert torch.equal(conv(x), short_conv(x, conv.weight, left))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 8])
def test_steps_of_the_module(K, dtype):
    """In any dtype, rounded once."""
    conv, x = ShortConv(8, K, causal=True).to(dtype), torch.randn(21, 3, 8, dtype=dtype)
    expected = oracle.short_conv(x, conv.weight, x, K - 1)[0]
    state, outs = None, []
    for steps in x.split([1, 0, 5, 1, 14]):
        out, state = conv.step(steps, state)
        outs.append(out)
    out = torch.cat(outs)
    assert out.dtype == dtype and oracle.worst_error(out, expected) <= oracle.TOLERANCE[dtype]


def test_steps_have_the_gradients_of_a_full_pass():
    conv, x, dout = ShortConv(8, 3, causal=True), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    state, outs = None, []
    for steps in x.requires_grad_().split([1, 5, 3]):
        out, state = conv.step(steps, state)
        outs.append(out)
    results = torch.cat(outs), *torch.autograd.grad(torch.cat(outs), (x, conv.weight), dout)
    oracle.check_short_conv(results, oracle.short_conv(x, conv.weight, dout, 2))


@torch.no_grad()
def test_steps_of_mixed_dtypes():
    conv, x = ShortConv(8, 3, causal=True), torch.randn(5, 2, 8).bfloat16()
    (out, _), (nothing, _) = conv.step(x), conv.step(x[:0])
    assert out.dtype == nothing.dtype == torch.float32 and torch.allclose(out, conv(x), atol=1e-5)


def test_only_a_causal_one_can_step():
    with pytest.raises(ValueError, match="step: expected a causal module, got 1 taps to the right"):
        ShortConv(8, 3, causal=False).step(torch.randn(1, 1, 8))

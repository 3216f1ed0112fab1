"""The patches of an update: the same numbers as fairseq's loops, bit for bit."""

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import utils
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin as MixedPrecision
from torch import nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SHAPES = (5, 7), (11,), (), (3, 2, 4), (0, 2)


def optimizer_of(flat, device, dtype):
    """What the methods of fairseq's optimizer read, with gradients from a backward pass."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(2, *shape, generator=generator).to(device) for shape in SHAPES]
    halves = [nn.Parameter(x[0].to(dtype)) for x in drawn]
    for p, x in zip(halves, drawn):
        p.grad = x[1].to(dtype)
    if flat:
        total = sum(p.numel() for p in halves)
        wide = {halves[0].device.index: nn.Parameter(torch.randn(total, generator=generator))}
    else:
        wide = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        wide[-2].requires_grad_(False)
        halves[-2].requires_grad_(False)  # frozen
    for p in wide.values() if flat else wide:
        p.data = p.data.to(device)
        p.grad = torch.full_like(p, 7)
    return SimpleNamespace(
        fp16_params=halves, fp32_params=wide, has_flat_params=flat, scaler=None, _needs_sync=True
    )


def numbers(optimizer):
    wide = optimizer.fp32_params
    params = [*optimizer.fp16_params, *(wide.values() if optimizer.has_flat_params else wide)]
    return [x for p in params for x in (p.detach(), p.grad)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("odd", ["", "missing", "strided"])
@pytest.mark.parametrize(
    "name", ["_sync_fp16_grads_to_fp32", "_sync_fp32_params_to_fp16", "zero_grad"]
)
def test_as_fairseq_copies(name, odd, flat, dtype, device):
    if flat and odd == "strided":
        pytest.skip("fairseq copies contiguous gradients alone into one tensor")
    ours, theirs = (optimizer_of(flat, device, dtype) for _ in range(2))
    for optimizer in (ours, theirs):
        first, second, *_ = optimizer.fp16_params
        if odd == "missing":
            second.grad = None
        elif odd == "strided":
            first.grad = first.grad.t().contiguous().t()
    update = getattr(MixedPrecision, name)
    update(ours)
    update.__wrapped__(theirs)
    assert ours._needs_sync == theirs._needs_sync
    for mine, other in zip(numbers(ours), numbers(theirs), strict=True):
        if mine is None or other is None:
            assert mine is other
        else:
            assert mine.dtype == other.dtype and torch.equal(mine, other)


def test_gradients_are_copied_once_after_a_backward_pass():
    optimizer = optimizer_of(False, "cpu", torch.bfloat16)
    MixedPrecision._sync_fp16_grads_to_fp32(optimizer)
    optimizer.fp32_params[0].grad.fill_(5)  # as clipping changes it
    MixedPrecision._sync_fp16_grads_to_fp32(optimizer)
    assert (optimizer.fp32_params[0].grad == 5).all()


def test_a_gradient_in_float32_that_is_gone_is_made_anew():
    optimizer = optimizer_of(False, "cpu", torch.bfloat16)
    optimizer.fp32_params[0].grad = None
    MixedPrecision._sync_fp16_grads_to_fp32(optimizer)
    assert torch.equal(optimizer.fp32_params[0].grad, optimizer.fp16_params[0].grad.float())


def test_the_scale_of_the_loss_is_undone_anew():
    optimizer = optimizer_of(False, "cpu", torch.float16)
    optimizer.scaler = SimpleNamespace(loss_scale=128)
    MixedPrecision.zero_grad(optimizer)
    assert optimizer._multiply_factor == 1 / 128


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_of_several_types(device):
    """As of a model that keeps one in float32."""
    optimizer = optimizer_of(False, device, torch.bfloat16)
    optimizer.fp16_params[1].data = optimizer.fp16_params[1].data.float()
    MixedPrecision._sync_fp32_params_to_fp16(optimizer)
    for p, wide in zip(optimizer.fp16_params, optimizer.fp32_params):
        assert not p.requires_grad or torch.equal(p, wide.to(p.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_are_fairseqs(dtype, device, monkeypatch):
    """Bit for bit on a CPU."""
    params = optimizer_of(False, device, dtype).fp16_params
    ours = utils.clip_grad_norm_(params, 0)
    monkeypatch.setattr(utils, "multi_tensor_l2norm_available", False)
    theirs = utils.clip_grad_norm_(params, 0)
    assert ours.device == params[0].device and ours > 1
    torch.testing.assert_close(ours, theirs, rtol=0 if device == "cpu" else 1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("second", [torch.float16, torch.float32])
def test_norms_of_gradients_are_in_float32(second, device):
    """A square of one of these leaves the range of float16."""
    gradients = [torch.full((3,), 3000.0, dtype=torch.float16), torch.full((1,), 9e3, dtype=second)]
    params = [nn.Parameter(torch.zeros_like(g, device=device)) for g in gradients]
    for p, gradient in zip(params, gradients):
        p.grad = gradient.to(device)
    norm = utils.clip_grad_norm_(params, 540)
    assert norm.dtype == torch.float32 and norm.device.type == device
    assert float(norm) == pytest.approx(108e6**0.5, rel=1e-6)
    clipped = torch.cat([p.grad.float() for p in params]).norm()
    assert float(clipped) == pytest.approx(540, rel=1e-3)

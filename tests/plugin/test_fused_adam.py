"""fused_adam: fairseq's Adam to rounding, its options, and its checkpoints."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("fairseq")
from fairseq.optim import build_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from omegaconf import OmegaConf
from torch import nn

from conftest import SMALL, fairseq
from talk_fairseq.checkpoint_files import read_checkpoint
from talk_fairseq.optim import fused_adam
from talk_fairseq.optim.fused_adam import FusedAdam

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}


def parameters(*dtypes, device="cpu"):
    """Three parameters of a dtype, or of one dtype each."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 7), (11,), (3, 2, 4))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(x.to(device, dtype)) for x, dtype in zip(drawn, itertools.cycle(dtypes))]


def train(optimizer, params, updates, seed=0):
    """Steps with gradients of all sizes; the last parameter has one in every other step alone."""
    generator = torch.Generator().manual_seed(seed)
    for update in range(updates):
        for number, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator) * 10.0 ** -(4 * number)
            p.grad = None if number == 2 and update % 2 else grad.to(p)
        optimizer.step()


@pytest.mark.parametrize("betas", [(1.0, 0.98), (0.9, 1.0), (0.9, -0.1)])
def test_betas_that_cannot_be_used(betas):
    with pytest.raises(ValueError, match="betas: expected two numbers from 0 to below 1, got"):
        FusedAdam(parameters(torch.float32), betas=betas)


MIXED = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float32,), (torch.bfloat16,), MIXED])
def test_it_is_fairseqs_adam(dtypes, eps, device):
    ours, theirs = (parameters(*dtypes, device=device) for _ in range(2))
    optimizers = [cls(p, eps=eps, **OPTIONS) for cls, p in ((FusedAdam, ours), (Adam, theirs))]
    for optimizer, params in zip(optimizers, (ours, theirs)):
        train(optimizer, params, 40)
    for mine, other in zip(ours, theirs):
        assert mine.dtype == other.dtype
        if tolerance := {torch.float64: 1e-12, torch.float32: 2e-6}.get(mine.dtype):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        else:  # of the same float32 numbers, which round alike but for a few
            assert (mine == other).float().mean() > 0.9
        for name in ("exp_avg", "exp_avg_sq"):
            a, b = (o.state[p][name] for o, p in zip(optimizers, (mine, other)))
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)
        assert optimizers[0].state[mine]["step"] == optimizers[1].state[other]["step"]


@pytest.mark.parametrize("first, second", [(Adam, FusedAdam), (FusedAdam, Adam)])
def test_either_goes_on_from_the_other(first, second):
    whole, halves = parameters(torch.float32), parameters(torch.float32)
    train(Adam(whole, **OPTIONS), whole, 10)
    optimizer = first(halves, **OPTIONS)
    train(optimizer, halves, 10)
    following = second(halves, **OPTIONS)
    following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reference = Adam(whole, **OPTIONS)
    reference.load_state_dict(copy.deepcopy(following.state_dict()))
    train(reference, whole, 10, seed=1)
    train(following, halves, 10, seed=1)
    for mine, other in zip(halves, whole):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_any_strides():
    """Of a parameter that is a view, of its gradient, and of a state that was loaded."""
    values = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    table = torch.zeros(6, 8)
    table[:, :4] = values[0]
    strided = [nn.Parameter(table[:, :4]), nn.Parameter(values[1].t().contiguous().t())]
    plain = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in strided]
    for first in range(2):
        for cls, params in (FusedAdam, strided), (Adam, plain):
            optimizer = cls(params, **OPTIONS)
            for _ in range(3):
                for p in params:
                    p.grad = values[2].t().contiguous().t() if first else values[2]
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(state)
                for entry in optimizer.state.values():
                    entry["exp_avg"] = entry["exp_avg"].t().contiguous().t()
                optimizer.step()
    for mine, other in zip(strided, plain):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
    assert not table[:, 4:].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(default, device):
    results = []
    for dtype in (torch.float32, default):
        params = parameters(torch.float32, device=device)
        optimizer = FusedAdam(params, **OPTIONS)
        for p in params:
            p.grad = torch.ones_like(p)
            optimizer.state[p]["step"] = 300  # bfloat16 cannot hold the next number
        torch.set_default_dtype(dtype)
        try:
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(params)
    assert all(map(torch.equal, *results))


def test_halves_are_widened_some_at_a_time(monkeypatch):
    results = []
    for size in (16, 2):
        monkeypatch.setattr(fused_adam, "_WIDENED", size)
        params = parameters(torch.bfloat16)
        train(FusedAdam(params, **OPTIONS), params, 4)
        results.append(params)
    assert all(map(torch.equal, *results))


def test_a_closure_and_a_sparse_gradient():
    (p, *_) = parameters(torch.float32)
    optimizer = FusedAdam([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    p.grad = p.detach().to_sparse()
    with pytest.raises(RuntimeError, match="expected dense ones"):
        optimizer.step()


def test_as_fairseq_builds_it():
    given = {"adam_betas": "(0.8, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.1, "lr": [0.02]}
    cfg = OmegaConf.structured(FairseqAdamConfig(**given, tpu=False))
    cfg = OmegaConf.create({**cfg, "_name": "fused_adam"})
    built = build_optimizer(cfg, parameters(torch.float32))
    (group,) = built.optimizer.param_groups
    assert (group["lr"], *group["betas"], group["eps"]) == (0.02, 0.8, 0.98, 1e-6)
    assert group["weight_decay"] == 0.1 and type(built.optimizer) is FusedAdam
    assert type(built).__name__ == "FairseqAdam"  # as of the checkpoints of adam
    assert built.supports_memory_efficient_fp16 and built.supports_flat_params
    cfg.fp16_adam_stats = True
    with pytest.raises(ValueError, match="fp16_adam_stats: expected false with fused_adam"):
        build_optimizer(cfg, parameters(torch.float32))


@pytest.mark.slow
@pytest.mark.long
def test_fairseq_trains_and_resumes_with_it(corpus, tmp_path):
    """Also from a checkpoint of adam, in the same place of the schedule."""

    def run(name, optimizer, updates, *more):
        fairseq(
            "train", corpus, *SMALL, "--optimizer", optimizer, "--adam-betas", "(0.9, 0.98)",
            "--lr", 0.01, "--weight-decay", 0.01, "--max-tokens", 2000, "--max-update", updates,
            "--save-dir", tmp_path / name, "--log-format", "none", "--clip-norm", 1,
            "--save-interval-updates", 4, *more,
        )  # fmt: skip
        return read_checkpoint(tmp_path / name / "checkpoint_last.pt")

    def difference(a, b):
        pairs = [(a["model"][k], b["model"][k]) for k in a["model"] if "version" not in k]
        return max(float((x - y).abs().max()) for x, y in pairs)

    theirs = run("theirs", "adam", 8)
    assert difference(theirs, run("ours", "fused_adam", 8)) < 1e-3
    run("both", "adam", 4)
    resumed = run("both", "fused_adam", 8)
    assert resumed["optimizer_history"][-1]["num_updates"] == 8
    assert difference(theirs, resumed) < 1e-3


def test_states_are_float32_again_after_loading():
    """PyTorch rounds them to the parameters' type when it loads them."""
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, params, 3)
    following = FusedAdam(params, **OPTIONS)
    following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = {
        p: {n: optimizer.state[p][n].bfloat16().float() for n in ("exp_avg", "exp_avg_sq")}
        for p in params
    }
    train(following, params, 1)
    for p in params:
        beta1, beta2 = OPTIONS["betas"]
        g = p.grad.float()
        expected = {
            "exp_avg": beta1 * before[p]["exp_avg"] + (1 - beta1) * g,
            "exp_avg_sq": beta2 * before[p]["exp_avg_sq"] + (1 - beta2) * g * g,
        }
        for name in expected:
            assert following.state[p][name].dtype == torch.float32
            assert torch.allclose(following.state[p][name], expected[name], rtol=1e-5)

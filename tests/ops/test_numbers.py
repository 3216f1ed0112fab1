"""The edges of the number formats: no NaN that was not there, none hidden, and none unnamed."""

import functools
import math

import pytest
import torch
from test_operator import gradients

import oracle
from conftest import PLUGIN, SMALL
from talk_fairseq import TaLKConv, TaLKConvUnit, talk_conv

HALVES = [torch.float16, torch.bfloat16]
NOT_FINITE = [math.nan, math.inf, -math.inf]
talk_conv_backward = functools.partial(gradients, talk_conv)


@pytest.fixture(params=["cpu", "reference"])
def backend(request, monkeypatch):
    monkeypatch.setenv("TALK_CONV_BACKEND", request.param)
    return request.param


# --- What every backend must do; test_kernels_on_host.py uses it too ---


def edges(dtype, shape, generator):
    """The largest numbers, the smallest normal and subnormal ones, 1 and 0, of both signs."""
    info = torch.finfo(dtype)
    values = [info.max, info.max / 2, 1, info.tiny, info.smallest_normal * info.eps, 0]
    values = torch.tensor(values, dtype=torch.float64)
    chosen = torch.randint(len(values), shape, generator=generator)
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    return (values[chosen] * sign).to(dtype)


def check_edges(forward, backward, dtype):
    """A window's mean is within the format, and so is what is computed of it."""
    generator = torch.Generator().manual_seed(0)
    for windows in ((0, 0), (7, 0), (5, 3), (200, 100)):
        x, dout = (edges(dtype, (60, 2, 8), generator) for _ in range(2))
        left, right = edges(dtype, (2, 60, 2, 2), generator).abs()
        inputs = (x, left, right if windows[1] else None, *windows)
        oracle.check_forward(forward, *inputs)
        assert forward(*inputs).isfinite().all()
        got, expected = backward(dout, *inputs), oracle.talk_conv_backward(dout, *inputs)
        for gradient, exact in zip(got, expected):
            if exact is None:
                continue
            # Gradients of the offsets that are too large for the format are infinite.
            assert torch.equal(gradient.isfinite(), exact.to(dtype).isfinite())
            assert not gradient.isnan().any()
        assert oracle.worst_error(got[0], expected[0]) <= 4 * oracle.TOLERANCE[dtype]


def check_spread(forward, value, causal):
    """`value` is in every output whose window has it, and in no sentence or channel beside its own.

    Nor in one whose window ends before. Windows are differences of running sums: later outputs of
    the same channel may be NaN as well.
    """
    torch.manual_seed(0)
    x, left, right = torch.randn(40, 3, 8), torch.rand(40, 3, 2), torch.rand(40, 3, 2)
    windows = (9, 0) if causal else (9, 4)
    right = None if causal else right
    x[20, 1, 5] = value
    out = forward(x, left, right, *windows)
    time = torch.arange(40)
    end = time if causal else time + right[:, 1, 1] * 4
    has = (time - left[:, 1, 1] * 9 < 21) & (end > 19)
    assert not out[has, 1, 5].isfinite().any()
    assert out[end <= 19, 1, 5].isfinite().all()
    out[:, 1, 5] = 0
    assert out.isfinite().all()


def check_spread_of_gradients(backward):
    """NaN goes to every row of the window, and to no sentence or channel beside its own.

    Sums run on, so that it may be in rows on one side of the window as well.
    """
    torch.manual_seed(0)
    x, (left, right) = torch.randn(40, 3, 8), torch.rand(2, 40, 3, 2)
    dout = torch.ones_like(x)
    dout[20, 1, 5] = math.nan
    dx = backward(dout, x, left, right, 9, 4)[0]
    first = 20 - math.ceil(left[20, 1, 1] * 9)
    assert dx[first : 21 + math.ceil(right[20, 1, 1] * 4), 1, 5].isnan().all()
    dx[:, 1, 5] = 0
    assert dx.isfinite().all()


# --- The operator ---


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_edges_of_the_halves(backend, dtype):
    check_edges(talk_conv, talk_conv_backward, dtype)


def test_sums_that_are_not_divided_overflow_as_the_true_sums_do(backend):
    conv = TaLKConv(4, 2, 7, 0, normalize=False).half()
    conv.offsets.weight.data.zero_()
    conv.offsets.bias.data.fill_(100)  # offsets of 1
    x = torch.full((8, 1, 4), 9000.0).half()
    out = conv(x)[:, 0, 0]
    assert out[:7].tolist() == pytest.approx([9000 * n for n in range(1, 8)], rel=1e-3)
    assert out[7] == math.inf  # 72,000; the largest float16 is 65,504


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_far_out(dtype, size):
    """Offsets of exactly 0 and 1, whose gradients are 0: nothing of it is NaN."""
    unit = TaLKConvUnit(8, 2, 5, 3).to(dtype)
    unit.conv.offsets.bias.data.fill_(size)
    x = torch.randn(20, 2, 8).to(dtype).requires_grad_()
    left, right = unit.conv.predict_offsets(x)
    assert (left == (size > 0)).all() and (right == (size > 0)).all()
    out, _ = unit(x)
    out.float().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad.any()
    assert all(p.grad.isfinite().all() for p in unit.parameters())


def test_gates_far_out():
    """A gate that is shut or open, on the largest numbers of float16."""
    unit = TaLKConvUnit(8, 2, 5, 3).half()
    unit.linear1.weight.data.zero_()
    unit.linear1.bias.data[:8] = 65504
    unit.linear1.bias.data[8:] = torch.tensor([65504, -65504] * 4)
    rows = torch.nn.functional.glu(unit.linear1(torch.ones(9, 1, 8).half()), dim=-1)
    assert rows.isfinite().all() and unit.conv(rows).isfinite().all()


# --- What is not finite ---


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_is_propagated(backend, value, causal):
    check_spread(talk_conv, value, causal)


def test_so_are_gradients(backend):
    check_spread_of_gradients(talk_conv_backward)


# --- Training ---


def trainer_of(folder, *flags):
    """fairseq's Trainer of a small model on the CPU, as fairseq-train makes it."""
    pytest.importorskip("fairseq")
    from building import dictionary
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.tasks.translation import TranslationTask
    from fairseq.trainer import Trainer

    flags = [
        "data", "--user-dir", str(PLUGIN), *SMALL, "--cpu", "--save-dir", str(folder),
        "--optimizer", "adam", "--lr", "0.002", "--dropout", "0", "--offset-dropout", "0", *flags,
    ]  # fmt: skip
    parsed = options.parse_args_and_arch(options.get_training_parser(), flags)
    cfg = convert_namespace_to_omegaconf(parsed)
    words = dictionary(40)
    task = TranslationTask(cfg.task, words, words)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batch(seed):
    """Four sentences of ten words, which are to be turned around."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, 40, (4, 10), generator=generator)
    source[:, -1] = 2
    target = source.flip(1).roll(-1, 1)
    inputs = {
        "src_tokens": source,
        "src_lengths": torch.full((4,), 10),
        "prev_output_tokens": target.roll(1, 1),
    }
    return {"id": torch.arange(4), "nsentences": 4, "ntokens": 40, "net_input": inputs,
            "target": target}  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--amp"], ["--memory-efficient-fp16"]])
def test_training_names_the_first_module_that_made_a_nan(tmp_path, flags):
    trainer = trainer_of(tmp_path, *flags)
    trainer.train_step([batch(0)])
    trainer.model.decoder.layers[1].self_attn.conv.offsets.weight.data[0, 0] = math.nan
    before = "Minimum loss scale" if "fp16" in str(flags) else "gradients are Nan/Inf"
    found = r"; the first: NaN detected in output of decoder\.layers\.1\.self_attn\.conv\.offsets"
    with pytest.raises(FloatingPointError, match=before + ".*" + found):
        for seed in range(30):
            trainer.train_step([batch(seed)])
    assert (tmp_path / "crash.pt").exists()  # fairseq's own, to look into


def test_and_the_first_whose_gradient_was_one(tmp_path):
    trainer = trainer_of(tmp_path)

    def spoil(module, inputs, output):
        output[0].register_hook(lambda gradient: gradient * math.inf)

    trainer.model.encoder.layers[1].self_attn.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match=r"encoder\.layers\.1\.self_attn.*, backward"):
        trainer.train_step([batch(0)])


class Total(torch.nn.Module):
    def forward(self, x):
        return x.sum()


def test_the_search_passes_modules_that_return_a_number(tmp_path):
    trainer = trainer_of(tmp_path)
    spoilt = trainer.model.encoder.layers[0].fc2
    spoilt.total = Total()
    spoilt.register_forward_hook(lambda module, _, output: output + module.total(output))
    spoilt.weight.data[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"encoder\.layers\.0\.fc2"):
        trainer.train_step([batch(0)])


def train_in_half(folder, updates, window):
    """Train in fp16 from a loss scale that overflows; returns the losses and what was lost."""
    flags = ["--memory-efficient-fp16", "--fp16-init-scale", 2**24, "--fp16-scale-window", window]
    trainer = trainer_of(folder, *map(str, flags))
    losses, scales = [], []
    while trainer.get_num_updates() < updates:
        log = trainer.train_step([batch(len(losses) + len(scales))])
        if log:
            losses.append(log["loss"])
        else:
            scales.append(trainer.optimizer.scaler.loss_scale)
        assert len(scales) < updates
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    return losses, scales, trainer.optimizer.scaler.loss_scale


def test_the_loss_scaler_loses_no_step_more_than_needed(tmp_path):
    """One for each halving from where it begins, and one for each time it then tries to rise."""
    losses, scales, _ = train_in_half(tmp_path, 150, window=25)
    halvings = [2.0**24 / 2**n for n in range(1, 25)]
    falls = next(n for n, scale in enumerate(scales, 1) if scales[n:] == [] or scales[n] >= scale)
    assert scales[:falls] == halvings[:falls]
    assert len(scales) - falls <= 150 // 25 + 1
    assert sum(losses[-20:]) < sum(losses[:20])


@pytest.mark.slow
@pytest.mark.long
def test_ten_thousand_updates_in_half_precision(tmp_path, figure):
    losses, scales, last = train_in_half(tmp_path, 10_000, window=200)
    figure(
        f"10,000 updates in fp16, {len(scales)} lost to overflow, loss {losses[0]:.2f} to "
        f"{losses[-1]:.2f}, loss scale {min(scales):g} to {max(scales):g}, {last:g} at the end"
    )
    assert len(scales) <= 24 + 10_000 // 200 + 1 and min(scales) >= 1
    assert losses[-1] < losses[0] / 2

"""The operators and modules under PyTorch's transformations, and the table of those in the docs."""

import functools
import re

import pytest
import torch
from test_operator import arguments
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

from conftest import ROOT
from talk_fairseq import (
    TaLKConv,
    TaLKConvState,
    TaLKConvUnit,
    talk_conv,
    talk_conv_reference,
    talk_conv_update,
)
from talk_fairseq.ops import cpu_backend
from talk_fairseq.ops.short_conv import short_conv, short_conv_reference

SECOND = "talk_conv_reference has second derivatives, and so has TALK_CONV_BACKEND=reference"


def updates(x, offset_left):
    """The causal operator, step by step."""
    state = TaLKConvState(*x.shape[1:], reach=6, dtype=x.dtype, device=x.device)
    steps = zip(x.split(1), offset_left.split(1))
    return torch.cat([talk_conv_update(*step, state, 4) for step in steps])


OPERATORS = {  # a function of tensors, and the same in plain PyTorch
    "talk_conv": (
        lambda x, left, right: talk_conv(x, left, right, 4, 3),
        lambda x, left, right: talk_conv_reference(x, left, right, 4, 3),
    ),
    "causal": (
        lambda x, left: talk_conv(x, left, None, 4, 0),
        lambda x, left: talk_conv_reference(x, left, None, 4, 0),
    ),
    "update": (updates, lambda x, left: talk_conv_reference(x, left, None, 4, 0)),
    "short_conv": (
        lambda x, weight: short_conv(x, weight, 1),
        lambda x, weight: short_conv_reference(x, weight, 1),
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture(params=OPERATORS)
def operator(request, device):
    """A function, the same in plain PyTorch, inputs and tangents in float64."""
    function, reference = OPERATORS[request.param]
    x, left, right, *_ = arguments(7, 2, 4, 2, 4, 3, torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64)
    inputs = {"talk_conv": (x, left, right), "short_conv": (x, weight)}.get(
        request.param, (x, left)
    )
    inputs = tuple(value.to(device) for value in inputs)
    return function, reference, inputs, tuple(map(torch.randn_like, inputs))


def squares(function):
    return lambda *inputs: function(*inputs).square().sum()


def stacked(inputs):
    """Two examples of each input, the mapped axis in another place for each."""
    return tuple(torch.stack([value, value / 3], axis) for axis, value in enumerate(inputs))


def every(inputs):
    return tuple(range(len(inputs)))


def dual(function, inputs, tangents):
    with forward_ad.dual_level():
        out = function(*map(forward_ad.make_dual, inputs, tangents))
        return tuple(forward_ad.unpack_dual(out))


def gradients_outside_of_vmap(function, inputs):
    inputs = [value.requires_grad_() for value in stacked(inputs)]
    return torch.autograd.grad(squares(vmap(function, every(inputs)))(*inputs), inputs)


TRANSFORMATIONS = {
    "forward_ad": dual,
    "jvp": jvp,
    "jvp of one": lambda f, a, t: jvp(lambda x: f(x, *a[1:]), a[:1], t[:1]),
    "jvp of none": lambda f, a, t: jvp(lambda s: s * f(*a), (a[0].sum(),), (t[0].sum(),)),
    "linearize": lambda f, a, t: linearize(f, *a)[1](*t),
    "jacfwd": lambda f, a, t: jacfwd(f, every(a))(*a),
    "grad": lambda f, a, t: grad(squares(f), every(a))(*a),
    "vjp": lambda f, a, t: vjp(f, *a)[1](t[0]),
    "jacrev": lambda f, a, t: jacrev(f, every(a))(*a),
    "grad without gradients": lambda f, a, t: grad(
        lambda x: (torch.no_grad()(f)(x, *a[1:]) * x).sum()
    )(a[0]),
    "vmap": lambda f, a, t: vmap(f, every(a))(*stacked(a)),
    "vmap of the first": lambda f, a, t: vmap(f, (0, *[None] * (len(a) - 1)))(
        stacked(a)[0], *a[1:]
    ),
    "vmap of the second": lambda f, a, t: vmap(f, (None, 1, *[None] * (len(a) - 2)))(
        a[0], stacked(a)[1], *a[2:]
    ),
    "vmap of vmap": lambda f, a, t: vmap(vmap(f, every(a)))(
        *(torch.stack([b, b / 2, b / 3]) for b in stacked(a))
    ),
    "vmap of grad": lambda f, a, t: vmap(grad(squares(f), every(a)), every(a))(*stacked(a)),
    "grad of vmap": lambda f, a, t: grad(squares(vmap(f, every(a))), every(a))(*stacked(a)),
    "jvp of vmap": lambda f, a, t: jvp(vmap(f, every(a)), stacked(a), stacked(t)),
    "jvp of jvp": lambda f, a, t: jvp(lambda *b: jvp(f, b, t), a, t),
    "vjp of jvp": lambda f, a, t: vjp(lambda *b: jvp(f, b, t)[1], *a)[1](t[0]),
    "gradients outside of vmap": lambda f, a, t: gradients_outside_of_vmap(f, a),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_gives_what_plain_pytorch_gives(operator, name):
    function, reference, inputs, tangents = operator
    transform = TRANSFORMATIONS[name]
    got, expected = (transform(f, inputs, tangents) for f in (function, reference))
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12) and b.any()


def test_forward_mode_and_batches_against_finite_differences(device):
    """Away from whole tokens, where the operator has kinks."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 1, 4, dtype=torch.float64, generator=generator)
    whole, fraction = torch.rand(2, 2, 5, 1, 2, dtype=torch.float64, generator=generator)
    left, right = ((3 * whole).floor() + 0.2 + 0.6 * fraction) / 4
    inputs = [value.to(device).requires_grad_() for value in (x, left, right)]
    assert torch.autograd.gradcheck(
        lambda *inputs: talk_conv(*inputs, 4, 4),
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@pytest.mark.parametrize(
    "second",
    [
        lambda f, a, t: hessian(f)(*a),
        lambda f, a, t: grad(lambda *b: grad(f)(*b).sum())(*a),
        lambda f, a, t: jvp(grad(f), a, t),
        lambda f, a, t: vmap(lambda x: hessian(f)(x, *a[1:]))(torch.stack([a[0], a[0]])),
    ],
)
@pytest.mark.parametrize("name", ["talk_conv", "short_conv"])
def test_derivatives_of_a_backward_pass(monkeypatch, name, second):
    """An error with the kernels, which says what has them; the reference has them."""
    x, left, right, *_ = arguments(7, 2, 4, 2, 4, 3, torch.float64)
    function, reference = OPERATORS[name]
    inputs = (x, left, right) if name == "talk_conv" else (x, torch.randn(3, 4).double())
    tangents = tuple(map(torch.randn_like, inputs))
    with pytest.raises(RuntimeError, match=SECOND):
        second(squares(function), inputs, tangents)
    expected = second(squares(reference), inputs, tangents)
    monkeypatch.setenv("TALK_CONV_BACKEND", "reference")
    got = second(squares(function), inputs, tangents)
    assert all(map(torch.equal, tree_leaves(got), tree_leaves(expected)))


@pytest.mark.parametrize("name", ["talk_conv", "short_conv"])
def test_other_derivatives_of_second_order_work(name):
    x, left, *_ = arguments(7, 2, 4, 2, 4, 0, torch.float64)
    function, reference = OPERATORS["causal" if name == "talk_conv" else name]
    inputs = (x, left if name == "talk_conv" else torch.randn(3, 4).double())
    for second in (lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))):
        got, expected = (second(squares(f))(*inputs) for f in (function, reference))
        assert torch.allclose(got, expected) and expected.any()


def test_steps_have_second_derivatives():
    x, left, *_ = arguments(5, 1, 2, 1, 4, 0, torch.float64)
    function, reference = OPERATORS["update"]
    got, expected = (hessian(squares(f))(x, left) for f in (function, reference))
    assert torch.allclose(got, expected) and expected.any()


def test_a_tangent_in_a_backward_pass_is_refused():
    x, left, right, *window = arguments(7, 2, 4, 2, 4, 3)
    x.requires_grad_()
    out = talk_conv(x, left, right, *window)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match=SECOND):
            torch.autograd.grad(out, x, dout)


def test_gradients_beside_tangents():
    x, left, right, *window = arguments(7, 2, 4, 2, 4, 3, torch.float64)
    x.requires_grad_()
    with forward_ad.dual_level():
        results = []
        for function in (talk_conv, talk_conv_reference):
            out = function(x, forward_ad.make_dual(left, torch.ones_like(left)), right, *window)
            tangent = forward_ad.unpack_dual(out).tangent
            results.append((tangent, *torch.autograd.grad(out.square().sum(), x)))
    assert all(map(torch.allclose, *results))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """The offsets stay in float32, and each example has the bits that it has alone."""
    x, left, right, *window = arguments(40, 2, 8, 2, 4, 3, dtype, torch.float32)
    (out, tangent), (expected, slope) = (
        jvp(lambda x, left, f=f: f(x, left, right, *window), (x, left), (x, left))
        for f in (talk_conv, talk_conv_reference)
    )
    assert out.dtype == tangent.dtype == dtype
    assert torch.equal(out, expected) and torch.equal(tangent, slope)
    many = vmap(lambda x: talk_conv(x, left, right, *window))(torch.stack([x, 2 * x]))
    assert all(torch.equal(o, talk_conv(x, left, right, *window)) for o, x in zip(many, (x, 2 * x)))


def test_vmap_calls_the_kernels_once(monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        kernel = getattr(cpu_backend, name)
        counted = lambda *args, name=name, kernel=kernel: calls.append(name) or kernel(*args)  # noqa: E731
        monkeypatch.setattr(cpu_backend, name, counted)
    x, left, right, *window = arguments(7, 2, 4, 2, 4, 3)
    loss = squares(lambda x: talk_conv(x, left, right, *window))
    vmap(grad(loss))(torch.stack([x] * 5))
    assert calls == ["forward", "backward"]


def test_vmap_of_nothing():
    x, left, *_ = arguments(7, 2, 4, 2, 4, 0)
    with pytest.raises(ValueError, match="vmap: expected a mapped axis of at least 1, got 0"):
        vmap(lambda x: talk_conv(x, left, None, 4, 0))(x.new_empty(0, *x.shape))


def test_a_tensor_that_has_left_its_transformation():
    x, left, right, *window = arguments(7, 2, 4, 2, 4, 3)
    left.requires_grad_()
    kept = []
    grad(lambda x: kept.append(x * 1) or x.sum())(x)
    gradients = [
        torch.autograd.grad(talk_conv(value, left, right, *window).sum(), left)[0]
        for value in (x, kept[0])
    ]
    assert torch.equal(*gradients)


# --- Modules ---


@pytest.fixture(params=[dict(max_right=3), dict(), dict(short_kernel=3)], ids=str)
def unit(request):
    return TaLKConvUnit(8, 2, 4, **request.param)


def test_gradients_of_each_example(unit):
    x, parameters = torch.randn(6, 3, 8), dict(unit.named_parameters())

    def loss(parameters, x):
        return functional_call(unit, parameters, (x.unsqueeze(1),))[0].square().sum()

    each = vmap(grad(loss), in_dims=(None, 1))(parameters, x)
    for index in range(3):
        loss(parameters, x[:, index]).backward()
        for name, parameter in parameters.items():
            assert torch.allclose(each[name][index], parameter.grad, rtol=1e-4, atol=1e-5), name
            parameter.grad = None


def test_an_ensemble(unit):
    units = [unit, TaLKConvUnit(8, 2, 4, unit.conv.max_right, short_kernel=3 * bool(unit.short))]
    x = torch.randn(6, 3, 8)
    state = stack_module_state(units)
    outs = vmap(lambda *state: functional_call(unit, state, (x,))[0])(*state)
    assert all(torch.allclose(out, one(x)[0], atol=1e-6) for out, one in zip(outs, units))


class Output(torch.nn.Module):
    """A unit that returns its output only."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def forward(self, x, padding):
        return self.unit(x, key_padding_mask=padding)[0]


def batch(T, B):
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, T // 2 :] = True
    return torch.randn(T, B, 8), padding


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(unit, tmp_path):
    """A traced unit takes any length and batch, has gradients, and can be saved."""
    module = Output(unit).eval()
    traced = torch.jit.trace(module, batch(9, 2))
    traced.save(tmp_path / "traced.pt")
    for program in (traced, torch.jit.load(tmp_path / "traced.pt")):
        for inputs in (batch(9, 2), batch(30, 3), batch(1, 1)):
            assert torch.equal(program(*inputs), module(*inputs))
            got, expected = (
                torch.autograd.grad(f(*inputs).square().sum(), list(f.parameters()))
                for f in (program, module)
            )
            assert all(map(torch.equal, got, expected))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_of_a_step(poisoned_memory):
    conv, x = TaLKConv(8, 2, 3).eval().requires_grad_(False), torch.randn(1, 2, 8)
    traced = torch.jit.trace(lambda x: conv.step(x)[0], x)
    other = torch.randn(1, 2, 8)
    assert torch.equal(traced(other), conv.step(other)[0])


def test_jit_script_is_refused(unit):
    with pytest.raises(RuntimeError, match="talk_fairseq"):
        torch.jit.script(unit)


def test_distributed_data_parallel(unit):
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        x, parameters = torch.randn(6, 3, 8), list(unit.parameters())
        got, expected = (
            torch.autograd.grad(f(x)[0].square().sum(), parameters)
            for f in (torch.nn.parallel.DistributedDataParallel(unit), unit)
        )
    finally:
        distributed.destroy_process_group()
    assert all(map(torch.equal, got, expected))


def test_export(unit):
    """One program for all lengths and batches."""
    module = Output(unit).eval()
    sizes = {name: torch.export.Dim(name, min=1, max=1000) for name in ("T", "B")}
    shapes = {0: sizes["T"], 1: sizes["B"]}, {0: sizes["B"], 1: sizes["T"]}
    program = torch.export.export(module, batch(9, 2), dynamic_shapes=shapes).module()
    for inputs in (batch(9, 2), batch(30, 3), batch(2, 1)):
        assert torch.equal(program(*inputs), module(*inputs))


def test_compile(unit):
    module = Output(unit).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for inputs in (batch(9, 2), batch(30, 3)):
        assert torch.allclose(compiled(*inputs), module(*inputs), atol=1e-6)


@pytest.mark.parametrize("name", ["forward_ad", "jvp", "grad", "vmap"])
def test_compiled_transformations(name):
    function, reference = OPERATORS["talk_conv"]
    x, left, right, *_ = arguments(7, 2, 4, 2, 4, 3, torch.float64)
    transform = TRANSFORMATIONS[name]
    inputs, tangents = (x, left, right), tuple(map(torch.randn_like, (x, left, right)))
    compiled = torch.compile(
        functools.partial(transform, function), fullgraph=True, backend="aot_eager"
    )
    got, expected = compiled(inputs, tangents), transform(reference, inputs, tangents)
    assert all(map(torch.allclose, tree_leaves(got), tree_leaves(expected)))


# --- The table in the docs ---


def test_the_table_names_tests_that_exist():
    """Each row of docs/operator.md's table names one or more."""
    page = (ROOT / "docs/operator.md").read_text()
    table = page.split("<!-- transformations -->")[1].split("\n\n")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(rows) > 10
    for name, _, tests in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert files, name
        for path, test in files:
            assert f"def {test}(" in (ROOT / path).read_text(), test

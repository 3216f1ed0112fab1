"""How a call reaches a backend: its choice, and registration with PyTorch."""

import os

import torch
from torch._decomp import register_decomposition
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from talk_fairseq.ops import cpu_backend, cuda_backend
from talk_fairseq.ops.state import compute_dtype

# Whether a call is inside a transformation of torch.func: grad, vmap, jvp or one made of them.
transforms_are_active = torch._C._are_functorch_transforms_active

_LIBRARY = torch.library.Library("talk_conv", "DEF")


def uses_reference(x):
    """Return whether plain PyTorch computes `x`; its device says so, or TALK_CONV_BACKEND."""
    forced = os.environ.get("TALK_CONV_BACKEND")
    if forced is None:
        return not (x.is_cpu or x.is_cuda)
    device = x.device.type
    if forced not in ("reference", "cpu", "cuda"):
        raise ValueError(f"TALK_CONV_BACKEND: expected reference, cpu or cuda, got {forced!r}")
    if forced != "reference" and forced != device:
        fits = f"{device} or reference" if device in ("cpu", "cuda") else "reference"
        raise ValueError(f"TALK_CONV_BACKEND: expected {fits} for x on {x.device}, got {forced!r}")
    return forced == "reference"


def take_steps(state, x, other, reference, kernel, *sizes):
    """Return the outputs (S, B, C) for the next steps `x` of a sequence, and advance its `state`.

    They follow from `x`, an `other` input and `sizes`, by the backends' function `kernel`, which
    writes into the state, or in plain PyTorch by `reference`, which returns outputs and new rows.
    """
    S, plain = len(x), _are_plain(x, other, state.rows)
    if S > 1 or plain:
        # Kernels take all steps of a sequence, then those of the next: a row that they share may be
        # overwritten before both have read it. The reference knows no shared rows.
        state.settle()
    if plain:
        out, state.rows = reference(x, other, state.rows, state.steps, *sizes)
    elif x.numel() == 0:
        out = torch.empty_like(x)
    else:
        if other.dtype != x.dtype:  # of offsets, kernels take x's dtype or that of computing
            other = other.to(compute_dtype(x.dtype))
        step = getattr(backend_of(x), kernel)
        x, other = x.contiguous(), other.contiguous()
        out = step(x, other, state.rows, state.origin, state.steps, *sizes)
    state.advance(S)
    return out


def _are_plain(x, other, rows):
    """Return whether steps of decoding are computed in plain PyTorch, whose state is a new tensor.

    That is where the backend is the reference, where gradients of `x`, of the `other` input or of
    the state's `rows` are needed, and where PyTorch transforms, compiles or traces the step.
    """
    return (
        uses_reference(x)
        or other.dtype.itemsize > compute_dtype(x.dtype).itemsize  # kernels would round it
        or is_compiling()
        or torch.jit.is_tracing()
        or transforms_are_active()
        or forward_ad._current_level >= 0
        or rows.requires_grad  # also under no_grad: earlier steps may still need these rows
        or torch.is_grad_enabled()
        and (x.requires_grad or other.requires_grad)
    )


def backend_of(x):
    """Return the module whose kernels compute on the device of `x`."""
    return cuda_backend if x.is_cuda else cpu_backend


def empty_like(tensor):
    """Allocate memory of the shape and dtype of `tensor`, contiguous whatever its strides."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def register(forward, backward, tensors, sizes, reference):
    """Register an operator with PyTorch, and another one that computes its gradients.

    Their calls take half the time of those of operators that `torch.library.custom_op` makes.
    Channels, the last axis of all tensors, do not depend on each other: under `torch.vmap` an
    operator is called once, on the channels of all examples. Second derivatives are an error.

    Args:
        forward, backward: their names, and those of the backends' functions, which take contiguous
            tensors that are not empty. ``forward(*tensors, *sizes)`` returns a tensor like the
            first one; ``backward(dout, *tensors, *sizes)`` a gradient of each, or None of None.
        tensors, sizes: the arguments in PyTorch's notation, "Tensor x, Tensor? y" and "SymInt n";
            only the last tensor may be None.
        reference: `forward` in plain PyTorch, which computes it where an input has a tangent
            (forward-mode differentiation), and where torch.onnx exports it.
    """
    count = tensors.count("Tensor")
    arguments = f"{tensors}, {sizes}"

    def contiguous(inputs, count):
        given = count - (inputs[count - 1] is None)
        return *map(torch.Tensor.contiguous, inputs[:given]), *inputs[given:]

    def compute(*inputs):
        x = inputs[0]
        if x.numel() == 0:
            return empty_like(x)
        return getattr(backend_of(x), forward)(*contiguous(inputs, count))

    def fake(x, *_):
        return empty_like(x)

    def compute_gradients(*inputs):
        dout = inputs[0]
        if dout.numel() == 0:
            return tuple(gradient.zero_() for gradient in fake_gradients(*inputs))
        gradients = getattr(backend_of(dout), backward)(*contiguous(inputs, 1 + count))
        return gradients if gradients[-1] is not None else (*gradients[:-1], dout.new_empty(0))

    def fake_gradients(dout, *inputs):
        """Allocate the gradients; that of None, which an operator cannot return, is of size 0."""
        return tuple(dout.new_empty(0) if t is None else empty_like(t) for t in inputs[:count])

    def save(ctx, inputs):
        ctx.save_for_backward(*inputs[:count])
        ctx.sizes = inputs[count:]

    def differentiate(ctx, dout):
        saved = ctx.saved_tensors
        gradients = gradients_op(dout, *saved, *ctx.sizes)
        if saved[-1] is None:
            gradients = *gradients[:-1], None
        return *gradients, *[None] * len(ctx.sizes)

    results = ", ".join(["Tensor"] * count)
    schema = f"{backward}(Tensor dout, {arguments}) -> ({results})"
    gradients_op = _register(schema, compute_gradients, fake_gradients)
    schema = f"{forward}({arguments}) -> Tensor"
    return _register(schema, compute, fake, save, differentiate, reference)


def _register(schema, kernel, fake, save=None, differentiate=None, reference=None):
    """Register one operator: without `differentiate` and `reference` it has no derivatives."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    op = getattr(torch.ops.talk_conv, name).default
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"talk_conv::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"talk_conv::{name}", _vmap(op), lib=_LIBRARY)
    if reference is not None:
        # torch.onnx translates this instead of the operator. Without the second line, fake tensors
        # whose sizes are symbols would go through it as well.
        register_decomposition(op)(reference)
        register_decomposition(op, type="meta")(fake)
    redispatch, below = op.redispatch, torch._C._after_autograd_keyset

    def no_derivative(*_):
        raise RuntimeError(
            f"talk_conv::{name}: expected no derivative through it, got one; "
            "talk_conv_reference has second derivatives, and so has TALK_CONV_BACKEND=reference"
        )

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *inputs):
            if transforms_are_active():
                # PyTorch turns gradients off in here, but transformations around this one still
                # need theirs.
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = redispatch(keyset & below, *inputs)
            else:
                output = redispatch(keyset & below, *inputs)
            if save is not None:
                save(ctx, inputs)
            return output

        @staticmethod
        def backward(ctx, *gradients):
            return None, *(differentiate or no_derivative)(ctx, *gradients)

    # Function.apply expects to see all transformations of torch.func around a call at once; the
    # dispatcher comes here once for each. The `apply` below it takes them one at a time.
    apply = super(torch.autograd.Function, Gradient).apply

    def autograd(keyset, *inputs):
        transformed = transforms_are_active()
        # Looking for tangents takes microseconds, so not at each call. What torch.compile makes of
        # a function enters no level of forward_ad, but its tensors are of another type.
        if (
            transformed or forward_ad._current_level >= 0 or type(inputs[0]) is not torch.Tensor
        ) and _any_tangent(inputs):
            return (reference or no_derivative)(*inputs)
        if torch.is_grad_enabled():
            for value in inputs:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    if not transformed:
                        return apply(keyset, *inputs)
                    with enable_single_level_autograd_function():
                        return apply(keyset, *inputs)
        return redispatch(keyset & below, *inputs)

    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    return op


def _any_tangent(inputs):
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return any(forward_ad.unpack_dual(tensor, level=0).tangent is not None for tensor in tensors)


def _vmap(op):
    """The rule of `op` for torch.vmap: the mapped axis becomes more channels."""

    def rule(info, in_dims, *inputs):
        size = info.batch_size
        if size == 0:
            raise ValueError("torch.vmap: expected a mapped axis of at least 1, got 0")

        def fold(value, dim):
            if not isinstance(value, torch.Tensor):
                return value
            if dim is None:
                value, dim = value.expand(size, *value.shape), 0
            return value.movedim(dim, -2).flatten(-2)

        def unfold(result):
            return result.unflatten(-1, (size, result.shape[-1] // size)), result.dim() - 1

        results = op(*map(fold, inputs, in_dims))
        if isinstance(results, torch.Tensor):
            return unfold(results)
        return tuple(zip(*map(unfold, results)))

    return rule

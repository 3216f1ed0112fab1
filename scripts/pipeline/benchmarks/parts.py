"""Where the time of a model goes, by its parts: PyTorch's profiler, added up."""

import contextlib
from functools import partial

import torch

from pipeline.benchmarks.harness import print_table

# The part that a module belongs to, by the last of its names; the innermost one counts.
PARTS = {
    "self_attn": "mixing over time",
    "conv": "mixing over time",
    "linear1": "mixing: projections",
    "linear2": "mixing: projections",
    "encoder_attn": "encoder attention",
    "fc1": "feed-forward",
    "fc2": "feed-forward",
    "embed_tokens": "embeddings",
    "embed_positions": "embeddings",
    "output_projection": "vocabulary",
}
LAYER = "dropout, residuals, rest"
# Likewise for the ranges that fairseq and PyTorch record.
RANGES = {"multiply-grads": "optimizer", "clip-grads": "optimizer", "optimizer": "optimizer"}


def ancestors(event):
    """Yield an event of the profiler and those that it lies in, from the inside out."""
    while event is not None:
        yield event
        event = event.cpu_parent


@contextlib.contextmanager
def named_parts(model, **others):
    """Record a range of the profiler, "part: …", around each part of `model` and the `others`."""
    parts = [*((module, name) for name, module in others.items()), (model, LAYER)]
    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        if last in PARTS:
            parts.append((module, PARTS[last]))
        elif isinstance(module, torch.nn.LayerNorm):
            parts.append((module, "norms"))
        elif above.endswith(".layers"):  # a search calls these, and not the model
            parts.append((module, LAYER))
    handles, entered = [], []

    def enter(name, *_):
        entered.append(torch.profiler.record_function(f"part: {name}"))
        entered[-1].__enter__()

    def leave(*_):
        entered.pop().__exit__(None, None, None)

    for module, name in parts:
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def profile(run, steps, model, **others):
    """Return ``{part: {"forward": ms, "backward": ms, "operators": {name: ms}}}`` per step.

    Times are of the operators themselves: on a GPU of its kernels, else of the CPU, where a part
    also has the time of Python between them. An operator of the backward pass belongs to the part
    with the forward operator whose gradient it computes.

    Args:
        run: does so many `steps`; it is called twice, and measured once.
        model: a module of fairseq, which has the PARTS.
        others: {part: another module that is one}.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with named_parts(model, **others):
        run()  # warm up, with the hooks
        with torch.profiler.profile(activities=activities) as profiler:
            run()
    # Kernels and ranges of a GPU are events as well: they already count in the CPU's operators.
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]
    kernels = len(activities) > 1

    undone = {}  # sequence number of autograd -> part of the forward operator
    parts = {}
    for event in events:
        for above in ancestors(event):
            if above.name.startswith("part: "):
                parts[event.id] = above.name.removeprefix("part: "), "forward"
                if event.sequence_nr >= 0:
                    undone[event.sequence_nr] = parts[event.id][0]
                break
            if above.name in RANGES:
                parts[event.id] = RANGES[above.name], "backward"
                break
    rows = {}
    for event in events:
        own = event.self_device_time_total if kernels else event.self_cpu_time_total
        own /= 1e3 * steps
        if event.id in parts:
            part, way = parts[event.id]
        else:
            numbers = [above.sequence_nr for above in ancestors(event) if above.sequence_nr >= 0]
            part, way = undone.get(numbers[-1] if numbers else None, "rest of the step"), "backward"
        row = rows.setdefault(part, {"forward": 0.0, "backward": 0.0, "operators": {}})
        row[way] += own
        row["operators"][event.name] = row["operators"].get(event.name, 0.0) + own
    return rows


def print_profile(title, rows, top=5):
    """Print the parts of a step, the longest first, with the `top` operators of each."""
    sums = {part: row["forward"] + row["backward"] for part, row in rows.items()}
    total = sum(sums.values())
    if not total:
        print(f"\n{title}: the profiler saw no time (on a GPU it needs CUPTI)")
        return
    lines = {}
    for part in sorted(rows, key=sums.get, reverse=True):
        row = rows[part]
        longest = sorted(row["operators"].items(), key=lambda item: -item[1])[:top]
        operators = ", ".join(f"{short_name(op)} {ms:.1f}" for op, ms in longest)
        times = f"{row['forward']:.1f}", f"{row['backward']:.1f}"
        lines[part] = *times, f"{sums[part] / total:.1%}", operators
    headers = "forward", "backward", "share"
    print_table(f"{title}: {total:,.1f} ms per step", headers, lines, ["operators, ms"])


def short_name(operator):
    """Return an operator's name without what all have."""
    if operator.startswith("part: "):
        return "Python"
    return operator.removeprefix("aten::").replace(
        "autograd::engine::evaluate_function: ", "engine: "
    )

"""Beam search through fairseq's own generator: TaLK beside the Transformer and its relatives.

    benchmark_decoding.py                all of it, on a GPU where there is one
    benchmark_decoding.py --lengths 20,100 --beams 5 --models talkconv,transformer --limit 60
    benchmark_decoding.py --positions    the decoder alone, after 16, 1,000 and 16,000 tokens
    benchmark_decoding.py --profile      then where a step of the search goes, by part of the model

The encoder-decoders have the same sizes and layers, random weights, and no embeddings in common
(tied ones would have them repeat one word). The convolutions have GLU, and kernels as wide as
TaLK's windows; the Transformer has as many layers as they. fairseq's DynamicConv always unfolds:
`dynamicconv-band` is the same model with the encoder's convolutions in fairseq's other form, band
matrices. Models and generator are built as fairseq-generate does it, and lengths are forced: no
hypothesis ends before the target length, and none after it.

First checks each model against itself: scores of beam search, and logits of decoding step by
step, to a full pass over the same tokens. Stops where they differ. Then runs the models in turn, in
one process, and takes medians. Tokens are those of the best hypotheses, with their ends.

Peak memory is what generating a batch takes beyond the model: on CUDA of PyTorch's allocator, on
Linux without it the high-water mark of the process's resident memory; elsewhere there is none.

With --positions: tokens a second of single steps of a small decoder, from copies of its state taken
at each position, in turn; and the state's bytes. Positions that take over --limit seconds to reach
are left out.

Writes a table, PREFIX.json (after each measurement, so an interrupted run loses none) and
PREFIX.png.
"""

import argparse
import contextlib
import copy
import ctypes
import io
import json
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import talk_fairseq  # noqa: F401 (first, as it mends fairseq and keeps its logging quiet)

# isort: split
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from pipeline.benchmarks.harness import Unavailable, failures_as_unavailable
from pipeline.benchmarks.profile import print_profile, profile
from pipeline.common.files import write_whole

MODELS = ("talkconv", "transformer", "lightconv", "dynamicconv", "dynamicconv-band")
# Of logits, relative to the largest, and of log-probabilities.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
PROBE = 4  # tokens generated to predict how long a batch takes
STEPS = 20  # decoder steps of a turn at a position


@dataclass
class Sizes:
    """Of a model, the same on both sides but for the layers."""

    width: int = 512
    ffn: int = 1024
    heads: int = 4
    encoder_layers: int = 7
    decoder_layers: int = 6
    vocabulary: int = 10_000
    max_positions: int = 1024


# --- The models, as fairseq builds them ---


def build_task(vocabulary):
    """A translation task with one dictionary of `vocabulary` entries for both sides."""
    dictionary = Dictionary()
    for index in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"word{index}")
    return TranslationTask(TranslationConfig(), dictionary, dictionary)


def build_model(name, sizes, task, device, dtype):
    """The model `name` of MODELS, with random weights, in evaluation mode."""
    sides = {"embed_dim": sizes.width, "ffn_embed_dim": sizes.ffn, "attention_heads": sizes.heads}
    options = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sides.items()}
    layers = {"encoder": sizes.encoder_layers, "decoder": sizes.decoder_layers}
    # The windows of talkconv_iwslt_de_en, to either side in the encoder.
    windows = {side: ([1, 3, 7] + [15] * n)[:n] for side, n in layers.items()}
    arch, _, form = name.partition("-")
    if arch == "talkconv":
        options.update({f"{side}_max_left": windows[side] for side in layers})
    elif arch in ("lightconv", "dynamicconv"):
        kind = "lightweight" if arch == "lightconv" else "dynamic"
        options.update({f"{side}_conv_type": kind for side in layers}, weight_softmax=True)
        options.update({f"{side}_glu": True for side in layers})
        options["encoder_kernel_size_list"] = [2 * w + 1 for w in windows["encoder"]]
        options["decoder_kernel_size_list"] = [w + 1 for w in windows["decoder"]]
        arch = "lightconv"
    args = Namespace(
        arch=arch,
        **options,
        **{f"{side}_layers": n for side, n in layers.items()},
        max_source_positions=sizes.max_positions,
        max_target_positions=sizes.max_positions,
    )
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(0)
    # Where there is a GPU, fairseq's convolutions print that their CUDA extension is not built.
    with contextlib.redirect_stdout(io.StringIO()):
        model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
        if form == "band":
            for layer, K in zip(model.encoder.layers, args.encoder_kernel_size_list):
                band = DynamicConv1dTBC(
                    sizes.width, K, K // 2, sizes.heads, args.weight_dropout, weight_softmax=True
                )
                band.weight_linear = layer.conv.weight_linear
                layer.conv = band
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()


def build_generator(model, task, beam, target):
    """fairseq's SequenceGenerator for hypotheses of `target` tokens and their end."""
    cfg = SimpleNamespace(generation=GenerationConfig(beam=beam, min_len=target, max_len_b=target))
    model.prepare_for_inference_(cfg)
    return task.build_generator([model], cfg.generation)


def random_batch(task, B, S, device):
    """B sentences of S random words, the last of them the end."""
    dictionary = task.source_dictionary
    generator = torch.Generator().manual_seed(S)
    words = torch.randint(dictionary.nspecial, len(dictionary), (B, S), generator=generator)
    words[:, -1] = dictionary.eos()
    net_input = {"src_tokens": words.to(device), "src_lengths": torch.full((B,), S).to(device)}
    return {"id": torch.arange(B, device=device), "net_input": net_input}


def generate(generator, model, batch, target):
    """``(seconds, hypotheses)`` of one batch. SystemExit if a length is not the forced one."""
    _synchronize(batch["id"])
    start = time.perf_counter()
    hypotheses = generator.generate([model], batch)
    _synchronize(batch["id"])
    seconds = time.perf_counter() - start
    lengths = {len(hypothesis["tokens"]) for beam in hypotheses for hypothesis in beam}
    if lengths != {target + 1}:
        raise SystemExit(
            f"hypotheses: expected {target} tokens and their end, got lengths {lengths}"
        )
    return seconds, hypotheses


def _synchronize(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()


# --- Correctness first ---


@torch.no_grad()
def step_by_step(model, batch, previous):
    """Logits (B, T, V) of the decoder, given one more of the tokens `previous` (B, T) at a time."""
    encoder_out = model.encoder.forward_torchscript(batch["net_input"])
    state = {}
    return torch.cat(
        [
            model.decoder(previous[:, :t], encoder_out=encoder_out, incremental_state=state)[0]
            for t in range(1, previous.shape[1] + 1)
        ],
        dim=1,
    )


@torch.no_grad()
def check(name, model, task, beam, device, dtype):
    """Raise SystemExit unless decoding with `model` equals a full pass over what it decoded."""
    B, S, target = 3, 12, 24  # more tokens than the largest window
    batch = random_batch(task, B, S, device)
    with failures_as_unavailable():
        generator = build_generator(model, task, beam, target)
        _, hypotheses = generate(generator, model, batch, target)
        tokens = torch.stack([beams[0]["tokens"] for beams in hypotheses])
        scores = torch.stack([beams[0]["positional_scores"] for beams in hypotheses])
        previous = tokens.roll(1, dims=1)  # each hypothesis ends with what it begins with
        full = model(**batch["net_input"], prev_output_tokens=previous)
        logits = step_by_step(model, batch, previous)
        wanted = model.get_normalized_probs(full, log_probs=True)
    wanted = wanted.gather(2, tokens[..., None])[..., 0]
    for what, got, want, scale in (
        ("logits of decoding step by step", logits, full[0], full[0].abs().max()),
        (f"scores of beam {beam}", scores, wanted, 1.0),
    ):
        error = ((got.float() - want.float()).abs().max() / scale).item()
        if not error <= TOLERANCES[dtype]:
            raise SystemExit(f"{name}: the {what} differ from a full pass by {error:.2g}: "
                             "not measured")  # fmt: skip


# --- Memory ---


class PeakMemory:
    """As a context, `bytes` is what was needed inside it at most beyond what was held before.

    None where there is no such figure.
    """

    def __init__(self, device):
        self.device, self.bytes = device, None

    def __enter__(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = None
            with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
                ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed would be used unseen
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
                self.before = self.resident("VmRSS")
        return self

    def __exit__(self, *_):
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        elif self.before is not None:
            self.bytes = max(0, self.resident("VmHWM") - self.before)

    @staticmethod
    def resident(field):
        status = Path("/proc/self/status").read_text()
        return int(status.partition(field + ":")[2].split()[0]) * 1024


def refuse_too_large(sizes, device, rows, B, S, target, bytes_each):
    """Say so beforehand where a CPU's memory would not do; a GPU may try."""
    if device == "cpu" and hasattr(os, "sysconf"):
        # Keys and values of the decoder, then the encoder's unfolded windows.
        needed = 2 * (sizes.decoder_layers + 1) * rows * (S + target) * sizes.width
        needed = bytes_each * max(needed, 2 * 31 * B * S * sizes.width)
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if needed > 0.8 * available:
            raise Unavailable(f"out of memory: may need {needed / 2**30:.0f} GiB")


# --- The first table: beam search ---


def predict(model, task, batch, beam, target):
    """Seconds that generating `batch` takes, about, by a few tokens of it; also warms up."""
    encode = partial(model.encoder.forward_torchscript, batch["net_input"])
    probe = build_generator(model, task, beam, PROBE)
    with torch.no_grad():
        encode()
        _synchronize(batch["id"])
        start = time.perf_counter()
        encode()
        _synchronize(batch["id"])
    encoding = time.perf_counter() - start
    seconds, _ = generate(probe, model, batch, PROBE)
    return encoding + max(0, seconds - encoding) * (target + 1) / (PROBE + 1)


def measure(models, task, sizes, cell, args, results, save):
    """Fill `results`, {model: {"seconds": …, …} or {"error": why}}, calling `save` at each."""
    B, beam, S, target = (cell[key] for key in ("batch", "beam", "source", "target"))
    bytes_each = torch.tensor([], dtype=getattr(torch, args.dtype)).element_size()
    batch = random_batch(task, B, S, args.device)
    runs = {}
    for name, model in models.items():
        show_progress(f"{title(cell)}: {name}, warming up")
        try:
            if isinstance(model, Unavailable):
                raise model
            refuse_too_large(sizes, args.device, B * beam, B, S, target, bytes_each)
            with failures_as_unavailable():
                predicted = predict(model, task, batch, beam, target)
            if predicted > args.limit:
                raise Unavailable(f"too slow: about {predicted:.0f} s a batch")
            runs[name] = (build_generator(model, task, beam, target), model)
        except Unavailable as error:
            results[name] = {"error": str(error)}
            save()

    profiled = dict(runs) if args.profile else {}
    for turn in range(args.turns):
        for name, run in list(runs.items()):
            show_progress(f"{title(cell)}: {name}, turn {turn + 1} of {args.turns}")
            try:
                with failures_as_unavailable(), PeakMemory(args.device) as peak:
                    seconds, _ = generate(*run, batch, target)
            except Unavailable as error:
                results[name] = {"error": str(error)}
                del runs[name]
            else:
                row = results.setdefault(name, {"turns": [], "memory": peak.bytes})
                row["turns"].append(seconds)
                row["seconds"] = statistics.median(row["turns"])
                row["sentences_per_second"] = B / row["seconds"]
                row["tokens_per_second"] = B * (target + 1) / row["seconds"]
                if seconds > args.limit / 4:
                    del runs[name]  # once is enough
            save()
    for name, run in profiled.items():
        show_progress(f"{title(cell)}: {name}, profile")
        if "error" not in results[name]:
            results[name]["profile"] = profile_search(*run, batch, target)
            save()


def profile_search(generator, model, batch, target):
    """Where a step of the search goes, the encoder's share included; see profile_parts.profile."""

    def run():
        with torch.profiler.record_function("part: beam search"):
            generate(generator, model, batch, target)

    return profile(run, target + 1, model)


def title(cell):
    """A cell in words."""
    return ", ".join(f"{name} {value:,}" for name, value in cell.items() if name != "results")


def show_progress(text=""):
    """On a terminal, one line that the next replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_cell(cell):
    """Sentences and tokens a second, how many times faster TaLK is, and memory."""
    show_progress()
    print(f"\n{title(cell)}")
    print(f"  {'':18} {'sent/s':>9} {'tokens/s':>9} {'ms/step':>9} {'TaLK is':>9} {'peak MiB':>9}")
    base = cell["results"].get("talkconv", {}).get("seconds")
    for name in sorted(cell["results"], key=MODELS.index):
        row = cell["results"][name]
        if "error" in row:
            print(f"  {name:18} {row['error']}")
            continue
        ratio = f"{row['seconds'] / base:.2f}x" if base else ""
        memory = "" if row["memory"] is None else f"{row['memory'] / 2**20:,.1f}"
        print(f"  {name:18} {row['sentences_per_second']:9,.2f} {row['tokens_per_second']:9,.1f} "
              f"{row['seconds'] / (cell['target'] + 1) * 1e3:9,.2f} {ratio:>9} "
              f"{memory:>9}")  # fmt: skip
    for name in sorted(cell["results"], key=MODELS.index):
        if "profile" in cell["results"][name]:
            print_profile(name, cell["results"][name]["profile"])
    sys.stdout.flush()


def measure_grid(task, sizes, args, record, save):
    """Every beam, batch and length: cells of `record`, printed as they are done."""
    for beam in args.beams:
        # A model of its own for each beam: fairseq's generator may leave its beam in a model.
        models = build_checked(task, sizes, args, beam)
        for S in args.lengths:
            for B in args.batches:
                cell = {"batch": B, "beam": beam, "source": S, "target": args.target or S}
                cell["results"] = {}
                record["cells"].append(cell)
                try:
                    measure(models, task, sizes, cell, args, cell["results"], save)
                finally:
                    print_cell(cell)


def build_checked(task, sizes, args, beam):
    """{name: model, or an Unavailable that says why not}, after `check`."""
    models = {}
    for name in args.models:
        show_progress(f"beam {beam}: checking {name}")
        try:
            model = build_model(name, sizes, task, args.device, args.dtype)
            check(name, model, task, beam, args.device, args.dtype)
            models[name] = model
        except Unavailable as error:
            models[name] = error
    show_progress()
    return models


# --- The second table: the decoder alone, far from the start ---


class Decoding:
    """A decoder in the middle of a sentence: `step` feeds it one more token."""

    def __init__(self, model, task, B, longest, device):
        batch = random_batch(task, B, 20, device)
        self.decoder = model.decoder
        with torch.no_grad():
            self.encoder_out = model.encoder.forward_torchscript(batch["net_input"])
        self.tokens = random_batch(task, B, longest, device)["net_input"]["src_tokens"]
        self.position, self.state = 0, {}

    @torch.no_grad()
    def steps(self, count):
        """Seconds that `count` more steps take."""
        _synchronize(self.tokens)
        start = time.perf_counter()
        for _ in range(count):
            self.position += 1
            self.decoder(
                self.tokens[:, : self.position],
                encoder_out=self.encoder_out,
                incremental_state=self.state,
            )
        _synchronize(self.tokens)
        return time.perf_counter() - start

    def state_bytes(self):
        """Bytes of the incremental state, as saved."""
        file = io.BytesIO()
        torch.save(self.state, file)
        return file.tell()

    def copy(self):
        """The same place in the same sentence, with a state of its own."""
        other = copy.copy(self)
        other.state = copy.deepcopy(self.state)
        return other


def measure_positions(task, sizes, args, record, save):
    """Tokens a second of each model around each position, cells of `record`."""
    models = build_checked(task, sizes, args, beam=1)
    longest = max(args.positions) + STEPS
    for B in args.batches:
        cell = {"batch": B, "results": {}}
        record["cells"].append(cell)
        for name, model in models.items():
            rows = cell["results"].setdefault(name, {})
            if isinstance(model, Unavailable):
                rows.update({str(position): {"error": str(model)} for position in args.positions})
                continue
            going, places, took = Decoding(model, task, B, longest, args.device), {}, 0.0
            for position in sorted(args.positions):
                show_progress(f"batch {B}: {name}, on the way to position {position:,}")
                while going.position < position and took <= args.limit:
                    took += going.steps(min(STEPS, position - going.position))
                if going.position < position:
                    error = f"too slow: at {going.position:,} after {took:.0f} s"
                    rows[str(position)] = {"error": error}
                else:
                    places[position] = going.copy()
                    rows[str(position)] = {"state": places[position].state_bytes()}
            del going
            for position, place in places.items():
                place.copy().steps(STEPS)  # warm up
                rows[str(position)]["turns"] = []
            # Positions in turn, so that a busy moment hits them all.
            for _ in range(args.turns):
                for position, place in places.items():
                    row = rows[str(position)]
                    if STEPS * sum(row["turns"]) > args.limit / 4:
                        continue  # that was enough
                    row["turns"].append(place.copy().steps(STEPS) / STEPS)
                    row["seconds"] = statistics.median(row["turns"])
                    row["tokens_per_second"] = B / row["seconds"]
            save()
        print_positions(cell)


def print_positions(cell):
    """Tokens a second and the state's size at each position; the last as a share of the first."""
    show_progress()
    positions = list(next(iter(cell["results"].values())))
    print(f"\nbatch {cell['batch']}: tokens a second (MiB of state) around a position")
    print(f"  {'':18} " + " ".join(f"{int(p):>18,}" for p in positions) + "  last / first")
    for name, rows in cell["results"].items():
        line = ""
        for position in positions:
            row = rows[position]
            if "error" not in row:
                state = f"({row['state'] / 2**20:,.2f})"
                line += f" {row['tokens_per_second']:9,.0f} {state:>8}"
        first, last = rows[positions[0]], rows[positions[-1]]
        if "error" in last:
            line += "  " + last["error"]
        else:
            line += f" {first['seconds'] / last['seconds']:13.0%}"
        print(f"  {name:18} {line[1:]}")
    sys.stdout.flush()


# --- Output ---


def plot(path, panels, xlabel):
    """Curves on log-log axes: `panels` is {(title, ylabel): {model: [(x, y), …]}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False)
    markers = dict(zip(MODELS, "osv^<"))
    for axis, ((name, ylabel), curves) in zip(axes.flat, panels.items()):
        for model in sorted(curves, key=MODELS.index):
            points = [(x, y) for x, y in curves[model] if y]
            width = 2.5 if model == "talkconv" else 1
            color = f"C{MODELS.index(model)}"
            axis.loglog(
                *(zip(*points) if points else ([], [])),
                marker=markers[model], label=model, linewidth=width, color=color,
            )  # fmt: skip
        axis.set(title=name, xlabel=xlabel, ylabel=ylabel)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, frameon=False)
    figure.tight_layout(rect=(0, 0.12 / lines, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_grid(record, path):
    """Sentences a second and peak memory over the source length, a column for each beam, batch."""
    panels = {}
    for ylabel, key, unit in (
        ("sentences a second", "sentences_per_second", 1),
        ("peak memory, MiB", "memory", 2**20),
    ):
        for cell in record["cells"]:
            curves = panels.setdefault((f"batch {cell['batch']}, beam {cell['beam']}", ylabel), {})
            for name, row in cell["results"].items():
                curves.setdefault(name, []).append((cell["source"], (row.get(key) or 0) / unit))
    plot(path, panels, "source length")


def plot_positions(record, path):
    """Tokens a second and the state's size over the position, for each batch."""
    panels = {}
    for cell in record["cells"]:
        for ylabel, key in (("tokens a second", "tokens_per_second"), ("state, bytes", "state")):
            panels[f"batch {cell['batch']}", ylabel] = {
                name: [(int(position), row.get(key)) for position, row in rows.items()]
                for name, rows in cell["results"].items()
            }
    plot(path, panels, "position")


def parse(arguments=None):
    """The options, with what depends on others filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def at_least(lowest):
        def integer(text):
            if int(text) < lowest:
                raise argparse.ArgumentTypeError(f"expected at least {lowest}, got {text}")
            return int(text)

        def integers(text):
            return [integer(word) for word in text.split(",")]

        return integer, integers

    natural, naturals = at_least(1)

    def model_names(text):
        names = text.split(",")
        for name in names:
            if name not in MODELS:
                expected = ", ".join(MODELS)
                raise argparse.ArgumentTypeError(f"expected some of {expected}, got {name}")
        return names

    positions = [16, 1000, 16_000]
    add = parser.add_argument
    add(
        "--lengths",
        type=at_least(2)[1],
        default=[20, 100, 400],
        help="tokens of a source (default: 20,100,400)",
    )
    add("--target", type=natural, help="tokens of a hypothesis (default: as the source)")
    add(
        "--batches",
        type=naturals,
        help="sentences at a time (default: 1,64; with --positions 1,16)",
    )
    add("--beams", type=naturals, default=[1, 5], help="sizes of the beam (default: 1,5)")
    add("--models", type=model_names, default=list(MODELS), help=f"default: {','.join(MODELS)}")
    add("--positions", type=naturals, nargs="?", const=positions, help="default: 16,1000,16000")
    add("--dtype", choices=TOLERANCES, default="float32", help="default: float32")
    add("--turns", type=natural, help="turns the medians are of (3; with --positions 15)")
    add("--limit", type=float, default=120, help="seconds that a batch may take (default: 120)")
    add("--profile", action="store_true", help="then print where a step goes, model by model")
    add("--cpu", action="store_true", help="measure the CPU where there is a GPU")
    add("--output", type=Path, metavar="PREFIX", help="default: results/decoding[_positions]")
    small = Sizes(256, 512, 4, 2, 2, 1000)  # 16,000 steps should not take long
    for name in ("width", "ffn", "heads", "encoder_layers", "decoder_layers", "vocabulary"):
        default, other = getattr(Sizes(), name), getattr(small, name)
        flag = "--" + name.replace("_", "-")
        add(flag, type=natural, help=f"default: {default}; with --positions {other}")
    args = parser.parse_args(arguments)

    args.device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    args.batches = args.batches or ([1, 16] if args.positions else [1, 64])
    args.turns = args.turns or (15 if args.positions else 3)
    args.output = args.output or Path("results/decoding" + "_positions" * bool(args.positions))
    sizes = asdict(small if args.positions else Sizes())
    sizes.update({name: getattr(args, name) for name in sizes if getattr(args, name, None)})
    longest = max([*args.lengths, args.target or 0, *(args.positions or [])]) + STEPS + 2
    sizes["max_positions"] = max(sizes["max_positions"], longest)
    args.sizes = Sizes(**sizes)
    if args.profile and args.positions:
        parser.error("--profile: expected none with --positions, got both")
    if args.sizes.width % (2 * args.sizes.heads):
        parser.error(f"--width: expected a multiple of 2 x {args.sizes.heads} heads, "
                     f"got {args.sizes.width}")  # fmt: skip
    if args.sizes.vocabulary < 2 * max(args.beams) + 10:
        parser.error(f"--vocabulary: expected at least 2 beams and 10 entries, "
                     f"got {args.sizes.vocabulary}")  # fmt: skip
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    sizes = args.sizes
    task = build_task(sizes.vocabulary)
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if not args.positions:
        for beam in args.beams:
            build_checked(task, sizes, args, beam)
    print(f"Decoding equals a full pass in {args.dtype}. Measuring on {machine}, torch "
          f"{torch.__version__}; {sizes}.", flush=True)  # fmt: skip

    record = {"machine": machine, "torch": torch.__version__, "dtype": args.dtype}
    record.update(sizes=asdict(sizes), cells=[])
    json_path, png_path = (args.output.with_name(args.output.name + e) for e in (".json", ".png"))

    def save():
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json_path, json.dumps(record, indent=1) + "\n")

    try:
        (measure_positions if args.positions else measure_grid)(task, sizes, args, record, save)
    finally:  # also of an interrupted run
        save()
        if record["cells"]:
            (plot_positions if args.positions else plot_grid)(record, png_path)
        print(f"\nwritten: {json_path} and {png_path}")

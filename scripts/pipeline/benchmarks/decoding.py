"""Beam search through fairseq's own generator: TaLK beside the Transformer and its relatives.

    benchmark_decoding.py                all of it, on a GPU where there is one
    benchmark_decoding.py --lengths 20,100 --beams 5 --models talkconv,transformer --limit 60
    benchmark_decoding.py --positions    the decoder alone, after 16, 1,000 and 16,000 tokens
    benchmark_decoding.py --profile      then where a step of the search goes, by part of the model

The encoder-decoders have the same sizes and layers, random weights, and no embeddings in common
(tied ones would make them repeat one word). The convolutions have GLU, and kernels as wide as
TaLK's windows; the Transformer has as many layers. fairseq's DynamicConv always unfolds:
`dynamicconv-band` is the same model with the encoder's convolutions in fairseq's other form, band
matrices. Models and generator are built as fairseq-generate does it, and lengths are forced: no
hypothesis ends before the target length, and none after it.

First checks each model against itself: scores of beam search, and logits of decoding step by
step, to a full pass over the same tokens. Stops where they differ. Then runs the models in turn, in
one process, and takes medians. Tokens are those of the best hypotheses, with their ends.

Peak memory is what generating a batch takes beyond the model: on CUDA of PyTorch's allocator, on
Linux without it the high-water mark of the process's resident memory; elsewhere there is none.

With --positions: tokens per second of single steps of a small decoder, from copies of its state
taken at each position, in turn; and the state's bytes. Positions that take over --limit seconds to
reach are left out.

Writes a table, PREFIX.json (after each measurement, so an interrupted run loses none) and
PREFIX.png.
"""

import copy
import io
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from pipeline.benchmarks import harness, models
from pipeline.benchmarks.harness import Unavailable, natural, naturals, show_progress, some_of
from pipeline.benchmarks.models import Sizes
from pipeline.benchmarks.parts import print_profile, profile

# isort: split
from fairseq.dataclass.configs import GenerationConfig

MODELS = tuple(name for name in models.MODELS if name != "transformer-arch")
SMALL = Sizes(256, 512, 4, 2, 2, 1000)  # for --positions, as 16,000 steps should not take long
WINDOWS = [1, 3, 7, 15]  # of talkconv_iwslt_de_en, to either side in the encoder
# Of logits, relative to the largest, and of log-probabilities.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
PROBE = 4  # tokens generated to predict how long a batch takes
STEPS = 20  # decoder steps of a turn at a position


# --- The models and the search, as fairseq-generate builds them ---


def build_model(name, sizes, task, device, dtype):
    """Return the model `name` of MODELS, with random weights, in evaluation mode."""
    cfg = models.configure(models.model_options(name, sizes, WINDOWS, glu=True))
    model = models.build(cfg, task, ("encoder",) if name.endswith("-band") else ())
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()


def build_generator(model, task, beam, target):
    """Return fairseq's SequenceGenerator for hypotheses of `target` tokens and their end."""
    cfg = SimpleNamespace(generation=GenerationConfig(beam=beam, min_len=target, max_len_b=target))
    model.prepare_for_inference_(cfg)
    return task.build_generator([model], cfg.generation)


def random_batch(task, B, S, device):
    """Return B sentences of S random words, the last of them the end."""
    dictionary = task.source_dictionary
    generator = torch.Generator().manual_seed(S)
    words = torch.randint(dictionary.nspecial, len(dictionary), (B, S), generator=generator)
    words[:, -1] = dictionary.eos()
    net_input = {"src_tokens": words.to(device), "src_lengths": torch.full((B,), S).to(device)}
    return {"id": torch.arange(B, device=device), "net_input": net_input}


def generate(generator, model, batch, target):
    """Return ``(seconds, hypotheses)`` of one batch.

    Raises SystemExit if a length is not the forced one.
    """
    seconds, hypotheses = harness.timed(partial(generator.generate, [model], batch))
    lengths = {len(hypothesis["tokens"]) for beam in hypotheses for hypothesis in beam}
    if lengths != {target + 1}:
        raise SystemExit(
            f"hypotheses: expected {target} tokens and their end, got lengths {lengths}"
        )
    return seconds, hypotheses


# --- Correctness first ---


@torch.no_grad()
def step_by_step(model, batch, previous):
    """Return logits (B, T, V) of the decoder, given the tokens `previous` (B, T) one by one."""
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
    with harness.failures_as_unavailable():
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
            text = f"{name}: the {what} differ from a full pass by {error:.2g}: not measured"
            raise SystemExit(text)


def build_checked(task, args, beam):
    """Return {name: model, or an Unavailable that says why not}, after `check`."""
    built = {}
    for name in args.models:
        show_progress(f"beam {beam}: checking {name}")
        try:
            model = build_model(name, args.sizes, task, args.device, args.dtype)
            check(name, model, task, beam, args.device, args.dtype)
            built[name] = model
        except Unavailable as error:
            built[name] = error
    show_progress()
    return built


# --- The first table: beam search ---


def refuse_large_batch(args, rows, B, S, target):
    """Raise Unavailable for sizes that a CPU's memory probably lacks room for; a GPU may try."""
    # Keys and values of the decoder, or the encoder's unfolded windows.
    width = args.sizes.width
    needed = 2 * (args.sizes.decoder_layers + 1) * rows * (S + target) * width
    needed = max(needed, 2 * 31 * B * S * width) * getattr(torch, args.dtype).itemsize
    harness.refuse_too_large(needed, 0.8, args.device, "may need")


def predict(model, task, batch, beam, target):
    """Return about how many seconds `batch` takes, by a few tokens of it; also warms up."""
    encode = partial(model.encoder.forward_torchscript, batch["net_input"])
    probe = build_generator(model, task, beam, PROBE)
    with torch.no_grad():
        encode()
        encoding, _ = harness.timed(encode)
    seconds, _ = generate(probe, model, batch, PROBE)
    return encoding + max(0, seconds - encoding) * (target + 1) / (PROBE + 1)


def measure(built, task, cell, args, results, save):
    """Fill `results`, {model: {"seconds": …, …} or {"error": why}}, calling `save` at each."""
    B, beam, S, target = (cell[key] for key in ("batch", "beam", "source", "target"))
    batch = random_batch(task, B, S, args.device)
    runs, turns = {}, {}
    for name, model in built.items():
        show_progress(f"{title(cell)}: {name}, warming up")
        try:
            if isinstance(model, Unavailable):
                raise model
            refuse_large_batch(args, B * beam, B, S, target)
            with harness.failures_as_unavailable():
                predicted = predict(model, task, batch, beam, target)
            if predicted > args.limit:
                raise Unavailable(f"too slow: about {predicted:.0f} s per batch")
            runs[name] = build_generator(model, task, beam, target), model
            turns[name] = []
        except Unavailable as error:
            results[name] = {"error": str(error)}
            save()

    def step(name):
        turn = len(turns[name]) + 1
        show_progress(f"{title(cell)}: {name}, turn {turn} of {args.turns}")
        with harness.PeakMemory(args.device) as peak:
            seconds, _ = generate(*runs[name], batch, target)
        return seconds, peak.bytes

    steps = {name: partial(step, name) for name in runs}
    for name, measured in harness.in_turn(steps, args.turns):
        if isinstance(measured, Unavailable):
            results[name] = {"error": str(measured)}
        else:
            seconds, memory = measured
            turns[name].append(seconds)
            row = results.setdefault(name, {"turns": [], "memory": memory})
            row |= harness.summary(turns[name], sentences=B, tokens=B * (target + 1))
            if seconds > args.limit / 4:
                del steps[name]  # once is enough
        save()
    for name, run in runs.items() if args.profile else ():
        show_progress(f"{title(cell)}: {name}, profile")
        if "error" not in results[name]:
            results[name]["profile"] = profile_search(*run, batch, target)
            save()


def profile_search(generator, model, batch, target):
    """Return where a step of the search goes, the encoder's share included; see parts.profile."""

    def run():
        with torch.profiler.record_function("part: beam search"):
            generate(generator, model, batch, target)

    return profile(run, target + 1, model)


def title(cell):
    """Return a cell in words."""
    return ", ".join(f"{name} {value:,}" for name, value in cell.items() if name != "results")


def print_cell(cell):
    """Print sentences and tokens per second, TaLK's speed-up, and memory of each model."""
    results = {name: cell["results"][name] for name in MODELS if name in cell["results"]}
    base = results.get("talkconv", {}).get("seconds")
    rows = {}
    for name, row in results.items():
        rows[name] = row.get("error") or [
            f"{row['sentences_per_second']:,.2f}",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['seconds'] / (cell['target'] + 1) * 1e3:,.2f}",
            f"{row['seconds'] / base:.2f}x" if base else "",
            harness.mebibytes(row["memory"], 1),
        ]
    headers = "sent/s", "tokens/s", "ms/step", "speed-up of TaLK", "peak MiB"
    harness.print_table(title(cell), headers, rows)
    for name, row in results.items():
        if "profile" in row:
            print_profile(name, row["profile"])


def measure_grid(task, args, report):
    """Measure every beam, batch and length: cells of the report, printed as they are done."""
    for beam in args.beams:
        # A model of its own for each beam: fairseq's generator may leave its beam in a model.
        built = build_checked(task, args, beam)
        for S in args.lengths:
            for B in args.batches:
                cell = {"batch": B, "beam": beam, "source": S, "target": args.target or S}
                cell["results"] = {}
                report.cells.append(cell)
                try:
                    measure(built, task, cell, args, cell["results"], report.save)
                finally:
                    print_cell(cell)


# --- The second table: the decoder alone, far from the start ---


class Decoding:
    """A decoder in the middle of a sentence: `steps` feeds it more tokens."""

    def __init__(self, model, task, B, longest, device):
        batch = random_batch(task, B, 20, device)
        self.decoder = model.decoder
        with torch.no_grad():
            self.encoder_out = model.encoder.forward_torchscript(batch["net_input"])
        self.tokens = random_batch(task, B, longest, device)["net_input"]["src_tokens"]
        self.position, self.state = 0, {}

    @torch.no_grad()
    def steps(self, count):
        """Return the seconds that `count` more steps take."""

        def run():
            for _ in range(count):
                self.position += 1
                self.decoder(
                    self.tokens[:, : self.position],
                    encoder_out=self.encoder_out,
                    incremental_state=self.state,
                )

        return harness.timed(run)[0]

    def state_bytes(self):
        """Return the bytes of the incremental state, as saved."""
        file = io.BytesIO()
        torch.save(self.state, file)
        return file.tell()

    def copy(self):
        """Return the same place in the same sentence, with a state of its own."""
        other = copy.copy(self)
        other.state = copy.deepcopy(self.state)
        return other


def measure_model(going, cell, name, args):
    """Return {position: {"seconds": …, "state": …} or {"error": why}} of a Decoding."""
    rows, places, took = {}, {}, 0.0
    for position in sorted(args.positions):
        show_progress(f"batch {cell['batch']}: {name}, on the way to position {position:,}")
        while going.position < position and took <= args.limit:
            took += going.steps(min(STEPS, position - going.position))
        if going.position < position:
            error = f"too slow: at {going.position:,} after {took:.0f} s"
            rows[str(position)] = {"error": error}
        else:
            places[position] = going.copy()
            rows[str(position)] = {"state": places[position].state_bytes(), "turns": []}
    for place in places.values():
        place.copy().steps(STEPS)  # warm up
    # Positions in turn, so that a busy moment hits them all.
    for _ in range(args.turns):
        for position, place in places.items():
            row = rows[str(position)]
            if STEPS * sum(row["turns"]) <= args.limit / 4:  # more would not tell more
                turns = [*row["turns"], place.copy().steps(STEPS) / STEPS]
                row |= harness.summary(turns, tokens=cell["batch"])
    return rows


def measure_positions(task, args, report):
    """Measure tokens per second of each model around each position: cells of the report."""
    built = build_checked(task, args, beam=1)
    longest = max(args.positions) + STEPS
    for B in args.batches:
        cell = {"batch": B, "results": {}}
        report.cells.append(cell)
        for name, model in built.items():
            if isinstance(model, Unavailable):
                rows = {str(position): {"error": str(model)} for position in args.positions}
            else:
                going = Decoding(model, task, B, longest, args.device)
                rows = measure_model(going, cell, name, args)
            cell["results"][name] = rows
            report.save()
        print_positions(cell)


def print_positions(cell):
    """Print tokens per second and the state's size at each position, and the last over the first.

    That is the speed at the last position as a share of the one at the first.
    """
    positions = list(next(iter(cell["results"].values())))
    rows = {}
    for name, at in cell["results"].items():
        cells = []
        for row in (at[position] for position in positions):
            speed = f"{row['tokens_per_second']:,.0f}" if "seconds" in row else ""
            cells += [speed, f"({harness.mebibytes(row['state'], 2)})" if speed else ""]
        first, last = at[positions[0]], at[positions[-1]]
        share = f"{first['seconds'] / last['seconds']:.0%}" if "seconds" in last else ""
        rows[name] = [*cells, share, last.get("error", "")]
    headers = [header for position in positions for header in (f"{int(position):,}", "")]
    text = f"batch {cell['batch']}: tokens per second (MiB of state) around a position"
    harness.print_table(text, [*headers, "last / first"], rows)


# --- The command ---


def grid_figure(cells):
    """Return a Figure of speed and peak memory over the source length, for each beam and batch."""
    panels = {}
    for label, key, unit in (
        ("sentences per second", "sentences_per_second", 1),
        ("peak memory, MiB", "memory", 2**20),
    ):
        for cell in cells:
            place = f"batch {cell['batch']}, beam {cell['beam']}", label
            curves = panels.setdefault(place, {name: [] for name in MODELS})
            for name, row in cell["results"].items():
                curves[name].append((cell["source"], (row.get(key) or 0) / unit))
    return log_figure(panels, "source length")


def positions_figure(cells):
    """Return a Figure of speed and the state's size over the position, for each batch."""
    panels = {}
    for cell in cells:
        for label, key in (("tokens per second", "tokens_per_second"), ("state, bytes", "state")):
            panels[f"batch {cell['batch']}", label] = {
                name: [(int(position), row.get(key, 0)) for position, row in rows.items()]
                for name, rows in cell["results"].items()
            }
    return log_figure(panels, "position")


def log_figure(panels, xlabel):
    """Return a Figure of curves, four in a row."""
    from pipeline.plots.figures import panels_figure

    return panels_figure(panels, xlabel, columns=4, ours="talkconv")


def parse(arguments=None):
    """Return the options, with what depends on others filled in."""
    parser = harness.option_parser(__doc__)
    add = parser.add_argument
    add("--lengths", type=partial(naturals, least=2), default=[20, 100, 400],
        help="tokens of a source (default: 20,100,400)")  # fmt: skip
    add("--target", type=natural, help="tokens of a hypothesis (default: as the source)")
    add("--batches", type=naturals, help="sentences at a time (default: 1,64; --positions 1,16)")
    add("--beams", type=naturals, default=[1, 5], help="sizes of the beam (default: 1,5)")
    add("--models", type=some_of(MODELS), default=list(MODELS), help=f"default: {','.join(MODELS)}")
    add("--positions", type=naturals, nargs="?", const=[16, 1000, 16_000],
        help="measure the decoder alone, there (default: 16,1000,16000)")  # fmt: skip
    add("--dtype", choices=TOLERANCES, default="float32", help="default: float32")
    add("--turns", type=natural, help="turns the medians are of (default: 3; --positions 15)")
    add("--limit", type=float, default=120, help="seconds that a batch may take (default: 120)")
    add("--profile", action="store_true", help="then print where a step goes, model by model")
    add("--output", type=Path, metavar="PREFIX", help="default: results/decoding[_positions]")
    models.add_size_options(parser, SMALL, "--positions")
    args = parser.parse_args(arguments)

    args.device = harness.device_of(args)
    args.batches = args.batches or ([1, 16] if args.positions else [1, 64])
    args.turns = args.turns or (15 if args.positions else 3)
    args.output = args.output or Path("results/decoding" + "_positions" * bool(args.positions))
    longest = max([*args.lengths, args.target or 0, *(args.positions or [])]) + STEPS + 2
    args.sizes = models.chosen_sizes(parser, args, SMALL if args.positions else Sizes(), longest)
    if args.profile and args.positions:
        parser.error("--profile: expected none with --positions, got both")
    if args.sizes.vocabulary < 2 * max(args.beams) + 10:
        parser.error(f"--vocabulary: expected at least 2 beams and 10 entries, "
                     f"got {args.sizes.vocabulary}")  # fmt: skip
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    task = models.build_task(args.sizes.vocabulary)
    for beam in () if args.positions else args.beams:
        build_checked(task, args, beam)  # all, before anything is measured
    report = harness.Report(args.output, args.device, dtype=args.dtype, sizes=asdict(args.sizes))
    print(f"Decoding equals a full pass in {args.dtype}. Measuring on {report.where}; "
          f"{args.sizes}.", flush=True)  # fmt: skip
    try:
        (measure_positions if args.positions else measure_grid)(task, args, report)
    finally:  # also of an interrupted run
        report.finish(positions_figure if args.positions else grid_figure)

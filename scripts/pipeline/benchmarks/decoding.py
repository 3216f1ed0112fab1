"""Beam search through fairseq's own generator: TaLK beside the Transformer and its relatives.

    benchmark_decoding.py                all of it, on a GPU where there is one
    benchmark_decoding.py --lengths 20,100 --beams 5 --models talkconv,transformer --limit 60
    benchmark_decoding.py --profile      then the operators that take most of a batch

The encoder-decoders have the same sizes and layers, random weights, and no embeddings in common
(tied ones would make them repeat one word). The convolutions have GLU, and kernels as wide as
TaLK's windows. fairseq's DynamicConv always unfolds; `dynamicconv-band` has the encoder's
convolutions in band matrices. Each hypothesis is as long as its source.

First checks that scores of beam search, and logits of decoding step by step, equal those of a full
pass over the same tokens. Then runs the models in turn and takes medians. Tokens are those of the
best hypotheses, with their ends. Peak memory is what a batch takes beyond the model. Prints tables,
and writes PREFIX.json after each turn.
"""

from functools import partial
from types import SimpleNamespace

import torch

from pipeline.benchmarks import harness, models
from pipeline.benchmarks.harness import Unavailable, several, show_progress
from pipeline.common.command import at_least

# isort: split
from fairseq.dataclass.configs import GenerationConfig

WINDOWS = [1, 3, 7, 15]  # of talkconv_iwslt_de_en, to either side in the encoder
# Of logits, relative to the largest, and of log-probabilities.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


# --- The models and the search, as fairseq-generate builds them ---


def build_model(name, task, args):
    """Return the model `name` of MODELS, with random weights, in evaluation mode."""
    positions = max(1024, *args.lengths) + 2
    options = models.model_options(name, args.sizes, WINDOWS, True, positions)
    sides = ("encoder",) if name.endswith("-band") else ()
    model = models.build(models.configure(options), task, sides)
    return model.to(device=args.device, dtype=getattr(torch, args.dtype)).eval()


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
def check(name, model, task, beam, args):
    """Raise SystemExit unless decoding with `model` equals a full pass over what it decoded."""
    B, S, target = 3, 12, 24  # more tokens than the largest window
    batch = random_batch(task, B, S, args.device)
    generator = build_generator(model, task, beam, target)
    _, hypotheses = generate(generator, model, batch, target)
    tokens = torch.stack([beams[0]["tokens"] for beams in hypotheses])
    scores = torch.stack([beams[0]["positional_scores"] for beams in hypotheses])
    previous = tokens.roll(1, dims=1)  # each hypothesis ends with what it begins with
    full = model(**batch["net_input"], prev_output_tokens=previous)
    wanted = model.get_normalized_probs(full, log_probs=True).gather(2, tokens[..., None])[..., 0]
    encoder_out, state = model.encoder.forward_torchscript(batch["net_input"]), {}
    logits = [
        model.decoder(previous[:, :t], encoder_out=encoder_out, incremental_state=state)[0]
        for t in range(1, target + 2)
    ]
    for what, got, want, scale in (
        ("logits of decoding step by step", torch.cat(logits, 1), full[0], full[0].abs().max()),
        (f"scores of beam {beam}", scores, wanted, 1.0),
    ):
        error = ((got.float() - want.float()).abs().max() / scale).item()
        if not error <= TOLERANCES[args.dtype]:
            text = f"{name}: the {what} differ from a full pass by {error:.2g}: not measured"
            raise SystemExit(text)


def build_checked(task, beam, args):
    """Return {name: model, or an Unavailable that says why not}, after `check`."""
    built = {}
    for name in args.models:
        show_progress(f"beam {beam}: checking {name}")
        try:
            built[name] = build_model(name, task, args)
            check(name, built[name], task, beam, args)
        except RuntimeError as error:
            built[name] = Unavailable(harness.why_not(error))
    return built


# --- Speed ---


def measure(built, task, cell, args, report):
    """Measure the models of `built` at the sizes of the cell."""
    B, beam, length = cell.values()
    batch = random_batch(task, B, length, args.device)

    def prepare(name, row):
        model = built[name]
        if isinstance(model, Unavailable):
            raise model
        generator = build_generator(model, task, beam, length)
        return lambda: generate(generator, model, batch, length)[0]

    amounts = {"sentences": B, "tokens": B * (length + 1)}
    models.measure(cell, prepare, amounts, args, report, enough=args.limit / 4)


def parse(arguments=None):
    """Return the options, with what depends on others filled in."""
    parser = models.option_parser("benchmark_decoding.py", __doc__, 3, "results/decoding")
    for option, default, text in (
        ("--lengths", [20, 100, 400], "tokens of a source and of a hypothesis"),
        ("--batches", [1, 64], "sentences at a time"),
        ("--beams", [1, 5], "sizes of the beam"),
    ):
        text += f" (default: {','.join(map(str, default))})"
        parser.add_argument(option, type=several(at_least(1)), default=default, help=text)
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32", help="default: float32")
    args = parser.parse_args(arguments)
    args.sizes = models.chosen_sizes(parser, args, models.SIZES)
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    task = models.build_task(args.sizes.vocabulary)
    facts = {"dtype": args.dtype, "sizes": vars(args.sizes)}
    with harness.Report(args, "talkconv", **facts) as report:
        print(f"Measuring {args.dtype} on {report.where}; {args.sizes}.", flush=True)
        for beam in args.beams:
            # A model of its own for each beam: fairseq's generator may leave its beam in a model.
            built = build_checked(task, beam, args)
            for length in args.lengths:
                for B in args.batches:
                    cell = {"batch": B, "beam": beam, "length": length}
                    measure(built, task, cell, args, report)

"""Beam search through fairseq's own generator: TaLK beside the Transformer and its relatives.

    benchmark_decoding.py                all of it, on a GPU where there is one
    benchmark_decoding.py --lengths 20,100 --beams 5 --models talkconv,transformer --limit 60
    benchmark_decoding.py --profile      then the operators that take most of a batch

The encoder-decoders have the same sizes and layers, random weights, and no embeddings in common
(tied ones would make them repeat one word). The convolutions have GLU, and kernels as wide as
TaLK's windows. fairseq's DynamicConv always unfolds; `dynamicconv-band` has the encoder's
convolutions in band matrices, and `dynamicconv-following` the attention to the encoder of
talkconv_plus. A hypothesis is one token longer than its source.

First checks TaLK's operator against the reference. Then runs the models in turn and takes medians.
Tokens are those of the best hypotheses, with their ends. Peak memory is what a batch takes beyond
the model. Prints tables, and writes PREFIX.json after each turn.
"""

import itertools
from functools import partial

import torch

from pipeline.benchmarks import harness, models, operator
from pipeline.common.command import at_least, several
from pipeline.common.models import build_generator

WINDOWS = [1, 3, 7, 15]  # of talkconv_iwslt_de_en, to either side in the encoder


def build_model(name, task, args):
    """Return the model `name` of MODELS, with random weights, in evaluation mode."""
    positions = max(1024, *args.lengths) + 2
    options = models.model_options(name, args.sizes, WINDOWS, True, positions)
    sides = ("encoder",) if name.endswith("-band") else ()
    model = models.build(models.configure(options), task, sides)
    return model.to(device=args.device, dtype=getattr(torch, args.dtype)).eval()


def random_batch(task, B, S, device):
    """Return B sentences of S random words, the last of them the end."""
    dictionary = task.source_dictionary
    generator = torch.Generator().manual_seed(S)
    words = torch.randint(dictionary.nspecial, len(dictionary), (B, S), generator=generator)
    words[:, -1] = dictionary.eos()
    net_input = {"src_tokens": words.to(device), "src_lengths": torch.full((B,), S).to(device)}
    return {"id": torch.arange(B, device=device), "net_input": net_input}


def measure(cell, task, args, report):
    """Measure the models at the sizes of the cell."""
    B, beam, length = cell.values()
    batch = random_batch(task, B, length, args.device)

    def prepare(name, row):
        # A model of its own: fairseq's generator may leave its beam in a model.
        model = build_model(name, task, args)
        # Its hypotheses have `length` tokens and an end.
        generator = build_generator(model, task, beam=beam, min_len=length, max_len_b=length)
        return lambda: harness.timed(partial(generator.generate, [model], batch))

    amounts = {"sentences": B, "tokens": B * (length + 1)}
    models.measure(cell, prepare, amounts, args, report, enough=args.limit / 4)


def parse(arguments=None):
    """Return the options, with what depends on others filled in."""
    parser = models.option_parser("benchmark_decoding.py", __doc__, 3, "results/decoding")
    add, numbers = parser.add_argument, several(at_least(1))
    add("--lengths", type=numbers, default=[20, 100, 400],
        help="tokens of a source and of a hypothesis (default: 20,100,400)")  # fmt: skip
    add("--batches", type=numbers, default=[1, 64], help="sentences at a time (default: 1,64)")
    add("--beams", type=numbers, default=[1, 5], help="sizes of the beam (default: 1,5)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
        help="default: float32")  # fmt: skip
    args = parser.parse_args(arguments)
    args.sizes = models.chosen_sizes(parser, args, models.SIZES)
    return args


def main(arguments=None):
    """Run the command; `arguments` are those of the command line by default."""
    args = parse(arguments)
    operator.check([args.dtype], args.device)
    task = models.build_task(args.sizes.vocabulary)
    facts = {"dtype": args.dtype, "sizes": vars(args.sizes)}
    report = harness.Report(args, "talkconv", **facts)
    for beam, length, B in itertools.product(args.beams, args.lengths, args.batches):
        measure({"batch": B, "beam": beam, "length": length}, task, args, report)
    print(f"\nwritten: {report.path}")

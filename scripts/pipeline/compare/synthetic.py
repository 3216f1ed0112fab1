"""Train small language models on synthetic tasks, each of which needs one mechanism.

    scripts/synthetic.sh                      all of it
    scripts/synthetic.sh --tasks lag12,marker --systems talkconv_plus,dynamicconv

docs/synthetic.md says what the tasks ask for. Each system trains in each task at the rate of --lr
that is best on other sequences, with the first seed. Accuracies are in percent, a number for each
seed; "4x" is the same model on sequences four times as long. The systems are in
configs/verses/synthetic.yaml. Writes OUTPUT.json after each task of each system, and OUTPUT.md.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from pipeline.common import command
from pipeline.common.command import at_least, one_of, positive, several
from pipeline.common.files import write_json, write_whole
from pipeline.common.machine import machine
from pipeline.common.models import build_model, configure
from pipeline.common.systems import read_systems, words
from pipeline.common.tables import markdown

WORDS, T, B = 32, 64, 16
LENGTHS = {"1x": T, "4x": 4 * T}
MARKER = BLANK = WORDS  # beside the words
IGNORED = -100  # by the loss
UNSEEN = 1000  # more than any seed of a training; this one itself is of validation
REACH = 14  # of a marker
SEGMENT = 8  # of a marker and words
PAIRS = 4


def lag(T, generator, places):
    """Return ``(x, y)``, each (T, B): random words, and those `places` before them."""
    x = torch.randint(WORDS, (T, B), generator=generator)
    y = torch.full_like(x, IGNORED)
    y[places:] = x[:-places]
    return x, y


def marker(T, generator):
    """Likewise, the word after the last marker."""
    x = torch.randint(WORDS, (T, B), generator=generator)
    marked = torch.rand(T, B, generator=generator) < 0.08
    x[marked] = MARKER
    y = torch.full_like(x, IGNORED)
    last = torch.full((B,), -T)
    for t in range(1, T):
        last = torch.where(marked[t - 1] & ~marked[t], t, last)
        near = t - last <= REACH
        y[t] = torch.where(near, x[last.clamp(min=0), torch.arange(B)], IGNORED)
    return x, y


def reverse(T, generator):
    """Likewise, segments that begin with a marker, and the words of the segment before, reversed.

    The word j of a segment asks for the one 2 j places back.
    """
    x = torch.randint(WORDS, (T // SEGMENT, SEGMENT, B), generator=generator)
    x[:, 0] = MARKER
    y = torch.full_like(x, IGNORED)
    y[1:, 1:] = x[:-1, 1:].flip(1)
    return x.flatten(0, 1), y.flatten(0, 1)


def recall(T, generator):
    """Likewise, pairs of a key and a value, and then the keys again, anywhere."""
    x = torch.full((T, B), BLANK)
    y = torch.full_like(x, IGNORED)
    half, end = WORDS // 2, 2 * PAIRS
    for b in range(B):
        keys = torch.randperm(half, generator=generator)[:PAIRS]
        values = half + torch.randint(half, (PAIRS,), generator=generator)
        x[0:end:2, b], x[1:end:2, b] = keys, values
        asked = torch.randperm(PAIRS, generator=generator)
        places = end + torch.randperm(T - end, generator=generator)[:PAIRS]
        x[places, b], y[places, b] = keys[asked], values[asked]
    return x, y


# Each makes ``(x, y)`` of a length and a generator.
TASKS = {f"lag{places}": partial(lag, places=places) for places in (5, 12, 25)}
TASKS |= {"marker": marker, "reverse": reverse, "recall": recall}


def build(flags, seed):
    """Return a model of `flags` of fairseq-train, and the index of the first word in it."""
    with tempfile.TemporaryDirectory() as folder:
        entries = "".join(f"{word} 1\n" for word in range(WORDS + 1))
        Path(folder, "dict.txt").write_text(entries, encoding="utf-8")
        given = {**flags, "task": "language_modeling", "tokens-per-sample": LENGTHS["4x"]}
        cfg, task = configure([folder, "--cpu", *words(given)])
    torch.manual_seed(seed)
    return build_model(cfg.model, task), task.source_dictionary.index("0")


def logits(model, first, x):
    """Return the scores (T, B, WORDS + 1) of what a task asks for, of its `x` (T, B)."""
    scores, _ = model((x + first).t())
    return scores[..., first : first + WORDS + 1].transpose(0, 1)


def trained(flags, task, steps, lr, seed):
    """Return a model trained on new sequences in each step, and the index of its first word."""
    model, first = build(flags, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, 10 * (step + 1) / steps) * (1 - step / steps)
        x, y = TASKS[task](T, generator)
        loss = F.cross_entropy(logits(model, first, x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
    return model, first


@torch.no_grad()
def accuracy(model, first, task, length, seed, batches=8):
    """Return the share of right words in percent, on sequences that no training has seen."""
    generator = torch.Generator().manual_seed(UNSEEN + seed)
    right = asked = 0
    model.eval()
    for _ in range(batches):
        x, y = TASKS[task](length, generator)
        told = y != IGNORED
        right += (logits(model, first, x).argmax(-1) == y)[told].sum().item()
        asked += told.sum().item()
    return 100 * right / asked


def measure(flags, task, args):
    """Return the rate of a system in a task, and its accuracies.

    They are ``{"rate": …, "1x": [one for each seed], "4x": …}``.
    """
    at = {lr: trained(flags, task, args.steps, lr, seed=1) for lr in args.lr}
    rate = max(args.lr, key=lambda lr: accuracy(*at[lr], task, T, seed=0))
    found = {"rate": rate, **{name: [] for name in LENGTHS}}
    for seed in range(1, args.seeds + 1):
        model = at[rate] if seed == 1 else trained(flags, task, args.steps, rate, seed)
        for name, length in LENGTHS.items():
            found[name].append(accuracy(*model, task, length, seed))
    return found


def table(results, tasks):
    """Return the accuracies in Markdown: a row for each system, a column for each task."""
    rows = []
    for name, row in results.items():
        cells = [row[task][length] for task in tasks for length in LENGTHS]
        rows.append([name, *(", ".join(f"{x:.0f}" for x in cell) for cell in cells)])
    return markdown(["", *(f"{task}{end}" for task in tasks for end in ("", ", 4x"))], rows)


def parse(arguments=None):
    """Return the options, and the systems."""
    systems = read_systems("synthetic")["systems"]
    add = (parser := command.parser("synthetic.sh", __doc__)).add_argument
    add("--tasks", type=several(one_of(TASKS)), default=list(TASKS), help="(default: all)")
    add("--systems", type=several(one_of(systems)), default=list(systems), help="(default: all)")
    add("--seeds", type=at_least(1), default=2, help="trainings of each (default: 2)")
    add("--steps", type=at_least(1), default=400, help="of a training (default: 400)")
    add("--lr", type=several(positive), default=[3e-3, 1e-2],
        help="peak rates to choose from (default: 3e-3,1e-2)")  # fmt: skip
    add("--output", type=Path, default=Path("results/synthetic"), help="(default: %(default)s)")
    return parser.parse_args(arguments), systems


def compare(args, systems):
    """Train and score all that was asked for."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.output.parent).close()  # fails before a training, not after
    torch.set_num_threads(1)  # the models are so small that more cost time
    results = {name: {} for name in args.systems}
    record = {"machine": machine("cpu"), "steps": args.steps, "lr": args.lr, "systems": results}
    runs = tqdm([(task, name) for task in args.tasks for name in args.systems])
    for task, name in runs:
        runs.set_description(f"{task}, {name}")
        results[name][task] = measure(systems[name], task, args)
        write_json(Path(f"{args.output}.json"), record)
    print(text := table(results, args.tasks))
    write_whole(Path(f"{args.output}.md"), text + "\n")


def main(arguments=None):
    """Run the command and return its exit status."""
    return command.run("synthetic.sh", lambda: compare(*parse(arguments)))

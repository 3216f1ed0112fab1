"""What a comparison writes: the table with its notes, every number, and two figures.

``results`` is what results.json holds.
"""

import statistics

from matplotlib.figure import Figure

from pipeline.common.files import remove, write_json, write_whole
from pipeline.common.folder import show
from pipeline.common.tables import markdown
from pipeline.compare.scores import SCORES
from pipeline.plots.curves import curves_figure
from pipeline.plots.figures import add_legend, looks, save_figure

TITLES = {"mt": "sacreBLEU", "lm": "perplexity", "summ": "ROUGE-L"}
UNITS = {"mt": "sentences", "lm": "continuations", "summ": "sentences"}  # of a generation's speed
SCORE_HEADERS = {
    "mt": ["sacreBLEU", "95% interval", "p"],
    "lm": ["ppl/token", "ppl/word"],
    "summ": ["ROUGE-1", "ROUGE-2", "p", "ROUGE-L"],
}


def write_results(out, results):
    """Print the table; write it with all numbers and the figures to the folder `out`."""
    lines = "\n".join([*table(results), *reached(results["systems"])]) + "\n"
    write_json(out / "results.json", results)
    write_whole(out / "compare.md", lines)
    for name, figure in (("validation", validation_figure), ("speed", speed_figure)):
        if drawn(results):
            save_figure(figure(results), out / f"{name}.png")
        else:
            remove(out / f"{name}.png")  # of an earlier run
    show(f"\n{lines}\nEverything is in {out}")


def table(results):
    """Return the lines of the table, in Markdown, and of the notes below it."""
    task, systems, reference = results["task"], results["systems"], results["reference"]
    headers = ["system", "parameters", *SCORE_HEADERS[task]]
    headers += ["training tokens/s", f"speed-up of {reference}"]
    headers += [f"generation {UNITS[task]}/s", f"speed-up of {reference}", "peak MiB"]
    base = systems.get(reference, {}).get("speed")
    rows = []
    for name, row in systems.items():
        if "score" not in row or "error" in row:
            rows.append([name, row.get("error", "not trained")])
            continue
        speed = row["speed"]
        cells = [name, f"{row['parameters']:,}", *score_cells(task, row)]
        for part, key, digits in (
            ("training", "training_tokens_per_second", 0),
            ("generation", "generated_sentences_per_second", 2),
        ):
            cells.append(f"{speed[key]:,.{digits}f}" if speed else "not measured")
            ratios = []  # of the times of each turn
            if base and speed and name != reference:
                ratios = [a / b for a, b in zip(speed[part]["turns"], base[part]["turns"])]
            cells.append(f"{statistics.median(ratios):.2f}x" if ratios else None)
        memory = speed and speed["training"]["memory"]
        cells.append(None if memory is None else f"{memory / 2**20:,.0f}")
        rows.append(cells)
    if unigram := results.get("unigram"):
        tokens, words = unigram["perplexity_per_token"], unigram["perplexity_per_word"]
        rows.append(["unigram", None, f"{tokens:,.2f}", f"{words:,.1f}"])
    if lead := results.get("lead"):
        first, second, longest = (f"{lead[kind]:.2f}" for kind in ("rouge_1", "rouge_2", "rouge_l"))
        rows.append([f"first {lead['words']} words", None, first, second, None, longest])
    rows = [row + [None] * (len(headers) - len(row)) for row in rows]
    return [*markdown(headers, rows).split("\n"), "", *notes(results)]


def reached(systems):
    """Return the lines of a table of when each system validates as well as others at their best.

    The validation is that of the first seed that was trained.
    """
    seeds = {name: list(row["seeds"].values()) for name, row in systems.items() if row["seeds"]}
    runs = {name: first["validation"] for name, (first, *_) in seeds.items()}
    best = {name: min(entry["ppl"] for entry in run) for name, run in runs.items()}
    aims = sorted(best, key=best.get, reverse=True)
    rows = []
    for name in aims:
        speed, cells = systems[name]["speed"], []
        for aim in aims:
            updates = next((e["updates"] for e in runs[name] if e["ppl"] <= best[aim]), None)
            minutes = updates and speed and updates * speed["seconds_per_update"] / 60
            cells.append(updates and f"{updates:,}" + (f" ({minutes:.1f})" if minutes else ""))
        rows.append([name, *cells])
    title = "updates (minutes) to the validation perplexity of"
    headers = [title, *(f"{name}, {best[name]:.2f}" for name in aims)]
    return ["", *markdown(headers, rows).split("\n")] if len(rows) > 1 else []


def score_cells(task, row):
    """Return the cells of the scores of a system."""
    seeds = [seed[SCORES[task]] for seed in row["seeds"].values()]
    spread = f" ± {statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
    p = None if row["p"] is None else f"{row['p']:.3f}"
    if task == "mt":
        low, high = row["interval"]
        return [f"{row['score']:.2f}{spread}", f"{low:.2f} to {high:.2f}", p]
    if task == "lm":
        return [f"{row['score']:,.2f}{spread}", f"{row['perplexity_per_word']:,.1f}"]
    return [f"{row['rouge_1']:.2f}", f"{row['rouge_2']:.2f}", p, f"{row['score']:.2f}{spread}"]


def notes(results):
    """Yield what the numbers of the table are."""
    systems = results["systems"]
    count = max((len(row["seeds"]) for row in systems.values()), default=0)
    test = ", ".join(f"{value:,} {name}" for name, value in results["test"].items())
    seeds = "1 seed" if count == 1 else f"{count} seeds (means ± standard deviations)"
    yield f"{results['updates']:,} updates, {seeds}; test set: {test}; {results['machine']}."
    if not count:
        yield "Nothing is trained."
    elif results["task"] == "mt":
        yield f"sacreBLEU {results['signature']}"
    elif results["task"] == "summ":
        yield f"{results['signature']}."
    else:
        yield "Tokens are pieces and ends of lines; words are separated by spaces; ends are words."
        yield "Continuations: of 64 tokens, of which the test set gives 16; beam 5."
    if results.get("baseline"):
        of = " of ROUGE-2" if results["task"] == "summ" else ""
        several = ", the largest of the seeds'" if count != 1 else ""
        several += "; intervals are their means" if several and not of else ""
        yield f"p: paired bootstrap{of} against {results['baseline']}{several}."
    for what, key in (("Peak learning rates", "rates"), ("Updates of warm-ups", "warmups")):
        if found := {name: row[key] for name, row in systems.items() if row.get(key)}:
            chosen = (
                f"{name} {row['chosen']} of {', '.join(row['validation'])}"
                for name, row in found.items()
            )
            yield f"{what}, the best in validation: {'; '.join(chosen)}."
    for name, row in systems.items():
        points = row.get("points", {}).items()
        diverged = [f"at {point}".replace("_", " with a warm-up of ") for point, loss in points
                    if loss is None]  # fmt: skip
        diverged += [f"with seed {seed}, which does not count" for seed in row.get("diverged", [])]
        if diverged:
            yield f"{name} diverged {', '.join(diverged)}."
    sizes = [row["parameters"] for row in systems.values() if row.get("parameters")]
    if sizes and max(sizes) > 1.05 * min(sizes):
        yield "The sizes differ by more than 5%."
    if measured := {name: row["speed"] for name, row in systems.items() if row.get("speed")}:
        operations = (f"{name} {speed['operations_per_update'] / 1e9:.1f}"
                      for name, speed in measured.items())  # fmt: skip
        yield f"Billions of operations of an update, in products: {', '.join(operations)}."
    yield "Speeds: medians of turns in one process; peak memory: of a training step."
    on_cpu = "Float32; matrix products in bfloat16 where the processor has it."
    yield "Float16." if results["preset"] == "gpu" else on_cpu


def drawn(results):
    """Return the systems that figures show: those with scores of all seeds, and speeds."""
    systems = results["systems"].items()
    return {k: row for k, row in systems if "score" in row and row["speed"] and "error" not in row}


def validation_figure(results):
    """Return a Figure of the validation over updates and over time, a line for each seed."""
    runs = {}
    for name, row in drawn(results).items():
        pace = row["speed"]["seconds_per_update"]
        runs[name] = [
            {"train": [], "valid": [{**e, "seconds": e["updates"] * pace} for e in validation]}
            for validation in (seed["validation"] for seed in row["seeds"].values())
        ]
    figure = curves_figure(runs)
    for axis in figure.axes[::2]:  # the first of each row
        axis.set_ylabel(f"validation {axis.get_ylabel()}")
    unit = figure.axes[-1].get_xlabel().removeprefix("wall-clock, ")
    figure.axes[-1].set_xlabel(f"{unit}: updates x measured seconds per update")
    return figure


def speed_figure(results):
    """Return a Figure of the score of each system over its speed in training and generation."""
    task, systems = results["task"], drawn(results)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for (name, row), look in zip(systems.items(), looks(len(systems))):
        look |= {"linestyle": "none", "markersize": 10, "label": name}
        for axis, speed in zip(axes, ("training_tokens", "generated_sentences")):
            axis.plot(row["speed"][f"{speed}_per_second"], row["score"], **look)
    lower = " (lower is better)" if task == "lm" else ""
    axes[0].set(xlabel="training tokens per second", ylabel=TITLES[task] + lower)
    axes[1].set(xlabel=f"generated {UNITS[task]} per second")
    for axis in axes:
        axis.margins(0.15)
        axis.grid(alpha=0.3)
    add_legend(figure, axes, 5)
    return figure

"""What the tests of the benchmarks of training and decoding share."""

import json
from types import SimpleNamespace

from conftest import one_space


def run_benchmark(module, words, folder, capsys):
    """Run the command of a module into a folder; returns its JSON and what it printed."""
    prefix = folder / "out/result"
    module.main([*words, "--output", str(prefix)])
    assert [path.name for path in prefix.parent.iterdir()] == ["result.json"]
    record = json.loads(prefix.with_suffix(".json").read_text())
    printed = one_space(capsys.readouterr().out)
    return SimpleNamespace(record=record, cells=record["cells"], printed=printed)


def check_rows(cell, amounts, printed):
    """The numbers of a cell follow from its turns, and are in the printed table."""
    assert ", ".join(f"{key} {value}" for key, value in list(cell.items())[:-1]) in printed
    talk = cell["results"]["talkconv"]["turns"]
    for name, row in cell["results"].items():
        turns = sorted(row["turns"])
        assert len(turns) == 2 and row["seconds"] == sum(turns) / 2
        for what, amount in amounts.items():
            assert abs(row[f"{what}_per_second"] * row["seconds"] / amount - 1) < 1e-9
        ratios = [b / a for a, b in zip(talk, row["turns"])]
        assert abs(row["speed_up"] / (sum(ratios) / 2) - 1) < 1e-9
        assert row["memory"] >= 0 and f"| {name} | {shown(row)}" in printed


def shown(row):
    """The cells of a row with its speeds."""
    speeds = [row[key] for key in ("sentences_per_second", "tokens_per_second") if key in row]
    numbers = (f"{n:,.0f}" if n >= 1000 else f"{n:.3g}" for n in (*speeds, row["speed_up"]))
    return " | ".join(numbers)

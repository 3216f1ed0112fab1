"""The table of scripts/compare.sh, its notes and its figures, from made-up results."""

import pytest
from comparisons import cells, synthetic

pytest.importorskip("fairseq")

from pipeline.compare.report import reached, speed_figure, table, validation_figure
from pipeline.compare.speed import operations_counter


def test_the_table():
    results = synthetic()
    assert cells(results, "talkconv") == [
        "talkconv", "4,600,000", "20.50 ± 0.00", "19.00 to 21.00", "", "1,600", "", "20.00",
        "", "1",
    ]  # fmt: skip
    # TaLK is faster by the median of the turns' ratios: 2 and 2.
    assert cells(results, "transformer")[4:] == ["0.040", "800", "2.00x", "10.00", "2.00x", "1"]
    assert cells(results, "broken")[1].startswith("ImportError")
    widths = {len(line) for line in table(results) if line.startswith("|")}
    assert len(widths) == 1
    notes = "\n".join(table(results))
    assert "an update, in products: talkconv 10.0, transformer 20.0." in notes
    assert "2 seeds" in notes and "the largest of the seeds'" in notes and "1,053 sent" in notes


def test_the_tables_of_the_other_tasks():
    models = synthetic("lm", seeds=1)
    models["unigram"] = {"perplexity_per_token": 459.06, "perplexity_per_word": 2992.7}
    assert cells(models, "talkconv")[2:4] == ["20.50", "80.0"]
    assert cells(models, "unigram")[2:4] == ["459.06", "2,992.7"]
    summaries = synthetic("summ", seeds=1)
    summaries["lead"] = {"words": 8, "rouge_1": 20.0, "rouge_2": 5.0, "rouge_l": 18.0}
    assert cells(summaries, "talkconv")[2:6] == ["31.00", "11.00", "", "20.50"]
    assert cells(summaries, "first 8 words")[2:6] == ["20.00", "5.00", "", "18.00"]


def validated(**perplexities):
    """The systems, whose first seeds have these perplexities in their validations."""
    systems = synthetic()["systems"]
    for name, found in perplexities.items():
        first = systems[name]["seeds"]["1"]
        first["validation"] = [
            {**entry, "ppl": ppl} for entry, ppl in zip(first["validation"], found)
        ]
    return systems


def test_when_each_system_is_as_good_as_each_other():
    systems = validated(talkconv=[40, 20], transformer=[60, 30])
    systems["talkconv"]["speed"] = None
    _, headers, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")]
                            for line in reached(systems))  # fmt: skip
    assert headers[1:] == ["transformer, 30.00", "talkconv, 20.00"]
    assert rows == [["transformer", "200 (3.3)"], ["talkconv", "200", "200"]]
    assert reached({"talkconv": systems["talkconv"], "broken": systems["broken"]}) == []


def test_operations_are_those_of_products_forward_and_backward():
    import torch
    from fairseq.modules import ConvTBC

    T, B, C, wide, kernel = 7, 2, 4, 6, 3
    for layer, products in (
        (torch.nn.Linear(C, wide), T * B * C * wide),
        (ConvTBC(C, wide, kernel, padding=1), T * B * C * wide * kernel),
    ):
        x = torch.randn(T, B, C, requires_grad=True)
        with operations_counter() as counter:
            layer(x).sum().backward()
        ends = 2 * B * C * wide if isinstance(layer, ConvTBC) else 0  # what reads the padding
        assert counter.get_total_flops() == pytest.approx(2 * 3 * products, abs=2 * 2 * ends)

    q, k, v = torch.randn(3, B, 2, T, C, requires_grad=True)
    with operations_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    scores = 2 * B * 2 * T * T * C  # of a product of queries and keys
    assert counter.get_total_flops() == 7 * scores  # two of them forward, five backward


def test_validation_curves_over_updates_and_measured_time():
    figure = validation_figure(synthetic(seeds=1))
    over_updates, over_time = figure.axes[:2]
    assert over_time.get_ylabel() == "" and over_updates.get_ylabel() == "validation loss (base 2)"
    drawn = [line.get_xydata().tolist() for line in over_updates.get_lines()]
    assert drawn == [[[100, 8], [200, 7]], [[100, 9], [200, 8]]]
    # 0.5 and 1 second an update, in minutes from two of them up.
    assert [list(line.get_xdata()) for line in over_time.get_lines()] == [
        pytest.approx([50 / 60, 100 / 60]), pytest.approx([100 / 60, 200 / 60])
    ]  # fmt: skip
    assert figure.axes[-1].get_xlabel() == "minutes: updates x measured seconds per update"


def test_the_score_over_speed():
    figure = speed_figure(synthetic())
    training, generation = figure.axes
    assert [line.get_xydata().tolist() for line in training.get_lines()] == [
        [[1600, 20.5]], [[800, 21.5]]
    ]  # fmt: skip
    assert [line.get_xydata().tolist() for line in generation.get_lines()] == [
        [[20, 20.5]], [[10, 21.5]]
    ]  # fmt: skip
    assert training.get_ylabel() == "sacreBLEU"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["talkconv", "transformer"]


def test_figures_show_the_systems_that_the_table_has_numbers_of():
    """Each in the same colour in both, and none whose seeds failed in part."""
    results = synthetic()
    results["systems"]["talkconv"]["error"] = "seed 2: failed"
    figures = [make(results) for make in (validation_figure, speed_figure)]
    first = [figure.axes[0].get_lines()[0] for figure in figures]
    assert len({line.get_color() for line in first}) == 1
    labels = [figure.legends[0].get_texts()[0].get_text() for figure in figures]
    assert labels == ["transformer, validation", "transformer"]
    assert [len(figure.legends[0].get_texts()) for figure in figures] == [1, 1]


def test_a_spread_is_the_standard_deviation_of_a_sample():
    results = synthetic()
    for seed, bleu in (("1", 20), ("2", 23)):
        results["systems"]["talkconv"]["seeds"][seed]["bleu"] = bleu
    assert cells(results, "talkconv")[2] == "20.50 ± 2.12"  # 3 / sqrt(2)


def test_a_speed_up_is_the_median_of_ratios_within_a_turn():
    results = synthetic()
    for name, training, generation in (
        ("talkconv", [1, 10, 2], [1, 1, 1]), ("transformer", [2, 30, 8], [5, 6, 4])
    ):  # fmt: skip
        speed = results["systems"][name]["speed"]
        speed["training"]["turns"], speed["generation"]["turns"] = training, generation
    row = cells(results, "transformer")
    assert (row[6], row[8]) == ("3.00x", "5.00x")


def test_the_best_validation_need_not_be_the_last():
    systems = validated(talkconv=[20, 40], transformer=[60, 30])
    head = next(line for line in reached(systems) if "updates (minutes)" in line)
    assert "transformer, 30.00 | talkconv, 20.00" in head


def test_sizes_that_differ_are_noted():
    results, note = synthetic(), "The sizes differ by more than 5%."
    assert note not in table(results)
    results["systems"]["transformer"]["parameters"] = 4_840_000
    assert note in table(results)

"""Print tables 2 to 5 and 7 of the TaLK paper, with the scores of results/ beside the paper's.

The paper's scores, also of the peers, come from the headers of configs/. The column "measured" has
the last result of each unchanged recipe on the published data; results with other settings are
listed below the tables, not in them.
"""

import re
from pathlib import Path

from pipeline.common import command
from pipeline.common.files import read_json
from pipeline.common.paths import ROOT
from pipeline.common.tables import markdown
from pipeline.recipes.ablation import in_words
from pipeline.recipes.config import from_header, read_results

NOTHING = "not yet measured"

PEERS = {"LightConv": "lightconv", "DynamicConv": "dynamicconv"}
# Of each table, its columns of (heading, benchmark, scores), and the config of each row.
TABLES = {
    "Table 2: WMT, BLEU": (
        [
            ("En-De, compound-split tokenised", "wmt16_en_de", ["compound_split_tokenised_bleu"]),
            ("En-Fr, tokenised", "wmt14_en_fr", ["tokenised_bleu"]),
        ],
        {"ConvS2S": "fconv", "Transformer big": "transformer", **PEERS, "TaLK": "talkconv"},
    ),
    "Table 3: IWSLT De-En, BLEU": (
        [("tokenised", "iwslt14_de_en", ["tokenised_bleu"])],
        {"Transformer": "transformer", **PEERS, "TaLK": "talkconv"},
    ),
    "Table 4: CNN-DM, ROUGE (the paper's by the Perl tool, measured by rouge-score)": (
        [("1/2/Lsum", "cnn_dm", ["rouge_1", "rouge_2", "rouge_lsum"])],
        {"Self-attention": "transformer", **PEERS}
        | {"TaLK standard": "talkconv", "TaLK deep": "talkconv_deep"},
    ),
    "Table 5: WikiText-103, test perplexity per word": (
        [("perplexity", "wikitext103", ["perplexity"])],
        {"Adaptive inputs (Transformer)": "transformer"}
        | {"DynamicConv": "dynamicconv", "TaLK": "talkconv"},
    ),
}
ABLATION = {
    "One window of 1, no normalisation": "ablation_1_one_window",
    "+ output normalisation": "ablation_2_normalised",
    "+ windows 1,3,7,15x4": "ablation_3_windows",
    "+ offset dropout": "ablation_4_offset_dropout",
    "+ one head a channel (H=512)": "ablation_5_head_a_channel",
    "H=4": "ablation_6_four_heads",
    "ReLU in place of Swish": "ablation_7_relu",
}


def paper(name):
    """Return what the header of a config says that the paper reports; a second number in brackets.

    Where there are several numbers at once (ROUGE) they stay together.
    """
    said = from_header(name, "paper")
    numbers = re.findall(r"[\d./]*\d\.\d+(?: \+- [.\d]+)?", said.partition("(")[0])
    if not numbers:
        return said if said != "none" else "–"
    return numbers[0] + (f" ({numbers[1]})" if numbers[1:] else "")


def measured(name, scores, folder):
    """Return ``(cell, notes)``: the last scores of the recipe as it is, and a note on others."""
    cell, notes = NOTHING, []
    for result in read_results(folder / f"{name}.json"):
        others = [*result["changed"], *result["other_data"]]
        if result["split"] != "test":
            others.append(f"scored on {result['split']}")
        values = [result["scores"].get(score, {}).get("score") for score in scores]
        if None in values:
            others.append("without the score of this table")
        if others:
            notes.append(f"{name}, {result['date']}: {', '.join(others)}")
        else:
            cell = "/".join(f"{value:.2f}" for value in values)
    return cell, notes


def tables(folder):
    """Return all tables as text. Raises ValueError or OSError for results that cannot be read."""
    texts, notes = [], []
    for title, (columns, systems) in TABLES.items():
        headings = [""]
        for heading, _, _ in columns:
            headings += [f"{heading}: paper", "measured"]
        rows = []
        for label, system in systems.items():
            row = [label]
            for _, benchmark, scores in columns:
                cell, more = measured(f"{benchmark}/{system}", scores, folder)
                row += [paper(f"{benchmark}/{system}"), cell]
                notes += more
            rows.append(row)
        texts.append(f"**{title}**\n\n" + markdown(headings, rows))
    results, rows = read_json(folder / "iwslt14_de_en/ablation.json", {}), []
    for label, row in ABLATION.items():
        cell, result = NOTHING, results.get(row)
        if result and (result["changed"] or result["other_data"]):
            notes.append(f"{row}: {', '.join([*result['changed'], *result['other_data']])}")
        elif result:
            cell = f"{in_words(result)} (seeds: {len(result['seeds'])})"
        rows.append([label, paper(f"iwslt14_de_en/{row}"), cell])
    title = "**Table 7: ablation on IWSLT De-En, validation BLEU**"
    texts.append(f"{title}\n\n" + markdown(["", "paper", "measured"], rows))
    if notes:
        listed = "\n".join(f"- {note}" for note in notes)
        texts.append(f"Results that are not of a recipe as it is:\n\n{listed}")
    return "\n\n".join(texts)


def main(arguments=None):
    """Run the command; one line and status 2 for results that cannot be read."""
    parser = command.parser("results_table.py", __doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR")
    args = parser.parse_args(arguments)
    unusable = (command.BadInput, OSError, ValueError)
    return command.run("results_table.py", lambda: print(tables(args.results)), unusable)

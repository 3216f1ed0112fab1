"""Perplexities: of a unigram, and of what fairseq-eval-lm scored."""

import math
import re
from collections import Counter

from talk_fairseq.checkpoint_files import read_checkpoint

END, UNKNOWN = "</s>", "<unk>"


def read_tokens(path):
    """The pieces of each line of `path` and, after each line, its end."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [token for line in lines for token in (*line.split(" "), END)]


def unigram_loss(train, test):
    """The mean of ``-log2 p`` over the tokens `test`, each by how frequent it is in `train`.

    Every token counts once more than it occurs, and so does the unknown one, which stands for
    what is not in `train`.
    """
    counts = Counter([*train, *set(train), UNKNOWN])
    total = counts.total()
    return -sum(math.log2(counts.get(token, 1) / total) for token in test) / len(test)


def read_model(checkpoint, tokens):
    """``(row of the table without its perplexities, loss in bits a token)`` of a checkpoint.

    Raises ValueError if it was not scored on `tokens` tokens.
    """
    evaluated = checkpoint.with_suffix(".txt")
    text = evaluated.read_text(encoding="utf-8")
    found = [
        re.findall(pattern, text)
        for pattern in (
            r"num\. model params: ([\d,]+)",
            r"Evaluated ([\d,]+) tokens",
            r"Loss \(base 2\): ([\d.]+),",
        )
    ]
    if [len(matches) for matches in found] != [1, 1, 1]:
        raise ValueError(f"{evaluated}: expected the output of fairseq-eval-lm")
    parameters, scored = (int(matches[0].replace(",", "")) for matches in found[:2])
    if scored != tokens:
        raise ValueError(f"{evaluated}: expected a score of all {tokens:,} tokens, got {scored:,}")
    state = read_checkpoint(checkpoint)
    row = {
        "model": checkpoint.stem,
        "parameters": parameters,
        "updates": state["optimizer_history"][-1]["num_updates"],
        "seconds": round(state["extra_state"]["previous_training_time"]),
    }
    return row, float(found[2][0])

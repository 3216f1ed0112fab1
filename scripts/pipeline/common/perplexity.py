"""Perplexities: of a unigram, and of what fairseq-eval-lm scored."""

import math
import re
from collections import Counter

from pipeline.common.files import read_lines
from talk_fairseq.checkpoint_files import read_checkpoint

END, UNKNOWN = "</s>", "<unk>"
# The numbers of a model, in what fairseq-eval-lm prints.
SCORE = r"num\. model params: ([\d,]+).*?Evaluated ([\d,]+) tokens.*?Loss \(base 2\): (\S+),"


class TestSet:
    """The test set of a corpus of one language that prepare_corpus.py wrote.

    Tokens are the pieces and an end after each line. Words are separated by spaces, and the ends
    count as words too.

    Attributes:
        counts: ``{"sentences", "words", "tokens"}``, the words without the ends.
        unknown: how many of the tokens are not in the training text.
        unigram_loss: the mean of ``-log2 p`` over the tokens, each by how frequent it is in the
            training text. Every token counts once more than it occurs there, and so does the
            unknown one, which stands for what is not there.
    """

    def __init__(self, corpus, language):
        def tokens_of(split):
            lines = read_lines(corpus / "pieces" / f"{split}.{language}")
            return [token for line in lines for token in (*line.split(" "), END)]

        train, test = tokens_of("train"), tokens_of("test")
        text = (corpus / f"test.{language}").read_text(encoding="utf-8")
        self.counts = {
            "sentences": test.count(END),
            "words": len(text.split()),
            "tokens": len(test),
        }
        known = set(train)
        self.unknown = sum(token not in known for token in test)
        counts = Counter([*train, *known, UNKNOWN])
        logarithms = sum(math.log2(counts.get(token, 1)) for token in test)
        self.unigram_loss = math.log2(counts.total()) - logarithms / len(test)

    def perplexities(self, loss):
        """Return the perplexities of a token and of a word, of a mean loss in bits a token."""
        words = self.counts["words"] + self.counts["sentences"]
        per_word = 2 ** (loss * self.counts["tokens"] / words)
        return {"perplexity_per_token": 2**loss, "perplexity_per_word": per_word}


def read_score(evaluated, tokens):
    """Return ``(parameters, loss in bits a token)`` of the saved output of fairseq-eval-lm.

    Raises ValueError unless it has one score, of `tokens` tokens.
    """
    found = re.findall(SCORE, evaluated.read_text(encoding="utf-8"), re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"{evaluated}: expected the output of fairseq-eval-lm, once")
    parameters, scored, loss = (float(number.replace(",", "")) for number in found[0])
    if scored != tokens:
        got = f"{scored:,.0f}"
        raise ValueError(f"{evaluated}: expected a score of all {tokens:,} tokens, got {got}")
    return round(parameters), loss


def read_model(checkpoint, tokens):
    """Return ``(facts, loss in bits a token)`` of a checkpoint that fairseq-eval-lm scored.

    What that printed stands beside it, as ``NAME.txt`` of ``NAME.pt``; see `read_score`.
    """
    parameters, loss = read_score(checkpoint.with_suffix(".txt"), tokens)
    state = read_checkpoint(checkpoint)
    facts = {
        "parameters": parameters,
        "updates": state["optimizer_history"][-1]["num_updates"],
        "seconds": round(state["extra_state"]["previous_training_time"]),
    }
    return facts, loss

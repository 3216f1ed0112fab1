"""What translations and summaries score, ``{name: {"score", "tool"}}``, as the papers count it."""

import html
import re
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesDetokenizer

from talk_fairseq.rouge import rouge


def compound_split(line):
    """Return a tokenised line with its compounds split, as for the published En-De scores.

    ``a-b`` becomes ``a ##AT##-##AT## b`` from left to right. A character is matched once, so
    that of ``a-b-c``, whose middle part has one, the second hyphen stays.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def scores_by(hypotheses, references, **metrics):
    """Return ``{name: {"score", "tool"}}`` by metrics of sacreBLEU.

    Raises ValueError for other numbers of hypotheses than of references.
    """
    if len(hypotheses) != len(references):
        raise ValueError(
            f"hypotheses: expected {len(references):,}, one a reference, got {len(hypotheses):,}"
        )
    scores = {}
    for name, metric in metrics.items():
        score = metric.corpus_score(hypotheses, [references]).score
        scores[name] = {"score": score, "tool": f"sacreBLEU {metric.get_signature()}"}
    return scores


def translation_scores(hypotheses, references, compounds=False):
    """Return ``{name: {"score", "tool"}}`` of tokenised lines, with `compounds` split ones too.

    The tokens are taken as they stand (``--tokenize none --force`` of sacreBLEU).
    """
    bleu = BLEU(tokenize="none", force=True)
    scores = scores_by(hypotheses, references, tokenised_bleu=bleu)
    if compounds:
        split = [[compound_split(line) for line in lines] for lines in (hypotheses, references)]
        scores |= scores_by(*split, compound_split_tokenised_bleu=bleu)
    return scores


def detokenised_scores(hypotheses, references, lowercase=False):
    """Return ``{name: {"score", "tool"}}`` of plain text; `lowercase` for lower-cased models."""
    metrics = {"sacrebleu": BLEU(lowercase=lowercase), "chrf": CHRF(lowercase=lowercase)}
    return scores_by(hypotheses, references, **metrics)


def rouge_scores(hypotheses, references):
    """Return ``{name: {"score", "tool"}}`` of tokenised summaries, in percent.

    ``" . "`` ends a sentence. Moses's escapes (``&apos;``) are undone: their letters would count
    as a word.
    """
    texts = [[html.unescape(line) for line in lines] for lines in (hypotheses, references)]
    settings = "F-measure, stemming, sentences separated by ' . '"
    tool = f"rouge-score {version('rouge-score')}, {settings}"
    scores = rouge(*texts, sentence_separator=" . ")
    return {name: {"score": score, "tool": tool} for name, score in scores.items()}


def detokenise(lines, language):
    """Return Moses tokens as plain text."""
    moses = MosesDetokenizer(language)
    return [moses.detokenize(line.split()) for line in lines]

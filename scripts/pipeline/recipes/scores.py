"""The scores of the papers, each by the name of its tool."""

import html
import re

import sacrebleu

from talk_fairseq.rouge import rouge
from talk_fairseq.rouge import version as rouge_version

# The score that the papers report of a benchmark; of others, tokenised BLEU.
REPORTED = {
    "wikitext103": "perplexity",
    "wmt16_en_de": "compound_split_tokenised_bleu",
    "wmt17_zh_en": "sacrebleu",
    "cnn_dm": "rouge_lsum",
}


def compound_split(line):
    """Return a tokenised line with its compounds split, as for the published En-De scores.

    ``a-b`` becomes ``a ##AT##-##AT## b`` from left to right. A character is matched once, so
    that of ``a-b-c``, whose middle part has one, the second hyphen stays.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def score_with(metric, hypotheses, references):
    """Return ``{"score", "tool"}`` by a metric of sacreBLEU. Raises ValueError for other counts."""
    if len(hypotheses) != len(references):
        raise ValueError(
            f"hypotheses: expected {len(references):,}, one a reference, got {len(hypotheses):,}"
        )
    score = metric.corpus_score(hypotheses, [references]).score
    return {"score": score, "tool": f"sacreBLEU {metric.get_signature()}"}


def translation_scores(hypotheses, references, compounds=False):
    """Return ``{name: {"score", "tool"}}`` of tokenised lines, with `compounds` split ones too.

    The tokens are taken as they stand (``--tokenize none --force`` of sacreBLEU).
    """

    def bleu():
        return sacrebleu.metrics.BLEU(tokenize="none", force=True)

    scores = {"tokenised_bleu": score_with(bleu(), hypotheses, references)}
    if compounds:
        split = [[compound_split(line) for line in lines] for lines in (hypotheses, references)]
        scores["compound_split_tokenised_bleu"] = score_with(bleu(), *split)
    return scores


def detokenised_scores(hypotheses, references, lowercase=False):
    """Return ``{name: {"score", "tool"}}`` of plain text; `lowercase` for lower-cased models."""
    bleu = sacrebleu.metrics.BLEU(lowercase=lowercase)
    chrf = sacrebleu.metrics.CHRF(lowercase=lowercase)
    return {
        "sacrebleu": score_with(bleu, hypotheses, references),
        "chrf": score_with(chrf, hypotheses, references),
    }


def rouge_scores(hypotheses, references):
    """Return ``{name: {"score", "tool"}}`` of tokenised summaries, in percent.

    ``" . "`` ends a sentence. Moses's escapes (``&apos;``) are undone: their letters would count
    as a word.
    """
    texts = [[html.unescape(line) for line in lines] for lines in (hypotheses, references)]
    tool = f"rouge-score {rouge_version()}, F-measure, stemming, sentences separated by ' . '"
    scores = rouge(*texts, sentence_separator=" . ")
    return {name: {"score": score, "tool": tool} for name, score in scores.items()}


def detokenise(lines, language):
    """Return Moses tokens as plain text."""
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(language)
    return [moses.detokenize(line.split()) for line in lines]

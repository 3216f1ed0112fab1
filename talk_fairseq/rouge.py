"""ROUGE by Google's rouge-score, for validation in training and for scripts/evaluate_rouge.sh.

It reproduces ROUGE-1.5.5, the Perl program of the papers, except for small differences in how text
is cut into words: here lower-cased runs of a-z and 0-9. Text in another script scores 0.
"""

# Our names, which fairseq takes for metrics, and those of rouge-score.
KINDS = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}


def rouge_sums(hypotheses, references, sentence_separator=None):
    """Return the F-measures of the four kinds, each summed over the summaries.

    They compare the stems of words (Porter), as ``-m`` of ROUGE-1.5.5 does.

    Args:
        hypotheses, references: lists of as many summaries. In rouge_lsum, the longest common
            subsequence is taken by sentences, which newlines separate; the other kinds take a
            summary as one sequence of words.
        sentence_separator: text that separates sentences besides the newline (default: none).

    Returns ``{"rouge_1": sum, …}``, each between 0 and the number of summaries. Raises ValueError
    if the lists differ in length, and ImportError without rouge-score.
    """
    wanted, given = len(references), len(hypotheses)
    if given != wanted:
        raise ValueError(f"hypotheses: expected one for each of {wanted} references, got {given}")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE needs the package rouge-score: pip install rouge-score") from error
    scorer = RougeScorer(list(KINDS.values()), use_stemmer=True)
    sums = dict.fromkeys(KINDS, 0.0)
    for hypothesis, reference in zip(hypotheses, references):
        if sentence_separator:
            hypothesis = hypothesis.replace(sentence_separator, "\n")
            reference = reference.replace(sentence_separator, "\n")
        scores = scorer.score(reference, hypothesis)
        for kind, its_name in KINDS.items():
            sums[kind] += float(scores[its_name].fmeasure)
    return sums


def rouge(hypotheses, references, sentence_separator=None):
    """Return the mean F-measures in percent, as papers print them; see `rouge_sums`.

    Also raises ValueError if there are no summaries.
    """
    if not references:
        raise ValueError("references: expected summaries, got none")
    sums = rouge_sums(hypotheses, references, sentence_separator)
    return {kind: 100 * total / len(references) for kind, total in sums.items()}

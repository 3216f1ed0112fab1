"""Scores of the test set, by the tools of each task, and of baselines that need no training.

``results`` is what results.json holds. Each function writes into it, for each seed of a system and
for the system, from the runs in the folders ``folder_of(system, seed)``. That of a task returns the
names of the scores of which a system has the mean over its seeds, beside its "score".
"""

import re
import statistics
from importlib.metadata import version

import numpy as np

from pipeline.common.files import read_lines
from pipeline.common.logs import read_hypotheses

SCORES = {"mt": "bleu", "lm": "perplexity_per_token", "summ": "rouge_l"}  # the keys of a score
LEADS = (*range(3, 31), 40, 50, 75, 100)  # words that a lead baseline may have


def score(results, corpus, languages, folder_of):
    """Score all runs, and give each system the mean over its seeds as its "score".

    The rows in "systems" have the runs in "seeds". `corpus` is the folder of the prepared text,
    whose files end with the `languages`, the target last.

    Raises ValueError if a run did not score the whole test set.
    """
    task = results["task"]
    functions = {"mt": score_translations, "lm": score_models, "summ": score_summaries}
    others = functions[task](results, corpus, languages, folder_of)
    for row in results["systems"].values():
        if seeds := row["seeds"].values():
            row["score"] = statistics.mean(seed[SCORES[task]] for seed in seeds)
            row |= {key: statistics.mean(seed[key] for seed in seeds) for key in others}
            row["p"] = max((s["p"] for s in seeds if s.get("p") is not None), default=None)


def bleu_tokenizer(language):
    """Return sacreBLEU's tokenizer of a language without spaces, such as zh or zh-CN, or None."""
    return {"zh": "zh", "ja": "char"}.get(re.split("[-_.]", language)[0])


def score_translations(results, corpus, languages, folder_of):
    """Score by sacreBLEU, with interval and p of the paired bootstrap of each seed."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    references = read_lines(corpus / f"test.{languages[1]}")
    results["test"] = {"sentences": len(references)}
    systems, reference = results["systems"], results["reference"]
    for seed in sorted({seed for row in systems.values() for seed in row["seeds"]}, key=int):
        names = [name for name, row in systems.items() if seed in row["seeds"]]
        names.sort(key=lambda name: name != reference)  # which the test takes first
        named = [
            (name, read_hypotheses(folder_of(name, seed) / "generated", len(references)))
            for name in names
        ]
        bleu = BLEU(references=[references], tokenize=bleu_tokenizer(languages[1]))
        signatures, scores = PairedTest(named, {"BLEU": bleu}, None, test_type="bs")()
        results["signature"] = str(signatures["BLEU"])
        tested = names[0] == reference and len(names) > 1
        if tested:
            results["baseline"] = reference
        for (name, hypotheses), result in zip(named, scores["BLEU"]):
            # sacreBLEU takes translations that are the same for a difference.
            p = 1.0 if hypotheses == named[0][1] else result.p_value
            systems[name]["seeds"][seed].update(
                bleu=result.score,
                interval=[result.mean - result.ci, result.mean + result.ci],
                p=p if tested and name != reference else None,
            )
    for row in systems.values():
        if seeds := row["seeds"].values():
            row["interval"] = [statistics.mean(s["interval"][i] for s in seeds) for i in (0, 1)]
    return []


def score_models(results, corpus, languages, folder_of):
    """Score by the perplexity per token and per word, also of the unigram."""
    from pipeline.common.perplexity import TestSet, read_score

    test = TestSet(corpus, languages[0])
    results["test"] = test.counts
    for name, row in results["systems"].items():
        for seed, scores in row["seeds"].items():
            evaluated = folder_of(name, seed) / "averaged.txt"
            scores.update(test.perplexities(read_score(evaluated, test.counts["tokens"])[1]))
    results["unigram"] = test.perplexities(test.unigram_loss)
    return ["perplexity_per_word"]


def score_summaries(results, corpus, languages, folder_of):
    """Score by ROUGE, with p of a paired bootstrap of ROUGE-2; also the sources' first words."""
    from talk_fairseq.rouge import KINDS, rouge  # which takes seconds to import

    (valid, wanted), (test, references) = (
        [read_lines(corpus / f"{part}.{side}") for side in languages] for part in ("valid", "test")
    )
    results["test"] = {"summaries": len(references)}
    results["signature"] = f"rouge-score {version('rouge-score')}, F-measure, stemming"
    each = {}  # ROUGE-2 of each summary, by system and seed
    for name, row in results["systems"].items():
        for seed, scores in row["seeds"].items():
            hypotheses = read_hypotheses(folder_of(name, seed) / "generated", len(references))
            of_each = [rouge([ours], [theirs]) for ours, theirs in zip(hypotheses, references)]
            scores |= {kind: statistics.mean(one[kind] for one in of_each) for kind in KINDS}
            each[name, seed] = [one["rouge_2"] for one in of_each]
    for (name, seed), found in each.items():
        baseline = each.get((results["reference"], seed))
        if baseline and name != results["reference"]:
            results["baseline"] = results["reference"]
            results["systems"][name]["seeds"][seed]["p"] = paired_bootstrap(found, baseline)

    def lead(sources, words):
        return [" ".join(line.split()[:words]) for line in sources]

    validation = {n: rouge(lead(valid, n), wanted)["rouge_l"] for n in LEADS}
    best = max(validation, key=validation.get)
    results["lead"] = {"words": best, **rouge(lead(test, best), references)}
    return list(KINDS)


def paired_bootstrap(scores, baseline):
    """Return p of the difference between two means of scores of the same texts.

    It is the share of 1,000 resamples whose difference is as far from their mean, on either side,
    as the one that was found is from 0. (That of sacreBLEU counts about one side.)
    """
    differences = np.subtract(scores, baseline)
    drawn = np.random.default_rng(12345).integers(len(scores), size=(1000, len(scores)))
    resampled = differences[drawn].mean(axis=1)
    as_far = abs(resampled - resampled.mean()) >= abs(differences.mean())
    return (1 + int(as_far.sum())) / 1001

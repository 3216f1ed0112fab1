"""Summaries: fairseq's translation task with long sources cut, and ROUGE in validation.

docs/own_data.md has the commands to prepare, train, generate and score. fairseq-generate takes the
task's options from its flags, not from the checkpoint.
"""

import json
import logging
from argparse import Namespace
from dataclasses import dataclass, fields
from itertools import chain
from typing import Optional  # fairseq does not read `str | None`

import torch
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from talk_fairseq.models.config import option
from talk_fairseq.rouge import KINDS, rouge_sums

logger = logging.getLogger(__name__)

OF_COMMANDS = {  # options that change what fairseq's commands generate, and not validation
    *("constraints", "lm_path", "lm_weight", "prefix_size", "replace_unk", "retain_dropout"),
    *("retain_dropout_modules", "sacrebleu", "score_reference"),
}


@dataclass
class TaLKSummarizationConfig(TranslationConfig):
    """The options of fairseq's translation task, and these."""

    max_source_positions: int = option(
        400, "cut sources to this many tokens, the end of sentence included"
    )
    stepwise_lenpen: bool = option(
        False,
        "divide scores by ((5 + length) / 6)^lenpen (Wu et al., 2016) at every step of the beam "
        "search, in place of length^lenpen at the end of each hypothesis",
    )
    eval_rouge: bool = option(False, "score generated summaries by ROUGE in validation")
    eval_rouge_args: str = option(
        "{}",
        "options of generation for --eval-rouge as JSON, such as "
        '{"beam": 4, "max_len_b": 140, "no_repeat_ngram_size": 3}',
    )
    eval_rouge_remove_bpe: Optional[str] = option(
        None, "remove BPE before computing ROUGE", argparse_const="@@ "
    )
    eval_rouge_sentence_separator: Optional[str] = option(
        None, "text between the sentences of a summary, such as ' . ', for rouge_lsum"
    )
    eval_rouge_print_samples: bool = option(False, "print a summary of each batch in validation")


@register_task("talk_summarization", dataclass=TaLKSummarizationConfig)
class TaLKSummarizationTask(TranslationTask):
    """Summarise documents: sources are always cut, see `TaLKSummarizationConfig`.

    With ``eval_rouge``, validation logs rouge_1, rouge_2, rouge_l and rouge_lsum: mean F-measures
    in percent, with stemming. Raises ValueError for options that cannot work.
    """

    def __init__(self, cfg, src_dict, tgt_dict):
        longest = cfg.max_source_positions
        if longest < 2:
            raise ValueError(f"max_source_positions: expected at least 2, got {longest}")
        self.eval_rouge_options = generation_options(cfg.eval_rouge_args)
        cfg.truncate_source = True  # fairseq cuts to max_source_positions, and keeps the end
        super().__init__(cfg, src_dict, tgt_dict)

    def build_dataset_for_inference(self, src_tokens, src_lengths, **kwargs):
        """Return sources as a data set (fairseq-interactive), cut with their last token kept."""
        longest = self.cfg.max_source_positions
        src_tokens = [torch.cat([tokens[:-1][: longest - 1], tokens[-1:]]) for tokens in src_tokens]
        src_lengths = [len(tokens) for tokens in src_tokens]
        return super().build_dataset_for_inference(src_tokens, src_lengths, **kwargs)

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **kwargs):
        """Return fairseq's generator, or with ``stepwise_lenpen`` our own.

        Raises ValueError for options of generation that exclude each other.
        """
        longest, shortest = getattr(args, "max_len_b", 200), getattr(args, "min_len", 1)
        if getattr(args, "max_len_a", 0) == 0 and shortest > longest:
            raise ValueError(f"min_len: expected at most max_len_b = {longest}, got {shortest}")
        if self.cfg.stepwise_lenpen:
            for other in ("unnormalized", "print_alignment"):
                if getattr(args, other, None):
                    raise ValueError(f"stepwise_lenpen: expected no {other} beside it")
            seq_gen_cls = seq_gen_cls or StepwiseLengthPenaltyGenerator
        return super().build_generator(models, args, seq_gen_cls, extra_gen_cls_kwargs, **kwargs)

    def build_model(self, cfg, from_checkpoint=False):
        """Build the model, and with ``eval_rouge`` the generator that validation uses."""
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.eval_rouge:
            rouge_sums([], [])  # fails here, not after the first epoch, without rouge-score
            options = Namespace(**self.eval_rouge_options)
            self.rouge_generator = self.build_generator([model], options)
        return model

    def valid_step(self, sample, model, criterion):
        """Return the loss and, with ``eval_rouge``, the sums that `reduce_metrics` reads."""
        loss, sample_size, logging_output = super().valid_step(sample, model, criterion)
        if self.cfg.eval_rouge:
            hypotheses, references = self._summarize(sample, model)
            sums = rouge_sums(hypotheses, references, self.cfg.eval_rouge_sentence_separator)
            # Numbers that fairseq can add up over batches and processes.
            logging_output["_rouge_count"] = len(references)
            logging_output.update((f"_{kind}", total) for kind, total in sums.items())
        return loss, sample_size, logging_output

    def _summarize(self, sample, model):
        bpe, pad = self.cfg.eval_rouge_remove_bpe, self.tgt_dict.pad()

        def text(tokens, unknown):
            # Otherwise an unknown word of the reference would match one of the hypothesis.
            return self.tgt_dict.string(tokens.int().cpu(), bpe, unk_string=unknown)

        generated = self.inference_step(self.rouge_generator, [model], sample)
        hypotheses = [text(beam[0]["tokens"], "unknowninhypothesis") for beam in generated]
        targets = (utils.strip_pad(target, pad) for target in sample["target"])
        references = [text(target, "unknowninreference") for target in targets]
        if self.cfg.eval_rouge_print_samples:
            logger.info("example hypothesis: " + hypotheses[0])
            logger.info("example reference: " + references[0])
        return hypotheses, references

    def reduce_metrics(self, logging_outputs, criterion):
        """Log the metrics of some batches, of all processes."""
        super().reduce_metrics(logging_outputs, criterion)
        if not any("_rouge_count" in log for log in logging_outputs):
            return  # training
        count = float(sum(log.get("_rouge_count", 0) for log in logging_outputs))
        for kind in KINDS:
            total = float(sum(log.get(f"_{kind}", 0) for log in logging_outputs))
            metrics.log_scalar(kind, 100 * total / max(count, 1), weight=count, round=2)


def generation_options(text):
    """Return the dictionary of ``eval_rouge_args``.

    Raises ValueError unless it is JSON and has only options of fairseq's group `generation`, with
    values of their types, and none that would change what a command generates, but not validation.
    """
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"eval_rouge_args: expected a JSON object, got {text!r}")
    known = {option.name for option in fields(GenerationConfig)} - OF_COMMANDS
    for name in options.keys() - known:
        raise ValueError(f"eval_rouge_args: expected options of generation, got {name!r}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(GenerationConfig), options)
    except OmegaConfBaseException as error:
        raise ValueError(f"eval_rouge_args: {str(error).splitlines()[0]}") from None
    if merged.beam < 1:
        raise ValueError(f"eval_rouge_args: expected a beam of at least 1, got {merged.beam}")
    return {name: merged[name] for name in options}


# --- The step-wise length penalty ---


def length_penalty(length, alpha):
    """Return ((5 + length) / 6) ** alpha, the penalty of Wu et al. (2016).

    Sums of log-probabilities are divided by it; the end of sentence counts.
    """
    return ((5 + length) / 6) ** alpha


class StepwiseLengthPenaltyBeamSearch(BeamSearch):
    """Beam search where finished hypotheses stay in the beam, ranked among the unfinished.

    At each step the beam is filled with the best of its finished hypotheses and of all ways to
    extend the unfinished, by the sum of log-probabilities divided by `length_penalty`.
    (In fairseq's own, a hypothesis that ends leaves the beam, and what is left has one length:
    there a penalty at every step would not change any choice.)

    Attributes:
        finished: (B, beam) scores of the hypotheses in the beam that have ended, else -inf.
        lowest: (B,) the highest of the beam's lowest scores since hypotheses were last taken out.
    """

    def __init__(self, tgt_dict, alpha):
        super().__init__(tgt_dict)
        self.alpha = alpha

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        """Return fairseq's candidates, with -inf for what fell out of the beam."""
        B, beam, _ = lprobs.shape
        scores, tokens, parents = super().step(step, lprobs, scores)
        normalized = scores / length_penalty(step + 1, self.alpha)
        if step == 0:
            self.finished, self.lowest = normalized.new_full((B, beam), -torch.inf), -torch.inf

        pool = torch.cat([self.finished, normalized], dim=1)
        best = pool.argsort(dim=1, descending=True, stable=True)[:, :beam]
        self.lowest = pool.gather(1, best[:, -1:]).squeeze(1).clamp(min=self.lowest)
        in_beam = torch.zeros_like(pool, dtype=torch.bool).scatter(1, best, True)
        ended = torch.cat([torch.ones_like(self.finished).bool(), tokens.eq(self.eos)], dim=1)
        self.finished = pool.masked_fill(~(in_beam & ended), -torch.inf).topk(beam).values

        # Candidates outside the beam get -inf and the end of a sentence, which is never finished
        # with that score. The decoder goes on computing these rows; it would mask padding there.
        out = ~in_beam[:, beam:] | normalized.eq(-torch.inf)
        return scores.masked_fill(out, -torch.inf), tokens.masked_fill(out, self.eos), parents

    def prune_sentences(self, batch_idxs):
        """Keep only these rows of the batch."""
        self.finished = self.finished[batch_idxs]


class StepwiseLengthPenaltyGenerator(SequenceGenerator):
    """fairseq's generator with `StepwiseLengthPenaltyBeamSearch`, whose alpha is `len_penalty`.

    A sentence is done when its whole beam is finished, or at the maximum length; its hypotheses
    are those of the last beam, with the scores of the search. Raises ValueError with a search
    strategy other than fairseq's BeamSearch.
    """

    def __init__(self, models, tgt_dict, *, search_strategy, len_penalty, **options):
        if type(search_strategy) is not BeamSearch:
            raise ValueError(
                f"stepwise_lenpen: expected beam search, got {type(search_strategy).__name__}"
            )
        search = StepwiseLengthPenaltyBeamSearch(tgt_dict, len_penalty)
        options["normalize_scores"] = False  # finalize_hypos does
        super().__init__(models, tgt_dict, search_strategy=search, **options)

    def finalize_hypos(
        self, step, bbsz_idx, eos_scores, tokens, scores, finalized, finished, *rest
    ):
        """Drop hypotheses that have fallen out of the beam, then take in those that end here."""
        unfinished = [sentence for sentence, done in enumerate(finished) if not done]
        held = [(row, hypo) for row, s in enumerate(unfinished) for hypo in finalized[s]]
        if held:
            # All at once, as each look at a score waits for a GPU.
            rows, hypotheses = zip(*held)
            reached = torch.stack([hypo["score"] for hypo in hypotheses])
            kept = iter((reached >= self.search.lowest[list(rows)]).tolist())
            for sentence in unfinished:
                finalized[sentence] = [hypo for hypo in finalized[sentence] if next(kept)]
        self.search.lowest = -torch.inf
        newly_finished = super().finalize_hypos(
            step, bbsz_idx, eos_scores, tokens, scores, finalized, finished, *rest
        )
        for hypo in chain.from_iterable(finalized):
            if len(hypo["tokens"]) == step + 1:  # those that end here
                hypo["score"] = hypo["score"] / length_penalty(step + 1, self.search.alpha)
        return newly_finished

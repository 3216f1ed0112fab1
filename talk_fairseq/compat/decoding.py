"""Patches of what fairseq generates and scores."""

import math

import fairseq.ngram_repeat_block
import torch

from talk_fairseq.compat.patching import patches, patches_command


@patches("fairseq.tasks.language_modeling.LanguageModelingTask", "eval_lm_dataloader")
@patches(
    "fairseq.tasks.multilingual_language_modeling.MultilingualLanguageModelingTask",
    "eval_lm_dataloader",
)
def score_every_token(original, self, dataset, *args, max_positions=None, **kwargs):
    """Raise ValueError where ``fairseq-eval-lm`` would skip blocks over the model's maximum.

    Also for a ``--context-window`` with several workers or shards, which would give each block the
    tokens before another one as its context.

    Without it: only what is left is scored. Without the ``--tokens-per-sample`` of training, which
    is then 1024, every block is skipped, and the perplexity is 1.00 or that of a short last block.
    """
    parts = max(kwargs.get("num_workers", 1), kwargs.get("num_shards", 1))
    if kwargs.get("context_window", 0) > 0 and parts > 1:
        raise ValueError(
            "--context-window: expected at most 1 of --num-workers and of --num-shards, "
            f"got {parts}"
        )
    if max_positions is not None:
        _, skipped = dataset.filter_indices_by_size(dataset.ordered_indices(), max_positions)
        if len(skipped) > 0:
            raise ValueError(
                f"expected blocks of at most {max_positions} tokens to score, got {len(skipped)} "
                "longer ones: give --tokens-per-sample as in training and --sample-break-mode none"
            )
    return original(self, dataset, *args, max_positions=max_positions, **kwargs)


@patches_command("generate", "main")
def score_with_sacrebleu(original, args):
    """Read ``--sacrebleu`` of ``fairseq-generate``, as ``--scoring sacrebleu``.

    Without it: nothing reads it, though fairseq's own warning recommends it, and the score that is
    printed is BLEU of what stands between spaces.
    """
    if getattr(args, "sacrebleu", False) and args.scoring == "bleu":
        args.scoring = "sacrebleu"
    return original(args)


def _no_repeat_ngram(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
    """Block the n-grams of ``--no-repeat-ngram-size`` without fairseq's CUDA extension.

    A row that would be left without any word stays as it is: a prompt or a prefix allows one word
    alone, which may repeat an n-gram. Without it: nothing is blocked, since fairseq compares
    n-grams with the end of the whole buffer, which is padding until the last step.

    Args:
        tokens: (rows, positions) of which the first ``step + 1`` are written, one to begin with.
        lprobs: (rows, words), set to -inf where a word would complete an n-gram that is there.
    """
    n = self.no_repeat_ngram_size
    if step >= n:
        written = tokens[:, 1 : step + 1]
        ngrams = written.unfold(1, n, 1)  # (rows, number, n)
        last = written[:, step - n + 1 :].unsqueeze(1)
        repeated = ngrams[:, :, :-1].eq(last).all(dim=2)
        blocked = torch.zeros_like(lprobs).scatter_add_(1, ngrams[:, :, -1], repeated.to(lprobs))
        kept = lprobs.masked_fill(blocked > 0, -math.inf)
        lprobs.copy_(torch.where(kept.isneginf().all(dim=1, keepdim=True), lprobs, kept))
    return lprobs


# TorchScript reads the source of the function that stands here: a wrapper would show the original.
fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram


@patches("fairseq.search.DiverseBeamSearch", "step")
def index_diverse_beams_by_row(
    original, self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None
):
    """Give ``--diverse-beam-groups`` the rows of the batch rather than the sentences' numbers.

    The first step has all sentences, which tells the row of each. Without it: IndexError where a
    number exceeds the batch; where none does, the penalties of another sentence.
    """
    if step == 0:
        self.first_batch_idxs = original_batch_idxs
    elif original_batch_idxs is not None:
        same = original_batch_idxs.unsqueeze(1).eq(self.first_batch_idxs)
        original_batch_idxs = same.int().argmax(dim=1)
    return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)

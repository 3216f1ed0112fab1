"""SimCut (Gao et al., NAACL 2022): keep predictions the same when embeddings of words are cut.

    fairseq-train DATA --user-dir talk_fairseq --label-smoothing 0.1 \\
        --criterion label_smoothed_cross_entropy_with_simcut --simcut-alpha 3 --simcut-cutoff 0.05 …
"""

import contextlib
from dataclasses import dataclass

import torch
from fairseq.criterions import label_smoothed_cross_entropy, register_criterion
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from talk_fairseq.models.config import option


@dataclass
class SimCutConfig(label_smoothed_cross_entropy.LabelSmoothedCrossEntropyCriterionConfig):
    """The options of fairseq's label smoothing, and these."""

    simcut_alpha: float = option(3.0, "weight of the divergence; 0 is label smoothing alone")
    simcut_cutoff: float = option(0.05, "probability of cutting the embedding of a token")


@register_criterion("label_smoothed_cross_entropy_with_simcut", dataclass=SimCutConfig)
class SimCutCriterion(label_smoothed_cross_entropy.LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross-entropy + simcut_alpha * KL(p(· | x, y) || p(· | x_cut, y_cut)).

    That is the paper's L_ce + alpha L_simkl: the cross-entropy is that of the whole sentences, and
    in x_cut and y_cut, source and shifted target, each embedding is zero with probability
    simcut_cutoff. Gradients flow through both sides of the divergence, which the authors found to
    matter; each side is a pass of its own, with its own dropout. Validation is label smoothing
    alone.

    Embeddings are zeroed where they are looked up, in ``embed_tokens`` of both sides: positions
    stay, and another token in their place (unk, padding) would have an embedding that is learnt, or
    mask attention. Raises ValueError for a model without these, for options out of range, and for
    ``--checkpoint-activations`` in several processes without legacy_ddp.
    """

    def __init__(self, task, cfg):
        super().__init__(
            task, cfg.sentence_avg, cfg.label_smoothing, cfg.ignore_prefix_size, cfg.report_accuracy
        )
        if not cfg.simcut_alpha >= 0:
            raise ValueError(f"simcut_alpha: expected at least 0, got {cfg.simcut_alpha}")
        if not 0 <= cfg.simcut_cutoff < 1:
            raise ValueError(f"simcut_cutoff: expected from 0 to below 1, got {cfg.simcut_cutoff}")
        self.simcut_alpha, self.simcut_cutoff = cfg.simcut_alpha, cfg.simcut_cutoff

    def compute_loss(self, model, net_output, sample, reduce=True):
        """Return ``(loss, nll_loss)``: sums over the tokens or, without `reduce`, one for each."""
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        loss, nll_loss = label_smoothed_cross_entropy.label_smoothed_nll_loss(
            lprobs, target, self.eps, self.padding_idx, reduce
        )
        if model.training and self.simcut_alpha > 0:
            refuse_second_pass(model)
            with embeddings_cut(model, self.simcut_cutoff):
                cut_output = model(**sample["net_input"])
            cut_lprobs, _ = self.get_lprobs_and_target(model, cut_output, sample)
            divergence = F.kl_div(cut_lprobs, lprobs, reduction="none", log_target=True)
            divergence = divergence.sum(dim=-1, keepdim=True)
            divergence = divergence.masked_fill(target.unsqueeze(-1).eq(self.padding_idx), 0)
            loss = loss + self.simcut_alpha * (divergence.sum() if reduce else divergence)
        return loss, nll_loss


def refuse_second_pass(model):
    """Raise ValueError for a model whose parameters torch lets take part in one pass alone."""
    parts = list(model.modules()) if torch.distributed.is_initialized() else []
    shared = any(isinstance(part, DistributedDataParallel) for part in parts)
    if shared and any(hasattr(part, "precheckpoint_forward") for part in parts):
        raise ValueError(
            "--ddp-backend: expected legacy_ddp for SimCut with --checkpoint-activations, got "
            "pytorch_ddp"
        )


@contextlib.contextmanager
def embeddings_cut(model, probability):
    """Within it, `model` looks up zeros in place of some tokens' embeddings.

    Raises ValueError for a model without ``embed_tokens`` in its encoder and its decoder.
    """

    def cut(embed_tokens, inputs, embedded):
        drawn = torch.rand(inputs[0].shape, device=embedded.device) < probability
        return embedded.masked_fill(drawn.unsqueeze(-1), 0)

    try:
        tables = {model.encoder.embed_tokens, model.decoder.embed_tokens}  # may be one and the same
    except AttributeError as error:
        raise ValueError(
            f"criterion: expected embed_tokens in encoder and decoder for SimCut, got {error}"
        ) from None
    with contextlib.ExitStack() as hooks:
        for table in tables:
            hooks.enter_context(table.register_forward_hook(cut))
        yield

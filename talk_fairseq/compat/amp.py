"""Patches of ``--amp``: torch's automatic mixed precision, which is in force on GPUs alone."""

from types import SimpleNamespace

import torch

from talk_fairseq.compat.patching import patches


@patches("fairseq.optim.amp_optimizer.AMPOptimizer", "__init__")
def take_options_of_amp(original, self, cfg, *args, **kwargs):
    """Let ``--amp-init-scale`` and ``--amp-scale-window`` set the scale of the loss.

    Without it: ``--fp16-init-scale`` is the first scale, and ``--amp-init-scale`` the window.
    """
    common, window = cfg.common, cfg.common.amp_scale_window
    read = SimpleNamespace(  # by the names under which fairseq looks for them
        fp16_init_scale=float(common.amp_init_scale), amp_init_scale=window,
        amp_scale_window=window, min_loss_scale=common.min_loss_scale,
    )  # fmt: skip
    original(self, SimpleNamespace(optimizer=cfg.optimizer, common=read), *args, **kwargs)


@patches("fairseq.optim.amp_optimizer.AMPOptimizer", "step")
def unscale_gradients_once(original, self):
    """Divide gradients by the scale of the loss once, when they are clipped.

    Without it: the update divides them again, silently, since it gives the scaler another object
    than clipping does. SGD and NAG then hardly move, nor does Adam once the scale is large.
    """
    self.scaler.step(self.optimizer)
    self.scaler.update()


@patches("fairseq.optim.amp_optimizer.AMPOptimizer", "state_dict")
def save_scale_of_amp(original, self):
    """Save the scale of the loss too. Without it: a run that resumes begins to look for it anew."""
    return {**original(self), "amp": self.scaler.state_dict()}


@patches("fairseq.optim.amp_optimizer.AMPOptimizer", "load_state_dict")
def load_scale_of_amp(original, self, state_dict, optimizer_overrides=None):
    """Load what `save_scale_of_amp` saves, if it is there."""
    state_dict = dict(state_dict)
    if scale := state_dict.pop("amp", None):
        self.scaler.load_state_dict(scale)
    original(self, state_dict, optimizer_overrides)


@patches("fairseq.modules.character_token_embedder.CharacterTokenEmbedder", "forward")
@patches("fairseq.modules.adaptive_input.AdaptiveInput", "forward")
def embed_without_autocast(original, self, *args, **kwargs):
    """Look up and project embeddings in the precision of the parameters.

    Without it: ``--amp`` ends with ``Index put requires the source and destination dtypes match``.
    """
    with torch.autocast(next(self.parameters()).device.type, enabled=False):
        return original(self, *args, **kwargs)

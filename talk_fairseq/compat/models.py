"""Patches of how fairseq builds models: from flags, names of archs and keys of YAML files."""

import argparse
import sys
import traceback
from dataclasses import fields
from pathlib import Path

import fairseq.dataclass.utils
import torch
from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqMultiModel,
)
from omegaconf import OmegaConf, open_dict

from talk_fairseq.compat.patching import command_module, patch_commands, patches, patches_command


@patches("fairseq.utils", "get_activation_fn")
def return_swish_as_function(original, activation):
    """Return a function for ``swish``, as for all other activations.

    For configs and architectures that name it: the flags of fairseq's own models do not offer it.
    ``ConformerLayer`` wants the class; it has imported the original by name and keeps it. Without
    it: the result is the class ``torch.nn.SiLU``, and the first forward raises TypeError.
    """
    function = original(activation)
    return torch.nn.functional.silu if function is torch.nn.SiLU else function


@patches_command("hydra_validate", "add_defaults")
@patches_command("hydra_train", "add_defaults")
@patches_command("train", "add_defaults")
@patches("fairseq.dataclass.initialize", "add_defaults")
def apply_arch_defaults_in_yaml(original, cfg):
    """Apply the defaults of the arch before those of the model's dataclass.

    The longest source and target are those of the task, as where flags set both. Raises ValueError
    for an arch of fairseq's own whose defaults ``fairseq-hydra-train`` has lost: it fills in those
    of the model before it imports the plugin. Without it: ``_name: transformer_lm_big`` silently
    trains the 6 layers of ``transformer_lm``.
    """
    OmegaConf.set_struct(cfg, False)
    model = cfg.get("model")
    name = model if isinstance(model, str) else getattr(model, "_name", None)
    options = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name))
    if options is not None:
        if model == name:
            cfg.model = {"_name": name}
        OmegaConf.set_struct(cfg.model, False)
        refuse_lost_arch(name, cfg.model, options)
        fairseq.models.ARCH_CONFIG_REGISTRY[name](cfg.model)
        for limit in ("max_source_positions", "max_target_positions"):
            of_task = OmegaConf.select(cfg, f"task.{limit}")
            if of_task and hasattr(options, limit) and limit not in cfg.model:
                cfg.model[limit] = of_task
        if cfg.model.get("base_shuffle") is False:  # an integer in fairseq's dataclasses
            cfg.model.base_shuffle = 0
    return original(cfg)


_APPLIED = set()  # archs whose defaults have been applied in this process


def refuse_lost_arch(name, model, options):
    """Raise ValueError where the defaults of the dataclass `options` stand for those of an arch."""
    defaults, of = {o.name: o.default for o in fields(options)}, ARCH_MODEL_NAME_REGISTRY[name]
    if of == name or not command_module("hydra_train") or defaults.keys() - model.keys():
        _APPLIED.add(name)
    if name in _APPLIED:
        return
    of_arch = argparse.Namespace()
    fairseq.models.ARCH_CONFIG_REGISTRY[name](of_arch)
    if lost := [k for k, v in vars(of_arch).items() if v != defaults.get(k, v) == model[k]]:
        raise ValueError(
            f"model._name: expected {of} and the options of {name} one by one, since "
            f"fairseq-hydra-train has lost its {', '.join(sorted(lost))}"
        )


@patches("fairseq.models", "build_model")
def build_legacy_models_from_yaml(original, cfg, task, *args, **kwargs):
    """Give models without a dataclass (transformer, lightconv, fconv) all flags in one Namespace.

    Without it: a YAML file that names one ends in ``has no attribute 'weight_softmax'``, since the
    defaults of the flags are not filled in, and those of the task are elsewhere; a list of one
    kernel size is a TypeError.
    """
    model = ARCH_MODEL_REGISTRY.get(getattr(cfg, "_name", None))
    if OmegaConf.is_config(cfg) and model and getattr(model, "__dataclass", None) is None:
        of_task = getattr(task, "cfg", None) or getattr(task, "args", None)  # of an older task
        with open_dict(cfg):  # and so in checkpoints: the task of a later command may differ
            for name in ("max_source_positions", "max_target_positions", "tokens_per_sample"):
                if name not in cfg and getattr(of_task, name, None) is not None:
                    cfg[name] = getattr(of_task, name)
        cfg = argparse.Namespace(**OmegaConf.to_container(cfg, resolve=True))
        fairseq.dataclass.utils._set_legacy_defaults(cfg, model)
    return original(cfg, task, *args, **kwargs)


@patches("fairseq.modules.dynamic_convolution.DynamicConv_scripatable", "__call__")
def weigh_short_sequences_as_steps_do(original, self, x, incremental_state=None, query=None):
    """Convolve fewer tokens than there are taps as if zeros stood before them.

    Without it: fairseq divides the taps of a token by the sum of those that the whole sequence has
    room for, but step by step by that of all taps, as its band matrices do. So a decoder that was
    trained on short sentences generates as another function, and sees how long a sentence is.
    TorchScript compiles `forward`, so it takes the module as it is, without the patch.
    """
    missing = self.kernel_size - len(x)
    causal = self.padding_l == self.kernel_size - 1
    if incremental_state is not None or missing <= 0 or self.in_proj or not causal:
        return original(self, x, incremental_state, query)
    before = (0, 0, 0, 0, missing, 0)
    x, query = (t if t is None else torch.nn.functional.pad(t, before) for t in (x, query))
    return original(self, x, None, query)[missing:]


@patches("fairseq.options", "get_parser")
def patch_commands_that_run(original, *args, **kwargs):
    """Patch commands that were imported after this package, as from Python.

    Without it: a finished run trains one update more, and carriage returns split lines.
    """
    patch_commands()
    return original(*args, **kwargs)


@patches("fairseq.tasks.multilingual_translation.MultilingualTranslationTask", "build_model")
def require_multi_model(original, self, args, *more, **kwargs):
    """Raise ValueError for a model of one pair in ``--task multilingual_translation``.

    Without it: ``ConfigAttributeError: Key 'left_pad_source'``, at the end of sixty lines.
    """
    name = getattr(args, "_name", None) or getattr(args, "arch", None)
    if not issubclass(ARCH_MODEL_REGISTRY.get(name, FairseqMultiModel), FairseqMultiModel):
        raise ValueError(
            "--arch: expected a model of several language pairs, such as multilingual_transformer, "
            f"for --task multilingual_translation, got {name}"
        )
    return original(self, args, *more, **kwargs)


@patches_command("generate", "main")
@patches("fairseq.distributed.utils", "call_main")
def end_commands_in_one_line(original, *args, **kwargs):
    """End a command with the message alone where this package refuses its options.

    That is an error of a patch (also for a text that cannot be opened), or what anything here
    raises while the task, the model, the criterion, the generator or the optimizer is built.
    ``fairseq-hydra-train`` and callers from Python get the error itself. ``fairseq-generate`` and
    ``fairseq-preprocess`` have no ``call_main``. Without it: fifty lines of traceback come first.
    """
    try:
        return original(*args, **kwargs)
    except (ValueError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        builders = {f"build_{name}" for name in ("model", "criterion", "generator", "optimizer")}
        building = any(frame.name in {"setup_task", *builders} for frame in frames)
        compat = Path(__file__).parent
        refused = Path(frames[-1].filename).is_relative_to(compat.parent if building else compat)
        callers = {frame.name for frame in traceback.extract_stack()}
        command = original.__name__ == "call_main" or "cli_main" in callers
        if not refused or command_module("hydra_train") or not command:
            raise
        sys.exit(f"{type(error).__name__}: {error}")

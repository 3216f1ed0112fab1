"""Translate checkpoints of the published TaLK implementation into our names.

They hold the options as a Namespace of fairseq 0.9 or 0.10. `upgrade` translates those where
fairseq upgrades what it has read (compat/checkpoints.py); the models call `rename_parameters` where
fairseq upgrades what it loads.
"""

import argparse
import ast
import re

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY

# What only the published layers have, and ours for each of their names.
_UNIT = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.conv\.offsets\.weight")
_PARAMETERS = (
    (r"(?P<linear>linear1|linear2|conv\.offsets)\.", r"self_attn.\g<linear>."),
    (r"(layer_norms\.0|conv_layer_norm)\.", "self_attn_layer_norm."),
    (r"layer_norms\.1\.", "final_layer_norm."),
)

_DROPOUTS = {"offset_dropout": 0.0, "input_dropout": 0.1}
_WINDOWS = {"encoder_max_left": "1,3,7,15x4", "decoder_max_left": "1,3,7,15x3"}
# Where the default of a published arch differs from that of ours with the same name.
_DEFAULTS = {
    "talkconv": {**_WINDOWS, **_DROPOUTS},
    "talkconv_iwslt_de_en": {"dropout": 0.1},
    "talkconv_lm": _DROPOUTS,
    "talkconv_lm_big": _DROPOUTS,
}


def upgrade(state):
    """Return the checkpoint `state`, with our options in its ``args`` if it is a published one.

    Its parameters keep their names. Raises ValueError for options that cannot be translated.
    """
    if not any(map(_UNIT.fullmatch, state["model"])):
        return state
    args = state.get("args")
    arch = getattr(args, "arch", None)
    if ARCH_MODEL_NAME_REGISTRY.get(arch) not in ("talkconv", "talkconv_lm"):
        raise ValueError(
            "args: expected the options of a talkconv arch beside parameters of the published "
            f"implementation, got {type(args).__name__ if arch is None else arch}"
        )
    state = {**state, "args": our_options(args, state["model"])}
    if state.get("last_optimizer_state") is not None:
        # It numbers the parameters in their published order, which is not ours. fairseq compares
        # this name and asks for --reset-optimizer.
        *history, last = state["optimizer_history"]
        name = f"{last.get('optimizer_name')} (of the published order of parameters)"
        state["optimizer_history"] = [*history, {**last, "optimizer_name": name}]
    return state


def our_options(args, parameters):
    """Return the published options `args` as a Namespace of ours; other options stay.

    Windows and a dropout of offsets that have our names already, as ``--model-overrides`` gives
    them, win. What the `parameters` of the checkpoint show, or the published code fixes, is always
    set. Raises ValueError for kernel sizes that are no list.
    """
    options = dict(vars(args))
    arch = options["arch"]
    if "weight_dropout" in options:
        options.setdefault("offset_dropout", options.pop("weight_dropout"))
    # The published layers never read activation_dropout, which their archs may have set.
    if "relu_dropout" in options:
        options["activation_dropout"] = options.pop("relu_dropout")
    options["activation_fn"] = "swish"

    layers = {}
    for side, layer in (unit.groups() for unit in map(_UNIT.fullmatch, parameters) if unit):
        layers[side] = max(layers.get(side, 0), int(layer) + 1)
    for side, count in layers.items():
        embed_dim, conv_dim = parameters[f"{side}.layers.0.linear2.weight"].shape
        options[f"{side}_conv_dim"] = int(conv_dim)
        sizes = options.pop(f"{side}_kernel_size_list", None)
        if sizes is not None:  # max_right is as max_left by default
            windows = _windows(f"{side}_kernel_size_list", sizes, count)
            options.setdefault(f"{side}_max_left", windows)
        # The published CNN-DM archs ask for 6 decoder heads of 512 channels, which no model has.
        heads = options.get(f"{side}_attention_heads")
        if heads and embed_dim % heads:
            offsets = len(parameters[f"{side}.layers.0.conv.offsets.weight"])
            options[f"{side}_attention_heads"] = offsets // (2 if side == "encoder" else 1)

    language_model = ARCH_MODEL_NAME_REGISTRY[arch] == "talkconv_lm"
    options["no_decoder_final_norm"] = language_model
    if language_model:
        options["decoder_normalize_before"] = True
    ours = argparse.Namespace(**{**_DEFAULTS.get(arch, {}), **options})
    ARCH_CONFIG_REGISTRY[arch](ours)  # sets what is still missing
    return ours


def _windows(name, sizes, layers):
    """Return the sizes of the first `layers` layers; the published code ignores the rest."""
    try:
        given = ast.literal_eval(sizes) if isinstance(sizes, str) else sizes
        return [int(size) for size in given][:layers]
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(f"{name}: expected sizes such as [3, 7, 15], got {sizes!r}") from None


def rename_parameters(state_dict):
    """Give the published parameters of a model our names, in place."""
    for side in {unit[1] for unit in map(_UNIT.fullmatch, state_dict) if unit}:
        layer = rf"(?P<layer>{side}\.layers\.\d+\.)"
        for key in list(state_dict):
            for old, ours in _PARAMETERS:
                new = re.sub(f"^{layer}{old}", r"\g<layer>" + ours, key)
                if new != key:
                    state_dict[new] = state_dict.pop(key)
        # Below 3, fairseq would drop the final norm of a decoder, which the published model has.
        state_dict[f"{side}.version"] = torch.Tensor([3])

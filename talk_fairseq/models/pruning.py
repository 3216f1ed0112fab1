"""``--encoder-layers-to-keep`` and ``--decoder-layers-to-keep``: a model of some layers of another.

Options are saved as they were given, so that they build the same model again, and parameters as
they are: a model that is trained after it was pruned loads like any other.
"""

import re

from talk_fairseq.models.config import window_list


def _kept(side):
    return sorted(map(int, side.layers_to_keep.split(",")))


def keep_layers(side, name, *windows):
    """Leave the layers that `layers_to_keep` names, and their windows, in the config `side`.

    Raises ValueError for layers that the model does not have.
    """
    if not side.layers_to_keep:
        return
    numbers = set(map(str, range(side.layers)))
    if not numbers.issuperset(layer.strip() for layer in side.layers_to_keep.split(",")):
        raise ValueError(
            f"{name}_layers_to_keep: expected numbers from 0 to {side.layers - 1}, such as 0,2, "
            f"got {side.layers_to_keep!r}"
        )
    kept = _kept(side)
    for option in windows:
        if getattr(side, option) is not None:
            given = window_list(f"{name}_{option}", getattr(side, option), side.layers)
            setattr(side, option, [given[layer] for layer in kept])
    side.layers = len(kept)


def prune_parameters(state_dict, side, name):
    """Return the parameters of the layers that the config `side` keeps, renumbered.

    Those of a model that has been pruned already stay as they are.
    """
    layer = re.compile(rf"{name}\.layers\.(\d+)\.")
    number = {key: int(found[1]) for key in state_dict if (found := layer.match(key))}
    if not side.layers_to_keep or len(set(number.values())) <= side.layers:
        return state_dict
    new = {old: f"{name}.layers.{index}." for index, old in enumerate(_kept(side))}
    return {
        layer.sub(new[number[key]], key, count=1) if key in number else key: value
        for key, value in state_dict.items()
        if key not in number or number[key] in new
    }

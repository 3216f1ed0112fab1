"""``--encoder-layers-to-keep`` and ``--decoder-layers-to-keep``: a model of some layers of another.

Options are saved as they were given, so that they build the same model again, and parameters as
they are: a model that is trained after it was pruned loads like any other.
"""

import re


def kept_layers(name, keep, layers):
    """Return the numbers in `keep`, text like ``"0,2"``, in order; all of `layers` for None.

    Raises ValueError, naming the side `name`, for a layer that is not there or named twice.
    """
    if not keep:
        return list(range(layers))
    given = [number.strip() for number in keep.split(",")]
    if len(set(given)) < len(given) or not set(map(str, range(layers))).issuperset(given):
        raise ValueError(
            f"{name}_layers_to_keep: expected different numbers from 0 to {layers - 1}, as in 0,2, "
            f"got {keep!r}"
        )
    return sorted(map(int, given))


def prune_parameters(state_dict, name, kept, layers):
    """Return the parameters of the layers `kept` of the `layers` of the side `name`, renumbered.

    A model that has no more layers than are kept stays as it is. Raises ValueError for any other
    number of layers, such as that of a model that was pruned to other layers.
    """
    layer = re.compile(rf"({name}\.layers\.)(\d+)(\..*)")
    found = {key: layer.fullmatch(key) for key in state_dict}
    count = len({match[2] for match in found.values() if match})
    if count <= len(kept):
        return state_dict
    if count != layers:
        raise ValueError(
            f"{name}_layers_to_keep: expected a checkpoint with {layers} layers, or with the "
            f"{len(kept)} that are kept, got {count}"
        )
    new = {str(number): str(index) for index, number in enumerate(kept)}
    return {
        match[1] + new[match[2]] + match[3] if match else key: state_dict[key]
        for key, match in found.items()
        if not match or match[2] in new
    }

"""The YAML files of configs/: reading them, their options, and in which two of them differ."""

import argparse
import difflib
import enum
import math
import re
import typing
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.command import BadInput
from pipeline.common.paths import CONFIGS

# What leaves a row's model and scores as they are: how often a run saves, and in which steps it
# makes up the batch. It may differ in a result of the row, and between the sessions of a run.
HARMLESS = {
    "checkpoint.keep_interval_updates",
    "checkpoint.save_interval_updates",
    "common.log_interval",
    "dataset.max_tokens",
    "dataset.num_workers",
    "dataset.validate_after_updates",
}


def rows():
    """Return the names of the papers' rows, such as ``iwslt14_de_en/talkconv``, in order."""
    paths = [path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "verses"]
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in paths)


def find_config(given):
    """Return ``(name, path)`` of a row, such as ``iwslt14_de_en/talkconv``, or of any YAML file.

    A row may be given with ``configs/`` and ``.yaml``. A file elsewhere is named after itself:
    ``folder/mine.yaml`` is ``mine``. Raises BadInput, with names that are like it, if there is
    none.
    """
    name = given.removeprefix("configs/").removesuffix(".yaml")
    names = rows()
    if name in names:
        return name, CONFIGS / f"{name}.yaml"
    path = Path(given).absolute()
    if path.suffix == ".yaml" and path.is_file():
        inside = path.resolve().is_relative_to(CONFIGS)
        own = path.resolve().relative_to(CONFIGS) if inside else Path(path.name)
        return own.with_suffix("").as_posix(), path
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = near or [other for other in names if other.startswith(name.partition("/")[0] + "/")][:3]
    benchmarks = dict.fromkeys(other.partition("/")[0] + "/" for other in names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(benchmarks)}"
    file = ", which is no file" if given.endswith(".yaml") else ""
    raise BadInput(f"NAME: expected a config, got {given!r}{file}; {hint}")


def read_config(given):
    """Return ``(name, config)``; `given` is as for `find_config`. Raises BadInput."""
    name, path = find_config(given)
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        got = " ".join(str(error).split())
        raise BadInput(f"NAME: expected YAML in {path}, got {got}") from None
    if "model" not in config:
        raise BadInput(f"NAME: expected options of fairseq-hydra-train in {path}, got no model")
    return name, config


def from_header(name, field):
    """Return what the comments that open the row `name` say of a `field`, such as "paper"."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    return re.search(rf"^# {field}: +(.*)$", text, re.MULTILINE)[1]


def with_overrides(config, overrides):
    """Return a copy of `config` with ``["GROUP.KEY=VALUE", …]``, read as YAML, in it."""
    for override in overrides:
        if not re.match(r"\+{0,2}\w+\.[\w.]+=", override):
            raise BadInput(f"overrides: expected GROUP.KEY=VALUE, got {override!r}")
    return OmegaConf.merge(
        config, OmegaConf.from_dotlist([override.lstrip("+") for override in overrides])
    )


def flat(config, prefix=""):
    """Return ``{"model.dropout": 0.3}`` of a nested config."""
    options = {}
    for key, value in OmegaConf.to_container(config).items():
        if isinstance(value, dict):
            options |= flat(OmegaConf.create(value), f"{prefix}{key}.")
        else:
            options[prefix + key] = value
    return options


def groups_of(config):
    """Return ``{"model": {"_name": …, "dropout": 0.3}, …}``; a group may be a name alone."""
    return {
        group: options if isinstance(options, dict) else {"_name": options}
        for group, options in OmegaConf.to_container(config).items()
    }


def resolved(config):
    """Return ``{"model.dropout": 0.3}`` of a nested config, with the options that its arch sets."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    import talk_fairseq  # noqa: F401  registers the archs

    model = argparse.Namespace(**groups_of(config)["model"])
    if set_defaults := ARCH_CONFIG_REGISTRY.get(model._name):
        set_defaults(model)
    return flat(config) | {f"model.{key}": value for key, value in vars(model).items()}


def differences(config, other, harmless=HARMLESS):
    """Return ``{key: (value, other value)}`` of the options in which two configs differ.

    An option that only an arch sets is not listed; one that a config states counts with the value
    that the other's arch sets.
    """
    stated = flat(config).keys() | flat(other).keys()
    one, two = resolved(config), resolved(other)
    pairs = {key: (one.get(key), two.get(key)) for key in sorted(stated - harmless)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


# --- The options of fairseq ---

# What an option of a type takes: in words, and as Python has it.
KINDS = {
    bool: ("true or false", bool),
    int: ("an integer", int),
    float: ("a number", (int, float)),
    str: ("text", (str, int, float)),
}


def check_options(config):
    """Raise BadInput for a key that is no option of fairseq's, or a value that one does not take.

    Hydra adds what it does not know, and fairseq's older models take any key. Importing what
    knows them, the dataclasses that fairseq registers and the flags of what has none, takes
    seconds.
    """
    import talk_fairseq  # noqa: F401  registers the models

    groups = groups_of(config)
    known = known_options(groups)
    for group, options in groups.items():
        for name, value in options.items():
            key = f"{group}.{name}"
            if key not in known:
                raise BadInput(
                    f"options: expected those of fairseq, got {key}{did_you_mean(key, known)}"
                )
            expected = known[key](value)
            if expected:
                raise BadInput(f"{key}: expected {expected}, got {value!r}")


def known_options(groups):
    """Return ``{"model.dropout": function, …}`` of every option beside the names in `groups`.

    Each function returns None for a value that the option takes, else what it expects, in words.
    Raises BadInput for a name that fairseq does not register.
    """
    from fairseq import models, tasks
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.registry import REGISTRIES
    from hydra.conf import HydraConf

    declared = {group.name: group.type for group in fields(FairseqConfig)} | {"hydra": HydraConf}
    registries = {group: registry["registry"] for group, registry in REGISTRIES.items()}
    registries |= {"model": models.ARCH_MODEL_REGISTRY, "task": tasks.TASK_REGISTRY}
    known = {}
    for group, schema in declared.items():
        if group in registries and group in groups:
            registry, name = registries[group], groups[group].get("_name")
            if name not in registry:
                raise BadInput(
                    f"{group}._name: expected one that fairseq registers, got {name!r}"
                    + did_you_mean(str(name), registry)
                )
            known[f"{group}._name"] = lambda value: None
            schema = getattr(registry[name], "__dataclass", None)
            if schema is None and hasattr(registry[name], "add_args"):
                parser = argparse.ArgumentParser(add_help=False)
                registry[name].add_args(parser)
                for flag in parser._actions:
                    known[f"{group}.{flag.dest}"] = partial(expected_by_flag, flag)
        if is_dataclass(schema):
            empty = OmegaConf.structured(schema)
            for field in fields(schema):
                known[f"{group}.{field.name}"] = partial(expected_by_field, empty, field)
    return known


def expected_by_field(empty, field, value):
    """Return what a field of the structured config `empty` expects; None if it takes `value`."""
    try:
        taken = OmegaConf.merge(empty, {field.name: value})
    except OmegaConfBaseException:
        return in_words(field.type)
    return expected_range(field.name, field.default, OmegaConf.to_container(taken)[field.name])


def expected_by_flag(flag, value):
    """Return what an argparse flag expects; None if it takes `value`, which is used as it is."""
    from fairseq.utils import eval_bool

    if value is None:
        return None
    if flag.choices:
        return None if value in flag.choices else f"one of {', '.join(map(str, flag.choices))}"
    kind = bool if flag.nargs == 0 or flag.type is eval_bool else flag.type or str
    if kind in KINDS:
        words, types = KINDS[kind]
        values = value if isinstance(value, list) and flag.nargs in ("+", "*") else [value]
        # For Python, True is a number.
        fits = all(
            isinstance(one, types) and isinstance(one, bool) == (kind is bool) for one in values
        )
        return expected_range(flag.dest, flag.default, value) if fits else words
    try:
        kind(str(value))
    except Exception:  # whatever a function of fairseq raises
        return f"what the flag {flag.option_strings[0]} takes"


# By how the names of options end.
COUNTS = ("coder_layers", "_dim", "_heads", "max_tokens", "batch_size", "update_freq")
SHARES = ("dropout", "layerdrop", "label_smoothing")


def expected_range(name, default, value):
    """Return the numbers that an option expects, in words; None if `value` fits or is no number.

    Numbers are negative only where fairseq's default is, as that means "off", and counts 0
    likewise.
    """
    numbers = [
        n for n in (value if isinstance(value, list) else [value]) if type(n) in (int, float)
    ]
    if name.endswith(SHARES):
        return None if all(0 <= n <= 1 for n in numbers) else "0 to 1"
    default = default if type(default) in (int, float) else math.inf
    least = 1 if name.endswith(COUNTS) and default > 0 else 0
    return None if default < 0 or all(n >= least for n in numbers) else f"at least {least}"


def in_words(kind):
    """Return what a type in one of fairseq's dataclasses stands for."""
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is typing.Union:
        return in_words(inner[0])
    if typing.get_origin(kind) in (list, tuple):
        return "a list, each " + in_words(inner[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(kind.__members__)}"
    if is_dataclass(kind):
        return "some of " + ", ".join(field.name for field in fields(kind))
    return KINDS[kind][0] if kind in KINDS else "another type"


def did_you_mean(key, known):
    """Return the end of a message that names what of `known` is most like `key`, if anything is."""
    in_other_groups = [other for other in known if other.endswith("." + key.partition(".")[2])]
    cutoff = 0 if in_other_groups else 0.6
    near = difflib.get_close_matches(key, in_other_groups or known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""

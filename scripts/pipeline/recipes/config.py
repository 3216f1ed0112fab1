"""The YAML files of configs/: how to read them, their options, and how two of them differ."""

import argparse
import difflib
import re
from dataclasses import fields
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.common.command import BadInput
from pipeline.common.files import read_json
from pipeline.common.folder import flat
from pipeline.common.paths import CONFIGS, PLUGIN, ROOT

# What leaves a row's model and scores as they are: where and how often a run saves, and in which
# steps it makes up the batch. It may differ in a result, and between the sessions of a run.
HARMLESS = {
    "checkpoint.keep_interval_updates",
    "checkpoint.save_dir",
    "checkpoint.save_interval_updates",
    "common.log_interval",
    "dataset.max_tokens",
    "dataset.num_workers",
    "dataset.validate_after_updates",
    "task.data",
}


def rows():
    """Return the names of the papers' rows, such as ``iwslt14_de_en/talkconv``, in order."""
    paths = [path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "verses"]
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in paths)


def find_config(given):
    """Return ``(name, path)`` of a row, such as ``iwslt14_de_en/talkconv``, or of any YAML file.

    A row may be given with ``configs/`` and ``.yaml``. A file elsewhere comes first, and is named
    after itself: ``folder/mine.yaml`` is ``mine``. Raises BadInput, with names that are like it,
    if there is none.
    """
    path = Path(given).resolve()
    if path.suffix == ".yaml" and path.is_file():
        own = path.relative_to(CONFIGS) if path.is_relative_to(CONFIGS) else Path(path.name)
        return own.with_suffix("").as_posix(), path
    name, names = given.removeprefix("configs/").removesuffix(".yaml"), rows()
    if name in names:
        return name, CONFIGS / f"{name}.yaml"
    near = difflib.get_close_matches(name, names, cutoff=0.5) or ["benchmark/system, see configs/"]
    raise BadInput(f"NAME: expected a config such as {' or '.join(near)}, got {given!r}")


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


def chosen_folder(given, config, key, name):
    """Return the folder `given`, else what `config` has at `key`, else that of the row `name`."""
    data, run = f"data-bin/{name.partition('/')[0]}", f"checkpoints/{name}"
    usual = ROOT / {"task.data": data, "checkpoint.save_dir": run}[key]
    return Path(given or OmegaConf.select(config, key) or usual)


def check_average(config, average):
    """Raise BadInput where checkpoints that hold a moving average each are to be averaged."""
    if average > 1 and OmegaConf.select(config, "ema.store_ema"):
        raise BadInput(f"--average: expected 1 of a row with a moving average, got {average}")


def read_results(path):
    """Return the list of results in a JSON. Raises BadInput if there is something else."""
    results = read_json(path, [])
    if not isinstance(results, list):
        raise BadInput(f"--results: expected a JSON list in {path}, got something else")
    return results


def from_header(name, field):
    """Return what the comments that open the row `name` say of a `field`, such as "paper"."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    return re.search(rf"^# {field}: +(.*)$", text, re.MULTILINE)[1]


def hydra_value(value):
    """Return `value` for Hydra's command line, quoted where it needs to be and is not."""
    from hydra.core.override_parser.types import Quote, QuotedString

    value = str(value)
    if re.fullmatch(r"""'.*'|".*"|\[.*\]|\{.*\}|[\w./:@%+-]*""", value, re.ASCII | re.DOTALL):
        return value
    return QuotedString(value, Quote.single).with_quotes()


def hydra_words(overrides):
    """Return ``["GROUP.KEY=VALUE", …]`` as words of Hydra's command line."""
    pairs = (override.lstrip("+").split("=", 1) for override in overrides)
    return [f"++{key}={hydra_value(value)}" for key, value in pairs]


def with_overrides(config, overrides):
    """Return a copy of `config` with ``["GROUP.KEY=VALUE", …]``, read as Hydra reads them, in it.

    Raises BadInput for what Hydra, which reads them for training, cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for override in overrides:
        if not re.match(r"\+{0,2}\w+\.[\w.]+=", override):
            raise BadInput(f"overrides: expected GROUP.KEY=VALUE, got {override!r}")
    try:
        words = OverridesParser.create().parse_overrides(hydra_words(overrides))
        config = OmegaConf.merge(config)
        for word in words:
            OmegaConf.update(config, word.key_or_group, word.value(), force_add=True)
        return config
    except (HydraException, OmegaConfBaseException) as error:
        raise BadInput(f"overrides: {str(error).partition(chr(10))[0]}") from None


def groups_of(config):
    """Return ``{"model": {"_name": …, "dropout": 0.3}, …}``; a group may be a name alone."""
    return {
        group: options if isinstance(options, dict) else {"_name": options}
        for group, options in OmegaConf.to_container(config).items()
    }


def user_dir(config):
    """Return the user directory of `config`: its own, from the project's root, or the plugin."""
    return str(ROOT / (OmegaConf.select(config, "common.user_dir") or PLUGIN))


def import_models(config):
    """Register the models of the user directory of `config`. Raises BadInput if it is not there."""
    import talk_fairseq  # noqa: F401  before anything of fairseq's that it patches

    from fairseq.utils import import_user_module

    if not Path(folder := user_dir(config)).is_dir():
        raise BadInput(f"common.user_dir: expected a folder with models, got {folder}")
    import_user_module(argparse.Namespace(user_dir=folder))


def resolved(config):
    """Return ``{"model.dropout": 0.3}`` of a nested config, with the options that its arch sets."""
    import_models(config)
    from fairseq.models import ARCH_CONFIG_REGISTRY

    model = argparse.Namespace(**groups_of(config)["model"])
    if set_defaults := ARCH_CONFIG_REGISTRY.get(model._name):
        set_defaults(model)
    of_model = {f"model.{key}": value for key, value in vars(model).items()}
    return flat(OmegaConf.to_container(config)) | of_model


def differences(config, other, harmless=HARMLESS):
    """Return ``{key: (value, other value)}`` of the options in which two configs differ.

    An option that only an arch sets is not listed; one that a config states counts with the value
    that the other's arch sets.
    """
    stated = {key for each in (config, other) for key in flat(OmegaConf.to_container(each))}
    one, two = resolved(config), resolved(other)
    pairs = {key: (one.get(key), two.get(key)) for key in sorted(stated - harmless)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def check_options(config, name=""):
    """Raise BadInput for a key that is no option of fairseq's, or a value of another type.

    Also for a `name` of the config that fairseq gives to a group of options.

    Hydra adds what it does not know, and fairseq's older models take any key. Importing what knows
    them takes seconds.
    """
    import_models(config)
    from fairseq.dataclass.configs import FairseqConfig

    if hasattr(FairseqConfig, name):
        raise BadInput(f"NAME: expected another name than of fairseq's options, got {name}.yaml")
    for group, options in groups_of(config).items():
        schema = schema_of(group, options.get("_name"))
        for key, value in options.items():
            try:
                OmegaConf.merge(schema, {key: value})
            except OmegaConfBaseException as error:
                raise BadInput(f"{group}.{key}: {str(error).splitlines()[0]}") from None


def schema_of(group, name):
    """Return a config of all options of a group of fairseq's, such as "model", by its `name`.

    It has their types, except for older models, which declare flags.
    """
    from hydra.conf import HydraConf

    from fairseq import models, tasks
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.registry import REGISTRIES

    declared = {field.name: field.type for field in fields(FairseqConfig)} | {"hydra": HydraConf}
    if group not in declared:
        raise BadInput(f"options: expected groups {', '.join(declared)}, got {group}")
    registries = {key: registry["registry"] for key, registry in REGISTRIES.items()}
    registries |= {"model": models.ARCH_MODEL_REGISTRY, "task": tasks.TASK_REGISTRY}
    if group not in registries:
        return OmegaConf.structured(declared[group])
    if name not in registries[group]:
        raise BadInput(f"{group}._name: expected one that fairseq registers, got {name!r}")
    cls = registries[group][name]
    if dataclass := getattr(cls, "__dataclass", None):
        return OmegaConf.structured(dataclass)
    parser = argparse.ArgumentParser()
    cls.add_args(parser)
    flags = OmegaConf.create(dict.fromkeys(["_name", *(flag.dest for flag in parser._actions)]))
    OmegaConf.set_struct(flags, True)
    return flags

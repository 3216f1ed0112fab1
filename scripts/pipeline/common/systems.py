"""The systems of the comparison and the quick starts: flags of fairseq-train in YAML files."""

import re
from dataclasses import dataclass

import yaml

from pipeline.common.paths import CONFIGS

FOLDER = CONFIGS / "verses"


@dataclass(frozen=True)
class Schedule:
    """How all systems of a preset are trained, and over what speed is measured.

    Attributes:
        updates: of a run.
        seeds: runs of a system.
        rates: peak learning rates that each system tries, as texts.
        warmup: updates over which the rate rises.
        max_tokens: tokens of a batch.
        checkpoints: that a run saves, each with a validation.
        averaged: of the last checkpoints.
        batches, generated: of a turn of the speed measurement, in training and in generation.
        source: tokens of a source that are read, of an encoder-decoder.
        block: tokens that a language model sees at once.
    """

    updates: int
    seeds: int
    rates: tuple
    warmup: int
    max_tokens: int
    checkpoints: int
    averaged: int
    batches: int
    generated: int
    source: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class Preset:
    """The systems that are compared with each other.

    Attributes:
        reference: the system whose size the others are given.
        reference_ffn: the width of its feed-forward layers.
        schedules: ``{task: Schedule}``.
        systems: ``{name: {flag: value}}``; see `words`.
    """

    reference: str
    reference_ffn: int
    schedules: dict
    systems: dict


def read_preset(name):
    """Return the preset of ``configs/verses/NAME.yaml``, such as ``cpu_lm``."""
    read = read_yaml(name)
    schedules = {
        task: Schedule(**{**schedule, "rates": tuple(map(str, schedule["rates"]))})
        for task, schedule in read["schedules"].items()
    }
    return Preset(read["reference"], read["reference_ffn"], schedules, read["systems"])


def read_yaml(name):
    """Return what ``configs/verses/NAME.yaml`` holds, with its anchors resolved."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def words(flags):
    """Return ``{flag: value}`` as words of a command: true is a flag alone, false and null none."""
    given = []
    for flag, value in flags.items():
        if value is True:
            given.append(f"--{flag}")
        elif value is not None and value is not False:
            given += [f"--{flag}", str(value)]
    return given


def with_width(flags, width):
    """Return the flags of a system with the number `width` in place of FFN."""
    return {
        flag: re.sub(r"\bFFN\b", str(width), value) if isinstance(value, str) else value
        for flag, value in flags.items()
    }

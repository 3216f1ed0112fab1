"""The systems of the comparison and the quick starts: flags of fairseq-train in YAML files."""

import yaml

from pipeline.common.paths import CONFIGS

FOLDER = CONFIGS / "verses"


def read_systems(name):
    """Return what ``configs/verses/NAME.yaml`` holds, where comments say what its keys are."""
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

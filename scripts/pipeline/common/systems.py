"""The systems of the comparison and the quick starts: flags of fairseq-train in YAML files."""

import yaml

from pipeline.common.paths import CONFIGS, ROOT

FOLDER = CONFIGS / "verses"


def read_systems(name):
    """Return what ``configs/verses/NAME.yaml`` holds, where comments say what its keys are.

    A system's own `user-dir` becomes a whole path; in the file it is from the project's root on.
    """
    found = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for flags in (found.get("systems", {}) | found.get("ablations", {})).values():
        if "user-dir" in flags:
            flags["user-dir"] = str(ROOT / flags["user-dir"])
    return found


def words(flags):
    """Return ``{flag: value}`` as words of a command: true is a flag alone, false and null none."""
    given = []
    for flag, value in flags.items():
        if value is True:
            given.append(f"--{flag}")
        elif value is not None and value is not False:
            given += [f"--{flag}", str(value)]
    return given
